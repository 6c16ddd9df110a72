"""Kernels of pipeline links as torch operations, on the device of their tensors.

Bit patterns are signed torch integers of the same size; arithmetic on them is in int64. `wire_arrays`
documents the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptz.kernels.torch import PATTERN_TYPES, _narrow, unpack_codes
from ckptz.kernels.torch import _wide as wide
from ckptz.kernels.torch import from_f32 as from_f32
from ckptz.kernels.torch import pack_codes as pack
from ckptz.kernels.torch import to_f32 as to_f32
from ckptz.kernels.wire_arrays import (
    ALIGN,
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
    signs_of,
)
from ckptz.kernels.wire_arrays import not_finite as not_finite
from ckptz.kernels.wire_arrays import widths_of as widths_of


def _signed(value: int) -> int:
    """Convert an unsigned 64-bit number to the int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


# --- arrays -------------------------------------------------------------------------------------


def zeros(n: int, n_bytes: int, like: Tensor) -> Tensor:
    return torch.zeros(n, dtype=PATTERN_TYPES[n_bytes], device=like.device)


def from_bytes(buffer: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(np.frombuffer(buffer, np.uint8).copy()).to(like.device, non_blocking=True)


def host_bytes(data: Tensor) -> Any:
    return data.cpu().numpy()


def as_bytes(patterns: Tensor) -> Tensor:
    return patterns.contiguous().view(torch.uint8)


def as_patterns(data: Tensor, n_bytes: int) -> Tensor:
    if not len(data):
        return zeros(0, n_bytes, data)
    if data.data_ptr() % n_bytes or data.storage_offset() % n_bytes:
        data = data.clone()
    return data.view(PATTERN_TYPES[n_bytes])


def concat(parts: Sequence[Tensor], align: int = ALIGN) -> Tensor:
    return torch.cat([torch.nn.functional.pad(part, (0, -len(part) % align)) for part in parts])


def unpack(packed: Tensor, n_bits: int, n: int) -> Tensor:
    out = torch.empty(n, dtype=torch.uint8, device=packed.device)
    unpack_codes(packed, n_bits, out)
    return out


def _shift_33(x: Tensor) -> Tensor:
    return (x >> 33) & 0x7FFFFFFF


def checksum(data: Tensor) -> Tensor:
    words = as_patterns(data, 8)
    index = torch.arange(1, len(words) + 1, device=data.device)
    x = words + index * _signed(STEP_64)
    for factor in (MIX_64_A, MIX_64_B):
        x = (x ^ _shift_33(x)) * _signed(factor)
    return (x ^ _shift_33(x)).sum()


# --- uniform levels -----------------------------------------------------------------------------


def _sortable(signed: Tensor) -> Tensor:
    return signed ^ ((signed >> 31) & 0x7FFFFFFF)


def _blocks(flat: Tensor, block: int) -> Tensor:
    """Reshape values [n] to [n_blocks, block]; the last block is padded with its last value."""
    missing = -len(flat) % block
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, block)


def _bf16_below(patterns: Tensor) -> Tensor:
    """Round F32 patterns down to BF16 patterns, both as int64, with magnitudes of at least `SMALLEST`."""
    top, rest = patterns >> 16, patterns & 0xFFFF
    negative = patterns >> 31 != 0
    down = top + (negative & (rest != 0))
    down = torch.where((down & 0x7FFF) > BF16_MAX, down & 0x8000 | BF16_MAX, down)
    is_less = negative & ((patterns & 0x7FFFFFFF) != 0)
    floor = torch.where(is_less, 0x8000 | SMALLEST, 0)
    return torch.where((down & 0x7FFF) < SMALLEST, floor, down)


def _bf16_above(values: Tensor) -> Tensor:
    """Round doubles >= 0 up to BF16 patterns as int64, from `SMALLEST` to `BF16_MAX`; 0 stays 0."""
    narrow = values.to(torch.float32)
    patterns = wide(narrow.view(torch.int32)) + (narrow.to(torch.float64) < values)
    up = (patterns >> 16) + ((patterns & 0xFFFF) != 0)
    return torch.where(values == 0, 0, up.clamp(SMALLEST, BF16_MAX))


def _float_of(bf16: Tensor) -> Tensor:
    """Convert BF16 patterns, as int64, to float32."""
    return (bf16 << 16).to(torch.int32).view(torch.float32)


def _random_24(seed: int, n: int, device: torch.device) -> Tensor:
    x = (torch.arange(n, device=device) * STEP_32 + (seed & MASK_32)) & MASK_32
    x = (((x ^ (x >> 16)) * MIX_32_A) & MASK_32) ^ (seed >> 32)
    x = ((x ^ (x >> 13)) * MIX_32_B) & MASK_32
    return ((x ^ (x >> 16)) >> 8).to(torch.float32) * 2.0**-24


def _scales_of(low: Tensor, high: Tensor, n_levels: int) -> tuple[Tensor, Tensor]:
    """Compute BF16 offset and scale of blocks, as int64, from their sortable extremes."""
    bad = (high >= INFINITY) | (low < -INFINITY)
    low, high = torch.where(bad, 0, low), torch.where(bad, 0, high)
    last = _sortable(high).view(torch.float32).to(torch.float64)
    offset = _bf16_below(wide(_sortable(low)))
    scale = _bf16_above((last - _float_of(offset).to(torch.float64)) * (1.0 / (n_levels - 1)))
    return offset, torch.where(bad, NAN_SCALE, scale)


def quantize(patterns: Tensor, block: int, n_bits: int, seed: int | None) -> tuple[Tensor, Tensor, Tensor]:
    n, block = len(patterns), min(block, len(patterns))
    rows = _blocks(patterns, block)
    keys = _sortable(rows)
    offset, scale = _scales_of(keys.amin(dim=1), keys.amax(dim=1), 1 << n_bits)
    usable = ((scale != 0) & (scale != NAN_SCALE))[:, None]
    divisor = _float_of(scale)[:, None]
    inverse = torch.where(usable, torch.full_like(divisor, 1 / DOWN) / divisor, 0.0)
    values = torch.where(usable, rows.view(torch.float32), 0.0)
    t = (values * DOWN - _float_of(offset)[:, None] * DOWN) * inverse
    n_padded = rows.numel()
    t = t + (0.5 if seed is None else _random_24(seed, n_padded, patterns.device).view(rows.shape))
    codes = torch.where(usable, t.floor().clamp(max=float((1 << n_bits) - 1)), 0.0)
    return _narrow(offset, 16), _narrow(scale, 16), codes.to(torch.uint8).view(-1)[:n]


def dequantize(offsets: Tensor, scales: Tensor, codes: Tensor, block: int, largest: float) -> Tensor:
    n, block = len(codes), min(block, len(codes))
    rows = _blocks(codes, block)
    offset, scale = wide(offsets)[:, None], wide(scales)[:, None]
    steps = _float_of(scale).to(torch.float64) * rows.to(torch.float64)
    values = (steps + _float_of(offset).to(torch.float64)).clamp(-largest, largest)
    patterns = values.to(torch.float32).view(torch.int32)
    return torch.where((scale & 0x7F80) == 0x7F80, 0x7FC00000, patterns).view(-1)[:n]


# --- the largest of each sample -----------------------------------------------------------------


def top_mask(patterns: Tensor, n_samples: int, k: int) -> Tensor:
    magnitudes = (patterns & 0x7FFFFFFF).view(n_samples, -1)
    chosen = magnitudes.argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.zeros_like(magnitudes, dtype=torch.uint8).scatter_(1, chosen, 1).view(-1)


def take(patterns: Tensor, mask: Tensor, k: int) -> Tensor:
    """Select the `k` values under a mask [n] by their rank, without copying a size from the device."""
    place = torch.where(mask != 0, mask.to(torch.int64).cumsum(0) - 1, k)
    out = torch.zeros(k + 1, dtype=patterns.dtype, device=patterns.device)
    return out.scatter_(0, place, patterns)[:k]


def put(values: Tensor, mask: Tensor) -> Tensor:
    place = (mask.to(torch.int64).cumsum(0) - 1).clamp(0, len(values) - 1)
    return torch.where(mask != 0, values[place], 0).to(torch.int32)


def narrow(numbers: Tensor, n_bytes: int) -> Tensor:
    return _narrow(numbers & ((1 << 8 * n_bytes) - 1), 8 * n_bytes)


def count(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)


# --- tiles --------------------------------------------------------------------------------------


def rotate(patterns: Tensor, tile: int, inverse: bool) -> Tensor:
    values = patterns.view(torch.float32).to(torch.float64).view(-1, tile)
    signs = torch.from_numpy(signs_of(tile)).to(patterns.device, non_blocking=True)
    out = values if inverse else values * signs
    half = 1
    while half < tile:
        pairs = out.view(-1, tile // (2 * half), 2, half)
        out = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    out = out.view(-1, tile) * tile**-0.5
    out = (out * signs if inverse else out).clamp(-LARGEST_F32[0], LARGEST_F32[0])
    out = torch.where(out.abs() < TINY, 0.0, out).to(torch.float32).view(torch.int32)
    bad = ((patterns.view(-1, tile) & INFINITY) == INFINITY).any(1, keepdim=True)
    return torch.where(bad, 0x7FC00000, out).view(-1)


def tile_peaks(patterns: Tensor, tile: int) -> Tensor:
    most = (patterns & 0x7FFFFFFF).view(-1, tile).amax(1).to(torch.int64)
    up = ((most + 0xFFFF) >> 16).clamp(SMALLEST, BF16_MAX)
    return torch.where(most >= INFINITY, NAN_SCALE, torch.where(most == 0, 0, up))


def _of_tiles(peaks: Tensor, widths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return peaks and greatest codes as doubles, masks of zero and non-finite tiles; all [n_tiles, 1]."""
    most = ((1 << widths) - 1).repeat_interleave(len(peaks) // len(widths)).to(torch.float64)
    bad = peaks >= INFINITY >> 16
    peak = torch.where(bad, 0, _float_of(peaks)).to(torch.float64)
    return peak[:, None], most[:, None], (peaks == 0)[:, None], bad[:, None]


def tile_codes(patterns: Tensor, peaks: Tensor, widths: Tensor, tile: int, seed: int | None) -> Tensor:
    peak, most, zero, bad = _of_tiles(peaks, widths)
    skipped = zero | bad
    values = torch.where(skipped, 0.0, patterns.view(torch.float32).view(-1, tile)).to(torch.float64)
    half = most * 0.5
    t = values * torch.where(skipped, 0.0, torch.ones_like(peak) / peak) * half + half
    t = t + (0.5 if seed is None else _random_24(seed, t.numel(), t.device).view(t.shape).to(torch.float64))
    return torch.where(skipped, 0.0, t.floor().clamp(min=0.0).minimum(most)).to(torch.uint8).view(-1)


def tile_values(peaks: Tensor, widths: Tensor, codes: Tensor, tile: int) -> Tensor:
    peak, most, _, bad = _of_tiles(peaks, widths)
    step = peak * (torch.ones_like(most) / most)
    values = (2.0 * codes.view(-1, tile).to(torch.float64) - most) * step
    patterns = (values + 0.0).to(torch.float32).view(torch.int32)
    return torch.where(bad, 0x7FC00000, patterns).view(-1)


def _places(widths: Tensor, n_planes: int) -> Tensor:
    """Return the plane of each bit of each row [n_rows, 8]; `n_planes` for bits that a row does not have."""
    bit = torch.arange(8, device=widths.device)
    place = (widths.cumsum(0) - widths)[:, None] + bit
    return torch.where(bit < widths[:, None], place, n_planes).clamp(max=n_planes)


def pack_rows(codes: Tensor, widths: Tensor, row: int, n_planes: int) -> Tensor:
    planes = torch.zeros(n_planes + 1, row // 8, dtype=torch.uint8, device=codes.device)
    for bit, place in enumerate(_places(widths, n_planes).unbind(1)):
        planes[place] = pack(codes >> bit & 1, 1).view(-1, row // 8)
    return planes[:n_planes].reshape(-1)


def unpack_rows(planes: Tensor, widths: Tensor, row: int) -> Tensor:
    rows = torch.nn.functional.pad(planes.view(-1, row // 8), (0, 0, 0, 1))
    codes = torch.zeros(len(widths) * row, dtype=torch.uint8, device=planes.device)
    for bit, place in enumerate(_places(widths, len(rows) - 1).unbind(1)):
        codes |= unpack(rows[place].view(-1), 1, len(codes)) << bit
    return codes


# --- arithmetic of the per-link state -----------------------------------------------------------


def _with_nan_of(result: Tensor, *operands: Tensor) -> Tensor:
    """Replace NaNs by the first operand's NaN, quieted, as CPUs do; GPUs lose the payload."""
    for operand in reversed(operands):
        result = torch.where((operand & 0x7FFFFFFF) > 0x7F800000, operand | 0x400000, result)
    return result


def add(a: Tensor, b: Tensor) -> Tensor:
    return _with_nan_of((a.view(torch.float32) + b.view(torch.float32)).view(torch.int32), a, b)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    return _with_nan_of((a.view(torch.float32) - b.view(torch.float32)).view(torch.int32), a, b)


def scale(a: Tensor, factor: float) -> Tensor:
    return _with_nan_of((a.view(torch.float32) * float(np.float32(factor))).view(torch.int32), a)


def saturate(patterns: Tensor, largest: float) -> Tensor:
    values = patterns.view(torch.float32)
    finite = (patterns & INFINITY) != INFINITY
    limit = float(np.float32(largest))
    return torch.where(finite, values.clamp(-limit, limit), values).view(torch.int32)


def truth(condition: Any) -> Any:
    return condition


def to_bools(conditions: Sequence[tuple[Any, str]]) -> list[bool]:
    flags: list[bool] = torch.stack([wrong for wrong, _ in conditions]).tolist() if conditions else []
    return flags


def unless(flag: Any, old: Tensor, new: Tensor) -> Tensor:
    return torch.where(flag, old, new) if isinstance(flag, Tensor) else old if flag else new
