"""Describes a file that has been written, and changes its header in its place.

What is measured on a file is written into its header later: its frames stay where they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ckptz.errors import ConfigError
from ckptz.format.byte_source import FileBytes
from ckptz.format.dtypes import dtype_of
from ckptz.format.envelope import Envelope, Region, build_header, read_envelope
from ckptz.format.index import (
    INDEX_NAME,
    RESERVED_PREFIX,
    Index,
    Promise,
    QualityRecord,
    TensorEntry,
    envelope_metadata,
    features_of,
    pack_index,
)
from ckptz.format.reader import Container

# Promises of the whole, and so of its tensors together; the first that a file has goes to its tensors.
PROMISED_TENSORS: Final[tuple[Promise, ...]] = ("resume-gap", "quality-drop")


@dataclass(frozen=True, slots=True)
class Written:
    """Sizes, identity and notes of a file that `write_container` wrote."""

    n_tensors: int  # tensors
    original_bytes: int  # bytes of all tensors
    stored_bytes: int  # size of the file
    content_id: str  # identity of the values
    n_deltas: int  # tensors that are stored against the base
    n_lossy: int  # tensors that do not come back bit for bit
    tensor_notes: tuple[tuple[str, str], ...]  # what the user should know of tensors, by name
    notes: tuple[str, ...]  # the same in few lines, and what else the user should know


def check_names(names: Sequence[str]) -> None:
    """Refuse names that a reader would have to refuse."""
    for name in names:
        if name.startswith(RESERVED_PREFIX) or name == "__metadata__":
            raise ConfigError(f"tensor name {name!r} is reserved by ckptz; rename the tensor")


def blob(name: str, begin: int, n_bytes: int) -> Region:
    """Make the region of a frame or of the index."""
    return Region(name, dtype_of("U8"), (n_bytes,), begin, begin + n_bytes)


def promising(entries: Iterable[TensorEntry], quality: Sequence[QualityRecord]) -> tuple[TensorEntry, ...]:
    """Add the file's common promise to the records of its lossy tensors."""
    kept = {record.promise for record in quality}
    promise: Promise = next((one for one in PROMISED_TENSORS if one in kept), "none")
    return tuple(
        entry
        if entry.lossy is None
        else msgspec.structs.replace(entry, lossy=msgspec.structs.replace(entry.lossy, promise=promise))
        for entry in entries
    )


def amend_quality(path: Path, quality: Sequence[QualityRecord]) -> int:
    """Put records into a file in its place; nobody else may read it yet, as it is not atomic.

    Args:
        path: a file that `write_container` wrote, still under a temporary name.
        quality: what was measured on the tensors decoded from it.

    Returns:
        The size of the file.
    """
    envelope, index = _opened(path)
    tensors = promising(index.tensors, quality)
    index = msgspec.structs.replace(index, quality=tuple(quality), tensors=tensors)
    return _replace_index(path, envelope, index)


def amend_metadata(path: Path, more: Mapping[str, str]) -> int:
    """Add to the metadata of a file in its place; see `amend_quality`."""
    envelope, index = _opened(path)
    metadata = {**(index.metadata or {}), **more}
    return _replace_index(path, envelope, msgspec.structs.replace(index, metadata=metadata))


def _opened(path: Path) -> tuple[Envelope, Index]:
    with contextlib.closing(FileBytes(path)) as source:
        envelope = read_envelope(source)
        return envelope, Container(source, envelope).index


def _replace_index(path: Path, envelope: Envelope, index: Index) -> int:
    assert envelope.metadata is not None
    begin, packed = envelope.regions[-1].begin, pack_index(index)
    regions = [*envelope.regions[:-1], blob(INDEX_NAME, begin, len(packed))]
    metadata = envelope_metadata(features_of(envelope.metadata), packed)
    header = build_header(regions, metadata, envelope.data_offset)
    with path.open("r+b") as file:
        file.seek(envelope.data_offset + begin)
        file.write(packed)
        end = file.tell()
        file.truncate(end)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    return end
