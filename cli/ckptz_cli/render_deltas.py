"""Reports of `fold`, `export` and `apply` as lines of text."""

from __future__ import annotations

from ckptz.commands.fold import DeltaReport
from ckptz_cli.errors import printable
from ckptz_cli.render import ratio, size


def folded_line(report: DeltaReport) -> str:
    """What a fold wrote."""
    against = f"from {printable(report.base)}" if report.base else "which stands alone"
    return f"{_written(report)}, {report.n_deltas} of {report.n_tensors} tensors {against}, {_time(report)}"


def exported_line(report: DeltaReport) -> str:
    """What an export wrote."""
    return f"{_written(report)}, {report.n_tensors} tensors, needs no other file, {_time(report)}"


def applied_line(report: DeltaReport) -> str:
    """What became of a file."""
    what = f"{report.n_tensors} tensors, {size(report.tensor_bytes)}"
    return (
        f"{printable(report.output)}: {printable(report.input)} on {printable(report.base or '')}, {what}, "
        f"all checksums match, {_time(report)}"
    )


def _written(report: DeltaReport) -> str:
    step = "" if report.step is None else f"step {report.step}, "
    n_bytes = f"{size(report.stored_bytes)} ({ratio(report.stored_bytes, report.tensor_bytes)})"
    return f"{printable(report.output)}: {step}{n_bytes}"


def _time(report: DeltaReport) -> str:
    return f"{report.seconds:.2f} s"
