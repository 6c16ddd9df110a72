"""Inputs that a reader must decode, with the expected tensors and the refusals whose rules they need.

spec/make_vectors.py writes their files to spec/vectors/valid and spec/vectors/chain. A reader that misreads a
rule, or refuses more than the rule says, fails on an input that names the rule.

"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckptz.format.bits import xxh64
from ckptz.format.dtypes import DTYPES
from tests.support.reference import golomb_pack
from tests.support.spec_cases import (
    F32,
    FLAT_TABLE,
    INFINITY,
    LANE,
    ONE,
    SIZED,
    as_huffman,
    as_low_rank,
    as_products,
    base,
    block_rule,
    code_lengths,
    coded,
    context_tensors,
    delta,
    empty,
    escaped,
    exact,
    in_contexts,
    in_parts,
    magnitude_rule,
    products_rule,
    quantized,
    row_rule,
    sparse,
    tables,
    terms,
    windowed,
    zstd_frame,
)
from tests.support.spec_cases_files import (
    LOSSY,
    PLAIN_ROW,
    floats,
    full,
    grouped,
    inlined,
    metadata_section,
    packed_text,
    two_groups,
)
from tests.support.spec_cases_tree import nested, node, tree
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
    Frame,
    Tensor,
    embedded,
    header_text,
    plain_file,
    plan,
    varint,
    vectors,
)
from tests.support.spec_support import table


@dataclass(frozen=True)
class Valid:
    """A file, the files of its bases, and the ids of the refusals whose rules it needs."""

    needs: str
    file: File
    beside: Files = field(default_factory=dict)

    def files(self) -> Files:
        """Return all files, the one to read first."""
        return {"w.ckptz": self.file.bytes(), **self.beside}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the file decodes to."""
        return self.file.tensors()


@dataclass(frozen=True)
class Plain(Valid):
    """A plain safetensors file."""

    file: File = field(default_factory=File)
    rows: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""

    def files(self) -> Files:
        return {"w.safetensors": plain_file(dict(self.rows), self.data)}

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, row in self.rows.items():
            if name != "__metadata__":
                begin, end = row["data_offsets"]
                tensors[name] = (row["dtype"], tuple(row["shape"]), self.data[begin:end])
        return tensors


def one(needs: str, frame: Frame) -> Valid:
    """Return a file of one frame."""
    return Valid(needs, File({"w": frame}, features="lossless,maps"))


def low(
    needs: str,
    decoded: bytes,
    shape: tuple[int, ...],
    behind: bytes,
    entries: bytes = bytes(4),
    streams: Sequence[tuple[int, bytes]] = ((CONSTANT, b"\0"),),
    dtype: str = "F32",
    domain: int = 1,
) -> Valid:
    """Return a file of one low-rank frame; `behind` has its terms."""
    tail = b"\0\1" + varint(len(entries) // DTYPES[dtype].pattern_bytes) + entries + behind
    encoded_plan = plan(dtype=dtype, domain=domain, predictor=4, shape=shape, tail=tail)
    frame = Frame(
        encoded_plan, streams if decoded else (), decoded, dtype, shape, n_chunks=int(bool(decoded))
    )
    return Valid(needs, as_low_rank(frame))


def file(needs: str, *args: Any, **fields: Any) -> Valid:
    return Valid(needs, File(*args, **fields))


# --- streams ------------------------------------------------------------------------------------


def frequency_table(frequencies: Mapping[int, int], order: int = 5) -> bytes:
    """Encode a frequency table; see spec/02-entropy.md#frequency-table."""
    assert sum(frequencies.values()) == 4096
    first, last = min(frequencies), max(frequencies)
    values = np.array([frequencies.get(s, 0) for s in range(first, last)], np.uint16)
    return bytes((first, last, order)) + golomb_pack(values, order).tobytes()


def rans(codes: Sequence[int], each: Sequence[Mapping[int, int]], lane_index: int = 0) -> bytes:
    """Encode codes in stream order, each by its frequencies; see spec/02-entropy.md#encoding-informative."""
    lanes = (1, 4, 32)[lane_index]
    x, words = [1 << 16] * lanes, []
    for i in reversed(range(len(codes))):
        s, lane = codes[i], i % lanes
        f, start = each[i][s], sum(n for code, n in each[i].items() if code < s)
        if x[lane] >= f << 20:
            words.insert(0, x[lane] & 0xFFFF)
            x[lane] >>= 16
        x[lane] = x[lane] // f * 4096 + x[lane] % f + start
    return bytes((lane_index,)) + struct.pack(f"<{lanes}I{len(words)}H", *x, *words)


EVEN, SKEWED = {0: 1024, 1: 1024, 2: 1024, 3: 1024}, {0: 4000, 2: 1, 3: 95}
LONE = {7: 4096}
CODES = [0, 0, 2, 0, 3, 0, 0, 0, 0, 1, 0, 0] * 4


def with_own_table(
    frequencies: Mapping[int, int], codes: Sequence[int], lane_index: int, order: int = 5
) -> Frame:
    stream = frequency_table(frequencies, order) + rans(codes, [frequencies] * len(codes), lane_index)
    return coded(OWN, stream, len(codes), bytes(codes))


def shared(rule: bytes, labels: Sequence[int], codes: Sequence[int], by_context: Sequence[int]) -> Frame:
    """Build a frame of codes in one stream by two tables, EVEN and SKEWED, one of them for each context."""
    both = (EVEN, SKEWED)
    order = sorted(range(len(codes)), key=lambda i: labels[i])
    each = [both[by_context[labels[i]]] for i in order]
    runs = b"".join(varint(1) + varint(number) for number in by_context)
    tail = b"\2" + b"".join(map(frequency_table, both)) + runs
    encoded_plan = plan(shape=(4, len(codes) // 4), rules=[rule], tail=tail)
    stream = rans([codes[i] for i in order], each)
    return Frame(encoded_plan, [(SHARED, stream)], bytes(codes), shape=(4, len(codes) // 4))


def parts(common: int, gaps: tuple[int, int, bytes], values: tuple[int, int, bytes]) -> bytes:
    """Encode a sparse stream; each part has a count, a coder and a stream."""
    return bytes((common,)) + b"".join(
        varint(count) + embedded(data, coder) for count, coder, data in (gaps, values)
    )


def code_words(lengths: Mapping[int, int]) -> dict[int, str]:
    """Return the code word of each code as a text of bits; see spec/02-entropy.md#code-words."""
    words, word, n_bits = {}, 0, 0
    for code in sorted(lengths, key=lambda code: (lengths[code], code)):
        word, n_bits = word << (lengths[code] - n_bits), lengths[code]
        words[code] = f"{word:0{n_bits}b}"
        word += 1
    return words


def by_huffman(lengths: Mapping[int, int], codes: Sequence[int]) -> bytes:
    """Encode a Huffman stream; see spec/02-entropy.md#huffman."""
    first, last, q = min(lengths), max(lengths), -(-len(codes) // 4)
    words = code_words(lengths)
    texts = ["".join(words[code] for code in codes[j * q : (j + 1) * q]) for j in range(4)]
    parts = [
        np.packbits(np.array([*map(int, text)], np.uint8), bitorder="little").tobytes() for text in texts
    ]
    return in_parts(code_lengths([lengths.get(s, 0) for s in range(first, last + 1)], first), *parts)


def huffman_coded(lengths: Mapping[int, int], codes: Sequence[int]) -> Valid:
    """Return a file of one Huffman stream."""
    frame = coded(HUFFMAN, by_huffman(lengths, codes), len(codes), bytes(codes))
    return Valid("E1 E15 E16 E17 E18", as_huffman(frame))


TWO = b"\0\0\0\x40"
STEPS = {s: min(s + 1, 11) for s in range(12)}  # code lengths 1 to 11, and 11 again
WIDE = {3: 2, 90: 2, 91: 3, 92: 4, 200: 4, 201: 2}
FOXES = bytes.fromhex("28b52ffd2464dd0000a07468652071756963 6b2062726f776e20666f78200100fad0c904cf25b201")
SPARSE_LONG = parts(5, (3, STORED, b"\xff\x29\0"), (2, CONSTANT, b"\x05"))
SPARSE_CODED = parts(
    0, (4, OWN, frequency_table(EVEN) + rans([1, 0, 2, 3], [EVEN] * 4)), (4, ZSTD, zstd_frame(0x20, b"\4"))
)

STREAMS: dict[str, Valid] = {
    "coder-constant": one("I1 E3 F1 F2 F3", coded(CONSTANT, b"\xaa", 9, b"\xaa" * 9)),
    "coder-stored": one("I1 E3 F15 C15", coded(STORED, bytes(range(9)), 9, bytes(range(9)))),
    "coder-zstd": one("E5", coded(ZSTD, SIZED)),
    "coder-zstd-checksum": one(
        "E5", coded(ZSTD, zstd_frame(0x24, b"\4") + xxh64(bytes(4)).to_bytes(8, "little")[:4])
    ),
    "coder-zstd-compressed": one("E5", coded(ZSTD, FOXES, 100, (b"the quick brown fox " * 6)[:100])),
    "coder-zstd-window-8mib": one("E5", coded(ZSTD, windowed(13))),
    "coder-zstd-dictionary-0": one("E5", coded(ZSTD, zstd_frame(0x21, b"\0\4"))),
    "coder-rans-own-1-lane": one(
        "E1 E6 E9 E10 E11 E12 I5 I6", with_own_table(EVEN, [0, 1, 2, 3, 3, 1, 0, 2, 2], 0)
    ),
    "coder-rans-own-4-lanes": one("E9 E10 E12", with_own_table(SKEWED, [0, 0, 3, 0, 2, 0, 0, 0, 3, 3, 2], 1)),
    "coder-rans-own-32-lanes": one("E9 E10 E12", with_own_table(SKEWED, [2, 3, 0] * 30, 2)),
    "coder-rans-own-order-0": one(
        "E6 I5", with_own_table({0: 1, 1: 2, 255: 4093}, [255, 0, 1, 255] * 3, 0, 0)
    ),
    "coder-rans-own-order-11": one("E6 I5", with_own_table({3: 2048, 4: 2048}, [3, 4, 4, 3], 0, 11)),
    "histogram-of-one-symbol": one("E6 E12", with_own_table(LONE, [7] * 50, 1)),
    "coder-rans-shared-rows": one(
        "E1 E2 E7 E8 E12 T3 T4",
        shared(row_rule(2, b"\0\1\1\0"), [0] * 12 + [1] * 24 + [0] * 12, [0, 2, 3, 0] * 12, [0, 1]),
    ),
    "coder-rans-shared-blocks": one(
        "E7 E8 T5",
        shared(
            block_rule(3, 20, b"\2\0\1"),
            [2] * 20 + [0] * 20 + [1] * 8,
            [c if 20 <= i < 40 else (0, 0, 2, 3)[c] for i, c in enumerate([3, 1, 2, 0] * 12)],
            [0, 1, 1],
        ),
    ),
    "sparse-empty": one("E4 E13 E14", sparse(b"", b"")),
    "sparse-common-value": one("E14", sparse(b"\1", b"\0")),
    "sparse-long-gap": one("E13 E14 I7", coded(SPARSE, SPARSE_LONG, 400, b"\x05" * 400)),
    "sparse-coded-parts": one("E13 E14", coded(SPARSE, SPARSE_CODED, 12)),
    "sparse-last-code": one(
        "E14", coded(SPARSE, parts(1, (1, STORED, b"\3"), (1, STORED, b"\2")), 4, b"\1\1\1\2")
    ),
    "sparse-255-gap": one(
        "E14",
        coded(SPARSE, parts(0, (2, STORED, b"\xff\0"), (1, STORED, b"\x09")), 256, bytes(255) + b"\x09"),
    ),
    "table-of-one-code": one("E6", coded(OWN, FLAT_TABLE + LANE)),
    "lanes-without-codes": one("E12", coded(OWN, FLAT_TABLE + b"\2" + LANE[1:] * 32)),
    "runs-with-the-same-table": one(
        "E8", in_contexts(row_rule(2, bytes(4)), n_contexts=2, tail=tables(1) + b"\1\0")
    ),
    "tables-that-no-class-uses": one(
        "E7", in_contexts(row_rule(2, bytes(4)), n_contexts=2, tail=tables(2, 64))
    ),
    "huffman-worked-example": huffman_coded({0: 1, 1: 2, 2: 3, 3: 3}, [2, 0, 1, 0, 2, 0, 0, 1, 3, 0, 1, 0]),
    **{f"huffman-of-{n}": huffman_coded({7: 1, 8: 1}, [7, 8, 8, 7, 7, 8, 8][:n]) for n in (1, 2, 5, 7)},
    "huffman-every-length": huffman_coded(STEPS, [*range(12), *[0] * 300, *range(11, -1, -1)] * 2),
    "huffman-long": huffman_coded(
        WIDE, [(3, 90, 3, 201, 91, 90, 92, 200)[i * i % 11 % 8] for i in range(2500)]
    ),
    "huffman-all-codes": huffman_coded(dict.fromkeys(range(256), 8), [*range(256)] * 2),
    "huffman-codes-that-do-not-occur": huffman_coded({0: 2, 1: 2, 5: 1}, [5, 0, 5]),
    "huffman-beside-contexts": Valid(
        "E2 E18",
        as_huffman(
            Frame(
                plan(shape=(4, 2), rules=[row_rule(2, b"\0\1\1\0")], tail=tables(2)),
                [(HUFFMAN, by_huffman({0: 1, 1: 1}, [0, 1, 1, 1, 0, 0, 1, 0]))],
                bytes([0, 1, 1, 1, 0, 0, 1, 0]),
                shape=(4, 2),
            )
        ),
    ),
    "huffman-codes-of-a-map": Valid(
        "E2 Q6",
        as_huffman(
            replace(
                quantized(ONE + TWO, decoded=ONE + TWO + TWO + ONE),
                streams=[(HUFFMAN, by_huffman({0: 1, 1: 1}, [0, 1, 1, 0]))],
            )
        ),
    ),
    "varints": one(
        "I2 I3",
        Frame(
            plan(shape=(1, 1, 300), sizes=b"\1\1\xac\2"), [(CONSTANT, b"\1")], b"\1" * 300, shape=(1, 1, 300)
        ),
    ),
}

# --- tensors ------------------------------------------------------------------------------------

PATTERNS = bytes.fromhex("00000080 0000807f 010080ff ffffffff 0100007f 00000000 efbeadde 01000000")


def tensor(dtype: str) -> Frame:
    """Return a frame of 32 bytes of a dtype: signed zeros, infinities, NaN with payloads, subnormals."""
    shape = (32 * 8 // DTYPES[dtype].bits,) if DTYPES[dtype].bits in (4, 8, 16, 32, 64) else (4, 4)
    return exact(dtype, PATTERNS[: 12 if shape == (4, 4) else 32], shape)


TENSORS: dict[str, Valid] = {
    **{f"dtype-{name.lower().replace('_', '-')}": one("F4 C6 F8", tensor(name)) for name in DTYPES},
    "shape-scalar": one("F7 F10", exact("U8", b"\7", ())),
    "shape-empty": file(
        "F7 F10 F11 E4",
        {
            "none": empty(),
            "rows": Frame(plan(shape=(0, 5)), (), b"", shape=(0, 5), n_chunks=0),
            "huge": Frame(plan(shape=(1 << 48, 0)), (), b"", shape=(1 << 48, 0), n_chunks=0),
            "ruled": Frame(
                plan(shape=(0, 5), rules=[row_rule(2, b""), block_rule(2, 7, b"")], tail=tables(4)),
                (),
                b"",
                shape=(0, 5),
                n_chunks=0,
            ),
        },
    ),
    "shape-64-dimensions": one("F7", exact("U8", b"\7", (1,) * 64)),
    "two-chunks": one(
        "F10 F14",
        Frame(
            plan(shape=((1 << 20) + 3,)),
            [(CONSTANT, b"\7")],
            b"\7" * (1 << 20),
            shape=((1 << 20) + 3,),
            last=([(STORED, b"\1\2\3")], b"\1\2\3"),
        ),
    ),
    "mode-rotated": one(
        "T1 F6 F9",
        exact("F32", bytes.fromhex("010080bf 00000080"), stored=bytes.fromhex("0300007f 01000000"), mode=1),
    ),
}

# --- contexts ------------------------------------------------------------------------------------


def by_magnitude(name: str) -> Frame:
    """Build a frame with contexts by the magnitudes of another tensor: bytes 3 and 130 give 3 and 2."""
    tail = (
        b"\2" + frequency_table(LONE) + frequency_table({9: 4096}) + varint(3) + b"\0" + varint(253) + b"\1"
    )
    encoded_plan = plan(rules=[magnitude_rule(name.encode())], tail=tail)
    stream = rans([7, 7, 9, 9], [LONE, LONE, {9: 4096}, {9: 4096}])
    return Frame(encoded_plan, [(SHARED, stream)], b"\x09\x07\x07\x09")


OTHER = Frame(streams=[(STORED, b"\3\x82\2\3")], decoded=b"\3\x82\2\3")


def by_products(shift: int, rows: list[list[int]], columns: list[list[int]], *, row: bytes = b"") -> Frame:
    """Build a frame with contexts by sums of products; `rows` and `columns` list the levels of each term."""
    shape = len(rows[0]), len(columns[0])
    sums = [
        sum(a[i] * b[j] for a, b in zip(rows, columns, strict=True))
        for i in range(shape[0])
        for j in range(shape[1])
    ]
    labels = [min(max(128 + (s >> shift), 0), 255) for s in sums]
    stored = bytes(
        level % 256 for a, b in zip(rows, columns, strict=True) for levels in (a, b) for level in levels
    )
    codes = [3 - i % 4 if label < 128 else (0, 0, 2, 3)[i % 4] for i, label in enumerate(labels)]
    order = sorted(range(len(codes)), key=lambda i: labels[i])
    each = [SKEWED if labels[i] >= 128 else EVEN for i in order]
    runs = varint(128) + b"\0" + varint(128) + b"\1"
    tail = b"\2" + frequency_table(EVEN) + frequency_table(SKEWED) + runs
    encoded_plan = plan(shape=shape, rules=[products_rule(shift, len(rows), stored)], tail=tail)
    return Frame(encoded_plan, [(SHARED, rans([codes[i] for i in order], each))], bytes(codes), shape=shape)


def product(needs: str, frame: Frame) -> Valid:
    """Return a file of one frame with contexts by products."""
    return Valid(needs, as_products(frame))


CLASSES: dict[str, Valid] = {
    "class-magnitude-of-a-tensor": file("T1 T7 I4", {"w": by_magnitude("é"), "é": OTHER}),
    "class-magnitude-two-deep": Valid("T7 T8", context_tensors(a="b", b="c", c="")),
    "class-three-rules": one(
        "T2 T3 T5",
        in_contexts(
            row_rule(3, b"\2\1\0\2"), block_rule(256, 3, b"\xff\0"), row_rule(5, bytes(4)), n_contexts=3840
        ),
    ),
    "class-4096": one("T2 T3", in_contexts(row_rule(256, bytes(4)), row_rule(16, bytes(4)), n_contexts=4096)),
    "class-a-rule-twice": one("T2", in_contexts(*[row_rule(2, bytes(4))] * 2, n_contexts=4)),
    "class-block-beyond-the-tensor": one("T5", in_contexts(block_rule(2, 1 << 48, b"\1"), n_contexts=2)),
    "class-rows-of-a-scalar": one("T4", exact("U8", b"\7", (), rules=[row_rule(2, b"\1")], tail=tables(2))),
    "class-coded-labels": one("T3 T6", in_contexts(row_rule(2, b"\1", CONSTANT), n_contexts=2)),
    "class-products": product(
        "T1 T4 T6 T11 C20",
        by_products(1, [[1, -2, 3], [0, 5, -1]], [[4, -3, 2, 1, 0], [1, 1, -1, 2, -128]]),
    ),
    "class-products-of-one-term": product("T11", by_products(0, [[-1, 1]], [[-128, 127, 0, 1]])),
    "class-products-at-the-ends": product("T11", by_products(0, [[-128, 127]], [[-128, 127, 2, 1]])),
    "class-products-shifted-by-20": product(
        "T11", by_products(20, [[-128, 127, 1]] * 64, [[127, -128, 0, -1]] * 64)
    ),
    "class-products-of-a-scalar": product(
        "T4 T11", exact("U8", b"\7", (), rules=[products_rule(0, 1, b"\2\xff")], tail=tables(256))
    ),
    "class-products-of-nothing": product("T6 T11", empty(rules=[products_rule(3, 2, b"")], tail=tables(256))),
    "class-products-of-f32": product(
        "T11", exact("F32", F32, (2, 2), rules=[products_rule(0, 1, b"\1\2\3\xfc")], tail=tables(256) * 4)
    ),
    "class-products-beside-rows": product(
        "T2 T6 T11",
        in_contexts(products_rule(0, 1, b"\1", CONSTANT), row_rule(16, b"\0\x0f\1\2"), n_contexts=4096),
    ),
}

# --- maps ---------------------------------------------------------------------------------------


def f32s(*patterns: int) -> bytes:
    return struct.pack(f"<{len(patterns)}I", *patterns)


def u16s(*patterns: int) -> bytes:
    return struct.pack(f"<{len(patterns)}H", *patterns)


def mapped(
    decoded: bytes,
    codes: Sequence[int],
    entries: bytes,
    *,
    n_codes: int,
    rows: int = 1,
    dtype: str = "F32",
    domain: int = 1,
    kind: int = 0,
    flags: int = 0,
    predictor: int = 0,
    rules: Sequence[bytes] = (),
    behind: bytes = b"",
    exact: Sequence[tuple[int, bytes]] = (),
) -> Frame:
    """Build a frame with a quantization map; `behind` follows the entries in the plan."""
    shape = (len(codes),)
    tail = bytes((kind,)) + varint(rows) + varint(n_codes) + entries + behind
    encoded_plan = plan(
        dtype=dtype, domain=domain, predictor=predictor, flags=flags, shape=shape, rules=rules, tail=tail
    )
    return Frame(encoded_plan, [(STORED, bytes(codes)), *exact], decoded, dtype, shape)


def cast_frame(dtype: str) -> Frame:
    """Build a frame of every row in the page's table of casts with a finite result, except -0.0."""
    exponent = {"BF16": 0x7F80, "F16": 0x7C00}[dtype]
    rows = [(int(row["F32"], 16), int(row[dtype], 16)) for row in table("04-quantization.md", "cast", "F32")]
    rows = [(p, u) for p, u in rows if u & exponent != exponent and u != 0x8000]
    entries = f32s(*(p for p, _ in rows))
    return mapped(u16s(*(u for _, u in rows)), range(len(rows)), entries, n_codes=len(rows), dtype=dtype)


def expanded(decoded: bytes, scale: float, level: float, offset: float, **fields: Any) -> Frame:
    entries = struct.pack("<3d", scale, level, offset)
    return mapped(decoded, [0], entries, n_codes=1, kind=1, **fields)


def outer_by_all_coders() -> Frame:
    """Build a frame with the row vector 0x3f010000, 0x3f000000, 0x3f024000, 0x3f030000, times 1 and -2."""
    rows = (
        (ZSTD, SIZED),
        (SPARSE, parts(0, (1, STORED, b"\2"), (1, STORED, b"\x40"))),
        (OWN, frequency_table(EVEN) + rans([1, 0, 2, 3], [EVEN] * 4)),
        (CONSTANT, b"\x3f"),
    )
    column = vectors(f32s(0x3F800000, 0xC0000000))
    tail = b"\0\1\1" + f32s(0) + b"".join(embedded(data, coder) for coder, data in rows) + column
    products = f32s(0x3F010000, 0xBF810000, 0x3F000000, 0xBF800000)
    products += f32s(0x3F024000, 0xBF824000, 0x3F030000, 0xBF830000)
    encoded_plan = plan(dtype="F32", domain=1, predictor=2, shape=(4, 2), tail=tail)
    return Frame(encoded_plan, [(CONSTANT, b"\0")], products, "F32", (4, 2))


MAPS: dict[str, Valid] = {
    "map-linear-f32": one(
        "Q1 Q2 Q3 Q6 C20",
        mapped(f32s(0x3F800000, 0xC0000000, 0x3F800000), [1, 0, 1], f32s(0xC0000000, 0x3F800000), n_codes=2),
    ),
    "map-linear-negative-zero": one("Q7", mapped(f32s(0), [0], f32s(0x80000000), n_codes=1)),
    "map-bits-f32": one(
        "Q2", mapped(f32s(0x3F800000, 0x80000000), [0, 1], f32s(0x3F800000, 0xFFFFFFFF), n_codes=2, domain=2)
    ),
    "map-bits-bf16": one("Q2", mapped(u16s(0x3F80), [0], u16s(0x3F80), n_codes=1, dtype="BF16", domain=2)),
    "map-bits-f16": one(
        "Q2", mapped(u16s(0x3C00, 0xBC00), [0, 1], u16s(0x3C00, 0xC3FF), n_codes=2, dtype="F16", domain=2)
    ),
    "map-256-codes": one("Q3 Q6", mapped(f32s(*range(256)), range(256), f32s(*range(256)), n_codes=256)),
    "map-rows": one(
        "Q3 E8 T3",
        mapped(
            f32s(0x3F800000, 0x40000000, 0x40000000, 0x3F800000),
            [0, 0, 0, 0],
            f32s(0x3F800000, 0x40000000),
            n_codes=1,
            rows=2,
            rules=[row_rule(2, b"\0\1\1\0")],
            behind=b"\1\0\1\1" + tables(2),
        ),
    ),
    "map-zero-code": one(
        "Q4", mapped(f32s(0, 0x3F800000), [0, 1], INFINITY + ONE, n_codes=2, flags=1, behind=b"\0")
    ),
    "map-escape": one(
        "F5 Q7 E4",
        mapped(INFINITY + ONE, [1, 0], ONE + INFINITY, n_codes=2, flags=2, exact=escaped(INFINITY)),
    ),
    "map-escape-unused": one("E4", mapped(ONE, [0], ONE * 2, n_codes=2, flags=2, exact=((STORED, b""),) * 4)),
    "map-escape-is-the-only-code": one(
        "Q3", mapped(INFINITY * 2, [0, 0], INFINITY, n_codes=1, flags=2, exact=escaped(INFINITY))
    ),
    "map-zero-code-is-the-escape-code": one("Q4", quantized(flags=3, zero=b"\0", streams=escaped(ONE))),
    "map-infinite-entry-unused": one("Q7", quantized(ONE + INFINITY)),
    "map-nan-of-the-escape-code": one(
        "Q7", mapped(ONE, [0], f32s(0x7FFFFFFF), n_codes=1, flags=2, exact=escaped(ONE))
    ),
    "map-outer-linear": one(
        "Q8",
        mapped(
            f32s(0x40400000, 0xC0000000),
            [0, 0],
            f32s(0),
            n_codes=1,
            predictor=2,
            behind=vectors(f32s(0x3FC00000, 0xBF800000), f32s(0x40000000)),
        ),
    ),
    "map-outer-by-all-coders": one("E1 E2 E3 Q8 Q9", outer_by_all_coders()),
    "map-outer-of-a-scalar": one(
        "Q8",
        Frame(
            plan(
                dtype="F32",
                domain=2,
                predictor=2,
                shape=(),
                tail=b"\0\1\1" + f32s(1) + vectors(f32s(0x3FC00000), f32s(0x40000000)),
            ),
            [(CONSTANT, b"\0")],
            f32s(0x40400001),
            "F32",
            (),
        ),
    ),
    "map-outer-of-nothing": one(
        "Q8",
        Frame(
            plan(
                dtype="F32", domain=1, predictor=2, shape=(0, 2), tail=b"\0\1\1" + ONE + vectors(b"", ONE * 2)
            ),
            (),
            b"",
            "F32",
            (0, 2),
            0,
        ),
    ),
    # 0.5 * [-2, 127] * [1, 0, -128] + 2 * [3, 1] * [0, 1, 2]
    "map-low-rank-linear": low(
        "Q9 Q10 Q11 C20 F4",
        f32s(0xBF800000, 0x40C00000, 0x430C0000, 0x42810000, 0x40000000, 0xC5FDE000),
        (2, 3),
        terms(f32s(0x3F000000), f32s(0x40000000), codes=bytes((254, 127, 1, 0, 128, 3, 1, 0, 1, 2))),
        f32s(0, 0x3F800000),
        [(STORED, b"\0\0\0\1\0\0")],
    ),
    # 2^24 + 1 - 2^24
    "map-low-rank-in-order": low(
        "Q7", f32s(0), (), terms(f32s(0x4B800000), f32s(0x3F800000), f32s(0xCB800000), codes=bytes((1,) * 6))
    ),
    "map-low-rank-rounds-twice": low(
        "Q7", f32s(0x3F666667, 0x402CCCCD), (1, 2, 1), terms(f32s(0x3DCCCCCD), codes=bytes((3, 3, 9)))
    ),
    "map-low-rank-not-fused": low(
        "Q7", f32s(0), (), terms(f32s(0xC0066667), f32s(0x3DCCCCCD), codes=bytes((1, 1, 3, 7)))
    ),
    "map-low-rank-subnormal": low(
        "Q7 Q11",
        f32s(0x80000001, 0x71800000),
        (2,),
        terms(f32s(1), f32s(0x71800000), codes=bytes((255, 3, 1, 0, 1, 1))),
    ),
    "map-low-rank-bits": low(
        "Q7 E1 E3",
        u16s(0x3F82, 0x3F85, 0x3F85, 0x3F82),
        (2, 2),
        terms(f32s(0x3F818000), codes=b"\1", coder=CONSTANT),
        u16s(0, 3),
        [(STORED, b"\0\1\1\0")],
        "BF16",
        domain=2,
    ),
    "map-low-rank-of-nothing": low("Q9 Q10 Q11", b"", (0, 2), terms(f32s(0x3F800000), codes=bytes(2))),
    # what flush-to-zero, fused arithmetic, another rounding or another cast would get wrong
    "float-fused": one("Q5", expanded(f32s(0), 1 + 2.0**-30, 1 - 2.0**-30, -1.0)),
    "float-subnormal-entry": one("Q5", expanded(f32s(1), 1e-30, 1e-15, 0.0)),
    "float-subnormal-product": one(
        "Q5",
        mapped(
            f32s(0x3F800000, 0x3F800000),
            [0, 1],
            struct.pack("<4d", 2.0**-600, 2.0**-430, 0.0, 1.0),
            n_codes=2,
            kind=1,
        ),
    ),
    "float-product-underflow": one(
        "Q8", mapped(f32s(2), [0], f32s(0), n_codes=1, predictor=2, behind=vectors(f32s(3), f32s(0x3F000000)))
    ),
    "float-cast-bf16": one("Q1 Q7", cast_frame("BF16")),
    "float-cast-f16": one("Q1 Q7", cast_frame("F16")),
}

# --- files --------------------------------------------------------------------------------------

NAMES = ("", "w", "\0", "µ/é", "重み", "a" * 200, "__metadata", "\U0001f9ca")
QUALITY = {
    **{"promise": "quality-drop", "metric": "loss", "max_drop": 0.005, "is_relative": True},
    **{"lower_is_better": True, "exact": 1.5, "measured": 1.501, "is_met": True, "date": "2026-01-01"},
}
EVERYTHING: dict[str, Any] = {
    "metadata": {"format": "pt", "é": ""},
    "step": (1 << 63) - 1,
    "sharding": {
        "shards": [{"file": "a.bin", "tensors": ["w"], "metadata": {}}],
        "index_file": "a.bin.index.json",
        "index_text": '{"weight_map":{"w":"a.bin"},"n":-1.5}',
        "carried": ["b/c.txt"],
    },
    "tree": {"root": {"dict": [["a.bin", {"dict": [["w", {"tensor": "w"}], ["n", -5]]}]]}, "storages": []},
    "quality": [QUALITY, {**QUALITY, "data_digest": "d"}],
}
LEAVES = [
    *(None, True, "é", -((1 << 53) - 1), {"int": "-0x20000000000000"}, {"float": "7ff8000000000001"}),
    *({"bytes": "AP8="}, [], {"tuple": [1]}, {"Size": [2, -3]}, {"dtype": "bfloat16"}),
    {"OrderedDict": [["", 1]], "_metadata": {"dict": []}},
    {"dict": [[{"tuple": [1, "a"]}, 1], [None, 2], [True, 3], [2, 4], [{"dtype": "int8"}, 5]]},
    {"tensor": "w", "strides": [1], "parameter": True},
    {"view": 0, "dtype": "int16", "shape": [2, 1], "strides": [1, 9], "offset": 0},
    {"view": 0, "dtype": "int8", "shape": [2], "strides": [19], "offset": 0},
    {"view": 0, "dtype": "int8", "shape": [0], "strides": [1], "offset": 20},
]
NULLS = dict.fromkeys(("metadata", "base", "inline", "tree", "step", "sharding"))
OFFSETS = {"a": (0, 0), "b": (0, 1), "c": (1, 1)}

FILES: dict[str, Valid] = {
    "file-no-tensors": file("C5 C10 C16", {}),
    "file-names": file("C14 C16 C17 I4", {name: Frame() for name in NAMES}),
    "file-every-field": file("C3 C13 C21", index=EVERYTHING, entry={"lossy": LOSSY}),
    "file-tree": Valid(
        "N1 N2 N4 N5 N6 N7 N8", tree({"dict": [["l", LEAVES]]}, [["s", "t"]], names=("w", "s", "t"))
    ),
    "file-tree-64-levels": Valid("N3", node(nested(62))),
    "file-fields-that-are-null": file("C13", index=NULLS, entry={"lossy": None}),
    "file-empty-metadata": file("C13", index={"metadata": {}}),
    "file-deflated-index": file("C11 C12", packed=b"\1" + packed_text()),
    "file-spaces-behind-the-header": file("C1 C2 C3", text=header_text(File().bytes()) + b" " * 5),
    "file-features-that-nothing-uses": file("C7 C8 C9", features="delta,inline,lossless,maps"),
    "file-of-a-later-minor-version": file("C7", metadata={"ckptz.version": "1.10"}),
    "file-other-promise": file("C13", entry={"lossy": {**LOSSY, "promise": "best effort"}}),
    "file-optional-sections": file("C5 C10 C14", optional={"a": b"anything", "x-b": b""}),
    "file-escaped-json": file("C3 C4", index={"writer": "\U0001f9ca\n\0"}),
    "plain-file": Plain(
        "C4 C5 C17",
        rows={
            "__metadata__": {"format": "pt"},
            **{n: {**PLAIN_ROW, "shape": [e - b], "data_offsets": [b, e]} for n, (b, e) in OFFSETS.items()},
            "huge": {"dtype": "F64", "shape": [1 << 62, 0], "data_offsets": [1, 1]},
        },
        data=b"x",
    ),
}

# --- chains -------------------------------------------------------------------------------------


def based(
    needs: str,
    frame: Frame,
    base_file: File | Plain,
    depth: int = 1,
    name: str = "base.ckptz",
    **more_files: bytes,
) -> Valid:
    """Return a delta of one tensor, and its base in another file."""
    data = next(iter(base_file.files().values()))
    wanted_id = base_file.content_id() if isinstance(base_file, File) else plain_id(base_file)
    reference = {"content_id": wanted_id, "file": name, "depth": depth}
    delta_file = File({"w": frame}, features="delta,lossless,maps", index={"base": reference})
    return Valid(needs, delta_file, {name: data, **more_files})


def plain_id(file: Plain) -> str:
    """Return the content id of a plain file, which is that of a `.ckptz` file with the same tensors."""
    frames = {}
    for name, (dtype, shape, data) in file.tensors().items():
        frames[name] = Frame(decoded=data, dtype=dtype, shape=shape)
    return File(frames).content_id()


def of_base(
    decoded: bytes, patterns: bytes, dtype: str, mode: int, z: bytes, shape: tuple[int, ...]
) -> Valid:
    """Return a delta by a plane mode; `z` are the joined planes."""
    frame = exact(dtype, decoded, shape, z, predictor=1, mode=mode)
    return based("F9 F12 F13 H3 H4 C18 C19", frame, File({"w": exact(dtype, patterns, shape)}))


def over(frame: Frame, base_frame: Frame, needs: str) -> Valid:
    return based(needs, frame, File({"w": base_frame}, features="lossless,maps"))


def classes_of_base(base_codes: int | None) -> Frame:
    """Build a frame whose contexts need codes 7 or 9, in planes of equal bytes."""
    rule = b"\4" + varint(4) if base_codes is not None else b"\1\0"
    n = 4 if base_codes is not None else 256
    return replace(exact("F32", F32, rules=[rule], tail=tables(n) * 4), base_codes=base_codes)


def everything() -> Valid:
    """Return a delta by exclusive or, with contexts by its base's codes and by another tensor of the file."""
    rules = [b"\4" + varint(4), magnitude_rule(b"v")]
    frame = exact("F32", ONE * 4, None, bytes(16), predictor=1, mode=2, rules=rules, tail=tables(1024) * 4)
    frame.base_codes = xxh64(b"\0\1\2\3")
    anchor = File({"w": ONES, "v": base()}, features="lossless,maps")
    reference = {"content_id": anchor.content_id(), "file": "base.ckptz", "depth": 1}
    file = File({"w": frame, "v": base(F32)}, features="delta,lossless,maps", index={"base": reference})
    return Valid("T7 T9 T10 F12", file, {"base.ckptz": anchor.bytes()})


ONES = quantized(ONE * 4, b"\0\1\2\3")
SUBNORMAL = exact("F32", f32s(0x00800000, 1, 0x80000000))
PLAIN_BASE = Plain("", rows={"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, data=bytes(16))


def of_plain(needs: str, metadata: dict[str, str] | None) -> Valid:
    """Return a delta of a plain file with the section `base-metadata`."""
    plain = Plain("", rows={**PLAIN_BASE.rows, "__metadata__": metadata}, data=PLAIN_BASE.data)
    delta_input = based(needs, delta(), plain, name="base.safetensors")
    delta_input.file.optional = {"base-metadata": metadata_section(metadata)}
    return delta_input


MIDDLE = based("", delta(), File({"w": full()}), name="anchor.ckptz")


LONGEST = based("", delta(), File({"w": full()}), name="é" * 124 + ".ckptz" + "x")


def second_step() -> Valid:
    """Return a delta that leads back to zeros, based on a delta."""
    anchor = MIDDLE.beside["anchor.ckptz"]
    frame = exact("F32", bytes(16), stored=F32, predictor=1, mode=2)
    delta_input = based("H1 H3", frame, MIDDLE.file, depth=2, name="middle.ckptz")
    return Valid(delta_input.needs, delta_input.file, {**delta_input.beside, "anchor.ckptz": anchor})


CHAIN: dict[str, Valid] = {
    "delta-xor-bf16": of_base(u16s(0x3F81, 0x8000), u16s(0x3F80, 0), "BF16", 2, u16s(1, 0x8000), (2,)),
    "delta-difference-bf16": of_base(u16s(0x3F7F, 1), u16s(0x3F80, 0x8001), "BF16", 3, u16s(1, 6), (2,)),
    "delta-difference-u16": of_base(u16s(1), u16s(0x8001), "U16", 3, u16s(0xFFFF), (1,)),
    "delta-difference-i8": of_base(b"\0", b"\xff", "I8", 3, b"\2", (1,)),
    "delta-difference-f64": of_base(struct.pack("<d", 1.5), struct.pack("<d", 1.5), "F64", 3, bytes(8), (1,)),
    "delta-of-a-plain-file": based("F13 H2 H3", delta(), PLAIN_BASE, name="base.safetensors"),
    "delta-of-a-plain-file-and-its-metadata": of_plain("H5 H6", {"format": "pt", "\U0001f9ca": "", "": "é"}),
    "delta-of-a-plain-file-without-metadata": of_plain("H5 H6", None),
    "delta-by-another-name": Valid("H3", MIDDLE.file, {"renamed.ckptz": MIDDLE.beside["anchor.ckptz"]}),
    "delta-depth-2": second_step(),
    "delta-depth-64": based("H1 H3", delta(), File({"w": full()}), depth=64),
    # Kept under a short name, which any file system takes: the hint of a name is only a hint.
    "delta-file-name-of-255-bytes": Valid(
        "H2", LONGEST.file, {"base.ckptz": next(iter(LONGEST.beside.values()))}
    ),
    "delta-nothing-needed": based("C19", base(F32), File({"w": full()})),
    "delta-classes-by-base-codes": over(classes_of_base(xxh64(b"\0\1\2\3")), ONES, "T9 T10"),
    "delta-classes-without-base-codes": over(classes_of_base(0), base(), "T9 T10"),
    "delta-classes-by-base-magnitude": over(classes_of_base(None), base(F32), "T1 F12"),
    "delta-map-linear": over(
        mapped(
            f32s(0x007FFFFF, 2, 0x80000000),
            [0, 1, 2],
            f32s(0x80000001, 1, 0x80000000),
            n_codes=3,
            predictor=1,
        ),
        SUBNORMAL,
        "Q7",
    ),
    "delta-map-bits": over(
        mapped(
            f32s(0x00800001, 0x80000000, 0x80000001),
            [0, 1, 2],
            f32s(1, 0xFFFFFFFE, 0xFFFFFFFF),
            n_codes=3,
            predictor=1,
            domain=2,
        ),
        SUBNORMAL,
        "Q7",
    ),
    "delta-float-subnormal-entry": over(
        mapped(
            f32s(0x00800000, 1, 0x80000000),
            [0, 0, 0],
            struct.pack("<3d", -1e-200, 1e-110, 0.0),
            n_codes=1,
            kind=1,
            predictor=1,
        ),
        SUBNORMAL,
        "Q5",
    ),
    "delta-float-rounded-twice": over(
        mapped(
            u16s(0x3F80, 0x3F80, 0x3F81),
            [0, 1, 2],
            f32s(0x3B800000, 0x3B800001, 0x3B808000),
            n_codes=3,
            predictor=1,
            dtype="BF16",
        ),
        exact("BF16", u16s(*[0x3F80] * 3)),
        "Q1 Q7",
    ),
    "delta-float-f16-subnormal": over(
        mapped(u16s(2), [0], f32s(0x33000000), n_codes=1, predictor=1, dtype="F16"),
        exact("F16", u16s(1)),
        "Q1 Q7",
    ),
    "delta-classes-by-everything": everything(),
    "inline-one": Valid("C13 C14 C19 C22 C23 C24 F12", inlined()),
    "inline-not-needed": Valid("C19", inlined(top=Frame())),
    "inline-below-the-needed": Valid("C19", inlined({"w": full()}, {"v": full()})),
    "inline-two": Valid("C14 C19 C24", inlined({"w": delta(bytes(16)), "v": full()}, {"w": full()})),
    "delta-of-an-inline-file": based("H3 C22", delta(), inlined(top=delta(bytes(16))), depth=2),
}


# --- groups -------------------------------------------------------------------------------------


def of_group(needs: str, file: File, base_file: File | Plain) -> Valid:
    """Return a delta of the frames of a file, and its base."""
    content_id = base_file.content_id() if isinstance(base_file, File) else plain_id(base_file)
    name = "base.ckptz" if isinstance(base_file, File) else "base.safetensors"
    reference = {"content_id": content_id, "file": name, "depth": 1}
    file = replace(file, features=f"delta,{file.features}", index={"base": reference})
    return Valid(needs, file, {name: next(iter(base_file.files().values()))})


PLAIN_PAIR = Plain(
    "",
    rows={
        "b": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "a": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]},
    },
    data=bytes(16),
)
MOST = Frame(plan(shape=(65_536,)), [(CONSTANT, b"\7")], b"\7" * 65_536, shape=(65_536,))
NAMES_A_MEMBER = exact("U8", b"\1\2\3", rules=[magnitude_rule(b"a")], tail=tables(256))
GROUPS = {
    "group": Valid("C14 C15 C25 C26 C27 C28", grouped(frames_after={"w": Frame()}, order="awb")),
    "group-alone": Valid("C26", grouped(members={"a": ((2, 2), b"\1\2\3\4")})),
    "groups-of-two-dtypes": Valid("C25 C26", two_groups()),
    "group-of-most-patterns": Valid("C26", grouped(MOST, {"a": ((65_536,), b"\7" * 65_536)})),
    "group-with-a-named-member": Valid("C27 T7", grouped(frames_after={"w": NAMES_A_MEMBER})),
    "delta-group": of_group("C25 C26 H4", floats(delta()), floats()),
    "delta-group-of-a-plain-file": of_group("H4", floats(delta()), PLAIN_PAIR),
    "delta-group-by-base-magnitude": of_group("C27 H4", floats(classes_of_base(None)), floats()),
    "delta-of-a-member": of_group(
        "H4 C28", File({"a": exact("F32", F32[:12], predictor=1, mode=2)}), floats()
    ),
}

VALID: dict[str, Valid] = STREAMS | TENSORS | CLASSES | MAPS | FILES | CHAIN | GROUPS
