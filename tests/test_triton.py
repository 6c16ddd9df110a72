"""Kernels for GPUs: equal to the reference, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import operator
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptz.bits import xxh64
from ckptz.entropy import streams
from ckptz.entropy.frequency import normalise
from ckptz.kernels import triton_planes as planes
from ckptz.kernels import triton_rans as rans
from ckptz.kernels import triton_values as values
from ckptz.kernels import triton_wire as wire
from ckptz.wire import LinkPolicy, TensorLink, Tiled, TopK, Uniform
from ckptz.wire import link as wire_link
from ckptz.wire.header import Direction
from ckptz.wire.state import Place
from tests.support import reference
from tests.support import wire_reference as ref
from tests.support.compile_kernels import EXACT, MODULES
from tests.support.wire_support import from_torch, to_torch

pytestmark = pytest.mark.apps
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNIT_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


def moved(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def back(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()


def patterns(dtype: Any, min_size: int = 1, max_size: int = 300) -> st.SearchStrategy[Any]:
    """Units with zeros, ones, signs and exponents of all ones among them."""
    width = 8 * np.dtype(dtype).itemsize
    special = [0, 1, 1 << (width - 1), (1 << width) - 1, (1 << (width - 1)) - 1, 0x7F << max(width - 9, 0)]
    units = st.one_of(st.integers(0, (1 << width) - 1), st.sampled_from([s % (1 << width) for s in special]))
    return hnp.arrays(dtype, st.integers(min_size, max_size), elements=units)


@pytest.mark.parametrize("dtype", UNIT_TYPES)
@given(st.data())
@settings(max_examples=8, deadline=None)
def test_planes_split_alike_and_merge_back(dtype: Any, data: st.DataObject) -> None:
    units = data.draw(patterns(dtype))
    base = data.draw(patterns(dtype, len(units), len(units)))
    for mode in range(5):
        expected = reference.split_planes(units, base, mode)
        split = planes.split_planes(moved(units), moved(base), mode)
        np.testing.assert_array_equal(back(split), expected)
        merged = moved(np.zeros_like(units))
        planes.merge_planes(split, moved(base), mode, merged)
        np.testing.assert_array_equal(back(merged), units)


@pytest.mark.parametrize("dtype", UNIT_TYPES)
@given(st.data())
@settings(max_examples=8, deadline=None)
def test_classes_and_histograms_agree(dtype: Any, data: st.DataObject) -> None:
    units = data.draw(patterns(dtype))
    chunk = data.draw(st.integers(1, len(units)))
    classes = reference.magnitude_classes(units)
    np.testing.assert_array_equal(back(planes.magnitude_classes(moved(units))), classes)
    split = reference.split_planes(units, units, 0)
    counts = back(planes.histograms(moved(split), chunk))
    for j, plane in enumerate(split):
        for k, begin in enumerate(range(0, len(units), chunk)):
            np.testing.assert_array_equal(counts[j, k], reference.histogram(plane[begin : begin + chunk]))
    grouped = reference.group(split[0], classes, 256)
    by_class = planes.segment_histograms(moved(grouped)[None], np.bincount(classes, minlength=256).cumsum())
    np.testing.assert_array_equal(back(by_class)[0], reference.class_histogram(classes, split[0], 256))


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_checksums_of_chunks_are_xxh64(data: st.DataObject) -> None:
    units = data.draw(patterns(np.uint8, max_size=400))
    chunk = 8 * data.draw(st.integers(1, 40))
    got = back(planes.xxh64_of_chunks(moved(units), chunk))
    expected = [xxh64(units[begin : begin + chunk].copy()) for begin in range(0, len(units), chunk)]
    assert got.tolist() == expected


# --- values -------------------------------------------------------------------------------------

KINDS = ((reference.F32, np.uint32), (reference.BF16, np.uint16), (reference.F16, np.uint16))


def finite(units: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any]:
    """The same units with infinities and NaN made into the smallest number."""
    exponent = units.dtype.type((0x7F800000, 0x7F80, 0x7C00)[kind])
    return np.where((units & exponent) == exponent, units.dtype.type(1), units)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@given(st.data())
@settings(max_examples=10, deadline=None)
def test_values_are_those_of_the_reference(kind: int, dtype: Any, data: st.DataObject) -> None:
    base = finite(data.draw(patterns(dtype)), kind)
    n = len(base)
    codes = data.draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 4)))
    rows = data.draw(hnp.arrays(st.sampled_from((np.uint8, np.int16)), n, elements=st.integers(0, 2)))
    entries = finite(data.draw(patterns(np.uint32, 15, 15)), reference.F32).reshape(3, 5)
    units = data.draw(patterns(dtype, 15, 15)).reshape(3, 5)
    outer = tuple(finite(data.draw(patterns(np.uint32, 20, 20)), reference.F32) for _ in range(2))
    product = reference.outer_product(*outer, 3, 3 + n)
    narrow = reference.from_f32(product, kind)
    sums = reference.from_f32(reference.add_f32(product, entries[rows, codes]), kind)
    ordered = [reference.unorder(reference.order(u) + units[rows, codes]) for u in (0 * base, base, narrow)]
    linear = np.empty_like(base)
    reference.add_linear(base, codes, rows, entries, kind, linear)
    cases: list[tuple[Any, int, dict[str, Any], Any]] = [
        (units, values.LINEAR, {}, units[rows, codes]),
        (entries, values.LINEAR, {"base": base}, linear),
        (entries, values.LINEAR, {"outer": outer}, sums),
        (units, values.BITS, {}, ordered[0]),
        (units, values.BITS, {"base": base}, ordered[1]),
        (units, values.BITS, {"outer": outer}, ordered[2]),
    ]
    for table, domain, prediction, expected in cases:
        out = moved(np.zeros_like(base))
        there = {
            name: tuple(map(moved, given)) if name == "outer" else moved(given)
            for name, given in prediction.items()
        }
        given = moved(codes), moved(rows), moved(table), kind, domain, out
        values.restore(*given, **there, begin=3)
        np.testing.assert_array_equal(back(out), expected)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_casts_round_ties_to_even_and_keep_subnormals(kind: int, dtype: Any) -> None:
    ties = [0x3F801000, 0x3F803000, 0x3F808000, 0x3F818000, 0x387FE000, 0x33C00000, 0x00000001, 0x80018000]
    edges = [0x33000000, 0x33000001, 0xB3000001, 0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 0x00008000, 0x80000000]
    sums = np.array(ties + edges, np.uint32)
    one, zeros = np.array([0x3F800000], np.uint32), moved(np.zeros(len(sums), np.uint8))
    out = moved(np.zeros(len(sums), dtype))
    outer = moved(sums), moved(one)
    minus_zero = moved(np.array([[0x80000000]], np.uint32))
    values.restore(zeros, None, minus_zero, kind, values.LINEAR, out, outer=outer)
    np.testing.assert_array_equal(back(out), reference.from_f32(sums, kind))


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_codes_of_grids_draw_the_thresholds_of_the_reference(data: st.DataObject) -> None:
    floats = st.floats(-300, 300, width=32) | st.sampled_from((0.0, -0.0, 0.5, 1.5, -2.5, 127.5, 128.0))
    numbers = data.draw(hnp.arrays(np.float32, st.integers(1, 80), elements=floats))
    base = data.draw(st.none() | hnp.arrays(np.float32, len(numbers), elements=floats))
    row_units, begin = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 60))
    steps = data.draw(hnp.arrays(np.float32, 3, elements=st.floats(2.0**-10, 8, width=32)))
    labels = data.draw(hnp.arrays(np.uint8, 150, elements=st.integers(0, 2)))
    key = data.draw(st.just(reference.NEAREST) | st.integers(0, (1 << 32) - 1))
    arguments = numbers, base, steps, labels, row_units, data.draw(st.sampled_from((0.0, 0.2))), key, begin
    there = [moved(a) if isinstance(a, np.ndarray) else a for a in arguments]
    np.testing.assert_array_equal(back(values.residual_codes(*there)), reference.residual_codes(*arguments))


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_sums_of_squares_are_added_up_in_the_order_of_the_host(data: st.DataObject) -> None:
    n, chunk = data.draw(st.integers(1, 3000)), data.draw(st.sampled_from((128, 136, 1000, 1024, 4096)))
    rng = np.random.default_rng(n)
    numbers, other = rng.normal(0, 1, (2, n)).astype(np.float32)
    for base in (None, other):
        wide = numbers.astype(np.float64) - (0 if base is None else base.astype(np.float64))
        expected = [(wide[begin : begin + chunk] ** 2).sum() for begin in range(0, n, chunk)]
        sizes = [min(chunk, n - begin) for begin in range(0, n, chunk)]
        assert values.sums_of_pairs(moved(wide * wide), sizes) == expected
        ends = np.cumsum(sizes)
        runs = [functools.reduce(operator.add, part, 0.0) for part in np.split(wide, ends[:-1])]
        assert back(values.sums_of_runs(moved(wide), moved(ends))).tolist() == runs


@given(st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 33), st.integers(1, 80))
@settings(max_examples=8, deadline=None)
def test_thresholds_are_those_of_the_reference(key: int, begin: int, n: int) -> None:
    drawn = values.thresholds(key, begin, n, torch.device(DEVICE))
    np.testing.assert_array_equal(back(drawn), reference.thresholds(key, begin, n))


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_codes_are_packed_alike_and_come_back(data: st.DataObject) -> None:
    n_bits = data.draw(st.integers(1, 8))
    codes = data.draw(hnp.arrays(np.uint8, st.integers(1, 200), elements=st.integers(0, (1 << n_bits) - 1)))
    packed = values.pack_codes(moved(codes), n_bits)
    np.testing.assert_array_equal(back(packed), reference.pack_codes(codes, n_bits))
    out = moved(np.zeros_like(codes))
    values.unpack_codes(packed, n_bits, out)
    np.testing.assert_array_equal(back(out), codes)


# --- rANS ---------------------------------------------------------------------------------------


@st.composite
def stream(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Codes, the ends of their segments, tables of these, and lanes; every code has a frequency."""
    lanes = draw(st.sampled_from((1, 4, 32)))
    n = draw(st.integers(1, 8 * lanes))
    largest = draw(st.sampled_from((0, 1, 5, 255)))
    codes = draw(hnp.arrays(np.uint8, n, elements=st.integers(0, largest)))
    cuts = draw(st.lists(st.integers(0, n), max_size=6))
    ends = np.array([*sorted(cuts), n], np.int64)
    table_of = draw(hnp.arrays(np.int64, len(ends), elements=st.integers(0, 1)))
    return codes, ends, table_of, lanes


@given(st.lists(stream(), min_size=1, max_size=3))
@settings(max_examples=12, deadline=None)
def test_rans_gives_the_words_of_the_reference_and_decodes_them(drawn: list[Any]) -> None:
    counts = np.bincount(np.concatenate([codes for codes, *_ in drawn]), minlength=256)
    tables = np.stack([normalise(counts), normalise(counts.cumsum() * (counts > 0))])
    n_codes = np.array([len(codes) for codes, *_ in drawn])
    described = rans.Streams(
        np.cumsum(n_codes) - n_codes,
        n_codes,
        np.array([lanes for *_, lanes in drawn]),
        np.array([len(ends) for _, ends, *_ in drawn]),
        np.concatenate([ends for _, ends, *_ in drawn]),
        np.concatenate([table_of for *_, table_of, _ in drawn]),
        tables,
    )
    buffer = moved(np.concatenate([codes for codes, *_ in drawn]))
    words, states, n_words = rans.rans_encode(buffer, described, n_codes)
    lengths, word_at = back(n_words), np.cumsum(n_codes) - back(n_words)
    for b, (codes, ends, table_of, lanes) in enumerate(drawn):
        expected = reference.rans_encode(codes, ends, table_of, tables, lanes)
        np.testing.assert_array_equal(back(states)[b, :lanes], expected[0])
        np.testing.assert_array_equal(back(words)[word_at[b] :][: lengths[b]], expected[1])
    decoded = torch.zeros_like(buffer)
    assert back(rans.rans_decode(words, word_at, lengths, states, described, decoded)).all()
    np.testing.assert_array_equal(back(decoded), back(buffer))


def test_rans_notices_words_that_are_wrong_missing_or_left_over() -> None:
    codes = np.random.default_rng(1).binomial(9, 0.4, 500).astype(np.uint8)
    tables = normalise(np.bincount(codes, minlength=256))[None]
    one = np.ones(1, np.int64)
    described = rans.joined(0 * one, 32 * one, [streams.single(tables[0], 500)])
    words, states, n_words = rans.rans_encode(moved(codes), described, 500 * one)
    n, begin = int(n_words[0]), 500 - int(n_words[0])
    for flip, at, length in ((1, begin, n), (0, begin, n - 1), (0, begin, n + 1), (0, begin, n)):
        given = torch.cat([words.view(torch.int16), words.view(torch.int16)[:1]]).view(torch.uint16)
        given[begin + 7] = int(words[begin + 7]) ^ flip
        got = rans.rans_decode(given, at * one, length * one, states, described, moved(np.zeros_like(codes)))
        assert bool(got[0]) == (not flip and (at, length) == (begin, n))


def test_every_kernel_compiles_for_three_generations_of_gpus() -> None:
    """To machine code, by Triton's own compiler, which needs no GPU; in a process without its interpreter."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.support.compile_kernels"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = {tuple(line.split()[:2]): line for line in done.stdout.splitlines()}
    launched = {name for module in MODULES for name in kernels_launched(module)}
    assert set(compiled) == {(name, target) for name in launched for target in ("sm_80", "sm_90", "sm_100")}
    # What makes a step of the coder short: one vote and one bit count in place of a scan of the warp.
    for name, target in itertools.product(("_encode", "_decode"), ("sm_80", "sm_90", "sm_100")):
        assert "popc" in compiled[name, target]
        assert "redux.sync" in compiled[name, target]
        assert "shfl" not in compiled[name, target]
    for name, target in itertools.product(EXACT, ("sm_80", "sm_90", "sm_100")):
        assert not {"fma.", ".ftz", "div.full"} & set(compiled[name, target].split())


def kernels_launched(module: Any) -> set[str]:
    tree = ast.parse(inspect.getsource(module))
    launches = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {ast.unparse(f.value) for f in launches if isinstance(f, ast.Subscript)}


# --- links --------------------------------------------------------------------------------------

F32_PATTERNS = patterns(np.uint32)
SEEDS = st.none() | st.integers(0, (1 << 64) - 1)


def same(found: torch.Tensor, expected: Any) -> None:
    np.testing.assert_array_equal(from_torch(found, expected.dtype), expected)


@given(F32_PATTERNS, st.integers(8, 320), st.sampled_from((2, 3, 4, 6, 8)), SEEDS)
@settings(max_examples=40, deadline=None)
def test_levels_of_blocks_are_those_of_the_reference(units: Any, block: int, n_bits: int, seed: Any) -> None:
    expected = ref.quantize(units, block, n_bits, seed)
    found = wire.quantize(to_torch(units, DEVICE), block, n_bits, seed)
    for mine, other in zip(found, expected, strict=True):
        same(mine, other)
    for largest in ref.LARGEST_F32:
        same(wire.dequantize(*found, block, largest), ref.dequantize(*expected, block, largest))


def test_ranges_of_whole_samples_are_left_to_torch() -> None:
    units = np.random.default_rng(1).standard_normal(9000).astype(np.float32).view(np.uint32)
    for mine, other in zip(
        wire.quantize(to_torch(units, DEVICE), 4500, 4, 7), ref.quantize(units, 4500, 4, 7), strict=True
    ):
        same(mine, other)


@given(st.integers(1, 3), st.integers(1, 80), st.data())
@settings(max_examples=30, deadline=None)
def test_the_largest_of_each_sample_are_marked_moved_and_put_back(n: int, size: int, data: Any) -> None:
    few = st.sampled_from((0, 1, 0x80000001, 0x3F800000, 0xBF800000, 0x7FC00000, 0x3F800400, 0x3F900000))
    elements = data.draw(st.sampled_from((few, st.integers(0, (1 << 32) - 1))))
    units = data.draw(hnp.arrays(np.uint32, n * size, elements=elements))
    k = data.draw(st.integers(1, size))
    mask = ref.top_mask(units, n, k)
    same(wire.top_mask(to_torch(units, DEVICE), n, k), mask)
    kept = ref.take(units, mask, n * k)
    same(wire.take(to_torch(units, DEVICE), to_torch(mask, DEVICE), n * k), kept)
    same(wire.put(to_torch(kept, DEVICE), to_torch(mask, DEVICE)), ref.put(kept, mask))


def test_ranks_go_on_from_one_program_to_the_next() -> None:
    n, k = 3 * planes.BLOCK + 5, 2 * planes.BLOCK
    units = np.tile(np.array([1, 1, 5, 1], np.uint32), 2 * n)[: 2 * n]
    mask = ref.top_mask(units, 2, k)
    same(wire.top_mask(to_torch(units, DEVICE), 2, k), mask)
    kept = ref.take(units, mask, 2 * k)
    same(wire.take(to_torch(units, DEVICE), to_torch(mask, DEVICE), 2 * k), kept)
    same(wire.put(to_torch(kept, DEVICE), to_torch(mask, DEVICE)), ref.put(kept, mask))


@given(st.sampled_from((16, 64, 256)), st.integers(1, 4), st.integers(1, 2), SEEDS, st.data())
@settings(max_examples=30, deadline=None)
def test_tiles_are_those_of_the_reference(tile: int, n_rows: int, n: int, seed: Any, data: Any) -> None:
    row, bits = n * tile, data.draw(st.integers(32, 128)) / 16
    scale = np.float32(2.0 ** data.draw(st.integers(-130, 126)))
    source = np.random.default_rng(data.draw(st.integers(0, 99)))
    with np.errstate(all="ignore"):
        units = (source.standard_normal(n_rows * row).astype(np.float32) * scale).view(np.uint32)
    for i in data.draw(st.lists(st.integers(0, len(units) - 1), max_size=3)):
        units[i] = data.draw(st.sampled_from((0, 0x7F800000, 0xFFC00001, 0x00000001, 0x7F7FFFFF)))
    rotated, peaks = ref.rotate(units, tile, False), ref.tile_peaks(units, tile)
    same(wire.rotate(to_torch(units, DEVICE), tile, False), rotated)
    same(wire.rotate(to_torch(units, DEVICE), tile, True), ref.rotate(units, tile, True))
    same(wire.tile_peaks(to_torch(units, DEVICE), tile), peaks)
    n_planes, logs = int(bits * n_rows), source.integers(0, 0x7F7F, n_rows)
    widths = ref.widths_of(logs, n_planes)
    assert 2 * n_rows <= widths.sum() <= n_planes
    same(wire.widths_of(to_torch(logs, DEVICE), n_planes), widths)
    codes = ref.tile_codes(units, peaks, widths, tile, seed)
    there = to_torch(peaks, DEVICE), to_torch(widths, DEVICE)
    same(wire.tile_codes(to_torch(units, DEVICE), *there, tile, seed), codes)
    same(wire.tile_values(*there, to_torch(codes, DEVICE), tile), ref.tile_values(peaks, widths, codes, tile))
    packed = ref.pack_rows(codes, widths, row, n_planes)
    same(wire.pack_rows(to_torch(codes, DEVICE), there[1], row, n_planes), packed)
    same(wire.unpack_rows(to_torch(packed, DEVICE), there[1], row), codes)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@given(st.data())
@settings(max_examples=8, deadline=None)
def test_casts_sums_and_checksums_of_links_are_those_of_the_reference(
    kind: int, dtype: Any, data: st.DataObject
) -> None:
    units = data.draw(patterns(dtype))
    wide = ref.to_f32(units, kind)
    same(wire.to_f32(to_torch(units, DEVICE), kind), wide)
    same(wire.from_f32(to_torch(wide, DEVICE), kind), ref.from_f32(wide, kind))
    other = finite(data.draw(patterns(np.uint32, len(units), len(units))), reference.F32)
    for mine, expected in ((wire.add, ref.add), (wire.subtract, ref.subtract)):
        same(mine(to_torch(wide, DEVICE), to_torch(other, DEVICE)), expected(wide, other))
        same(mine(to_torch(other, DEVICE), to_torch(wide, DEVICE)), expected(other, wide))
    whole = np.resize(units.view(np.uint8), 8 * len(units))
    assert int(wire.checksum(to_torch(whole, DEVICE))) % (1 << 64) == ref.checksum(whole)
    header = np.resize(whole, 64)
    same(wire.words(header.tobytes(), to_torch(header, DEVICE)), header.view(np.uint64))


@pytest.mark.parametrize("codec", [Uniform(4), TopK(0.1), Tiled(3.5)], ids=str)
def test_links_of_tensors_take_the_kernels_of_their_device(
    codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_link, "has_kernels", lambda device: device.type == DEVICE)
    policy = LinkPolicy(forward=codec, feedback="ef21", rounding="stochastic")
    there = [TensorLink(0, 1, policy, device=DEVICE, use_torch=True, fixed=True) for _ in range(2)]
    monkeypatch.undo()
    here = TensorLink(0, 1, policy, fixed=True)
    assert there[0].link.state.kernels is wire
    for step in range(2):
        x = torch.randn(4, 1040, generator=torch.Generator().manual_seed(step)).bfloat16()
        message, decode = there[0].send(Direction.FORWARD, x.to(DEVICE), Place(step))
        expected, decode_here = here.send(Direction.FORWARD, x, Place(step))
        assert torch.equal(message.cpu(), expected)
        received = there[1].receive(Direction.FORWARD, message, x.dtype, tuple(x.shape), Place(step))
        for tensor in (received, decode()):
            assert torch.equal(tensor.cpu().view(torch.int16), decode_here().view(torch.int16))
        there[1].link.check()
