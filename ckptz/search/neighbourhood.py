"""Delta-neighbourhood: what a checkpoint in mid-training tries first, around its parent's configuration.

Inshrinkerator (arXiv 2306.11800, section 5): never more aggressive than the parent; the other prune metric
with the same knobs first, then by falling ratio; the first that keeps the budget wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from ckptz.methods.kmeans import KMeans
from ckptz.methods.method import Method
from ckptz.search.space import Cube, Point, dominates
from ckptz.search.trials import History, Predict

MAX_TRIALS: Final = 10
REACH: Final = 3  # steps from the parent, over all axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """Tries what is near the parent, at most ten configurations; goes before every other strategy."""

    parent: KMeans  # the previous checkpoint's configuration
    cubes: Sequence[Cube]  # one for each prune metric
    predict: Predict  # bytes of a configuration's file
    name: str = "neighbourhood"

    def propose(self, history: History, n: int) -> Sequence[Method]:
        if any(outcome.is_feasible for outcome in history):
            return ()
        broken = [cast(KMeans, outcome.config) for outcome in history]
        left = [config for config in self._ordered() if not self._is_excluded(config, broken)]
        return left[: max(min(n, MAX_TRIALS - len(history)), 0)]

    def _ordered(self) -> list[KMeans]:
        others = [cube for cube in self.cubes if cube.prune_by != self.parent.prune_by]
        same_knobs = [cube.config(cube.point(self.parent)) for cube in others]
        rest: set[KMeans] = set()
        for cube in self.cubes:  # as aggressive as the parent, or a few steps milder
            at = cube.point(self.parent)
            near = (p for p in cube.points if dominates(at, p) and sum(at) - sum(p) <= REACH)
            rest.update(map(cube.config, near))
        by_ratio = sorted(rest, key=lambda config: (self.predict(config), repr(config)))
        return list(dict.fromkeys([*same_knobs, *by_ratio]))

    def _is_excluded(self, config: KMeans, broken: Sequence[KMeans]) -> bool:
        """Tell whether it was tried, or is at least as aggressive as something that broke the budget."""
        return any(
            dominates(point, other)
            for cube in self.cubes
            if (point := _point_in(cube, config)) is not None
            for tried in broken
            if (other := _point_in(cube, tried)) is not None
        )


def _point_in(cube: Cube, config: KMeans) -> Point | None:
    """The point of exactly this configuration, if the cube has it."""
    point = cube.point(config)
    return point if cube.config(point) == config else None
