"""Signals and threads during waits for saves: every lost step is reported, and none has wrong values."""

import contextlib
import dis
import functools
import gc
import itertools
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz import Checkpointer, parallel
from ckptz.errors import ConfigError
from ckptz.run import folder as run_folder
from ckptz.store import lock
from ckptz.training import background, checkpointer
from ckptz.training.background import Background
from ckptz.training.checkpointer import SaveReport
from tests.support.checkpointer_support import in_child
from tests.support.spec_support import ROOT

WHERE = ("save", "wait", "close", "restore")
QUICK = {("ctrl-c", "save"), ("saves", "wait")}  # each is a process; tests below cover all points


def steps_of(folder: Path) -> tuple[int, ...]:
    """Return the steps of a folder, and require that each restores the values that were saved."""
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
        pytest.param(kind, where, marks=[] if (kind, where) in QUICK else pytest.mark.apps)
        for kind in ("ctrl-c", "caught", "saves", "flag")
        for where in WHERE
    ]


@pytest.mark.parametrize(("kind", "where"), rows())
def test_a_signal_at_each_place_where_training_waits_loses_no_step(
    kind: str, where: str, tmp_path: Path
) -> None:
    process = interrupted(tmp_path, where, kind, *(("-O",) if where == "wait" else ()))
    steps = steps_of(tmp_path)
    assert 1 in steps, process.stderr
    for step in map(int, process.stdout.replace("saved", "").split()):
        assert step in steps, "it was reported, and is not there"
    if kind == "ctrl-c":
        assert "KeyboardInterrupt" in process.stderr
        assert 2 not in steps  # the save that was interrupted had not begun
    elif kind == "saves":
        assert process.returncode == 1
        assert "let the handler set a flag" in process.stderr
        assert 99 not in steps
    elif where != "close":
        assert 3 in steps, process.stderr


@pytest.mark.apps
@pytest.mark.parametrize("kind", ["ctrl-c", "flag"])
def test_a_signal_at_the_end_of_the_program(kind: str, tmp_path: Path) -> None:
    process = interrupted(tmp_path, "exit", kind)
    if kind == "flag":
        assert steps_of(tmp_path) == (1,)
    else:  # the abandoned save is reported
        assert "step 1 was lost: interrupted" in process.stderr
        assert steps_of(tmp_path) == ()


# --- the thread and its job --------------------------------------------------------------------------


class _Job:
    """Job that blocks until it is released."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.go.wait(60)
        return "done"


@pytest.fixture
def job() -> Any:
    running = _Job()
    yield running
    running.go.set()


@pytest.mark.parametrize("at", range(3))
def test_an_interrupted_wait_leaves_the_job_to_be_waited_for(
    at: int, job: _Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, n_pauses, real = Background[str](), [0], parallel.pause

    def pause(lock: Any) -> None:
        n_pauses[0] += 1
        if n_pauses[0] == at + 1:
            raise KeyboardInterrupt
        if n_pauses[0] == at + 3:
            job.go.set()
        real(lock)

    writer.start("step 1", job)
    monkeypatch.setattr(parallel, "PATIENCE", 0.01)
    monkeypatch.setattr(parallel, "pause", pause)
    with pytest.raises(KeyboardInterrupt):
        writer.wait()
    with pytest.raises(RuntimeError, match="step 1 was not waited for"):
        writer.start("step 2", job)
    writer.wait()
    assert (writer.result, writer.error) == ("done", None)
    assert n_pauses[0] >= at + 3


def test_a_thread_that_was_interrupted_before_it_ran_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, ran = Background[None](), list[int]()

    def start(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            writer.start("step 1", lambda: ran.append(1))
    assert writer.is_idle
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
    writer.wait()
    assert (writer.result, writer.error) == ("done", None)


def test_what_is_not_waited_for_is_said(job: _Job, capfd: pytest.CaptureFixture[str]) -> None:
    writer = Background[str]()
    writer.start("step 7", job)
    writer.report_loss()
    assert "step 7 was lost: interrupted while it was written" in capfd.readouterr().err
    job.go.set()
    writer.wait()


def test_a_loss_that_nobody_can_ask_for_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("no room")

    writer = Background[None]()
    writer.start("step 7", fail)
    while not writer._running.is_done:
        parallel.pause(writer._running._lock)
    del writer
    gc.collect()
    assert "step 7 was lost: no room" in capfd.readouterr().err


def test_a_loss_is_not_printed_among_data_if_standard_error_is_closed(
    job: _Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, failed = Background[str](), Background[str]()
    writer.start("step 7", job)
    failed.error = OSError("no room")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        writer.report_loss()
        failed.report_loss()
    assert capfd.readouterr().out == ""
    failed.error = None
    job.go.set()
    writer.wait()


def test_a_thread_that_has_the_number_of_the_ended_writer_may_call(job: _Job) -> None:
    writer = Background[str]()
    writer.start("step 1", job)
    running = writer._running
    job.go.set()
    running.wait()
    running.thread = threading.get_ident()  # the system reuses thread ids
    writer.take_turn("wait()", writer.wait)


def test_a_forked_process_waits_for_no_job_of_its_parent(job: _Job) -> None:
    writer = Background[str]()
    writer.start("step 1", job)
    assert in_child(writer.wait) == 0
    job.go.set()
    writer.wait()
    assert writer.result == "done"


def test_a_job_at_the_end_of_the_interpreter_is_done_at_once(
    job: _Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, ended = Background[str](), threading.Thread(target=int)
    job.go.set()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    writer.start("step 1", job)
    monkeypatch.undo()
    writer.wait()
    assert writer.result == "done"


# --- calls within other calls --------------------------------------------------------------------------


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
    real = parallel.pause

    def handled(lock: Any) -> None:
        for name, call in calls_of(checkpointer).items():
            with pytest.raises(ConfigError, match="in the midst of") as caught:
                call()
            refused.append(f"{name} {caught.value}")
        real(lock)

    checkpointer.save(1)
    job = _Job()
    checkpointer.wait()
    checkpointer._writer.start("a job", job)
    monkeypatch.setattr(parallel, "pause", lambda lock: (handled(lock), job.go.set()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "_last", None)
        result = list[BaseException]()
        try:
            calls_of(checkpointer)[outer]()
        except AttributeError as error:  # the job does not return a report
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

        def save_and_wait() -> None:
            checkpointer.save(1)
            checkpointer.wait()

        with pytest.warns(RuntimeWarning, match="on the writer's thread"):  # before `wait`, or within
            save_and_wait()
    assert checkpointer.steps() == (1,)


# --- a signal at every point where Python runs handlers ---------------------------------------------------

CHECKED = ("CALL", "RESUME", "JUMP_BACKWARD")  # Python checks for signals after these bytecodes
TRACED = tuple(module.__file__ for module in (parallel, background, checkpointer, lock, run_folder))


@functools.cache
def points_of(code: types.CodeType) -> frozenset[int]:
    names = [(one.offset, one.opname) for one in dis.get_instructions(code)]
    return frozenset(
        offset for (_, before), (offset, _) in itertools.pairwise(names) if before.startswith(CHECKED)
    )


@contextlib.contextmanager
def signal_at(point: int, number: int, call: Callable[[], int]) -> Iterator[list[str]]:
    """Raise a signal at the n-th point of this thread's code in training and stores; yield its location.

    Each bytecode counts once per call of the program; `call` returns the number of the current call.
    """
    reached, where = set[object](), list[str]()

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename not in TRACED or code.co_name == "__del__":  # __del__ swallows exceptions
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in points_of(code):
            reached.add((code, frame.f_lasti, call()))
            if len(reached) > point:
                where.append(f"call {call()}, {code.co_qualname}, line {frame.f_lineno}")
                sys.settrace(None)
                signal.raise_signal(number)
                return None
        return trace

    sys.settrace(trace)
    try:
        yield where
    finally:
        sys.settrace(None)


class Run:
    """Program that saves three steps and restores, repeating each call that an interrupt ends."""

    def __init__(self, folder: Path, fails: bool) -> None:
        self.model, self.said, self.fails = torch.nn.Linear(2, 2), list[str](), fails
        self.saved, self.ended = list[int](), list[BaseException]()
        self.at_stop = self.n_calls = 0
        self.checkpointer = Checkpointer(folder, self.model, jobs=1, on_save=self.on_save)
        self.publishing = self.checkpointer._store.publishing
        self.checkpointer._store.publishing = self.publishing_or_fail

    def on_save(self, report: SaveReport) -> None:
        self.saved.append(report.step)

    def publishing_or_fail(self, step: int, notes: list[str]) -> Any:
        if step == 2 and self.fails:
            raise OSError(28, "No space left on device")
        return self.publishing(step, notes)

    def handle(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:  # as preempted jobs do
            self.at_stop = int(self.model.weight[0, 0])
            self.checkpointer.save(99)
            self.checkpointer.wait()
            self.said.append("99 was saved")
            sys.exit(0)

    def save(self, step: int) -> None:
        torch.nn.init.constant_(self.model.weight, step)
        self.again(lambda: self.checkpointer.save(step))

    def again(self, call: Callable[[], object]) -> None:
        self.n_calls += 1
        for _ in range(2):
            try:
                call()
            except KeyboardInterrupt as error:
                self.said.append(repr(error))
            except OSError as error:  # a lost save; the call that reports it has had no effect
                self.said.append(str(error))
            else:
                return
        call()

    def run(self) -> None:
        self.save(1)
        self.save(2)
        self.again(self.checkpointer.wait)
        self.again(self.checkpointer.restore_latest)
        self.save(3)
        self.again(lambda: self.checkpointer.__exit__(None, None, None))


def after(
    folder: Path, point: int, number: int, fails: bool, capfd: pytest.CaptureFixture[str]
) -> str | None:
    """Run with a signal at a point and check the steps; return its location or None beyond the last."""
    run = Run(folder, fails)
    old = signal.signal(number, run.handle)
    try:
        with signal_at(point, number, lambda: run.n_calls) as where:
            try:
                run.run()
            except (SystemExit, ConfigError) as error:
                run.ended.append(error)
    finally:
        signal.signal(number, old)
    assert not run.ended or (where and number == signal.SIGTERM), run.ended
    run.again(run.checkpointer.close)
    output = "\n".join([*run.said, *map(str, run.ended), capfd.readouterr().err])
    model = torch.nn.Linear(2, 2)
    with Checkpointer(folder, model) as checkpointer:
        for step in checkpointer.steps():
            checkpointer.restore(step)
            assert (model.weight == (run.at_stop if step == 99 else step)).all(), (where, step)
        steps = {*checkpointer.steps()}
    assert steps >= {*run.saved}, (where, output)
    expected = {99} if "99 was saved" in output else set() if number == signal.SIGTERM else {1, 2, 3}
    assert all(step in steps or f"step {step} was not saved" in output for step in expected), (where, output)
    return where[0] if where else None


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_at_every_point_loses_no_step(
    number: int, fails: bool, every: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for point in itertools.count(0, every):
        if after(tmp_path / str(point), point, number, fails, capfd) is None:
            break
    assert point > 300
