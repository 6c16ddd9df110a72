"""Plans k-means maps: sketch, fit, and whether the base's codes are worth grouping by."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ckptz.codec.coded import CodedSource
from ckptz.codec.guides import NO_GUIDE, Guide
from ckptz.codec.plan import Domain, Plan, Quantizer
from ckptz.codec.planner import MapFunction, plan_lossless, stream_tables
from ckptz.codec.sensitivity import GuidedSensitivities, sensitivities_of
from ckptz.codec.sources import codes_of
from ckptz.codec.units import UnitSource, chunk_bounds
from ckptz.codec.values import KINDS
from ckptz.entropy.frequency import entropy_bits
from ckptz.quant.partitions import Cut, Partitions, fit_partitions
from ckptz.quant.quant_map import QuantizationMap
from ckptz.quant.sensitivity import SensitivitySketch, floats_of
from ckptz.quant.sketch import Sketch
from ckptz.transform.classes import BaseCode, ClassCounts

NO_GRADIENT: Final = "has no average of gradients; ranked by magnitude"
BAD_GRADIENT: Final = "has gradients that are not finite, or negative squares; ranked by magnitude"


def plan_kmeans(
    source: UnitSource,
    base: UnitSource | None,
    wanted: Partitions,
    guide: Guide = NO_GUIDE,
    run: MapFunction = map,
) -> Plan:
    """The plan of one lossy tensor.

    Args:
        source: the tensor, of a dtype in `KINDS` and not empty.
        base: the restored tensor that a delta is made from, or None.
        wanted: levels and shares.
        guide: its gradients, for shares by sensitivity.
        run: maps a function over chunks.
    """
    if isinstance(source, CodedSource):
        plan = Plan(quant_map=source.quant_map, domain=Domain.LINEAR, quantizer=source.quantizer)
        return _regrouped(source, base, plan, run)
    kind = KINDS[source.dtype.name]
    bounds = chunk_bounds(source.dtype.n_units(source.shape))
    sketch = guide.sketch
    if sketch is None:
        sketch = functools.reduce(operator.add, run(lambda b: Sketch.of(source.units(*b), kind), bounds))
    if not sketch.is_finite:
        exact = plan_lossless(source, base, run)
        return replace(exact, note="holds NaN or infinity and stays lossless")
    ranked, note = rank(source, guide, wanted, run)
    quant_map, quantizer = _fit(source, sketch, wanted, ranked, run)
    plan = Plan(quant_map=quant_map, domain=Domain.LINEAR, quantizer=quantizer, note=note)
    return _regrouped(source, base, plan, run)


def _regrouped(source: UnitSource, base: UnitSource | None, plan: Plan, run: MapFunction) -> Plan:
    """The plan with codes grouped by those of the base, where it has any and that is smaller."""
    n_base_codes, quant_map, quantizer = getattr(base, "n_codes", None), plan.quant_map, plan.quantizer
    if base is None or n_base_codes is None or quant_map is None or quantizer is None:
        return plan
    bounds = chunk_bounds(source.dtype.n_units(source.shape))
    found = functools.reduce(
        operator.add, run(lambda b: _joint_counts(source, base, quantizer, n_base_codes, b), bounds)
    )
    return _grouped(plan, found, quant_map, n_base_codes)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Sensitivities of a tensor, and the sketch of them all."""

    sensitivities: GuidedSensitivities
    sketch: SensitivitySketch


def rank(
    source: UnitSource, guide: Guide, wanted: Partitions, run: MapFunction = map
) -> tuple[Ranked | None, str]:
    """The sensitivities, where they are wanted and known, and a note where they are only wanted."""
    if not wanted.needs_sensitivity:
        return None, ""
    found = sensitivities_of(source, guide)
    if found is None:
        return None, NO_GRADIENT

    def sketch(bounds: tuple[int, int]) -> SensitivitySketch:
        units = source.units(*bounds)
        return SensitivitySketch.of(found(*bounds, units), units, found.kind)

    bounds = chunk_bounds(source.dtype.n_units(source.shape))
    ranks = functools.reduce(operator.add, run(sketch, bounds))
    return (Ranked(found, ranks), "") if ranks.is_finite else (None, BAD_GRADIENT)


def _fit(
    source: UnitSource, sketch: Sketch, wanted: Partitions, ranked: Ranked | None, run: MapFunction
) -> tuple[QuantizationMap, Quantizer]:
    """The map; for what sensitivity leaves, it takes one more pass."""
    if ranked is None:
        return fit_partitions(sketch, wanted.by_magnitude())
    cut = Cut.of(wanted, sketch, ranked.sketch)

    def left_in(bounds: tuple[int, int]) -> Sketch:
        units = source.units(*bounds)
        magnitudes = np.abs(floats_of(units, sketch.kind))
        stays = cut.by_sensitivity.leaves(ranked.sensitivities(*bounds, units), magnitudes)
        return Sketch.of(units[stays], sketch.kind)

    bounds = chunk_bounds(source.dtype.n_units(source.shape))
    left = functools.reduce(operator.add, run(left_in, bounds))
    return fit_partitions(left, wanted, cut, ranked.sensitivities)


def _joint_counts(
    source: UnitSource, base: UnitSource, quantizer: Quantizer, n_codes: int, bounds: tuple[int, int]
) -> ClassCounts:
    """Codes by the code of the base."""
    labels = codes_of(base, *bounds)
    codes = quantizer.codes(*bounds, source.units(*bounds))
    labels = np.zeros(len(codes), np.uint8) if labels is None else labels
    return ClassCounts.of(labels, codes, n_codes)


def _grouped(plan: Plan, found: ClassCounts, quant_map: QuantizationMap, n_base_codes: int) -> Plan:
    """The plan with codes grouped by the base's bucket, if that is smaller."""
    if entropy_bits(found.counts) >= entropy_bits(found.total[None]):
        return plan
    quant_map = QuantizationMap(
        quant_map.table, np.zeros(n_base_codes, np.int64), escape_code=quant_map.escape_code
    )
    return replace(
        plan,
        quant_map=quant_map,
        rules=(BaseCode(n_base_codes),),
        tables=(stream_tables(found, n_base_codes),),
    )
