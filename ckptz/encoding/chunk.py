"""Encoding chunks of tensors. The bytes are fixed by the tensor, its plan and its sources.

Small tensors of one chunk are encoded together, to the same bytes: for each by itself, calls would take
longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.bits import xxh64, xxh64_of_parts
from ckptz.class_rules import N_MAGNITUDE_CLASSES, Labels, Magnitude, labels_of, runs_of
from ckptz.codec.frame import ChunkRecord, FrameHeader, StreamRecord
from ckptz.codec.plan import Plan, PlaneMode, Predictor, kernel_mode, planes_plan
from ckptz.codec.units import ChunkSources, TensorSource
from ckptz.codec.values import KINDS, predicted
from ckptz.dtypes import DType
from ckptz.encoding.coded import CodedQuantizer
from ckptz.encoding.contexts import Contexts
from ckptz.encoding.encoding_plan import EncodingPlan
from ckptz.encoding.moved import unmoved
from ckptz.encoding.run_contexts import encode_by_runs
from ckptz.entropy.streams import CoderId, Stream, cut, encode_sparse, encode_streams, pack_gaps
from ckptz.errors import ConfigError
from ckptz.kernels import cpu, planning
from ckptz.kernels.floats import RAW, Bytes, Counts, Units, widen_f64
from ckptz.quant.quantizer import Quantizer

FLUSHED_BELOW = 2.0**-100  # as in `floats.add_f32`
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


def _encode_codes(codes: Units, draft: EncodingPlan, labels: Labels | None) -> list[Stream]:
    """Code each byte plane of codes [n], with labels [n] by the tables of the plan."""
    if labels is None:
        return encode_streams(cpu().split_planes(codes, codes, RAW))
    contexts = Contexts(labels, np.array([len(labels)]), draft.plan.n_classes)
    return contexts.sort(codes, draft.counted).encode_by(draft.plan.tables)


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


def _encode_quantized(draft: EncodingPlan, quantized: Quantized, labels: Labels | None) -> list[Stream]:
    codes, decoded, escaped = quantized
    streams = _encode_codes(codes, draft, labels)
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


def restored_units(source: TensorSource, draft: EncodingPlan, sources: ChunkSources) -> Units:
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


def encode_chunk(source: TensorSource, draft: EncodingPlan, sources: ChunkSources) -> EncodedChunk:
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
            mode = kernel_mode(plan.mode, source.dtype)
            if labels is not None:
                changed = _encode_codes(cpu().transform(decoded, base, mode), draft, labels)
            elif runs is not None:
                changed = encode_by_runs(cpu().split_planes(decoded, base, mode), runs, plan.tables)
            else:
                changed = encode_streams(cpu().split_planes(decoded, base, mode))
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


Encoded = tuple[EncodingPlan, EncodedChunk]


class Batch:
    """Tensors of one dtype, none of them empty: the units of each, and of the bases that all or none have."""

    def __init__(self, dtype: DType, units: Sequence[Units], bases: Sequence[Units]) -> None:
        self.dtype, self.units, self.bases = dtype, units, bases

    @cached_property
    def ends(self) -> Counts:
        """End of each tensor [m], one behind the other."""
        return np.cumsum([len(own) for own in self.units])

    def _each(self, out: Any) -> Iterator[tuple[Units, Units, Any]]:
        """Give units and base of each tensor, the units themselves without a base, and its part of `out`."""
        begin = 0
        for own, base in zip(self.units, self.bases or self.units, strict=True):
            yield own, base, out[..., begin : begin + len(own)]
            begin += len(own)

    def only(self, which: Sequence[int], most: int | None = None) -> Batch:
        """Give some of the tensors, in this order, and of each its first units, `most` or all."""
        if most is None and len(which) == len(self.units):
            return self
        units = [self.units[k][:most] for k in which]
        return Batch(self.dtype, units, [self.bases[k][:most] for k in which] if self.bases else ())

    @cached_property
    def by_magnitude(self) -> Contexts:
        """Classes by the magnitude of the bases."""
        labels = np.empty(self.ends[-1], np.uint8)
        for _, base, out in self._each(labels):
            cpu().magnitude_classes(base, out)
        return Contexts(labels, self.ends, N_MAGNITUDE_CLASSES)

    def transformed(self, mode: PlaneMode) -> Units:
        """Give units [n] as a mode changes them, before they are split into planes."""
        found = np.empty(self.ends[-1], self.units[0].dtype)
        for own, base, out in self._each(found):
            cpu().transform(own, base, kernel_mode(mode, self.dtype), out)
        return found

    def planes(self, mode: PlaneMode) -> Bytes:
        """Split into planes [n_planes, n]."""
        found = np.empty((self.dtype.unit_bytes, self.ends[-1]), np.uint8)
        for own, base, out in self._each(found):
            cpu().split_planes(own, base, kernel_mode(mode, self.dtype), out)
        return found

    def parts(self, planes: Bytes) -> list[Bytes]:
        """Cut planes [n_planes, n] into streams: all planes of one tensor, and then of the next."""
        columns = [cut(plane, self.ends) for plane in planes]
        return [part for parts in zip(*columns, strict=True) for part in parts]

    def chunks(self, streams: Sequence[Stream]) -> list[EncodedChunk]:
        """Give the chunk of each tensor from its streams, in the order of `parts`."""
        n = self.dtype.unit_bytes
        return [encoded_chunk(streams[n * k : n * k + n], own) for k, own in enumerate(self.units)]


def encode_planes(batch: Batch, plan: Plan) -> list[Encoded]:
    """Encode tensors by a plan without classes."""
    draft, streams = EncodingPlan(plan), encode_streams(batch.parts(batch.planes(plan.mode)))
    return [(draft, chunk) for chunk in batch.chunks(streams)]


def encode_classed(batch: Batch, mode: PlaneMode) -> list[Encoded]:
    """Encode deltas of a mode with classes by the base's magnitude, each with tables of its own."""
    tables, streams = batch.by_magnitude.sort(batch.transformed(mode)).encode()
    return [
        (EncodingPlan(planes_plan(mode, (Magnitude(),), tuple(own_tables))), encoded_chunk(own_streams, own))
        for own, own_tables, own_streams in zip(batch.units, tables, streams, strict=True)
    ]
