"""A process that ends anywhere in a save, a prune or a rebase loses nothing but the unfinished save."""

import mmap
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptz import LOSSLESS, rebase
from ckptz.codec.method import Method
from ckptz.format import publish
from ckptz.run.folder import StepStore
from ckptz.run.keep import KeepPolicy
from ckptz.run.prune import prune, prune_folder
from ckptz.run.step_files import FileKind, Listing, StepFile
from ckptz.store.lock import LOCK_NAME
from ckptz.training.state import random_state, set_random_state
from tests.support.checkpointer_support import GRID, KEEP_TWO, Run, in_child, loss_after, names_in, saved_run
from tests.support.kills import let_run

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that share memory"),
    pytest.mark.usefixtures("deltas_at_any_cost"),
]

ABORTED = 9
N_SAVED = 8
OPTIONS = {"keep": KeepPolicy(last=3), "full_every": 4}


class Aborting:
    """Ends the process before its n-th write, fsync, rename or removal; half of a write gets through."""

    def __init__(self, at: int) -> None:
        self.left = at

    def tick(self) -> bool:
        self.left -= 1
        return self.left == 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.tick():
                os._exit(ABORTED)
            return function(*args, **kwargs)

        return wrapped

    def install(self) -> None:
        write = publish.EagerFile.write

        def halved(file: publish.EagerFile, data: Any) -> int:
            if self.tick():
                write(file, memoryview(data)[: len(data) // 2])
                os._exit(ABORTED)
            return write(file, data)

        publish.EagerFile.write = halved
        for name in ("fsync", "replace", "unlink"):
            setattr(os, name, self.wrap(getattr(os, name)))


def seen_in(folder: Path) -> frozenset[tuple[str, bytes]]:
    """Names and contents of files but for those that nobody reads: unfinished ones, and who held the lock."""
    return frozenset(
        ("unfinished", b"")
        if path.name.endswith(publish.TEMPORARY_SUFFIX)
        else (path.name, path.read_bytes())
        for path in folder.iterdir()
        if path.is_file() and path.name != LOCK_NAME
    )


def abort_everywhere(prepared: Path, work: Callable[[Path], object], check: Callable[[Path], None]) -> int:
    """Do `work` on copies of a folder, aborted at each place in turn; how many places there are.

    What is left is checked once, wherever it is left again in the same state.
    """
    at, checked = 0, set[frozenset[tuple[str, bytes]]]()
    while True:
        at += 1
        folder = prepared.with_name("aborted")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(prepared, folder, copy_function=os.link)  # nothing is written to in place

        def aborted(folder: Path = folder, at: int = at) -> None:
            Aborting(at).install()
            work(folder)

        code = in_child(aborted)
        if (left := seen_in(folder)) not in checked:
            check(folder)
            checked.add(left)
        if code == 0:
            return at - 1
        assert code == ABORTED


def listing(folder: Path) -> Listing:
    return Listing.of(dict.fromkeys(names_in(folder), 1))


@dataclass(frozen=True)
class Prepared:
    """A folder with some steps, hidden ones among them, all of which resume.

    Attributes:
        folder: nothing in it is written to.
        losses: of the run that goes on, the first one at index 1.
        ahead: the run after its next step, which is to be saved.
        rng: random numbers of that time.
    """

    folder: Path
    losses: list[float]
    ahead: Run
    rng: dict[str, Any]

    def is_as_it_was(self, file: Path) -> bool:
        """Whether a file of a copy of the folder is the very file, whose content nobody has to look at."""
        mine = self.folder / file.name
        return mine.exists() and file.samefile(mine)


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
    found = Prepared(folder, [0.0, *Run().losses(N_SAVED + 4)], ahead, rng)
    assert listing(folder).hidden
    for step in listing(folder).full_steps:
        assert loss_after(folder, step) == (step, found.losses[step + 1])
    return found


def check_resumes(folder: Path, step: int, prepared: Prepared) -> None:
    """A step resumes exactly: all files that it needs are as they were, or it is restored."""
    sizes, store = listing(folder).sizes, StepStore(folder)
    kinds: tuple[FileKind, ...] = ("weights", "state")
    needed = [member for kind in kinds for member in store.chain(StepFile(step, kind), sizes)]
    assert sizes.keys() >= set(needed)
    if not all(prepared.is_as_it_was(folder / member.name) for member in needed):
        assert loss_after(folder, step) == (step, prepared.losses[step + 1])


def check_whole(folder: Path, prepared: Prepared) -> int:
    """Every step that can be seen resumes exactly, and the next process goes on; the newest step.

    It saves, and leaves nothing behind that does not belong there.
    """
    steps = listing(folder).full_steps
    for step in steps:
        check_resumes(folder, step, prepared)
    save_next(folder, prepared)
    found = listing(folder)
    assert not found.leftovers
    states = {file.step for file in set(found.sizes) - found.hidden if file.kind == "state"}
    assert states == set(found.weights_steps)
    return steps[-1]


def save_next(folder: Path, prepared: Prepared) -> None:
    set_random_state(prepared.rng)
    with prepared.ahead.checkpointer(folder, background=False, **OPTIONS) as checkpointer:
        checkpointer.save(checkpointer.steps()[-1] + 1)


def test_a_save_aborted_anywhere_loses_only_itself(prepared: Prepared) -> None:
    newest = set()

    def check(aborted: Path) -> None:
        steps = listing(aborted).full_steps
        assert steps[-2:] in ((N_SAVED - 1, N_SAVED), (N_SAVED, N_SAVED + 1))
        newest.add(check_whole(aborted, prepared))

    n_places = abort_everywhere(prepared.folder, lambda path: save_next(path, prepared), check)
    assert newest == {N_SAVED, N_SAVED + 1}
    assert n_places > 12


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


# --- lossy files with an exact newest step -------------------------------------------------------------


HEAD_OPTIONS: dict[str, Any] = {"keep": KeepPolicy(last=1), "full_every": 4, "config": GRID}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A folder with two lossy steps, of which the newer one is exact."""
    folder = tmp_path_factory.mktemp("heads") / "run"
    ahead = Run()
    with ahead.checkpointer(folder, background=False, **HEAD_OPTIONS) as checkpointer:
        for step in (1, 2):
            ahead.step()
            checkpointer.save(step)
    ahead.step()
    rng = random_state()
    return Prepared(folder, [0.0, *Run().losses(4)], ahead, rng)


def test_a_save_aborted_anywhere_leaves_an_exact_newest_step(head: Prepared) -> None:
    newest = set()

    def save(folder: Path) -> None:
        set_random_state(head.rng)
        with head.ahead.checkpointer(folder, background=False, **HEAD_OPTIONS) as checkpointer:
            checkpointer.save(3)

    def check(aborted: Path) -> None:
        step = listing(aborted).full_steps[-1]
        newest.add(step)
        assert loss_after(aborted) == (step, head.losses[step + 1])
        store = StepStore(aborted)
        store.lock()
        prune(store, HEAD_OPTIONS["keep"])
        store.close()
        found = listing(aborted)
        assert not found.leftovers
        assert {file.step for file in found.sizes if file.is_exact} == {step} == set(found.full_steps)

    assert abort_everywhere(head.folder, save, check) > 12
    assert newest == {2, 3}


# --- SIGKILL ------------------------------------------------------------------------------------


def train_until_killed(folder: Path, done: mmap.mmap, config: Method) -> None:
    """Save every step in the background; `done` holds the last that was said to be complete, and a one."""
    run = Run(seed=7)
    checkpointer = run.checkpointer(folder, keep=KEEP_TWO, full_every=3, config=config)
    step = checkpointer.restore_latest() or 0
    done[8] = 1
    while True:
        run.step()
        step += 1
        report = checkpointer.wait()
        if report is not None:
            done[:8] = report.step.to_bytes(8, "little")
        checkpointer.save(step)


@pytest.mark.parametrize("config", [LOSSLESS, GRID], ids=["lossless", "exact newest step"])
@pytest.mark.slow  # a few kills of every front door stand in test_front_doors.py
def test_kills_lose_nothing_that_was_complete(tmp_path: Path, config: Method) -> None:
    """The newest step is exact after each kill, and without loss every other, too."""
    n_kills, rng = 200, random.Random(0)
    losses = [0.0, *Run().losses(60 * n_kills)]
    done = mmap.mmap(-1, 9)
    saved_run(tmp_path, 1, keep=KEEP_TWO, full_every=3, config=config)
    n_unfinished = 0
    for _ in range(n_kills):
        done[8] = 0
        child = os.fork()
        if child == 0:
            try:
                train_until_killed(tmp_path, done, config)
            finally:
                os._exit(1)
        while not done[8]:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
            time.sleep(0.001)
        let_run(child, rng.uniform(0, 0.08))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = listing(tmp_path)
        n_unfinished += bool(found.leftovers)
        newest = found.full_steps[-1]
        assert newest >= int.from_bytes(done[:8], "little")
        for step in found.full_steps:
            is_exact = step == newest or not config.is_lossy
            with warnings.catch_warnings():
                if not is_exact:  # it may have been killed between the removals of a step's two residuals
                    warnings.simplefilter("ignore", RuntimeWarning)
                assert loss_after(tmp_path, step)[1] == losses[step + 1] or not is_exact
        # Two kept steps and their bases; a chain of three that was to be removed; one in the making; and the
        # residuals of two steps.
        assert len(found.sizes) <= 2 * (2 + 2 + 3 + 1 + 2 * config.is_lossy), "files of killed saves are left"
    assert n_unfinished > n_kills // 10, "too few were killed while they wrote"
