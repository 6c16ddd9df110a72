"""Forks while a thread writes: the writer goes on, and so does the forked process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.spec_support import ROOT


@pytest.mark.parametrize(
    ("what", "n_forks"),
    [
        ("factors", 10),
        pytest.param("factors", 300, marks=pytest.mark.slow),
        pytest.param("saves", 300, marks=pytest.mark.apps),
        pytest.param("loader", 100, marks=pytest.mark.apps),
    ],
)
def test_a_fork_never_stops_the_blas_of_a_thread_that_writes(what: str, n_forks: int, tmp_path: Path) -> None:
    threads = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    program = [sys.executable, "-m", "tests.support.forking_program", what, str(n_forks), str(tmp_path)]
    done = subprocess.run(
        program, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "went on" in done.stdout
