"""Frame: one encoded tensor. Implements spec/05-frame.md; writing and parsing functions in byte order.

    header | streams of chunk 0 | streams of chunk 1 | ...

    header: length | plan | chunk records | checksum
    plan: version | dtype | domain | predictor | flags | shape | mode | context rules | map | tables | outer

Independent of files, chains and sockets: files and messages both contain frames.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import ChecksumError, CorruptionError, UnsupportedError
from ckptz.format.bits import ByteReader, ByteWriter, combine, xxh64
from ckptz.format.context_rules import (
    MAX_CONTEXTS,
    MAX_INDICES,
    MAX_RANK,
    MAX_RULES,
    MAX_SHIFT,
    MAX_TABLES,
    BaseCode,
    Block,
    ContextRule,
    Magnitude,
    Products,
    Row,
    RuleId,
    n_contexts_of,
    n_indices_of,
    parse_runs,
    write_runs,
)
from ckptz.format.dtypes import DType, dtype_of_id
from ckptz.format.frequency import parse_tables, write_tables
from ckptz.format.plan import (
    BASE_MODES,
    LARGEST_SCALE,
    MAX_CODES,
    MAX_ROWS,
    OUTER_BYTES,
    AnyOuter,
    AnyTable,
    Domain,
    ExplicitTable,
    LinearTable,
    LowRank,
    Outer,
    Plan,
    PlaneMode,
    Predictor,
    QuantizationMap,
    StreamTables,
)
from ckptz.format.sources import PATTERN_TYPES, n_chunks_of, n_rows_of
from ckptz.format.streams import CoderId, Embedded, check_coder, read_embedded, take_embedded
from ckptz.format.values import FLOAT_KINDS, ValueTable

FRAME_VERSION: Final = 1  # spec/versions.md
MAX_DIMS: Final = 64
MAX_ELEMENTS: Final = 1 << 48
MAX_OUTER: Final = 1 << 24  # elements of all outer vectors of a tensor

FLAG_ZERO, FLAG_ESCAPE = 1, 2
KNOWN_FLAGS: Final = FLAG_ZERO | FLAG_ESCAPE
FLAG_MASK: Final = 4  # a mask of protected values, in drafts of the format

E = TypeVar("E", bound=IntEnum)
PREFIX_BYTES: Final = 4  # the header's own length, u32
CHECKSUM_BYTES: Final = 8


class TableKind(IntEnum):
    """Ids of the kinds of tables: spec/registry.md#table-kinds."""

    EXPLICIT = 0
    EXPANDED = 1


def _known(kind: type[E], value: int, what: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise UnsupportedError(f"{what} {value} is not known to this ckptz; upgrade it") from None


def pack_plan(dtype: DType, shape: tuple[int, ...], plan: Plan) -> bytes:
    """Pack a plan: the header without its length, the chunk records and the checksum."""
    out, quant_map = ByteWriter(), plan.quant_map
    out.raw(_packed_head(dtype, shape, plan.domain, plan.predictor, _flags(quant_map), plan.mode))
    out.u8(len(plan.rules))
    for rule in plan.rules:
        _write_rule(out, rule)
    if quant_map is not None:
        _write_map(out, quant_map)
    for stream in plan.tables:
        out.raw(stream.packed)
        if not stream.packed:
            write_tables(out, stream.frequencies)
        write_runs(out, stream.table_of)
    if plan.outer is not None:
        _write_outer(out, plan.outer)
    return out.getvalue()


@functools.lru_cache(256)  # a file has few different heads
def _packed_head(
    dtype: DType, shape: tuple[int, ...], domain: Domain, predictor: Predictor, flags: int, mode: PlaneMode
) -> bytes:
    """Pack the fields before the context rules."""
    out = ByteWriter()
    for number in (FRAME_VERSION, dtype.id, domain, predictor):
        out.u8(number)
    out.u32(flags)
    out.u8(len(shape))
    for n in shape:
        out.varint(n)
    if domain is Domain.PLANES:
        out.u8(mode)
    return out.getvalue()


def outer_bytes(outer: AnyOuter) -> int:
    """Return the packed size of outer vectors in bytes."""
    out = ByteWriter()
    _write_outer(out, outer)
    return len(out)


def parse_plan(source: ByteReader) -> tuple[DType, tuple[int, ...], Plan]:
    """Parse a plan, the inverse of `pack_plan`.

    Raises:
        CorruptionError: the plan contradicts itself.
        UnsupportedError: an unknown version, id or flag.
    """
    version = source.u8("frame version")
    if version != FRAME_VERSION:
        raise UnsupportedError(f"frame version {version} is not known to this ckptz; upgrade it")
    dtype = dtype_of_id(source.u8("frame dtype"))
    domain = _known(Domain, source.u8("frame domain"), "frame domain")
    predictor = _known(Predictor, source.u8("frame predictor"), "frame predictor")
    flags = source.u32("frame flags")
    if flags & FLAG_MASK:
        raise UnsupportedError("the frame has a mask of protected values, which this version of ckptz lacks")
    if flags & ~KNOWN_FLAGS:
        raise UnsupportedError(f"frame sets reserved flags {flags:#04x}; written by a newer ckptz")
    shape = _parse_shape(source)
    mode = PlaneMode.RAW
    if domain is Domain.PLANES:
        mode = _known(PlaneMode, source.u8("plane mode"), "plane mode")
    rules = _parse_rules(source, dtype, shape)
    n_contexts = n_contexts_of(rules)
    is_map = domain is not Domain.PLANES
    quant_map = _parse_map(source, dtype, domain, n_contexts, flags) if is_map else None
    tables = _parse_tables(source, n_contexts, 1 if is_map else dtype.pattern_bytes) if rules else ()
    outer: AnyOuter | None = None
    if predictor is Predictor.OUTER:
        outer = _parse_outer(source, shape)
    elif predictor is Predictor.LOW_RANK:
        outer = _parse_low_rank(source, shape)
    plan = Plan(mode, quant_map, domain, predictor, outer, rules, tables)
    _check(plan, dtype, flags)
    return dtype, shape, plan


def _flags(quant_map: QuantizationMap | None) -> int:
    if quant_map is None:
        return 0
    return FLAG_ZERO * (quant_map.zero_code is not None) | FLAG_ESCAPE * (quant_map.escape_code is not None)


def _check(plan: Plan, dtype: DType, flags: int) -> None:
    if plan.domain is Domain.PLANES:
        if flags:
            raise CorruptionError("a frame of byte planes has flags of a quantization map")
        if (plan.mode in BASE_MODES) != (plan.predictor is Predictor.BASE):
            raise CorruptionError(f"predictor {plan.predictor.name} does not fit plane mode {plan.mode.name}")
        if plan.outer is not None:
            raise CorruptionError(f"byte planes have no predictor {plan.predictor.name}")
    elif dtype.name not in FLOAT_KINDS:
        raise CorruptionError(f"a frame of {dtype.name} has a quantization map")


def _parse_shape(source: ByteReader) -> tuple[int, ...]:
    n_dims = source.u8("number of dimensions")
    if n_dims > MAX_DIMS:
        raise CorruptionError(f"{n_dims} dimensions, at most {MAX_DIMS} are allowed")
    shape = tuple(source.varint("dimension") for _ in range(n_dims))
    if math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:
        raise CorruptionError(f"shape {list(shape)} exceeds 2^48 elements")
    return shape


# --- context rules --------------------------------------------------------------------------------


def _write_rule(out: ByteWriter, rule: ContextRule) -> None:
    if isinstance(rule, Magnitude):
        out.u8(RuleId.MAGNITUDE)
        out.text(rule.source or "")
    elif isinstance(rule, BaseCode):
        out.u8(RuleId.BASE_CODE)
        out.varint(rule.radix)
    elif isinstance(rule, Products):
        out.u8(RuleId.PRODUCTS)
        out.u8(rule.shift)
        out.varint(len(rule.levels))
        Embedded.of(rule.levels.view(np.uint8).reshape(-1)).write(out)
    else:
        out.u8(RuleId.ROW if isinstance(rule, Row) else RuleId.BLOCK)
        out.varint(rule.radix)
        if isinstance(rule, Block):
            out.varint(rule.size)
        Embedded.of(rule.indices).write(out)


def _parse_rules(source: ByteReader, dtype: DType, shape: tuple[int, ...]) -> tuple[ContextRule, ...]:
    n_rules = source.u8("number of context rules")
    if n_rules > MAX_RULES:
        raise CorruptionError(f"{n_rules} context rules, at most {MAX_RULES} are allowed")
    rules = tuple(_parse_rule(source, dtype, shape) for _ in range(n_rules))
    if n_contexts_of(rules) > MAX_CONTEXTS:
        raise CorruptionError(f"{n_contexts_of(rules)} contexts, at most {MAX_CONTEXTS} are allowed")
    if n_indices_of(rules) > MAX_INDICES:
        raise CorruptionError(f"{n_indices_of(rules)} context indices, at most {MAX_INDICES} are allowed")
    return rules


def _parse_rule(source: ByteReader, dtype: DType, shape: tuple[int, ...]) -> ContextRule:
    rule = _known(RuleId, source.u8("context rule"), "context rule")
    if rule is RuleId.MAGNITUDE:
        return Magnitude(source.text("context source") or None)
    if rule is RuleId.PRODUCTS:
        return _parse_products(source, dtype.n_patterns(shape), n_rows_of(shape))
    radix = source.varint("context radix")
    if not 1 <= radix <= MAX_CODES:
        raise CorruptionError(f"context radix {radix} is outside 1..{MAX_CODES}")
    if rule is RuleId.BASE_CODE:
        return BaseCode(radix)
    n_patterns = dtype.n_patterns(shape)
    if rule is RuleId.ROW:
        n_rows = n_rows_of(shape)
        _check_rows(n_patterns, n_rows)
        return Row(radix, _parse_indices(source, radix, n_rows if n_patterns else 0))
    size = source.varint("block size")
    if not 1 <= size <= MAX_ELEMENTS:
        raise CorruptionError(f"block size {size} is outside 1..2^48")
    return Block(radix, size, _parse_indices(source, radix, math.ceil(n_patterns / size)))


def _check_rows(n_patterns: int, n_rows: int) -> None:
    if n_patterns % n_rows:
        raise CorruptionError(
            f"a context rule by rows: {n_patterns} patterns cannot be divided into {n_rows} rows"
        )


def _parse_products(source: ByteReader, n_patterns: int, n_rows: int) -> Products:
    _check_rows(n_patterns, n_rows)
    shift, rank = source.u8("context shift"), source.varint("context rank")
    if shift > MAX_SHIFT:
        raise CorruptionError(f"context shift {shift}, at most {MAX_SHIFT} is allowed")
    if not 1 <= rank <= MAX_RANK:
        raise CorruptionError(f"context rank {rank} is outside 1..{MAX_RANK}")
    n_levels = rank * (n_rows + n_patterns // n_rows) if n_patterns else 0
    if n_levels > MAX_INDICES:
        raise CorruptionError(f"{n_levels} context levels, at most {MAX_INDICES} are allowed")
    levels = read_embedded(source, n_levels, "context levels")
    return Products(shift, n_rows if n_patterns else 0, levels.view(np.int8).reshape(rank, -1))


def _parse_indices(source: ByteReader, radix: int, n: int) -> NDArray[np.uint8]:
    if n > MAX_INDICES:
        raise CorruptionError(f"{n} context indices, at most {MAX_INDICES} are allowed")
    indices = read_embedded(source, n, "context indices")
    if n and int(indices.max()) >= radix:
        raise CorruptionError(f"context index {int(indices.max())} is beyond radix {radix}")
    return indices


# --- map ----------------------------------------------------------------------------------------


def _write_map(out: ByteWriter, quant_map: QuantizationMap) -> None:
    n_rows, n_codes = quant_map.table.shape
    out.u8(TableKind.EXPLICIT if isinstance(quant_map.table, ExplicitTable) else TableKind.EXPANDED)
    out.varint(n_rows)
    out.varint(n_codes)
    if isinstance(quant_map.table, ExplicitTable):
        entries = quant_map.table.entries
        out.raw(entries.astype(PATTERN_TYPES[entries.itemsize]).tobytes())
    else:
        for vector in (quant_map.table.scale, quant_map.table.level, quant_map.table.offset):
            out.raw(vector.astype("<f8").tobytes())
    if n_rows > 1:
        write_runs(out, quant_map.row_of_context)
    if quant_map.zero_code is not None:
        out.u8(quant_map.zero_code)


def _parse_map(
    source: ByteReader, dtype: DType, domain: Domain, n_contexts: int, flags: int
) -> QuantizationMap:
    kind = _known(TableKind, source.u8("table kind"), "table kind")
    n_rows, n_codes = source.varint("map rows"), source.varint("map codes")
    if not (1 <= n_rows <= MAX_ROWS and 1 <= n_codes <= MAX_CODES):
        raise CorruptionError(f"quantization map of {n_rows} rows and {n_codes} codes")
    table = _parse_entries(source, dtype, domain, kind, (n_rows, n_codes))
    row_of_context = parse_runs(source, n_contexts, n_rows) if n_rows > 1 else np.zeros(n_contexts, np.int64)
    return QuantizationMap(
        table,
        row_of_context,
        zero_code=source.u8("zero code") if flags & FLAG_ZERO else None,
        escape_code=n_codes - 1 if flags & FLAG_ESCAPE else None,
    )


def _parse_entries(
    source: ByteReader, dtype: DType, domain: Domain, kind: TableKind, shape: tuple[int, int]
) -> AnyTable:
    n_rows, n_codes = shape

    def vector(n: int, dtype: str) -> NDArray[Any]:
        n_bytes = n * np.dtype(dtype).itemsize
        return np.frombuffer(source.take(n_bytes, "quantization table"), dtype).copy()

    if kind is TableKind.EXPLICIT:
        entry_dtype = "<u4" if domain is Domain.LINEAR else PATTERN_TYPES[dtype.pattern_bytes].str
        return ExplicitTable(vector(n_rows * n_codes, entry_dtype).reshape(shape))
    if domain is Domain.BITS:
        raise UnsupportedError("the map is an expanded table of integers, which this version of ckptz lacks")
    scale, level, offset = (vector(n, "<f8") for n in (n_rows, n_codes, n_rows))
    _check_normal(scale, level, offset)
    return LinearTable(scale, level, offset)


def _check_normal(*vectors: NDArray[np.float64]) -> None:
    """Refuse infinite, NaN and subnormal doubles; some processor modes flush the latter to zero."""
    for vector in vectors:
        exponent = vector.view(np.uint64) >> np.uint64(52) & np.uint64(0x7FF)
        is_zero = (vector.view(np.uint64) << np.uint64(1)) == 0
        if (exponent == 0x7FF).any() or ((exponent == 0) & ~is_zero).any():
            raise CorruptionError("a scale, level or offset is infinite, NaN or subnormal")


def _parse_tables(source: ByteReader, n_contexts: int, n_streams: int) -> tuple[StreamTables, ...]:
    tables = []
    for _ in range(n_streams):
        frequencies = parse_tables(source, MAX_TABLES)
        tables.append(StreamTables(frequencies, parse_runs(source, n_contexts, len(frequencies))))
    return tuple(tables)


# --- outer vectors ------------------------------------------------------------------------------


def _write_outer(out: ByteWriter, outer: AnyOuter) -> None:
    if isinstance(outer, LowRank):
        out.varint(len(outer.scales))
        out.raw(outer.scales.astype("<u4").tobytes())
        outer.stored.write(out)
        return
    for plane in outer.stored:
        plane.write(out)


def _parse_outer(source: ByteReader, shape: tuple[int, ...]) -> Outer:
    n_rows, n_columns = math.prod(shape[:1]), math.prod(shape[1:])
    _check_outer(n_rows + n_columns)
    planes = [take_embedded(source, "outer vector") for _ in range(2 * OUTER_BYTES)]
    return Outer(n_rows, n_columns, planes)


def _check_outer(n: int) -> None:
    if n > MAX_OUTER:
        raise CorruptionError(f"outer vectors of {n} elements, at most {MAX_OUTER} are allowed")


def _parse_low_rank(source: ByteReader, shape: tuple[int, ...]) -> LowRank:
    n_rows, n_columns = math.prod(shape[:1]), math.prod(shape[1:])
    rank = source.varint("rank")
    _check_outer(rank * (n_rows + n_columns))
    if not 1 <= rank <= MAX_RANK:
        raise CorruptionError(f"rank {rank} is outside 1..{MAX_RANK}")
    scales = np.frombuffer(source.take(4 * rank, "term scales"), "<u4").astype(np.uint32)
    if ((scales & np.uint32(0x7FFFFFFF)) > LARGEST_SCALE).any():
        raise CorruptionError("the scale of a term of low rank is NaN or over 2^100")
    return LowRank(n_rows, n_columns, scales, take_embedded(source, "term codes"))


class StreamRecord(NamedTuple):
    """Coder and size of one stream: spec/05-frame.md#chunk-records, coder u8, n_bytes u32."""

    coder: int
    n_bytes: int


class ChunkRecord(NamedTuple):
    """Checksums of the stored bytes and decoded patterns of a chunk, and its streams.

    Implements spec/05-frame.md#chunk-records. `base_codes` is the checksum of the base's codes in this
    chunk, if a context rule reads them.
    """

    stored: int
    decoded: int
    streams: tuple[StreamRecord, ...]
    base_codes: int | None = None

    @property
    def n_bytes(self) -> int:
        """Stored size of the chunk in bytes."""
        return sum([stream.n_bytes for stream in self.streams])

    def pack(self) -> bytes:
        """Pack the record into bytes."""
        sums = (self.stored, self.decoded) + (() if self.base_codes is None else (self.base_codes,))
        streams = [number for stream in self.streams for number in (stream.coder, stream.n_bytes)]
        return _record_layout(len(sums), len(self.streams)).pack(*sums, *streams)


@functools.cache
def _record_layout(n_sums: int, n_streams: int) -> struct.Struct:
    """Return the layout of a packed ChunkRecord."""
    return struct.Struct("<" + "Q" * n_sums + "BI" * n_streams)


def chunk_record_bytes(dtype: DType, plan: Plan) -> int:
    """Return the size of a packed ChunkRecord in bytes."""
    return _record_layout(2 + plan.reads_base_codes, plan.n_streams(dtype)).size


@dataclass(frozen=True)
class FrameHeader:
    """A frame without its streams."""

    dtype: DType
    shape: tuple[int, ...]
    plan: Plan
    chunks: tuple[ChunkRecord, ...]

    @functools.cached_property
    def n_patterns(self) -> int:
        """Number of patterns of the tensor."""
        return self.dtype.n_patterns(self.shape)

    @property
    def row_patterns(self) -> int:
        """Number of patterns of one index of the first dimension."""
        return max(self.n_patterns // n_rows_of(self.shape), 1)

    @property
    def checksum(self) -> int:
        """Checksum of the decoded tensor."""
        return combine(chunk.decoded for chunk in self.chunks)

    @property
    def has_huffman(self) -> bool:
        """True if a stream is coded by Huffman."""
        return any(stream.coder == CoderId.HUFFMAN for chunk in self.chunks for stream in chunk.streams)

    @property
    def payload_bytes(self) -> int:
        """Stored size of all chunks in bytes."""
        return self.chunk_offsets[-1]

    @functools.cached_property
    def chunk_offsets(self) -> tuple[int, ...]:
        """Offset of each chunk from the end of the header."""
        return tuple(itertools.accumulate((chunk.n_bytes for chunk in self.chunks), initial=0))

    @functools.cached_property
    def value_table(self) -> ValueTable:
        """The quantization map as arrays for kernels."""
        return ValueTable(self.dtype, self.plan)

    def pack(self, packed_plan: bytes | None = None) -> bytes:
        """Pack the header; `packed_plan` is the result of `pack_plan`, if the caller has it."""
        packed_plan = packed_plan or pack_plan(self.dtype, self.shape, self.plan)
        body = b"".join((packed_plan, *(chunk.pack() for chunk in self.chunks)))
        length = (PREFIX_BYTES + len(body) + CHECKSUM_BYTES).to_bytes(PREFIX_BYTES, "little")
        return length + body + xxh64(length + body).to_bytes(CHECKSUM_BYTES, "little")

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parse a header, the inverse of `pack`.

        Raises:
            FormatError: the header is damaged or contradicts itself.
            UnsupportedError: an unknown version, id or flag.
        """
        if len(raw) < PREFIX_BYTES + CHECKSUM_BYTES:
            raise CorruptionError(f"frame header of {len(raw)} bytes")
        content, tail = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if xxh64(content) != int.from_bytes(tail, "little"):
            raise ChecksumError("frame header was changed after it was written")
        source = ByteReader(content)
        if source.u32("frame header length") != len(raw):
            raise CorruptionError("frame header length does not match")
        dtype, shape, plan = parse_plan(source)
        chunks = _parse_chunks(source, dtype, shape, plan)
        source.end("frame header")
        return cls(dtype, shape, plan, chunks)


def header_bytes(dtype: DType, shape: tuple[int, ...], plan: Plan, packed_plan: bytes) -> int:
    """Return the size of the packed header in bytes, which does not depend on the encoded chunks."""
    records = n_chunks_of(dtype.n_patterns(shape)) * chunk_record_bytes(dtype, plan)
    return PREFIX_BYTES + len(packed_plan) + records + CHECKSUM_BYTES


def header_length(prefix: bytes, most: int) -> int:
    """Return the header size in bytes from its first four bytes, checked against the frame size."""
    length = ByteReader(prefix).u32("frame header length")
    if not PREFIX_BYTES + CHECKSUM_BYTES <= length <= most:
        raise CorruptionError(f"frame header claims {length} bytes in a frame of {most}")
    return length


def _parse_chunks(
    source: ByteReader, dtype: DType, shape: tuple[int, ...], plan: Plan
) -> tuple[ChunkRecord, ...]:
    n_chunks, n_sums = n_chunks_of(dtype.n_patterns(shape)), 2 + plan.reads_base_codes
    layout = _record_layout(n_sums, plan.n_streams(dtype))
    if n_chunks * layout.size != source.left:
        raise CorruptionError(f"{source.left} bytes of chunk records for {n_chunks} chunks")
    chunks = []
    for numbers in layout.iter_unpack(source.take(source.left, "chunk records")):
        stream_numbers = numbers[n_sums:]
        streams = tuple(map(StreamRecord, stream_numbers[::2], stream_numbers[1::2]))
        _check_coders(streams, plan, dtype)
        chunks.append(ChunkRecord(numbers[0], numbers[1], streams, *numbers[2:n_sums]))
    return tuple(chunks)


def _check_coders(streams: tuple[StreamRecord, ...], plan: Plan, dtype: DType) -> None:
    """Refuse unknown coders, and coders that a stream must not have."""
    n_code_streams = plan.n_code_streams(dtype)
    for i, stream in enumerate(streams):
        check_coder(stream.coder, is_of_codes=i < n_code_streams)
        if stream.coder == CoderId.RANS_SHARED and not plan.tables:
            raise CorruptionError("a stream uses the tensor's tables, and the frame has none")
