"""Lossy files and exact newest steps: residual files, restores and deletions."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz import Budget, Checkpointer, KeepPolicy, KMeans, diff, log, rebase, verify
from ckptz.errors import ConfigError
from ckptz.run.folder import StepStore
from ckptz.run.prune import prune_folder
from ckptz.run.step_files import Listing, StepFile
from ckptz.store.resolve import MAX_DEPTH, open_checkpoint
from ckptz.torch import load_file, save_file
from ckptz.training.files import residual_bases
from tests.support.checkpointer_support import (
    GRID,
    LOSSY,
    Run,
    flip,
    loss_after,
    names_in,
    same,
    saved_run,
    state_of,
)
from tests.support.cli_support import ckptz
from tests.support.fault_support import ERRORS, unreadable

N_SAVED = 4
HEAD = {f"step-{N_SAVED:08d}{kind}.exact.ckptz" for kind in ("", ".state")}


def short(name: str) -> str:
    """Return the name of a residual file without its digest."""
    return re.sub(r"(\.exact)-[0-9a-f]{16}", r"\1", name)


def residuals(folder: Path) -> set[str]:
    return {short(name) for name in names_in(folder) if ".exact-" in name}


def residual(folder: Path, name: str) -> Path:
    """Return the path of a residual file by its name without digest."""
    [path] = folder.glob(name.replace(".exact.", ".exact-*."))
    return path


def resumed(folder: Path, step: int = N_SAVED, **options: Any) -> tuple[Run, Checkpointer]:
    """Return a run and its Checkpointer after a restore of a step."""
    run = Run(seed=99)
    with run.checkpointer(folder) as checkpointer:
        checkpointer.restore(step, **options)
    return run, checkpointer


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of four lossy steps, each a delta of the previous one; the newest is exact."""
    folder = tmp_path_factory.mktemp("head") / "run"
    saved_run(folder, N_SAVED, config=GRID)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "run"))


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return [0.0, *Run().losses(N_SAVED + 2)]


# --- written files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exact", "exact_steps"), [(0, ()), (1, (4,)), (2, (3, 4)), (None, (1, 2, 3, 4))])
def test_the_newest_steps_are_exact(
    tmp_path: Path, exact: int | None, exact_steps: tuple[int, ...], losses: list[float]
) -> None:
    saved_run(tmp_path, N_SAVED, config=GRID, keep=KeepPolicy(exact=exact))
    names = {f"step-{step:08d}{kind}.exact.ckptz" for step in exact_steps for kind in ("", ".state")}
    assert residuals(tmp_path) == names
    for step in range(1, N_SAVED + 1):
        run, checkpointer = resumed(tmp_path, step)
        assert checkpointer.restored.is_exact == (step in exact_steps)
        is_named = any("no residual files" in note for note in checkpointer.restored.notes)
        assert is_named == (step not in exact_steps)
        assert (run.step() == losses[step + 1]) == (step in exact_steps)


def test_a_residual_is_an_ordinary_file_and_its_lossy_file_stays_lossy(folder: Path) -> None:
    exact = load_file(residual(folder, "step-00000004.exact.ckptz"))
    run, _ = resumed(folder)
    assert same(exact, state_of(run))
    lossy = load_file(folder / "step-00000004.ckptz")
    assert lossy.keys() == exact.keys()
    assert not same(lossy, exact)
    lossy_state, exact_state = folder / "step-00000004.state.ckptz", "step-00000004.state.exact.ckptz"
    moments = [load_file(path) for path in (lossy_state, residual(folder, exact_state))]
    assert not moments[0]["optimizer.0.weight.exp_avg"].equal(moments[1]["optimizer.0.weight.exp_avg"])
    for name in names_in(folder) - {".ckptz-lock"}:
        verify(folder / name)


@pytest.mark.usefixtures("deltas_at_any_cost")
def test_nothing_is_stored_against_a_residual_even_after_a_restore_of_one(folder: Path) -> None:
    run = Run(seed=99)
    with run.checkpointer(folder, config=GRID, background=False) as checkpointer:
        checkpointer.restore_latest()
        run.step()
        checkpointer.save(5)
    store = StepStore(folder)
    base_refs = {file.name: store.facts(file, n).base for file, n in store.listing().sizes.items()}
    bases = {short(name): None if base is None else base.file for name, base in base_refs.items()}
    for kind in ("", ".state"):
        assert bases[f"step-00000005{kind}.ckptz"] == f"step-00000004{kind}.ckptz"
    assert bases["step-00000005.exact.ckptz"] is None  # all tensors are fp32 and lossy
    assert bases["step-00000005.state.exact.ckptz"] == "step-00000005.state.ckptz"
    assert not [base for base in bases.values() if base is not None and ".exact-" in base]


def test_weights_get_their_name_last_and_only_then_older_residuals_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    replace, unlink = os.replace, os.unlink
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(short(Path(b).name)), replace(a, b)))
    gone = lambda path: events.append(f"- {short(Path(path).name)}")  # noqa: E731
    monkeypatch.setattr(os, "unlink", lambda a, **how: (gone(a), unlink(a, **how)))
    run = Run(seed=99)
    keep = KeepPolicy(last=1)
    with run.checkpointer(folder, config=GRID, keep=keep, full_every=1, background=False) as checkpointer:
        checkpointer.restore_latest()
        run.step()
        checkpointer.save(5)
    seen = [event for event in events if ".ckptz" in event and "lock" not in event and "hidden" not in event]
    assert set(seen[:3]) == {"step-00000005.state.ckptz", *(name.replace("4", "5") for name in HEAD)}
    assert seen[3] == "step-00000005.ckptz"
    assert set(seen[4:6]) == {f"- {name}" for name in HEAD}
    assert seen[6:8] == ["- step-00000004.ckptz", "- step-00000004.state.ckptz"]
    assert not residuals(folder) - {name.replace("4", "5") for name in HEAD}


def test_the_longest_chain_takes_no_file_more(tmp_path: Path) -> None:
    """A chain of maximum length takes no further delta: neither of `save_file` nor a residual file."""
    paths = [tmp_path / f"{n}.ckptz" for n in range(MAX_DEPTH + 2)]
    has_bases = []
    for n, path in enumerate(paths[:-1]):
        save_file({"w": torch.arange(3000) + n}, path, base=paths[n - 1] if n else None)
        with contextlib.closing(open_checkpoint(path)) as opened:
            has_bases.append(bool(residual_bases(opened)))
    assert has_bases == [True] * MAX_DEPTH + [False]
    with pytest.raises(ConfigError, match=f"64.ckptz: ends a chain of {MAX_DEPTH} deltas"):
        save_file({"w": torch.arange(3000)}, paths[-1], base=paths[-2])
    assert not paths[-1].exists()


def test_lossless_files_have_no_residual(tmp_path: Path) -> None:
    saved_run(tmp_path / "lossless", 2)
    budget = Budget(lambda state: 1 + float(state["0.weight"].abs().sum()), 0.0)
    saved_run(tmp_path / "budget", 2, budget=budget)
    assert not residuals(tmp_path / "lossless") | residuals(tmp_path / "budget")
    _, checkpointer = resumed(tmp_path / "budget", 2)
    assert checkpointer.restored.is_exact


def test_a_report_says_what_the_head_takes_and_a_state_that_loses_nothing_needs_none(tmp_path: Path) -> None:
    run, model = Run(), torch.nn.Linear(96, 96)
    with run.checkpointer(tmp_path / "both", config=GRID) as checkpointer:
        run.step()
        checkpointer.save(1)
        both = checkpointer.wait()
    with Checkpointer(tmp_path / "weights", model, config=KMeans(levels=16)) as checkpointer:
        checkpointer.save(1)
        weights_only, weight = checkpointer.wait(), model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        checkpointer.restore(1)
    assert residuals(tmp_path / "weights") == {"step-00000001.exact.ckptz"}
    assert model.weight.equal(weight)
    for report, folder in ((both, tmp_path / "both"), (weights_only, tmp_path / "weights")):
        sizes = {path.name: path.stat().st_size for path in folder.glob("step*")}
        assert report.stored_bytes == sum(sizes.values())
        assert report.exact_bytes == sum(size for name, size in sizes.items() if ".exact-" in name) > 0


# --- invalid residual files -----------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def of_another_step(path: Path) -> None:
    saved_run(path.parent.with_name("three"), 3, config=GRID)
    name = short(path.name).replace("00000004", "00000003")
    shutil.copy(residual(path.parent.with_name("three"), name), path)


def of_another_run(path: Path) -> None:
    run, other = Run(seed=8), path.parent.with_name("other")
    with run.checkpointer(other, config=GRID, background=False) as checkpointer:
        run.step()
        checkpointer.save(N_SAVED)
    shutil.copy(residual(other, short(path.name)), path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", sorted(HEAD))
@pytest.mark.parametrize("damage", [flip, cut, empty, Path.unlink, of_another_step, of_another_run])
def test_a_wrong_residual_makes_the_whole_step_lossy(
    folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    lossy = Path(shutil.copytree(folder, folder.with_name("lossy")))
    for residual_name in HEAD:
        residual(lossy, residual_name).unlink()
    path = residual(folder, name)
    damage(path)
    with pytest.warns(RuntimeWarning, match="step 4 is restored with what it loses"):
        run, checkpointer = resumed(folder)
    assert not checkpointer.restored.is_exact
    assert path.name in checkpointer.restored.notes[0] or damage is Path.unlink
    weights, loss = state_of(run), run.step()
    expected, _ = resumed(lossy)
    assert same(weights, state_of(expected))
    assert loss == expected.step()


def test_exact_values_of_fp32_need_no_lossy_file(folder: Path) -> None:
    flip(folder / "step-00000004.ckptz")
    run, checkpointer = resumed(folder)
    assert checkpointer.restored.is_exact
    exact = load_file(residual(folder, "step-00000004.exact.ckptz"))
    assert same(state_of(run), exact)


def test_a_lossy_file_that_is_damaged_is_an_error_as_ever(folder: Path) -> None:
    flip(folder / "step-00000004.ckptz")
    flip(residual(folder, "step-00000004.exact.ckptz"))
    with (
        pytest.warns(RuntimeWarning, match="is restored with"),
        pytest.raises(ValueError, match=r"00000004\.ckptz"),
    ):
        resumed(folder)


def test_weights_alone_are_exact_by_their_own_residual(folder: Path) -> None:
    flip(residual(folder, "step-00000004.state.exact.ckptz"))
    exact = load_file(residual(folder, "step-00000004.exact.ckptz"))
    run, checkpointer = resumed(folder, weights_only=True)
    assert checkpointer.restored.is_exact
    assert same(state_of(run), exact)


def test_another_model_is_refused_without_a_word_of_residuals(folder: Path) -> None:
    with Run(width=7).checkpointer(folder) as checkpointer:
        with pytest.raises(ConfigError, match="is float32"):
            checkpointer.restore_latest()
        assert checkpointer.restored is None


def test_a_disk_that_fails_is_no_reason_for_lossy_values(folder: Path) -> None:
    exact = residual(folder, "step-00000004.exact.ckptz")
    with unreadable(exact, ERRORS["EIO"]), pytest.raises(OSError, match="input/output"):
        resumed(folder)


def test_a_residual_without_its_lossy_file_is_a_leftover(folder: Path) -> None:
    for kind in ("", ".state"):
        (folder / f"step-00000004{kind}.ckptz").unlink()
    files = Listing.of(dict.fromkeys(names_in(folder), 1))
    assert files.full_steps == (1, 2, 3)
    assert set(map(short, files.leftovers)) == HEAD
    checked = ckptz("verify", folder)
    assert "2 unfinished files" in checked.stderr
    run = Run(seed=99)
    with run.checkpointer(folder, config=GRID, background=False) as checkpointer:
        assert checkpointer.restore_latest() == 3
        run.step()
        checkpointer.save(4)
        assert checkpointer.restore_latest() == 4
        assert checkpointer.restored.is_exact


def test_a_residual_may_stand_alone(folder: Path, losses: list[float]) -> None:
    for name in HEAD:
        rebase(residual(folder, name), jobs=1)
    run, _ = resumed(folder)
    assert run.step() == losses[N_SAVED + 1]


def test_residuals_of_earlier_versions_are_found_and_one_of_a_rebased_file_too(
    folder: Path, tmp_path: Path, losses: list[float]
) -> None:
    names = {residual(folder, name): folder / name for name in HEAD}
    for path, earlier in names.items():
        path.rename(earlier)
    run, checkpointer = resumed(folder)
    assert checkpointer.restored.is_exact
    assert run.step() == losses[N_SAVED + 1]
    ckptz("restore", f"{folder}@4", "-o", tmp_path / "earlier.safetensors")
    for path, earlier in names.items():
        earlier.rename(path)
    rebase(folder / "step-00000004.ckptz", jobs=1)
    _, checkpointer = resumed(folder)
    assert checkpointer.restored.is_exact
    ckptz("verify", f"{folder}@4", "--against", tmp_path / "earlier.safetensors")


# --- deletions ------------------------------------------------------------------------------------------


def test_a_prune_keeps_residuals_unless_it_is_told_how_many(folder: Path, losses: list[float]) -> None:
    assert "residual files of 1 step" in ckptz("prune", folder, "--keep-last", 2).stdout
    assert residuals(folder) == HEAD
    assert loss_after(folder) == (N_SAVED, losses[N_SAVED + 1])
    planned = ckptz("prune", folder, "--keep-exact", 0, "--dry-run", "--json").json
    assert set(map(short, planned["removed"])) == HEAD
    assert planned["exact"] == []
    ckptz("prune", folder, "--keep-exact", 0)
    assert not residuals(folder)
    _, checkpointer = resumed(folder)
    assert not checkpointer.restored.is_exact


def test_residuals_go_before_all_lossy_files_whatever_their_step(tmp_path: Path) -> None:
    saved_run(tmp_path, 4, config=GRID, keep=KeepPolicy(exact=None), full_every=1)
    report = prune_folder(tmp_path, KeepPolicy(last=1), dry_run=True)
    kinds = [".exact-" in name for name in report.removed]
    assert kinds == sorted(kinds, reverse=True)
    assert sum(kinds) == 6
    assert report.exact == (4,)


@pytest.mark.usefixtures("deltas_at_any_cost")
def test_a_residual_is_never_hidden(tmp_path: Path) -> None:
    saved_run(tmp_path, 4, config=GRID, keep=KeepPolicy(last=1))
    listing = Listing.of(dict.fromkeys(names_in(tmp_path), 1))
    assert {file.step for file in listing.hidden} == {1, 2, 3}
    assert not any(file.is_residual for file in listing.hidden)
    assert residuals(tmp_path) == HEAD


def test_going_back_keeps_the_residuals_of_what_stays(tmp_path: Path, losses: list[float]) -> None:
    saved_run(tmp_path, 4, config=GRID, keep=KeepPolicy(exact=3))
    run = Run(seed=99)
    with run.checkpointer(tmp_path, config=GRID) as checkpointer:
        checkpointer.discard_after(3)
        assert checkpointer.restore_latest() == 3
    assert residuals(tmp_path) == {f"step-{s:08d}{k}.exact.ckptz" for s in (2, 3) for k in ("", ".state")}
    assert run.step() == losses[4]


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
def test_a_residual_that_cannot_be_read_keeps_what_it_may_need_while_it_is_wanted(
    folder: Path, error: Callable[[], OSError]
) -> None:
    path = residual(folder, "step-00000004.exact.ckptz")
    with unreadable(path, error):
        report = prune_folder(folder, KeepPolicy(last=1))
        assert f"{path.name} cannot be read" in report.notes[0]
        assert report.steps == (1, 2, 3, 4)
        report = prune_folder(folder, KeepPolicy(last=1, exact=0))
    assert not report.notes
    assert report.steps == (4,)
    assert not residuals(folder)


def test_a_step_that_cannot_be_read_keeps_the_head_before_it(folder: Path, losses: list[float]) -> None:
    run = Run(seed=99)
    with run.checkpointer(folder, config=GRID, background=False, keep=KeepPolicy(exact=None)) as checkpointer:
        checkpointer.restore_latest()
        run.step()
        checkpointer.save(5)
    newest = folder / StepFile(5, "weights").name
    with unreadable(newest, ERRORS["EIO"]):
        prune_folder(folder, KeepPolicy(last=1))
        assert loss_after(folder, 4) == (4, losses[5])
    assert residuals(folder) > HEAD


def test_those_who_save_writes_go_on_from_a_run_with_heads(folder: Path) -> None:
    run = Run(seed=99)
    with run.checkpointer(folder, config=GRID, keep=LOSSY, background=False) as checkpointer:
        assert checkpointer.restore_latest() == N_SAVED
        assert checkpointer.restored.is_exact
        run.step()
        checkpointer.save(5)
    assert not residuals(folder)


# --- verbs ----------------------------------------------------------------------------------------------


def test_what_names_a_step_gives_exact_values_and_a_path_those_of_its_file(
    folder: Path, tmp_path: Path
) -> None:
    exact = load_file(residual(folder, "step-00000004.exact.ckptz"))
    lossy = load_file(folder / "step-00000004.ckptz")
    for text, expected in ((f"{folder}@4", exact), (folder / "step-00000004.ckptz", lossy)):
        ckptz("restore", text, "-o", tmp_path / "out.safetensors", "--force")
        output = load_file(tmp_path / "out.safetensors")
        assert same({name.removeprefix("model."): tensor for name, tensor in output.items()}, expected)
        ckptz("verify", text, "--against", tmp_path / "out.safetensors")
    saved_run(tmp_path / "again", N_SAVED, config=GRID)
    other_step, this_step = f"{tmp_path / 'again'}@4", f"{folder}@4"
    assert diff(other_step, this_step).is_equal
    for name in HEAD:
        residual(folder, name).unlink()
    assert not diff(other_step, this_step).is_equal


def test_a_log_tells_residuals_from_deltas(folder: Path) -> None:
    entries = {short(entry.file): entry for entry in log(folder).entries}
    assert {name for name, entry in entries.items() if entry.kind == "exact"} == HEAD
    parents = {entries[name].parent for name in HEAD}
    assert parents == {None, "step-00000004.state.ckptz"}
    for name in HEAD:
        assert entries[name].n_lossy == 0


def test_verify_names_a_residual_of_other_values(folder: Path) -> None:
    other = folder.with_name("other")
    saved_run(other, N_SAVED, config=GRID.scaled(2))
    assert "belong" not in ckptz("verify", folder).stderr
    path = residual(folder, "step-00000004.exact.ckptz")
    name = path.name
    rebase(residual(other, short(name)), path, jobs=1, force=True)
    failed = ckptz("verify", folder, fails=True)
    assert failed.exit_code == 3
    assert f"{name}: belongs to other values than step-00000004.ckptz holds" in failed.stderr
    failed = ckptz("restore", f"{folder}@4", "-o", folder.with_name("4.safetensors"), fails=True)
    assert (failed.exit_code, f"{name}: belongs to other values than" in failed.error) == (3, True)
    with pytest.warns(RuntimeWarning, match="belongs to other weights"):
        resumed(folder)
