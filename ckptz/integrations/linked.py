"""Writes the files of frameworks' runs, linked by `ckptz.run.linked_files`. Imports no framework."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ckptz.codec.effort import EffortName, effort_of
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method, checked
from ckptz.errors import ConfigError, WriteError, check_int, coerce_numeric_fields
from ckptz.format.caches import LastChunks
from ckptz.format.publish import publish_together
from ckptz.format.written import Written
from ckptz.parallel import Workers, jobs_of
from ckptz.run.keep import KeepPolicy
from ckptz.run.linked_files import LinkedFiles
from ckptz.run.prune import prune_saved
from ckptz.run.residuals import find_residual, read_exact_or_lossy, residual_of
from ckptz.run.step_files import ALL_EXACT, EXACT_OF_KEY, MAX_STEP, FileKind, Kept
from ckptz.run.writer import found_base
from ckptz.state.flatten import flatten
from ckptz.state.roles import Rule
from ckptz.state.torch import to_plain
from ckptz.store.resolve import MAX_DEPTH, Checkpoint, Path_, open_checkpoint
from ckptz.torch import load_state
from ckptz.training.compare import notes_on
from ckptz.training.files import against, memory_for_last, residual_job, write_after
from ckptz.training.snapshot import check_dense, identity_of
from ckptz.write.job import WriteJob
from ckptz.write.writer import write


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    """Settings of the files of a run.

    Attributes:
        config: the method, lossless by default.
        full_every: largest number of saves from one full file to the next, 1 to 64; full files are more
            frequent if that takes less disk. 1 stores no deltas.
        exact: number of newest files that stay exact by residual files if `config` is lossy; 0 writes none.
        keep: keep rules in place of the framework's own limit, for whole steps and for weights without
            optimizer state, and the number of exact steps.
        effort: "fast", "default" or "small": time to spend on smaller files.
        jobs: number of threads, by default one for each core.
        base: the file of pretrained weights; full files of a model's weights are stored as deltas to it.
    """

    config: Method = LOSSLESS
    full_every: int = 16
    exact: int = 1
    keep: KeepPolicy | None = None
    effort: EffortName = "default"
    jobs: int | None = None
    base: Path_ | None = None

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)
        checked(self.config)
        effort_of(self.effort)
        if self.jobs is not None:
            jobs_of(self.jobs)
        check_int("exact", self.exact, 0)
        if not isinstance(self.keep, KeepPolicy | None):
            raise ConfigError(f"keep must be a ckptz.KeepPolicy or None, got {self.keep!r}")
        if self.keep is not None and self.exact != 1:
            raise ConfigError(f"exact={self.exact} and keep: say it in KeepPolicy(exact={self.exact}) alone")
        check_int("full_every", self.full_every, 1, MAX_DEPTH)

    @property
    def n_exact(self) -> int:
        """Number of newest files that stay exact."""
        if self.keep is None:
            return self.exact
        return MAX_STEP if self.keep.exact is None else self.keep.exact

    def kept(self, limit: Kept, setting: str) -> Mapping[FileKind, Kept]:
        """Return how long files of each kind are kept, by `keep` or the framework's own limit.

        Args:
            limit: the framework's limit.
            setting: name of the framework's setting, for the error.

        Raises:
            ConfigError: both are set.
        """
        if self.keep is None:
            return {"weights": limit, "state": limit}
        if limit != Kept():
            raise ConfigError(f"{setting} and keep both delete checkpoints; leave out {setting}")
        return self.keep.by_kind

    def prune(self, folder: Path, always_kept: Collection[str] = ()) -> None:
        """Delete the steps that `keep` does not select; called when the newest step is complete."""
        if self.keep is not None:
            for note in prune_saved(folder, self.keep, always_kept):
                warnings.warn(f"{folder}: {note}", RuntimeWarning, stacklevel=3)


DEFAULTS: Final = ChainOptions()


def checked_options(options: object) -> ChainOptions:
    """Check that `options` are `ChainOptions`, and return them.

    Raises:
        ConfigError: they are something else.
    """
    if not isinstance(options, ChainOptions):
        raise ConfigError(f"give the options as ChainOptions(...), got {options!r}")
    return options


def warn_of_no_gain(options: ChainOptions, kept: Kept) -> None:
    """Warn if all kept files are exact too, so that a lossy method saves no space."""
    if options.config.is_lossy and kept.is_within(options.n_exact):
        warnings.warn(ALL_EXACT, RuntimeWarning, stacklevel=3)


def warn_of_differences(path: Path, lines: Sequence[str]) -> None:
    """Name in a warning the entries that differ from a checkpoint after a framework has loaded it.

    Args:
        path: the file.
        lines: result of `ckptz.training.compare.differences`.
    """
    if lines:
        what = "; ".join(notes_on(lines))
        warnings.warn(f"{path}: restored, but not exactly: {what}", RuntimeWarning, stacklevel=3)


def job_of(state: Any, step: int | None = None, role_rules: Sequence[Rule] = ()) -> WriteJob:
    """Make the job that writes a nested state; tensors on the CPU are not copied."""
    flat = flatten(on_host(state))
    tree = None if type(state) is dict and list(state) == list(flat.tensors) else flat.tree
    return WriteJob(tensors=flat.tensors, tree=tree, step=step, role_rules=role_rules)


class Chain(LinkedFiles):
    """Writes the files of one run, as full files or as deltas to an existing earlier file.

    Args:
        options: settings of the files.
        kept: how long files are kept; None if unknown.
    """

    def __init__(self, options: ChainOptions = DEFAULTS, kept: Kept | None = None) -> None:
        self.options = checked_options(options)
        origin = None if options.base is None else Path(os.fspath(options.base))
        super().__init__(kept, options.n_exact, options.full_every, origin)
        self._was_restored = False  # whether a file without residual was restored since the last was written
        self.forget()

    def forget(self) -> None:
        """Release the cache of the decoded chunks of the last file."""
        self.last = LastChunks(memory_for_last) if self.options.config.is_lossy else None

    def resume_from(self, path: Path) -> None:
        """Make the file that training was restored from the candidate for the next base."""
        self.go_on_from(path)
        self._was_restored = find_residual(path) is None

    def write(self, path: Path, job: WriteJob) -> Written:
        """Write a file with the chain's method, effort and base; it appears when it is complete.

        Raises:
            WriteError: the disk is full or fails; an earlier file of this name is unchanged.
        """
        options = self.options
        job = replace(job, config=options.config, effort=options.effort, was_restored=self._was_restored)
        try:
            written = self.write_against_base(path, functools.partial(self._publish, path, job))
        except OSError as error:
            what = f"{path}: could not be saved: {error.strerror or error}"
            raise WriteError(error.errno, what) from error
        self._was_restored = False
        return written

    def _publish(self, path: Path, job: WriteJob, base: Checkpoint | None, name: str | None) -> Written:
        """Write a file and its residual; `name` is that of the base in the folder."""
        with (
            contextlib.ExitStack() as stack,
            Workers(self.options.jobs) as workers,
            publish_together() as files,
            files.file(path) as sink,  # published last
        ):
            newest = None
            if job.config.is_lossy:
                newest = found_base(functools.partial(self.open_newest, path), stack, [])
            save = functools.partial(write, sink, workers=workers)
            written = write_after(save, against(job, base, name), newest, base, self.notes)
            if self.options.n_exact and written.n_lossy:
                sink.flush()
                place, temporary = residual_of(Path(sink.name), path), Path(sink.name)
                metadata = {**(job.metadata or {}), EXACT_OF_KEY: written.content_id}
                with (
                    files.file(place) as exact,
                    contextlib.closing(open_checkpoint(temporary, last=self.last)) as lossy,
                ):
                    write(exact, residual_job(job, lossy, path.name, metadata), workers)
        return written


def on_host(state: Any) -> Any:
    """Copy a nested state to the CPU; tensors on the CPU are shared."""
    copies: dict[object, torch.Tensor] = {}  # tied tensors stay tied

    def tensor(value: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        check_dense(value, ".".join(path))
        key = identity_of(value)
        if key not in copies:
            copies[key] = value.detach().as_subclass(torch.Tensor).cpu()
        return copies[key]

    return to_plain(state, tensor)


def read_newest(path: Path, jobs: int | None = None) -> Any:
    """Read the state of a file that a `Chain` wrote, exactly if it has a readable residual."""
    return read_exact_or_lossy(path, functools.partial(load_state, jobs=jobs))
