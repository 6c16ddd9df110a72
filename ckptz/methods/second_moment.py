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
from ckptz.kernels import cpu, floats, moments
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
    bits_of,
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
BASE_BIAS: Final = 0.97  # a base must save this much: readers have to find and decode it


@dataclass(frozen=True, slots=True)
class Prediction:
    """The value that second moments are told apart from: zero, the base, or an outer product."""

    kind: int
    predictor: Predictor = Predictor.ZERO
    base: TensorSource | None = None
    outer: Outer | None = None

    def units(self, begin: int, end: int) -> Units:
        """Predict units begin..end, [end - begin]; none at all for a prediction of zero."""
        if self.base is not None:
            return self.base.units(begin, end)
        if self.outer is None:
            return np.empty(0, np.uint32 if self.kind == floats.F32 else np.uint16)
        products = cpu().outer_product(self.outer.rows, self.outer.columns, begin, end)
        units: Units = cpu().from_f32(products, self.kind)
        return units


@dataclass(frozen=True, slots=True)
class LadderQuantizer(Quantizer):
    """The quantizer of a second moment: levels, exact zeros and exceptions."""

    prediction: Prediction
    ladder: Ladder
    rungs: Rungs | None = None

    @property
    def levels(self) -> tuple[int, ...]:
        """The ladder as the kernels take it."""
        width = 32 if self.prediction.kind == floats.F32 else 16
        top, every = 1 << (width - 1), (1 << width) - 1
        return self.ladder.step, self.ladder.phase, top, every, largest_unit(self.prediction.kind)

    def codes(self, begin: int, end: int, units: Units) -> NDArray[np.uint8]:
        """Give the codes of units begin..end, uint8 [end - begin]: levels, exact zeros, exceptions.

        A level is the nearest one, if all that it may come to stand for are finite numbers above zero.
        """
        rungs = self.rungs
        assert rungs is not None
        codes = np.empty(len(units), np.uint8)
        codes_of = (rungs.lowest, rungs.n_levels, rungs.zero_code or 0, rungs.escape_code or 0)
        moments().ladder_codes(units, self.prediction.units(begin, end), self.levels, codes_of, codes)
        return codes


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
    return LogSums.of(cpu().to_f32(source.units(*bounds), KINDS[source.dtype.name]), bounds[0], shape)


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
        distances = floats.order(self.units[is_live]).astype(np.float64)
        predicted = prediction.units(*self.bounds)[:: self.stride]
        zero = float(1 << (8 * self.units.itemsize - 1))
        distances -= floats.order(predicted[is_live]) if len(predicted) else zero
        ladder = best_ladder(distances, step) if len(distances) else Ladder(step)
        scale = self.source.dtype.n_units(self.source.shape) / len(self.units)
        bits = bits_of(ladder.counts(distances)) * scale if len(distances) else 0.0
        side_bits = 0 if prediction.outer is None else 8 * outer_bytes(prediction.outer)
        classed = self._classed_bits(ladder, distances, is_live) * scale
        bias = 1.0 if prediction.predictor is not Predictor.BASE else BASE_BIAS
        if self.base_codes is not None and classed < bits * BASE_BIAS * bias:
            return _Candidate(prediction, ladder, classed / BASE_BIAS + side_bits, self.n_base_codes)
        return _Candidate(prediction, ladder, bits / bias + side_bits)

    def _classed_bits(
        self, ladder: Ladder, distances: NDArray[np.float64], is_live: NDArray[np.bool_]
    ) -> float:
        if self.base_codes is None or not len(distances):
            return math.inf
        labels = self.base_codes[is_live]
        return sum(bits_of(ladder.counts(distances[labels == label])) for label in np.unique(labels))


@dataclass(frozen=True, slots=True)
class _Found:
    """How often each level occurs, what it stands for, exact zeros, and elements that no level restores."""

    first: int  # level
    counts: Integers  # of it and those behind it [n]
    roots: NDArray[np.float64]  # sums of what roots of the elements are to the root of their level [n]
    n_zeros: int
    n_exceptions: int

    @classmethod
    def of(cls, quantizer: LadderQuantizer, source: TensorSource, bounds: Bounds) -> _Found:
        units, kind = source.units(*bounds), quantizer.prediction.kind
        first, n = quantizer.ladder.span(kind)
        sums = np.zeros((4, n + 2), np.int64), np.zeros((4, n + 2))
        predicted = quantizer.prediction.units(*bounds)
        moments().ladder_sums(units, predicted, quantizer.levels, kind, first, *sums)
        counts, roots = (turns.sum(axis=0) for turns in sums)
        return cls(first, counts[:-2], roots[:-2], int(counts[-2]), int(counts[-1]))

    def __add__(self, other: _Found) -> _Found:
        n_zeros, n_exceptions = self.n_zeros + other.n_zeros, self.n_exceptions + other.n_exceptions
        counts, roots = self.counts + other.counts, self.roots + other.roots
        return _Found(self.first, counts, roots, n_zeros, n_exceptions)

    def rungs(self) -> Rungs:
        """Give codes to the levels that occur."""
        used = np.flatnonzero(self.counts)
        return rungs_of(self.first + used, self.counts[used], self.n_zeros, self.n_exceptions)

    def levels(self, ladder: Ladder, rungs: Rungs, prediction: Prediction) -> Integers:
        """Give what each code stands for, from the predictor in units of the last place [n_levels].

        Adam's steps are proportional to 1 / sqrt(v). At the ladder's own levels, the steps of all elements
        of a code together would be larger or smaller than before; so levels are moved to where they are not.
        Drawn thresholds do the same for each element by itself, at six times the bits and more error.
        """
        levels = ladder.distances(rungs.lowest + np.arange(rungs.n_levels))
        at = slice(rungs.lowest - self.first, rungs.lowest - self.first + rungs.n_levels)
        used = np.flatnonzero(self.counts[at])
        shares = self.roots[at][used] / self.counts[at][used]
        octave = 1 << MANTISSA_BITS[prediction.kind]
        shifts = np.rint(2 * octave * np.log2(shares)).astype(np.int64)
        levels[used] += np.clip(shifts, -(ladder.step // 2), ladder.step // 2)
        return np.maximum(levels, 1) if prediction.predictor is Predictor.ZERO else levels


def _second_plan(subject: Subject, chosen: _Candidate) -> Draft:
    source, base, run = subject.source, subject.base, subject.run
    n_units = source.dtype.n_units(source.shape)
    prediction, n_classes = chosen.prediction, chosen.n_base_codes or 1
    quantizer = LadderQuantizer(prediction, chosen.ladder)
    found = summed(run, lambda b: _Found.of(quantizer, source, b), source)
    if found.n_exceptions > MAX_EXCEPTIONS * n_units:
        return plan_lossless(source, base, run)
    rungs = found.rungs()
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
