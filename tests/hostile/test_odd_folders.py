"""Run folders with odd contents: saves succeed, other calls may raise errors, nothing outside changes."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptz
from ckptz import Checkpointer, Grid, KeepPolicy
from ckptz.errors import CkptzError, ConfigError
from ckptz.format.publish import abandoned, publish
from ckptz.format.suffixes import TEMPORARY_SUFFIX
from ckptz.format.written import amend_metadata
from ckptz.run.folder import StepStore
from ckptz.run.step_files import POSITION_KEY
from ckptz.store.lock import LOCK_NAME, PREFIX, FileLock, Spool
from tests.support.cli_support import ckptz as cli
from tests.support.cli_support import write_plain

KEEP = KeepPolicy(last=4)
CONFIGS: dict[str, Any] = {"lossless": ckptz.LOSSLESS, "grid": Grid(min_elements=1)}
N_STEPS = 6
UNLINK = Path.unlink


def model_of(value: float) -> torch.nn.Module:
    """Return a linear layer [40, 40] whose weights are fixed random numbers plus `value`."""
    model = torch.nn.Linear(40, 40)
    with torch.no_grad():
        model.weight.copy_(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)) + value)
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a run of N_STEPS steps with each configuration, and return the folders by its name."""
    folders = {}
    for name, config in CONFIGS.items():
        folder = folders[name] = tmp_path_factory.mktemp(name) / "run"
        for step in range(1, N_STEPS + 1):
            with Checkpointer(folder, model_of(step / 100), config=config, keep=KEEP, jobs=1) as checkpointer:
                checkpointer.save(step)
    return folders


def set_position(path: Path, value: str) -> None:
    with contextlib.suppress(CkptzError):  # the file may be damaged by an earlier change
        amend_metadata(path, {POSITION_KEY: value})


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def replace_by_copy(path: Path, source: Path) -> None:
    path.unlink()
    shutil.copyfile(source, path)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_hard_link(path: Path, target: Path) -> None:
    path.unlink()
    os.link(target, path)


PRECIOUS, OF_A_RUN = "precious.txt", "of-a-run.ckptz"  # files in a folder outside of the run
# Changes of a file of the run, by functions of its path and the outside folder.
CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "removed": lambda path, outside: path.unlink(),
    "empty": lambda path, outside: path.write_bytes(b""),
    "cut": lambda path, outside: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte less": lambda path, outside: path.write_bytes(path.read_bytes()[:-1]),
    "a bit flipped": lambda path, outside: path.write_bytes(path.read_bytes()[:-9] + bytes(9)),
    "noise": lambda path, outside: path.write_bytes(bytes(range(256)) * 8),
    "another step": lambda path, outside: replace_by_copy(path, outside / OF_A_RUN),
    "a folder": lambda path, outside: replace_by_folder(path),
    "a pipe": lambda path, outside: replace_by_pipe(path),
    "a link out": lambda path, outside: replace_by_link(path, outside / PRECIOUS),
    "a link to a run": lambda path, outside: replace_by_link(path, outside / OF_A_RUN),
    "a link to a folder": lambda path, outside: replace_by_link(path, outside),
    "a link to nothing": lambda path, outside: replace_by_link(path, Path("nowhere")),
    "a link to itself": lambda path, outside: replace_by_link(path, path),
    "a hard link": lambda path, outside: replace_by_hard_link(path, outside / PRECIOUS),
    "unreadable": lambda path, outside: path.chmod(0),
    "position 0": lambda path, outside: set_position(path, "0"),
    "position 3": lambda path, outside: set_position(path, "3"),
    "position 999999999": lambda path, outside: set_position(path, "999999999"),
    "position x": lambda path, outside: set_position(path, "x"),
    "older": lambda path, outside: os.utime(path, (1, 1)),
}
# Pairs of a file's number in the run, modulo the number of files, and its change.
changes = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(sorted(CHANGES))), min_size=1, max_size=8)
FOREIGN_NAMES = (
    *("step-7.ckptz", "notes.txt", "base-x-y.ckptz", ".ckptz-lease", ".x.ckptz-tmp", "step-99999999.ckptz"),
    *("step-00000009.state.ckptz", "step-00000009.exact-0123456789abcdef.ckptz", "step-00000003.exact.ckptz"),
    *(".step-00000009.ckptz.hidden", ".step-0123abcd-999999999-0123456789abcdef.ckptz-tmp"),
)
foreign_files = st.dictionaries(
    st.sampled_from(FOREIGN_NAMES), st.sampled_from(["text", "a folder", "a link out"]), max_size=3
)


def state_of(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return content, modification time in ns and mode of each file in a folder."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in folder.iterdir()
    }


def read_run(run: Path, config: Any) -> None:
    """Call functions that read a run; each must succeed or raise a CkptzError or an OSError."""
    with Checkpointer(run, model_of(0.0), config=config, keep=KEEP, jobs=1) as checkpointer:
        calls: list[Callable[[], object]] = [lambda: ckptz.log(run), checkpointer.restore_latest]
        calls += [lambda step=step: checkpointer.restore(step) for step in checkpointer.weights_steps()]
        for call in calls:
            with contextlib.suppress(CkptzError, OSError):
                call()
    for call in (lambda: ckptz.verify(run), lambda: ckptz.prune(run, KEEP, dry_run=True)):
        with contextlib.suppress(CkptzError, OSError):
            call()


def check_folder(
    source: Path, config: Any, changed: list[tuple[int, str]], added: dict[str, str], folder: Path
) -> None:
    """Change a copy of a run, then require that saves succeed and that nothing outside of it changes."""
    run, outside = folder / "run", folder / "outside"
    shutil.copytree(source, run, symlinks=True)
    outside.mkdir()
    (outside / PRECIOUS).write_bytes(b"precious")
    files = sorted(path for path in run.iterdir() if path.name != LOCK_NAME)
    shutil.copyfile(files[len(files) // 2], outside / OF_A_RUN)
    for number, change in changed:
        path = files[number % len(files)]
        if path.is_file() and not path.is_symlink():
            CHANGES[change](path, outside)
    for name, kind in added.items():
        path = run / name
        if not os.path.lexists(path):
            path.write_bytes(b"something" if kind == "text" else b"")
            if kind != "text":
                CHANGES[kind](path, outside)
    before = state_of(outside)
    read_run(run, config)
    for value in (0.5, 0.7):
        model = model_of(value)
        with Checkpointer(run, model, config=config, keep=KEEP, jobs=1) as checkpointer:
            step = max(checkpointer.weights_steps(), default=0) + 10
            if step > 99_999_999:
                break
            checkpointer.save(step)
        restored = model_of(0.0)
        with Checkpointer(run, restored, config=config, keep=KEEP, jobs=1) as checkpointer:
            assert checkpointer.restore_latest() == step
        assert torch.equal(restored.weight, model.weight)  # exact, whatever damage its base has
    read_run(run, config)
    with contextlib.suppress(CkptzError, OSError):
        ckptz.prune(run, KEEP)
    assert state_of(outside) == before


def check_folders(n: int, source: Path, config: Any, tmp_path: Path) -> None:
    @given(changed=changes, added=foreign_files)
    @settings(max_examples=n, deadline=None, derandomize=n < 100, database=None)
    def check(changed: list[tuple[int, str]], added: dict[str, str]) -> None:
        folder = tmp_path / str(time.monotonic_ns())
        folder.mkdir()
        check_folder(source, config, changed, added, folder)
        shutil.rmtree(folder)

    check()


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("n", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_saves_succeed_in_folders_with_damaged_and_foreign_files(
    name: str, n: int, runs: dict[str, Path], tmp_path: Path
) -> None:
    check_folders(n, runs[name], CONFIGS[name], tmp_path)


# --- single cases --------------------------------------------------------------------------------------


def test_a_chain_without_its_full_file_is_followed_by_a_full_file(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["grid"], run)
    for path in run.glob("step-00000001*"):
        path.unlink()
    with Checkpointer(run, model_of(0.5), config=CONFIGS["grid"], keep=KEEP, jobs=1) as checkpointer:
        checkpointer.save(10)
        notes = checkpointer.wait().notes
    assert any("stored as a full file, because the base cannot be read" in note for note in notes)


@pytest.mark.parametrize("target", ["../precious.txt", "../nothing"])
def test_a_lock_that_is_a_link_is_refused(target: str, tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious.txt"
    run.mkdir()
    precious.write_text("precious")
    (run / LOCK_NAME).symlink_to(target)
    with pytest.raises(ConfigError, match="a link"):
        Checkpointer(run, model_of(0)).save(1)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_a_pipe_or_folder_is_refused(make: Any, tmp_path: Path) -> None:
    make(tmp_path / LOCK_NAME)
    with pytest.raises(ConfigError, match="remove it"):
        Checkpointer(tmp_path, model_of(0)).save(1)


def test_a_lock_that_is_a_hard_link_is_not_written_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    (tmp_path / "run").mkdir()
    os.link(precious, tmp_path / "run" / LOCK_NAME)
    FileLock(tmp_path / "run").release()
    assert precious.read_text() == "precious"


def test_a_spool_removes_no_links_and_no_folders_of_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, linked = tmp_path / "tmp", tmp_path / "linked"
    foreign = temporary / f"{PREFIX}foreign"
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for folder in (linked, temporary, foreign):
        folder.mkdir()
    (linked / LOCK_NAME).touch()
    (linked / "precious").touch()
    (temporary / f"{PREFIX}link").symlink_to(linked)
    (foreign / LOCK_NAME).touch()
    os.chown(foreign, 12345, -1)
    Spool().close()
    assert (linked / "precious").exists()
    assert foreign.exists()


def test_a_renamed_folder_is_reported_once(tmp_path: Path) -> None:
    reports: list[Any] = []
    options: dict[str, Any] = {"background": False, "on_save": reports.append}
    with Checkpointer(tmp_path / "run", model_of(0), **options) as checkpointer:
        checkpointer.save(1)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        checkpointer.save(2)
        checkpointer.save(3)
    is_reported = [any("was renamed or removed" in note for note in report.notes) for report in reports]
    assert is_reported == [False, True, False]
    assert Checkpointer(tmp_path / "elsewhere", model_of(0)).steps() == (1,)


def test_a_save_whose_lock_is_removed_fails_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing = StepStore.publishing

    def remove_lock_and_publish(*args: Any, **options: Any) -> Any:
        (tmp_path / LOCK_NAME).unlink()
        time.sleep(0.3)
        return publishing(*args, **options)

    with Checkpointer(tmp_path, model_of(0)) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(StepStore, "publishing", remove_lock_and_publish)
            checkpointer.save(1)
            with pytest.raises(OSError, match="was removed"):
                checkpointer.save(2)  # waits for the first save, and raises its error
        checkpointer.save(2)
    assert checkpointer.steps() == (2,)


def test_the_newest_step_is_exact_after_an_interrupted_discard_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`discard_after` is interrupted before each of its deletions in turn, until it completes."""
    n_removed = 0
    grid: dict[str, Any] = {"config": CONFIGS["grid"], "jobs": 1}
    while True:
        folder = tmp_path / str(n_removed)
        for step in range(1, 5):
            with Checkpointer(folder, model_of(step), keep=KeepPolicy(exact=3), **grid) as checkpointer:
                checkpointer.save(step)
        n_left = [n_removed]  # deletions until the interrupt

        def unlink(self: Path, missing_ok: bool = False, n_left: list[int] = n_left) -> None:
            if self.suffix == ".ckptz" and not n_left[0]:
                raise KeyboardInterrupt
            n_left[0] -= self.suffix == ".ckptz"
            UNLINK(self, missing_ok=missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            checkpointer = Checkpointer(folder, model_of(0), **grid)
            is_complete = True
            try:
                checkpointer.discard_after(2)
            except KeyboardInterrupt:
                is_complete = False
            checkpointer.close()
        model = model_of(0)
        with Checkpointer(folder, model, **grid) as checkpointer:
            newest = checkpointer.restore_latest()
            assert checkpointer.restored.is_exact
        assert torch.equal(model.weight, model_of(newest or 0).weight)
        if is_complete:
            break
        n_removed += 1
    assert n_removed >= 6


def test_temporary_files_of_killed_processes_are_recognized_and_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal; from ckptz.format.publish import publish\n"
        "with publish(sys.argv[1]) as file:\n"
        "    file.write(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.ckptz")], check=False)
    [temporary] = abandoned(tmp_path)
    assert temporary.name.endswith(TEMPORARY_SUFFIX)
    with publish(tmp_path / "y.ckptz"):  # this process runs, so its temporary file is not abandoned
        assert abandoned(tmp_path) == [temporary]
    steps = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in steps:
        write_plain(path, {"x": ("F32", (3,), bytes(12))})
    cli("compress", *steps, "--chain", "--resume", "--jobs", 1)
    assert not abandoned(tmp_path)
