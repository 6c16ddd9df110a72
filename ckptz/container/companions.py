"""Tensors of the file being written, as a reader will restore them: classes of others follow those.

A first moment is coded by classes of the second moment that stands in the same file, perhaps behind it.
Such a tensor is planned when the first of the two needs it, and restored chunk by chunk, so that memory
holds a few plans and a few chunks however large the file is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.encode import restored_units
from ckptz.codec.plan import Plan
from ckptz.codec.planner import MapFunction
from ckptz.codec.sources import ChunkSources, codes_of
from ckptz.codec.units import UnitSource
from ckptz.dtypes import DType

Units = NDArray[Any]
PlanFunction = Callable[[str, MapFunction], Plan]

MAX_PLANS: Final = 32  # twice the threads that run by default: each may plan a pair of tensors


@dataclass(slots=True)
class Held:
    """A base or companion of one chunk, read once: planning and coding ask for it several times.

    Two threads may read it twice; they find the same.
    """

    source: UnitSource
    _units: Units | None = field(default=None, repr=False)
    _codes: NDArray[np.uint8] | None = field(default=None, repr=False)
    _has_codes: bool = field(default=False, repr=False)

    @property
    def dtype(self) -> DType:
        """See `UnitSource.dtype`."""
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `UnitSource.shape`."""
        return tuple(self.source.shape)

    @property
    def n_codes(self) -> int | None:
        """Size of the alphabet of the codes of its own frame; None if it has none."""
        found: int | None = getattr(self.source, "n_codes", None)
        return found

    def units(self, begin: int, end: int) -> Units:
        """See `UnitSource.units`."""
        if self._units is None:
            self._units = self.source.units(0, self.dtype.n_units(self.shape))
        return self._units[begin:end]

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        """Codes of its own frame, as `ckptz.codec.sources.codes_of` gives them."""
        if not self._has_codes:
            n_units = self.dtype.n_units(self.shape)
            read = getattr(self.source, "units_and_codes", None)
            if read is None:
                self._codes = codes_of(self.source, 0, n_units)
            else:
                self._units, self._codes = read(0, n_units)
            self._has_codes = True
        return None if self._codes is None else self._codes[begin:end]


@dataclass(frozen=True, slots=True)
class Restored:
    """A tensor as the file will restore it."""

    source: UnitSource
    base: UnitSource | None
    plan: Plan

    @property
    def dtype(self) -> DType:
        """See `UnitSource.dtype`."""
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `UnitSource.shape`."""
        return tuple(self.source.shape)

    def units(self, begin: int, end: int) -> Units:
        """Units of one chunk."""
        return restored_units(self.source, self.plan, ChunkSources(begin, end, self.base))


@dataclass(slots=True)
class _Planned:
    lock: threading.Lock
    plan: Plan | None = None


class PlanBook:
    """Plans of the tensors that others depend on, each made once while it is in use.

    A thread waits only for another one that is planning the very tensor. That one waits for nobody,
    since such a tensor depends on no other, and so the two cannot wait for each other.

    Args:
        make: plans the tensor of a name, mapping over chunks by a function.
        names: of the tensors that others depend on.
    """

    def __init__(self, make: PlanFunction, names: Iterable[str]) -> None:
        self._make = make
        self._names = frozenset(names)
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Planned] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def plan(self, name: str, run: MapFunction = map) -> Plan:
        """The plan of a tensor, made now if it is not at hand."""
        with self._lock:
            planned = self._held.setdefault(name, _Planned(threading.Lock()))
            self._held.move_to_end(name)
            while len(self._held) > MAX_PLANS:
                self._held.popitem(last=False)
        with planned.lock:
            if planned.plan is None:
                planned.plan = self._make(name, run)
            return planned.plan
