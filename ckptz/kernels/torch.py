"""Decoding kernels as torch operations, on the device of their tensors.

Bit patterns are torch integers of the same size (uint8, int16, int32, int64). Arithmetic converts them to
int64 and masks the result, because torch has no arithmetic on unsigned types.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from torch import Tensor

from ckptz.kernels.floats import BF16, F16, N_BUCKETS

PATTERN_TYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_on_device(tensor: Tensor) -> bool:
    """Return whether a tensor is outside host memory."""
    return tensor.device.type != "cpu"


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, sharing its memory: uint8 [n_bytes]."""
    # A one-element tensor is contiguous with any stride, but torch does not view it in another item size.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which kernels are launched on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _width(patterns: Tensor) -> int:
    return 8 * patterns.element_size()


def _mask(width: int) -> int:
    return (1 << width) - 1 if width < 64 else -1


def _wide(patterns: Tensor) -> Tensor:
    """Zero-extend patterns to int64 (patterns of eight bytes stay as they are)."""
    return patterns.to(torch.int64) & _mask(_width(patterns))


def _narrow(wide: Tensor, width: int) -> Tensor:
    """Truncate int64 to patterns of `width` bits."""
    if width == 8:
        return wide.to(torch.uint8)
    if width == 64:
        return wide
    top = 1 << (width - 1)
    return ((wide & _mask(width) ^ top) - top).to(PATTERN_TYPES[width // 8])


def _shift_right(wide: Tensor, n: int, width: int) -> Tensor:
    """Shift numbers of `width` bits right by `n`, filling with zeros."""
    return (wide >> n) & ((1 << (width - n)) - 1) if n else wide


def ordered(patterns: Tensor) -> Tensor:
    """Map float patterns [n] to int64 that sort as the values do; see `floats.order`."""
    wide, width = _wide(patterns), _width(patterns)
    sign = _shift_right(wide, width - 1, width)
    return wide ^ ((-sign | -(1 << (width - 1))) & _mask(width))


def top_histogram(patterns: Tensor) -> Tensor:
    width = _width(patterns)
    return torch.bincount(_shift_right(_wide(patterns), width - 16, width), minlength=N_BUCKETS)


def region_codes(patterns: Tensor, boundaries: Tensor, codes: Tensor) -> Tensor:
    return codes[torch.searchsorted(_wide(boundaries), ordered(patterns), right=True)]


def to_f32(patterns: Tensor, kind: int) -> Tensor:
    if kind == BF16:
        return _narrow(_wide(patterns) << 16, 32)
    if kind == F16:
        wide = _wide(patterns)
        exact = patterns.view(torch.float16).to(torch.float32).view(torch.int32)
        # On some processors torch replaces the NaNs in short arrays and remainders by a single one.
        nan = _narrow((wide & 0x8000) << 16 | 0x7F800000 | (wide & 0x3FF) << 13, 32)
        return torch.where((wide & 0x7FFF) > 0x7C00, nan, exact)
    return patterns


def from_f32(patterns: Tensor, kind: int) -> Tensor:
    if kind == BF16:
        wide = _wide(patterns)
        rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
        is_nan = (wide & 0x7FFFFFFF) > 0x7F800000
        return _narrow(torch.where(is_nan, wide >> 16 | 0x40, rounded), 16)
    if kind == F16:
        narrow = _wide(patterns.view(torch.float32).to(torch.float16).view(torch.int16))
        is_nan = (narrow & 0x7FFF) > 0x7C00
        return _narrow(torch.where(is_nan, narrow & 0x8000 | 0x7E00, narrow), 16)
    return patterns


def pack_codes(codes: Tensor, n_bits: int) -> Tensor:
    if n_bits == 8:
        return codes
    if 8 % n_bits:
        codes = (codes.reshape(-1, 1) >> _shifts(n_bits, 1, codes) & 1).reshape(-1)
        n_bits = 1
    per_byte = 8 // n_bits
    rows = torch.nn.functional.pad(codes, (0, -len(codes) % per_byte)).view(-1, per_byte)
    # The bits of a row do not overlap, so their sum modulo 256 is their union.
    return (rows << _shifts(per_byte, n_bits, codes)).sum(dim=1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, n_bits: int, out: Tensor) -> None:
    width = n_bits if 8 % n_bits == 0 else 1
    parts = packed.reshape(-1, 1) >> _shifts(8 // width, width, packed) & ((1 << width) - 1)
    if width < n_bits:
        groups = parts.reshape(-1)[: n_bits * len(out)].reshape(-1, n_bits)
        parts = (groups << _shifts(n_bits, 1, packed)).sum(dim=1, dtype=torch.uint8)
    out.copy_(parts.reshape(-1)[: len(out)])


def _shifts(n: int, step: int, like: Tensor) -> Tensor:
    return torch.arange(0, n * step, step, device=like.device, dtype=torch.uint8)
