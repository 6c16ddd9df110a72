"""Sources of the bit patterns of tensors, and the inputs for coding one chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CorruptionError, MissingBaseError
from ckptz.format.context_rules import (
    BaseCode,
    ContextRule,
    Labels,
    Magnitude,
    Products,
    Row,
    labels_of_rows,
)
from ckptz.format.dtypes import DType, n_elements
from ckptz.format.plan import Plan
from ckptz.kernels import cpu
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
    """The plan, method and settings by which a file stores a tensor.

    Attributes:
        plan: plan of the frame.
        method: the lossy method, or None.
        settings: settings of the method.
    """

    plan: Plan
    method: str | None
    settings: Mapping[str, int | float | bool | str]


class TensorSource:
    """A tensor that can be read in parts; `ckptz.format.dtypes` defines patterns.

    Subclasses implement `patterns`; the other methods only for tensors in a frame with a quantization map.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def dtype(self) -> DType:
            """Dtype of the elements."""

        @property
        def shape(self) -> tuple[int, ...]:
            """Dimensions, in elements."""

        def patterns(self, begin: int, end: int) -> Patterns:
            """Read patterns begin..end, little-endian unsigned integers; the memory may be shared."""

    @property
    def n_patterns(self) -> int:
        """Number of patterns of the tensor."""
        return self.dtype.n_patterns(self.shape)

    @property
    def n_bytes(self) -> int:
        """Decoded size of the tensor in bytes."""
        return self.dtype.n_bytes(self.shape)

    def chunk_bounds(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) in patterns of every chunk."""
        return chunk_bounds(self.n_patterns)

    def fill(self, begin: int, out: Patterns) -> None:
        """Read the patterns of the chunk that starts at `begin` into `out` [n]."""
        out[:] = self.patterns(begin, begin + len(out))

    @property
    def stored(self) -> Stored | None:
        """Plan and method of the tensor's frame; None if it has no frame."""
        return None

    @property
    def n_codes(self) -> int | None:
        """Number of different codes in the tensor's frame; None if it has no codes."""
        return None

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        """Read the codes of patterns begin..end, uint8; None without a quantization map."""
        del begin, end
        return None

    def patterns_and_codes(self, begin: int, end: int) -> tuple[Patterns, NDArray[np.uint8] | None]:
        """Read patterns and codes with one decoding; two would double the work at each link of a chain."""
        return self.patterns(begin, end), self.codes(begin, end)


@dataclass(frozen=True, slots=True)
class SourceOf(TensorSource):
    """Base class of tensors computed from another tensor of the same dtype and shape."""

    source: TensorSource

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape


@dataclass(frozen=True, slots=True)
class ViewOf(SourceOf):
    """Base class of tensors with the frame of another tensor, whose patterns are read differently."""

    @property
    def stored(self) -> Stored | None:
        return self.source.stored

    @property
    def n_codes(self) -> int | None:
        return self.source.n_codes


@dataclass(frozen=True, slots=True)
class ArraySource(TensorSource):
    """A tensor whose patterns are in memory."""

    dtype: DType
    shape: tuple[int, ...]
    flat: Patterns

    @classmethod
    def from_buffer(cls, dtype: DType, shape: tuple[int, ...], buffer: Any) -> ArraySource:
        """Wrap a contiguous buffer of the tensor's bytes without copying it."""
        return cls(dtype, tuple(shape), np.frombuffer(buffer, PATTERN_TYPES[dtype.pattern_bytes]))

    @property
    def n_patterns(self) -> int:
        return len(self.flat)

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.flat[begin:end]


@dataclass(frozen=True, slots=True)
class JoinedSource(TensorSource):
    """The concatenation of tensors of one dtype.

    Attributes:
        dtype: dtype of all parts.
        shape: [total number of elements].
        parts: the tensors.
    """

    dtype: DType
    shape: tuple[int]
    parts: Sequence[TensorSource]

    @classmethod
    def of(cls, parts: Sequence[TensorSource]) -> JoinedSource:
        """Concatenate one or more tensors."""
        return cls(parts[0].dtype, (sum(n_elements(part.shape) for part in parts),), parts)

    def patterns(self, begin: int, end: int) -> Patterns:
        return np.concatenate([part.patterns(0, part.n_patterns) for part in self.parts])[begin:end]


@dataclass(frozen=True, slots=True)
class LazySource(TensorSource):
    """A tensor whose patterns are read or computed on demand.

    Attributes:
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        read: function of (begin, end) that returns patterns [end - begin].
    """

    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[int, int], Patterns]

    @classmethod
    def of(cls, source: TensorSource, compute: Callable[[int, int], Patterns]) -> LazySource:
        """Return a tensor with the dtype and shape of `source` and computed patterns."""
        return cls(source.dtype, source.shape, compute)

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.read(begin, end)


def tensor_bytes(tensors: Mapping[str, TensorSource]) -> int:
    """Return the decoded size of tensors in bytes."""
    return sum(source.n_bytes for source in tensors.values())


def n_rows_of(shape: tuple[int, ...]) -> int:
    """Return the size of the first dimension; 1 for scalars and empty tensors."""
    return max(shape[0], 1) if shape else 1


def n_chunks_of(n_patterns: int) -> int:
    """Return the number of chunks of a tensor."""
    return math.ceil(n_patterns / CHUNK_VALUES)


def chunk_bounds(n_patterns: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) in patterns of every chunk."""
    for begin in range(0, n_patterns, CHUNK_VALUES):
        yield begin, min(begin + CHUNK_VALUES, n_patterns)


MapFunction = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@dataclass(slots=True)
class ChunkSources:
    """Base and context tensors for patterns begin..end of a chunk; base patterns and codes are read once.

    Attributes:
        begin: first pattern of the chunk.
        end: pattern after its last.
        base: the base tensor, or None.
        context_tensors: tensors of the same file by name, for contexts by the magnitude of another tensor.
        base_title: name of the base for messages, after a comma.
    """

    begin: int
    end: int
    base: TensorSource | None = None
    context_tensors: Mapping[str, TensorSource] = field(default_factory=dict)
    base_title: str = ""
    _patterns: NDArray[Any] | None = field(default=None, repr=False)
    _codes: NDArray[np.uint8] | None = field(default=None, repr=False)
    _has_codes: bool = field(default=False, repr=False)

    def base_patterns(self) -> NDArray[Any]:
        """Read patterns begin..end of the base."""
        if self.base is None:
            raise MissingBaseError("the tensor is a delta, but its base is not open")
        if self._patterns is None:
            self._patterns = self.base.patterns(self.begin, self.end)
        return self._patterns

    def base_codes(self) -> NDArray[np.uint8] | None:
        """Read the codes of patterns begin..end in the base's own frame; None if it has none."""
        if self.base is None:
            raise MissingBaseError("contexts are codes of the base, but the base is not open")
        if not self._has_codes:
            self._codes, self._has_codes = self.base.codes(self.begin, self.end), True
        return self._codes

    def patterns_of(self, name: str) -> NDArray[Any]:
        """Read patterns begin..end of another tensor of the same file."""
        if name not in self.context_tensors:
            raise CorruptionError(f"it is decoded with tensor {name!r}, which is not open")
        return self.context_tensors[name].patterns(self.begin, self.end)

    def labels(self, rules: Sequence[ContextRule], row_patterns: int) -> Labels:
        """Return the context [end - begin] of each pattern; a row has `row_patterns` patterns."""
        labels: Labels = self._labels_by(rules[0], row_patterns)
        if len(rules) > 1:
            labels = labels.astype(np.uint16)
            for rule in rules[1:]:
                labels = labels * np.uint16(rule.radix) + self._labels_by(rule, row_patterns)
        return labels

    def _labels_by(self, rule: ContextRule, row_patterns: int) -> Labels:
        if isinstance(rule, Magnitude):
            patterns = self.base_patterns() if rule.source is None else self.patterns_of(rule.source)
            return cpu().magnitudes(patterns)
        if isinstance(rule, BaseCode):
            codes = self.base_codes()
            if codes is None:
                return np.zeros(self.end - self.begin, np.uint8)
            if len(codes) and int(codes.max()) >= rule.radix:
                raise CorruptionError(
                    f"the base uses code {int(codes.max())}, the frame expects {rule.radix}"
                )
            return codes
        if isinstance(rule, Products):
            return rule.labels(self.begin, self.end)
        size = row_patterns if isinstance(rule, Row) else rule.size
        return labels_of_rows(rule.indices, self.begin, self.end, size)
