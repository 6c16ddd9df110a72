"""The encoder's side of a quantization map: which code each unit takes. No frame holds it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.floats import Units


class Quantizer:
    """Gives the codes of one tensor; by default what its map cannot hold is kept exactly."""

    __slots__ = ()

    def codes(self, begin: int, end: int, units: Units) -> NDArray[np.uint8]:
        """Give the codes uint8 [end - begin] of units begin..end of the tensor."""
        raise NotImplementedError

    def kept(self, begin: int, units: Units) -> Units:
        """Give what escaped and protected positions from `begin` on restore to: `units`, or a rounding."""
        del begin
        return units

    def protected(self, begin: int, end: int, units: Units) -> NDArray[np.bool_] | None:
        """Mark positions [end - begin] that are stored exactly beside their code; None if there are none."""
        del begin, end, units
        return None
