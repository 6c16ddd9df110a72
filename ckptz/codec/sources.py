"""What coding one chunk may look at beside the chunk itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import TensorSource
from ckptz.errors import CorruptionError, MissingBaseError

Companions = Callable[[str], TensorSource]  # tensors of the same file by name


@dataclass(slots=True)
class ChunkSources:
    """Base and companion tensors for units begin..end; what was read once is kept while the chunk lasts.

    Attributes:
        begin: first unit of the chunk.
        end: unit after its last.
        base: the base tensor, or None.
        companions: tensors of the same file by name, for classes by another tensor's magnitude.
        reads_both: the base's units and its codes are both needed. They come from one decoding then:
            two would double with every member of a chain.
        base_title: for messages, what is known of the base, with a comma before it.
    """

    begin: int
    end: int
    base: TensorSource | None = None
    companions: Companions | None = None
    reads_both: bool = False
    base_title: str = ""
    _units: NDArray[Any] | None = field(default=None, repr=False)
    _codes: NDArray[np.uint8] | None = field(default=None, repr=False)
    _has_codes: bool = field(default=False, repr=False)

    def base_units(self) -> NDArray[Any]:
        """Read units begin..end of the base."""
        if self.base is None:
            raise MissingBaseError("the tensor is stored against a base, and none is open")
        if self._units is None and self.reads_both:
            self._read_both(self.base)
        if self._units is None:
            self._units = self.base.units(self.begin, self.end)
        return self._units

    def base_codes(self) -> NDArray[np.uint8] | None:
        """Read the codes of units begin..end in the base's own frame; None if it has none."""
        if self.base is None:
            raise MissingBaseError("the tensor is grouped by the codes of a base, and none is open")
        if not self._has_codes and self.reads_both:
            self._read_both(self.base)
        if not self._has_codes:
            self._codes, self._has_codes = self.base.codes(self.begin, self.end), True
        return self._codes

    def _read_both(self, base: TensorSource) -> None:
        self._units, self._codes = base.units_and_codes(self.begin, self.end)
        self._has_codes = True

    def units_of(self, name: str) -> NDArray[Any]:
        """Read units begin..end of another tensor of the same file."""
        if self.companions is None:
            raise CorruptionError(f"it is decoded with tensor {name!r}, which is not open")
        return self.companions(name).units(self.begin, self.end)


def companions_of(tensors: Mapping[str, TensorSource]) -> Companions:
    """Make what looks companions up by name.

    Raises:
        CorruptionError: when called with a name that is not there.
    """

    def find(name: str) -> TensorSource:
        if name not in tensors:
            raise CorruptionError(f"it is decoded with tensor {name!r}, which the file does not have")
        return tensors[name]

    return find
