"""Byte planes of bit patterns, plain or against a base. Implements spec/03-transforms.md#planes."""

from __future__ import annotations

from enum import IntEnum

from ckptz.dtypes import DType
from ckptz.kernels import floats


class PlaneMode(IntEnum):
    """spec/registry.md#plane-modes: what happens to a unit before it is split into bytes."""

    RAW = 0  # the bit pattern
    ROTATED = 1  # rotated left by one, so that the exponent of F32 and BF16 fills the top byte
    XOR = 2  # exclusive or with the base
    DIFFERENCE = 3  # difference to the base, of the order-preserving integers for floats; zigzag


BASE_MODES = frozenset((PlaneMode.XOR, PlaneMode.DIFFERENCE))


def kernel_mode(mode: PlaneMode, dtype: DType) -> int:
    """Give the kernels' number for a mode: the difference of floats goes through `order`."""
    if mode is PlaneMode.DIFFERENCE:
        return floats.ORDERED_DIFFERENCE if dtype.is_float else floats.DIFFERENCE
    return (floats.RAW, floats.ROTATED, floats.XOR)[mode]
