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
from ckptz.kernels import cpu, floats
from ckptz.kernels.floats import Integers, Units
from ckptz.methods.lossless import plan_lossless
from ckptz.methods.method import Recipe, Setting
from ckptz.methods.small import counts_by_base, exact_with_note, sketch_of
from ckptz.quant.moments import (
    MANTISSA_BITS,
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
    rungs: Rungs | None = None

    def indices(self, begin: int, end: int, units: Units) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Find the level of each unit [n].

        Returns:
            Indices of levels; bit patterns of these in the order of the values; and whether all that this
            code may come to stand for is a finite number above zero.
        """
        predicted = self.prediction.orders(begin, end)
        indices, restored = np.empty(len(units), np.int64), np.empty(len(units), np.int64)
        is_restored = np.empty(len(units), np.bool_)
        zero, margin = 1 << (8 * units.itemsize - 1), self.ladder.step // 2
        largest = zero + largest_unit(self.prediction.kind)
        is_absolute = self.prediction.predictor is Predictor.ZERO
        for at in _blocks(len(units)):
            distances = floats.order(units[at]).astype(np.int64) - predicted[at]
            indices[at] = self.ladder.indices(distances)
            restored[at] = predicted[at] + self.ladder.distances(indices[at])
            is_restored[at] = (restored[at] + margin <= largest) & (
                is_absolute | (restored[at] - margin > zero)
            )
        return indices, restored, is_restored

    def codes(self, begin: int, end: int, units: Units) -> NDArray[np.uint8]:
        """Give the codes of units begin..end, uint8 [end - begin]: levels, exact zeros, exceptions."""
        assert self.rungs is not None
        indices, _, is_restored = self.indices(begin, end, units)
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
        step: in octaves; a restored element is within one of it, and those of each code have the exact ones'
            mean share of the root that an optimizer divides by.
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
        sample = _Sample.of(source, subject.base)
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

    @classmethod
    def of(cls, source: TensorSource, base: TensorSource | None) -> _Sample:
        n_units = source.dtype.n_units(source.shape)
        begin = n_units // 2 // CHUNK_UNITS * CHUNK_UNITS
        end = min(begin + CHUNK_UNITS, n_units)
        stride = -(-(end - begin) // SAMPLE_UNITS)
        n_codes = None if base is None else base.n_codes
        codes = base.codes(begin, end) if base is not None and n_codes else None
        codes = None if codes is None else codes[::stride]
        return cls(source, (begin, end), stride, source.units(begin, end)[::stride], codes, n_codes)

    def candidate(self, prediction: Prediction, step: int) -> _Candidate:
        """A prediction with the ladder that fits it best, alone or with classes by the base's codes."""
        is_live = self.units != 0
        predicted = prediction.orders(*self.bounds)[:: self.stride][is_live]
        distances = floats.order(self.units[is_live]).astype(np.int64) - predicted
        ladder = best_ladder(distances, step) if len(distances) else Ladder(step)
        indices = ladder.indices(distances)
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
    """How often each level occurs, what it stands for, exact zeros, and elements that no level restores."""

    indices: Integers
    counts: Integers
    roots: NDArray[np.float64]  # sum of what roots of the elements are to the root of their level
    n_zeros: int
    n_exceptions: int

    @classmethod
    def of(cls, quantizer: LadderQuantizer, source: TensorSource, bounds: Bounds) -> _Found:
        units = source.units(*bounds)
        kind = quantizer.prediction.kind
        indices, restored, is_restored = quantizer.indices(*bounds, units)
        is_live = units != 0
        is_level = is_live & is_restored
        levels, counts = counted(indices[is_level])
        # Of the smallest number above zero, where the lowest level from zero lies below it.
        patterns = np.maximum(restored[is_level] - (1 << (8 * units.itemsize - 1)), 1).astype(units.dtype)
        exact, nominal = (cpu().to_f32(u, kind).view(np.float32) for u in (units[is_level], patterns))
        roots = np.sqrt(exact / nominal)
        at = np.searchsorted(levels, indices[is_level])
        sums = np.bincount(at, roots, len(levels)).astype(np.float64)
        n_live = int(is_live.sum())
        return cls(levels, counts, sums, len(units) - n_live, n_live - int(counts.sum()))

    def __add__(self, other: _Found) -> _Found:
        indices = np.union1d(self.indices, other.indices)
        counts, roots = np.zeros(len(indices), np.int64), np.zeros(len(indices))
        for part in (self, other):
            at = np.searchsorted(indices, part.indices)
            counts[at] += part.counts
            roots[at] += part.roots
        n_exceptions = self.n_exceptions + other.n_exceptions
        return _Found(indices, counts, roots, self.n_zeros + other.n_zeros, n_exceptions)

    def levels(self, ladder: Ladder, rungs: Rungs, prediction: Prediction) -> Integers:
        """Give what each code stands for, from the predictor in units of the last place [n_levels].

        Adam's steps are proportional to 1 / sqrt(v). At the ladder's own levels, the steps of all elements
        of a code together would be larger or smaller than before; so levels are moved to where they are not.
        Drawn thresholds do the same for each element by itself, at six times the bits and more error.
        """
        levels = ladder.distances(rungs.lowest + np.arange(rungs.n_levels))
        at = self.indices - rungs.lowest
        is_used = (at >= 0) & (at < rungs.n_levels)
        shares = self.roots[is_used] / self.counts[is_used]
        octave = 1 << MANTISSA_BITS[prediction.kind]
        shifts = np.rint(2 * octave * np.log2(shares)).astype(np.int64)
        levels[at[is_used]] += np.clip(shifts, -(ladder.step // 2), ladder.step // 2)
        return np.maximum(levels, 1) if prediction.predictor is Predictor.ZERO else levels


def _second_plan(subject: Subject, chosen: _Candidate) -> Draft:
    source, base, run = subject.source, subject.base, subject.run
    n_units = source.dtype.n_units(source.shape)
    prediction, n_classes = chosen.prediction, chosen.n_base_codes or 1
    quantizer = LadderQuantizer(prediction, chosen.ladder)
    found = summed(run, lambda b: _Found.of(quantizer, source, b), source)
    if found.n_exceptions > MAX_EXCEPTIONS * n_units:
        return plan_lossless(source, base, run)
    rungs = rungs_of(found.indices, found.counts, found.n_zeros, found.n_exceptions)
    quantizer = replace(quantizer, rungs=rungs)
    levels = found.levels(chosen.ladder, rungs, prediction)
    plan = Plan(
        quant_map=second_map(levels, rungs, prediction.kind, n_classes),
        domain=Domain.BITS,
        predictor=prediction.predictor,
        outer=prediction.outer,
    )
    if base is None or chosen.n_base_codes is None:
        return Draft(plan, quantizer)
    joint = counts_by_base(source, base, quantizer, run)
    plan = replace(plan, rules=(BaseCode(n_classes),), tables=(stream_tables(joint, n_classes),))
    return Draft(plan, quantizer)
