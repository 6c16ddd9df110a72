"""Encoding tensors of one chunk together: for small ones, calls would take longer than the arithmetic.

The bytes are those that `ckptz.encoding.chunk` makes of each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np

from ckptz.class_rules import MAX_TABLES, N_MAGNITUDE_CLASSES, Magnitude
from ckptz.codec.plan import Plan, PlaneMode, StreamTables, kernel_mode, planes_plan
from ckptz.dtypes import DType
from ckptz.encoding.chunk import EncodedChunk, encode_by_classes, encoded_chunk
from ckptz.encoding.draft import TABLE_COST_BITS, TABLE_COST_BITS_PER_SYMBOL, ClassCounts, Draft
from ckptz.entropy.streams import (
    LANE_CHOICES,
    LANE_MIN_BYTES,
    CoderId,
    Stream,
    cut,
    encode_streams,
    joined,
    lanes_byte,
)
from ckptz.kernels import cpu, planning
from ckptz.kernels.floats import Bytes, Counts, Units

Encoded = tuple[Draft, EncodedChunk]
_LANES: Final = np.array(LANE_CHOICES), np.array(LANE_MIN_BYTES)


class Batch:
    """Tensors of one dtype, none of them empty: the units of each, and of the bases that all or none have."""

    def __init__(self, dtype: DType, units: Sequence[Units], bases: Sequence[Units]) -> None:
        self.dtype, self.units, self.bases = dtype, units, bases

    @cached_property
    def flat(self) -> tuple[Units, Counts]:
        """Units [n] of one tensor behind the other, and the end of each [m]."""
        return joined(self.units)

    @cached_property
    def flat_bases(self) -> Units:
        """Units [n] of the bases; without bases those of the tensors."""
        return joined(self.bases)[0] if self.bases else self.flat[0]

    def only(self, which: Sequence[int]) -> Batch:
        """Give some of the tensors, in this order."""
        if len(which) == len(self.units):
            return self
        bases = [self.bases[k] for k in which] if self.bases else ()
        return Batch(self.dtype, [self.units[k] for k in which], bases)

    def planes(self, mode: PlaneMode) -> Bytes:
        """Split into planes [n_planes, n]."""
        return cpu().split_planes(self.flat[0], self.flat_bases, kernel_mode(mode, self.dtype))

    def parts(self, planes: Bytes) -> list[Bytes]:
        """Cut planes [n_planes, n] into streams: all planes of one tensor, and then of the next."""
        columns = [cut(plane, self.flat[1]) for plane in planes]
        return [part for parts in zip(*columns, strict=True) for part in parts]

    def chunks(self, streams: Sequence[Stream]) -> list[EncodedChunk]:
        """Give the chunk of each tensor from its streams, in the order of `parts`."""
        n = self.dtype.unit_bytes
        return [encoded_chunk(streams[n * k : n * k + n], own) for k, own in enumerate(self.units)]


def encode_planes(batch: Batch, plan: Plan) -> list[Encoded]:
    """Encode tensors by a plan without classes."""
    draft, streams = Draft(plan), encode_streams(batch.parts(batch.planes(plan.mode)))
    return [(draft, chunk) for chunk in batch.chunks(streams)]


def encode_classed(batch: Batch, mode: PlaneMode) -> list[Encoded]:
    """Encode deltas of a mode with classes by the base's magnitude, each with tables of its own."""
    planes, labels, n = batch.planes(mode), cpu().magnitude_classes(batch.flat_bases), batch.dtype.unit_bytes
    frequencies, ends, table_of, packed, packed_ends, totals, most, lanes, words, word_ends = (
        planning().encode_classed(
            planes.reshape(-1),
            labels,
            batch.flat[1],
            N_MAGNITUDE_CLASSES,
            MAX_TABLES,
            TABLE_COST_BITS,
            TABLE_COST_BITS_PER_SYMBOL,
            *_LANES,
        )
    )
    rows = zip(cut(frequencies, ends), table_of, cut(packed, packed_ends), strict=True)
    tables = [StreamTables(own, of_class, head.tobytes()) for own, of_class, head in rows]
    parts, own_labels = batch.parts(planes), cut(labels, batch.flat[1])
    others = np.flatnonzero(lanes == 0)
    coded = [
        lanes_byte(k) + data.tobytes() if k else b""
        for k, data in zip(lanes.tolist(), cut(words, word_ends), strict=True)
    ]
    streams: list[Stream] = [
        (CoderId.RANS_SHARED, data) if len(data) < len(plane) else (CoderId.STORED, plane.data)
        for data, plane in zip(coded, parts, strict=True)
    ]
    if len(others):
        found = encode_streams([parts[k] for k in others], totals[others], beats=most[others].tolist())
        for k, stream in zip(others.tolist(), found, strict=True):
            streams[k] = stream
            if len(stream[1]) > most[k]:
                counts = ClassCounts.of(own_labels[k // n], parts[k], N_MAGNITUDE_CLASSES)
                [streams[k]] = encode_by_classes(
                    [parts[k]], own_labels[k // n], N_MAGNITUDE_CLASSES, [tables[k]], [counts]
                )
    drafts = [
        Draft(planes_plan(mode, (Magnitude(),), tuple(tables[k : k + n]))) for k in range(0, len(tables), n)
    ]
    return list(zip(drafts, batch.chunks(streams), strict=True))
