"""Coding planes of codes on a GPU: the host chooses coders from counts and samples, and the device codes.

What comes is in pinned memory, byte for byte what `ckptz.encoding.chunk` makes of the same planes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptz.bits import xxh64_of_parts
from ckptz.codec.frame import ChunkRecord, StreamRecord
from ckptz.codec.on_device import Classes
from ckptz.codec.plan import Plan
from ckptz.codec.units import CHUNK_UNITS
from ckptz.encoding.chunk import Deviation, EncodedChunk, beats_shared, encode_by_classes
from ckptz.encoding.draft import ClassCounts
from ckptz.entropy.streams import (
    LANE_CHOICES,
    CoderId,
    OwnTable,
    Segments,
    Stream,
    choose_elsewhere,
    encode_stream,
    middle_of,
    most_words,
    n_lanes_for,
    single,
    spread_of,
)
from ckptz.kernels import planes_on_gpu, rans_on_gpu
from ckptz.parallel import Workers

Array = np.ndarray[Any, Any]
Found = tuple[ClassCounts, ...]  # codes by class of each plane of a chunk


@dataclass(frozen=True, slots=True)
class _Rans:
    """A stream that the device codes.

    Attributes:
        coder: of the two that are rANS.
        way: its way through tables.
        head: what stands before the lanes.
        n_bytes: that it will take, about.
        n: codes.
    """

    coder: CoderId
    way: Segments
    head: bytes
    n_bytes: float
    n: int


Choice = _Rans | CoderId | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Planes uint8 [n_planes, n] of one chunk on the device, and what the host knows of them."""

    planes: torch.Tensor
    counts: Array  # [n_planes, 256]
    plan: Plan
    found: Found  # where the plan has classes
    samples: tuple[Array, ...] = ()  # else: [n_planes, 64, 512 at most] and [n_planes, 2^14 at most]

    def choices(self) -> list[Choice]:
        """Choose the coder of each plane; None where all its codes must be looked at."""
        if self.plan.rules:
            return [self._by_class(j) for j in range(len(self.found))]
        n, rows = self.planes.shape[1], zip(self.counts, *self.samples, strict=True)
        return [_own(choose_elsewhere(n, *row)) for row in rows]

    def _by_class(self, j: int) -> Choice:
        found, tables = self.found[j], self.plan.tables[j]
        if self.counts[j].max() == self.planes.shape[1]:
            return CoderId.CONSTANT
        beats, shared = beats_shared(found, tables)
        if beats:
            return None
        way = tables.segments(found.classes, found.per_class)
        return _Rans(CoderId.RANS_SHARED, way, b"", shared, self.planes.shape[1])


def _own(choice: OwnTable | CoderId | None) -> Choice:
    if not isinstance(choice, OwnTable):
        return choice
    way = single(choice.frequencies, choice.n)
    return _Rans(CoderId.RANS_OWN, way, choice.packed, choice.n_bytes, choice.n)


def counted(planes: torch.Tensor, classes: Classes, chunk: int) -> Found:
    """Count the codes of the planes of one chunk by class."""
    used, per_class = classes.used(chunk)
    grouped = planes[:, chunk * CHUNK_UNITS : (chunk + 1) * CHUNK_UNITS][:, classes.order(chunk)]
    counts = planes_on_gpu().segment_histograms(grouped, np.cumsum(per_class)).cpu().numpy()
    return tuple(ClassCounts(used, plane.astype(np.int64)) for plane in counts)


def slabs(n_units: int, bytes_of_unit: float, most: int) -> Iterator[tuple[int, int]]:
    """Cut a tensor into runs of whole chunks (begin, end) that take so much device memory at most."""
    step = max(int(most / (bytes_of_unit * CHUNK_UNITS)), 1) * CHUNK_UNITS
    for begin in range(0, n_units, step):
        yield begin, min(begin + step, n_units)


@dataclass(frozen=True, slots=True)
class Slab:
    """Some chunks of a tensor to be coded at once.

    Attributes:
        planes: of codes, uint8 [n_planes, n]; those that are coded by class come out in another order.
        again: makes the planes of units begin..end once more.
        plan: of the frame.
        classes: of the units, where the plan has any.
        found: of each chunk, where there are classes.
    """

    planes: torch.Tensor
    again: Callable[[int, int], torch.Tensor]
    plan: Plan
    classes: Classes | None
    found: Sequence[Found]

    def streams(self, workers: Workers) -> list[list[Stream]]:
        """Code the planes of each chunk; what comes is in pinned memory."""
        planes, chunks = self.planes, self._chunks(self.planes)
        choices = list(workers.map(_Chunk.choices, chunks))
        there = self._left(chunks, choices, self.classes)
        coded = iter(_code(planes, choices))
        streams = [
            [self._stream(i, j, chunk, choice, coded, there) for j, choice in enumerate(chosen)]
            for i, (chunk, chosen) in enumerate(zip(chunks, choices, strict=True))
        ]
        if planes.device.type == "cuda":  # copies to pinned memory are not waited for
            torch.cuda.current_stream(planes.device).synchronize()
        return streams

    def _chunks(self, planes: torch.Tensor) -> list[_Chunk]:
        parts = torch.split(planes, CHUNK_UNITS, dim=1)
        if self.plan.rules:
            rows = zip(parts, self.found, strict=True)
            return [
                _Chunk(part, np.stack([f.total for f in found]), self.plan, found) for part, found in rows
            ]
        counts = planes_on_gpu().histograms(planes, CHUNK_UNITS).cpu().numpy().astype(np.int64)
        return [
            _Chunk(part, counts[:, i], self.plan, (), (host_of(spread_of(part)), host_of(middle_of(part))))
            for i, part in enumerate(parts)
        ]

    def _left(
        self, chunks: Sequence[_Chunk], choices: Sequence[Sequence[Choice]], classes: Classes | None
    ) -> dict[tuple[int, int], Stream]:
        """Code on the host what needs all codes there, and group by class what the device codes by class."""
        made: dict[tuple[int, int], Stream] = {}
        for i, (chunk, chosen) in enumerate(zip(chunks, choices, strict=True)):
            for j, choice in enumerate(chosen):
                if choice is None and classes is None:
                    made[i, j] = encode_stream(host_of(chunk.planes[j]))
                elif choice is None and classes is not None:
                    labels = host_of(classes.labels[i * CHUNK_UNITS : (i + 1) * CHUNK_UNITS])
                    labels = labels.view(f"u{labels.itemsize}")
                    plane, n = host_of(chunk.planes[j]), self.plan.n_classes
                    tables, found = self.plan.tables[j], chunk.found[j]
                    [made[i, j]] = encode_by_classes([plane], labels, n, [tables], [found])
            shared = [j for j, one in enumerate(chosen) if isinstance(one, _Rans) and classes is not None]
            if shared and classes is not None:
                order = classes.order(i)
                for j in shared:
                    chunk.planes[j] = chunk.planes[j][order]
        return made

    def _stream(
        self,
        i: int,
        j: int,
        chunk: _Chunk,
        choice: Choice,
        coded: Iterator[Any],
        there: dict[tuple[int, int], Stream],
    ) -> Stream:
        if choice is None:
            return there[i, j]
        if choice is CoderId.CONSTANT:
            return choice, bytes((int(chunk.counts[j].argmax()),))
        plane = chunk.planes[j]
        if isinstance(choice, _Rans):
            data = next(coded)
            if choice.coder is CoderId.RANS_OWN or len(data) < choice.n:
                return choice.coder, data
            begin, end = i * CHUNK_UNITS, (i + 1) * CHUNK_UNITS  # the plane is grouped by now
            plane = self.again(begin, end)[j]
        return CoderId.STORED, _pinned(plane).data


def finished(
    streams: Sequence[Stream], decoded: int, base_codes: int | None = None, deviation: Deviation | None = None
) -> EncodedChunk:
    """Make the chunk of these streams, by the checksums of its units and of the base's codes."""
    parts = tuple(data for _, data in streams)
    records = tuple(StreamRecord(coder, len(data)) for coder, data in streams)
    record = ChunkRecord(xxh64_of_parts(parts), decoded, records, base_codes)
    return EncodedChunk(record, parts, deviation)


def _code(planes: torch.Tensor, choices: Sequence[Sequence[Choice]]) -> Iterator[memoryview]:
    """Code the planes that have tables, in one launch, in the order of the chunks."""
    n = planes.shape[1]
    wanted = [
        (j * n + i * CHUNK_UNITS, choice)
        for i, chosen in enumerate(choices)
        for j, choice in enumerate(chosen)
        if isinstance(choice, _Rans)
    ]
    if not wanted:
        return
    lanes = np.array([n_lanes_for(choice.n_bytes) for _, choice in wanted])
    streams = rans_on_gpu().joined(
        np.array([at for at, _ in wanted]), lanes, [choice.way for _, choice in wanted]
    )
    most = np.array([most_words(choice.n, choice.n_bytes) for _, choice in wanted])
    words, states, n_words = rans_on_gpu().rans_encode(planes.view(-1), streams, most)
    host_states, data = host_of(states), words.view(torch.uint8)
    rows = zip(wanted, lanes.tolist(), host_states, np.cumsum(most).tolist(), n_words.tolist(), strict=True)
    for (_, choice), n_lanes, row, end, n_used in rows:
        head = choice.head + bytes((LANE_CHOICES.index(n_lanes),)) + row[:n_lanes].tobytes()
        yield _pinned(data[2 * (end - n_used) : 2 * end], head).data


def _pinned(data: torch.Tensor, head: bytes = b"") -> Array:
    """Copy bytes behind `head` to memory that a device writes to at full speed; they come in a while."""
    n = len(head)
    host = torch.empty(n + len(data), dtype=torch.uint8, pin_memory=data.device.type == "cuda")
    host.numpy()[:n] = np.frombuffer(head, np.uint8)
    host[n:].copy_(data, non_blocking=True)
    return host.numpy()


def host_of(data: torch.Tensor) -> Array:
    """Bring a tensor to the host."""
    return data.contiguous().cpu().numpy()
