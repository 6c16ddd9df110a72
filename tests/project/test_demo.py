"""`make demo` runs, reports its measurements, and fails if a lossless method loses something."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.apps

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "bench.demo", "--quick", "--out", out]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    (out / "stdout.txt").write_text(process.stdout)
    return out


def test_the_lossless_row_is_smaller_and_trains_on_bit_for_bit(output: Path) -> None:
    numbers = json.loads((output / "demo.json").read_text())
    exact, _, lossless, *_ = numbers["rows"]
    assert lossless["name"] == "ckptz lossless"
    assert lossless["resumption"] == exact["resumption"]
    assert lossless["storage"]["n_bit_equal"] == len(numbers["steps"])
    assert lossless["storage"]["ratio"] > 1.1
    assert numbers["changes_percent"]["ckptz lossless"] == {"at_once": 0, "single": 0, "resumed": 0}


def test_the_resumed_training_is_the_uninterrupted_one(output: Path) -> None:
    numbers = json.loads((output / "demo.json").read_text())
    resumed = numbers["rows"][0]["resumption"]["training"]
    begin = numbers["resume_step"]
    assert resumed == numbers["training"][begin : begin + len(resumed)]


def test_the_demo_prints_a_table_and_writes_a_picture(output: Path) -> None:
    text = (output / "stdout.txt").read_text()
    assert all(row in text for row in ("uncompressed", "same, ", "ckptz lossless"))
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a report without problems."""
    from bench.demo.methods import Storage
    from bench.demo.report import Report, Row
    from bench.demo.training import Resumption

    resumption = Resumption(2, torch.tensor([2.0, 2.5]), [2.1, 2.0], [1.9], "digest")
    storage = Storage(
        n_bytes=[5, 3], ratio=3.0, weights_ratio=3.0, compress_rate=9.0, restore_rate=9.0, n_bit_equal=2
    )
    return Report(
        rows=[
            Row(name="uncompressed", is_lossless=True, resumption=resumption),
            Row(name="same", is_lossless=False, resumption=resumption),
            Row(name="method", is_lossless=True, resumption=resumption, storage=storage),
        ],
        steps=[1, 2],
        resume_step=1,
        training=[2.5, 2.1],
        state_bytes=12,
        plain_bytes=[13, 13],
        zstd=(20, 100.0),
        first_use_seconds=1.0,
        total_seconds=9.0,
    )


@pytest.mark.parametrize(
    ("part", "change", "complaint"),
    [
        ("resumption", {"training": [2.1, 2.0000002]}, "not bit-equal to the exact resume"),
        ("resumption", {"digest": "another"}, "not bit-equal to the exact resume"),
        ("resumption", {"tokens": torch.tensor([2.0, torch.nan])}, "a number is missing"),
        ("resumption", {"validation": []}, "a number is missing"),
        ("storage", {"n_bit_equal": 1}, "not bit-equal to its original"),
        ("storage", {"n_bytes": [5]}, "a number is missing"),
    ],
)
def test_problems_are_reported(report: Any, part: str, change: dict[str, Any], complaint: str) -> None:
    from bench.demo.report import problems

    assert problems(report) == []
    last = report.rows[-1]
    broken = dataclasses.replace(last, **{part: dataclasses.replace(getattr(last, part), **change)})
    complaints = problems(dataclasses.replace(report, rows=[*report.rows[:-1], broken]))
    assert any(complaint in problem for problem in complaints)
