"""Encoding one chunk of a tensor. The bytes are fixed by the tensor, its plan and its sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.bits.checksum import xxh64, xxh64_of_parts
from ckptz.codec.frame import ChunkRecord, FrameHeader, StreamRecord
from ckptz.codec.plan import Plan, Predictor, StreamTables
from ckptz.codec.sources import ChunkSources
from ckptz.codec.sparse import encode_changes
from ckptz.codec.units import Units, UnitSource
from ckptz.codec.values import predicted
from ckptz.entropy.frequency import entropy_bits
from ckptz.entropy.streams import LANE_CHOICES, CoderId, Segments, encode_rans, encode_stream
from ckptz.errors import ConfigError
from ckptz.kernels import cpu, planning
from ckptz.kernels.reference import widen_f64
from ckptz.transform.classes import ClassCounts, Labels, labels_of
from ckptz.transform.planes import kernel_mode

Bytes = NDArray[np.uint8]
Stream = tuple[CoderId, bytes | memoryview]
FLUSHED_BELOW = 2.0**-100  # as in `reference.add_f32`
MAX_LANE_BYTES = 1 + 4 * LANE_CHOICES[-1]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far decoded values are from the originals: summed over units, so that chunks add up.

    Attributes:
        largest: greatest absolute error.
        error: sum of squared errors.
        power: sum of squared values.
        n_codes_used: units by code [256].
    """

    largest: float
    error: float
    power: float
    counts: NDArray[np.int64]

    def __add__(self, other: Deviation) -> Deviation:
        return Deviation(
            max(self.largest, other.largest),
            self.error + other.error,
            self.power + other.power,
            self.counts + other.counts,
        )


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's record, its streams as buffers, and for lossy plans what was lost."""

    record: ChunkRecord
    streams: tuple[bytes | memoryview, ...]
    deviation: Deviation | None = None

    @property
    def payload(self) -> bytes:
        """All streams as one copy."""
        return b"".join(self.streams)


def class_segments(
    classes: NDArray[np.int64], per_class: NDArray[np.int64], tables: StreamTables
) -> Segments:
    """How a stream, sorted by class, runs through the tensor's tables.

    Args:
        classes: that occur in the chunk, ascending.
        per_class: units of each.
        tables: the stream's tables.
    """
    return Segments(np.cumsum(per_class), tables.table_map.table_of[classes], tables.frequencies)


def _stored(plane: Bytes) -> Stream:
    return CoderId.STORED, plane.data


def _encode_classed(
    plane: Bytes, labels: Labels, n_classes: int, tables: StreamTables, found: ClassCounts
) -> Stream:
    total = found.total
    table_of = tables.table_map.table_of[found.classes]
    bits = float(planning().shared_cost_bits(found.counts, table_of, tables.frequencies))
    shared = bits / 8 + MAX_LANE_BYTES
    coder, data = _stored(plane)
    if total.max() == len(plane) or entropy_bits(total[None]) / 8 < shared:
        coder, data = encode_stream(plane, total, beat=shared)
        if len(data) <= shared:
            return coder, data
    grouped = cpu().group(plane, labels, n_classes)
    classed = encode_rans(grouped, class_segments(found.classes, found.per_class, tables), shared)
    return (CoderId.RANS_SHARED, classed) if len(classed) < len(data) else (coder, data)


def _encode_codes(planes: Any, plan: Plan, labels: Labels | None) -> list[Stream]:
    if labels is None:
        return [encode_stream(plane) for plane in planes]
    n_classes = plan.n_classes
    counted = plan.counted or [ClassCounts.of(labels, plane, n_classes) for plane in planes]
    rows = zip(planes, plan.tables, counted, strict=True)
    return [_encode_classed(plane, labels, n_classes, tables, found) for plane, tables, found in rows]


def encode_values(units: Units) -> list[Stream]:
    """Units as they are, each byte plane a stream; empty streams for no units."""
    if not len(units):
        return [(CoderId.STORED, b"")] * units.itemsize
    return [encode_stream(plane) for plane in cpu().split_planes(units, units, 0)]


@dataclass(frozen=True, slots=True)
class _Quantized:
    """Streams of a lossy chunk, the units they decode to, and the codes."""

    streams: list[Stream]
    decoded: Units
    codes: Bytes


def _quantize(header: FrameHeader, units: Units, sources: ChunkSources, labels: Labels | None) -> _Quantized:
    plan, quantizer = header.plan, header.plan.quantizer
    if plan.quant_map is None or quantizer is None:
        raise ConfigError("a plan in the linear or bits domain needs a map and a quantizer to encode")
    begin, end = sources.begin, sources.end
    codes = quantizer.codes(begin, end, units)
    base = sources.base_units() if plan.predictor is Predictor.BASE else None
    decoded = np.empty_like(units)
    header.value_table.decode(codes, labels, predicted(plan, plan.outer, base, begin, end), decoded)
    streams = _encode_codes([codes], plan, labels)
    kept = quantizer.kept(units)
    if plan.quant_map.escape_code is not None:
        streams += _store_exactly(codes == plan.quant_map.escape_code, kept, decoded)
    if plan.quant_map.has_protected:
        mask = quantizer.protected(begin, end, units)
        mask = np.zeros(len(units), np.bool_) if mask is None else mask
        streams.append(encode_stream(mask.view(np.uint8)))
        streams += _store_exactly(mask, kept, decoded)
    return _Quantized(streams, decoded, codes)


def _store_exactly(mask: NDArray[np.bool_], kept: Units, decoded: Units) -> list[Stream]:
    values = kept[mask]
    decoded[mask] = values
    return encode_values(values)


def _deviation(header: FrameHeader, units: Units, quantized: _Quantized) -> Deviation:
    kind = header.value_table.kind
    exact, restored = (cpu().to_f32(u, kind).view(np.float32) for u in (units, quantized.decoded))
    largest, error, power = planning().deviation(exact, restored)
    if largest < FLUSHED_BELOW:
        # Differences this small may have been flushed to zero by the processor.
        wide, wide_restored = (widen_f64(f.view(np.uint32)) for f in (exact, restored))
        difference = wide_restored - wide
        largest, error, power = np.abs(difference).max(initial=0.0), difference @ difference, wide @ wide
    return Deviation(float(largest), float(error), float(power), cpu().histogram(quantized.codes))


def encode_chunk(source: UnitSource, plan: Plan, sources: ChunkSources) -> EncodedChunk:
    """Encode one chunk.

    Args:
        source: the tensor.
        plan: its plan.
        sources: the chunk's bounds, and the base where the plan needs one.
    """
    header = FrameHeader(source.dtype, tuple(source.shape), plan, ())
    units = source.units(sources.begin, sources.end)
    labels = labels_of(plan.rules, sources, header.row_units) if plan.rules else None
    deviation, decoded = None, units
    if plan.quant_map is None:
        base = sources.base_units() if plan.predictor is Predictor.BASE else units
        changed = encode_changes(units, base, plan, source.dtype) if plan.is_sparse else None
        if changed is None:
            planes = cpu().split_planes(units, base, kernel_mode(plan.mode, source.dtype))
            changed = _encode_codes(planes, plan, labels)
        streams = changed
    else:
        quantized = _quantize(header, units, sources, labels)
        streams, decoded = quantized.streams, quantized.decoded
        deviation = _deviation(header, units, quantized)
    parts = tuple(data for _, data in streams)
    records = tuple(StreamRecord(coder, len(data)) for coder, data in streams)
    base_codes = _base_codes_checksum(plan, sources)
    record = ChunkRecord(xxh64_of_parts(parts), xxh64(decoded), records, base_codes)
    return EncodedChunk(record, parts, deviation)


def _base_codes_checksum(plan: Plan, sources: ChunkSources) -> int | None:
    if not plan.reads_base_codes:
        return None
    codes = sources.base_codes()
    return 0 if codes is None else xxh64(codes)
