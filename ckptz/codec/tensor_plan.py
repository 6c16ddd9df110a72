"""Holds what an encoder decides for a tensor before its first byte: its plan, and what no reader sees.

With it goes how often each code occurs in each context, which the frequency tables that contexts share follow
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.quantizer import Quantizer
from ckptz.format.context_rules import MAX_TABLES, N_MAGNITUDE_CONTEXTS, Labels
from ckptz.format.frequency import normalise, row_cost_bits
from ckptz.format.plan import Plan, PlaneMode, StreamTables, kernel_mode
from ckptz.format.sources import MapFunction as MapFunction
from ckptz.format.sources import TensorSource
from ckptz.kernels import cpu, planning
from ckptz.kernels.floats import Patterns

# Bits that one more frequency table must save to stand for itself: the measured size of a packed table.
TABLE_COST_BITS_PER_SYMBOL: Final = 6.0
TABLE_COST_BITS: Final = 40.0


@dataclass(frozen=True, slots=True)
class ContextCounts:
    """Occurrences of each code in each context; contexts that do not occur have no row."""

    contexts: NDArray[np.int64]  # ascending [n_used]
    counts: NDArray[np.int64]  # occurrences [n_used, 256]

    @classmethod
    def of(cls, labels: Labels, codes: NDArray[np.uint8], n_contexts: int) -> Self:
        """Count codes [n] with labels [n]."""
        used = np.arange(n_contexts)
        if len(codes) < 256 * n_contexts:  # then most of the counts would be zeros
            used = np.flatnonzero(np.bincount(labels, minlength=n_contexts))
            row_of = np.zeros(n_contexts, np.min_scalar_type(len(used)))
            row_of[used] = np.arange(len(used))
            labels = row_of[labels]
        counts = cpu().context_histogram(labels, codes, len(used))
        is_used = counts.any(axis=1)
        return cls(used[is_used], counts[is_used])

    def __add__(self, other: Self) -> Self:
        contexts = np.union1d(self.contexts, other.contexts)
        counts = np.zeros((len(contexts), 256), np.int64)
        for part in (self, other):
            counts[np.searchsorted(contexts, part.contexts)] += part.counts
        return type(self)(contexts, counts)

    @property
    def total(self) -> NDArray[np.int64]:
        """Occurrences [256] of each code in any context."""
        return self.counts.sum(axis=0)

    @property
    def per_context(self) -> NDArray[np.int64]:
        """Patterns of each context [n_used]."""
        return self.counts.sum(axis=1)

    def bytes_by(self, tables: StreamTables) -> float:
        """Compute the bytes that the codes take with these tables, without the tables."""
        table_of = tables.table_of[self.contexts]
        runs = np.flatnonzero(np.diff(table_of, prepend=-1))  # neighbours share tables
        sums = np.add.reduceat(self.counts, runs, axis=0)
        return float(row_cost_bits(sums, tables.frequencies[table_of[runs]]).sum()) / 8


def plane_counts(
    source: TensorSource, base: TensorSource, mode: PlaneMode, bounds: tuple[int, int]
) -> list[ContextCounts]:
    """Count the codes of each plane of a chunk (begin, end) by the magnitude of the base."""
    patterns, base_patterns = source.patterns(*bounds), base.patterns(*bounds)
    labels = cpu().magnitudes(base_patterns)
    planes = cpu().split_planes(patterns, base_patterns, kernel_mode(mode, source.dtype))
    return [ContextCounts.of(labels, plane, N_MAGNITUDE_CONTEXTS) for plane in planes]


def share_tables(
    counted: ContextCounts, n_contexts: int, most: int = MAX_TABLES
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge neighbouring contexts while one table for both costs less than two.

    Args:
        counted: occurrences of each code in each context, of a tensor that is not empty.
        n_contexts: contexts of the frame.
        most: tables allowed.

    Returns:
        Counts of each table [n_tables, 256] and the table of each context [n_contexts].
    """
    ends = np.array([len(counted.counts)])
    group_of, sums, _ = planning().merge_rows(
        counted.counts, ends, most, TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL
    )
    # Contexts that do not occur use the table of the one before them, which keeps the runs long.
    before = np.searchsorted(counted.contexts, np.arange(n_contexts), side="right") - 1
    return sums, group_of[np.maximum(before, 0)]


def stream_tables(counted: ContextCounts, n_contexts: int) -> StreamTables:
    """Make frequency tables that contexts share, from how often each code occurs in each."""
    table_counts, table_of = share_tables(counted, n_contexts)
    return StreamTables(normalise(table_counts), table_of)


class Rounding(Protocol):
    """A rounding of patterns before they are split into byte planes."""

    def rounded(self, patterns: Patterns, kind: int, begin: int) -> Patterns:
        """Round patterns [n] from `begin` on, of a kind of `ckptz.kernels.floats`."""
        ...


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The plan of a tensor, and what only its encoder knows."""

    plan: Plan  # what the frame will say
    quantizer: Quantizer | None = None  # linear and bits domains: gives the codes
    note: str = ""  # what the user should know, or empty
    # codes by context of each stream, if the planner counted the one chunk there is
    counted: tuple[ContextCounts, ...] = ()
    # of runs with contexts, by chunk and stream: how often each table has each code, where runs begin
    by_table: tuple[tuple[NDArray[np.int64], ...], ...] = ()
    huffman_margin: float | None = None  # of the effort: see `Effort`
    is_sparse: bool = False  # code a chunk of which few patterns changed by their positions
    # what the file's record says of the planning, beside what was asked
    recorded: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    # planes domain: what patterns are rounded to before they are split, if at all
    rounding: Rounding | None = None
