"""The judge: what a trial's values say against those of the exact state, and how much of a budget they use.

An evaluation that returns the losses of its answers one by one is judged pair by pair, by two numbers:

    change     of the mean, in either direction: at most the budget
    changes    half the mean square of the changes of single answers: at most ALLOWED times the budget

Both are shares of the exact mean where the budget is one. A mean over few answers cannot tell a good file
from a bad one, as changes of single answers cancel in it by chance; their squares do not cancel. For losses
in nats, small changes and a calibrated model the second number is about the Kullback-Leibler divergence from
the exact model; of right and wrong answers it is half the share of those that changed.

Sums over several answers come with their counts, and both numbers are then by what is counted: the change of
a sum stands for changes that are independent of each other, as those of a text's tokens about are. A mean
over a piece cannot tell how long the piece was, and longer ones make the second number smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ckptz.errors import ConfigError
from ckptz.kernels.floats import Reals

ALLOWED: Final = 2.0  # of the budget, for half the mean square: see docs/search.md
RESOLVED: Final = 0.5  # of the budget: with a larger standard error the mean does not decide
SURE: Final = 3.0  # standard errors: what is beyond the budget by more is no chance, however few the answers
ANSWER: Final = "answer"  # what one value is, where an evaluation does not say


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The measured values of a metric: one for each answer, or a single one."""

    metric: str
    values: Reals  # [n]; sums where there are counts
    lower_is_better: bool
    counts: Reals | None = None  # what each value sums up [n]; None for one each
    unit: str = ANSWER  # what one value is, or what the counts count

    @property
    def value(self) -> float:
        """Give the mean over all answers."""
        return float(self.values.sum() / self.total)

    @property
    def total(self) -> float:
        """Give the number of answers."""
        return float(len(self.values) if self.counts is None else self.counts.sum())


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest change of a value: a share of the exact one, or a difference."""

    max_drop: float
    is_relative: bool

    def in_units(self, exact: Reading) -> float:
        """Give the limit in the unit of the value."""
        return self.max_drop * exact.value if self.is_relative else self.max_drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The part of one budget that one trial used.

    Attributes:
        metric: what was measured.
        unit: what one value is, such as a token.
        n_values: how many values there were; of a single one nothing is known of chance.
        allowed: the largest change of the mean; twice that for `changes`.
        is_relative: `allowed`, `change`, `error` and `changes` are shares of the exact mean.
        change: of the mean; above 0 is worse. None where a value is not finite.
        error: the standard error of `change`, or None.
        changes: half the mean square of the changes of single values, or None.
        used: share of the budget that is used; at most 1 keeps it. None where it is not finite.
    """

    metric: str
    unit: str
    n_values: int
    allowed: float
    is_relative: bool
    change: float | None = None
    error: float | None = None
    changes: float | None = None
    used: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the budget is kept."""
        return self.used is not None and self.used <= 1

    @property
    def is_resolved(self) -> bool:
        """Whether the mean decides: its standard error is at most half the budget, or is not known."""
        return self.error is None or self.error <= RESOLVED * self.allowed

    def within(self, allowed: float) -> Judgement:
        """Give the judgement of the same changes by another limit."""
        judged = replace(self, allowed=allowed)
        return replace(judged, used=_finite(_used(judged)))

    @property
    def n_wanted(self) -> float:
        """Give how many values it takes for the mean to decide; NaN where that cannot be known."""
        if self.error is None or not self.allowed:
            return math.nan
        return self.n_values * (self.error / (RESOLVED * self.allowed)) ** 2


def judge(limit: Limit, exact: Reading, found: Reading) -> Judgement:
    """Compare the values of a trial with those of the exact state, which are finite.

    Raises:
        ConfigError: they are not of the same answers.
    """
    _check_same_answers(exact, found)
    judged = Judgement(
        metric=exact.metric,
        unit=exact.unit,
        n_values=len(exact.values),
        allowed=limit.max_drop,
        is_relative=limit.is_relative,
    )
    scale = exact.total * (exact.value if limit.is_relative else 1.0)
    with np.errstate(all="ignore"):  # what overflows is not finite, and so not kept
        worse = found.values - exact.values if exact.lower_is_better else exact.values - found.values
        judged = replace(judged, change=_finite(worse.sum() / scale))
        if (n := len(worse)) > 1:
            counts = 1.0 if exact.counts is None else exact.counts
            scatter = np.square(worse - counts * (worse.sum() / exact.total)).sum() * n / (n - 1)
            error, changes = np.sqrt(scatter) / scale, np.square(worse).sum() / 2 / scale
            judged = replace(judged, error=_finite(error), changes=_finite(changes))
    return judged.within(limit.max_drop)


def _used(judged: Judgement) -> float:
    """Give the share of the budget that the larger of both numbers uses."""
    if judged.change is None or (judged.n_values > 1 and judged.changes is None):
        return math.inf
    change, allowed = abs(judged.change), judged.allowed
    if not judged.is_resolved:
        change = max(change - SURE * (judged.error or 0.0), 0.0)
    return max(_share(change, allowed), _share(judged.changes or 0.0, ALLOWED * allowed))


def _share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _check_same_answers(exact: Reading, found: Reading) -> None:
    """Refuse values that cannot be compared one by one."""
    n_exact, n_found = len(exact.values), len(found.values)
    what = f"{exact.metric}: the evaluation returned"
    if n_exact != n_found:
        raise ConfigError(
            f"{what} {n_found} values for a trial and {n_exact} for the exact tensors; return those of the "
            "same answers in the same order each time"
        )
    counts = [np.ones(n_exact) if one.counts is None else one.counts for one in (exact, found)]
    if len(unequal := np.flatnonzero(counts[0] != counts[1])):
        i = int(unequal[0])
        raise ConfigError(
            f"{what} a sum over {counts[1][i]:g} at place {i} for a trial and over {counts[0][i]:g} for the "
            "exact tensors; return those of the same answers in the same order each time"
        )
