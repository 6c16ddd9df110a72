"""Movement that first moments still promise, paid out to the weights before these are coded.

A first moment moves its weight for many steps to come. What a lossy file does not keep of it would be lost
movement; so the weight is coded as if it had been moved by that already. For an optimizer whose update is
linear in the first moment, the moves that a difference d of it would still cause add up to

    rate * d / (sqrt(v) * root_scale + eps)      with a second moment v, as Adam has it
    rate * d                                     without

where `rate` holds the learning rate, the sum of the decaying weights of d, and the bias corrections.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import SourceOf, TensorSource, Units
from ckptz.codec.values import KINDS
from ckptz.kernels import cpu

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Update:
    """How an optimizer turns first moments into moves; see the module.

    Attributes:
        rate: move for each unit of first moment, or of its ratio to the root.
        root_scale: of the root of the second moment; None if the update has none.
        eps: added to the root.
    """

    rate: float
    root_scale: float | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Fold:
    """What of a weight's moments is known, exactly and as it will be restored.

    Attributes:
        update: of its optimizer.
        first: the exact first moment.
        first_restored: what a reader gets of it.
        second_restored: what a reader gets of the second moment, or None.
    """

    update: Update
    first: TensorSource
    first_restored: TensorSource
    second_restored: TensorSource | None


@dataclass(frozen=True, slots=True)
class Folded(SourceOf):
    """A weight, moved by what its restored first moment will not do any more."""

    fold: Fold

    def units(self, begin: int, end: int) -> Units:
        kind = KINDS[self.dtype.name]
        values, moves = _floats(self.source, begin, end), self._moves(begin, end)
        with np.errstate(all="ignore"):
            moved = values - moves
            units: Units = cpu().from_f32(moved.view(np.uint32), kind)
        is_usable = np.isfinite(cpu().to_f32(units, kind).view(np.float32))
        return np.where(is_usable, units, self.source.units(begin, end))

    def _moves(self, begin: int, end: int) -> Floats:
        """Give the moves of units begin..end, float32 [end - begin]."""
        fold, update = self.fold, self.fold.update
        with np.errstate(all="ignore"):
            lost = _floats(fold.first, begin, end) - _floats(fold.first_restored, begin, end)
            moves = lost * np.float32(update.rate)
            if update.root_scale is not None and fold.second_restored is not None:
                roots = np.sqrt(_floats(fold.second_restored, begin, end)) * np.float32(update.root_scale)
                moves /= roots + np.float32(update.eps)
        moves[lost == 0] = 0
        return moves


def _floats(source: TensorSource, begin: int, end: int) -> Floats:
    values: Floats = cpu().to_f32(source.units(begin, end), KINDS[source.dtype.name]).view(np.float32)
    return values
