"""Runs that start from pretrained weights: their first files are deltas of these weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file as save_plain

from ckptz import Budget, Checkpointer, KeepPolicy, inspect, log, restore, verify
from ckptz.codec.grid import FULL_SHARE
from ckptz.errors import ConfigError, MissingBaseError
from ckptz.integrations.linked import Chain, ChainOptions, job_of
from ckptz.run import links
from ckptz.run.prune import prune_folder
from ckptz.torch import load_file, load_state
from tests.support.checkpointer_support import GRID, LOSSY, Run, names_in, same, state_of

WIDTH = 64
STEP_1, STEP_2 = "step-00000001.ckptz", "step-00000002.ckptz"
LINK = r"base-[0-9a-f]{8}-model\.safetensors"


def tuned(width: int = WIDTH) -> Run:
    """Return a run with a low learning rate, so that its deltas are small."""
    run = Run(width=width)
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-6
    return run


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Write the initial weights of `tuned` to a plain file with the model's names, and return its path."""
    path = tmp_path / "hub" / "model.safetensors"
    path.parent.mkdir()
    save_plain(tuned().model.state_dict(), path, {"format": "pt"})
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def saved(folder: Path, base: Path | None, n_steps: int = 2, **options: Any) -> Run:
    run = tuned()
    with run.checkpointer(folder, base=base, background=False, **options) as checkpointer:
        for step in range(1, n_steps + 1):
            run.step()
            checkpointer.save(step)
            report = checkpointer.wait()
            assert not [note for note in report.notes if "full" in note]
    return run


def loss_after(folder: Path) -> float:
    """Restore step 2 of a folder as its newest step and return the loss of the next step."""
    run = tuned()
    with run.checkpointer(folder) as checkpointer:
        assert checkpointer.restore_latest() == 2
    return run.step()


def restored(folder: Path | str, **options: Any) -> Run:
    """Return another run after a restore of step 2."""
    run = tuned()
    with run.checkpointer(folder, **options) as checkpointer:
        checkpointer.restore(2)
    return run


def links_in(folder: Path) -> list[str]:
    return sorted(name for name in names_in(folder) if name.startswith("base-"))


@pytest.mark.parametrize("source", ["a file", "its folder", "a step of another run"])
def test_the_first_file_is_a_delta_to_the_pretrained_weights(
    tmp_path: Path, folder: Path, pretrained: Path, source: str
) -> None:
    base = {"a file": pretrained, "its folder": pretrained.parent}.get(source)
    if base is None:
        with tuned().checkpointer(tmp_path / "other", background=False) as checkpointer:
            checkpointer.save(1)
        base = tmp_path / "other" / STEP_1
    run = saved(folder, base)
    full = saved(tmp_path / "full", None)
    assert same(state_of(run), state_of(full))
    first, second = inspect(folder / STEP_1), inspect(folder / STEP_2)
    assert (first.depth, second.depth) == (1, 2)
    assert first.stored_bytes < 0.75 * inspect(tmp_path / "full" / STEP_1).stored_bytes
    assert len(links_in(folder)) == 1
    assert loss_after(folder) == loss_after(tmp_path / "full"), "the base is found without being passed again"
    prefix = "model." if source == "a step of another run" else ""
    stored = {tensor.name for tensor in inspect(folder / STEP_2).tensors}
    assert stored == {f"{prefix}{name}" for name in run.model.state_dict()}
    assert set(load_file(folder / STEP_2)) == set(run.model.state_dict())
    assert len(verify(folder / STEP_2).chain) == 2


def test_a_file_of_own_names_is_restored_to_one(tmp_path: Path, folder: Path, pretrained: Path) -> None:
    run = saved(folder, pretrained)
    restore(folder / STEP_2, tmp_path / "tuned.safetensors")
    assert same(load_plain(tmp_path / "tuned.safetensors"), state_of(run))


def test_every_full_file_is_stored_against_it(folder: Path, pretrained: Path) -> None:
    saved(folder, pretrained, n_steps=4, full_every=2, keep=KeepPolicy(last=None))
    depths = [inspect(folder / f"step-{step:08d}.ckptz").depth for step in (1, 2, 3, 4)]
    assert depths == [1, 2, 1, 2]
    assert [inspect(folder / f"step-{step:08d}.state.ckptz").depth for step in (1, 3)] == [0, 0]


@pytest.mark.parametrize("full_step", [None, 0.5])
def test_a_file_against_it_has_the_step_of_a_full_file(
    folder: Path, pretrained: Path, full_step: float | None
) -> None:
    run, config = tuned(), replace(GRID, full_step=full_step)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)  # far from the end
    with torch.no_grad():
        for parameter in run.model.parameters():  # so far that no step size is halved
            parameter += 0.5 * torch.randn_like(parameter)
    options: dict[str, Any] = {"config": config, "keep": LOSSY, "background": False}
    with run.checkpointer(folder, base=pretrained, **options) as checkpointer:
        for step in (1, 2):
            run.step()
            checkpointer.save(step)
    steps = []
    for name in (STEP_1, STEP_2):
        records = [tensor.lossy for tensor in inspect(folder / name).tensors]
        steps.append({one.settings["step"] for one in records if one is not None and one.method == "grid"})
    assert steps[0] == {full_step or FULL_SHARE * GRID.step / 2}
    assert max(steps[1]) == GRID.step / 2, "deltas of the run have their own"


def test_a_run_that_goes_on_without_being_told_stays_with_its_names(folder: Path, pretrained: Path) -> None:
    saved(folder, pretrained, n_steps=1)
    run = tuned()
    with run.checkpointer(folder, background=False) as checkpointer:
        checkpointer.restore(1)
        run.step()
        checkpointer.save(2)
    assert inspect(folder / STEP_2).depth == 2
    assert same(state_of(restored(folder)), state_of(run))


def test_retention_leaves_it_and_does_not_wait_for_it(folder: Path, pretrained: Path) -> None:
    saved(folder, pretrained, n_steps=4, full_every=2, keep=KeepPolicy(last=None))
    report = prune_folder(folder, KeepPolicy(last=1))
    assert (report.steps, report.notes) == ((4,), ())
    assert len(links_in(folder)) == 1
    assert {name for name in names_in(folder) if name.startswith("step-") and ".state" not in name} == {
        "step-00000003.ckptz",
        "step-00000004.ckptz",
    }
    assert "plain" in {entry.kind for entry in log(folder).entries}


def gone(folder: Path, pretrained: Path) -> None:
    pretrained.unlink()
    [name] = links_in(folder)
    (folder / name).unlink()


def test_a_restore_without_it_names_what_is_missing_and_takes_it_from_anywhere(
    tmp_path: Path, folder: Path, pretrained: Path
) -> None:
    run = saved(folder, pretrained)
    kept = pretrained.read_bytes()
    gone(folder, pretrained)
    before = state_of(other := tuned())
    with other.checkpointer(folder) as checkpointer, pytest.raises(MissingBaseError, match=LINK):
        checkpointer.restore(2)
    assert same(state_of(other), before)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(kept)
    assert same(state_of(restored(folder, base=copy)), state_of(run))


def test_weights_of_another_content_are_not_taken_for_it(folder: Path, pretrained: Path) -> None:
    saved(folder, pretrained)
    gone(folder, pretrained)
    save_plain({name: tensor + 1 for name, tensor in tuned().model.state_dict().items()}, pretrained)
    with pytest.raises(MissingBaseError, match=LINK):
        restored(folder, base=pretrained)


def test_where_it_goes_during_a_run_files_stand_alone(folder: Path, pretrained: Path) -> None:
    run = tuned()
    with run.checkpointer(folder, base=pretrained, background=False) as checkpointer:
        pretrained.unlink()
        checkpointer.save(1)
        report = checkpointer.wait()
    assert any("weights: stored as a full file" in note for note in report.notes)
    assert inspect(folder / STEP_1).depth == 0


def test_where_hard_links_do_not_reach_the_second_name_is_a_symbolic_one(
    folder: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(links.os, "link", refuse)
    saved(folder, pretrained)
    [name] = links_in(folder)
    assert (folder / name).readlink() == pretrained.resolve()
    assert loss_after(folder)


def test_lossy_steps_are_exact_while_they_are_the_newest(folder: Path, pretrained: Path) -> None:
    run = saved(folder, pretrained, config=GRID)
    assert inspect(folder / STEP_1).depth == 1
    assert list(folder.glob("step-00000002.exact-*.ckptz"))
    restored = tuned()
    with restored.checkpointer(folder, config=GRID) as checkpointer:
        checkpointer.restore(2)
        assert checkpointer.restored.is_exact
    assert same(state_of(restored), state_of(run))
    lossy = load_file(folder / STEP_2)
    assert set(lossy) == set(run.model.state_dict())
    moved = (lossy["0.weight"] - run.model[0].weight).abs().max()
    assert 0 < moved < 0.1 * run.model[0].weight.abs().max()


def test_a_search_tries_files_that_are_stored_against_it(folder: Path, pretrained: Path) -> None:
    run, seen = tuned(), set[str]()

    def quality(state: dict[str, torch.Tensor]) -> float:
        seen.update(state)
        return 1 + float((state["0.weight"] - run.model[0].weight).detach().norm())

    budget = Budget(quality, 0.5)
    with run.checkpointer(folder, base=pretrained, budget=budget, keep=LOSSY) as checkpointer:
        run.step()
        checkpointer.save(1)
        report = checkpointer.wait()
    assert report.search.is_met
    assert seen == set(run.model.state_dict())
    assert inspect(folder / STEP_1).depth == 1


def test_tied_weights_are_restored_as_one(tmp_path: Path, folder: Path) -> None:
    def tied() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        model[1].weight = model[0].weight
        return model

    path, model = tmp_path / "tied.safetensors", tied()
    save_plain({"0.weight": model[0].weight.detach(), "0.bias": model[0].bias.detach()}, path)
    with Checkpointer(folder, model, base=path, background=False, jobs=1) as checkpointer:
        checkpointer.save(1)
        assert inspect(folder / STEP_1).depth == 1
        model[0].weight.data.zero_()
        checkpointer.restore(1)
    assert model[0].weight is model[1].weight
    assert model[0].weight.equal(tied()[0].weight)


def test_a_remote_run_is_restored_by_those_who_have_it(pretrained: Path) -> None:
    pytest.importorskip("fsspec")
    url = "memory://origin/run"
    run = tuned()
    with run.checkpointer(url, base=pretrained, background=False) as checkpointer:
        checkpointer.save(1)
        run.step()
        checkpointer.save(2)
    assert same(state_of(restored(url, base=pretrained)), state_of(run))
    with pytest.raises(MissingBaseError, match=LINK):
        restored(url)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("nothing", FileNotFoundError, "none.safetensors"),
        ("another model", ConfigError, r"has none of .* such as '0\.weight' as torch\.float32"),
        ("two files", ConfigError, "a base is one file, and this folder has 2"),
        ("a delta", ConfigError, "base= needs a full checkpoint"),
    ],
)
def test_what_is_no_base_is_refused_before_training(
    tmp_path: Path, folder: Path, pretrained: Path, kind: str, error: type[Exception], message: str
) -> None:
    base = {"nothing": tmp_path / "none.safetensors", "two files": pretrained.parent}.get(kind, pretrained)
    run = tuned(width=WIDTH + (kind == "another model"))
    if kind == "two files":
        save_plain({"a": torch.ones(2)}, pretrained.with_name("other.safetensors"))
    elif kind == "a delta":
        saved(tmp_path / "other", pretrained)
        base = tmp_path / "other" / STEP_2
    with pytest.raises(error, match=message):
        run.checkpointer(folder, base=base)
    assert not folder.exists()


# --- files of frameworks ------------------------------------------------------------------------


def test_folders_of_frameworks_begin_from_it_and_are_complete(tmp_path: Path, pretrained: Path) -> None:
    chain = Chain(ChainOptions(base=pretrained, jobs=1))
    states = []
    for i in range(3):
        run = tuned()
        run.losses(i)
        states.append(state_of(run))
        chain.write(tmp_path / f"checkpoint-{i}" / "model.ckptz", job_of(states[-1]))
        assert not chain.notes
    assert inspect(tmp_path / "checkpoint-0" / "model.ckptz").depth == 1
    pretrained.unlink()
    for i in (2, 0):
        assert same(load_state(tmp_path / f"checkpoint-{i}" / "model.ckptz"), states[i])


def test_a_base_of_another_model_is_told_and_not_needed(tmp_path: Path, pretrained: Path) -> None:
    chain = Chain(ChainOptions(base=pretrained, jobs=1))
    chain.write(tmp_path / "model.ckptz", job_of({"other": torch.ones(9)}))
    assert "no tensor gains from" in chain.notes[0]
    assert inspect(tmp_path / "model.ckptz").depth == 0
