"""Rounding to grids by thresholds, in numpy: the meaning of `rounding_cpu`, equal to it bit for bit.

Thresholds are drawn by counting: the one of an element follows from a key and the element's index alone, in
integers modulo 2^32, so that every backend, every split into chunks and every rerun draws the same.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

NEAREST: Final = -1  # instead of a key: every threshold is one half
GOLDEN: Final = 0x9E3779B9
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B  # multipliers with good avalanche, found by search (hash-prospector)
MAX_MAGNITUDE: Final = 127
ESCAPE: Final = 255


def _mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX_1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(MIX_2)
    return x ^ (x >> np.uint32(16))


def thresholds(key: int, begin: int, n: int) -> Floats:
    """Draw the thresholds of elements begin..begin+n, uniform in [0, 1) [n].

    Args:
        key: 32 bits, or NEAREST.
        begin: index of the first element.
        n: elements.
    """
    if key == NEAREST:
        return np.full(n, 0.5, np.float32)
    index = np.arange(begin, begin + n, dtype=np.uint64)
    low, high = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        seeded = _mixed(high * np.uint32(GOLDEN) + np.uint32(key))
        drawn = _mixed(low * np.uint32(GOLDEN) ^ seeded)
    return (drawn >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def grid_codes(scaled: Floats, dead_zone: float, key: int, begin: int) -> Bytes:
    """Round values given in steps: code 0 for zero, 2 m - 1 for +m, 2 m for -m, ESCAPE beyond 127.

    The magnitude and sign are those of floor(value + threshold). A dead zone widens zero alone.

    Args:
        scaled: finite [n].
        dead_zone: additional share of a step on both sides of zero; 0 where thresholds are drawn.
        key: of the thresholds, or NEAREST.
        begin: index of the first value in its tensor.
    """
    if key == NEAREST:  # halves away from zero, on both sides alike
        magnitude = np.floor(np.abs(scaled) + np.float32(0.5))
        magnitude[np.abs(scaled) < np.float32(0.5 + dead_zone)] = 0
        is_positive = scaled > 0
    else:
        whole = np.floor(scaled)
        whole += thresholds(key, begin, len(scaled)) >= np.float32(1) - (scaled - whole)
        magnitude, is_positive = np.abs(whole), whole > 0
    codes = 2 * np.minimum(magnitude, np.float32(MAX_MAGNITUDE)) - is_positive
    codes[magnitude == 0] = 0
    codes[~(magnitude <= MAX_MAGNITUDE)] = ESCAPE
    return codes.astype(np.uint8)


def residual_codes(
    values: Floats,
    base: Floats | None,
    steps: Floats,
    labels: Bytes,
    row_units: int,
    dead_zone: float,
    key: int,
    begin: int,
) -> Bytes:
    """Round values less their base, in steps by row; see `grid_codes`.

    Args:
        values: finite [n].
        base: finite [n], or None for zero.
        steps: of each class of rows, above 0 [n_classes].
        labels: class of each row [n_rows].
        row_units: elements of a row.
        dead_zone: see `grid_codes`.
        key: see `grid_codes`.
        begin: index of the first value in its tensor.
    """
    return grid_codes(_scaled(values, base, steps, labels, row_units, begin), dead_zone, key, begin)


def _scaled(
    values: Floats, base: Floats | None, steps: Floats, labels: Bytes, row_units: int, begin: int
) -> Floats:
    residual = values if base is None else values - base
    rows = np.arange(begin, begin + len(values)) // row_units
    scaled: Floats = residual / steps[labels[rows]]
    return scaled
