"""Keeps in memory, up to a bound: chunks and headers that were read last, and the last file of a run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

from ckptz.codec.frame import ChunkRecord, FrameHeader
from ckptz.container.needed import Decoded
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


class LastChunks:
    """The decoded chunks of the file that a run wrote last: the next one is stored against them.

    A chunk takes the place of that of the file before, which it was decoded from. So a file is decoded by
    itself, however long its chain is; and one of the same records by nothing at all.

    Args:
        most: gives the bytes that are held; asked when the first chunk comes. Chunks beyond stay out, and
            are decoded through the chain.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most, self._limit = most, -1
        self._held: dict[tuple[str, int], tuple[ChunkRecord, Decoded]] = {}
        self._lock = threading.Lock()
        self.n_bytes = 0  # of all that is held

    def get(self, name: str, index: int, record: ChunkRecord) -> Decoded | None:
        """Give a chunk of a tensor, if what is held has the same checksums as stored and as decoded."""
        found = self._held.get((name, index))
        return found[1] if found is not None and found[0] == record else None

    def put(self, name: str, index: int, record: ChunkRecord, chunk: Decoded) -> None:
        """Hold a chunk, never to be written to, if there is room where the one before it was."""
        with self._lock:
            if self._limit < 0:
                self._limit = self._most()
            _, before = self._held.pop((name, index), (None, None))
            self.n_bytes -= 0 if before is None else before.n_bytes
            if self.n_bytes + chunk.n_bytes <= self._limit:
                self._held[name, index] = record, chunk
                self.n_bytes += chunk.n_bytes


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
