"""Protect, quantize, prune: the three partitions of Inshrinkerator (arXiv 2306.11800, section 4).

Values are cut into regions by ascending boundaries; each region has a code. From below: protected,
quantized, pruned around zero, quantized, protected. Levels are weighted k-means in one dimension, exact by
dynamic programming over buckets of a histogram. A bucket weighs sigma * frequency + (1 - sigma) *
|magnitude|, both normalised to sum to 1.
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
from ckptz.kernels import cpu, floats, planning
from ckptz.kernels.floats import Patterns

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


@dataclass(frozen=True, slots=True)
class Partitions:
    """Levels and shares of a map; `ckptz.codec.kmeans.KMeans` checks their ranges."""

    levels: int = 16  # values that quantized and pruned elements may take, 2..255
    prune: float = 0.0  # share of the elements, smallest magnitudes first, that become zero
    protect: float = 0.0  # share of the elements, largest magnitudes first, that stay
    protect_as_bf16: bool = False  # protected elements are rounded to BF16 instead of kept exactly
    sigma: float = SIGMA  # see `sample_weights`
    prune_by: str = "magnitude"  # what is smallest, "magnitude" or "sensitivity"
    protect_by: str = "magnitude"  # what is largest, likewise, or "either": the share by each of them

    @property
    def prunes_by_sensitivity(self) -> float:
        """The share that is pruned by sensitivity."""
        return self.prune if self.prune_by == "sensitivity" else 0.0

    @property
    def protects_by_sensitivity(self) -> float:
        """The share that is protected by sensitivity."""
        return 0.0 if self.protect_by == "magnitude" else self.protect

    @property
    def needs_sensitivity(self) -> bool:
        """True if a share is selected by sensitivity."""
        return bool(self.prunes_by_sensitivity or self.protects_by_sensitivity)

    def by_magnitude(self) -> Partitions:
        """Return the partitions for a tensor without known sensitivity."""
        return replace(self, prune_by="magnitude", protect_by="magnitude")


@dataclass(frozen=True, slots=True)
class RegionQuantizer(Quantizer):
    """Codes by regions of values."""

    boundaries: Patterns
    region_code: NDArray[np.uint8]
    kind: int
    keep_as_bf16: bool

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        """Return the codes uint8 [n] of patterns [n] from anywhere in the tensor."""
        del begin, end
        return cpu().region_codes(patterns, self.boundaries, self.region_code)

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        del begin
        if not self.keep_as_bf16 or self.kind != floats.F32:
            return patterns
        rounded = cpu().from_f32(patterns, floats.BF16).astype(np.uint32) << np.uint32(16)
        # The largest F32 values would round to infinity: those stay exact.
        is_infinite = (rounded & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
        return np.where(is_infinite, patterns, rounded)


def _ordered(value: float, kind: int) -> int:
    """The least ordered pattern whose value is at or above `value`."""
    f32_pattern = floats.round_f64(np.array([value]))
    pattern = floats.from_f32(f32_pattern, kind)
    ordered = int(floats.order(pattern)[0])
    exact = floats.widen_f64(floats.to_f32(pattern, kind))[0]
    return ordered + (exact < value)


@dataclass(frozen=True, slots=True)
class SensitivityQuantizer(Quantizer):
    """Regions of values, overruled by sensitivity; protecting goes before pruning."""

    regions: RegionQuantizer  # codes by value
    kind: int  # of the patterns
    cut: SensitivityCut  # what is pruned and protected by sensitivity
    sensitivities: Sensitivities  # of patterns begin..end
    zero_code: int  # of pruned elements
    escape_code: int | None  # of protected elements, or None

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        codes = self.regions.codes(begin, end, patterns)
        sensitivities = self.sensitivities(begin, end, patterns)
        if self.cut.floor >= 0:
            pruned = self.cut.prunes(sensitivities, np.abs(floats_of(patterns, self.kind)))
            codes[pruned & (codes != self.escape_code)] = self.zero_code
        if self.escape_code is not None:
            codes[self.cut.protects(sensitivities)] = self.escape_code
        return codes

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        return self.regions.kept(begin, patterns)


@dataclass(frozen=True, slots=True)
class Cut:
    """Thresholds that cut a tensor into partitions."""

    floor: float = -1.0  # magnitudes at or below it are pruned; -1 prunes none
    ceiling: float = np.inf  # magnitudes above it are protected
    by_sensitivity: SensitivityCut = NO_CUT  # what is pruned and protected by sensitivity

    @classmethod
    def of(cls, wanted: Partitions, histogram: Histogram, ranks: SensitivityHistogram | None = None) -> Cut:
        """Find thresholds for the wanted shares of a tensor with a finite histogram that is not empty.

        Shares by sensitivity need `ranks`, the histogram of its sensitivities.
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
        """True if there is a code for zero."""
        return self.floor >= 0 or self.by_sensitivity.floor >= 0

    @property
    def protects(self) -> bool:
        """True if protected elements have a code."""
        return bool(np.isfinite(self.ceiling) or np.isfinite(self.by_sensitivity.ceiling))


def fit_kmeans_levels(
    values: NDArray[np.float64], counts: NDArray[np.int64], wanted: Partitions, cut: Cut
) -> NDArray[np.float64]:
    """Fit the values of codes, ascending [n_levels]; zero is one of them if elements are pruned.

    Args:
        values: of the elements that are not taken by sensitivity, ascending [n].
        counts: how often each occurs [n].
        wanted: levels and shares.
        cut: where the tensor is cut.
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
        histogram: of the tensor, without the elements that sensitivity takes; finite.
        wanted: levels and shares.
        cut: where the tensor is cut; by default as wanted, by magnitude.
        sensitivities: of its patterns; None if magnitude decides alone.

    Returns:
        The map (linear domain, one row) and the quantizer that makes its codes.
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
    return quant_map, SensitivityQuantizer(regions, kind, cut.by_sensitivity, sensitivities, zero, escape)


def region_cuts(levels: NDArray[np.float64], cut: Cut) -> tuple[list[float], list[int]]:
    """Find where values change their code at levels [n], ascending, and the code of each region between."""
    cuts = [(a + b) / 2 for a, b in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True)]
    if cut.floor >= 0:
        # Zero takes what is pruned and nothing else: its borders are the threshold, not the middles.
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
