"""Options of `ckptz compress` for a search: `--eval`, `--budget`, `--target-size`, `--dry-run`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.method_options import (
    GROUPS,
    SEARCH,
    checked_settings,
    config_from,
    load_config,
    split_groups,
)
from ckptz_cli.options import together
from ckptz_cli.session import QUIET, VERBOSE, has_option, is_terminal

if TYPE_CHECKING:
    from ckptz.codec.method import Method
    from ckptz.search.budget import Budget, SearchOptions, TrialReport
    from ckptz.search.measures import NamedFunction
    from ckptz.verbs.compress import CompressReport


BUDGET: Final = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(<=|>=)\s*(\S+?)\s*(steps)?\s*")
EXAMPLES: Final = (
    "'loss<=1%', 'accuracy>=-0.01', 'kl<=5e-3', 'top1>=0.99', 'resume<=0.2%' or 'resume<=20 steps'"
)
FROM_LOGITS: Final = "--budget 'kl<=5e-3' or 'top1>=0.99'"
BARE: Final = re.compile(r"\s*[-+.\d][^<>=]*")  # a budget without a metric
NAMES: Final = ("method", "settings", "config", "eval", "budget", "allow_unsure", "dry_run", "target_size")


def amount_of(text: str) -> tuple[float, bool]:
    """Parse `1%`, relative to the exact value, or `0.01`, an absolute difference.

    Returns:
        (the number, whether it is relative).

    Raises:
        click.BadParameter: the text is neither.
    """
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        what = f"{text!r} is neither a percentage such as 1% nor a number such as 0.01"
        raise click.BadParameter(what) from None
    if not abs(number) < float("inf"):
        raise click.BadParameter(f"{text!r} is not a finite number")
    return (number / 100, True) if text.endswith("%") else (number, False)


def parse_budget(text: str) -> dict[str, Any]:
    """Parse a `--budget` into the arguments of `ckptz.Budget`, without the evaluation.

    Raises:
        click.BadParameter: the text is no budget, or cannot be met.
    """
    match = BUDGET.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a budget; write {EXAMPLES}")
    metric, sign, written, steps = match.groups()
    from ckptz.search.measures import KL, METRICS, RESUME, TOP1

    is_lower_better = METRICS[metric].lower_is_better if metric in METRICS else sign == "<="
    if is_lower_better != (sign == "<="):
        better = "lower" if is_lower_better else "higher"
        raise click.BadParameter(f"{text!r}: {metric} is better when {better}; write {EXAMPLES}")
    number, is_relative = amount_of(written)
    if steps and (metric != RESUME or is_relative):
        raise click.BadParameter(f"{text!r}: only resume has a unit of steps, as in 'resume<=20 steps'")
    drop = number if sign == "<=" else -number
    if metric == TOP1:
        if not 0 <= number <= 1:
            raise click.BadParameter(f"{text!r} top1 is a share from 0 to 1")
        drop, is_relative = 1 - number, False
    if metric == KL and is_relative:
        raise click.BadParameter(f"{text!r}: kl of the exact state is 0, so write nats, as in 'kl<=5e-3'")
    if drop < 0:
        must = "at least 0, the allowed rise" if sign == "<=" else "at most 0, the allowed change"
        raise click.BadParameter(f"{text!r}: the number must be {must} of {metric}; write {EXAMPLES}")
    return {
        "metric": metric,
        "max_drop": drop + 0.0,
        "relative": is_relative,
        "lower_is_better": sign == "<=",
        "in_steps": bool(steps),
    }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An `--eval` option: a function, the one of `EVALUATIONS` that uses it, and the quality of a budget."""

    kind: str
    function: NamedFunction
    quality: Any

    @classmethod
    def parse(cls, text: str, n_steps: int | None) -> Evaluation:
        """Parse `WHERE` or `KIND=WHERE`; load the function, so that errors are raised early."""
        from ckptz.search.measures import EVALUATIONS, Agreement, NamedFunction, ResumeProbe

        kind, equals, where = text.partition("=")
        if not equals or kind not in EVALUATIONS:
            kind, where = "", text
        function = NamedFunction(where)
        function.load()
        name = where.rpartition(":")[2]
        kind = kind or (name if name in EVALUATIONS else "quality")
        quality: Any = function
        if kind == "logits":
            quality = Agreement(function)
        elif kind == "resume":
            quality = ResumeProbe(function) if n_steps is None else ResumeProbe(function, n_steps)
        return cls(kind, function, quality)


def budgets_of(options: Mapping[str, Any], resume_steps: int | None) -> tuple[Budget, ...]:
    """Return the budgets of the options.

    Raises:
        click.UsageError: the options contradict each other.
        ConfigError: a function is not found.
    """
    from ckptz.search.budget import Budget

    evaluations = [Evaluation.parse(text, resume_steps) for text in options["eval"]]
    if resume_steps is not None and all(one.kind != "resume" for one in evaluations):
        raise click.UsageError("--set search.resume_steps needs an --eval resume=...")
    texts = options["budget"]
    if len(texts) > 1 or (texts and not BARE.fullmatch(texts[0])):
        return _several(texts, evaluations)
    if len(evaluations) > 1:
        raise click.UsageError(f"several --eval need a --budget with its metric each: {EXAMPLES}")
    evaluation = evaluations[0]
    if evaluation.kind == "logits":
        raise click.UsageError(f"--eval {evaluation.function.text}: logits need {FROM_LOGITS}")
    if not texts:
        return (Budget(evaluation.quality),)
    number, is_relative = amount_of(texts[0].strip())
    if number < 0:
        raise click.BadParameter(f"--budget {texts[0]!r} must be at least 0")
    return (Budget(evaluation.quality, max_drop=number, relative=is_relative),)


def _several(texts: Sequence[str], evaluations: Sequence[Evaluation]) -> tuple[Budget, ...]:
    """Return a budget for each `--budget`; every evaluation must have one."""
    from ckptz.search.budget import Budget

    budgets = [parse_budget(text) for text in texts]
    for i, budget in enumerate(budgets):
        for text, earlier in zip(texts[:i], budgets, strict=False):
            if all(budget[name] == earlier[name] for name in ("metric", "relative", "in_steps")):
                what = f"--budget {text!r} and {texts[i]!r} contradict each other"
                raise click.UsageError(f"{what}; keep one")
    pairs = list(zip(texts, budgets, strict=True))
    chosen = [_evaluation_for(text, budget["metric"], evaluations) for text, budget in pairs]
    for evaluation in evaluations:
        if evaluation not in chosen:
            raise click.UsageError(f"--eval {evaluation.function.text}: no --budget uses it")
    return tuple(Budget(one.quality, **budget) for one, budget in zip(chosen, budgets, strict=True))


def _evaluation_for(text: str, metric: str, evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation for a metric: by kind, and among several qualities by name."""
    from ckptz.search.measures import METRICS

    kind = METRICS[metric].evaluation if metric in METRICS else "quality"
    fits = [evaluation for evaluation in evaluations if evaluation.kind == kind]
    if len(fits) > 1:
        fits = [evaluation for evaluation in fits if evaluation.function.metric == metric]
    if len(fits) != 1:
        how = "a quality" if kind == "quality" else f"{kind}, as in {kind}=file.py:function"
        raise click.UsageError(f"--budget {text!r} needs one --eval that returns {how}")
    return fits[0]


search_options = together(
    click.option(
        "--eval",
        multiple=True,
        metavar="WHAT",
        help="Search for the smallest file within the budget. WHAT is package.module:function or "
        "file.py:function; it receives a dict of tensors and returns losses (logits=WHAT: logits; "
        "resume=WHAT: losses after more training). Repeatable.",
    ),
    click.option(
        "--budget",
        multiple=True,
        metavar="B",
        help="Limit of the quality loss, with --eval: 1% (default 0.5%), 'accuracy>=-0.01', 'kl<=5e-3', "
        "'resume<=20 steps'. Repeatable.",
    ),
    click.option(
        "--allow-unsure",
        is_flag=True,
        help="If there are too few examples to be sure, accept a file by its per-example change.",
    ),
    click.option(
        "--target-size",
        metavar="SIZE",
        help="Write the most accurate file of at most this size: 500MB, or 20x (--method, default grid).",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        default=None,
        help="Write nothing; predict size and time of each --method within seconds, or with --eval search.",
    ),
)


@contextlib.contextmanager
def search_view() -> Iterator[Callable[[SearchOptions], SearchOptions]]:
    """Yield a function that adds progress output to search options.

    On a terminal that is a table of trials, elsewhere a line for each trial; with -q, nothing.
    """
    from ckptz_cli.tables import start_line, trial_line, trials_table

    if has_option(QUIET):
        yield lambda search: search
        return
    if not is_terminal(sys.stderr):

        def print_start(config: Mapping[str, Any] | None, n_bytes: int | None) -> None:
            if config is None:
                click.echo(f"ckptz: {start_line(config, n_bytes)}", err=True)

        def print_trial(trial: TrialReport) -> None:
            click.echo(f"ckptz: {trial_line(trial)}", err=True)

        yield partial(dataclasses.replace, on_begin=print_start, on_trial=print_trial)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.spinner import Spinner

    trials: list[TrialReport] = []
    console, is_shown, running = Console(stderr=True), is_terminal(sys.stdout), Spinner("line")
    display = Live(
        console=console, transient=not has_option(VERBOSE), redirect_stdout=is_shown, refresh_per_second=4
    )

    def show_start(config: Mapping[str, Any] | None, n_bytes: int | None) -> None:
        running.update(text=start_line(config, n_bytes))
        display.update(Group(trials_table(trials), running) if trials else running, refresh=True)

    with display:
        yield partial(dataclasses.replace, on_begin=show_start, on_trial=trials.append)
        display.update(trials_table(trials))


def choose(
    options: Mapping[str, Any],
) -> tuple[list[Method], SearchOptions | None, Mapping[str, Mapping[str, Any]]]:
    """Return the methods, the search and the `--set` groups of a command line.

    Args:
        options: the values of the options in `NAMES`.

    Returns:
        (methods: several only for a dry run, [lossless] with a search; the search or None; values of each
        group in `GROUPS`).

    Raises:
        click.UsageError: the options contradict each other.
        ConfigError: a value is out of range, or a settings file is invalid.
    """
    from ckptz.codec.lossless import LOSSLESS

    settings, set_groups = split_groups(options["settings"], "--set ")
    loaded, groups = (None, {}) if options["config"] is None else load_config(options["config"])
    groups = {name: {**groups.get(name, {}), **set_groups[name]} for name in GROUPS}
    methods = options["method"]
    if options["target_size"] and (options["eval"] or "lossless" in methods):
        what = "chooses settings of a lossy method by size; leave out --eval and --method lossless"
        raise click.UsageError(f"--target-size {what}")
    if len(methods) > 1 and (options["eval"] or not options["dry_run"] or settings or loaded):
        raise click.UsageError("several --method are only for --dry-run, without settings")
    if options["eval"]:
        search = _search(options, settings, loaded, groups[SEARCH])
        return [LOSSLESS], search, groups
    if options["budget"]:
        raise click.UsageError("--budget needs --eval to measure it")
    if options["allow_unsure"] or groups[SEARCH]:
        name = f"--set {SEARCH}.{next(iter(groups[SEARCH]))}" if groups[SEARCH] else "--allow-unsure"
        raise click.UsageError(f"{name} is only for a search, with --eval")
    path = options["config"]
    if options["target_size"] and not methods and loaded is None:
        methods = ("grid",)
    return [config_from(method, settings, loaded, path) for method in methods or (None,)], None, groups


def _search(
    options: Mapping[str, Any],
    settings: dict[str, Any],
    parent: Method | None,
    search_settings: Mapping[str, int],
) -> SearchOptions:
    from ckptz.codec.registry import method_named
    from ckptz.errors import ConfigError
    from ckptz.search.budget import SearchOptions
    from ckptz.search.spaces import DEFAULT_METHOD, CubeSpace, MultiplierSpace, reference, space_of

    if parent is not None and not parent.is_lossy:
        what = "a search needs settings of a lossy method, and these are lossless"
        raise ConfigError(f"{options['config']}: {what}")
    method = DEFAULT_METHOD if parent is None else type(parent)
    if options["method"]:
        method = method_named(options["method"][0])
    space = space_of(method)
    settings = checked_settings(method, settings)
    cubes: tuple[str, ...] = ()
    searched: Collection[str] = ()
    if isinstance(space, MultiplierSpace):
        searched = {space.field}
    elif isinstance(space, CubeSpace):
        searched = space.axes
        if space.cube_field in settings:
            cubes = (settings.pop(space.cube_field),)
    if names := [name for name in settings if name in searched]:
        raise click.UsageError(f"--set {names[0]}: the search chooses this value; leave it out")
    return SearchOptions(
        budgets=tuple(
            dataclasses.replace(budget, allow_unsure=options["allow_unsure"])
            for budget in budgets_of(options, search_settings.get("resume_steps"))
        ),
        template=dataclasses.replace(reference(method), **settings),
        cubes=cubes,
        parent=parent,
        is_dry_run=bool(options["dry_run"]),
        restores=search_settings.get("restores", 0),
        max_evaluations=search_settings.get("max_evaluations"),
    )


def require_budgets(reports: Sequence[CompressReport]) -> None:
    """Raise if a written file did not meet its budget.

    Raises:
        BudgetError: with the names of the files, and the number of examples needed to be sure.
    """
    from ckptz.errors import BudgetError

    unmet = [(r.output, r.search) for r in reports if r.search is not None and r.search.is_met is False]
    if not unmet:
        return
    what = f"{', '.join(output for output, _ in unmet)}: no settings keep the budget; written without loss"
    last = [judged for _, search in unmet for trial in search.trials[-1:] for judged in trial.judgements]
    unsure = [judged for judged in last if not judged.is_resolved and judged.mean_limit]
    if unsure:
        most = max(unsure, key=lambda judged: judged.n_needed)
        few, n = f"{most.n_values} {most.unit}s are too few to be sure", float(f"{most.n_needed:.2g}")
        what += f". {few}: use about {n:,.0f}, or --allow-unsure"
    raise BudgetError(what)
