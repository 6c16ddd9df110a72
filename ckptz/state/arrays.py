"""Arrays for decoded tensors, and the index rules of slices.

The index rules are those of safetensors' numpy slices, and of every slice with backend="pread": ints, slices
with bounds inside the tensor and a positive step, and one ellipsis. Invalid indices raise the errors of
safetensors; reversed bounds, on which safetensors crashes, raise too.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckptz.errors import CkptzError, DTypeError
from ckptz.format.dtypes import DTYPE_NAMES, DType
from ckptz.format.sources import CHUNK_VALUES, PATTERN_TYPES, Patterns

Dims = tuple[tuple[int, int], ...]  # (size, stride), strides falling
Shape = tuple[int, ...]
_Pick: TypeAlias = tuple[int | None, int | None, int, bool]  # start, stop, step, is the dimension kept
_MAX_INT: Final = (1 << 31) - 1
_MAX_STEP: Final = (1 << 63) - 1
_MAX_BOUND: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class WindowPart:
    """The part of a window in one chunk.

    Attributes:
        chunk: number of the chunk.
        offset: first pattern in the chunk.
        dims: (size, stride) of each dimension, in patterns.
        at: offset in the result, in patterns.
    """

    chunk: int
    offset: int
    dims: Dims
    at: int

    @property
    def n_patterns(self) -> int:
        """Number of patterns of the part."""
        return math.prod(size for size, _ in self.dims)

    @property
    def is_run(self) -> bool:
        """True if the patterns are contiguous."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1] == 1)

    def copy(self, chunk: Patterns, out: Patterns) -> None:
        """Copy the patterns from their chunk into `out`."""
        sizes = tuple(size for size, _ in self.dims)
        strides = tuple(stride * chunk.itemsize for _, stride in self.dims)
        picked = as_strided(chunk[self.offset :], sizes, strides, writeable=False)
        out[self.at : self.at + self.n_patterns].reshape(sizes)[...] = picked


@dataclass(frozen=True, slots=True)
class Window:
    """A strided box in a flat tensor, with increasing offsets in row-major order.

    Attributes:
        offset: first pattern.
        sizes: size of each dimension.
        strides: stride of each dimension, in patterns.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def n_patterns(self) -> int:
        """Number of patterns of the window."""
        return math.prod(self.sizes)

    def widened(self, n: int) -> Window:
        """Return the window for elements of `n` patterns."""
        if n == 1:
            return self
        strides = tuple(stride * n for stride in self.strides)
        return Window(self.offset * n, (*self.sizes, n), (*strides, 1))

    def pieces(self) -> Iterator[WindowPart]:
        """Yield the parts of the window, split at chunk bounds."""
        if not self.n_patterns:
            return
        dims: list[tuple[int, int]] = []  # without those of one element, and merged where they are dense
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride:
                dims[-1] = (dims[-1][0] * size, stride)
            else:
                dims.append((size, stride))
        yield from _pieces(self.offset, tuple(dims), 0)


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor in C order, in elements, as PyTorch computes them."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def _span(dims: Dims) -> int:
    return 1 + sum((size - 1) * stride for size, stride in dims)


def _pieces(offset: int, dims: Dims, at: int) -> Iterator[WindowPart]:
    chunk, within = divmod(offset, CHUNK_VALUES)
    if within + _span(dims) <= CHUNK_VALUES:
        yield WindowPart(chunk, within, dims, at)
        return
    (n_rows, stride), row = dims[0], dims[1:]
    row_span, row_patterns = _span(row), math.prod(size for size, _ in row)
    i = 0
    while i < n_rows:
        begin, row_at = offset + i * stride, at + i * row_patterns
        left = CHUNK_VALUES - begin % CHUNK_VALUES
        n_fitting = min((left - row_span) // stride + 1, n_rows - i)
        if n_fitting > 0:
            yield WindowPart(begin // CHUNK_VALUES, begin % CHUNK_VALUES, ((n_fitting, stride), *row), row_at)
        else:  # this row crosses the end of its chunk
            yield from _pieces(begin, row, row_at)
        i += max(n_fitting, 1)


def select(index: Any, shape: Shape) -> tuple[Window, Shape]:
    """Return the window of an index, in elements, and the shape of the result.

    Raises:
        SafetensorError: an unsupported index, or one out of range.
        OverflowError: a slice with a negative bound.
        TypeError: a slice with a bound that is no integer.
    """
    items = _items(index, len(shape))
    picks = [_pick(item, d, shape[d] if d < len(shape) else 0) for d, item in enumerate(items)]
    prefix = f"Error during slicing [{', '.join(map(_index_text, picks))}] with shape {list(shape)}: "
    if len(picks) > len(shape):
        raise CkptzError(f"{prefix}more slicing indexes than dimensions in tensor")
    bounds = [_in_range(pick, d, shape[d], prefix) for d, pick in enumerate(picks)]
    bounds += [(0, n, 1, True) for n in shape[len(picks) :]]
    strides = c_strides(shape)
    sizes = tuple(math.ceil((stop - start) / step) for start, stop, step, _ in bounds)
    offset = sum(start * stride for (start, *_), stride in zip(bounds, strides, strict=True))
    steps = tuple(step * stride for (_, _, step, _), stride in zip(bounds, strides, strict=True))
    kept = tuple(n for n, (*_, is_kept) in zip(sizes, bounds, strict=True) if is_kept)
    return Window(offset, sizes, steps), kept


def _items(index: Any, n_dims: int) -> list[Any]:
    """Return an item for each indexed dimension, with an ellipsis replaced by slices."""
    if isinstance(index, list):
        if index:
            raise CkptzError("Non empty lists are not implemented; take a slice, an int or an ellipsis")
        return [slice(0, 0)]
    items = list(index) if isinstance(index, tuple) else [index]
    at = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(at) > 1:
        raise CkptzError("Only one ellipsis (...) is allowed in slice index")
    missing = max(n_dims - len(items) + 1, 0)
    return items if not at else items[: at[0]] + [slice(None)] * missing + items[at[0] + 1 :]


def _pick(item: Any, dim: int, size: int) -> _Pick:
    """Return start, stop and step of an item, and whether it is a slice; indices count from the start."""
    if not isinstance(item, slice):
        try:
            number = operator.index(item)
        except (TypeError, ValueError):
            number = None
        if number is None or not -_MAX_INT - 1 <= number <= _MAX_INT:
            what = "expected slice, int, or ellipsis"
            raise CkptzError(f"Unsupported slice index at position {dim}: {what}, got {type(item).__name__}")
        if number + size < 0:
            raise CkptzError(f"Invalid index {number} for dimension {dim} of size {size}")
        number += size if number < 0 else 0
        return number, number + 1, 1, False
    start = None if item.start is None else _bound(item.start)
    stop = None if item.stop is None else _bound(item.stop)
    step = 1 if item.step is None else operator.index(item.step)
    if abs(step) > _MAX_STEP:
        raise OverflowError(f"slice step {step} is too large")
    if step < 1:
        raise CkptzError(f"Slice step must be a positive integer, got {step}")
    return start, stop, step, True


def _bound(value: Any) -> int:
    number = operator.index(value)
    if not 0 <= number <= _MAX_BOUND:
        raise OverflowError(f"slice bound {number} is negative or too large; count from the start")
    return number


def _index_text(pick: _Pick) -> str:
    start, stop, step, is_slice = pick
    if not is_slice:
        return str(start)
    first, last = ("" if bound is None else bound for bound in (start, stop))
    return f"{first}:{last}" if step == 1 else f"{first}:{last}:{step}"


def _in_range(pick: _Pick, dim: int, size: int, prefix: str) -> tuple[int, int, int, bool]:
    """Return a pick with both bounds; raise if it is out of range."""
    start, stop, step, is_kept = pick
    start, stop = start or 0, size if stop is None else stop
    if start >= size or stop > size:
        beyond = start if start >= size else stop - 1
        what = f"index {beyond} out of bounds for tensor dimension #{dim} of size {size}"
        raise CkptzError(f"{prefix}{what}")
    if stop < start:
        raise CkptzError(f"slice {start}:{stop} of dimension {dim} ends before it begins")
    return start, stop, step, is_kept


# --- arrays of a framework ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The patterns of an indexed tensor, and how they become the result.

    Attributes:
        window: the patterns to decode.
        shape: shape of the framework's tensor of these patterns.
        then: function that indexes that tensor further, or None.
    """

    window: Window
    shape: Shape
    then: Callable[[Any], Any] | None = None


def patterns_per_element(dtype: DType) -> int:
    """Return the number of patterns of an element; at least 1, as sub-byte types are packed."""
    return max(dtype.bits // (8 * dtype.pattern_bytes), 1)


# --- numpy; further dtypes exist once the caller has imported ml_dtypes -------------------------------------


@functools.cache  # errors are not cached, as ml_dtypes may be imported later
def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype for `dtype`.

    Raises:
        DTypeError: numpy has none, or ml_dtypes is not imported.
    """
    name = dtype.name
    if name not in DTYPE_NAMES:
        raise DTypeError(f"numpy has no dtype for {name}; load with framework 'pt'")
    try:
        return np.dtype(DTYPE_NAMES[name])
    except TypeError:
        raise DTypeError(
            f"numpy has no dtype for {name}; import ml_dtypes, or load with framework 'pt'"
        ) from None


class Framework:
    """Creates numpy arrays; a subclass creates tensors of another framework."""

    __slots__ = ()

    def shape_of(self, dtype: DType, shape: Shape) -> Shape:
        """Return the shape in the framework, which may pack several elements into one."""
        del dtype
        return shape

    def allocate(self, dtype: DType, shape: Shape) -> tuple[Any, Patterns]:
        """Return an uninitialized tensor of a shape of the framework, and a writable view of its patterns.

        Raises:
            DTypeError: the framework has no such dtype.
        """
        array = np.empty(shape, numpy_dtype(dtype))
        return array, array.reshape(-1).view(PATTERN_TYPES[dtype.pattern_bytes])

    def select(self, index: Any, dtype: DType, shape: Shape) -> Selection:
        """Return the selection of `index`; invalid indices raise the framework's errors."""
        window, kept = select(index, shape)
        return Selection(window.widened(patterns_per_element(dtype)), kept)

    def finish(self, tensor: Any) -> Any:
        """Move the tensor to the caller's device."""
        return tensor
