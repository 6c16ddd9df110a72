"""Publication of files: atomic, several at once, durable, and without wider permissions than their inputs."""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator
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
    """Set the umask to 022 for each test."""
    previous = os.umask(0o022)
    yield
    os.umask(previous)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write(path: Path, *like: Path) -> None:
    """Publish a file with no more permissions than the files of `like` have."""
    with publish(path, like) as file:
        file.write(b"new")


def test_a_new_file_has_the_mode_that_the_umask_allows(tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert mode_of(tmp_path / "a") == 0o644


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o640, 0o640), (0o777, 0o644)])
def test_a_replaced_file_keeps_its_mode_without_bits_that_its_input_lacks(
    mode: int, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "a").chmod(mode)
    (tmp_path / "b").touch()
    write(tmp_path / "a", tmp_path / "b")
    assert mode_of(tmp_path / "a") == expected


def test_a_new_file_has_only_permissions_that_all_its_inputs_have(tmp_path: Path) -> None:
    for name, mode in (("a", 0o640), ("b", 0o604)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    write(tmp_path / "c", tmp_path / "a", tmp_path / "b")
    assert mode_of(tmp_path / "c") == 0o600


def test_the_temporary_file_has_the_mode_of_its_input(tmp_path: Path) -> None:
    (tmp_path / "a").touch(0o600)
    with publish(tmp_path / "b", [tmp_path / "a"]):
        assert [mode_of(path) for path in temporaries(tmp_path)] == [0o600]


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077], ids=oct)
def test_all_written_files_have_the_mode_that_the_umask_allows(mask: int, tmp_path: Path) -> None:
    os.umask(mask)  # the fixture restores it
    source, packed = tmp_path / "m.safetensors", tmp_path / "m.ckptz"
    write_plain(source, a_state(n=200))
    ckptz("compress", source)
    ckptz("compress", source, "-o", tmp_path / "delta.ckptz", "--base", packed)
    ckptz("restore", packed, "-o", tmp_path / "back.safetensors")
    ckptz("rebase", packed, "-o", tmp_path / "alone.ckptz")
    save_file(load_file(packed), tmp_path / "saved.ckptz", base=packed)
    (tmp_path / "new").open("w").close()
    modes = {path.name: mode_of(path) for path in tmp_path.iterdir()}
    assert set(modes) >= {"m.ckptz", "delta.ckptz", "back.safetensors", "alone.ckptz", "saved.ckptz", "new"}
    assert set(modes.values()) == {0o666 & ~mask}


def test_outputs_of_a_private_file_are_private(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "m.safetensors", a_state(n=200))
    source.chmod(0o600)
    packed, back = tmp_path / "m.ckptz", tmp_path / "back.safetensors"
    ckptz("compress", source)
    ckptz("restore", packed, "-o", back)
    assert mode_of(packed) == mode_of(back) == 0o600
    ckptz("rebase", packed, "-o", tmp_path / "alone.ckptz")
    assert mode_of(tmp_path / "alone.ckptz") == 0o600


def test_files_of_a_folder_keep_their_modes(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hub")
    (folder / "model-00002-of-00002.safetensors").chmod(0o640)
    (folder / "config.json").chmod(0o600)
    ckptz("compress", folder, "-o", tmp_path / "packed")
    ckptz("restore", tmp_path / "packed" / "model.ckptz", "-o", tmp_path / "back")
    modes = {path.name: mode_of(path) for path in (tmp_path / "back").rglob("*.*")}
    assert mode_of(tmp_path / "packed" / "model.ckptz") == 0o640
    assert {mode for name, mode in modes.items() if name.startswith("model")} == {0o640}
    assert (modes["config.json"], modes["vocab.txt"]) == (0o600, 0o644)


def test_a_file_name_of_255_bytes_is_published(tmp_path: Path) -> None:
    target = tmp_path / ("x" * 255)
    write(target)
    assert target.read_bytes() == b"new"


def test_an_error_after_the_first_of_several_files_publishes_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def fail_after_first_file() -> None:
        with publish_together() as files:
            with files.file(tmp_path / "a") as sink:
                sink.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_first_file()
    assert (tmp_path / "a").read_text() == "old"
    assert temporaries(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system lacks posix_fadvise")
@pytest.mark.parametrize("is_supported", [True, False])
def test_a_large_file_is_flushed_to_disk_while_it_is_written(
    is_supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 kB, contiguous ranges of at least 64 KiB are flushed; a file system may not support it."""
    flushed: list[tuple[int, int]] = []

    def posix_fadvise(descriptor: int, begin: int, n_bytes: int, advice: int) -> None:
        flushed.append((begin, n_bytes))
        if not is_supported:
            raise OSError(errno.ENOSYS, "not supported")

    monkeypatch.setattr("ckptz.format.publish.EAGER_BYTES", 1 << 16)
    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    data = np.random.default_rng(0).bytes(300_000)
    with publish(tmp_path / "large") as file:
        file.seek(1000)
        for at in range(0, len(data), 30_000):
            file.write(data[at : at + 30_000])
        file.seek(0)
        file.write(bytes(1000))
    assert (tmp_path / "large").read_bytes() == bytes(1000) + data
    assert [begin for begin, _ in flushed] == [0, *itertools.accumulate(n for _, n in flushed[:-1])]
    assert all(1 << 16 <= n < (1 << 16) + 31_000 for _, n in flushed)
    assert sum(n for _, n in flushed) > 200_000


# Whether an error of fsync on a folder is raised: not where the system or file system does not support it.
IS_RAISED = dict.fromkeys((errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM), False)
IS_RAISED |= dict.fromkeys((errno.EIO, errno.ENOSPC), True)


@pytest.mark.parametrize(("code", "is_raised"), IS_RAISED.items())
def test_syncing_a_folder_raises_only_errors_of_the_disk(
    code: int, is_raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(code)) if is_raised else contextlib.nullcontext():
        sync_folder(tmp_path)


def dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("missing"))


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [os.mkfifo, dangling_link, link_to_device, Path.mkdir])
@pytest.mark.parametrize("options", [[], ["--force"]])
def test_only_regular_files_are_replaced(
    make: Callable[[Path], None], options: list[str], chain: Chain
) -> None:
    target = chain.folder / "out"
    for verb, source in (("compress", chain.first), ("restore", chain.full)):
        make(target)
        inode = target.lstat().st_ino
        out = ["-o", target if make is not Path.mkdir else f"{target}/."]
        if make is Path.mkdir:
            (target / source.with_suffix(".ckptz" if verb == "compress" else ".safetensors").name).mkdir()
        run = ckptz(verb, source, *out, *options, fails=True)
        assert run.exit_code == 2, run.stderr
        assert "not a regular file" in run.error or "is a folder" in run.error
        assert target.lstat().st_ino == inode
        if make is not Path.mkdir:
            target.unlink()
        else:
            [child] = target.iterdir()
            child.rmdir()
            target.rmdir()


def test_publish_does_not_replace_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: is not a regular file"):
        write(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_copied_file_replaces_only_regular_files(tmp_path: Path) -> None:
    """`config.json` of a folder is copied to the output folder, where a dangling link has its name."""
    folder = hf_folder(tmp_path / "hub")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "config.json").symlink_to(tmp_path / "missing")
    run = ckptz("compress", folder, "-o", tmp_path / "packed", "--force", fails=True)
    assert "config.json: exists already and is not a regular file" in run.error
    assert (tmp_path / "packed" / "config.json").is_symlink()


@pytest.mark.parametrize("parents", [True, False])
def test_a_new_folder_and_its_new_parents_are_synced(
    parents: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("ckptz.format.publish.sync_folder", synced.append)
    make_folder(tmp_path / "runs" / "one")
    make_folder(tmp_path / "runs" / "one", parents=parents)
    assert synced == [tmp_path, tmp_path / "runs"]
    make_folder(tmp_path / "runs" / "two", parents=parents)
    assert synced[2:] == [tmp_path / "runs"]


def test_a_folder_that_another_process_creates_meanwhile_is_used_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("ckptz.format.publish.sync_folder", synced.append)
    real_mkdir = Path.mkdir

    def mkdir(self: Path) -> None:
        real_mkdir(self)
        real_mkdir(self)  # fails, since the folder exists

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert not make_folder(tmp_path / "runs" / "one")
    assert (tmp_path / "runs" / "one").is_dir()
    assert synced == [tmp_path, tmp_path / "runs"]


def test_a_folder_that_cannot_be_created_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="give another folder"):
            make_folder(folder)
    with pytest.raises(FileNotFoundError):
        make_folder(tmp_path / "missing" / "folder", parents=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_errors_name_the_target_and_not_the_temporary_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as open_error:
        write(tmp_path / "gone" / "a")
    with pytest.raises(IsADirectoryError) as rename_error, publish(tmp_path / "b"):
        (tmp_path / "b").mkdir()
    for error, name in ((open_error, "gone/a"), (rename_error, "b")):
        assert str(error.value).endswith(f"'{tmp_path / name}'")
    assert not temporaries(tmp_path)


def test_a_writer_counts_as_running_unless_the_system_denies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, f"process {pid} of another user does not accept signal {number}")

    with monkeypatch.context() as patch:
        patch.setattr(publish_module.os, "kill", kill)
        assert publish_module.is_alive(1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(publish_module.os, "name", "nt")
        is_alive = publish_module.is_alive(1 << 20)
    assert is_alive, "on Windows, os.kill would end the process"
    assert publish_module.abandoned(path_of("memory://publish")) == []


def test_a_machine_without_proc_has_the_id_of_unknown_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    def readlink(_: str) -> str:
        raise OSError(errno.ENOENT, "no /proc")

    monkeypatch.setattr(publish_module.os, "readlink", readlink)
    assert publish_module._machine.__wrapped__() == "0"


def test_a_path_that_ends_with_a_separator_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="names a folder; name a file"),
        Publication().file(f"{tmp_path}/a/"),
    ):
        pytest.fail("the folder was opened as a file")
