"""Search for the settings of a lossy save within a budget, and calibrations for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import CALIBRATION, Method
from ckptz.errors import ConfigError, FormatError, MissingBaseError
from ckptz.guidance.side_information import Calibrated, read_inputs
from ckptz.hooks.calibration import Calibration
from ckptz.parallel import Workers
from ckptz.run.folder import StepStore
from ckptz.run.step_files import OWNER, ChainRule, FileKind, StepFile
from ckptz.run.writer import found_base
from ckptz.search.budget import Budget, SearchOptions, SearchReport, config_of, recorded_in
from ckptz.search.run import SearchRun, search_and_write
from ckptz.store.resolve import Checkpoint, base_ref
from ckptz.training.files import LossSettings, StepState, after, id_of, remembering
from ckptz.training.state import model_state

# A calibration, a function that returns one, or the path of its file.
CalibrationLike: TypeAlias = Calibration | Callable[[], Calibration] | str | os.PathLike[str]


def calibrated(calibration: CalibrationLike | None, model: nn.Module) -> Calibrated | None:
    """Convert a user's calibration for encoders: a callable is called, and sums in memory are copied.

    Raises:
        CalibrationError: no inputs were recorded, or a tensor does not fit the model; the message names it.
        ConfigError: the callable does not return a calibration.
        FileNotFoundError: no such file.
    """
    if calibration is None:
        return None
    recorded: Calibrated
    if isinstance(calibration, str | os.PathLike):
        recorded = Path(calibration)
    else:
        made = calibration if isinstance(calibration, Calibration) else calibration()
        if not isinstance(made, Calibration):
            raise ConfigError(f"calibration must return a ckptz.hooks.Calibration, returned {made!r}")
        recorded = made.recorded()
    live = model_state(model).items()
    shapes = {name: tuple(value.shape) for name, value in live if isinstance(value, torch.Tensor)}
    with contextlib.ExitStack() as stack:
        read_inputs(recorded, shapes, stack, [])
    return recorded


def check_calibration(calibration: CalibrationLike | None, config: Method) -> None:
    """Check the type of a calibration, and that the method uses one.

    Raises:
        ConfigError: it is not a calibration, or the method does not use one.
    """
    if calibration is None:
        return
    if not (isinstance(calibration, Calibration | str | os.PathLike) or callable(calibration)):
        raise ConfigError(
            "calibration must be a ckptz.hooks.Calibration, a callable that returns one, or a file, "
            f"got {calibration!r}"
        )
    if CALIBRATION not in config.reads:
        raise ConfigError("a calibration guides the grid method only; give config=Grid(...) or a budget")


class BudgetSearch:
    """Searches for the settings of each save; a search starts from the result of the one before.

    Args:
        budget: one budget or several.
        config: the method and its fixed settings; lossless means the default method.
        restores: number of restarts that share the budget; 0 if each file may use all of it.

    Raises:
        ConfigError: no budgets, or no lossy method.
    """

    def __init__(self, budget: Budget | Sequence[Budget], config: Method, restores: int) -> None:
        budgets = tuple(budget) if isinstance(budget, Sequence) else (budget,)
        if not budgets or not all(isinstance(one, Budget) for one in budgets):
            raise ConfigError(f"budget must be a ckptz.Budget or several, got {budget!r}")
        options = SearchOptions(budgets=budgets, restores=restores)
        if config == LOSSLESS:
            config = options.template
        if not config.is_lossy:
            raise ConfigError(f"a budget is kept by a lossy method, got {config!r}")
        self._options = replace(options, template=config)
        self._last: Method | None = None

    @property
    def template(self) -> Method:
        """The method and its fixed settings."""
        return self._options.template

    def method(
        self,
        state: StepState,
        calibration: Calibrated | None,
        store: StepStore,
        file: StepFile,
        rule: ChainRule,
        jobs: int,
    ) -> tuple[LossSettings, SearchReport]:
        """Search on the caller's thread; trials are temporary files in the store's folder.

        Args:
            state: the snapshot.
            calibration: inputs of layers, or None.
            store: the store with the bases.
            file: the weights file to be written.
            rule: the rule that chooses the bases.
            jobs: number of threads.

        Raises:
            ConfigError: an evaluation fails, or returns no valid value for the exact tensors.
        """
        is_of_state = any(budget.trains for budget in self._options.budgets)  # as well as of the weights
        kinds: tuple[FileKind, ...] = ("weights", "state") if is_of_state else ("weights",)
        with contextlib.ExitStack() as stack:
            opened = {kind: found_base(partial(store.open_base, kind, rule), stack, []) for kind in kinds}
            bases = {kind: None if one is None else one[0] for kind, one in opened.items()}
            newest = found_base(partial(store.open_newest, "weights"), stack, [])
            target = store.local_folder / file.name
            try:
                report = self._search(state, calibration, target, bases, newest, jobs)
            except (FormatError, MissingBaseError):
                if newest is None and not any(bases.values()):
                    raise
                # A base or the newest file is damaged: the files will be full files.
                bases = dict.fromkeys(kinds)
                report = self._search(state, calibration, target, bases, None, jobs)
            ids = {kind: id_of(base) for kind, base in bases.items()}
        if report.config is None:
            self._last = None
            return LossSettings(config=LOSSLESS), report
        config = config_of(report.method, report.config)
        self._last = config
        return LossSettings(config=config, calibration=calibration, quality=report.quality, bases=ids), report

    def _search(
        self,
        state: StepState,
        calibration: Calibrated | None,
        target: Path,
        bases: Mapping[FileKind, Checkpoint | None],
        newest: Checkpoint | None,
        jobs: int,
    ) -> SearchReport:
        opened = [base for base in bases.values() if base is not None]
        state = state.like(bases["weights"])
        stored = {name: source for base in opened for name, source in base.tensors.items()}
        # After a restart values are near the levels of the newest file, which only its settings keep.
        known = ({} if newest is None else newest.tensors, stored)
        recorded = (recorded_in(tensors, self.template) for tensors in known)
        parent = self._last or next((one for one in recorded if one is not None), None)
        options = replace(self._options, parent=parent, is_dry_run=True)
        method = LossSettings(config=self.template, calibration=calibration)
        job = replace(
            state.job(state.weights, method),
            tensors={**state.weights.tensors, **(state.optimizer if "state" in bases else {})},
            param_states=state.all_with_optimizers if "state" in bases else {},
            base=base_ref(opened[0]) if opened else None,
            bases=remembering(stored),
        )
        job = after(job, newest, bases["weights"])
        with Workers(jobs) as workers:
            run = SearchRun(
                workers=workers,
                base_paths=tuple(Path(base.files[0].name) for base in opened),
                owner=OWNER,
                prefix=state.prefix,
            )
            _, report = search_and_write(target, job, options, run)
        return replace(report, is_dry_run=False)  # the step is written with the result
