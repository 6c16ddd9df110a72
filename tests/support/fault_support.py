"""Calls of the operating system that fail or never return: each call in turn, or all that open a file."""

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
CHANGES = ("mkdir", "unlink", "rmdir", "link", "replace", "fsync")  # writes are always included
CALLS = (*CHANGES, "stat", "lstat", "listdir", "scandir", "open", "preadv", "pread")

DEAD = 9  # exit code of a process that ends by `die`


def die() -> OSError:
    """End this process at once, as SIGKILL does, instead of returning an error."""
    os._exit(DEAD)


each_error = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())


class Faults:
    """Makes chosen calls of the operating system fail.

    Args:
        fails: decides whether a call fails, by its number, from 1, and its path, or None for a descriptor.
        error: returns the exception to raise.
        folder: calls on paths outside of it are neither counted nor failed.

    Attributes:
        n_calls: number of calls so far.
    """

    def __init__(self, fails: Callable[[int, Path | None], bool], error: Error, folder: Path) -> None:
        self._fails, self._error, self._folder = fails, error, folder
        self.n_calls = 0

    def check(self, path: Any, begin: Callable[[], object] = lambda: None) -> None:
        """Count a call, and raise the error if it must fail, after it has begun."""
        target = None if isinstance(path, int) else Path(os.fsdecode(path))
        if target is not None and target.is_absolute() and not target.is_relative_to(self._folder):
            return
        self.n_calls += 1
        if self._fails(self.n_calls, target):
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
        """Replace the functions until the block ends."""
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
    """A result of `os.scandir` whose entries, too, make calls that can fail."""

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

    def __getattr__(self, method: str) -> Any:  # stat, is_file, is_dir, is_symlink
        self._faults.check(self.path)
        return getattr(self._entry, method)


@contextmanager
def unreadable(path: Path, error: Error) -> Iterator[None]:
    """Make every open of a file fail; its name and size stay visible."""
    opens = Faults(lambda _, touched: touched == path, error, path.parent)
    with pytest.MonkeyPatch.context() as patch:
        for module in (io, builtins, os):
            patch.setattr(module, "open", opens._wrap(module.open))
        yield


@contextmanager
def all_closed() -> Iterator[None]:
    """Require that files opened for reading in the block are closed at its end."""
    opened, init = list[FileBytes](), FileBytes.__init__

    def record_open(self: FileBytes, path: str | os.PathLike[str]) -> None:
        init(self, path)
        opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileBytes, "__init__", record_open)
        yield
    assert [file.name for file in opened if not file._file.closed] == []


@contextmanager
def copied(prepared: Path) -> Iterator[Path]:
    """Copy a folder by hard links, which is safe because nothing writes in place."""
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
    """Do `work` on copies of a folder with each call failing in turn, and return the number of calls.

    Args:
        prepared: folder to copy.
        work: function of the copied folder.
        check: called with the copy, and the error of `work` or None.
        stride: only every n-th pair of a call and an error is tried; 1 tries all.
    """
    with copied(prepared) as folder, Faults(lambda *_: False, OSError, folder).installed() as calls:
        work(folder)
    for number, error in [(n, e) for n in range(1, calls.n_calls + 1) for e in ERRORS.values()][::stride]:
        with copied(prepared) as folder:
            raised: Exception | None = None
            with Faults(lambda n, _, number=number: n == number, error, folder).installed():
                try:
                    work(folder)
                except Exception as caught:
                    raised = caught
            check(folder, raised)
    return calls.n_calls
