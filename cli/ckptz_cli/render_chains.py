"""Reports as text: of `log`, `prune`, `report`, `rebase` and `diff`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ckptz.commands.diff import DiffReport, TensorDiff
from ckptz.commands.log import LogEntry, LogReport
from ckptz.commands.rebase import RebaseReport
from ckptz.commands.report import PageReport
from ckptz.container.index import CHANGES, STEPS_LOST, QualityRecord
from ckptz.pages.words import printable, ratio, size, times
from ckptz.store.retention import PruneReport
from ckptz.store.runs import step_of_folder
from ckptz_cli.session import is_terminal
from ckptz_cli.tables import add_row, drawn, table_of

# What stands before a name: past levels that go on or have ended, then a branch or the last one.
_LINES: Final = ("│  ", "   ", "├─ ", "└─ ")
_BLANKS: Final = ("  ",) * 4


# --- log ----------------------------------------------------------------------------------------


def logged_text(report: LogReport) -> str:
    """Draw the tree of a folder as a table, with a total."""
    is_drawn = is_terminal(sys.stdout) and (sys.stdout.encoding or "").lower().startswith("utf")
    lines = _LINES if is_drawn else _BLANKS
    table = table_of("checkpoint", "step", "kind", "size", "ratio", "depth", "lossy", "quality", "")
    for guide, entry in zip(_guides(report.entries, lines), report.entries, strict=True):
        add_row(table, f"{guide}{entry.file}", *_cells(entry))
    return f"{drawn(table)}\n\n{_log_total(report)}" if report.entries else _log_total(report)


def _guides(entries: Sequence[LogEntry], lines: tuple[str, ...]) -> list[str]:
    """Draw the lines before each name, from the last entry up, so that it is known which levels go on."""
    guides: list[str] = []
    goes_on: set[int] = set()
    for entry in reversed(entries):
        past = "".join(lines[0 if level in goes_on else 1] for level in range(1, entry.level))
        own = lines[2 if entry.level in goes_on else 3] if entry.level else ""
        guides.append(past + own)
        goes_on = {level for level in goes_on if level < entry.level} | {entry.level}
    return guides[::-1]


def _cells(entry: LogEntry) -> tuple[str, ...]:
    if entry.kind in ("missing", "broken"):
        return "", entry.kind, "", "", "", "", "", entry.note or ""
    return (
        "" if entry.step is None else str(entry.step),
        f"{entry.kind}, hidden" if entry.is_hidden else entry.kind,
        "?" if entry.ratio is None else size(entry.stored_bytes),
        "?" if entry.ratio is None else times(entry.ratio),
        str(entry.depth),
        f"{entry.n_lossy} of {entry.n_tensors}" if entry.n_lossy else "-",
        "; ".join(map(_quality_text, entry.quality)) or "-",
        entry.note or "",
    )


def _quality_text(record: QualityRecord) -> str:
    if record.metric == STEPS_LOST:
        return f"{record.measured:.3g} steps lost"
    if CHANGES in record.metric:
        unit = record.metric.rpartition(CHANGES)[2]
        return f"changes by {unit} {record.measured:.3g} of {record.max_drop:.3g}"
    limit = f"{record.max_drop:.3g}" if not record.is_relative else f"{record.max_drop:.3%}"
    met = "met" if record.is_met else "not met"
    return f"{record.metric} {record.exact:.5g} -> {record.measured:.5g}, budget {limit} {met}"


def _log_total(report: LogReport) -> str:
    sizes = f"{size(report.stored_bytes)} ({ratio(report.stored_bytes, report.tensor_bytes)})"
    counts = ((report.n_broken, "cannot be read"), (report.n_missing, "bases missing"))
    problems = [f"{n} {what}" for n, what in counts if n]
    what = sizes if report.n_files else "no .ckptz file that can be read"
    return ", ".join([f"{printable(report.folder)}: {report.n_files} files, {what}", *problems])


def pruned_text(report: PruneReport) -> str:
    """Say what a prune did, a line for each file that goes and one for all."""
    verb = "would remove" if report.dry_run else "removed"
    lines = [f"{verb} {name}" for name in report.removed]
    counts = [f"{len(report.steps)} steps"]
    if report.weights_only:
        counts.append(f"{len(report.weights_only)} more of which the weights stay")
    if report.exact:
        counts.append(f"{len(report.exact)} step{'s' * (len(report.exact) != 1)} exact beside lossy files")
    if report.hidden:
        counts.append(f"{len(report.hidden)} hidden files that these are stored against")
    lines.append(
        f"{printable(report.folder)}: keeps {', '.join(counts)}, {size(report.kept_bytes)}; "
        f"{verb} {_files_and_folders(report.removed)}, {size(report.removed_bytes)}"
    )
    return "\n".join(lines)


def _files_and_folders(names: Sequence[str]) -> str:
    """Count what a prune removed: folders are called after a step, and files have a suffix behind it."""
    n = sum(step_of_folder(Path(name)) is not None for name in names)
    counts = ((n, "folder"), (len(names) - n, "file"))
    return " and ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in counts if n) or "0 files"


def reported_line(report: PageReport) -> str:
    """Say what a page shows."""
    counts = ((len(report.runs), "run"), (len(report.files), "file"), (len(report.searches), "search"))
    shown = [f"{n} {what}{'' if n == 1 else 'es' if what == 'search' else 's'}" for n, what in counts if n]
    shown += ["a comparison"] if report.diff else []
    n = len(report.problems)
    problems = f"; {n} problem{'s' * (n != 1)}" if n else ""
    return f"{printable(report.output or '')}: a page of {', '.join(shown)}{problems}; open it in a browser"


# --- rebase -------------------------------------------------------------------------------------


def rebased_line(report: RebaseReport) -> str:
    """Say what became of a file that was to stand alone."""
    output = printable(report.output)
    if not report.is_changed:
        return f"{output}: stands alone already, nothing was written"
    n = len(report.bases)
    within = f"stands alone with parts of {n} base{'s' * (n != 1)} within" if n else "stands alone"
    sizes = f"{size(report.chain_bytes)} -> {size(report.stored_bytes)}"
    return f"{output}: {within}, {sizes}, read back and right, {report.seconds:.2f} s"


# --- diff ---------------------------------------------------------------------------------------


def diffed_text(report: DiffReport) -> str:
    """Draw the tensors and values that differ as tables, with a total."""
    shown = [diff for diff in report.tensors if diff.kind != "equal"]
    parts = [_tensors_table(shown)] if shown else []
    if report.values:
        table = table_of("value", "in A", "in B")
        for value in report.values:
            add_row(
                table, value.name, *("-" if text is None else text for text in (value.value_a, value.value_b))
            )
        parts.append(drawn(table))
    return "\n\n".join([*parts, _diff_total(report)])


def _tensors_table(shown: Sequence[TensorDiff]) -> str:
    has_codes = any(diff.codes_moved is not None for diff in shown)
    headings = ("tensor", "what", "dtype", "shape", "changed", "rms change / rms", "rms change", "largest")
    table = table_of(*headings, *(("codes moved",) if has_codes else ()))
    for diff in shown:
        codes = (_share(diff.codes_moved),) if has_codes else ()
        numbers = (_number(diff.rms_change), _number(diff.max_change))
        add_row(
            table, *_names(diff), _share(diff.changed_share), _share(diff.relative_change), *numbers, *codes
        )
    return drawn(table)


def _names(diff: TensorDiff) -> tuple[str, ...]:
    dtypes = dict.fromkeys(filter(None, (diff.dtype_a, diff.dtype_b)))
    shapes = dict.fromkeys(
        "x".join(map(str, s)) or "scalar" for s in (diff.shape_a, diff.shape_b) if s is not None
    )
    what = f"{diff.kind}, {diff.n_not_finite} not finite" if diff.n_not_finite else diff.kind
    return diff.name, what, " -> ".join(dtypes), " -> ".join(shapes)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _diff_total(report: DiffReport) -> str:
    where = f"{printable(report.first)} -> {printable(report.second)}"
    rest = "" if report.has_same_metadata else ", metadata differ"
    if report.not_compared:
        rest += f"; not compared: {', '.join(map(printable, report.not_compared))}"
    if report.is_equal:
        values = f" and {report.n_values} values" if report.n_values else ""
        return f"{where}: all {report.n_tensors} tensors{values} are equal bit for bit{rest}"
    counts = (
        *((report.n_equal, "equal"), (report.n_changed, "changed")),
        *((report.n_only_a, "only in A"), (report.n_only_b, "only in B")),
    )
    parts = [f"{n} {what}" for n, what in counts if n]
    if report.n_changed and report.changed_share is not None:
        parts.append(f"{_share(report.changed_share)} of the elements changed")
    if report.relative_change is not None:
        parts.append(f"rms change {_share(report.relative_change)} of rms in those that changed")
    if report.max_change is not None:
        parts.append(f"largest {_number(report.max_change)}")
    if n := report.n_values_changed:
        parts.append(f"{n} value{'s' * (n != 1)} differ{'s' * (n == 1)}")
    if report.random_states:
        parts.append(f"random states differ: {', '.join(map(printable, report.random_states))}")
    return f"{where}: {report.n_tensors} tensors, {', '.join(parts)}{rest}"
