"""Matrix products and factorisations by numpy's BLAS, locked against forks.

OpenBLAS, the BLAS of numpy's wheels, ends its threads when the process forks. A BLAS call that is running on
another thread, such as that of a background save while a `DataLoader` starts its workers, would then wait for
them for ever. Every BLAS call of ckptz is therefore in this module and holds a lock of the calling thread;
a fork acquires all of these locks first. Without a fork no call waits.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, Final

import numpy as np

from ckptz.kernels.interrupts import interrupt_later

_registry: Final = threading.RLock()  # guards `_locks`; held by a thread while it forks
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


class _Local(threading.local):
    """Lock of a thread, locks that it acquired to fork, and whether Ctrl-C came meanwhile."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may fork during a call.
        self.lock, self.taken, self.is_interrupted = threading.RLock(), list[Any](), False
        with _registry:
            _locks.add(self.lock)


_local = _Local()
_forking: Final = set[int]()  # ids of threads that are waiting to fork


def _turn() -> Any:
    """Return the lock of the calling thread, after any waiting fork, which would starve otherwise."""
    if _forking:
        with _registry:
            pass
    return _local.lock


def product(a: Any, b: Any) -> Any:
    """Compute the matrix product of two arrays, as `a @ b`."""
    with _turn():
        return a @ b


def eigh(matrix: Any) -> tuple[Any, Any]:
    """Compute eigenvalues, ascending, and eigenvectors of a symmetric matrix, as `numpy.linalg.eigh`."""
    with _turn():
        return np.linalg.eigh(matrix)


def least_squares(matrix: Any, target: Any) -> Any:
    """Solve a linear system by least squares, as `numpy.linalg.lstsq`."""
    with _turn():
        return np.linalg.lstsq(matrix, target, rcond=None)[0]


def cholesky(matrix: Any) -> Any | None:
    """Compute the lower Cholesky factor of a matrix, or None if it is not positive definite."""
    with _turn(), contextlib.suppress(np.linalg.LinAlgError):
        return np.linalg.cholesky(matrix)
    return None


def _before_fork() -> None:
    _forking.add(threading.get_ident())
    _local.is_interrupted = False
    # Python swallows exceptions of fork handlers, so Ctrl-C is raised again after the fork.
    while True:
        try:
            _take(_registry)
            for lock in list(_locks):
                _take(lock)
            return
        except KeyboardInterrupt:
            _local.is_interrupted = True


def _take(lock: Any) -> None:
    _local.taken.append(lock)  # before acquiring it: an interrupt between the two would leave it locked
    lock.acquire()


def _after_fork() -> None:
    _forking.discard(threading.get_ident())
    while _local.taken:
        with contextlib.suppress(RuntimeError):  # not acquired: interrupted before
            _local.taken.pop().release()


def _after_fork_in_child() -> None:
    _after_fork()
    _forking.clear()  # other threads do not exist in the child


def _after_fork_in_parent() -> None:
    _after_fork()
    if _local.is_interrupted:
        interrupt_later()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
