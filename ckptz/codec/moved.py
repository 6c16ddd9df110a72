"""Weights with a momentum correction, which encoders apply before quantizing them.

Lossy first moments lose part of the update that they would still have applied; the correction adds it to the
weight. Recorded errors are relative to the weight without correction, and lossless weights get none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

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


# Corrected weights by name, and by name the reasons why others have no correction.
MovedAndNotes: TypeAlias = tuple[Mapping[str, MovedSource], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Moves:
    """The momentum correction of the weights of a file.

    Attributes:
        moments: names of the first moments of the file that it depends on.
        of: computes it from the restored values of these moments, by name; lossless ones are left out.
    """

    moments: tuple[str, ...]
    of: Callable[[Mapping[str, TensorSource]], MovedAndNotes]


def unmoved(source: TensorSource) -> TensorSource:
    """Return the tensor without its momentum correction."""
    return source.source if isinstance(source, MovedSource) else source
