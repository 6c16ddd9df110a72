"""Protect, quantize, prune: the three partitions of Inshrinkerator (arXiv 2306.11800, section 4).

Ascending boundaries divide the values into regions with one code each; from below: protected, quantized,
pruned (around zero), quantized, protected. Levels are the optimal solution of weighted one-dimensional
k-means over the buckets of a histogram, found by dynamic programming. The weight of a bucket is
sigma * frequency + (1 - sigma) * |magnitude|, both normalised to a sum of 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.histogram import Histogram
from ckptz.codec.quantizer import Quantizer
from ckptz.codec.sensitivity import NO_CUT, Sensitivities, SensitivityCut, SensitivityHistogram, floats_of
from ckptz.format.plan import ExplicitTable, QuantizationMap
from ckptz.kernels import cpu, floats
from ckptz.kernels.floats import Patterns

SIGMA: Final = 0.2  # as in the paper; 0.1 to 0.4 works as well

Values = NDArray[np.float64]


def sample_weights(values: Values, counts: NDArray[np.int64], sigma: float = SIGMA) -> Values:
    """Compute bucket weights from representatives and counts, all [n]; `sigma=1` means squared error."""
    frequency = counts / max(counts.sum(), 1)
    magnitude = np.abs(values)
    total = float(magnitude.sum())
    normalised = magnitude / total if total else frequency
    return sigma * frequency + (1 - sigma) * normalised


def fit_centroids(values: Values, weights: Values, n_levels: int) -> Values:
    """Compute the ascending centroids [at most n_levels] with the least weighted squared error.

    Args:
        values: ascending values [n], at least one.
        weights: weights of the values, at least 0 [n].
        n_levels: number of centroids; fewer are returned if there are fewer values.
    """
    used = weights > 0
    values, weights = (values[used], weights[used]) if used.any() else (values, np.ones(len(values)))
    if len(values) <= n_levels:
        return values
    ends = cpu().partition(values, weights, n_levels)
    starts = np.concatenate([[0], ends[:-1]])
    sums = np.add.reduceat(values * weights, starts)
    return sums / np.add.reduceat(weights, starts)


@dataclass(frozen=True, slots=True)
class Partitions:
    """Levels and shares of a map; `ckptz.codec.kmeans.KMeans` checks their ranges."""

    levels: int = 16  # number of values of quantized and pruned elements, 2..255
    prune: float = 0.0  # share of the elements, smallest first, that become zero
    protect: float = 0.0  # share of the elements, largest first, that are kept
    protect_as_bf16: bool = False  # protected elements are rounded to BF16 instead of kept exactly
    sigma: float = SIGMA  # see `sample_weights`
    prune_by: str = "magnitude"  # ranking for `prune`: "magnitude" or "sensitivity"
    protect_by: str = "magnitude"  # ranking for `protect`, or "either": the share by each ranking

    @property
    def prunes_by_sensitivity(self) -> float:
        """The share of elements that are pruned by sensitivity."""
        return self.prune if self.prune_by == "sensitivity" else 0.0

    @property
    def protects_by_sensitivity(self) -> float:
        """The share of elements that are protected by sensitivity."""
        return 0.0 if self.protect_by == "magnitude" else self.protect

    @property
    def needs_sensitivity(self) -> bool:
        """True if a share is selected by sensitivity."""
        return bool(self.prunes_by_sensitivity or self.protects_by_sensitivity)

    def by_magnitude(self) -> Partitions:
        """Return the partitions for a tensor whose sensitivity is unknown."""
        return replace(self, prune_by="magnitude", protect_by="magnitude")


@dataclass(frozen=True, slots=True)
class RegionQuantizer(Quantizer):
    """Quantizer that chooses codes by regions of values."""

    boundaries: Patterns
    region_code: NDArray[np.uint8]
    kind: int
    keep_as_bf16: bool

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        """Return the codes uint8 [n] of patterns [n], independent of their position."""
        del begin, end
        return cpu().region_codes(patterns, self.boundaries, self.region_code)

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        del begin
        if not self.keep_as_bf16 or self.kind != floats.F32:
            return patterns
        rounded = cpu().from_f32(patterns, floats.BF16).astype(np.uint32) << np.uint32(16)
        # The largest F32 values would round to infinity; they stay exact.
        is_infinite = (rounded & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
        return np.where(is_infinite, patterns, rounded)


def _ordered(value: float, kind: int) -> int:
    """Return the smallest ordered pattern whose value is at least `value`."""
    f32_pattern = floats.round_f64(np.array([value]))
    pattern = floats.from_f32(f32_pattern, kind)
    ordered = int(floats.order(pattern)[0])
    exact = floats.widen_f64(floats.to_f32(pattern, kind))[0]
    return ordered + (exact < value)


@dataclass(frozen=True, slots=True)
class SensitivityQuantizer(Quantizer):
    """Quantizer by regions of values and by sensitivity, which has priority; protection precedes pruning."""

    regions: RegionQuantizer  # codes by value
    cut: SensitivityCut  # thresholds of sensitivity
    sensitivities: Sensitivities  # (begin, end, patterns) -> sensitivities
    zero_code: int  # code of pruned elements
    escape_code: int | None  # code of protected elements, or None

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        codes = self.regions.codes(begin, end, patterns)
        sensitivities = self.sensitivities(begin, end, patterns)
        if self.cut.floor >= 0:
            pruned = self.cut.prunes(sensitivities, np.abs(floats_of(patterns, self.regions.kind)))
            codes[pruned & (codes != self.escape_code)] = self.zero_code
        if self.escape_code is not None:
            codes[self.cut.protects(sensitivities)] = self.escape_code
        return codes

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        return self.regions.kept(begin, patterns)


@dataclass(frozen=True, slots=True)
class Cut:
    """Thresholds between the partitions of a tensor."""

    floor: float = -1.0  # magnitudes at or below it are pruned; -1 prunes none
    ceiling: float = np.inf  # magnitudes above it are protected
    by_sensitivity: SensitivityCut = NO_CUT  # thresholds of sensitivity

    @classmethod
    def of(cls, wanted: Partitions, histogram: Histogram, ranks: SensitivityHistogram | None = None) -> Cut:
        """Compute the thresholds for the shares `wanted`, from a finite non-empty histogram.

        Shares by sensitivity need `ranks`, the histogram of the sensitivities.
        """
        prune = wanted.prune - wanted.prunes_by_sensitivity
        protect = wanted.protect if wanted.protect_by != "sensitivity" else 0.0
        floor = histogram.magnitude_quantile(prune) if prune else -1.0
        ceiling = histogram.magnitude_quantile(1 - protect) if protect else np.inf
        if ranks is None:
            return cls(floor, ceiling)
        return cls(floor, ceiling, ranks.cut(wanted.prunes_by_sensitivity, wanted.protects_by_sensitivity))

    @property
    def prunes(self) -> bool:
        """True if elements become zero, for which there is a code."""
        return self.floor >= 0 or self.by_sensitivity.floor >= 0

    @property
    def protects(self) -> bool:
        """True if elements are protected, for which there is an escape code."""
        return bool(np.isfinite(self.ceiling) or np.isfinite(self.by_sensitivity.ceiling))


def fit_kmeans_levels(
    values: NDArray[np.float64], counts: NDArray[np.int64], wanted: Partitions, cut: Cut
) -> NDArray[np.float64]:
    """Fit the levels, ascending [n_levels]; zero is one of them if elements are pruned.

    Args:
        values: values of the elements that sensitivity does not decide, ascending [n].
        counts: occurrences of each value [n].
        wanted: number of levels, and shares.
        cut: thresholds between the partitions.
    """
    magnitude = np.abs(values)
    is_free = (magnitude > cut.floor) & (magnitude <= cut.ceiling)
    weights = sample_weights(values[is_free], counts[is_free], wanted.sigma)
    n_free = wanted.levels - cut.prunes
    levels = fit_centroids(values[is_free], weights, n_free) if is_free.any() else np.zeros(0)
    return np.unique(np.append(levels, 0.0) if cut.prunes or not len(levels) else levels)


def fit_partitions(
    histogram: Histogram,
    wanted: Partitions,
    cut: Cut | None = None,
    sensitivities: Sensitivities | None = None,
) -> tuple[QuantizationMap, RegionQuantizer | SensitivityQuantizer]:
    """Fit the map of one tensor.

    Args:
        histogram: finite histogram of the tensor, without the elements that sensitivity decides.
        wanted: number of levels, and shares.
        cut: thresholds between the partitions; by default computed from `wanted`, by magnitude.
        sensitivities: sensitivities of its patterns; None if only magnitudes decide.

    Returns:
        The map (linear domain, one row) and the quantizer that chooses its codes.
    """
    cut = Cut.of(wanted, histogram) if cut is None else cut
    levels = fit_kmeans_levels(*histogram.occupied(), wanted, cut)
    kind, escape = histogram.kind, len(levels) if cut.protects else None
    entries = np.append(levels, 0.0) if cut.protects else levels
    table = ExplicitTable(floats.round_f64(entries).reshape(1, -1))
    quant_map = QuantizationMap(table, np.zeros(1, np.int64), escape_code=escape)
    cuts, codes = region_cuts(levels, cut)
    boundaries = np.maximum.accumulate(np.array([_ordered(c, kind) for c in cuts], np.int64))
    boundaries = boundaries.astype(np.uint32 if kind == floats.F32 else np.uint16)
    regions = RegionQuantizer(boundaries, np.array(codes, np.uint8), kind, wanted.protect_as_bf16)
    if sensitivities is None:
        return quant_map, regions
    zero = int(np.searchsorted(levels, 0.0))
    return quant_map, SensitivityQuantizer(regions, cut.by_sensitivity, sensitivities, zero, escape)


def region_cuts(levels: NDArray[np.float64], cut: Cut) -> tuple[list[float], list[int]]:
    """Return the boundaries between regions for ascending levels [n], and the code of each region."""
    cuts = [(a + b) / 2 for a, b in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True)]
    if cut.floor >= 0:
        # Exactly the pruned values become zero, so the boundaries of zero are the threshold, not midpoints.
        zero = int(np.searchsorted(levels, 0.0))
        above = float(np.nextafter(cut.floor, np.inf))
        if zero > 0:
            cuts[zero - 1] = -cut.floor
        if zero < len(levels) - 1:
            cuts[zero] = above
    codes = list(range(len(levels)))
    if np.isfinite(cut.ceiling):
        cuts = [-cut.ceiling, *cuts, float(np.nextafter(cut.ceiling, np.inf))]
        codes = [len(levels), *codes, len(levels)]
    return cuts, codes
