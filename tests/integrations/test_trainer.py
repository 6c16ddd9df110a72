"""The Hugging Face Trainer with `.ckptz` checkpoints: kept checkpoints resume, whichever were deleted."""

import functools
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ckptz import KeepPolicy, KeepRules, KMeans, inspect, prune, safe_open, verify
from ckptz.errors import ConfigError, UnsupportedError, WriteError
from ckptz.integrations import linked
from ckptz.integrations.trainer import ChainOptions, CkptzTrainerMixin
from ckptz.integrations.transformers import from_pretrained
from ckptz.run.names import run_files
from ckptz.torch import load_file
from tests.support.fault_support import ERRORS
from tests.support.spec_support import ROOT, block_with
from tests.support.trainer_support import (
    N_SAVES,
    OPTIONS,
    Trainer,
    check_equal,
    checkpoints,
    final,
    tokens,
    trainer,
)
from tests.support.transformers_support import make, transformers

pytestmark = [pytest.mark.apps, pytest.mark.usefixtures("deltas_at_any_cost")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"


@functools.cache
def uninterrupted(n_steps: int = N_SAVES) -> dict[str, Any]:
    """Return the result of transformers' own Trainer in a run without saves."""
    run = trainer(Path("unused"), transformers.Trainer, None, save_strategy="no", max_steps=n_steps)
    run.train()
    return final(run)


def test_a_disk_that_fails_where_training_goes_on_takes_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer would treat its state as missing, and start at step 0 with the loaded weights."""
    trainer(tmp_path, max_steps=2).train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.ckptz")}
    isfile = os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda path: "trainer_state" not in str(path) and isfile(path))
    with pytest.raises(OSError, match="could not be read when training was to go on"):
        trainer(tmp_path, max_steps=3).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.ckptz")} == before


def test_every_kept_folder_resumes_bit_for_bit(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train()
    check_equal(final(run), uninterrupted())
    kept = checkpoints(tmp_path)
    assert [path.name for path in kept] == ["checkpoint-9", "checkpoint-10"]
    for folder in kept:
        names = {path.name for path in folder.iterdir()}
        assert {"model.ckptz", "state.ckptz", "rng-00000.ckptz", "trainer_state.json"} <= names
        assert {Path(name).suffix for name in names} == {".ckptz", ".json"}, "no pickle, no copy"
    assert (kept[0] / "model.ckptz").stat().st_size < 0.95 * full_bytes(kept[0])
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(kept[0]))
    assert resumed.state.global_step == N_SAVES
    check_equal(final(resumed), uninterrupted())
    last = trainer(tmp_path, max_steps=N_SAVES + 1)
    last.train(resume_from_checkpoint=True)
    check_equal(final(last), uninterrupted(N_SAVES + 1))
    bases = {path.stat().st_ino for folder in checkpoints(tmp_path) for path in folder.glob("base-*")}
    n_names = sum(len(list(folder.glob("base-*"))) for folder in checkpoints(tmp_path))
    assert len(bases) < n_names, "the folders share the room of their bases"


@pytest.mark.parametrize("left", [None, b"", b'{"epoch": 0.5, "glo'])
def test_a_checkpoint_that_a_kill_left_unfinished_is_passed_over(tmp_path: Path, left: bytes | None) -> None:
    trainer(tmp_path, max_steps=N_SAVES - 1).train()
    unfinished = Path(shutil.copytree(tmp_path / "checkpoint-9", tmp_path / "checkpoint-10"))
    (unfinished / "trainer_state.json").unlink()
    (unfinished / "state.ckptz").unlink()
    if left is not None:
        (unfinished / "trainer_state.json").write_bytes(left)
    resumed = trainer(tmp_path)
    with pytest.warns(RuntimeWarning, match="checkpoint-10: is passed over"):
        resumed.train(resume_from_checkpoint=True)
    check_equal(final(resumed), uninterrupted())


@pytest.mark.parametrize("left", ["trainer_state.json", "model.ckptz"])
def test_a_checkpoint_that_was_deleted_in_part_takes_no_younger_one_along(tmp_path: Path, left: str) -> None:
    trainer(tmp_path, max_steps=4, save_total_limit=3).train()
    old, *complete = checkpoints(tmp_path)
    for age, folder in enumerate((*reversed(complete), old)):
        for path in (folder / "trainer_state.json", folder):
            os.utime(path, (1e9 - 100 * age, 1e9 - 100 * age))
    for path in old.iterdir():
        if path.name != left:
            path.unlink()
    trainer(tmp_path, max_steps=5).train(resume_from_checkpoint=str(complete[-1]))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-5"]


WEIGHTS_LONGER = KeepPolicy(last=2, weights=KeepRules(last=1, every=3))


def test_weights_outlive_their_optimizer_state(tmp_path: Path) -> None:
    options = ChainOptions(full_every=4, keep=WEIGHTS_LONGER, jobs=1)
    trainer(tmp_path, options=options, save_total_limit=None, max_steps=N_SAVES - 2).train()
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{i}" for i in (3, 6, 7, 8)]
    assert {path.parent.name for path in tmp_path.rglob("state.ckptz")} == {"checkpoint-7", "checkpoint-8"}
    assert not [path for i in (3, 6) for path in (tmp_path / f"checkpoint-{i}").glob("*rng*")]
    for path in run_files(tmp_path):
        verify(path)
    for i in (3, 6):
        folder = tmp_path / f"checkpoint-{i}"
        loaded = from_pretrained(transformers.GPT2LMHeadModel, folder)
        check_equal({f"model.{name}": value for name, value in loaded.state_dict().items()}, weights_after(i))
        with pytest.raises(ConfigError, match=rf"checkpoint-{i}: only the weights of this step were kept"):
            trainer(tmp_path / "new").train(resume_from_checkpoint=str(folder))
    resumed = trainer(tmp_path, options=options, save_total_limit=None)
    resumed.train(resume_from_checkpoint=True)
    check_equal(final(resumed), uninterrupted())
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{i}" for i in (3, 6, 9, 10)]
    report = prune(tmp_path, KeepPolicy(last=1, weights=KeepRules(last=1, every=6)))
    assert (report.steps, report.weights_only) == ((10,), (6,))
    for path in run_files(tmp_path):
        verify(path)


def weights_after(n_steps: int) -> dict[str, Any]:
    return {name: value for name, value in uninterrupted(n_steps).items() if name.startswith("model.")}


def test_a_deleted_step_disappears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, rmtree = ChainOptions(keep=KeepPolicy(last=1), jobs=1), shutil.rmtree
    monkeypatch.setattr("ckptz.run.deletion.shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, options=options, save_total_limit=None).train()
    monkeypatch.setattr("ckptz.run.deletion.shutil.rmtree", rmtree)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    trainer(tmp_path, options=options, save_total_limit=None).train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{N_SAVES}"]


def test_the_best_step_by_the_metric_of_the_trainer_stays(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 5}
    ranking = {"metric_for_best_model": "loss", "greater_is_better": True}
    keep = KeepPolicy(last=1, weights=KeepRules(last=1, best=1, lower_is_better=False))
    options = ChainOptions(keep=keep, jobs=1)
    run = trainer(tmp_path, options=options, dataset=tokens(8), save_total_limit=None, **ranking, **settings)
    run.train()
    best = Path(run.state.best_model_checkpoint)
    scores = {log["step"]: log["eval_loss"] for log in run.state.log_history if "eval_loss" in log}
    assert checkpoints(tmp_path) == sorted({best, tmp_path / "checkpoint-5"})
    assert inspect(best / "model.ckptz").metadata["metric"] == repr(max(scores.values()))


@pytest.mark.parametrize(
    ("keep", "settings", "message"),
    [
        (WEIGHTS_LONGER, {}, "save_total_limit and keep both delete checkpoints"),
        (KeepPolicy(best=1), {"save_total_limit": None}, "needs metric_for_best_model"),
        (
            KeepPolicy(best=1),
            {"save_total_limit": None, "metric_for_best_model": "x", "greater_is_better": True},
            "say the same in both",
        ),
    ],
)
def test_keep_rules_that_contradict_the_trainer_are_refused(
    tmp_path: Path, keep: KeepPolicy, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, options=ChainOptions(keep=keep), **settings)


def test_keep_is_a_policy_and_says_what_stays_exact() -> None:
    with pytest.raises(ConfigError, match=r"keep must be a ckptz\.KeepPolicy"):
        ChainOptions(keep=5)
    with pytest.raises(ConfigError, match=r"say it in KeepPolicy\(exact=0\)"):
        ChainOptions(keep=KeepPolicy(), exact=0)


def test_a_run_that_was_killed_in_its_first_save_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    run = trainer(tmp_path)
    with pytest.warns(RuntimeWarning, match="checkpoint-1: is passed over"):
        run.train(resume_from_checkpoint=True)
    check_equal(final(run), uninterrupted())


def full_bytes(folder: Path) -> int:
    with safe_open(folder / "model.ckptz", "pt") as file:
        return sum(tensor.nbytes for tensor in file.get_tensors().values())


def test_a_resumed_run_continues_its_chain(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    later = trainer(tmp_path, max_steps=3)
    later.train(resume_from_checkpoint=True)
    assert list((tmp_path / "checkpoint-3").glob("base-*"))


def test_the_best_model_is_restored(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 3}
    ranking = {"metric_for_best_model": "loss", "greater_is_better": True}
    run = trainer(tmp_path, dataset=tokens(8), **ranking, **settings)
    run.train()
    best = Path(run.state.best_model_checkpoint)
    assert best in checkpoints(tmp_path)
    with safe_open(best / "model.ckptz", "pt") as file:
        stored = file.get_tensors()
    state = run.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())


def test_without_hard_links_every_folder_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(linked.os, "link", refuse)
    run = trainer(tmp_path, max_steps=2)
    run.train()
    assert not list(tmp_path.glob("checkpoint-*/base-*"))
    assert "cannot be linked" in run._ckptz_chains["model.ckptz"].notes[0]
    resumed = trainer(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    check_equal(final(resumed), final(run))


def test_checkpoints_of_the_plain_trainer_resume(tmp_path: Path) -> None:
    trainer(tmp_path, transformers.Trainer, None, max_steps=2).train()
    run = trainer(tmp_path, max_steps=3)
    run.train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-3" / "model.ckptz").is_file()


def test_lossy_weights_resume_as_they_were_stored(tmp_path: Path) -> None:
    run = trainer(tmp_path, options=ChainOptions(config=KMeans(levels=16), exact=0, jobs=1), max_steps=2)
    run.train()
    with safe_open(tmp_path / "checkpoint-2" / "model.ckptz", "pt") as file:
        stored = file.get_tensors()
    resumed = trainer(tmp_path)
    resumed._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    state = resumed.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    assert any(not torch.equal(run.model.state_dict()[name], tensor) for name, tensor in stored.items())


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1).train()
    with pytest.raises(ConfigError, match=r"AdamW.*SGD"):
        trainer(tmp_path, optim="sgd").train(resume_from_checkpoint=True)


def test_a_folder_that_cannot_be_written_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, max_steps=1)
    (tmp_path / "checkpoint-1").mkdir()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=ERRORS["ENOSPC"]()))
    with pytest.raises(WriteError, match=r"model\.ckptz.*no space"):
        run.train()
    assert not (tmp_path / "checkpoint-1" / "model.ckptz").exists()


def test_ways_with_checkpoints_of_their_own_are_refused(tmp_path: Path) -> None:
    model = make("gpt2")
    model.peft_config = {}
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(UnsupportedError, match="adapter"):
        Trainer(model=model, args=args)

    class Bare(CkptzTrainerMixin):
        pass

    with pytest.raises(UnsupportedError, match="before Trainer"):
        Bare()


def test_an_adapter_is_kept_without_the_weights_that_it_adapts(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(**options: Any) -> Any:
        args = trainer(tmp_path, transformers.Trainer, None, max_steps=3, save_total_limit=None).args
        torch.manual_seed(1)
        model = peft.get_peft_model(make("gpt2").train(), peft.LoraConfig(target_modules=["c_attn"], r=2))
        return Trainer(model, args, train_dataset=tokens(), ckptz=OPTIONS, **options)

    with pytest.raises(UnsupportedError, match="pass trainable_only=True"):
        adapted()
    run = adapted(trainable_only=True)
    run.train()
    folder = tmp_path / "checkpoint-2"
    with safe_open(folder / "model.ckptz", "pt") as file:
        names = set(file.keys())
        assert "frozen" in file.metadata()
    assert names
    assert all("lora_" in name for name in names)
    assert (folder / "adapter_config.json").is_file()
    resumed = adapted(trainable_only=True)
    resumed.train(resume_from_checkpoint=str(folder))
    check_equal(final(resumed), final(run))
    other = adapted(trainable_only=True)
    with torch.no_grad():
        next(p for p in other.model.parameters() if not p.requires_grad)[0, 0] += 1
    with pytest.raises(ConfigError, match="without its frozen weights"):
        other.train(resume_from_checkpoint=str(folder))


def test_the_snippets_for_adapters_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "pretrained": make("gpt2").train(),
        "loss": lambda model: model(**{name: rows[None] for name, rows in tokens(1)[0].items()}).loss,
        "MyTrainer": Trainer,
        "args": trainer(tmp_path / "run", transformers.Trainer, None, max_steps=2).args,
        "data": tokens(),
    }
    exec(block_with(ROOT / "docs" / "training.md", "get_peft_model"), names)
    assert all("lora_" in name for name in load_file("lora-run/step-00000200.ckptz"))
    names["pretrained"] = make("gpt2").train()
    exec(block_with(ROOT / "docs" / "frameworks.md", "get_peft_model"), names)
    assert all("lora_" in name for name in load_file("run/checkpoint-2/model.ckptz"))


@pytest.mark.slow
def test_a_stopped_example_resumes(tmp_path: Path) -> None:
    for n_steps in (6, 12):
        command = [sys.executable, str(EXAMPLE), str(tmp_path), str(n_steps)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
        assert len(checkpoints(tmp_path)) == 2
        assert f"checkpoint-{n_steps}: " in process.stdout


def test_what_the_trainer_itself_writes_stays(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    run.train()
    run.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "checkpoint-1" / "config.json").read_text())["model_type"] == "gpt2"


@pytest.mark.parametrize("is_saved_compiled", [True, False])
def test_compiled_submodules_resume_as_plain_ones_and_the_other_way_round(
    tmp_path: Path, is_saved_compiled: bool
) -> None:
    def run(is_compiled: bool, **options: Any) -> Any:
        compiled = trainer(tmp_path, **options)
        if is_compiled:
            block = compiled.model.base_model
            name, inner = next((n, m) for n, m in block.named_children() if list(m.parameters()))
            setattr(block, name, torch.compile(inner, backend="eager"))
        return compiled

    saved = run(is_saved_compiled, max_steps=1)
    saved.train()
    path = tmp_path / "checkpoint-1" / "model.ckptz"
    with safe_open(path, "pt") as file:
        assert any("_orig_mod" in name for name in file.keys()) == is_saved_compiled  # noqa: SIM118
    back = run(not is_saved_compiled)
    with torch.no_grad():
        for parameter in back.model.parameters():
            parameter.zero_()
    back._load_from_checkpoint(str(path.parent))
    assert all(map(torch.equal, back.model.parameters(), saved.model.parameters()))


def test_a_save_that_fails_over_a_complete_step_leaves_no_complete_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, max_steps=2).train()
    second = trainer(tmp_path, max_steps=2)
    failing = Mock(side_effect=WriteError(28, "state.ckptz: no space left"))
    monkeypatch.setattr(second, "_save_optimizer_and_scheduler", failing)
    with pytest.raises(WriteError):
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    report = prune(tmp_path, KeepPolicy(last=1))
    assert report.steps == (1,)
    assert any("checkpoint-2" in note for note in report.notes)
    with pytest.raises(ConfigError, match=r"checkpoint-2: has no trainer_state\.json"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = trainer(tmp_path)
    with pytest.warns(RuntimeWarning, match="checkpoint-2: is passed over"):
        resumed.train(resume_from_checkpoint=True)
    check_equal(final(resumed), uninterrupted())


def test_ranks_wait_before_they_write_and_before_a_step_is_complete(tmp_path: Path) -> None:
    """Otherwise a kill may leave a complete step with random states of another save, or without."""
    trainer(tmp_path, max_steps=1).train()
    second = trainer(tmp_path, max_steps=1)
    folder, seen = tmp_path / "checkpoint-1", list[set[str]]()
    before = (folder / "rng-00000.ckptz").stat().st_ino
    second.accelerator.wait_for_everyone = lambda: seen.append({path.name for path in folder.glob("*")})
    second.state.global_step = 1
    second.create_optimizer_and_scheduler(1)
    second._save_checkpoint(second.model, trial=None)
    assert len(seen) == 2
    assert not any("trainer_state.json" in names for names in seen)
    assert "rng-00000.ckptz" in seen[1]
    assert (folder / "rng-00000.ckptz").stat().st_ino != before
    assert (folder / "trainer_state.json").exists()


def test_random_states_that_are_not_restored_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, max_steps=1).train()
    folder = str(tmp_path / "checkpoint-1")
    back = trainer(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        back._load_rng_state(folder)
    torch.rand(1)
    monkeypatch.setattr("ckptz.integrations.trainer.set_random_state", lambda _: None)
    with pytest.warns(
        RuntimeWarning, match=r"rng-00000\.ckptz: .* not exactly: torch: other values than saved"
    ):
        back._load_rng_state(folder)
    (tmp_path / "checkpoint-1" / "rng-00000.ckptz").unlink()  # one process more than at the save
    with pytest.warns(RuntimeWarning, match=r"random states: there is no rng-00000\.ckptz for this process"):
        back._load_rng_state(folder)


def test_an_optimizer_that_was_not_saved_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1, save_only_model=True).train()
    with pytest.warns(
        RuntimeWarning, match="optimizer and scheduler: they begin anew, because save_only_model"
    ):
        trainer(tmp_path, max_steps=2, save_only_model=True).train(resume_from_checkpoint=True)


def test_a_scaler_that_is_not_what_was_saved_is_named(tmp_path: Path) -> None:
    saved = trainer(tmp_path, max_steps=1)
    saved.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    saved.train()
    back = trainer(tmp_path)
    back.create_optimizer_and_scheduler(N_SAVES)
    back.state.global_step = 1
    back.accelerator.scaler = torch.amp.GradScaler("cpu")
    folder = str(tmp_path / "checkpoint-1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        back._load_optimizer_and_scheduler(folder)
    back.accelerator.scaler = None
    with pytest.warns(RuntimeWarning, match=r"not exactly: scaler: \{.* saved, None now"):
        back._load_optimizer_and_scheduler(folder)
