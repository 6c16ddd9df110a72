"""What an open file keeps in memory: the chunks and the frame headers used last, both bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from numpy.typing import NDArray

from ckptz.codec.frame import FrameHeader
from ckptz.transform.classes import Block, Row

Units = NDArray[Any]
ChunkKey = tuple[str, int]  # tensor, chunk
CACHE_BYTES: Final = 64 << 20  # decoded chunks that slices of one open file may share
MAX_HEADER_CACHE_BYTES: Final = 16 << 20  # headers with their class labels and decoding tables
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
        """A chunk that is held, or else what `decode` gives; never to be written to."""
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
    """About the bytes that a header keeps alive: class labels, decoding tables, chunk records."""
    plan = header.plan
    labels = sum(len(rule.indices) for rule in plan.rules if isinstance(rule, Row | Block))
    tables = sum(len(stream.frequencies) for stream in plan.tables)
    return labels + tables * SLOT_TABLE_BYTES + len(header.chunks) * 500 + 4000


class HeaderCache:
    """The frame headers used last, up to a number of bytes; safe to share between threads."""

    def __init__(self, max_bytes: int = MAX_HEADER_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._headers: OrderedDict[str, FrameHeader] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def get(self, name: str, parse: Callable[[], FrameHeader]) -> FrameHeader:
        """A header that is held, or else what `parse` gives; two threads may parse one twice."""
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
