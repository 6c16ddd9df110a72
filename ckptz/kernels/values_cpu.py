"""Quantized values and packed codes on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import uint8, uint32, uint64
from numpy.typing import NDArray

from ckptz.kernels import floats
from ckptz.kernels.floats import BF16, F32, N_BUCKETS, TINY_EXPONENT, Bytes, Counts, Patterns
from ckptz.kernels.numba_base import BLOCK, ONE, inlined, kernel, part, sign_fill

MIN_TABLED = 1 << 14  # for fewer patterns a binary search is faster than building a table of all buckets


# --- values -------------------------------------------------------------------------------------


@kernel
def _top_histogram(patterns: Any, shift: int, first: Any, second: Any, total: Any) -> None:
    # Two histograms alternate: with one, consecutive equal values would wait for each other's store.
    down = uint64(shift)
    whole = len(patterns) // 2 * 2
    for i in range(0, whole, 2):
        first[uint64(patterns[i]) >> down] += uint32(1)
        second[uint64(patterns[i + 1]) >> down] += uint32(1)
    for i in range(whole, len(patterns)):
        first[uint64(patterns[i]) >> down] += uint32(1)
    for j in range(len(total)):
        total[j] = np.int64(first[j]) + second[j]


def top_histogram(patterns: Patterns) -> Counts:
    first, second = np.zeros((2, N_BUCKETS), np.uint32)
    total = np.empty(N_BUCKETS, np.int64)
    _top_histogram(patterns, 0 if patterns.itemsize == 2 else 16, first, second, total)
    return total


@functools.lru_cache(8)
def _region_table(
    boundaries: bytes, codes: bytes, width: int
) -> tuple[NDArray[np.uint16], Bytes, NDArray[np.bool_]]:
    """Build lookup tables over the top 16 bits of ordered patterns, once per tensor.

    Returns:
        For each bucket of patterns [65536] the number of boundaries at or below its first pattern, the code
        of that pattern, and whether a boundary is inside the bucket.
    """
    wide = np.frombuffer(boundaries, f"u{width // 8}").astype(np.uint64)
    down = np.uint64(width - 16)
    rest = (ONE << down) - ONE
    counts = np.bincount(((wide + rest) >> down).astype(np.int64), minlength=N_BUCKETS + 1)
    is_split = np.zeros(N_BUCKETS, np.bool_)
    is_split[wide[(wide & rest) > 0] >> down] = True
    low = np.cumsum(counts)[:N_BUCKETS].astype(np.uint16)
    return low, np.frombuffer(codes, np.uint8)[low], is_split


@kernel
def _region_codes(
    patterns: Any, boundaries: Any, codes: Any, low: Any, of_bucket: Any, is_split: Any, width: int, out: Any
) -> None:
    n = uint64(len(boundaries))
    shift, top = uint64(width - 1), ONE << uint64(width - 1)
    down = uint64(width - 16)
    mask = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width)
    for i in range(len(patterns)):
        pattern = uint64(patterns[i])
        ordered = (pattern ^ ((uint64(0) - (pattern >> shift)) | top)) & mask
        bucket = ordered >> down
        if is_split[bucket]:
            r = uint64(low[bucket])
            while r < n and uint64(boundaries[r]) <= ordered:
                r += ONE
            out[i] = codes[r]
        else:
            out[i] = of_bucket[bucket]


def region_codes(patterns: Patterns, boundaries: Patterns, codes: Bytes) -> Bytes:
    if len(patterns) < MIN_TABLED:
        return floats.region_codes(patterns, boundaries, codes)
    out = np.empty(len(patterns), np.uint8)
    width = 8 * patterns.itemsize
    table = _region_table(boundaries.tobytes(), codes.tobytes(), width)
    _region_codes(patterns, boundaries, codes, *table, width, out)
    return out


@inlined
def _widen_f16(pattern: Any) -> Any:
    """Convert an F16 pattern to an F32 pattern."""
    sign = (pattern & uint32(0x8000)) << uint32(16)
    exponent, mantissa = (pattern >> uint32(10)) & uint32(0x1F), pattern & uint32(0x3FF)
    if exponent == uint32(0):
        if mantissa == uint32(0):
            return uint32(sign)
        exponent = uint32(113)
        while not mantissa & uint32(0x400):
            mantissa <<= uint32(1)
            exponent -= uint32(1)
        return uint32(sign | (exponent << uint32(23)) | ((mantissa & uint32(0x3FF)) << uint32(13)))
    if exponent == uint32(31):
        exponent = uint32(255 - 112)
    return uint32(sign | ((exponent + uint32(112)) << uint32(23)) | (mantissa << uint32(13)))


@inlined
def _narrow_f16(pattern: Any) -> Any:
    """Round an F32 pattern to an F16 pattern, to nearest even."""
    sign, magnitude = (pattern >> uint32(16)) & uint32(0x8000), pattern & uint32(0x7FFFFFFF)
    if magnitude > uint32(0x7F800000):
        return uint32(sign | uint32(0x7E00))
    if magnitude >= uint32(0x477FF000):
        return uint32(sign | uint32(0x7C00))
    if magnitude < uint32(0x33000001):
        return uint32(sign)
    exponent, mantissa = magnitude >> uint32(23), (magnitude & uint32(0x7FFFFF)) | uint32(0x800000)
    shift = uint32(13) if exponent >= uint32(113) else uint32(126) - exponent
    kept = mantissa >> shift
    rest, half = mantissa & ((uint32(1) << shift) - uint32(1)), uint32(1) << (shift - uint32(1))
    if rest > half or (rest == half and kept & uint32(1)):
        kept += uint32(1)
    if exponent >= uint32(113):
        kept += (exponent - uint32(113)) << uint32(10)
    return uint32(sign | kept)


@inlined
def _narrow_bf16(pattern: Any) -> Any:
    if (pattern & uint32(0x7FFFFFFF)) > uint32(0x7F800000):
        return uint32((pattern >> uint32(16)) | uint32(0x40))
    return uint32((pattern + uint32(0x7FFF) + ((pattern >> uint32(16)) & uint32(1))) >> uint32(16))


@kernel
def _to_f32(patterns: Any, kind: int, out: Any) -> None:
    n = len(out)
    if kind == F32:
        for i in range(n):
            out[i] = patterns[i]
    elif kind == BF16:
        for i in range(n):
            out[i] = uint32(patterns[i]) << uint32(16)
    else:
        for i in range(n):
            out[i] = _widen_f16(uint32(patterns[i]))


@kernel
def _from_f32(patterns: Any, kind: int, out: Any) -> None:
    n = len(out)
    if kind == BF16:
        for i in range(n):
            out[i] = _narrow_bf16(patterns[i])
    else:
        for i in range(n):
            out[i] = _narrow_f16(patterns[i])


def to_f32(patterns: Patterns, kind: int) -> NDArray[np.uint32]:
    if kind == F32:
        return patterns
    out = np.empty(len(patterns), np.uint32)
    _to_f32(patterns, kind, out)
    return out


def from_f32(patterns: NDArray[np.uint32], kind: int) -> Patterns:
    if kind == F32:
        return patterns
    out = np.empty(len(patterns), np.uint16)
    _from_f32(patterns, kind, out)
    return out


@inlined
def _tiny_integer(pattern: Any) -> Any:
    exponent = np.int64((pattern >> uint32(23)) & uint32(0xFF))
    magnitude = np.int64(pattern & uint32(0x7FFFFF))
    if exponent > 0:
        magnitude = (magnitude | np.int64(1 << 23)) << (exponent - 1)
    return -magnitude if pattern >> uint32(31) else magnitude


@part
def _add_tiny(a: Any, b: Any) -> Any:
    total = _tiny_integer(a) + _tiny_integer(b)
    magnitude = abs(total)
    shift = np.int64(0)
    while magnitude >> (shift + 24):
        shift += 1
    kept = magnitude >> shift
    if shift:
        rest, half = magnitude - (kept << shift), np.int64(1) << (shift - 1)
        if rest > half or (rest == half and kept & 1):
            kept += 1
        kept += shift << 23
    is_negative = total < 0 or (a == uint32(0x80000000) and b == uint32(0x80000000))
    return uint32(kept) | (uint32(is_negative) << uint32(31))


@kernel
def _add_block(sums: Any, sums_f32: Any, terms: Any, terms_f32: Any) -> None:
    """Add `terms` to `sums` in place; both are F32 patterns, passed with their float views."""
    limit = uint32(TINY_EXPONENT)
    n_tiny = uint32(0)
    for i in range(len(sums)):
        a, b = sums[i], terms[i]
        both = ((a >> uint32(23)) & uint32(0xFF) < limit) & ((b >> uint32(23)) & uint32(0xFF) < limit)
        n_tiny += uint32(both & (((a | b) << uint32(1)) != uint32(0)))
    if n_tiny == uint32(0):
        for i in range(len(sums)):
            sums_f32[i] = sums_f32[i] + terms_f32[i]
        return
    for i in range(len(sums)):
        a, b = sums[i], terms[i]
        if ((a >> uint32(23)) & uint32(0xFF) < limit) & ((b >> uint32(23)) & uint32(0xFF) < limit):
            sums[i] = _add_tiny(a, b)
        else:
            sums_f32[i] = sums_f32[i] + terms_f32[i]


def add_f32(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.uint32]:
    sums, terms = a.copy(), np.ascontiguousarray(b)
    _add_block(sums, sums.view(np.float32), terms, terms.view(np.float32))
    return sums


@kernel
def _outer_rows(rows: Any, columns: Any, begin: int, out: Any, patterns: Any) -> bool:
    """Compute elements of the outer product from `begin` on, and return False if one may be subnormal.

    `patterns` is a view of `out` [n].
    """
    n, n_tiny = len(columns), uint32(0)
    i, j, done = begin // n, begin % n, 0
    while done < len(out):
        size = n - j
        if size > len(out) - done:
            size = len(out) - done
        factor, here, part, bits = rows[i], columns[j : j + size], out[done:], patterns[done:]
        for k in range(size):
            part[k] = factor * here[k]
        for k in range(size):
            n_tiny |= uint32((bits[k] & uint32(0x7F800000)) < uint32(2 << 23))
        done += size
        i, j = i + 1, 0
    return n_tiny == uint32(0)


def outer_product(
    rows: NDArray[np.uint32], columns: NDArray[np.uint32], begin: int, end: int
) -> NDArray[np.uint32]:
    products = np.empty(end - begin, np.float32)
    patterns = products.view(np.uint32)
    if _outer_rows(rows.view(np.float32), columns.view(np.float32), begin, products, patterns):
        return patterns
    return floats.outer_product(rows, columns, begin, end)


@kernel
def _lookup(codes: Any, rows: Any, table: Any, n_codes: int, out: Any) -> None:
    """Look up codes in a flat table with `n_codes` entries per row."""
    if len(rows) == 1:
        first = uint64(rows[0]) * uint64(n_codes)
        for i in range(len(out)):
            out[i] = table[first + uint64(codes[i])]
    else:
        for i in range(len(out)):
            out[i] = table[uint64(rows[i]) * uint64(n_codes) + uint64(codes[i])]


def lookup(codes: Bytes, rows: Patterns, table: Patterns, out: Patterns) -> None:
    _lookup(codes, rows, table.reshape(-1), table.shape[1], out)


# Two kernels: 32-bit values need no conversion to F32.


@kernel
def _add_linear_32(
    base: Any,
    codes: Any,
    rows: Any,
    table: Any,
    n_codes: int,
    sums: Any,
    sums_f32: Any,
    terms: Any,
    terms_f32: Any,
    out: Any,
) -> None:
    for begin in range(0, len(out), BLOCK):
        origin, here = base[begin : begin + BLOCK], out[begin : begin + BLOCK]
        size = len(here)
        for i in range(size):
            sums[i] = origin[i]
        own = rows if len(rows) == 1 else rows[begin : begin + BLOCK]
        _lookup(codes[begin : begin + BLOCK], own, table, n_codes, terms[:size])
        _add_block(sums[:size], sums_f32[:size], terms[:size], terms_f32[:size])
        for i in range(size):
            here[i] = sums[i]


@kernel
def _add_linear_16(
    base: Any,
    codes: Any,
    rows: Any,
    table: Any,
    n_codes: int,
    kind: int,
    sums: Any,
    sums_f32: Any,
    terms: Any,
    terms_f32: Any,
    out: Any,
) -> None:
    for begin in range(0, len(out), BLOCK):
        here = out[begin : begin + BLOCK]
        size = len(here)
        _to_f32(base[begin : begin + BLOCK], kind, sums[:size])
        own = rows if len(rows) == 1 else rows[begin : begin + BLOCK]
        _lookup(codes[begin : begin + BLOCK], own, table, n_codes, terms[:size])
        _add_block(sums[:size], sums_f32[:size], terms[:size], terms_f32[:size])
        _from_f32(sums[:size], kind, here)


def add_linear(
    base: Patterns, codes: Bytes, rows: Patterns, table: NDArray[np.uint32], kind: int, out: Patterns
) -> None:
    sums, terms = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    views = sums, sums.view(np.float32), terms, terms.view(np.float32)
    looked_up = codes, rows, table.reshape(-1), table.shape[1]
    if kind == F32:
        _add_linear_32(base, *looked_up, *views, out)
    else:
        _add_linear_16(base, *looked_up, kind, *views, out)


@kernel
def _add_bits(
    base: Any, codes: Any, rows: Any, table: Any, n_codes: int, width: int, terms: Any, out: Any
) -> None:
    shift, top = uint64(width - 1), ONE << uint64(width - 1)
    mask = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width)
    for begin in range(0, len(out), BLOCK):
        here, origin = out[begin : begin + BLOCK], base[begin : begin + BLOCK]
        own = rows if len(rows) == 1 else rows[begin : begin + BLOCK]
        _lookup(codes[begin : begin + BLOCK], own, table, n_codes, terms[: len(here)])
        for i in range(len(here)):
            b = uint64(origin[i])
            ordered = ((b ^ (sign_fill(b, shift) | top)) + uint64(terms[i])) & mask
            here[i] = ordered ^ (((ordered >> shift) - ONE) | top)


def add_bits(base: Patterns, codes: Bytes, rows: Patterns, table: Patterns, out: Patterns) -> None:
    flat, terms = table.reshape(-1), np.empty(BLOCK, table.dtype)
    _add_bits(base, codes, rows, flat, table.shape[1], 8 * out.itemsize, terms, out)


@kernel
def _any_equal_masked(patterns: Any, mask: int) -> bool:
    is_any = uint32(0)
    for i in range(len(patterns)):
        is_any |= uint32((uint64(patterns[i]) & uint64(mask)) == uint64(mask))
    return is_any != uint32(0)


def all_finite(patterns: Patterns, kind: int) -> bool:
    return not _any_equal_masked(patterns, (0x7F800000, 0x7F80, 0x7C00)[kind])


# --- packing ------------------------------------------------------------------------------------


@kernel
def _pack_codes(codes: Any, n_bits: int, out: Any) -> None:
    """Pack codes whose number is a multiple of eight."""
    whole = len(codes) >> 3
    if n_bits == 4:
        for i in range(4 * whole):
            out[i] = codes[2 * i] | (codes[2 * i + 1] << uint8(4))
    elif n_bits == 2:
        for i in range(2 * whole):
            pair = codes[4 * i + 2] << uint8(4) | (codes[4 * i + 3] << uint8(6))
            out[i] = codes[4 * i] | (codes[4 * i + 1] << uint8(2)) | pair
    elif n_bits == 1:
        for i in range(whole):
            held = uint32(0)
            for j in range(8):
                held |= uint32(codes[8 * i + j]) << uint32(j)
            out[i] = uint8(held)
    else:  # eight codes fill n_bits bytes
        for i in range(whole):
            word = uint64(0)
            for j in range(8):
                word |= uint64(codes[8 * i + j]) << uint64(j * n_bits)
            for j in range(n_bits):
                out[i * n_bits + j] = uint8(word >> uint64(8 * j))


def pack_codes(codes: Bytes, n_bits: int) -> Bytes:
    out, whole = np.empty((len(codes) * n_bits + 7) >> 3, np.uint8), len(codes) & ~7
    _pack_codes(codes[:whole], n_bits, out)
    last, word = out[whole * n_bits >> 3 :], 0
    for i, code in enumerate(codes[whole:].tolist()):
        word |= code << i * n_bits
    last[:] = np.frombuffer(word.to_bytes(len(last), "little"), np.uint8)
    return out


@kernel
def _unpack_codes(packed: Any, n_bits: int, out: Any) -> None:
    """Unpack codes whose number is a multiple of eight."""
    whole = len(out) >> 3
    if n_bits == 4:
        for i in range(4 * whole):
            out[2 * i] = packed[i] & uint8(15)
            out[2 * i + 1] = packed[i] >> uint8(4)
    elif n_bits <= 2:
        per_byte = 8 // n_bits
        mask = uint32((1 << n_bits) - 1)
        for i in range(whole * n_bits):
            for j in range(per_byte):
                out[i * per_byte + j] = uint8((uint32(packed[i]) >> uint32(j * n_bits)) & mask)
    else:
        wide_mask = uint64((1 << n_bits) - 1)
        for i in range(whole):
            word = uint64(0)
            for j in range(n_bits):
                word |= uint64(packed[i * n_bits + j]) << uint64(8 * j)
            for j in range(8):
                out[8 * i + j] = uint8((word >> uint64(j * n_bits)) & wide_mask)


def unpack_codes(packed: Bytes, n_bits: int, out: Bytes) -> None:
    whole = len(out) & ~7
    _unpack_codes(packed, n_bits, out[:whole])
    begin = whole * n_bits >> 3
    word = int.from_bytes(packed[begin : begin + n_bits].tobytes(), "little")
    out[whole:] = [word >> i * n_bits & ((1 << n_bits) - 1) for i in range(len(out) - whole)]
