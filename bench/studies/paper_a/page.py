"""The page and the picture of paper_a: the published claims, with what was measured beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

from bench.core.measure import RESULTS, table
from bench.studies.paper_a.chain import resumed_gap
from bench.studies.paper_a.coders import WAYS
from bench.studies.paper_a.search import drop_of
from bench.studies.paper_a.tables import (
    TABLES,
    Result,
    TaskResults,
    drops,
    loss_change,
    percent,
    ratio,
)
from bench.studies.paper_a.tasks import HELD_OUT, SEARCH
from bench.studies.paper_a.training import PROBE_STEPS

TITLES = {
    "runs": "Runs: sizes and ends",
    "quality": "The budget and the resumed loss",
    "coders": "Ablation: the same codes by other coders",
    "search": "The cost of searching",
    "snapshots": "Single snapshots",
    "seconds": "CPU seconds of a checkpoint, all threads",
    "checkpoints": "Every checkpoint",
}

PAPER = """\
Paper: "Inshrinkerator: Compressing Deep Learning Training Checkpoints via Dynamic Quantization" (arXiv
2306.11800)."""

MODELS = {
    "language": "A byte-level GPT of 3.3 M parameters on the standard library's source, AdamW",
    "image": "A residual network of 1.2 M parameters on distorted, noisy characters, SGD with momentum",
}

METHOD = """\
Training warms up and follows a cosine; the first checkpoint is behind the steep start. Only weights are
compressed: ratios are fp32 weights over whole `.ckptz` files, anchor and headers counted. Optimizer state is
exact and not counted: with both Adam moments stored beside them, weights alone can make the whole at most
1.5x smaller. A budget is the relative loss of the measure (loss for language, accuracy for images, as in the
paper) that each checkpoint may have against the exact state of the same step. Ten failures cut the run from
the first checkpoint to the last into equal parts; training goes on from what the last file restores to.

*At once* is measured on files restored by a new process, on the search's data and on a second slice that no
search has seen. *Resumed* is the change of the mean validation loss {probes} steps after a restore against
the exact state's; its noise floor is what disturbing the weights by 1 % of their spread does. *The end* is
the last exact state of the run against that of the uninterrupted run.

A budget is per checkpoint, and restarts add up: ratios at a loose budget and end quality must be read
together. A likely reason, not tested apart: a weight that restarts from a centroid and moves by less
than half a cell until the next checkpoint is rounded back to where it was, so that a restart also
undoes progress; files right after a restart are small for the same reason. A first language run with 60
steps between checkpoints instead of 260 ended at 64.3x and +9.7 % (5 % budget) and 40.5x and +3.7 % (1
% budget): intervals were shorter than the recovery from a restart, so the run was made longer. Failures
cut the run into equal parts. Numbers are of these small tasks."""


def _schedule(found: TaskResults) -> str:
    task, description = found.task, MODELS[found.task.name]
    first, last = found.exact[0], found.exact[-1]
    losses = f"loss {first[HELD_OUT]['loss']:.2f} to {last[HELD_OUT]['loss']:.2f}"
    steps = f"checkpoints from step {first['step']} to {last['step']}, {task.interval} steps apart"
    return f"- *{task.name.capitalize()}*: {description}; {steps}, held-out {losses}."


def _summary(found: TaskResults) -> list[str]:
    """One sentence a run."""
    lines = []
    for chain in found.chains:
        files = chain["checkpoints"]
        text = f"**{found.task.name.capitalize()}, {_label(chain)}:** "
        text += (
            f"{ratio(files):.1f}x on average over the run, lost at once {_span(drops(found, chain, SEARCH))}"
        )
        text += f", held out {_span(drops(found, chain, HELD_OUT))}"
        gaps = [resumed_gap(one["resumed"]) for one in files if "resumed" in one]
        if gaps:
            text += f"; resumed loss {_span(gaps)}"
        if chain["n_restores"]:
            text += f"; loss at the end of the run {percent(loss_change(chain['end'][HELD_OUT]))}"
        lines.append(f"- {text}.")
    return lines


def _span(values: Sequence[float]) -> str:
    return f"{percent(statistics.mean(values))} (worst {percent(max(values))})"


def write_page(results: Sequence[TaskResults], seconds: int) -> None:
    """results/paper_a.md: what was done, one sentence a run, then the tables."""
    probes = f"{PROBE_STEPS[0]} to {PROBE_STEPS[-1]}"
    out = ["# Dynamic quantization of checkpoints, re-measured", ""]
    out += [PAPER, "", *map(_schedule, results), "", METHOD.format(probes=probes), ""]
    out += [line for found in results for line in _summary(found)]
    missing = [f"{found.task.name}: {', '.join(found.missing)}" for found in results if found.missing]
    out += [f"- Not measured: {'; '.join(missing)}."] if missing else []
    out += ["", f"{seconds} s of wall time, training included, summed over two processes side by side.", ""]
    out += ["![ratios, losses, coders, snapshots](paper_a.png)", ""]
    for name, title in TITLES.items():
        if rows := [row for found in results for row in TABLES[name](found)]:
            out += [f"## {title}", "", table(rows), ""]
    (RESULTS / "paper_a.md").write_text("\n".join(out))


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
