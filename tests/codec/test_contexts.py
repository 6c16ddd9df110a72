"""Tensors without a base: runs of elements, such as rows, share frequency tables by scale."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptz.codec import run_contexts
from ckptz.format import frame
from ckptz.format.byte_source import FileBytes
from ckptz.format.context_rules import Block
from ckptz.format.reader import Container
from ckptz.format.streams import CoderId
from ckptz.numpy import load_file, save_file

ROWS, COLUMNS = 3000, 384  # two chunks, with their border inside a row


def _weights(*, narrow: bool) -> Any:
    """Return float32 weights [ROWS, COLUMNS] whose rows have scale 1 or 0.2.

    If `narrow`, the first half of the rows has float16 precision: low mantissa bits are zero.
    """
    rng = np.random.default_rng(5)
    values = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    values *= np.where(rng.random(ROWS) < 0.5, 1.0, 0.2).astype(np.float32)[:, None]
    if narrow:
        values[: ROWS // 2] = values[: ROWS // 2].astype(np.float16)
    return values


def _rules(path: Path) -> tuple[Any, ...]:
    """Return the context rules of tensor "w" in a file."""
    return Container(FileBytes(path)).tensors["w"].header.plan.rules


@pytest.mark.parametrize("narrow", [False, True])
def test_rows_of_two_scales_have_separate_tables_and_are_restored_exactly(
    tmp_path: Path, narrow: bool
) -> None:
    values, path = _weights(narrow=narrow), tmp_path / "w.ckptz"
    save_file({"w": values}, path)
    [rule] = _rules(path)
    assert isinstance(rule, Block)
    assert rule.size == COLUMNS
    np.testing.assert_array_equal(load_file(path)["w"].view(np.uint32), values.view(np.uint32))


def test_contexts_save_one_percent_where_rows_differ_in_scale(tmp_path: Path) -> None:
    values = _weights(narrow=False)
    # Each column is shuffled separately, so that all rows have the same mixture of scales.
    mixed = np.random.default_rng(6).permuted(values, axis=0)
    save_file({"w": values}, tmp_path / "rows")
    save_file({"w": mixed}, tmp_path / "mixed")
    assert not _rules(tmp_path / "mixed")
    assert (tmp_path / "rows").stat().st_size < 0.99 * (tmp_path / "mixed").stat().st_size


def test_tensors_with_more_rows_than_a_frame_may_label_are_restored_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (frame, run_contexts):
        monkeypatch.setattr(module, "MAX_INDICES", ROWS - 1, raising=False)
    values, path = _weights(narrow=False), tmp_path / "w.ckptz"
    save_file({"w": values}, path)
    np.testing.assert_array_equal(load_file(path)["w"], values)


@pytest.mark.parametrize("n_remaining", [0, 128, 384])
def test_one_dimensional_tensors_have_runs_of_512_elements(tmp_path: Path, n_remaining: int) -> None:
    values, path = _weights(narrow=False).reshape(-1)[: 512 * 768 + n_remaining], tmp_path / "w.ckptz"
    values[: 1 << 16] *= 64
    save_file({"w": values}, path, effort="small")
    [rule] = _rules(path)
    assert (type(rule), rule.size) == (Block, 512)
    np.testing.assert_array_equal(load_file(path)["w"], values)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        ((1 << 18) + 32, np.float32),
        ((1 << 19) + 100, np.float16),
        ((1 << 20) + 64, np.float32),
        ((1 << 20) + 512 * 3 + 256, np.float16),
        ((1 << 18) + 32, np.float64),
    ],
)
def test_tensors_that_runs_do_not_divide_are_restored_exactly(tmp_path: Path, n: int, dtype: Any) -> None:
    values = (np.random.default_rng(n).standard_normal(n) * np.repeat([1, 64], [n // 3, n - n // 3])).astype(
        dtype
    )
    for shape in ((n,), (2, n // 2), (n // 4, 4)):
        save_file({"w": values.reshape(shape)}, tmp_path / "w.ckptz")
        np.testing.assert_array_equal(load_file(tmp_path / "w.ckptz")["w"], values.reshape(shape))


@pytest.mark.parametrize(
    ("scale", "effort", "has_contexts"),
    [(1.5, "default", False), (1.5, "small", True), (8, "default", True), (8, "fast", False)],
)
def test_contexts_by_scale_are_used_if_they_save_the_share_that_the_effort_requires(
    tmp_path: Path, scale: float, effort: Any, has_contexts: bool
) -> None:
    values = np.random.default_rng(3).standard_normal((1024, 512)).astype(np.float32)
    values[::2] *= scale
    save_file({"w": values}, tmp_path / "w.ckptz", effort=effort)
    assert bool(_rules(tmp_path / "w.ckptz")) is has_contexts
    np.testing.assert_array_equal(load_file(tmp_path / "w.ckptz")["w"], values)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_random_low_bytes_of_a_delta_are_stored_and_its_high_bytes_have_contexts(
    tmp_path: Path, dtype: type
) -> None:
    rng, n_low_bits = np.random.default_rng(7), 8 * np.dtype(dtype).itemsize - 8
    before = rng.integers(1 << (n_low_bits + 2), 1 << (n_low_bits + 6), 30_000, dtype)
    before[::2] >>= dtype(3)
    # The high byte of a change grows with the value, so contexts by magnitude save bytes.
    changes = before >> dtype(n_low_bits + 2) << dtype(n_low_bits)
    changes += rng.integers(0, 1 << n_low_bits, len(before), dtype)
    after = np.where(rng.random(len(before)) < 0.5, before + changes, before - changes)
    save_file({"w": before}, tmp_path / "a.ckptz")
    save_file({"w": after}, tmp_path / "b.ckptz", base=tmp_path / "a.ckptz")
    header = Container(FileBytes(tmp_path / "b.ckptz")).tensors["w"].header
    coders = [CoderId(stream.coder) for stream in header.chunks[0].streams]
    assert header.plan.rules
    assert coders == [CoderId.STORED] * (len(coders) - 1) + [CoderId.RANS_SHARED]
    np.testing.assert_array_equal(load_file(tmp_path / "b.ckptz")["w"], after)
