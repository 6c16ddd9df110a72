"""Saves in the background of training: order, waits and failing saves."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz import Checkpointer
from ckptz.errors import WriteError
from ckptz.format import publish
from ckptz.run import folder as store_steps
from tests.support.checkpointer_support import Run, loss_after, names_in, same, saved_run


class Gate:
    """Gate that blocks writers until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        self.error: Exception | None = None
        real = store_steps.StepStore.publishing

        def write(store: Any, *args: Any, **kwargs: Any) -> Any:
            self.is_reached.set()
            self.is_open.wait(60)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return real(store, *args, **kwargs)

        monkeypatch.setattr(store_steps.StepStore, "publishing", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_training_goes_on_while_a_save_is_written_and_the_next_save_waits(tmp_path: Path, gate: Gate) -> None:
    run = Run()
    with run.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1)
        assert gate.is_reached.wait(60)
        run.losses(3)
        assert checkpointer.steps() == ()
        threading.Timer(0.2, gate.is_open.set).start()
        checkpointer.save(2)
        assert checkpointer.steps()[:1] == (1,)
        report = checkpointer.wait()
    assert report.step == 2
    assert report.stall_seconds >= report.waited_seconds > 0.1
    assert report.stored_bytes == sum(
        (tmp_path / name).stat().st_size for name in names_in(tmp_path) if name.startswith("step-00000002")
    )


@pytest.mark.parametrize("then", ["save", "wait", "restore_latest", "close"])
def test_an_error_in_the_background_surfaces_once_at_the_next_call(
    tmp_path: Path, gate: Gate, then: str
) -> None:
    gate.is_open.set()
    run = Run()
    checkpointer = run.checkpointer(tmp_path)
    run.step()
    checkpointer.save(1)
    checkpointer.wait()
    gate.error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    checkpointer.save(2)
    arguments = (3,) if then == "save" else ()
    with pytest.raises(
        WriteError, match=r"step 2 was not saved: .*quota.*earlier steps are intact"
    ) as caught:
        getattr(checkpointer, then)(*arguments)
    assert caught.value.errno == errno.EDQUOT
    checkpointer.save(2)
    checkpointer.close()
    assert loss_after(tmp_path)[0] == 2


def test_training_may_go_to_another_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Checkpointer("run", torch.nn.Linear(2, 2))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with run:
        run.save(1)
    assert run.steps() == (1,)
    assert not names_in(tmp_path / "elsewhere")


def test_a_folder_that_was_removed_is_said_to_be(tmp_path: Path, gate: Gate) -> None:
    gate.is_open.set()
    with Run().checkpointer(tmp_path) as checkpointer:
        gate.error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        checkpointer.save(1)
        with pytest.raises(
            WriteError, match=r"step 1 was not saved: .* the folder was removed during the save"
        ):
            checkpointer.wait()


def test_a_full_disk_leaves_the_steps_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = saved_run(tmp_path, 2)
    before = names_in(tmp_path)
    run = Run(seed=4)
    with run.checkpointer(tmp_path, background=False) as checkpointer:
        checkpointer.restore_latest()
        run.step()

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(publish.os, "fsync", full)
            with pytest.raises(WriteError, match="No space left") as caught:
                checkpointer.save(3)
        assert caught.value.errno == errno.ENOSPC
        assert names_in(tmp_path) == before
        checkpointer.save(3)
    assert loss_after(tmp_path, 1) == (1, losses[2])
    assert loss_after(tmp_path)[0] == 3


def test_what_ended_training_is_not_hidden_by_a_lost_save(tmp_path: Path, gate: Gate) -> None:
    gate.is_open.set()
    gate.error = OSError(errno.EIO, os.strerror(errno.EIO))
    run = Run()

    def train() -> None:
        with run.checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert "step 1 was not saved" in caught.value.__notes__[0]


PROGRAM = """
import sys, threading
import torch
from ckptz import Checkpointer
def opened(name, width=64):
    torch.manual_seed(0)
    return Checkpointer(f"{sys.argv[1]}/{name}", torch.nn.Linear(width, width), jobs=3)
lost, whole, daemon = opened("lost"), opened("whole", 900), opened("daemon", 900)
lost.save(1)
lost.wait()
lost._store.publishing = lambda *_: 1 / 0
thread = threading.Thread(target=daemon.save, args=(1,), daemon=True)
thread.start()
thread.join()
whole.save(1)
lost.save(2)
"""


def test_a_program_that_ends_waits_for_its_saves_and_says_what_was_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert f"ckptz: {tmp_path}/lost: step 2 was lost: division by zero" in process.stderr
    for name, width in (("lost", 64), ("whole", 900), ("daemon", 900)):
        torch.manual_seed(0)
        expected, restored = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        assert Checkpointer(tmp_path / name, restored).restore_latest() == 1
        assert same(dict(restored.state_dict()), dict(expected.state_dict())), name
