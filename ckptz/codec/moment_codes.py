"""Quantizers of optimizer state: logarithmic levels for second moments, linear levels for first moments.

Their `sums` count levels before codes are assigned; a device can compute the same sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.moment_bounds import MomentBound
from ckptz.codec.moment_maps import (
    EXPONENT_MASKS,
    MANTISSA_BITS,
    MAX_INDEX,
    LevelRange,
    LevelSums,
    LogLevels,
    level_range_of,
)
from ckptz.codec.quantizer import Quantizer
from ckptz.format.context_rules import ContextRule
from ckptz.format.plan import Outer, Predictor
from ckptz.format.sources import TensorSource
from ckptz.kernels import cpu, floats, moments
from ckptz.kernels.floats import Integers, Patterns, Reals

Labels = NDArray[np.uint8]


# --- second moments ---


@dataclass(frozen=True)
class Prediction:
    """The prediction of second moments: zero, the base, or an outer product of two F32 vectors."""

    kind: int
    predictor: Predictor = Predictor.ZERO
    base: TensorSource | None = None
    factors: tuple[NDArray[np.uint32], NDArray[np.uint32]] | None = None

    @functools.cached_property
    def outer(self) -> Outer | None:
        """The outer product as a frame stores it, encoded on first use, as few predictions are chosen."""
        return None if self.factors is None else Outer.of(*self.factors)

    def patterns(self, begin: int, end: int) -> Patterns:
        """Return the predicted patterns begin..end [end - begin]; an empty array for a prediction of zero."""
        if self.base is not None:
            return self.base.patterns(begin, end)
        if self.factors is None:
            return np.empty(0, np.uint32 if self.kind == floats.F32 else np.uint16)
        products = cpu().outer_product(*self.factors, begin, end)
        patterns: Patterns = cpu().from_f32(products, self.kind)
        return patterns


@dataclass(frozen=True, slots=True)
class LogLevelSums:
    """Counts of levels, zeros and exceptions, and sums from which the restored values are computed."""

    first: int  # lowest level
    counts: Integers  # occurrences of the levels from `first` on [n]
    roots: NDArray[np.float64]  # sums of sqrt(element / level) by level [n]
    n_zeros: int
    n_exceptions: int

    def __add__(self, other: LogLevelSums) -> LogLevelSums:
        n_zeros, n_exceptions = self.n_zeros + other.n_zeros, self.n_exceptions + other.n_exceptions
        counts, roots = self.counts + other.counts, self.roots + other.roots
        return LogLevelSums(self.first, counts, roots, n_zeros, n_exceptions)

    def level_range(self) -> LevelRange:
        """Assign codes to the levels that occur."""
        used = np.flatnonzero(self.counts)
        return level_range_of(self.first + used, self.counts[used], self.n_zeros, self.n_exceptions)

    def levels(self, log_levels: LogLevels, level_range: LevelRange, prediction: Prediction) -> Integers:
        """Return the level of each code relative to the prediction, in units of the last place [n_levels].

        Adam's updates are proportional to 1 / sqrt(v). Each level is shifted so that the mean update of the
        elements with this code is unchanged. Stochastic rounding would preserve it for each element, but
        takes six times the bits and has a larger error.
        """
        levels = log_levels.distances(level_range.lowest + np.arange(level_range.n_levels))
        at = slice(level_range.lowest - self.first, level_range.lowest - self.first + level_range.n_levels)
        used = np.flatnonzero(self.counts[at])
        shares = self.roots[at][used] / self.counts[at][used]
        octave = 1 << MANTISSA_BITS[prediction.kind]
        shifts = np.rint(2 * octave * np.log2(shares)).astype(np.int64)
        levels[used] += np.clip(shifts, -(log_levels.step // 2), log_levels.step // 2)
        return np.maximum(levels, 1) if prediction.predictor is Predictor.ZERO else levels


@dataclass(frozen=True, slots=True)
class LogLevelQuantizer(Quantizer):
    """Quantizer of second moments, with codes for levels, exact zeros and exceptions."""

    prediction: Prediction
    log_levels: LogLevels
    level_range: LevelRange | None = None

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels as the tuple that kernels expect: step, phase, and constants of the dtype."""
        width = 32 if self.prediction.kind == floats.F32 else 16
        top, every = 1 << (width - 1), (1 << width) - 1
        largest = EXPONENT_MASKS[self.prediction.kind] - 1
        return self.log_levels.step, self.log_levels.phase, top, every, largest

    def sums(self, begin: int, end: int, patterns: Patterns) -> LogLevelSums:
        """Count the levels of patterns begin..end."""
        kind = self.prediction.kind
        first, n = self.log_levels.span(kind)
        sums = np.zeros((4, n + 2), np.int64), np.zeros((4, n + 2))
        moments().log_level_sums(
            patterns, self.prediction.patterns(begin, end), self.levels, kind, first, *sums
        )
        counts, roots = (turns.sum(axis=0) for turns in sums)
        return LogLevelSums(first, counts[:-2], roots[:-2], int(counts[-2]), int(counts[-1]))

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        """Return the codes of patterns begin..end, uint8 [end - begin].

        An element gets the nearest level, unless the level could be restored as zero or as infinity.
        """
        level_range = self.level_range
        assert level_range is not None
        codes = np.empty(len(patterns), np.uint8)
        codes_of = (
            level_range.lowest,
            level_range.n_levels,
            level_range.zero_code or 0,
            level_range.escape_code or 0,
        )
        moments().log_level_codes(
            patterns, self.prediction.patterns(begin, end), self.levels, codes_of, codes
        )
        return codes


# --- first moments ---


@dataclass(frozen=True, slots=True)
class StepContexts:
    """The contexts of a first moment and their steps.

    Attributes:
        rules: the context rules that the frame stores.
        steps: step of each context [n_contexts].
        labels: function that returns the contexts of elements begin..end.
        most: maximum distance of a level from zero, in steps.
    """

    rules: tuple[ContextRule, ...]
    steps: Reals
    labels: Callable[[int, int], Labels]
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class StepQuantizer(Quantizer):
    """Quantizer of first moments, with a step for each context."""

    kind: int
    contexts: StepContexts
    dead_zone: float
    bound: MomentBound | None = None
    level_range: LevelRange | None = None

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        """Return the restored patterns of escaped elements, clipped to their bound."""
        return patterns if self.bound is None else self.bound.clamped(begin, patterns, self.kind)

    def sums(self, begin: int, end: int, patterns: Patterns) -> LevelSums:
        """Count the levels of patterns begin..end by context."""
        patterns = self.kept(begin, patterns)
        labels, steps = self.contexts.labels(begin, end), self.contexts.steps
        return LevelSums.of(cpu().to_f32(patterns, self.kind), labels, steps, self.dead_zone)

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        """Return the codes of patterns begin..end, uint8 [end - begin]; escapes are beyond the levels."""
        level_range, labels = self.level_range, self.contexts.labels(begin, end)
        assert level_range is not None
        f32_patterns, codes = (
            cpu().to_f32(self.kept(begin, patterns), self.kind),
            np.empty(len(patterns), np.uint8),
        )
        codes_of = (level_range.lowest, level_range.n_levels, level_range.escape_code or 0, MAX_INDEX + 1)
        values, steps = f32_patterns.view(np.float32), self.contexts.steps
        moments().level_codes(f32_patterns, values, labels, steps, self.dead_zone, codes_of, codes)
        return codes
