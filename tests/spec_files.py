"""Frames and files made of hand-written bytes, right or wrong, for the refusals of the specification."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptz.bits.checksum import combine, xxh64
from ckptz.bits.cursor import ByteWriter
from ckptz.codec.decode import decode_chunk
from ckptz.codec.frame import FrameHeader
from ckptz.codec.sources import ChunkSources
from ckptz.codec.units import UNIT_TYPES, UnitSource
from ckptz.container.byte_source import MemoryBytes
from ckptz.container.index import content_id
from ckptz.dtypes import dtype_of
from ckptz.entropy.streams import CoderId
from ckptz.store.resolve import Checkpoint, open_source

Stream = tuple[int, bytes]
Json = dict[str, Any]
CONSTANT, STORED, ZSTD, SHARED, OWN, SPARSE = CoderId
ABSENT = "absent"  # takes a field out


def varint(value: int) -> bytes:
    """See spec/01-integers.md#varint."""
    out = ByteWriter()
    out.varint(value)
    return out.getvalue()


def plan(
    *,
    version: int = 0,
    dtype: str = "U8",
    dtype_id: int | None = None,
    domain: int = 0,
    predictor: int = 0,
    flags: int = 0,
    shape: Sequence[int] = (4,),
    sizes: bytes | None = None,
    mode: int = 0,
    rules: Sequence[bytes] = (),
    rest: bytes = b"",
) -> bytes:
    """A plan as spec/05-frame.md#plan lists it; `rest` is map, tables and outer vectors."""
    fixed = bytes((version, dtype_of(dtype).id if dtype_id is None else dtype_id, domain, predictor))
    sizes = b"".join(map(varint, shape)) if sizes is None else sizes
    modes = bytes((mode,)) if domain == 0 else b""
    fixed += flags.to_bytes(4, "little")
    return fixed + bytes((len(shape),)) + sizes + modes + bytes((len(rules),)) + b"".join(rules) + rest


@dataclass
class Frame:
    """One frame; by default of one chunk, four bytes, stored."""

    plan: bytes = field(default_factory=plan)
    streams: Sequence[Stream] = ((STORED, b"\1\2\3\4"),)
    decoded: bytes = b"\1\2\3\4"
    dtype: str = "U8"
    shape: tuple[int, ...] = (4,)
    n_chunks: int = 1
    base_codes: int | None = None
    stored_checksum: int | None = None
    decoded_checksum: int | None = None
    behind_records: bytes = b""
    behind: bytes = b""

    @property
    def payload(self) -> bytes:
        """The bytes of a chunk."""
        return b"".join(data for _, data in self.streams)

    @property
    def checksum(self) -> int:
        """Of a decoded chunk."""
        return xxh64(self.decoded) if self.decoded_checksum is None else self.decoded_checksum

    @property
    def header(self) -> bytes:
        out = ByteWriter()
        out.raw(self.plan)
        for _ in range(self.n_chunks):
            out.u64(xxh64(self.payload) if self.stored_checksum is None else self.stored_checksum)
            out.u64(self.checksum)
            if self.base_codes is not None:
                out.u64(self.base_codes)
            for coder, data in self.streams:
                out.u8(coder)
                out.u32(len(data))
        out.raw(self.behind_records)
        content = (12 + len(out)).to_bytes(4, "little") + out.getvalue()
        return content + xxh64(content).to_bytes(8, "little")

    @property
    def bytes(self) -> bytes:
        return self.header + self.payload * self.n_chunks + self.behind

    @property
    def tensor_checksum(self) -> int:
        return combine([self.checksum] * self.n_chunks)

    def parse(self) -> FrameHeader:
        """The header, as the reader sees it."""
        return FrameHeader.parse(self.header)

    def decode(self, base: UnitSource | None = None) -> bytes:
        """The units of the one chunk, as the reader decodes them."""
        header = self.parse()
        out = np.empty(header.n_units, UNIT_TYPES[header.dtype.unit_bytes])
        payload = np.frombuffer(self.payload, np.uint8)
        decode_chunk(header, 0, payload, ChunkSources(0, len(out), base), out)
        return out.tobytes()


@dataclass
class File:
    """A `.ckptz` file; fields that are set replace, or add to, what would be right."""

    frames: Mapping[str, Frame] = field(default_factory=lambda: {"w": Frame()})
    features: str = "lossless"
    index: Json = field(default_factory=dict)
    entry: Json = field(default_factory=dict)
    metadata: Json = field(default_factory=dict)
    header: Json = field(default_factory=dict)
    region: Json = field(default_factory=dict)
    index_region: Json = field(default_factory=dict)
    packed: bytes | None = None
    text: bytes | None = None
    before: bytes = b""
    behind: bytes = b""

    def _entries(self) -> list[Json]:
        entries, offset = [], 0
        for name, frame in self.frames.items():
            n_bytes, checksum = len(frame.bytes), f"{frame.tensor_checksum:016x}"
            place = {"offset": offset, "n_bytes": n_bytes, "checksum": checksum}
            entry = {"name": name, "dtype": frame.dtype, "shape": list(frame.shape), **place, **self.entry}
            entries.append({key: value for key, value in entry.items() if value != ABSENT})
            offset += n_bytes
        return entries

    def content_id(self) -> str:
        """Of the entries as they are, where they make sense."""
        with contextlib.suppress(Exception):
            rows = (
                (e["name"], e["dtype"], tuple(e["shape"]), int(e["checksum"], 16)) for e in self._entries()
            )
            return content_id(rows)
        return "0" * 64

    def packed_index(self) -> bytes:
        """The region of the index, plain."""
        if self.packed is not None:
            return self.packed
        known = {"writer": "by hand", "content_id": self.content_id(), "tensors": self._entries()}
        index = {key: value for key, value in {**known, **self.index}.items() if value != ABSENT}
        return b"\0" + json.dumps(index).encode()

    def bytes(self) -> bytes:
        packed = self.packed_index()
        metadata = {
            "ckptz.format": "ckptz",
            "ckptz.version": "0.1",
            "ckptz.required_features": self.features,
            "ckptz.index_sha256": hashlib.sha256(packed).hexdigest(),
            **self.metadata,
        }
        rows: Json = {"__metadata__": {k: v for k, v in metadata.items() if v != ABSENT}}
        blobs = [(name, frame.bytes, self.region) for name, frame in self.frames.items()]
        begin = 0
        for name, data, changes in [*blobs, ("__ckptz__.index", packed, self.index_region)]:
            end = begin + len(data)
            rows[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [begin, end], **changes}
            begin = end
        text = json.dumps({**rows, **self.header}).encode() if self.text is None else self.text
        text = self.before + text
        data = b"".join(data for _, data, _ in blobs) + packed + self.behind
        return len(text).to_bytes(8, "little") + text + data

    def open(self) -> Checkpoint:
        return open_bytes(self.bytes())

    def read(self) -> dict[str, bytes]:
        """Every tensor's bytes."""
        return read_all(self.open())


def open_bytes(data: bytes) -> Checkpoint:
    """A file in memory."""
    return open_source(MemoryBytes(data))


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Every tensor's bytes."""
    sources = checkpoint.tensors.items()
    return {name: s.units(0, s.dtype.n_units(s.shape)).tobytes() for name, s in sources}


def plain_file(rows: Json, data: bytes) -> bytes:
    """A safetensors file with this header."""
    text = json.dumps(rows).encode()
    return len(text).to_bytes(8, "little") + text + data


def header_text(data: bytes) -> bytes:
    """The header of a file."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
