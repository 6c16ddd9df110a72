"""Plans small tensors inside a lossy state: byte planes of values rounded to a relative precision.

A map of that many levels would outweigh a tensor of a few hundred elements. Also what all planners of
optimizer state share: the histogram of a tensor, and the way back to no loss.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import SourceOf, TensorSource, chunk_bounds
from ckptz.codec.values import KINDS
from ckptz.encoding.draft import Draft, MapFunction, Subject
from ckptz.methods.lossless import plan_lossless
from ckptz.methods.method import Recipe, Setting
from ckptz.quant.moments import MANTISSA_BITS, exponent_mask
from ckptz.quant.sketch import Sketch

Units = NDArray[Any]


def sketch_of(source: TensorSource, run: MapFunction) -> Sketch:
    """Make the histogram of a whole tensor, of a dtype in `KINDS`."""
    kind = KINDS[source.dtype.name]
    bounds = chunk_bounds(source.dtype.n_units(source.shape))
    return functools.reduce(operator.add, run(lambda b: Sketch.of(source.units(*b), kind), bounds))


def exact_with_note(subject: Subject, note: str) -> Draft:
    """Plan without loss, and say why it is that."""
    exact = plan_lossless(subject.source, subject.base, subject.run)
    return replace(exact, note=f"{note} and stays lossless")


@dataclass(frozen=True, slots=True)
class Rounding(Recipe):
    """A small tensor that is kept to a relative precision.

    Attributes:
        bits: a restored element is within 2^-bits of itself, relatively.
    """

    bits: int = 10
    name: ClassVar[str] = "rounding"

    def settings(self) -> dict[str, Setting]:
        return {"bits": self.bits}

    def rounded(self, units: Units, kind: int) -> Units:
        """Round units to nearest; those that would overflow, and subnormal ones, stay as they are."""
        n_dropped = MANTISSA_BITS[kind] + 1 - self.bits
        if n_dropped <= 0:
            return units
        half, mask = (units.dtype.type(n) for n in (1 << (n_dropped - 1), (1 << n_dropped) - 1))
        nearest = (units + half) & ~mask
        exponents = units.dtype.type(exponent_mask(kind))
        is_kept = ((nearest & exponents) == exponents) | ((units & exponents) == 0)
        return np.where(is_kept, units, nearest)

    def plan(self, subject: Subject) -> Draft:
        """Plan byte planes of rounded values: a map of that many levels would outweigh a small tensor."""
        source, run = subject.source, subject.run
        if not sketch_of(source, run).is_finite:
            return exact_with_note(subject, "holds NaN or infinity")
        exact = plan_lossless(RoundedSource(source, self), subject.base, run)
        return replace(exact, rounding=self)


@dataclass(frozen=True, slots=True)
class RoundedSource(SourceOf):
    """A tensor as it will be restored."""

    rounding: Rounding

    def units(self, begin: int, end: int) -> Units:
        return self.rounding.rounded(self.source.units(begin, end), KINDS[self.dtype.name])
