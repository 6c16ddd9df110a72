"""Refused command lines: exit code and words of the error, which is one line; no file changes.

All run in the folder of the fixture `scene`, with names of files in it.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest

from ckptz import compress
from tests.support.cli_support import a_state, bomb, ckptz, hf_folder, plain_bytes, write_plain

USAGE, DAMAGED, UNSUPPORTED, MISSING, IO = 2, 3, 4, 5, 7
TORCH = b"PK\x03\x04\x00\x00\x08\x08" + bytes(60)
EVALUATED = "compress a.safetensors -o o.ckptz --eval evaluate.py:loss --budget 1%"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a full file, a delta, their plain files, a run of three steps, and invalid or unusual inputs."""
    folder = tmp_path_factory.mktemp("scene")
    sources = [
        write_plain(folder / f"{name}.safetensors", a_state(drift=i / 100)) for i, name in enumerate("ab")
    ]
    compress(sources, chain=True, jobs=1)
    steps = [
        write_plain(folder / f"step-{i}.safetensors", a_state(drift=i / 1000, n=500)) for i in (8, 9, 10)
    ]
    compress(steps, folder / "run", chain=True, jobs=1)
    for path in steps:
        path.unlink()
    for name in ("empty", "steps", "new.ckptz", "x/m", "y/x/m"):
        (folder / name).mkdir(parents=True)
    for name in ("steps/step-1", "steps/step-2", "new", "x/m/n", "y/x/m/n"):
        write_plain(folder / f"{name}.safetensors", a_state(n=200))
    compress(hf_folder(folder / "hf"), folder / "packed")
    (folder / "model.pt").write_bytes(TORCH)
    (folder / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "cut.toml").write_text("a = [")
    (folder / "other.toml").write_text("[[rule]]\nnothing = 1")
    (folder / "king.toml").write_text('[[rule]]\nname = "x"\nrole = "king"\n')
    (folder / "evaluate.py").write_text("def loss(state):\n    return 2.0\n")
    (folder / "page.html").write_text("<!doctype html> mine")
    write_plain(folder / "future.safetensors", {"a": ("F128", (1,), bytes(16))})
    write_plain(folder / "reserved.safetensors", {"__ckptz__.index": ("U8", (1,), b"1")})
    write_plain(folder / "deep.safetensors", {"a": ("U8", (1,) * 65, b"1")})
    (folder / "cut.safetensors").write_bytes(plain_bytes(a_state())[:-1])
    bomb(folder / "bomb.ckptz", 4)
    os.mkfifo(folder / "pipe.ckptz")
    return folder


IS_TORCH = "model.pt: is a torch file, not a .ckptz file"
WRITTEN = "compress a.safetensors -o o.ckptz"
ROLES = "compress a.safetensors --force --set input.tensor_roles="
# (command line, exit code, words of the error)
REFUSED: list[tuple[str, int, str]] = [
    # unknown or empty words
    ("compress", USAGE, "--help"),
    ("compress --jobs 0 a", USAGE, "--help"),
    ("compress --unknown a", USAGE, "--help"),
    ("restore a --to pickle", USAGE, "--help"),
    ("fly", USAGE, "--help"),
    ("--json", USAGE, "--help"),
    ("decompress model.ckptz", USAGE, "Did you mean 'restore'?"),
    *((f"{words} ''", USAGE, "empty") for words in ("inspect", "compress", "compress a.ckptz")),
    *((f"compress a.ckptz {option} ''", USAGE, "empty") for option in ("-o", "--base")),
    *((f"verify a.ckptz {option} ''", USAGE, "empty") for option in ("--against", "--search-path")),
    ("restore a.ckptz -o ''", USAGE, "empty"),
    ("inspect foo://a/b.ckptz", USAGE, "check the part before ://"),
    # inputs that are missing or of the wrong kind
    *((f"{verb} gone.safetensors", MISSING, "gone.safetensors") for verb in ("compress", "restore")),
    *((f"{verb} gone.ckptz", MISSING, "gone.ckptz") for verb in ("inspect", "verify", "rebase", "log")),
    ("prune gone", MISSING, "gone"),
    ("restore gone@8 -o new", MISSING, "gone"),
    ("inspect b.ckptz --search-path gone", USAGE, "gone: no such folder"),
    *((f"{verb} pipe.ckptz", USAGE, "not a regular file") for verb in ("compress", "restore", "verify")),
    ("inspect pipe.ckptz", USAGE, "not a regular file"),
    *((f"{verb} model.pt", USAGE, IS_TORCH) for verb in ("inspect", "verify", "rebase")),
    ("compress b.safetensors --base model.pt -o new", USAGE, IS_TORCH),
    ("rebase a.safetensors", USAGE, "plain safetensors file"),
    ("verify a.safetensors", USAGE, "a.safetensors: "),
    ("rebase empty", IO, "Is a directory; name a file in it"),
    ("log run/step-8.ckptz", USAGE, "run/step-8.ckptz"),
    ("prune run/step-8.ckptz", USAGE, "is a file"),
    ("compress empty", USAGE, "empty: "),
    ("inspect empty", USAGE, "empty: "),
    ("diff empty empty", USAGE, "empty: "),
    ("verify empty", USAGE, "contains no .ckptz files"),
    ("prune empty", USAGE, "holds no steps"),
    ("restore hf", USAGE, "contains no .ckptz file; there is nothing to restore"),
    ("compress steps", USAGE, "holds several checkpoints"),
    ("compress steps", USAGE, "name the files"),
    ("compress run", USAGE, "a folder of .ckptz files; name one of them, such as step-10.ckptz"),
    ("compress future.safetensors", UNSUPPORTED, "F128"),
    ("compress reserved.safetensors", DAMAGED, "__ckptz__.index"),
    ("compress deep.safetensors", UNSUPPORTED, "deep.safetensors: tensor 'a'"),
    ("compress cut.safetensors", DAMAGED, "cut.safetensors"),
    # steps
    *((f"{verb} run@12", MISSING, "run: has no .ckptz file of step 12; ckptz log lists the steps")
      for verb in ("inspect", "verify", "restore -o new")),
    ("restore run@10", USAGE, "name an output"),
    ("prune run --after 7", USAGE, "no step would be left"),
    ("prune run --keep-best 1", USAGE, "no step here records a metric"),
    ("compress a.safetensors b.safetensors --set input.step=1 --force", USAGE, "step"),
    # outputs
    ("compress a.safetensors", USAGE, "or give --force"),
    ("restore a.ckptz", USAGE, "or give --force"),
    ("rebase b.ckptz -o b.safetensors", USAGE, "--force"),
    ("rebase b.ckptz -o a.ckptz", USAGE, "would replace a file that is read"),
    ("rebase b.ckptz -o a.ckptz --force", USAGE, "would replace a file that is read"),
    ("report run -o page.html", USAGE, "or give --force"),
    *((f"{verb} b.ckptz -o none/", USAGE, "none/: names a folder") for verb in ("rebase", "report")),
    ("restore a.ckptz -o a.safetensors/", USAGE, "the name means a folder"),
    ("compress a.safetensors -o no/x.ckptz", USAGE, "does not exist"),
    ("compress new.safetensors --force", USAGE, "new.ckptz"),
    ("compress x/m y/x/m -o out", USAGE, "out/x-m: 2 inputs would be written here"),
    ("compress a.safetensors b.safetensors -o a.ckptz", USAGE, "folder"),
    ("compress a.safetensors b.safetensors --chain -o run.ckptz", USAGE, "a chain needs a folder"),
    ("compress deep.safetensors b.safetensors -o .", USAGE, "b.ckptz: exists already"),
    ("compress hf -o packed", USAGE, "exists already"),
    ("compress hf -o packed", USAGE, "or --resume"),
    # bases and settings
    ("compress a.safetensors --base empty", USAGE, "a base must be a file"),
    ("compress b.safetensors --base b.ckptz", USAGE, "b.ckptz"),
    ("compress b.safetensors -o d.ckptz --base a.ckptz --base a.safetensors", USAGE, "only one value"),
    *((f"{ROLES}{name}.toml", USAGE, f"{name}.toml") for name in ("bytes", "cut", "other")),
    (f"{ROLES}king.toml --method kmeans", USAGE, "'king' is not one of"),
    *((f"{WRITTEN} {options}", USAGE, words) for options, words in (
        ("--set levels=16", "--set levels needs --method"),
        ("--set step=1", "--set step needs --method"),
        ("--set guide.calibration=x", "lossless compression reads no calibration"),
        ("--set guide.moments_from=x", "lossless compression reads no moments-from"),
        ("--method wavelet", "is not one of"),
        ("--method lossless --set prune=0.1", "method lossless has no such setting; it has sparse"),
        ("--method kmeans --set levels=1", "levels must be 2..255"),
        ("--method kmeans --set levels=256", "levels must be 2..255"),
        ("--method kmeans --set prune=0.7 --set protect=0.3", "leave nothing to quantize"),
        ("--method kmeans --set protect=-0.1", "protect must be a share"),
        ("--method kmeans --set dead_zone=0.1", "method kmeans has no such setting"),
        ("--method kmeans --set guide.calibration=x", "a calibration guides grid only"),
        ("--method grid --set levels=4", "method grid has no such setting; it has step"),
        ("--method grid --set step=0", "step must be above 0"),
        ("--method grid --set step=nan", "step must be above 0"),
        ("--method grid --set dead_zone=5", "dead_zone must be from 0 to 4"),
    )),
    (f"{EVALUATED} --method grid --set step=2", USAGE, "the search chooses this value"),
    (f"{EVALUATED} --set protect_as=exact", USAGE, "method grid has no such setting"),
    (f"{EVALUATED} --method kmeans --set dead_zone=0.1", USAGE, "method kmeans has no such setting"),
    (f"{EVALUATED} --set search.max_evaluations=0", USAGE, "needs settings from a base or --config"),
]  # fmt: skip


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.parametrize(("line", "code", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_refusal_is_one_line_and_changes_no_file(
    line: str, code: int, words: str, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scene)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # no __pycache__ for evaluate.py
    before = files_in(scene)
    run = ckptz(*shlex.split(line), fails=True)
    assert run.exit_code == code
    assert words in run.error
    after = files_in(scene)
    after.pop(str(scene / "run" / ".ckptz-lock"), None)
    assert {**after, str(scene / "run"): 0} == {**before, str(scene / "run"): 0}
