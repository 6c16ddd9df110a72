"""The committed vectors of spec/vectors, and the states that the reader decodes from them."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptz.errors import (
    ChecksumError,
    CkptzError,
    CorruptionError,
    MissingBaseError,
    TruncatedError,
    UnsupportedError,
)
from ckptz.foreign.folders import check_sharding
from ckptz.format.byte_source import MemoryBytes
from ckptz.state.flatten import unflatten
from ckptz.store.resolve import Checkpoint, open_checkpoint
from tests.support.spec_files import Files, read_all
from tests.support.spec_support import SPEC

FOLDER = SPEC / "vectors"
ERROR_OF_KIND: dict[str, type[CkptzError]] = {
    "truncated": TruncatedError,
    "checksum": ChecksumError,
    "corrupt": CorruptionError,
    "unsupported": UnsupportedError,
    "missing base": MissingBaseError,
}
State = tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, str] | None]


@dataclass(frozen=True)
class Vector:
    """One row of the manifest, and its files."""

    row: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def paths(self) -> list[Path]:
        """The files of the vector; the first is the one to read."""
        return [FOLDER / file["path"] for file in self.row["files"]]

    def files(self) -> Files:
        return {path.name: path.read_bytes() for path in self.paths}


@functools.cache
def vectors(folder: str = "") -> tuple[Vector, ...]:
    """Return all vectors, or those of one folder."""
    rows = json.loads((FOLDER / "manifest.json").read_text())["vectors"]
    return tuple(Vector(row) for row in rows if row["name"].startswith(folder) and "files" in row)


def sessions() -> list[dict[str, Any]]:
    """Return the rows of the manifest that are messages of links."""
    rows = json.loads((FOLDER / "manifest.json").read_text())["vectors"]
    return [row for row in rows if "messages" in row]


VALID = vectors("valid/") + vectors("chain/")
INVALID = vectors("invalid/")


def follow(checkpoint: Checkpoint, folder: Path) -> None:
    """Check the records of shards, and build the nested checkpoint, if the index has them."""
    index = None if checkpoint.container is None else checkpoint.container.index
    if index is not None and index.sharding is not None:
        check_sharding(index.sharding, list(checkpoint.tensors))
    if index is not None and index.tree is not None:
        unflatten(checkpoint.tensors, index.tree, folder)


def state_of(checkpoint: Checkpoint, spool: Path | None = None) -> State:
    """Decode names, dtypes, shapes, bytes and metadata; with a folder, also check the other records."""
    try:
        if spool is not None:
            follow(checkpoint, spool)
        patterns = read_all(checkpoint)
        tensors = {n: (s.dtype.name, tuple(s.shape), patterns[n]) for n, s in checkpoint.tensors.items()}
        metadata = checkpoint.metadata
        return tensors, None if metadata is None else dict(metadata)
    finally:
        checkpoint.close()


def read_bytes(data: bytes, folder: Path | None = None) -> State:
    """Decode a file in memory whose bases are in `folder`."""
    return state_of(open_checkpoint(MemoryBytes(data), [folder] if folder else []))


def read_path(path: Path, spool: Path | None = None) -> State:
    """Decode a file with its bases."""
    return state_of(open_checkpoint(path), spool)
