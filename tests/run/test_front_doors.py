"""Every interface that keeps a run's steps, under kills, failing calls and deletions by other programs.

The same four tests run on all interfaces. After each trial, every step that the rules keep restores exactly,
and the next save succeeds.
"""

import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptz.errors import CkptzError
from tests.support.checkpointer_support import in_child
from tests.support.fault_support import DEAD, ERRORS, Faults, all_closed, copied, die
from tests.support.front_doors import Door, door, each_door, nothing
from tests.support.kills import Reported, kill_again_and_again

N_PREPARED = 5
N_READ = 4  # number of newest steps that are read after each kill
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that share memory"),
    pytest.mark.usefixtures("deltas_at_any_cost"),
]
FEW_OR_MANY = pytest.mark.parametrize("n_trials", [3, pytest.param(200, marks=pytest.mark.slow)])
SEVERAL_OR_MANY = pytest.mark.parametrize("n_trials", [8, pytest.param(200, marks=pytest.mark.slow)])


@pytest.fixture
def at(kind: str, monkeypatch: pytest.MonkeyPatch) -> Door:
    """Return the interface; frameworks are loaded once for all processes."""
    for name, package in (
        ("trainer", "transformers"),
        ("accelerate", "accelerate"),
        ("lightning", "lightning"),
    ):
        if kind.startswith(name):
            pytest.importorskip(package)
            monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if kind.startswith("trainer"):
        pytest.importorskip("tests.support.trainer_support")
    return door(kind)


# Forked jobs train, which fails if this process has trained before: kills come first.
@each_door
@FEW_OR_MANY
def test_kills_at_random_lose_nothing_that_the_rules_keep(at: Door, tmp_path: Path, n_trials: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def job(reported: Reported, rank: int) -> None:
        def report(step: int) -> None:
            reported.step = step

        del rank
        reported.begin()
        at.save(folder, 1 << 20, report)

    # All steps are read at the end.
    n_read = min(N_READ, at.n_kept)
    kill_again_and_again(job, lambda step: at.check_steps(folder, step, n_read), n_trials, longest=0.2)

    assert in_child(lambda: at.check(folder)) == 0


@pytest.fixture
def prepared(at: Door, tmp_path: Path) -> Path:
    """Return a folder of some steps, saved through newly opened objects as a new process would."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    at.save(folder, N_PREPARED, nothing)
    at.check_steps(folder, N_PREPARED)
    return folder


def n_calls_of(work: Callable[[Path], object], prepared: Path) -> int:
    with copied(prepared) as folder, Faults(lambda *_: False, OSError, folder).installed() as counted:
        work(folder)
    assert counted.n_calls > 30
    return counted.n_calls


@each_door
@pytest.mark.parametrize("n_trials", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_process_that_ends_at_a_call_loses_nothing_that_the_rules_keep(
    at: Door, tmp_path: Path, n_trials: int
) -> None:
    """Kill at a uniformly drawn file operation rather than at a random time; half of a write is done."""
    prepared, counted, rng = tmp_path / "prepared", Reported(), random.Random(0)
    prepared.mkdir()
    assert in_child(lambda: at.save(prepared, N_PREPARED, nothing)) == 0

    def count() -> None:
        counted.step = n_calls_of(lambda folder: at.save(folder, 1, nothing), prepared)

    assert in_child(count) == 0
    for _ in range(n_trials):
        moment = rng.randrange(1, counted.step + 1)
        with copied(prepared) as folder:

            def ends(folder: Path = folder, moment: int = moment) -> None:
                with Faults(lambda n, _: n == moment, die, folder).installed():
                    at.save(folder, 1, nothing)

            assert in_child(ends) == DEAD
            assert in_child(lambda folder=folder: at.check(folder, N_PREPARED)) == 0


@each_door
@SEVERAL_OR_MANY
def test_a_call_that_fails_loses_nothing_that_the_rules_keep(at: Door, prepared: Path, n_trials: int) -> None:
    n_calls, rng = n_calls_of(lambda folder: at.save(folder, 1, nothing), prepared), random.Random(0)
    for _ in range(n_trials):
        failing, error = rng.randrange(1, n_calls + 1), rng.choice(list(ERRORS.values()))
        with copied(prepared) as folder:
            ended: BaseException | None = None
            with all_closed(), Faults(lambda n, _, at=failing: n == at, error, folder).installed():
                try:
                    at.save(folder, 1, nothing)
                except (Exception, SystemExit) as caught:
                    ended = caught
            assert at.newest(folder) == N_PREPARED + 1 or ended is not None
            at.check(folder, max(N_PREPARED, at.newest(folder)))


@each_door
@SEVERAL_OR_MANY
def test_what_others_delete_meanwhile_takes_nothing_else_along(
    at: Door, prepared: Path, n_trials: int
) -> None:
    """Delete a complete step, or any file; after the next full file the run is complete again."""
    if at.name in ("compress", "prune-files"):
        pytest.skip("nobody writes on: what was deleted is told of, and has to be made again")
    n_calls, rng = n_calls_of(lambda folder: at.save(folder, 1, nothing), prepared), random.Random(0)
    for _ in range(n_trials):
        moment = rng.randrange(1, n_calls + 1)
        with copied(prepared) as folder:
            victims = sorted(path for path in folder.rglob("*.ckptz") if path.is_file())
            if at.complete is not None:
                victims = [folder / at.complete.format(step) for step in at.steps(folder)]
            victim = rng.choice(victims)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Faults(deleting(victim, moment), OSError, folder).installed():
                    is_saved = saved(at, folder, 1 if at.complete else 4)
                is_saved |= at.complete is not None and saved(at, folder, 1)
            if is_saved:
                at.check_step(folder, at.newest(folder))
            assert is_saved or at.complete is None, "it does not go on"
            for step in at.steps(folder) if at.complete is not None else ():
                at.check_step(folder, step, must_be_exact=not at.is_lossy)


def deleting(victim: Path, moment: int) -> Callable[[int, object], bool]:
    """Return a fault function that deletes a file or folder at a call and never fails."""

    def delete(n: int, _: object) -> bool:
        if n == moment and victim.is_dir():
            shutil.rmtree(victim, ignore_errors=True)
        elif n == moment:
            victim.unlink(missing_ok=True)
        return False

    return delete


def saved(at: Door, folder: Path, n_saves: int) -> bool:
    """Save and return True if all saves succeeded; the newest step may be deleted while it is read."""
    try:
        at.save(folder, n_saves, nothing)
    except (CkptzError, OSError, RuntimeError):
        return False
    return True
