"""Inputs that a reader must refuse, by the id of the refusal in the specification.

Each is right in all else, so that it passes if that one check is missing. A case wrapped in `lenient`
is accepted for now, as spec/errata.md says under the number given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from frame_support import CodedSource
from spec_files import CONSTANT, OWN, SHARED, SPARSE, STORED, ZSTD, File, Frame, plan, varint

from ckptz.bits.checksum import xxh64
from ckptz.bits.cursor import ByteReader
from ckptz.codec.frame import FrameHeader, header_length
from ckptz.codec.units import ArraySource
from ckptz.dtypes import dtype_of
from ckptz.entropy.frequency import parse_table

Case = Callable[[], object]


@dataclass(frozen=True)
class lenient:  # reads as a word in the lists below
    """A case that the reader still accepts, or refuses for a wrong reason."""

    erratum: str
    case: Case

    def __call__(self) -> object:
        return self.case()


F32 = np.array([1.0, 2.0, -3.0, 0.5], "<f4").tobytes()
ONE, INFINITY = b"\x00\x00\x80\x3f", b"\x00\x00\x80\x7f"
FLAT_TABLE = b"\0\0\0"  # symbol 0 has all frequency
LANE = b"\0" + (1 << 16).to_bytes(4, "little")
EMPTY = ((STORED, b""),)
SIZED = zstandard.ZstdCompressor().compress(bytes(4))


# --- makers -------------------------------------------------------------------------------------


def coded(coder: int, data: bytes, n: int = 4, decoded: bytes | None = None) -> Frame:
    """Bytes in one stream."""
    decoded = bytes(n) if decoded is None else decoded
    return Frame(plan(shape=(n,)), [(coder, data)], decoded, shape=(n,))


def sparse(gaps: bytes, values: bytes, n: int = 4, coder: int = STORED, behind: bytes = b"") -> Frame:
    parts = b"".join(varint(len(p)) + bytes((coder,)) + varint(len(p)) + p for p in (gaps, values))
    return coded(SPARSE, b"\0" + parts + behind, n)


def frequencies(*packed: int) -> Case:
    """Only a frequency table."""
    return lambda: parse_table(ByteReader(bytes(packed)))


def row_rule(radix: int, labels: bytes, coder: int = STORED) -> bytes:
    return b"\2" + varint(radix) + bytes((coder,)) + varint(len(labels)) + labels


def block_rule(radix: int, size: int, labels: bytes) -> bytes:
    return b"\3" + varint(radix) + varint(size) + bytes((STORED,)) + varint(len(labels)) + labels


def magnitude_rule(name: bytes = b"") -> bytes:
    return b"\1" + varint(len(name)) + name


def tables(n_classes: int, n_tables: int = 1) -> bytes:
    """So many equal tables, all classes by the first."""
    return bytes((n_tables,)) + FLAT_TABLE * n_tables + varint(n_classes) + b"\0"


def classed(*rules: bytes, n_classes: int, rest: bytes | None = None) -> Frame:
    """Four bytes with class rules."""
    return Frame(plan(rules=rules, rest=tables(n_classes) if rest is None else rest))


def companions(**named: str) -> File:
    """Tensors with classes by the magnitude of another tensor, or of none."""
    rules = {name: [magnitude_rule(other.encode())] if other else [] for name, other in named.items()}
    return File({name: classed(*r, n_classes=256) if r else Frame() for name, r in rules.items()})


def base_coded(radix: int, base_codes: int) -> Frame:
    made = plan(rules=[b"\4" + varint(radix)], rest=tables(radix))
    return Frame(made, base_codes=base_codes)


def with_codes(*codes: int) -> CodedSource:
    return CodedSource(dtype_of("U8"), (4,), np.zeros(4, np.uint8), np.array(codes, np.uint8))


def quantized(
    entries: bytes = ONE,
    codes: bytes = b"\0\0\0\0",
    *,
    rows: int = 1,
    n_codes: int | None = None,
    kind: int = 0,
    flags: int = 0,
    zero: bytes = b"",
    outer: bytes = b"",
    dtype: str = "F32",
    predictor: int = 0,
    streams: tuple[tuple[int, bytes], ...] = (),
    decoded: bytes = ONE * 4,
) -> Frame:
    """Four elements in the domain `linear`."""
    n_codes = len(entries) // 4 if n_codes is None else n_codes
    runs = varint(1) + b"\0" if rows > 1 else b""
    rest = bytes((kind,)) + varint(rows) + varint(n_codes) + entries + runs + zero + outer
    made = plan(dtype=dtype, domain=1, predictor=predictor, flags=flags, rest=rest)
    return Frame(made, [(STORED, codes), *streams], decoded, dtype)


def escaped(value: bytes) -> tuple[tuple[int, bytes], ...]:
    """Streams of four equal values."""
    return tuple((CONSTANT, value[j : j + 1]) for j in range(4))


def expanded(scale: float, level: float, offset: float) -> Frame:
    return quantized(np.array([scale, level, offset], "<f8").tobytes(), kind=1, n_codes=1)


def delta(decoded: bytes = F32, **fields: Any) -> Frame:
    """F32 as an exclusive or with a base of zeros."""
    planes = [(STORED, decoded[j::4]) for j in range(4)]
    return Frame(plan(dtype="F32", predictor=1, mode=2), planes, decoded, "F32", **fields)


def base(units: bytes = bytes(16)) -> ArraySource:
    return ArraySource.from_buffer(dtype_of("F32"), (4,), units)


def no_content_size(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(data) + compressor.flush()


# --- cases --------------------------------------------------------------------------------------

INTEGERS: dict[str, list[Case]] = {
    "I1": [Frame(plan()[:5], n_chunks=0).parse, coded(CONSTANT, b"").decode, coded(STORED, bytes(3)).decode],
    "I2": [Frame(plan(sizes=b"\x84\x00")).parse],
    "I3": [Frame(plan(sizes=bytes([255] * 9 + [2]))).parse, Frame(plan(sizes=bytes([255] * 10 + [1]))).parse],
    "I4": [
        classed(magnitude_rule(text), n_classes=256).parse for text in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80")
    ],
    "I5": [
        frequencies(0, 1, 11, 0, 255, 255, 255),
        frequencies(0, 1, 0, 0, 0, 3, 0, 0),
        frequencies(0, 2, 0, 128),
    ],
    "I6": [frequencies(0, 1, 0, 0b1010)],
    "I7": [sparse(b"", b"", behind=b"\0").decode],
}

ENTROPY: dict[str, list[Case]] = {
    "E1": [coded(coder, b"\0").decode for coder in (6, 224)],
    "E2": [
        coded(SHARED, LANE).decode,
        quantized(flags=4, streams=((SHARED, LANE), *EMPTY * 4)).decode,
    ],
    "E3": [coded(STORED, bytes(5)).decode, coded(CONSTANT, b"\0\0").decode],
    "E4": [
        quantized(ONE * 2, flags=2, streams=((CONSTANT, b"\0"),) * 4).decode,
        coded(SPARSE, b"\0" + (varint(0) + b"\0\1\7") * 2).decode,
        Frame(plan(shape=(0,), rules=[row_rule(2, b"\0", CONSTANT)], rest=tables(2)), n_chunks=0).parse,
    ],
    "E5": [
        coded(ZSTD, zstandard.ZstdCompressor().compress(bytes(5))).decode,
        coded(ZSTD, no_content_size(bytes(4))).decode,
        coded(ZSTD, SIZED[:-1]).decode,
        coded(ZSTD, b"no such frame").decode,
        coded(ZSTD, SIZED + b"\0").decode,
        coded(ZSTD, SIZED + SIZED).decode,
    ],
    "E6": [
        frequencies(1, 0, 0),
        frequencies(0, 1, 12, 1),
        frequencies(0, 1, 11, 0x02, 0x20),
        frequencies(0, 1, 0, 1),
    ],
    "E7": [
        classed(row_rule(1, bytes(4)), n_classes=1, rest=tables(1, 0)).parse,
        classed(row_rule(1, bytes(4)), n_classes=1, rest=tables(1, 65)).parse,
    ],
    "E8": [
        classed(row_rule(2, bytes(4)), n_classes=2, rest=b"\1" + FLAT_TABLE + runs).parse
        for runs in (b"\0\0\2\0", b"\3\0", b"\1\0\2\0", b"\2\1")
    ],
    "E9": [coded(OWN, FLAT_TABLE + b"\3" + LANE[1:]).decode],
    "E10": [coded(OWN, FLAT_TABLE + b"\0\xff\xff\0\0").decode],
    "E11": [coded(OWN, FLAT_TABLE + LANE + b"\0").decode],
    "E12": [
        coded(OWN, FLAT_TABLE + LANE + b"\0\0").decode,
        coded(OWN, FLAT_TABLE + b"\0\0\0\2\0").decode,
        coded(OWN, b"\0\1\x0b\2\0" + LANE).decode,
    ],
    "E13": [
        sparse(b"", b"", coder=SPARSE).decode,
        sparse(b"\0", b"\1", coder=SHARED).decode,
        sparse(bytes(6), bytes(4)).decode,
        sparse(bytes(4), bytes(5)).decode,
    ],
    "E14": [
        sparse(b"\0\xff", b"\1", n=600).decode,
        sparse(b"\0\0", b"\1").decode,
        sparse(b"\0", b"\1\2").decode,
        sparse(b"\4", b"\1").decode,
    ],
}

TRANSFORMS: dict[str, list[Case]] = {
    "T1": [Frame(plan(mode=4)).parse, *(classed(bytes((r, 0)), n_classes=1).parse for r in (0, 5, 255))],
    "T2": [
        classed(*[row_rule(1, bytes(4))] * 4, n_classes=1).parse,
        classed(magnitude_rule(), row_rule(17, bytes(4)), n_classes=4352).parse,
    ],
    "T3": [
        classed(row_rule(0, bytes(4)), n_classes=1).parse,
        classed(row_rule(257, bytes(4)), n_classes=257).parse,
        classed(row_rule(2, b"\0\1\2\0"), n_classes=2).parse,
    ],
    "T4": [
        Frame(
            plan(dtype="F4", shape=(2, 3), rules=[row_rule(2, bytes(2))], rest=tables(2)),
            [(STORED, bytes(3))],
            bytes(3),
        ).parse,
    ],
    "T5": [
        classed(block_rule(1, 0, bytes(4)), n_classes=1).parse,
        classed(block_rule(1, (1 << 48) + 1, b"\0"), n_classes=1).parse,
    ],
    "T6": [
        Frame(
            plan(shape=((1 << 24) + 1,), rules=[row_rule(1, b"\0", CONSTANT)], rest=tables(1)), n_chunks=17
        ).parse,
        Frame(
            plan(shape=(1 << 23,), rules=[row_rule(1, b"\0", CONSTANT)] * 3, rest=tables(1)), n_chunks=8
        ).parse,
    ],
    "T7": [
        companions(w="other").read,
        File({"w": classed(magnitude_rule(b"v"), n_classes=256), "v": coded(CONSTANT, b"\0", 5)}).read,
    ],
    "T8": [companions(a="b", b="c", c="d", d="").read, companions(a="a").read, companions(a="b", b="a").read],
    "T9": [lambda: base_coded(3, xxh64(b"\0\1\2\3")).decode(with_codes(0, 1, 2, 3))],
    "T10": [
        lambda: base_coded(4, 1).decode(with_codes(0, 1, 2, 3)),
        lambda: base_coded(4, 1).decode(ArraySource.from_buffer(dtype_of("U8"), (4,), bytes(4))),
    ],
}

QUANTIZATION: dict[str, list[Case]] = {
    "Q1": [quantized(dtype="U8").parse, quantized(dtype="F64").parse],
    "Q2": [quantized(kind=2).parse],
    "Q3": [
        quantized(b"", rows=0, n_codes=1).parse,
        quantized(ONE * 4097, rows=4097, n_codes=1).parse,
        quantized(b"", n_codes=0).parse,
        quantized(ONE * 257).parse,
    ],
    "Q4": [quantized(flags=1, zero=b"\1").parse],
    "Q5": [
        expanded(*values).parse
        for values in ((np.inf, 1, 0), (1, np.nan, 0), (1e-310, 1e300, 0), (1, 1, 1e-310))
    ],
    "Q6": [quantized(codes=b"\0\0\1\0").decode],
    "Q7": [
        quantized(ONE + INFINITY, b"\0\1\0\0", decoded=ONE + INFINITY + ONE * 2).decode,
        quantized(
            ONE + INFINITY + ONE,
            b"\0\1\0\0",
            flags=2,
            streams=EMPTY * 4,
            decoded=ONE + INFINITY + ONE * 2,
        ).decode,
        quantized(
            ONE + INFINITY,
            b"\0\1\0\0",
            flags=4,
            streams=((STORED, bytes(4)), *EMPTY * 4),
            decoded=ONE + INFINITY + ONE * 2,
        ).decode,
    ],
    "Q8": [quantized(flags=4, streams=((STORED, b"\0\2\0\0"), *((STORED, b"\0"),) * 4)).decode],
    "Q9": [quantized(predictor=2, outer=ONE * 3 + INFINITY + ONE).parse],
}

FRAME: dict[str, list[Case]] = {
    "F1": [
        lambda: header_length(b"\x0b\0\0\0", 100),
        lambda: header_length(b"\x65\0\0\0", 100),
        lambda: FrameHeader.parse(bytes(11)),
    ],
    "F2": [lambda: FrameHeader.parse(Frame().header[:-1] + b"\0"), lambda: FrameHeader.parse(bytes(40))],
    "F3": [Frame(plan(version=1)).parse],
    "F4": [
        *(Frame(plan(dtype_id=i)).parse for i in (0, 23, 255)),
        Frame(plan(domain=3)).parse,
        Frame(plan(predictor=3)).parse,
    ],
    "F5": [quantized(flags=8).parse, Frame(plan(flags=128)).parse],
    "F6": [Frame(plan(flags=1)).parse],
    "F7": [
        Frame(plan(shape=[1] * 65)).parse,
        Frame(plan(shape=[1 << 24, 0, (1 << 24) + 1]), n_chunks=0).parse,
        Frame(plan(shape=[(1 << 64) - 1] * 63 + [0]), n_chunks=0).parse,
    ],
    "F8": [Frame(plan(dtype="F4", shape=(3,))).parse],
    "F9": [
        Frame(plan(mode=2)).parse,
        Frame(plan(predictor=1)).parse,
        Frame(plan(predictor=2, rest=bytes(4 * 5))).parse,
    ],
    "F10": [Frame(n_chunks=0).parse, Frame(n_chunks=2).parse, Frame(behind_records=b"\0").parse],
    "F11": [File({"w": Frame(behind=b"\0")}).read],
    "F12": [delta().decode],
    "F13": [lambda: delta().decode(base(b"\1" * 16))],
    "F14": [coded(STORED, b"\1\2\3\4", decoded=b"\1\2\3\5").decode],
    "F15": [
        Frame(stored_checksum=0, decoded_checksum=0).decode,
        lambda: delta(stored_checksum=0).decode(base(b"\1" * 16)),
    ],
}
