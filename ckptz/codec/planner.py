"""Chooses the plan of a lossless tensor by measuring. Informative: any plan decodes.

Against a base, the candidates are the plain planes, the exclusive or and the ordered difference, the
last two with classes by the base's magnitude; the smallest on a sample wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.plan import Plan, StreamTables, exact_plan
from ckptz.codec.units import CHUNK_UNITS, UnitSource, chunk_bounds
from ckptz.dtypes import DType
from ckptz.entropy.frequency import entropy_bits, normalise
from ckptz.kernels import cpu
from ckptz.transform.classes import N_MAGNITUDE_CLASSES, ClassRule, share_tables
from ckptz.transform.planes import PlaneMode, kernel_mode

SAMPLE_UNITS: Final = 1 << 18  # decides between plans; larger samples chose the same on all bench pairs
PLAIN_BIAS: Final = 0.995  # a delta must beat the plain planes by this much to be worth a base

Counts = NDArray[np.int64]
MapFunction = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def plane_counts(source: UnitSource, base: UnitSource, mode: PlaneMode, begin: int, end: int) -> Counts:
    """Occurrences [unit bytes, n_classes, 256] of each code of each plane in each class of the base."""
    units, base_units = source.units(begin, end), base.units(begin, end)
    classes = cpu().magnitude_classes(base_units)
    planes = cpu().split_planes(units, base_units, kernel_mode(mode, source.dtype))
    return np.stack([cpu().class_histogram(classes, plane, N_MAGNITUDE_CLASSES) for plane in planes])


def _sample_bounds(n_units: int) -> tuple[int, int]:
    # Aligned to a chunk, so that a base decodes one chunk for it.
    begin = n_units // 2 // CHUNK_UNITS * CHUNK_UNITS
    return begin, min(begin + SAMPLE_UNITS, n_units)


def _plain_bits(units: NDArray[Any], dtype: DType) -> float:
    planes = cpu().split_planes(units, units, kernel_mode(exact_plan(dtype).mode, dtype))
    return sum(entropy_bits(cpu().histogram(plane)) for plane in planes)


def plan_lossless(source: UnitSource, base: UnitSource | None, run: MapFunction = map) -> Plan:
    """The plan that measures smallest.

    Args:
        source: the tensor.
        base: a tensor of the same dtype and shape, or None.
        run: maps a function over chunks; a thread pool's map counts them in parallel.
    """
    n_units = source.dtype.n_units(source.shape)
    if base is None or not n_units:
        return exact_plan(source.dtype)
    begin, end = _sample_bounds(n_units)
    sizes = {}
    for mode in (PlaneMode.XOR, PlaneMode.DIFFERENCE):
        counts = plane_counts(source, base, mode, begin, end)
        sizes[mode] = entropy_bits(counts)
    best = min(sizes, key=sizes.__getitem__)
    plain = _plain_bits(source.units(begin, end), source.dtype)
    if sizes[best] > plain * PLAIN_BIAS and plain:
        return exact_plan(source.dtype)
    if sizes[best] == 0 and n_units <= SAMPLE_UNITS:
        return Plan(best)
    total = sum(run(lambda b: plane_counts(source, base, best, *b), chunk_bounds(n_units)))
    tables = []
    for counts in np.asarray(total):
        table_counts, table_map = share_tables(counts)
        tables.append(StreamTables(np.stack([normalise(row) for row in table_counts]), table_map))
    return Plan(best, ClassRule.BASE_MAGNITUDE, tuple(tables))
