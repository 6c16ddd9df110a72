"""The kernels in plain numpy: slow, and the definition of what the fast ones must return.

Every function here stands under the same name and signature in `codec_cpu.py`; parity tests hold the two
equal. Arrays in, arrays out; nothing here knows a format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Units = NDArray[Any]  # unsigned integers of 1, 2, 4 or 8 bytes
Counts = NDArray[np.int64]

RAW, ROTATED, XOR, DIFFERENCE, ORDERED_DIFFERENCE = range(5)

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
STATE_LOW = 1 << 16
MAX_GAP_BYTE = 255
MAX_TABLE_ORDER = 11  # of the codes of a frequency table
MAX_GOLOMB_BITS = 16  # longest tail of a code: values are below 2^16


# --- bit patterns -------------------------------------------------------------------------------


def order(units: Units) -> Units:
    """Turn float patterns [...] into integers in the order of the values; -0.0 just below 0.0."""
    top = units.dtype.type(1 << (8 * units.itemsize - 1))
    return np.where(units & top, ~units, units | top)


def unorder(units: Units) -> Units:
    """Undo `order`, units [...]."""
    top = units.dtype.type(1 << (8 * units.itemsize - 1))
    return np.where(units & top, units & ~top, ~units)


def _rotate(units: Units, n_left: int) -> Units:
    width = 8 * units.itemsize
    left, right = units.dtype.type(n_left % width), units.dtype.type((width - n_left) % width)
    return (units << left) | (units >> right)


def _zeros(like: Units) -> Units:
    """Zeros of the same type, so that subtraction wraps as unsigned."""
    return np.zeros_like(like)


def _zigzag(difference: Units) -> Units:
    top = difference.dtype.type(8 * difference.itemsize - 1)
    one = difference.dtype.type(1)
    return (difference << one) ^ (_zeros(difference) - (difference >> top))


def _unzigzag(code: Units) -> Units:
    one = code.dtype.type(1)
    return (code >> one) ^ (_zeros(code) - (code & one))


def split_planes(units: Units, base: Units, mode: int) -> Bytes:
    """Split the bytes of each unit after `mode` into planes: [unit bytes, n], least significant first."""
    if mode == ROTATED:
        units = _rotate(units, 1)
    elif mode == XOR:
        units = units ^ base
    elif mode == DIFFERENCE:
        units = _zigzag(units - base)
    elif mode == ORDERED_DIFFERENCE:
        units = _zigzag(order(units) - order(base))
    return np.ascontiguousarray(units.reshape(-1, 1).view(np.uint8).T)


def merge_planes(planes: Sequence[Bytes], base: Units, mode: int, out: Units) -> None:
    """Undo `split_planes`, into `out`; each plane is an array [n]."""
    units = np.ascontiguousarray(np.stack(planes).T).view(out.dtype).reshape(-1)
    if mode == ROTATED:
        units = _rotate(units, 8 * out.itemsize - 1)
    elif mode == XOR:
        units = units ^ base
    elif mode == DIFFERENCE:
        units = base + _unzigzag(units)
    elif mode == ORDERED_DIFFERENCE:
        units = unorder(order(base) + _unzigzag(units))
    out[:] = units


# --- classes ------------------------------------------------------------------------------------


def magnitude_classes(units: Units) -> Bytes:
    """Give the eight bits below the sign bit (for one-byte units: seven): the exponent of F32 and BF16."""
    if units.itemsize == 1:
        return units & np.uint8(0x7F)
    shift = units.dtype.type(8 * units.itemsize - 9)
    return ((units >> shift) & units.dtype.type(0xFF)).astype(np.uint8)


def histogram(symbols: Bytes) -> Counts:
    """Count the occurrences of each byte: [256]."""
    return np.bincount(symbols, minlength=256).astype(np.int64)


def class_histogram(classes: Units, symbols: Bytes, n_classes: int) -> Counts:
    """Count the occurrences of each byte within each class: [n_classes, 256]."""
    joint = classes.astype(np.int64) * 256 + symbols
    return np.bincount(joint, minlength=n_classes * 256).astype(np.int64).reshape(n_classes, 256)


def group(symbols: Bytes, classes: Units, n_classes: int) -> Bytes:
    """Sort symbols [n] in the order of their classes [n], stable within a class."""
    del n_classes
    return symbols[np.argsort(classes, kind="stable")]


def ungroup(grouped: Bytes, classes: Units, n_classes: int, out: Bytes) -> None:
    """Undo `group`, into `out` [n]."""
    del n_classes
    out[np.argsort(classes, kind="stable")] = grouped


# --- values -------------------------------------------------------------------------------------

F32, BF16, F16 = range(3)  # the float types that have values, not only bit patterns
N_BUCKETS = 1 << 16
TINY_EXPONENT = 27  # sums of two floats below 2^-100 are made of integers, see `add_f32`


def top_histogram(units: Units) -> Counts:
    """Count the top 16 bits of each unit of two or four bytes: [65536]."""
    top = units if units.itemsize == 2 else units >> np.uint32(16)
    return np.bincount(top, minlength=N_BUCKETS).astype(np.int64)


def region_codes(units: Units, boundaries: Units, codes: Bytes) -> Bytes:
    """Give codes[r] of each unit, r the number of boundaries at or below it in the order of the values.

    `boundaries` are ascending results of `order`; `codes` has one more entry.
    """
    return codes[np.searchsorted(boundaries, order(units), side="right")]


def to_f32(units: Units, kind: int) -> NDArray[np.uint32]:
    """Convert units [...] to the bit patterns of F32, exactly."""
    if kind == BF16:
        return units.astype(np.uint32) << np.uint32(16)
    if kind == F16:
        return units.view(np.float16).astype(np.float32).view(np.uint32)
    return units.astype(np.uint32)


def from_f32(patterns: NDArray[np.uint32], kind: int) -> Units:
    """Round F32 patterns [...] to nearest, ties to even; spec/04-quantization.md#cast."""
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


def _add_tiny(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Sum of patterns below 2^-100, in units of 2^-149, rounded to nearest even."""

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
    rest, half = magnitude - (kept << shift), (np.int64(1) << shift) >> 1
    kept += (shift > 0) & ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    pattern = np.where(magnitude < 1 << 24, magnitude, kept + (shift << 23))
    both_negative_zero = (a == np.uint32(1 << 31)) & (b == np.uint32(1 << 31))
    return (pattern | ((total < 0) | both_negative_zero) << 31).astype(np.uint32)


def add_f32(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Sum F32 patterns [n] as IEEE does, also where the processor flushes subnormal numbers to zero.

    Flushing can only matter if both numbers are below 2^-100: beside a larger one a subnormal number is
    under half a unit in the last place, and differences of larger ones are multiples of 2^-124.
    """
    mask, limit = np.uint32(0xFF), np.uint32(TINY_EXPONENT)
    is_tiny = (a >> np.uint32(23) & mask < limit) & (b >> np.uint32(23) & mask < limit)
    with np.errstate(all="ignore"):
        total = (a.view(np.float32) + b.view(np.float32)).view(np.uint32)
    total[is_tiny] = _add_tiny(a[is_tiny], b[is_tiny])
    return total


def lookup(codes: Bytes, rows: Units, table: Units, out: Units) -> None:
    """Look up table[row, code] of each element; `rows` may have one entry for all."""
    out[:] = table[rows, codes]


def add_linear(
    base: Units, codes: Bytes, rows: Units, table: NDArray[np.uint32], kind: int, out: Units
) -> None:
    """Compute cast(base + table[row, code]); `table` and sums are F32 patterns, base and out of `kind`."""
    out[:] = from_f32(add_f32(to_f32(base, kind), table[rows, codes]), kind)


def add_bits(base: Units, codes: Bytes, rows: Units, table: Units, out: Units) -> None:
    """Compute unorder(order(base) + table[row, code]) modulo the width of the unit."""
    out[:] = unorder(order(base) + table[rows, codes])


def all_finite(units: Units, kind: int) -> bool:
    """Tell whether no unit is an infinity or NaN."""
    exponent = units.dtype.type((0x7F800000, 0x7F80, 0x7C00)[kind])
    return not bool(((units & exponent) == exponent).any())


def outer_product(
    rows: NDArray[np.uint32], columns: NDArray[np.uint32], begin: int, end: int
) -> NDArray[np.uint32]:
    """Compute F32 patterns of rows[i] * columns[j] for elements begin..end of the matrix, subnormals kept."""
    element = np.arange(begin, end)
    a, b = rows[element // len(columns)], columns[element % len(columns)]
    # The double product of two F32 numbers is exact; one rounding follows, by integers.
    return round_f64(widen_f64(a) * widen_f64(b))


def widen_f64(patterns: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Convert F32 patterns [n] to doubles; subnormal ones by integers, which no processor mode flushes."""
    with np.errstate(invalid="ignore"):
        values = patterns.view(np.float32).astype(np.float64)
    is_subnormal = (patterns & np.uint32(0x7F800000)) == 0
    steps = (patterns & np.uint32(0x7FFFFF)).astype(np.float64) * 2.0**-149
    signed = np.where(patterns >> np.uint32(31), -steps, steps)
    return np.where(is_subnormal, signed, values)


def round_f64(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Round doubles [n] to F32 patterns, to nearest even, subnormals kept by integer arithmetic."""
    with np.errstate(all="ignore"):
        rounded = values.astype(np.float32).view(np.uint32)
    is_tiny = (np.abs(values) < 2.0**-125) & (values != 0)
    # Scaled by 2^149 the subnormal numbers are the integers; rint rounds ties to even.
    steps = np.rint(np.abs(values[is_tiny]) * 2.0**149).astype(np.uint32)
    rounded[is_tiny] = steps | (np.signbit(values[is_tiny]).astype(np.uint32) << np.uint32(31))
    return rounded


# --- packing ------------------------------------------------------------------------------------


def pack_codes(codes: Bytes, n_bits: int) -> Bytes:
    """Pack codes [n] below 2^n_bits, n_bits 1..8, one after another, least significant bit first."""
    bits = np.unpackbits(codes.reshape(-1, 1), axis=1, count=n_bits, bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little")


def unpack_codes(packed: Bytes, n_bits: int, out: Bytes) -> None:
    """Undo `pack_codes`, into `out` [n]."""
    bits = np.unpackbits(packed, count=n_bits * len(out), bitorder="little").reshape(-1, n_bits)
    out[:] = np.packbits(bits, axis=1, bitorder="little")[:, 0]


# --- rANS ---------------------------------------------------------------------------------------


def slot_tables(frequencies: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Make decoding tables [n_tables, 4096]: symbol | (frequency - 1) << 8 | (slot - start) << 20."""
    tables = np.zeros((len(frequencies), SCALE), np.uint32)
    for table, row in zip(tables, frequencies.astype(np.int64), strict=True):
        starts = np.cumsum(row) - row
        symbols = np.repeat(np.arange(256), row)
        table[:] = symbols | (row[symbols] - 1) << 8 | (np.arange(SCALE) - starts[symbols]) << 20
    return tables


def rans_encode(
    symbols: Bytes, ends: Counts, table_of: Counts, frequencies: NDArray[np.uint16], n_lanes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Encode symbols: final lane states [n_lanes] and 16-bit words, in the order the decoder reads them.

    Segment s is symbols[ends[s-1]:ends[s]] and uses frequencies[table_of[s]] [n_tables, 256].
    """
    states = [STATE_LOW] * n_lanes
    words: list[int] = []
    rows = [[int(f) for f in row] for row in frequencies]
    starts = [[int(f) for f in np.cumsum(row) - row] for row in frequencies.astype(np.int64)]
    segment_of = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    for i in range(len(symbols) - 1, -1, -1):
        table, symbol, lane = int(table_of[segment_of[i]]), int(symbols[i]), i % n_lanes
        frequency, state = rows[table][symbol], states[lane]
        if state >= frequency << (32 - SCALE_BITS):
            words.append(state & 0xFFFF)
            state >>= 16
        states[lane] = (state // frequency << SCALE_BITS) + state % frequency + starts[table][symbol]
    return np.array(states, np.uint32), np.array(words[::-1], np.uint16)


def rans_decode(
    words: NDArray[np.uint16],
    states: NDArray[np.uint32],
    ends: Counts,
    table_of: Counts,
    tables: NDArray[np.uint32],
    out: Bytes,
) -> bool:
    """Decode `out` [n]; False unless all words are used and every lane ends in 2^16."""
    lanes, n_lanes, position, begin = [int(s) for s in states], len(states), 0, 0
    for end, table in zip(ends.tolist(), table_of.tolist(), strict=True):
        for i in range(begin, end):
            state = lanes[i % n_lanes]
            entry = int(tables[table, state & (SCALE - 1)])
            out[i] = entry & 0xFF
            state = ((entry >> 8 & 0xFFF) + 1) * (state >> SCALE_BITS) + (entry >> 20)
            if state < STATE_LOW:
                if position == len(words):
                    return False
                state = state << 16 | int(words[position])
                position += 1
            lanes[i % n_lanes] = state
        begin = end
    return position == len(words) and all(state == STATE_LOW for state in lanes)


# --- sparse -------------------------------------------------------------------------------------


def sparse_split(symbols: Bytes, common: int) -> tuple[Bytes, Bytes]:
    """Split symbols: (gap bytes, values) of those other than `common`.

    A gap is the number of common symbols before a value: as many bytes 255 as it holds 255, then the rest.
    """
    positions = np.flatnonzero(symbols != common)
    gaps = np.diff(positions, prepend=-1) - 1
    parts = [bytes([MAX_GAP_BYTE]) * (gap // MAX_GAP_BYTE) + bytes([gap % MAX_GAP_BYTE]) for gap in gaps]
    return np.frombuffer(b"".join(parts), np.uint8).copy(), symbols[positions]


def sparse_merge(gaps: Bytes, values: Bytes, out: Bytes) -> bool:
    """Write `values` [k] into `out` [n], which holds the common symbol; False if gaps and values disagree."""
    position, n_values = 0, 0
    for gap in gaps.tolist():
        position += gap
        if gap == MAX_GAP_BYTE:
            continue
        if position >= len(out) or n_values == len(values):
            return False
        out[position] = values[n_values]
        position += 1
        n_values += 1
    return n_values == len(values) and (len(gaps) == 0 or bool(gaps[-1] != MAX_GAP_BYTE))


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


def golomb_unpack(source: Bytes, n_values: int, order: int, out: NDArray[np.uint16]) -> int:
    """Decode `n_values` codes into `out`; bytes used, or -1 if they end early or exceed 16 bits."""
    bits = np.unpackbits(source, bitorder="little").tolist()
    position = 0
    for i in range(n_values):
        n_low = order
        while position < len(bits) and not bits[position]:
            position += 1
            n_low += 1
        if n_low > MAX_GOLOMB_BITS or position + 1 + n_low > len(bits):
            return -1
        low = sum(bit << j for j, bit in enumerate(bits[position + 1 : position + 1 + n_low]))
        position += 1 + n_low
        value = (1 << n_low | low) - (1 << order)
        if value > 0xFFFF:
            return -1
        out[i] = value
    return -1 if any(bits[position : -(-position // 8) * 8]) else -(-position // 8)


def table_unpack(source: Bytes, out: NDArray[np.uint16]) -> int:
    """Read a packed frequency table into `out` [256]; returns the bytes used, or -1 if it is none.

    spec/02-entropy.md#frequency-table: first and last symbol, order, codes of all frequencies but the last.
    """
    if len(source) < 3 or source[1] < source[0] or source[2] > MAX_TABLE_ORDER:
        return -1
    first, last, order = (int(byte) for byte in source[:3])
    out[:] = 0
    used = golomb_unpack(source[3:], last - first, order, out[first:last])
    left = SCALE - int(out.sum(dtype=np.int64))
    if used < 0 or left < 1:
        return -1
    out[last] = left
    return 3 + used if out[first] else -1
