"""Writes a file with inline bases. Implements spec/06-container.md#inline-bases.

Frames are copied byte for byte, so values and codes are unchanged; tensors without a frame are encoded
losslessly. The caller chooses the bases to include.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from msgspec.structs import replace

from ckptz.codec.method import Recipe
from ckptz.format.index import (
    GROUPS_FEATURE,
    INLINE_FEATURE,
    LOSSLESS_FEATURE,
    LOW_RANK_FEATURE,
    MAPS_FEATURE,
    PRODUCTS_FEATURE,
    WRITER,
    InlineBase,
    inline_name,
)
from ckptz.format.reader import Container, has_own_frame, required_features
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.format.written import blob, write_index
from ckptz.parallel import Workers
from ckptz.write.frame_writer import Earlier, FilePlan, Progress, write_frames
from ckptz.write.groups import grouped
from ckptz.write.job import WriteJob
from ckptz.write.writer import reserved_header_bytes

Tensors = Mapping[str, TensorSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededBase:
    """One base to include in the new file."""

    content_id: str  # content id by which the previous delta refers to it
    file: str  # its file name
    tensors: Tensors  # tensors that previous frames depend on, by name


def write_inline(
    sink: BinaryIO,
    container: Container,
    bases: Sequence[NeededBase],
    workers: Workers,
    progress: Progress | None = None,
    *,
    tensors: Tensors | None = None,
) -> int:
    """Write the checkpoint in `container` with its bases, as one file; returns its size in bytes.

    Args:
        sink: an empty, seekable file.
        container: the file whose tensors, metadata and records are written.
        bases: the bases, nearest first.
        workers: threads.
        progress: gets the decoded bytes of finished tensors.
        tensors: the tensors to write, of which those without a frame are encoded again; by default the frames
            of `container`.

    Raises:
        ChecksumError: stored bytes are damaged.
        ConfigError: there are more tensors than a header or index may have.
    """
    tensors = container.tensors if tensors is None else tensors
    plan, groups = grouped(_copying(tensors), apart=[n for n, s in tensors.items() if has_own_frame(s)])
    features = _features(container, plan.recipes, tensors, bases)
    if groups.group_of:
        features.add(GROUPS_FEATURE)
    names = [inline_name(level, at) for level, base in enumerate(bases, 1) for at in range(len(base.tensors))]
    reserved = reserved_header_bytes([*plan.tensors, *names], bytes_to_write(tensors, bases), features)
    sink.seek(reserved)
    levels = [
        list(write_frames(sink, reserved, level, workers, progress))
        for level in (plan, *(_copying(base.tensors) for base in bases))
    ]
    if not any(PRODUCTS_FEATURE in required_features(header) for level in levels for _, header, _ in level):
        features.discard(PRODUCTS_FEATURE)
    own, *below = ([entry for entry, _, _ in level] for level in levels)
    inline = tuple(
        InlineBase(base.content_id, base.file, tuple(replace(entry, lossy=None) for entry in entries))
        for base, entries in zip(bases, below, strict=True)
    )
    records = {entry.name: entry.lossy for entry in container.index.tensors}
    tensor_entries = tuple(replace(entry, lossy=records[entry.name]) for entry in groups.entries(own))
    index = replace(container.index, writer=WRITER, tensors=tensor_entries, base=None, inline=inline or None)
    regions = [blob(name, entry.offset, entry.n_bytes) for name, entry in index.placed()]
    return write_index(sink, reserved, regions, index, features)


def bytes_to_write(tensors: Tensors, bases: Sequence[NeededBase]) -> int:
    """Return the total number of bytes that `progress` will get."""
    return sum(tensor_bytes(own) for own in (tensors, *(base.tensors for base in bases)))


def _features(
    container: Container, recipes: Mapping[str, Recipe], tensors: Tensors, bases: Sequence[NeededBase]
) -> set[str]:
    """Return the features that the file needs, and `products` if it may need it."""
    files = (tensors, *(base.tensors for base in bases))
    copied = [source for file in files for source in file.values() if has_own_frame(source)]
    features = container.features & {LOSSLESS_FEATURE, MAPS_FEATURE, LOW_RANK_FEATURE}
    features |= {feature for source in copied for feature in required_features(source.header)}
    if any(recipe.may_have_products for recipe in recipes.values()):
        features.add(PRODUCTS_FEATURE)
    if bases:
        features.add(INLINE_FEATURE)
    return features


def _copying(tensors: Tensors) -> FilePlan:
    """Plan a file that copies tensors with frames and encodes the others losslessly."""
    job = WriteJob(tensors=tensors, effort="small")
    frames = {name: source for name, source in tensors.items() if has_own_frame(source)}
    return FilePlan.of(job, Earlier(frames, job.recipes(), {}))
