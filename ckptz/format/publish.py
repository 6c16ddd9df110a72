"""Atomic publication: a file appears whole under its name, or not at all; behind a URL, too.

The only caller of `os.replace` in the package.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import os
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from ckptz.errors import ConfigError
from ckptz.format.byte_source import is_url, path_of
from ckptz.format.uploads import upload

TEMPORARY_SUFFIX: Final = ".ckptz-tmp"
EAGER_BYTES: Final = 1 << 26  # small beside what a system collects, and long enough for any disk
_TEMPORARY: Final = re.compile(rf"([0-9a-f]{{8}})-(\d{{1,10}})-[0-9a-f]{{16}}{re.escape(TEMPORARY_SUFFIX)}$")
PRIVATE: Final = 0o600
READ_WRITE: Final = 0o666  # what the system makes of it by the user's umask is the widest mode

_CANNOT_SYNC: Final = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM}
)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last a power cut, where the system can.

    Raises:
        OSError: the disk failed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def make_folder(folder: Path, *, parents: bool = True) -> bool:
    """Make a folder, if it is missing, by default with those above it; a power cut does not take it back.

    Behind a URL an upload makes the folders that it needs, so that nothing is done here.

    Returns:
        Whether it was made by this very call.

    Raises:
        FileNotFoundError: one above it is missing, and not to be made.
        OSError: a file is in the place, or the disk fails.
    """
    missing = [] if is_url(folder) or folder.is_dir() else [folder]
    while parents and missing and not missing[-1].parent.is_dir():
        missing.append(missing[-1].parent)
    is_new = False
    for new in reversed(missing):
        try:
            new.mkdir()
            is_new = True
        except FileExistsError:
            if not new.is_dir():
                raise
            is_new = False  # another process made it meanwhile
        sync_folder(new.parent)
    return is_new


class EagerFile(io.FileIO):
    """A new file that the system begins to store while it is written: all is waited for at its end."""

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))
        self._begun = 0

    def write(self, data: Any) -> int:
        n, end = super().write(data), self.tell()
        if end - self._begun >= EAGER_BYTES and hasattr(os, "posix_fadvise"):
            begin, self._begun = self._begun, end
            with contextlib.suppress(OSError):  # advice that a file system does not take
                # What is not stored yet cannot be dropped from memory, and so is stored.
                os.posix_fadvise(self.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
        return n


class Publication:
    """New files that replace others together, in the order in which they were completed.

    `owner` begins the names of the temporary files, so that whoever owns a folder knows its own.
    """

    def __init__(self, owner: str = "") -> None:
        self._owner = owner
        self._staged: list[tuple[Path, Path]] = []

    @contextlib.contextmanager
    def file(self, path: str | os.PathLike[str], like: Iterable[Path] = ()) -> Iterator[BinaryIO]:
        """Open a file to write; it stays a temporary one beside `path` until all are complete.

        So the rename stays within one file system. What goes behind a URL is made in the system's folder for
        temporary files, and uploaded when all are complete. The mode is that of the replaced file, and
        never wider than what the files `like` have in common.

        Raises:
            ConfigError: something that is no file is in the place, or the name is that of a folder.
        """
        if str(path).endswith(("/", os.sep)):
            raise ConfigError(f"{path}: is written as a folder; name a file")
        target = path_of(path)
        mode = mode_for(target, like)
        # The name says nothing of the target's, which may be as long as the file system allows.
        writer = f"{_machine()}-{os.getpid()}-{secrets.token_hex(8)}"
        name = f".{self._owner}{writer}{TEMPORARY_SUFFIX}"
        temporary = scratch_folder(target) / name
        try:
            with (
                _naming(temporary, target),
                io.BufferedWriter(EagerFile(temporary, mode)) as file,
            ):
                yield file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._staged.append((temporary, target))

    def commit(self) -> None:
        """Rename all temporary files to their targets."""
        for temporary, target in self._staged:
            if is_url(target):
                upload(temporary, target.fs, target.path, str(target))  # type: ignore[attr-defined]  # a UPath
                temporary.unlink()
                continue
            with _naming(temporary, target):
                os.replace(temporary, target)
        for folder in dict.fromkeys(target.parent for _, target in self._staged if not is_url(target)):
            sync_folder(folder)

    def discard(self) -> None:
        """Remove the files that have no name yet."""
        for temporary, _ in self._staged:
            temporary.unlink(missing_ok=True)


def scratch_folder(target: Path) -> Path:
    """Return the folder of this machine where a file is made that becomes `target`."""
    return Path(tempfile.gettempdir()) if is_url(target) else target.parent


@functools.cache
def _machine() -> str:
    """Digits for the processes that this one can see: those of its machine, or of its container."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(
            f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}".encode()
        ).hexdigest()[:8]
    return "0"  # no system to ask: nobody can tell


def is_same(a: Path, b: Path) -> bool:
    """Return whether two paths are one file."""
    if is_url(a) or is_url(b):
        return str(a) == str(b)
    try:
        return a.samefile(b)
    except OSError:
        return a.absolute() == b.absolute()


def abandoned(folder: Path) -> list[Path]:
    """List the temporary files in a folder whose writers are certain to have ended; none behind a URL."""
    unfinished = list[Path]()
    if is_url(folder):
        return unfinished
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        match = _TEMPORARY.search(path.name)
        if match is not None and match[1] == _machine() != "0" and not is_alive(int(match[2])):
            unfinished.append(path)
    return unfinished


def is_alive(pid: int) -> bool:
    """Return False only if there certainly is no process with this number."""
    if os.name != "posix":  # elsewhere `os.kill` does kill
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True


@contextlib.contextmanager
def _naming(temporary: Path, target: Path) -> Iterator[None]:
    """Make OS errors name the target instead of its temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.filename) != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from None


def mode_for(target: Path, like: Iterable[Path]) -> int:
    """Return the mode of a new file: of the one it replaces, but nothing that one of the files `like` lacks.

    Raises:
        ConfigError: something that is no file is in the place.
    """
    if is_url(target):
        return PRIVATE  # until it is uploaded
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = READ_WRITE
    else:
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder the rename has its own error
            raise ConfigError(f"{target}: is not a regular file; write elsewhere")
    for source in like:
        mode &= READ_WRITE if is_url(source) else source.stat().st_mode
    return mode & READ_WRITE


@contextlib.contextmanager
def publish_together(owner: str = "") -> Iterator[Publication]:
    """Publish several files, which all get their names when the block ends well; on any error none does."""
    files = Publication(owner)
    try:
        yield files
        files.commit()
    except BaseException:
        files.discard()
        raise


@contextlib.contextmanager
def publish(path: str | os.PathLike[str], like: Iterable[Path] = ()) -> Iterator[BinaryIO]:
    """Publish a new file that replaces `path` when the block ends well; on any error the old one stays.

    Its permissions are never wider than the common ones of the files `like`.
    """
    with publish_together() as files, files.file(path, like) as file:
        yield file
