"""Budgets: how much of a quality may be lost, and what is read of what an evaluation returns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptz.errors import ConfigError, own_numbers
from ckptz.search.judgement import Limit, Reading
from ckptz.search.measures import Comparing, Quality, digest_of, name_of, unit_of, values_of

SMALLEST_RELATIVE: Final = 1e-3  # a share of less than this says nothing
_IS_LOWER_BETTER: Final[Mapping[str, bool]] = {"loss": True, "accuracy": False, "kl": True, "top1": False}


@dataclass(frozen=True, slots=True)
class Budget:
    """The part of a quality that a lossy checkpoint may lose.

    Attributes:
        quality: called with a state (name -> CPU torch tensor, the caller's to change) and returns the loss
            of each answer [n_answers] (a torch tensor or an array), always of the same answers in the same
            order, or 1 and 0 for right and wrong ones. Or their mean, a number, of which less can be told.
            Or a dict with one of these as "loss" or "accuracy"; with "counts" [n_sums] beside them they are
            sums over so many answers each. It builds its own model. Attributes `metric` (what to call the
            value), `unit` (what an answer is, such as "token") and `data_digest` (a string, or a callable
            that returns one) go into the file. Or an `Agreement` or a `ResumeProbe`, which compare with the
            exact state.
        max_drop: how far the mean may move, for better or worse: a share of the exact state's own if
            `relative`, which must be above 0. Half the mean square of the changes of single answers may be
            twice that; see `ckptz.search.judgement`.
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

    def limit(self, per_step: float | None, restores: int = 0) -> Limit:
        """Give what one restore may use, in units of the value; NaN for steps that cannot be measured.

        Args:
            per_step: what a step of training lowers the value by, or None.
            restores: how many share the budget, as what they lose adds up; 0 for one.
        """
        most = self.max_drop / max(restores, 1)
        if self.in_steps:
            return Limit(most * (math.nan if per_step is None else per_step), False)
        return Limit(most, self.relative)

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
            self._check_is_of_number()
            known = self.lower_is_better if self.metric is None else self._is_lower_better(self.metric)
            return self._reading(self.metric or self.name, result, None, known)
        keys = ["loss", "accuracy"] if self.lower_is_better else ["accuracy", "loss"]
        if self.metric is not None:
            keys = [self.metric]
        for key in keys:
            if key in result:
                return self._reading(key, result[key], result.get("counts"), self._is_lower_better(key))
        wanted = " or ".join(map(repr, sorted(keys, reverse=True)))
        found = ", ".join(sorted(map(repr, result))) or "nothing"
        raise ConfigError(f"{self.name} returned a dict without {wanted}; it has {found}: name one of these")

    def _reading(self, metric: str, given: Any, counts: Any, lower_is_better: bool) -> Reading:
        values = values_of(given, self.name)
        if len(values) == 1 or counts is None:  # of a number, "counts" is an entry like any other
            return Reading(metric, values, lower_is_better, None, unit_of(self.quality))
        found = values_of(counts, f"{self.name}, counts:")
        if len(found) != len(values) or not (np.isfinite(found) & (found > 0)).all():
            raise ConfigError(
                f"{self.name} returned {len(values)} sums and {len(found)} counts, of which "
                f"{int((found > 0).sum())} are above 0; give one above 0 for each sum"
            )
        return Reading(metric, values, lower_is_better, found, unit_of(self.quality))

    def _check_is_of_number(self) -> None:
        """Refuse a metric that what has no name of its own may not be, as one that is written wrong."""
        if self.metric is not None and self.metric not in (*_IS_LOWER_BETTER, self.name):
            raise ConfigError(
                f"{self.name} returned values without a name, and the budget is about {self.metric!r}; write "
                f"'loss' or 'accuracy' (as in --budget 'loss<=1%'), or return a dict with {self.metric!r}"
            )

    def _is_lower_better(self, metric: str) -> bool:
        return _IS_LOWER_BETTER.get(metric, self.lower_is_better)

    def check_exact(self, exact: Reading) -> None:
        """Refuse values of the exact state that no drop can be measured from.

        Raises:
            ConfigError: not finite, or not above zero for a relative drop.
        """
        n_bad = int((~np.isfinite(exact.values)).sum())
        if n_bad:
            where = "" if len(exact.values) == 1 else f" in {n_bad} of {len(exact.values)} values"
            bad = exact.values[~np.isfinite(exact.values)][0]
            raise ConfigError(f"{self.name}: the {exact.metric} of the exact tensors is {bad}{where}")
        if self.relative and not self.in_steps and exact.value < SMALLEST_RELATIVE:
            raise ConfigError(
                f"{self.name}: the {exact.metric} of the exact tensors is {exact.value:.3g}, and a relative "
                f"budget needs {SMALLEST_RELATIVE:g} or more; give an absolute one (relative=False, "
                "--max-drop 0.01 without %)"
            )


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
