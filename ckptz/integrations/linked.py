"""Files stored against one another that survive whoever deletes folders and files.

    checkpoint-200/model.ckptz                  a delta
    checkpoint-200/base-4f1c0a9b7d2e6853.ckptz  a second name of checkpoint-100/model.ckptz

Every file that a delta needs gets a second name, a hard link, in the delta's own folder. So a folder is
complete by itself, its bases take no room twice, and the file system frees them with the last folder
that needs them: frameworks delete old checkpoints as they like. Where the file system has no hard links,
or the base lies on another one, the file is stored as an anchor. Knows no framework.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ckptz.api.read import check_limit
from ckptz.codec.units import TensorSource
from ckptz.commands.restore import decoded_chunks
from ckptz.container.byte_source import FileBytes
from ckptz.container.envelope import LENGTH_BYTES, read_envelope
from ckptz.container.index import KEY_DIGEST, BaseRef
from ckptz.container.publish import TEMPORARY_SUFFIX, make_folder, publish, sync_folder
from ckptz.container.reader import Container
from ckptz.container.writer import Written
from ckptz.encoding.guide import Guide
from ckptz.errors import CkptzError, ConfigError, FormatError, MissingBaseError, WriteError, named
from ckptz.integrations.plain_types import from_plain, to_plain
from ckptz.methods.lossless import LOSSLESS
from ckptz.methods.method import Method
from ckptz.methods.table import checked
from ckptz.parallel import Workers
from ckptz.pipeline import Job, write
from ckptz.roles import Rule
from ckptz.store.needs import needs_of
from ckptz.store.resolve import MAX_DEPTH, SUFFIX, Checkpoint, open_checkpoint, open_file
from ckptz.store.steps import ABANDONED_SECONDS
from ckptz.training.snapshot import check_dense
from ckptz.tree.flatten import flatten
from ckptz.tree.unflatten import unflatten

BASE_PREFIX: Final = "base-"  # begins the second names of bases
N_DIGITS: Final = 16  # of the index's digest, in such a name
N_REMEMBERED: Final = 8  # files of which one may become the next base
LIGHTNING_SUFFIX: Final = ".ckpt"
ZIP_MAGIC: Final = b"PK\x03\x04"  # of what torch itself saves


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    """How the files of a run are stored.

    Attributes:
        config: what may be lost; nothing by default.
        anchor_every: every so many saves a file needs no other; 1 to 64. 1 stores no deltas.
        jobs: threads, all cores by default.
    """

    config: Method = LOSSLESS
    anchor_every: int = 16
    jobs: int | None = None

    def __post_init__(self) -> None:
        checked(self.config)
        if not 1 <= self.anchor_every <= MAX_DEPTH:
            raise ConfigError(f"anchor_every must be 1..{MAX_DEPTH}, got {self.anchor_every}")


DEFAULTS: Final = ChainOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What shall go into one file.

    Attributes:
        tensors: by name.
        tree: as in `Index.tree`; None if the names tell all.
        metadata: text for whoever looks.
        step: training step, if known.
        guides: what planners may know of tensors; by default what the tensors themselves tell.
        role_rules: what tensors are, where their names mislead.
    """

    tensors: Mapping[str, TensorSource]
    tree: dict[str, Any] | None = None
    metadata: Mapping[str, str] | None = None
    step: int | None = None
    guides: Mapping[str, Guide] | None = None
    role_rules: tuple[Rule, ...] = ()

    @classmethod
    def of_state(cls, state: Any, step: int | None = None, role_rules: tuple[Rule, ...] = ()) -> Draft:
        """A nested state of plain values and tensors on the CPU, whose memory is shared."""
        flat = flatten(state)
        tree = None if _says_nothing(state, flat.tensors) else flat.tree
        return cls(tensors=flat.tensors, tree=tree, step=step, role_rules=role_rules)

    def guided(self, guides: Mapping[str, Guide]) -> Draft:
        """The same with what else is known of its tensors."""
        return replace(self, guides=guides)

    def job(self, config: Method, base: Checkpoint | None, ref: BaseRef | None) -> Job:
        """Describe the file for the writer."""
        return Job(
            tensors=self.tensors,
            config=config,
            metadata=self.metadata,
            step=self.step,
            tree=self.tree,
            base=ref,
            bases={} if base is None else base.tensors,
            role_rules=self.role_rules,
            guides=self.guides,
        )


def _says_nothing(state: Any, tensors: Mapping[str, TensorSource]) -> bool:
    """Whether a state is its named tensors and nothing else."""
    return type(state) is dict and list(state) == list(tensors)


# --- writing --------------------------------------------------------------------------------------


class Chain:
    """Writes the files of one run, each against the newest of those before it that is still there.

    Threads may share it; files are written one at a time. Nothing is deleted while one is written, and where
    another thread than the one that writes asks for it, the newest file stays until the next is whole.

    Args:
        options: how.

    Attributes:
        notes: what the user should know of the file that was written last, and of what was removed since.
    """

    def __init__(self, options: ChainOptions = DEFAULTS) -> None:
        self.options = options
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

    def write(self, path: Path, draft: Draft, *, is_anchor: bool = False) -> Written:
        """Write a file, which appears whole or not at all.

        Args:
            path: where; its folder is made.
            draft: what.
            is_anchor: store it against nothing.

        Raises:
            WriteError: the disk is full or fails; what was there stays.
        """
        with self._writing:
            with self._tidying:
                self._is_writing, self._writer = True, threading.get_ident()
            try:
                make_folder(path.parent)
                written = self._write(path, draft, is_anchor)
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
                self._tidy()
            except OSError as error:
                self.notes += (f"what is not wanted any more stays: {error}",)
            return written

    def _write(self, path: Path, draft: Draft, is_anchor: bool) -> Written:
        notes: list[str] = []
        try:
            with contextlib.ExitStack() as held:
                base = None if is_anchor else self._open_base(path, held)
                if base is not None and (ref := self._link(base, path.parent, notes)) is not None:
                    return self._publish(path, draft, base, ref)
        except (FormatError, MissingBaseError) as error:  # of the base: what is saved is in memory
            notes.append(f"stored as an anchor, because the base cannot be read: {error}")
        finally:
            self.notes = tuple(notes)
        return self._publish(path, draft, None, None)

    def _open_base(self, path: Path, held: contextlib.ExitStack) -> Checkpoint | None:
        for candidate in reversed(self._saved):
            if candidate == path.absolute():
                continue  # is about to be replaced
            with contextlib.suppress(FileNotFoundError):  # the framework deleted it
                base = held.enter_context(contextlib.closing(open_checkpoint(candidate)))
                return base if base.depth + 1 < self.options.anchor_every else None
        return None

    def _link(self, base: Checkpoint, folder: Path, notes: list[str]) -> BaseRef | None:
        names = link_chain(base, folder)
        if not names:
            notes.append(f"stored as an anchor, because {base.name} cannot be linked into {folder}")
            return None
        return BaseRef(content_id=base.content_id(), file=names[0], depth=base.depth + 1)

    def _publish(self, path: Path, draft: Draft, base: Checkpoint | None, ref: BaseRef | None) -> Written:
        with publish(path) as sink, Workers(self.options.jobs) as workers:
            return write(sink, draft.job(self.options.config, base, ref), workers)

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
                path.unlink(missing_ok=True)
            for folder in dict.fromkeys(path.parent for path in gone):
                self.notes += drop_unneeded(folder)


# --- the second names of bases ----------------------------------------------------------------------


def link_chain(base: Checkpoint, folder: Path) -> tuple[str, ...]:
    """Give every file of an open chain a name in a folder.

    Returns:
        The names, nearest first; none if the file system does not do that.
    """
    containers = [file for file in base.files if isinstance(file, Container)]
    refs = [file.index.base for file in containers]
    names = [_own_name(Path(base.files[0].name)), *(ref.file for ref in refs if ref is not None)]
    for file, name in zip(base.files, names, strict=True):
        if not _link(Path(file.name), folder / name):
            return ()
    return tuple(names)


def _own_name(path: Path) -> str:
    """A name that only this very file has; others may have the same values, and other codes for them."""
    with contextlib.closing(FileBytes(path)) as source:
        digest = (read_envelope(source).metadata or {}).get(KEY_DIGEST)
    return f"{BASE_PREFIX}{(digest or secrets.token_hex(32))[:N_DIGITS]}{SUFFIX}"


def _link(path: Path, name: Path) -> bool:
    try:
        os.link(path, name)
    except FileExistsError:
        return name.samefile(path) or name.name.startswith(BASE_PREFIX)
    except OSError:
        return False
    return True


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
    needs = needs_of(files - bases, lambda path: _bases_of(path, files), lambda _: bases)
    for path in bases - needs.known - needs.doubtful:
        path.unlink(missing_ok=True)
    return needs.notes


def _bases_of(path: Path, files: Collection[Path]) -> tuple[Path, ...]:
    """The file that another is stored against.

    Raises:
        OSError, CkptzError: this cannot be found out, and it may be a checkpoint.
        MissingBaseError: that file is not among `files`.
    """
    try:
        with contextlib.closing(open_file(FileBytes(path))) as file:
            ref = file.index.base if isinstance(file, Container) else None
    except (OSError, CkptzError):
        if _is_no_checkpoint(path):
            return ()
        raise
    if ref is None:
        return ()
    if path.parent / ref.file not in files:
        raise MissingBaseError(f"its base {ref.title} is not here")
    return (path.parent / ref.file,)


def _is_no_checkpoint(path: Path) -> bool:
    """Whether what cannot be read as a checkpoint is certainly none of ours.

    Raises:
        OSError: it cannot be read at all.
    """
    try:
        if path.name.endswith(TEMPORARY_SUFFIX):  # somebody writes it, or was killed while doing so
            return time.time() - path.stat().st_mtime > ABANDONED_SECONDS
        with path.open("rb") as file:
            head = file.read(LENGTH_BYTES + 1)
    except FileNotFoundError:  # deleted meanwhile; a link may lead to where nothing is mounted
        return path.resolve().parent == path.parent.resolve()
    is_named = path.name.endswith((SUFFIX, LIGHTNING_SUFFIX))
    return head.startswith(ZIP_MAGIC) or not (is_named or head[LENGTH_BYTES:] == b"{")


# --- nested states ----------------------------------------------------------------------------------


def on_host(state: Any) -> Any:
    """The same nested state with tensors on the CPU, as plain ones; what is there already is shared."""
    copies: dict[object, torch.Tensor] = {}  # those that are one stay one

    def tensor(value: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        check_dense(value, ".".join(path))
        key: object = id(value)
        if value.numel():
            key = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in copies:
            copies[key] = value.detach().as_subclass(torch.Tensor).cpu()
        return copies[key]

    return to_plain(state, tensor)


def read_state(path: Path, jobs: int | None = None) -> Any:
    """The nested state of a file that a `Chain` wrote, every chunk held against its checksum.

    Raises:
        FileNotFoundError: no such file.
        FormatError: it is damaged.
        MissingBaseError: a file that it is stored against is missing.
        LimitError: it does not fit into memory.
    """
    with contextlib.closing(open_checkpoint(path)) as checkpoint, Workers(jobs) as workers:
        if checkpoint.container is None:
            raise FormatError(f"{path}: not a {SUFFIX} file")
        n_bytes = sum(source.dtype.n_bytes(source.shape) for source in checkpoint.tensors.values())
        check_limit(n_bytes, None, str(path))
        tree = checkpoint.container.index.tree
        try:
            state = unflatten(
                checkpoint.tensors, tree, None, lambda tensors: decoded_chunks(tensors, workers)
            )
            return from_plain(state)
        except CkptzError as error:
            raise error if str(path) in str(error) else named(error, str(path)) from None
