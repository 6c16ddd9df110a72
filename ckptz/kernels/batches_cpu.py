"""Kernels that do in one call for many small streams what others do for one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from ckptz.kernels.coding_cpu import (
    MAX_PACKED_TABLE,
    N_LANES,
    _encode_segments,
    encoding_tables,
    pack_table,
    weigh,
)
from ckptz.kernels.floats import LAST_MIX, N_LAST, Bytes, Counts, Units
from ckptz.kernels.numba_base import kernel
from ckptz.kernels.planes_cpu import _class_starts, _magnitude_classes, _split_planes, histogram
from ckptz.kernels.planning_cpu import (
    entropy_bits,
    merge_neighbours,
    normalise_rows,
    row_entropy_bits,
    shared_cost_bits,
)


@kernel
def count_streams(symbols: Bytes, ends: Counts) -> Counts:
    counts, begin = np.empty((len(ends), 256), np.int64), 0
    for k in range(len(ends)):
        counts[k] = histogram(symbols[begin : ends[k]])
        begin = ends[k]
    return counts


@kernel
def weigh_rows(counts: Counts) -> Any:
    m, at = len(counts), 0
    frequencies, bits = np.empty((m, 256), np.uint16), np.empty(m)
    packed, ends = np.empty(m * MAX_PACKED_TABLE, np.uint8), np.empty(m, np.int64)
    for k in range(m):
        frequencies[k], one, bits[k] = weigh(counts[k])
        packed[at : at + len(one)] = one
        at += len(one)
        ends[k] = at
    return frequencies, packed[:at], ends, bits


@kernel
def repeats(symbols: Bytes, ends: Counts) -> Counts:
    found, last, begin = np.zeros((len(ends), 2), np.int64), np.empty(N_LAST, np.uint32), uint64(0)
    for k in range(len(ends)):
        last[:] = uint32(0)
        end, word, n_hits, n_runs, was_hit = uint64(ends[k]), uint64(0), uint64(0), uint64(0), uint64(0)
        first = min(begin + uint64(7), end)
        for i in range(begin, first):
            word = (word >> uint64(8)) | (uint64(symbols[i]) << uint64(56))
        for i in range(first, end):
            word = (word >> uint64(8)) | (uint64(symbols[i]) << uint64(56))
            mixed = word * uint64(LAST_MIX)
            at, tag = mixed >> uint64(50), uint32(mixed >> uint64(18))
            is_hit = uint64(last[at] == tag)
            last[at] = tag
            n_hits += is_hit
            n_runs += is_hit & ~was_hit  # without a branch, which would be a guess
            was_hit = is_hit
        found[k, 0], found[k, 1] = n_hits, n_runs
        begin = end
    return found


@kernel
def _put_stream(states: Any, n_lanes: int, words: Any, out: Any, at: int) -> int:
    """Write lane states and words to `out` from `at` on; returns the end."""
    for lane in range(n_lanes):
        out[at] = uint16(states[lane])
        out[at + 1] = uint16(states[lane] >> uint32(16))
        at += 2
    out[at : at + len(words)] = words
    return at + len(words)


@kernel
def rans_encode_streams(
    symbols: Bytes,
    begins: Counts,
    ends: Counts,
    frequencies: NDArray[np.uint16],
    n_lanes: Counts,
    heads: Bytes,
    head_ends: Counts,
) -> Any:
    n_streams, table_of, row = len(begins), np.zeros(1, np.int64), np.empty((1, 256), np.uint16)
    states, end = np.empty(N_LANES, np.uint32), np.empty(1, np.int64)
    n_words = len(heads)
    for k in range(n_streams):
        n_words += ends[k] - begins[k] + 2 + 2 * n_lanes[k]
    out = np.empty(n_words, np.uint16)
    spans, left, head = np.empty((n_streams, 2), np.int64), 0, 0
    for k in range(n_streams):
        here, n_head = symbols[begins[k] : ends[k]], head_ends[k] - head
        row[0], end[0] = frequencies[k], len(here)
        first = left + (n_head + 1) // 2 + 2 * n_lanes[k]
        left = first + len(here) + 1
        # Words are written from their end on, and what stands before them then: nothing is moved.
        entries = encoding_tables(row)
        first += _encode_segments(here, end, table_of, entries, states, n_lanes[k], out[first:left])
        _put_stream(states, n_lanes[k], out[:0], out, first - 2 * n_lanes[k])
        spans[k, 0], spans[k, 1] = 2 * (first - 2 * n_lanes[k]) - n_head, 2 * left
        out.view(np.uint8)[spans[k, 0] : spans[k, 0] + n_head] = heads[head : head_ends[k]]
        head = head_ends[k]
    return out.view(np.uint8), spans


@kernel
def _rows_of(labels: Bytes, n_classes: int) -> Any:
    """Number the classes that occur: how many there are, numbers of labels [n] and of classes [n_classes].

    A class that does not occur has the number of the one before it, or 0.
    """
    is_used, row_of = np.zeros(n_classes, np.bool_), np.zeros(n_classes, np.int64)
    for i in range(len(labels)):
        is_used[uint64(labels[i])] = True
    n = 0
    for k in range(n_classes):
        n += is_used[k]
        row_of[k] = max(n - 1, 0)
    narrow, rows = row_of.astype(np.uint8), np.empty(len(labels), np.uint8)
    for i in range(len(labels)):
        rows[i] = narrow[uint64(labels[i])]
    return n, rows, row_of


@kernel
def _row_counts(rows: Bytes, symbols: Bytes, n_rows: int) -> Counts:
    """Count each symbol in each row: [n_rows, 256]."""
    # Two by turns, and flat: equal neighbours would wait for each other's store in one.
    counts = np.zeros((2, 256 * n_rows), np.uint32)
    first, second = counts[0], counts[1]
    half = len(symbols) // 2
    for i in range(half):
        first[(uint64(rows[i]) << uint64(8)) | uint64(symbols[i])] += uint32(1)
        second[(uint64(rows[half + i]) << uint64(8)) | uint64(symbols[half + i])] += uint32(1)
    for i in range(2 * half, len(symbols)):
        first[(uint64(rows[i]) << uint64(8)) | uint64(symbols[i])] += uint32(1)
    total = np.empty(256 * n_rows, np.int64)
    for i in range(len(total)):
        total[i] = np.int64(first[i]) + second[i]
    return total.reshape(n_rows, 256)


@kernel
def _grouped(rows: Bytes, n_rows: int) -> Any:
    """Give the place of each label [n] in the order of classes, and the end of each class [n_rows]."""
    starts, places = _class_starts(rows, n_rows), np.empty(len(rows), np.int32)
    ends = np.append(starts[0, 1:], len(rows))
    quarter = len(rows) // 4
    for i in range(quarter):
        for q in range(4):
            j = q * quarter + i
            own, k = starts[q], uint64(rows[j])
            places[j] = own[k]
            own[k] += 1
    for i in range(4 * quarter, len(rows)):
        k = uint64(rows[i])
        places[i] = starts[3, k]
        starts[3, k] += 1
    return places, ends


@kernel
def delta_bits(
    units: Units, bases: Units, begins: Counts, ends: Counts, modes: Counts, n_classes: int
) -> Any:
    """Compute the bits [m, 3] of units from `begins` to `ends` [m] in three modes, ideally coded.

    Those of the first two modes are coded by classes of the base's magnitude.
    """
    bits, width = np.zeros((len(begins), 3)), 8 * units.itemsize
    shift, mask = max(width - 9, 0), 0xFF if width > 8 else 0x7F
    for k in range(len(begins)):
        own, base = units[begins[k] : ends[k]], bases[begins[k] : ends[k]]
        labels, planes = np.empty(len(own), np.uint8), np.empty((units.itemsize, len(own)), np.uint8)
        _magnitude_classes(base, shift, mask, labels)
        n_rows, rows, _ = _rows_of(labels, n_classes)
        for j in range(3):
            _split_planes(own, base, modes[j], planes)
            for i in range(len(planes)):
                if j < 2:
                    bits[k, j] += entropy_bits(_row_counts(rows, planes[i], n_rows))
                else:
                    bits[k, j] += row_entropy_bits(histogram(planes[i]))
    return bits


@kernel
def _put_varint(value: int, out: Bytes, at: int) -> int:
    while value >= 0x80:
        out[at] = uint8((value & 0x7F) | 0x80)
        value >>= 7
        at += 1
    out[at] = uint8(value)
    return at + 1


@kernel
def _put_tables(frequencies: Any, table_of: Counts, out: Bytes, at: int) -> int:
    """Write tables [n_tables, 256] and which of them each class uses, as a plan does; returns the end."""
    out[at] = uint8(len(frequencies))
    at += 1
    for row in range(len(frequencies)):
        packed = pack_table(frequencies[row])
        out[at : at + len(packed)] = packed
        at += len(packed)
    begin = 0
    for k in range(1, len(table_of) + 1):
        if k == len(table_of) or table_of[k] != table_of[begin]:
            at = _put_varint(k - begin, out, at)
            at = _put_varint(table_of[begin], out, at)
            begin = k
    return at


@kernel
def encode_classed(
    symbols: Bytes,
    labels: Bytes,
    ends: Counts,
    n_classes: int,
    most: int,
    table_bits: float,
    symbol_bits: float,
    lane_choices: Counts,
    lanes_from: Counts,
) -> Any:
    """Code the planes of tensors by frequency tables that neighbouring classes share.

    Args:
        symbols: planes one behind the other, [n_planes * n].
        labels: class of each unit [n].
        ends: end of each tensor in a plane.
        n_classes: of the labels, 256 at most.
        most: tables of a stream, of `table_bits` and of `symbol_bits` for each symbol.
        table_bits: see `most`.
        symbol_bits: see `most`.
        lane_choices: lanes that a stream may have.
        lanes_from: bytes from which on it gets them.

    Returns:
        Of the streams [m], all planes of one tensor and then of the next: tables [n_tables, 256] with the end
        of each stream, the table of each class [m, n_classes], both as they stand in a plan with the end of
        each stream, counts [m, 256], bytes at most, lanes, 0 where another coder may be smaller; states and
        words of the others with the end of each.
    """
    n_planes = len(symbols) // len(labels)
    m = n_planes * len(ends)
    tables, table_ends = np.empty((m * most, 256), np.uint16), np.empty(m, np.int64)
    packed = np.empty(m * (1 + 4 * n_classes) + m * most * MAX_PACKED_TABLE, np.uint8)
    packed_ends, table_of = np.empty(m, np.int64), np.empty((m, n_classes), np.int64)
    totals, n_bytes, n_lanes = np.empty((m, 256), np.int64), np.empty(m), np.zeros(m, np.int64)
    out = np.empty(len(symbols) + m * (1 + 2 * N_LANES), np.uint16)
    out_ends, states = np.empty(m, np.int64), np.empty(N_LANES, np.uint32)
    k, t, p, at, begin = 0, 0, 0, 0, 0
    for end in ends:
        n_rows, rows, row_of = _rows_of(labels[begin:end], n_classes)
        places, segments = _grouped(rows, n_rows)
        grouped, words = np.empty(end - begin, np.uint8), np.empty(end - begin + 1, np.uint16)
        for j in range(n_planes):
            here = symbols[j * len(labels) + begin : j * len(labels) + end]
            counts = _row_counts(rows, here, n_rows)
            group_of, sums = merge_neighbours(counts, most, table_bits, symbol_bits)
            frequencies = normalise_rows(sums)
            tables[t : t + len(sums)] = frequencies
            t += len(sums)
            table_of[k] = group_of[row_of]
            p = _put_tables(frequencies, table_of[k], packed, p)
            totals[k] = counts.sum(axis=0)
            n_bytes[k] = shared_cost_bits(counts, group_of, frequencies) / 8 + (1 + 4 * N_LANES)
            if totals[k].max() < len(here) and row_entropy_bits(totals[k]) / 8 >= n_bytes[k]:
                choice = 0
                while choice + 1 < len(lanes_from) and lanes_from[choice + 1] <= n_bytes[k]:
                    choice += 1
                n_lanes[k] = lane_choices[choice]
                for i in range(len(here)):
                    grouped[places[i]] = here[i]
                entries = encoding_tables(frequencies)
                q = _encode_segments(grouped, segments, group_of, entries, states, n_lanes[k], words)
                at = _put_stream(states, n_lanes[k], words[q:], out, at)
            table_ends[k], packed_ends[k], out_ends[k] = t, p, at
            k += 1
        begin = end
    return (
        tables[:t],
        table_ends,
        table_of,
        packed[:p],
        packed_ends,
        totals,
        n_bytes,
        n_lanes,
        out[:at],
        out_ends,
    )
