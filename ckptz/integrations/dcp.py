"""`torch.distributed.checkpoint` with `.ckptz` files: each rank writes its shards, any number of ranks reads.

    writer = CkptzStorageWriter(keep_last=3)
    dcp.save(state, checkpoint_id="run/step-100", storage_writer=writer)
    dcp.load(state, checkpoint_id=latest("run"), storage_reader=CkptzStorageReader())

A folder has one file per rank, links to their bases, and a JSON index, which is written last: without it
the folder is not a checkpoint. No pickle. The file of a rank also records the offsets of its shards and the
shapes of the whole tensors. Reading decodes only the chunks that the shards of a rank need. See
docs/frameworks.md.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import os
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptz.api.read import PathLike, open_whole
from ckptz.errors import CorruptionError, error_context
from ckptz.foreign.dcp_index import INDEX_FILE, FolderIndex, InFolder, Piece, read_index, shard_path
from ckptz.format.dtypes import dtype_of
from ckptz.integrations.dcp_run import latest
from ckptz.integrations.dcp_write import CkptzStorageWriter
from ckptz.integrations.linked import ChainOptions, warn_of_differences
from ckptz.integrations.versions import warn_untested
from ckptz.parallel import jobs_of
from ckptz.run.names import step_of_folder
from ckptz.run.residuals import read_exact_or_lossy
from ckptz.state.flatten import unflatten
from ckptz.state.skeleton import TensorRef, parse_tree
from ckptz.state.torch import from_plain, torch_dtype
from ckptz.store.resolve import open_checkpoint

TESTED: Final = ((2, 13), (2, 13))  # first and last version that the tests ran with
__all__ = ["ChainOptions", "CkptzStorageReader", "CkptzStorageWriter", "latest"]


class CkptzStorageReader(InFolder, StorageReader):
    """Reads checkpoints of `CkptzStorageWriter` on any number of ranks.

    Args:
        path: the folder; `checkpoint_id` of a load overrides it.
        jobs: number of threads, by default one for each core.
        writer: the writer of the resumed run, which needs the restored weights for momentum correction.
    """

    def __init__(
        self,
        path: PathLike | None = None,
        *,
        jobs: int | None = None,
        writer: CkptzStorageWriter | None = None,
    ) -> None:
        super().__init__()
        self._writer = writer
        self._folder = None if path is None else Path(path)
        self._jobs = jobs_of(jobs)
        self._index: FolderIndex | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path is that of a folder with an index."""
        return (Path(checkpoint_id) / INDEX_FILE).is_file()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        self._index = None
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert the index of the folder to torch's metadata.

        Raises:
            FileNotFoundError: the folder has no index.
            CorruptionError: the index is damaged.
        """
        index = read_index(self.folder)
        state: dict[str, Any] = {name: BytesStorageMetadata() for name in index.objects}
        places: dict[MetadataIndex, Piece] = {}
        for name, tensor in index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.shape)) for p in tensor.chunks]
            with error_context(f"{self.folder / INDEX_FILE}: tensor {name!r}"):
                properties = TensorProperties(dtype=torch_dtype(dtype_of(tensor.dtype)))
            state[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            places |= {MetadataIndex(name, piece.offset): piece for piece in tensor.chunks}
        return Metadata(state, planner_data=index.paths, storage_data=(index, places))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the index; called on all ranks, first."""
        self._index, self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan; called on all ranks."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep the plans; called on the coordinator."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Decode the chunks that the shards of this rank need; called on all ranks."""
        index = self._index
        assert index is not None
        self._casts = dict[str, str]()  # tensors that are converted to another dtype, by name
        by_file: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._object(index, item.storage_index.fqn))
            else:
                by_file.setdefault(self._places[item.storage_index].file, []).append(item)
        for number, items in by_file.items():
            read = functools.partial(self._read_file, items=items, planner=planner)
            read_exact_or_lossy(shard_path(self.folder, index, number), read)
        warn_of_differences(self.folder, [f"{name}: {cast}" for name, cast in self._casts.items()])
        if self._writer is not None:
            self._writer.mark_restored(_loaded(planner), step_of_folder(self.folder))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, path: Path, items: list[ReadItem], planner: LoadPlanner) -> None:
        with open_whole(path, "pt", jobs=self._jobs) as file:
            wanted = {self._places[item.storage_index].tensor for item in items}
            if missing := wanted.difference(file.keys()):
                what = f"has no tensor {min(missing)!r}, which {INDEX_FILE} names; copy the folder whole"
                raise CorruptionError(f"{path}: {what}, or take another step")
            for item in items:
                self._read(file, item, planner)

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        piece = self._places[item.storage_index]
        part = file.get_slice(piece.tensor)
        if tuple(part.get_shape()) != piece.shape:
            raise CorruptionError(
                f"{self.folder}: tensor {piece.tensor!r} has shape {part.get_shape()}, and {INDEX_FILE} says "
                f"{list(piece.shape)}"
            )
        begins = zip(item.storage_offsets, item.lengths, strict=True)
        values = part[tuple(slice(begin, begin + n) for begin, n in begins) or ...]
        target = planner.resolve_tensor(item).detach()
        if target.dtype != values.dtype:
            self._casts[item.storage_index.fqn] = f"{values.dtype} saved, {target.dtype} now"
        target.copy_(values)
        planner.commit_tensor(item, target)

    def _object(self, index: FolderIndex, name: str) -> io.BytesIO:
        """Serialize a value that is not a tensor with torch, which planners require."""
        data = io.BytesIO()
        torch.save(self.read_object(index, name), data)
        data.seek(0)
        return data

    def read_object(self, index: FolderIndex, name: str) -> Any:
        """Read a value that is not a tensor, by name.

        Raises:
            CorruptionError: the index or the file is damaged.
        """
        stored = index.objects[name]
        tree = parse_tree(stored.tree)
        names = {ref.name for ref in tree.refs if isinstance(ref, TensorRef)}.union(*tree.storages)

        def read(path: Path) -> Any:
            with contextlib.closing(open_checkpoint(path)) as checkpoint:
                if missing := names - set(checkpoint.tensors):
                    raise CorruptionError(f"{checkpoint.name}: has no tensor {min(missing)!r}")
                tensors = {n: source for n, source in checkpoint.tensors.items() if n in names}
                return unflatten(tensors, stored.tree, None)

        if names:
            state = read_exact_or_lossy(shard_path(self.folder, index, stored.file), read)
        else:
            state = unflatten({}, stored.tree, None)
        plain = from_plain(state)
        if not isinstance(plain, dict) or name not in plain:
            raise CorruptionError(f"{self.folder}: {INDEX_FILE} holds no value for {name!r}")
        return plain[name]


def _loaded(planner: LoadPlanner) -> dict[str, Any]:
    """Return the state that torch's planner has loaded, by flat names; empty for other planners."""
    state, paths = getattr(planner, "original_state_dict", {}), getattr(planner, "mappings", {})
    return {name: functools.reduce(operator.getitem, path, state) for name, path in paths.items()}


warn_untested("torch", torch.__version__, TESTED)
