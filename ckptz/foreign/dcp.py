"""Reads and writes folders of `torch.distributed.checkpoint` in torch's own format.

torch writes them, and loads each part of a tensor, which a shard contains in the format of `torch.save`. The
pickle `.metadata` is read as data, without running code. The parts of a tensor must cover it. torch is
imported when a folder is read or written.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptz.errors import (
    CkptzError,
    ConfigError,
    CorruptionError,
    FormatError,
    TruncatedError,
    UnsupportedError,
    error_context,
    with_context,
)
from ckptz.foreign.folders import is_file_name
from ckptz.foreign.pickled import MAX_BYTES, PickledObject, Unpickler, record
from ckptz.foreign.torch_files import MAX_DIMS, load_part, require_torch
from ckptz.format.byte_source import is_url
from ckptz.format.caches import LRUCache
from ckptz.format.dtypes import dtype_of
from ckptz.format.publish import make_folder, mode_for, publish_together, scratch_folder
from ckptz.format.sources import PATTERN_TYPES, LazySource, Patterns, TensorSource
from ckptz.kernels.floats import Bytes
from ckptz.state.flatten import CODES, Chunks, unflatten
from ckptz.state.skeleton import MAX_DEPTH, MAX_NODES, TensorRef, is_number, pack_node

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape
MAX_CELLS: Final = 1 << 26  # cells of the grid formed by the edges of all parts

MAX_ELEMENTS: Final = (1 << 63) - 1
METADATA_FILE: Final = ".metadata"
SHARD_SUFFIX: Final = ".distcp"
CACHED_TENSORS: Final = 2  # the tensor that is read, and the next, which threads have started
Numbers = tuple[int, ...]
_METADATA: Final = (
    *("metadata.Metadata", "metadata.MetadataIndex", "metadata.StorageMeta", "filesystem._StorageInfo"),
    *("metadata.TensorStorageMetadata", "metadata.BytesStorageMetadata", "metadata.ChunkStorageMetadata"),
    *("metadata.TensorProperties", "metadata._MEM_FORMAT_ENCODING"),
)
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_OTHERS: Final = (
    *("torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"),
    *("pathlib.WindowsPath", "pathlib._local.WindowsPath"),
    *(f"{_SHARDED}.TensorProperties", f"{_SHARDED}.MEM_FORMAT_ENCODING"),
)


def problem_of_parts(shape: tuple[int, ...], parts: Sequence[Box]) -> str:
    """Describe the problem if the parts of a tensor do not cover it exactly; "" if they do.

    Time and memory depend on the number of parts and of cells of their grid, not on the size of the tensor.
    """
    if math.prod(shape) > MAX_ELEMENTS:
        return "has more than 2^63 elements"
    for begin, sizes in parts:
        if not len(begin) == len(sizes) == len(shape):
            return "a part has another number of dimensions"
        if any(b < 0 or n < 0 or b + n > size for b, n, size in zip(begin, sizes, shape, strict=True)):
            return "a part lies outside of it"
    nonempty = [(begin, sizes) for begin, sizes in parts if math.prod(sizes)]
    if sum(math.prod(sizes) for _, sizes in nonempty) != math.prod(shape):
        return "its parts do not cover it exactly"
    return _overlap(shape, nonempty)


def _overlap(shape: tuple[int, ...], parts: Sequence[Box]) -> str:
    """Describe the problem if parts overlap, by marking their cells in the grid of all edges; "" if not."""
    if len(parts) < 2:
        return ""
    begins, sizes = (np.array([part[i] for part in parts], np.int64) for i in (0, 1))
    edges = [
        np.unique([0, size, *low, *(low + n)]) for size, low, n in zip(shape, begins.T, sizes.T, strict=True)
    ]
    cut = [i for i, lines in enumerate(edges) if len(lines) > 2]
    if math.prod(len(edges[i]) - 1 for i in cut) > MAX_CELLS:
        return "its parts are cut in too many different ways"
    first = [np.searchsorted(edges[i], begins[:, i]).tolist() for i in cut]
    last = [np.searchsorted(edges[i], (begins + sizes)[:, i]).tolist() for i in cut]
    is_covered = np.zeros([len(edges[i]) - 1 for i in cut], np.bool_)
    for low, high in zip(zip(*first, strict=True), zip(*last, strict=True), strict=True):
        cells = is_covered[tuple(map(slice, low, high))]
        if cells.any():
            return "its parts overlap"
        cells[...] = True
    return ""


def dcp_files(folder: Path) -> list[Path]:
    """List the files of a checkpoint: `.metadata` and the shards."""
    return sorted(p for p in folder.iterdir() if p.name == METADATA_FILE or p.suffix == SHARD_SUFFIX)


# --- reading ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """The bytes of a file that contain a part of a tensor, or, with offset None, another object."""

    name: str
    offset: Numbers | None
    shape: Numbers
    path: Path
    begin: int
    n_bytes: int

    def load(self) -> Any:
        """Load the tensor or object with torch, without running code.

        Raises:
            FormatError: the file is missing or damaged.
            UnsupportedError: the object needs code.
        """
        try:
            if not self.n_bytes or self.begin + self.n_bytes > self.path.stat().st_size:
                raise TruncatedError(f"{self.path}: is truncated; copy the complete folder")
            with self.path.open("rb") as file:
                file.seek(self.begin)
                return load_part(file.read(self.n_bytes))
        except FileNotFoundError:
            raise FormatError(f"{self.path}: is missing, but {METADATA_FILE} names it") from None
        except CkptzError as error:
            raise with_context(error, repr(self.name)) from None


def _source(
    name: str, torch_type: str, shape: Numbers, parts: Sequence[_StoredPart], cache: LRUCache[Patterns]
) -> LazySource:
    """Return a source for a tensor of the folder, which is read completely and cached."""
    if torch_type not in CODES:
        raise UnsupportedError(f"tensor {name!r} has the dtype {torch_type!r}, which ckptz does not support")
    dtype = dtype_of(CODES[torch_type])
    paths = {part.path for part in parts}  # a missing file raises when it is read
    if all(map(Path.is_file, paths)) and dtype.n_bytes(shape) > sum(path.stat().st_size for path in paths):
        raise TruncatedError(f"tensor {name!r}: is larger than its shards; copy the complete folder")

    def read() -> Patterns:
        return _read(torch_type, shape, parts).view(PATTERN_TYPES[dtype.pattern_bytes])

    return LazySource(dtype, shape, lambda begin, end: cache.get(name, read)[begin:end])


def _read(torch_type: str, shape: Numbers, parts: Sequence[_StoredPart]) -> Bytes:
    """Read a tensor of several parts as bytes [n_bytes]."""
    import torch

    # Not initialized: the parts cover the tensor, and each is checked to have its recorded shape.
    target = torch.empty(shape, dtype=getattr(torch, torch_type), device="cpu")
    for part in parts:
        tensor = part.load()
        if type(tensor) is not torch.Tensor or str(tensor.dtype) != f"torch.{torch_type}":
            raise CorruptionError(f"the type of {part.name!r} differs from {METADATA_FILE}")
        if tuple(tensor.shape) != part.shape:
            raise CorruptionError(f"the shape of a part of {part.name!r} differs from {METADATA_FILE}")
        ends = (begin + n for begin, n in zip(part.offset or (), part.shape, strict=True))
        target[tuple(map(slice, part.offset or (), ends))] = tensor.detach()
    as_bytes: Bytes = target.reshape(-1).view(torch.uint8).numpy()
    return as_bytes


def read_dcp(folder: Path) -> tuple[dict[str, TensorSource], dict[str, Any]]:
    """Read a folder that torch wrote.

    Returns:
        Sources of its tensors by name, which are read on use, and the tree of the nested state.

    Raises:
        ConfigError: torch is not installed.
        FormatError: a file is damaged.
        UnsupportedError: an object needs code, or ckptz lacks a dtype.
    """
    require_torch(folder)
    with error_context(str(folder)):
        tensors, objects, paths = _parse(read_metadata(folder / METADATA_FILE), folder)
        leaves: dict[str, Any] = {name: TensorRef(name) for name in tensors}
        leaves |= {name: _load_object(part) for name, part in objects.items()}
        return tensors, {"root": pack_node(_with_lists(nested(leaves, paths))), "storages": []}


def _load_object(part: _StoredPart) -> Any:
    """Load a value that is not a tensor."""
    try:
        return part.load()
    except UnsupportedError:
        raise UnsupportedError(
            f"{part.name!r} cannot be read without running code from the folder; load it with torch and "
            "save it as plain Python values and tensors"
        ) from None


class Level(dict[Any, Any]):
    """A dict or a list of a state that torch's planner flattened; other dicts are values."""


def nested(leaves: Mapping[str, Any], paths: Any) -> Level:
    """Nest the state that torch's planner flattened: text in a path is a dict key, a number a list index.

    Args:
        leaves: the values by name.
        paths: by name, the path as a tuple; untrusted. A value without one stays at the top.

    Raises:
        CorruptionError: a path is invalid or contradicts another.
    """
    root = Level()
    for name, value in leaves.items():
        path = paths.get(name, (name,)) if isinstance(paths, dict) else (name,)
        if not isinstance(path, tuple) or not all(type(part) in (str, int) for part in path):
            raise CorruptionError(f"the path of {name!r} does not consist of names and numbers")
        if not 1 <= len(path) <= MAX_DEPTH:
            raise CorruptionError(f"the path of {name!r} has {len(path)} parts, limit {MAX_DEPTH}")
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, Level())
            if not isinstance(node, Level):
                raise CorruptionError(f"the path of {name!r} leads through another value")
        if path[-1] in node:
            raise CorruptionError(f"the path of {name!r} is that of another value")
        node[path[-1]] = value
    return root


def _with_lists(root: Level) -> Any:
    """Convert levels with integer keys to lists, whose total length is at most `MAX_NODES`."""
    n_left = MAX_NODES

    def convert(node: Any) -> Any:
        nonlocal n_left
        if not isinstance(node, Level):
            return node
        items = {key: convert(value) for key, value in node.items()}
        if not items or not all(type(key) is int for key in items):
            return items
        n_left -= max(items) + 1
        if min(items) < 0 or n_left < 0:
            raise CorruptionError("a list of the state has an invalid index")
        # Like torch, put None for missing items: it omits empty dicts and lists.
        return [items.get(i) for i in range(max(items) + 1)]

    return convert(root)


# --- the metadata -------------------------------------------------------------------------------------


def read_metadata(path: Path) -> Any:
    """Read `.metadata` as `PickledObject` records of the classes that torch's writers use.

    Raises:
        CorruptionError: the file is damaged.
        UnsupportedError: it contains another class.
    """
    import torch

    if path.stat().st_size > MAX_BYTES:
        raise CorruptionError(f"{METADATA_FILE}: larger than 256 MiB")
    dtypes = [f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    known = [*(f"torch.distributed.checkpoint.{name}" for name in _METADATA), *_OTHERS, *dtypes]
    with error_context(METADATA_FILE), path.open("rb") as file:
        return Unpickler(file, {name: record(name) for name in known}).read_all()


def _parse(raw: Any, folder: Path) -> tuple[dict[str, TensorSource], dict[str, _StoredPart], Any]:
    """Return the tensors, the other objects, and the paths of the flattened state."""
    top = _attributes(raw, "Metadata")
    infos = {_index_of(key): _attributes(info, "_StorageInfo") for key, info in _dict(top, "storage_data")}
    cache: LRUCache[Patterns] = LRUCache(CACHED_TENSORS, lambda _: 1)
    tensors: dict[str, TensorSource] = {}
    objects, stored = {}, list[_StoredPart]()
    for name, entry in _dict(top, "state_dict_metadata"):
        if type(name) is not str:
            raise CorruptionError(f"{METADATA_FILE}: a name is not text")
        if isinstance(entry, PickledObject) and entry.class_name == "BytesStorageMetadata":
            objects[name] = _part(folder, infos, name, None, ())
            continue
        fields = _attributes(entry, "TensorStorageMetadata")
        shape, chunks, parts = _numbers(fields.get("size")), fields.get("chunks"), []
        for chunk in chunks if isinstance(chunks, list | tuple) else ():
            box = _attributes(chunk, "ChunkStorageMetadata")
            offset, sizes = _numbers(box.get("offsets")), _numbers(box.get("sizes"))
            parts.append(_part(folder, infos, name, offset, sizes))
        if problem := problem_of_parts(shape, [(part.offset or (), part.shape) for part in parts]):
            raise CorruptionError(f"tensor {name!r}: {problem}")
        stored += parts
        tensors[name] = _source(name, _dtype(fields.get("properties"), name), shape, parts, cache)
    _check_disjoint([*objects.values(), *stored])
    return tensors, objects, top.get("planner_data")


def _check_disjoint(parts: Sequence[_StoredPart]) -> None:
    """Refuse parts that share bytes, with which a small file could take any amount of memory."""
    ends: dict[Path, tuple[int, str]] = {}
    for part in sorted(parts, key=lambda part: (part.path, part.begin)):
        end, other = ends.get(part.path, (0, ""))
        if part.n_bytes and part.begin < end:
            raise CorruptionError(
                f"{METADATA_FILE}: {other!r} and {part.name!r} share bytes of {part.path.name}"
            )
        ends[part.path] = part.begin + part.n_bytes, part.name


def _dtype(properties: Any, name: str) -> str:
    state = properties.state if isinstance(properties, PickledObject) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, type) or dtype.__module__ != "torch":
        raise CorruptionError(f"tensor {name!r} has no dtype")
    return dtype.__name__


def _attributes(value: Any, class_name: str) -> Mapping[str, Any]:
    if not isinstance(value, PickledObject) or value.class_name != class_name:
        raise CorruptionError(f"{METADATA_FILE}: a {class_name} is missing")
    return value.attributes()


def _dict(attributes: Mapping[str, Any], name: str) -> Iterable[tuple[Any, Any]]:
    value = attributes.get(name)
    if not isinstance(value, dict):
        raise CorruptionError(f"{METADATA_FILE}: has no {name}")
    return value.items()


def _numbers(value: Any) -> Numbers:
    """Return the numbers of a `torch.Size`."""
    items = (
        value.args[0]
        if isinstance(value, PickledObject) and value.class_name == "Size" and value.args
        else None
    )
    if not isinstance(items, tuple) or not all(map(is_number, items)):
        raise CorruptionError(f"{METADATA_FILE}: a size does not consist of numbers")
    if len(items) > MAX_DIMS:
        raise CorruptionError(f"{METADATA_FILE}: a tensor has more than {MAX_DIMS} dimensions")
    return items


def _index_of(key: Any) -> tuple[str, Numbers | None]:
    fields = _attributes(key, "MetadataIndex")
    name, offset = fields.get("fqn"), fields.get("offset")
    if type(name) is not str:
        raise CorruptionError(f"{METADATA_FILE}: a name is not text")
    return name, None if offset is None else _numbers(offset)


def _part(
    folder: Path, infos: Mapping[Any, Any], name: str, offset: Numbers | None, shape: Numbers
) -> _StoredPart:
    """Return a stored part, given the storage information by (name, offset)."""
    info = infos.get((name, offset))
    if info is None:
        raise CorruptionError(f"{METADATA_FILE}: lacks the location of {name!r}")
    file, begin, n_bytes = (info.get(key) for key in ("relative_path", "offset", "length"))
    if type(file) is not str or not is_file_name(file) or not file.endswith(SHARD_SUFFIX):
        raise CorruptionError(f"{METADATA_FILE}: {name!r} is not in a shard")
    if not is_number(begin) or not is_number(n_bytes):
        raise CorruptionError(f"{METADATA_FILE}: {name!r} has no valid position in its shard")
    if info.get("transform_descriptors"):
        raise UnsupportedError(
            f"{name!r} was written with an extension of torch's writer; load it with torch"
        )
    return _StoredPart(name, offset, shape, folder / file, begin, n_bytes)


# --- writing ------------------------------------------------------------------------------------------


def write_dcp(
    folder: Path, tensors: Mapping[str, TensorSource], tree: Any, chunks: Chunks, like: Iterable[Path] = ()
) -> None:
    """Write a folder with torch's own writer; inverse of `read_dcp`.

    Args:
        folder: must not exist, or be empty.
        tensors: by name.
        tree: `Index.tree`, or None for a flat dict of the tensors.
        chunks: yields the patterns of all tensors in order.
        like: files whose common permissions the new files get.

    Raises:
        ConfigError: the state is not a dict.
    """
    require_torch(folder)
    state = unflatten(tensors, tree, scratch_folder(folder), chunks)
    if not isinstance(state, dict):
        raise ConfigError(f"{folder}: the checkpoint is a {type(state).__name__}, but torch needs a dict")
    if not is_url(folder):
        is_new = make_folder(folder)
        _save(folder, state, like, is_new=is_new)
        return
    with tempfile.TemporaryDirectory(prefix="ckptz-") as name, publish_together() as files:
        local = Path(name)
        _save(local, state, (), is_new=False)
        # `.metadata`, which makes the folder a checkpoint, is uploaded last.
        for path in sorted(local.iterdir(), key=lambda path: (path.name == METADATA_FILE, path.name)):
            with path.open("rb") as written, files.file(folder / path.name) as sink:
                shutil.copyfileobj(written, sink, 1 << 20)


def _save(folder: Path, state: dict[Any, Any], like: Iterable[Path], *, is_new: bool) -> None:
    """Write a state with torch's own writer.

    Args:
        folder: must exist.
        state: the state to write.
        like: see `write_dcp`.
        is_new: remove the folder after an error; a folder that existed may have other files.
    """
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    mode = mode_for(folder / METADATA_FILE, like)

    class Files(FileSystem):
        @contextlib.contextmanager
        def create_stream(self, path: str | os.PathLike[str], flags: str) -> Iterator[Any]:
            with open(path, flags, opener=lambda name, bits: os.open(name, bits, mode)) as stream:
                yield stream

    writer = FileSystemWriter(folder)
    writer.fs = Files()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it runs in a single process
            save(state, storage_writer=writer, no_dist=True)
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
