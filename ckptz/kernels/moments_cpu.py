"""Kernels that quantize optimizer state: second moments to logarithmic levels, first moments to linear ones.

Only encoders use them. Levels are computed in doubles, which represent distances of patterns exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64, uint8, uint32, uint64

from ckptz.kernels.numba_base import BLOCK, inlined, kernel, part, summing_part
from ckptz.kernels.values_cpu import _to_f32

EXCEPTION = -(2.0**60)  # level index of an element that no level restores
N_FOLDED = 512  # mantissas below 2 whose product does not overflow
MANTISSA, UNIT_EXPONENT = 0x000FFFFFFFFFFFFF, 0x3FF0000000000000  # of a double


# --- second moments -----------------------------------------------------------------------------


@inlined
def _ordered(pattern: Any, top: Any, mask: Any) -> Any:
    return pattern ^ (mask if pattern & top else top)


@part
def _indices(patterns: Any, predicted: Any, log_levels: Any, indices: Any, nominal: Any) -> None:
    """Compute the level index and the restored pattern of each of the patterns [n].

    Args:
        patterns: bit patterns of second moments.
        predicted: bit patterns of their predictions; empty for a prediction of zero.
        log_levels: (step, phase, top bit, all bits, largest pattern).
        indices: output, index of the level [n]; EXCEPTION if no level restores the element.
        nominal: output, pattern of the level [n].
    """
    step, phase, top_bit, all_bits, largest = log_levels
    top, mask = uint32(top_bit), uint32(all_bits)
    half = float64(step // 2)
    highest, zero = float64(top_bit + largest) - half, float64(top_bit)
    width, shift = float64(step), half - float64(phase)
    if len(predicted) == 0:
        for i in range(len(patterns)):
            distance = float64(_ordered(uint32(patterns[i]), top, mask)) - zero
            index = np.floor((distance + shift) / width)
            restored = zero + index * width + float64(phase)
            nominal[i] = uint32(int64(max(restored - zero, 1.0)))
            indices[i] = index if restored <= highest else EXCEPTION
    else:
        for i in range(len(patterns)):
            origin = float64(_ordered(uint32(predicted[i]), top, mask))
            distance = float64(_ordered(uint32(patterns[i]), top, mask)) - origin
            index = np.floor((distance + shift) / width)
            restored = origin + index * width + float64(phase)
            nominal[i] = uint32(int64(max(restored - zero, 1.0)))
            indices[i] = index if (restored <= highest) & (restored - half > zero) else EXCEPTION


@kernel
def log_level_codes(patterns: Any, predicted: Any, log_levels: Any, codes_of: Any, out: Any) -> None:
    """Write codes of patterns [n]; `codes_of` is (lowest level, number of levels, zero code, escape code)."""
    lowest, n_levels, zero_code, escape_code = codes_of
    indices, nominal = np.empty(BLOCK), np.empty(BLOCK, patterns.dtype)
    for begin in range(0, len(patterns), BLOCK):
        here, codes = patterns[begin : begin + BLOCK], out[begin : begin + BLOCK]
        _indices(here, predicted[begin : begin + BLOCK], log_levels, indices, nominal)
        for i in range(len(here)):
            code = indices[i] - float64(lowest)
            is_level = (code >= 0.0) & (code < float64(n_levels))
            code = code if is_level else float64(escape_code)
            codes[i] = uint8(int64(float64(zero_code) if here[i] == 0 else code))


@kernel
def log_level_sums(
    patterns: Any, predicted: Any, log_levels: Any, kind: int, first: int, counts: Any, roots: Any
) -> None:
    """Count levels from `first` on, and add up sqrt(element / level) by level.

    `counts` and `roots` are [4, n_levels + 2]: four partial sums alternate, so that consecutive equal levels
    do not wait for each other's store. The last two columns are for zeros and for elements without a level.
    """
    indices, nominal = np.empty(BLOCK), np.empty(BLOCK, patterns.dtype)
    exact, level = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    ratios, places = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint32)
    exact_f32, level_f32 = exact.view(np.float32), level.view(np.float32)
    width = counts.shape[1]
    n_levels, flat_counts, flat_roots = float64(width - 2), counts.reshape(-1), roots.reshape(-1)
    for begin in range(0, len(patterns), BLOCK):
        here = patterns[begin : begin + BLOCK]
        n = len(here)
        _indices(here, predicted[begin : begin + BLOCK], log_levels, indices, nominal)
        _to_f32(here, kind, exact[:n])
        _to_f32(nominal[:n], kind, level[:n])
        for i in range(n):
            ratios[i] = np.sqrt(exact_f32[i] / level_f32[i])
            at = indices[i] - float64(first)
            at = at if (at >= 0.0) & (at < n_levels) else n_levels + 1.0
            places[i] = uint32(int64(n_levels if here[i] == 0 else at))
        for i in range(n):
            at = uint64(i & 3) * uint64(width) + uint64(places[i])
            flat_counts[at] += 1
            flat_roots[at] += float64(ratios[i])


@kernel
def log_level_bits(
    distances: Any, labels: Any, step: int, phases: Any, first: int, counts: Any, bits: Any
) -> None:
    """Compute the size in bits of ideally coded levels, with a table for each label, for several phases.

    Args:
        distances: distances from the predictions, doubles [n].
        labels: label of each element [n].
        step: distance of two levels.
        phases: offsets of level 0 to compare, doubles [n_phases].
        first: the lowest level.
        counts: work array of zeros [n_labels, n_levels], zeros again afterwards; levels out of range are
            counted as the nearest one.
        bits: output [n_phases].
    """
    n_labels, n_levels = counts.shape
    flat, last = counts.reshape(-1), float64(n_levels - 1)
    for k in range(len(phases)):
        shift = float64(step // 2) - phases[k]
        for i in range(len(distances)):
            at = np.floor((distances[i] + shift) / float64(step)) - float64(first)
            at = min(max(at, 0.0), last)
            flat[uint64(labels[i]) * uint64(n_levels) + uint64(int64(at))] += 1
        sum_bits = 0.0
        for label in range(n_labels):
            own, total = counts[label], int64(0)
            for j in range(n_levels):
                if own[j]:
                    total += own[j]
                    sum_bits -= float64(own[j]) * np.log2(float64(own[j]))
                    own[j] = 0
            if total:
                sum_bits += float64(total) * np.log2(float64(total))
        bits[k] = sum_bits


@summing_part
def _row_product(mantissas: Any) -> float:
    product = 1.0
    for i in range(len(mantissas)):
        product *= mantissas[i]
    return product


@part
def _split_floats(patterns: Any, mantissas: Any, bits: Any, exponents: Any, lives: Any) -> None:
    """Split F32 patterns [n] into mantissas in [1, 2), exponents, and whether they are above zero.

    `bits` is a view of `mantissas`. Elements that are not above zero get mantissa 1 and exponent 0.
    """
    for i in range(len(patterns)):
        exponent, low = patterns[i] >> uint32(23), patterns[i] & uint32(0x7FFFFF)
        mantissas[i] = float64(low | (uint32(0x800000) if exponent else uint32(0)))
        exponents[i] = max(int64(exponent), 1) - 150
        lives[i] = uint32(patterns[i] - uint32(1)) < uint32(0x7FFFFFFF)
    for i in range(len(patterns)):
        exponent = (bits[i] >> 52) - 1023 + exponents[i]
        bits[i] = (bits[i] & MANTISSA) | UNIT_EXPONENT
        if not lives[i]:
            bits[i] = UNIT_EXPONENT
            exponent = 0
        exponents[i] = exponent


@part
def _fold(products: Any, exponents: Any, lives: Any, columns: Any) -> None:
    for j in range(len(products)):
        columns[0, j] += np.log2(products[j]) + float64(exponents[j])
        columns[1, j] += float64(lives[j])
        products[j], exponents[j], lives[j] = 1.0, 0, 0


@kernel
def log_sums(patterns: Any, begin: int, rows: Any, columns: Any) -> None:
    """Add up binary logarithms of the positive elements of a matrix, and count them, by row and column.

    Args:
        patterns: F32 patterns of the elements from `begin` on [n].
        begin: index of the first element in the flat matrix.
        rows: sums and counts by row [2, n_rows], added to in place.
        columns: sums and counts by column [2, n_columns], added to in place.
    """
    n_columns = columns.shape[1]
    mantissas, exponents = np.empty(N_FOLDED), np.empty(N_FOLDED, np.int64)
    bits, lives = mantissas.view(np.int64), np.empty(N_FOLDED, np.bool_)
    products, sums = np.ones(n_columns), np.zeros(n_columns, np.int64)
    n_lives = np.zeros(n_columns, np.int64)
    row, column, done, n_rows = begin // n_columns, begin % n_columns, 0, 0
    while done < len(patterns):
        n = min(N_FOLDED, n_columns - column, len(patterns) - done)
        here = patterns[done : done + n]
        _split_floats(here, mantissas, bits, exponents, lives)
        own, own_sums, own_lives = products[column:], sums[column:], n_lives[column:]
        total, n_live = 0, 0
        for i in range(n):
            total += exponents[i]
            n_live += lives[i]
        for i in range(n):
            own[i] *= mantissas[i]
            own_sums[i] += exponents[i]
            own_lives[i] += lives[i]
        rows[0, row] += np.log2(_row_product(mantissas[:n])) + float64(total)
        rows[1, row] += float64(n_live)
        done, column = done + n, column + n
        if column == n_columns:
            row, column, n_rows = row + 1, 0, n_rows + 1
            if n_rows % (N_FOLDED - 1) == 0:
                _fold(products, sums, n_lives, columns)
    _fold(products, sums, n_lives, columns)


# --- first moments ------------------------------------------------------------------------------


@kernel
def beyond(values: Any, squares: Any, ratio: float, out: Any) -> None:
    """Write abs(values) > ratio * sqrt(squares) to `out` [n]."""
    for i in range(len(values)):
        out[i] = float64(abs(values[i])) > ratio * np.sqrt(float64(squares[i]))


@inlined
def _size(pattern: Any, value: Any) -> Any:
    """Return the magnitude of a float as a double; subnormals by integers, which flush-to-zero spares."""
    tiny = float64(pattern & uint32(0x7FFFFF)) * 2.0**-149
    return abs(float64(value)) if pattern & uint32(0x7F800000) else tiny


@inlined
def _level(ratio: Any, nearest: Any, largest: Any) -> Any:
    """Return the level of a magnitude in steps: 0 below `nearest`, at most `largest`."""
    return 0 if ratio < nearest else int64(min(max(np.rint(ratio), 1.0), float64(largest)))


@part
def _near_zero(steps: Any, nearest: Any) -> Any:
    """Return, by label, F32 patterns [n_labels] of magnitudes below which the level is certainly 0."""
    bounds = np.empty(len(steps), np.float32)
    for label in range(len(steps)):
        bounds[label] = float32(min(steps[label] * nearest * 0.999999, 3e38))
    return bounds.view(np.uint32)


@kernel
def level_codes(
    patterns: Any, values: Any, labels: Any, steps: Any, dead_zone: Any, codes_of: Any, out: Any
) -> None:
    """Write linear level codes of floats [n], with a step for each label.

    `patterns` is a view of `values`. `codes_of` is (lowest level, number of levels, escape code, greatest
    level, which larger values get as well).
    """
    lowest, n_levels, escape_code, largest = codes_of
    nearest = 0.5 + dead_zone
    near_zero = _near_zero(steps, nearest)
    zero_code = uint8(-lowest if 0 <= -lowest < n_levels else escape_code)
    for i in range(len(out)):
        label = uint64(labels[i])
        if patterns[i] & uint32(0x7FFFFFFF) < near_zero[label]:
            out[i] = zero_code
            continue
        size = _size(patterns[i], values[i])
        level = _level(size / steps[label] if size > 0.0 else 0.0, nearest, largest)
        code = (-level if patterns[i] >> uint32(31) else level) - lowest
        out[i] = uint8(code if 0 <= code < n_levels else escape_code)


@kernel
def level_sums(
    patterns: Any, values: Any, labels: Any, steps: Any, dead_zone: Any, counts: Any, sums: Any
) -> None:
    """Count levels by label, and add up values in steps by label and level, except for level 0.

    `counts` and `sums` are [n_labels, 2 * largest + 1] for the levels from -largest to largest, which larger
    values get as well.
    """
    largest, nearest = counts.shape[1] // 2, 0.5 + dead_zone
    near_zero = _near_zero(steps, nearest)
    # Four counters alternate: with one, consecutive zeros would wait for each other's store.
    n_labels = uint64(len(steps))
    zeros = np.zeros(4 * len(steps), np.int64)
    for i in range(len(patterns)):
        label = uint64(labels[i])
        if patterns[i] & uint32(0x7FFFFFFF) < near_zero[label]:
            zeros[uint64(i & 3) * n_labels + label] += 1
            continue
        size = _size(patterns[i], values[i])
        level = _level(size / steps[label] if size > 0.0 else 0.0, nearest, largest)
        is_negative = patterns[i] >> uint32(31) != 0
        at = largest - level if is_negative else largest + level
        counts[label, at] += 1
        if level:
            ratio = size / (steps[label] if steps[label] > 0.0 else 1.0)
            sums[label, at] += -ratio if is_negative else ratio
    for i in range(len(zeros)):
        counts[uint64(i) % n_labels, largest] += zeros[i]


@kernel
def root_ratios(patterns: Any, values: Any, moments: Any, roots: Any, out: Any) -> Any:
    """Write abs(values) / sqrt(second moment) of the elements with a second moment above zero.

    Args:
        patterns: F32 patterns of first moments [n].
        values: the same as floats.
        moments: patterns of the second moments [n].
        roots: typical square root by magnitude context (exponent) of a second moment [256].
        out: output, at least as long as the number of results.

    Returns:
        The number of results.
    """
    n, shift = uint64(0), uint32(8 * moments.itemsize - 9)
    for i in range(len(patterns)):
        root = roots[uint64((uint32(moments[i]) >> shift) & uint32(0xFF))]
        out[n] = _size(patterns[i], values[i]) / root
        n += uint64((root > 0.0) & (moments[i] != 0))
    return int64(n)


# --- first moments --------------------------------------------------------------------------------

# BLAS libraries use all cores for such products, and their threads then wait in busy loops: on two cores that
# was three quarters of a save's CPU time.


@kernel
def add_products(matrix: Any, vectors: Any, out: Any) -> None:
    """Add the products of a matrix [n_rows, n_columns] with vectors [n_columns, n] to `out` [n_rows, n]."""
    for i in range(matrix.shape[0]):
        own = out[i]
        for j in range(matrix.shape[1]):
            factor, vector = matrix[i, j], vectors[j]
            for k in range(len(own)):
                own[k] += factor * vector[k]


@kernel
def add_transposed_products(matrix: Any, vectors: Any, out: Any) -> None:
    """Add the products of the transposed matrix with vectors [n_rows, n] to `out` [n_columns, n]."""
    for i in range(matrix.shape[0]):
        vector = vectors[i]
        for j in range(matrix.shape[1]):
            factor, own = matrix[i, j], out[j]
            for k in range(len(own)):
                own[k] += factor * vector[k]
