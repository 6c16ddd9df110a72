"""Simulated quality functions on the paper's grid of settings, and small models with a known quality."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptz.codec.kmeans import KMeans
from ckptz.codec.method import Method
from ckptz.search.spaces import SPACES, Cube, CubeSpace, reference
from ckptz.search.strategies import Outcome, Strategy, best_of, run_stages

Array = np.ndarray[Any, Any]
TEMPLATE = reference(KMeans)
SPACE = SPACES["kmeans"]
assert isinstance(SPACE, CubeSpace)
BOTH = SPACE.cubes(TEMPLATE, (), {"embedding"}, is_ranked=True)  # by magnitude, by sensitivity
CUBE = BOTH[0]


@dataclass(frozen=True)
class Landscape:
    """The share of the budget that each configuration of some cubes uses, and its size."""

    used: Mapping[Method, float]
    sizes: Mapping[Method, float]
    predicted: Mapping[Method, float]

    def predict(self, config: Method) -> float:
        return self.predicted[config]

    def search(self, *stages: Strategy) -> list[Outcome]:
        return run_stages(stages, lambda c, _: Outcome(c, self.used[c], round(self.sizes[c])))

    @property
    def smallest(self) -> float | None:
        return min((self.sizes[c] for c, used in self.used.items() if used <= 1), default=None)

    def excess(self, outcomes: list[Outcome]) -> float:
        """Return the size of the best trial relative to the smallest size within the budget, minus 1."""
        best = best_of(outcomes)
        if self.smallest is None:
            assert best is None
            return 0.0
        return best.n_bytes / round(self.smallest) - 1 if best else np.inf


def landscape(seed: int, noise: float = 0.0, cubes: tuple[Cube, ...] = (CUBE,)) -> Landscape:
    """Simulate the share of a budget that settings use: it falls along every axis at random rates.

    Args:
        seed: seed of all random values.
        noise: relative error of each measurement; if it is not 0, predicted sizes also err by 1 %.
        cubes: spaces of settings; pruning by sensitivity is between half and twice as harmful.
    """
    rng = np.random.default_rng(seed)
    weight, power, falls = rng.uniform(0.3, 3, 5), rng.uniform(1.2, 2.2), rng.uniform(1.5, 4)
    scales = rng.uniform([0.2, 1, 0, 0.02], [3, 8, 0.3, 0.3])
    share = rng.uniform(0.05, 0.5)
    used, sizes = {}, {}
    for cube in cubes:
        harm = rng.uniform(0.5, 2) if cube.name == "sensitivity" else 1.0
        for point in cube.points:
            axes = zip(SPACE.axes.values(), point, strict=True)
            levels, prune, protect, embedding = (values[at] for values, at in axes)
            drop = weight[0] * scales[0] * (4 / levels) ** power
            drop += harm * weight[1] * scales[1] * prune**falls
            drop += weight[2] * scales[2] * (0.01 - protect) * 100
            drop += weight[3] * scales[3] * (16 / embedding) ** power
            config = cube.config(point)
            used[config] = drop * (1 + weight[4] * prune * 4 / levels)
            coded = [_bits(n, prune) + 10 * protect for n in (levels, embedding)]
            sizes[config] = 1e6 * ((1 - share) * coded[0] + share * coded[1])
    limit = np.quantile(list(used.values()), rng.uniform(0.02, 0.98))
    shaken = {c: u / limit * (1 + noise * rng.standard_normal()) for c, u in used.items()}
    predicted = {c: s * (1 + 0.01 * bool(noise) * rng.standard_normal()) for c, s in sizes.items()}
    return Landscape(shaken, sizes, predicted)


def _bits(levels: float, prune: float) -> float:
    """Estimate the entropy of a code."""
    shares = [p for p in (prune, 1 - prune) if p > 0]
    return float((1 - prune) * 0.92 * np.log2(levels) - sum(p * np.log2(p) for p in shares))


def model(step: int = 0, *, width: int = 64, moments: bool = False) -> dict[str, Array]:
    """Return weights of a small model (embedding, attention, linear, norm), with Adam's moments if asked."""
    rng = np.random.default_rng(0)
    state: dict[str, Array] = {"token.weight": rng.standard_normal((128, width)) * 0.02}
    for i in range(2):
        state[f"h.{i}.attn.weight"] = rng.standard_t(5, (96, width)) * 0.05
        state[f"h.{i}.up.weight"] = rng.standard_normal((128, width)) * 0.04
        state[f"h.{i}.ln.weight"] = rng.standard_normal(width)
    drift = np.random.default_rng(step)
    state = {n: v * (1 + 0.02 * step * drift.standard_normal(v.shape)) for n, v in state.items()}
    if moments:
        spread = np.random.default_rng(9)
        squares = {n: 1e-6 * np.exp(2 * spread.standard_normal(v.shape)) for n, v in state.items()}
        state |= {f"optimizer.{n}.exp_avg_sq": v for n, v in squares.items()}
    return {name: value.astype(np.float32) for name, value in state.items()}
