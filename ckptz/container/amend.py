"""Writes measurements into a finished file: its index and header change, its frames stay where they are.

Implements spec/06-container.md#index. What is measured on a file can only be known once it is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ckptz.container.byte_source import FileBytes
from ckptz.container.envelope import Envelope, build_header, read_envelope
from ckptz.container.index import (
    INDEX_NAME,
    Index,
    QualityRecord,
    envelope_metadata,
    features_of,
    pack_index,
)
from ckptz.container.reader import Container
from ckptz.container.writer import blob, promising


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
