"""Reports as text: one line, or tables for `inspect`. Names come from files, so nothing is trusted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.table import Table

from ckptz.commands.compress import CompressReport
from ckptz.commands.inspect import InspectReport, TensorReport
from ckptz.commands.restore import RestoreReport
from ckptz.commands.seal import SealReport
from ckptz.commands.verify import VerifyReport
from ckptz.container.index import STEPS_LOST, QualityRecord
from ckptz.pages.words import printable, ratio, size
from ckptz_cli.tables import add_row, drawn, facts_table, table_of

LONGEST_VALUE: Final = 100  # characters of a metadata value


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
    if report.seal is not None:
        return (
            f"{printable(report.file)}: ok, as sealed; {report.n_sealed_files} files and all "
            f"{report.n_tensors} tensors match {printable(report.seal)}, {report.seconds:.2f} s"
        )
    chain = f" of {len(report.chain) + 1} files" if report.chain else ""
    same = f", bit for bit {printable(report.against)}" if report.against else ""
    within = f" but for {report.n_lossy} lossy tensors within their recorded errors"
    return (
        f"{printable(report.file)}: ok{same}{within if same and report.n_lossy else ''}; {report.n_chunks} "
        f"stored chunks{chain} and all {report.n_tensors} tensors match their checksums, "
        f"{_pace(report.tensor_bytes, report.seconds)}"
    )


def sealed_line(report: SealReport) -> str:
    """Say what was sealed."""
    return (
        f"{printable(report.seal)}: {report.n_files} files with {report.n_tensors} tensors, "
        f"{_pace(report.file_bytes, report.seconds)}"
    )


def inspected_text(report: InspectReport, *, with_tensors: bool) -> str:
    """Draw the file, its metadata, its chain, how it is stored and, if asked for, every tensor as tables."""
    parts = [facts_table(_file_facts(report))]
    if report.metadata:
        shown = {name: _cut(value) for name, value in report.metadata.items()}
        parts.append(facts_table((f"metadata {name}", value) for name, value in shown.items()))
    if report.depth:
        parts.append(_chain_table(report))
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
        ("tensors", f"{report.n_tensors}, {size(report.tensor_bytes)}"),
        ("stored", f"{size(report.stored_bytes)} ({ratio(report.stored_bytes, report.tensor_bytes)})"),
        ("coders", _share_text(report.coders)),
    ]
    facts += [(record.promise, f"{quality_text(record)}, {record.date}") for record in report.quality]
    if report.shards:
        facts.append(("shards", f"{len(report.shards)}, restored as a folder"))
    if report.has_tree:
        facts.append(("tree", "nested; restored as a torch file"))
    if report.broken:
        facts.append(("chain", f"incomplete: {report.broken}"))
    return facts


def _kind(report: InspectReport) -> str:
    promise = "lossy" if any(tensor.lossy for tensor in report.tensors) else "lossless"
    if report.chain and report.chain[0].is_inline:
        return f"{promise}, stands alone with {report.depth} inline bases"
    return f"{promise} delta, {report.depth} from its anchor" if report.depth else f"{promise} anchor"


def _chain_table(report: InspectReport) -> Table:
    table = table_of("chain, nearest first", "depth", "content id", "found at")
    for member in report.chain:
        within = "within the file" if member.path == report.file else f"within {member.path}"
        found = within if member.is_inline else member.path or "missing"
        add_row(table, member.file, str(member.depth), member.content_id[:16], found)
    return table


def _methods_table(tensors: Sequence[TensorReport]) -> Table:
    """Tensors summed up by type and method."""
    groups: dict[tuple[str, str, str], list[TensorReport]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.predictor, tensor.mode), []).append(tensor)
    headings = ("dtype", "predictor", "mode", "tensors", "bytes", "stored", "ratio", "bits/element", "coders")
    table = table_of(*headings)
    for (dtype, predictor, mode), members in groups.items():
        n_bytes, stored = sum(t.tensor_bytes for t in members), sum(t.stored_bytes for t in members)
        bits = [t.bits_per_element for t in members if t.bits_per_element is not None]
        n_elements = sum(t.stored_bytes * 8 / t.bits_per_element for t in members if t.bits_per_element)
        numbers = (size(n_bytes), size(stored), _times(n_bytes, stored))
        per_element = f"{stored * 8 / n_elements:.3f}" if bits and n_elements else "-"
        sums: Counter[str] = Counter()
        for t in members:
            sums.update({coder: share * t.stored_bytes for coder, share in t.coders.items()})
        shares = _share_text({coder: n / sums.total() for coder, n in sums.most_common() if sums.total()})
        add_row(table, dtype, predictor, mode, str(len(members)), *numbers, per_element, shares)
    return table


def _tensors_table(tensors: Sequence[TensorReport]) -> Table:
    headings = ("tensor", "layer", "dtype", "shape", "stored", "ratio", "bits/element")
    losses = ("loss",) if any(tensor.lossy for tensor in tensors) else ()
    table = table_of(*headings, "predictor", "mode", "coders", "slice decodes", *losses)
    for tensor in tensors:
        bits = "-" if tensor.bits_per_element is None else f"{tensor.bits_per_element:.3f}"
        numbers = (size(tensor.stored_bytes), _times(tensor.tensor_bytes, tensor.stored_bytes), bits)
        method = (tensor.predictor, tensor.mode, _share_text(tensor.coders))
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        ends = (_slice_cost(tensor), *(_loss_text(tensor) for _ in losses))
        layer = tensor.layer_type if tensor.role == "weight" else f"{tensor.layer_type} {tensor.role}"
        add_row(table, tensor.name, layer, tensor.dtype, shape, *numbers, *method, *ends)
    return table


def _loss_text(tensor: TensorReport) -> str:
    """What a lossy tensor was promised, and what was measured on it."""
    loss = tensor.lossy
    if loss is None:
        return "none"
    error = f"{loss.rms_error / loss.rms:.2%}" if loss.rms else f"{loss.rms_error:.2g}"
    n = max(math.prod(tensor.shape), 1)
    shares = f"pruned {loss.n_pruned / n:.2%}, protected {loss.n_protected / n:.2%}"
    # What is off or zero goes without saying.
    settings = (f"{name.replace('_', ' ')} {value}" for name, value in loss.settings.items() if value)
    return (
        f"{loss.method}, {loss.layer_type}, {', '.join(settings)}, {shares}, "
        f"promise {loss.promise}, rms error {error} of rms, largest {loss.max_abs_error:.3g}"
    )


def _slice_cost(tensor: TensorReport) -> str:
    """Chunks that a slice may touch, times the frames that each is decoded from."""
    chunks = f"1..{tensor.n_chunks} chunks" if tensor.n_chunks > 1 else f"{tensor.n_chunks} chunk"
    frames = "?" if tensor.n_frames is None else str(tensor.n_frames)
    return f"{chunks} x {frames}"


def _times(n_bytes: int, stored: int) -> str:
    return f"{n_bytes / stored:.3g}x" if stored and n_bytes else "-"


def _share_text(shares: dict[str, float]) -> str:
    return ", ".join(f"{coder} {share:.0%}" for coder, share in shares.items() if share >= 0.005) or "-"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"
