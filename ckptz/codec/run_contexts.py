"""Contexts of tensors without base: runs of elements, such as rows, share frequency tables by scale.

Rows of a weight differ in scale, so their exponents have different distributions. Untrained rows may have
been converted from a narrower dtype: the low bytes of their mantissas are zero, while those of others look
random.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.effort import Effort
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.format.context_rules import MAX_INDICES, MIN_RUN, Block, Runs
from ckptz.format.dtypes import DType
from ckptz.format.frequency import entropy_bits, normalise, pack_tables, row_cost_bits, row_entropy_bits
from ckptz.format.plan import StreamTables, exact_plan, planes_plan
from ckptz.format.sources import CHUNK_VALUES, MapFunction, TensorSource
from ckptz.format.streams import CoderId, Stream, encode_rans, encode_streams, middle_of, repeats
from ckptz.kernels import cpu
from ckptz.kernels.floats import ROTATED, SCALE, Bytes, Counts, Patterns

MIN_VALUES: Final = 1 << 18  # below, tables and labels take more time than they save bytes
RUN_VALUES: Final = (128, 4096)  # elements of a run: shorter runs need many labels, longer ones mix scales
FLAT_RUN: Final = 512  # elements of a run if rows are too short or too long
PER_OCTAVE: Final = 4  # contexts of scale for each factor of two
N_SCALES: Final = 16
SAMPLE_VALUES: Final = 1 << 16  # sample of the middle chunk; its median run defines the middle scale
N_TESTED: Final = 8  # low bytes of a run that are tested for zero
MIN_GAIN: Final = 1 / 200  # share of a plane's bits that contexts must save, as they slow decoding down
MIN_SAMPLE_GAIN: Final = 1 / 600  # the same on the sample, below which the rest is not measured
_NO_TABLE: Final = np.array([[SCALE] + [0] * 255], np.uint16)


def plan_contexts(source: TensorSource, effort: Effort, run: MapFunction = map) -> TensorPlan | None:
    """Plan a tensor whose runs share frequency tables by scale; None if that saves too little.

    Args:
        source: the tensor.
        effort: `run_gain` is the share that contexts must save.
        run: maps a function over parts of the tensor.
    """
    n, size = source.n_patterns, _run_patterns(source)
    if size is None or effort.run_gain is None:
        return None
    borders = [-(-begin // size) * size for begin, _ in source.chunk_bounds()]
    bounds = [*itertools.pairwise((*borders, n))]
    begin, end = bounds[len(bounds) // 2]
    if end - begin < size:
        begin, end = bounds[0]
    n_runs = min(end - begin, max(SAMPLE_VALUES, size)) // size
    sample = source.patterns(begin, begin + n_runs * size)
    is_narrow = _is_narrow(sample, size)
    is_mixed = is_narrow.any() and not is_narrow.all()
    if effort.run_gain:  # a smaller sample is enough if contexts must save much
        sample = sample[: max(n_runs // 4, 1) * size]
    # In numpy, so that the kernel for the complete tensor is only compiled if contexts pay on the sample.
    exponents = (sample >> sample.dtype.type(8 * sample.itemsize - 9)).astype(np.uint8)
    levels = (PER_OCTAVE * exponents.reshape(-1, size).mean(axis=1)).astype(np.int64)
    lowest = int(np.median(levels)) - N_SCALES // 2
    scales = np.clip(levels - lowest, 0, N_SCALES - 1).astype(np.uint8)
    if not is_mixed:
        counts = _count(exponents, scales, size, N_SCALES)
        gain = _gain(counts)
        if gain <= max(MIN_SAMPLE_GAIN, effort.run_gain * _bytes_of_all(counts, sample.itemsize)):
            return None
    if repeats(middle_of(exponents)):
        return None
    measured = [*run(lambda part: _Measured.of(source.patterns(*part), size, lowest), bounds)]
    return _plan(
        source.dtype, size, [part.where_it_pays() for part in measured] if len(measured) > 1 else measured
    )


def _bytes_of_all(counts: Counts, n_planes: int) -> float:
    """Return bytes of all planes / bytes of exponents, with counts [n_contexts, 256] and random mantissas."""
    per_pattern = entropy_bits(counts.sum(axis=0)) / float(counts.sum())
    return (per_pattern + 8 * (n_planes - 1)) / max(per_pattern, 1e-9)


def _run_patterns(source: TensorSource) -> int | None:
    """Choose the number of elements in a run, so that chunks consist of runs; None if that is impossible."""
    dtype, shape, n = source.dtype, source.shape, source.n_patterns
    if n < MIN_VALUES or not dtype.is_float or dtype.pattern_bytes == 1 or len(shape) == 0:
        return None
    row = n // max(shape[0], 1)
    size = row if RUN_VALUES[0] <= row <= RUN_VALUES[1] else FLAT_RUN
    piece = math.gcd(size, n, CHUNK_VALUES if n > CHUNK_VALUES else n)
    return size if piece >= MIN_RUN and math.ceil(n / size) <= MAX_INDICES else None


def _is_narrow(patterns: Patterns, size: int) -> NDArray[np.bool_]:
    """Return for each run of `size` patterns whether its values seem to come from a narrower dtype."""
    if patterns.itemsize == 2:  # the low byte always has mantissa bits
        return np.zeros(len(patterns) // size, np.bool_)
    tested = patterns.reshape(-1, size)[:, :N_TESTED] & patterns.dtype.type(0x7F)
    is_narrow: NDArray[np.bool_] = ~tested.any(axis=1)
    return is_narrow


def _gain(counts: Counts) -> float:
    """Return the share of bits that contexts save according to counts [n_contexts, 256], without tables."""
    *by_context, together = row_entropy_bits(np.vstack((counts, counts.sum(axis=0)))).tolist()
    return 1 - sum(by_context) / together if together else 0.0


def _count(codes: Bytes, labels: Bytes, size: int, n_contexts: int) -> Counts:
    """Count codes [n] by the label of their run of `size` codes, [n_contexts, 256]."""
    runs = Runs(labels, size, n_contexts)
    counts: Counts = cpu().count_streams(runs.group(codes), np.cumsum(runs.per_context))
    return counts


@dataclass(frozen=True, slots=True)
class _Measured:
    """Statistics of the runs of a part of a tensor.

    Attributes:
        labels: context of each run [m]: its scale, plus N_SCALES if its values are narrow.
        scales: occurrences of each exponent in each context [2 * N_SCALES, 256].
        planes: occurrences of each code in each mantissa plane, for wide and narrow runs
            [n_planes - 1, 2, 256]; zeros unless both kinds occur.
    """

    labels: Bytes
    scales: Counts
    planes: Counts

    @classmethod
    def of(cls, patterns: Patterns, size: int, lowest: int) -> _Measured:
        """Measure patterns in runs of `size`, of which the last may be shorter; `lowest` is scale 0."""
        if len(patterns) > size and (rest := len(patterns) % size):
            return cls.of(patterns[:-rest], size, lowest) + cls.of(patterns[-rest:], rest, lowest)
        size, n_planes = min(size, len(patterns)), patterns.itemsize
        planes, is_narrow = np.zeros((n_planes - 1, 2, 256), np.int64), _is_narrow(patterns, size)
        if is_narrow.any() and not is_narrow.all():
            split = cpu().split_planes(patterns, patterns, ROTATED)
            kinds = is_narrow.astype(np.uint8)
            planes = np.array([_count(plane, kinds, size, 2) for plane in split[:-1]])
        labels = (N_SCALES * is_narrow).astype(np.uint8)
        return cls(labels, cpu().scale_runs(patterns, size, PER_OCTAVE, lowest, N_SCALES, labels), planes)

    def where_it_pays(self) -> _Measured:
        """Return all runs in the most frequent context if contexts save too little in this part."""
        if self.planes.any() or _gain(self.scales) > MIN_GAIN:
            return self
        total = self.scales.sum(axis=0)
        most, scales = int(self.scales.sum(axis=1).argmax()), np.zeros_like(self.scales)
        scales[most] = total > 0  # the last run may extend into a chunk that uses contexts
        return _Measured(np.full_like(self.labels, most), scales, self.planes)

    def __add__(self, other: _Measured) -> _Measured:
        labels = np.concatenate((self.labels, other.labels))
        return _Measured(labels, self.scales + other.scales, self.planes + other.planes)


def _tables(counts: Counts, table_of: Counts) -> tuple[StreamTables, float]:
    """Build a table for each row of counts [n, 256]; also returns the bits that they save over one table."""
    frequencies = normalise(counts)
    packed = bytes((len(counts),)) + pack_tables(frequencies)[0].tobytes()
    n_bits = 8 * len(packed) + float(row_cost_bits(counts, frequencies).sum())
    return StreamTables(frequencies, table_of, packed), entropy_bits(counts.sum(axis=0)) - n_bits


def _plan(dtype: DType, size: int, parts: Sequence[_Measured]) -> TensorPlan | None:
    total = functools.reduce(operator.add, parts)
    used = np.flatnonzero(total.scales.any(axis=1))
    context_of = np.zeros(2 * N_SCALES, np.uint8)
    context_of[used] = np.arange(len(used))
    planes, saved = [], 0.0
    for counts in total.planes:  # planes with a single table are encoded without contexts
        own, gain = StreamTables(_NO_TABLE, np.zeros(len(used), np.int64)), 0.0
        if counts.any(axis=1).all() and (better := _tables(counts, used // N_SCALES))[1] > 0:
            own, gain = better
        planes.append(own)
        saved += gain
    scales = total.scales[used]
    own, gain = _tables(scales, np.arange(len(used)))
    saved += gain - entropy_bits(np.bincount(total.labels, minlength=256))
    if saved < MIN_GAIN * entropy_bits(scales.sum(axis=0)):
        return None
    rule = Block(len(used), size, context_of[total.labels])
    plan = planes_plan(exact_plan(dtype).mode, (rule,), (*planes, own))
    return TensorPlan(plan, by_table=tuple((*part.planes, part.scales[used]) for part in parts))


def encode_by_runs(
    planes: Sequence[Bytes],
    runs: Runs,
    tables: Sequence[StreamTables],
    by_table: Sequence[Counts],
    huffman_margin: float | None,
) -> list[Stream]:
    """Encode the planes of a chunk with the tables of its runs, or with another coder if these save little.

    Args:
        planes: byte planes of the chunk [n] each.
        runs: the runs of the chunk.
        tables: frequency tables of each plane.
        by_table: occurrences of each code with each table, by plane, in the runs that begin in the chunk.
        huffman_margin: see `encode_streams`.
    """
    contexts = np.flatnonzero(runs.per_context)
    streams = list[Stream]()
    for plane, own, counts in zip(planes, tables, by_table, strict=True):
        segments = own.segments(contexts, runs.per_context[contexts])
        n_patterns = np.bincount(segments.table_of, weights=runs.per_context[contexts])
        # Not if all codes but those of a run from the chunk before use one table, or tables save little.
        is_shared = n_patterns.max() <= (1 - MIN_GAIN) * len(plane)
        n_bytes = row_cost_bits(counts, own.frequencies).sum() / 8 if is_shared else 0
        if not is_shared or n_bytes > (1 - MIN_GAIN) * entropy_bits(counts.sum(axis=0)) / 8:
            streams += encode_streams([plane], huffman_margin=huffman_margin)
        else:
            streams.append((CoderId.RANS_SHARED, encode_rans(runs.group(plane), segments, n_bytes)))
    return streams
