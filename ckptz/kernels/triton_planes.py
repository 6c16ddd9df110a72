"""Bit patterns, byte planes, histograms and checksums on a GPU: the kernels of `planes_cpu` there.

Units are torch's unsigned integers of 1, 2, 4 or 8 bytes in contiguous memory. A tensor of several chunks is
worked on in one launch.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ckptz.kernels.floats import DIFFERENCE, ORDERED_DIFFERENCE, ROTATED, XOR, Counts

BLOCK = 1024
TILE = 1 << 15  # codes that one program counts
CHUNKS_AT_ONCE = tl.constexpr(8)  # of four accumulators each: a warp

_ROTATED, _XOR = tl.constexpr(ROTATED), tl.constexpr(XOR)
_DIFFERENCE, _ORDERED_DIFFERENCE = tl.constexpr(DIFFERENCE), tl.constexpr(ORDERED_DIFFERENCE)


# --- bit patterns -------------------------------------------------------------------------------


@triton.jit
def fill(x, WIDTH: tl.constexpr):
    """Give all ones where the top bit is set, else zero."""
    return tl.zeros_like(x) - (x >> (WIDTH - 1))


@triton.jit
def ordered(unit, WIDTH: tl.constexpr):
    """Map floats to integers in the order of the values: spec/03-transforms.md#order."""
    return unit ^ (fill(unit, WIDTH) | (1 << (WIDTH - 1)))


@triton.jit
def unordered(x, WIDTH: tl.constexpr):
    """Undo `ordered`: integers to the patterns of floats."""
    return x ^ (((x >> (WIDTH - 1)) - 1) | (1 << (WIDTH - 1)))


@triton.jit
def _zigzag(d, WIDTH: tl.constexpr):
    return (d << 1) ^ fill(d, WIDTH)


@triton.jit
def _unzigzag(z):
    return (z >> 1) ^ (tl.zeros_like(z) - (z & 1))


@triton.jit
def _split(units, base, planes, n, stride, MODE: tl.constexpr, N_PLANES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    z = tl.load(units + i, mask=inside, other=0)
    if MODE == _ROTATED:
        z = (z << 1) | (z >> (8 * N_PLANES - 1))
    elif MODE == _XOR:
        z = z ^ tl.load(base + i, mask=inside, other=0)
    elif MODE == _DIFFERENCE:
        z = _zigzag(z - tl.load(base + i, mask=inside, other=0), 8 * N_PLANES)
    elif MODE == _ORDERED_DIFFERENCE:
        b = tl.load(base + i, mask=inside, other=0)
        z = _zigzag(ordered(z, 8 * N_PLANES) - ordered(b, 8 * N_PLANES), 8 * N_PLANES)
    for j in tl.static_range(N_PLANES):
        tl.store(planes + i, (z >> (8 * j)).to(tl.uint8), mask=inside)
        i += stride


@triton.jit
def _merge(planes, base, units, n, stride, MODE: tl.constexpr, N_PLANES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    dtype: tl.constexpr = units.dtype.element_ty
    z = tl.load(planes + i, mask=inside, other=0).to(dtype)
    at = i
    for j in tl.static_range(1, N_PLANES):
        at += stride
        z |= tl.load(planes + at, mask=inside, other=0).to(dtype) << (8 * j)
    if MODE == _ROTATED:
        z = (z >> 1) | (z << (8 * N_PLANES - 1))
    elif MODE == _XOR:
        z = z ^ tl.load(base + i, mask=inside, other=0)
    elif MODE == _DIFFERENCE:
        z = _unzigzag(z) + tl.load(base + i, mask=inside, other=0)
    elif MODE == _ORDERED_DIFFERENCE:
        b = tl.load(base + i, mask=inside, other=0)
        z = unordered(_unzigzag(z) + ordered(b, 8 * N_PLANES), 8 * N_PLANES)
    tl.store(units + i, z, mask=inside)


def split_planes(units: Tensor, base: Tensor, mode: int) -> Tensor:
    """Give the byte planes uint8 [n_planes, n] of units [n]; see `planes_cpu.split_planes`."""
    n, n_planes = len(units), units.element_size()
    planes = torch.empty((n_planes, n), dtype=torch.uint8, device=units.device)
    _split[(triton.cdiv(n, BLOCK),)](units, base, planes, n, n, mode, n_planes, BLOCK)
    return planes


def merge_planes(planes: Tensor, base: Tensor, mode: int, out: Tensor) -> None:
    """Join planes [n_planes, n] to units [n]; see `planes_cpu.merge_planes`."""
    n, n_planes = len(out), out.element_size()
    _merge[(triton.cdiv(n, BLOCK),)](planes, base, out, n, planes.stride(0), mode, n_planes, BLOCK)


# --- classes and counts -------------------------------------------------------------------------


@triton.jit
def _magnitudes(units, labels, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    unit = tl.load(units + i, mask=i < n, other=0)
    label = unit & 127 if WIDTH == 8 else unit >> (WIDTH - 9)
    tl.store(labels + i, label.to(tl.uint8), mask=i < n)


def magnitude_classes(units: Tensor) -> Tensor:
    """Give the eight bits below the sign of units [n], uint8 [n]."""
    n = len(units)
    labels = torch.empty(n, dtype=torch.uint8, device=units.device)
    _magnitudes[(triton.cdiv(n, BLOCK),)](units, labels, n, 8 * units.element_size(), BLOCK)
    return labels


@triton.jit
def _count(codes, bounds, counts, n, TILE: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(1).to(tl.int64)
    begin = tl.load(bounds + part) + tl.program_id(0) * TILE
    end = tl.minimum(tl.load(bounds + part + 1), begin + TILE)
    codes += tl.program_id(2).to(tl.int64) * n
    found = tl.zeros([256], tl.int32)
    for at in tl.range(begin, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        code = tl.load(codes + i, mask=i < end, other=0).to(tl.int32)
        found += tl.histogram(code, 256, mask=i < end)
    row = tl.program_id(2) * tl.num_programs(1) + part
    symbol = tl.arange(0, 256)
    tl.atomic_add(counts + row * 256 + symbol, found, mask=found > 0, sem="relaxed")


def histograms(planes: Tensor, chunk: int) -> Tensor:
    """Count the codes of each chunk of each plane [n_planes, n]: int32 [n_planes, n_chunks, 256]."""
    n = planes.shape[1]
    return segment_histograms(planes, np.minimum(np.arange(chunk, n + chunk, chunk), n))


def segment_histograms(planes: Tensor, ends: Counts) -> Tensor:
    """Count the codes of each segment of each plane [n_planes, n], on the host their ends [n_segments]."""
    n_planes, n = planes.shape
    bounds = np.concatenate([[0], ends])
    counts = torch.zeros((n_planes, len(ends), 256), dtype=torch.int32, device=planes.device)
    grid = triton.cdiv(int(np.diff(bounds).max()), TILE), len(ends), n_planes
    _count[grid](planes, torch.from_numpy(bounds).to(planes.device), counts, n, TILE, BLOCK)
    return counts


# --- XXH64 --------------------------------------------------------------------------------------

_P1, _P2 = tl.constexpr(0x9E3779B185EBCA87), tl.constexpr(0xC2B2AE3D27D4EB4F)
_P3, _P4 = tl.constexpr(0x165667B19E3779F9), tl.constexpr(0x85EBCA77C2B2AE63)
_P5 = tl.constexpr(0x27D4EB2F165667C5)
_P1_P2, _MINUS_P1 = tl.constexpr(0x60EA27EEADC0B5D6), tl.constexpr(0x61C8864E7A143579)


@triton.jit
def _turn(x, n):
    """Rotate to the left."""
    return (x << n) | (x >> (64 - n))


@triton.jit
def _xxh64(words, data, n_bytes, chunk_bytes, checksums, n_chunks):
    """Hash eight chunks side by side, each with its four accumulators; spec/01-integers.md#xxh64."""
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS_AT_ONCE + tl.arange(0, CHUNKS_AT_ONCE)
    lane = tl.arange(0, 4)
    size = tl.maximum(tl.minimum(n_bytes - chunk * chunk_bytes, chunk_bytes), 0)
    words += (chunk * (chunk_bytes // 8))[:, None] + lane[None, :]
    data += chunk * chunk_bytes
    n_stripes = size // 32
    whole = tl.zeros([CHUNKS_AT_ONCE, 4], tl.uint64)
    zero = tl.zeros([4], tl.uint64)
    first = tl.where(lane == 0, zero + _P1_P2, tl.where(lane == 1, zero + _P2, zero))
    v = whole + tl.where(lane == 3, zero + _MINUS_P1, first)[None, :]
    for stripe in tl.range(0, tl.max(n_stripes, axis=0), loop_unroll_factor=8):
        is_there = (stripe < n_stripes)[:, None]
        word = tl.load(words + stripe * 4, mask=is_there, other=0)
        v = tl.where(is_there, _turn(v + word * _P2, 31) * _P1, v)
    turns = tl.where(lane == 0, 1, tl.where(lane == 1, 7, tl.where(lane == 2, 12, 18))).to(tl.uint64)
    h = tl.sum(_turn(v, turns[None, :]), axis=1)
    for j in tl.static_range(4):
        one = tl.sum(tl.where(lane[None, :] == j, v, whole), axis=1)
        h = (h ^ (_turn(one * _P2, 31) * _P1)) * _P1 + _P4
    h = tl.where(n_stripes > 0, h, _P5) + size.to(tl.uint64)
    at = n_stripes * 32
    for _ in tl.static_range(3):
        is_there = at + 8 <= size
        word = tl.load(words + (at // 8)[:, None], mask=is_there[:, None] & (lane == 0)[None, :], other=0)
        one = tl.sum(word, axis=1)
        h = tl.where(is_there, _turn(h ^ (_turn(one * _P2, 31) * _P1), 27) * _P1 + _P4, h)
        at += tl.where(is_there, 8, 0)
    is_there = at + 4 <= size
    four = tl.load(data[:, None] + at[:, None] + lane[None, :], mask=is_there[:, None], other=0).to(tl.uint64)
    one = tl.sum(four << (8 * lane[None, :]).to(tl.uint64), axis=1)
    h = tl.where(is_there, _turn(h ^ (one * _P1), 23) * _P2 + _P3, h)
    at += tl.where(is_there, 4, 0)
    for _ in tl.static_range(3):
        byte = tl.load(data + at, mask=at < size, other=0).to(tl.uint64)
        h = tl.where(at < size, _turn(h ^ (byte * _P5), 11) * _P1, h)
        at += 1
    h = (h ^ (h >> 33)) * _P2
    h = (h ^ (h >> 29)) * _P3
    tl.store(checksums + chunk, h ^ (h >> 32), mask=chunk < n_chunks)


def xxh64_of_chunks(units: Tensor, chunk: int) -> Tensor:
    """Compute XXH64 of every `chunk` units of units [n], uint64 [n_chunks]; eight divides a chunk's bytes."""
    n_bytes, chunk_bytes = units.nbytes, chunk * units.element_size()
    n_chunks = triton.cdiv(n_bytes, chunk_bytes)
    data = units.view(torch.uint8)
    if data.data_ptr() % 8:
        data = data.clone()
    checksums = torch.empty(n_chunks, dtype=torch.uint64, device=units.device)
    words = torch.empty(0, dtype=torch.uint64, device=units.device)
    words = words.set_(data.untyped_storage(), data.storage_offset() // 8, (n_bytes // 8,), (1,))
    grid = (triton.cdiv(n_chunks, CHUNKS_AT_ONCE.value),)
    _xxh64[grid](words, data, n_bytes, chunk_bytes, checksums, n_chunks, num_warps=1)
    return checksums
