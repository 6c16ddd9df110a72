"""Bit patterns, byte planes and classes on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import uint8, uint16, uint32, uint64

from ckptz.kernels import plain
from ckptz.kernels.floats import (
    DIFFERENCE,
    ORDERED_DIFFERENCE,
    RAW,
    ROTATED,
    XOR,
    Bytes,
    Counts,
    Units,
)
from ckptz.kernels.numba_base import BLOCK, ONE, kernel, part, sign_fill

# --- bit patterns -------------------------------------------------------------------------------


@part
def _transform(units: Any, base: Any, mode: int, width: int, out: Any) -> None:
    shift = uint64(width - 1)
    mask = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width)
    top = ONE << shift
    n = len(out)
    if mode == ROTATED:
        for i in range(n):
            unit = uint64(units[i])
            out[i] = (unit << ONE) | (unit >> shift)
    elif mode == XOR:
        for i in range(n):
            out[i] = units[i] ^ base[i]
    elif mode == DIFFERENCE:
        for i in range(n):
            d = (uint64(units[i]) - uint64(base[i])) & mask
            out[i] = (d << ONE) ^ sign_fill(d, shift)
    elif mode == ORDERED_DIFFERENCE:
        for i in range(n):
            a, b = uint64(units[i]), uint64(base[i])
            d = ((a ^ (sign_fill(a, shift) | top)) - (b ^ (sign_fill(b, shift) | top))) & mask
            out[i] = (d << ONE) ^ sign_fill(d, shift)
    else:
        for i in range(n):
            out[i] = units[i]


@part
def _restore(units: Any, base: Any, mode: int, width: int, out: Any) -> None:
    shift = uint64(width - 1)
    mask = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width)
    top = ONE << shift
    n = len(out)
    if mode == ROTATED:
        for i in range(n):
            unit = uint64(units[i])
            out[i] = (unit >> ONE) | (unit << shift)
    elif mode == XOR:
        for i in range(n):
            out[i] = units[i] ^ base[i]
    elif mode == DIFFERENCE:
        for i in range(n):
            code = uint64(units[i])
            out[i] = uint64(base[i]) + ((code >> ONE) ^ (uint64(0) - (code & ONE)))
    elif mode == ORDERED_DIFFERENCE:
        for i in range(n):
            code, b = uint64(units[i]), uint64(base[i])
            ordered = (b ^ (sign_fill(b, shift) | top)) + ((code >> ONE) ^ (uint64(0) - (code & ONE)))
            ordered &= mask
            out[i] = ordered ^ (((ordered >> shift) - ONE) | top)
    else:
        for i in range(n):
            out[i] = units[i]


@kernel
def _split_planes(units: Any, base: Any, mode: int, block: Any, planes: Any) -> None:
    n, n_planes = len(units), len(planes)
    for begin in range(0, n, BLOCK):
        end = begin + BLOCK
        if end > n:
            end = n
        here = block[: end - begin]
        _transform(units[begin:end], base[begin:end], mode, 8 * n_planes, here)
        for j in range(n_planes):
            plane = planes[j, begin:end]
            shift = uint64(8 * j)
            for i in range(len(here)):
                plane[i] = uint8(uint64(here[i]) >> shift)


@kernel
def _merge_planes(planes: Any, base: Any, mode: int, block: Any, out: Any) -> None:
    n, n_planes = len(out), len(planes)
    for begin in range(0, n, BLOCK):
        end = begin + BLOCK
        if end > n:
            end = n
        here = block[: end - begin]
        for j in range(n_planes):
            plane = planes[j][begin:end]
            shift = uint64(8 * j)
            if j == 0:
                for i in range(len(here)):
                    here[i] = plane[i]
            else:
                for i in range(len(here)):
                    here[i] |= uint64(plane[i]) << shift
        _restore(here, base[begin:end], mode, 8 * n_planes, out[begin:end])


# The two cases of every lossless float tensor, written out: a third of the time of the general loop.


@kernel
def _split_rotated_2(units: Any, low: Any, high: Any) -> None:
    for i in range(len(units)):
        unit = uint16(uint16(units[i] << uint16(1)) | uint16(units[i] >> uint16(15)))
        low[i] = uint8(unit)
        high[i] = uint8(unit >> uint16(8))


@kernel
def _split_rotated_4(units: Any, p0: Any, p1: Any, p2: Any, p3: Any) -> None:
    for i in range(len(units)):
        unit = uint32(uint32(units[i] << uint32(1)) | uint32(units[i] >> uint32(31)))
        p0[i] = uint8(unit)
        p1[i] = uint8(unit >> uint32(8))
        p2[i] = uint8(unit >> uint32(16))
        p3[i] = uint8(unit >> uint32(24))


@kernel
def _merge_rotated_2(low: Any, high: Any, out: Any) -> None:
    for i in range(len(out)):
        unit = uint16(low[i]) | uint16(uint16(high[i]) << uint16(8))
        out[i] = uint16(unit >> uint16(1)) | uint16(unit << uint16(15))


@kernel
def _merge_rotated_4(p0: Any, p1: Any, p2: Any, p3: Any, out: Any) -> None:
    for i in range(len(out)):
        low = uint32(p0[i]) | uint32(uint32(p1[i]) << uint32(8))
        unit = low | uint32(uint32(p2[i]) << uint32(16)) | uint32(uint32(p3[i]) << uint32(24))
        out[i] = uint32(unit >> uint32(1)) | uint32(unit << uint32(31))


def split_planes(units: Units, base: Units, mode: int) -> Bytes:
    if mode == RAW:
        return plain.split_planes(units, base, mode)
    planes = np.empty((units.itemsize, len(units)), np.uint8)
    if mode == ROTATED and units.itemsize == 2:
        _split_rotated_2(units, planes[0], planes[1])
        return planes
    if mode == ROTATED and units.itemsize == 4:
        _split_rotated_4(units, planes[0], planes[1], planes[2], planes[3])
        return planes
    _split_planes(units, base, mode, np.empty(BLOCK, units.dtype), planes)
    return planes


def merge_planes(planes: Sequence[Bytes], base: Units, mode: int, out: Units) -> None:
    if mode == ROTATED and out.itemsize == 2:
        _merge_rotated_2(planes[0], planes[1], out)
        return
    if mode == ROTATED and out.itemsize == 4:
        _merge_rotated_4(planes[0], planes[1], planes[2], planes[3], out)
        return
    _merge_planes(tuple(planes), base, mode, np.empty(BLOCK, out.dtype), out)


# --- classes ------------------------------------------------------------------------------------


@kernel
def _magnitude_classes(units: Any, shift: int, mask: int, out: Any) -> None:
    for i in range(len(out)):
        out[i] = uint8((uint64(units[i]) >> uint64(shift)) & uint64(mask))


def magnitude_classes(units: Units) -> Bytes:
    out = np.empty(len(units), np.uint8)
    width = 8 * units.itemsize
    _magnitude_classes(units, max(width - 9, 0), 0xFF if width > 8 else 0x7F, out)
    return out


@kernel
def _class_histogram(classes: Any, symbols: Any, counts: Any) -> None:
    # Two by turns, and flat: equal neighbours would wait for each other's store in one.
    first, second = counts[0], counts[1]
    half, n = uint64(len(symbols) // 2), uint64(len(symbols))
    for i in range(half):
        first[(uint64(classes[i]) << uint64(8)) | uint64(symbols[i])] += uint32(1)
        second[(uint64(classes[half + i]) << uint64(8)) | uint64(symbols[half + i])] += uint32(1)
    if half + half < n:
        first[(uint64(classes[n - ONE]) << uint64(8)) | uint64(symbols[n - ONE])] += uint32(1)


def class_histogram(classes: Units, symbols: Bytes, n_classes: int) -> Counts:
    counts = np.zeros((2, 256 * n_classes), np.uint32)
    _class_histogram(classes, symbols, counts)
    return np.add(counts[0], counts[1], dtype=np.int64).reshape(n_classes, 256)


@kernel
def _class_counts(classes: Any, counts: Any) -> None:
    """Count each class in each quarter: [4, n_classes].

    Quarters are walked side by side, because equal neighbours would wait for each other's counter.
    """
    quarter = uint64(len(classes) // 4)
    first, second, third, fourth = counts[0], counts[1], counts[2], counts[3]
    for i in range(quarter):
        first[uint64(classes[i])] += 1
        second[uint64(classes[quarter + i])] += 1
        third[uint64(classes[uint64(2) * quarter + i])] += 1
        fourth[uint64(classes[uint64(3) * quarter + i])] += 1
    for i in range(uint64(4) * quarter, uint64(len(classes))):
        fourth[uint64(classes[i])] += 1


def class_counts(classes: Units, n_classes: int) -> Counts:
    counts = np.zeros((4, n_classes), np.int64)
    _class_counts(classes, counts)
    return counts.sum(axis=0)


def _class_starts(classes: Units, n_classes: int) -> Counts:
    """Where class k of quarter q begins in class order: [4, n_classes]."""
    counts = np.zeros((4, n_classes), np.int64)
    _class_counts(classes, counts)
    return np.ascontiguousarray((np.cumsum(counts.T).reshape(-1, 4) - counts.T).T)


@kernel
def _group(symbols: Any, classes: Any, starts: Any, grouped: Any) -> None:
    quarter, n = uint64(len(symbols) // 4), uint64(len(symbols))
    for i in range(quarter):
        for q in range(4):
            j = uint64(q) * quarter + i
            k = uint64(classes[j])
            at = starts[q, k]
            grouped[uint64(at)] = symbols[j]
            starts[q, k] = at + 1
    for i in range(uint64(4) * quarter, n):
        k = uint64(classes[i])
        grouped[starts[3, k]] = symbols[i]
        starts[3, k] += 1


def group(symbols: Units, classes: Units, n_classes: int) -> Any:
    grouped = np.empty_like(symbols)
    _group(symbols, classes, _class_starts(classes, n_classes), grouped)
    return grouped


@kernel
def _ungroup(grouped: Any, classes: Any, starts: Any, out: Any) -> None:
    quarter, n = uint64(len(out) // 4), uint64(len(out))
    for i in range(quarter):
        for q in range(4):
            j = uint64(q) * quarter + i
            k = uint64(classes[j])
            at = starts[q, k]
            out[j] = grouped[uint64(at)]
            starts[q, k] = at + 1
    for i in range(uint64(4) * quarter, n):
        k = uint64(classes[i])
        out[i] = grouped[starts[3, k]]
        starts[3, k] += 1


def ungroup(grouped: Units, classes: Units, n_classes: int, out: Units) -> None:
    _ungroup(grouped, classes, _class_starts(classes, n_classes), out)
