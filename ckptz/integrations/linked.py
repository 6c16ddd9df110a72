"""Writes the linked files of frameworks' runs; see `ckptz.run.linked_files`. Knows no framework."""

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
from ckptz.format.publish import make_folder, publish_together, sync_folder
from ckptz.format.written import Written
from ckptz.parallel import Workers, jobs_of
from ckptz.run.exact import read_exact_or_lossy, residual_of
from ckptz.run.keep import KeepPolicy
from ckptz.run.linked_files import LinkedFiles
from ckptz.run.names import Inode
from ckptz.run.prune import prune_saved
from ckptz.run.step_files import ALL_EXACT, EXACT_OF_KEY, MAX_STEP, FileKind, Kept
from ckptz.run.writer import write_against
from ckptz.state.flatten import flatten
from ckptz.state.roles import Rule
from ckptz.state.torch import to_plain
from ckptz.store.resolve import (
    MAX_DEPTH,
    Checkpoint,
    Path_,
    open_checkpoint,
)
from ckptz.torch import load_state
from ckptz.training.compare import notes_on
from ckptz.training.files import against, memory_for_last, residual_job
from ckptz.training.snapshot import check_dense, identity_of
from ckptz.write.job import WriteJob
from ckptz.write.writer import write


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    """Settings of the files of a run: how they are stored and linked.

    Attributes:
        config: what files may lose; nothing by default.
        full_every: at least every so many saves a file needs no other; 1 to 64. More of them need no other
            where old files go so soon that less disk is taken without. 1 stores no deltas.
        exact: so many newest files come back bit for bit where they are lossy; 0 saves the writes for that.
        keep: which steps stay, in place of the framework's own limit, and which weights stay when their
            optimizer state goes. It also says how many stay exact.
        effort: "fast", "default" or "small": how much time to spend on smaller files.
        jobs: threads, all cores by default.
        base: the file of weights that training began from; those of a model are stored against it where they
            would need no other file.
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
        """Return how long files of each kind stay: by `keep`, or by the framework's own limit.

        Args:
            limit: of the framework.
            setting: that sets the limit, for the error.

        Raises:
            ConfigError: both are set.
        """
        if self.keep is None:
            return {"weights": limit, "state": limit}
        if limit != Kept():
            raise ConfigError(f"{setting} and keep both delete checkpoints; leave out {setting}")
        return self.keep.by_kind

    def prune(self, folder: Path, spared: Collection[str] = ()) -> None:
        """Delete what no rule keeps of a run whose newest step is complete; see `prune_saved`."""
        if self.keep is not None:
            for note in prune_saved(folder, self.keep, spared):
                warnings.warn(f"{folder}: {note}", RuntimeWarning, stacklevel=3)


DEFAULTS: Final = ChainOptions()


def checked_options(options: object) -> ChainOptions:
    """Require the settings of a chain.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(options, ChainOptions):
        raise ConfigError(f"give the options as ChainOptions(...), got {options!r}")
    return options


def warn_of_no_gain(options: ChainOptions, kept: Kept) -> None:
    """Warn where all files that stay are exact, too, so that what may be lost saves nothing."""
    if options.config.is_lossy and kept.is_within(options.n_exact):
        warnings.warn(ALL_EXACT, RuntimeWarning, stacklevel=3)


def warn_of_differences(path: Path, lines: Sequence[str]) -> None:
    """Name in a warning the entries that differ from a checkpoint after a framework has loaded it.

    Args:
        path: the file.
        lines: of `ckptz.training.compare.differences`.
    """
    if lines:
        what = "; ".join(notes_on(lines))
        warnings.warn(f"{path}: restored, but not exactly: {what}", RuntimeWarning, stacklevel=3)


def job_of(state: Any, step: int | None = None, role_rules: Sequence[Rule] = ()) -> WriteJob:
    """Describe the file of a nested state, whose memory on the CPU is shared."""
    flat = flatten(on_host(state))
    tree = None if type(state) is dict and list(state) == list(flat.tensors) else flat.tree
    return WriteJob(tensors=flat.tensors, tree=tree, step=step, role_rules=role_rules)


class Chain(LinkedFiles):
    """Writes the files of one run, each as a full file or against an earlier one that is still there.

    Args:
        options: how.
        kept: how long files stay; None if that is not known.
    """

    def __init__(self, options: ChainOptions = DEFAULTS, kept: Kept | None = None) -> None:
        self.options = checked_options(options)
        origin = None if options.base is None else Path(os.fspath(options.base))
        super().__init__(kept, options.n_exact, options.full_every, origin)
        self.forget()

    def forget(self) -> None:
        """Release the memory that holds what the last file restores to."""
        self._last = LastChunks(memory_for_last) if self.options.config.is_lossy else None

    def write(self, path: Path, job: WriteJob) -> Written:
        """Write a file by the chain's configuration, effort and base; it appears whole or not at all.

        Raises:
            WriteError: the disk is full or fails; what was there stays.
        """
        job = replace(job, config=self.options.config, effort=self.options.effort)
        with self.writing(path):
            try:
                make_folder(path.parent)
                find = functools.partial(self.open_base, path)
                written, base = write_against(find, functools.partial(self._publish, path, job), self.notes)
                self.add(path, written, base)
                for above in path.absolute().parents[1:3]:  # in which the framework may have made the folder
                    sync_folder(above)
            except OSError as error:
                what = f"{path}: could not be saved: {error.strerror or error}"
                raise WriteError(error.errno, what) from error
            self.notes += written.notes
        return written

    def _publish(
        self, path: Path, job: WriteJob, opened: tuple[Checkpoint, str, Inode | None] | None
    ) -> tuple[Written, Inode | None]:
        """Write a file and its residual; give the file of the run that it is stored against, too."""
        base, name, inode = (None, None, None) if opened is None else opened
        if base is not None and inode is not None:
            base.share_decoded(self._last)
        with (
            Workers(self.options.jobs) as workers,
            publish_together() as files,
            files.file(path) as sink,  # which is complete, and so gets its name, last
        ):
            written = write(sink, against(job, base, name), workers)
            if self.options.n_exact and written.n_lossy:
                sink.flush()
                place, temporary = residual_of(Path(sink.name), path), Path(sink.name)
                metadata = {**(job.metadata or {}), EXACT_OF_KEY: written.content_id}
                restored = contextlib.closing(open_checkpoint(temporary, last=self._last))
                with files.file(place) as exact, restored as lossy:
                    write(exact, residual_job(job, lossy, path.name, metadata), workers)
        if base is not None and inode is None and not written.n_deltas:
            self.notes.append(f"no tensor gains from {self.options.base}; the file is full")
        return written, inode


def on_host(state: Any) -> Any:
    """Copy a nested state to the CPU; tensors that are there already are shared."""
    copies: dict[object, torch.Tensor] = {}  # those that are one stay one

    def tensor(value: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        check_dense(value, ".".join(path))
        key = identity_of(value)
        if key not in copies:
            copies[key] = value.detach().as_subclass(torch.Tensor).cpu()
        return copies[key]

    return to_plain(state, tensor)


def read_newest(path: Path, jobs: int | None = None) -> Any:
    """Read the state that a `Chain` was given for a file, as exactly as it is there; see `load_state`."""
    return read_exact_or_lossy(path, functools.partial(load_state, jobs=jobs))
