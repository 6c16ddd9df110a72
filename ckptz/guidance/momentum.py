"""Momentum correction: weights are corrected before encoding for the updates that lossy first moments lose.

A first moment restored with errors updates its weight less than the exact one. How much less cannot be
computed from it alone, because later gradients counteract a part. The update P of the lost momentum is
therefore compared with the update D of training since the last save or restore, for which a sample of the
weights is kept in memory. Weights are corrected by the share <P, D> / <P, P> of P
(`ckptz.guidance.momentum_decay`). On three runs (bench/studies/momentum.py) the result is nearer to the
uninterrupted run than with all of P or none of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.moved import MovedSource
from ckptz.codec.restored import HELD_BYTES, CachedTensor
from ckptz.codec.sensitivity import floats_in, floats_of
from ckptz.codec.tensor import SideInformation
from ckptz.format.caches import CachedChunks
from ckptz.format.sources import LazySource, TensorSource
from ckptz.format.values import FLOAT_KINDS
from ckptz.guidance.momentum_decay import MomentumDecay, ProjectionStats, bound_of, decay_of, shares_of
from ckptz.guidance.optimizer_layout import ParamState, can_move, param_states_in, rounded
from ckptz.kernels import cpu
from ckptz.kernels.floats import Patterns
from ckptz.state.roles import Role

SAMPLED: Final = 1 << 16  # maximum number of sampled elements of a weight
# Worth of future updates that no second moment scales, as those of SGD. Where the loss is steep, an update
# along momentum goes too far, so lost momentum costs more. On the image network of bench/studies/user_runs
# ten restarts at deltas of 41x cost 4.7 %; at 4 times the worth 27x, 1.6 %; at 10 times 21x, 1.2 %.
UNSCALED_WORTH: Final = 10.0
UNKNOWN_SHARE: Final = 2.0  # assumed update between two saves / future update of a moment, if it is unknown
Sample = NDArray[np.float32]
Pool: TypeAlias = Callable[[dict[str, ProjectionStats]], dict[str, ProjectionStats]]
# Assumed share of lost updates that training follows, if it is unknown. All measured runs had 0.9 to 1.0,
# except for one with 0.6; without correction, the first restart of a fine-tune cost 0.35 %.
USUAL_SHARE: Final = 0.9
UNKNOWN: Final = (
    f"moved by the usual share, {USUAL_SHARE}, of the momentum that is lost: "
    "how much of it training follows is not known"
)
# Settings of the optimizer are missing, or its updates are not computed from momentum in a known way.
UNKNOWN_DECAY: Final = "not moved by the momentum that is lost: how far that would move it is not known"
SECOND_MOMENT: Final = "exp_avg_sq"
FIRST_MOMENTS: Final = frozenset(("exp_avg", "momentum_buffer"))  # in the state of torch's optimizers


def _lost(one: ParamState, before: tuple[float, float] | None) -> LostMomentum | None:
    """Return the complete first moment of a weight as lost; None if its updates or values are unknown.

    Args:
        one: the weight.
        before: (learning rate, number of updates since) of an earlier step, if known.
    """
    decay = decay_of(one.settings, one.state, is_adamw=one.is_adamw, before=before)
    if decay is None or not can_move(one.weight):
        return None
    moment = one.state[decay.moment]
    second = None if decay.second is None else one.state[decay.second]
    moments = [state for state in (moment, second) if state is not None]
    is_whole = all(isinstance(state, TensorSource) and can_move(state) for state in moments)
    return (
        LostMomentum(decay, moment, None, second) if is_whole and moment.shape == one.weight.shape else None
    )


@dataclass(frozen=True, slots=True)
class _WeightSnapshot:
    """Sample of a weight when it was saved or restored.

    Attributes:
        sample: sample of its values.
        updates: number of its updates, or None if the optimizer does not count them.
        step: step of the save, or None if unknown.
        rate: learning rate of the next update.
        is_restored: whether the weight was restored.
        has_lost: whether its momentum was restored with errors.
    """

    sample: Sample
    updates: float | None
    step: int | None
    rate: float
    is_restored: bool
    has_lost: bool


@dataclass(frozen=True, slots=True)
class LostMomentum:
    """The part of a weight's first moment that a file loses.

    Attributes:
        decay: decay of the first moment.
        moment: the exact first moment.
        restored: the restored first moment; None if all of it is lost.
        second: the second moment, if updates depend on it.
        restored_second: the restored second moment; None if it is unknown or exact.
    """

    decay: MomentumDecay
    moment: TensorSource
    restored: TensorSource | None
    second: TensorSource | None
    restored_second: TensorSource | None = None

    @property
    def bound(self) -> SideInformation:
        """Side information with the bound of the first moment."""
        is_other = self.decay.second != SECOND_MOMENT
        return SideInformation(bound=self.decay.bound, divisor=self.second if is_other else None)

    def moves(self, begin: int, end: int) -> Sample:
        """Compute the lost updates of elements begin..end, float32 [end - begin]."""
        squares = None if self.second is None else floats_in(self.second, begin, end)
        moves = self.decay.moves(floats_in(self.moment, begin, end), squares)
        if self.restored is None:
            return moves
        if self.restored_second is not None:
            squares = floats_in(self.restored_second, begin, end)
        return moves - self.decay.moves(floats_in(self.restored, begin, end), squares)

    def sample(self) -> Sample:
        """Compute the lost updates of the elements that `UpdateTracker` samples, float32 [n]."""
        return _at_samples(self.moment, self.moves)

    def moved(self, weight: TensorSource, share: float) -> LazySource:
        """Return a weight plus a share of its lost updates; elements that would overflow are unchanged."""
        kind = FLOAT_KINDS[weight.dtype.name]

        def moved_patterns(begin: int, end: int) -> Patterns:
            patterns = weight.patterns(begin, end)
            with np.errstate(all="ignore"):
                values = floats_of(patterns, kind) + np.float32(share) * self.moves(begin, end)
            moved: Patterns = cpu().from_f32(values.view(np.uint32), kind)
            return np.where(np.isfinite(floats_of(moved, kind)), moved, patterns)

        return LazySource.of(weight, moved_patterns)


class UpdateTracker:
    """Samples the weights of a run at each save and restore, to measure the updates between them."""

    def __init__(self) -> None:
        self._snapshots: dict[str, _WeightSnapshot] = {}
        self.has_snapshot = False  # whether there was a save, a restore or a first step
        self._shares: dict[str, float] = {}  # last measured shares

    def snapshot(
        self,
        trained: Mapping[str, ParamState],
        step: int | None,
        *,
        is_restored: bool,
        has_lost: bool = False,
    ) -> None:
        """Sample the weights after a save or a restore.

        Args:
            trained: weights by parameter; instead of a weight, its sample by `stride_of` is accepted.
            step: step of the run, or None if unknown.
            is_restored: whether they were restored.
            has_lost: whether they were restored from files with lossy momentum.
        """
        self._snapshots, self.has_snapshot = {}, True
        for parameter, one in trained.items():
            if one.rate is not None and can_move(one.weight):
                sample, known = _sampled(one.weight), (one.updates, step, one.rate)
                self._snapshots[parameter] = _WeightSnapshot(sample, *known, is_restored, has_lost)

    def lost(self, trained: Mapping[str, ParamState], step: int | None) -> dict[str, LostMomentum]:
        """Return the first moments of all weights that can be corrected, as completely lost, by parameter.

        Their learning rates are extrapolated linearly from the snapshot.
        """
        moments = {}
        for parameter, one in trained.items():
            last = self._snapshots.get(parameter)
            before = None if last is None else (last.rate, _n_updates(last, one, step))
            if (lost := _lost(one, before)) is not None:
                moments[parameter] = lost
        return moments

    def guides(self, trained: Mapping[str, ParamState], step: int | None) -> dict[str, SideInformation]:
        """Return the side information of first moments, update scale and bound, by their names.

        The update scale is limited by the update that training has made since the snapshot.
        """
        guides = bounds_of(trained)
        for parameter, lost in self.lost(trained, step).items():
            one = trained[parameter]
            moved, n_updates = self._moved(parameter, one, step, lost.decay)
            own = _rms(lost.sample())
            size = UNKNOWN_SHARE * own if moved is None or not n_updates else max(_rms(moved), own)
            worth = UNSCALED_WORTH if lost.second is None else 1.0
            update_scale = worth * lost.decay.total / lost.decay.root / size if size else None
            guides[one.names[lost.decay.moment]] = replace(lost.bound, update_scale=update_scale)
        return guides

    def _moved(
        self, parameter: str, one: ParamState, step: int | None, decay: MomentumDecay
    ) -> tuple[Sample | None, float]:
        """Return the update of a weight's sample since the snapshot, and the number of updates.

        The update is None without a snapshot; the number is 0 if the weight has not changed.
        """
        last, now = self._snapshots.get(parameter), _sampled(one.weight)
        if last is None or now.shape != last.sample.shape:
            return None, 0.0
        n_updates = max(_n_updates(last, one, step), 0.0)
        kept = (1 - (last.rate + decay.rate) / 2 * decay.weight_decay) ** n_updates
        is_moved = bool((now != last.sample).any())
        return now - np.float32(kept) * last.sample, n_updates if is_moved else 0.0

    def shares(
        self,
        trained: Mapping[str, ParamState],
        step: int | None,
        lost: Mapping[str, LostMomentum],
        pool: Pool = dict,
    ) -> dict[str, float]:
        """Measure the share of its lost updates that is applied to each weight, by parameter.

        If a share cannot be measured now, the last measured one is used; without one it is left out. If a
        process has parts of weights only, `pool` adds up the inner products of all processes.
        """
        projections, known = {}, dict[str, float]()
        for parameter, one in lost.items():
            moved, n_updates = self._moved(parameter, trained[parameter], step, one.decay)
            if moved is None:
                continue
            if n_updates:
                shape = one.moment.shape
                n_free = min(math.prod(shape[:1]) + math.prod(shape[1:]), len(moved))
                has_lost = self._snapshots[parameter].has_lost
                in_noise = one.decay.in_noise(n_updates, from_zero=has_lost)
                projections[parameter] = ProjectionStats.of(one.sample(), moved, in_noise, n_free)
            elif self._snapshots[parameter].is_restored:  # the lost part was already lost in the restore
                known[parameter] = 0.0
        self._shares |= shares_of(pool(projections))
        return {name: self._shares[name] for name in lost if name in self._shares} | known


@dataclass(frozen=True, slots=True)
class Momentum:
    """Momentum correction of the weights of a file.

    Attributes:
        tracker: the update tracker of the run.
        step: step of the file, or None if unknown.
        trained: weights with optimizer state, by parameter; None to find them in the file, see `known`.
        restored: first moments restored from another file, by their names there; None if they are in the
            same file.
        pool: see `UpdateTracker.shares`.
    """

    tracker: UpdateTracker
    step: int | None
    trained: Mapping[str, ParamState] | None = None
    restored: Mapping[str, TensorSource] | None = None
    pool: Pool = dict

    def known(
        self, tensors: Mapping[str, TensorSource], tree: dict[str, Any] | None, roles: Mapping[str, Role]
    ) -> Momentum:
        """Return the correction with the weights of a file, if needed identified by its optimizer state."""
        return (
            self if self.trained is not None else replace(self, trained=param_states_in(tensors, tree, roles))
        )

    def snapshot(self, *, is_restored: bool) -> None:
        """Record the weights as the snapshot of a save or a restore."""
        self.tracker.snapshot(self.trained or {}, self.step, is_restored=is_restored)

    def guides(self) -> dict[str, SideInformation]:
        """Return the side information of first moments in the same file, by name."""
        return {} if self.restored is not None else self.tracker.guides(self.trained or {}, self.step)

    def moments(self) -> list[str]:
        """Return the names of the first moments of the same file that the correction depends on."""
        trained = self.trained or {}
        lost = {} if self.restored is not None else self.tracker.lost(trained, self.step)
        return [trained[parameter].names[one.decay.moment] for parameter, one in lost.items()]

    def moved(self, restored: Mapping[str, TensorSource]) -> tuple[dict[str, MovedSource], dict[str, str]]:
        """Return weights with correction, and the reasons why others have none, by name.

        `restored` are the restored values of `moments`, without lossless ones.
        """
        trained, restored = self.trained or {}, restored if self.restored is None else self.restored
        known = self.tracker.lost(trained, self.step)
        lost = {}
        for parameter, one in known.items():
            names, second = trained[parameter].names, one.decay.second
            if names[one.decay.moment] in restored:
                lost[parameter] = replace(
                    one,
                    restored=restored[names[one.decay.moment]],
                    restored_second=None if second is None else restored.get(names[second]),
                )
        measured = self.tracker.shares(trained, self.step, lost, self.pool)
        shares = (
            dict.fromkeys((name for name, one in lost.items() if one.decay.total), USUAL_SHARE) | measured
        )
        chunks = CachedChunks(HELD_BYTES)
        moved = {}
        for parameter, share in shares.items():
            name, weight = trained[parameter].name, trained[parameter].weight
            if share > 0:
                cached = CachedTensor(lost[parameter].moved(weight, share), name, chunks)
                moved[name] = MovedSource(weight, cached, share)
                if (rounded := trained[parameter].rounded) is not None:
                    name, weight = rounded
                    cached = CachedTensor(_rounded_from(weight, cached), name, chunks)
                    moved[name] = MovedSource(weight, cached, share)
        others = (one for parameter, one in trained.items() if parameter not in known)
        notes = {one.name: UNKNOWN_DECAY for one in others if FIRST_MOMENTS & one.names.keys()}
        return moved, notes | {
            trained[parameter].name: UNKNOWN for parameter in shares.keys() - measured.keys()
        }


def bounds_of(trained: Mapping[str, ParamState]) -> dict[str, SideInformation]:
    """Return side information of first moments by their names: bounds, and whether updates are unknown."""
    guides = {}
    for one in trained.values():
        if (lost := _lost(one, None)) is not None:
            guides[one.names[lost.decay.moment]] = lost.bound
        elif "exp_avg" in one.names:
            bound = bound_of(one.settings, one.state)
            guides[one.names["exp_avg"]] = SideInformation(bound=bound, is_uncorrected=True)
    return guides


def _rounded_from(weight: TensorSource, master: TensorSource) -> LazySource:
    """Return a 16-bit weight, rounded from its fp32 master."""
    return LazySource.of(weight, lambda begin, end: rounded(master.patterns(begin, end), weight))


def _n_updates(last: _WeightSnapshot, one: ParamState, step: int | None) -> float:
    """Return the number of updates of a parameter since its snapshot; 0 if unknown."""
    if one.updates is not None:
        return one.updates - (last.updates or 0.0)
    return 0.0 if step is None or last.step is None else step - last.step


def stride_of(n: int) -> int:
    """Return the stride of the sampled elements among n."""
    return max(-(-n // SAMPLED), 1)


def _sampled(source: TensorSource) -> Sample:
    return _at_samples(source, lambda begin, end: floats_in(source, begin, end))


def _at_samples(source: TensorSource, values: Callable[[int, int], Sample]) -> Sample:
    """Return the sampled elements of values that are computed chunk by chunk, float32 [n]."""
    stride = stride_of(source.n_patterns)
    return np.concatenate([values(b, e)[-b % stride :: stride] for b, e in source.chunk_bounds()])


def _rms(sample: Sample) -> float:
    return float(np.sqrt(np.square(sample, dtype=np.float64).mean())) if len(sample) else 0.0
