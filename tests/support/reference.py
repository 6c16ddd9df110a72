"""The definitions of the kernels in plain numpy, which are slow.

Every function has the same name and signature as one in a module of `ckptz.kernels`; parity tests compare the
two. Definitions that the package itself uses are imported from there.
"""

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.floats import (  # noqa: F401 - some are kernels as they are
    BF16,
    DIFFERENCE,
    ESCAPE,
    F16,
    F32,
    MAX_MAGNITUDE,
    N_BUCKETS,
    NEAREST,
    ORDERED_DIFFERENCE,
    ROTATED,
    TINY_EXPONENT,
    XOR,
    Bytes,
    Counts,
    Patterns,
    all_finite,
    from_f32,
    order,
    outer_product,
    region_codes,
    round_f64,
    to_f32,
    widen_f64,
)
from ckptz.kernels.plain import (  # noqa: F401
    ascending,
    count_streams,
    entropies,
    golomb_unpack,
    histogram,
    huffman_decode,
    huffman_encode,
    huffman_lengths,
    merge_planes,
    normalise,
    pack_tables,
    rans_decode,
    rans_encode,
    repeats,
    restore,
    slot_tables,
    split_planes,
    table_unpack,
    transform,
    unorder,
)
from ckptz.kernels.rounding_cpu import GOLDEN, MIX_1, MIX_2

Floats = NDArray[np.float32]


# --- contexts ------------------------------------------------------------------------------------


def magnitudes(patterns: Patterns) -> Bytes:
    """Return the eight bits below the sign bit [n], or seven of one-byte patterns: F32 and BF16 exponents."""
    if patterns.itemsize == 1:
        return patterns & np.uint8(0x7F)
    shift = patterns.dtype.type(8 * patterns.itemsize - 9)
    return ((patterns >> shift) & patterns.dtype.type(0xFF)).astype(np.uint8)


def context_histogram(contexts: Patterns, symbols: Bytes, n_contexts: int, shift: int) -> Counts:
    """Count the occurrences of each byte below 2^shift within each context: [n_contexts, 2^shift]."""
    joint = (contexts.astype(np.int64) << shift) + symbols
    return np.bincount(joint, minlength=n_contexts << shift).astype(np.int64).reshape(n_contexts, -1)


def context_counts(contexts: Patterns, ends: Counts, n_contexts: int) -> NDArray[np.uint32]:
    """Count the patterns of each context in each third of tensors [m] that end there: [m, n_contexts, 3].

    The last third also has the remainder.
    """
    counts = np.zeros((len(ends), n_contexts, 3), np.uint32)
    for t, tensor_contexts in enumerate(np.split(contexts.astype(np.int64), ends[:-1])):
        thirds = np.split(tensor_contexts, np.arange(1, 3) * (len(tensor_contexts) // 3))
        counts[t] = np.transpose([np.bincount(third, minlength=n_contexts) for third in thirds])
    return counts


def group(
    symbols: Patterns, contexts: Patterns, ends: Counts, counts: NDArray[np.uint32] | None = None
) -> Patterns:
    """Sort symbols [n] of tensors [m] in the order of their contexts [n], stable within a context."""
    del counts
    parts = zip(np.split(symbols, ends[:-1]), np.split(contexts, ends[:-1]), strict=True)
    return np.concatenate([part[np.argsort(labels, kind="stable")] for part, labels in parts])


def ungroup(grouped: Patterns, contexts: Patterns, counts: NDArray[np.uint32] | None, out: Patterns) -> None:
    """Undo `group` of one tensor, into `out` [n]."""
    del counts
    out[np.argsort(contexts, kind="stable")] = grouped


# --- values -------------------------------------------------------------------------------------


def top_histogram(patterns: Patterns) -> Counts:
    """Count the top 16 bits of each pattern of two or four bytes: [65536]."""
    top = patterns if patterns.itemsize == 2 else patterns >> np.uint32(16)
    return np.bincount(top, minlength=N_BUCKETS).astype(np.int64)


def _add_tiny(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Add F32 patterns below 2^-100 in units of 2^-149, rounded to nearest even."""

    def integer(pattern: NDArray[np.uint32]) -> NDArray[np.int64]:
        exponent = (pattern >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64)
        mantissa = (pattern & np.uint32(0x7FFFFF)).astype(np.int64)
        magnitude = np.where(exponent > 0, mantissa | 1 << 23, mantissa) << np.maximum(exponent - 1, 0)
        return np.where(pattern >> np.uint32(31), -magnitude, magnitude)

    total = integer(a) + integer(b)
    magnitude = np.abs(total)
    # 24 significant bits stay: frexp is exact for the at most 51 bits that occur.
    shift = np.maximum(np.frexp(magnitude.astype(np.float64))[1].astype(np.int64) - 24, 0)
    kept = magnitude >> shift
    remainder, half = magnitude - (kept << shift), (np.int64(1) << shift) >> 1
    kept += (shift > 0) & ((remainder > half) | ((remainder == half) & (kept & 1 == 1)))
    pattern = np.where(magnitude < 1 << 24, magnitude, kept + (shift << 23))
    both_negative_zero = (a == np.uint32(1 << 31)) & (b == np.uint32(1 << 31))
    return (pattern | ((total < 0) | both_negative_zero) << 31).astype(np.uint32)


def add_f32(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Sum F32 patterns [n] as IEEE does, also where the processor flushes subnormal numbers to zero.

    Flushing can only matter if both numbers are below 2^-100: next to a larger one, a subnormal number is
    under half a unit in the last place, and differences of larger ones are multiples of 2^-124.
    """
    mask, limit = np.uint32(0xFF), np.uint32(TINY_EXPONENT)
    is_tiny = (a >> np.uint32(23) & mask < limit) & (b >> np.uint32(23) & mask < limit)
    with np.errstate(all="ignore"):
        total = (a.view(np.float32) + b.view(np.float32)).view(np.uint32)
    total[is_tiny] = _add_tiny(a[is_tiny], b[is_tiny])
    return total


def lookup(codes: Bytes, rows: Patterns, table: Patterns, out: Patterns) -> None:
    """Look up table[row, code] of each element; `rows` may have one entry for all."""
    out[:] = table[rows, codes]


def add_linear(
    base: Patterns, codes: Bytes, rows: Patterns, table: NDArray[np.uint32], kind: int, out: Patterns
) -> None:
    """Compute cast(base + table[row, code]); `table` and sums are F32 patterns, base and out of `kind`."""
    out[:] = from_f32(add_f32(to_f32(base, kind), table[rows, codes]), kind)


def add_bits(base: Patterns, codes: Bytes, rows: Patterns, table: Patterns, out: Patterns) -> None:
    """Compute unorder(order(base) + table[row, code]) modulo the width of the pattern."""
    out[:] = unorder(order(base) + table[rows, codes])


# --- packing ------------------------------------------------------------------------------------


def pack_codes(codes: Bytes, n_bits: int) -> Bytes:
    """Pack codes [n] below 2^n_bits, n_bits 1..8, one after another, least significant bit first."""
    bits = np.unpackbits(codes.reshape(-1, 1), axis=1, count=n_bits, bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little")


def unpack_codes(packed: Bytes, n_bits: int, out: Bytes) -> None:
    """Undo `pack_codes`, into `out` [n]."""
    bits = np.unpackbits(packed, count=n_bits * len(out), bitorder="little").reshape(-1, n_bits)
    out[:] = np.packbits(bits, axis=1, bitorder="little")[:, 0]


# --- rounding by thresholds ---------------------------------------------------------------------


def _mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX_1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(MIX_2)
    return x ^ (x >> np.uint32(16))


def thresholds(key: int, begin: int, n: int) -> Floats:
    """Return the thresholds of elements begin..begin+n, uniform in [0, 1) [n].

    Args:
        key: 32 bits, or NEAREST.
        begin: index of the first element.
        n: elements.
    """
    if key == NEAREST:
        return np.full(n, 0.5, np.float32)
    index = np.arange(begin, begin + n, dtype=np.uint64)
    low, high = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        seeded = _mixed(high * np.uint32(GOLDEN) + np.uint32(key))
        drawn = _mixed(low * np.uint32(GOLDEN) ^ seeded)
    return (drawn >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def grid_codes(scaled: Floats, dead_zone: float, key: int, begin: int) -> Bytes:
    """Round values in units of a step: code 0 for zero, 2 m - 1 for +m, 2 m for -m, ESCAPE beyond 127.

    The magnitude and sign are those of floor(value + threshold). A dead zone widens zero alone.

    Args:
        scaled: finite [n].
        dead_zone: additional share of a step on both sides of zero; 0 where thresholds are drawn.
        key: of the thresholds, or NEAREST.
        begin: index of the first value in its tensor.
    """
    if key == NEAREST:  # rounds halves away from zero
        magnitude = np.floor(np.abs(scaled) + np.float32(0.5))
        magnitude[np.abs(scaled) < np.float32(0.5 + dead_zone)] = 0
        is_positive = scaled > 0
    else:
        lower = np.floor(scaled)
        lower += thresholds(key, begin, len(scaled)) >= np.float32(1) - (scaled - lower)
        magnitude, is_positive = np.abs(lower), lower > 0
    codes = 2 * np.minimum(magnitude, np.float32(MAX_MAGNITUDE)) - is_positive
    codes[magnitude == 0] = 0
    codes[~(magnitude <= MAX_MAGNITUDE)] = ESCAPE
    return codes.astype(np.uint8)


def residual_codes(
    values: Floats,
    base: Floats | None,
    steps: Floats,
    labels: Bytes,
    row_patterns: int,
    dead_zone: float,
    key: int,
    begin: int,
) -> Bytes:
    """Round the differences of values and their base in units of each row's step; see `grid_codes`.

    Args:
        values: finite [n].
        base: finite [n], or None for zero.
        steps: step of each context of rows, above 0 [n_contexts].
        labels: context of each row [n_rows].
        row_patterns: elements of a row.
        dead_zone: see `grid_codes`.
        key: see `grid_codes`.
        begin: index of the first value in its tensor.
    """
    return grid_codes(_scaled(values, base, steps, labels, row_patterns, begin), dead_zone, key, begin)


def _scaled(
    values: Floats, base: Floats | None, steps: Floats, labels: Bytes, row_patterns: int, begin: int
) -> Floats:
    residual = values if base is None else values - base
    rows = np.arange(begin, begin + len(values)) // row_patterns
    scaled: Floats = residual / steps[labels[rows]]
    return scaled


# --- optimizer state ----------------------------------------------------------------------------


def log_level_indices(
    patterns: Patterns, predicted: Patterns, log_levels: tuple[int, ...], kind: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_], Floats]:
    """Find the level of each pattern [n]; `predicted` are patterns [n], or none for a prediction of zero.

    Args:
        patterns: bit patterns of a kind, not negative.
        predicted: any bit patterns.
        logarithmic levels: step, phase, bit of the sign, all bits, largest pattern.
        kind: F32, BF16 or F16.

    Returns:
        Indices of levels; whether all that they may come to stand for is a finite number above zero; and
        roots of the elements in roots of their level, of the smallest number where that is zero or below.
    """
    step, phase, zero, _, largest = log_levels
    origin = order(predicted).astype(np.int64) if len(predicted) else np.full(len(patterns), zero)
    indices = (order(patterns).astype(np.int64) - origin - phase + step // 2) // step
    restored = origin + indices * step + phase
    is_level = restored + step // 2 <= zero + largest
    if len(predicted):
        is_level &= restored - step // 2 > zero
    nominal = np.where(is_level, np.maximum(restored - zero, 1), 1).astype(patterns.dtype)
    exact, levels = (to_f32(u, kind).view(np.float32) for u in (patterns, nominal))
    with np.errstate(over="ignore"):
        return indices, is_level, np.sqrt(exact / levels)


def log_sums(
    patterns: NDArray[np.uint32], begin: int, shape: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum binary logarithms of F32 patterns [n] above zero, of a matrix from element `begin` on.

    Returns sums and numbers by row [2, n_rows] and by column [2, n_columns].
    """
    values = widen_f64(patterns)
    positions = begin + np.flatnonzero(values > 0)
    logarithms = np.log2(values[values > 0])
    by_both = zip(np.divmod(positions, shape[1]), shape, strict=True)
    rows, columns = (
        np.stack([np.bincount(index, logarithms, n), np.bincount(index, minlength=n)]) for index, n in by_both
    )
    return rows, columns


def level_indices(
    values: NDArray[np.float64], steps: NDArray[np.float64], dead_zone: float
) -> NDArray[np.int64]:
    """Find the level of each value, 0 in the dead zone, and 128 or -128 beyond the last level.

    Args:
        values: finite [n].
        steps: of each [n], 0 where there is none: such values are level 0 if they are zero.
        dead_zone: share of a step.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = np.where(values == 0, 0.0, np.abs(values) / steps)
    multiples = np.minimum(np.maximum(np.rint(ratios), 1), MAX_MAGNITUDE + 1)
    return (np.sign(values) * np.where(ratios < 0.5 + dead_zone, 0, multiples)).astype(np.int64)


# --- Exp-Golomb codes ---------------------------------------------------------------------------


def golomb_pack(values: NDArray[np.uint16], order: int) -> Bytes:
    """Pack values as Exp-Golomb codes of `order`, least significant bit first, zero-padded to a byte.

    With u = value + 2^order of b bits: b - 1 - order zero bits, a one bit, then the b - 1 bits below
    the leading one of u.
    """
    bits: list[int] = []
    for value in values.tolist():
        u = value + (1 << order)
        n_low = u.bit_length() - 1
        bits += [0] * (n_low - order) + [1] + [u >> j & 1 for j in range(n_low)]
    return np.packbits(np.array(bits, np.uint8), bitorder="little")
