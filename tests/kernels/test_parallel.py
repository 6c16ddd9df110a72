"""Ordered work on threads, and small work on the caller's."""

import threading

import pytest

from ckptz.parallel import Workers


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
