"""Constants of the kernels of pipeline links, and kernels that are fast enough in numpy; spec/08-wire.md.

Values are F32 bit patterns. `wire_cpu.py` exports these functions too; `wire_torch.py` defines them in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Patterns = NDArray[np.uint32]

MASK_32 = 0xFFFFFFFF
TINY = 2.0**-126  # rotated values below it become +0, whether or not the processor flushes subnormals
ALIGN = 16  # bytes; every part of a payload is padded to a multiple
INFINITY = 0x7F800000
NAN_SCALE = 0x7FC0  # bf16 scale of a block with an infinity or NaN
SMALLEST = 0x0880  # bf16 2^-110: smaller scales and offsets would decode to subnormal numbers
BF16_MAX = 0x7F7F
DOWN = 0.0625  # exact scaling before quantizing, so that ranges do not overflow and their inverses not vanish
LARGEST_F32 = (3.4028234663852886e38, 3.3895313892515355e38, 65504.0)  # greatest values of F32, BF16, F16

# Finalisers of MurmurHash3 (64 and 32 bits), and the fraction of the golden ratio as increment.
STEP_64, MIX_64_A, MIX_64_B = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
STEP_32, MIX_32_A, MIX_32_B = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


# --- arrays -------------------------------------------------------------------------------------


def zeros(n: int, n_bytes: int, like: Any) -> Any:
    """Return n zeros, unsigned integers of `n_bytes` bytes, on the device of `like`."""
    del like
    return np.zeros(n, f"<u{n_bytes}")


def from_bytes(buffer: Any, like: Any) -> Bytes:
    """Return the bytes of a buffer as an array [n] on the device of `like`; shared on the CPU."""
    del like
    return np.frombuffer(buffer, np.uint8)


def host_bytes(data: Bytes) -> Bytes:
    """Return the bytes as a numpy array."""
    return data


def as_bytes(patterns: Any) -> Bytes:
    """Return the bytes of an array of unsigned integers."""
    return patterns.view(np.uint8)


def as_patterns(data: Bytes, n_bytes: int) -> Any:
    """View bytes [n] as unsigned integers of `n_bytes` bytes; unaligned bytes are copied."""
    if data.ctypes.data % n_bytes:
        data = data.copy()
    return data.view(f"<u{n_bytes}")


def padded(n_bytes: int, align: int = ALIGN) -> int:
    """Round a number of bytes up to a multiple of `align`."""
    return -(-n_bytes // align) * align


def concat(parts: Sequence[Bytes], align: int = ALIGN) -> Bytes:
    """Concatenate arrays of bytes, each padded with zeros to a multiple of `align`."""
    if len(parts) == 1 and not len(parts[0]) % align:
        return parts[0]
    out, offset = np.zeros(sum(padded(len(part), align) for part in parts), np.uint8), 0
    for part in parts:
        out[offset : offset + len(part)] = part
        offset += padded(len(part), align)
    return out


def mix_64(word: int) -> int:
    """Hash one word with the finaliser of MurmurHash3."""
    word = (word ^ word >> 33) * MIX_64_A & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 33) * MIX_64_B & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 33


# --- numbers ------------------------------------------------------------------------------------


def narrow(numbers: NDArray[np.int64], n_bytes: int) -> Any:
    """Truncate integers [n] to unsigned integers of `n_bytes` bytes."""
    return numbers.astype(f"<u{n_bytes}")


def wide(codes: Any) -> NDArray[np.int64]:
    """Convert unsigned integers [n] to 64-bit integers."""
    return codes.astype(np.int64)


def count(n: int, like: Any) -> NDArray[np.int64]:
    """Return 0, 1, ..., n - 1 [n] on the device of `like`."""
    del like
    return np.arange(n)


# --- tiles --------------------------------------------------------------------------------------


@functools.cache
def signs_of(tile: int) -> NDArray[np.float64]:
    """Return the random signs of a rotation [tile], 1 or -1; spec/08-wire.md#tiles."""
    x = np.arange(tile, dtype=np.uint32) * np.uint32(STEP_32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX_32_A)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(MIX_32_B)
    return np.where((x ^ (x >> np.uint32(16))) >> np.uint32(31), -1.0, 1.0)


def widths_of(logs: Any, n_planes: int) -> Any:
    """Distribute `n_planes` bits over rows: int64 [n_rows], 2 to 8 each, one more per octave of range.

    `logs` [n_rows] are mean binary logarithms of the ranges of a row's tiles, in units of 1/128: the entropy
    of uniform variables. The threshold is found bit by bit, without copying numbers from the device.
    """
    spread = len(logs).bit_length()
    keys = (logs << spread) + (0 * logs + 1).cumsum(0) - 1
    threshold = -(1 << 15 + spread)
    for bit in reversed(range(17 + spread)):
        total = ((keys + (threshold + (1 << bit))) >> 7 + spread).clip(2, 8).sum()
        threshold = threshold + (total <= n_planes) * (1 << bit)
    return ((keys + threshold) >> 7 + spread).clip(2, 8)


# --- arithmetic of the per-link state -----------------------------------------------------------


def add(a: Patterns, b: Patterns) -> Patterns:
    """Add F32 patterns [n]."""
    with np.errstate(all="ignore"):
        return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)


def subtract(a: Patterns, b: Patterns) -> Patterns:
    """Subtract F32 patterns [n]."""
    with np.errstate(all="ignore"):
        return (a.view(np.float32) - b.view(np.float32)).view(np.uint32)


def scale(a: Patterns, factor: float) -> Patterns:
    """Multiply F32 patterns [n] by a factor that is rounded to F32 first."""
    return (a.view(np.float32) * np.float32(factor)).view(np.uint32)


def saturate(patterns: Patterns, largest: float) -> Patterns:
    """Clip finite F32 patterns [n] to +-largest; infinities and NaNs are unchanged."""
    values = patterns.view(np.float32)
    limit = np.float32(largest)
    finite = (patterns & np.uint32(INFINITY)) != INFINITY
    return np.where(finite, np.clip(values, -limit, limit), values).astype(np.float32).view(np.uint32)


def truth(condition: Any) -> bool:
    """Convert a condition of this backend to a truth value."""
    return bool(condition)


def to_bools(conditions: Sequence[tuple[Any, str]]) -> list[bool]:
    """Copy all conditions from the device at once."""
    return [bool(wrong) for wrong, _ in conditions]


def unless(flag: Any, old: Any, new: Any) -> Any:
    """Return `old` if the flag is set, else `new`, without waiting for the device."""
    return old if flag else new


def not_finite(patterns: Any) -> Any:
    """Return whether one of the F32 patterns [n] is an infinity or NaN."""
    return ((patterns & INFINITY) == INFINITY).any()
