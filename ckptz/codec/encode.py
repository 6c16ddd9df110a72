"""Encoding one chunk of a tensor. The bytes are fixed by the tensor, its plan and its base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.bits.checksum import xxh64
from ckptz.codec.frame import ChunkRecord, StreamRecord
from ckptz.codec.plan import Plan, Predictor, StreamTables
from ckptz.codec.units import UnitSource
from ckptz.dtypes import DType
from ckptz.entropy.streams import LANE_CHOICES, CoderId, Segments, encode_rans, encode_stream
from ckptz.kernels import cpu, planning
from ckptz.transform.classes import N_MAGNITUDE_CLASSES
from ckptz.transform.planes import kernel_mode

Bytes = NDArray[np.uint8]
MAX_LANE_BYTES = 1 + 4 * LANE_CHOICES[-1]


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's record and its streams."""

    record: ChunkRecord
    payload: bytes


def class_segments(per_class: NDArray[np.int64], tables: StreamTables) -> Segments:
    """How a stream, sorted by class, runs through the tensor's tables.

    Args:
        per_class: elements of the chunk in each class [n_classes].
        tables: the stream's tables.
    """
    used = np.flatnonzero(per_class)
    return Segments(np.cumsum(per_class[used]), tables.table_map.table_of[used], tables.frequencies)


def _shared_bytes(counts: NDArray[np.int64], tables: StreamTables) -> float:
    """Size of the stream with the tensor's tables; infinite where they lack a code."""
    bits = planning().shared_cost_bits(counts, tables.table_map.table_of, tables.frequencies)
    return float(bits) / 8 + MAX_LANE_BYTES


def _encode_classed(plane: Bytes, classes: Bytes, tables: StreamTables) -> tuple[CoderId, bytes]:
    counts = cpu().class_histogram(classes, plane, N_MAGNITUDE_CLASSES)
    shared = _shared_bytes(counts, tables)
    coder, data = encode_stream(plane, counts.sum(axis=0), beat=shared)
    if len(data) <= shared:
        return coder, data
    grouped = cpu().group(plane, classes, N_MAGNITUDE_CLASSES)
    classed = encode_rans(grouped, class_segments(counts.sum(axis=1), tables), shared)
    return (CoderId.RANS_SHARED, classed) if len(classed) < len(data) else (coder, data)


def _streams(
    units: NDArray[Any], base: NDArray[Any], dtype: DType, plan: Plan
) -> list[tuple[CoderId, bytes]]:
    planes = cpu().split_planes(units, base, kernel_mode(plan.mode, dtype))
    if plan.class_rule is None:
        return [encode_stream(plane) for plane in planes]
    classes = cpu().magnitude_classes(base)
    return [
        _encode_classed(plane, classes, tables) for plane, tables in zip(planes, plan.tables, strict=True)
    ]


def encode_chunk(
    source: UnitSource, plan: Plan, base: UnitSource | None, begin: int, end: int
) -> EncodedChunk:
    """Encode units begin..end, which are one chunk.

    Args:
        source: the tensor.
        plan: its plan.
        base: the tensor that the plan's predictor needs, else None.
        begin: first unit of the chunk.
        end: unit after the last.
    """
    units = source.units(begin, end)
    needs_base = plan.predictor is Predictor.BASE
    base_units = base.units(begin, end) if base is not None and needs_base else units
    streams = _streams(units, base_units, source.dtype, plan)
    payload = b"".join(data for _, data in streams)
    records = tuple(StreamRecord(coder, len(data)) for coder, data in streams)
    return EncodedChunk(ChunkRecord(xxh64(payload), xxh64(units), records), payload)
