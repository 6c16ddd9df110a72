"""The paper's space of configurations: a cube of knobs for each way to prune, mildest first along each axis.

Inshrinkerator (arXiv 2306.11800, section 5): 216 configurations for each prune metric. Quality falls, and
so does size, along every axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from ckptz.methods.kmeans import KMeans

Point: TypeAlias = tuple[int, ...]  # steps from the mildest value along each axis

TEMPLATE: Final = KMeans.reference()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube:
    """The configurations of one prune metric."""

    template: KMeans = TEMPLATE  # everything that is not a knob
    prune_by: str = "magnitude"  # "magnitude" or "sensitivity"
    has_embeddings: bool = True  # whether there are embeddings, whose levels are an axis of their own

    @property
    def axes(self) -> Mapping[str, tuple[float, ...]]:
        """Values along each axis: levels, pruned share, protected share, and levels of embeddings if any."""
        axes = dict(self.template.axes)
        if not self.has_embeddings:
            del axes["embedding_levels"]
        return axes

    @property
    def points(self) -> list[Point]:
        """All points of the cube."""
        return list(itertools.product(*(range(len(values)) for values in self.axes.values())))

    def config(self, point: Point) -> KMeans:
        """Make the configuration of a point; without pruning both metrics mean the same one."""
        chosen: dict[str, Any] = {
            name: values[at] for at, (name, values) in zip(point, self.axes.items(), strict=True)
        }
        chosen.setdefault("embedding_levels", None)
        return replace(self.template, **chosen, prune_by=self.prune_by if chosen["prune"] else "magnitude")

    def point(self, config: KMeans) -> Point:
        """Find the most aggressive point that is not more so than `config` along any axis."""
        wanted = {name: getattr(config, name) for name in self.axes}
        if wanted.get("embedding_levels", 0) is None:
            wanted["embedding_levels"] = config.levels
        return tuple(_last(values, wanted[name]) for name, values in self.axes.items())


def _last(values: Sequence[float], wanted: float) -> int:
    """Index of the last of values that rise or fall that is not beyond `wanted`; 0 if all are."""
    rises = values[-1] > values[0]
    fits = [value <= wanted if rises else value >= wanted for value in values]
    return max(sum(fits) - 1, 0)


def dominates(point: Point, other: Point) -> bool:
    """Tell whether `point` is at least as aggressive as `other` along every axis."""
    return all(a >= b for a, b in zip(point, other, strict=True))
