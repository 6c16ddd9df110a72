"""Plans second moments: predicted from zero, from the base, or from two vectors as in Adafactor.

The smallest of these, alone or with contexts by the base's codes, is chosen by its size on a sample. What
is no second moment (infinities, NaN, negative values) leaves its tensor lossless, with a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.encode.encoding_plan import EncodingPlan, stream_tables
from ckptz.encode.histogram import Histogram
from ckptz.encode.moment_codes import LogLevelQuantizer, LogLevelSums, Prediction
from ckptz.encode.moments import LogLevels, LogSums, best_log_levels, bits_of, log_level_step, second_map
from ckptz.encode.tensor import TensorToEncode, summed
from ckptz.format.context_rules import BaseCode
from ckptz.format.frame import MAX_OUTER, outer_bytes
from ckptz.format.plan import Domain, Outer, Plan, Predictor
from ckptz.format.sources import CHUNK_VALUES, TensorSource
from ckptz.format.values import KINDS
from ckptz.kernels import cpu, floats
from ckptz.kernels.floats import Patterns
from ckptz.methods.lossless import plan_lossless
from ckptz.methods.method import Recipe, Setting
from ckptz.methods.small import counts_by_base, exact_with_note, histogram_of, sums_by

Bounds = tuple[int, int]

MIN_LOSSY_VALUES: Final = 32  # a map takes about as many bytes as this many elements
MAX_EXCEPTIONS: Final = 0.25  # with more of them, levels are no description of the tensor
SAMPLE_VALUES: Final = 1 << 16  # decides between predictions
BASE_BIAS: Final = 0.97  # a base must save this much: readers have to find and decode it


def _fault_of_second(histogram: Histogram) -> str:
    """Why a tensor is no second moment, or nothing."""
    if not histogram.is_finite:
        return "holds NaN or infinity"
    if histogram.counts[len(histogram.counts) // 2 :].any():
        return "holds negative second moments"
    return ""


@dataclass(frozen=True, slots=True)
class SecondMoment(Recipe):
    """A second moment as levels in the order of bit patterns.

    Attributes:
        step: in octaves; a restored element is within one of it, and those of each code have the exact ones'
            mean share of the root that an optimizer divides by.
    """

    step: float
    name: ClassVar[str] = "second-moment"

    def settings(self) -> dict[str, Setting]:
        return {"step": self.step}

    def plan(self, tensor: TensorToEncode) -> EncodingPlan:
        """Plan a tensor of second moments."""
        source = tensor.source
        n_patterns, kind = source.dtype.n_patterns(source.shape), KINDS[source.dtype.name]
        if n_patterns < MIN_LOSSY_VALUES:
            return plan_lossless(source, tensor.base, tensor.run)
        if fault := _fault_of_second(histogram_of(source, tensor.run)):
            return exact_with_note(tensor, fault)
        sample = _Sample.of(source, tensor.base)
        step = log_level_step(self.step, kind)
        best = min(
            (sample.candidate(prediction, step) for prediction in _predictions(tensor)),
            key=lambda candidate: candidate.predicted_bits,
        )
        return _second_plan(tensor, best)


def _predictions(tensor: TensorToEncode) -> Iterator[Prediction]:
    source, base, run = tensor.source, tensor.base, tensor.run
    kind = KINDS[source.dtype.name]
    yield Prediction(kind)
    if base is not None:
        yield Prediction(kind, Predictor.BASE, base=base)
    shape = _matrix(tuple(source.shape))
    if min(shape) > 1 and sum(shape) <= MAX_OUTER:
        sums = summed(run, lambda b: _log_sums(source, b, shape), source)
        yield Prediction(kind, Predictor.OUTER, outer=Outer(*sums.factors()))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix that an outer product fills."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _log_sums(source: TensorSource, bounds: Bounds, shape: tuple[int, int]) -> LogSums:
    return LogSums.of(cpu().to_f32(source.patterns(*bounds), KINDS[source.dtype.name]), bounds[0], shape)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prediction with its logarithmic levels, and the size that a sample promises."""

    prediction: Prediction
    log_levels: LogLevels
    predicted_bits: float
    n_base_codes: int | None = None


@dataclass(frozen=True, slots=True)
class _Sample:
    """Every so many-th pattern of the chunk in the middle, and the base's codes there."""

    source: TensorSource
    bounds: Bounds
    stride: int
    patterns: Patterns
    base_codes: NDArray[np.uint8] | None
    n_base_codes: int | None

    @classmethod
    def of(cls, source: TensorSource, base: TensorSource | None) -> _Sample:
        n_patterns = source.dtype.n_patterns(source.shape)
        begin = n_patterns // 2 // CHUNK_VALUES * CHUNK_VALUES
        end = min(begin + CHUNK_VALUES, n_patterns)
        stride = -(-(end - begin) // SAMPLE_VALUES)
        n_codes = None if base is None else base.n_codes
        codes = base.codes(begin, end) if base is not None and n_codes else None
        codes = None if codes is None else codes[::stride]
        return cls(source, (begin, end), stride, source.patterns(begin, end)[::stride], codes, n_codes)

    def candidate(self, prediction: Prediction, step: int) -> _Candidate:
        """A prediction with the levels that fit it best, alone or with contexts by the base's codes."""
        is_live = self.patterns != 0
        distances = floats.order(self.patterns[is_live]).astype(np.float64)
        predicted = prediction.patterns(*self.bounds)[:: self.stride]
        zero = float(1 << (8 * self.patterns.itemsize - 1))
        distances -= floats.order(predicted[is_live]) if len(predicted) else zero
        log_levels = best_log_levels(distances, step) if len(distances) else LogLevels(step)
        scale = self.source.dtype.n_patterns(self.source.shape) / len(self.patterns)
        bits = bits_of(log_levels.counts(distances)) * scale if len(distances) else 0.0
        side_bits = 0 if prediction.outer is None else 8 * outer_bytes(prediction.outer)
        in_contexts = self._bits_in_contexts(log_levels, distances, is_live) * scale
        bias = 1.0 if prediction.predictor is not Predictor.BASE else BASE_BIAS
        if self.base_codes is not None and in_contexts < bits * BASE_BIAS * bias:
            return _Candidate(prediction, log_levels, in_contexts / BASE_BIAS + side_bits, self.n_base_codes)
        return _Candidate(prediction, log_levels, bits / bias + side_bits)

    def _bits_in_contexts(
        self, log_levels: LogLevels, distances: NDArray[np.float64], is_live: NDArray[np.bool_]
    ) -> float:
        if self.base_codes is None or not len(distances):
            return math.inf
        labels = self.base_codes[is_live]
        return sum(bits_of(log_levels.counts(distances[labels == label])) for label in np.unique(labels))


def _second_plan(tensor: TensorToEncode, chosen: _Candidate) -> EncodingPlan:
    source, base, run = tensor.source, tensor.base, tensor.run
    n_patterns = source.dtype.n_patterns(source.shape)
    prediction, n_contexts = chosen.prediction, chosen.n_base_codes or 1
    quantizer = LogLevelQuantizer(prediction, chosen.log_levels)
    found: LogLevelSums = sums_by(quantizer, source, run)
    if found.n_exceptions > MAX_EXCEPTIONS * n_patterns:
        return plan_lossless(source, base, run)
    level_range = found.level_range()
    quantizer = replace(quantizer, level_range=level_range)
    levels = found.levels(chosen.log_levels, level_range, prediction)
    plan = Plan(
        quant_map=second_map(levels, level_range, prediction.kind, n_contexts),
        domain=Domain.BITS,
        predictor=prediction.predictor,
        outer=prediction.outer,
    )
    if base is None or chosen.n_base_codes is None:
        return EncodingPlan(plan, quantizer)
    joint = counts_by_base(source, base, quantizer, run)
    plan = replace(plan, rules=(BaseCode(n_contexts),), tables=(stream_tables(joint, n_contexts),))
    return EncodingPlan(plan, quantizer)
