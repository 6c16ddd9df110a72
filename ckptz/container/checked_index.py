"""Reads the index of a `.ckptz` file and holds it against the header around it.

Implements spec/06-container.md#reading, up to the first frame.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Final

from numpy.typing import NDArray

from ckptz.container.envelope import Envelope, Region
from ckptz.container.index import (
    DELTA_FEATURE,
    INDEX_NAME,
    INLINE_FEATURE,
    KEY_DIGEST,
    MAX_INDEX_BYTES,
    OPTIONAL_PREFIX,
    RESERVED_PREFIX,
    Index,
    check_version,
    content_id,
    features_of,
    is_ckptz,
    parse_index,
)
from ckptz.dtypes import dtype_of
from ckptz.errors import ChecksumError, CorruptionError, FormatError

Read = Callable[[int, int], NDArray[Any]]
_CHECKSUM: Final = re.compile("[0-9a-f]{16}")


def read_index(envelope: Envelope, read: Read) -> tuple[Index, set[str]]:
    """Read the index of a file and the features that it requires; `read` gives bytes behind the header.

    Raises:
        FormatError: not a `.ckptz` file, or a damaged one.
        UnsupportedError: it requires what this version does not know.
    """
    if not is_ckptz(envelope.metadata):
        raise FormatError("not a .ckptz file")
    assert envelope.metadata is not None
    check_version(envelope.metadata)
    if not envelope.regions or envelope.regions[-1].name != INDEX_NAME:
        raise CorruptionError(f"the last tensor is not {INDEX_NAME}")
    *frames, region = envelope.regions
    if region.end - region.begin > MAX_INDEX_BYTES + 1:
        raise CorruptionError("index: larger than 64 MiB")
    packed = read(region.begin, region.end - region.begin).tobytes()
    if hashlib.sha256(packed).hexdigest() != envelope.metadata.get(KEY_DIGEST):
        raise ChecksumError("the index was changed after it was written")
    index, features = parse_index(packed), features_of(envelope.metadata)
    if any(r.dtype.name != "U8" or r.shape != (r.end - r.begin,) for r in envelope.regions):
        raise CorruptionError("header: frames and index must have dtype U8 and one dimension")
    _check_places(frames, index)
    _check_entries(index)
    _check_bases(index, features)
    found = content_id((e.name, e.dtype, e.shape, int(e.checksum, 16)) for e in index.tensors)
    if found != index.content_id:
        raise CorruptionError("the content id does not match the tensors' checksums")
    return index, features


def _check_places(frames: list[Region], index: Index) -> None:
    """Require that header and index name the same frames in the same places."""
    regions = [(r.name, r.begin, r.end) for r in frames]
    while regions and regions[-1][0].startswith(OPTIONAL_PREFIX):
        regions.pop()
    if regions != [(name, e.offset, e.offset + e.n_bytes) for name, e in index.placed()]:
        raise CorruptionError("header and index disagree on names or offsets")


def _check_entries(index: Index) -> None:
    for _, entry in index.placed():
        if entry.name.startswith(RESERVED_PREFIX):
            raise CorruptionError(f"a tensor has a name that begins with {RESERVED_PREFIX}")
        dtype_of(entry.dtype).n_bytes(entry.shape)
        if not _CHECKSUM.fullmatch(entry.checksum):
            raise CorruptionError(f"tensor {entry.name!r}: its checksum is not 16 hexadecimal digits")


def _check_bases(index: Index, features: set[str]) -> None:
    if index.base is not None and DELTA_FEATURE not in features:
        raise CorruptionError("the index names a base, and the feature 'delta' is not required")
    if index.inline is None:
        return
    if INLINE_FEATURE not in features:
        raise CorruptionError("the index has inline bases, and the feature 'inline' is not required")
    if index.base is not None:
        raise CorruptionError("the index has both a base and inline ones")
    for base in index.inline:
        if len({entry.name for entry in base.tensors}) != len(base.tensors):
            raise CorruptionError("an inline base has two tensors of one name")
