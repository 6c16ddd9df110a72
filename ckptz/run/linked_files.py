"""Files of a framework's run: deltas that stay readable whatever the framework deletes.

    checkpoint-200/model.ckptz                         a delta
    checkpoint-200/base-4f1c0a9b7d2e6853.ckptz         a hard link to checkpoint-100/model.ckptz
    checkpoint-200/model.exact-9be27a01c35d8f64.ckptz  residual of a lossy file

All bases of a delta are hard-linked into its folder. A folder is then complete by itself, its bases use no
additional disk space, and the file system frees them with the last folder that needs them. Frameworks delete
checkpoints at any time, so existing files are looked up at each save, by inode, because a file may have
several names. If a base cannot be linked (another file system, or one without hard links), the file is
stored as a full file.

The residual of a step is deleted when a later step is complete and readable, so an interrupted save leaves
the step before it exact. Imports no framework.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ckptz.errors import CkptzError
from ckptz.format.caches import LastChunks
from ckptz.format.publish import make_folder, sync_folder
from ckptz.format.written import Written
from ckptz.run.chain import N_REMEMBERED, ChainFile, base_of_next
from ckptz.run.deletion import remove_checkpoints, remove_residuals
from ckptz.run.links import Origin, link_chain
from ckptz.run.names import Inode, inode_of, step_of
from ckptz.run.residuals import residual_of, residuals_of
from ckptz.run.step_files import ChainRule, Kept
from ckptz.run.writer import write_against
from ckptz.store.resolve import Checkpoint, open_checkpoint

N_SETTLED: Final = 8  # number of newest files whose residuals are searched for
# An open base, its name in the folder of the next file, and its inode, None for the pretrained weights.
Base = tuple[Checkpoint, str, Inode | None]


class LinkedFiles:
    """The files of a run, which choose the base of the next file and delete files on request.

    Threads may share it; files are written one at a time. Nothing is deleted while a file is written. If
    another thread than the writing one requests a deletion, the newest file is kept until the next is
    complete.

    Args:
        kept: how long files are kept; None if unknown. All files are then taken to be kept until one is
            missing, and from then on as many as there are.
        exact: number of newest files that keep their residuals, at least 1.
        full_every: largest number of files from one full file to the next.
        origin: the file of pretrained weights, or None; full files are stored as deltas to it.

    Attributes:
        last: cache of the decoded chunks of the newest file, which the next delta needs; None to decode them
            again.
        notes: notes for the user on the last file, and on deletions since.
    """

    def __init__(
        self, kept: Kept | None = None, exact: int = 1, full_every: int = 16, origin: Path | None = None
    ) -> None:
        self._kept, self._n_exact, self._full_every = kept, max(1, exact), full_every
        self._origin = None if origin is None else Origin(origin)
        self.last: LastChunks | None = None
        self._files: dict[Inode, ChainFile[Inode]] = {}  # bases before their deltas
        self._saved: dict[Path, Inode] = {}  # oldest first
        self._sizes: deque[tuple[int, int]] = deque(maxlen=N_REMEMBERED)
        self._is_any_gone = False
        self.notes: list[str] = []
        self._unwanted: list[Path] = []  # to be deleted
        self._writer: int | None = None  # the thread that wrote last
        self._is_writing = False
        self._writing, self._tidying = threading.Lock(), threading.Lock()

    # --- writing --------------------------------------------------------------------------------

    def go_on_from(self, path: Path | None) -> None:
        """Make a restored file the candidate for the next base; with None, no existing file is one."""
        with self._writing, contextlib.suppress(FileNotFoundError):  # deleted: an older file may be the base
            if path is None:
                self._saved.clear()
            else:
                self._saved.pop(path.absolute(), None)
                self._saved[path.absolute()] = inode_of(path)

    def write_against_base(
        self, path: Path, write: Callable[[Checkpoint | None, str | None], Written]
    ) -> Written:
        """Write a file as a delta to the base that takes the least disk, or as a full file.

        Args:
            path: the file.
            write: publishes the file; called with its base and the base's name in the folder, or with None.
        """

        def attempt(opened: Base | None) -> tuple[Written, Inode | None]:
            base, name, inode = (None, None, None) if opened is None else opened
            written = write(base, name)
            is_of_origin = base is not None and inode is None
            if self._origin is not None and is_of_origin and not written.n_deltas:
                self.notes.append(f"no tensor gains from {self._origin.path}; the file is full")
            return written, inode

        with self._writing_one(path):
            make_folder(path.parent)
            written, base = write_against(functools.partial(self._open_base, path), attempt, self.notes)
            self._add(path, written, base)
            for above in path.absolute().parents[1:3]:  # in which the framework may have made the folder
                sync_folder(above)
            self.notes += written.notes
        return written

    @contextlib.contextmanager
    def _writing_one(self, path: Path) -> Iterator[None]:
        """Write a file in the body: one at a time, and requested deletions follow when it is complete."""
        with self._writing:
            with self._tidying:
                self._is_writing, self._writer = True, threading.get_ident()
            self.notes = []
            try:
                yield
            finally:
                self._is_writing = False
            with self._tidying:  # an earlier request is not meant for the new file of this name
                self._unwanted = [other for other in self._unwanted if other != path.absolute()]
            try:
                remove_residuals(old for old in residuals_of(path) if old != residual_of(path))
                self._tidy()
            except OSError as error:
                self.notes.append(f"files to delete are still there: {error}")

    def _open_base(self, path: Path, stack: contextlib.ExitStack) -> Base | None:
        """Open the base of the next file, and link it into the folder of that file; `stack` closes it.

        Returns:
            The base; None for a full file. `notes` contains the reason if the base cannot be linked.

        Raises:
            FormatError, MissingBaseError: the newest file or one of its bases is damaged or missing.
            OSError: a file has been deleted or cannot be read.
        """
        if (chosen := self._chosen(path, stack)) is not None:
            base, inode = chosen
            if names := link_chain(base, path.parent):
                base.share_decoded(self.last)
                return base, names[0], inode
            what = f"stored as a full file, because {base.name} cannot be linked into {path.parent}"
            self.notes.append(what)
        if self._origin is None:
            return None
        opened = self._origin.open_in(path.parent, stack)
        return opened, opened.paths[0].name, None

    def open_newest(self, path: Path, stack: contextlib.ExitStack) -> Checkpoint | None:
        """Open the newest file except `path`, which is about to be replaced; None if there is none."""
        for candidate in reversed(self._saved):
            with contextlib.suppress(FileNotFoundError):  # the framework deleted it
                if candidate != path.absolute():
                    return stack.enter_context(contextlib.closing(open_checkpoint(candidate)))
        return None

    def _chosen(self, path: Path, stack: contextlib.ExitStack) -> tuple[Checkpoint, Inode] | None:
        """Open the base of the next file; None for a full file."""
        newest, path = self.open_newest(path, stack), path.absolute()
        if newest is None:
            return None
        chain = self._learn(newest)
        files, kept, steps = self._existing_files(path, chain[0])
        plain = sum(source.n_bytes for source in newest.tensors.values())
        rule = ChainRule(self._full_every, is_forked=False)
        inode = base_of_next(files, rule, kept, steps, (self._sizes, plain, 0))
        if inode is None or newest.depth - chain.index(inode) + 1 >= self._full_every:
            return None
        if inode == chain[0]:
            return newest, inode
        name = newest.files[chain.index(inode)].name
        return stack.enter_context(contextlib.closing(open_checkpoint(name))), inode

    def _add(self, path: Path, written: Written, base: Inode | None) -> None:
        """Record a new file and the inode of its base, None for a full file."""
        path = path.absolute()
        newest = next(reversed(self._saved.values()), None)
        self._is_any_gone |= self._saved.pop(path, None) is not None
        position = reach = 0
        if base is not None:
            before = self._files.get(newest) if newest is not None else None
            position = 1 + max(self._files[base].position, 0 if before is None else before.position)
            reach = position - self._files[base].position
        inode = inode_of(path)
        self._files.pop(inode, None)  # of a deleted file
        self._files[inode] = ChainFile(written.stored_bytes, position, base, 0)
        self._saved[path] = inode
        self._sizes.append((reach, written.stored_bytes))

    def _learn(self, opened: Checkpoint) -> list[Inode]:
        """Record the files of a chain; return their inodes, nearest first."""
        paths = [Path(file.name) for file in opened.files]
        chain = [inode_of(path) for path in paths]
        for i in reversed(range(len(chain))):
            if chain[i] not in self._files:
                base = chain[i + 1] if i + 1 < len(chain) else None
                position = 0 if base is None else self._files[base].position + 1
                self._files[chain[i]] = ChainFile(paths[i].stat().st_size, position, base, 0)
        return chain

    def _existing_files(
        self, path: Path, newest: Inode
    ) -> tuple[dict[Inode, ChainFile[Inode]], Kept, tuple[int, ...]]:
        """Return the existing files except `path`, `newest` last, how long they are kept, and their steps."""
        existing = {place: file for place, file in self._saved.items() if _is_there(place, file)}
        self._is_any_gone |= len(existing) < len(self._saved)
        self._saved = existing
        seen = [file for place, file in existing.items() if place != path and file != newest] + [newest]
        kept = self._kept or Kept(last=len(seen) if self._is_any_gone else None)
        needed = set(seen)
        for inode in reversed(self._files):
            if inode in needed and (base := self._files[inode].base) is not None:
                needed.add(base)
        self._files = {inode: file for inode, file in self._files.items() if inode in needed}
        steps = self._steps(seen)
        stays = dict(zip(seen, kept.stays(steps or range(1, len(seen) + 1)), strict=True))
        order = sorted(self._files, key=lambda inode: inode == newest)
        files = {inode: replace(self._files[inode], stays=stays.get(inode, 0)) for inode in order}
        return files, kept, steps

    def _steps(self, files: Sequence[Inode]) -> tuple[int, ...]:
        """Return the steps in the names of files; empty if a name has none or they do not ascend."""
        names = {inode: path for path, inode in self._saved.items()}
        steps = [step_of(names[inode]) if inode in names else None for inode in files]
        known = [step for step in steps if step is not None]
        return tuple(known) if len(known) == len(steps) and known == sorted(set(known)) else ()

    # --- deleting -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Delete the residuals of all but the newest files; called when the newest step is complete.

        Nothing is deleted if one of the newest files or its bases cannot be opened; see `notes`.
        """
        saved = [*self._saved][-N_SETTLED:]
        newest, older = saved[-self._n_exact :], saved[: -self._n_exact]
        try:
            for path in newest if older else ():
                residual = residual_of(path)
                open_checkpoint(residual if residual.exists() else path).close()
            for path in older:
                remove_residuals(residuals_of(path))
        except (OSError, CkptzError) as error:
            self.notes.append(f"older files stay exact until the next save: {error}")

    def remove(self, path: Path) -> None:
        """Delete a file, and the bases in its folder that no other file needs.

        Raises:
            OSError: the file cannot be deleted.
        """
        with self._tidying:
            self._unwanted.append(path.absolute())
        if threading.get_ident() == self._writer:
            self._tidy()
        else:  # the next file may not have been begun
            self._tidy(always_kept=[*self._saved][-1:])

    def _tidy(self, always_kept: Sequence[Path] = ()) -> None:
        """Delete the requested files and their unneeded bases, unless a file is being written."""
        with self._tidying:
            if self._is_writing:
                return
            gone = [path for path in self._unwanted if path not in always_kept]
            self._unwanted = [path for path in self._unwanted if path in always_kept]
            self.notes += remove_checkpoints(gone)


def _is_there(path: Path, inode: Inode) -> bool:
    try:
        return inode_of(path) == inode
    except OSError:
        return False
