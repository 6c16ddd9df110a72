"""Whole folders of the plain Trainer and of accelerate, and files of Lightning, packed and restored."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptz
from ckptz import Grid
from ckptz.integrations.transformers import from_pretrained
from ckptz.torch import load_file
from tests.support.trainer_support import check_equal, checkpoints, final, trainer
from tests.support.transformers_support import transformers

pytestmark = pytest.mark.apps


def plain(folder: Path, n_steps: int, **settings: Any) -> Any:
    return trainer(folder, transformers.Trainer, None, max_steps=n_steps, **settings)


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folders of three checkpoints, and what the run arrived at one step later."""
    folder = tmp_path_factory.mktemp("plain")
    plain(folder, 3, save_total_limit=None).train()
    whole = plain(folder / "whole", 4, save_strategy="no")
    whole.train()
    return folder, final(whole)


def resumed(folder: Path, tmp_path: Path) -> dict[str, Any]:
    run = plain(tmp_path / "on", 4, save_strategy="no")
    run.train(resume_from_checkpoint=str(folder))
    return final(run)


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_restored_folder_resumes_bit_for_bit(
    run: tuple[Path, dict[str, Any]], is_safe: bool, tmp_path: Path
) -> None:
    source = shutil.copytree(run[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    if not is_safe:
        model = transformers.GPT2LMHeadModel.from_pretrained(source)
        (source / "model.safetensors").unlink()
        torch.save(model.state_dict(), source / "pytorch_model.bin")
    before = {path.name for path in source.iterdir()}
    [report] = ckptz.compress(source, tmp_path / "packed")
    packed = {path.name for path in (tmp_path / "packed").iterdir()}
    assert not {"model.safetensors", "pytorch_model.bin", "optimizer.pt", "scheduler.pt"} & packed
    assert {"rng_state.pth", "trainer_state.json", "config.json"} <= packed, "as they are"
    assert not report.notes
    ckptz.restore(report.output, tmp_path / "checkpoint-3b")
    assert {path.name for path in (tmp_path / "checkpoint-3b").iterdir()} == before
    if is_safe:
        check_equal(resumed(tmp_path / "checkpoint-3b", tmp_path), run[1])
    else:
        states = [torch.load(f / "pytorch_model.bin") for f in (source, tmp_path / "checkpoint-3b")]
        check_equal(states[1], states[0])


def test_a_packed_folder_is_a_model(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    ckptz.compress(run[0] / "checkpoint-3", tmp_path / "packed")
    wanted = transformers.GPT2LMHeadModel.from_pretrained(run[0] / "checkpoint-3").state_dict()
    found = from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "packed").state_dict()
    check_equal(dict(found), dict(wanted))


def test_numbered_moments_are_found_by_the_model_of_the_config(
    run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    source = run[0] / "checkpoint-3"
    [report] = ckptz.compress(source, tmp_path / "packed", config=Grid(min_elements=1))
    assert [note for note in report.notes if "uncalibrated" not in note] == []
    exact = torch.load(source / "optimizer.pt")["state"]
    restored = load_file(report.output)
    for number, state in exact.items():
        if state["exp_avg"].dim() > 1:
            found = restored[f"state.{number}.exp_avg_sq"]
            assert not torch.equal(found, state["exp_avg_sq"]), number
            assert bool((found[state["exp_avg_sq"] > 0] > 0).all()), "never zero under a live gradient"
    shutil.copytree(source, tmp_path / "alone")
    (tmp_path / "alone" / "config.json").unlink()
    [unknown] = ckptz.compress(tmp_path / "alone", tmp_path / "unknown", config=Grid(min_elements=1))
    assert any("--param-names" in note for note in unknown.notes)
    assert unknown.n_lossy < report.n_lossy
    model = transformers.GPT2LMHeadModel.from_pretrained(source)
    decayed = transformers.Trainer.get_decay_parameter_names(None, model)
    names = sorted((name for name, _ in model.named_parameters()), key=lambda name: name not in decayed)
    (tmp_path / "names.txt").write_text("\n".join(names))
    [listed] = ckptz.compress(
        tmp_path / "alone",
        tmp_path / "listed",
        config=Grid(min_elements=1),
        param_names=tmp_path / "names.txt",
    )
    assert listed.content_id == report.content_id


def test_a_chain_of_folders_has_all_that_each_needs(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    sources = checkpoints(run[0])
    reports = ckptz.compress(sources, tmp_path / "packed", chain=True)
    assert [report.depth for report in reports] == [0, 1, 2]
    assert not any(report.notes for report in reports)
    moved = tmp_path / "packed" / "checkpoint-3"
    moved = Path(shutil.copytree(moved, tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / "packed")
    ckptz.restore(moved / "model.ckptz", tmp_path / "back")
    assert not list((tmp_path / "back").glob("base-*"))
    check_equal(resumed(tmp_path / "back", tmp_path), run[1])


def test_folders_of_accelerate_come_back_whole(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(1)
    model = accelerator.prepare(torch.nn.Linear(40, 30))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
    accelerator.register_for_checkpointing(schedule)

    def step() -> list[Any]:
        accelerator.backward(model(torch.rand(2, 40)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    step()
    accelerator.save_state(str(tmp_path / "plain"))
    wanted = step()
    [report] = ckptz.compress(tmp_path / "plain", tmp_path / "packed")
    assert "optimizer.bin" not in {path.name for path in (tmp_path / "packed").iterdir()}
    ckptz.restore(report.output, tmp_path / "back")
    accelerator.load_state(str(tmp_path / "back"))
    assert all(map(torch.equal, step(), wanted))


def test_files_of_lightning_come_back_under_their_names(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # an optional import
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 64})
            self.layers = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Linear(64, 64))

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.DataLoader(torch.rand(8, 40), 2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def run(n_steps: int, **more: Any) -> Any:
        lightning.seed_everything(1, verbose=False)
        module = Module()
        fit = lightning.Trainer(max_steps=n_steps, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        fit.fit(module, data, **more)
        return fit

    first = run(3)
    first.save_checkpoint(tmp_path / "last.ckpt")
    [report] = ckptz.compress(tmp_path / "last.ckpt", config=Grid(min_elements=1))
    assert Path(report.output).name == "last.ckptz"
    assert not any("no parameter" in note for note in report.notes)
    assert report.n_lossy > 4, "weights and moments"
    [report] = ckptz.compress(tmp_path / "last.ckpt", tmp_path / "exact.ckptz")
    ckptz.restore(report.output, tmp_path / "back.ckpt")
    found, wanted = (
        run(4, ckpt_path=tmp_path / name).lightning_module.state_dict() for name in ("back.ckpt", "last.ckpt")
    )
    check_equal(dict(found), dict(wanted))
