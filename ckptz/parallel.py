"""Ordered parallel map on threads with bounded memory, and the progress interface."""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self, TypeAlias, TypeVar

from ckptz.errors import check_int

T = TypeVar("T")
R = TypeVar("R")


RESULTS_IN_FLIGHT: Final = 2  # unconsumed results per thread, which bounds memory
PATIENCE: Final = 0.1  # seconds between two checks of a task, in case a wake-up was lost to an interrupt
SMALL_IN_FLIGHT: Final = 64  # unconsumed results of small items
MAX_DEFAULT_JOBS: Final = 16  # default limit, as each thread takes up to 40 MiB
SMALL_VALUES: Final = 1 << 15  # smaller chunks take more time in Python than in kernels (two cores)


def jobs_of(jobs: int | None) -> int:
    """Return the number of threads for an argument `jobs`; by default all cores available, at most 16.

    Raises:
        ConfigError: `jobs` is not an integer of at least 1.
    """
    if jobs is not None:
        return check_int("jobs (or None for all cores)", jobs, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_JOBS)


def pause(lock: Any) -> None:
    """Wait up to `PATIENCE` seconds until a lock is free, without keeping it."""
    if lock.acquire(timeout=PATIENCE):
        lock.release()


class Task(Generic[R]):
    """A call on one thread that others can wait for; waiting is safe against interrupts.

    The conditions inside futures, events and `Thread.start` can stay locked if Ctrl-C arrives while they are
    entered or left, and then the thread that sets them waits for ever. A task polls a plain lock instead.

    Attributes:
        is_done: whether the call has ended; set last.
        thread: the thread that makes the call.
        error: the exception that it raised, or None.
    """

    def __init__(self, call: Callable[[], R]) -> None:
        self.is_done = False
        self.thread: int | None = None
        self.error: BaseException | None = None
        self._call: Callable[[], R] | None = call
        self._result: list[R] = []
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._claim = _thread.allocate_lock()

    def cancel(self) -> bool:
        """Cancel the call unless a thread has started it; returns whether it was cancelled."""
        if not self._claim.acquire(blocking=False):
            return False
        self.finish()
        return True

    def run(self) -> None:
        """Make the call on this thread, unless another thread has started it or it was cancelled."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            assert self._call is not None
            self.thread = threading.get_ident()
            self._result.append(self._call())
        except BaseException as error:
            self.error = error
        finally:
            self._call = None
            self.finish()
        del self  # an error's traceback refers to this frame

    def finish(self) -> None:
        """Mark the call as done and wake waiting threads."""
        if not self.is_done:
            self.is_done = True
            self._lock.release()

    def start(self) -> None:
        """Make the call on a new daemon thread."""
        _thread.start_new_thread(self.run, ())

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait up to `seconds` for the end of the call, and return whether it has ended."""
        end = time.monotonic() + seconds
        while not self.is_done and time.monotonic() < end:
            pause(self._lock)
        return self.is_done

    def result(self) -> R:
        """Wait for the call, and return its result or raise its error."""
        self.wait()
        if self.error is not None:
            try:
                raise self.error
            finally:
                del self  # the error's traceback refers to this frame
        return self._result[0]


def uninterrupted(call: Callable[[Sequence[BaseException]], R]) -> R:
    """Make a call on a new thread, which interrupts do not reach; the first interrupt is raised afterwards.

    Args:
        call: gets the list of interrupts, which grows, and may return early if there are some.
    """
    interrupts: list[BaseException] = []
    task = Task(functools.partial(call, interrupts))
    begin = task.start
    while not task.is_done:
        try:
            begin()
            task.wait()
        except BaseException as error:
            interrupts.append(error)
            begin = task.run  # if no thread could be started
    try:
        if interrupts:
            raise interrupts[0]
        return task.result()
    finally:
        del task, begin, interrupts  # an error's traceback refers to this frame


Tasks: TypeAlias = "queue.SimpleQueue[Task[Any] | object]"


def _serve(tasks: Tasks, end: object) -> None:
    """Run tasks from a queue until an item is not a task, then put `end` there for the other threads."""
    while isinstance(task := tasks.get(), Task):
        task.run()
        del task  # releases its result while this thread waits for the next task
    tasks.put(end)


class Workers:
    """A thread pool with an ordered map; with one job, everything runs on the caller's thread.

    Args:
        jobs: number of threads, by default all cores.
        with_caller: whether the caller's thread works as well, for callers that do not write files meanwhile;
            a waiting thread would have to be woken for every result.
    """

    def __init__(self, jobs: int | None = None, *, with_caller: bool = False) -> None:
        self.jobs = jobs_of(jobs)
        self._with_caller = with_caller
        self._tasks: Tasks = queue.SimpleQueue()
        self._threads: list[Task[None]] = []
        # Ends the threads even if `__exit__` was interrupted. Unlike `__del__`, the queue's method in C
        # cannot be interrupted.
        self._end = weakref.ref(self, self._tasks.put)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(queue.Empty):
            while isinstance(task := self._tasks.get_nowait(), Task):
                task.cancel()
        self._tasks.put(self._end)
        for thread in self._threads:
            if not thread.cancel():
                thread.wait()

    def _submit(self, task: Task[Any]) -> None:
        self._tasks.put(task)
        if len(self._threads) < self.jobs - self._with_caller:
            self._threads.append(Task(functools.partial(_serve, self._tasks, self._end)))
            self._threads[-1].start()

    def _is_busy(self, submitted: deque[Task[R]]) -> bool:
        """Return whether the other threads have enough tasks, so that the caller's thread runs the next."""
        while submitted and submitted[0].is_done:
            submitted.popleft()
        return self._with_caller and len(submitted) >= RESULTS_IN_FLIGHT * (self.jobs - 1)

    def map(
        self, function: Callable[[T], R], items: Iterable[T], is_small: Callable[[T], bool] | None = None
    ) -> Iterator[R]:
        """Apply `function` to each item and yield the results in order.

        Small items are processed on the caller's thread: they are mostly Python, which threads cannot run in
        parallel, so two threads would take longer than one.
        """
        if self.jobs == 1:
            yield from map(function, items)
            return
        # A task is added before it is submitted, and removed after its result: any call may be interrupted.
        pending: deque[tuple[Task[R], bool]] = deque()  # with whether the item is small
        submitted: deque[Task[R]] = deque()
        task: Task[R] | None = None
        n_large = 0
        try:
            for item in items:
                small = is_small is not None and is_small(item)
                is_here = small or self._is_busy(submitted)
                task = Task(functools.partial(function, item))
                if is_here:
                    _run_here(task)  # raises an interrupt at once
                pending.append((task, small))
                if not is_here:
                    submitted.append(task)
                    self._submit(task)
                n_large += not small
                while n_large >= RESULTS_IN_FLIGHT * self.jobs or len(pending) >= SMALL_IN_FLIGHT:
                    n_large -= not pending[0][1]
                    yield _first_result(pending)
            while pending:
                yield _first_result(pending)
        finally:
            # If the caller took all results but did not exhaust the generator, this runs in a finalizer,
            # where an interrupt would be swallowed; interrupts arrive at calls only.
            if pending:
                _end(pending)
                # An error's traceback refers to this frame, which would keep tasks and open files alive.
                pending.clear()
                submitted.clear()
                task = None


def _first_result(pending: deque[tuple[Task[R], bool]]) -> R:
    result = pending[0][0].result()
    pending.popleft()
    return result


def _end(pending: Iterable[tuple[Task[Any], bool]]) -> None:
    """Cancel tasks and wait for running ones, which could write into reused memory after Ctrl-C."""
    for task in [task for task, _ in pending if not task.cancel()]:
        task.wait()


def _run_here(task: Task[Any]) -> None:
    try:
        task.run()
        if task.error is not None and not isinstance(task.error, Exception):
            raise task.error  # an interrupt; errors are raised when their result is due
    finally:
        del task  # an error's traceback refers to this frame


# --- progress -----------------------------------------------------------------------------------


class Progress(Protocol):
    """Receiver of progress in tensor bytes, called on the caller's thread."""

    def start(self, name: str, n_bytes: int) -> None:
        """Start a file of `n_bytes` tensor bytes."""
        ...

    def advance(self, n_bytes: int) -> None:
        """Add finished bytes."""
        ...


class _Silent:
    def start(self, name: str, n_bytes: int) -> None:
        """Do nothing at all here."""

    def advance(self, n_bytes: int) -> None:
        """Do nothing at all here."""


SILENT: Final[Progress] = _Silent()
