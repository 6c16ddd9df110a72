"""One job at a time on a thread of its own; its error surfaces at the next call.

Nobody joins the thread: a `Thread.join` that Ctrl-C interrupts takes a running thread for an ended one on
Python 3.11, and what the job still reads would be overwritten. The job is a `Task`, which is waited for
instead. All of this may be interrupted anywhere, and called again by the handler of a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from ckptz.errors import ConfigError
from ckptz.kernels.interrupts import finalize
from ckptz.parallel import Task

T = TypeVar("T")
R = TypeVar("R")

# The writer takes what training leaves over. Linux has a niceness for every thread.
WRITER_NICENESS: Final = 5


def yield_priority() -> None:
    """Lower the priority of the calling thread, where the system supports it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)


def _run_beside(task: Task[None]) -> None:
    yield_priority()
    task.run()


class Background(Generic[T]):
    """Runs jobs one after another.

    The thread is no daemon: a program that ends waits for it. What is lost all the same, since nobody asked
    for its error or Ctrl-C ended the waiting, is said on standard error.

    Attributes:
        label: what the last job makes, for messages.
        result: what the last job that was waited for returned, until somebody takes it.
        error: what it raised. Whoever reports it sets this to None, as the last thing before he does: an
            interrupt must not come between.
    """

    def __init__(self) -> None:
        self.label = ""
        self.result: T | None = None
        self.error: BaseException | None = None
        self._running: Task[None] | None = None
        _alive.add(self)

    def __del__(self) -> None:
        finalize(self.report_loss)

    def start(self, label: str, job: Callable[[], T]) -> None:
        """Run a job; the one before must have been waited for.

        Args:
            label: what would be lost, for messages.
            job: what to do.
        """
        if self._running is not None:
            raise RuntimeError(f"{self.label} was not waited for")
        task, is_ending = Task(functools.partial(self._do, job)), not threading.main_thread().is_alive()
        self.label, self._running = label, task  # before it starts: an interrupt must not lose sight of it
        try:
            if is_ending:  # the interpreter, and it waits for no new thread
                task.run()
            else:
                # `Thread.start` waits for the thread, which an interrupt of this wait could stop for ever.
                thread = threading.Thread(target=_run_beside, args=(task,), name="ckptz-writer", daemon=False)
                starting = Task(thread.start)
                starting.start()
                starting.result()
        except BaseException:  # no thread can be started, or an interrupt: it may run, or will never
            if task.cancel() or is_ending:
                self._running = None
            raise

    def _do(self, job: Callable[[], T]) -> None:
        try:
            self.result = job()
        except BaseException as error:
            self.error = error

    @property
    def is_here(self) -> bool:
        """True if the calling thread is running the job now."""
        running = self._running
        return running is not None and not running.is_done and running.thread == threading.get_ident()

    @property
    def is_idle(self) -> bool:
        """True if there is no unfinished job."""
        return self._running is None

    def wait(self) -> None:
        """Wait for the job, if there is one; `result` and `error` are its own then.

        What is raised here comes from the handler of a signal: the job goes on, and can be waited for again.
        """
        if self._running is not None:
            self._running.wait()
            self._running = None

    def report_loss(self) -> None:
        """Report on standard error a job that did not end, or an error that was never raised."""
        if sys.stderr is None:  # closed: print would write to stdout, among data
            return
        if self._running is not None and not self._running.is_done:
            print(f"ckptz: {self.label} was lost: interrupted while it was written", file=sys.stderr)
        elif self.error is not None:
            print(f"ckptz: {self.label} was lost: {self.error}", file=sys.stderr)
            self.error = None

    def forget(self) -> None:
        """Forget the job, in a forked process, which has no thread that could end it."""
        self._running = self.error = None


class Turns:
    """Lets one call at a time do its work: other threads wait, and the handler of a signal is refused.

    A handler runs in the midst of the very call that it interrupts, which cannot go on before the handler
    has ended. So it must neither wait for that call nor change what it works on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._doing: str | None = None

    def take(self, what: str, writer: Background[Any], call: Callable[[], R]) -> R:
        """Make a call, which messages name `what`, when it is its turn.

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
                result = call()
            finally:
                self._doing = None
        return result


_alive: weakref.WeakSet[Background[Any]] = weakref.WeakSet()


@atexit.register
def _report_losses() -> None:
    # The interpreter has waited for threads by now, unless Ctrl-C ended that, too.
    for background in list(_alive):
        background.report_loss()


def _forget_in_child() -> None:
    for background in list(_alive):
        background.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
