"""What the planner may know of a tensor beside its values and its base. Encoder only.

Nothing of it is stored: whatever steps, partitions or codes follow from it are in the frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import TensorSource, Units
from ckptz.codec.values import KINDS
from ckptz.quant.sensitivity import Floats, floats_of
from ckptz.quant.sketch import Sketch


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMoments:
    """Second moments of a layer's inputs, sum(x x^T): how errors of a weight's columns add up."""

    # of the weight, that the matrix belongs to: 1 for [out, in, ...] (convolutions: all dimensions behind the
    # first, flattened), 0 for weights stored as [in, out] or for embeddings
    axis: int
    n_samples: int  # input vectors summed up
    # the float32 or float64 matrix [n, n]; [n_groups, n, n] for grouped convolutions; for embeddings, whose
    # inputs are one-hot, its diagonal [n]: how often each row was looked up
    read: Callable[[], NDArray[Any]]


def _floats(source: TensorSource, begin: int, end: int) -> Floats:
    return floats_of(source.units(begin, end), KINDS[source.dtype.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """Side knowledge of one tensor; its sources have the tensor's shape."""

    # average of its gradients, for sensitivity |g*w|; if there is none, the root of `second_moment` stands in
    gradient: TensorSource | None = None
    second_moment: TensorSource | None = None  # the exact average of squared gradients, Adam's exp_avg_sq
    inputs: InputMoments | None = None  # second moments of the inputs that it is multiplied with
    # of the whole tensor where this is a shard of it, so that all shards get one map
    sketch: Sketch | None = None
    # of a first moment: how far its weight will move for each root of the second moment that it is, before it
    # has died out, in root mean squares of the weight
    reach: float | None = None
    # mean of second moment times squared weight over all weights of the checkpoint, which relates the steps
    # of its tensors to one another
    energy: float | None = None


NO_GUIDE: Final = Guide()


@dataclass(frozen=True, slots=True)
class GuidedSensitivities:
    """Sensitivities of units begin..end."""

    kind: int  # of the tensor's units
    gradients: TensorSource  # averages of gradients, or of their squares; of the tensor's shape
    is_squared: bool  # which of them

    def gradients_of(self, begin: int, end: int) -> Floats:
        """Read magnitudes of gradients, float32 [end - begin]; NaN where a square is negative."""
        found = _floats(self.gradients, begin, end)
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
