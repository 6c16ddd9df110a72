"""Sparse chunks: their contents, decoding without the fast path, and sizes by the number of changes."""

import io
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptz.codec.chunk import MAX_SPARSE_SHARE, EncodedChunk, encode_chunk
from ckptz.codec.lossless import SPARSE, Lossless
from ckptz.codec.tensor import TensorToEncode
from ckptz.errors import CorruptionError, FormatError, MissingBaseError
from ckptz.format.decode import decode_chunk, read_changes
from ckptz.format.dtypes import DTYPES, dtype_of
from ckptz.format.frame import FrameHeader
from ckptz.format.index import BaseRef
from ckptz.format.plan import kernel_mode
from ckptz.format.sources import PATTERN_TYPES, ArraySource, ChunkSources
from ckptz.format.streams import CoderId, decode_stream, pack_gaps, unpack_gaps
from ckptz.parallel import Workers
from ckptz.write import writer
from ckptz.write.job import WriteJob
from tests.support import reference

Array = np.ndarray[Any, Any]
FLOATS_AND_INTEGERS = ("BF16", "F16", "F32", "F64", "F8_E4M3", "I32", "I64", "U8", "BOOL")

ascending = st.lists(st.integers(0, 3000), unique=True, max_size=60).map(
    lambda positions: np.array(sorted(positions), np.int64)
)


def frame_of(patterns: Array, base: Array, name: str = "BF16") -> tuple[FrameHeader, EncodedChunk]:
    """Encode a tensor of one chunk as the publisher does; return its frame header and the chunk."""
    dtype = dtype_of(name)
    source, old = ArraySource(dtype, (len(patterns),), patterns), ArraySource(dtype, (len(base),), base)
    encoding = SPARSE.plan(TensorToEncode(source, old))
    chunk = encode_chunk(source, encoding, ChunkSources(0, len(patterns), old))
    return FrameHeader(dtype, source.shape, encoding.plan, (chunk.record,)), chunk


def payload_of(chunk: EncodedChunk) -> Array:
    return np.frombuffer(chunk.payload, np.uint8)


def sources_of(base: Array, name: str = "BF16") -> ChunkSources:
    return ChunkSources(0, len(base), ArraySource(dtype_of(name), (len(base),), base))


# --- kernels ------------------------------------------------------------------------------------


@given(ascending)
@example(np.array([0, 255, 511, 1022, 3000], np.int64))  # gaps of 254, 255, 510: none, one and two of 255
@settings(max_examples=50, deadline=None)
def test_gaps_lead_back_to_positions(positions: Array) -> None:
    gaps = pack_gaps(positions)
    np.testing.assert_array_equal(unpack_gaps(gaps, len(positions), 3001), positions)
    # One byte for each position, and one more for each 255 codes before it that are left out.
    assert len(gaps) == len(positions) + ((np.diff(positions, prepend=-1) - 1) // 255).sum()


@given(hnp.arrays(np.uint8, st.integers(0, 12)), st.integers(0, 12), st.integers(0, 800))
@example(np.array([255], np.uint8), 0, 800)
@example(np.array([3, 255, 0], np.uint8), 2, 259)
@settings(max_examples=80, deadline=None)
def test_gaps_that_do_not_fit_are_refused(gaps: Array, n_values: int, n: int) -> None:
    positions, at = list[int](), 0
    for gap in gaps.tolist():
        at += gap
        if gap < 255:
            positions.append(at)
            at += 1
    fits = len(positions) == n_values and all(p < n for p in positions) and [*gaps[-1:]] != [255]
    try:
        assert unpack_gaps(gaps, n_values, n).tolist() == positions
    except CorruptionError:
        assert not fits
    else:
        assert fits


# --- round trips --------------------------------------------------------------------------------


def decoded_by_planes(header: FrameHeader, chunk: EncodedChunk, base: Array) -> Array:
    """Decode a chunk plane by plane by the specification, with the reference kernels."""
    planes, offset = [], 0
    for stream in chunk.record.streams:
        plane = np.empty(len(base), np.uint8)
        data = payload_of(chunk)[offset : offset + stream.n_bytes]
        offset += stream.n_bytes
        decode_stream(stream.coder, data.data, plane)
        planes.append(plane)
    out = np.empty_like(base)
    reference.merge_planes(planes, base, kernel_mode(header.plan.mode, header.dtype), out)
    return out


@pytest.mark.parametrize("name", FLOATS_AND_INTEGERS)
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_a_sparse_chunk_decodes_equally_with_and_without_the_fast_path(
    name: str, data: st.DataObject
) -> None:
    pattern_type = PATTERN_TYPES[DTYPES[name].pattern_bytes]
    base = data.draw(hnp.arrays(pattern_type, st.integers(40, 700)))
    patterns = base.copy()
    positions = data.draw(st.lists(st.integers(0, len(base) - 1), max_size=len(base) // 8))
    patterns[positions] = data.draw(hnp.arrays(pattern_type, len(positions)))
    header, chunk = frame_of(patterns, base, name)
    changes = read_changes(header, chunk.record, payload_of(chunk), len(base))
    np.testing.assert_array_equal(changes.positions, np.flatnonzero(patterns != base))
    np.testing.assert_array_equal(changes.patterns(base[changes.positions]), patterns[changes.positions])
    np.testing.assert_array_equal(decoded_by_planes(header, chunk, base), patterns)
    out = np.empty_like(base)
    decode_chunk(header, 0, payload_of(chunk), sources_of(base, name), out)
    np.testing.assert_array_equal(out, patterns)


@pytest.mark.parametrize("moves", [(1, 128), (128, 1), (128, 128 << 8), (129, 128 << 8)])
def test_planes_that_change_in_different_places_are_joined(moves: tuple[int, int]) -> None:
    """A difference of 128 is 256 in zigzag code, so that the lowest plane is zero."""
    base = np.full(1000, 0x3F800000, np.uint32)
    patterns = base.copy()
    patterns[[3, 700]] += np.uint32(moves[0])
    patterns[[5, 999]] += np.uint32(moves[1])
    header, chunk = frame_of(patterns, base, "F32")
    changes = read_changes(header, chunk.record, payload_of(chunk), len(base))
    assert changes.positions.tolist() == [3, 5, 700, 999]
    np.testing.assert_array_equal(changes.patterns(base[changes.positions]), patterns[[3, 5, 700, 999]])


def test_a_chunk_with_too_many_changes_is_coded_as_a_whole() -> None:
    base = np.arange(5000, dtype=np.uint16)
    patterns = base.copy()
    n_most = int(MAX_SPARSE_SHARE * len(base))
    patterns[:n_most] ^= 1
    assert read_changes(*_header_record(patterns, base), len(base)) is not None
    patterns[n_most] ^= 1
    assert read_changes(*_header_record(patterns, base), len(base)) is None


def _header_record(patterns: Array, base: Array) -> tuple[FrameHeader, Any, Array]:
    header, chunk = frame_of(patterns, base)
    return header, chunk.record, payload_of(chunk)


def test_what_did_not_change_costs_a_byte_a_plane() -> None:
    base = np.arange(1 << 16, dtype=np.uint16)
    header, chunk = frame_of(base.copy(), base)
    assert [stream.coder for stream in chunk.record.streams] == [CoderId.CONSTANT] * 2
    assert len(chunk.payload) == 2
    changes = read_changes(header, chunk.record, payload_of(chunk), len(base))
    assert len(changes) == 0


def test_the_cost_follows_the_changes_and_not_the_size() -> None:
    sizes = {}
    for n in (1 << 14, 1 << 20):
        base = np.zeros(n, np.uint16)
        patterns = base.copy()
        patterns[:: n // 64] = 1
        sizes[n] = len(frame_of(patterns, base)[1].payload)
    assert sizes[1 << 20] < 3 * sizes[1 << 14], "64 times the elements, as many changes"


# --- damage -------------------------------------------------------------------------------------


def test_every_damaged_sparse_chunk_is_refused() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 4000).astype(np.uint16)
    patterns = base.copy()
    patterns[rng.random(4000) < 0.03] += np.uint16(1)
    header, chunk = frame_of(patterns, base)
    payload = payload_of(chunk)
    for position in range(len(payload)):
        damaged = payload.copy()
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(FormatError):
            decode_chunk(header, 0, damaged, sources_of(base), np.empty_like(base))


def test_another_base_is_distinguished_from_a_damaged_file() -> None:
    base = np.arange(4000, dtype=np.uint16)
    patterns = base.copy()
    patterns[5] = 0
    header, chunk = frame_of(patterns, base)
    with pytest.raises(MissingBaseError):
        decode_chunk(header, 0, payload_of(chunk), sources_of(base + np.uint16(1)), np.empty_like(base))


# --- sizes --------------------------------------------------------------------------------------


def bf16_weights(n: int = 1 << 20) -> Array:
    rng = np.random.default_rng(7)
    return (rng.normal(0, 0.05, n).astype("<f4").view("<u4") >> 16).astype("<u2")


def one_percent_up_or_down(weights: Array) -> Array:
    """Change a random 1 % of elements by one unit in the last place, up or down."""
    rng = np.random.default_rng(8)
    out = weights.copy()
    is_changed = rng.random(len(out)) < 0.01
    out[is_changed] += rng.choice(np.array([1, 0xFFFF], np.uint16), int(is_changed.sum()))
    return out


def one_percent_by_a_small_update(weights: Array) -> Array:
    """Apply a small update to fp32 masters and round to bf16: about 1 %, mostly small weights, change."""
    rng = np.random.default_rng(9)
    below = rng.integers(-0x7FFF, 0x8000, len(weights))  # low 16 bits of the fp32 master
    master = ((weights.astype(np.int64) << 16) + below).astype(np.uint32).view(np.float32)
    pattern = (master - np.float32(6.5e-7) * rng.normal(size=len(weights)).astype(np.float32)).view(np.uint32)
    wide = pattern.astype(np.int64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("change", [one_percent_up_or_down, one_percent_by_a_small_update])
def test_one_percent_of_bf16_takes_less_than_the_bar_and_than_zstd(change: Any) -> None:
    base = bf16_weights()
    patterns = change(base)
    share = np.count_nonzero(patterns != base) / len(base)
    assert 0.009 < share < 0.013
    sink, bf16 = io.BytesIO(), dtype_of("BF16")
    job = WriteJob(
        tensors={"weight": ArraySource(bf16, patterns.shape, patterns)},
        base=BaseRef("0" * 64, "base.ckptz", 1),
        bases={"weight": ArraySource(bf16, base.shape, base)},
        config=Lossless(sparse=True),
    )
    with Workers(1) as workers:
        writer.write(sink, job, workers)
    n_bytes = sink.tell()
    assert n_bytes / patterns.nbytes <= 0.014
    xor = (patterns ^ base).view(np.uint8).reshape(-1, 2)
    planes = [np.ascontiguousarray(xor[:, i]).tobytes() for i in range(2)]
    peer = sum(len(zstandard.ZstdCompressor(3).compress(plane)) for plane in planes)
    assert n_bytes < 0.75 * peer, "the whole file against the bare planes"
