"""`torch.distributed.checkpoint` with `.ckptz` files: each rank writes its shards, any number of ranks reads.

    dcp.save(state, storage_writer=CkptzStorageWriter("run/step-100", base="run/step-50"))
    dcp.load(state, storage_reader=CkptzStorageReader("run/step-100"))

A folder holds one file per rank, the files that these are stored against, and a JSON index, which is
written last: without it the folder is no checkpoint. No pickle. A shard's file records its offsets and
the shapes of the whole tensors too. Reading decodes only the chunks that a rank's own shards touch. See
docs/frameworks.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckptz.codec.guides import Guide
from ckptz.codec.units import UnitSource
from ckptz.codec.values import KINDS
from ckptz.config import KMeans
from ckptz.convert.spool import unflatten
from ckptz.convert.storages import flatten
from ckptz.convert.tree import parse_tree
from ckptz.dtypes import dtype_of
from ckptz.errors import CkptzError, ConfigError, CorruptionError, UnsupportedError, named
from ckptz.frameworks import DTYPE_CODES
from ckptz.frameworks.torch import torch_dtype
from ckptz.handle import PathLike, safe_open
from ckptz.integrations.dcp_index import (
    INDEX_FILE,
    VERSION,
    FolderIndex,
    Piece,
    ShardFile,
    StoredObject,
    WholeTensor,
    read_index,
    shard_path,
    write_index,
)
from ckptz.integrations.linked import DEFAULTS, Chain, ChainOptions, Draft, drop_unneeded, on_host
from ckptz.integrations.merging import TIMEOUT, merged_guides, own_group
from ckptz.integrations.plain_types import from_plain
from ckptz.integrations.versions import warn_untested
from ckptz.roles import Rule
from ckptz.store.resolve import SUFFIX, open_checkpoint
from ckptz.torch import source_of

TESTED: Final = ((2, 13), (2, 13))  # first and last torch that tests/test_dcp.py ran with
warn_untested("torch", torch.__version__, TESTED)

__all__ = ["ChainOptions", "CkptzStorageReader", "CkptzStorageWriter"]

SHARD_PREFIX: Final = "shard-"
SHARDS_KEY: Final = "ckptz.shards"  # in a file's metadata: offset and whole shape of each tensor


@dataclass(frozen=True, slots=True)
class _Orders:
    """What the coordinator tells every rank.

    Attributes:
        token: of this save, in the names of its files.
        n_ranks: that take part.
        split: names of tensors that are split over ranks and may become lossy, in the order of collectives.
        kinds: their dtypes.
        exact: names of tensors that are too small to become lossy, whole.
        is_anchor: store nothing against the base.
    """

    token: str
    n_ranks: int
    split: tuple[str, ...]
    kinds: dict[str, str]
    exact: frozenset[str]
    is_anchor: bool


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where one item of a plan went; `tree` for what is no tensor."""

    rank: int
    file: str
    tensor: str = ""
    offset: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    tree: dict[str, Any] | None = None


class CkptzStorageWriter(StorageWriter):
    """Writes a checkpoint of `torch.distributed.checkpoint`.

    With `KMeans` the sketches of split tensors are summed over the ranks, so that all shards get one map and
    restore to what the whole tensor would. That takes a gloo group, which the constructor makes unless it
    is given one: construct on all ranks at the same point. A failing rank fails the save on all.

    Args:
        path: the folder; `checkpoint_id` of a save goes before it.
        options: how it is stored.
        base: folder of an earlier checkpoint to store the shards against. Where the layout of shards
            has changed since, they stand alone.
        group: gloo group for the sketches; used by nothing else at the same time.
        timeout: of the group that the constructor makes.

    Raises:
        ConfigError: `KMeans` by sensitivity, which is not known of whole tensors.
    """

    def __init__(
        self,
        path: PathLike | None = None,
        *,
        options: ChainOptions = DEFAULTS,
        base: PathLike | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        super().__init__()
        self._options, self._folder = options, None if path is None else Path(path)
        self._base = None if base is None else Path(base)
        self._rank, self._group = 0, group
        if isinstance(options.config, KMeans):
            if {options.config.prune_by, options.config.protect_by} != {"magnitude"}:
                raise ConfigError("shards are ranked by magnitude; leave prune_by and protect_by out")
            self._group = group or own_group(timeout)

    # --- StorageWriter --------------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders of this machine, or mounted ones."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins."""
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    @property
    def folder(self) -> Path:
        """Where it is written.

        Raises:
            ConfigError: nobody said so.
        """
        if self._folder is None:
            raise ConfigError("CkptzStorageWriter has no folder; give it a path, or the save a checkpoint_id")
        return self._folder

    def storage_meta(self) -> StorageMeta | None:
        """What goes into the metadata of torch."""
        return StorageMeta(checkpoint_id=self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called on all ranks, first."""
        self._rank = kwargs.get("rank") or 0
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "CkptzStorageWriter writes one index for all ranks; leave out use_collectives"
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Called on all ranks."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called on the coordinator: what all ranks have to know of one another.

        Raises:
            ConfigError: ranks disagree on the dtype or the shape of a tensor.
        """
        layout = _layout_of(plans)
        whole = _whole_tensors(plans)
        config = self._options.config
        split: list[str] = []
        if isinstance(config, KMeans):
            n_pieces = Counter(piece[0] for pieces in layout.values() for piece in pieces)
            split = sorted(n for n, (code, _) in whole.items() if n_pieces[n] > 1 and code in KINDS)
        exact = [
            n for n, (_, shape) in whole.items() if math.prod(shape) < getattr(config, "min_elements", 0)
        ]
        orders = _Orders(
            token=secrets.token_hex(4),
            n_ranks=len(plans),
            split=tuple(split),
            kinds={name: whole[name][0] for name in split},
            exact=frozenset(exact),
            is_anchor=not self._fits_base(layout),
        )
        return [replace(plan, storage_data=orders) for plan in plans]

    def _fits_base(self, layout: Mapping[int, set[tuple[Any, ...]]]) -> bool:
        """Whether every rank holds the same pieces of the same tensors as in the base."""
        if self._base is None:
            return False
        try:
            return read_index(self._base).layout() == layout
        except (CkptzError, OSError):  # whatever it is, the new checkpoint does not need it
            return False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called on all ranks: write this rank's file."""
        orders: _Orders = plan.storage_data
        file = f"{SHARD_PREFIX}{self._rank:05d}-{orders.token}{SUFFIX}"
        try:
            gathered = _Gathered(plan.items, planner)
        except Exception:
            merged_guides(
                orders.split, {}, orders.kinds, self._group
            )  # the others must not wait for this rank
            raise
        guides = merged_guides(orders.split, gathered.pieces, orders.kinds, self._group)
        if gathered.tensors:
            self._chain(orders).write(self.folder / file, gathered.draft(orders, guides))
        done: Future[list[WriteResult]] = Future()
        done.set_result([gathered.result(item, self._rank, file) for item in plan.items])
        return done

    def _chain(self, orders: _Orders) -> Chain:
        options = self._options
        if isinstance(options.config, KMeans):
            # Sizes of shards say nothing: what is too small, whole, is named by the coordinator.
            options = replace(options, config=replace(options.config, min_elements=1))
        chain = Chain(options)
        if self._base is not None and not orders.is_anchor:
            name = read_index(self._base).file_of(self._rank)
            if name is not None:
                chain.go_on_from(self._base / name)
        return chain

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on the coordinator, last: the folder becomes a checkpoint."""
        index = _index_of(metadata, results)
        write_index(self.folder, index)
        listed = {file.name for file in index.files}
        for path in self.folder.glob(f"{SHARD_PREFIX}*{SUFFIX}"):  # of a checkpoint that was in the folder
            if path.name not in listed:
                path.unlink(missing_ok=True)
        drop_unneeded(self.folder)


# --- what ranks hold --------------------------------------------------------------------------------


def _pieces(plan: SavePlan) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(name, dtype, whole shape, offset, shape) of the tensors of a plan."""
    for item in plan.items:
        if (data := item.tensor_data) is not None:
            chunk = data.chunk
            code = _code(data.properties.dtype, item.index.fqn)
            yield item.index.fqn, code, tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes)


def _code(dtype: torch.dtype, name: str) -> str:
    code = DTYPE_CODES.get(str(dtype).removeprefix("torch."))
    if code is None or code == "F4":
        raise UnsupportedError(f"tensor {name!r} has {dtype}, which cannot be sharded; convert it")
    return code


def _layout_of(plans: Sequence[SavePlan]) -> dict[int, set[tuple[Any, ...]]]:
    return {rank: set(_pieces(plan)) for rank, plan in enumerate(plans)}


def _whole_tensors(plans: Sequence[SavePlan]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, whole shape) by name.

    Raises:
        ConfigError: ranks disagree.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, plan in enumerate(plans):
        for name, code, whole, _, _ in _pieces(plan):
            if found.setdefault(name, (code, whole)) != (code, whole):
                first, shape = found[name]
                raise ConfigError(
                    f"tensor {name!r} is {code} {list(whole)} on rank {rank}, and {first} {list(shape)} on a "
                    "rank before it; all ranks must save the same model"
                )
    return found


class _Gathered:
    """What a rank has to write.

    Attributes:
        tensors: sources by name in the file.
        pieces: the same by the name of the whole tensor.
    """

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self.tensors: dict[str, UnitSource] = {}
        self.pieces: dict[str, list[UnitSource]] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._keys: dict[MetadataIndex, str] = {}
        self._trees: dict[str, dict[str, Any]] = {}
        n_pieces = Counter(item.index.fqn for item in items)
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                self._add_object(item, planner)
            else:
                self._add_piece(item, planner, n_pieces[item.index.fqn])

    def _add_piece(self, item: WriteItem, planner: SavePlanner, n_pieces: int) -> None:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None
        offset = list(data.chunk.offsets)
        key = name if n_pieces == 1 else f"{name}@{','.join(map(str, offset))}"
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError(f"tensor {name!r}: the planner gave a {type(tensor).__name__}")
        self.tensors[key] = source_of(name, tensor.detach().contiguous())
        self.pieces.setdefault(name, []).append(self.tensors[key])
        self._records[key] = {"tensor": name, "offset": offset, "shape": list(data.size)}
        self._keys[item.index] = key

    def _add_object(self, item: WriteItem, planner: SavePlanner) -> None:
        name = item.index.fqn
        try:
            flat = flatten({name: on_host(_object_of(item, planner))})
        except CkptzError as error:
            raise named(error, f"object {name!r}") from None
        self.tensors |= flat.tensors
        self._trees[name] = flat.tree

    def draft(self, orders: _Orders, guides: Mapping[str, Guide]) -> Draft:
        """What goes into the file."""
        exact = (key for key, record in self._records.items() if record["tensor"] in orders.exact)
        rules = tuple(Rule(_literal(key), role="other") for key in exact)
        texts = {SHARDS_KEY: json.dumps(self._records), "ckptz.ranks": str(orders.n_ranks)}
        draft = Draft(tensors=self.tensors, metadata=texts, role_rules=rules)
        keyed = {k: guides[r["tensor"]] for k, r in self._records.items() if r["tensor"] in guides}
        return draft.guided(keyed) if orders.split else draft

    def result(self, item: WriteItem, rank: int, file: str) -> WriteResult:
        """Where an item went."""
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            return WriteResult(item.index, 0, _Stored(rank, file, tree=self._trees[name]))
        assert item.tensor_data is not None
        chunk, key = item.tensor_data.chunk, self._keys[item.index]
        stored = _Stored(rank, file, key, tuple(chunk.offsets), tuple(chunk.sizes))
        source = self.tensors[key]
        return WriteResult(item.index, source.dtype.n_bytes(source.shape), stored)


def _literal(name: str) -> str:
    """A glob that means a name and nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _object_of(item: WriteItem, planner: SavePlanner) -> Any:
    """What is no tensor; planners of torch hand it out as such, others as the bytes of `torch.save`."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is not None:
        return look_up(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return torch.load(data, map_location="cpu", weights_only=True)


def _index_of(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> FolderIndex:
    stored = [(result.index.fqn, result.storage_data) for rank in results for result in rank]
    files = sorted({(one.rank, one.file) for _, one in stored})
    numbers = {file: number for number, (_, file) in enumerate(files)}
    pieces: dict[str, list[Piece]] = {}
    objects = {}
    for name, one in stored:
        if one.tree is not None:
            objects[name] = StoredObject(numbers[one.file], one.tree)
        else:
            pieces.setdefault(name, []).append(Piece(one.offset, one.shape, numbers[one.file], one.tensor))
    tensors = {}
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            code = _code(found.properties.dtype, name)
            tensors[name] = WholeTensor(code, tuple(found.size), tuple(pieces.get(name, ())))
    return FolderIndex(
        format="ckptz.dcp",
        version=VERSION,
        ranks=len(results),
        files=tuple(ShardFile(file, rank) for rank, file in files),
        tensors=tensors,
        objects=objects,
        paths=_paths_of(metadata.planner_data),
    )


def _paths_of(planner_data: Any) -> dict[str, tuple[str | int, ...]] | None:
    """How the planner flattened the state, if it says so as torch's own does."""
    if not isinstance(planner_data, Mapping):
        return None
    paths = {}
    for name, path in planner_data.items():
        if not isinstance(path, tuple) or not all(isinstance(part, str | int) for part in path):
            raise UnsupportedError(
                f"{name!r}: the planner's data are not those of torch's own; use its planner"
            )
        paths[name] = path
    return paths


# --- reading ----------------------------------------------------------------------------------------


class CkptzStorageReader(StorageReader):
    """Reads what `CkptzStorageWriter` wrote, on any number of ranks.

    Args:
        path: the folder; `checkpoint_id` of a load goes before it.
        jobs: threads, all cores by default.
    """

    def __init__(self, path: PathLike | None = None, *, jobs: int | None = None) -> None:
        super().__init__()
        self._folder = None if path is None else Path(path)
        self._jobs = jobs
        self._index: FolderIndex | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders with an index."""
        return (Path(checkpoint_id) / INDEX_FILE).is_file()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins."""
        self._index = None
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    @property
    def folder(self) -> Path:
        """Where it is read.

        Raises:
            ConfigError: nobody said so.
        """
        if self._folder is None:
            raise ConfigError("CkptzStorageReader has no folder; give it a path, or the load a checkpoint_id")
        return self._folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The folder's index as torch wants it.

        Raises:
            FileNotFoundError: no checkpoint, or one that was never finished.
            CorruptionError: a damaged index.
        """
        index = read_index(self.folder)
        state: dict[str, Any] = {name: BytesStorageMetadata() for name in index.objects}
        places: dict[MetadataIndex, Piece] = {}
        for name, tensor in index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.shape)) for p in tensor.chunks]
            properties = TensorProperties(dtype=torch_dtype(dtype_of(tensor.dtype)))
            state[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            places |= {MetadataIndex(name, piece.offset): piece for piece in tensor.chunks}
        return Metadata(state, planner_data=index.paths, storage_data=(index, places))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Called on all ranks, first."""
        self._index, self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called on all ranks."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called on the coordinator."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called on all ranks: decode what this rank's shards touch, file after file."""
        index = self._index
        assert index is not None
        by_file: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._object(index, item.storage_index.fqn))
            else:
                by_file.setdefault(self._places[item.storage_index].file, []).append(item)
        for number, items in by_file.items():
            with safe_open(shard_path(self.folder, index, number), "pt", jobs=self._jobs) as file:
                for item in items:
                    self._read(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        piece = self._places[item.storage_index]
        part = file.get_slice(piece.tensor)
        if tuple(part.get_shape()) != piece.shape:
            raise CorruptionError(
                f"{self.folder}: tensor {piece.tensor!r} has shape {part.get_shape()}, and {INDEX_FILE} says "
                f"{list(piece.shape)}"
            )
        begins = zip(item.storage_offsets, item.lengths, strict=True)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part[tuple(slice(begin, begin + n) for begin, n in begins) or ...])
        planner.commit_tensor(item, target)

    def _object(self, index: FolderIndex, name: str) -> io.BytesIO:
        """What is no tensor, as planners take it: these bytes were never in a file."""
        data = io.BytesIO()
        torch.save(self.read_object(index, name), data)
        data.seek(0)
        return data

    def read_object(self, index: FolderIndex, name: str) -> Any:
        """What is no tensor, by name.

        Raises:
            CorruptionError: the index or the file is damaged.
        """
        stored = index.objects[name]
        tree = parse_tree(stored.tree)
        names = {ref.name for ref in tree.refs if hasattr(ref, "name")}.union(*tree.storages)
        if not names:
            return from_plain(unflatten({}, stored.tree, None))[name]
        with contextlib.closing(open_checkpoint(shard_path(self.folder, index, stored.file))) as checkpoint:
            if missing := names - set(checkpoint.tensors):
                raise CorruptionError(f"{checkpoint.name}: has no tensor {min(missing)!r}")
            tensors = {n: source for n, source in checkpoint.tensors.items() if n in names}
            return from_plain(unflatten(tensors, stored.tree, None))[name]
