"""What an open file keeps in memory: the chunks and the frame headers used last, both bounded."""

from __future__ import annotations

import math
from typing import Final

from ckptz.codec.frame import FrameHeader
from ckptz.errors import LimitError
from ckptz.kernels.floats import Units
from ckptz.parallel import Recent
from ckptz.transform.classes import Block, Row

CACHE_BYTES: Final = 64 << 20  # decoded chunks that slices of one open file may share
MAX_HEADER_CACHE_BYTES: Final = 16 << 20  # headers with their class labels and decoding tables
MAX_IDLE_ELEMENTS: Final = 1 << 24
SLOT_TABLE_BYTES: Final = 4 * 4096


class ChunkCache(Recent[Units]):
    """The decoded chunks used last, by tensor and number; never to be written to."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        super().__init__(max_bytes, lambda units: units.nbytes)


def _weight(header: FrameHeader) -> int:
    """The bytes that a header may come to keep alive: labels, tables, chunk records, vectors, map entries."""
    plan = header.plan
    labels = sum(len(rule.indices) for rule in plan.rules if isinstance(rule, Row | Block))
    tables = sum(len(stream.frequencies) for stream in plan.tables)
    classes = plan.n_classes * (8 * len(plan.tables) + 10)
    records = len(header.chunks) * (400 + 100 * plan.n_streams(header.dtype))
    outer = 0 if plan.outer is None else 8 * plan.outer.n_elements
    entries = 0 if plan.quant_map is None else 12 * math.prod(plan.quant_map.table.shape)
    return labels + tables * SLOT_TABLE_BYTES + classes + records + outer + entries + 4000


class HeaderCache(Recent[FrameHeader]):
    """The frame headers used last; the one just asked for stays, as its chunks come next."""

    def __init__(self, max_bytes: int = MAX_HEADER_CACHE_BYTES) -> None:
        super().__init__(max_bytes, _weight, keeps_any=True)
        self._n_idle = 0

    def charge_idle(self, n_elements: int) -> None:
        """Count elements of vectors that no unit is decoded from.

        Raises:
            LimitError: a few bytes stand for each million of them, and checking them takes its time.
        """
        self._n_idle += n_elements
        if self._n_idle > MAX_IDLE_ELEMENTS:
            raise LimitError("tensors without units have outer vectors of more than 2^24 elements together")
