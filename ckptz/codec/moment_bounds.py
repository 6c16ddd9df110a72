"""Bounds of restored first moments: the largest magnitude that the restored second moment allows.

Adam's moments are averages of the same gradients and of their squares, so by Cauchy-Schwarz a first moment is
at most a known multiple of the root of its second one. Restored first moments must obey this bound with the
restored second moments. Otherwise the first update would move weights with a tiny second moment, such as
those of rare tokens, hundreds of times too far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.sensitivity import floats_in, floats_of
from ckptz.format.sources import TensorSource
from ckptz.kernels import cpu, moments
from ckptz.kernels.floats import Floats, Patterns

MARGIN: Final = 1 - 2.0**-20  # of the bound, so that comparisons in float32 hold as well


@dataclass(frozen=True, slots=True)
class MomentBound:
    """The largest magnitude of each element of a first moment.

    Attributes:
        ratio: bound for a second moment of 1.
        second: the restored second moments whose roots divide the updates.
    """

    ratio: float
    second: TensorSource

    @property
    def at_one(self) -> float:
        """Return the largest magnitude for a second moment of 1."""
        return MARGIN * self.ratio

    def _limits(self, squares: Floats) -> NDArray[np.float64]:
        """Return the bounds for second moments [n], float64 [n]; NaN where there is none."""
        with np.errstate(invalid="ignore"):
            limits: NDArray[np.float64] = self.at_one * np.sqrt(squares, dtype=np.float64)
        return limits

    def is_beyond(self, begin: int, patterns: Patterns, kind: int) -> NDArray[np.bool_]:
        """Return a mask [n] of the patterns from `begin` on that exceed their bound."""
        is_beyond = np.empty(len(patterns), np.bool_)
        squares = floats_in(self.second, begin, begin + len(patterns))
        moments().beyond(floats_of(patterns, kind), squares, self.at_one, is_beyond)
        return is_beyond

    def powers(self, begin: int, patterns: Patterns, kind: int) -> Patterns:
        """Round patterns [n] from `begin` on down to powers of two within their bound."""
        values = floats_of(patterns, kind)
        most = self._limits(floats_in(self.second, begin, begin + len(patterns)))
        limits = np.fmin(np.abs(values), most)
        is_large = limits * 2 > most
        with np.errstate(all="ignore"):
            powers = np.exp2(np.floor(np.log2(limits)))
        signed = np.where(is_large & (limits > 0), np.copysign(powers, values), 0).astype(np.float32)
        out: Patterns = cpu().from_f32(signed.view(np.uint32), kind)
        return out

    def clamped(self, begin: int, patterns: Patterns, kind: int) -> Patterns:
        """Clip the magnitudes of patterns [n] from `begin` on to their bound."""
        at = np.flatnonzero(self.is_beyond(begin, patterns, kind))
        if not len(at):
            return patterns
        limits = self._limits(floats_in(self.second, begin, begin + len(patterns))[at])
        cut = np.copysign(limits, floats_of(patterns[at], kind)).astype(np.float32)
        out = patterns.copy()
        out[at] = cpu().from_f32(cut.view(np.uint32), kind)
        return out
