"""Where a tensor's bit patterns come from, and what coding one chunk of it may look at beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CorruptionError, MissingBaseError
from ckptz.format.dtypes import DType, n_elements
from ckptz.format.plan import Plan
from ckptz.kernels.floats import Patterns as Patterns

CHUNK_VALUES: Final = 1 << 20  # normative, spec/05-frame.md#chunks
PATTERN_TYPES: Final[Mapping[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """The plan of a tensor's frame, and what the file's record says was asked of it.

    Attributes:
        plan: of the frame.
        method: that made it lossy, or None.
        settings: of that method.
    """

    plan: Plan
    method: str | None
    settings: Mapping[str, int | float | bool | str]


class TensorSource:
    """A tensor that can be read piece by piece; see `ckptz.format.dtypes` for what a pattern is.

    Subclasses have `patterns`, and the others where the tensor stands in a frame with a quantization map.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def dtype(self) -> DType:
            """Type of the elements."""

        @property
        def shape(self) -> tuple[int, ...]:
            """Dimensions, in elements."""

        def patterns(self, begin: int, end: int) -> Patterns:
            """Read patterns begin..end, little-endian unsigned integers in memory that may be shared."""

    @property
    def n_patterns(self) -> int:
        """Patterns of the whole tensor."""
        return self.dtype.n_patterns(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.dtype.n_bytes(self.shape)

    def chunk_bounds(self) -> Iterator[tuple[int, int]]:
        """List (begin, end) in patterns of every chunk."""
        return chunk_bounds(self.n_patterns)

    @property
    def stored(self) -> Stored | None:
        """Plan and record of the frame that the tensor stands in; None if it has none."""
        return None

    @property
    def n_codes(self) -> int | None:
        """Size of the alphabet of the codes of its own frame; None if it has none."""
        return None

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        """Read the codes of patterns begin..end, uint8; None if no quantization map made them."""
        del begin, end
        return None

    def patterns_and_codes(self, begin: int, end: int) -> tuple[Patterns, NDArray[np.uint8] | None]:
        """Read patterns and codes from one decoding: two would double with every member of a chain."""
        return self.patterns(begin, end), self.codes(begin, end)


@dataclass(frozen=True, slots=True)
class SourceOf(TensorSource):
    """A tensor that is read from another one of the same dtype and shape; subclasses say how."""

    source: TensorSource

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape


@dataclass(frozen=True, slots=True)
class ViewOf(SourceOf):
    """A tensor with the values and the frame of another one; subclasses say how patterns are read."""

    @property
    def stored(self) -> Stored | None:
        return self.source.stored

    @property
    def n_codes(self) -> int | None:
        return self.source.n_codes

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        return self.source.codes(begin, end)


@dataclass(frozen=True, slots=True)
class ArraySource(TensorSource):
    """Patterns that are in memory already."""

    dtype: DType
    shape: tuple[int, ...]
    flat: Patterns

    @classmethod
    def from_buffer(cls, dtype: DType, shape: tuple[int, ...], buffer: Any) -> ArraySource:
        """Share the memory of a contiguous buffer that holds the tensor's bytes."""
        return cls(dtype, tuple(shape), np.frombuffer(buffer, PATTERN_TYPES[dtype.pattern_bytes]))

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.flat[begin:end]


@dataclass(frozen=True, slots=True)
class JoinedSource(TensorSource):
    """Tensors of one dtype, one after another.

    Attributes:
        dtype: of all of them.
        shape: of one dimension, their elements together.
        parts: the tensors.
    """

    dtype: DType
    shape: tuple[int]
    parts: Sequence[TensorSource]

    @classmethod
    def of(cls, parts: Sequence[TensorSource]) -> JoinedSource:
        """Join tensors, of which there is at least one."""
        return cls(parts[0].dtype, (sum(n_elements(part.shape) for part in parts),), parts)

    def patterns(self, begin: int, end: int) -> Patterns:
        return np.concatenate([part.patterns(0, part.n_patterns) for part in self.parts])[begin:end]


@dataclass(frozen=True, slots=True)
class LazySource(TensorSource):
    """A tensor whose patterns are read or computed when they are asked for.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        read: gives patterns begin..end, [end - begin].
    """

    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[int, int], Patterns]

    @classmethod
    def of(cls, source: TensorSource, compute: Callable[[int, int], Patterns]) -> LazySource:
        """Compute patterns of a tensor that has the dtype and shape of another one."""
        return cls(source.dtype, source.shape, compute)

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.read(begin, end)


def tensor_bytes(tensors: Mapping[str, TensorSource]) -> int:
    """Count the bytes of tensors, decoded."""
    return sum(source.n_bytes for source in tensors.values())


def n_rows_of(shape: tuple[int, ...]) -> int:
    """Count the indices of the first dimension; 1 for a scalar and for a tensor without elements."""
    return max(shape[0], 1) if shape else 1


def n_chunks_of(n_patterns: int) -> int:
    """Count the chunks of a tensor."""
    return math.ceil(n_patterns / CHUNK_VALUES)


def chunk_bounds(n_patterns: int) -> Iterator[tuple[int, int]]:
    """List (begin, end) in patterns of every chunk."""
    for begin in range(0, n_patterns, CHUNK_VALUES):
        yield begin, min(begin + CHUNK_VALUES, n_patterns)


ContextTensors = Callable[[str], TensorSource]  # tensors of the same file by name
MapFunction = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@dataclass(slots=True)
class ChunkSources:
    """Base and context tensors for patterns begin..end; what was read once is kept while the chunk lasts.

    Attributes:
        begin: first pattern of the chunk.
        end: pattern after its last.
        base: the base tensor, or None.
        context_tensors: tensors of the same file by name, for contexts by another tensor's magnitude.
        reads_both: the base's patterns and its codes are both needed. They come from one decoding then:
            two would double with every member of a chain.
        base_title: for messages, what is known of the base, with a comma before it.
    """

    begin: int
    end: int
    base: TensorSource | None = None
    context_tensors: ContextTensors | None = None
    reads_both: bool = False
    base_title: str = ""
    _patterns: NDArray[Any] | None = field(default=None, repr=False)
    _codes: NDArray[np.uint8] | None = field(default=None, repr=False)
    _has_codes: bool = field(default=False, repr=False)

    def base_patterns(self) -> NDArray[Any]:
        """Read patterns begin..end of the base."""
        if self.base is None:
            raise MissingBaseError("the tensor is stored against a base, and none is open")
        if self._patterns is None and self.reads_both:
            self._read_both(self.base)
        if self._patterns is None:
            self._patterns = self.base.patterns(self.begin, self.end)
        return self._patterns

    def base_codes(self) -> NDArray[np.uint8] | None:
        """Read the codes of patterns begin..end in the base's own frame; None if it has none."""
        if self.base is None:
            raise MissingBaseError("the tensor is grouped by the codes of a base, and none is open")
        if not self._has_codes and self.reads_both:
            self._read_both(self.base)
        if not self._has_codes:
            self._codes, self._has_codes = self.base.codes(self.begin, self.end), True
        return self._codes

    def _read_both(self, base: TensorSource) -> None:
        self._patterns, self._codes = base.patterns_and_codes(self.begin, self.end)
        self._has_codes = True

    def patterns_of(self, name: str) -> NDArray[Any]:
        """Read patterns begin..end of another tensor of the same file."""
        if self.context_tensors is None:
            raise CorruptionError(f"it is decoded with tensor {name!r}, which is not open")
        return self.context_tensors(name).patterns(self.begin, self.end)


def context_tensors_of(tensors: Mapping[str, TensorSource]) -> ContextTensors:
    """Make a function that finds the context tensors of a tensor by name.

    Raises:
        CorruptionError: when called with a name that is not there.
    """

    def find(name: str) -> TensorSource:
        if name not in tensors:
            raise CorruptionError(f"it is decoded with tensor {name!r}, which the file does not have")
        return tensors[name]

    return find
