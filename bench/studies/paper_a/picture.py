"""The picture of paper_a."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

from bench.core.measure import RESULTS
from bench.studies.paper_a.chain import resumed_gap
from bench.studies.paper_a.coders import WAYS
from bench.studies.paper_a.search import drop_of
from bench.studies.paper_a.tables import Result, TaskResults, ratio
from bench.studies.paper_a.tasks import HELD_OUT, SEARCH


def write_picture(results: Sequence[TaskResults]) -> None:
    """results/paper_a.png: a row a task."""
    size = (18, 4.2 * len(results))
    figure, axes = plt.subplots(len(results), 4, figsize=size, squeeze=False, layout="constrained")
    for row, found in zip(axes, results, strict=True):
        _plot_ratios(row[0], found)
        _plot_losses(row[1], found)
        _plot_coders(row[2], found)
        _plot_snapshots(row[3], found)
    figure.savefig(RESULTS / "paper_a.png", dpi=100)


def _label(chain: Result) -> str:
    return f"{100 * chain['budget']:g} % budget, {chain['n_restores']} restores"


def _plot_ratios(axis: Any, found: TaskResults) -> None:
    for chain in found.chains:
        files = chain["checkpoints"]
        steps, ratios = [one["step"] for one in files], [ratio([one]) for one in files]
        (line,) = axis.plot(steps, ratios, "-", lw=1, label=_label(chain))
        for filled in (True, False):
            rows = zip(steps, ratios, files, strict=True)
            points = [(step, value) for step, value, one in rows if one["after_restart"] != filled]
            if points:
                color = line.get_color()
                face = color if filled else "white"
                axis.plot(*zip(*points, strict=True), "o", ms=5, color=color, mfc=face)
    axis.set(xlabel="step", ylabel="fp32 weights over file", ylim=(0, None))
    axis.set_title(f"{found.task.name}: size (hollow: right after a restart)", fontsize=10)
    axis.legend(fontsize=8)


def _plot_losses(axis: Any, found: TaskResults) -> None:
    steps = [one["step"] for one in found.exact]
    axis.plot(steps, [one[HELD_OUT]["loss"] for one in found.exact], "k-", lw=1, label="uninterrupted")
    for chain in found.chains:
        if not chain["n_restores"]:
            continue
        losses = [one["exact"][HELD_OUT]["loss"] for one in chain["checkpoints"]]
        (line,) = axis.plot(steps, losses, "o-", ms=3, lw=1, label=_label(chain))
        restored = [one[HELD_OUT]["loss"] for one in chain["elsewhere"]]
        axis.plot(steps, restored, "x", ms=5, color=line.get_color(), label="its files, restored")
    axis.set(xlabel="step", ylabel="held-out loss, nats")
    axis.set_title(f"{found.task.name}: loss", fontsize=10)
    axis.legend(fontsize=8)


def _plot_coders(axis: Any, found: TaskResults) -> None:
    restarted = [chain for chain in found.chains if chain["n_restores"]]
    height = 0.8 / len(restarted)
    for i, chain in enumerate(restarted):
        raw = sum(one["raw_bytes"] for one in chain["checkpoints"])
        ratios = [raw / sum(sizes[way] for sizes in chain["coders"]) for way in WAYS]
        bars = axis.barh([k + i * height for k in range(len(WAYS))], ratios, height, label=_label(chain))
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.set_yticks([k + height / 2 for k in range(len(WAYS))], WAYS)
    axis.set(xlabel="run average, fp32 weights over files")
    axis.margins(x=0.5)  # room for the legend
    axis.set_title(f"{found.task.name}: the same codes, other coders", fontsize=10)
    axis.legend(fontsize=8, loc="lower right")


def _plot_snapshots(axis: Any, found: TaskResults) -> None:
    if not found.snapshots:
        axis.axis("off")
        return
    ratios = [ratio([one]) for one in found.snapshots]
    for part, label in ((SEARCH, "search's data"), (HELD_OUT, "held out")):
        pairs = [(one["exact"][part], one["restored"][part]) for one in found.snapshots]
        lost = [100 * drop_of(found.task, *pair) for pair in pairs]
        axis.plot(lost, ratios, "o-", ms=4, lw=1, label=f"{found.task.budgeted} lost at once, {label}")
    resumed = [100 * resumed_gap(one["resumed"]) for one in found.snapshots]
    axis.plot(resumed, ratios, "o-", ms=4, lw=1, label="loss, resumed")
    axis.set(xlabel="%", ylabel="fp32 weights over file")
    axis.set_title(f"{found.task.name}: one snapshot by budget", fontsize=10)
    axis.legend(fontsize=8)
