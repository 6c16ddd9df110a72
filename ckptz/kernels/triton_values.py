"""Quantized values, codes of maps and packed codes on a GPU; spec/04-quantization.md.

The functions are those of `values_cpu` and `rounding_cpu`, for tensors on a GPU. Products and sums are never
fused, and subnormal numbers are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ckptz.kernels.floats import BF16, ESCAPE, F16, MAX_MAGNITUDE, NEAREST, Counts
from ckptz.kernels.triton_planes import BLOCK, ordered, unordered

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # of the compiler
LINEAR, BITS = 1, 2  # domains, as of plans
ZERO, BASE, OUTER = 0, 1, 2  # predictors
LEAF, LEAVES = 128, 64  # values that are summed one after another; such sums in a program
RUNS = 32  # of any length, that a program sums

_BF16, _F16 = tl.constexpr(BF16), tl.constexpr(F16)
_BITS, _BASE, _OUTER, _ZERO = tl.constexpr(BITS), tl.constexpr(BASE), tl.constexpr(OUTER), tl.constexpr(ZERO)
_ESCAPE, _MAX_MAGNITUDE = tl.constexpr(ESCAPE), tl.constexpr(MAX_MAGNITUDE)


# --- values -------------------------------------------------------------------------------------


@triton.jit
def to_f32(unit, KIND: tl.constexpr):
    """Convert units of a kind to F32 patterns, exactly; NaN keep their bits."""
    wide = unit.to(tl.uint32)
    if KIND == _BF16:
        wide = wide << 16
    elif KIND == _F16:
        exponent, mantissa = (wide >> 10) & 31, wide & 0x3FF
        steps = (mantissa.to(tl.float32) * 2.0**-24).to(tl.uint32, bitcast=True)
        size = (tl.where(exponent == 31, 255, exponent + 112) << 23) | (mantissa << 13)
        wide = ((wide & 0x8000) << 16) | tl.where(exponent == 0, steps, size)
    return wide


@triton.jit
def from_f32(pattern, KIND: tl.constexpr):
    """Round F32 patterns to nearest even: spec/04-quantization.md#cast."""
    size = pattern & 0x7FFFFFFF
    if KIND == _BF16:
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        pattern = tl.where(size > 0x7F800000, (pattern >> 16) | 0x40, rounded).to(tl.uint16)
    elif KIND == _F16:
        exponent, mantissa = size >> 23, (size & 0x7FFFFF) | 0x800000
        is_normal = exponent >= 113
        shift = tl.where(is_normal, 13, tl.minimum(126 - exponent, 31))
        kept, half = mantissa >> shift, tl.full(size.shape, 1, tl.uint32) << (shift - 1)
        rest = mantissa & ((half << 1) - 1)
        kept += ((rest > half) | ((rest == half) & ((kept & 1) == 1))).to(tl.uint32)
        kept += tl.where(is_normal, (exponent - 113) << 10, 0)
        kept = tl.where(size < 0x33000001, 0, tl.where(size >= 0x477FF000, 0x7C00, kept))
        kept = tl.where(size > 0x7F800000, 0x7E00, kept)
        pattern = (((pattern >> 16) & 0x8000) | kept).to(tl.uint16)
    return pattern


@triton.jit
def _product(rows, columns, element, n_columns, inside):
    a = tl.load(rows + element // n_columns, mask=inside, other=0).to(tl.float32, bitcast=True)
    b = tl.load(columns + element % n_columns, mask=inside, other=0).to(tl.float32, bitcast=True)
    return a * b


@triton.jit
def _restore(
    codes,
    rows,
    table,
    base,
    outer_rows,
    outer_columns,
    out,
    n,
    n_codes,
    n_columns,
    begin,
    DOMAIN: tl.constexpr,
    PREDICTOR: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    cell = tl.load(codes + i, mask=inside, other=0).to(tl.int32)
    if HAS_ROWS:
        cell += tl.load(rows + i, mask=inside, other=0).to(tl.int32) * n_codes
    term = tl.load(table + cell, mask=inside, other=0)
    if DOMAIN == _BITS:
        if PREDICTOR == _OUTER:
            product = _product(outer_rows, outer_columns, begin + i, n_columns, inside)
            unit = from_f32(product.to(tl.uint32, bitcast=True), KIND)
        elif PREDICTOR == _BASE:
            unit = tl.load(base + i, mask=inside, other=0)
        else:
            unit = tl.zeros_like(term)
        term = unordered(ordered(unit, WIDTH) + term, WIDTH)
    elif PREDICTOR != _ZERO:
        if PREDICTOR == _OUTER:
            predicted = _product(outer_rows, outer_columns, begin + i, n_columns, inside)
        else:
            pattern = to_f32(tl.load(base + i, mask=inside, other=0), KIND)
            predicted = pattern.to(tl.float32, bitcast=True)
        total = predicted + term.to(tl.float32, bitcast=True)
        term = from_f32(total.to(tl.uint32, bitcast=True), KIND)
    tl.store(out + i, term, mask=inside)


def restore(
    codes: Tensor,
    rows: Tensor | None,
    table: Tensor,
    kind: int,
    domain: int,
    out: Tensor,
    base: Tensor | None = None,
    outer: tuple[Tensor, Tensor] | None = None,
    begin: int = 0,
) -> None:
    """Turn codes uint8 [n] into units `out` [n] of a kind, as a map's entries and a prediction say.

    Args:
        codes: below the number of codes of the table.
        rows: row of the table for each, uint8 or int16 [n], or None for the first.
        table: entries [n_rows, n_codes]: units if LINEAR without a prediction or BITS, else F32 patterns.
        kind: of `ckptz.kernels.floats`.
        domain: LINEAR or BITS.
        out: units.
        base: units that predict [n], or None.
        outer: F32 patterns of rows and columns, whose products predict, or None.
        begin: number of the first unit in its tensor, for `outer`.
    """
    n, predictor = len(codes), ZERO if outer is None and base is None else OUTER if base is None else BASE
    outer_rows, outer_columns = (out, out) if outer is None else outer
    given = codes, codes if rows is None else rows, table, out if base is None else base
    sizes = n, table.shape[1], len(outer_columns), begin
    shape = domain, predictor, kind, rows is not None, 8 * out.element_size(), BLOCK
    grid = (triton.cdiv(n, BLOCK),)
    _restore[grid](*given, outer_rows, outer_columns, out, *sizes, *shape, **EXACT)


# --- codes --------------------------------------------------------------------------------------


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _threshold(element, key):
    index = element.to(tl.uint64)
    seeded = _mixed((index >> 32).to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32))
    drawn = _mixed((index.to(tl.uint32) * 0x9E3779B9) ^ seeded)
    return (drawn >> 8).to(tl.float32) * 2.0**-24


@triton.jit(do_not_specialize=["key", "begin"])
def _draw(out, n, key, begin, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, _threshold(begin + i, key), mask=i < n)


def thresholds(key: int, begin: int, n: int, device: torch.device) -> Tensor:
    """Draw thresholds float32 [n] of elements from `begin` on; see `rounding_cpu.thresholds`."""
    out = torch.empty(n, dtype=torch.float32, device=device)
    _draw[(triton.cdiv(n, BLOCK),)](out, n, key, begin, BLOCK)
    return out


@triton.jit(do_not_specialize=["key", "begin"])
def _grid(
    values,
    base,
    steps,
    labels,
    out,
    n,
    row_units,
    widened,
    key,
    begin,
    HAS_BASE: tl.constexpr,
    IS_NEAREST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, element = i < n, begin + i
    value = tl.load(values + i, mask=inside, other=0.0)
    if HAS_BASE:
        value = value - tl.load(base + i, mask=inside, other=0.0)
    label = tl.load(labels + element // row_units, mask=inside, other=0).to(tl.int32)
    scaled = tl.div_rn(value, tl.load(steps + label, mask=inside, other=1.0))
    if IS_NEAREST:
        size = tl.abs(scaled)
        magnitude = tl.where(size < widened, 0.0, tl.floor(size + 0.5))
        is_positive = scaled > 0
    else:
        whole = tl.floor(scaled)
        whole += (_threshold(element, key) >= 1.0 - (scaled - whole)).to(tl.float32)
        magnitude, is_positive = tl.abs(whole), whole > 0
    has_code = magnitude <= _MAX_MAGNITUDE
    number = tl.where(has_code, magnitude, 0.0).to(tl.int32)
    code = tl.where(number > 0, 2 * number - is_positive.to(tl.int32), 0)
    tl.store(out + i, tl.where(has_code, code, _ESCAPE).to(tl.uint8), mask=inside)


def residual_codes(
    values: Tensor,
    base: Tensor | None,
    steps: Tensor,
    labels: Tensor,
    row_units: int,
    dead_zone: float,
    key: int,
    begin: int,
) -> Tensor:
    """Give the codes uint8 [n] of values float32 [n] on a grid; see `rounding_cpu.residual_codes`."""
    n = len(values)
    out = torch.empty(n, dtype=torch.uint8, device=values.device)
    given = values, values if base is None else base, steps, labels, out
    sizes = n, row_units, float(np.float32(0.5 + dead_zone)), key, begin
    shape = base is not None, key == NEAREST, BLOCK
    _grid[(triton.cdiv(n, BLOCK),)](*given, *sizes, *shape, **EXACT)
    return out


# --- sums ---------------------------------------------------------------------------------------


@triton.jit
def _leaf_sums(values, ends, sizes, sums, n_leaves, LEAVES: tl.constexpr):
    """Sum at most 128 values each, in eight turns as `rounding_cpu.power` does."""
    leaf = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    lane = tl.arange(0, 8)
    size = tl.load(sizes + leaf, mask=leaf < n_leaves, other=0)
    begin = tl.load(ends + leaf, mask=leaf < n_leaves, other=0) - size
    whole = size // 8
    turns = tl.zeros([LEAVES, 8], tl.float64)
    for step in tl.range(16):
        inside = (step < whole)[:, None] & (lane >= 0)[None, :]
        turns += tl.load(values + begin[:, None] + 8 * step + lane[None, :], mask=inside, other=0.0)
    for distance in tl.static_range(3):  # neighbours, then pairs, then the halves
        turns += tl.gather(turns, (lane ^ (1 << distance))[None, :] + tl.zeros([LEAVES, 8], tl.int32), 1)
    total = tl.sum(tl.where(lane[None, :] == 0, turns, 0.0), axis=1)
    for rest in tl.static_range(7):
        at = 8 * whole + rest
        total += tl.load(values + begin + at, mask=at < size, other=0.0)
    tl.store(sums + leaf, total, mask=leaf < n_leaves)


@functools.lru_cache(maxsize=64)
def _pairs(n: int) -> tuple[Counts, tuple[np.ndarray, ...]]:
    """Cut n values in halves down to 128 or fewer: sizes of the leaves, and what was cut, the last first."""
    sizes, cuts = np.array([n]), []
    while (is_cut := sizes > LEAF).any():
        half = sizes // 2 // 8 * 8
        parts = np.stack([np.where(is_cut, half, sizes), sizes - half], axis=1)
        sizes = parts[np.stack([np.ones_like(is_cut), is_cut], axis=1)]
        cuts.append(is_cut)
    return sizes, tuple(reversed(cuts))


def sums_of_pairs(values: Tensor, sizes: Sequence[int]) -> list[float]:
    """Sum float64 [n] in parts of these sizes, pairs of pairs as numpy does; see `rounding_cpu.power`."""
    leaves = [_pairs(size)[0] for size in sizes]
    n_leaves, every = sum(map(len, leaves)), np.concatenate(leaves)
    sums = torch.empty(n_leaves, dtype=torch.float64, device=values.device)
    ends, counts = (torch.from_numpy(a).to(values.device) for a in (np.cumsum(every), every))
    given = values, ends, counts, sums, n_leaves
    _leaf_sums[(triton.cdiv(n_leaves, LEAVES),)](*given, LEAVES, **EXACT)
    parts = np.split(sums.cpu().numpy(), np.cumsum([len(part) for part in leaves])[:-1])
    return [_folded(part, _pairs(size)[1]) for part, size in zip(parts, sizes, strict=True)]


def _folded(sums: np.ndarray, cuts: Sequence[np.ndarray]) -> float:
    """Add up what was cut, the last halves first."""
    for is_cut in cuts:
        first = np.cumsum(1 + is_cut) - 1 - is_cut
        folded = sums[first]
        folded[is_cut] += sums[first[is_cut] + 1]
        sums = folded
    return float(sums[0])


@triton.jit
def _run_sums(values, ends, sums, n_runs, RUNS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    end = tl.load(ends + i, mask=i < n_runs, other=0)
    begin = tl.load(ends + i - 1, mask=(i > 0) & (i < n_runs), other=0)
    total = tl.zeros([RUNS], tl.float64)
    for step in tl.range(0, tl.max(end - begin, axis=0), loop_unroll_factor=8):
        total += tl.load(values + begin + step, mask=begin + step < end, other=0.0)
    tl.store(sums + i, total, mask=i < n_runs)


def sums_of_runs(values: Tensor, ends: Tensor) -> Tensor:
    """Sum runs of float64 [n] up to ends int64 [n_runs], one value after another: float64 [n_runs]."""
    n_runs = len(ends)
    sums = torch.empty(n_runs, dtype=torch.float64, device=values.device)
    if n_runs:
        _run_sums[(triton.cdiv(n_runs, RUNS),)](values, ends, sums, n_runs, RUNS, num_warps=1, **EXACT)
    return sums


# --- packing ------------------------------------------------------------------------------------


@triton.jit
def _pack(codes, packed, n, n_bytes, N_BITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(8):
        at = (8 * i + j) // N_BITS
        code = tl.load(codes + at, mask=(at < n) & (i < n_bytes), other=0).to(tl.int32)
        held |= ((code >> ((8 * i + j) % N_BITS).to(tl.int32)) & 1) << j
    tl.store(packed + i, held.to(tl.uint8), mask=i < n_bytes)


@triton.jit
def _unpack(packed, codes, n, n_bytes, N_BITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = i * N_BITS // 8
    low = tl.load(packed + at, mask=at < n_bytes, other=0).to(tl.int32)
    both = low | (tl.load(packed + at + 1, mask=at + 1 < n_bytes, other=0).to(tl.int32) << 8)
    code = (both >> (i * N_BITS % 8).to(tl.int32)) & ((1 << N_BITS) - 1)
    tl.store(codes + i, code.to(tl.uint8), mask=i < n)


def pack_codes(codes: Tensor, n_bits: int) -> Tensor:
    """Pack codes uint8 [n] below 2^n_bits, n_bits 1..8, lowest bit first: uint8 [ceil(n * n_bits / 8)]."""
    n, n_bytes = len(codes), (len(codes) * n_bits + 7) // 8
    packed = torch.empty(n_bytes, dtype=torch.uint8, device=codes.device)
    _pack[(triton.cdiv(n_bytes, BLOCK),)](codes, packed, n, n_bytes, n_bits, BLOCK)
    return packed


def unpack_codes(packed: Tensor, n_bits: int, out: Tensor) -> None:
    """Undo `pack_codes`, into `out` uint8 [n]."""
    n = len(out)
    _unpack[(triton.cdiv(n, BLOCK),)](packed, out, n, len(packed), n_bits, BLOCK)
