"""What `--eval`, `--budget` and `--max-drop` mean together: the budgets of a search."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from ckptz.search.budget import Budget
    from ckptz.search_run.functions import NamedFunction

KINDS: Final = ("quality", "logits", "resume")
KIND_OF: Final[Mapping[str, str]] = {"kl": "logits", "top1": "logits", "resume": "resume"}  # of a metric
SIGNS: Final[Mapping[str, str]] = {
    **{"loss": "<=", "kl": "<=", "resume": "<="},
    **{"accuracy": ">=", "top1": ">="},
}
BUDGET: Final = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(<=|>=)\s*(\S+?)\s*(steps)?\s*")
EXAMPLES: Final = (
    "'loss<=1%', 'accuracy>=-0.01', 'kl<=5e-3', 'top1>=0.99', 'resume<=0.2%' or 'resume<=20 steps'"
)
FROM_LOGITS: Final = "--budget 'kl<=5e-3' or 'top1>=0.99'"


def amount_of(text: str) -> tuple[float, bool]:
    """Read `1%`, a share of the exact value, or `0.01`, a difference: the number, and whether it is relative.

    Raises:
        click.BadParameter: neither.
    """
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        what = f"{text!r} is neither a share such as 1% nor a difference such as 0.01"
        raise click.BadParameter(what) from None
    if not abs(number) < float("inf"):
        raise click.BadParameter(f"{text!r} is not a finite number")
    return (number / 100, True) if text.endswith("%") else (number, False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One `--budget` of the command line."""

    text: str  # as it was written
    metric: str  # what it is about
    max_drop: float  # how much worse it may be
    is_relative: bool  # whether that is a share of the exact value
    in_steps: bool = False  # whether it counts steps of training

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Read a budget from the command line.

        Raises:
            click.BadParameter: it says nothing that can be kept.
        """
        match = BUDGET.fullmatch(text)
        if match is None:
            raise click.BadParameter(f"{text!r} is no budget; write {EXAMPLES}")
        metric, sign, written, steps = match.groups()
        if SIGNS.get(metric, sign) != sign:
            better = "lower" if sign == ">=" else "higher"
            raise click.BadParameter(f"{text!r}: {metric} is better when {better}; write {EXAMPLES}")
        number, is_relative = amount_of(written)
        if steps and (metric != "resume" or is_relative):
            raise click.BadParameter(f"{text!r}: only resume is measured in steps, as in 'resume<=20 steps'")
        if metric == "top1":
            if not 0 <= number <= 1:
                raise click.BadParameter(f"{text!r} cannot be met or broken: top1 is a share from 0 to 1")
            return cls(text, metric, 1 - number, False)
        if metric == "kl" and is_relative:
            raise click.BadParameter(f"{text!r}: kl of the exact state is 0; give nats, as in 'kl<=5e-3'")
        drop = number if sign == "<=" else -number
        if drop < 0:
            what = "may rise by" if sign == "<=" else "may change by, at most 0"
            raise click.BadParameter(f"{text!r}: the number is what {metric} {what}; write {EXAMPLES}")
        return cls(text, metric, drop + 0.0, is_relative, bool(steps))

    @property
    def lower_is_better(self) -> bool:
        """The direction that the sign tells."""
        return "<=" in self.text


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One `--eval`: a function and what it returns."""

    kind: str
    function: NamedFunction

    @classmethod
    def parse(cls, text: str) -> Evaluation:
        """Read `WHERE`, whose name tells the kind, or `KIND=WHERE`; load it, to fail early."""
        from ckptz.search_run.functions import NamedFunction

        kind, equals, where = text.partition("=")
        if not equals or kind not in KINDS:
            kind, where = "", text
        function = NamedFunction(where)
        function.load()
        name = where.rpartition(":")[2]
        return cls(kind or (name if name in KINDS else "quality"), function)

    def quality(self, n_steps: int | None) -> Any:
        """Give the function or measure that a budget calls."""
        from ckptz.search.agreement import Agreement
        from ckptz.search.resumption import ResumeProbe

        if self.kind == "logits":
            return Agreement(self.function)
        if self.kind == "resume":
            return ResumeProbe(self.function, **({} if n_steps is None else {"n_steps": n_steps}))
        return self.function


def budgets_of(given: Mapping[str, Any]) -> tuple[Budget, ...]:
    """Make the budgets that the options ask for.

    Raises:
        click.UsageError: options that contradict each other.
        ConfigError: a function that is not found.
    """
    evaluations = [Evaluation.parse(text) for text in given["eval"]]
    if given["resume_steps"] is not None and all(one.kind != "resume" for one in evaluations):
        raise click.UsageError("--resume-steps belongs to an --eval of the kind resume")
    qualities = [one.quality(given["resume_steps"]) for one in evaluations]
    if not given["budget"]:
        return tuple(_single(given, evaluations, qualities))
    for name in ("max_drop", "lower_is_better"):
        if given[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} contradicts --budget; give one of them")
    return _several([Wanted.parse(text) for text in given["budget"]], evaluations, qualities)


def _single(
    given: Mapping[str, Any], evaluations: Sequence[Evaluation], qualities: Sequence[Any]
) -> list[Budget]:
    """The budget of the only evaluation, from `--max-drop`."""
    from ckptz.search.budget import Budget

    if len(evaluations) > 1:
        raise click.UsageError("--max-drop is the budget of one --eval; of several, each needs a --budget")
    drop, relative = given["max_drop"] or (None, None)
    options = {"max_drop": drop, "relative": relative, "lower_is_better": given["lower_is_better"]}
    used: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for one in evaluations:
        if one.kind == "logits":
            raise click.UsageError(f"--eval {one.function.text}: logits need {FROM_LOGITS}")
    return [Budget(quality, **used) for quality in qualities]


def _several(
    wanted: Sequence[Wanted], evaluations: Sequence[Evaluation], qualities: Sequence[Any]
) -> tuple[Budget, ...]:
    from ckptz.search.budget import Budget

    seen: dict[tuple[str, bool, bool], Wanted] = {}
    for one in wanted:
        other = seen.setdefault((one.metric, one.is_relative, one.in_steps), one)
        if other is not one:
            what = f"--budget {other.text!r} and {one.text!r} contradict each other"
            raise click.UsageError(f"{what}; keep one")
    places = [_place_of(one, evaluations) for one in wanted]
    for i, evaluation in enumerate(evaluations):
        if i not in places:
            raise click.UsageError(f"--eval {evaluation.function.text}: no --budget is about it")
    return tuple(
        Budget(
            qualities[place],
            one.max_drop,
            relative=one.is_relative,
            lower_is_better=one.lower_is_better,
            metric=one.metric,
            in_steps=one.in_steps,
        )
        for one, place in zip(wanted, places, strict=True)
    )


def _place_of(wanted: Wanted, evaluations: Sequence[Evaluation]) -> int:
    """Find the evaluation that a budget is about: by kind, and among several qualities by name."""
    kind = KIND_OF.get(wanted.metric, "quality")
    fits = [i for i, one in enumerate(evaluations) if one.kind == kind]
    if len(fits) > 1:
        fits = [i for i in fits if evaluations[i].function.metric == wanted.metric]
    if len(fits) != 1:
        how = "a quality" if kind == "quality" else f"{kind}, as in {kind}=file.py:function"
        raise click.UsageError(f"--budget {wanted.text!r} needs one --eval that returns {how}")
    return fits[0]
