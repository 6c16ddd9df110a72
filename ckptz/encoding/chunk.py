"""Encoding chunks of tensors. The bytes are fixed by the tensor, its plan and its sources.

Small tensors of one chunk are encoded together, to the same bytes: for each by itself, calls would take
longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.bits import xxh64, xxh64_of_parts
from ckptz.class_rules import MAX_TABLES, N_MAGNITUDE_CLASSES, Labels, Magnitude, labels_of, moved
from ckptz.codec.decode import decode_chunk
from ckptz.codec.frame import ChunkRecord, FrameHeader, StreamRecord
from ckptz.codec.plan import Plan, PlaneMode, Predictor, StreamTables, kernel_mode, planes_plan
from ckptz.codec.units import CHUNK_UNITS, UNIT_TYPES, ChunkSources, TensorSource, chunk_bounds
from ckptz.codec.values import KINDS, predicted
from ckptz.dtypes import DType
from ckptz.encoding.coded import CodedQuantizer
from ckptz.encoding.draft import TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL, ClassCounts, Draft
from ckptz.entropy.frequency import entropy_bits
from ckptz.entropy.streams import (
    LANE_CHOICES,
    LANE_MIN_BYTES,
    CoderId,
    Stream,
    cut,
    encode_rans,
    encode_sparse,
    encode_stream,
    encode_streams,
    joined,
    lanes_byte,
)
from ckptz.errors import ConfigError
from ckptz.kernels import cpu, planning, sparse
from ckptz.kernels.floats import Bytes, Counts, Units, widen_f64
from ckptz.quant.quantizer import Quantizer

FLUSHED_BELOW = 2.0**-100  # as in `floats.add_f32`
MAX_LANE_BYTES = 1 + 4 * LANE_CHOICES[-1]
# From bench/product/weight_sync.py: where more units change, a sparse chunk decodes no faster
# than the dense one, which is smaller.
MAX_SPARSE_SHARE = 0.25
_UNCHANGED = (CoderId.CONSTANT, b"\x00")
# Codes of a lossy chunk, the units they decode to, where these escaped, and which are protected.
Quantized = tuple[Bytes, Units, NDArray[np.intp] | None, NDArray[np.bool_] | None]
_LANES: Final = np.array(LANE_CHOICES), np.array(LANE_MIN_BYTES)


@dataclass(frozen=True, slots=True)
class Deviation:
    """Errors of decoded values, summed over units, so that chunks add up."""

    largest: float  # greatest absolute error
    error: float  # sum of squared errors
    power: float  # sum of squared values
    counts: NDArray[np.int64]  # units by code [256]

    def __add__(self, other: Deviation) -> Deviation:
        largest, error, power = (
            max(self.largest, other.largest),
            self.error + other.error,
            self.power + other.power,
        )
        return Deviation(largest, error, power, self.counts + other.counts)


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


@dataclass(frozen=True, slots=True)
class EncodedSource(TensorSource):
    """A tensor that was encoded elsewhere; without loss and a base, its units are decoded when asked for."""

    dtype: DType
    shape: tuple[int, ...]
    plan: Plan
    chunks: tuple[EncodedChunk, ...]

    def is_by(self, draft: Draft) -> bool:
        """Tell whether its chunks are those of a draft; one with a map is known by its very plan."""
        return self.plan is draft.plan or draft == Draft(self.plan, counted=draft.counted)

    def units(self, begin: int, end: int) -> Units:
        header = FrameHeader(self.dtype, self.shape, self.plan, tuple(chunk.record for chunk in self.chunks))
        first, last = begin // CHUNK_UNITS, -(-end // CHUNK_UNITS)
        at = first * CHUNK_UNITS
        out = np.empty(min(last * CHUNK_UNITS, self.n_units) - at, UNIT_TYPES[self.dtype.unit_bytes])
        for index, (low, high) in enumerate(chunk_bounds(len(out)), first):
            copy = bytearray(self.chunks[index].payload)  # kernels take what may change
            payload = np.frombuffer(copy, np.uint8)
            decode_chunk(header, index, payload, ChunkSources(at + low, at + high), out[low:high])
        return out[begin - at : end - at]


def beats_shared(found: ClassCounts, tables: StreamTables) -> tuple[bool, float]:
    """Tell whether a coder may need fewer bytes than the tensor's tables do, and how many these do."""
    total, shared = found.total, found.bytes_by(tables) + MAX_LANE_BYTES
    return bool(total.max() == total.sum() or entropy_bits(total[None]) / 8 < shared), shared


def encode_by_classes(
    planes: Sequence[Bytes],
    labels: Labels,
    n_classes: int,
    tables: Sequence[StreamTables],
    found: Sequence[ClassCounts],
) -> list[Stream]:
    """Code planes, each [n], by tables that classes share, or by another coder where that is smaller."""
    weighed = list(map(beats_shared, found, tables))
    streams: list[Stream] = [
        encode_stream(plane, own.total, beat=shared) if beats else (CoderId.STORED, plane.data)
        for plane, own, (beats, shared) in zip(planes, found, weighed, strict=True)
    ]
    left = [j for j, (beats, shared) in enumerate(weighed) if not beats or len(streams[j][1]) > shared]
    if not left:
        return streams
    grouped = moved([planes[j] for j in left], lambda units: cpu().group(units, labels, n_classes))
    for j, codes in zip(left, grouped, strict=True):
        segments = tables[j].segments(found[j].classes, found[j].per_class)
        classed = encode_rans(codes, segments, weighed[j][1])
        if len(classed) < len(streams[j][1]):
            streams[j] = CoderId.RANS_SHARED, classed
    return streams


def _encode_codes(planes: Any, draft: Draft, labels: Labels | None) -> list[Stream]:
    if labels is None:
        return encode_streams(planes)
    n_classes = draft.plan.n_classes
    counted = draft.counted or [ClassCounts.of(labels, plane, n_classes) for plane in planes]
    return encode_by_classes(planes, labels, n_classes, draft.plan.tables, counted)


def encode_values(units: Units) -> list[Stream]:
    """Code units [n] as they are, each byte plane a stream; empty streams for no units."""
    if not len(units):
        return [(CoderId.STORED, b"")] * units.itemsize
    return encode_streams(cpu().split_planes(units, units, 0))


def _quantize(
    header: FrameHeader,
    quantizer: Quantizer | None,
    units: Units,
    sources: ChunkSources,
    labels: Labels | None,
) -> Quantized:
    plan = header.plan
    if plan.quant_map is None or quantizer is None:
        raise ConfigError("a plan in the linear or bits domain needs a map and a quantizer to encode")
    begin, end = sources.begin, sources.end
    codes, decoded = quantizer.codes(begin, end, units), np.empty_like(units)
    header.value_table.decode(codes, labels, predicted(plan, sources), decoded)
    escaped, protected, kept = None, None, quantizer.kept(begin, units)
    if plan.quant_map.escape_code is not None:
        escaped = np.flatnonzero(codes == plan.quant_map.escape_code)
        decoded[escaped] = kept[escaped]
    if plan.quant_map.has_protected:
        mask = quantizer.protected(begin, end, units)
        protected = np.zeros(len(units), np.bool_) if mask is None else mask
        decoded[protected] = kept[protected]
    return codes, decoded, escaped, protected


def _encode_quantized(draft: Draft, quantized: Quantized, labels: Labels | None) -> list[Stream]:
    codes, decoded, escaped, protected = quantized
    streams = _encode_codes(codes[None], draft, labels)
    if escaped is not None:
        streams += encode_values(decoded[escaped])
    if protected is not None:
        streams.append(encode_stream(protected.view(np.uint8)))
        streams += encode_values(decoded[protected])
    return streams


def _deviation(kind: int, units: Units, decoded: Units, counts: NDArray[np.int64]) -> Deviation:
    exact, restored = (cpu().to_f32(u, kind).view(np.float32) for u in (units, decoded))
    largest, error, power = planning().deviation(exact, restored)
    if largest < FLUSHED_BELOW:
        # Differences this small may have been flushed to zero by the processor.
        wide, wide_restored = (widen_f64(f.view(np.uint32)) for f in (exact, restored))
        difference = wide_restored - wide
        largest, error, power = np.abs(difference).max(initial=0.0), difference @ difference, wide @ wide
    return Deviation(float(largest), float(error), float(power), counts)


def restored_units(source: TensorSource, draft: Draft, sources: ChunkSources) -> Units:
    """Give the units [n] that a chunk will decode to, without coding it; others may be classed by them."""
    units = source.units(sources.begin, sources.end)
    if draft.plan.quant_map is None:
        if draft.rounding is None:
            return units
        return draft.rounding.rounded(units, KINDS[source.dtype.name], sources.begin)
    header = FrameHeader(source.dtype, source.shape, draft.plan, ())
    labels = labels_of(draft.plan.rules, sources, header.row_units) if draft.plan.rules else None
    return _quantize(header, draft.quantizer, units, sources, labels)[1]


def encode_changes(units: Units, base: Units, plan: Plan, dtype: DType) -> list[Stream] | None:
    """Code a chunk, units [n], of which few differ from the base [n]; None if too many do."""
    positions = np.flatnonzero(units != base)
    if len(positions) > MAX_SPARSE_SHARE * len(units):
        return None
    mode = kernel_mode(plan.mode, dtype)
    planes = cpu().split_planes(units[positions], base[positions], mode)
    return [_encode_plane(positions, plane) for plane in planes]


def _encode_plane(positions: NDArray[np.int64], plane: Bytes) -> Stream:
    used = np.flatnonzero(plane)
    if not len(used):
        return _UNCHANGED
    if len(used) < len(plane):
        positions, plane = positions[used], plane[used]
    return CoderId.SPARSE, encode_sparse(sparse().pack_gaps(positions), plane, 0)


def encode_chunk(source: TensorSource, draft: Draft, sources: ChunkSources) -> EncodedChunk:
    """Encode one chunk of a tensor by its draft; `sources` has its bounds, and the base if one is needed."""
    plan = draft.plan
    if isinstance(source, EncodedSource) and source.is_by(draft):
        return source.chunks[sources.begin // CHUNK_UNITS]
    header = FrameHeader(source.dtype, source.shape, plan, ())
    units = source.units(sources.begin, sources.end)
    labels = labels_of(plan.rules, sources, header.row_units) if plan.rules else None
    deviation, decoded = None, units
    if plan.quant_map is None:
        if draft.rounding is not None:
            kind = KINDS[source.dtype.name]
            decoded = draft.rounding.rounded(units, kind, sources.begin)
            deviation = _deviation(kind, units, decoded, np.zeros(256, np.int64))
        base = sources.base_units() if plan.predictor is Predictor.BASE else decoded
        changed = encode_changes(decoded, base, plan, source.dtype) if draft.is_sparse else None
        if changed is None:
            planes = cpu().split_planes(decoded, base, kernel_mode(plan.mode, source.dtype))
            changed = _encode_codes(planes, draft, labels)
        streams = changed
    else:
        quantized = _quantize(header, draft.quantizer, units, sources, labels)
        streams, (codes, decoded, *_) = _encode_quantized(draft, quantized, labels), quantized
        if isinstance(draft.quantizer, CodedQuantizer):  # its errors were measured where its values are
            deviation = Deviation(*draft.quantizer.errors(sources.begin), cpu().histogram(codes))
        else:
            counts = draft.counted[0].total if draft.counted else cpu().histogram(codes)
            deviation = _deviation(header.value_table.kind, units, decoded, counts)
    base_codes = None
    if plan.reads_base_codes:
        found = sources.base_codes()
        base_codes = 0 if found is None else xxh64(found)
    return encoded_chunk(streams, decoded, base_codes, deviation)


def encoded_chunk(
    streams: Sequence[Stream],
    decoded: Units,
    base_codes: int | None = None,
    deviation: Deviation | None = None,
) -> EncodedChunk:
    """Make the chunk of these streams, which decodes to units [n]."""
    parts = tuple([data for _, data in streams])
    records = tuple([StreamRecord(coder, len(data)) for coder, data in streams])
    return EncodedChunk(
        ChunkRecord(xxh64_of_parts(parts), xxh64(decoded), records, base_codes), parts, deviation
    )


Encoded = tuple[Draft, EncodedChunk]


class Batch:
    """Tensors of one dtype, none of them empty: the units of each, and of the bases that all or none have."""

    def __init__(self, dtype: DType, units: Sequence[Units], bases: Sequence[Units]) -> None:
        self.dtype, self.units, self.bases = dtype, units, bases

    @cached_property
    def flat(self) -> tuple[Units, Counts]:
        """Units [n] of one tensor behind the other, and the end of each [m]."""
        return joined(self.units)

    @cached_property
    def flat_bases(self) -> Units:
        """Units [n] of the bases; without bases those of the tensors."""
        return joined(self.bases)[0] if self.bases else self.flat[0]

    def only(self, which: Sequence[int]) -> Batch:
        """Give some of the tensors, in this order."""
        if len(which) == len(self.units):
            return self
        bases = [self.bases[k] for k in which] if self.bases else ()
        return Batch(self.dtype, [self.units[k] for k in which], bases)

    def planes(self, mode: PlaneMode) -> Bytes:
        """Split into planes [n_planes, n]."""
        return cpu().split_planes(self.flat[0], self.flat_bases, kernel_mode(mode, self.dtype))

    def parts(self, planes: Bytes) -> list[Bytes]:
        """Cut planes [n_planes, n] into streams: all planes of one tensor, and then of the next."""
        columns = [cut(plane, self.flat[1]) for plane in planes]
        return [part for parts in zip(*columns, strict=True) for part in parts]

    def chunks(self, streams: Sequence[Stream]) -> list[EncodedChunk]:
        """Give the chunk of each tensor from its streams, in the order of `parts`."""
        n = self.dtype.unit_bytes
        return [encoded_chunk(streams[n * k : n * k + n], own) for k, own in enumerate(self.units)]


def encode_planes(batch: Batch, plan: Plan) -> list[Encoded]:
    """Encode tensors by a plan without classes."""
    draft, streams = Draft(plan), encode_streams(batch.parts(batch.planes(plan.mode)))
    return [(draft, chunk) for chunk in batch.chunks(streams)]


def encode_classed(batch: Batch, mode: PlaneMode) -> list[Encoded]:
    """Encode deltas of a mode with classes by the base's magnitude, each with tables of its own."""
    planes, labels, n = batch.planes(mode), cpu().magnitude_classes(batch.flat_bases), batch.dtype.unit_bytes
    frequencies, ends, table_of, packed, packed_ends, totals, most, lanes, words, word_ends = (
        planning().encode_classed(
            planes.reshape(-1),
            labels,
            batch.flat[1],
            N_MAGNITUDE_CLASSES,
            MAX_TABLES,
            TABLE_COST_BITS,
            TABLE_COST_BITS_PER_SYMBOL,
            *_LANES,
        )
    )
    rows = zip(cut(frequencies, ends), table_of, cut(packed, packed_ends), strict=True)
    tables = [StreamTables(own, of_class, head.tobytes()) for own, of_class, head in rows]
    parts, own_labels = batch.parts(planes), cut(labels, batch.flat[1])
    others = np.flatnonzero(lanes == 0)
    coded = [
        lanes_byte(k) + data.tobytes() if k else b""
        for k, data in zip(lanes.tolist(), cut(words, word_ends), strict=True)
    ]
    streams: list[Stream] = [
        (CoderId.RANS_SHARED, data) if len(data) < len(plane) else (CoderId.STORED, plane.data)
        for data, plane in zip(coded, parts, strict=True)
    ]
    if len(others):
        found = encode_streams([parts[k] for k in others], totals[others], beats=most[others].tolist())
        for k, stream in zip(others.tolist(), found, strict=True):
            streams[k] = stream
            if len(stream[1]) > most[k]:
                counts = ClassCounts.of(own_labels[k // n], parts[k], N_MAGNITUDE_CLASSES)
                [streams[k]] = encode_by_classes(
                    [parts[k]], own_labels[k // n], N_MAGNITUDE_CLASSES, [tables[k]], [counts]
                )
    drafts = [
        Draft(planes_plan(mode, (Magnitude(),), tuple(tables[k : k + n]))) for k in range(0, len(tables), n)
    ]
    return list(zip(drafts, batch.chunks(streams), strict=True))
