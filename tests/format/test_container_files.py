"""Files that `write_container` writes and `Container` reads: deltas, lossy tensors, inline bases, records."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptz.codec.chunk import MAX_SPARSE_SHARE
from ckptz.codec.grid import Grid
from ckptz.codec.kmeans import KMeans
from ckptz.codec.lossless import Lossless
from ckptz.errors import ChecksumError, ConfigError, CorruptionError, TruncatedError, UnsupportedError
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.caches import Decoded
from ckptz.format.dtypes import DType, dtype_of
from ckptz.format.frame import FrameHeader
from ckptz.format.index import BaseRef, QualityRecord
from ckptz.format.reader import Container, FrameSource, _DecodedChunk, frames_of
from ckptz.format.sources import CHUNK_VALUES, ArraySource, TensorSource
from ckptz.format.written import Written, amend_metadata, amend_quality
from ckptz.parallel import Workers
from ckptz.write import writer
from ckptz.write.frame_writer import MAX_PLANS
from ckptz.write.inline_writer import NeededBase, write_inline
from ckptz.write.job import WriteJob
from tests.support.spec_cases import base_coded, embedded, varint, with_codes
from tests.support.spec_files import CONSTANT, SPARSE, File, Frame, plan
from tests.support.spec_support import SPEC
from tests.support.vector_support import VALID

Array = np.ndarray[Any, Any]
Sources = Mapping[str, TensorSource]
BASE = BaseRef("0" * 64, "base.ckptz", 1)
SPARSELY = Lossless(sparse=True)


def source_of(values: Array, dtype: str = "F32") -> ArraySource:
    """Convert an array to a tensor source of this dtype of the format, with the bits of the array."""
    return ArraySource.from_buffer(dtype_of(dtype), values.shape, np.ascontiguousarray(values))


def write(
    tensors: Sources, base: Sources | None = None, *, jobs: int = 1, **fields: Any
) -> tuple[bytes, Written]:
    """Write a file to memory, as a delta if there are tensors of a base; return its bytes and report."""
    sink = io.BytesIO()
    job = WriteJob(tensors=tensors, base=None if base is None else BASE, bases=base or {}, **fields)
    with Workers(jobs) as workers:
        written = writer.write(sink, job, workers)
    assert written.stored_bytes == len(sink.getvalue())
    return sink.getvalue(), written


def opened(data: bytes, bases: Sources | None = None) -> Container:
    """Open a file in memory, with the tensors of its base."""
    container = Container(MemoryBytes(data))
    if bases is not None:
        container.bases = bases
    return container


def patterns_of(source: TensorSource) -> Array:
    return source.patterns(0, source.dtype.n_patterns(source.shape))


def assert_restores(container: Container, tensors: Sources) -> None:
    """Check that a file has exactly these tensors, in this order and bit for bit."""
    assert list(container.tensors) == list(tensors)
    for name, source in tensors.items():
        np.testing.assert_array_equal(patterns_of(container.tensors[name]), patterns_of(source), name)


@pytest.mark.parametrize("n_patterns", [(), (3, CHUNK_VALUES + 3)])
def test_progress_is_called_with_the_decoded_bytes_of_each_chunk(n_patterns: tuple[int, ...]) -> None:
    chunk_bytes: list[int] = []
    tensors = {str(n): source_of(np.arange(n, dtype=np.uint8), "U8") for n in n_patterns}
    with Workers(1) as workers:
        writer.write(io.BytesIO(), WriteJob(tensors=tensors), workers, chunk_bytes.append)
    assert sorted(chunk_bytes) == sorted([3, CHUNK_VALUES, 3] if n_patterns else [])


def weights(n: int, shape: tuple[int, ...] = (-1,), seed: int = 0) -> Array:
    """Draw `n` float32 weights with a standard deviation of 0.02."""
    return np.random.default_rng(seed).normal(0, 0.02, n).astype(np.float32).reshape(shape)


# --- headers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector.name)
def test_a_parsed_header_is_packed_without_change(vector: Any) -> None:
    n_headers = 0
    for path in vector.paths:
        levels = opened(path.read_bytes()).levels if path.suffix == ".ckptz" else []
        for header in (source.header for level in levels for source in frames_of(level.tensors)):
            packed = header.pack()
            parsed = FrameHeader.parse(packed)
            assert parsed.pack() == packed
            assert (parsed.dtype, parsed.shape, parsed.chunks) == (header.dtype, header.shape, header.chunks)
            assert repr(parsed.plan) == repr(header.plan)
            n_headers += 1
    assert n_headers or not vector.row["tensors"] or vector.name == "valid/plain-file"


# --- refused inputs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1,) * 65, "65 dimensions, a frame at most 64; reshape it"), ((0, 1 << 49), "beyond 2.48 elements")],
)
def test_shapes_beyond_the_limits_of_a_frame_are_refused(shape: tuple[int, ...], message: str) -> None:
    source = ArraySource(dtype_of("U8"), shape, np.zeros(1, np.uint8))
    with pytest.raises(UnsupportedError, match=message):
        write({"w": source})


def test_more_names_than_fit_into_a_header_are_refused_before_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ConfigError, match="30 tensors need a header over 1000 bytes; split the file"):
        write({f"tensor.{i}": source_of(weights(4)) for i in range(30)})  # 32 would be grouped


@pytest.mark.parametrize("base", [source_of(weights(399)), source_of(weights(400).view(np.int32), "I32")])
def test_a_base_without_a_tensor_of_the_same_shape_and_dtype_is_not_recorded(base: ArraySource) -> None:
    tensors = {"w": source_of(weights(400))}
    data, written = write(tensors, {"w": base})
    container = opened(data)
    assert written.n_deltas == 0
    assert container.index.base is None
    assert container.features == {"lossless"}
    assert_restores(container, tensors)


# --- deltas -------------------------------------------------------------------------------------


def test_a_sparse_delta_lists_its_changes_only_in_chunks_with_few_of_them() -> None:
    """101 patterns change, 99 of them among the 100 of the second chunk, above `MAX_SPARSE_SHARE`."""
    old = np.zeros(CHUNK_VALUES + 100, np.uint8)
    new = old.copy()
    new[[7, CHUNK_VALUES - 1, *range(CHUNK_VALUES, CHUNK_VALUES + 99)]] = 1
    bases = {"w": source_of(old, "U8")}
    data, written = write({"w": source_of(new, "U8")}, bases, config=SPARSELY)
    assert written.n_deltas == 1
    container = opened(data, bases)
    source = container.tensors["w"]
    changes = source.changes(0)
    assert changes.positions.tolist() == [7, CHUNK_VALUES - 1]
    assert changes.patterns(old[changes.positions]).tolist() == [1, 1]
    assert MAX_SPARSE_SHARE * 100 < 99
    assert source.changes(1) is None
    assert_restores(container, {"w": source_of(new, "U8")})
    assert source.needs_other_file


def delta_file(coder: int, data: bytes) -> bytes:
    """Build a delta of four zero bytes with one stream of the given coder."""
    frame = Frame(plan(predictor=1, mode=2), [(coder, data)], bytes(4))
    index = {"base": {"content_id": "0" * 64, "file": "base.ckptz", "depth": 1}}
    return File({"w": frame}, features="delta,lossless", index=index).bytes()


def opened_delta(data: bytes) -> FrameSource:
    """Open such a file with a base of four zero bytes, and return its tensor."""
    return opened(data, {"w": source_of(np.zeros(4, np.uint8), "U8")}).tensors["w"]


def sparse_stream(gaps: bytes, values: bytes) -> bytes:
    """Encode a sparse stream whose most frequent code is 0, with gaps and values as stored streams."""
    return b"\0" + b"".join(varint(len(part)) + embedded(part) for part in (gaps, values))


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        (sparse_stream(b"\x09", b"\1"), CorruptionError, "gaps and values do not agree"),
        (sparse_stream(b"\0", b""), CorruptionError, "gaps and values do not agree"),
        (sparse_stream(b"", b"") + b"\0", CorruptionError, "1 bytes follow"),
        (b"\0", TruncatedError, "sparse gaps"),
        (b"\0\1\x09\0", UnsupportedError, "coder 9"),
    ],
)
def test_invalid_sparse_streams_are_refused_with_tensor_and_chunk(
    stream: bytes, error: type[Exception], message: str
) -> None:
    source = opened_delta(delta_file(SPARSE, stream))
    with pytest.raises(error, match=f"tensor 'w': chunk 0: .*{message}"):
        source.changes(0)
    with pytest.raises(error, match=f"tensor 'w': chunk 0: .*{message}"):
        patterns_of(source)


def test_a_damaged_sparse_stream_is_a_checksum_error() -> None:
    """The same invalid gap as above, but changed after the checksum was computed."""
    stream = sparse_stream(b"\0\2", b"\5\5")
    data = delta_file(SPARSE, stream)
    assert opened_delta(data).changes(0).positions.tolist() == [0, 3]
    assert data.count(stream) == 1
    damaged = opened_delta(data.replace(stream, sparse_stream(b"\0\x09", b"\5\5")))
    with pytest.raises(ChecksumError, match="tensor 'w'"):
        damaged.changes(0)


def test_a_constant_stream_of_two_bytes_is_refused() -> None:
    """`changes` reads only constant streams of one byte, so the decoder refuses this one."""
    source = opened_delta(delta_file(CONSTANT, b"\0\0"))
    assert source.changes(0) is None
    with pytest.raises(CorruptionError, match="constant"):
        patterns_of(source)


@dataclass(frozen=True)
class NotAFrame(TensorSource):
    """A base with codes that is no frame, so a delta asks for patterns and codes separately."""

    frame: FrameSource

    @property
    def dtype(self) -> DType:
        return self.frame.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frame.shape

    @property
    def n_codes(self) -> int | None:
        return self.frame.n_codes

    def patterns(self, begin: int, end: int) -> Array:
        return self.frame.patterns(begin, end)

    def codes(self, begin: int, end: int) -> Array | None:
        return self.frame.codes(begin, end)


LOSSY = KMeans(levels=8, prune=0.3, protect=0.01)
OLD, NEW = weights(6400, (64, 100)), weights(6400, (64, 100)) + weights(6400, (64, 100), seed=1) / 100


@pytest.mark.parametrize(
    "base_of", [lambda frame: frame, NotAFrame, lambda _: source_of(OLD)], ids=["frame", "apart", "plain"]
)
def test_the_error_of_a_lossy_delta_is_within_its_record(
    base_of: Callable[[FrameSource], TensorSource],
) -> None:
    bases = {"w": base_of(opened(write({"w": source_of(OLD)}, config=LOSSY)[0]).tensors["w"])}
    data, written = write({"w": source_of(NEW)}, bases, config=LOSSY)
    container = opened(data, bases)
    has_codes = not isinstance(bases["w"], ArraySource)
    assert container.tensors["w"].header.plan.reads_base_codes == has_codes
    assert (written.n_lossy, written.n_deltas) == (1, has_codes)
    (entry,) = container.index.tensors
    decoded = patterns_of(container.tensors["w"]).view(np.float32)
    assert 0 < np.abs(decoded - NEW.reshape(-1)).max() <= entry.lossy.max_abs_error
    assert entry.lossy.n_pruned == np.count_nonzero(decoded == 0) > 0.25 * NEW.size
    assert 0.005 * NEW.size < entry.lossy.n_protected <= np.count_nonzero(decoded == NEW.reshape(-1))


def test_empty_tensors_are_restored_with_or_without_lossy_ones() -> None:
    empty = {
        "empty.weight": source_of(np.zeros((0, 100), np.float32)),
        "nothing": source_of(np.zeros((3, 0), np.float32)),
    }
    data, written = write({**empty, "w": source_of(NEW)}, config=LOSSY)
    assert written.n_lossy == 1
    assert opened(data).tensors["empty.weight"].shape == (0, 100)
    assert_restores(opened(write(empty, config=LOSSY)[0]), empty)


def test_an_invalid_code_stream_of_a_base_is_refused_with_tensor_and_chunk() -> None:
    """The checksum of the base is right, but a constant stream of two bytes is invalid."""
    invalid = replace(with_codes(1, 1, 1, 1), streams=[(CONSTANT, b"\1\1")])
    base = opened(File({"w": invalid}, features="lossless,maps").bytes()).tensors["w"]
    with pytest.raises(CorruptionError, match=r"tensor 'w': chunk 0: .*constant"):
        base.codes(0, 4)
    bases = {"w": NotAFrame(base)}
    source = opened(File({"w": base_coded(2, 0)}, features="lossless").bytes(), bases).tensors["w"]
    with pytest.raises(CorruptionError, match=r"tensor 'w': chunk 0: .*constant"):
        patterns_of(source)


# --- training states ----------------------------------------------------------------------------


def moments_of(n_parameters: int, n: int) -> dict[str, ArraySource]:
    """Generate the first and second Adam moments, [n] each, of parameters with gradients of 1e-4 to 1e-2.

    The contexts of a first moment are the magnitudes of the second, which follows it.
    """
    tensors = {}
    for i in range(n_parameters):
        scale = 10.0 ** np.random.default_rng(i).uniform(-4, -2, n)
        first = (np.random.default_rng(i).normal(0, 1, n) * scale).astype(np.float32)
        second = (scale**2 * np.random.default_rng(i).uniform(0.5, 2, n)).astype(np.float32)
        tensors[f"optimizer.p{i}.exp_avg"] = source_of(first)
        tensors[f"optimizer.p{i}.exp_avg_sq"] = source_of(second)
    return tensors


@pytest.mark.parametrize("jobs", [1, 2])
def test_more_moments_than_cached_plans_are_restored_within_their_recorded_error(jobs: int) -> None:
    """Contexts of first moments use the plans of second ones, of which the writer caches `MAX_PLANS`."""
    tensors = moments_of(MAX_PLANS + 2, 3000)
    data, written = write(tensors, jobs=jobs, config=Grid())
    assert written.n_lossy == len(tensors)
    container = opened(data)
    for entry in container.index.tensors:
        exact = tensors[entry.name].flat.view(np.float32).astype(np.float64)
        decoded = patterns_of(container.tensors[entry.name]).view(np.float32).astype(np.float64)
        assert 0 < np.abs(decoded - exact).max() <= entry.lossy.max_abs_error
        assert (decoded[exact > 0] > 0).all() or entry.name.endswith("exp_avg")
    with_contexts = [
        name for name, source in container.tensors.items() if source.header.plan.context_tensor_names
    ]
    assert with_contexts == [name for name in tensors if name.endswith("exp_avg")]


# --- records ------------------------------------------------------------------------------------


def record(measured: float, promise: Any = "quality-drop") -> QualityRecord:
    """Return a record of a loss that may rise by 1 % from 2.0."""
    return QualityRecord(promise, "loss", 0.01, True, True, 2.0, measured, True, "2026-01-01")


def test_quality_records_are_added_to_a_finished_file_without_changing_its_tensors(tmp_path: Path) -> None:
    data, written = write({"w": source_of(weights(6400, (64, 100)))}, config=KMeans(levels=8))
    path = tmp_path / "w.ckptz"
    path.write_bytes(data)
    records = [record(2.01, "none"), record(2.005)]
    assert amend_quality(path, records) == path.stat().st_size > written.stored_bytes
    before, after = opened(data), opened(path.read_bytes())
    assert list(after.index.quality) == records
    assert after.index.content_id == before.index.content_id
    assert [entry.lossy.promise for entry in after.index.tensors if entry.lossy] == ["quality-drop"]
    assert np.array_equal(patterns_of(after.tensors["w"]), patterns_of(before.tensors["w"]))


def test_a_file_shrinks_to_its_old_bytes_when_records_are_removed(tmp_path: Path) -> None:
    data, written = write({"w": source_of(weights(6400, (64, 100)))}, config=KMeans(levels=8))
    path = tmp_path / "w.ckptz"
    path.write_bytes(data)
    amend_quality(path, [record(2.0 + i / 1000) for i in range(9)])
    assert amend_quality(path, []) == path.stat().st_size == written.stored_bytes
    assert path.read_bytes() == data


def test_metadata_is_added_to_a_finished_file(tmp_path: Path) -> None:
    data, _ = write({"w": source_of(weights(40))}, metadata={"author": "somebody", "run": "1"})
    path = tmp_path / "w.ckptz"
    path.write_bytes(data)
    assert amend_metadata(path, {"run": "2", "step": "7"}) == path.stat().st_size
    after = opened(path.read_bytes())
    assert after.index.metadata == {"author": "somebody", "run": "2", "step": "7"}
    assert np.array_equal(patterns_of(after.tensors["w"]), patterns_of(opened(data).tensors["w"]))


def test_a_damaged_file_is_not_amended(tmp_path: Path) -> None:
    data, _ = write({"w": source_of(weights(40))})
    path = tmp_path / "w.ckptz"
    damaged = data[:-1] + bytes((data[-1] ^ 1,))
    path.write_bytes(damaged)
    with pytest.raises(ChecksumError):
        amend_quality(path, [record(2.0)])
    assert path.read_bytes() == damaged


# --- inline bases -------------------------------------------------------------------------------


def with_inline_base(container: Container, base: Sources) -> tuple[Container, int]:
    """Write a delta and its base as one file; return it, and the tensor bytes that progress counted."""
    needed = [NeededBase(content_id="0" * 64, file="base", tensors=base)]
    sink, tensor_bytes = io.BytesIO(), list[int]()
    with Workers(1) as workers:
        n_bytes = write_inline(sink, container, needed, workers, tensor_bytes.append)
    joined = opened(sink.getvalue())
    assert n_bytes == joined.stored_bytes
    return joined, sum(tensor_bytes)


def test_the_streams_of_a_lossy_base_are_copied_into_an_inline_base() -> None:
    full = opened(write({"w": source_of(OLD)}, config=LOSSY)[0])
    data, _ = write({"w": source_of(NEW)}, full.tensors)
    container = opened(data, full.tensors)
    joined, tensor_bytes = with_inline_base(container, full.tensors)
    assert tensor_bytes > 0
    assert "maps" not in container.features
    assert joined.features == {"inline", "lossless", "maps"}
    assert_restores(joined, {"w": source_of(NEW)})
    frame = joined.inline[0].tensors["w"]
    assert [piece.tobytes() for piece in frame.stored_pieces()] == [
        piece.tobytes() for piece in full.tensors["w"].stored_pieces()
    ]


def test_a_low_rank_base_is_copied_into_an_inline_base() -> None:
    full = opened((SPEC / "vectors/valid/map-low-rank-linear.ckptz").read_bytes())
    name, source = next((n, s) for n, s in full.tensors.items() if s.header.plan.outer is not None)
    new = {name: ArraySource(source.dtype, source.shape, source.patterns(0, source.n_patterns) ^ 1)}
    data, written = write(new, {name: source}, config=SPARSELY)
    assert written.n_deltas == 1
    joined, _ = with_inline_base(opened(data, full.tensors), {name: source})
    assert joined.features == {"inline", "lossless", "low-rank", "maps"}
    assert_restores(joined, new)


def test_a_chunk_decoded_to_codes_only_returns_its_codes() -> None:
    """The codes of a frame that uses values and codes of its base depend only on the base's codes."""
    decoded = Decoded(None, np.array([1, 2], np.uint8))
    assert _DecodedChunk(None, decoded).codes(0, 2) is decoded.codes
