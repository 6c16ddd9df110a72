"""Reports as lines of text. Names come from files, so nothing is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptz.container.index import STEPS_LOST, QualityRecord
from ckptz.pages.words import printable, ratio, size

if TYPE_CHECKING:
    from ckptz.verbs.compress import CompressReport
    from ckptz.verbs.restore import RestoreReport
    from ckptz.verbs.verify import VerifyReport


def _pace(n_bytes: int, seconds: float) -> str:
    return f"{seconds:.2f} s, {n_bytes / 1e6 / max(seconds, 1e-9):.3g} MB/s"


def compressed_line(report: CompressReport) -> str:
    """Say what one input became."""
    against = f", {report.n_deltas} of them against {printable(report.base)}" if report.base else ""
    lossy = f", {report.n_lossy} of them lossy with {_promise(report)}" if report.n_lossy else ""
    return (
        f"{printable(report.output)}: {size(report.tensor_bytes)} -> {size(report.stored_bytes)} "
        f"({ratio(report.stored_bytes, report.tensor_bytes)}), {report.n_tensors} tensors{against}{lossy}, "
        f"{_pace(report.tensor_bytes, report.seconds)}"
    )


def _promise(report: CompressReport) -> str:
    if report.search is None or not report.search.quality:
        return "no promise, errors in inspect --tensors"
    return "; ".join(map(quality_text, report.search.quality))


def quality_text(record: QualityRecord) -> str:
    """Say what was measured of a budget; an error that stands in for a quality is called a proxy."""
    if record.promise == "rmse":
        kept = f"{record.measured:.4g} of at most {record.max_drop:.4g}"
        return f"no promise of quality, {printable(record.metric)} {kept}"
    if record.metric == STEPS_LOST:
        return f"{record.measured:.3g} steps of training lost ({record.max_drop:.3g} are allowed)"
    change = record.measured - record.exact if record.lower_is_better else record.exact - record.measured
    if record.is_relative:
        used, allowed = f"{abs(change / record.exact):.2%}", f"{100 * record.max_drop:.4g}%"
    else:
        used, allowed = f"{abs(change):.4g}", f"{record.max_drop:.4g}"
    verdict = f"{used} better" if change < 0 else f"{used} worse"
    values = f"{record.measured:.6g} against {record.exact:.6g}"
    return f"{printable(record.metric)} {values}, {verdict} ({allowed} worse is allowed)"


def total_line(reports: Sequence[CompressReport]) -> str:
    """Sum up all inputs."""
    n_bytes, stored = sum(r.tensor_bytes for r in reports), sum(r.stored_bytes for r in reports)
    sizes = f"{size(n_bytes)} -> {size(stored)} ({ratio(stored, n_bytes)})"
    return f"{len(reports)} files: {sizes}, {_pace(n_bytes, sum(r.seconds for r in reports))}"


def restored_line(report: RestoreReport) -> str:
    """Say what was restored."""
    chain = f" in a chain of {report.n_files} files" if report.n_files > 1 else ""
    return (
        f"{printable(report.output)}: {size(report.tensor_bytes)} in {report.n_tensors} tensors from "
        f"{size(report.stored_bytes)}{chain}, all checksums match, "
        f"{_pace(report.tensor_bytes, report.seconds)}"
    )


def verified_line(report: VerifyReport) -> str:
    """Say what was found to be right."""
    chain = f" of {len(report.chain) + 1} files" if report.chain else ""
    same = f", bit for bit {printable(report.against)}" if report.against else ""
    within = f" but for {report.n_lossy} lossy tensors within their recorded errors"
    return (
        f"{printable(report.file)}: ok{same}{within if same and report.n_lossy else ''}; {report.n_chunks} "
        f"stored chunks{chain} and all {report.n_tensors} tensors match their checksums, "
        f"{_pace(report.tensor_bytes, report.seconds)}"
    )
