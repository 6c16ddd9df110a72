"""EF mixed, the error feedback that lost in the study: sent only here, received by every link."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.wire.policy import TensorPlan, TopK
from ckptz.wire.state import MEMORIES, ErrorFeedback

Patterns = NDArray[np.uint32]


class MixedFeedback(ErrorFeedback):
    """Error feedback with a split TopK budget: half for the largest x, half for the largest other errors e.

    The paper defines the method in one sentence; this is our interpretation.
    """

    def mask(self, k: Any, plan: TensorPlan, values: Patterns) -> Patterns:
        """Choose the positions to send: ceil(k / 2) by |x|, then floor(k / 2) others by |e|."""
        assert isinstance(plan.codec, TopK)
        first = k.top_mask(values, plan.n_samples, (plan.k + 1) // 2)
        if plan.k < 2:
            return first
        return first + k.top_mask(_without(self.array, first), plan.n_samples, plan.k // 2)


def _without(patterns: Patterns, mask: NDArray[np.uint8]) -> Patterns:
    """Return magnitudes plus one, and zero at the positions of `mask` [n], so that none is chosen twice."""
    up = np.minimum((patterns & np.uint32(0x7FFFFFFF)) + np.uint32(1), np.uint32(0x7FFFFFFF))
    return np.where(mask != 0, np.uint32(0), up).astype(np.uint32)


MEMORIES["ef-mixed"] = MixedFeedback
