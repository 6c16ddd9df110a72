"""Mutants of valid files with valid checksums, which reach the parsers and decoders behind the checks.

A file is split into the pieces of `spec_files`, changed, and reassembled. All that depends on the pieces is
computed anew: lengths, offsets, dtypes and shapes in the index, checksums of headers, stored chunks, base
codes and decoded chunks, content ids and the digest of the index.
"""

import contextlib
import copy
import dataclasses
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptz.errors import CkptzError
from ckptz.format.bits import xxh64
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.dtypes import DTYPES
from ckptz.format.envelope import PlainFile
from ckptz.format.frame import FrameHeader, chunk_record_bytes
from ckptz.format.index import INDEX_NAME, OPTIONAL_PREFIX, content_id_of
from ckptz.format.reader import FrameSource
from ckptz.format.sources import PATTERN_TYPES
from ckptz.store.resolve import Checkpoint, open_checkpoint
from tests.support.spec_files import File, Frame, Json, plain_file

MAX_BYTES = 1 << 20  # decoded size of a tensor that a reader of mutants decodes
ROUNDS = 3  # of fitting checksums: a tensor, one that its contexts name, and one that those name
Rng = np.random.Generator


@dataclass
class Plain:
    """A plain safetensors file."""

    rows: Json
    data: bytes

    def bytes(self) -> bytes:
        return plain_file(self.rows, self.data)

    def content_id(self) -> str:
        return content_id_of(PlainFile(MemoryBytes(self.bytes())).tensors)


Member = File | Plain


# --- splitting ----------------------------------------------------------------------------------


def frame_of(data: bytes) -> Frame:
    """Parse a frame of at most one chunk; other frames raise ValueError."""
    length = int.from_bytes(data[:4], "little")
    header = FrameHeader.parse(data[:length])
    if len(header.chunks) > 1:
        raise ValueError("more than one chunk")
    n_records = len(header.chunks) * chunk_record_bytes(header.dtype, header.plan)
    record = header.chunks[0] if header.chunks else None
    at, streams = length, []
    for stream in record.streams if record else ():
        streams.append((stream.coder, data[at : at + stream.n_bytes]))
        at += stream.n_bytes
    return Frame(
        plan=data[4 : length - 8 - n_records],
        streams=streams,
        decoded=b"",
        dtype=header.dtype.name,
        shape=header.shape,
        n_chunks=len(header.chunks),
        base_codes=record.base_codes if record else None,
        decoded_checksum=record.decoded if record else 0,
    )


def file_of(data: bytes) -> Member:
    """Split a file into its pieces."""
    at = 8 + int.from_bytes(data[:8], "little")
    rows = json.loads(data[8:at])
    if (rows.get("__metadata__") or {}).get("ckptz.format") != "ckptz":
        return Plain(rows, data[at:])
    metadata = rows.pop("__metadata__")
    parts = {name: data[at + r["data_offsets"][0] : at + r["data_offsets"][1]] for name, r in rows.items()}
    packed = parts.pop(INDEX_NAME)
    index = json.loads(zlib.decompress(packed[1:]) if packed[0] else packed[1:])
    inline = index.pop("inline", None) or []
    entries = index.pop("tensors")
    if any("group" in entry for entry in entries):
        raise ValueError("tensors that share a frame are not taken apart")
    names = [entry["name"] for entry in entries]
    index_fields = {key: value for key, value in index.items() if key not in ("content_id", "writer")}
    return File(
        {name: frame_of(parts[name]) for name in names},
        inline=[
            {e["name"]: frame_of(parts[f"__ckptz__.inline.{i}.{j}"]) for j, e in enumerate(base["tensors"])}
            for i, base in enumerate(inline, 1)
        ],
        features=metadata["ckptz.required_features"],
        index=index_fields,
        optional={n.removeprefix(OPTIONAL_PREFIX): d for n, d in parts.items() if OPTIONAL_PREFIX in n},
    )


def frames_of(chain: Sequence[Member]) -> list[Frame]:
    """List all frames of a chain, including those of inline bases."""
    levels = [level for file in chain if isinstance(file, File) for level in (file.frames, *file.inline)]
    return [frame for level in levels for frame in level.values()]


# --- changing -----------------------------------------------------------------------------------


def changed_bytes(data: bytes, rng: Rng) -> bytes:
    """Make one to three edits: bytes set, changed by one, inserted, deleted or repeated, or a bit flipped."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at, kind = int(rng.integers(0, len(out) + 1)), int(rng.integers(0, 7))
        if kind == 0 or at == len(out):
            out[at:at] = rng.integers(0, 256, int(rng.integers(1, 4)), np.uint8).tobytes()
        elif kind == 1:
            del out[at : at + int(rng.integers(1, 4))]
        elif kind == 2:
            out[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 3:
            out[at] = (out[at] + int(rng.choice((-1, 1)))) & 255
        elif kind == 4:
            out[at] = int(rng.choice((0, 1, 2, 127, 128, 254, 255)))
        elif kind == 5:
            out[at:at] = out[at : at + int(rng.integers(1, 9))]
        else:
            out[at] = int(rng.integers(0, 256))
    return bytes(out)


def change_frame(frame: Frame, rng: Rng, pool: Sequence[Frame]) -> None:
    """Make one edit of a frame's plan or streams."""
    streams, kind = list(frame.streams), int(rng.integers(0, 10))
    other = pool[int(rng.integers(0, len(pool)))]
    i = int(rng.integers(0, max(len(streams), 1)))
    if kind < 3 or not streams:
        frame.plan = changed_bytes(frame.plan, rng)
    elif kind < 7:
        streams[i] = (streams[i][0], changed_bytes(streams[i][1], rng))
    elif kind == 7:
        streams[i] = (int(rng.integers(0, 7)), streams[i][1])
    elif kind == 8 and other.streams:
        streams[i] = other.streams[int(rng.integers(0, len(other.streams)))]
    else:
        streams[i:i] = streams[i : i + 1] if rng.random() < 0.5 else []
        del streams[len(streams) - 1 :]
        frame.plan = other.plan if rng.random() < 0.5 else frame.plan
    frame.streams = streams


def change_plain(file: Plain, rng: Rng) -> None:
    """Change a value, or the dtype and shape of a tensor with the same bytes."""
    if file.data and rng.random() < 0.5:
        at = int(rng.integers(0, len(file.data)))
        file.data = file.data[:at] + rng.bytes(1) + file.data[at + 1 :]
        return
    row = next(row for name, row in file.rows.items() if name != "__metadata__")
    dtype = DTYPES[str(rng.choice(list(DTYPES)))]
    n_bytes = row["data_offsets"][1] - row["data_offsets"][0]
    row |= {"dtype": dtype.name, "shape": [n_bytes // dtype.pattern_bytes]}


def mutant(chain: Sequence[Member], rng: Rng, pool: Sequence[Frame]) -> list[Member]:
    """Copy a chain with one to three edits; its checksums are not yet fitted."""
    members = [_copy(file) for file in chain]
    for _ in range(int(rng.choice((1, 1, 1, 2, 3)))):
        file = members[int(rng.integers(0, len(members)))]
        frames = frames_of([file])
        if isinstance(file, Plain):
            change_plain(file, rng)
        elif frames:
            change_frame(frames[int(rng.integers(0, len(frames)))], rng, pool)
    return members


def _copy(file: Member) -> Member:
    if isinstance(file, Plain):
        return Plain(copy.deepcopy(file.rows), file.data)
    levels = [{n: dataclasses.replace(f) for n, f in level.items()} for level in (file.frames, *file.inline)]
    return dataclasses.replace(file, frames=levels[0], inline=levels[1:], index=dict(file.index))


# --- fitting ------------------------------------------------------------------------------------


def fit_header(frame: Frame) -> None:
    """Set dtype, shape and base codes of the index entry as the plan says, if the plan is valid."""
    if frame.n_chunks == 0:
        frame.decoded_checksum = 0
    with contextlib.suppress(CkptzError):
        header = frame.parse()
        frame.dtype, frame.shape = header.dtype.name, header.shape
        frame.base_codes = (frame.base_codes or 0) if header.plan.reads_base_codes else None
    with contextlib.suppress(CkptzError):  # the checksum of base codes was added or removed
        header = frame.parse()
        frame.dtype, frame.shape = header.dtype.name, header.shape


def fit_base(file: Member, base: Member | None) -> None:
    """Set the content id of a delta's base to that of the changed base."""
    if isinstance(file, File) and base is not None and file.index.get("base"):
        with contextlib.suppress(CkptzError):
            file.index["base"] = {**file.index["base"], "content_id": base.content_id()}


def write(chain: Sequence[Member], names: Sequence[str], folder: Path) -> Path:
    """Write a chain as files, and return the path of the first."""
    for base, file in itertools.pairwise([*reversed(chain), None]):
        if file is not None and base is not None:
            fit_base(file, base)
    for name, file in zip(names, chain, strict=True):
        folder.joinpath(name).write_bytes(file.bytes())
    return folder / names[0]


def fit(chain: Sequence[Member], names: Sequence[str], folder: Path) -> Path:
    """Fit all checksums of a mutant and write it; frames that cannot be decoded keep wrong checksums."""
    for frame in frames_of(chain):
        fit_header(frame)
    for level in range(len(chain) - 1, -1, -1):
        for _ in range(ROUNDS):
            path = write(chain[level:], names[level:], folder)
            file = chain[level]
            if isinstance(file, Plain) or not _fit_frames(file, path):
                break
    return write(chain, names, folder)


def _fit_frames(file: File, path: Path) -> bool:
    """Compute the checksums of all frames anew, and return whether one changed."""
    try:
        checkpoint = open_checkpoint(path)
    except CkptzError:
        return False
    try:
        container = checkpoint.container
        changed = False
        for level, frames in reversed(list(zip(container.levels, (file.frames, *file.inline), strict=True))):
            for name, frame in frames.items():
                changed |= _fit_frame(frame, level.tensors[name])
        return changed
    finally:
        checkpoint.close()


def _fit_frame(frame: Frame, source: FrameSource) -> bool:
    previous = frame.base_codes, frame.decoded_checksum
    n_patterns = source.dtype.n_patterns(source.shape)
    with contextlib.suppress(CkptzError):
        if source.header.chunks and n_patterns * source.dtype.pattern_bytes <= MAX_BYTES:
            _fit_base_codes(frame, source, n_patterns)
            out = np.zeros(n_patterns, PATTERN_TYPES[source.dtype.pattern_bytes])
            with contextlib.suppress(CkptzError):  # `out` has the decoded bytes even if the checksum is wrong
                source.decode_chunk(0, out)
            frame.decoded_checksum = xxh64(out)
    return previous != (frame.base_codes, frame.decoded_checksum)


def _fit_base_codes(frame: Frame, source: FrameSource, n_patterns: int) -> None:
    base = source.base
    if source.header.plan.reads_base_codes and base is not None:
        read = getattr(base, "codes", None)
        codes = None if read is None else read(0, n_patterns)
        frame.base_codes = 0 if codes is None else xxh64(codes)


# --- reading ------------------------------------------------------------------------------------


def is_small(checkpoint: Checkpoint) -> bool:
    """Return whether every tensor is small enough for the readers of mutants."""
    sizes = [s.dtype.n_patterns(s.shape) * s.dtype.pattern_bytes for s in checkpoint.tensors.values()]
    return max(sizes, default=0) <= MAX_BYTES and sum(sizes) <= 4 * MAX_BYTES
