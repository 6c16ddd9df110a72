"""What training_state must show: each target with what was measured, and its verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from bench.core.measure import Row, verdict
from bench.studies.training_state.study import Measured, Study

GRID, KMEANS, NNCODEC = "grid", "kmeans", "NNCodec"
LARGEST_GAP: Final = 0.002  # of a run's weights
KLS: Final = (2.8e-3, 5.6e-3, 1.7e-2)
Value = Callable[[Measured], float]
Results = Mapping[str, Sequence[Measured]]


def target_rows(study: Study, results: Results) -> list[Row]:
    """All targets."""
    snapshots, chains, wholes = (results[name] for name in ("snapshots", "chains", "whole"))
    best = within(chains, LARGEST_GAP)
    point = [by_gap(best)] if best is not None else []
    return [
        against("one snapshot, weights, of kmeans at an equal gap", snapshots, KMEANS, by_gap, 1.5),
        smallest("weights of the run, each gap at most 0.2 %", chains, LARGEST_GAP, 25.0),
        against(
            "weights of the run, of kmeans at that setting's mean gap", chains, KMEANS, by_gap, 1.7, point
        ),
        against("weights of the run, of kmeans at other equal gaps", chains, KMEANS, by_gap, None),
        smallest("whole states of the run, each gap at most 0.15 %", wholes, 0.0015, 55.0),
        smallest("whole states of the run, each gap at most 0.3 %", wholes, 0.003, 75.0),
        against("one snapshot, weights, of NNCodec at an equal divergence", snapshots, NNCODEC, by_kl, 1.5),
        *(
            against(f"weights of the run, of NNCodec at KL {kl:g}", chains, NNCODEC, by_kl, 1.0, (kl,))
            for kl in KLS
        ),
        encode_row(study, wholes),
    ]


def row(what: str, setting: str, found: str, target: str, is_met: bool | None) -> Row:
    """One line; without a figure it says so."""
    missing = "" if found else "not measured"
    passed = missing if is_met is None else verdict(is_met)
    return {"target for": what, "setting": setting, "measured": found, "target": target, "verdict": passed}


# --- sizes at an equal quality ------------------------------------------------------------------


def by_gap(measured: Measured) -> float:
    """Mean resumed gap of the points, in per cent."""
    return 100 * measured.mean_gap if measured.gaps else float("nan")


def by_kl(measured: Measured) -> float:
    """Mean divergence at once."""
    return measured.kl


def curve(measured: Sequence[Measured], method: str, value: Value) -> list[tuple[float, float]]:
    """(quality lost, ratio) of a method's settings, ascending; only losses above zero have a logarithm."""
    found = [(value(one), one.ratio) for one in measured if one.way.name.startswith(method)]
    return sorted(pair for pair in found if pair[0] > 0)


def ratio_at(points: Sequence[tuple[float, float]], value: float) -> float | None:
    """Ratio between two settings, in logarithms; None beyond the first and the last."""
    if not points or not points[0][0] <= value <= points[-1][0]:
        return None
    xs, ys = zip(*points, strict=True)
    return float(np.exp(np.interp(np.log(value), np.log(xs), np.log(ys))))


def quotients(
    own: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], at: Sequence[float]
) -> list[tuple[float, float]]:
    """How many times smaller the first method is, where both have settings on either side."""
    pairs = [(value, ratio_at(own, value), ratio_at(other, value)) for value in at]
    return [(value, a / b) for value, a, b in pairs if a is not None and b is not None]


def against(
    what: str,
    measured: Sequence[Measured],
    rival: str,
    value: Value,
    least: float | None,
    at: Sequence[float] = (),
) -> Row:
    """The grid against a rival, `at` some losses or at every setting within the range of the other."""
    own, other = curve(measured, GRID, value), curve(measured, rival, value)
    found = quotients(own, other, at or sorted(x for x, _ in (*own, *other)))
    target = "" if least is None else f">= {least:g}x smaller"
    if not found:
        return row(what, "", "", target, None)
    unit = " %" if value is by_gap else ""
    setting = ", ".join(f"{x:.2g}{unit}" for x, _ in found)
    figures = ", ".join(f"{quotient:.2f}x" for _, quotient in found)
    is_met = None if least is None else min(quotient for _, quotient in found) >= least
    return row(what, f"at {setting}", figures, target, is_met)


# --- sizes within a gap -------------------------------------------------------------------------


def within(measured: Sequence[Measured], gap: float) -> Measured | None:
    """The smallest setting of the grid that keeps a gap at each point."""
    kept = [m for m in measured if m.way.name.startswith(GRID) and m.gaps and m.worst <= gap]
    return max(kept, key=lambda m: m.ratio, default=None)


def smallest(what: str, measured: Sequence[Measured], gap: float, least: float) -> Row:
    """The run average of that setting, anchors counted."""
    best = within(measured, gap)
    if best is None:
        return row(what, "", "", f">= {least:g}x", None if not measured else False)
    figure = f"{best.ratio:.1f}x, worst gap {100 * best.worst:+.3f} %"
    return row(what, best.way.name, figure, f">= {least:g}x", best.ratio >= least)


# --- seconds ------------------------------------------------------------------------------------


def encode_row(study: Study, wholes: Sequence[Measured]) -> Row:
    """CPU seconds of encoding a whole state, of those of training from one checkpoint to the next."""
    what, target = "encoding a whole state, of the training between two checkpoints", "<= 5 %"
    found = [m.seconds("encode_seconds") for m in wholes if m.way.name.startswith(GRID)]
    if not found:
        return row(what, "", "", target, None)
    share = statistics.median(found) / study.training_seconds()
    return row(what, "median of all settings", f"{100 * share:.1f} %", target, share <= 0.05)
