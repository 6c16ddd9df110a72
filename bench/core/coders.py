"""Coders that the codes of maps are held against: Huffman, counted, and one rANS stream."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.entropy.frequency import normalise, pack_table
from ckptz.entropy.streams import Segments, encode_rans


def huffman_bits(counts: NDArray[np.int64]) -> int:
    """Bits of an optimal prefix code, without its table; 0 for a lone symbol."""
    heap = [int(count) for count in counts if count]
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


def rans_bytes(symbols: NDArray[Any], expected_bytes: float | None = None) -> int:
    """Bytes of one rANS stream with its table; one byte if all symbols are the same.

    The number of lanes follows `expected_bytes`, by default what the table's frequencies promise.
    """
    counts = np.bincount(symbols, minlength=256)
    if counts.max() == len(symbols):
        return 1
    table = normalise(counts)
    segments = Segments(np.array([len(symbols)], np.int64), np.zeros(1, np.int64), table[None])
    if expected_bytes is None:
        expected_bytes = float(-(counts[counts > 0] * np.log2(table[counts > 0] / 4096)).sum()) / 8
    return len(pack_table(table)) + len(encode_rans(symbols, segments, expected_bytes))
