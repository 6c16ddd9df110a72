"""Folders of `torch.distributed.checkpoint`, as torch's own writer makes them: read whole, and written.

Tensors go through torch's own reader and writer. The one file that torch unpickles, `.metadata`, is read
as data here, so no code runs from it. torch is imported when a folder is read or written.
"""

from __future__ import annotations

import shutil
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptz.codec.units import UNIT_TYPES, TensorSource, Units
from ckptz.container.publish import make_folder
from ckptz.dtypes import DType, dtype_of
from ckptz.errors import CkptzError, ConfigError, CorruptionError, FormatError, UnsupportedError, named
from ckptz.formats.pickled import Made, Symbol, read_pickled
from ckptz.formats.torch_files import require_torch
from ckptz.tree.flatten import CODES
from ckptz.tree.skeleton import MAX_NODES, pack_node, refuse_leaf
from ckptz.tree.unflatten import Chunks, unflatten

METADATA_FILE: Final = ".metadata"
SHARD_SUFFIX: Final = ".distcp"
KEPT_TENSORS: Final = 2  # in memory: the one that is read, and the next, which other threads begin with

Numbers = tuple[int, ...]


def is_dcp(folder: Path) -> bool:
    """Whether torch wrote the folder."""
    return (folder / METADATA_FILE).is_file()


def dcp_files(folder: Path) -> list[Path]:
    """The files that a checkpoint consists of."""
    return sorted(p for p in folder.iterdir() if p.name == METADATA_FILE or p.suffix == SHARD_SUFFIX)


# --- reading ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A stored part of a tensor or object; `offset` is None for the latter."""

    name: str
    offset: Numbers | None
    shape: Numbers
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor as the metadata describe it."""

    dtype: str
    shape: Numbers
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """An open folder: tensors by name, and the nested state as a tree."""

    tensors: Mapping[str, TensorSource]
    tree: dict[str, Any]


def open_dcp(folder: Path) -> DcpFolder:
    """Open a folder that torch wrote; tensors are read when they are asked for, one or two at a time.

    Raises:
        ConfigError: torch is not installed.
        FormatError: damaged.
        UnsupportedError: an object that needs code, or an element type that ckptz does not have.
    """
    require_torch(folder)
    try:
        wholes, objects, paths = _parse(read_pickled((folder / METADATA_FILE).read_bytes()))
        reader = _Reader(folder)
        tensors = {
            name: _Tensor(name, whole, dtype_of(_code(whole.dtype, name)), reader)
            for name, whole in wholes.items()
        }
        leaves: dict[str, Any] = {name: _Leaf(name) for name in wholes}
        leaves |= {name: reader.object(part) for name, part in objects.items()}
        state = _nested(leaves, paths)
        tree = {"root": pack_node(state, _pack_leaf), "storages": []}
    except CkptzError as error:
        raise named(error, str(folder)) from None
    return DcpFolder(tensors, tree)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Stands for a tensor in a nested state."""

    name: str


def _pack_leaf(value: Any, path: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, _Leaf):
        refuse_leaf(value, path)
    return {"tensor": value.name}


def _nested(leaves: Mapping[str, Any], paths: Any) -> Any:
    """The state that torch's planner flattened: text means a dict, a number a list."""
    if not isinstance(paths, dict):
        return dict(leaves)
    root: dict[Any, Any] = {}
    for name, value in leaves.items():
        path = paths.get(name, (name,))
        if not isinstance(path, tuple) or not path or not all(type(p) in (str, int) for p in path):
            raise CorruptionError(f"the path of {name!r} is not made of names and numbers")
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise CorruptionError(f"the path of {name!r} leads through another value")
        node[path[-1]] = value
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    made = {key: _with_lists(value) for key, value in node.items()}
    if made and all(type(key) is int for key in made):
        if not 0 <= min(made) <= max(made) < MAX_NODES:
            raise CorruptionError("a list of the state has no such position")
        # torch leaves empty dicts and lists out, and puts None in their places in a list, as is done here.
        return [made.get(i) for i in range(max(made) + 1)]
    return made


class _Tensor(TensorSource):
    """A tensor of the folder as a source of units."""

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, name: str, whole: _Whole, dtype: DType, reader: _Reader) -> None:
        self.dtype, self.shape = dtype, whole.shape
        self._name, self._whole, self._reader = name, whole, reader

    def units(self, begin: int, end: int) -> Units:
        """See `TensorSource.units`."""
        return self._reader.tensor(self._name, self._whole, self.dtype)[begin:end]


@dataclass(slots=True)
class _Reader:
    """torch's reader, and the tensors that it read last."""

    folder: Path
    _kept: OrderedDict[str, Units] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tensor(self, name: str, whole: _Whole, dtype: DType) -> Units:
        """All units of a tensor."""
        with self._lock:
            if name not in self._kept:
                self._kept[name] = self._read(whole, dtype)
            self._kept.move_to_end(name)
            while len(self._kept) > KEPT_TENSORS:
                self._kept.popitem(last=False)
            return self._kept[name]

    def _read(self, whole: _Whole, dtype: DType) -> Units:
        import torch

        target = torch.empty(whole.shape, dtype=getattr(torch, whole.dtype))
        self._run(whole.parts, _Target(target))
        return target.reshape(-1).view(torch.uint8).numpy().view(UNIT_TYPES[dtype.unit_bytes])

    def object(self, part: _Part) -> Any:
        """What is no tensor."""
        target = _Target(None)
        self._run([part], target)
        return target.value

    def _run(self, parts: Sequence[_Part], target: _Target) -> None:
        """Let torch read some parts."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

        reader, items = FileSystemReader(self.folder), []
        for part in parts:
            index = MetadataIndex(part.name, part.offset)
            reader.storage_data[index] = _StorageInfo(**part.info)
            kind = LoadItemType.BYTE_IO if part.offset is None else LoadItemType.TENSOR
            offset, zeros = part.offset or (), (0,) * len(part.shape)
            sizes: list[Any] = [torch_size(numbers) for numbers in (offset, zeros, part.shape)]
            items.append(ReadItem(kind, index, sizes[0], index, sizes[1], sizes[2]))
        try:
            reader.read_data(LoadPlan(items), target)  # type: ignore[arg-type]  # has what read_data calls
        except (CkptzError, MemoryError):
            raise
        except FileNotFoundError as error:
            raise FormatError(f"{error.filename}: is missing, and {METADATA_FILE} names it") from None
        except Exception as error:  # torch has no error class of its own for damaged files
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CorruptionError(f"{parts[0].name!r} cannot be read: {first}") from None


def torch_size(numbers: Numbers) -> Any:
    """A `torch.Size`."""
    import torch

    return torch.Size(numbers)


class _Target:
    """Takes what torch read: what a planner is to its reader."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.value: Any = None

    def resolve_tensor(self, item: Any) -> Any:
        """Where a part of the tensor goes."""
        ends = (begin + n for begin, n in zip(item.dest_offsets, item.lengths, strict=True))
        return self._tensor[tuple(map(slice, item.dest_offsets, ends))]

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        """Nothing: it is where it belongs."""

    def load_bytes(self, item: Any, data: Any) -> None:
        """An object, without running code from it."""
        import torch

        try:
            self.value = torch.load(data, map_location="cpu", weights_only=True)
        except Exception:  # torch has no error class of its own for it
            name = item.storage_index.fqn
            raise UnsupportedError(
                f"{name!r} cannot be read without running code from the folder; load it with torch and "
                "save it as plain Python values and tensors"
            ) from None


def _code(dtype: str, name: str) -> str:
    if dtype not in CODES:
        raise UnsupportedError(f"tensor {name!r} has the element type {dtype!r}, which ckptz does not have")
    return CODES[dtype]


# --- the metadata -------------------------------------------------------------------------------------


def _parse(raw: Any) -> tuple[dict[str, _Whole], dict[str, _Part], Any]:
    """(tensors, objects, how the state was flattened)."""
    top = _attributes(raw, "Metadata")
    places = {_index_of(key): _attributes(info, "_StorageInfo") for key, info in top["storage_data"].items()}
    wholes, objects = {}, {}
    for name, entry in top["state_dict_metadata"].items():
        if isinstance(entry, Made) and entry.kind == "BytesStorageMetadata":
            objects[name] = _Part(name, None, (), _place(places, name, None))
        else:
            wholes[name] = _whole(name, entry, places)
    return wholes, objects, top.get("planner_data")


def _whole(name: str, entry: Any, places: Mapping[Any, Any]) -> _Whole:
    found = _attributes(entry, "TensorStorageMetadata")
    shape, parts = _numbers(found["size"]), []
    for chunk in found["chunks"]:
        box = _attributes(chunk, "ChunkStorageMetadata")
        offset, sizes = _numbers(box["offsets"]), _numbers(box["sizes"])
        if not len(offset) == len(sizes) == len(shape):
            raise CorruptionError(f"a part of tensor {name!r} has another number of dimensions")
        parts.append(_Part(name, offset, sizes, _place(places, name, offset)))
    if sum(int(np.prod(part.shape, dtype=object)) for part in parts) != np.prod(shape, dtype=object):
        raise CorruptionError(f"the parts of tensor {name!r} do not make it whole")
    return _Whole(_dtype(found["properties"], name), shape, tuple(parts))


def _dtype(properties: Any, name: str) -> str:
    state = properties.state if isinstance(properties, Made) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Symbol) or not dtype.name.startswith("torch."):
        raise CorruptionError(f"tensor {name!r} has no element type")
    return dtype.name.removeprefix("torch.")


def _attributes(value: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, Made) or value.kind != kind:
        raise CorruptionError(f"{METADATA_FILE}: holds no {kind} where one belongs")
    return value.attributes()


def _numbers(value: Any) -> Numbers:
    """The numbers of a `torch.Size`."""
    items = value.args[0] if isinstance(value, Made) and value.kind == "Size" and value.args else None
    if not isinstance(items, tuple) or not all(type(n) is int and n >= 0 for n in items):
        raise CorruptionError(f"{METADATA_FILE}: a size is not made of numbers")
    return items


def _index_of(key: Any) -> tuple[str, Numbers | None]:
    found = _attributes(key, "MetadataIndex")
    offset = found.get("offset")
    return found["fqn"], None if offset is None else _numbers(offset)


def _place(places: Mapping[Any, Any], name: str, offset: Numbers | None) -> Mapping[str, Any]:
    """What torch's reader wants to know of a part."""
    info = places.get((name, offset))
    if info is None:
        raise CorruptionError(f"{METADATA_FILE}: does not say where {name!r} is stored")
    path = info.get("relative_path")
    if not isinstance(path, str) or Path(path).name != path or not path.endswith(SHARD_SUFFIX):
        raise CorruptionError(f"{METADATA_FILE}: {path!r} is not the name of a shard")
    if info.get("transform_descriptors"):
        raise UnsupportedError(f"{name!r} went through an extension of torch's writer; load it with torch")
    return {key: info[key] for key in ("relative_path", "offset", "length")}


# --- writing ------------------------------------------------------------------------------------------


def write_dcp(folder: Path, tensors: Mapping[str, TensorSource], tree: Any, chunks: Chunks) -> None:
    """Write a folder with torch's own writer; inverse of `open_dcp`.

    Args:
        folder: must not exist, or be empty.
        tensors: by name.
        tree: `Index.tree`, or None for a flat dict of the tensors.
        chunks: gives the units of all tensors in order.

    Raises:
        ConfigError: the state is no dict, as torch wants it.
    """
    require_torch(folder)
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = unflatten(tensors, tree, folder.absolute().parent, chunks)
    if not isinstance(state, dict):
        raise ConfigError(f"{folder}: the checkpoint is a {type(state).__name__}, and torch saves dicts here")
    is_new = make_folder(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs in a single process
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    except BaseException:
        if is_new:  # else what is in it is another's
            shutil.rmtree(folder, ignore_errors=True)
        raise
