"""Frames: every part of the decode rule comes back as the specification says, on every backend."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptz.codec.chunk import encode_chunk
from ckptz.codec.lossless import plan_lossless
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.errors import (
    ChecksumError,
    CkptzError,
    CorruptionError,
    FormatError,
    MissingBaseError,
    UnsupportedError,
)
from ckptz.format import context_rules
from ckptz.format import decode as decode_module
from ckptz.format import frame as frame_module
from ckptz.format import frequency as frequency_module
from ckptz.format import streams as streams_module
from ckptz.format import values as values_module
from ckptz.format.dtypes import DTYPES, DType, dtype_of
from ckptz.format.frame import FrameHeader
from ckptz.format.plan import (
    Domain,
    ExplicitTable,
    Plan,
    PlaneMode,
    Predictor,
    QuantizationMap,
    exact_plan,
    planes_plan,
)
from ckptz.format.sources import (
    CHUNK_VALUES,
    PATTERN_TYPES,
    ArraySource,
    ChunkSources,
    SourceOf,
    chunk_bounds,
)
from ckptz.format.streams import CoderId
from tests.support import reference
from tests.support.frame_support import (
    RULE_SETS,
    Case,
    FixedQuantizer,
    build_case,
    cases,
    expected_labels,
    expected_patterns,
    random_patterns,
    random_table,
    round_trip,
)
from tests.support.spec_cases import quantized
from tests.support.spec_files import Frame

DTYPE_ROWS = sorted(DTYPES.values(), key=lambda row: row.id)
# Cases are made with compiled kernels, and the first one may wait for their compilation.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SHAPES = ((), (0,), (1,), (3,), (0, 5), (2, 3, 4), (1, 1, 1), (257,), (64, 130))


@pytest.fixture
def only_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decode with the plain numpy kernels alone."""
    modules = (decode_module, values_module, streams_module, frequency_module, context_rules)
    for module in modules:
        monkeypatch.setattr(module, "cpu", lambda: reference)
    return None


@pytest.fixture
def flushed_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("n", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_map_decodes_by_the_rule(n: int) -> None:
    @given(cases())
    @settings(PATIENT, max_examples=n)
    def check(case: Case) -> None:
        np.testing.assert_array_equal(round_trip(case), expected_patterns(case))

    check()


@pytest.mark.parametrize("names", RULE_SETS, ids=" and ".join)
@pytest.mark.parametrize("predictor", list(Predictor))
@pytest.mark.parametrize("domain", [Domain.LINEAR, Domain.BITS])
def test_backends_agree_on_hand_made_frames(
    domain: Domain, predictor: Predictor, names: list[str], only_reference: None
) -> None:
    for dtype in ("F32", "BF16", "F16"):
        rng = np.random.default_rng(5)
        case = build_case(rng, dtype_of(dtype), (6, 7), domain, predictor, list(names), 42)
        np.testing.assert_array_equal(round_trip(case), expected_patterns(case))


@pytest.mark.parametrize("n", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("predictor", list(Predictor))
def test_frames_decode_alike_where_subnormals_are_flushed(
    predictor: Predictor, n: int, flushed_subnormals: None
) -> None:
    for seed in range(n):
        rng = np.random.default_rng(seed)
        case = build_case(rng, dtype_of("F32"), (40, 30), Domain.LINEAR, predictor, ["row"], 1200)
        np.testing.assert_array_equal(round_trip(case), expected_patterns(case))


@given(cases())
@settings(PATIENT, max_examples=40)
def test_codes_are_read_without_values(case: Case) -> None:
    header, chunks = case.encode()
    codes = case.decode_codes(header, [chunk.payload for chunk in chunks])
    np.testing.assert_array_equal(codes, case.encoding.quantizer.all_codes)
    assert expected_labels(case).max(initial=0) < case.plan.n_contexts


def test_values_and_codes_of_a_base_come_from_one_decoding() -> None:
    # Two would double with every member of a chain.
    rng = np.random.default_rng(0)
    shape = (6, 7)
    case = build_case(rng, dtype_of("F32"), shape, Domain.LINEAR, Predictor.BASE, ["base code"], 42)
    assert case.plan.reads_base_patterns
    assert case.plan.reads_base_codes
    calls = []

    class Base(SourceOf):
        def patterns_and_codes(self, begin: int, end: int) -> Any:
            calls.append((begin, end))
            return self.source.patterns(begin, end), self.source.codes(begin, end)

    header, chunks = case.encode()
    out = np.empty(42, np.uint32)
    sources = ChunkSources(0, 42, Base(case.base), reads_both=True)
    payload = np.frombuffer(bytearray(chunks[0].payload), np.uint8)
    decode_module.decode_chunk(header, 0, payload, sources, out)
    np.testing.assert_array_equal(out, expected_patterns(case))
    assert calls == [(0, 42)]


@given(cases(), st.data())
@settings(PATIENT, max_examples=40)
def test_a_flipped_bit_is_refused_or_harmless(case: Case, data: st.DataObject) -> None:
    header, chunks = case.encode()
    frame = bytearray(header.pack() + b"".join(chunk.payload for chunk in chunks))
    position = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[position // 8] ^= 1 << position % 8
    n_header = len(header.pack())
    try:
        parsed = FrameHeader.parse(bytes(frame[:n_header]))
        restored = case.decode(parsed, [bytes(frame[n_header:])])
    except CkptzError:
        return
    np.testing.assert_array_equal(restored, expected_patterns(case))


def random_source(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> ArraySource:
    """Any bit pattern: NaN payloads, negative zeros and all."""
    rng = np.random.default_rng(seed)
    n_bytes = -(-int(np.prod(shape, dtype=np.int64)) * dtype.bits // 8)
    return ArraySource.from_buffer(dtype, shape, rng.integers(0, 256, n_bytes, np.uint8))


def fits(dtype: DType, shape: tuple[int, ...]) -> bool:
    return int(np.prod(shape, dtype=np.int64)) * dtype.bits % 8 == 0


def lossless_case(source: ArraySource, base: ArraySource | None, plan: Plan | None = None) -> Case:
    encoding = plan_lossless(source, base) if plan is None else TensorPlan(plan)
    return Case(source, encoding, base, source)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape_is_bit_exact(shape: tuple[int, ...]) -> None:
    for dtype in DTYPE_ROWS:
        if not fits(dtype, shape):
            continue  # tensors of less than a byte fill whole bytes
        source, base = random_source(dtype, shape), random_source(dtype, shape, 1)
        np.testing.assert_array_equal(round_trip(lossless_case(source, None)), source.flat)
        for mode in (PlaneMode.XOR, PlaneMode.DIFFERENCE):
            case = lossless_case(source, base, planes_plan(mode))
            np.testing.assert_array_equal(round_trip(case), source.flat)


def test_large_tensors_are_cut_into_chunks() -> None:
    n = 2 * CHUNK_VALUES + 77
    rng = np.random.default_rng(0)
    base_flat = (rng.standard_normal(n) * 0.02).astype(np.float32).view(np.uint32)
    flat = base_flat + rng.integers(0, 50, n).astype(np.uint32)
    source, base = (ArraySource(dtype_of("F32"), (n,), f) for f in (flat, base_flat))
    for case in (lossless_case(source, None), lossless_case(source, base)):
        _, chunks = case.encode()
        assert len(chunks) == 3
        np.testing.assert_array_equal(round_trip(case), flat)
    assert len(b"".join(c.payload for c in chunks)) < 0.4 * 4 * n


def test_unchanged_tensors_cost_nothing() -> None:
    source = random_source(dtype_of("BF16"), (512, 512))
    _, chunks = lossless_case(source, source).encode()
    assert sum(len(chunk.payload) for chunk in chunks) <= 2


def test_each_coder_is_chosen_where_it_is_smallest() -> None:
    rng = np.random.default_rng(0)
    n = 1 << 16
    peaked = rng.choice(4, n, p=[0.7, 0.2, 0.07, 0.03]).astype(np.uint8)
    rare = np.isin(np.arange(16 * n), rng.integers(0, 16 * n, 20)).astype(np.uint8)
    periodic = np.resize(rng.integers(0, 256, 977).astype(np.uint8), n)
    expected = {
        CoderId.CONSTANT: np.full(n, 9, np.uint8),
        CoderId.STORED: rng.integers(0, 256, n).astype(np.uint8),
        CoderId.RANS_OWN: peaked,
        CoderId.SPARSE: rare,
        CoderId.ZSTD: periodic,
    }
    for coder, symbols in expected.items():
        chosen, stream = streams_module.encode_stream(symbols)
        assert chosen is coder
        out = np.empty_like(symbols)
        streams_module.decode_stream(chosen, memoryview(stream), out)
        np.testing.assert_array_equal(out, symbols)


def test_a_wrong_base_is_named_as_such() -> None:
    source, base = random_source(dtype_of("F32"), (300,)), random_source(dtype_of("F32"), (300,), 1)
    case = lossless_case(source, base, planes_plan(PlaneMode.XOR))
    header, chunks = case.encode()
    other = Case(source, case.encoding, random_source(dtype_of("F32"), (300,), 2), source)
    with pytest.raises(MissingBaseError, match="not the checkpoint"):
        other.decode(header, [chunk.payload for chunk in chunks])


def test_changed_streams_and_wrong_records_are_told_apart() -> None:
    source = random_source(dtype_of("F32"), (300,))
    case = lossless_case(source, None)
    header, chunks = case.encode()
    changed = bytearray(chunks[0].payload)
    changed[5] ^= 1
    with pytest.raises(ChecksumError, match="stored bytes were changed"):
        case.decode(header, [bytes(changed)])
    record = header.chunks[0]._replace(decoded=header.chunks[0].decoded ^ 1)
    wrong = FrameHeader(header.dtype, header.shape, header.plan, (record,))
    with pytest.raises(CorruptionError, match="other values than were written"):
        case.decode(wrong, [chunks[0].payload])


@pytest.mark.parametrize("predictor", Predictor)
@pytest.mark.parametrize("domain", [Domain.LINEAR, Domain.BITS])
@pytest.mark.parametrize("dtype", [dtype_of("F32"), dtype_of("BF16")], ids=["F32", "BF16"])
def test_few_patterns_are_decoded_without_the_rest_of_the_map(
    dtype: DType, domain: Domain, predictor: Predictor
) -> None:
    """A header of some kilobytes may stand for a map of a million entries, and for four patterns."""
    rng, (n_rows, n_codes), n = np.random.default_rng(5), (40, 30), 700
    for table in (random_table(rng, domain, (n_rows, n_codes), dtype) for _ in range(6)):
        quant_map = QuantizationMap(table, rng.permutation(n_rows), zero_code=3)
        plan = Plan(quant_map=quant_map, domain=domain, predictor=predictor)
        codes, labels = rng.integers(0, n_codes, n).astype(np.uint8), rng.integers(0, n_rows, n)
        is_outer = predictor in (Predictor.OUTER, Predictor.LOW_RANK)
        kind = reference.F32 if is_outer else values_module.FLOAT_KINDS[dtype.name]
        base = None if predictor is Predictor.ZERO else random_patterns(rng, kind, n)
        few, many = (np.empty(m, PATTERN_TYPES[dtype.pattern_bytes]) for m in (n, 2 * n))
        made = values_module.ValueTable(dtype, plan)
        made.decode(codes, labels, base, few)
        assert "entries" not in vars(made)
        made.decode(np.tile(codes, 2), np.tile(labels, 2), None if base is None else np.tile(base, 2), many)
        assert np.array_equal(np.tile(few, 2), many)


def test_values_that_are_not_finite_must_be_escaped() -> None:
    table = ExplicitTable(np.array([[0x3F800000, 0x7F800000]], np.uint32))
    quant_map = QuantizationMap(table, np.zeros(1, np.int64))
    case = build_case(
        np.random.default_rng(0), dtype_of("F32"), (6, 7), Domain.LINEAR, Predictor.ZERO, [], 42
    )
    plan = Plan(quant_map=quant_map, domain=Domain.LINEAR)
    encoding = TensorPlan(plan, FixedQuantizer(np.ones(42, np.uint8)))
    bad = Case(case.source, encoding, None, case.source)
    header, chunks = bad.encode()
    with pytest.raises(CorruptionError, match="not finite"):
        bad.decode(header, [chunk.payload for chunk in chunks])


def refusing(change: Any) -> None:
    """Parse a small lossless header after `change` of its body, with a right checksum."""
    source = random_source(dtype_of("F32"), (3, 2))
    chunk = encode_chunk(source, TensorPlan(exact_plan(source.dtype)), ChunkSources(0, 6))
    header = FrameHeader(source.dtype, (3, 2), exact_plan(source.dtype), (chunk.record,))
    body = bytearray(header.pack()[4:-8])
    body = change(body) or body
    length = (len(body) + 12).to_bytes(4, "little")
    content = length + bytes(body)
    FrameHeader.parse(content + frame_module.xxh64(content).to_bytes(8, "little"))


def setting(offset: int, value: int) -> Any:
    def change(body: bytearray) -> None:
        body[offset] = value

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (setting(0, 9), UnsupportedError),  # frame version
        (setting(1, 200), UnsupportedError),  # dtype
        (setting(2, 7), UnsupportedError),  # domain
        (setting(3, 7), UnsupportedError),  # predictor
        (setting(3, 1), CorruptionError),  # predictor that the plane mode has no use for
        (setting(4, 0x80), UnsupportedError),  # reserved flags
        (setting(7, 0x01), UnsupportedError),
        (setting(4, 1), CorruptionError),  # flag of a map
        (setting(8, 65), CorruptionError),  # dimensions
        (lambda body: body[:9] + b"\x80\x80\x80\x01" + body[10:], CorruptionError),  # too few records
        (setting(11, 9), UnsupportedError),  # plane mode
        (setting(12, 4), CorruptionError),  # context rules
        (lambda body: body + b"\0", CorruptionError),
        (lambda body: body[:-1], FormatError),
    ],
)
def test_headers_that_contradict_the_specification_are_refused(change: Any, error: type[Exception]) -> None:
    refusing(lambda body: None)
    with pytest.raises(error):
        refusing(change)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (quantized(flags=4), "mask of protected values, which this version of ckptz lacks"),
        (
            quantized(bytes(24), kind=1, n_codes=1, domain=2),
            "expanded table of integers, which this version of ckptz lacks",
        ),
    ],
)
def test_what_no_writer_made_is_refused_by_name(frame: Frame, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        frame.parse()


def test_every_strict_prefix_of_a_header_is_refused() -> None:
    case = build_case(
        np.random.default_rng(3), dtype_of("BF16"), (6, 7), Domain.BITS, Predictor.OUTER, ["row"], 42
    )
    packed = case.encode()[0].pack()
    for n in range(len(packed)):
        with pytest.raises(FormatError):
            FrameHeader.parse(packed[:n])
    assert list(chunk_bounds(0)) == []
