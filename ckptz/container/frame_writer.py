"""Streams frames into a file: plans, encodes on threads, writes in order. Memory holds a few chunks."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ckptz.codec.encode import Deviation, EncodedChunk, encode_chunk
from ckptz.codec.frame import ChunkRecord, FrameHeader, header_bytes
from ckptz.codec.frame_plan import pack_plan
from ckptz.codec.plan import Plan, exact_plan
from ckptz.codec.plan_kmeans import Choice, plan_tensor
from ckptz.codec.sources import ChunkSources
from ckptz.codec.units import CHUNK_UNITS, UnitSource, chunk_bounds
from ckptz.container.contents import Contents, Progress
from ckptz.container.index import LossyRecord, TensorEntry
from ckptz.parallel import Workers


@dataclass(slots=True)
class _Job:
    """One chunk to encode; a tensor of one chunk is planned where it is encoded."""

    name: str
    source: UnitSource
    base: UnitSource | None
    choice: Choice
    plan: Plan | None
    begin: int
    end: int


def matching_base(source: UnitSource, base: UnitSource | None) -> UnitSource | None:
    """The base if its dtype and shape fit, else None: the tensor then stands alone."""
    fits = base is not None and (base.dtype, tuple(base.shape)) == (source.dtype, tuple(source.shape))
    return base if fits else None


def _jobs(
    tensors: Mapping[str, UnitSource], choices: Mapping[str, Choice], contents: Contents, workers: Workers
) -> Iterator[_Job]:
    for name, source in tensors.items():
        base = matching_base(source, contents.bases.get(name))
        n_units = source.dtype.n_units(source.shape)
        plan = plan_tensor(source, base, choices[name], workers.map) if n_units > CHUNK_UNITS else None
        for begin, end in chunk_bounds(n_units):
            yield _Job(name, source, base, choices[name], plan, begin, end)


def _encode(job: _Job) -> tuple[Plan, EncodedChunk]:
    plan = plan_tensor(job.source, job.base, job.choice) if job.plan is None else job.plan
    return plan, encode_chunk(job.source, plan, ChunkSources(job.begin, job.end, job.base))


@dataclass(frozen=True, slots=True)
class WrittenFrame:
    """A frame that was written."""

    name: str
    choice: Choice
    header: FrameHeader
    offset: int
    n_bytes: int
    deviation: Deviation | None

    def entry(self) -> TensorEntry:
        """Its row of the index."""
        header = self.header
        lossy = None if self.deviation is None else self._lossy(self.deviation)
        checksum = f"{header.checksum:016x}"
        return TensorEntry(
            self.name, header.dtype.name, header.shape, self.offset, self.n_bytes, checksum, lossy
        )

    def _lossy(self, deviation: Deviation) -> LossyRecord:
        wanted, quant_map = self.choice.partitions, self.header.plan.quant_map
        assert wanted is not None
        assert quant_map is not None
        escape = quant_map.escape_code
        entries = quant_map.table.expand()[0]
        zeros = [c for c in range(quant_map.n_codes) if c != escape and not int(entries[c]) & 0x7FFFFFFF]
        return LossyRecord(
            method="kmeans",
            promise="none",
            layer_type=self.choice.role.layer_type,
            levels=quant_map.n_codes - (escape is not None),
            prune=wanted.prune,
            protect=wanted.protect,
            n_pruned=int(deviation.counts[zeros].sum()) if wanted.prune else 0,
            n_protected=0 if escape is None else int(deviation.counts[escape]),
            # Doubles round the difference of two floats that are far apart; the bound must not be.
            max_abs_error=math.nextafter(deviation.largest, math.inf) if deviation.largest else 0.0,
            rms_error=math.sqrt(deviation.error / self.header.n_units),
            rms=math.sqrt(deviation.power / self.header.n_units),
        )


def write_frames(
    sink: BinaryIO,
    data_offset: int,
    tensors: Mapping[str, UnitSource],
    choices: Mapping[str, Choice],
    contents: Contents,
    workers: Workers,
    progress: Progress | None,
) -> Iterator[WrittenFrame]:
    """Stream all frames; yields each when it is written."""
    offset = 0
    encoded = workers.map(_encode, _jobs(tensors, choices, contents, workers))
    for name, source in tensors.items():
        frame = _write_frame(
            sink, data_offset, _Position(name, choices[name], offset), source, encoded, progress
        )
        yield frame
        offset += frame.n_bytes


@dataclass(frozen=True, slots=True)
class _Position:
    """Which frame comes next, and where it begins."""

    name: str
    choice: Choice
    offset: int


def _write_frame(
    sink: BinaryIO,
    data_offset: int,
    at: _Position,
    source: UnitSource,
    encoded: Iterator[tuple[Plan, EncodedChunk]],
    progress: Progress | None,
) -> WrittenFrame:
    """Stream the chunks of one frame behind its header, which is written when they are."""
    shape, start = tuple(source.shape), data_offset + at.offset
    plan, packed_plan = exact_plan(source.dtype), b""
    records: list[ChunkRecord] = []
    deviations: list[Deviation] = []
    for begin, end in chunk_bounds(source.dtype.n_units(shape)):
        plan, chunk = next(encoded)
        if not records:
            packed_plan = pack_plan(source.dtype, shape, plan)
            sink.seek(start + header_bytes(source.dtype, shape, plan, packed_plan))
        for stream in chunk.streams:
            sink.write(stream)
        records.append(chunk.record)
        if chunk.deviation is not None:
            deviations.append(chunk.deviation)
        if progress:
            progress((end - begin) * source.dtype.unit_bytes)
    header = FrameHeader(source.dtype, shape, plan, tuple(records))
    packed = header.pack(packed_plan)
    n_bytes = len(packed) + header.payload_bytes
    sink.seek(start)
    sink.write(packed)
    sink.seek(start + n_bytes)
    deviation = functools.reduce(operator.add, deviations) if deviations else None
    return WrittenFrame(at.name, at.choice, header, at.offset, n_bytes, deviation)
