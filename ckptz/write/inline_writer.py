"""Writes a file with inline bases. Implements spec/06-container.md#inline-bases.

Frames are copied byte for byte, so values and codes are unchanged; tensors without a frame are encoded
losslessly. The caller chooses the bases to include.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from ckptz.codec.method import Recipe
from ckptz.format.envelope import build_header
from ckptz.format.index import (
    DELTA_FEATURE,
    GROUPS_FEATURE,
    HUFFMAN_FEATURE,
    INDEX_NAME,
    INLINE_FEATURE,
    LOW_RANK_FEATURE,
    MAPS_FEATURE,
    PRODUCTS_FEATURE,
    Index,
    InlineBase,
    TensorEntry,
    envelope_metadata,
    inline_name,
    pack_index,
    writer_name,
)
from ckptz.format.reader import Container, has_own_frame
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.format.written import blob
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
    features |= {*[GROUPS_FEATURE] * bool(groups.group_of)}
    names = [inline_name(level, at) for level, base in enumerate(bases, 1) for at in range(len(base.tensors))]
    names = [*plan.tensors, *names]
    reserved = reserved_header_bytes(names, bytes_to_write(tensors, bases), sorted(features))
    writing = _Writing(sink, reserved, workers, progress)
    own = groups.entries(writing.level(plan))
    inline = tuple(InlineBase(b.content_id, b.file, tuple(writing.level(_copying(b.tensors)))) for b in bases)
    if not writing.has_products:
        features -= {PRODUCTS_FEATURE}
    records = {entry.name: entry.lossy for entry in container.index.tensors}
    entries = tuple(msgspec.structs.replace(entry, lossy=records[entry.name]) for entry in own)
    index = msgspec.structs.replace(
        container.index, writer=writer_name(), tensors=entries, base=None, inline=inline or None
    )
    return writing.finish(index, sorted(features))


def bytes_to_write(tensors: Tensors, bases: Sequence[NeededBase]) -> int:
    """Return the total number of bytes that `progress` will get."""
    return sum(tensor_bytes(own) for own in (tensors, *(base.tensors for base in bases)))


def _features(
    container: Container, recipes: Mapping[str, Recipe], tensors: Tensors, bases: Sequence[NeededBase]
) -> set[str]:
    """Return the features that the file needs, and `products` if it may need it."""
    features = {*container.features} - {
        DELTA_FEATURE,
        INLINE_FEATURE,
        HUFFMAN_FEATURE,
        GROUPS_FEATURE,
        PRODUCTS_FEATURE,
    }
    sources = [source for base in bases for source in base.tensors.values()]
    headers = [source.header for source in sources if has_own_frame(source)]
    plans = [header.plan for header in headers]
    if any(plan.quant_map is not None for plan in plans):
        features |= {MAPS_FEATURE}
    if any(plan.is_low_rank for plan in plans):
        features |= {LOW_RANK_FEATURE}
    copied = [source.header for source in tensors.values() if has_own_frame(source)]
    if any(header.has_huffman for header in (*headers, *copied)):
        features |= {HUFFMAN_FEATURE}
    may_have_products = any(recipe.may_have_products for recipe in recipes.values())
    if may_have_products or any(header.plan.has_products for header in (*headers, *copied)):
        features |= {PRODUCTS_FEATURE}
    return features | ({INLINE_FEATURE} if bases else set())


def _copying(tensors: Tensors) -> FilePlan:
    """Plan a file that copies tensors with frames and encodes the others losslessly."""
    job = WriteJob(tensors=tensors, effort="small")
    frames = {name: source for name, source in tensors.items() if has_own_frame(source)}
    return FilePlan.of(job, Earlier(frames, job.recipes(), {}))


class _Writing:
    """A file being written: reserved space for the header, then frames one after another."""

    def __init__(self, sink: BinaryIO, reserved: int, workers: Workers, progress: Progress | None) -> None:
        self._sink, self._reserved, self._workers = sink, reserved, workers
        self._progress = progress
        self._offset = 0
        self.has_products = False  # whether a frame has contexts by products
        sink.seek(reserved)

    def level(self, plan: FilePlan) -> list[TensorEntry]:
        """Write the frames of one checkpoint in order, and return their index entries."""
        start, entries = self._offset, list[TensorEntry]()
        where = self._sink, self._reserved + start
        for entry, header, _ in write_frames(*where, plan, self._workers, self._progress):
            self.has_products |= header.plan.has_products
            self._offset += entry.n_bytes
            entries.append(msgspec.structs.replace(entry, offset=start + entry.offset, lossy=None))
        return entries

    def finish(self, index: Index, features: Sequence[str]) -> int:
        """Write the index and the header, and return the size of the file."""
        packed = pack_index(index)
        self._sink.write(packed)
        regions = [blob(name, e.offset, e.n_bytes) for name, e in index.placed()]
        regions.append(blob(INDEX_NAME, self._offset, len(packed)))
        self._sink.seek(0)
        self._sink.write(build_header(regions, envelope_metadata(features, packed), self._reserved))
        n_bytes = self._reserved + self._offset + len(packed)
        self._sink.seek(n_bytes)
        return n_bytes
