"""Ordered work on threads with a bounded number of results in flight."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


MAX_DEFAULT_JOBS: Final = 16  # a chunk in work takes up to 40 MiB; more threads only when asked for


def default_jobs() -> int:
    """Count the cores this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_JOBS)


class Workers:
    """Threads that map in order; with one job, everything runs on the caller's thread.

    Args:
        jobs: threads, all cores by default.
        in_flight: results per thread that may wait to be consumed, which bounds memory.
    """

    def __init__(self, jobs: int | None = None, in_flight: int = 2) -> None:
        self.jobs = jobs or default_jobs()
        self._window = self.jobs * in_flight
        self._pool = ThreadPoolExecutor(self.jobs, "ckptz") if self.jobs > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Apply `function` to each item, in order."""
        if self._pool is None:
            yield from map(function, items)
            return
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(self._pool.submit(function, item))
                if len(pending) >= self._window:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
