"""One job at a time on a thread of its own; its error surfaces at the next call."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

# The writer takes what training leaves over. Linux has a niceness for every thread.
WRITER_NICENESS: Final = 5


def yield_priority() -> None:
    """Let other threads go before the calling one, where the system can do so for a thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)


class Background(Generic[T]):
    """Runs jobs one after another.

    The thread is no daemon: a program that ends waits for it. An error that nobody asked for by then is
    said on standard error.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._label = ""
        self._result: T | None = None
        self._error: BaseException | None = None
        _alive.add(self)

    def start(self, label: str, job: Callable[[], T]) -> None:
        """Run a job; the one before must have been waited for.

        Args:
            label: what would be lost, for messages.
            job: what to do.
        """
        assert self._thread is None, "start before wait"
        self._label, self._result = label, None
        self._thread = threading.Thread(target=self._run, args=(job,), name="ckptz-writer")
        self._thread.start()

    def _run(self, job: Callable[[], T]) -> None:
        yield_priority()
        try:
            self._result = job()
        except BaseException as error:
            self._error = error

    def wait(self) -> tuple[T | None, float]:
        """Give what the last job returned, if there was one that nobody waited for, and the seconds waited.

        Raises:
            BaseException: what the job raised; it is raised once.
        """
        start = time.perf_counter()
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.join()
            except BaseException:  # Ctrl-C while waiting: the job goes on, and can be waited for again
                self._thread = thread
                raise
        if (error := self._error) is not None:
            self._error = None
            raise error
        result, self._result = self._result, None
        return result, time.perf_counter() - start

    def report_loss(self) -> None:
        """Say an error on standard error that nobody asked for."""
        if self._error is not None:
            print(f"ckptz: {self._label} was lost: {self._error}", file=sys.stderr)
            self._error = None


_alive: weakref.WeakSet[Background[Any]] = weakref.WeakSet()


@atexit.register
def _report_losses() -> None:
    # Threads have been joined by now.
    for background in list(_alive):
        background.report_loss()
