"""Names from files: control characters are printed as escapes, and every terminal can print every name."""

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

# Command lines for the folder of the fixture; NAME is replaced by the prefix of its names.
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
    """Write files of all kinds; their names, tensor names and metadata begin with the fixture's parameter."""
    root, prefix = tmp_path_factory.mktemp("names"), str(request.param)
    for letter, drift in (("a", 0.0), ("b", 0.01)):
        rows = {f"{prefix}{name}": row for name, row in a_state(drift=drift, n=500).items()}
        write_plain(root / f"{prefix}{letter}.safetensors", rows, {f"{prefix}key": f"{prefix}value"})
    run = root / f"{prefix}run"
    for i in (1, 2):
        ckptz(
            "compress",
            root / f"{prefix}a.safetensors",
            "-o",
            run.with_name("x.ckptz"),
            "--set",
            f"input.step={i}",
        )
        run.mkdir(exist_ok=True)
        run.with_name("x.ckptz").rename(run / f"{prefix}step-{i}.ckptz")
    (root / f"{prefix}broken").mkdir()
    (root / f"{prefix}broken" / f"{prefix}step-3.ckptz").write_bytes(b"damaged")
    shutil.copy(run / f"{prefix}step-1.ckptz", run / f".{prefix}hidden.ckptz-tmp")
    (hf_folder(root / f"{prefix}folder") / f"{prefix}notes.txt").write_text("x")
    (root / f"{prefix}eval.py").write_text("def loss(state):\n    raise ValueError('\\x1b[2J')\n")
    (root / f"{prefix}roles.toml").write_text("[[rule]]\nnothing = 1\n")
    (root / "NAME").write_bytes(prefix.encode())
    return root


@pytest.mark.parametrize("charset", ["ascii", "utf-8"])
def test_every_verb_prints_any_name(charset: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = folder.with_name(f"{folder.name}-{charset}")
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    prefix = (copy / "NAME").read_bytes().decode()
    for line in LINES:
        result = CliRunner(charset=charset).invoke(main, [word.replace("NAME", prefix) for word in line])
        assert result.exception is None or isinstance(result.exception, SystemExit), line
        output = (result.stdout_bytes + result.stderr_bytes).decode(charset)
        assert result.exit_code != 1, (line, output)
        assert "internal error" not in output
        control = {c for c in output if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"}
        assert not control - ({"\x7f"} if "--json" in line else set()), (line, output)
        if line[0] != "log":
            assert ("\\x1b" if prefix == ESCAPES else "\\xe9" if charset == "ascii" else "é") in output or (
                "--json" in line
            ), line


def test_json_has_unchanged_names(folder: Path) -> None:
    prefix = (folder / "NAME").read_bytes().decode()
    report = ckptz("inspect", folder / f"{prefix}run", "--json").json
    assert report["metadata"] == {f"{prefix}key": f"{prefix}value"}


def in_locale(*arguments: object, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command line in a new process with the C locale (only ASCII) and these environment variables."""
    command = [sys.executable, "-c", "from ckptz_cli.main import main; main()", *map(str, arguments)]
    env = os.environ | {"LC_ALL": "C"} | variables
    return subprocess.run(command, capture_output=True, check=False, timeout=60, env=env)


WITHOUT_UTF8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are always Unicode")
def test_a_name_that_the_locale_cannot_encode_is_refused_with_a_remedy(tmp_path: Path) -> None:
    folder, packed, back = hf_folder(tmp_path / "é"), tmp_path / "packed", tmp_path / "bäck"
    (folder / "é.txt").write_text("x")
    ckptz("compress", folder, "-o", packed)
    process = in_locale("restore", packed, "-o", back, **WITHOUT_UTF8)
    assert (process.returncode, process.stdout) == (4, b"")
    assert process.stderr.startswith(b"ckptz: ")
    assert b"'\\xe9.txt' cannot be a file name in this locale (ascii); set PYTHONUTF8=1" in process.stderr
    process = in_locale("restore", packed, "-o", back, PYTHONUTF8="1")
    assert (process.returncode, process.stderr) == (0, b"")
    assert (back / "é.txt").read_text() == "x"
    plain = write_plain(tmp_path / "è-step-1.safetensors", a_state(n=500))
    process = in_locale("compress", plain, "--base", plain, "-o", tmp_path / "o.ckptz", **WITHOUT_UTF8)
    assert process.returncode == 2
    assert b"set PYTHONUTF8=1" in process.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are always Unicode")
def test_verbs_read_files_whose_names_the_locale_lacks(tmp_path: Path) -> None:
    first, second = (
        write_plain(tmp_path / f"é-step-{i}.safetensors", a_state(drift=i / 100)) for i in (1, 2)
    )
    ckptz("compress", first, second, "--chain")
    expected = content_of(second)
    first.unlink()
    second.unlink()
    delta = second.with_suffix(".ckptz")
    process = in_locale("restore", delta, **WITHOUT_UTF8)
    assert (process.returncode, process.stderr) == (0, b"")
    assert content_of(second) == expected
    process = in_locale("log", tmp_path, "--json", **WITHOUT_UTF8)
    assert (process.returncode, json.loads(process.stdout)["n_missing"]) == (0, 0)
