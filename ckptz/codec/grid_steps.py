"""Uniform grids with a step for each row context: choice of steps, codes and levels.

For small errors e, the loss grows with the sum of v * e^2, where v is the second moment of the gradients.
With entropy coding, a grid is best if the expected contribution of every weight is equal, so steps are
proportional to 1 / sqrt(v). Steps by row are nearly as good as steps by weight, and cheap to store.

Codes are numbered by magnitude, 0, +1, -1, +2, -2 and so on, so that adjacent codes have similar frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.format.plan import LinearTable
from ckptz.kernels.blas import product
from ckptz.kernels.floats import ESCAPE, MAX_MAGNITUDE, Counts, Reals

Labels = NDArray[np.uint8]
Codes = NDArray[np.uint8]

MAX_ROW_CLASSES: Final = 16  # eight octaves of steps
REFERENCE_NOISE: Final = 0.4  # step / spread without second moments; chosen on the run of the demo
# Largest step / spread, for rows with small gradients. 1.5 takes a fifth more bits at equal loss, and 4 loses
# more at equal bits, since the loss is not quadratic so far from the minimum. For steps below the reference
# it is reduced in proportion: otherwise rows of rare words would be zero even in very fine files.
SPREAD_CAP: Final = 2.5
ESCAPED_BITS: Final = 40.0  # of an escaped value, with its code
LEVEL_BITS: Final = 64.0  # of a level in the header
N_FITS: Final = 8  # rounds of the alternating fit; it converges to 1e-3 much earlier


@dataclass(frozen=True, slots=True)
class RowSteps:
    """The grid step of each row of a weight."""

    steps: Reals  # of each context [n_contexts], ascending, half an octave apart
    labels: Labels  # context of each row [n_rows]


def row_steps(step: float, spread: float, sensitivity: Reals | None, mean: float | None) -> RowSteps:
    """Compute steps by row: `step * REFERENCE_NOISE * sqrt(mean / sensitivity[row])`, in half octaves.

    `mean` is the mean of v * w^2 over the weights of a model. The expected loss change of this grid is the
    sum of v * e^2, where e^2 is a twelfth of the squared step. It is thus the share (step *
    REFERENCE_NOISE)^2 / 12 of the expected change if all weights became zero, independent of the scales of
    loss, gradients and weights and of the size of the model. Without second moments, v is assumed to be
    constant, and the same share gives `step * REFERENCE_NOISE * spread`, which rows whose second moments are
    all 0 get as well.

    Args:
        step: multiple of the reference step.
        spread: RMS of the weights of the tensor, above 0.
        sensitivity: mean second moment of the gradients of each row [n_rows], at least 0, or None.
        mean: see above; None to compute it from this tensor only.
    """
    largest = SPREAD_CAP * spread * min(step, 1.0)
    plain = min(step * REFERENCE_NOISE * spread, largest)
    if sensitivity is None or not mean or not sensitivity.any():
        n_rows = 1 if sensitivity is None else len(sensitivity)
        return RowSteps(np.array([plain]), np.zeros(n_rows, np.uint8))
    with np.errstate(divide="ignore", over="ignore"):
        wanted = step * REFERENCE_NOISE * np.sqrt(mean / sensitivity)
    # Half octaves are relative to `plain`, so that steps are proportional to `step`. Rows without gradients
    # get `plain`: in a pretrained embedding they are words that this training has not seen, not useless ones.
    half_octaves = np.rint(2 * np.log2(np.minimum(np.where(sensitivity > 0, wanted, plain), largest) / plain))
    half_octaves = np.maximum(half_octaves, half_octaves.max() - MAX_ROW_CLASSES + 1)
    used, labels = np.unique(half_octaves, return_inverse=True)
    return RowSteps(np.minimum(plain * 2.0 ** (used / 2), largest), labels.astype(np.uint8))


def largest_magnitude(counts: Counts | Reals) -> int:
    """Return the largest magnitude that should have codes; storing larger values separately takes fewer bits.

    `counts` are the occurrences of each code, with ESCAPE [256].
    """
    by_magnitude = counts[1:ESCAPE].reshape(-1, 2).sum(axis=1)
    beyond = np.append(np.cumsum(by_magnitude[::-1])[::-1], 0) + counts[ESCAPE]
    costs = beyond * ESCAPED_BITS + 2 * LEVEL_BITS * np.arange(len(beyond))
    return int(np.argmin(costs))


def bare_levels(steps: Reals, most: int = MAX_MAGNITUDE) -> LinearTable:
    """Return a table whose levels are the multiples of the steps [n_contexts] up to `most`."""
    return _table(steps, np.arange(1.0, most + 1))


def fit_levels(steps: Reals, counts: Counts | Reals, sums: Reals, most: int) -> LinearTable:
    """Fit a scale for each context and a level for each code to the mean values of the codes.

    Args:
        steps: step of each context [n_contexts].
        counts: occurrences (or weights) of each code [n_contexts, 256].
        sums: sums of the magnitudes of the values with this code [n_contexts, 256].
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
    """Build a table by code (0, +1, -1, +2, ...) from levels by magnitude."""
    signed = np.concatenate([[0.0], np.stack([levels, -levels], axis=1).reshape(-1)])
    return LinearTable(scales, signed, np.zeros(len(scales)))


def _ratio(numerator: Reals, denominator: Reals, otherwise: Reals) -> Reals:
    """Divide, or return `otherwise` where the denominator is 0."""
    is_known = (denominator > 0) & (numerator > 0)
    return np.where(is_known, numerator / np.where(is_known, denominator, 1), otherwise)
