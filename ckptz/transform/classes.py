"""Classes: labels that the decoder already has, which say what table a code uses.

Implements spec/03-transforms.md#classes. A frame lists at most three rules; the class of an element is
the mixed-radix number of their labels, the first rule most significant.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.bits.cursor import ByteReader, ByteWriter
from ckptz.errors import CorruptionError

MAX_TABLES: Final = 64  # spec/02-entropy.md#tables
N_MAGNITUDE_CLASSES: Final = 256

# Encoder only: bits that one more frequency table must save to stand for itself, measured as the
# typical size of a packed table.
TABLE_COST_BITS_PER_SYMBOL: Final = 6.0
TABLE_COST_BITS: Final = 40.0


class ClassRule(IntEnum):
    """spec/registry.md#class-rules."""

    BASE_MAGNITUDE = 1  # the eight bits below the sign of the base's unit


@dataclass(frozen=True, slots=True)
class TableMap:
    """Which of a stream's tables each class uses: runs of classes, [n_classes] when spread out."""

    table_of: NDArray[np.int64]

    def write(self, out: ByteWriter) -> None:
        """Runs: length varint, table u8."""
        changes = np.flatnonzero(np.diff(self.table_of)) + 1
        begins = [0, *changes.tolist()]
        for begin, end in zip(begins, [*begins[1:], len(self.table_of)], strict=True):
            out.varint(end - begin)
            out.u8(int(self.table_of[begin]))

    @classmethod
    def parse(cls, source: ByteReader, n_classes: int, n_tables: int) -> Self:
        """Inverse of `write`; refuses tables that do not exist."""
        table_of = np.empty(n_classes, np.int64)
        position = 0
        while position < n_classes:
            n, table = source.varint("class run"), source.u8("class run table")
            if not 1 <= n <= n_classes - position or table >= n_tables:
                raise CorruptionError(f"class run of {n} from {position} names table {table} of {n_tables}")
            table_of[position : position + n] = table
            position += n
        return cls(table_of)


def _row_bits(counts: NDArray[np.int64]) -> float:
    """Bits of one group: its ideal code and its table."""
    used = counts[counts > 0].astype(np.float64)
    total = used.sum()
    if not total:
        return 0.0
    code = float((used * (np.log2(total) - np.log2(used))).sum())
    return code + TABLE_COST_BITS + TABLE_COST_BITS_PER_SYMBOL * len(used)


def share_tables(counts: NDArray[np.int64], most: int = MAX_TABLES) -> tuple[NDArray[np.int64], TableMap]:
    """Merge neighbouring classes while one table for both costs less than two.

    Args:
        counts: occurrences [n_classes, 256] of each code in each class.
        most: tables allowed.

    Returns:
        Counts of each table [n_tables, 256] and the map from classes to tables.
    """
    used = np.flatnonzero(counts.any(axis=1))
    groups = [counts[k] for k in used]
    first = [int(k) for k in used]
    costs = [_row_bits(group) for group in groups]
    gains = [_merge_gain(groups, costs, i) for i in range(len(groups) - 1)]
    while gains and (max(gains) > 0 or len(groups) > most):
        i = int(np.argmax(gains))
        groups[i] = groups[i] + groups[i + 1]
        costs[i] = _row_bits(groups[i])
        del groups[i + 1], costs[i + 1], first[i + 1], gains[i]
        for j in (i - 1, i):
            if 0 <= j < len(gains):
                gains[j] = _merge_gain(groups, costs, j)
    bounds = np.array(first[1:], np.int64)
    return np.stack(groups), TableMap(np.searchsorted(bounds, np.arange(len(counts)), side="right"))


def _merge_gain(groups: list[NDArray[np.int64]], costs: list[float], i: int) -> float:
    return costs[i] + costs[i + 1] - _row_bits(groups[i] + groups[i + 1])
