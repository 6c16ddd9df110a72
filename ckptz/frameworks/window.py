"""Which units of a flat tensor an index picks, and how they fall onto chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from numpy.lib.stride_tricks import as_strided

from ckptz.codec.units import CHUNK_UNITS, Units

Dims = tuple[tuple[int, int], ...]  # (size, stride), strides falling


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a window that lies in one chunk.

    Attributes:
        chunk: which chunk.
        offset: first unit, counted from the start of the chunk.
        dims: (size, stride) of each dimension.
        at: where it belongs in the result, in units.
    """

    chunk: int
    offset: int
    dims: Dims
    at: int

    @property
    def n_units(self) -> int:
        """Units that the piece picks."""
        return math.prod(size for size, _ in self.dims)

    @property
    def is_run(self) -> bool:
        """Whether the units lie side by side."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1] == 1)

    def copy(self, chunk: Units, out: Units) -> None:
        """Take the units from their chunk to their place in `out`."""
        sizes = tuple(size for size, _ in self.dims)
        strides = tuple(stride * chunk.itemsize for _, stride in self.dims)
        picked = as_strided(chunk[self.offset :], sizes, strides, writeable=False)
        out[self.at : self.at + self.n_units].reshape(sizes)[...] = picked


@dataclass(frozen=True, slots=True)
class Window:
    """A strided box in a flat tensor; in row-major order its offsets rise.

    Attributes:
        offset: first unit.
        sizes: units along each dimension.
        strides: units from one to the next along each dimension.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Window:
        """Give the window of all of a dense tensor."""
        return cls(0, tuple(shape), row_major_strides(shape))

    @property
    def n_units(self) -> int:
        """Units that the window picks."""
        return math.prod(self.sizes)

    def widened(self, n: int) -> Window:
        """Give the window of the same box where every element is `n` units."""
        if n == 1:
            return self
        strides = tuple(stride * n for stride in self.strides)
        return Window(self.offset * n, (*self.sizes, n), (*strides, 1))

    def pieces(self, at: int = 0) -> Iterator[Piece]:
        """Cut the window by chunks, first to last; its result starts at `at`."""
        if self.n_units:
            yield from _pieces(self.offset, self._merged_dims(), at)

    def _merged_dims(self) -> Dims:
        dims: list[tuple[int, int]] = []
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride:
                dims[-1] = (dims[-1][0] * size, stride)
            else:
                dims.append((size, stride))
        return tuple(dims)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the strides of a dense tensor, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _span(dims: Dims) -> int:
    return 1 + sum((size - 1) * stride for size, stride in dims)


def _pieces(offset: int, dims: Dims, at: int) -> Iterator[Piece]:
    chunk, within = divmod(offset, CHUNK_UNITS)
    if within + _span(dims) <= CHUNK_UNITS:
        yield Piece(chunk, within, dims, at)
        return
    (n_rows, stride), row = dims[0], dims[1:]
    row_span, row_units = _span(row), math.prod(size for size, _ in row)
    i = 0
    while i < n_rows:
        begin, row_at = offset + i * stride, at + i * row_units
        left = CHUNK_UNITS - begin % CHUNK_UNITS
        n_fitting = min((left - row_span) // stride + 1, n_rows - i)
        if n_fitting > 0:
            yield Piece(begin // CHUNK_UNITS, begin % CHUNK_UNITS, ((n_fitting, stride), *row), row_at)
        else:  # this row runs over the end of its chunk
            yield from _pieces(begin, row, row_at)
        i += max(n_fitting, 1)
