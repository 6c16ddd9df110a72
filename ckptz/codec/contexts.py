"""Encodes codes by context: sorts them by contexts that a decoder knows, with shared frequency tables.

Tensors of one chunk are sorted, counted and encoded in batches; tables are not shared between tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.tensor_plan import TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL, ContextCounts
from ckptz.format.context_rules import MAX_TABLES, N_MAGNITUDE_CONTEXTS, Labels
from ckptz.format.frequency import normalise, pack_tables, row_cost_bits, row_entropy_bits
from ckptz.format.plan import StreamTables
from ckptz.format.streams import (
    CoderId,
    Segments,
    Stream,
    cut,
    encode_rans_streams,
    encode_streams,
    least_packed,
    n_lanes_for,
)
from ckptz.kernels import cpu
from ckptz.kernels.floats import RAW, SCALE, Bytes, Counts, Frequencies, Patterns, Reals

HEAD_BYTES: Final = 5  # lanes and states, or headers of two embedded streams
# Bits that one more table of a delta must save, more than its size because building a table takes time in
# encoder and decoder. From bench/product/lossless.py: files are smallest from 100 to 400.
TABLE_BITS: Final = 300.0
TABLE_BITS_PER_SYMBOL: Final = 6.0


# The shortest tables that a frame can store, for streams that use another coder.
NO_TABLES: Final = StreamTables(
    np.eye(1, 256, dtype=np.uint16) * np.uint16(SCALE), np.zeros(N_MAGNITUDE_CONTEXTS, np.int64), b"\1\0\0\0"
)


class Contexts:
    """The contexts of m concatenated tensors.

    A row is a context that occurs in a tensor.

    Attributes:
        labels: context of each pattern [n], below `n_contexts`.
        ends: end of each tensor in `labels` [m].
        counts: number of patterns by tensor, context and third of the tensor, as kernels need them.
        contexts: context of each row, ascending within a tensor [n_rows].
        row_ends: end of each row in the sorted patterns [n_rows].
        tensor_rows: number of rows up to the end of each tensor [m].
        rows_of: by tensor and context [m, n_contexts], the index of the row within the tensor; for contexts
            that do not occur, the row before, so that runs of equal tables are long.
    """

    def __init__(self, labels: Labels, ends: Counts, n_contexts: int) -> None:
        self.labels, self.ends, self.n_contexts = labels, ends, n_contexts
        self.counts: NDArray[np.uint32] = cpu().context_counts(labels, ends, n_contexts)
        per_context = self.counts.sum(axis=2, dtype=np.int64)
        tensor, self.contexts = np.nonzero(per_context)
        self.row_ends = np.cumsum(per_context[tensor, self.contexts])
        is_used = per_context > 0
        self.tensor_rows = np.cumsum(np.count_nonzero(is_used, axis=1))
        self.rows_of = np.maximum(np.cumsum(is_used, axis=1) - 1, 0)


class Sorted:
    """The byte planes of codes [n] of m tensors, sorted by context.

    A part is one plane of one tensor; parts are ordered by plane, then by tensor.

    Args:
        contexts: the contexts of the codes.
        codes: the codes [n].

    Attributes:
        planes: the byte planes [k, n].
        part_rows: number of rows of `counts` up to the end of each part [k * m].
    """

    def __init__(self, contexts: Contexts, codes: Patterns) -> None:
        self.contexts, self._codes = contexts, codes
        grouped = cpu().group(codes, contexts.labels, contexts.ends, contexts.counts)
        self.planes: Bytes = cpu().split_planes(grouped, grouped, RAW)
        k, n_rows = codes.itemsize, len(contexts.contexts)
        plane = np.arange(k)[:, None]
        self._row_ends = (plane * len(codes) + contexts.row_ends).reshape(-1)
        self._part_ends = (plane * len(codes) + contexts.ends).reshape(-1)
        self.part_rows = (plane * n_rows + contexts.tensor_rows).reshape(-1)

    @cached_property
    def counts(self) -> Counts:
        """Occurrences of each code in each row of each plane [k * n_rows, 256].

        `saved_bits` and `encode` overwrite them.
        """
        counts: Counts = cpu().count_streams(self.planes.reshape(-1), self._row_ends)
        return counts

    def saved_bits(self) -> Reals:
        """Estimate the bits that contexts save in each tensor [m], from samples of the tensors.

        Contexts are merged first as if the samples were stored: with few codes in each context, entropies
        alone would promise far more than the complete tensor saves.
        """
        _, sums, ends = cpu().merge_rows(
            self.counts, self.part_rows, MAX_TABLES, TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL
        )
        begins, entropies = np.concatenate(([0], ends[:-1])), cpu().entropies
        together = entropies(np.add.reduceat(sums, begins, axis=0))
        saved: Reals = together - np.add.reduceat(entropies(sums), begins)
        return saved.reshape(len(self.planes), -1).sum(axis=0)

    def encode(self, huffman_margin: float | None) -> tuple[list[list[StreamTables]], list[list[Stream]]]:
        """Build tables and encode streams: for each tensor, one of each per plane."""
        table_of, sums, ends = cpu().merge_rows(
            self.counts, self.part_rows, MAX_TABLES, TABLE_BITS, TABLE_BITS_PER_SYMBOL
        )
        begins, frequencies = np.concatenate(([0], ends[:-1])), normalise(sums)
        n_bytes = np.add.reduceat(row_cost_bits(sums, frequencies), begins) / 8
        packed, packed_ends = pack_tables(frequencies)
        heads = cut(packed, packed_ends[ends - 1])
        m, rows_of = len(self.contexts.ends), self.contexts.rows_of
        table_bytes = np.diff(packed_ends[ends - 1], prepend=0)
        totals = np.add.reduceat(sums, begins, axis=0)
        streams = self._coded(frequencies, table_of, n_bytes, table_bytes, totals, huffman_margin)
        parts = zip(
            begins.tolist(), ends.tolist(), cut(table_of, self.part_rows), heads, streams, strict=True
        )
        tables = [
            StreamTables(frequencies[i:j], own[rows_of[part % m]] - i, bytes((j - i,)) + head.tobytes())
            if coder is CoderId.RANS_SHARED
            else NO_TABLES
            for part, (i, j, own, head, (coder, _)) in enumerate(parts)
        ]
        return [tables[t::m] for t in range(m)], [streams[t::m] for t in range(m)]

    def encode_by(
        self, tables: Sequence[StreamTables], counted: Sequence[ContextCounts], huffman_margin: float | None
    ) -> list[Stream]:
        """Encode a single tensor with given tables, one per plane; `counted` are its counts if known."""
        contexts = self.contexts.contexts
        by_part = counted or [ContextCounts(contexts, rows) for rows in cut(self.counts, self.part_rows)]
        n_bytes = np.array([one.bytes_by(own) for one, own in zip(by_part, tables, strict=True)])
        firsts = np.cumsum([0, *(len(own.frequencies) for own in tables)])
        table_of = np.concatenate(
            [first + own.table_of[contexts] for first, own in zip(firsts[:-1], tables, strict=True)]
        )
        totals = np.array([one.total for one in by_part])
        frequencies = np.concatenate([own.frequencies for own in tables])
        paid = np.zeros(len(n_bytes), np.int64)
        return self._coded(frequencies, table_of, n_bytes, paid, totals, huffman_margin)

    @cached_property
    def _parts(self) -> list[Bytes]:
        """Return the codes of each part in their original order."""
        return cut(cpu().split_planes(self._codes, self._codes, RAW).reshape(-1), self._part_ends)

    def _coded(
        self,
        frequencies: Frequencies,
        table_of: Counts,
        n_bytes: Reals,
        table_bytes: Counts,
        totals: Counts,
        huffman_margin: float | None,
    ) -> list[Stream]:
        """Encode each part with its tables, or with another coder where that is smaller.

        Args:
            frequencies: all frequency tables.
            table_of: index of the table of each row of `counts`.
            n_bytes: size of the codes of each part with these tables.
            table_bytes: size of the tables of each part, which another coder does not need.
            totals: occurrences of each code in each part.
            huffman_margin: see `encode_streams`.
        """
        sizes, n_lanes = totals.sum(axis=1), np.array([n_lanes_for(n) for n in n_bytes.tolist()])
        most = n_bytes + 1 + 4 * n_lanes + table_bytes
        is_constant = totals.max(axis=1) == sizes
        streams: dict[int, Stream] = {
            part: (CoderId.CONSTANT, bytes((int(totals[part].argmax()),)))
            for part in np.flatnonzero(is_constant).tolist()
        }
        # Lower bound for the other coders, except for repeats: entropy without contexts, a table and a
        # header.
        least = row_entropy_bits(totals) / 8 + least_packed(totals) + HEAD_BYTES
        if at := np.flatnonzero(~is_constant & (least < most)).tolist():
            beats = most[at].tolist()
            others = encode_streams(
                [self._parts[part] for part in at], totals[at], beats=beats, huffman_margin=huffman_margin
            )
            streams |= zip(at, others, strict=True)
        parts = range(len(totals))
        left = [part for part in parts if part not in streams or len(streams[part][1]) > most[part]]
        if left := [part for part in left if not is_constant[part]]:
            begins, firsts = self._part_ends - sizes, np.concatenate(([0], self.part_rows[:-1]))
            rows = np.concatenate([np.arange(firsts[part], self.part_rows[part]) for part in left])
            segments = Segments(self._row_ends[rows], table_of[rows], frequencies)
            stream_segments = np.cumsum(self.part_rows[left] - firsts[left])
            coded = encode_rans_streams(
                self.planes.reshape(-1),
                begins[left],
                stream_segments,
                segments,
                n_lanes[left],
                [b""] * len(left),
            )
            for part, data in zip(left, coded, strict=True):
                n_other = len(streams[part][1]) if part in streams else sizes[part]
                if len(data) + table_bytes[part] < n_other:
                    streams[part] = CoderId.RANS_SHARED, data
                elif part not in streams:
                    streams[part] = CoderId.STORED, self._parts[part].data
        return [streams[part] for part in parts]
