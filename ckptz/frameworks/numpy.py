"""numpy arrays. Types that numpy lacks come from ml_dtypes, once the caller has imported it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptz.codec.units import UNIT_TYPES, Units
from ckptz.dtypes import DTYPE_NAMES, DType
from ckptz.errors import DTypeError
from ckptz.frameworks import Selection, Shape, units_per_element
from ckptz.frameworks.window import select as strict_select


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Give the array type that holds `dtype`.

    Raises:
        DTypeError: there is none, or ml_dtypes has it and is not imported.
    """
    if dtype.name not in DTYPE_NAMES:
        raise DTypeError(f"numpy has no dtype for {dtype.name}; load with framework 'pt'")
    try:
        return np.dtype(DTYPE_NAMES[dtype.name])
    except TypeError:
        raise DTypeError(
            f"numpy has no dtype for {dtype.name}; import ml_dtypes, or load with framework 'pt'"
        ) from None


@dataclass(frozen=True, slots=True)
class NumpyArrays:
    """Makes numpy arrays; see `ckptz.frameworks.Framework`."""

    def shape_of(self, dtype: DType, shape: Shape) -> Shape:
        return shape

    def allocate(self, dtype: DType, shape: Shape) -> tuple[Any, Units]:
        array = np.empty(shape, numpy_dtype(dtype))
        return array, array.reshape(-1).view(UNIT_TYPES[dtype.unit_bytes])

    def select(self, index: Any, dtype: DType, shape: Shape) -> Selection:
        window, kept = strict_select(index, shape)
        return Selection((window.widened(units_per_element(dtype)),), kept)

    def finish(self, tensor: Any) -> Any:
        return tensor


def make(device: str | int, backend: str) -> NumpyArrays:
    """Give the framework of numpy arrays: they live on the CPU, and both backends slice alike."""
    return NumpyArrays()
