"""One writer to a folder of checkpoints; nobody has to clean up after one that was killed.

On a local or mounted folder the lock is `flock` on a file: the system drops it with the process that
held it, whatever ended that process, so a lock can never be stale. The file stays; its text only says in
messages who holds it. Where there is no `flock` (object stores, some network file systems, Windows), the
lock is a *lease*: a small file with a random token that its holder renews. A lease that is not renewed
while somebody watches it for `STALE_SECONDS` of their own clock is stale; one of a dead process of
the same machine is stale at once. No two machines have to agree on the time.

A spool is a local folder in which files are finished before they are uploaded, and which nobody has to tidy
up: what a killed process left is found by its lock, which nobody holds, and removed by the next one.
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
SETTLE_SECONDS: Final = 0.5  # two that take a stale lease at once both wrote when this is over

KERNEL_ENOTSUPP: Final = 524  # of NFS servers without locks; Linux hands it out, and errno has no name for it
_NO_FLOCK: Final = frozenset(
    {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, KERNEL_ENOTSUPP}
)
NOT_ALLOWED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock; `since` in seconds of Unix time, `beat` counts renewals."""

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
        """Read what `pack` gave; None for anything else, as a killed writer may leave it."""
        with contextlib.suppress(ValueError, TypeError):
            return cls(**json.loads(text))
        return None

    def pack(self) -> bytes:
        """Return the lock's holder as JSON."""
        return json.dumps(asdict(self)).encode()


def _refused(folder: str, text: bytes | None) -> ConfigError:
    who = "another process"
    if text is not None and (holder := Holder.parse(text)) is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        if (holder.pid, holder.host) == (os.getpid(), socket.gethostname()):
            return ConfigError(
                f"{folder}: a writer of this very process ({holder.pid}) is writing here already, since "
                f"{since}: close() it first, or let its save end, as where a notebook's cell is run twice"
            )
        if holder.host != socket.gethostname() or is_alive(holder.pid):  # else the text is an earlier one's
            who = f"process {holder.pid} on {holder.host} since {since}"
    return ConfigError(f"{folder}: {who} is writing here already; wait for it, or stop it")


def not_writable(folder: str, error: OSError) -> WriteError:
    """Make the error for a folder in which this user may not write.

    Args:
        folder: its name.
        error: why, one of `NOT_ALLOWED`.
    """
    what = f"{folder}: cannot be written to: {error.strerror}"
    return WriteError(error.errno, f"{what}; check its owner and permissions, or save elsewhere")


# --- flock --------------------------------------------------------------------------------------

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """`flock` on a file of the folder.

    Raises:
        ConfigError: another writer holds it.
        OSError: the folder cannot be written to, or its file system has no `flock`.
    """

    # The file belongs to whoever locked the folder first. Others of its group may write to it where they may
    # write to the folder; where an older one lets them only read, that is enough for a lock.

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
                raise _refused(str(folder), text) from None
            if (
                isinstance(error, OSError) and error.errno == errno.EBADF
            ):  # NFS locks no file that is only read
                denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                raise not_writable(str(folder / LOCK_NAME), denied) from None
            raise
        self._sign(self._descriptor)
        _held.add(self)

    def _sign(self, descriptor: int) -> None:
        """Write who holds the lock, and share the file with those who share the folder."""
        assert fcntl is not None
        is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        facts = os.fstat(descriptor)
        if not is_writable or facts.st_nlink != 1:  # a file with several names may be the user's
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, Holder.this_process().pack(), 0)
        shared = self._folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if facts.st_mode & shared != shared:
            with contextlib.suppress(OSError):  # another user's, or a file system without modes
                os.fchmod(descriptor, stat.S_IMODE(facts.st_mode) | shared | shared << 1)

    def __del__(self) -> None:
        finalize(self.release)  # of a Checkpointer that nobody closed, as in a notebook

    @property
    def is_lost(self) -> bool:
        """True if others may write: this process was forked, or the file or folder was removed."""
        if self._descriptor is None:
            return True
        try:
            return not os.path.samestat(os.stat(self._folder / LOCK_NAME), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True

    def is_of(self, descriptor: int) -> bool:
        """Return whether this lock belongs to the file open as `descriptor`."""
        own = self._descriptor
        with contextlib.suppress(OSError):  # released meanwhile
            return own is not None and os.path.sameopenfile(own, descriptor)
        return False

    def check(self) -> None:
        """Require that the lock is still held.

        Raises:
            WriteError: it is lost.
        """
        if self.is_lost:
            raise WriteError(
                errno.EBUSY,
                f"{self._folder}: its {LOCK_NAME} was removed, or this process was forked from the one that "
                "writes here; another may write now",
            )

    def release(self) -> None:
        """Release the lock, so that others may write."""
        descriptor, self._descriptor = self._descriptor, None
        if (
            descriptor is not None
        ):  # interrupted here, it must not be closed twice: the number may be another's
            os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Open a lock file, or make it; where a link leads is not touched.

    Raises:
        ConfigError: something else is in the place.
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
            raise ConfigError(
                f"{path}: is no lock file but something else, a link perhaps; remove it"
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path}: is no lock file but something else; remove it")
    return descriptor


def _flock(descriptor: int) -> None:
    """Lock a file with `flock`; collect garbage first where an unreachable object of this process holds it.

    Raises:
        BlockingIOError: it is held.
        OSError: the file system has none.
    """
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not any(lock.is_of(descriptor) for lock in list(_held)):
            raise
        gc.collect()  # a Checkpointer in a cycle, as where a notebook's cell is run twice
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _forget_in_child() -> None:
    # A forked data loader shares the open file, and would hold the lock for a trainer that was killed.
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


# --- lease --------------------------------------------------------------------------------------


class Lease:
    """A lock by a file that is renewed every `beat` seconds; after `stale` seconds without, others take it.

    Raises:
        ConfigError: another writer holds it.
    """

    def __init__(self, place: Folder, beat: float = BEAT_SECONDS, stale: float = STALE_SECONDS) -> None:
        self._place, self._beat, self._stale = place, beat, stale
        self._holder = Holder.this_process()
        self._wait_for_stale()
        self._write()
        time.sleep(min(SETTLE_SECONDS, beat))
        if not self._is_ours():
            raise _refused(self._place.name, self._read())
        self._end = Task(bool)  # is never run: `release` ends the waiting for it
        self._renewal = Task(functools.partial(_renew, weakref.ref(self), self._end, beat))
        self._renewal.start()
        _leases[self._holder.token] = weakref.ref(self)

    @property
    def is_lost(self) -> bool:
        """True in a forked process. Reading the lease is slow, and left to `check`."""
        return self._holder.pid != os.getpid()

    def _wait_for_stale(self) -> None:
        before = self._read()
        holder = None if before is None else Holder.parse(before)
        is_here = holder is not None and holder.host == socket.gethostname()
        if before is None or (holder is not None and is_here and not is_alive(holder.pid)):
            return
        if holder is not None and (lease := _leases.get(holder.token)) is not None:
            gc.collect()  # of a Checkpointer in a cycle, as where a notebook's cell is run twice
            if lease() is None:
                return
        end = time.monotonic() + self._stale
        while time.monotonic() < end:
            time.sleep(min(self._beat, self._stale) / 4)
            now = self._read()
            if now is None:
                return
            if now != before:
                raise _refused(self._place.name, now)

    def _read(self) -> bytes | None:
        """Read the lease. One that cannot be parsed may be half written, and counts as held."""
        try:
            with contextlib.closing(self._place.open(LEASE_NAME)) as file:
                return file.read(0, file.size).tobytes()
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        with self._place.publish(LEASE_NAME) as file:
            file.write(self._holder.pack())

    def _is_ours(self) -> bool:
        text = self._read()
        holder = None if text is None else Holder.parse(text)
        return holder is not None and holder.token == self._holder.token

    def renew(self) -> bool:
        """Count one more beat, if the lease is still this one's."""
        if not self._is_ours():
            return False
        self._holder = replace(self._holder, beat=self._holder.beat + 1)
        self._write()
        return True

    def check(self) -> None:
        """Require that the lock is still held.

        Raises:
            WriteError: another writer took it, or this process was forked.
        """
        if self.is_lost or not self._is_ours():
            raise WriteError(
                errno.EBUSY,
                f"{self._place.name}: another writer took the folder while this one could not renew its "
                "lease, or this process was forked from the one that writes here; stop one of the two",
            )

    def release(self) -> None:
        """Release the lock, so that others may write; a forked process leaves it to its parent."""
        if self.is_lost:
            return
        self._end.finish()
        self._renewal.wait()
        _leases.pop(self._holder.token, None)
        with contextlib.suppress(Exception):
            if self._is_ours():
                self._place.remove(LEASE_NAME)


_leases: dict[str, weakref.ref[Lease]] = {}  # of this process, by token


def _renew(lease: weakref.ref[Lease], end: Task[bool], beat: float) -> None:
    """Renew a lease until it ends, is lost, or nobody uses it any more."""
    while not end.wait(beat):
        # A store that cannot be reached now may be later; until then others may take the lease.
        with contextlib.suppress(Exception):
            used = lease()
            if used is None or not used.renew():
                return
        del used


Lock = FileLock | Lease


def acquire(place: Folder, folder: Path | None) -> Lock:
    """Take the lock of a place; `folder` is its path if it is a local one, which must exist.

    Raises:
        ConfigError: another writer holds it.
        OSError: the folder cannot be written to.
    """
    if folder is not None and fcntl is not None:
        try:
            return FileLock(folder)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
    return Lease(place)


def is_held(folder: Path) -> bool:
    """Return whether a process holds the `flock` of a local folder."""
    try:
        FileLock(folder).release()
    except ConfigError:
        return True
    return False


class Spool:
    """A folder of this process's own, `folder`."""

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
        """Remove the folder with all files in it; in a forked process it stays, as it is its parent's."""
        if self._lock is None or not self._lock.is_lost:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        # One without a lock file may have been made by a process that is just about to lock it. The folder
        # of temporary files is shared, so that only folders of this user are removed.
        with contextlib.suppress(OSError, ConfigError):
            if not (folder / LOCK_NAME).exists():
                continue
            folder_stat = folder.lstat()
            is_own = stat.S_ISDIR(folder_stat.st_mode) and folder_stat.st_uid == os.getuid()
            if is_own and not is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
