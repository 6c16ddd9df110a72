"""What a search is asked for, what it says of how it went, and plans: settings in a small JSON file.

A plan holds settings and nothing else: it never names code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from ckptz.errors import CkptzError, ConfigError, own_numbers
from ckptz.format.envelope import strict_json
from ckptz.format.index import QualityRecord
from ckptz.format.publish import publish
from ckptz.format.reader import FrameSource
from ckptz.format.sources import TensorSource
from ckptz.methods.method import Method, checked
from ckptz.methods.table import METHODS, REFERENCE
from ckptz.pages.words import Report
from ckptz.search.budget import Budget, Judgement

PLAN_VERSION: Final = 1


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
        restores: how often a run will restart from such files. From two on each may use half of a budget, as
            training undoes most of what is lost, but 1/restores of one that trains on. Weights are then
            rounded so that what training moves is kept on average, on the grid or the levels of the base as
            long as these keep the budget. 0 for files that are only looked at.
        max_evaluations: stop there and keep the best so far. With 0 the parent's settings are used as they
            are: nothing is measured, and the file promises nothing.
        on_trial: told of each trial.
        is_dry_run: write nothing.
    """

    budgets: tuple[Budget, ...]
    cubes: tuple[str, ...] = ()
    template: Method = REFERENCE
    parent: Method | None = None
    restores: int = 0
    max_evaluations: int | None = None
    on_trial: Callable[[TrialReport], None] = lambda trial: None
    is_dry_run: bool = False

    def __post_init__(self) -> None:
        own_numbers(self)
        self._check_kinds()
        if not self.budgets:
            raise ConfigError("a search needs a budget that its files keep")
        template, parent = self.template, self.parent
        if not (template.is_scalable or template.axes):
            raise ConfigError(f"the method {template.name} has no settings that a search can look for")
        if parent is not None and type(parent) is not type(template):
            raise ConfigError(f"a search for {template.name} cannot begin at settings of {parent.name}")
        if set(self.cubes) - set(known := self.template.cube_names):
            raise ConfigError(f"cubes of {self.template.name} are {known}, got {self.cubes}")
        if self.restores < 0:
            raise ConfigError(f"restores must be at least 0, got {self.restores}")
        if self.max_evaluations is not None and self.max_evaluations < 0:
            raise ConfigError(f"max_evaluations must be at least 0, got {self.max_evaluations}")

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


# --- plans --------------------------------------------------------------------------------------


def save_plan(path: Path, config: Method) -> None:
    """Write a configuration to a plan, a JSON file.

    Raises:
        OSError: the disk refused it.
    """
    document = {"ckptz_plan": PLAN_VERSION, "method": checked(config).name, "settings": asdict(config)}
    with publish(path) as sink:
        sink.write((json.dumps(document, indent=1) + "\n").encode())


def load_plan(path: Path) -> Method:
    """Read the configuration of a plan.

    Raises:
        ConfigError: not a plan, of a newer version, or with settings that no method has.
    """
    try:
        document = strict_json(path.read_bytes(), "plan")
        version, method, settings = (document[key] for key in ("ckptz_plan", "method", "settings"))
    except (CkptzError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a plan; --save-plan writes one") from None
    if version != PLAN_VERSION:
        raise ConfigError(f"{path}: a plan of another version than {PLAN_VERSION}, which this ckptz reads")
    if type(method) is not str or method not in METHODS:
        raise ConfigError(f"{path}: plans for a method that this ckptz does not have: {str(method)[:40]}")
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
    return template.recorded([record for record in records if record is not None])
