"""A weight that is moved before it is coded, by what the momentum that its file loses would still have moved.

Encoder only. What the file records of errors compares with the weight itself; so does what stays lossless.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptz.codec.units import SourceOf, TensorSource
from ckptz.kernels.floats import Units


@dataclass(frozen=True, slots=True)
class MovedSource(SourceOf):
    """A weight with its moves.

    Attributes:
        source: the weight itself.
        moved: the weight after its moves.
        share: of the moves that the lost momentum would have caused.
    """

    moved: TensorSource
    share: float

    def units(self, begin: int, end: int) -> Units:
        return self.moved.units(begin, end)


def unmoved(source: TensorSource) -> TensorSource:
    """Give the tensor itself."""
    return source.source if isinstance(source, MovedSource) else source
