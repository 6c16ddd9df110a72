"""Reports as lines of text. Names come from files, so non-printable characters are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptz.run.names import step_of_folder
from ckptz.verbs.quality_text import amount_text, change_text, quality_text
from ckptz.words import format_bytes, format_ratio, printable

if TYPE_CHECKING:
    from ckptz.run.prune import PruneReport
    from ckptz.search.budget import Judgement
    from ckptz.verbs.compress import CompressReport
    from ckptz.verbs.rebase import RebaseReport
    from ckptz.verbs.report import PageReport
    from ckptz.verbs.restore import RestoreReport
    from ckptz.verbs.verify import VerifyReport

UNMEASURED: Final = "quality not measured (per-tensor errors: inspect --tensors)"


def plural(n: int, noun: str) -> str:
    """Return a count with its noun in singular or plural, such as "2 files"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith('ch') else 's'}"


def all_tensors(n: int) -> str:
    """Return words for all tensors of a checkpoint, such as "all 2 tensors"."""
    return "its tensor" if n == 1 else f"all {n} tensors"


def _pace(n_bytes: int, seconds: float) -> str:
    return f"{seconds:.2f} s, {n_bytes / 1e6 / max(seconds, 1e-9):.3g} MB/s"


def compressed_line(report: CompressReport) -> str:
    """Return the line for one compressed input, or for the prediction of one input and one method."""
    is_predicted = report.is_dry_run and report.search is None
    about = "about " if is_predicted else ""
    against = f", {report.n_deltas} of them against {printable(report.base)}" if report.base else ""
    sizes = f"{format_bytes(report.tensor_bytes)} -> {about}{format_bytes(report.stored_bytes)}"
    ratio = format_ratio(report.stored_bytes, report.tensor_bytes)
    what = f"{sizes} ({ratio}), {plural(report.n_tensors, 'tensor')}{against}"
    lossy = f", {report.n_lossy} lossy" if report.n_lossy else ""
    if is_predicted:
        where = f"{printable(report.input)}, {report.method}"
        return f"{where}: {what}{lossy}, about {report.seconds:.2g} s; nothing was written"
    quality, trials = ((), ()) if report.search is None else (report.search.quality, report.search.trials)
    if lossy:
        lossy += f", {'; '.join(map(quality_text, quality)) or UNMEASURED}"
    evaluated = f", {plural(len(trials), 'evaluation')}" if trials else ""
    pace = _pace(report.tensor_bytes, report.seconds)
    return f"{printable(report.output)}: {what}{lossy}, {pace}{evaluated}"


def judged_text(judged: Judgement) -> str:
    """Return the change of a trial against its budget, and whether the examples are enough to measure it."""
    if judged.mean_change is None:
        return "not finite"
    is_relative = judged.is_relative
    text = change_text(judged.mean_change, is_relative=is_relative)
    if judged.standard_error is not None and judged.example_change is not None:
        allowed = amount_text(judged.example_limit, is_relative=is_relative)
        text += f" +- {amount_text(judged.standard_error, is_relative=is_relative)}"
        text += "" if judged.is_resolved else f", too few {printable(judged.unit)}s to be sure"
        changes = amount_text(judged.example_change, is_relative=is_relative)
        text += f", per-{printable(judged.unit)} change {changes} (limit {allowed})"
    return text


def total_line(reports: Sequence[CompressReport]) -> str:
    """Return the line with the total of all inputs."""
    n_bytes, stored = sum(r.tensor_bytes for r in reports), sum(r.stored_bytes for r in reports)
    sizes = f"{format_bytes(n_bytes)} -> {format_bytes(stored)} ({format_ratio(stored, n_bytes)})"
    return f"{len(reports)} files: {sizes}, {_pace(n_bytes, sum(r.seconds for r in reports))}"


def restored_line(report: RestoreReport) -> str:
    """Return the line for a restored file."""
    chain = f" in a chain of {report.n_files} files" if report.depth else f" in {report.n_files} files"
    copied = f", {plural(report.n_copied, 'other file')} copied" if report.n_copied else ""
    return (
        f"{printable(report.output)}: {format_bytes(report.tensor_bytes)} in "
        f"{plural(report.n_tensors, 'tensor')} from {format_bytes(report.stored_bytes)}"
        f"{chain if report.n_files > 1 else ''}, all checksums match{copied}, "
        f"{_pace(report.tensor_bytes, report.seconds)}"
    )


def verified_line(report: VerifyReport) -> str:
    """Return the line for a verified file."""
    chain = f" of {len(report.chain) + 1} files" if report.chain else ""
    compared = ""
    if report.against:
        n_same = report.n_tensors - report.n_lossy
        compared = f", {plural(n_same, 'tensor')} identical to {printable(report.against)}"
        compared += f", {report.n_lossy} within their recorded error" if report.n_lossy else ""
    return (
        f"{printable(report.file)}: ok{compared}; {report.n_chunks} "
        f"stored chunks{chain} and {all_tensors(report.n_tensors)} match their checksums, "
        f"{_pace(report.tensor_bytes, report.seconds)}"
    )


def pruned_text(report: PruneReport) -> str:
    """List the deleted files, one a line, and summarize."""
    verb = "would remove" if report.dry_run else "removed"
    counts = [plural(len(report.steps), "step")]
    if report.weights_only:
        counts.append(f"the weights of {len(report.weights_only)} more")
    if report.exact:
        counts.append(f"residual files of {plural(len(report.exact), 'step')}")
    if report.hidden:
        counts.append(f"{plural(len(report.hidden), 'hidden base')}")
    # The name of a folder is a step; the name of a file also has a suffix.
    n_folders = sum(step_of_folder(Path(name)) is not None for name in report.removed)
    removed = ((n_folders, "folder"), (len(report.removed) - n_folders, "file"))
    counts_removed = " and ".join(plural(n, what) for n, what in removed if n) or "0 files"
    kept = f"keeps {', '.join(counts)}, {format_bytes(report.kept_bytes)}"
    total = (
        f"{printable(report.folder)}: {kept}; {verb} {counts_removed}, {format_bytes(report.removed_bytes)}"
    )
    return "\n".join([*(f"{verb} {printable(name)}" for name in report.removed), total])


def reported_line(report: PageReport) -> str:
    """Return the line for a written report page."""
    n_in_runs = sum(run.n_files for run in report.runs)
    runs = [f"{plural(len(report.runs), 'run')} of {plural(n_in_runs, 'file')}"] if report.runs else []
    files = [f"{plural(len(report.files), 'file')} in detail"] if report.files else []
    searches = [plural(len(report.searches), "search")] if report.searches else []
    shown = [*runs, *files, *searches, *(["a comparison"] if report.diff else [])]
    problems = f"; {plural(len(report.problems), 'problem')}" if report.problems else ""
    return f"{printable(report.output or '')}: a page of {', '.join(shown)}{problems}; open it in a browser"


def rebased_line(report: RebaseReport) -> str:
    """Return the line for a rebased file."""
    output = printable(report.output)
    if not report.is_changed:
        return f"{output}: is self-contained already, nothing was written"
    bases = f" with {plural(len(report.bases), 'inline base')}" if report.bases else ""
    sizes = f"{format_bytes(report.chain_bytes)} -> {format_bytes(report.stored_bytes)}"
    return f"{output}: self-contained{bases}, {sizes}, read back and verified, {report.seconds:.2f} s"
