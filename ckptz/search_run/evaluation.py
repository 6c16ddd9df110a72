"""Measures budgets on tensors as they are decoded from a written file, here or in other processes."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self

import msgspec

from ckptz.codec.units import TensorSource
from ckptz.container.byte_source import FileBytes
from ckptz.container.index import CHANGES, STEPS_LOST, Promise, QualityRecord
from ckptz.container.reader import Container
from ckptz.encoding.subject import MapFunction
from ckptz.errors import ConfigError
from ckptz.parallel import default_jobs
from ckptz.search.budget import Budget
from ckptz.search.judgement import ALLOWED, Judgement, Limit, judge
from ckptz.search.measures import KL, TOP1
from ckptz.search_run.quality import (
    Readings,
    Scope,
    check_repeats,
    measure_exact,
    measure_trial,
    promise_of,
)
from ckptz.store.resolve import open_checkpoint, open_file


@dataclass(frozen=True, slots=True)
class TrialFile:
    """A written file that is to be measured; can be sent to another process."""

    path: Path  # the file
    # what its deltas are made from; of several files, each has other tensors
    base_paths: tuple[Path, ...] = ()
    search_path: tuple[Path, ...] = ()  # folders to look for the base's own bases in

    @contextlib.contextmanager
    def opened(self) -> Iterator[Mapping[str, TensorSource]]:
        """Open the file, for its tensors by name."""
        with contextlib.ExitStack() as held:
            file = held.enter_context(contextlib.closing(open_file(FileBytes(self.path))))
            # It was written against these very bases, which need not be read to know that they are the ones.
            if isinstance(file, Container) and file.index.base is not None:
                bases: dict[str, TensorSource] = {}
                for path in self.base_paths:
                    base = held.enter_context(contextlib.closing(open_checkpoint(path, self.search_path)))
                    bases |= base.tensors
                file.bases = bases
            yield file.tensors


def read_file(budgets: Sequence[Budget], scope: Scope, run: MapFunction, file: TrialFile) -> Readings:
    """Measure budgets on the tensors that are decoded from a trial."""
    with file.opened() as tensors:
        return measure_trial(budgets, scope, tensors, run)


Measured = tuple[Readings, float]  # what was measured on one trial, and the seconds that it took
Waiting = Callable[[], Measured]


@dataclass(frozen=True, slots=True)
class Judge:
    """Says what a trial used of its budgets."""

    limits: tuple[Limit, ...]  # at least one
    exact: Readings  # what changes are measured from, one a limit
    promises: tuple[Promise, ...]  # what a file that keeps them promises, by each
    begin: Callable[[TrialFile], Waiting]  # starts to measure a trial; what it returns waits for the result
    digests: tuple[str | None, ...]  # of the data of each
    noise: tuple[float, ...]  # differences up to these say nothing, one a limit
    per_step: tuple[float | None, ...]  # what a step of training lowers each by, if that is known

    @property
    def unmeasurable(self) -> tuple[str, ...]:
        """Messages on limits below the noise of their measurement, which nothing can be said to keep."""
        faults = []
        for limit, exact, noise in zip(self.limits, self.exact, self.noise, strict=True):
            if math.isnan(limit.max_drop):
                faults.append(
                    f"{exact.metric} cannot be measured in steps: from the exact state, as many steps again "
                    f"gain less than exact states differ by ({noise:.3g}, the noise floor); train further, "
                    "average over more data, or give a share of the loss as in 'resume<=0.2%'"
                )
            elif noise > limit.in_units(exact):
                floor = _amount(noise / exact.value if limit.is_relative else noise, limit)
                faults.append(
                    f"{exact.metric} cannot be measured to its budget of {_amount(limit.max_drop, limit)}: "
                    f"exact states differ by {floor} (the noise floor), so nothing counts as keeping it; "
                    "allow more, or average over more steps or data"
                )
        return tuple(faults)

    def judgements(self, readings: Readings) -> tuple[Judgement, ...]:
        """Compare a trial with the exact state, for each limit.

        Raises:
            ConfigError: its values are not those of the same answers as the exact state's.
        """
        return tuple(map(judge, self.limits, self.exact, readings))

    def doubts(self, judgements: Sequence[Judgement]) -> tuple[str, ...]:
        """Name the budgets of which too few answers were measured to tell what became of the mean."""
        found = []
        for promise, limit, judged in zip(self.promises, self.limits, judgements, strict=True):
            allowed = _amount(limit.max_drop, limit)
            if not judged.is_resolved and judged.error is not None:
                wanted = (
                    f"; about {float(f'{judged.n_wanted:.2g}'):,.0f} would tell" if limit.max_drop else ""
                )
                found.append(
                    f"{judged.metric}: {judged.n_values} values tell the change of their mean to a standard "
                    f"error of {_amount(judged.error, limit)}, more than half the budget of {allowed}, so "
                    f"not the mean but the changes of single values decide{wanted}"
                )
            elif judged.n_values == 1 and promise == "quality-drop" and judged.metric not in (KL, TOP1):
                found.append(
                    f"{judged.metric} is a single number, of which nobody can know whether its data tell a "
                    f"change of {allowed}; return the losses of all answers in one tensor [n_answers]"
                )
        return tuple(found)

    def records(self, readings: Readings) -> tuple[QualityRecord, ...]:
        """Give what the file says of its budgets; values that are not finite have no place in it."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        records = []
        rows = zip(
            *(self.promises, self.limits, self.exact, readings, self.judgements(readings)),
            *(self.digests, self.per_step),
            strict=True,
        )
        for promise, limit, exact, found, judged, digest, per_step in rows:
            record = QualityRecord(
                promise=promise,
                metric=found.metric,
                max_drop=limit.max_drop,
                is_relative=limit.is_relative,
                lower_is_better=found.lower_is_better,
                exact=exact.value,
                measured=found.value,
                is_met=judged.is_kept,
                date=date,
                data_digest=digest,
            )
            records.append(record)
            allowed = limit.in_units(exact)
            beside: dict[str, Any] = {"is_relative": False, "exact": 0.0}
            if judged.changes is not None:
                measured = judged.changes * (exact.value if limit.is_relative else 1.0)
                beside |= {"metric": f"{found.metric}{CHANGES}{found.unit}", "lower_is_better": True}
                beside |= {"max_drop": ALLOWED * allowed, "measured": measured}
                records.append(msgspec.structs.replace(record, **beside))
            if per_step is not None:
                lost = (found.value - exact.value) / per_step
                beside |= {"metric": STEPS_LOST, "max_drop": allowed / per_step, "measured": lost}
                records.append(msgspec.structs.replace(record, **beside))
        return tuple(records)


def _amount(value: float, limit: Limit) -> str:
    """Write a value in the unit of a limit."""
    return f"{100 * value:.3g}%" if limit.is_relative else f"{value:.3g}"


def measured_here(read: Callable[[TrialFile], Readings]) -> Callable[[TrialFile], Waiting]:
    """Measure on the caller's own thread, at once."""

    def begin(file: TrialFile) -> Waiting:
        found = _timed(read, file)
        return lambda: found

    return begin


def _timed(read: Callable[[TrialFile], Readings], file: TrialFile) -> Measured:
    start = time.perf_counter()
    readings = read(file)
    return readings, time.perf_counter() - start


class Processes:
    """Measures trials side by side in processes of their own, as models and their globals are not shared.

    Args:
        n: processes.
        budgets: what they measure; sent to them, so what they refer to must be importable.
        scope: of the tensors.

    Raises:
        ConfigError: it cannot be sent.
    """

    def __init__(self, n: int, budgets: Sequence[Budget], scope: Scope) -> None:
        self._read = functools.partial(read_file, budgets, scope, map)
        try:
            ForkingPickler.dumps(self._read)
        except Exception as error:
            names = ", ".join(budget.name for budget in budgets)
            raise ConfigError(
                f"{names}: cannot be sent to other processes ({error}); with several workers the quality "
                "must be a function of a module, or use one worker"
            ) from None
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit PyTorch's threads half dead
        self._pool = ProcessPoolExecutor(n, spawn, _prepare, (max(default_jobs() // n, 1),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, file: TrialFile) -> Waiting:
        """Begin to measure a trial; see `Judge.begin`."""
        future = self._pool.submit(_timed, self._read, file)

        def wait() -> Measured:
            try:
                return future.result()
            except BrokenProcessPool:
                raise ConfigError(
                    "an evaluation process died, perhaps because memory ran out; use fewer workers"
                ) from None

        return wait


def _prepare(n_threads: int) -> None:
    """Set up a new process: Ctrl-C ends it silently, and PyTorch takes its share of the cores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("OMP_NUM_THREADS", str(n_threads))


@contextlib.contextmanager
def judging(
    budgets: tuple[Budget, ...],
    tensors: Mapping[str, TensorSource],
    scope: Scope,
    n_workers: int,
    run: MapFunction,
    *,
    restores: int = 0,
    repeats: bool = False,
) -> Iterator[Judge]:
    """Make a judge by quality; the exact `tensors` are measured, and `n_workers` trials side by side.

    One evaluation at a time runs on the caller's thread, more in processes; `run` maps over chunks.

    Args:
        restores: see `Budget.limit`.
        repeats: measure the exact tensors a second time, to see that their values are the same.

    Raises:
        ConfigError: the exact tensors have no quality that a change can be measured from, or others the
            second time.
    """
    baseline = measure_exact(budgets, scope, tensors, run)
    limits = tuple(b.limit(step, restores) for b, step in zip(budgets, baseline.per_step, strict=True))
    if repeats:
        check_repeats(baseline, limits, scope, tensors, run)
    with contextlib.ExitStack() as held:
        begin = measured_here(functools.partial(read_file, baseline.budgets, scope, run))
        if n_workers > 1:
            begin = held.enter_context(Processes(n_workers, baseline.budgets, scope)).begin
        yield Judge(
            limits=limits,
            exact=baseline.exact,
            promises=tuple(map(promise_of, budgets)),
            begin=begin,
            digests=tuple(budget.data_digest for budget in budgets),
            noise=baseline.noise,
            per_step=baseline.per_step,
        )
