"""Guided and full exhaustive search over cubes whose quality falls along every axis.

Each trial excludes: one that breaks the budget everything at least as aggressive, one that keeps it
everything that is predicted to be larger. The next to try is the one that excludes most whichever way it
turns out, which for a whole cube is near the middle of its diagonal; what is left are sub-cubes, to
which the same applies. This is the guided search of Inshrinkerator (arXiv 2306.11800, section 5) with
predicted sizes as a second order.

Real quality does not fall along every axis: accuracy on few samples jumps, and k-means spends its levels
elsewhere when fewer values are protected. Once nothing is left to exclude, the search therefore descends:
it tries the neighbours of the best one, the smallest first, and moves on to any that keeps the budget.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.methods.method import Cube, Method, Point
from ckptz.search.trials import FULL, History, Outcome, Predict, best_of

Mask = NDArray[np.bool_]
MIN_GAIN: Final = 0.005  # a trial must promise to be so much smaller than the best; predictions err as much
# Measurements are noisy: a trial that uses up to 1 + DOUBT of the budget does not exclude configurations
# within NEAR steps of it.
DOUBT, NEAR = 0.5, 2
ENOUGH: Final = 20  # rounds, once a trial keeps the budget: more gain under 0.1 % on average
MAX_SHARE: Final = 0.25  # of the configurations: the descent ends there at the latest


@dataclass(frozen=True, kw_only=True)
class Guided:
    """Finds the smallest configuration that keeps a budget."""

    cubes: Sequence[Cube]  # what is searched
    predict: Predict  # bytes of a configuration's file
    name: str = "guided"

    @functools.cached_property
    def _grid(self) -> _Grid:
        return _Grid.of(self.cubes, self.predict)

    def propose(self, history: History, n: int) -> Sequence[Method]:
        grid = self._grid
        if best_of(history) is not None:
            n = max(min(n, ENOUGH * n - len(history)), 0)
        open_ = np.ones(len(grid.configs), np.bool_)
        for outcome in history:
            self._exclude(grid, open_, outcome)
        found = _most_telling(grid, open_, n) or _around_best(grid, history, n)
        return [grid.configs[i] for i in found]

    def _exclude(self, grid: _Grid, open_: Mask, outcome: Outcome) -> None:
        """Close what needs no trial after this one."""
        tried = grid.places.get(outcome.config, [])
        if outcome.is_feasible:
            size = grid.sizes[tried[0]] if tried else outcome.n_bytes
            open_ &= grid.sizes < size * (1 - MIN_GAIN)
        for i in tried:
            open_[i] = False
            if not outcome.is_feasible:
                excluded = grid.is_beyond[:, i]
                if outcome.used <= FULL + DOUBT:
                    excluded = excluded & (grid.steps - grid.steps[i] > NEAR)
                open_ &= ~excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive:
    """Tries every configuration of the cubes, the smallest predicted ones first: the yardstick."""

    cubes: Sequence[Cube]
    predict: Predict
    name: str = "exhaustive"

    def propose(self, history: History, n: int) -> Sequence[Method]:
        tried = {outcome.config for outcome in history}
        configs = {cube.config(point) for cube in self.cubes for point in cube.points} - tried
        return sorted(configs, key=lambda config: (self.predict(config), repr(config)))[:n]


@dataclass(frozen=True, slots=True)
class _Grid:
    """All points of all cubes."""

    configs: list[Method]  # one a point; without pruning, cubes share theirs
    places: dict[Method, list[int]]  # the points of each configuration
    at: NDArray[np.int64]  # the points, steps from the mildest one by axis [n, axes]
    home: NDArray[np.int64]  # index of each one's cube [n]
    sizes: NDArray[np.float64]  # predicted bytes [n]
    steps: NDArray[np.int64]  # from the mildest point, over all axes [n]
    is_beyond: Mask  # whether the first is at least as aggressive as the second, in one cube [n, n]

    @classmethod
    def of(cls, cubes: Sequence[Cube], predict: Predict) -> _Grid:
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


def _most_telling(grid: _Grid, open_: Mask, n: int) -> list[int]:
    """Up to `n` open points: the most telling one, then those that would be after either answer to it."""
    waiting = [open_]
    found: list[int] = []
    while waiting and len(found) < n:
        left = waiting.pop(0)
        left[found] = False
        if not left.any():
            continue
        best = _middle(grid, np.flatnonzero(left))
        found.append(best)
        waiting += [left & ~grid.is_beyond[:, best], left & (grid.sizes < grid.sizes[best])]
    return found


def _around_best(grid: _Grid, history: History, n: int) -> list[int]:
    """Up to `n` untried points beside the best outcome that promise to be smaller, the smallest first."""
    best = best_of(history)
    places = grid.places.get(best.config, []) if best else []
    room = min(n, int(MAX_SHARE * len(grid.places)) - len(history))
    if not places or room < 1:
        return []
    tried = {outcome.config for outcome in history}
    is_near = np.logical_or.reduce([grid.beside(i) for i in places])
    is_near &= grid.sizes < grid.sizes[places[0]] * (1 - MIN_GAIN)
    ordered = sorted(np.flatnonzero(is_near), key=lambda i: grid.sizes[i])
    by_config = {grid.configs[i]: int(i) for i in ordered if grid.configs[i] not in tried}
    return list(by_config.values())[:room]


def _middle(grid: _Grid, left: NDArray[np.int64]) -> int:
    """The point that excludes most whichever way it turns out; of several the smallest."""
    if_broken = grid.is_beyond[np.ix_(left, left)].sum(axis=0)
    sizes = grid.sizes[left]
    if_kept = len(left) - np.searchsorted(np.sort(sizes), sizes, side="left")
    return int(left[np.lexsort((sizes, -np.minimum(if_broken, if_kept)))[0]])


def dominates(point: Point, other: Point) -> bool:
    """Tell whether `point` is at least as aggressive as `other` along every axis."""
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
    keeps: bool = False  # try the parent's own settings first, with which its levels stay
    cubes: Sequence[Cube]  # one for each prune metric
    predict: Predict  # bytes of a configuration's file
    name: str = "neighbourhood"

    def propose(self, history: History, n: int) -> Sequence[Method]:
        if any(outcome.is_feasible for outcome in history):
            return ()
        broken = [outcome.config for outcome in history]
        left = [config for config in self._ordered() if not self._is_excluded(config, broken)]
        return left[: max(min(n, MAX_TRIALS - len(history)), 0)]

    def _ordered(self) -> list[Method]:
        others = [cube for cube in self.cubes if cube.name != self.parent.cube_name]
        same_knobs = [cube.config(cube.point(self.parent)) for cube in others]
        rest: set[Method] = set()
        for cube in self.cubes:  # as aggressive as the parent, or a few steps milder
            at = cube.point(self.parent)
            near = (p for p in cube.points if dominates(at, p) and sum(at) - sum(p) <= REACH)
            rest.update(map(cube.config, near))
        by_ratio = sorted(rest, key=lambda config: (self.predict(config), repr(config)))
        kept = [self.parent] if self.keeps and self.parent in rest else []
        return list(dict.fromkeys([*kept, *same_knobs, *by_ratio]))

    def _is_excluded(self, config: Method, broken: Sequence[Method]) -> bool:
        """Tell whether it was tried, or is at least as aggressive as something that broke the budget."""
        return any(
            dominates(point, other)
            for cube in self.cubes
            if (point := _point_in(cube, config)) is not None
            for tried in broken
            if (other := _point_in(cube, tried)) is not None
        )


def _point_in(cube: Cube, config: Method) -> Point | None:
    """The point of exactly this configuration, if the cube has it."""
    point = cube.point(config)
    return point if cube.config(point) == config else None
