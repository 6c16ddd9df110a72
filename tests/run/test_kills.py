"""Jobs killed repeatedly at random times, each of which continues where the previous one was killed.

Every step that was reported as saved exists and is exact. Kills of other interfaces: test_front_doors.py.
"""

import contextlib
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptz.integrations.dcp import CkptzStorageReader, CkptzStorageWriter, latest
from ckptz.integrations.linked import ChainOptions
from tests.support.checkpointer_support import in_child
from tests.support.kills import PATIENCE, Reported, kill_again_and_again

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that share memory")

KILLS = pytest.mark.parametrize("n_kills", [4, pytest.param(100, marks=pytest.mark.slow)])
OPTIONS = ChainOptions(full_every=3, jobs=1)


# --- folders of torch.distributed.checkpoint on two ranks -------------------------------------------------


def resumed(run: Path, group: Any = None) -> dict[str, Any]:
    state = {"weight": torch.zeros(30, 30), "step": 0}
    if (newest := latest(run)) is not None:
        dcp.load(state, checkpoint_id=newest, storage_reader=CkptzStorageReader(jobs=1), process_group=group)
    return state


def ranks_job(folder: Path, background: bool, reported: Reported, rank: int) -> None:
    store = dist.FileStore(str(folder / f"store-{reported.n_begun}"), 2)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
    group = dist.new_group(backend="gloo", timeout=patience)
    writer = CkptzStorageWriter(options=OPTIONS, keep_last=1, group=group)
    state = resumed(folder / "run", group)
    step = state["step"]
    dist.barrier()
    if rank == 0:
        reported.begin()
    saving = None
    while True:
        state = {"weight": torch.full((30, 30), step + 1.0), "step": step + 1}
        options: Any = {"checkpoint_id": folder / "run" / f"step-{step + 1}", "storage_writer": writer}
        if saving is not None:
            saving.result()
        if background:
            saving = dcp.async_save(state, process_group=group, **options)
        else:
            dcp.save(state, process_group=group, **options)
        if rank == 0 and step > reported.step - (not background):
            reported.step = step if background else step + 1  # the previous save is complete, or this one
        step += 1


@pytest.mark.apps
@KILLS
@pytest.mark.parametrize("background", [False, True])
def test_steps_of_two_ranks_that_were_saved_are_there(tmp_path: Path, background: bool, n_kills: int) -> None:
    def job(reported: Reported, rank: int) -> None:
        ranks_job(tmp_path, background, reported, rank)

    def check(step: int) -> None:
        state = resumed(tmp_path / "run")
        assert state["step"] >= step
        assert (state["weight"] == state["step"]).all()

    kill_again_and_again(job, check, n_kills, longest=0.3, n_ranks=2)


# --- folders of the Trainer --------------------------------------------------------------------------


N_STEPS = 600


def trainer_job(folder: Path, reported: Reported, rank: int) -> None:
    del rank
    from tests.support.trainer_support import checkpoints, transformers

    class Report(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            reported.begin()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            reported.step = state.global_step

    run = logged_trainer(folder, save_total_limit=1)
    run.add_callback(Report())
    run.train(resume_from_checkpoint=bool(checkpoints(folder)) or None)


def logged_trainer(folder: Path, **settings: Any) -> Any:
    from tests.support.trainer_support import trainer

    logged = {"logging_strategy": "steps", "logging_steps": 1}
    return trainer(folder, max_steps=N_STEPS, **logged, **settings)


def losses_in(folder: Path) -> list[float]:
    """Return the losses up to the newest complete checkpoint; the Trainer writes its own state last."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.partition("-")[2])):
        with contextlib.suppress(FileNotFoundError, ValueError):
            state = json.loads((path / "trainer_state.json").read_bytes())
            return [row["loss"] for row in state["log_history"]]
    return []


def write_losses(path: Path) -> None:
    """Write the losses of an uninterrupted run to a file."""
    torch.set_num_threads(1)  # as the jobs do
    run = logged_trainer(path.parent, save_strategy="no")
    run.train()
    path.write_text(json.dumps([row["loss"] for row in run.state.log_history if "loss" in row]))


@pytest.mark.apps
@KILLS
def test_a_killed_trainer_resumes_with_the_same_losses(tmp_path: Path, n_kills: int) -> None:
    pytest.importorskip("tests.support.trainer_support")  # once, for all processes
    # In a child process: a process that has trained cannot be forked to train again.
    assert in_child(lambda: write_losses(tmp_path / "losses.json")) == 0
    expected = json.loads((tmp_path / "losses.json").read_text())

    def check(reported: int) -> None:
        losses = losses_in(tmp_path / "run")
        assert len(losses) >= reported
        assert losses == expected[: len(losses)]

    def job(reported: Reported, rank: int) -> None:
        trainer_job(tmp_path / "run", reported, rank)

    kill_again_and_again(job, check, n_kills, longest=0.5)
