"""The arrays that tensors are decoded into, numpy's or PyTorch's, and what an index picks of a tensor.

The index rules are those of safetensors' numpy slices, and of every slice under backend="pread": ints,
slices with bounds inside the tensor and a positive step, and one ellipsis. Indices that safetensors refuses
are refused here with the same class of error in its words; only its crash on reversed bounds is an error of
ours.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckptz.errors import CkptzError, DTypeError
from ckptz.format.dtypes import DTYPE_NAMES, DType
from ckptz.format.sources import CHUNK_VALUES, PATTERN_TYPES, Patterns

Dims = tuple[tuple[int, int], ...]  # (size, stride), strides falling
Shape = tuple[int, ...]
_Bounds: TypeAlias = tuple[int | None, int | None, int]  # start, stop, step
_MAX_INT: Final = (1 << 31) - 1
_MAX_STEP: Final = (1 << 63) - 1
_MAX_BOUND: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class WindowPart:
    """The part of a window that lies in one chunk.

    Attributes:
        chunk: which chunk.
        offset: first pattern, counted from the start of the chunk.
        dims: (size, stride) of each dimension.
        at: where it belongs in the result, in patterns.
    """

    chunk: int
    offset: int
    dims: Dims
    at: int

    @property
    def n_patterns(self) -> int:
        """Patterns of the part."""
        return math.prod(size for size, _ in self.dims)

    @property
    def is_run(self) -> bool:
        """True if the patterns are contiguous."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1] == 1)

    def copy(self, chunk: Patterns, out: Patterns) -> None:
        """Take the patterns from their chunk to their place in `out`."""
        sizes = tuple(size for size, _ in self.dims)
        strides = tuple(stride * chunk.itemsize for _, stride in self.dims)
        picked = as_strided(chunk[self.offset :], sizes, strides, writeable=False)
        out[self.at : self.at + self.n_patterns].reshape(sizes)[...] = picked


@dataclass(frozen=True, slots=True)
class Window:
    """A strided box in a flat tensor; in row-major order its offsets rise.

    Attributes:
        offset: first pattern.
        sizes: patterns along each dimension.
        strides: patterns from one to the next along each dimension.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Window:
        """Return the window of a whole dense tensor."""
        return cls(0, tuple(shape), c_strides(shape))

    @property
    def n_patterns(self) -> int:
        """Patterns that the window picks."""
        return math.prod(self.sizes)

    def widened(self, n: int) -> Window:
        """Return the window of the same box where every element is `n` patterns."""
        if n == 1:
            return self
        strides = tuple(stride * n for stride in self.strides)
        return Window(self.offset * n, (*self.sizes, n), (*strides, 1))

    def pieces(self) -> Iterator[WindowPart]:
        """Cut the window into the parts that lie in one chunk each."""
        if self.n_patterns:
            yield from _pieces(self.offset, self._merged_dims(), 0)

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


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor in C order, in elements, as PyTorch has them."""
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
        else:  # this row runs over the end of its chunk
            yield from _pieces(begin, row, row_at)
        i += max(n_fitting, 1)


def select(index: Any, shape: Shape) -> tuple[Window, Shape]:
    """Find the window that `index` picks, in elements, and the shape of the result.

    Raises:
        SafetensorError: an index that is not taken, or out of range.
        OverflowError: a slice with a negative bound.
        TypeError: a slice with a bound that is no integer.
    """
    items = _items(index, len(shape))
    picks = [_pick(item, d, shape[d] if d < len(shape) else 0) for d, item in enumerate(items)]
    spelled = f"Error during slicing [{', '.join(map(_spelled, picks))}] with shape {list(shape)}: "
    if len(picks) > len(shape):
        raise CkptzError(f"{spelled}more slicing indexes than dimensions in tensor")
    bounds = [_in_range(pick, d, shape[d], spelled) for d, pick in enumerate(picks)]
    bounds += [(0, n, 1, True) for n in shape[len(picks) :]]
    return _window(bounds, shape)


def _window(bounds: Sequence[tuple[int, int, int, bool]], shape: Shape) -> tuple[Window, Shape]:
    strides = c_strides(shape)
    sizes = tuple(math.ceil((stop - start) / step) for start, stop, step, _ in bounds)
    offset = sum(start * stride for (start, *_), stride in zip(bounds, strides, strict=True))
    steps = tuple(step * stride for (_, _, step, _), stride in zip(bounds, strides, strict=True))
    kept = tuple(n for n, (*_, is_kept) in zip(sizes, bounds, strict=True) if is_kept)
    return Window(offset, sizes, steps), kept


def _items(index: Any, n_dims: int) -> list[Any]:
    """Return one item for each indexed dimension; slices replace an ellipsis."""
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


def _as_int(item: Any) -> int | None:
    try:
        number = operator.index(item)
    except (TypeError, ValueError):
        return None
    return number if -_MAX_INT - 1 <= number <= _MAX_INT else None


def _pick(item: Any, dim: int, size: int) -> int | _Bounds:
    """Read one item as an index counted from the start, or as start, stop and step of a slice."""
    if not isinstance(item, slice):
        number = _as_int(item)
        if number is None:
            what = "expected slice, int, or ellipsis"
            raise CkptzError(f"Unsupported slice index at position {dim}: {what}, got {type(item).__name__}")
        if number + size < 0:
            raise CkptzError(f"Invalid index {number} for dimension {dim} of size {size}")
        return number + size if number < 0 else number
    start = None if item.start is None else _bound(item.start)
    stop = None if item.stop is None else _bound(item.stop)
    step = 1 if item.step is None else operator.index(item.step)
    if abs(step) > _MAX_STEP:
        raise OverflowError(f"slice step {step} is too large")
    if step < 1:
        raise CkptzError(f"Slice step must be a positive integer, got {step}")
    return start, stop, step


def _bound(value: Any) -> int:
    number = operator.index(value)
    if not 0 <= number <= _MAX_BOUND:
        raise OverflowError(f"slice bound {number} is negative or too large; count from the start")
    return number


def _spelled(pick: int | _Bounds) -> str:
    if isinstance(pick, int):
        return str(pick)
    start, stop, step = pick
    first, last = ("" if bound is None else bound for bound in (start, stop))
    return f"{first}:{last}" if step == 1 else f"{first}:{last}:{step}"


def _in_range(pick: int | _Bounds, dim: int, size: int, spelled: str) -> tuple[int, int, int, bool]:
    """Return (start, stop, step, whether the dimension stays) of an item; raise if it is out of range."""
    start, stop, step = (pick, pick + 1, 1) if isinstance(pick, int) else pick
    start, stop = start or 0, size if stop is None else stop
    if start >= size or stop > size:
        beyond = start if start >= size else stop - 1
        what = f"index {beyond} out of bounds for tensor dimension #{dim} of size {size}"
        raise CkptzError(f"{spelled}{what}")
    if stop < start:
        raise CkptzError(f"slice {start}:{stop} of dimension {dim} ends before it begins")
    return start, stop, step, not isinstance(pick, int)


# --- arrays of a framework ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The patterns that an index picks from a tensor, and the shape that they get.

    Attributes:
        window: the patterns to decode.
        shape: of the framework's tensor that they make.
        then: what is left to be done with that tensor, or None.
    """

    window: Window
    shape: Shape
    then: Callable[[Any], Any] | None = None


def patterns_per_element(dtype: DType) -> int:
    """Count the patterns in one element; the framework packs types smaller than a byte into patterns."""
    return max(dtype.bits // (8 * dtype.pattern_bytes), 1)


# --- numpy: types that it lacks come from ml_dtypes, once the caller has imported it -----------------------


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the array type that holds `dtype`.

    Raises:
        DTypeError: there is none, or ml_dtypes has it and is not imported.
    """
    return _numpy_dtype(dtype.name)


@functools.cache  # errors are not kept: ml_dtypes may come later
def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name not in DTYPE_NAMES:
        raise DTypeError(f"numpy has no dtype for {name}; load with framework 'pt'")
    try:
        return np.dtype(DTYPE_NAMES[name])
    except TypeError:
        raise DTypeError(
            f"numpy has no dtype for {name}; import ml_dtypes, or load with framework 'pt'"
        ) from None


class Framework:
    """Makes numpy arrays; a subclass makes the tensors of another framework."""

    __slots__ = ()

    def shape_of(self, dtype: DType, shape: Shape) -> Shape:
        """Return the shape in the framework, which may pack several elements into one."""
        del dtype
        return shape

    def allocate(self, dtype: DType, shape: Shape) -> tuple[Any, Patterns]:
        """Make a tensor of this (framework's) shape that holds nothing yet, and its patterns to be written.

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
