"""A weight that is moved before it is coded, by what the momentum that its file loses would still have moved.

Encoder only. What the file records of errors compares with the weight itself; so does what stays lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckptz.format.sources import SourceOf, TensorSource
from ckptz.kernels.floats import Patterns


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

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.moved.patterns(begin, end)


# weights as they are moved, and notes on those that should be and are not, by name
MovedAndNotes: TypeAlias = tuple[Mapping[str, MovedSource], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Moves:
    """The moves of the weights of a file.

    Attributes:
        moments: names of the first moments of the same file that moves depend on.
        of: is given these as the file restores them, those that lose something, by name.
    """

    moments: tuple[str, ...]
    of: Callable[[Mapping[str, TensorSource]], MovedAndNotes]


def unmoved(source: TensorSource) -> TensorSource:
    """Return the tensor without its momentum correction."""
    return source.source if isinstance(source, MovedSource) else source
