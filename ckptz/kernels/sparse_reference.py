"""Gaps between positions, in plain numpy: what the sparse kernels mean.

A position is the index of a unit within its chunk. A gap is the number of units between a position and
the one before it: as many bytes 255 as it holds 255, then the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.reference import MAX_GAP_BYTE as MAX_GAP_BYTE

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]


def pack_gaps(positions: Positions) -> Bytes:
    """Write the gap bytes of ascending positions."""
    gaps = np.diff(positions, prepend=-1) - 1
    parts = [bytes([MAX_GAP_BYTE]) * (gap // MAX_GAP_BYTE) + bytes([gap % MAX_GAP_BYTE]) for gap in gaps]
    return np.frombuffer(b"".join(parts), np.uint8).copy()


def unpack_gaps(gaps: Bytes, n: int, out: Positions) -> bool:
    """Undo `pack_gaps`, into `out`; False unless the bytes hold len(out) positions below `n`."""
    position, n_found = 0, 0
    for gap in gaps.tolist():
        position += gap
        if gap == MAX_GAP_BYTE:
            continue
        if position >= n or n_found == len(out):
            return False
        out[n_found] = position
        position += 1
        n_found += 1
    return n_found == len(out) and (len(gaps) == 0 or bool(gaps[-1] != MAX_GAP_BYTE))


def union(a: Positions, b: Positions) -> Positions:
    """Merge two ascending lists of positions [n] and [m] into one, each position once."""
    return np.union1d(a, b)


def place(positions: Positions, values: Bytes, among: Positions, out: Bytes) -> None:
    """Put the value of each position at its place among `among`, into `out` [len(among)]; 0 elsewhere."""
    out[:] = 0
    out[np.searchsorted(among, positions)] = values
