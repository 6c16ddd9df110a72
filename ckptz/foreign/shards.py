"""Reads steps that several ranks wrote (`CkptzStorageWriter`) as one checkpoint.

A tensor is assembled from the pieces of all ranks when it is read. At most two tensors are in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckptz.errors import CorruptionError, UnsupportedError, error_context
from ckptz.foreign.dcp import CACHED_TENSORS, Level, nested
from ckptz.foreign.dcp_index import FolderIndex, Piece, WholeTensor, read_index, shard_path
from ckptz.format.caches import LRUCache
from ckptz.format.dtypes import DType, dtype_of
from ckptz.format.sources import PATTERN_TYPES, LazySource, Patterns, TensorSource
from ckptz.run.residuals import residual_or_file
from ckptz.run.step_files import INDEX_FILE
from ckptz.state.skeleton import TensorRef, pack_node, parse_tree
from ckptz.store.resolve import Checkpoint, open_checkpoint


def read_ranks(
    folder: Path, search_path: Sequence[Path], stack: contextlib.ExitStack
) -> tuple[dict[str, TensorSource], dict[str, Any], tuple[Checkpoint, ...]]:
    """Read all files of a step, exact where there are residual files.

    Args:
        folder: of the step.
        search_path: folders in which bases are searched.
        stack: closes the files.

    Returns:
        Complete tensors by name, the tree of the nested state, and the open files.

    Raises:
        FormatError: a file is missing or damaged, or does not match the index.
        MissingBaseError: a base is missing.
        UnsupportedError: a split tensor of less than a byte per element, or an object with tensors.
    """
    index = read_index(folder)
    paths = [shard_path(folder, index, number) for number in range(len(index.files))]
    files = tuple(
        stack.enter_context(contextlib.closing(open_checkpoint(residual_or_file(path), search_path)))
        for path in paths
    )
    cache: LRUCache[Patterns] = LRUCache(CACHED_TENSORS, lambda _: 1)
    tensors: dict[str, TensorSource] = {
        name: _assemble(name, tensor, files, cache) for name, tensor in index.tensors.items()
    }
    return tensors, {"root": _root(folder, index), "storages": []}, files


def _assemble(
    name: str, tensor: WholeTensor, files: Sequence[Checkpoint], cache: LRUCache[Patterns]
) -> LazySource:
    """Return a source of a tensor of several pieces, after checking that all pieces exist."""
    dtype = dtype_of(tensor.dtype)
    pieces = [_piece(name, piece, dtype, files[piece.file]) for piece in tensor.chunks]
    if dtype.bits < 8 and len(pieces) > 1:
        raise UnsupportedError(f"tensor {name!r} of {tensor.dtype} is split over ranks; load it with torch")

    def read() -> Patterns:
        n_per_element = dtype.n_patterns(tensor.shape) // max(int(np.prod(tensor.shape)), 1)
        patterns = np.empty((*tensor.shape, n_per_element), PATTERN_TYPES[dtype.pattern_bytes])
        for piece, source in zip(tensor.chunks, pieces, strict=True):
            box = tuple(slice(b, b + n) for b, n in zip(piece.offset, piece.shape, strict=True))
            patterns[box] = _patterns_of(source).reshape(*piece.shape, n_per_element)
        return patterns.reshape(-1)

    if len(pieces) == 1:
        return LazySource(dtype, tensor.shape, pieces[0].patterns)
    return LazySource(dtype, tensor.shape, lambda begin, end: cache.get(name, read)[begin:end])


def _patterns_of(source: TensorSource) -> Patterns:
    chunks = [source.patterns(begin, end) for begin, end in source.chunk_bounds()]
    return np.concatenate(chunks) if chunks else np.empty(0, PATTERN_TYPES[source.dtype.pattern_bytes])


def _piece(name: str, piece: Piece, dtype: DType, file: Checkpoint) -> TensorSource:
    source = file.tensors.get(piece.tensor)
    if source is None:
        raise CorruptionError(f"{file.name}: has no tensor {piece.tensor!r}, which {INDEX_FILE} names")
    if (source.dtype, tuple(source.shape)) != (dtype, piece.shape):
        raise CorruptionError(
            f"{file.name}: tensor {piece.tensor!r} of {name!r} is {source.dtype.name} {list(source.shape)}, "
            f"but {INDEX_FILE} says {dtype.name} {list(piece.shape)}"
        )
    return source


def _root(folder: Path, index: FolderIndex) -> Any:
    """Return the JSON tree of the state, nested again after torch's planner flattened it.

    Raises:
        CorruptionError: an object or a path is invalid.
        UnsupportedError: an object contains tensors.
    """
    leaves: dict[str, Any] = {name: TensorRef(name) for name in index.tensors}
    for name, stored in index.objects.items():
        with error_context(f"{folder / INDEX_FILE}: object {name!r}"):
            tree = parse_tree(stored.tree)
            if type(tree.root) is not dict or list(tree.root) != [name]:
                raise CorruptionError("its tree has another root")
            if tree.refs:
                raise UnsupportedError("contains tensors; load the step with torch.distributed.checkpoint")
            leaves[name] = tree.root[name]
    with error_context(str(folder / INDEX_FILE)):
        return pack_node(_with_lists(nested(leaves, index.paths)))


def _with_lists(node: Any) -> Any:
    """Convert dicts with the keys 0 to n - 1 to lists, because torch's planner flattens lists that way."""
    if not isinstance(node, Level):
        return node
    items = {key: _with_lists(value) for key, value in node.items()}
    is_list = bool(items) and all(type(key) is int for key in items) and set(items) == set(range(len(items)))
    return [items[i] for i in range(len(items))] if is_list else items
