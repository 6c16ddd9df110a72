"""Budgets: how much of a quality may be lost, and how much of it a measurement used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptz.errors import ConfigError, own_numbers
from ckptz.search.measures import Comparing, Quality, digest_of, name_of, number

SMALLEST_RELATIVE: Final = 1e-3  # a share of less than this says nothing
_IS_LOWER_BETTER: Final[Mapping[str, bool]] = {"loss": True, "accuracy": False, "kl": True, "top1": False}


@dataclass(frozen=True, slots=True)
class Reading:
    """One measured value of a metric."""

    metric: str
    value: float
    lower_is_better: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest loss of a value: a share of the exact one, or a difference."""

    max_drop: float
    is_relative: bool

    def drop(self, exact: Reading, measured: Reading) -> float:
        """Give how much worse `measured` is, in the unit of `max_drop`; infinite if it is not finite."""
        if not math.isfinite(measured.value):
            return math.inf
        worse = measured.value - exact.value if exact.lower_is_better else exact.value - measured.value
        return worse / abs(exact.value) if self.is_relative else worse

    def in_units(self, exact: Reading) -> float:
        """Give the limit in the unit of the value."""
        return self.max_drop * abs(exact.value) if self.is_relative else self.max_drop

    def used(self, exact: Reading, measured: Reading) -> float:
        """Give the share of the limit that is used: at most 1 keeps it, negative is an improvement."""
        drop = self.drop(exact, measured)
        if self.max_drop:
            return drop / self.max_drop
        return math.inf if drop > 0 else drop


@dataclass(frozen=True, slots=True)
class Budget:
    """The part of a quality that a lossy checkpoint may lose.

    Attributes:
        quality: called with a state (name -> CPU torch tensor, the caller's to change) and returns a number,
            or a dict with "loss" or "accuracy". It builds its own model. Attributes `metric` (what to call
            the number) and `data_digest` (a string, or a callable that returns one) go into the file. Or an
            `Agreement` or a `ResumeProbe`, which compare with the exact state.
        max_drop: how much worse the value may be: a share of the exact state's own if `relative`.
        relative: False for an absolute difference, which values near zero require.
        lower_is_better: of a number; "loss", "accuracy", "kl" and "top1" know it themselves.
        metric: which value of the dict counts, where the quality returns several; of a number, "loss",
            "accuracy" or the quality's own name.
        in_steps: `max_drop` counts steps of training instead, by which a restore may set the run back; of a
            `ResumeProbe` only.

    Example:
        >>> from ckptz import Budget
        >>> Budget(lambda state: float(state["weight"].std()), 0.01).max_drop
        0.01
    """

    quality: Quality | Comparing
    max_drop: float = 0.005
    relative: bool = True
    lower_is_better: bool = True
    metric: str | None = None
    in_steps: bool = False

    def __post_init__(self) -> None:
        if not (callable(self.quality) or hasattr(self.quality, "against")):
            raise ConfigError(f"a budget's quality must be callable, got {self.quality!r}")
        own_numbers(self)
        if not 0 <= self.max_drop < math.inf:
            raise ConfigError(f"max_drop must be a number from 0, got {self.max_drop!r}")
        if self.in_steps and not getattr(self.quality, "trains", False):
            raise ConfigError(f"only a ResumeProbe measures steps of training, got {self.quality!r}")

    def limit(self, per_step: float | None) -> Limit:
        """Give the largest loss allowed, in units of the value; NaN for steps that cannot be measured.

        Args:
            per_step: what a step of training lowers the value by, or None.
        """
        if self.in_steps:
            return Limit(self.max_drop * (math.nan if per_step is None else per_step), False)
        return Limit(float(self.max_drop), self.relative)

    @property
    def data_digest(self) -> str | None:
        """A digest of the data that the quality is measured on."""
        return digest_of(self.quality)

    @property
    def name(self) -> str:
        """The quality's name in messages."""
        return name_of(self.quality)

    def read(self, result: Any) -> Reading:
        """Read the value in what the quality returned.

        Raises:
            ConfigError: there is no number in it, or none of the budget's metric.
        """
        if not isinstance(result, Mapping):
            value = number(result, self.name)
            self._check_is_of_number()
            known = self.lower_is_better if self.metric is None else self._is_lower_better(self.metric)
            return Reading(self.metric or self.name, value, known)
        keys = ["loss", "accuracy"] if self.lower_is_better else ["accuracy", "loss"]
        if self.metric is not None:
            keys = [self.metric]
        for key in keys:
            if key in result:
                return Reading(key, number(result[key], self.name), self._is_lower_better(key))
        wanted = " or ".join(map(repr, sorted(keys, reverse=True)))
        found = ", ".join(sorted(map(repr, result))) or "nothing"
        raise ConfigError(f"{self.name} returned a dict without {wanted}; it has {found}: name one of these")

    def _check_is_of_number(self) -> None:
        """Refuse a metric that a plain number may not be, as one that is written wrong."""
        if self.metric is not None and self.metric not in (*_IS_LOWER_BETTER, self.name):
            raise ConfigError(
                f"{self.name} returned a plain number, and the budget is about {self.metric!r}; write "
                f"'loss' or 'accuracy' (as in --budget 'loss<=1%'), or return a dict with {self.metric!r}"
            )

    def _is_lower_better(self, metric: str) -> bool:
        return _IS_LOWER_BETTER.get(metric, self.lower_is_better)

    def check_exact(self, exact: Reading) -> None:
        """Refuse values of the exact state that no drop can be measured from.

        Raises:
            ConfigError: not finite, or too close to zero for a relative drop.
        """
        if not math.isfinite(exact.value):
            raise ConfigError(f"{self.name}: the {exact.metric} of the exact tensors is {exact.value}")
        if self.relative and not self.in_steps and abs(exact.value) < SMALLEST_RELATIVE:
            raise ConfigError(
                f"{self.name}: the {exact.metric} of the exact tensors is {exact.value:.3g}, too close to "
                "zero for a relative budget; give an absolute one (relative=False, --max-drop 0.01 without %)"
            )


def share_used(limits: Sequence[Limit], exact: Sequence[Reading], measured: Sequence[Reading]) -> float:
    """Give the share that is used of the tightest of several limits."""
    rows = zip(limits, exact, measured, strict=True)
    return max(limit.used(was, now) for limit, was, now in rows)


def check_consistent(budgets: Sequence[Budget], exact: Sequence[Reading]) -> None:
    """Refuse budgets that contradict one another, by name; `exact` is what each of them is about.

    Raises:
        ConfigError: one value is to be low and high, or has two limits of one kind.
    """
    for (one, value), (other, same) in itertools.combinations(zip(budgets, exact, strict=True), 2):
        if one.quality is not other.quality or value.metric != same.metric:
            continue
        what = f"{one.name}: two budgets of {value.metric} contradict each other"
        if value.lower_is_better != same.lower_is_better:
            raise ConfigError(f"{what}: lower is better for one, higher for the other")
        kind, of_other = (
            "in steps" if b.in_steps else "relative" if b.relative else "absolute" for b in (one, other)
        )
        if kind == of_other and one.max_drop != other.max_drop:
            low, high = sorted((one.max_drop, other.max_drop))
            raise ConfigError(f"{what}: {kind} limits of {low:g} and {high:g}; keep one of them")
