"""Plans small tensors inside a lossy state: byte planes of values rounded to a relative precision.

A map of that many levels would outweigh a tensor of a few hundred elements. Also what all planners of
optimizer state share: the histogram of a tensor, and the way back to no loss.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from ckptz.codec.plan import Plan
from ckptz.codec.planner import MapFunction, plan_lossless
from ckptz.codec.units import UnitSource, chunk_bounds
from ckptz.codec.values import KINDS
from ckptz.dtypes import DType
from ckptz.quant.moments import Rounding
from ckptz.quant.sketch import Sketch

Units = NDArray[Any]


def sketch_of(source: UnitSource, run: MapFunction) -> Sketch:
    """The histogram of a whole tensor."""
    kind = KINDS[source.dtype.name]
    bounds = chunk_bounds(source.dtype.n_units(source.shape))
    return functools.reduce(operator.add, run(lambda b: Sketch.of(source.units(*b), kind), bounds))


def exact_with_note(source: UnitSource, base: UnitSource | None, note: str, run: MapFunction) -> Plan:
    """The lossless plan, and why it is that."""
    return replace(plan_lossless(source, base, run), note=f"{note} and stays lossless")


@dataclass(frozen=True, slots=True)
class RoundedSource:
    """A tensor as it will be restored."""

    source: UnitSource
    rounding: Rounding

    @property
    def dtype(self) -> DType:
        """See `UnitSource.dtype`."""
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `UnitSource.shape`."""
        return tuple(self.source.shape)

    def units(self, begin: int, end: int) -> Units:
        """See `UnitSource.units`."""
        return self.rounding.rounded(self.source.units(begin, end), KINDS[self.dtype.name])


def plan_rounded(
    source: UnitSource, base: UnitSource | None, rounding: Rounding, run: MapFunction = map
) -> Plan:
    """Byte planes of rounded values: maps of that many levels would outweigh a small tensor.

    Args:
        source: the tensor, of a dtype in `KINDS` and not empty.
        base: the restored tensor that a delta is made from, or None.
        rounding: to what precision.
        run: maps a function over chunks.
    """
    if not sketch_of(source, run).is_finite:
        return exact_with_note(source, base, "holds NaN or infinity", run)
    return replace(plan_lossless(RoundedSource(source, rounding), base, run), rounding=rounding)
