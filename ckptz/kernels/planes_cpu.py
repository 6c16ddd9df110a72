"""Bit patterns, byte planes and contexts on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import uint8, uint16, uint32, uint64
from numpy.typing import NDArray

from ckptz.kernels import plain
from ckptz.kernels.floats import ORDERED_DIFFERENCE, RAW, ROTATED, Bytes, Counts, Patterns
from ckptz.kernels.numba_base import ONE, kernel, sign_fill

TWO, THIRDS = np.uint64(2), np.uint64(3)
PIECE = 1 << 15  # patterns that are merged before the base is added, so that the codes stay in the cache

# --- plane modes --------------------------------------------------------------------------------


@kernel
def _ordered_difference(patterns: Any, base: Any, width: int, out: Any) -> None:
    shift = uint64(width - 1)
    mask, top = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width), ONE << shift
    for i in range(len(out)):
        a, b = uint64(patterns[i]), uint64(base[i])
        d = ((a ^ (sign_fill(a, shift) | top)) - (b ^ (sign_fill(b, shift) | top))) & mask
        out[i] = (d << ONE) ^ sign_fill(d, shift)


@kernel
def _add_ordered(codes: Any, base: Any, width: int, out: Any) -> None:
    shift = uint64(width - 1)
    mask, top = uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - width), ONE << shift
    for i in range(len(out)):
        code, b = uint64(codes[i]), uint64(base[i])
        ordered = (b ^ (sign_fill(b, shift) | top)) + ((code >> ONE) ^ (uint64(0) - (code & ONE)))
        ordered &= mask
        out[i] = ordered ^ (((ordered >> shift) - ONE) | top)


def transform(patterns: Patterns, base: Patterns, mode: int, out: Patterns | None = None) -> Patterns:
    if mode != ORDERED_DIFFERENCE:
        return plain.transform(patterns, base, mode, out)
    out = np.empty_like(patterns) if out is None else out
    _ordered_difference(patterns, base, 8 * patterns.itemsize, out)
    return out


def restore(codes: Patterns, base: Patterns, mode: int, out: Patterns) -> None:
    if mode == ORDERED_DIFFERENCE:
        _add_ordered(codes, base, 8 * out.itemsize, out)
    else:
        plain.restore(codes, base, mode, out)


# --- byte planes --------------------------------------------------------------------------------
# Planes of lossless float tensors are rotated in separate kernels: a command rarely needs both kinds.


@kernel
def _split_2(patterns: Any, low: Any, high: Any) -> None:
    for i in range(len(patterns)):
        low[i] = uint8(patterns[i])
        high[i] = uint8(patterns[i] >> uint16(8))


@kernel
def _split_rotated_2(patterns: Any, low: Any, high: Any) -> None:
    for i in range(len(patterns)):
        pattern = uint16(uint16(patterns[i] << uint16(1)) | uint16(patterns[i] >> uint16(15)))
        low[i] = uint8(pattern)
        high[i] = uint8(pattern >> uint16(8))


@kernel
def _split_4(patterns: Any, p0: Any, p1: Any, p2: Any, p3: Any) -> None:
    for i in range(len(patterns)):
        p0[i] = uint8(patterns[i])
        p1[i] = uint8(patterns[i] >> uint32(8))
        p2[i] = uint8(patterns[i] >> uint32(16))
        p3[i] = uint8(patterns[i] >> uint32(24))


@kernel
def _split_rotated_4(patterns: Any, p0: Any, p1: Any, p2: Any, p3: Any) -> None:
    for i in range(len(patterns)):
        pattern = uint32(uint32(patterns[i] << uint32(1)) | uint32(patterns[i] >> uint32(31)))
        p0[i] = uint8(pattern)
        p1[i] = uint8(pattern >> uint32(8))
        p2[i] = uint8(pattern >> uint32(16))
        p3[i] = uint8(pattern >> uint32(24))


@kernel
def _merge_2(low: Any, high: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] = uint16(low[i]) | uint16(uint16(high[i]) << uint16(8))


@kernel
def _merge_rotated_2(low: Any, high: Any, out: Any) -> None:
    for i in range(len(out)):
        pattern = uint16(low[i]) | uint16(uint16(high[i]) << uint16(8))
        out[i] = uint16(pattern >> uint16(1)) | uint16(pattern << uint16(15))


@kernel
def _merge_4(p0: Any, p1: Any, p2: Any, p3: Any, out: Any) -> None:
    for i in range(len(out)):
        low = uint32(p0[i]) | uint32(uint32(p1[i]) << uint32(8))
        out[i] = low | uint32(uint32(p2[i]) << uint32(16)) | uint32(uint32(p3[i]) << uint32(24))


@kernel
def _merge_rotated_4(p0: Any, p1: Any, p2: Any, p3: Any, out: Any) -> None:
    for i in range(len(out)):
        low = uint32(p0[i]) | uint32(uint32(p1[i]) << uint32(8))
        pattern = low | uint32(uint32(p2[i]) << uint32(16)) | uint32(uint32(p3[i]) << uint32(24))
        out[i] = uint32(pattern >> uint32(1)) | uint32(pattern << uint32(31))


def split_planes(patterns: Patterns, base: Patterns, mode: int, out: Bytes | None = None) -> Bytes:
    width = patterns.itemsize
    is_rotated = mode == ROTATED and width in (2, 4)
    if mode != RAW and not is_rotated:
        patterns = transform(patterns, base, mode)
    planes = np.empty((width, len(patterns)), np.uint8) if out is None else out
    if width == 1:
        planes[0] = patterns
    elif width == 2:
        split = _split_rotated_2 if is_rotated else _split_2
        split(patterns, planes[0], planes[1])
    else:
        split = _split_rotated_4 if is_rotated else _split_4
        for j in range(0, width, 4):  # patterns of eight bytes in two halves
            half = patterns if width == 4 else np.ascontiguousarray(patterns.view(np.uint32)[j // 4 :: 2])
            split(half, planes[j], planes[j + 1], planes[j + 2], planes[j + 3])
    return planes


def merge_planes(planes: Sequence[Bytes], base: Patterns, mode: int, out: Patterns) -> None:
    width = out.itemsize
    is_rotated = mode == ROTATED and width in (2, 4)
    if not is_rotated and mode != RAW and len(out) > PIECE:
        for begin in range(0, len(out), PIECE):
            at = slice(begin, begin + PIECE)
            merge_planes([plane[at] for plane in planes], base[at], mode, out[at])
        return
    codes = out if is_rotated or mode == RAW else np.empty_like(out)
    if width == 1:
        codes[:] = planes[0]
    elif width == 2:
        merge = _merge_rotated_2 if is_rotated else _merge_2
        merge(planes[0], planes[1], codes)
    else:
        merge = _merge_rotated_4 if is_rotated else _merge_4
        for j in range(0, width, 4):
            half = codes if width == 4 else np.empty(len(out), np.uint32)
            merge(planes[j], planes[j + 1], planes[j + 2], planes[j + 3], half)
            if width == 8:
                codes.view(np.uint32)[j // 4 :: 2] = half
    if codes is not out:
        restore(codes, base, mode, out)


# --- contexts ------------------------------------------------------------------------------------


@kernel
def _magnitudes(patterns: Any, shift: int, mask: int, out: Any) -> None:
    for i in range(len(out)):
        out[i] = uint8((uint64(patterns[i]) >> uint64(shift)) & uint64(mask))


def magnitudes(patterns: Patterns, out: Bytes | None = None) -> Bytes:
    out = np.empty(len(patterns), np.uint8) if out is None else out
    width = 8 * patterns.itemsize
    _magnitudes(patterns, max(width - 9, 0), 0xFF if width > 8 else 0x7F, out)
    return out


@kernel
def _context_histogram(contexts: Any, symbols: Any, shift: int, counts: Any) -> None:
    # Two tables alternate: with one, consecutive equal symbols would wait for each other's store.
    first, second, bits = counts[0], counts[1], uint64(shift)
    half, n = uint64(len(symbols) // 2), uint64(len(symbols))
    for i in range(half):
        first[(uint64(contexts[i]) << bits) | uint64(symbols[i])] += uint32(1)
        second[(uint64(contexts[half + i]) << bits) | uint64(symbols[half + i])] += uint32(1)
    if half + half < n:
        first[(uint64(contexts[n - ONE]) << bits) | uint64(symbols[n - ONE])] += uint32(1)


def context_histogram(contexts: Patterns, symbols: Bytes, n_contexts: int, shift: int) -> Counts:
    counts = np.zeros((2, n_contexts << shift), np.uint32)
    _context_histogram(contexts, symbols, shift, counts)
    return np.add(counts[0], counts[1], dtype=np.int64).reshape(n_contexts, -1)


# One loop processes the three thirds of a tensor with a counter each, because consecutive equal contexts
# would wait for each other's store; more parts would exceed the registers. The counters of a context are
# adjacent, in the order of the grouped codes.


@kernel
def _context_counts(contexts: Any, ends: Any, counts: Any) -> None:
    begin = 0
    for t in range(len(ends)):
        third, row = uint64((ends[t] - begin) // 3), counts[t]
        own = contexts[begin : ends[t]]
        own_1, own_2 = own[third:], own[2 * third :]
        for i in range(third):
            row[THIRDS * uint64(own[i])] += uint32(1)
            row[THIRDS * uint64(own_1[i]) + ONE] += uint32(1)
            row[THIRDS * uint64(own_2[i]) + TWO] += uint32(1)
        for i in range(third, uint64(len(own_2))):
            row[THIRDS * uint64(own_2[i]) + TWO] += uint32(1)
        begin = ends[t]


def context_counts(contexts: Patterns, ends: Counts, n_contexts: int) -> NDArray[np.uint32]:
    counts = np.zeros((len(ends), n_contexts, 3), np.uint32)
    _context_counts(contexts, ends, counts.reshape(len(ends), -1))
    return counts


def _starts(counts: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the offset of each third of each context in the grouped patterns [m, 3 * n_contexts]."""
    starts = np.cumsum(counts, dtype=np.uint32)
    starts -= counts.reshape(-1)
    return starts.reshape(len(counts), -1)


@kernel
def _group(patterns: Any, contexts: Any, ends: Any, starts: Any, grouped: Any) -> None:
    begin = 0
    for t in range(len(ends)):
        third, places = uint64((ends[t] - begin) // 3), starts[t]
        own, there = contexts[begin : ends[t]], patterns[begin : ends[t]]
        own_1, own_2 = own[third:], own[2 * third :]
        there_1, there_2 = there[third:], there[2 * third :]
        for i in range(third):
            k0 = THIRDS * uint64(own[i])
            k1, k2 = THIRDS * uint64(own_1[i]) + ONE, THIRDS * uint64(own_2[i]) + TWO
            at = places[k0]
            grouped[uint64(at)] = there[i]
            places[k0] = at + uint32(1)
            at = places[k1]
            grouped[uint64(at)] = there_1[i]
            places[k1] = at + uint32(1)
            at = places[k2]
            grouped[uint64(at)] = there_2[i]
            places[k2] = at + uint32(1)
        for i in range(third, uint64(len(own_2))):
            k2 = THIRDS * uint64(own_2[i]) + TWO
            grouped[uint64(places[k2])] = there_2[i]
            places[k2] += uint32(1)
        begin = ends[t]


def group(patterns: Patterns, contexts: Patterns, ends: Counts, counts: NDArray[np.uint32]) -> Any:
    grouped = np.empty_like(patterns)
    _group(patterns, contexts, ends, _starts(counts), grouped)
    return grouped


@kernel
def _ungroup(grouped: Any, contexts: Any, places: Any, out: Any) -> None:
    third = uint64(len(out) // 3)
    own_1, own_2 = contexts[third:], contexts[2 * third :]
    out_1, out_2 = out[third:], out[2 * third :]
    for i in range(third):
        k0 = THIRDS * uint64(contexts[i])
        k1, k2 = THIRDS * uint64(own_1[i]) + ONE, THIRDS * uint64(own_2[i]) + TWO
        at = places[k0]
        out[i] = grouped[uint64(at)]
        places[k0] = at + uint32(1)
        at = places[k1]
        out_1[i] = grouped[uint64(at)]
        places[k1] = at + uint32(1)
        at = places[k2]
        out_2[i] = grouped[uint64(at)]
        places[k2] = at + uint32(1)
    for i in range(third, uint64(len(own_2))):
        k2 = THIRDS * uint64(own_2[i]) + TWO
        out_2[i] = grouped[uint64(places[k2])]
        places[k2] += uint32(1)


def ungroup(grouped: Patterns, contexts: Patterns, counts: NDArray[np.uint32], out: Patterns) -> None:
    _ungroup(grouped, contexts, _starts(counts)[0], out)
