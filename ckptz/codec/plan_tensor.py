"""The plan of one tensor, as chosen: the one place that knows which planner makes which choice."""

from __future__ import annotations

from ckptz.codec.choices import Choice
from ckptz.codec.guides import NO_GUIDE, Guide
from ckptz.codec.plan import Plan
from ckptz.codec.plan_first import plan_first
from ckptz.codec.plan_grid import plan_grid
from ckptz.codec.plan_kmeans import plan_kmeans
from ckptz.codec.plan_rounded import plan_rounded
from ckptz.codec.plan_second import plan_second
from ckptz.codec.planner import MapFunction, plan_lossless, plan_sparse
from ckptz.codec.sources import Companions
from ckptz.codec.units import UnitSource
from ckptz.quant.grid import UniformGrid
from ckptz.quant.moments import FirstMoment, Rounding, SecondMoment


def plan_tensor(
    source: UnitSource,
    base: UnitSource | None,
    choice: Choice,
    guide: Guide = NO_GUIDE,
    run: MapFunction = map,
    companions: Companions | None = None,
) -> Plan:
    """The plan of one tensor, lossless or lossy as chosen.

    Args:
        source: the tensor.
        base: the restored tensor that a delta is made from, of the same dtype and shape, or None.
        choice: what the configuration means for it.
        guide: what else is known of it.
        run: maps a function over chunks.
        companions: other tensors of the file as it restores them, where the choice names one.
    """
    if choice.is_sparse:
        return plan_sparse(source, base, run)
    if choice.method is None or not source.dtype.n_units(source.shape):
        return plan_lossless(source, base, run)
    if isinstance(choice.method, UniformGrid):
        return plan_grid(source, base, choice.method, guide, run)
    if isinstance(choice.method, Rounding):
        return plan_rounded(source, base, choice.method, run)
    if isinstance(choice.method, SecondMoment):
        return plan_second(source, base, choice.method, run)
    if isinstance(choice.method, FirstMoment):
        name = choice.companion
        second = None if name is None or companions is None else companions(name)
        return plan_first(source, base, choice.method, second, run)
    return plan_kmeans(source, base, choice.method, guide, run)
