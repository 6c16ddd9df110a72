"""The plan of a tensor: the part of its frame that defines how codes become values.

Implements spec/04-quantization.md. A quantization map has a table entry for each code and context. In the
linear domain an entry is an F32 bit pattern that is added to the prediction; in the bits domain it is an
integer that is added to the ordered bit pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CorruptionError
from ckptz.format.context_rules import BaseCode, ContextRule, Magnitude, n_contexts_of
from ckptz.format.dtypes import DType
from ckptz.format.frequency import slot_tables
from ckptz.format.streams import Embedded, Segments
from ckptz.kernels import cpu, floats

MAX_CODES: Final = 256
MAX_ROWS: Final = 4096

Table = NDArray[Any]  # uint32 patterns, or integers as wide as the pattern
OUTER_BYTES: Final = 4  # byte planes of an outer vector
MIN_NORMAL_FACTOR: Final = 0x0D800000  # 2^-100 as an F32 pattern
MAX_NUMPY_COLUMNS: Final = 1 << 20
BLOCK_VALUES: Final = 1 << 14  # elements of a matrix that are computed together, so that they stay in caches
LARGEST_SCALE: Final = (
    0x71800000  # 2^100 as an F32 pattern: limit of low-rank scales, which keeps all sums finite
)


@dataclass(frozen=True, slots=True)
class ExplicitTable:
    """A table with stored entries [n_rows, n_codes]."""

    entries: Table

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and number of codes."""
        n_rows, n_codes = self.entries.shape
        return n_rows, n_codes

    def at(self, rows: NDArray[Any], codes: NDArray[Any]) -> Table:
        """Return the entries [...] for rows and codes [...], which are broadcast."""
        return self.entries[rows, codes]

    def expand(self) -> Table:
        """Return all entries [n_rows, n_codes]."""
        return self.entries


@dataclass(frozen=True, slots=True)
class LinearTable:
    """A table of scale[row] * level[code] + offset[row], computed in double and rounded to F32."""

    scale: NDArray[np.float64]
    level: NDArray[np.float64]
    offset: NDArray[np.float64]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and number of codes."""
        return len(self.scale), len(self.level)

    def at(self, rows: NDArray[Any], codes: NDArray[Any]) -> Table:
        """Compute the entries [...] for rows and codes [...], which are broadcast."""
        with np.errstate(all="ignore"):
            entries = self.scale[rows] * self.level[codes] + self.offset[rows]
            return floats.round_f64(entries.reshape(-1)).reshape(entries.shape)

    def expand(self) -> Table:
        """Compute all entries [n_rows, n_codes]."""
        return self.at(np.arange(len(self.scale))[:, None], np.arange(len(self.level)))


AnyTable = ExplicitTable | LinearTable


@dataclass(frozen=True, slots=True)
class QuantizationMap:
    """A map from codes to values: a table, its rows by context, and special codes.

    Attributes:
        table: entries that are added to the prediction.
        row_of_context: table row of each context [n_contexts].
        zero_code: code for an exact zero, whatever the prediction, or None.
        escape_code: the last code, if it marks values that a separate stream stores exactly, or None.
    """

    table: AnyTable
    row_of_context: NDArray[np.int64]
    zero_code: int | None = None
    escape_code: int | None = None

    def __post_init__(self) -> None:
        n_rows, n_codes = self.table.shape
        if not (1 <= n_rows <= MAX_ROWS and 1 <= n_codes <= MAX_CODES):
            raise CorruptionError(f"quantization map of {n_rows} rows and {n_codes} codes")
        if self.escape_code not in (None, n_codes - 1):
            raise CorruptionError(f"escape code {self.escape_code} is not the last of {n_codes}")
        if self.zero_code is not None and not 0 <= self.zero_code < n_codes:
            raise CorruptionError(f"zero code {self.zero_code} is not one of {n_codes}")
        if len(self.row_of_context) and int(self.row_of_context.max()) >= n_rows:
            raise CorruptionError(f"a context names a row beyond the {n_rows} of the quantization map")

    @property
    def n_codes(self) -> int:
        """Number of different codes."""
        return self.table.shape[1]


class PlaneMode(IntEnum):
    """Transforms of a pattern before it is split into bytes: spec/registry.md#plane-modes."""

    RAW = 0  # the bit pattern
    ROTATED = 1  # rotated left by one, so that the exponent of F32 and BF16 fills the top byte
    XOR = 2  # exclusive or with the base
    DIFFERENCE = 3  # difference to the base, of the order-preserving integers for floats; zigzag


BASE_MODES = frozenset((PlaneMode.XOR, PlaneMode.DIFFERENCE))


def kernel_mode(mode: PlaneMode, dtype: DType) -> int:
    """Return the number of a plane mode in kernels; differences of floats are those of ordered integers."""
    if mode is PlaneMode.DIFFERENCE:
        return floats.ORDERED_DIFFERENCE if dtype.is_float else floats.DIFFERENCE
    return (floats.RAW, floats.ROTATED, floats.XOR)[mode]


class Domain(IntEnum):
    """Interpretation of codes: spec/registry.md#domains."""

    PLANES = 0
    LINEAR = 1
    BITS = 2


class Predictor(IntEnum):
    """Source of the prediction that entries are added to: spec/registry.md#predictors."""

    ZERO = 0
    BASE = 1
    OUTER = 2
    LOW_RANK = 4


@dataclass(frozen=True)
class StreamTables:
    """Frequency tables of one code stream, shared by all chunks, and the table of each context."""

    frequencies: NDArray[np.uint16]
    table_of: NDArray[np.int64]  # table of each context [n_contexts]
    packed: bytes = b""  # number of tables and packed tables, if the encoder has packed them already

    @functools.cached_property
    def slots(self) -> NDArray[np.uint32]:
        """Decoding tables [n_tables, 4096]."""
        return slot_tables(self.frequencies)

    def segments(
        self,
        contexts: NDArray[np.int64],
        per_context: NDArray[np.int64],
        slots: NDArray[np.uint32] | None = None,
    ) -> Segments:
        """Return the segments of a stream that is sorted by context, with the table of each.

        Args:
            contexts: contexts that occur in the chunk, ascending [n_used].
            per_context: number of patterns of each [n_used].
            slots: decoding tables [n_tables, 4096], if the caller has them.
        """
        return Segments(np.cumsum(per_context), self.table_of[contexts], self.frequencies, slots)


@dataclass(eq=False)
class Outer:
    """Two vectors of finite F32 patterns whose outer product is the prediction of a matrix.

    They are decoded on demand: a few bytes may decode to 64 MiB, which reading a header does not need.

    Attributes:
        n_rows: rows of the matrix.
        n_columns: columns of the matrix.
        stored: byte planes of the row vector, then of the column vector.
    """

    n_rows: int
    n_columns: int
    stored: Sequence[Embedded]

    @classmethod
    def of(cls, rows: NDArray[np.uint32], columns: NDArray[np.uint32]) -> Self:
        """Encode the vectors [n_rows] and [n_columns]."""
        planes = (part.astype("<u4").view(np.uint8).reshape(-1, OUTER_BYTES).T for part in (rows, columns))
        stored = Embedded.of_all([np.ascontiguousarray(plane) for both in planes for plane in both])
        outer = cls(len(rows), len(columns), stored)
        outer.rows, outer.columns = rows, columns
        return outer

    @property
    def n_elements(self) -> int:
        """Number of elements of both vectors."""
        return self.n_rows + self.n_columns

    @functools.cached_property
    def rows(self) -> NDArray[np.uint32]:
        """The row vector [n_rows]."""
        return _vector(self.stored[:OUTER_BYTES], self.n_rows)

    @functools.cached_property
    def columns(self) -> NDArray[np.uint32]:
        """The column vector [n_columns]."""
        return _vector(self.stored[OUTER_BYTES:], self.n_columns)

    def check(self) -> None:
        """Raise FormatError if a vector cannot be decoded; nothing is cached."""
        _vector(self.stored[:OUTER_BYTES], self.n_rows)
        _vector(self.stored[OUTER_BYTES:], self.n_columns)

    def products(self, begin: int, end: int) -> NDArray[np.uint32]:
        """Compute elements begin..end of the matrix, F32 patterns [end - begin]."""
        return cpu().outer_product(self.rows, self.columns, begin, end)


@dataclass(frozen=True)
class LowRank:
    """A matrix as a sum of outer products of vectors with codes of a few bits.

    Attributes:
        n_rows: rows of the matrix.
        n_columns: columns of the matrix.
        scales: scale of each term, F32 patterns of at most 2^100 [rank].
        stored: two's complement codes of the row vector, then of the column vector, of each term.
    """

    n_rows: int
    n_columns: int
    scales: NDArray[np.uint32]
    stored: Embedded

    @property
    def n_elements(self) -> int:
        """Number of elements of all vectors."""
        return len(self.scales) * (self.n_rows + self.n_columns)

    @functools.cached_property
    def terms(self) -> tuple[tuple[NDArray[np.uint32], NDArray[np.uint32]], ...]:
        """The vectors of each term as F32 patterns: scaled row vector [n_rows], column vector [n_columns]."""
        levels = self.stored.codes(self.n_elements).view(np.int8).astype(np.float32)
        vectors = levels.reshape(len(self.scales), -1)
        rows, columns = vectors[:, : self.n_rows], vectors[:, self.n_rows :].view(np.uint32)
        if _are_normal(self.scales):
            scaled = (rows * self.scales[:, None].view(np.float32)).view(np.uint32)
        else:
            pairs = zip(rows.view(np.uint32), self.scales, strict=True)
            scaled = np.stack([cpu().outer_product(one, scale[None], 0, self.n_rows) for one, scale in pairs])
        return tuple(zip(scaled, columns, strict=True))

    def check(self) -> None:
        """Raise FormatError if the vectors cannot be decoded; nothing is cached."""
        self.stored.codes(self.n_elements)

    @functools.cached_property
    def _avoids_subnormals(self) -> bool:
        """True if no product or sum can be subnormal: all are 0 or multiples of 2^-123.

        Then numpy may be used, whatever the processor does with subnormal numbers.
        """
        return self.n_columns <= MAX_NUMPY_COLUMNS and all(_are_normal(rows) for rows, _ in self.terms)

    def products(self, begin: int, end: int) -> NDArray[np.uint32]:
        """Sum the terms in order for elements begin..end of the matrix, F32 patterns [end - begin]."""
        if self._avoids_subnormals:
            n = self.n_columns
            first, last = begin // n, -(-end // n)
            sums = np.zeros((last - first, n), np.float32)
            n_rows = max(BLOCK_VALUES // n, 1)
            for at in range(first, last, n_rows):
                part = sums[at - first : at - first + n_rows]
                own = np.empty_like(part)
                for rows, columns in self.terms:
                    factors = rows[at : at + len(part), None].view(np.float32)
                    part += np.multiply(factors, columns.view(np.float32), out=own)
            return sums.reshape(-1)[begin - first * n : end - first * n].view(np.uint32)
        total = np.zeros(end - begin, np.uint32)
        for rows, columns in self.terms:
            total = cpu().add_f32(total, cpu().outer_product(rows, columns, begin, end))
        return total


def _are_normal(patterns: NDArray[np.uint32]) -> bool:
    """Return whether all F32 patterns are 0 or at least 2^-100: codes times them are not subnormal."""
    sizes = patterns & np.uint32(0x7FFFFFFF)
    return bool(((sizes == 0) | (sizes >= MIN_NORMAL_FACTOR)).all())


AnyOuter = Outer | LowRank


def _vector(planes: Sequence[Embedded], n: int) -> NDArray[np.uint32]:
    code_bytes = np.empty((n, OUTER_BYTES), np.uint8)
    for j, plane in enumerate(planes):
        code_bytes[:, j] = plane.codes(n)
    vector = code_bytes.reshape(-1).view("<u4").astype(np.uint32, copy=False)
    if not cpu().all_finite(vector, floats.F32):
        raise CorruptionError("an outer vector holds an infinity or NaN")
    return vector


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of a frame's header that defines how codes become values.

    Attributes:
        mode: transform of patterns before they are split into bytes (planes domain only).
        quant_map: quantization map; None in the planes domain.
        domain: interpretation of codes.
        predictor: source of the prediction.
        outer: vectors of the predictors outer and low-rank.
        rules: context rules, at most three.
        tables: shared tables of each code stream; empty without rules.
    """

    mode: PlaneMode = PlaneMode.RAW
    quant_map: QuantizationMap | None = None
    domain: Domain = Domain.PLANES
    predictor: Predictor = Predictor.ZERO
    outer: AnyOuter | None = None
    rules: tuple[ContextRule, ...] = ()
    tables: tuple[StreamTables, ...] = ()

    @property
    def n_contexts(self) -> int:
        """Number of contexts of the frame."""
        return n_contexts_of(self.rules)

    @property
    def reads_base_patterns(self) -> bool:
        """True if decoding reads the base's values."""
        return self.reads_patterns(only_codes=False)

    def reads_patterns(self, *, only_codes: bool) -> bool:
        """Return whether decoding, or decoding the codes alone, reads the base's values."""
        if not only_codes and self.predictor is Predictor.BASE:
            return True
        return any([isinstance(rule, Magnitude) and rule.source is None for rule in self.rules])

    @property
    def needs_base(self) -> bool:
        """True if decoding reads the base's values or codes."""
        return self.reads_base_patterns or self.reads_base_codes

    @property
    def is_self_contained(self) -> bool:
        """True if decoding only needs the frame itself."""
        return not self.needs_base and not self.context_tensor_names

    @property
    def reads_base_codes(self) -> bool:
        """True if a context rule reads the codes of the base's frame."""
        return any([isinstance(rule, BaseCode) for rule in self.rules])

    @property
    def context_tensor_names(self) -> list[str]:
        """Names of the tensors of the same file whose magnitudes are contexts."""
        return [rule.source for rule in self.rules if isinstance(rule, Magnitude) and rule.source]

    def n_code_streams(self, dtype: DType) -> int:
        """Return the number of code streams in each chunk."""
        return dtype.pattern_bytes if self.quant_map is None else 1

    def n_streams(self, dtype: DType) -> int:
        """Return the number of streams in each chunk: codes and escaped values."""
        n = self.n_code_streams(dtype)
        if self.quant_map is not None:
            n += dtype.pattern_bytes * (self.quant_map.escape_code is not None)
        return n


def planes_plan(
    mode: PlaneMode, rules: tuple[ContextRule, ...] = (), tables: tuple[StreamTables, ...] = ()
) -> Plan:
    """Return a lossless plan."""
    predictor = Predictor.BASE if mode in BASE_MODES else Predictor.ZERO
    return Plan(mode, predictor=predictor, rules=rules, tables=tables)


def exact_plan(dtype: DType) -> Plan:
    """Return the lossless plan for a tensor without a base."""
    is_split = dtype.is_float and dtype.pattern_bytes > 1
    return planes_plan(PlaneMode.ROTATED if is_split else PlaneMode.RAW)
