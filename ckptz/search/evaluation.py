"""Evaluates budgets: on the exact tensors once, and on those that are decoded from each trial's file.

Most qualities are of a model and get its weights. Those that train on get everything in the checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
import numpy as np

from ckptz.codec.tensor import MapFunction
from ckptz.errors import ConfigError
from ckptz.format.byte_source import FileBytes
from ckptz.format.index import CHANGES, STEPS_LOST, Promise, QualityRecord
from ckptz.format.reader import Container
from ckptz.format.sources import TensorSource
from ckptz.search.budget import Budget, Judgement, Limit, Measurement, check_consistent, judge
from ckptz.search.measures import KL, TOP1, Baseline, State, prepare
from ckptz.state.frameworks import framework
from ckptz.store.resolve import open_checkpoint, open_file

Measurements = tuple[Measurement, ...]  # one for each budget
P = ParamSpec("P")
T = TypeVar("T")
REPEATABLE: Final = 0.01  # of a budget, which a second look at the exact tensors may use


# --- the states that qualities see ----------------------------------------------------------------


def is_of_training(budget: Budget) -> bool:
    """Return whether a budget measures resumed training, which needs optimizer state."""
    return bool(getattr(budget.quality, "trains", False))


@dataclass(frozen=True, slots=True)
class Scope:
    """Names of the tensors that qualities are called with."""

    weights: tuple[str, ...]  # those of the model: parameters and buffers
    others: tuple[str, ...] = ()  # optimizer state, for qualities that train on
    # other names of these tensors, and what they are stored as
    tied: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""  # what begins names in the file, and not those that qualities see


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the state that one budget's quality is called with; see `ckptz.search.measures.ExactState`."""

    tensors: Mapping[str, TensorSource]  # by name
    budget: Budget
    scope: Scope  # of all budgets
    run: MapFunction = map  # maps a function over chunks

    def state(self) -> State:
        """Decode a fresh copy."""
        scope = self.scope
        names = (*scope.weights, *scope.others) if is_of_training(self.budget) else scope.weights
        state = state_of({name: self.tensors[name] for name in names}, self.run)
        state |= {n: state[stored] for n, stored in scope.tied.items() if stored in state}
        return {name.removeprefix(scope.prefix): tensor for name, tensor in state.items()}

    def disturbed(self, share: float, seed: int) -> State:
        """Decode a copy with noise on weights of two or more dimensions, `share` of the spread of each."""
        state, rng = self.state(), np.random.default_rng(seed)
        for name in self.scope.weights:
            tensor = state[name.removeprefix(self.scope.prefix)]
            is_matrix = tensor.dim() > 1 and tensor.numel() > 1
            # 8-bit floats do not add.
            if is_matrix and tensor.is_floating_point() and tensor.element_size() > 1:
                spread = float(tensor.float().std())
                noise = rng.standard_normal(tuple(tensor.shape), np.float32)
                tensor.add_(tensor.new_tensor(noise * np.float32(share * spread)))
        return state


def state_of(tensors: Mapping[str, TensorSource], run: MapFunction = map) -> State:
    """Decode tensors, by name, to CPU torch tensors in memory of their own; `run` maps over chunks."""
    torch = framework("torch", "cpu", "mmap")
    state, places = {}, []
    for name, source in tensors.items():
        shape = torch.shape_of(source.dtype, tuple(source.shape))
        state[name], patterns = torch.allocate(source.dtype, shape)
        places += [(source, patterns, begin, end) for begin, end in source.chunk_bounds()]

    def fill(place: tuple[TensorSource, Any, int, int]) -> None:
        source, patterns, begin, end = place
        patterns[begin:end] = source.patterns(begin, end)

    for _ in run(fill, places):
        pass
    return state


def _called(budget: Budget, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a user's function; whatever it raises is told by the name of the budget."""
    try:
        return call(*args, **kwargs)
    except (MemoryError, ConfigError):
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        raise ConfigError(f"{budget.name}: the evaluation raised {what}; -v shows where") from error


def measure(
    budgets: Sequence[Budget], scope: Scope, tensors: Mapping[str, TensorSource], run: MapFunction = map
) -> Measurements:
    """Ask each budget's quality about decoded tensors; one that several budgets share is called once.

    Args:
        budgets: with qualities that have seen the exact tensors.
        scope: of the tensors.
        tensors: by name.
        run: maps a function over chunks.

    Raises:
        ConfigError: a quality raises, or returns no number.
    """
    results: dict[int, Any] = {}
    for budget in budgets:
        quality = budget.quality
        if callable(quality) and id(quality) not in results:
            results[id(quality)] = _called(budget, quality, Decoder(tensors, budget, scope, run).state())
    return tuple(budget.read(results[id(budget.quality)]) for budget in budgets)


@contextlib.contextmanager
def opened_trial(
    path: Path, base_paths: Sequence[Path], search_path: Sequence[Path]
) -> Iterator[Mapping[str, TensorSource]]:
    """Open a file that was just written, for its tensors by name.

    Args:
        path: the file.
        base_paths: what its deltas are made from; of several files, each has other tensors.
        search_path: folders to look for the bases of these in.
    """
    with contextlib.ExitStack() as held:
        file = held.enter_context(contextlib.closing(open_file(FileBytes(path))))
        # It was written against these very bases, which need not be read to know that they are the ones.
        if isinstance(file, Container) and file.index.base is not None:
            bases: dict[str, TensorSource] = {}
            for base_path in base_paths:
                base = held.enter_context(contextlib.closing(open_checkpoint(base_path, search_path)))
                bases |= base.tensors
            file.bases = bases
        yield file.tensors


# --- the judge -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCheck:
    """One budget, as the trials of a search are held against it."""

    limit: Limit
    exact: Measurement  # what changes are measured from
    promise: Promise  # of a file that keeps the budget
    digest: str | None = None  # of the data
    noise: float = 0.0  # differences up to this one say nothing
    per_step: float | None = None  # what a step of training lowers the value by, if that is known

    @property
    def fault(self) -> str:
        """Why nothing can be said to keep the budget, as it is below the noise of its measurement; or ""."""
        metric, limit = self.exact.metric, self.limit
        if math.isnan(limit.max_drop):
            return (
                f"{metric} cannot be measured in steps: from the exact state, as many steps again gain less "
                f"than exact states differ by ({self.noise:.3g}, the noise floor); train further, average "
                "over more data, or give a share of the loss as in 'resume<=0.2%'"
            )
        if self.noise <= limit.in_units(self.exact):
            return ""
        floor = self._amount(self.noise / self.exact.value if limit.is_relative else self.noise)
        return (
            f"{metric} cannot be measured to its budget of {self._amount(limit.max_drop)}: exact states "
            f"differ by {floor} (the noise floor), so nothing counts as keeping it; allow more, or average "
            "over more steps or data"
        )

    def doubt(self, judged: Judgement) -> str:
        """Return a note if there are too few examples to be sure of the mean; else an empty string."""
        allowed, wanted = self._amount(self.limit.max_drop), ""
        if not judged.is_resolved and judged.error is not None:
            if self.limit.max_drop:
                wanted = f"; about {float(f'{judged.n_wanted:.2g}'):,.0f} {judged.unit}s would decide"
            return (
                f"{judged.metric}: {judged.n_values} {judged.unit}s are too few to be sure, because the "
                f"standard error of the mean's change is {self._amount(judged.error)} and the limit is "
                f"{allowed}{wanted}"
            )
        if judged.n_values == 1 and self.promise == "quality-drop" and judged.metric not in (KL, TOP1):
            return (
                f"{judged.metric} is a single number, of which nobody can know whether its data tell a "
                f"change of {allowed}; return the losses of all answers in one tensor [n_answers]"
            )
        return ""

    def _amount(self, value: float) -> str:
        """Write a value in the unit of the limit."""
        return f"{100 * value:.3g}%" if self.limit.is_relative else f"{value:.3g}"

    def records(self, measured: Measurement, judged: Judgement, date: str) -> Iterator[QualityRecord]:
        """Yield the file's records of a budget."""
        limit, exact = self.limit, self.exact
        record = QualityRecord(
            promise=self.promise,
            metric=measured.metric,
            max_drop=limit.max_drop,
            is_relative=limit.is_relative,
            lower_is_better=measured.lower_is_better,
            exact=exact.value,
            measured=measured.value,
            is_met=judged.is_kept,
            date=date,
            data_digest=self.digest,
        )
        yield record
        allowed = limit.in_units(exact)
        beside: dict[str, Any] = {"is_relative": False, "exact": 0.0}
        if judged.changes is not None:
            in_units = exact.value if limit.is_relative else 1.0
            beside |= {"metric": f"{measured.metric}{CHANGES}{measured.unit}", "lower_is_better": True}
            beside |= {"max_drop": judged.most_changes * in_units, "measured": judged.changes * in_units}
            yield msgspec.structs.replace(record, **beside)
        if self.per_step is not None:
            lost = (measured.value - exact.value) / self.per_step
            beside |= {"metric": STEPS_LOST, "max_drop": allowed / self.per_step, "measured": lost}
            yield msgspec.structs.replace(record, **beside)


@dataclass(frozen=True, slots=True)
class Judge:
    """The comparison of trials with their budgets."""

    checks: tuple[BudgetCheck, ...]  # one for each budget, at least one
    measure: Callable[[Mapping[str, TensorSource]], Measurements]  # of decoded tensors, by name

    @property
    def unmeasurable(self) -> tuple[str, ...]:
        """Messages on budgets below the noise of their measurement, which nothing can be said to keep."""
        return tuple(filter(None, (one.fault for one in self.checks)))

    def judgements(self, measurements: Measurements) -> tuple[Judgement, ...]:
        """Compare a trial with the exact state, for each budget.

        Raises:
            ConfigError: its values are not those of the same answers as the exact state's.
        """
        pairs = zip(self.checks, measurements, strict=True)
        return tuple(judge(one.limit, one.exact, measured) for one, measured in pairs)

    def doubts(self, judgements: Sequence[Judgement]) -> tuple[str, ...]:
        """Name the budgets of which too few answers were measured to tell what became of the mean."""
        pairs = zip(self.checks, judgements, strict=True)
        return tuple(filter(None, (one.doubt(judged) for one, judged in pairs)))

    def records(self, measurements: Measurements) -> tuple[QualityRecord, ...]:
        """Return the file's records of its budgets; values that are not finite cannot be stored."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        rows = zip(self.checks, measurements, self.judgements(measurements), strict=True)
        return tuple(
            record for one, measured, judged in rows for record in one.records(measured, judged, date)
        )


def judge_of(
    budgets: tuple[Budget, ...],
    tensors: Mapping[str, TensorSource],
    scope: Scope,
    run: MapFunction,
    *,
    restores: int = 0,
    repeats: bool = False,
) -> Judge:
    """Make a judge by quality; the exact `tensors` are measured. `run` maps a function over chunks.

    Args:
        restores: see `Budget.limit`.
        repeats: measure the exact tensors a second time, to see that their values are the same.

    Raises:
        ConfigError: a quality raises; or the exact tensors have none that a change can be measured from, or
            others the second time; or budgets contradict each other.
    """
    seen: dict[int, Baseline] = {}  # by quality; one that several budgets share sees the exact tensors once
    for budget in budgets:
        if id(budget.quality) not in seen:
            exact = Decoder(tensors, budget, scope, run)
            seen[id(budget.quality)] = _called(budget, prepare, budget.quality, exact)
    baselines = [seen[id(budget.quality)] for budget in budgets]
    measurements = tuple(budget.read(one.exact) for budget, one in zip(budgets, baselines, strict=True))
    check_consistent(budgets, measurements)
    for budget, measurement in zip(budgets, measurements, strict=True):
        budget.check_exact(measurement)
    ready = tuple(replace(b, quality=one.quality) for b, one in zip(budgets, baselines, strict=True))
    checks = tuple(
        BudgetCheck(
            limit=budget.limit(one.per_step, restores, is_one=len(measurement.values) == 1),
            exact=measurement,
            promise="resume-gap" if is_of_training(budget) else "quality-drop",
            digest=budget.data_digest,
            noise=one.noise,
            per_step=one.per_step,
        )
        for budget, one, measurement in zip(budgets, baselines, measurements, strict=True)
    )
    if repeats:
        _check_repeats(ready, checks, scope, tensors, run)
    return Judge(checks, lambda decoded: measure(ready, scope, decoded, run))


def _check_repeats(
    budgets: Sequence[Budget],
    checks: Sequence[BudgetCheck],
    scope: Scope,
    tensors: Mapping[str, TensorSource],
    run: MapFunction,
) -> None:
    """Measure the exact tensors once more; qualities that train on have measured their noise."""
    rows = [(b, one) for b, one in zip(budgets, checks, strict=True) if not is_of_training(b)]
    again = measure([budget for budget, _ in rows], scope, tensors, run)
    for (budget, one), repeated in zip(rows, again, strict=True):
        exact, used = one.exact, judge(one.limit, one.exact, repeated).used
        if used is None or used > REPEATABLE:
            unequal = int((repeated.values != exact.values).sum())
            of = f", and {unequal} of {len(exact.values)} values differ" if len(exact.values) > 1 else ""
            raise ConfigError(
                f"{budget.name}: the {exact.metric} of the same exact tensors is {exact.value:.8g} and then "
                f"{repeated.value:.8g}{of}; fix the data and the seed, and call model.eval()"
            )
