"""What a save makes up for of the momentum that its files lose: weights are moved before they are coded.

First moments that come back poorer move weights less than they would have. How much less cannot be told from
them alone: gradients may undo a part of it. So the moves that lost momentum would still cause, P, are held
against those that training has made, D, since the last save or restore: a sample of the live weights there is
kept in memory for that. Weights are moved by <P, D> / <P, P> of P; see `ckptz.guidance.moves`. On three runs
(bench/studies/momentum.py) that ends nearer to the uninterrupted run than moves by all of P or by none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ckptz.codec.units import SourceOf, TensorSource
from ckptz.codec.values import KINDS
from ckptz.encoding.coded import CodedSource
from ckptz.encoding.companions import HeldChunks
from ckptz.encoding.moved import MovedSource
from ckptz.guidance.moves import Course, Products, course_of, shares_of
from ckptz.kernels import cpu
from ckptz.kernels.floats import Units
from ckptz.quant.sensitivity import floats_of

SAMPLED: Final = 1 << 16  # elements of a weight, at most
UNKNOWN_SHARE: Final = 2.0  # of the moves to come, that training is taken to have made where it is unknown
Sample = NDArray[np.float32]
UNKNOWN: Final = "not moved by the momentum that is lost: how much of it training follows is not known"


@dataclass(frozen=True, slots=True)
class _Mark:
    """A weight when it was saved or restored.

    Attributes:
        sample: of its values.
        updates: that it had had, or None where the optimizer does not count them.
        step: of the save.
        rate: of the next update.
        is_restored: whether it was restored.
    """

    sample: Sample
    updates: float | None
    step: int
    rate: float
    is_restored: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The momentum of one weight that a file loses.

    Attributes:
        course: of the first moment.
        moment: as it is.
        restored: as the file restores it; None where all of it is lost.
        second: the second moment, if moves depend on it.
    """

    course: Course
    moment: TensorSource
    restored: TensorSource | None
    second: TensorSource | None

    def moves(self, begin: int, end: int) -> Sample:
        """Compute the moves that it would still have caused, float32 [end - begin]."""
        lost = _values(self.moment, begin, end)
        if self.restored is not None:
            with np.errstate(all="ignore"):
                lost = lost - _values(self.restored, begin, end)
        squares = None if self.second is None else _values(self.second, begin, end)
        return self.course.moves(lost, squares)

    def sample(self) -> Sample:
        """Compute the moves at the elements that `Trail` samples, float32 [n]."""
        stride = _stride(self.moment.n_units)
        parts = [self.moves(b, e)[-b % stride :: stride] for b, e in self.moment.chunk_bounds()]
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class _Moved(SourceOf):
    """A weight after its moves; what would not be finite is left as it is."""

    lost: Lost
    share: float

    def units(self, begin: int, end: int) -> Units:
        kind, units = KINDS[self.dtype.name], self.source.units(begin, end)
        with np.errstate(all="ignore"):
            values = floats_of(units, kind) + np.float32(self.share) * self.lost.moves(begin, end)
        moved: Units = cpu().from_f32(values.view(np.uint32), kind)
        return np.where(np.isfinite(floats_of(moved, kind)), moved, units)


class Trail:
    """Samples of the weights of a run as its last save or restore has left them."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self.is_marked = False  # whether there has been a save, a restore or a first step
        self._shares: dict[str, float] = {}  # that were measured last

    def mark(self, state: Mapping[str, Any], step: int, *, is_restored: bool) -> None:
        """Sample the weights of a nested state that a save has taken, or that a restore has left."""
        weights, self._marks, self.is_marked = state["model"], {}, True
        for settings, names in _groups(state):
            rate = settings.get("lr")
            if not isinstance(rate, int | float):
                continue
            for name in names:
                if _has_values(weights.get(name)):
                    updates = _updates(state, name)
                    self._marks[name] = _Mark(_sampled(weights[name]), updates, step, rate, is_restored)

    def courses(self, state: Mapping[str, Any], step: int) -> Iterator[tuple[str, Course]]:
        """Give the courses of first moments, by parameter, with rates on their line since the mark."""
        marks = self._marks.items()
        before = {name: (mark.rate, self._n_updates(state, name, step)) for name, mark in marks}
        return courses_of(state, before)

    def _n_updates(self, state: Mapping[str, Any], name: str, step: int) -> float:
        """Count the updates of a parameter since its mark."""
        mark, now = self._marks[name], _updates(state, name)
        return step - mark.step if now is None else now - (mark.updates or 0.0)

    def reaches(self, state: Mapping[str, Any], step: int, whole: Mapping[str, Lost]) -> dict[str, float]:
        """Give `SideInformation.reach` of first moments, by parameter, from what all of each would move.

        Where training has moved less, as between frequent saves, they do not count for more than that.
        """
        found = {}
        for name, one in whole.items():
            moved, n_updates = self._moved(state, name, step, one.course)
            own = _rms(one.sample())
            size = UNKNOWN_SHARE * own if moved is None or not n_updates else max(_rms(moved), own)
            if size:
                found[name] = one.course.total / one.course.root / size
        return found

    def _moved(
        self, state: Mapping[str, Any], name: str, step: int, course: Course
    ) -> tuple[Sample | None, float]:
        """Measure what training has moved a weight's sample since the mark, and in how many updates.

        None where there is no mark; no updates where it has not moved.
        """
        mark = self._marks.get(name)
        now = _sampled(state["model"][name])
        if mark is None or now.shape != mark.sample.shape:
            return None, 0.0
        n_updates = max(self._n_updates(state, name, step), 0.0)
        kept = (1 - (mark.rate + course.rate) / 2 * course.weight_decay) ** n_updates
        is_moved = bool((now != mark.sample).any())
        return now - np.float32(kept) * mark.sample, n_updates if is_moved else 0.0

    def shares(self, state: Mapping[str, Any], step: int, lost: Mapping[str, Lost]) -> dict[str, float]:
        """Measure by which share of its moves each weight is to be moved, by parameter.

        A share that cannot be measured now is the one that was measured last; without one it is left out.
        """
        found, known = {}, dict[str, float]()
        for name, one in lost.items():
            moved, n_updates = self._moved(state, name, step, one.course)
            if moved is None:
                continue
            if n_updates:
                shape = one.moment.shape
                n_free = min(math.prod(shape[:1]) + math.prod(shape[1:]), len(moved))
                found[name] = Products.of(one.sample(), moved, one.course.in_noise(n_updates), n_free)
            elif self._marks[name].is_restored:  # what the file loses was lost before
                known[name] = 0.0
        self._shares |= shares_of(found)
        return {name: self._shares[name] for name in lost if name in self._shares} | known


def moved(
    weights: Mapping[str, TensorSource], lost: Mapping[str, Lost], shares: Mapping[str, float]
) -> dict[str, TensorSource]:
    """Move weights, by the names of parameters, by their shares; those that do not move are left out."""
    chunks = HeldChunks()
    return {
        name: MovedSource(weights[name], chunks.of(name, _Moved(weights[name], lost[name], share)), share)
        for name, share in shares.items()
        if share > 0
    }


def can_move(weight: TensorSource | None) -> bool:
    """Tell whether a weight has values here that can be moved."""
    if weight is None or isinstance(weight, CodedSource):
        return False
    return weight.dtype.name in KINDS and weight.n_units > 0


def courses_of(
    state: Mapping[str, Any], before: Mapping[str, tuple[float, float]] = {}
) -> Iterator[tuple[str, Course]]:
    """Read the courses of first moments, by parameter, from the nested state of a run.

    Args:
        state: with `optimizer`, `groups` and `classes`.
        before: of a parameter, its rate before and the updates since, where they are known.
    """
    is_adamw = set(state.get("classes", ())) == {"AdamW"}
    for settings, names in _groups(state):
        for name in names:
            own = {key: _plain(value) for key, value in state.get("optimizer", {}).get(name, {}).items()}
            course = course_of(settings, own, is_adamw=is_adamw, before=before.get(name))
            if course is not None:
                yield name, course


def _groups(state: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Give the settings of each group of parameters, and their names."""
    for group in state.get("groups", ()):
        settings = {key: _plain(value) for key, value in group.items() if key != "params"}
        yield settings, list(group.get("params", ()))


def _plain(value: Any) -> Any:
    """A tensor of one number as that number; everything else as it is."""
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type != "meta":
        return value.item()
    return value


def _updates(state: Mapping[str, Any], name: str) -> float | None:
    """Find how many updates a parameter has had; None where its optimizer does not say."""
    found = _plain(state.get("optimizer", {}).get(name, {}).get("step"))
    return float(found) if isinstance(found, int | float) else None


def _has_values(weight: Any) -> bool:
    is_tensor = isinstance(weight, torch.Tensor) and weight.layout == torch.strided
    is_own = not (hasattr(weight, "full_tensor") or hasattr(weight, "__tensor_flatten__"))
    return is_tensor and is_own and weight.is_floating_point() and weight.device.type != "meta"


def _stride(n: int) -> int:
    return max(-(-n // SAMPLED), 1)


def _sampled(weight: torch.Tensor) -> Sample:
    flat = weight.detach().reshape(-1)
    sample: Sample = flat[:: _stride(flat.numel())].to(torch.float32).cpu().numpy().copy()
    return sample


def _rms(sample: Sample) -> float:
    return float(np.sqrt(np.square(sample, dtype=np.float64).mean())) if len(sample) else 0.0


def _values(source: TensorSource, begin: int, end: int) -> Sample:
    return floats_of(source.units(begin, end), KINDS[source.dtype.name])
