"""What the planner may know of a tensor beside its values and its base. Encoder only.

Nothing of it is stored: whatever steps, partitions or codes follow from it are in the frame.

A first moment moves its weight for many steps to come. What a lossy file does not keep of it would be lost
movement; so the weight is coded as if it had been moved by that already. For an optimizer whose update is
linear in the first moment, the moves that a first moment m will still cause add up to

    rate * m / (sqrt(v) * root_scale + eps)      with a second moment v, as Adam has it
    rate * m                                     without

where `rate` holds the learning rate, the sum of the decaying weights of m, and the bias corrections. What is
made up for is the difference between the moves of the exact moments and those of the restored ones. With the
restored v for both, the noise of v would go into the weights.

What is made up for is coded, too. Drawn thresholds keep a move of n on average, but with an error whose
square is about |n| steps, where n^2 was to be saved: so this pays only where steps are smaller than moves.
On the fine-tune of bench/studies/restarts.py, with steps ten times the moves, nine restarts ended 1.99 %
above the uninterrupted run with it, 1.03 % with half of it and 0.69 % without. That grows with the square of
what is made up for, more than errors of rounding do: a move that is made at once is not turned by the
gradients that it would have met on its way. On the language run, where nothing restarted, steps are fine
enough for weights of one dimension alone, 0.4 % of all elements; so `compress` does without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import SourceOf, TensorSource, Units
from ckptz.codec.values import KINDS
from ckptz.kernels import cpu, moments
from ckptz.quant.sensitivity import Floats, floats_of
from ckptz.quant.sketch import Sketch

N_SAMPLED: Final = 1 << 16  # units that decide whether moves are made up for


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


@dataclass(frozen=True, slots=True)
class Update:
    """The rule by which an optimizer turns first moments into moves; see the module.

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
    """The moments of a weight, exactly and as they will be restored.

    Attributes:
        update: of its optimizer.
        exact: the first moment, and the second or None.
        restored: what a reader gets of them.
    """

    update: Update
    exact: tuple[TensorSource, TensorSource | None]
    restored: tuple[TensorSource, TensorSource | None]


@dataclass(frozen=True, slots=True)
class Folded(SourceOf):
    """A weight, moved by what its restored first moment will not do any more."""

    fold: Fold

    def is_worth(self, step: float) -> bool:
        """Tell from units in the middle whether moves are larger than the steps they would be rounded to."""
        n_units = self.dtype.n_units(self.shape)
        begin = max(n_units - N_SAMPLED, 0) // 2
        with np.errstate(all="ignore"):
            moves = self._lost(begin, min(begin + N_SAMPLED, n_units)).astype(np.float64)
        moves = np.abs(moves[np.isfinite(moves)])
        return bool(np.square(moves).sum() > step * moves.sum())

    def units(self, begin: int, end: int) -> Units:
        kind = KINDS[self.dtype.name]
        values = _floats(self.source, begin, end)
        with np.errstate(all="ignore"):
            moved = values - self._lost(begin, end)
            units: Units = cpu().from_f32(moved.view(np.uint32), kind)
        if cpu().all_finite(units, kind):
            return units
        is_usable = np.isfinite(cpu().to_f32(units, kind).view(np.float32))
        return np.where(is_usable, units, self.source.units(begin, end))

    def _lost(self, begin: int, end: int) -> NDArray[np.float32]:
        """Give the moves of units begin..end that restored moments will not make, float32 [end - begin]."""
        return self._moves(self.fold.exact, begin, end) - self._moves(self.fold.restored, begin, end)

    def _moves(
        self, pair: tuple[TensorSource, TensorSource | None], begin: int, end: int
    ) -> NDArray[np.float32]:
        """Give the moves that a pair of moments causes to units begin..end, float32 [end - begin]."""
        update, (first, second) = self.fold.update, pair
        given = _floats(first, begin, end)
        squares = given[:0]
        if update.root_scale is not None and second is not None:
            squares = _floats(second, begin, end)
        settings = (np.float32(one or 0.0) for one in (update.rate, update.root_scale, update.eps))
        found = np.empty(end - begin, np.float32)
        moments().moves(given, squares, *settings, found)
        return found


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
    # mean of second moment times squared weight over all weights of the checkpoint, which relates the steps
    # of its tensors to one another
    energy: float | None = None
    fold: Fold | None = None  # its moments, to make up for what a file loses of them


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
