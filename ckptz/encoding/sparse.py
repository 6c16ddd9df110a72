"""Codes a chunk by the positions of the few units that differ from the base; read by `ckptz.codec.sparse`."""

from __future__ import annotations

from typing import Final

import numpy as np

from ckptz.codec.plan import Plan
from ckptz.codec.sparse import Bytes, Positions, Units
from ckptz.dtypes import DType
from ckptz.entropy.streams import CoderId, encode_sparse
from ckptz.kernels import cpu, sparse
from ckptz.transform.planes import kernel_mode

Stream = tuple[CoderId, bytes | memoryview]

# From bench/product/weight_sync.py: where more units change, a sparse chunk decodes no faster
# than the dense one, which is smaller.
MAX_SPARSE_SHARE: Final = 0.25
_UNCHANGED: Final = (CoderId.CONSTANT, b"\x00")


def n_changed(units: Units, base: Units) -> int:
    """Count the units [n] that differ from those of the base [n]."""
    return int(np.count_nonzero(units != base))


def encode_changes(units: Units, base: Units, plan: Plan, dtype: DType) -> list[Stream] | None:
    """Code a chunk, units [n], of which few differ from the base [n]; None if too many do."""
    positions = np.flatnonzero(units != base)
    if len(positions) > MAX_SPARSE_SHARE * len(units):
        return None
    mode = kernel_mode(plan.mode, dtype)
    planes = cpu().split_planes(units[positions], base[positions], mode)
    return [_encode_plane(positions, plane) for plane in planes]


def _encode_plane(positions: Positions, plane: Bytes) -> Stream:
    used = np.flatnonzero(plane)
    if not len(used):
        return _UNCHANGED
    if len(used) < len(plane):
        positions, plane = positions[used], plane[used]
    return CoderId.SPARSE, encode_sparse(sparse().pack_gaps(positions), plane, 0)
