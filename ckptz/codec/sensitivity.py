"""Ranking by sensitivity |g*w|, the first-order change of the loss if an element became zero.

Inshrinkerator (arXiv 2306.11800, section 3). Of elements whose average of gradients is exactly zero, such as
rows of an embedding that no batch has looked up, nothing is known: the same share of them is pruned as of
the others, by magnitude. Ranked lowest, as |g*w| says, nearly all that is pruned would be words that training
has not met, which a pretrained model knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.histogram import Histogram
from ckptz.kernels import cpu, floats
from ckptz.kernels.floats import Floats as Floats
from ckptz.kernels.floats import Patterns

Sensitivities = Callable[[int, int, Patterns], Floats]  # of patterns begin..end


def floats_of(patterns: Patterns, kind: int) -> Floats:
    """Read values, float32 [n], of patterns [n] of kind F32, BF16 or F16 of `ckptz.kernels.floats`."""
    return cpu().to_f32(patterns, kind).view(np.float32)


@dataclass(frozen=True, slots=True)
class SensitivityCut:
    """Thresholds of sensitivity for elements that are pruned and protected."""

    floor: float = -1.0  # elements at or below it are pruned; -1 prunes none
    floor_at_zero: float = np.inf  # greatest magnitude that is pruned among elements without sensitivity
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
class SensitivityHistogram:
    """Sensitivities, and the magnitudes of the elements that have none; histograms of parts add up."""

    sensitivities: Histogram
    at_zero: Histogram

    @classmethod
    def of(cls, sensitivities: Floats, patterns: Patterns, kind: int) -> Self:
        """Count the sensitivities [n] of patterns [n] of kind F32, BF16 or F16."""
        f32_patterns = np.ascontiguousarray(sensitivities).view(np.uint32)
        return cls(Histogram.of(f32_patterns, floats.F32), Histogram.of(patterns[sensitivities == 0], kind))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.sensitivities + other.sensitivities, self.at_zero + other.at_zero)

    @property
    def is_finite(self) -> bool:
        """True if every element has a rank."""
        return self.sensitivities.is_finite

    def cut(self, prune: float, protect: float) -> SensitivityCut:
        """Find thresholds for shares of the elements; a share of 0 takes none."""
        ceiling = self.sensitivities.magnitude_quantile(1 - protect) if protect else np.inf
        if not prune:
            return SensitivityCut(ceiling=ceiling)
        n, n_at_zero = self.sensitivities.n_values, self.at_zero.n_values
        floor = self.sensitivities.magnitude_quantile((n_at_zero + prune * (n - n_at_zero)) / n)
        floor_at_zero = self.at_zero.magnitude_quantile(prune) if n_at_zero else np.inf
        return SensitivityCut(floor, floor_at_zero, ceiling)
