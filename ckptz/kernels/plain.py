"""Kernels of lossless files in plain numpy: used for small work, and the definition of the compiled ones.

Importing the compiled kernels takes a third of a second, and compiling them several seconds. `ckptz.kernels`
therefore starts with these functions, and uses the compiled ones after `PATIENCE` seconds spent here. Both
write the same bytes.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.floats import (
    DIFFERENCE,
    HUFFMAN_BITS,
    HUFFMAN_STREAMS,
    LAST_MIX,
    MAX_GOLOMB_BITS,
    MAX_TABLE_ORDER,
    N_LAST,
    ORDERED_DIFFERENCE,
    ROTATED,
    SCALE,
    SCALE_BITS,
    SMALL_PART,
    STATE_LOW,
    XOR,
    Bytes,
    Counts,
    Frequencies,
    Patterns,
    order,
)
from ckptz.kernels.loaders import codec

PATIENCE: Final = 0.4  # seconds, about what loading numba takes
MOST_SYMBOLS: Final = 1 << 19  # longer streams always use the compiled kernels

P = ParamSpec("P")
T = TypeVar("T")
_spent = [0.0]  # seconds


def suffices() -> bool:
    """Return whether this process has spent less than `PATIENCE` in these kernels."""
    return _spent[0] < PATIENCE


def retire() -> None:
    """Use the compiled kernels for all further work of this process."""
    _spent[0] = PATIENCE


def _compiled() -> Any:
    retire()
    return codec()


def __getattr__(name: str) -> Any:
    """Return the compiled kernel of a name that this module does not define."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_compiled(), name)


def _counted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a kernel so that its run time counts towards `PATIENCE`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        _spent[0] += time.perf_counter() - begin
        return result

    return run


# --- bit patterns -------------------------------------------------------------------------------


def unorder(patterns: Patterns) -> Patterns:
    """Map the results of `order` back to float patterns [...]."""
    top = patterns.dtype.type(1 << (8 * patterns.itemsize - 1))
    return np.where(patterns & top, patterns & ~top, ~patterns)


def _rotate(patterns: Patterns, n_left: int) -> Patterns:
    width = 8 * patterns.itemsize
    left, right = patterns.dtype.type(n_left % width), patterns.dtype.type((width - n_left) % width)
    return (patterns << left) | (patterns >> right)


def _zigzag(difference: Patterns) -> Patterns:
    top = difference.dtype.type(8 * difference.itemsize - 1)
    one = difference.dtype.type(1)
    return (difference << one) ^ -(difference >> top)


def _unzigzag(code: Patterns) -> Patterns:
    one = code.dtype.type(1)
    return (code >> one) ^ -(code & one)


def transform(patterns: Patterns, base: Patterns, mode: int, out: Patterns | None = None) -> Patterns:
    """Apply a plane mode to patterns [n], into `out` if given; spec/03-transforms.md#planes."""
    result = patterns
    if mode == ROTATED:
        result = _rotate(patterns, 1)
    elif mode == XOR:
        result = patterns ^ base
    elif mode == DIFFERENCE:
        result = _zigzag(patterns - base)
    elif mode == ORDERED_DIFFERENCE:
        result = _zigzag(order(patterns) - order(base))
    if out is None:
        return result
    out[:] = result
    return out


def restore(codes: Patterns, base: Patterns, mode: int, out: Patterns) -> None:
    """Invert `transform` of codes [n] into `out` [n], which may be `codes`; patterns of the same dtype."""
    if mode == ROTATED:
        out[:] = _rotate(codes, 8 * out.itemsize - 1)
    elif mode == XOR:
        np.bitwise_xor(codes, base, out)
    elif mode == DIFFERENCE:
        out[:] = base + _unzigzag(codes)
    elif mode == ORDERED_DIFFERENCE:
        out[:] = unorder(order(base) + _unzigzag(codes))
    else:
        out[:] = codes


@_counted
def split_planes(patterns: Patterns, base: Patterns, mode: int, out: Bytes | None = None) -> Bytes:
    """Apply a plane mode to patterns [n] and split them into byte planes, into `out` if given.

    Returns:
        Planes [bytes per pattern, n], the least significant byte first.
    """
    planes = transform(patterns, base, mode).reshape(-1, 1).view(np.uint8).T
    if out is None:
        return np.ascontiguousarray(planes)
    out[:] = planes
    return out


@_counted
def merge_planes(planes: Sequence[Bytes], base: Patterns, mode: int, out: Patterns) -> None:
    """Invert `split_planes` of planes [n] each, into the patterns `out` [n]."""
    restore(np.ascontiguousarray(np.stack(planes).T).view(out.dtype).reshape(-1), base, mode, out)


@_counted
def histogram(symbols: Bytes) -> Counts:
    """Count the occurrences of each byte: [256]."""
    return np.bincount(symbols, minlength=256).astype(np.int64)


# --- rANS ---------------------------------------------------------------------------------------


def _by_symbol(ends: Counts, table_of: Counts, n_tables: int, n_lanes: int) -> NDArray[np.int64]:
    """Return the table index of each symbol [steps, n_lanes]; `n_tables` for idle lanes of the last step."""
    tables = np.full(-(-int(ends[-1]) // n_lanes) * n_lanes, n_tables, np.int64)
    tables[: ends[-1]] = np.repeat(table_of, np.diff(ends, prepend=0))
    return tables.reshape(-1, n_lanes)


def _encode_stream(symbols: Bytes, tables: NDArray[np.int64], entries: NDArray[np.uint64]) -> Any:
    """Encode one stream, given the table of each symbol [steps, n_lanes].

    Returns:
        The lane states [n_lanes], and the words in the order in which a decoder reads them.
    """
    n_lanes = tables.shape[1]
    padded = np.zeros(tables.shape, np.uint8)
    padded.reshape(-1)[: len(symbols)] = symbols
    entry = entries[tables, padded]
    frequency = (entry >> np.uint64(48)).astype(np.uint32) + np.uint32(1)
    start = (entry >> np.uint64(32)).astype(np.uint32) & np.uint32(SCALE - 1)
    rest, limit = np.uint32(SCALE) - frequency, (frequency << np.uint32(32 - SCALE_BITS)) - np.uint32(1)
    is_full, low = np.empty(tables.shape, np.bool_), np.empty(tables.shape, np.uint16)
    state, quotient = np.full(n_lanes, STATE_LOW, np.uint32), np.empty(n_lanes, np.uint32)
    half = np.uint32(16)
    for i in range(len(tables) - 1, -1, -1):
        full = np.greater(state, limit[i], is_full[i])
        low[i] = state
        np.right_shift(state, half, state, where=full)
        np.floor_divide(state, frequency[i], quotient)
        quotient *= rest[i]
        state += quotient
        state += start[i]
    return state, low[is_full]


@_counted
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
    """Encode m streams with rANS. Each stream consists of segments, which use one frequency table each.

    Args:
        symbols: the symbols of all streams [n].
        begins: start of each stream in `symbols` [m].
        stream_segments: number of segments up to the end of each stream [m].
        segment_ends: end of each segment in `symbols`; the first segment of a stream starts with the stream.
        table_of: row of `entries` for each segment.
        entries: encoding tables [n_tables, 256], see `ckptz.format.frequency.encoding_tables`.
        n_lanes: lanes of each stream [m]: 1, 4 or 32.
        heads: bytes to write before the lane states, for all streams.
        head_ends: end of each stream's bytes in `heads` [m].

    Returns:
        A buffer that contains the encoded streams (head, lane states u32, words u16, in decoding order), and
        the begin and end of each stream in it, in bytes [m, 2].
    """
    if len(symbols) > MOST_SYMBOLS:
        longer: tuple[Bytes, Counts] = _compiled().rans_encode(
            *(symbols, begins, stream_segments, segment_ends, table_of, entries, n_lanes, heads, head_ends)
        )
        return longer
    idle = np.full((1, 256), np.uint64(SCALE - 1) << np.uint64(48))  # a lane without a symbol keeps its state
    wide, parts, first, p = np.concatenate((entries, idle)), [], 0, 0
    for begin, last, n, q in zip(
        begins.tolist(), stream_segments.tolist(), n_lanes.tolist(), head_ends.tolist(), strict=True
    ):
        ends, own = segment_ends[first:last], table_of[first:last]
        tables = _by_symbol(ends - begin, own, len(entries), n)
        states, words = _encode_stream(symbols[begin : ends[-1]], tables, wide)
        parts.append(np.concatenate((heads[p:q], states.view(np.uint8), words.view(np.uint8))))
        first, p = last, q
    lengths = np.array([*map(len, parts)])
    return np.concatenate(parts), np.cumsum(lengths)[:, None] - np.stack((lengths, 0 * lengths), axis=1)


@_counted
def rans_decode(
    words: NDArray[np.uint16],
    states: NDArray[np.uint32],
    ends: Counts,
    table_of: Counts,
    tables: NDArray[np.uint32],
    out: Bytes,
) -> bool:
    """Decode a rANS stream into `out` [n].

    Args:
        words: the words after the lane states.
        states: initial lane states [n_lanes].
        ends: end of each segment in `out`.
        table_of: row of `tables` for each segment.
        tables: decoding tables, see `slot_tables` [n_tables, 4096].
        out: the decoded bytes.

    Returns:
        Whether all words were used and every lane ended in state 2^16; if not, the stream is damaged.
    """
    if len(out) > MOST_SYMBOLS:
        return bool(_compiled().rans_decode(words, states, ends, table_of, tables, out))
    p = 0
    idle = np.arange(SCALE, dtype=np.uint64) << np.uint64(20) | np.uint64((SCALE - 1) << 8)
    flat = np.concatenate((tables.reshape(-1), idle))
    factor, rest = (flat >> np.uint64(8) & np.uint64(0xFFF)) + np.uint64(1), flat >> np.uint64(20)
    slots = _by_symbol(ends, table_of, len(tables), len(states)) * SCALE
    state, mask = states.astype(np.uint64), np.uint64(SCALE - 1)
    for slot in slots:
        slot += (state & mask).view(np.int64)
        state >>= np.uint64(SCALE_BITS)
        state *= factor[slot]
        state += rest[slot]
        low = np.flatnonzero(state < STATE_LOW)
        if len(low):
            taken = words[p : p + len(low)]
            if len(taken) < len(low):
                return False
            state[low] = state[low] << np.uint64(16) | taken
            p += len(low)
    out[:] = flat[slots.reshape(-1)[: len(out)]]
    return p == len(words) and bool((state == STATE_LOW).all())


@_counted
def slot_tables(frequencies: Frequencies) -> NDArray[np.uint32]:
    """Build decoding tables [n, 4096] from frequencies [n, 256], whose rows sum to 4096.

    An entry is symbol | (frequency - 1) << 8 | (slot - start) << 20.
    """
    wide = frequencies.astype(np.uint32)
    starts = np.cumsum(wide, axis=1, dtype=np.uint32) - wide
    entries = np.arange(256, dtype=np.uint32) | (wide - np.uint32(1)) << np.uint32(8)
    entries -= starts << np.uint32(20)  # may wrap modulo 2^32; adding the slot undoes that
    slots = np.repeat(entries.reshape(-1), frequencies.reshape(-1)).reshape(-1, SCALE)
    return slots + (np.arange(SCALE, dtype=np.uint32) << np.uint32(20))


# --- Huffman ------------------------------------------------------------------------------------


@_counted
def huffman_lengths(counts: Counts) -> Bytes:
    """Compute optimal code lengths of at most 11 bits for counts [n, 256]; 0 for symbols without a code.

    Rows with fewer than two symbols get no code. Equal counts are ranked by symbol.
    """
    return np.array([_code_lengths(row) for row in counts.tolist()], np.uint8).reshape(counts.shape)


def _code_lengths(counts: list[int]) -> list[int]:
    """Compute code lengths of one row by package-merge (Larmore and Hirschberg, 1990).

    Each level lists the symbols and the pairs of the previous level, ascending by weight.
    """
    ranked = sorted(filter(counts.__getitem__, range(256)), key=counts.__getitem__)
    lengths, levels, pairs = [0] * 256, list[list[tuple[int, bool]]](), list[int]()
    for _ in range(HUFFMAN_BITS):
        items = [(counts[symbol], False) for symbol in ranked] + [(weight, True) for weight in pairs]
        items.sort()  # symbols before pairs of equal weight
        levels.append(items)
        pairs = [a[0] + b[0] for a, b in zip(items[::2], items[1::2], strict=False)]
    n_taken = 2 * len(ranked) - 2
    for items in reversed(levels):
        n_pairs = sum(is_pair for _, is_pair in items[: max(n_taken, 0)])
        for symbol in ranked[: n_taken - n_pairs] if n_taken > 0 else ():
            lengths[symbol] += 1
        n_taken = 2 * n_pairs
    return lengths


def huffman_codes(lengths: Bytes) -> NDArray[np.int64]:
    """Assign canonical code words [256] by length and symbol; the first bit of a word is the lowest."""
    codes, code, before = np.zeros(256, np.int64), 0, 0
    for symbol in np.argsort(lengths, kind="stable")[np.count_nonzero(lengths == 0) :].tolist():
        n_bits = int(lengths[symbol])
        code <<= n_bits - before
        codes[symbol] = int(f"{code:0{n_bits}b}"[::-1], 2)
        code, before = code + 1, n_bits
    return codes


def quarters(n: int) -> Counts:
    """Compute the ends [4] of the four parts of n codes: ceil(n / 4) codes each, while there are any."""
    size = -(-n // HUFFMAN_STREAMS)
    return np.minimum(np.arange(1, HUFFMAN_STREAMS + 1) * size, n)


@_counted
def huffman_encode(
    symbols: Bytes, ends: Counts, lengths: Bytes, n_heads: Counts, n_bytes: Counts
) -> tuple[Bytes, Counts]:
    """Encode m streams with Huffman codes, each in four parts.

    Args:
        symbols: the codes of all streams, one stream after another [n].
        ends: end of each stream in `symbols` [m].
        lengths: code lengths of each stream [m, 256], not 0 for symbols that occur.
        n_heads: bytes to reserve before each stream [m].
        n_bytes: upper bound of the encoded size of each stream [m].

    Returns:
        A buffer that contains the encoded streams, and offsets in it for each stream [m, 6]: begin of the
        reserved bytes, begin of the first part, end of each part.
    """
    if len(symbols) > MOST_SYMBOLS:
        longer: tuple[Bytes, Counts] = _compiled().huffman_encode(symbols, ends, lengths, n_heads, n_bytes)
        return longer
    streams, spans, at = list[Bytes](), np.empty((len(ends), 2 + HUFFMAN_STREAMS), np.int64), 0
    for k, codes in enumerate(np.split(symbols, ends[:-1])):
        words, n_bits = huffman_codes(lengths[k]), lengths[k].astype(np.int64)
        parts = [
            _packed_words(words[part], n_bits[part]) for part in np.split(codes, quarters(len(codes))[:-1])
        ]
        head = np.zeros(n_heads[k], np.uint8)
        streams += [head, *parts]
        spans[k] = at + np.cumsum([0, len(head), *map(len, parts)])
        at = int(spans[k, -1])
    return np.concatenate(streams), spans


def _packed_words(words: Counts, n_bits: Counts) -> Bytes:
    """Concatenate words [n] of `n_bits` [n] bits each, the lowest bit first, into bytes."""
    ends = np.cumsum(n_bits)
    place = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - n_bits, n_bits)
    return np.packbits((np.repeat(words, n_bits) >> place & 1).astype(np.uint8), bitorder="little")


@_counted
def huffman_decode(source: Bytes, ends: Counts, lengths: Bytes, out: Bytes) -> bool:
    """Decode a Huffman stream of four parts into `out` [n].

    Args:
        source: the four parts, one after another.
        ends: end of each part in `source`, in bytes [4].
        lengths: code lengths of a complete code [256].
        out: the decoded codes.

    Returns:
        Whether each part ends in its last byte with zero bits as padding; if not, the stream is damaged.
    """
    if len(out) > MOST_SYMBOLS:
        return bool(_compiled().huffman_decode(source, ends, lengths, out))
    words, table = huffman_codes(lengths), np.empty(1 << HUFFMAN_BITS, np.uint8)
    for symbol in np.flatnonzero(lengths).tolist():
        table[words[symbol] :: 1 << int(lengths[symbol])] = symbol
    stops = quarters(len(out))
    pieces = zip(np.split(source, ends[:-1]), np.split(out, stops[:-1]), strict=True)
    return all([_decode_part(piece, table, lengths, codes) for piece, codes in pieces])


def _decode_part(source: Bytes, table: Bytes, lengths: Bytes, out: Bytes) -> bool:
    bits = np.unpackbits(source, bitorder="little")
    padded = np.concatenate((bits, np.zeros(HUFFMAN_BITS, np.uint8))).astype(np.int64)
    windows = sum(padded[k : k + len(bits)] << k for k in range(HUFFMAN_BITS))
    symbols = table[windows] if len(bits) else table[:0]
    following, places, at = lengths[symbols].tolist(), list[int](), 0
    for _ in range(len(out)):
        if at >= len(bits):
            return False
        places.append(at)
        at += following[at]
    out[:] = symbols[places]
    return -(-at // 8) == len(source) and not bits[at:].any()


# --- Exp-Golomb codes ---------------------------------------------------------------------------


@_counted
def golomb_unpack(source: Bytes, n_values: int, order: int, out: NDArray[np.uint16]) -> int:
    """Decode Exp-Golomb codes of an order into `out` [n_values].

    Returns:
        The number of bytes read, or -1 if the source ends early, a value exceeds 16 bits, or the padding of
        the last byte is not zero.
    """
    bits = np.unpackbits(source, bitorder="little").tolist()
    position = 0
    for i in range(n_values):
        n_low = order
        while position < len(bits) and not bits[position]:
            position += 1
            n_low += 1
        if n_low > MAX_GOLOMB_BITS or position + 1 + n_low > len(bits):
            return -1
        low = sum(bit << j for j, bit in enumerate(bits[position + 1 : position + 1 + n_low]))
        position += 1 + n_low
        value = (1 << n_low | low) - (1 << order)
        if value > 0xFFFF:
            return -1
        out[i] = value
    return -1 if any(bits[position : -(-position // 8) * 8]) else -(-position // 8)


_ORDERS: Final = np.arange(MAX_TABLE_ORDER + 1)
# Index of the highest bit of 1, 2, 3, ...
_HIGHEST: Final = np.frexp(np.arange(1, (1 << MAX_TABLE_ORDER) + SCALE + 1))[1] - 1
# Length in bits of the Exp-Golomb code of each frequency with each order [4097, n_orders].
GOLOMB_BITS: Final = (2 * _HIGHEST[np.arange(SCALE + 1)[:, None] + (1 << _ORDERS) - 1] - _ORDERS + 1).astype(
    np.int64
)


def _coded(frequencies: Frequencies) -> tuple[Counts, Counts, NDArray[np.bool_], Counts, Counts]:
    """Choose how to pack frequency tables [n, 256].

    Returns:
        First and last used symbol [n], which frequencies are written [n, 256], the order with the shortest
        codes [n], and the bits of these codes [n].
    """
    used = frequencies > 0
    first, last = used.argmax(axis=1), 255 - used[:, ::-1].argmax(axis=1)
    place = np.arange(256)
    is_coded = (place >= first[:, None]) & (place < last[:, None])
    bits = np.zeros((len(frequencies), MAX_TABLE_ORDER + 1), np.int64)
    if has_codes := np.flatnonzero(last > first).tolist():
        begins = np.cumsum(last - first) - (last - first)
        bits[has_codes] = np.add.reduceat(GOLOMB_BITS[frequencies[is_coded]], begins[has_codes], axis=0)
    orders = bits.argmin(axis=1)
    return first, last, is_coded, orders, np.take_along_axis(bits, orders[:, None], axis=1)[:, 0]


@_counted
def pack_tables(frequencies: Frequencies) -> tuple[Bytes, Counts]:
    """Pack frequency tables [n, 256]; spec/02-entropy.md#frequency-table.

    Returns:
        The bytes of all tables, and the end of each in these bytes [n].
    """
    first, last, is_coded, orders, row_bits = _coded(frequencies)
    # An Exp-Golomb code of u = value + 2^order of b bits is b - 1 - order zero bits, a one bit, then the
    # b - 1 bits below the leading one of u, least significant first.
    row = np.repeat(np.arange(len(frequencies)), last - first)
    u = frequencies[is_coded] + (1 << orders[row])
    n_low = _HIGHEST[u - 1]
    n_bits = 2 * n_low - orders[row] + 1
    ends = np.cumsum(3 + (row_bits + 7) // 8)
    begins = np.concatenate(([0], ends[:-1]))
    # Offset of each code in bits: after the codes of its row before it.
    before = np.cumsum(n_bits) - n_bits
    at = (8 * (begins + 3) - (np.cumsum(row_bits) - row_bits))[row] + before
    codes = (1 | (u - (1 << n_low)) << 1) << (n_low - orders[row])
    which = np.arange(int(n_bits.sum())) - np.repeat(before, n_bits)
    bits = np.zeros(8 * int(ends[-1]), np.uint8)
    bits[np.repeat(at, n_bits) + which] = np.repeat(codes, n_bits) >> which & 1
    packed = np.packbits(bits, bitorder="little")
    packed[begins], packed[begins + 1], packed[begins + 2] = first, last, orders
    return packed, ends


@_counted
def table_unpack(source: Bytes, out: NDArray[np.uint16]) -> int:
    """Unpack frequency tables into `out` [n_tables, 256].

    spec/02-entropy.md#frequency-table: first and last symbol, order, codes of all frequencies but the last.

    Returns:
        The number of bytes read, or -1 if a table is invalid.
    """
    at = 0
    for row in out:
        head = source[at : at + 3]
        if len(head) < 3 or head[1] < head[0] or head[2] > MAX_TABLE_ORDER:
            return -1
        first, last, order = (int(byte) for byte in head)
        row[:] = 0
        used = golomb_unpack(source[at + 3 :], last - first, order, row[first:last])
        left = SCALE - int(row.sum(dtype=np.int64))
        if used < 0 or left < 1:
            return -1
        row[last] = left
        if not row[first]:
            return -1
        at += 3 + used
    return at


# --- the encoder's choices ----------------------------------------------------------------------

# Binary logarithms of libm: those of numpy differ in the last bit between processors.
LOGS: Final = np.array([0.0, *map(math.log2, range(1, SCALE + 1))])


def _logs(counts: Counts) -> NDArray[np.float64]:
    """Return the binary logarithms of counts [...], with 0 for 0."""
    logs = LOGS[np.minimum(counts, SCALE)]
    is_large = counts > SCALE
    logs[is_large] = [*map(math.log2, counts[is_large].tolist())]
    return logs


def used_symbols(counts: Counts) -> slice:
    """Return the slice from the first to the last symbol that occurs in counts [n, 256]; all if none does."""
    columns = np.flatnonzero(counts.any(axis=0))
    return slice(columns[0], columns[-1] + 1) if len(columns) else slice(0, 256)


def row_sums(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum rows [n, m] from left to right; `sum` uses another order, which rounds differently."""
    sums: NDArray[np.float64] = np.add.accumulate(terms, axis=1)[:, -1]
    return sums


@_counted
def entropies(counts: Counts) -> NDArray[np.float64]:
    """Compute the entropy in bits of each row of counts [n, m], times the number of its symbols."""
    total, used = counts.sum(axis=1), counts[:, used_symbols(counts)]
    return row_sums(-used * _logs(used)) + total * _logs(total)


def ascending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Argsort each row of values [n, m] by a fixed quicksort, so that the order of equal values is defined.

    Written bytes depend on it: `normalise` increments frequencies in this order.
    """
    return np.array([_ascending(row) for row in values.tolist()])


def _ascending(values: list[float]) -> list[int]:
    order_of = list(range(len(values)))
    parts = [(0, len(values) - 1)]
    while parts:
        low, high = parts.pop()
        while high - low >= SMALL_PART:
            i = _parted(values, order_of, low, high)
            parts.append((i + 1, high) if high - i > i - low else (low, i - 1))
            low, high = (low, i - 1) if high - i > i - low else (i + 1, high)
        order_of[low : high + 1] = sorted(order_of[low : high + 1], key=values.__getitem__)
    return order_of


def _parted(values: list[float], order_of: list[int], low: int, high: int) -> int:
    """Partition order_of[low : high + 1] in place around the median of three, and return its index."""
    middle = (low + high) >> 1
    for a, b in ((low, middle), (middle, high), (low, middle)):
        if values[order_of[b]] < values[order_of[a]]:
            order_of[a], order_of[b] = order_of[b], order_of[a]
    pivot = values[order_of[middle]]
    order_of[high], order_of[middle] = order_of[middle], order_of[high]
    i, j = low, high - 1
    while True:
        while i < high and values[order_of[i]] < pivot:
            i += 1
        while j >= low and pivot < values[order_of[j]]:
            j -= 1
        if i >= j:
            break
        order_of[i], order_of[j] = order_of[j], order_of[i]
        i, j = i + 1, j - 1
    order_of[i], order_of[high] = order_of[high], order_of[i]
    return i


@_counted
def normalise(counts: Counts) -> Frequencies:
    """Scale counts [n, 256] to frequencies [n, 256] with row sums of 4096, at least 1 for each used symbol.

    Frequencies are rounded down; the remainder is distributed one by one to the symbols with the greatest
    ratio of count to frequency.
    """
    used = counts > 0
    rare, n_rare, common = np.zeros_like(used), np.zeros(len(counts)), counts.sum(axis=1)
    # Symbols whose share is below 1 get 1; the others divide the rest.
    while True:
        shares = counts * ((SCALE - n_rare) / np.maximum(common, 1))[:, None]
        more = used & ~rare & (shares < 1)
        if not more.any():
            break
        rare |= more
        n_rare, common = n_rare + more.sum(axis=1), common - (counts * more).sum(axis=1)
    frequencies = np.where(rare, 1, shares).astype(np.uint16)
    missing = SCALE - frequencies.sum(axis=1, dtype=np.int64)
    if missing.any():
        gain = np.divide(counts, frequencies, out=np.full(counts.shape, -1.0), where=used)
        ranked = np.sort(gain, axis=1)
        at = np.arange(len(counts))
        least = ranked[at, np.minimum(256 - missing, 255)]
        # If equal gains are on both sides of the cut, `ascending` decides between them.
        is_tied = (missing > 0) & (ranked[at, 255 - missing] == least)
        frequencies += (gain >= least[:, None]) & ((missing > 0) & ~is_tied)[:, None]
        if is_tied.any():
            tied = gain[is_tied]
            order = ascending(tied)
            is_given = np.arange(256) >= (256 - missing[is_tied])[:, None]
            row = np.flatnonzero(is_tied).repeat(missing[is_tied])
            frequencies[row, order[is_given]] += np.uint16(1)
    return frequencies


def count_streams(symbols: Bytes, ends: Counts) -> Counts:
    """Count the symbols of consecutive streams with ends [m]: returns counts [m, 256] of each byte."""
    return np.stack([histogram(part) for part in np.split(symbols, ends[:-1])])


def repeats(symbols: Bytes, ends: Counts) -> Counts:
    """Count repeated groups of eight codes in consecutive streams with ends [m].

    A position is a hit if its eight codes were the last ones stored in their slot of a hash table.

    Returns:
        Number of hits and number of runs of hits of each stream [m, 2].
    """
    hits = np.zeros((len(ends), 2), np.int64)
    for k, part in enumerate(np.split(symbols, ends[:-1])):
        if len(part) >= 8:
            words = np.lib.stride_tricks.sliding_window_view(part, 8).copy().view("<u8")[:, 0]
            mixed = words * np.uint64(LAST_MIX)
            places, tags = mixed >> np.uint64(50), (mixed >> np.uint64(18)).astype(np.uint32)
            order = np.argsort(places, kind="stable")
            before = np.where(np.diff(places[order], prepend=N_LAST) == 0, np.roll(tags[order], 1), 0)
            is_hit = np.empty(len(words), np.bool_)
            is_hit[order] = tags[order] == before
            hits[k] = is_hit.sum(), is_hit[0] + (is_hit[1:] & ~is_hit[:-1]).sum()
    return hits
