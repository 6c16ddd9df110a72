"""Writes a snapshot as the two files of a step, and reads them back to nested tensors."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import torch

from ckptz.api.read import available_memory, check_limit, read_tensors
from ckptz.codec.effort import EffortName
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method
from ckptz.codec.restored import CachedTensor
from ckptz.codec.tensor import SideInformation
from ckptz.errors import CorruptionError, FormatError, MissingBaseError, UnsupportedError
from ckptz.format.index import QualityRecord
from ckptz.format.reader import Container, FrameSource
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.format.written import Written, amend_metadata
from ckptz.guidance.momentum import Momentum, UpdateTracker, bounds_of
from ckptz.guidance.optimizer_layout import ParamState
from ckptz.guidance.side_information import Calibrated, SideInformationFiles, guides_of
from ckptz.parallel import Workers
from ckptz.run.folder import StepStore
from ckptz.run.residuals import residual_tail
from ckptz.run.step_files import (
    EXACT_OF_KEY,
    FROZEN_KEY,
    METRIC_KEY,
    NAMES_KEY,
    POSITION_KEY,
    VERSIONS_KEY,
    WEIGHTS_KEY,
    ChainRule,
    FileKind,
    StepFile,
)
from ckptz.run.writer import found_base
from ckptz.state.flatten import check_strides, flatten
from ckptz.state.roles import BASES, Role, Rule, role_of
from ckptz.state.skeleton import DTypeName, Size, TensorRef, View, parse_tree, with_leaves
from ckptz.state.torch import TorchTensors, torch_dtype
from ckptz.store.resolve import MAX_DEPTH, Checkpoint, base_metadata, base_ref, open_checkpoint
from ckptz.training.copies import copied, named_in
from ckptz.training.live import Hold, with_live
from ckptz.training.snapshot import MODEL, identity_of
from ckptz.training.state import SCALARS, trained_weights
from ckptz.write.job import WriteJob
from ckptz.write.writer import write

OPTIMIZER: Final = "optimizer"
LAST_SHARE: Final = 4  # one in so many bytes of free memory may cache the decoded base
MEMORY_IF_UNKNOWN: Final = 1 << 30
_HOST: Final = TorchTensors("cpu", False)
_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "momentum", "factor")

# Parts of the state without weights or moments; they are lossless under every method.
_EXACT: Final = tuple(
    Rule(f"{name}.*", role="other") for name in ("rng", "extra", "groups", "classes", SCALARS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The method of a save, its calibration, and the quality measured with it.

    Attributes:
        config: the method.
        calibration: inputs of layers, for the rounding of grids, or None.
        quality: quality records of files with these settings and `bases`.
        bases: content ids of the bases of the measured files, None for a full file. With any other base the
            tensors would differ, so the file is written without loss.
        is_last: whether no training follows, so that weights are not moved by the momentum that is lost.
    """

    config: Method
    calibration: Calibrated | None = None
    quality: tuple[QualityRecord, ...] = ()
    bases: Mapping[FileKind, str | None] = field(default_factory=dict)
    is_last: bool = False


def id_of(base: Checkpoint | None) -> str | None:
    """Return the content id of a base."""
    return None if base is None else base.content_id()


@dataclass(kw_only=True)
class StepState:
    """A snapshot as the tensors of the two files of a step.

    Attributes:
        state: the nested state; weights under `MODEL`, parts of the state file under other keys.
        coded: weights that were encoded on their device, by name; they are not in `state`.
        frozen: content id of frozen weights that are left out, or None.
        versions: versions of modules by name; see `module_versions`.
        prefix: prefix of weight names in the file.
        extra_weights: patterns of extras that are weights; see `Checkpointer`.
        hold: tensors of `state` that are read in place while training waits.
        was_restored: whether a step was restored, with loss, since the last save.
        metadata: metadata of the weights file.
        weights: tensors and tree of the weights file.
        rest: tensors and tree of the state file.
        copies: for each tensor of extras that is a weight, the name of the model's weight that it is a copy
            of, or its own name.
        roles: roles of weights and optimizer state by name, derived from the state and not from names.

    Raises:
        ConfigError: a pattern of `extra_weights` matches no tensor.
    """

    state: Mapping[str, Any]
    coded: Mapping[str, TensorSource]
    frozen: str | None
    versions: dict[str, int]
    prefix: str = f"{MODEL}."
    extra_weights: Sequence[str]
    hold: Hold
    was_restored: bool
    metadata: dict[str, str] = field(init=False)
    weights: WriteJob = field(init=False)
    rest: WriteJob = field(init=False)
    copies: dict[str, str] = field(init=False)
    roles: dict[str, Role] = field(init=False)

    def __post_init__(self) -> None:
        prefix = self.prefix
        self.metadata = {} if self.frozen is None else {FROZEN_KEY: self.frozen}
        self.metadata |= {VERSIONS_KEY: json.dumps(self.versions)} if self.versions else {}
        self.metadata |= {} if prefix else {NAMES_KEY: "own"}
        more = {f"{prefix}{name}": source for name, source in self.coded.items()}
        uncoded = _part({MODEL: self.state[MODEL]}, prefix)
        self.weights = replace(uncoded, tensors={**with_live(uncoded.tensors, self.hold), **more})
        rest = _part({name: value for name, value in self.state.items() if name != MODEL})
        self.rest = replace(rest, tensors=with_live(rest.tensors, self.hold))
        self.roles = {
            name: Role("weight", name.removeprefix(prefix), role_of(name, source.shape, True).layer_type)
            for name, source in self.weights.tensors.items()
            if source.dtype.is_float
        }
        self.roles |= moment_roles(self.state.get(OPTIMIZER, {}), self.rest.tensors)
        own = {name.removeprefix(prefix): source for name, source in self.weights.tensors.items()}
        named, trained = named_in(self.rest.tensors, self.extra_weights), self.trained
        self.copies = copied(named, own, [name for name in own if name in trained])
        for name, parameter in self.copies.items():
            layer_type = role_of(parameter, named[name].shape, True).layer_type
            self.roles[name] = Role("weight", parameter, layer_type)

    def like(self, base: Checkpoint | None) -> StepState:
        """Return the snapshot with the weight names of a base, with or without the prefix."""
        if base is None:
            return self
        names = [name.removeprefix(self.prefix) for name in self.weights.tensors]
        n_found = {p: sum(f"{p}{name}" in base.tensors for name in names) for p in (f"{MODEL}.", "")}
        prefix = max(n_found, key=lambda p: n_found[p])
        return self if prefix == self.prefix else replace(self, prefix=prefix)

    @property
    def optimizer(self) -> dict[str, TensorSource]:
        """Tensors of the optimizers by name."""
        return {n: s for n, s in self.rest.tensors.items() if n.startswith(f"{OPTIMIZER}.")}

    @property
    def trained(self) -> frozenset[str]:
        """Names of parameters with moments."""
        return frozenset(role.parameter for role in self.roles.values() if role.role in _MOMENTS)

    @property
    def with_optimizers(self) -> dict[str, ParamState]:
        """Weights with their optimizer state, by parameter."""
        return trained_weights(self.state, self._own_weights, self.rest.tensors, self.prefix)

    @property
    def all_with_optimizers(self) -> dict[str, ParamState]:
        """Parameters with their optimizer state, also those that share memory, which the file has once."""
        own, model = self._own_weights, self.state[MODEL]
        by_memory = {identity_of(model[name]): source for name, source in own.items() if name in model}
        shared = {
            name: by_memory[memory]
            for name, value in model.items()
            if isinstance(value, torch.Tensor) and (memory := identity_of(value)) in by_memory
        }
        return trained_weights(self.state, shared | own, self.rest.tensors, self.prefix)

    @property
    def _own_weights(self) -> dict[str, TensorSource]:
        n = len(self.prefix)
        return {name[n:]: source for name, source in self.weights.tensors.items()}

    def job(self, part: WriteJob, method: LossSettings) -> WriteJob:
        """Make the job of one of the two files.

        Args:
            part: `weights` or `rest`.
            method: the loss settings.
        """
        return replace(
            part,
            config=method.config,
            role_rules=_EXACT,
            roles=self.roles,
            trained=self.trained,
            guide_files=SideInformationFiles(calibration=method.calibration),
            beside=self.optimizer,
            was_restored=self.was_restored,
        )


def moment_roles(
    optimizer: Mapping[str, Any], tensors: Mapping[str, TensorSource]
) -> Iterator[tuple[str, Role]]:
    """Yield the roles of the tensors of optimizer state by parameter name."""
    for parameter, state in optimizer.items():
        for key in state:
            name = f"{OPTIMIZER}.{parameter}.{key}"
            if name in tensors:
                source = tensors[name]
                role = replace(role_of(name, source.shape, source.dtype.is_float), parameter=parameter)
                yield name, role if BASES.isdisjoint(state) else replace(role, role="other")


@dataclass(kw_only=True)
class StepWriter:
    """Writes the files of one snapshot into a store.

    Attributes:
        state: the snapshot.
        step: the step.
        metric: metric of the step, or None.
        method: the loss settings.
        effort: time to spend on smaller files.
        jobs: number of threads.
        tracker: tracker of weight updates for momentum correction, or None.
    """

    state: StepState
    step: int
    metric: float | None
    method: LossSettings
    effort: EffortName
    jobs: int
    tracker: UpdateTracker | None
    _notes: dict[FileKind, list[str]] = field(default_factory=dict, init=False)
    _written: dict[FileKind, WriteJob] = field(default_factory=dict, init=False)

    def write(
        self, store: StepStore, rule: ChainRule, notes: list[str], *, with_exact: bool
    ) -> dict[StepFile, Written]:
        """Write the files of the step, which are published together, the weights last.

        Args:
            store: the store.
            rule: the rule that chooses the bases.
            notes: list to which notes for the user are added.
            with_exact: write residual files of lossy files too.

        Raises:
            OSError: the disk is full or fails; nothing is published.
            FormatError, MissingBaseError: a lossy file cannot be read back for its residual; the same.
        """
        weights_file, state_file = StepFile(self.step, "weights"), StepFile(self.step, "state")
        folder, exact = store.local_folder, dict[StepFile, Written]()
        with store.publishing(self.step, notes) as files, files.file(folder / weights_file.name) as sink:
            with files.file(folder / state_file.name) as state_sink:
                write_state = functools.partial(self._write_state, state_sink, store)
                state = store.write_against_base("state", write_state, rule, notes)
            if not (self.method.config.is_lossy or self.state.hold.has_weights):
                self.state.hold.release()  # lossy weights and residuals read optimizer state again
            state_path = Path(state_sink.name)
            with contextlib.ExitStack() as stack:
                restored = None
                if state.n_lossy:
                    restored = open_checkpoint(state_path, last=store.last)
                    stack.callback(restored.close)
                newest = self._newest("weights", store, stack) if self.method.config.is_lossy else None
                write_weights = functools.partial(self._write_weights, sink, restored, newest)
                weights = store.write_against_base("weights", write_weights, rule, notes)
                sink.flush()
                n_bytes = amend_metadata(state_path, {WEIGHTS_KEY: weights.content_id})
                state = replace(state, stored_bytes=n_bytes)
                lossy = {state_file: (state_path, state), weights_file: (Path(sink.name), weights)}
                for file, (path, one) in lossy.items():
                    if not (with_exact and one.n_lossy):
                        continue
                    metadata = {EXACT_OF_KEY: one.content_id}
                    metadata |= {WEIGHTS_KEY: weights.content_id} if file is state_file else {}
                    residual = replace(file, tail=residual_tail(path))
                    if file is weights_file or restored is None:
                        stack.close()  # the chunks that were decoded of the state are no longer needed
                        restored = open_checkpoint(path, last=store.last)
                        stack.callback(restored.close)
                    with files.file(folder / residual.name) as exact_sink:
                        exact[residual] = self._write_exact(file, exact_sink, restored, metadata)
        store.upload(state_file, *exact, weights_file)
        notes += [note for of_kind in self._notes.values() for note in of_kind]
        return {weights_file: weights, state_file: state, **exact}

    def _write_weights(
        self,
        sink: BinaryIO,
        restored: Checkpoint | None,
        newest: Checkpoint | None,
        base: Checkpoint | None,
        position: int,
    ) -> Written:
        """Write the weights; `restored` is the state file, or None if it is lossless."""
        state = self.state.like(base)
        metadata = {POSITION_KEY: str(position), **state.metadata}
        if self.metric is not None:
            metadata[METRIC_KEY] = repr(self.metric)
        method = self._against("weights", base)
        job = replace(state.job(state.weights, method), quality=method.quality, metadata=metadata)
        if self.tracker is not None and not method.is_last:
            momentum = Momentum(self.tracker, self.step, state.with_optimizers, lossy_tensors(restored))
            job = replace(job, momentum=momentum)
        write = functools.partial(self._write, "weights", sink)
        return write_after(write, against(job, base), newest, base, self._notes["weights"])

    def _write_state(
        self, sink: BinaryIO, store: StepStore, base: Checkpoint | None, position: int
    ) -> Written:
        method = self._against("state", base)
        quality = method.quality if method.config.loses_state else ()
        job = self.state.job(self.state.rest, method)
        trained = self.state.all_with_optimizers
        of_moments = (
            bounds_of(trained)
            if self.tracker is None
            else Momentum(self.tracker, self.step, trained).guides()
        )
        with contextlib.ExitStack() as stack:
            guides = {**of_moments, **self._guides_of_copies(method, stack)}
            metadata = {POSITION_KEY: str(position)}
            job = replace(job, guides=guides, beside={}, quality=quality, metadata=metadata)
            # Only weights are compared with the newest file, so moments alone do not need it.
            is_compared = self.state.copies and method.config.is_lossy
            newest = self._newest("state", store, stack) if is_compared else None
            write = functools.partial(self._write, "state", sink)
            return write_after(write, against(job, base), newest, base, self._notes["state"])

    def _newest(self, kind: FileKind, store: StepStore, stack: contextlib.ExitStack) -> Checkpoint | None:
        """Open the newest file of a kind, which `stack` closes; None if there is none that can be opened."""
        return found_base(functools.partial(store.open_newest, kind), stack, [])

    def _guides_of_copies(
        self, method: LossSettings, stack: contextlib.ExitStack
    ) -> dict[str, SideInformation]:
        """Return the side information of copies of weights, which is that of the weights."""
        state = self.state
        if not state.copies or not method.config.is_lossy:
            return {}
        files = SideInformationFiles(calibration=method.calibration)
        live = {**state.weights.tensors, **state.optimizer}
        roles = {name: state.roles.get(name) or role_of(name, one.shape, False) for name, one in live.items()}
        guides, _ = guides_of(live, roles, method.config, files, stack)
        owned = {name: guides.get(f"{state.prefix}{parameter}") for name, parameter in state.copies.items()}
        return {name: guide for name, guide in owned.items() if guide is not None}

    def _write_exact(
        self, file: StepFile, sink: BinaryIO, lossy: Checkpoint, metadata: Mapping[str, str]
    ) -> Written:
        """Write the residual of a lossy file that is not published yet."""
        job = self._written[file.kind]
        known = {
            key: text
            for key, text in (job.metadata or {}).items()
            if key in (FROZEN_KEY, VERSIONS_KEY, NAMES_KEY)
        }
        return self._write(file.kind, sink, residual_job(job, lossy, file.name, {**metadata, **known}))

    def _against(self, kind: FileKind, base: Checkpoint | None) -> LossSettings:
        """Return the loss settings of a file with this base."""
        self._notes[kind] = []
        if kind not in self.method.bases or self.method.bases[kind] == id_of(base):
            return self.method
        self._notes[kind].append(f"{kind}: stored without loss: its base is not the one of the search")
        return LossSettings(config=LOSSLESS)

    def _write(self, kind: FileKind, sink: BinaryIO, job: WriteJob) -> Written:
        self._written[kind] = job = replace(job, step=self.step, effort=self.effort)
        with Workers(self.jobs) as workers:
            written = write(sink, job, workers)
        self._notes[kind] += written.notes
        return written


def against(job: WriteJob, base: Checkpoint | None, file: str | None = None) -> WriteJob:
    """Return a job with an open file as its base; without one, the job itself.

    `file` is the future name of the base, if it has a temporary one.
    """
    if base is None:
        return job
    bases = remembering(base.tensors)
    return replace(job, base=base_ref(base, file), bases=bases, base_metadata=base_metadata(base))


def after(job: WriteJob, newest: Checkpoint | None, base: Checkpoint | None) -> WriteJob:
    """Return the job of a file that knows the open newest file of its run, if that is not the base."""
    if newest is None or (base is not None and base.files[0].name == newest.files[0].name):
        return job
    return replace(job, newest=remembering(newest.tensors))


def write_after(
    write: Callable[[WriteJob], Written],
    job: WriteJob,
    newest: Checkpoint | None,
    base: Checkpoint | None,
    notes: list[str],
) -> Written:
    """Write a file of a run that knows the newest one, or a full file that does not if it is damaged.

    Args:
        write: writes the file, and replaces what an earlier call has written.
        job: the job, with its base.
        newest: the open newest file, or None.
        base: the open base, or None for a full file.
        notes: list to which the damage is added.

    Raises:
        FormatError, MissingBaseError: a delta could not be written, as it or the newest file is damaged.
    """
    try:
        return write(after(job, newest, base))
    except (FormatError, MissingBaseError) as error:
        if newest is None or base is not None:
            raise
        notes.append(f"steps do not follow the movement, because the newest file cannot be read: {error}")
    return write(job)


def residual_job(job: WriteJob, lossy: Checkpoint, file: str, metadata: Mapping[str, str]) -> WriteJob:
    """Make the job that writes the residual of a lossy file.

    Args:
        job: the job that wrote the lossy file.
        lossy: the open lossy file.
        file: future name of the lossy file.
        metadata: metadata of the residual, which identifies the lossy file.
    """
    return replace(
        against(job, lossy, file),
        config=LOSSLESS,
        metadata=metadata,
        bases=residual_bases(lossy),
        quality=(),
        guides={},
        beside={},
        momentum=None,
    )


def lossy_tensors(restored: Checkpoint | None) -> dict[str, TensorSource]:
    """Return the lossy tensors of an open file by name; empty without a file."""
    records = () if restored is None or restored.container is None else restored.container.index.tensors
    return {one.name: restored.tensors[one.name] for one in records if restored and one.lossy is not None}


def residual_bases(lossy: Checkpoint) -> dict[str, TensorSource]:
    """Return the tensors of a lossy file that are bases of its residual, by name.

    Lossy float32 tensors are not: a delta is 4 % smaller than the tensor by itself, and takes three times as
    long to write and to read (bench/product/exact_head.py). If the others are less than a tenth of all bytes,
    there are no bases, and the residual is self-contained; also if the lossy file ends the longest chain that
    readers follow.
    """
    records = () if lossy.container is None else lossy.container.index.tensors
    alone = {one.name for one in records if one.lossy is not None and one.dtype == "F32"}
    bases = {name: base for name, base in lossy.tensors.items() if name not in alone}
    is_worth_it = 10 * tensor_bytes(bases) >= tensor_bytes(lossy.tensors)
    return remembering(bases) if is_worth_it and lossy.depth < MAX_DEPTH else {}


def remembering(bases: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Wrap the tensors of a base to read through their file's cache of decoded chunks."""
    return {
        name: CachedTensor.of_frame(base) if isinstance(base, FrameSource) else base
        for name, base in bases.items()
    }


def memory_for_last() -> int:
    """Return the bytes that may cache decoded chunks of the last file: a share of the free memory."""
    free = available_memory()
    return MEMORY_IF_UNKNOWN if free is None else free // LAST_SHARE


def _part(state: Mapping[str, Any], prefix: str | None = None) -> WriteJob:
    flat = flatten(dict(state), n_outer=int(prefix == ""))
    # Names describe a tree of one level below `MODEL` without shared memory.
    is_named = prefix is not None and [f"{prefix}{name}" for name in state[MODEL]] == list(flat.tensors)
    return WriteJob(tensors=flat.tensors, tree=None if is_named else flat.tree)


# --- reading ------------------------------------------------------------------------------------


class StepReader:
    """Reads one of the two files.

    Args:
        checkpoint: the open file with its chain.

    Raises:
        FormatError: it is not one of a store.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.container is None:
            raise FormatError(f"{checkpoint.name}: not a .ckptz file")
        self.name = checkpoint.name
        self._container: Container = checkpoint.container
        index = self._container.index
        self.step = index.step
        self.metadata: Mapping[str, str] = index.metadata or {}
        # Of a residual that of its lossy file: state says which weights it goes with by that.
        self.lossy_id = self.metadata.get(EXACT_OF_KEY, index.content_id)
        self.lossy = frozenset(tensor.name for tensor in index.tensors if tensor.lossy is not None)

    def versions(self) -> dict[str, int]:
        """Return the versions of modules by name.

        Raises:
            CorruptionError: the metadata hold something else.
        """
        text = self.metadata.get(VERSIONS_KEY, "{}")
        try:
            versions = msgspec.json.decode(text, type=dict[str, int])
        except msgspec.DecodeError:
            raise CorruptionError(f"{self.name}: its versions of modules are damaged") from None
        return versions

    def outline(self) -> dict[str, Any]:
        """Return the nested state with tensors on the meta device; nothing is decoded."""
        return self._assembled(
            {
                name: torch.empty(source.shape, dtype=torch_dtype(source.dtype), device="meta")
                for name, source in self._container.tensors.items()
            }
        )

    def load(self, jobs: int) -> dict[str, Any]:
        """Read the nested state, every chunk stack against its checksum.

        Raises:
            LimitError: it does not fit into memory.
            FormatError: the file is damaged.
        """
        check_limit(tensor_bytes(self._container.tensors), None, self.name)
        return self._assembled(dict(read_tensors(self._container.tensors, _HOST, jobs)))

    def _assembled(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        tree = self._container.index.tree
        if tree is None:
            prefix = "" if NAMES_KEY in self.metadata else f"{MODEL}."
            if odd := [name for name in tensors if not name.startswith(prefix)]:
                raise CorruptionError(f"{self.name}: tensor {odd[0]!r} was not saved by a Checkpointer")
            return {MODEL: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}}
        parsed = parse_tree(tree)
        parsed.check_names(tensors)
        root = with_leaves(parsed.root, lambda leaf: self._leaf(leaf, tensors, parsed.storages))
        if not isinstance(root, dict):
            raise CorruptionError(f"{self.name}: its tree is not one that a Checkpointer writes")
        return root

    def _leaf(
        self, leaf: object, tensors: Mapping[str, torch.Tensor], storages: Sequence[Sequence[str]]
    ) -> Any:
        if isinstance(leaf, TensorRef):
            tensor = tensors[leaf.name]
            if leaf.strides is None:
                return tensor
            check_strides(leaf, tuple(tensor.shape))  # which are those of the memory order when it was saved
            made = torch.empty_strided(tensor.shape, leaf.strides, dtype=tensor.dtype, device=tensor.device)
            return made.copy_(tensor)
        if isinstance(leaf, View) and len(storages[leaf.storage]) == 1:  # see `with_scalars_together`
            numbers = tensors[storages[leaf.storage][0]]
            is_one = leaf.shape == () and numbers.ndim == 1 and leaf.offset < len(numbers)
            if str(numbers.dtype) == f"torch.{leaf.dtype}" and (is_one or leaf.shape == numbers.shape):
                return numbers[leaf.offset] if is_one else numbers
        if isinstance(leaf, Size):
            return torch.Size(leaf.dims)
        if isinstance(leaf, DTypeName) and isinstance(getattr(torch, leaf.name, None), torch.dtype):
            return getattr(torch, leaf.name)
        raise UnsupportedError(f"{self.name}: no Checkpointer wrote this; restore it with ckptz restore")
