"""Atomic publication of files, also behind URLs. The only caller of `os.replace` in the package."""

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
from ckptz.format.suffixes import TEMPORARY_SUFFIX
from ckptz.format.uploads import upload

EAGER_BYTES: Final = 1 << 26  # small compared to the page cache, large enough for any disk
_TEMPORARY: Final = re.compile(rf"([0-9a-f]{{8}})-(\d{{1,10}})-[0-9a-f]{{16}}{re.escape(TEMPORARY_SUFFIX)}$")
PRIVATE: Final = 0o600
READ_WRITE: Final = 0o666  # the system applies the umask

_CANNOT_SYNC: Final = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM}
)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, if the system supports it.

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
    """Create a folder durably, by default with its parents; for URLs, uploads do that instead.

    Returns:
        True if this call created the folder.

    Raises:
        FileNotFoundError: a parent is missing and `parents` is False.
        NotADirectoryError: a file or a broken link has this name.
        OSError: the disk fails.
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
                what = "a file or a broken link, where a folder is needed; give another folder"
                raise NotADirectoryError(errno.ENOTDIR, what, str(new)) from None
            is_new = False  # another process created it meanwhile
        sync_folder(new.parent)
    return is_new


class EagerFile(io.FileIO):
    """A new file that is written to disk while it grows, so that the final fsync takes little time."""

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))
        self._begun = 0

    def write(self, data: Any) -> int:
        n, end = super().write(data), self.tell()
        if end - self._begun >= EAGER_BYTES and hasattr(os, "posix_fadvise"):
            begin, self._begun = self._begun, end
            with contextlib.suppress(OSError):  # not supported by the file system
                # Dropping pages from the cache makes the system write them first.
                os.posix_fadvise(self.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
        return n


class Publication:
    """New files that are published together, in the order in which they were completed.

    Args:
        owner: prefix of temporary file names, by which the owner of a folder recognizes them.
    """

    def __init__(self, owner: str = "") -> None:
        self._owner = owner
        self._staged: list[tuple[Path, Path]] = []

    @contextlib.contextmanager
    def file(self, path: str | os.PathLike[str], like: Iterable[Path] = ()) -> Iterator[BinaryIO]:
        """Open a temporary file that replaces `path` on `commit`.

        It is beside `path`, so that it can be renamed; for a URL it is in the folder for temporary files and
        is uploaded. It gets the mode of the replaced file, without permissions that a file of `like` lacks.

        Raises:
            ConfigError: `path` is not a regular file, or ends with a separator.
        """
        if str(path).endswith(("/", os.sep)):
            raise ConfigError(f"{path}: names a folder; name a file")
        target = path_of(path)
        mode = mode_for(target, like)
        # Without the target's name, which may have the maximum length.
        writer = f"{_machine()}-{os.getpid()}-{secrets.token_hex(8)}"
        name = f".{self._owner}{writer}{TEMPORARY_SUFFIX}"
        temporary = scratch_folder(target) / name
        try:
            with (
                _target_in_errors(temporary, target),
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
            with _target_in_errors(temporary, target):
                os.replace(temporary, target)
        for folder in dict.fromkeys(target.parent for _, target in self._staged if not is_url(target)):
            sync_folder(folder)

    def discard(self) -> None:
        """Delete the unpublished files."""
        for temporary, _ in self._staged:
            temporary.unlink(missing_ok=True)


def scratch_folder(target: Path) -> Path:
    """Return the local folder for the temporary file of `target`."""
    return Path(tempfile.gettempdir()) if is_url(target) else target.parent


@functools.cache
def _machine() -> str:
    """Return a hash of the machine and PID namespace, whose process ids this process can check."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(
            f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}".encode()
        ).hexdigest()[:8]
    return "0"  # unknown


def is_same(a: Path, b: Path) -> bool:
    """Return whether two paths are the same file."""
    if is_url(a) or is_url(b):
        return str(a) == str(b)
    try:
        return a.samefile(b)
    except OSError:
        return a.absolute() == b.absolute()


def abandoned(folder: Path) -> list[Path]:
    """Return the temporary files in a folder whose writers have certainly ended; none for a URL."""
    unfinished = list[Path]()
    if is_url(folder):
        return unfinished
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        match = _TEMPORARY.search(path.name)
        if match is not None and match[1] == _machine() != "0" and not is_alive(int(match[2])):
            unfinished.append(path)
    return unfinished


def is_alive(pid: int) -> bool:
    """Return False only if there is certainly no process with this id."""
    if os.name != "posix":  # on Windows `os.kill` ends the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        return True
    return True


@contextlib.contextmanager
def _target_in_errors(temporary: Path, target: Path) -> Iterator[None]:
    """Replace the temporary file in OS errors by the target."""
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.filename) != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from None


def mode_for(target: Path, like: Iterable[Path]) -> int:
    """Return the mode of a new file: that of the replaced file, without bits that a file of `like` lacks.

    Raises:
        ConfigError: the target is not a regular file.
    """
    if is_url(target):
        return PRIVATE  # until it is uploaded
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = READ_WRITE
    else:
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a folder causes an error of the rename
            raise ConfigError(f"{target}: is not a regular file; write elsewhere")
    for source in like:
        mode &= READ_WRITE if is_url(source) else source.stat().st_mode
    return mode & READ_WRITE


@contextlib.contextmanager
def publish_together(owner: str = "") -> Iterator[Publication]:
    """Publish several files when the block succeeds; on any error delete all of them."""
    files = Publication(owner)
    try:
        yield files
        files.commit()
    except BaseException:
        files.discard()
        raise


@contextlib.contextmanager
def publish(path: str | os.PathLike[str], like: Iterable[Path] = ()) -> Iterator[BinaryIO]:
    """Publish a new file that replaces `path` when the block succeeds; on any error `path` does not change.

    It has no permissions that a file of `like` lacks.
    """
    with publish_together() as files, files.file(path, like) as file:
        yield file
