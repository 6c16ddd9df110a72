"""How the benches call ckptz and the plain XOR + zstd delta: in memory, on one thread, checksums included.

Two levels: *codec* is frames only (plan and chunks, what a wire or a container carries), *file* is a whole
`.ckptz` file with envelope, index, content id and their checks.
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

HEADERS = 4096  # bytes at most that a file has of a tensor beside its codes
BASE_ID = "0" * 64  # as long as any; the benches hand the base over themselves


@dataclass(frozen=True, slots=True)
class Frame:
    """A tensor encoded: its header and the payload of each chunk."""

    header: FrameHeader
    payloads: Sequence[Any]


def outputs_for(tensors: Tensors) -> dict[str, Patterns]:
    """Buffers to decode into, touched, so that no page is mapped while the clock runs."""
    return {name: np.ones_like(tensor.flat) for name, tensor in tensors.items()}


def equal(tensors: Tensors, outputs: Outputs) -> bool:
    """Whether every output holds its tensor's bit patterns."""
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
            payloads.append(chunk.payload)  # one copy, as in a file, which frees what it is made of
        frames[name] = Frame(FrameHeader(tensor.dtype, tensor.shape, encoding.plan, tuple(records)), payloads)
    return frames


def as_read(frames: Mapping[str, Frame]) -> dict[str, Frame]:
    """Frames with their payloads in arrays of their own, as a reader gets them from a file."""
    return {
        name: Frame(frame.header, [np.frombuffer(bytearray(payload), np.uint8) for payload in frame.payloads])
        for name, frame in frames.items()
    }


def decode_frames(frames: Mapping[str, Frame], outputs: Outputs) -> None:
    """Inverse of `encode_frames`, into `outputs`."""
    for name, frame in frames.items():
        out = outputs[name]
        for i, (begin, end) in enumerate(chunk_bounds(len(out))):
            decode_chunk(frame.header, i, frame.payloads[i], ChunkSources(begin, end), out[begin:end])


def decode_frames_afresh(frames: Mapping[str, Frame]) -> dict[str, Patterns]:
    """The same into memory that is allocated while the clock runs, as ZipNN does it."""
    out = {name: np.empty(frame.header.n_patterns, f"<u{_width(frame)}") for name, frame in frames.items()}
    decode_frames(frames, out)
    return out


def _width(frame: Frame) -> int:
    return frame.header.dtype.pattern_bytes


# --- file ---------------------------------------------------------------------------------------


class Memory(io.RawIOBase):
    """A file in new memory that is large enough at once, as those are that the peers compress into."""

    def __init__(self, most: int) -> None:
        self._bytes, self._at = memoryview(np.empty(most, np.uint8)), 0

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

    def content(self) -> memoryview:
        """Give what stands before the position."""
        return self._bytes[: self._at]


def write_file(
    tensors: Tensors,
    bases: Tensors | None = None,
    base_file: str = "base.ckptz",
    jobs: int = 1,
    effort: EffortName = "default",
) -> memoryview:
    """A whole `.ckptz` file; a delta if there are bases."""
    sink = Memory(n_bytes(tensors) + HEADERS * (len(tensors) + 16))
    ref = BaseRef(BASE_ID, base_file, 1) if bases is not None else None
    with Workers(jobs) as workers:
        writer.write(sink, WriteJob(tensors=tensors, base=ref, bases=bases or {}, effort=effort), workers)
    return sink.content()


def read_file(file: memoryview, outputs: Outputs, bases: Tensors | None = None, jobs: int = 1) -> None:
    """Open a file and decode all its tensors into `outputs`."""
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
    """The byte planes of the difference."""
    planes = (patterns ^ base).view(np.uint8).reshape(-1, patterns.itemsize)
    return [zstandard.ZstdCompressor(3).compress(np.ascontiguousarray(plane)) for plane in planes.T]


def xor_zstd_whole(tensors: Tensors, bases: Tensors) -> int:
    """Bytes of the model's byte planes against the base; no names, shapes or index counted."""
    return sum(map(len, xor_encode(concatenated(tensors), concatenated(bases))))


def xor_zstd_each(tensors: Tensors, bases: Tensors) -> int:
    """The same, tensor by tensor."""
    planes = (xor_encode(tensor.flat, bases[name].flat) for name, tensor in tensors.items())
    return sum(len(blob) for blobs in planes for blob in blobs)
