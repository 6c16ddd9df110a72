"""Hand-made frames: random plans with every part of the decode rule, and the expected patterns."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ckptz.codec.chunk import EncodedChunk, encode_chunk
from ckptz.codec.quantizer import Quantizer
from ckptz.codec.tensor_plan import ContextCounts, TensorPlan, stream_tables
from ckptz.format.context_rules import BaseCode, Block, ContextRule, Magnitude, Row, n_contexts_of
from ckptz.format.decode import decode_chunk
from ckptz.format.dtypes import DType, dtype_of
from ckptz.format.frame import FrameHeader, header_bytes, pack_plan
from ckptz.format.plan import (
    AnyOuter,
    AnyTable,
    Domain,
    ExplicitTable,
    LinearTable,
    LowRank,
    Outer,
    Plan,
    Predictor,
    QuantizationMap,
    StreamTables,
)
from ckptz.format.sources import PATTERN_TYPES, ArraySource, ChunkSources, TensorSource, chunk_bounds
from ckptz.format.streams import Embedded
from ckptz.format.values import FLOAT_KINDS
from tests.support import reference

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CodedSource(TensorSource):
    """A base with stored codes, like a frame of an earlier checkpoint."""

    dtype: DType
    shape: tuple[int, ...]
    flat: Array
    all_codes: Array

    def patterns(self, begin: int, end: int) -> Array:
        return self.flat[begin:end]

    @property
    def n_codes(self) -> int:
        return 5

    def codes(self, begin: int, end: int) -> Array:
        return self.all_codes[begin:end]


@dataclass(frozen=True)
class FixedQuantizer(Quantizer):
    """A quantizer that returns given codes instead of fitting them."""

    all_codes: Array

    def codes(self, begin: int, end: int, patterns: Array) -> Array:
        return self.all_codes[begin:end]

    def kept(self, begin: int, patterns: Array) -> Array:
        return patterns


@dataclass(frozen=True)
class Case:
    """A tensor, its plan, its base and the tensor for its contexts."""

    source: ArraySource
    encoding: TensorPlan
    base: TensorSource | None
    context_tensor: TensorSource

    @property
    def plan(self) -> Plan:
        return self.encoding.plan

    def sources(self, begin: int, end: int) -> ChunkSources:
        contexts = dict.fromkeys(self.plan.context_tensor_names, self.context_tensor)
        return ChunkSources(begin, end, self.base, contexts)

    def encode(self) -> tuple[FrameHeader, list[EncodedChunk]]:
        n = self.source.dtype.n_patterns(self.source.shape)
        chunks = [encode_chunk(self.source, self.encoding, self.sources(*b)) for b in chunk_bounds(n)]
        records = tuple(chunk.record for chunk in chunks)
        return FrameHeader(self.source.dtype, self.source.shape, self.plan, records), chunks

    def decode(self, header: FrameHeader, payloads: list[bytes]) -> Array:
        n = header.n_patterns
        out = np.empty(n, self.source.flat.dtype)
        for i, (begin, end) in enumerate(chunk_bounds(n)):
            payload = np.frombuffer(payloads[i], np.uint8).copy()
            decode_chunk(header, i, payload, self.sources(begin, end), out[begin:end])
        return out


def round_trip(case: Case) -> Array:
    """Encode a case, pack and parse its header, and return the decoded patterns [n]."""
    header, chunks = case.encode()
    packed = header.pack()
    plan = pack_plan(header.dtype, header.shape, case.plan)
    assert len(packed) == header_bytes(header.dtype, header.shape, case.plan, plan)
    return case.decode(FrameHeader.parse(packed), [chunk.payload for chunk in chunks])


def expected_patterns(case: Case) -> Array:
    """Decode by the definition, element by element in plain Python and numpy, without the codec: [n]."""
    plan, quant_map = case.plan, case.plan.quant_map
    kind, n = FLOAT_KINDS[case.source.dtype.name], len(case.source.flat)
    quantizer = case.encoding.quantizer
    table = quant_map.table.expand()
    rows = quant_map.row_of_context[expected_labels(case)]
    out = np.empty_like(case.source.flat)
    width = 8 * out.itemsize
    for i in range(n):
        entry = table[rows[i], quantizer.all_codes[i]]
        f32_pattern = _prediction(case, i, kind)
        if plan.domain is Domain.LINEAR:
            total = reference.widen_f64(np.array([f32_pattern], np.uint32)) + reference.widen_f64(
                np.array([entry], np.uint32)
            )
            out[i] = reference.from_f32(reference.round_f64(total), kind)[0]
        else:
            pattern = reference.from_f32(np.array([f32_pattern], np.uint32), kind)
            total_int = (int(reference.order(pattern)[0]) + int(entry)) % (1 << width)
            out[i] = reference.unorder(np.array([total_int], out.dtype))[0]
    if quant_map.zero_code is not None:
        out[quantizer.all_codes == quant_map.zero_code] = 0
    if quant_map.escape_code is not None:
        escaped = quantizer.all_codes == quant_map.escape_code
        out[escaped] = case.source.flat[escaped]
    return out


def _prediction(case: Case, i: int, kind: int) -> int:
    """Return the F32 pattern of the prediction of element i."""
    if case.plan.predictor is Predictor.BASE:
        return int(reference.to_f32(case.base.patterns(i, i + 1), kind)[0])
    if isinstance(case.plan.outer, LowRank):
        return _sum_of_terms(case.plan.outer, i)
    if case.plan.outer is not None:
        n_columns = len(case.plan.outer.columns)
        a = reference.widen_f64(case.plan.outer.rows[i // n_columns : i // n_columns + 1])
        b = reference.widen_f64(case.plan.outer.columns[i % n_columns : i % n_columns + 1])
        return int(reference.round_f64(a * b)[0])
    return 0


def _sum_of_terms(outer: LowRank, i: int) -> int:
    """Return the F32 pattern of element i.

    In double, each product is exact and each sum is rounded to the same F32 value.
    """
    levels = outer.stored.codes(outer.n_elements).view(np.int8).reshape(len(outer.scales), -1)
    total = np.zeros(1, np.uint32)
    for scale, term in zip(outer.scales, levels, strict=True):
        indices = i // outer.n_columns, outer.n_rows + i % outer.n_columns
        a, b = (term[[at]].astype(np.float64) for at in indices)
        row = reference.round_f64(reference.widen_f64(scale[None]) * a)
        product = reference.round_f64(reference.widen_f64(row) * b)
        total = reference.round_f64(reference.widen_f64(total) + reference.widen_f64(product))
    return int(total[0])


def expected_labels(case: Case) -> Array:
    """Compute the contexts by the text of the rules, element by element: [n]."""
    n = len(case.source.flat)
    row_patterns = max(n // case.source.shape[0], 1)
    labels = np.zeros(n, np.int64)
    for rule in case.plan.rules:
        labels = labels * rule.radix + [_label(case, rule, i, row_patterns) for i in range(n)]
    return labels


def _label(case: Case, rule: ContextRule, i: int, row_patterns: int) -> int:
    if isinstance(rule, Row):
        return int(rule.indices[i // row_patterns])
    if isinstance(rule, Block):
        return int(rule.indices[i // rule.size])
    if isinstance(rule, BaseCode):
        codes = None if case.base is None else case.base.codes(i, i + 1)
        return 0 if codes is None else int(codes[0])
    source = case.context_tensor if rule.source else case.base
    pattern = source.patterns(i, i + 1)
    return int(pattern[0]) >> (8 * pattern.itemsize - 9) & 0xFF


# --- strategies ---------------------------------------------------------------------------------


def random_patterns(rng: np.random.Generator, kind: int, n: int) -> Array:
    """Draw finite patterns of ordinary, tiny and zero values [n]."""
    values = rng.standard_normal(n) * 10.0 ** rng.choice([-42, -39, -20, -3, 0], n)
    f32_patterns = reference.round_f64(np.where(rng.random(n) < 0.1, 0.0, values))
    return reference.from_f32(f32_patterns, kind)


def random_table(rng: np.random.Generator, domain: Domain, shape: tuple[int, int], dtype: DType) -> AnyTable:
    n_rows, n_codes = shape
    if domain is Domain.LINEAR and rng.random() < 0.5:
        values = rng.standard_normal(shape) * 10.0 ** rng.choice([-41, -3, 0], shape)
        return ExplicitTable(reference.round_f64(values.reshape(-1)).reshape(shape))
    if domain is Domain.LINEAR:
        scale, offset = rng.standard_normal(n_rows) * 1e-3, rng.standard_normal(n_rows) * 1e-4
        return LinearTable(scale, np.arange(n_codes) - n_codes / 2.0, offset)
    return ExplicitTable(rng.integers(-9, 100, shape).astype(PATTERN_TYPES[dtype.pattern_bytes]))


def _rules(
    rng: np.random.Generator, names: list[str], n: int, shape: tuple[int, ...]
) -> tuple[ContextRule, ...]:
    rules: list[ContextRule] = []
    for name in names:
        radix = int(rng.integers(1, 4))
        if name == "row":
            rules.append(Row(radix, rng.integers(0, radix, shape[0]).astype(np.uint8)))
        elif name == "block":
            size = int(rng.integers(1, n + 3))
            rules.append(Block(radix, size, rng.integers(0, radix, -(-n // size)).astype(np.uint8)))
        elif name == "base code":
            rules.append(BaseCode(5))
        else:
            rules.append(Magnitude("context tensor" if name == "magnitude of context tensor" else None))
    return tuple(rules)


RULE_SETS = (
    [],
    ["row"],
    ["block"],
    ["base code"],
    ["magnitude of base"],
    ["magnitude of context tensor"],
    ["row", "base code"],
    ["block", "row", "base code"],
    ["row", "magnitude of context tensor"],
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any combination of domain, predictor, contexts, tables, escape and zero code."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = dtype_of(draw(st.sampled_from(["F32", "BF16", "F16"])))
    shape = draw(st.sampled_from([(1,), (7,), (5, 9), (3, 4, 11), (40, 30)]))
    domain = draw(st.sampled_from([Domain.LINEAR, Domain.BITS]))
    predictor = draw(st.sampled_from(list(Predictor)))
    names = draw(st.sampled_from(RULE_SETS))
    n = int(np.prod(shape))
    return build_case(rng, dtype, shape, domain, predictor, names, n)


def build_case(
    rng: np.random.Generator,
    dtype: DType,
    shape: tuple[int, ...],
    domain: Domain,
    predictor: Predictor,
    names: list[str],
    n: int,
) -> Case:
    kind = FLOAT_KINDS[dtype.name]
    flat, base_patterns = random_patterns(rng, kind, n), random_patterns(rng, kind, n)
    rules = _rules(rng, names, n, shape)
    n_contexts, n_codes, n_rows = n_contexts_of(rules), int(rng.integers(2, 12)), int(rng.integers(1, 4))
    quant_map = QuantizationMap(
        random_table(rng, domain, (n_rows, n_codes), dtype),
        rng.integers(0, n_rows, n_contexts),
        zero_code=int(rng.integers(0, n_codes)) if rng.random() < 0.3 else None,
        escape_code=n_codes - 1 if rng.random() < 0.5 else None,
    )
    codes = rng.integers(0, n_codes, n).astype(np.uint8)
    outer: AnyOuter | None = None
    sizes = shape[0], n // shape[0]
    if predictor is Predictor.LOW_RANK:
        codes_of_terms = rng.integers(0, 256, 3 * sum(sizes)).astype(np.uint8)
        scales = reference.round_f64(rng.standard_normal(3) * 1e-6)
        outer = LowRank(*sizes, scales, Embedded.of(codes_of_terms))
    if predictor is Predictor.OUTER:
        outer = Outer.of(*(reference.round_f64(rng.standard_normal(size) * 1e-2) for size in sizes))
    has_codes = rng.random() < 0.7
    base: TensorSource = ArraySource(dtype, shape, base_patterns)
    if has_codes:
        base = CodedSource(dtype, shape, base_patterns, rng.integers(0, 5, n).astype(np.uint8))
    context_tensor = ArraySource(dtype, shape, random_patterns(rng, kind, n))
    plan = Plan(quant_map=quant_map, domain=domain, predictor=predictor, outer=outer, rules=rules)
    case = Case(
        ArraySource(dtype, shape, flat), TensorPlan(plan, FixedQuantizer(codes)), base, context_tensor
    )
    # Values that would not be finite must be escaped.
    decoded = expected_patterns(case)
    exponent = decoded.dtype.type((0x7F800000, 0x7F80, 0x7C00)[kind])
    infinite = (decoded & exponent) == exponent
    if quant_map.escape_code is None and infinite.any():
        quant_map = replace(quant_map, escape_code=n_codes - 1)
    codes[infinite] = n_codes - 1
    plan = replace(plan, quant_map=quant_map, tables=_tables(rng, rules, codes, n_contexts))
    return replace(case, encoding=TensorPlan(plan, FixedQuantizer(codes)))


def _tables(
    rng: np.random.Generator, rules: tuple[ContextRule, ...], codes: Array, n_contexts: int
) -> tuple[StreamTables, ...]:
    if not rules:
        return ()
    counts = np.zeros((n_contexts, 256), np.int64)
    np.add.at(counts, (rng.integers(0, n_contexts, 4 * len(codes)), np.resize(codes, 4 * len(codes))), 50)
    counts[:, np.unique(codes)] += 1  # every context has a frequency for every code
    counts_by_context = ContextCounts(np.arange(n_contexts), counts)
    return (stream_tables(counts_by_context, n_contexts, most=3),)
