"""Reports on a folder of steps as text."""

from __future__ import annotations

from ckptz.store.retention import PruneReport
from ckptz_cli.errors import printable
from ckptz_cli.render import size


def pruned_text(report: PruneReport) -> str:
    """What a prune did, a line for each file that goes and one for all."""
    verb = "would remove" if report.dry_run else "removed"
    lines = [f"{verb} {name}" for name in report.removed]
    counts = [f"{len(report.steps)} steps"]
    if report.weights_only:
        counts.append(f"{len(report.weights_only)} more of which the weights stay")
    if report.hidden:
        counts.append(f"{len(report.hidden)} hidden files that these are stored against")
    lines.append(
        f"{printable(report.folder)}: keeps {', '.join(counts)}, {size(report.kept_bytes)}; "
        f"{verb} {len(report.removed)} files, {size(report.removed_bytes)}"
    )
    return "\n".join(lines)
