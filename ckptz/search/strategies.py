"""Search strategies: propose the next configuration, given the outcomes of all trials so far.

A strategy is a function of these outcomes and has no state, so a search can be stopped, repeated and tested
without a model.
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
    """The file size and the quality of one trial."""

    config: Method  # settings of the trial
    used: float  # share of the budget that is used; infinite if it could not be measured
    n_bytes: int  # file size
    used_by_examples: float = math.inf  # share that the per-example change uses; infinite if not measured
    content_id: str = ""  # of the file; trials with equal ones have equal values

    @property
    def is_feasible(self) -> bool:
        """True if the trial is within the budget."""
        return self.used <= FULL


History = Sequence[Outcome]
Predict = Callable[[Method], float]
Try = Callable[[Method, str], Outcome]


# Each has a name, which trials report, and `propose(history)`, which returns the next configuration, or None
# at the end. The history contains the trials of all strategies in order.
Strategy: TypeAlias = "Guided | Neighbourhood | Finer | MultiplierSearch"


def best_of(history: History) -> Outcome | None:
    """Return the outcome with the smallest file within the budget; None if there is none."""
    return min((o for o in history if o.is_feasible), key=lambda o: o.n_bytes, default=None)


def run_stages(stages: Sequence[Strategy], try_config: Try, max_trials: int | None = None) -> list[Outcome]:
    """Run strategies in order until one of them ends with a trial within the budget.

    Args:
        stages: strategies, the cheapest first.
        try_config: writes and evaluates a configuration; also gets the name of the strategy.
        max_trials: largest number of trials in all.

    Returns:
        All outcomes, in order.
    """
    history: list[Outcome] = []
    for stage in stages:
        while len(history) != max_trials and (config := stage.propose(history)) is not None:
            history.append(try_config(config, stage.name))
        if best_of(history) is not None:
            break
    return history


MAX_SEEDS: Final = 3  # rounding seeds of one configuration


def _deserves_new_seed(history: History, config: Method) -> bool:
    """Return whether `config` should be tried again with another seed of stochastic rounding.

    That is so if it alone was tried and only its mean exceeded the budget: first-order errors move a mean up
    or down by chance. Another seed may meet the budget at the same size with the levels of the base, which
    other settings would not keep.
    """
    return (
        0 < len(history) < MAX_SEEDS
        and all(o.config == config and o.used_by_examples <= FULL < o.used for o in history)
        and len({outcome.used for outcome in history}) == len(history)
    )


# --- cubes --------------------------------------------------------------------------------------
Mask = NDArray[np.bool_]
MIN_GAIN: Final = 0.005  # predicted saving over the best that justifies a trial; predictions err as much
# Measurements are noisy: a trial that uses at most 1 + NOISE_MARGIN of the budget does not exclude
# configurations within NEAR steps of it.
NOISE_MARGIN, NEAR = 0.5, 2
MAX_GUIDED: Final = 20  # trials of all strategies; more gain under 0.1 % on average
MAX_SHARE: Final = 0.25  # of all configurations: the end of the descent


@dataclass(frozen=True, kw_only=True)
class Guided:
    """Finds the smallest file within a budget, assuming that quality falls along every axis of a cube.

    A trial that exceeds the budget excludes all configurations that are at least as aggressive; a trial
    within the budget excludes all with a larger predicted size. The next trial is the one that excludes most
    in the worse of these cases: for a cube that is near the middle of its diagonal. This is the guided search
    of Inshrinkerator (arXiv 2306.11800, section 5) with predicted sizes as a second order.

    Real quality is not monotonic: accuracy on few samples jumps, and k-means places its levels differently
    when fewer values are protected. Once no configuration is left, the search therefore descends: it tries
    the neighbours of the best one, the smallest first, and moves to any that is within the budget.

    If no trial was within the budget, the last one is the mildest configuration left.
    """

    cubes: Sequence[Cube]  # configurations to search
    predict: Predict  # predicts file sizes in bytes
    n_reserved: int = 0  # trials reserved for later strategies while no trial is within the budget
    name: str = "guided"

    @functools.cached_property
    def _points(self) -> _Points:
        return _Points.of(self.cubes, self.predict)

    def propose(self, history: History) -> Method | None:
        points, best = self._points, best_of(history)
        max_trials = MAX_GUIDED - (self.n_reserved if best is None else 0)
        if len(history) >= max_trials:
            return None
        is_left = np.ones(len(points.configs), np.bool_)
        for outcome in history:
            self._exclude(points, is_left, outcome)
        if is_left.any():
            left = np.flatnonzero(is_left)
            if best is None and len(history) == max_trials - 1:
                return points.configs[left[points.sizes[left].argmax()]]
            return points.configs[_middle(points, left)]
        return None if best is None else _next_neighbour(points, history, best)

    def _exclude(self, points: _Points, is_left: Mask, outcome: Outcome) -> None:
        """Clear `is_left` for points that need no trial after this outcome."""
        tried = points.indices.get(outcome.config, [])
        if outcome.is_feasible:
            size = points.sizes[tried[0]] if tried else outcome.n_bytes
            is_left &= points.sizes < size * (1 - MIN_GAIN)
        for i in tried:
            is_left[i] = False
            if not outcome.is_feasible:
                excluded = points.dominates[:, i]
                if outcome.used <= FULL + NOISE_MARGIN:
                    excluded = excluded & (points.steps - points.steps[i] > NEAR)
                is_left &= ~excluded


@dataclass(frozen=True, slots=True)
class _Points:
    """The points of all cubes, as arrays."""

    configs: list[Method]  # configuration of each point; without pruning, cubes share some
    indices: dict[Method, list[int]]  # points of each configuration
    coordinates: NDArray[np.int64]  # steps from the mildest point along each axis [n, axes]
    cubes: NDArray[np.int64]  # index of the cube of each point [n]
    sizes: NDArray[np.float64]  # predicted bytes [n]
    steps: NDArray[np.int64]  # steps from the mildest point along all axes [n]
    dominates: Mask  # True if point i is at least as aggressive as point j of the same cube [n, n]

    @classmethod
    def of(cls, cubes: Sequence[Cube], predict: Predict) -> _Points:
        points = [(i, point) for i, cube in enumerate(cubes) for point in cube.points]
        configs = [cubes[i].config(point) for i, point in points]
        at = np.array([point for _, point in points])
        cube = np.array([i for i, _ in points])
        dominates = (at[:, None] >= at[None, :]).all(axis=2) & (cube[:, None] == cube[None, :])
        indices: dict[Method, list[int]] = {}
        for i, config in enumerate(configs):
            indices.setdefault(config, []).append(i)
        sizes = np.array([predict(config) for config in configs])
        return cls(configs, indices, at, cube, sizes, at.sum(axis=1), dominates)


def _next_neighbour(points: _Points, history: History, best: Outcome) -> Method | None:
    """Return the untried neighbour of the best configuration with the smallest predicted file, if smaller."""
    indices = points.indices.get(best.config, [])
    if not indices or len(history) >= int(MAX_SHARE * len(points.indices)):
        return None
    tried = {outcome.config for outcome in history}
    is_near = np.zeros(len(points.configs), np.bool_)  # in one cube, at most one step away along each axis
    for i in indices:
        steps = np.abs(points.coordinates - points.coordinates[i])
        is_near |= (steps <= 1).all(axis=1) & (points.cubes == points.cubes[i])
    is_smaller = points.sizes < points.sizes[indices[0]] * (1 - MIN_GAIN)
    ordered = sorted(np.flatnonzero(is_near & is_smaller), key=lambda i: points.sizes[i])
    return next((points.configs[i] for i in ordered if points.configs[i] not in tried), None)


def _middle(points: _Points, left: NDArray[np.int64]) -> int:
    """Return the point whose trial excludes most in the worse case; among equals the smallest file."""
    if_exceeded = points.dominates[np.ix_(left, left)].sum(axis=0)
    sizes = points.sizes[left]
    if_within = len(left) - np.searchsorted(np.sort(sizes), sizes, side="left")
    return int(left[np.lexsort((sizes, -np.minimum(if_exceeded, if_within)))[0]])


def dominates(point: Point, other: Point) -> bool:
    """Return whether `point` is at least as aggressive as `other` along every axis."""
    return all(a >= b for a, b in zip(point, other, strict=True))


MAX_NEIGHBOURS: Final = 10
MAX_STEPS: Final = 3  # from the parent, along all axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """Tries at most ten configurations near those of the previous checkpoint; the first strategy.

    Inshrinkerator (arXiv 2306.11800, section 5): never more aggressive than the parent; first the other prune
    metric with the same settings, then the smallest predicted files; the first within the budget wins.
    """

    parent: Method  # the previous checkpoint's configuration
    tries_parent: bool = False  # try the parent's settings first, which keep its levels, with several seeds
    cubes: Sequence[Cube]  # one for each prune metric
    predict: Predict  # predicts file sizes in bytes
    name: str = "neighbourhood"

    def propose(self, history: History) -> Method | None:
        if best_of(history) is not None or len(history) >= MAX_NEIGHBOURS:
            return None
        if self.tries_parent and _deserves_new_seed(history, self.parent):
            return self.parent
        tried = [outcome.config for outcome in history]
        return next((config for config in self._ordered() if not self._is_excluded(config, tried)), None)

    def _ordered(self) -> list[Method]:
        """List the candidates: the parent if it is tried, the other way to prune, then the smallest files."""
        parent, first, same_settings, milder = self.parent, [], [], set[Method]()
        for cube in self.cubes:
            at, values = cube.point(parent), cube.space.coordinates(parent)
            # The parent must differ from the template only along the axes.
            if self.tries_parent and cube.space.at(cube.template, values) == cube.space.at(parent, values):
                first = [parent]
            if cube.name != cube.space.cube_name(parent):
                same_settings.append(cube.config(at))
            near = (p for p in cube.points if dominates(at, p) and sum(at) - sum(p) <= MAX_STEPS)
            milder.update(map(cube.config, near))
        by_size = sorted(milder, key=lambda config: (self.predict(config), repr(config)))
        return list(dict.fromkeys([*first, *same_settings, *by_size]))

    def _is_excluded(self, config: Method, tried: Sequence[Method]) -> bool:
        """Return whether a configuration is at least as aggressive as one that exceeded the budget."""
        for cube in self.cubes:
            point, *others = (_point_in(cube, one) for one in (config, *tried))
            if point is not None and any(other and dominates(point, other) for other in others):
                return True
        return False


def _point_in(cube: Cube, config: Method) -> Point | None:
    """Return the point with exactly this configuration, or None."""
    point = cube.point(config)
    return point if cube.config(point) == config else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finer:
    """Tries configurations finer than the cubes if none in them was within the budget; the first wins."""

    configs: Sequence[Method]  # the smallest first
    name: str = "finer"

    def propose(self, history: History) -> Method | None:
        tried = {outcome.config for outcome in history}
        return None if best_of(history) else next((c for c in self.configs if c not in tried), None)


# --- one multiplier -----------------------------------------------------------------------------
MAX_FIRST: Final = 8  # trials of a first checkpoint
MAX_LATER: Final = 3  # trials that start from a parent's multiplier
TARGET: Final = 0.95  # share of the budget to aim at; at 1, half of the close trials would exceed it
CLOSE: Final = 0.88  # share of the budget at which a larger multiplier saves under 2 % of the bytes
CLOSE_LATER: Final = 0.7  # with a parent: a further evaluation costs more than the 5 % that it may save
NARROW: Final = 0.03  # logarithm of a bracket that is worth only 0.04 bits per weight
USUAL_POWER: Final = 2.0
POWERS: Final = (1.0, 4.0)  # range of plausible powers; two measurements are noisy
MIN_USED: Final = 0.02  # smaller shares may be noise, or an improvement
MAX_EXTRAPOLATION: Final = math.log(4)
MARGIN: Final = 0.15  # of a bracket, at either end, so that each trial narrows it
SAME: Final = 5e-3  # relative difference below which multipliers count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiplierSearch:
    """Finds the largest multiplier of all steps within the budget.

    The sum of expected loss change and lambda times bits is smallest where the last bit of every part of a
    checkpoint costs the same loss. For small errors the change is a_i * step_i^2 and the bits are n_i *
    log2(1 / step_i), so step_i = sqrt(lambda * n_i / (2 ln 2 * a_i)): all steps are proportional to
    sqrt(lambda), which is the multiplier of the search space. The reference steps contain a_i: for weights by
    `ckptz.codec.grid_steps.row_steps`, for first moments by the roots of second ones. Moments follow in
    proportion up to 8 octaves: 16 cost 0.4 % more of the resumed loss for 0.05 bit (docs/search.md).

    The used share of the budget grows about with the square of the multiplier. Two measurements determine
    the actual power, and the next trial is where the line through them, in logarithms, meets the budget.
    Measurements may be noisy: the largest multiplier within the budget counts, whatever exceeded it below.
    """

    template: Method  # settings at a multiplier of 1
    space: MultiplierSpace
    start: float = 1.0  # the first multiplier to try
    max_trials: int = MAX_FIRST  # trials, those of earlier strategies included
    close: float = CLOSE  # used share of the budget at which to stop
    is_stochastic: bool = False  # weights are rounded stochastically, so that another seed may help
    name: str = "multiplier"

    def propose(self, history: History) -> Method | None:
        bracket = _Bracket.of(history, self.space)
        if len(history) >= self.max_trials or bracket.is_done(self.close) or self._is_capped(history):
            return None
        first = self.space.scaled(self.template, self.start)
        if self.is_stochastic and _deserves_new_seed(history, first):
            return first
        multiplier = float(f"{math.exp(bracket.next(math.log(self.start))):.3g}")
        if math.isclose(multiplier, self.start, rel_tol=SAME):
            multiplier = self.start  # exactly that of the parent, to keep its grid
        config = self.space.scaled(self.template, multiplier)
        return None if any(outcome.config == config for outcome in history) else config

    def _is_capped(self, history: History) -> bool:
        """Return whether the largest multiplier changes nothing, because all steps are at their maximum."""
        last = sorted(history, key=lambda outcome: self.space.multiplier(outcome.config))[-2:]
        n_configs, ids = len({outcome.config for outcome in last}), {outcome.content_id for outcome in last}
        return n_configs == 2 and len(ids) == 1 and "" not in ids


@dataclass(frozen=True, slots=True)
class _Point:
    """A trial: logarithms of its multiplier (x) and of its used share of the budget (y)."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class _Bracket:
    """The largest multiplier within the budget, and the smallest above it that exceeds it."""

    within: _Point | None
    beyond: _Point | None
    power: float  # the used share grows with this power of the multiplier

    @classmethod
    def of(cls, history: History, space: MultiplierSpace) -> Self:
        trials = [(space.multiplier(o.config), max(o.used, MIN_USED)) for o in history]
        points = sorted((_Point(math.log(x), math.log(y)) for x, y in trials), key=lambda p: p.x)
        within = max((p for p in points if p.y <= math.log(FULL)), key=lambda p: p.x, default=None)
        above = [p for p in points if within is None or p.x > within.x]
        return cls(within, above[0] if above else None, _power(points))

    def is_done(self, close: float) -> bool:
        """Return whether another trial would gain too little or leave the range."""
        if self.within is None:
            return self.beyond is not None and self.beyond.x <= math.log(SMALLEST)
        if self.within.y >= math.log(close) or self.within.x >= math.log(LARGEST):
            return True
        return self.beyond is not None and self.beyond.x - self.within.x <= NARROW

    def next(self, start: float) -> float:
        """Return the logarithm of the multiplier to try next, which should use `TARGET` of the budget."""
        if self.within is not None and self.beyond is not None:
            share = 0.5
            if math.isfinite(self.beyond.y):
                crossing = (math.log(TARGET) - self.within.y) / (self.beyond.y - self.within.y)
                share = _clip(crossing, MARGIN, 1 - MARGIN)
            return self.within.x + share * (self.beyond.x - self.within.x)
        x, point = start, self.within or self.beyond
        if point is not None:
            step = (math.log(TARGET) - point.y) / self.power
            x = point.x + _clip(step, -MAX_EXTRAPOLATION, MAX_EXTRAPOLATION)
        low = math.log(SMALLEST) if self.within is None else self.within.x
        high = math.log(LARGEST) if self.beyond is None else self.beyond.x
        return _clip(x, low, high)


def _power(points: Sequence[_Point]) -> float:
    """Fit the power with which the used share grows to the two trials nearest the budget."""
    usable = [p for p in points if math.log(MIN_USED) < p.y < math.inf]
    near = sorted(usable, key=lambda p: abs(p.y))[:2]
    if len(near) < 2 or near[0].x == near[1].x:
        return USUAL_POWER
    return _clip((near[1].y - near[0].y) / (near[1].x - near[0].x), *POWERS)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
