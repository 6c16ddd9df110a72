"""Histograms of values by the top 16 bits of their F32 patterns.

The width of a bucket is 2^-7 of its lower end, so its middle is within a relative 2^-8 of every value in it.
Signs, zeros, infinities and NaNs have separate buckets. Histograms of parts can be added.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels import cpu, floats

RELATIVE_ERROR: Final = 2.0**-8  # largest |value - middle of its bucket| / |value|
_INFINITY = 0x7F80


@functools.cache
def _bucket_values(kind: int) -> NDArray[np.float64]:
    """Return the representative value of each bucket [65536]; NaN for infinities and NaNs."""
    patterns = np.arange(floats.N_BUCKETS, dtype=np.uint32)
    if kind == floats.F16:
        return floats.widen_f64(floats.to_f32(patterns.astype(np.uint16), floats.F16))
    low = floats.widen_f64(patterns << np.uint32(16))
    if kind == floats.BF16:
        return low
    high = floats.widen_f64((patterns << np.uint32(16)) | np.uint32(0xFFFF))
    with np.errstate(invalid="ignore"):
        return (low + high) / 2


@dataclass(frozen=True, slots=True)
class Histogram:
    """Occurrences by bucket; `kind` as in `ckptz.kernels.floats` (F32, BF16 or F16).

    Histograms of BF16 and F16 are exact: each value has its own bucket.
    """

    kind: int
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, patterns: NDArray[Any], kind: int) -> Histogram:
        """Count patterns [n] of the float type `kind`."""
        return cls(kind, cpu().top_histogram(patterns))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.kind, self.counts + other.counts)

    @property
    def is_finite(self) -> bool:
        """True if no value is an infinity or NaN."""
        exponent = np.uint32(0x7C00 if self.kind == floats.F16 else _INFINITY)
        special = (np.arange(floats.N_BUCKETS, dtype=np.uint32) & exponent) == exponent
        return not self.counts[special].any()

    @property
    def n_values(self) -> int:
        """Number of values counted."""
        return int(self.counts.sum())

    def representatives(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the finite non-empty buckets [n] and their representative values [n], ascending."""
        values = _bucket_values(self.kind)
        used = np.flatnonzero((self.counts > 0) & np.isfinite(values))
        ascending = used[np.argsort(values[used], kind="stable")]
        return ascending, values[ascending]

    def occupied(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the representatives of finite occupied buckets [n], ascending, and their counts [n]."""
        buckets, values = self.representatives()
        return values, self.counts[buckets]

    def magnitude_quantile(self, share: float) -> float:
        """Return the smallest representative magnitude that at least `share` of the values do not exceed."""
        values, counts = self.occupied()
        order = np.argsort(np.abs(values), kind="stable")
        reached = np.cumsum(counts[order]) >= share * self.n_values
        return float(np.abs(values[order][np.argmax(reached)]))
