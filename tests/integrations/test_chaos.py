"""Training programs that ckpt-chaos kills at every file event resume, and end with the same values."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_program import N_STEPS, SAVE_EVERY
from tests.support.spec_support import ROOT

pytestmark = pytest.mark.apps

PROGRAM = ROOT / "tests" / "support" / "killed_program.py"
MAX_POINTS = 8  # per program; each point runs a process that is killed and one that resumes


def trained(kind: str, folder: Path) -> str:
    """Run the training program and return the digest of its final values."""
    subprocess.run([sys.executable, PROGRAM, kind, folder], cwd=ROOT, check=True, capture_output=True)
    return (folder / "result.txt").read_text()


def outcomes(kind: str, work: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Kill and resume the program at each point; yield the point's label, outcome and final digest."""
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", work, "--jobs", "2"]
    command += ["--max-points", str(MAX_POINTS), "--timeout", "300", "--result-file", "{out}/result.txt"]
    command += ["--step-regex", r"resumed from step (\d+)", "--", sys.executable, PROGRAM, kind, "{out}"]
    subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    for path in sorted(work.glob("pt_*/result.json")):
        point = json.loads(path.read_text())
        result = path.parent / "out" / "result.txt"
        yield point["label"], point["outcome"], result.read_text() if result.exists() else ""


@pytest.mark.parametrize("kind", ["plain", "trainer", "lightning"])
def test_a_program_that_is_killed_at_any_file_event_resumes_to_the_same_values(
    tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("ckpt_chaos")
    uninterrupted = trained(kind, tmp_path / "whole")
    finished = uninterrupted
    if kind == "trainer":  # resumed at its last step, the Trainer trains one step more, with or without ckptz
        digests = [trained("transformers", tmp_path / "without-ckptz") for _ in range(2)]
        assert digests[0] == uninterrupted
        finished = digests[1]
    points = list(outcomes(kind, tmp_path / "work"))
    assert len(points) > 5
    for label, outcome, digest in points:
        first = outcome["resumed_from_step"]
        is_control = label.startswith("no crash")
        assert outcome["raised"] is None, label
        assert is_control or first in range(0, N_STEPS + 1, SAVE_EVERY), label
        assert digest == (finished if first == N_STEPS else uninterrupted), label
