"""Ranking of elements by sensitivity |g*w|, the first-order change of the loss if an element became zero.

Inshrinkerator (arXiv 2306.11800, section 3). For elements with an average gradient of exactly 0, such as
embedding rows that no batch has looked up, the sensitivity is unknown: the same share of them is pruned, by
magnitude. With a sensitivity of 0, nearly all pruned elements would be words that a pretrained model knows
but this training has not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.histogram import Histogram
from ckptz.format.sources import TensorSource
from ckptz.format.values import FLOAT_KINDS
from ckptz.kernels import cpu, floats
from ckptz.kernels.floats import Floats, Patterns

Sensitivities = Callable[[int, int, Patterns], Floats]  # (begin, end, patterns) -> sensitivities


def floats_of(patterns: Patterns, kind: int) -> Floats:
    """Convert patterns [n] of kind F32, BF16 or F16 (`ckptz.kernels.floats`) to float32 [n]."""
    return cpu().to_f32(patterns, kind).view(np.float32)


def floats_in(source: TensorSource, begin: int, end: int) -> Floats:
    """Return elements begin..end of a tensor of a dtype in `FLOAT_KINDS` as float32 [end - begin]."""
    return floats_of(source.patterns(begin, end), FLOAT_KINDS[source.dtype.name])


@dataclass(frozen=True, slots=True)
class SensitivityCut:
    """Sensitivity thresholds for pruning and protecting elements."""

    floor: float = -1.0  # elements at or below it are pruned; -1 prunes none
    floor_at_zero: float = np.inf  # elements of sensitivity 0 are pruned up to this magnitude
    ceiling: float = np.inf  # elements above it are protected

    def prunes(self, sensitivities: Floats, magnitudes: Floats) -> NDArray[np.bool_]:
        """Return a mask of elements that become zero; all arrays are [n]."""
        lowest = sensitivities <= np.float32(self.floor)
        if np.isfinite(self.floor_at_zero):
            lowest &= (sensitivities > 0) | (magnitudes <= np.float32(self.floor_at_zero))
        return lowest

    def protects(self, sensitivities: Floats) -> NDArray[np.bool_]:
        """Return a mask of protected elements [n]."""
        return sensitivities > np.float32(self.ceiling)

    def leaves(self, sensitivities: Floats, magnitudes: Floats) -> NDArray[np.bool_]:
        """Return a mask of elements that are neither pruned nor protected; all arrays are [n]."""
        return ~(self.prunes(sensitivities, magnitudes) | self.protects(sensitivities))


NO_CUT: Final = SensitivityCut()


@dataclass(frozen=True, slots=True)
class SensitivityHistogram:
    """Histograms of sensitivities, and of magnitudes where the sensitivity is 0; parts can be added."""

    sensitivities: Histogram
    at_zero: Histogram

    @classmethod
    def of(cls, sensitivities: Floats, patterns: Patterns, kind: int) -> Self:
        """Count the sensitivities [n] of patterns [n] of kind F32, BF16 or F16."""
        f32_patterns = np.ascontiguousarray(sensitivities).view(np.uint32)
        return cls(Histogram.of(f32_patterns, floats.F32), Histogram.of(patterns[sensitivities == 0], kind))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.sensitivities + other.sensitivities, self.at_zero + other.at_zero)

    def cut(self, prune: float, protect: float) -> SensitivityCut:
        """Compute the thresholds that prune and protect the given shares of the elements."""
        ceiling = self.sensitivities.magnitude_quantile(1 - protect) if protect else np.inf
        if not prune:
            return SensitivityCut(ceiling=ceiling)
        n, n_at_zero = self.sensitivities.n_values, self.at_zero.n_values
        floor = self.sensitivities.magnitude_quantile((n_at_zero + prune * (n - n_at_zero)) / n)
        floor_at_zero = self.at_zero.magnitude_quantile(prune) if n_at_zero else np.inf
        return SensitivityCut(floor, floor_at_zero, ceiling)
