"""What an encoder decides for one tensor before its first byte: its plan, and what no reader sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from ckptz.codec.plan import Plan
from ckptz.codec.sources import Companions
from ckptz.codec.units import TensorSource
from ckptz.encoding.counts import ClassCounts
from ckptz.encoding.guide import NO_GUIDE, Guide
from ckptz.quant.quantizer import Quantizer

MapFunction = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
Units = NDArray[Any]


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


class Rounding(Protocol):
    """What units are rounded to before they are split into byte planes."""

    def rounded(self, units: Units, kind: int) -> Units:
        """Round units [n] of a kind of `ckptz.kernels.reference`."""
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
    # planes domain: what units are rounded to before they are split, if at all
    rounding: Rounding | None = None
