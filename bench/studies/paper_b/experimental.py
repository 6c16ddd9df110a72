"""What lost in the study: EF mixed, and levels that follow the norm of the gradient.

They are sent here; every link receives them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.dtypes import DType
from ckptz.wire import Adaptive, LinkPolicy
from ckptz.wire.codecs import TensorPlan, TopK
from ckptz.wire.endpoint import Link
from ckptz.wire.feedback import MEMORIES, ErrorFeedback
from ckptz.wire.header import Direction
from ckptz.wire.state import Place

Patterns = NDArray[np.uint32]


class MixedFeedback(ErrorFeedback):
    """EF whose TopK budget is halved: the greatest of x, then the greatest of e among the others.

    The paper names the method and defines it in one sentence; this is our reading of it.
    """

    def mask(self, k: Any, plan: TensorPlan, values: Patterns) -> Patterns:
        """Choose the positions to send: ceil(k / 2) by |x| and the rest by |e|, disjoint."""
        assert isinstance(plan.codec, TopK)
        first = k.top_mask(values, plan.n_samples, (plan.k + 1) // 2)
        if plan.k < 2:
            return first
        return first + k.top_mask(_without(self.array, first), plan.n_samples, plan.k // 2)


def _without(patterns: Patterns, mask: NDArray[np.uint8]) -> Patterns:
    """Magnitudes plus one, and zero under the mask [n]: what is chosen next is not chosen twice."""
    up = np.minimum((patterns & np.uint32(0x7FFFFFFF)) + np.uint32(1), np.uint32(0x7FFFFFFF))
    return np.where(mask != 0, np.uint32(0), up).astype(np.uint32)


MEMORIES["ef-mixed"] = MixedFeedback


class Detector:
    """The level of a direction, by the squared norms of its gradients (Accordion, arXiv 2010.16057)."""

    def __init__(self, choice: Adaptive) -> None:
        self._choice = choice
        self._window, self._sum, self._last, self.was_strong = 0, 0.0, math.nan, False

    def observe(self, step: int, squared_norm: float) -> None:
        """Count one gradient; what is not finite is a skipped step."""
        self.is_strong(step)
        if math.isfinite(squared_norm):
            self._sum += squared_norm

    def is_strong(self, step: int) -> bool:
        """Tell whether messages of this step take the strong codec."""
        window = step // self._choice.window
        if window > self._window:
            norm = math.sqrt(self._sum)
            change = abs(norm - self._last)
            self.was_strong = change < self._choice.threshold * self._last  # False while there is no last one
            self._window, self._sum, self._last = window, 0.0, norm
        return self.was_strong


class StudyLink(Link):
    """A simulated link whose directions with two codecs choose by the norm of the gradient."""

    def __init__(self, src: int, dst: int, policy: LinkPolicy) -> None:
        super().__init__(src, dst, policy, same_shape=False)
        self._detectors = {d: Detector(c) for d in Direction if isinstance(c := policy.choice(d), Adaptive)}

    def simulate(
        self, direction: Direction, units: Any, dtype: DType, shape: tuple[int, ...], place: Place
    ) -> Any:
        """Show gradients to the detectors: backward those that are sent, forward those that arrive."""
        if direction is Direction.BACKWARD:
            self._observe(Direction.BACKWARD, units, place)
        for each, detector in self._detectors.items():
            self.strong[each] = detector.was_strong if place.is_eval else detector.is_strong(place.step)
        received = super().simulate(direction, units, dtype, shape, place)
        if direction is Direction.BACKWARD:
            self._observe(Direction.FORWARD, received, place)
        return received

    def _observe(self, direction: Direction, units: Any, place: Place) -> None:
        if direction in self._detectors and not place.is_eval:
            values = units.view(np.float32).astype(np.float64)
            self._detectors[direction].observe(place.step, float(values @ values))
