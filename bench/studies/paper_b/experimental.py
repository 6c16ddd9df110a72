"""What lost in the study: EF mixed, and levels that follow the norm of the gradient.

EF mixed is sent here, and every link receives it. A link with levels is two links here, of which each
step takes one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.dtypes import DType
from ckptz.wire import LinkPolicy
from ckptz.wire.codecs import TensorPlan, TopK
from ckptz.wire.endpoint import Link
from ckptz.wire.header import Direction
from ckptz.wire.state import MEMORIES, ErrorFeedback, Place

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


@dataclass(frozen=True, slots=True)
class Levels:
    """Two policies that differ in codecs, and when gradients take the stronger one.

    Attributes:
        mild: what a link begins with.
        strong: what it takes while the norm of the gradient changes little.
        threshold: change of the norm at which Accordion (arXiv 2010.16057) is back at mild.
        window: steps over which it takes the norm.
    """

    mild: LinkPolicy
    strong: LinkPolicy
    threshold: float = 0.2
    window: int = 50

    def to_json(self) -> str:
        """Give the levels as text."""
        record = {"mild": self.mild.to_json(), "strong": self.strong.to_json()}
        return json.dumps(record | {"threshold": self.threshold, "window": self.window})


class Detector:
    """The level of a direction, by the squared norms of its gradients."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._window, self._sum, self._last, self.was_strong = 0, 0.0, math.nan, False

    def observe(self, step: int, squared_norm: float) -> None:
        """Count one gradient; what is not finite is a skipped step."""
        self.is_strong(step)
        if math.isfinite(squared_norm):
            self._sum += squared_norm

    def is_strong(self, step: int) -> bool:
        """Tell whether messages of this step take the strong codec."""
        window = step // self._levels.window
        if window > self._window:
            norm = math.sqrt(self._sum)
            change = abs(norm - self._last)
            self.was_strong = change < self._levels.threshold * self._last  # False while there is no last one
            self._window, self._sum, self._last = window, 0.0, norm
        return self.was_strong


class StudyLink(Link):
    """A simulated link whose directions with two codecs choose by the norm of the gradient."""

    def __init__(self, src: int, dst: int, policy: LinkPolicy | Levels) -> None:
        levels = policy if isinstance(policy, Levels) else Levels(policy, policy)
        super().__init__(src, dst, levels.mild, same_shape=False)
        self._strong = Link(src, dst, levels.strong, same_shape=False)
        self._strong.sent_bytes, self._strong.raw_bytes = self.sent_bytes, self.raw_bytes
        both = levels.mild, levels.strong
        self._detectors = {d: Detector(levels) for d in Direction if both[0].codec(d) != both[1].codec(d)}
        self._is_strong = False

    def simulate(
        self, direction: Direction, units: Any, dtype: DType, shape: tuple[int, ...], place: Place
    ) -> Any:
        """Show gradients to the detectors: backward those that are sent, forward those that arrive."""
        if direction is Direction.BACKWARD:
            self._observe(Direction.BACKWARD, units, place)
        detector = self._detectors.get(direction)
        if not (self.policy.reuse and direction is Direction.BACKWARD):  # a reused mask brings its level
            self._is_strong = detector is not None and (
                detector.was_strong if place.is_eval else detector.is_strong(place.step)
            )
        run = self._strong.simulate if self._is_strong else super().simulate
        received = run(direction, units, dtype, shape, place)
        if direction is Direction.BACKWARD:
            self._observe(Direction.FORWARD, received, place)
        return received

    def _observe(self, direction: Direction, units: Any, place: Place) -> None:
        if direction in self._detectors and not place.is_eval:
            values = units.view(np.float32).astype(np.float64)
            self._detectors[direction].observe(place.step, float(values @ values))
