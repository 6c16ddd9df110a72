"""Signals and threads while a save is waited for: no step is lost without a word, and none is wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz import Checkpointer
from ckptz.errors import ConfigError
from ckptz.training import background
from ckptz.training.background import Background
from tests.support.spec_support import ROOT

WHERE = ("save", "wait", "close", "restore")
ONE_OF_EACH = {("ctrl-c", "save"), ("caught", "wait"), ("saves", "wait"), ("flag", "save")}


def steps_of(folder: Path) -> tuple[int, ...]:
    """The steps that are there; each holds the values that were given."""
    model = torch.nn.Linear(300, 300)
    with Checkpointer(folder, model) as checkpointer:
        for step in checkpointer.steps():
            checkpointer.restore(step)
            assert (model.weight == step).all(), f"step {step} holds other values"
        return checkpointer.steps()


def interrupted(folder: Path, where: str, kind: str, *flags: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, *flags, "-m", "tests.support.interrupted_program", str(folder), where, kind]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def rows() -> list[Any]:
    return [
        pytest.param(kind, where, marks=[] if (kind, where) in ONE_OF_EACH else pytest.mark.apps)
        for kind in ("ctrl-c", "caught", "saves", "flag")
        for where in WHERE
    ]


@pytest.mark.parametrize(("kind", "where"), rows())
def test_a_signal_at_each_place_where_training_waits_loses_no_step(
    kind: str, where: str, tmp_path: Path
) -> None:
    done = interrupted(tmp_path, where, kind, *(("-O",) if where == "wait" else ()))
    found = steps_of(tmp_path)
    assert 1 in found, done.stderr
    for step in map(int, done.stdout.replace("saved", "").split()):
        assert step in found, "it was reported, and is not there"
    if kind == "ctrl-c":
        assert "KeyboardInterrupt" in done.stderr
        assert 2 not in found  # the save that was interrupted had not begun
    elif kind == "saves":
        assert done.returncode == 1
        assert "let the handler set a flag" in done.stderr
        assert 99 not in found
    elif where != "close":
        assert 3 in found, done.stderr


@pytest.mark.apps
@pytest.mark.parametrize("kind", ["ctrl-c", "flag"])
def test_a_signal_at_the_end_of_the_program(kind: str, tmp_path: Path) -> None:
    done = interrupted(tmp_path, "exit", kind)
    if kind == "flag":
        assert steps_of(tmp_path) == (1,)
    else:  # what is given up is said
        assert "step 1 was lost: interrupted" in done.stderr
        assert steps_of(tmp_path) == ()


def test_a_step_is_written_although_a_daemon_thread_saves_it(tmp_path: Path) -> None:
    code = (
        "import sys, threading, torch, ckptz\n"
        "checkpointer = ckptz.Checkpointer(sys.argv[1], torch.nn.Linear(900, 900))\n"
        "thread = threading.Thread(target=checkpointer.save, args=(1,), daemon=True)\n"
        "thread.start(); thread.join()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert Checkpointer(tmp_path, torch.nn.Linear(900, 900)).restore_latest() == 1


# --- the thread and its job --------------------------------------------------------------------------


class _Job:
    """A job that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.go.wait(60)
        return "done"


@pytest.fixture
def job() -> Any:
    made = _Job()
    yield made
    made.go.set()


@pytest.mark.parametrize("at", range(3))
def test_an_interrupted_wait_leaves_the_job_to_be_waited_for(
    at: int, job: _Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, n_pauses, real = Background[str](), [0], background.pause

    def pause(lock: Any) -> None:
        n_pauses[0] += 1
        if n_pauses[0] == at + 1:
            raise KeyboardInterrupt
        if n_pauses[0] == at + 3:
            job.go.set()
        real(lock)

    monkeypatch.setattr(background, "PATIENCE", 0.01)
    monkeypatch.setattr(background, "pause", pause)
    writer.start("step 1", job)
    with pytest.raises(KeyboardInterrupt):
        writer.wait()
    with pytest.raises(RuntimeError, match="step 1 was not waited for"):
        writer.start("step 2", job)
    assert writer.wait() == ("done", None)
    assert n_pauses[0] >= at + 3


def test_a_thread_that_was_interrupted_before_it_ran_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, ran = Background[None](), list[int]()

    def start(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            writer.start("step 1", lambda: ran.append(1))
    assert writer.wait() == (None, None)
    writer.start("step 2", lambda: ran.append(2))
    writer.wait()
    assert ran == [2]


def test_a_start_that_is_interrupted_when_the_thread_runs_is_waited_for(
    job: _Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, real = Background[str](), threading.Thread.start

    def start(self: threading.Thread) -> None:
        real(self)
        job.began.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            writer.start("step 1", job)
    job.go.set()
    assert writer.wait() == ("done", None)


def test_what_is_not_waited_for_is_said(job: _Job, capfd: pytest.CaptureFixture[str]) -> None:
    writer = Background[str]()
    writer.start("step 7", job)
    writer.report_loss()
    assert "step 7 was lost: interrupted while it was written" in capfd.readouterr().err
    job.go.set()
    writer.wait()


# --- calls in the midst of others ----------------------------------------------------------------------


def calls_of(checkpointer: Checkpointer) -> dict[str, Any]:
    return {
        "save(5)": lambda: checkpointer.save(5),
        "wait()": checkpointer.wait,
        "restore(1)": lambda: checkpointer.restore(1),
        "restore_latest()": checkpointer.restore_latest,
        "discard_after(1)": lambda: checkpointer.discard_after(1),
        "close()": checkpointer.close,
    }


@pytest.mark.parametrize("outer", ["save(5)", "wait()", "restore(1)", "discard_after(1)", "close()"])
def test_a_handler_may_call_nothing_in_the_midst_of_a_call(
    outer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, refused = Checkpointer(tmp_path, torch.nn.Linear(2, 2)), list[str]()
    real = background.pause

    def handled(lock: Any) -> None:
        for name, call in calls_of(checkpointer).items():
            with pytest.raises(ConfigError, match="in the midst of") as caught:
                call()
            refused.append(f"{name} {caught.value}")
        real(lock)

    checkpointer.save(1)
    job = _Job()
    checkpointer.wait()
    checkpointer._writer.start("a job", job)  # type: ignore[arg-type]
    monkeypatch.setattr(background, "pause", lambda lock: (handled(lock), job.go.set()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "_last", None)
        result = list[BaseException]()
        try:
            calls_of(checkpointer)[outer]()
        except AttributeError as error:  # the job's result is no report
            result.append(error)
    assert len(refused) >= len(calls_of(checkpointer))
    assert all(outer in words for words in refused)


def test_threads_take_turns(tmp_path: Path) -> None:
    model = torch.nn.Linear(50, 50)
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
        errors = list[BaseException]()

        def restore() -> None:
            try:
                for _ in range(5):
                    checkpointer.restore_latest()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=restore) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(2, 8):
            checkpointer.save(step)
        for thread in threads:
            thread.join()
        assert not errors


def test_on_save_may_not_wait_for_itself(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, torch.nn.Linear(2, 2)) as checkpointer:
        checkpointer._on_save = lambda report: checkpointer.wait()
        checkpointer.save(1)
        with pytest.warns(RuntimeWarning, match="on the writer's thread"):
            checkpointer.wait()
    assert checkpointer.steps() == (1,)
