"""One job at a time on a thread of its own; its error surfaces at the next call.

Nobody joins the thread: a `Thread.join` that Ctrl-C interrupts takes a running thread for an ended one on
Python 3.11, and what the job still reads would be overwritten. What is waited for is set by the job's own
`finally`. All of this may be interrupted anywhere, and called again by the handler of a signal.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from ckptz.errors import ConfigError

T = TypeVar("T")

# The writer takes what training leaves over. Linux has a niceness for every thread.
WRITER_NICENESS: Final = 5
PATIENCE: Final = 0.1  # seconds between two looks at a job, in case what wakes the waiting was missed


def yield_priority() -> None:
    """Let other threads go before the calling one, where the system can do so for a thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)


def pause(lock: Any) -> None:
    """Wait for a lock for a moment; the lock is free afterwards if it was."""
    if lock.acquire(timeout=PATIENCE):
        lock.release()


class _Running:
    """A job under way: `is_done` is set last, whatever it raised."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.is_done = False
        self.thread: int | None = None
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._claim = _thread.allocate_lock()

    def claim(self) -> bool:
        """Tell the first who asks, and nobody else, that the job is his: the thread, or who gives it up."""
        return self._claim.acquire(blocking=False)

    def finish(self) -> None:
        """Let those go on who wait; on the job's thread."""
        self.is_done = True
        self._lock.release()

    def wait(self) -> None:
        """Wait until the job is done; what interrupts it leaves the job as it is."""
        while not self.is_done:
            pause(self._lock)


class Background(Generic[T]):
    """Runs jobs one after another.

    The thread is no daemon: a program that ends waits for it. What is lost all the same, since nobody asked
    for its error or Ctrl-C ended the waiting, is said on standard error.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        _alive.add(self)

    def start(self, label: str, job: Callable[[], T]) -> None:
        """Run a job; the one before must have been waited for.

        Args:
            label: what would be lost, for messages.
            job: what to do.
        """
        if self._running is not None:
            raise RuntimeError(f"{self._running.label} was not waited for")
        running, self._result = _Running(label), None
        thread = threading.Thread(target=self._run, args=(job, running), name="ckptz-writer", daemon=False)
        self._running = running  # before it starts: an interrupt must not lose sight of it
        try:
            thread.start()
        except BaseException:  # no thread can be started, or an interrupt: it may run, or will never
            if running.claim():
                self._running = None
            raise

    def _run(self, job: Callable[[], T], running: _Running) -> None:
        if not running.claim():
            return
        running.thread = threading.get_ident()
        try:
            yield_priority()
            self._result = job()
        except BaseException as error:
            self._error = error
        finally:
            running.finish()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that runs the job."""
        return self._running is not None and self._running.thread == threading.get_ident()

    @property
    def is_idle(self) -> bool:
        """Whether no job is under way that has not been waited for."""
        return self._running is None

    def wait(self) -> tuple[T | None, BaseException | None]:
        """Wait for the job; give what it returned or raised, if there was one that nobody waited for.

        What is raised here comes from the handler of a signal: the job goes on, and can be waited for again.
        """
        if (running := self._running) is not None:
            running.wait()
            self._running = None
        found = self._result, self._error
        self._result = self._error = None
        return found

    def report_loss(self) -> None:
        """Say on standard error what was lost: a job that did not end, an error that nobody asked for."""
        if self._running is not None and not self._running.is_done:
            print(f"ckptz: {self._running.label} was lost: interrupted while it was written", file=sys.stderr)
        elif self._error is not None:
            label = "a save" if self._running is None else self._running.label
            print(f"ckptz: {label} was lost: {self._error}", file=sys.stderr)
            self._error = None


class Turns:
    """Lets one call at a time do its work: other threads wait, and the handler of a signal is refused.

    A handler runs in the midst of the very call that it interrupts, which cannot go on before the handler
    has ended. So it must neither wait for that call nor change what it works on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._doing: str | None = None

    @contextlib.contextmanager
    def take(self, what: str, writer: Background[Any]) -> Iterator[None]:
        """Take the turn for `what`, in a `with` block.

        Raises:
            ConfigError: the calling thread is in the midst of another call, or it is the writer's.
        """
        if writer.is_here:
            raise ConfigError(
                f"{what} was called by on_save, on the writer's thread: call it in the training loop"
            )
        with self._lock:
            if self._doing is not None:
                raise ConfigError(
                    f"{what} was called in the midst of {self._doing}, as by the handler of a signal: "
                    "let the handler set a flag, and save at the end of the step"
                )
            try:
                self._doing = what
                yield
            finally:
                self._doing = None


_alive: weakref.WeakSet[Background[Any]] = weakref.WeakSet()


@atexit.register
def _report_losses() -> None:
    # The interpreter has waited for threads by now, unless Ctrl-C ended that, too.
    for background in list(_alive):
        background.report_loss()
