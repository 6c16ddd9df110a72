"""Ranking by sensitivity |g*w|, the first-order change of the loss if an element became zero.

Inshrinkerator (arXiv 2306.11800, section 3). Where an average of gradients is exactly zero, as in rows of
an embedding that no batch looked up, all elements rank lowest, and magnitude decides among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels import cpu, floats
from ckptz.kernels.floats import Floats as Floats
from ckptz.kernels.floats import Units
from ckptz.quant.sketch import Sketch

Sensitivities = Callable[[int, int, Units], Floats]  # of units begin..end


def floats_of(units: Units, kind: int) -> Floats:
    """Read values, float32 [n], of units [n] of kind F32, BF16 or F16 of `ckptz.kernels.floats`."""
    return cpu().to_f32(units, kind).view(np.float32)


@dataclass(frozen=True, slots=True)
class SensitivityCut:
    """Thresholds of sensitivity for elements that are pruned and protected."""

    floor: float = -1.0  # elements at or below it are pruned; -1 prunes none
    floor_at_zero: float = np.inf  # greatest magnitude that is pruned among elements of zero sensitivity
    ceiling: float = np.inf  # elements above it are protected

    def prunes(self, sensitivities: Floats, magnitudes: Floats) -> NDArray[np.bool_]:
        """Mark elements that become zero; all arrays [n]."""
        lowest = sensitivities <= np.float32(self.floor)
        if np.isfinite(self.floor_at_zero):
            lowest &= (sensitivities > 0) | (magnitudes <= np.float32(self.floor_at_zero))
        return lowest

    def protects(self, sensitivities: Floats) -> NDArray[np.bool_]:
        """Mark elements [n] that stay."""
        return sensitivities > np.float32(self.ceiling)

    def leaves(self, sensitivities: Floats, magnitudes: Floats) -> NDArray[np.bool_]:
        """Mark elements that are left to their values; all arrays [n]."""
        return ~(self.prunes(sensitivities, magnitudes) | self.protects(sensitivities))


NO_CUT: Final = SensitivityCut()


@dataclass(frozen=True, slots=True)
class SensitivitySketch:
    """Sensitivities, and the magnitudes of the elements that have none; sketches of parts add up."""

    sensitivities: Sketch
    at_zero: Sketch

    @classmethod
    def of(cls, sensitivities: Floats, units: Units, kind: int) -> Self:
        """Sketch the sensitivities [n] of units [n] of kind F32, BF16 or F16."""
        patterns = np.ascontiguousarray(sensitivities).view(np.uint32)
        return cls(Sketch.of(patterns, floats.F32), Sketch.of(units[sensitivities == 0], kind))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.sensitivities + other.sensitivities, self.at_zero + other.at_zero)

    @property
    def is_finite(self) -> bool:
        """Whether every element has a rank."""
        return self.sensitivities.is_finite

    def cut(self, prune: float, protect: float) -> SensitivityCut:
        """Find thresholds for shares of the elements; a share of 0 takes none."""
        ceiling = self.sensitivities.magnitude_quantile(1 - protect) if protect else np.inf
        if not prune:
            return SensitivityCut(ceiling=ceiling)
        wanted = prune * self.sensitivities.n_values
        if wanted > self.at_zero.n_values:
            return SensitivityCut(self.sensitivities.magnitude_quantile(prune), ceiling=ceiling)
        return SensitivityCut(0.0, self.at_zero.magnitude_quantile(wanted / self.at_zero.n_values), ceiling)
