"""States too large to copy are read in place, and a file never mixes two states."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz import Checkpointer, Grid, KeepPolicy
from ckptz.codec.method import Method
from ckptz.errors import ConfigError
from ckptz.training import files, live
from ckptz.training.checkpointer import SaveReport
from ckptz.training.snapshot import Snapshot

WIDTH = 96
WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of the model; moments have twice as many
EVENT_SECONDS = 60


def a_run() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.AdamW(model.parameters())


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()


def values(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"].values()
    tensors = [*model.state_dict().values(), *(value for state in states for value in state.values())]
    return [tensor.clone() for tensor in tensors]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(one.equal(other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("config", [None, Grid()], ids=["lossless", "lossy"])
@pytest.mark.parametrize("max_bytes", [0, WEIGHTS // 2, WEIGHTS, 2 * WEIGHTS, None])
def test_a_step_is_the_state_at_its_save_whatever_was_copied(
    tmp_path: Path, config: Method | None, max_bytes: int | None
) -> None:
    model, optimizer = a_run()
    options: dict[str, Any] = {} if config is None else {"config": config}
    options |= {"keep": KeepPolicy(last=None, exact=None), "max_staging_bytes": max_bytes}
    saved = {}
    with Checkpointer(tmp_path, model, optimizer, **options) as checkpointer:
        for step in (1, 2, 3):
            train(model, optimizer)
            saved[step] = values(model, optimizer)
            checkpointer.save(step)
            train(model, optimizer)  # at once: the writer would now read another state
        for step, expected in saved.items():
            checkpointer.restore(step)
            assert checkpointer.restored.is_exact
            assert equal(values(model, optimizer), expected)


def test_buffers_take_no_more_than_they_may() -> None:
    state = {"model": {"a": torch.ones(1000), "b": torch.ones(10)}, "rest": [torch.ones(500), torch.ones(())]}
    snapshot = Snapshot(5000)
    taken = snapshot.take(state)
    assert sum(one.nbytes for one in snapshot._buffers.values()) <= 5000
    assert sum(one.nbytes for one in snapshot.hold.tensors.values()) == 2000  # weights are written first
    assert not snapshot.hold.has_weights
    assert taken["model"]["a"].equal(state["model"]["a"])
    assert Snapshot(2000).take(state)["model"]["b"].equal(torch.ones(10))


def test_training_goes_on_when_all_is_read_and_the_report_says_what_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = a_run()
    train(model, optimizer)
    goes_on, seen, reports = threading.Event(), list[bool](), list[SaveReport]()
    write_weights = files.StepWriter._write_weights

    def slowly(*arguments: Any) -> Any:
        seen.append(goes_on.wait(EVENT_SECONDS))
        return write_weights(*arguments)

    monkeypatch.setattr(files.StepWriter, "_write_weights", slowly)
    options: dict[str, Any] = {"max_staging_bytes": WEIGHTS, "on_save": reports.append}
    with Checkpointer(tmp_path, model, optimizer, **options) as checkpointer:
        checkpointer.save(1)  # before the copied weights are written
        checkpointer.wait_for_staging()
        goes_on.set()
    assert seen == [True]
    assert any("max_staging_bytes" in note for note in reports[0].notes)
    assert reports[0].stall_seconds < EVENT_SECONDS


def test_an_interrupt_while_the_state_is_read_loses_that_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = a_run()
    train(model, optimizer)
    goes_on, write = threading.Event(), files.StepWriter.write

    def slowly(*arguments: Any, **options: Any) -> Any:
        goes_on.wait(EVENT_SECONDS)
        return write(*arguments, **options)

    class Interrupted(live.Task[None]):
        def wait(self, seconds: float = 0) -> bool:
            raise KeyboardInterrupt

    with Checkpointer(tmp_path, model, optimizer, max_staging_bytes=0) as checkpointer:
        checkpointer.save(1)
        expected = values(model, optimizer)
        train(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(files.StepWriter, "write", slowly)
            patch.setattr(live, "Task", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(2)
            goes_on.set()
            with pytest.raises(ConfigError, match=r"step 2 was not saved.*raise max_staging_bytes"):
                checkpointer.wait()
        assert checkpointer.steps() == (1,)
        checkpointer.save(2)
        checkpointer.restore(1)
        assert equal(values(model, optimizer), expected)
