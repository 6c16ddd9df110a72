"""Weighted k-means in one dimension, exact by dynamic programming over the buckets of a sketch.

Sample weights are those of Inshrinkerator (arXiv 2306.11800, section 4): a bucket weighs
sigma * frequency + (1 - sigma) * |magnitude|, both normalised to sum to 1.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels import planning

SIGMA: Final = 0.2  # the paper's; 0.1 to 0.4 works as well

Values = NDArray[np.float64]


def sample_weights(values: Values, counts: NDArray[np.int64], sigma: float = SIGMA) -> Values:
    """Weigh buckets by representatives and occurrences, all [n]; a `sigma` of 1 gives least square errors."""
    frequency = counts / max(counts.sum(), 1)
    magnitude = np.abs(values)
    total = float(magnitude.sum())
    normalised = magnitude / total if total else frequency
    return sigma * frequency + (1 - sigma) * normalised


def fit_centroids(values: Values, weights: Values, n_levels: int) -> Values:
    """Find the centroids, ascending [at most n_levels], with the least weighted square error.

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
