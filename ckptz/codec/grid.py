"""The grid method: its settings, and the plan of a weight from steps by row.

The difference to the base as restored is quantized, so that errors do not add up along a chain. The frame
stores row labels, levels and codes only, not the side information that steps and rounding depend on.

On the third delta of a language model's run (0.9 bits per weight), better predictions of the movement were
not worth their bits: a scaled base plus the last movement took 3.6 % more bits, Adam's direction explained
1.5 % of the movement, and 16 ranks explained 28 % of it for 49 % more bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import numpy as np

from ckptz.codec.grid_steps import RowSteps, bare_levels, largest_magnitude, row_steps
from ckptz.codec.grid_tensor import FINEST, GridTensor, Layer, encoding_of
from ckptz.codec.lossless import EXACT, plan_lossless
from ckptz.codec.method import (
    CALIBRATION,
    MIN_ELEMENTS,
    MOMENT_ROLES,
    MOMENTS_FROM,
    SENSITIVITY,
    USUAL_RESTORES,
    Method,
    Recipe,
    Setting,
    is_large_weight,
    register,
)
from ckptz.codec.moments import MOMENTS, FineRounding, Moments, recipe_of_state
from ckptz.codec.rounding_rule import RoundingRule, middle_chunk, sampled
from ckptz.codec.sensitivity import floats_in
from ckptz.codec.tensor import SideInformation, TensorStatistics, TensorToEncode, summed
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.errors import ConfigError
from ckptz.format.context_rules import MAX_INDICES, Row
from ckptz.format.dtypes import DType
from ckptz.format.plan import LinearTable
from ckptz.format.sources import Stored, TensorSource, n_rows_of
from ckptz.format.values import FLOAT_KINDS
from ckptz.state.roles import Role

# For full files and deltas, measured on the run of the demo: 4 to 9 % fewer bits without measurable loss.
# Chains still transfer all movement, as each delta includes the error of the last one. With a larger dead
# zone, a larger step gives the same size at less loss; on a larger run, 0.2 saves 1.5 % of a file at equal
# weighted error. Full files use the step of their deltas: 0.7 of it saves 0.1 %, 1.4 of it costs 4.2 %.
DEAD_ZONE: Final = 0.1
FINE: Final = 1 / 8  # of the step, for small weights
MIN_ROW_VALUES: Final = 32  # labels of shorter rows would take more bits than they save
MAX_SECOND_STEP: Final = 8.0  # octaves: Adam's updates are then up to 4 times too large
MAX_FIRST_STEP: Final = 64.0
PURPOSES: Final = ("auto", "resume", "ship")
UNGUIDED_SHARE: Final = 0.5  # of the step, for weights of SGD; from bench/studies/restarts, image
# Of all steps, in runs that restart. On runs of bench/studies/user_runs to choose on, one seed: a run from
# scratch ends at +0.38 % with half the steps (65x), at +0.70 % with whole ones (106x), a fine-tune at +0.18 %
# (99x) where it was +0.36 % (129x).
RESTART_SHARE: Final = 0.5
FULL_SHARE: Final = 0.35  # of the step of deltas, for full files of runs that restart
# Steps around zero that the choice of a dither seed ignores: one cell, or three with dead zone and centroids.
PEAK, PEAK_TO_SHIP = 0.5, 1.5
# Smallest factor of the steps of a full file that follows the movement, as each halving costs a bit per
# weight. On runs of bench/studies/user_runs to choose on, three seeds: with 1 a fine-tune ends at +0.20 %
# (77.8x), with 1/2 at +0.19 % (75.5x), with 1/4 at +0.18 % (74.6x).
FINEST_FULL: Final = 0.5
MOST_MOVES: Final = 16.0  # largest step of a delta, in mean movements; see `GridTensor.choose_rounding`
SUITS: Final = 2.0  # greatest ratio of the base's steps and newly chosen ones at which the base's are kept


@dataclass(frozen=True, slots=True)
class UniformGrid(Recipe):
    """Recipe of a weight on a uniform grid; see `Grid` for its settings."""

    step: float = 1.0
    dead_zone: float | None = None
    purpose: str = "auto"
    full_step: float | None = None
    most_moves: float = MOST_MOVES
    name: ClassVar[str] = "grid"

    is_joint: ClassVar[bool] = True

    def settings(self) -> dict[str, Setting]:
        chosen = {} if self.dead_zone is None else {"dead_zone": self.dead_zone}
        return {"step": self.step, **chosen}

    def movement(self, tensor: TensorToEncode) -> float | None:
        """Return the mean movement since the base in steps, clipped to 1, measured on the middle chunk."""
        source, base, guide = tensor.source, tensor.base, tensor.guide
        if base is None:
            return None
        begin, end = middle_chunk(source)
        statistics = tensor.statistics((begin, end))
        if statistics.fault(source.dtype) or not statistics.power:
            return None
        if statistics.residual_power >= statistics.power:
            return None
        row_patterns = source.n_patterns // n_rows_of(source.shape)
        first, last = begin // row_patterns, (end - 1) // row_patterns
        n_rows, sums = last + 1 - first, statistics.row_sums
        squares = np.zeros(n_rows) if sums is None else sums[first : last + 1] * n_rows / (end - begin)
        rows = row_steps(self.step, statistics.spread, squares, guide.mean_sensitivity)
        places = sampled(end - begin)
        at = np.arange(begin, begin + places.stop, places.step)
        steps = rows.steps[rows.labels[at // row_patterns - first]]
        own, others = (floats_in(one, begin, end)[places] for one in (source, base))
        moved = np.abs(own.astype(np.float64) - others)
        return float(np.minimum(moved / steps, 1.0).mean())

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan a weight; steps and rounding depend on its base and side information."""
        source, base, guide, run = tensor.source, tensor.base, tensor.guide, tensor.run
        statistics = summed(run, tensor.statistics, source)
        fault = statistics.fault(source.dtype)
        if fault or not statistics.power:
            return replace(plan_lossless(source, base, run, tensor.effort), note=fault)
        if statistics.residual_power >= statistics.power:
            base = None
        # `full_step` also applies to a base that is not on a grid, such as the pretrained weights of a
        # fine-tune.
        begins = base is None or base.stored is None or base.stored.method != self.name
        step = self.full_step if begins and self.full_step is not None else self.step
        wanted = replace(self, step=step)
        if base is None and tensor.movement is not None:
            # Full files have the steps of deltas if these are finer.
            tensor = replace(tensor, movement=tensor.movement * self.step / step)
        is_resumed = self.purpose == "resume" or (self.purpose == "auto" and base is not None)
        plan = wanted._plan_resume if is_resumed else wanted._plan_ship
        encoding = plan(tensor, base, _row_steps(source, step, guide, statistics))
        if step != self.step:
            encoding = replace(encoding, recorded={"step": step, **encoding.recorded})
        return encoding

    def _plan_resume(self, tensor: TensorToEncode, base: TensorSource | None, rows: RowSteps) -> TensorPlan:
        """Plan a weight that training is resumed from, on the base's grid and without losing movement.

        After a restore, the residual is the movement since then, which is near zero: rounding to nearest
        would lose it, stochastic rounding keeps it on average. Without a restore, residuals are spread
        evenly, and the dither seed of the previous file is kept. Likewise for full files: after a restore,
        values are near the multiples of the steps.
        """
        grid, recorded = self._choose_grid(tensor, base, rows)
        grid = grid.coded()
        counted = grid.counted(tensor.run)
        most = largest_magnitude(counted.codes.total)
        is_nearest = not grid.rounding_rule.is_stochastic
        if base is None and is_nearest and (layer := Layer.of(grid, tensor.guide)) is not None:
            grid = replace(grid, rounded=layer.rounded(most, bare_levels(grid.rows.steps)))
            counted = grid.counted(tensor.run)
            most = largest_magnitude(counted.codes.total)
        encoding = encoding_of(grid, counted, most, bare_levels(grid.rows.steps, most))
        recorded = {**grid.rounding_rule.record(), **recorded}
        return replace(encoding, recorded=recorded)

    def _choose_grid(
        self, tensor: TensorToEncode, base: TensorSource | None, rows: RowSteps
    ) -> tuple[GridTensor, dict[str, Setting]]:
        """Choose the steps, at most `rows`, and the rounding; also return what to record of the steps."""
        stored = None if base is None else base.stored
        of_base = _steps_of(stored, len(rows.labels))
        same_step = stored is not None and stored.settings.get("step") == self.step
        kept = of_base if of_base and same_step and 1 / SUITS <= _ratio(of_base, rows) <= SUITS else None
        rows = kept or rows
        rule = RoundingRule.of_record(stored, self.name)
        grid = GridTensor(tensor.source, base, rows, self.dead_zone or 0.0, rule)
        moves = None if tensor.movement is None else tensor.movement * self.most_moves
        newest = tensor.newest
        if newest is None and not rule.is_stochastic and moves is not None and 0 < moves < 1:
            newest = base
        if newest is None:
            grid = grid.choose_rounding(tensor, PEAK if kept else PEAK_TO_SHIP, moves)
        else:
            finest = FINEST_FULL if base is None else FINEST
            share = 1.0 if moves is None else min(max(moves, finest), 1.0)
            bounded, is_stochastic = _after_newest(tensor, newest, rows, share)
            if _ratio(bounded, rows) < finest:
                bounded = replace(rows, steps=rows.steps * finest)
            grid = replace(grid, rows=bounded)
            if is_stochastic:
                grid = replace(grid, rounding_rule=RoundingRule(tensor.dither_seed()))
            else:
                grid = grid.choose_rounding(tensor, PEAK_TO_SHIP, None)
        recorded: dict[str, Setting] = {}
        if newest is not None or (base is not None and grid.rounding_rule.is_stochastic):
            recorded["step"] = float(self.step * (grid.rows.steps[0] / rows.steps[0]))
        if grid.rounding_rule.is_stochastic and grid.rounding_rule == rule:
            # The errors of the base's rounding are in the residual. Its thresholds preserve movement with its
            # steps only; with others, a delta loses a part of it at any size of the steps.
            if stored is not None and of_base is not None and _ratio(of_base, grid.rows) <= SUITS:
                grid = replace(grid, rows=of_base)
                recorded["step"] = stored.settings["step"]
            else:
                grid = replace(grid, rounding_rule=RoundingRule(tensor.dither_seed()))
        return grid, recorded

    def _plan_ship(self, tensor: TensorToEncode, base: TensorSource | None, rows: RowSteps) -> TensorPlan:
        """Plan a weight that is only evaluated: the smallest frame at a given error."""
        dead_zone = DEAD_ZONE if self.dead_zone is None else self.dead_zone
        grid = GridTensor(tensor.source, base, rows, dead_zone, fits_levels=True).coded()
        counted = grid.counted(tensor.run)
        most, levels = grid.fit(counted)
        if (layer := Layer.of(grid, tensor.guide)) is not None:
            most, levels = layer.fit()
            grid = replace(grid, rounded=layer.rounded(most, levels))
            counted = grid.counted(tensor.run)
        return encoding_of(grid, counted, most, levels)


def _steps_of(stored: Stored | None, n_rows: int) -> RowSteps | None:
    """Return the steps of the base's frame, if it is on a grid whose levels are multiples of them."""
    if stored is None or stored.method != UniformGrid.name:
        return None
    plan = stored.plan
    table, rules = None if plan.quant_map is None else plan.quant_map.table, plan.rules
    if not isinstance(table, LinearTable) or not np.array_equal(
        table.level[:3], [0.0, 1.0, -1.0][: len(table.level)]
    ):
        return None
    row = next((rule for rule in rules if isinstance(rule, Row)), None)
    labels = np.zeros(n_rows, np.uint8) if row is None else row.indices
    is_sound = len(labels) == n_rows and int(labels.max(initial=0)) < len(table.scale)
    if not is_sound or not (np.isfinite(table.scale) & (table.scale > 0)).all():
        return None
    return RowSteps(table.scale, labels)


def _after_newest(
    tensor: TensorToEncode, newest: TensorSource, rows: RowSteps, share: float
) -> tuple[RowSteps, bool]:
    """Choose steps, at most `rows`, and rounding from the difference to the newest file of the run.

    If nothing was restored since, the difference contains the errors of its rounding. These hide movements
    that are smaller, so its steps stay. Else the steps follow the movement.

    Args:
        tensor: the tensor.
        newest: the same tensor in the newest file.
        rows: the steps without a bound.
        share: factor of these steps by the mean movement of the file.

    Returns:
        The steps, and whether values were restored from files of the run, so that rounding to nearest would
        lose what training has moved since.
    """
    steps = _steps_of(newest.stored, len(rows.labels))
    bounded = replace(rows, steps=rows.steps * share)
    if steps is None:
        return bounded, False
    old = RoundingRule.of_record(newest.stored, UniformGrid.name)
    grid = GridTensor(tensor.source, newest, steps, 0.0, old)
    rule = grid.choose_rounding(tensor, PEAK, None).rounding_rule
    ratio = _ratio(steps, rows)
    if rule == old and ratio < 1 and share < MOST_MOVES * ratio:
        bounded = steps
    return bounded, rule.is_stochastic


def _ratio(these: RowSteps, others: RowSteps) -> float:
    """Return the geometric mean, over rows, of the ratio of their steps."""
    return float(np.exp2(np.mean(np.log2(these.steps[these.labels] / others.steps[others.labels]))))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Method):
    """Weights on a uniform grid whose steps depend on sensitivity, with lossy optimizer state.

    There is no limit on the loss of quality with a fixed step: the file records the measured errors.

    Attributes:
        step: multiple of the reference step, above 0. The same multiple causes a similar loss change in any
            model: the expected change is proportional to its square (`ckptz.codec.grid_steps.row_steps`).
        dead_zone: additional share of a step, on both sides of zero, that becomes zero; by default 0.1, which
            measured best, and 0 for files to resume from. Not used with stochastic rounding.
        full_step: step of files without base, whose error training does not correct later; by default `step`.
        moments: settings of lossy optimizer state; None keeps it exactly.
        min_elements: smaller weights, and those of one dimension, are kept exactly if `moments` is None. Else
            they are rounded: to an eighth of the step from their second moments, at most an eighth of their
            standard deviation, or to a relative 2^-10 if that is coarser or there are no second moments.
        purpose: "resume" preserves the movement of training, however often it restarts from such files;
            "ship" makes the smallest file for evaluation. "auto" means resume for files with optimizer state
            or with a base and for runs that expect restarts, and ship for weights only.
        most_moves: largest step of a delta to resume from, in mean movements since the newest file.

    Example:
        >>> from ckptz import Grid
        >>> Grid(step=1.5).step
        1.5
    """

    step: float = 1.0
    dead_zone: float | None = None
    moments: Moments | None = MOMENTS
    min_elements: int = MIN_ELEMENTS
    purpose: str = "auto"
    full_step: float | None = None
    most_moves: float = MOST_MOVES
    name: ClassVar[str] = "grid"
    reads: ClassVar[frozenset[str]] = frozenset({MOMENTS_FROM, SENSITIVITY, CALIBRATION})

    def __post_init__(self) -> None:
        Method.__post_init__(self)
        if not isinstance(self.moments, Moments | None):
            raise ConfigError(f"moments must be ckptz.Moments or None, got {self.moments!r}")
        for name in ("step", "full_step"):
            step = getattr(self, name)
            if step is not None and not 0 < step <= 1024:
                raise ConfigError(f"{name} must be above 0 and at most 1024, got {step}")
        if self.purpose not in PURPOSES:
            raise ConfigError(f"purpose must be one of {', '.join(PURPOSES)}, got {self.purpose!r}")
        if not 0 < self.most_moves <= 1024:
            raise ConfigError(f"most_moves must be above 0 and at most 1024, got {self.most_moves}")
        if self.dead_zone is not None and not 0 <= self.dead_zone <= 4:
            raise ConfigError(f"dead_zone must be from 0 to 4, got {self.dead_zone}")

    @property
    def least_elements(self) -> int:
        return self.min_elements

    @property
    def loses_state(self) -> bool:
        return self.moments is not None

    def recipe(self, role: Role, dtype: DType, shape: tuple[int, ...]) -> Recipe:
        """Return the recipe: large weights of two or more dimensions become lossy."""
        if not is_large_weight(role, dtype, shape, self.min_elements):
            return EXACT
        return UniformGrid(self.step, self.dead_zone, self.purpose, self.full_step, self.most_moves)

    def recipes(
        self, tensors: Mapping[str, TensorSource], roles: Mapping[str, Role], trained: Collection[str] = ()
    ) -> dict[str, Recipe]:
        """Return the recipe of each tensor; that of moments depends on the parameter."""
        weights = self
        is_trained = bool(trained) or any(roles[name].role in MOMENT_ROLES for name in tensors)
        if self.purpose == "auto" and is_trained:
            weights = replace(self, purpose="resume")
        chosen = Method.recipes(weights, tensors, roles)
        if self.moments is None:
            return chosen
        floats = {name: source for name, source in tensors.items() if source.dtype.name in FLOAT_KINDS}
        trained = {
            *trained,
            *(roles[n].parameter for n in tensors if roles[n].role not in ("weight", "other")),
        }
        second = {
            (roles[name].parameter, source.shape): name
            for name, source in floats.items()
            if roles[name].role == "exp_avg_sq"
        }
        for name, source in floats.items():
            role = roles[name]
            # Untrained tensors stay exact: buffers may be, for example, frequencies of a positional encoding.
            if role.role == "weight" and not chosen[name].is_lossy and role.parameter in trained:
                chosen[name] = FineRounding(step=FINE * self.step)
            elif (recipe := recipe_of_state(role, source.shape, self.moments, second)) is not None:
                chosen[name] = recipe
        return chosen

    def for_restarts(self, n: int, *, is_guided: bool = True, late_factor: float = 1.0) -> Self:
        """Return finer steps for more restarts, since each restart adds a loss that grows with the step.

        Full files get still finer steps, because the error of the first one remains through all restarts.
        Steps of weights are also finer without second moments, and near the end of training. The purpose is
        to resume, also for weights without optimizer state, as those of SGD without momentum.
        """
        share = RESTART_SHARE * min(max(USUAL_RESTORES / n, 1 / 16), 1.0)
        step = self.step * share * (1.0 if is_guided else UNGUIDED_SHARE)
        finer = self._with_step(step * late_factor, share)
        full_step = self.full_step or step * min(FULL_SHARE, late_factor)
        purpose = "resume" if self.purpose == "auto" else self.purpose
        return replace(finer, full_step=full_step, most_moves=self.most_moves * late_factor, purpose=purpose)

    def scaled(self, multiplier: float) -> Self:
        """Return the settings with all steps multiplied; the steps of moments have a maximum."""
        return self._with_step(multiplier, multiplier)

    def _with_step(self, step: float, share: float) -> Self:
        moments = self.moments
        if moments is not None:
            moments = replace(
                moments,
                second_step=min(moments.second_step * share, MAX_SECOND_STEP),
                first_step=min(moments.first_step * share, MAX_FIRST_STEP),
            )
        return replace(self, step=step, moments=moments)


def _row_steps(
    source: TensorSource, step: float, guide: SideInformation, statistics: TensorStatistics
) -> RowSteps:
    """Choose the steps of the rows; a single step if rows are too short or too many for labels."""
    n_rows = n_rows_of(tuple(source.shape))
    row_patterns = statistics.n_patterns // n_rows
    sensitivity = None if statistics.row_sums is None else statistics.row_sums / row_patterns
    if sensitivity is not None and (row_patterns < MIN_ROW_VALUES or n_rows > MAX_INDICES):
        sensitivity = sensitivity.mean(keepdims=True)
    mean = guide.mean_sensitivity
    if mean is None:
        mean = statistics.sensitivity_sum / statistics.n_patterns
    return row_steps(step, statistics.spread, sensitivity, mean)
