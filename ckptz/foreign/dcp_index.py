"""The index of a step that several ranks wrote: the pieces of each tensor and their files, as JSON.

    {"format": "ckptz.dcp", "version": 2,
     "files": [{"name": "shard-00000-5e1f.ckptz", "rank": 0}, ...],
     "tensors": {"layer.weight": {"dtype": "F32", "shape": [8, 4], "chunks": [
         {"offset": [0, 0], "shape": [4, 4], "file": 0, "tensor": "layer.weight"}, ...]}},
     "objects": {"step": {"file": 0, "tree": {...}}},
     "paths": {"layer.weight": ["layer.weight"], ...},
     "checksum": "0f1e2d3c4b5a6978"}

The checksum is XXH64 of the text before the comma of the checksum, plus a closing brace; version 1 has none.
The index is validated before any file that it names is opened. This module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from ckptz.errors import ChecksumError, ConfigError, CorruptionError, FormatError, UnsupportedError
from ckptz.foreign.dcp import problem_of_parts
from ckptz.foreign.folders import is_file_name
from ckptz.format.bits import xxh64
from ckptz.format.envelope import Count
from ckptz.format.index import Shape
from ckptz.format.publish import publish
from ckptz.run.step_files import INDEX_FILE as INDEX_FILE

VERSION: Final = 2
MAX_BYTES: Final = 1 << 30  # some five million pieces


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored piece of a tensor: its offset and shape in the tensor, and where it is stored."""

    # Tensor `tensor` of file number `file`.

    offset: Shape
    shape: Shape
    file: Count
    tensor: str


class WholeTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor and its pieces."""

    dtype: str
    shape: Shape
    chunks: tuple[Piece, ...]


class StoredObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that is not a tensor, as a tree; tensors within it are in file number `file`."""

    file: Count
    tree: dict[str, Any]


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, and the rank that wrote it."""

    name: str
    rank: Count


class FolderIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of an index; `paths` are those of the nested state that torch's planner flattened."""

    format: Literal["ckptz.dcp"]
    version: Annotated[int, msgspec.Meta(ge=1)]
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    files: tuple[ShardFile, ...]
    tensors: dict[str, WholeTensor]
    objects: dict[str, StoredObject]
    paths: dict[str, tuple[str | int, ...]] | None
    checksum: str | msgspec.UnsetType = msgspec.UNSET

    def layout(self) -> dict[int, set[tuple[Any, ...]]]:
        """Return the pieces of each rank as (name, dtype, tensor shape, offset, piece shape)."""
        by_rank: dict[int, set[tuple[Any, ...]]] = {rank: set() for rank in range(self.ranks)}
        for name, tensor in self.tensors.items():
            for piece in tensor.chunks:
                rank = self.files[piece.file].rank
                by_rank.setdefault(rank, set()).add(
                    (name, tensor.dtype, tensor.shape, piece.offset, piece.shape)
                )
        return by_rank

    def file_of(self, rank: int) -> str | None:
        """Return the name of the file of a rank, or None."""
        return next((file.name for file in self.files if file.rank == rank), None)


class InFolder:
    """Mixin of a storage writer or reader that has a checkpoint folder."""

    _folder: Path | None

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint.

        Raises:
            ConfigError: no folder was set.
        """
        if self._folder is None:
            raise ConfigError(
                f"{type(self).__name__} has no folder; pass it a path, or pass checkpoint_id to save or load"
            )
        return self._folder


class _Head(msgspec.Struct, frozen=True):
    """The fields that all versions have."""

    version: int


def write_index(folder: Path, index: FolderIndex) -> None:
    """Publish an index, which makes the folder a checkpoint."""
    with publish(folder / INDEX_FILE) as sink:
        text = msgspec.json.encode(index)
        sink.write(text[:-1] + _tail(text))


def _tail(text: bytes) -> bytes:
    """Return the text with the checksum that replaces the last brace of an index."""
    return b',"checksum":"%016x"}' % xxh64(text)


def read_index(folder: Path) -> FolderIndex:
    """Read and validate an index.

    Raises:
        FileNotFoundError: no index: the folder is not a checkpoint, or an incomplete one.
        CorruptionError: the index was changed, or is inconsistent.
        UnsupportedError: a newer ckptz wrote it.
    """
    path = folder / INDEX_FILE
    if path.stat().st_size > MAX_BYTES:
        raise CorruptionError(f"{path}: larger than 1 GiB")
    raw = path.read_bytes()
    try:
        version = msgspec.json.decode(raw, type=_Head).version
        if version > VERSION:
            raise UnsupportedError(f"{path}: version {version}; this ckptz reads up to {VERSION}: upgrade it")
        index = msgspec.json.decode(raw, type=FolderIndex)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{path}: {error}") from None
    n_tail = len(_tail(b""))
    if version > 1 and raw[-n_tail:] != _tail(raw[:-n_tail] + b"}"):
        raise ChecksumError(f"{path}: was changed after it was written")
    if problem := _problem(index):
        raise CorruptionError(f"{path}: {problem}")
    return index


def _problem(index: FolderIndex) -> str:
    for file in index.files:
        if not is_file_name(file.name):
            return f"{file.name[:80]!r} is not a plain file name"
    numbers = [piece.file for tensor in index.tensors.values() for piece in tensor.chunks]
    if any(n >= len(index.files) for n in [*numbers, *(stored.file for stored in index.objects.values())]):
        return "names a file that it does not list"
    for name, tensor in index.tensors.items():
        if problem := problem_of_parts(tensor.shape, [(p.offset, p.shape) for p in tensor.chunks]):
            return f"tensor {name!r}: {problem}"
    return ""


def shard_path(folder: Path, index: FolderIndex, number: int) -> Path:
    """Return the path of a file of the folder.

    Raises:
        FormatError: it is missing.
    """
    path = folder / index.files[number].name
    if not path.is_file():
        raise FormatError(f"{path}: is missing, but {INDEX_FILE} names it; copy the complete folder")
    return path
