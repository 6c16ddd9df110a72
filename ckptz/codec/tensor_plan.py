"""All decisions of an encoder for one tensor: the plan that its frame stores, and encoder-only settings.

Also the counts of codes by context, and the merging of contexts into shared frequency tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.quantizer import Quantizer
from ckptz.format.context_rules import MAX_TABLES, N_MAGNITUDE_CONTEXTS, Labels
from ckptz.format.frequency import normalise, row_cost_bits
from ckptz.format.plan import Plan, PlaneMode, StreamTables, kernel_mode
from ckptz.format.sources import TensorSource
from ckptz.kernels import cpu

# Measured size of a packed frequency table, which one more table must save.
TABLE_COST_BITS_PER_SYMBOL: Final = 6.0
TABLE_COST_BITS: Final = 40.0


@dataclass(frozen=True, slots=True)
class ContextCounts:
    """Occurrences of each code in each context that occurs."""

    contexts: NDArray[np.int64]  # ascending [n_used]
    counts: NDArray[np.int64]  # occurrences [n_used, n_codes]; no code is `n_codes` or larger

    @classmethod
    def of(cls, labels: Labels, codes: NDArray[np.uint8], n_contexts: int) -> Self:
        """Count codes [n] with labels [n]."""
        used, n_bits = np.arange(n_contexts), int(codes.max(initial=0)).bit_length()
        if len(codes) < n_contexts << n_bits:  # most counts would be zeros
            used = np.flatnonzero(np.bincount(labels, minlength=n_contexts))
            row_of = np.zeros(n_contexts, np.min_scalar_type(len(used)))
            row_of[used] = np.arange(len(used))
            labels = row_of[labels]
        counts = cpu().context_histogram(labels, codes, len(used), n_bits)
        is_used = counts.any(axis=1)
        return cls(used[is_used], counts[is_used])

    def __add__(self, other: Self) -> Self:
        contexts = np.union1d(self.contexts, other.contexts)
        n_codes = max(self.counts.shape[1], other.counts.shape[1])
        counts = np.zeros((len(contexts), n_codes), np.int64)
        for part in (self, other):
            counts[np.searchsorted(contexts, part.contexts), : part.counts.shape[1]] += part.counts
        return type(self)(contexts, counts)

    @property
    def total(self) -> NDArray[np.int64]:
        """Occurrences [256] of each code in any context."""
        return _of_all_codes(self.counts.sum(axis=0))

    @property
    def per_context(self) -> NDArray[np.int64]:
        """Number of codes in each context [n_used]."""
        return self.counts.sum(axis=1)

    def bytes_by(self, tables: StreamTables) -> float:
        """Return the size in bytes of the codes with the given tables, without the tables themselves."""
        table_of = tables.table_of[self.contexts]
        is_first = np.ones(len(table_of), np.bool_)
        is_first[1:] = table_of[1:] != table_of[:-1]
        runs = np.flatnonzero(is_first)  # adjacent contexts share tables
        sums = np.add.reduceat(self.counts, runs, axis=0)
        return float(row_cost_bits(sums, tables.frequencies[table_of[runs], : sums.shape[1]]).sum()) / 8


def _of_all_codes(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Append zeros to counts [..., n_codes], for the codes up to 255."""
    every = np.zeros((*counts.shape[:-1], 256), np.int64)
    every[..., : counts.shape[-1]] = counts
    return every


def plane_counts(
    source: TensorSource, base: TensorSource, mode: PlaneMode, n_random: int, bounds: tuple[int, int]
) -> list[ContextCounts]:
    """Count the codes of a chunk (begin, end), in planes from `n_random` on, by the magnitude of the base."""
    patterns, base_patterns = source.patterns(*bounds), base.patterns(*bounds)
    labels = cpu().magnitudes(base_patterns)
    planes = cpu().split_planes(patterns, base_patterns, kernel_mode(mode, source.dtype))
    return [ContextCounts.of(labels, plane, N_MAGNITUDE_CONTEXTS) for plane in planes[n_random:]]


def stream_tables(counted: ContextCounts, n_contexts: int, most: int = MAX_TABLES) -> StreamTables:
    """Build frequency tables; adjacent contexts share one while it costs less than two.

    Args:
        counted: occurrences of each code in each context; not empty.
        n_contexts: number of contexts in the frame.
        most: maximum number of tables.
    """
    ends = np.array([len(counted.counts)])
    group_of, sums, _ = cpu().merge_rows(
        counted.counts.copy(), ends, most, TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL
    )
    # Unused contexts get the table of the context before them, so that runs of equal tables are long.
    before = np.searchsorted(counted.contexts, np.arange(n_contexts), side="right") - 1
    return StreamTables(normalise(_of_all_codes(sums)), group_of[np.maximum(before, 0)])


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The plan of a tensor, and encoder-only settings."""

    plan: Plan  # stored in the frame
    quantizer: Quantizer | None = None  # linear and bits domains: chooses the codes
    note: str = ""  # note for the user, or empty
    # Counts of codes by context for each stream, if the tensor has one chunk and the planner has counted it.
    counted: tuple[ContextCounts, ...] = ()
    # With contexts by run: counts of codes by table for each chunk and stream, of runs that begin in the
    # chunk.
    by_table: tuple[tuple[NDArray[np.int64], ...], ...] = ()
    n_random: int = 0  # lowest planes that look random, so are encoded without contexts
    huffman_margin: float | None = None  # see `Effort`
    counts_zeros: bool = False  # count the elements whose code is restored as zero
    is_sparse: bool = False  # encode the positions of changes in chunks where few patterns changed
    # Settings that planning chose, added to those of the recipe in the file's record.
    recorded: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    # Planes domain: the tensor with rounded values, whose patterns are encoded, or None.
    rounded: TensorSource | None = None
