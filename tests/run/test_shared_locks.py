"""Locks of shared folders: NFS, several users, and locks that a process has not released."""

import errno
import gc
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptz.errors import ConfigError, WriteError
from ckptz.store import lock
from ckptz.store.lock import LEASE_NAME, LOCK_NAME, FileLock, Holder, Lease, acquire
from ckptz.store.storage import LocalFolder
from tests.support.checkpointer_support import Run, in_child, saved_run

fcntl = pytest.importorskip("fcntl")
NOBODY = 65534


def as_another_user(work: Callable[[], object]) -> int:
    """Run `work` in a process of another user (if the tests run as root) and return its exit code."""

    def run() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    return in_child(run)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yield a folder that every user can access."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run = Path(folder, "run")
        run.mkdir()
        yield run
        run.chmod(0o700)


# --- file systems without locks -------------------------------------------------------------------


@pytest.mark.parametrize("number", sorted({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, 524}))
def test_where_there_is_no_flock_there_is_a_lease(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "Unknown error 524")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)
    lease = acquire(LocalFolder(tmp_path), tmp_path)
    assert isinstance(lease, Lease)
    lease.release()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EIO, "no answer"),
        # NFS cannot lock files that are open for reading only
        (errno.EBADF, rf"{LOCK_NAME}: cannot be written to: Permission denied; check"),
    ],
)
def test_a_flock_that_fails_is_no_lease(
    number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no answer")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=message):
        acquire(LocalFolder(tmp_path), tmp_path)


# --- several users --------------------------------------------------------------------------------


def test_a_lock_file_that_may_only_be_read_is_enough(shared: Path) -> None:
    FileLock(shared).release()
    (shared / LOCK_NAME).chmod(0o444)
    text = (shared / LOCK_NAME).read_bytes()
    shared.chmod(0o777)

    def take() -> None:
        lock = FileLock(shared)
        with pytest.raises(ConfigError, match="is writing here already"):
            FileLock(shared)
        lock.check()
        lock.release()
        FileLock(shared).release()

    assert as_another_user(take) == 0
    assert (shared / LOCK_NAME).read_bytes() == text


def test_a_lock_file_is_shared_as_its_folder_is(shared: Path) -> None:
    before = os.umask(0o022)
    try:
        for mode, expected in ((0o755, 0o644), (0o775, 0o664), (0o777, 0o666), (0o700, 0o644)):
            (shared / LOCK_NAME).unlink(missing_ok=True)
            shared.chmod(mode)
            FileLock(shared).release()
            assert stat.S_IMODE((shared / LOCK_NAME).stat().st_mode) == expected
    finally:
        os.umask(before)


def test_two_users_save_to_one_folder_in_turn(shared: Path) -> None:
    saved_run(shared, 1)
    shared.chmod(0o777)
    (shared / LOCK_NAME).chmod(0o444)  # as older versions of ckptz wrote it

    def go_on() -> None:
        run = Run(seed=1)
        with run.checkpointer(shared, background=False) as checkpointer:
            assert checkpointer.restore_latest() == 1
            checkpointer.save(2)

    assert as_another_user(go_on) == 0
    with Run().checkpointer(shared) as checkpointer:
        assert checkpointer.restore_latest() == 2
        checkpointer.save(3)


def test_the_text_of_a_process_that_has_ended_names_nobody(shared: Path) -> None:
    lock = FileLock(shared)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (shared / LOCK_NAME).write_bytes(Holder("0", pid, Holder.this_process().host, 0.0).pack())
    with pytest.raises(ConfigError, match="another process is writing here already"):
        FileLock(shared)
    lock.release()


@pytest.mark.parametrize("has_lock", [False, True])
def test_a_folder_that_may_only_be_read_is_one_clear_error(shared: Path, has_lock: bool) -> None:
    if has_lock:
        saved_run(shared, 1)
    shared.chmod(0o555)

    def save() -> None:
        for background in (False, True):
            with pytest.raises(WriteError, match=r"run: cannot be written to: Permission denied") as caught:
                Run().checkpointer(shared, background=background).save(2)
            assert "check its owner and permissions" in str(caught.value)
            assert "room" not in str(caught.value)

    assert as_another_user(save) == 0


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "check the folder's owner and permissions"),
        (errno.EROFS, "check the folder's owner and permissions"),
        (errno.ENOSPC, "free disk space"),
        (errno.EDQUOT, "free disk space"),
        (errno.EIO, "repair the disk"),
    ],
)
def test_a_save_that_fails_says_what_helps(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with Run().checkpointer(tmp_path, background=False) as checkpointer:
        checkpointer.save(1)
        monkeypatch.setattr("ckptz.run.folder.publish_together", refuse)
        with pytest.raises(WriteError) as caught:
            checkpointer.save(2)
    remedies = ("check the folder's owner and permissions", "free disk space", "repair the disk")
    assert [one for one in remedies if one in str(caught.value)] == [remedy]


# --- locks that were not released -----------------------------------------------------------------


def in_a_cycle(value: Any) -> None:
    """Keep an object alive only by a reference cycle, as the frame of an error may."""
    cycle: list[Any] = [value]
    cycle.append(cycle)


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
def test_a_cell_that_is_run_twice_saves_twice(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpointer = Run().checkpointer(tmp_path)
        checkpointer.save(step)
        checkpointer.wait()
        in_a_cycle(checkpointer)
        del checkpointer
    gc.collect()


@pytest.mark.usefixtures("without_collections")
def test_a_lease_that_nobody_uses_ends_and_is_taken_at_once(tmp_path: Path) -> None:
    n_threads = threading.active_count()
    in_a_cycle(Lease(LocalFolder(tmp_path), beat=0.05, stale=60))
    used = Lease(LocalFolder(tmp_path), beat=0.05, stale=60)
    with pytest.raises(ConfigError, match=r"this process .* is writing here already"):
        Lease(LocalFolder(tmp_path), beat=0.05, stale=60)
    used.check()
    used.release()
    assert not (tmp_path / LEASE_NAME).exists()
    end = time.monotonic() + 5
    while threading.active_count() > n_threads and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= n_threads  # fewer if threads of earlier tests have ended


def test_a_lease_of_a_namesake_elsewhere_is_respected(tmp_path: Path) -> None:
    """A process of another container may have the same process id and host name as this one."""
    (tmp_path / LEASE_NAME).write_bytes(Holder.this_process().pack())
    start = time.monotonic()
    Lease(LocalFolder(tmp_path), beat=0.05, stale=0.3).release()
    assert time.monotonic() - start > 0.3
