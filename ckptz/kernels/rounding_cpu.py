"""Rounding to grids by thresholds on the CPU.

Thresholds are drawn by counting: the one of an element follows from a key and the element's index alone, in
integers modulo 2^32, so that every backend, every split into chunks and every rerun draws the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, uint8, uint32, uint64

from ckptz.kernels.floats import ESCAPE, MAX_MAGNITUDE, NEAREST
from ckptz.kernels.numba_base import inlined, kernel, summing

GOLDEN = 0x9E3779B9
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B  # multipliers with good avalanche, found by search (hash-prospector)


@inlined
def _mixed(x: Any) -> Any:
    x = uint32((x ^ (x >> uint32(16))) * uint32(MIX_1))
    x = uint32((x ^ (x >> uint32(15))) * uint32(MIX_2))
    return uint32(x ^ (x >> uint32(16)))


@inlined
def _seeded(key: Any, index: Any) -> Any:
    """Give what the thresholds of all indices with the same high 32 bits follow from."""
    high = uint32(uint64(index) >> uint64(32))
    return _mixed(uint32(high * uint32(GOLDEN) + uint32(key)))


@inlined
def _threshold(seeded: Any, low: Any) -> Any:
    drawn = _mixed(uint32(uint32(low * uint32(GOLDEN)) ^ seeded))
    return float32(drawn >> uint32(8)) * float32(2.0**-24)


@kernel
def thresholds(key: int, begin: int, n: int) -> Any:
    """Draw thresholds [n], uniform in [0, 1), of elements begin..begin+n; all one half for NEAREST."""
    out = np.empty(n, np.float32)
    for i in range(n):
        low = uint32(uint64(begin + i) & uint64(0xFFFFFFFF))
        out[i] = float32(0.5) if key == NEAREST else _threshold(_seeded(key, begin + i), low)
    return out


@inlined
def _code(magnitude: Any, is_positive: Any) -> Any:
    """Code of a magnitude, whole and not negative; ESCAPE if it has none or is NaN."""
    code: Any = float32(2) * magnitude - float32(is_positive)
    code = code if magnitude > float32(0) else float32(0)
    code = code if magnitude <= float32(MAX_MAGNITUDE) else float32(ESCAPE)
    return uint8(int32(code))


@kernel
def _nearest(values: Any, base: Any, has_base: Any, step: Any, widened: Any, out: Any) -> None:
    for i in range(len(out)):
        residual = float32(values[i] - base[i]) if has_base else values[i]
        scaled = float32(residual / step)
        size = abs(scaled)
        magnitude = float32(np.floor(float32(size + float32(0.5))))
        out[i] = _code(float32(0) if size < widened else magnitude, scaled > float32(0))


@kernel
def _drawn(values: Any, base: Any, has_base: Any, step: Any, seeded: Any, low: Any, out: Any) -> None:
    for i in range(len(out)):
        residual = float32(values[i] - base[i]) if has_base else values[i]
        scaled = float32(residual / step)
        whole = float32(np.floor(scaled))
        drawn = _threshold(seeded, uint32(low + uint32(i)))
        is_up = drawn >= float32(float32(1) - float32(scaled - whole))
        whole = float32(whole + float32(is_up))
        out[i] = _code(abs(whole), whole > float32(0))


@kernel
def residual_codes(
    values: Any,
    base: Any,
    has_base: Any,
    steps: Any,
    labels: Any,
    row_units: Any,
    dead_zone: Any,
    key: Any,
    begin: Any,
    out: Any,
) -> None:
    """Write codes [n] of values less their base, in steps by row, to `out`."""
    widened, done = float32(0.5 + dead_zone), 0
    while done < len(values):
        at = begin + done
        low = uint64(at) & uint64(0xFFFFFFFF)
        n = min(row_units - at % row_units, len(values) - done, (1 << 32) - int64(low))
        step, part = steps[labels[at // row_units]], slice(done, done + n)
        if key == NEAREST:
            _nearest(values[part], base[part], has_base, step, widened, out[part])
        else:
            _drawn(values[part], base[part], has_base, step, _seeded(key, at), uint32(low), out[part])
        done += n


@kernel
def residual_sums(
    values: Any, base: Any, has_base: Any, labels: Any, row_units: Any, begin: Any, codes: Any, sums: Any
) -> None:
    """Add up magnitudes of values [n] less their base by class of row and by code [n_classes, 256].

    Those of code 0 are left out.
    """
    done = 0
    while done < len(values):
        at = begin + done
        n = min(row_units - at % row_units, len(values) - done)
        own = sums[labels[at // row_units]]
        for i in range(done, done + n):
            if codes[i]:
                value = float64(values[i])
                own[codes[i]] += abs(value - float64(base[i])) if has_base else abs(value)
        done += n


# --- extents ------------------------------------------------------------------------------------


@inlined
def _square(values: Any, base: Any, has_base: Any, i: Any) -> Any:
    difference = float64(values[i]) - (float64(base[i]) if has_base else 0.0)
    return difference * difference


@kernel
def _leaf(values: Any, base: Any, has_base: Any, begin: Any, n: Any) -> float:
    r0 = r1 = r2 = r3 = r4 = r5 = r6 = r7 = 0.0
    whole = n // 8 * 8
    for i in range(begin, begin + whole, 8):
        r0 += _square(values, base, has_base, i)
        r1 += _square(values, base, has_base, i + 1)
        r2 += _square(values, base, has_base, i + 2)
        r3 += _square(values, base, has_base, i + 3)
        r4 += _square(values, base, has_base, i + 4)
        r5 += _square(values, base, has_base, i + 5)
        r6 += _square(values, base, has_base, i + 6)
        r7 += _square(values, base, has_base, i + 7)
    total = ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))
    for i in range(begin + whole, begin + n):
        total += _square(values, base, has_base, i)
    return total


@kernel
def power(values: Any, base: Any, has_base: Any) -> float:
    """Sum squares of floats [n], less those of a base [n] if it has one, in pairs of pairs as numpy does.

    Steps follow from these sums to their last bit.
    """
    waiting = np.empty((64, 2), np.int64)  # right halves: begin, and size, 0 once their left neighbour waits
    sums = np.empty(64)
    begin, n, depth = np.int64(0), len(values), 0  # typed, or numba would compile once more for a literal
    while True:
        while n > 128:
            half = n // 2
            half -= half % 8
            waiting[depth, 0], waiting[depth, 1] = begin + half, n - half
            depth += 1
            n = half
        total = _leaf(values, base, has_base, begin, n)
        while depth and not waiting[depth - 1, 1]:
            depth -= 1
            total += sums[depth]
        if not depth:
            return total
        sums[depth - 1] = total
        begin, n = waiting[depth - 1]
        waiting[depth - 1, 1] = 0


@kernel
def largest(patterns: Any) -> Any:
    """Find the pattern of the greatest magnitude of F32 patterns [n]; 0 if there are none."""
    found = uint32(0)
    for i in range(len(patterns)):
        found = max(found, uint32(patterns[i] & uint32(0x7FFFFFFF)))
    return found


@summing
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
def sensitivities(values: Any, squares: Any, is_root: Any, begin: int, row_units: int, row_sums: Any) -> Any:
    """Add up second moments by row of a weight, floats [n] both; or their roots, whose squares count.

    Returns:
        The sum of second moments times squared values; and whether all of them are finite, and none negative.
    """
    patterns, n_odd = squares.view(np.uint32), uint32(0)
    for i in range(len(patterns)):
        pattern = patterns[i] & uint32(0x7FFFFFFF) if is_root else patterns[i]
        n_odd |= uint32(pattern >= uint32(0x7F800000)) & uint32(pattern != uint32(0x80000000))
    energy, done = 0.0, 0
    while done < len(squares):
        at = begin + done
        n = min(row_units - at % row_units, len(squares) - done)
        total, more = _row_sums(values[done : done + n], squares[done : done + n], is_root)
        row_sums[at // row_units] += total
        energy += more
        done += n
    return energy, n_odd == uint32(0)
