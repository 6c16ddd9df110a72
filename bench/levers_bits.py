"""Bits that contexts, predictions and low ranks would save, for levers.py, without changing what is restored.

Contexts are counted with an ideal adaptive coder (Krichevsky and Trofimov) in each context: what it has to
learn costs bits, as tables would. Predictions are fitted by least squares, tensor by tensor, in the metric of
the weighted error; the bits that they promise are half the logarithm of the variance that is left, an upper
bound at less than two bits a weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from levers_chain import History, Stored
from levers_states import Checkpoint, Codes, Floats, source_of
from numpy.typing import NDArray

from ckptz.codec.sources import ChunkSources, companions_of
from ckptz.encoding.chunk import restored_units
from ckptz.methods.first_moment import plan_first
from ckptz.methods.second_moment import plan_second
from ckptz.quant.moments import FirstMoment, SecondMoment

Reals = NDArray[np.float64]
Labels = NDArray[np.int64]

SECOND: Final = SecondMoment(4.0)
N_PARTS: Final = 8  # that a real number is cut into to make a context of it
RANKS: Final = (1, 4, 16)
FACTOR_BITS: Final = 8  # of a number in a low-rank factor
_LOG_GAMMA: Final = np.vectorize(math.lgamma)


def adaptive_bits(codes: Codes, contexts: Labels) -> float:
    """Bits of codes by an ideal adaptive coder for each context."""
    used, index = np.unique(contexts, return_inverse=True)
    n_codes = int(codes.max()) + 1
    counts = np.bincount(index * n_codes + codes, minlength=len(used) * n_codes).reshape(-1, n_codes)
    total = counts.sum(1)
    own = (_LOG_GAMMA(counts + 0.5) - math.lgamma(0.5)).sum()
    return float((_LOG_GAMMA(total + n_codes / 2) - math.lgamma(n_codes / 2)).sum() - own) / math.log(2)


def parts(values: NDArray[Any], n: int = N_PARTS) -> Labels:
    """Values sorted into n parts of about equal size."""
    bounds = np.quantile(values, np.linspace(0, 1, n + 1)[1:-1])
    return np.searchsorted(bounds, values).astype(np.int64)


def exponents(values: Floats) -> Labels:
    """The label of the class rule `magnitude`."""
    return ((values.reshape(-1).view(np.uint32) >> 23) & 255).astype(np.int64)


# --- restored moments ---------------------------------------------------------------------------


class Moments:
    """Both moments of a weight as a file restores them, and the first one's codes."""

    def __init__(self, point: Checkpoint, name: str, first_step: float) -> None:
        second, first = (source_of(point.moment(name, m)) for m in ("exp_avg_sq", "exp_avg"))
        everything = ChunkSources(0, len(second.flat))
        self.second: Floats = restored_units(second, plan_second(second, None, SECOND), everything).view(
            np.float32
        )
        companion = source_of(self.second.reshape(second.shape))
        plan = plan_first(first, None, FirstMoment(first_step, 0.35, "second"), companion)
        assert plan.quantizer is not None
        sources = ChunkSources(0, len(first.flat), companions=companions_of({"second": companion}))
        self.first: Floats = restored_units(first, plan, sources).view(np.float32)
        self.codes: Codes = plan.quantizer.codes(0, len(first.flat), first.flat)

    @property
    def direction(self) -> Reals:
        """Where Adam goes: first moments over roots of second ones."""
        with np.errstate(all="ignore"):
            found = self.first.astype(np.float64) / np.sqrt(self.second.astype(np.float64))
        return np.where(np.isfinite(found), found, 0.0)


# --- contexts -----------------------------------------------------------------------------------

TODAY: Final = "step class, code of the base"
TODAY_FIRST: Final = "magnitude of the second moment"


def weight_contexts(
    now: Stored, base: Stored | None, own: Moments, before: Moments | None
) -> dict[str, Labels]:
    """Contexts of a weight's codes by name; without a base, of an anchor's."""
    rows = now.row_classes * 256
    if base is None or before is None:
        return {
            TODAY: rows,
            "+ magnitude of the second moment": rows + exponents(own.second),
            "+ magnitude of the first moment": rows + exponents(own.first),
        }
    both = rows + base.own_codes
    moved = np.abs(now.values - base.values)
    columns = np.tile(parts(moved.mean(0), 4), len(moved))
    found = {
        "step class alone": rows,
        TODAY: both,
        "step class, magnitude of the second moment": rows + exponents(own.second),
        "step class, magnitude of the first moment": rows + exponents(own.first),
        "step class, magnitude of the base": rows + exponents(base.values),
        "+ second moment, in quarters": both * 4 + parts(own.second, 4),
        "+ sign of the base's first moment": both * 3 + np.sign(before.first).astype(np.int64) + 1,
        "+ Adam's direction at the base, in eighths": both * 8 + parts(before.direction),
        "+ Adam's direction now, in eighths": both * 8 + parts(own.direction),
        "+ sign of the base": both * 2 + (base.values.reshape(-1) > 0),
        "+ activity of the column, side information": both * 4 + columns,
    }
    return {name: labels.astype(np.int64) for name, labels in found.items()}


def moment_contexts(now: Stored, base: Stored, own: Moments, before: Moments) -> dict[str, Labels]:
    """Contexts of a first moment's codes by name."""
    today = exponents(own.second)
    moved = np.sign(now.values - base.values).reshape(-1).astype(np.int64) + 1
    return {
        TODAY_FIRST: today,
        "+ code of the base's first moment": today * 256 + before.codes,
        "+ sign of the weight's movement": today * 3 + moved,
        "+ magnitude of the weight": today * 256 + exponents(now.values),
    }


# --- predictions --------------------------------------------------------------------------------


def metric_of(point: Checkpoint, name: str) -> NDArray[Any] | None:
    """Second moments of a linear layer's inputs, or None."""
    inputs = point.guides[name].inputs
    moments = None if inputs is None or inputs.axis != 1 else inputs.read()
    return moments if moments is not None and moments.ndim == 2 else None


def fitted(
    target: Reals, features: Sequence[Reals], squares: Reals, metric: NDArray[Any] | None
) -> tuple[Reals, float]:
    """Least squares in the weighted error's metric: the prediction, and the share of variance explained."""

    def through(values: Reals) -> Reals:
        if metric is None:
            return squares * values
        return squares.mean(1)[:, None] * (values @ metric)

    weighted = [through(feature) for feature in features]
    gram = np.array([[float((w * f).sum()) for f in features] for w in weighted])
    right = np.array([float((w * target).sum()) for w in weighted])
    found = np.linalg.lstsq(gram, right, rcond=1e-12)[0]
    return sum(c * f for c, f in zip(found, features, strict=True)), float(
        right @ found / (through(target) * target).sum()
    )


def movement_features(
    history: History, before: Checkpoint, name: str, own: Moments
) -> dict[str, list[Reals]]:
    """What a delta's movement may be predicted from, by name."""
    base = history[-1].values.astype(np.float64)
    exact = before.moment(name, "exp_avg") / np.sqrt(before.moment(name, "exp_avg_sq") + 1e-30)
    found = {
        "Adam's direction at the base, restored": [own.direction.reshape(base.shape)],
        "Adam's direction at the base, exact": [exact.astype(np.float64)],
        "the base (decay)": [base],
    }
    if len(history) > 1:
        last = base - history[-2].values
        found["the last movement"] = [last]
        found["all of these"] = [exact.astype(np.float64), base, last]
    return found


def scaled_base(history: History, point: Checkpoint, name: str) -> Floats:
    """The base and the last movement times what fits best: what a delta could be made from."""
    base = history[-1].values.astype(np.float64)
    features = [base] if len(history) < 2 else [base, base - history[-2].values]
    squares = point.moment(name, "exp_avg_sq").astype(np.float64)
    target = point.arrays[name].astype(np.float64)
    return fitted(target, features, squares, metric_of(point, name))[0].astype(np.float32)


def gained_bits(shares: Mapping[str, Sequence[tuple[float, int]]]) -> dict[str, tuple[float, float]]:
    """Mean share of variance explained and bits promised, weights of tensors as their sizes."""
    found = {}
    for name, rows in shares.items():
        n = sum(size for _, size in rows)
        share = sum(s * size for s, size in rows) / n
        bits = sum(size * -0.5 * math.log2(max(1 - s, 1e-9)) for s, size in rows) / n
        found[name] = (share, bits)
    return found


# --- low ranks ----------------------------------------------------------------------------------


def low_rank_bits(matrix: Reals) -> dict[int, tuple[float, float]]:
    """By rank: the share of energy, and the net bits that a factored prediction promises for the matrix."""
    energies = np.linalg.svd(matrix, compute_uv=False) ** 2
    found = {}
    for rank in RANKS:
        share = float(energies[:rank].sum() / energies.sum())
        saved = -0.5 * math.log2(max(1 - share, 1e-9)) * matrix.size
        found[rank] = (share, saved - rank * sum(matrix.shape) * FACTOR_BITS)
    return found
