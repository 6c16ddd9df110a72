"""The paper's space of configurations: a cube of knobs for each way to prune, mildest first along each axis.

Inshrinkerator (arXiv 2306.11800, section 5): 216 configurations for each prune metric. Quality falls, and
so does size, along every axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from ckptz.config import KMeans

LEVELS: Final = (32, 16, 12, 8, 6, 4)
EMBEDDING_LEVELS: Final = (32, 16)
PRUNE: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
PROTECT: Final = (0.01, 0.005, 0.0005)

Point: TypeAlias = tuple[int, ...]  # steps from the mildest value along each axis


TEMPLATE: Final = KMeans(protect_as="bf16", protect_by="either")  # what the paper keeps, and how


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube:
    """The configurations of one prune metric.

    Attributes:
        template: everything that is not a knob.
        prune_by: "magnitude" or "sensitivity".
        has_embeddings: whether there are embeddings, whose levels are an axis of their own.
    """

    template: KMeans = TEMPLATE
    prune_by: str = "magnitude"
    has_embeddings: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Values along each axis: levels, pruned share, protected share, levels of embeddings."""
        sizes = (len(LEVELS), len(PRUNE), len(PROTECT))
        return (*sizes, len(EMBEDDING_LEVELS)) if self.has_embeddings else sizes

    @property
    def points(self) -> list[Point]:
        """All of them."""
        return list(itertools.product(*map(range, self.shape)))

    def config(self, point: Point) -> KMeans:
        """The configuration of a point; without pruning both metrics mean the same one."""
        prune = PRUNE[point[1]]
        return replace(
            self.template,
            levels=LEVELS[point[0]],
            prune=prune,
            protect=PROTECT[point[2]],
            embedding_levels=EMBEDDING_LEVELS[point[3]] if self.has_embeddings else None,
            prune_by=self.prune_by if prune else "magnitude",
        )

    def point(self, config: KMeans) -> Point:
        """The most aggressive point that is not more so than `config` along any axis, where there is one."""
        found = (
            _last(LEVELS, config.levels, rises=False),
            _last(PRUNE, config.prune, rises=True),
            _last(PROTECT, config.protect, rises=False),
        )
        if not self.has_embeddings:
            return found
        levels = config.levels if config.embedding_levels is None else config.embedding_levels
        return (*found, _last(EMBEDDING_LEVELS, levels, rises=False))


def _last(values: Sequence[float], wanted: float, *, rises: bool) -> int:
    """Index of the last value that is not beyond `wanted`; 0 if all are."""
    fits = [value <= wanted if rises else value >= wanted for value in values]
    return max(sum(fits) - 1, 0)


def dominates(point: Point, other: Point) -> bool:
    """Whether `point` is at least as aggressive as `other` along every axis."""
    return all(a >= b for a, b in zip(point, other, strict=True))
