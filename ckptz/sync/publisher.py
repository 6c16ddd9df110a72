"""The trainer's side of weight sync."""

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
from ckptz.run.keep import KeepRules, what_stays
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
    """Step, size and counts of one call of `Publisher.publish`.

    Attributes:
        step: the step.
        files: their names in the folder; a delta, a full file or both.
        n_bytes: their sizes together.
        tensor_bytes: bytes of all tensors.
        content_id: identity of the values.
        seconds: time taken.
        note: what the user should know, or empty.
    """

    step: int
    files: tuple[str, ...]
    n_bytes: int
    tensor_bytes: int
    content_id: str
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Last:
    """The step that the next delta leads on from."""

    step: int
    ref: BaseRef
    tensors: Mapping[str, TensorSource]
    spare: Mapping[str, TensorSource]  # an older copy, whose memory may be written to


class Publisher:
    """Publishes a model's weights step by step: a small delta every time, now and then a full file.

    A file appears in the folder when it is complete. The publisher keeps two copies of the weights in
    host memory: what it published last, and what it is about to publish. After a restart it goes on from
    the newest step in the folder. There may be one publisher for a folder.

    Args:
        folder_or_url: a folder, which is made if it is missing, or an fsspec URL such as "s3://bucket/run".
        full_every: publish a full file with every so many steps; 1 to 64. A follower that starts late
            reads a full file and at most this many deltas.
        keep_full: remove what is older than the so many newest full files; None keeps everything.
        smallest: make deltas as small as they get, about 30 % less than otherwise; writing and
            applying them takes several times as long.
        effort: "fast", "default" or "small": how much time to spend on smaller files; deltas of changed
            positions are the same by each.
        jobs: threads, all cores by default.

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
        self._place = folder_at(folder_or_url)
        self._rule, self._keep_full = ChainRule(full_every, is_forked=False), keep_full
        self._config: Method = LOSSLESS if smallest else SPARSE
        self._effort, self._jobs = effort_of(effort).name, jobs_of(jobs)
        self._base: _Last | None = None

    @property
    def step(self) -> int | None:
        """The step that this publisher published last."""
        return None if self._base is None else self._base.step

    def publish(
        self, state_dict: State, step: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> PublishReport:
        """Publish the weights as they are now; they may change again when this returns.

        Args:
            state_dict: tensors by name, on any device.
            step: the training step, greater than all that were published; by default one more.
            metadata: text to keep with the tensors.

        Raises:
            ConfigError: the step is not newer than what the folder holds, or not ours.
            OSError: the disk is full or fails; nothing is published, and the step may be tried again.
        """
        start = time.perf_counter()
        check_tensor_names(state_dict)
        check_texts(metadata)
        versions = versions_in(self._place.sizes())
        step = self._checked_step(step, versions)
        notes: list[str] = []
        with Workers(self._jobs) as workers:
            snapshot = _copied(state_dict, {} if self._base is None else self._base.spare, workers)
            job = WriteJob(tensors=snapshot, metadata=metadata, step=step, effort=self._effort)
            written = write_against(
                lambda held: self._open_base(snapshot, versions, notes, held),
                lambda base: self._write(job, base, versions, workers),
                notes,
                f"step {newest_step(versions)} cannot be led on from, so this is a full file",
                of_base=(FormatError, MissingBaseError),  # an upload that fails does so with a full file, too
            )
        notes += self._retire()
        first = next(iter(written.values()))
        return PublishReport(
            step=step,
            files=tuple(version.name for version in written),
            n_bytes=sum(one.stored_bytes for one in written.values()),
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
                    f"{self._place.name}: holds step {newest}, and this publisher's last is "
                    f"{self._base.step}; another one writes here, and a folder takes one publisher"
                )
            newest = self._base.step
        step = checked_step((0 if newest is None else newest + 1) if step is None else step)
        if newest is not None and step <= newest:
            raise ConfigError(
                f"{self._place.name}: step {step} is not after {newest}, the newest that is published; "
                "go on after that step, or publish to a new folder"
            )
        return step

    def _open_base(
        self, snapshot: Snapshot, versions: list[Version], notes: list[str], held: contextlib.ExitStack
    ) -> _Last | None:
        """Return the base of the next delta; None for a full file, with a note if its tensors differ."""
        newest = newest_step(versions)
        if newest is None:
            return None
        base = self._base
        if base is None or base.step != newest:  # what an earlier publisher published last is read back
            files = route(versions, None, newest, self._place.name)
            folder = held.enter_context(self._place.local_copies([version.name for version in files]))
            opened = held.enter_context(contextlib.closing(open_checkpoint(folder / files[-1].name)))
            base = _Last(newest, base_ref(opened), opened.tensors, {})
        if _layout(base.tensors) == _layout(snapshot):
            return base
        notes.append("other tensors than in the step before, so this is a full file")
        return None

    def _is_full_due(self, base: _Last | None, versions: list[Version]) -> bool:
        full_files = full_files_of(versions)
        if base is None or not full_files or base.ref.depth > MAX_DEPTH:
            return True
        n_since = len({version.step for version in versions if version.step > full_files[-1].step})
        return self._rule.base_of(n_since + 1) is None

    def _write(
        self, job: WriteJob, base: _Last | None, versions: list[Version], workers: Workers
    ) -> dict[Version, Written]:
        """Write the files of one step; they appear when all of them are written."""
        assert job.step is not None
        wanted: dict[Version, WriteJob] = {}
        if self._is_full_due(base, versions):
            wanted[Version(job.step, None)] = job
        if base is not None and base.ref.depth <= MAX_DEPTH:
            wanted[Version(job.step, base.step)] = replace(
                job, base=base.ref, bases=base.tensors, config=self._config
            )
        written = {}
        try:
            with contextlib.ExitStack() as files:
                for version, one in wanted.items():
                    sink = files.enter_context(self._place.publish(version.name))
                    written[version] = write(sink, one, workers)
            # An interrupt after the files appeared must not leave the step before here: nothing could be
            # published any more. The next delta leads on from the full file if there is one.
            version, first = next(iter(written.items()))
            depth = base.ref.depth if base is not None and version.base is not None and first.n_deltas else 0
            ref = BaseRef(first.content_id, version.name, depth + 1)
            self._base = _Last(job.step, ref, job.tensors, {} if self._base is None else self._base.tensors)
        except BaseException:
            for version in wanted:
                with contextlib.suppress(Exception):
                    self._place.remove(version.name)
            raise
        return written

    def _retire(self) -> tuple[str, ...]:
        """Remove what is older than the full files to be kept, as far as these can be read; notes.

        The step is published whether this succeeds or not, and what stays is tried again.
        """
        try:
            versions = versions_in(self._place.sizes())
        except Exception as error:  # stores behind URLs have errors of their own
            return (f"what is older stays until the next step: {error}",)
        full_files = {full.step: full for full in full_files_of(versions)}
        steps = KeepRules(last=self._keep_full).kept(full_files, {})
        if len(steps) == len(full_files):
            return ()
        kept = [full_files[step] for step in sorted(steps)]
        # The delta that leads to the oldest full file loses its base; what stays can be restored.
        stays = what_stays(
            _before(kept[0], versions), kept, self._checked, lambda one: _before(one, versions)
        )
        for version in sorted(stays.may_go, key=lambda one: (one.step, one.base is None)):
            with contextlib.suppress(Exception):
                self._place.remove(version.name)
        return stays.notes

    def _checked(self, full: Version) -> tuple[Version, ...]:
        """Require that the header of a full file can be read; it needs no other file."""
        with contextlib.closing(open_file(self._place.open_header(full.name, full.n_bytes))) as file:
            if not isinstance(file, Container) or file.index.base is not None:
                raise CorruptionError("it is no full file")
            return ()


def _before(full: Version, versions: Sequence[Version]) -> list[Version]:
    """List the files that a follower needs only if it does not start from this full file."""
    return [one for one in versions if (one.step, one.base is None) < (full.step, True)]


def _layout(tensors: Mapping[str, TensorSource]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (source.dtype.name, tuple(source.shape)) for name, source in tensors.items()}


def _copied(state: State, spare: Mapping[str, TensorSource], workers: Workers) -> Snapshot:
    """A copy of a state in host memory, in that of an older copy where it fits."""
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
