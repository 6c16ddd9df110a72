"""Folders of the plain Trainer and accelerate, and files of Lightning, compressed and restored."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptz
from ckptz import LOSSLESS, Grid
from ckptz.errors import ConfigError, CorruptionError
from ckptz.integrations.linked import ChainOptions
from ckptz.integrations.transformers import from_pretrained
from ckptz.torch import load_file, load_state, save_state
from tests.support.trainer_support import Trainer, check_equal, checkpoints, final, tokens, trainer
from tests.support.transformers_support import make, transformers

pytestmark = pytest.mark.apps


def plain(folder: Path, n_steps: int, **settings: Any) -> Any:
    return trainer(folder, transformers.Trainer, None, max_steps=n_steps, **settings)


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a run with three checkpoints, and the result of a run one step longer."""
    folder = tmp_path_factory.mktemp("plain")
    plain(folder, 3, save_total_limit=None).train()
    uninterrupted = plain(folder / "whole", 4, save_strategy="no")
    uninterrupted.train()
    return folder, final(uninterrupted)


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


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.state.log_history if "loss" in row]


LOGGED = {"logging_strategy": "steps", "logging_steps": 1}


@pytest.mark.parametrize("config", [LOSSLESS, Grid(min_elements=1)], ids=["lossless", "grid"])
def test_the_plain_trainer_resumes_from_a_restored_folder(
    run: tuple[Path, dict[str, Any]], config: Any, tmp_path: Path
) -> None:
    options = ChainOptions(config=config, jobs=1)
    ours = trainer(tmp_path / "ours", options=options, max_steps=3, **LOGGED)
    ours.train()
    ckptz.restore(tmp_path / "ours" / "checkpoint-3", tmp_path / "plain")
    mine = json.loads((tmp_path / "plain" / "config.json").read_text())
    theirs = json.loads((run[0] / "checkpoint-3" / "config.json").read_text())
    assert mine == theirs
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert names | {"training_args.bin"} == {path.name for path in (run[0] / "checkpoint-3").iterdir()}
    plainly = plain(tmp_path / "on", 6, save_strategy="no", **LOGGED)
    plainly.train(resume_from_checkpoint=str(tmp_path / "plain"))
    ours = trainer(tmp_path / "ours", options=options, max_steps=6, **LOGGED)
    ours.train(resume_from_checkpoint=True)
    uninterrupted = plain(tmp_path / "whole", 6, save_strategy="no", **LOGGED)
    uninterrupted.train()
    assert losses(plainly) == losses(ours) == losses(uninterrupted)
    check_equal(final(plainly), final(uninterrupted))


def test_a_restored_adapter_resumes_in_the_plain_trainer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(folder: str, kind: type, n_steps: int, **options: Any) -> Any:
        settings = {"max_steps": n_steps, "save_total_limit": None, **LOGGED}
        args = trainer(tmp_path / folder, transformers.Trainer, None, **settings).args
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["ln_f"], use_dora=True, r=2)
        model = peft.get_peft_model(make("gpt2").train(), config)
        return kind(model, args, train_dataset=tokens(), **options)

    uninterrupted = adapted("ours", Trainer, 4, ckptz=ChainOptions(jobs=1), trainable_only=True)
    uninterrupted.train()
    report = ckptz.restore(tmp_path / "ours" / "checkpoint-2", tmp_path / "plain")
    assert not report.notes
    theirs = adapted("theirs", transformers.Trainer, 2)
    theirs.train()
    names = [
        set(load_file(folder / "adapter_model.safetensors"))
        for folder in (tmp_path / "plain", tmp_path / "theirs" / "checkpoint-2")
    ]
    assert names[0] == names[1]
    resumed = adapted("on", transformers.Trainer, 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "plain"))
    assert losses(resumed) == losses(uninterrupted)
    check_equal(final(resumed), final(uninterrupted))


def test_scalers_and_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1).train()
    folder = tmp_path / "checkpoint-1"
    state = load_state(folder / "state.ckptz")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0).state_dict()
    save_state({**state, "scaler": scaler}, folder / "state.ckptz")
    shutil.copyfile(folder / "rng-00000.ckptz", folder / "rng-00001.ckptz")
    ckptz.restore(folder, tmp_path / "plain")
    assert torch.load(tmp_path / "plain" / "scaler.pt") == scaler
    names = {path.name for path in (tmp_path / "plain").glob("rng*")}
    assert names == {"rng_state_0.pth", "rng_state_1.pth"}


def test_what_a_plain_folder_needs_is_said(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1).train()
    folder = tmp_path / "checkpoint-1"
    with pytest.raises(ConfigError, match="name it with -o"):
        ckptz.restore(folder)
    ckptz.restore(folder, tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"model.safetensors: exists already"):
        ckptz.restore(folder, tmp_path / "plain")
    ckptz.restore(folder, tmp_path / "plain", force=True)
    with pytest.raises(ConfigError, match=r"name a step, .*@STEP.* such as .*checkpoint-1.model.ckptz"):
        ckptz.restore(tmp_path, tmp_path / "model.safetensors")
    other_files, tied = ckptz.restore(f"{tmp_path}@1", tmp_path / "model.safetensors").notes
    assert f"ckptz restore {folder} -o DIR restores all" in other_files
    assert "tied tensors are stored once: without lm_head.weight" in tied
    ckptz.torch.save_file({"x": torch.ones(3)}, folder / "state.ckptz")
    with pytest.raises(CorruptionError, match="CkptzTrainerMixin"):
        ckptz.restore(folder, tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


def test_a_packed_folder_is_a_model(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    ckptz.compress(run[0] / "checkpoint-3", tmp_path / "packed")
    expected = transformers.GPT2LMHeadModel.from_pretrained(run[0] / "checkpoint-3").state_dict()
    loaded = from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "packed").state_dict()
    check_equal(dict(loaded), dict(expected))


def test_numbered_moments_are_found_by_the_model_of_the_config(
    run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    source = run[0] / "checkpoint-3"
    [report] = ckptz.compress(source, tmp_path / "packed", config=Grid(min_elements=1))
    assert [note for note in report.notes if "no calibration" not in note] == []
    exact = torch.load(source / "optimizer.pt")["state"]
    restored = load_file(report.output)
    for number, state in exact.items():
        if state["exp_avg"].dim() > 1:
            second_moment = restored[f"state.{number}.exp_avg_sq"]
            assert not torch.equal(second_moment, state["exp_avg_sq"]), number
            has_gradient = state["exp_avg_sq"] > 0
            assert bool((second_moment[has_gradient] > 0).all()), "never zero under a live gradient"
    shutil.copytree(source, tmp_path / "alone")
    (tmp_path / "alone" / "config.json").unlink()
    [unknown] = ckptz.compress(tmp_path / "alone", tmp_path / "unknown", config=Grid(min_elements=1))
    assert any("input.param_names" in note for note in unknown.notes)
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


def test_folders_of_accelerate_are_restored_completely(tmp_path: Path) -> None:
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
    expected = step()
    [report] = ckptz.compress(tmp_path / "plain", tmp_path / "packed")
    assert "optimizer.bin" not in {path.name for path in (tmp_path / "packed").iterdir()}
    ckptz.restore(report.output, tmp_path / "back")
    accelerator.load_state(str(tmp_path / "back"))
    assert all(map(torch.equal, step(), expected))


def test_files_of_lightning_are_restored_under_their_names(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # an optional import
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

    def run(n_steps: int, **options: Any) -> Any:
        lightning.seed_everything(1, verbose=False)
        module = Module()
        fit = lightning.Trainer(max_steps=n_steps, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        fit.fit(module, data, **options)
        return fit

    first = run(3)
    first.save_checkpoint(tmp_path / "last.ckpt")
    [report] = ckptz.compress(tmp_path / "last.ckpt", config=Grid(min_elements=1))
    assert Path(report.output).name == "last.ckptz"
    assert not any("no parameter" in note for note in report.notes)
    assert report.n_lossy > 4, "weights and moments"
    [report] = ckptz.compress(tmp_path / "last.ckpt", tmp_path / "exact.ckptz")
    ckptz.restore(report.output, tmp_path / "back.ckpt")
    restored, expected = (
        run(4, ckpt_path=tmp_path / name).lightning_module.state_dict() for name in ("back.ckpt", "last.ckpt")
    )
    check_equal(dict(restored), dict(expected))
