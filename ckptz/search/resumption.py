"""The resume probe: the loss of a training run that goes on from the restored state.

A loss at once flatters what sends too little: stale weights act like an average over steps. What a
checkpoint is for is to train on, so that is measured. Two more runs say what the measurement is worth:
the exact state again, and the exact state with a little noise on its weights. A third, twice as long, says
how many steps of training a difference stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ckptz.errors import ConfigError
from ckptz.search.measures import Exact, Prepared, State, digest_of, name_of, number

DISTURBANCE: Final = 0.01  # of the spread of a tensor: changes less than any budget is about
METRIC: Final = "resume"


@dataclass(frozen=True, slots=True)
class ResumeProbe:
    """A budget's quality: the loss after some steps of training from a state.

    Before the first trial it runs four times: from the exact state, from it again, from it with noise, and
    from it twice as far. The larger of the first two differences is the noise floor. Where that is above the
    budget, the budget cannot be measured, and counts as not met. The last one is the slope: what is lost,
    over what a step gains, are steps of training lost. Where the loss falls by less than the noise floor,
    that is not measurable.

    Attributes:
        resume: `resume(state, n_steps) -> loss`: trains on from the state and returns a validation loss, best
            a mean over its last steps. It builds its own model and optimizer, and restores its own position
            in the data and its own random numbers. The state has all tensors of the checkpoint, optimizer
            state included, by their names in it.
        n_steps: how far to train.
        noise_floor: if it is known; two runs less then.

    Example:
        >>> from ckptz import Budget, ResumeProbe
        >>> probe = ResumeProbe(lambda state, n_steps: 2.0 + float(state["weight"].var()), n_steps=10)
        >>> Budget(probe, 0.002).name
        'resume'
    """

    resume: Callable[[State, int], Any]
    n_steps: int = 20
    noise_floor: float | None = None
    metric: ClassVar[str] = METRIC
    trains: ClassVar[bool] = True  # and so needs optimizer state

    def __post_init__(self) -> None:
        if not callable(self.resume):
            raise ConfigError(f"a resume probe needs a function, got {self.resume!r}")
        if self.n_steps < 1:
            raise ConfigError(f"a resume probe trains for at least 1 step, got {self.n_steps}")
        if self.noise_floor is not None and not self.noise_floor >= 0:
            raise ConfigError(f"a noise floor must be a number from 0, got {self.noise_floor}")

    @property
    def data_digest(self) -> str | None:
        """A digest of the data, as `resume` gives it."""
        return digest_of(self.resume)

    def against(self, exact: Exact) -> Prepared:
        """Measure the exact state and the noise of the measurement, for trials to be compared with."""
        resumed = _Resumed(self.resume, self.n_steps)
        loss, noise = resumed(exact.state()), self.noise_floor
        if not math.isfinite(loss):
            return Prepared(resumed, loss, noise or 0.0)
        if noise is None:
            others = (resumed(exact.state()), resumed(exact.disturbed(DISTURBANCE, seed=0)))
            apart = [abs(other - loss) for other in others]
            noise = max(one if math.isfinite(one) else math.inf for one in apart)
        gain = loss - replace(resumed, n_steps=2 * self.n_steps)(exact.state())
        return Prepared(resumed, loss, noise, gain / self.n_steps if gain > noise else None)


@dataclass(frozen=True, slots=True)
class _Resumed:
    """The loss after the steps; can be sent to another process."""

    resume: Callable[[State, int], Any]
    n_steps: int
    metric: ClassVar[str] = METRIC
    trains: ClassVar[bool] = True

    def __call__(self, state: State) -> float:
        return number(self.resume(state, self.n_steps), name_of(self.resume))
