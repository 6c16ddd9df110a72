"""Tensors of the file being written, as a reader will restore them: classes of others follow those.

A first moment is coded by classes of the second moment that stands in the same file, perhaps behind it.
Such a tensor is planned when the first of the two needs it, and restored chunk by chunk, so that memory
holds a few plans and a few chunks however large the file is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.sources import ChunkSources
from ckptz.codec.units import SourceOf, Stored, TensorSource
from ckptz.dtypes import DType
from ckptz.encoding.chunk import restored_units
from ckptz.encoding.draft import Draft, MapFunction

Units = NDArray[Any]
MakeDraft = Callable[[str, MapFunction], Draft]

MAX_DRAFTS: Final = 32  # twice the threads that run by default: each may plan a pair of tensors


class Held(TensorSource):
    """A base or companion of one chunk, read once: planning and coding ask for it several times.

    Two threads may read it twice; they find the same.
    """

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, source: TensorSource) -> None:
        self.dtype, self.shape = source.dtype, tuple(source.shape)
        self._source = source
        self._units: Units | None = None
        self._codes: NDArray[np.uint8] | None = None
        self._has_codes = False

    @property
    def stored(self) -> Stored | None:
        """See `TensorSource.stored`."""
        return self._source.stored

    @property
    def n_codes(self) -> int | None:
        return self._source.n_codes

    def units(self, begin: int, end: int) -> Units:
        if self._units is None:
            self._units = self._source.units(0, self.dtype.n_units(self.shape))
        return self._units[begin:end]

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        if not self._has_codes:
            self._units, self._codes = self._source.units_and_codes(0, self.dtype.n_units(self.shape))
            self._has_codes = True
        return None if self._codes is None else self._codes[begin:end]


@dataclass(frozen=True, slots=True)
class Restored(SourceOf):
    """A tensor as the file will restore it."""

    base: TensorSource | None
    draft: Draft

    def units(self, begin: int, end: int) -> Units:
        return restored_units(self.source, self.draft, ChunkSources(begin, end, self.base))


@dataclass(slots=True)
class _Planned:
    lock: threading.Lock
    draft: Draft | None = None


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
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Planned] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def draft(self, name: str, run: MapFunction = map) -> Draft:
        """Give the draft of a tensor, made now if it is not at hand."""
        with self._lock:
            planned = self._held.setdefault(name, _Planned(threading.Lock()))
            self._held.move_to_end(name)
            while len(self._held) > MAX_DRAFTS:
                self._held.popitem(last=False)
        with planned.lock:
            if planned.draft is None:
                planned.draft = self._make(name, run)
            return planned.draft
