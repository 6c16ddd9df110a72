"""XXH64 with seed 0. Implements spec/01-integers.md#xxh64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]  # Python 3.12 and later


def xxh64(data: Buffer) -> int:
    """Compute XXH64 of a contiguous buffer."""
    return int(xxhash.xxh64_intdigest(data))


def xxh64_of_parts(parts: Iterable[Buffer]) -> int:
    """Compute XXH64 of buffers one after another."""
    digest = xxhash.xxh64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


def combine(checksums: Iterable[int]) -> int:
    """Compute a tensor's checksum: XXH64 over the checksums of its chunks, each as a little-endian u64."""
    return xxh64(b"".join(value.to_bytes(8, "little") for value in checksums))
