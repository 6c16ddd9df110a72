"""The example of weight sync."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.apps
def test_the_example_ends_with_the_same_weights_everywhere(tmp_path: Path) -> None:
    script = ROOT / "examples" / "weight_sync.py"
    command = [sys.executable, script, tmp_path / "weights"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    assert process.returncode == 0, process.stderr
    totals = re.findall(r"^(trainer|engine 0|engine 1) +holds ([\d.]+)$", process.stdout, re.MULTILINE)
    assert sorted(name for name, _ in totals) == ["engine 0", "engine 1", "trainer"]
    assert len({total for _, total in totals}) == 1
    assert "step-000005.ckptz" in {path.name for path in (tmp_path / "weights").iterdir()}
