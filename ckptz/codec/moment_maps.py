"""Quantization maps of optimizer state: logarithmic levels for second moments, linear ones for first moments.

If a second moment were restored as zero while gradients are not, the next update would explode. Its levels
are therefore equidistant in bit patterns, which makes them logarithmic, and a separate code stands for exact
zeros only. The updates depend on first moments relative to the root of second moments, so their step follows
this root, by context.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.format.plan import ExplicitTable, LinearTable, QuantizationMap
from ckptz.kernels import floats, moments
from ckptz.kernels.floats import Integers, Reals

MANTISSA_BITS: Final = {floats.F32: 23, floats.BF16: 7, floats.F16: 10}
# Bits of the exponent. In infinities and NaNs all are 1, so patterns of finite positive numbers are smaller.
EXPONENT_MASKS: Final = {floats.F32: 0x7F800000, floats.BF16: 0x7F80, floats.F16: 0x7C00}
MAX_LEVELS: Final = 254  # in addition to a zero code and an escape code
N_PHASES: Final = 8  # offsets of the levels within a step that are compared
FACTOR_BITS: Final = 2  # mantissa bits of the outer vectors: an error of 2^-3, small relative to octaves
MAX_SPAN: Final = 1 << 20  # maximum number of levels that are counted; steps below 2^-10 octaves have more
MAX_INDEX: Final = 127  # of a first moment's level, on both sides of zero
N_LABELS: Final = 256  # of the magnitude context
ROW_LABELS_PER_OCTAVE: Final = 2
SMALLEST_SCALE: Final = 2.0**-1022  # of a table, where subnormal doubles are not allowed


# --- second moments -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogLevels:
    """Levels at equal distances in ordered bit patterns.

    Attributes:
        step: distance of two levels, in units of the last place.
        phase: offset of level 0 from the prediction.
        middle: a typical distance from the prediction.
    """

    step: int
    phase: int = 0
    middle: int = 0

    def distances(self, indices: Integers) -> Integers:
        """Return the distances [n] of levels [n] from the prediction."""
        return indices * self.step + self.phase

    def span(self, kind: int) -> tuple[int, int]:
        """Return the lowest level and the number of levels, limited to MAX_SPAN levels around the middle."""
        span = (1 << (32 if kind == floats.F32 else 16)) // self.step + 2
        if 2 * span < MAX_SPAN:
            return -span, 2 * span
        return self.middle // self.step - MAX_SPAN // 2, MAX_SPAN

    def bits(self, distances: Reals, labels: NDArray[np.uint8] | None = None) -> float:
        """Return the bits of the levels nearest to distances [n] from the prediction; see `bits_by_phase`."""
        return float(bits_by_phase(distances, self.step, [self.phase], labels)[0])


def log_level_step(octaves: float, kind: int) -> int:
    """Convert a step in octaves to units of the last place, of which an octave has 2^(mantissa bits)."""
    return max(round(octaves * (1 << MANTISSA_BITS[kind])), 1)


def best_log_levels(distances: Reals, step: int) -> LogLevels:
    """Choose the phase whose levels take the fewest bits.

    It is not 0 if all moments grow by the same factor, as they do early in training.

    Args:
        distances: distances from the prediction [n], not empty.
        step: distance of two levels.
    """
    lower, upper = (len(distances) - 1) // 2, len(distances) // 2
    ordered = np.partition(distances, (lower, upper))
    middle = int((ordered[lower] + ordered[upper]) / 2)  # the median, in half the time of numpy's function
    phases = (0, middle % step, *(step * i // N_PHASES for i in range(1, N_PHASES)))
    return LogLevels(step, phases[int(bits_by_phase(distances, step, phases).argmin())], middle)


def bits_by_phase(
    distances: Reals, step: int, phases: Sequence[int], labels: NDArray[np.uint8] | None = None
) -> Reals:
    """Compute the bits of ideally coded levels nearest to distances, for each phase [n_phases].

    Args:
        distances: distances from the prediction [n], not empty.
        step: distance of two levels.
        phases: offsets of level 0.
        labels: label of each distance [n], with one table for each label; None for a single table.

    Returns:
        Bits without the tables; infinite if there are too many levels to count.
    """
    labels = np.zeros(len(distances), np.uint8) if labels is None else labels
    n_labels = int(labels.max()) + 1
    first = int(distances.min() - max(phases)) // step
    last = int(distances.max() - min(phases)) // step + 1
    n_levels, bits = last - first + 1, np.full(len(phases), np.inf)
    if n_labels == 1 or n_labels * n_levels <= MAX_SPAN:
        counts = np.zeros((n_labels, min(n_levels, MAX_SPAN)), np.int64)
        moments().log_level_bits(distances, labels, step, np.array(phases, np.float64), first, counts, bits)
    return bits


@dataclass(frozen=True, slots=True)
class LevelRange:
    """The assignment of codes to levels, zeros and exceptions."""

    lowest: int  # index of the level of code 0
    n_levels: int  # number of levels, 0 to 254
    has_zeros: bool  # whether exact zeros occur; their code follows the levels
    has_exceptions: bool  # whether other elements occur, which escape with the last code

    @property
    def zero_code(self) -> int | None:
        """The code of exact zeros."""
        return self.n_levels if self.has_zeros else None

    @property
    def escape_code(self) -> int | None:
        """The code of exceptions."""
        return self.n_levels + self.has_zeros if self.has_exceptions else None

    @property
    def n_codes(self) -> int:
        """Number of codes of levels, zeros and exceptions."""
        return self.n_levels + self.has_zeros + self.has_exceptions


def level_range_of(indices: Integers, counts: Integers, n_zeros: int, n_exceptions: int) -> LevelRange:
    """Assign codes to the levels that occur, or to the most frequent range if there are too many.

    Args:
        indices: indices of the levels that occur, ascending [n].
        counts: occurrences of each [n].
        n_zeros: number of exact zeros.
        n_exceptions: number of elements that no level restores.
    """
    if not len(indices):
        return LevelRange(0, 0, n_zeros > 0, n_exceptions > 0)
    ends = np.searchsorted(indices, indices + MAX_LEVELS)
    total = np.concatenate([[0], np.cumsum(counts)])
    covered = total[ends] - total[:-1]
    first = int(covered.argmax())
    lowest, highest = int(indices[first]), int(indices[ends[first] - 1])
    n_outside = int(total[-1] - covered[first])
    return LevelRange(lowest, highest - lowest + 1, n_zeros > 0, n_exceptions + n_outside > 0)


def second_map(levels: Integers, level_range: LevelRange, kind: int, n_contexts: int) -> QuantizationMap:
    """Build the map of a second moment, with one row.

    Args:
        levels: levels of the codes relative to the prediction, in units of the last place [n_levels].
        level_range: the assignment of codes.
        kind: float type of the patterns.
        n_contexts: number of contexts, which share the row.
    """
    entries = np.zeros((1, level_range.n_codes), np.int64)
    entries[0, : level_range.n_levels] = levels
    pattern = np.uint32 if kind == floats.F32 else np.uint16
    return QuantizationMap(
        ExplicitTable(entries.astype(pattern)),
        np.zeros(n_contexts, np.int64),
        zero_code=level_range.zero_code,
        escape_code=level_range.escape_code,
    )


@dataclass(slots=True)
class LogSums:
    """Sums of binary logarithms by row and column of a matrix of second moments; parts can be added."""

    rows: Reals  # sum and number of elements above zero by row [2, n_rows]
    columns: Reals  # sum and number of elements above zero by column [2, n_columns]

    @classmethod
    def of(cls, patterns: NDArray[np.uint32], begin: int, shape: tuple[int, int]) -> LogSums:
        """Add up the elements from `begin` on, F32 patterns [n], of a matrix of the given shape."""
        sums = cls(np.zeros((2, shape[0])), np.zeros((2, shape[1])))
        moments().log_sums(patterns, begin, sums.rows, sums.columns)
        return sums

    def __add__(self, other: LogSums) -> LogSums:
        return LogSums(self.rows + other.rows, self.columns + other.columns)

    def factors(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Fit an outer product to the logarithms; returns F32 patterns of its vectors [n_rows], [n_columns].

        Sums of values, as in Adafactor (arXiv 1804.04235), are dominated by the largest elements: with means
        of logarithms, residuals take 30 to 40 % fewer bits. The vectors are rounded to `FACTOR_BITS`.
        """
        row_means, column_means = (_means(sums) for sums in (self.rows, self.columns))
        overall = self.rows[0].sum() / max(self.rows[1].sum(), 1)
        # Half of the overall mean in each vector, so that neither over- nor underflows.
        return _rounded_powers(row_means - overall / 2), _rounded_powers(column_means - overall / 2)


def _means(sums: Reals) -> Reals:
    overall = sums[0].sum() / max(sums[1].sum(), 1)
    return np.where(sums[1] > 0, sums[0] / np.maximum(sums[1], 1), overall)


def _rounded_powers(exponents: Reals) -> NDArray[np.uint32]:
    patterns = floats.round_f64(np.exp2(np.clip(exponents, -125, 125)))
    n_dropped = MANTISSA_BITS[floats.F32] - FACTOR_BITS
    return (patterns + np.uint32(1 << (n_dropped - 1))) & ~np.uint32((1 << n_dropped) - 1)


# --- first moments ------------------------------------------------------------------------------


@functools.cache
def context_roots(kind: int) -> Reals:
    """Return the typical root of second moments in each magnitude context [256]; 0 if not finite."""
    width = 32 if kind == floats.F32 else 16
    labels = np.arange(N_LABELS, dtype=np.int64)
    middles = (labels << (width - 9)) | (1 << (width - 10))
    pattern = np.uint32 if kind == floats.F32 else np.uint16
    values = floats.widen_f64(floats.to_f32(middles.astype(pattern), kind))
    return np.sqrt(np.where(np.isfinite(values), values, 0.0))


@dataclass(slots=True)
class LevelSums:
    """Counts of levels and sums of their values, by context; parts can be added."""

    # [n_contexts, 2 * (MAX_INDEX + 1) + 1]; the first and last column are for values beyond all levels
    counts: Integers
    sums: Reals  # sums of values in steps, same shape; 0 for level 0

    @classmethod
    def of(
        cls, patterns: NDArray[np.uint32], labels: NDArray[np.uint8], steps: Reals, dead_zone: float
    ) -> LevelSums:
        """Count F32 patterns [n] with contexts `labels` [n], with the steps of these and a dead zone."""
        shape = (len(steps), 2 * (MAX_INDEX + 1) + 1)
        counts, sums = np.zeros(shape, np.int64), np.zeros(shape)
        values = patterns.view(np.float32)
        moments().level_sums(patterns, values, labels, steps, dead_zone, counts, sums)
        return cls(counts, sums)

    def __add__(self, other: LevelSums) -> LevelSums:
        return LevelSums(self.counts + other.counts, self.sums + other.sums)

    def window(self, level_range: LevelRange) -> slice:
        """Return the slice of columns whose levels have codes."""
        first = level_range.lowest + MAX_INDEX + 1
        return slice(first, first + level_range.n_levels)

    def level_range(self) -> LevelRange:
        """Assign codes to the levels that occur; values beyond all levels escape."""
        totals = self.counts.sum(axis=0)
        used = np.flatnonzero(totals[1:-1]) - MAX_INDEX
        n_beyond = int(totals[0] + totals[-1])
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
        return LevelRange(first, last - first + 1, has_zeros=False, has_exceptions=n_beyond > 0)


def first_map(
    measured: LevelSums, level_range: LevelRange, steps: Reals, kind: int, most: float = np.inf
) -> QuantizationMap:
    """Build the map of a first moment; levels are the means of their values in each context.

    Level 0 is zero in every row, so contexts with zeros only need no row.

    Args:
        measured: counts and sums of the complete tensor.
        level_range: the assignment of codes.
        steps: step of each context [n_contexts].
        kind: float type of the patterns.
        most: maximum distance of a level from zero, in steps.
    """
    is_moving = measured.counts.sum(axis=1) > measured.counts[:, MAX_INDEX + 1]
    used = np.flatnonzero(is_moving) if is_moving.any() else np.zeros(1, np.int64)
    row_of_context = np.maximum(np.searchsorted(used, np.arange(len(steps)), side="right") - 1, 0)
    scale = np.where(steps[used] >= SMALLEST_SCALE, steps[used], 0.0)
    window, levels = measured.window(level_range), level_range.lowest + np.arange(level_range.n_levels)
    counts, sums = measured.counts[used, window], measured.sums[used, window]
    n_rows, n_codes = len(used), level_range.n_codes
    if 16 * n_rows + 8 * n_codes < 4 * n_rows * n_codes:
        shared = np.zeros(n_codes)
        shared[: len(levels)] = np.clip(_centroids(counts.sum(axis=0), sums.sum(axis=0), levels), -most, most)
        expanded = LinearTable(scale, shared, np.zeros(n_rows))
        patterns = floats.from_f32(expanded.expand().reshape(-1), kind)
        if floats.all_finite(patterns, kind):
            return QuantizationMap(expanded, row_of_context, escape_code=level_range.escape_code)
    own = np.zeros((n_rows, n_codes))
    centroids = np.clip(_centroids(counts, sums, levels), -most, most) * scale[:, None]
    own[:, : len(levels)] = np.where(counts > 0, centroids, 0.0)  # levels that do not occur could overflow
    table = ExplicitTable(floats.round_f64(own.reshape(-1)).reshape(own.shape))
    return QuantizationMap(table, row_of_context, escape_code=level_range.escape_code)


def _centroids(counts: Integers, sums: Reals, levels: Integers) -> Reals:
    """Return the mean of the values of each level, in steps; level 0 stays zero."""
    means = np.where(counts > 0, sums / np.maximum(counts, 1), levels)
    return np.where(levels == 0, 0.0, means)


def row_labels(spreads: Reals) -> tuple[NDArray[np.uint8], Reals]:
    """Group rows by half octaves of their spread [n_rows], which is 0 for rows of zeros.

    Returns:
        The label of each row, uint8 [n_rows], and the spread of each label, ascending [n_labels].
    """
    largest = float(spreads.max())
    if not largest:
        return np.zeros(len(spreads), np.uint8), np.ones(1)
    relative = np.log2(np.maximum(spreads, largest * 2.0**-100) / largest)
    half_octaves = np.rint(relative * ROW_LABELS_PER_OCTAVE).astype(np.int64)
    used, labels = np.unique(half_octaves, return_inverse=True)
    return labels.astype(np.uint8), largest * np.exp2(used / ROW_LABELS_PER_OCTAVE)
