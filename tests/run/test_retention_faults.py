"""Retention while the disk, the system or a remote store fails: no step that a rule keeps is lost.

Every deletion in a step store and its condition:

| code | deletes | only if |
|---|---|---|
| `prune` | steps that no rule keeps | each newer kept file was read, and its base found |
| `prune` | bases of other steps | the same, and they are no base of a kept file |
| `prune`, back to a step | later steps | an earlier step exists, and its headers can be read |
| `StepStore.lock` | temporary files of the store | the lock is held; none has a step's name |
| `StepStore.lock` | markers | the file that they hide does not exist |
| `StepStore.lock` | an incomplete upload | it is the newest, and shorter than its header declares |
| `StepStore.publishing` | markers of the new step | the step is new |
| `Spool` | local copies | they were uploaded, or their save has failed |
"""

from pathlib import Path

import pytest

from ckptz import KeepPolicy
from ckptz.errors import ConfigError
from ckptz.run.folder import StepStore
from ckptz.run.prune import PruneReport, prune_folder
from ckptz.run.step_files import ChainRule, Listing, StepFile
from ckptz.store.storage import LocalFolder
from ckptz.training import checkpointer as checkpointers
from tests.support.checkpointer_support import Run, loss_after, names_in, saved_run
from tests.support.cli_support import ckptz
from tests.support.fault_support import Error, copied, each_error, fail_everywhere, unreadable

N_SAVED = 5
ONE = KeepPolicy(last=1)
FILES = [f"step-{step:08d}{kind}.ckptz" for step in (1, 3, N_SAVED) for kind in ("", ".state")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, deltas_at_any_cost: None) -> Path:
    """Save steps 1 to 5: 2 and 3 are deltas of 1, 4 is a delta of 3, and 5 is full."""
    del deltas_at_any_cost
    folder = tmp_path_factory.mktemp("retention") / "run"
    saved_run(folder, N_SAVED, keep=KeepPolicy(last=None), full_every=4)
    return folder


def listing(folder: Path) -> Listing:
    return Listing.of(dict.fromkeys(names_in(folder), 1))


def check_whole(folder: Path, prepared: Path, steps: set[int]) -> None:
    """Require that steps exist and the files of their chains are hard links to the original ones."""
    files, store = listing(folder), StepStore(folder)
    assert set(files.full_steps) >= steps
    for step in steps:
        for kind in ("weights", "state"):
            for member in store.chain(StepFile(step, kind), files.sizes):
                assert (folder / member.name).samefile(prepared / member.name)


# --- files that cannot be read ------------------------------------------------------------------


@each_error
@pytest.mark.parametrize("name", FILES)
def test_what_cannot_be_read_keeps_every_older_step(prepared: Path, name: str, error: Error) -> None:
    with copied(prepared) as folder:
        with unreadable(folder / name, error):
            report = prune_folder(folder, ONE)
        step = int(name[5:13])
        check_whole(folder, prepared, {*range(1, step + 1), N_SAVED})
        assert listing(folder).full_steps == tuple(sorted({*range(1, step + 1), N_SAVED})) == report.steps
        assert f"{name} cannot be read" in report.notes[0]
        prune_folder(folder, ONE)
        assert listing(folder).full_steps == (N_SAVED,)


def test_the_command_line_says_so(prepared: Path) -> None:
    with copied(prepared) as folder:
        (folder / FILES[-2]).unlink()
        (folder / FILES[-2]).symlink_to("on a disk that is not mounted")
        result = ckptz("prune", folder, "--keep-last", 1)
        assert f"{FILES[-2]} cannot be read, so all that is older stays" in result.stderr
        check_whole(folder, prepared, set(range(1, N_SAVED)))


@pytest.mark.parametrize("kind", ["", ".state"])
def test_a_base_that_is_not_found_keeps_every_older_step(prepared: Path, kind: str) -> None:
    with copied(prepared) as folder:
        for step in (5, 3):
            for gone in ("", ".state"):
                (folder / f"step-{step:08d}{gone}.ckptz").unlink()
        saved = prepared / f"step-00000003{'.state' if not kind else ''}.ckptz"
        saved_again = folder / saved.name
        saved_again.hardlink_to(saved)
        report = prune_folder(folder, ONE)
        assert listing(folder).full_steps == (1, 2, 4)
        assert f"its base step-00000003{kind}.ckptz is not here" in report.notes[0]


def test_a_base_that_only_its_content_tells_stays(tmp_path: Path) -> None:
    run = Run()
    with run.checkpointer(tmp_path, background=False, keep=KeepPolicy(last=None)) as checkpointer:
        checkpointer._rule = ChainRule(4, is_forked=False)
        checkpointer.save(1)
        checkpointer.save(2)  # has the same contents
        run.step()
        checkpointer.save(3)
    for kind in ("", ".state"):
        (tmp_path / f"step-00000002{kind}.ckptz").unlink()
    expected = loss_after(tmp_path)
    report = prune_folder(tmp_path, ONE)
    assert report.hidden == ("step-00000001.state.ckptz", "step-00000001.ckptz")
    assert loss_after(tmp_path) == expected


@each_error
def test_a_save_that_cannot_read_the_newest_header_keeps_the_run(
    prepared: Path, error: Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = Run(), checkpointers.prune

    def prune(store: StepStore, policy: KeepPolicy) -> PruneReport:
        newest = Path(store.name) / StepFile(N_SAVED + 1, "weights").name
        with unreadable(newest, error):
            return real(store, policy)

    monkeypatch.setattr(checkpointers, "prune", prune)
    with copied(prepared) as folder, run.checkpointer(folder, background=False, keep=ONE) as checkpointer:
        checkpointer.restore_latest()
        checkpointer.save(N_SAVED + 1)
        report = checkpointer.wait()
        assert "step-00000006.ckptz cannot be read" in report.notes[0]
        check_whole(folder, prepared, set(range(1, N_SAVED + 1)))


def test_a_step_is_saved_whatever_becomes_of_the_older_ones(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalFolder, name: str) -> None:
        if not name.startswith("."):
            raise PermissionError(13, "permission denied")

    run = Run()
    with copied(prepared) as folder, run.checkpointer(folder, background=False, keep=ONE) as checkpointer:
        monkeypatch.setattr(LocalFolder, "remove", refuse)
        run.step()
        checkpointer.save(N_SAVED + 1)
        report = checkpointer.wait()
        assert "older steps stay" in report.notes[-1]
        assert {*checkpointer.steps()} >= {1, 2, 3, 4, N_SAVED + 1}, "5 is its base"
        monkeypatch.undo()
        run.step()
        checkpointer.save(N_SAVED + 2)
        assert checkpointer.steps() == (N_SAVED + 2,)


# --- one call fails -----------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", [None, 3], ids=["forward", "going back"])
def test_a_prune_in_which_one_call_fails_loses_no_step(
    prepared: Path, after: int | None, stride: int
) -> None:
    n_failed, kept = [], {N_SAVED} if after is None else {1, 2, 3}

    def work(folder: Path) -> None:
        prune_folder(folder, ONE if after is None else KeepPolicy(last=None), last_step=after)

    def check(folder: Path, error: Exception | None) -> None:
        n_failed.append(error is not None)
        check_whole(folder, prepared, kept)
        store = StepStore(folder)
        for file in set(listing(folder).sizes) - listing(folder).hidden:
            assert store.chain(file, listing(folder).sizes)[-1] in listing(folder).sizes
        work(folder)
        assert not listing(folder).leftovers

    assert fail_everywhere(prepared, work, check, stride=stride) > 50
    assert 0 < sum(n_failed) < len(n_failed)


# --- restoring an older step --------------------------------------------------------------------


def test_a_run_is_not_pruned_to_a_missing_or_unreadable_step(prepared: Path) -> None:
    with copied(prepared) as folder:
        before = names_in(folder)
        with pytest.raises(ConfigError, match="no step would be left"):
            prune_folder(folder, KeepPolicy(last=None), last_step=0)
        (folder / FILES[2]).unlink()
        (folder / FILES[2]).write_bytes(b"damaged")
        with pytest.raises(
            ConfigError, match=r"step-00000003\.ckptz cannot be read, so the steps after 3 stay"
        ):
            prune_folder(folder, KeepPolicy(last=None), last_step=3)
        assert names_in(folder) == before
        prune_folder(folder, KeepPolicy(last=None), last_step=2)
        assert listing(folder).full_steps == (1, 2)


def test_a_marker_that_a_removal_left_does_not_hide_a_new_step(prepared: Path) -> None:
    run = Run()
    with copied(prepared) as folder, run.checkpointer(folder, background=False, keep=ONE) as checkpointer:
        checkpointer.restore_latest()
        checkpointer._store.lock()
        for kind in ("weights", "state"):
            (folder / StepFile(N_SAVED + 1, kind).marker).touch()
        checkpointer.save(N_SAVED + 1)
        assert checkpointer.steps() == (N_SAVED + 1,)
