"""Files stored against one another that survive whoever deletes folders and files.

    checkpoint-200/model.ckptz                         a delta
    checkpoint-200/base-4f1c0a9b7d2e6853.ckptz         a second name of checkpoint-100/model.ckptz
    checkpoint-200/model.exact-9be27a01c35d8f64.ckptz  a residual: the same without loss, if that is lossy

Every file that a delta needs gets a second name, a hard link, in the delta's own folder. So a folder is
complete by itself, its bases take no room twice, and the file system frees them with the last folder
that needs them: frameworks delete old checkpoints as they like. Where the file system has no hard links,
or the base lies on another one, the file is stored as a full file.

The newest lossy files come back exactly by their residuals. A residual is
named by the digest of the very file that it belongs to, so one that is replaced is exact at every moment. It
goes when a later step is complete and can be opened: what is cut off before leaves the step before it exact.
Knows no framework.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ckptz.errors import CkptzError, ConfigError, FormatError, MissingBaseError, WriteError, own_numbers
from ckptz.foreign.torch_files import ZIP_MAGIC
from ckptz.format.byte_source import FileBytes
from ckptz.format.caches import LastChunks
from ckptz.format.envelope import LENGTH_BYTES
from ckptz.format.publish import TEMPORARY_SUFFIX, make_folder, publish_together, sync_folder
from ckptz.format.written import Written
from ckptz.methods.lossless import LOSSLESS
from ckptz.methods.method import Method, checked
from ckptz.parallel import Workers, jobs_of
from ckptz.run.exact import as_exactly_as_may_be, residual_of, unlink_residuals
from ckptz.run.folder import ABANDONED_SECONDS
from ckptz.run.keep import what_stays
from ckptz.run.linked_files import RunFiles
from ckptz.run.links import BASE_PREFIX, link_chain, link_origin
from ckptz.run.names import LIGHTNING_SUFFIX
from ckptz.run.step_files import ALL_EXACT, EXACT_OF_KEY, FileFacts, Kept
from ckptz.state.flatten import flatten
from ckptz.state.roles import Rule
from ckptz.state.torch import to_plain
from ckptz.store.resolve import (
    MAX_DEPTH,
    SUFFIX,
    Checkpoint,
    Path_,
    open_checkpoint,
)
from ckptz.torch import load_state
from ckptz.training.files import against, memory_for_last, residual_job
from ckptz.training.snapshot import check_dense, identity_of
from ckptz.write.pipeline import Job, write

N_REMEMBERED: Final = 8  # files of which one may become the next base


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    """Settings of the files of a run: how they are stored and linked.

    Attributes:
        config: what files may lose; nothing by default.
        full_every: at least every so many saves a file needs no other; 1 to 64. More of them need no other
            where old files go so soon that less disk is taken without. 1 stores no deltas.
        exact: so many newest files come back bit for bit where they are lossy; 0 saves the writes for that.
        jobs: threads, all cores by default.
        base: the file of weights that training began from; those of a model are stored against it where they
            would need no other file.
    """

    config: Method = LOSSLESS
    full_every: int = 16
    exact: int = 1
    jobs: int | None = None
    base: Path_ | None = None

    def __post_init__(self) -> None:
        own_numbers(self)
        checked(self.config)
        if self.jobs is not None:
            jobs_of(self.jobs)
        if self.exact < 0:
            raise ConfigError(f"exact must be 0 or more, got {self.exact}")
        if not 1 <= self.full_every <= MAX_DEPTH:
            raise ConfigError(f"full_every must be 1..{MAX_DEPTH}, got {self.full_every}")


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
    if options.config.is_lossy and kept.is_within(options.exact):
        warnings.warn(ALL_EXACT, RuntimeWarning, stacklevel=3)


def job_of(state: Any, step: int | None = None, role_rules: Sequence[Rule] = ()) -> Job:
    """Describe the file of a nested state, whose memory on the CPU is shared."""
    flat = flatten(on_host(state))
    tree = None if type(state) is dict and list(state) == list(flat.tensors) else flat.tree
    return Job(tensors=flat.tensors, tree=tree, step=step, role_rules=role_rules)


class Chain:
    """Writes the files of one run, each as a full file or against an earlier one that is still there.

    Threads may share it; files are written one at a time. Nothing is deleted while one is written, and where
    another thread than the one that writes asks for it, the newest file stays until the next is whole.

    Args:
        options: how.
        files: what is known of the run's files, above all how long they stay.

    Attributes:
        notes: what the user should know of the file that was written last, and of what was removed since.
    """

    def __init__(self, options: ChainOptions = DEFAULTS, files: RunFiles | None = None) -> None:
        self.options = checked_options(options)
        self._files = RunFiles() if files is None else files
        self._last = LastChunks(memory_for_last) if options.config.is_lossy else None
        self.notes: tuple[str, ...] = ()
        self._saved: list[Path] = []  # oldest first
        self._unwanted: list[Path] = []  # to be deleted
        self._writer: int | None = None  # the thread that wrote last
        self._is_writing = False
        self._writing, self._tidying = threading.Lock(), threading.Lock()

    def go_on_from(self, path: Path) -> None:
        """Store the next file against this one."""
        path = path.absolute()
        self._saved = [*(saved for saved in self._saved if saved != path), path][-N_REMEMBERED:]

    def write(self, path: Path, job: Job) -> Written:
        """Write a file, which appears whole or not at all; the chain's own configuration holds, and its base.

        Raises:
            WriteError: the disk is full or fails; what was there stays.
        """
        with self._writing:
            with self._tidying:
                self._is_writing, self._writer = True, threading.get_ident()
            try:
                make_folder(path.parent)
                written = self._write(path, replace(job, config=self.options.config))
                self.notes += written.notes
                for above in path.absolute().parents[1:3]:  # in which the framework may have made the folder
                    sync_folder(above)
            except OSError as error:
                what = f"{path}: could not be saved: {error.strerror or error}"
                raise WriteError(error.errno, what) from error
            finally:
                self._is_writing = False
            self.go_on_from(path)
            with self._tidying:  # what was asked for before is not meant for this file
                self._unwanted = [other for other in self._unwanted if other != path.absolute()]
            try:
                unlink_residuals(path, with_own=False)
                self._tidy()
            except OSError as error:
                self.notes += (f"what is not wanted any more stays: {error}",)
            return written

    def _write(self, path: Path, job: Job) -> Written:
        self.notes = ()
        try:
            with contextlib.ExitStack() as held:
                base = self._linked_base(path, held)
                found = base or self._linked_origin(path, held)
                if found is not None:
                    opened, name = found
                    written = self._publish(path, against(job, opened, name))
                    self._files.add(path, written, opened if base else None)
                    if base is None and not written.n_deltas:
                        self.notes += (f"no tensor gains from {self.options.base}; the file stands alone",)
                    return written
        except (FormatError, MissingBaseError) as error:  # of the base: what is saved is in memory
            self.notes = (f"stored as a full file, because the base cannot be read: {error}",)
        written = self._publish(path, job)
        self._files.add(path, written, None)
        return written

    def _linked_base(self, path: Path, held: contextlib.ExitStack) -> tuple[Checkpoint, str] | None:
        """Open what takes the least disk in the end, and give it a name in the new one's folder."""
        try:
            for candidate in reversed(self._saved):
                if candidate == path.absolute():
                    continue  # is about to be replaced
                with contextlib.suppress(FileNotFoundError):  # the framework deleted it
                    base = held.enter_context(contextlib.closing(open_checkpoint(candidate)))
                    break
            else:
                return None
            found = self._files.base_of_next(path, base, self.options.full_every)
            if found is None or base.depth - found + 1 >= self.options.full_every:
                return None
            if found:
                base = held.enter_context(contextlib.closing(open_checkpoint(base.files[found].name)))
            base.hold(self._last)
            if names := link_chain(base, path.parent):
                return base, names[0]
        except OSError as error:  # the framework deletes it, or a disk fails, while it is looked at
            raise MissingBaseError(str(error)) from error
        self.notes = (f"stored as a full file, because {base.name} cannot be linked into {path.parent}",)
        return None

    def _linked_origin(self, path: Path, held: contextlib.ExitStack) -> tuple[Checkpoint, str] | None:
        """Open the weights that training began from by a name in the folder of the new file."""
        if self.options.base is None:
            return None
        origin = Path(os.fspath(self.options.base))
        try:
            with contextlib.closing(open_checkpoint(origin)) as opened:
                linked = link_origin(origin, opened.content_id(), path.parent)
            base = held.enter_context(contextlib.closing(open_checkpoint(linked)))
        except OSError as error:
            raise MissingBaseError(str(error)) from error
        return base, linked.name

    def _publish(self, path: Path, job: Job) -> Written:
        with (
            Workers(self.options.jobs) as workers,
            publish_together() as files,
            files.file(path) as sink,  # which is complete, and so gets its name, last
        ):
            written = write(sink, job, workers)
            self.notes += written.notes
            if self.options.exact and written.n_lossy:
                sink.flush()
                place = residual_of(Path(sink.name), path)
                lossy = contextlib.closing(open_checkpoint(sink.name))
                with files.file(place) as exact, lossy as base:
                    base.hold(self._last)
                    metadata = {**(job.metadata or {}), EXACT_OF_KEY: written.content_id}
                    write(exact, residual_job(job, base, path.name, metadata), workers)
            return written

    def settle(self) -> None:
        """Delete the residuals of all but the newest files, whose steps are complete now.

        Nothing goes where one of the newest cannot be opened with all that it needs; see `notes`.
        """
        n_exact = max(1, self.options.exact)
        newest, older = self._saved[-n_exact:], self._saved[:-n_exact]
        try:
            for path in newest if older else ():
                residual = residual_of(path)
                open_checkpoint(residual if residual.exists() else path).close()
            for path in older:
                unlink_residuals(path)
        except (OSError, CkptzError) as error:
            self.notes += (f"older files stay exact until the next save: {error}",)

    def remove(self, path: Path) -> None:
        """Delete a file, and those bases of its folder that no file there needs any more.

        Raises:
            OSError: the file cannot be deleted.
        """
        with self._tidying:
            self._unwanted.append(path.absolute())
        if threading.get_ident() == self._writer:
            self._tidy()
        else:  # the next file may not have been begun
            self._tidy(spared=self._saved[-1:])

    def _tidy(self, spared: Sequence[Path] = ()) -> None:
        """Delete what is unwanted, and then what only that needed; while a file is written, nothing."""
        with self._tidying:
            if self._is_writing:
                return
            gone = [path for path in self._unwanted if path not in spared]
            self._unwanted = [path for path in self._unwanted if path in spared]
            for path in gone:
                unlink_residuals(path)
                path.unlink(missing_ok=True)
            for folder in dict.fromkeys(path.parent for path in gone):
                self.notes += drop_unneeded(folder)


def drop_unneeded(folder: Path) -> tuple[str, ...]:
    """Delete the bases in a folder that none of its other files is stored against.

    Returns:
        What the user should know: which files cannot be read, so that all bases stay.

    Raises:
        OSError: one cannot be deleted.
    """
    try:
        with os.scandir(folder) as entries:
            files = {folder / entry.name for entry in entries if not entry.is_dir()}
    except FileNotFoundError:
        return ()
    bases = {path for path in files if path.name.startswith(BASE_PREFIX) and path.name.endswith(SUFFIX)}
    if not bases:
        return ()
    stays = what_stays(bases, files - bases, lambda path: _bases_of(path, files), lambda _: bases)
    for path in stays.may_go:
        path.unlink(missing_ok=True)
    return stays.notes


def _bases_of(path: Path, files: Collection[Path]) -> tuple[Path, ...]:
    """The file that another is stored against; raises if this cannot be told, or it is not in `files`."""
    try:
        facts = FileFacts.read(FileBytes(path))
    except (OSError, CkptzError):
        if _is_no_checkpoint(path):
            return ()
        raise
    if facts is None or facts.base is None:
        return ()
    base = path.parent / facts.base.file
    if base not in files:
        raise MissingBaseError(f"its base {facts.base.title} is not here")
    return (base,)


def _is_no_checkpoint(path: Path) -> bool:
    """Whether what cannot be read as a checkpoint is certainly none of ours."""
    try:
        if path.name.endswith(TEMPORARY_SUFFIX):  # somebody writes it, or was killed while doing so
            return time.time() - path.stat().st_mtime > ABANDONED_SECONDS
        with contextlib.closing(FileBytes(path)) as file:
            head = file.read(0, min(file.size, LENGTH_BYTES + 1)).tobytes()
    except ConfigError:  # a pipe or a device
        return True
    except FileNotFoundError:  # deleted meanwhile; a link may lead to where nothing is mounted
        return path.resolve().parent == path.parent.resolve()
    is_named = path.name.endswith((SUFFIX, LIGHTNING_SUFFIX))
    return head.startswith(ZIP_MAGIC) or not (is_named or head[LENGTH_BYTES:] == b"{")


def on_host(state: Any) -> Any:
    """Bring a nested state to the CPU, its tensors as plain ones; what is there already is shared."""
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
    return as_exactly_as_may_be(path, functools.partial(load_state, jobs=jobs))
