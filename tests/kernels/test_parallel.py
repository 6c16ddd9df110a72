"""Workers: results in order from threads, small work on the caller's thread, errors and interrupts."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest

from ckptz.parallel import Task, Workers, uninterrupted


def test_small_work_runs_on_the_callers_thread_in_order() -> None:
    def thread_of(item: int) -> tuple[int, bool]:
        return item, threading.current_thread() is threading.main_thread()

    with Workers(2) as workers:
        results = list(workers.map(thread_of, range(9), lambda item: item % 3 > 0))
    assert results == [(item, item % 3 > 0) for item in range(9)]


def test_an_error_of_small_work_is_raised_after_the_results_before_it() -> None:
    def refuse(item: int) -> int:
        if item == 4:
            raise ValueError("four")
        return item

    with Workers(2) as workers:
        results = workers.map(refuse, range(9), lambda item: item == 4)
        assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="four"):
            next(results)


class Refused(ValueError):
    """An error that supports weak references."""


def refuse(item: object) -> None:
    raise Refused(item)


def is_freed(call: Callable[[], object]) -> bool:
    """Return whether the error of a call and its traceback are freed without garbage collection."""
    gc.disable()
    try:
        try:
            call()
        except Refused as error:
            reference = weakref.ref(error)
        return reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_a_worker_is_freed(jobs: int, is_small: bool) -> None:
    with Workers(jobs) as workers:
        assert is_freed(lambda: list(workers.map(refuse, range(9), lambda item: is_small)))


def test_an_error_of_an_uninterrupted_call_is_freed() -> None:
    assert is_freed(lambda: uninterrupted(refuse))


def test_results_that_are_closed_after_their_workers_do_not_wait() -> None:
    """After Ctrl-C the results may be referenced only by the traceback, and outlive their workers."""

    def work(item: int) -> int:
        time.sleep(0.2 if item else 0)  # the last item is still queued when the first has ended
        return item

    with Workers(2) as workers:
        results = workers.map(work, range(4))
        assert next(results) == 0
    closing = Task(results.close)
    closing.start()
    assert closing.wait(10)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
@pytest.mark.parametrize("n_signals", [1, 2])
def test_an_interrupted_call_runs_to_its_end_and_sees_the_interrupt(n_signals: int) -> None:
    ended, main = [], threading.get_ident()

    def call(interrupts: Sequence[BaseException]) -> None:
        for _ in range(n_signals):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)
        while not interrupts:
            time.sleep(0.001)
        ended.append(threading.get_ident())

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(call)
    assert ended
    assert ended != [main]


def test_an_uninterrupted_call_runs_here_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[Sequence[BaseException]] = []
    monkeypatch.setattr("_thread.start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        uninterrupted(ended.append)
    assert [len(interrupts) for interrupts in ended] == [1]
