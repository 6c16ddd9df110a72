"""Threads that map in order with few results in flight, a cache of the values used last, and progress."""

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
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self, TypeAlias, TypeVar

from ckptz.errors import check_int

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")


RESULTS_IN_FLIGHT: Final = 2  # of each thread that may wait to be consumed, which bounds memory
PATIENCE: Final = 0.1  # seconds between two looks at a task, in case what wakes the waiting was missed
SMALL_IN_FLIGHT: Final = 64  # results of small items among them
MAX_DEFAULT_JOBS: Final = 16  # a chunk in work takes up to 40 MiB; more threads only when asked for
SMALL_VALUES: Final = 1 << 15  # of a chunk that takes more Python than arithmetic, measured on two cores


def jobs_of(jobs: int | None) -> int:
    """Count the threads that an argument `jobs` asks for, by default all cores that this process may use.

    Raises:
        ConfigError: it is no whole number from 1.
    """
    if jobs is not None:
        return check_int("jobs (or None for all cores)", jobs, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_JOBS)


def pause(lock: Any) -> None:
    """Wait for a lock for a moment; the lock is free afterwards if it was."""
    if lock.acquire(timeout=PATIENCE):
        lock.release()


class Task(Generic[R]):
    """A call that one thread makes and others wait for, which no interrupt of the waiting can disturb.

    The conditions behind futures, events and `Thread.start` stay locked where Ctrl-C comes as they are
    entered or left, and then whoever sets them waits for ever. This waits for a plain lock, and looks again.

    Attributes:
        is_done: whether the call has ended; set last.
        thread: the thread that makes it.
        error: what it raised.
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
        """Return whether nobody makes the call yet; nobody will then, or waits for it."""
        if not self._claim.acquire(blocking=False):
            return False
        self.finish()
        return True

    def run(self) -> None:
        """Make the call on this thread, unless another does or it was cancelled."""
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
        del self  # the traceback of an error has this frame

    def finish(self) -> None:
        """End the waiting of others; once."""
        if not self.is_done:
            self.is_done = True
            self._lock.release()

    def start(self) -> None:
        """Make the call on a new thread, which the end of the program does not wait for."""
        _thread.start_new_thread(self.run, ())

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the end of the call, `seconds` at most, and return whether it has ended."""
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
                del self  # the traceback has this frame
        return self._result[0]


def uninterrupted(call: Callable[[Sequence[BaseException]], R]) -> R:
    """Make a call on a thread of its own, where no interrupt ends it; the first one is raised afterwards.

    Args:
        call: is given the interrupts so far, a list that grows, and may end early once there are some.
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
            begin = task.run  # on this thread, if no other could be started
    try:
        if interrupts:
            raise interrupts[0]
        return task.result()
    finally:
        del task, begin, interrupts  # the traceback of an error has this frame


Tasks: TypeAlias = "queue.SimpleQueue[Task[Any] | object]"


def _serve(tasks: Tasks, end: object) -> None:
    """Run tasks until anything else is in the queue, which the other threads find there, too."""
    while isinstance(task := tasks.get(), Task):
        task.run()
        del task  # nor its result, while this thread waits for the next
    tasks.put(end)


class Workers:
    """Threads that map in order; with one job, everything runs on the caller's thread.

    Args:
        jobs: threads, all cores by default.
        with_caller: count the caller's thread as one of them, where it has no files to write meanwhile:
            one that waits has to be woken for every result.
    """

    def __init__(self, jobs: int | None = None, *, with_caller: bool = False) -> None:
        self.jobs = jobs_of(jobs)
        self._with_caller = with_caller
        self._tasks: Tasks = queue.SimpleQueue()
        self._threads: list[Task[None]] = []
        # Ends the threads also where an interrupt ended `__exit__`. `__del__` could be interrupted, too; the
        # queue's method, in C, cannot.
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
        """Return whether the caller's thread is to take the next task, as the others have enough."""
        while submitted and submitted[0].is_done:
            submitted.popleft()
        return self._with_caller and len(submitted) >= RESULTS_IN_FLIGHT * (self.jobs - 1)

    def map(
        self, function: Callable[[T], R], items: Iterable[T], is_small: Callable[[T], bool] | None = None
    ) -> Iterator[R]:
        """Apply `function` to each item, in order; to small ones on the caller's thread.

        Small work is mostly Python, for which threads only take turns: two need longer than one.
        """
        if self.jobs == 1:
            yield from map(function, items)
            return
        # A task is here before it is submitted, and until its result is: an interrupt may come at any call.
        pending: deque[tuple[Task[R], bool]] = deque()  # and whether the item is small
        submitted: deque[Task[R]] = deque()
        task: Task[R] | None = None
        n_large = 0
        try:
            for item in items:
                small = is_small is not None and is_small(item)
                is_here = small or self._is_busy(submitted)
                task = Task(functools.partial(function, item))
                if is_here:
                    _run_here(task)  # one that an interrupt ends is not waited for
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
            # Of a caller who took all results, and not the end, Python calls this in a finalizer, where an
            # interrupt would be swallowed; it comes after calls only.
            if pending:
                _end(pending)
                # The traceback of an error has this frame, and would keep it, and open files, with its task.
                pending.clear()
                submitted.clear()
                task = None


def _first_result(pending: deque[tuple[Task[R], bool]]) -> R:
    result = pending[0][0].result()
    pending.popleft()
    return result


def _end(pending: Iterable[tuple[Task[Any], bool]]) -> None:
    """Cancel tasks, and wait for those that run: after Ctrl-C they would write into memory used again."""
    for task in [task for task, _ in pending if not task.cancel()]:
        task.wait()


def _run_here(task: Task[Any]) -> None:
    try:
        task.run()
        if task.error is not None and not isinstance(task.error, Exception):
            raise task.error  # an interrupt; errors are raised in their turn
    finally:
        del task  # the traceback of an error leads to this frame


class LRUCache(Generic[V]):
    """The values used last, up to a weight in all; threads that want the same one wait for one to make it.

    Args:
        most: the weight that is held.
        weigh: gives the weight of a value, such as its bytes.
        keeps_any: hold the one used last whatever it weighs; else one beyond `most` is made each time.
    """

    def __init__(self, most: int, weigh: Callable[[V], int], *, keeps_any: bool = False) -> None:
        self._most, self._weigh, self._keeps_any = most, weigh, keeps_any
        self.weight = 0  # of all that is held
        self._held: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.RLock()  # an interrupt right behind its acquisition leaves it with this thread
        self._making: dict[Hashable, threading.RLock] = {}

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the cached value, or make and cache it."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            turn = self._making.setdefault(key, threading.RLock())
        with turn:
            value = self._held.get(key)
            if value is None:
                try:
                    value = make()
                    self._keep(key, value)
                finally:
                    self._making.pop(key, None)
        return value

    def held(self, key: Hashable) -> V | None:
        """Return the cached value, or None."""
        with self._lock:
            return self._held.get(key)

    def _keep(self, key: Hashable, value: V) -> None:
        weight = self._weigh(value)
        with self._lock:
            if key in self._held or (weight > self._most and not self._keeps_any):
                return
            # An interrupt comes after calls only, so none may stand between a value and its weight.
            self._held[key] = value
            self.weight += weight
            while self.weight > self._most and len(self._held) > 1:
                oldest = next(iter(self._held))
                weight = self._weigh(self._held[oldest])
                del self._held[oldest]
                self.weight -= weight

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._held = OrderedDict()
            self.weight = 0


# --- how work tells what is done ----------------------------------------------------------------


class Progress(Protocol):
    """Told in tensor bytes, from the caller's own thread."""

    def start(self, name: str, n_bytes: int) -> None:
        """Begin a file of this many bytes."""
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
