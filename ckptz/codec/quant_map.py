"""The quantization map: what each code of each class stands for. Implements spec/04-quantization.md.

In the linear domain a table entry is an F32 bit pattern that is added to the predictor; in the bits
domain it is an integer that is added to the ordered bit pattern.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CorruptionError
from ckptz.kernels import floats

MAX_CODES: Final = 256
MAX_ROWS: Final = 4096

Table = NDArray[Any]  # uint32 patterns, or integers as wide as the unit


class _Table(ABC):
    """What the codes of each row stand for: F32 patterns, or unit-wide integers."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Numbers of (rows, codes)."""

    @abstractmethod
    def at(self, rows: NDArray[Any], codes: NDArray[Any]) -> Table:
        """Compute the entries of rows and codes, whose shapes are broadcast."""

    def expand(self) -> Table:
        """Compute all entries [n_rows, n_codes]."""
        n_rows, n_codes = self.shape
        return self.at(np.arange(n_rows)[:, None], np.arange(n_codes))


@dataclass(frozen=True, slots=True)
class ExplicitTable(_Table):
    """Entries as they are, [n_rows, n_codes]."""

    entries: Table

    @property
    def shape(self) -> tuple[int, int]:
        n_rows, n_codes = self.entries.shape
        return n_rows, n_codes

    def at(self, rows: NDArray[Any], codes: NDArray[Any]) -> Table:
        return self.entries[rows, codes]

    def expand(self) -> Table:
        return self.entries


@dataclass(frozen=True, slots=True)
class LinearTable(_Table):
    """Entry [k, c] is scale[k] * level[c] + offset[k], each step rounded to double, then to F32."""

    scale: NDArray[np.float64]
    level: NDArray[np.float64]
    offset: NDArray[np.float64]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scale), len(self.level)

    def at(self, rows: NDArray[Any], codes: NDArray[Any]) -> Table:
        with np.errstate(all="ignore"):
            entries = self.scale[rows] * self.level[codes] + self.offset[rows]
            return floats.round_f64(entries.reshape(-1)).reshape(entries.shape)


@dataclass(frozen=True, slots=True)
class IntegerTable(_Table):
    """Entry [k, c] is scale[k] * level[c] + offset[k], modulo 2^width."""

    scale: NDArray[np.int64]
    level: NDArray[np.int64]
    offset: NDArray[np.int64]
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scale), len(self.level)

    def at(self, rows: NDArray[Any], codes: NDArray[Any]) -> Table:
        with np.errstate(over="ignore"):
            entries = self.scale[rows] * self.level[codes] + self.offset[rows]
        return entries.astype(np.uint32 if self.width == 32 else np.uint16)


AnyTable = ExplicitTable | LinearTable | IntegerTable


@dataclass(frozen=True, slots=True)
class QuantizationMap:
    """A map from codes to values: tables, rows by class, and codes with a meaning of their own.

    Attributes:
        table: what is added to the predictor.
        row_of_class: the table row of each class [n_classes].
        zero_code: a code that stands for exact zero whatever the predictor, or None.
        escape_code: the last code, if values it marks stand exactly in a side stream, or None.
        has_protected: positions in a mask stream override the result with stored values.
    """

    table: AnyTable
    row_of_class: NDArray[np.int64]
    zero_code: int | None = None
    escape_code: int | None = None
    has_protected: bool = False

    def __post_init__(self) -> None:
        n_rows, n_codes = self.table.shape
        if not (1 <= n_rows <= MAX_ROWS and 1 <= n_codes <= MAX_CODES):
            raise CorruptionError(f"quantization map of {n_rows} rows and {n_codes} codes")
        if self.escape_code not in (None, n_codes - 1):
            raise CorruptionError(f"escape code {self.escape_code} is not the last of {n_codes}")
        if self.zero_code is not None and not 0 <= self.zero_code < n_codes:
            raise CorruptionError(f"zero code {self.zero_code} is not one of {n_codes}")
        if len(self.row_of_class) and int(self.row_of_class.max()) >= n_rows:
            raise CorruptionError(f"a class names a row beyond the {n_rows} of the quantization map")

    @property
    def n_codes(self) -> int:
        """Size of the alphabet of codes."""
        return self.table.shape[1]
