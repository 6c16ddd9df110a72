"""Evaluates budgets: on the exact tensors, and on the tensors decoded from each trial's file.

A quality is called with the weights of the model, or, if it resumes training, with the whole checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ckptz.codec.tensor import MapFunction
from ckptz.errors import ConfigError
from ckptz.format.index import CHANGES, STEPS_LOST, Promise, QualityRecord
from ckptz.format.reader import Container
from ckptz.format.sources import TensorSource
from ckptz.search.budget import Budget, Judgement, Limit, Measurement, check_consistent, judge
from ckptz.search.measures import METRICS, Baseline, State, prepare
from ckptz.state.frameworks import framework
from ckptz.store.resolve import open_checkpoint, open_file
from ckptz.words import shorten

Measurements = tuple[Measurement, ...]  # one for each budget
MAX_REPEAT_DIFFERENCE: Final = 0.01  # of a budget, between two evaluations of the exact tensors


# --- the states that qualities are called with -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the state that qualities are called with; implements `ckptz.search.measures.ExactState`."""

    tensors: Mapping[str, TensorSource]  # by name
    weights: tuple[str, ...]  # names of the parameters and buffers of the model
    tied: Mapping[str, str] = field(default_factory=dict)  # other names of tensors -> stored names
    prefix: str = ""  # of names in the file; removed for the quality
    run: MapFunction = map  # maps a function over chunks
    is_whole: bool = False  # decode all other tensors too, for a quality that resumes training

    def state(self) -> State:
        """Decode a fresh copy of the state."""
        torch = framework("torch", "cpu", "mmap")
        state: State = {}
        chunks = []
        for name in dict.fromkeys((*self.weights, *self.tensors)) if self.is_whole else self.weights:
            source = self.tensors[name]
            shape = torch.shape_of(source.dtype, tuple(source.shape))
            state[name], patterns = torch.allocate(source.dtype, shape)
            chunks += [(source, patterns, begin, end) for begin, end in source.chunk_bounds()]

        def decode(chunk: tuple[TensorSource, Any, int, int]) -> None:
            source, patterns, begin, end = chunk
            patterns[begin:end] = source.patterns(begin, end)

        for _ in self.run(decode, chunks):
            pass
        state |= {n: state[stored] for n, stored in self.tied.items() if stored in state}
        return {name.removeprefix(self.prefix): tensor for name, tensor in state.items()}

    def noisy_state(self, share: float, seed: int) -> State:
        """Decode a copy with normal noise on weight matrices: `share` of the standard deviation of each."""
        state, rng = self.state(), np.random.default_rng(seed)
        for name in self.weights:
            tensor = state[name.removeprefix(self.prefix)]
            is_matrix = tensor.dim() > 1 and tensor.numel() > 1
            # torch cannot add 8-bit floats.
            if is_matrix and tensor.is_floating_point() and tensor.element_size() > 1:
                spread = float(tensor.float().std())
                noise = rng.standard_normal(tuple(tensor.shape), np.float32)
                tensor.add_(tensor.new_tensor(noise * np.float32(share * spread)))
        return state


def _call(budget: Budget, function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function; its exceptions become a `ConfigError` that names the budget."""
    try:
        return function(*args)
    except (MemoryError, ConfigError):
        raise
    except Exception as error:
        text = shorten(" ".join(str(error).split()), 200)
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise ConfigError(f"{budget.name}: the evaluation raised {what}; -v shows where") from error


@contextlib.contextmanager
def open_trial(
    path: Path, base_paths: Sequence[Path], search_path: Sequence[Path]
) -> Iterator[Mapping[str, TensorSource]]:
    """Open a trial file and yield its tensors by name.

    Args:
        path: the trial.
        base_paths: its base; several files if the base is sharded.
        search_path: folders in which bases of the base are searched.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(contextlib.closing(open_file(path)))
        # The trial was just written against these files, so their content ids need no check.
        if isinstance(file, Container) and file.index.base is not None:
            bases: dict[str, TensorSource] = {}
            for base_path in base_paths:
                base = stack.enter_context(contextlib.closing(open_checkpoint(base_path, search_path)))
                bases |= base.tensors
            file.bases = bases
        yield file.tensors


# --- budget checks -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCheck:
    """One budget with the measurement of the exact state that trials are compared with."""

    budget: Budget
    baseline: Baseline  # the quality to call with trials, which several budgets may share
    exact: Measurement
    limit: Limit

    @property
    def promise(self) -> Promise:
        """The promise that a file within the budget records."""
        return "resume-gap" if self.budget.trains else "quality-drop"

    @property
    def problem(self) -> str:
        """The reason why the budget cannot be measured, because it is below the noise floor; or ""."""
        metric, limit, noise = self.exact.metric, self.limit, self.baseline.noise
        if math.isnan(limit.max_drop):
            return (
                f"{metric} cannot be measured in steps: n more steps from the exact state gain less than the "
                f"noise floor ({noise:.3g}); train for more steps, average over more data, or limit the "
                "loss instead, as in 'resume<=0.2%'"
            )
        if noise <= limit.in_units(self.exact):
            return ""
        floor = self._format(noise / self.exact.value if limit.is_relative else noise)
        return (
            f"{metric} cannot be measured to its budget of {self._format(limit.max_drop)}: two runs from the "
            f"exact state differ by {floor} (the noise floor), so no file counts as within it; "
            "allow more, or average over more steps or data"
        )

    def doubt(self, judged: Judgement) -> str:
        """Return a note if there are too few examples to be sure of the mean; else an empty string."""
        limit, needed = self._format(self.limit.max_drop), ""
        if not judged.is_resolved and judged.standard_error is not None:
            if self.limit.max_drop:
                needed = f"; about {float(f'{judged.n_needed:.2g}'):,.0f} {judged.unit}s would decide"
            return (
                f"{judged.metric}: {judged.n_values} {judged.unit}s are too few to be sure, because the "
                f"standard error of the mean's change is {self._format(judged.standard_error)} and the limit "
                f"is {limit}{needed}"
            )
        rule = METRICS.get(judged.metric)
        is_one_number = rule is not None and rule.is_one_number
        if judged.n_values == 1 and self.promise == "quality-drop" and not is_one_number:
            return (
                f"{judged.metric} is a single number, so nobody can know whether it resolves a change of "
                f"{limit}; return the losses of all examples in one tensor [n_examples]"
            )
        return ""

    def _format(self, value: float) -> str:
        """Format a value in the unit of the limit."""
        return f"{100 * value:.3g}%" if self.limit.is_relative else f"{value:.3g}"

    def records(self, measured: Measurement, judged: Judgement, date: str) -> Iterator[QualityRecord]:
        """Yield the quality records of the budget for the file."""
        limit, exact = self.limit, self.exact
        record = QualityRecord(
            promise=self.promise,
            metric=measured.metric,
            max_drop=limit.max_drop,
            is_relative=limit.is_relative,
            lower_is_better=measured.lower_is_better,
            exact=exact.value,
            measured=measured.value,
            is_met=judged.is_met,
            date=date,
            data_digest=self.budget.data_digest,
        )
        yield record
        changes: dict[str, Any] = {"is_relative": False, "exact": 0.0}
        if judged.example_change is not None:
            unit = exact.value if limit.is_relative else 1.0
            changes |= {"metric": f"{measured.metric}{CHANGES}{measured.unit}", "lower_is_better": True}
            changes |= {"max_drop": judged.example_limit * unit, "measured": judged.example_change * unit}
            yield msgspec.structs.replace(record, **changes)
        if (gain_per_step := self.baseline.gain_per_step) is not None:
            lost = (measured.value - exact.value) / gain_per_step
            max_lost = limit.in_units(exact) / gain_per_step
            changes |= {"metric": STEPS_LOST, "max_drop": max_lost, "measured": lost}
            yield msgspec.structs.replace(record, **changes)


@dataclass(frozen=True, slots=True)
class Judge:
    """The checks of all budgets of a search."""

    checks: tuple[BudgetCheck, ...]  # one for each budget, at least one
    exact: Decoder  # of the exact tensors

    @classmethod
    def of(
        cls, budgets: Sequence[Budget], exact: Decoder, *, restores: int = 0, repeats: bool = False
    ) -> Judge:
        """Measure the exact tensors and build the checks of all budgets.

        Args:
            budgets: of the search.
            exact: decodes the exact tensors.
            restores: expected number of restarts, see `Budget.limit`.
            repeats: measure the exact tensors a second time, and require equal values.

        Raises:
            ConfigError: a quality raises, cannot be measured from, or is not deterministic; or budgets
                contradict each other.
        """
        baselines: dict[int, Baseline] = {}  # by quality
        for budget in budgets:
            if id(budget.quality) not in baselines:
                decoder = replace(exact, is_whole=budget.trains)
                baselines[id(budget.quality)] = _call(budget, prepare, budget.quality, decoder)
        measurements = [budget.read(baselines[id(budget.quality)].exact) for budget in budgets]
        check_consistent(budgets, measurements)
        checks = []
        for budget, measured in zip(budgets, measurements, strict=True):
            budget.check_exact(measured)
            baseline = baselines[id(budget.quality)]
            limit = budget.limit(baseline.gain_per_step, restores, is_mean=len(measured.values) == 1)
            checks.append(BudgetCheck(budget=budget, baseline=baseline, exact=measured, limit=limit))
        made = cls(tuple(checks), exact)
        if repeats:
            made._check_deterministic()
        return made

    def _check_deterministic(self) -> None:
        """Measure the exact tensors again, except by resumed training, whose noise is known."""
        repeatable = replace(self, checks=tuple(check for check in self.checks if not check.budget.trains))
        for check, repeated in zip(repeatable.checks, repeatable.measure(self.exact.tensors), strict=True):
            exact, used = check.exact, judge(check.limit, check.exact, repeated).used
            if used is None or used > MAX_REPEAT_DIFFERENCE:
                n, n_unequal = len(exact.values), int((repeated.values != exact.values).sum())
                differ = f", and {n_unequal} of {n} values differ" if n > 1 else ""
                raise ConfigError(
                    f"{check.budget.name}: the {exact.metric} of the same exact tensors is {exact.value:.8g} "
                    f"and then {repeated.value:.8g}{differ}; fix the data and the seed, and call model.eval()"
                )

    def measure(self, tensors: Mapping[str, TensorSource]) -> Measurements:
        """Evaluate the quality of each budget on decoded tensors; a shared quality is called once.

        Raises:
            ConfigError: a quality raises, or returns no number.
        """
        results: dict[int, Any] = {}
        for check in self.checks:
            quality = check.baseline.quality
            if id(quality) not in results:
                decoder = replace(self.exact, tensors=tensors, is_whole=check.budget.trains)
                results[id(quality)] = _call(check.budget, quality, decoder.state())
        return tuple(check.budget.read(results[id(check.baseline.quality)]) for check in self.checks)

    @property
    def unmeasurable(self) -> tuple[str, ...]:
        """Messages on budgets below their noise floor, which no file can be shown to meet."""
        return tuple(filter(None, (check.problem for check in self.checks)))

    def judgements(self, measurements: Measurements) -> tuple[Judgement, ...]:
        """Compare a trial with each budget.

        Raises:
            ConfigError: the values are not of the same examples as those of the exact state.
        """
        pairs = zip(self.checks, measurements, strict=True)
        return tuple(judge(check.limit, check.exact, measured) for check, measured in pairs)

    def doubts(self, judgements: Sequence[Judgement]) -> tuple[str, ...]:
        """Return notes on budgets with too few examples to be sure of the mean."""
        pairs = zip(self.checks, judgements, strict=True)
        return tuple(filter(None, (check.doubt(judged) for check, judged in pairs)))

    def records(self, measurements: Measurements) -> tuple[QualityRecord, ...]:
        """Return the quality records of the file; measurements must be finite."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        rows = zip(self.checks, measurements, self.judgements(measurements), strict=True)
        return tuple(
            record for check, measured, judged in rows for record in check.records(measured, judged, date)
        )
