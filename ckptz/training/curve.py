"""Estimate of what lossy restarts cost a run, from the metric passed to each save.

Each value is compared with a line through the two values before it. Deviations without a restart in between
measure the curvature and the noise of the curve; a value after a lossy restart that is worse by more is the
cost of the restart. A run that restarts at every save has no curve to compare with.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, Final, Self, TypeGuard

PROMISED: Final = 0.005  # of the metric, that all restarts of a run may cost together
SURE: Final = 2.0  # standard errors
MIN_PLAIN: Final = 4  # distances without a restart; of fewer the spread is not known
MOST_KEPT: Final = 16  # distances of each kind
MAX_FINER: Final = 4  # times that steps are halved
NOT_FINITE: Final = "the metric is not finite, so it does not tell what restarts cost"


class Curve:
    """The metrics of a run.

    Attributes:
        n_finer: times that files were made finer by half, because restarts had cost too much.
    """

    def __init__(self, *, lower_is_better: bool) -> None:
        self.n_finer = 0
        self._sign = 1.0 if lower_is_better else -1.0
        self._points: list[tuple[int, float]] = []  # the last two
        self._plain: list[float] = []  # distances without a restart
        self._restarted: list[float] = []  # those behind lossy ones, since files were made finer
        self._is_lossy = False  # whether the last restart was lossy, and no metric has come since

    def add(self, step: int, metric: float) -> tuple[str, ...]:
        """Add the metric of a save; return notes for the user."""
        if not math.isfinite(metric):
            self._points.clear()
            return (NOT_FINITE,)
        distance, was_lossy, self._is_lossy = self._distance(step, metric), self._is_lossy, False
        # The line through points on both sides of a restart is not that of the curve.
        self._points = [*([] if was_lossy else self._points[-1:]), (step, metric)]
        if distance is None:
            return ()
        kept = self._restarted if was_lossy else self._plain
        kept.append(distance)
        del kept[:-MOST_KEPT]
        return self._judged() if was_lossy else ()

    def _distance(self, step: int, metric: float) -> float | None:
        """Return how much worse a metric is than the line through the two before, as a share of the last."""
        if len(self._points) < 2:
            return None
        (first, one), (second, other) = self._points
        if not first < second < step or not other:
            return None
        line = other + (other - one) * (step - second) / (second - first)
        distance = self._sign * (metric - line) / abs(other)
        return distance if math.isfinite(distance) else None

    def _judged(self) -> tuple[str, ...]:
        n = len(self._restarted)
        if len(self._plain) < MIN_PLAIN or self.n_finer == MAX_FINER:
            return ()
        cost = n * (statistics.fmean(self._restarted) - statistics.fmean(self._plain))
        error = n * statistics.stdev(self._plain) * math.sqrt(1 / n + 1 / len(self._plain))
        if cost < PROMISED or cost < SURE * error:
            return ()
        self.n_finer += 1
        self._restarted.clear()
        return (
            f"{n} lossy restarts have cost {100 * cost:.2g} +- {100 * SURE * error:.1g} % of the metric, "
            f"more than the {100 * PROMISED:g} % that are promised: files have half the steps from now on",
        )

    @classmethod
    def restored(cls, state: Any, *, lower_is_better: bool, is_lossy: bool) -> Self:
        """Make the curve of a run that goes on from what `state` returned; a new one from anything else.

        Args:
            state: from a file.
            lower_is_better: what better means.
            is_lossy: whether the run was restored from files that lose something.
        """
        made = cls(lower_is_better=lower_is_better)
        made._is_lossy = is_lossy
        if not isinstance(state, dict):
            return made
        points, n_finer = state.get("points"), state.get("finer")
        if isinstance(n_finer, int) and 0 <= n_finer <= MAX_FINER:
            made.n_finer = n_finer
        plain, restarted = state.get("plain"), state.get("restarted")
        if _are_numbers(plain) and _are_numbers(restarted):
            made._plain, made._restarted = [*plain], [*restarted]
        if isinstance(points, list) and all(_are_numbers(one) and len(one) == 2 for one in points):
            made._points = [(int(step), metric) for step, metric in points[-2:]]
        return made

    def state(self) -> dict[str, Any] | None:
        """Return plain values for the state of a run; None where no metric was given."""
        if not (self._points or self._plain or self._restarted or self.n_finer):
            return None
        return {
            "points": [[step, metric] for step, metric in self._points],
            "plain": [*self._plain],
            "restarted": [*self._restarted],
            "finer": self.n_finer,
        }


def _are_numbers(values: Any) -> TypeGuard[list[float]]:
    """Return whether a value from a file is a list of finite numbers."""
    return isinstance(values, list) and all(
        isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in values
    )
