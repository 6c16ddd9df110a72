"""Failures of the command line: one line, an exit code by cause, old files unchanged, no temporary files."""

import contextlib
import errno
import os
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest

from ckptz.errors import BudgetError, ChecksumError, ConfigError, MissingBaseError, UnsupportedError
from ckptz.numpy import save_file
from ckptz.verbs.paths import output_context
from ckptz.words import printable
from ckptz_cli import verbs
from ckptz_cli.session import failure_of
from tests.support.cli_support import (
    Chain,
    a_state,
    ckptz,
    content_of,
    forked,
    temporaries,
    write_plain,
)

LARGE = 400_000  # elements: takes several writes, and exceeds the limits of file and disk size below


# --- messages and exit codes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("?"), 1),
        (MemoryError(), 1),
        (ConfigError("?"), 2),
        (click.UsageError("?"), 2),
        (ModuleNotFoundError("?", name="torch"), 2),
        (ChecksumError("?"), 3),
        (UnsupportedError("?"), 4),
        (MissingBaseError("?"), 5),
        (FileNotFoundError(errno.ENOENT, "?", "name"), 5),
        (FileNotFoundError("no such file"), 5),
        (BudgetError("?"), 6),
        (PermissionError(errno.EACCES, "?", "name"), 7),
        (OSError("input/output error"), 7),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_code_tells_the_cause(error: BaseException, code: int) -> None:
    exit_code, message = failure_of(error)
    assert exit_code == code
    assert message.isprintable()
    assert message


def test_undecodable_paths_and_control_characters_are_escaped() -> None:
    assert "\\udcff: no such" in printable(failure_of(FileNotFoundError(errno.ENOENT, "?", b"\xff"))[1])
    assert printable("a\tb\u202e\x9bü") == "a\\tb\\u202e\\x9bü"


def test_no_arguments_show_the_help() -> None:
    run = ckptz(fails=True)
    assert (run.exit_code, run.stdout, run.stderr) == (2, ckptz("--help").stdout, "")
    assert ckptz("-h").stdout == run.stdout
    assert ckptz("diff", "-h").stdout == ckptz("diff", "--help").stdout


def test_the_package_is_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ckptz", "log", "--help"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("ckptz", run_name="__main__")
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.split() == ckptz("log", "--help").stdout.split()


def test_a_traceback_is_shown_if_asked_for_before_or_after_the_verb(tmp_path: Path) -> None:
    for arguments in (["-v", "inspect", tmp_path / "gone"], ["inspect", tmp_path / "gone", "--verbose"]):
        run = ckptz(*arguments, fails=True)
        assert "Traceback" in run.stderr
        assert run.stderr.splitlines()[-1].startswith("ckptz: ")
    assert "Traceback" not in ckptz("inspect", tmp_path / "gone", fails=True).stderr


def test_an_internal_error_asks_to_be_reported(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("ckptz.verbs.log.inspect", fail)
    run = ckptz("inspect", chain.full, fails=True)
    assert run.exit_code == 1
    assert "please report" in run.error


@pytest.mark.parametrize("arguments", [["inspect", "gone.ckptz"], ["compress", "--unknown"]])
def test_errors_are_json_too(arguments: list[str]) -> None:
    run = ckptz(*arguments, "--json", fails=True)
    error = run.json["error"]
    assert run.error == f"ckptz: {error['message']}"
    assert error["exit_code"] == run.exit_code


def test_the_json_reports_the_files_written_before_an_error(tmp_path: Path) -> None:
    good = write_plain(tmp_path / "good.safetensors", a_state())
    run = ckptz("compress", good, tmp_path / "gone.safetensors", "--json", fails=True)
    assert [report["output"] for report in run.json["files"]] == [str(tmp_path / "good.ckptz")]
    assert run.json["error"]["exit_code"] == run.exit_code == 5


# --- refused outputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_an_output_that_is_also_an_input_is_refused(link: Callable[..., None] | None, chain: Chain) -> None:
    target = chain.folder / "same"
    for verb, read, options in (
        ("compress", chain.second, []),
        ("compress", chain.second, ["--base", chain.first]),
        ("restore", chain.delta, []),
    ):
        files = {chain.second, chain.first} if options else {chain.delta, chain.full}
        for file in files if verb == "restore" or options else {read}:
            old = file.read_bytes()
            if link is not None:
                link(file, target)
            run = ckptz(verb, read, *options, "-o", target if link else file, "--force", fails=True)
            assert run.exit_code == 2
            assert file.read_bytes() == old
            target.unlink(missing_ok=True)


def test_an_input_that_changes_while_it_is_read_is_refused(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: object) -> None:
        os.utime(chain.first, (1, 1))

    monkeypatch.setattr("ckptz.verbs.compress.write", write)
    run = ckptz("compress", chain.first, "--force", fails=True)
    assert run.exit_code == 7
    assert "changed while it was read" in run.error


# --- disk errors and signals ----------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Write a file that does not compress below the limits, its compressed file and its restored copy."""
    path = write_plain(tmp_path / "large.safetensors", a_state(n=LARGE))
    ckptz("compress", path)
    ckptz("restore", tmp_path / "large.ckptz", "-o", tmp_path / "back.safetensors")
    return path


def jobs_of(large: Path) -> list[tuple[Path, list[object]]]:
    """Return pairs of a file and a command that would replace it."""
    packed, back = large.with_suffix(".ckptz"), large.with_name("back.safetensors")
    return [
        (packed, ["compress", large, "--force", "--jobs", 1]),
        (back, ["restore", packed, "-o", back, "--force", "--jobs", 1]),
    ]


def test_a_file_that_cannot_grow_leaves_the_old_one(large: Path) -> None:
    for target, arguments in jobs_of(large):
        old = target.read_bytes()
        process = forked(*arguments, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2))
        assert process.returncode == 7, process.stderr
        line = process.stderr.splitlines()[-1]
        assert line.startswith(f"ckptz: {target}: ")
        assert "-o" in line
        assert "Traceback" not in process.stderr
        assert target.read_bytes() == old
        assert temporaries(large.parent) == []


def test_a_disk_that_cannot_be_read_is_named(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.preadv", preadv)
    run = ckptz("compress", chain.first, "--force", fails=True)
    assert run.exit_code == 7
    assert f"{chain.first}: Input/output error" in run.error


def test_the_message_about_a_full_disk_has_a_remedy(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fsync)
    old = chain.full.read_bytes()
    run = ckptz("compress", chain.first, "--force", fails=True)
    assert run.exit_code == 7
    assert f"{chain.full}: No space left on device; free some space" in run.error
    assert chain.full.read_bytes() == old
    assert temporaries(chain.folder) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_file_system_without_space_is_left_empty(large: Path, small_disk: Path) -> None:
    run = ckptz("compress", large, "-o", small_disk / "x.ckptz", fails=True)
    assert run.exit_code == 7
    assert "No space left" in run.error
    run = ckptz("restore", large.with_suffix(".ckptz"), "-o", small_disk / "x.safetensors", fails=True)
    assert run.exit_code == 7
    assert "free some space" in run.error
    assert list(small_disk.iterdir()) == []


@dataclass
class SignallingBar:
    """A progress bar that sends signal `number` to its own process after a third of a file."""

    number: int

    def install(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        verbs.progress_bar = lambda: contextlib.nullcontext(self)

    def start(self, name: str, n_bytes: int) -> None:
        self.n_bytes_left = n_bytes // 3

    def advance(self, n_bytes: int) -> None:
        self.n_bytes_left -= n_bytes
        if self.n_bytes_left < 0:
            os.kill(os.getpid(), self.number)


def test_a_kill_leaves_the_old_file_and_a_temporary_one(large: Path) -> None:
    for target, arguments in jobs_of(large):
        old = target.read_bytes()
        process = forked(*arguments, before=SignallingBar(signal.SIGKILL).install)
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert target.read_bytes() == old
        [temporary] = temporaries(large.parent)
        temporary.unlink()
        ckptz(*arguments)
        assert target.read_bytes() == old


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupted_run_cleans_up(number: int, code: int, large: Path) -> None:
    for target, arguments in jobs_of(large):
        old = target.read_bytes()
        process = forked(*arguments, "--jobs", 2, before=SignallingBar(number).install)
        assert process.returncode == code, process.stderr
        assert "Traceback" not in process.stderr
        assert target.read_bytes() == old
        assert temporaries(large.parent) == []


def test_a_folder_that_cannot_be_written_is_named(chain: Chain) -> None:
    if not os.geteuid():
        pytest.skip("root may write anywhere")
    chain.folder.chmod(0o500)
    run = ckptz("restore", chain.full, "--force", fails=True)
    chain.folder.chmod(0o700)
    assert run.exit_code == 7
    assert "permissions" in run.error


def test_the_leftovers_of_a_kill_are_not_taken_for_bases(chain: Chain) -> None:
    temporary = chain.folder / ".step-1.ckptz.0badcafe.ckptz-tmp"
    temporary.write_bytes(b"half")
    assert content_of(chain.delta) == content_of(chain.second)


def test_the_error_of_a_folder_that_cannot_be_written_names_the_output(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Read-only") as raised, output_context(tmp_path / "x.ckptz"):
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / ".0-1.ckptz-tmp"))
    assert raised.value.filename == str(tmp_path / "x.ckptz")


def test_inspect_hides_the_internal_metadata_of_a_checkpointer(tmp_path: Path) -> None:
    save_file({"w": np.zeros(9, np.float32)}, tmp_path / "a.ckptz", {"since_anchor": "1", "mine": "x"})
    text = ckptz("inspect", tmp_path / "a.ckptz").stdout
    assert "metadata mine" in text
    assert "since_anchor" not in text
