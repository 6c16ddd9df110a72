"""`ckptz log`, and messages of all verbs on chains with a missing, renamed or altered member."""

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ckptz import Checkpointer, log
from ckptz.errors import CkptzError, MissingBaseError
from ckptz.format.envelope import PlainFile
from ckptz.format.index import QualityRecord
from ckptz.format.reader import FrameSource
from ckptz.store.resolve import open_checkpoint
from ckptz.verbs.log import LogReport
from ckptz_cli.main import main
from tests.support.cli_support import (
    Chain,
    a_state,
    ckptz,
    content_of,
    forge,
    regions_of,
    temporaries,
    write_plain,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a full file at step 0, its deltas 10 and 20, and 30 on 20, with names that sort differently."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name, step, base in (("z", 0, None), ("b", 10, "z"), ("a", 20, "z"), ("c", 30, "a")):
        plain = write_plain(folder / f"{name}.safetensors", a_state(drift=0.001 * step, n=5000))
        against = ("--base", folder / f"{base}.ckptz") if base else ()
        method = ("--method", "kmeans", "--set", "levels=8") if step == 30 else ()
        ckptz("compress", plain, "--set", f"input.step={step}", "--jobs", 1, *against, *method)
        plain.unlink()
    return folder


def logged(folder: Path, *search_path: Path) -> tuple[LogReport, list[Exception]]:
    problems: list[Exception] = []
    return log(folder, search_path=search_path, on_error=problems.append), problems


def tree(report: LogReport) -> list[tuple[int, str, str]]:
    return [(entry.level, entry.file, entry.kind) for entry in report.entries]


def test_log_shows_the_metric_of_each_step_that_has_one(run: Path, tmp_path: Path) -> None:
    assert "metric" not in ckptz("log", run).stdout.splitlines()[0]
    model = torch.nn.Linear(4, 4)
    with Checkpointer(tmp_path / "rated", model) as checkpointer:
        checkpointer.save(1, metric=2.25)
        checkpointer.save(2)
        checkpointer.save(3, metric=1.5)
    heading, *lines = ckptz("log", tmp_path / "rated").stdout.splitlines()
    column = heading.index("metric")
    metrics = {line.split()[0]: line[column:].split("  ")[0].strip() for line in lines if "step-" in line}
    assert [metrics[f"step-{step:08}.ckptz"] for step in (1, 2, 3)] == ["2.25", "", "1.5"]


def test_inspect_says_that_quality_was_not_measured_and_how_large_the_errors_are(run: Path) -> None:
    [line] = [x for x in ckptz("inspect", run / "c.ckptz").stdout.splitlines() if x.startswith("quality")]
    assert line.startswith("quality     not measured; rms errors of weights up to ")
    assert line.endswith("% of their rms (of each tensor: --tensors)")
    assert "not measured" not in ckptz("inspect", run / "a.ckptz").stdout


def test_every_checkpoint_stands_behind_its_base_by_step(run: Path) -> None:
    report, problems = logged(run)
    assert not problems
    assert tree(report) == [
        (0, "z.ckptz", "full"),
        (1, "b.ckptz", "delta"),
        (1, "a.ckptz", "delta"),
        (2, "c.ckptz", "delta"),
    ]
    assert [(e.step, e.depth, e.parent, e.n_lossy) for e in report.entries] == [
        (0, 0, None, 0),
        (10, 1, "z.ckptz", 0),
        (20, 1, "z.ckptz", 0),
        (30, 2, "a.ckptz", 1),
    ]
    sizes = [(run / entry.file).stat().st_size for entry in report.entries]
    assert [entry.stored_bytes for entry in report.entries] == sizes
    assert (report.n_files, report.stored_bytes) == (4, sum(sizes))
    assert report.ratio == pytest.approx(report.tensor_bytes / sum(sizes))


def test_no_frame_and_no_value_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(FrameSource, "_payload", untouched)
    monkeypatch.setattr(PlainFile, "read", untouched)
    write_plain(run / "other.safetensors", a_state(n=5000))
    (run / "z.ckptz").unlink()
    assert logged(run)[0].n_files == 3


def test_the_text_has_a_line_for_each_and_a_total(run: Path) -> None:
    heading, *lines, blank, total = ckptz("log", run).stdout.splitlines()
    assert heading.split() == ["checkpoint", "step", "kind", "size", "ratio", "depth", "lossy", "quality"]
    assert [line[: len(line) - len(line.lstrip())] for line in lines] == ["", "  ", "  ", "    "]
    assert lines[3].split()[:3] == ["c.ckptz", "30", "delta"]
    assert "1 of 9" in lines[3]
    assert blank == ""
    assert total.startswith(f"{run}: 4 files, ")


def test_a_terminal_gets_lines_between_the_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["log", str(run)])
    text = screen.getvalue()
    for part in ("├─ b.ckptz", "└─ a.ckptz", "   └─ c.ckptz"):
        assert part in text


def test_the_working_folder_is_the_default(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert ckptz("log", "--json").json["n_files"] == 4


def test_quality_that_a_file_records_is_shown(run: Path, tmp_path: Path) -> None:
    budget = {"promise": "quality-drop", "metric": "loss", "max_drop": 0.01, "is_relative": True}
    result = {"lower_is_better": True, "exact": 3.0, "measured": 3.015, "is_met": True, "date": "2026-11-21"}
    rows = [msgspec.to_builtins(QualityRecord(**budget, **result))]
    forge(run / "c.ckptz", run / "c.ckptz", lambda index: {**index, "quality": rows})
    out = ckptz("log", run, "--json").json["entries"][3]["quality"]
    assert out[0]["measured"] == 3.015
    assert "loss 3.015 against 3, 0.50% worse (limit 1%)" in ckptz("log", run).stdout


# --- incomplete chains ----------------------------------------------------------------------------


def test_a_missing_base_is_shown_and_decides_the_exit_code(run: Path) -> None:
    identity = ckptz("inspect", run / "z.ckptz", "--json").json["content_id"][:16]
    (run / "z.ckptz").unlink()
    result = ckptz("log", run, fails=True)
    assert result.exit_code == 5
    # Once, not for each file.
    assert f"its base 'z.ckptz' with content id {identity} is not here" in result.error
    report, problems = logged(run)
    assert [type(problem) for problem in problems] == [MissingBaseError]
    assert tree(report)[0] == (0, f"z.ckptz ({identity})", "missing")
    assert [level for level, *_ in tree(report)] == [0, 1, 1, 2]
    assert (report.n_files, report.n_missing) == (3, 1)
    assert "1 base missing" in result.stdout


def test_a_broken_file_is_shown_and_the_others_too(run: Path) -> None:
    raw = (run / "c.ckptz").read_bytes()
    (run / "cut.ckptz").write_bytes(raw[:-1])
    (run / "notes.ckptz").write_text("no checkpoint")
    result = ckptz("log", run, "--json", fails=True)
    assert result.exit_code == 3
    kinds = {entry["file"]: entry["kind"] for entry in result.json["entries"]}
    assert (kinds.pop("cut.ckptz"), kinds.pop("notes.ckptz")) == ("broken", "broken")
    assert len(kinds) == result.json["n_files"] == 4
    assert result.json["n_broken"] == 2
    assert result.json["error"]["kind"] == "TruncatedError"


def test_a_reference_that_cannot_be_is_broken(run: Path) -> None:
    forge(run / "b.ckptz", run / "b.ckptz", lambda i: {**i, "base": {**i["base"], "depth": 65}})
    report, problems = logged(run)
    assert [entry.file for entry in report.entries if entry.kind == "broken"] == ["b.ckptz"]
    assert "depth 65" in str(problems[0])


def test_files_that_name_each_other_end(run: Path) -> None:
    """Chain length decreases from delta to base, whatever the content ids are."""
    ids = {name: ckptz("inspect", run / f"{name}.ckptz", "--json").json["content_id"] for name in "ab"}
    for name, other in ("ab", "ba"):
        base = {"content_id": ids[other], "file": f"{other}.ckptz", "depth": 1}
        forge(run / f"{name}.ckptz", run / f"{name}.ckptz", lambda i, base=base: {**i, "base": base})
    assert {entry.kind for entry in logged(run)[0].entries} == {"full", "delta", "missing"}


def test_renamed_bases_and_twins_are_found_by_content(run: Path) -> None:
    (run / "z.ckptz").rename(run / "renamed.ckptz")
    shutil.copy(run / "renamed.ckptz", run / "twin.ckptz")
    report, problems = logged(run)
    assert not problems
    assert {entry.parent for entry in report.entries} == {None, "renamed.ckptz", "a.ckptz"}
    shutil.copy(run / "twin.ckptz", run / "z.ckptz")
    assert {entry.parent for entry in logged(run)[0].entries} == {None, "z.ckptz", "a.ckptz"}


def test_a_rebased_file_is_self_contained_and_keeps_its_deltas(run: Path) -> None:
    ckptz("rebase", run / "a.ckptz")
    assert tree(logged(run)[0]) == [
        (0, "z.ckptz", "full"),
        (1, "b.ckptz", "delta"),
        (0, "a.ckptz", "full"),
        (1, "c.ckptz", "delta"),
    ]


def test_bases_in_the_search_path_are_shown_by_their_path(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "z.ckptz").rename(elsewhere / "z.ckptz")
    (elsewhere / "broken.ckptz").write_bytes(b"not needed")
    report, problems = logged(run, elsewhere)
    assert not problems
    assert tree(report)[0] == (0, str(elsewhere / "z.ckptz"), "full")
    assert report.n_files == 3
    ckptz("log", run, "--search-path", elsewhere)


def test_a_plain_base_is_named_without_being_read(chain: Chain) -> None:
    ckptz("compress", chain.second, "--base", chain.first, "-o", chain.folder / "d.ckptz")
    chain.full.unlink()
    chain.delta.unlink()
    report, problems = logged(chain.folder)
    assert not problems
    assert tree(report) == [(0, "step-1.safetensors", "plain"), (1, "d.ckptz", "delta")]
    assert "not compared" in str(report.entries[0].note)
    chain.first.rename(chain.folder / "renamed.safetensors")
    report, problems = logged(chain.folder)
    assert not problems
    assert report.entries[0].kind == "plain"
    assert "2 plain files fit" in str(report.entries[0].note)
    for path in chain.folder.glob("*.safetensors"):
        write_plain(path, {"other": ("U8", (1,), b"a")})
    assert [type(problem) for problem in logged(chain.folder)[1]] == [MissingBaseError]


def test_an_empty_folder_and_other_things_in_it_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "folder.ckptz").mkdir()
    os.mkfifo(tmp_path / "pipe.ckptz")
    nothing = "no readable .ckptz file in it or in its folders that are named after steps"
    assert ckptz("log", tmp_path).stdout == f"{tmp_path}: 0 files, {nothing}\n"


def test_names_from_a_folder_are_not_trusted(run: Path) -> None:
    (run / "z.ckptz").rename(run / "z\x1b[31m\n.ckptz")
    assert "z\\x1b[31m\\n.ckptz" in ckptz("log", run).stdout


# --- a member that is missing, renamed or altered -------------------------------------------------


def verbs_on(chain: Chain, out: Path) -> list[tuple[Any, ...]]:
    """Return the command lines that resolve the chain of the delta."""
    delta = chain.delta
    return [
        ("restore", delta, "-o", out / "a.safetensors"),
        ("verify", delta),
        ("rebase", delta),
        ("diff", delta, chain.first),
        ("compress", delta, "-o", out / "c.ckptz"),
        ("compress", chain.second, "-o", out / "d.ckptz", "--base", delta),
    ]


def fails_for_all(chain: Chain, out: Path, exit_code: int, *texts: str) -> None:
    out.mkdir()
    before = chain.delta.read_bytes()
    for verb in verbs_on(chain, out):
        failed = ckptz(*verb, fails=True)
        assert failed.exit_code == exit_code, verb
        for text in texts:
            assert text in failed.error, (verb, failed.error)
    with pytest.raises(CkptzError) as caught:
        open_and_read(chain.delta)
    for text in texts:
        assert text in str(caught.value)
    assert not list(out.iterdir())
    assert not temporaries(chain.folder)
    assert chain.delta.read_bytes() == before


def open_and_read(path: Path) -> None:
    with contextlib.closing(open_checkpoint(path)) as opened:
        for source in opened.tensors.values():
            source.patterns(0, source.dtype.n_patterns(source.shape))


def test_a_missing_member_is_named_by_content_id_and_last_name(chain: Chain, tmp_path: Path) -> None:
    identity = ckptz("inspect", chain.full, "--json").json["content_id"][:16]
    chain.full.unlink()
    chain.first.unlink()
    fails_for_all(chain, tmp_path / "out", 5, f"'step-1.ckptz' with content id {identity}", str(chain.delta))


def test_a_missing_member_in_the_middle_is_named_by_the_one_that_needs_it(tmp_path: Path) -> None:
    paths = [write_plain(tmp_path / f"{i}.safetensors", a_state(drift=0.01 * i)) for i in range(3)]
    ckptz("compress", *paths, "--chain")
    identity = ckptz("inspect", tmp_path / "0.ckptz", "--json").json["content_id"][:16]
    for gone in (paths[0], paths[1], tmp_path / "0.ckptz"):
        gone.unlink()
    error = ckptz("restore", tmp_path / "2.ckptz", "-o", tmp_path / "x", fails=True).error
    assert f"{tmp_path / '1.ckptz'}: its base '0.ckptz' with content id {identity}" in error


def test_a_member_that_was_replaced_is_not_taken(chain: Chain, tmp_path: Path) -> None:
    identity = ckptz("inspect", chain.full, "--json").json["content_id"][:16]
    chain.first.unlink()
    ckptz("compress", write_plain(tmp_path / "x.safetensors", a_state(seed=9)), "-o", tmp_path / "x.ckptz")
    shutil.copy(tmp_path / "x.ckptz", chain.full)
    texts = (f"'step-1.ckptz' with content id {identity}", "holds another checkpoint")
    fails_for_all(chain, tmp_path / "out", 5, *texts)


def test_a_member_with_a_damaged_index_is_not_taken_and_said_why(chain: Chain, tmp_path: Path) -> None:
    raw = bytearray(chain.full.read_bytes())
    raw[-3] ^= 1
    chain.full.write_bytes(raw)
    chain.first.unlink()
    fails_for_all(chain, tmp_path / "out", 5, "'step-1.ckptz' with content id", "index was changed")


def test_a_member_with_a_damaged_frame_is_named(chain: Chain, tmp_path: Path) -> None:
    raw = bytearray(chain.full.read_bytes())
    payload = regions_of(bytes(raw))["payload"]
    raw[payload.start // 8 + 2] ^= 1
    chain.full.write_bytes(raw)
    fails_for_all(chain, tmp_path / "out", 3, f"{chain.full}: tensor ")


def test_a_base_that_lacks_a_tensor_is_named(chain: Chain) -> None:
    """Only a forged index has the content id without the tensors."""
    base = ckptz("inspect", chain.full, "--json").json
    other = write_plain(chain.folder / "other.safetensors", {"x": ("U8", (1,), b"a")})
    ckptz("compress", other)
    chain.full.unlink()
    chain.first.unlink()
    identity = ckptz("inspect", chain.folder / "other.ckptz", "--json").json["content_id"]
    forge(chain.delta, chain.delta, lambda i: {**i, "base": {**i["base"], "content_id": identity}})
    with pytest.raises(
        MissingBaseError, match=rf"tensor .* its base 'step-1.ckptz' with content id {identity[:16]}"
    ):
        content_of(chain.delta)
    assert base["content_id"] != identity


@pytest.mark.parametrize("times", [2, 3])
def test_a_base_may_be_named_twice_but_not_another(chain: Chain, times: int) -> None:
    out = chain.folder / "d.ckptz"
    ckptz("compress", chain.second, "-o", out, *["--base", chain.full] * times)
    both = ("--base", chain.first, "--base", chain.full)
    failed = ckptz("compress", chain.second, "-o", out, "--force", *both, fails=True)
    assert failed.exit_code == 2
    assert "only one value is allowed" in failed.error
    assert str(chain.first) in failed.error


def test_a_base_newer_than_the_file_and_of_a_later_step_is_a_base(chain: Chain) -> None:
    ckptz("compress", chain.second, "-o", chain.folder / "late.ckptz", "--set", "input.step=9")
    out = chain.folder / "early.ckptz"
    ckptz("compress", chain.first, "-o", out, "--set", "input.step=1", "--base", chain.folder / "late.ckptz")
    assert content_of(out) == content_of(chain.first)
    assert ckptz("compress", chain.second, "--base", chain.delta, fails=True).exit_code == 2  # its own output
