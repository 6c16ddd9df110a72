"""Plans first moments and momenta: a sum of few outer products, or levels of steps by context.

Where it is known how far they will move their weights, most of what they would move lies in few directions;
these are kept as far as they are worth their bits, and the rest is lost: see `ckptz.encode.low_rank`. What is
lost is movement, as its weight would have followed it for some ten steps to come. A Checkpointer moves the
weight by the share of that which training follows: `ckptz.training.moves`.

Elsewhere (Lion takes the sign of a first moment, Muon turns all its directions to one size) small elements
count as much as large ones, and they are codes. The context of an element is then the magnitude of the second
moment that the same file restores, so that steps follow its root. Without second moments it is a label of the
row, by the row's spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.encode.encoding_plan import ContextCounts, EncodingPlan, stream_tables
from ckptz.encode.low_rank import low_rank
from ckptz.encode.moment_codes import Labels, StepContexts, StepQuantizer, values_of
from ckptz.encode.moments import N_LABELS, LevelRange, LevelSums, context_roots, first_map, row_labels
from ckptz.encode.quantizer import Quantizer
from ckptz.encode.tensor import MapFunction, TensorToEncode, summed
from ckptz.format.context_rules import MAX_INDICES, Magnitude, Row, labels_of_rows
from ckptz.format.frame import pack_plan
from ckptz.format.frequency import entropy_bits
from ckptz.format.plan import Domain, ExplicitTable, LowRank, Plan, Predictor, QuantizationMap
from ckptz.format.sources import TensorSource, n_rows_of
from ckptz.format.values import KINDS
from ckptz.kernels import cpu, floats, moments
from ckptz.kernels.floats import Patterns
from ckptz.methods.lossless import MIN_CONTEXT_VALUES, plan_lossless
from ckptz.methods.method import Recipe, Setting
from ckptz.methods.small import exact_with_note, histogram_of, sums_by

Floats = NDArray[np.float64]
Bounds = tuple[int, int]

MIN_LOSSY_VALUES: Final = 32  # a map takes about as many bytes as this many elements
RATIOS: Final = (2.0**-6, 2.0**5)  # of Adam's moments
USUAL_RATIO: Final = 0.2  # in noise; more where gradients agree, or second moments are young
MIN_ROW_VALUES: Final = 16  # shorter rows would pay more for their labels than these save


@dataclass(frozen=True, slots=True)
class FirstMoment(Recipe):
    """A first moment, or a momentum, as levels of steps by context.

    Attributes:
        step: in roots of the restored second moment; without one, in root mean squares of the row. Of outer
            products, beside the usual step.
        dead_zone: additional share of a step, on both sides of zero, that becomes zero.
        source: name of the tensor of second moments, or None.
    """

    step: float
    dead_zone: float
    source: str | None = None
    name: ClassVar[str] = "first-moment"
    may_be_low_rank: ClassVar[bool] = True

    def settings(self) -> dict[str, Setting]:
        return {"step": self.step, "dead_zone": self.dead_zone}

    @property
    def context_tensor(self) -> str | None:
        return self.source

    def plan(self, tensor: TensorToEncode) -> EncodingPlan:
        """Plan a tensor of first moments or momenta; levels gain nothing from a base."""
        source, run = tensor.source, tensor.run
        second = (
            None
            if self.source is None or tensor.context_tensors is None
            else tensor.context_tensors(self.source)
        )
        n_patterns = source.dtype.n_patterns(source.shape)
        if n_patterns < MIN_LOSSY_VALUES:
            return plan_lossless(source, tensor.base, run)
        if not histogram_of(source, run).is_finite:
            return exact_with_note(tensor, "holds NaN or infinity")
        if tensor.guide.reach is not None:
            return _low_rank_plan(tensor, second, tensor.guide.reach, self.step)
        ratio = 0.0 if second is None else _mean_ratio(source, second, run)
        if second is None or (ratio and not RATIOS[0] <= ratio <= RATIOS[1]):
            return _first_plan(tensor, self._quantizer(source, _by_row(source, self, run)))[0]
        # A second moment that is young, and small as a sum of few squares, makes no moment more precious.
        wanted = replace(self, step=self.step * max(ratio / USUAL_RATIO, 1.0))
        candidates = [_by_second(second, wanted)]
        if n_patterns < MIN_CONTEXT_VALUES:
            candidates.append(_as_one(second, wanted, run))
        sized = [_first_plan(tensor, self._quantizer(source, contexts)) for contexts in candidates]
        return min(sized, key=lambda plan: plan[1])[0]

    def _quantizer(self, source: TensorSource, contexts: StepContexts) -> StepQuantizer:
        return StepQuantizer(KINDS[source.dtype.name], contexts, self.dead_zone)


@dataclass(frozen=True, slots=True)
class _Zeros(Quantizer):
    """Gives every pattern the one code that there is."""

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        del patterns
        return np.zeros(end - begin, np.uint8)


def _low_rank_plan(
    tensor: TensorToEncode, second: TensorSource | None, reach: float, step: float
) -> EncodingPlan:
    """Plan the outer products that are worth their bits, or zeros where none is."""
    before = None if tensor.base is None or tensor.base.stored is None else tensor.base.stored.plan.outer
    warm = before if isinstance(before, LowRank) else None
    found = low_rank(tensor.source, second, reach, warm, tensor.seed, step)
    plan = Plan(
        quant_map=QuantizationMap(ExplicitTable(np.zeros((1, 1), np.uint32)), np.zeros(1, np.int64)),
        domain=Domain.LINEAR,
        predictor=Predictor.ZERO if found is None else Predictor.LOW_RANK,
        outer=found,
    )
    rank = 0 if found is None else len(found.scales)
    return EncodingPlan(plan, _Zeros(), found={"dead_zone": 0.0, "rank": rank})


def _mean_ratio(source: TensorSource, second: TensorSource, run: MapFunction) -> float:
    """Measure how large values are in roots of second moments, on average; 0 if there are none.

    Those of Adam are about as large. The first moments of some optimizers are of updates, which are divided
    by the root already.
    """
    kind, roots = KINDS[source.dtype.name], context_roots(KINDS[second.dtype.name])

    def sums(bounds: Bounds) -> Floats:
        values = values_of(source.patterns(*bounds), kind)
        ratios = np.empty(bounds[1] - bounds[0])
        n_live = moments().root_ratios(*values, second.patterns(*bounds), roots, ratios)
        return np.array([ratios[:n_live].sum(), n_live])

    total, n_live = summed(run, sums, source)
    return float(total / max(n_live, 1))


def _by_second(second: TensorSource, wanted: FirstMoment) -> StepContexts:
    def labels(begin: int, end: int) -> Labels:
        found: Labels = cpu().magnitudes(second.patterns(begin, end))
        return found

    steps = wanted.step * context_roots(KINDS[second.dtype.name])
    return StepContexts((Magnitude(wanted.source),), steps, labels)


def _one_label(begin: int, end: int) -> Labels:
    return np.zeros(end - begin, np.uint8)


def _as_one(second: TensorSource, wanted: FirstMoment, run: MapFunction) -> StepContexts:
    """Give all elements one step: the geometric mean of the contexts' roots."""
    roots = context_roots(KINDS[second.dtype.name])
    counts = summed(run, lambda b: cpu().histogram(cpu().magnitudes(second.patterns(*b))), second)
    used = (counts > 0) & (roots > 0)
    logarithms = np.log2(roots[used]) @ counts[used] / max(counts[used].sum(), 1)
    return StepContexts((), np.array([wanted.step * 2.0**logarithms]), _one_label)


def _by_row(source: TensorSource, wanted: FirstMoment, run: MapFunction) -> StepContexts:
    """A step for each row, in proportion to its root mean square; rows share steps by half octaves."""
    n_patterns, n_rows = source.dtype.n_patterns(source.shape), n_rows_of(tuple(source.shape))
    row_patterns = max(n_patterns // n_rows, 1)
    is_cut = row_patterns >= MIN_ROW_VALUES and n_rows <= MAX_INDICES
    n_rows, row_patterns = (n_rows, row_patterns) if is_cut else (1, n_patterns)

    def power(bounds: Bounds) -> Floats:
        values = floats.widen_f64(cpu().to_f32(source.patterns(*bounds), KINDS[source.dtype.name]))
        squares = np.bincount(np.arange(*bounds) // row_patterns, values * values, n_rows)
        return np.asarray(squares, np.float64)

    powers = summed(run, power, source)
    indices, spreads = row_labels(np.sqrt(powers / row_patterns))
    if len(spreads) == 1:
        return StepContexts((), wanted.step * spreads, _one_label)

    def labels(begin: int, end: int) -> Labels:
        return labels_of_rows(indices, begin, end, row_patterns)

    return StepContexts((Row(len(spreads), indices),), wanted.step * spreads, labels)


def _first_plan(tensor: TensorToEncode, quantizer: StepQuantizer) -> tuple[EncodingPlan, float]:
    source, kind, contexts = tensor.source, quantizer.kind, quantizer.contexts
    found: LevelSums = sums_by(quantizer, source, tensor.run)
    level_range = found.level_range()
    joint = _codes_by_context(found, level_range)
    if not level_range.has_exceptions and (level_range.lowest, level_range.n_levels) == (0, 1):
        # All are zero: no context changes that, and a reader need not know them.
        contexts = StepContexts((), contexts.steps[:1], _one_label)
        found = LevelSums(found.counts.sum(axis=0, keepdims=True), found.sums.sum(axis=0, keepdims=True))
    n_contexts = len(contexts.steps)
    plan = Plan(
        quant_map=first_map(found, level_range, contexts.steps, kind),
        domain=Domain.LINEAR,
        rules=contexts.rules,
        tables=(stream_tables(joint, n_contexts),) if contexts.rules else (),
    )
    n_bytes = len(pack_plan(source.dtype, tuple(source.shape), plan)) + entropy_bits(joint.counts) / 8
    return EncodingPlan(plan, replace(quantizer, contexts=contexts, level_range=level_range)), n_bytes


def _codes_by_context(found: LevelSums, level_range: LevelRange) -> ContextCounts:
    """Count how often each code occurs in each context."""
    window = found.window(level_range)
    counts = np.zeros((len(found.counts), N_LABELS), np.int64)
    counts[:, : level_range.n_levels] = found.counts[:, window]
    if level_range.escape_code is not None:
        counts[:, level_range.escape_code] = found.counts.sum(axis=1) - counts.sum(axis=1)
    contexts = np.flatnonzero(counts.sum(axis=1))
    return ContextCounts(contexts, counts[contexts])
