"""Bit patterns of floats in plain numpy, and the constants that all kernels share."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Patterns = NDArray[Any]  # unsigned integers of 1, 2, 4 or 8 bytes
Counts = NDArray[np.int64]
Frequencies = NDArray[np.uint16]  # [256] of one table, [n_tables, 256] of several
Positions = NDArray[np.int64]
Integers = NDArray[np.int64]
Reals = NDArray[np.float64]
Floats = NDArray[np.float32]

RAW, ROTATED, XOR, DIFFERENCE, ORDERED_DIFFERENCE = range(5)

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
STATE_LOW = 1 << 16
MAX_GAP_BYTE = 255
N_LAST = 1 << 14  # slots of the hash table of `repeats`
LAST_MIX = 0x9E3779B97F4A7C15  # its hash: the top 14 bits are the slot, the next 32 the tag stored in it
MAX_TABLE_ORDER = 11  # greatest Exp-Golomb order in a frequency table
SMALL_PART = 15  # shorter parts are sorted by insertion
MAX_GOLOMB_BITS = 16  # low bits of an Exp-Golomb code at most: values are below 2^16
HUFFMAN_BITS = 11  # longest code of a Huffman stream, and index width of the decoding table
HUFFMAN_STREAMS = 4

NEAREST: Final = -1  # dither seed of rounding to nearest: all thresholds are one half
MAX_MAGNITUDE: Final = 127  # of a grid code: 2 * 127 signed levels, zero and the escape make 256 codes
ESCAPE: Final = 255  # placeholder of the escape code until the size of the alphabet is known


def order(patterns: Patterns) -> Patterns:
    """Map float patterns [...] to integers that sort as the values do; -0.0 is just below 0.0."""
    top = patterns.dtype.type(1 << (8 * patterns.itemsize - 1))
    return np.where(patterns & top, ~patterns, patterns | top)


# --- values -------------------------------------------------------------------------------------

F32, BF16, F16 = range(3)  # float types that kernels compute with; others are bit patterns only
N_BUCKETS = 1 << 16
TINY_EXPONENT = 27  # floats below 2^-100 are added as integers, see `add_f32`


def region_codes(patterns: Patterns, boundaries: Patterns, codes: Bytes) -> Bytes:
    """Return codes[r] for each pattern, where r is the number of boundaries at or below it.

    `boundaries` [n] are ascending results of `order`; `codes` has n + 1 entries.
    """
    return codes[np.searchsorted(boundaries, order(patterns), side="right")]


def to_f32(patterns: Patterns, kind: int) -> NDArray[np.uint32]:
    """Convert patterns [...] of type `kind` to F32 bit patterns, exactly."""
    if kind == BF16:
        return patterns.astype(np.uint32) << np.uint32(16)
    if kind == F16:
        return patterns.view(np.float16).astype(np.float32).view(np.uint32)
    return patterns.astype(np.uint32)


def from_f32(patterns: NDArray[np.uint32], kind: int) -> Patterns:
    """Round F32 patterns [...] to patterns of type `kind`, ties to even; spec/04-quantization.md#cast."""
    if kind == BF16:
        half = np.uint32(0x7FFF) + ((patterns >> np.uint32(16)) & np.uint32(1))
        is_nan = (patterns & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        quiet = (patterns >> np.uint32(16)) | np.uint32(0x40)
        return np.where(is_nan, quiet, (patterns + half) >> np.uint32(16)).astype(np.uint16)
    if kind == F16:
        with np.errstate(all="ignore"):
            narrow = patterns.view(np.float32).astype(np.float16).view(np.uint16)
        is_nan = (narrow & np.uint16(0x7FFF)) > np.uint16(0x7C00)
        return np.where(is_nan, narrow & np.uint16(0x8000) | np.uint16(0x7E00), narrow)
    return patterns


def all_finite(patterns: Patterns, kind: int) -> bool:
    """Return whether no bit pattern is an infinity or NaN."""
    exponent = patterns.dtype.type((0x7F800000, 0x7F80, 0x7C00)[kind])
    return not bool(((patterns & exponent) == exponent).any())


def outer_product(
    rows: NDArray[np.uint32], columns: NDArray[np.uint32], begin: int, end: int
) -> NDArray[np.uint32]:
    """Compute elements begin..end of the matrix rows[i] * columns[j] as F32 patterns, with subnormals."""
    element = np.arange(begin, end)
    a, b = rows[element // len(columns)], columns[element % len(columns)]
    # The product of two F32 numbers is exact in double; it is rounded once.
    return round_f64(widen_f64(a) * widen_f64(b))


def widen_f64(patterns: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Convert F32 patterns [n] to doubles; subnormals by integer arithmetic, which flush-to-zero spares."""
    with np.errstate(invalid="ignore"):
        values = patterns.view(np.float32).astype(np.float64)
    is_subnormal = (patterns & np.uint32(0x7F800000)) == 0
    steps = (patterns & np.uint32(0x7FFFFF)).astype(np.float64) * 2.0**-149
    signed = np.where(patterns >> np.uint32(31), -steps, steps)
    return np.where(is_subnormal, signed, values)


def round_f64(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Round doubles [n] to F32 patterns, to nearest even; subnormals by integer arithmetic."""
    with np.errstate(all="ignore"):
        rounded = values.astype(np.float32).view(np.uint32)
    is_tiny = (np.abs(values) < 2.0**-125) & (values != 0)
    # Subnormal F32 numbers are multiples of 2^-149; rint rounds ties to even.
    steps = np.rint(np.abs(values[is_tiny]) * 2.0**149).astype(np.uint32)
    rounded[is_tiny] = steps | (np.signbit(values[is_tiny]).astype(np.uint32) << np.uint32(31))
    return rounded
