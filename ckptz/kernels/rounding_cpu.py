"""Rounding to grids on the CPU: to nearest, or stochastically with reproducible thresholds.

The threshold of an element is a hash of a dither seed and the element's index, computed in integers
modulo 2^32, so it is the same on every machine, for any split into chunks, and in every run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, uint8, uint32, uint64
from numpy.typing import NDArray

from ckptz.kernels.floats import ESCAPE, MAX_MAGNITUDE, NEAREST, Bytes, Floats, Reals
from ckptz.kernels.numba_base import inlined, kernel, part, summing_part

GOLDEN = 0x9E3779B9
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B  # multipliers with good avalanche, found by search (hash-prospector)
_NO_BASE = np.zeros(0, np.float32)  # in kernels, an empty base stands for zeros


@inlined
def _mixed(x: Any) -> Any:
    x = uint32((x ^ (x >> uint32(16))) * uint32(MIX_1))
    x = uint32((x ^ (x >> uint32(15))) * uint32(MIX_2))
    return uint32(x ^ (x >> uint32(16)))


@inlined
def _seeded(seed: Any, index: Any) -> Any:
    """Return the seed for the thresholds of all indices with the same upper 32 bits."""
    high = uint32(uint64(index) >> uint64(32))
    return _mixed(uint32(high * uint32(GOLDEN) + uint32(seed)))


@inlined
def _threshold(seeded: Any, low: Any) -> Any:
    mixed = _mixed(uint32(uint32(low * uint32(GOLDEN)) ^ seeded))
    return float32(mixed >> uint32(8)) * float32(2.0**-24)


@kernel
def _thresholds(seed: int, begin: int, out: Any) -> None:
    for i in range(len(out)):
        low = uint32(uint64(begin + i) & uint64(0xFFFFFFFF))
        out[i] = float32(0.5) if seed == NEAREST else _threshold(_seeded(seed, begin + i), low)


def thresholds(seed: int, begin: int, n: int) -> Floats:
    """Compute the thresholds [n], uniform in [0, 1), of elements begin..begin+n; one half for NEAREST."""
    out: Floats = np.empty(n, np.float32)
    _thresholds(seed, begin, out)
    return out


@inlined
def _code(magnitude: Any, is_positive: Any) -> Any:
    """Return the code of an integral magnitude and a sign; ESCAPE if it is too large or NaN."""
    code: Any = float32(2) * magnitude - float32(is_positive)
    code = code if magnitude > float32(0) else float32(0)
    code = code if magnitude <= float32(MAX_MAGNITUDE) else float32(ESCAPE)
    return uint8(int32(code))


@kernel
def _nearest_codes(
    values: Any,
    base: Any,
    steps: Any,
    labels: Any,
    row_patterns: int,
    widened: Any,
    begin: int,
    out: Any,
) -> None:
    done: Any = 0
    n, has_base = len(out), len(base) > 0
    while done < n:
        at = begin + done
        end = done + row_patterns - at % row_patterns
        if end > n:
            end = n
        step, here, codes = steps[labels[at // row_patterns]], values[done:end], out[done:end]
        origin = base[done:end]
        for i in range(len(codes)):
            residual = float32(here[i] - origin[i]) if has_base else here[i]
            scaled = float32(residual / step)
            size = abs(scaled)
            magnitude = float32(np.floor(float32(size + float32(0.5))))
            codes[i] = _code(float32(0) if size < widened else magnitude, scaled > float32(0))
        done = end


@part
def _stochastic(values: Any, base: Any, has_base: Any, step: Any, seeded: Any, low: Any, out: Any) -> None:
    for i in range(len(out)):
        residual = float32(values[i] - base[i]) if has_base else values[i]
        scaled = float32(residual / step)
        whole = float32(np.floor(scaled))
        threshold = _threshold(seeded, uint32(low + uint32(i)))
        is_up = threshold >= float32(float32(1) - float32(scaled - whole))
        whole = float32(whole + float32(is_up))
        out[i] = _code(abs(whole), whole > float32(0))


@kernel
def _stochastic_codes(
    values: Any,
    base: Any,
    steps: Any,
    labels: Any,
    row_patterns: int,
    seed: int,
    begin: int,
    out: Any,
) -> None:
    done: Any = 0
    n, has_base = len(out), len(base) > 0
    while done < n:
        at = begin + done
        low = int64(uint64(at) & uint64(0xFFFFFFFF))
        end, until = done + row_patterns - at % row_patterns, done + (1 << 32) - low
        if end > until:
            end = until
        if end > n:
            end = n
        step, seeded = steps[labels[at // row_patterns]], _seeded(seed, at)
        _stochastic(values[done:end], base[done:end], has_base, step, seeded, uint32(low), out[done:end])
        done = end


def residual_codes(
    values: Floats,
    base: Floats | None,
    steps: Floats,
    labels: Bytes,
    row_patterns: int,
    dead_zone: float,
    seed: int,
    begin: int,
    out: Bytes,
) -> None:
    """Quantize values minus their base to grid codes.

    Args:
        values: floats [n], elements begin..begin+n of the tensor.
        base: floats [n], or None.
        steps: grid step of each label.
        labels: label of each row of the tensor.
        row_patterns: number of elements in a row.
        dead_zone: half width, in steps, that is added to the range that becomes zero.
        seed: dither seed of stochastic rounding, or NEAREST.
        begin: index of the first value in the tensor.
        out: the codes [n].
    """
    inputs = values, _NO_BASE if base is None else base, steps, labels, row_patterns
    if seed == NEAREST:
        _nearest_codes(*inputs, np.float32(0.5 + dead_zone), begin, out)
    else:
        _stochastic_codes(*inputs, seed, begin, out)


@kernel
def _residual_sums(
    values: Any, base: Any, labels: Any, row_patterns: int, begin: int, codes: Any, sums: Any
) -> None:
    i, n, has_base = uint64(0), uint64(len(codes)), len(base) > 0
    while i < n:
        at = begin + int64(i)
        end = i + uint64(row_patterns - at % row_patterns)
        if end > n:
            end = n
        own = sums[labels[at // row_patterns]]
        for j in range(i, end):
            if codes[j]:
                value = float64(values[j])
                if has_base:
                    value -= float64(base[j])
                own[codes[j]] += abs(value)
        i = end


def residual_sums(
    values: Floats,
    base: Floats | None,
    labels: Bytes,
    row_patterns: int,
    begin: int,
    codes: Bytes,
    sums: Reals,
) -> None:
    """Add magnitudes of values minus their base [n] to `sums` [n_labels, 256], by label of row and code.

    Values with code 0 are skipped.
    """
    _residual_sums(values, _NO_BASE if base is None else base, labels, row_patterns, begin, codes, sums)


# --- extents ------------------------------------------------------------------------------------

LEAF = 128  # values added up in eight partial sums
_ZEROS = np.zeros(LEAF, np.float32)


@part
def _leaf(values: Any, base: Any, begin: Any, origin: Any, n: Any) -> float:
    r0 = r1 = r2 = r3 = r4 = r5 = r6 = r7 = 0.0
    i, j, whole = begin, origin, begin + (n & ~uint64(7))
    while i < whole:
        d0 = float64(values[i]) - float64(base[j])
        d1 = float64(values[i + uint64(1)]) - float64(base[j + uint64(1)])
        d2 = float64(values[i + uint64(2)]) - float64(base[j + uint64(2)])
        d3 = float64(values[i + uint64(3)]) - float64(base[j + uint64(3)])
        d4 = float64(values[i + uint64(4)]) - float64(base[j + uint64(4)])
        d5 = float64(values[i + uint64(5)]) - float64(base[j + uint64(5)])
        d6 = float64(values[i + uint64(6)]) - float64(base[j + uint64(6)])
        d7 = float64(values[i + uint64(7)]) - float64(base[j + uint64(7)])
        r0, r1, r2, r3 = r0 + d0 * d0, r1 + d1 * d1, r2 + d2 * d2, r3 + d3 * d3
        r4, r5, r6, r7 = r4 + d4 * d4, r5 + d5 * d5, r6 + d6 * d6, r7 + d7 * d7
        i, j = i + uint64(8), j + uint64(8)
    total = ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))
    while i < begin + n:
        d0 = float64(values[i]) - float64(base[j])
        total += d0 * d0
        i, j = i + uint64(1), j + uint64(1)
    return total


@kernel
def _power(values: Any, base: Any, has_base: bool, waiting: Any, sums: Any) -> float:
    # `waiting` [64, 2] is a stack of right halves: begin and size (0: `sums` [64] has the left half's sum).
    begin, n, depth = uint64(0), uint64(len(values)), 0
    while True:
        while n > uint64(LEAF):
            half = (n >> uint64(1)) & ~uint64(7)
            waiting[depth, 0], waiting[depth, 1] = begin + half, n - half
            depth += 1
            n = half
        total = _leaf(values, base, begin, begin if has_base else uint64(0), n)
        while depth and not waiting[depth - 1, 1]:
            depth -= 1
            total += sums[depth]
        if not depth:
            return total
        sums[depth - 1] = total
        begin, n = waiting[depth - 1, 0], waiting[depth - 1, 1]
        waiting[depth - 1, 1] = uint64(0)


def power(values: Floats, base: Floats | None = None) -> float:
    """Sum the squares of floats [n], or of their differences to a base [n], pairwise as numpy does.

    The order of the additions is fixed because grid steps depend on the last bit of the sum.
    """
    other, stack = _ZEROS if base is None else base, np.empty((64, 2), np.uint64)
    return float(_power(values, other, base is not None, stack, np.empty(64)))


@kernel
def _largest(patterns: Any) -> Any:
    largest = uint32(0)
    for i in range(len(patterns)):
        pattern = uint32(patterns[i] & uint32(0x7FFFFFFF))
        largest = pattern if pattern > largest else largest
    return largest


def largest(patterns: NDArray[np.uint32]) -> int:
    """Return the greatest magnitude of F32 patterns [n], as a pattern; 0 for an empty array."""
    return int(_largest(patterns))


@summing_part
def _row_sums(values: Any, squares: Any, is_root: Any) -> Any:
    total, energy = 0.0, 0.0
    for i in range(len(squares)):
        square, value = float64(squares[i]), float64(values[i])
        if is_root:
            square *= square
        total += square
        energy += square * (value * value)
    return total, energy


@kernel
def sensitivities(
    values: Any, squares: Any, is_root: Any, begin: int, row_patterns: int, row_sums: Any
) -> Any:
    """Add second moments [n] to `row_sums` by row of their weight, floats [n].

    Args:
        values: elements begin..begin+n of the weight.
        squares: their second moments, or with `is_root` the square roots of these.
        is_root: whether `squares` are roots.
        begin: index of the first element in the weight.
        row_patterns: number of elements in a row.
        row_sums: sums by row, added to in place.

    Returns:
        The sum of second moments times squared values, and whether all second moments are finite and >= 0.
    """
    patterns, n_odd = squares.view(np.uint32), uint32(0)
    for i in range(len(patterns)):
        pattern = patterns[i] & uint32(0x7FFFFFFF) if is_root else patterns[i]
        n_odd |= uint32(pattern >= uint32(0x7F800000)) & uint32(pattern != uint32(0x80000000))
    energy, done = 0.0, 0
    while done < len(squares):
        at = begin + done
        n = row_patterns - at % row_patterns
        if n > len(squares) - done:
            n = len(squares) - done
        total, more = _row_sums(values[done : done + n], squares[done : done + n], is_root)
        row_sums[at // row_patterns] += total
        energy += more
        done += n
    return energy, n_odd == uint32(0)
