"""Encoding tensors where they live, on a GPU: only coded bytes come to the host, in pinned memory.

So far without loss and without a base. The chunks are those that `ckptz.encoding.chunk` makes, byte for byte:
the host chooses coders from counts and samples, and the device codes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ckptz.bits.checksum import xxh64_of_parts
from ckptz.codec.frame import ChunkRecord, StreamRecord
from ckptz.codec.plan import exact_plan, kernel_mode
from ckptz.codec.units import CHUNK_UNITS, UNIT_TYPES, ArraySource, ChunkSources, chunk_bounds
from ckptz.dtypes import DType, dtype_of
from ckptz.encoding.chunk import EncodedChunk, EncodedSource, encode_chunk
from ckptz.encoding.draft import Draft
from ckptz.entropy.streams import (
    LANE_CHOICES,
    CoderId,
    OwnTable,
    choose_elsewhere,
    encode_stream,
    middle_of,
    n_lanes_for,
    spread_of,
)
from ckptz.kernels import planes_on_gpu, rans_on_gpu
from ckptz.kernels.torch import UNSIGNED, current
from ckptz.parallel import Workers

DEVICE_BYTES: Final = 768 << 20  # of device memory beside the tensors, by default
SCRATCH: Final = 2.25  # bytes on the device for each byte coded: planes, words, samples

Stream = tuple[CoderId, Any]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Planes uint8 [n_planes, n] of one chunk on the device, and what the host knows of them."""

    planes: torch.Tensor
    counts: np.ndarray[Any, Any]  # [n_planes, 256]
    spread: np.ndarray[Any, Any]  # [n_planes, 64, 512 at most]
    middle: np.ndarray[Any, Any]  # [n_planes, 2^14 at most]

    def choices(self) -> list[OwnTable | CoderId | None]:
        """Choose the coder of each plane; None where all its codes must be looked at."""
        rows = zip(self.counts, self.spread, self.middle, strict=True)
        return [choose_elsewhere(self.planes.shape[1], *row) for row in rows]


def encode_on_device(
    tensor: torch.Tensor, dtype: DType, shape: tuple[int, ...], workers: Workers, most: int = DEVICE_BYTES
) -> EncodedSource:
    """Encode a contiguous tensor without loss.

    Args:
        tensor: on a GPU.
        dtype: of its elements.
        shape: in a file.
        workers: threads that choose coders.
        most: bytes of device memory to take; one chunk is coded whatever it takes.
    """
    units = tensor.detach().reshape(-1).view(torch.uint8).view(UNSIGNED[dtype.unit_bytes])
    n_chunks = max(int(most / (SCRATCH * dtype.unit_bytes * CHUNK_UNITS)), 1)
    slabs = torch.split(units, n_chunks * CHUNK_UNITS) if len(units) else ()
    with current(tensor.device):
        chunks = [chunk for slab in slabs for chunk in _encode_slab(slab, dtype, workers)]
    return EncodedSource(dtype, shape, exact_plan(dtype), tuple(chunks))


@functools.cache
def agrees_with_host(device: torch.device) -> bool:
    """Try once in a process whether a device writes what the host writes, of made-up weights of each size.

    Files outlive machines, and not every GPU, driver and compiler has been tried: bytes that the host would
    not have written are never stored.
    """
    with Workers(1) as workers:
        return all(_agrees(device, dtype_of(name), workers) for name in ("U8", "BF16", "F32", "F64"))


def _agrees(device: torch.device, dtype: DType, workers: Workers) -> bool:
    n_units = CHUNK_UNITS + CHUNK_UNITS // 256 + 3
    values = np.random.default_rng(dtype.unit_bytes).normal(0, 0.02, n_units)
    bits = values.view(np.uint64) >> np.uint64(64 - 8 * dtype.unit_bytes)
    units = bits.astype(UNIT_TYPES[dtype.unit_bytes])
    source = ArraySource(dtype, (n_units,), units)
    draft = Draft(exact_plan(dtype))
    wanted = [encode_chunk(source, draft, ChunkSources(*bounds)) for bounds in chunk_bounds(n_units)]
    made = encode_on_device(torch.from_numpy(units.view(np.uint8)).to(device), dtype, (n_units,), workers)
    both = zip(made.chunks, wanted, strict=True)
    return all(a.record == b.record and bytes(a.payload) == bytes(b.payload) for a, b in both)


def _encode_slab(units: torch.Tensor, dtype: DType, workers: Workers) -> Iterator[EncodedChunk]:
    planes = planes_on_gpu().split_planes(units, units, kernel_mode(exact_plan(dtype).mode, dtype))
    checksums = planes_on_gpu().xxh64_of_chunks(units, CHUNK_UNITS)
    counts = planes_on_gpu().histograms(planes, CHUNK_UNITS).cpu().numpy().astype(np.int64)
    chunks = [
        _Chunk(part, counts[:, i], _host(spread_of(part)), _host(middle_of(part)))
        for i, part in enumerate(torch.split(planes, CHUNK_UNITS, dim=1))
    ]
    choices = list(workers.map(_Chunk.choices, chunks))
    coded = iter(_code(planes, choices))
    streams = [
        [_stream(*plane, coded) for plane in zip(chunk.planes, chunk.counts, chosen, strict=True)]
        for chunk, chosen in zip(chunks, choices, strict=True)
    ]
    if units.device.type == "cuda":
        torch.cuda.current_stream(units.device).synchronize()  # copies to pinned memory are not waited for
    return workers.map(_finished, zip(streams, checksums.cpu().numpy().tolist(), strict=True))


def _stream(
    plane: torch.Tensor, counts: np.ndarray[Any, Any], choice: OwnTable | CoderId | None, coded: Iterator[Any]
) -> Stream:
    if isinstance(choice, OwnTable):
        return CoderId.RANS_OWN, next(coded)
    if choice is CoderId.CONSTANT:
        return choice, bytes((int(counts.argmax()),))
    if choice is None:
        return encode_stream(_host(plane))
    return CoderId.STORED, _pinned(plane).data


def _finished(task: tuple[list[Stream], int]) -> EncodedChunk:
    streams, decoded = task
    parts = tuple(data for _, data in streams)
    records = tuple(StreamRecord(coder, len(data)) for coder, data in streams)
    return EncodedChunk(ChunkRecord(xxh64_of_parts(parts), decoded, records), parts)


def _code(planes: torch.Tensor, choices: list[list[OwnTable | CoderId | None]]) -> Iterator[memoryview]:
    """Code the planes that have tables, in one launch, in the order of the chunks."""
    n = planes.shape[1]
    wanted = [
        (j * n + i * CHUNK_UNITS, own)
        for i, chosen in enumerate(choices)
        for j, own in enumerate(chosen)
        if isinstance(own, OwnTable)
    ]
    if not wanted:
        return
    lanes = np.array([n_lanes_for(own.n_bytes) for _, own in wanted])
    streams = rans_on_gpu().single(
        np.array([at for at, _ in wanted]),
        np.array([own.n for _, own in wanted]),
        lanes,
        np.stack([own.frequencies for _, own in wanted]),
    )
    most = np.array([own.most_words for _, own in wanted])
    words, states, n_words = rans_on_gpu().rans_encode(planes.view(-1), streams, most)
    host_states, data = _host(states), words.view(torch.uint8)
    rows = zip(wanted, lanes.tolist(), host_states, np.cumsum(most).tolist(), n_words.tolist(), strict=True)
    for (_, own), n_lanes, row, end, n_used in rows:
        head = own.packed + bytes((LANE_CHOICES.index(n_lanes),)) + row[:n_lanes].tobytes()
        yield _pinned(data[2 * (end - n_used) : 2 * end], head).data


def _pinned(data: torch.Tensor, head: bytes = b"") -> np.ndarray[Any, Any]:
    """Copy bytes behind `head` to memory that a device writes to at full speed; they come in a while."""
    n = len(head)
    host = torch.empty(n + len(data), dtype=torch.uint8, pin_memory=data.device.type == "cuda")
    host.numpy()[:n] = np.frombuffer(head, np.uint8)
    host[n:].copy_(data, non_blocking=True)
    return host.numpy()


def _host(data: torch.Tensor) -> np.ndarray[Any, Any]:
    return data.contiguous().cpu().numpy()
