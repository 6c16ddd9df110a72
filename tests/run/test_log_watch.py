"""`ckptz log --watch` shows a folder live, and a Checkpointer tells of each save."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptz.training.checkpointer import SaveReport
from ckptz_cli import reading
from tests.support.checkpointer_support import Run
from tests.support.cli_support import a_state, ckptz, write_plain

CODE = "from ckptz_cli.main import main; main()"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    plain = write_plain(tmp_path / "a.safetensors", a_state())
    ckptz("compress", plain, "--step", 1)
    return tmp_path / "a.ckptz"


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "run").mkdir()
    command = [
        sys.executable,
        "-c",
        CODE,
        "log",
        str(tmp_path / "run"),
        "--watch",
        "--interval",
        "0.1",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is no signal there")
def test_each_change_is_a_line_and_ctrl_c_ends_well(watch: Any, packed: Path, tmp_path: Path) -> None:
    assert line(watch)["n_files"] == 0
    shutil.copy(packed, tmp_path / "copy")
    os.rename(tmp_path / "copy", tmp_path / "run" / "step-00000001.ckptz")
    found = line(watch)
    assert found == ckptz("log", tmp_path / "run", "--json").json
    (tmp_path / "run" / ".step-00000001.ckptz.hidden").touch()
    assert line(watch)["entries"][0]["is_hidden"]
    (tmp_path / "run" / "broken.ckptz").write_bytes(b"x")
    assert line(watch)["n_broken"] == 1
    watch.send_signal(signal.SIGINT)
    assert watch.wait(30) == 0
    assert watch.stderr.read() == ""


def test_it_ends_when_nobody_reads(watch: Any, packed: Path, tmp_path: Path) -> None:
    line(watch)
    watch.stdout.close()
    shutil.copy(packed, tmp_path / "run" / "a.ckptz")
    assert watch.wait(30) == 0


def test_it_looks_again_only_at_what_changed(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = reading._changes(packed.parent, 0.0)
    next(changes)
    looks: list[int] = []

    def sleep(seconds: float) -> None:
        looks.append(1)
        if len(looks) == 5:
            packed.touch()

    monkeypatch.setattr(time, "sleep", sleep)
    next(changes)
    assert len(looks) == 5


def test_a_terminal_shows_the_newest_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(f"line {n}" for n in range(50))
    assert reading._fitted(text) == text
    monkeypatch.setattr(reading, "is_terminal", lambda stream: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    lines = reading._fitted(text).splitlines()
    assert len(lines) == 20
    assert (lines[0], lines[1], lines[2], lines[-1]) == ("line 0", "... 31 lines above", "line 32", "line 49")


@pytest.mark.parametrize("folder", ["nowhere", "a.ckptz"])
def test_what_is_no_folder_is_said_as_without(packed: Path, folder: str) -> None:
    ended = ckptz("log", packed.parent / folder, "--watch", fails=True)
    assert ended == ckptz("log", packed.parent / folder, fails=True)


@pytest.mark.parametrize("background", [True, False])
def test_on_save_is_given_each_report(tmp_path: Path, background: bool) -> None:
    run, reports = Run(), list[SaveReport]()
    with run.checkpointer(tmp_path, background=background, on_save=reports.append) as checkpointer:
        for step in (1, 2, 3):
            run.step()
            checkpointer.save(step)
            last = checkpointer.wait()
            assert reports[-1] == last
    assert [report.step for report in reports] == [1, 2, 3]
    assert all(report.stored_bytes for report in reports)


def test_what_on_save_raises_costs_no_step(tmp_path: Path) -> None:
    run = Run()

    def fail(report: SaveReport) -> None:
        raise OSError("the logger is gone")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with run.checkpointer(tmp_path, background=False, on_save=fail) as checkpointer:
            run.step()
            checkpointer.save(1)
            assert checkpointer.steps() == (1,)
    assert [str(w.message) for w in said] == ["on_save raised OSError: the logger is gone; step 1 is saved"]
