"""Options that ask for a quality instead of settings, and what they mean together with a method's own.

`--eval`, `--budget` and `--max-drop` together are the budgets of a search.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.options import COUNT, PATH, config_of, fields_of, is_given, options_of_methods, together
from ckptz_cli.session import is_quiet, is_terminal

if TYPE_CHECKING:
    from ckptz.codec.method import Method
    from ckptz.search.budget import Budget
    from ckptz.search.measures import NamedFunction
    from ckptz.search.run import SearchOptions, TrialReport
    from ckptz.verbs.compress import CompressReport
    from ckptz_cli.session import Session


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
SEARCH_ONLY: Final = ("max_evaluations", "dry_run", "budget", "lower_is_better", "resume_steps", "restores")
NAMES: Final = ("eval", "max_drop", *SEARCH_ONLY, "plan", "save_plan", "verbose")


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


def parse_budget(text: str) -> dict[str, Any]:
    """Read a `--budget`: the arguments of `ckptz.Budget` but for the quality.

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
    drop = number if sign == "<=" else -number
    if metric == "top1":
        if not 0 <= number <= 1:
            raise click.BadParameter(f"{text!r} cannot be met or broken: top1 is a share from 0 to 1")
        drop, is_relative = 1 - number, False
    if metric == "kl" and is_relative:
        raise click.BadParameter(f"{text!r}: kl of the exact state is 0; give nats, as in 'kl<=5e-3'")
    if drop < 0:
        what = "may rise by" if sign == "<=" else "may change by, at most 0"
        raise click.BadParameter(f"{text!r}: the number is what {metric} {what}; write {EXAMPLES}")
    return {
        "metric": metric,
        "max_drop": drop + 0.0,
        "relative": is_relative,
        "lower_is_better": sign == "<=",
        "in_steps": bool(steps),
    }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One `--eval`: a function and what it returns."""

    kind: str
    function: NamedFunction

    @classmethod
    def parse(cls, text: str) -> Evaluation:
        """Read `WHERE`, whose name tells the kind, or `KIND=WHERE`; load it, to fail early."""
        from ckptz.search.measures import NamedFunction

        kind, equals, where = text.partition("=")
        if not equals or kind not in KINDS:
            kind, where = "", text
        function = NamedFunction(where)
        function.load()
        name = where.rpartition(":")[2]
        return cls(kind or (name if name in KINDS else "quality"), function)

    def quality(self, n_steps: int | None) -> Any:
        """Give the function or measure that a budget calls."""
        from ckptz.search.measures import Agreement, ResumeProbe

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
            raise click.UsageError(f"{_flag(name)} contradicts --budget; give one of them")
    return _several(given["budget"], evaluations, qualities)


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
    texts: Sequence[str], evaluations: Sequence[Evaluation], qualities: Sequence[Any]
) -> tuple[Budget, ...]:
    """Make a budget of each `--budget`; every evaluation must have one."""
    from ckptz.search.budget import Budget

    wanted = [parse_budget(text) for text in texts]
    for i, one in enumerate(wanted):
        for text, other in zip(texts[:i], wanted, strict=False):
            if all(one[name] == other[name] for name in ("metric", "relative", "in_steps")):
                what = f"--budget {text!r} and {texts[i]!r} contradict each other"
                raise click.UsageError(f"{what}; keep one")
    places = [_place_of(text, one["metric"], evaluations) for text, one in zip(texts, wanted, strict=True)]
    for i, evaluation in enumerate(evaluations):
        if i not in places:
            raise click.UsageError(f"--eval {evaluation.function.text}: no --budget is about it")
    return tuple(Budget(qualities[place], **one) for one, place in zip(wanted, places, strict=True))


def _place_of(text: str, metric: str, evaluations: Sequence[Evaluation]) -> int:
    """Find the evaluation that a budget is about: by kind, and among several qualities by name."""
    kind = KIND_OF.get(metric, "quality")
    fits = [i for i, one in enumerate(evaluations) if one.kind == kind]
    if len(fits) > 1:
        fits = [i for i in fits if evaluations[i].function.metric == metric]
    if len(fits) != 1:
        how = "a quality" if kind == "quality" else f"{kind}, as in {kind}=file.py:function"
        raise click.UsageError(f"--budget {text!r} needs one --eval that returns {how}")
    return fits[0]


def _drop(context: click.Context, option: click.Parameter, value: str | None) -> tuple[float, bool] | None:
    if value is None:
        return None
    number, is_relative = amount_of(value.strip())
    if number < 0:
        raise click.BadParameter(f"{value!r} is not a number from 0", context, option)
    return number, is_relative


# The options of searches; they arrive as one keyword each, named in `NAMES`.
search_options = together(
    click.option(
        "--eval",
        multiple=True,
        metavar="WHAT",
        help="Search for the smallest file that keeps a budget. WHAT is package.module:function or "
        "file.py:function. The function gets the tensors by name and returns the loss of each answer, or "
        "1 and 0 for right and wrong ones, or their mean. A function called logits returns logits; one "
        "called resume trains on and returns a loss. Or write logits=WHAT, resume=WHAT. Repeatable, with "
        "--budget.",
    ),
    click.option(
        "--budget",
        multiple=True,
        metavar="B",
        help="How much may be lost: 'loss<=1%', 'accuracy>=-0.01', 'kl<=5e-3', 'top1>=0.99', "
        "'resume<=0.2%', 'resume<=20 steps'. Repeatable; all are kept.",
    ),
    click.option(
        "--resume-steps",
        type=COUNT,
        metavar="N",
        help="Training steps of an --eval called resume (default 20).",
    ),
    click.option(
        "--max-drop",
        callback=_drop,
        metavar="D",
        help="How far the value of --eval may move: 1% of it, or a difference such as 0.01 (default 0.5%).",
    ),
    click.option(
        "--restores",
        type=COUNT,
        metavar="N",
        help="How often the run will restart from such files: three of them share the single changes that a "
        "budget allows, all share one of resumed training.",
    ),
    click.option(
        "--lower-is-better/--higher-is-better",
        default=None,
        help="Which values of --eval are better (default lower, but of accuracy higher).",
    ),
    click.option(
        "--max-evaluations",
        type=click.IntRange(min=0),
        metavar="N",
        help="Stop after N evaluations; with 0 the base's settings are used and nothing is measured.",
    ),
    click.option("--dry-run", is_flag=True, default=None, help="Search and report, but write nothing."),
    click.option(
        "--plan",
        type=PATH,
        metavar="FILE",
        help="Use the settings that --save-plan wrote; with --eval, begin the search there.",
    ),
    click.option("--save-plan", type=PATH, metavar="FILE", help="Write the settings that were used."),
    click.option("-v", "--verbose", is_flag=True, help="Print a line on stderr for each evaluation."),
)


@contextlib.contextmanager
def search_view(*, is_verbose: bool) -> Iterator[Callable[[TrialReport], None]]:
    """Give what is told of each trial of a search: a table on a terminal, a line each with --verbose."""

    def tell_line(trial: TrialReport) -> None:
        if is_verbose:
            from ckptz_cli.tables import trial_line

            click.echo(f"ckptz: {trial_line(trial)}", err=True)

    if is_quiet() or not is_terminal(sys.stderr):
        yield tell_line
        return
    from rich.console import Console
    from rich.live import Live

    from ckptz_cli.tables import trials_table

    trials: list[TrialReport] = []
    console, is_shown = Console(stderr=True), is_terminal(sys.stdout)
    display = Live(console=console, transient=not is_verbose, redirect_stdout=is_shown, refresh_per_second=4)

    def tell(trial: TrialReport) -> None:
        trials.append(trial)
        display.update(trials_table(trials))

    with display:
        yield tell


def choose(given: Mapping[str, Any]) -> tuple[Method, SearchOptions | None]:
    """Give the configuration that all options mean together, or lossless and what to search for.

    Raises:
        click.UsageError: they contradict each other.
        ConfigError: values out of range, or a plan that cannot be used.
    """
    method = {name: value for name, value in given.items() if name not in NAMES}
    if given["eval"]:
        return config_of(None), _search(given, method)
    if given["max_drop"] is not None:
        raise click.UsageError("--max-drop needs --eval to measure it")
    for name in SEARCH_ONLY:
        if is_given(given[name]):
            raise click.UsageError(f"{_flag(name)} belongs to a search: --eval with --max-drop or --budget")
    for name, value in method.items():
        if given["plan"] is not None and is_given(value):
            raise click.UsageError(f"{_flag(name)} contradicts --plan, which has all settings")
    return _planned(given["plan"]) or config_of(**method), None


def _planned(path: Path | None) -> Method | None:
    from ckptz.search.budget import load_plan

    return None if path is None else load_plan(path)


def _search(given: Mapping[str, Any], method: dict[str, Any]) -> SearchOptions:
    from ckptz.errors import ConfigError
    from ckptz.search.run import SearchOptions

    parent = _planned(given["plan"])
    if parent is not None and not parent.is_lossy:
        what = "a search begins at settings of a lossy method, and this plan is lossless"
        raise ConfigError(f"{given['plan']}: {what}")
    searched = _searched_method(method["method"], parent)
    _refuse_in_search(method, searched)
    known = options_of_methods().items()
    cubes = tuple(cube for name, (_, option) in known if option.is_cube and (cube := method.pop(name)))
    options: dict[str, Any] = {
        "max_evaluations": given["max_evaluations"],
        "restores": given["restores"],
        "cubes": cubes,
        "parent": parent,
    }
    return SearchOptions(
        budgets=budgets_of(given),
        template=dataclasses.replace(searched.reference(), **fields_of(method)),
        is_dry_run=bool(given["dry_run"]),
        **{name: value for name, value in options.items() if value is not None},
    )


def _searched_method(name: str | None, parent: Method | None) -> type[Method]:
    """Find the method that the search is for: as asked, or else that of the plan that it begins at."""
    from ckptz.codec.registry import AUTO, method_named

    if name is None and parent is not None:
        return type(parent)
    method = method_named(AUTO if name in (None, "auto") else name)
    if not method.is_lossy:
        raise click.UsageError(f"--method {method.name} has no search")
    return method


def _refuse_in_search(method: dict[str, Any], searched: type[Method]) -> None:
    del method["method"]
    for name in (name for name, value in method.items() if is_given(value)):
        owner, option = options_of_methods()[name]
        if option.is_searched:
            raise click.UsageError(f"{option.flag} is what a search looks for; leave it out")
        if owner != searched.name:
            raise click.UsageError(f"{option.flag} belongs to --method {owner}")


def save_plan(session: Session, path: Path | None, config: Method, reports: Sequence[CompressReport]) -> None:
    """Write the settings of the last file to `path`: `config`, or what its search found."""
    if path is None or not reports:
        return
    from ckptz.search import budget as plans

    search = reports[-1].search
    if search is not None and search.config is None:
        session.note(f"{path}: not written, as no settings were found")
        return
    plans.save_plan(path, config if search is None else plans.config_of(search.method, search.config))


def require_budgets(reports: Sequence[CompressReport]) -> None:
    """End with the exit code for a budget that was not met, once all files are written.

    Raises:
        BudgetError: names the files.
    """
    from ckptz.errors import BudgetError

    unmet = [r.output for r in reports if r.search is not None and r.search.is_met is False]
    if unmet:
        raise BudgetError(f"{', '.join(unmet)}: no settings keep the budget; written without loss")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
