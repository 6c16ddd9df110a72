"""The kernels of the wire in plain numpy; spec/08-wire.md#uniform and the sections after it.

As in `reference.py`, every function stands under the same name and signature in `wire_cpu.py` and
`wire_torch.py`, and the tests hold the three equal to the bit. Values are F32 bit patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels import reference
from ckptz.kernels.reference import from_f32 as from_f32
from ckptz.kernels.reference import to_f32 as to_f32

Bytes = NDArray[np.uint8]
Patterns = NDArray[np.uint32]

MASK_32 = 0xFFFFFFFF
ALIGN = 16  # bytes; every part of a payload is padded to it
INFINITY = 0x7F800000
NAN_SCALE = 0x7FC0  # bf16 scale of a block that holds something not finite
SMALLEST = 0x0880  # bf16 2^-110: smaller scales and offsets would decode to subnormal numbers
BF16_MAX = 0x7F7F
DOWN = 0.0625  # values are taken smaller by this, exactly: ranges of F32 overflow, their inverses vanish
LARGEST_F32 = (3.4028234663852886e38, 3.3895313892515355e38, 65504.0)  # by kind: F32, BF16, F16

# The finaliser of MurmurHash3, 64 and 32 bits wide, and the golden ratio's fraction as step.
STEP_64, MIX_64_A, MIX_64_B = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
STEP_32, MIX_32_A, MIX_32_B = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


# --- arrays -------------------------------------------------------------------------------------


def zeros(n: int, n_bytes: int, like: Any) -> Any:
    """Make n unsigned integers of `n_bytes` bytes, all zero, where `like` lives."""
    del like
    return np.zeros(n, f"<u{n_bytes}")


def from_bytes(buffer: Any, like: Any) -> Bytes:
    """Give the bytes of a buffer as an array, where `like` lives."""
    del like
    return np.frombuffer(buffer, np.uint8)


def host_bytes(data: Bytes) -> Bytes:
    """Give the bytes as a numpy array."""
    return data


def as_bytes(units: Any) -> Bytes:
    """Give the bytes of an array of unsigned integers."""
    return units.view(np.uint8)


def as_units(data: Bytes, n_bytes: int) -> Any:
    """Undo `as_bytes`; copied where the bytes are not aligned."""
    if data.ctypes.data % n_bytes:
        data = data.copy()
    return data.view(f"<u{n_bytes}")


def concat(parts: Sequence[Bytes]) -> Bytes:
    """Join parts, each padded with zeros to a multiple of 16 bytes."""
    sizes = [-(-len(part) // ALIGN) * ALIGN for part in parts]
    out = np.zeros(sum(sizes), np.uint8)
    offset = 0
    for part, size in zip(parts, sizes, strict=True):
        out[offset : offset + len(part)] = part
        offset += size
    return out


def unpack(packed: Bytes, n_bits: int, n: int) -> Bytes:
    out = np.empty(n, np.uint8)
    reference.unpack_codes(packed, n_bits, out)
    return out


def pack(codes: Bytes, n_bits: int) -> Bytes:
    return reference.pack_codes(codes, n_bits)


# --- checksum -----------------------------------------------------------------------------------


def mix_64(word: int) -> int:
    """Hash one word with the finaliser of MurmurHash3."""
    word = (word ^ word >> 33) * MIX_64_A & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 33) * MIX_64_B & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 33


def checksum(data: Bytes) -> int:
    """Sum over 64-bit words of mix(word + (i + 1) * STEP), mod 2^64; a multiple of 8 bytes."""
    words = as_units(data, 8)
    x = words + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(STEP_64)
    for factor in (MIX_64_A, MIX_64_B):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    x ^= x >> np.uint64(33)
    return int(x.sum(dtype=np.uint64))


# --- uniform levels -----------------------------------------------------------------------------


def sortable(patterns: Patterns) -> NDArray[np.int32]:
    """Turn F32 patterns [n] into integers in order, -0.0 just below 0.0, NaN at the ends."""
    signed = patterns.view(np.int32)
    return signed ^ ((signed >> np.int32(31)) & np.int32(0x7FFFFFFF))


def bf16_below(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Find the greatest bf16 at or below each finite value [n], saturated; tiny ones to 0 or -2^-110."""
    patterns = values.view(np.uint32)
    top, rest = patterns >> np.uint32(16), patterns & np.uint32(0xFFFF)
    negative = patterns >> np.uint32(31) != 0
    down = top + (negative & (rest != 0))
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
        held = np.clip(values, -largest, largest)
        patterns = reference.round_f64(np.where(np.isnan(values), 0.0, held))
    bad = (scales[of] & 0x7F80) == 0x7F80
    return np.where(bad, np.uint32(0x7FC00000), patterns)


# --- the largest of each sample -----------------------------------------------------------------


def top_mask(patterns: Patterns, n_samples: int, k: int) -> Bytes:
    """Mark the k greatest magnitudes of each sample, the first among equals, by 1 in [n]; NaN is greatest."""
    magnitudes = (patterns & np.uint32(0x7FFFFFFF)).astype(np.int64).reshape(n_samples, -1)
    chosen = np.argsort(-magnitudes, axis=1, kind="stable")[:, :k]
    mask = np.zeros(magnitudes.shape, np.uint8)
    np.put_along_axis(mask, chosen, 1, axis=1)
    return mask.reshape(-1)


def exclude(patterns: Patterns, mask: Bytes) -> Patterns:
    """Give magnitudes plus one, and zero under the mask [n]: what is chosen next is not chosen twice."""
    up = np.minimum((patterns & np.uint32(0x7FFFFFFF)) + np.uint32(1), np.uint32(0x7FFFFFFF))
    return np.where(mask != 0, np.uint32(0), up).astype(np.uint32)


def take(patterns: Patterns, mask: Bytes, k: int) -> Patterns:
    """Take the k values under the mask [n], in order: [k]."""
    del k
    return patterns[mask != 0]


def put(values: Patterns, mask: Bytes) -> Patterns:
    """Undo `take`: [k] to [n], zero elsewhere."""
    out = np.zeros(len(mask), np.uint32)
    out[mask != 0] = values
    return out


def popcounts(mask: Bytes, n_samples: int) -> list[int]:
    """Count the ones of each sample of a mask [n]."""
    return mask.reshape(n_samples, -1).sum(axis=1, dtype=np.int64).tolist()


def positions(mask: Bytes) -> NDArray[np.int64]:
    """List the positions of the ones in a mask [n]."""
    return np.flatnonzero(mask).astype(np.int64)


def mask_at(where: NDArray[np.int64], n: int) -> Bytes:
    """Undo `positions`: a mask [n]."""
    mask = np.zeros(n, np.uint8)
    mask[where] = 1
    return mask


def gaps_of(where: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the zeros before each one, from the positions [k] of the ones."""
    return np.diff(where, prepend=-1) - 1


def low_bytes(numbers: NDArray[np.int64]) -> Bytes:
    """Give the low byte of each number [n]."""
    return (numbers & 0xFF).astype(np.uint8)


def wide(codes: Bytes) -> NDArray[np.int64]:
    """Convert bytes [n] to 64-bit integers."""
    return codes.astype(np.int64)


# --- arithmetic of the per-link state -----------------------------------------------------------


def add(a: Patterns, b: Patterns) -> Patterns:
    """Sum of F32 patterns."""
    with np.errstate(all="ignore"):
        return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)


def subtract(a: Patterns, b: Patterns) -> Patterns:
    """Subtract F32 patterns [n]."""
    with np.errstate(all="ignore"):
        return (a.view(np.float32) - b.view(np.float32)).view(np.uint32)


def saturate(patterns: Patterns, largest: float) -> Patterns:
    """Hold finite values within +-largest; what is not finite stays."""
    values = patterns.view(np.float32)
    limit = np.float32(largest)
    finite = (patterns & np.uint32(INFINITY)) != INFINITY
    return np.where(finite, np.clip(values, -limit, limit), values).astype(np.float32).view(np.uint32)


def all_finite(patterns: Patterns) -> bool:
    """Tell whether nothing is an infinity or NaN."""
    return not bool(((patterns & np.uint32(INFINITY)) == INFINITY).any())


def squared_norm(patterns: Patterns) -> float:
    """Sum of squares, in double."""
    values = patterns.view(np.float32).astype(np.float64)
    return float(values @ values)
