"""`ckptz report`: the page has the numbers of the other verbs, and text from files never becomes markup."""

import base64
import hashlib
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckptz
from ckptz.errors import ConfigError, FormatError
from ckptz.format.index import QualityRecord
from ckptz.format.streams import CoderId
from ckptz.state.roles import ROLES
from ckptz.verbs import page
from ckptz.verbs.page import CODERS, MARK, MAX_ROWS
from ckptz.verbs.quality_text import quality_text
from ckptz.verbs.report import N_BINS, PageReport
from ckptz.words import Report, format_bytes
from tests.support.checkpointer_support import Run
from tests.support.cli_support import ckptz as cli
from tests.support.report_support import BUDGET, HOSTILE, Page, a_run, state

FRAME = ("axis", "legend")  # roles of Vega marks that are not data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def report(run: Path) -> PageReport:
    return ckptz.report(run, histograms=["model.embed.weight"])


@pytest.fixture(scope="module")
def html(report: PageReport) -> str:
    return report.html


def charts(html: str) -> dict[str, ET.Element]:
    """Return the charts of a page as parsed SVG, by title."""
    groups = re.findall(r'<div role="group" aria-label="([^"]*)"[^>]*>(<svg.*?</svg>)', html, re.DOTALL)
    return {title: ET.fromstring(svg) for title, svg in groups}


def marks(svg: ET.Element) -> list[str]:
    """Return the labels of a chart's data marks."""
    symbols = [e for e in svg.iter() if e.get("role") == "graphics-symbol" and e.get("aria-label")]
    return [str(e.get("aria-label")) for e in symbols if e.get("aria-roledescription") not in FRAME]


def test_the_page_contains_the_numbers_of_log_and_inspect(run: Path, tmp_path: Path) -> None:
    newest, page = run / "step-00000200.ckptz", tmp_path / "page.html"
    printed = cli("report", run, "-o", page, "--json").json
    numbers = Page.of(page.read_text("utf-8")).numbers
    assert numbers == printed
    assert numbers["runs"] == [cli("log", run, "--json").json]
    assert numbers["files"] == [cli("inspect", newest, "--json").json]
    assert numbers["problems"] == []


def test_a_comparison_has_the_numbers_of_diff(run: Path, tmp_path: Path) -> None:
    files, page = (run / "step-00000100.ckptz", run / "step-00000200.ckptz"), tmp_path / "page.html"
    cli("report", *files, "-o", page)
    numbers, printed = Page.of(page.read_text("utf-8")).numbers["diff"], cli("diff", *files, "--json").json
    assert numbers | {"seconds": 0} == printed | {"seconds": 0}
    assert len(numbers["tensors"]) == 19


def test_the_charts_show_every_checkpoint_with_its_numbers(run: Path, html: str) -> None:
    by_title = charts(html)
    entries = cli("log", run, "--json").json["entries"]
    sizes = marks(by_title["Size of each step"])
    assert len(sizes) == len(entries) == 3
    for label, entry in zip(sizes, entries, strict=True):
        assert f"step: {entry['step']}; bytes: {entry['stored_bytes'] / 1000:.6g}k; part: " in label
        assert f"file: {entry['file']}; kind: {entry['kind']}" in label
    (record,) = entries[2]["quality"]
    (label,) = marks(by_title["Loss of quality: error_of"])
    worse = 100 * (record["measured"] / record["exact"] - 1)
    assert float(label.removeprefix("step: 200; % worse: ")) == pytest.approx(worse)
    assert "limit" in "".join(by_title["Loss of quality: error_of"].itertext())


def test_a_hidden_file_is_told_from_others_and_its_raw_bytes_are_not_counted(run: Path, html: str) -> None:
    report = ckptz.log(run)
    assert [e.is_hidden for e in report.entries] == [True, False, False]
    assert report.tensor_bytes == sum(e.tensor_bytes for e in report.entries[1:])
    assert report.stored_bytes == sum(e.stored_bytes for e in report.entries)
    assert "full, hidden" in cli("log", run).stdout
    assert "part: kept for others" in marks(charts(html)["Size of each step"])[0]
    assert len(marks(charts(html)["How many times smaller"])) == 2  # one mark for each of the two steps


def test_a_page_loads_nothing_and_runs_only_its_own_script(html: str) -> None:
    page = Page.of(html)
    assert html.startswith(MARK)
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    (script,) = (text for attributes, text in page.scripts if "id" not in attributes)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not [a for _, a in page.tags if "src" in a or str(a.get("href", "#"))[0] != "#"]
    assert "url(" not in html


def hostile_run(folder: Path) -> Path:
    """Write a run whose tensor names, metadata and file names contain markup."""
    folder.mkdir()
    tensors = {HOSTILE: np.ones((4, 4), np.float32), f"layers.0.{HOSTILE}": np.zeros(9, np.float32)}
    save_file(tensors, folder / "plain.safetensors", metadata={HOSTILE: HOSTILE})
    name = "<img src=x onerror=alert(3)>.ckptz" if sys.platform != "win32" else "&amp;.ckptz"
    cli("compress", folder / "plain.safetensors", "-o", folder / name, "--set", "input.step=1")
    (folder / "<b>broken.ckptz").write_bytes(b'\x08\0\0\0\0\0\0\0{"<i>":')
    (folder / "plain.safetensors").unlink()
    return folder


def test_text_from_files_never_becomes_markup(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "run")
    report = ckptz.report(folder, histograms=["*"])
    page = Page.of(report.html)
    assert page.numbers["files"][0]["tensors"][0]["name"] == HOSTILE
    assert page.numbers["histograms"][0]["tensor"] == HOSTILE
    assert len(page.scripts) == 2
    assert not {tag for tag, _ in page.tags} & {"img", "i>", "iframe", "object"}
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    assert "<b>broken.ckptz" in page.text  # escaped
    assert "\u202e" not in report.html  # U+202E would reverse the text after it
    with ckptz.safe_open(report.files[0].file, "np") as handle:
        for described in (report.files[0], report.runs[0], handle):
            assert not {"script", "img"} & {tag for tag, _ in Page.of(str(described._repr_html_())).tags}


def test_damage_is_shown_and_decides_the_exit_code(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for n, path in enumerate(sorted(run.glob("*.ckptz"))):
        if n:  # all but the full file
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "step-00000300.ckptz").write_bytes((run / "step-00000200.ckptz").read_bytes()[:-7])
    result = cli("report", folder, "-o", tmp_path / "page.html", fails=True)
    assert result.exit_code == cli("log", folder, fails=True).exit_code
    page = Page.of((tmp_path / "page.html").read_text("utf-8"))
    assert len(page.numbers["problems"]) == 2
    assert [e["kind"] for e in page.numbers["runs"][0]["entries"]] == ["missing", "delta", "delta", "broken"]
    assert "not found" in page.text
    assert page.numbers["files"][0]["broken"]


def test_one_damaged_file_is_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.ckptz").write_bytes((run / "step-00000000.ckptz").read_bytes()[:-1])
    with pytest.raises(FormatError):
        ckptz.report(tmp_path / "a.ckptz", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_page_replaces_a_page_and_nothing_else(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "thesis.html"
    other.write_text("<!doctype html> mine")
    with pytest.raises(ConfigError, match="or give --force"):
        ckptz.report(run, other)
    assert other.read_text() == "<!doctype html> mine"
    ckptz.report(run, other, force=True)
    ckptz.report(run, other)
    with pytest.raises(ConfigError, match="would replace a file that is read"):
        ckptz.report(run / "step-00000000.ckptz", run / "step-00000000.ckptz", force=True)


@pytest.mark.parametrize("name", ["jinja2", "vl_convert"])
def test_a_missing_library_is_named_with_its_remedy(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    result = cli("report", run, fails=True)
    assert result.exit_code == 2
    assert "pip install 'ckptz[report]'" in result.error


def test_files_of_other_formats_are_described_only_in_a_comparison(run: Path, tmp_path: Path) -> None:
    plain = tmp_path / "exact.safetensors"
    save_file(state(200), plain)
    with pytest.raises(ConfigError, match="to compare it"):
        ckptz.report(plain)
    with pytest.raises(FileNotFoundError):
        ckptz.report(tmp_path / "nowhere")
    report = ckptz.report([plain, run / "step-00000200.ckptz"], histograms=["model.layers.0.mlp.up.weight"])
    with pytest.raises(FileNotFoundError):
        ckptz.report([plain, tmp_path / "nowhere.ckptz"])
    assert report.diff.n_changed > 0
    assert len(report.histograms) == 2
    assert "What changed" in report.html


def test_histograms_count_the_values_that_reading_gives(report: PageReport, run: Path) -> None:
    (histogram,) = report.histograms
    with ckptz.safe_open(run / "step-00000200.ckptz", "np") as file:
        values = file.get_tensor("model.embed.weight").astype(np.float64)
    counts, edges = np.histogram(values, N_BINS)
    assert histogram.counts == tuple(counts)
    assert (histogram.low, histogram.high) == (edges[0], edges[-1])
    bars = [e for e in charts(report.html)[histogram.tensor].iter() if e.get("aria-roledescription") == "bar"]
    heights = np.array([float(str(e.get("d")).partition("v")[2].partition("h")[0]) for e in bars])
    np.testing.assert_allclose(heights / heights.max(), counts / counts.max(), atol=1e-3)


def test_histograms_count_values_that_are_not_finite_separately(tmp_path: Path) -> None:
    values = np.array([np.nan, np.inf, 1, 2, 3], np.float32)
    save_file({"w": values, "none": np.full(2, np.nan, np.float32)}, tmp_path / "w.safetensors")
    cli("compress", tmp_path / "w.safetensors")
    spreads = ckptz.report(tmp_path / "w.ckptz", histograms=["*"]).histograms
    assert [(h.tensor, h.low, h.high, sum(h.counts), h.n_not_finite) for h in spreads] == [("w", 1, 3, 3, 2)]
    with pytest.raises(ConfigError, match="ckptz inspect --tensors"):
        ckptz.report(tmp_path / "w.ckptz", histograms=["nothing"])


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Compress a file by a search; return its path and the report."""
    folder = tmp_path_factory.mktemp("searched")
    save_file(state(200), folder / "s.safetensors")
    options = ckptz.SearchOptions(budgets=(BUDGET,), template=ckptz.KMeans(), max_evaluations=5)
    (report,) = ckptz.compress(folder / "s.safetensors", search=options)
    return folder / "s.ckptz", report


def test_a_search_is_shown_from_what_compress_printed(searched: tuple[Path, Any], tmp_path: Path) -> None:
    (path, compressed), document = searched, tmp_path / "search.json"
    document.write_bytes(msgspec.json.encode({"files": [compressed, {"file": "x", "error": {}}]}))
    report = ckptz.report([path, document])
    printed = json.loads(msgspec.json.encode(compressed.search))
    assert json.loads(msgspec.json.encode(report.searches[0].search)) == printed
    labels = marks(charts(report.html)["Size against quality"])
    assert len(labels) == len(compressed.search.trials) == 5
    assert f"bytes: {compressed.search.trials[0].n_bytes / 1000:.6g}k;" in labels[0]


WRONG = ["", "[]", "{}", '{"files": []}', '{"files": [{"search": {"trials": 1}}]}', "[" * 10**5]


@pytest.mark.parametrize("text", WRONG)
def test_other_documents_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text(text)
    with pytest.raises(FormatError, match=r"ckptz compress.*--json"):
        ckptz.report(tmp_path / "search.json")


def test_two_folders_are_shown_side_by_side(run: Path) -> None:
    report = ckptz.report([run, run])
    assert Page.of(report.html).text.count("The run over time") == 4  # a heading and a link for each folder
    assert "Side by side" in report.html
    assert len(report.files) == 1  # both folders have the same newest file


def test_long_tables_say_how_many_rows_there_are(monkeypatch: pytest.MonkeyPatch, report: PageReport) -> None:
    assert MAX_ROWS > len(report.files[0].tensors) == 19
    monkeypatch.setattr("ckptz.verbs.page.MAX_ROWS", 5)
    assert "every tensor (the first 5 of 19)" in report.html


def test_a_layer_is_the_first_number_of_a_name(tmp_path: Path) -> None:
    names = ("h.12.experts.3.up", "h.2.experts.4.up", "conv2d.weight", "norm_1.weight")
    save_file({name: np.arange(9, dtype=np.float32) for name in names}, tmp_path / "m.safetensors")
    cli("compress", tmp_path / "m.safetensors")
    cells = marks(charts(ckptz.report(tmp_path / "m.ckptz").html)["Stored bits per parameter"])
    layers = sorted(re.findall(r"layer: (\w+); kind: ([^;]+);", "\n".join(cells)))
    assert layers == [
        *(("1", "norm_#.weight"), ("12", "h.#.experts.#.up"), ("2", "h.#.experts.#.up")),
        ("none", "conv2d.weight"),
    ]


# --- vocabulary and notebooks ---------------------------------------------------------------------


def test_every_role_and_coder_has_its_words() -> None:
    assert set(page.ROLES) == set(ROLES)
    assert set(CODERS) == {coder.name.lower().replace("_", "-") for coder in CoderId}


def test_every_report_is_shown_in_notebooks_as_a_table(run: Path, report: PageReport) -> None:
    newest = run / "step-00000200.ckptz"
    reports: list[Any] = [ckptz.inspect(newest), ckptz.log(run), ckptz.verify(newest)]
    reports += [ckptz.diff(run / "step-00000000.ckptz", newest)]
    for text_report in reports:
        table = Page.of(text_report._repr_html_())
        assert {tag for tag, _ in table.tags} == {"table", "tr", "th", "td"}
    assert f"stored {format_bytes(newest.stat().st_size)} (" not in Page.of(reports[0]._repr_html_()).text
    assert f"stored {format_bytes(newest.stat().st_size)} " in Page.of(reports[0]._repr_html_()).text
    frame = Page.of(report._repr_html_())
    assert frame.tags[0][1]["srcdoc"] == report.html
    assert issubclass(type(reports[0]), Report)


def test_notebooks_need_no_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jinja2", "vl_convert"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "<table>" in ckptz.log(run)._repr_html_()


def test_an_open_file_is_shown_until_it_is_closed(run: Path) -> None:
    with ckptz.safe_open(run / "step-00000200.ckptz", "np") as file:
        assert "step-00000200.ckptz" in str(file._repr_html_())
    assert file._repr_html_() is None


# --- stores of a Checkpointer ---------------------------------------------------------------------


def test_a_store_is_shown_as_weights_state_and_residual_files(tmp_path: Path) -> None:
    run = Run()
    config = ckptz.KMeans(min_elements=1)
    with run.checkpointer(tmp_path, config=config, background=False) as checkpointer:
        for step in (1, 2):
            run.step()
            checkpointer.save(step, metric=3 / step)
    kinds = [entry.kind for entry in ckptz.log(tmp_path).entries]
    assert "exact" in kinds
    report = ckptz.report(tmp_path, histograms=["0.weight"])
    by_title = charts(report.html)
    parts = re.findall("part: ([^;]+)", "".join(marks(by_title["Size of each step"])))
    assert parts == ["weights", "state", "weights", "state", *["made exact"] * kinds.count("exact")]
    ratios = marks(by_title["How many times smaller"])
    assert len(ratios) == 3 * 2  # weights, state and their sum, for each step
    files = [e for e in report.runs[0].entries if e.step == 2]
    raw = sum(e.tensor_bytes for e in files if e.kind != "exact")
    ratio = raw / sum(e.stored_bytes for e in files)
    match = re.search("step: 2; times smaller: ([0-9.]+); part: whole step", "\n".join(ratios))
    assert float(match[1]) == pytest.approx(ratio, rel=1e-4)
    assert marks(by_title["Metric of each save"]) == ["step: 1; metric: 3", "step: 2; metric: 1.5"]
    assert [h.tensor for h in report.histograms] == ["model.0.weight"]  # selected as "0.weight"
    assert "LOSSY" not in report.html  # the newest step is exact
    assert [Path(file.file).name for file in report.files] == [
        "step-00000002.ckptz",
        "step-00000002.state.ckptz",
    ]


def test_weights_and_states_of_a_trainer_are_distinguished(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in ("model", "state", "rng-00000"):
            save_file({f"{name}.w": np.arange(999, dtype=np.float32)}, folder / f"{name}.safetensors")
            cli("compress", folder / f"{name}.safetensors")
            (folder / f"{name}.safetensors").unlink()
    report = ckptz.report(tmp_path)
    assert [e.holds for e in report.runs[0].entries] == ["weights", "state", "state"] * 2
    assert {Path(file.file).parent.name for file in report.files} == {"checkpoint-20"}
    assert len(marks(charts(report.html)["How many times smaller"])) == 3 * 2


def test_a_file_with_moments_holds_weights_and_state(tmp_path: Path) -> None:
    save_file({"w": np.ones(9), "w.exp_avg": np.ones(9, np.float32)}, tmp_path / "all.safetensors")
    cli("compress", tmp_path / "all.safetensors")
    assert ckptz.log(tmp_path).entries[0].holds == "weights and state"


def test_a_resume_gap_is_printed_in_steps() -> None:
    lost = {"promise": "resume-gap", "metric": "steps_lost", "max_drop": 5.0, "is_relative": False}
    lost |= {"lower_is_better": True, "exact": 0.0, "measured": 2.5, "is_met": True, "date": ""}
    record = msgspec.convert(lost, QualityRecord)
    assert quality_text(record) == "2.5 steps of training lost (limit 5)"


def test_numbers_of_parameters_are_no_layers(tmp_path: Path) -> None:
    tensors = {f"optimizer.state.{i}.exp_avg": np.full(4, i, np.float32) for i in range(3)}
    save_file(tensors, tmp_path / "state.safetensors")
    cli("compress", tmp_path / "state.safetensors")
    chart = charts(ckptz.report(tmp_path / "state.ckptz").html)["Stored bits per parameter"]
    (cell,) = [label for label in marks(chart) if "kind: " in label]
    assert "layer: none" in cell
    assert "kind: optimizer.state.#.exp_avg" in cell


def test_a_model_of_very_many_layers_is_summed_by_kind(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": np.full(4, i, np.float32) for i in range(1300)}
    save_file(tensors, tmp_path / "deep.safetensors")
    cli("compress", tmp_path / "deep.safetensors")
    assert "each kind is summed over all of them" in ckptz.report(tmp_path / "deep.ckptz").html


@pytest.mark.parametrize(
    ("before", "after"), [(None, 0o600), (0o644, 0o600), (0o666, 0o600), (0o400, 0o400), (0o600, 0o600)]
)
def test_a_page_is_no_more_public_than_its_files(tmp_path: Path, before: int | None, after: int) -> None:
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "w.safetensors")
    cli("compress", tmp_path / "w.safetensors")
    (tmp_path / "w.ckptz").chmod(0o600)
    for i, path in enumerate([tmp_path, tmp_path / "w.ckptz"]):
        page = tmp_path / f"{i}.html"
        if before is not None:
            ckptz.report(path, page)
            page.chmod(before)
        ckptz.report(path, page)
        assert page.stat().st_mode & 0o777 == after


def test_a_step_that_residual_files_make_exact_shows_no_error_in_red(tmp_path: Path) -> None:
    model = torch.nn.Linear(96, 96)
    with ckptz.Checkpointer(tmp_path / "run", model, config=ckptz.Grid(), jobs=1) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    html = ckptz.report(tmp_path / "run").html
    assert '<b class="bad">' not in html
    assert "Residual files restore this step bit for bit" in html
    assert "since_anchor" not in html.partition('id="numbers"')[0]
    assert "has tree" not in html
    ckptz.prune(tmp_path / "run", ckptz.KeepPolicy(exact=0))
    assert '<b class="bad">' in ckptz.report(tmp_path / "run").html


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0, 3.0], None), ([3.0, 3.001], None), ([1.0, 16.0], [1, 2, 4, 8, 16]), ([5.0, 5.2], [5, 5.1, 5.2])],
)
def test_a_legend_shows_different_values_or_none(values: list[float], expected: list[float] | None) -> None:
    legend = page._legend(values)
    assert (legend and legend["values"]) == expected


def test_a_searched_file_that_keeps_its_budget_raises_no_alarm_and_its_search_has_no_raw_names(
    searched: tuple[Path, Any], tmp_path: Path
) -> None:
    path, compressed = searched
    assert compressed.n_lossy
    (tmp_path / "search.json").write_bytes(msgspec.json.encode({"files": [compressed]}))
    report = ckptz.report([path, tmp_path / "search.json"])
    assert '<b class="bad">' not in report.html
    text = Page.of(report.html).text
    assert "Measured: " in text
    assert not re.search(r"\bis (met|feasible|interrupted|dry)|min_elements|\d items", text)
    assert "verdict: chosen" in marks(charts(report.html)["Size against quality"])[-1]  # drawn last


def test_the_line_about_a_page_counts_all_files_of_a_run_and_those_that_it_describes(run: Path) -> None:
    line = cli("report", run, "-o", run.parent / "line.html").stdout
    assert "a page of 1 run of 3 files, 1 file in detail;" in line


def test_lines_of_a_logarithmic_axis_are_few_and_enclose_the_values() -> None:
    assert page.logarithmic([1.21, 1.24])["axis"]["values"] == [1, 2]
    assert page.logarithmic([9.0, 60.0])["axis"]["values"] == [5, 10, 20, 50, 100]
    assert page.logarithmic([1.2, 132.0])["axis"]["values"] == [1, 10, 100, 1000]
    assert page.logarithmic([10.0])["scale"]["domain"] == [10, 20]
