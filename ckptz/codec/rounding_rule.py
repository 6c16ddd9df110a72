"""The rule by which elements are rounded to levels, each on its own, and the choice of a rule for a delta.

After a restore, the residual of a delta is the movement of the weights since then. Rounding it to the
nearest level loses part of that movement for good: if its density around the levels has the first Fourier
coefficient c, the share 2 c (all of it from c = 1/2 on). Movements that are all alike, as those of Lion or
of Adam's first update, are between the levels instead, where rounding loses or adds as much; c is negative
then, or the second or third coefficient is large. If nothing was restored, residuals are spread evenly
between the levels, all coefficients are 0, and rounding to nearest is best; also after a restore, if
movements are much larger than a step. Stochastic rounding loses no movement on average. Its seed is chosen
once after a restore and then kept, and the steps with it: the next residual contains the error of the last
rounding, so the same thresholds on the same levels send what that rounding did not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.format.sources import Stored, TensorSource
from ckptz.kernels import rounding
from ckptz.kernels.floats import NEAREST, Floats, Reals

LEAST: Final = 0.02  # c up to which a grid is rounded to nearest
# The same for full files, and for k-means levels, where c is 0.02 to 0.12 without a restore.
LEAST_OF_CLUSTERS: Final = 0.15
N_SAMPLED: Final = 1 << 14  # elements of one chunk
MIN_DECIDING: Final = 256  # elements that decide on the rule at least, if a tensor has so many
MOST_LEAST: Final = 0.5  # limit of c up to which even few elements are rounded to nearest
# Size of coefficients up to which a delta is rounded to nearest. Without a restore it is up to 0.22, if the
# base's steps are between once and twice as large.
LEAST_BETWEEN: Final = 0.25
N_HARMONICS: Final = 3  # Fourier coefficients; movements that are all alike have a large one among them
SURE: Final = 4.0  # standard errors of a significant correlation or coefficient
FARTHEST: Final = 2.0  # steps; larger residuals are clipped to this in the correlation with thresholds
SEED_KEY: Final = "drawn"  # of the dither seed in the record of a frame


@dataclass(frozen=True, slots=True)
class RoundingRule:
    """Rule of rounding values to levels: to the nearest, or stochastically with a dither seed.

    Error-compensated rounding (`ckptz.codec.column_rounding`) is always to nearest.

    Attributes:
        seed: 32 bits that the thresholds of stochastic rounding are computed from; NEAREST rounds to nearest.
            Kernels and the record of a frame identify the rule by this number.
    """

    seed: int = NEAREST

    @classmethod
    def of_record(cls, stored: Stored | None, method: str) -> RoundingRule:
        """Return the rule that a frame of `method` was rounded by; to nearest for any other frame."""
        seed = stored.settings.get(SEED_KEY) if stored is not None and stored.method == method else None
        return cls(seed) if isinstance(seed, int) else TO_NEAREST

    @property
    def is_stochastic(self) -> bool:
        """Return whether values are rounded by pseudo-random thresholds."""
        return self.seed != NEAREST

    def record(self) -> dict[str, int | float]:
        """Return the entry of a frame's record: nothing for rounding to nearest."""
        return {SEED_KEY: self.seed} if self.is_stochastic else {}

    def thresholds(self, begin: int, n: int) -> Floats:
        """Return the thresholds [n] in [0, 1) of elements begin..begin+n: one half to round to nearest."""
        return rounding().thresholds(self.seed, begin, n)


TO_NEAREST: Final = RoundingRule()


def middle_chunk(source: TensorSource) -> tuple[int, int]:
    """Return the bounds of the chunk that decides on the rule of a tensor."""
    bounds = list(source.chunk_bounds())
    return bounds[len(bounds) // 2]


def sampled(n: int) -> slice:
    """Return the slice of evenly spaced elements of a chunk of `n`, at most N_SAMPLED."""
    stride = max(n // N_SAMPLED, 1)
    return slice(0, min(n, N_SAMPLED * stride), stride)


def deciding_elements(
    source: TensorSource, base: TensorSource | None
) -> list[tuple[tuple[int, int], NDArray[np.int64]]]:
    """Return the elements that decide on the rule of a tensor.

    These are evenly spaced ones of the middle chunk. If nearly all of them equal the base, as in an embedding
    of which few rows were trained, they are the elements of all chunks that do not.

    Returns:
        The bounds of chunks (begin, end), each with ascending indices in the tensor, int64 [n].
    """
    bounds = middle_chunk(source)
    places = sampled(bounds[1] - bounds[0])
    evenly = [(bounds, np.arange(bounds[0], bounds[0] + places.stop, places.step))]
    if base is None:
        return evenly
    is_moved = source.patterns(*bounds)[places] != base.patterns(*bounds)[places]
    if np.count_nonzero(is_moved) >= MIN_DECIDING:
        return evenly
    moved = []
    for begin, end in source.chunk_bounds():
        indices = np.flatnonzero(source.patterns(begin, end) != base.patterns(begin, end))
        moved.append(((begin, end), begin + indices[:: max(len(indices) // N_SAMPLED, 1)]))
    return [(chunk, indices) for chunk, indices in moved if len(indices)] or evenly


def choose_rounding(
    movements: Reals,
    thresholds: NDArray[np.float32] | None,
    old: RoundingRule,
    new_seed: Callable[[], int],
    least: float = LEAST,
    groups: NDArray[np.uint8] | None = None,
    was_restored: bool = False,
) -> RoundingRule:
    """Choose how a delta is rounded, from a sample of its elements.

    Args:
        movements: differences of the elements to their base, in steps [n]; NaN for elements to ignore.
        thresholds: rounding thresholds of these elements in the base's file [n]; None if unknown, or to
            nearest.
        old: the rule of these thresholds.
        new_seed: function that returns an unused dither seed, called where one is needed.
        least: Fourier coefficient up to which the delta is rounded to nearest; its absolute value after a
            known restore.
        groups: numbers of the steps of the elements [n]; None without a base. Distances to multiples of a
            step are uneven in other cases too, so only those near zero count.
        was_restored: whether the weights are known to have been restored, so that differences do not contain
            the errors of the last rounding. An average (EMA) moves back by a part of them, so its movements
            correlate with old thresholds all the same, and may be between the levels.

    Returns:
        `old` if the differences still contain the errors of the last rounding, stochastic rounding with the
        new seed if the weights have moved since a restore, else rounding to nearest.
    """
    is_known = np.isfinite(movements) & (movements != 0)
    known = movements[is_known]
    if not len(known):
        return old
    if (
        thresholds is not None
        and not was_restored
        and is_explained(np.clip(known, -FARTHEST, FARTHEST), thresholds[is_known].astype(np.float64))
    ):
        return old
    angles = (2 * np.pi * (known - np.rint(known))).astype(np.float32)  # much faster, and precise enough
    turned = np.cos(angles) + np.complex64(1j) * np.sin(angles)
    coefficient = turned.real.mean(dtype=np.float64)
    sure = min(3 / np.sqrt(2 * len(known)), MOST_LEAST)
    is_uneven = (abs(coefficient) if was_restored else coefficient) > max(least, sure)
    are_equal = groups is not None and are_alike(turned, groups[is_known])
    return RoundingRule(new_seed()) if is_uneven or are_equal else TO_NEAREST


def are_alike(turned: NDArray[np.complex64], groups: NDArray[np.uint8]) -> bool:
    """Return whether differences are at few places between levels, as movements that are all alike.

    Args:
        turned: exp(2 pi i d) of each difference d in steps [n].
        groups: numbers of their steps [n]; the same movement is at another place in other steps.
    """
    sizes = np.bincount(groups)
    n_groups = np.count_nonzero(sizes)
    least = max(LEAST_BETWEEN**2, SURE**2 / 2 * math.sqrt(n_groups) / len(groups))
    for power in itertools.accumulate([turned] * N_HARMONICS, np.multiply):
        real, imaginary = (np.bincount(groups, part) for part in (power.real, power.imag))
        # The mean of the squared coefficients of groups; at random places it is 1 / size for each.
        squares = (np.square(real) + np.square(imaginary)) / np.maximum(sizes, 1)
        if (squares.sum() - n_groups) / len(groups) > least:
            return True
    return False


def is_explained(movements: Reals, thresholds: Reals) -> bool:
    """Return whether differences [n] correlate negatively with thresholds [n], as rounding errors do."""
    slope = ((thresholds - 0.5) * movements).mean()
    return bool(slope < -SURE * np.sqrt(np.square(movements).mean() / 12 / len(movements)))
