"""One tensor of the format: streams, transforms, quantization maps, frames.

Implements the pages 00 to 05 of the folder above and the registry, and nothing else; `ckptz_decode.py` goes
on with files. The sections follow the pages, and text in "double quotes" after `page#anchor:` is a
sentence of that page, or a part of one. Made for clarity, not for speed, with the standard library only;
coder zstd needs the package `zstandard`.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# --- 00-conventions -------------------------------------------------------------------------------------

KINDS = {  # the rows of the tables of refusals that are not of kind corrupt
    "truncated": "I1 C1",
    "checksum": "F2 F15 C11",
    "unsupported": "E1 T1 Q2 F3 F4 F5 C6 C7 C8",
    "missing base": "T10 F12 F13 H3 H4",
    "limit": "limit",
}


class Refusal(Exception):
    """00-conventions#words: "give an error instead of a result"; `rule` is a row of a table of refusals."""

    def __init__(self, rule: str, about: str = "") -> None:
        self.rule, self.about = rule, about
        self.kind = next((kind for kind, rules in KINDS.items() if rule in rules.split()), "corrupt")
        super().__init__(rule, about)


def need(condition: object, rule: str, about: str = "") -> None:
    """Refuse unless the condition holds."""
    if not condition:
        raise Refusal(rule, about)


# --- registry -------------------------------------------------------------------------------------------


class Dtype(NamedTuple):
    """registry#dtypes: a row; `size` is the bytes of a pattern."""

    id: int
    name: str
    bits: int
    size: int
    is_float: bool

    def patterns(self, shape: Iterable[int]) -> int:
        """00-conventions#shapes: "elements * bits of an element / 8 / bytes of a pattern"."""
        bits = math.prod(shape) * self.bits
        need(bits % 8 == 0, "F8")
        return bits // 8 // self.size


DTYPES = """BOOL 8 1 no; U8 8 1 no; I8 8 1 no; U16 16 2 no; I16 16 2 no; U32 32 4 no; I32 32 4 no;
U64 64 8 no; I64 64 8 no; F16 16 2 yes; BF16 16 2 yes; F32 32 4 yes; F64 64 8 yes; C64 64 4 yes;
F8_E4M3 8 1 yes; F8_E5M2 8 1 yes; F8_E4M3FNUZ 8 1 yes; F8_E5M2FNUZ 8 1 yes; F8_E8M0 8 1 no; F4 4 1 no;
F6_E2M3 6 1 no; F6_E3M2 6 1 no"""
ROWS = enumerate(map(str.split, DTYPES.split(";")), 1)
DTYPE_OF_ID = {i: Dtype(i, name, int(bits), int(size), yes == "yes") for i, (name, bits, size, yes) in ROWS}
DTYPE_OF_NAME = {dtype.name: dtype for dtype in DTYPE_OF_ID.values()}

CONSTANT, STORED, ZSTD, RANS_SHARED, RANS_OWN, SPARSE = range(6)  # registry#coders
HUFFMAN = 7
CODERS = {*range(6), HUFFMAN}
LANES = (1, 4, 32)  # registry#lanes
PLANES, LINEAR, BITS = range(3)  # registry#domains
ZERO, BASE, OUTER, LOW_RANK = 0, 1, 2, 4  # registry#predictors
FLAG_ZERO, FLAG_ESCAPE = 1, 2  # registry#frame-flags
RAW, ROTATED, XOR, DIFFERENCE = range(4)  # registry#plane-modes
MAGNITUDE, ROW, BLOCK, BASE_CODE, PRODUCTS = 1, 2, 3, 4, 6  # registry#context-rules
EXPLICIT, EXPANDED = range(2)  # registry#table-kinds
CHUNK = 2**20  # 05-frame#chunks: "A chunk has 1,048,576 = 2^20 patterns"

# --- 01-integers ----------------------------------------------------------------------------------------

LETTER = {1: "B", 2: "H", 4: "I", 8: "Q"}  # what `struct` calls unsigned integers of so many bytes


def unpack(size: int, data: bytes) -> tuple[int, ...]:
    """01-integers#fixed: "little-endian integers", of `size` bytes each."""
    return struct.unpack(f"<{len(data) // size}{LETTER[size]}", data)


def pack(size: int, patterns: Iterable[int]) -> bytes:
    """The inverse."""
    return b"".join(pattern.to_bytes(size, "little") for pattern in patterns)


class Cursor:
    """Takes the fields of one structure from its bytes, front to back."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self.data) - self.at

    def take(self, n: int) -> bytes:
        """The next n bytes."""
        need(n <= self.left, "I1")
        self.at += n
        return self.data[self.at - n : self.at]

    def many(self, n: int, letter: str) -> tuple[Any, ...]:
        """00-conventions#notation: "are n consecutive u32"; B, I, Q, d: u8, u32, u64, f64."""
        return struct.unpack(f"<{n}{letter}", self.take(n * struct.calcsize("<" + letter)))

    def one(self, letter: str = "B") -> Any:
        """One such number."""
        return self.many(1, letter)[0]

    def varint(self) -> int:
        """01-integers#varint: "groups of seven, the least significant group first"."""
        value = 0
        for i in range(10):
            byte = self.one()
            value |= (byte & 127) << (7 * i)
            if byte < 128:  # "The top bit of a byte is set if another byte follows."
                need(byte or i == 0, "I2")
                need(value < 2**64, "I3")
                return value
        raise Refusal("I3")

    def text(self) -> str:
        """01-integers#text: "its number of bytes as a varint, followed by these bytes in UTF-8."."""
        try:
            return self.take(self.varint()).decode("utf-8")
        except UnicodeDecodeError:
            raise Refusal("I4") from None

    def exp_golomb(self, count: int, order: int) -> list[int]:
        """01-integers#packed-bits: "from its least significant bit upwards"; then #exp-golomb."""
        most = self.data[self.at : self.at + 5 * count]  # no code has more than 33 bits
        bits = "".join(f"{byte:08b}"[::-1] for byte in most)
        at, values = 0, []
        for _ in range(count):
            one = bits.find("1", at)  # "count z zero bits up to the first one bit; with m = k + z"
            m = order + one - at
            at = one + 1 + m
            need(one >= 0 and m <= 16 and at <= len(bits), "I5")
            values.append(2**m + int(bits[one + 1 : at][::-1] or "0", 2) - 2**order)  # "v = 2^m + x - 2^k"
            need(values[-1] <= 65535, "I5")
        end = -(-at // 8)  # "the remaining bits of the last byte are 0"
        need("1" not in bits[at : 8 * end], "I6")
        self.at += end
        return values


M64 = 2**64 - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def rotl(x: int, n: int) -> int:
    """01-integers#xxh64: "rotates the 64 bits of x left by n"."""
    return ((x & M64) << n | (x & M64) >> (64 - n)) & M64


def xxh_round(a: int, x: int) -> int:
    """01-integers#xxh64: "round(a, x) = rotl(a + x * P2, 31) * P1"."""
    return rotl(a + x * P2, 31) * P1 & M64


def xxh64(data: bytes) -> int:
    """01-integers#xxh64, by its four steps."""
    whole, h, rest = len(data) // 32 * 32, P5, Cursor(data)
    if whole:
        v = [P1 + P2, P2, 0, -P1]
        for x in struct.iter_unpack("<4Q", rest.take(whole)):
            v = list(map(xxh_round, v, x))
        h = sum(map(rotl, v, (1, 7, 12, 18)))
        for lane in v:
            h = ((h ^ xxh_round(0, lane)) * P1 + P4) & M64
    h += len(data)
    while rest.left >= 8:
        h = rotl(h ^ xxh_round(0, rest.one("Q")), 27) * P1 + P4
    if rest.left >= 4:
        h = rotl(h ^ rest.one("I") * P1, 23) * P2 + P3
    while rest.left:
        h = rotl(h ^ rest.one() * P5, 11) * P1
    h &= M64
    h = (h ^ h >> 33) * P2 & M64
    h = (h ^ h >> 29) * P3 & M64
    return h ^ h >> 32


# --- 02-entropy -----------------------------------------------------------------------------------------


class Table:
    """02-entropy#frequency-table."""

    def __init__(self, cursor: Cursor) -> None:
        first, last, order = cursor.many(3, "B")
        need(first <= last and order <= 11, "E6")
        written = cursor.exp_golomb(last - first, order)  # "of the codes from `first` to `last` - 1"
        some = [*written, 4096 - sum(written)]  # "4096 minus the sum of the others"
        need(some[0] > 0 and some[-1] > 0, "E6")
        self.frequency = [0] * first + some
        self.start = [0, *itertools.accumulate(self.frequency)]  # "the frequencies of all lower codes"
        self.code_of_slot = b"".join(bytes([s]) * f for s, f in enumerate(self.frequency))


def read_runs(cursor: Cursor, contexts: int, bound: int) -> list[int]:
    """02-entropy#runs: "Runs assign to each context, starting with 0, a number below a bound"."""
    numbers: list[int] = []
    while len(numbers) < contexts:
        run, number = cursor.varint(), cursor.varint()
        need(1 <= run <= contexts - len(numbers), "E8")
        need(number < bound, "E8")
        numbers += [number] * run
    return numbers


class Stream(Cursor):
    """02-entropy#streams: "A stream is a sequence of n encoded codes."."""

    def decode(self, coder: int, n: int, tables: list[Table] | None = None, contexts: Any = ()) -> bytes:
        """Its codes; `tables` by context and `contexts` by pattern are for rans-shared."""
        need(coder in CODERS, "E1", f"coder {coder}")
        if n == 0:  # "A stream without codes has the coder `stored` and no bytes."
            need(coder == STORED and not self.left, "E4")
        need(coder != RANS_SHARED or tables is not None, "E2")
        codes = b""
        if coder == CONSTANT:  # "one u8: every code has this value"
            codes = self.take(1) * n
        elif coder == STORED:  # "the n codes"
            codes = self.take(n)
        elif coder == ZSTD:
            codes = self.zstd(n)
        elif coder == RANS_OWN:
            codes = self.rans(itertools.repeat(Table(self)), n)
        elif coder == SPARSE:
            codes = self.sparse(n)
        elif coder == HUFFMAN:
            codes = self.huffman(n)
        else:
            codes = self.rans_shared(tables or [], contexts)
        need(self.left == 0, "E3")  # "All bytes must be used."
        return codes

    def zstd(self, n: int) -> bytes:
        """02-entropy#streams: "one Zstandard frame (RFC 8878) that decodes to the n codes"."""
        try:
            import zstandard
        except ImportError:
            raise Refusal("E1") from None
        data = self.take(self.left)
        try:
            frame = zstandard.get_frame_parameters(data)
            need(data[:4] == b"\x28\xb5\x2f\xfd" and frame.content_size == n and frame.dict_id == 0, "E5")
            need(frame.window_size <= max(n, 2**23), "E5")  # "at most 8 MiB = 8,388,608 bytes, or n"
            # "No other frame, not even a skippable one, precedes or follows it."
            codes = zstandard.ZstdDecompressor().decompress(data, max_output_size=n, allow_extra_data=False)
        except zstandard.ZstdError:
            raise Refusal("E5") from None
        need(len(codes) == n, "E5")
        return bytes(codes)

    def sparse(self, n: int) -> bytes:
        """02-entropy#sparse: "a *gap* is the number of common codes before a value"."""
        codes, parts = bytearray(self.take(1)) * n, []
        for most in (
            n + n // 255 + 1,
            n,
        ):  # "at most n + n / 255 + 1", then "The count of values is at most n."
            count = self.varint()
            need(count <= most, "E13")
            parts.append(embedded(self, count, nested=True))
        need(self.left == 0, "I7")
        gaps, values = parts
        # "There are as many gap codes below 255 as there are values, the last gap code is below 255"
        need(len(gaps) - gaps.count(255) == len(values) and gaps[-1:] != b"\xff", "E14")
        at, value = 0, iter(values)
        for gap in gaps:
            at += gap
            if gap < 255:
                need(at < n, "E14")
                codes[at] = next(value)
                at += 1
        return bytes(codes)

    def rans(self, tables: Iterable[Table], n: int) -> bytes:
        """02-entropy#rans: n codes in stream order; `tables` gives the table of each."""
        index = self.one()
        need(index < len(LANES), "E9")
        lanes = LANES[index]
        x = list(self.many(lanes, "I"))
        need(min(x) >= 2**16, "E10")
        need(self.left % 2 == 0, "E11")
        words = iter(unpack(2, self.take(self.left)))  # "all remaining bytes"
        codes = bytearray()
        for i, table in enumerate(itertools.islice(tables, n)):
            lane = i % lanes  # "Code number i in stream order belongs to lane i mod lanes."
            slot = x[lane] % 4096
            s = table.code_of_slot[slot]  # "The code is the s with start(s) <= slot < start(s) + f(s)."
            x[lane] = table.frequency[s] * (x[lane] // 4096) + slot - table.start[s]
            if x[lane] < 2**16:  # "take the next word w: x[l] = x[l] * 2^16 + w"
                word = next(words, None)
                need(word is not None, "E12")
                x[lane] = x[lane] * 2**16 + (word or 0)
            codes.append(s)
        # "At the end every state must be 2^16, and all words must have been taken."
        need(set(x) == {2**16} and next(words, None) is None, "E12")
        return bytes(codes)

    def rans_shared(self, tables: list[Table], contexts: list[int]) -> bytes:
        """02-entropy#lanes: "sorted by their" context, "codes of the same context remain in the order"."""
        order = sorted(range(len(contexts)), key=contexts.__getitem__)  # Python's sort is stable
        codes = self.rans((tables[contexts[i]] for i in order), len(order))
        return bytes(code for _, code in sorted(zip(order, codes, strict=True)))

    def huffman(self, n: int) -> bytes:
        """02-entropy#huffman: "n codes in four *parts*"."""
        code_of, codes, q = code_words(self), bytearray(), -(-n // 4)  # "Let q be n / 4, rounded up."
        sizes = self.many(3, "I")
        need(sum(sizes) <= self.left, "E17")
        for j in range(4):  # "the last part has all remaining bytes"
            part = self.take(sizes[j] if j < 3 else self.left)
            bits = iter("".join(f"{byte:08b}"[::-1] for byte in part))
            for _ in range(min(j * q, n), min((j + 1) * q, n)):
                word = ""
                while word not in code_of:
                    bit = next(bits, None)
                    need(bit is not None, "E18")
                    word += bit or ""
                codes.append(code_of[word])
            behind = "".join(bits)  # "bits after the last code word are 0"
            need(len(behind) < 8 and "1" not in behind, "E18")
        return bytes(codes)


def code_words(cursor: Cursor) -> dict[str, int]:
    """02-entropy#code-lengths, then #code-words: the code of each code word, as text of bits."""
    first, last = cursor.many(2, "B")
    need(first < last, "E15")  # "`last` is greater than `first`, and neither has the length 0."
    halves = [half for byte in cursor.take((last - first) // 2 + 1) for half in (byte & 15, byte >> 4)]
    lengths = halves[: last - first + 1]
    need(lengths[0] and lengths[-1] and not any(halves[len(lengths) :]), "E15")
    need(max(lengths) <= 11, "E15")  # "A code length is at most 11."
    need(sum(2 ** (11 - length) for length in lengths if length) == 2**11, "E16")
    words, word, before = {}, 0, 0
    # "by code length, the shortest first, and codes of the same length by value."
    for length, code in sorted((length, code) for code, length in enumerate(lengths, first) if length):
        word, before = word << (length - before), length
        words[f"{word:0{length}b}"] = code
        word += 1
    return words


def embedded(cursor: Cursor, n: int, nested: bool = False) -> bytes:
    """02-entropy#embedded-streams: "A stream inside another structure", of n codes."""
    coder = cursor.one()
    need(not nested or coder not in (RANS_SHARED, SPARSE), "E13")
    need(coder != HUFFMAN, "E2")  # "The coder is neither rans-shared nor huffman."
    return Stream(cursor.take(cursor.varint())).decode(coder, n)


# --- 03-transforms --------------------------------------------------------------------------------------


def order(u: int, w: int) -> int:
    """03-transforms#order: "order(u) = top bit of u is 1 ? ~u : u + 2^(w-1)"."""
    return u ^ (2**w - 1) if u >> (w - 1) else u + 2 ** (w - 1)


def unorder(o: int, w: int) -> int:
    """03-transforms#order: "unorder(o) = top bit of o is 1 ? o - 2^(w-1) : ~o"."""
    return o - 2 ** (w - 1) if o >> (w - 1) else o ^ (2**w - 1)


def join(streams: list[bytes]) -> tuple[int, ...]:
    """03-transforms#planes: "code stream j contains byte j of the result z"."""
    data = bytearray(len(streams) * len(streams[0]))
    for j, stream in enumerate(streams):
        data[j :: len(streams)] = stream
    return unpack(len(streams), bytes(data))


def unplane(mode: int, dtype: Dtype, zs: tuple[int, ...], base: tuple[int, ...]) -> list[int]:
    """03-transforms#planes: the table of modes."""
    w = dtype.size * 8
    if mode == RAW:
        return list(zs)
    if mode == ROTATED:  # "z rotated to the right by one bit"
        return [(z >> 1 | z << (w - 1)) % 2**w for z in zs]
    if mode == XOR:
        return [z ^ b for z, b in zip(zs, base, strict=True)]
    # 01-integers#zigzag: "unzigzag(z) = (z >> 1) ^ (lowest bit of z ? 2^w - 1 : 0)"
    pairs = zip((z >> 1 ^ (2**w - 1 if z & 1 else 0) for z in zs), base, strict=True)
    if dtype.is_float:  # "unorder((order(b) + unzigzag(z)) mod 2^w)"
        return [unorder((order(b, w) + d) % 2**w, w) for d, b in pairs]
    return [(b + d) % 2**w for d, b in pairs]


# --- 04-quantization ------------------------------------------------------------------------------------

EXPONENT = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}


def finite(pattern: int, name: str) -> bool:
    """04-quantization#decoding: "exponent bits" "are not all 1"."""
    return pattern & EXPONENT[name] != EXPONENT[name]


def number(pattern: int, letter: str = "f") -> float:
    """The value of an F32 pattern (f) or F16 pattern (e), exactly, subnormal ones too."""
    return float(struct.unpack(f"<{letter}", pattern.to_bytes(struct.calcsize(letter), "little"))[0])


def nearest(value: float, letter: str = "f") -> int:
    """The pattern of the F32 or F16 number nearest to a binary64, ties to even, or infinity."""
    try:
        data = struct.pack(f"<{letter}", value)
    except OverflowError:
        data = struct.pack(f"<{letter}", math.copysign(math.inf, value))
    return int.from_bytes(data, "little")


def widen(u: int, name: str) -> int:
    """04-quantization#widening: "BF16 to F32: u << 16. F16 to F32: the F32 pattern of the same value"."""
    return u << 16 if name == "BF16" else nearest(number(u, "e")) if name == "F16" else u


def cast(p: int, name: str) -> int:
    """04-quantization#cast: "converts an F32 pattern p to the dtype of the tensor"."""
    if name == "F32":
        return p
    if p & 0x7FFFFFFF > 0x7F800000:  # "A NaN becomes (p >> 16) | 0x40 in BF16 and s | 0x7e00 in F16."
        return p >> 16 | 0x40 if name == "BF16" else p >> 16 & 0x8000 | 0x7E00
    # "(p + 0x7fff + ((p >> 16) & 1)) >> 16"; the steps for F16 are a rounding to nearest, ties to even
    return (p + 0x7FFF + (p >> 16 & 1)) >> 16 if name == "BF16" else nearest(number(p), "e")


class Map:
    """04-quantization#map, field by field."""

    def __init__(self, cursor: Cursor, plan: Plan) -> None:
        need(plan.dtype.name in EXPONENT, "Q1", f"a map for dtype {plan.dtype.name}")
        kind, rows, self.codes = cursor.one(), cursor.varint(), cursor.varint()
        need(kind == EXPLICIT or (kind == EXPANDED and plan.domain == LINEAR), "Q2", f"table kind {kind}")
        need(1 <= rows <= 4096 and 1 <= self.codes <= 256, "Q3")
        if kind == EXPANDED:
            self.table = self.expand(cursor, rows)
        else:  # in the domain `bits` "u32 for F32, u16 for BF16 and F16"
            letter = "I" if plan.domain == LINEAR else LETTER[plan.dtype.size]
            self.table = [list(cursor.many(self.codes, letter)) for _ in range(rows)]
        # "only if R > 1; otherwise every context has row 0"
        self.row_of_context = read_runs(cursor, plan.contexts, rows) if rows > 1 else [0] * plan.contexts
        self.zero_code = cursor.one() if plan.flags & FLAG_ZERO else None
        need((self.zero_code or 0) < self.codes, "Q4")
        # "the last code, C - 1, is the *escape code*"
        self.escape_code = self.codes - 1 if plan.flags & FLAG_ESCAPE else None

    def expand(self, cursor: Cursor, rows: int) -> list[list[int]]:
        """04-quantization#entries: the tables of kind `expanded`."""
        scale, level, offset = (cursor.many(n, "d") for n in (rows, self.codes, rows))
        for x in (*scale, *level, *offset):  # "must be finite, and each must be zero or normal in binary64"
            need(x == 0 or (math.isfinite(x) and abs(x) >= sys.float_info.min), "Q5")
        # "rounded three times, each time to nearest, ties to even", two of them by Python
        return [[nearest(scale[r] * x + offset[r]) for x in level] for r in range(rows)]


# --- 05-frame -------------------------------------------------------------------------------------------


class Rule:
    """05-frame#context-rules, field by field; `size` is how many patterns share a stored label."""

    def __init__(self, cursor: Cursor, plan: Plan) -> None:
        self.kind, self.source, self.radix, self.size, self.labels = cursor.one(), "", 256, 0, b""
        known = MAGNITUDE <= self.kind <= BASE_CODE or self.kind == PRODUCTS
        need(known, "T1", f"context rule {self.kind}")
        if self.kind == MAGNITUDE:  # "name of the tensor, or empty for the base"
            self.source = cursor.text()
        elif self.kind == PRODUCTS:
            self.read_products(cursor, plan)
            return
        else:
            self.radix = cursor.varint()
            need(1 <= self.radix <= 256, "T3")
        if self.kind == ROW:  # "one label for each index of the first dimension"
            rows = math.prod(plan.shape[:1]) or 1
            need(plan.patterns % rows == 0, "T4")
            self.size = plan.patterns // rows or 1
        if self.kind == BLOCK:
            self.size = cursor.varint()
            need(1 <= self.size <= 2**48, "T5")
        if self.size:
            count = -(-plan.patterns // self.size)  # "patterns / block size, rounded up"
            need(count + sum(len(other.labels) for other in plan.rules) <= 2**24, "T6")
            self.labels = embedded(cursor, count)
            need(max(self.labels, default=0) < self.radix, "T3")

    def read_products(self, cursor: Cursor, plan: Plan) -> None:
        """03-transforms#contexts: "The rule stores a *shift* and, for each of its *terms*", the levels."""
        self.rows = math.prod(plan.shape[:1]) or 1
        need(plan.patterns % self.rows == 0, "T4")
        self.columns = plan.patterns // self.rows
        self.shift, rank = cursor.one(), cursor.varint()
        need(self.shift <= 20 and 1 <= rank <= 64, "T11")
        count = rank * (self.rows + self.columns) if plan.patterns else 0  # "no labels and no levels"
        need(count + sum(len(other.labels) for other in plan.rules) <= 2**24, "T6")
        self.labels = embedded(cursor, count)

    def label_of_products(self, i: int) -> int:
        """03-transforms#contexts: "128 + s / 2^shift, rounded down, but at least 0 and at most 255"."""
        row, column = divmod(i, self.columns)
        s = 0
        for begin in range(0, len(self.labels), self.rows + self.columns):
            a, b = self.labels[begin + row], self.labels[begin + self.rows + column]
            s += (a - 256 * (a > 127)) * (b - 256 * (b > 127))  # "c - 256 if c is over 127"
        return min(max(128 + s // 2**self.shift, 0), 255)


def product_at(row: list[int], column: list[int], i: int) -> int:
    """04-quantization#product: "It is exact in binary64 before it is rounded."."""
    n = len(column)
    return nearest(number(row[i // n]) * number(column[i % n]))


class Plan:
    """05-frame#decoding, "The header": the plan, field by field, and the chunk records behind it."""

    def __init__(self, frame: bytes, limit: int) -> None:
        length = unpack(4, frame[:4])[0] if len(frame) >= 12 else 0
        need(12 <= length <= len(frame), "F1")
        # "Check the header checksum before any other field of the header is used."
        need(xxh64(frame[: length - 8]) == unpack(8, frame[length - 8 : length])[0], "F2")
        cursor = Cursor(frame[4 : length - 8])
        self.read_plan(cursor, limit)
        self.read_rules_and_map(cursor)
        self.has_huffman = False
        self.records = list(self.read_records(cursor))
        lengths = (sum(n for _, n in streams) for *_, streams in self.records)
        self.offsets = list(itertools.accumulate(lengths, initial=length))  # of the chunks
        # "The lengths of the header and of all streams must add up to the length of the frame."
        need(self.offsets[-1] == len(frame), "F11")

    def read_plan(self, cursor: Cursor, limit: int) -> None:
        """05-frame#plan, up to the plane mode."""
        version, dtype, self.domain, self.predictor = cursor.many(4, "B")
        self.flags, dimensions = cursor.one("I"), cursor.one()
        need(version == 1, "F3", f"frame version {version}")
        need(dtype in DTYPE_OF_ID and self.domain <= BITS, "F4")
        need(self.predictor in (ZERO, BASE, OUTER, LOW_RANK), "F4")
        need(self.flags < 4, "F5", f"frame flags {self.flags:#x}")
        need(self.flags == 0 or self.domain != PLANES, "F6")
        need(dimensions <= 64, "F7")
        self.shape = [cursor.varint() for _ in range(dimensions)]
        # "The product of the dimensions, where each 0 counts as 1, is at most 2^48."
        need(math.prod(size or 1 for size in self.shape) <= 2**48, "F7")
        self.dtype = DTYPE_OF_ID[dtype]
        self.patterns = self.dtype.patterns(self.shape)
        need(self.patterns * self.dtype.size <= limit, "limit")
        self.mode = cursor.one() if self.domain == PLANES else RAW
        need(self.mode <= DIFFERENCE, "T1", f"plane mode {self.mode}")
        # "the predictor is `base` if the plane mode is `xor` or `difference`"
        right = BASE if self.mode in (XOR, DIFFERENCE) else ZERO
        need(self.domain != PLANES or self.predictor == right, "F9")

    def read_rules_and_map(self, cursor: Cursor) -> None:
        """05-frame#plan, from the context rules on."""
        self.rules: list[Rule] = []
        for _ in range(cursor.one()):
            need(len(self.rules) < 3, "T2")
            self.rules.append(Rule(cursor, self))
        self.contexts = math.prod(rule.radix for rule in self.rules)
        need(self.contexts <= 4096, "T2")
        self.map = Map(cursor, self) if self.domain != PLANES else None
        # #chunks: "one code stream for each byte of a pattern", or "the code stream"
        self.code_streams = 1 if self.map else self.dtype.size
        self.tables = [self.read_tables(cursor) for _ in range(self.code_streams) if self.rules]
        # #outer-vectors: "a missing dimension counts as 1", "Together they have at most 2^24 elements."
        sizes = (math.prod(self.shape[:1]), math.prod(self.shape[1:])) if self.predictor == OUTER else ()
        need(sum(sizes) <= 2**24, "Q9")
        # "the lowest byte of all elements, then the next, and the highest last"
        self.vectors = [join([embedded(cursor, n) for _ in range(4)]) for n in sizes]
        need(all(finite(x, "F32") for vector in self.vectors for x in vector), "Q8")
        self.terms = list(self.read_terms(cursor)) if self.predictor == LOW_RANK else []
        self.reads_base_codes = any(rule.kind == BASE_CODE for rule in self.rules)
        self.has_products = any(rule.kind == PRODUCTS for rule in self.rules)
        unnamed = any(rule.kind == MAGNITUDE and not rule.source for rule in self.rules)
        self.needs_base = self.predictor == BASE or self.reads_base_codes or unnamed

    def read_terms(self, cursor: Cursor) -> Iterator[tuple[list[int], list[int]]]:
        """05-frame#low-rank: the vectors of each term, its row times its scale."""
        n, m, rank = math.prod(self.shape[:1]), math.prod(self.shape[1:]), cursor.varint()
        need(rank * (n + m) <= 2**24, "Q9")
        need(1 <= rank <= 64, "Q10")
        scales = cursor.many(rank, "I")
        need(all(finite(s, "F32") and abs(number(s)) <= 2.0**100 for s in scales), "Q11")
        codes = iter(embedded(cursor, rank * (n + m)))
        for s in scales:  # "A code c represents the *level* c, or c - 256 if c is over 127."
            a, b = ([float(c - 256 if c > 127 else c) for c in itertools.islice(codes, k)] for k in (n, m))
            yield [nearest(number(s) * x) for x in a], [nearest(x) for x in b]

    def read_tables(self, cursor: Cursor) -> list[Table]:
        """02-entropy#tables: "tables that all chunks share"; here the one of each context."""
        count = cursor.one()
        need(1 <= count <= 64, "E7")
        tables = [Table(cursor) for _ in range(count)]
        return [tables[number] for number in read_runs(cursor, self.contexts, count)]

    def read_records(self, cursor: Cursor) -> Iterator[tuple[int, int, int, list[tuple[int, int]]]]:
        """05-frame#chunk-records: checksums: stored, decoded, of base codes; coder and length of streams."""
        n_streams = self.code_streams + bool(self.flags & FLAG_ESCAPE) * self.dtype.size
        chunks, sums = -(-self.patterns // CHUNK), 2 + self.reads_base_codes
        # "The remaining bytes must be exactly those of the records of all chunks."
        need(cursor.left == chunks * (8 * sums + 5 * n_streams), "F10")
        for _ in range(chunks):
            stored, decoded, base_codes = (*cursor.many(sums, "Q"), 0)[:3]
            streams = [(cursor.one(), cursor.one("I")) for _ in range(n_streams)]
            for i, (coder, _length) in enumerate(streams):
                need(coder in CODERS, "E1", f"coder {coder}")
                need(coder not in (RANS_SHARED, HUFFMAN) or i < self.code_streams, "E2")
                need(coder != RANS_SHARED or self.rules, "E2")
                self.has_huffman |= coder == HUFFMAN
            yield stored, decoded, base_codes, streams


class Chunk(NamedTuple):
    """A decoded chunk; it has `codes` if the frame has a map."""

    dtype: Dtype
    patterns: tuple[int, ...]
    codes: bytes | None = None


class Decoding(Cursor):
    """05-frame#decoding: "A chunk of n patterns", number j of a frame; `named`: tensors of context rules."""

    def __init__(self, plan: Plan, j: int, data: bytes, base: Chunk, named: dict[str, Chunk]) -> None:
        super().__init__(data)
        self.plan, self.base, self.named = plan, base, named
        self.where = range(j * CHUNK, min((j + 1) * CHUNK, plan.patterns))
        self.n, record = len(self.where), plan.records[j]
        self.stored, self.decoded, self.base_codes, self.streams = *record[:3], iter(record[3])

    def run(self) -> Chunk:
        """05-frame#decoding: "If a step fails and the stored checksum is wrong, the bytes are damaged"."""
        try:
            return self.steps()
        except Refusal as fault:
            need(fault.kind == "unsupported" or xxh64(self.data) == self.stored, "F15")
            raise

    def steps(self) -> Chunk:
        """05-frame#decoding, the five steps of a chunk."""
        plan, size, base = self.plan, self.plan.dtype.size, self.base
        if plan.reads_base_codes:  # "0 if the base has no codes"
            need(self.base_codes == (0 if base.codes is None else xxh64(base.codes)), "T10")
        self.contexts = self.context_of_patterns()
        codes = [self.next_stream(self.n, t) for t in plan.tables or [None] * plan.code_streams]
        if plan.map:
            patterns = tuple(self.values(plan.map, codes[0]))
        else:
            patterns = tuple(unplane(plan.mode, plan.dtype, join(codes), base.patterns))
        need(xxh64(pack(size, patterns)) == self.decoded, "F13" if plan.needs_base else "F14")
        return Chunk(plan.dtype, patterns, codes[0] if plan.map else None)

    def next_stream(self, n: int, tables: list[Table] | None = None) -> bytes:
        """05-frame#chunks: "The bytes of a chunk are its streams, one after another"."""
        coder, length = next(self.streams)
        return Stream(self.take(length)).decode(coder, n, tables, self.contexts)

    def exact_values(self, n: int) -> Iterator[int]:
        """05-frame#chunks: "one stream for each byte of a pattern, least significant first"."""
        return iter(join([self.next_stream(n) for _ in range(self.plan.dtype.size)]))

    def context_of_patterns(self) -> list[int]:
        """03-transforms#contexts: "the mixed-radix number of the labels, the first rule most significant"."""
        contexts = [0] * self.n
        for rule in self.plan.rules:
            if rule.kind == MAGNITUDE:  # "(u >> (w - 9)) mod 256"; "If u has 8 bits, the label is u mod 128"
                other = self.named[rule.source] if rule.source else self.base
                w = other.dtype.size * 8
                labels = [(u >> (w - 9)) % 256 if w > 8 else u % 128 for u in other.patterns]
            elif rule.kind == BASE_CODE:  # "every label is 0"
                labels = list(self.base.codes or bytes(self.n))
                need(max(labels) < rule.radix, "T9")
            elif rule.kind == PRODUCTS:
                labels = [rule.label_of_products(i) for i in self.where]
            else:  # "labels[i / row patterns]", "labels[i / block size]"
                labels = [rule.labels[i // rule.size] for i in self.where]
            contexts = [k * rule.radix + label for k, label in zip(contexts, labels, strict=True)]
        return contexts

    def predictions(self) -> Iterable[int]:
        """04-quantization#decoding: P of each pattern, "an F32 pattern" (linear) or "a pattern" (bits)."""
        plan, name, linear = self.plan, self.plan.dtype.name, self.plan.domain == LINEAR
        if plan.predictor == ZERO:
            return [0] * self.n
        if plan.predictor == BASE:
            return (widen(u, name) if linear else u for u in self.base.patterns)
        outer = map(self.sum_of_terms if plan.predictor == LOW_RANK else self.outer, self.where)
        return outer if linear else (cast(p, name) for p in outer)

    def outer(self, i: int) -> int:
        """04-quantization#decoding: "row[i / m], column[i mod m]"."""
        row, column = self.plan.vectors
        return product_at(row, column, i)

    def sum_of_terms(self, i: int) -> int:
        """04-quantization#low-rank: "Each of these operations rounds; none is fused with another."."""
        total = 0
        for row, column in self.plan.terms:
            total = nearest(number(total) + number(product_at(row, column, i)))
        return total

    def pattern(self, p: int, entry: int) -> int:
        """04-quantization#decoding: the pattern of a prediction and an entry, "must be finite"."""
        w, name = self.plan.dtype.size * 8, self.plan.dtype.name
        if self.plan.domain == BITS:  # "unorder( (order(P) + T[r][c]) mod 2^w )"
            pattern = unorder((order(p, w) + entry) % 2**w, w)
        else:  # "the sum may be computed in binary64 and then rounded again"; it "must also be finite"
            total = nearest(number(p) + number(entry))
            pattern = cast(total, name) if finite(total, "F32") else EXPONENT[name]
        need(finite(pattern, name), "Q7")
        return pattern

    def values(self, map_: Map, codes: bytes) -> Iterator[int]:
        """04-quantization#decoding: look up, add, cast and replace."""
        need(max(codes) < map_.codes, "Q6")
        escaped: Iterator[int] = iter(())
        if map_.escape_code is not None:
            escaped = self.exact_values(codes.count(map_.escape_code))
        for c, k, p in zip(codes, self.contexts, self.predictions(), strict=True):
            exact = next(escaped) if c == map_.escape_code else 0 if c == map_.zero_code else None
            yield self.pattern(p, map_.table[map_.row_of_context[k]][c]) if exact is None else exact
