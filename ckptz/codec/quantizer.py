"""Chooses the code of each pattern, the encoder's side of a quantization map, and keys of its rounding.

No frame holds any of it. After a restore the residual of a delta is what training has moved since. Rounding
it to nearest levels takes part of it back for good: of a movement whose density has the first Fourier
coefficient c around the levels, 2 c (all of it where c is 1/2 or more). Where nothing was restored,
residuals lie evenly between levels, c is 0, and the nearest level is best. Stochastic rounding loses
nothing on average. Its thresholds are chosen once after a restore and then go on, for what the last rounding
sent and did not send is in the next residual.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.floats import NEAREST, Patterns, Reals

LEAST: Final = 0.02  # c below which nearest levels of a grid do
LEAST_OF_CLUSTERS: Final = 0.15  # of k-means levels, where c is 0.02 to 0.12 without a restore
N_SAMPLED: Final = 1 << 14  # of one chunk
SURE: Final = 4.0  # standard errors
FARTHEST: Final = 2.0  # steps; what lies beyond counts as this


class Quantizer:
    """Code assignment for one tensor; by default, values outside the map are kept exactly."""

    __slots__ = ()

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        """Return the codes uint8 [end - begin] of patterns begin..end of the tensor."""
        raise NotImplementedError

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        """Return the restored values of escaped positions from `begin` on: `patterns` or a rounding."""
        del begin
        return patterns


def sampled(begin: int, end: int) -> NDArray[np.int64]:
    """Choose the elements of begin..end that decide, evenly spread, [at most N_SAMPLED]."""
    return np.arange(begin, end, max((end - begin) // N_SAMPLED, 1))[:N_SAMPLED]


def key_of(
    places: Reals, thresholds: NDArray[np.float32] | None, old: int, new: int, least: float = LEAST
) -> int:
    """Choose the key of a delta's thresholds.

    Args:
        places: of some elements, what lies between them and their base in steps [n]; those left out, for
            which no level is near, are NaN.
        thresholds: by which the base's file rounded these elements [n], or None if it does not tell.
        old: their key, or NEAREST.
        new: a key that no file has used.
        least: coefficient below which nearest levels do.

    Returns:
        `old`, `new`, or NEAREST.
    """
    is_known = np.isfinite(places) & (places != 0)
    known = np.clip(places[is_known], -FARTHEST, FARTHEST)
    if not len(known):
        return old
    if thresholds is not None and _explained(known, thresholds[is_known].astype(np.float64)):
        return old
    coefficient = np.cos(2 * np.pi * known).mean()
    return new if coefficient > max(least, 3 / np.sqrt(2 * len(known))) else NEAREST


def _explained(places: Reals, thresholds: Reals) -> bool:
    """Return whether the errors of the last rounding are still present: low where the threshold was high."""
    slope = ((thresholds - 0.5) * places).mean()
    return bool(slope < -SURE * np.sqrt(np.square(places).mean() / 12 / len(places)))
