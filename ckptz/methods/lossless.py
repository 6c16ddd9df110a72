"""Without loss: the default, and what every other method falls back to where it cannot be applied.

The plan is chosen by measuring; any plan decodes.

Against a base, the candidates are the plain planes, the exclusive or and the ordered difference, the
last two with classes by the base's magnitude; the smallest on a sample wins.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from ckptz.codec.plan import PlaneMode, exact_plan, kernel_mode, planes_plan
from ckptz.codec.units import CHUNK_UNITS, TensorSource
from ckptz.dtypes import DType
from ckptz.encoding.chunk import MAX_SPARSE_SHARE
from ckptz.encoding.counts import ClassCounts, stream_tables
from ckptz.encoding.draft import Draft, MapFunction, Subject, summed
from ckptz.entropy.frequency import entropy_bits
from ckptz.kernels import cpu, planning
from ckptz.methods.method import Method, Recipe, Setting
from ckptz.roles import Role
from ckptz.transform.classes import N_MAGNITUDE_CLASSES, Magnitude

SAMPLE_UNITS: Final = 1 << 13  # decides between plans; larger samples chose the same on all bench pairs
MIN_CLASSED_UNITS: Final = 1 << 11  # below, frequency tables by class cost more than they save
PLAIN_BIAS: Final = 0.995  # a delta must beat the plain planes by this much to be worth a base


@dataclass(frozen=True, slots=True)
class Exact(Recipe):
    """Every bit comes back.

    Attributes:
        is_sparse: prefer changed positions over the smallest bytes.
    """

    is_sparse: bool = False
    name: ClassVar[str] = "lossless"
    is_lossy: ClassVar[bool] = False

    def settings(self) -> dict[str, Setting]:
        """Give no settings: files have no records of exact tensors."""
        return {}

    def plan(self, subject: Subject) -> Draft:
        """Plan a tensor that comes back bit for bit."""
        plan = plan_sparse if self.is_sparse else plan_lossless
        return plan(subject.source, subject.base, subject.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossless(Method):
    """Every bit comes back, NaN payloads and negative zeros included. The default.

    Attributes:
        sparse: store a delta by the positions that changed, where few did: it is applied several times
            faster, and about 40 % larger than the smallest. What `ckptz.sync` publishes.

    Example:
        >>> from ckptz import LOSSLESS, Lossless
        >>> Lossless() == LOSSLESS
        True
    """

    sparse: bool = False
    name: ClassVar[str] = "lossless"
    is_lossy: ClassVar[bool] = False

    def recipe(self, role: Role, dtype: DType, shape: tuple[int, ...]) -> Recipe:
        del role, dtype, shape
        return Exact(self.sparse)


LOSSLESS: Final = Lossless()
EXACT: Final = Exact()


def _plane_counts(
    source: TensorSource, base: TensorSource, mode: PlaneMode, bounds: tuple[int, int]
) -> list[ClassCounts]:
    """Codes of each plane by the magnitude of the base."""
    units, base_units = source.units(*bounds), base.units(*bounds)
    labels = cpu().magnitude_classes(base_units)
    planes = cpu().split_planes(units, base_units, kernel_mode(mode, source.dtype))
    return [ClassCounts.of(labels, plane, N_MAGNITUDE_CLASSES) for plane in planes]


def plan_sparse(source: TensorSource, base: TensorSource | None, run: MapFunction = map) -> Draft:
    """Plan the frame that decodes fastest: positions of changed units, unless too many are."""
    n_units = source.n_units
    if base is None or not n_units:
        return Draft(exact_plan(source.dtype))
    n_changed = summed(run, lambda b: np.count_nonzero(source.units(*b) != base.units(*b)), source)
    if n_changed > MAX_SPARSE_SHARE * n_units:
        return plan_lossless(source, base, run)
    # A step down and a step up are both small as ordered differences, whatever they carry into.
    return Draft(planes_plan(PlaneMode.DIFFERENCE), is_sparse=True)


def plan_lossless(source: TensorSource, base: TensorSource | None, run: MapFunction = map) -> Draft:
    """Plan the smallest frame; `base` has the same dtype and shape, and `run` maps over chunks."""
    n_units = source.n_units
    if base is None or not n_units:
        return Draft(exact_plan(source.dtype))
    begin = n_units // 2 // CHUNK_UNITS * CHUNK_UNITS  # of a chunk, so that a base decodes one for the sample
    sample = begin, min(begin + SAMPLE_UNITS, n_units)
    modes = (PlaneMode.XOR, PlaneMode.DIFFERENCE)
    units, base_units, exact = source.units(*sample), base.units(*sample), exact_plan(source.dtype)
    labels = cpu().magnitude_classes(base_units)
    sizes = {}
    for mode in modes:
        planes = cpu().split_planes(units, base_units, kernel_mode(mode, source.dtype))
        sizes[mode] = planning().class_bits(labels, planes, N_MAGNITUDE_CLASSES)
    best = min(sizes, key=sizes.__getitem__)
    planes = cpu().split_planes(units, units, kernel_mode(exact.mode, source.dtype))
    plain = sum(entropy_bits(cpu().histogram(plane)) for plane in planes)
    if sizes[best] > plain * PLAIN_BIAS and plain:
        return Draft(exact)
    is_whole = sample == (0, n_units)
    if n_units < MIN_CLASSED_UNITS or (is_whole and not sizes[best]):
        return Draft(planes_plan(best))
    total = _count_all(source, base, best, run)
    tables = tuple(stream_tables(plane, N_MAGNITUDE_CLASSES) for plane in total)
    plan = planes_plan(best, (Magnitude(),), tables)
    # The counts of a tensor of one chunk are those that its encoding needs again.
    return Draft(plan, counted=tuple(total) if n_units <= CHUNK_UNITS else ())


def _count_all(
    source: TensorSource, base: TensorSource, mode: PlaneMode, run: MapFunction
) -> list[ClassCounts]:
    bounds = source.chunk_bounds()
    per_chunk = run(lambda b: _plane_counts(source, base, mode, b), bounds)
    return functools.reduce(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], per_chunk)
