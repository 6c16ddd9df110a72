"""What the planner may know of a tensor beside its values and its base. Encoder only.

Nothing of it is stored: whatever steps, partitions or codes follow from it are in the frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptz.codec.units import TensorSource
from ckptz.encoding.fold import Fold
from ckptz.quant.guides import InputMoments
from ckptz.quant.sketch import Sketch


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """Side knowledge of one tensor; its sources have the tensor's shape."""

    # average of its gradients, for sensitivity |g*w|; if there is none, the root of `second_moment` stands in
    gradient: TensorSource | None = None
    second_moment: TensorSource | None = None  # the exact average of squared gradients, Adam's exp_avg_sq
    inputs: InputMoments | None = None  # second moments of the inputs that it is multiplied with
    # of the whole tensor where this is a shard of it, so that all shards get one map
    sketch: Sketch | None = None
    # mean of second moment times squared weight over all weights of the checkpoint, which relates the steps
    # of its tensors to one another
    energy: float | None = None
    fold: Fold | None = None  # its moments, to make up for what a file loses of them


NO_GUIDE: Final = Guide()
