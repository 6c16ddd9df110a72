"""Threads that map in order with few results in flight, a cache of the values used last, and progress."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Final, Generic, Protocol, Self, TypeVar

from ckptz.errors import whole

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")


RESULTS_IN_FLIGHT: Final = 2  # of each thread that may wait to be consumed, which bounds memory
SMALL_IN_FLIGHT: Final = 64  # results of small items among them
MAX_DEFAULT_JOBS: Final = 16  # a chunk in work takes up to 40 MiB; more threads only when asked for
SMALL_VALUES: Final = 1 << 15  # of a chunk that takes more Python than arithmetic, measured on two cores


def jobs_of(jobs: int | None) -> int:
    """Count the threads that an argument `jobs` asks for, by default all cores that this process may use.

    Raises:
        ConfigError: it is no whole number from 1.
    """
    if jobs is not None:
        return whole("jobs (or None for all cores)", jobs, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_JOBS)


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
        self._pool = ThreadPoolExecutor(self.jobs - with_caller, "ckptz") if self.jobs > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(
        self, function: Callable[[T], R], items: Iterable[T], is_small: Callable[[T], bool] | None = None
    ) -> Iterator[R]:
        """Apply `function` to each item, in order; to small ones on the caller's thread.

        Small work is mostly Python, for which threads only take turns: two need longer than one.
        """
        if self._pool is None:
            yield from map(function, items)
            return
        pending: deque[tuple[Future[R], bool]] = deque()  # and whether the item is small
        given: deque[Future[R]] = deque()
        n_large = 0
        try:
            for item in items:
                while given and given[0].done():
                    given.popleft()
                is_busy = self._with_caller and len(given) >= RESULTS_IN_FLIGHT * (self.jobs - 1)
                small = is_small is not None and is_small(item)
                if small or is_busy:
                    pending.append((_at_once(function, item), small))
                else:
                    given.append(self._pool.submit(function, item))
                    pending.append((given[-1], small))
                n_large += not small
                while n_large >= RESULTS_IN_FLIGHT * self.jobs or len(pending) >= SMALL_IN_FLIGHT:
                    done, small = pending.popleft()
                    n_large -= not small
                    yield done.result()
            while pending:
                yield pending.popleft()[0].result()
        finally:
            # Not left to the end of the pool: threads that are joined when Ctrl-C comes may run on, and write
            # into memory that is used again.
            wait([future for future, _ in pending if not future.cancel()])


def _at_once(function: Callable[[T], R], item: T) -> Future[R]:
    done = Future[R]()
    try:
        done.set_result(function(item))
    except Exception as error:  # raised in its turn
        done.set_exception(error)
    return done


class Recent(Generic[V]):
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
        self._lock = threading.Lock()
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
            self._held[key] = value
            self.weight += weight
            while self.weight > self._most and len(self._held) > 1:
                self.weight -= self._weigh(self._held.popitem(last=False)[1])

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._held.clear()
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
