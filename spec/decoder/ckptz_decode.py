#!/usr/bin/env python3
"""A decoder of .ckptz files, written from the pages of the folder above and from nothing else.

It is meant to be read beside them: the sections follow the pages, and a comment quotes the sentence that the
code below it implements, as ``page#anchor: "sentence"``. It is made for clarity and not for speed, and needs
the standard library only; streams of coder zstd alone need the package ``zstandard``.

    python ckptz_decode.py FILE [--base FILE]... [-o OUT.safetensors] [--json] [--limit BYTES]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# ------------------------------------------------------------------------------------------ 00-conventions

TRUNCATED, CHECKSUM, CORRUPT = "truncated", "checksum", "corrupt"
UNSUPPORTED, MISSING, LIMIT = "unsupported", "missing-base", "limit"


class Refusal(Exception):
    """00-conventions#words: "give an error instead of a result"; `rule` is an id of a table of refusals."""

    def __init__(self, kind: str, rule: str, message: str) -> None:
        super().__init__(f"{kind}: {rule}: {message}")
        self.kind = kind


def refuse(kind: str, rule: str, message: str) -> NoReturn:
    """Give up."""
    raise Refusal(kind, rule, message)


def need(condition: object, kind: str, rule: str, message: str) -> None:
    """Refuse unless the condition holds."""
    if not condition:
        refuse(kind, rule, message)


def product_of(sizes: Iterable[int]) -> int:
    """00-conventions#shapes: "the product of the sizes, 1 for the empty list", refused beyond 64 bits."""
    total = 1
    for size in sorted(sizes):  # the zeros first: 00-conventions: "Sizes are multiplied in integers that
        total *= size  # cannot overflow"
        need(total < 2**64, "F7", "a shape of 2^64 elements or more")
    return total


# ------------------------------------------------------------------------------------------------ registry


@dataclass(frozen=True)
class Dtype:
    """registry#dtypes."""

    id: int
    name: str
    bits: int
    size: int  # bytes of a unit
    float: bool

    def units(self, shape: list[int]) -> int:
        """00-conventions#shapes: "elements * bits of an element / 8 / bytes of a unit"."""
        bits = product_of(shape) * self.bits
        need(bits % 8 == 0, "F8", "elements that do not fill whole bytes")
        return bits // 8 // self.size


DTYPES = [
    Dtype(*row)
    for row in [
        (1, "BOOL", 8, 1, False), (2, "U8", 8, 1, False), (3, "I8", 8, 1, False),
        (4, "U16", 16, 2, False), (5, "I16", 16, 2, False), (6, "U32", 32, 4, False),
        (7, "I32", 32, 4, False), (8, "U64", 64, 8, False), (9, "I64", 64, 8, False),
        (10, "F16", 16, 2, True), (11, "BF16", 16, 2, True), (12, "F32", 32, 4, True),
        (13, "F64", 64, 8, True), (14, "C64", 64, 4, True), (15, "F8_E4M3", 8, 1, True),
        (16, "F8_E5M2", 8, 1, True), (17, "F8_E4M3FNUZ", 8, 1, True), (18, "F8_E5M2FNUZ", 8, 1, True),
        (19, "F8_E8M0", 8, 1, False), (20, "F4", 4, 1, False), (21, "F6_E2M3", 6, 1, False),
        (22, "F6_E3M2", 6, 1, False),
    ]
]  # fmt: skip
DTYPE_OF_ID = {dtype.id: dtype for dtype in DTYPES}
DTYPE_OF_NAME = {dtype.name: dtype for dtype in DTYPES}
LETTER = {1: "B", 2: "H", 4: "I", 8: "Q"}  # for struct

CONSTANT, STORED, ZSTD, RANS_SHARED, RANS_OWN, SPARSE = range(6)  # registry#coders
LANES = (1, 4, 32)  # registry#lanes
PLANES, LINEAR, BITS = range(3)  # registry#domains
ZERO, BASE, OUTER = range(3)  # registry#predictors
FLAG_ZERO, FLAG_ESCAPE, FLAG_PROTECTED = 1, 2, 4  # registry#frame-flags
RAW, ROTATED, XOR, DIFFERENCE = range(4)  # registry#plane-modes
MAGNITUDE, ROW, BLOCK, BASE_CODE = range(1, 5)  # registry#class-rules
EXPLICIT, EXPANDED = range(2)  # registry#table-kinds
FEATURES = {"lossless", "delta", "maps"}  # registry#features
CHUNK = 2**20  # 05-frame#chunks: "A chunk is 1,048,576 = 2^20 units"


def unpack(size: int, data: bytes) -> tuple[int, ...]:
    """Unsigned little-endian integers of `size` bytes each."""
    return struct.unpack(f"<{len(data) // size}{LETTER[size]}", data)


def pack(size: int, units: list[int]) -> bytes:
    """The bytes of unsigned integers, little-endian."""
    return struct.pack(f"<{len(units)}{LETTER[size]}", *units)


# --------------------------------------------------------------------------------------------- 01-integers


class Cursor:
    """Takes the fields of one structure from its bytes, front to back."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def left(self) -> int:
        """How many bytes are left."""
        return len(self.data) - self.at

    def take(self, n: int) -> bytes:
        """The next n bytes."""
        need(n <= self.left(), "I1", "a field goes beyond the end of its structure")
        self.at += n
        return self.data[self.at - n : self.at]

    def end(self, rule: str = "I7") -> None:
        """Refuse if anything is left."""
        need(self.left() == 0, CORRUPT, rule, f"{self.left()} bytes behind the end")

    def fixed(self, letter: str) -> Any:
        """01-integers#fixed: "little-endian integers"; also f64, as the letters of struct say."""
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def many(self, n: int, letter: str) -> tuple[Any, ...]:
        """00-conventions#notation: "`n × u32` is n of them in succession"."""
        return struct.unpack(f"<{n}{letter}", self.take(n * struct.calcsize("<" + letter)))

    def varint(self) -> int:
        """01-integers#varint: "groups of seven bits, the least significant group first"."""
        value = 0
        for i in range(10):
            byte = self.fixed("B")
            value |= (byte & 127) << (7 * i)
            if byte < 128:  # "The top bit of a byte says that another follows."
                # "the last byte is not 0 unless it is the only one"
                need(byte or i == 0, "I2", "a varint is not in its shortest form")
                need(value < 2**64, "I3", "a varint of 2^64 or more")
                return value
        refuse("I3", "a varint of more than 10 bytes")

    def text(self) -> str:
        """01-integers#text: "The number of bytes as a varint, then so many bytes of UTF-8."."""
        try:
            return self.take(self.varint()).decode("utf-8")
        except UnicodeDecodeError:
            refuse("I4", "a text is not UTF-8")

    def exp_golomb(self, count: int, order: int) -> list[int]:
        """01-integers#exp-golomb; bits by 01-integers#packed-bits: "from its least significant bit upwards"."""
        at = self.at * 8

        def bit() -> int:
            nonlocal at
            need(at // 8 < len(self.data), "I5", "an Exp-Golomb code goes beyond the end")
            at += 1
            return self.data[(at - 1) // 8] >> ((at - 1) % 8) & 1

        values = []
        for _ in range(count):
            m = order  # "count z zero bits up to the first one bit; with m = k + z"
            while not bit():
                m += 1
                need(m <= 16, "I5", "an Exp-Golomb code with m over 16")
            x = sum(bit() << i for i in range(m))  # "the next m bits are the low bits x of u"
            values.append(2**m + x - 2**order)  # "v = 2^m + x - 2^k"
            need(values[-1] <= 65535, "I5", "an Exp-Golomb code of a value over 65535")
        while at % 8:  # "after the last one the rest of the byte is zero bits, which a reader must check"
            need(not bit(), "I6", "one bits in the padding behind Exp-Golomb codes")
        self.at = at // 8
        return values


M64 = 2**64 - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def rotl(x: int, n: int) -> int:
    """01-integers#xxh64: "rotates 64 bits to the left"."""
    return (x << n | x >> (64 - n)) & M64


def xxh_round(a: int, x: int) -> int:
    """01-integers#xxh64: "round(a, x) = rotl(a + x * P2, 31) * P1"."""
    return rotl((a + x * P2) & M64, 31) * P1 & M64


def xxh64(data: bytes) -> int:
    """01-integers#xxh64, by its four steps."""
    whole = len(data) // 32 * 32
    h = P5
    if whole:
        a, b, c, d = (P1 + P2) & M64, P2, 0, -P1 & M64
        for x0, x1, x2, x3 in struct.iter_unpack("<4Q", memoryview(data)[:whole]):
            a, b, c, d = xxh_round(a, x0), xxh_round(b, x1), xxh_round(c, x2), xxh_round(d, x3)
        h = (rotl(a, 1) + rotl(b, 7) + rotl(c, 12) + rotl(d, 18)) & M64
        for v in (a, b, c, d):
            h = ((h ^ xxh_round(0, v)) * P1 + P4) & M64
    h = (h + len(data)) & M64
    rest = Cursor(data[whole:])
    while rest.left() >= 8:
        h = (rotl(h ^ xxh_round(0, rest.fixed("Q")), 27) * P1 + P4) & M64
    if rest.left() >= 4:
        h = (rotl(h ^ (rest.fixed("I") * P1 & M64), 23) * P2 + P3) & M64
    while rest.left():
        h = rotl(h ^ (rest.fixed("B") * P5 & M64), 11) * P1 & M64
    h = (h ^ h >> 33) * P2 & M64
    h = (h ^ h >> 29) * P3 & M64
    return h ^ h >> 32


# ---------------------------------------------------------------------------------------------- 02-entropy


class Table:
    """02-entropy#frequency-table: the frequency of each code, and what rANS wants to know of it."""

    def __init__(self, cursor: Cursor) -> None:
        first, last, order = cursor.many(3, "B")
        need(first <= last, "E6", "a frequency table with `last` below `first`")
        need(order <= 11, "E6", "a frequency table of an order over 11")
        written = cursor.exp_golomb(last - first, order)  # "of the codes from `first` to `last` - 1"
        need(sum(written) < 4096, "E6", "frequencies whose sum is 4096 or more before the last")
        # "The frequency of `last` is 4096 minus the sum of the others and must be at least 1; that of `first`
        # must not be 0."
        some = [*written, 4096 - sum(written)]
        need(some[0], "E6", "frequency 0 of `first`")
        self.frequency = [0] * first + some + [0] * (255 - last)
        # "*Start* of a code is the sum of the frequencies of all lower codes."
        self.start = [0, *itertools.accumulate(self.frequency)]
        self.code_of_slot = b"".join(bytes([s]) * f for s, f in enumerate(self.frequency))


def read_runs(cursor: Cursor, classes: int, bound: int) -> list[int]:
    """02-entropy#runs: "Runs give each class, 0 and up, a number below a bound"."""
    numbers: list[int] = []
    while len(numbers) < classes:
        run, number = cursor.varint(), cursor.varint()
        need(1 <= run <= classes - len(numbers), "E8", "a class run of 0 or beyond the last class")
        need(number < bound, "E8", "a class run whose number is not below the bound")
        numbers += [number] * run
    return numbers


@dataclass
class Tables:
    """02-entropy#tables: "tables that all chunks share, and a map from classes to tables"."""

    tables: list[Table]
    of_class: list[int]

    @staticmethod
    def read(cursor: Cursor, classes: int) -> Tables:
        """Take them from the plan of a frame."""
        count = cursor.fixed("B")
        need(1 <= count <= 64, "E7", "no frequency tables, or more than 64")
        return Tables([Table(cursor) for _ in range(count)], read_runs(cursor, classes, count))


def rans(cursor: Cursor, tables: Iterable[Table], n: int) -> bytes:
    """02-entropy#rans: n codes in stream order; `tables` gives the table of each."""
    index = cursor.fixed("B")
    need(index < len(LANES), "E9", "a lane index over 2")
    lanes = LANES[index]
    x = list(cursor.many(lanes, "I"))
    need(min(x) >= 2**16, "E10", "a lane state below 2^16")
    need(cursor.left() % 2 == 0, "E11", "an odd number of bytes behind the lane states")
    words = iter(unpack(2, cursor.take(cursor.left())))  # "words | u16 each | all bytes that are left"
    codes = bytearray(n)
    for i, table in zip(range(n), tables):
        lane = i % lanes
        slot = x[lane] % 4096
        s = codes[i] = table.code_of_slot[slot]  # "start(s) <= slot < start(s) + f(s)"
        x[lane] = table.frequency[s] * (x[lane] // 4096) + slot - table.start[s]
        if x[lane] < 2**16:  # "take the next word w: x[l] = x[l] * 2^16 + w"
            word = next(words, None)
            if word is None:
                refuse("E12", "the words of a rANS stream are used up too early")
            x[lane] = x[lane] * 2**16 + word
    # "At the end every state must be 2^16, and all words must have been taken."
    need(set(x) == {2**16}, "E12", "a state of a rANS stream does not end at 2^16")
    need(next(words, None) is None, "E12", "a rANS stream has words left over")
    return bytes(codes)


def rans_shared(cursor: Cursor, shared: Tables, classes: list[int]) -> bytes:
    """02-entropy#lanes: "sorted by their class, lowest class first, and codes of the same class stay in the
    order of their units"."""
    order = sorted(range(len(classes)), key=classes.__getitem__)  # a stable sort
    tables = (shared.tables[shared.of_class[classes[i]]] for i in order)
    codes = bytearray(len(classes))
    for i, code in zip(order, rans(cursor, tables, len(classes))):
        codes[i] = code
    return bytes(codes)


def zstd_frame_fault(data: bytes, n: int) -> str | None:
    """What is wrong with the outside of a Zstandard frame (RFC 8878, section 3.1.1), as far as n codes go."""
    cursor = Cursor(data)
    if cursor.fixed("I") != 0xFD2FB528:
        return "does not begin as a frame"
    flags = cursor.fixed("B")
    single, checksum = flags >> 5 & 1, flags >> 2 & 1
    if flags >> 3 & 1:
        return "has a reserved bit"
    cursor.take(1 - single)  # the window descriptor; no window is kept here, all is decoded in one piece
    if any(cursor.take((0, 1, 2, 4)[flags & 3])):
        return "needs a dictionary"  # 02-entropy#streams: "It uses no dictionary."
    size_bytes = (single, 2, 4, 8)[flags >> 6]
    size = int.from_bytes(cursor.take(size_bytes), "little") + (256 if size_bytes == 2 else 0)
    # 02-entropy#streams: "must state its content size in its header, and that must be n"
    if size_bytes == 0 or size != n:
        return "states no content size, or another"
    last = 0
    while not last:
        block = int.from_bytes(cursor.take(3), "little")
        last, kind, length = block & 1, block >> 1 & 3, block >> 3
        if kind == 3:
            return "has a block of a reserved type"
        cursor.take(1 if kind == 1 else length)
    cursor.take(4 * checksum)
    # 02-entropy#streams: "No other frame, also no skippable one, stands before or behind it."
    return "has bytes behind it" if cursor.left() else None


def zstd(data: bytes, n: int) -> bytes:
    """02-entropy#streams: "one Zstandard frame (RFC 8878) that decodes to the n codes"."""
    try:
        fault = zstd_frame_fault(data, n)
    except Refusal:
        fault = "ends too early"
    need(fault is None, "E5", f"a Zstandard frame {fault}")
    try:
        import zstandard
    except ImportError:
        refuse("E1", "this decoder needs the package `zstandard` for coder zstd")
    try:
        codes = zstandard.ZstdDecompressor().decompress(data, max_output_size=n)
    except zstandard.ZstdError:
        refuse("E5", "a Zstandard frame does not decode")
    need(len(codes) == n, "E5", "a Zstandard frame decodes to another size")
    return codes


def sparse_part(cursor: Cursor, most: int) -> bytes:
    """02-entropy#sparse: count, coder, length and stream of the gaps, or of the values."""
    count, coder = cursor.varint(), cursor.fixed("B")
    need(count <= most, "E13", "a sparse stream with more gaps or values than allowed")
    # "any but rans-shared and sparse"
    need(coder not in (RANS_SHARED, SPARSE), "E13", "a sparse stream of a coder that it cannot have")
    return decode_stream(coder, cursor.take(cursor.varint()), count)


def sparse(cursor: Cursor, n: int) -> bytes:
    """02-entropy#sparse: "a *gap* is the number of common codes before a value"."""
    codes = bytearray(cursor.take(1)) * n
    gaps = sparse_part(cursor, n + n // 255 + 1)  # "at most n + n / 255 + 1"
    values = sparse_part(cursor, n)  # "number of values, at most n"
    # "There are as many gap codes below 255 as there are values, the last gap code is below 255"
    need(len(gaps) - gaps.count(255) == len(values), "E14", "sparse gaps that do not go with the values")
    need(not gaps or gaps[-1] < 255, "E14", "sparse gaps that end with 255")
    at, value = 0, iter(values)
    for gap in gaps:
        at += gap
        if gap < 255:
            need(at < n, "E14", "a sparse value beyond the last code")
            codes[at] = next(value)
            at += 1
    return bytes(codes)


def decode_stream(
    coder: int, data: bytes, n: int, shared: Tables | None = None, classes: list[int] | None = None
) -> bytes:
    """02-entropy#streams: "A stream is n codes in some bytes."."""
    need(coder <= SPARSE, "E1", f"coder {coder}")
    cursor = Cursor(data)
    if n == 0:  # "A stream of no codes is `stored` and has no bytes."
        need(coder == STORED and not data, "E4", "a stream of no codes is not empty and stored")
        return b""
    if coder == CONSTANT:  # "one u8: every code has this value"
        codes = cursor.take(1) * n
    elif coder == STORED:  # "the n codes"
        codes = cursor.take(n)
    elif coder == ZSTD:
        codes = zstd(cursor.take(len(data)), n)
    elif coder == RANS_OWN:  # "a frequency table, then a rANS stream that uses it throughout"
        codes = rans(cursor, itertools.repeat(Table(cursor)), n)
    elif coder == SPARSE:
        codes = sparse(cursor, n)
    else:
        if shared is None or classes is None:
            refuse("E2", "coder rans-shared where there are no tables")
        codes = rans_shared(cursor, shared, classes)
    cursor.end("E3")  # "The bytes must be used up exactly."
    return codes


# ------------------------------------------------------------------------------------------- 03-transforms


def order(u: int, w: int) -> int:
    """03-transforms#order: "order(u) = top bit of u is 1 ? ~u : u + 2^(w-1)"."""
    return u ^ (2**w - 1) if u >> (w - 1) else u + 2 ** (w - 1)


def unorder(o: int, w: int) -> int:
    """03-transforms#order: "unorder(o) = top bit of o is 1 ? o - 2^(w-1) : ~o"."""
    return o - 2 ** (w - 1) if o >> (w - 1) else o ^ (2**w - 1)


def unzigzag(z: int, w: int) -> int:
    """01-integers#zigzag: "unzigzag(z) = (z >> 1) ^ (lowest bit of z ? 2^w - 1 : 0)"."""
    return z >> 1 ^ (2**w - 1 if z & 1 else 0)


def join(streams: list[bytes]) -> tuple[int, ...]:
    """03-transforms#planes: "code stream j holds byte j of the result z, 0 the least significant"."""
    data = bytearray(len(streams) * len(streams[0]))
    for j, stream in enumerate(streams):
        data[j :: len(streams)] = stream
    return unpack(len(streams), data)


def unplane(mode: int, dtype: Dtype, z: Iterable[int], base: Iterable[int]) -> list[int]:
    """03-transforms#planes: the table of modes."""
    w = dtype.size * 8
    if mode == RAW:  # "z"
        return list(z)
    if mode == ROTATED:  # "z rotated to the right by one bit: (z >> 1) | (z << (w - 1))"
        return [(x >> 1 | x << (w - 1)) % 2**w for x in z]
    if mode == XOR:  # "z ^ b"
        return [x ^ b for x, b in zip(z, base)]
    if dtype.float:  # "unorder((order(b) + unzigzag(z)) mod 2^w)"
        return [unorder((order(b, w) + unzigzag(x, w)) % 2**w, w) for x, b in zip(z, base)]
    return [(b + unzigzag(x, w)) % 2**w for x, b in zip(z, base)]  # "(b + unzigzag(z)) mod 2^w"


@dataclass
class Rule:
    """03-transforms#classes: a class rule "gives each unit a *label* below the rule's *radix*"."""

    kind: int
    radix: int = 256  # that of `magnitude`
    source: str = ""  # name of a tensor of the same file; empty: the base
    size: int = 0  # units of a row or of a block
    labels: bytes = b""

    def stored_labels(self, first: int, n: int) -> list[int]:
        """03-transforms#classes: "labels[i / row units]" or "labels[i / block size]", i from `first` on."""
        return [self.labels[i // self.size] for i in range(first, first + n)]


def magnitudes(w: int, units: Iterable[int]) -> list[int]:
    """03-transforms#classes: "(u >> (w - 9)) mod 256. If u has 8 bits, its low seven: u mod 128"."""
    return [u % 128 if w == 8 else (u >> (w - 9)) % 256 for u in units]


# ----------------------------------------------------------------------------------------- 04-quantization


def to_double(pattern: int) -> float:
    """The value of an F32 pattern, exactly; subnormal ones too."""
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def to_f32(value: float) -> int:
    """The F32 pattern of a binary64, rounded "to nearest, ties to even", as struct does but for overflow."""
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def finite(pattern: int, name: str) -> bool:
    """04-quantization#decoding: "its exponent bits (0x7f800000 in F32, 0x7f80 in BF16, 0x7c00 in F16) are not
    all 1"."""
    mask = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}[name]
    return pattern & mask != mask


def widen(u: int, name: str) -> int:
    """04-quantization#widening."""
    if name == "F16":  # "the F32 pattern of the same value"
        return to_f32(struct.unpack("<e", struct.pack("<H", u))[0])
    return u << 16 if name == "BF16" else u


def add(a: int, b: int) -> int:
    """04-quantization#addition: "The sum of two F32 numbers, rounded once."

    The binary64 sum may be rounded as well, but 53 bits are at least 2 * 24 + 2, so that rounding it again
    gives what one rounding of the exact sum gives; below 2^-126 both are exact.
    """
    return to_f32(to_double(a) + to_double(b))


def product(a: int, b: int) -> int:
    """04-quantization#product: "It is exact in binary64 before it is rounded."."""
    return to_f32(to_double(a) * to_double(b))


def cast(p: int, name: str) -> int:
    """04-quantization#cast: "F32 to the dtype of the tensor, from the pattern p by integers"."""
    if name == "F32":
        return p
    if name == "BF16":  # "(p + 0x7fff + ((p >> 16) & 1)) >> 16"
        return (p + 0x7FFF + (p >> 16 & 1)) >> 16
    s, m = p >> 16 & 0x8000, p & 0x7FFFFFFF
    if m >= 0x477FF000:
        return s | 0x7C00
    if m <= 0x33000000:
        return s
    e, f = m >> 23, m & 0x7FFFFF | 0x800000
    t = 13 if e >= 113 else 126 - e
    q, rest = f >> t, f % 2**t
    if rest > 2 ** (t - 1) or (rest == 2 ** (t - 1) and q % 2):
        q += 1
    return s | q + ((e - 113 << 10) if e >= 113 else 0)


@dataclass
class Map:
    """04-quantization#map."""

    table: list[array[int]]  # rows of entries
    codes: int
    row_of_class: list[int]
    zero_code: int | None

    @staticmethod
    def read(cursor: Cursor, domain: int, dtype: Dtype, classes: int, flags: int) -> Map:
        """Take a map from the plan of a frame."""
        need(dtype.name in ("F32", "BF16", "F16"), "Q1", f"a map for dtype {dtype.name}")
        kind, rows, codes = cursor.fixed("B"), cursor.varint(), cursor.varint()
        need(kind <= EXPANDED, "Q2", f"table kind {kind}")
        need(1 <= rows <= 4096 and 1 <= codes <= 256, "Q3", "rows or codes of a map out of range")
        if kind == EXPLICIT:  # "R × C × u32 for F32, u16 for BF16 and F16"
            letter = "I" if domain == LINEAR else LETTER[dtype.size]
            table = [array("I", cursor.many(codes, letter)) for _ in range(rows)]
        else:
            table = expand(cursor, domain, dtype.size * 8, rows, codes)
        # "only if R > 1; else every class has row 0"
        row_of_class = read_runs(cursor, classes, rows) if rows > 1 else [0] * classes
        zero_code = cursor.fixed("B") if flags & FLAG_ZERO else None
        need((zero_code or 0) < codes, "Q4", "a zero code that is not below C")
        return Map(table, codes, row_of_class, zero_code)


def expand(cursor: Cursor, domain: int, w: int, rows: int, codes: int) -> list[array[int]]:
    """04-quantization#entries: the tables of kind `expanded`."""
    letter = "d" if domain == LINEAR else "q"
    scale, level, offset = (cursor.many(n, letter) for n in (rows, codes, rows))
    if domain == BITS:  # "(scale[r] * level[c] + offset[r]) mod 2^w"
        return [array("I", ((scale[r] * x + offset[r]) % 2**w for x in level)) for r in range(rows)]
    for x in (*scale, *level, *offset):  # "must be finite, and each must be zero or normal in binary64"
        good = x == 0 or (math.isfinite(x) and abs(x) >= sys.float_info.min)
        need(good, "Q5", "a scale, level or offset that is infinite, NaN or subnormal")
    # "three roundings": Python rounds the product and the sum to binary64 each, to_f32 the result
    return [array("I", (to_f32(scale[r] * x + offset[r]) for x in level)) for r in range(rows)]


# ------------------------------------------------------------------------------------------------ 05-frame


@dataclass
class Record:
    """05-frame#chunk-records."""

    stored: int
    decoded: int
    base_codes: int | None
    streams: list[tuple[int, int]]  # coder and length


@dataclass
class Plan:
    """05-frame#plan, and the chunk records behind it."""

    dtype: Dtype
    domain: int
    predictor: int
    flags: int
    shape: list[int]
    units: int
    mode: int = RAW
    rules: list[Rule] = field(default_factory=list)
    map: Map | None = None
    tables: list[Tables] = field(default_factory=list)  # one for each code stream, or none
    row: tuple[int, ...] = ()
    column: tuple[int, ...] = ()
    records: list[Record] = field(default_factory=list)
    chunks_at: int = 0  # where chunk 0 begins in the frame

    @property
    def groups_by_base_codes(self) -> bool:
        """Whether "there is a rule `base-code`"."""
        return any(rule.kind == BASE_CODE for rule in self.rules)

    @property
    def needs_base(self) -> bool:
        """05-frame#plan: "if its predictor is `base`, or if it has a rule `base-code`, or a rule `magnitude`
        that names no tensor"."""
        unnamed = any(rule.kind == MAGNITUDE and not rule.source for rule in self.rules)
        return self.predictor == BASE or self.groups_by_base_codes or unnamed

    @property
    def classes(self) -> int:
        """03-transforms#classes: "the product of their radices"; one class without rules."""
        return math.prod(rule.radix for rule in self.rules)

    @property
    def code_streams(self) -> int:
        """05-frame#chunks: "one code stream for each byte of a unit", or "the code stream"."""
        return self.dtype.size if self.domain == PLANES else 1

    @property
    def streams(self) -> int:
        """How many streams a chunk has, by the table of 05-frame#chunks."""
        escape, protected = bool(self.flags & FLAG_ESCAPE), bool(self.flags & FLAG_PROTECTED)
        return self.code_streams + escape * self.dtype.size + protected * (1 + self.dtype.size)

    @property
    def memory(self) -> int:
        """About how many bytes decoding holds for this frame, the units and codes of one chunk included."""
        tables = sum(len(shared.tables) for shared in self.tables) * 16384
        entries = len(self.map.table) * self.map.codes * 4 if self.map else 0
        lists = 40 * (len(self.row) + len(self.column)) + sum(len(rule.labels) for rule in self.rules)
        return 16 * CHUNK + tables + entries + lists + len(self.records) * 1024

    def size_of_chunk(self, j: int) -> int:
        """05-frame#chunks: "the last one of a tensor is what is left"."""
        return min(CHUNK, self.units - j * CHUNK)


def read_plan(cursor: Cursor, limit: int) -> Plan:
    """05-frame#plan, field by field."""
    version, dtype_id, domain, predictor, flags, dimensions = cursor.many(4, "B") + (
        cursor.fixed("I"),
        cursor.fixed("B"),
    )
    need(version == 0, "F3", f"frame version {version}")
    need(dtype_id in DTYPE_OF_ID, "F4", f"dtype {dtype_id}")
    need(domain <= BITS and predictor <= OUTER, "F4", f"domain {domain}, predictor {predictor}")
    need(flags < 8, "F5", f"frame flags {flags:#x}")
    need(flags == 0 or domain != PLANES, "F6", "flags in the domain `planes`")
    dtype = DTYPE_OF_ID[dtype_id]
    # 05-frame#shape: "At most 64 dimensions. The product of the dimensions, where each 0 counts as 1, is at
    # most 2^48."
    need(dimensions <= 64, "F7", "more than 64 dimensions")
    shape = [cursor.varint() for _ in range(dimensions)]
    need(product_of(size or 1 for size in shape) <= 2**48, "F7", "a shape over 2^48")
    plan = Plan(dtype, domain, predictor, flags, shape, dtype.units(shape))
    need(plan.units * dtype.size <= limit, "limit", "a tensor is larger than allowed (--limit)")
    if domain == PLANES:
        plan.mode = cursor.fixed("B")
        need(plan.mode <= DIFFERENCE, "T1", f"plane mode {plan.mode}")
        # "The predictor is `base` if and only if the plane mode is `xor` or `difference` [...]; otherwise it is
        # `zero` there."
        right = BASE if plan.mode in (XOR, DIFFERENCE) else ZERO
        need(predictor == right, "F9", "a predictor that does not go with the plane mode")
    count = cursor.fixed("B")
    need(count <= 3, "T2", "more than 3 class rules")
    plan.rules = [read_rule(cursor, plan) for _ in range(count)]
    need(plan.classes <= 4096, "T2", "more than 4096 classes")
    if domain != PLANES:
        plan.map = Map.read(cursor, domain, dtype, plan.classes, flags)
    if plan.rules:  # "if there are class rules | tables, once for each code stream of a chunk"
        plan.tables = [Tables.read(cursor, plan.classes) for _ in range(plan.code_streams)]
    if predictor == OUTER:
        read_vectors(cursor, plan)
    return plan


def read_vectors(cursor: Cursor, plan: Plan) -> None:
    """05-frame#plan: "The vector row has as many elements as the first dimension, column as many as the product
    of the others; a missing dimension counts as 1."."""
    plan.row = cursor.many(product_of(plan.shape[:1]), "I")
    plan.column = cursor.many(product_of(plan.shape[1:]), "I")
    good = all(finite(x, "F32") for x in plan.row + plan.column)
    need(good, "Q9", "an outer vector with an element that is infinite or NaN")


def read_rule(cursor: Cursor, plan: Plan) -> Rule:
    """05-frame#class-rules."""
    rule = Rule(cursor.fixed("B"))
    need(MAGNITUDE <= rule.kind <= BASE_CODE, "T1", f"class rule {rule.kind}")
    if rule.kind == MAGNITUDE:
        rule.source = cursor.text()
        return rule
    rule.radix = cursor.varint()
    need(1 <= rule.radix <= 256, "T3", "a stored radix outside 1 to 256")
    if rule.kind == BASE_CODE:
        return rule
    if rule.kind == ROW:
        # 03-transforms#classes: "the units of the tensor divided by its first dimension, which must divide them;
        # a tensor without dimensions is one row"
        rows = product_of(plan.shape[:1])
        need(rows == 0 or plan.units % rows == 0, "T4", "the first dimension does not divide the units")
        rule.size = plan.units // rows if rows else 0
        count = rows
    else:
        rule.size = cursor.varint()
        need(1 <= rule.size <= 2**48, "T5", "a block size outside 1 to 2^48")
        count = -(-plan.units // rule.size)  # "units / block size, rounded up"
    count = count if plan.units else 0  # "A tensor without units has no labels."
    need(count <= 2**28, "T6", "more than 2^28 labels of one rule")
    coder = cursor.fixed("B")
    rule.labels = decode_stream(coder, cursor.take(cursor.varint()), count)
    need(max(rule.labels, default=0) < rule.radix, "T3", "a stored label that is not below the radix")
    return rule


def read_records(cursor: Cursor, plan: Plan) -> None:
    """05-frame#chunk-records: "All records of a frame have the same size."."""
    chunks = -(-plan.units // CHUNK)
    words = 3 if plan.groups_by_base_codes else 2
    size = 8 * words + 5 * plan.streams
    # 05-frame#decoding: "The bytes that remain for them must be exactly what the number of chunks calls for."
    need(cursor.left() == chunks * size, "F10", "chunk records of another number or size")
    for _ in range(chunks):
        sums = [*cursor.many(words, "Q"), None]
        streams = [(cursor.fixed("B"), cursor.fixed("I")) for _ in range(plan.streams)]
        for i, (coder, _length) in enumerate(streams):
            need(coder <= SPARSE, "E1", f"coder {coder}")
            # 05-frame#chunks: "Coder rans-shared is for code streams only."
            shareable = plan.rules and i < plan.code_streams
            need(coder != RANS_SHARED or shareable, "E2", "coder rans-shared for a stream without tables")
        plan.records.append(Record(sums[0], sums[1], sums[2], streams))


def read_frame_header(read: Any, frame_length: int, limit: int) -> Plan:
    """05-frame#decoding, "The header"; `read(offset, n)` gives bytes of the frame."""
    need(frame_length >= 12, "F1", "a frame of less than 12 bytes")
    length = Cursor(read(0, 4)).fixed("I")
    need(12 <= length <= frame_length, "F1", "a header length below 12 or beyond the frame")
    need(length <= limit, "limit", "the header of a frame is larger than allowed (--limit)")
    header = read(0, length)
    # "Check the header checksum before anything else of the header is believed."
    good = xxh64(header[:-8]) == int.from_bytes(header[-8:], "little")
    need(good, "F2", "a header checksum that does not match")
    cursor = Cursor(header[4:-8])
    plan = read_plan(cursor, limit)
    read_records(cursor, plan)
    # "The length of the header and of all streams must be the length of the frame."
    total = length + sum(size for record in plan.records for _coder, size in record.streams)
    need(total == frame_length, "F11", "a frame of another length than its header and chunks")
    plan.chunks_at = length
    return plan


@dataclass
class Chunk:
    """One decoded chunk: the bytes of its units, and its codes if the frame has a map."""

    dtype: Dtype
    data: bytes
    codes: bytes | None = None

    def units(self) -> tuple[int, ...]:
        """The units."""
        return unpack(self.dtype.size, self.data)


class Streams:
    """05-frame#chunks: "The bytes of a chunk are its streams one after another"."""

    def __init__(self, record: Record, data: bytes) -> None:
        self.streams = iter(record.streams)
        self.cursor = Cursor(data)

    def next(self, n: int, shared: Tables | None = None, classes: list[int] | None = None) -> bytes:
        """The n codes of the next stream."""
        coder, length = next(self.streams)
        return decode_stream(coder, self.cursor.take(length), n, shared, classes)

    def values(self, size: int, n: int) -> Iterator[int]:
        """05-frame#chunks: escaped or protected values, "one stream for each byte of a unit"."""
        return iter(join([self.next(n) for _ in range(size)]))


def class_of_units(plan: Plan, j: int, base: Chunk | None, named: dict[str, Chunk]) -> list[int]:
    """03-transforms#classes: "the mixed-radix number of the labels, the first rule most significant"."""
    n = plan.size_of_chunk(j)
    classes = [0] * n
    for rule in plan.rules:
        if rule.kind == MAGNITUDE:
            chunk = named[rule.source] if rule.source else base
            labels: Iterable[int] = magnitudes(chunk.dtype.size * 8, chunk.units()) if chunk else ()
        elif rule.kind == BASE_CODE:
            # "If the base has no such codes [...] every label is 0."
            labels = base.codes if base and base.codes is not None else bytes(n)
            need(max(labels) < rule.radix, "T9", "a base code that is not below the radix")
        else:
            labels = rule.stored_labels(j * CHUNK, n)
        classes = [a * rule.radix + label for a, label in zip(classes, labels)]
    return classes


def predictions(plan: Plan, j: int, base: Chunk | None) -> Iterable[int]:
    """04-quantization#decoding: P of each unit, an F32 pattern (linear) or a unit (bits)."""
    name, linear = plan.dtype.name, plan.domain == LINEAR
    if plan.predictor == ZERO or (plan.predictor == BASE and base is None):
        return itertools.repeat(0)
    if plan.predictor == BASE and base:
        return (widen(u, name) if linear else u for u in base.units())
    n, first = len(plan.column), j * CHUNK
    where = range(first, first + plan.size_of_chunk(j))
    products = (product(plan.row[i // n], plan.column[i % n]) for i in where)
    return products if linear else (cast(p, name) for p in products)


def value(plan: Plan, p: int, entry: int) -> int | None:
    """04-quantization#decoding: the unit, or None if it is not finite.

    The sum is tested before the cast, as the cast can make a finite pattern of a NaN: "A NaN is never cast
    where it counts."
    """
    w, name = plan.dtype.size * 8, plan.dtype.name
    if plan.domain == BITS:  # "unorder( (order(P) + T[r][c]) mod 2^w )"
        unit = unorder((order(p, w) + entry) % 2**w, w)
    else:  # "cast( add(P, T[r][c]) )"
        total = add(p, entry)
        if not finite(total, "F32"):
            return None
        unit = cast(total, name)
    return unit if finite(unit, name) else None


def unmap(plan: Plan, j: int, codes: bytes, classes: list[int], base: Chunk | None, streams: Streams) -> list[int]:
    """04-quantization#decoding: look up, add, cast and replace."""
    assert plan.map is not None
    rule, size, n = plan.map, plan.dtype.size, len(codes)
    need(max(codes) < rule.codes, "Q6", "a code that is not below C")
    # 04-quantization#map: "the last code, C - 1, is the *escape code*"
    escape = rule.codes - 1 if plan.flags & FLAG_ESCAPE else None
    escaped = iter(()) if escape is None else streams.values(size, codes.count(escape))
    mask, protected = bytes(n), iter(())
    if plan.flags & FLAG_PROTECTED:
        mask = streams.next(n)
        need(max(mask) <= 1, "Q8", "a mask with other codes than 0 and 1")
        protected = streams.values(size, mask.count(1))
    units = []
    for c, k, p, kept in zip(codes, classes, predictions(plan, j, base), mask):
        # "Then the exceptions, each replacing what came before"; from the last to the first here. An escaped
        # value that is replaced by a protected one is there all the same, and is taken.
        unit = next(escaped) if c == escape else None
        if kept:  # "where the mask is 1 it is the next of the chunk's protected values"
            unit = next(protected)
        elif c != escape:  # "where c is the zero code the unit is 0"
            unit = 0 if c == rule.zero_code else value(plan, p, rule.table[rule.row_of_class[k]][c])
        if unit is None:
            refuse("Q7", "a unit that is not finite, and neither escaped nor protected")
        units.append(unit)
    return units


def decode_streams(plan: Plan, j: int, data: bytes, base: Chunk | None, named: dict[str, Chunk]) -> Chunk:
    """05-frame#decoding, "A chunk of n units", by its five steps."""
    record, n = plan.records[j], plan.size_of_chunk(j)
    if plan.groups_by_base_codes:  # "XXH64 of the base's codes in this chunk [...]; 0 if the base has none"
        codes = base.codes if base else None
        right = record.base_codes == (0 if codes is None else xxh64(codes))
        need(right, "T10", "the base holds other codes than this frame was made with")
    classes = class_of_units(plan, j, base, named)
    streams = Streams(record, data)
    shared: Iterable[Tables | None] = plan.tables or itertools.repeat(None)
    planes = [streams.next(n, tables, classes) for tables, _ in zip(shared, range(plan.code_streams))]
    if plan.domain == PLANES:
        units = unplane(plan.mode, plan.dtype, join(planes), base.units() if base else ())
    else:
        units = unmap(plan, j, planes[0], classes, base, streams)
    chunk = Chunk(plan.dtype, pack(plan.dtype.size, units), None if plan.domain == PLANES else planes[0])
    need(xxh64(chunk.data) == record.decoded, "F14", "decoded units with another checksum")
    return chunk


def decode_chunk(plan: Plan, j: int, data: bytes, base: Chunk | None, named: dict[str, Chunk]) -> Chunk:
    """05-frame#decoding: "The stored checksum tells damage from a wrong base"."""
    try:
        return decode_streams(plan, j, data, base, named)
    except Refusal as fault:
        if fault.kind in (UNSUPPORTED, LIMIT):
            raise
        # "If it is wrong, the bytes were damaged (kind *checksum*)."
        need(xxh64(data) == plan.records[j].stored, "F15", "stored bytes with another checksum")
        # "while the stored checksum is right and the frame needs a base, then what was taken for the base is
        # another tensor (kind *missing base*)"
        if plan.needs_base and fault.kind != MISSING:
            refuse("F13", f"the base is another tensor ({fault})")
        raise


# -------------------------------------------------------------------------------------------- 06-container


def parse_json(data: bytes, limit: int, where: str) -> Any:
    """06-container#json."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), "C3", f"a key twice in an object of the {where}")
        return dict(items)  # "No object has a key twice."

    def constant(name: str) -> NoReturn:
        refuse("C3", f"{name} in the {where}")  # "`NaN` and `Infinity` do not occur."

    # Every value takes a comma or a bracket of the text, so these bound the memory that the values take.
    need(sum(map(data.count, b",[{")) <= limit // 128, "limit", f"too many values in the {where} (--limit)")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
        if b"\\u" in data:  # "A string has no half of a surrogate pair."
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):  # of which UnicodeError and JSONDecodeError are kinds
        refuse("C3", f"the {where} is not JSON as it should be")
    need(type(value) is dict, "C3", f"the {where} is not an object")
    return value


def is_integer(x: Any) -> bool:
    """06-container#json: "An integer has no fraction and no exponent, and is from 0 to 2^63 - 1."."""
    return type(x) is int and 0 <= x < 2**63


def is_hex(x: Any, digits: int) -> bool:
    """Lower-case hexadecimal digits, so many of them."""
    return type(x) is str and len(x) == digits and set(x) <= set("0123456789abcdef")


IS_A = {
    "string": lambda x: type(x) is str,
    "integer": is_integer,
    "number": lambda x: type(x) is int or (type(x) is float and math.isfinite(x)),
    "integers": lambda x: type(x) is list and all(map(is_integer, x)),
    "array": lambda x: type(x) is list,
    "object": lambda x: type(x) is dict,
    "names": lambda x: type(x) is list and all(type(y) is str for y in x),
    "texts": lambda x: type(x) is dict and all(type(y) is str for y in x.values()),
    "sha256": lambda x: is_hex(x, 64),
    "xxh64": lambda x: is_hex(x, 16),
}


def check_fields(thing: Any, required: str, optional: str = "", rule: str = "C13") -> dict[str, Any]:
    """An object with these fields (`name:type`) and no others; optional ones that are missing are None.

    06-container#json: "Fields that these pages do not name do not occur. A field that may be missing may as
    well be `null`, except `carried`; the two mean the same."
    """
    need(type(thing) is dict, CORRUPT, rule, f"not an object with the fields {required}")
    must, may = (dict(item.split(":") for item in spec.split()) for spec in (required, optional))
    for name in thing:
        need(name in must or name in may, CORRUPT, rule, f"an unknown field {name!r}")
    for name, kind in must.items():
        need(name in thing and IS_A[kind](thing[name]), CORRUPT, rule, f"field {name} is missing or no {kind}")
    for name, kind in may.items():
        null = name in thing and thing[name] is None and name != "carried"
        good = name not in thing or null or IS_A[kind](thing[name])
        need(good, CORRUPT, rule, f"field {name} is no {kind}")
    return {name: thing.get(name) for name in (*must, *may)}


def dtype_named(name: str) -> Dtype:
    """A dtype by its name."""
    need(name in DTYPE_OF_NAME, "C6", f"dtype {name!r}")
    return DTYPE_OF_NAME[name]


@dataclass
class Entry:
    """One tensor of a file."""

    name: str
    dtype: Dtype
    shape: list[int]
    offset: int  # from the end of the envelope's header
    size: int  # of the region
    checksum: int | None = None  # of the tensor

    @property
    def bytes(self) -> int:
        """The size of the decoded tensor."""
        return self.dtype.units(self.shape) * self.dtype.size


@dataclass
class Source:
    """A file, plain or .ckptz, whose envelope and index have been checked."""

    path: Path
    plain: bool
    data_at: int
    tensors: dict[str, Entry]
    metadata: dict[str, str] | None
    base: dict[str, Any] | None = None
    content_id: str | None = None

    @property
    def depth(self) -> int:
        """07-chain#depth: "The depth of a file without a base is 0."."""
        return self.base["depth"] if self.base else 0

    def read(self, entry: Entry, offset: int, n: int) -> bytes:
        """Bytes of the region of a tensor."""
        return read_at(self.path, self.data_at + entry.offset + offset, n)


def read_at(path: Path, offset: int, n: int) -> bytes:
    """So many bytes of a file."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(n)
    need(len(data) == n, "C1", f"{path.name} ends too early")
    return data


def read_regions(header: dict[str, Any], data_size: int) -> list[Entry]:
    """06-container#envelope: the regions, in the order of their offsets."""
    regions = []
    for name, thing in header.items():
        fields = check_fields(thing, "dtype:string shape:integers data_offsets:integers", rule="C4")
        dtype, shape, offsets = dtype_named(fields["dtype"]), fields["shape"], fields["data_offsets"]
        need(len(offsets) == 2, "C4", f"the offsets of {name!r} are not two")
        entry = Entry(name, dtype, shape, offsets[0], offsets[1] - offsets[0])
        # "The size of a region is that of its dtype and shape."
        need(entry.size == entry.bytes, "C4", f"the region of {name!r} has not the size of its shape")
        regions.append(entry)
    # "A region without bytes comes before the one that begins at the same offset; several of them stand in the
    # order of the header."
    regions.sort(key=lambda entry: (entry.offset, entry.size))
    end = 0
    for entry in regions:  # "begin at 0, leave no gaps, do not overlap and end with the file"
        need(entry.offset == end, "C5", "a gap between the regions, or an overlap")
        end += entry.size
    need(end <= data_size, "C1", "the file ends before its last region")
    need(end == data_size, "C5", "bytes behind the last region")
    return regions


def open_source(path: Path, limit: int) -> Source:
    """06-container#reading, steps 1 to 4."""
    size = os.path.getsize(path)
    need(size >= 8, "C1", "the file ends before its header")
    length = Cursor(read_at(path, 0, 8)).fixed("Q")
    need(length <= 100_000_000, "C2", "a header of more than 100,000,000 bytes")
    need(8 + length <= size, "C1", "the file ends before its header")
    text = read_at(path, 8, length)
    need(text[:1] == b"{", "C2", "a header that does not begin with `{`")
    header = parse_json(text, limit, "header")
    outer = check_fields({k: v for k, v in header.items() if k == "__metadata__"}, "", "__metadata__:texts", "C4")
    metadata = outer["__metadata__"]
    header.pop("__metadata__", None)
    is_ckptz = metadata is not None and metadata.get("ckptz.format") == "ckptz"
    features = check_version(metadata) if is_ckptz else set()
    regions = read_regions(header, size - 8 - length)
    if is_ckptz:
        return open_ckptz(Source(path, False, 8 + length, {}, None), regions, metadata, features, limit)
    for entry in regions:  # "names that begin with `__ckptz__` must be refused in it all the same"
        need(not entry.name.startswith("__ckptz__"), "C17", f"a plain file with the name {entry.name!r}")
    return Source(path, True, 8 + length, {entry.name: entry for entry in regions}, metadata)


def check_version(metadata: dict[str, str]) -> set[str]:
    """06-container#reading: "Compare the version, then the features"."""
    version = metadata.get("ckptz.version")
    need(version == "0.1", "C7", f"format version {version!r}")
    features = metadata.get("ckptz.required_features", "").split(",")
    for feature in features if "ckptz.required_features" in metadata else ():
        need(feature in FEATURES, "C8", f"feature {feature!r}")
    keys = {"ckptz.format", "ckptz.version", "ckptz.required_features", "ckptz.index_sha256"}
    need(set(metadata) == keys, "C9", "a `__metadata__` with other keys than the four")
    return set(features)


def open_ckptz(
    source: Source, regions: list[Entry], metadata: dict[str, str], features: set[str], limit: int
) -> Source:
    """06-container#reading, steps 3 and 4."""
    for entry in regions:  # "Every region has dtype U8 and as its shape one dimension, its size."
        need(entry.dtype.name == "U8" and len(entry.shape) == 1, "C10", "a region that is not of bytes")
    last = regions.pop() if regions else None
    if last is None or last.name != "__ckptz__.index":
        refuse("C10", "the last region is not the index")
    need(last.size <= 2 * 67_108_864, "C12", "an index that is over 64 MiB")
    data = source.read(last, 0, last.size)
    good = hashlib.sha256(data).hexdigest() == metadata["ckptz.index_sha256"]
    need(good, "C11", "an index with another SHA-256")
    index = check_fields(
        parse_json(index_text(data), limit, "index"),
        "writer:string content_id:sha256 tensors:array",
        "metadata:texts base:object step:integer sharding:object tree:object",
    )
    entries = [read_entry(thing) for thing in index["tensors"]]
    found = [(entry.name, entry.offset, entry.size) for entry in entries]
    right = [(entry.name, entry.offset, entry.size) for entry in regions]
    need(found == right, "C14", "an index that disagrees with the regions")
    for entry in entries:
        need(not entry.name.startswith("__ckptz__"), "C17", f"a tensor with the name {entry.name!r}")
    check_sharding(index["sharding"])
    source.tensors = {entry.name: entry for entry in entries}
    source.metadata, source.content_id = index["metadata"], index["content_id"]
    need(content_id(entries) == source.content_id, "C16", "a content id that the entries do not give")
    if index["base"] is not None:
        need("delta" in features, "C18", "a `base` in a file without the feature `delta`")
        source.base = read_base(index["base"])
    return source


def index_text(data: bytes) -> bytes:
    """06-container#index: "0, as it is; 1, as one zlib stream (RFC 1950) that ends with the region"."""
    text = data[1:]
    if data[:1] == b"\1":
        stream = zlib.decompressobj()
        try:
            text = stream.decompress(data[1:], 67_108_865)
        except zlib.error:
            refuse("C12", "an index that does not inflate")
        need(len(text) > 67_108_864 or stream.eof, "C12", "an index that does not inflate")
        need(not stream.unused_data, "C12", "bytes behind the deflated index")
    else:
        need(data[:1] == b"\0", "C12", "an index that is neither plain nor deflated")
    need(len(text) <= 67_108_864, "C12", "an index of more than 64 MiB")
    return text


def read_entry(thing: Any) -> Entry:
    """06-container#tensor-entries."""
    must = "name:string dtype:string shape:integers offset:integer n_bytes:integer checksum:xxh64"
    entry = check_fields(thing, must, "lossy:object")
    need(len(entry["shape"]) <= 64, "C13", "a shape of more than 64 dimensions")
    if entry["lossy"] is not None:  # 06-container#lossy-record: "Nothing is decoded by it."
        record = check_fields(
            entry["lossy"],
            "method:string layer_type:string levels:integer prune:number protect:number n_pruned:integer "
            "n_protected:integer max_abs_error:number rms_error:number rms:number promise:string",
        )
        known = record["method"] == "kmeans" and record["promise"] == "none"
        need(known, "C13", "a lossy record of another method or promise")
    dtype, checksum = dtype_named(entry["dtype"]), int(entry["checksum"], 16)
    return Entry(entry["name"], dtype, entry["shape"], entry["offset"], entry["n_bytes"], checksum)


def check_sharding(thing: Any) -> None:
    """06-container#sharding: fields and types; its rules are for readers that follow it."""
    if thing is not None:
        record = check_fields(thing, "shards:array", "index_file:string index_text:string carried:names")
        for shard in record["shards"]:
            check_fields(shard, "file:string tensors:names", "metadata:texts")


def read_base(thing: Any) -> dict[str, Any]:
    """07-chain#base-reference."""
    base = check_fields(thing, "content_id:sha256 file:string depth:integer")
    need(1 <= base["depth"] <= 64, "H1", "a depth outside 1 to 64")
    # "not empty, not `.` or `..`, and without `/`"
    good = base["file"] not in ("", ".", "..") and "/" not in base["file"]
    need(good, "H2", "the `file` of a base is not one path component")
    return base


# ------------------------------------------------------------------------------------------------ 07-chain


def content_id(entries: Iterable[Entry]) -> str:
    """07-chain#content-id: "tensors sorted by the UTF-8 bytes of their names"."""
    digest = hashlib.sha256()
    for name, entry in sorted((entry.name.encode(), entry) for entry in entries):
        dtype = entry.dtype.name.encode()
        digest.update(struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(dtype)) + dtype)
        digest.update(struct.pack(f"<{len(entry.shape) + 2}Q", len(entry.shape), *entry.shape, entry.checksum))
    return digest.hexdigest()


def tensor_checksum(chunk_checksums: Iterable[int]) -> int:
    """05-frame#chunk-records: "XXH64 of the decoded checksums of all chunks, each as a u64"."""
    return xxh64(b"".join(struct.pack("<Q", x) for x in chunk_checksums))


def identify_plain(source: Source) -> None:
    """07-chain#content-id: "For a plain file the checksum is made of its bytes in chunks as a frame would have
    them."."""
    for entry in source.tensors.values():
        step = CHUNK * entry.dtype.size
        starts = range(0, entry.size, step)
        sums = (xxh64(source.read(entry, at, min(step, entry.size - at))) for at in starts)
        entry.checksum = tensor_checksum(sums)
    source.content_id = content_id(source.tensors.values())


class Library:
    """The files that are known, each opened once, and where bases are looked for."""

    def __init__(self, given: list[Path], limit: int) -> None:
        self.given = given
        self.limit = limit
        self.opened: dict[Path, Source] = {}
        self.bases: dict[Path, Source] = {}

    def open(self, path: Path) -> Source:
        """The file at a path."""
        if path not in self.opened:
            self.opened[path] = open_source(path, self.limit)
        return self.opened[path]

    def candidates(self, delta: Source) -> Iterator[Path]:
        """07-chain#resolution: "a reader should look for `file` in the folder of the delta, and then for any
        other file there"; files given on the command line come in between."""
        assert delta.base is not None
        folder = delta.path.parent
        yield folder / delta.base["file"]
        yield from self.given
        for suffix in ("*.ckptz", "*.safetensors"):
            yield from sorted(folder.glob(suffix))

    def base_of(self, delta: Source) -> Source:
        """07-chain#resolution: "a checkpoint with the content id that its reference gives and a depth below the
        one given"."""
        need(delta.base is not None, "C19", "a frame that needs a base, in a file without `base`")
        if delta.path not in self.bases:
            self.bases[delta.path] = self.find_base(delta)
        return self.bases[delta.path]

    def find_base(self, delta: Source) -> Source:
        """Look at the candidates; what is damaged or does not fit is passed over."""
        assert delta.base is not None
        for path in self.candidates(delta):
            try:
                if not path.is_file():
                    continue
                found = self.open(path)
                if found.content_id is None:
                    identify_plain(found)
            except (Refusal, OSError, ValueError):  # ValueError: a path with a NUL
                continue
            if found.content_id == delta.base["content_id"] and found.depth < delta.base["depth"]:
                return found
        refuse("H3", f"the base of {delta.path.name} ({delta.base['file']!r}) is not found")


Key = tuple[Path, str]


@dataclass
class Job:
    """A tensor of some file of the chain, and the tensors that it is decoded with."""

    source: Source
    entry: Entry
    plan: Plan | None  # None: in a plain file
    base: Key | None = None
    named: dict[str, Key] = field(default_factory=dict)
    chunk_at: int = 0  # where the next chunk begins in the frame

    def next_chunk(self, j: int, done: dict[Key, Chunk]) -> Chunk:
        """Chunk j; chunks are asked for in order, those of the base and of named tensors before."""
        if self.plan is None:
            step = CHUNK * self.entry.dtype.size
            n = min(step, self.entry.size - j * step)
            return Chunk(self.entry.dtype, self.source.read(self.entry, j * step, n))
        n = sum(length for _coder, length in self.plan.records[j].streams)
        data = self.source.read(self.entry, self.chunk_at, n)
        self.chunk_at += n
        named = {name: done[key] for name, key in self.named.items()}
        return decode_chunk(self.plan, j, data, done[self.base] if self.base else None, named)


class Decoder:
    """Decodes tensors, with all that they need of the same file and of the files of the chain."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def read_frame(self, source: Source, entry: Entry) -> Plan:
        """06-container#reading, step 6: "compare dtype, shape, length and checksum of the tensor with its
        entry"; the length is compared by the frame's own header."""
        limit = self.library.limit
        plan = read_frame_header(lambda at, n: source.read(entry, at, n), entry.size, limit)
        same = (plan.dtype, plan.shape) == (entry.dtype, entry.shape)
        need(same, "C15", f"the index disagrees with the frame of {entry.name!r} on dtype or shape")
        good = tensor_checksum(record.decoded for record in plan.records) == entry.checksum
        need(good, "C15", f"the index disagrees with the frame of {entry.name!r} on the checksum")
        return plan

    def schedule(self, source: Source, entry: Entry, jobs: dict[Key, Job], depth: int = 0) -> Key:
        """Put a tensor into `jobs`, behind all that it needs; `depth` counts the names that led here."""
        key = (source.path, entry.name)
        if key in jobs and depth == 0:
            return key
        known = jobs.get(key)
        plan = known.plan if known else None if source.plain else self.read_frame(source, entry)
        job = known or Job(source, entry, plan, chunk_at=plan.chunks_at if plan else 0)
        for rule in plan.rules if plan else ():
            if rule.source:
                # 03-transforms#classes: "if A names B and B names C, then C must name none"
                need(depth < 2, "T8", "named tensors that depend on one another further than allowed")
                other = source.tensors.get(rule.source)
                if other is None or other.dtype.units(other.shape) != entry.dtype.units(entry.shape):
                    refuse("T7", f"no tensor {rule.source!r} of the same number of units")
                job.named[rule.source] = self.schedule(source, other, jobs, depth + 1)
        if plan and plan.needs_base and job.base is None:
            base = self.library.base_of(source)
            other = base.tensors.get(entry.name)
            # 07-chain#resolution: "The base of a tensor is the tensor of the same name in the base."
            if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
                refuse("H4", f"the base has no tensor {entry.name!r} of that dtype and shape")
            job.base = self.schedule(base, other, jobs)
        jobs.setdefault(key, job)
        held = sum(job.plan.memory if job.plan else 8 * CHUNK for job in jobs.values())
        need(len(jobs) == 1 or held <= self.library.limit, "limit", "more memory than allowed (--limit)")
        return key

    def chunks(self, source: Source, entry: Entry) -> Iterator[bytes]:
        """The bytes of a tensor, chunk by chunk.

        03-transforms#classes: "A reader should decode each chunk of each file of a chain once, and keep units
        and codes together".
        """
        jobs: dict[Key, Job] = {}
        wanted = self.schedule(source, entry, jobs)
        for j in range(-(-entry.dtype.units(entry.shape) // CHUNK)):
            done: dict[Key, Chunk] = {}
            for key, job in jobs.items():
                done[key] = job.next_chunk(j, done)
            yield done[wanted].data


# -------------------------------------------------------------------------------------------- command line


def plain_header(source: Source) -> bytes:
    """06-container#envelope: the header of a plain safetensors file with the tensors of this one."""
    header: dict[str, Any] = {} if source.metadata is None else {"__metadata__": source.metadata}
    at = 0
    for entry in source.tensors.values():
        offsets = [at, at + entry.bytes]
        header[entry.name] = {"dtype": entry.dtype.name, "shape": entry.shape, "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def decode(path: Path, library: Library, out: Path | None) -> list[dict[str, Any]]:
    """Decode all tensors of a file, write them if they are wanted, and describe them."""
    source = library.open(path)
    total = sum(entry.bytes for entry in source.tensors.values())
    need(total <= library.limit, "limit", f"{total} bytes of tensors are more than allowed (--limit)")
    described = []
    part = Path(f"{out}.part") if out else Path(os.devnull)
    try:
        with open(part, "wb") as file:
            file.write(plain_header(source))
            for entry in source.tensors.values():
                digest = hashlib.sha256()
                for data in Decoder(library).chunks(source, entry):
                    digest.update(data)
                    file.write(data)
                about = {"name": entry.name, "dtype": entry.dtype.name, "shape": entry.shape}
                described.append({**about, "sha256": digest.hexdigest()})
        if out:
            os.replace(part, out)
    finally:
        if out:
            part.unlink(missing_ok=True)
    return described


def main() -> int:
    """The command line: 0 decoded, 1 refused, 2 wrong use or a file that cannot be read or written."""
    parser = argparse.ArgumentParser(description="Decode a .ckptz file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--base", type=Path, action="append", default=[], help="a file to look for bases in")
    parser.add_argument("-o", "--out", type=Path, help="the safetensors file to write")
    parser.add_argument("--json", action="store_true", help="print names, dtypes, shapes and SHA-256")
    parser.add_argument("--limit", type=int, default=2**30, help="most bytes to decode or hold (default: 2^30)")
    given = parser.parse_args()
    try:
        described = decode(given.file, Library(given.base, given.limit), given.out)
    except Refusal as refusal:
        print(str(refusal).encode("unicode_escape").decode("ascii"), file=sys.stderr)
        return 1
    except MemoryError:
        print("limit: out of memory", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({"tensors": described}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
