"""Checkpoints in a training loop: short stalls, small files, a folder that cannot lose a step."""

from __future__ import annotations

import errno
import functools
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ckptz.codec.coded import CodedSource
from ckptz.codec.effort import EffortName, effort_of
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import USUAL_RESTORES, Method, checked
from ckptz.errors import (
    CkptzError,
    ConfigError,
    FormatError,
    MissingBaseError,
    WriteError,
    check_float,
    check_int,
    with_context,
)
from ckptz.format.byte_source import is_url
from ckptz.format.caches import LastChunks
from ckptz.format.written import Written
from ckptz.guidance.momentum import UpdateTracker
from ckptz.parallel import Workers, jobs_of
from ckptz.run.folder import StepStore
from ckptz.run.keep import KEEP_ALL, KEEP_LAST, KeepPolicy
from ckptz.run.prune import prune
from ckptz.run.step_files import ALL_EXACT, MAX_STEP, ChainRule, StepFile, checked_step
from ckptz.search.budget import Budget, SearchReport
from ckptz.state.roles import SECOND_MOMENTS
from ckptz.store.lock import NOT_ALLOWED
from ckptz.store.resolve import MAX_DEPTH, Path_
from ckptz.training.background import Background
from ckptz.training.budget_search import (
    BudgetSearch,
    CalibrationLike,
    calibrated,
    check_calibration,
)
from ckptz.training.compare import differences, differences_of_memory, fingerprint, notes_on, shared
from ckptz.training.curve import Curve
from ckptz.training.device import code_where_they_live
from ckptz.training.files import LossSettings, StepReader, StepState, StepWriter, memory_for_last
from ckptz.training.frozen import FrozenId, frozen_weights, with_frozen
from ckptz.training.in_place import tensors_in
from ckptz.training.optimizers import (
    bound_first_moments,
    check_optimizers_fit,
    comparable,
    load_optimizers,
    optimizer_state,
)
from ckptz.training.origin import origin_of
from ckptz.training.restoring import Restored, check_there, model_of, read_step, rest_of
from ckptz.training.schedules import Schedule, is_end
from ckptz.training.snapshot import MODEL, Snapshot
from ckptz.training.state import (
    Extra,
    check_extras_fit,
    check_model_fits,
    check_states,
    extra_state,
    extras_to_load,
    load_in_order,
    load_model,
    model_state,
    module_versions,
    random_state,
    sampled_weights,
    set_random_state,
    trained_weights,
    with_scalars_together,
)
from ckptz.words import Report, format_bytes

CURVE: Final = "curve"  # key in the state: metrics of the run, if there are any
LARGEST: Final = "largest_rate"  # in the state: that the run has had so far
RESTORES: Final = "restores"  # key in the state: number of restarts from lossy steps
BACKGROUND_SHARE: Final = 4  # one in so many cores encodes in the background
T = TypeVar("T")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NOTHING_KEPT: Final = "nothing that was tried keeps the budget, so nothing is lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(Report):
    """Sizes and seconds of one save.

    Attributes:
        step: the step.
        stall_seconds: time that training was stopped, including `waited_seconds`.
        waited_seconds: time spent waiting for the previous save.
        write_seconds: time for encoding, writing and pruning, in the background by default.
        stored_bytes: size of the files of the step.
        exact_bytes: size of its residual files, part of `stored_bytes`; later saves delete them according to
            `KeepPolicy.exact`.
        tensor_bytes: size of all tensors.
        notes: warnings for the user.
        search: report of the search for the budget, if there is one; its time is part of the stall.
    """

    step: int
    stall_seconds: float
    waited_seconds: float
    write_seconds: float
    stored_bytes: int
    exact_bytes: int = 0
    tensor_bytes: int
    notes: tuple[str, ...] = ()
    search: SearchReport | None = None


class Checkpointer:
    """Saves and restores a training run.

    `save` copies the state and returns; the copy is encoded and written in the background, one save at a
    time. A step appears in the folder when it is complete, whatever happens to the process, and never puts
    earlier steps at risk. The random states of Python, NumPy and PyTorch are saved and restored too.

    The newest step restores bit for bit even with a lossy method: residual files hold the lost part until a
    later step is complete.

    Args:
        directory: the run's own folder, or an fsspec URL such as "s3://bucket/run". One writer at a time.
        model: its parameters and buffers are saved by their names without wrappers.
        optimizer: one or several optimizers of the model, or None.
        config: the method, lossless by default. `keep` sets how many steps stay exact.
        base: pretrained weights of a fine-tune: a `.safetensors` or `.ckptz` file, or a folder with one. Full
            files of weights are stored as deltas to it, under its tensor names. It is linked into the
            directory and must not change.
        budget: one `Budget` or several. Each save then searches for the smallest files within the budget,
            with the grid method or the method of `config`, while training waits. The quality gets weights
            under the model's names, decoded from a trial; a `ResumeProbe` also gets optimizer state, as
            `optimizer.<name>.exp_avg`, and only then moments become lossy. If no trial is within the budget,
            the step is lossless; see `SaveReport.search`.
        calibration: inputs of the model's layers, for the rounding of grids: a `Calibration`, whose
            recordings are read at each save; a callable that returns one, called at each save; or a file of
            one.
        extra: other state of the run by name: any object with `state_dict` and `load_state_dict` (scheduler,
            scaler, data loader), a dict of plain values and tensors, or a `torch.Generator`.
        extra_weights: patterns of names in `extra` that are weights, such as an average ("ema") or masters
            ("ema.shadow_params.*"). They are as lossy as the weights; all else in `extra` stays exact.
        trainable_only: leave out parameters without gradients, as in training of adapters. Their content id
            is in the metadata, and a restore requires a model with the same values.
        every: `maybe_save` saves steps that are multiples of this.
        keep: rules for the steps that are kept and that stay exact; see `KeepPolicy`.
        full_every: largest number of saves from one full file to the next, 1 to 64; the files between are
            deltas to an earlier file. Full files are more frequent if that takes less disk under `keep`. 1
            stores no deltas.
        restores: expected number of restarts from lossy steps. It determines the steps of grids, which become
            finer whenever that many restarts have happened. By default 10 if no step is kept exact, else 0.
            Files share a budget as `SearchOptions.restores` says; by default each may use all of it.
        background: write in the background; otherwise `save` returns when the step is complete.
        max_staging_bytes: host memory for the copy of a state; None for no limit. Weights are copied first.
            The rest is copied part by part and encoded while training waits, so that the step has the state
            at the time of `save`.
        on_save: called with the report of each save when its step is complete, on the writer's thread, for
            logging. Its exceptions become warnings, because the step is complete.
        effort: "fast", "default" or "small": time to spend on smaller files. Most files of a run are deltas,
            which "fast" makes 6 to 38 % larger for little time, so it suits full files.
        jobs: threads for encoding; by default a quarter of the cores in the background, else all.

    Attributes:
        restored: the result of the last `restore` or `restore_latest`: the step, whether it is exact, and
            notes; None before.

    Raises:
        ConfigError: an argument is out of range, arguments contradict each other, or the base does not have
            this model's weights.
        FileNotFoundError: the base does not exist.

    Example:
        >>> import torch
        >>> from ckptz import Checkpointer
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with Checkpointer("run", model, optimizer, every=10) as checkpointer:
        ...     for step in range((checkpointer.restore_latest() or 0) + 1, 31):
        ...         loss = model(torch.randn(8, 2)).square().mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        ...         _ = checkpointer.maybe_save(step)
        >>> checkpointer.steps()
        (10, 20, 30)
    """

    def __init__(
        self,
        directory: Path_,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        config: Method = LOSSLESS,
        base: Path_ | None = None,
        budget: Budget | Sequence[Budget] | None = None,
        calibration: CalibrationLike | None = None,
        extra: Mapping[str, Extra] | None = None,
        extra_weights: str | Sequence[str] = (),
        trainable_only: bool = False,
        every: int | None = None,
        keep: KeepPolicy = KEEP_LAST,
        full_every: int = 16,
        restores: int | None = None,
        background: bool = True,
        max_staging_bytes: int | None = None,
        on_save: Callable[[SaveReport], object] | None = None,
        effort: EffortName = "default",
        jobs: int | None = None,
    ) -> None:
        checked(config)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(keep, KeepPolicy):
            raise ConfigError(f"keep must be a KeepPolicy, got {keep!r}")
        every = None if every is None else check_int("every", every, 1)
        full_every = check_int("full_every", full_every, 1, MAX_DEPTH)
        restores = None if restores is None else check_int("restores", restores, 0)
        self.model, self.optimizer = model, optimizer
        self.extra: Mapping[str, Extra] = {} if extra is None else extra
        self._extra_weights = (extra_weights,) if isinstance(extra_weights, str) else tuple(extra_weights)
        if self._extra_weights and budget is not None:
            raise ConfigError("a budget measures the model's weights, not extra_weights; leave these exact")
        self.restored: Restored | None = None
        self._expected = (USUAL_RESTORES if keep.exact == 0 else 0) if restores is None else restores
        # One restart leaves each file the whole budget, and keeps what training has moved since a restore.
        n_sharing = min(self._expected, 1) if restores is None else restores
        self._search = None if budget is None else BudgetSearch(budget, config, n_sharing)
        self._config, self._keep, self._effort = config, keep, effort_of(effort).name
        self._n_restores = 0
        self._frozen = FrozenId() if trainable_only else None
        self._calibration = calibration
        check_calibration(calibration, config if self._search is None else self._search.template)
        self._every, self._is_background, self._on_save = every, background, on_save
        # Lossless files decode so slowly that a plain chain costs more than it saves.
        is_lossless = not config.is_lossy and budget is None
        self._rule = ChainRule(full_every, is_forked=is_lossless, kept=keep.by_kind)
        self._restore_jobs = self._jobs = jobs_of(jobs)
        if jobs is None and background:
            self._jobs = max(1, self._jobs // BACKGROUND_SHARE)
        origin = None if base is None else origin_of(base, model_state(model))
        # Absolute, because training may change the working folder.
        directory = directory if is_url(directory) else Path(directory).absolute()
        self._store = StepStore(directory, origin, None if is_lossless else LastChunks(memory_for_last))
        if max_staging_bytes is not None:
            max_staging_bytes = check_int("max_staging_bytes", max_staging_bytes, 0)
        self._snapshot = Snapshot(max_staging_bytes)
        # With a budget, the written weights must be those of the measurement.
        self._tracker = UpdateTracker() if config.loses_state and budget is None else None
        self._schedule = Schedule()
        self._curve = Curve(lower_is_better=keep.lower_is_better)
        self._writer: Background[SaveReport] = Background()
        is_all_exact = not is_lossless and keep.exact != 0 and keep.by_kind["weights"].is_within(keep.exact)
        self._note_on_keep = (ALL_EXACT,) * is_all_exact
        self._was_restored = False  # whether a step was restored, with loss, since the last save
        self._at: int | None = None  # the step that was saved or restored last
        self._seen: int | None = None  # the last step of `maybe_save`, or the restored one
        self._at_versions: list[tuple[int, int]] = []  # of the tensors when `_at` was saved or restored
        self._unreadable: frozenset[int] = frozenset()  # later steps that `restore_latest` could not read
        self._last: SaveReport | None = None

    def save(self, step: int, *, metric: float | None = None) -> None:
        """Save the present state of the run; training may continue when this returns.

        The last saved or restored step is not saved again.

        Args:
            step: a step later than all steps of the folder.
            metric: metric of the step for `KeepPolicy.best`. It also measures the cost of lossy restarts: if
                they cost more than 0.5 % in total, the next files are finer, with a note.

        Raises:
            ConfigError: the step is not new, another process writes to the folder, a tensor has no values,
                the metric is not a number, or a budget's evaluation fails; the step is not saved.
            CalibrationError: the calibration is of another model, or empty.
            KeyboardInterrupt: during a search; the best trial within the budget is saved, if there is one.
            WriteError: the previous save failed; this step is not saved, and can be tried again.
        """
        step, metric = checked_step(step), None if metric is None else float(check_float("metric", metric))
        self._writer.take_turn(f"save({step})", lambda: self._save(step, metric))

    def _save(self, step: int, metric: float | None) -> None:
        start = time.perf_counter()
        self._wait()
        self._store.lock()
        waited = time.perf_counter() - start
        if step == self._at:
            if self._at_versions != self._versions():
                what = (
                    f"step {step} is complete already, and the run has changed since: it is not saved again"
                )
                warnings.warn(f"{what}; save it as a later step", RuntimeWarning, stacklevel=5)
            return
        aside = self._make_way(step)
        on_metric = () if metric is None or not self._expected else self._curve.add(step, metric)
        method, on_rates = self._method(step)
        try:
            taken = self._taken(method.config)
        except CkptzError as error:
            raise with_context(error, f"{self._store.name}: step {step} was not saved") from error
        self._schedule.mark(self._optimizers, step)
        self._at_versions = self._versions()
        search = None
        if self._search is not None:
            method, search = self._searched(self._search, taken, method, step)
        is_unmet = search is not None and not search.is_met
        begun = SaveReport(
            step=step,
            stall_seconds=time.perf_counter() - start,
            waited_seconds=waited,
            write_seconds=0.0,
            stored_bytes=0,
            tensor_bytes=0,
            notes=(
                *aside,
                *on_metric,
                *on_rates,
                *(() if search is None else search.notes),
                *((NOTHING_KEPT,) * is_unmet),
            ),
            search=search,
        )
        self._writer.start(
            f"{self._store.name}: step {step}", functools.partial(self._write, taken, method, metric, begun)
        )
        taken.hold.wait()
        if not self._is_background:
            report = self._wait() or begun
            self._last = replace(report, stall_seconds=time.perf_counter() - start)
            self._tell(self._last)
        if search is not None and search.is_interrupted:
            raise KeyboardInterrupt

    def _make_way(self, step: int) -> list[str]:
        """Check that a step is new, and rename files of unreadable steps from it on; return notes.

        Raises:
            ConfigError: the step is not new.
            WriteError: the disk is full or fails.
        """
        self._store.check_new(step, self._unreadable)
        notes = []
        for one in sorted((one for one in self._unreadable if one >= step), reverse=True):
            try:
                names = self._store.set_aside(one)
            except OSError as error:
                raise _about(error, f"{self._store.name}: step {step} was not saved") from error
            self._unreadable -= {one}
            notes += (
                [f"step {one} could not be read; its files are kept as {', '.join(names)}"] if names else []
            )
        return notes

    def maybe_save(self, step: int, *, metric: float | None = None) -> bool:
        """Save the step if it is a multiple of `every`, or the first one seen after a multiple; see `save`.

        Returns:
            True if the step was saved.
        """
        if self._every is None:
            raise ConfigError("maybe_save needs to know when: give the Checkpointer every=N, or call save")
        step = checked_step(step)
        self._writer.take_turn(f"maybe_save({step})", functools.partial(self._look, step))
        before = step - 1 if self._seen is None else self._seen
        self._seen = step
        if step % self._every and step // self._every <= before // self._every:
            return False
        self.save(step, metric=metric)
        return True

    def _versions(self) -> list[tuple[int, int]]:
        """Return the address of each tensor of the run, and how often torch has written to it."""
        parts = [model_state(self.model), *(one.state_dict() for one in self._optimizers)]
        return [(one.data_ptr(), one._version) for one in tensors_in(parts) if not one.is_inference()]

    def _look(self, step: int) -> None:
        """Lock the folder at the first step, and record the weights for momentum correction."""
        if not self._writer.is_idle:  # it has unfinished files there
            return
        self._store.lock()
        if self._tracker is not None and not self._tracker.has_snapshot:
            self._mark(self._tracker, step, is_restored=False)
            self._schedule.mark(self._optimizers, step)

    def _mark(self, tracker: UpdateTracker, step: int, *, is_restored: bool, has_lost: bool = False) -> None:
        weights = sampled_weights(model_state(self.model))
        trained = trained_weights(optimizer_state(self.model, self._optimizers), weights)
        tracker.snapshot(trained, step, is_restored=is_restored, has_lost=has_lost)

    def wait(self) -> SaveReport | None:
        """Wait until no save is under way.

        Returns:
            The report of the last completed save, or None.

        Raises:
            WriteError: the save failed; earlier steps are unchanged.
        """
        return self._writer.take_turn("wait()", self._wait)

    def wait_for_staging(self) -> None:
        """Wait until the last save has copied the state to the host.

        On a CPU the copy is complete when `save` returns. From CUDA devices it is asynchronous: work on the
        current streams waits for it by itself; code on other streams, or in other processes that map the
        memory, must call this before it changes the state.
        """
        self._writer.take_turn("wait_for_staging()", self._snapshot.synchronize)

    def _wait(self) -> SaveReport | None:
        writer = self._writer
        writer.wait()
        if writer.result is not None:
            self._last, writer.result = writer.result, None
            self._at, self._was_restored = self._last.step, False
        if (error := writer.error) is not None:
            loss = _about(error, f"{writer.label} was not saved")
            self._at = writer.error = None
            raise loss from error
        return self._last

    def _method(self, step: int) -> tuple[LossSettings, tuple[str, ...]]:
        """Return the loss settings before a search, and notes, which name a schedule whose end is unknown.

        The method is that for the expected number of restarts, doubled whenever these are used up. Near the
        end of the run the steps are finer.
        """
        calibration = calibrated(self._calibration, self.model)
        expected = self._expected
        if not expected or self._search is not None:
            return LossSettings(config=self._config, calibration=calibration), ()
        while expected < self._n_restores:
            expected *= 2
        expected *= 2**self._curve.n_finer
        states = (own for one in self._optimizers for own in one.state.values())
        is_guided = all(SECOND_MOMENTS & {*own} for own in states if own)
        late_factor, notes = self._schedule.share_of_step(self._optimizers, self.extra.values(), step)
        config = self._config.for_restarts(expected, is_guided=is_guided, late_factor=late_factor)
        return LossSettings(config=config, calibration=calibration, is_last=is_end(late_factor)), notes

    def _searched(
        self, search: BudgetSearch, taken: StepState, method: LossSettings, step: int
    ) -> tuple[LossSettings, SearchReport]:
        """Search for settings; the run's random state is restored after the evaluations."""
        self._snapshot.synchronize()
        file, random = StepFile(step, "weights"), random_state()
        try:
            return search.method(taken, method.calibration, self._store, file, self._rule, self._restore_jobs)
        except CkptzError as error:
            raise with_context(error, f"{self._store.name}: step {step} was not saved") from error
        finally:
            set_random_state(random)

    def _taken(self, config: Method) -> StepState:
        """Copy the state to the host; weights on devices are copied as codes if the next file is full.

        Deltas are coded on the host, because their levels depend on the base, and so are files after a lossy
        restore, whose levels are those of the newest file, and steps that stay exact, because their values
        are needed on the host anyway.
        """
        frozen = {} if self._frozen is None else frozen_weights(self.model)
        model = {name: value for name, value in model_state(self.model).items() if name not in frozen}
        state: dict[str, Any] = {
            MODEL: model,
            **optimizer_state(self.model, self._optimizers),
            "extra": extra_state(self.extra),
            "rng": random_state(),
            **({RESTORES: self._n_restores} if self._n_restores else {}),
            **({LARGEST: self._schedule.largest} if self._schedule.has_fallen else {}),
            **({} if (curve := self._curve.state()) is None else {CURVE: curve}),
        }
        coded: dict[str, CodedSource] = {}
        is_alone = self._keep.exact == 0 and self._search is None and self._config.is_lossy
        if is_alone and not self._was_restored and self._store.next_is_full(self._rule):
            with Workers(self._restore_jobs) as workers:
                coded = code_where_they_live(model, f"{MODEL}.", config, workers)
                state[MODEL] = {name: value for name, value in model.items() if name not in coded}
        frozen_id = None if self._frozen is None else self._frozen.of(frozen)
        taken = self._snapshot.take(state)
        if self._tracker is not None:
            taken = with_scalars_together(taken)
        return StepState(
            state=taken,
            coded=coded,
            frozen=frozen_id,
            versions=module_versions(self.model),
            extra_weights=self._extra_weights,
            hold=self._snapshot.hold,
            was_restored=self._was_restored,
        )

    @property
    def _optimizers(self) -> list[Optimizer]:
        if self.optimizer is None:
            return []
        return [self.optimizer] if isinstance(self.optimizer, Optimizer) else list(self.optimizer)

    def _write(
        self, taken: StepState, method: LossSettings, metric: float | None, begun: SaveReport
    ) -> SaveReport:
        """Encode and write a snapshot, on the writer's thread."""
        start, hold = time.perf_counter(), taken.hold
        self._snapshot.synchronize()
        notes = [*begun.notes]
        if hold.tensors:
            n_bytes = sum(tensor.nbytes for tensor in hold.tensors.values())
            notes.append(f"{format_bytes(n_bytes)} were encoded while training waited (max_staging_bytes)")
        try:
            written = self._written(taken, method, metric, begun.step, notes)
        finally:
            hold.release()
        try:
            notes += prune(self._store, self._keep).notes
        except Exception as error:  # stores behind URLs have errors of their own; the step is complete
            notes.append(f"older steps stay until the next save, because one cannot be removed: {error}")
        report = replace(
            begun,
            stall_seconds=begun.stall_seconds + (hold.released - start if hold.tensors else 0.0),
            write_seconds=time.perf_counter() - start,
            stored_bytes=sum(one.stored_bytes for one in written.values()),
            exact_bytes=sum(one.stored_bytes for file, one in written.items() if file.is_residual),
            tensor_bytes=sum(one.original_bytes for file, one in written.items() if not file.is_residual),
            notes=(*notes, *self._note_on_keep),
        )
        if self._is_background:  # otherwise `save` reports, with the whole stall
            self._tell(report)
        return report

    def _tell(self, report: SaveReport) -> None:
        """Call `on_save` with a report."""
        if self._on_save is None:
            return
        try:
            self._on_save(report)
        except Exception as error:
            what = f"on_save raised {type(error).__name__}: {error}; step {report.step} is saved"
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def _written(
        self, state: StepState, method: LossSettings, metric: float | None, step: int, notes: list[str]
    ) -> dict[StepFile, Written]:
        writer = StepWriter(
            state=state,
            step=step,
            metric=metric,
            method=method,
            effort=self._effort,
            jobs=self._jobs,
            tracker=self._tracker,
        )
        with_exact = self._keep.exact != 0
        try:
            return writer.write(self._store, self._rule, notes, with_exact=with_exact)
        except RuntimeError:
            # At the end of the program thread pools accept no work; this thread still runs.
            if threading.main_thread().is_alive() or self._jobs == 1:
                raise
            return replace(writer, jobs=1).write(self._store, self._rule, notes, with_exact=with_exact)

    def steps(self) -> tuple[int, ...]:
        """List the steps that training can resume from, ascending."""
        return self._store.listing().full_steps

    def weights_steps(self) -> tuple[int, ...]:
        """List the steps with weights, with or without other state, ascending."""
        return self._store.listing().weights_steps

    def restore_latest(self, *, fall_back: bool = True) -> int | None:
        """Restore the newest step and return it; without any step, change nothing and return None.

        If the newest step is damaged or lacks a base, the newest readable step is restored, with a warning
        that names both, which `restored.notes` has too. When training reaches the damaged step again, its
        files are renamed to end with ".unreadable-1"; nothing is deleted.

        Args:
            fall_back: restore an earlier step if the newest is unreadable; otherwise raise.

        Raises:
            ConfigError: the model, the optimizer or the extras differ from the saved ones.
            FormatError: the newest step is damaged, and all others are too or `fall_back` is False.
            MissingBaseError: the same for a missing base.
        """
        return self._writer.take_turn("restore_latest()", lambda: self._restore_latest(fall_back))

    def _restore_latest(self, fall_back: bool) -> int | None:
        self._wait()
        newest: CkptzError | None = None
        for step in reversed(steps := self.steps()):
            try:
                self._restore(step)
            except (FormatError, MissingBaseError) as error:
                if not fall_back:
                    raise
                newest = newest or error
                continue
            # Steps without a state file are included.
            self._unreadable = frozenset(one for one in self.weights_steps() if one > step)
            if newest is not None:
                assert self.restored is not None
                note = (
                    f"{self._store.name}: step {steps[-1]} cannot be read ({newest}), so step {step} was "
                    f"restored; the files of step {steps[-1]} are renamed when it is saved again"
                )
                self.restored = replace(self.restored, notes=(*self.restored.notes, note))
                warnings.warn(note, RuntimeWarning, stacklevel=5)
            return step
        if newest is not None:
            raise newest
        return None

    def restore(self, step: int, *, weights_only: bool = False, strict: bool = True) -> int:
        """Restore the run to a step, including random states.

        All files are read and checked before any state changes. Afterwards the restored state is compared
        with the saved one; `restored` has the result. To continue from a step other than the newest, call
        `discard_after` first. If a residual file is damaged, the whole step is restored from its lossy files,
        with a warning.

        Args:
            step: one of `steps`, or with `weights_only` of `weights_steps`.
            weights_only: restore only the model.
            strict: refuse a model with other names. False requires `weights_only`, restores weights with
                equal names, and lists the others as missing or unexpected in `restored`, whose `is_exact` is
                then False. Other shapes or dtypes are always refused.

        Returns:
            The step.

        Raises:
            ConfigError: there is no such step; the model, the optimizer or the extras differ; or `strict` is
                False and no name matches, or `weights_only` is False.
            FormatError: a file is damaged.
            MissingBaseError: a base is missing.
        """
        if not (strict or weights_only):
            raise ConfigError(
                "strict=False restores weights alone: optimizers need all parameters; add weights_only=True"
            )
        return self._writer.take_turn(f"restore({step})", lambda: self._restore(step, weights_only, strict))

    @torch.inference_mode(False)  # training cannot write to tensors that were made in this mode
    def _restore(self, step: int, weights_only: bool = False, strict: bool = True) -> int:
        self._wait()
        check_there(self._store, step, weights_only)
        read = functools.partial(self._read, step, strict=strict)
        (model, versions, rest, restored), is_lossless, notes = read_step(
            self._store, step, weights_only, read
        )
        is_exact = is_lossless and restored.is_exact
        restored = replace(restored, is_exact=is_exact, notes=(*notes, *restored.notes))
        where, compared = f"{self._store.name}: step {step}", {MODEL: model}
        if rest is not None:
            check_states(self.extra, rest, where)
            compared |= {**comparable(rest, rest), "extra": rest["extra"], "rng": rest["rng"]}
        saved, saved_memory = {name: fingerprint(part) for name, part in compared.items()}, shared(compared)
        parts = [("the model", lambda: load_model(self.model, model, versions))]
        if rest is not None:
            # Extras first: if one refuses its state, model and optimizer are unchanged.
            others = [model_state(self.model), optimizer_state(self.model, self._optimizers)]
            parts[:0] = [
                *extras_to_load(self.extra, rest["extra"], others),
                ("the optimizer", lambda: load_optimizers(self.model, self._optimizers, rest)),
            ]
        load_in_order(parts, where)
        if rest is not None:
            set_random_state(rest["rng"])
            self._was_restored = not is_lossless
            self._at, n_restores = step, rest.get(RESTORES)
            self._seen, self._at_versions = step, self._versions()
            self._unreadable = frozenset()
            before = n_restores if isinstance(n_restores, int) and 0 <= n_restores < MAX_STEP else 0
            self._n_restores = before + (not restored.is_exact)
            self._schedule.restore(self._optimizers, step, rest.get(LARGEST))
            self._curve = Curve.restored(
                rest.get(CURVE), lower_is_better=self._keep.lower_is_better, is_lossy=not restored.is_exact
            )
            if self._tracker is not None:
                self._mark(self._tracker, step, is_restored=True, has_lost=not restored.is_exact)
        self.restored = self._compared(restored, saved, saved_memory)
        return step

    def _compared(
        self, restored: Restored, saved: Mapping[str, Any], saved_memory: Sequence[frozenset[str]]
    ) -> Restored:
        """Compare the restored state with the saved one; only this decides whether a restore is exact."""
        model = model_state(self.model)
        live: dict[str, Any] = {MODEL: {name: model[name] for name in saved[MODEL]}}
        if len(saved) > 1:
            live |= comparable(optimizer_state(self.model, self._optimizers), saved)
            live |= {"extra": extra_state(self.extra), "rng": random_state()}
        lines = list(differences(saved, fingerprint(live)))
        if restored.is_exact:  # weights that were encoded on a device are stored separately
            lines += differences_of_memory(saved_memory, shared(live))
        return replace(
            restored,
            is_exact=restored.is_exact and not lines,
            notes=(*restored.notes, *notes_on(lines)),
        )

    def _read(
        self, step: int, weights: StepReader, state: StepReader | None, strict: bool
    ) -> tuple[dict[str, Any], dict[str, int], Mapping[str, Any] | None, Restored]:
        """Read and check a step without changing the run.

        Returns:
            The model's state, versions of modules, other state or None, and the result of the checks.
        """
        outline = model_of(weights.outline(), weights)
        outline = with_frozen(self.model, outline, weights.metadata, weights.name, strict=strict)
        missing, unexpected = check_model_fits(self.model, outline, weights.name, strict=strict)
        if state is not None:
            outline_of_rest = rest_of(state.outline(), state)
            check_optimizers_fit(self.model, self._optimizers, outline_of_rest, state.name)
            check_extras_fit(self.extra, outline_of_rest["extra"], state.name)
        model = model_of(weights.load(self._restore_jobs), weights)
        model |= {name: value for name, value in outline.items() if name not in model}
        model = {name: value for name, value in model.items() if name not in unexpected}
        rest = None if state is None else rest_of(state.load(self._restore_jobs), state)
        report = Restored(
            step=step,
            is_exact=not (missing or unexpected),
            notes=() if rest is None or state is None else tuple(bound_first_moments(rest, state.lossy)),
            missing=missing,
            unexpected=unexpected,
        )
        return model, weights.versions(), rest, report

    def discard_after(self, step: int) -> None:
        """Delete all later steps, to continue from this one.

        Raises:
            ConfigError: there is no step to continue from, or it is unreadable; nothing is deleted.
        """
        self._writer.take_turn(f"discard_after({step})", lambda: self._discard_after(check_int("step", step)))

    def _discard_after(self, step: int) -> None:
        self._wait()
        self._store.lock()
        self._at, self._unreadable = None, frozenset()
        prune(self._store, KEEP_ALL, last_step=step)

    def close(self) -> None:
        """Wait for a running save, and release the lock of the folder.

        Raises:
            WriteError: the save failed.
        """
        self._writer.take_turn("close()", self._close)

    def _close(self) -> None:
        try:
            self._wait()
        finally:
            if self._writer.is_idle:  # else, after an interrupt, the writer still needs the store
                self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as loss:
            if error is None:
                raise
            error.add_note(str(loss))  # the error that ended training must stay visible


def _about(error: BaseException, what: str) -> BaseException:
    """Return an error of the same kind that names the lost step."""
    if isinstance(error, OSError):
        remedy = "earlier steps are intact; repair the disk, and save again"
        if isinstance(error, FileNotFoundError):
            remedy = "a file or the folder was removed during the save; check the folder, and save again"
        elif error.errno in _FULL:
            remedy = "earlier steps are intact; free disk space, and save again"
        elif error.errno in NOT_ALLOWED:
            remedy = "earlier steps are intact; check the folder's owner and permissions, and save again"
        elif isinstance(error, WriteError):  # its message has a remedy
            remedy = "earlier steps are intact"
        return WriteError(error.errno, f"{what}: {error.strerror or error}; {remedy}")
    if isinstance(error, CkptzError):
        return with_context(error, what)
    error.add_note(what)
    return error
