"""Chunks of which few units differ from the base: coding them costs time for those units only.

The bytes are ordinary code streams, every one of them constant zero or sparse around zero, so any
decoder reads them. What is here finds the changed units without walking all planes, and gives them
back as positions and values, so that they can be written into memory that holds the base.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptz.bits import ByteReader
from ckptz.codec.frame import ChunkRecord, FrameHeader
from ckptz.codec.plan import BASE_MODES, kernel_mode
from ckptz.entropy.streams import CoderId, read_sparse
from ckptz.errors import CorruptionError
from ckptz.kernels import cpu, sparse
from ckptz.kernels.floats import Bytes, Units
from ckptz.kernels.floats import Positions as Positions


@dataclass(frozen=True, slots=True)
class Changes:
    """The units of one chunk that differ from the base.

    Attributes:
        positions: where, counted from the start of the chunk, ascending.
        planes: the codes there, one array a byte plane.
        mode: the kernels' number for how codes and base make units.
    """

    positions: Positions
    planes: tuple[Bytes, ...]
    mode: int

    def __len__(self) -> int:
        return len(self.positions)

    def units(self, base: Units) -> Units:
        """Compute what the units become, from the base's units at the same positions."""
        out = np.empty_like(base)
        if len(out):
            cpu().merge_planes(self.planes, base, self.mode, out)
        return out


def read_changes(header: FrameHeader, record: ChunkRecord, payload: Bytes, n: int) -> Changes | None:
    """Read the changes of a chunk of `n` units whose streams are all constant zero or sparse around zero.

    Returns:
        None for any other chunk: it is decoded as a whole.

    Raises:
        FormatError: the bytes are not such streams.
    """
    streams = _sparse_streams(header, record, payload)
    if streams is None:
        return None
    found = [None if data is None else read_plane(data, n)[1:] for data in streams]
    mode = kernel_mode(header.plan.mode, header.dtype)
    changed = [positions for positions, _ in filter(None, found)]
    if not changed:
        return Changes(np.empty(0, np.int64), (np.empty(0, np.uint8),) * len(found), mode)
    everywhere = changed[0]
    for positions in changed[1:]:
        everywhere = sparse().union(everywhere, positions)
    return Changes(everywhere, tuple(_placed(plane, everywhere) for plane in found), mode)


def _sparse_streams(
    header: FrameHeader, record: ChunkRecord, payload: Bytes
) -> list[ByteReader | None] | None:
    """The sparse streams of a chunk, None for each constant one; None if there is any other."""
    if header.plan.quant_map is not None or header.plan.mode not in BASE_MODES:
        return None
    found: list[ByteReader | None] = []
    offset = 0
    for stream in record.streams:
        data = payload[offset : offset + stream.n_bytes]
        offset += stream.n_bytes
        if stream.coder not in (CoderId.CONSTANT, CoderId.SPARSE) or not len(data) or data[0]:
            return None
        if stream.coder == CoderId.CONSTANT and len(data) > 1:
            return None
        found.append(ByteReader(data.data) if stream.coder == CoderId.SPARSE else None)
    return found


def read_plane(source: ByteReader, n: int) -> tuple[int, Positions, Bytes]:
    """Read a sparse stream of n codes: the common code, the positions of other ones, and these.

    Raises:
        FormatError: the bytes are not one.
    """
    common, gaps, values = read_sparse(source, n)
    positions = np.empty(len(values), np.int64)
    if not sparse().unpack_gaps(gaps, n, positions):
        raise CorruptionError("sparse stream: gaps and values do not agree")
    return common, positions, values


def _placed(plane: tuple[Positions, Bytes] | None, everywhere: Positions) -> Bytes:
    """The codes of one plane at all positions that change in any."""
    if plane is None:
        return np.zeros(len(everywhere), np.uint8)
    positions, values = plane
    if len(positions) == len(everywhere):
        return values
    out = np.empty(len(everywhere), np.uint8)
    sparse().place(positions, values, everywhere, out)
    return out
