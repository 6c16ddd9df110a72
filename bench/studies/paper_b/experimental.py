"""EF mixed, which lost in the study: it is sent here, and every link receives it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.wire.policy import TensorPlan, TopK
from ckptz.wire.state import MEMORIES, ErrorFeedback

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
