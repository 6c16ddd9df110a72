"""The command line with full, closed or broken output streams, `--quiet`, and completion in shells."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptz import inspect
from ckptz.format.caches import HeaderCache
from ckptz.format.frame import FrameHeader
from ckptz.write.groups import LEAST_TENSORS
from ckptz_cli.main import main
from tests.support.cli_support import (
    Chain,
    ckptz,
    content_of,
    forked,
    hf_folder,
    temporaries,
    write_plain,
)

FULL = "/dev/full"
needs_full = pytest.mark.skipif(not Path(FULL).exists(), reason=f"needs {FULL}")


@needs_full
@pytest.mark.parametrize(
    ("stdout", "verb", "options"),
    [
        *itertools.product((FULL, None), ("inspect",), ((), ("--json",))),
        (FULL, "verify", ("--json",)),
        (None, "verify", ()),
        (FULL, "restore", ()),
        (None, "restore", ("--json",)),
    ],
)
def test_an_unusable_standard_output_is_reported_in_one_line(
    stdout: str | None, verb: str, options: tuple[str, ...], chain: Chain
) -> None:
    chain.first.unlink()
    process = forked(verb, chain.full, *options, stdout=stdout)
    assert process.returncode == 7, process.stderr
    lines = [line for line in process.stderr.splitlines() if "ompil" not in line]
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("ckptz: standard output: ")
    assert temporaries(chain.folder) == []
    if verb == "restore":
        assert content_of(chain.first) == content_of(chain.full)


@needs_full
def test_help_to_a_full_disk_is_an_error_of_one_line() -> None:
    command = [sys.executable, "-c", "from ckptz_cli.main import main; main(['--help'])"]
    with Path(FULL).open("w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 7
    assert len(process.stderr.splitlines()) == 1


@needs_full
@pytest.mark.parametrize("streams", [{"stderr": FULL}, {"stderr": None}, {"stderr": FULL, "stdout": FULL}])
@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_an_error_that_cannot_be_printed_keeps_its_exit_code(
    streams: dict[str, str | None], verb: str, tmp_path: Path
) -> None:
    assert forked(verb, tmp_path / "gone", **streams).returncode == 5


def test_a_reader_that_goes_away_does_not_end_the_work(chain: Chain, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = tmp_path / "out"
    process = forked("compress", chain.first, chain.second, "-o", out, stdout=writer)
    assert (process.returncode, process.stderr) == (0, "")
    assert len(list(out.iterdir())) == 2
    process = forked("inspect", chain.full, "--json", stdout=writer)
    assert "Traceback" not in process.stderr
    assert "Exception" not in process.stderr
    os.close(writer)


@pytest.mark.parametrize("option", ["--json", "-v"])
def test_options_are_accepted_before_and_after_the_verb(option: str, chain: Chain) -> None:
    before, after = ckptz(option, "inspect", chain.full), ckptz("inspect", chain.full, option)
    assert before.stdout == after.stdout
    if option == "--json":
        assert json.loads(before.stdout)["depth"] == 0


@pytest.mark.parametrize("line", [("-q", "inspect"), ("inspect", "-q"), ("inspect", "--quiet")], ids=" ".join)
def test_a_quiet_verb_prints_only_json_and_errors(line: tuple[str, ...], chain: Chain) -> None:
    run = ckptz(*line, chain.delta)
    assert (run.stdout, run.stderr) == ("", "")
    assert ckptz(*line, "--json", chain.delta).json["depth"] == 1
    assert ckptz(*line, chain.first, fails=True).error
    assert ckptz("inspect", chain.delta).stdout


def test_a_quiet_verb_has_no_notes(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    assert "note" in ckptz("compress", folder, "-o", tmp_path / "a.ckptz").stderr
    assert not ckptz("compress", folder, "-o", tmp_path / "b.ckptz", "-q").stderr


@pytest.mark.parametrize("verb", main.commands)
def test_every_verb_can_be_quiet_and_print_json(verb: str) -> None:
    options = {name for option in main.commands[verb].params for name in option.opts}
    assert {"-q", "--quiet", "-v", "--verbose", "--json"} <= options


def complete(*words: str) -> list[str]:
    """Return the completions that a shell is offered for the last word."""
    env = {
        "_CKPTZ_COMPLETE": "zsh_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    return CliRunner().invoke(main, [], env=env).stdout.split("\n")[1::3]


def test_shells_complete_verbs_options_and_values() -> None:
    assert complete("ckptz", "re") == ["restore", "report", "rebase"]
    assert complete("ckptz", "restore", "--t") == ["--to"]
    assert complete("ckptz", "restore", "--to", "d") == ["dcp"]
    assert complete("ckptz", "restore", "mod") == ["mod"]  # the type "file": the shell lists the files


def test_verify_needs_the_bases_of_the_original_too(chain: Chain) -> None:
    elsewhere = chain.folder / "deltas"
    elsewhere.mkdir()
    moved = chain.delta.rename(elsewhere / chain.delta.name)
    run = ckptz("verify", chain.full, "--against", moved, fails=True)
    assert run.exit_code == 5
    ckptz("compress", chain.second, "-o", chain.folder / "alone.ckptz")
    ckptz("verify", chain.folder / "alone.ckptz", "--against", moved, "--search-path", chain.folder)


def test_inspect_parses_each_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = LEAST_TENSORS - 1  # from LEAST_TENSORS on, tensors share a frame
    rows = {f"t{i}": ("U8", (8,), bytes(range(8))) for i in range(n)}
    ckptz("compress", write_plain(tmp_path / "m.safetensors", rows))
    parsed: Counter[str] = Counter()
    parse = FrameHeader.parse

    def counted(*arguments: Any) -> FrameHeader:
        parsed["headers"] += 1
        return parse(*arguments)

    monkeypatch.setattr(FrameHeader, "parse", counted)
    monkeypatch.setattr(HeaderCache.__init__, "__defaults__", (1,))  # a cache of one header
    assert inspect(tmp_path / "m.ckptz").n_tensors == n
    assert parsed["headers"] == n
