"""Calls qualities with decoded tensors: the exact ones once, and those of each trial.

Most qualities are of a model and get its weights. Those that train on get everything in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from ckptz.codec.units import TensorSource
from ckptz.container.index import Promise
from ckptz.encoding.subject import MapFunction
from ckptz.errors import ConfigError
from ckptz.frameworks import framework
from ckptz.search.budget import Budget, check_consistent
from ckptz.search.judgement import Limit, Reading, judge
from ckptz.search.measures import Prepared, State, prepare

Readings = tuple[Reading, ...]
P = ParamSpec("P")
T = TypeVar("T")


def is_of_training(budget: Budget) -> bool:
    """Tell whether a budget is about going on with the training, and so needs optimizer state."""
    return bool(getattr(budget.quality, "trains", False))


def promise_of(budget: Budget) -> Promise:
    """Say what a file promises that keeps the budget."""
    return "resume-gap" if is_of_training(budget) else "quality-drop"


@dataclass(frozen=True, slots=True)
class Scope:
    """Names of the tensors that qualities are called with."""

    weights: tuple[str, ...]  # those of the model: parameters and buffers
    others: tuple[str, ...] = ()  # optimizer state, for qualities that train on
    # other names of these tensors, and what they are stored as
    tied: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""  # what begins names in the file, and not those that qualities see

    def names(self, budget: Budget) -> tuple[str, ...]:
        """Name the tensors that the budget's quality gets."""
        return (*self.weights, *self.others) if is_of_training(budget) else self.weights


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the state that one budget's quality is called with; see `ckptz.search.measures.Exact`."""

    tensors: Mapping[str, TensorSource]  # by name
    names: Sequence[str]  # those that it gets
    scope: Scope  # of all budgets
    run: MapFunction = map  # maps a function over chunks

    def state(self) -> State:
        """Decode a fresh copy."""
        state = state_of({name: self.tensors[name] for name in self.names}, self.run)
        state |= {n: state[stored] for n, stored in self.scope.tied.items() if stored in state}
        return {name.removeprefix(self.scope.prefix): tensor for name, tensor in state.items()}

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
        state[name], units = torch.allocate(source.dtype, shape)
        bounds = source.chunk_bounds()
        places += [(source, units, begin, end) for begin, end in bounds]

    def fill(place: tuple[TensorSource, Any, int, int]) -> None:
        source, units, begin, end = place
        units[begin:end] = source.units(begin, end)

    for _ in run(fill, places):
        pass
    return state


@dataclass(frozen=True, slots=True)
class Baseline:
    """The qualities of the exact tensors, that drops are measured from."""

    budgets: tuple[Budget, ...]  # with qualities that have seen the exact tensors
    exact: Readings  # values of the exact tensors, one a budget
    noise: tuple[float, ...]  # differences up to these say nothing, one a budget
    per_step: tuple[float | None, ...]  # what a step of training lowers each by, if that is known


def measure_exact(
    budgets: Sequence[Budget], scope: Scope, tensors: Mapping[str, TensorSource], run: MapFunction = map
) -> Baseline:
    """Show the exact tensors to every quality; one that several budgets share sees them once.

    `run` maps a function over chunks.

    Raises:
        ConfigError: a quality raises, or the exact tensors have no value that a drop can be measured from;
            or budgets contradict each other.
    """
    found: dict[int, Prepared] = {}
    for budget in budgets:
        if id(budget.quality) not in found:
            exact = Decoder(tensors, scope.names(budget), scope, run)
            found[id(budget.quality)] = _called(budget, prepare, budget.quality, exact)
    prepared = [found[id(budget.quality)] for budget in budgets]
    exact_values = tuple(b.read(one.exact) for b, one in zip(budgets, prepared, strict=True))
    check_consistent(budgets, exact_values)
    for budget, reading in zip(budgets, exact_values, strict=True):
        budget.check_exact(reading)
    ready = tuple(replace(b, quality=one.quality) for b, one in zip(budgets, prepared, strict=True))
    noise, per_step = tuple(one.noise for one in prepared), tuple(one.per_step for one in prepared)
    return Baseline(ready, exact_values, noise, per_step)


def measure_trial(
    budgets: Sequence[Budget], scope: Scope, tensors: Mapping[str, TensorSource], run: MapFunction = map
) -> Readings:
    """Ask each budget's quality about decoded tensors; one that several budgets share is called once.

    The arguments are those of `measure_exact`, with the budgets of its `Baseline`.

    Raises:
        ConfigError: a quality raises, or returns no number.
    """
    results: dict[int, Any] = {}
    for budget in budgets:
        quality = budget.quality
        if callable(quality) and id(quality) not in results:
            state = Decoder(tensors, scope.names(budget), scope, run).state()
            results[id(quality)] = _called(budget, quality, state)
    return tuple(budget.read(results[id(budget.quality)]) for budget in budgets)


REPEATABLE: Final = 0.01  # of a budget, which a second look at the exact tensors may use


def check_repeats(
    baseline: Baseline,
    limits: Sequence[Limit],
    scope: Scope,
    tensors: Mapping[str, TensorSource],
    run: MapFunction = map,
) -> None:
    """Measure the exact tensors once more; those that train on have measured their noise.

    The arguments are those of `measure_exact`, and what it gave.

    Raises:
        ConfigError: a quality gives other values than before.
    """
    every = zip(baseline.budgets, limits, baseline.exact, strict=True)
    rows = [row for row in every if not is_of_training(row[0])]
    again = measure_trial([budget for budget, _, _ in rows], scope, tensors, run)
    for (budget, limit, exact), found in zip(rows, again, strict=True):
        used = judge(limit, exact, found).used
        if used is None or used > REPEATABLE:
            unequal = int((found.values != exact.values).sum())
            of = f", and {unequal} of {len(exact.values)} values differ" if len(exact.values) > 1 else ""
            raise ConfigError(
                f"{budget.name}: the {exact.metric} of the same exact tensors is {exact.value:.8g} and then "
                f"{found.value:.8g}{of}; fix the data and the seed, and call model.eval()"
            )


def _called(budget: Budget, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a user's function; whatever it raises is told by the name of the budget."""
    try:
        return call(*args, **kwargs)
    except (MemoryError, ConfigError):
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        raise ConfigError(f"{budget.name}: the evaluation raised {what}; --debug shows where") from error
