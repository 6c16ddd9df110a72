"""The search with one knob: all steps follow from one multiplier, which is what is looked for.

The sum of expected loss change and lambda times bits is smallest where every part of a checkpoint pays the
same loss for its last bit. For small errors the change is a_i * step_i^2 and the bits are n_i * log2(1 /
step_i), so step_i = sqrt(lambda * n_i / (2 ln 2 * a_i)): all steps are proportional to sqrt(lambda), which is
the multiplier of `Method.scaled`. What is special to a tensor, a_i, is in the reference steps already: in
`ckptz.quant.grid.row_steps` for weights, in the roots of second moments for first ones. Moments follow in
proportion up to 8 octaves: 16 cost 0.4 % more of the resumed loss for 0.05 bit (docs/search.md).

The share of a budget that is used then grows about with the multiplier's square. Two measurements give its
power, and the next trial is where the line through them meets the budget, in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from ckptz.methods.method import Method
from ckptz.search.trials import FULL, History

MAX_FIRST: Final = 8  # trials of a first checkpoint
MAX_LATER: Final = 3  # of one whose parent says where to begin
SMALLEST, LARGEST = 2.0**-6, 2.0**6  # multipliers; below, weights take 8 bits and more
TARGET: Final = 0.95  # share of the budget to aim at: half of the near misses would be for nothing
CLOSE: Final = 0.88  # from there on, a larger multiplier saves under 2 % of the bytes
CLOSE_LATER: Final = 0.7  # likewise, but an evaluation would cost more than the 5 % that it may save
NARROW: Final = 0.03  # a bracket of 3 % in the multiplier is worth 0.04 bits a weight
USUAL_POWER: Final = 2.0
POWERS: Final = (1.0, 4.0)  # what is believed of two measurements, which are noisy
LEAST_USED: Final = 0.02  # less may be noise, or an improvement
LONGEST: Final = math.log(4)  # of one extrapolation
MARGIN: Final = 0.15  # of a bracket, at either end: a trial must narrow it
SAME: Final = 5e-3  # multipliers that differ by less are one
APART: Final = 0.12  # in logarithms, of trials side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class OneKnob:
    """Looks for the largest multiplier that keeps the budget.

    Measurements may be noisy: of several that keep the budget the largest counts, whatever failed below.
    """

    template: Method  # steps at a multiplier of 1, and everything that does not follow from it
    start: float = 1.0  # the first multiplier to try
    most: int = MAX_FIRST  # trials, those of strategies before this one included
    close: float = CLOSE  # share of the budget that is near enough to it
    name: str = "one-knob"

    def propose(self, history: History, n: int) -> Sequence[Method]:
        room = min(n, self.most - len(history))
        points = _Bracket.of(history)
        if room < 1 or points.is_done(self.close):
            return ()
        tried = {outcome.config for outcome in history}
        found = map(self.template.scaled, map(self._multiplier, points.around(math.log(self.start))))
        configs = dict.fromkeys(config for config in found if config not in tried)
        return list(configs)[:room]

    def _multiplier(self, x: float) -> float:
        """Give a multiplier of three digits, which plans and records show as they are; or the parent's own.

        Only at the very same one does the grid of the parent's file stay.
        """
        found = float(f"{math.exp(x):.3g}")
        return self.start if math.isclose(found, self.start, rel_tol=SAME) else found


@dataclass(frozen=True, slots=True)
class _Point:
    """A trial: logarithms of its multiplier and of the share of the budget that it used."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class _Bracket:
    """The largest multiplier that kept the budget, and the smallest above it that did not."""

    kept: _Point | None  # None if none did
    broken: _Point | None  # None if all above did
    power: float  # of the multiplier, by which the share that is used grows

    @classmethod
    def of(cls, history: History) -> Self:
        trials = [(o.config.multiplier, max(o.used, LEAST_USED)) for o in history]
        points = sorted((_Point(math.log(x), math.log(y)) for x, y in trials), key=lambda p: p.x)
        kept = max((p for p in points if p.y <= math.log(FULL)), key=lambda p: p.x, default=None)
        above = [p for p in points if kept is None or p.x > kept.x]
        return cls(kept, above[0] if above else None, _power(points))

    def is_done(self, close: float) -> bool:
        """Tell whether another trial would gain too little, or leave the range."""
        if self.kept is None:
            return self.broken is not None and self.broken.x <= math.log(SMALLEST)
        if self.kept.y >= math.log(close) or self.kept.x >= math.log(LARGEST):
            return True
        return self.broken is not None and self.broken.x - self.kept.x <= NARROW

    def around(self, start: float) -> Iterator[float]:
        """Say where to measure next, as logarithms of multipliers, best first."""
        x = self._next(start)
        low = math.log(SMALLEST) if self.kept is None else self.kept.x
        high = math.log(LARGEST) if self.broken is None else self.broken.x
        yield _within(x, low, high)
        for i in range(1, 9):
            yield from (other for other in (x - i * APART, x + i * APART) if low < other < high)

    def _next(self, start: float) -> float:
        if self.kept is not None and self.broken is not None:
            share = 0.5  # where the line through both meets the target, not too near to either
            if math.isfinite(self.broken.y):
                wanted = (math.log(TARGET) - self.kept.y) / (self.broken.y - self.kept.y)
                share = _within(wanted, MARGIN, 1 - MARGIN)
            return self.kept.x + share * (self.broken.x - self.kept.x)
        known = self.kept or self.broken
        if known is None:
            return start
        return known.x + _within((math.log(TARGET) - known.y) / self.power, -LONGEST, LONGEST)


def _power(points: Sequence[_Point]) -> float:
    """Fit the power of the multiplier by which the used share grows, to the two trials nearest the budget."""
    usable = [p for p in points if math.log(LEAST_USED) < p.y < math.inf]
    near = sorted(usable, key=lambda p: abs(p.y))[:2]
    if len(near) < 2 or near[0].x == near[1].x:
        return USUAL_POWER
    return _within((near[1].y - near[0].y) / (near[1].x - near[0].x), *POWERS)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
