"""Writes one `.ckptz` file as a stream. Implements spec/06-container.md.

An upper bound of the header's size follows from the names, so that frames are written after reserved space,
and the header last.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

from ckptz.codec.tensor import NO_SIDE_INFORMATION
from ckptz.errors import ConfigError, UnsupportedError
from ckptz.format.dtypes import dtype_of
from ckptz.format.envelope import MAX_HEADER_BYTES, Region, build_header, pack_base_metadata
from ckptz.format.frame import MAX_DIMS, MAX_ELEMENTS
from ckptz.format.index import (
    BASE_METADATA,
    DELTA_FEATURE,
    GROUPS_FEATURE,
    HUFFMAN_FEATURE,
    INDEX_NAME,
    LOSSLESS_FEATURE,
    LOW_RANK_FEATURE,
    MAPS_FEATURE,
    PRODUCTS_FEATURE,
    WRITER,
    Index,
    TensorEntry,
    content_id,
    envelope_metadata,
)
from ckptz.format.reader import required_features
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.format.streams import HUFFMAN_CODES
from ckptz.format.written import Written, blob, check_names, with_promise, write_index
from ckptz.parallel import Workers
from ckptz.write.frame_writer import FilePlan, Progress, write_frames
from ckptz.write.groups import grouped
from ckptz.write.job import WriteJob, prepared


def _lines(notes: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield one line for each note, with all tensors that have it."""
    names: dict[str, list[str]] = {}
    for name, note in notes:
        names.setdefault(note, []).append(name)
    for note, tensors in names.items():
        who = (
            f"tensor {tensors[0]!r}" if len(tensors) == 1 else f"{len(tensors)} tensors, first {tensors[0]!r}"
        )
        yield f"{who}: {note}"


def _check_shapes(tensors: Mapping[str, TensorSource]) -> None:
    for shape, name in {tuple(source.shape): name for name, source in tensors.items()}.items():
        if len(shape) > MAX_DIMS:
            raise UnsupportedError(
                f"tensor {name!r} has {len(shape)} dimensions, a frame at most {MAX_DIMS}; reshape it"
            )
        if math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:
            raise UnsupportedError(f"tensor {name!r} has shape {list(shape)}, beyond 2^48 elements")


def write(sink: BinaryIO, job: WriteJob, workers: Workers, progress: Progress | None = None) -> Written:
    """Write one file into `sink`, a seekable file whose content is replaced.

    Args:
        sink: the file; what an attempt that failed has left in it is dropped.
        job: the job.
        workers: encode the tensors.
        progress: gets the bytes of each chunk.

    Raises:
        ConfigError: the job is invalid; see `prepared`.
    """
    sink.seek(0)
    sink.truncate()
    with prepared(job) as ready:
        written = write_container(sink, FilePlan.of(ready), workers, progress)
        if ready.momentum is not None:
            ready.momentum.snapshot(is_restored=False)
        return written


def write_container(
    sink: BinaryIO, plan: FilePlan, workers: Workers, progress: Progress | None = None
) -> Written:
    """Write a planned file to `sink`, an empty seekable file; `progress` gets the bytes of each chunk."""
    check_names(list(plan.tensors))
    _check_shapes(plan.tensors)
    plan, groups = grouped(plan)
    tensors, job = plan.tensors, plan.job
    features, raw = _features(plan), tensor_bytes(tensors)
    if groups.group_of:
        features.add(GROUPS_FEATURE)
    section = b"" if job.base_metadata is None else pack_base_metadata(job.base_metadata)
    reserved = reserved_header_bytes([*tensors, *[BASE_METADATA] * bool(section)], raw, features)
    sink.seek(reserved)
    frames = list(write_frames(sink, reserved, plan, workers, progress))
    n_deltas = groups.count([entry.name for entry, header, _ in frames if header.plan.needs_base])
    notes = tuple((entry.name, note) for entry, _, note in frames if note)
    if job.base is not None and not n_deltas:
        # No tensor uses the base, so readers need not find it.
        job, section = replace(job, base=None), b""
        features.remove(DELTA_FEATURE)
    used = {feature for _, header, _ in frames for feature in required_features(header)}
    features -= {LOW_RANK_FEATURE, HUFFMAN_FEATURE, PRODUCTS_FEATURE} - used
    entries = groups.entries([entry for entry, _, _ in frames])
    index = _index(entries, job)
    regions = [blob(name, entry.offset, entry.n_bytes) for name, entry in index.placed()]
    if section:
        regions.append(blob(BASE_METADATA, sink.tell() - reserved, len(section)))
        sink.write(section)
    n_bytes = write_index(sink, reserved, regions, index, features)
    return Written(
        n_tensors=len(entries),
        original_bytes=raw,
        stored_bytes=n_bytes,
        content_id=index.content_id,
        n_deltas=n_deltas,
        n_lossy=sum(entry.lossy is not None for entry in entries),
        tensor_notes=notes,
        notes=(*_lines(notes), *job.notes),
    )


def reserved_header_bytes(names: Sequence[str], n_raw_bytes: int, features: Collection[str]) -> int:
    """Compute an upper bound of the header's size in bytes.

    Args:
        names: names of the regions except for the index.
        n_raw_bytes: bytes of the tensors, or of the frames if they are known.
        features: required features of the file.

    Raises:
        ConfigError: the header would exceed its maximum size.
    """
    # Files have less than 10^14 bytes, so each number takes at most 15 digits.
    widest = 10 ** len(str(n_raw_bytes * 2 + (1 << 26) + 4096 * len(names))) - 1
    blobs = [Region(name, dtype_of("U8"), (widest,), widest, widest) for name in (*names, INDEX_NAME)]
    n_bytes = len(build_header(blobs, envelope_metadata(features, b"")))
    if n_bytes > MAX_HEADER_BYTES:
        raise ConfigError(f"{len(names)} tensors need a header over {MAX_HEADER_BYTES} bytes; split the file")
    return n_bytes


def _index(entries: Sequence[TensorEntry], job: WriteJob) -> Index:
    return Index(
        writer=WRITER,
        content_id=content_id((e.name, e.dtype, e.shape, int(e.checksum, 16)) for e in entries),
        tensors=with_promise(entries, job.quality),
        metadata=None if job.metadata is None else dict(job.metadata),
        base=job.base,
        step=job.step,
        sharding=job.sharding,
        tree=job.tree,
        quality=tuple(job.quality),
    )


def _features(plan: FilePlan) -> set[str]:
    """Return the features that the frames of a file may require."""
    guides, recipes = plan.job.guides or {}, plan.recipes.values()
    is_long = any(source.n_patterns >= HUFFMAN_CODES for source in plan.tensors.values())
    may_require = {
        DELTA_FEATURE: plan.job.base is not None,
        MAPS_FEATURE: any(recipe.is_lossy for recipe in recipes),
        LOW_RANK_FEATURE: any(
            recipe.may_be_low_rank and guides.get(name, NO_SIDE_INFORMATION).update_scale is not None
            for name, recipe in plan.recipes.items()
        ),
        HUFFMAN_FEATURE: is_long and plan.effort.huffman_margin is not None,
        PRODUCTS_FEATURE: plan.effort.product_rank > 0 and any(own.may_have_products for own in recipes),
    }
    return {LOSSLESS_FEATURE, *(feature for feature, may in may_require.items() if may)}
