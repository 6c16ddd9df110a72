"""Weights with a momentum correction, which encoders apply before quantizing them.

Lossy first moments lose part of the update that they would still have applied; the correction adds it to the
weight. Recorded errors are relative to the weight without correction, and lossless weights get none.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptz.format.sources import SourceOf, TensorSource
from ckptz.kernels.floats import Patterns


@dataclass(frozen=True, slots=True)
class MovedSource(SourceOf):
    """A weight and its momentum correction.

    Attributes:
        source: the weight itself.
        moved: the weight with the correction.
        share: the applied share of the lost update.
    """

    moved: TensorSource
    share: float

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.moved.patterns(begin, end)


def unmoved(source: TensorSource) -> TensorSource:
    """Return the tensor without its momentum correction."""
    return source.source if isinstance(source, MovedSource) else source
