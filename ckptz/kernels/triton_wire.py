"""The kernels of the wire on a GPU; spec/08-wire.md. What has none here is done by torch's operations.

The functions are those of `wire_torch`, with its types: bit patterns are signed integers. None asks the
device for a number. Products and sums are never fused, and subnormal numbers are kept.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckptz.kernels import triton_values as values
from ckptz.kernels import wire_arrays, wire_torch
from ckptz.kernels.floats import F32
from ckptz.kernels.triton_planes import BLOCK
from ckptz.kernels.triton_values import EXACT
from ckptz.kernels.wire_arrays import DOWN

MOST_BLOCK = 4096  # elements that share a range within one program; greater blocks are left to torch
DIGITS = ((20, 11), (10, 10), (0, 10))  # lowest bit and bits of each digit of a magnitude
TILE = 1 << 15  # magnitudes that one program counts

_STEP_64, _STEP_32 = tl.constexpr(wire_arrays.STEP_64), tl.constexpr(wire_arrays.STEP_32)
_MIX_64_A, _MIX_64_B = tl.constexpr(wire_arrays.MIX_64_A), tl.constexpr(wire_arrays.MIX_64_B)
_MIX_32_A, _MIX_32_B = tl.constexpr(wire_arrays.MIX_32_A), tl.constexpr(wire_arrays.MIX_32_B)
_INFINITY, _NAN_SCALE = tl.constexpr(wire_arrays.INFINITY), tl.constexpr(wire_arrays.NAN_SCALE)
_SMALLEST, _BF16_MAX = tl.constexpr(wire_arrays.SMALLEST), tl.constexpr(wire_arrays.BF16_MAX)
_DOWN, _UP, _TINY = tl.constexpr(DOWN), tl.constexpr(1 / DOWN), tl.constexpr(wire_arrays.TINY)
_NAN, _LARGEST = tl.constexpr(0x7FC00000), tl.constexpr(wire_arrays.LARGEST_F32[0])


def __getattr__(name: str) -> Any:
    """Give what torch's operations do as well."""
    return getattr(wire_torch, name)


def _programs(n: int, block: int = BLOCK) -> tuple[int]:
    return (triton.cdiv(n, block),)


def _like(units: Tensor, n: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(n, dtype=dtype, device=units.device)


# --- arrays -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=[f"word_{i}" for i in range(8)])
def _words(
    out,
    word_0: tl.uint64,
    word_1: tl.uint64,
    word_2: tl.uint64,
    word_3: tl.uint64,
    word_4: tl.uint64,
    word_5: tl.uint64,
    word_6: tl.uint64,
    word_7: tl.uint64,
):
    tl.store(out, word_0.to(tl.uint64))
    tl.store(out + 1, word_1.to(tl.uint64))
    tl.store(out + 2, word_2.to(tl.uint64))
    tl.store(out + 3, word_3.to(tl.uint64))
    tl.store(out + 4, word_4.to(tl.uint64))
    tl.store(out + 5, word_5.to(tl.uint64))
    tl.store(out + 6, word_6.to(tl.uint64))
    tl.store(out + 7, word_7.to(tl.uint64))


def words(header: bytes, like: Tensor) -> Tensor:
    """Give the words of a header; they travel as arguments, for a copy from the host may wait."""
    out = _like(like, 8, torch.int64)
    _words[(1,)](out.view(torch.uint64), *struct.unpack("<8Q", header))
    return out


@triton.jit
def _widen(units, out, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, values.to_f32(tl.load(units + i, mask=i < n, other=0), KIND), mask=i < n)


def to_f32(units: Tensor, kind: int) -> Tensor:
    if kind == F32:
        return units
    n, out = len(units), _like(units, len(units))
    _widen[_programs(n)](units.view(torch.uint16), out.view(torch.uint32), n, kind, BLOCK, **EXACT)
    return out


@triton.jit
def _narrow(patterns, out, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, values.from_f32(tl.load(patterns + i, mask=i < n, other=0), KIND), mask=i < n)


def from_f32(patterns: Tensor, kind: int) -> Tensor:
    if kind == F32:
        return patterns
    n, out = len(patterns), _like(patterns, len(patterns), torch.int16)
    _narrow[_programs(n)](patterns.view(torch.uint32), out.view(torch.uint16), n, kind, BLOCK, **EXACT)
    return out


def unpack(packed: Tensor, n_bits: int, n: int) -> Tensor:
    if n_bits == 8:
        return packed[:n].clone()
    out = _like(packed, n, torch.uint8)
    values.unpack_codes(packed, n_bits, out)
    return out


def pack(codes: Tensor, n_bits: int) -> Tensor:
    return codes if n_bits == 8 else values.pack_codes(codes, n_bits)


@triton.jit
def _checksum(words, total, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(words + i, mask=i < n, other=0) + (i + 1).to(tl.uint64) * _STEP_64
    x = (x ^ (x >> 33)) * _MIX_64_A
    x = (x ^ (x >> 33)) * _MIX_64_B
    x = tl.where(i < n, x ^ (x >> 33), 0)
    tl.atomic_add(total, tl.sum(x, axis=0), sem="relaxed")


def checksum(data: Tensor) -> Tensor:
    units = wire_torch.as_units(data, 8)
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    _checksum[_programs(len(units))](units.view(torch.uint64), total.view(torch.uint64), len(units), BLOCK)
    return total[0]


# --- uniform levels -----------------------------------------------------------------------------


@triton.jit
def _sortable(signed):
    return signed ^ ((signed >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(bf16):
    """Widen patterns of bf16."""
    return (bf16.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_below(pattern):
    """See `bf16_below` of the reference; uint32 in and out."""
    is_negative = pattern >> 31
    down = (pattern >> 16) + (is_negative & ((pattern & 0xFFFF) != 0).to(tl.uint32))
    down = tl.where((down & 0x7FFF) > _BF16_MAX, (down & 0x8000) | _BF16_MAX, down)
    is_less = (is_negative == 1) & ((pattern & 0x7FFFFFFF) != 0)
    return tl.where((down & 0x7FFF) < _SMALLEST, tl.where(is_less, _SMALLEST | 0x8000, 0), down)


@triton.jit
def _scale_of(low, high, LAST: tl.constexpr):
    """Give (offset, scale) as bf16 patterns, uint32, from the least and greatest `_sortable` integers."""
    is_bad = (high >= _INFINITY) | (low < -_INFINITY)
    low, high = tl.where(is_bad, 0, low), tl.where(is_bad, 0, high)
    last = _sortable(high).to(tl.float32, bitcast=True).to(tl.float64)
    offset = _bf16_below(_sortable(low).to(tl.uint32, bitcast=True))
    exact = (last - _float_of(offset).to(tl.float64)) * (1.0 / LAST)
    narrow = exact.to(tl.float32)
    pattern = narrow.to(tl.uint32, bitcast=True) + (narrow.to(tl.float64) < exact).to(tl.uint32)
    up = (pattern >> 16) + ((pattern & 0xFFFF) != 0).to(tl.uint32)
    up = tl.minimum(tl.maximum(up, _SMALLEST), _BF16_MAX)
    return offset, tl.where(is_bad, _NAN_SCALE, tl.where(exact == 0.0, 0, up))


@triton.jit
def _hash(i, low, high):
    """Hash indices as spec/08-wire.md#rounding says: uint32."""
    x = i.to(tl.uint32) * _STEP_32 + low
    x = ((x ^ (x >> 16)) * _MIX_32_A) ^ high
    x = (x ^ (x >> 13)) * _MIX_32_B
    return x ^ (x >> 16)


@triton.jit
def _drawn(i, seed):
    """Draw numbers j / 2^24 in [0, 1), by index."""
    whole = seed.to(tl.uint64)
    h = _hash(i, whole.to(tl.uint32), (whole >> 32).to(tl.uint32))
    return (h >> 8).to(tl.float32) * 2.0**-24


@triton.jit(do_not_specialize=["seed"])
def _quantize(
    patterns,
    offsets,
    scales,
    codes,
    n,
    block,
    seed: tl.uint64,
    LAST: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    j = tl.arange(0, BLOCK)
    i = tl.program_id(0).to(tl.int64) * block + j
    inside = (j < block) & (i < n)
    pattern = tl.load(patterns + i, mask=inside, other=0)
    key = _sortable(pattern)
    low = tl.min(tl.where(inside, key, 0x7FFFFFFF), axis=0)
    high = tl.max(tl.where(inside, key, -0x80000000), axis=0)
    offset, scale = _scale_of(low, high, LAST)
    tl.store(offsets + tl.program_id(0), offset.to(tl.uint16))
    tl.store(scales + tl.program_id(0), scale.to(tl.uint16))
    is_usable = (scale != 0) & (scale != _NAN_SCALE)
    inverse = tl.div_rn(_UP, _float_of(tl.where(is_usable, scale, 0x3F80)))
    value = tl.where(is_usable, pattern, 0).to(tl.float32, bitcast=True)
    t = (value * _DOWN - _float_of(offset) * _DOWN) * inverse
    t += _drawn(i, seed) if IS_RANDOM else 0.5
    code = tl.where(is_usable, tl.minimum(tl.floor(t), LAST), 0.0)
    tl.store(codes + i, code.to(tl.int32).to(tl.uint8), mask=inside)


def quantize(patterns: Tensor, block: int, n_bits: int, seed: int | None) -> tuple[Tensor, Tensor, Tensor]:
    n, block = len(patterns), min(block, len(patterns))
    if block > MOST_BLOCK:
        return wire_torch.quantize(patterns, block, n_bits, seed)
    grid, codes = _programs(n, block), _like(patterns, n, torch.uint8)
    offsets, scales = (_like(patterns, grid[0], torch.int16) for _ in range(2))
    given = patterns, offsets.view(torch.uint16), scales.view(torch.uint16), codes
    shape = (1 << n_bits) - 1, seed is not None, triton.next_power_of_2(block)
    _quantize[grid](*given, n, block, seed or 0, *shape, num_warps=1 if block < 1024 else 4, **EXACT)
    return offsets, scales, codes


@triton.jit
def _dequantize(offsets, scales, codes, out, n, block, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scales + i // block, mask=i < n, other=0)
    offset = _float_of(tl.load(offsets + i // block, mask=i < n, other=0)).to(tl.float64)
    code = tl.load(codes + i, mask=i < n, other=0).to(tl.float64)
    value = _float_of(scale).to(tl.float64) * code + offset
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    pattern = value.to(tl.float32).to(tl.int32, bitcast=True)
    tl.store(out + i, tl.where((scale & 0x7F80) == 0x7F80, _NAN, pattern), mask=i < n)


def dequantize(offsets: Tensor, scales: Tensor, codes: Tensor, block: int, largest: float) -> Tensor:
    n, out = len(codes), _like(codes, len(codes))
    ranges = offsets.view(torch.uint16), scales.view(torch.uint16)
    _dequantize[_programs(n)](*ranges, codes, out, n, block, largest, BLOCK, **EXACT)
    return out


# --- the largest of each sample -----------------------------------------------------------------


@triton.jit
def _digits(
    patterns,
    prefixes,
    counts,
    size,
    n_parts,
    SHIFT: tl.constexpr,
    N_DIGITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count a digit of the magnitudes of a part of a sample whose higher bits are those of its prefix."""
    part = tl.program_id(0).to(tl.int64)
    sample, begin = part // n_parts, part % n_parts * TILE
    end, prefix = tl.minimum(size, begin + TILE), tl.load(prefixes + sample).to(tl.int32)
    found = tl.zeros([N_DIGITS], tl.int32)
    for at in tl.range(begin, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        digits = (tl.load(patterns + sample * size + i, mask=i < end, other=0) & 0x7FFFFFFF) >> SHIFT
        is_counted = (i < end) & (digits // N_DIGITS == prefix)
        found += tl.histogram(digits % N_DIGITS, N_DIGITS, mask=is_counted)
    digit = tl.arange(0, N_DIGITS)
    tl.atomic_add(counts + sample * N_DIGITS + digit, found, mask=found > 0, sem="relaxed")


@triton.jit
def _mark(patterns, limits, marks, n_equal, size, n_parts, BLOCK: tl.constexpr):
    """Mark magnitudes above the limit of their sample by 1, equal ones by 2, and count the equal ones."""
    part = tl.program_id(0).to(tl.int64)
    sample, j = part // n_parts, part % n_parts * BLOCK + tl.arange(0, BLOCK)
    i = sample * size + j
    magnitude = tl.load(patterns + i, mask=j < size, other=0) & 0x7FFFFFFF
    limit = tl.load(limits + sample).to(tl.int32)
    is_equal = (magnitude == limit) & (j < size)
    mark = tl.where(is_equal, 2, (magnitude > limit).to(tl.int32))
    tl.store(marks + i, mark.to(tl.uint8), mask=j < size)
    tl.store(n_equal + part, tl.sum(is_equal.to(tl.int64), axis=0))


@triton.jit
def _settle(marks, before, rests, size, n_parts, BLOCK: tl.constexpr):
    """Make 1 of the first equal ones of a sample, and 0 of the others."""
    part = tl.program_id(0).to(tl.int64)
    sample, j = part // n_parts, part % n_parts * BLOCK + tl.arange(0, BLOCK)
    mark = tl.load(marks + sample * size + j, mask=j < size, other=0)
    rank = tl.load(before + part) + tl.cumsum((mark == 2).to(tl.int32), axis=0)
    is_first = (rank <= tl.load(rests + sample)).to(tl.uint8)
    tl.store(marks + sample * size + j, tl.where(mark == 2, is_first, mark), mask=j < size)


def _find(counts: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Find the bucket of the k-th greatest in counts [rows, buckets], and how many of it belong to the k."""
    above = counts.flip(1).cumsum(1)
    index = torch.searchsorted(above, k[:, None].contiguous()).clamp(max=counts.shape[1] - 1)
    bucket = counts.shape[1] - 1 - index
    rest = k - (above.gather(1, index) - counts.gather(1, bucket))[:, 0]
    return bucket[:, 0], rest


def top_mask(patterns: Tensor, n_samples: int, k: int) -> Tensor:
    n, device = len(patterns), patterns.device
    size = n // n_samples
    rests = torch.full((n_samples,), k, dtype=torch.int64, device=device)
    limits = torch.zeros_like(rests)
    for shift, width in DIGITS:
        counts = torch.zeros((n_samples, 1 << width), dtype=torch.int32, device=device)
        n_parts = triton.cdiv(size, TILE)
        shape = shift, 1 << width, TILE, BLOCK
        _digits[(n_samples * n_parts,)](patterns, limits, counts, size, n_parts, *shape)
        digit, rests = _find(counts, rests)
        limits = limits << width | digit
    marks, n_parts = _like(patterns, n, torch.uint8), triton.cdiv(size, BLOCK)
    n_equal = torch.empty((n_samples, n_parts), dtype=torch.int64, device=device)
    _mark[(n_equal.numel(),)](patterns, limits, marks, n_equal, size, n_parts, BLOCK)
    _settle[(n_equal.numel(),)](marks, n_equal.cumsum(1) - n_equal, rests, size, n_parts, BLOCK)
    return marks


@triton.jit
def _move(source, mask, before, out, n, k, IS_TAKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Move values to their ranks under the mask, or from them."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_one = tl.load(mask + i, mask=i < n, other=0) != 0
    rank = tl.load(before + tl.program_id(0)) + tl.cumsum(is_one.to(tl.int32), axis=0) - 1
    is_moved = is_one & (rank < k)
    if IS_TAKEN:
        tl.store(out + rank, tl.load(source + i, mask=is_moved, other=0), mask=is_moved)
    else:
        tl.store(out + i, tl.load(source + rank, mask=is_moved, other=0), mask=i < n)


def _moved(source: Tensor, mask: Tensor, out: Tensor, k: int, *, is_taken: bool) -> Tensor:
    ones = torch.nn.functional.pad(mask != 0, (0, -len(mask) % BLOCK)).view(-1, BLOCK).sum(1)
    before = ones.cumsum(0) - ones
    _move[_programs(len(mask))](source, mask, before, out, len(mask), k, is_taken, BLOCK)
    return out


def take(patterns: Tensor, mask: Tensor, k: int) -> Tensor:
    return _moved(patterns, mask, wire_torch.zeros(k, 4, patterns), k, is_taken=True)


def put(given: Tensor, mask: Tensor) -> Tensor:
    return _moved(given, mask, _like(given, len(mask)), len(given), is_taken=False)


# --- tiles --------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    patterns, out, n, IS_INVERSE: tl.constexpr, LOG: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = tl.broadcast_to(tl.arange(0, TILE)[None, :], [ROWS, TILE])
    i = row[:, None] * TILE + index
    pattern = tl.load(patterns + i, mask=i < n, other=0)
    is_bad = tl.max(pattern & 0x7FFFFFFF, axis=1) >= _INFINITY
    zero = index.to(tl.uint32) * 0
    sign = tl.where(_hash(index, zero, zero) >> 31 == 0, 1.0, -1.0).to(tl.float64)
    x = pattern.to(tl.float32, bitcast=True).to(tl.float64)
    if not IS_INVERSE:
        x = x * sign
    for bit in tl.static_range(LOG):
        other = tl.gather(x, index ^ (1 << bit), axis=1)
        x = tl.where((index >> bit) & 1 == 0, x + other, other - x)
    x = x * (1.0 / (1 << (LOG // 2)))  # the root of the tile
    if IS_INVERSE:
        x = x * sign
    x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
    pattern = tl.where(tl.abs(x) < _TINY, 0.0, x).to(tl.float32).to(tl.int32, bitcast=True)
    tl.store(out + i, tl.where(is_bad[:, None], _NAN, pattern), mask=i < n)


def rotate(patterns: Tensor, tile: int, inverse: bool) -> Tensor:
    n, out = len(patterns), _like(patterns, len(patterns))
    shape = inverse, tile.bit_length() - 1, tile, BLOCK // tile
    _rotate[_programs(n)](patterns, out, n, *shape, **EXACT)
    return out


@triton.jit
def _peaks(patterns, out, n_tiles, TILE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * TILE + tl.arange(0, TILE)[None, :]
    most = tl.max(tl.load(patterns + i, mask=(row < n_tiles)[:, None], other=0) & 0x7FFFFFFF, axis=1)
    up = tl.minimum(tl.maximum((most.to(tl.int64) + 0xFFFF) >> 16, _SMALLEST), _BF16_MAX)
    up = tl.where(most >= _INFINITY, _NAN_SCALE, tl.where(most == 0, 0, up))
    tl.store(out + row, up, mask=row < n_tiles)


def tile_peaks(patterns: Tensor, tile: int) -> Tensor:
    n = len(patterns) // tile
    out = _like(patterns, n, torch.int64)
    _peaks[_programs(len(patterns))](patterns, out, n, tile, BLOCK // tile)
    return out


@triton.jit(do_not_specialize=["seed"])
def _tile_codes(
    patterns,
    peaks,
    widths,
    out,
    n,
    row,
    seed: tl.uint64,
    TILE: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    peak = tl.load(peaks + i // TILE, mask=i < n, other=0)
    most = ((1 << tl.load(widths + i // row, mask=i < n, other=2)) - 1).to(tl.float64)
    is_usable = (peak > 0) & (peak <= _BF16_MAX)
    pattern = tl.where(is_usable, tl.load(patterns + i, mask=i < n, other=0), 0)
    inverse = 1.0 / _float_of(tl.where(is_usable, peak, 0x3F80)).to(tl.float64)
    half = most * 0.5
    t = pattern.to(tl.float32, bitcast=True).to(tl.float64) * inverse * half + half
    t += _drawn(i, seed).to(tl.float64) if IS_RANDOM else 0.5
    code = tl.minimum(tl.maximum(tl.floor(t), 0.0), most)
    tl.store(out + i, tl.where(is_usable, code, 0.0).to(tl.int32).to(tl.uint8), mask=i < n)


def tile_codes(patterns: Tensor, peaks: Tensor, widths: Tensor, tile: int, seed: int | None) -> Tensor:
    n, out = len(patterns), _like(patterns, len(patterns), torch.uint8)
    shape = n, n // len(widths), seed or 0, tile, seed is not None, BLOCK
    _tile_codes[_programs(n)](patterns, peaks, widths, out, *shape, **EXACT)
    return out


@triton.jit
def _tile_values(peaks, widths, codes, out, n, row, TILE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    peak = tl.load(peaks + i // TILE, mask=i < n, other=0)
    most = ((1 << tl.load(widths + i // row, mask=i < n, other=2)) - 1).to(tl.float64)
    code = tl.load(codes + i, mask=i < n, other=0).to(tl.float64)
    value = (2.0 * code - most) * (_float_of(peak).to(tl.float64) * (1.0 / most))
    pattern = tl.where(peak == 0, 0.0, value).to(tl.float32).to(tl.int32, bitcast=True)
    tl.store(out + i, tl.where(peak > _BF16_MAX, _NAN, pattern), mask=i < n)


def tile_values(peaks: Tensor, widths: Tensor, codes: Tensor, tile: int) -> Tensor:
    n, out = len(codes), _like(codes, len(codes))
    _tile_values[_programs(n)](peaks, widths, codes, out, n, n // len(widths), tile, BLOCK, **EXACT)
    return out


@triton.jit
def _widths(logs, out, n, n_planes, SPREAD: tl.constexpr, BLOCK: tl.constexpr):
    """Find the threshold of `wire_arrays.widths_of` in one program."""
    threshold = tl.zeros([1], tl.int64) - (1 << 15 + SPREAD)
    for back in tl.range(17 + SPREAD):
        tried = threshold + (tl.full([1], 1, tl.int64) << (16 + SPREAD - back))
        total = tl.zeros([BLOCK], tl.int64)
        for at in tl.range(0, n, BLOCK):
            i = at + tl.arange(0, BLOCK)
            key = (tl.load(logs + i, mask=i < n, other=0) << SPREAD) + i
            width = tl.minimum(tl.maximum((key + tried) >> 7 + SPREAD, 2), 8)
            total += tl.where(i < n, width, 0)
        threshold = tl.where(tl.sum(total, axis=0) <= n_planes, tried, threshold)
    for at in tl.range(0, n, BLOCK):
        i = at + tl.arange(0, BLOCK)
        key = (tl.load(logs + i, mask=i < n, other=0) << SPREAD) + i
        width = tl.minimum(tl.maximum((key + threshold) >> 7 + SPREAD, 2), 8)
        tl.store(out + i, width, mask=i < n)


def widths_of(logs: Tensor, n_planes: int) -> Tensor:
    n, out = len(logs), torch.empty_like(logs)
    _widths[(1,)](logs, out, n, n_planes, n.bit_length(), BLOCK)
    return out


@triton.jit
def _pack_rows(codes, widths, before, planes, n, n_planes, row_bytes, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, at = i // row_bytes, i % row_bytes
    width = tl.load(widths + row, mask=i < n, other=0)
    plane = tl.load(before + row, mask=i < n, other=0)
    held = tl.zeros([BLOCK], tl.uint64)
    for j in tl.static_range(8):
        held |= tl.load(codes + 8 * i + j, mask=i < n, other=0).to(tl.uint64) << (8 * j)
    for bit in tl.static_range(8):
        ones = ((held >> bit) & 0x0101010101010101) * 0x0102040810204080
        is_there = (bit < width) & (plane + bit < n_planes)
        tl.store(planes + (plane + bit) * row_bytes + at, (ones >> 56).to(tl.uint8), mask=is_there)


def pack_rows(codes: Tensor, widths: Tensor, row: int, n_planes: int) -> Tensor:
    n, planes = len(codes) // 8, wire_torch.zeros(n_planes * row // 8, 1, codes)
    before = widths.cumsum(0) - widths
    _pack_rows[_programs(n)](codes, widths, before, planes, n, n_planes, row // 8, BLOCK)
    return planes


@triton.jit
def _unpack_rows(planes, widths, before, codes, n, n_planes, row_bytes, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, at = i // row_bytes, i % row_bytes
    width = tl.load(widths + row, mask=i < n, other=0)
    plane = tl.load(before + row, mask=i < n, other=0)
    held = tl.zeros([BLOCK], tl.uint64)
    for bit in tl.static_range(8):
        is_there = (bit < width) & (plane + bit < n_planes)
        byte = tl.load(planes + (plane + bit) * row_bytes + at, mask=is_there, other=0).to(tl.uint64)
        each = (byte * 0x0101010101010101) & 0x8040201008040201
        held |= (((each + 0x7F7F7F7F7F7F7F7F) >> 7) & 0x0101010101010101) << bit
    for j in tl.static_range(8):
        tl.store(codes + 8 * i + j, (held >> (8 * j)).to(tl.uint8), mask=i < n)


def unpack_rows(planes: Tensor, widths: Tensor, row: int) -> Tensor:
    n, before = len(widths) * row // 8, widths.cumsum(0) - widths
    codes = _like(planes, 8 * n, torch.uint8)
    n_planes = len(planes) // (row // 8)
    _unpack_rows[_programs(n)](planes, widths, before, codes, n, n_planes, row // 8, BLOCK)
    return codes


# --- arithmetic of the per-link state -----------------------------------------------------------


@triton.jit
def _sum(a, b, out, n, IS_DIFFERENCE: tl.constexpr, BLOCK: tl.constexpr):
    """Add or subtract; a NaN keeps its bits, of which GPUs of themselves make one and the same."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.load(a + i, mask=i < n, other=0), tl.load(b + i, mask=i < n, other=0)
    x, y = first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
    total = x - y if IS_DIFFERENCE else x + y
    pattern = tl.where(total != total, -0x400000, total.to(tl.int32, bitcast=True))  # of inf - inf
    pattern = tl.where(y != y, second | 0x400000, pattern)
    tl.store(out + i, tl.where(x != x, first | 0x400000, pattern), mask=i < n)


def add(a: Tensor, b: Tensor) -> Tensor:
    n, out = len(a), torch.empty_like(a)
    _sum[_programs(n)](a, b, out, n, False, BLOCK, **EXACT)
    return out


def subtract(a: Tensor, b: Tensor) -> Tensor:
    n, out = len(a), torch.empty_like(a)
    _sum[_programs(n)](a, b, out, n, True, BLOCK, **EXACT)
    return out
