"""Inputs that a reader must refuse, by the id of the refusal in the specification.

Each input is valid except for one rule, so that a reader without this check accepts it. A case wrapped in
`lenient` is accepted for now; spec/errata.md explains it under the given number. spec/make_vectors.py writes
the files of these inputs to spec/vectors/invalid.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptz.format.bits import xxh64
from ckptz.format.dtypes import DTYPES
from ckptz.format.sources import CHUNK_VALUES
from tests.support.spec_files import (
    CONSTANT,
    HUFFMAN,
    OWN,
    SHARED,
    SPARSE,
    STORED,
    ZSTD,
    File,
    Files,
    Folder,
    Frame,
    Input,
    Raw,
    embedded,
    plan,
    varint,
    vectors,
)


@dataclass(frozen=True)
class lenient:  # lower case, as it is used like a keyword in the tables below
    """A case that the reader still accepts, or refuses for another reason."""

    erratum: str
    case: Input

    def files(self) -> Files:
        """Return the files of the case."""
        return self.case.files()


F32 = np.array([1.0, 2.0, -3.0, 0.5], "<f4").tobytes()
ONE, INFINITY = b"\x00\x00\x80\x3f", b"\x00\x00\x80\x7f"
FLAT_TABLE = b"\0\0\0"  # symbol 0 has the whole frequency
LANE = b"\0" + (1 << 16).to_bytes(4, "little")
EMPTY = ((STORED, b""),)
HALVES = b"\0\1\x11"  # code lengths of two codes
ZEROS = HALVES + struct.pack("<3I", 1, 1, 1) + bytes(4)  # a Huffman stream of four zeros


def zstd_frame(descriptor: int, fields: bytes, n: int = 4) -> bytes:
    """Build a Zstandard frame of n zeros in a raw block, with a frame header (RFC 8878, 3.1.1.1)."""
    block = (n << 3 | 1).to_bytes(3, "little") + bytes(n)
    return b"\x28\xb5\x2f\xfd" + bytes((descriptor,)) + fields + block


SIZED = zstd_frame(0x20, b"\4")  # four zeros


# --- building blocks ----------------------------------------------------------------------------


def coded(coder: int, data: bytes, n: int = 4, decoded: bytes | None = None) -> Frame:
    """Build a frame of bytes in one stream."""
    decoded = bytes(n) if decoded is None else decoded
    return Frame(plan(shape=(n,)), [(coder, data)], decoded, shape=(n,))


def sparse(gaps: bytes, values: bytes, n: int = 4, coder: int = STORED, behind: bytes = b"") -> Frame:
    parts = b"".join(varint(len(p)) + embedded(p, coder) for p in (gaps, values))
    return coded(SPARSE, b"\0" + parts + behind, n)


def frequencies(*packed: int) -> Frame:
    """Build a frame whose stream is a frequency table without codes."""
    return coded(OWN, bytes(packed))


def row_rule(radix: int, labels: bytes, coder: int = STORED) -> bytes:
    return b"\2" + varint(radix) + embedded(labels, coder)


def block_rule(radix: int, size: int, labels: bytes) -> bytes:
    return b"\3" + varint(radix) + varint(size) + embedded(labels)


def products_rule(shift: int, rank: int, levels: bytes, coder: int = STORED) -> bytes:
    return b"\6" + bytes((shift,)) + varint(rank) + embedded(levels, coder)


def magnitude_rule(name: bytes = b"") -> bytes:
    return b"\1" + varint(len(name)) + name


def tables(n_contexts: int, n_tables: int = 1) -> bytes:
    """Encode equal frequency tables; all contexts use the first."""
    return bytes((n_tables,)) + FLAT_TABLE * n_tables + varint(n_contexts) + b"\0"


def in_contexts(*rules: bytes, n_contexts: int, tail: bytes | None = None) -> Frame:
    """Build a frame of four bytes with context rules."""
    return Frame(plan(rules=rules, tail=tables(n_contexts) if tail is None else tail))


def context_tensors(**context_names: str) -> File:
    """Build tensors with contexts by the magnitude of the tensor of the given name, or none for ""."""
    rules = {name: [magnitude_rule(other.encode())] if other else [] for name, other in context_names.items()}
    return File({name: in_contexts(*r, n_contexts=256) if r else Frame() for name, r in rules.items()})


def base_coded(radix: int, base_codes: int, predictor: int = 0, mode: int = 0) -> Frame:
    """Build a frame of F32 with contexts by the codes of the base."""
    rules, tail = [b"\4" + varint(radix)], tables(radix) * 4
    frame = exact("F32", F32, predictor=predictor, mode=mode, rules=rules, tail=tail)
    return replace(frame, base_codes=base_codes)


def planes(decoded: bytes, size: int = 4) -> list[tuple[int, bytes]]:
    """Return the byte planes of patterns as stored streams."""
    return [(STORED, decoded[j::size]) for j in range(size)]


def exact(
    dtype: str,
    patterns: bytes,
    shape: tuple[int, ...] | None = None,
    stored: bytes | None = None,
    **plan_fields: Any,
) -> Frame:
    """Build a frame of stored planes; `stored` are the joined planes if they differ from `patterns`."""
    size = DTYPES[dtype].pattern_bytes
    shape = (len(patterns) // size,) if shape is None else shape
    streams = planes(patterns if stored is None else stored, size)
    return Frame(plan(dtype=dtype, shape=shape, **plan_fields), streams, patterns, dtype, shape)


def with_codes(*codes: int) -> Frame:
    """Build a base with these codes, whose values are all 1."""
    return quantized(ONE * 4, bytes(codes))


def over(base: Frame, frame: Frame, **ref: Any) -> Folder:
    """Return a frame and its base, each in a file."""
    anchor = File({"w": base}, features="lossless,maps")
    reference = {"content_id": anchor.content_id(), "file": "anchor.ckptz", "depth": 1, **ref}
    delta_file = File({"w": frame}, features="delta,lossless,maps", index={"base": reference})
    return Folder({"w.ckptz": delta_file.bytes(), "anchor.ckptz": anchor.bytes()})


def as_low_rank(frame: Frame) -> File:
    """Build a file of one frame, with the features that low rank needs."""
    return File({"w": frame}, features="lossless,low-rank,maps", metadata={"ckptz.version": "1.1"})


def as_huffman(frame: Frame) -> File:
    """Build a file of one frame, with the features that Huffman streams need."""
    return File({"w": frame}, features="huffman,lossless,maps", metadata={"ckptz.version": "1.2"})


def as_products(frame: Frame) -> File:
    """Build a file of one frame, with the features that contexts by products need."""
    return File({"w": frame}, features="lossless,products", metadata={"ckptz.version": "1.3"})


def of_products(shift: int, rank: int, *, n_levels: int | None = None) -> File:
    """Build a file of four bytes with contexts by products of zeros."""
    levels = bytes(rank * 5 if n_levels is None else n_levels)
    return as_products(in_contexts(products_rule(shift, rank, levels), n_contexts=256))


def code_lengths(lengths: Sequence[int], first: int = 0) -> bytes:
    """Encode the lengths of Huffman codes; see spec/02-entropy.md#code-lengths."""
    padded = [*lengths, *[0] * (len(lengths) % 2)]
    halves = bytes(a | b << 4 for a, b in zip(padded[::2], padded[1::2], strict=True))
    return bytes((first, first + len(lengths) - 1)) + halves


def in_parts(lengths: bytes, *parts: bytes, sizes: Sequence[int] | None = None) -> bytes:
    """Encode a Huffman stream of these parts."""
    sizes = [len(part) for part in parts[:3]] if sizes is None else sizes
    return lengths + struct.pack("<3I", *sizes) + b"".join(parts)


def huffman(lengths: bytes, *parts: bytes, n: int = 4, sizes: Sequence[int] | None = None) -> File:
    """Build a file of n codes, all 0, in a Huffman stream."""
    return as_huffman(coded(HUFFMAN, in_parts(lengths, *parts, sizes=sizes), n))


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
    domain: int = 1,
    streams: tuple[tuple[int, bytes], ...] = (),
    decoded: bytes = ONE * 4,
) -> Frame:
    """Build a quantized frame of four elements, by default of the domain `linear`."""
    n_codes = len(entries) // 4 if n_codes is None else n_codes
    runs = varint(1) + b"\0" if rows > 1 else b""
    tail = bytes((kind,)) + varint(rows) + varint(n_codes) + entries + runs + zero + outer
    encoded_plan = plan(dtype=dtype, domain=domain, predictor=predictor, flags=flags, tail=tail)
    return Frame(encoded_plan, [(STORED, codes), *streams], decoded, dtype)


def escaped(value: bytes) -> tuple[tuple[int, bytes], ...]:
    """Return the streams of four equal escaped values."""
    return tuple((CONSTANT, value[j : j + 1]) for j in range(4))


def constant_vector(element: bytes, coder: int = CONSTANT) -> bytes:
    """Encode an outer vector of any length, all of whose values are equal."""
    return b"".join(embedded(element[j : j + 1], coder) for j in range(4))


def outer_frame(shape: tuple[int, ...], outer: bytes) -> Frame:
    """Build a frame of F32 whose chunks are missing."""
    patterns = math.prod(shape)
    encoded_plan = plan(dtype="F32", domain=1, predictor=2, shape=shape, tail=b"\0\1\1" + ONE + outer)
    return Frame(encoded_plan, [(CONSTANT, b"\0")], b"", "F32", shape, n_chunks=-(-patterns // CHUNK_VALUES))


def terms(*scales: bytes, codes: bytes, coder: int = STORED, rank: int | None = None) -> bytes:
    """Encode the terms of the predictor low-rank, which follow the map."""
    rank = len(scales) if rank is None else rank
    return varint(rank) + b"".join(scales) + embedded(codes, coder)


def low_rank(behind: bytes, shape: tuple[int, ...] = (4,), **fields: Any) -> Frame:
    """Build a frame of F32 ones, each the sum of low-rank terms and a map's value 0."""
    tail = b"\0\1\1" + bytes(4) + behind
    encoded_plan = plan(dtype="F32", domain=1, predictor=4, shape=shape, tail=tail)
    patterns = math.prod(shape)
    streams = [(CONSTANT, b"\0")] if patterns else []
    return Frame(encoded_plan, streams, ONE * patterns, "F32", shape, n_chunks=int(patterns > 0), **fields)


def of_rank(n: int) -> Frame:
    """Build a frame of n low-rank terms of an empty matrix, which have no codes."""
    return low_rank(terms(ONE * min(n, 65), codes=b"", rank=n), (0, 0))


def expanded(scale: float, level: float, offset: float) -> Frame:
    return quantized(np.array([scale, level, offset], "<f8").tobytes(), kind=1, n_codes=1)


def delta(decoded: bytes = F32, **fields: Any) -> Frame:
    """Build a frame of F32 by exclusive or with a base of zeros."""
    return replace(exact("F32", decoded, predictor=1, mode=2), **fields)


def base(patterns: bytes = bytes(16)) -> Frame:
    """Build a frame of F32 that can be the base of a delta."""
    return exact("F32", patterns)


def with_first_bytes(header: bytes, frame: Frame | None = None) -> Raw:
    """Build a file whose only frame begins with other bytes."""
    frame = Frame() if frame is None else frame
    data = File({"w": frame}).bytes()
    assert data.count(frame.bytes) == 1
    return Raw(data.replace(frame.bytes, header + frame.bytes[len(header) :]))


def short_frame(n_bytes: int) -> File:
    """Build a file whose only frame is cut after `n_bytes`."""
    return File({"w": Cut(n_bytes=n_bytes)})


@dataclass
class Cut(Frame):
    """A frame that is cut after `n_bytes`."""

    n_bytes: int = 0

    @property
    def bytes(self) -> bytes:
        return super().bytes[: self.n_bytes]


def empty(**fields: Any) -> Frame:
    """Build a frame of a tensor without elements."""
    return Frame(plan(shape=(0,), **fields), (), b"", shape=(0,), n_chunks=0)


def windowed(exponent: int) -> bytes:
    """Build a Zstandard frame with a window of 2^(10 + exponent) bytes."""
    return zstd_frame(0x80, bytes((exponent << 3,)) + (4).to_bytes(4, "little"))


# Further rules that an input breaks, or that a reader may check first.
ALSO = {
    "F12-0": ["H4"],
    "C3-6": ["C13"],
    "C14-7": ["C24"],
    "C15-0": ["C19"],
    "C15-1": ["C19"],
    "C15-6": ["F11"],
}

# --- cases --------------------------------------------------------------------------------------

INTEGERS: dict[str, list[Input]] = {
    "I1": [Frame(plan()[:5], n_chunks=0), coded(CONSTANT, b""), coded(STORED, bytes(3))],
    "I2": [Frame(plan(sizes=b"\x84\x00"))],
    "I3": [Frame(plan(sizes=bytes([255] * 9 + [2]))), Frame(plan(sizes=bytes([255] * 10 + [1])))],
    "I4": [
        in_contexts(magnitude_rule(text), n_contexts=256) for text in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80")
    ],
    "I5": [
        frequencies(0, 1, 11, 0, 255, 255, 255),
        frequencies(0, 1, 0, 0, 0, 3, 0, 0),
        frequencies(0, 2, 0, 128),
    ],
    "I6": [frequencies(0, 1, 0, 0b1010)],
    "I7": [sparse(b"", b"", behind=b"\0")],
}

ENTROPY: dict[str, list[Input]] = {
    "E1": [
        *(coded(coder, b"\0") for coder in (6, 224)),
        quantized(predictor=2, outer=constant_vector(ONE, 6) + vectors(ONE)),
    ],
    "E2": [
        coded(SHARED, LANE),
        quantized(flags=2, streams=((SHARED, LANE), *EMPTY * 3)),
        in_contexts(row_rule(2, LANE, SHARED), n_contexts=2),
        quantized(predictor=2, outer=embedded(LANE, SHARED) + constant_vector(ONE)[3:] + vectors(ONE)),
        as_huffman(quantized(ONE * 2, b"\1\1\1\1", flags=2, streams=((HUFFMAN, ZEROS),) * 4)),
        as_huffman(in_contexts(row_rule(2, ZEROS, HUFFMAN), n_contexts=2)),
        as_huffman(
            coded(SPARSE, b"\0" + varint(4) + embedded(ZEROS, HUFFMAN) + varint(4) + embedded(bytes(4)))
        ),
    ],
    "E3": [
        coded(STORED, bytes(5)),
        coded(CONSTANT, b"\0\0"),
        quantized(predictor=2, outer=vectors(ONE * 5, ONE)),
    ],
    "E4": [
        quantized(ONE * 2, flags=2, streams=((CONSTANT, b"\0"),) * 4),
        coded(SPARSE, b"\0" + (varint(0) + b"\0\1\7") * 2),
        Frame(plan(shape=(0,), rules=[row_rule(2, b"\0", CONSTANT)], tail=tables(2)), n_chunks=0),
    ],
    "E5": [
        coded(ZSTD, zstd_frame(0x20, b"\5", 5)),
        coded(ZSTD, zstd_frame(0, b"\x50")),
        coded(ZSTD, SIZED[:-1]),
        coded(ZSTD, zstd_frame(0x24, b"\4") + b"\1\2\3\4"),
        coded(ZSTD, b"no such frame"),
        coded(ZSTD, SIZED + b"\0"),
        coded(ZSTD, SIZED + SIZED),
        coded(ZSTD, b"\x50\x2a\x4d\x18\4\0\0\0" + SIZED),
        coded(ZSTD, windowed(14)),
        coded(ZSTD, windowed(31)),
        coded(ZSTD, zstd_frame(0x21, b"\1\4")),
    ],
    "E6": [
        frequencies(1, 0, 0),
        frequencies(0, 1, 12, 1),
        frequencies(0, 1, 11, 0x02, 0x20),
        frequencies(0, 1, 0, 1),
    ],
    "E7": [
        in_contexts(row_rule(1, bytes(4)), n_contexts=1, tail=tables(1, 0)),
        in_contexts(row_rule(1, bytes(4)), n_contexts=1, tail=tables(1, 65)),
    ],
    "E8": [
        in_contexts(row_rule(2, bytes(4)), n_contexts=2, tail=b"\1" + FLAT_TABLE + runs)
        for runs in (b"\0\0\2\0", b"\3\0", b"\1\0\2\0", b"\2\1")
    ],
    "E9": [coded(OWN, FLAT_TABLE + b"\3" + LANE[1:])],
    "E10": [coded(OWN, FLAT_TABLE + b"\0\xff\xff\0\0")],
    "E11": [coded(OWN, FLAT_TABLE + LANE + b"\0")],
    "E12": [
        coded(OWN, FLAT_TABLE + LANE + b"\0\0"),
        coded(OWN, FLAT_TABLE + b"\0\0\0\2\0"),
        coded(OWN, b"\0\1\x0b\2\0" + LANE),
    ],
    "E13": [
        sparse(b"", b"", coder=SPARSE),
        sparse(b"\0", b"\1", coder=SHARED),
        sparse(bytes(6), bytes(4)),
        sparse(bytes(4), bytes(5)),
    ],
    "E14": [
        sparse(b"\0\xff", b"\1", n=600),
        sparse(b"\0\0", b"\1"),
        sparse(b"\0", b"\1\2"),
        sparse(b"\4", b"\1"),
    ],
    "E15": [
        *(
            huffman(lengths, b"\0", b"\0", b"\0", b"\0")
            for lengths in (
                *(b"\0\0\x10", b"\0\0\1", b"\1\0\x11", b"\0\2\x10\1", b"\0\2\x11\0"),
                *(b"\0\2\x21\x12", code_lengths([*range(1, 13), 12]), b"\0\1\xf1"),
            )
        ),
    ],
    "E16": [
        *(
            huffman(code_lengths(lengths), b"\0", b"\0", b"\0", b"\0")
            for lengths in ((1, 1, 1), (1, 2, 2, 11), (1, 2), (2, 2, 2), (11, 11), [8] * 255)
        ),
    ],
    "E17": [
        huffman(HALVES, b"\0", b"\0", b"\0", b"\0", sizes=sizes)
        for sizes in ((5, 0, 0), (1, 1, 3), ((1 << 32) - 1, 1, 4))
    ],
    "E18": [
        huffman(HALVES, *parts, n=n)
        for parts, n in (
            ((b"\0", b"\0", b"\0", b""), 4),
            ((b"\0", b"\0", b"\0", b"\0\0"), 4),
            ((b"\0", b"\0", b"\0", b"\2"), 4),
            ((b"\x80", b"\0", b"\0", b"\0"), 4),
            ((b"", b"\0\0", b"\0", b"\0"), 4),
            ((b"\0\0", b"\0", b"\0", b"\0"), 32),
            ((b"\0", b"\0", b"\0", b"\0"), 33),
            ((b"\0", b"\0", b"\0", b"\0"), 3),
            ((bytes(33), bytes(33), bytes(32), bytes(32)), 1024),
        )
    ],
}

TRANSFORMS: dict[str, list[Input]] = {
    "T1": [Frame(plan(mode=4)), *(in_contexts(bytes((r, 0)), n_contexts=1) for r in (0, 5, 255))],
    "T2": [
        in_contexts(*[row_rule(1, bytes(4))] * 4, n_contexts=1),
        in_contexts(magnitude_rule(), row_rule(17, bytes(4)), n_contexts=4352),
    ],
    "T3": [
        in_contexts(row_rule(0, bytes(4)), n_contexts=1),
        in_contexts(row_rule(257, bytes(4)), n_contexts=257),
        in_contexts(row_rule(2, b"\0\1\2\0"), n_contexts=2),
    ],
    "T4": [
        Frame(
            plan(dtype="F4", shape=(2, 3), rules=[row_rule(2, bytes(2))], tail=tables(2)),
            [(STORED, bytes(3))],
            bytes(3),
        ),
        as_products(
            Frame(
                plan(dtype="F4", shape=(2, 3), rules=[products_rule(0, 1, bytes(3))], tail=tables(256)),
                [(STORED, bytes(3))],
                bytes(3),
            )
        ),
    ],
    "T5": [
        in_contexts(block_rule(1, 0, bytes(4)), n_contexts=1),
        in_contexts(block_rule(1, (1 << 48) + 1, b"\0"), n_contexts=1),
    ],
    "T6": [
        Frame(
            plan(shape=((1 << 24) + 1,), rules=[row_rule(1, b"\0", CONSTANT)], tail=tables(1)), n_chunks=17
        ),
        Frame(plan(shape=(1 << 23,), rules=[row_rule(1, b"\0", CONSTANT)] * 3, tail=tables(1)), n_chunks=8),
        as_products(
            Frame(
                plan(shape=(1 << 18,), rules=[products_rule(0, 64, b"\0", CONSTANT)], tail=tables(256)),
                [(CONSTANT, b"\0")],
                bytes(1 << 18),
            )
        ),
        as_products(
            Frame(
                plan(
                    shape=(1 << 23,),
                    rules=[products_rule(0, 1, b"\0", CONSTANT), row_rule(1, b"\0", CONSTANT)],
                    tail=tables(256),
                ),
                n_chunks=8,
            )
        ),
    ],
    "T7": [
        context_tensors(w="other"),
        empty(rules=[magnitude_rule(b"other")], tail=tables(256)),
        File({"w": in_contexts(magnitude_rule(b"v"), n_contexts=256), "v": coded(CONSTANT, b"\0", 5)}),
    ],
    "T8": [context_tensors(a="b", b="c", c="d", d=""), context_tensors(a="a"), context_tensors(a="b", b="a")],
    "T9": [over(with_codes(0, 1, 2, 3), base_coded(3, xxh64(b"\0\1\2\3")))],
    "T10": [over(with_codes(0, 1, 2, 3), base_coded(4, 1)), over(base(), base_coded(4, 1))],
    "T11": [
        of_products(21, 1),
        of_products(255, 1),
        of_products(0, 0),
        of_products(0, 65),
        of_products(0, 1 << 40, n_levels=0),
    ],
}

QUANTIZATION: dict[str, list[Input]] = {
    "Q1": [quantized(dtype="U8"), quantized(dtype="F64")],
    "Q2": [quantized(kind=2), quantized(struct.pack("<3q", 1, 1, 1), n_codes=1, kind=1, domain=2)],
    "Q3": [
        quantized(b"", rows=0, n_codes=1),
        quantized(ONE * 4097, rows=4097, n_codes=1),
        quantized(b"", n_codes=0),
        quantized(ONE * 257),
    ],
    "Q4": [quantized(flags=1, zero=b"\1")],
    "Q5": [
        expanded(*values) for values in ((np.inf, 1, 0), (1, np.nan, 0), (1e-310, 1e300, 0), (1, 1, 1e-310))
    ],
    "Q6": [
        quantized(codes=b"\0\0\1\0"),
        # of a base whose codes alone are wanted
        over(quantized(codes=b"\0\0\1\0"), base_coded(2, xxh64(b"\0\0\1\0"))),
    ],
    "Q7": [
        quantized(ONE + INFINITY, b"\0\1\0\0", decoded=ONE + INFINITY + ONE * 2),
        quantized(b"\xff\xff\xff\x7f", dtype="BF16", decoded=b"\0\x80" * 4),
        quantized(
            ONE + INFINITY + ONE, b"\0\1\0\0", flags=2, streams=EMPTY * 4, decoded=ONE + INFINITY + ONE * 2
        ),
    ],
    "Q8": [quantized(predictor=2, outer=vectors(ONE * 3 + INFINITY, ONE))],
    "Q9": [
        outer_frame((0, (1 << 24) + 1), vectors(b"") + constant_vector(ONE)),
        outer_frame((1 << 24, 1), constant_vector(ONE) * 2),
        as_low_rank(low_rank(terms(ONE, ONE, codes=b"\1", coder=CONSTANT), (0, (1 << 23) + 1))),
    ],
    "Q10": [as_low_rank(of_rank(n)) for n in (0, 65, 1 << 40)],
    "Q11": [
        as_low_rank(low_rank(terms(bytes.fromhex(scale), codes=bytes((1,) * 5))))
        for scale in ("0100c07f", "0000807f", "01008071", "010080f1")
    ],
}

FRAME: dict[str, list[Input]] = {
    "F1": [with_first_bytes(b"\x0b\0\0\0"), with_first_bytes(b"\xff\0\0\0"), short_frame(3), short_frame(11)],
    "F2": [with_first_bytes(Frame().header[:-1] + b"\0"), with_first_bytes(Frame().header[:4] + b"\2")],
    "F3": [*(Frame(plan(version=v)) for v in (0, 2, 255))],
    "F4": [*(Frame(plan(dtype_id=i)) for i in (0, 23, 255)), Frame(plan(domain=3)), Frame(plan(predictor=3))],
    "F5": [
        quantized(flags=8),
        Frame(plan(flags=128)),
        quantized(flags=4, streams=((STORED, b"\0\1\0\0"), *escaped(ONE))),
    ],
    "F6": [Frame(plan(flags=1))],
    "F7": [
        Frame(plan(shape=[1] * 65)),
        Frame(plan(shape=[1 << 24, 0, (1 << 24) + 1]), n_chunks=0),
        Frame(plan(shape=[(1 << 64) - 1] * 63 + [0]), n_chunks=0),
    ],
    "F8": [Frame(plan(dtype="F4", shape=(3,)))],
    "F9": [
        Frame(plan(mode=2)),
        Frame(plan(predictor=1)),
        Frame(plan(predictor=2, tail=vectors(bytes(16), bytes(4)))),
        as_low_rank(Frame(plan(predictor=4, tail=terms(ONE, codes=bytes(5))))),
    ],
    "F10": [Frame(n_chunks=0), Frame(n_chunks=2), Frame(behind_records=b"\0")],
    "F11": [File({"w": Frame(behind=b"\0")})],
    "F12": [over(Frame(), delta())],
    "F13": [over(base(b"\1" * 16), delta())],
    "F14": [coded(STORED, b"\1\2\3\4", decoded=b"\1\2\3\5")],
    "F15": [Frame(stored_checksum=0, decoded_checksum=0), over(base(b"\1" * 16), delta(stored_checksum=0))],
}
