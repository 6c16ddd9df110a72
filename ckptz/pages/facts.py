"""The parts of a page that are words and tables, made of reports as `--json` prints them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptz.pages.grid import Item, heat_map
from ckptz.pages.html import Html, el, name_of, table
from ckptz.pages.words import (
    CODERS,
    KINDS,
    METRICS,
    MODES,
    PREDICTORS,
    PROMISES,
    ROLES,
    amount,
    cut,
    percent,
    size,
    worse,
)

Report = Mapping[str, Any]
Reports = Sequence[Report]


def tile(
    label: str, value: object, about: object = None, *, key: object = None, is_bad: bool = False
) -> Html:
    """Show one number in large; `key` is its exact value for programs."""
    parts = (el("dt", label), el("dd", el("b", value, data_v=key), el("small", about) if about else None))
    return el("div", *parts, class_="tile bad" if is_bad else "tile")


def tiles(*shown: Html | None) -> Html:
    """Set tiles side by side."""
    return el("dl", *shown, class_="tiles")


def times(tensor_bytes: int, stored_bytes: int) -> str:
    """Say how many times smaller the stored bytes are."""
    if not tensor_bytes or not stored_bytes:
        return "–"
    ratio = tensor_bytes / stored_bytes
    return f"{ratio:.3g}× smaller" if ratio >= 1 else f"{1 / ratio:.3g}× larger"


def size_tiles(report: Report) -> tuple[Html, Html, Html]:
    """Show the sizes that a report of a folder or of a file has."""
    raw, stored, ratio = report["tensor_bytes"], report["stored_bytes"], report["ratio"]
    share = f"{stored / raw:.4f} of the raw bytes" if raw else None
    return (
        tile("How much smaller", times(raw, stored), share, key=ratio),
        tile("Stored", size(stored), f"{stored:,} bytes, names and checksums included", key=stored),
        tile("Raw tensors", size(raw), f"{raw:,} bytes before compression", key=raw),
    )


def sizes_text(tensor_bytes: int, stored_bytes: int) -> str:
    """Say what became of raw bytes."""
    return f"{size(stored_bytes)} of {size(tensor_bytes)} raw, {times(tensor_bytes, stored_bytes)}"


# --- quality ------------------------------------------------------------------------------------


def quality_text(record: Report) -> str:
    """Say what was measured of a budget."""
    verdict = "kept" if record["is_met"] else "NOT kept"
    values = "" if record["metric"] in METRICS else f" {record['exact']:.5g} → {record['measured']:.5g}"
    limit = amount(record, record["max_drop"]).lstrip("+")
    return f"{metric_name(record)}{values}: {amount(record, worse(record))} of {limit} allowed, {verdict}"


def metric_name(record: Report) -> str:
    """Name what was measured, and when: a promise may be one of resumed training."""
    if record["metric"] in METRICS:
        return METRICS[record["metric"]]
    when = PROMISES.get(record["promise"])
    return cut(record["metric"], 40) + (f" ({when})" if when else "")


def budget_tile(records: Iterable[Report]) -> Html | None:
    """Show the budget of which the largest share was used; None where nothing was promised."""
    used = [(worse(r) / r["max_drop"], r) for r in records if r["max_drop"] > 0]
    if not used:
        return None
    share, record = max(used, key=lambda pair: pair[0])
    about = f"{metric_name(record)}: {budget_text(record)}"
    return tile(
        "Most used of a budget", f"{max(share, 0):.0%}", about, key=share, is_bad=not record["is_met"]
    )


def budget_text(record: Report) -> str:
    """Say how much worse a quality was measured, and how much was allowed."""
    return f"{amount(record, worse(record))}, {amount(record, record['max_drop']).lstrip('+')} was allowed"


# --- folders ------------------------------------------------------------------------------------


def checkpoints_table(run: Report) -> Html:
    """List the checkpoints of a folder, each below the one it is stored against."""
    headings = (
        *("checkpoint", "#step", "how it is stored", "#stored"),
        *("#smaller", "#deltas down", "lossy", "quality and notes"),
    )
    rows = [_checkpoint_row(entry) for entry in run["entries"]]
    caption = "Every checkpoint below the one it is stored against"
    return table(headings, rows, caption=caption, class_="files")


def _checkpoint_row(entry: Report) -> list[object]:
    indent = f"padding-left:{min(entry['level'], 12) * 0.9}em"
    name = el("span", name_of(entry["file"]), style=indent)
    is_bad = entry["kind"] in ("missing", "broken")
    kind = el("span", kind_text(entry), class_="warn" if is_bad else None)
    notes = [*map(quality_text, entry["quality"]), *([cut(entry["note"], 300)] if entry["note"] else [])]
    if entry["ratio"] is None:
        return [(name, entry["file"]), ("", -1), kind, ("", -1), ("", -1), ("", -1), "", "; ".join(notes)]
    step = entry["step"]
    return [
        (name, entry["file"]),
        ("–" if step is None else step, -1 if step is None else step),
        kind,
        (size(entry["stored_bytes"]), entry["stored_bytes"]),
        (f"{entry['ratio']:.3g}×", entry["ratio"]),
        entry["depth"],
        (f"{entry['n_lossy']} of {entry['n_tensors']}" if entry["n_lossy"] else "no", entry["n_lossy"]),
        "; ".join(notes),
    ]


def kind_text(entry: Report) -> str:
    """Say in words what a file of a folder is."""
    hidden = ", kept only for others" if entry.get("is_hidden") else ""
    return KINDS.get(entry["kind"], cut(entry["kind"], 40)) + hidden


# --- files --------------------------------------------------------------------------------------


def elements(tensor: Report) -> int:
    """Count the elements of a tensor."""
    return math.prod(tensor["shape"])


def bits_map(file: Report) -> Html | None:
    """Show the bits that each parameter takes, by layer and kind of tensor."""
    items = [
        Item(t["name"], role_text(t["role"]), t["stored_bytes"] * 8, elements(t))
        for t in by_role(file)
        if elements(t)
    ]
    caption = (
        "Stored bits per parameter: rows are kinds of tensors, columns are layers. A # stands for a number."
    )
    return heat_map(items, caption=caption, unit="bits")


def errors_map(file: Report) -> Html | None:
    """Show the recorded errors by layer and kind of tensor; None for a lossless file."""
    items = []
    for t in by_role(file):
        if (loss := t["lossy"]) and loss["rms"]:
            squares = (loss[name] ** 2 * elements(t) for name in ("rms_error", "rms"))
            items.append(Item(t["name"], role_text(t["role"]), *squares))
    caption = (
        "Typical error of a value, in percent of the typical size of the values (both root mean squares)."
    )
    return heat_map(items, caption=caption, unit="%", is_root=True)


def changes_map(diff: Report) -> Html | None:
    """Show what changed between two checkpoints by layer and kind of tensor."""
    items = [
        Item(t["name"], "changed tensors", t["relative_change"] ** 2, 1.0)
        for t in diff["tensors"]
        if t["relative_change"] is not None
    ]
    caption = (
        "Typical change of a value, in percent of the typical size of the values (both root mean squares)."
    )
    return heat_map(items, caption=caption, unit="%", is_root=True)


def role_text(role: str) -> str:
    """Say in words what a tensor is."""
    return ROLES.get(role, cut(role, 40))


def role_order(role: str) -> tuple[int, str]:
    """Give the place of a role among others: weights first."""
    return (list(ROLES).index(role), "") if role in ROLES else (len(ROLES), role)


def by_role(file: Report) -> list[Report]:
    """Give the tensors of a file, weights first."""
    return sorted(file["tensors"], key=lambda tensor: role_order(tensor["role"]))


def stored_how(tensor: Report) -> str:
    """Say in words how a tensor is stored."""
    mode = MODES.get(tensor["mode"], tensor["mode"])
    return f"{PREDICTORS.get(tensor['predictor'], tensor['predictor'])}; {mode}"


def methods_table(file: Report) -> Html:
    """Sum up the tensors by what they are and how they are stored."""
    groups: dict[tuple[str, str, str], list[Report]] = {}
    for tensor in by_role(file):
        loss = tensor["lossy"]
        how = stored_how(tensor) + (f" ({loss['method']})" if loss else "")
        groups.setdefault((role_text(tensor["role"]), tensor["dtype"], how), []).append(tensor)
    headings = ("what", "type", "stored", "#tensors", "#raw", "#stored", "#smaller", "#bits per parameter")
    rows = []
    for key, members in groups.items():
        raw, stored = (sum(t[name] for t in members) for name in ("tensor_bytes", "stored_bytes"))
        n = sum(map(elements, members))
        sizes = (
            (size(raw), raw),
            (size(stored), stored),
            (f"{raw / stored:.3g}×" if stored else "–", raw / stored if stored else 0),
        )
        rows.append([*map(cut, key), len(members), *sizes, f"{stored * 8 / n:.3f}" if n else "–"])
    return table(headings, rows, caption="How the tensors are stored")


def coder_bytes(tensors: Iterable[Report]) -> Counter[str]:
    """Sum up what each entropy coder wrote, in bytes of frames."""
    sums: Counter[str] = Counter()
    for tensor in tensors:
        sums.update({coder: share * tensor["stored_bytes"] for coder, share in tensor["coders"].items()})
    return sums


def coder_text(coder: str) -> str:
    """Say what an entropy coder does."""
    return CODERS.get(coder, cut(coder, 40))


def file_facts(file: Report) -> Html:
    """List the facts of a file: kind, sizes and identity."""
    is_lossy, depth = any(t["lossy"] for t in file["tensors"]), file["depth"]
    promise = "lossy: some values differ from the original" if is_lossy else "lossless: every bit comes back"
    inline = bool(file["chain"]) and file["chain"][0]["is_inline"]
    within = f"stands alone, with {depth} bases inside" if inline else f"{depth} deltas down to its anchor"
    metadata = list((file["metadata"] or {}).items())[:20]
    facts: list[tuple[str, object]] = [
        ("Values", promise),
        ("Chain", within if depth else "stands alone"),
        ("Training step", "not recorded" if file["step"] is None else file["step"]),
        ("Tensors", f"{file['n_tensors']:,}"),
        ("Written by", f"{cut(file['writer'], 60)}, format {cut(file['format_version'], 20)}"),
        ("Content id", el("code", file["content_id"])),
        *(("Bases", chain_text(file)) for _ in range(bool(file["chain"]))),
        *(("Quality", quality_text(record)) for record in file["quality"]),
        *((f"Metadata {cut(name, 40)}", cut(value, 200)) for name, value in metadata),
    ]
    return el("dl", [(el("dt", name), el("dd", value)) for name, value in facts], class_="facts")


def chain_text(file: Report) -> list[Html]:
    """Name the bases of a file, nearest first."""
    missing = el("b", " missing", class_="warn")
    members = file["chain"][:20]
    return [el("span", name_of(m["file"]), None if m["path"] else missing, " ") for m in members]


# --- searches -----------------------------------------------------------------------------------


def trials_table(search: Report) -> Html:
    """List what a search tried."""
    metrics = [f"#{cut(metric, 30)}" for metric in search["metrics"]]
    headings = ("#trial", "settings", "#size", "#of the budget", *metrics, "verdict", "#seconds")
    shared = _shared(search["trials"])
    rows = []
    for n, trial in enumerate(search["trials"], 1):
        values = [("–" if value is None else f"{value:.5g}", value) for value in trial["values"]]
        values += [("–", None)] * (len(metrics) - len(values))
        own = {name: value for name, value in trial["config"].items() if name not in shared}
        verdict = "kept" if trial["is_feasible"] else "broken"
        if trial["config"] == search["config"]:
            verdict = "kept, chosen"
        rows.append(
            [
                *(n, settings_text(own) or "–", (size(trial["n_bytes"]), trial["n_bytes"])),
                (percent(trial["drop"]), trial["drop"]),
                *(values[: len(metrics)]),
                *(verdict, (f"{trial['seconds']:.2f}", trial["seconds"])),
            ]
        )
    of_all = f"; of all: {settings_text(shared)}" if settings_text(shared) else ""
    return table(headings, rows, caption=f"What the search tried, in order{of_all}")


def _shared(trials: Reports) -> Report:
    """Give the settings that several trials have in common."""
    if len(trials) < 2:
        return {}
    first = trials[0]["config"]
    return {n: v for n, v in first.items() if all(n in t["config"] and t["config"][n] == v for t in trials)}


def settings_text(config: Mapping[str, Any]) -> str:
    """Write settings; what is off or zero goes without saying."""
    shown = {name: f"{v:.4g}" if isinstance(v, float) else cut(str(v), 60) for name, v in config.items() if v}
    return ", ".join(f"{cut(name.replace('_', ' '), 60)} {value}" for name, value in shown.items())
