"""Protect, quantize, prune: the three partitions of Inshrinkerator (arXiv 2306.11800, section 4).

Values are cut into regions by ascending boundaries; each region has a code. From below: protected,
quantized, pruned around zero, quantized, protected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels import cpu, reference
from ckptz.quant.kmeans import SIGMA, fit_centroids, sample_weights
from ckptz.quant.quant_map import ExplicitTable, QuantizationMap
from ckptz.quant.sketch import Sketch

Units = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Partitions:
    """What `fit_partitions` is asked for; `ckptz.config.KMeans` checks the ranges.

    Attributes:
        levels: values that quantized and pruned elements may take, 2..255.
        prune: share of the elements, smallest magnitudes first, that become zero.
        protect: share of the elements, largest magnitudes first, that stay.
        protect_as_bf16: protected elements are rounded to BF16 instead of kept exactly.
        sigma: see `kmeans.sample_weights`.
    """

    levels: int = 16
    prune: float = 0.0
    protect: float = 0.0
    protect_as_bf16: bool = False
    sigma: float = SIGMA


@dataclass(frozen=True, slots=True)
class RegionQuantizer:
    """The encoder's side of a map by regions; see `ckptz.codec.plan.Quantizer`."""

    boundaries: Units
    region_code: NDArray[np.uint8]
    kind: int
    keep_as_bf16: bool

    def codes(self, begin: int, end: int, units: Units) -> NDArray[np.uint8]:
        """Codes of some units."""
        del begin, end
        return cpu().region_codes(units, self.boundaries, self.region_code)

    def kept(self, units: Units) -> Units:
        """What protected units restore to."""
        if not self.keep_as_bf16 or self.kind != reference.F32:
            return units
        rounded = cpu().from_f32(units, reference.BF16).astype(np.uint32) << np.uint32(16)
        # The largest F32 values would round to infinity: those stay exact.
        is_infinite = (rounded & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
        return np.where(is_infinite, units, rounded)

    def protected(self, begin: int, end: int, units: Units) -> None:
        """Nothing stands beside its code: what is protected takes the escape code."""
        del begin, end, units


def _ordered(value: float, kind: int) -> int:
    """The least ordered unit whose value is at or above `value`."""
    pattern = reference.round_f64(np.array([value]))
    unit = reference.from_f32(pattern, kind)
    ordered = int(reference.order(unit)[0])
    exact = reference.widen_f64(reference.to_f32(unit, kind))[0]
    return ordered + (exact < value)


def fit_partitions(sketch: Sketch, wanted: Partitions) -> tuple[QuantizationMap, RegionQuantizer]:
    """Fit the map of one tensor.

    Args:
        sketch: of the tensor; finite and not empty.
        wanted: levels and shares.

    Returns:
        The map (linear domain, one row) and the quantizer that makes its codes.
    """
    values, counts = sketch.occupied()
    magnitude = np.abs(values)
    floor = sketch.magnitude_quantile(wanted.prune) if wanted.prune else -1.0
    ceiling = sketch.magnitude_quantile(1 - wanted.protect) if wanted.protect else np.inf
    is_free = (magnitude > floor) & (magnitude <= ceiling)
    n_free = wanted.levels - bool(wanted.prune)
    weights = sample_weights(values[is_free], counts[is_free], wanted.sigma)
    levels = fit_centroids(values[is_free], weights, n_free) if is_free.any() else np.zeros(0)
    return _map_of(levels, floor, ceiling, sketch.kind, wanted)


def _map_of(
    levels: NDArray[np.float64], floor: float, ceiling: float, kind: int, wanted: Partitions
) -> tuple[QuantizationMap, RegionQuantizer]:
    levels = np.unique(np.append(levels, 0.0) if floor >= 0 or not len(levels) else levels)
    cuts = [(a + b) / 2 for a, b in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True)]
    if floor >= 0:
        # Zero takes what is pruned and nothing else: its borders are the threshold, not the middles.
        zero = int(np.searchsorted(levels, 0.0))
        above = float(np.nextafter(floor, np.inf))
        if zero > 0:
            cuts[zero - 1] = -floor
        if zero < len(levels) - 1:
            cuts[zero] = above
    codes = list(range(len(levels)))
    escape = None
    if np.isfinite(ceiling):
        escape = len(levels)
        cuts = [-ceiling, *cuts, float(np.nextafter(ceiling, np.inf))]
        codes = [escape, *codes, escape]
    unit = np.uint32 if kind == reference.F32 else np.uint16
    boundaries = np.maximum.accumulate(np.array([_ordered(cut, kind) for cut in cuts], np.int64))
    entries = np.append(levels, 0.0) if escape is not None else levels
    table = reference.round_f64(entries).reshape(1, -1)
    quant_map = QuantizationMap(ExplicitTable(table), np.zeros(1, np.int64), escape_code=escape)
    quantizer = RegionQuantizer(
        boundaries.astype(unit), np.array(codes, np.uint8), kind, wanted.protect_as_bf16
    )
    return quant_map, quantizer
