"""The page of `ckptz report`: tiles, charts, heat maps and tables, and every number as JSON within."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from ckptz._version import __version__
from ckptz.pages import pictures
from ckptz.pages.facts import (
    bits_map,
    budget_tile,
    changes_map,
    checkpoints_table,
    errors_map,
    file_facts,
    methods_table,
    size_tiles,
    tile,
    tiles,
    times,
    trials_table,
)
from ckptz.pages.html import Html, el, embedded, join, name_of, table
from ckptz.pages.words import CODERS, cut, percent, size

Document = Mapping[str, Any]
MARK: Final = "<!doctype html><!-- ckptz report -->"  # begins every page, so that one may replace another


def style() -> str:
    """Read the style of pages and of what notebooks show."""
    return files("ckptz.pages").joinpath("page.css").read_text("utf-8")


def page(document: Document) -> str:
    """Write the page of a document: the fields of a `PageReport` as `--json` prints them."""
    sections = [section for section in _sections(document) if section is not None]
    script = files("ckptz.pages").joinpath("page.js").read_text("utf-8")
    names = [cut(path, 60) for path in document["paths"]]
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{', '.join(names)} · ckptz report"),
        el("style", Html(style())),
    )
    links = [el("a", title, href=f"#{anchor}") for anchor, title, _ in sections]
    body = el(
        "body",
        el("a", "Skip to the numbers", href="#main", class_="skip"),
        el(
            "header",
            el("p", "ckptz report", class_="brand"),
            el("h1", join(el("span", name_of(path)) for path in document["paths"])),
            el("nav", links, aria_label="Sections"),
            el(
                "p",
                el("button", "Dark or light", type="button", id="theme"),
                " ",
                el("button", "Save all numbers as JSON", type="button", id="save"),
                class_="tools",
            ),
        ),
        el(
            "main",
            [el("section", el("h2", title), list(parts), id=at) for at, title, parts in sections],
            id="main",
        ),
        el("footer", _footer()),
        el("div", id="tip", role="presentation", hidden=True),
        embedded(document, "numbers"),
        el("script", Html(script)),
        class_="ckptz page",
    )
    return f"{MARK}\n{el('html', head, body, lang='en')}\n"


def _policy(script: str) -> str:
    """Forbid the page every other script and all of the network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _footer() -> list[Html]:
    verbs = ("ckptz verify", "ckptz inspect --json", "log --json", "diff --json")
    verify, inspect, log, diff = (el("code", verb) for verb in verbs)
    decoded = "values are decoded only for histograms and comparisons of two files. "
    written = f"Written by ckptz {__version__} from indices and headers: {decoded}"
    numbers = "This page needs no network, and all of its numbers are in it as JSON, as "
    return [
        el("p", written, verify, " checks every value."),
        el("p", numbers, inspect, ", ", log, " and ", diff, " print them."),
    ]


Section = tuple[str, str, Sequence[object]]


def _sections(document: Document) -> Iterable[Section | None]:
    runs, inspected = document["runs"], document["files"]
    yield _problems(document["problems"])
    if len(runs) > 1:
        yield _comparison(runs)
    for n, run in enumerate(runs):
        yield f"run-{n}", _titled("The run over time", run["folder"], len(runs)), _run(run)
    if document["diff"]:
        yield "diff", "What changed", _changes(document["diff"])
    for n, search in enumerate(document["searches"]):
        title = _titled("The search", search["output"], len(document["searches"]))
        yield f"search-{n}", title, _search(search["search"])
    for n, file in enumerate(inspected):
        yield f"file-{n}", f"Inside {cut(_last(file['file']), 48)}", _file(file, n, document)
    yield "words", "What the words mean", [_glossary()]


def _titled(title: str, name: str, n: int) -> str:
    return f"{title}: {cut(_last(name), 40)}" if n > 1 else title


def _last(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2] or path


def _problems(problems: Sequence[str]) -> Section | None:
    if not problems:
        return None
    listed = el("ul", [el("li", cut(problem, 500)) for problem in problems[:200]], class_="warn")
    more = f" The first 200 of {len(problems)}." if len(problems) > 200 else ""
    return "problems", "Problems", [el("p", f"These files cannot be used as they are.{more}"), listed]


def _run(run: Document) -> list[object]:
    entries = pictures.checkpoints(run)
    steps = [entry["step"] for entry in entries if entry["step"] is not None]
    span = f"steps {min(steps)} to {max(steps)}" if steps else "no steps recorded"
    n_bad = run["n_broken"] + run["n_missing"]
    bad = f"{run['n_broken']} cannot be read, {run['n_missing']} bases missing"
    return [
        tiles(
            *size_tiles(run),
            tile("Files", f"{run['n_files']:,}", span, key=run["n_files"]),
            budget_tile(record for entry in entries for record in entry["quality"]),
            tile("Problems", n_bad, bad, key=n_bad, is_bad=True) if n_bad else None,
        ),
        el("div", pictures.run_charts(run), class_="charts"),
        el("h3", "All checkpoints"),
        checkpoints_table(run),
    ]


def _comparison(runs: Sequence[Document]) -> Section:
    headings = ("folder", "#files", "#raw", "#stored", "#smaller", "#deepest chain", "#problems")
    rows = [
        [
            *((name_of(run["folder"]), run["folder"]), run["n_files"]),
            *((size(run[name]), run[name]) for name in ("tensor_bytes", "stored_bytes")),
            (times(run["tensor_bytes"], run["stored_bytes"]), run["ratio"]),
            max((entry["depth"] for entry in run["entries"]), default=0),
            run["n_broken"] + run["n_missing"],
        ]
        for run in runs
    ]
    charts = el("div", pictures.comparison_charts(runs), class_="charts")
    return "compare", "Side by side", [table(headings, rows, caption="The folders"), charts]


def _file(file: Document, n: int, document: Document) -> list[object]:
    errors = errors_map(file)
    lost = [el("h3", "What was lost"), errors] if errors else []
    broken = file["broken"]
    return [
        el("p", "Its chain is incomplete: ", cut(broken, 300), class_="warn") if broken else None,
        tiles(
            *size_tiles(file),
            tile("Tensors", f"{file['n_tensors']:,}", None, key=file["n_tensors"]),
            budget_tile(file["quality"]),
        ),
        file_facts(file),
        el("div", pictures.file_charts(file), class_="charts"),
        methods_table(file),
        el("h3", "Bits per parameter, layer by layer"),
        bits_map(file) or el("p", "It holds no elements."),
        *lost,
        el("h3", "Every tensor"),
        _asked(document, file["file"]),
        el("div", _NO_SCRIPT, data_table="tensors", data_file=n),
    ]


_NO_SCRIPT: Final = el(
    "noscript", el("p", "The list of tensors needs JavaScript; its numbers are in this page as JSON.")
)


def _asked(document: Document, name: str) -> Html:
    if any(h["file"] == name for h in document["histograms"]):
        return el("p", "Choose a tensor's name to see how its values are spread.")
    asked = el("code", "--histogram 'NAME*'")
    drawn = "Histograms of values are drawn for tensors that are asked for with "
    return el("p", drawn, asked, ", because they must be decoded.", class_="hint")


def _changes(diff: Document) -> list[object]:
    n = f"{diff['n_changed']:,} of {diff['n_tensors']:,}"
    only = [
        f"{diff[key]} only in {side}" for key, side in (("n_only_a", "A"), ("n_only_b", "B")) if diff[key]
    ]
    share, typical, largest = diff["changed_share"], diff["relative_change"], diff["max_change"]
    return [
        el("p", "From A, ", name_of(diff["first"]), ", to B, ", name_of(diff["second"]), "."),
        tiles(
            tile("Tensors that changed", n, ", ".join(only) or None, key=diff["n_changed"]),
            tile("Values that changed", percent(share), "of all values compared", key=share),
            tile("Typical change", percent(typical), "of the typical value, in what changed", key=typical),
            tile("Largest change", "–" if largest is None else f"{largest:.3g}", key=largest),
        ),
        changes_map(diff),
        el("h3", "Every tensor"),
        el("div", _NO_SCRIPT, data_table="diff"),
    ]


def _search(search: Document) -> list[object]:
    trials = search["trials"]
    met = {True: "kept", False: "not kept: written without loss", None: "not measured"}[search["is_met"]]
    metrics = ", ".join(cut(metric, 30) for metric in search["metrics"])
    predicted = f"{search['n_predicted']:,} more only predicted" if search["n_predicted"] else None
    evaluating, seconds = f"{search['evaluation_seconds']:.3g} s of it in evaluations", search["seconds"]
    chart = pictures.search_chart(search)
    return [
        tiles(
            tile("Budget", met, metrics, is_bad=search["is_met"] is False),
            tile("Files tried", len(trials), predicted, key=len(trials)),
            tile("Time", f"{seconds:.3g} s", evaluating, key=seconds),
            budget_tile(search["quality"]),
        ),
        el("div", chart, class_="charts") if chart else None,
        trials_table(search),
    ]


_WORDS: Final = {
    "anchor": "a file that stands alone; restoring it needs no other",
    "delta": "a file that holds what changed since another one, its base; restoring it needs that one too",
    "deltas down": "how many deltas lie between a file and its anchor, itself included",
    "times smaller": "raw bytes of the tensors divided by the bytes of the file",
    "bits per parameter": "stored bits divided by the number of values; raw fp32 takes 32, bf16 takes 16",
    "lossless": "every bit comes back",
    "lossy": "some values differ; only on request, and the file records how much was promised and measured",
    "budget": "how much of a quality, such as a loss, may be lost",
    "moments": "Adam's running averages: first of gradients (exp_avg), second of squares (exp_avg_sq)",
    "chunks to decode": "pieces of about a million values that reading a tensor decodes, bases included",
}


def _glossary() -> Html:
    words = {**_WORDS, **{coder: f"a coder: {about}" for coder, about in CODERS.items()}}
    return el(
        "dl", [(el("dt", word), el("dd", about)) for word, about in words.items()], class_="facts words"
    )
