"""Hand-made frames and files, valid or not, for the refusals of the specification."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ckptz.format.bits import ByteWriter, combine, xxh64
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.decode import decode_chunk
from ckptz.format.dtypes import dtype_of
from ckptz.format.frame import FrameHeader
from ckptz.format.index import content_id
from ckptz.format.reader import check_empty
from ckptz.format.sources import PATTERN_TYPES, ChunkSources, TensorSource
from ckptz.format.streams import CoderId
from ckptz.store.resolve import Checkpoint, open_checkpoint

Stream = tuple[int, bytes]
Files = dict[str, bytes]  # by name; the first is the one to read, the others are for its base
Json = dict[str, Any]
Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
Members = Mapping[str, tuple[tuple[int, ...], bytes]]  # tensors of a group: shape and bytes by name
CONSTANT, STORED, ZSTD, SHARED, OWN, SPARSE, HUFFMAN = CoderId
ABSENT = "absent"  # value of a field that is left out


def varint(value: int) -> bytes:
    """Encode an integer; see spec/01-integers.md#varint."""
    out = ByteWriter()
    out.varint(value)
    return out.getvalue()


def plan(
    *,
    version: int = 1,
    dtype: str = "U8",
    dtype_id: int | None = None,
    domain: int = 0,
    predictor: int = 0,
    flags: int = 0,
    shape: Sequence[int] = (4,),
    sizes: bytes | None = None,
    mode: int = 0,
    rules: Sequence[bytes] = (),
    tail: bytes = b"",
) -> bytes:
    """Encode a plan; see spec/05-frame.md#plan. `tail` is the map, the tables and the outer vectors."""
    fixed = bytes((version, dtype_of(dtype).id if dtype_id is None else dtype_id, domain, predictor))
    sizes = b"".join(map(varint, shape)) if sizes is None else sizes
    modes = bytes((mode,)) if domain == 0 else b""
    fixed += flags.to_bytes(4, "little")
    return fixed + bytes((len(shape),)) + sizes + modes + bytes((len(rules),)) + b"".join(rules) + tail


def embedded(codes: bytes, coder: int = CoderId.STORED) -> bytes:
    """Encode an embedded stream of the bytes `codes`; see spec/02-entropy.md#embedded-streams."""
    return bytes((coder,)) + varint(len(codes)) + codes


def vectors(*each: bytes) -> bytes:
    """Encode outer vectors of F32 as stored planes."""
    return b"".join(embedded(vector[j::4]) for vector in each for j in range(4))


class Input(Protocol):
    """Something that has files for a reader."""

    def files(self) -> Files: ...


@dataclass
class Frame:
    """A frame, by default of one chunk with four bytes in a stored stream.

    All `n_chunks` chunks are equal; `last` has the streams and the decoded bytes of one more chunk.
    """

    plan: bytes = field(default_factory=plan)
    streams: Sequence[Stream] = ((STORED, b"\1\2\3\4"),)
    decoded: bytes = b"\1\2\3\4"
    dtype: str = "U8"
    shape: tuple[int, ...] = (4,)
    n_chunks: int = 1
    last: tuple[Sequence[Stream], bytes] | None = None
    base_codes: int | None = None
    stored_checksum: int | None = None
    decoded_checksum: int | None = None
    behind_records: bytes = b""
    behind: bytes = b""

    @property
    def payload(self) -> bytes:
        """The stored bytes of a chunk."""
        return b"".join(data for _, data in self.streams)

    @property
    def checksum(self) -> int:
        """The checksum of a decoded chunk."""
        return xxh64(self.decoded) if self.decoded_checksum is None else self.decoded_checksum

    def _record(self, out: ByteWriter, streams: Sequence[Stream], decoded: int) -> None:
        stored = xxh64(b"".join(data for _, data in streams))
        out.u64(stored if self.stored_checksum is None else self.stored_checksum)
        out.u64(decoded)
        if self.base_codes is not None:
            out.u64(self.base_codes)
        for coder, data in streams:
            out.u8(coder)
            out.u32(len(data))

    @property
    def header(self) -> bytes:
        out = ByteWriter()
        out.raw(self.plan)
        for _ in range(self.n_chunks):
            self._record(out, self.streams, self.checksum)
        if self.last:
            self._record(out, self.last[0], xxh64(self.last[1]))
        out.raw(self.behind_records)
        content = (12 + len(out)).to_bytes(4, "little") + out.getvalue()
        return content + xxh64(content).to_bytes(8, "little")

    @property
    def bytes(self) -> bytes:
        last = b"".join(data for _, data in self.last[0]) if self.last else b""
        return self.header + self.payload * self.n_chunks + last + self.behind

    @property
    def patterns(self) -> bytes:
        """The decoded bytes of all chunks."""
        return self.decoded * self.n_chunks + (self.last[1] if self.last else b"")

    @property
    def tensor_checksum(self) -> int:
        return combine([self.checksum] * self.n_chunks + ([xxh64(self.last[1])] if self.last else []))

    def parse(self) -> FrameHeader:
        """Parse the header by the reader."""
        return FrameHeader.parse(self.header)

    def files(self) -> Files:
        """Return a file with this frame only."""
        return File({"w": self}, features="lossless,maps").files()

    def decode(self, base: TensorSource | None = None) -> bytes:
        """Decode the only chunk by the reader."""
        header = self.parse()
        out = np.empty(header.n_patterns, PATTERN_TYPES[header.dtype.pattern_bytes])
        payload = np.frombuffer(self.payload, np.uint8)
        decode_chunk(header, 0, payload, ChunkSources(0, len(out), base), out)
        return out.tobytes()


@dataclass
class File:
    """A `.ckptz` file; fields that are set replace the valid values or are added to them.

    `groups` has the members of the frames that several tensors share. `order` lists the names of all tensors
    if they are not in the order of the frames.
    """

    frames: Mapping[str, Frame] = field(default_factory=lambda: {"w": Frame()})
    inline: Sequence[Mapping[str, Frame]] = ()
    groups: Mapping[str, Members] = field(default_factory=dict)
    order: Sequence[str] = ()
    features: str = "lossless"
    index: Json = field(default_factory=dict)
    entry: Json = field(default_factory=dict)
    inline_entry: Json = field(default_factory=dict)
    metadata: Json = field(default_factory=dict)
    header: Json = field(default_factory=dict)
    region: Json = field(default_factory=dict)
    index_region: Json = field(default_factory=dict)
    packed: bytes | None = None
    optional: Mapping[str, bytes] = field(default_factory=dict)
    text: bytes | None = None
    before: bytes = b""
    behind: bytes = b""

    def entries(self, level: int = 0) -> list[Json]:
        """Return the index entries of the file's tensors, or of inline base `level`."""
        levels, groups = [self.frames, *self.inline], self.groups if level == 0 else {}
        offset = sum(len(frame.bytes) for frames in levels[:level] for frame in frames.values())
        entries, changes = [], self.inline_entry if level else self.entry
        for name, frame in levels[level].items():
            n_bytes, checksum = len(frame.bytes), f"{frame.tensor_checksum:016x}"
            position = {"offset": offset, "n_bytes": n_bytes, "checksum": checksum}
            for member, (shape, decoded) in groups.get(name, {name: (frame.shape, b"")}).items():
                entry = {"name": member, "dtype": frame.dtype, "shape": list(shape), **position}
                if name in groups:
                    entry |= {
                        "checksum": f"{combine([xxh64(decoded)]):016x}",
                        "group": list(groups).index(name),
                    }
                entry |= changes
                entries.append({key: value for key, value in entry.items() if value != ABSENT})
            offset += n_bytes
        return sorted(entries, key=lambda entry: self.order.index(entry["name"])) if self.order else entries

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the file decodes to."""
        decoded: dict[str, Tensor] = {}
        for name, frame in self.frames.items():
            members = self.groups.get(name, {name: (frame.shape, frame.patterns)})
            decoded |= {member: (frame.dtype, shape, data) for member, (shape, data) in members.items()}
        return {name: decoded[name] for name in self.order or decoded}

    def content_id(self) -> str:
        """Return the content id of the entries, or zeros if they are too invalid to have one."""
        with contextlib.suppress(Exception):
            rows = (
                (e["name"], e["dtype"], tuple(e["shape"]), int(e["checksum"], 16)) for e in self.entries()
            )
            return content_id(rows)
        return "0" * 64

    def packed_index(self) -> bytes:
        """Return the region of the index, uncompressed."""
        if self.packed is not None:
            return self.packed
        valid: Json = {"writer": "by hand", "content_id": self.content_id(), "tensors": self.entries()}
        if self.inline:
            rows = [self.entries(level) for level in range(1, len(self.inline) + 1)]
            valid["inline"] = [{"content_id": "", "file": "", "tensors": entries} for entries in rows]
        index = {key: value for key, value in {**valid, **self.index}.items() if value != ABSENT}
        return b"\0" + json.dumps(index).encode()

    def bytes(self) -> bytes:
        packed = self.packed_index()
        metadata = {
            "ckptz.format": "ckptz",
            "ckptz.version": "1.0",
            "ckptz.required_features": self.features,
            "ckptz.index_sha256": hashlib.sha256(packed).hexdigest(),
            **self.metadata,
        }
        rows: Json = {"__metadata__": {k: v for k, v in metadata.items() if v != ABSENT}}
        blobs = [(name, frame.bytes, self.region) for name, frame in self.frames.items()]
        for level, frames in enumerate(self.inline, 1):
            names = [f"__ckptz__.inline.{level}.{position}" for position in range(len(frames))]
            blobs += [(n, frame.bytes, self.region) for n, frame in zip(names, frames.values(), strict=True)]
        blobs += [(f"__ckptz__.optional.{name}", data, {}) for name, data in self.optional.items()]
        begin = 0
        for name, data, changes in [*blobs, ("__ckptz__.index", packed, self.index_region)]:
            end = begin + len(data)
            rows[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [begin, end], **changes}
            begin = end
        text = json.dumps({**rows, **self.header}).encode() if self.text is None else self.text
        text = self.before + text
        data = b"".join(data for _, data, _ in blobs) + packed + self.behind
        return len(text).to_bytes(8, "little") + text + data

    def files(self) -> Files:
        """Return this file."""
        return {"w.ckptz": self.bytes()}

    def open(self) -> Checkpoint:
        return open_bytes(self.bytes())

    def read(self) -> dict[str, bytes]:
        """Return the bytes of every tensor."""
        return read_all(self.open())


@dataclass(frozen=True)
class Raw:
    """A file of these bytes."""

    data: bytes

    def files(self) -> Files:
        """Return this file."""
        return {"w.ckptz": self.data}


@dataclass(frozen=True)
class Folder:
    """Several files, the first of which is to be read."""

    contents: Files

    def files(self) -> Files:
        """Return all files."""
        return self.contents


def read_files(files: Files, folder: Path) -> dict[str, bytes]:
    """Read every tensor's bytes of the first file; the other files are written to `folder` with it."""
    first = next(iter(files))
    if len(files) == 1:
        return read_all(open_bytes(files[first]))
    for name, data in files.items():
        folder.joinpath(name).write_bytes(data)
    checkpoint = open_checkpoint(folder / first)
    try:
        return read_all(checkpoint)
    finally:
        checkpoint.close()


def open_bytes(data: bytes) -> Checkpoint:
    """Open a file in memory."""
    return open_checkpoint(MemoryBytes(data))


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the bytes of every tensor."""
    for source in checkpoint.tensors.values():
        check_empty(source)
    sources = checkpoint.tensors.items()
    return {name: s.patterns(0, s.dtype.n_patterns(s.shape)).tobytes() for name, s in sources}


def plain_file(rows: Json, data: bytes) -> bytes:
    """Return the bytes of a safetensors file with this header."""
    text = json.dumps(rows).encode()
    return len(text).to_bytes(8, "little") + text + data


def header_text(data: bytes) -> bytes:
    """Return the header of a file."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
