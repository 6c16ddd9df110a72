"""Tensors of the file being written, as a reader will restore them: classes of others follow those.

A first moment is coded by classes of the second moment that stands in the same file, perhaps behind it.
Such a tensor is planned when the first of the two needs it, and restored chunk by chunk, so that memory
holds a few plans and a few chunks however large the file is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import ChunkSources, SourceOf, TensorSource, ViewOf
from ckptz.encoding.chunk import restored_units
from ckptz.encoding.draft import Draft, MapFunction
from ckptz.kernels.floats import Units
from ckptz.parallel import Recent

MakeDraft = Callable[[str, MapFunction], Draft]

MAX_DRAFTS: Final = 32  # twice the threads that run by default: each may plan a pair of tensors


@dataclass(frozen=True, slots=True)
class Held(ViewOf):
    """A base or companion of one chunk, read once: planning and coding ask for it several times.

    Two threads may read it twice; they find the same.
    """

    _read: dict[str, Any] = field(default_factory=dict, compare=False)

    def units(self, begin: int, end: int) -> Units:
        if "units" not in self._read:
            self._read["units"] = self.source.units(0, self.n_units)
        units: Units = self._read["units"]
        return units[begin:end]

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        if "codes" not in self._read:
            both = self.source.units_and_codes(0, self.n_units)
            self._read["units"], self._read["codes"] = both
        return None if self._read["codes"] is None else self._read["codes"][begin:end]


@dataclass(frozen=True, slots=True)
class Restored(SourceOf):
    """A tensor as the file will restore it."""

    base: TensorSource | None
    draft: Draft

    def units(self, begin: int, end: int) -> Units:
        return restored_units(self.source, self.draft, ChunkSources(begin, end, self.base))


class DraftBook:
    """Drafts of the tensors that others depend on, each made once while it is in use.

    A thread waits only for another one that is planning the very tensor. That one waits for nobody,
    since such a tensor depends on no other, and so the two cannot wait for each other.

    Args:
        make: plans the tensor of a name, mapping over chunks by a function.
        names: of the tensors that others depend on.
    """

    def __init__(self, make: MakeDraft, names: Iterable[str]) -> None:
        self._make = make
        self._names = frozenset(names)
        self._held: Recent[Draft] = Recent(MAX_DRAFTS, lambda _: 1)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def draft(self, name: str, run: MapFunction = map) -> Draft:
        """Give the draft of a tensor, made now if it is not at hand."""
        return self._held.get(name, lambda: self._make(name, run))
