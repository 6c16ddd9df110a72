"""What is known of a tensor before its steps: how large it is, how far from its base, how sensitive.

All of it is summed over chunks, so that no tensor is held as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import CHUNK_UNITS, TensorSource, Units, n_rows_of
from ckptz.codec.values import KINDS
from ckptz.dtypes import DType
from ckptz.encoding.guide import Guide
from ckptz.kernels import cpu

MIN_SPREAD: Final = 2.0**-100  # below, some processor modes flush what is computed here to zero
# Half the largest exponent of each type: sums of values and levels stay far from infinity.
LARGEST: Final = {"F32": 2.0**126, "BF16": 2.0**126, "F16": 2.0**14}

Bounds = tuple[int, int]
Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Extent:
    """Size, largest value and powers of a tensor: all that its steps follow from, summed over chunks."""

    n_units: int  # values
    largest: float  # greatest magnitude of the values and of the base's; NaN or infinite if one of them is
    power: float  # sum of squares
    residual_power: float  # of the differences to the base; infinite without one
    row_sums: Reals | None  # of the second moments [n_rows], or None
    energy: float  # sum of second moments times squared values
    is_measured: bool  # whether all second moments are finite and not negative

    @classmethod
    def of(cls, source: TensorSource, base: TensorSource | None, guide: Guide, bounds: Bounds) -> Extent:
        """Measure one chunk, with its base and its guide."""
        values = reals(source, *bounds)
        others = np.zeros(1) if base is None else reals(base, *bounds)
        squares = _squared_gradients(guide, *bounds)
        with np.errstate(all="ignore"):  # what is not finite is found here, and then nothing is lost
            power = values**2
            return cls(
                n_units=len(values),
                largest=_largest(np.array([_largest(values), _largest(others)])),
                power=float(power.sum()),
                residual_power=np.inf if base is None else float(((values - others) ** 2).sum()),
                row_sums=None if squares is None else _row_sums(squares, bounds[0], source.shape),
                energy=0.0 if squares is None else float(squares @ power),
                is_measured=squares is None or bool((np.isfinite(squares) & (squares >= 0)).all()),
            )

    def __add__(self, other: Extent) -> Extent:
        row_sums = self.row_sums
        if row_sums is not None and other.row_sums is not None:
            row_sums = row_sums + other.row_sums
        return Extent(
            self.n_units + other.n_units,
            _largest(np.array([self.largest, other.largest])),
            self.power + other.power,
            self.residual_power + other.residual_power,
            row_sums,
            self.energy + other.energy,
            self.is_measured and other.is_measured,
        )

    @property
    def spread(self) -> float:
        """Root of the mean square of the values."""
        return float(np.sqrt(self.power / self.n_units))

    def fault(self, dtype: DType) -> str:
        """Say why no grid fits, or nothing."""
        if not np.isfinite(self.largest):
            return "it or its base holds NaN or infinity, so it stays lossless"
        if self.largest > LARGEST[dtype.name]:
            return f"it or its base holds values near the limit of {dtype.name}, so it stays lossless"
        if self.power > 0 and self.spread < MIN_SPREAD:
            return "its values are all below 2^-100, so it stays lossless"
        if not self.is_measured:
            return "its second moments hold NaN, infinities or negative values, so it stays lossless"
        return ""


def reals(source: TensorSource, begin: int, end: int) -> Reals:
    """Read values, float64 [end - begin], of a tensor of a dtype in `KINDS`."""
    return values_of(source.units(begin, end), source.dtype)


def moments_energy(pairs: Iterable[tuple[TensorSource, TensorSource]]) -> float | None:
    """Average second moment times squared weight over at most a chunk of each tensor; None if it is 0.

    `pairs` are weights and their second moments, of dtypes in `KINDS`.
    """
    energy = n_units = 0.0
    for weight, moments in pairs:
        n = weight.n_units
        begin = n // 2 // CHUNK_UNITS * CHUNK_UNITS
        bounds = (begin, min(begin + CHUNK_UNITS, n))
        values, squares = reals(weight, *bounds), reals(moments, *bounds)
        is_known = np.isfinite(values) & np.isfinite(squares) & (squares >= 0)
        if len(weight.shape) > 1 and is_known.all() and n:
            energy += float(squares @ values**2) * n / len(values)
            n_units += n
    return energy / n_units if energy > 0 else None


def _squared_gradients(guide: Guide, begin: int, end: int) -> Reals | None:
    """Second moments, or squares of averaged gradients: noisier, but rows average them."""
    if guide.second_moment is not None:
        return reals(guide.second_moment, begin, end)
    return None if guide.gradient is None else reals(guide.gradient, begin, end) ** 2


def _largest(values: Reals) -> float:
    return float(np.abs(values).max(initial=0.0))


def _row_sums(values: Reals, begin: int, shape: tuple[int, ...]) -> Reals:
    """Sums by row of the values from unit `begin` on."""
    n_rows = n_rows_of(shape)
    row_units = math.prod(shape) // n_rows
    rows = np.arange(begin, begin + len(values)) // row_units
    return np.bincount(rows, values, n_rows).astype(np.float64)


def values_of(units: Units, dtype: DType) -> Reals:
    """Convert units [n] of a dtype in `KINDS` to values, float64 [n]."""
    patterns = cpu().to_f32(units, KINDS[dtype.name])
    with np.errstate(invalid="ignore"):  # signalling NaN
        values: Reals = patterns.view(np.float32).astype(np.float64)
    return values
