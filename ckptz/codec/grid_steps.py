"""Uniform grids with a step for each context of rows: which step, which code, and what the codes stand for.

For small errors e the loss grows with the sum of v * e^2, where v is the second moment of the gradients.
With an entropy coder behind it, a grid is best if every weight adds the same to that sum: steps are
proportional to 1 / sqrt(v). Rows are nearly as good a unit for this as single weights, and cheap to store.

Codes are numbered by magnitude: 0, +1, -1, +2, -2 and so on, so that neighbours in frequency tables and
contexts are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.quantizer import Quantizer
from ckptz.codec.sensitivity import floats_of
from ckptz.format.plan import LinearTable
from ckptz.format.sources import Patterns, TensorSource
from ckptz.format.values import KINDS
from ckptz.kernels import rounding
from ckptz.kernels.blas import product
from ckptz.kernels.floats import ESCAPE, MAX_MAGNITUDE, NEAREST, Counts, Reals

Labels = NDArray[np.uint8]
Codes = NDArray[np.uint8]

MAX_ROW_CLASSES: Final = 16  # eight octaves of steps
REFERENCE_NOISE: Final = 0.4  # step over spread where nothing is known; from the run of the demo
# Largest step over spread, for rows that hardly get gradients. 1.5 takes a fifth more bits at an equal loss,
# and 4 loses more at equal bits: so far from the minimum the loss is no parabola. Steps below the reference
# have a smaller one in proportion: else rows of rare words become zeros however fine a file is to be.
SPREAD_CAP: Final = 2.5
ESCAPED_BITS: Final = 40.0  # what a value beside its code takes, with the code
LEVEL_BITS: Final = 64.0  # of a level in the header
N_FITS: Final = 8  # rounds of the alternating fit; it has converged to 1e-3 long before


@dataclass(frozen=True, slots=True)
class RowSteps:
    """The grid step of each row of a weight."""

    steps: Reals  # of each context [n_contexts], ascending, half an octave apart
    labels: Labels  # context of each row [n_rows]

    @property
    def n_contexts(self) -> int:
        """Number of different steps."""
        return len(self.steps)


def row_steps(step: float, spread: float, sensitivity: Reals | None, mean: float | None) -> RowSteps:
    """Find steps by row: `step * REFERENCE_NOISE * sqrt(mean / sensitivity[row])`, in half octaves.

    `mean` is the mean of v * w^2 over the weights of a model, so that the expected loss change of this
    grid, the sum of v * e^2 with e^2 a twelfth of the squared step, is the share
    (step * REFERENCE_NOISE)^2 / 12 of what zeroing all weights would be expected to change. That share
    depends neither on the scales of loss, gradients and weights nor on the size of the model. Without
    second moments v counts as equal within the tensor, and the same share gives
    `step * REFERENCE_NOISE * spread`, as in rows whose second moments are all 0.

    Args:
        step: multiple of the reference step.
        spread: root-mean-square weight of the tensor, above 0.
        sensitivity: mean second moment of the gradients of each row [n_rows], not negative, or None.
        mean: see above; None takes the tensor as a model of its own, which its steps then fit on average.
    """
    largest = SPREAD_CAP * spread * min(step, 1.0)
    plain = min(step * REFERENCE_NOISE * spread, largest)
    if sensitivity is None or not mean or not sensitivity.any():
        n_rows = 1 if sensitivity is None else len(sensitivity)
        return RowSteps(np.array([plain]), np.zeros(n_rows, np.uint8))
    with np.errstate(divide="ignore", over="ignore"):
        wanted = step * REFERENCE_NOISE * np.sqrt(mean / sensitivity)
    # Anchored to `plain`, steps are proportional to `step`. Of rows that never had a gradient nothing is
    # known: in a pretrained embedding they are words that this training has not met, not words of no use.
    half_octaves = np.rint(2 * np.log2(np.minimum(np.where(sensitivity > 0, wanted, plain), largest) / plain))
    half_octaves = np.maximum(half_octaves, half_octaves.max() - MAX_ROW_CLASSES + 1)
    used, labels = np.unique(half_octaves, return_inverse=True)
    return RowSteps(np.minimum(plain * 2.0 ** (used / 2), largest), labels.astype(np.uint8))


@dataclass(frozen=True, slots=True)
class OnGrid(Quantizer):
    """A tensor on its grid.

    Attributes:
        source: the tensor.
        base: what it is relative to, or None for zero.
        rows: steps.
        dead_zone: additional share of a step that becomes zero.
        key: of stochastic rounding, or NEAREST.
        most: largest magnitude that has codes; the escape code stands for all above.
    """

    source: TensorSource
    base: TensorSource | None
    rows: RowSteps
    dead_zone: float
    key: int = NEAREST
    most: int = MAX_MAGNITUDE

    def codes(self, begin: int, end: int, patterns: Patterns) -> Codes:
        """Return the codes of patterns begin..end, uint8 [end - begin], the last one beyond the alphabet."""
        codes = np.empty(end - begin, np.uint8)
        rounding().residual_codes(*self.inputs(begin, end, patterns), self.dead_zone, self.key, begin, codes)
        return np.minimum(codes, np.uint8(2 * self.most + 1))

    def inputs(self, begin: int, end: int, patterns: Patterns) -> tuple[Any, ...]:
        """Return the kernels' input: values, their base or None, steps, labels, patterns of a row."""
        kind = KINDS[self.source.dtype.name]
        values = floats_of(patterns, kind)
        base = None if self.base is None else floats_of(self.base.patterns(begin, end), kind)
        steps = self.rows.steps.astype(np.float32)
        return values, base, steps, self.rows.labels, self.row_patterns

    @property
    def row_patterns(self) -> int:
        """Patterns of a row that has a label."""
        return self.source.n_patterns // len(self.rows.labels)


def largest_magnitude(counts: Counts | Reals) -> int:
    """Find the magnitude above which values are cheaper to store beside their codes than to have levels.

    `counts` are occurrences of each code [256], ESCAPE included.
    """
    by_magnitude = counts[1:ESCAPE].reshape(-1, 2).sum(axis=1)
    beyond = np.append(np.cumsum(by_magnitude[::-1])[::-1], 0) + counts[ESCAPE]
    costs = beyond * ESCAPED_BITS + 2 * LEVEL_BITS * np.arange(len(beyond))
    return int(np.argmin(costs))


def bare_levels(steps: Reals, most: int = MAX_MAGNITUDE) -> LinearTable:
    """Return multiples of the steps [n_contexts], up to a magnitude."""
    return _table(steps, np.arange(1.0, most + 1))


def with_escape(levels: LinearTable) -> LinearTable:
    """Add a code that stands for values beyond all levels."""
    return replace(levels, level=np.append(levels.level, 0.0))


def fit_levels(steps: Reals, counts: Counts | Reals, sums: Reals, most: int) -> LinearTable:
    """Fit centroids of the values of each code: a scale for each context times a level for each code.

    Args:
        steps: of each context [n_contexts].
        counts: occurrences [n_contexts, 256] of each code, or their weights.
        sums: of the magnitudes of the values [n_contexts, 256].
        most: largest magnitude that has codes.
    """
    n = counts[:, 1 : 2 * most + 1].reshape(len(steps), most, 2).sum(axis=2).astype(np.float64)
    total = sums[:, 1 : 2 * most + 1].reshape(len(steps), most, 2).sum(axis=2) / steps[:, None]
    scales, levels = np.ones(len(steps)), np.arange(1.0, most + 1)
    for _ in range(N_FITS):
        levels = _ratio(product(scales, total), product(scales**2, n), levels)
        scales = _ratio(product(total, levels), product(n, levels**2), scales)
    return _table(steps * scales, levels)


def _table(scales: Reals, levels: Reals) -> LinearTable:
    """Make the table of levels by code from those by magnitude: 0, +1, -1, +2 and so on."""
    signed = np.concatenate([[0.0], np.stack([levels, -levels], axis=1).reshape(-1)])
    return LinearTable(scales, signed, np.zeros(len(scales)))


def _ratio(numerator: Reals, denominator: Reals, otherwise: Reals) -> Reals:
    """Quotients, or what was there before where nothing was counted."""
    is_known = (denominator > 0) & (numerator > 0)
    return np.where(is_known, numerator / np.where(is_known, denominator, 1), otherwise)
