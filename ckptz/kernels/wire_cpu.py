"""Kernels of pipeline links for the CPU, compiled by numba; `wire_arrays` documents them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from ckptz.kernels import values_cpu, wire_arrays
from ckptz.kernels.numba_base import inlined, kernel, part
from ckptz.kernels.values_cpu import pack_codes, unpack_codes
from ckptz.kernels.wire_arrays import (
    BF16_MAX,
    DOWN,
    INFINITY,
    LARGEST_F32,
    MIX_32_A,
    MIX_32_B,
    MIX_64_A,
    MIX_64_B,
    NAN_SCALE,
    SMALLEST,
    STEP_32,
    STEP_64,
    TINY,
    Bytes,
    Patterns,
    as_patterns,
    signs_of,
)

ONE_LESS_31 = np.int32(0x7FFFFFFF)
N_COARSE, N_MIDDLE = 1 << 11, 1 << 10  # buckets of 31 magnitude bits in three passes of 11, 10 and 10 bits


def __getattr__(name: str) -> Any:
    """Return a kernel that files use as well, or one that is fast enough in numpy."""
    return getattr(values_cpu if name in ("from_f32", "to_f32") else wire_arrays, name)


# --- bytes --------------------------------------------------------------------------------------


def unpack(packed: Bytes, n_bits: int, n: int) -> Bytes:
    out = np.empty(n, np.uint8)
    if n_bits == 8:
        out[:] = packed[:n]
    else:
        unpack_codes(packed, n_bits, out)
    return out


def pack(codes: Bytes, n_bits: int) -> Bytes:
    return codes if n_bits == 8 else pack_codes(codes, n_bits)


@kernel
def _checksum(words: Any) -> Any:
    total_ = uint64(0)
    for i in range(len(words)):
        x = words[i] + uint64(i + 1) * uint64(STEP_64)
        x = (x ^ (x >> uint64(33))) * uint64(MIX_64_A)
        x = (x ^ (x >> uint64(33))) * uint64(MIX_64_B)
        total_ += x ^ (x >> uint64(33))
    return total_


def checksum(data: Bytes) -> int:
    return int(_checksum(as_patterns(data, 8)))


# --- uniform levels -----------------------------------------------------------------------------


@inlined
def _sortable(signed: Any) -> Any:
    return signed ^ ((signed >> int32(31)) & ONE_LESS_31)


@part
def _range(keys: Any) -> Any:
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(len(keys)):
        key = _sortable(keys[i])
        low = min(low, key)
        high = max(high, key)
    return low, high


@inlined
def _bf16_below(pattern: Any) -> Any:
    down = pattern >> uint32(16)
    negative = pattern >> uint32(31)
    if negative and (pattern & uint32(0xFFFF)):
        down += uint32(1)
    if (down & uint32(0x7FFF)) > uint32(BF16_MAX):
        down = (down & uint32(0x8000)) | uint32(BF16_MAX)
    if (down & uint32(0x7FFF)) < uint32(SMALLEST):
        is_less = negative and (pattern & uint32(0x7FFFFFFF))
        down = uint32(0x8000 | SMALLEST) if is_less else uint32(0)
    return uint16(down)


@part
def _scale_of(low: Any, high: Any, n_levels: int, one: Any, one_f32: Any) -> Any:
    """Return offset and scale of a block; `one` and `one_f32` are views of the same word."""
    if high >= int32(INFINITY) or low < int32(-INFINITY):
        return uint16(0), uint16(NAN_SCALE)
    one[0] = uint32(_sortable(high))
    last = np.float64(one_f32[0])
    offset = _bf16_below(uint32(_sortable(low)))
    one[0] = uint32(offset) << uint32(16)
    exact = (last - np.float64(one_f32[0])) * (1.0 / (n_levels - 1))
    if exact == 0.0:
        return offset, uint16(0)
    one_f32[0] = np.float32(exact)
    if np.float64(one_f32[0]) < exact:
        one[0] += uint32(1)
    up = (one[0] >> uint32(16)) + uint32((one[0] & uint32(0xFFFF)) != uint32(0))
    return offset, uint16(min(max(up, uint32(SMALLEST)), uint32(BF16_MAX)))


@inlined
def _random(i: Any, low: Any, high: Any) -> Any:
    x = uint32(uint32(i) * uint32(STEP_32) + low)
    x = uint32(uint32(x ^ (x >> uint32(16))) * uint32(MIX_32_A)) ^ high
    x = uint32(uint32(x ^ (x >> uint32(13))) * uint32(MIX_32_B))
    return np.float32(np.int32((x ^ (x >> uint32(16))) >> uint32(8))) * np.float32(2.0**-24)


@part
def _codes_nearest(values: Any, low_end: Any, inverse: Any, most: Any, out: Any) -> None:
    for i in range(len(values)):
        t = (values[i] * np.float32(DOWN) - low_end) * inverse + np.float32(0.5)
        out[i] = uint8(np.int32(min(t, most)))


@part
def _codes_random(
    values: Any, low_end: Any, inverse: Any, most: Any, begin: int, low: Any, high: Any, out: Any
) -> None:
    for i in range(len(values)):
        t = (values[i] * np.float32(DOWN) - low_end) * inverse + _random(begin + i, low, high)
        out[i] = uint8(np.int32(min(t, most)))


@kernel
def _quantize(
    keys: Any,
    values: Any,
    block: int,
    n_bits: int,
    stochastic: bool,
    seed: Any,
    offsets: Any,
    scales: Any,
    codes: Any,
) -> None:
    one = np.zeros(1, np.uint32)
    one_f32 = one.view(np.float32)
    most = np.float32((1 << n_bits) - 1)
    low_seed, high_seed = uint32(seed), uint32(seed >> uint64(32))
    for b in range(len(offsets)):
        begin, end = b * block, min((b + 1) * block, len(keys))
        low, high = _range(keys[begin:end])
        offsets[b], scales[b] = _scale_of(low, high, 1 << n_bits, one, one_f32)
        here = codes[begin:end]
        if scales[b] == uint16(0) or scales[b] == uint16(NAN_SCALE):
            here[:] = uint8(0)
            continue
        one[0] = uint32(offsets[b]) << uint32(16)
        low_end = one_f32[0] * np.float32(DOWN)
        one[0] = uint32(scales[b]) << uint32(16)
        inverse = np.float32(1 / DOWN) / one_f32[0]
        if stochastic:
            _codes_random(values[begin:end], low_end, inverse, most, begin, low_seed, high_seed, here)
        else:
            _codes_nearest(values[begin:end], low_end, inverse, most, here)


def quantize(
    patterns: Patterns, block: int, n_bits: int, seed: int | None
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], Bytes]:
    n_blocks = -(-len(patterns) // block)
    offsets, scales = np.empty(n_blocks, np.uint16), np.empty(n_blocks, np.uint16)
    codes = np.empty(len(patterns), np.uint8)
    keys, values = patterns.view(np.int32), patterns.view(np.float32)
    stochastic, number = seed is not None, np.uint64(seed or 0)
    _quantize(keys, values, block, n_bits, stochastic, number, offsets, scales, codes)
    return offsets, scales, codes


@kernel
def dequantize(
    offsets: NDArray[np.uint16], scales: NDArray[np.uint16], codes: Bytes, block: int, largest: float
) -> Patterns:
    out, one = np.empty(len(codes), np.float32), np.zeros(1, np.uint32)
    bits, one_f32 = out.view(np.uint32), one.view(np.float32)
    for b in range(len(offsets)):
        begin, end = b * block, min((b + 1) * block, len(codes))
        if (scales[b] & uint16(0x7F80)) == uint16(0x7F80):
            bits[begin:end] = uint32(0x7FC00000)
            continue
        one[0] = uint32(offsets[b]) << uint32(16)
        offset = np.float64(one_f32[0])
        one[0] = uint32(scales[b]) << uint32(16)
        scale = np.float64(one_f32[0])
        values, here = out[begin:end], codes[begin:end]
        for i in range(len(values)):
            value = scale * here[i] + offset
            values[i] = np.float32(min(max(value, -largest), largest))
    return bits


# --- the largest of each sample -----------------------------------------------------------------


@part
def _find(counts: Any, k: Any) -> Any:
    """Find the bucket of the k-th greatest element, and how many of its elements are among the k."""
    bucket = len(counts) - 1
    while k > counts[bucket]:
        k -= counts[bucket]
        bucket -= 1
    return bucket, k


@part
def _threshold(patterns: Any, k: int, coarse: Any, near: Any) -> Any:
    """Find the k-th greatest magnitude, and how many elements equal to it are among the k greatest."""
    coarse[:] = uint32(0)
    whole = len(patterns) // 2 * 2
    for i in range(0, whole, 2):
        coarse[0, (patterns[i] & uint32(0x7FFFFFFF)) >> uint32(20)] += uint32(1)
        coarse[1, (patterns[i + 1] & uint32(0x7FFFFFFF)) >> uint32(20)] += uint32(1)
    if whole < len(patterns):
        coarse[0, (patterns[whole] & uint32(0x7FFFFFFF)) >> uint32(20)] += uint32(1)
    for j in range(N_COARSE):
        coarse[0, j] += coarse[1, j]
    bucket, rest = _find(coarse[0], np.int64(k))
    n_near: Any = 0
    for i in range(len(patterns)):
        magnitude = patterns[i] & uint32(0x7FFFFFFF)
        near[n_near] = magnitude
        n_near += np.int64((magnitude >> uint32(20)) == uint32(bucket))
    prefix = uint32(bucket)
    for shift in (10, 0):
        counts = np.zeros(N_MIDDLE, np.int64)
        for i in range(n_near):
            if (near[i] >> uint32(shift + 10)) == prefix:
                counts[(near[i] >> uint32(shift)) & uint32(0x3FF)] += 1
        bucket, rest = _find(counts, rest)
        prefix = (prefix << uint32(10)) | uint32(bucket)
    return prefix, rest


@kernel
def top_mask(patterns: Patterns, n_samples: int, k: int) -> Bytes:
    mask = np.empty(len(patterns), np.uint8)
    size = len(patterns) // n_samples
    coarse = np.empty((2, N_COARSE), np.uint32)
    near = np.empty(size + 1, np.uint32)
    for s in range(n_samples):
        here, marks = patterns[s * size : (s + 1) * size], mask[s * size : (s + 1) * size]
        limit, rest = _threshold(here, k, coarse, near)
        n_equal = uint32(0)
        for i in range(size):
            magnitude = here[i] & uint32(0x7FFFFFFF)
            marks[i] = uint8(magnitude >= limit)
            n_equal += uint32(magnitude == limit)
        if n_equal == uint32(rest):
            continue
        for i in range(size):
            if (here[i] & uint32(0x7FFFFFFF)) == limit:
                marks[i] = uint8(rest > 0)
                rest -= 1
    return mask


@kernel
def take(patterns: Patterns, mask: Bytes, k: int) -> Patterns:
    out = np.empty(k + 1, np.uint32)  # the branchless loop writes one element too many
    n: Any = 0
    for i in range(len(mask)):
        out[n] = patterns[i]
        n += np.int64(mask[i])
    return out[:k]


@kernel
def put(values: Patterns, mask: Bytes) -> Patterns:
    out, n = np.empty(len(mask), np.uint32), 0
    for i in range(len(mask)):
        if mask[i]:
            out[i] = values[n]
            n += 1
        else:
            out[i] = uint32(0)
    return out


# --- tiles --------------------------------------------------------------------------------------


@kernel
def _rotate(values: Any, bits: Any, signs: Any, inverse: bool, out: Any, out_bits: Any) -> None:
    tile, quarter = len(signs), len(signs) >> 2
    root, largest = 1.0 / np.sqrt(np.float64(tile)), np.float64(LARGEST_F32[0])
    a, b = np.empty(tile, np.float64), np.empty(tile, np.float64)
    for begin in range(0, len(values), tile):
        most = uint32(0)
        for i in range(tile):
            most = max(most, bits[begin + i] & uint32(0x7FFFFFFF))
            a[i] = np.float64(values[begin + i]) * (1.0 if inverse else signs[i])
        if most >= uint32(INFINITY):
            out_bits[begin : begin + tile] = uint32(0x7FC00000)
            continue
        size = 1
        while size < tile:  # two butterfly stages per pass; after all passes the elements are in order
            for i in range(quarter):
                x, y = a[4 * i] + a[4 * i + 1], a[4 * i] - a[4 * i + 1]
                z, w = a[4 * i + 2] + a[4 * i + 3], a[4 * i + 2] - a[4 * i + 3]
                b[i], b[quarter + i], b[2 * quarter + i], b[3 * quarter + i] = x + z, y + w, x - z, y - w
            a, b = b, a
            size <<= 2
        for i in range(tile):
            value = min(max(a[i] * root, -largest), largest) * (signs[i] if inverse else 1.0)
            out[begin + i] = np.float32(value if abs(value) >= TINY else 0.0)


def rotate(patterns: Patterns, tile: int, inverse: bool) -> Patterns:
    out = np.empty(len(patterns), np.float32)
    values = patterns.view(np.float32)
    _rotate(values, patterns, signs_of(tile), inverse, out, out.view(np.uint32))
    return out.view(np.uint32)


@kernel
def tile_peaks(patterns: Patterns, tile: int) -> Any:
    out: Any = np.zeros(len(patterns) // tile, np.int64)
    for i in range(len(out)):
        most = uint32(0)
        for pattern in patterns[i * tile : (i + 1) * tile]:
            most = max(most, pattern & uint32(0x7FFFFFFF))
        if most >= uint32(INFINITY):
            out[i] = NAN_SCALE
        elif most:
            out[i] = min(max((np.int64(most) + 0xFFFF) >> 16, SMALLEST), BF16_MAX)
    return out


@kernel
def _tile_codes(
    values: Any, peaks: Any, widths: Any, tile: int, stochastic: bool, seed: Any, one: Any, out: Any
) -> None:
    one_f32, per_row = one.view(np.float32), len(peaks) // len(widths)
    low, high = uint32(seed), uint32(seed >> uint64(32))
    for i in range(len(peaks)):
        begin = i * tile
        here, source = out[begin : begin + tile], values[begin : begin + tile]
        if peaks[i] == 0 or peaks[i] > BF16_MAX:
            here[:] = uint8(0)
            continue
        one[0] = uint32(peaks[i]) << uint32(16)
        inverse = 1.0 / np.float64(one_f32[0])
        most = np.float64((1 << widths[i // per_row]) - 1)
        half = most * 0.5
        for j in range(tile):
            u = np.float64(_random(begin + j, low, high)) if stochastic else 0.5
            t = np.float64(source[j]) * inverse * half + half + u
            here[j] = uint8(np.int32(min(max(t, 0.0), most)))


def tile_codes(
    patterns: Patterns, peaks: NDArray[np.int64], widths: NDArray[np.int64], tile: int, seed: int | None
) -> Bytes:
    out, one = np.empty(len(patterns), np.uint8), np.zeros(1, np.uint32)
    number, values = np.uint64(seed or 0), patterns.view(np.float32)
    _tile_codes(values, peaks, widths, tile, seed is not None, number, one, out)
    return out


@kernel
def tile_values(peaks: NDArray[np.int64], widths: NDArray[np.int64], codes: Bytes, tile: int) -> Patterns:
    out, one = np.empty(len(codes), np.float32), np.zeros(1, np.uint32)
    bits, one_f32, per_row = out.view(np.uint32), one.view(np.float32), len(peaks) // len(widths)
    for i in range(len(peaks)):
        begin, end = i * tile, (i + 1) * tile
        if peaks[i] > BF16_MAX:
            bits[begin:end] = uint32(0x7FC00000)
            continue
        one[0] = uint32(peaks[i]) << uint32(16)
        most = np.float64((1 << widths[i // per_row]) - 1)
        step = np.float64(one_f32[0]) * (1.0 / most)
        here, source = out[begin:end], codes[begin:end]
        for j in range(tile):
            here[j] = np.float32((2.0 * source[j] - most) * step + 0.0)
    return bits


@kernel
def pack_rows(codes: Bytes, widths: NDArray[np.int64], row: int, n_planes: int) -> Bytes:
    """Pack codes, uint8 [n_rows * row], as bit planes; row i has widths[i] planes.

    A multiplication gathers the lowest bits of the eight bytes of a word in its highest byte.
    """
    words, out = codes.view(np.uint64), np.zeros(n_planes * row >> 3, np.uint8)
    n, begin = row >> 3, 0
    for r in range(len(widths)):
        here = words[r * n : (r + 1) * n]
        for bit in range(widths[r]):
            plane = out[begin : begin + n]
            for i in range(n):
                ones = (here[i] >> uint64(bit)) & uint64(0x0101010101010101)
                plane[i] = uint8((ones * uint64(0x0102040810204080)) >> uint64(56))
            begin += n
    return out


@kernel
def unpack_rows(planes: Bytes, widths: NDArray[np.int64], row: int) -> Bytes:
    codes = np.zeros(len(widths) * row, np.uint8)
    out, n, begin = codes.view(np.uint64), row >> 3, 0
    for r in range(len(widths)):
        here = out[r * n : (r + 1) * n]
        for bit in range(widths[r]):
            plane = planes[begin : begin + n]
            for i in range(n):
                each = (uint64(plane[i]) * uint64(0x0101010101010101)) & uint64(0x8040201008040201)
                ones = ((each + uint64(0x7F7F7F7F7F7F7F7F)) >> uint64(7)) & uint64(0x0101010101010101)
                here[i] |= ones << uint64(bit)
            begin += n
    return codes
