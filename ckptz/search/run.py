"""Searches for the configuration with the smallest file within a budget, and writes that file.

Strategies propose configurations. Each trial is written to a temporary file beside the target, and evaluated
on the tensors decoded from it. Only the best file is kept; at the end it gets its quality records and its
name. An interrupted search publishes the best file so far, or nothing. Frames that no setting changes are
encoded for the first trial and copied into the others.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method
from ckptz.codec.tensor import NO_SIDE_INFORMATION, MapFunction, TensorToEncode
from ckptz.errors import ConfigError
from ckptz.format.byte_source import FileBytes
from ckptz.format.index import QualityRecord
from ckptz.format.publish import Publication
from ckptz.format.reader import Container
from ckptz.format.written import Written, amend_quality
from ckptz.parallel import Workers
from ckptz.search.budget import SearchOptions, SearchReport, TrialReport, recorded_in, used_by_examples
from ckptz.search.evaluation import Decoder, Judge, Measurements, open_trial
from ckptz.search.predicted_sizes import predicted_sizes
from ckptz.search.spaces import CubeSpace, MultiplierSpace, space_of
from ckptz.search.strategies import (
    CLOSE_LATER,
    MAX_LATER,
    Finer,
    Guided,
    MultiplierSearch,
    Neighbourhood,
    Outcome,
    Strategy,
    run_stages,
)
from ckptz.state.flatten import tied_names
from ckptz.state.roles import role_of
from ckptz.words import finite_or_none
from ckptz.write.frame_writer import Earlier, FilePlan, matching_base
from ckptz.write.job import WriteJob, prepared
from ckptz.write.writer import write_container


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """Threads, folders and checks of a search."""

    workers: Workers  # threads
    base_paths: tuple[Path, ...] = ()  # files of `WriteJob.bases`
    search_path: tuple[Path, ...] = ()  # folders in which bases of the base are searched
    like: Sequence[Path] = ()  # files whose permissions a new target gets
    check: Callable[[], None] = lambda: None  # called before publishing; raises if an input has changed
    owner: str = ""  # prefix of temporary file names
    prefix: str = ""  # prefix of weight names in the file, removed for qualities


def search_and_write(
    target: Path, job: WriteJob, options: SearchOptions, run: SearchRun
) -> tuple[Written, SearchReport]:
    """Publish the smallest file within the budgets; a lossless file if no configuration meets them.

    Args:
        target: path of the file.
        job: its tensors, base and side information.
        options: budgets and limits of the search.
        run: threads, folders and checks.

    Raises:
        ConfigError: an evaluation fails, or the exact tensors have values that cannot be compared with.
        KeyboardInterrupt: interrupted before any trial was within the budgets; nothing is written.
    """
    with prepared(replace(job, config=options.template)) as ready:
        if options.max_evaluations == 0:
            return _write_with_parent(target, ready, options, run)
        weights = tuple(name for name in job.tensors if _is_of_model(name, job, ready))
        exact = Decoder(
            tensors=ready.tensors,
            weights=weights,
            tied=tied_names(ready.tree, ready.tensors),
            prefix=run.prefix,
            run=run.workers.map,
        )
        return _search(target, ready, exact, options, run)


def _write_with_parent(
    target: Path, ready: WriteJob, options: SearchOptions, run: SearchRun
) -> tuple[Written, SearchReport]:
    """Write with the parent's settings, without an evaluation; the file promises nothing."""
    start, config = time.perf_counter(), parent_config(options, ready)
    if config is None:
        raise ConfigError("max_evaluations=0 needs settings from a base or --config, but none records any")
    with contextlib.ExitStack() as stack:
        trial = write_trial(target, FilePlan.of(replace(ready, config=config)), run, stack)
        trial.publish(run, options.is_dry_run)
    report = SearchReport(
        method=options.template.name,
        strategy="replay",
        is_dry_run=options.is_dry_run,
        config=asdict(config),
        seconds=time.perf_counter() - start,
    )
    return trial.written, report


def _search(
    target: Path, ready: WriteJob, exact: Decoder, options: SearchOptions, run: SearchRun
) -> tuple[Written, SearchReport]:
    """Search with the prepared job; `exact` decodes its tensors for the qualities."""
    template, start = searched_template(options), time.perf_counter()
    lossy = _lossy_names(ready, template)
    with contextlib.ExitStack() as stack:
        options.on_begin(None, None)
        # With a parent's settings one or two evaluations are enough; a repeat would add much to their time.
        repeats = parent_config(options, ready) is None
        judge = Judge.of(options.budgets, exact, restores=options.restores, repeats=repeats)
        exact_seconds = time.perf_counter() - start
        stages, predicted = choose_strategies(options, ready, run.workers.map)
        searcher = Searcher(target, ready, options, run, judge, predicted, stack)
        is_interrupted = searcher.search(stages if lossy and not judge.unmeasurable else [])
        written, records = searcher.publish()
    best, trials = searcher.best, searcher.reports
    last = best.report if best else trials[-1] if trials else None
    report = SearchReport(
        method=template.name,
        strategy=last.strategy if last else stages[0].name,
        is_met=best is not None or not lossy,
        is_interrupted=is_interrupted,
        is_dry_run=options.is_dry_run,
        config=best.report.config if best else None,
        metrics=tuple(check.exact.metric for check in judge.checks),
        exact=tuple(check.exact.value for check in judge.checks),
        trials=tuple(trials),
        n_predicted=len(predicted),
        noise=tuple(check.baseline.noise for check in judge.checks),
        unmeasurable=judge.unmeasurable if lossy else (),
        doubts=judge.doubts(last.judgements) if last else (),
        quality=records,
        seconds=time.perf_counter() - start,
        evaluation_seconds=exact_seconds + sum(t.evaluation_seconds for t in trials),
    )
    return written, report


def _is_of_model(name: str, job: WriteJob, ready: WriteJob) -> bool:
    """Return whether a tensor is a weight or buffer of the model, not optimizer state."""
    source, role = job.tensors[name], (ready.roles or {})[name]
    if not source.dtype.is_float:
        role = (job.roles or {}).get(name) or role_of(name, source.shape, is_float=True, rules=job.role_rules)
    return role.role == "weight"


# --- configurations and strategies ---------------------------------------------------------------


def searched_template(options: SearchOptions) -> Method:
    """Return the template of a search, adapted to its budgets and restarts."""
    trains = any(budget.trains for budget in options.budgets)
    template = options.template
    return space_of(template).template(template, trains=trains, restarts=options.restores > 0)


def parent_config(options: SearchOptions, job: WriteJob) -> Method | None:
    """Return the settings to start from: the user's, else those that the base records, else None."""
    template = searched_template(options)
    parent = options.parent if options.parent is not None else recorded_in(job.bases, template)
    space = space_of(template)
    if parent is None or not isinstance(space, MultiplierSpace):
        return parent
    return space.scaled(template, space.multiplier(parent))


def choose_strategies(
    options: SearchOptions, ready: WriteJob, run: MapFunction
) -> tuple[Sequence[Strategy], Mapping[Method, float]]:
    """Choose the strategies of a search; `run` maps a function over tensors.

    Returns:
        (strategies in order; predicted sizes in bytes of the configurations, if they need any).
    """
    template, parent = searched_template(options), parent_config(options, ready)
    space = space_of(template)
    if isinstance(space, MultiplierSpace):
        first = MultiplierSearch(template=template, space=space)
        if parent is None:
            return [first], {}
        # If the parent's multiplier is far off, the search continues like a first one.
        first = replace(first, start=space.multiplier(parent), is_stochastic=options.restores > 0)
        return [replace(first, max_trials=MAX_LATER, close=CLOSE_LATER), first], {}
    assert isinstance(space, CubeSpace)
    lossy = _lossy_names(ready, template)
    roles, all_guides = ready.roles or {}, ready.guides or {}
    guides = [all_guides[name] for name in lossy if name in all_guides]
    is_ranked = any(guide.gradient or guide.second_moment for guide in guides)
    layer_types = {roles[name].layer_type for name in lossy}
    cubes = space.cubes(template, options.cubes, layer_types, is_ranked=is_ranked)
    tensors_to_encode = {}
    for name, tensor in ready.tensors.items():
        base = matching_base(tensor, ready.bases.get(name))
        tensors_to_encode[name] = TensorToEncode(
            tensor, base, guide=all_guides.get(name, NO_SIDE_INFORMATION)
        )
    finer = space.finer(template)
    points = (cube.config(point) for cube in cubes for point in cube.points)
    configs = list(dict.fromkeys([*points, *finer, *(() if parent is None else (parent,))]))
    predicted = predicted_sizes(tensors_to_encode, roles, configs, run)
    predict = predicted.__getitem__
    guided = Guided(cubes=cubes, predict=predict, n_reserved=len(finer))
    stages: list[Strategy] = [guided, Finer(configs=finer)]
    if parent is not None:
        neighbourhood = Neighbourhood(
            parent=parent, cubes=cubes, predict=predict, tries_parent=options.restores > 0
        )
        stages.insert(0, neighbourhood)
    return stages, predicted


def _lossy_names(ready: WriteJob, config: Method) -> list[str]:
    """List the tensors that a configuration may change."""
    return [name for name, recipe in replace(ready, config=config).recipes().items() if recipe.is_lossy]


# --- trials ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """A written file that is not published yet."""

    publication: Publication
    path: Path
    written: Written

    def publish(self, run: SearchRun, is_dry_run: bool) -> None:
        """Check the inputs, and publish the file unless this is a dry run."""
        run.check()
        if not is_dry_run:
            self.publication.commit()


def write_trial(target: Path, plan: FilePlan, run: SearchRun, stack: contextlib.ExitStack) -> Trial:
    """Write a temporary file beside `target`; closing `stack` removes it unless it was published."""
    publication = Publication(run.owner)
    stack.callback(publication.discard)  # before writing, because an interrupt may follow at once
    with publication.file(target, run.like) as sink:
        written = write_container(sink, plan, run.workers)
    return Trial(publication, Path(sink.name), written)


class Best(NamedTuple):
    """The smallest trial so far within the budgets."""

    trial: Trial
    report: TrialReport
    measurements: Measurements


@dataclass(slots=True)
class Searcher:
    """Writes and evaluates the trials of one search, and keeps the best file."""

    target: Path
    ready: WriteJob
    options: SearchOptions
    run: SearchRun
    judge: Judge
    predicted: Mapping[Method, float]  # file sizes in bytes
    stack: contextlib.ExitStack  # closes the first trial, and removes unpublished files
    reports: list[TrialReport] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # of evaluated trials, by content id
    best: Best | None = None
    earlier: Earlier | None = None  # frames of the first trial that later ones copy

    def search(self, stages: Sequence[Strategy]) -> bool:
        """Run the strategies; returns True if Ctrl-C ended them early.

        Raises:
            KeyboardInterrupt: interrupted before any trial was within the budget.
        """
        try:
            run_stages(stages, self.try_config, self.options.max_evaluations)
        except KeyboardInterrupt:
            if self.best is None:
                what = "before any trial was within the budget; nothing is written"
                raise KeyboardInterrupt(what) from None
            return True
        return False

    def _write(self, config: Method) -> Trial:
        """Write a trial; the first one stays open, because later ones copy its unchanged frames."""
        n_tried = sum(report.config == asdict(config) for report in self.reports)
        plan = FilePlan.of(replace(self.ready, config=config), self.earlier, n_tried)
        trial = write_trial(self.target, plan, self.run, self.stack)
        if self.earlier is None:
            file = FileBytes(trial.path)  # stays readable after the file is removed
            self.stack.callback(file.close)
            notes = dict(trial.written.tensor_notes)
            self.earlier = Earlier(tensors=Container(file).tensors, recipes=plan.recipes, notes=notes)
        return trial

    def try_config(self, config: Method, strategy: str) -> Outcome:
        """Write and evaluate a configuration, and keep its file if it is the best so far.

        A file with the same values as an earlier trial is neither evaluated again nor kept.
        """
        start, settings = time.perf_counter(), asdict(config)
        self.options.on_begin(settings, None)
        trial, written = self._write(config), time.perf_counter()
        content_id = trial.written.content_id
        if content_id in self.outcomes:
            trial.publication.discard()
            return replace(self.outcomes[content_id], config=config)
        self.options.on_begin(settings, trial.written.stored_bytes)
        with open_trial(trial.path, self.run.base_paths, self.run.search_path) as decoded:
            measurements = self.judge.measure(decoded)
        evaluation_seconds = time.perf_counter() - written
        judgements = self.judge.judgements(measurements)
        used = max(math.inf if judged.used is None else judged.used for judged in judgements)
        outcome = Outcome(
            *(config, used, trial.written.stored_bytes, max(map(used_by_examples, judgements)), content_id)
        )
        self.outcomes[content_id] = outcome
        report = TrialReport(
            config=settings,
            strategy=strategy,
            predicted_bytes=round(self.predicted[config]) if self.predicted else None,
            n_bytes=outcome.n_bytes,
            drop=finite_or_none(outcome.used),
            is_feasible=outcome.is_feasible,
            values=tuple(finite_or_none(measurement.value) for measurement in measurements),
            judgements=judgements,
            seconds=time.perf_counter() - start,
            evaluation_seconds=evaluation_seconds,
        )
        self.reports.append(report)
        if outcome.is_feasible and (self.best is None or outcome.n_bytes < self.best.report.n_bytes):
            # Replaced first: after an interrupt `best` must not be a removed file.
            previous, self.best = self.best, Best(trial, report, measurements)
            if previous is not None:
                previous.trial.publication.discard()
        else:
            trial.publication.discard()
        self.options.on_trial(report)
        return outcome

    def publish(self) -> tuple[Written, tuple[QualityRecord, ...]]:
        """Publish the best file with its quality records, or a lossless file if no trial met the budgets."""
        records: tuple[QualityRecord, ...] = ()
        if self.best is None:
            plan = FilePlan.of(replace(self.ready, config=LOSSLESS), self.earlier)
            trial = write_trial(self.target, plan, self.run, self.stack)
        else:
            trial = self.best.trial
            records = self.judge.records(self.best.measurements)
            n_bytes = amend_quality(trial.path, records)
            trial.written = replace(trial.written, stored_bytes=n_bytes)
        trial.publish(self.run, self.options.is_dry_run)
        return trial.written, records
