"""What `ckptz inspect` says of a file, as tables. Names come from files, so nothing is trusted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.table import Table

from ckptz.pages.words import ratio, size, times
from ckptz_cli.render import quality_text
from ckptz_cli.tables import add_row, drawn, facts_table, table_of

if TYPE_CHECKING:
    from ckptz.api.describe import InspectReport, TensorReport

LONGEST_VALUE: Final = 100  # characters of a metadata value


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
    """Say what a lossy tensor was promised, and what was measured on it."""
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
    return times(n_bytes / stored) if stored and n_bytes else "-"


def _share_text(shares: dict[str, float]) -> str:
    return ", ".join(f"{coder} {share:.0%}" for coder, share in shares.items() if share >= 0.005) or "-"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"
