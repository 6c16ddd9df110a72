"""Writes one `.ckptz` file, streaming. Implements spec/06-container.md.

The size of the header is known from the names, so frames stream behind a reserved header, which is
written last. Memory holds a few chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from ckptz.codec.encode import EncodedChunk, encode_chunk
from ckptz.codec.frame import ChunkRecord, FrameHeader, header_bytes
from ckptz.codec.plan import Plan, Predictor
from ckptz.codec.planner import plan_lossless
from ckptz.codec.sources import ChunkSources
from ckptz.codec.units import CHUNK_UNITS, UnitSource, chunk_bounds
from ckptz.container.envelope import MAX_HEADER_BYTES, Region, build_header
from ckptz.container.index import (
    INDEX_NAME,
    RESERVED_PREFIX,
    BaseRef,
    Index,
    Sharding,
    TensorEntry,
    content_id,
    envelope_metadata,
    pack_index,
    writer_name,
)
from ckptz.dtypes import dtype_of
from ckptz.errors import ConfigError
from ckptz.parallel import Workers

OFFSET_DIGITS: Final = 20  # reserved for each offset in the header: any u64
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into a file beside the tensors.

    Attributes:
        metadata: the user's own, kept unchanged.
        base: the checkpoint the tensors are stored against.
        bases: its tensors by name; a tensor without a base of its dtype and shape stands alone.
        step: training step, if known.
        sharding: how the source folder was split.
        tree: JSON skeleton of a nested checkpoint.
    """

    metadata: Mapping[str, str] | None = None
    base: BaseRef | None = None
    bases: Mapping[str, UnitSource] = field(default_factory=dict)
    step: int | None = None
    sharding: Sharding | None = None
    tree: object = None


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_container` wrote: sizes in bytes, and the content id."""

    n_tensors: int
    original_bytes: int
    stored_bytes: int
    content_id: str
    n_deltas: int


@dataclass(slots=True)
class _Job:
    """One chunk to encode; a tensor of one chunk is planned where it is encoded."""

    name: str
    source: UnitSource
    base: UnitSource | None
    plan: Plan | None
    begin: int
    end: int


def check_names(names: Sequence[str]) -> None:
    """Refuse names that a reader would have to refuse."""
    for name in names:
        if name.startswith(RESERVED_PREFIX) or name == "__metadata__":
            raise ConfigError(f"tensor name {name!r} is reserved by ckptz; rename the tensor")


def write_container(
    sink: BinaryIO,
    tensors: Mapping[str, UnitSource],
    contents: Contents,
    workers: Workers,
    progress: Progress | None = None,
) -> Written:
    """Write a whole file to `sink`, which must seek.

    Args:
        sink: an empty file, or io.BytesIO.
        tensors: by name; their order is kept.
        contents: everything else.
        workers: threads.
        progress: called with the original bytes of each chunk written.
    """
    check_names(list(tensors))
    features = ["lossless"] + (["delta"] if contents.base else [])
    reserved = _reserved_header_bytes(tensors, features)
    sink.seek(reserved)
    entries, headers = [], []
    for name, header, offset, n_bytes in _write_frames(sink, reserved, tensors, contents, workers, progress):
        checksum = f"{header.checksum:016x}"
        entries.append(TensorEntry(name, header.dtype.name, header.shape, offset, n_bytes, checksum))
        headers.append(header)
    index = _index(entries, contents)
    packed = pack_index(index)
    sink.write(packed)
    end = entries[-1].offset + entries[-1].n_bytes if entries else 0
    regions = [_blob(e.name, e.offset, e.n_bytes) for e in entries] + [_blob(INDEX_NAME, end, len(packed))]
    sink.seek(0)
    sink.write(build_header(regions, envelope_metadata(features, packed), reserved))
    sink.seek(reserved + end + len(packed))
    return Written(
        n_tensors=len(entries),
        original_bytes=sum(h.dtype.n_bytes(h.shape) for h in headers),
        stored_bytes=reserved + end + len(packed),
        content_id=index.content_id,
        n_deltas=sum(h.plan.predictor is Predictor.BASE for h in headers),
    )


def _blob(name: str, begin: int, n_bytes: int) -> Region:
    return Region(name, dtype_of("U8"), (n_bytes,), begin, begin + n_bytes)


def _reserved_header_bytes(tensors: Mapping[str, UnitSource], features: Sequence[str]) -> int:
    # No file holds 10^14 bytes; each number then takes at most 15 digits.
    raw = sum(source.dtype.n_bytes(source.shape) for source in tensors.values())
    widest = 10 ** len(str(raw * 2 + (1 << 26) + 4096 * len(tensors))) - 1
    blobs = [Region(name, dtype_of("U8"), (widest,), widest, widest) for name in (*tensors, INDEX_NAME)]
    n_bytes = len(build_header(blobs, envelope_metadata(features, b"")))
    if n_bytes > MAX_HEADER_BYTES:
        raise ConfigError(
            f"{len(tensors)} tensors need a header over {MAX_HEADER_BYTES} bytes; split the file"
        )
    return n_bytes


def _index(entries: Sequence[TensorEntry], contents: Contents) -> Index:
    return Index(
        writer=writer_name(),
        content_id=content_id((e.name, e.dtype, e.shape, int(e.checksum, 16)) for e in entries),
        tensors=tuple(entries),
        metadata=None if contents.metadata is None else dict(contents.metadata),
        base=contents.base,
        step=contents.step,
        sharding=contents.sharding,
        tree=contents.tree,
    )


def matching_base(source: UnitSource, base: UnitSource | None) -> UnitSource | None:
    """The base if its dtype and shape fit, else None: the tensor then stands alone."""
    fits = base is not None and (base.dtype, tuple(base.shape)) == (source.dtype, tuple(source.shape))
    return base if fits else None


def _jobs(tensors: Mapping[str, UnitSource], contents: Contents, workers: Workers) -> Iterator[_Job]:
    for name, source in tensors.items():
        base = matching_base(source, contents.bases.get(name))
        n_units = source.dtype.n_units(source.shape)
        plan = plan_lossless(source, base, workers.map) if n_units > CHUNK_UNITS else None
        for begin, end in chunk_bounds(n_units):
            yield _Job(name, source, base, plan, begin, end)


def _encode(job: _Job) -> tuple[Plan, EncodedChunk]:
    plan = plan_lossless(job.source, job.base) if job.plan is None else job.plan
    return plan, encode_chunk(job.source, plan, ChunkSources(job.begin, job.end, job.base))


def _write_frames(
    sink: BinaryIO,
    data_offset: int,
    tensors: Mapping[str, UnitSource],
    contents: Contents,
    workers: Workers,
    progress: Progress | None,
) -> Iterator[tuple[str, FrameHeader, int, int]]:
    """Stream all frames; yields (name, header, offset, n_bytes) of each."""

    offset = 0
    encoded = workers.map(_encode, _jobs(tensors, contents, workers))
    for name, source in tensors.items():
        shape = tuple(source.shape)
        n_units = source.dtype.n_units(shape)
        records: list[ChunkRecord] = []
        plan = plan_lossless(source, None) if not n_units else None
        for begin, end in chunk_bounds(n_units):
            chunk_plan, chunk = next(encoded)
            if plan is None:
                plan = chunk_plan
                sink.seek(data_offset + offset + header_bytes(source.dtype, shape, plan))
            sink.write(chunk.payload)
            records.append(chunk.record)
            if progress:
                progress((end - begin) * source.dtype.unit_bytes)
        assert plan is not None
        header = FrameHeader(source.dtype, shape, plan, tuple(records))
        packed = header.pack()
        n_bytes = len(packed) + header.payload_bytes
        sink.seek(data_offset + offset)
        sink.write(packed)
        sink.seek(data_offset + offset + n_bytes)
        yield name, header, offset, n_bytes
        offset += n_bytes
