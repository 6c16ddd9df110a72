"""Deltas of bytes, as the codes of 8-bit optimizers: contexts are used where they save, and nowhere else."""

from pathlib import Path

import numpy as np
import pytest

from ckptz import inspect
from ckptz.format.sources import CHUNK_VALUES
from ckptz.numpy import load_file, save_file

SIZES = [1 << 16, CHUNK_VALUES + 4096]  # of one chunk, which is coded in a batch, and of two


def codes_of(values: np.ndarray) -> np.ndarray:
    """Code values as a blockwise dynamic map does: nearly as often by each code."""
    magnitudes = np.clip(16 * np.log2(np.abs(values) + 1e-9) + 127, 0, 127)
    return (magnitudes + 128 * (values < 0)).astype(np.uint8)


@pytest.mark.parametrize("n", SIZES)
def test_codes_that_the_base_tells_nothing_of_take_no_more_than_without_it(n: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before, after = ({"state1": codes_of(rng.standard_normal(n))} for _ in range(2))
    save_file(before, tmp_path / "a.ckptz")
    save_file(after, tmp_path / "b.ckptz", base=tmp_path / "a.ckptz")
    save_file(after, tmp_path / "alone.ckptz")
    delta, alone = (inspect(tmp_path / name).stored_bytes for name in ("b.ckptz", "alone.ckptz"))
    assert delta < alone + 1000
    assert np.array_equal(load_file(tmp_path / "b.ckptz")["state1"], after["state1"])


@pytest.mark.parametrize("n", SIZES)
def test_contexts_stay_where_the_base_tells_which_codes_change(n: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before = codes_of(rng.standard_normal(n))
    after = before + (rng.random(n) < np.where(before % 128 > 100, 0.5, 0.01)).astype(np.uint8)
    save_file({"state2": before}, tmp_path / "a.ckptz")
    save_file({"state2": after}, tmp_path / "b.ckptz", base=tmp_path / "a.ckptz")
    save_file({"state2": after}, tmp_path / "c.ckptz", base=tmp_path / "a.ckptz", effort="fast")
    with_contexts, without = (inspect(tmp_path / name).stored_bytes for name in ("b.ckptz", "c.ckptz"))
    assert with_contexts < 0.95 * without
    assert np.array_equal(load_file(tmp_path / "b.ckptz")["state2"], after)
