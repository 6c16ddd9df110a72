"""Momentum correction by the adapters of frameworks, which is that of the Checkpointer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptz import Grid, compress, inspect, safe_open
from ckptz.guidance.momentum import USUAL_SHARE
from ckptz.integrations.linked import ChainOptions
from ckptz.torch import load_state

pytestmark = pytest.mark.apps
UNKNOWN, UNKNOWN_DECAY = "moved by the usual share", "would move it is not known"
LOSSY = ChainOptions(config=Grid(), exact=0, jobs=1)


def moves_in(path: Path) -> dict[str, float | None]:
    """Return the share of the momentum correction that was applied to each lossy weight, None without one."""
    return {
        tensor.name: tensor.lossy.settings.get("moved")
        for tensor in inspect(path).tensors
        if tensor.lossy is not None and tensor.lossy.role == "weight"
    }


class Loop:
    """Network and optimizer with random gradients; `state` has the form of Lightning's checkpoints."""

    def __init__(self, rate: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, weight_decay=0)
        self._generator = torch.Generator().manual_seed(1)
        self.step = 0

    def train(self, n: int = 15) -> None:
        for _ in range(n):
            for parameter in self.model.parameters():
                signs = torch.randint(2, parameter.shape, generator=self._generator) * 2 - 1
                parameter.grad = signs * 0.01
            self.optimizer.step()
        self.step += n

    def state(self) -> dict[str, Any]:
        state = {"state_dict": self.model.state_dict(), "optimizer_states": [self.optimizer.state_dict()]}
        return copy.deepcopy(state) | {"global_step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["state_dict"])
        self.optimizer.load_state_dict(state["optimizer_states"][0])


def check_moved(path: Path, exact: dict[str, Any]) -> None:
    """Require that weights were moved by the updates that the file's error of the momentum would cause."""
    shares, stored = moves_in(path), load_state(path)
    assert len(shares) == 4
    assert all(share is not None and 0.8 < share <= 1 for share in shares.values())
    original, restored = (state["optimizer_states"][0]["state"][0] for state in (exact, stored))
    move = stored["state_dict"]["0.weight"] - exact["state_dict"]["0.weight"]
    lost = (restored["exp_avg"] - original["exp_avg"]) / original["exp_avg_sq"].sqrt()
    along = float((move * lost).sum() / (lost * lost).sum())
    # Learning rate times the number of updates that a first moment lasts; rounding adds noise.
    corrections = (1 - 0.999 ** exact["global_step"]) ** 0.5
    assert along == pytest.approx(1e-3 * 9 * corrections, rel=0.2)


# --- Lightning ------------------------------------------------------------------------------------


def plugin(**options: Any) -> Any:
    pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    from ckptz.integrations.lightning import CkptzIO

    return CkptzIO(config=Grid(), jobs=1, **options)


def test_lightning_moves_weights_by_the_usual_share_until_it_is_measured(tmp_path: Path) -> None:
    loop, io = Loop(), plugin(exact=0)
    for i in range(3):
        loop.train()
        state = loop.state()
        io.save_checkpoint(state, tmp_path / f"{i}.ckpt")
        assert bool([note for note in io.notes if UNKNOWN in note]) == (i == 0)
        if i:
            check_moved(tmp_path / f"{i}.ckpt", state)
    assert set(moves_in(tmp_path / "0.ckpt").values()) == {USUAL_SHARE}


def test_lightning_continues_from_the_restored_state(tmp_path: Path) -> None:
    loop, io = Loop(), plugin(exact=0)
    for i in range(2):
        loop.train()
        io.save_checkpoint(loop.state(), tmp_path / f"{i}.ckpt")
    resumed, io = Loop(), plugin(exact=0)
    resumed.load(io.load_checkpoint(tmp_path / "1.ckpt"))
    resumed.step = loop.step
    io.save_checkpoint(resumed.state(), tmp_path / "same.ckpt")
    assert set(moves_in(tmp_path / "same.ckpt").values()) == {None}, "what is lost was lost before"
    resumed.load(io.load_checkpoint(tmp_path / "1.ckpt"))
    resumed.train()
    io.save_checkpoint(resumed.state(), tmp_path / "2.ckpt")
    shares = moves_in(tmp_path / "2.ckpt")
    assert all(share is not None and share > 0.6 for share in shares.values())


@pytest.mark.parametrize("lacking", ["lr", "betas", "optimizer", "zero"])
def test_lightning_leaves_weights_where_nothing_is_known(tmp_path: Path, lacking: str) -> None:
    loop, io = Loop(0.0 if lacking == "zero" else 1e-3), plugin(exact=0)
    for i in range(2):
        loop.train()
        state = loop.state()
        if lacking == "optimizer":
            del state["optimizer_states"]
        elif lacking != "zero":
            del state["optimizer_states"][0]["param_groups"][0][lacking]
        io.save_checkpoint(state, tmp_path / f"{i}.ckpt")
        assert bool([note for note in io.notes if UNKNOWN_DECAY in note]) == (lacking in ("lr", "betas"))
    assert set(moves_in(tmp_path / "1.ckpt").values()) == {None}


# --- the Trainer ----------------------------------------------------------------------------------


def a_trainer(folder: Path, n_steps: int, options: ChainOptions = LOSSY, **settings: Any) -> Any:
    from tests.support.trainer_support import trainer

    return trainer(folder, options=options, max_steps=n_steps, save_steps=10, **settings)


def test_the_trainer_moves_weights(tmp_path: Path) -> None:
    run = a_trainer(tmp_path, 20)
    run.train()
    first, second = (moves_in(tmp_path / f"checkpoint-{step}" / "model.ckptz") for step in (10, 20))
    assert all(share is not None and 0 < share <= 1 for share in [*first.values(), *second.values()])
    assert set(second) == {name for name, _ in run.model.named_parameters()}  # tensors of one dimension, too
    resumed = a_trainer(tmp_path, 30)
    resumed.train(resume_from_checkpoint=True)
    with safe_open(tmp_path / "checkpoint-20" / "model.ckptz", "pt") as file:
        stored = file.get_tensors()
    assert any(not torch.equal(run.model.state_dict()[name], tensor) for name, tensor in stored.items())
    third = moves_in(tmp_path / "checkpoint-30" / "model.ckptz")
    assert len([share for share in third.values() if share is not None]) > len(third) / 2


def test_a_trainer_that_saves_models_only_moves_none(tmp_path: Path) -> None:
    a_trainer(tmp_path, 20, save_only_model=True).train()
    assert set(moves_in(tmp_path / "checkpoint-20" / "model.ckptz").values()) == {None}
    assert not (tmp_path / "checkpoint-20" / "state.ckptz").exists()


# --- accelerate, and the command line -------------------------------------------------------------


def test_accelerate_keeps_momentum_so_that_weights_stay(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    from ckptz.integrations.accelerate import register

    accelerator, loop = accelerate.Accelerator(cpu=True), Loop()
    _, optimizer = accelerator.prepare(loop.model, loop.optimizer)
    register(accelerator, LOSSY)
    for i in range(2):
        loop.train()
        accelerator.save_state(str(tmp_path / str(i)))
    kept = loop.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    assert set(moves_in(tmp_path / "1" / "model.ckptz").values()) == {None}
    loop.train()
    accelerator.load_state(str(tmp_path / "1"))
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], kept)


def test_chains_of_whole_checkpoints_move_weights(tmp_path: Path) -> None:
    loop, states = Loop(), list[Any]()
    for _ in range(3):
        loop.train()
        states.append(loop.state())
        torch.save(states[-1], tmp_path / f"step-{loop.step}.pt")
    paths = sorted(tmp_path.glob("*.pt"))
    full, *deltas = compress(paths, tmp_path / "out", chain=True, config=Grid(step=2**-6), jobs=1)
    assert [note for note in full.notes if UNKNOWN in note]
    for report, state in zip(deltas, states[1:], strict=True):
        assert not [note for note in report.notes if UNKNOWN in note]
        check_moved(Path(report.output), state)
    alone = compress(paths[2], tmp_path / "alone.ckptz", config=Grid(), jobs=1)
    assert set(moves_in(Path(alone[0].output)).values()) == {None}


@pytest.mark.parametrize("is_in_folders", [True, False])
def test_chains_of_weights_with_files_of_optimizer_state_move(tmp_path: Path, is_in_folders: bool) -> None:
    loop = Loop()
    for _ in range(2):
        loop.train()
        folder = tmp_path / f"checkpoint-{loop.step}"
        folder.mkdir()
        save_file(loop.model.state_dict(), folder / "model.safetensors")
        torch.save(loop.optimizer.state_dict(), folder / "optimizer.pt")
    folders = sorted(tmp_path.iterdir(), reverse=not is_in_folders)  # a chain is ordered by steps
    (tmp_path / "names").write_text("\n".join(name for name, _ in loop.model.named_parameters()))
    inputs = folders if is_in_folders else [folder / "model.safetensors" for folder in folders]
    optimizer_files = () if is_in_folders else [folder / "optimizer.pt" for folder in folders]
    options: dict[str, Any] = {
        "optimizer": optimizer_files,
        "param_names": tmp_path / "names",
        "config": Grid(step=2**-6),
    }
    first, second = compress(inputs, tmp_path / "out", chain=True, jobs=1, **options)
    assert set(moves_in(Path(first.output)).values()) == {USUAL_SHARE}
    shares = moves_in(Path(second.output))
    assert len(shares) == 4
    assert all(share is not None and share > 0.8 for share in shares.values())


@pytest.mark.parametrize("is_rounded", [True, False])
def test_masters_move_and_weights_of_16_bits_are_rounded_from_them(tmp_path: Path, is_rounded: bool) -> None:
    loop, states = Loop(), list[Any]()
    for _ in range(2):
        loop.train()
        state = loop.state()
        weights = state["state_dict"]
        state["masters"] = {name: tensor + (0 if is_rounded else 0.01) for name, tensor in weights.items()}
        state["state_dict"] = {name: tensor.bfloat16() for name, tensor in weights.items()}
        states.append(state)
        torch.save(state, tmp_path / f"step-{loop.step}.pt")
    paths = sorted(tmp_path.glob("*.pt"))
    _, report = compress(paths, tmp_path / "out", chain=True, config=Grid(step=2**-6), jobs=1)
    shares, stored = moves_in(Path(report.output)), load_state(report.output)
    name = "0.weight"
    assert shares[f"state_dict.{name}"] is not None
    assert (shares[f"masters.{name}"] is not None) == is_rounded  # an average of weights is no fp32 master
    if is_rounded:
        assert shares[f"masters.{name}"] == shares[f"state_dict.{name}"]
        moved = stored["masters"][name] - states[-1]["masters"][name]
        both = stored["state_dict"][name].float() - stored["masters"][name]
        assert both.square().mean() < 0.05 * moved.square().mean()
