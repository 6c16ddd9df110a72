"""Ctrl-C at random times: nothing hangs, no value is wrong, no temporary file stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.signal_storm import DOORS
from tests.support.spec_support import ROOT


@pytest.mark.parametrize("n_signals", [15, pytest.param(1250, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_time_neither_hangs_nor_leaves_a_wrong_value(
    n_signals: int, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "tests.support.signal_storm", str(tmp_path), str(n_signals), "1", *DOORS]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr
    for door, counts in json.loads(done.stdout).items():
        assert counts["signals"] == n_signals, door
        assert counts["temporary"] == 0, door
