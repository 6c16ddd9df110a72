#!/usr/bin/env python3
"""A decoder of .ckptz files, written from the pages of the folder above and from nothing else.

The sections follow the pages, and comments quote the sentences that they implement, as `page#anchor: "..."`.
It is made for clarity, not for speed, and needs the standard library only; coder zstd needs `zstandard`.

    python ckptz_decode.py FILE [--base FILE]... [-o OUT.safetensors] [--json] [--limit BYTES]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# ------------------------------------------------------------------------------------------ 00-conventions

KINDS = {  # the rows of the tables of refusals that are not of kind corrupt
    "truncated": "I1 C1",
    "checksum": "F2 F15 C11",
    "unsupported": "E1 T1 Q2 F3 F4 F5 C6 C7 C8",
    "missing-base": "T10 F12 F13 H3 H4",
    "limit": "limit",
}
KIND_OF_RULE = {rule: kind for kind, rules in KINDS.items() for rule in rules.split()}


class Refusal(Exception):
    """00-conventions#words: "give an error instead of a result"."""

    def __init__(self, rule: str, message: str) -> None:
        self.kind = KIND_OF_RULE.get(rule, "corrupt")
        super().__init__(f"{self.kind}: {message}" + (f" ({rule})" if rule != "limit" else ""))


def refuse(rule: str, message: str) -> NoReturn:
    """Give up, by a row of a table of refusals."""
    raise Refusal(rule, message)


def need(condition: object, rule: str, message: str) -> None:
    """Refuse unless the condition holds."""
    if not condition:
        refuse(rule, message)


def product_of(sizes: Iterable[int]) -> int:
    """00-conventions#shapes: "the product of the sizes, 1 for the empty list"."""
    total = 1
    for size in sorted(sizes):  # zeros first; #nothing-is-believed: "in integers that cannot overflow"
        total *= size
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


DTYPES = """BOOL 8 1 no; U8 8 1 no; I8 8 1 no; U16 16 2 no; I16 16 2 no; U32 32 4 no; I32 32 4 no;
U64 64 8 no; I64 64 8 no; F16 16 2 yes; BF16 16 2 yes; F32 32 4 yes; F64 64 8 yes; C64 64 4 yes;
F8_E4M3 8 1 yes; F8_E5M2 8 1 yes; F8_E4M3FNUZ 8 1 yes; F8_E5M2FNUZ 8 1 yes; F8_E8M0 8 1 no; F4 4 1 no;
F6_E2M3 6 1 no; F6_E3M2 6 1 no"""
DTYPE_OF_ID = {
    i: Dtype(i, name, int(bits), int(size), mark == "yes")
    for i, (name, bits, size, mark) in enumerate(map(str.split, DTYPES.split(";")), 1)
}
DTYPE_OF_NAME = {dtype.name: dtype for dtype in DTYPE_OF_ID.values()}

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
MAX_INDEX = 67_108_864  # registry#limits

# --------------------------------------------------------------------------------------------- 01-integers

LETTER = {1: "B", 2: "H", 4: "I", 8: "Q"}  # of `struct`


def unpack(size: int, data: bytes) -> tuple[int, ...]:
    """01-integers#fixed: "little-endian integers", here of `size` bytes each."""
    return struct.unpack(f"<{len(data) // size}{LETTER[size]}", data)


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

    def many(self, n: int, letter: str) -> tuple[Any, ...]:
        """00-conventions#notation: n numbers "in succession"; B, I, Q, q, d are u8, u32, u64, i64, f64."""
        return struct.unpack(f"<{n}{letter}", self.take(n * struct.calcsize("<" + letter)))

    def one(self, letter: str) -> Any:
        """One such number."""
        return self.many(1, letter)[0]

    def varint(self) -> int:
        """01-integers#varint: "groups of seven bits, the least significant group first"."""
        value = 0
        for i in range(10):
            byte: int = self.one("B")
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
        """01-integers#exp-golomb; bits go "from its least significant bit upwards"."""
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
        h = (rotl(h ^ xxh_round(0, rest.one("Q")), 27) * P1 + P4) & M64
    if rest.left() >= 4:
        h = (rotl(h ^ (rest.one("I") * P1 & M64), 23) * P2 + P3) & M64
    while rest.left():
        h = rotl(h ^ (rest.one("B") * P5 & M64), 11) * P1 & M64
    h = (h ^ h >> 33) * P2 & M64
    h = (h ^ h >> 29) * P3 & M64
    return h ^ h >> 32


# ---------------------------------------------------------------------------------------------- 02-entropy


class Table:
    """02-entropy#frequency-table."""

    def __init__(self, cursor: Cursor) -> None:
        first, last, order = cursor.many(3, "B")
        need(first <= last and order <= 11, "E6", "a frequency table with a wrong range or order")
        written = cursor.exp_golomb(last - first, order)  # "of the codes from `first` to `last` - 1"
        need(sum(written) < 4096, "E6", "frequencies whose sum is 4096 or more before the last")
        # "The frequency of `last` is 4096 minus the sum of the others [...] that of `first` must not be 0."
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


def read_tables(cursor: Cursor, classes: int) -> Tables:
    """02-entropy#tables: number, tables, class runs."""
    count = cursor.one("B")
    need(1 <= count <= 64, "E7", "no frequency tables, or more than 64")
    return Tables([Table(cursor) for _ in range(count)], read_runs(cursor, classes, count))


def rans(cursor: Cursor, tables: Iterable[Table], n: int) -> bytes:
    """02-entropy#rans: n codes in stream order; `tables` gives the table of each."""
    index = cursor.one("B")
    need(index < len(LANES), "E9", "a lane index over 2")
    lanes = LANES[index]
    x = list(cursor.many(lanes, "I"))
    need(min(x) >= 2**16, "E10", "a lane state below 2^16")
    need(cursor.left() % 2 == 0, "E11", "an odd number of bytes behind the lane states")
    words = iter(unpack(2, cursor.take(cursor.left())))  # "words | u16 each | all bytes that are left"
    codes = bytearray()
    for i, table in enumerate(itertools.islice(tables, n)):
        lane = i % lanes
        slot = x[lane] % 4096
        s = table.code_of_slot[slot]  # "the s with start(s) <= slot < start(s) + f(s)"
        x[lane] = table.frequency[s] * (x[lane] // 4096) + slot - table.start[s]
        if x[lane] < 2**16:  # "take the next word w: x[l] = x[l] * 2^16 + w"
            word = next(words, None)
            x[lane] = x[lane] * 2**16 + word if word is not None else refuse("E12", "too few rANS words")
        codes.append(s)
    # "At the end every state must be 2^16, and all words must have been taken."
    need(set(x) == {2**16}, "E12", "a state of a rANS stream does not end at 2^16")
    need(next(words, None) is None, "E12", "a rANS stream has words left over")
    return bytes(codes)


def rans_shared(cursor: Cursor, shared: Tables, classes: list[int]) -> bytes:
    """02-entropy#lanes: "sorted by their class, lowest class first, and codes of the same class stay in [...]
    order"."""
    order = sorted(range(len(classes)), key=classes.__getitem__)  # a stable sort
    tables = (shared.tables[shared.of_class[classes[i]]] for i in order)
    codes = bytearray(len(classes))
    for i, code in zip(order, rans(cursor, tables, len(classes)), strict=True):
        codes[i] = code
    return bytes(codes)


def zstd(data: bytes, n: int) -> bytes:
    """02-entropy#streams: "one Zstandard frame (RFC 8878) that decodes to the n codes"."""
    try:
        import zstandard
    except ImportError:
        refuse("E1", "this decoder needs the package `zstandard` for coder zstd")
    need(data[:4] == b"\x28\xb5\x2f\xfd", "E5", "a Zstandard frame that does not begin as one")
    try:
        header = zstandard.get_frame_parameters(data)
        # "must state its content size in its header, and that must be n. It uses no dictionary."
        need(header.content_size == n, "E5", "a Zstandard frame that states another size, or none")
        need(header.dict_id == 0, "E5", "a Zstandard frame that needs a dictionary")
        # "No other frame, also no skippable one, stands before or behind it."
        codes = zstandard.ZstdDecompressor().decompress(data, max_output_size=n, allow_extra_data=False)
    except zstandard.ZstdError:
        refuse("E5", "a Zstandard frame does not decode")
    need(len(codes) == n, "E5", "a Zstandard frame decodes to another size")
    return codes


def sparse_part(cursor: Cursor, most: int) -> bytes:
    """02-entropy#sparse: count, coder, length and stream of the gaps, or of the values."""
    count, coder = cursor.varint(), cursor.one("B")
    need(count <= most, "E13", "a sparse stream with more gaps or values than allowed")
    # "any but rans-shared and sparse"
    need(coder not in (RANS_SHARED, SPARSE), "E13", "a coder that a part of a sparse stream cannot have")
    return decode_stream(coder, cursor.take(cursor.varint()), count)


def sparse(cursor: Cursor, n: int) -> bytes:
    """02-entropy#sparse: "a *gap* is the number of common codes before a value"."""
    codes = bytearray(cursor.take(1)) * n
    gaps = sparse_part(cursor, n + n // 255 + 1)  # "at most n + n / 255 + 1"
    values = sparse_part(cursor, n)  # "number of values, at most n"
    # "There are as many gap codes below 255 as there are values, the last gap code is below 255"
    need(len(gaps) - gaps.count(255) == len(values), "E14", "sparse gaps do not go with the values")
    need(not gaps or gaps[-1] < 255, "E14", "the gaps of a sparse stream end with 255")
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
    need(cursor.left() == 0, "E3", "a stream with bytes left over")  # "The bytes must be used up exactly."
    return codes


# ------------------------------------------------------------------------------------------- 03-transforms


def order(u: int, w: int) -> int:
    """03-transforms#order: "order(u) = top bit of u is 1 ? ~u : u + 2^(w-1)"."""
    return u ^ ((1 << w) - 1) if u >> (w - 1) else u + (1 << (w - 1))


def unorder(o: int, w: int) -> int:
    """03-transforms#order: "unorder(o) = top bit of o is 1 ? o - 2^(w-1) : ~o"."""
    return o - (1 << (w - 1)) if o >> (w - 1) else o ^ ((1 << w) - 1)


def unzigzag(z: int, w: int) -> int:
    """01-integers#zigzag: "unzigzag(z) = (z >> 1) ^ (lowest bit of z ? 2^w - 1 : 0)"."""
    return z >> 1 ^ ((1 << w) - 1 if z & 1 else 0)


def join(streams: list[bytes]) -> tuple[int, ...]:
    """03-transforms#planes: "code stream j holds byte j of the result z, 0 the least significant"."""
    data = bytearray(len(streams) * len(streams[0]))
    for j, stream in enumerate(streams):
        data[j :: len(streams)] = stream
    return unpack(len(streams), bytes(data))


def unplane(mode: int, dtype: Dtype, zs: tuple[int, ...], base: tuple[int, ...]) -> list[int]:
    """03-transforms#planes: the table of modes."""
    w = dtype.size * 8
    if mode == RAW:  # "z"
        return list(zs)
    if mode == ROTATED:  # "z rotated to the right by one bit: (z >> 1) | (z << (w - 1))"
        return [(z >> 1 | z << (w - 1)) % 2**w for z in zs]
    pairs = zip(zs, base, strict=True)
    if mode == XOR:  # "z ^ b"
        return [z ^ b for z, b in pairs]
    if dtype.float:  # "unorder((order(b) + unzigzag(z)) mod 2^w)"
        return [unorder((order(b, w) + unzigzag(z, w)) % 2**w, w) for z, b in pairs]
    return [(b + unzigzag(z, w)) % 2**w for z, b in pairs]  # "(b + unzigzag(z)) mod 2^w"


@dataclass
class Rule:
    """03-transforms#classes: a class rule "gives each unit a *label* below the rule's *radix*"."""

    kind: int
    radix: int = 256  # that of `magnitude`
    source: str = ""  # name of a tensor of the same file; empty: the base
    size: int = 1  # units of a row or of a block
    labels: bytes = b""


def magnitudes(chunk: Chunk) -> list[int]:
    """03-transforms#classes: "the eight bits below the top bit of a unit u"."""
    w = chunk.dtype.size * 8  # "(u >> (w - 9)) mod 256. If u has 8 bits, its low seven: u mod 128"
    return [u % 128 if w == 8 else (u >> (w - 9)) % 256 for u in chunk.units()]


# ----------------------------------------------------------------------------------------- 04-quantization

EXPONENT = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}


def finite(pattern: int, name: str) -> bool:
    """04-quantization#decoding: "its exponent bits [...] are not all 1"."""
    return pattern & EXPONENT[name] != EXPONENT[name]


def to_double(pattern: int) -> float:
    """The value of an F32 pattern, exactly, subnormal ones too."""
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])


def to_f32(value: float) -> int:
    """The F32 pattern of a binary64, "to nearest, ties to even", as `struct` does it but for overflow."""
    try:
        return unpack(4, struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def widen(u: int, name: str) -> int:
    """04-quantization#widening: "BF16 to F32: u << 16. F16 to F32: the F32 pattern of the same value"."""
    if name == "F16":
        return to_f32(struct.unpack("<e", struct.pack("<H", u))[0])
    return u << 16 if name == "BF16" else u


def add(a: int, b: int) -> int:
    """04-quantization#addition: "The sum of two F32 numbers, rounded once."

    The sum in binary64 may be rounded too. Its 53 bits are at least 2 * 24 + 2, so that rounding it again
    gives what one rounding of the exact sum gives; sums below 2^-126 are exact in both.
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
    if m >= 0x477FF000:  # "s | 0x7c00, infinity"
        return s | 0x7C00
    if m <= 0x33000000:  # "s, zero"
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


def read_map(cursor: Cursor, plan: Plan) -> Map:
    """04-quantization#map, field by field."""
    need(plan.dtype.name in EXPONENT, "Q1", f"a map for dtype {plan.dtype.name}")
    kind, rows, codes = cursor.one("B"), cursor.varint(), cursor.varint()
    need(kind <= EXPANDED, "Q2", f"table kind {kind}")
    need(1 <= rows <= 4096 and 1 <= codes <= 256, "Q3", "rows or codes of a map out of range")
    if kind == EXPANDED:
        table = expand(cursor, plan.domain, plan.dtype.size * 8, rows, codes)
    else:  # linear: R * C u32; bits: "u32 for F32, u16 for BF16 and F16"
        letter = "I" if plan.domain == LINEAR else LETTER[plan.dtype.size]
        table = [array("I", cursor.many(codes, letter)) for _ in range(rows)]
    # "only if R > 1; else every class has row 0"
    row_of_class = read_runs(cursor, plan.classes, rows) if rows > 1 else [0] * plan.classes
    zero_code = cursor.one("B") if plan.flags & FLAG_ZERO else None
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
    # "three roundings": Python rounds the product, then the sum, to binary64, and to_f32 the result
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
    mode: int = RAW
    rules: list[Rule] = field(default_factory=list)
    map: Map | None = None
    tables: list[Tables] = field(default_factory=list)  # one for each code stream, or none
    row: tuple[int, ...] = ()
    column: tuple[int, ...] = ()
    records: list[Record] = field(default_factory=list)
    header_length: int = 0

    def __post_init__(self) -> None:
        self.units = self.dtype.units(self.shape)
        # 05-frame#chunks: "one code stream for each byte of a unit", or "the code stream"
        self.code_streams = self.dtype.size if self.domain == PLANES else 1
        escape, protected = bool(self.flags & FLAG_ESCAPE), bool(self.flags & FLAG_PROTECTED)
        self.streams = self.code_streams + escape * self.dtype.size + protected * (1 + self.dtype.size)

    @property
    def groups_by_base_codes(self) -> bool:
        """Whether "there is a rule `base-code`"."""
        return any(rule.kind == BASE_CODE for rule in self.rules)

    @property
    def needs_base(self) -> bool:
        """05-frame#plan: "A frame *needs a base* if its predictor is `base`, or if it has a rule [...]"."""
        unnamed = any(rule.kind == MAGNITUDE and not rule.source for rule in self.rules)
        return self.predictor == BASE or self.groups_by_base_codes or unnamed

    @property
    def classes(self) -> int:
        """03-transforms#classes: "the product of their radices"; one class without rules."""
        return math.prod(rule.radix for rule in self.rules)

    @property
    def memory(self) -> int:
        """About how many bytes are held while a chunk is decoded."""
        lists = len(self.row) + len(self.column) + sum(len(rule.labels) for rule in self.rules)
        entries = len(self.map.table) * self.map.codes if self.map else 0
        tables = sum(len(shared.tables) for shared in self.tables) * 16384
        chunk = min(CHUNK, self.units) * (self.dtype.size + 1)
        return chunk + tables + 4 * entries + 40 * lists + 1024 * len(self.records)


def read_plan(cursor: Cursor, limit: int) -> Plan:
    """05-frame#plan, field by field."""
    version, dtype_id, domain, predictor = cursor.many(4, "B")
    flags, dimensions = cursor.one("I"), cursor.one("B")
    need(version == 0, "F3", f"frame version {version}")
    need(dtype_id in DTYPE_OF_ID, "F4", f"dtype {dtype_id}")
    need(domain <= BITS and predictor <= OUTER, "F4", f"domain {domain}, predictor {predictor}")
    need(flags < 8, "F5", f"frame flags {flags:#x}")
    need(flags == 0 or domain != PLANES, "F6", "flags in the domain `planes`")
    # #shape: "At most 64 dimensions. The product of the dimensions, where each 0 counts as 1, is at most
    # 2^48."
    need(dimensions <= 64, "F7", "more than 64 dimensions")
    shape = [cursor.varint() for _ in range(dimensions)]
    need(product_of(size or 1 for size in shape) <= 2**48, "F7", "a shape over 2^48")
    plan = Plan(DTYPE_OF_ID[dtype_id], domain, predictor, flags, shape)
    need(plan.units * plan.dtype.size <= limit, "limit", "a tensor is larger than allowed (--limit)")
    if domain == PLANES:
        plan.mode = cursor.one("B")
        need(plan.mode <= DIFFERENCE, "T1", f"plane mode {plan.mode}")
        # "The predictor is `base` if and only if the plane mode is `xor` or `difference` [...] otherwise it
        # is `zero` there."
        right = BASE if plan.mode in (XOR, DIFFERENCE) else ZERO
        need(predictor == right, "F9", "a predictor that does not go with the plane mode")
    count = cursor.one("B")
    need(count <= 3, "T2", "more than 3 class rules")
    for _ in range(count):
        plan.rules.append(read_rule(cursor, plan))
    need(plan.classes <= 4096, "T2", "more than 4096 classes")
    if domain != PLANES:
        plan.map = read_map(cursor, plan)
    if plan.rules:  # "tables, once for each code stream of a chunk"
        plan.tables = [read_tables(cursor, plan.classes) for _ in range(plan.code_streams)]
    if predictor == OUTER:
        read_vectors(cursor, plan)
    return plan


def read_vectors(cursor: Cursor, plan: Plan) -> None:
    """05-frame#plan: "row has as many elements as the first dimension, column as many as the product of the
    others; a missing dimension counts as 1"."""
    plan.row = cursor.many(product_of(plan.shape[:1]), "I")
    plan.column = cursor.many(product_of(plan.shape[1:]), "I")
    good = all(finite(x, "F32") for x in plan.row + plan.column)
    need(good, "Q9", "an outer vector with an element that is infinite or NaN")


def read_rule(cursor: Cursor, plan: Plan) -> Rule:
    """05-frame#class-rules."""
    rule = Rule(cursor.one("B"))
    need(MAGNITUDE <= rule.kind <= BASE_CODE, "T1", f"class rule {rule.kind}")
    if rule.kind == MAGNITUDE:
        rule.source = cursor.text()
        return rule
    rule.radix = cursor.varint()
    need(1 <= rule.radix <= 256, "T3", "a stored radix outside 1 to 256")
    if rule.kind == BASE_CODE:
        return rule
    if rule.kind == ROW:
        # 03-transforms#classes: "*Row units* are the units of the tensor divided by its first dimension,
        # which must divide them; a tensor without dimensions is one row."
        count = product_of(plan.shape[:1])
        need(count == 0 or plan.units % count == 0, "T4", "the first dimension does not divide the units")
        rule.size = plan.units // count if count else 0
    else:
        rule.size = cursor.varint()
        need(1 <= rule.size <= 2**48, "T5", "a block size outside 1 to 2^48")
        count = -(-plan.units // rule.size)  # "units / block size, rounded up"
    count = count if plan.units else 0  # "A tensor without units has no labels."
    total = count + sum(len(other.labels) for other in plan.rules)
    need(total <= 2**24, "T6", "more than 2^24 labels of all rules together")
    coder = cursor.one("B")
    rule.labels = decode_stream(coder, cursor.take(cursor.varint()), count)
    need(max(rule.labels, default=0) < rule.radix, "T3", "a stored label that is not below the radix")
    return rule


def read_records(cursor: Cursor, plan: Plan) -> None:
    """05-frame#chunk-records: "All records of a frame have the same size."."""
    chunks = -(-plan.units // CHUNK)
    sums = 3 if plan.groups_by_base_codes else 2
    # #decoding: "The bytes that remain for them must be exactly what the number of chunks calls for."
    need(cursor.left() == chunks * (8 * sums + 5 * plan.streams), "F10", "chunk records of another size")
    for _ in range(chunks):
        stored, decoded, base_codes = (*cursor.many(sums, "Q"), None)[:3]
        streams = [(cursor.one("B"), cursor.one("I")) for _ in range(plan.streams)]
        for i, (coder, _length) in enumerate(streams):
            need(coder <= SPARSE, "E1", f"coder {coder}")
            # #chunks: "Coder rans-shared is for code streams only."
            shareable = plan.rules and i < plan.code_streams
            need(coder != RANS_SHARED or shareable, "E2", "coder rans-shared where there are no tables")
        plan.records.append(Record(stored, decoded, base_codes, streams))


def read_frame_header(source: Source, entry: Entry, limit: int) -> Plan:
    """05-frame#decoding, "The header"."""
    need(entry.size >= 12, "F1", "a frame of less than 12 bytes")
    length = unpack(4, source.read(entry, 0, 4))[0]
    need(12 <= length <= entry.size, "F1", "a header length below 12 or beyond the frame")
    need(length <= limit, "limit", "the header of a frame is larger than allowed (--limit)")
    header = source.read(entry, 0, length)
    # "Check the header checksum before anything else of the header is believed."
    good = xxh64(header[:-8]) == unpack(8, header[-8:])[0]
    need(good, "F2", "the checksum of a frame header does not match")
    cursor = Cursor(header[4:-8])
    plan = read_plan(cursor, limit)
    read_records(cursor, plan)
    # "The length of the header and of all streams must be the length of the frame."
    total = length + sum(size for record in plan.records for _coder, size in record.streams)
    need(total == entry.size, "F11", "a frame of another length than its header and chunks")
    plan.header_length = length
    return plan


@dataclass
class Chunk:
    """A decoded chunk: the bytes of its units, and its codes if the frame has a map."""

    dtype: Dtype
    data: bytes
    codes: bytes | None = None

    def units(self) -> tuple[int, ...]:
        """The units."""
        return unpack(self.dtype.size, self.data)


class Streams:
    """05-frame#chunks: "The bytes of a chunk are its streams one after another"."""

    def __init__(self, record: Record, data: bytes) -> None:
        self.records = iter(record.streams)
        self.cursor = Cursor(data)

    def next(self, n: int, shared: Tables | None = None, classes: list[int] | None = None) -> bytes:
        """The n codes of the next stream."""
        coder, length = next(self.records)
        return decode_stream(coder, self.cursor.take(length), n, shared, classes)

    def values(self, size: int, n: int) -> Iterator[int]:
        """Escaped or protected values: "one stream for each byte of a unit, least significant first"."""
        return iter(join([self.next(n) for _ in range(size)]))


def class_of_units(plan: Plan, j: int, n: int, base: Chunk, named: dict[str, Chunk]) -> list[int]:
    """03-transforms#classes: "the mixed-radix number of the labels, the first rule most significant"."""
    classes = [0] * n
    for rule in plan.rules:
        if rule.kind == MAGNITUDE:
            labels = magnitudes(named[rule.source] if rule.source else base)
        elif rule.kind == BASE_CODE:  # "If the base has no such codes [...] every label is 0."
            labels = list(base.codes or bytes(n))
            need(max(labels) < rule.radix, "T9", "a base code that is not below the radix")
        else:  # "labels[i / row units]", "labels[i / block size]"
            labels = [rule.labels[i // rule.size] for i in range(j * CHUNK, j * CHUNK + n)]
        classes = [a * rule.radix + label for a, label in zip(classes, labels, strict=True)]
    return classes


def predictions(plan: Plan, j: int, n: int, base: Chunk) -> Iterable[int]:
    """04-quantization#decoding: P of each unit, an F32 pattern (linear) or a unit (bits)."""
    name, linear = plan.dtype.name, plan.domain == LINEAR
    if plan.predictor == ZERO:
        return [0] * n
    if plan.predictor == BASE:
        return (widen(u, name) if linear else u for u in base.units())
    length, where = len(plan.column), range(j * CHUNK, j * CHUNK + n)
    products = (product(plan.row[i // length], plan.column[i % length]) for i in where)
    return products if linear else (cast(p, name) for p in products)


def unit_of(plan: Plan, p: int, entry: int) -> int:
    """04-quantization#decoding: the unit of a prediction and an entry, which must be finite."""
    w, name = plan.dtype.size * 8, plan.dtype.name
    if plan.domain == BITS:  # "unorder( (order(P) + T[r][c]) mod 2^w )"
        unit = unorder((order(p, w) + entry) % 2**w, w)
    else:  # "cast( add(P, T[r][c]) )"; the sum is tested too, as "A NaN is never cast where it counts."
        total = add(p, entry)
        unit = cast(total, name) if finite(total, "F32") else EXPONENT[name]
    need(finite(unit, name), "Q7", "a unit that is not finite, and neither escaped nor protected")
    return unit


def unmap(
    plan: Plan, j: int, codes: bytes, classes: list[int], base: Chunk, streams: Streams
) -> Iterator[int]:
    """04-quantization#decoding: look up, add, cast and replace."""
    rule, size, n = plan.map, plan.dtype.size, len(codes)
    assert rule is not None
    need(max(codes) < rule.codes, "Q6", "a code that is not below C")
    # #map: "the last code, C - 1, is the *escape code*"
    escape = rule.codes - 1 if plan.flags & FLAG_ESCAPE else None
    none: Iterator[int] = iter(())
    escaped = none if escape is None else streams.values(size, codes.count(escape))
    mask, protected = bytes(n), none
    if plan.flags & FLAG_PROTECTED:
        mask = streams.next(n)
        need(max(mask) <= 1, "Q8", "a mask with other codes than 0 and 1")
        protected = streams.values(size, mask.count(1))
    for c, k, p, kept in zip(codes, classes, predictions(plan, j, n, base), mask, strict=True):
        # "the exceptions, each replacing what came before": here from the last to the first. An escaped value
        # that a protected one replaces is stored all the same.
        exact = next(escaped) if c == escape else None
        if kept:  # "where the mask is 1 it is the next of the chunk's protected values"
            exact = next(protected)
        elif exact is None and c == rule.zero_code:  # "where c is the zero code the unit is 0"
            exact = 0
        yield unit_of(plan, p, rule.table[rule.row_of_class[k]][c]) if exact is None else exact


def decode_streams(plan: Plan, j: int, data: bytes, base: Chunk, named: dict[str, Chunk]) -> Chunk:
    """05-frame#decoding, "A chunk of n units", by its five steps."""
    record, n = plan.records[j], min(CHUNK, plan.units - j * CHUNK)
    if plan.groups_by_base_codes:  # "XXH64 of the base's codes in this chunk [...]; 0 if the base has none"
        right = 0 if base.codes is None else xxh64(base.codes)
        need(record.base_codes == right, "T10", "the base holds other codes than this frame was made with")
    classes = class_of_units(plan, j, n, base, named)
    streams = Streams(record, data)
    shared: list[Any] = plan.tables or [None] * plan.code_streams
    codes = [streams.next(n, tables, classes) for tables in shared]
    if plan.domain == PLANES:
        units: Iterable[int] = unplane(plan.mode, plan.dtype, join(codes), base.units())
    else:
        units = unmap(plan, j, codes[0], classes, base, streams)
    result = struct.pack(f"<{n}{LETTER[plan.dtype.size]}", *units)
    need(xxh64(result) == record.decoded, "F14", "decoded units with another checksum")
    return Chunk(plan.dtype, result, None if plan.domain == PLANES else codes[0])


def decode_chunk(plan: Plan, j: int, data: bytes, base: Chunk, named: dict[str, Chunk]) -> Chunk:
    """05-frame#decoding: "The stored checksum tells damage from a wrong base"."""
    try:
        return decode_streams(plan, j, data, base, named)
    except Refusal as fault:
        if fault.kind == "unsupported":
            raise
        # "If it is wrong, the bytes were damaged (kind *checksum*)."
        need(xxh64(data) == plan.records[j].stored, "F15", "stored bytes with another checksum")
        # "while the stored checksum is right and the frame needs a base, then what was taken for the base is
        # another tensor (kind *missing base*)"
        right = fault.kind == "missing-base" or not plan.needs_base
        need(right, "F13", f"the base is another tensor: {fault}")
        raise


# -------------------------------------------------------------------------------------------- 06-container


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """06-container#json."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), "C3", f"a key twice in an object of the {where}")
        return dict(items)  # "No object has a key twice."

    def number(text: str) -> Any:
        # "`NaN` and `Infinity` do not occur, nor does a number beyond the range of a double."
        need(math.isfinite(float(text)), "C3", f"a number of the {where} that is not finite")
        return int(text) if text.lstrip("-").isdigit() else float(text)

    # "The characters `[`, `{` and `,` occur at most 4,194,304 times together, whatever they stand for."
    need(sum(map(data.count, b"[{,")) <= 4_194_304, "C3", f"too many values in the {where}")
    try:
        value: dict[str, Any] = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_int=number,
            parse_float=number,
            parse_constant=number,
        )
        if b"\\u" in data:  # "A string has no half of a surrogate pair."
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):  # of which UnicodeError and JSONDecodeError are kinds
        refuse("C3", f"the {where} is not JSON as it should be")
    need(type(value) is dict, "C3", f"the {where} is not an object")
    return value


def is_integer(x: Any) -> bool:
    """06-container#json: "An integer has no fraction and no exponent, and is from 0 to 2^63 - 1."."""
    return type(x) is int and 0 <= x < 2**63


IS_A: dict[str, Callable[[Any], Any]] = {
    "string": lambda x: type(x) is str,
    "integer": is_integer,
    "number": lambda x: type(x) in (int, float),
    "integers": lambda x: type(x) is list and all(map(is_integer, x)),
    "array": lambda x: type(x) is list,
    "object": lambda x: type(x) is dict,
    "strings": lambda x: type(x) is list and all(type(y) is str for y in x),
    "texts": lambda x: type(x) is dict and all(type(y) is str for y in x.values()),
    "sha256": lambda x: type(x) is str and re.fullmatch("[0-9a-f]{64}", x),
    "xxh64": lambda x: type(x) is str and re.fullmatch("[0-9a-f]{16}", x),
}


def check_fields(thing: Any, required: str, optional: str = "", rule: str = "C13") -> dict[str, Any]:
    """An object with these fields (`name:type`) and no others; optional ones that are missing are None.

    06-container#json: "Fields that these pages do not name do not occur. A field that may be missing may as
    well be `null`, except `carried`; the two mean the same."
    """
    need(type(thing) is dict, rule, f"not an object with the fields {required}")
    must, may = (dict(item.split(":") for item in fields.split()) for fields in (required, optional))
    for name in thing:
        need(name in must or name in may, rule, f"an unknown field {name!r}")
    for name, kind in must.items():
        need(name in thing and IS_A[kind](thing[name]), rule, f"field {name} is missing or no {kind}")
    for name, kind in may.items():
        null = name not in thing or (thing[name] is None and name != "carried")
        need(null or IS_A[kind](thing[name]), rule, f"field {name} is no {kind}")
    return {name: thing.get(name) for name in (*must, *may)}


@dataclass
class Entry:
    """A tensor of a file, or a region of its envelope."""

    name: str
    dtype_name: str
    shape: list[int]
    offset: int  # from the end of the envelope's header
    size: int  # of the region
    checksum: int | None = None  # of the tensor

    def __post_init__(self) -> None:
        need(self.dtype_name in DTYPE_OF_NAME, "C6", f"dtype {self.dtype_name!r}")
        self.dtype = DTYPE_OF_NAME[self.dtype_name]
        self.units = self.dtype.units(self.shape)
        self.bytes = self.units * self.dtype.size


@dataclass
class Source:
    """A file, plain or .ckptz, whose envelope and index have been checked."""

    path: Path
    data_at: int  # the end of the envelope's header
    plain: bool = True
    tensors: dict[str, Entry] = field(default_factory=dict)
    metadata: dict[str, str] | None = None
    base: dict[str, Any] | None = None
    content_id: str | None = None
    features: tuple[str, ...] = ()

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
        need(len(fields["data_offsets"]) == 2, "C4", f"the offsets of {name!r} are not two")
        begin, end = fields["data_offsets"]
        regions.append(Entry(name, fields["dtype"], fields["shape"], begin, end - begin))
        # "The size of a region is that of its dtype and shape."
        need(end - begin == regions[-1].bytes, "C4", f"the region of {name!r} has not the size of its shape")
    # "A region without bytes comes before the one that begins at the same offset; several of them stand in
    # the order of the header."
    regions.sort(key=lambda entry: (entry.offset, entry.size))
    at = 0
    for entry in regions:  # "begin at 0, leave no gaps, do not overlap and end with the file"
        need(entry.offset == at, "C5", "a gap between the regions, or an overlap")
        at += entry.size
    need(at <= data_size, "C1", "the file ends before its last region")
    need(at == data_size, "C5", "bytes behind the last region")
    return regions


def open_source(path: Path) -> Source:
    """06-container#reading, steps 1 to 4."""
    size = os.path.getsize(path)
    need(size >= 8, "C1", "the file ends before its header")
    length = unpack(8, read_at(path, 0, 8))[0]
    need(length <= 100_000_000, "C2", "a header of more than 100,000,000 bytes")
    need(8 + length <= size, "C1", "the file ends before its header")
    text = read_at(path, 8, length)
    need(text[:1] == b"{", "C2", "a header that does not begin with `{`")
    header = parse_json(text, "header")
    outer = {"__metadata__": header.pop("__metadata__", None)}
    metadata = check_fields(outer, "", "__metadata__:texts", "C4")["__metadata__"]
    source = Source(path, 8 + length)
    if metadata is not None and metadata.get("ckptz.format") == "ckptz":
        source.features = check_version(metadata)
        open_ckptz(source, read_regions(header, size - source.data_at), metadata)
        return source
    source.metadata = metadata
    for entry in read_regions(header, size - source.data_at):
        # "names that begin with `__ckptz__` must be refused in it all the same"
        need(not entry.name.startswith("__ckptz__"), "C17", f"a plain file with the name {entry.name!r}")
        source.tensors[entry.name] = entry
    return source


def check_version(metadata: dict[str, str]) -> tuple[str, ...]:
    """06-container#reading: "Compare the version, then the features"; gives the features."""
    version = metadata.get("ckptz.version")
    need(version == "0.1", "C7", f"format version {version!r}")
    features = metadata.get("ckptz.required_features", "lossless").split(",")
    for feature in features:
        need(feature in FEATURES, "C8", f"feature {feature!r}")
    keys = {"ckptz.format", "ckptz.version", "ckptz.required_features", "ckptz.index_sha256"}
    need(set(metadata) == keys, "C9", "a `__metadata__` with other keys than the four")
    return tuple(features)


def open_ckptz(source: Source, regions: list[Entry], metadata: dict[str, str]) -> None:
    """06-container#reading, steps 3 and 4."""
    for entry in regions:  # "Every region has dtype U8 and as its shape one dimension, its size."
        need(entry.dtype.name == "U8" and len(entry.shape) == 1, "C10", "a region that is not of bytes")
    need(regions and regions[-1].name == "__ckptz__.index", "C10", "the last region is not the index")
    last = regions.pop()
    need(last.size <= 2 * MAX_INDEX, "C12", "an index that is over 64 MiB")
    data = source.read(last, 0, last.size)
    good = hashlib.sha256(data).hexdigest() == metadata["ckptz.index_sha256"]
    need(good, "C11", "an index with another SHA-256")
    index = check_fields(
        parse_json(inflate(data), "index"),
        "writer:string content_id:sha256 tensors:array",
        "metadata:texts base:object step:integer sharding:object tree:object",
    )
    entries = [read_entry(thing) for thing in index["tensors"]]
    found = [(entry.name, entry.offset, entry.size) for entry in entries]
    right = [(entry.name, entry.offset, entry.size) for entry in regions]
    need(found == right, "C14", "an index that disagrees with the regions")
    for entry in entries:
        need(not entry.name.startswith("__ckptz__"), "C17", f"a tensor with the name {entry.name!r}")
    need(content_id(entries) == index["content_id"], "C16", "a content id that the entries do not give")
    if index["sharding"] is not None:
        check_sharding(index["sharding"])
    if index["base"] is not None:
        need("delta" in source.features, "C18", "a `base` in a file without the feature `delta`")
        source.base = read_base(index["base"])
    source.plain, source.tensors = False, {entry.name: entry for entry in entries}
    source.metadata, source.content_id = index["metadata"], index["content_id"]


def inflate(data: bytes) -> bytes:
    """06-container#index: "0, as it is; 1, as one zlib stream (RFC 1950) that ends with the region"."""
    need(data[:1] in (b"\0", b"\1"), "C12", "an index that is neither plain nor deflated")
    text = data[1:]
    if data[0] == 1:
        stream = zlib.decompressobj()
        try:
            text = stream.decompress(text, MAX_INDEX + 1)
        except zlib.error:
            refuse("C12", "an index that does not inflate")
        ended = stream.eof and not stream.unused_data
        need(ended, "C12", "an index that is too long, does not inflate or has bytes behind")
    need(len(text) <= MAX_INDEX, "C12", "an index of more than 64 MiB")
    return text


def read_entry(thing: Any) -> Entry:
    """06-container#tensor-entries."""
    must = "name:string dtype:string shape:integers offset:integer n_bytes:integer checksum:xxh64"
    entry = check_fields(thing, must, "lossy:object")
    need(len(entry["shape"]) <= 64, "C13", "a shape of more than 64 dimensions")
    if entry["lossy"] is not None:  # #lossy-record: "Nothing is decoded by it."
        record = check_fields(
            entry["lossy"],
            "method:string layer_type:string levels:integer prune:number protect:number n_pruned:integer "
            "n_protected:integer max_abs_error:number rms_error:number rms:number promise:string",
        )
        known = (record["method"], record["promise"]) == ("kmeans", "none")
        need(known, "C13", "a lossy record of another method or promise")
    name, dtype, shape, offset, n_bytes, checksum = (entry[item.split(":")[0]] for item in must.split())
    return Entry(name, dtype, shape, offset, n_bytes, int(checksum, 16))


def check_sharding(thing: Any) -> None:
    """06-container#sharding: fields and types; its rules are for readers that follow it."""
    record = check_fields(thing, "shards:array", "index_file:string index_text:string carried:strings")
    for shard in record["shards"]:
        check_fields(shard, "file:string tensors:strings", "metadata:texts")


# ------------------------------------------------------------------------------------------------ 07-chain


def tensor_checksum(chunk_checksums: Iterable[int]) -> int:
    """05-frame#chunk-records: "XXH64 of the decoded checksums of all chunks, each as a u64"."""
    return xxh64(b"".join(struct.pack("<Q", x) for x in chunk_checksums))


def content_id(entries: Iterable[Entry]) -> str:
    """07-chain#content-id: "tensors sorted by the UTF-8 bytes of their names"."""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.name.encode()):
        for text in (entry.name.encode(), entry.dtype.name.encode()):
            digest.update(struct.pack("<Q", len(text)) + text)
        numbers = len(entry.shape), *entry.shape, entry.checksum
        digest.update(struct.pack(f"<{len(numbers)}Q", *numbers))
    return digest.hexdigest()


def identify_plain(source: Source) -> None:
    """07-chain#content-id: "made of its bytes in chunks as a frame would have them"."""
    for entry in source.tensors.values():
        step = CHUNK * entry.dtype.size
        starts = range(0, entry.size, step)
        sums = (xxh64(source.read(entry, at, min(step, entry.size - at))) for at in starts)
        entry.checksum = tensor_checksum(sums)
    source.content_id = content_id(source.tensors.values())


def read_base(thing: Any) -> dict[str, Any]:
    """07-chain#base-reference."""
    base = check_fields(thing, "content_id:sha256 file:string depth:integer")
    need(1 <= base["depth"] <= 64, "H1", "a depth outside 1 to 64")
    # "1 to 255 bytes of UTF-8, not `.` or `..`, and without `/`, characters below 0x20 and 0x7f"
    good = re.fullmatch(r"[^/\x00-\x1f\x7f]+", base["file"]) and base["file"] not in (".", "..")
    need(good and len(base["file"].encode()) <= 255, "H2", "the `file` of a base is not one path component")
    return base


class Library:
    """The files that are known, each opened once, and where bases are looked for."""

    def __init__(self, given: list[Path], limit: int) -> None:
        self.given, self.limit = given, limit
        self.opened: dict[Path, Source | None] = {}
        self.bases: dict[Path, Source] = {}

    def candidates(self, delta: Source, file: str) -> Iterator[Path]:
        """07-chain#resolution: "look for `file` in the folder of the delta, and then for any other file
        there"; the files given on the command line come in between."""
        folder = delta.path.parent
        yield folder / file
        yield from self.given
        for suffix in ("*.ckptz", "*.safetensors"):
            yield from sorted(folder.glob(suffix))

    def try_open(self, path: Path) -> Source | None:
        """A file with its content id, or None if it is not there or refused."""
        if path not in self.opened:
            self.opened[path] = None
            try:
                source = open_source(path) if path.is_file() else None
                if source and source.content_id is None:
                    identify_plain(source)
                self.opened[path] = source
            except (Refusal, OSError):
                pass
        return self.opened[path]

    def base_of(self, delta: Source) -> Source:
        """07-chain#resolution: "a checkpoint with the content id that its reference gives and a depth below
        the one given"."""
        reference = delta.base or refuse("C19", "a frame that needs a base, in a file without `base`")
        if delta.path not in self.bases:
            for path in self.candidates(delta, reference["file"]):
                found = self.try_open(path)
                if found and found.content_id == reference["content_id"] and found.depth < delta.depth:
                    self.bases[delta.path] = found
                    break
            else:
                refuse("H3", f"the base of {delta.path.name}, {reference['file']!r}, is not found")
        return self.bases[delta.path]


Key = tuple[Path, str]


@dataclass
class Job:
    """A tensor of some file of the chain, and the tensors that it is decoded with."""

    source: Source
    entry: Entry
    plan: Plan | None  # None: in a plain file
    base: Key | None = None
    named: dict[str, Key] = field(default_factory=dict)
    at: int = 0  # where the next chunk begins in the region

    def next_chunk(self, j: int, done: dict[Key, Chunk]) -> Chunk:
        """Chunk j; chunks are asked for in order, those of the base and of named tensors before."""
        if self.plan is None:
            step = CHUNK * self.entry.dtype.size
            data = self.source.read(self.entry, j * step, min(step, self.entry.size - j * step))
            return Chunk(self.entry.dtype, data)
        n = sum(length for _coder, length in self.plan.records[j].streams)
        data = self.source.read(self.entry, self.plan.header_length + self.at, n)
        self.at += n
        base = done[self.base] if self.base else Chunk(self.plan.dtype, b"")
        return decode_chunk(self.plan, j, data, base, {name: done[key] for name, key in self.named.items()})


def read_frame(source: Source, entry: Entry, limit: int) -> Plan:
    """06-container#reading: "compare dtype, shape, length and checksum of the tensor with its entry"."""
    plan = read_frame_header(source, entry, limit)
    same = (plan.dtype, plan.shape) == (entry.dtype, entry.shape)
    need(same, "C15", f"the index disagrees with the frame of {entry.name!r} on dtype or shape")
    need(plan.map is None or "maps" in source.features, "C20", "a map in a file without the feature `maps`")
    good = tensor_checksum(record.decoded for record in plan.records) == entry.checksum
    need(good, "C15", f"the index disagrees with the frame of {entry.name!r} on the checksum")
    return plan


def schedule(library: Library, source: Source, entry: Entry, jobs: dict[Key, Job], depth: int = 0) -> Key:
    """Put a tensor into `jobs`, behind all that it needs; `depth` counts the names that led here."""
    key = (source.path, entry.name)
    job = jobs.get(key)
    if job is None:
        plan = None if source.plain else read_frame(source, entry, library.limit)
        job = Job(source, entry, plan)
    for name in {rule.source for rule in job.plan.rules if rule.source} if job.plan else ():
        # 03-transforms#classes: "if A names B and B names C, then C must name none"
        need(depth < 2, "T8", "named tensors that depend on one another further than allowed")
        other = source.tensors.get(name)
        if other is None or other.units != entry.units:
            refuse("T7", f"a rule names {name!r}, which is not there or has another number of units")
        job.named[name] = schedule(library, source, other, jobs, depth + 1)
    if job.plan and job.plan.needs_base and job.base is None:
        base = library.base_of(source)
        # 07-chain#resolution: "The base of a tensor is the tensor of the same name in the base."
        other = base.tensors.get(entry.name)
        if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
            refuse("H4", f"the base has no tensor {entry.name!r} of that dtype and shape")
        job.base = schedule(library, base, other, jobs)
    jobs.setdefault(key, job)
    held = sum(job.plan.memory if job.plan else 8 * CHUNK for job in jobs.values())
    need(held <= library.limit, "limit", "decoding takes more memory than allowed (--limit)")
    return key


def decode_tensor(library: Library, source: Source, entry: Entry) -> Iterator[bytes]:
    """The bytes of a tensor. 03-transforms#classes: "A reader should decode each chunk of each file of a
    chain once, and keep units and codes together"."""
    jobs: dict[Key, Job] = {}
    wanted = schedule(library, source, entry, jobs)
    for j in range(-(-entry.units // CHUNK)):
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
    source = open_source(path)
    total = sum(entry.bytes for entry in source.tensors.values())
    need(total <= library.limit, "limit", f"{total} bytes of tensors are more than allowed (--limit)")
    described = []
    part = Path(f"{out}.part") if out else Path(os.devnull)
    try:
        with open(part, "wb") as file:
            file.write(plain_header(source))
            for entry in source.tensors.values():
                digest = hashlib.sha256()
                for data in decode_tensor(library, source, entry):
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
    parser.add_argument("--base", type=Path, action="append", default=[], help="a file that may be a base")
    parser.add_argument("-o", "--out", type=Path, help="the safetensors file to write")
    parser.add_argument("--json", action="store_true", help="print names, dtypes, shapes and SHA-256")
    parser.add_argument("--limit", type=int, default=2**30, help="most bytes to decode or hold (2^30)")
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
