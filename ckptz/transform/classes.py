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
from ckptz.kernels import planning

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


def share_tables(counts: NDArray[np.int64], most: int = MAX_TABLES) -> tuple[NDArray[np.int64], TableMap]:
    """Merge neighbouring classes while one table for both costs less than two.

    Args:
        counts: occurrences [n_classes, 256] of each code in each class.
        most: tables allowed.

    Returns:
        Counts of each table [n_tables, 256] and the map from classes to tables.
    """
    group_of = planning().merge_neighbours(counts, most, TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL)
    begins = np.flatnonzero(np.diff(group_of, prepend=-1))
    return np.add.reduceat(counts, begins, axis=0), TableMap(group_of)
