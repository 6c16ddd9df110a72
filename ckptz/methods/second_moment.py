"""Plans second moments: predicted from zero, from the base, or from two vectors as in Adafactor.

The smallest of these, alone or with classes by the base's codes, is chosen by its size on a sample. What
is no second moment (infinities, NaN, negative values) leaves its tensor lossless, with a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.frame_plan import MAX_OUTER, outer_bytes
from ckptz.codec.plan import Domain, Outer, Plan, Predictor
from ckptz.codec.units import CHUNK_UNITS, TensorSource
from ckptz.codec.values import KINDS
from ckptz.encoding.counts import stream_tables
from ckptz.encoding.draft import Draft, Subject, summed
from ckptz.kernels import cpu, floats, rounding
from ckptz.kernels.floats import Integers, Units
from ckptz.methods.lossless import plan_lossless
from ckptz.methods.method import Recipe, Setting
from ckptz.methods.small import counts_by_base, exact_with_note, sketch_of
from ckptz.quant.moments import (
    Ladder,
    LogSums,
    Rungs,
    best_ladder,
    counted,
    entropy_of,
    ladder_step,
    largest_unit,
    rungs_of,
    second_map,
)
from ckptz.quant.quantizer import Quantizer
from ckptz.quant.sketch import Sketch
from ckptz.transform.classes import BaseCode

Bounds = tuple[int, int]

MIN_LOSSY_UNITS: Final = 32  # a map takes about as many bytes as this many elements
MAX_EXCEPTIONS: Final = 0.25  # with more of them, levels are no description of the tensor
SAMPLE_UNITS: Final = 1 << 16  # decides between predictions
BLOCK_UNITS: Final = 1 << 16  # worked on at once, so that 64-bit intermediates stay small
BASE_BIAS: Final = 0.97  # a base must save this much: readers have to find and decode it


@dataclass(frozen=True, slots=True)
class Prediction:
    """The value that second moments are told apart from: zero, the base, or an outer product."""

    kind: int
    predictor: Predictor = Predictor.ZERO
    base: TensorSource | None = None
    outer: Outer | None = None

    def orders(self, begin: int, end: int) -> Integers:
        """Predict the bit patterns of units begin..end, [end - begin], in the order of the values."""
        if self.base is not None:
            units = self.base.units(begin, end)
        elif self.outer is not None:
            products = cpu().outer_product(self.outer.rows, self.outer.columns, begin, end)
            units = cpu().from_f32(products, self.kind)
        else:
            units = np.zeros(end - begin, np.uint32 if self.kind == floats.F32 else np.uint16)
        ordered: Integers = floats.order(units).astype(np.int64)
        return ordered


@dataclass(frozen=True, slots=True)
class LadderQuantizer(Quantizer):
    """The quantizer of a second moment: levels, exact zeros and exceptions."""

    prediction: Prediction
    ladder: Ladder
    key: int
    rungs: Rungs | None = None

    def indices(self, begin: int, end: int, units: Units) -> tuple[Integers, NDArray[np.bool_]]:
        """Find the level of each unit, and whether that level restores a finite number above zero."""
        predicted = self.prediction.orders(begin, end)
        indices, is_restored = np.empty(len(units), np.int64), np.empty(len(units), np.bool_)
        drawn = rounding().thresholds(self.key, begin, end - begin)
        zero = 1 << (8 * units.itemsize - 1)
        largest = zero + largest_unit(self.prediction.kind)
        for at in _blocks(len(units)):
            orders = floats.order(units[at]).astype(np.int64)
            indices[at] = self._drawn(orders, predicted[at], drawn[at])
            distances = self.ladder.distances(indices[at])
            if self.prediction.predictor is Predictor.ZERO:
                distances = np.maximum(distances, 1)
            restored = predicted[at] + distances
            is_restored[at] = (restored > zero) & (restored <= largest)
        return indices, is_restored

    def _drawn(self, orders: Integers, predicted: Integers, drawn: NDArray[np.float32]) -> Integers:
        """Choose between the levels beside each unit so that 1 / sqrt(v) stays on average.

        Updates are proportional to it; the nearest level would make them larger or smaller for good.
        """
        below = self.ladder.below(orders - predicted)
        low = predicted + self.ladder.distances(below)
        ends = low, orders, low + self.ladder.step
        at_low, exact, at_high = (self._inverse_roots(found) for found in ends)
        return below + (drawn * (at_low - at_high) < at_low - exact)

    def _inverse_roots(self, orders: Integers) -> NDArray[np.float32]:
        """Turn bit patterns in the order of the values into 1 / sqrt, as of the nearest number above zero."""
        kind = self.prediction.kind
        unit, n_bits = (np.uint32, 32) if kind == floats.F32 else (np.uint16, 16)
        patterns = np.clip(orders - (1 << (n_bits - 1)), 1, largest_unit(kind)).astype(unit)
        values: NDArray[np.float32] = cpu().to_f32(patterns, kind).view(np.float32)
        roots: NDArray[np.float32] = np.reciprocal(np.sqrt(values))
        return roots

    def codes(self, begin: int, end: int, units: Units) -> NDArray[np.uint8]:
        """Give the codes of units begin..end, uint8 [end - begin]: levels, exact zeros, exceptions."""
        assert self.rungs is not None
        indices, is_restored = self.indices(begin, end, units)
        codes = indices - self.rungs.lowest
        is_level = is_restored & (codes >= 0) & (codes < self.rungs.n_levels)
        codes[~is_level] = self.rungs.escape_code or 0
        codes[units == 0] = self.rungs.zero_code or 0
        return codes.astype(np.uint8)


def _fault_of_second(sketch: Sketch) -> str:
    """Why a tensor is no second moment, or nothing."""
    if not sketch.is_finite:
        return "holds NaN or infinity"
    if sketch.counts[len(sketch.counts) // 2 :].any():
        return "holds negative second moments"
    return ""


@dataclass(frozen=True, slots=True)
class SecondMoment(Recipe):
    """A second moment as levels in the order of bit patterns.

    Attributes:
        step: in octaves; a restored element is within one of it, and on average has the exact one's inverse
            root, which is what an optimizer divides by.
    """

    step: float
    name: ClassVar[str] = "second-moment"

    def settings(self) -> dict[str, Setting]:
        return {"step": self.step}

    def plan(self, subject: Subject) -> Draft:
        """Plan a tensor of second moments."""
        source = subject.source
        n_units, kind = source.dtype.n_units(source.shape), KINDS[source.dtype.name]
        if n_units < MIN_LOSSY_UNITS:
            return plan_lossless(source, subject.base, subject.run)
        if fault := _fault_of_second(sketch_of(source, subject.run)):
            return exact_with_note(subject, fault)
        sample = _Sample.of(source, subject.base, subject.name_seed)
        step = ladder_step(self.step, kind)
        best = min(
            (sample.candidate(prediction, step) for prediction in _predictions(subject)),
            key=lambda candidate: candidate.predicted_bits,
        )
        return _second_plan(subject, best)


def _predictions(subject: Subject) -> Iterator[Prediction]:
    source, base, run = subject.source, subject.base, subject.run
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
    patterns = cpu().to_f32(source.units(*bounds), KINDS[source.dtype.name])
    return LogSums.of(floats.widen_f64(patterns), bounds[0], shape)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prediction with its ladder, and the size that a sample promises."""

    prediction: Prediction
    ladder: Ladder
    predicted_bits: float
    n_base_codes: int | None = None


@dataclass(frozen=True, slots=True)
class _Sample:
    """Every so many-th unit of the chunk in the middle, and the base's codes there."""

    source: TensorSource
    bounds: Bounds
    stride: int
    units: Units
    base_codes: NDArray[np.uint8] | None
    n_base_codes: int | None
    key: int

    @classmethod
    def of(cls, source: TensorSource, base: TensorSource | None, key: int) -> _Sample:
        n_units = source.dtype.n_units(source.shape)
        begin = n_units // 2 // CHUNK_UNITS * CHUNK_UNITS
        end = min(begin + CHUNK_UNITS, n_units)
        stride = -(-(end - begin) // SAMPLE_UNITS)
        n_codes = None if base is None else base.n_codes
        codes = base.codes(begin, end) if base is not None and n_codes else None
        codes = None if codes is None else codes[::stride]
        return cls(source, (begin, end), stride, source.units(begin, end)[::stride], codes, n_codes, key)

    def candidate(self, prediction: Prediction, step: int) -> _Candidate:
        """A prediction with the ladder that fits it best, alone or with classes by the base's codes."""
        is_live = self.units != 0
        predicted = prediction.orders(*self.bounds)[:: self.stride][is_live]
        distances = floats.order(self.units[is_live]).astype(np.int64) - predicted
        drawn = rounding().thresholds(self.key, 0, len(distances))
        ladder = best_ladder(distances, step, drawn) if len(distances) else Ladder(step)
        indices = ladder.drawn(distances, drawn)
        scale = self.source.dtype.n_units(self.source.shape) / len(self.units)
        bits = entropy_of(indices) * scale
        side_bits = 0 if prediction.outer is None else 8 * outer_bytes(prediction.outer)
        classed = self._classed_bits(indices, is_live) * scale
        bias = 1.0 if prediction.predictor is not Predictor.BASE else BASE_BIAS
        if self.base_codes is not None and classed < bits * BASE_BIAS * bias:
            return _Candidate(prediction, ladder, classed / BASE_BIAS + side_bits, self.n_base_codes)
        return _Candidate(prediction, ladder, bits / bias + side_bits)

    def _classed_bits(self, indices: Integers, is_live: NDArray[np.bool_]) -> float:
        if self.base_codes is None or not len(indices):
            return math.inf
        labels = self.base_codes[is_live]
        return sum(entropy_of(indices[labels == label]) for label in np.unique(labels))


def _blocks(n_units: int) -> Iterator[slice]:
    for at in range(0, n_units, BLOCK_UNITS):
        yield slice(at, min(at + BLOCK_UNITS, n_units))


@dataclass(frozen=True, slots=True)
class _Found:
    """How often each level occurs, exact zeros, and elements that their level does not restore."""

    indices: Integers
    counts: Integers
    n_zeros: int
    n_exceptions: int

    @classmethod
    def of(cls, quantizer: LadderQuantizer, source: TensorSource, bounds: Bounds) -> _Found:
        units = source.units(*bounds)
        indices, is_restored = quantizer.indices(*bounds, units)
        is_live = units != 0
        levels, counts = counted(indices[is_live & is_restored])
        n_live = int(is_live.sum())
        return cls(levels, counts, len(units) - n_live, n_live - int(counts.sum()))

    def __add__(self, other: _Found) -> _Found:
        indices = np.union1d(self.indices, other.indices)
        counts = np.zeros(len(indices), np.int64)
        for part in (self, other):
            counts[np.searchsorted(indices, part.indices)] += part.counts
        n_exceptions = self.n_exceptions + other.n_exceptions
        return _Found(indices, counts, self.n_zeros + other.n_zeros, n_exceptions)


def _second_plan(subject: Subject, chosen: _Candidate) -> Draft:
    source, base, run = subject.source, subject.base, subject.run
    n_units = source.dtype.n_units(source.shape)
    quantizer = LadderQuantizer(chosen.prediction, chosen.ladder, subject.name_seed)
    found = summed(run, lambda b: _Found.of(quantizer, source, b), source)
    if found.n_exceptions > MAX_EXCEPTIONS * n_units:
        return plan_lossless(source, base, run)
    rungs = rungs_of(found.indices, found.counts, found.n_zeros, found.n_exceptions)
    quantizer = replace(quantizer, rungs=rungs)
    prediction, n_classes = chosen.prediction, chosen.n_base_codes or 1
    is_absolute = prediction.predictor is Predictor.ZERO
    plan = Plan(
        quant_map=second_map(chosen.ladder, rungs, prediction.kind, n_classes, is_absolute=is_absolute),
        domain=Domain.BITS,
        predictor=prediction.predictor,
        outer=prediction.outer,
    )
    if base is None or chosen.n_base_codes is None:
        return Draft(plan, quantizer)
    joint = counts_by_base(source, base, quantizer, run)
    plan = replace(plan, rules=(BaseCode(n_classes),), tables=(stream_tables(joint, n_classes),))
    return Draft(plan, quantizer)
