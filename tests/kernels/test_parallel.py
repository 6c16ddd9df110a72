"""Ordered work on threads, and small work on the caller's."""

import threading
import time

import pytest

from ckptz.parallel import Task, Workers


def test_small_work_stays_on_the_callers_thread_and_in_its_turn() -> None:
    def where(item: int) -> tuple[int, bool]:
        return item, threading.current_thread() is threading.main_thread()

    with Workers(2) as workers:
        found = list(workers.map(where, range(9), lambda item: item % 3 > 0))
    assert found == [(item, item % 3 > 0) for item in range(9)]


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


def test_results_that_are_closed_after_their_workers_do_not_wait() -> None:
    """As where Ctrl-C ends a command, and only its traceback still holds the results."""

    def work(item: int) -> int:
        time.sleep(0.2 if item else 0)  # so that the last is not begun when the first has ended
        return item

    with Workers(2) as workers:
        results = workers.map(work, range(4))
        assert next(results) == 0
    closing = Task(results.close)
    closing.start()
    assert closing.wait(10)
