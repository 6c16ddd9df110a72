"""Locks that allow one writer to a folder of checkpoints, and spool folders for uploads.

On a local or mounted folder the lock is `flock` on a file. The system releases it when its process ends,
however that ends, so it can never be stale. The file stays; its text names the holder in error messages.
Where `flock` is missing (object stores, some network file systems, Windows) the lock is a *lease*: a small
file with a random token that its holder renews. A waiting process takes over a lease that was not renewed
for `STALE_SECONDS` of its own clock, so machines need not agree on the time. It takes over a lease of a
dead process of the same machine immediately.

A spool is a local folder in which files are completed before they are uploaded. The next spool removes
those of killed processes: their locks are free.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Final, Self

from ckptz.errors import ConfigError, WriteError
from ckptz.format.publish import is_alive
from ckptz.kernels.interrupts import finalize
from ckptz.parallel import Task
from ckptz.store.storage import Folder

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    fcntl: ModuleType | None = None
else:
    fcntl = _fcntl

LOCK_NAME: Final = ".ckptz-lock"
LEASE_NAME: Final = ".ckptz-lease"
PREFIX: Final = "ckptz-spool-"
BEAT_SECONDS: Final = 15.0
STALE_SECONDS: Final = 60.0  # four beats may be lost
SETTLE_SECONDS: Final = 0.5  # two processes that take over a stale lease have both written it by then

KERNEL_ENOTSUPP: Final = 524  # Linux, for NFS servers without locks; missing in `errno`
_NO_FLOCK: Final = frozenset(
    {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, KERNEL_ENOTSUPP}
)
NOT_ALLOWED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock; `since` in seconds of Unix time, `beat` counts renewals."""

    token: str
    pid: int
    host: str
    since: float
    beat: int = 0

    @classmethod
    def this_process(cls) -> Self:
        """Make a holder with a new token for this process."""
        return cls(secrets.token_hex(8), os.getpid(), socket.gethostname(), time.time())

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Parse the JSON of `pack`; None for other bytes, which a killed writer may leave."""
        with contextlib.suppress(ValueError, TypeError):
            return cls(**json.loads(text))
        return None

    def pack(self) -> bytes:
        """Serialize to JSON."""
        return json.dumps(asdict(self)).encode()


def _lock_error(folder: str, text: bytes | None) -> ConfigError:
    """Make the error for a folder whose lock file, with this text, another writer holds."""
    who = "another process"
    if text is not None and (holder := Holder.parse(text)) is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        if (holder.pid, holder.host) == (os.getpid(), socket.gethostname()):
            return ConfigError(
                f"{folder}: this process ({holder.pid}) is writing here already, since {since} (a notebook "
                "cell that ran twice?); close() the first writer, or wait for its save"
            )
        if holder.host != socket.gethostname() or is_alive(holder.pid):  # else an earlier holder wrote it
            who = f"process {holder.pid} on {holder.host} since {since}"
    return ConfigError(f"{folder}: {who} is writing here already; wait for it, or stop it")


def not_writable(folder: str, error: OSError) -> WriteError:
    """Make the error for a folder that this user may not write to; `error` is one of `NOT_ALLOWED`."""
    what = f"{folder}: cannot be written to: {error.strerror}"
    return WriteError(error.errno, f"{what}; check its owner and permissions, or save elsewhere")


# --- flock --------------------------------------------------------------------------------------

_file_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """Lock of a folder by `flock` on a file in it.

    Raises:
        ConfigError: another writer holds it.
        OSError: the folder cannot be written to, or its file system has no `flock`.
    """

    # The file belongs to the user who locked the folder first. Users who may write to the folder may write to
    # the file; an older file that they may only read is enough for a lock.

    def __init__(self, folder: Path) -> None:
        assert fcntl is not None
        self._descriptor: int | None = None
        self._folder = folder.absolute()
        self._descriptor = _open_lock(folder / LOCK_NAME)
        try:
            _flock(self._descriptor)
        except BaseException as error:
            text = os.pread(self._descriptor, 4096, 0)
            self.release()
            if isinstance(error, BlockingIOError):
                raise _lock_error(str(folder), text) from None
            if isinstance(error, OSError) and error.errno == errno.EBADF:
                # NFS locks no file that is open only for reading.
                denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                raise not_writable(str(folder / LOCK_NAME), denied) from None
            raise
        self._write_holder(self._descriptor)
        _file_locks.add(self)

    def _write_holder(self, descriptor: int) -> None:
        """Write the holder into the lock file, and let all users write to it who may write to the folder."""
        assert fcntl is not None
        is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        status = os.fstat(descriptor)
        if not is_writable or status.st_nlink != 1:  # a hard link may be a file of the user
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, Holder.this_process().pack(), 0)
        shared = self._folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_mode & shared != shared:
            with contextlib.suppress(OSError):  # another user's file, or a file system without modes
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode) | shared | shared << 1)

    def __del__(self) -> None:
        finalize(self.release)  # for a Checkpointer that was never closed, as in a notebook

    @property
    def is_lost(self) -> bool:
        """True if other processes may write: this process was forked, or the file or folder was removed."""
        if self._descriptor is None:
            return True
        try:
            return not os.path.samestat(os.stat(self._folder / LOCK_NAME), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True

    def locks_file(self, descriptor: int) -> bool:
        """Return whether this lock is on the file that is open as `descriptor`."""
        locked = self._descriptor
        with contextlib.suppress(OSError):  # released in the meantime
            return locked is not None and os.path.sameopenfile(locked, descriptor)
        return False

    def check(self) -> None:
        """Require that this process still holds the lock.

        Raises:
            WriteError: the lock is lost.
        """
        if self.is_lost:
            raise WriteError(
                errno.EBUSY,
                f"{self._folder}: its {LOCK_NAME} was removed, or this process was forked from the one that "
                "writes here; another process may be writing now",
            )

    def release(self) -> None:
        """Release the lock, so that other processes may write."""
        # Cleared first: after an interrupt the descriptor may be another file's: do not close it again.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Open or create a lock file, without following symbolic links.

    Raises:
        ConfigError: the path is a link, a folder or another special file.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError as error:  # another user's file
            if not os.access(path.parent, os.W_OK | os.X_OK) or not os.path.lexists(path):
                raise not_writable(str(path.parent), error) from None
            descriptor = os.open(path, flags | os.O_RDONLY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ConfigError(f"{path}: is not a lock file (a link or a folder?); remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path}: is not a regular file; remove it")
    return descriptor


def _flock(descriptor: int) -> None:
    """Lock a file with `flock`; if this process holds the lock, collect garbage and try again.

    Raises:
        BlockingIOError: another writer holds the lock.
        OSError: the file system has no `flock`.
    """
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not any(lock.locks_file(descriptor) for lock in list(_file_locks)):
            raise
        gc.collect()  # frees an unreachable Checkpointer in a cycle, as after a notebook cell ran twice
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _release_in_child() -> None:
    # A forked data loader shares the open file, and would keep the lock after its trainer was killed.
    for lock in list(_file_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


# --- lease --------------------------------------------------------------------------------------


class Lease:
    """Lock of a folder by a file that its holder rewrites at intervals.

    Args:
        folder: the folder to lock.
        beat: seconds between two renewals.
        stale: seconds without a renewal after which another process may take the lease over.

    Raises:
        ConfigError: another writer holds the lease.
    """

    def __init__(self, folder: Folder, beat: float = BEAT_SECONDS, stale: float = STALE_SECONDS) -> None:
        self._folder, self._beat, self._stale = folder, beat, stale
        self._holder = Holder.this_process()
        self._wait_for_stale()
        self._write()
        time.sleep(min(SETTLE_SECONDS, beat))
        if not self._is_ours():
            raise _lock_error(self._folder.name, self._read())
        self._end = Task(bool)  # never runs; `release` finishes it, which ends the renewals
        self._renewal = Task(functools.partial(_renew, weakref.ref(self), self._end, beat))
        self._renewal.start()
        _leases[self._holder.token] = weakref.ref(self)

    @property
    def is_lost(self) -> bool:
        """True in a forked process. Only `check` reads the lease, which is slow."""
        return self._holder.pid != os.getpid()

    def _wait_for_stale(self) -> None:
        """Wait until the present lease, if there is one, may be taken over.

        Raises:
            ConfigError: its holder renewed it.
        """
        before = self._read()
        if before is None or _is_abandoned(Holder.parse(before)):
            return
        end = time.monotonic() + self._stale
        while time.monotonic() < end:
            time.sleep(min(self._beat, self._stale) / 4)
            now = self._read()
            if now is None:
                return
            if now != before:
                raise _lock_error(self._folder.name, now)

    def _read(self) -> bytes | None:
        """Read the lease; None if there is none. Half-written bytes, which do not parse, count as held."""
        try:
            with contextlib.closing(self._folder.open(LEASE_NAME)) as file:
                return file.read(0, file.size).tobytes()
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        with self._folder.publish(LEASE_NAME) as file:
            file.write(self._holder.pack())

    def _is_ours(self) -> bool:
        text = self._read()
        holder = None if text is None else Holder.parse(text)
        return holder is not None and holder.token == self._holder.token

    def renew(self) -> bool:
        """Renew the lease; returns False if another process took it over."""
        if not self._is_ours():
            return False
        self._holder = replace(self._holder, beat=self._holder.beat + 1)
        self._write()
        return True

    def check(self) -> None:
        """Require that this process still holds the lock.

        Raises:
            WriteError: another writer took it over, or this process was forked.
        """
        if self.is_lost or not self._is_ours():
            raise WriteError(
                errno.EBUSY,
                f"{self._folder.name}: another writer took the folder while this one could not renew its "
                "lease, or this process was forked from the one that writes here; stop one of the two",
            )

    def release(self) -> None:
        """Release the lock, so that other processes may write; a forked process leaves it to its parent."""
        if self.is_lost:
            return
        self._end.finish()
        self._renewal.wait()
        _leases.pop(self._holder.token, None)
        with contextlib.suppress(Exception):
            if self._is_ours():
                self._folder.remove(LEASE_NAME)


_leases: dict[str, weakref.ref[Lease]] = {}  # of this process, by token


def _is_abandoned(holder: Holder | None) -> bool:
    """Return whether a lease belongs to a dead process of this machine or to an unreachable object."""
    if holder is None:
        return False
    if holder.host == socket.gethostname() and not is_alive(holder.pid):
        return True
    if (lease := _leases.get(holder.token)) is None:
        return False
    gc.collect()  # as in `_flock`
    return lease() is None


def _renew(lease: weakref.ref[Lease], end: Task[bool], beat: float) -> None:
    """Renew a lease until it is released, lost or garbage-collected."""
    while not end.wait(beat):
        # A store that cannot be reached now may be reachable later.
        with contextlib.suppress(Exception):
            current = lease()
            if current is None or not current.renew():
                return
        del current


Lock = FileLock | Lease


def acquire(folder: Folder, path: Path | None) -> Lock:
    """Lock a folder: by `flock` where possible, else by a lease.

    Args:
        folder: the folder to lock.
        path: its path if it is local; it must exist.

    Raises:
        ConfigError: another writer holds the lock.
        OSError: the folder cannot be written to.
    """
    if path is not None and fcntl is not None:
        try:
            return FileLock(path)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
    return Lease(folder)


class Spool:
    """A temporary folder, `folder`, that only this process uses."""

    def __init__(self) -> None:
        if fcntl is not None:
            _remove_abandoned(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = None if fcntl is None else FileLock(self.folder)

    def keep_only(self, names: frozenset[str]) -> None:
        """Remove every other file."""
        for path in self.folder.iterdir():
            if path.name not in names and path.name != LOCK_NAME:
                path.unlink()

    def close(self) -> None:
        """Remove the folder with all files in it; a forked process leaves it to its parent."""
        if self._lock is None or not self._lock.is_lost:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ConfigError):
            if not (folder / LOCK_NAME).exists():  # its process may be about to lock it
                continue
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():  # not another user's spool
                FileLock(folder).release()  # raises ConfigError while its process lives
                shutil.rmtree(folder, ignore_errors=True)
