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


def a_model(value: float) -> torch.nn.Module:
    model = torch.nn.Linear(40, 40)
    with torch.no_grad():
        model.weight.copy_(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)) + value)
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a run of each kind, each with the same number of steps."""
    made = {}
    for name, config in CONFIGS.items():
        folder = made[name] = tmp_path_factory.mktemp(name) / "run"
        for step in range(1, N_STEPS + 1):
            with Checkpointer(folder, a_model(step / 100), config=config, keep=KEEP, jobs=1) as checkpointer:
                checkpointer.save(step)
    return made


def forge(path: Path, value: str) -> None:
    with contextlib.suppress(CkptzError):  # damaged before
        amend_metadata(path, {POSITION_KEY: value})


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_link(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)


def as_another(path: Path, other: Path) -> None:
    path.unlink()
    shutil.copyfile(other, path)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_hard_link(path: Path, to: Path) -> None:
    path.unlink()
    os.link(to, path)


PRECIOUS, OF_A_RUN = "precious.txt", "of-a-run.ckptz"  # in the folder outside
CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "removed": lambda path, outside: path.unlink(),
    "empty": lambda path, outside: path.write_bytes(b""),
    "cut": lambda path, outside: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte less": lambda path, outside: path.write_bytes(path.read_bytes()[:-1]),
    "a bit flipped": lambda path, outside: path.write_bytes(path.read_bytes()[:-9] + bytes(9)),
    "noise": lambda path, outside: path.write_bytes(bytes(range(256)) * 8),
    "another's": lambda path, outside: as_another(path, outside / OF_A_RUN),
    "a folder": lambda path, outside: as_folder(path),
    "a pipe": lambda path, outside: as_pipe(path),
    "a link out": lambda path, outside: as_link(path, outside / PRECIOUS),
    "a link to a run": lambda path, outside: as_link(path, outside / OF_A_RUN),
    "a link to a folder": lambda path, outside: as_link(path, outside),
    "a link to nothing": lambda path, outside: as_link(path, Path("nowhere")),
    "a link to itself": lambda path, outside: as_link(path, path),
    "a hard link": lambda path, outside: as_hard_link(path, outside / PRECIOUS),
    "unreadable": lambda path, outside: path.chmod(0),
    "position 0": lambda path, outside: forge(path, "0"),
    "position 3": lambda path, outside: forge(path, "3"),
    "position 999999999": lambda path, outside: forge(path, "999999999"),
    "position nothing": lambda path, outside: forge(path, "x"),
    "older": lambda path, outside: os.utime(path, (1, 1)),
}
changes = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(sorted(CHANGES))), min_size=1, max_size=8)
OTHERS = (
    *("step-7.ckptz", "notes.txt", "base-x-y.ckptz", ".ckptz-lease", ".x.ckptz-tmp", "step-99999999.ckptz"),
    *("step-00000009.state.ckptz", "step-00000009.exact-0123456789abcdef.ckptz", "step-00000003.exact.ckptz"),
    *(".step-00000009.ckptz.hidden", ".step-0123abcd-999999999-0123456789abcdef.ckptz-tmp"),
)
foreign_files = st.dictionaries(
    st.sampled_from(OTHERS), st.sampled_from(["text", "a folder", "a link out"]), max_size=3
)


def put(path: Path, kind: str, outside: Path) -> None:
    path.touch()
    if kind == "text":
        path.write_bytes(b"something")
    else:
        CHANGES[kind](path, outside)


def state_of(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in folder.iterdir()
    }


def call_all(run: Path, config: Any) -> None:
    """Require that each call succeeds or raises a CkptzError or an OSError."""
    with Checkpointer(run, a_model(0.0), config=config, keep=KEEP, jobs=1) as checkpointer:
        calls: list[Callable[[], object]] = [lambda: ckptz.log(run), checkpointer.restore_latest]
        calls += [lambda step=step: checkpointer.restore(step) for step in checkpointer.weights_steps()]
        for call in calls:
            with contextlib.suppress(CkptzError, OSError):
                call()
    for call in (lambda: ckptz.verify(run), lambda: ckptz.prune(run, KEEP, dry_run=True)):
        with contextlib.suppress(CkptzError, OSError):
            call()


def check_folder(
    source: Path, config: Any, made: list[tuple[int, str]], added: dict[str, str], folder: Path
) -> None:
    run, outside = folder / "run", folder / "outside"
    shutil.copytree(source, run, symlinks=True)
    outside.mkdir()
    (outside / PRECIOUS).write_bytes(b"precious")
    files = sorted(path for path in run.iterdir() if path.name != LOCK_NAME)
    shutil.copyfile(files[len(files) // 2], outside / OF_A_RUN)
    for number, change in made:
        path = files[number % len(files)]
        if path.is_file() and not path.is_symlink():
            CHANGES[change](path, outside)
    for name, kind in added.items():
        if not os.path.lexists(run / name):
            put(run / name, kind, outside)
    before = state_of(outside)
    call_all(run, config)
    for value in (0.5, 0.7):
        model = a_model(value)
        with Checkpointer(run, model, config=config, keep=KEEP, jobs=1) as checkpointer:
            step = max(checkpointer.weights_steps(), default=0) + 10
            if step > 99_999_999:
                break
            checkpointer.save(step)
        restored = a_model(0.0)
        with Checkpointer(run, restored, config=config, keep=KEEP, jobs=1) as checkpointer:
            assert checkpointer.restore_latest() == step
        assert torch.equal(restored.weight, model.weight)  # exact, whatever happened to its base
    call_all(run, config)
    with contextlib.suppress(CkptzError, OSError):
        ckptz.prune(run, KEEP)
    assert state_of(outside) == before


def check_folders(n: int, source: Path, config: Any, tmp_path: Path) -> None:
    @given(made=changes, added=foreign_files)
    @settings(max_examples=n, deadline=None, derandomize=n < 100, database=None)
    def check(made: list[tuple[int, str]], added: dict[str, str]) -> None:
        folder = tmp_path / str(time.monotonic_ns())
        folder.mkdir()
        check_folder(source, config, made, added, folder)
        shutil.rmtree(folder)

    check()


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("n", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_next_save_succeeds(name: str, n: int, runs: dict[str, Path], tmp_path: Path) -> None:
    check_folders(n, runs[name], CONFIGS[name], tmp_path)


# --- single cases --------------------------------------------------------------------------------------


def test_a_chain_without_its_full_file_is_followed_by_a_full_file(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["grid"], run)
    for path in run.glob("step-00000001*"):
        path.unlink()
    with Checkpointer(run, a_model(0.5), config=CONFIGS["grid"], keep=KEEP, jobs=1) as checkpointer:
        checkpointer.save(10)
        notes = checkpointer.wait().notes
    assert any("stored as a full file, because the base cannot be read" in note for note in notes)


@pytest.mark.parametrize("to", ["../precious.txt", "../nothing"])
def test_a_lock_that_is_a_link_is_refused(to: str, tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious.txt"
    run.mkdir()
    precious.write_text("precious")
    (run / LOCK_NAME).symlink_to(to)
    with pytest.raises(ConfigError, match="a link"):
        Checkpointer(run, a_model(0)).save(1)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_no_file_is_refused_at_once(make: Any, tmp_path: Path) -> None:
    make(tmp_path / LOCK_NAME)
    with pytest.raises(ConfigError, match="remove it"):
        Checkpointer(tmp_path, a_model(0)).save(1)


def test_a_lock_with_another_name_is_not_written_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    (tmp_path / "run").mkdir()
    os.link(precious, tmp_path / "run" / LOCK_NAME)
    FileLock(tmp_path / "run").release()
    assert precious.read_text() == "precious"


def test_a_spool_removes_nothing_that_another_has_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    victim, theirs = tmp_path / "victim", tmp_path / "tmp" / f"{PREFIX}theirs"
    for folder in (victim, theirs.parent):
        folder.mkdir()
    (victim / LOCK_NAME).touch()
    (victim / "precious").touch()
    (theirs.parent / f"{PREFIX}link").symlink_to(victim)
    theirs.mkdir()
    (theirs / LOCK_NAME).touch()
    os.chown(theirs, 12345, -1)
    Spool().close()
    assert (victim / "precious").exists()
    assert theirs.exists()


def test_a_renamed_folder_is_said_to_be(tmp_path: Path) -> None:
    reports: list[Any] = []
    with Checkpointer(tmp_path / "run", a_model(0), background=False, on_save=reports.append) as checkpointer:
        checkpointer.save(1)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        checkpointer.save(2)
        checkpointer.save(3)
    is_reported = [any("was renamed or removed" in note for note in report.notes) for report in reports]
    assert is_reported == [False, True, False]
    assert Checkpointer(tmp_path / "elsewhere", a_model(0)).steps() == (1,)


def test_a_lock_that_is_removed_during_a_save_costs_nobody_his_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StepStore.publishing

    def write(*args: Any, **options: Any) -> Any:
        (tmp_path / LOCK_NAME).unlink()
        time.sleep(0.3)
        return real(*args, **options)

    with Checkpointer(tmp_path, a_model(0)) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(StepStore, "publishing", write)
            checkpointer.save(1)
            with pytest.raises(OSError, match="was removed"):
                checkpointer.save(2)  # waits for the first
        checkpointer.save(2)
    assert checkpointer.steps() == (2,)


def test_a_step_that_is_left_stays_exact_while_later_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever `discard_after` is interrupted, the newest remaining step is exact."""
    n_removed = 0
    grid: dict[str, Any] = {"config": CONFIGS["grid"], "jobs": 1}
    while True:
        folder = tmp_path / str(n_removed)
        for step in range(1, 5):
            with Checkpointer(folder, a_model(step), keep=KeepPolicy(exact=3), **grid) as checkpointer:
                checkpointer.save(step)
        left = [n_removed]

        def unlink(self: Path, missing_ok: bool = False, left: list[int] = left) -> None:
            if self.suffix == ".ckptz" and not left[0]:
                raise KeyboardInterrupt
            left[0] -= self.suffix == ".ckptz"
            UNLINK(self, missing_ok=missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            checkpointer = Checkpointer(folder, a_model(0), **grid)
            is_whole = True
            try:
                checkpointer.discard_after(2)
            except KeyboardInterrupt:
                is_whole = False
            checkpointer.close()
        model = a_model(0)
        with Checkpointer(folder, model, **grid) as checkpointer:
            newest = checkpointer.restore_latest()
            assert checkpointer.restored.is_exact
        assert torch.equal(model.weight, a_model(newest or 0).weight)
        if is_whole:
            break
        n_removed += 1
    assert n_removed >= 6


def test_what_a_killed_process_left_is_known_by_its_name(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal; from ckptz.format.publish import publish\n"
        "with publish(sys.argv[1]) as file:\n"
        "    file.write(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.ckptz")], check=False)
    [left] = abandoned(tmp_path)
    assert left.name.endswith(TEMPORARY_SUFFIX)
    with publish(tmp_path / "y.ckptz"):
        assert abandoned(tmp_path) == [left]  # but no file of a running process
    write_plain(tmp_path / "a.safetensors", {"x": ("F32", (3,), bytes(12))})
    write_plain(tmp_path / "b.safetensors", {"x": ("F32", (3,), bytes(12))})
    both = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    cli("compress", *both, "--chain", "--resume", "--jobs", 1)
    assert not abandoned(tmp_path)
