"""Entropy coding on the CPU: rANS, sparse streams, Exp-Golomb codes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from ckptz.kernels.floats import (
    MAX_GAP_BYTE,
    MAX_GOLOMB_BITS,
    MAX_TABLE_ORDER,
    SCALE,
    STATE_LOW,
    Bytes,
    Counts,
)
from ckptz.kernels.lanes_cpu import decode_step, encode_step
from ckptz.kernels.numba_base import ONE, inlined, kernel
from ckptz.kernels.planning_cpu import best_golomb_order, cost_bits, normalise

N_LANES = 32  # lanes of the vectorised loops; 1 and 4 lanes take the scalar ones
MAX_PACKED_TABLE = 3 + (255 * (2 * MAX_GOLOMB_BITS + 1) + 7) // 8
LOW_12 = np.uint64(0xFFF)
LOW_32 = np.uint64(0xFFFFFFFF)


# --- rANS ---------------------------------------------------------------------------------------


@kernel
def encoding_tables(frequencies: NDArray[np.uint16]) -> NDArray[np.uint64]:
    """Make entries [n_tables, 256]: reciprocal (32 bits) | start (12) | shift (4) | frequency - 1 (12).

    With s = ceil(log2 f) and m = ceil(2^(32+s) / f) - 2^32, floor(x / f) is (x + (x m >> 32)) >> s for
    every x below 2^32, since m f exceeds its real value by less than f <= 2^s.
    """
    entries = np.zeros(frequencies.shape, np.uint64)
    for t in range(len(frequencies)):
        start = uint64(0)
        for symbol in range(256):
            f = uint64(frequencies[t, symbol])
            if f:
                shift = uint64(0)
                while (ONE << shift) < f:
                    shift += ONE
                reciprocal = ((ONE << (uint64(32) + shift)) + f - ONE) // f - (ONE << uint64(32))
                entries[t, symbol] = (
                    reciprocal | (start << uint64(32)) | (shift << uint64(44)) | ((f - ONE) << uint64(48))
                )
            start += f
    return entries


@inlined
def _encode_one(state: Any, entry: Any) -> Any:
    quotient = (((state * (entry & LOW_32)) >> uint64(32)) + state) >> ((entry >> uint64(44)) & uint64(15))
    rest = (quotient & LOW_32) * ((uint64(4095) - (entry >> uint64(48))) & LOW_32)
    return state + ((entry >> uint64(32)) & LOW_12) + rest


@kernel
def _encode_scalar(
    symbols: Any, begin: int, end: int, entries: Any, lanes: Any, n_lanes: int, words: Any, p: int
) -> Any:
    last = np.uintp(n_lanes - 1)  # 1, 4 or 32 lanes
    q = np.uintp(p)
    for i in range(end - 1, begin - 1, -1):
        lane = np.uintp(i) & last
        entry, state = entries[symbols[np.uintp(i)]], uint64(lanes[lane])
        # Without a branch, which would be a guess: a word is written always, and counts if the state is full.
        words[q - np.uintp(1)] = uint16(state)
        full = uint64((state >> uint64(20)) > (entry >> uint64(48)))
        q -= np.uintp(full)
        lanes[lane] = uint32(_encode_one(state >> (full << uint64(4)), entry))
    return np.intp(q)


@kernel
def _encode_segments(
    symbols: Any, ends: Any, table_of: Any, tables: Any, lanes: Any, n_lanes: int, words: Any
) -> int:
    states = np.full(N_LANES, STATE_LOW, np.uint32)
    p: Any = len(words)
    for s in range(len(ends) - 1, -1, -1):
        begin = ends[s - 1] if s else 0
        entries = tables[table_of[s]]
        i = ends[s]
        if i > begin and entries[symbols[begin]] >> uint64(48) == uint64(SCALE - 1):
            continue  # the only code of its table changes no state
        if n_lanes == N_LANES:
            whole_end = i // N_LANES * N_LANES
            whole_begin = (begin + N_LANES - 1) // N_LANES * N_LANES
            if whole_end > whole_begin:
                p = _encode_scalar(symbols, whole_end, i, entries, states, n_lanes, words, p)
                i = whole_begin
                q = uint64(p)
                for step in range(whole_end - N_LANES, whole_begin - 1, -N_LANES):
                    q = encode_step(states, entries, words, q, symbols, uint64(step))
                p = np.int64(q)
        p = _encode_scalar(symbols, begin, i, entries, states, n_lanes, words, p)
    lanes[:n_lanes] = states[:n_lanes]
    return p


def rans_encode(
    symbols: Bytes, ends: Counts, table_of: Counts, frequencies: NDArray[np.uint16], n_lanes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    words = np.empty(len(symbols) + 1, np.uint16)
    states = np.empty(n_lanes, np.uint32)
    position = _encode_segments(symbols, ends, table_of, encoding_tables(frequencies), states, n_lanes, words)
    return states, words[position:]


@kernel
def slot_tables(frequencies: NDArray[np.uint16]) -> NDArray[np.uint32]:
    tables = np.empty((len(frequencies), SCALE), np.uint32)
    for t in range(len(frequencies)):
        start = 0
        for symbol in range(256):
            n = np.int64(frequencies[t, symbol])
            low = uint32(symbol) | (uint32(n - 1) << uint32(8))
            for i in range(n):
                tables[t, start + i] = low | (uint32(i) << uint32(20))
            start += int(n)
    return tables


@inlined
def _decode_one(state: Any, entry: Any) -> Any:
    frequency = ((entry >> uint32(8)) & uint32(0xFFF)) + uint32(1)
    return uint32(frequency * (state >> uint32(12)) + (entry >> uint32(20)))


@kernel
def _decode_scalar(
    words: Any, p: int, lanes: Any, n_lanes: int, begin: int, end: int, slots: Any, out: Any
) -> Any:
    last, n_words, q = np.uintp(n_lanes - 1), np.uintp(len(words)), np.uintp(p)
    for i in range(begin, end):
        lane = np.uintp(i) & last
        state = lanes[lane]
        entry = slots[state & uint32(SCALE - 1)]
        out[np.uintp(i)] = uint8(entry)
        state = _decode_one(state, entry)
        low = uint32(state < uint32(STATE_LOW))
        if q < n_words:  # without a branch on `low`, which would be a guess
            word = uint32(words[q])
            state = (state << (low << uint32(4))) | (word & (uint32(0) - low))
            q += np.uintp(low)
        elif low:
            return -1
        lanes[lane] = state
    return np.intp(q)


@kernel
def rans_decode(
    words: NDArray[np.uint16],
    states: NDArray[np.uint32],
    ends: Counts,
    table_of: Counts,
    tables: NDArray[np.uint32],
    out: Bytes,
) -> bool:
    n_lanes, n_words = len(states), len(words)
    lanes = np.empty(N_LANES, np.uint32)
    lanes[:n_lanes] = states
    begin = 0
    p: Any = 0
    for s in range(len(ends)):
        end = ends[s]
        slots = tables[table_of[s]]
        i = begin
        if (slots[0] >> uint32(8)) & uint32(0xFFF) == uint32(SCALE - 1):  # the only code changes no state
            out[begin:end] = uint8(slots[0])
            begin = end
            continue
        if n_lanes == N_LANES:
            aligned = min((begin + N_LANES - 1) // N_LANES * N_LANES, end)
            p = _decode_scalar(words, p, lanes, n_lanes, begin, aligned, slots, out)
            if p < 0:
                return False
            i = aligned
            q = uint64(p)
            while i + N_LANES <= end and np.intp(q) + N_LANES <= n_words:
                q = decode_step(lanes, slots, words, q, out, uint64(i))
                i += N_LANES
            p = np.int64(q)
        p = _decode_scalar(words, p, lanes, n_lanes, i, end, slots, out)
        if p < 0:
            return False
        begin = end
    for lane in range(n_lanes):
        if lanes[lane] != uint32(STATE_LOW):
            return False
    return p == n_words


# --- sparse -------------------------------------------------------------------------------------


@kernel
def _sparse_sizes(symbols: Any, common: int) -> Any:
    n_gaps, n_values, gap = 0, 0, 0
    for i in range(len(symbols)):
        if symbols[i] == common:
            gap += 1
        else:
            n_gaps += gap // MAX_GAP_BYTE + 1
            n_values += 1
            gap = 0
    return n_gaps, n_values


@kernel
def _sparse_fill(symbols: Any, common: int, gaps: Any, values: Any) -> None:
    g, v, gap = 0, 0, 0
    for i in range(len(symbols)):
        if symbols[i] == common:
            gap += 1
        else:
            while gap >= MAX_GAP_BYTE:
                gaps[g] = MAX_GAP_BYTE
                g += 1
                gap -= MAX_GAP_BYTE
            gaps[g] = gap
            g += 1
            values[v] = symbols[i]
            v += 1
            gap = 0


def sparse_split(symbols: Bytes, common: int) -> tuple[Bytes, Bytes]:
    n_gaps, n_values = _sparse_sizes(symbols, common)
    gaps, values = np.empty(n_gaps, np.uint8), np.empty(n_values, np.uint8)
    _sparse_fill(symbols, common, gaps, values)
    return gaps, values


@kernel
def sparse_merge(gaps: Bytes, values: Bytes, out: Bytes) -> bool:
    position, n_values = 0, 0
    for i in range(len(gaps)):
        position += gaps[i]
        if gaps[i] == MAX_GAP_BYTE:
            continue
        if position >= len(out) or n_values == len(values):
            return False
        out[position] = values[n_values]
        position += 1
        n_values += 1
    return n_values == len(values) and (len(gaps) == 0 or gaps[len(gaps) - 1] != MAX_GAP_BYTE)


# --- Exp-Golomb codes ---------------------------------------------------------------------------


@kernel
def golomb_pack(values: NDArray[np.uint16], order: int) -> Bytes:
    out = np.empty(len(values) * 5 + 1, np.uint8)
    waiting: Any = 0  # bits that fill no byte yet
    at, n_waiting = 0, 0
    for i in range(len(values)):
        u = np.int64(values[i]) + (1 << order)
        n_low = order
        while u >> (n_low + 1):
            n_low += 1
        n_high = n_low - order
        waiting |= (1 | (u - (1 << n_low)) << 1) << (n_high + n_waiting)
        n_waiting += n_high + 1 + n_low
        while n_waiting >= 8:
            out[at] = uint8(waiting & 0xFF)
            at += 1
            waiting >>= 8
            n_waiting -= 8
    if n_waiting:
        out[at] = uint8(waiting)
        at += 1
    return out[:at]


@kernel
def golomb_unpack(source: Bytes, n_values: int, order: int, out: NDArray[np.uint16]) -> int:
    n_bits = 8 * len(source)
    position = 0
    for i in range(n_values):
        n_low = order
        while position < n_bits and not (source[position >> 3] >> (position & 7)) & 1:
            position += 1
            n_low += 1
        if n_low > MAX_GOLOMB_BITS or position + 1 + n_low > n_bits:
            return -1
        position += 1
        value = 1 << n_low
        for j in range(n_low):
            value |= int((source[position >> 3] >> (position & 7)) & 1) << j
            position += 1
        value -= 1 << order
        if value > 0xFFFF:
            return -1
        out[i] = value
    while position & 7:
        if (source[position >> 3] >> (position & 7)) & 1:
            return -1
        position += 1
    return position >> 3


@kernel
def _table_unpack(source: Bytes, out: NDArray[np.uint16]) -> int:
    if len(source) < 3 or source[1] < source[0] or source[2] > MAX_TABLE_ORDER:
        return -1
    first, last = int(source[0]), int(source[1])
    out[:] = 0
    used = golomb_unpack(source[3:], last - first, int(source[2]), out[first:last])
    left = np.int64(SCALE)
    for symbol in range(256):
        left -= out[symbol]
    if used < 0 or left < 1:
        return -1
    out[last] = left
    return 3 + used if out[first] else -1


@kernel
def table_unpack(source: Bytes, out: NDArray[np.uint16]) -> int:
    at = 0
    for row in out:
        used = _table_unpack(source[at:], row)
        if used < 0:
            return -1
        at += used
    return at


@kernel
def pack_table(frequencies: NDArray[np.uint16]) -> Bytes:
    first, last = 0, 255
    while not frequencies[first]:
        first += 1
    while not frequencies[last]:
        last -= 1
    body = frequencies[first:last]
    order = best_golomb_order(body, MAX_TABLE_ORDER)
    codes = golomb_pack(body, order)
    packed = np.empty(3 + len(codes), np.uint8)
    packed[0], packed[1], packed[2] = first, last, order
    packed[3:] = codes
    return packed


@kernel
def pack_tables(frequencies: NDArray[np.uint16]) -> Bytes:
    packed = np.empty(len(frequencies) * MAX_PACKED_TABLE, np.uint8)
    p = 0
    for row in frequencies:
        one = pack_table(row)
        packed[p : p + len(one)] = one
        p += len(one)
    return packed[:p]


@kernel
def weigh(counts: Counts) -> Any:
    frequencies = normalise(counts)
    return frequencies, pack_table(frequencies), cost_bits(counts, frequencies)
