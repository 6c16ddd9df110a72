"""The sparse kernels for the CPU, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint8

from ckptz.kernels.floats import MAX_GAP_BYTE, Bytes, Positions
from ckptz.kernels.numba_base import kernel


@kernel
def _n_gap_bytes(positions: Any) -> int:
    n, expected = 0, 0
    for i in range(len(positions)):
        n += (positions[i] - expected) // MAX_GAP_BYTE + 1
        expected = positions[i] + 1
    return n


@kernel
def _fill_gaps(positions: Any, out: Any) -> None:
    k, expected = 0, 0
    for i in range(len(positions)):
        gap = positions[i] - expected
        while gap >= MAX_GAP_BYTE:
            out[k] = uint8(MAX_GAP_BYTE)
            k += 1
            gap -= MAX_GAP_BYTE
        out[k] = uint8(gap)
        k += 1
        expected = positions[i] + 1


def pack_gaps(positions: Positions) -> Bytes:
    out = np.empty(_n_gap_bytes(positions), np.uint8)
    _fill_gaps(positions, out)
    return out


@kernel
def unpack_gaps(gaps: Bytes, n: int, out: Positions) -> bool:
    position, n_found = 0, 0
    for i in range(len(gaps)):
        position += int(gaps[i])
        if gaps[i] == MAX_GAP_BYTE:
            continue
        if position >= n or n_found == len(out):
            return False
        out[n_found] = position
        position += 1
        n_found += 1
    return n_found == len(out) and (len(gaps) == 0 or gaps[len(gaps) - 1] != MAX_GAP_BYTE)


@kernel
def union(a: Positions, b: Positions) -> Positions:
    out = np.empty(len(a) + len(b), np.int64)
    i, j, n = 0, 0, 0
    while i < len(a) and j < len(b):
        x, y = a[i], b[j]
        out[n] = min(x, y)
        i += x <= y
        j += y <= x
        n += 1
    while i < len(a):
        out[n] = a[i]
        i += 1
        n += 1
    while j < len(b):
        out[n] = b[j]
        j += 1
        n += 1
    return out[:n]


@kernel
def place(positions: Positions, values: Bytes, among: Positions, out: Bytes) -> None:
    i = 0
    for k in range(len(among)):
        is_here = i < len(positions) and positions[i] == among[k]
        out[k] = values[i] if is_here else uint8(0)
        i += is_here
