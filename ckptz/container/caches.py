"""What an open file keeps in memory: the chunks and the frame headers used last, both bounded."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

from numpy.typing import NDArray

from ckptz.codec.frame import FrameHeader
from ckptz.errors import LimitError
from ckptz.transform.classes import Block, Row

Units = NDArray[Any]
ChunkKey = tuple[Hashable, int]  # tensor, chunk
CACHE_BYTES: Final = 64 << 20  # decoded chunks that slices of one open file may share
MAX_HEADER_CACHE_BYTES: Final = 16 << 20  # headers with their class labels and decoding tables
MAX_IDLE_ELEMENTS: Final = 1 << 24
SLOT_TABLE_BYTES: Final = 4 * 4096


class ChunkCache:
    """The decoded chunks used last, up to a number of bytes; safe to share between threads.

    Threads that want the same chunk at once wait for one of them to decode it.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._chunks: OrderedDict[ChunkKey, Units] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._decoding: dict[ChunkKey, threading.Lock] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        return self._n_bytes

    def get(self, key: ChunkKey, decode: Callable[[], Units]) -> Units:
        """Give the units of a chunk that is held, or else what `decode` gives; never to be written to."""
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
                return self._chunks[key]
            turn = self._decoding.setdefault(key, threading.Lock())
        with turn:
            units = self._chunks.get(key)
            if units is None:
                try:
                    units = decode()
                    self._keep(key, units)
                finally:
                    self._decoding.pop(key, None)
        return units

    def _keep(self, key: ChunkKey, units: Units) -> None:
        with self._lock:
            if key in self._chunks or units.nbytes > self._max_bytes:
                return
            self._chunks[key] = units
            self._n_bytes += units.nbytes
            while self._n_bytes > self._max_bytes:
                _, dropped = self._chunks.popitem(last=False)
                self._n_bytes -= dropped.nbytes

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._chunks.clear()
            self._n_bytes = 0


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


class HeaderCache:
    """The frame headers used last, up to a number of bytes; safe to share between threads."""

    def __init__(self, max_bytes: int = MAX_HEADER_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._headers: OrderedDict[Hashable, FrameHeader] = OrderedDict()
        self._n_idle = 0
        self._n_bytes = 0
        self._lock = threading.Lock()

    def get(self, name: Hashable, parse: Callable[[], FrameHeader]) -> FrameHeader:
        """Give a header that is held, or else what `parse` gives; two threads may parse one twice."""
        with self._lock:
            if name in self._headers:
                self._headers.move_to_end(name)
                return self._headers[name]
        header = parse()
        with self._lock:
            if name not in self._headers:
                self._headers[name] = header
                self._n_bytes += _weight(header)
            # The one just asked for stays, whatever it weighs: its chunks come next.
            while self._n_bytes > self._max_bytes and len(self._headers) > 1:
                self._n_bytes -= _weight(self._headers.popitem(last=False)[1])
        return header

    def charge_idle(self, n_elements: int) -> None:
        """Count elements of vectors that no value is decoded from.

        Raises:
            LimitError: a few bytes stand for each million of them, and checking them takes its time.
        """
        self._n_idle += n_elements
        if self._n_idle > MAX_IDLE_ELEMENTS:
            raise LimitError("tensors without units have outer vectors of more than 2^24 elements together")

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._headers.clear()
            self._n_bytes = 0
