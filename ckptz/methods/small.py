"""Plans small tensors inside a lossy state: byte planes of values rounded to a relative precision.

A map of that many levels would outweigh a tensor of a few hundred elements. Also what all planners of
optimizer state share: the histogram of a tensor, and the way back to no loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ckptz.encode.encoding_plan import ContextCounts, EncodingPlan
from ckptz.encode.histogram import Histogram
from ckptz.encode.moment_codes import LogLevelQuantizer, StepQuantizer
from ckptz.encode.moments import MANTISSA_BITS, exponent_mask
from ckptz.encode.quantizer import Quantizer, key_of
from ckptz.encode.tensor import MapFunction, TensorToEncode, summed
from ckptz.format.sources import CHUNK_VALUES, DerivedSource, TensorSource
from ckptz.format.values import KINDS
from ckptz.kernels import rounding
from ckptz.kernels.floats import NEAREST, Patterns
from ckptz.methods.lossless import plan_lossless
from ckptz.methods.method import Recipe, Setting


def histogram_of(source: TensorSource, run: MapFunction) -> Histogram:
    """Make the histogram of a whole tensor, of a dtype in `KINDS`."""
    kind = KINDS[source.dtype.name]
    return summed(run, lambda b: Histogram.of(source.patterns(*b), kind), source)


def sums_by(quantizer: LogLevelQuantizer | StepQuantizer, source: TensorSource, run: MapFunction) -> Any:
    """Sum what the levels of a quantizer stand for over a whole tensor."""
    return summed(run, lambda b: quantizer.found(*b, source.patterns(*b)), source)


def counts_by_base(
    source: TensorSource, base: TensorSource, quantizer: Quantizer, run: MapFunction
) -> ContextCounts:
    """Count the codes of a tensor by those of its base, of whose alphabet the contexts are."""
    n_contexts = base.n_codes or 1

    def found(bounds: tuple[int, int]) -> ContextCounts:
        codes, labels = quantizer.codes(*bounds, source.patterns(*bounds)), base.codes(*bounds)
        labels = np.zeros(len(codes), np.uint8) if labels is None else labels
        return ContextCounts.of(labels, codes, n_contexts)

    return summed(run, found, source)


def exact_with_note(tensor: TensorToEncode, note: str) -> EncodingPlan:
    """Plan without loss, and say why it is that."""
    exact = plan_lossless(tensor.source, tensor.base, tensor.run)
    return replace(exact, note=f"{note} and stays lossless")


@dataclass(frozen=True, slots=True)
class RelativeRounding(Recipe):
    """A small tensor that is kept to a relative precision.

    Attributes:
        bits: a restored element is within 2^-bits of itself, relatively; twice that by stochastic
            rounding, by which what training has moved since a restore stays on average.
        key: of stochastic rounding, or NEAREST.
    """

    bits: int = 10
    key: int = NEAREST
    name: ClassVar[str] = "rounding"

    def settings(self) -> dict[str, Setting]:
        return {"bits": self.bits}

    def rounded(self, patterns: Patterns, kind: int, begin: int) -> Patterns:
        """Round patterns from `begin` on; those that would overflow, and subnormal ones, stay as they are."""
        n_dropped = self._n_dropped(kind)
        if n_dropped <= 0:
            return patterns
        mask = patterns.dtype.type((1 << n_dropped) - 1)
        if self.key == NEAREST:
            added: Any = patterns.dtype.type(1 << (n_dropped - 1))
        else:
            thresholds = rounding().thresholds(self.key, begin, len(patterns))
            added = (thresholds * np.float32(1 << n_dropped)).astype(patterns.dtype)
        rounded = (patterns + added) & ~mask
        exponents = patterns.dtype.type(exponent_mask(kind))
        is_kept = ((rounded & exponents) == exponents) | ((patterns & exponents) == 0)
        return np.where(is_kept, patterns, rounded)

    def _n_dropped(self, kind: int) -> int:
        return MANTISSA_BITS[kind] + 1 - self.bits

    def plan(self, tensor: TensorToEncode) -> EncodingPlan:
        """Plan byte planes of rounded values: a map of that many levels would outweigh a small tensor."""
        source, run = tensor.source, tensor.run
        if not histogram_of(source, run).is_finite:
            return exact_with_note(tensor, "holds NaN or infinity")
        chosen = self if tensor.base is None else replace(self, key=self._key_after(source, tensor.seed))
        kind = KINDS[source.dtype.name]
        restored = DerivedSource(
            source, lambda begin, end: chosen.rounded(source.patterns(begin, end), kind, begin)
        )
        return replace(plan_lossless(restored, tensor.base, run), rounding=chosen)

    def _key_after(self, source: TensorSource, new: int) -> int:
        """Choose the thresholds by the first chunk; the base's file does not tell its own."""
        n_dropped = self._n_dropped(KINDS[source.dtype.name])
        if n_dropped <= 0:
            return NEAREST
        patterns = source.patterns(0, min(CHUNK_VALUES, source.n_patterns))
        low = (patterns & patterns.dtype.type((1 << n_dropped) - 1)).astype(np.float64) / (1 << n_dropped)
        return key_of(low, None, NEAREST, new)
