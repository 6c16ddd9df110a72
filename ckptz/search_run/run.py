"""Searches for the smallest configuration that keeps a budget, and writes its file.

Each method has strategies, whose proposals are tried; what becomes of each trial is in
`ckptz.search_run.trial_files`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ckptz.container.frame_writer import matching_base
from ckptz.container.writer import Written
from ckptz.encoding.subject import NO_GUIDE, MapFunction, Subject
from ckptz.errors import ConfigError
from ckptz.methods.method import Cube, Method
from ckptz.pipeline import Job, Prepared, prepared
from ckptz.roles import role_of
from ckptz.search.guided import Exhaustive, Guided, Neighbourhood
from ckptz.search.one_knob import CLOSE_LATER, MAX_LATER, OneKnob
from ckptz.search.rate import SizeModel
from ckptz.search.trials import Predict, Strategy, run_stages
from ckptz.search_run.evaluation import Judge, judging
from ckptz.search_run.options import SearchOptions, SearchReport, TrialReport
from ckptz.search_run.plans import recorded_in
from ckptz.search_run.proxy import proxy_judge
from ckptz.search_run.quality import Scope, is_of_training
from ckptz.search_run.trial_files import Searcher, SearchRun, stage
from ckptz.tree.flatten import tied_names

# Strategies, one after another; sizes of configurations before they are tried, if these need them; how many.
Route = tuple[Sequence[Strategy], Predict | None, int]
__all__ = ["SearchOptions", "SearchReport", "SearchRun", "TrialReport", "search_and_write"]


def searched_template(options: SearchOptions) -> Method:
    """Give the template of a search, as its budgets need it."""
    trains = any(map(is_of_training, options.budgets))
    return options.template.searched(trains=trains, restarts=options.restores > 0)


def parent_config(options: SearchOptions, job: Job) -> Method | None:
    """Give what the user says, or what the checkpoint before was written with, if by the same method."""
    template = searched_template(options)
    parent = options.parent if options.parent is not None else recorded_in(job.bases, template)
    if parent is None or not template.is_scalable:
        return parent
    return template.scaled(parent.multiplier)


def route_of(options: SearchOptions, ready: Prepared, run: MapFunction) -> Route:
    """Find the strategies for the options of a search; `run` maps a function over tensors.

    Raises:
        ConfigError: the strategy needs a parent, and there is none.
    """
    template, parent = searched_template(options), parent_config(options, ready.job)
    if template.is_scalable:
        first = OneKnob(template=template)
        if parent is None:
            return [first], None, 0
        # Where the parent's multiplier leads nowhere near, the search goes on as if it were the first.
        first = replace(first, start=parent.multiplier)
        return [replace(first, most=MAX_LATER, close=CLOSE_LATER), first], None, 0
    lossy = ready.lossy(template)
    guides = [ready.guides[name] for name in lossy if name in ready.guides]
    is_ranked = any(guide.gradient or guide.second_moment for guide in guides)
    layer_types = {ready.roles[name].layer_type for name in lossy}
    cubes = template.cubes(options.cubes, layer_types, is_ranked=is_ranked)
    subjects = {}
    for name, tensor in ready.job.tensors.items():
        base = matching_base(tensor, ready.job.bases.get(name))
        subjects[name] = Subject(tensor, base, ready.guides.get(name, NO_GUIDE))
    configs = list(dict.fromkeys(cube.config(point) for cube in cubes for point in cube.points))
    predict = SizeModel(subjects, ready.roles, configs, run)
    return _cube_stages(options, parent, cubes, predict), predict, len(configs)


def _cube_stages(
    options: SearchOptions, parent: Method | None, cubes: Sequence[Cube], predict: Predict
) -> list[Strategy]:
    strategy = options.strategy
    if strategy == "exhaustive":
        return [Exhaustive(cubes=cubes, predict=predict)]
    guided = Guided(cubes=cubes, predict=predict)
    if strategy != "guided" and parent is not None:
        keeps = options.restores > 0
        return [Neighbourhood(parent=parent, cubes=cubes, predict=predict, keeps=keeps), guided]
    if strategy == "neighbourhood":
        raise ConfigError("strategy neighbourhood begins at settings of a base or a plan, and there are none")
    return [guided]


def search_and_write(
    target: Path, job: Job, options: SearchOptions, run: SearchRun
) -> tuple[Written, SearchReport]:
    """Find the smallest configuration that keeps the budgets and publish its file.

    Where nothing keeps them, the file is lossless and the report says so.

    Raises:
        ConfigError: an evaluation fails, or the exact tensors have no quality to measure a drop from.
        KeyboardInterrupt: before any trial kept the budgets; nothing is written.
    """
    start = time.perf_counter()
    with prepared(replace(job, config=options.template)) as ready:
        find = _replay if options.max_evaluations == 0 else _searched
        written, report = find(target, ready, options, run, start)
    return replace(written, notes=(*written.notes, *ready.notes)), report


def _searched(
    target: Path, ready: Prepared, options: SearchOptions, run: SearchRun, start: float
) -> tuple[Written, SearchReport]:
    template = searched_template(options)
    lossy = ready.lossy(template)
    with contextlib.ExitStack() as held:
        judge = held.enter_context(_judge(ready, lossy, options, run))
        exact_seconds = time.perf_counter() - start
        stages, predict, n_predicted = route_of(options, ready, run.workers.map)
        searcher = held.enter_context(Searcher(target, ready, options, run, judge, predict))
        is_interrupted = _search(searcher, stages if lossy and not judge.unmeasurable else [])
        written, records = searcher.publish()
    best, trials = searcher.best, searcher.trials
    last = best.trial if best else trials[-1] if trials else None
    tried_by = trials[-1].strategy if trials else stages[0].name
    report = SearchReport(
        method=template.name,
        strategy=best.trial.strategy if best else tried_by,
        is_met=best is not None or not lossy,
        is_interrupted=is_interrupted,
        is_dry_run=options.is_dry_run,
        config=best.trial.config if best else None,
        metrics=tuple(reading.metric for reading in judge.exact),
        exact=tuple(reading.value for reading in judge.exact),
        trials=tuple(trials),
        n_predicted=n_predicted,
        noise=judge.noise,
        unmeasurable=judge.unmeasurable if lossy else (),
        doubts=judge.doubts(last.judgements) if last else (),
        quality=records,
        seconds=time.perf_counter() - start,
        evaluation_seconds=exact_seconds + sum(t.evaluation_seconds for t in trials),
    )
    return written, report


def _replay(
    target: Path, ready: Prepared, options: SearchOptions, run: SearchRun, start: float
) -> tuple[Written, SearchReport]:
    """Write with the parent's settings; nothing is measured, so the file promises nothing.

    Raises:
        ConfigError: there is no parent.
    """
    config = parent_config(options, ready.job)
    if config is None:
        raise ConfigError("with 0 evaluations a base or a plan must record settings, and none does")
    staged = stage(target, ready, ready.contents(config), run)
    staged.publish(run, options)
    report = SearchReport(
        method=options.template.name,
        strategy="replay",
        is_dry_run=options.is_dry_run,
        config=asdict(config),
        seconds=time.perf_counter() - start,
    )
    return staged.written, report


def _search(searcher: Searcher, stages: Sequence[Strategy]) -> bool:
    """Try until the strategies are done; tell whether Ctrl-C came before."""
    options = searcher.options
    try:
        for _ in run_stages(stages, searcher.try_all, options.workers, options.max_evaluations):
            pass
    except KeyboardInterrupt:
        if searcher.best is None:
            n = len(searcher.trials)
            what = f"{n} evaluations of trials, none of which keeps the budget; nothing is written"
            raise KeyboardInterrupt(what) from None
        return True
    return False


@contextlib.contextmanager
def _judge(ready: Prepared, lossy: Sequence[str], options: SearchOptions, run: SearchRun) -> Iterator[Judge]:
    tensors = ready.job.tensors
    if options.proxy_error is not None:
        chosen = {name: tensors[name] for name in lossy}
        yield proxy_judge(options.proxy_error, chosen, ready.guides, run.workers.map)
        return
    weights = tuple(name for name in tensors if _is_of_model(name, ready))
    others = tuple(name for name in tensors if name not in set(weights))
    scope = Scope(weights, others, tied_names(ready.job.tree, tensors), run.prefix)
    with judging(
        *(options.budgets, tensors, scope, options.workers, run.workers.map),
        restores=options.restores,
        # A later checkpoint, which begins at a parent's settings, is found in one or two evaluations.
        repeats=parent_config(options, ready.job) is None,
    ) as judge:
        yield judge


def _is_of_model(name: str, ready: Prepared) -> bool:
    """Tell whether a model has the tensor: weights, and buffers of integers, but no optimizer state."""
    job, source, role = ready.job, ready.job.tensors[name], ready.roles[name]
    if not source.dtype.is_float:
        role = (job.roles or {}).get(name) or role_of(name, source.shape, is_float=True, rules=job.role_rules)
    return role.role == "weight"
