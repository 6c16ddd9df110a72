"""Deltas of uint8 tensors (codes of 8-bit optimizers) use base and contexts only where these save bytes."""

from pathlib import Path

import numpy as np
import pytest

from ckptz import inspect
from ckptz.format.sources import CHUNK_VALUES
from ckptz.numpy import load_file, save_file

SIZES = [1 << 16, CHUNK_VALUES + 4096]  # elements: one chunk, which is encoded in a batch, and two chunks


def codes_of(values: np.ndarray) -> np.ndarray:
    """Quantize values to uint8 codes of similar frequency, as a blockwise dynamic map does."""
    magnitudes = np.clip(16 * np.log2(np.abs(values) + 1e-9) + 127, 0, 127)
    return (magnitudes + 128 * (values < 0)).astype(np.uint8)


@pytest.mark.parametrize("n", SIZES)
def test_a_delta_to_unrelated_codes_is_no_larger_than_a_full_file(n: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before, after = ({"state1": codes_of(rng.standard_normal(n))} for _ in range(2))
    save_file(before, tmp_path / "a.ckptz")
    save_file(after, tmp_path / "b.ckptz", base=tmp_path / "a.ckptz")
    save_file(after, tmp_path / "full.ckptz")
    delta_bytes, full_bytes = (inspect(tmp_path / name).stored_bytes for name in ("b.ckptz", "full.ckptz"))
    assert delta_bytes < full_bytes + 1000
    assert np.array_equal(load_file(tmp_path / "b.ckptz")["state1"], after["state1"])


@pytest.mark.parametrize("n", SIZES)
def test_contexts_save_bytes_where_the_base_predicts_which_codes_change(n: int, tmp_path: Path) -> None:
    """Half of the codes with magnitudes above 100 change, and 1 % of the others."""
    rng = np.random.default_rng(0)
    before = codes_of(rng.standard_normal(n))
    after = before + (rng.random(n) < np.where(before % 128 > 100, 0.5, 0.01)).astype(np.uint8)
    save_file({"state2": before}, tmp_path / "a.ckptz")
    save_file({"state2": after}, tmp_path / "b.ckptz", base=tmp_path / "a.ckptz")
    save_file({"state2": after}, tmp_path / "c.ckptz", base=tmp_path / "a.ckptz", effort="fast")
    with_contexts, without_contexts = (
        inspect(tmp_path / name).stored_bytes for name in ("b.ckptz", "c.ckptz")
    )
    assert with_contexts < 0.95 * without_contexts
    assert np.array_equal(load_file(tmp_path / "b.ckptz")["state2"], after)
