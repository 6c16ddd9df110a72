"""Kernels in numba and torch return the bits of the numpy reference, also with subnormals flushed to zero."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptz.codec.tensor_plan import ContextCounts
from ckptz.format.frequency import encoding_tables, normalise, row_cost_bits
from ckptz.kernels import compiled as cpu_kernels
from ckptz.kernels import torch as torch_kernels
from ckptz.kernels.coding_cpu import COUNTED_BY_PAIRS
from tests.support import reference
from tests.support.wire_support import devices, from_torch, to_torch

PATTERN_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)
KINDS = ((reference.F32, np.uint32), (reference.BF16, np.uint16), (reference.F16, np.uint16))

pytestmark = pytest.mark.usefixtures("flush_mode")


def f32_patterns(dtype: Any, min_size: int = 1, max_size: int = 300) -> st.SearchStrategy[Any]:
    """Draw bit patterns with many small numbers, zeros, infinities and NaN."""
    width = 8 * np.dtype(dtype).itemsize
    special = [0, 1, 1 << (width - 1), (1 << width) - 1, (1 << (width - 1)) - 1, 0x7F << max(width - 9, 0)]
    patterns = st.one_of(
        st.integers(0, (1 << width) - 1),
        st.sampled_from([s & ((1 << width) - 1) for s in special]),
        st.integers(0, min(30 << 23, (1 << width) - 1)),
    )
    return hnp.arrays(dtype, st.integers(min_size, max_size), elements=patterns)


def finite(patterns: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any]:
    """Replace patterns of infinities and NaN by pattern 1."""
    exponent = patterns.dtype.type((0x7F800000, 0x7F80, 0x7C00)[kind])
    return np.where((patterns & exponent) == exponent, patterns.dtype.type(1), patterns)


def check_equal(name: str, dtype: Any, *arguments: Any) -> np.ndarray[Any, Any]:
    """Check that a kernel returns the reference's bits on every backend that has it, and return them."""
    expected = getattr(reference, name)(*arguments)
    np.testing.assert_array_equal(getattr(cpu_kernels(), name)(*arguments), expected)
    for device in devices() if hasattr(torch_kernels, name) else ():
        on_device = [to_torch(a, device) if isinstance(a, np.ndarray) else a for a in arguments]
        actual = from_torch(getattr(torch_kernels, name)(*on_device), dtype)
        np.testing.assert_array_equal(actual, expected)
    return expected


def check_equal_into(name: str, out: np.ndarray[Any, Any], *arguments: Any) -> np.ndarray[Any, Any]:
    """Check that a kernel fills `out` with the reference's bits on every backend that has it; return them."""
    expected = np.empty_like(out)
    getattr(reference, name)(*arguments, expected)
    actual = np.empty_like(out)
    getattr(cpu_kernels(), name)(*arguments, actual)
    np.testing.assert_array_equal(actual, expected)
    for device in devices() if hasattr(torch_kernels, name) else ():
        on_device = [to_torch(a, device) if isinstance(a, np.ndarray) else a for a in arguments]
        out_on_device = to_torch(np.zeros_like(out), device)
        getattr(torch_kernels, name)(*on_device, out_on_device)
        np.testing.assert_array_equal(from_torch(out_on_device, out.dtype), expected)
    return expected


@pytest.mark.parametrize("dtype", PATTERN_TYPES)
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_planes_are_split_and_merged_exactly(dtype: Any, data: st.DataObject) -> None:
    patterns = data.draw(f32_patterns(dtype))
    base = data.draw(f32_patterns(dtype, len(patterns), len(patterns)))
    for mode in range(5):
        planes = check_equal("split_planes", np.uint8, patterns, base, mode)
        for kernels in (reference, cpu_kernels()):
            out = np.empty_like(patterns)
            kernels.merge_planes(list(planes), base, mode, out)
            np.testing.assert_array_equal(out, patterns)
        codes = check_equal("transform", dtype, patterns, base, mode)
        for kernels in (reference, cpu_kernels()):
            kernels.restore(codes, base, mode, out)
            np.testing.assert_array_equal(out, patterns)


@pytest.mark.parametrize("dtype", PATTERN_TYPES)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_classes_histograms_and_grouping_agree(dtype: Any, data: st.DataObject) -> None:
    patterns = data.draw(f32_patterns(dtype))
    symbols = data.draw(hnp.arrays(np.uint8, len(patterns)))
    contexts = check_equal("magnitudes", np.uint8, patterns)
    check_equal("histogram", np.int64, symbols)
    counts = check_equal("context_histogram", np.int64, contexts, symbols, 256, 8)
    assert counts.sum() == len(patterns)
    check_equal("context_histogram", np.int64, contexts, symbols & 7, 256, 3)
    ends = np.unique([*data.draw(st.lists(st.integers(1, len(patterns)), max_size=3)), len(patterns)])
    per_context = check_equal("context_counts", np.uint32, contexts, ends, 256)
    np.testing.assert_array_equal(per_context.sum(axis=(0, 2)), counts.sum(axis=1))
    for codes in (symbols, patterns):
        check_equal("group", codes.dtype, codes, contexts, ends, per_context)
        end = np.array([len(patterns)])
        totals = check_equal("context_counts", np.uint32, contexts, end, 256)
        grouped = check_equal("group", codes.dtype, codes, contexts, end, totals)
        np.testing.assert_array_equal(check_equal_into("ungroup", codes, grouped, contexts, totals), codes)


def test_context_counts_do_not_depend_on_the_size_of_the_alphabet() -> None:
    rng = np.random.default_rng(0)
    labels = rng.choice(np.array([3, 4, 9], np.uint8), 3 * 1024 + 1)
    codes = rng.integers(0, 256, len(labels)).astype(np.uint8)
    dense, sparse = ContextCounts.of(labels, codes, 10), ContextCounts.of(labels, codes, 256)
    np.testing.assert_array_equal(dense.contexts, [3, 4, 9])
    np.testing.assert_array_equal(sparse.contexts, dense.contexts)
    np.testing.assert_array_equal(sparse.counts, dense.counts)


@pytest.mark.parametrize("dtype", PATTERN_TYPES)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_order_is_inverted_and_sorts_like_the_values(dtype: Any, data: st.DataObject) -> None:
    patterns = data.draw(f32_patterns(dtype))
    ordered = reference.order(patterns)
    for device in devices():
        ordered_on_device = from_torch(torch_kernels.ordered(to_torch(patterns, device)), np.int64)
        np.testing.assert_array_equal(ordered_on_device, ordered.astype(np.int64))
    np.testing.assert_array_equal(reference.unorder(ordered), patterns)
    if dtype is np.uint32:
        values = reference.widen_f64(finite(patterns, reference.F32))
        ranks = reference.order(finite(patterns, reference.F32))
        assert (np.diff(values[np.argsort(ranks)]) >= 0).all()


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_quantization_agrees(kind: int, dtype: Any, data: st.DataObject) -> None:
    patterns = data.draw(f32_patterns(dtype))
    boundaries = np.unique(reference.order(data.draw(f32_patterns(dtype, 1, 20))))
    region_code = data.draw(hnp.arrays(np.uint8, len(boundaries) + 1))
    check_equal("top_histogram", np.int64, patterns)
    codes = check_equal("region_codes", np.uint8, patterns, boundaries, region_code)
    long_patterns = np.resize(patterns, 1 << 14)  # long enough for the lookup table by bucket
    long_codes = cpu_kernels().region_codes(long_patterns, boundaries, region_code)
    np.testing.assert_array_equal(long_codes[: len(patterns)], codes)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_decoded_values_agree(kind: int, dtype: Any, data: st.DataObject) -> None:
    patterns = finite(data.draw(f32_patterns(dtype)), kind)
    n_rows, n_codes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    codes = data.draw(hnp.arrays(np.uint8, len(patterns), elements=st.integers(0, n_codes - 1)))
    one_row = data.draw(st.booleans())
    rows = data.draw(
        hnp.arrays(np.uint16, 1 if one_row else len(patterns), elements=st.integers(0, n_rows - 1))
    )
    size = n_rows * n_codes
    steps = data.draw(hnp.arrays(dtype, size)).reshape(n_rows, n_codes)
    check_equal_into("lookup", patterns, codes, rows, steps)
    check_equal_into("add_bits", patterns, patterns, codes, rows, steps)
    terms = finite(data.draw(f32_patterns(np.uint32, size, size)), reference.F32).reshape(n_rows, n_codes)
    check_equal_into("add_linear", patterns, patterns, codes, rows, terms, kind)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_casts_agree_and_are_nearest_even(kind: int, dtype: Any, data: st.DataObject) -> None:
    values = data.draw(f32_patterns(np.uint32))
    narrow = check_equal("from_f32", dtype, values, kind)
    # Widening is defined for finite patterns only: others are protected, and sums with them are not used.
    restored = finite(narrow, kind)
    wide = check_equal("to_f32", np.uint32, restored, kind)
    np.testing.assert_array_equal(check_equal("from_f32", dtype, wide, kind), restored)
    kernels = (reference, cpu_kernels())
    assert len({bool(k.all_finite(narrow, kind)) for k in kernels}) == 1
    if kind == reference.BF16:
        exact = finite(values, reference.F32)
        low = exact & np.uint32(0xFFFF0000)
        up = low + np.uint32(0x10000)
        tie_or_above = (exact - low) > 0x8000
        odd_tie = ((exact - low) == 0x8000) & ((exact >> np.uint32(16)) & np.uint32(1) == 1)
        expected = np.where(tie_or_above | odd_tie, up, low) >> np.uint32(16)
        np.testing.assert_array_equal(reference.from_f32(exact, kind), expected)


@pytest.mark.parametrize("n", [1, 7, 1 << 16])
def test_every_f16_widens_to_the_same_pattern_in_arrays_of_any_length(n: int) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    parts = patterns if n == 1 << 16 else patterns[(patterns & 0x7C00) == 0x7C00][:: 64 // n]
    wide = [
        check_equal("to_f32", np.uint32, part, reference.F16)
        for part in np.array_split(parts, len(parts) // n)
    ]
    is_nan = (parts & 0x7FFF) > 0x7C00
    expected = (parts.astype(np.uint32) & 0x8000) << 16 | 0x7F800000 | (parts.astype(np.uint32) & 0x3FF) << 13
    np.testing.assert_array_equal(np.concatenate(wide)[is_nan], expected[is_nan])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_sums_keep_subnormals(data: st.DataObject) -> None:
    a = finite(data.draw(f32_patterns(np.uint32)), reference.F32)
    b = finite(data.draw(f32_patterns(np.uint32, len(a), len(a))), reference.F32)
    sums = check_equal("add_f32", np.uint32, a, b)
    # The sum of two floats of similar size is exact in double precision; integers then round it once.
    exact = reference.widen_f64(a) + reference.widen_f64(b)
    is_exact = np.abs(reference.widen_f64(a)) < 1e-20
    is_exact &= np.abs(reference.widen_f64(b)) < 1e-20
    expected = reference.round_f64(exact)
    both_zero = exact == 0
    np.testing.assert_array_equal(sums[is_exact & ~both_zero], expected[is_exact & ~both_zero])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_outer_products_agree(data: st.DataObject) -> None:
    rows = finite(data.draw(f32_patterns(np.uint32, 1, 12)), reference.F32)
    columns = finite(data.draw(f32_patterns(np.uint32, 1, 12)), reference.F32)
    n = len(rows) * len(columns)
    begin = data.draw(st.integers(0, n - 1))
    check_equal("outer_product", np.uint32, rows, columns, begin, n)


@given(st.integers(1, 8), st.data())
@settings(max_examples=30, deadline=None)
def test_packed_codes_are_unpacked_exactly(n_bits: int, data: st.DataObject) -> None:
    codes = data.draw(hnp.arrays(np.uint8, st.integers(1, 100), elements=st.integers(0, 2**n_bits - 1)))
    packed = check_equal("pack_codes", np.uint8, codes, n_bits)
    assert len(packed) == -(-len(codes) * n_bits // 8)
    np.testing.assert_array_equal(check_equal_into("unpack_codes", codes, packed, n_bits), codes)


def frequency_rows(n_rows: int, n_symbols: int, seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    rows = np.zeros((n_rows, 256), np.uint16)
    for row in rows:
        cuts = np.sort(rng.choice(np.arange(1, 4096), n_symbols - 1, replace=False))
        row[:n_symbols] = np.diff(np.concatenate([[0], cuts, [4096]]))
    return rows


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rans_streams_are_equal_and_decode(data: st.DataObject) -> None:
    n, n_segments = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 4))
    n_lanes, n_symbols = data.draw(st.sampled_from([1, 4, 32])), data.draw(st.integers(1, 40))
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    frequencies = frequency_rows(3, n_symbols, seed)
    symbols = rng.integers(0, n_symbols, n).astype(np.uint8)
    ends = np.unique(np.append(rng.integers(0, n + 1, n_segments - 1), n)).astype(np.int64)
    table_of = rng.integers(0, 3, len(ends))
    if data.draw(st.booleans()):  # make one of the tables a single code
        frequencies[1] = np.where(np.arange(256) == 7, 4096, 0)
        symbols[np.repeat(table_of == 1, np.diff(ends, prepend=0))] = 7
    arguments = ends, table_of, frequencies, n_lanes
    states, words = encode_stream(reference, symbols, *arguments)
    compiled_states, compiled_words = encode_stream(cpu_kernels(), symbols, *arguments)
    np.testing.assert_array_equal(compiled_states, states)
    np.testing.assert_array_equal(compiled_words, words)
    slots = check_equal("slot_tables", np.uint32, frequencies)
    for kernels in (reference, cpu_kernels()):
        out = np.empty_like(symbols)
        assert kernels.rans_decode(words, states, ends, table_of, slots, out)
        np.testing.assert_array_equal(out, symbols)
        if len(words):
            longer = np.append(words, words[:1])
            assert not kernels.rans_decode(longer, states, ends, table_of, slots, out)
            assert not kernels.rans_decode(words[:-1].copy(), states, ends, table_of, slots, out)


@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from([1, 4, 32])), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_streams_encoded_in_a_batch_are_those_encoded_alone(streams: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(len(streams))
    sizes, lanes = np.array(streams).T
    ends, heads = np.cumsum(sizes), [bytes(range(k)) for k in range(len(streams))]
    frequencies = frequency_rows(len(streams), 30, 5)
    symbols = rng.integers(0, 30, ends[-1]).astype(np.uint8)
    for kernels in (reference, cpu_kernels()):
        out, spans = kernels.rans_encode(
            *(symbols, ends - sizes, np.arange(1, len(streams) + 1), ends, np.arange(len(streams))),
            *(encoding_tables(frequencies), lanes, np.frombuffer(b"".join(heads), np.uint8)),
            np.cumsum([len(head) for head in heads]),
        )
        for k, (i, j) in enumerate(spans.tolist()):
            part = symbols[ends[k] - sizes[k] : ends[k]]
            states, words = encode_stream(
                kernels, part, sizes[k : k + 1], np.array([k]), frequencies, int(lanes[k])
            )
            assert out[i:j].tobytes() == heads[k] + states.tobytes() + words.tobytes()


def encode_stream(
    kernels: Any, symbols: Any, ends: Any, table_of: Any, frequencies: Any, n_lanes: int
) -> Any:
    """Encode one stream; return its lane states and words."""
    out, [[begin, end]] = kernels.rans_encode(
        *(symbols, np.zeros(1, np.int64), np.array([len(ends)]), ends, table_of),
        *(encoding_tables(frequencies), np.array([n_lanes]), np.zeros(0, np.uint8), np.zeros(1, np.int64)),
    )
    stream = out[begin:end].copy()
    return stream[: 4 * n_lanes].view(np.uint32), stream[4 * n_lanes :].view(np.uint16)


def skewed(n: int, n_symbols: int, skew: int, seed: int) -> np.ndarray[Any, Any]:
    """Draw `n` symbols with rare ones, at least two different, and gaps in the alphabet."""
    rng = np.random.default_rng(seed)
    shares = rng.random(n_symbols) ** skew
    symbols = rng.choice(rng.permutation(256)[:n_symbols], n, p=shares / shares.sum()).astype(np.uint8)
    symbols[:2] = (3, 200)
    return symbols


@given(
    st.lists(st.integers(2, 3000), min_size=1, max_size=3), st.integers(2, 256), st.integers(1, 40), st.data()
)
@settings(max_examples=60, deadline=None)
def test_huffman_streams_are_equal_and_decode(
    sizes: list[int], n_symbols: int, skew: int, data: st.DataObject
) -> None:
    streams = [skewed(n, n_symbols, skew, seed) for seed, n in enumerate(sizes)]
    ends, counts = np.cumsum(sizes), np.array([np.bincount(s, minlength=256) for s in streams])
    lengths = check_equal("huffman_lengths", np.uint8, counts)
    assert lengths.max() <= 11
    assert ((2.0 ** -lengths.astype(float)).sum(axis=1, where=lengths > 0) == 1).all()
    n_heads, n_bytes = np.arange(len(sizes)), (counts * lengths).sum(axis=1) // 8 + 4
    (expected, spans), (compiled_bytes, compiled_spans) = (
        kernels.huffman_encode(np.concatenate(streams), ends, lengths, n_heads, n_bytes)
        for kernels in (reference, cpu_kernels())
    )
    for k, stream in enumerate(streams):
        assert np.diff(spans[k]).tolist() == np.diff(compiled_spans[k]).tolist()
        parts, cuts = expected[spans[k, 1] : spans[k, -1]], spans[k, 2:] - spans[k, 1]
        np.testing.assert_array_equal(parts, compiled_bytes[compiled_spans[k, 1] : compiled_spans[k, -1]])
        for kernels in (reference, cpu_kernels()):
            out = np.empty_like(stream)
            assert kernels.huffman_decode(parts, cuts, lengths[k], out)
            np.testing.assert_array_equal(out, stream)
    damaged = parts.copy()
    damaged[data.draw(st.integers(0, len(parts) - 1))] ^= data.draw(st.integers(1, 255))
    outs = [np.empty_like(stream) for _ in range(2)]
    is_valid = [
        kernels.huffman_decode(damaged, cuts, lengths[k], out)
        for kernels, out in zip((reference, cpu_kernels()), outs, strict=True)
    ]
    assert is_valid[0] == is_valid[1]
    if is_valid[0]:
        np.testing.assert_array_equal(*outs)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=5))
@settings(max_examples=60, deadline=None)
def test_huffman_codes_are_optimal(counts: list[int]) -> None:
    row = np.zeros((1, 256), np.int64)
    row[0, : len(counts)] = counts
    lengths = reference.huffman_lengths(row)[0]
    assignments = itertools.product(range(1, 6), repeat=len(counts))
    least = min(
        sum(n * length for n, length in zip(counts, lengths, strict=True))
        for lengths in assignments
        if sum(2 ** (5 - length) for length in lengths) <= 32
    )
    assert (row[0] * lengths).sum() == least


@pytest.mark.parametrize("kind", ["skewed", "constant", "even"])
def test_counting_by_pairs_gives_the_same_counts(kind: str) -> None:
    n = COUNTED_BY_PAIRS + 5
    symbols = {
        "skewed": skewed(n, 40, 9, 1),
        "constant": np.full(n, 7, np.uint8),
        "even": np.arange(n, dtype=np.uint8),
    }[kind]
    check_equal("histogram", np.int64, symbols)
    ends = np.array([3, 3, n - 1, n])
    np.testing.assert_array_equal(
        cpu_kernels().count_streams(symbols, ends), reference.count_streams(symbols, ends)
    )


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_frequency_tables_are_normalised_and_packed_exactly(seed: int, n_rows: int) -> None:
    rng = np.random.default_rng(seed)
    counts = np.zeros((n_rows, 256), np.int64)
    for row in counts:
        used = rng.permutation(256)[: rng.integers(1, 257)]
        row[used] = rng.multinomial(10 ** rng.integers(0, 7), rng.dirichlet(np.full(len(used), 0.3)))
        row[used[0]] += 1
    frequencies = check_equal("normalise", np.uint16, counts)
    assert (frequencies.sum(axis=1) == 4096).all()
    assert ((frequencies > 0) == (counts > 0)).all()
    np.testing.assert_array_equal(np.stack([normalise(row) for row in counts]), frequencies)
    bits = row_cost_bits(counts, frequencies)
    assert (bits >= check_equal("entropies", np.float64, counts) - 1e-3 * counts.sum(axis=1)).all()
    (packed, ends), expected = cpu_kernels().pack_tables(frequencies), reference.pack_tables(frequencies)
    np.testing.assert_array_equal(packed, expected[0])
    np.testing.assert_array_equal(ends, expected[1])
    for kernels in (reference, cpu_kernels()):
        out = np.empty_like(frequencies)
        assert kernels.table_unpack(packed, out) == len(packed)
        np.testing.assert_array_equal(out, frequencies)
    # The packed size is the smallest of all orders of the Golomb codes.
    for row, size in zip(frequencies, np.diff(ends, prepend=0), strict=True):
        first, last = np.flatnonzero(row)[[0, -1]]
        assert size == 3 + min(len(reference.golomb_pack(row[first:last], order)) for order in range(12))


def test_equal_counts_get_frequencies_by_a_fixed_rule() -> None:
    rng = np.random.default_rng(0)
    counts = rng.choice([0, 100, 150, 200], (40, 256)) + np.eye(40, 256, dtype=np.int64)
    frequencies = check_equal("normalise", np.uint16, counts)
    assert any(len(np.unique(row[n == 100])) > 1 for row, n in zip(frequencies, counts, strict=True))
    order = reference.ascending(counts.astype(np.float64))
    assert (np.diff(np.take_along_axis(counts, order, axis=1)) >= 0).all()


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_rows_are_merged_while_a_common_table_costs_less(seed: int, n_parts: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rng.choice([0.0, 0.02, 5.0], (12 * n_parts, 1)), (12 * n_parts, 256))
    counts[::12, 0] += 1
    ends = 12 * np.arange(1, n_parts + 1)
    group_of, sums, group_ends = cpu_kernels().merge_rows(counts.copy(), ends, 4, 40.0, 6.0)
    for k in range(n_parts):
        rows = slice(12 * k, 12 * k + 12)
        separate = cpu_kernels().merge_rows(counts[rows].copy(), ends[:1], 4, 40.0, 6.0)
        begin = group_ends[k - 1] if k else 0
        np.testing.assert_array_equal(group_of[rows], separate[0] + begin)
        np.testing.assert_array_equal(sums[begin : group_ends[k]], separate[1])
        assert len(separate[1]) <= 4
    for group, total in enumerate(sums):
        np.testing.assert_array_equal(counts[group_of == group].sum(axis=0), total)


@given(st.integers(1, 3), st.integers(1, 60), st.integers(0, 99), st.binary(max_size=40))
@settings(max_examples=60, deadline=None)
def test_frequency_tables_are_unpacked_the_same(
    n_tables: int, n_symbols: int, seed: int, noise: bytes
) -> None:
    rows, parts = frequency_rows(n_tables, n_symbols, seed), []
    for row in rows:
        first, last = np.flatnonzero(row)[[0, -1]]
        codes = reference.golomb_pack(row[first:last], seed % 12)
        parts += [np.array([first, last, seed % 12], np.uint8), codes]
    packed = np.concatenate(parts)
    for source in (packed, packed[:-1], np.frombuffer(noise, np.uint8)):
        results = []
        for kernels in (reference, cpu_kernels()):
            out = np.full((n_tables, 256), 7, np.uint16)
            results.append((kernels.table_unpack(source, out), out.tolist()))
        assert results[0][0] == results[1][0]
        assert results[0][0] < 0 or results[0] == results[1]
    out = np.empty((n_tables, 256), np.uint16)
    assert cpu_kernels().table_unpack(packed, out) == len(packed)
    np.testing.assert_array_equal(out, rows)


@pytest.mark.parametrize("dtype", PATTERN_TYPES[1:])
@pytest.mark.parametrize("size", [37, 128])
def test_runs_are_labelled_by_their_mean_exponent_and_counted(dtype: Any, size: int) -> None:
    patterns = np.random.default_rng(size).integers(0, 1 << 62, 21 * size, np.uint64).astype(dtype)
    before = np.where(np.arange(21) % 3, 0, 16).astype(np.uint8)
    labels = before.copy()
    counts = cpu_kernels().scale_runs(patterns, size, 4, 500, 16, labels)
    exponents = reference.magnitudes(patterns).reshape(21, size)
    means = (4 * exponents.sum(axis=1, dtype=np.int64) + size // 2) // size
    np.testing.assert_array_equal(labels, before + np.clip(means - 500, 0, 15))
    expected = np.zeros((32, 256), np.int64)
    for label, run in zip(labels, exponents, strict=True):
        expected[label] += np.bincount(run, minlength=256)
    np.testing.assert_array_equal(counts, expected)
