"""A process that is killed anywhere in a prune or a rebase loses no step; saves: test_front_doors.py."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptz import rebase
from ckptz.format import publish
from ckptz.run.folder import StepStore
from ckptz.run.keep import KeepPolicy
from ckptz.run.prune import prune_folder
from ckptz.run.step_files import FileKind, Listing, StepFile
from ckptz.store.lock import LOCK_NAME
from ckptz.training.state import random_state, set_random_state
from tests.support.checkpointer_support import Run, in_child, loss_after, names_in
from tests.support.fault_support import CHANGES, DEAD, Faults, die

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that share memory"),
    pytest.mark.usefixtures("deltas_at_any_cost"),
]

N_SAVED = 8
OPTIONS = {"keep": KeepPolicy(last=3), "full_every": 4}


def seen_in(folder: Path) -> frozenset[tuple[str, bytes]]:
    """Return names and contents of files, without the contents of unfinished files and the lock file."""
    return frozenset(
        ("unfinished", b"")
        if path.name.endswith(publish.TEMPORARY_SUFFIX)
        else (path.name, path.read_bytes())
        for path in folder.iterdir()
        if path.is_file() and path.name != LOCK_NAME
    )


def abort_everywhere(prepared: Path, work: Callable[[Path], object], check: Callable[[Path], None]) -> int:
    """Run `work` on copies of a folder, aborted at each change in turn; return the number of changes.

    Folders with equal contents are checked once.
    """
    at, checked = 0, set[frozenset[tuple[str, bytes]]]()
    while True:
        at += 1
        folder = prepared.with_name("aborted")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(prepared, folder, copy_function=os.link)  # no file is modified in place

        def aborted(folder: Path = folder, at: int = at) -> None:
            with Faults(lambda n, _: n == at, die, folder).installed(CHANGES):
                work(folder)

        code = in_child(aborted)
        if (contents := seen_in(folder)) not in checked:
            check(folder)
            checked.add(contents)
        if code == 0:
            return at - 1
        assert code == DEAD


def listing(folder: Path) -> Listing:
    return Listing.of(dict.fromkeys(names_in(folder), 1))


@dataclass(frozen=True)
class Prepared:
    """Folder of a run with some steps, including hidden ones, all of which resume.

    Attributes:
        folder: is not modified.
        losses: of the uninterrupted run, by step from 1 on.
        ahead: the run after the next step, which has not been saved.
        rng: random states after this step.
    """

    folder: Path
    losses: list[float]
    ahead: Run
    rng: dict[str, Any]

    def is_as_it_was(self, file: Path) -> bool:
        """Return True if a file in a copy of the folder is a hard link to the original."""
        original = self.folder / file.name
        return original.exists() and file.samefile(original)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, deltas_at_any_cost: None) -> Prepared:
    folder = tmp_path_factory.mktemp("faults") / "run"
    ahead = Run()
    with ahead.checkpointer(folder, background=False, **OPTIONS) as checkpointer:
        for step in range(1, N_SAVED + 1):
            ahead.step()
            checkpointer.save(step)
    ahead.step()
    rng = random_state()
    result = Prepared(folder, [0.0, *Run().losses(N_SAVED + 4)], ahead, rng)
    assert listing(folder).hidden
    for step in listing(folder).full_steps:
        assert loss_after(folder, step) == (step, result.losses[step + 1])
    return result


def check_resumes(folder: Path, step: int, prepared: Prepared) -> None:
    """Require that a step resumes exactly: its files are unchanged, or it is restored and compared."""
    sizes, store = listing(folder).sizes, StepStore(folder)
    kinds: tuple[FileKind, ...] = ("weights", "state")
    needed = [member for kind in kinds for member in store.chain(StepFile(step, kind), sizes)]
    assert sizes.keys() >= set(needed)
    if not all(prepared.is_as_it_was(folder / member.name) for member in needed):
        assert loss_after(folder, step) == (step, prepared.losses[step + 1])


def check_whole(folder: Path, prepared: Prepared) -> int:
    """Require that all visible steps resume exactly and the next process can save; return the newest step.

    After this save there must be no leftovers.
    """
    steps = listing(folder).full_steps
    for step in steps:
        check_resumes(folder, step, prepared)
    save_next(folder, prepared)
    files = listing(folder)
    assert not files.leftovers
    states = {file.step for file in set(files.sizes) - files.hidden if file.kind == "state"}
    assert states == set(files.weights_steps)
    return steps[-1]


def save_next(folder: Path, prepared: Prepared) -> None:
    set_random_state(prepared.rng)
    with prepared.ahead.checkpointer(folder, background=False, **OPTIONS) as checkpointer:
        checkpointer.save(checkpointer.steps()[-1] + 1)


def test_a_prune_aborted_anywhere_leaves_whole_steps(prepared: Prepared) -> None:
    def check(aborted: Path) -> None:
        twice = aborted.with_name("again")
        shutil.copytree(aborted, twice, copy_function=os.link)
        prune_folder(twice, KeepPolicy(last=1))
        assert listing(twice).full_steps == (N_SAVED,)
        assert not listing(twice).leftovers
        shutil.rmtree(twice)
        assert check_whole(aborted, prepared) == N_SAVED

    def work(folder: Path) -> None:
        prune_folder(folder, KeepPolicy(last=1))

    assert abort_everywhere(prepared.folder, work, check) > 5


def test_a_rebase_aborted_anywhere_leaves_whole_steps(prepared: Prepared) -> None:
    name, rebased = f"step-{N_SAVED:08d}.ckptz", set()

    def check(aborted: Path) -> None:
        rebased.add(not prepared.is_as_it_was(aborted / name))
        assert check_whole(aborted, prepared) == N_SAVED

    def work(folder: Path) -> None:
        rebase(folder / name, jobs=1)

    assert abort_everywhere(prepared.folder, work, check) > 3
    assert rebased == {False, True}
