"""The linked files of a run, and the choice of which of them the next one is stored against.

Frameworks delete files as they like, so what is still there is looked up at each save.

A file is known by its inode, whatever names it has and had. Knows no framework.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from ckptz.format.written import Written
from ckptz.run.chain import N_REMEMBERED, ChainFile, base_of_next
from ckptz.run.names import Inode, inode_of
from ckptz.run.step_files import ChainRule, Kept
from ckptz.store.resolve import Checkpoint


class RunFiles:
    """The files of a run.

    Args:
        kept: how long files stay; None if that is not known. Then all are taken to stay until one is gone,
            and from then on as many as there are.
    """

    def __init__(self, kept: Kept | None = None) -> None:
        self._kept = kept
        self._files: dict[Inode, ChainFile[Inode]] = {}  # bases before what is stored against them
        self._saved: dict[Path, Inode] = {}  # oldest first
        self._written: deque[tuple[int, int]] = deque(maxlen=N_REMEMBERED)
        self._is_any_gone = False

    def base_of_next(self, path: Path, newest: Checkpoint, full_every: int) -> int | None:
        """Choose what the next file, which will be at `path`, is stored against.

        `newest` is the newest file that is still there, open.

        Returns:
            The index in the newest file's chain; None for a full file.

        Raises:
            OSError: a file of the chain is not there any more.
        """
        chain = self._learn(newest)
        self._saved.setdefault(Path(newest.files[0].name), chain[0])  # of a process before this one
        files, kept = self._there(path.absolute(), chain[0])
        plain = sum(source.n_bytes for source in newest.tensors.values())
        rule = ChainRule(full_every, is_forked=False)
        base = base_of_next(files, rule, kept, (), (self._written, plain, 0))
        return None if base is None else chain.index(base)

    def _reach(self, file: ChainFile[Inode]) -> int:
        return 0 if file.base is None else file.position - self._files[file.base].position

    def add(self, path: Path, written: Written, base: Checkpoint | None) -> None:
        """Take note of a file that was written, and of what it is stored against, None for a full file."""
        path = path.absolute()
        newest = next(reversed(self._saved.values()), None)
        self._is_any_gone |= self._saved.pop(path, None) is not None
        against = None if base is None else self._learn(base)[0]
        position = 0
        if against is not None:
            before = self._files.get(newest) if newest is not None else None
            position = 1 + max(self._files[against].position, 0 if before is None else before.position)
        file = ChainFile(written.stored_bytes, position, against, 0)
        inode = inode_of(path)
        self._files.pop(inode, None)  # of a file that is gone
        self._files[inode] = file
        self._saved[path] = inode
        self._written.append((self._reach(file), file.n_bytes))

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

    def _there(self, path: Path, newest: Inode) -> tuple[dict[Inode, ChainFile[Inode]], Kept]:
        """What is there less what is about to be replaced, the newest last; how long it stays."""
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
        stays = dict(zip(seen, kept.stays(range(1, len(seen) + 1)), strict=True))
        order = sorted(self._files, key=lambda inode: inode == newest)
        return {inode: replace(self._files[inode], stays=stays.get(inode, 0)) for inode in order}, kept


def _is_there(path: Path, inode: Inode) -> bool:
    try:
        return inode_of(path) == inode
    except OSError:
        return False
