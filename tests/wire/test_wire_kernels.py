"""Wire kernels: reference, numba and torch return the same bits, also with subnormals flushed to zero."""

from typing import Any

import numpy as np
import pytest

from ckptz.format.plan import LinearTable
from ckptz.kernels import wire_cpu, wire_torch
from tests.support import wire_reference
from tests.support import wire_reference as ref
from tests.support.wire_support import devices, from_torch, rng, to_torch

BITS = (2, 3, 4, 6, 8)

pytestmark = pytest.mark.usefixtures("flush_mode")


def tensors() -> dict[str, Any]:
    """Return float32 tensors of all kinds that a link may get."""
    wild = rng(1).standard_normal(1000) * 10.0 ** rng(2).uniform(-40, 38, 1000)
    broken = rng(3).standard_normal(700).astype(np.float32)
    broken[[5, 300]] = np.inf, np.nan
    return {
        "normal": rng(0).standard_normal(1000).astype(np.float32),
        "wide": wild.astype(np.float32),
        "not finite": broken,
        "zeros": np.zeros(10, np.float32),
        "equal": np.full(513, -3.3, np.float32),
        "subnormal": np.array([1e-45, -1e-44, 0, -0.0], np.float32),
        "huge": np.array([3.4e38, -3.4e38, 1], np.float32),
        "one": np.array([2.5], np.float32),
        "patterns": rng(4).integers(0, 1 << 32, 3000, dtype=np.uint32).view(np.float32),
    }


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("block", [256, 7, 10_000])
@pytest.mark.parametrize("seed", [None, 0x123456789ABCDEF0])
def test_quantizers_agree(name: str, block: int, seed: int | None) -> None:
    patterns = tensors()[name].view(np.uint32)
    block = min(block, len(patterns))
    for bits in BITS:
        expected = ref.quantize(patterns, block, bits, seed)
        results = [wire_cpu.quantize(patterns, block, bits, seed)]
        for device in devices():
            on_device = wire_torch.quantize(to_torch(patterns, device), block, bits, seed)
            results.append(tuple(from_torch(t, e.dtype) for t, e in zip(on_device, expected, strict=True)))
        for result in results:
            assert all(map(np.array_equal, expected, result))
        for largest in ref.LARGEST_F32:
            values = ref.dequantize(*expected, block, largest)
            assert np.array_equal(values, wire_cpu.dequantize(*expected, block, largest))
            on_torch = wire_torch.dequantize(*map(to_torch, expected), block, largest)
            assert np.array_equal(values, from_torch(on_torch, np.uint32))


def test_sums_with_a_nan_are_that_nan() -> None:
    a = np.array([0x7FC00001, 0xFFA00002, 0x3F800000, 0x7F800003, 0x3F800000, 0x7F800000], np.uint32)
    b = np.array([0x3F800000, 0x7F800000, 0xFFC00004, 0xBF800000, 0x40000000, 0x3F800000], np.uint32)
    nan = [0x7FC00001, 0xFFE00002, 0xFFC00004, 0x7FC00003]
    for device in devices():
        x, y = to_torch(a, device), to_torch(b, device)
        for result, finite in (
            (wire_torch.add(x, y), [0x40400000, 0x7F800000]),
            (wire_torch.subtract(x, y), [0xBF800000, 0x7F800000]),
        ):
            assert from_torch(result, np.uint32).tolist() == nan + finite
        scaled = from_torch(wire_torch.scale(x, 0.5), np.uint32).tolist()
        assert scaled == [*nan[:2], 0x3F000000, nan[3], 0x3F000000, 0x7F800000]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["normal", "wide", "equal", "huge", "one"])
def test_the_error_is_at_most_half_a_step(name: str, bits: int) -> None:
    values = tensors()[name]
    offsets, scales, codes = wire_cpu.quantize(values.view(np.uint32), 256, bits, None)
    decoded = wire_cpu.dequantize(offsets, scales, codes, 256, ref.LARGEST_F32[0]).view(np.float32)
    step = (scales.astype(np.uint32) << 16).view(np.float32).astype(float)[np.arange(len(values)) // 256]
    beyond_bf16 = np.abs(values) > 3.38e38  # beyond the range of bf16 scales
    error = np.abs(values.astype(float) - decoded)
    assert (error <= 0.501 * step + 2.0**-110 + beyond_bf16 * 2e36).all()


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_those_of_a_linear_map_of_a_file(bits: int) -> None:
    values = rng(5).standard_normal(2048).astype(np.float32) * 1e-3
    offsets, scales, codes = wire_cpu.quantize(values.view(np.uint32), 256, bits, None)
    widened = [(u.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for u in (scales, offsets)]
    table = LinearTable(widened[0], np.arange(1 << bits, dtype=np.float64), widened[1]).expand()
    by_table = table[np.arange(2048) // 256, codes]
    assert np.array_equal(by_table, wire_cpu.dequantize(offsets, scales, codes, 256, 3e38))


@pytest.mark.parametrize("name", ["normal", "wide", "not finite", "subnormal", "huge", "patterns"])
@pytest.mark.parametrize("tile", [16, 64, 256])
@pytest.mark.parametrize("seed", [None, 0x123456789ABCDEF0])
def test_tiles_agree(name: str, tile: int, seed: int | None) -> None:
    patterns = np.resize(tensors()[name].view(np.uint32), 12 * 256)
    row = 512
    widths = np.array([2, 3, 5, 8, 6, 7])
    results = []
    for kernels, convert in ((ref, np.asarray), (wire_cpu, np.asarray), (wire_torch, to_torch)):
        k: Any = kernels
        rotated = k.rotate(convert(patterns), tile, False)
        peaks, wide = k.tile_peaks(rotated, tile), k.wide(convert(widths.astype(np.uint8)))
        codes = k.tile_codes(rotated, peaks, wide, tile, seed)
        planes = k.pack_rows(codes, wide, row, 33)
        values = k.tile_values(peaks, wide, k.unpack_rows(planes, wide, row), tile)
        results.append([rotated, peaks, codes, planes, values, k.rotate(values, tile, True)])
    for result in results[1:]:
        for expected, array in zip(results[0], result, strict=True):
            host = array if isinstance(array, np.ndarray) else from_torch(array, expected.dtype)
            assert np.array_equal(expected, host)


def test_a_rotation_keeps_the_norm_and_is_invertible() -> None:
    values = rng().standard_normal(1024).astype(np.float32)
    for tile in (16, 64, 256):
        rotated = wire_cpu.rotate(values.view(np.uint32), tile, False)
        norm = np.linalg.norm(rotated.view(np.float32).reshape(-1, tile), axis=1)
        assert np.allclose(norm, np.linalg.norm(values.reshape(-1, tile), axis=1), rtol=1e-6)
        back = wire_cpu.rotate(rotated, tile, True).view(np.float32)
        assert np.abs(back - values).max() < 1e-6


@pytest.mark.parametrize("name", tensors())
def test_top_k_agrees_and_is_exact(name: str) -> None:
    patterns = tensors()[name].view(np.uint32)
    n = len(patterns)
    for n_samples in (s for s in (1, 2, 5) if n % s == 0):
        for k in {1, max(n // n_samples // 10, 1), n // n_samples}:
            mask = ref.top_mask(patterns, n_samples, k)
            assert (mask.reshape(n_samples, -1).sum(axis=1) == k).all()
            assert np.array_equal(mask, wire_cpu.top_mask(patterns, n_samples, k))
            assert np.array_equal(mask, wire_torch.top_mask(to_torch(patterns), n_samples, k).numpy())
            kept = ref.take(patterns, mask, k * n_samples)
            for kernels, convert, back in (
                (wire_cpu, np.asarray, np.asarray),
                (wire_torch, to_torch, lambda t: from_torch(t, np.uint32)),
            ):
                values = kernels.take(convert(patterns), convert(mask), k * n_samples)
                assert np.array_equal(back(values), kept)
                assert np.array_equal(back(kernels.put(convert(kept), convert(mask))), ref.put(kept, mask))


def test_checksums_agree_and_detect_changes() -> None:
    words = rng(6).integers(0, 256, 4096).astype(np.uint8)
    expected = ref.checksum(words)
    assert expected == wire_cpu.checksum(words)
    assert expected == int(wire_torch.checksum(to_torch(words))) % (1 << 64)
    swapped = words.reshape(-1, 8)[np.r_[1, 0, 2:512]].reshape(-1)
    flipped = words.copy()
    flipped[77] ^= 1
    longer = np.concatenate([words, np.zeros(8, np.uint8)])
    zeros = [ref.checksum(np.zeros(n, np.uint8)) for n in (8, 16, 24)]
    assert len({expected, *map(ref.checksum, (swapped, flipped, longer)), *zeros}) == 7


def test_random_numbers_are_uniform_and_depend_on_the_seed() -> None:
    numbers = ref.random_24(7, 1 << 16)
    counts = np.histogram(numbers, 16, (0, 1))[0]
    assert abs(numbers.mean() - 0.5) < 0.01
    assert counts.min() > 0.9 * (1 << 12)
    other = ref.random_24(8, 1 << 16)
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.02


@pytest.mark.parametrize("bits", [2, 4])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    values = rng(9).standard_normal(512).astype(np.float32)
    mean = np.zeros(512)
    n_rounds = 400
    for seed in range(n_rounds):
        coded = wire_cpu.quantize(values.view(np.uint32), 256, bits, seed * 0x1234567 + 1)
        mean += wire_reference.dequantize(*coded, 256, 3e38).view(np.float32) / n_rounds
    step = 2 * np.abs(values).max() / ((1 << bits) - 1)
    assert abs((mean - values).mean()) < 0.01 * step
    assert np.abs(mean - values).max() < 0.15 * step
