"""Reports as lines of text. Names come from files, so nothing is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptz.run.names import step_of_folder
from ckptz.verbs.quality_text import amount, moved, quality_text
from ckptz.words import format_bytes, format_ratio, printable

if TYPE_CHECKING:
    from ckptz.run.prune import PruneReport
    from ckptz.search.budget import Judgement
    from ckptz.verbs.compress import CompressReport
    from ckptz.verbs.rebase import RebaseReport
    from ckptz.verbs.report import PageReport
    from ckptz.verbs.restore import RestoreReport
    from ckptz.verbs.verify import VerifyReport


def plural(n: int, what: str) -> str:
    """Count things in words."""
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith('ch') else 's'}"


def _pace(n_bytes: int, seconds: float) -> str:
    return f"{seconds:.2f} s, {n_bytes / 1e6 / max(seconds, 1e-9):.3g} MB/s"


def compressed_line(report: CompressReport) -> str:
    """Describe the compression of one input."""
    against = f", {report.n_deltas} of them against {printable(report.base)}" if report.base else ""
    lossy = f", {report.n_lossy} lossy, {_promise(report)}" if report.n_lossy else ""
    sizes = f"{format_bytes(report.tensor_bytes)} -> {format_bytes(report.stored_bytes)}"
    ratio = format_ratio(report.stored_bytes, report.tensor_bytes)
    return (
        f"{printable(report.output)}: {sizes} ({ratio}), {report.n_tensors} tensors{against}{lossy}, "
        f"{_pace(report.tensor_bytes, report.seconds)}{_evaluations(report)}"
    )


def _evaluations(report: CompressReport) -> str:
    n = 0 if report.search is None else len(report.search.trials)
    return f", {plural(n, 'evaluation')}" if n else ""


def predicted_line(report: CompressReport) -> str:
    """Describe what a dry run predicts for one input and one method."""
    against = f", {report.n_deltas} of them against {printable(report.base)}" if report.base else ""
    lossy = f", {report.n_lossy} lossy" if report.n_lossy else ""
    return (
        f"{printable(report.input)}, {report.method}: {format_bytes(report.tensor_bytes)} -> about "
        f"{format_bytes(report.stored_bytes)} ({format_ratio(report.stored_bytes, report.tensor_bytes)}), "
        f"{report.n_tensors} tensors{against}{lossy}, about {report.seconds:.2g} s; nothing was written"
    )


def _promise(report: CompressReport) -> str:
    if report.search is None or not report.search.quality:
        return "quality not measured (per-tensor errors: inspect --tensors)"
    return "; ".join(map(quality_text, report.search.quality))


def judged_text(judged: Judgement) -> str:
    """Compare a trial with its budget, and state whether the examples resolve the difference."""
    if judged.mean_change is None:
        return "not finite"
    is_relative = judged.is_relative
    text = moved(judged.mean_change, is_relative=is_relative)
    if judged.standard_error is not None and judged.example_change is not None:
        allowed = amount(judged.example_limit, is_relative=is_relative)
        text += f" +- {amount(judged.standard_error, is_relative=is_relative)}"
        text += "" if judged.is_resolved else f", too few {printable(judged.unit)}s to be sure"
        changes = amount(judged.example_change, is_relative=is_relative)
        text += f", per-{printable(judged.unit)} change {changes} (limit {allowed})"
    return text


def total_line(reports: Sequence[CompressReport]) -> str:
    """Sum up all inputs."""
    n_bytes, stored = sum(r.tensor_bytes for r in reports), sum(r.stored_bytes for r in reports)
    sizes = f"{format_bytes(n_bytes)} -> {format_bytes(stored)} ({format_ratio(stored, n_bytes)})"
    return f"{len(reports)} files: {sizes}, {_pace(n_bytes, sum(r.seconds for r in reports))}"


def restored_line(report: RestoreReport) -> str:
    """Describe what was restored."""
    chain = f" in a chain of {report.n_files} files" if report.depth else f" in {report.n_files} files"
    copied = f", {plural(report.n_copied, 'other file')} copied" if report.n_copied else ""
    return (
        f"{printable(report.output)}: {format_bytes(report.tensor_bytes)} in {report.n_tensors} tensors from "
        f"{format_bytes(report.stored_bytes)}{chain if report.n_files > 1 else ''}, "
        f"all checksums match{copied}, {_pace(report.tensor_bytes, report.seconds)}"
    )


def verified_line(report: VerifyReport) -> str:
    """Describe what was verified."""
    chain = f" of {len(report.chain) + 1} files" if report.chain else ""
    compared = ""
    if report.against:
        n_same = report.n_tensors - report.n_lossy
        compared = f", {plural(n_same, 'tensor')} identical to {printable(report.against)}"
        compared += f", {report.n_lossy} within their recorded error" if report.n_lossy else ""
    return (
        f"{printable(report.file)}: ok{compared}; {report.n_chunks} "
        f"stored chunks{chain} and all {report.n_tensors} tensors match their checksums, "
        f"{_pace(report.tensor_bytes, report.seconds)}"
    )


def pruned_text(report: PruneReport) -> str:
    """List the deleted files, one a line, and summarize."""
    verb = "would remove" if report.dry_run else "removed"
    counts = [plural(len(report.steps), "step")]
    if report.weights_only:
        counts.append(f"{len(report.weights_only)} more of which the weights stay")
    if report.exact:
        counts.append(f"{plural(len(report.exact), 'step')} exact beside lossy files")
    if report.hidden:
        counts.append(f"{plural(len(report.hidden), 'hidden file')} that these are stored against")
    # Folders are called after a step, and files have a suffix behind it.
    n_folders = sum(step_of_folder(Path(name)) is not None for name in report.removed)
    removed = ((n_folders, "folder"), (len(report.removed) - n_folders, "file"))
    gone = " and ".join(plural(n, what) for n, what in removed if n) or "0 files"
    kept = f"keeps {', '.join(counts)}, {format_bytes(report.kept_bytes)}"
    total = f"{printable(report.folder)}: {kept}; {verb} {gone}, {format_bytes(report.removed_bytes)}"
    return "\n".join([*(f"{verb} {printable(name)}" for name in report.removed), total])


def reported_line(report: PageReport) -> str:
    """Describe a written page."""
    counts = ((len(report.runs), "run"), (len(report.files), "file"), (len(report.searches), "search"))
    shown = [plural(n, what) for n, what in counts if n] + (["a comparison"] if report.diff else [])
    problems = f"; {plural(len(report.problems), 'problem')}" if report.problems else ""
    return f"{printable(report.output or '')}: a page of {', '.join(shown)}{problems}; open it in a browser"


def rebased_line(report: RebaseReport) -> str:
    """Describe the result of a rebase."""
    output = printable(report.output)
    if not report.is_changed:
        return f"{output}: stands alone already, nothing was written"
    bases = f" with parts of {plural(len(report.bases), 'base')} within" if report.bases else ""
    sizes = f"{format_bytes(report.chain_bytes)} -> {format_bytes(report.stored_bytes)}"
    return f"{output}: stands alone{bases}, {sizes}, read back and right, {report.seconds:.2f} s"
