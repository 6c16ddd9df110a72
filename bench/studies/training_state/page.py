"""Tables and the picture of training_state, from what the cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from bench.core.measure import RESULTS, Row, cpu_seconds, machine, save_rows, table
from bench.core.report import finish
from bench.studies.nncodec_rival import PIN
from bench.studies.training_state.search import SEARCHES, found
from bench.studies.training_state.settings import Case
from bench.studies.training_state.study import Measured, Study
from bench.studies.training_state.targets import GRID, KMEANS, NNCODEC, Results, target_rows
from bench.studies.training_state.ways import BYTES_OF_PARAMETER


def available(study: Study, cases: Mapping[str, Sequence[Case]]) -> Results:
    """What the cache holds to the end."""
    return {
        name: [
            study.measured(case.way, probes=case.probes)
            for case in those
            if study.is_complete(case.way, probes=case.probes)
        ]
        for name, those in cases.items()
    }


def write_all(study: Study, cases: Mapping[str, Sequence[Case]], *, is_kept: bool) -> None:
    """Tables, picture and the bench page; a toy's tables are only printed."""
    results = available(study, cases)
    tables = {
        "targets": target_rows(study, results),
        "snapshots": quality_rows(study, results["snapshots"]),
        "weights": quality_rows(study, results["chains"]),
        "whole": quality_rows(study, results["whole"]),
        "search": search_rows(study),
        "seconds": seconds_rows(study, [*results["chains"], *results["whole"]]),
    }
    for name, rows in tables.items():
        if is_kept and rows:
            save_rows(f"training_state_{name}", rows)
        else:
            print(f"\n{name}\n{table(rows)}")
    if is_kept:
        write_picture(results)
        finish("training_state", machine(nncodec=PIN.split("==")[1]))


def quality_rows(study: Study, measured: Sequence[Measured]) -> list[Row]:
    """Sizes, divergence and loss at once, and the resumed gap at each point, in per cent."""
    return [noise_row(study), *(quality_row(study, one) for one in measured)] if measured else []


def noise_row(study: Study) -> Row:
    """Weights disturbed by a hundredth of their spread: of each point the larger of two magnitudes."""
    largest = {index: max(map(abs, gaps)) for index, gaps in study.noise().items()}
    blank = dict.fromkeys(
        ("ratio", "anchor", "deltas", "ratio of weights", "KL at once", "loss at once, %"), ""
    )
    cells = {f"gap at {index}, %": f"{100 * gap:.3f}" for index, gap in largest.items()}
    mean, worst = statistics.mean(largest.values()), max(largest.values())
    return {"method": "noise, magnitude", **blank, **cells, **_summary(mean, worst)}


def quality_row(study: Study, one: Measured) -> Row:
    """One setting."""
    sizes = {
        "ratio": f"{one.ratio:.1f}",
        "anchor": f"{one.anchor_ratio:.1f}" if one.way.is_chain else "",
        "deltas": f"{one.delta_ratio:.1f}" if one.way.is_chain else "",
        "ratio of weights": f"{one.weights_ratio:.1f}",
        "KL at once": f"{one.kl:.2e}",
        "loss at once, %": f"{100 * one.loss_change:+.3f}",
    }
    cells = {f"gap at {i}, %": f"{100 * one.gaps[i]:+.3f}" if one.gaps else "" for i in study.points}
    ends = _summary(one.mean_gap, one.worst) if one.gaps else {"mean gap, %": "", "worst gap, %": ""}
    return {"method": one.way.name, **sizes, **cells, **ends}


def _summary(mean: float, worst: float) -> Row:
    return {"mean gap, %": f"{100 * mean:+.3f}", "worst gap, %": f"{100 * worst:+.3f}"}


def search_rows(study: Study) -> list[Row]:
    """Every search, a line a checkpoint."""
    rows: list[Row] = []
    for search in SEARCHES:
        raw = BYTES_OF_PARAMETER[search.scope] * study.n_parameters()
        for one in found(study, search):
            seconds, share = one["cpu_seconds"], one["evaluation_share"]
            rows.append(
                {
                    "budget": search.name,
                    "stored": search.scope,
                    "checkpoint": one["index"],
                    "step": one["step"],
                    "bits a parameter": f"{8 * one['n_bytes'] / study.n_parameters():.3f}",
                    "ratio": f"{raw / one['n_bytes']:.1f}",
                    "evaluations": one["n_evaluations"],
                    "kept": "yes" if one["is_met"] else "no",
                    "CPU seconds": f"{seconds:.1f}",
                    "of them evaluations": f"{seconds * share:.1f}",
                }
            )
    return rows


def seconds_rows(study: Study, measured: Sequence[Measured]) -> list[Row]:
    """CPU seconds of a delta, of its calibration, of one evaluation and of a restore."""
    training, calibration = study.training_seconds(), study.calibration_seconds()
    _, evaluation = cpu_seconds(lambda: study.logits(study.run.state(study.points[0])))
    return [
        {
            "method": one.way.name,
            "stored": one.way.scope,
            "encode": f"{one.seconds('encode_seconds'):.2f}",
            "of training, %": f"{100 * one.seconds('encode_seconds') / training:.1f}",
            "calibration": f"{calibration:.2f}" if one.way.name.startswith(GRID) else "",
            "one evaluation": f"{evaluation:.2f}",
            "restore": f"{one.seconds('restore_seconds'):.2f}" if one.seconds("restore_seconds") else "",
            "training between two": f"{training:.1f}",
        }
        for one in measured
    ]


def write_picture(results: Results) -> None:
    """results/training_state.png: ratio against the resumed gap, and against the divergence at once."""
    titles = {
        "snapshots": "one snapshot, weights",
        "chains": "the run, weights",
        "whole": "the run, whole states",
    }
    figure, axes = plt.subplots(2, 3, figsize=(16, 9), layout="constrained")
    for column, (name, title) in enumerate(titles.items()):
        for line, label in enumerate(("mean resumed gap, %", "mean divergence at once, nats")):
            axis = axes[line][column]
            for method, marker in zip((GRID, KMEANS, NNCODEC), "os^", strict=True):
                points = _points(results[name], method, by_divergence=bool(line))
                if points:
                    axis.plot(*zip(*points, strict=True), f"{marker}-", ms=5, lw=1, label=method)
            for one in _others(results[name]):
                x = one.kl if line else 100 * one.mean_gap
                axis.plot([x], [one.ratio], "x", label=one.way.name)
            axis.set(xlabel=label, ylabel="fp32 over stored bytes", yscale="log", title=title)
            axis.set_xscale("log" if line else "linear")
            axis.legend(fontsize=8)
    figure.savefig(RESULTS / "training_state.png", dpi=90)


def _points(measured: Sequence[Measured], method: str, *, by_divergence: bool) -> list[tuple[float, float]]:
    own = [one for one in measured if one.way.name.startswith(method)]
    found = [
        (one.kl if by_divergence else 100 * one.mean_gap, one.ratio)
        for one in own
        if by_divergence or one.gaps
    ]
    return sorted(found)


def _others(measured: Sequence[Measured]) -> list[Measured]:
    known = (GRID, KMEANS, NNCODEC)
    return [one for one in measured if one.gaps and not one.way.name.startswith(known)]
