"""Estimate of the training that a run still has before it, from the learning rates of its optimizer.

What a restart adds to weights as noise later training makes good, the more the more it moves them. Near the
end of a schedule little is left, so files of these steps have finer steps.

Rates to come are those that a torch scheduler in `extra` gives a copy of its optimizer's groups, up to the
last one that differs. Where none can be read, they follow from how far rates have fallen: after updates at
rates that add up to S, and with a rate of the share f of the largest one, about S f^2 / (1 - f^2) are left.
That is exact for a line to zero, and within a quarter of the truth for the last half of a cosine to a tenth.
It is too much where rates stay before they fall: what a line through the last two rates leaves counts if it
is less than half of that, as it never is on a cosine. A tenth of the largest rate counts as the end if rates
have just fallen to it: most cosines end there.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ckptz.codec.method import USUAL_RESTORES

ENOUGH: Final = 4.0  # intervals to come, like the last one, at which steps are as usual
# Intervals that errors count for at the very end. With it, steps at the end are a tenth of the usual one:
# noise counts by the share 1 / (1 + intervals to come) that is left of it, and is cheapest if steps follow
# the root of that. With 0.16 the last file of a language model, 90 updates behind its base, was 0.17 % worse
# than its weights, with 0.04 0.08 %.
AT_THE_END: Final = 0.04
USUAL_END: Final = 0.1  # of the largest rate, where most cosines end
MOST_STEPS: Final = 1 << 16  # of a scheduler that are tried
LARGEST_RATE: Final = 1e100  # sums and squares of such stay finite
NEGLIGIBLE: Final = 1e-4  # of the rate now
UNKNOWN: Final = 0.5  # of the usual step, where rates rise or cannot be known
UNREADABLE: Final = "{} does not tell the rates to come, so weights have at most half of the usual step"
RISING: Final = "rates rise, so weights have half of the usual step until they fall"


class Schedule:
    """The rates of a run, as its saves and restores have seen them.

    Attributes:
        largest: rate of the group with the most elements, so far.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._last: tuple[float, float] | None = None  # rate and updates at the last save or restore

    def mark(self, optimizers: Sequence[Optimizer], step: int) -> None:
        """Note the rates of a save, of a restore or of the first step."""
        group = _main_group(optimizers)
        if group is not None and (rate := rate_of(group)) is not None:
            self.largest = max(self.largest, rate, rate_of(group, "initial_lr") or 0.0)
            self._last = rate, _n_updates(optimizers, group, step)

    @property
    def has_fallen(self) -> bool:
        """Return whether rates were larger than at the last save or restore."""
        return self._last is not None and self._last[0] < self.largest

    def restore(self, optimizers: Sequence[Optimizer], step: int, largest: object) -> None:
        """Record the learning rates at a restore; `largest` is the largest one in the saved state."""
        self.largest = _rate(largest) or 0.0
        self.mark(optimizers, step)

    def share_of_step(
        self, optimizers: Sequence[Optimizer], extra: Iterable[object], step: int
    ) -> tuple[float, tuple[str, ...]]:
        """Return what steps of weights are to be multiplied with, at most 1, and notes for the user.

        Args:
            optimizers: of the run; the group with the most elements counts.
            extra: what else the run saves, schedulers among it.
            step: of the save.
        """
        group = _main_group(optimizers)
        rate = None if group is None else rate_of(group)
        if group is None or rate is None:
            return 1.0, ()
        n_updates = _n_updates(optimizers, group, step)
        largest = max(self.largest, rate, rate_of(group, "initial_lr") or 0.0)
        so_far = n_updates * (largest + rate) / 2
        before, at = self._last or (rate, n_updates)
        since = max(n_updates - at, 0.0)
        if since and rate > before:
            return UNKNOWN, (RISING,)
        has_fallen = since > 0 and rate < before
        interval = since * (before + rate) / 2 if since else so_far / USUAL_RESTORES
        if not interval > 0:
            return 1.0, ()
        share, notes = 1.0, list[str]()
        schedulers = [one for one in extra if isinstance(one, LRScheduler)]
        schedulers = [one for one in schedulers if any(one.optimizer is own for own in optimizers)]
        left = so_far * _left_of_fall(rate / largest, may_end=has_fallen and not schedulers)
        if has_fallen:
            on_line = since * rate / 2 * (rate / (before - rate))
            left = on_line if on_line < left / 2 else left
        for one in schedulers:
            last = getattr(one, "last_epoch", 0)
            updates = max(n_updates / last, 1.0) if last > 0 else 1.0  # of a step of the scheduler
            known = rates_to_come(one, group, ENOUGH * interval / updates, has_fallen=has_fallen)
            if known is None:
                share = UNKNOWN
                notes.append(UNREADABLE.format(type(one).__name__))
            elif known < math.inf:
                left = known * updates
        return min(share, _share(left / interval)), tuple(notes)


def is_end(share: float) -> bool:
    """Return whether a share of the usual step is that of a file behind which no training comes."""
    return share <= _share(0.0)


def _n_updates(optimizers: Sequence[Optimizer], group: Mapping[str, Any], step: int) -> float:
    """Count the updates of a group as its optimizer does, or by the steps of the run."""
    for optimizer in optimizers:
        for one in group["params"][:1]:
            counted = optimizer.state[one].get("step") if one in optimizer.state else None
            if isinstance(counted, int | float | torch.Tensor):
                return float(counted)
    return float(step)


def _left_of_fall(fallen: float, *, may_end: bool) -> float:
    """Return what is left to come of rates so far, by the share of the largest rate that the last one is."""
    if fallen >= 1:
        return math.inf
    is_end = may_end and math.isclose(fallen, USUAL_END, rel_tol=0.05)
    return 0.0 if is_end else fallen**2 / (1 - fallen**2)


def _share(intervals: float) -> float:
    """Return the share in half octaves: files of equal steps have one grid."""
    root = math.sqrt((intervals + AT_THE_END) / (ENOUGH + AT_THE_END))
    return float(2.0 ** (round(2 * math.log2(min(root, 1.0))) / 2))


def _main_group(optimizers: Sequence[Optimizer]) -> dict[str, Any] | None:
    """Find the parameter group with the most elements; None where there is none."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return max(groups, key=lambda group: sum(one.numel() for one in group["params"]), default=None)


def rate_of(group: Mapping[str, Any], key: str = "lr") -> float | None:
    """Return a rate of a parameter group; None if it is not a finite number of at least 0."""
    return _rate(group.get(key))


def _rate(value: Any) -> float | None:
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    is_rate = isinstance(value, int | float) and 0 <= value <= LARGEST_RATE
    return float(value) if is_rate else None


def rates_to_come(
    scheduler: LRScheduler, group: Mapping[str, Any], enough: float, *, has_fallen: bool
) -> float | None:
    """Simulate a scheduler and add up the rates of a group at its next steps.

    They count to the last one that differs from the one before it, and to the first that rises after one has
    fallen: where a schedule ends nothing says, and behind both it may have ended, as a cosine does that would
    rise again if it were stepped on. Nothing of the run is changed.

    Args:
        scheduler: of an optimizer that has the group.
        group: one of its groups.
        enough: sum at which more need not be known.
        has_fallen: whether the rate now is below an earlier one.

    Returns:
        Infinity if all rates stay as they are, as far as they matter; None if the scheduler cannot be
        simulated: it goes by a metric, or raises.
    """
    groups = scheduler.optimizer.param_groups
    at = next((i for i, one in enumerate(groups) if one is group), None)
    rate = rate_of(group)
    if isinstance(scheduler, ReduceLROnPlateau) or at is None or rate is None:
        return None
    stand_in = copy.copy(scheduler.optimizer)
    stand_in.param_groups = [{**one, "params": []} for one in groups]
    first, total, known = rate, 0.0, math.inf
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of schedulers that are ahead of their optimizer
            for next_rate in _stepped(_copied(scheduler, stand_in), stand_in.param_groups[at]):
                if has_fallen and next_rate > rate:
                    known = total
                    break
                total += next_rate
                if next_rate != rate:
                    known, has_fallen = total, has_fallen or next_rate < rate
                rate = next_rate
                if total >= enough or rate <= NEGLIGIBLE * first:
                    break
    except Exception:  # of functions that users wrote, too
        return None
    return known


def _stepped(scheduler: LRScheduler, group: Mapping[str, Any]) -> Iterator[float]:
    """Yield the rates of a group after each step, to the scheduler's own end if it has one."""
    n_left = MOST_STEPS
    if isinstance(total := getattr(scheduler, "total_steps", None), int):  # of OneCycleLR, which then raises
        n_left = min(total - 1 - scheduler.last_epoch, n_left)
    for _ in range(n_left):
        scheduler.step()
        if (rate := rate_of(group)) is None:
            return
        yield rate


def _copied(scheduler: LRScheduler, optimizer: Optimizer) -> LRScheduler:
    """Copy a scheduler, including nested schedulers, for another optimizer."""
    own = copy.copy(scheduler)
    own.__dict__ = {
        key: copy.copy(value) if isinstance(value, list | dict) else value
        for key, value in scheduler.__dict__.items()
    }
    own.optimizer = optimizer
    if "_schedulers" in own.__dict__:
        own.__dict__["_schedulers"] = [_copied(one, optimizer) for one in own.__dict__["_schedulers"]]
    return own
