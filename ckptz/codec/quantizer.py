"""The interface of quantizers, which choose the code of each pattern.

Quantizers that round elements one by one have a `RoundingRule` (`ckptz.codec.rounding_rule`): to the nearest
level, or stochastic. `ckptz.codec.column_rounding` computes the codes of a complete weight and compensates
the errors of columns in later ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.floats import Patterns


class Quantizer:
    """Code assignment for one tensor; by default, values outside the map are kept exactly."""

    __slots__ = ()

    def codes(self, begin: int, end: int, patterns: Patterns) -> NDArray[np.uint8]:
        """Return the codes uint8 [end - begin] of patterns begin..end of the tensor."""
        raise NotImplementedError

    def kept(self, begin: int, patterns: Patterns) -> Patterns:
        """Return the patterns that escaped elements from `begin` on are restored to, maybe rounded."""
        del begin
        return patterns
