"""What an encoder decides for one tensor before its first byte: its plan, and what no reader sees."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ckptz.codec.plan import Plan
from ckptz.codec.units import Companions, TensorSource
from ckptz.codec.units import MapFunction as MapFunction
from ckptz.encoding.counts import ClassCounts
from ckptz.encoding.guide import NO_GUIDE, Guide
from ckptz.kernels.floats import Units
from ckptz.quant.quantizer import Quantizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Subject:
    """One tensor to plan, and all that a method may look at."""

    source: TensorSource  # the tensor
    # the restored tensor that a delta is made from, of the same dtype and shape, or None
    base: TensorSource | None = None
    guide: Guide = NO_GUIDE  # what else is known of it
    # other tensors of the file as it restores them, where the recipe names one
    companions: Companions | None = None
    run: MapFunction = map  # maps a function over chunks; a thread pool's map takes them in parallel
    seed: int = 0  # 32 bits that follow from the base's content id and the tensor's name alone


def summed(run: MapFunction, measure: Callable[[tuple[int, int]], T], source: TensorSource) -> T:
    """Add up the results of `measure` for each chunk (begin, end) of a tensor that is not empty."""
    return functools.reduce(operator.add, run(measure, source.chunk_bounds()))


class Rounding(Protocol):
    """A rounding of units before they are split into byte planes."""

    def rounded(self, units: Units, kind: int, begin: int) -> Units:
        """Round units [n] from `begin` on, of a kind of `ckptz.kernels.floats`."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """The plan of a tensor, and what only its encoder knows."""

    plan: Plan  # what the frame will say
    quantizer: Quantizer | None = None  # linear and bits domains: gives the codes
    note: str = ""  # what the user should know, or empty
    # codes by class of each stream, if the planner counted the one chunk there is
    counted: tuple[ClassCounts, ...] = ()
    is_sparse: bool = False  # code a chunk of which few units changed by their positions
    # what the file's record says of the planning, beside what was asked
    found: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    # planes domain: what units are rounded to before they are split, if at all
    rounding: Rounding | None = None
