"""The charts of a page, made of reports as `--json` prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ckptz.pages import charts
from ckptz.pages.charts import COLOURS, figure, thinned, unit_of
from ckptz.pages.facts import (
    budget_text,
    coder_bytes,
    coder_text,
    kind_text,
    metric_name,
    role_order,
    role_text,
    settings_text,
    sizes_text,
    times,
)
from ckptz.pages.html import Html
from ckptz.pages.words import CODERS, METRICS, ROLES, cut, percent, size, worse

Report = Mapping[str, Any]
MOST_BARS: Final = 12
MOST_METRICS: Final = 4
LEAST_SHARE: Final = 0.005  # of a coder, that can be seen
SUFFIX: Final = ".ckptz"
STATE: Final = ".state."  # in the names of files that hold what resuming needs beside the weights
EXACT: Final = " Exact files make the newest step come back bit for bit."
MOST_USED: Final = 300.0  # percent of a budget up to which trials are drawn at their place


def series_of(entry: Report) -> str:
    """Say which of the files of a step one is."""
    return "optimizer and the rest" if STATE in entry["file"] else "weights"


def label_of(entry: Report) -> str:
    """Give a checkpoint's place on an axis: its step, or its name where none is recorded."""
    return cut(entry["file"].removesuffix(SUFFIX), 24) if entry["step"] is None else str(entry["step"])


def checkpoints(run: Report) -> list[Report]:
    """Give the checkpoints of a folder that can be read, by step and then by name; bases in no step first."""
    found = [entry for entry in run["entries"] if entry["ratio"] is not None]
    return sorted(found, key=lambda e: (-1 if e["step"] is None else e["step"], e["file"]))


def run_charts(run: Report) -> list[Html]:
    """Draw the run over time."""
    entries = checkpoints(run)
    if not entries:
        return []
    return [
        _sizes(entries),
        _ratios(entries),
        _growth(entries),
        *(_links(run, series) for series in charts.in_order([{"s": series_of(e)} for e in entries], "s")),
        *qualities(entries),
    ]


def _about(entry: Report) -> str:
    step = "no step recorded" if entry["step"] is None else f"step {entry['step']}"
    sizes = sizes_text(entry["tensor_bytes"], entry["stored_bytes"])
    return f"{cut(entry['file'])}, {step}: {kind_text(entry)}, {sizes}"


def _sizes(entries: Sequence[Report]) -> Html:
    kept, said = thinned(entries)
    unit, scale = unit_of(max(e["stored_bytes"] for e in entries))
    values = [
        {
            "step": label_of(e),
            "amount": e["stored_bytes"] / scale,
            "colour": e["kind"],
            "order": series_of(e) != "weights",
            "words": _about(e),
        }
        for e in kept
    ]
    exact = any(e["kind"] == "exact" for e in entries)
    about = f"Anchors stand alone, deltas hold only what changed.{EXACT * exact}{said}"
    return figure(f"Size of each checkpoint, {unit}", about, charts.stacked_bars(values, unit))


def _ratios(entries: Sequence[Report]) -> Html:
    kept, said = thinned([e for e in entries if e["kind"] != "exact"])
    values = [
        {"step": label_of(e), "amount": e["ratio"], "series": series_of(e), "words": _about(e)} for e in kept
    ]
    about = f"Raw bytes divided by stored bytes: higher is better.{said}"
    return figure("Times smaller", about, charts.lines(values, "times smaller"))


def _growth(entries: Sequence[Report]) -> Html:
    kept, said = thinned(_sums(entries))
    unit, scale = unit_of(kept[-1]["sum"])
    values = [
        {
            "step": label_of(e),
            "amount": e["sum"] / scale,
            "series": "stored",
            "words": f"up to {label_of(e)}: {size(e['sum'])} stored for {size(e['raw'])} of tensors",
        }
        for e in kept
    ]
    about = f"All files up to a step; {size(kept[-1]['raw'])} raw at the end.{said}"
    return figure(f"Disk space taken so far, {unit}", about, charts.lines(values, unit))


def _sums(entries: Iterable[Report]) -> list[dict[str, Any]]:
    total = raw = 0
    sums = []
    for entry in entries:
        total, raw = total + entry["stored_bytes"], raw + entry["tensor_bytes"]
        sums.append({**entry, "sum": total, "raw": raw})
    return sums


def _links(run: Report, series: str) -> Html:
    by_name = {entry["file"]: entry for entry in run["entries"]}
    chosen = [e for e in checkpoints(run) if series_of(e) == series]
    kept, said = thinned(chosen)
    drawn = {entry["file"] for entry in kept}
    values = []
    for entry in kept:
        base = by_name.get(entry["parent"])
        has_line = base is not None and base["file"] in drawn
        values.append(
            {
                "step": label_of(entry),
                "depth": entry["depth"],
                "colour": entry["kind"],
                "hollow": bool(entry.get("is_hidden")),
                "base_step": label_of(base) if base and has_line else None,
                "base_depth": base["depth"] if base and has_line else None,
                "words": f"{_about(entry)}; {_against(entry)}",
            }
        )
    hollow = " Hollow: kept only because others need it." if any(v["hollow"] for v in values) else ""
    about = f"A line leads from a file to the one that it needs: {series}.{hollow}{said}"
    return figure("What is stored against what", about, charts.links(values))


def _against(entry: Report) -> str:
    parent = entry["parent"]
    return f"{entry['depth']} deltas down, against {cut(parent)}" if parent else "needs no other file"


def qualities(entries: Sequence[Report]) -> list[Html]:
    """Draw each quality that was measured, over the run, with what was allowed."""
    found: dict[tuple[str, bool], list[tuple[Report, Report]]] = {}
    for entry in entries:
        for record in entry["quality"]:
            found.setdefault((metric_name(record), record["is_relative"]), []).append((entry, record))
    return [_quality(name, at) for (name, _), at in list(found.items())[:MOST_METRICS]]


def _quality(name: str, measured: Sequence[tuple[Report, Report]]) -> Html:
    kept, said = thinned(measured)
    relative = measured[0][1]["is_relative"]
    scale, unit = (100, "%") if relative else (1, "steps" if name in METRICS.values() else "difference")
    values = [
        {
            "step": label_of(entry),
            "amount": scale * worse(record),
            "series": "measured",
            "words": f"{cut(entry['file'])}, step {label_of(entry)}: {budget_text(record)}",
        }
        for entry, record in kept
    ]
    limits = {record["max_drop"] for _, record in measured}
    limit = {"limit": scale * limits.pop(), "limit_title": "allowed"} if len(limits) == 1 else {}
    about = f"How much worse than the exact checkpoint; below 0 is better.{said}"
    return figure(f"Loss of quality: {name}, {unit}", about, charts.lines(values, unit, **limit))


# --- runs beside each other ---------------------------------------------------------------------


def comparison_charts(runs: Sequence[Report]) -> list[Html]:
    """Draw several runs into the same charts."""
    ratios, growth = [], []
    for run in runs:
        name = cut(run["folder"], 40)
        entries = thinned(_sums(checkpoints(run)))[0]
        for e in entries:
            at, what = {"step": label_of(e), "series": name}, f"{name}, up to {label_of(e)}"
            ratio = times(e["raw"], e["sum"])
            ratios.append({**at, "amount": e["raw"] / e["sum"], "words": f"{what}: {ratio}"})
            growth.append({**at, "amount": e["sum"], "words": f"{what}: {size(e['sum'])}"})
    if not growth:
        return []
    unit, scale = unit_of(max(value["amount"] for value in growth))
    growth = [{**value, "amount": value["amount"] / scale} for value in growth]
    ratios, growth = (sorted(values, key=_by_step) for values in (ratios, growth))
    taken, drawn = "All files up to a step: lower is better.", charts.lines(growth, unit)
    divided = "Raw bytes divided by stored bytes, of all files up to a step."
    return [
        figure(f"Disk space taken so far, {unit}", taken, drawn),
        figure("Times smaller so far", divided, charts.lines(ratios, "times smaller")),
    ]


def _by_step(value: Mapping[str, Any]) -> tuple[bool, int]:
    return (True, int(value["step"])) if value["step"].isdecimal() else (False, 0)


# --- one file -----------------------------------------------------------------------------------


def file_charts(file: Report) -> list[Html]:
    """Draw where the bytes of a file are, and which coder wrote them."""
    return [_bytes(file), _coders(file)] if file["tensors"] else []


def _bytes(file: Report) -> Html:
    sums: dict[tuple[str, str], list[int]] = {}
    totals: Counter[str] = Counter()
    for tensor in file["tensors"]:
        found = sums.setdefault((tensor["layer_type"], tensor["role"]), [0, 0])
        found[0] += tensor["stored_bytes"]
        found[1] += tensor["tensor_bytes"]
        totals[tensor["layer_type"]] += tensor["stored_bytes"]
    unit, scale = unit_of(max(totals.values()))
    values = [
        {
            "name": cut(layer_type, 24),
            "amount": sums[layer_type, role][0] / scale,
            "colour": role_text(role),
            "words": f"{cut(layer_type, 24)}, {role_text(role)}: {sizes_text(*sums[layer_type, role][::-1])}",
        }
        for layer_type, _ in totals.most_common(MOST_BARS)
        for role in sorted((role for name, role in sums if name == layer_type), key=role_order)
    ]
    by = {role_text(role): colour for role, colour in zip(ROLES, COLOURS, strict=True)}
    about = "By what the layers do, from tensor names and shapes."
    return figure(f"Where the bytes are, {unit}", about, charts.shares(values, unit, by))


def _coders(file: Report) -> Html:
    values = []
    for role in sorted({t["role"] for t in file["tensors"]}, key=role_order):
        sums = coder_bytes(t for t in file["tensors"] if t["role"] == role)
        for coder, n in sums.most_common():
            if (share := n / sums.total()) >= LEAST_SHARE:
                name, colour = role_text(role), cut(coder, 40)
                words = f"{name}: {percent(share)} of the bytes, {coder_text(coder)}"
                values.append({"name": name, "amount": 100 * share, "colour": colour, "words": words})
    by = dict(zip(CODERS, (COLOURS[i] for i in (5, 4, 2, 0, 3, 1)), strict=True))
    about = "How codes became bytes, in % of the bytes; the glossary below says what each does."
    return figure("Which coder wrote the bytes, %", about, charts.shares(values, "% of the bytes", by))


# --- searches -----------------------------------------------------------------------------------


def search_chart(search: Report) -> Html | None:
    """Draw the trials of a search: size against quality with the budget's line."""
    measured = [trial for trial in search["trials"] if trial["drop"] is not None]
    if not measured:
        return None
    unit, scale = unit_of(max(trial["n_bytes"] for trial in measured))
    values = []
    for n, trial in enumerate(measured, 1):
        verdict = "kept" if trial["is_feasible"] else "broken"
        used = 100 * max(trial["drop"], 0.0)
        found = f"{size(trial['n_bytes'])}, {used:.3g} % of the budget, {verdict}"
        values.append(
            {
                "size": trial["n_bytes"] / scale,
                "used": min(used, MOST_USED),
                "colour": "chosen" if trial["config"] == search["config"] else verdict,
                "words": f"trial {n}: {found}; {settings_text(trial['config'])}",
            }
        )
    top = max(120.0, *(value["used"] * 1.1 for value in values))
    about = (
        "Each point is a file that was measured: below the line it keeps the budget, further left is smaller."
    )
    if any(trial["drop"] * 100 > MOST_USED for trial in measured):
        about += f" Points at {MOST_USED:.0f} % used more."
    return figure("Size against quality", about, charts.trials(values, f"size, {unit}", top))
