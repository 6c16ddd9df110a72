"""`-` as an input: data goes to standard output, reports to standard error; unusable streams are refused."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ckptz.kernels.cache import _Compilation
from ckptz_cli.main import main
from tests.support.cli_support import Chain, a_state, ckptz, content_of, forked, hf_folder, plain_bytes

pty = pytest.importorskip("pty")
PLAIN = plain_bytes(a_state(n=500))


def piped(data: bytes, *line: object) -> tuple[int, bytes, str]:
    """Run a command line with `data` on standard input; return exit code, stdout and stderr."""
    result = CliRunner().invoke(main, [str(word) for word in line], input=data)
    return result.exit_code, result.stdout_bytes, result.stderr


@pytest.fixture(scope="module")
def packed() -> bytes:
    return piped(PLAIN, "compress", "-", "-o", "-")[1]


# --- standard output by default -------------------------------------------------------------------


def test_a_file_from_standard_input_is_written_to_standard_output(packed: bytes, tmp_path: Path) -> None:
    code, out, stderr = piped(PLAIN, "compress", "-")
    (tmp_path / "out.ckptz").write_bytes(out)
    (tmp_path / "original.safetensors").write_bytes(PLAIN)
    assert code == 0
    assert content_of(tmp_path / "out.ckptz") == content_of(tmp_path / "original.safetensors")
    assert "ckptz: note: standard output: " in stderr
    code, out, stderr = piped(packed, "restore", "-")
    assert (code, out) == (0, PLAIN)
    assert "all checksums match" in stderr
    assert piped(packed, "restore", "-", "-q") == (0, PLAIN, "")


def test_rebase_of_standard_input_goes_to_standard_output(chain: Chain, tmp_path: Path) -> None:
    code, out, _ = piped(chain.delta.read_bytes(), "rebase", "-", "--search-path", chain.folder)
    (tmp_path / "alone.ckptz").write_bytes(out)
    assert code == 0
    assert content_of(tmp_path / "alone.ckptz") == content_of(chain.second)


def test_an_output_that_is_named_gets_the_data(packed: bytes, tmp_path: Path) -> None:
    code, out, _ = piped(packed, "restore", "-", "-o", tmp_path / "back.safetensors")
    assert (code, b"all checksums match" in out) == (0, True)
    assert (tmp_path / "back.safetensors").read_bytes() == PLAIN


@pytest.mark.parametrize("verb", ["compress", "restore"])
def test_json_goes_to_standard_error_if_data_goes_to_standard_output(verb: str, packed: bytes) -> None:
    data = PLAIN if verb == "compress" else packed
    code, out, stderr = piped(data, verb, "-", "--json")
    assert (code, out == piped(data, verb, "-", "-q")[1]) == (0, True)
    document = json.loads(stderr)
    report = document["files"][0] if verb == "compress" else document
    assert (report["input"], report["output"]) == ("standard input", "standard output")


def test_an_error_is_printed_as_json_on_standard_error(packed: bytes) -> None:
    code, out, stderr = piped(packed[:100], "restore", "-", "--json")
    assert (code, out) == (3, b"")
    line, document = stderr.split("\n", 1)
    assert line.startswith("ckptz: standard input: ")
    assert json.loads(document)["error"]["exit_code"] == 3


def test_a_dry_run_writes_no_data(tmp_path: Path) -> None:
    (tmp_path / "quality.py").write_text("def loss(state):\n    return 1.0\n")
    line = ("compress", "-", "--eval", f"{tmp_path}/quality.py:loss", "--budget", "1%", "--dry-run")
    code, out, stderr = piped(PLAIN, *line, "--set", "search.max_evaluations=2")
    assert code == 0, stderr
    assert not out.startswith(PLAIN[:8])
    assert b"dry run" in out + stderr.encode()


# --- refused and unusable streams -----------------------------------------------------------------


def test_outputs_that_are_folders_are_refused_before_they_are_written(tmp_path: Path) -> None:
    ckptz("compress", hf_folder(tmp_path / "hf"), "-o", tmp_path / "packed")
    folder = (tmp_path / "packed" / "model.ckptz").read_bytes()
    for line in (("restore", "-"), ("restore", "-", "--to", "dcp"), ("restore", "-", "-o", "-")):
        code, out, stderr = piped(folder, *line)
        assert (code, out) == (2, b""), stderr
        assert "standard output: " in stderr
        assert "folder" in stderr
    code, out, stderr = piped(PLAIN, "compress", "-", "--chain")
    assert (code, out) == (2, b"")
    assert "a chain needs a folder as output" in stderr


def test_contradictions_are_refused_before_standard_input_is_read(chain: Chain) -> None:
    for line, message in (
        (("compress", "-", chain.first), "name it with -o"),
        (("compress", "-", "--resume"), "--resume cannot be used with"),
        (("restore", "-", "--jobs", "0"), "--jobs"),
        (("diff", "-", "-"), "used only once"),
    ):
        code, out, stderr = piped(PLAIN, *line)
        assert (code, out) == (2, b"")
        assert message in stderr


@pytest.mark.parametrize("verb", ["compress", "restore", "verify", "inspect"])
def test_closed_standard_input_is_one_line(verb: str) -> None:
    process = forked(verb, "-", *(("-o", "out") if verb == "restore" else ()), stdin=None)
    assert (process.returncode, process.stdout) == (7, "")
    assert process.stderr == "ckptz: standard input: is closed\n"


@pytest.mark.parametrize("to", ["/dev/full", None, "ended"])
def test_standard_output_that_takes_no_data_is_an_error_and_no_success(
    to: str | None, tmp_path: Path
) -> None:
    cause = {"/dev/full": "No space left", None: "is closed", "ended": "its reader ended"}[to]
    (tmp_path / "a.safetensors").write_bytes(PLAIN)
    reader, writer = os.pipe()
    os.close(reader)
    stdout = writer if to == "ended" else to
    process = forked("compress", "-", stdin=tmp_path / "a.safetensors", stdout=stdout)
    os.close(writer)
    assert process.returncode == 7, process.stderr
    [line] = [line for line in process.stderr.splitlines() if "ompil" not in line]
    assert line.startswith(f"ckptz: standard output: {cause}")


def test_closed_standard_error_leaves_the_data_alone(packed: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.ckptz").write_bytes(packed)
    back = tmp_path / "b.safetensors"
    back.touch()
    process = forked("restore", "-", stdin=tmp_path / "a.ckptz", stdout=back, stderr=None)
    assert (process.returncode, back.read_bytes()) == (0, PLAIN)
    process = forked("inspect", tmp_path / "gone", stderr=None)
    assert (process.returncode, process.stdout) == (5, "")


def test_the_notice_about_compiling_is_never_printed_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = SimpleNamespace(py_func=SimpleNamespace(__module__="ckptz.kernels.plain"))
    monkeypatch.setattr(sys, "stderr", None)
    _Compilation().on_start(SimpleNamespace(data={"dispatcher": kernel}))
    assert capsys.readouterr().out == ""


@pytest.fixture
def terminal() -> Iterator[int]:
    ours, theirs = pty.openpty()
    yield theirs
    os.close(theirs)
    os.close(ours)


@pytest.mark.parametrize("line", [("compress", "-"), ("restore", "-", "-o", "-")])
def test_data_is_not_sent_to_a_terminal(line: tuple[str, ...], terminal: int, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(PLAIN)
    process = forked(*line, stdin=tmp_path / "a.safetensors", stdout=terminal)
    assert process.returncode == 2
    assert process.stderr.startswith("ckptz: standard output is a terminal")


def test_no_file_is_read_from_a_terminal(terminal: int) -> None:
    process = forked("inspect", "-", stdin=terminal)
    assert process.returncode == 2
    assert process.stderr.startswith("ckptz: standard input is a terminal")
