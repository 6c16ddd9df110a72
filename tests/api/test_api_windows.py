"""Windows: an index is split into pieces within one chunk each that cover exactly its elements."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptz.state import arrays
from ckptz.state.arrays import Window, WindowPart
from ckptz.state.frameworks import parse_device
from ckptz.state.torch import _select

CHUNK = 7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "CHUNK_VALUES", CHUNK)


def gather(pieces: list[WindowPart], flat: np.ndarray, n_patterns: int) -> np.ndarray:
    out = np.full(n_patterns, 255, np.uint8)
    for piece in pieces:
        chunk = flat[piece.chunk * CHUNK : (piece.chunk + 1) * CHUNK]
        ends = piece.offset + sum((size - 1) * stride for size, stride in piece.dims)
        assert 0 <= piece.offset <= ends < len(chunk), "a piece stays in its chunk"
        piece.copy(chunk, out)
    return out


@st.composite
def boxes(draw: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    items = []
    for n in shape:
        begin = draw(st.integers(0, n - 1))
        part = st.builds(slice, st.just(begin), st.integers(begin, n), st.integers(1, n))
        items.append(draw(st.one_of(st.just(begin), part, st.just(slice(None)), part)))
    return shape, tuple(items)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(box=boxes(), per_element=st.sampled_from([1, 2]))
def test_pieces_cover_the_elements_of_an_index(
    box: tuple[tuple[int, ...], tuple[Any, ...]], per_element: int
) -> None:
    shape, index = box
    flat = np.arange(math.prod(shape) * per_element, dtype=np.uint8) % 251
    window = _select(index, shape).window
    widened = window.widened(per_element)
    pieces = list(widened.pieces())
    expected = flat.reshape(*shape, per_element)[index]
    assert gather(pieces, flat, widened.n_patterns).tobytes() == expected.tobytes()
    assert [piece.chunk for piece in pieces] == sorted(piece.chunk for piece in pieces)
    assert sum(piece.n_patterns for piece in pieces) == expected.size


def test_a_contiguous_run_has_one_piece_per_chunk() -> None:
    pieces = list(Window(5, (3, 4), (4, 1)).pieces())
    assert [(p.chunk, p.offset, p.n_patterns, p.at) for p in pieces] == [
        (0, 5, 2, 0),
        (1, 0, 7, 2),
        (2, 0, 3, 9),
    ]
    assert all(piece.is_run for piece in pieces)


@pytest.mark.parametrize(
    ("device", "parsed"),
    [
        *((None, "cpu"), ("cuda", "cuda:0"), ("cuda:+3", "cuda:3"), ("mps:0", "mps"), (True, 1), (7, 7)),
        ("hpu", "hpu:0"),
    ],
)
def test_devices(device: Any, parsed: Any) -> None:
    assert parse_device(device) == parsed
