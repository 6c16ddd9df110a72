"""Files appear whole, together where they belong together, and no wider open than what they stand for."""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptz.errors import ConfigError
from ckptz.format import publish as publish_module
from ckptz.format.byte_source import path_of
from ckptz.format.publish import Publication, make_folder, publish, publish_together, sync_folder
from ckptz.torch import load_file, save_file
from tests.support.cli_support import Chain, a_state, ckptz, hf_folder, temporaries, write_plain


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    previous = os.umask(0o022)
    yield
    os.umask(previous)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write(path: Path, *like: Path) -> None:
    with publish(path, like) as file:
        file.write(b"new")


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert mode_of(tmp_path / "a") == 0o644


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o640, 0o640), (0o777, 0o644)])
def test_a_replaced_file_keeps_its_mode_within_the_umask(mode: int, expected: int, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "a").chmod(mode)
    (tmp_path / "b").touch()
    write(tmp_path / "a", tmp_path / "b")
    assert mode_of(tmp_path / "a") == expected


def test_a_new_file_is_as_open_as_all_that_it_is_like(tmp_path: Path) -> None:
    for name, mode in (("a", 0o640), ("b", 0o604)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    write(tmp_path / "c", tmp_path / "a", tmp_path / "b")
    assert mode_of(tmp_path / "c") == 0o600


def test_the_temporary_file_is_no_wider_open(tmp_path: Path) -> None:
    (tmp_path / "a").touch(0o600)
    with publish(tmp_path / "b", [tmp_path / "a"]):
        assert [mode_of(path) for path in temporaries(tmp_path)] == [0o600]


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077], ids=oct)
def test_whatever_is_written_has_the_mode_that_opening_a_new_file_gives(mask: int, tmp_path: Path) -> None:
    os.umask(mask)  # the fixture puts the old one back
    source, packed = tmp_path / "m.safetensors", tmp_path / "m.ckptz"
    write_plain(source, a_state(n=200))
    ckptz("compress", source)
    ckptz("compress", source, "-o", tmp_path / "delta.ckptz", "--base", packed)
    ckptz("restore", packed, "-o", tmp_path / "back.safetensors")
    ckptz("rebase", packed, "-o", tmp_path / "alone.ckptz")
    save_file(load_file(packed), tmp_path / "saved.ckptz", base=packed)
    (tmp_path / "new").open("w").close()
    found = {path.name: mode_of(path) for path in tmp_path.iterdir()}
    assert set(found) >= {"m.ckptz", "delta.ckptz", "back.safetensors", "alone.ckptz", "saved.ckptz", "new"}
    assert set(found.values()) == {0o666 & ~mask}


def test_conversions_pass_on_the_mode_of_their_input(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "m.safetensors", a_state(n=200))
    source.chmod(0o600)
    packed, back = tmp_path / "m.ckptz", tmp_path / "back.safetensors"
    ckptz("compress", source)
    ckptz("restore", packed, "-o", back)
    assert mode_of(packed) == mode_of(back) == 0o600
    ckptz("rebase", packed, "-o", tmp_path / "alone.ckptz")
    assert mode_of(tmp_path / "alone.ckptz") == 0o600


def test_folders_pass_on_the_modes_of_their_files(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hub")
    (folder / "model-00002-of-00002.safetensors").chmod(0o640)
    (folder / "config.json").chmod(0o600)
    ckptz("compress", folder, "-o", tmp_path / "packed")
    ckptz("restore", tmp_path / "packed" / "model.ckptz", "-o", tmp_path / "back")
    found = {path.name: mode_of(path) for path in (tmp_path / "back").rglob("*.*")}
    assert mode_of(tmp_path / "packed" / "model.ckptz") == 0o640
    assert {mode for name, mode in found.items() if name.startswith("model")} == {0o640}
    assert (found["config.json"], found["vocab.txt"]) == (0o600, 0o644)


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    target = tmp_path / ("x" * 255)
    write(target)
    assert target.read_bytes() == b"new"


def test_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def write_one_of_two() -> None:
        with publish_together() as files:
            with files.file(tmp_path / "a") as sink:
                sink.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_one_of_two()
    assert (tmp_path / "a").read_text() == "old"
    assert temporaries(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="a system that takes no advice")
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_long_file_is_stored_while_it_is_written(
    is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []

    def advise(descriptor: int, begin: int, n_bytes: int, advice: int) -> None:
        begun.append((begin, n_bytes))
        if not is_taken:
            raise OSError(errno.ENOSYS, "no advice")

    monkeypatch.setattr("ckptz.format.publish.EAGER_BYTES", 1 << 16)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    data = np.random.default_rng(0).bytes(300_000)
    with publish(tmp_path / "long") as file:
        file.seek(1000)
        for at in range(0, len(data), 30_000):
            file.write(data[at : at + 30_000])
        file.seek(0)
        file.write(bytes(1000))
    assert (tmp_path / "long").read_bytes() == bytes(1000) + data
    assert [begin for begin, _ in begun] == [0, *itertools.accumulate(n for _, n in begun[:-1])]
    assert all(1 << 16 <= n < (1 << 16) + 31_000 for _, n in begun)
    assert sum(n for _, n in begun) > 200_000


FAILS = dict.fromkeys((errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM), False)
FAILS |= dict.fromkeys((errno.EIO, errno.ENOSPC), True)


@pytest.mark.parametrize(("code", "fails"), FAILS.items())
def test_a_folder_that_cannot_be_synced_is_an_error_only_if_its_disk_fails(
    code: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(code)) if fails else contextlib.nullcontext():
        sync_folder(tmp_path)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [a_pipe, a_link_to_nothing, a_link_to_a_device, Path.mkdir])
@pytest.mark.parametrize("options", [[], ["--force"]])
def test_what_is_no_file_is_not_replaced(make: object, options: list[str], chain: Chain) -> None:
    assert callable(make)
    target = chain.folder / "out"
    for verb, source in (("compress", chain.first), ("restore", chain.full)):
        make(target)
        before = target.lstat()
        out = ["-o", target if make is not Path.mkdir else f"{target}/."]
        if make is Path.mkdir:
            (target / source.with_suffix(".ckptz" if verb == "compress" else ".safetensors").name).mkdir()
        run = ckptz(verb, source, *out, *options, fails=True)
        assert run.exit_code == 2, run.stderr
        assert "not a regular file" in run.error or "is a folder" in run.error
        assert target.lstat().st_ino == before.st_ino
        if make is not Path.mkdir:
            target.unlink()
        else:
            [child] = target.iterdir()
            child.rmdir()
            target.rmdir()


def test_publish_itself_replaces_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: is not a regular file"):
        write(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_carried_file_replaces_nothing_but_files(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hub")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "config.json").symlink_to(tmp_path / "nothing")
    run = ckptz("compress", folder, "-o", tmp_path / "packed", "--force", fails=True)
    assert "config.json: exists already and is not a regular file" in run.error
    assert (tmp_path / "packed" / "config.json").is_symlink()


@pytest.mark.parametrize("parents", [True, False])
def test_a_new_folder_lasts_a_power_cut_and_so_do_those_above_it(
    parents: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("ckptz.format.publish.sync_folder", synced.append)
    make_folder(tmp_path / "runs" / "one")
    make_folder(tmp_path / "runs" / "one", parents=parents)
    assert synced == [tmp_path, tmp_path / "runs"]
    make_folder(tmp_path / "runs" / "two", parents=parents)
    assert synced[2:] == [tmp_path / "runs"]


def test_a_folder_that_another_process_makes_meanwhile_is_taken_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("ckptz.format.publish.sync_folder", synced.append)
    mkdir = Path.mkdir

    def late(self: Path) -> None:
        mkdir(self)
        mkdir(self)

    monkeypatch.setattr(Path, "mkdir", late)
    assert not make_folder(tmp_path / "runs" / "one")
    assert (tmp_path / "runs" / "one").is_dir()
    assert synced == [tmp_path, tmp_path / "runs"]


def test_a_folder_is_made_where_it_was_named_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="give another folder"):
            make_folder(place)
    with pytest.raises(FileNotFoundError):
        make_folder(tmp_path / "missing" / "folder", parents=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_errors_name_the_file_that_was_asked_for_not_the_temporary(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as opening:
        write(tmp_path / "gone" / "a")
    with pytest.raises(IsADirectoryError) as renaming, publish(tmp_path / "b"):
        (tmp_path / "b").mkdir()
    for caught, name in ((opening, "gone/a"), (renaming, "b")):
        assert str(caught.value).endswith(f"'{tmp_path / name}'")
    assert not temporaries(tmp_path)


def test_a_writer_that_may_live_is_taken_for_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, f"{pid} is of another user, and takes no {number}")

    with monkeypatch.context() as patch:
        patch.setattr(publish_module.os, "kill", kill)
        assert publish_module.is_alive(1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(publish_module.os, "name", "nt")
        is_alive = publish_module.is_alive(1 << 20)
    assert is_alive, "on Windows a signal would end the process"
    assert publish_module.abandoned(path_of("memory://publish")) == []


def test_a_machine_that_nobody_names_is_no_one_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    def readlink(_: str) -> str:
        raise OSError(errno.ENOENT, "no /proc")

    monkeypatch.setattr(publish_module.os, "readlink", readlink)
    assert publish_module._machine.__wrapped__() == "0"


def test_a_name_that_ends_with_a_separator_is_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="names a folder; name a file"),
        Publication().file(f"{tmp_path}/a/"),
    ):
        pytest.fail("it was opened")
