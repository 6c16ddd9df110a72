"""Rounding to grids by thresholds on the CPU.

Thresholds are drawn by counting: the one of an element follows from a key and the element's index alone, in
integers modulo 2^32, so that every backend, every split into chunks and every rerun draws the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, uint32, uint64

from ckptz.kernels.floats import ESCAPE, MAX_MAGNITUDE, NEAREST
from ckptz.kernels.numba_base import inlined, kernel

GOLDEN = 0x9E3779B9
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B  # multipliers with good avalanche, found by search (hash-prospector)


@inlined
def _mixed(x: Any) -> Any:
    x = uint32((x ^ (x >> uint32(16))) * uint32(MIX_1))
    x = uint32((x ^ (x >> uint32(15))) * uint32(MIX_2))
    return uint32(x ^ (x >> uint32(16)))


@inlined
def _threshold(key: Any, index: Any) -> Any:
    high = uint32(uint64(index) >> uint64(32))
    low = uint32(uint64(index) & uint64(0xFFFFFFFF))
    seeded = _mixed(uint32(high * uint32(GOLDEN) + uint32(key)))
    drawn = _mixed(uint32(uint32(low * uint32(GOLDEN)) ^ seeded))
    return float32(drawn >> uint32(8)) * float32(2.0**-24)


@kernel
def thresholds(key: int, begin: int, n: int) -> Any:
    """Draw thresholds [n], uniform in [0, 1), of elements begin..begin+n; all one half for NEAREST."""
    out = np.empty(n, np.float32)
    for i in range(n):
        out[i] = float32(0.5) if key == NEAREST else _threshold(key, begin + i)
    return out


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
    widened = float32(0.5 + dead_zone)
    row, left = begin // row_units, row_units - begin % row_units
    step = steps[labels[row]]
    for i in range(len(values)):
        if left == 0:
            row += 1
            left = row_units
            step = steps[labels[row]]
        left -= 1
        residual = float32(values[i] - base[i]) if has_base else values[i]
        scaled = float32(residual / step)
        if key == NEAREST:
            size = abs(scaled)
            magnitude = np.floor(float32(size + float32(0.5)))
            if size < widened:
                magnitude = float32(0)
            is_positive = scaled > float32(0)
        else:
            whole = np.floor(scaled)
            if _threshold(key, begin + i) >= float32(float32(1) - float32(scaled - whole)):
                whole = float32(whole + float32(1))
            magnitude, is_positive = abs(whole), whole > float32(0)
        if not magnitude <= MAX_MAGNITUDE:
            out[i] = ESCAPE
        elif magnitude == 0:
            out[i] = 0
        else:
            out[i] = 2 * int64(magnitude) - is_positive
