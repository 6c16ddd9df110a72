"""Files stored against one another that survive whoever deletes folders and files.

    checkpoint-200/model.ckptz                         a delta
    checkpoint-200/base-4f1c0a9b7d2e6853.ckptz         a second name of checkpoint-100/model.ckptz
    checkpoint-200/model.exact-9be27a01c35d8f64.ckptz  a residual: the same without loss, if that is lossy

Every file that a delta needs gets a second name, a hard link, in the delta's own folder. So a folder is
complete by itself, its bases take no room twice, and the file system frees them with the last folder
that needs them: frameworks delete old checkpoints as they like, so what is still there is looked up at each
save. Where the file system has no hard links, or the base lies on another one, the file is stored as a full
file. A file is known by its inode, whatever names it has and had.

The newest lossy files come back exactly by their residuals. A residual is
named by the digest of the very file that it belongs to, so one that is replaced is exact at every moment. It
goes when a later step is complete and can be opened: what is cut off before leaves the step before it exact.
Knows no framework.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ckptz.errors import CkptzError
from ckptz.format.written import Written
from ckptz.run.chain import N_REMEMBERED, ChainFile, base_of_next
from ckptz.run.deletion import remove_checkpoints, remove_residuals
from ckptz.run.exact import residual_of, residuals_of
from ckptz.run.links import Origin, link_chain
from ckptz.run.names import Inode, inode_of, step_of
from ckptz.run.step_files import ChainRule, Kept
from ckptz.store.resolve import Checkpoint, open_checkpoint

N_SETTLED: Final = 8  # newest files whose residuals are looked for


class LinkedFiles:
    """The files of a run: what the next is stored against, and what may be deleted.

    Threads may share it; files are written one at a time. Nothing is deleted while one is written, and where
    another thread than the one that writes asks for it, the newest file stays until the next is whole.

    Args:
        kept: how long files stay; None if that is not known. Then all are taken to stay until one is gone,
            and from then on as many as there are.
        exact: so many newest files keep their residuals when their steps are complete, at least one.
        full_every: at least every so many files needs no other of the run.
        origin: what training began from; files that would need no other are stored against it.

    Attributes:
        notes: what the user should know of the file that was written last, and of what was removed since.
    """

    def __init__(
        self, kept: Kept | None = None, exact: int = 1, full_every: int = 16, origin: Path | None = None
    ) -> None:
        self._kept, self._n_exact, self._full_every = kept, max(1, exact), full_every
        self._origin = None if origin is None else Origin(origin)
        self._files: dict[Inode, ChainFile[Inode]] = {}  # bases before what is stored against them
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
        """Store the next file against this one; with None, against none that is there now."""
        with self._writing, contextlib.suppress(FileNotFoundError):  # deleted; then against an older one
            if path is None:
                self._saved.clear()
            else:
                self._saved.pop(path.absolute(), None)
                self._saved[path.absolute()] = inode_of(path)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Write a file, one at a time: nothing is deleted meanwhile, and then what may go."""
        with self._writing:
            with self._tidying:
                self._is_writing, self._writer = True, threading.get_ident()
            self.notes = []
            try:
                yield
            finally:
                self._is_writing = False
            with self._tidying:  # what was asked for before is not meant for this file
                self._unwanted = [other for other in self._unwanted if other != path.absolute()]
            try:
                remove_residuals(old for old in residuals_of(path) if old != residual_of(path))
                self._tidy()
            except OSError as error:
                self.notes.append(f"what is not wanted any more stays: {error}")

    def open_base(
        self, path: Path, held: contextlib.ExitStack
    ) -> tuple[Checkpoint, str, Inode | None] | None:
        """Open what takes the least disk in the end, and give it a name in the folder of the next file.

        Args:
            path: where that file will be.
            held: closes it.

        Returns:
            It, its name there, and which file of the run it is, None for what training began from. None for a
            full file; `notes` say why if it cannot be linked.

        Raises:
            FormatError, MissingBaseError: the newest file or one that it needs is damaged or not there.
            OSError: a file is not there any more, or cannot be read.
        """
        if (chosen := self._chosen(path.absolute(), held)) is not None:
            base, inode = chosen
            if names := link_chain(base, path.parent):
                return base, names[0], inode
            what = f"stored as a full file, because {base.name} cannot be linked into {path.parent}"
            self.notes.append(what)
        if self._origin is None:
            return None
        opened = held.enter_context(contextlib.closing(self._origin.open_in(path.parent)))
        return opened, opened.paths[0].name, None

    def _chosen(self, path: Path, held: contextlib.ExitStack) -> tuple[Checkpoint, Inode] | None:
        """Open what the next file is stored against by the rule."""
        for candidate in reversed(self._saved):
            with contextlib.suppress(FileNotFoundError):  # the framework deleted it
                if candidate != path:  # that is about to be replaced
                    newest = held.enter_context(contextlib.closing(open_checkpoint(candidate)))
                    break
        else:
            return None
        chain = self._learn(newest)
        files, kept, steps = self._there(path, chain[0])
        plain = sum(source.n_bytes for source in newest.tensors.values())
        rule = ChainRule(self._full_every, is_forked=False)
        inode = base_of_next(files, rule, kept, steps, (self._sizes, plain, 0))
        if inode is None or newest.depth - chain.index(inode) + 1 >= self._full_every:
            return None
        if inode == chain[0]:
            return newest, inode
        name = newest.files[chain.index(inode)].name
        return held.enter_context(contextlib.closing(open_checkpoint(name))), inode

    def add(self, path: Path, written: Written, base: Inode | None) -> None:
        """Take note of a file that was written, and of what it is stored against, None for a full file."""
        path = path.absolute()
        newest = next(reversed(self._saved.values()), None)
        self._is_any_gone |= self._saved.pop(path, None) is not None
        position = reach = 0
        if base is not None:
            before = self._files.get(newest) if newest is not None else None
            position = 1 + max(self._files[base].position, 0 if before is None else before.position)
            reach = position - self._files[base].position
        inode = inode_of(path)
        self._files.pop(inode, None)  # of a file that is gone
        self._files[inode] = ChainFile(written.stored_bytes, position, base, 0)
        self._saved[path] = inode
        self._sizes.append((reach, written.stored_bytes))

    def _learn(self, opened: Checkpoint) -> list[Inode]:
        """Take note of the files of a chain, nearest first."""
        paths = [Path(file.name) for file in opened.files]
        chain = [inode_of(path) for path in paths]
        for i in reversed(range(len(chain))):
            if chain[i] not in self._files:
                base = chain[i + 1] if i + 1 < len(chain) else None
                position = 0 if base is None else self._files[base].position + 1
                self._files[chain[i]] = ChainFile(paths[i].stat().st_size, position, base, 0)
        return chain

    def _there(
        self, path: Path, newest: Inode
    ) -> tuple[dict[Inode, ChainFile[Inode]], Kept, tuple[int, ...]]:
        """Return the existing files except the one to be replaced, newest last, their retention and steps."""
        there = {place: file for place, file in self._saved.items() if _is_there(place, file)}
        self._is_any_gone |= len(there) < len(self._saved)
        self._saved = there
        seen = [file for place, file in there.items() if place != path and file != newest] + [newest]
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
        """Return the steps that the files are called after, if each is and they ascend; else none."""
        names = {inode: path for path, inode in self._saved.items()}
        steps = [step_of(names[inode]) if inode in names else None for inode in files]
        known = [step for step in steps if step is not None]
        return tuple(known) if len(known) == len(steps) and known == sorted(set(known)) else ()

    # --- deleting -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Delete the residuals of all but the newest files, whose steps are complete now.

        Nothing goes where one of the newest cannot be opened with all that it needs; see `notes`.
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
        """Delete a file, and those bases of its folder that no file there needs any more.

        Raises:
            OSError: the file cannot be deleted.
        """
        with self._tidying:
            self._unwanted.append(path.absolute())
        if threading.get_ident() == self._writer:
            self._tidy()
        else:  # the next file may not have been begun
            self._tidy(spared=[*self._saved][-1:])

    def _tidy(self, spared: Sequence[Path] = ()) -> None:
        """Delete what is unwanted, and then what only that needed; while a file is written, nothing."""
        with self._tidying:
            if self._is_writing:
                return
            gone = [path for path in self._unwanted if path not in spared]
            self._unwanted = [path for path in self._unwanted if path in spared]
            self.notes += remove_checkpoints(gone)


def _is_there(path: Path, inode: Inode) -> bool:
    try:
        return inode_of(path) == inode
    except OSError:
        return False
