"""The page of `ckptz report`: sections with tiles, charts and tables, rendered by a Jinja template.

Vega-Lite draws the charts as SVG when the page is written, so they need no script. Colours are CSS variables,
which follow the dark or light style of the page. Vega-Lite field names are constants; text from files is only
data, so that it cannot change a chart's specification.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ckptz._version import __version__
from ckptz.run.step_files import INTERNAL_KEYS
from ckptz.verbs.quality_text import metric_name, quality_loss, quality_text
from ckptz.words import (
    ROLES,
    facts_of,
    field_text,
    fields_of,
    format_bytes,
    format_percent,
    format_reduction,
    heading,
    shorten,
)

if TYPE_CHECKING:
    from ckptz.api.describe import InspectReport, TensorReport
    from ckptz.verbs.diff import DiffReport
    from ckptz.verbs.log import LogEntry, LogReport

Values = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]
# Parts of the page, as `page.html` reads them. A chart has a `title`, `about` (the description below it), the
# `svg`, and `is_wide`: whether it takes a whole row and is not scaled down.
Section = dict[str, Any]

CODERS: Final = {
    "constant": "one value, nothing to store",
    "stored": "bytes as they are",
    "zstd": "Zstandard, a general compressor",
    "rans-shared": "frequent codes get short bits (rANS, table shared)",
    "rans-own": "frequent codes get short bits (rANS, own table)",
    "sparse": "positions and values of all but the most frequent code",
    "huffman": "frequent codes get short bits (Huffman, fast to decode)",
}
COLOURS: Final = tuple(f"var(--c{n})" for n in range(1, 7))
MAX_KINDS, MAX_TENSORS = 80, 4000  # rows and tensors of a heat map
MAX_LAYERS: Final = 1000  # columns of a heat map

_TEXT: Final = {"labelColor": "var(--soft)", "labelFontSize": 12}
_TITLE: Final = {"titleColor": "var(--soft)", "titleFontSize": 12, "titleFontWeight": "normal"}
_AXIS: Final = {"domain": False, "ticks": False, "labelPadding": 6, "gridColor": "var(--line)"}
_CONFIG: Final = {
    **{"background": None, "font": "system-ui, sans-serif", "view": {"stroke": None}},
    "axis": {**_TEXT, **_TITLE, **_AXIS, "labelLimit": 300, "titlePadding": 8},
    "axisX": {"grid": False, "labelAngle": 0, "labelOverlap": "greedy"},
    "axisY": {"tickCount": 4},
    "legend": {**_TEXT, **_TITLE, "orient": "top", "columns": 2, "symbolStrokeWidth": 0, "columnPadding": 25},
    "header": {**_TEXT, "title": None, "labelAnchor": "start", "labelAngle": 0, "labelOrient": "top"},
    "point": {"filled": True, "size": 45, "opacity": 1},
    "bar": {"stroke": "var(--card)", "strokeWidth": 0.6},
    "line": {"strokeWidth": 1.6, "aria": False},
}
STEPS: Final = {"field": "step", "type": "ordinal", "sort": None}
NAMES: Final = {"field": "name", "type": "nominal", "sort": "-x", "title": None, "axis": {"minExtent": 90}}
LINES: Final = ("line", "point")
# SI prefixes: 2k, 3M; zero without one.
BYTES: Final[Spec] = {"axis": {"format": "~s", "grid": True, "labelExpr": "datum.value ? datum.label : '0'"}}
MAX_LOG_TICKS: Final = 6


def number(field: str, title: str | None = None, **how: Any) -> Spec:
    """Return the Vega-Lite encoding of a numeric field; the axis title is the field name by default."""
    return {"field": field, "type": "quantitative", "title": title or field, **how}


def logarithmic(values: Sequence[float]) -> Spec:
    """Return scale and axis for positive values: lines at powers of ten, with 2 and 5 between them if few."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1
    ticks = [digit * 10.0**power for power in range(low, high) for digit in (1, 2, 5)]
    begin = max(tick for tick in ticks if tick <= min(values))
    end = next(tick for tick in ticks if tick >= max(values) and tick > begin)
    inside = [tick for tick in ticks if begin <= tick <= end]
    if len(inside) > MAX_LOG_TICKS:
        inside = [10.0**power for power in range(low, high)]
        begin, end = min(begin, inside[0]), max(end, inside[-1])
    return {
        "scale": {"type": "log", "domain": [begin, end], "nice": False},
        "axis": {"format": "~r", "values": inside},
    }


def draw(title: str, about: str, values: Values, marks: Sequence[str], y: Spec, **how: Any) -> Section:
    """Draw a chart with layers of Vega-Lite marks.

    Args:
        title: title of the chart.
        about: description.
        values: the data, one mapping for each row.
        marks: Vega-Lite marks, drawn above each other.
        y: encoding of the vertical axis.
        how: `x`, the encoding of the horizontal axis (default: steps); `by`, a field shown by colours;
            `known`, fixed colours of some of its values; `limit`, a value and label for a horizontal line;
            `height` in pixels; anything else is a further encoding.
    """
    by, known, limit = how.pop("by", None), how.pop("known", {}), how.pop("limit", None)
    frame = {"width": 360, "height": how.pop("height", 230)}  # fits the width of a phone without scaling text
    colour: Spec = {"value": COLOURS[0]}
    if by is not None:
        groups = list(dict.fromkeys(value[by] for value in values))
        colour = {"field": by, "type": "nominal", "legend": {"title": None} if len(groups) > 1 else None}
        used = [known.get(name, COLOURS[i % 6]) for i, name in enumerate(groups)]
        colour["scale"] = {"domain": [shorten(name) for name in groups], "range": used}
    of = {"x": STEPS, "y": y, "color": colour, **how}
    layers: list[Spec] = [{"mark": mark, "encoding": of} for mark in marks]
    if limit is not None:
        once: Spec = {"data": {"values": [{}]}, "encoding": {"y": {"datum": limit[0]}}}
        text = {"type": "text", "align": "left", "dy": -7, "text": limit[1], "x": 3, "fontSize": 12}
        lines = ({"type": "rule", "strokeDash": [5, 4]}, text)
        layers += [{**once, "mark": {**mark, "color": "var(--bad)", "aria": False}} for mark in lines]
    fit = {"type": "fit", "contains": "padding"}
    return {"title": title, "about": about, "svg": _svg(values, {**frame, "autosize": fit, "layer": layers})}


def _svg(values: Values, spec: Spec) -> str:
    import vl_convert

    shown = [{key: shorten(v) if isinstance(v, str) else v for key, v in row.items()} for row in values]
    return vl_convert.vegalite_to_svg({"padding": 4, "config": _CONFIG, "data": {"values": shown}, **spec})


def _legend(values: Sequence[float]) -> Spec | None:
    """Return a legend with up to five values that differ after rounding; None for a single value."""
    low, high = min(values), max(values)
    steps = [low * (high / low) ** (i / 4) for i in range(5)]
    shown = list(dict.fromkeys(float(f"{step:.2g}") for step in steps))
    return {"format": ".2~r", "columns": 5, "values": shown} if len(shown) > 1 else None


AnyReport = Any  # `PageReport` or a part of it; verbs.report imports this module
Steps = Mapping[str, Sequence["LogEntry"]]
OWN_PREFIX: Final = "ckptz."  # of keys that adapters add to the metadata
MARK: Final = "<!doctype html><!-- ckptz report -->"  # identifies a report page, which may be replaced
MAX_ROWS, MAX_STEPS = 5000, 400  # first rows of a table, last steps of a chart
RESTORED: Final = ("weights", "state", "weights and state")
PARTS: Final = dict(zip((*RESTORED, "made exact", "kept for others", "whole step"), COLOURS, strict=True))
WHOLE: Final = "whole step"
_NUMBER: Final = re.compile(r"(?<![^._/])\d{1,9}(?![^._/])")
# Moments of PyTorch's own states are numbered by parameter, not by layer.
_NUMBERED_STATE: Final = re.compile(r"optimizer\w*\.(\d+\.)?state\.\d+\.")
MAX_USED: Final = 300.0  # percent of the budget; larger values would compress the axis


def page(report: AnyReport) -> str:
    """Return the page as HTML; all values are escaped, and its policy allows only its own script."""
    import jinja2

    script = files("ckptz.verbs").joinpath("page.js").read_text("utf-8")
    engine = jinja2.Environment(loader=jinja2.PackageLoader("ckptz", "verbs"), autoescape=True)
    engine.trim_blocks = engine.lstrip_blocks = True
    engine.finalize = lambda value: shorten(value, 500) if type(value) is str else value
    contents = {"sections": list(_sections(report)), "numbers": msgspec.to_builtins(report), "report": report}
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fixed = {"mark": MARK, "version": __version__, "coders": CODERS, "script": script, "digest": digest}
    return engine.get_template("page.html").render(**fixed, **contents)


def _sections(report: AnyReport) -> Iterator[Section]:
    if len(report.runs) > 1:
        runs = [{**fields_of(run), "entries": None} for run in report.runs]
        tiles = [_size_tile(_last(run.folder), run.tensor_bytes, run.stored_bytes) for run in report.runs]
        yield {"title": "Side by side", "tiles": tiles, "tables": [_table("The folders", runs)]}
    yield from (_run(run, report.files) for run in report.runs)
    if report.diff:
        yield _changes(report.diff)
    yield from map(_search, report.searches)
    yield from (_file(file, _is_exact(file, report.runs)) for file in report.files)
    if report.histograms:
        yield {"title": "Histograms", "charts": list(map(_histogram, report.histograms))}


def _tile(label: str, value: str, about: str = "", is_bad: bool = False) -> Section:
    about = about.replace(" %", "%")  # may not wrap between the two
    return {"label": label, "value": value, "about": about, "is_bad": is_bad}


def _size_tile(label: str, raw: int, stored: int) -> Section:
    sizes = f"{format_bytes(stored)} of {format_bytes(raw)} raw"
    about = f"{sizes}: {stored:,} of {raw:,} bytes, names and checksums included"
    return _tile(label, format_reduction(raw, stored), about)


def _facts(report: Any) -> dict[str, str]:
    """Return names and values of a report's scalar fields, and its measured qualities."""
    measured = "; ".join(quality_text(record) for record in report.quality)
    return facts_of(report) | ({"quality": measured} if measured else {})


def _table(caption: str, records: Sequence[Mapping[str, Any]]) -> Section:
    """Return a table of records, with a column for each field that any record sets."""
    first = records[0] if records else ()
    names = [name for name in first if any(record[name] not in (None, "") for record in records)]
    more = f" (the first {MAX_ROWS} of {len(records)})" if len(records) > MAX_ROWS else ""
    numeric = {name for name in names if any(_is_number(record[name]) for record in records)}
    rows = [
        [
            (field_text(name, r[name]), r[name] if _is_number(r[name]) else None, name in numeric)
            for name in names
        ]
        for r in records[:MAX_ROWS]
    ]
    return {"caption": caption + more, "headings": list(map(heading, names)), "rows": rows}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _last(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2] or path


# --- runs ---------------------------------------------------------------------------------------


def _part(e: LogEntry) -> str:
    return "kept for others" if e.is_hidden else "made exact" if e.kind == "exact" else e.holds


def _steps(run: LogReport) -> dict[str, list[LogEntry]]:
    """Return the files by step, sorted by part; each file without a step is an entry of its own."""
    steps: dict[str, list[LogEntry]] = {}
    parts, sized = list(PARTS), [e for e in run.entries if e.ratio is not None]
    for e in sorted(sized, key=lambda e: (-1 if e.step is None else e.step, parts.index(_part(e)), e.file)):
        steps.setdefault(shorten(_last(e.file), 20) if e.step is None else str(e.step), []).append(e)
    return steps


def _total(entries: Iterable[LogEntry], part: str = WHOLE) -> Section:
    """Return original bytes (each tensor counted once), stored bytes of all files, and their ratio."""
    of = [e for e in entries if part in (_part(e), WHOLE)]
    raw, stored = sum(e.tensor_bytes for e in of if _part(e) in RESTORED), sum(e.stored_bytes for e in of)
    return {"tensor_bytes": raw, "stored_bytes": stored, "ratio": raw / stored if raw and stored else None}


def _run(run: LogReport, inside: Sequence[InspectReport]) -> Section:
    steps, name = _steps(run), _last(run.folder)
    tiles = [_size_tile("How much smaller", run.tensor_bytes, run.stored_bytes)]
    for step, of in [*steps.items()][-1:]:
        total = _total(of)
        tiles.append(_size_tile(f"Newest step, {step}, in all", total["tensor_bytes"], total["stored_bytes"]))
    own = {f"{run.folder}/{e.file}" for e in run.entries if e.n_lossy}
    tiles += [
        _quality_tile(file, _is_exact(file, [run]), f", {_last(file.file)}")
        for file in inside
        if file.file in own
    ]
    metrics = {step: e.metric for step, of in steps.items() for e in of if e.metric is not None}
    totals = [
        # Files that are kept as bases only have no raw bytes of their own.
        {"step": step, **total, "tensor_bytes": total["tensor_bytes"] or None, "metric": metrics.get(step)}
        for step, of in steps.items()
        for total in [_total(of)]
    ]
    every = []
    for e in run.entries:
        own_words = {"holds": _part(e), "quality": "; ".join(map(quality_text, e.quality))}
        every.append({**fields_of(e), **own_words, **dict.fromkeys(("level", "content_id", "is_hidden"))})
    tables = [_table(f"{name}: every step in all", totals), _table(f"{name}: every file", every)]
    drawn = list(_run_charts(dict([*steps.items()][-MAX_STEPS:]), metrics)) if steps else []
    facts, title = facts_of(run), f"The run over time: {name}"
    return {"title": title, "tiles": tiles, "facts": facts, "charts": drawn, "tables": tables}


def _run_charts(steps: Steps, metrics: Mapping[str, float]) -> Iterator[Section]:
    values = [
        {"step": step, "bytes": e.stored_bytes, "part": _part(e), "file": e.file, "kind": e.kind}
        for step, of in steps.items()
        for e in of
    ]
    how: Section = {"by": "part", "known": PARTS, "order": {"field": "part", "sort": "descending"}}
    how["detail"] = [{"field": "file"}, {"field": "kind"}]
    about, y = "Size of each step, bases not included.", number("bytes", **BYTES)
    yield draw("Size of each step", about, values, ["bar"], y, **how)
    if points := [{"step": step, "metric": metrics[step]} for step in steps if step in metrics]:
        about = "The metric passed to each save; unrelated to the loss by compression."
        yield draw("Metric of each save", about, points, LINES, number("metric", scale={"zero": False}))
    ratios = [
        {"step": step, "times smaller": ratio, "part": part}
        for step, of in steps.items()
        for part in (*RESTORED, WHOLE)
        if (ratio := _total(of, part)["ratio"])
    ]
    if ratios:
        about = "Original size / stored size. A whole step includes its residual files."
        whole = {row["step"]: row["times smaller"] for row in ratios if row["part"] == WHOLE}
        parts = [row for row in ratios if row["part"] != WHOLE]
        if all(row["times smaller"] == whole[row["step"]] for row in parts):
            about, ratios = "Original size / stored size.", parts
        y = number("times smaller", **logarithmic([row["times smaller"] for row in ratios]))
        yield draw("How many times smaller", about, ratios, LINES, y, by="part", known=PARTS)
    measured: dict[tuple[str, str, float], list[Section]] = {}
    for step, record in ((step, record) for step, of in steps.items() for e in of for record in e.quality):
        factor, unit = (100, "% worse") if record.is_relative else (1, "worse")
        points = measured.setdefault((metric_name(record), unit, factor * record.max_drop), [])
        points.append({"step": step, unit: factor * quality_loss(record)})
    for (name, unit, most), points in measured.items():
        about = "Difference from the exact checkpoint: above 0 is worse; the limit holds in both directions."
        yield draw(f"Loss of quality: {name}", about, points, LINES, number(unit), limit=(most, "limit"))


# --- files --------------------------------------------------------------------------------------


def _n(t: TensorReport) -> int:
    return math.prod(t.shape)


def _role(t: TensorReport) -> str:
    return ROLES.get(t.role, t.role)


def _errors(tensors: Iterable[TensorReport]) -> tuple[float | None, float | None]:
    """Return the typical and the largest relative rms error of lossy tensors.

    The typical error is the median over tensors, weighted by their number of values.
    """
    lossy = [(t.lossy.rms_error / t.lossy.rms, _n(t)) for t in tensors if t.lossy and t.lossy.rms]
    seen, half = 0, sum(n for _, n in lossy) / 2
    typical = next((error for error, n in sorted(lossy) if (seen := seen + n) >= half), None)
    return typical, max((error for error, _ in lossy), default=None)


def _is_exact(file: InspectReport, runs: Sequence[LogReport]) -> bool:
    """Return whether a run has a residual file for the step of a lossy file."""
    return any(
        e.kind == "exact" and e.step is not None and e.step == file.step
        for run in runs
        if file.file in {f"{run.folder}/{own.file}" for own in run.entries}
        for e in run.entries
    )


def _quality_tile(file: InspectReport, is_exact: bool, of_file: str = "") -> Section:
    """Return a tile with the typical error of a lossy file, unless residual files make its step exact.

    It is a warning unless a measured budget was kept. `of_file` is appended to the label.
    """
    n, (typical, worst) = sum(t.lossy is not None for t in file.tensors), _errors(file.tensors)
    if not n:
        return _tile("Values", "lossless", "restores bit for bit")
    if is_exact:
        about = "Residual files restore this step bit for bit until the next step is saved; "
        about += f"then the typical error is {format_percent(typical)}."
        return _tile(f"Values{of_file}", "exact", about)
    about = f"LOSSY: relative rms error of {n} of {file.n_tensors} tensors, at most {format_percent(worst)}. "
    measured = "; ".join(map(quality_text, file.quality))
    about += f"Measured: {measured}." if measured else "Only an evaluation shows the effect on quality."
    is_kept = all(record.is_met for record in file.quality) and bool(measured)
    return _tile(f"Typical error{of_file}", format_percent(typical), about, is_bad=not is_kept)


def _layer_map(
    title: str, about: str, tensors: Iterable[Sequence[Any]], *, is_root: bool = True
) -> list[Section]:
    """Draw a heat map with a row for each kind of tensor and a column for each layer; none without tensors.

    Args:
        title: title of the chart.
        about: description.
        tensors: (group, name, top, bottom) of each tensor; the first number in a name is its layer. A cell
            shows the sum of `top` divided by the sum of `bottom`. Only the first `MAX_KINDS` kinds are shown;
            with more than `MAX_LAYERS` layers, each kind is summed over all layers.
        is_root: show the square root of the quotient, in percent.
    """
    items = []
    for group, name, top, bottom in tensors:
        if top > 0:
            number_in_name = None if _NUMBERED_STATE.search(name) else _NUMBER.search(name)
            layer = str(int(number_in_name[0])) if number_in_name else "none"
            items.append((group, _NUMBER.sub("#", name), layer, top, bottom))
    kinds = list(dict.fromkeys((group, kind) for group, kind, *_ in items))[:MAX_KINDS]
    shown = [item for item in items if item[:2] in kinds][:MAX_TENSORS]
    if not shown:
        return []
    about = f"{about} Rows are kinds of tensors, columns are layers.".strip()
    layers = {layer for _, _, layer, *_ in shown}
    if len(layers) > MAX_LAYERS:  # vl-convert overflows its stack at about 1,200
        layers = {"none"}
        about += f" More than {MAX_LAYERS:,} layers: each kind is summed over all of them."
    sums: dict[tuple[str, str, str], list[float]] = {}
    for group, kind, layer, top, bottom in shown:
        of = sums.setdefault((group, kind, layer if layer in layers else "none"), [0.0, 0.0])
        of[0], of[1] = of[0] + top, of[1] + bottom
    values: list[dict[str, Any]] = []
    for (group, kind, layer), (top, bottom) in sums.items():
        value = 100 * math.sqrt(top / bottom) if is_root else top / bottom
        values.append({"group": group, "kind": kind, "layer": layer, "value": value})
    order = ["none", *sorted(layers - {"none"}, key=int)]
    # Fonts of browsers are wider than those of vl-convert.
    room = min(182, 7 * max(len(kind) for _, kind in kinds))
    spec = _heat_map(order, room, _legend([cell["value"] for cell in values]))
    is_wide = room + 24 * len(order) > 380
    return [{"title": title, "about": about, "svg": _svg(values, spec), "is_wide": is_wide}]


def _heat_map(order: Sequence[str], room: int, legend: Spec | None) -> Spec:
    """Return the specification of a heat map.

    Args:
        order: the layers from left to right.
        room: pixels for the names of kinds.
        legend: of the values.
    """
    # Names differ at the end.
    label = "length(datum.label) > 26 ? '…' + slice(datum.label, -25) : datum.label"
    depth: Spec = {"scale": {"type": "log", "range": [0.1, 1]}, "legend": legend}
    axis = {"orient": "top", "labelExpr": "datum.label == 'none' ? '–' : datum.label"}
    x: Spec = {"field": "layer", "type": "ordinal", "sort": order, "axis": axis}
    y: Spec = {"field": "kind", "type": "nominal", "title": None, "sort": None}
    y["axis"] = {"minExtent": room, "labelExpr": label}
    cells = {"mark": {"type": "rect", "color": COLOURS[0]}, "width": {"step": 24}, "height": {"step": 20}}
    cells["encoding"] = {"x": x, "y": y, "opacity": number("value", "faint to strong", **depth)}
    spec: Spec = {"spec": cells, "resolve": {"scale": {"y": "independent"}}}
    spec |= {"facet": {"row": {"field": "group", "sort": None}}}
    return spec


def _file_facts(file: InspectReport) -> dict[str, str]:
    """Return the facts of a file, with the user's metadata but without the keys of a Checkpointer."""
    facts = _facts(file) | {"kind of state": "nested" if file.has_tree else "flat"}
    facts["metadata"] = field_text(
        "",
        {
            k: v
            for k, v in (file.metadata or {}).items()
            if k not in INTERNAL_KEYS and not k.startswith(OWN_PREFIX)
        },
    )
    return {name: text for name, text in facts.items() if name != "has tree"}


def _file(file: InspectReport, is_exact: bool) -> Section:
    roles, name = list(ROLES), _last(file.file)
    tensors = sorted(file.tensors, key=lambda t: roles.index(t.role) if t.role in roles else len(roles))
    tiles = [
        _size_tile("How much smaller", file.tensor_bytes, file.stored_bytes),
        _quality_tile(file, is_exact),
    ]
    chain = ", ".join(f"{m.file}{'' if m.path else ' (missing)'}" for m in file.chain[:20])
    head, every = ("name", "role", "layer_type", "tensor_bytes", "stored_bytes", "ratio"), []
    for t in sorted(tensors, key=lambda t: -t.stored_bytes):
        own = {"role": _role(t), "lossy": t.lossy and t.lossy.method}
        every.append({**dict.fromkeys(head), "typical_error": _errors([t])[0], **fields_of(t), **own})
    return {
        **{
            "title": f"Inside {name}",
            "tiles": tiles,
            "facts": _file_facts(file) | {"chain": chain or "none"},
        },
        "charts": list(_file_charts(tensors)) if tensors else [],
        "tables": [_table(f"{name}: every tensor", every)],
        "warning": f"Its chain is incomplete: {file.broken}" if file.broken else "",
    }


def _file_charts(tensors: Sequence[TensorReport]) -> Iterator[Section]:
    sums: Counter[tuple[str, str]] = Counter()
    for t in tensors:
        sums[t.layer_type, _role(t)] += t.stored_bytes
    values = [{"name": layer, "bytes": n, "what": role} for (layer, role), n in sums.items()]
    known, height = dict(zip(ROLES.values(), COLOURS, strict=True)), 90 + 26 * len({name for name, _ in sums})
    about = "By what the layers do, from tensor names and shapes."
    x = number("bytes", axis={**BYTES["axis"], "tickCount": 4})
    how: Section = {"by": "what", "known": known, "height": height}
    yield draw("Where the bytes are", about, values, ["bar"], NAMES, x=x, **how)
    bits = [(_role(t), t.name, t.stored_bytes * 8.0, _n(t)) for t in tensors if _n(t) > 1]
    yield from _layer_map("Stored bits per parameter", "", bits, is_root=False)
    lossy = [(t, t.lossy) for t in tensors if t.lossy and t.lossy.rms]
    lost = [(_role(t), t.name, loss.rms_error**2 * _n(t), loss.rms**2 * _n(t)) for t, loss in lossy]
    about = "Relative error: rms error of the values divided by their rms."
    yield from _layer_map("Relative error, %", about, lost)


# --- comparisons, searches and histograms -------------------------------------------------------


def _changes(diff: DiffReport) -> Section:
    changed = [("tensors", t.name, (t.relative_change or 0) ** 2, 1.0) for t in diff.tensors]
    about = "Relative change: rms change of the values divided by their rms."
    drawn = _layer_map("Relative change, %", about, changed)
    tables = [_table("What changed: every tensor", list(map(fields_of, diff.tensors)))]
    return {"title": "What changed from A to B", "facts": facts_of(diff), "charts": drawn, "tables": tables}


def _search(searched: AnyReport) -> Section:
    search, name = searched.search, _last(searched.output)
    rows, values = [], []
    for n, trial in enumerate(search.trials, 1):
        verdict = "within the budget" if trial.is_feasible else "over the budget"
        verdict = "chosen" if trial.config == search.config else verdict
        own = {"n_bytes": None, "judgements": None, "stored_bytes": trial.n_bytes, "verdict": verdict}
        rows.append({"trial": n, **fields_of(trial), **own})
        if trial.drop is not None:
            used = min(100 * max(trial.drop, 0.0), MAX_USED)
            values.append({"trial": n, "bytes": trial.n_bytes, "used": used, "verdict": verdict})
    values.sort(key=lambda row: row["verdict"] == "chosen")  # drawn last, above an equal one
    about = "Each point is a measured file; points below the line keep the budget."
    if any(row["used"] == MAX_USED for row in values):
        about += f" Points at {MAX_USED:.0f} % use that much or more."
    x = number("bytes", scale={"zero": False}, axis={**BYTES["axis"], "tickCount": 4})
    y = number("used", "% of the budget used")
    how: Section = {"by": "verdict", "limit": (100.0, "budget"), "detail": {"field": "trial"}}
    drawn = [draw("Size against quality", about, values, ["point"], y, x=x, **how)] if values else []
    tables = [_table(f"{name}: what the search tried, in order", rows)]
    return {"title": f"The search {name}", "facts": _facts(search), "charts": drawn, "tables": tables}


def _histogram(h: AnyReport) -> Section:
    more = f", and {h.n_not_finite} not finite" if h.n_not_finite else ""
    ends = [h.low + (h.high - h.low) * i / len(h.counts) for i in range(len(h.counts) + 1)]
    values = [{"from": a, "to": b, "values": n} for a, b, n in zip(ends, ends[1:], h.counts, strict=False)]
    about = f"{_last(h.file)}: {sum(h.counts):,} values from {h.low:.3g} to {h.high:.3g}{more}"
    x = number("from", bin="binned", axis={"tickCount": 4, "title": None}, scale={"nice": False})
    y = number("values", axis={"tickMinStep": 1, "format": ",.0f", "tickCount": 4})  # whole numbers
    return draw(shorten(h.tensor), about, values, ["bar"], y, x=x, x2={"field": "to"})
