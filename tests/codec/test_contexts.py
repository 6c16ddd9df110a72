"""Runs of a tensor that has no base share tables by the scale of their values."""

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

ROWS, COLUMNS = 3000, 384  # more than a chunk, whose end is within a row


def _weights(*, narrow: bool) -> Any:
    """Rows of two scales; the first half of a narrower type, if asked for."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    values *= np.where(rng.random(ROWS) < 0.5, 1.0, 0.2).astype(np.float32)[:, None]
    if narrow:
        values[: ROWS // 2] = values[: ROWS // 2].astype(np.float16)
    return values


def _rules(path: Path) -> tuple[Any, ...]:
    return Container(FileBytes(path)).tensors["w"].header.plan.rules


@pytest.mark.parametrize("narrow", [False, True])
def test_rows_of_two_scales_have_tables_of_their_own_and_come_back(tmp_path: Path, narrow: bool) -> None:
    values, path = _weights(narrow=narrow), tmp_path / "w.ckptz"
    save_file({"w": values}, path)
    [rule] = _rules(path)
    assert isinstance(rule, Block)
    assert rule.size == COLUMNS
    np.testing.assert_array_equal(load_file(path)["w"].view(np.uint32), values.view(np.uint32))


def test_contexts_make_a_file_smaller_than_rows_in_any_order_would(tmp_path: Path) -> None:
    values = _weights(narrow=False)
    mixed = np.random.default_rng(6).permuted(values, axis=0)  # each column by itself: rows are all alike
    for name, of in (("rows", values), ("mixed", mixed)):
        save_file({"w": of}, tmp_path / name)
    assert not _rules(tmp_path / "mixed")
    assert (tmp_path / "rows").stat().st_size < 0.99 * (tmp_path / "mixed").stat().st_size


def test_tensors_with_more_rows_than_a_frame_may_label_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (frame, run_contexts):
        monkeypatch.setattr(module, "MAX_INDICES", ROWS - 1, raising=False)
    values, path = _weights(narrow=False), tmp_path / "w.ckptz"
    save_file({"w": values}, path)
    np.testing.assert_array_equal(load_file(path)["w"], values)


@pytest.mark.parametrize("n_rest", [0, 128, 384])
def test_flat_tensors_have_runs_too(tmp_path: Path, n_rest: int) -> None:
    values, path = _weights(narrow=False).reshape(-1)[: 512 * 768 + n_rest], tmp_path / "w.ckptz"
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
def test_lengths_that_no_run_divides_come_back(tmp_path: Path, n: int, dtype: Any) -> None:
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
def test_contexts_of_scale_are_used_where_they_save_what_the_effort_asks_for(
    tmp_path: Path, scale: float, effort: Any, has_contexts: bool
) -> None:
    values = np.random.default_rng(3).standard_normal((1024, 512)).astype(np.float32)
    values[::2] *= scale
    save_file({"w": values}, tmp_path / "w.ckptz", effort=effort)
    assert bool(_rules(tmp_path / "w.ckptz")) is has_contexts
    np.testing.assert_array_equal(load_file(tmp_path / "w.ckptz")["w"], values)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_random_low_bytes_of_a_delta_are_stored_beside_high_ones_with_contexts(
    tmp_path: Path, dtype: type
) -> None:
    rng, high = np.random.default_rng(7), 8 * np.dtype(dtype).itemsize - 8
    before = rng.integers(1 << (high + 2), 1 << (high + 6), 30_000, dtype)
    before[::2] >>= dtype(3)  # larger values move further
    moves = rng.integers(0, 1 << high, len(before), dtype) + (before >> dtype(high + 2) << dtype(high))
    after = np.where(rng.random(len(before)) < 0.5, before + moves, before - moves)
    save_file({"w": before}, tmp_path / "a.ckptz")
    save_file({"w": after}, tmp_path / "b.ckptz", base=tmp_path / "a.ckptz")
    header = Container(FileBytes(tmp_path / "b.ckptz")).tensors["w"].header
    coders = [CoderId(stream.coder) for stream in header.chunks[0].streams]
    assert header.plan.rules
    assert coders == [CoderId.STORED] * (len(coders) - 1) + [CoderId.RANS_SHARED]
    np.testing.assert_array_equal(load_file(tmp_path / "b.ckptz")["w"], after)
