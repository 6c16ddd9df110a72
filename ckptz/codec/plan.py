"""Every choice for one tensor, made before its first byte is written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ckptz.dtypes import DType
from ckptz.transform.classes import ClassRule, TableMap
from ckptz.transform.planes import BASE_MODES, PlaneMode


class Domain(IntEnum):
    """spec/registry.md#domains: how codes become values."""

    PLANES = 0


class Predictor(IntEnum):
    """spec/registry.md#predictors."""

    ZERO = 0
    BASE = 1


@dataclass(frozen=True, slots=True)
class StreamTables:
    """The tables that one stream shares over all chunks, and the classes that use them."""

    frequencies: NDArray[np.uint16]
    table_map: TableMap


@dataclass(frozen=True, slots=True)
class Plan:
    """A lossless frame: how units are split, and with what tables the planes are coded.

    Attributes:
        mode: what happens to a unit before it is split.
        class_rule: how classes are derived, or None.
        tables: one entry a plane if there are classes, else empty.
    """

    mode: PlaneMode
    class_rule: ClassRule | None = None
    tables: tuple[StreamTables, ...] = ()

    @property
    def domain(self) -> Domain:
        """How codes become values."""
        return Domain.PLANES

    @property
    def predictor(self) -> Predictor:
        """What the codes are relative to."""
        return Predictor.BASE if self.mode in BASE_MODES else Predictor.ZERO


def exact_plan(dtype: DType) -> Plan:
    """The plan for a tensor without a base."""
    is_split = dtype.is_float and dtype.unit_bytes > 1
    return Plan(PlaneMode.ROTATED if is_split else PlaneMode.RAW)
