"""Encodes chunks of tensors. The bytes depend on the tensor, its plan and its sources only.

Small tensors of one chunk are encoded in batches, to the same bytes: for single ones, calls would take longer
than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.coded import CodedQuantizer
from ckptz.codec.contexts import NO_TABLES, Contexts, Sorted
from ckptz.codec.moved import unmoved
from ckptz.codec.quantizer import Quantizer
from ckptz.codec.run_contexts import encode_by_runs
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.errors import ConfigError
from ckptz.format.bits import xxh64, xxh64_of_parts
from ckptz.format.context_rules import N_MAGNITUDE_CONTEXTS, Labels, Magnitude, runs_of
from ckptz.format.dtypes import DType
from ckptz.format.frame import ChunkRecord, FrameHeader, StreamRecord, pack_plan
from ckptz.format.plan import Plan, PlaneMode, Predictor, QuantizationMap, kernel_mode, planes_plan
from ckptz.format.sources import CHUNK_VALUES, PATTERN_TYPES, ChunkSources, TensorSource
from ckptz.format.streams import CoderId, Stream, cut, encode_sparse, encode_streams, pack_gaps
from ckptz.format.values import FLOAT_KINDS, predicted
from ckptz.kernels import cpu
from ckptz.kernels.blas import product
from ckptz.kernels.floats import RAW, Bytes, Counts, Patterns, widen_f64

FLUSHED_BELOW = 2.0**-100  # as in `floats.add_f32`
# From bench/product/weight_sync.py: where more patterns change, a sparse chunk decodes no faster
# than the dense one, which is smaller.
MAX_SPARSE_SHARE = 0.25
MAX_COPIED = 1 << 13  # tensors of fewer patterns are joined, which is faster than a kernel call for each
_UNCHANGED = (CoderId.CONSTANT, b"\x00")
# Patterns that a lossy chunk decodes to, and its codes, if it has a quantization map.
Quantized = tuple[Patterns, Bytes | None]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Errors of decoded values; those of chunks can be added."""

    largest: float  # greatest absolute error
    error: float  # sum of squared errors
    power: float  # sum of squared values
    n_escaped: int = 0  # elements that are stored exactly
    n_zeros: int = 0  # elements whose code is restored as zero, if the plan counts them

    def __add__(self, other: Deviation) -> Deviation:
        return Deviation(
            largest=max(self.largest, other.largest),
            error=self.error + other.error,
            power=self.power + other.power,
            n_escaped=self.n_escaped + other.n_escaped,
            n_zeros=self.n_zeros + other.n_zeros,
        )


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's record, its streams as buffers, and its errors if the plan is lossy."""

    record: ChunkRecord
    streams: tuple[bytes | memoryview, ...]
    deviation: Deviation | None = None

    @property
    def payload(self) -> bytes:
        """The bytes of all streams, copied."""
        return b"".join(self.streams)


def split_random(codes: Patterns, n_random: int) -> tuple[Bytes, Patterns]:
    """Split codes [n] into their lowest `n_random` byte planes [n_random, n] and the upper bytes [n]."""
    if not n_random:
        return np.empty((0, len(codes)), np.uint8), codes
    n_parts = codes.itemsize // (codes.itemsize - n_random)
    upper = codes.view(PATTERN_TYPES[codes.itemsize // n_parts])[n_parts - 1 :: n_parts].copy()
    return cpu().split_planes(codes, codes, RAW)[:n_random], upper


def _encode_codes(codes: Patterns, encoding: TensorPlan, labels: Labels | None) -> list[Stream]:
    """Encode each byte plane of codes [n], with contexts `labels` [n] if given, by the tables of the plan."""
    margin = encoding.huffman_margin
    if labels is None:
        return encode_streams(cpu().split_planes(codes, codes, RAW), huffman_margin=margin)
    contexts = Contexts(labels, np.array([len(labels)]), encoding.plan.n_contexts)
    low, upper = split_random(codes, encoding.n_random)
    streams = encode_streams([*low], huffman_margin=margin)
    tables = encoding.plan.tables[len(low) :]
    return streams + Sorted(contexts, upper).encode_by(tables, encoding.counted, margin)


def encode_values(patterns: Patterns) -> list[Stream]:
    """Encode patterns [n] untransformed, each byte plane as a stream; without patterns streams are empty."""
    if not len(patterns):
        return [(CoderId.STORED, b"")] * patterns.itemsize
    return encode_streams(cpu().split_planes(patterns, patterns, 0))


def _quantize(
    header: FrameHeader,
    quantizer: Quantizer | None,
    patterns: Patterns,
    sources: ChunkSources,
    labels: Labels | None,
) -> tuple[Patterns, Bytes]:
    plan = header.plan
    if plan.quant_map is None or quantizer is None:
        raise ConfigError("a plan in the linear or bits domain needs a map and a quantizer to encode")
    begin, end = sources.begin, sources.end
    codes, decoded = quantizer.codes(begin, end, patterns), np.empty_like(patterns)
    header.value_table.decode(codes, labels, predicted(plan, sources), decoded)
    if plan.quant_map.escape_code is not None:
        escaped = np.flatnonzero(codes == plan.quant_map.escape_code)
        decoded[escaped] = quantizer.kept(begin, patterns)[escaped]
    return decoded, codes


def _deviation(
    kind: int, patterns: Patterns, decoded: Patterns, n_escaped: int = 0, n_zeros: int = 0
) -> Deviation:
    exact, restored = (cpu().to_f32(u, kind).view(np.float32) for u in (patterns, decoded))
    largest, error, power = cpu().deviation(exact, restored)
    if largest < FLUSHED_BELOW:
        # The processor may have flushed such small differences to zero.
        wide, wide_restored = (widen_f64(f.view(np.uint32)) for f in (exact, restored))
        difference = wide_restored - wide
        largest = np.abs(difference).max(initial=0.0)
        error, power = product(difference, difference), product(wide, wide)
    return Deviation(float(largest), float(error), float(power), n_escaped, n_zeros)


def _n_zeros(quant_map: QuantizationMap, codes: Bytes) -> int:
    """Count the elements whose code is restored as zero."""
    levels = quant_map.table.expand()[0][: quant_map.escape_code]
    return int(cpu().histogram(codes)[: len(levels)][levels & 0x7FFFFFFF == 0].sum())


def restored_chunk(source: TensorSource, encoding: TensorPlan, sources: ChunkSources) -> Quantized:
    """Return the patterns [n] that a chunk will decode to, and its codes, without encoding it."""
    if encoding.plan.quant_map is None:
        return (encoding.rounded or source).patterns(sources.begin, sources.end), None
    header = FrameHeader(source.dtype, source.shape, encoding.plan, ())
    labels = sources.labels(encoding.plan.rules, header.row_patterns) if encoding.plan.rules else None
    patterns = source.patterns(sources.begin, sources.end)
    return _quantize(header, encoding.quantizer, patterns, sources, labels)


def encode_changes(patterns: Patterns, base: Patterns, plan: Plan, dtype: DType) -> list[Stream] | None:
    """Encode the changes of patterns [n] against a base [n]; None if too many patterns differ."""
    positions = np.flatnonzero(patterns != base)
    if len(positions) > MAX_SPARSE_SHARE * len(patterns):
        return None
    mode = kernel_mode(plan.mode, dtype)
    planes = cpu().split_planes(patterns[positions], base[positions], mode)
    return [_encode_plane(positions, plane) for plane in planes]


def _encode_plane(positions: NDArray[np.int64], plane: Bytes) -> Stream:
    used = np.flatnonzero(plane)
    if not len(used):
        return _UNCHANGED
    if len(used) < len(plane):
        positions, plane = positions[used], plane[used]
    return CoderId.SPARSE, encode_sparse(pack_gaps(positions), plane)


def encode_chunk(
    source: TensorSource, encoding: TensorPlan, sources: ChunkSources, restored: TensorSource | None = None
) -> EncodedChunk:
    """Encode one chunk of a tensor by its plan.

    Args:
        source: the tensor.
        encoding: its plan.
        sources: the bounds, and base and context tensors if the plan needs them.
        restored: the tensor with the values and codes of `restored_chunk`, if they are cached.
    """
    plan = encoding.plan
    header = FrameHeader(source.dtype, source.shape, plan, ())
    if plan.quant_map is None:
        streams, decoded, deviation = _encode_planes(header, source, encoding, sources)
    else:
        streams, decoded, deviation = _encode_map(header, source, encoding, sources, restored)
    base_codes = None
    if plan.reads_base_codes:
        codes_of_base = sources.base_codes()
        base_codes = 0 if codes_of_base is None else xxh64(codes_of_base)
    return encoded_chunk(streams, decoded, base_codes, deviation)


# Streams, the patterns that they decode to, and the errors if the chunk is lossy.
_Coded = tuple[list[Stream], Patterns, Deviation | None]


def _encode_planes(
    header: FrameHeader, source: TensorSource, encoding: TensorPlan, sources: ChunkSources
) -> _Coded:
    """Encode the byte planes of patterns, rounded first if the plan says so."""
    plan, deviation = header.plan, None
    exact = decoded = unmoved(source).patterns(sources.begin, sources.end)
    if encoding.rounded is not None:
        decoded = encoding.rounded.patterns(sources.begin, sources.end)
        kind = FLOAT_KINDS[source.dtype.name]
        deviation = _deviation(kind, exact, decoded)
    base = sources.base_patterns() if plan.predictor is Predictor.BASE else decoded
    if encoding.is_sparse and (changes := encode_changes(decoded, base, plan, source.dtype)) is not None:
        return changes, decoded, deviation
    batch = Batch(source.dtype, [decoded], [base])
    if not plan.rules:
        [streams] = batch.streams(batch.planes(plan.mode), encoding.huffman_margin)
    elif not encoding.by_table:
        labels = sources.labels(plan.rules, header.row_patterns)
        streams = _encode_codes(batch.transformed(plan.mode), encoding, labels)
    else:
        runs = runs_of(plan.rules, sources.begin, sources.end, header.row_patterns)
        assert runs is not None  # `by_table` was counted by runs
        by_table = encoding.by_table[sources.begin // CHUNK_VALUES]
        planes, margin = [*batch.planes(plan.mode)], encoding.huffman_margin
        streams = encode_by_runs(planes, runs, plan.tables, by_table, margin)
    return streams, decoded, deviation


def _encode_map(
    header: FrameHeader,
    source: TensorSource,
    encoding: TensorPlan,
    sources: ChunkSources,
    restored: TensorSource | None,
) -> _Coded:
    """Encode the codes of a quantization map, and the escaped elements."""
    plan, begin, end = header.plan, sources.begin, sources.end
    labels = sources.labels(plan.rules, header.row_patterns) if plan.rules else None
    quantized: Quantized
    if restored is None:
        patterns = source.patterns(begin, end)
        quantized = _quantize(header, encoding.quantizer, patterns, sources, labels)
    else:
        quantized = restored.patterns_and_codes(begin, end)
    decoded, codes = quantized
    assert codes is not None
    assert plan.quant_map is not None
    streams = _encode_codes(codes, encoding, labels)
    n_escaped = 0
    if plan.quant_map.escape_code is not None:
        escaped = decoded[codes == plan.quant_map.escape_code]
        streams, n_escaped = streams + encode_values(escaped), len(escaped)
    n_zeros = _n_zeros(plan.quant_map, codes) if encoding.counts_zeros else 0
    if isinstance(encoding.quantizer, CodedQuantizer):  # errors were measured on the device
        errors = encoding.quantizer.source.errors[begin // CHUNK_VALUES]
        return streams, decoded, Deviation(*errors, n_escaped, n_zeros)
    exact = unmoved(source).patterns(begin, end)
    return streams, decoded, _deviation(header.value_table.kind, exact, decoded, n_escaped, n_zeros)


def encoded_bytes(source: TensorSource, base: TensorSource | None, encoding: TensorPlan) -> float:
    """Encode the first chunk of a tensor, and scale its size to the bytes of the whole frame."""
    end = min(CHUNK_VALUES, source.n_patterns)
    chunk = encode_chunk(source, encoding, ChunkSources(0, end, base))
    n_bytes = sum(len(stream) for stream in chunk.streams) * source.n_patterns / end
    return n_bytes + len(pack_plan(source.dtype, source.shape, encoding.plan))


def encoded_chunk(
    streams: Sequence[Stream],
    decoded: Patterns,
    base_codes: int | None = None,
    deviation: Deviation | None = None,
) -> EncodedChunk:
    """Build the chunk of some streams, which decode to patterns [n]."""
    parts = tuple([data for _, data in streams])
    records = tuple([StreamRecord(coder, len(data)) for coder, data in streams])
    return EncodedChunk(
        ChunkRecord(xxh64_of_parts(parts), xxh64(decoded), records, base_codes), parts, deviation
    )


Encoded = tuple[TensorPlan, EncodedChunk]


class Batch:
    """Non-empty tensors of one dtype and one chunk each that are encoded together.

    Holds the patterns of each tensor, and of the bases, which all or none have.
    """

    def __init__(self, dtype: DType, patterns: Sequence[Patterns], bases: Sequence[Patterns]) -> None:
        self.dtype, self.patterns, self.bases = dtype, patterns, bases

    @cached_property
    def ends(self) -> Counts:
        """End of each tensor in the concatenated patterns [m]."""
        return np.cumsum([len(own) for own in self.patterns])

    @cached_property
    def _pieces(self) -> list[tuple[Patterns, Patterns]]:
        """Return pairs of patterns and base patterns (the same without bases); small tensors are joined."""
        pairs = [*zip(self.patterns, self.bases or self.patterns, strict=True)]
        if self.ends[-1] > MAX_COPIED * len(pairs):
            return pairs
        own, base = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return [(own, base)]

    def _each(self, out: Any) -> Iterator[tuple[Patterns, Patterns, Any]]:
        """Yield patterns and base patterns of each piece, with its slice of `out`."""
        begin = 0
        for own, base in self._pieces:
            yield own, base, out[..., begin : begin + len(own)]
            begin += len(own)

    def only(self, which: Sequence[int], most: int | None = None) -> Batch:
        """Return a batch of some of the tensors, truncated to the first `most` patterns each if given."""
        if most is None and len(which) == len(self.patterns):
            return self
        patterns = [self.patterns[k][:most] for k in which]
        return Batch(self.dtype, patterns, [self.bases[k][:most] for k in which] if self.bases else ())

    @cached_property
    def by_magnitude(self) -> Contexts:
        """The contexts by magnitude of the bases."""
        labels = np.empty(self.ends[-1], np.uint8)
        for _, base, out in self._each(labels):
            cpu().magnitudes(base, out)
        return Contexts(labels, self.ends, N_MAGNITUDE_CONTEXTS)

    def transformed(self, mode: PlaneMode) -> Patterns:
        """Return patterns [n] transformed by a plane mode, before they are split into planes."""
        result = np.empty(self.ends[-1], self.patterns[0].dtype)
        for own, base, out in self._each(result):
            cpu().transform(own, base, kernel_mode(mode, self.dtype), out)
        return result

    def planes(self, mode: PlaneMode) -> Bytes:
        """Split the patterns into byte planes [n_planes, n] after a plane mode."""
        result = np.empty((self.dtype.pattern_bytes, self.ends[-1]), np.uint8)
        for own, base, out in self._each(result):
            cpu().split_planes(own, base, kernel_mode(mode, self.dtype), out)
        return result

    def streams(self, planes: Bytes, huffman_margin: float | None) -> list[list[Stream]]:
        """Encode planes [k, n] of all tensors without contexts, and return the k streams of each tensor."""
        columns, n = [cut(plane, self.ends) for plane in planes], len(planes)
        parts = [part for own in zip(*columns, strict=True) for part in own]
        coded = encode_streams(parts, huffman_margin=huffman_margin)
        return [coded[i : i + n] for i in range(0, len(coded), n)]


def encode_planes(batch: Batch, plan: Plan, huffman_margin: float | None) -> list[Encoded]:
    """Encode the tensors of a batch with a plan without contexts."""
    encoding, streams = TensorPlan(plan), batch.streams(batch.planes(plan.mode), huffman_margin)
    return [
        (encoding, encoded_chunk(own_streams, own))
        for own, own_streams in zip(batch.patterns, streams, strict=True)
    ]


def encode_by_contexts(
    batch: Batch, mode: PlaneMode, n_random: int, huffman_margin: float | None
) -> list[Encoded]:
    """Encode the deltas of a batch with contexts by the base's magnitude; each tensor gets its own tables.

    The lowest `n_random` planes look random, so they are encoded without contexts.
    """
    planes, upper = split_random(batch.transformed(mode), n_random)
    low = batch.streams(planes, huffman_margin) if n_random else [[]] * len(batch.patterns)
    tables, streams = Sorted(batch.by_magnitude, upper).encode(huffman_margin)
    encoded = list[Encoded]()
    for k, own in enumerate(batch.patterns):
        own_tables = *[NO_TABLES] * n_random, *tables[k]
        plan = planes_plan(mode, (Magnitude(),), own_tables)
        encoded.append((TensorPlan(plan), encoded_chunk([*low[k], *streams[k]], own)))
    return encoded
