"""Forks while a thread writes: the writer and the forked process both continue."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ckptz.kernels import blas
from tests.support.spec_support import ROOT


@pytest.mark.parametrize(
    ("case", "n_forks"),
    [
        ("factors", 10),
        pytest.param("factors", 300, marks=pytest.mark.slow),
        pytest.param("pools", 200, marks=pytest.mark.apps),
        pytest.param("saves", 300, marks=pytest.mark.apps),
        pytest.param("loader", 100, marks=pytest.mark.apps),
    ],
)
def test_a_fork_never_stops_a_thread_that_writes(case: str, n_forks: int, tmp_path: Path) -> None:
    threads = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    program = [sys.executable, "-m", "tests.support.forking_program", case, str(n_forks), str(tmp_path)]
    process = subprocess.run(
        program, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "went on" in process.stdout


class Slow:
    """Matrix whose product blocks until it is released."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __matmul__(self, other: object) -> str:
        self.began.set()
        assert self.may_end.wait(60)
        return "product"


def test_ctrl_c_while_a_fork_waits_is_raised_after_it() -> None:
    matrix, products = Slow(), list[str]()
    thread = threading.Thread(target=lambda: products.append(blas.product(matrix, matrix)))
    thread.start()
    assert matrix.began.wait(60)
    timers = [
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)),
        threading.Timer(0.4, matrix.may_end.set),
    ]
    for timer in timers:
        timer.start()

    def fork_and_wait() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        is_waited_for.append(matrix.may_end.is_set())
        os.waitpid(child, 0)
        time.sleep(10)

    is_waited_for = list[bool]()
    with pytest.raises(KeyboardInterrupt):
        fork_and_wait()
    assert is_waited_for == [True]
    thread.join()
    assert products == ["product"]
    assert blas.product(np.eye(2), np.eye(2)).sum() == 2  # no lock remains
