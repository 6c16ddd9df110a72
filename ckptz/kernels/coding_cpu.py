"""Entropy coding on the CPU: histograms, rANS, packed frequency tables.

Slice assignments, reductions and sorts are avoided, since numba compiles them again inside every kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from ckptz.kernels import plain
from ckptz.kernels.floats import (
    LAST_MIX,
    MAX_GOLOMB_BITS,
    MAX_TABLE_ORDER,
    N_LAST,
    SCALE,
    SMALL_PART,
    STATE_LOW,
    Bytes,
    Counts,
    Frequencies,
)
from ckptz.kernels.lanes_cpu import decode_step, encode_step
from ckptz.kernels.memory_cpu import load_64
from ckptz.kernels.numba_base import ONE, kernel, part

N_LANES = 32  # lanes of the vectorised loops; streams of 1 and 4 lanes use the scalar loops
N_PAIRS, PAIR = 1 << 16, np.uint64(0xFFFF)
COUNTED_BY_PAIRS = 1 << 18  # symbols from which on it pays to clear and add up pair tables of 512 KiB
LOW_12 = np.uint64(0xFFF)
LOW_32 = np.uint64(0xFFFFFFFF)


# --- histograms ---------------------------------------------------------------------------------


@part
def _count_pairs(symbols: Any, begin: Any, end: Any, pairs: Any, counts: Any) -> None:
    """Count a long stream by pairs of symbols.

    Two tables alternate: with one, consecutive equal pairs would wait for each other's store.
    """
    for i in range(2 * N_PAIRS):
        pairs[i] = uint32(0)
    last = begin + ((end - begin) & ~uint64(7))
    for i in range(begin, last, uint64(8)):
        word = load_64(symbols, i)
        pairs[word & PAIR] += uint32(1)
        pairs[((word >> uint64(16)) & PAIR) + uint64(N_PAIRS)] += uint32(1)
        pairs[(word >> uint64(32)) & PAIR] += uint32(1)
        pairs[(word >> uint64(48)) + uint64(N_PAIRS)] += uint32(1)
    for i in range(last, end):
        counts[uint64(symbols[i])] += 1
    for high in range(512):
        row, n_row = pairs[256 * high : 256 * high + 256], uint32(0)
        for low in range(256):
            n_row += row[low]
            counts[low] += row[low]
        counts[high & 255] += n_row


@kernel
def _count_streams(symbols: Any, ends: Any, parts: Any, pairs: Any, counts: Any) -> None:
    # Four histograms alternate: with one, consecutive equal symbols would wait for each other's store.
    begin = uint64(0)
    for k in range(len(ends)):
        end = uint64(ends[k])
        for j in range(len(parts)):
            parts[j] = uint32(0)
        whole = begin + ((end - begin) & ~uint64(3))
        if end - begin >= uint64(COUNTED_BY_PAIRS):
            _count_pairs(symbols, begin, end, pairs, counts[k])
            begin = whole = end
        for i in range(begin, whole, uint64(4)):
            parts[uint64(symbols[i])] += uint32(1)
            parts[uint64(symbols[i + uint64(1)]) + uint64(256)] += uint32(1)
            parts[uint64(symbols[i + uint64(2)]) + uint64(512)] += uint32(1)
            parts[uint64(symbols[i + uint64(3)]) + uint64(768)] += uint32(1)
        for i in range(whole, end):
            parts[uint64(symbols[i])] += uint32(1)
        for j in range(256):
            counts[k, j] += np.int64(parts[j]) + parts[j + 256] + parts[j + 512] + parts[j + 768]
        begin = end


def count_streams(symbols: Bytes, ends: Counts) -> Counts:
    counts, is_long = np.zeros((len(ends), 256), np.int64), len(symbols) >= COUNTED_BY_PAIRS
    pairs = np.empty(2 * N_PAIRS if is_long else 0, np.uint32)
    _count_streams(symbols, ends, np.empty(4 * 256, np.uint32), pairs, counts)
    return counts


def histogram(symbols: Bytes) -> Counts:
    return count_streams(symbols, np.array([len(symbols)]))[0]


@kernel
def _repeats(symbols: Any, ends: Any, last: Any, result: Any) -> None:
    begin = uint64(0)
    for k in range(len(ends)):
        for j in range(N_LAST):
            last[j] = uint32(0)
        end, word, n_hits, n_runs, was_hit = uint64(ends[k]), uint64(0), uint64(0), uint64(0), uint64(0)
        for i in range(begin, end):
            word = (word >> uint64(8)) | (uint64(symbols[i]) << uint64(56))
            if i < begin + uint64(7):
                continue
            mixed = word * uint64(LAST_MIX)
            at, tag = mixed >> uint64(50), uint32(mixed >> uint64(18))
            is_hit = uint64(last[at] == tag)
            last[at] = tag
            n_hits += is_hit
            n_runs += is_hit & ~was_hit  # branchless: a branch would be mispredicted
            was_hit = is_hit
        result[k, 0], result[k, 1] = n_hits, n_runs
        begin = end


def repeats(symbols: Bytes, ends: Counts) -> Counts:
    result = np.zeros((len(ends), 2), np.int64)
    if len(symbols):
        _repeats(symbols, ends, np.empty(N_LAST, np.uint32), result)
    return result


# --- rANS ---------------------------------------------------------------------------------------


@part
def _encode_scalar(
    symbols: Any, begin: Any, end: Any, origin: Any, entries: Any, lanes: Any, last: Any, words: Any, q: Any
) -> Any:
    i = end
    while i > begin:
        i -= uint64(1)
        lane = (i - origin) & last
        entry, state = entries[uint64(symbols[i])], uint64(lanes[lane])
        # Branchless, as a branch would be mispredicted: a word is always written, but kept only if needed.
        words[q - uint64(1)] = uint16(state)
        full = uint64((state >> uint64(20)) > (entry >> uint64(48)))
        q -= full
        state >>= full << uint64(4)
        sum_ = ((state * (entry & LOW_32)) >> uint64(32)) + state
        quotient = sum_ >> ((entry >> uint64(44)) & uint64(15))
        rest = (quotient & LOW_32) * ((uint64(4095) - (entry >> uint64(48))) & LOW_32)
        lanes[lane] = uint32(state + ((entry >> uint64(32)) & LOW_12) + rest)
    return q


@kernel
def _rans_encode(
    symbols: Any,
    begins: Any,
    stream_segments: Any,
    segment_ends: Any,
    table_of: Any,
    entries: Any,
    n_lanes: Any,
    heads: Any,
    head_ends: Any,
    lanes: Any,
    words: Any,
    out: Any,
    spans: Any,
) -> None:
    """Encode streams backwards from their ends, which moves no bytes; `out` is a byte view of `words`."""
    left, head, s0 = uint64(0), 0, 0
    for k in range(len(begins)):
        origin, s1, n_head = uint64(begins[k]), stream_segments[k], head_ends[k] - head
        last = uint64(n_lanes[k] - 1)
        for lane in range(N_LANES):
            lanes[lane] = uint32(STATE_LOW)
        n_codes = uint64(segment_ends[s1 - 1]) - origin
        left += uint64((n_head + 1) // 2 + 2 * n_lanes[k] + 1) + n_codes
        q = left
        for s in range(s1 - 1, s0 - 1, -1):
            begin = uint64(segment_ends[s - 1]) if s > s0 else origin
            end, own = uint64(segment_ends[s]), entries[table_of[s]]
            if end > begin and own[uint64(symbols[begin])] >> uint64(48) == uint64(SCALE - 1):
                continue  # the only symbol of a table does not change the state
            # Symbols after the last step of all 32 lanes, the steps of 32, and symbols before the first.
            whole_begin = whole_end = begin
            if last == uint64(N_LANES - 1):
                whole_end = end - ((end - origin) & last)
                whole_begin = begin + ((origin - begin) & last)
                if whole_end < whole_begin:
                    whole_end = begin
            for turn in range(2):
                if turn:
                    if whole_end == begin:
                        break
                    while whole_end > whole_begin:
                        whole_end -= uint64(N_LANES)
                        q = encode_step(lanes, own, words, q, symbols, whole_end)
                    end, whole_end = whole_begin, begin
                q = _encode_scalar(symbols, whole_end, end, origin, own, lanes, last, words, q)
        q -= uint64(2 * n_lanes[k])
        for lane in range(n_lanes[k]):
            words[q + uint64(2 * lane)] = uint16(lanes[lane])
            words[q + uint64(2 * lane + 1)] = uint16(lanes[lane] >> uint32(16))
        at = 2 * np.int64(q) - n_head
        spans[k, 0], spans[k, 1] = at, 2 * np.int64(left)
        for j in range(n_head):
            out[at + j] = heads[head + j]
        head, s0 = head_ends[k], s1


def rans_encode(
    symbols: Bytes,
    begins: Counts,
    stream_segments: Counts,
    segment_ends: Counts,
    table_of: Counts,
    entries: NDArray[np.uint64],
    n_lanes: Counts,
    heads: Bytes,
    head_ends: Counts,
) -> tuple[Bytes, Counts]:
    n_codes = segment_ends[stream_segments - 1] - begins
    n_head_words = (int(head_ends[-1]) + len(begins)) // 2  # or fewer, as each head has an even begin
    words = np.empty(n_head_words + int((n_codes + 2 * n_lanes + 1).sum()), np.uint16)
    out, spans = words.view(np.uint8), np.empty((len(begins), 2), np.int64)
    _rans_encode(
        *(symbols, begins, stream_segments, segment_ends, table_of, entries),
        *(n_lanes, heads, head_ends, np.empty(N_LANES, np.uint32), words, out, spans),
    )
    return out, spans


@part
def _decode_scalar(
    words: Any, q: Any, n_words: Any, lanes: Any, last: Any, begin: Any, end: Any, slots: Any, out: Any
) -> Any:
    for i in range(begin, end):
        lane = i & last
        state = lanes[lane]
        entry = slots[state & uint32(SCALE - 1)]
        out[i] = uint8(entry)
        frequency = ((entry >> uint32(8)) & uint32(0xFFF)) + uint32(1)
        state = uint32(frequency * (state >> uint32(12)) + (entry >> uint32(20)))
        low = uint32(state < uint32(STATE_LOW))
        if q < n_words:  # no branch on `low`, which would be mispredicted
            word = uint32(words[q])
            state = (state << (low << uint32(4))) | (word & (uint32(0) - low))
            q += uint64(low)
        elif low:
            return n_words + uint64(1)
        lanes[lane] = state
    return q


@kernel
def _rans_decode(
    words: Any, lanes: Any, n_lanes: int, ends: Any, table_of: Any, tables: Any, out: Any
) -> bool:
    """Decode from initial states `lanes` [32], of which the first `n_lanes` are used."""
    n_words, all_lanes = uint64(len(words)), uint64(N_LANES)
    begin, q, last = uint64(0), uint64(0), uint64(n_lanes - 1)
    for s in range(len(ends)):
        end, slots = uint64(ends[s]), tables[table_of[s]]
        if (slots[0] >> uint32(8)) & uint32(0xFFF) == uint32(
            SCALE - 1
        ):  # the only symbol does not change the state
            symbol = uint8(slots[0])
            for i in range(begin, end):
                out[i] = symbol
            begin = end
            continue
        # Symbols before the first step of all 32 lanes, the steps of 32, and symbols after the last.
        for turn in range(2):
            until = end
            if last == uint64(N_LANES - 1):
                if turn:
                    while begin + all_lanes <= end and q + all_lanes <= n_words:
                        q = decode_step(lanes, slots, words, q, out, begin)
                        begin += all_lanes
                else:
                    until = begin + ((uint64(0) - begin) & last)
                    if until > end:
                        until = end
            q = _decode_scalar(words, q, n_words, lanes, last, begin, until, slots, out)
            begin = until
        if q > n_words:
            return False
        begin = end
    return q == n_words


def rans_decode(
    words: NDArray[np.uint16],
    states: NDArray[np.uint32],
    ends: Counts,
    table_of: Counts,
    tables: NDArray[np.uint32],
    out: Bytes,
) -> bool:
    lanes = np.empty(N_LANES, np.uint32)
    lanes[: len(states)] = states
    used = lanes[: len(states)]
    return _rans_decode(words, lanes, len(states), ends, table_of, tables, out) and bool(
        (used == STATE_LOW).all()
    )


@kernel
def _slot_tables(frequencies: Any, slots: Any) -> None:
    for row in range(len(frequencies)):
        start: Any = 0
        for symbol in range(256):
            n = np.int64(frequencies[row, symbol])
            entry, here = uint32(symbol | (n - 1) << 8), slots[row, start : start + n]
            for i in range(n):
                here[i] = entry | uint32(i) << uint32(20)
            start += n


def slot_tables(frequencies: Frequencies) -> NDArray[np.uint32]:
    slots = np.empty((len(frequencies), SCALE), np.uint32)
    _slot_tables(frequencies, slots)
    return slots


# --- frequency tables ---------------------------------------------------------------------------


@part
def _sort_row(values: Any, order: Any, stack: Any) -> None:
    for i in range(len(order)):
        order[i] = i
    low, high, depth = 0, len(order) - 1, 0
    while True:
        while high - low >= SMALL_PART:
            middle = (low + high) >> 1
            for step in range(3):
                a = middle if step == 1 else low
                b = high if step == 1 else middle
                if values[order[b]] < values[order[a]]:
                    order[a], order[b] = order[b], order[a]
            pivot = values[order[middle]]
            order[high], order[middle] = order[middle], order[high]
            i, j = low, high - 1
            while True:
                while i < high and values[order[i]] < pivot:
                    i += 1
                while j >= low and pivot < values[order[j]]:
                    j -= 1
                if i >= j:
                    break
                order[i], order[j] = order[j], order[i]
                i += 1
                j -= 1
            order[i], order[high] = order[high], order[i]
            if high - i > i - low:
                stack[depth], stack[depth + 1] = i + 1, high
                high = i - 1
            else:
                stack[depth], stack[depth + 1] = low, i - 1
                low = i + 1
            depth += 2
        for i in range(low + 1, high + 1):
            k, j = order[i], i
            while j > low and values[k] < values[order[j - 1]]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = k
        if not depth:
            return
        depth -= 2
        low, high = stack[depth], stack[depth + 1]


@kernel
def _normalise(counts: Any, gains: Any, order: Any, stack: Any, frequencies: Any) -> None:
    for row in range(len(counts)):
        common, n_rare, n_more = 0, 0, 1
        for j in range(256):
            common += counts[row, j]
            frequencies[row, j] = 0
        # Symbols whose share is below 1 get 1; the others divide the rest.
        factor = 0.0
        while n_more:
            factor = (SCALE - np.float64(n_rare)) / np.float64(common if common > 1 else 1)
            n_more, n_taken = 0, 0
            for j in range(256):
                n = counts[row, j]
                if n and not frequencies[row, j] and n * factor < 1.0:
                    frequencies[row, j] = 1
                    n_more += 1
                    n_taken += n
            n_rare += n_more
            common -= n_taken
        missing = SCALE
        for j in range(256):
            n = counts[row, j]
            if n and not frequencies[row, j]:
                frequencies[row, j] = np.int64(n * factor)
            missing -= int(frequencies[row, j])
            gains[j] = n / np.float64(frequencies[row, j]) if n else -1.0
        # Bisect for a gain that separates the `missing` greatest; a full sort is only needed with ties.
        low, high = 0.0, 1.0
        for j in range(256):
            high = gains[j] if gains[j] > high else high
        high += high
        n_above, middle = 0, 0.0
        while missing and n_above != missing:
            middle = 0.5 * (low + high)
            if middle <= low or middle >= high:
                break
            n_above = 0
            for j in range(256):
                n_above += gains[j] >= middle
            if n_above > missing:
                low = middle
            else:
                high = middle
        if missing and n_above == missing:
            for j in range(256):
                frequencies[row, j] += gains[j] >= middle
        elif missing:
            _sort_row(gains, order, stack)
            for j in range(256 - missing, 256):
                frequencies[row, order[j]] += 1


def normalise(counts: Counts) -> Frequencies:
    frequencies = np.empty(counts.shape, np.uint16)
    _normalise(counts, np.empty(256), np.empty(256, np.int64), np.empty(128, np.int64), frequencies)
    return frequencies


@kernel
def _pack_tables(frequencies: Any, golomb_bits: Any, sums: Any, out: Any, ends: Any) -> None:
    """Pack tables; `golomb_bits` is `plain.GOLOMB_BITS`, and `sums` [n_orders] a work array."""
    at = 0
    for row in range(len(frequencies)):
        first, last = 0, 255
        while not frequencies[row, first]:
            first += 1
        while not frequencies[row, last]:
            last -= 1
        order = 0
        for k in range(MAX_TABLE_ORDER + 1):
            sums[k] = 0
        for j in range(first, last):
            for k in range(MAX_TABLE_ORDER + 1):
                sums[k] += golomb_bits[frequencies[row, j], k]
        for k in range(MAX_TABLE_ORDER + 1):
            if sums[k] < sums[order]:
                order = k
        out[at], out[at + 1], out[at + 2] = first, last, order
        at += 3
        bits, n_bits = uint64(0), uint64(0)
        for j in range(first, last):
            value = uint64(frequencies[row, j]) + (ONE << uint64(order))
            # n_low - order zero bits, a one bit, then the n_low low bits of the value.
            n_code = uint64(golomb_bits[frequencies[row, j], order])
            n_low = (n_code + uint64(order) - ONE) >> ONE
            code = ONE | (value ^ (ONE << n_low)) << ONE
            bits |= code << (n_bits + n_low - uint64(order))
            n_bits += n_code
            while n_bits >= uint64(8):
                out[at] = uint8(bits)
                at += 1
                bits >>= uint64(8)
                n_bits -= uint64(8)
        if n_bits:
            out[at] = uint8(bits)
            at += 1
        ends[row] = at


def pack_tables(frequencies: Frequencies) -> tuple[Bytes, Counts]:
    out, ends = np.empty(512 * len(frequencies), np.uint8), np.empty(len(frequencies), np.int64)
    _pack_tables(frequencies, plain.GOLOMB_BITS, np.empty(MAX_TABLE_ORDER + 1, np.int64), out, ends)
    return out[: ends[-1]], ends


@kernel
def _table_unpack(source: Any, out: Any) -> int:
    n_bits, at = 8 * len(source), 0  # `at` in bytes
    for row in range(len(out)):
        if at + 3 > len(source):
            return -1
        first, last, order = np.int64(source[at]), np.int64(source[at + 1]), np.int64(source[at + 2])
        if last < first or order > MAX_TABLE_ORDER:
            return -1
        for symbol in range(256):
            out[row, symbol] = 0
        position, left = 8 * (at + 3), SCALE
        for symbol in range(first, last):
            n_low = order
            while position < n_bits and not (source[position >> 3] >> (position & 7)) & 1:
                position += 1
                n_low += 1
            if n_low > MAX_GOLOMB_BITS or position + 1 + n_low > n_bits:
                return -1
            position += 1
            value: Any = (1 << n_low) - (1 << order)
            for j in range(n_low):
                value += np.int64((source[position >> 3] >> (position & 7)) & 1) << j
                position += 1
            if value > 0xFFFF:
                return -1
            out[row, symbol] = value
            left -= value
        while position & 7:
            if (source[position >> 3] >> (position & 7)) & 1:
                return -1
            position += 1
        if left < 1:
            return -1
        out[row, last] = left
        if not out[row, first]:
            return -1
        at = position >> 3
    return at


def table_unpack(source: Bytes, out: Frequencies) -> int:
    return int(_table_unpack(source, out))
