"""Tensors encoded in a batch have the same bytes as encoded one by one; deltas may be smaller."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ckptz.codec.chunk import Encoded, encode_chunk
from ckptz.codec.effort import DEFAULT, FAST, SMALL, Effort
from ckptz.codec.lossless import EXACT, plan_lossless
from ckptz.format.dtypes import DType, dtype_of
from ckptz.format.frame import FrameHeader
from ckptz.format.sources import PATTERN_TYPES, ArraySource, ChunkSources
from ckptz.format.streams import (
    HUFFMAN_CODES,
    OF_CODE_STREAMS,
    CoderId,
    _Coders,
    decode_stream,
    encode_stream,
    encode_streams,
)
from ckptz.kernels import compiled, plain
from ckptz.kernels.floats import Bytes, Patterns

SIZES = (1, 7, 2047, 2048, 8192, 9000, 1 << 18)


def weights(dtype: DType, n: int) -> Patterns:
    exact = np.float64 if dtype.pattern_bytes == 8 else np.float32
    values = np.random.default_rng(n).normal(0, 0.02, n).astype(exact)
    bits = values.view(f"u{values.itemsize}") >> np.uint64(8 * max(values.itemsize - dtype.pattern_bytes, 0))
    return bits.astype(PATTERN_TYPES[dtype.pattern_bytes])


def changed(patterns: Patterns, share: float) -> Patterns:
    """Return patterns of which this share is increased by 1."""
    mask = np.random.default_rng(len(patterns)).random(len(patterns)) < share
    return patterns + mask.astype(patterns.dtype)


def pairs(dtype: DType) -> list[tuple[Patterns, Patterns]]:
    """Build tensors and their bases: SIZES x shares of changes, reversed, constant, repeated and random.

    Changes of the random tensor depend on its values, so that contexts also pay for dtypes of one byte.
    """
    tensors = []
    for n in SIZES:
        old = weights(dtype, n)
        tensors += [(changed(old, share), old) for share in (0, 0.001, 0.5)]
    for n in SIZES[2:]:
        old = weights(dtype, n)
        tensors += [(old[::-1].copy(), old), (np.full_like(old, 3), old), (np.resize(old[:50], n), old)]
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, n * dtype.pattern_bytes, np.uint8).view(PATTERN_TYPES[dtype.pattern_bytes])
    mask = rng.random(n) < np.where(old % 128 > 100, 0.5, 0.01)
    return [*tensors, (old + mask.astype(old.dtype), old)]


def frame(source: ArraySource, encoded: Encoded) -> bytes:
    encoding, chunk = encoded
    return FrameHeader(source.dtype, source.shape, encoding.plan, (chunk.record,)).pack() + chunk.payload


def encode_alone(source: ArraySource, base: ArraySource | None, effort: Effort) -> Encoded:
    planned = plan_lossless(source, base, effort=effort)
    encoding = replace(planned, huffman_margin=effort.huffman_margin)
    return encoding, encode_chunk(source, encoding, ChunkSources(0, source.n_patterns, base))


@pytest.mark.parametrize("has_base", [False, True], ids=["alone", "deltas"])
@pytest.mark.parametrize(
    ("name", "effort"), [("U8", SMALL), ("BF16", SMALL), ("BF16", FAST), ("F32", DEFAULT), ("I64", SMALL)]
)
def test_frames_are_those_of_tensors_encoded_one_by_one_or_smaller_deltas(
    name: str, effort: Effort, has_base: bool
) -> None:
    compiled()
    dtype = dtype_of(name)
    source_pairs = [
        [ArraySource(dtype, (len(patterns),), patterns) for patterns in pair] for pair in pairs(dtype)
    ]
    sources, bases = [new for new, _ in source_pairs], [old for _, old in source_pairs] if has_base else []
    batch = EXACT.plan_and_encode(sources, bases, effort)
    singles = [encode_alone(*pair, effort) for pair in itertools.zip_longest(sources, bases)]
    for source, batched, single in zip(sources, batch, singles, strict=True):
        batched_frame, single_frame = frame(source, batched), frame(source, single)
        # Tables of deltas are chosen per batch, where smaller tables may pay.
        assert batched_frame == single_frame or (
            has_base and len(batched_frame) <= 1.01 * len(single_frame) + 8
        )
    # The cases differ: plans with and without a base and contexts.
    plans = {(encoding.plan.needs_base, bool(encoding.plan.rules)) for encoding, _ in batch}
    deltas = {(True, False)} | ({(True, True)} if effort.delta_gain is not None else set())
    assert plans == ({(False, False)} | (deltas if has_base else set()))


def codes() -> Sequence[Bytes]:
    rng = np.random.default_rng(0)
    skewed = rng.binomial(30, 0.3, 30_000).astype(np.uint8)
    rare = (rng.random(30_000) < 0.02) * rng.integers(0, 256, 30_000, np.uint8)
    return (
        *(skewed[:n] for n in (1, 2, 40, 800, 30_000)),
        np.full(5000, 7, np.uint8),
        rare,
        rng.integers(0, 256, 3000, np.uint8),
        rng.integers(0, 256, 1 << 18, np.uint8),
        np.resize(rng.integers(0, 256, 700, np.uint8), 20_000),
    )


def test_numpy_and_compiled_kernels_count_the_same_repeats() -> None:
    parts = [*codes(), np.zeros(50, np.uint8), np.empty(0, np.uint8)]
    symbols, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
    counts = plain.repeats(symbols, ends)
    np.testing.assert_array_equal(counts, compiled().repeats(symbols, ends))
    assert counts[9, 0] > 18_000  # the codes that repeat every 700
    assert not counts[7].any()  # random codes


@pytest.mark.parametrize("start", [lambda: None, compiled], ids=["numpy", "compiled"])
def test_streams_are_those_of_codes_encoded_one_by_one(start: object) -> None:
    assert callable(start)
    start()
    parts = codes()
    batch = encode_streams(parts)
    assert [(coder, bytes(data)) for coder, data in batch] == [
        (coder, bytes(data)) for coder, data in map(encode_stream, parts)
    ]
    assert {coder for coder, _ in batch} == set(CoderId) - OF_CODE_STREAMS


@pytest.mark.parametrize("n", [9, 300, 5000, 200_000])
def test_no_stream_is_smaller_than_the_bound_by_which_sparse_ones_are_dropped(n: int) -> None:
    compiled()
    rng = np.random.default_rng(n)
    for share in (0.5, 0.9, 0.99):
        skewed = np.minimum(rng.geometric(share, n), 255).astype(np.uint8)
        for codes in (skewed, np.sort(skewed), np.sort(skewed)[::-1].copy(), skewed % 2):
            coders = _Coders([codes], nested=True)
            bound = coders.least_bytes(0)
            [(_, stream)] = coders.encoded([0])
            assert 0.9 * len(stream) - n / 128 - 70 < bound <= len(stream)


@pytest.mark.parametrize("kernels", ["numpy", "compiled"])
def test_huffman_streams_are_those_of_codes_encoded_one_by_one_and_decode(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "_spent", [0.0])
    if kernels == "compiled":
        compiled()
    skewed = np.random.default_rng(1).binomial(30, 0.3, 30_003).astype(np.uint8)
    parts = (*codes(), *(skewed[:n] for n in (HUFFMAN_CODES - 1, HUFFMAN_CODES, 30_001, 30_002, 30_003)))
    batch = encode_streams(parts, huffman_margin=0.1)
    for part, (coder, data) in zip(parts, batch, strict=True):
        [(single_coder, single)] = encode_streams([part], huffman_margin=0.1)
        assert (coder, bytes(data)) == (single_coder, bytes(single))
        out = np.empty_like(part)
        decode_stream(coder, memoryview(bytearray(data)), out)
        np.testing.assert_array_equal(out, part)
    n_huffman = sum(coder is CoderId.HUFFMAN for coder, _ in batch)
    assert n_huffman == sum(len(part) >= HUFFMAN_CODES for part in parts[-5:]) + 1  # one of codes()
