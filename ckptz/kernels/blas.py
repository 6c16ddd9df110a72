"""Products and factors of matrices by the BLAS of numpy, which a fork waits for.

OpenBLAS, the BLAS of numpy's wheels, ends its threads when the process forks. A call that is under way on
another thread, as that of a background save while a `DataLoader` starts its workers, would wait for them for
ever. So every such call of ckptz stands in this module, under a lock of the calling thread, and a fork takes
all of these locks first. Nothing waits while nobody forks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, Final

import numpy as np

from ckptz.kernels.interrupts import interrupt_later

_registry: Final = threading.RLock()  # of the locks of all threads; whoever forks holds it meanwhile
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


class _Local(threading.local):
    """The lock of a thread, locks that it took to fork, and whether Ctrl-C came while it took them."""

    def __init__(self) -> None:
        # Reentrant: the handler of a signal may fork in the midst of a call.
        self.lock, self.taken, self.is_interrupted = threading.RLock(), list[Any](), False
        with _registry:
            _locks.add(self.lock)


_local = _Local()
_forking: Final = set[int]()  # threads that wait for the locks of others


def _turn() -> Any:
    """Return the lock of the calling thread; a fork that waits goes first, or it would starve."""
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
        values, vectors = np.linalg.eigh(matrix)
    return values, vectors


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
    # Python swallows what is raised here, so Ctrl-C is kept for afterwards.
    while True:
        try:
            _take_all()
            return
        except KeyboardInterrupt:
            _local.is_interrupted = True


def _take_all() -> None:
    _take(_registry)
    for lock in list(_locks):
        _take(lock)


def _take(lock: Any) -> None:
    _local.taken.append(lock)  # first, or an interrupt could leave it locked for ever
    lock.acquire()


def _after_fork() -> None:
    _forking.discard(threading.get_ident())
    while _local.taken:
        with contextlib.suppress(RuntimeError):  # an interrupt came before it was acquired
            _local.taken.pop().release()


def _after_fork_in_child() -> None:
    _after_fork()
    _forking.clear()  # of threads that are not here


def _after_fork_in_parent() -> None:
    _after_fork()
    if _local.is_interrupted:
        interrupt_later()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
