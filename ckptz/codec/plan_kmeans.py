"""Plans k-means maps: sketch, fit, and whether the base's codes are worth grouping by."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import numpy as np

from ckptz.codec.plan import Domain, Plan
from ckptz.codec.planner import MapFunction, plan_lossless, plan_sparse, stream_tables
from ckptz.codec.sources import codes_of
from ckptz.codec.units import UnitSource, chunk_bounds
from ckptz.codec.values import KINDS
from ckptz.config import Config, KMeans, Lossless
from ckptz.dtypes import DType
from ckptz.entropy.frequency import entropy_bits
from ckptz.quant.partitions import Partitions, RegionQuantizer, fit_partitions
from ckptz.quant.quant_map import QuantizationMap
from ckptz.quant.sketch import Sketch
from ckptz.roles import Role
from ckptz.transform.classes import BaseCode, ClassCounts


@dataclass(frozen=True, slots=True)
class Choice:
    """What a configuration means for one tensor.

    Attributes:
        role: what the tensor is.
        partitions: how it becomes lossy, or None.
        is_sparse: prefer changed positions over the smallest bytes.
    """

    role: Role
    partitions: Partitions | None = None
    is_sparse: bool = False


def choose(config: Config, role: Role, dtype: DType, shape: tuple[int, ...]) -> Choice:
    """Which tensors a configuration makes lossy: weights with two or more dimensions, not too small."""
    if isinstance(config, Lossless) and config.sparse:
        return Choice(role, is_sparse=True)
    if not isinstance(config, KMeans) or role.role != "weight" or dtype.name not in KINDS:
        return Choice(role)
    if len(shape) < 2 or dtype.n_units(shape) < config.min_elements:
        return Choice(role)
    levels = config.levels
    if role.layer_type == "embedding" and config.embedding_levels is not None:
        levels = config.embedding_levels
    prune = dict(config.layer_prune).get(role.layer_type, config.prune)
    as_bf16 = config.protect_as == "bf16"
    return Choice(role, Partitions(levels, prune, config.protect, as_bf16, config.sigma))


def plan_kmeans(
    source: UnitSource, base: UnitSource | None, wanted: Partitions, run: MapFunction = map
) -> Plan:
    """The plan of one lossy tensor.

    Args:
        source: the tensor, of a dtype in `KINDS` and not empty.
        base: the restored tensor that a delta is made from, or None.
        wanted: levels and shares.
        run: maps a function over chunks.
    """
    kind = KINDS[source.dtype.name]
    bounds = list(chunk_bounds(source.dtype.n_units(source.shape)))
    sketch = functools.reduce(operator.add, run(lambda b: Sketch.of(source.units(*b), kind), bounds))
    if not sketch.is_finite:
        exact = plan_lossless(source, base, run)
        return _noted(exact, "holds NaN or infinity and stays lossless")
    quant_map, quantizer = fit_partitions(sketch, wanted)
    plan = Plan(quant_map=quant_map, domain=Domain.LINEAR, quantizer=quantizer)
    n_base_codes = getattr(base, "n_codes", None)
    if base is None or n_base_codes is None:
        return plan
    found = functools.reduce(
        operator.add, run(lambda b: _joint_counts(source, base, quantizer, n_base_codes, b), bounds)
    )
    return _grouped(plan, found, quant_map, n_base_codes)


def _noted(plan: Plan, note: str) -> Plan:
    return Plan(plan.mode, predictor=plan.predictor, rules=plan.rules, tables=plan.tables, note=note)


def _joint_counts(
    source: UnitSource, base: UnitSource, quantizer: RegionQuantizer, n_codes: int, bounds: tuple[int, int]
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
    return Plan(
        quant_map=quant_map,
        domain=Domain.LINEAR,
        rules=(BaseCode(n_base_codes),),
        tables=(stream_tables(found, n_base_codes),),
        quantizer=plan.quantizer,
    )


def plan_tensor(source: UnitSource, base: UnitSource | None, choice: Choice, run: MapFunction = map) -> Plan:
    """The plan of one tensor, lossless or lossy as chosen."""
    if choice.is_sparse:
        return plan_sparse(source, base, run)
    if choice.partitions is None or not source.dtype.n_units(source.shape):
        return plan_lossless(source, base, run)
    return plan_kmeans(source, base, choice.partitions, run)
