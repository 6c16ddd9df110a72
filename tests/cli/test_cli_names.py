"""Names that come from files: control characters are printed as escapes, and any terminal shows any name."""

import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptz_cli.main import main
from tests.support.cli_support import a_state, ckptz, content_of, hf_folder, write_plain

ESCAPES = "\x1b[2J\x1b]0;x\x07\x9b1A\r\x7f"
ACCENTS = "é-模型-"

# Command lines in a folder with a.safetensors, b.safetensors and a run; NAME stands before each name.
LINES = (
    ("compress", "NAMEa.safetensors"),
    ("compress", "NAMEa.safetensors", "--method", "kmeans", "--set", "levels=8", "-o", "NAMElossy.ckptz"),
    ("compress", "NAMEa.safetensors", "NAMEb.safetensors", "-o", "NAMEout"),
    ("compress", "NAMEa.safetensors", "--base", "NAMErun/NAMEstep-1.ckptz", "-o", "NAMEdelta.ckptz"),
    ("compress", "NAMEa.safetensors", "--set", "input.tensor_roles=NAMEroles.toml", "--force"),
    ("compress", "NAMEa.safetensors", "--optimizer", "NAMEb.safetensors", "-o", "x.ckptz"),
    ("compress", "NAMEa.safetensors", "--eval", "NAMEeval.py:loss", "--budget", "1%"),
    ("compress", "NAMEfolder", "-o", "NAMEpacked"),
    ("compress", "NAMEfolder", "-o", "NAMEfolder.ckptz"),
    ("restore", "NAMErun/NAMEstep-1.ckptz", "-o", "NAMEback.safetensors"),
    ("restore", "NAMEpacked", "-o", "NAMEback"),
    ("restore", "NAMErun"),
    ("restore", "NAMErun@1", "-o", "NAMEstep.safetensors"),
    ("inspect", "NAMErun/NAMEstep-1.ckptz", "--tensors"),
    ("inspect", "NAMErun", "--json"),
    ("inspect", "NAMEgone.ckptz"),
    ("inspect", "NAMEbroken/NAMEstep-3.ckptz", "-v"),
    ("verify", "NAMEbroken"),
    ("log", "NAMEbroken"),
    ("prune", "NAMEbroken", "--keep-last", "1"),
    ("verify", "NAMErun", "NAMEgone.ckptz"),
    ("verify", "NAMErun/NAMEstep-1.ckptz", "--against", "NAMEa.safetensors"),
    ("verify", "NAMErun/NAMEstep-1.ckptz", "--against", "NAMEb.safetensors"),
    ("log", "NAMErun"),
    ("diff", "NAMEa.safetensors", "NAMEb.safetensors"),
    ("diff", "NAMErun", "NAMEa.safetensors", "--json"),
    ("report", "NAMErun", "-o", "NAMEpage.html"),
    ("rebase", "NAMErun/NAMEstep-1.ckptz", "-o", "NAMEalone.ckptz"),
    ("prune", "NAMErun", "--keep-last", "1", "--dry-run"),
    ("prune", "NAMErun", "--keep-last", "1"),
    ("prune", "NAMErun", "--keep-last", "1", "--json"),
    ("prune", "NAMEgone", "--keep-last", "1"),
    ("NAMEverb",),
    ("inspect", "--NAMEoption"),
    ("log", "--help"),
)


@pytest.fixture(scope="module", params=[ESCAPES, ACCENTS], ids=["control characters", "accents"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all kinds whose names, tensors and metadata have the same beginning."""
    made, before = tmp_path_factory.mktemp("names"), str(request.param)
    for letter, drift in (("a", 0.0), ("b", 0.01)):
        rows = {f"{before}{name}": row for name, row in a_state(drift=drift, n=500).items()}
        write_plain(made / f"{before}{letter}.safetensors", rows, {f"{before}key": f"{before}value"})
    run = made / f"{before}run"
    for i in (1, 2):
        ckptz(
            "compress",
            made / f"{before}a.safetensors",
            "-o",
            run.with_name("x.ckptz"),
            "--set",
            f"input.step={i}",
        )
        run.mkdir(exist_ok=True)
        run.with_name("x.ckptz").rename(run / f"{before}step-{i}.ckptz")
    (made / f"{before}broken").mkdir()
    (made / f"{before}broken" / f"{before}step-3.ckptz").write_bytes(b"damaged")
    shutil.copy(run / f"{before}step-1.ckptz", run / f".{before}hidden.ckptz-tmp")
    (hf_folder(made / f"{before}folder") / f"{before}notes.txt").write_text("x")
    (made / f"{before}eval.py").write_text("def loss(state):\n    raise ValueError('\\x1b[2J')\n")
    (made / f"{before}roles.toml").write_text("[[rule]]\nnothing = 1\n")
    (made / "NAME").write_bytes(before.encode())
    return made


@pytest.mark.parametrize("charset", ["ascii", "utf-8"])
def test_every_verb_prints_any_name(charset: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = folder.with_name(f"{folder.name}-{charset}")
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    before = (copy / "NAME").read_bytes().decode()
    for line in LINES:
        done = CliRunner(charset=charset).invoke(main, [word.replace("NAME", before) for word in line])
        assert done.exception is None or isinstance(done.exception, SystemExit), line
        shown = (done.stdout_bytes + done.stderr_bytes).decode(charset)
        assert done.exit_code != 1, (line, shown)
        assert "internal error" not in shown
        control = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"}
        assert not control - ({"\x7f"} if "--json" in line else set()), (line, shown)
        if line[0] != "log":
            assert ("\\x1b" if before == ESCAPES else "\\xe9" if charset == "ascii" else "é") in shown or (
                "--json" in line
            ), line


def test_json_has_the_names_as_they_are(folder: Path) -> None:
    before = (folder / "NAME").read_bytes().decode()
    found = ckptz("inspect", folder / f"{before}run", "--json").json
    assert found["metadata"] == {f"{before}key": f"{before}value"}


def in_locale(*arguments: object, **more: str) -> subprocess.CompletedProcess[bytes]:
    """A command line of a process whose locale knows ASCII only."""
    command = [sys.executable, "-c", "from ckptz_cli.main import main; main()", *map(str, arguments)]
    env = os.environ | {"LC_ALL": "C"} | more
    return subprocess.run(command, capture_output=True, check=False, timeout=60, env=env)


WITHOUT_UTF8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are always Unicode")
def test_a_locale_without_the_characters_of_a_name_is_told_what_to_do(tmp_path: Path) -> None:
    folder, packed, back = hf_folder(tmp_path / "é"), tmp_path / "packed", tmp_path / "bäck"
    (folder / "é.txt").write_text("x")
    ckptz("compress", folder, "-o", packed)
    done = in_locale("restore", packed, "-o", back, **WITHOUT_UTF8)
    assert (done.returncode, done.stdout) == (4, b"")
    assert done.stderr.startswith(b"ckptz: ")
    assert b"'\\xe9.txt' cannot be a file name in this locale (ascii); set PYTHONUTF8=1" in done.stderr
    done = in_locale("restore", packed, "-o", back, PYTHONUTF8="1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert (back / "é.txt").read_text() == "x"
    plain = write_plain(tmp_path / "è-step-1.safetensors", a_state(n=500))
    done = in_locale("compress", plain, "--base", plain, "-o", tmp_path / "o.ckptz", **WITHOUT_UTF8)
    assert done.returncode == 2
    assert b"set PYTHONUTF8=1" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are always Unicode")
def test_verbs_read_files_whose_names_the_locale_lacks(tmp_path: Path) -> None:
    first, second = (
        write_plain(tmp_path / f"é-step-{i}.safetensors", a_state(drift=i / 100)) for i in (1, 2)
    )
    ckptz("compress", first, second, "--chain")
    wanted = content_of(second)
    first.unlink()
    second.unlink()
    delta = second.with_suffix(".ckptz")
    done = in_locale("restore", delta, **WITHOUT_UTF8)
    assert (done.returncode, done.stderr) == (0, b"")
    assert content_of(second) == wanted
    done = in_locale("log", tmp_path, "--json", **WITHOUT_UTF8)
    assert (done.returncode, json.loads(done.stdout)["n_missing"]) == (0, 0)
