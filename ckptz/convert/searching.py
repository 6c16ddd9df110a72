"""Searches for the smallest configuration that keeps a budget, and writes its file.

What is tried comes from `ckptz.convert.strategies`, what becomes of each trial is in
`ckptz.convert.trial_files`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ckptz.codec.choices import choose_all
from ckptz.codec.units import UnitSource
from ckptz.container.contents import Contents
from ckptz.container.writer import Written, roles_of
from ckptz.convert.evaluation import Judge, judging
from ckptz.convert.proxy import proxy_judge
from ckptz.convert.quality import Scope
from ckptz.convert.search_options import SearchOptions, SearchReport, TrialReport
from ckptz.convert.strategies import method_name, parent_config, route_of, searched_template
from ckptz.convert.tied import tied_names
from ckptz.convert.trial_files import Searcher, SearchRun, stage
from ckptz.errors import ConfigError
from ckptz.roles import role_of
from ckptz.search.trials import Strategy, run_stages

__all__ = ["SearchOptions", "SearchReport", "SearchRun", "TrialReport", "search_and_write"]


def search_and_write(
    target: Path,
    tensors: Mapping[str, UnitSource],
    contents: Contents,
    options: SearchOptions,
    run: SearchRun,
) -> tuple[Written, SearchReport]:
    """Find the smallest configuration that keeps the budgets and publish its file.

    Where nothing keeps them, the file is lossless and the report says so.

    Args:
        target: where the file goes.
        tensors: the exact ones, by name.
        contents: everything else; its configuration is what is searched for.
        options: budgets and strategy.
        run: threads, the base's file, and what to tell and to check.

    Raises:
        ConfigError: an evaluation fails, or the exact tensors have no quality to measure a drop from.
        KeyboardInterrupt: before any trial kept the budgets; nothing is written.
    """
    start = time.perf_counter()
    if options.max_evaluations == 0:
        return _replay(target, tensors, contents, options, run)
    roles = roles_of(tensors, contents)
    template = searched_template(options)
    lossy = [n for n, choice in choose_all(template, tensors, roles).items() if choice.method]
    with contextlib.ExitStack() as held:
        judge = held.enter_context(_judge(tensors, lossy, contents, options, run))
        exact_seconds = time.perf_counter() - start
        route = route_of(options, tensors, roles, contents, run.workers.map)
        searcher = Searcher(target, tensors, contents, options, run, judge, route.predict)
        held.enter_context(searcher)
        is_interrupted = _search(searcher, route.stages if lossy and not judge.unmeasurable else [])
        written, records = searcher.publish()
    best = searcher.best
    report = SearchReport(
        method=method_name(template),
        strategy=_deciding(searcher, route.stages),
        is_met=best is not None or not lossy,
        is_interrupted=is_interrupted,
        is_dry_run=options.is_dry_run,
        config=best.trial.config if best else None,
        metrics=tuple(reading.metric for reading in judge.exact),
        exact=tuple(reading.value for reading in judge.exact),
        trials=tuple(searcher.trials),
        n_predicted=route.n_predicted,
        noise=judge.noise,
        unmeasurable=judge.unmeasurable if lossy else (),
        quality=records,
        seconds=time.perf_counter() - start,
        evaluation_seconds=exact_seconds + sum(t.evaluation_seconds for t in searcher.trials),
    )
    return written, report


def _replay(
    target: Path,
    tensors: Mapping[str, UnitSource],
    contents: Contents,
    options: SearchOptions,
    run: SearchRun,
) -> tuple[Written, SearchReport]:
    """Write with the parent's settings; nothing is measured, so the file promises nothing.

    Raises:
        ConfigError: there is no parent.
    """
    start = time.perf_counter()
    config = parent_config(options, contents)
    if config is None:
        raise ConfigError("no evaluations, and no settings to replay: neither a base nor a plan records any")
    staged = stage(target, tensors, replace(contents, config=config), run)
    try:
        run.check()
        if not options.is_dry_run:
            staged.publication.commit()
    finally:
        staged.drop()  # nothing if it has its name
    report = SearchReport(
        method=method_name(options.template),
        strategy="replay",
        is_met=None,
        is_interrupted=False,
        is_dry_run=options.is_dry_run,
        config=asdict(config),
        metrics=(),
        exact=(),
        trials=(),
        n_predicted=0,
        noise=(),
        unmeasurable=(),
        quality=(),
        seconds=time.perf_counter() - start,
        evaluation_seconds=0.0,
    )
    return staged.written, report


def _search(searcher: Searcher, stages: Sequence[Strategy]) -> bool:
    """Try until the strategies are done; whether Ctrl-C came before."""
    options = searcher.options
    try:
        for _ in run_stages(stages, searcher.try_all, options.workers, options.max_evaluations):
            pass
    except KeyboardInterrupt:
        if searcher.best is None:
            raise
        return True
    return False


def _deciding(searcher: Searcher, stages: Sequence[Strategy]) -> str:
    if searcher.best is not None:
        return searcher.best.trial.strategy
    return searcher.trials[-1].strategy if searcher.trials else stages[0].name


@contextlib.contextmanager
def _judge(
    tensors: Mapping[str, UnitSource],
    lossy: Sequence[str],
    contents: Contents,
    options: SearchOptions,
    run: SearchRun,
) -> Iterator[Judge]:
    if options.proxy_error is not None:
        chosen = {name: tensors[name] for name in lossy}
        yield proxy_judge(options.proxy_error, chosen, contents.guides, run.workers.map)
        return
    weights = tuple(name for name in tensors if _is_of_model(name, tensors[name], contents))
    others = tuple(name for name in tensors if name not in set(weights))
    scope = Scope(weights, others, tied_names(contents.tree, tensors), run.prefix)
    with judging(options.budgets, tensors, scope, options.workers, run.workers.map) as judge:
        yield judge


def _is_of_model(name: str, source: UnitSource, contents: Contents) -> bool:
    """Whether a model has the tensor: weights, and buffers of integers, but no optimizer state."""
    role = role_of(name, source.shape, is_float=True, rules=contents.role_rules)
    return contents.roles.get(name, role).role == "weight"
