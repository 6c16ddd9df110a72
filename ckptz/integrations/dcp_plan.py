"""The pieces of a `torch.distributed.checkpoint` state on each rank, and the messages between ranks.

Histograms of tensors that are split over ranks are summed, so that all shards get one quantization map. All
ranks run the same collectives in the same order, on a gloo group of their own. A rank without a shard
contributes zeros, and a failing rank takes part before it raises its error.
"""

from __future__ import annotations

import functools
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ckptz.codec.histogram import Histogram
from ckptz.codec.tensor import SideInformation
from ckptz.errors import CkptzError, ConfigError, UnsupportedError, with_context
from ckptz.foreign.dcp_index import Piece, ShardFile, StoredObject
from ckptz.format.dtypes import DTYPE_CODES
from ckptz.format.sources import TensorSource
from ckptz.format.values import FLOAT_KINDS
from ckptz.guidance.optimizer_layout import ParamState
from ckptz.integrations.dcp_moved import FAILED_ELSEWHERE, described
from ckptz.integrations.linked import on_host
from ckptz.kernels.floats import N_BUCKETS
from ckptz.parallel import uninterrupted
from ckptz.state.flatten import flatten
from ckptz.state.roles import Role, Rule
from ckptz.torch import source_of
from ckptz.write.job import WriteJob

SHARDS_KEY: Final = "ckptz.shards"  # in a file's metadata: offset and whole shape of each tensor
RANKS_KEY: Final = "ckptz.ranks"  # in a file's metadata: number of ranks

# (name, dtype, whole shape, offset, shape) of a part of a tensor
PieceLayout: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
TIMEOUT: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Orders:
    """The part of a plan that the coordinator sends to every rank."""

    token: str  # random part of the file names of this save
    n_ranks: int  # number of ranks
    # names of tensors that are split over ranks and may become lossy, in the order of collectives
    split: tuple[str, ...]
    dtypes: dict[str, str]  # their dtypes
    exact: frozenset[str]  # names of tensors that are too small to become lossy
    base: Path | None  # folder of the bases; None for full files


def pieces_in(plan: SavePlan) -> Iterator[PieceLayout]:
    """Yield the parts of tensors in a plan."""
    for item in plan.items:
        if (data := item.tensor_data) is not None:
            chunk = data.chunk
            code = code_of(data.properties.dtype, item.index.fqn)
            yield item.index.fqn, code, tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes)


def code_of(dtype: torch.dtype, name: str) -> str:
    """Return the dtype code of a tensor in files.

    Raises:
        UnsupportedError: the dtype cannot be stored in parts.
    """
    code = DTYPE_CODES.get(str(dtype).removeprefix("torch."))
    if code is None or code == "F4":
        raise UnsupportedError(f"tensor {name!r} has {dtype}, which cannot be sharded; convert it")
    return code


def whole_tensors(plans: Sequence[SavePlan]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (dtype, whole shape) of all tensors by name.

    Raises:
        ConfigError: ranks disagree.
    """
    types: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, plan in enumerate(plans):
        for name, code, whole, _, _ in pieces_in(plan):
            if types.setdefault(name, (code, whole)) != (code, whole):
                first, shape = types[name]
                raise ConfigError(
                    f"tensor {name!r} is {code} {list(whole)} on rank {rank}, and {first} {list(shape)} on a "
                    "rank before it; all ranks must save the same model"
                )
    return types


class Gathered:
    """The tensors and values that one rank writes."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self.tensors: dict[str, TensorSource] = {}  # by name in the file
        self.pieces: dict[str, list[TensorSource]] = {}  # by the name of the whole tensor
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
        name, look_up = item.index.fqn, getattr(planner, "lookup_object", None)
        if look_up is not None:
            value = look_up(item.index)
        else:  # planners other than torch's return bytes of `torch.save`
            data = planner.resolve_data(item)
            assert isinstance(data, io.BytesIO)
            value = torch.load(data, map_location="cpu", weights_only=True)
        try:
            flat = flatten({name: on_host(value)})
        except CkptzError as error:
            raise with_context(error, f"object {name!r}") from None
        self.tensors |= flat.tensors
        self._trees[name] = flat.tree

    def described(
        self, planner: SavePlanner, orders: Orders
    ) -> tuple[dict[str, Role], dict[str, ParamState]]:
        """Return roles by names in the file, and optimizer state by parameter."""
        pieces = {name: sources[0] for name, sources in self.pieces.items()}
        parts = {key: source for key, source in self.tensors.items() if key in self.pieces}
        roles, trained = described(getattr(planner, "state_dict", {}), pieces, parts)
        wholes = {key: record["tensor"] for key, record in self._records.items()}
        lossy = {key: name for key, name in wholes.items() if name not in orders.exact}
        return {key: roles[name] for key, name in lossy.items() if name in roles}, trained

    def job(self, orders: Orders, guides: Mapping[str, SideInformation]) -> WriteJob:
        """Make the job of the rank's file."""
        exact = [key for key, record in self._records.items() if record["tensor"] in orders.exact]
        globs = ["".join(f"[{c}]" if c in "*?[" else c for c in key) for key in exact]
        texts = {SHARDS_KEY: json.dumps(self._records), RANKS_KEY: str(orders.n_ranks)}
        keyed = {k: guides[r["tensor"]] for k, r in self._records.items() if r["tensor"] in guides}
        return WriteJob(
            tensors=self.tensors,
            metadata=texts,
            role_rules=tuple(Rule(glob, role="other") for glob in globs),
            guides=keyed if orders.split else None,
        )

    def result(self, item: WriteItem, rank: int, file: str) -> WriteResult:
        """Return the file and the place of a written item; the coordinator numbers the files."""
        written = ShardFile(file, rank)
        if item.type == WriteItemType.BYTE_IO:
            return WriteResult(item.index, 0, (written, StoredObject(0, self._trees[item.index.fqn])))
        assert item.tensor_data is not None
        chunk, key = item.tensor_data.chunk, self._keys[item.index]
        piece = Piece(tuple(chunk.offsets), tuple(chunk.sizes), 0, key)
        return WriteResult(item.index, self.tensors[key].n_bytes, (written, piece))


def own_group(timeout: timedelta = TIMEOUT) -> dist.ProcessGroup | None:
    """Create a gloo group of all ranks for checkpoints; None without several ranks.

    A collective operation: all ranks call it at the same point.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timeout)


def merged_guides(
    names: Sequence[str],
    shards: Mapping[str, Sequence[TensorSource]] | None,
    dtypes: Mapping[str, str],
    group: dist.ProcessGroup | None,
) -> dict[str, SideInformation]:
    """Return the histogram of each whole tensor as side information.

    All ranks return or raise together, because the sums also count failed ranks.

    Args:
        names: the split tensors, equal on all ranks and in the same order.
        shards: pieces of this rank by name; None if its save has failed.
        dtypes: dtype of each of `names`, such as "F32".
        group: group of the ranks; None for a single rank.

    Raises:
        CkptzError: the save has failed on another rank.
    """
    return uninterrupted(functools.partial(_merge, names, shards, dtypes, group))


def _merge(
    names: Sequence[str],
    shards: Mapping[str, Sequence[TensorSource]] | None,
    dtypes: Mapping[str, str],
    group: dist.ProcessGroup | None,
    interrupts: Sequence[BaseException],
) -> dict[str, SideInformation]:
    guides, failure = {}, None
    for name in names:
        kind = FLOAT_KINDS[dtypes[name]]
        # The last number counts failed ranks.
        sums = torch.zeros(N_BUCKETS + 1, dtype=torch.int64, device="cpu")
        try:
            if shards is not None and name in shards:
                sums[:-1] = torch.from_numpy(_histogram(shards[name], kind, interrupts).counts)
        except Exception as error:  # raised after the collective, so that no rank waits
            failure = error
        sums[-1] = shards is None or failure is not None or bool(interrupts)
        if group is not None:
            dist.all_reduce(sums, group=group)
        if shards is None:
            break
        if sums[-1]:
            raise failure or CkptzError(FAILED_ELSEWHERE)
        if name in shards:
            guides[name] = SideInformation(histogram=Histogram(kind, sums[:-1].numpy()))
    return guides


def _histogram(pieces: Sequence[TensorSource], kind: int, interrupts: Sequence[BaseException]) -> Histogram:
    empty = Histogram(kind, torch.zeros(N_BUCKETS, dtype=torch.int64, device="cpu").numpy())
    chunks = ((s, bounds) for s in pieces for bounds in s.chunk_bounds() if not interrupts)
    return reduce(add, (Histogram.of(source.patterns(*bounds), kind) for source, bounds in chunks), empty)
