"""Compiled arithmetic of encoder decisions: sizes, shared frequency tables, interval splits.

The results affect sizes only: a file decodes whatever they are. Tests compare these kernels with formulas.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import uint8, uint32, uint64

from ckptz.kernels import plain
from ckptz.kernels.floats import Bytes, Counts, Floats, Patterns, Reals
from ckptz.kernels.numba_base import kernel, part, summing

_LOGS = plain.LOGS  # of small counts, the most frequent ones
SINGLE_BITS = 40.0  # of a table of one symbol
NONE = np.int64(-1)  # typed: with a literal instead, numba would compile another variant


@part
def _row_bits(counts: Any, first: Any, second: Any, table_bits: float, symbol_bits: float) -> float:
    """Compute the bits of an ideal coder for the sum of two rows of counts [n, m], and of its table.

    `second` is NONE for a single row. Rows without symbols take 0 bits.
    """
    total, n_used, bits = 0, 0, 0.0
    for j in range(counts.shape[1]):
        n = counts[first, j]
        if second >= 0:
            n += counts[second, j]
        if n:
            total += n
            n_used += 1
            bits -= n * (_LOGS[n] if n < len(_LOGS) else math.log2(n))
    if not total:
        return 0.0
    if n_used == 1 and table_bits > SINGLE_BITS:
        table_bits = SINGLE_BITS
    return bits + total * math.log2(total) + table_bits + symbol_bits * n_used


@kernel
def _entropies(counts: Any, bits: Any) -> None:
    for k in range(len(counts)):
        bits[k] = _row_bits(counts, k, NONE, 0.0, 0.0)


def entropies(counts: Counts) -> Reals:
    bits = np.empty(len(counts))
    _entropies(counts, bits)
    return bits


@kernel
def _merge_rows(
    counts: Any,
    row_ends: Any,
    most: int,
    table_bits: float,
    symbol_bits: float,
    work: Any,
    links: Any,
    group_of: Any,
    group_ends: Any,
) -> None:
    """Merge rows as `merge_rows` describes; `work` and `links` are [2, n]."""
    begin, n_before = 0, 0
    for t in range(len(row_ends)):
        end = row_ends[t]
        # A group is identified by its first row; `links` holds the next group's row and the merge result.
        n_groups = 0
        before: Any = NONE
        for k in range(begin, end):
            work[0, k] = _row_bits(counts, k, NONE, table_bits, symbol_bits)
            links[1, k] = -1
            if work[0, k] > 0.0:
                links[0, k], links[1, k] = end, k
                n_groups += 1
                if before >= 0:
                    links[0, before] = k
                    work[1, before] = _row_bits(counts, before, k, table_bits, symbol_bits)
                before = k
        while n_groups > 1:
            best: Any = NONE
            best_gain = -np.inf
            for k in range(begin, end):
                if links[1, k] == k and links[0, k] < end:
                    gain = work[0, k] + work[0, links[0, k]] - work[1, k]
                    if gain > best_gain:
                        best, best_gain = k, gain
            if best_gain <= 0 and n_groups <= most:
                break
            after = links[0, best]
            for j in range(counts.shape[1]):
                counts[best, j] += counts[after, j]
            work[0, best] = work[1, best]
            links[1, after] = best
            links[0, best] = links[0, after]
            n_groups -= 1
            if links[0, best] < end:
                work[1, best] = _row_bits(counts, best, links[0, best], table_bits, symbol_bits)
            for k in range(best - 1, begin - 1, -1):
                if links[1, k] == k:
                    work[1, k] = _row_bits(counts, k, best, table_bits, symbol_bits)
                    break
        group = n_before - 1
        for k in range(begin, end):
            if links[1, k] == k:
                group += 1
                for j in range(counts.shape[1]):
                    counts[group, j] = counts[k, j]
            group_of[k] = group if group > n_before else n_before
        n_before = (group if group > n_before else n_before) + 1
        group_ends[t] = n_before
        begin = end


def merge_rows(
    counts: Counts, row_ends: Counts, most: int, table_bits: float, symbol_bits: float
) -> tuple[Counts, Counts, Counts]:
    """Merge adjacent rows of counts [n, m] greedily, while that saves bits or a part exceeds `most` groups.

    `counts` is overwritten, as a copy of many small tensors takes as long as merging.

    A group costs its ideal code, `table_bits`, and `symbol_bits` for each symbol that occurs in it. Empty
    rows join the group before them.

    Args:
        counts: occurrences of each symbol by row.
        row_ends: ends of m parts, each with a row that is not empty; rows of different parts stay apart.
        most: the greatest number of groups in a part.
        table_bits: fixed cost of a table.
        symbol_bits: cost of a table for each symbol.

    Returns:
        The group of each row [n], the counts of each group [n_groups, m], and the end of each part's
        groups [m].
    """
    n = len(counts)
    group_of, group_ends = np.empty(n, np.int64), np.empty(len(row_ends), np.int64)
    work, links = np.empty((2, n)), np.empty((2, n), np.int64)
    _merge_rows(counts, row_ends, most, table_bits, symbol_bits, work, links, group_of, group_ends)
    return group_of, counts[: group_ends[-1]], group_ends


@kernel
def _scale_runs(
    patterns: Any,
    shift: int,
    parts: int,
    lowest: int,
    n_scales: int,
    exponents: Any,
    labels: Any,
    counts: Any,
) -> None:
    size = len(exponents)
    whole = uint64(size & ~3)
    for r in range(len(labels)):
        run, total = patterns[r * size : (r + 1) * size], uint32(0)
        for i in range(size):
            exponents[i] = uint8(run[i] >> shift)
            total += uint32(exponents[i])
        scale: Any = (parts * np.int64(total) + size // 2) // size - lowest
        if scale < 0:
            scale = 0
        if scale >= n_scales:
            scale = n_scales - 1
        labels[r] += scale
        # Four histograms alternate: with one, consecutive equal exponents would wait for each other's store.
        row = counts[labels[r]]
        for i in range(uint64(0), whole, uint64(4)):
            row[uint64(exponents[i])] += uint32(1)
            row[uint64(exponents[i + uint64(1)]) + uint64(256)] += uint32(1)
            row[uint64(exponents[i + uint64(2)]) + uint64(512)] += uint32(1)
            row[uint64(exponents[i + uint64(3)]) + uint64(768)] += uint32(1)
        for i in range(whole, uint64(size)):
            row[uint64(exponents[i])] += uint32(1)


def scale_runs(
    patterns: Patterns, size: int, parts: int, lowest: int, n_scales: int, labels: Bytes
) -> Counts:
    """Add the scale of each run of patterns to its label, and count exponents by label.

    The scale of a run is its mean exponent in units of 1 / `parts` octave, from 0 to `n_scales` - 1.

    Args:
        patterns: float patterns of all runs [m * size].
        size: number of patterns in a run.
        parts: scales per octave.
        lowest: mean exponent, in the same units, of scale 0.
        n_scales: number of scales.
        labels: labels of the runs [m], 0 or `n_scales`; changed in place.

    Returns:
        Occurrences of the eight bits below the sign by label [2 * n_scales, 256].
    """
    counts = np.zeros((2 * n_scales, 4 * 256), np.uint32)
    shift = patterns.dtype.type(8 * patterns.itemsize - 9)
    exponents = np.empty(size, np.uint8)
    _scale_runs(patterns, shift, parts, lowest, n_scales, exponents, labels, counts)
    return counts.reshape(2 * n_scales, 4, 256).sum(axis=1, dtype=np.int64)


@kernel
def _fill_row(previous: Any, current: Any, split: Any, sums: Any, stack: Any, n_before: int) -> None:
    """Compute one layer of the dynamic programme of `partition` by divide and conquer.

    The best split does not decrease as the end increases. `sums` holds prefix sums [3, n + 1] of weights,
    weighted values and weighted squares; an interval costs its weighted square error around its mean.
    """
    n = len(previous) - 1
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = n_before + 1, n, n_before, n - 1
    depth = 1
    while depth:
        depth -= 1
        low, high, least, most = stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3]
        if low > high:
            continue
        middle = (low + high) // 2
        best, best_cost, last = least, np.inf, most
        if middle - 1 < last:
            last = middle - 1
        for begin in range(least, last + 1):
            cost, total = previous[begin], sums[0, middle] - sums[0, begin]
            if total > 0.0:
                first = sums[1, middle] - sums[1, begin]
                error = sums[2, middle] - sums[2, begin] - first / total * first
                if error > 0.0:
                    cost += error
            if cost < best_cost:
                best, best_cost = begin, cost
        current[middle], split[middle] = best_cost, best
        stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = low, middle - 1, least, best
        depth += 1
        stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = middle + 1, high, best, most
        depth += 1


def partition(values: Reals, weights: Reals, n_parts: int) -> Counts:
    """Split ascending values [n] into `n_parts` intervals with the least weighted square error.

    Returns:
        The end of each interval [n_parts].
    """
    n = len(values)
    # Added from left to right, unlike `np.sum`; centred, so that sums of squares do not cancel.
    centred = values - np.add.accumulate(values * weights)[-1] / np.add.accumulate(weights)[-1]
    sums = np.zeros((3, n + 1))
    np.cumsum((weights, weights * centred, weights * centred * centred), axis=1, out=sums[:, 1:])
    previous = np.zeros(n + 1)
    with np.errstate(all="ignore"):
        errors = np.maximum(sums[2] - sums[1] / sums[0] * sums[1], 0.0)
    previous[1:] = np.where(sums[0, 1:] > 0, errors[1:], 0.0)
    splits, stack = np.zeros((n_parts, n + 1), np.int64), np.empty((128, 4), np.int64)
    for k in range(1, n_parts):
        current = np.full(n + 1, np.inf)
        _fill_row(previous, current, splits[k], sums, stack, k)
        previous = current
    ends, end = np.empty(n_parts, np.int64), n
    for k in range(n_parts - 1, -1, -1):
        ends[k] = end
        end = int(splits[k, end])
    return ends


@summing
def _deviation(exact: Any, restored: Any, result: Any) -> None:
    largest, error, power = 0.0, 0.0, 0.0
    for i in range(len(exact)):
        value = np.float64(exact[i])
        difference = np.float64(restored[i]) - value
        size = abs(difference)
        largest = size if size > largest else largest
        error += difference * difference
        power += value * value
    result[0], result[1], result[2] = largest, error, power


def deviation(exact: Floats, restored: Floats) -> tuple[float, float, float]:
    """Compute (greatest error, sum of squared errors, sum of squares) of float32 arrays [n] in double."""
    result = np.empty(3)
    _deviation(exact, restored, result)
    largest, error, power = result.tolist()
    return largest, error, power
