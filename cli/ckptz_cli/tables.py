"""Reports as tables without rules, fitted to the width of the terminal.

Names come from files, so non-printable characters are escaped.
"""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ckptz.api.describe import InspectReport, Member, TensorReport
from ckptz.run.step_files import INTERNAL_KEYS
from ckptz.verbs.diff import DiffReport, TensorDiff
from ckptz.verbs.log import LogEntry, LogReport
from ckptz.verbs.quality_text import quality_text
from ckptz.words import ROLES, format_bytes, format_factor, format_ratio, printable, shorten
from ckptz_cli.render import all_tensors, judged_text, plural
from ckptz_cli.session import is_terminal

if TYPE_CHECKING:
    from ckptz.search.budget import TrialReport

WIDE: Final = 4096  # columns without a terminal, so that nothing wraps
LAST_SHOWN: Final = 12  # newest trials of a search that are shown
# Tree drawing before a name: an open or a closed ancestor level, then a branch or the last branch.
_LINES: Final = ("│  ", "   ", "├─ ", "└─ ")
_BLANKS: Final = ("  ",) * 4
METRIC: Final = 7  # column of the log that is left out if no step has a metric


def table_of(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table; non-printable characters are escaped."""
    columns = (Column(heading, overflow="fold") for heading in headings)
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table without headings, with one name and value in each row."""
    table = table_of(("", ""), facts)
    table.show_header, table.columns[0].overflow = False, "ellipsis"
    return table


def drawn(table: Table) -> str:
    """Return the table as text for standard output.

    If the terminal is too narrow for the longest words, empty columns are left out; if it is still too
    narrow, each row is printed as several lines.
    """
    is_shown = is_terminal(sys.stdout)
    buffer = io.StringIO()
    console = Console(file=buffer, width=None if is_shown else WIDE, force_terminal=is_shown)
    if not _fits(table, console):
        rows = list(zip(*(column.cells for column in table.columns), strict=True))
        used = [i for i in range(len(table.columns)) if any(str(row[i]) not in ("", "-") for row in rows)]
        headings = [str(table.columns[i].header) for i in used]
        cells = [[str(row[i]) for i in used] for row in rows]
        table = table_of(headings, cells)
        if not _fits(table, console):  # a line for each non-empty cell, and a blank line between rows
            stacked = (
                [
                    *([("", "")] if n else []),
                    *((h, cell) for h, cell in zip(headings, row, strict=True) if cell),
                ]
                for n, row in enumerate(cells)
            )
            table = facts_table(itertools.chain.from_iterable(stacked))
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _fits(table: Table, console: Console) -> bool:
    """Return whether no word is truncated; long names and values may be."""
    words = console.measure(table, options=console.options.update(width=WIDE)).minimum
    return not table.show_header or words <= console.width


# --- inspect ------------------------------------------------------------------------------------


def inspected_text(report: InspectReport, *, with_tensors: bool) -> str:
    """Return tables of the file, its metadata, its chain and methods, and optionally of every tensor."""
    parts = [facts_table(_file_facts(report))]
    if metadata := {k: v for k, v in (report.metadata or {}).items() if k not in INTERNAL_KEYS}:
        parts.append(facts_table((f"metadata {name}", shorten(text)) for name, text in metadata.items()))
    if report.depth:
        headings = ("chain, nearest first", "depth", "content id", "found at")
        parts.append(table_of(headings, (_chain_row(report, member) for member in report.chain)))
    parts.append(_methods_table(report.tensors))
    if with_tensors:
        parts.append(_tensors_table(report.tensors))
    return "\n\n".join(map(drawn, parts))


def _file_facts(report: InspectReport) -> list[tuple[str, str]]:
    facts = [
        ("file", report.file),
        ("format", f"{report.format_version}, written by {report.writer}"),
        ("content id", report.content_id),
        ("kind", _kind(report)),
        ("step", "not recorded" if report.step is None else str(report.step)),
        ("tensors", f"{report.n_tensors}, {format_bytes(report.tensor_bytes)}"),
        (
            "stored",
            f"{format_bytes(report.stored_bytes)} ({format_ratio(report.stored_bytes, report.tensor_bytes)})",
        ),
        ("coders", _share_text(report.coders)),
    ]
    facts += [(record.promise, f"{quality_text(record)}, {record.date}") for record in report.quality]
    if not report.quality and (errors := _errors_text(report.tensors)):
        facts.append(("quality", f"not measured; {errors} (of each tensor: --tensors)"))
    if report.shards:
        facts.append(("shards", f"{len(report.shards)}, restored as a folder"))
    if report.has_tree:
        facts.append(("tree", "nested; restored as a torch file"))
    if report.broken:
        facts.append(("chain", f"incomplete: {report.broken}"))
    return facts


def _errors_text(tensors: Sequence[TensorReport]) -> str:
    """Return the largest relative error of lossy tensors of each role; empty if there are none."""
    largest: dict[str, float] = {}
    for tensor in tensors:
        if tensor.lossy is not None and tensor.lossy.rms:
            error = tensor.lossy.rms_error / tensor.lossy.rms
            largest[tensor.role] = max(error, largest.get(tensor.role, 0.0))
    return ", ".join(
        f"rms errors of {ROLES.get(role, role)} up to {error:.2%} of their rms"
        for role, error in sorted(largest.items())
    )


def _kind(report: InspectReport) -> str:
    promise = "lossy" if any(tensor.lossy for tensor in report.tensors) else "lossless"
    if report.chain and report.chain[0].is_inline:
        return f"{promise}, self-contained with {report.depth} inline bases"
    return f"{promise} delta, {report.depth} from its full file" if report.depth else f"{promise} full file"


def _chain_row(report: InspectReport, member: Member) -> tuple[str, ...]:
    within = "in the file" if member.path == report.file else f"in {member.path}"
    place = within if member.is_inline else member.path or "missing"
    return member.file, str(member.depth), member.content_id[:16], place


def _methods_table(tensors: Sequence[TensorReport]) -> Table:
    """Return a table of sums over the tensors of each dtype and method."""
    groups: dict[tuple[str, str, str], list[TensorReport]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.predictor, tensor.mode), []).append(tensor)
    rows = []
    for method, members in groups.items():
        n_bytes, stored = sum(t.tensor_bytes for t in members), sum(t.stored_bytes for t in members)
        gained = format_factor(n_bytes / stored) if n_bytes else "-"
        n_elements = sum(t.stored_bytes * 8 / t.bits_per_element for t in members if t.bits_per_element)
        bits = f"{stored * 8 / n_elements:.3f}" if n_elements else "-"
        sums: Counter[str] = Counter()
        for t in members:
            sums.update({coder: share * t.stored_bytes for coder, share in t.coders.items()})
        shares = _share_text({coder: n / sums.total() for coder, n in sums.most_common() if sums.total()})
        sizes = (str(len(members)), format_bytes(n_bytes), format_bytes(stored), gained, bits)
        rows.append((*method, *sizes, shares))
    headings = ("dtype", "predictor", "mode", "tensors", "bytes", "stored", "ratio", "bits/element", "coders")
    return table_of(headings, rows)


def _tensors_table(tensors: Sequence[TensorReport]) -> Table:
    rows = []
    for tensor in tensors:
        layer = tensor.layer_type if tensor.role == "weight" else f"{tensor.layer_type} {tensor.role}"
        gained = "-" if tensor.ratio is None else format_factor(tensor.ratio)
        numbers = (format_bytes(tensor.stored_bytes), gained, _or_dash(tensor.bits_per_element, ".3f"))
        method = (tensor.predictor, tensor.mode, _share_text(tensor.coders))
        # Number of chunks that a slice may decode, times the frames of the chain for each.
        chunks = f"1..{tensor.n_chunks} chunks" if tensor.n_chunks > 1 else f"{tensor.n_chunks} chunk"
        cost = f"{chunks} x {'?' if tensor.n_frames is None else tensor.n_frames}"
        kind = (tensor.name, layer, tensor.dtype, _shape(tensor.shape))
        rows.append((*kind, *numbers, *method, cost, _loss_text(tensor)))
    headings = ["tensor", "layer", "dtype", "shape", "stored", "ratio", "bits/element"]
    headings += ["predictor", "mode", "coders", "slice decodes", "loss"]
    if not any(tensor.lossy for tensor in tensors):
        del headings[-1]
    return table_of(headings, (row[: len(headings)] for row in rows))


def _loss_text(tensor: TensorReport) -> str:
    """Return the settings, the promise and the measured error of a lossy tensor."""
    loss = tensor.lossy
    if loss is None:
        return "none"
    error = f"{loss.rms_error / loss.rms:.2%}" if loss.rms else f"{loss.rms_error:.2g}"
    n = max(math.prod(tensor.shape), 1)
    shares = f"pruned {loss.n_pruned / n:.2%}, protected {loss.n_protected / n:.2%}"
    # Settings that are off are left out.
    settings = (f"{name.replace('_', ' ')} {value}" for name, value in loss.settings.items() if value)
    return (
        f"{loss.method}, {loss.layer_type}, {', '.join(settings)}, {shares}, "
        f"promise {loss.promise}, rms error {error} of rms, largest {loss.max_abs_error:.3g}"
    )


def _share_text(shares: dict[str, float]) -> str:
    return ", ".join(f"{coder} {share:.0%}" for coder, share in shares.items() if share >= 0.005) or "-"


def _or_dash(value: float | None, spec: str) -> str:
    """Format a number, or None as a dash."""
    return "-" if value is None else format(value, spec)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# --- log ----------------------------------------------------------------------------------------


def logged_text(report: LogReport) -> str:
    """Return a table with the tree of a folder, and a total."""
    is_drawn = is_terminal(sys.stdout) and (sys.stdout.encoding or "").lower().startswith("utf")
    lines = _LINES if is_drawn else _BLANKS
    headings = ["checkpoint", "step", "kind", "size", "ratio", "depth", "lossy", "metric", "quality", ""]
    rows = [
        [f"{guide}{entry.file}", *_cells(entry)]
        for guide, entry in zip(_guides(report.entries, lines), report.entries, strict=True)
    ]
    if all(entry.metric is None for entry in report.entries):
        for row in (headings, *rows):
            del row[METRIC]
    return f"{drawn(table_of(headings, rows))}\n\n{_log_total(report)}" if rows else _log_total(report)


def _guides(entries: Sequence[LogEntry], lines: tuple[str, ...]) -> list[str]:
    """Return the tree drawing before each name, built from the last entry, as later siblings matter."""
    guides: list[str] = []
    goes_on: set[int] = set()
    for entry in reversed(entries):
        past = "".join(lines[0 if level in goes_on else 1] for level in range(1, entry.level))
        branch = lines[2 if entry.level in goes_on else 3] if entry.level else ""
        guides.append(past + branch)
        goes_on = {level for level in goes_on if level < entry.level} | {entry.level}
    return guides[::-1]


def _cells(entry: LogEntry) -> tuple[str, ...]:
    if entry.kind in ("missing", "broken"):
        return "", entry.kind, "", "", "", "", "", "", entry.note or ""
    return (
        "" if entry.step is None else str(entry.step),
        f"{entry.kind}, hidden" if entry.is_hidden else entry.kind,
        "?" if entry.ratio is None else format_bytes(entry.stored_bytes),
        "?" if entry.ratio is None else format_factor(entry.ratio),
        str(entry.depth),
        f"{entry.n_lossy} of {entry.n_tensors}" if entry.n_lossy else "-",
        "" if entry.metric is None else f"{entry.metric:.6g}",
        "; ".join(map(quality_text, entry.quality)) or "-",
        entry.note or "",
    )


def _log_total(report: LogReport) -> str:
    sizes = f"{format_bytes(report.stored_bytes)} ({format_ratio(report.stored_bytes, report.tensor_bytes)})"
    problems = [f"{report.n_broken} cannot be read"] if report.n_broken else []
    problems += [f"{plural(report.n_missing, 'base')} missing"] if report.n_missing else []
    what = (
        sizes
        if report.n_files
        else "no readable .ckptz file in it or in its folders that are named after steps"
    )
    return ", ".join([f"{printable(report.folder)}: {plural(report.n_files, 'file')}, {what}", *problems])


# --- diff ---------------------------------------------------------------------------------------


def diffed_text(report: DiffReport) -> str:
    """Return tables of the tensors and values that differ, and a total."""
    parts = []
    if changes := [_changes(diff) for diff in report.tensors if diff.kind != "equal"]:
        headings = (
            "tensor",
            "what",
            "dtype",
            "shape",
            "changed",
            "rms change / rms",
            "rms change",
            "largest",
        )
        parts.append(drawn(table_of(headings, changes)))
    if values := [(value.name, value.value_a or "-", value.value_b or "-") for value in report.values]:
        parts.append(drawn(table_of(("value", "in A", "in B"), values)))
    return "\n\n".join([*parts, _diff_total(report)])


def _changes(diff: TensorDiff) -> tuple[str, ...]:
    what = f"{diff.kind}, {diff.n_not_finite} not finite" if diff.n_not_finite else diff.kind
    dtypes = dict.fromkeys(filter(None, (diff.dtype_a, diff.dtype_b)))
    shapes = dict.fromkeys(_shape(shape) for shape in (diff.shape_a, diff.shape_b) if shape is not None)
    shares = (_or_dash(diff.changed_share, ".3%"), _or_dash(diff.relative_change, ".3%"))
    numbers = (_or_dash(diff.rms_change, ".3g"), _or_dash(diff.max_change, ".3g"))
    return diff.name, what, " -> ".join(dtypes), " -> ".join(shapes), *shares, *numbers


def _diff_total(report: DiffReport) -> str:
    where = f"{printable(report.first)} -> {printable(report.second)}"
    suffix = "" if report.has_same_metadata else ", metadata differ"
    if report.not_compared:
        suffix += f"; not compared: {', '.join(map(printable, report.not_compared))}"
    if report.is_equal:
        values = f" and {report.n_values} values" if report.n_values else ""
        verb = "are" if report.n_tensors != 1 or values else "is"
        return f"{where}: {all_tensors(report.n_tensors)}{values} {verb} equal bit for bit{suffix}"
    counts = (
        *((report.n_equal, "equal"), (report.n_changed, "changed")),
        *((report.n_only_a, "only in A"), (report.n_only_b, "only in B")),
    )
    parts = [f"{n} {what}" for n, what in counts if n]
    if report.n_changed and report.changed_share is not None:
        parts.append(f"{report.changed_share:.3%} of the elements changed")
    if report.relative_change is not None:
        parts.append(f"rms change {report.relative_change:.3%} of rms in those that changed")
    if report.max_change is not None:
        parts.append(f"largest {report.max_change:.3g}")
    if n := report.n_values_changed:
        parts.append(f"{plural(n, 'value')} differ{'s' * (n == 1)}")
    if report.random_states:
        parts.append(f"random states differ: {', '.join(map(printable, report.random_states))}")
    return f"{where}: {plural(report.n_tensors, 'tensor')}, {', '.join(parts)}{suffix}"


# --- a search -----------------------------------------------------------------------------------


def trials_table(trials: Sequence[TrialReport]) -> Table:
    """Return a table of the best trial of a search and the newest trials."""
    kept = [trial for trial in trials if trial.is_feasible]
    best = min(kept, key=lambda trial: trial.n_bytes, default=None)
    headings = ("", "settings", "predicted", "size", "quality", "change", "budget used", "seconds")
    title = f"{len(trials)} evaluations"
    table = Table(*headings, box=None, pad_edge=False, title=title, title_justify="left")
    shown = trials[-LAST_SHOWN:]
    for trial in shown if best is None or best in shown else [best, *shown]:
        mark, style = "", "" if trial.is_feasible else "dim"
        if trial is best:
            mark, style = "best", "bold green"
        predicted = "-" if trial.predicted_bytes is None else format_bytes(trial.predicted_bytes)
        table.add_row(mark, ", ".join(_settings(trial.config)), predicted, *_outcome(trial), style=style)
    return table


def trial_line(trial: TrialReport) -> str:
    """Return the line for a trial of a search."""
    return f"tried {', '.join([*_settings(trial.config), *_outcome(trial)])}"


def start_line(config: Mapping[str, Any] | None, n_bytes: int | None) -> str:
    """Return the line for the start of a measurement; see `ckptz.search.budget.SearchOptions.on_begin`."""
    if config is None:
        return "searching: measuring the quality of the exact tensors"
    settings = ", ".join(_settings(config))
    return f"{settings}: writing" if n_bytes is None else f"{settings}: {format_bytes(n_bytes)}, measuring"


def _settings(config: Mapping[str, Any]) -> list[str]:
    if "step" in config:
        return [f"step {config['step']:g}"]
    levels = [f"{config['levels']} levels"] if "levels" in config else []
    if config.get("embedding_levels") is not None:
        levels.append(f"{config['embedding_levels']} for embeddings")
    if config.get("prune"):
        levels.append(f"prune {config['prune']:g} by {config['prune_by']}")
    return [*levels, *([f"protect {config['protect']:g}"] if "protect" in config else [])]


def _outcome(trial: TrialReport) -> tuple[str, ...]:
    numbers = ["not finite" if value is None else f"{value:.6g}" for value in trial.values]
    if len(numbers) > 1:
        numbers = [f"{one.metric} {number}" for one, number in zip(trial.judgements, numbers, strict=True)]
    values = "; ".join(numbers)
    changes = "; ".join(map(judged_text, trial.judgements))
    used = "-" if trial.drop is None else f"{trial.drop:.0%} of the budget"
    return format_bytes(trial.n_bytes), values, changes, used, f"{trial.seconds:.1f} s"
