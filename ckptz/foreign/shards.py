"""Steps of a run that several ranks wrote (`CkptzStorageWriter`), opened as one checkpoint.

A tensor is put together from the pieces of all ranks when it is read, and two tensors at most are held, so
memory does not grow with the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptz.errors import CorruptionError, UnsupportedError, error_context
from ckptz.foreign.dcp_index import FolderIndex, Piece, WholeTensor, read_index, shard_path
from ckptz.format.dtypes import DType, dtype_of
from ckptz.format.sources import PATTERN_TYPES, LazySource, Patterns, TensorSource
from ckptz.parallel import LRUCache
from ckptz.run.exact import exact_of
from ckptz.run.step_files import INDEX_FILE
from ckptz.state.skeleton import TensorRef, pack_node, parse_tree
from ckptz.store.resolve import Checkpoint, open_checkpoint

HELD_TENSORS: Final = 2  # in memory: the one that is read, and the next, which threads have begun


@dataclass(frozen=True, slots=True)
class _Node:
    """A value that is packed for a tree already."""

    node: Any


def is_sharded(folder: Path) -> bool:
    """Return whether a folder holds a complete step of several ranks."""
    return (folder / INDEX_FILE).is_file()


def open_shards(
    folder: Path, search_path: Sequence[Path], held: contextlib.ExitStack
) -> tuple[dict[str, TensorSource], dict[str, Any], tuple[Checkpoint, ...]]:
    """Open all files of a step, as exact as they are there.

    Args:
        folder: of the step.
        search_path: folders to look for bases in.
        held: closes the files.

    Returns:
        Whole tensors by name, the tree of the nested state, and the files.

    Raises:
        FormatError: a file is missing or damaged, or its tensors are not those of the index.
        MissingBaseError: a base is missing.
        UnsupportedError: a dtype of less than a byte, or an object that holds tensors.
    """
    index = read_index(folder)
    paths = [shard_path(folder, index, number) for number in range(len(index.files))]
    files = tuple(
        held.enter_context(contextlib.closing(open_checkpoint(exact_of(path), search_path))) for path in paths
    )
    recent: LRUCache[Patterns] = LRUCache(HELD_TENSORS, lambda _: 1)
    tensors: dict[str, TensorSource] = {
        name: _whole(name, tensor, files, recent) for name, tensor in index.tensors.items()
    }
    return tensors, {"root": _root(folder, index), "storages": []}, files


def _whole(
    name: str, tensor: WholeTensor, files: Sequence[Checkpoint], recent: LRUCache[Patterns]
) -> LazySource:
    """Return a source of a whole tensor, after checking that every piece is there."""
    dtype = dtype_of(tensor.dtype)
    pieces = [_piece(name, piece, dtype, files[piece.file]) for piece in tensor.chunks]
    if dtype.bits < 8 and len(pieces) > 1:
        raise UnsupportedError(f"tensor {name!r} of {tensor.dtype} is split over ranks; load it with torch")

    def read() -> Patterns:
        n_per_element = dtype.n_patterns(tensor.shape) // max(int(np.prod(tensor.shape)), 1)
        whole = np.empty((*tensor.shape, n_per_element), PATTERN_TYPES[dtype.pattern_bytes])
        for piece, source in zip(tensor.chunks, pieces, strict=True):
            places = tuple(slice(b, b + n) for b, n in zip(piece.offset, piece.shape, strict=True))
            whole[places] = _patterns_of(source).reshape(*piece.shape, n_per_element)
        return whole.reshape(-1)

    if len(pieces) == 1:
        only = pieces[0]
        return LazySource(dtype, tensor.shape, only.patterns)
    return LazySource(dtype, tensor.shape, lambda begin, end: recent.get(name, read)[begin:end])


def _patterns_of(source: TensorSource) -> Patterns:
    chunks = [source.patterns(begin, end) for begin, end in source.chunk_bounds()]
    return np.concatenate(chunks) if chunks else np.empty(0, PATTERN_TYPES[source.dtype.pattern_bytes])


def _piece(name: str, piece: Piece, dtype: DType, file: Checkpoint) -> TensorSource:
    source = file.tensors.get(piece.tensor)
    if source is None:
        raise CorruptionError(f"{file.name}: has no tensor {piece.tensor!r}, which {INDEX_FILE} names")
    if (source.dtype, tuple(source.shape)) != (dtype, piece.shape):
        stored, wanted = f"{source.dtype.name} {list(source.shape)}", f"{dtype.name} {list(piece.shape)}"
        what = f"tensor {piece.tensor!r} of {name!r} is {stored}, and {INDEX_FILE} says {wanted}"
        raise CorruptionError(f"{file.name}: {what}")
    return source


def _root(folder: Path, index: FolderIndex) -> Any:
    """Return the JSON tree of the state: nested as the planner of torch flattened it."""
    leaves: dict[str, Any] = {name: TensorRef(name) for name in index.tensors}
    for name, stored in index.objects.items():
        with error_context(f"{folder / INDEX_FILE}: object {name!r}"):
            leaves[name] = _Node(_node(name, stored.tree))
    nested: dict[Any, Any] = {}
    for name, value in leaves.items():
        *above, last = (index.paths or {}).get(name, (name,))
        level = nested
        for part in above:
            level = level.setdefault(part, {})
        level[last] = value
    return pack_node(_with_lists(nested), _leaf)


def _node(name: str, raw: dict[str, Any]) -> Any:
    """Return the node of an object, which the tree of its file holds under its name."""
    tree = parse_tree(raw)
    if type(tree.root) is not dict or list(tree.root) != [name]:
        raise CorruptionError("its tree holds something else")
    if tree.refs:
        raise UnsupportedError("holds tensors; load the step with torch.distributed.checkpoint")
    [[_, node]] = raw["root"]["dict"]
    return node


def _leaf(value: Any, path: Any) -> dict[str, Any]:
    del path
    packed: dict[str, Any] = value.node if isinstance(value, _Node) else value.pack()
    return packed


def _with_lists(node: Any) -> Any:
    """Turn dicts with the keys 0 to n - 1 into lists, which torch's planner flattens to numbers."""
    if not isinstance(node, Mapping):
        return node
    made = {key: _with_lists(value) for key, value in node.items()}
    is_list = bool(made) and all(type(key) is int for key in made) and set(made) == set(range(len(made)))
    return [made[i] for i in range(len(made))] if is_list else made
