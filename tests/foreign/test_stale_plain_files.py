"""Folders of the Trainer mixin: plain files never replace restored state, unfinished steps are reported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptz as package
from ckptz.torch import load_file, save_file, save_state
from ckptz.training.state import random_state
from tests.support.cli_support import ckptz

STALE = {
    *("model.safetensors", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"),
    *("pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    *("adapter_model.safetensors", "rng_state_1.pth", "optimizer.bin"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a folder as the mixin does."""
    folder = tmp_path / "checkpoint-40"
    folder.mkdir()
    weight = torch.linspace(-1, 1, 600).view(20, 30)
    moments = {"step": torch.tensor(40.0), "exp_avg": weight / 3, "exp_avg_sq": weight**2}
    state: dict[str, Any] = {
        "optimizer": {"weight": moments},
        "groups": [{"lr": 0.1, "params": ["weight"]}],
        "scheduler": {"last_epoch": 40},
        "scaler": None,
    }
    save_file({"weight": weight}, folder / "model.ckptz")
    save_state(state, folder / "state.ckptz")
    save_state({"rng": random_state()}, folder / "rng-00000.ckptz")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 40}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_stale_plain_files_are_left_out_by_name(checkpoint: Path, tmp_path: Path) -> None:
    run = ckptz("restore", checkpoint, "-o", tmp_path / "before")
    assert not run.stderr
    for name in STALE:
        (checkpoint / name).write_bytes(b"of another step")
    run = ckptz("restore", checkpoint, "-o", tmp_path / "plain")
    assert contents(tmp_path / "plain") == contents(tmp_path / "before")
    assert torch.equal(
        load_file(tmp_path / "plain" / "model.safetensors")["weight"].view(-1)[0], -torch.ones(())
    )
    assert len(run.stderr.splitlines()) == 1
    assert all(name in run.stderr for name in STALE)


def test_a_restore_into_the_checkpoint_and_on_from_there_keeps_the_restored_state(
    checkpoint: Path, tmp_path: Path
) -> None:
    ckptz("restore", checkpoint, "-o", checkpoint)
    before = contents(checkpoint)
    newer = {"weight": torch.ones(20, 30)}
    save_file(newer, checkpoint / "model.ckptz")
    ckptz("restore", checkpoint, "-o", tmp_path / "plain")
    assert torch.equal(load_file(tmp_path / "plain" / "model.safetensors")["weight"], newer["weight"])
    assert (checkpoint / "model.safetensors").read_bytes() == before["model.safetensors"]


def test_checksums_are_claimed_of_tensors_and_copies_are_counted(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "optimizer.pt").write_bytes(b"of another step")
    run = ckptz("restore", checkpoint, "-o", tmp_path / "plain")
    assert "all checksums match, 2 other files copied, " in run.stdout
    assert package.restore(checkpoint, tmp_path / "more").n_copied == 2
    run = ckptz("restore", checkpoint / "model.ckptz", "-o", tmp_path / "one.safetensors")
    assert "copied" not in run.stdout


def test_state_that_the_output_folder_had_before_is_named(checkpoint: Path, tmp_path: Path) -> None:
    ckptz("restore", checkpoint, "-o", tmp_path / "plain")
    (tmp_path / "plain" / "pytorch_model.bin").write_bytes(b"of another step")
    run = ckptz("restore", checkpoint, "-o", tmp_path / "plain", "--force")
    assert "pytorch_model.bin" in run.stderr
    assert "are not of this checkpoint" in run.stderr
    assert "scheduler.pt" not in run.stderr


@pytest.mark.parametrize("state", [None, "", '{"global_step": 4'], ids=["missing", "empty", "cut off"])
def test_a_step_that_was_not_written_to_its_end_is_named(
    checkpoint: Path, state: str | None, tmp_path: Path
) -> None:
    newer = shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-60"))
    (newer / "trainer_state.json").unlink()
    if state is not None:
        (newer / "trainer_state.json").write_text(state)
    run = ckptz("restore", newer, "-o", tmp_path / "plain", fails=True)
    assert f"{newer}: has no complete trainer_state.json" in run.stderr
    assert "the save was cut off; restore another step" in run.stderr
    assert not (tmp_path / "plain").exists()
    weights = tmp_path / "weights.safetensors"
    run = ckptz("restore", newer / "model.ckptz", "-o", weights)
    assert f"{newer} has none of" in run.stderr
    assert "as of a save that was cut off" in run.stderr
    run = ckptz("restore", checkpoint / "model.ckptz", "-o", weights, "--force")
    assert not run.stderr


def test_weights_that_a_killed_save_left_alone_are_named(checkpoint: Path, tmp_path: Path) -> None:
    killed = checkpoint.with_name("checkpoint-60")
    killed.mkdir()
    save_file({"weight": torch.ones(3)}, killed / "model.ckptz")
    for path in (killed, f"{tmp_path}@60"):
        run = ckptz("restore", path, "-o", tmp_path / "weights.safetensors", "--force")
        assert f"{killed} has none of" in run.stderr
