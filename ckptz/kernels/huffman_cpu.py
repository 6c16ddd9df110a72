"""Huffman coding on the CPU: code lengths, and streams of four parts that are decoded alternately.

The encoder looks up pairs of symbols. The decoder gets up to four symbols from one lookup of 11 bits, and
does five lookups per load of 64 bits; the four independent parts hide the latency of the lookups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint8, uint32, uint64

from ckptz.kernels.floats import HUFFMAN_BITS, HUFFMAN_STREAMS, Bytes, Counts
from ckptz.kernels.memory_cpu import load_16, load_64, store_32, store_64
from ckptz.kernels.numba_base import inlined, kernel, part

N_ENTRIES = 1 << HUFFMAN_BITS
PAIRS = 1 << 16
SLACK = 8  # bytes after a stream that the encoder's last store may overwrite
LOOKUPS = 5  # lookups per load, which has at least 57 bits
SYMBOLS = 4  # symbols per lookup at most
STEP = np.int64(LOOKUPS * SYMBOLS)
ALL_BITS = np.uint64(N_ENTRIES - 1)
BYTE = np.uint64(0xFF)
# Bit fields of a decoder entry: total bits of its symbols, their number, bits of the first one, the symbols.
N_SYMBOLS_AT, FIRST_BITS_AT, SYMBOLS_AT = np.uint64(8), np.uint64(16), np.uint64(32)


# --- code lengths -------------------------------------------------------------------------------


@kernel
def _huffman_lengths(counts: Any, order: Any, items: Any, is_leaf: Any, lengths: Any) -> None:
    """Compute code lengths by package-merge; see `plain.huffman_lengths`.

    `order` [n, 256] has the symbols of each row, ascending by count and then by symbol.
    """
    for row in range(len(counts)):
        own = counts[row]
        n: Any = 0
        n_items: Any = 0
        for symbol in range(256):
            n += own[symbol] > 0
            lengths[row, symbol] = uint8(0)
        if n < 2:
            continue
        ranked = order[row, 256 - n :]
        for level in range(HUFFMAN_BITS):
            before, now = items[level & 1], items[1 - (level & 1)]
            n_pairs, leaf, pair, i = n_items // 2, 0, 0, 0
            while leaf < n or pair < n_pairs:
                weight: Any = before[2 * pair] + before[2 * pair + 1] if pair < n_pairs else 0
                takes_leaf = leaf < n and (pair == n_pairs or own[ranked[leaf]] <= weight)
                is_leaf[level, i] = takes_leaf
                if takes_leaf:
                    now[i] = own[ranked[leaf]]
                    leaf += 1
                else:
                    now[i] = weight
                    pair += 1
                i += 1
            n_items = i
        n_taken: Any = 2 * n - 2
        for back in range(HUFFMAN_BITS):
            n_leaves: Any = 0
            for i in range(n_taken):
                n_leaves += np.int64(is_leaf[HUFFMAN_BITS - 1 - back, i])
            for i in range(n_leaves):
                lengths[row, ranked[i]] += uint8(1)
            n_taken = 2 * (n_taken - n_leaves)


def huffman_lengths(counts: Counts) -> Bytes:
    lengths = np.empty(counts.shape, np.uint8)
    items, is_leaf = np.empty((2, 512), np.int64), np.empty((HUFFMAN_BITS, 512), np.bool_)
    _huffman_lengths(counts, np.argsort(counts, axis=1, kind="stable"), items, is_leaf, lengths)
    return lengths


@part
def _huffman_codes(lengths: Any, codes: Any) -> None:
    """Assign canonical code words [256] by length and symbol, with their bits reversed."""
    code = uint64(0)
    for n_bits in range(1, HUFFMAN_BITS + 1):
        code <<= uint64(1)
        for symbol in range(256):
            if lengths[symbol] == n_bits:
                turned = uint64(0)
                for k in range(n_bits):
                    turned = (turned << uint64(1)) | ((code >> uint64(k)) & uint64(1))
                codes[symbol] = uint32(turned)
                code += uint64(1)


# --- encoding -----------------------------------------------------------------------------------


@part
def _put_whole_bytes(out: Any, at: Any, word: Any, n_bits: Any) -> Any:
    """Write the complete bytes of a word to out[at:]; returns the next offset, and the remaining bits."""
    store_64(out, at, word)
    return at + (n_bits >> uint64(3)), word >> (n_bits & ~uint64(7)), n_bits & uint64(7)


@part
def _encode_quarter(symbols: Any, begin: Any, end: Any, pairs: Any, singles: Any, out: Any, at: Any) -> Any:
    """Encode symbols begin..end to out[at:] and return the next offset; entries are code << 8 | n_bits."""
    word, n_bits, i = uint64(0), uint64(0), uint64(begin)
    last = uint64(begin) + ((uint64(end) - uint64(begin)) & ~uint64(3))
    while i < last:
        first = uint64(pairs[load_16(symbols, i)])
        second = uint64(pairs[load_16(symbols, i + uint64(2))])
        word |= (first >> uint64(8)) << n_bits
        n_bits += first & BYTE
        word |= (second >> uint64(8)) << n_bits
        n_bits += second & BYTE
        at, word, n_bits = _put_whole_bytes(out, at, word, n_bits)
        i += uint64(4)
    while i < end:
        first = uint64(singles[uint64(symbols[i])])
        word |= (first >> uint64(8)) << n_bits
        n_bits += first & BYTE
        at, word, n_bits = _put_whole_bytes(out, at, word, n_bits)
        i += uint64(1)
    return at + ((n_bits + uint64(7)) >> uint64(3))


@kernel
def _huffman_encode(
    symbols: Any,
    ends: Any,
    lengths: Any,
    begins: Any,
    codes: Any,
    singles: Any,
    pairs: Any,
    out: Any,
    cuts: Any,
) -> None:
    begin = uint64(0)
    for k in range(len(ends)):
        end, at = uint64(ends[k]), uint64(begins[k])
        _huffman_codes(lengths[k], codes)
        for a in range(256):
            n_bits = uint32(lengths[k, a])
            singles[a] = codes[a] << uint32(8) | n_bits
        for a in range(256):
            n_first = uint32(lengths[k, a])
            if n_first:
                for b in range(256):
                    n_second = uint32(lengths[k, b])
                    if n_second:
                        both = codes[a] | codes[b] << n_first
                        pairs[a | b << 8] = both << uint32(8) | (n_first + n_second)
        size = (end - begin + uint64(HUFFMAN_STREAMS - 1)) // uint64(HUFFMAN_STREAMS)
        for j in range(HUFFMAN_STREAMS):
            until = begin + size
            if until > end:
                until = end
            at = _encode_quarter(symbols, begin, until, pairs, singles, out, at)
            cuts[k, j] = at
            begin = until


def huffman_encode(symbols: Bytes, ends: Counts, lengths: Bytes, n_heads: Counts, n_bytes: Counts) -> Any:
    stops = np.cumsum(n_heads + n_bytes + SLACK)
    begins, cuts = stops - n_bytes - SLACK, np.empty((len(ends), HUFFMAN_STREAMS), np.int64)
    out = np.empty(int(stops[-1]), np.uint8)
    codes, singles, pairs = (np.empty(n, np.uint32) for n in (256, 256, PAIRS))
    _huffman_encode(symbols, ends, lengths, begins, codes, singles, pairs, out, cuts)
    return out, np.column_stack((begins - n_heads, begins, cuts))


# --- decoding -----------------------------------------------------------------------------------


@part
def _fill_entries(lengths: Any, codes: Any, entries: Any) -> None:
    """Fill the decoding table [2048] of a complete code; each entry holds up to four symbols."""
    _huffman_codes(lengths, codes)
    for symbol in range(256):
        n_bits = np.int64(lengths[symbol])
        if n_bits:
            for k in range(np.int64(codes[symbol]), N_ENTRIES, 1 << n_bits):
                entries[k] = uint64(symbol) << SYMBOLS_AT | uint64(n_bits) << FIRST_BITS_AT
    # The bits after a symbol index a lower entry; its first symbol does not change when more are added.
    for k in range(N_ENTRIES):
        n_all, n_symbols, symbols = uint64(0), uint64(0), uint64(0)
        while n_symbols < uint64(SYMBOLS):
            entry = entries[uint64(k) >> n_all]
            more = (entry >> FIRST_BITS_AT) & BYTE
            if n_all + more > uint64(HUFFMAN_BITS):
                break
            symbols |= ((entry >> SYMBOLS_AT) & BYTE) << (n_symbols << uint64(3))
            n_all += more
            n_symbols += uint64(1)
        first = (entries[k] >> FIRST_BITS_AT) & BYTE
        entries[k] = symbols << SYMBOLS_AT | first << FIRST_BITS_AT | n_symbols << N_SYMBOLS_AT | n_all


@inlined
def _five(source: Any, p: Any, entries: Any, out: Any, o: Any) -> Any:
    """Do five lookups from bit `p` on, write their symbols to out[o:], and return the sum of the entries."""
    word = load_64(source, p >> uint64(3)) >> (p & uint64(7))
    total = uint64(0)
    for _ in range(LOOKUPS):
        entry = entries[word & ALL_BITS]
        store_32(out, o + ((total >> N_SYMBOLS_AT) & BYTE), entry >> SYMBOLS_AT)
        total += entry
        word >>= entry & uint64(63)
    return total


@part
def _decode_tail(source: Any, p: Any, last: Any, entries: Any, out: Any, o: Any, end: Any) -> Any:
    """Decode one part from bit `p` on up to out[end]; returns the next bit, which may exceed the source."""
    size = uint64(len(source))
    while np.int64(p) <= last and np.int64(o) + STEP <= np.int64(end):
        total = _five(source, p, entries, out, o)
        p += total & BYTE
        o += (total >> N_SYMBOLS_AT) & BYTE
    while o < end:
        at, word = p >> uint64(3), uint64(0)
        for k in range(3):
            if at + uint64(k) < size:
                word |= uint64(source[at + uint64(k)]) << uint64(8 * k)
        entry = entries[(word >> (p & uint64(7))) & ALL_BITS]
        out[o] = uint8(entry >> SYMBOLS_AT)
        p += (entry >> FIRST_BITS_AT) & BYTE
        o += uint64(1)
    return p


@kernel
def _huffman_decode(source: Any, ends: Any, lengths: Any, codes: Any, entries: Any, out: Any) -> bool:
    """Decode the four parts of a stream alternately; see `plain.huffman_decode`."""
    _fill_entries(lengths, codes, entries)
    n = uint64(len(out))
    size = (n + uint64(HUFFMAN_STREAMS - 1)) // uint64(HUFFMAN_STREAMS)
    o1, o2, o3 = size, uint64(2) * size, uint64(3) * size
    if o1 > n:
        o1 = n
    if o2 > n:
        o2 = n
    if o3 > n:
        o3 = n
    o0, e0, e1, e2 = uint64(0), o1, o2, o3
    p0, p1, p2, p3 = uint64(0), uint64(8 * ends[0]), uint64(8 * ends[1]), uint64(8 * ends[2])
    last = np.int64(8) * (len(source) - np.int64(8))
    # While each part has 64 bits to load and space for the symbols of five lookups.
    while (
        np.int64(p0) <= last
        and np.int64(p1) <= last
        and np.int64(p2) <= last
        and np.int64(p3) <= last
        and np.int64(o0) + STEP <= np.int64(e0)
        and np.int64(o1) + STEP <= np.int64(e1)
        and np.int64(o2) + STEP <= np.int64(e2)
        and np.int64(o3) + STEP <= np.int64(n)
    ):
        t0 = _five(source, p0, entries, out, o0)
        t1 = _five(source, p1, entries, out, o1)
        t2 = _five(source, p2, entries, out, o2)
        t3 = _five(source, p3, entries, out, o3)
        p0 += t0 & BYTE
        p1 += t1 & BYTE
        p2 += t2 & BYTE
        p3 += t3 & BYTE
        o0 += (t0 >> N_SYMBOLS_AT) & BYTE
        o1 += (t1 >> N_SYMBOLS_AT) & BYTE
        o2 += (t2 >> N_SYMBOLS_AT) & BYTE
        o3 += (t3 >> N_SYMBOLS_AT) & BYTE
    p0 = _decode_tail(source, p0, last, entries, out, o0, e0)
    p1 = _decode_tail(source, p1, last, entries, out, o1, e1)
    p2 = _decode_tail(source, p2, last, entries, out, o2, e2)
    p3 = _decode_tail(source, p3, last, entries, out, o3, n)
    return (
        _ends_at(source, p0, ends[0])
        and _ends_at(source, p1, ends[1])
        and _ends_at(source, p2, ends[2])
        and _ends_at(source, p3, ends[3])
    )


@part
def _ends_at(source: Any, p: Any, end: Any) -> bool:
    """Return whether a part that ends before bit `p` ends in byte `end - 1`, with zero bits as padding."""
    if np.int64((p + uint64(7)) >> uint64(3)) != end:
        return False
    return (p & uint64(7)) == uint64(0) or (uint64(source[end - 1]) >> (p & uint64(7))) == uint64(0)


def huffman_decode(source: Bytes, ends: Counts, lengths: Bytes, out: Bytes) -> bool:
    codes, entries = np.empty(256, np.uint32), np.empty(N_ENTRIES, np.uint64)
    return bool(_huffman_decode(source, ends, lengths, codes, entries, out))
