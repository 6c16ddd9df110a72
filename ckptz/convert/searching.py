"""Searches for the smallest configuration that keeps a budget, and writes its file.

Each trial is a whole file under a temporary name beside the target; what counts is measured on the
tensors decoded from it. The best one so far is kept, the others go at once; at the end it gets its
records and its name. So an interrupted search leaves the best it found, or nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ckptz.codec.choices import choose_all
from ckptz.codec.units import UnitSource
from ckptz.config import LOSSLESS, Config, Grid, KMeans
from ckptz.container.amend import amend_quality
from ckptz.container.contents import Contents, Progress
from ckptz.container.index import QualityRecord
from ckptz.container.publish import Publication
from ckptz.container.writer import Written, roles_of, write_container
from ckptz.convert.evaluation import Judge, Measured, TrialFile, Waiting, judging
from ckptz.convert.proxy import proxy_judge
from ckptz.convert.quality import Scope
from ckptz.convert.strategies import (
    REFERENCE,
    StrategyName,
    check_strategy,
    method_name,
    parent_config,
    route_of,
    searched_template,
)
from ckptz.convert.tied import tied_names
from ckptz.errors import ConfigError
from ckptz.parallel import Workers
from ckptz.roles import role_of
from ckptz.search.budget import Budget
from ckptz.search.trials import Outcome, Predict, Strategy, run_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """One configuration that was tried.

    Attributes:
        config: its settings.
        strategy: what proposed it.
        predicted_bytes: size expected before anything was encoded, if it was predicted.
        n_bytes: size of its file.
        drop: share of the tightest budget that is used; at most 1 keeps it, None if a value is not finite.
        is_feasible: whether all budgets are kept.
        values: one a budget, measured on the decoded tensors; None where not finite.
        seconds: taken to write and to measure it.
        evaluation_seconds: taken to decode and evaluate alone.
    """

    config: dict[str, Any]
    strategy: str
    predicted_bytes: int | None
    n_bytes: int
    drop: float | None
    is_feasible: bool
    values: tuple[float | None, ...]
    seconds: float
    evaluation_seconds: float


def _ignore(trial: TrialReport) -> None:
    del trial


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What to search for, and how.

    Attributes:
        budgets: all of them must be kept.
        proxy_error: instead of budgets, the largest sensitivity-weighted relative RMS error.
        strategy: "one-knob" for grids; for kmeans "guided", "exhaustive" or "neighbourhood" (then guided). Or
            "auto": the first, or the neighbourhood if the base or `parent` says where to begin, else guided.
        prune_metrics: "magnitude" and "sensitivity"; the second is left out where no gradients are known.
        template: the method, and everything that is not searched. A grid's moments become lossy only under a
            budget that trains on: no other would notice.
        parent: where the search begins, of the template's method; by default what the base records.
        workers: evaluations side by side; more than one run in processes of their own.
        max_evaluations: stop there and keep the best so far. With 0 the parent's settings are used as they
            are: nothing is measured, and the file promises nothing.
        on_trial: told of each trial.
        is_dry_run: write nothing.
    """

    budgets: tuple[Budget, ...] = ()
    proxy_error: float | None = None
    strategy: StrategyName = "auto"
    prune_metrics: tuple[str, ...] = ("magnitude", "sensitivity")
    template: KMeans | Grid = REFERENCE
    parent: KMeans | Grid | None = None
    workers: int = 1
    max_evaluations: int | None = None
    on_trial: Callable[[TrialReport], None] = _ignore
    is_dry_run: bool = False

    def __post_init__(self) -> None:
        if bool(self.budgets) == (self.proxy_error is not None):
            raise ConfigError("a search needs either budgets or a proxy error")
        if self.proxy_error is not None and not (math.isfinite(self.proxy_error) and self.proxy_error >= 0):
            raise ConfigError(f"proxy_error must be a number from 0, got {self.proxy_error}")
        check_strategy(self.strategy, self.template, self.parent)
        if not self.prune_metrics or set(self.prune_metrics) - {"magnitude", "sensitivity"}:
            raise ConfigError(f"prune metrics are magnitude and sensitivity, got {self.prune_metrics}")
        if self.workers < 1:
            raise ConfigError(f"workers must be at least 1, got {self.workers}")
        if self.max_evaluations is not None and self.max_evaluations < 0:
            raise ConfigError(f"max_evaluations must be at least 0, got {self.max_evaluations}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """How a search went.

    Attributes:
        method: of the settings, "grid" or "kmeans".
        strategy: what proposed the winner, or the last that was tried.
        is_met: whether the budgets are kept; if not, the file is lossless. None if that was not measured.
        is_interrupted: stopped by Ctrl-C; the file is the best that was found until then.
        is_dry_run: nothing was written.
        config: settings of the winner, None for a lossless file.
        metrics: what was measured, one a budget.
        exact: its values for the exact tensors.
        trials: in order.
        n_predicted: configurations whose size was predicted.
        noise: differences of each budget's value that say nothing, 0 where that was not measured.
        unmeasurable: what to tell of budgets below their noise, which count as not kept.
        quality: what the file records of its budgets.
        seconds: taken in all.
        evaluation_seconds: taken to decode and evaluate, in all processes, the exact tensors included.
    """

    method: str
    strategy: str
    is_met: bool | None
    is_interrupted: bool
    is_dry_run: bool
    config: dict[str, Any] | None
    metrics: tuple[str, ...]
    exact: tuple[float, ...]
    trials: tuple[TrialReport, ...]
    n_predicted: int
    noise: tuple[float, ...]
    unmeasurable: tuple[str, ...]
    quality: tuple[QualityRecord, ...]
    seconds: float
    evaluation_seconds: float


def _unchecked() -> None:
    """Nothing that could have changed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """What a search works with.

    Attributes:
        workers: threads.
        base_paths: the files behind `Contents.bases`.
        search_path: folders to look for its own bases in.
        like: files whose permissions the target gets, if it replaces none.
        progress: told of the bytes of each trial as it is written.
        check: called before the target gets its name; raises if what was read has changed.
        owner: begins the names of temporary files.
        prefix: what begins the names of weights in the file, and not those that qualities see.
    """

    workers: Workers
    base_paths: tuple[Path, ...] = ()
    search_path: tuple[Path, ...] = ()
    like: Sequence[Path] = ()
    progress: Progress | None = None
    check: Callable[[], None] = _unchecked
    owner: str = ""
    prefix: str = ""


@dataclass(slots=True)
class _Staged:
    """A file that is written and has no name yet."""

    publication: Publication
    path: Path
    written: Written

    def drop(self) -> None:
        """Remove it."""
        self.publication.discard()


@dataclass(slots=True)
class _Best:
    """The best trial so far."""

    outcome: Outcome
    trial: TrialReport
    staged: _Staged
    measured: Measured


@dataclass(slots=True)
class _Searcher:
    """One search: writes trials, has them measured, keeps the best."""

    target: Path
    tensors: Mapping[str, UnitSource]
    contents: Contents
    options: SearchOptions
    run: SearchRun
    judge: Judge
    predict: Predict | None
    trials: list[TrialReport] = field(default_factory=list)
    best: _Best | None = None
    waiting: list[_Staged] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for staged in self.waiting:
            staged.drop()
        if self.best is not None:
            self.best.staged.drop()  # nothing if it has its name

    def stage(self, config: Config) -> _Staged:
        """Write a file under a temporary name."""
        publication = Publication(self.run.owner)
        try:
            with publication.file(self.target, self.run.like) as sink:
                contents = replace(self.contents, config=config)
                written = write_container(sink, self.tensors, contents, self.run.workers, self.run.progress)
        except BaseException:
            publication.discard()
            raise
        return _Staged(publication, Path(sink.name), written)

    def try_all(self, configs: Sequence[Config], strategy: str) -> list[Outcome]:
        """Write and measure configurations; what is written while others are measured costs no time."""
        begun: list[tuple[Config, _Staged, Waiting, float]] = []
        for config in configs:
            start = time.perf_counter()
            staged = self.stage(config)
            self.waiting.append(staged)
            file = TrialFile(staged.path, self.run.base_paths, self.run.search_path)
            wait = self.judge.begin(file)
            begun.append((config, staged, wait, time.perf_counter() - start))
        return [self._finish(strategy, *one) for one in begun]

    def _finish(
        self, strategy: str, config: Config, staged: _Staged, wait: Waiting, seconds: float
    ) -> Outcome:
        measured = wait()
        outcome = Outcome(config, self.judge.used(measured.readings), staged.written.stored_bytes)
        is_in_process = self.options.workers == 1
        trial = TrialReport(
            config=settings_of(config),
            strategy=strategy,
            predicted_bytes=None if self.predict is None else round(self.predict(config)),
            n_bytes=outcome.n_bytes,
            drop=_finite(outcome.used),
            is_feasible=outcome.is_feasible,
            values=tuple(_finite(reading.value) for reading in measured.readings),
            seconds=seconds if is_in_process else seconds + measured.seconds,
            evaluation_seconds=measured.seconds,
        )
        self.trials.append(trial)
        self._keep_if_better(_Best(outcome, trial, staged, measured))
        self.options.on_trial(trial)
        return outcome

    def _keep_if_better(self, found: _Best) -> None:
        self.waiting.remove(found.staged)
        is_better = self.best is None or found.outcome.n_bytes < self.best.outcome.n_bytes
        if not (found.outcome.is_feasible and is_better):
            found.staged.drop()
            return
        previous, self.best = self.best, found
        if previous is not None:
            previous.staged.drop()

    def publish(self) -> tuple[Written, tuple[QualityRecord, ...]]:
        """Give the best its records and its name; a lossless file where nothing keeps the budget."""
        staged = self.best.staged if self.best is not None else self.stage(LOSSLESS)
        try:
            records: tuple[QualityRecord, ...] = ()
            if self.best is not None:
                records = self.judge.records(self.best.measured.readings)
                n_bytes = amend_quality(staged.path, records)
                staged.written = replace(staged.written, stored_bytes=n_bytes)
            self.run.check()
            if not self.options.is_dry_run:
                staged.publication.commit()
            return staged.written, records
        finally:
            staged.drop()  # nothing if it has its name


def settings_of(config: Config) -> dict[str, Any]:
    """A configuration as plain values."""
    return asdict(config)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
        searcher = _Searcher(target, tensors, contents, options, run, judge, route.predict)
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
    publication = Publication()
    try:
        with publication.file(target, run.like) as sink:
            contents = replace(contents, config=config)
            written = write_container(sink, tensors, contents, run.workers, run.progress)
        run.check()
        if not options.is_dry_run:
            publication.commit()
    finally:
        publication.discard()  # nothing if it has its name
    report = SearchReport(
        method=method_name(options.template),
        strategy="replay",
        is_met=None,
        is_interrupted=False,
        is_dry_run=options.is_dry_run,
        config=settings_of(config),
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
    return written, report


def _search(searcher: _Searcher, stages: Sequence[Strategy]) -> bool:
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


def _deciding(searcher: _Searcher, stages: Sequence[Strategy]) -> str:
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
