"""Budgets of quality, the options of a search, and its report.

A budget limits how much of a quality a file may lose. If an evaluation returns the loss of each example, the
losses of a trial and of the exact tensors are compared example by example, and the budget limits two numbers:

    mean change          of the mean, in either direction: at most the budget
    per-example change   half the mean square of the changes of single examples: at most EXAMPLE_FACTOR
                         times the budget. With few examples the limit falls, down to the budget itself

For a relative budget both are shares of the exact mean. In the mean over few examples, changes cancel by
chance, so it cannot tell a good file from a bad one; their squares do not cancel. A file whose measured
change exceeds its limit is refused, unless the budget has `allow_unsure`. For losses in nats, small changes
and a calibrated model, the per-example change is about the Kullback-Leibler divergence from the exact model;
for right and wrong answers it is half the share that changed.

An evaluation may return sums over several examples with their counts. The change of a sum then counts as
that many independent changes, which is about right for the tokens of a text. Means over texts of different
lengths would make the per-example change too small, as changes cancel within a text.
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
from ckptz.search.measures import (
    ANSWER,
    METRICS,
    RESUME,
    ComparingQuality,
    Quality,
    function_digest,
    name_of,
    parse_values,
    unit_of,
)
from ckptz.search.spaces import DEFAULT_METHOD, CubeSpace, space_of
from ckptz.words import Report, finite_or_none

SMALLEST_RELATIVE: Final = 1e-3  # a relative change of a smaller mean means nothing
# Of the metrics that a quality may return; a resumed loss is measured by a `ResumeProbe` only.
IS_LOWER_BETTER: Final[Mapping[str, bool]] = {
    name: rule.lower_is_better for name, rule in METRICS.items() if name != RESUME
}
EXAMPLE_FACTOR: Final = 2.0  # per-example limit over the budget; a choice, see docs/search.md
MAX_ERROR: Final = 0.5  # of the budget: with a larger standard error the mean is decided by chance
# At most this many restarts share the per-example limit: training undoes most of a loss (docs/search.md).
MAX_RESTART_DIVISOR: Final = 3
SIGNIFICANCE: Final = 3.0  # standard errors beyond the budget that chance does not explain


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The values of a metric on one state: one for each example, or a single mean."""

    metric: str
    values: Reals  # [n]; sums if there are counts
    lower_is_better: bool
    counts: Reals | None = None  # number of examples in each sum [n]
    unit: str = ANSWER  # what one example is

    @property
    def value(self) -> float:
        """The mean over all examples."""
        return float(self.values.sum() / self.n_examples)

    @property
    def n_examples(self) -> float:
        """The number of examples in all sums."""
        return float(len(self.values) if self.counts is None else self.counts.sum())


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest allowed change of a mean: a share of the exact mean, or a difference."""

    max_drop: float
    is_relative: bool
    restart_divisor: int = 1  # divides the limit of the per-example change
    allow_unsure: bool = False  # see Budget

    def in_units(self, exact: Measurement) -> float:
        """Return the limit in the unit of the metric."""
        return self.max_drop * exact.value if self.is_relative else self.max_drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The comparison of one trial with one budget.

    Attributes:
        metric: what was measured.
        unit: what one example is, such as a token.
        n_values: number of values; a single one has no standard error.
        mean_limit: the largest change of the mean.
        is_relative: `mean_limit`, `mean_change`, `standard_error` and `example_change` are shares of the
            exact mean.
        mean_change: change of the mean; above 0 is worse. None if a value is not finite.
        standard_error: of `mean_change`, or None.
        example_change: half the mean square of the changes of single examples, or None.
        restart_divisor: number of restarts that share the limit of `example_change`.
        used: share of the budget that is used, at most 1 if it is kept. None if not finite.
    """

    metric: str
    unit: str
    n_values: int
    mean_limit: float
    is_relative: bool
    mean_change: float | None = None
    standard_error: float | None = None
    example_change: float | None = None
    restart_divisor: int = 1
    used: float | None = None

    @property
    def example_limit(self) -> float:
        """The largest per-example change within the budget."""
        return _example_limit(self.mean_limit, self.standard_error or 0.0) / self.restart_divisor

    @property
    def is_met(self) -> bool:
        """True if the trial is within the budget."""
        return self.used is not None and self.used <= 1

    @property
    def is_resolved(self) -> bool:
        """True if the mean decides: its standard error is at most half the budget, or unknown."""
        return self.standard_error is None or self.standard_error <= MAX_ERROR * self.mean_limit

    @property
    def n_needed(self) -> float:
        """The number of values with which the mean would decide; NaN if unknown."""
        if self.standard_error is None or not self.mean_limit:
            return math.nan
        return self.n_values * (self.standard_error / (MAX_ERROR * self.mean_limit)) ** 2


def judge(limit: Limit, exact: Measurement, measured: Measurement) -> Judgement:
    """Compare a trial with a budget.

    Args:
        limit: of the budget.
        exact: values of the exact state; all finite.
        measured: values of the trial, of the same examples.

    Raises:
        ConfigError: the values are not of the same examples.
    """
    _check_same_examples(exact, measured)
    scale, error, squares = exact.n_examples * (exact.value if limit.is_relative else 1.0), 0.0, 0.0
    with np.errstate(all="ignore"):  # an overflow is not finite, and exceeds the budget
        worse = measured.values - exact.values if exact.lower_is_better else exact.values - measured.values
        change = float(worse.sum() / scale)
        if (n := len(worse)) > 1:
            counts = 1.0 if exact.counts is None else exact.counts
            scatter = np.square(worse - counts * (worse.sum() / exact.n_examples)).sum() * n / (n - 1)
            error, squares = float(np.sqrt(scatter) / scale), float(np.square(worse).sum() / 2 / scale)
    return Judgement(
        metric=exact.metric,
        unit=exact.unit,
        n_values=n,
        mean_limit=limit.max_drop,
        is_relative=limit.is_relative,
        mean_change=finite_or_none(change),
        standard_error=finite_or_none(error) if n > 1 else None,
        example_change=finite_or_none(squares) if n > 1 else None,
        restart_divisor=limit.restart_divisor,
        used=finite_or_none(share_used(change, error, squares, limit)),
    )


def share_used(mean_change: float, error: float, example_change: float, limit: Limit) -> float:
    """Return the share of a budget that a trial uses: the larger of its two numbers over their limits.

    Args:
        mean_change: change of the mean, in the unit of the limit.
        error: standard error of `mean_change`.
        example_change: half the mean square of the changes of single examples.
        limit: of the budget.

    Returns:
        At most 1 within the budget; infinite if a change is not finite.
    """
    if not (math.isfinite(mean_change) and math.isfinite(example_change)):
        return math.inf
    error, mean_change, mean_limit = error if math.isfinite(error) else 0.0, abs(mean_change), limit.max_drop
    if limit.allow_unsure and error > MAX_ERROR * mean_limit:
        mean_change = max(mean_change - SIGNIFICANCE * error, 0.0)
    example_limit = _example_limit(mean_limit, error) / limit.restart_divisor
    return max(_ratio(mean_change, mean_limit), _ratio(example_change, example_limit))


def _example_limit(mean_limit: float, error: float) -> float:
    """Return the limit of the per-example change for a standard error of the mean.

    With few examples it falls to `mean_limit`: the per-example change then also stands for the change of the
    mean, which is about as large. It falls continuously, so that a search cannot gain by a larger error.
    """
    return mean_limit * max(EXAMPLE_FACTOR * min(_ratio(MAX_ERROR * mean_limit, error), 1.0), 1.0)


def used_by_examples(judged: Judgement) -> float:
    """Return the share of a budget that the per-example change uses; infinite if it is unknown."""
    return math.inf if judged.example_change is None else _ratio(judged.example_change, judged.example_limit)


def _ratio(value: float, limit: float) -> float:
    if limit:
        return value / limit
    return math.inf if value else 0.0


def _check_same_examples(exact: Measurement, measured: Measurement) -> None:
    n_exact, n_measured = len(exact.values), len(measured.values)
    what = f"{exact.metric}: the evaluation returned"
    remedy = "return those of the same examples in the same order each time"
    if n_exact != n_measured:
        raise ConfigError(
            f"{what} {n_measured} values for a trial and {n_exact} for the exact tensors; {remedy}"
        )
    counts = [np.ones(n_exact) if m.counts is None else m.counts for m in (exact, measured)]
    if len(unequal := np.flatnonzero(counts[0] != counts[1])):
        i = int(unequal[0])
        raise ConfigError(
            f"{what} a sum over {counts[1][i]:g} at index {i} for a trial and over {counts[0][i]:g} for the "
            f"exact tensors; {remedy}"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest loss of quality that a lossy checkpoint may have.

    A file whose measured change exceeds its limit is refused: the file is written without loss, and the exit
    code is 6.

    Attributes:
        quality: a function of a state (name -> CPU torch tensor, which it may change) that builds its own
            model and returns the loss of each example [n_examples] (a torch tensor or an array), always of
            the same examples in the same order; or 1 and 0 for right and wrong answers. It may return their
            mean instead, which is less reliable. It may return a dict with one of these as "loss" or
            "accuracy"; with "counts" [n_sums] the values are sums over that many examples each. Its
            attributes `metric` (name of the value), `unit` (what an example is, such as "token") and
            `data_digest` (a string, or a callable that returns one) are recorded in the file. An `Agreement`
            or a `ResumeProbe` compares with the exact state.
        max_drop: largest change of the mean, for better or worse: a share of the exact mean if `relative`,
            which must then be above 0. The per-example change, half the mean square of the changes of single
            examples, may be twice that; with few examples less, down to `max_drop`.
        relative: False for an absolute difference, which means near zero require.
        lower_is_better: direction of a metric other than "loss", "accuracy", "kl" and "top1".
        metric: key of the value if the quality returns a dict; for plain values "loss", "accuracy" or the
            name of the quality.
        in_steps: `max_drop` is a number of training steps by which a restore may set the run back; for a
            `ResumeProbe` only.
        allow_unsure: if the standard error of the mean exceeds half the limit, accept a file by its
            per-example change alone, even if its measured mean exceeds the limit by up to three standard
            errors.

    Example:
        >>> from ckptz import Budget
        >>> Budget(lambda state: float(state["weight"].std()), 0.01).max_drop
        0.01
    """

    quality: Quality | ComparingQuality
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
        if self.in_steps and not self.trains:
            raise ConfigError(f"only a ResumeProbe measures steps of training, got {self.quality!r}")

    def limit(self, gain_per_step: float | None, restores: int = 0, *, is_mean: bool = False) -> Limit:
        """Return the limit of one file, in units of the metric; NaN for steps that cannot be measured.

        Args:
            gain_per_step: by how much one step of training lowers the metric, or None.
            restores: expected number of restarts. Losses of resumed training add up, so all restarts share
                such a budget. Other losses are undone in part by training, so at most
                `MAX_RESTART_DIVISOR` restarts share the per-example limit; means are not divided, because
                they move up and down by chance.
            is_mean: the quality returns a single mean, whose limit is divided instead.
        """
        divisor = max(restores if self.trains else min(restores, MAX_RESTART_DIVISOR), 1)
        if not (self.trains or is_mean):
            return Limit(self.max_drop, self.relative, divisor, self.allow_unsure)
        max_drop = self.max_drop / divisor
        if self.in_steps:
            return Limit(max_drop * (math.nan if gain_per_step is None else gain_per_step), False)
        return Limit(max_drop, self.relative)

    @property
    def trains(self) -> bool:
        """True if the quality measures resumed training and so needs the optimizer state."""
        return bool(getattr(self.quality, "trains", False))

    @property
    def data_digest(self) -> str | None:
        """A digest of the data that the quality is measured on."""
        return function_digest(self.quality)

    @property
    def name(self) -> str:
        """The quality's name in messages."""
        return name_of(self.quality)

    def read(self, result: Any) -> Measurement:
        """Convert the return value of the quality to a measurement.

        Raises:
            ConfigError: it contains no number, or no value of the budget's metric.
        """
        if not isinstance(result, Mapping):
            if self.metric is not None and self.metric not in (*IS_LOWER_BETTER, self.name):
                raise ConfigError(
                    f"{self.name} returned values without a name, but the budget is for {self.metric!r}; "
                    "write 'loss' or 'accuracy' (as in --budget 'loss<=1%'), or return a dict with "
                    f"{self.metric!r}"
                )
            return self._measurement(self.metric, result, None)
        keys = ["loss", "accuracy"] if self.lower_is_better else ["accuracy", "loss"]
        if self.metric is not None:
            keys = [self.metric]
        for key in keys:
            if key in result:
                return self._measurement(key, result[key], result.get("counts"))
        wanted = " or ".join(map(repr, sorted(keys, reverse=True)))
        metrics = ", ".join(sorted(map(repr, result))) or "nothing"
        raise ConfigError(
            f"{self.name} returned a dict without {wanted}; it has {metrics}: name one of these"
        )

    def _measurement(self, metric: str | None, returned: Any, counts: Any) -> Measurement:
        """Convert values and counts, if any; a `metric` without a rule has the direction of the budget."""
        values, n_in_sum = parse_values(returned, self.name), None
        if len(values) > 1 and counts is not None:  # beside a single number, "counts" has no special meaning
            n_in_sum = parse_values(counts, f"{self.name}, counts:")
            if len(n_in_sum) != len(values) or not (np.isfinite(n_in_sum) & (n_in_sum > 0)).all():
                raise ConfigError(
                    f"{self.name} returned {len(values)} sums and {len(n_in_sum)} counts, of which "
                    f"{int((n_in_sum > 0).sum())} are above 0; return one above 0 for each sum"
                )
        is_lower = IS_LOWER_BETTER.get(metric or "", self.lower_is_better)
        return Measurement(metric or self.name, values, is_lower, n_in_sum, unit_of(self.quality))

    def check_exact(self, exact: Measurement) -> None:
        """Require values of the exact state that changes can be measured from.

        Raises:
            ConfigError: a value is not finite, or the mean is too small for a relative budget.
        """
        n_bad = int((~np.isfinite(exact.values)).sum())
        if n_bad:
            where = "" if len(exact.values) == 1 else f" in {n_bad} of {len(exact.values)} values"
            bad = exact.values[~np.isfinite(exact.values)][0]
            raise ConfigError(f"{self.name}: the {exact.metric} of the exact tensors is {bad}{where}")
        if self.relative and not self.in_steps and exact.value < SMALLEST_RELATIVE:
            raise ConfigError(
                f"{self.name}: the {exact.metric} of the exact tensors is {exact.value:.3g}, and a relative "
                f"budget needs {SMALLEST_RELATIVE:g} or more; use an absolute one "
                f"(--budget '{exact.metric}<=0.01', in Python relative=False)"
            )


def check_consistent(budgets: Sequence[Budget], exact: Sequence[Measurement]) -> None:
    """Refuse budgets that contradict each other.

    Args:
        budgets: all budgets of a search.
        exact: the measurement of the exact state for each.

    Raises:
        ConfigError: two budgets of one metric have opposite directions or different limits.
    """
    for (a, a_exact), (b, b_exact) in itertools.combinations(zip(budgets, exact, strict=True), 2):
        if a.quality is not b.quality or a_exact.metric != b_exact.metric:
            continue
        what = f"{a.name}: two budgets of {a_exact.metric} contradict each other"
        if a_exact.lower_is_better != b_exact.lower_is_better:
            raise ConfigError(f"{what}: lower is better for one, higher for the other")
        a_unit, b_unit = (
            "in steps" if budget.in_steps else "relative" if budget.relative else "absolute"
            for budget in (a, b)
        )
        if a_unit == b_unit and a.max_drop != b.max_drop:
            low, high = sorted((a.max_drop, b.max_drop))
            raise ConfigError(f"{what}: {a_unit} limits of {low:g} and {high:g}; keep one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """One trial of a search: a configuration, its file size and its measured quality."""

    config: dict[str, Any]  # settings of the method
    strategy: str  # name of the strategy that proposed it
    predicted_bytes: int | None  # file size as predicted from histograms, or None
    n_bytes: int  # file size
    drop: float | None  # used share of the tightest budget, at most 1 if kept; None if not finite
    is_feasible: bool  # True if the trial is within all budgets
    values: tuple[float | None, ...]  # mean of the decoded tensors for each budget; None if not finite
    judgements: tuple[Judgement, ...]  # comparison with each budget
    seconds: float  # time to write and evaluate
    evaluation_seconds: float  # time to decode and evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Budgets and limits of a search.

    Attributes:
        budgets: at least one; a file must be within all of them.
        cubes: names of the cubes of settings to search, by default all of the method. kmeans has "magnitude"
            and "sensitivity", the two ways to prune; the second needs gradients.
        template: the method, with all settings that are not searched. Moments of a grid become lossy only
            under a budget of resumed training: no other budget measures their loss.
        parent: settings of the same method to start from; by default those that the base records.
        restores: expected number of restarts from such files; 0 if training never resumes from them. Up to
            three restarts share the per-example limit of a budget, as training undoes most of each loss; all
            restarts share a budget of resumed training. Weights are then rounded stochastically, so that
            training's updates are kept on average, and the base's grid or levels are tried first.
        max_evaluations: stop after this many and keep the best file. With 0, the parent's settings are used
            without a measurement, and the file promises nothing.
        on_trial: called with the report of each trial.
        on_begin: called with `(None, None)` before the exact tensors are measured, `(settings, None)` before
            a trial is written, and `(settings, n_bytes)` before its file is measured.
        is_dry_run: write no file.
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
        self._check_types()
        if not self.budgets:
            raise ConfigError("a search needs at least one budget")
        template, parent = self.template, self.parent
        space = space_of(template)
        if parent is not None and type(parent) is not type(template):
            raise ConfigError(f"a search for {template.name} cannot begin at settings of {parent.name}")
        cube_names = space.cube_names if isinstance(space, CubeSpace) else ()
        if set(self.cubes) - set(cube_names):
            raise ConfigError(f"cubes of {template.name} are {cube_names}, got {self.cubes}")
        check_int("restores", self.restores, 0)
        if self.max_evaluations is not None:
            check_int("max_evaluations", self.max_evaluations, 0)

    def _check_types(self) -> None:
        for name, cls in (("budgets", Budget), ("cubes", str)):
            values = getattr(self, name)
            if not (isinstance(values, tuple | list) and all(isinstance(value, cls) for value in values)):
                raise ConfigError(f"{name} must be a tuple of {cls.__name__}, got {values!r}")
        parent = self.template if self.parent is None else self.parent
        for name, method in (("template", self.template), ("parent", parent)):
            if not isinstance(method, Method):
                raise ConfigError(f"{name} must be settings such as ckptz.Grid(), got {method!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport(Report):
    """The result of a search: its trials, the chosen settings, and their quality."""

    method: str  # name of the method
    strategy: str  # name of the strategy that proposed the chosen or else the last settings
    is_met: bool | None = None  # False: no trial met the budgets, the file is lossless. None: not measured
    is_interrupted: bool = False  # stopped by Ctrl-C; the file is the best until then
    is_dry_run: bool = False  # nothing was written
    config: dict[str, Any] | None = None  # chosen settings, None for a lossless file
    metrics: tuple[str, ...] = ()  # name of the metric of each budget
    exact: tuple[float, ...] = ()  # mean of the exact tensors for each budget
    trials: tuple[TrialReport, ...] = ()  # in order
    n_predicted: int = 0  # number of configurations whose size was predicted
    noise: tuple[float, ...] = ()  # noise floor of each budget's metric, 0 if not measured
    unmeasurable: tuple[str, ...] = ()  # messages on budgets below their noise floor, which count as not met
    doubts: tuple[str, ...] = ()  # messages on budgets with too few examples
    quality: tuple[QualityRecord, ...] = ()  # quality records of the file
    seconds: float  # total time
    evaluation_seconds: float = 0.0  # time to decode and evaluate, the exact tensors included

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on an interruption, on unmeasurable budgets and on too few examples."""
        chosen = [trial for trial in self.trials if trial.is_feasible and trial.config == self.config]
        interruption = (
            f"interrupted after trial {len(self.trials)}; kept is the smallest file so far that keeps "
            f"the budget, of {trial.n_bytes:,} bytes, with {trial.drop:.0%} of it used"
            for trial in chosen
            if self.is_interrupted
        )
        return (*interruption, *self.unmeasurable, *self.doubts)


# --- settings from a report or a base -------------------------------------------------------------


def load_searched(path: Path) -> Method:
    """Read the settings that a search chose for the last file from the output of `ckptz compress --json`.

    Raises:
        ConfigError: the file is no such output, has no search, or has settings that no method knows.
    """
    try:
        document = strict_json(path.read_bytes(), "report")
        search = document["files"][-1]["search"]
        method, settings = search["method"], search["config"]
    except (CkptzError, KeyError, TypeError, IndexError) as error:
        what = error if isinstance(error, CkptzError) else "it contains no settings"
        remedy = "use a TOML file or the output of compress --eval --json"
        raise ConfigError(f"{path}: {what}; {remedy}") from None
    if settings is None:
        raise ConfigError(f"{path}: its search found no settings that keep the budget")
    if type(method) is not str or method not in METHODS:
        raise ConfigError(f"{path}: settings of a method that is not installed: {str(method)[:40]}")
    try:
        return config_of(method, settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_of(method: str, settings: Any) -> Method:
    """Make a configuration from the name of its method and its settings as plain values.

    Raises:
        msgspec.ValidationError: the method has no such setting.
        ConfigError: a value is out of range.
    """
    cls = METHODS[method]
    names = {field.name for field in fields(cls)}
    if isinstance(settings, dict) and (unknown := sorted(set(settings) - names)):
        raise msgspec.ValidationError(f"unknown setting {unknown[0]!r}")
    return msgspec.convert(settings, cls)


def recorded_in(bases: Mapping[str, TensorSource], template: Method) -> Method | None:
    """Return the settings recorded in a base, or None; settings not recorded are those of `template`."""
    records = [source.entry.lossy for source in bases.values() if isinstance(source, FrameSource)]
    return space_of(template).recorded(template, [record for record in records if record is not None])
