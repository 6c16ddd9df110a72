"""The trainer's side of weight sync."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ckptz.api.apply import State, live_tensors
from ckptz.api.save import check_tensor_names, check_texts
from ckptz.errors import CkptzError, ConfigError, CorruptionError, FormatError, MissingBaseError, whole
from ckptz.format.index import BaseRef
from ckptz.format.reader import Container
from ckptz.format.sources import PATTERN_TYPES, ArraySource, TensorSource, chunk_bounds
from ckptz.format.written import Written
from ckptz.methods.lossless import LOSSLESS, Lossless
from ckptz.methods.method import Method
from ckptz.parallel import Workers, jobs_of
from ckptz.run.keep import KeepRules, what_stays
from ckptz.run.step_files import ChainRule, checked_step
from ckptz.run.versions import Version, full_files_of, newest_step, route, versions_in
from ckptz.store.resolve import MAX_DEPTH, open_checkpoint, open_file
from ckptz.store.storage import place_of
from ckptz.write.pipeline import Job, write

Snapshot = dict[str, ArraySource]
SPARSE: Final = Lossless(sparse=True)


@dataclass(frozen=True, slots=True)
class Published:
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
        jobs: int | None = None,
    ) -> None:
        full_every = whole("full_every", full_every)
        keep_full = None if keep_full is None else whole("keep_full", keep_full)
        if not 1 <= full_every <= MAX_DEPTH:
            raise ConfigError(f"full_every must be 1..{MAX_DEPTH}, got {full_every}")
        if keep_full is not None and keep_full < 1:
            raise ConfigError(f"keep_full must be at least 1, or None to keep all, got {keep_full}")
        self._place = place_of(folder_or_url)
        self._rule, self._keep_full = ChainRule(full_every, is_forked=False), keep_full
        self._config: Method = LOSSLESS if smallest else SPARSE
        self._jobs = jobs_of(jobs)
        self._base: _Last | None = None
        self._snapshot: Snapshot = {}
        self._spare: Snapshot = {}

    @property
    def step(self) -> int | None:
        """The step that this publisher published last."""
        return None if self._base is None else self._base.step

    def publish(
        self, state_dict: State, step: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Published:
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
        with Workers(self._jobs) as workers, self._base_in(versions) as (base, note):
            snapshot = _copied(state_dict, self._spare, workers)
            if base is not None and _layout(base.tensors) != _layout(snapshot):
                base, note = None, "other tensors than in the step before, so this is a full file"
            job = Job(tensors=snapshot, metadata=metadata, step=step)
            try:
                written = self._write(job, base, self._is_full_due(base, versions), workers)
            except (FormatError, MissingBaseError) as error:  # of the base: what is published is in memory
                if base is None:
                    raise
                note, base = _not_led_on(base.step, error), None
                written = self._write(job, None, True, workers)
        self._advance(step, snapshot, written, base)
        notes = (note, *self._retire())
        first = next(iter(written.values()))
        return Published(
            step=step,
            files=tuple(version.name for version in written),
            n_bytes=sum(one.stored_bytes for one in written.values()),
            tensor_bytes=first.original_bytes,
            content_id=first.content_id,
            seconds=time.perf_counter() - start,
            note="; ".join(filter(None, notes)),
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

    @contextlib.contextmanager
    def _base_in(self, versions: list[Version]) -> Iterator[tuple[_Last | None, str]]:
        """Find the base of the next delta, None for a full file, and a note for the user or an empty text."""
        newest = newest_step(versions)
        if newest is None:
            yield None, ""
            return
        if self._base is not None and self._base.step == newest:
            yield self._base, ""
            return
        with contextlib.ExitStack() as held:
            base, note = None, ""
            try:
                base = held.enter_context(self._resumed(versions, newest))
            except (CkptzError, OSError) as error:
                note = _not_led_on(newest, error)
            yield base, note

    @contextlib.contextmanager
    def _resumed(self, versions: list[Version], newest: int) -> Iterator[_Last]:
        """Read back from the folder what an earlier publisher published last."""
        files = route(versions, None, newest, self._place.name)
        with (
            self._place.fetched([version.name for version in files]) as folder,
            contextlib.closing(open_checkpoint(folder / files[-1].name)) as checkpoint,
        ):
            ref = BaseRef(content_id=checkpoint.content_id(), file=files[-1].name, depth=checkpoint.depth + 1)
            yield _Last(newest, ref, checkpoint.tensors)

    def _is_full_due(self, base: _Last | None, versions: list[Version]) -> bool:
        full_files = full_files_of(versions)
        if base is None or not full_files or base.ref.depth > MAX_DEPTH:
            return True
        n_since = len({version.step for version in versions if version.step > full_files[-1].step})
        return self._rule.base_of(n_since + 1) is None

    def _write(
        self, job: Job, base: _Last | None, with_full: bool, workers: Workers
    ) -> dict[Version, Written]:
        """Write the files of one step; they appear when all of them are written."""
        assert job.step is not None
        wanted: dict[Version, Job] = {}
        if with_full:
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
        except BaseException:
            for version in wanted:
                with contextlib.suppress(Exception):
                    self._place.remove(version.name)
            raise
        return written

    def _advance(
        self, step: int, snapshot: Snapshot, written: dict[Version, Written], base: _Last | None
    ) -> None:
        """The next delta leads on from what was just published: from the full file if there is one."""
        version, one = next(iter(written.items()))
        depth = base.ref.depth if base is not None and version.base is not None and one.n_deltas else 0
        self._base = _Last(step, BaseRef(one.content_id, version.name, depth + 1), snapshot)
        self._spare, self._snapshot = self._snapshot, snapshot

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
        with contextlib.closing(open_file(self._place.peek(full.name, full.n_bytes))) as file:
            if not isinstance(file, Container) or file.index.base is not None:
                raise CorruptionError("it is no full file")
            return ()


def _not_led_on(step: int, error: Exception) -> str:
    return f"step {step} cannot be led on from, so this is a full file: {error}"


def _before(full: Version, versions: Sequence[Version]) -> list[Version]:
    """List the files that a follower needs only if it does not start from this full file."""
    return [one for one in versions if (one.step, one.base is None) < (full.step, True)]


def _layout(tensors: Mapping[str, TensorSource]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (source.dtype.name, tuple(source.shape)) for name, source in tensors.items()}


def _copied(state: State, spare: Snapshot, workers: Workers) -> Snapshot:
    """A copy of a state in host memory, in that of an older copy where it fits."""
    live = live_tensors(state)
    snapshot = {}
    for name, source in live.items():
        shape, old = tuple(source.shape), spare.get(name)
        if old is None or (old.dtype, old.shape) != (source.dtype, shape):
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
