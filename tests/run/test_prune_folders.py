"""Pruning runs whose steps are folders: the step of a folder is that of its own files only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptz
from ckptz import KeepPolicy
from ckptz.errors import ConfigError
from ckptz.integrations.linked import Chain, ChainOptions, job_of
from ckptz.run.prune import prune_run
from ckptz.torch import load_state
from tests.support.cli_support import ckptz as command
from tests.support.run_writers import weights_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write folders of three steps as the Trainer does."""
    chain = Chain(ChainOptions(jobs=1, full_every=8))
    for step in (10, 20, 30):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        chain.write(folder / "model.ckptz", job_of({"w": weights_of(step)}, step))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        chain.settle()
    return tmp_path


def test_a_file_with_the_very_values_of_its_base_keeps_the_base(tmp_path: Path) -> None:
    chain = Chain(ChainOptions(jobs=1))
    for name in ("epoch=0-step=10.ckpt", "last.ckpt"):
        chain.write(tmp_path / name, job_of({"w": weights_of(10)}, 10))
    assert not prune_run(tmp_path, KeepPolicy(last=1), last_step=None, dry_run=False).removed
    assert torch.equal(load_state(tmp_path / "last.ckpt")["w"], weights_of(10))


@pytest.mark.parametrize("how", ["folder", "trainer state"])
def test_nothing_goes_where_names_and_files_disagree_about_the_step(how: str, run: Path) -> None:
    if how == "folder":
        (run / "checkpoint-20").rename(run / "checkpoint-200")
        message = "checkpoint-200: its step is not certain, as its name says 200"
    else:
        (run / "checkpoint-20" / "trainer_state.json").write_text('{"global_step": 21}')
        message = "checkpoint-20: its step is not certain, as its name says 20, trainer_state.json says 21"
    before = sorted(run.rglob("*"))
    result = command("prune", run, "--keep-last", 1, fails=True)
    assert result.exit_code == 2
    assert message in result.error
    assert sorted(run.rglob("*")) == before
    with pytest.raises(ConfigError, match="its step is not certain"):
        ckptz.prune(run, after=10)


def test_a_trainer_state_that_ends_early_is_of_an_unfinished_step(run: Path) -> None:
    (run / "checkpoint-30" / "trainer_state.json").write_text('{"global_step": 30, "log_his')
    assert ckptz.prune(run, KeepPolicy(last=1)).steps == (10, 20)  # all steps stay until it can be read


def test_a_prune_finishes_one_that_was_killed_while_it_deleted_a_folder(run: Path) -> None:
    """The step was then saved again, so that the name for the next deletion is taken by the hidden folder."""
    cut_off = run / ".checkpoint-10.ckptz-deleted"
    cut_off.mkdir()
    (cut_off / "model.ckptz").write_bytes(b"")
    assert command("prune", run, "--keep-last", 1, "--dry-run").exit_code == 0
    assert cut_off.exists()
    assert command("prune", run, "--keep-last", 1).exit_code == 0
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-30"]
