"""Retention of the steps of a run: the only rule by which ckptz deletes files of users.

A step is kept as long as one of the keep rules selects it. Other files are deleted once no kept file needs
them. A file that is unreadable now may become readable later (a slow network mount), so no file that it might
need is deleted, and a note names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from ckptz.errors import ConfigError, check_int, coerce_numeric_fields
from ckptz.run.step_files import FileKind, Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """Rules for the steps to keep; a step is kept if any rule selects it.

    Attributes:
        last: number of newest steps, at least 1; None keeps all.
        every: steps that are multiples of this are kept for ever.
        best: number of steps with the best metric, among steps saved with one.
        lower_is_better: direction of the metric.
    """

    last: int | None = 5
    every: int | None = None
    best: int = 0
    lower_is_better: bool = True

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)
        if self.last is not None and self.last < 1:
            raise ConfigError(f"last must be at least 1, or None to keep all, got {self.last}")
        check_int("every", 1 if self.every is None else self.every, 1)
        check_int("best", self.best, 0)

    def kept(self, steps: Iterable[int], metrics: Mapping[int, float]) -> set[int]:
        """Return those of `steps` that are kept.

        Args:
            steps: all existing steps.
            metrics: the metric of each step that has one.
        """
        ascending = sorted(steps)
        if self.last is None:
            return set(ascending)
        kept = set(ascending[-self.last :])
        if self.every is not None:
            kept.update(step for step in ascending if step % self.every == 0)
        sign = 1 if self.lower_is_better else -1
        rated = [step for step in ascending if not math.isnan(metrics.get(step, math.nan))]
        kept.update(sorted(rated, key=lambda step: (sign * metrics[step], -step))[: self.best])
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPolicy(KeepRules):
    """Rules for whole steps, which training can resume from, and for weights without their state.

    Attributes:
        weights: rules for weights that are kept without their state; by default none are.
        exact: number of newest whole steps that stay exact if files are lossy; 0 writes no residual files,
            None keeps all of them.

    Example:
        >>> from ckptz import KeepPolicy
        >>> KeepPolicy(last=2, every=1000).last
        2
    """

    weights: KeepRules | None = None
    exact: int | None = 1

    def __post_init__(self) -> None:
        KeepRules.__post_init__(self)
        if not isinstance(self.weights, KeepRules | None):
            raise ConfigError(f"weights must be KeepRules or None, got {self.weights!r}")
        if self.exact is not None and self.exact < 0:
            raise ConfigError(f"exact must be 0 or more, or None to keep all, got {self.exact}")

    @property
    def by_kind(self) -> dict[FileKind, Kept]:
        """Retention of the files of each kind, for the choice of a base."""
        both = (self,) if self.weights is None else (self, self.weights)
        return {"weights": _kept(*both), "state": _kept(self)}

    @property
    def keeps_all(self) -> bool:
        """True if no step is ever deleted."""
        return self.last is None and self.weights is None

    def heads(self, steps: Iterable[int]) -> set[int]:
        """Return those of the kept steps that stay exact."""
        ascending = sorted(steps)
        return set(ascending if self.exact is None else ascending[max(0, len(ascending) - self.exact) :])


def _kept(*rules: KeepRules) -> Kept:
    """Merge rules: a file is kept as long as any of them keeps it."""
    lasts = [rule.last for rule in rules]
    return Kept(
        last=None if None in lasts else max(last for last in lasts if last is not None),
        every=tuple(rule.every for rule in rules if rule.every is not None),
        best=sum(rule.best for rule in rules),
    )


KEEP_ALL: Final = KeepPolicy(last=None, exact=None)
KEEP_LAST: Final = KeepPolicy()


Rules = tuple[int | None, int | None, int | None]  # last, every, best


def keep_policy(
    *, steps: Rules, weights: Rules, lower_is_better: bool, exact: int | None = None
) -> KeepPolicy:
    """Build a policy from rules for whole steps and for weights without their state.

    Each rule may be None; if all rules for steps are None, all steps are kept. See `KeepPolicy`.
    """
    is_any = weights != (None, None, None)
    of_weights = KeepRules(**_fields(weights), lower_is_better=lower_is_better) if is_any else None
    return KeepPolicy(**_fields(steps), lower_is_better=lower_is_better, weights=of_weights, exact=exact)


def _fields(rules: Rules) -> dict[str, Any]:
    last, every, best = rules
    # The newest step is always kept.
    last = 1 if last is None and rules != (None, None, None) else last
    return {"last": last, "every": every, "best": best or 0}


class Named(Protocol):
    """A file, a folder or a step with a name."""

    @property
    def name(self) -> str:
        """The name in messages."""

    def __hash__(self) -> int: ...


T = TypeVar("T", bound=Named)


def retention_of(
    units: Iterable[T],
    kept: Iterable[T],
    bases_of: Callable[[T], Iterable[T]],
    may_need: Callable[[T], Collection[T]],
) -> tuple[set[T], set[T], tuple[str, ...]]:
    """Decide which files, folders or steps may be deleted.

    Args:
        units: all existing ones.
        kept: those that are kept.
        bases_of: returns the bases of one; raises any exception if it is unreadable.
        may_need: returns all possible bases of an unreadable one.

    Returns:
        Those that may be deleted; possible bases of unreadable kept ones, which may not; and a note on each
        unreadable one.
    """
    roots = dict.fromkeys(kept)
    needed: set[T] = set()
    doubtful: set[T] = set()
    notes = []
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        try:
            new = [base for base in bases_of(one) if base not in needed]
        except Exception as error:  # stores behind URLs have errors of their own
            doubtful.update(may_need(one))
            notes.append(f"{one.name} cannot be read, so all that is older stays until it can: {error}")
            continue
        needed.update(new)
        waiting.extend(new)
    may_go = set(units) - roots.keys() - needed - doubtful
    return may_go, doubtful, tuple(sorted(notes))
