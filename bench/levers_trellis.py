"""Dependent quantization against rate-distortion optimised scalar quantization, for levers.py.

Both minimise squared error + price * bits on the same numbers, with bits of their own codes, and end with
levels at the centroids. Dependent quantization (as in VVC and MPEG NNC) has two grids, of even multiples
and of odd ones and zero; the parities of the codes so far say which is next, a Viterbi search over four
states finds the best codes, and each grid has its own frequencies.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

NEXT_STATE: Final = np.array([[0, 2], [2, 0], [1, 3], [3, 1]])  # by state and parity
GRID_OF: Final = np.array([0, 0, 1, 1])
N_MAGNITUDES: Final = 16
N_ROUNDS: Final = 4
STEPS: Final = np.geomspace(1.0, 3.0, 5)  # in standard deviations


def _bits_of(counts: Reals) -> Reals:
    """Bits of magnitudes [n_grids, N_MAGNITUDES], signs included."""
    shares = (counts + 0.01) / (counts + 0.01).sum(1, keepdims=True)
    bits: Reals = -np.log2(shares)
    bits[:, 1:] += 1
    return bits


def _result(values: Reals, magnitudes: NDArray[np.int64], grids: NDArray[np.int64]) -> tuple[float, float]:
    """Bits a value and mean squared error, levels at centroids."""
    cells = (grids * N_MAGNITUDES + magnitudes).reshape(-1)
    counts = np.bincount(cells, minlength=2 * N_MAGNITUDES).reshape(2, -1).astype(np.float64)
    sizes = np.abs(values).reshape(-1)
    sums = np.bincount(cells, sizes, 2 * N_MAGNITUDES)
    level = np.where(magnitudes.reshape(-1) > 0, (sums / np.maximum(counts.reshape(-1), 1))[cells], 0.0)
    total = counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(counts > 0, -counts * np.log2(counts / total), 0.0).sum() + counts[:, 1:].sum()
    return float(bits / len(sizes)), float(np.mean((sizes - level) ** 2))


def scalar(values: Reals, step: float, price: float) -> tuple[float, float]:
    """Bits and error of one grid."""
    sizes = np.abs(values)
    lower = np.minimum((sizes / step).astype(np.int64), N_MAGNITUDES - 2)
    choices = np.stack([np.zeros_like(lower), lower, lower + 1])
    found = choices[1]
    for _ in range(N_ROUNDS):
        counts = np.bincount(found.reshape(-1), minlength=N_MAGNITUDES)[None].astype(np.float64)
        costs = (sizes - choices * step) ** 2 + price * _bits_of(counts)[0][choices]
        found = np.take_along_axis(choices, costs.argmin(0)[None], 0)[0]
    return _result(values, found, np.zeros_like(found))


def dependent(values: Reals, step: float, price: float) -> tuple[float, float]:
    """Bits and error of the trellis; `values` are sequences [n, length]."""
    counts = np.exp(-np.arange(N_MAGNITUDES, dtype=np.float64))[None].repeat(2, 0) * values.size
    magnitudes = grids = np.zeros(values.shape, np.int64)
    for _ in range(N_ROUNDS):
        magnitudes, grids = _viterbi(np.abs(values), step, price * _bits_of(counts))
        cells = (grids * N_MAGNITUDES + magnitudes).reshape(-1)
        counts = np.bincount(cells, minlength=2 * N_MAGNITUDES).reshape(2, -1).astype(np.float64)
    return _result(values, magnitudes, grids)


def _candidates(sizes: Reals, step: float, grid: int) -> NDArray[np.int64]:
    """Zero, and the two magnitudes around each size."""
    lower = np.clip(((sizes / step + grid) / 2).astype(np.int64), 0, N_MAGNITUDES - 2)
    return np.stack([np.zeros_like(lower), lower, lower + 1])


def _viterbi(sizes: Reals, step: float, prices: Reals) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    n, length = sizes.shape
    costs = np.full((4, n), np.inf)
    costs[0] = 0
    came, taken = (np.zeros((length, 4, n), np.int8) for _ in range(2))
    for t in range(length):
        after = np.full((4, n), np.inf)
        for state, grid in enumerate(GRID_OF):
            choices = _candidates(sizes[:, t], step, int(grid))
            levels = np.where(choices > 0, 2 * choices - grid, 0) * step
            errors = (sizes[:, t] - levels) ** 2 + prices[grid][choices] + costs[state]
            for parity in (0, 1):
                allowed = np.where(choices % 2 == parity, errors, np.inf)
                best = allowed.argmin(0)
                cost = np.take_along_axis(allowed, best[None], 0)[0]
                target = NEXT_STATE[state, parity]
                is_better = cost < after[target]
                after[target] = np.where(is_better, cost, after[target])
                came[t, target] = np.where(is_better, state, came[t, target])
                chosen = np.take_along_axis(choices, best[None], 0)[0]
                taken[t, target] = np.where(is_better, chosen, taken[t, target])
        costs = after
    return _traced(costs.argmin(0), came, taken)


def _traced(
    state: NDArray[np.intp], came: NDArray[np.int8], taken: NDArray[np.int8]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The codes of the best path, and the grid of each."""
    length, _, n = came.shape
    magnitudes, grids = (np.zeros((n, length), np.int64) for _ in range(2))
    at = np.arange(n)
    for t in range(length - 1, -1, -1):
        magnitudes[:, t] = taken[t, state, at]
        state = came[t, state, at].astype(np.intp)
        grids[:, t] = GRID_OF[state]
    return magnitudes, grids


def frontier(values: Reals, prices: Reals, is_dependent: bool) -> list[tuple[float, float]]:
    """Bits and error at each price, with the step that is best there."""
    spread = float(values.std())
    found = []
    for price in prices * spread**2:
        coder = dependent if is_dependent else scalar
        scale = 0.5 if is_dependent else 1.0  # each of its grids has every other multiple
        tried = [coder(values, float(step) * spread * scale, float(price)) for step in STEPS]
        found.append(min(tried, key=lambda one: one[1] + price * one[0]))
    return found
