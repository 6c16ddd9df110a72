"""Frame: one encoded tensor. Implements spec/05-frame.md.

    header | streams of chunk 0 | streams of chunk 1 | ...

Knows nothing of files, chains or sockets: container and wire both carry frames.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.bits.checksum import combine, xxh64
from ckptz.bits.cursor import ByteReader, ByteWriter
from ckptz.codec.plan import Plan, Predictor, StreamTables
from ckptz.codec.units import n_chunks_of
from ckptz.dtypes import DType, dtype_of_id
from ckptz.entropy.frequency import parse_tables, write_tables
from ckptz.errors import ChecksumError, CorruptionError, UnsupportedError
from ckptz.kernels import cpu
from ckptz.transform.classes import MAX_TABLES, N_MAGNITUDE_CLASSES, ClassRule, TableMap
from ckptz.transform.planes import PlaneMode

FRAME_VERSION: Final = 0  # 0 until format 1.0; spec/versions.md
MAX_DIMS: Final = 64
MAX_ELEMENTS: Final = 1 << 48
PREFIX_BYTES: Final = 4  # the header's own length, u32
CHECKSUM_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """spec/05-frame.md#chunk-records: coder u8, n_bytes u32."""

    coder: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """spec/05-frame.md#chunk-records: checksums of the stored bytes and the decoded units, then streams."""

    stored: int
    decoded: int
    streams: tuple[StreamRecord, ...]

    @property
    def n_bytes(self) -> int:
        """Stored bytes of the chunk."""
        return sum(stream.n_bytes for stream in self.streams)


def chunk_record_bytes(n_streams: int) -> int:
    """Size of a packed ChunkRecord."""
    return 16 + 5 * n_streams


@dataclass(frozen=True)
class FrameHeader:
    """Everything about a frame but its streams."""

    dtype: DType
    shape: tuple[int, ...]
    plan: Plan
    chunks: tuple[ChunkRecord, ...]

    @property
    def n_units(self) -> int:
        """Units of the tensor."""
        return self.dtype.n_units(self.shape)

    @property
    def checksum(self) -> int:
        """Checksum of the decoded tensor."""
        return combine(chunk.decoded for chunk in self.chunks)

    @property
    def payload_bytes(self) -> int:
        """Stored bytes of all chunks."""
        return sum(chunk.n_bytes for chunk in self.chunks)

    @functools.cached_property
    def chunk_offsets(self) -> tuple[int, ...]:
        """Offset of each chunk from the end of the header."""
        return tuple(itertools.accumulate((chunk.n_bytes for chunk in self.chunks), initial=0))

    @functools.cached_property
    def slot_tables(self) -> tuple[NDArray[np.uint32], ...]:
        """Decoding tables of each stream, made once."""
        return tuple(cpu().slot_tables(stream.frequencies) for stream in self.plan.tables)

    def pack(self) -> bytes:
        """The header's bytes."""
        out = ByteWriter()
        _write_plan(out, self.dtype, self.shape, self.plan)
        for chunk in self.chunks:
            out.u64(chunk.stored)
            out.u64(chunk.decoded)
            for stream in chunk.streams:
                out.u8(stream.coder)
                out.u32(stream.n_bytes)
        body = out.getvalue()
        length = (PREFIX_BYTES + len(body) + CHECKSUM_BYTES).to_bytes(PREFIX_BYTES, "little")
        return length + body + xxh64(length + body).to_bytes(CHECKSUM_BYTES, "little")

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Inverse of `pack`, from exactly the header's bytes.

        Raises:
            FormatError: the header is damaged or contradicts itself.
            UnsupportedError: it uses what this version does not know.
        """
        if len(raw) < PREFIX_BYTES + CHECKSUM_BYTES:
            raise CorruptionError(f"frame header of {len(raw)} bytes")
        content, tail = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if xxh64(content) != int.from_bytes(tail, "little"):
            raise ChecksumError("frame header was changed after it was written")
        source = ByteReader(content)
        if source.u32("frame header length") != len(raw):
            raise CorruptionError("frame header length does not match")
        dtype, shape, plan = _parse_plan(source)
        chunks = _parse_chunks(source, dtype, shape)
        source.end("frame header")
        return cls(dtype, shape, plan, chunks)


def header_bytes(dtype: DType, shape: tuple[int, ...], plan: Plan) -> int:
    """Size of the packed header, known before any chunk is encoded."""
    out = ByteWriter()
    _write_plan(out, dtype, shape, plan)
    n_chunks = n_chunks_of(dtype.n_units(shape))
    return PREFIX_BYTES + len(out) + n_chunks * chunk_record_bytes(dtype.unit_bytes) + CHECKSUM_BYTES


def header_length(prefix: bytes, most: int) -> int:
    """The header's size in bytes from its first four, checked against the frame's size."""
    length = ByteReader(prefix).u32("frame header length")
    if not PREFIX_BYTES + CHECKSUM_BYTES <= length <= most:
        raise CorruptionError(f"frame header claims {length} bytes in a frame of {most}")
    return length


def _write_plan(out: ByteWriter, dtype: DType, shape: tuple[int, ...], plan: Plan) -> None:
    out.u8(FRAME_VERSION)
    out.u8(dtype.id)
    out.u8(plan.domain)
    out.u8(plan.predictor)
    out.u8(0)  # flags, all reserved
    out.u8(len(shape))
    for n in shape:
        out.varint(n)
    out.u8(plan.mode)
    out.u8(plan.class_rule is not None)
    if plan.class_rule is not None:
        out.u8(plan.class_rule)
        for stream in plan.tables:
            write_tables(out, stream.frequencies)
            stream.table_map.write(out)


def _parse_plan(source: ByteReader) -> tuple[DType, tuple[int, ...], Plan]:
    version = source.u8("frame version")
    if version != FRAME_VERSION:
        raise UnsupportedError(f"frame version {version} is not known to this version of ckptz; upgrade it")
    dtype = dtype_of_id(source.u8("frame dtype"))
    domain, predictor = source.u8("frame domain"), source.u8("frame predictor")
    flags = source.u8("frame flags")
    if domain or flags:
        raise UnsupportedError(f"frame of domain {domain} with flags {flags:#04x} needs a newer ckptz")
    shape = _parse_shape(source)
    try:
        mode = PlaneMode(source.u8("plane mode"))
    except ValueError as error:
        raise UnsupportedError(f"{error}; a newer ckptz may know it") from None
    n_rules = source.u8("number of class rules")
    if n_rules > 1:
        raise UnsupportedError(f"{n_rules} class rules in a lossless frame; a newer ckptz may know them")
    plan = _parse_classes(source, dtype, mode) if n_rules else Plan(mode)
    if plan.predictor != predictor or (plan.class_rule and plan.predictor is not Predictor.BASE):
        raise CorruptionError(f"predictor {predictor} does not fit plane mode {mode}")
    return dtype, shape, plan


def _parse_shape(source: ByteReader) -> tuple[int, ...]:
    n_dims = source.u8("number of dimensions")
    if n_dims > MAX_DIMS:
        raise CorruptionError(f"{n_dims} dimensions, at most {MAX_DIMS} are allowed")
    shape = tuple(source.varint("dimension") for _ in range(n_dims))
    if math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:
        raise CorruptionError(f"shape {list(shape)} exceeds 2^48 elements")
    return shape


def _parse_classes(source: ByteReader, dtype: DType, mode: PlaneMode) -> Plan:
    rule = source.u8("class rule")
    if rule != ClassRule.BASE_MAGNITUDE:
        raise UnsupportedError(f"class rule {rule} is not known to this version of ckptz; upgrade it")
    tables = []
    for _ in range(dtype.unit_bytes):
        frequencies = parse_tables(source, MAX_TABLES)
        table_map = TableMap.parse(source, N_MAGNITUDE_CLASSES, len(frequencies))
        tables.append(StreamTables(frequencies, table_map))
    return Plan(mode, ClassRule.BASE_MAGNITUDE, tuple(tables))


def _parse_chunks(source: ByteReader, dtype: DType, shape: tuple[int, ...]) -> tuple[ChunkRecord, ...]:
    n_chunks = n_chunks_of(dtype.n_units(shape))
    if n_chunks * chunk_record_bytes(dtype.unit_bytes) != source.left:
        raise CorruptionError(f"{source.left} bytes of chunk records for {n_chunks} chunks")
    chunks = []
    for _ in range(n_chunks):
        stored, decoded = source.u64("stored checksum"), source.u64("decoded checksum")
        streams = tuple(
            StreamRecord(source.u8("coder"), source.u32("stream length")) for _ in range(dtype.unit_bytes)
        )
        chunks.append(ChunkRecord(stored, decoded, streams))
    return tuple(chunks)
