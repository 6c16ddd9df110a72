"""The definitions of `reference.py` once more as torch operations, with those that the package has itself.

Bit patterns are torch's integers of the same size, as in `ckptz.kernels.torch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ckptz.kernels.floats import DIFFERENCE, ORDERED_DIFFERENCE, ROTATED, TINY_EXPONENT, XOR
from ckptz.kernels.torch import (  # noqa: F401 - a whole set of kernels
    _mask,
    _narrow,
    _order,
    _shift_right,
    _top,
    _wide,
    _width,
    from_f32,
    pack_codes,
    region_codes,
    to_f32,
    top_histogram,
    unpack_codes,
)

_EXPONENT: Final = (0x7F800000, 0x7F80, 0x7C00)


def _unorder(wide: Tensor, width: int) -> Tensor:
    sign = _shift_right(wide, width - 1, width)
    return wide ^ (((sign - 1) | _top(width)) & _mask(width))


def order(units: Tensor) -> Tensor:
    return _narrow(_order(_wide(units), _width(units)), _width(units))


def unorder(units: Tensor) -> Tensor:
    return _narrow(_unorder(_wide(units), _width(units)), _width(units))


def _zigzag(wide: Tensor, width: int) -> Tensor:
    return ((wide << 1) ^ -_shift_right(wide, width - 1, width)) & _mask(width)


def _unzigzag(wide: Tensor, width: int) -> Tensor:
    return (_shift_right(wide, 1, width) ^ -(wide & 1)) & _mask(width)


def split_planes(units: Tensor, base: Tensor, mode: int) -> Tensor:
    width, wide = _width(units), _wide(units)
    if mode == ROTATED:
        wide = (wide << 1) | _shift_right(wide, width - 1, width)
    elif mode == XOR:
        wide = wide ^ _wide(base)
    elif mode == DIFFERENCE:
        wide = _zigzag((wide - _wide(base)) & _mask(width), width)
    elif mode == ORDERED_DIFFERENCE:
        wide = _zigzag((_order(wide, width) - _order(_wide(base), width)) & _mask(width), width)
    as_bytes = _narrow(wide, width).contiguous().view(torch.uint8)
    return as_bytes.reshape(len(units), width // 8).T.contiguous()


def merge_planes(planes: Sequence[Tensor], base: Tensor, mode: int, out: Tensor) -> None:
    width = _width(out)
    stacked = torch.stack(list(planes), dim=1).contiguous()
    wide = _wide(stacked.view(out.dtype).reshape(-1))
    if mode == ROTATED:
        wide = _shift_right(wide, 1, width) | (wide << (width - 1))
    elif mode == XOR:
        wide = wide ^ _wide(base)
    elif mode == DIFFERENCE:
        wide = _wide(base) + _unzigzag(wide, width)
    elif mode == ORDERED_DIFFERENCE:
        wide = _unorder((_order(_wide(base), width) + _unzigzag(wide, width)) & _mask(width), width)
    out.copy_(_narrow(wide & _mask(width), width))


def magnitude_classes(units: Tensor) -> Tensor:
    width = _width(units)
    if width == 8:
        return units & 0x7F
    return (_shift_right(_wide(units), width - 9, width) & 0xFF).to(torch.uint8)


def histogram(symbols: Tensor) -> Tensor:
    return torch.bincount(symbols, minlength=256)


def class_histogram(classes: Tensor, symbols: Tensor, n_classes: int) -> Tensor:
    joint = classes.to(torch.int64) * 256 + symbols
    return torch.bincount(joint, minlength=n_classes * 256).reshape(n_classes, 256)


def group(symbols: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    del n_classes
    return symbols[torch.argsort(classes.to(torch.int64), stable=True)]


def ungroup(grouped: Tensor, classes: Tensor, n_classes: int, out: Tensor) -> None:
    del n_classes
    out[torch.argsort(classes.to(torch.int64), stable=True)] = grouped


def _tiny_integer(wide: Tensor) -> Tensor:
    exponent, mantissa = wide >> 23 & 0xFF, wide & 0x7FFFFF
    magnitude = torch.where(exponent > 0, mantissa | 1 << 23, mantissa) << (exponent - 1).clamp(0, 38)
    return torch.where(wide >> 31 == 1, -magnitude, magnitude)


def _add_tiny(a: Tensor, b: Tensor) -> Tensor:
    """See `floats._add_tiny`; wide patterns in and out."""
    total = _tiny_integer(a) + _tiny_integer(b)
    magnitude = total.abs()
    shift = (torch.frexp(magnitude.to(torch.float64))[1].to(torch.int64) - 24).clamp(0, 40)
    kept = magnitude >> shift
    rest, half = magnitude - (kept << shift), (1 << shift) >> 1
    kept = kept + ((shift > 0) & ((rest > half) | ((rest == half) & (kept & 1 == 1))))
    pattern = torch.where(magnitude < 1 << 24, magnitude, kept + (shift << 23))
    both_negative_zero = (a == 1 << 31) & (b == 1 << 31)
    return pattern | ((total < 0) | both_negative_zero).to(torch.int64) << 31


def add_f32(a: Tensor, b: Tensor) -> Tensor:
    wide_a, wide_b = _wide(a), _wide(b)
    is_tiny = ((wide_a >> 23 & 0xFF) < TINY_EXPONENT) & ((wide_b >> 23 & 0xFF) < TINY_EXPONENT)
    total = (a.view(torch.float32) + b.view(torch.float32)).view(torch.int32)
    return torch.where(is_tiny, _narrow(_add_tiny(wide_a, wide_b), 32), total)


def lookup(codes: Tensor, rows: Tensor, table: Tensor, out: Tensor) -> None:
    out.copy_(table[rows.to(torch.int64), codes.to(torch.int64)])


def add_linear(base: Tensor, codes: Tensor, rows: Tensor, table: Tensor, kind: int, out: Tensor) -> None:
    terms = table[rows.to(torch.int64), codes.to(torch.int64)]
    out.copy_(from_f32(add_f32(to_f32(base, kind), terms), kind))


def add_bits(base: Tensor, codes: Tensor, rows: Tensor, table: Tensor, out: Tensor) -> None:
    width = _width(out)
    terms = _wide(table)[rows.to(torch.int64), codes.to(torch.int64)]
    out.copy_(_narrow(_unorder((_order(_wide(base), width) + terms) & _mask(width), width), width))


def all_finite(units: Tensor, kind: int) -> bool:
    return not bool(((_wide(units) & _EXPONENT[kind]) == _EXPONENT[kind]).any())


def _widen_f64(patterns: Tensor) -> Tensor:
    wide = _wide(patterns)
    values = patterns.view(torch.float32).to(torch.float64)
    steps = (wide & 0x7FFFFF).to(torch.float64) * 2.0**-149
    signed = torch.where(wide >> 31 == 1, -steps, steps)
    return torch.where((wide & 0x7F800000) == 0, signed, values)


def outer_product(rows: Tensor, columns: Tensor, begin: int, end: int) -> Tensor:
    element = torch.arange(begin, end, device=rows.device)
    a, b = rows[element // len(columns)], columns[element % len(columns)]
    product = _widen_f64(a) * _widen_f64(b)
    rounded = product.to(torch.float32).view(torch.int32)
    is_tiny = (product.abs() < 2.0**-125) & (product != 0)
    scaled = torch.where(is_tiny, product.abs() * 2.0**149, torch.zeros_like(product))
    steps = torch.round(scaled).to(torch.int64) | torch.signbit(product).to(torch.int64) << 31
    return torch.where(is_tiny, _narrow(steps, 32), rounded)
