"""Budgets and limits that a search is given, and its report.

A budget is how much of a quality may be lost. An evaluation that returns the losses of its answers one by one
is judged pair by pair, by two numbers:

    change     of the mean, in either direction: at most the budget
    changes    half the mean square of the changes of single answers: at most ALLOWED times the budget, or
               less, down to the budget itself, the less the mean can tell as answers are too few

Both are shares of the exact mean where the budget is one. A mean over few answers cannot tell a good file
from a bad one, as changes of single answers cancel in it by chance; their squares do not cancel. A file whose
measured change exceeds its limit is refused all the same, unless the budget says `allow_unsure`. For losses
in nats, small changes and a calibrated model the second number is about the Kullback-Leibler divergence from
the exact model; of right and wrong answers it is half the share of those that changed.

Sums over several answers come with their counts, and both numbers are then by what is counted: the change of
a sum stands for changes that are independent of each other, as those of a text's tokens about are. A mean
over a piece cannot tell how long the piece was, and longer ones make the second number smaller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ckptz.codec.method import Method
from ckptz.codec.registry import METHODS
from ckptz.errors import CkptzError, ConfigError, check_int, coerce_numeric_fields
from ckptz.format.envelope import strict_json
from ckptz.format.index import QualityRecord
from ckptz.format.reader import FrameSource
from ckptz.format.sources import TensorSource
from ckptz.kernels.floats import Reals
from ckptz.search.measures import ANSWER, Comparing, Quality, digest_of, name_of, unit_of, values_of
from ckptz.search.spaces import DEFAULT_METHOD, CubeSpace, space_of
from ckptz.words import Report

SMALLEST_RELATIVE: Final = 1e-3  # a share of less than this says nothing
_IS_LOWER_BETTER: Final[Mapping[str, bool]] = {"loss": True, "accuracy": False, "kl": True, "top1": False}
ALLOWED: Final = 2.0  # of the budget, for half the mean square: see docs/search.md
RESOLVED: Final = 0.5  # of the budget: with a larger standard error the mean does not decide
# Restarts that share a budget at most: training undoes most of a loss before the next; see docs/search.md.
HEALED: Final = 3
SURE: Final = 3.0  # standard errors: a change beyond the budget by more is no chance, however few the answers


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The measured values of a metric: one for each answer, or a single one."""

    metric: str
    values: Reals  # [n]; sums where there are counts
    lower_is_better: bool
    counts: Reals | None = None  # what each value sums up [n]; None for one each
    unit: str = ANSWER  # what one value is, or what the counts count

    @property
    def value(self) -> float:
        """The mean over all examples."""
        return float(self.values.sum() / self.total)

    @property
    def total(self) -> float:
        """The number of examples in all."""
        return float(len(self.values) if self.counts is None else self.counts.sum())


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest change of a value: a share of the exact one, or a difference."""

    max_drop: float
    is_relative: bool
    sharing: int = 1  # what the limit of single changes is divided by
    allow_unsure: bool = False  # see Budget

    def in_units(self, exact: Measurement) -> float:
        """Return the limit in the unit of the value."""
        return self.max_drop * exact.value if self.is_relative else self.max_drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The part of one budget that one trial used.

    Attributes:
        metric: what was measured.
        unit: what one value is, such as a token.
        n_values: how many values there were; of a single one nothing is known of chance.
        allowed: the largest change of the mean.
        is_relative: `allowed`, `change`, `error` and `changes` are shares of the exact mean.
        change: of the mean; above 0 is worse. None where a value is not finite.
        error: the standard error of `change`, or None.
        changes: half the mean square of the changes of single values, or None.
        sharing: restarts that share what is allowed of `changes`.
        used: share of the budget that is used; at most 1 keeps it. None where it is not finite.
    """

    metric: str
    unit: str
    n_values: int
    allowed: float
    is_relative: bool
    change: float | None = None
    error: float | None = None
    changes: float | None = None
    sharing: int = 1
    used: float | None = None

    @property
    def most_changes(self) -> float:
        """The largest per-example change within the budget."""
        return _most_changes(self.allowed, self.error or 0.0) / self.sharing

    @property
    def is_kept(self) -> bool:
        """True if the budget is kept."""
        return self.used is not None and self.used <= 1

    @property
    def is_resolved(self) -> bool:
        """True if the mean decides: its standard error is at most half the budget, or unknown."""
        return self.error is None or self.error <= RESOLVED * self.allowed

    @property
    def n_wanted(self) -> float:
        """The number of values at which the mean would decide; NaN if unknown."""
        if self.error is None or not self.allowed:
            return math.nan
        return self.n_values * (self.error / (RESOLVED * self.allowed)) ** 2


def judge(limit: Limit, exact: Measurement, measured: Measurement) -> Judgement:
    """Compare the values of a trial with those of the exact state, which are finite.

    Raises:
        ConfigError: they are not of the same answers.
    """
    _check_same_answers(exact, measured)
    scale, error, changes = exact.total * (exact.value if limit.is_relative else 1.0), 0.0, 0.0
    with np.errstate(all="ignore"):  # what overflows is not finite, and so not kept
        worse = measured.values - exact.values if exact.lower_is_better else exact.values - measured.values
        change = float(worse.sum() / scale)
        if (n := len(worse)) > 1:
            counts = 1.0 if exact.counts is None else exact.counts
            scatter = np.square(worse - counts * (worse.sum() / exact.total)).sum() * n / (n - 1)
            error, changes = float(np.sqrt(scatter) / scale), float(np.square(worse).sum() / 2 / scale)
    return Judgement(
        metric=exact.metric,
        unit=exact.unit,
        n_values=n,
        allowed=limit.max_drop,
        is_relative=limit.is_relative,
        change=_finite(change),
        error=_finite(error) if n > 1 else None,
        changes=_finite(changes) if n > 1 else None,
        sharing=limit.sharing,
        used=_finite(share_used(change, error, changes, limit)),
    )


def share_used(change: float, error: float, changes: float, limit: Limit) -> float:
    """Return the larger share of a budget that mean and per-example change use; not finite if one is not."""
    if not (math.isfinite(change) and math.isfinite(changes)):
        return math.inf
    change, error, allowed = abs(change), error if math.isfinite(error) else 0.0, limit.max_drop
    if limit.allow_unsure and error > RESOLVED * allowed:
        change = max(change - SURE * error, 0.0)
    return max(_share(change, allowed), _share(changes, _most_changes(allowed, error) / limit.sharing))


def _most_changes(allowed: float, error: float) -> float:
    """Limit the second number, by the standard error of the mean.

    Alone it stands for the mean: the loss that it lets one expect is about it. There is no jump where the
    mean begins to decide: a search would take files whose error happens to be on the better side.
    """
    return allowed * max(ALLOWED * min(_share(RESOLVED * allowed, error), 1.0), 1.0)


def used_by_changes(judged: Judgement) -> float:
    """Return the share of a budget that the per-example change uses; infinite if it is unknown."""
    return math.inf if judged.changes is None else _share(judged.changes, judged.most_changes)


def _share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _check_same_answers(exact: Measurement, measured: Measurement) -> None:
    """Refuse values that cannot be compared one by one."""
    n_exact, n_found = len(exact.values), len(measured.values)
    what = f"{exact.metric}: the evaluation returned"
    if n_exact != n_found:
        raise ConfigError(
            f"{what} {n_found} values for a trial and {n_exact} for the exact tensors; return those of the "
            "same answers in the same order each time"
        )
    counts = [np.ones(n_exact) if one.counts is None else one.counts for one in (exact, measured)]
    if len(unequal := np.flatnonzero(counts[0] != counts[1])):
        i = int(unequal[0])
        raise ConfigError(
            f"{what} a sum over {counts[1][i]:g} at place {i} for a trial and over {counts[0][i]:g} for the "
            "exact tensors; return those of the same answers in the same order each time"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """The part of a quality that a lossy checkpoint may lose.

    A file whose measured change exceeds its limit is refused: the file is written without loss, and the exit
    code is 6.

    Attributes:
        quality: called with a state (name -> CPU torch tensor, the caller's to change) and returns the loss
            of each answer [n_answers] (a torch tensor or an array), always of the same answers in the same
            order, or 1 and 0 for right and wrong ones. Or their mean, a number, of which less can be told.
            Or a dict with one of these as "loss" or "accuracy"; with "counts" [n_sums] beside them they are
            sums over so many answers each. It builds its own model. Attributes `metric` (what to call the
            value), `unit` (what an answer is, such as "token") and `data_digest` (a string, or a callable
            that returns one) go into the file. Or an `Agreement` or a `ResumeProbe`, which compare with the
            exact state.
        max_drop: how far the mean may move, for better or worse: a share of the exact state's own if
            `relative`, which must be above 0. Half the mean square of the changes of single answers may be
            twice that, and less where the answers are too few for their mean to decide: as much, in the end.
        relative: False for an absolute difference, which values near zero require.
        lower_is_better: of a number; "loss", "accuracy", "kl" and "top1" know it themselves.
        metric: which value of the dict counts, where the quality returns several; of a number, "loss",
            "accuracy" or the quality's own name.
        in_steps: `max_drop` counts steps of training instead, by which a restore may set the run back; of a
            `ResumeProbe` only.
        allow_unsure: where the standard error of the mean exceeds half the limit, accept a file by its
            per-example change alone, although its measured change exceeds the limit by up to three standard
            errors.

    Example:
        >>> from ckptz import Budget
        >>> Budget(lambda state: float(state["weight"].std()), 0.01).max_drop
        0.01
    """

    quality: Quality | Comparing
    max_drop: float = 0.005
    relative: bool = True
    lower_is_better: bool = True
    metric: str | None = None
    in_steps: bool = False
    allow_unsure: bool = False

    def __post_init__(self) -> None:
        if not (callable(self.quality) or hasattr(self.quality, "against")):
            raise ConfigError(f"a budget's quality must be callable, got {self.quality!r}")
        coerce_numeric_fields(self)
        if not 0 <= self.max_drop < math.inf:
            raise ConfigError(f"max_drop must be a number from 0, got {self.max_drop!r}")
        if self.in_steps and not getattr(self.quality, "trains", False):
            raise ConfigError(f"only a ResumeProbe measures steps of training, got {self.quality!r}")

    def limit(self, per_step: float | None, restores: int = 0, *, is_one: bool = False) -> Limit:
        """Return the limit for one restore, in units of the value; NaN for steps that cannot be measured.

        Args:
            per_step: what a step of training lowers the value by, or None.
            restores: how many there will be. Of a quality that trains on, what they lose adds up. What is
                lost at once, training undoes in part before the next, so that a few share a budget, and it
                is single changes that say how much that is: means move up and down by chance.
            is_one: the value is a number without single changes, whose mean is divided instead.
        """
        trains = getattr(self.quality, "trains", False)
        sharing = max(restores if trains else min(restores, HEALED), 1)
        if not (trains or is_one):
            return Limit(self.max_drop, self.relative, sharing, self.allow_unsure)
        most = self.max_drop / sharing
        if self.in_steps:
            return Limit(most * (math.nan if per_step is None else per_step), False)
        return Limit(most, self.relative)

    @property
    def data_digest(self) -> str | None:
        """A digest of the data that the quality is measured on."""
        return digest_of(self.quality)

    @property
    def name(self) -> str:
        """The quality's name in messages."""
        return name_of(self.quality)

    def read(self, result: Any) -> Measurement:
        """Read the value in what the quality returned.

        Raises:
            ConfigError: there is no number in it, or none of the budget's metric.
        """
        if not isinstance(result, Mapping):
            self._check_is_of_number()
            known = self.lower_is_better if self.metric is None else self._is_lower_better(self.metric)
            return self._measurement(self.metric or self.name, result, None, known)
        keys = ["loss", "accuracy"] if self.lower_is_better else ["accuracy", "loss"]
        if self.metric is not None:
            keys = [self.metric]
        for key in keys:
            if key in result:
                return self._measurement(key, result[key], result.get("counts"), self._is_lower_better(key))
        wanted = " or ".join(map(repr, sorted(keys, reverse=True)))
        metrics = ", ".join(sorted(map(repr, result))) or "nothing"
        raise ConfigError(
            f"{self.name} returned a dict without {wanted}; it has {metrics}: name one of these"
        )

    def _measurement(self, metric: str, given: Any, counts: Any, lower_is_better: bool) -> Measurement:
        values = values_of(given, self.name)
        if len(values) == 1 or counts is None:  # of a number, "counts" is an entry like any other
            return Measurement(metric, values, lower_is_better, None, unit_of(self.quality))
        given_counts = values_of(counts, f"{self.name}, counts:")
        if len(given_counts) != len(values) or not (np.isfinite(given_counts) & (given_counts > 0)).all():
            raise ConfigError(
                f"{self.name} returned {len(values)} sums and {len(given_counts)} counts, of which "
                f"{int((given_counts > 0).sum())} are above 0; give one above 0 for each sum"
            )
        return Measurement(metric, values, lower_is_better, given_counts, unit_of(self.quality))

    def _check_is_of_number(self) -> None:
        """Refuse a metric that a plain number cannot be, such as a misspelt one."""
        if self.metric is not None and self.metric not in (*_IS_LOWER_BETTER, self.name):
            raise ConfigError(
                f"{self.name} returned values without a name, and the budget is about {self.metric!r}; write "
                f"'loss' or 'accuracy' (as in --budget 'loss<=1%'), or return a dict with {self.metric!r}"
            )

    def _is_lower_better(self, metric: str) -> bool:
        return _IS_LOWER_BETTER.get(metric, self.lower_is_better)

    def check_exact(self, exact: Measurement) -> None:
        """Refuse values of the exact state that no drop can be measured from.

        Raises:
            ConfigError: not finite, or not above zero for a relative drop.
        """
        n_bad = int((~np.isfinite(exact.values)).sum())
        if n_bad:
            where = "" if len(exact.values) == 1 else f" in {n_bad} of {len(exact.values)} values"
            bad = exact.values[~np.isfinite(exact.values)][0]
            raise ConfigError(f"{self.name}: the {exact.metric} of the exact tensors is {bad}{where}")
        if self.relative and not self.in_steps and exact.value < SMALLEST_RELATIVE:
            raise ConfigError(
                f"{self.name}: the {exact.metric} of the exact tensors is {exact.value:.3g}, and a relative "
                f"budget needs {SMALLEST_RELATIVE:g} or more; give an absolute one (relative=False, "
                "--max-drop 0.01 without %)"
            )


def check_consistent(budgets: Sequence[Budget], exact: Sequence[Measurement]) -> None:
    """Refuse budgets that contradict one another; `exact` has the value that each of them is about.

    Raises:
        ConfigError: one value is to be low and high, or has two limits of one kind.
    """
    for (one, value), (other, same) in itertools.combinations(zip(budgets, exact, strict=True), 2):
        if one.quality is not other.quality or value.metric != same.metric:
            continue
        what = f"{one.name}: two budgets of {value.metric} contradict each other"
        if value.lower_is_better != same.lower_is_better:
            raise ConfigError(f"{what}: lower is better for one, higher for the other")
        kind, of_other = (
            "in steps" if b.in_steps else "relative" if b.relative else "absolute" for b in (one, other)
        )
        if kind == of_other and one.max_drop != other.max_drop:
            low, high = sorted((one.max_drop, other.max_drop))
            raise ConfigError(f"{what}: {kind} limits of {low:g} and {high:g}; keep one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """One configuration that was tried."""

    config: dict[str, Any]  # its settings
    strategy: str  # what proposed it
    predicted_bytes: int | None  # size expected before anything was encoded, if it was predicted
    n_bytes: int  # size of its file
    # share of the tightest budget that is used; at most 1 keeps it, None if a value is not finite
    drop: float | None
    is_feasible: bool  # whether all budgets are kept
    values: tuple[float | None, ...]  # means, one a budget, of the decoded tensors; None where not finite
    judgements: tuple[Judgement, ...]  # how they stand to each budget
    seconds: float  # taken to write and to measure it
    evaluation_seconds: float  # taken to decode and evaluate alone


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Budgets and limits of a search.

    Attributes:
        budgets: at least one; all of them must be kept.
        cubes: names of the cubes of settings to look through, by default all of the method. kmeans has
            "magnitude" and "sensitivity", what is pruned by; the second needs gradients.
        template: the method, and everything that is not searched. A grid's moments become lossy only under a
            budget that trains on: no other would notice.
        parent: where the search begins, of the template's method; by default what the base records.
        restores: how often a run will restart from such files. They share what a budget allows of single
            changes, three of them at most, as training undoes most of what is lost before the next; all of
            them share a budget that trains on. Weights are then rounded so that what training moves is kept
            on average, on the grid or the levels of the base as long as these keep the budget. 0 for files
            that are only looked at.
        max_evaluations: stop there and keep the best so far. With 0 the parent's settings are used as they
            are: nothing is measured, and the file promises nothing.
        on_trial: told of each trial.
        on_begin: told of what begins: `None, None` of measuring the exact tensors, `settings, None` of
            writing a trial, and `settings, n_bytes` of measuring its file.
        is_dry_run: write nothing.
    """

    budgets: tuple[Budget, ...]
    cubes: tuple[str, ...] = ()
    template: Method = field(default_factory=DEFAULT_METHOD)
    parent: Method | None = None
    restores: int = 0
    max_evaluations: int | None = None
    on_trial: Callable[[TrialReport], None] = lambda trial: None
    on_begin: Callable[[Mapping[str, Any] | None, int | None], None] = lambda config, n_bytes: None
    is_dry_run: bool = False

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)
        self._check_kinds()
        if not self.budgets:
            raise ConfigError("a search needs a budget that its files keep")
        template, parent = self.template, self.parent
        space = space_of(template)
        if parent is not None and type(parent) is not type(template):
            raise ConfigError(f"a search for {template.name} cannot begin at settings of {parent.name}")
        known = space.cube_names if isinstance(space, CubeSpace) else ()
        if set(self.cubes) - set(known):
            raise ConfigError(f"cubes of {template.name} are {known}, got {self.cubes}")
        check_int("restores", self.restores, 0)
        if self.max_evaluations is not None:
            check_int("max_evaluations", self.max_evaluations, 0)

    def _check_kinds(self) -> None:
        for name, kind in (("budgets", Budget), ("cubes", str)):
            given = getattr(self, name)
            if not (isinstance(given, tuple | list) and all(isinstance(one, kind) for one in given)):
                raise ConfigError(f"{name} must be a tuple of {kind.__name__}, got {given!r}")
        parent = self.template if self.parent is None else self.parent
        for name, method in (("template", self.template), ("parent", parent)):
            if not isinstance(method, Method):
                raise ConfigError(f"{name} must be settings such as ckptz.Grid(), got {method!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport(Report):
    """The course of a search: trials, the winner, and its quality."""

    method: str  # name of the method of the settings
    strategy: str  # what proposed the winner, or the last that was tried
    # whether the budgets are kept; if not, the file is lossless. None if that was not measured.
    is_met: bool | None = None
    is_interrupted: bool = False  # stopped by Ctrl-C; the file is the best that was found until then
    is_dry_run: bool = False  # nothing was written
    config: dict[str, Any] | None = None  # settings of the winner, None for a lossless file
    metrics: tuple[str, ...] = ()  # what was measured, one a budget
    exact: tuple[float, ...] = ()  # its values for the exact tensors
    trials: tuple[TrialReport, ...] = ()  # in order
    n_predicted: int = 0  # configurations whose size was predicted
    # differences of each budget's value that say nothing, 0 where that was not measured
    noise: tuple[float, ...] = ()
    unmeasurable: tuple[str, ...] = ()  # what to tell of budgets below their noise, which count as not kept
    doubts: tuple[str, ...] = ()  # what to tell of budgets whose mean was measured on too few answers
    quality: tuple[QualityRecord, ...] = ()  # what the file records of its budgets
    seconds: float  # taken in all
    # taken to decode and evaluate, in all processes, the exact tensors included
    evaluation_seconds: float = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on how the search went and on what its evaluations can tell."""
        kept = [trial for trial in self.trials if trial.is_feasible and trial.config == self.config]
        interruption = (
            f"interrupted after {len(self.trials)} evaluations; kept is the smallest file of them that keeps "
            f"the budget, of {trial.n_bytes:,} bytes, with {trial.drop:.0%} of it used"
            for trial in kept
            if self.is_interrupted
        )
        return (*interruption, *self.unmeasurable, *self.doubts)


# --- settings that a search found -----------------------------------------------------------------


def load_found(path: Path) -> Method:
    """Read the settings that the search of the last file found, from what `ckptz compress --json` printed.

    Raises:
        ConfigError: no such object, no search in it, or settings that no method has.
    """
    try:
        document = strict_json(path.read_bytes(), "report")
        search = document["files"][-1]["search"]
        method, settings = search["method"], search["config"]
    except (CkptzError, KeyError, TypeError, IndexError):
        what = "no settings in it; give a TOML file, or what compress --eval --json printed"
        raise ConfigError(f"{path}: {what}") from None
    if settings is None:
        raise ConfigError(f"{path}: its search found no settings that keep the budget")
    if type(method) is not str or method not in METHODS:
        raise ConfigError(f"{path}: settings of a method that this ckptz does not have: {str(method)[:40]}")
    try:
        return config_of(method, settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_of(method: str, settings: Any) -> Method:
    """Make a configuration from the name of its method and its settings as plain values.

    Raises:
        msgspec.ValidationError: settings that the method does not have.
        ConfigError: values out of range.
    """
    kind = METHODS[method]
    known = {one.name for one in fields(kind)}
    if isinstance(settings, dict) and (unknown := sorted(set(settings) - known)):
        raise msgspec.ValidationError(f"unknown setting {unknown[0]!r}")
    return msgspec.convert(settings, kind)


def recorded_in(bases: Mapping[str, TensorSource], template: Method) -> Method | None:
    """Find the settings that the tensors of a base record; `template` has what they do not tell."""
    records = [source.entry.lossy for source in bases.values() if isinstance(source, FrameSource)]
    return space_of(template).recorded(template, [record for record in records if record is not None])
