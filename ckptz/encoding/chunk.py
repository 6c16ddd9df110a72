"""Encoding chunks of tensors. The bytes are fixed by the tensor, its plan and its sources.

Small tensors of one chunk are encoded together, to the same bytes: for each by itself, calls would take
longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.bits import xxh64, xxh64_of_parts
from ckptz.class_rules import (
    MAX_TABLES,
    N_MAGNITUDE_CLASSES,
    Labels,
    Magnitude,
    Runs,
    labels_of,
    moved,
    runs_of,
)
from ckptz.codec.frame import ChunkRecord, FrameHeader, StreamRecord
from ckptz.codec.plan import Plan, PlaneMode, Predictor, StreamTables, kernel_mode, planes_plan
from ckptz.codec.units import ChunkSources, TensorSource
from ckptz.codec.values import KINDS, predicted
from ckptz.dtypes import DType
from ckptz.encoding.coded import CodedQuantizer
from ckptz.encoding.draft import TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL, ClassCounts, Draft
from ckptz.encoding.moved import unmoved
from ckptz.entropy.frequency import normalise, pack_tables, row_cost_bits, row_entropy_bits
from ckptz.entropy.streams import (
    LANE_CHOICES,
    CoderId,
    Segments,
    Stream,
    cut,
    encode_rans,
    encode_rans_streams,
    encode_sparse,
    encode_streams,
    joined,
    n_lanes_for,
    pack_gaps,
)
from ckptz.errors import ConfigError
from ckptz.kernels import cpu, planning
from ckptz.kernels.floats import Bytes, Counts, Units, widen_f64
from ckptz.quant.quantizer import Quantizer

FLUSHED_BELOW = 2.0**-100  # as in `floats.add_f32`
MAX_LANE_BYTES = 1 + 4 * LANE_CHOICES[-1]
# From bench/product/weight_sync.py: where more units change, a sparse chunk decodes no faster
# than the dense one, which is smaller.
MAX_SPARSE_SHARE = 0.25
_UNCHANGED = (CoderId.CONSTANT, b"\x00")
# Codes of a lossy chunk, the units they decode to, and where these escaped.
Quantized = tuple[Bytes, Units, NDArray[np.intp] | None]


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
class Classed:
    """A plane of tensors [m], one behind the other, as tables by class would code it.

    Attributes:
        totals: occurrences of each code in each tensor [m, 256].
        n_bytes: of the stream of each, at most [m].
        segments: a segment for each class that occurs in each tensor.
        stream_segments: how many segments there are up to the end of each tensor [m].
    """

    totals: Counts
    n_bytes: NDArray[np.float64]
    segments: Segments
    stream_segments: Counts

    def encode(self, grouped: Bytes, begins: Counts, which: Sequence[int]) -> list[memoryview]:
        """Code those tensors, by number, of a plane [n] in the order of tensors and classes."""
        bounds = [0, *self.stream_segments.tolist()]
        rows = np.concatenate([np.arange(bounds[k], bounds[k + 1]) for k in which])
        own = Segments(self.segments.ends[rows], self.segments.table_of[rows], self.segments.tables)
        stream_segments = np.cumsum([bounds[k + 1] - bounds[k] for k in which])
        lanes = np.array([n_lanes_for(self.n_bytes[k]) for k in which])
        return encode_rans_streams(grouped, begins[which], stream_segments, own, lanes, [b""] * len(which))


def encode_by_classes(
    planes: Sequence[Bytes], ends: Counts, labels: Labels, n_classes: int, classed: Sequence[Classed]
) -> list[list[Stream]]:
    """Code planes of tensors by tables that classes share, or by another coder where that is smaller.

    Args:
        planes: codes [n] of tensors [m], one behind the other.
        ends: of each tensor [m].
        labels: of each unit [n]; those of one tensor are below those of the next.
        n_classes: of the labels.
        classed: what tables make of each plane.

    Returns:
        Of each plane, the stream of each tensor.
    """
    sizes = np.diff(ends, prepend=0)
    streams, left = list[list[Stream]](), list[list[int]]()
    for plane, own in zip(planes, classed, strict=True):
        parts = cut(plane, ends)
        beats = (own.totals.max(axis=1) == sizes) | (row_entropy_bits(own.totals) / 8 < own.n_bytes)
        found: list[Stream] = [(CoderId.STORED, part.data) for part in parts]
        if at := np.flatnonzero(beats).tolist():
            others = encode_streams([parts[k] for k in at], own.totals[at], beats=own.n_bytes[at].tolist())
            for k, stream in zip(at, others, strict=True):
                found[k] = stream
        streams.append(found)
        left.append([k for k, most in enumerate(own.n_bytes) if not beats[k] or len(found[k][1]) > most])
    which = [j for j, of_plane in enumerate(left) if of_plane]
    if not which:
        return streams
    grouped = moved([planes[j] for j in which], lambda units: cpu().group(units, labels, n_classes))
    for j, codes in zip(which, grouped, strict=True):
        for k, data in zip(left[j], classed[j].encode(codes, ends - sizes, left[j]), strict=True):
            if len(data) < len(streams[j][k][1]):
                streams[j][k] = CoderId.RANS_SHARED, data
    return streams


def _encode_codes(planes: Any, draft: Draft, labels: Labels | None) -> list[Stream]:
    if labels is None:
        return encode_streams(planes)
    n_classes, ends = draft.plan.n_classes, np.array([len(labels)])
    counted = draft.counted or [ClassCounts.of(labels, plane, n_classes) for plane in planes]
    classed = [
        Classed(
            found.total[None],
            np.array([found.bytes_by(tables) + MAX_LANE_BYTES]),
            tables.segments(found.classes, found.per_class),
            np.array([len(found.classes)]),
        )
        for tables, found in zip(draft.plan.tables, counted, strict=True)
    ]
    return [stream for [stream] in encode_by_classes(planes, ends, labels, n_classes, classed)]


def encode_by_runs(planes: Sequence[Bytes], runs: Runs, tables: Sequence[StreamTables]) -> list[Stream]:
    """Code planes of a chunk by the tables of its runs, where these have all its codes, or by others."""
    classes = np.flatnonzero(runs.per_class)
    streams = list[Stream]()
    for plane, own in zip(planes, tables, strict=True):
        segments = own.segments(classes, runs.per_class[classes])
        is_one = bool((segments.table_of == segments.table_of[0]).all())
        grouped = plane if is_one else runs.group(plane)
        if is_one or not _covers(segments, grouped):
            streams += encode_streams([plane])
        else:
            streams.append((CoderId.RANS_SHARED, encode_rans(grouped, segments, len(plane))))
    return streams


def _covers(segments: Segments, grouped: Bytes) -> bool:
    """Tell whether each segment's table has all codes from the least of its codes [n] to the greatest."""
    begins = np.concatenate(([0], segments.ends[:-1]))
    least, most = np.minimum.reduceat(grouped, begins), np.maximum.reduceat(grouped, begins)
    n_used = np.cumsum(segments.tables > 0, axis=1, dtype=np.int64)[segments.table_of]
    row = np.arange(len(begins))
    n_between = n_used[row, most] - n_used[row, least]
    return bool(
        (n_between == most.astype(np.int64) - least).all() and segments.tables[segments.table_of, least].all()
    )


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
    if plan.quant_map.escape_code is None:
        return codes, decoded, None
    escaped = np.flatnonzero(codes == plan.quant_map.escape_code)
    decoded[escaped] = quantizer.kept(begin, units)[escaped]
    return codes, decoded, escaped


def _encode_quantized(draft: Draft, quantized: Quantized, labels: Labels | None) -> list[Stream]:
    codes, decoded, escaped = quantized
    streams = _encode_codes(codes[None], draft, labels)
    if escaped is not None:
        streams += encode_values(decoded[escaped])
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
    return CoderId.SPARSE, encode_sparse(pack_gaps(positions), plane, 0)


def encode_chunk(source: TensorSource, draft: Draft, sources: ChunkSources) -> EncodedChunk:
    """Encode one chunk of a tensor by its draft; `sources` has its bounds, and the base if one is needed."""
    plan = draft.plan
    header = FrameHeader(source.dtype, source.shape, plan, ())
    is_lossless = plan.quant_map is None and draft.rounding is None
    exact = unmoved(source).units(sources.begin, sources.end)
    units = exact if is_lossless else source.units(sources.begin, sources.end)
    runs = runs_of(plan.rules, sources.begin, sources.end, header.row_units)
    runs = None if plan.quant_map is not None else runs
    labels = labels_of(plan.rules, sources, header.row_units) if plan.rules and runs is None else None
    deviation, decoded = None, units
    if plan.quant_map is None:
        if draft.rounding is not None:
            kind = KINDS[source.dtype.name]
            decoded = draft.rounding.rounded(units, kind, sources.begin)
            deviation = _deviation(kind, exact, decoded, np.zeros(256, np.int64))
        base = sources.base_units() if plan.predictor is Predictor.BASE else decoded
        changed = encode_changes(decoded, base, plan, source.dtype) if draft.is_sparse else None
        if changed is None:
            planes = cpu().split_planes(decoded, base, kernel_mode(plan.mode, source.dtype))
            by_runs = None if runs is None else encode_by_runs(planes, runs, plan.tables)
            changed = by_runs or _encode_codes(planes, draft, labels)
        streams = changed
    else:
        quantized = _quantize(header, draft.quantizer, units, sources, labels)
        streams, (codes, decoded, _) = _encode_quantized(draft, quantized, labels), quantized
        if isinstance(draft.quantizer, CodedQuantizer):  # its errors were measured where its values are
            deviation = Deviation(*draft.quantizer.errors(sources.begin), cpu().histogram(codes))
        else:
            counts = draft.counted[0].total if draft.counted else cpu().histogram(codes)
            deviation = _deviation(header.value_table.kind, exact, decoded, counts)
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

    def only(self, which: Sequence[int], most: int | None = None) -> Batch:
        """Give some of the tensors, in this order, and of each its first units, `most` or all."""
        if most is None and len(which) == len(self.units):
            return self
        units = [self.units[k][:most] for k in which]
        return Batch(self.dtype, units, [self.bases[k][:most] for k in which] if self.bases else ())

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
    planes, (_, ends), n = batch.planes(mode), batch.flat, batch.dtype.unit_bytes
    rows = Rows.of(cpu().magnitude_classes(batch.flat_bases), ends)
    made = [_tables_by_class(plane, rows) for plane in planes]
    streams = encode_by_classes([*planes], ends, rows.labels, rows.n_labels, [classed for classed, _ in made])
    encoded = list[Encoded]()
    for k, own in enumerate(batch.units):
        plan = planes_plan(mode, (Magnitude(),), tuple([tables[k] for _, tables in made]))
        encoded.append((Draft(plan), encoded_chunk([streams[j][k] for j in range(n)], own)))
    return encoded


@dataclass(frozen=True, slots=True)
class Rows:
    """The classes by magnitude that occur in tensors [m], one behind the other.

    Attributes:
        labels: of each unit [n], below `n_labels`; those of one tensor are below those of the next.
        n_labels: of all tensors.
        used: labels that occur, ascending [n_rows].
        n_units: units of each of those.
        ends: how many of them there are up to the end of each tensor [m].
        tables_of: for each tensor and class, the last of those that is not above it [m, n_classes].
    """

    labels: Labels
    n_labels: int
    used: Counts
    n_units: Counts
    ends: Counts
    tables_of: Counts

    @classmethod
    def of(cls, classes: Bytes, ends: Counts) -> Rows:
        """Find the classes in the class of each unit [n] and the end of each tensor [m]."""
        m, labels = len(ends), classes
        borders = N_MAGNITUDE_CLASSES * np.arange(1, m + 1)
        if m > 1:
            shift = np.repeat((borders - N_MAGNITUDE_CLASSES).astype(np.uint16), np.diff(ends, prepend=0))
            labels = classes + shift
        counts = cpu().class_counts(labels, int(borders[-1]))
        used = np.flatnonzero(counts)
        row_ends = np.searchsorted(used, borders)
        before = np.searchsorted(used, np.arange(borders[-1]), side="right").reshape(m, -1) - 1
        tables_of = np.maximum(before, np.concatenate(([0], row_ends[:-1]))[:, None])
        n_units = counts[used]
        if m > 1:  # most of the counts of codes would be zeros
            row_of = np.zeros(borders[-1], np.uint16)
            row_of[used] = np.arange(len(used))
            labels, used = row_of[labels], np.arange(len(used))
        return cls(labels, len(used) if m > 1 else int(borders[-1]), used, n_units, row_ends, tables_of)


def _tables_by_class(plane: Bytes, rows: Rows) -> tuple[Classed, list[StreamTables]]:
    """Make the tables that neighbouring classes share, of each tensor by itself."""
    counts = cpu().class_histogram(rows.labels, plane, rows.n_labels)[rows.used]
    table_of, sums, ends = planning().merge_rows(
        counts, rows.ends, MAX_TABLES, TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL
    )
    begins, frequencies = np.concatenate(([0], ends[:-1])), normalise(sums)
    row_begins = np.concatenate(([0], rows.ends[:-1]))
    n_bytes = np.add.reduceat(row_cost_bits(sums, frequencies), begins) / 8 + MAX_LANE_BYTES
    segments = Segments(np.cumsum(rows.n_units), table_of, frequencies)
    classed = Classed(np.add.reduceat(counts, row_begins, axis=0), n_bytes, segments, rows.ends)
    packed, packed_ends = pack_tables(frequencies)
    heads = cut(packed, packed_ends[ends - 1])
    tables = [
        StreamTables(frequencies[i:j], table_of[own] - i, bytes((j - i,)) + head.tobytes())
        for i, j, own, head in zip(begins.tolist(), ends.tolist(), rows.tables_of, heads, strict=True)
    ]
    return classed, tables
