"""The example with several workers writes the same files as one process, even if a worker was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckptz
from tests.support.cli_support import a_state, write_plain

pytestmark = pytest.mark.apps

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "archive.py"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_worker_that_was_killed_loses_nothing(tmp_path: Path) -> None:
    runs, packed = tmp_path / "runs", tmp_path / "packed"
    for run in ("a", "b", "c"):
        (runs / run).mkdir(parents=True)
        files = [
            write_plain(runs / run / f"step-{step}.safetensors", a_state(drift=0.001 * step, n=20_000))
            for step in range(1, 6)
        ]
        (tmp_path / "expected" / run).mkdir(parents=True)
        ckptz.compress(files, tmp_path / "expected" / run, chain=True, jobs=1)
    command = [sys.executable, str(EXAMPLE), str(runs), str(packed), "--workers", "2"]
    process = subprocess.Popen(command, start_new_session=True)
    while not (packed / "a" / "step-2.ckptz").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert contents(packed).keys() < contents(tmp_path / "expected").keys() | set(leftovers(packed))
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "outputs existed and were kept" in result.stderr
    for name in leftovers(packed):
        (packed / name).unlink()
    assert contents(packed) == contents(tmp_path / "expected")


def leftovers(folder: Path) -> list[str]:
    """List the unfinished files, which readers do not take for checkpoints."""
    return [name for name in contents(folder) if not name.endswith(".ckptz")]
