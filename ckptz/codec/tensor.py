"""A tensor to encode: its values, base and side information, and statistics of them.

None of this is stored: the frame contains the steps, partitions and codes that encoders derive from it.
Statistics (size, distance from the base, sensitivity) are summed over chunks, so that no tensor is completely
in memory.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.effort import DEFAULT, Effort
from ckptz.codec.histogram import Histogram
from ckptz.codec.rounding_rule import deciding_elements
from ckptz.codec.sensitivity import floats_in, floats_of
from ckptz.format.bits import xxh64_of_parts
from ckptz.format.dtypes import DType
from ckptz.format.sources import CHUNK_VALUES, Patterns, TensorSource, n_rows_of
from ckptz.format.sources import MapFunction as MapFunction
from ckptz.format.values import FLOAT_KINDS
from ckptz.kernels import rounding
from ckptz.kernels.floats import Floats, Reals

T = TypeVar("T")
MIN_SPREAD: Final = 2.0**-100  # below, intermediate results could be flushed to zero
# Limits of magnitudes by dtype, so that sums of values and levels do not overflow.
LARGEST: Final = {"F32": 2.0**126, "BF16": 2.0**126, "F16": 2.0**14}
Bounds = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCovariance:
    """Second moments of a layer's inputs, sum(x x^T), which determine how errors of columns add up."""

    # The input dimension of the weight: 1 for [out, in, ...] (convolutions: all dimensions after the first,
    # flattened), 0 for weights stored as [in, out] and for embeddings.
    axis: int
    n_samples: int  # number of input vectors
    # Returns the float32 or float64 matrix [n, n]; [n_groups, n, n] for grouped convolutions. For embeddings,
    # whose inputs are one-hot, its diagonal [n]: the number of look-ups of each row.
    read: Callable[[], NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideInformation:
    """Side information about one tensor; its sources have the tensor's shape."""

    # Average gradient, for the sensitivity |g*w|; without it, the root of `second_moment` is used.
    gradient: TensorSource | None = None
    second_moment: TensorSource | None = None  # the exact average of squared gradients, Adam's exp_avg_sq
    inputs: InputCovariance | None = None  # second moments of the layer's inputs
    # For a shard: histogram of the complete tensor, so that all shards use one map.
    histogram: Histogram | None = None
    # For a first moment: total weight update that a first moment of sqrt(v) (of 1, without second moments)
    # will still cause, relative to the RMS update between two saves.
    update_scale: float | None = None
    # For a first moment: its largest magnitude at a second moment of 1, if known.
    bound: float | None = None
    # For a first moment: whether weights are not corrected for what a file loses of it, as its optimizer's
    # update is not known.
    is_uncorrected: bool = False
    # For a first moment: the tensor whose root divides updates, if not its second moment (amsgrad).
    divisor: TensorSource | None = None
    # Mean of second moment times squared weight over all weights of the checkpoint, which determines the
    # steps of its tensors relative to each other.
    mean_sensitivity: float | None = None


NO_SIDE_INFORMATION: Final = SideInformation()


@dataclass(frozen=True, slots=True)
class GuidedSensitivities:
    """Sensitivities |g*w| of a tensor, computed on demand; NaN where a squared gradient is negative."""

    kind: int  # float type of the tensor's patterns
    gradients: TensorSource  # average gradients or squared gradients, of the tensor's shape
    is_squared: bool  # whether `gradients` are squared

    def __call__(self, begin: int, end: int, patterns: Patterns) -> Floats:
        """Compute |g*w| for patterns begin..end, float32 [end - begin]."""
        gradients = floats_in(self.gradients, begin, end)
        with np.errstate(all="ignore"):
            magnitudes = np.sqrt(gradients) if self.is_squared else np.abs(gradients)
            return magnitudes * np.abs(floats_of(patterns, self.kind))


def sensitivities_of(source: TensorSource, guide: SideInformation) -> GuidedSensitivities | None:
    """Return the sensitivities of a tensor; None if no gradient of a supported float type is known."""
    for gradients, is_squared in ((guide.gradient, False), (guide.second_moment, True)):
        if gradients is not None and gradients.dtype.name in FLOAT_KINDS:
            return GuidedSensitivities(FLOAT_KINDS[source.dtype.name], gradients, is_squared)
    return None


@dataclass(frozen=True, slots=True)
class TensorToEncode:
    """One tensor to plan, with everything that a recipe may depend on."""

    source: TensorSource  # the tensor
    # The restored base tensor of a delta, of the same dtype and shape, or None.
    base: TensorSource | None = None
    newest: TensorSource | None = None  # the same of the newest file of the run, if that is not the base
    # Whether training is known to have restored the run, with loss, since the newest file was written.
    was_restored: bool = False
    guide: SideInformation = NO_SIDE_INFORMATION
    # Restored values of other tensors of the file, if the recipe depends on one.
    context_tensors: Mapping[str, TensorSource] = field(default_factory=dict)
    run: MapFunction = map  # maps a function over chunks, maybe in parallel
    effort: Effort = DEFAULT
    seed: int = 0  # 32-bit seed, a hash of the base's content id and the tensor's name
    movement: float | None = None  # mean of `Recipe.movement` over the file; None if unknown
    measured: dict[Bounds, TensorStatistics] = field(default_factory=dict)  # by chunk, shared by its users

    def dither_seed(self) -> int:
        """Return an unused 32-bit dither seed, a hash of `seed` and of the elements that decide on rounding.

        Files against one base, such as the pretrained weights, need different seeds: values that the same
        thresholds have rounded before, in a file that was restored, would be rounded with a bias.
        """
        if not self.source.n_patterns:
            return self.seed
        samples = (
            self.source.patterns(begin, end)[indices - begin]
            for (begin, end), indices in deciding_elements(self.source, self.base)
        )
        return xxh64_of_parts((self.seed.to_bytes(4, "little"), *samples)) & 0xFFFFFFFF

    def statistics(self, bounds: Bounds) -> TensorStatistics:
        """Measure a chunk (begin, end) once, and return its statistics."""
        if bounds not in self.measured:
            self.measured[bounds] = TensorStatistics.of(self.source, self.base, self.guide, bounds)
        return self.measured[bounds]


def summed(run: MapFunction, measure: Callable[[tuple[int, int]], T], source: TensorSource) -> T:
    """Add up the results of `measure` for the chunks (begin, end) of a non-empty tensor."""
    return functools.reduce(operator.add, run(measure, source.chunk_bounds()))


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of a tensor that determine its grid steps; those of chunks can be added."""

    n_patterns: int  # number of elements
    largest: float  # greatest magnitude of values and base; NaN or infinite if one of them is
    power: float  # sum of squares
    residual_power: float  # sum of squared differences to the base; infinite without base
    row_sums: Reals | None  # sums of second moments by row [n_rows], or None
    sensitivity_sum: float  # sum of second moments times squared values
    is_measured: bool  # whether all second moments are finite and not negative

    @classmethod
    def of(
        cls, source: TensorSource, base: TensorSource | None, guide: SideInformation, bounds: Bounds
    ) -> TensorStatistics:
        """Measure one chunk."""
        values = floats_in(source, *bounds)
        others = None if base is None else floats_in(base, *bounds)
        # Patterns of magnitudes: those of infinities and NaNs are above all numbers.
        largest = max(rounding().largest(f.view(np.uint32)) for f in (values, others) if f is not None)
        squares, row_sums = guide.second_moment or guide.gradient, None
        sensitivity_sum, is_measured = 0.0, True
        if squares is not None:
            n_rows, is_root = n_rows_of(source.shape), guide.second_moment is None
            chunk_squares = floats_in(squares, *bounds)
            row_patterns, row_sums = source.n_patterns // n_rows, np.zeros(n_rows)
            sensitivity_sum, is_measured = rounding().sensitivities(
                values, chunk_squares, is_root, bounds[0], row_patterns, row_sums
            )
        return cls(
            n_patterns=len(values),
            largest=float(np.uint32(largest).view(np.float32)),
            power=rounding().power(values),
            residual_power=np.inf if others is None else rounding().power(values, others),
            row_sums=row_sums,
            sensitivity_sum=sensitivity_sum,
            is_measured=is_measured,
        )

    def __add__(self, other: TensorStatistics) -> TensorStatistics:
        row_sums = self.row_sums
        if row_sums is not None and other.row_sums is not None:
            row_sums = row_sums + other.row_sums
        return TensorStatistics(
            self.n_patterns + other.n_patterns,
            max(self.largest, other.largest, key=lambda value: math.inf if math.isnan(value) else value),
            self.power + other.power,
            self.residual_power + other.residual_power,
            row_sums,
            self.sensitivity_sum + other.sensitivity_sum,
            self.is_measured and other.is_measured,
        )

    @property
    def spread(self) -> float:
        """Root of the mean square of the values."""
        return float(np.sqrt(self.power / self.n_patterns))

    def fault(self, dtype: DType) -> str:
        """Return the reason why the tensor cannot be quantized to a grid; empty if it can."""
        if not np.isfinite(self.largest):
            return "it or its base holds NaN or infinity, so it stays lossless"
        if self.largest > LARGEST[dtype.name]:
            return f"it or its base holds values near the limit of {dtype.name}, so it stays lossless"
        if self.power > 0 and self.spread < MIN_SPREAD:
            return "its values are all below 2^-100, so it stays lossless"
        if not self.is_measured:
            return "its second moments hold NaN, infinities or negative values, so it stays lossless"
        return ""


def mean_sensitivity_of(pairs: Iterable[tuple[TensorSource, TensorSource]]) -> float | None:
    """Compute the mean of second moment times squared weight, from at most one chunk of each tensor.

    Args:
        pairs: weights and their second moments, of dtypes in `FLOAT_KINDS`.

    Returns:
        The mean, or None if it is 0.
    """
    total = n_patterns = 0.0
    for weight, moments in pairs:
        n = weight.n_patterns
        if len(weight.shape) < 2 or not n:
            continue
        begin = n // 2 // CHUNK_VALUES * CHUNK_VALUES
        bounds = (begin, min(begin + CHUNK_VALUES, n))
        values, squares = floats_in(weight, *bounds), floats_in(moments, *bounds)
        power, is_measured = rounding().sensitivities(values, squares, False, 0, len(values), np.zeros(1))
        # A sum of float64 products of finite float32 values cannot overflow.
        if math.isfinite(power) and is_measured:
            total += power * n / len(values)
            n_patterns += n
    return total / n_patterns if total > 0 else None
