"""A run whose newest steps cannot be read continues from an older one and deletes nothing."""

import errno
import os
import uuid
from pathlib import Path

import fsspec
import pytest

from ckptz import KeepPolicy
from ckptz.errors import ConfigError, WriteError
from ckptz.store.storage import LocalFolder
from tests.support.checkpointer_support import Run, flip, names_in, same, saved_run, state_of

ALL = KeepPolicy(last=9)


def resumed(folder: Path | str, until: int, **options: object) -> tuple[Run, int]:
    """Run an unattended loop: restore, train, save each step; return the run and the step it resumed from."""
    run = Run(seed=7)
    with run.checkpointer(folder, background=False, keep=ALL, **options) as checkpointer:
        first = checkpointer.restore_latest() or 0
        for step in range(first + 1, until + 1):
            run.step()
            checkpointer.save(step)
    return run, first


def contents(folder: Path, *parts: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if any(part in p.name for part in parts)}


@pytest.mark.parametrize("is_gone", [False, True], ids=["damaged", "base is gone"])
@pytest.mark.parametrize("kind", ["", ".state"])
@pytest.mark.filterwarnings("ignore:.*cannot be read:RuntimeWarning")
@pytest.mark.usefixtures("deltas_at_any_cost")
def test_an_unattended_loop_saves_again_what_it_could_not_read(
    tmp_path: Path, kind: str, is_gone: bool
) -> None:
    straight, _ = resumed(tmp_path / "straight", 5)
    folder = tmp_path / "run"
    resumed(folder, 4)
    if is_gone:  # of step 4, a delta of step 3
        (folder / f"step-00000003{kind}.ckptz").rename(tmp_path / "elsewhere")
    else:
        flip(folder / f"step-00000004{kind}.ckptz")
    damaged = contents(folder, "step-00000004")
    run, first = resumed(folder, 5)
    assert first == (2 if is_gone else 3)
    assert same(state_of(run), state_of(straight))
    aside = contents(folder, ".unreadable-1").items()
    assert aside >= {(f"{name}.unreadable-1", data) for name, data in damaged.items()}
    run, first = resumed(folder, 5)
    assert first == 5
    assert same(state_of(run), state_of(straight))


@pytest.mark.filterwarnings("ignore:.*cannot be read:RuntimeWarning")
def test_a_step_that_is_damaged_again_keeps_both(tmp_path: Path) -> None:
    saved_run(tmp_path, 2, keep=ALL)
    for n in (1, 2):
        flip(tmp_path / "step-00000002.ckptz")
        resumed(tmp_path, 2)
        assert f"step-00000002.ckptz.unreadable-{n}" in names_in(tmp_path)


@pytest.mark.filterwarnings("ignore:.*cannot be read:RuntimeWarning")
def test_only_steps_in_the_way_of_a_save_are_renamed(tmp_path: Path) -> None:
    saved_run(tmp_path, 4, keep=ALL)
    for step in (3, 4):
        flip(tmp_path / f"step-0000000{step}.state.ckptz")
    run = Run()
    with run.checkpointer(tmp_path, background=False, keep=ALL) as checkpointer:
        assert checkpointer.restore_latest() == 2
        with pytest.raises(ConfigError, match="step 1 is not after 2"):
            checkpointer.save(1)
        assert not contents(tmp_path, "unreadable")
        checkpointer.save(4)
        report = checkpointer.wait()
        assert report is not None
        assert "step 4 could not be read; its files are kept as step-00000004" in report.notes[0]
        assert checkpointer.steps() == (1, 2, 3, 4)
    assert {name[:13] for name in contents(tmp_path, "unreadable")} == {"step-00000004"}


@pytest.mark.filterwarnings("ignore:.*cannot be read:RuntimeWarning")
def test_a_disk_that_fails_while_files_are_renamed_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, 2, keep=ALL)
    flip(tmp_path / "step-00000002.ckptz")
    before, run, copy = contents(tmp_path, "step-"), Run(), LocalFolder.copy

    def fails(self: LocalFolder, name: str, new: str) -> None:
        if name == "step-00000002.ckptz":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        copy(self, name, new)

    with run.checkpointer(tmp_path, background=False, keep=ALL) as checkpointer:
        assert checkpointer.restore_latest() == 1
        with monkeypatch.context() as patched:
            patched.setattr(LocalFolder, "copy", fails)
            with pytest.raises(WriteError, match="step 2 was not saved"):
                checkpointer.save(2)
        assert contents(tmp_path, "step-").items() >= before.items()
        checkpointer.save(2)
        assert checkpointer.restore_latest() == 2


@pytest.mark.filterwarnings("ignore:.*cannot be read:RuntimeWarning")
def test_unreadable_files_are_copied_if_hard_links_are_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    saved_run(tmp_path, 2, keep=ALL)
    flip(tmp_path / "step-00000002.ckptz")
    damaged = (tmp_path / "step-00000002.ckptz").read_bytes()
    monkeypatch.setattr(os, "link", refuse)
    assert resumed(tmp_path, 2)[1] == 1
    assert (tmp_path / "step-00000002.ckptz.unreadable-1").read_bytes() == damaged


@pytest.mark.filterwarnings("ignore:.*cannot be read:RuntimeWarning")
def test_a_store_behind_a_url_keeps_what_could_not_be_read() -> None:
    url = f"memory://{uuid.uuid4()}"
    resumed(url, 2)
    name = f"{url}/step-00000002.state.ckptz"
    fs, _ = fsspec.url_to_fs(url)
    data = bytearray(fs.cat_file(name))
    data[len(data) // 2] ^= 1
    fs.pipe_file(name, bytes(data))
    assert resumed(url, 2)[1] == 1
    assert fs.cat_file(f"{name}.unreadable-1") == data
    assert resumed(url, 2)[1] == 2
