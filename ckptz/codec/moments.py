"""Lossy optimizer state: the recipe of each of its tensors, and their planning.

Second moments are predicted by zero, by the base, or by an outer product of two vectors as in Adafactor. The
prediction with the smallest size on a sample is used, with the base's codes as contexts if that is smaller.
Tensors with values that second moments cannot have (infinities, NaNs, negative values) stay lossless, with a
note.

First moments and momenta are stored as a sum of few outer products, or as levels by context. If the size of
their future updates is known, most of these updates are in few directions, which are stored if they are worth
their bits (`ckptz.codec.low_rank`). The others are lost: updates of about ten steps. A Checkpointer adds part
of them to the weights (`ckptz.guidance.momentum`).

For other optimizers (Lion uses the sign of a first moment, Muon orthogonalizes it), small elements matter as
much as large ones, so first moments are quantized to levels. Their context is the magnitude of the restored
second moment, so that steps are proportional to its root; without second moments, a label of the row by its
spread.

Small tensors are stored as byte planes of rounded values, since a table of levels would be larger than the
tensor. Their steps are an eighth of those of large weights: so few elements need few bytes anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.chunk import restored_chunk
from ckptz.codec.grid_steps import row_steps
from ckptz.codec.lossless import MIN_CONTEXT_VALUES, counts_by_base, exact_with_note, plan_lossless
from ckptz.codec.low_rank import low_rank
from ckptz.codec.method import Recipe, Setting
from ckptz.codec.moment_bounds import MomentBound
from ckptz.codec.moment_codes import (
    Labels,
    LogLevelQuantizer,
    Prediction,
    StepContexts,
    StepQuantizer,
)
from ckptz.codec.moment_maps import (
    EXPONENT_MASKS,
    MANTISSA_BITS,
    N_LABELS,
    LevelRange,
    LevelSums,
    LogLevels,
    LogSums,
    best_log_levels,
    context_roots,
    first_map,
    log_level_step,
    row_labels,
    second_map,
)
from ckptz.codec.quantizer import Quantizer
from ckptz.codec.rounding_rule import TO_NEAREST, RoundingRule, choose_rounding
from ckptz.codec.sensitivity import floats_in
from ckptz.codec.tensor import MapFunction, TensorStatistics, TensorToEncode, summed
from ckptz.codec.tensor_plan import ContextCounts, TensorPlan, stream_tables
from ckptz.errors import ConfigError, coerce_numeric_fields
from ckptz.format.context_rules import MAX_INDICES, BaseCode, Magnitude, Row, labels_of_rows
from ckptz.format.frame import MAX_OUTER, outer_bytes, pack_plan
from ckptz.format.frequency import entropy_bits
from ckptz.format.plan import Domain, ExplicitTable, LowRank, Plan, Predictor, QuantizationMap
from ckptz.format.sources import CHUNK_VALUES, ChunkSources, LazySource, TensorSource, n_rows_of
from ckptz.format.values import FLOAT_KINDS
from ckptz.kernels import cpu, floats, moments
from ckptz.kernels.blas import product
from ckptz.kernels.floats import Patterns, Reals
from ckptz.state.roles import Role

Bounds = tuple[int, int]
_Planned = tuple[TensorPlan, ContextCounts, bool]  # of `_first_plan`

MIN_LOSSY_VALUES: Final = 32  # number of elements that take as many bytes as a map
MAX_EXCEPTIONS: Final = 0.25  # share of elements; with more of them, levels do not suit the tensor
SAMPLE_VALUES: Final = (
    1 << 12
)  # sample for the choice of a prediction; 1 << 14 saved 0.1 % of a delta for 4 % of its time
MOST_OF_SPREAD: Final = 1 / 8  # largest step of a small tensor, in standard deviations
LEAST_SIZE: Final = 2.0**-100  # below, intermediate results could be flushed to zero
BASE_BIAS: Final = 0.97  # size with a base relative to without that pays, as readers must find and decode it


def _is_finite(source: TensorSource, run: MapFunction) -> bool:
    kind = FLOAT_KINDS[source.dtype.name]
    return all(run(lambda b: cpu().all_finite(source.patterns(*b), kind), source.chunk_bounds()))


def _fault_of_second(source: TensorSource, run: MapFunction) -> str:
    """Return the reason why a tensor cannot be a second moment; empty if it can."""
    # Patterns of infinities, NaNs and negative numbers are above those of finite positive ones.
    largest = max(run(lambda b: int(source.patterns(*b).max()), source.chunk_bounds()))
    if largest < EXPONENT_MASKS[FLOAT_KINDS[source.dtype.name]]:
        return ""
    return "holds negative second moments" if _is_finite(source, run) else "holds NaN or infinity"


@dataclass(frozen=True, slots=True)
class SecondMoment(Recipe):
    """Recipe of a second moment with logarithmic levels.

    Attributes:
        step: step in octaves; the error of a restored element is at most one step. Levels are placed so that
            the mean update of the elements with the same code is unchanged.
    """

    step: float
    name: ClassVar[str] = "second-moment"

    def settings(self) -> dict[str, Setting]:
        return {"step": self.step}

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan a tensor of second moments."""
        source = tensor.source
        if source.n_patterns < MIN_LOSSY_VALUES:
            return plan_lossless(source, tensor.base, tensor.run, tensor.effort)
        if fault := _fault_of_second(source, tensor.run):
            return exact_with_note(tensor, fault)
        sample = _Sample.of(source, tensor.base)
        step = log_level_step(self.step, FLOAT_KINDS[source.dtype.name])
        smallest = sample.smallest([*_predictions(tensor)], step)
        return _second_plan(tensor, *smallest)


def _predictions(tensor: TensorToEncode) -> Iterator[Prediction]:
    source, base, run = tensor.source, tensor.base, tensor.run
    kind = FLOAT_KINDS[source.dtype.name]
    yield Prediction(kind)
    if base is not None:
        yield Prediction(kind, Predictor.BASE, base=base)
    n_rows = source.shape[0] if source.shape else 1
    shape = n_rows, math.prod(source.shape[1:])  # as a matrix for the outer product
    if min(shape) > 1 and sum(shape) <= MAX_OUTER:
        sums = summed(run, lambda b: LogSums.of(cpu().to_f32(source.patterns(*b), kind), b[0], shape), source)
        yield Prediction(kind, Predictor.OUTER, factors=sums.factors())


@dataclass(frozen=True, slots=True)
class _Sample:
    """Second moments of the middle chunk at a regular stride, and the base's codes of them.

    Attributes:
        bounds: first and last pattern of the chunk.
        stride: distance of the sampled elements.
        scale: elements of the tensor per sampled one.
        is_live: whether each sampled element is above zero [n].
        ordered: ordered patterns of those above zero [n_live].
        base_codes: codes of the base for them [n_live], or None.
    """

    bounds: Bounds
    stride: int
    scale: float
    is_live: NDArray[np.bool_]
    ordered: Reals
    base_codes: NDArray[np.uint8] | None

    @classmethod
    def of(cls, source: TensorSource, base: TensorSource | None) -> _Sample:
        begin = source.n_patterns // 2 // CHUNK_VALUES * CHUNK_VALUES
        end = min(begin + CHUNK_VALUES, source.n_patterns)
        stride = -(-(end - begin) // SAMPLE_VALUES)
        patterns = source.patterns(begin, end)[::stride]
        is_live = patterns != 0
        codes = base.codes(begin, end) if base is not None and base.n_codes else None
        codes = None if codes is None else codes[::stride][is_live]
        ordered = floats.order(patterns[is_live]).astype(np.float64)
        return cls((begin, end), stride, source.n_patterns / len(patterns), is_live, ordered, codes)

    def smallest(self, predictions: Sequence[Prediction], step: int) -> tuple[LogLevelQuantizer, bool]:
        """Return the quantizer of the prediction that takes the fewest bits, and whether it is by context."""
        least = self._levels(predictions[0], step)
        for prediction in predictions[1:]:
            n_bits, quantizer, is_by_base = self._levels(prediction, step)
            if n_bits < least[0] and prediction.outer is not None:
                n_bits += 8 * outer_bytes(prediction.outer)
            if n_bits < least[0]:
                least = n_bits, quantizer, is_by_base
        return least[1:]

    def _levels(self, prediction: Prediction, step: int) -> tuple[float, LogLevelQuantizer, bool]:
        """Fit levels to a prediction, with or without the base's codes as contexts, whichever is smaller.

        Returns:
            The size in bits of the tensor without outer vectors, the quantizer, and whether contexts are the
            base's codes.
        """
        if not len(self.ordered):
            return 0.0, LogLevelQuantizer(prediction, LogLevels(step)), False
        predicted = prediction.patterns(*self.bounds)
        # The ordered pattern of zero is that of the sign bit alone.
        zero = 1 << (31 if prediction.kind == floats.F32 else 15)
        origin = floats.order(predicted[:: self.stride][self.is_live]) if len(predicted) else zero
        distances = self.ordered - origin
        log_levels = best_log_levels(distances, step)
        quantizer = LogLevelQuantizer(prediction, log_levels)
        bits, in_contexts = log_levels.bits(distances) * self.scale, math.inf
        if self.base_codes is not None:
            in_contexts = log_levels.bits(distances, self.base_codes) * self.scale
        bias = 1.0 if prediction.predictor is not Predictor.BASE else BASE_BIAS
        if in_contexts < bits * BASE_BIAS * bias:
            return in_contexts / BASE_BIAS, quantizer, True
        return bits / bias, quantizer, False


def _second_plan(tensor: TensorToEncode, quantizer: LogLevelQuantizer, is_by_base: bool) -> TensorPlan:
    """Plan the levels of a prediction, with the codes of the base as contexts if `is_by_base`."""
    source, base, run, prediction = tensor.source, tensor.base, tensor.run, quantizer.prediction
    n_contexts = (base.n_codes if base is not None and is_by_base else None) or 1
    measured = summed(run, lambda b: quantizer.sums(*b, source.patterns(*b)), source)
    if measured.n_exceptions > MAX_EXCEPTIONS * source.n_patterns:
        return plan_lossless(source, base, run, tensor.effort)
    level_range = measured.level_range()
    quantizer = replace(quantizer, level_range=level_range)
    levels = measured.levels(quantizer.log_levels, level_range, prediction)
    plan = Plan(
        quant_map=second_map(levels, level_range, prediction.kind, n_contexts),
        domain=Domain.BITS,
        predictor=prediction.predictor,
        outer=prediction.outer,
    )
    if base is None or not is_by_base:
        return TensorPlan(plan, quantizer)
    joint = counts_by_base(source, base, quantizer, run)
    plan = replace(plan, rules=(BaseCode(n_contexts),), tables=(stream_tables(joint, n_contexts),))
    return TensorPlan(plan, quantizer)


RATIOS: Final = (2.0**-6, 2.0**5)  # range of first moment / root of second moment with Adam
USUAL_RATIO: Final = 0.2  # the same for noise; more if gradients agree, or early in training
# Factor of the step of first moments of optimizers whose updates are not known, so that weights are not
# corrected for what is lost. Files that say nothing of their optimizer have whole steps. On
# bench/studies/user_runs, docstrings with Muon and Adam: whole steps end at +0.61 % (deltas of 37x),
# quarters at +0.21 % (22x), sixteenths at +0.09 % (16x), exact moments at +0.06 %.
UNKNOWN_SHARE: Final = 1 / 16
MIN_ROW_VALUES: Final = 16  # labels of shorter rows would take more bits than they save


@dataclass(frozen=True, slots=True)
class FirstMoment(Recipe):
    """Recipe of a first moment or a momentum.

    Attributes:
        step: step of levels, in roots of the restored second moment; without one, in RMS of the row. For
            outer products, a multiple of the default step.
        dead_zone: additional share of a step, on both sides of zero, that becomes zero.
        context_tensor: name of the tensor of second moments, or None.
        row_share: factor of the step of levels by row, that is, without second moments.
    """

    step: float
    dead_zone: float
    context_tensor: str | None = None
    row_share: float = 1.0
    name: ClassVar[str] = "first-moment"
    may_be_low_rank: ClassVar[bool] = True

    def settings(self) -> dict[str, Setting]:
        return {"step": self.step, "dead_zone": self.dead_zone}

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan a tensor of first moments or momenta, without base, which does not reduce its size."""
        source, run, second = tensor.source, tensor.run, None
        if self.context_tensor is not None and tensor.context_tensors:
            second = tensor.context_tensors[self.context_tensor]
        if source.n_patterns < MIN_LOSSY_VALUES:
            return plan_lossless(source, tensor.base, run, tensor.effort)
        if not _is_finite(source, run):
            return exact_with_note(tensor, "holds NaN or infinity")
        divisor, bound = tensor.guide.divisor or second, None
        if tensor.guide.bound is not None and divisor is not None:
            bound = MomentBound(tensor.guide.bound, divisor)
        if tensor.guide.update_scale is not None:
            return _low_rank_plan(tensor, second, bound, tensor.guide.update_scale, self.step)
        kind = FLOAT_KINDS[source.dtype.name]
        planned = [
            _first_plan(tensor, StepQuantizer(kind, contexts, self.dead_zone, bound))
            for contexts in self._contexts(tensor, second, bound)
        ]
        # No levels are within the bound; zeros are.
        return _smallest_within(tensor, planned, bound) or _low_rank_plan(
            tensor, second, bound, 0.0, self.step
        )

    def _contexts(
        self, tensor: TensorToEncode, second: TensorSource | None, bound: MomentBound | None
    ) -> Iterator[StepContexts]:
        """Yield the contexts to compare: by second moment if values are as large as its root, else by row."""
        source, run = tensor.source, tensor.run
        ratio = 0.0 if second is None else _mean_ratio(source, second, run)
        if second is None or (ratio and not RATIOS[0] <= ratio <= RATIOS[1]):
            yield _by_row(source, replace(self, step=self.step * self.row_share), run)
            return
        share = UNKNOWN_SHARE if tensor.guide.is_uncorrected else 1.0
        # Early in training, second moments are small, but first moments need not be more precise.
        wanted = replace(self, step=self.step * share * max(ratio / USUAL_RATIO, 1.0))
        if source.n_patterns < MIN_CONTEXT_VALUES:
            yield _as_one(second, wanted, run)
        yield _by_second(second, wanted, bound)


def _is_beyond(tensor: TensorToEncode, encoding: TensorPlan, bound: MomentBound | None) -> bool:
    """Return whether the restored tensor would have elements beyond their bound."""
    if bound is None:
        return False
    limits, kind = bound, FLOAT_KINDS[tensor.source.dtype.name]

    def has_any(bounds: Bounds) -> bool:
        sources = ChunkSources(*bounds, None, tensor.context_tensors)
        restored, _ = restored_chunk(tensor.source, encoding, sources)
        return bool(limits.is_beyond(bounds[0], restored, kind).any())

    return any(tensor.run(has_any, tensor.source.chunk_bounds()))


@dataclass(frozen=True, slots=True)
class _WithinBound(Quantizer):
    """Quantizer of a sum of outer products: elements where the sum exceeds the bound escape with code 1.

    Escaped elements are restored as powers of two within the bound if the first moment is about as large,
    else as zeros.

    Attributes:
        terms: terms of the sum; None for zeros.
        bound: bound of the elements, or None.
        kind: float type of the patterns.
    """

    terms: LowRank | None
    bound: MomentBound | None
    kind: int

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        if self.terms is None or self.bound is None:
            return np.zeros(end - begin, np.uint8)
        restored = cpu().from_f32(self.terms.products(begin, end), self.kind)
        return self.bound.is_beyond(begin, restored, self.kind).astype(np.uint8)

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        assert self.bound is not None
        return self.bound.powers(begin, patterns, self.kind)


def _low_rank_plan(
    tensor: TensorToEncode,
    second: TensorSource | None,
    bound: MomentBound | None,
    update_scale: float,
    step: float,
) -> TensorPlan:
    """Plan the outer products that are worth their bits, or zeros if none is, within the bound."""
    before = None if tensor.base is None or tensor.base.stored is None else tensor.base.stored.plan.outer
    warm = before if isinstance(before, LowRank) else None
    source = tensor.source
    factors = low_rank(source, second, update_scale, warm, tensor.seed, step, bound)
    quantizer = _WithinBound(factors, bound, FLOAT_KINDS[source.dtype.name])

    def has_zeros(bounds: Bounds) -> bool:
        return bool(quantizer.codes(*bounds, source.patterns(*bounds)).any())

    n_codes = 1 + any(tensor.run(has_zeros, source.chunk_bounds()))
    table = ExplicitTable(np.zeros((1, n_codes), np.uint32))
    plan = Plan(
        quant_map=QuantizationMap(table, np.zeros(1, np.int64), escape_code=1 if n_codes > 1 else None),
        domain=Domain.LINEAR,
        predictor=Predictor.ZERO if factors is None else Predictor.LOW_RANK,
        outer=factors,
    )
    rank = 0 if factors is None else len(factors.scales)
    return TensorPlan(plan, quantizer, recorded={"dead_zone": 0.0, "rank": rank})


def _mean_ratio(source: TensorSource, second: TensorSource, run: MapFunction) -> float:
    """Return the mean magnitude of first moments in roots of second moments; 0 if there are no nonzero ones.

    It shows whether first moments are averages of gradients, as in Adam, or of updates that are already
    divided by the root.
    """
    kind, roots = FLOAT_KINDS[source.dtype.name], context_roots(FLOAT_KINDS[second.dtype.name])

    def sums(bounds: Bounds) -> Reals:
        f32_patterns = cpu().to_f32(source.patterns(*bounds), kind)
        values, ratios = f32_patterns.view(np.float32), np.empty(len(f32_patterns))
        n_live = moments().root_ratios(f32_patterns, values, second.patterns(*bounds), roots, ratios)
        return np.array([ratios[:n_live].sum(), n_live])

    total, n_live = summed(run, sums, source)
    return float(total / max(n_live, 1))


def _by_second(second: TensorSource, wanted: FirstMoment, bound: MomentBound | None) -> StepContexts:
    """Return contexts by power of two of the second moment, with steps proportional to the typical root."""

    def labels(begin: int, end: int) -> Labels:
        magnitudes: Labels = cpu().magnitudes(second.patterns(begin, end))
        return magnitudes

    steps, most = wanted.step * context_roots(FLOAT_KINDS[second.dtype.name]), math.inf
    if bound is not None:
        # The smallest second moment of a context is two thirds of its middle; levels may be rounded up.
        most = bound.at_one * math.sqrt(2 / 3) * (1 - 2.0 ** -MANTISSA_BITS[FLOAT_KINDS[second.dtype.name]])
    return StepContexts((Magnitude(wanted.context_tensor),), steps, labels, most / wanted.step)


def _one_label(begin: int, end: int) -> Labels:
    return np.zeros(end - begin, np.uint8)


def _as_one(second: TensorSource, wanted: FirstMoment, run: MapFunction) -> StepContexts:
    """Return a single context; its step is proportional to the geometric mean of the roots."""
    roots = context_roots(FLOAT_KINDS[second.dtype.name])
    counts = summed(run, lambda b: cpu().histogram(cpu().magnitudes(second.patterns(*b))), second)
    used = (counts > 0) & (roots > 0)
    logarithms = product(np.log2(roots[used]), counts[used]) / max(counts[used].sum(), 1)
    return StepContexts((), np.array([wanted.step * 2.0**logarithms]), _one_label)


def _by_row(source: TensorSource, wanted: FirstMoment, run: MapFunction) -> StepContexts:
    """Return contexts by row, with steps proportional to its RMS; rows within half an octave share one."""
    n_patterns, n_rows = source.n_patterns, n_rows_of(tuple(source.shape))
    row_patterns = max(n_patterns // n_rows, 1)
    is_cut = row_patterns >= MIN_ROW_VALUES and n_rows <= MAX_INDICES
    n_rows, row_patterns = (n_rows, row_patterns) if is_cut else (1, n_patterns)

    def power(bounds: Bounds) -> Reals:
        values = floats.widen_f64(cpu().to_f32(source.patterns(*bounds), FLOAT_KINDS[source.dtype.name]))
        squares = np.bincount(np.arange(*bounds) // row_patterns, values * values, n_rows)
        return np.asarray(squares, np.float64)

    powers = summed(run, power, source)
    indices, spreads = row_labels(np.sqrt(powers / row_patterns))
    if len(spreads) == 1:
        return StepContexts((), wanted.step * spreads, _one_label)

    def labels(begin: int, end: int) -> Labels:
        return labels_of_rows(indices, begin, end, row_patterns)

    return StepContexts((Row(len(spreads), indices),), wanted.step * spreads, labels)


def _first_plan(tensor: TensorToEncode, quantizer: StepQuantizer) -> _Planned:
    """Plan levels; returns the plan, the counts of its codes, and whether elements may exceed their bound."""
    source, kind, contexts = tensor.source, quantizer.kind, quantizer.contexts
    measured = summed(tensor.run, lambda b: quantizer.sums(*b, source.patterns(*b)), source)
    level_range = measured.level_range()
    joint = _codes_by_context(measured, level_range)
    if not level_range.has_exceptions and (level_range.lowest, level_range.n_levels) == (0, 1):
        # All elements become zero, so no contexts are needed.
        contexts = StepContexts((), contexts.steps[:1], _one_label)
        measured = LevelSums(
            measured.counts.sum(axis=0, keepdims=True), measured.sums.sum(axis=0, keepdims=True)
        )
    # Levels are within the bound of each context, except for context 0, which contains zeros.
    middle = measured.counts.shape[1] // 2
    may_exceed = math.isinf(contexts.most) or measured.counts[0].sum() > measured.counts[0, middle]
    n_contexts = len(contexts.steps)
    plan = Plan(
        quant_map=first_map(measured, level_range, contexts.steps, kind, contexts.most),
        domain=Domain.LINEAR,
        rules=contexts.rules,
        tables=(stream_tables(joint, n_contexts),) if contexts.rules else (),
    )
    encoding = TensorPlan(plan, replace(quantizer, contexts=contexts, level_range=level_range))
    return encoding, joint, bool(may_exceed)


def _smallest_within(
    tensor: TensorToEncode, planned: list[_Planned], bound: MomentBound | None
) -> TensorPlan | None:
    """Return the smallest plan whose restored elements are within their bound; the first of equal ones."""
    source = tensor.source

    def size(one: _Planned) -> float:
        encoding, counted, _ = one
        packed = pack_plan(source.dtype, tuple(source.shape), encoding.plan)
        return len(packed) + entropy_bits(counted.counts) / 8

    ascending = sorted(planned, key=size) if len(planned) > 1 else planned
    within = (
        encoding
        for encoding, _, may_exceed in ascending
        if not (may_exceed and _is_beyond(tensor, encoding, bound))
    )
    return next(within, None)


def _codes_by_context(measured: LevelSums, level_range: LevelRange) -> ContextCounts:
    """Convert counts of levels to counts of codes by context."""
    window = measured.window(level_range)
    counts = np.zeros((len(measured.counts), N_LABELS), np.int64)
    counts[:, : level_range.n_levels] = measured.counts[:, window]
    if level_range.escape_code is not None:
        counts[:, level_range.escape_code] = measured.counts.sum(axis=1) - counts.sum(axis=1)
    contexts = np.flatnonzero(counts.sum(axis=1))
    return ContextCounts(contexts, counts[contexts])


@dataclass(frozen=True, slots=True)
class FineRounding(Recipe):
    """Recipe of a small tensor that is rounded so finely that its errors are negligible.

    Attributes:
        bits: the relative error of a restored element is at most 2^-bits, or its error at most half of
            `size`; twice that with stochastic rounding, which preserves movement since a restore on average.
        step: multiple of the grid step of a large weight; None to use `bits` only.
        size: power of two of which elements become multiples; 0 if unknown.
        rounding_rule: to the nearest value, or stochastic.
    """

    bits: int = 10
    step: float | None = None
    size: float = 0.0
    rounding_rule: RoundingRule = TO_NEAREST
    name: ClassVar[str] = "rounding"

    def settings(self) -> dict[str, Setting]:
        return {"bits": self.bits}

    def rounded(self, patterns: Patterns, kind: int, begin: int) -> Patterns:
        """Round patterns [n] from `begin` on; subnormals and those that would overflow are unchanged."""
        n_dropped = self._n_dropped(kind)
        if n_dropped <= 0:
            return patterns
        mask = patterns.dtype.type((1 << n_dropped) - 1)
        thresholds: Any = np.float32(0.5)  # a scalar needs no array of thresholds
        if self.rounding_rule.is_stochastic:
            thresholds = self.rounding_rule.thresholds(begin, len(patterns))
        rounded = (patterns + (thresholds * np.float32(1 << n_dropped)).astype(patterns.dtype)) & ~mask
        exponents = patterns.dtype.type(EXPONENT_MASKS[kind])
        is_kept = ((rounded & exponents) == exponents) | ((patterns & exponents) == 0)
        rounded = np.where(is_kept, patterns, rounded)
        if not self.size:
            return rounded
        values, size = patterns.view(np.float32), np.float32(self.size)
        with np.errstate(over="ignore"):
            multiples = np.floor(values / size + thresholds) * size
        is_small = np.abs(values) < size * np.float32(2 ** (self.bits - 1))  # `bits` would be finer
        return np.where(is_small, multiples.view(np.uint32), rounded)

    def _n_dropped(self, kind: int) -> int:
        return MANTISSA_BITS[kind] + 1 - self.bits

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan byte planes of rounded values: a table of levels would be larger than a small tensor."""
        source, run = tensor.source, tensor.run
        if not _is_finite(source, run):
            return exact_with_note(tensor, "holds NaN or infinity")
        chosen = replace(self, size=self._size_for(tensor))
        chosen = replace(chosen, rounding_rule=chosen._choose_rounding(tensor))
        kind = FLOAT_KINDS[source.dtype.name]
        restored = LazySource.of(
            source, lambda begin, end: chosen.rounded(source.patterns(begin, end), kind, begin)
        )
        recorded = {"size": chosen.size} if chosen.size else {}
        return replace(
            plan_lossless(restored, tensor.base, run, tensor.effort), rounded=restored, recorded=recorded
        )

    def _size_for(self, tensor: TensorToEncode) -> float:
        """Return the largest power of two within the step from sensitivity; 0 if the step is unknown."""
        source, guide = tensor.source, tensor.guide
        if self.step is None or guide.mean_sensitivity is None or source.dtype.name != "F32":
            return 0.0
        statistics = summed(tensor.run, lambda b: TensorStatistics.of(source, None, guide, b), source)
        if statistics.row_sums is None or not statistics.power or statistics.fault(source.dtype):
            return 0.0
        sensitivity = np.array([statistics.row_sums.sum() / statistics.n_patterns])
        step = row_steps(self.step, statistics.spread, sensitivity, guide.mean_sensitivity).steps[0]
        total = summed(tensor.run, lambda b: floats_in(source, *b).sum(dtype=np.float64), source)
        mean = total / statistics.n_patterns
        step = min(step, MOST_OF_SPREAD * math.sqrt(max(statistics.spread**2 - mean**2, 0.0)))
        return 2.0 ** math.floor(math.log2(step)) if step > LEAST_SIZE else 0.0

    def _choose_rounding(self, tensor: TensorToEncode) -> RoundingRule:
        """Choose the rounding rule from the first chunk: stochastic if values are near restored ones.

        Restored values are multiples of the step, or of a half or a quarter of it if it has grown since. The
        newest file's are known, but values are near older ones if nothing was restored since.
        """
        source, kind = tensor.source, FLOAT_KINDS[tensor.source.dtype.name]
        if self._n_dropped(kind) <= 0:
            return TO_NEAREST
        bounds = (0, min(CHUNK_VALUES, source.n_patterns))
        values = floats_in(source, *bounds).astype(np.float64)
        newest = tensor.newest or tensor.base
        others = values if newest is None else floats_in(newest, *bounds).astype(np.float64)
        exponents = np.frexp(np.maximum(np.abs(values), np.abs(others)))[1]
        steps = np.maximum(np.ldexp(1.0, exponents - self.bits), self.size)
        movements = [np.modf(values / steps * parts)[0] for parts in (1, 2, 4)]
        of_steps = np.minimum(exponents - exponents.min(), 255).astype(np.uint8)
        samples = [(one, None) for one in movements] + [((values - others) / steps, of_steps)]
        rules = (
            choose_rounding(
                one, None, TO_NEAREST, tensor.dither_seed, groups=groups, was_restored=tensor.was_restored
            )
            for one, groups in samples
        )
        return next((rule for rule in rules if rule.is_stochastic), TO_NEAREST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Settings of lossy optimizer state.

    Attributes:
        second_step: step of exp_avg_sq in octaves, the largest error of a restored second moment.
        first_step: step of exp_avg, in roots of the restored second moment; of momentum and without second
            moments, in RMS of the row. For low-rank first moments, a multiple of the default step. Of
            optimizers whose updates are not known, steps are a sixteenth of that, but for a lone exp_avg.
        first_dead_zone: additional share of a step, on both sides of zero, that becomes zero.
    """

    second_step: float = 4.0
    first_step: float = 1.0
    first_dead_zone: float = 0.35

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)
        for name in ("second_step", "first_step"):
            if not 0 < getattr(self, name) <= 64:
                raise ConfigError(f"{name} must be above 0 and at most 64, got {getattr(self, name)}")
        if not 0 <= self.first_dead_zone <= 4:
            raise ConfigError(f"first_dead_zone must be from 0 to 4, got {self.first_dead_zone}")


MOMENTS: Final = Moments()


def recipe_of_state(
    role: Role, shape: tuple[int, ...], moments: Moments, second: Mapping[tuple[str, tuple[int, ...]], str]
) -> Recipe | None:
    """Choose the recipe of optimizer state; None for other tensors.

    `second` are the names of second moments by parameter and shape.
    """
    if role.role == "exp_avg_sq":
        return SecondMoment(moments.second_step)
    if role.role in ("exp_avg", "momentum"):
        # RMSprop's momentum is already divided by the root.
        source = second.get((role.parameter, shape)) if role.role == "exp_avg" else None
        share = UNKNOWN_SHARE if role.role == "momentum" else 1.0
        return FirstMoment(moments.first_step, moments.first_dead_zone, source, share)
    return FineRounding() if role.role == "factor" else None
