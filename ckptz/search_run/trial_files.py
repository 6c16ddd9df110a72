"""The trials of a search: files under temporary names, of which the best so far is kept.

Each trial is a whole file beside the target; what counts is measured on the tensors decoded from it.
The others go at once, and the last one left gets its records and its name. So an interrupted search
leaves the best it found, or nothing. Frames that no setting changes are encoded for the first and
copied into the others.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from ckptz.container.byte_source import FileBytes
from ckptz.container.frame_writer import Contents, Earlier
from ckptz.container.index import QualityRecord
from ckptz.container.publish import Publication
from ckptz.container.reader import Container
from ckptz.container.writer import Written, amend_quality, write_container
from ckptz.methods.lossless import LOSSLESS
from ckptz.methods.method import Method
from ckptz.parallel import Workers
from ckptz.pipeline import Prepared
from ckptz.search.trials import Outcome, Predict
from ckptz.search_run.evaluation import Judge, TrialFile, Waiting
from ckptz.search_run.options import SearchOptions, TrialReport
from ckptz.search_run.quality import Readings


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """Threads, folders and checks that a search works with."""

    workers: Workers  # threads
    base_paths: tuple[Path, ...] = ()  # the files behind `Contents.bases`
    search_path: tuple[Path, ...] = ()  # folders to look for its own bases in
    like: Sequence[Path] = ()  # files whose permissions the target gets, if it replaces none
    # called before the target gets its name; raises if what was read has changed
    check: Callable[[], None] = lambda: None
    owner: str = ""  # begins the names of temporary files
    prefix: str = ""  # what begins the names of weights in the file, and not those that qualities see


@dataclass(slots=True)
class Staged:
    """A file that is written and has no name yet."""

    publication: Publication
    path: Path
    written: Written

    def drop(self) -> None:
        """Remove the file, unless it has its name."""
        self.publication.discard()

    def publish(self, run: SearchRun, options: SearchOptions) -> None:
        """Give the file its name, unless its inputs have changed or the run is a dry one; drop it then."""
        try:
            run.check()
            if not options.is_dry_run:
                self.publication.commit()
        finally:
            self.drop()


def stage(target: Path, ready: Prepared, contents: Contents, run: SearchRun) -> Staged:
    """Write a file beside `target`, under a temporary name."""
    publication = Publication(run.owner)
    try:
        with publication.file(target, run.like) as sink:
            written = write_container(sink, ready.job.tensors, contents, run.workers)
    except BaseException:
        publication.discard()
        raise
    return Staged(publication, Path(sink.name), written)


@dataclass(slots=True)
class Best:
    """The best trial so far."""

    outcome: Outcome
    trial: TrialReport
    staged: Staged
    readings: Readings


@dataclass(slots=True)
class Searcher:
    """One search: writes trials, has them measured, keeps the best."""

    target: Path
    ready: Prepared
    options: SearchOptions
    run: SearchRun
    judge: Judge
    predict: Predict | None
    trials: list[TrialReport] = field(default_factory=list)
    best: Best | None = None
    waiting: list[Staged] = field(default_factory=list)
    earlier: Earlier | None = None  # what later trials copy, from the first
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()
        for staged in self.waiting:
            staged.drop()
        if self.best is not None:
            self.best.staged.drop()

    def stage(self, config: Method) -> Staged:
        """Write a trial under a temporary name."""
        return stage(self.target, self.ready, self.ready.contents(config, self.earlier), self.run)

    def _remember(self, config: Method, staged: Staged) -> None:
        """Keep the first trial open: most of a training state comes out the same in all of them."""
        file = FileBytes(staged.path)  # readable until it is closed, also when it has lost its name
        self.held.callback(file.close)
        self.earlier = Earlier(
            tensors=Container(file).tensors,
            recipes=self.ready.contents(config).recipes,
            notes=dict(staged.written.tensor_notes),
        )

    def try_all(self, configs: Sequence[Method], strategy: str) -> list[Outcome]:
        """Write and measure configurations; what is written while others are measured costs no time."""
        begun: list[tuple[Method, Staged, Waiting, float]] = []
        for config in configs:
            start = time.perf_counter()
            staged = self.stage(config)
            self.waiting.append(staged)
            if self.earlier is None:
                self._remember(config, staged)
            file = TrialFile(staged.path, self.run.base_paths, self.run.search_path)
            wait = self.judge.begin(file)
            begun.append((config, staged, wait, time.perf_counter() - start))
        return [self._finish(strategy, *one) for one in begun]

    def _finish(
        self, strategy: str, config: Method, staged: Staged, wait: Waiting, seconds: float
    ) -> Outcome:
        readings, evaluation_seconds = wait()
        judgements = self.judge.judgements(readings)
        used = max(math.inf if one.used is None else one.used for one in judgements)
        outcome = Outcome(config, used, staged.written.stored_bytes)
        is_in_process = self.options.workers == 1
        trial = TrialReport(
            config=asdict(config),
            strategy=strategy,
            predicted_bytes=None if self.predict is None else round(self.predict(config)),
            n_bytes=outcome.n_bytes,
            drop=_finite(outcome.used),
            is_feasible=outcome.is_feasible,
            values=tuple(_finite(reading.value) for reading in readings),
            judgements=judgements,
            seconds=seconds if is_in_process else seconds + evaluation_seconds,
            evaluation_seconds=evaluation_seconds,
        )
        self.trials.append(trial)
        self._keep_if_better(Best(outcome, trial, staged, readings))
        self.options.on_trial(trial)
        return outcome

    def _keep_if_better(self, found: Best) -> None:
        self.waiting.remove(found.staged)
        is_better = self.best is None or found.outcome.n_bytes < self.best.outcome.n_bytes
        if not (found.outcome.is_feasible and is_better):
            found.staged.drop()
            return
        if self.best is not None:
            self.best.staged.drop()
        self.best = found

    def publish(self) -> tuple[Written, tuple[QualityRecord, ...]]:
        """Give the best its records and its name; a lossless file where nothing keeps the budget."""
        staged = self.best.staged if self.best is not None else self.stage(LOSSLESS)
        records: tuple[QualityRecord, ...] = ()
        if self.best is not None:  # which is dropped in the end, whatever happens here
            records = self.judge.records(self.best.readings)
            n_bytes = amend_quality(staged.path, records)
            staged.written = replace(staged.written, stored_bytes=n_bytes)
        staged.publish(self.run, self.options)
        return staged.written, records


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
