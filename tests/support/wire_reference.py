"""The definitions of the wire's kernels in plain numpy; see spec/08-wire.md#uniform and later sections.

As in `reference.py`, every function has the same name and signature as one in `wire_cpu.py` and
`wire_torch.py`, and tests compare the three bit for bit. Values are F32 bit patterns.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels import wire_arrays
from ckptz.kernels.floats import from_f32 as from_f32
from ckptz.kernels.floats import round_f64
from ckptz.kernels.floats import to_f32 as to_f32
from ckptz.kernels.wire_arrays import (
    BF16_MAX,
    DOWN,
    INFINITY,
    LARGEST_F32,
    MASK_32,
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
from tests.support.reference import pack_codes, unpack_codes


def __getattr__(name: str) -> Any:
    """Return an attribute of `wire_arrays`, which all kernels of the wire share."""
    return getattr(wire_arrays, name)


def unpack(packed: Bytes, n_bits: int, n: int) -> Bytes:
    out = np.empty(n, np.uint8)
    unpack_codes(packed, n_bits, out)
    return out


def pack(codes: Bytes, n_bits: int) -> Bytes:
    return pack_codes(codes, n_bits)


# --- checksum -----------------------------------------------------------------------------------


def checksum(data: Bytes) -> int:
    """Sum mix(word + (i + 1) * STEP) over 64-bit words, mod 2^64; `data` has a multiple of 8 bytes."""
    words = as_patterns(data, 8)
    x = words + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(STEP_64)
    for factor in (MIX_64_A, MIX_64_B):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    x ^= x >> np.uint64(33)
    return int(x.sum(dtype=np.uint64))


# --- uniform levels -----------------------------------------------------------------------------


def sortable(patterns: Patterns) -> NDArray[np.int32]:
    """Map F32 patterns [n] to integers of the same order, -0.0 just below 0.0, NaN at the ends."""
    signed = patterns.view(np.int32)
    return signed ^ ((signed >> np.int32(31)) & np.int32(0x7FFFFFFF))


def bf16_below(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Find the greatest bf16 at or below each finite value [n], saturated; tiny ones to 0 or -2^-110."""
    patterns = values.view(np.uint32)
    top, low_bits = patterns >> np.uint32(16), patterns & np.uint32(0xFFFF)
    negative = patterns >> np.uint32(31) != 0
    down = top + (negative & (low_bits != 0))
    down = np.where((down & 0x7FFF) > BF16_MAX, down & 0x8000 | BF16_MAX, down)
    tiny = (down & 0x7FFF) < SMALLEST
    is_less = negative & ((patterns & np.uint32(0x7FFFFFFF)) != 0)
    return np.where(tiny, np.where(is_less, 0x8000 | SMALLEST, 0), down).astype(np.uint16)


def bf16_above(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Find the least bf16 at or above each value [n], none negative: 2^-110 or more, or zero for zero."""
    narrow = values.astype(np.float32)
    patterns = narrow.view(np.uint32) + (narrow.astype(np.float64) < values)
    up = (patterns >> np.uint32(16)) + ((patterns & np.uint32(0xFFFF)) != 0)
    up = np.clip(up, SMALLEST, BF16_MAX)
    return np.where(values == 0, 0, up).astype(np.uint16)


def scales_of(
    low: NDArray[np.int32], high: NDArray[np.int32], n_levels: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Compute (offset, scale) [n_blocks] as bf16, from the least and greatest `sortable` integers."""
    bad = (high >= INFINITY) | (low < -INFINITY)
    low, high = np.where(bad, 0, low).astype(np.int32), np.where(bad, 0, high).astype(np.int32)
    first, last = (sortable(k.view(np.uint32)).view(np.float32) for k in (low, high))
    offset = bf16_below(first)
    start = (offset.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    scale = bf16_above((last.astype(np.float64) - start) * (1.0 / (n_levels - 1)))
    return offset, np.where(bad, NAN_SCALE, scale).astype(np.uint16)


def random_24(seed: int, n: int) -> NDArray[np.float32]:
    """Draw n numbers i / 2^24 in [0, 1), by element index; spec/08-wire.md#rounding."""
    x = np.arange(n, dtype=np.uint32) * np.uint32(STEP_32) + np.uint32(seed & MASK_32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX_32_A) ^ np.uint32(seed >> 32)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(MIX_32_B)
    return ((x ^ (x >> np.uint32(16))) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _widen(bf16: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bf16.astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantize(
    patterns: Patterns, block: int, n_bits: int, seed: int | None
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], Bytes]:
    """Quantize [n] to uniform levels of each block: (offsets, scales, codes); the last may be shorter.

    The seed is that of stochastic rounding; None rounds to the nearest level.
    """
    starts = np.arange(0, len(patterns), block)
    keys = sortable(patterns)
    low, high = np.minimum.reduceat(keys, starts), np.maximum.reduceat(keys, starts)
    offsets, scales = scales_of(low, high, 1 << n_bits)
    usable = (scales != 0) & (scales != NAN_SCALE)
    with np.errstate(all="ignore"):
        inverse = np.where(usable, np.float32(1 / DOWN) / _widen(scales), np.float32(0)).astype(np.float32)
        low_end = _widen(offsets) * np.float32(DOWN)
        sizes = np.diff(starts, append=len(patterns))
        wide = [np.repeat(v, sizes) for v in (inverse, low_end, usable)]
        values = np.where(wide[2], patterns.view(np.float32), np.float32(0))
        t = (values * np.float32(DOWN) - wide[1]) * wide[0]
        t += np.float32(0.5) if seed is None else random_24(seed, len(patterns))
        codes = np.where(wide[2], np.minimum(np.floor(t), np.float32((1 << n_bits) - 1)), 0)
    return offsets, scales, codes.astype(np.uint8)


def dequantize(
    offsets: NDArray[np.uint16], scales: NDArray[np.uint16], codes: Bytes, block: int, largest: float
) -> Patterns:
    """Compute offset + scale * code as F32 [n], within +-largest; NaN where the scale is not finite.

    The rule of `quant_map.LinearTable`: product and sum in double, one rounding to F32.
    """
    of = np.arange(len(codes)) // block
    with np.errstate(all="ignore"):
        values = _widen(scales).astype(np.float64)[of] * codes + _widen(offsets).astype(np.float64)[of]
        clipped = np.clip(values, -largest, largest)
        patterns = round_f64(np.where(np.isnan(values), 0.0, clipped))
    bad = (scales[of] & 0x7F80) == 0x7F80
    return np.where(bad, np.uint32(0x7FC00000), patterns)


# --- the largest values of each sample ----------------------------------------------------------


def top_mask(patterns: Patterns, n_samples: int, k: int) -> Bytes:
    """Mark the k greatest magnitudes of each sample, the first among equals, by 1 in [n]; NaN is greatest."""
    magnitudes = (patterns & np.uint32(0x7FFFFFFF)).astype(np.int64).reshape(n_samples, -1)
    chosen = np.argsort(-magnitudes, axis=1, kind="stable")[:, :k]
    mask = np.zeros(magnitudes.shape, np.uint8)
    np.put_along_axis(mask, chosen, 1, axis=1)
    return mask.reshape(-1)


def take(patterns: Patterns, mask: Bytes, k: int) -> Patterns:
    """Take the k values under the mask [n], in order: [k]."""
    del k
    return patterns[mask != 0]


def put(values: Patterns, mask: Bytes) -> Patterns:
    """Undo `take`: [k] to [n], zero elsewhere."""
    out = np.zeros(len(mask), np.uint32)
    out[mask != 0] = values
    return out


# --- tiles --------------------------------------------------------------------------------------


def rotate(patterns: Patterns, tile: int, inverse: bool) -> Patterns:
    """Rotate each tile of [n] by signs, then the Hadamard matrix over the root of the tile; or back.

    In double, pairs at distance 1, 2, 4, ... in turn; NaN where a tile holds something not finite.
    """
    rows = patterns.reshape(-1, tile)
    bad = ((rows & np.uint32(INFINITY)) == INFINITY).any(axis=1)
    out = np.where(bad[:, None], np.float32(0), rows.view(np.float32)).astype(np.float64)
    signs = signs_of(tile)
    out = out if inverse else out * signs
    half = 1
    while half < tile:
        pairs = out.reshape(-1, tile // (2 * half), 2, half)
        out = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        half *= 2
    out = out.reshape(-1, tile) / math.sqrt(tile)
    out = np.clip(out * signs if inverse else out, -LARGEST_F32[0], LARGEST_F32[0])
    out = np.where(np.abs(out) < TINY, 0.0, out).astype(np.float32).view(np.uint32)
    return np.where(bad[:, None], np.uint32(0x7FC00000), out).reshape(-1)


def tile_peaks(patterns: Patterns, tile: int) -> NDArray[np.int64]:
    """Find the least bf16 at or above the magnitudes of each tile: patterns from 2^-110 on, 0, or NaN."""
    most = (patterns & np.uint32(0x7FFFFFFF)).reshape(-1, tile).max(axis=1).astype(np.int64)
    up = np.clip((most + 0xFFFF) >> 16, SMALLEST, BF16_MAX)
    return np.where(most >= INFINITY, NAN_SCALE, np.where(most == 0, 0, up))


def _of_tiles(peaks: NDArray[np.int64], widths: NDArray[np.int64]) -> tuple[Any, Any, Any]:
    most = np.repeat((1 << widths) - 1, len(peaks) // len(widths)).astype(np.float64)
    bad = peaks > BF16_MAX
    return _widen(np.where(bad, 0, peaks)).astype(np.float64)[:, None], most[:, None], bad[:, None]


def tile_codes(
    patterns: Patterns, peaks: NDArray[np.int64], widths: NDArray[np.int64], tile: int, seed: int | None
) -> Bytes:
    """Quantize tiles to 2^width levels from -peak to peak [n]; `peaks` [tiles], `widths` [rows] in bits."""
    peak, most, bad = _of_tiles(peaks, widths)
    usable = (peak > 0) & ~bad
    values = np.where(usable, patterns.view(np.float32).reshape(-1, tile), np.float32(0)).astype(np.float64)
    with np.errstate(all="ignore"):
        t = values * np.where(usable, 1.0 / peak, 0.0) * (most * 0.5) + most * 0.5
    t += 0.5 if seed is None else random_24(seed, len(patterns)).astype(np.float64).reshape(t.shape)
    return np.where(usable, np.clip(np.floor(t), 0, most), 0).astype(np.uint8).reshape(-1)


def tile_values(peaks: NDArray[np.int64], widths: NDArray[np.int64], codes: Bytes, tile: int) -> Patterns:
    """Undo `tile_codes`: (2 code - 2^width + 1) steps of peak / (2^width - 1), in double, rounded to F32."""
    peak, most, bad = _of_tiles(peaks, widths)
    values = (2.0 * codes.reshape(-1, tile) - most) * (peak * (1.0 / most)) + 0.0
    return np.where(bad, np.uint32(0x7FC00000), values.astype(np.float32).view(np.uint32)).reshape(-1)


def pack_rows(codes: Bytes, widths: NDArray[np.int64], row: int, n_planes: int) -> Bytes:
    """Pack bit after bit of each row [row / 8], as many as its width, one row behind the other."""
    rows = zip(codes.reshape(-1, row), widths.tolist(), strict=True)
    planes = [pack_codes(codes >> np.uint8(bit) & 1, 1) for codes, width in rows for bit in range(width)]
    out = np.zeros(n_planes * row // 8, np.uint8)
    out[: len(planes) * row // 8] = np.concatenate(planes)
    return out


def unpack_rows(planes: Bytes, widths: NDArray[np.int64], row: int) -> Bytes:
    """Undo `pack_rows`: codes [rows * row]."""
    out, begin = np.zeros((len(widths), row), np.uint8), 0
    for codes, width in zip(out, widths.tolist(), strict=True):
        for bit in range(width):
            codes |= unpack(planes[begin : begin + row // 8], 1, row) << np.uint8(bit)
            begin += row // 8
    return out.reshape(-1)
