"""Weighted k-means in one dimension, exact by dynamic programming over the buckets of a sketch.

Sample weights are those of Inshrinkerator (arXiv 2306.11800, section 4): a bucket weighs
sigma * frequency + (1 - sigma) * |magnitude|, both normalised to sum to 1.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels import planning
from ckptz.quant.sketch import RELATIVE_ERROR

SIGMA: Final = 0.2  # the paper's; 0.1 to 0.4 works as well

Values = NDArray[np.float64]


def sample_weights(values: Values, counts: NDArray[np.int64], sigma: float = SIGMA) -> Values:
    """Weight of each bucket.

    Args:
        values: representatives [n].
        counts: occurrences [n].
        sigma: share of the frequency; 1 minimises the mean-square error.
    """
    frequency = counts / max(counts.sum(), 1)
    magnitude = np.abs(values)
    total = float(magnitude.sum())
    normalised = magnitude / total if total else frequency
    return sigma * frequency + (1 - sigma) * normalised


def fit_centroids(values: Values, weights: Values, n_levels: int) -> Values:
    """Centroids, ascending, with the least weighted square error.

    Args:
        values: ascending [n], n at least 1.
        weights: not negative [n].
        n_levels: most centroids; fewer where there are fewer values.
    """
    used = weights > 0
    values, weights = (values[used], weights[used]) if used.any() else (values, np.ones(len(values)))
    if len(values) <= n_levels:
        return values
    ends = planning().partition(values, weights, n_levels)
    starts = np.concatenate([[0], ends[:-1]])
    sums = np.add.reduceat(values * weights, starts)
    return sums / np.add.reduceat(weights, starts)


def weighted_error(values: Values, weights: Values, centroids: Values) -> float:
    """Weighted mean-square distance to the nearest centroid."""
    middles = (centroids[1:] + centroids[:-1]) / 2
    nearest = centroids[np.searchsorted(middles, values, side="right")]
    return float((weights * (values - nearest) ** 2).sum() / weights.sum())


def error_bound(optimal_rms_error: float, rms: float) -> float:
    """Root-mean-square error that centroids fitted on a sketch never exceed.

    Both are weighted over the same values. Replacing values by their buckets' representatives moves the
    error of any set of centroids by at most RELATIVE_ERROR * rms (triangle inequality); the fit pays it
    twice, once for choosing on the sketch and once for being judged on the values.
    """
    return optimal_rms_error + 2 * RELATIVE_ERROR * rms
