"""Runs one job at a time on a separate thread; its error is raised by the next call.

The thread is never joined: on Python 3.11, a `Thread.join` that Ctrl-C interrupts takes a running thread for
an ended one, and memory that the job still reads would be overwritten. The job is a `Task`, which is waited
for instead. All functions may be interrupted anywhere, and called again by a signal handler.
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

WRITER_NICENESS: Final = 5  # the writer must not slow training down


def _run_with_low_priority(task: Task[None]) -> None:
    if sys.platform == "linux":  # which has a niceness for each thread
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
    task.run()


class Background(Generic[T]):
    """Runs jobs one after another, and the calls around them one at a time.

    The thread is not a daemon, so a program that ends waits for it. Jobs that are lost nevertheless, because
    Ctrl-C ended the waiting or no code asked for the error, are reported on standard error.

    Attributes:
        label: name of the last job in messages.
        result: result of the last finished job, until the caller takes it.
        error: exception of the last finished job. The caller that reports it sets it to None immediately
            before, so that an interrupt does not lose it.
    """

    def __init__(self) -> None:
        self.label = ""
        self.result: T | None = None
        self.error: BaseException | None = None
        self._running: Task[None] | None = None
        self._lock = threading.RLock()
        self._doing: str | None = None
        _alive.add(self)

    def __del__(self) -> None:
        finalize(self.report_loss)

    def start(self, label: str, job: Callable[[], T]) -> None:
        """Start a job; `wait` must have been called for the one before.

        Args:
            label: name of the job in messages.
            job: the function to run.
        """
        if self._running is not None:
            raise RuntimeError(f"{self.label} was not waited for")
        task, is_ending = Task(functools.partial(self._do, job)), not threading.main_thread().is_alive()
        self.label, self._running = label, task  # before the start: an interrupt must not lose it
        try:
            if is_ending:  # the interpreter ends, and waits for no new thread
                task.run()
            else:
                # `Thread.start` waits for the thread; an interrupt of this wait could block it for ever.
                run = functools.partial(_run_with_low_priority, task)
                thread = threading.Thread(target=run, name="ckptz-writer", daemon=False)
                starting = Task(thread.start)
                starting.start()
                starting.result()
        except BaseException:  # no thread can be started, or an interrupt: the job may run or not
            if task.cancel() or is_ending:
                self._running = None
            raise

    def _do(self, job: Callable[[], T]) -> None:
        try:
            self.result = job()
        except BaseException as error:
            self.error = error

    def take_turn(self, what: str, call: Callable[[], R]) -> R:
        """Make a call, which messages name `what`, when no other is running; other threads wait.

        A signal handler runs inside the call that it interrupts, so it must neither wait for that call nor
        change its state.

        Raises:
            ConfigError: the calling thread is inside another call, or runs the job.
        """
        running = self._running
        if running is not None and not running.is_done and running.thread == threading.get_ident():
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

    @property
    def is_idle(self) -> bool:
        """True if there is no unfinished job."""
        return self._running is None

    def wait(self) -> None:
        """Wait for the job, if there is one; `result` and `error` are then those of the job.

        Exceptions come from signal handlers only; the job continues, and can be waited for again.
        """
        if self._running is not None:
            self._running.wait()
            self._running = None

    def report_loss(self) -> None:
        """Report an unfinished job, or an error that was never raised, on standard error."""
        if sys.stderr is None:  # closed: print would write to stdout, among data
            return
        if self._running is not None and not self._running.is_done:
            print(f"ckptz: {self.label} was lost: interrupted while it was written", file=sys.stderr)
        elif self.error is not None:
            print(f"ckptz: {self.label} was lost: {self.error}", file=sys.stderr)
            self.error = None

    def forget(self) -> None:
        """Forget the job in a forked process, which does not have its thread."""
        self._running = self.error = None


_alive: weakref.WeakSet[Background[Any]] = weakref.WeakSet()


@atexit.register
def _report_losses() -> None:
    # The interpreter has waited for all threads, unless Ctrl-C ended that too.
    for background in list(_alive):
        background.report_loss()


def _forget_in_child() -> None:
    for background in list(_alive):
        background.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
