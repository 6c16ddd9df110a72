"""Ctrl-C at random times: no hang, no wrong value, no temporary file, no swallowed interrupt."""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from ckptz import safe_open
from ckptz.format.byte_source import FileBytes
from ckptz.torch import load_file, save_file
from tests.support.signal_storm import DOORS
from tests.support.spec_support import ROOT

SHARES = {"load": 0.24, "save": 0.16, "restore": 0.16, "follow": 0.16, "follow-stored": 0.16, "search": 0.12}


@pytest.mark.parametrize("n_signals", [25, pytest.param(5000, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_time_neither_hangs_nor_leaves_a_wrong_value(
    n_signals: int, tmp_path: Path
) -> None:
    shares = [f"{door}={round(SHARES[door] * n_signals)}" for door in DOORS]
    program = [sys.executable, "-m", "tests.support.signal_storm", str(tmp_path), "1", *shares]
    process = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout)
    assert sum(count["signals"] for count in counts.values()) == n_signals
    assert all(count["temporary"] == count["swallowed"] == 0 for count in counts.values()), process


# Python functions that wait or notify; Ctrl-C at their ends leaves their lock locked.
WAITING = ("Condition.wait", "Condition.notify", "Event.wait", "Event.set", "Thread.start", "Thread.join")


def waits_of(call: Callable[[], None]) -> set[str]:
    """Return the waiting functions of `threading` and `concurrent.futures` that the calling thread enters."""
    names = set[str]()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(("threading.py", "_base.py")):
            names.add(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {name for name in names if name.startswith(("Future.", *WAITING))}


@pytest.mark.parametrize("door", DOORS)
def test_the_callers_thread_waits_with_plain_locks_alone(door: str, tmp_path: Path) -> None:
    interface = DOORS[door](tmp_path)
    interface.call(0)
    assert waits_of(lambda: (interface.call(1), interface.check(1))) == set()


class Shared:
    """Object with an open file handle that is never closed."""

    def __init__(self, path: Path) -> None:
        self.handle = safe_open(path, "pt")

    def let_go(self) -> None:
        del self.handle


@pytest.mark.parametrize("how", ["load_file", "a handle"])
def test_an_interrupt_that_comes_when_a_file_is_closed_is_raised(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, close, came = tmp_path / "model.ckptz", FileBytes.close, list[FileBytes]()

    def interrupted(self: FileBytes) -> None:
        came.append(self)
        if len(came) == 1:
            raise KeyboardInterrupt
        close(self)

    save_file({"weight": torch.ones(4)}, path)
    handle = Shared(path)
    monkeypatch.setattr(FileBytes, "close", interrupted)

    def close_and_wait() -> None:
        load_file(path) if how == "load_file" else handle.let_go()
        time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        close_and_wait()
    assert len(came) > (how == "a handle")  # it was closed nevertheless


def test_a_file_that_an_interrupt_left_open_is_closed_before_its_finalizer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    left: Any = FileBytes(tmp_path / "file")
    left.itself, file = left, left._file
    del left
    gc.collect()
    assert file.closed  # otherwise Python warns when it finalizes the file, which swallows Ctrl-C
