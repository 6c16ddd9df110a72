"""Options that ask for a quality instead of settings, and what they mean together with a method's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.budgets import amount_of, budgets_of
from ckptz_cli.methods import config_of, fields_of, is_given, options_of_methods
from ckptz_cli.options import COUNT, PATH, together

if TYPE_CHECKING:
    from ckptz.commands.compress import CompressReport
    from ckptz.methods.method import Method
    from ckptz.search_run.run import SearchOptions, TrialReport
    from ckptz_cli.session import Session

STRATEGIES: Final = ("auto", "one-knob", "guided", "neighbourhood", "exhaustive")
EVAL_ONLY: Final = ("max_drop", "budget", "lower_is_better", "resume_steps", "eval_workers")
SEARCH_ONLY: Final = ("strategy", "max_evaluations", "dry_run", *EVAL_ONLY[1:])
NAMES: Final = ("eval", "max_drop", "proxy_error", *SEARCH_ONLY, "plan", "save_plan", "verbose")


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
        "file.py:function. The function gets the tensors by name and returns a loss or an accuracy. A "
        "function called logits returns logits; one called resume trains on and returns a loss. Or write "
        "logits=WHAT, resume=WHAT. Repeatable, with --budget.",
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
        help="How much worse the value of --eval may be: 1% of it, or a difference such as 0.01 "
        "(default 0.5%).",
    ),
    click.option(
        "--lower-is-better/--higher-is-better",
        default=None,
        help="Which values of --eval are better (default lower, but of accuracy higher).",
    ),
    click.option(
        "--proxy-error",
        type=click.FloatRange(min=0),
        metavar="E",
        help="Search without --eval: keep the sensitivity-weighted relative RMS error at or below E.",
    ),
    click.option("--strategy", type=click.Choice(STRATEGIES), help="How to search (default auto)."),
    click.option(
        "--eval-workers", type=COUNT, metavar="N", help="How many evaluations run at a time (default 1)."
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


def is_search(given: Mapping[str, Any]) -> bool:
    """Tell whether the options ask for a search."""
    return bool(given["eval"]) or given["proxy_error"] is not None


def choose(
    given: Mapping[str, Any], on_trial: Callable[[TrialReport], None]
) -> tuple[Method, SearchOptions | None]:
    """Give the configuration that all options mean together, or lossless and what to search for.

    Raises:
        click.UsageError: they contradict each other.
        ConfigError: values out of range, or a plan that cannot be used.
    """
    method = {name: value for name, value in given.items() if name not in NAMES}
    if is_search(given):
        return config_of(None), _search(given, method, on_trial)
    if given["max_drop"] is not None:
        raise click.UsageError(
            "--max-drop needs --eval to measure it; without an evaluation, --proxy-error E bounds an error"
        )
    for name in SEARCH_ONLY:
        if is_given(given[name]):
            raise click.UsageError(f"{_flag(name)} belongs to a search: --eval with --max-drop or --budget")
    for name, value in method.items():
        if given["plan"] is not None and is_given(value):
            raise click.UsageError(f"{_flag(name)} contradicts --plan, which has all settings")
    return _planned(given["plan"]) or config_of(**method), None


def _planned(path: Path | None) -> Method | None:
    from ckptz.search_run.plans import load_plan

    return None if path is None else load_plan(path)


def _search(
    given: Mapping[str, Any], method: dict[str, Any], on_trial: Callable[[TrialReport], None]
) -> SearchOptions:
    from ckptz.errors import ConfigError
    from ckptz.search_run.run import SearchOptions

    parent = _planned(given["plan"])
    if parent is not None and not parent.is_lossy:
        what = "a search begins at settings of a lossy method, and this plan is lossless"
        raise ConfigError(f"{given['plan']}: {what}")
    searched = _searched_method(method["method"], parent)
    _refuse_in_search(given, method, searched)
    known = options_of_methods().items()
    cubes = tuple(cube for name, (_, option) in known if option.is_cube and (cube := method.pop(name)))
    options: dict[str, Any] = {
        "strategy": given["strategy"],
        "workers": given["eval_workers"],
        "max_evaluations": given["max_evaluations"],
        "cubes": cubes,
        "parent": parent,
        "proxy_error": given["proxy_error"],
    }
    return SearchOptions(
        budgets=budgets_of(given),
        template=dataclasses.replace(searched.reference(), **fields_of(method)),
        on_trial=on_trial,
        is_dry_run=bool(given["dry_run"]),
        **{name: value for name, value in options.items() if value is not None},
    )


def _searched_method(name: str | None, parent: Method | None) -> type[Method]:
    """Find the method that the search is for: as asked, or else that of the plan that it begins at."""
    from ckptz.methods.table import AUTO, method_named

    if name is None and parent is not None:
        return type(parent)
    method = method_named(AUTO if name in (None, "auto") else name)
    if not method.is_lossy:
        raise click.UsageError(f"--method {method.name} has no search")
    return method


def _refuse_in_search(given: Mapping[str, Any], method: dict[str, Any], searched: type[Method]) -> None:
    if given["eval"] and given["proxy_error"] is not None:
        raise click.UsageError("--eval measures a quality, --proxy-error stands in for one; give one of them")
    if given["proxy_error"] is not None:
        for name in EVAL_ONLY:
            if is_given(given[name]):
                raise click.UsageError(f"{_flag(name)} belongs to --eval, not to --proxy-error")
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
    from ckptz.search_run import plans

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
