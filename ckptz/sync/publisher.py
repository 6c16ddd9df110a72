"""Weight sync in the trainer: publishes full files and deltas of a model's weights."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ckptz.api.apply import State, live_tensors
from ckptz.api.save import check_tensor_names, check_texts
from ckptz.codec.effort import EffortName, effort_of
from ckptz.codec.lossless import LOSSLESS, Lossless
from ckptz.codec.method import Method
from ckptz.errors import ConfigError, CorruptionError, FormatError, MissingBaseError, check_int
from ckptz.format.index import BaseRef
from ckptz.format.reader import Container
from ckptz.format.sources import PATTERN_TYPES, ArraySource, TensorSource, chunk_bounds
from ckptz.format.written import Written
from ckptz.parallel import Workers, jobs_of
from ckptz.run.keep import KeepRules, retention_of
from ckptz.run.step_files import ChainRule, checked_step
from ckptz.run.versions import Version, full_files_of, newest_step, route, versions_in
from ckptz.run.writer import write_against
from ckptz.store.resolve import MAX_DEPTH, base_ref, open_checkpoint, open_file
from ckptz.store.storage import folder_at
from ckptz.write.job import WriteJob
from ckptz.write.writer import write

Snapshot = dict[str, ArraySource]
SPARSE: Final = Lossless(sparse=True)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of `Publisher.publish`.

    Attributes:
        step: the published step.
        files: names of the new files: a delta, a full file, or both.
        n_bytes: total size of these files.
        tensor_bytes: bytes of all tensors.
        content_id: content id of the tensors.
        seconds: time taken.
        note: notes for the user, or empty.
    """

    step: int
    files: tuple[str, ...]
    n_bytes: int
    tensor_bytes: int
    content_id: str
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Base:
    """The last published step, which is the base of the next delta."""

    step: int
    ref: BaseRef
    tensors: Mapping[str, TensorSource]
    spare: Mapping[str, TensorSource]  # an older copy, whose memory is reused for the next snapshot


class Publisher:
    """Publishes the weights of a model: a delta for every step, and a full file at intervals.

    A file appears in the folder when it is complete. The publisher keeps two copies of the weights in host
    memory: of the last and of the current step. After a restart it continues from the newest step in the
    folder. A folder can have only one publisher.

    Args:
        folder_or_url: a folder, which is created if it is missing, or an fsspec URL such as
            "s3://bucket/run".
        full_every: steps between full files, 1 to 64. A follower that starts late reads a full file and at
            most this many deltas.
        keep_full: number of newest full files to keep; older files are removed. None keeps everything.
        smallest: make deltas about 30 % smaller; writing and applying them takes several times as long.
        effort: "fast", "default" or "small": time to spend on smaller files. Sparse deltas, the default, do
            not depend on it.
        jobs: number of threads, by default all cores.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> import torch
        >>> from ckptz.sync import Follower, Publisher
        >>> trained, live = {"weight": torch.ones(4)}, {"weight": torch.zeros(4)}
        >>> publisher, follower = Publisher("weights"), Follower("weights")
        >>> publisher.publish(trained, step=1).files
        ('step-000001.ckptz',)
        >>> trained["weight"][2] = 5
        >>> publisher.publish(trained, step=2).files
        ('step-000002.from-000001.ckptz',)
        >>> follower.apply_to(live).step
        2
        >>> live
        {'weight': tensor([1., 1., 5., 1.])}
    """

    def __init__(
        self,
        folder_or_url: str | os.PathLike[str],
        *,
        full_every: int = 10,
        keep_full: int | None = 2,
        smallest: bool = False,
        effort: EffortName = "default",
        jobs: int | None = None,
    ) -> None:
        full_every = check_int("full_every", full_every, 1, MAX_DEPTH)
        keep_full = None if keep_full is None else check_int("keep_full (or None for all)", keep_full, 1)
        self._folder = folder_at(folder_or_url)
        self._rule, self._keep_full = ChainRule(full_every, is_forked=False), keep_full
        self._config: Method = LOSSLESS if smallest else SPARSE
        self._effort, self._jobs = effort_of(effort).name, jobs_of(jobs)
        self._base: _Base | None = None

    @property
    def step(self) -> int | None:
        """The last step of this publisher, or None."""
        return None if self._base is None else self._base.step

    def publish(
        self, state_dict: State, step: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> PublishReport:
        """Publish the current weights; training may continue when this returns.

        Args:
            state_dict: tensors by name, on any device.
            step: training step, greater than all published ones; by default the next number.
            metadata: text to store with the tensors.

        Raises:
            ConfigError: the step is not newer than those in the folder, or another publisher writes to it.
            OSError: the disk is full or fails; nothing is published, and the step can be tried again.
        """
        start = time.perf_counter()
        check_tensor_names(state_dict)
        check_texts(metadata)
        versions = versions_in(self._folder.sizes())
        step = self._checked_step(step, versions)
        notes: list[str] = []
        with Workers(self._jobs) as workers:
            snapshot = _copy_to_host(state_dict, {} if self._base is None else self._base.spare, workers)
            job = WriteJob(tensors=snapshot, metadata=metadata, step=step, effort=self._effort)
            written = write_against(
                lambda stack: self._open_base(snapshot, versions, notes, stack),
                lambda base: self._write(job, base, versions, workers),
                notes,
                f"step {newest_step(versions)} cannot be used as a base, so this is a full file",
                of_base=(
                    FormatError,
                    MissingBaseError,
                ),  # an upload that fails would fail for a full file, too
            )
        notes += self._remove_old()
        first = next(iter(written.values()))
        return PublishReport(
            step=step,
            files=tuple(version.name for version in written),
            n_bytes=sum(file.stored_bytes for file in written.values()),
            tensor_bytes=first.original_bytes,
            content_id=first.content_id,
            seconds=time.perf_counter() - start,
            note="; ".join(notes),
        )

    def _checked_step(self, step: int | None, versions: list[Version]) -> int:
        newest = newest_step(versions)
        if self._base is not None:
            if newest is not None and newest > self._base.step:
                raise ConfigError(
                    f"{self._folder.name}: has step {newest}, but the last of this publisher is "
                    f"{self._base.step}; another publisher writes here: stop one of the two"
                )
            newest = self._base.step
        step = checked_step((0 if newest is None else newest + 1) if step is None else step)
        if newest is not None and step <= newest:
            raise ConfigError(
                f"{self._folder.name}: step {step} is not after the newest published step {newest}; "
                "use a later step, or publish to a new folder"
            )
        return step

    def _open_base(
        self, snapshot: Snapshot, versions: list[Version], notes: list[str], stack: contextlib.ExitStack
    ) -> _Base | None:
        """Return the base of the next delta; None for a full file, with a note if its tensors differ."""
        newest = newest_step(versions)
        if newest is None:
            return None
        base = self._base
        if base is None or base.step != newest:  # published by an earlier process
            files = route(versions, None, newest, self._folder.name)
            folder = stack.enter_context(self._folder.local_copies([version.name for version in files]))
            opened = stack.enter_context(contextlib.closing(open_checkpoint(folder / files[-1].name)))
            base = _Base(newest, base_ref(opened), opened.tensors, {})
        if _layout(base.tensors) == _layout(snapshot):
            return base
        notes.append("names, dtypes or shapes changed since the last step, so this is a full file")
        return None

    def _write(
        self, job: WriteJob, base: _Base | None, versions: list[Version], workers: Workers
    ) -> dict[Version, Written]:
        """Write the files of one step; they appear when all of them are complete."""
        assert job.step is not None
        if base is not None and base.ref.depth > MAX_DEPTH:
            base = None
        full_files = full_files_of(versions)
        n_since = len({v.step for v in versions if full_files and v.step > full_files[-1].step})
        jobs: dict[Version, WriteJob] = {}
        if base is None or not full_files or self._rule.base_of(n_since + 1) is None:
            jobs[Version(job.step, None)] = job
        if base is not None:
            jobs[Version(job.step, base.step)] = replace(
                job, base=base.ref, bases=base.tensors, config=self._config
            )
        written = {}
        try:
            with contextlib.ExitStack() as files:
                for version, file_job in jobs.items():
                    sink = files.enter_context(self._folder.publish(version.name))
                    written[version] = write(sink, file_job, workers)
            # Within `try`: after an interrupt between publishing and this, the files must be removed, or no
            # further step could be published. The next base is the full file if there is one.
            version, first = next(iter(written.items()))
            depth = base.ref.depth if base is not None and version.base is not None and first.n_deltas else 0
            ref = BaseRef(first.content_id, version.name, depth + 1)
            self._base = _Base(job.step, ref, job.tensors, {} if self._base is None else self._base.tensors)
        except BaseException:
            for version in jobs:
                with contextlib.suppress(Exception):
                    self._folder.remove(version.name)
            raise
        return written

    def _remove_old(self) -> tuple[str, ...]:
        """Remove files older than the full files to keep; returns notes.

        Files stay if a full file to keep cannot be read, or if they cannot be removed; the next step tries
        again.
        """
        try:
            versions = versions_in(self._folder.sizes())
        except Exception as error:  # URL stores raise various errors
            return (f"older files are kept until the next step: {error}",)
        full_files = {full.step: full for full in full_files_of(versions)}
        steps = KeepRules(last=self._keep_full).kept(full_files, {})
        if len(steps) == len(full_files):
            return ()
        kept = [full_files[step] for step in sorted(steps)]
        # This removes the base of the delta that leads to the oldest full file, which is still readable.
        may_go, _, notes = retention_of(
            _before(kept[0], versions), kept, self._check_full, lambda full: _before(full, versions)
        )
        for version in sorted(may_go, key=lambda v: (v.step, v.base is None)):
            with contextlib.suppress(Exception):
                self._folder.remove(version.name)
        return notes

    def _check_full(self, full: Version) -> tuple[Version, ...]:
        """Require a readable header of a full file; returns the files that it needs, which are none."""
        with contextlib.closing(open_file(self._folder.open_header(full.name, full.n_bytes))) as file:
            if not isinstance(file, Container) or file.index.base is not None:
                raise CorruptionError("it is not a full file")
            return ()


def _before(full: Version, versions: Sequence[Version]) -> list[Version]:
    """List the files that a follower which starts from this full file does not need."""
    return [v for v in versions if (v.step, v.base is None) < (full.step, True)]


def _layout(tensors: Mapping[str, TensorSource]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (source.dtype.name, tuple(source.shape)) for name, source in tensors.items()}


def _copy_to_host(state: State, spare: Mapping[str, TensorSource], workers: Workers) -> Snapshot:
    """Copy a state to host memory, into the memory of `spare` for tensors of the same dtype and shape."""
    live = live_tensors(state)
    snapshot = {}
    for name, source in live.items():
        shape, old = tuple(source.shape), spare.get(name)
        if not isinstance(old, ArraySource) or (old.dtype, old.shape) != (source.dtype, shape):
            n_patterns = source.dtype.n_patterns(shape)
            old = ArraySource(
                source.dtype, shape, np.empty(n_patterns, PATTERN_TYPES[source.dtype.pattern_bytes])
            )
        snapshot[name] = old

    def copy_chunk(task: tuple[str, int, int]) -> None:
        name, begin, end = task
        snapshot[name].flat[begin:end] = live[name].patterns(begin, end)

    chunks = ((name, *bounds) for name, copy in snapshot.items() for bounds in chunk_bounds(len(copy.flat)))
    for _ in workers.map(copy_chunk, chunks):
        pass
    return snapshot
