"""Decoding one chunk of a frame. Implements spec/05-frame.md#decoding; every check is a refusal there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.bits.checksum import xxh64
from ckptz.codec.encode import class_segments
from ckptz.codec.frame import ChunkRecord, FrameHeader, StreamRecord
from ckptz.codec.plan import Predictor
from ckptz.entropy.streams import CoderId, Segments, decode_stream
from ckptz.errors import ChecksumError, CorruptionError, FormatError, MissingBaseError
from ckptz.kernels import cpu
from ckptz.transform.classes import N_MAGNITUDE_CLASSES
from ckptz.transform.planes import kernel_mode

Bytes = NDArray[np.uint8]
Units = NDArray[Any]


def decode_chunk(header: FrameHeader, index: int, payload: Bytes, base: Units | None, out: Units) -> None:
    """Decode chunk `index` into `out` and check it.

    Args:
        header: the frame's header.
        index: which chunk.
        payload: its stored bytes.
        base: the same units of the base tensor, where the predictor needs one.
        out: the chunk's units.

    Raises:
        ChecksumError: the stored bytes were changed.
        MissingBaseError: the bytes are whole, so the base must be another tensor.
        CorruptionError: the bytes contradict the specification.
    """
    record = header.chunks[index]
    if len(payload) != record.n_bytes:
        raise CorruptionError(f"chunk {index}: {len(payload)} stored bytes, {record.n_bytes} recorded")
    try:
        _decode_streams(header, record, payload, base, out)
    except FormatError as error:
        _blame_stored_bytes(record, index, payload)
        raise type(error)(f"chunk {index}: {error}") from None
    if xxh64(out) != record.decoded:
        _blame_stored_bytes(record, index, payload)
        if header.plan.predictor is Predictor.BASE:
            raise MissingBaseError("the base found is not the checkpoint that this delta was made from")
        raise CorruptionError(f"chunk {index}: decodes to other values than were written")


def check_stored(record: ChunkRecord, index: int, payload: Bytes) -> None:
    """Require that the stored bytes of a chunk are as written."""
    _blame_stored_bytes(record, index, payload)


def _blame_stored_bytes(record: ChunkRecord, index: int, payload: Bytes) -> None:
    # Only looked at when something is wrong: the decoded checksum covers the good case.
    if xxh64(payload) != record.stored:
        raise ChecksumError(f"chunk {index}: its stored bytes were changed after they were written")


def _decode_streams(
    header: FrameHeader, record: ChunkRecord, payload: Bytes, base: Units | None, out: Units
) -> None:
    plan = header.plan
    if plan.predictor is Predictor.BASE and base is None:
        raise MissingBaseError("the tensor is stored against a base, and none is open")
    classes = cpu().magnitude_classes(base) if plan.class_rule is not None else None
    planes, offset = [], 0
    for i, stream in enumerate(record.streams):
        data = payload[offset : offset + stream.n_bytes]
        planes.append(_decode_plane(header, i, stream, data, classes, len(out)))
        offset += stream.n_bytes
    cpu().merge_planes(planes, out if base is None else base, kernel_mode(plan.mode, header.dtype), out)


def _decode_plane(
    header: FrameHeader, index: int, stream: StreamRecord, data: Bytes, classes: Bytes | None, n: int
) -> Bytes:
    if stream.coder == CoderId.STORED and len(data) == n:
        return data
    plane = np.empty(n, np.uint8)
    if stream.coder != CoderId.RANS_SHARED:
        decode_stream(stream.coder, data.data, plane)
        return plane
    if classes is None:
        raise CorruptionError("a stream uses the tensor's tables, and the frame has none")
    segments = class_segments(cpu().histogram(classes), header.plan.tables[index])
    with_slots = Segments(segments.ends, segments.table_of, segments.tables, header.slot_tables[index])
    grouped = np.empty(n, np.uint8)
    decode_stream(stream.coder, data.data, grouped, with_slots)
    cpu().ungroup(grouped, classes, N_MAGNITUDE_CLASSES, plane)
    return plane
