"""In-memory calls of ckptz and of a plain XOR + zstd delta, on one thread, checksums included.

ckptz is measured at two levels. *Codec* encodes and decodes frames only (plan and chunks). *File* writes and
reads a complete `.ckptz` file with envelope, index, content id and their checks.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.core.sources import Tensors, concatenated, n_bytes
from ckptz.codec.chunk import encode_chunk
from ckptz.codec.effort import DEFAULT, EffortName
from ckptz.codec.lossless import plan_lossless
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.decode import decode_chunk
from ckptz.format.frame import FrameHeader
from ckptz.format.index import BaseRef
from ckptz.format.reader import Container
from ckptz.format.sources import ChunkSources, chunk_bounds
from ckptz.parallel import SMALL_VALUES, Workers
from ckptz.write import writer
from ckptz.write.job import WriteJob

Patterns = NDArray[Any]
Outputs = Mapping[str, Patterns]

HEADERS = 4096  # upper limit of the header and index bytes of one tensor
BASE_ID = "0" * 64  # a placeholder of the right length: the benchmarks pass the base tensors themselves


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded tensor: its frame header and the payload of each chunk."""

    header: FrameHeader
    payloads: Sequence[Any]


def outputs_for(tensors: Tensors) -> dict[str, Patterns]:
    """Allocate output buffers and write to them once, so that timed decoding causes no page faults."""
    return {name: np.ones_like(tensor.flat) for name, tensor in tensors.items()}


def equal(tensors: Tensors, outputs: Outputs) -> bool:
    """Return whether every output has the bit patterns of its tensor."""
    return all(np.array_equal(tensor.flat, outputs[name]) for name, tensor in tensors.items())


# --- codec --------------------------------------------------------------------------------------


def encode_frames(tensors: Tensors) -> dict[str, Frame]:
    """Plan and encode every chunk of every tensor."""
    frames = {}
    for name, tensor in tensors.items():
        encoding = replace(plan_lossless(tensor, None), huffman_margin=DEFAULT.huffman_margin)
        bounds = chunk_bounds(tensor.dtype.n_patterns(tensor.shape))
        records, payloads = [], []
        for begin, end in bounds:
            chunk = encode_chunk(tensor, encoding, ChunkSources(begin, end))
            records.append(chunk.record)
            payloads.append(chunk.payload)  # joins the parts in one copy, as a file write does
        frames[name] = Frame(FrameHeader(tensor.dtype, tensor.shape, encoding.plan, tuple(records)), payloads)
    return frames


def as_read(frames: Mapping[str, Frame]) -> dict[str, Frame]:
    """Copy each payload into a separate array, as a reader receives payloads from a file."""
    return {
        name: Frame(frame.header, [np.frombuffer(bytearray(payload), np.uint8) for payload in frame.payloads])
        for name, frame in frames.items()
    }


def decode_frames(frames: Mapping[str, Frame], outputs: Outputs) -> None:
    """Decode all frames into `outputs`; the inverse of `encode_frames`."""
    for name, frame in frames.items():
        out = outputs[name]
        for i, (begin, end) in enumerate(chunk_bounds(len(out))):
            decode_chunk(frame.header, i, frame.payloads[i], ChunkSources(begin, end), out[begin:end])


def decode_frames_afresh(frames: Mapping[str, Frame]) -> dict[str, Patterns]:
    """Decode all frames into newly allocated arrays: ZipNN also allocates within its timed call."""
    out = {
        name: np.empty(frame.header.n_patterns, f"<u{frame.header.dtype.pattern_bytes}")
        for name, frame in frames.items()
    }
    decode_frames(frames, out)
    return out


# --- file ---------------------------------------------------------------------------------------


class Memory(io.RawIOBase):
    """A writable file in memory, allocated once at full size, as the output buffers of the peers are."""

    def __init__(self, max_bytes: int) -> None:
        self._bytes, self._at = memoryview(np.empty(max_bytes, np.uint8)), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._bytes[self._at : self._at + len(view)] = view
        self._at += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = 0) -> int:
        assert not whence
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        assert size is None  # the content ends at the current position
        return self._at

    def content(self) -> memoryview:
        """Return the bytes before the current position."""
        return self._bytes[: self._at]


def write_file(
    tensors: Tensors,
    bases: Tensors | None = None,
    base_file: str = "base.ckptz",
    jobs: int = 1,
    effort: EffortName = "default",
) -> memoryview:
    """Write a complete `.ckptz` file, as a delta if `bases` are passed, and return its bytes."""
    sink = Memory(n_bytes(tensors) + HEADERS * (len(tensors) + 16))
    ref = BaseRef(BASE_ID, base_file, 1) if bases is not None else None
    with Workers(jobs) as workers:
        writer.write(sink, WriteJob(tensors=tensors, base=ref, bases=bases or {}, effort=effort), workers)
    return sink.content()


def read_file(file: memoryview, outputs: Outputs, bases: Tensors | None = None, jobs: int = 1) -> None:
    """Open a file in memory and decode all its tensors into `outputs`."""
    container = Container(MemoryBytes(file))
    container.bases = bases or {}
    chunks = (
        (source, i, outputs[name][begin:end])
        for name, source in container.tensors.items()
        for i, (begin, end) in enumerate(source.chunk_bounds())
    )
    with Workers(jobs, with_caller=True) as workers:  # as in `ckptz.api.read`
        decoded = workers.map(lambda c: c[0].decode_chunk(*c[1:]), chunks, lambda c: len(c[2]) < SMALL_VALUES)
        for _ in decoded:
            pass


# --- XOR, byte planes, zstd -3 ------------------------------------------------------------------


def xor_encode(patterns: Patterns, base: Patterns) -> list[bytes]:
    """Compress each byte plane of the XOR of two arrays with zstd -3."""
    planes = (patterns ^ base).view(np.uint8).reshape(-1, patterns.itemsize)
    return [zstandard.ZstdCompressor(3).compress(np.ascontiguousarray(plane)) for plane in planes.T]


def xor_zstd_whole(tensors: Tensors, bases: Tensors) -> int:
    """Return the bytes of the XOR + zstd delta of all tensors as one array; names and shapes do not count."""
    return sum(map(len, xor_encode(concatenated(tensors), concatenated(bases))))


def xor_zstd_each(tensors: Tensors, bases: Tensors) -> int:
    """Return the bytes of the XOR + zstd deltas of the single tensors; names and shapes do not count."""
    planes = (xor_encode(tensor.flat, bases[name].flat) for name, tensor in tensors.items())
    return sum(len(blob) for blobs in planes for blob in blobs)
