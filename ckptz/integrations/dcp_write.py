"""Writes folders of `torch.distributed.checkpoint`: one `.ckptz` file per rank, and the index last."""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptz.api.read import PathLike
from ckptz.errors import CkptzError, ConfigError, UnsupportedError, check_int
from ckptz.foreign.dcp_index import (
    VERSION,
    FolderIndex,
    InFolder,
    Piece,
    StoredObject,
    WholeTensor,
    read_index,
    write_index,
)
from ckptz.format.publish import make_folder
from ckptz.format.suffixes import SUFFIX
from ckptz.format.values import FLOAT_KINDS
from ckptz.guidance.momentum import Momentum, UpdateTracker
from ckptz.integrations.dcp_moved import RankPool, sampled
from ckptz.integrations.dcp_plan import (
    TIMEOUT,
    Gathered,
    Orders,
    PieceLayout,
    code_of,
    merged_guides,
    own_group,
    pieces_in,
    whole_tensors,
)
from ckptz.integrations.dcp_run import SHARD_PREFIX, begin_step, delete_old
from ckptz.integrations.linked import DEFAULTS, Chain, ChainOptions, checked_options, warn_of_no_gain
from ckptz.run.deletion import drop_unneeded
from ckptz.run.names import step_of_folder
from ckptz.run.step_files import Kept, lossy_stem


class CkptzStorageWriter(InFolder, StorageWriter):
    """Writes a checkpoint of `torch.distributed.checkpoint`.

    With `KMeans` the histograms of split tensors are summed over the ranks, so that all shards get the map of
    the whole tensor. With `Grid` the ranks sum how closely training follows lost momentum, so that all parts
    of a weight get the same momentum correction. Both need a gloo group, which the constructor creates unless
    one is passed: construct the writer on all ranks at the same point. A save that fails on one rank fails on
    all.

    Args:
        path: the folder; `checkpoint_id` of a save overrides it.
        options: settings of the files; `exact` has an effect only with `keep_last`.
        base: folder of an earlier checkpoint, whose files become the bases of the shards. If the layout of
            the shards has changed, full files are written.
        keep_last: number of newest steps to keep. The writer then saves a whole run, each step to a folder
            named after it, such as run/step-100, as deltas to the newest step. None deletes nothing.
        group: gloo group for the sums, not used for anything else at the same time.
        timeout: timeout of the group that the constructor creates.

    Raises:
        ConfigError: `KMeans` with sensitivities, which are unknown for whole tensors; `base` or `keep` in the
            options; `base` together with `keep_last`; a `keep_last` below 1.
    """

    def __init__(
        self,
        path: PathLike | None = None,
        *,
        options: ChainOptions = DEFAULTS,
        base: PathLike | None = None,
        keep_last: int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        super().__init__()
        if checked_options(options).base is not None:
            raise ConfigError(
                "shards cannot be stored against one file of weights; leave base out of the options"
            )
        if options.keep is not None:
            raise ConfigError("shards hold weights and state together; pass keep_last in place of keep")
        options = self._options = options if keep_last is not None else replace(options, exact=0)
        self._folder = None if path is None else Path(path)
        self._base, self._keep_last = None if base is None else Path(base), keep_last
        self._rank, self._group, kept = 0, group, None
        if keep_last is not None:
            self._keep_last = check_int("keep_last", keep_last, 1)
            if base is not None:
                raise ConfigError("with keep_last, steps are stored against the newest one; leave base out")
            kept = Kept(last=self._keep_last)
            warn_of_no_gain(options, kept)
        self._tracker = UpdateTracker() if options.config.loses_state else None
        if options.config.fits_whole_tensors:
            # The coordinator names tensors that are too small; the sizes of shards do not matter.
            options = replace(options, config=options.config.for_shards())
        if options.config.fits_whole_tensors or self._tracker is not None:
            self._group = group or own_group(timeout)
        self._chain = Chain(options, kept)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path is that of a local or mounted folder."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return the storage part of torch's metadata."""
        return StorageMeta(checkpoint_id=self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder; called on all ranks, first."""
        self._rank = kwargs.get("rank") or 0
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "CkptzStorageWriter writes one index for all ranks; leave out use_collectives"
            )
        make_folder(self.folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the plan; called on all ranks."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Distribute to all ranks the plans of the others; called on the coordinator.

        Raises:
            ConfigError: ranks disagree on the dtype or the shape of a tensor; with `keep_last`, the folder is
                not named after a step, the step is not new, or the folder has other files.
        """
        layout = {rank: set(pieces_in(plan)) for rank, plan in enumerate(plans)}
        shapes = whole_tensors(plans)
        base = self._base if self._keep_last is None else begin_step(self.folder)
        config = self._options.config
        split: list[str] = []
        if config.fits_whole_tensors:
            n_pieces = Counter(piece[0] for pieces in layout.values() for piece in pieces)
            split = sorted(n for n, (code, _) in shapes.items() if n_pieces[n] > 1 and code in FLOAT_KINDS)
        exact = [n for n, (_, shape) in shapes.items() if math.prod(shape) < config.least_elements]
        orders = Orders(
            token=secrets.token_hex(4),
            n_ranks=len(plans),
            split=tuple(split),
            dtypes={name: shapes[name][0] for name in split},
            exact=frozenset(exact),
            base=base if _fits(layout, base) else None,
        )
        return [replace(plan, storage_data=orders) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; called on all ranks."""
        orders: Orders = plan.storage_data
        file = f"{SHARD_PREFIX}{self._rank:05d}-{orders.token}{SUFFIX}"
        pool = RankPool(None if self._tracker is None else self._group, orders.n_ranks)
        with pool.taking_part():
            try:
                gathered = Gathered(plan.items, planner)
            except BaseException:
                # So that no rank waits for this one.
                merged_guides(orders.split, None, orders.dtypes, self._group)
                raise
            guides = merged_guides(orders.split, gathered.pieces, orders.dtypes, self._group)
            job = gathered.job(orders, guides)
            if self._tracker is not None:
                roles, trained = gathered.described(planner, orders)
                momentum = Momentum(self._tracker, step_of_folder(self.folder), trained, pool=pool)
                job = replace(job, roles=roles or None, momentum=momentum)
            if gathered.tensors:
                base = orders.base
                before = None if base is None else read_index(base).file_of(self._rank)
                self._chain.go_on_from(None if base is None or before is None else base / before)
                self._chain.write(self.folder / file, job)
                self._chain.forget()  # ranks share the memory of a machine
        done: Future[list[WriteResult]] = Future()
        done.set_result([gathered.result(item, self._rank, file) for item in plan.items])
        return done

    def mark_restored(self, state: Mapping[str, Any], step: int | None) -> None:
        """Record restored weights, in a state with torch's flat names, as the reference of the next save."""
        if self._tracker is not None:
            self._tracker.snapshot(sampled(state), step, is_restored=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, which completes the checkpoint, and delete old steps; on the coordinator."""
        index = _index_of(metadata, results)
        write_index(self.folder, index)
        notes = _tidied(self.folder, {file.name for file in index.files})
        if self._keep_last is not None:
            notes += delete_old(self.folder.parent, self._keep_last, self._options.exact)
        for note in notes:
            warnings.warn(f"{self.folder}: {note}", RuntimeWarning, stacklevel=2)


def _fits(layout: Mapping[int, set[PieceLayout]], base: Path | None) -> bool:
    """Return whether every rank holds the same pieces as in the base."""
    if base is None:
        return False
    try:
        return read_index(base).layout() == layout
    except (CkptzError, OSError):  # full files are written instead
        return False


def _tidied(folder: Path, listed: Collection[str]) -> tuple[str, ...]:
    """Delete the shards of an earlier checkpoint in the folder of the complete new one; return notes."""
    try:
        for name in os.listdir(folder):
            is_shard = name.startswith(SHARD_PREFIX) and name.endswith(SUFFIX)
            if is_shard and lossy_stem(name.removesuffix(SUFFIX)) + SUFFIX not in listed:
                (folder / name).unlink(missing_ok=True)
        return drop_unneeded(folder)
    except OSError as error:
        return (f"files of the checkpoint that was here before stay: {error}",)


def _index_of(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> FolderIndex:
    stored = [(result.index.fqn, *result.storage_data) for rank in results for result in rank]
    files = sorted({file for _, file, _ in stored}, key=lambda file: (file.rank, file.name))
    numbers = {file: number for number, file in enumerate(files)}
    pieces: dict[str, list[Piece]] = {}
    objects: dict[str, StoredObject] = {}
    for name, file, place in stored:
        numbered = msgspec.structs.replace(place, file=numbers[file])
        if isinstance(numbered, StoredObject):
            objects[name] = numbered
        else:
            pieces.setdefault(name, []).append(numbered)
    tensors = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            code = code_of(described.properties.dtype, name)
            tensors[name] = WholeTensor(code, tuple(described.size), tuple(pieces.get(name, ())))
    return FolderIndex(
        format="ckptz.dcp",
        version=VERSION,
        ranks=len(results),
        files=tuple(files),
        tensors=tensors,
        objects=objects,
        paths=_paths_of(metadata.planner_data),
    )


def _paths_of(planner_data: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return how torch's planner flattened the state; None for planners that do not record it."""
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
