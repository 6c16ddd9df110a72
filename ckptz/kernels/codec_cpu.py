"""The kernels for the CPU, compiled by numba on first use and cached. `reference.py` defines them.

Every kernel releases the GIL, so that chunks run on threads. Integer arithmetic is written in u64
with explicit masks: numba widens small integers, and LLVM narrows them again when it vectorises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numba import uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from ckptz.kernels import reference
from ckptz.kernels.reference import (
    BF16,
    DIFFERENCE,
    F32,
    MAX_GAP_BYTE,
    MAX_GOLOMB_BITS,
    MAX_TABLE_ORDER,
    N_BUCKETS,
    ORDERED_DIFFERENCE,
    ROTATED,
    SCALE,
    STATE_LOW,
    TINY_EXPONENT,
    XOR,
    Bytes,
    Counts,
    Units,
)
from ckptz.kernels.reference import outer_product as outer_product
from ckptz.kernels.reference import round_f64 as round_f64

kernel = numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")
inlined = numba.njit(inline="always")

BLOCK = 4096  # units per pass: a block and its planes stay in the first-level cache
MIN_TABLED = 1 << 14  # fewer units are searched: a table of all buckets would take longer
N_LANES = 32  # lanes of the vectorised loops; 1 and 4 lanes take the scalar ones
ONE = np.uint64(1)
LOW_12 = np.uint64(0xFFF)
LOW_32 = np.uint64(0xFFFFFFFF)


# --- bit patterns -------------------------------------------------------------------------------


@inlined
def _sign_fill(unit: Any, shift: Any) -> Any:
    return uint64(0) - (unit >> shift)


@kernel
def _transform(units: Any, base: Any, mode: int, width: int, out: Any) -> None:
    shift = uint64(width - 1)
    mask = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width)
    top = ONE << shift
    n = len(out)
    if mode == ROTATED:
        for i in range(n):
            unit = uint64(units[i])
            out[i] = (unit << ONE) | (unit >> shift)
    elif mode == XOR:
        for i in range(n):
            out[i] = units[i] ^ base[i]
    elif mode == DIFFERENCE:
        for i in range(n):
            d = (uint64(units[i]) - uint64(base[i])) & mask
            out[i] = (d << ONE) ^ _sign_fill(d, shift)
    elif mode == ORDERED_DIFFERENCE:
        for i in range(n):
            a, b = uint64(units[i]), uint64(base[i])
            d = ((a ^ (_sign_fill(a, shift) | top)) - (b ^ (_sign_fill(b, shift) | top))) & mask
            out[i] = (d << ONE) ^ _sign_fill(d, shift)
    else:
        for i in range(n):
            out[i] = units[i]


@kernel
def _restore(units: Any, base: Any, mode: int, width: int, out: Any) -> None:
    shift = uint64(width - 1)
    mask = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width)
    top = ONE << shift
    n = len(out)
    if mode == ROTATED:
        for i in range(n):
            unit = uint64(units[i])
            out[i] = (unit >> ONE) | (unit << shift)
    elif mode == XOR:
        for i in range(n):
            out[i] = units[i] ^ base[i]
    elif mode == DIFFERENCE:
        for i in range(n):
            code = uint64(units[i])
            out[i] = uint64(base[i]) + ((code >> ONE) ^ (uint64(0) - (code & ONE)))
    elif mode == ORDERED_DIFFERENCE:
        for i in range(n):
            code, b = uint64(units[i]), uint64(base[i])
            ordered = (b ^ (_sign_fill(b, shift) | top)) + ((code >> ONE) ^ (uint64(0) - (code & ONE)))
            ordered &= mask
            out[i] = ordered ^ (((ordered >> shift) - ONE) | top)
    else:
        for i in range(n):
            out[i] = units[i]


@kernel
def _split_planes(units: Any, base: Any, mode: int, planes: Any) -> None:
    n, n_planes = len(units), len(planes)
    block = np.empty(BLOCK, units.dtype)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        here = block[: end - begin]
        _transform(units[begin:end], base[begin:end], mode, 8 * n_planes, here)
        for j in range(n_planes):
            plane = planes[j, begin:end]
            shift = uint64(8 * j)
            for i in range(len(here)):
                plane[i] = uint8(uint64(here[i]) >> shift)


@kernel
def _merge_planes(planes: Any, base: Any, mode: int, out: Any) -> None:
    n, n_planes = len(out), len(planes)
    block = np.empty(BLOCK, out.dtype)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        here = block[: end - begin]
        for j in range(n_planes):
            plane = planes[j][begin:end]
            shift = uint64(8 * j)
            if j == 0:
                for i in range(len(here)):
                    here[i] = plane[i]
            else:
                for i in range(len(here)):
                    here[i] |= uint64(plane[i]) << shift
        _restore(here, base[begin:end], mode, 8 * n_planes, out[begin:end])


# The two cases of every lossless float tensor, written out: a third of the time of the general loop.


@kernel
def _split_rotated_2(units: Any, low: Any, high: Any) -> None:
    for i in range(len(units)):
        unit = uint16(uint16(units[i] << uint16(1)) | uint16(units[i] >> uint16(15)))
        low[i] = uint8(unit)
        high[i] = uint8(unit >> uint16(8))


@kernel
def _split_rotated_4(units: Any, p0: Any, p1: Any, p2: Any, p3: Any) -> None:
    for i in range(len(units)):
        unit = uint32(uint32(units[i] << uint32(1)) | uint32(units[i] >> uint32(31)))
        p0[i] = uint8(unit)
        p1[i] = uint8(unit >> uint32(8))
        p2[i] = uint8(unit >> uint32(16))
        p3[i] = uint8(unit >> uint32(24))


@kernel
def _merge_rotated_2(low: Any, high: Any, out: Any) -> None:
    for i in range(len(out)):
        unit = uint16(low[i]) | uint16(uint16(high[i]) << uint16(8))
        out[i] = uint16(unit >> uint16(1)) | uint16(unit << uint16(15))


@kernel
def _merge_rotated_4(p0: Any, p1: Any, p2: Any, p3: Any, out: Any) -> None:
    for i in range(len(out)):
        low = uint32(p0[i]) | uint32(uint32(p1[i]) << uint32(8))
        unit = low | uint32(uint32(p2[i]) << uint32(16)) | uint32(uint32(p3[i]) << uint32(24))
        out[i] = uint32(unit >> uint32(1)) | uint32(unit << uint32(31))


def split_planes(units: Units, base: Units, mode: int) -> Bytes:
    """See `reference.split_planes`."""
    planes = np.empty((units.itemsize, len(units)), np.uint8)
    if mode == ROTATED and units.itemsize == 2:
        _split_rotated_2(units, planes[0], planes[1])
        return planes
    if mode == ROTATED and units.itemsize == 4:
        _split_rotated_4(units, planes[0], planes[1], planes[2], planes[3])
        return planes
    _split_planes(units, base, mode, planes)
    return planes


def merge_planes(planes: Sequence[Bytes], base: Units, mode: int, out: Units) -> None:
    """See `reference.merge_planes`."""
    if mode == ROTATED and out.itemsize == 2:
        _merge_rotated_2(planes[0], planes[1], out)
        return
    if mode == ROTATED and out.itemsize == 4:
        _merge_rotated_4(planes[0], planes[1], planes[2], planes[3], out)
        return
    _merge_planes(tuple(planes), base, mode, out)


# --- classes ------------------------------------------------------------------------------------


@kernel
def _magnitude_classes(units: Any, shift: int, mask: int, out: Any) -> None:
    for i in range(len(out)):
        out[i] = uint8((uint64(units[i]) >> uint64(shift)) & uint64(mask))


def magnitude_classes(units: Units) -> Bytes:
    """See `reference.magnitude_classes`."""
    out = np.empty(len(units), np.uint8)
    width = 8 * units.itemsize
    _magnitude_classes(units, max(width - 9, 0), 0xFF if width > 8 else 0x7F, out)
    return out


@kernel
def histogram(symbols: Bytes) -> Counts:
    """See `reference.histogram`."""
    # Four histograms in turn: equal neighbours would wait for each other's store in one.
    counts = np.zeros((4, 256), np.uint32)
    whole = len(symbols) // 4 * 4
    for i in range(0, whole, 4):
        counts[0, symbols[i]] += uint32(1)
        counts[1, symbols[i + 1]] += uint32(1)
        counts[2, symbols[i + 2]] += uint32(1)
        counts[3, symbols[i + 3]] += uint32(1)
    for i in range(whole, len(symbols)):
        counts[0, symbols[i]] += uint32(1)
    total = np.zeros(256, np.int64)
    for j in range(256):
        total[j] = np.int64(counts[0, j]) + counts[1, j] + counts[2, j] + counts[3, j]
    return total


@kernel
def class_histogram(classes: Units, symbols: Bytes, n_classes: int) -> Counts:
    """See `reference.class_histogram`."""
    counts = np.zeros((n_classes, 256), np.int64)
    for i in range(len(symbols)):
        counts[classes[i], symbols[i]] += 1
    return counts


@kernel
def _class_starts(classes: Units, n_classes: int) -> Counts:
    """Where class k of quarter q begins in class order: [4, n_classes].

    Quarters are walked side by side, because equal neighbours would wait for each other's counter.
    """
    quarter = len(classes) // 4
    counts = np.zeros((4, n_classes), np.int64)
    for i in range(quarter):
        counts[0, classes[i]] += 1
        counts[1, classes[quarter + i]] += 1
        counts[2, classes[2 * quarter + i]] += 1
        counts[3, classes[3 * quarter + i]] += 1
    for i in range(4 * quarter, len(classes)):
        counts[3, classes[i]] += 1
    position = 0
    for k in range(n_classes):
        for q in range(4):
            n = counts[q, k]
            counts[q, k] = position
            position += n
    return counts


@kernel
def group(symbols: Bytes, classes: Units, n_classes: int) -> Bytes:
    """See `reference.group`."""
    starts = _class_starts(classes, n_classes)
    grouped = np.empty(len(symbols), np.uint8)
    quarter = len(symbols) // 4
    for i in range(quarter):
        for q in range(4):
            j = np.uintp(q * quarter + i)
            k = classes[j]
            grouped[np.uintp(starts[q, k])] = symbols[j]
            starts[q, k] += 1
    for i in range(4 * quarter, len(symbols)):
        k = classes[i]
        grouped[starts[3, k]] = symbols[i]
        starts[3, k] += 1
    return grouped


@kernel
def ungroup(grouped: Bytes, classes: Units, n_classes: int, out: Bytes) -> None:
    """See `reference.ungroup`."""
    starts = _class_starts(classes, n_classes)
    quarter = len(out) // 4
    for i in range(quarter):
        for q in range(4):
            j = np.uintp(q * quarter + i)
            k = classes[j]
            out[j] = grouped[np.uintp(starts[q, k])]
            starts[q, k] += 1
    for i in range(4 * quarter, len(out)):
        k = classes[i]
        out[i] = grouped[starts[3, k]]
        starts[3, k] += 1


# --- values -------------------------------------------------------------------------------------


@kernel
def top_histogram(units: Units) -> Counts:
    """See `reference.top_histogram`."""
    # Two histograms in turn: equal neighbours would wait for each other's store in one.
    counts = np.zeros((2, N_BUCKETS), np.uint32)
    shift = uint64(0 if units.itemsize == 2 else 16)
    whole = len(units) // 2 * 2
    for i in range(0, whole, 2):
        counts[0, uint64(units[i]) >> shift] += uint32(1)
        counts[1, uint64(units[i + 1]) >> shift] += uint32(1)
    for i in range(whole, len(units)):
        counts[0, uint64(units[i]) >> shift] += uint32(1)
    total = np.empty(N_BUCKETS, np.int64)
    for j in range(N_BUCKETS):
        total[j] = np.int64(counts[0, j]) + counts[1, j]
    return total


@kernel
def _region_table(boundaries: Any, width: int) -> Any:
    """For each top 16 bits of an ordered unit: boundaries at or below its bucket's first, and last, value."""
    low = np.empty(N_BUCKETS, np.uint16)
    is_split = np.empty(N_BUCKETS, np.uint8)
    shift = uint64(width - 16)
    r = 0
    for bucket in range(N_BUCKETS):
        first = uint64(bucket) << shift
        last = first | ((ONE << shift) - ONE)
        while r < len(boundaries) and uint64(boundaries[r]) <= first:
            r += 1
        low[bucket] = r
        is_split[bucket] = r < len(boundaries) and uint64(boundaries[r]) <= last
    return low, is_split


@kernel
def _region_codes(units: Any, boundaries: Any, codes: Any, width: int, out: Any) -> None:
    low, is_split = _region_table(boundaries, width)
    n = len(boundaries)
    shift, top = uint64(width - 1), ONE << uint64(width - 1)
    down = uint64(width - 16)
    mask = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width)
    of_bucket = np.empty(N_BUCKETS, np.uint8)
    for bucket in range(N_BUCKETS):
        of_bucket[bucket] = codes[low[bucket]]
    for i in range(len(units)):
        unit = uint64(units[i])
        ordered = (unit ^ (_sign_fill(unit, shift) | top)) & mask
        bucket = ordered >> down
        if is_split[bucket]:
            r = np.int64(low[bucket])
            while r < n and uint64(boundaries[r]) <= ordered:
                r += 1
            out[i] = codes[r]
        else:
            out[i] = of_bucket[bucket]


def region_codes(units: Units, boundaries: Units, codes: Bytes) -> Bytes:
    """See `reference.region_codes`."""
    if len(units) < MIN_TABLED:
        return reference.region_codes(units, boundaries, codes)
    out = np.empty(len(units), np.uint8)
    _region_codes(units, boundaries, codes, 8 * units.itemsize, out)
    return out


@inlined
def _widen_f16(unit: Any) -> Any:
    """F16 pattern to F32 pattern."""
    sign = (unit & uint32(0x8000)) << uint32(16)
    exponent, mantissa = (unit >> uint32(10)) & uint32(0x1F), unit & uint32(0x3FF)
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
    """F32 pattern to F16 pattern, to nearest even."""
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
def _to_f32(units: Any, kind: int, out: Any) -> None:
    n = len(out)
    if kind == F32:
        for i in range(n):
            out[i] = units[i]
    elif kind == BF16:
        for i in range(n):
            out[i] = uint32(units[i]) << uint32(16)
    else:
        for i in range(n):
            out[i] = _widen_f16(uint32(units[i]))


@kernel
def _from_f32(patterns: Any, kind: int, out: Any) -> None:
    n = len(out)
    if kind == F32:
        for i in range(n):
            out[i] = patterns[i]
    elif kind == BF16:
        for i in range(n):
            out[i] = _narrow_bf16(patterns[i])
    else:
        for i in range(n):
            out[i] = _narrow_f16(patterns[i])


def to_f32(units: Units, kind: int) -> NDArray[np.uint32]:
    """See `reference.to_f32`."""
    if kind == F32:
        return units
    out = np.empty(len(units), np.uint32)
    _to_f32(units, kind, out)
    return out


def from_f32(patterns: NDArray[np.uint32], kind: int) -> Units:
    """See `reference.from_f32`."""
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


@inlined
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
    """sums += terms; both arrays are F32 patterns with their float views."""
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
    """See `reference.add_f32`."""
    sums, terms = a.copy(), np.ascontiguousarray(b)
    _add_block(sums, sums.view(np.float32), terms, terms.view(np.float32))
    return sums


@kernel
def lookup(codes: Bytes, rows: Units, table: Units, out: Units) -> None:
    """See `reference.lookup`."""
    if len(rows) == 1:
        row = table[rows[0]]
        for i in range(len(out)):
            out[i] = row[codes[i]]
    else:
        for i in range(len(out)):
            out[i] = table[rows[i], codes[i]]


@kernel
def _add_linear(
    base: Any,
    codes: Any,
    rows: Any,
    table: Any,
    kind: int,
    sums: Any,
    sums_f32: Any,
    terms: Any,
    terms_f32: Any,
    out: Any,
) -> None:
    n = len(out)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        size = end - begin
        _to_f32(base[begin:end], kind, sums[:size])
        lookup(codes[begin:end], rows if len(rows) == 1 else rows[begin:end], table, terms[:size])
        _add_block(sums[:size], sums_f32[:size], terms[:size], terms_f32[:size])
        _from_f32(sums[:size], kind, out[begin:end])


def add_linear(
    base: Units, codes: Bytes, rows: Units, table: NDArray[np.uint32], kind: int, out: Units
) -> None:
    """See `reference.add_linear`."""
    sums, terms = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    views = sums, sums.view(np.float32), terms, terms.view(np.float32)
    _add_linear(base, codes, rows, table, kind, *views, out)


@kernel
def _add_bits(base: Any, codes: Any, rows: Any, table: Any, width: int, out: Any) -> None:
    shift, top = uint64(width - 1), ONE << uint64(width - 1)
    mask = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width)
    for i in range(len(out)):
        b = uint64(base[i])
        row = rows[0] if len(rows) == 1 else rows[i]
        ordered = ((b ^ (_sign_fill(b, shift) | top)) + uint64(table[row, codes[i]])) & mask
        out[i] = ordered ^ (((ordered >> shift) - ONE) | top)


def add_bits(base: Units, codes: Bytes, rows: Units, table: Units, out: Units) -> None:
    """See `reference.add_bits`."""
    _add_bits(base, codes, rows, table, 8 * out.itemsize, out)


@kernel
def _any_equal_masked(units: Any, mask: int) -> bool:
    found = uint32(0)
    for i in range(len(units)):
        found |= uint32((uint64(units[i]) & uint64(mask)) == uint64(mask))
    return found != uint32(0)


def all_finite(units: Units, kind: int) -> bool:
    """See `reference.all_finite`."""
    return not _any_equal_masked(units, (0x7F800000, 0x7F80, 0x7C00)[kind])


# --- packing ------------------------------------------------------------------------------------


@kernel
def _pack_tail(codes: Any, n_bits: int, begin: int, out: Any) -> None:
    """Codes from `begin`, a multiple of eight, to the end."""
    held, n_held, position = uint32(0), 0, begin * n_bits >> 3
    for i in range(begin, len(codes)):
        held |= uint32(codes[i]) << uint32(n_held)
        n_held += n_bits
        while n_held >= 8:
            out[position] = uint8(held)
            position += 1
            held >>= uint32(8)
            n_held -= 8
    if n_held:
        out[position] = uint8(held)


@kernel
def pack_codes(codes: Bytes, n_bits: int) -> Bytes:
    """See `reference.pack_codes`."""
    out = np.empty((len(codes) * n_bits + 7) >> 3, np.uint8)
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
    _pack_tail(codes, n_bits, 8 * whole, out)
    return out


@kernel
def _unpack_tail(packed: Any, n_bits: int, begin: int, out: Any) -> None:
    """Inverse of `_pack_tail`."""
    held, n_held, position = uint32(0), 0, begin * n_bits >> 3
    mask = uint32((1 << n_bits) - 1)
    for i in range(begin, len(out)):
        while n_held < n_bits:
            held |= uint32(packed[position]) << uint32(n_held)
            position += 1
            n_held += 8
        out[i] = uint8(held & mask)
        held >>= uint32(n_bits)
        n_held -= n_bits


@kernel
def unpack_codes(packed: Bytes, n_bits: int, out: Bytes) -> None:
    """See `reference.unpack_codes`."""
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
    _unpack_tail(packed, n_bits, 8 * whole, out)


# --- rANS ---------------------------------------------------------------------------------------

# Position of the lowest set bit of a 32-bit word, by a de Bruijn product.
_BIT_MULTIPLIER = np.uint32(0x077CB531)
_BIT_POSITION = np.zeros(32, np.uint8)
for _bit in range(32):
    _BIT_POSITION[((0x077CB531 << _bit) & 0xFFFFFFFF) >> 27] = _bit


@inlined
def _lowest_bit(mask: Any) -> Any:
    lowest = uint32(mask & (uint32(0) - mask))
    return np.intp(_BIT_POSITION[uint32(lowest * _BIT_MULTIPLIER) >> uint32(27)])


@kernel
def _encoding_tables(frequencies: NDArray[np.uint16]) -> NDArray[np.uint64]:
    """[n_tables, 256] of reciprocal (32 bits) | start (12) | shift (4) | frequency - 1 (12).

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
) -> int:
    for i in range(end - 1, begin - 1, -1):
        lane = np.intp(i % n_lanes)
        entry = entries[symbols[i]]
        state = lanes[lane]
        if (state >> uint64(20)) > (entry >> uint64(48)):
            p -= 1
            words[p] = uint16(state)
            state >>= uint64(16)
        lanes[lane] = _encode_one(state, entry)
    return p


@kernel
def _encode_segments(
    symbols: Any, ends: Any, table_of: Any, tables: Any, lanes: Any, n_lanes: int, words: Any
) -> int:
    # One array holds the lane states and the step's table entries: at constant distances in one
    # buffer LLVM knows that they do not overlap, and vectorises.
    both = np.empty(2 * N_LANES, np.uint64)
    both[:N_LANES] = uint64(STATE_LOW)
    p: Any = len(words)
    for s in range(len(ends) - 1, -1, -1):
        begin = ends[s - 1] if s else 0
        entries = tables[table_of[s]]
        i = ends[s]
        if n_lanes == N_LANES:
            whole_end = i // N_LANES * N_LANES
            whole_begin = (begin + N_LANES - 1) // N_LANES * N_LANES
            if whole_end > whole_begin:
                p = _encode_scalar(symbols, whole_end, i, entries, both, n_lanes, words, p)
                i = whole_begin
                q = np.uintp(p)
                for step in range(whole_end - N_LANES, whole_begin - 1, -N_LANES):
                    here = symbols[np.uintp(step) : np.uintp(step + N_LANES)]
                    for lane in range(N_LANES):
                        both[N_LANES + lane] = entries[here[lane]]
                    mask = uint32(0)
                    for lane in range(N_LANES):
                        full = (both[lane] >> uint64(20)) > (both[N_LANES + lane] >> uint64(48))
                        mask |= uint32(full) << uint32(N_LANES - 1 - lane)
                    while mask != uint32(0):
                        lane = N_LANES - 1 - _lowest_bit(mask)
                        q -= np.uintp(1)
                        words[q] = uint16(both[lane])
                        both[lane] >>= uint64(16)
                        mask &= mask - uint32(1)
                    for lane in range(N_LANES):
                        both[lane] = _encode_one(both[lane] & LOW_32, both[N_LANES + lane])
                p = np.int64(q)
        p = _encode_scalar(symbols, begin, i, entries, both, n_lanes, words, p)
    for lane in range(n_lanes):
        lanes[lane] = uint32(both[lane])
    return p


def rans_encode(
    symbols: Bytes, ends: Counts, table_of: Counts, frequencies: NDArray[np.uint16], n_lanes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """See `reference.rans_encode`."""
    words = np.empty(len(symbols) + 1, np.uint16)
    states = np.empty(n_lanes, np.uint32)
    position = _encode_segments(
        symbols, ends, table_of, _encoding_tables(frequencies), states, n_lanes, words
    )
    return states, words[position:]


@kernel
def slot_tables(frequencies: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """See `reference.slot_tables`."""
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
) -> int:
    for i in range(begin, end):
        lane = np.intp(i % n_lanes)
        state = lanes[lane]
        entry = slots[state & uint32(SCALE - 1)]
        out[i] = uint8(entry)
        state = _decode_one(state, entry)
        if state < uint32(STATE_LOW):
            if p >= len(words):
                return -1
            state = (state << uint32(16)) | uint32(words[p])
            p += 1
        lanes[lane] = state
    return p


@kernel
def rans_decode(
    words: NDArray[np.uint16],
    states: NDArray[np.uint32],
    ends: Counts,
    table_of: Counts,
    tables: NDArray[np.uint32],
    out: Bytes,
) -> bool:
    """See `reference.rans_decode`."""
    n_lanes, n_words = len(states), len(words)
    both = np.empty(2 * N_LANES, np.uint32)
    both[:n_lanes] = states
    begin = 0
    p: Any = 0
    for s in range(len(ends)):
        end = ends[s]
        slots = tables[table_of[s]]
        i = begin
        if n_lanes == N_LANES:
            aligned = min((begin + N_LANES - 1) // N_LANES * N_LANES, end)
            p = _decode_scalar(words, p, both, n_lanes, begin, aligned, slots, out)
            if p < 0:
                return False
            i = aligned
            q = np.uintp(p)
            while i + N_LANES <= end and np.intp(q) + N_LANES <= n_words:
                for lane in range(N_LANES):
                    both[N_LANES + lane] = slots[both[lane] & uint32(SCALE - 1)]
                mask = uint32(0)
                for lane in range(N_LANES):
                    state = _decode_one(both[lane], both[N_LANES + lane])
                    both[lane] = state
                    mask |= uint32(state < uint32(STATE_LOW)) << uint32(lane)
                here = out[np.uintp(i) : np.uintp(i + N_LANES)]
                for lane in range(N_LANES):
                    here[lane] = uint8(both[N_LANES + lane])
                while mask != uint32(0):
                    lane = _lowest_bit(mask)
                    both[lane] = (both[lane] << uint32(16)) | uint32(words[q])
                    q += np.uintp(1)
                    mask &= mask - uint32(1)
                i += N_LANES
            p = np.int64(q)
        p = _decode_scalar(words, p, both, n_lanes, i, end, slots, out)
        if p < 0:
            return False
        begin = end
    for lane in range(n_lanes):
        if both[lane] != uint32(STATE_LOW):
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
    """See `reference.sparse_split`."""
    n_gaps, n_values = _sparse_sizes(symbols, common)
    gaps, values = np.empty(n_gaps, np.uint8), np.empty(n_values, np.uint8)
    _sparse_fill(symbols, common, gaps, values)
    return gaps, values


@kernel
def sparse_merge(gaps: Bytes, values: Bytes, out: Bytes) -> bool:
    """See `reference.sparse_merge`."""
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
    """See `reference.golomb_pack`."""
    out = np.zeros(len(values) * 5 + 1, np.uint8)
    position = 0
    for i in range(len(values)):
        u = np.int64(values[i]) + (1 << order)
        n_low = 0
        while u >> (n_low + 1):
            n_low += 1
        position += n_low - order
        out[position >> 3] |= uint8(1 << (position & 7))
        position += 1
        for j in range(n_low):
            out[position >> 3] |= uint8(((u >> j) & 1) << (position & 7))
            position += 1
    return out[: (position + 7) >> 3]


@kernel
def golomb_unpack(source: Bytes, n_values: int, order: int, out: NDArray[np.uint16]) -> int:
    """See `reference.golomb_unpack`."""
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
def table_unpack(source: Bytes, out: NDArray[np.uint16]) -> int:
    """See `reference.table_unpack`."""
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
