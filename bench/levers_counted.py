"""Levers that change bits alone, for levers.py: contexts, predictions, low ranks, and the trellis apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import levers_bits as bits
import numpy as np
from levers_chain import Stored, Way, links
from levers_states import N_FILES, Checkpoint, measured, points
from levers_trellis import frontier
from paper_a_tasks import Task

FIRST_STEP: Final = 0.5  # of first moments, so that there is something to code
PRICES: Final = np.array([0.1, 0.2, 0.35])  # of the trellis: about 2 to 0.8 bits
N_SEQUENCES, LENGTH = 150, 128
DEFAULT: Final = Way(1.0, 1.0)


def counted(task: Task) -> dict[str, Any]:
    """Bits behind contexts, and what predictions and ranks explain, of the anchor and the third delta."""
    states = points(task)
    found = links(states, DEFAULT)
    contexts: dict[str, dict[str, float]] = {"anchor": {}, "third delta": {}, "first moment": {}}
    predictions: dict[str, list[tuple[float, int]]] = {}
    ranks: dict[str, list[float]] = {}
    for name in states[0].lossy:
        history = [link.tensors[name] for link in found]
        indices = (0, N_FILES - 2, N_FILES - 1)
        first, before, own = (bits.Moments(states[i], name, FIRST_STEP) for i in indices)
        now, base = history[-1], history[-2]
        _add(contexts["anchor"], history[0].own_codes, bits.weight_contexts(history[0], None, first, None))
        _add(contexts["third delta"], now.own_codes, bits.weight_contexts(now, base, own, before))
        _add(contexts["first moment"], own.codes, bits.moment_contexts(now, base, own, before))
        _predict(predictions, states, history[:-1], name, before)
        _rank(ranks, states[-1], history[-2].values, name)
    n = found[0].n_weights
    return {
        "contexts": {what: {k: v / n for k, v in rows.items()} for what, rows in contexts.items()},
        "predictions": bits.gained_bits(predictions),
        "ranks": {k: [share / n, saved / n] for k, (share, saved) in ranks.items()},
        "delta_bits": found[-1].bits,
    }


def _add(total: dict[str, float], codes: bits.Codes, contexts: Mapping[str, bits.Labels]) -> None:
    for name, labels in contexts.items():
        total[name] = total.get(name, 0.0) + bits.adaptive_bits(codes, labels)


def _predict(
    total: dict[str, list[tuple[float, int]]],
    states: Sequence[Checkpoint],
    history: Sequence[Stored],
    name: str,
    before: bits.Moments,
) -> None:
    point = states[-1]
    squares = point.moment(name, "exp_avg_sq").astype(np.float64)
    target = point.arrays[name].astype(np.float64) - history[-1].values
    metric = bits.metric_of(point, name)
    for what, features in bits.movement_features(history, states[-2], name, before).items():
        share = bits.fitted(target, features, squares, metric)[1]
        total.setdefault(what, []).append((share, target.size))


def _rank(total: dict[str, list[float]], point: Checkpoint, base: bits.Floats, name: str) -> None:
    roots = np.sqrt(point.moment(name, "exp_avg_sq").astype(np.float64) + 1e-30)
    movement = (point.arrays[name] - base) * np.sqrt(roots.mean(1, keepdims=True))
    for rank, (share, saved) in bits.low_rank_bits(movement.astype(np.float64)).items():
        row = total.setdefault(f"movement of weights, rank {rank}", [0.0, 0.0])
        row[0] += share * movement.size
        row[1] += saved


def trellis(task: Task) -> dict[str, Any]:
    """Bits of both quantizers at equal errors, on movements of the weights in units of each row's spread."""
    states = points(task)
    pieces = []
    for name in states[0].lossy:
        movement = (states[1].arrays[name] - states[0].arrays[name]).astype(np.float64)
        pieces.append((movement / movement.std(1, keepdims=True)).reshape(-1)[: 30 * LENGTH])
    values = np.concatenate(pieces)[: N_SEQUENCES * LENGTH].reshape(-1, LENGTH)
    return {"scalar": frontier(values, PRICES, False), "dependent": frontier(values, PRICES, True)}


def bit_rows(task: Task) -> list[dict[str, object]]:
    """Levers that change bits alone."""
    facts = measured("counted", lambda: counted(task))
    rows = []
    for what, found in facts["contexts"].items():
        today = bits.TODAY_FIRST if what == "first moment" else bits.TODAY
        rows += [_bit_row(f"contexts of {what}", k, found[today], v) for k, v in found.items() if k != today]
    size = facts["delta_bits"]
    for name, (share, saved) in facts["predictions"].items():
        what = f"{name}: {100 * share:.1f} % explained"
        rows.append(_bit_row("prediction of the third delta, bound", what, size, size - saved))
    for name, (share, saved) in facts["ranks"].items():
        what = f"{name}: {100 * share:.1f} % explained"
        rows.append(_bit_row("low rank, bound", what, size, size - saved))
    found = measured("trellis", lambda: trellis(task))
    errors, sizes = (np.array([row[i] for row in found["scalar"]]) for i in (1, 0))
    for b, error in found["dependent"]:
        before = float(np.polyval(np.polyfit(np.log(errors), sizes, 2), np.log(error)))
        what = f"at {before:.1f} bits, equal squared error"
        rows.append(_bit_row("trellis of four states", what, before, b))
    return rows


def _bit_row(lever: str, what: str, before: float, after: float) -> dict[str, object]:
    return {
        "lever": lever,
        "what": what,
        "bits before": f"{before:.3f}",
        "bits after": f"{after:.3f}",
        "of these bits, %": f"{100 * (after / before - 1):+.1f}",
    }
