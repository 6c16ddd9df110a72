"""Frame: one encoded tensor. Implements spec/05-frame.md.

    header | streams of chunk 0 | streams of chunk 1 | ...

Knows nothing of files, chains or sockets: container and wire both carry frames.
"""

from __future__ import annotations

import functools
import itertools
import struct
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.bits.checksum import combine, xxh64
from ckptz.bits.cursor import ByteReader
from ckptz.codec.frame_plan import pack_plan, parse_plan
from ckptz.codec.plan import Plan
from ckptz.codec.units import n_chunks_of, n_rows_of
from ckptz.codec.values import ValueTable
from ckptz.dtypes import DType
from ckptz.entropy.streams import CoderId
from ckptz.errors import ChecksumError, CorruptionError, UnsupportedError
from ckptz.kernels import cpu

PREFIX_BYTES: Final = 4  # the header's own length, u32
CHECKSUM_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """Coder and size of one stream: spec/05-frame.md#chunk-records, coder u8, n_bytes u32."""

    coder: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Checksums of a chunk's stored bytes and decoded units, and its streams: spec/05-frame.md#chunk-records.

    `base_codes` is the checksum of the base's codes in this chunk, where a class rule reads them.
    """

    stored: int
    decoded: int
    streams: tuple[StreamRecord, ...]
    base_codes: int | None = None

    @property
    def n_bytes(self) -> int:
        """Stored bytes of the chunk."""
        return sum([stream.n_bytes for stream in self.streams])

    def pack(self) -> bytes:
        """Write the record's bytes."""
        sums = (self.stored, self.decoded) + (() if self.base_codes is None else (self.base_codes,))
        streams = [number for stream in self.streams for number in (stream.coder, stream.n_bytes)]
        return _record_layout(len(sums), len(self.streams)).pack(*sums, *streams)


@functools.cache
def _record_layout(n_sums: int, n_streams: int) -> struct.Struct:
    """Describe a packed ChunkRecord with so many checksums."""
    return struct.Struct("<" + "Q" * n_sums + "BI" * n_streams)


def chunk_record_bytes(dtype: DType, plan: Plan) -> int:
    """Count the bytes of a packed ChunkRecord."""
    return 16 + 8 * plan.reads_base_codes + 5 * plan.n_streams(dtype)


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
    def row_units(self) -> int:
        """Units of one index of the first dimension."""
        return max(self.n_units // n_rows_of(self.shape), 1)

    @property
    def checksum(self) -> int:
        """Checksum of the decoded tensor."""
        return combine(chunk.decoded for chunk in self.chunks)

    @property
    def payload_bytes(self) -> int:
        """Stored bytes of all chunks."""
        return self.chunk_offsets[-1]

    @functools.cached_property
    def chunk_offsets(self) -> tuple[int, ...]:
        """Offset of each chunk from the end of the header."""
        return tuple(itertools.accumulate((chunk.n_bytes for chunk in self.chunks), initial=0))

    @functools.cached_property
    def slot_tables(self) -> tuple[NDArray[np.uint32], ...]:
        """Decoding tables of each stream, made once."""
        return tuple(cpu().slot_tables(stream.frequencies) for stream in self.plan.tables)

    @functools.cached_property
    def value_table(self) -> ValueTable:
        """The quantization map ready for the kernels, made once."""
        return ValueTable(self.dtype, self.plan)

    def pack(self, packed_plan: bytes | None = None) -> bytes:
        """Write the header's bytes; `packed_plan` is what `pack_plan` gave, where the caller has it."""
        packed_plan = packed_plan or pack_plan(self.dtype, self.shape, self.plan)
        body = b"".join((packed_plan, *(chunk.pack() for chunk in self.chunks)))
        length = (PREFIX_BYTES + len(body) + CHECKSUM_BYTES).to_bytes(PREFIX_BYTES, "little")
        return length + body + xxh64(length + body).to_bytes(CHECKSUM_BYTES, "little")

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Undo `pack`, from exactly the header's bytes.

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
        dtype, shape, plan = parse_plan(source)
        chunks = _parse_chunks(source, dtype, shape, plan)
        source.end("frame header")
        return cls(dtype, shape, plan, chunks)


def header_bytes(dtype: DType, shape: tuple[int, ...], plan: Plan, packed_plan: bytes) -> int:
    """Count the bytes of the packed header, known before any chunk is encoded."""
    records = n_chunks_of(dtype.n_units(shape)) * chunk_record_bytes(dtype, plan)
    return PREFIX_BYTES + len(packed_plan) + records + CHECKSUM_BYTES


def header_length(prefix: bytes, most: int) -> int:
    """Read the header's size in bytes from its first four, checked against the frame's size."""
    length = ByteReader(prefix).u32("frame header length")
    if not PREFIX_BYTES + CHECKSUM_BYTES <= length <= most:
        raise CorruptionError(f"frame header claims {length} bytes in a frame of {most}")
    return length


def _parse_chunks(
    source: ByteReader, dtype: DType, shape: tuple[int, ...], plan: Plan
) -> tuple[ChunkRecord, ...]:
    n_chunks = n_chunks_of(dtype.n_units(shape))
    if n_chunks * chunk_record_bytes(dtype, plan) != source.left:
        raise CorruptionError(f"{source.left} bytes of chunk records for {n_chunks} chunks")
    n_sums, chunks = 2 + plan.reads_base_codes, []
    layout = _record_layout(n_sums, plan.n_streams(dtype))
    for numbers in layout.iter_unpack(source.take(source.left, "chunk records")):
        rest = numbers[n_sums:]
        streams = tuple(map(StreamRecord, rest[::2], rest[1::2]))
        _check_coders(streams, len(plan.tables))
        chunks.append(ChunkRecord(numbers[0], numbers[1], streams, *numbers[2:n_sums]))
    return tuple(chunks)


def _check_coders(streams: tuple[StreamRecord, ...], n_shared: int) -> None:
    """Refuse coders that are not known, or that streams behind the first `n_shared` cannot have."""
    for i, stream in enumerate(streams):
        if stream.coder > CoderId.SPARSE:
            raise UnsupportedError(f"coder {stream.coder} is not known to this ckptz; upgrade it")
        if stream.coder == CoderId.RANS_SHARED and i >= n_shared:
            raise CorruptionError("a stream uses the tensor's tables, and there are none for it")
