"""Files written and read through the container alone: what a writer refuses, keeps, copies and amends."""

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


def of(values: Array, name: str = "F32") -> ArraySource:
    """An array as a tensor of this type."""
    return ArraySource.from_buffer(dtype_of(name), values.shape, np.ascontiguousarray(values))


def write(
    tensors: Sources, base: Sources | None = None, *, jobs: int = 1, **fields: Any
) -> tuple[bytes, Written]:
    """A file in memory; of a delta, `base` holds the tensors that it is stored against."""
    sink = io.BytesIO()
    job = WriteJob(tensors=tensors, base=None if base is None else BASE, bases=base or {}, **fields)
    with Workers(jobs) as workers:
        written = writer.write(sink, job, workers)
    assert written.stored_bytes == len(sink.getvalue())
    return sink.getvalue(), written


def opened(data: bytes, bases: Sources | None = None) -> Container:
    container = Container(MemoryBytes(data))
    if bases is not None:
        container.bases = bases
    return container


def patterns_of(source: TensorSource) -> Array:
    return source.patterns(0, source.dtype.n_patterns(source.shape))


def same(container: Container, tensors: Sources) -> bool:
    """Return whether a file restores the bits of all tensors."""
    return list(container.tensors) == list(tensors) and all(
        np.array_equal(patterns_of(container.tensors[name]), patterns_of(source))
        for name, source in tensors.items()
    )


@pytest.mark.parametrize("n_patterns", [(), (3, CHUNK_VALUES + 3)])
def test_progress_is_told_the_bytes_of_each_chunk(n_patterns: tuple[int, ...]) -> None:
    done: list[int] = []
    tensors = {str(n): of(np.arange(n, dtype=np.uint8), "U8") for n in n_patterns}
    with Workers(1) as workers:
        writer.write(io.BytesIO(), WriteJob(tensors=tensors), workers, done.append)
    assert sorted(done) == sorted([3, CHUNK_VALUES, 3] if n_patterns else [])


def weights(n: int, shape: tuple[int, ...] = (-1,), seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.02, n).astype(np.float32).reshape(shape)


# --- headers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector.name)
def test_a_header_that_was_read_is_written_with_the_same_meaning(vector: Any) -> None:
    found = 0
    for path in vector.paths:
        levels = opened(path.read_bytes()).levels if path.suffix == ".ckptz" else []
        for header in (source.header for level in levels for source in frames_of(level.tensors)):
            packed = header.pack()
            again = FrameHeader.parse(packed)
            assert again.pack() == packed
            assert (again.dtype, again.shape, again.chunks) == (header.dtype, header.shape, header.chunks)
            assert repr(again.plan) == repr(header.plan)
            found += 1
    assert found or not vector.row["tensors"] or vector.name == "valid/plain-file"


# --- what is not written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "said"),
    [((1,) * 65, "65 dimensions, a frame at most 64; reshape it"), ((0, 1 << 49), "beyond 2.48 elements")],
)
def test_shapes_that_no_frame_holds_are_refused(shape: tuple[int, ...], said: str) -> None:
    source = ArraySource(dtype_of("U8"), shape, np.zeros(1, np.uint8))
    with pytest.raises(UnsupportedError, match=said):
        write({"w": source})


def test_more_names_than_a_header_holds_are_refused_before_anything_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ConfigError, match="30 tensors need a header over 1000 bytes; split the file"):
        write({f"tensor.{i}": of(weights(4)) for i in range(30)})  # more would share a frame


@pytest.mark.parametrize("base", [of(weights(399)), of(weights(400).view(np.int32), "I32")])
def test_a_base_that_no_tensor_fits_is_not_named(base: ArraySource) -> None:
    tensors = {"w": of(weights(400))}
    data, written = write(tensors, {"w": base})
    container = opened(data)
    assert written.n_deltas == 0
    assert container.index.base is None
    assert container.features == {"lossless"}
    assert same(container, tensors)


# --- deltas -------------------------------------------------------------------------------------


def changed_in(values: Array, places: Any) -> Array:
    out = values.copy()
    out[places] ^= 1
    return out


def test_chunks_say_where_they_differ_unless_too_much_does() -> None:
    """The tensor changes little; all that changes in its second chunk is most of that."""
    old = np.zeros(CHUNK_VALUES + 100, np.uint8)
    new = changed_in(old, np.r_[7, CHUNK_VALUES - 1, CHUNK_VALUES : CHUNK_VALUES + 99])
    bases = {"w": of(old, "U8")}
    data, written = write({"w": of(new, "U8")}, bases, config=SPARSELY)
    assert written.n_deltas == 1
    container = opened(data, bases)
    source = container.tensors["w"]
    first = source.changes(0)
    assert first.positions.tolist() == [7, CHUNK_VALUES - 1]
    assert first.patterns(old[first.positions]).tolist() == [1, 1]
    assert MAX_SPARSE_SHARE * 100 < 99
    assert source.changes(1) is None
    assert same(container, {"w": of(new, "U8")})
    assert source.needs_other_file


def delta_file(coder: int, data: bytes) -> bytes:
    """A delta of four bytes, of one stream, and nothing changed by it."""
    frame = Frame(plan(predictor=1, mode=2), [(coder, data)], bytes(4))
    index = {"base": {"content_id": "0" * 64, "file": "base.ckptz", "depth": 1}}
    return File({"w": frame}, features="delta,lossless", index=index).bytes()


def opened_delta(data: bytes) -> FrameSource:
    return opened(data, {"w": of(np.zeros(4, np.uint8), "U8")}).tensors["w"]


def sparse_stream(gaps: bytes, values: bytes) -> bytes:
    """Around zero; both parts stored."""
    return b"\0" + b"".join(varint(len(part)) + embedded(part) for part in (gaps, values))


@pytest.mark.parametrize(
    ("stream", "error", "said"),
    [
        (sparse_stream(b"\x09", b"\1"), CorruptionError, "gaps and values do not agree"),
        (sparse_stream(b"\0", b""), CorruptionError, "gaps and values do not agree"),
        (sparse_stream(b"", b"") + b"\0", CorruptionError, "1 bytes follow"),
        (b"\0", TruncatedError, "sparse gaps"),
        (b"\0\1\x09\0", UnsupportedError, "coder 9"),
    ],
)
def test_sparse_streams_that_make_no_sense_are_refused_by_place(
    stream: bytes, error: type[Exception], said: str
) -> None:
    source = opened_delta(delta_file(SPARSE, stream))
    with pytest.raises(error, match=f"tensor 'w': chunk 0: .*{said}"):
        source.changes(0)
    with pytest.raises(error, match=f"tensor 'w': chunk 0: .*{said}"):
        patterns_of(source)


def test_a_sparse_stream_that_was_changed_is_told_from_one_that_was_written_so() -> None:
    stream = sparse_stream(b"\0\2", b"\5\5")
    data = delta_file(SPARSE, stream)
    found = opened_delta(data).changes(0)
    assert found.positions.tolist() == [0, 3]
    assert data.count(stream) == 1
    changed = opened_delta(data.replace(stream, sparse_stream(b"\0\x09", b"\5\5")))
    with pytest.raises(ChecksumError, match="tensor 'w'"):
        changed.changes(0)


def test_a_constant_stream_of_two_bytes_is_decoded_as_a_whole_and_refused() -> None:
    source = opened_delta(delta_file(CONSTANT, b"\0\0"))
    assert source.changes(0) is None
    with pytest.raises(CorruptionError, match="constant"):
        patterns_of(source)


@dataclass(frozen=True)
class Codes(TensorSource):
    """A base of which patterns and codes are read apart."""

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
    "wrap", [lambda frame: frame, Codes, lambda _: of(OLD)], ids=["frame", "apart", "plain"]
)
def test_a_lossy_delta_comes_back_within_its_record(wrap: Callable[[FrameSource], TensorSource]) -> None:
    bases = {"w": wrap(opened(write({"w": of(OLD)}, config=LOSSY)[0]).tensors["w"])}
    data, written = write({"w": of(NEW)}, bases, config=LOSSY)
    container = opened(data, bases)
    has_codes = not isinstance(bases["w"], ArraySource)
    assert container.tensors["w"].header.plan.reads_base_codes == has_codes
    assert (written.n_lossy, written.n_deltas) == (1, has_codes)
    (entry,) = container.index.tensors
    found = patterns_of(container.tensors["w"]).view(np.float32)
    assert 0 < np.abs(found - NEW.reshape(-1)).max() <= entry.lossy.max_abs_error
    assert entry.lossy.n_pruned == np.count_nonzero(found == 0) > 0.25 * NEW.size
    assert 0.005 * NEW.size < entry.lossy.n_protected <= np.count_nonzero(found == NEW.reshape(-1))


def test_tensors_without_values_stand_beside_lossy_ones_or_alone() -> None:
    empty = {"empty.weight": of(np.zeros((0, 100), np.float32)), "nothing": of(np.zeros((3, 0), np.float32))}
    data, written = write({**empty, "w": of(NEW)}, config=LOSSY)
    assert written.n_lossy == 1
    assert opened(data).tensors["empty.weight"].shape == (0, 100)
    assert same(opened(write(empty, config=LOSSY)[0]), empty)


def test_broken_codes_of_a_base_are_named_by_the_chunk() -> None:
    """Its bytes are as they were written, and no stream of codes."""
    broken = replace(with_codes(1, 1, 1, 1), streams=[(CONSTANT, b"\1\1")])
    base = opened(File({"w": broken}, features="lossless,maps").bytes()).tensors["w"]
    with pytest.raises(CorruptionError, match=r"tensor 'w': chunk 0: .*constant"):
        base.codes(0, 4)
    bases = {"w": Codes(base)}
    source = opened(File({"w": base_coded(2, 0)}, features="lossless").bytes(), bases).tensors["w"]
    with pytest.raises(CorruptionError, match=r"tensor 'w': chunk 0: .*constant"):
        patterns_of(source)


# --- training states ----------------------------------------------------------------------------


def moments_of(n_parameters: int, n: int) -> dict[str, ArraySource]:
    """First moments before second ones, whose magnitudes their contexts read."""
    tensors = {}
    for i in range(n_parameters):
        scale = 10.0 ** np.random.default_rng(i).uniform(-4, -2, n)
        first = (np.random.default_rng(i).normal(0, 1, n) * scale).astype(np.float32)
        second = (scale**2 * np.random.default_rng(i).uniform(0.5, 2, n)).astype(np.float32)
        tensors[f"optimizer.p{i}.exp_avg"] = of(first)
        tensors[f"optimizer.p{i}.exp_avg_sq"] = of(second)
    return tensors


def check_moments(tensors: Mapping[str, ArraySource], jobs: int) -> Container:
    """Write them, and hold what is read against what the index says of it."""
    data, written = write(tensors, jobs=jobs, config=Grid())
    assert written.n_lossy == len(tensors)
    container = opened(data)
    for entry in container.index.tensors:
        exact = tensors[entry.name].flat.view(np.float32).astype(np.float64)
        found = patterns_of(container.tensors[entry.name]).view(np.float32).astype(np.float64)
        assert 0 < np.abs(found - exact).max() <= entry.lossy.max_abs_error
        assert (found[exact > 0] > 0).all() or entry.name.endswith("exp_avg")
    return container


@pytest.mark.parametrize("jobs", [1, 2])
def test_more_moments_than_plans_are_held_come_back(jobs: int) -> None:
    tensors = moments_of(MAX_PLANS + 2, 3000)
    container = check_moments(tensors, jobs)
    grouped = [name for name, source in container.tensors.items() if source.header.plan.context_tensor_names]
    assert grouped == [name for name in tensors if name.endswith("exp_avg")]


# --- records ------------------------------------------------------------------------------------


def record(measured: float, promise: Any = "quality-drop") -> QualityRecord:
    return QualityRecord(promise, "loss", 0.01, True, True, 2.0, measured, True, "2026-01-01")


def test_records_are_put_into_a_finished_file_and_its_frames_stay(tmp_path: Path) -> None:
    data, written = write({"w": of(weights(6400, (64, 100)))}, config=KMeans(levels=8))
    path = tmp_path / "w.ckptz"
    path.write_bytes(data)
    records = [record(2.01, "none"), record(2.005)]
    assert amend_quality(path, records) == path.stat().st_size > written.stored_bytes
    before, after = opened(data), opened(path.read_bytes())
    assert list(after.index.quality) == records
    assert after.index.content_id == before.index.content_id
    assert [entry.lossy.promise for entry in after.index.tensors if entry.lossy] == ["quality-drop"]
    assert np.array_equal(patterns_of(after.tensors["w"]), patterns_of(before.tensors["w"]))


def test_a_file_becomes_shorter_where_records_go(tmp_path: Path) -> None:
    data, written = write({"w": of(weights(6400, (64, 100)))}, config=KMeans(levels=8))
    path = tmp_path / "w.ckptz"
    path.write_bytes(data)
    amend_quality(path, [record(2.0 + i / 1000) for i in range(9)])
    assert amend_quality(path, []) == path.stat().st_size == written.stored_bytes
    assert path.read_bytes() == data


def test_metadata_are_added_to_a_finished_file(tmp_path: Path) -> None:
    data, _ = write({"w": of(weights(40))}, metadata={"author": "somebody", "run": "1"})
    path = tmp_path / "w.ckptz"
    path.write_bytes(data)
    assert amend_metadata(path, {"run": "2", "step": "7"}) == path.stat().st_size
    after = opened(path.read_bytes())
    assert after.index.metadata == {"author": "somebody", "run": "2", "step": "7"}
    assert np.array_equal(patterns_of(after.tensors["w"]), patterns_of(opened(data).tensors["w"]))


def test_a_file_that_is_none_is_not_amended(tmp_path: Path) -> None:
    data, _ = write({"w": of(weights(40))})
    path = tmp_path / "w.ckptz"
    damaged = data[:-1] + bytes((data[-1] ^ 1,))
    path.write_bytes(damaged)
    with pytest.raises(ChecksumError):
        amend_quality(path, [record(2.0)])
    assert path.read_bytes() == damaged


# --- bases within -------------------------------------------------------------------------------


def test_codes_of_a_base_go_within_as_they_are() -> None:
    full = opened(write({"w": of(OLD)}, config=LOSSY)[0])
    data, _ = write({"w": of(NEW)}, full.tensors)
    container = opened(data, full.tensors)
    needed = [NeededBase(content_id="0" * 64, file="base", tensors=full.tensors)]
    sink, steps = io.BytesIO(), list[int]()
    with Workers(1) as workers:
        n_bytes = write_inline(sink, container, needed, workers, steps.append)
    found = opened(sink.getvalue())
    assert n_bytes == found.stored_bytes
    assert sum(steps) > 0
    assert "maps" not in container.features
    assert found.features == {"inline", "lossless", "maps"}
    assert same(found, {"w": of(NEW)})
    frame = found.inline[0].tensors["w"]
    assert [piece.tobytes() for piece in frame.stored_pieces()] == [
        piece.tobytes() for piece in full.tensors["w"].stored_pieces()
    ]


def test_a_base_of_outer_products_goes_within_as_it_is() -> None:
    full = opened((SPEC / "vectors/valid/map-low-rank-linear.ckptz").read_bytes())
    name, source = next((n, s) for n, s in full.tensors.items() if s.header.plan.outer is not None)
    new = {name: ArraySource(source.dtype, source.shape, source.patterns(0, source.n_patterns) ^ 1)}
    data, written = write(new, {name: source}, config=SPARSELY)
    assert written.n_deltas == 1
    sink, needed = io.BytesIO(), [NeededBase(content_id="0" * 64, file="base", tensors={name: source})]
    with Workers(1) as workers:
        write_inline(sink, opened(data, full.tensors), needed, workers)
    found = opened(sink.getvalue())
    assert found.features == {"inline", "lossless", "low-rank", "maps"}
    assert same(found, new)


def test_codes_of_a_base_come_without_the_patterns_that_nobody_asked_for() -> None:
    """A frame that reads values and codes of its base gives its own codes from the base's codes alone."""
    decoded = Decoded(None, np.array([1, 2], np.uint8))
    assert _DecodedChunk(None, decoded).codes(0, 2) is decoded.codes  # no frame is asked
