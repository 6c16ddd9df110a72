"""Calls of the operating system that fail or never return: each one in turn, or whatever opens one file."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptz.format.byte_source import FileBytes
from ckptz.format.publish import EagerFile

Error = Callable[[], OSError]
ERRORS: dict[str, Error] = {
    "EIO": lambda: OSError(errno.EIO, "input/output error"),
    "EMFILE": lambda: OSError(errno.EMFILE, "too many open files"),
    "EACCES": lambda: PermissionError(errno.EACCES, "permission denied"),
    "ENOSPC": lambda: OSError(errno.ENOSPC, "no space left on device"),
    "timeout": lambda: TimeoutError(errno.ETIMEDOUT, "timed out"),
}
CHANGES = ("mkdir", "unlink", "rmdir", "link", "replace", "fsync")  # writes count among them
CALLS = (*CHANGES, "stat", "lstat", "listdir", "scandir", "open", "preadv", "pread")

DEAD = 9  # what a process ends with


def die() -> OSError:
    """End this process as SIGKILL does, in place of an error."""
    os._exit(DEAD)


each_error = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())


class Faults:
    """Fails those calls that a test chooses.

    Args:
        fails: is told the number of a call, from 1, and its path, or None for one by file descriptor.
        error: makes what is raised.
        folder: calls on paths elsewhere are let through and not counted.

    Attributes:
        n_calls: seen so far.
    """

    def __init__(self, fails: Callable[[int, Path | None], bool], error: Error, folder: Path) -> None:
        self._fails, self._error, self._folder = fails, error, folder
        self.n_calls = 0

    def check(self, path: Any, begin: Callable[[], object] = lambda: None) -> None:
        """Count a call, and fail it if it is its turn, when it has begun."""
        found = None if isinstance(path, int) else Path(os.fsdecode(path))
        if found is not None and found.is_absolute() and not found.is_relative_to(self._folder):
            return
        self.n_calls += 1
        if self._fails(self.n_calls, found):
            begin()
            raise self._error()

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            self.check(path)
            return function(path, *args, **kwargs)

        return wrapped

    def _wrap_write(self, write: Callable[[EagerFile, Any], int]) -> Callable[[EagerFile, Any], int]:
        def wrapped(file: EagerFile, data: Any) -> int:
            self.check(file.name, lambda: write(file, memoryview(data)[: len(data) // 2]))
            return write(file, data)

        return wrapped

    @contextmanager
    def installed(self, calls: Collection[str] = CALLS) -> Iterator[Faults]:
        """Until the block ends."""
        scandir = os.scandir
        with pytest.MonkeyPatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, self._wrap(getattr(os, name)))
            if "scandir" in calls:
                patch.setattr(os, "scandir", lambda path=".": _Scan(path, scandir, self))
            for module in (io, builtins) if "open" in calls else ():
                patch.setattr(module, "open", self._wrap(module.open))
            patch.setattr(EagerFile, "write", self._wrap_write(EagerFile.write))
            yield self


class _Scan:
    """What `os.scandir` gives; the entries, too, ask the system."""

    def __init__(self, path: Any, scandir: Callable[..., Any], faults: Faults) -> None:
        faults.check(path)
        self._entries, self._faults = scandir(path), faults

    def __iter__(self) -> Iterator[_Entry]:
        return (_Entry(entry, self._faults) for entry in self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.close()


class _Entry:
    def __init__(self, entry: os.DirEntry[str], faults: Faults) -> None:
        self._entry, self._faults = entry, faults
        self.name, self.path = entry.name, entry.path

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, question: str) -> Any:  # stat, is_file, is_dir, is_symlink
        self._faults.check(self.path)
        return getattr(self._entry, question)


@contextmanager
def unreadable(path: Path, error: Error) -> Iterator[None]:
    """Nobody can open a file; its name and its size are seen."""
    opens = Faults(lambda _, touched: touched == path, error, path.parent)
    with pytest.MonkeyPatch.context() as patch:
        for module in (io, builtins, os):
            patch.setattr(module, "open", opens._wrap(module.open))
        yield


@contextmanager
def all_closed() -> Iterator[None]:
    """Require that the files that are opened for reading in the block are closed at its end."""
    opened, init = list[FileBytes](), FileBytes.__init__

    def recorded(self: FileBytes, path: str | os.PathLike[str]) -> None:
        init(self, path)
        opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileBytes, "__init__", recorded)
        yield
    assert [file.name for file in opened if not file._file.closed] == []


@contextmanager
def copied(prepared: Path) -> Iterator[Path]:
    """A copy of a folder, by hard links: nothing is written to in place."""
    folder = prepared.with_name(f"{prepared.name}-with-faults")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared, folder, copy_function=os.link)
    yield folder
    shutil.rmtree(folder)


def fail_everywhere(
    prepared: Path,
    work: Callable[[Path], object],
    check: Callable[[Path, Exception | None], None],
    *,
    stride: int = 1,
) -> int:
    """Do `work` on copies of a folder, while one call of the system fails; how many calls there are.

    Args:
        prepared: the folder.
        work: what is done.
        check: is given the copy, and the error that `work` ended with.
        stride: every so many pairs of a call and an error are tried; 1 tries all.
    """
    with copied(prepared) as folder, Faults(lambda *_: False, OSError, folder).installed() as counted:
        work(folder)
    for at, error in [(at, e) for at in range(1, counted.n_calls + 1) for e in ERRORS.values()][::stride]:
        with copied(prepared) as folder:
            ended: Exception | None = None
            with Faults(lambda n, _, at=at: n == at, error, folder).installed():
                try:
                    work(folder)
                except Exception as caught:
                    ended = caught
            check(folder, ended)
    return counted.n_calls
