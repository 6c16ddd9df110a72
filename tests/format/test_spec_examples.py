"""The worked examples of the specification are what the code computes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptz.format.bits import ByteReader, ByteWriter, xxh64
from ckptz.format.context_rules import Block, Products
from ckptz.format.dtypes import dtype_of
from ckptz.format.frequency import parse_table
from ckptz.format.index import content_id_of
from ckptz.format.plan import (
    Domain,
    ExplicitTable,
    LinearTable,
    LowRank,
    Plan,
    PlaneMode,
    Predictor,
    QuantizationMap,
    kernel_mode,
)
from ckptz.format.sources import PATTERN_TYPES, ArraySource, ChunkSources
from ckptz.format.streams import CoderId, Embedded, decode_stream
from ckptz.format.values import FLOAT_KINDS, ValueTable
from ckptz.kernels import cpu
from tests.support import reference
from tests.support.second_decoder import frames
from tests.support.spec_files import embedded
from tests.support.spec_support import SPEC, hex_bytes, numbers, table
from tests.support.spec_valid import by_huffman

Array = np.ndarray[Any, Any]
BACKENDS = [pytest.param(lambda: reference, id="reference"), pytest.param(cpu, id="cpu")]


# --- 01 integers --------------------------------------------------------------------------------


def _written(write: Callable[[ByteWriter], None]) -> bytes:
    out = ByteWriter()
    write(out)
    return out.getvalue()


def test_integer_examples() -> None:
    for row in table("01-integers.md", "fixed", "u32"):
        assert _written(lambda out, row=row: out.u32(int(row["u32"]))) == hex_bytes(row["bytes"])
    for row in table("01-integers.md", "varint", "varint"):
        assert _written(lambda out, row=row: out.varint(int(row["varint"]))) == hex_bytes(row["bytes"])
        assert ByteReader(hex_bytes(row["bytes"])).varint("") == int(row["varint"])
    for row in table("01-integers.md", "text", "text"):
        text = "" if row["text"] == "(empty)" else row["text"]
        assert _written(lambda out, text=text: out.text(text)) == hex_bytes(row["bytes"])


def test_zigzag_and_packing_examples() -> None:
    for row in table("01-integers.md", "zigzag", "zigzag"):
        d = np.array([int(row["d, w = 16"], 0)], np.uint16)
        planes = reference.split_planes(d, d * 0, reference.DIFFERENCE)
        assert planes.T.tobytes() == int(row["zigzag"], 0).to_bytes(2, "little")
    for row in table("01-integers.md", "packed-bits", "codes"):
        packed = reference.pack_codes(np.array(numbers(row["codes"]), np.uint8), int(row["bits each"]))
        assert packed.tobytes() == hex_bytes(row["bytes"])


def test_exp_golomb_examples() -> None:
    for row in table("01-integers.md", "exp-golomb", "bits, in their order"):
        bits = numbers(row["bits, in their order"])
        packed = reference.golomb_pack(np.array([int(row["value"])], np.uint16), int(row["order"]))
        assert packed.tobytes() == np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()
        n_bits = (int(row["value"]) + (1 << int(row["order"]))).bit_length()
        assert len(bits) == (n_bits - 1 - int(row["order"])) + 1 + (n_bits - 1)
    for row in table("01-integers.md", "exp-golomb", "values"):
        values = np.array(numbers(row["values"]), np.uint16)
        assert reference.golomb_pack(values, int(row["order"])).tobytes() == hex_bytes(row["bytes"])


def test_xxh64_examples_and_constants() -> None:
    """Also compare the second decoder, which follows the page, on inputs of about 32 and 64 bytes."""
    constants = [int(row["value"], 16) for row in table("01-integers.md", "xxh64", "constant")]
    assert constants == [frames.P1, frames.P2, frames.P3, frames.P4, frames.P5]
    for row in table("01-integers.md", "xxh64", "input"):
        data = hex_bytes(row["input"])
        assert xxh64(data) == frames.xxh64(data) == int(row["checksum"], 16)
    for n in (31, 32, 33, 63, 100):
        assert xxh64(bytes(range(n))) == frames.xxh64(bytes(range(n)))


# --- 02 entropy ---------------------------------------------------------------------------------


def test_sparse_examples() -> None:
    for row in table("02-entropy.md", "sparse", "common"):
        n, common = int(row["n"]), int(row["common"])
        gaps, values = (bytes(numbers(row[name])) for name in ("gaps", "values"))
        out = ByteWriter()
        out.u8(common)
        for part in (gaps, values):
            out.varint(len(part))
            out.raw(embedded(part))
        codes = np.empty(n, np.uint8)
        decode_stream(CoderId.SPARSE, memoryview(out.getvalue()), codes)
        assert codes.tolist() == _codes_of_text(row["decodes to"])


def _codes_of_text(text: str) -> list[int]:
    """Parse a list of codes such as `7 7 9` or `296 times 0, 5`."""
    if "," not in text:
        return numbers(text)
    parts = [part.split(" times ") for part in text.split(", ")]
    return [int(part[-1]) for part in parts for _ in range(int(part[0]) if len(part) == 2 else 1)]


def _worked(anchor: str) -> dict[str, str]:
    """Return a worked example: the other column of its table, by the column `what`."""
    return {
        row["what"]: next(v for k, v in row.items() if k != "what")
        for row in table("02-entropy.md", anchor, "what")
    }


def test_the_worked_stream_decodes_to_its_codes() -> None:
    worked = _worked("worked-example")
    out = np.empty(len(numbers(worked["codes"])), np.uint8)
    decode_stream(CoderId.RANS_OWN, memoryview(hex_bytes(worked["stream"])), out)
    assert out.tolist() == numbers(worked["codes"])


def test_the_worked_frequency_table_is_that_of_the_stream() -> None:
    source = ByteReader(hex_bytes(_worked("worked-example")["stream"]))
    frequencies = parse_table(source).astype(np.int64)
    rows = table("02-entropy.md", "worked-example", "f(s)")
    assert [int(row["f(s)"]) for row in rows] == frequencies[frequencies > 0].tolist()
    starts = np.cumsum(frequencies) - frequencies
    assert [int(row["start(s)"]) for row in rows] == [int(starts[int(row["s"])]) for row in rows]
    written = table("02-entropy.md", "worked-example", "code", "bits")
    assert [int(row["value"]) for row in written] == [int(row["f(s)"]) for row in rows[:-1]]
    bits = [bit for row in written for bit in numbers(row["bits"])]
    packed = np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()
    assert packed == hex_bytes(_worked("worked-example")["stream"])[3 : source.offset]


def test_the_worked_steps_follow_from_the_stream() -> None:
    stream = hex_bytes(_worked("worked-example")["stream"])
    source = ByteReader(stream)
    frequencies = [int(f) for f in parse_table(source)]
    assert source.u8("lane index") == 0
    state, rows = source.u32("state"), table("02-entropy.md", "worked-example", "i", "slot")
    assert f"`{stream[-6:-2].hex(' ')}` = {state}" in (SPEC / "02-entropy.md").read_text()
    for i, row in enumerate(rows):
        slot = state % 4096
        code = next(s for s in range(256) if sum(frequencies[: s + 1]) > slot)
        after = frequencies[code] * (state // 4096) + slot - sum(frequencies[:code])
        word = None if after >= 1 << 16 else int.from_bytes(source.take(2, "word"), "little")
        next_state = after if word is None else after << 16 | word
        cells = [int(cell) if cell else None for cell in row.values()]
        assert cells == [i, state, slot, code, after, word, next_state]
        state = next_state
    assert (state, source.left) == (1 << 16, 0)


def test_the_worked_huffman_stream_follows_from_its_codes() -> None:
    worked = _worked("example-of-a-huffman-stream")
    codes, stream = np.array(numbers(worked["codes"]), np.uint8), hex_bytes(worked["stream"])
    out = np.empty_like(codes)
    decode_stream(CoderId.HUFFMAN, memoryview(stream), out)
    assert out.tolist() == codes.tolist()
    words = {row["s"]: row["code word"] for row in table("02-entropy.md", "example-of-a-huffman-stream", "s")}
    lengths = {int(s): len(numbers(word)) for s, word in words.items()}
    assert by_huffman(lengths, codes.tolist()) == stream
    rows = table("02-entropy.md", "example-of-a-huffman-stream", "part")
    for row, byte in zip(rows, stream[-4:], strict=True):
        assert row["code words"] == ", ".join(words[str(code)] for code in numbers(row["its codes"]))
        bits = numbers(row["code words"].replace(",", ""))
        packed = np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()
        assert packed == bytes((byte,)) == hex_bytes(row["byte"])
    assert ", ".join(worked["codes"].split()) == ", ".join(" ".join(r["its codes"] for r in rows).split())


def test_the_stream_order_example() -> None:
    worked = _worked("example-of-the-stream-order")
    codes, labels = (
        np.array(numbers(worked[k]), np.uint8) for k in ("codes, in the order of their patterns", "contexts")
    )
    grouped = numbers(worked["stream order"])
    assert reference.group(codes, labels, np.array([len(codes)])).tolist() == grouped
    out = np.empty_like(codes)
    reference.ungroup(np.array(grouped, np.uint8), labels, None, out)
    assert out.tolist() == codes.tolist()


# --- 03 transforms ------------------------------------------------------------------------------


def _pattern(text: str, n_bytes: int) -> Array:
    return np.array([int(text, 0) if text else 0], PATTERN_TYPES[n_bytes])


def test_order_examples() -> None:
    for row in table("03-transforms.md", "order", "order"):
        pattern, ordered = (_pattern(cell, 2) for cell in row.values())
        assert reference.order(pattern) == ordered
        assert reference.unorder(ordered) == pattern


@pytest.mark.parametrize("backend", BACKENDS)
def test_plane_examples(backend: Callable[[], Any]) -> None:
    for row in table("03-transforms.md", "planes", "dtype", "z"):
        dtype, mode = dtype_of(row["dtype"]), PlaneMode[row["mode"].upper()]
        pattern, base, z = (_pattern(row[name], dtype.pattern_bytes) for name in ("pattern", "base", "z"))
        planes = backend().split_planes(pattern, base, kernel_mode(mode, dtype))
        assert planes.T.tobytes() == z.tobytes(), row
        out = np.empty_like(pattern)
        backend().merge_planes(list(planes), base, kernel_mode(mode, dtype), out)
        assert out == pattern, row


def test_context_examples() -> None:
    for row in table("03-transforms.md", "contexts", "radices"):
        rules = tuple(
            Block(radix, 1, np.array([label], np.uint8))
            for radix, label in zip(numbers(row["radices"]), numbers(row["labels"]), strict=True)
        )
        assert ChunkSources(0, 1).labels(rules, 1).tolist() == [int(row["context"])]


def test_context_product_examples() -> None:
    for row in table("03-transforms.md", "contexts", "shift"):
        rows, columns = (
            np.array([[level] for level in numbers(row[f"levels of the {which}"].replace(",", ""))], np.int8)
            for which in ("row", "column")
        )
        assert (rows.astype(int) * columns).sum() == int(row["s"])
        rule = Products(int(row["shift"]), 1, np.concatenate((rows, columns), axis=1))
        assert ChunkSources(0, 1).labels((rule,), 1).tolist() == [int(row["label"])]


# --- 04 quantization ----------------------------------------------------------------------------


def _patterns(rows: list[dict[str, str]], column: str) -> Array:
    return np.array([int(row[column], 0) for row in rows], np.uint32)


def test_entry_examples() -> None:
    for row in table("04-quantization.md", "entries", "entry"):
        scale, level, offset = (np.array([float(x)]) for x in row["scale, level, offset"].split(", "))
        assert LinearTable(scale, level, offset).expand()[0, 0] == int(row["entry"], 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_addition_examples(backend: Callable[[], Any]) -> None:
    rows = table("04-quantization.md", "addition", "add")
    a, b, total = (_patterns(rows, column) for column in ("a", "b", "add"))
    assert backend().add_f32(a, b).tolist() == total.tolist() == backend().add_f32(b, a).tolist()


def test_product_examples() -> None:
    for row in table("04-quantization.md", "product", "product"):
        a, b = (np.array([int(row[name], 16)], np.uint32) for name in "ab")
        assert reference.outer_product(a, b, 0, 1)[0] == int(row["product"], 16)


def test_low_rank_examples() -> None:
    for row in table("04-quantization.md", "low-rank", "P"):
        scales, rows, columns = ([*map(str.strip, row[name].split(","))] for name in list(row)[:3])
        patterns = np.array([int(scale, 16) for scale in scales], np.uint32)
        codes = np.array([[int(a), int(b)] for a, b in zip(rows, columns, strict=True)], np.int8)
        matrix = LowRank(1, 1, patterns, Embedded.of(codes.view(np.uint8).reshape(-1)))
        assert f"{matrix.products(0, 1)[0]:#010x}" == row["P"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_cast_examples(dtype: str, backend: Callable[[], Any]) -> None:
    rows = table("04-quantization.md", "cast", "F32")
    cast = backend().from_f32(_patterns(rows, "F32"), FLOAT_KINDS[dtype])
    assert [f"{u:#06x}" for u in cast] == [row[dtype] for row in rows]
    assert [_cast_of_the_page(int(row["F32"], 16), dtype) for row in rows] == cast.tolist()


def _cast_of_the_page(p: int, dtype: str) -> int:
    """Cast an F32 pattern to BF16 or F16 by the steps of the page."""
    s, m = p >> 16 & 0x8000, p & 0x7FFFFFFF
    if m > 0x7F800000:
        return p >> 16 | 0x40 if dtype == "BF16" else s | 0x7E00
    if dtype == "BF16":
        return (p + 0x7FFF + (p >> 16 & 1)) >> 16
    if m >= 0x477FF000:
        return s | 0x7C00
    if m <= 0x33000000:
        return s
    e, f = m >> 23, m & 0x7FFFFF | 0x800000
    t = 13 if e >= 113 else 126 - e
    q, remainder = f >> t, f % (1 << t)
    q += remainder > 1 << t - 1 or (remainder == 1 << t - 1 and q % 2 == 1)
    return s | q + ((e - 113 << 10) if e >= 113 else 0)


def test_the_casts_of_the_page_are_those_of_the_kernels() -> None:
    """Compare random patterns, and those around the smallest F16 and around infinity."""
    patterns = np.random.default_rng(1).integers(0, 1 << 32, 20_000, np.uint32)
    tiny = np.arange(0x32FFFF00, 0x33000100, dtype=np.uint32)
    huge = np.arange(0x7F7FFFF0, 0x7F800010, dtype=np.uint32)
    for dtype in ("BF16", "F16"):
        for inputs in (patterns, tiny, huge, ~huge):
            expected = reference.from_f32(inputs, FLOAT_KINDS[dtype]).tolist()
            assert [_cast_of_the_page(int(p), dtype) for p in inputs] == expected


@pytest.mark.parametrize(
    "row", table("04-quantization.md", "decoding", "entry"), ids=lambda r: "-".join(r.values())
)
def test_decoding_examples(row: dict[str, str]) -> None:
    dtype, domain = dtype_of(row["dtype"]), Domain[row["domain"].upper()]
    entry_bytes = 4 if domain is Domain.LINEAR else dtype.pattern_bytes
    entries = ExplicitTable(_pattern(row["entry"], entry_bytes).reshape(1, 1))
    quant_map = QuantizationMap(entries, np.zeros(1, np.int64))
    predictor = Predictor.ZERO if row["predictor"] == "zero" else Predictor.BASE
    base = None if predictor is Predictor.ZERO else _pattern(row["predictor"], dtype.pattern_bytes)
    out = np.empty(1, PATTERN_TYPES[dtype.pattern_bytes])
    plan = Plan(quant_map=quant_map, domain=domain, predictor=predictor)
    ValueTable(dtype, plan).decode(np.zeros(1, np.uint8), None, base, out)
    assert out[0] == int(row["pattern"], 16)


# --- 07 chain -----------------------------------------------------------------------------------


def test_content_id_examples() -> None:
    tensors = {"w": ArraySource.from_buffer(dtype_of("F32"), (2,), np.array([1, -2], np.float32))}
    ids = [row["content id"] for row in table("07-chain.md", "content-id", "tensors")]
    assert ids == [content_id_of({}), content_id_of(tensors)]
