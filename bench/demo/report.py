"""Output of the demo: the table, the picture, the JSON file and the list of failures."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from bench.demo.methods import GRID, Storage
from bench.demo.training import N_CALIBRATION_BATCHES, Resumption
from ckptz._version import __version__
from ckptz.search.budget import Limit, Measurement, judge

MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table. The first is the resume from the uncompressed checkpoint, the reference of all.

    Attributes:
        name: method, or kind of exact resume.
        is_lossless: True if a difference to the exact resume is an error.
        resumption: losses after the restore.
        storage: sizes and speeds; None for the exact resumes, which compress nothing.
    """

    name: str
    is_lossless: bool
    resumption: Resumption
    storage: Storage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All measurements of the demo.

    Attributes:
        rows: exact resume, exact resume with another number of threads (the noise floor), then the methods.
        steps: step of each checkpoint.
        resume_step: step of the checkpoint from which training resumed.
        training: loss of every step of the original run.
        state_bytes: bytes of the fp32 weights and both moments in one checkpoint.
        plain_bytes: bytes of each uncompressed checkpoint.
        zstd: bytes and MB/s of zstd level 3 on the uncompressed checkpoints.
        first_use_seconds: seconds of the first compression and restore, including kernel compilation.
        total_seconds: seconds of the demo.
    """

    rows: list[Row]
    steps: list[int]
    resume_step: int
    training: list[float]
    state_bytes: int
    plain_bytes: list[int]
    zstd: tuple[int, float]
    first_use_seconds: float
    total_seconds: float

    @property
    def exact(self) -> Resumption:
        """Losses of the resume from the uncompressed checkpoint."""
        return self.rows[0].resumption

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Bytes of each checkpoint, by storage: "uncompressed", then the name of each method."""
        return {"uncompressed": self.plain_bytes} | {
            r.name: r.storage.n_bytes for r in self.rows if r.storage
        }


def change_percent(value: float, exact: float) -> float:
    """Return the relative change in percent, positive if the loss rose."""
    return 100 * (value - exact) / exact


def changes_percent(resumption: Resumption, exact: Resumption) -> float:
    """Return the per-byte loss change: half the mean square, in percent of the exact mean loss."""
    reference, restored = (
        Measurement("loss", losses.tokens.double().numpy(), lower_is_better=True)
        for losses in (exact, resumption)
    )
    change = judge(Limit(0.01, True), reference, restored).example_change
    return 100 * (math.inf if change is None else change)


def _percent(value: float) -> str:
    return "0" if value == 0 else f"{value:+.0e} %" if abs(value) < 0.01 else f"{value:+.2f} %"


def print_table(report: Report, console: Console) -> None:
    """Print the table and an explanation of its columns."""
    title = f"{len(report.steps)} checkpoints of a small GPT, resumed from step {report.resume_step}"
    table = Table(title=title)
    table.add_column("method", no_wrap=True)
    titles = ("run, MB", "ratio", "weights ratio", "compress MB/s", "restore MB/s", "loss at once", "change")
    for title in (*titles, "single changes", "loss resumed", "change", "bit equal"):
        table.add_column(title, justify="right", min_width=max(map(len, title.split())))
    for row in report.rows:
        table.add_row(row.name, *_size_cells(row, report), *_loss_cells(row.resumption, report.exact))
    console.print(table)
    zstd_bytes, zstd_rate = report.zstd
    console.print(
        f"ratio: fp32 weights and both moments, {report.state_bytes / MB:.1f} MB a checkpoint, over bytes on "
        f"disk; weights ratio: of the weights alone; zstd -3 of everything: "
        f"{_ratio(report, zstd_bytes):.3f}x at {zstd_rate:.0f} MB/s\n"
        f"MB/s: of the original files, {os.cpu_count()} cores, reading, writing and, for a delta, its "
        f"chain included; the first use, with compilation if needed, took {report.first_use_seconds:.1f} s\n"
        f"grid: weights and moments, step {GRID.step:g} of the reference; the inputs of the layers that its "
        f"rounding reads are of {N_CALIBRATION_BATCHES} batches at each checkpoint, not counted in MB/s\n"
        f"loss: validation, nats per byte; resumed: mean over {len(report.exact.training)} further steps; "
        "change: against the exact resume; single changes: half the mean square of those of each byte's loss "
        "at once, over the mean loss; on other threads it is the noise floor",
        highlight=False,
        soft_wrap=True,
    )


def _ratio(report: Report, n_bytes: int) -> float:
    return report.state_bytes * len(report.steps) / n_bytes


def _size_cells(row: Row, report: Report) -> list[str]:
    if storage := row.storage:
        speeds = [f"{storage.compress_rate:.0f}", f"{storage.restore_rate:.0f}"]
        ratios = [f"{storage.ratio:.3f}x", f"{storage.weights_ratio:.3f}x"]
        return [f"{sum(storage.n_bytes) / MB:.1f}", *ratios, *speeds]
    if row is not report.rows[0]:
        return ["-"] * 5
    n_bytes = sum(report.plain_bytes)
    return [f"{n_bytes / MB:.1f}", f"{_ratio(report, n_bytes):.3f}x", "1.000x", "-", "-"]


def _loss_cells(resumption: Resumption, exact: Resumption) -> list[str]:
    return [
        f"{resumption.at_once:.4f}",
        _percent(change_percent(resumption.at_once, exact.at_once)),
        _percent(changes_percent(resumption, exact)),
        f"{resumption.resumed:.4f}",
        _percent(change_percent(resumption.resumed, exact.resumed)),
        "yes" if resumption.is_bit_equal(exact) else "no",
    ]


def draw(report: Report, path: Path) -> None:
    """Draw the size of the run with each method, and the loss change after a restore; readable on phones."""
    figure = Figure(figsize=(6, 6.4), layout="constrained")
    sizes, gaps = figure.subplots(2, 1, height_ratios=[2, 3])
    _draw_sizes(sizes, report)
    _draw_gaps(gaps, report)
    figure.savefig(path, dpi=160)


def _draw_sizes(axes: Any, report: Report) -> None:
    names = list(report.sizes)
    totals = [sum(n_bytes) / MB for n_bytes in report.sizes.values()]
    colors = ["0.75", *(f"C{i}" for i in range(1, len(names)))]
    bars = axes.barh(names, totals, color=colors)
    ratios = ["", *(f", {_ratio(report, round(total * MB)):.3g}x smaller" for total in totals[1:])]
    labels = [f"{total:.3g} MB{ratio}" for total, ratio in zip(totals, ratios, strict=True)]
    axes.bar_label(bars, labels, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.45)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(f"{len(report.steps)} checkpoints: weights and both moments", fontsize=12)


def _draw_gaps(axes: Any, report: Report) -> None:
    steps = report.resume_step + 1 + np.arange(len(report.exact.training))
    exact = np.array(report.exact.training)
    for i, row in enumerate(report.rows[1:]):
        gap = 100 * (np.array(row.resumption.training) / exact - 1)
        axes.plot(steps, gap, color="0.6" if i == 0 else f"C{i}", label=row.name, linewidth=2)
    axes.ticklabel_format(axis="y", scilimits=(-3, 3))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Training loss after a restore, against the exact one", fontsize=12)
    axes.set(xlabel="step", ylabel="change, %")
    axes.legend()


def write_json(report: Report, path: Path) -> None:
    """Write all measurements, the versions and the machine as JSON."""
    content = asdict(replace(report, rows=[])) | {
        "rows": [
            asdict(replace(row, resumption=None)) | {"resumption": _numbers(row.resumption)}
            for row in report.rows
        ],
        "ckptz": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "changes_percent": {
            row.name: {
                "at_once": change_percent(row.resumption.at_once, report.exact.at_once),
                "single": changes_percent(row.resumption, report.exact),
                "resumed": change_percent(row.resumption.resumed, report.exact.resumed),
            }
            for row in report.rows
        },
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _numbers(resumption: Resumption) -> dict[str, Any]:
    """Return all fields, with the mean loss after the restore in place of the loss of each byte."""
    names = [field.name for field in fields(resumption) if field.name != "tokens"]
    return {name: getattr(resumption, name) for name in names} | {"at_once": resumption.at_once}


def problems(report: Report) -> list[str]:
    """Return a message for each failure: a lossless method that changed a bit, or a missing number."""
    failures = []
    for row in report.rows:
        if row.is_lossless and not row.resumption.is_bit_equal(report.exact):
            failures.append(f"{row.name}: the resumed training is not bit-equal to the exact resume")
        if row.is_lossless and row.storage and row.storage.n_bit_equal != len(report.steps):
            failures.append(f"{row.name}: a restored file is not bit-equal to its original")
        if not _is_complete(row, report):
            failures.append(f"{row.name}: a number is missing")
    return failures


def _is_complete(row: Row, report: Report) -> bool:
    resumption, exact, storage = row.resumption, report.exact, row.storage
    numbers = [resumption.at_once, *resumption.training, *resumption.validation]
    is_complete = len(resumption.training) == len(exact.training)
    is_complete &= len(resumption.validation) == len(exact.validation)
    if storage:
        rates = storage.compress_rate, storage.restore_rate
        numbers += [*storage.n_bytes, storage.ratio, storage.weights_ratio, *rates]
        is_complete &= len(storage.n_bytes) == len(report.steps)
    return is_complete and all(math.isfinite(number) and number > 0 for number in numbers)
