"""Pruning runs whose steps are folders: the step of a folder is that of its own files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptz
from ckptz import KeepPolicy
from ckptz.errors import ConfigError
from ckptz.integrations.linked import Chain, ChainOptions, job_of, read_newest
from ckptz.run.prune import prune_run
from ckptz.run.step_files import COMPLETE
from ckptz.torch import load_state
from tests.support.cli_support import ckptz as command

SIZE = 4096


def weights(step: int) -> torch.Tensor:
    """Weights that move a little at each step, so that deltas pay."""
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    return torch.where(torch.arange(SIZE) % 97 == step % 97, start + step, start)


class FolderRun:
    """Folders as an adapter writes them: deltas, linked bases, plain files, and one that is written last."""

    def __init__(self, run: Path, last: str | None, options: ChainOptions | None = None) -> None:
        self.run, self.last = run, last
        self.chain = Chain(options or ChainOptions(jobs=1, full_every=8))

    def save(self, step: int, stop_after: int = 9) -> Path:
        """Save a step; with `stop_after`, be killed behind so many of its four files."""
        folder = self.run / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if stop_after > 0:
            self.chain.write(folder / "model.ckptz", job_of({"w": weights(step)}, step))
        if stop_after > 1:
            (folder / "optimizer.bin").write_bytes(b"x" * 64)
        if stop_after > 2:
            (folder / "random_states_0.pkl").write_bytes(b"x" * 64)
        if stop_after > 3 and self.last is not None:
            text = json.dumps({"global_step": step}) if self.last == "trainer_state.json" else "{}"
            (folder / self.last).write_text(text)
        self.chain.settle()
        return folder

    def resume(self, step: int) -> None:
        path = self.run / f"checkpoint-{step}" / "model.ckptz"
        assert torch.equal(read_newest(path)["w"], weights(step))
        self.chain = Chain(self.chain.options)
        self.chain.go_on_from(path)


def steps_in(run: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in run.glob("checkpoint-*")}


LAST = ("trainer_state.json", "ckptz-index.json", COMPLETE)


@pytest.mark.parametrize("last", [*LAST, None])
def test_a_folder_with_linked_bases_has_its_own_step(tmp_path: Path, last: str | None) -> None:
    run = FolderRun(tmp_path, last)
    for step in (10, 20, 30, 45):
        folder = run.save(step)
    assert any(path.name.startswith("base-") for path in folder.iterdir())
    assert ckptz.prune(tmp_path, after=30, dry_run=True).removed == ("checkpoint-45",)
    assert ckptz.prune(tmp_path, KeepPolicy(last=1, every=20)).steps == (20, 45)
    assert steps_in(tmp_path) == {20, 45}
    for step in (20, 45):
        assert torch.equal(load_state(tmp_path / f"checkpoint-{step}" / "model.ckptz")["w"], weights(step))


def test_a_file_with_the_very_values_of_its_base_keeps_the_base(tmp_path: Path) -> None:
    chain = Chain(ChainOptions(jobs=1))
    for name in ("epoch=0-step=10.ckpt", "last.ckpt"):
        chain.write(tmp_path / name, job_of({"w": weights(10)}, 10))
    assert not prune_run(tmp_path, KeepPolicy(last=1), after=None, dry_run=False).removed
    assert torch.equal(load_state(tmp_path / "last.ckpt")["w"], weights(10))


def test_the_newest_step_of_a_run_that_resumed_from_an_earlier_one_stays(tmp_path: Path) -> None:
    run = FolderRun(tmp_path, "trainer_state.json")
    for step in (10, 20, 30):
        run.save(step)
    run.resume(10)
    run.save(40)
    assert command("prune", tmp_path, "--keep-last", 1).exit_code == 0
    assert steps_in(tmp_path) == {40}
    assert torch.equal(load_state(tmp_path / "checkpoint-40" / "model.ckptz")["w"], weights(40))


@pytest.mark.parametrize("how", ["folder", "trainer state"])
def test_nothing_goes_where_names_and_files_disagree_about_the_step(how: str, tmp_path: Path) -> None:
    run = FolderRun(tmp_path, "trainer_state.json")
    for step in (10, 20, 30):
        run.save(step)
    if how == "folder":
        (tmp_path / "checkpoint-20").rename(tmp_path / "checkpoint-200")
        said = "checkpoint-200: its step is not certain, as its name says 200"
    else:
        (tmp_path / "checkpoint-20" / "trainer_state.json").write_text('{"global_step": 21}')
        said = "checkpoint-20: its step is not certain, as its name says 20, trainer_state.json says 21"
    before = sorted(tmp_path.rglob("*"))
    done = command("prune", tmp_path, "--keep-last", 1, fails=True)
    assert done.exit_code == 2
    assert said in done.error
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ConfigError, match="its step is not certain"):
        ckptz.prune(tmp_path, after=10)


@pytest.mark.parametrize("last", [*LAST, None])
@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
def test_an_unfinished_folder_is_no_step(tmp_path: Path, last: str | None, stop_after: int) -> None:
    if last is None and stop_after == 3:
        return  # nothing tells it from a whole one
    run = FolderRun(tmp_path, last)
    for step in (10, 20):
        run.save(step)
    folder = run.save(30, stop_after)
    if stop_after == 0:  # as after the links of a save
        base = tmp_path / "checkpoint-10" / "model.ckptz"
        (folder / "base-0123456789abcdef.ckptz").hardlink_to(base)
    report = ckptz.prune(tmp_path, KeepPolicy(last=1))
    assert steps_in(tmp_path) >= {20, 30}
    assert 20 in report.steps
    assert 30 not in report.steps
    assert any("checkpoint-30" in note for note in report.notes)
    assert torch.equal(load_state(tmp_path / "checkpoint-20" / "model.ckptz")["w"], weights(20))


def test_a_step_without_its_optimizer_is_not_the_newest_to_resume_from(tmp_path: Path) -> None:
    run = FolderRun(tmp_path, "trainer_state.json")
    for step in (10, 20, 30):
        folder = run.save(step)
    for name in ("optimizer.bin", "random_states_0.pkl"):
        (folder / name).unlink()  # by a rule for weights
    report = ckptz.prune(tmp_path, KeepPolicy(last=1))
    assert (report.steps, report.weights_only) == ((20,), (30,))
    assert steps_in(tmp_path) == {20, 30}


def test_a_trainer_state_that_ends_early_is_of_an_unfinished_step(tmp_path: Path) -> None:
    run = FolderRun(tmp_path, "trainer_state.json")
    for step in (10, 20):
        folder = run.save(step)
    (folder / "trainer_state.json").write_text('{"global_step": 20, "log_his')
    assert ckptz.prune(tmp_path, KeepPolicy(last=1)).steps == (10,)
