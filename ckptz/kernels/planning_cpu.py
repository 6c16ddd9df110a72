"""Compiled arithmetic of the encoder's choices: sizes, frequency tables, shared tables.

Informative: whatever these functions return decodes. No reference twin, tests compare with formulas.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from ckptz.kernels.floats import SCALE, SCALE_BITS, Counts, Frequencies
from ckptz.kernels.numba_base import kernel, summing

# Binary logarithms of small counts, which most are.
_LOGS = np.array([0.0, *map(math.log2, range(1, 1 << 12))])


@kernel
def row_entropy_bits(counts: Counts) -> float:
    """Compute the bits of an ideal order-0 coder of one row [256]."""
    total, bits = 0, 0.0
    for j in range(len(counts)):
        if counts[j]:
            total += counts[j]
            bits -= counts[j] * (_LOGS[counts[j]] if counts[j] < len(_LOGS) else np.log2(counts[j]))
    return bits + total * np.log2(total) if total else 0.0


@kernel
def entropy_bits(counts: Counts) -> float:
    """Compute the bits of an ideal coder with one table a row, over rows [n, 256]."""
    bits = 0.0
    for k in range(len(counts)):
        bits += row_entropy_bits(counts[k])
    return bits


FEW_SYMBOLS = 128  # of which a sort is quicker than one of all indices, also where it does not decide


@kernel
def normalise(counts: Counts) -> Frequencies:
    """Scale counts [256] to frequencies [256] that sum to 4096, at least 1 for each symbol that occurs."""
    n = len(counts)
    rare = np.zeros(n, np.bool_)
    n_rare, common = 0, 0
    for j in range(n):  # a sum by name, and a second kind of sorting, would take a second to compile
        common += counts[j]
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
    if missing:
        # What rounding down left over goes where one more saves most, one to each.
        gain, n_used = np.full(n, -1.0), 0
        used = np.empty(n)
        for j in range(n):
            if counts[j]:
                gain[j] = used[n_used] = counts[j] / frequencies[j]
                n_used += 1
        least = np.inf
        if missing < n_used <= FEW_SYMBOLS:
            ascending = np.argsort(used[:n_used])
            if used[ascending[n_used - missing - 1]] < used[ascending[n_used - missing]]:
                least = used[ascending[n_used - missing]]
        if least < np.inf:
            for j in range(n):
                frequencies[j] += gain[j] >= least
        else:  # equals stand on both sides, and the order of all decides between them
            order = np.argsort(gain)
            for j in range(missing):
                frequencies[order[n - 1 - j]] += 1
    return frequencies


@kernel
def cost_bits(counts: Counts, frequencies: Frequencies) -> float:
    """Compute the bits of one row [256] under `frequencies`; infinite if a symbol has none."""
    bits = 0.0
    for j in range(len(counts)):
        if counts[j]:
            if not frequencies[j]:
                return np.inf
            bits += counts[j] * (SCALE_BITS - np.log2(frequencies[j]))
    return bits


@kernel
def used_class_histogram(classes: Any, symbols: Any, n_classes: int) -> Any:
    """Find the classes that occur [n_used], ascending, and count each code in them [n_used, 256]."""
    row_of = np.full(n_classes, -1, np.int32)
    for i in range(len(classes)):
        row_of[uint64(classes[i])] = 0
    used = np.flatnonzero(row_of == 0)
    for row in range(len(used)):
        row_of[used[row]] = row
    # Two by turns, and flat: equal neighbours would wait for each other's store in one.
    counts = np.zeros((2, 256 * len(used)), np.int64)
    first, second = counts[0], counts[1]
    half = len(symbols) // 2
    for i in range(half):
        here, there = uint64(row_of[uint64(classes[i])]), uint64(row_of[uint64(classes[half + i])])
        first[(here << uint64(8)) | uint64(symbols[i])] += 1
        second[(there << uint64(8)) | uint64(symbols[half + i])] += 1
    for i in range(2 * half, len(symbols)):
        first[(uint64(row_of[uint64(classes[i])]) << uint64(8)) | uint64(symbols[i])] += 1
    return used, (first + second).reshape(len(used), 256)


@kernel
def normalise_rows(counts: Counts) -> Any:
    """Scale each row of counts [n, 256] to frequencies; see `normalise`."""
    frequencies = np.empty(counts.shape, np.uint16)
    for k in range(len(counts)):
        frequencies[k] = normalise(counts[k])
    return frequencies


@kernel
def shared_cost_bits(counts: Counts, table_of: Counts, frequencies: Frequencies) -> float:
    """Compute the bits of rows [n_classes, 256] where row k uses frequencies[table_of[k]]."""
    bits = 0.0
    for k in range(len(counts)):
        bits += cost_bits(counts[k], frequencies[table_of[k]])
    return bits


# Whole part of the binary logarithm of a frequency and of the largest step beside it.
_LOG2 = np.array([0, *(n.bit_length() - 1 for n in range(1, 1 << 13))], np.uint8)


@kernel
def best_golomb_order(values: NDArray[np.uint16], most: int) -> int:
    """Choose the order of Exp-Golomb codes, at most `most`, that packs `values` [n] into the fewest bytes."""
    best, best_bits = 0, 1 << 62
    for order in range(most + 1):
        bits: Any = len(values) * (1 - order)
        for i in range(len(values)):
            bits += 2 * np.int64(_LOG2[np.intp(values[i]) + (1 << order)])
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
def merge_neighbours(counts: Counts, most: int, table_bits: float, symbol_bits: float) -> Any:
    """Merge neighbouring rows while that costs less; gives each row's group [n] and each group's counts.

    A group costs its ideal code, `table_bits`, and `symbol_bits` for each symbol that occurs in it;
    empty rows join the group before them.
    """
    n, n_symbols = counts.shape
    used = np.flatnonzero(counts.sum(axis=1))
    group_of = np.zeros(n, np.int64)
    if len(used) == 0:
        return group_of, counts[:1]
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
    return group_of, sums[alive]


@kernel
def _interval_cost(weight: Any, first: Any, second: Any, begin: int, end: int) -> float:
    """Weighted square error of values begin..end around their mean, from prefix sums."""
    total = weight[end] - weight[begin]
    if total <= 0.0:
        return 0.0
    mean = (first[end] - first[begin]) / total
    return max(second[end] - second[begin] - mean * (first[end] - first[begin]), 0.0)


@kernel
def _fill_row(
    previous: Any, current: Any, split: Any, weight: Any, first: Any, second: Any, n_before: int
) -> None:
    """One layer of the dynamic programme by divide and conquer: best splits grow with the end."""
    n = len(previous) - 1
    stack = np.empty((128, 4), np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = n_before + 1, n, n_before, n - 1
    depth = 1
    while depth:
        depth -= 1
        low, high, least, most = stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3]
        if low > high:
            continue
        middle = (low + high) // 2
        best, best_cost = least, np.inf
        for begin in range(least, min(most, middle - 1) + 1):
            cost = previous[begin] + _interval_cost(weight, first, second, begin, middle)
            if cost < best_cost:
                best, best_cost = begin, cost
        current[middle], split[middle] = best_cost, best
        stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = low, middle - 1, least, best
        depth += 1
        stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = middle + 1, high, best, most
        depth += 1


@kernel
def partition(values: Any, weights: Any, n_parts: int) -> Any:
    """Find the ends of the `n_parts` intervals of ascending values with the least weighted square error."""
    n = len(values)
    # Centred, so that prefix sums of squares do not cancel.
    centre = (values * weights).sum() / weights.sum()
    weight, first, second = np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1)
    for i in range(n):
        value = values[i] - centre
        weight[i + 1] = weight[i] + weights[i]
        first[i + 1] = first[i] + weights[i] * value
        second[i + 1] = second[i] + weights[i] * value * value
    previous = np.empty(n + 1)
    previous[0] = 0.0
    for i in range(1, n + 1):
        previous[i] = _interval_cost(weight, first, second, 0, i)
    splits = np.zeros((n_parts, n + 1), np.int64)
    for part in range(1, n_parts):
        current = np.full(n + 1, np.inf)
        _fill_row(previous, current, splits[part], weight, first, second, part)
        previous = current
    ends = np.empty(n_parts, np.int64)
    end = n
    for part in range(n_parts - 1, -1, -1):
        ends[part] = end
        end = splits[part, end]
    return ends


@summing
def deviation(exact: Any, restored: Any) -> Any:
    """Measure (greatest error, sum of squared errors, sum of squares) of F32 arrays [n], in double."""
    largest, error, power = 0.0, 0.0, 0.0
    for i in range(len(exact)):
        value = np.float64(exact[i])
        difference = np.float64(restored[i]) - value
        largest = max(largest, abs(difference))
        error += difference * difference
        power += value * value
    return largest, error, power
