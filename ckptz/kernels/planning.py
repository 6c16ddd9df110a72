"""Compiled arithmetic of the encoder's choices: sizes, frequency tables, shared tables.

Informative: whatever these functions return decodes. No reference twin, tests compare with formulas.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.reference import SCALE, SCALE_BITS

kernel = numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")

Counts = NDArray[np.int64]
Frequencies = NDArray[np.uint16]


@kernel
def row_entropy_bits(counts: Counts) -> float:
    """Bits of an ideal order-0 coder of one row [256]."""
    total, bits = 0, 0.0
    for j in range(len(counts)):
        if counts[j]:
            total += counts[j]
            bits -= counts[j] * np.log2(counts[j])
    return bits + total * np.log2(total) if total else 0.0


@kernel
def entropy_bits(counts: Counts) -> float:
    """Bits of an ideal coder with one table a row, over rows [n, 256]."""
    bits = 0.0
    for k in range(len(counts)):
        bits += row_entropy_bits(counts[k])
    return bits


@kernel
def normalise(counts: Counts) -> Frequencies:
    """Frequencies that sum to 4096, at least 1 for each symbol that occurs."""
    n = len(counts)
    rare = np.zeros(n, np.bool_)
    n_rare, common = 0, counts.sum()
    # Symbols too rare for a share of their own get 1; the others divide what is left.
    searching = True
    while searching:
        searching = False
        scale = (SCALE - n_rare) / max(common, 1)
        for j in range(n):
            if counts[j] and not rare[j] and counts[j] * scale < 1:
                rare[j] = True
                n_rare += 1
                common -= counts[j]
                searching = True
    scale = (SCALE - n_rare) / max(common, 1)
    frequencies = np.zeros(n, np.uint16)
    missing = SCALE
    for j in range(n):
        if counts[j]:
            frequencies[j] = 1 if rare[j] else np.uint16(counts[j] * scale)
            missing -= frequencies[j]
    # What rounding down left over goes where one more saves most.
    while missing > 0:
        best, best_gain = 0, -1.0
        for j in range(n):
            if counts[j] and counts[j] / frequencies[j] > best_gain:
                best, best_gain = j, counts[j] / frequencies[j]
        frequencies[best] += 1
        missing -= 1
    return frequencies


@kernel
def cost_bits(counts: Counts, frequencies: Frequencies) -> float:
    """Bits of one row [256] under `frequencies`; infinite if a symbol has none."""
    bits = 0.0
    for j in range(len(counts)):
        if counts[j]:
            if not frequencies[j]:
                return np.inf
            bits += counts[j] * (SCALE_BITS - np.log2(frequencies[j]))
    return bits


@kernel
def shared_cost_bits(counts: Counts, table_of: Counts, frequencies: Frequencies) -> float:
    """Bits of rows [n_classes, 256] where row k uses frequencies[table_of[k]]."""
    bits = 0.0
    for k in range(len(counts)):
        bits += cost_bits(counts[k], frequencies[table_of[k]])
    return bits


@kernel
def best_golomb_order(values: NDArray[np.uint16], most: int) -> int:
    """The order of Exp-Golomb codes that packs `values` smallest."""
    best, best_bits = 0, 1 << 62
    for order in range(most + 1):
        bits = 0
        for i in range(len(values)):
            n_low = order
            while (np.int64(values[i]) + (1 << order)) >> (n_low + 1):
                n_low += 1
            bits += 2 * n_low - order + 1
        if bits < best_bits:
            best, best_bits = order, bits
    return best


@kernel
def _row_cost(counts: Any, table_bits: float, symbol_bits: float) -> float:
    used = 0
    for j in range(len(counts)):
        used += counts[j] > 0
    return row_entropy_bits(counts) + table_bits + symbol_bits * used if used else 0.0


@kernel
def merge_neighbours(counts: Counts, most: int, table_bits: float, symbol_bits: float) -> Counts:
    """Group number of each row [n] so that merged neighbours cost less than apart.

    A group costs its ideal code, `table_bits`, and `symbol_bits` for each symbol that occurs in it;
    empty rows join the group before them.
    """
    n, n_symbols = counts.shape
    used = np.flatnonzero(counts.sum(axis=1))
    group_of = np.zeros(n, np.int64)
    if len(used) == 0:
        return group_of
    sums = np.empty((len(used), n_symbols), np.int64)
    costs = np.empty(len(used))
    for g in range(len(used)):
        sums[g] = counts[used[g]]
        costs[g] = _row_cost(sums[g], table_bits, symbol_bits)
    following = np.arange(1, len(used) + 1)
    joined = np.full(len(used), np.inf)  # cost of each group merged with the one that follows
    for g in range(len(used) - 1):
        joined[g] = _row_cost(sums[g] + sums[g + 1], table_bits, symbol_bits)
    alive = np.ones(len(used), np.bool_)
    n_groups = len(used)
    while n_groups > 1:
        best, best_gain = -1, -np.inf
        for g in range(len(used)):
            if alive[g] and following[g] < len(used):
                gain = costs[g] + costs[following[g]] - joined[g]
                if gain > best_gain:
                    best, best_gain = g, gain
        if best_gain <= 0 and n_groups <= most:
            break
        after = following[best]
        sums[best] += sums[after]
        costs[best] = joined[best]
        alive[after] = False
        following[best] = following[after]
        n_groups -= 1
        if following[best] < len(used):
            joined[best] = _row_cost(sums[best] + sums[following[best]], table_bits, symbol_bits)
        for g in range(best - 1, -1, -1):
            if alive[g]:
                joined[g] = _row_cost(sums[g] + sums[best], table_bits, symbol_bits)
                break
    g, group = -1, -1
    for k in range(n):
        if g + 1 < len(used) and used[g + 1] == k:
            g += 1
            if alive[g]:
                group += 1
        group_of[k] = max(group, 0)
    return group_of
