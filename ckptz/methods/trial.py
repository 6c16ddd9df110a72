"""Trying whether a device writes what the host writes, of made-up tensors, before it is believed.

Files outlive machines, and not every GPU, driver and compiler has been tried: bytes that the host would not
have written are never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.frame import pack_plan
from ckptz.codec.units import (
    CHUNK_UNITS,
    UNIT_TYPES,
    ArraySource,
    ChunkSources,
    Companions,
    TensorSource,
    companions_of,
)
from ckptz.codec.values import KINDS
from ckptz.dtypes import dtype_of
from ckptz.encoding.chunk import EncodedSource, encode_chunk
from ckptz.encoding.companions import Restored
from ckptz.encoding.draft import Draft
from ckptz.encoding.subject import Guide, Subject
from ckptz.kernels import cpu
from ckptz.methods.first_moment import FirstMoment
from ckptz.methods.grid import UniformGrid
from ckptz.methods.lossless import EXACT
from ckptz.methods.method import Recipe
from ckptz.methods.second_moment import SecondMoment
from ckptz.parallel import Workers

SHAPE = (6, CHUNK_UNITS // 6 + 43)
SECOND = SecondMoment(1.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A made-up tensor, what it is stored against, second moments of it, and what becomes of it."""

    recipe: Recipe
    source: ArraySource
    base: ArraySource | None = None
    second: ArraySource | None = None

    def agrees(self, moved: Callable[[ArraySource], Any], workers: Workers) -> bool:
        """Tell whether its chunks are the same when `moved` has brought it to a device."""
        there, second = moved(self.source), None if self.second is None else moved(self.second)
        draft = None if self.second is None else SECOND.plan(Subject(self.second))
        here, beside = (
            {} if one is None or draft is None else {"second": Restored(one, None, draft)}
            for one in (self.second, second)
        )
        guide = Guide(second_moment=self.second, reach=1e-4)
        subject = Subject(self.source, self.base, guide, companions_of(here), seed=7)

        def plan(base: TensorSource | None, companions: Companions) -> Draft:
            own = replace(guide, second_moment=second)
            return self.recipe.plan(
                replace(subject, source=there, base=base, guide=own, companions=companions)
            )

        made, draft = there.made(plan, self.base, lambda: beside, workers), self.recipe.plan(subject)
        sources = (ChunkSources(*b, self.base, subject.companions) for b in self.source.chunk_bounds())
        chunks = tuple(encode_chunk(self.source, draft, each) for each in sources)
        wanted = EncodedSource(self.source.dtype, self.source.shape, draft.plan, chunks)
        return made is not None and _bytes(made[1]) == _bytes(wanted)


def _bytes(encoded: EncodedSource) -> list[Any]:
    plan = pack_plan(encoded.dtype, encoded.shape, encoded.plan)
    return [plan, *((chunk.record, chunk.payload) for chunk in encoded.chunks)]


def agrees(moved: Callable[[ArraySource], Any]) -> bool:
    """Tell whether tensors that `moved` brings to a device are planned and encoded there as on the host."""
    with Workers(1) as workers:
        return all(case.agrees(moved, workers) for case in cases())


def cases() -> Iterator[Case]:
    """Make up tensors without loss, weights on grids, and moments, alone and against bases."""
    for name in ("U8", "BF16", "F32", "F64"):
        dtype, random = dtype_of(name), np.random.default_rng(1)
        n = CHUNK_UNITS + CHUNK_UNITS // 256 + 3
        bits = random.normal(0, 0.02, n).view(np.uint64) >> np.uint64(64 - 8 * dtype.unit_bytes)
        units = bits.astype(UNIT_TYPES[dtype.unit_bytes])
        source, base = (ArraySource(dtype, (n,), each) for each in (units, units ^ (units >> 7 & 3)))
        yield Case(EXACT, source)
        yield Case(EXACT, source, base)
    for name in KINDS:
        yield from _lossy(name)


def _lossy(name: str) -> Iterator[Case]:
    def of(values: NDArray[np.float64]) -> ArraySource:
        patterns = values.astype(np.float32).view(np.uint32).reshape(-1)
        return ArraySource(dtype_of(name), SHAPE, cpu().from_f32(patterns, KINDS[name]))

    random = np.random.default_rng(2)
    values, others = random.normal(0, 0.02, (2, *SHAPE))
    scale = np.array([1, 1, 2, 2, 5, 5])[:, None]
    values *= scale
    values.reshape(-1)[::1001] *= 100  # which escape
    weights, second = of(values), of(np.exp2(random.normal(-11, 2, SHAPE)) * scale**2)
    for base in (None, of(0.6 * values), of(values + 1e-4 * others)):  # the last one draws thresholds
        yield Case(UniformGrid(purpose="resume"), weights, base, base and second)
    rows, columns = np.exp2(random.normal(-9, 3, (SHAPE[0], 1))), np.exp2(random.normal(-9, 3, SHAPE[1]))
    others[:, ::11] *= 2.0**-60  # some too small for normal numbers, once they are squared
    others[:, ::13] = 0
    squares = others**2 / 8
    for moments, base in ((squares, None), (squares, of(squares * 0.6)), (rows * columns, None)):
        yield Case(SECOND, of(moments), base)
    yield Case(FirstMoment(1.0, 0.35), weights)
    for is_kept in (False, True):
        yield Case(FirstMoment(1.0, 0.35, "second", is_kept), weights, None, second)
