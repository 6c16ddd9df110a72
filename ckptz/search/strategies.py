"""Strategies: what a search tries next, of what it has tried so far.

A strategy proposes configurations, somebody tries them, and the best that fits is kept. It is a function of
what was tried and keeps nothing of its own, so a search can be stopped, replayed and tested without a model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.method import Method
from ckptz.search.spaces import LARGEST, SMALLEST, Cube, MultiplierSpace, Point

FULL: Final = 1.0  # share of the budget that may be used


@dataclass(frozen=True, slots=True)
class Outcome:
    """The size and the quality of one configuration that was tried."""

    config: Method  # what was tried
    used: float  # share of the budget that is used; infinite if it could not be measured
    n_bytes: int  # size of the file
    by_changes: float = math.inf  # share that the changes of single answers use; infinite if not measured

    @property
    def is_feasible(self) -> bool:
        """True if the budget is kept."""
        return self.used <= FULL


History = Sequence[Outcome]
Predict = Callable[[Method], float]
Try = Callable[[Method, str], Outcome]


# Each has a name, which is reported with a trial, and `propose(history)`: what to try next after all that was
# tried, in order, by other strategies too; None if nothing is left to learn.
Strategy: TypeAlias = "Guided | Neighbourhood | Finer | MultiplierSearch"


def best_of(history: History) -> Outcome | None:
    """Find the smallest outcome that keeps the budget."""
    return min((o for o in history if o.is_feasible), key=lambda o: o.n_bytes, default=None)


def run_stages(stages: Sequence[Strategy], try_one: Try, most: int | None = None) -> list[Outcome]:
    """Search with one strategy after another until one of them leaves something that keeps the budget.

    Args:
        stages: strategies, the cheapest first.
        try_one: tries a configuration; is told the strategy's name.
        most: trials in all.

    Returns:
        All outcomes, in order.
    """
    history: list[Outcome] = []
    for stage in stages:
        while len(history) != most and (config := stage.propose(history)) is not None:
            history.append(try_one(config, stage.name))
        if best_of(history) is not None:
            break
    return history


DRAWS: Final = 3  # of the rounding of one configuration


def _is_chance(history: History, config: Method) -> bool:
    """Return whether only this configuration was tried, and only its mean exceeded the budget each time.

    Where weights are rounded at random, errors of the first order move a mean up or down by chance. Another
    draw may keep the budget at the same size, on the levels of the base, which other settings would leave.
    """
    return (
        0 < len(history) < DRAWS
        and all(one.config == config and one.by_changes <= FULL < one.used for one in history)
        and len({one.used for one in history}) == len(history)
    )


# --- cubes --------------------------------------------------------------------------------------
Mask = NDArray[np.bool_]
MIN_GAIN: Final = 0.005  # a trial must promise to be so much smaller than the best; predictions err as much
# Measurements are noisy: a trial that uses up to 1 + DOUBT of the budget does not exclude configurations
# within NEAR steps of it.
DOUBT, NEAR = 0.5, 2
ENOUGH: Final = 20  # trials, those of strategies before included: more gain under 0.1 % on average
MAX_SHARE: Final = 0.25  # of the configurations: the descent ends there at the latest


@dataclass(frozen=True, kw_only=True)
class Guided:
    """Finds the smallest configuration that keeps a budget, where quality falls along every axis of a cube.

    Each trial excludes: one that breaks the budget everything at least as aggressive, one that keeps it
    everything that is predicted to be larger. The next to try is the one that excludes most whichever way it
    turns out, which for a whole cube is near the middle of its diagonal; what is left are sub-cubes, to
    which the same applies. This is the guided search of Inshrinkerator (arXiv 2306.11800, section 5) with
    predicted sizes as a second order.

    Real quality does not fall along every axis: accuracy on few samples jumps, and k-means spends its levels
    elsewhere when fewer values are protected. Once nothing is left to exclude, the search therefore descends:
    it tries the neighbours of the best one, the smallest first, and moves on to any that keeps the budget.

    The last trial of all, if nothing has kept the budget, is the mildest that is left.
    """

    cubes: Sequence[Cube]  # what is searched
    predict: Predict  # bytes of a configuration's file
    n_left: int = 0  # trials that are left to others if nothing has kept the budget
    name: str = "guided"

    @functools.cached_property
    def _points(self) -> _Points:
        return _Points.of(self.cubes, self.predict)

    def propose(self, history: History) -> Method | None:
        points, best = self._points, best_of(history)
        most = ENOUGH - (self.n_left if best is None else 0)
        if len(history) >= most:
            return None
        open_ = np.ones(len(points.configs), np.bool_)
        for outcome in history:
            self._exclude(points, open_, outcome)
        if open_.any():
            left = np.flatnonzero(open_)
            if best is None and len(history) == most - 1:
                return points.configs[left[points.sizes[left].argmax()]]
            return points.configs[_middle(points, left)]
        return None if best is None else _beside(points, history, best)

    def _exclude(self, points: _Points, open_: Mask, outcome: Outcome) -> None:
        """Close the points that need no trial after this outcome."""
        tried = points.places.get(outcome.config, [])
        if outcome.is_feasible:
            size = points.sizes[tried[0]] if tried else outcome.n_bytes
            open_ &= points.sizes < size * (1 - MIN_GAIN)
        for i in tried:
            open_[i] = False
            if not outcome.is_feasible:
                excluded = points.is_beyond[:, i]
                if outcome.used <= FULL + DOUBT:
                    excluded = excluded & (points.steps - points.steps[i] > NEAR)
                open_ &= ~excluded


@dataclass(frozen=True, slots=True)
class _Points:
    """All points of all cubes."""

    configs: list[Method]  # one a point; without pruning, cubes share theirs
    places: dict[Method, list[int]]  # the points of each configuration
    at: NDArray[np.int64]  # the points, steps from the mildest one by axis [n, axes]
    home: NDArray[np.int64]  # index of each one's cube [n]
    sizes: NDArray[np.float64]  # predicted bytes [n]
    steps: NDArray[np.int64]  # from the mildest point, over all axes [n]
    is_beyond: Mask  # whether the first is at least as aggressive as the second, in one cube [n, n]

    @classmethod
    def of(cls, cubes: Sequence[Cube], predict: Predict) -> _Points:
        points = [(i, point) for i, cube in enumerate(cubes) for point in cube.points]
        configs = [cubes[i].config(point) for i, point in points]
        at = np.array([point for _, point in points])
        home = np.array([i for i, _ in points])
        is_beyond = (at[:, None] >= at[None, :]).all(axis=2) & (home[:, None] == home[None, :])
        places: dict[Method, list[int]] = {}
        for i, config in enumerate(configs):
            places.setdefault(config, []).append(i)
        sizes = np.array([predict(config) for config in configs])
        return cls(configs, places, at, home, sizes, at.sum(axis=1), is_beyond)

    def beside(self, i: int) -> Mask:
        """Mark points of the same cube that are at most one step away along each axis [n]."""
        near: Mask = (np.abs(self.at - self.at[i]) <= 1).all(axis=1) & (self.home == self.home[i])
        return near


def _beside(points: _Points, history: History, best: Outcome) -> Method | None:
    """Return the smallest untried neighbour of the best configuration, if it is predicted to be smaller."""
    places = points.places.get(best.config, [])
    if not places or len(history) >= int(MAX_SHARE * len(points.places)):
        return None
    tried = {outcome.config for outcome in history}
    is_near = np.logical_or.reduce([points.beside(i) for i in places])
    is_near &= points.sizes < points.sizes[places[0]] * (1 - MIN_GAIN)
    ordered = sorted(np.flatnonzero(is_near), key=lambda i: points.sizes[i])
    return next((points.configs[i] for i in ordered if points.configs[i] not in tried), None)


def _middle(points: _Points, left: NDArray[np.int64]) -> int:
    """Find the point that excludes most whichever way it turns out; of several the smallest."""
    if_broken = points.is_beyond[np.ix_(left, left)].sum(axis=0)
    sizes = points.sizes[left]
    if_kept = len(left) - np.searchsorted(np.sort(sizes), sizes, side="left")
    return int(left[np.lexsort((sizes, -np.minimum(if_broken, if_kept)))[0]])


def dominates(point: Point, other: Point) -> bool:
    """Return whether `point` is at least as aggressive as `other` along every axis."""
    return all(a >= b for a, b in zip(point, other, strict=True))


MAX_TRIALS: Final = 10
REACH: Final = 3  # steps from the parent, over all axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """Tries what is near the parent, at most ten configurations; goes before every other strategy.

    Inshrinkerator (arXiv 2306.11800, section 5): never more aggressive than the parent; the other prune
    metric with the same knobs first, then by falling ratio; the first that keeps the budget wins.
    """

    parent: Method  # the previous checkpoint's configuration
    keeps: bool = False  # try the parent's own settings first, with which its levels stay, and draw again
    cubes: Sequence[Cube]  # one for each prune metric
    predict: Predict  # bytes of a configuration's file
    name: str = "neighbourhood"

    def propose(self, history: History) -> Method | None:
        if best_of(history) is not None or len(history) >= MAX_TRIALS:
            return None
        if self.keeps and _is_chance(history, self.parent):
            return self.parent
        broken = [outcome.config for outcome in history]
        return next((config for config in self._ordered() if not self._is_excluded(config, broken)), None)

    def _ordered(self) -> list[Method]:
        others = [cube for cube in self.cubes if cube.name != cube.space.cube_name(self.parent)]
        same_knobs = [cube.config(cube.point(self.parent)) for cube in others]
        rest: set[Method] = set()
        for cube in self.cubes:  # as aggressive as the parent, or a few steps milder
            at = cube.point(self.parent)
            near = (p for p in cube.points if dominates(at, p) and sum(at) - sum(p) <= REACH)
            rest.update(map(cube.config, near))
        by_ratio = sorted(rest, key=lambda config: (self.predict(config), repr(config)))
        kept = [self.parent] if self.keeps and self._is_of_cubes() else []
        return list(dict.fromkeys([*kept, *same_knobs, *by_ratio]))

    def _is_of_cubes(self) -> bool:
        """Return whether the parent differs from a cube's template along its axes only."""
        return any(
            cube.space.at(cube.template, values) == cube.space.at(self.parent, values)
            for cube in self.cubes
            if (values := cube.space.coordinates(self.parent))
        )

    def _is_excluded(self, config: Method, broken: Sequence[Method]) -> bool:
        """Return whether a configuration was tried, or is beyond one that exceeded the budget."""
        return any(
            dominates(point, other)
            for cube in self.cubes
            if (point := _point_in(cube, config)) is not None
            for tried in broken
            if (other := _point_in(cube, tried)) is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finer:
    """Tries what is milder than the cubes, where nothing in them has kept the budget; the first wins."""

    configs: Sequence[Method]  # the smallest first
    name: str = "finer"

    def propose(self, history: History) -> Method | None:
        tried = {outcome.config for outcome in history}
        return None if best_of(history) else next((c for c in self.configs if c not in tried), None)


def _point_in(cube: Cube, config: Method) -> Point | None:
    """Find the point of exactly this configuration, if the cube has it."""
    point = cube.point(config)
    return point if cube.config(point) == config else None


# --- one multiplier -----------------------------------------------------------------------------
MAX_FIRST: Final = 8  # trials of a first checkpoint
MAX_LATER: Final = 3  # of one whose parent says where to begin
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiplierSearch:
    """Looks for the largest multiplier that keeps the budget; all steps follow from it.

    The sum of expected loss change and lambda times bits is smallest where every part of a checkpoint pays
    the same loss for its last bit. For small errors the change is a_i * step_i^2 and the bits are n_i *
    log2(1 / step_i), so step_i = sqrt(lambda * n_i / (2 ln 2 * a_i)): all steps are proportional to
    sqrt(lambda), which is the multiplier of the search space. What is special to a tensor, a_i, is in the
    reference steps already: in `ckptz.codec.grid_steps.row_steps` for weights, in the roots of second moments
    for first ones. Moments follow in proportion up to 8 octaves: 16 cost 0.4 % more of the resumed loss for
    0.05 bit (docs/search.md).

    The share of a budget that is used then grows about with the multiplier's square. Two measurements give
    its power, and the next trial is where the line through them meets the budget, in logarithms.
    Measurements may be noisy: of several that keep the budget the largest counts, whatever failed below.
    """

    template: Method  # steps at a multiplier of 1, and everything that does not follow from it
    space: MultiplierSpace
    start: float = 1.0  # the first multiplier to try
    most: int = MAX_FIRST  # trials, those of strategies before this one included
    close: float = CLOSE  # share of the budget that is near enough to it
    draws: bool = False  # weights are rounded at random to the levels of a base
    name: str = "multiplier"

    def propose(self, history: History) -> Method | None:
        points = _Bracket.of(history, self.space)
        if len(history) >= self.most or points.is_done(self.close):
            return None
        if self.draws and _is_chance(history, first := self.space.scaled(self.template, self.start)):
            return first
        config = self.space.scaled(self.template, self._multiplier(points.next(math.log(self.start))))
        return None if any(outcome.config == config for outcome in history) else config

    def _multiplier(self, x: float) -> float:
        """Round a multiplier to three digits, or return the parent's exact one.

        Only at the very same one does the grid of the parent's file stay.
        """
        multiplier = float(f"{math.exp(x):.3g}")
        return self.start if math.isclose(multiplier, self.start, rel_tol=SAME) else multiplier


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
    def of(cls, history: History, space: MultiplierSpace) -> Self:
        trials = [(space.multiplier(o.config), max(o.used, LEAST_USED)) for o in history]
        points = sorted((_Point(math.log(x), math.log(y)) for x, y in trials), key=lambda p: p.x)
        kept = max((p for p in points if p.y <= math.log(FULL)), key=lambda p: p.x, default=None)
        above = [p for p in points if kept is None or p.x > kept.x]
        return cls(kept, above[0] if above else None, _power(points))

    def is_done(self, close: float) -> bool:
        """Return whether another trial would gain too little or leave the range."""
        if self.kept is None:
            return self.broken is not None and self.broken.x <= math.log(SMALLEST)
        if self.kept.y >= math.log(close) or self.kept.x >= math.log(LARGEST):
            return True
        return self.broken is not None and self.broken.x - self.kept.x <= NARROW

    def next(self, start: float) -> float:
        """Return the logarithm of the next multiplier to measure."""
        low = math.log(SMALLEST) if self.kept is None else self.kept.x
        high = math.log(LARGEST) if self.broken is None else self.broken.x
        return _within(self._wanted(start), low, high)

    def _wanted(self, start: float) -> float:
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
