"""Sensitivities |g*w| of a tensor's elements, from what its guide knows of gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptz.codec.units import TensorSource, Units
from ckptz.codec.values import KINDS
from ckptz.encoding.guide import Guide
from ckptz.quant.sensitivity import Floats, floats_of


@dataclass(frozen=True, slots=True)
class GuidedSensitivities:
    """Sensitivities of units begin..end."""

    kind: int  # of the tensor's units
    gradients: TensorSource  # averages of gradients, or of their squares; of the tensor's shape
    is_squared: bool  # which of them

    def gradients_of(self, begin: int, end: int) -> Floats:
        """Read magnitudes of gradients, float32 [end - begin]; NaN where a square is negative."""
        found = floats_of(self.gradients.units(begin, end), KINDS[self.gradients.dtype.name])
        with np.errstate(all="ignore"):
            return np.sqrt(found) if self.is_squared else np.abs(found)

    def __call__(self, begin: int, end: int, units: Units) -> Floats:
        """Rank units begin..end by |g*w|, float32 [end - begin]."""
        with np.errstate(all="ignore"):
            return self.gradients_of(begin, end) * np.abs(floats_of(units, self.kind))


def sensitivities_of(source: TensorSource, guide: Guide) -> GuidedSensitivities | None:
    """Find the sensitivities of a tensor's units; None if no gradient is known in a type that has values."""
    for gradients, is_squared in ((guide.gradient, False), (guide.second_moment, True)):
        if gradients is not None and gradients.dtype.name in KINDS:
            return GuidedSensitivities(KINDS[source.dtype.name], gradients, is_squared)
    return None
