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
    """One tensor to plan, and all that a method may look at.

    Attributes:
        source: the tensor.
        base: the restored tensor that a delta is made from, of the same dtype and shape, or None.
        guide: what else is known of it.
        companions: other tensors of the file as it restores them, where the recipe names one.
        run: maps a function over chunks; a thread pool's map takes them in parallel.
    """

    source: TensorSource
    base: TensorSource | None = None
    guide: Guide = NO_GUIDE
    companions: Companions | None = None
    run: MapFunction = map


class Rounding(Protocol):
    """What units are rounded to before they are split into byte planes."""

    def rounded(self, units: Units, kind: int) -> Units:
        """Round units of a kind of `ckptz.kernels.reference`."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """The plan of a tensor, and what only its encoder knows.

    Attributes:
        plan: what the frame will say.
        quantizer: linear and bits domains: gives the codes.
        note: what the user should know, or empty.
        counted: codes by class of each stream, if the planner counted the one chunk there is.
        is_sparse: code a chunk of which few units changed by their positions.
        rounding: planes domain: what units are rounded to before they are split, if at all.
    """

    plan: Plan
    quantizer: Quantizer | None = None
    note: str = ""
    counted: tuple[ClassCounts, ...] = ()
    is_sparse: bool = False
    rounding: Rounding | None = None
