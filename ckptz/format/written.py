"""The report on a written file, and later changes of its index.

A quality that is measured on a file is added to its index afterwards; its frames do not move.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ckptz.errors import ConfigError
from ckptz.format.byte_source import FileBytes
from ckptz.format.dtypes import dtype_of
from ckptz.format.envelope import Envelope, Region, build_header, read_envelope
from ckptz.format.index import (
    INDEX_NAME,
    Index,
    Promise,
    QualityRecord,
    TensorEntry,
    envelope_metadata,
    features_of,
    is_reserved,
    pack_index,
)
from ckptz.format.reader import Container

# Promises for a whole file; the first one that a file has is recorded for its lossy tensors too.
PROMISED_TENSORS: Final[tuple[Promise, ...]] = ("resume-gap", "quality-drop")


@dataclass(frozen=True, slots=True)
class Written:
    """Sizes, identity and notes of a file that `write_container` wrote."""

    n_tensors: int
    original_bytes: int  # decoded size of all tensors
    stored_bytes: int  # size of the file
    content_id: str  # identity of the values
    n_deltas: int  # tensors stored as deltas to the base
    n_lossy: int  # lossy tensors
    tensor_notes: tuple[tuple[str, str], ...]  # (tensor name, note for the user)
    notes: tuple[str, ...]  # notes for the user, with those on tensors summarized


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for tensor names that the format reserves."""
    for name in names:
        if is_reserved(name):
            raise ConfigError(f"tensor name {name!r} is reserved by ckptz; rename the tensor")


def blob(name: str, begin: int, n_bytes: int) -> Region:
    """Return the envelope region of a frame or of the index."""
    return Region(name, dtype_of("U8"), (n_bytes,), begin, begin + n_bytes)


def with_promise(entries: Iterable[TensorEntry], quality: Sequence[QualityRecord]) -> tuple[TensorEntry, ...]:
    """Return entries whose lossy records have the promise of the whole file."""
    promises = {record.promise for record in quality}
    promise: Promise = next((name for name in PROMISED_TENSORS if name in promises), "none")
    return tuple(
        entry
        if entry.lossy is None
        else msgspec.structs.replace(entry, lossy=msgspec.structs.replace(entry.lossy, promise=promise))
        for entry in entries
    )


def amend_quality(path: Path, quality: Sequence[QualityRecord]) -> int:
    """Replace the quality records in a file that is not published yet; this is not atomic.

    Args:
        path: a file that `write_container` wrote, under its temporary name.
        quality: measurements on the tensors decoded from the file.

    Returns:
        The new size of the file in bytes.
    """
    envelope, index = _opened(path)
    tensors = with_promise(index.tensors, quality)
    index = msgspec.structs.replace(index, quality=tuple(quality), tensors=tensors)
    return _replace_index(path, envelope, index)


def amend_metadata(path: Path, entries: Mapping[str, str]) -> int:
    """Add entries to the metadata of an unpublished file; see `amend_quality`."""
    envelope, index = _opened(path)
    metadata = {**(index.metadata or {}), **entries}
    return _replace_index(path, envelope, msgspec.structs.replace(index, metadata=metadata))


def _opened(path: Path) -> tuple[Envelope, Index]:
    with contextlib.closing(FileBytes(path)) as source:
        envelope = read_envelope(source)
        return envelope, Container(source, envelope).index


def _replace_index(path: Path, envelope: Envelope, index: Index) -> int:
    assert envelope.metadata is not None
    *regions, old = envelope.regions
    with path.open("r+b") as file:
        file.seek(envelope.data_offset + old.begin)
        n_bytes = write_index(file, envelope.data_offset, regions, index, features_of(envelope.metadata))
        file.truncate(n_bytes)
        file.flush()
        os.fsync(file.fileno())
    return n_bytes


def write_index(
    sink: BinaryIO, data_offset: int, regions: Sequence[Region], index: Index, features: Collection[str]
) -> int:
    """Write the index at the position of `sink`, the end of all `regions`, and the header before them.

    Returns:
        The size of the file in bytes, the new position of `sink`.

    Raises:
        ConfigError: the index exceeds the limits of readers.
    """
    packed, begin = pack_index(index), sink.tell() - data_offset
    header_regions = [*regions, blob(INDEX_NAME, begin, len(packed))]
    header = build_header(header_regions, envelope_metadata(features, packed), data_offset)
    sink.write(packed)
    n_bytes = sink.tell()
    sink.seek(0)
    sink.write(header)
    sink.seek(n_bytes)
    return n_bytes
