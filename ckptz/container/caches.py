"""What an open file keeps in memory: the chunks and the frame headers used last, both bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from numpy.typing import NDArray

from ckptz.codec.frame import FrameHeader

Units = NDArray[Any]
ChunkKey = tuple[str, int]  # tensor, chunk
CACHE_BYTES: Final = 64 << 20  # decoded chunks that slices of one open file may share
MAX_HEADERS: Final = 32  # each holds decoding tables, 16 KiB apiece and at most 64 a plane


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


class HeaderCache:
    """The frame headers used last; safe to share between threads, which may parse one twice."""

    def __init__(self) -> None:
        self._headers: OrderedDict[str, FrameHeader] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, parse: Callable[[], FrameHeader]) -> FrameHeader:
        """A header that is held, or else what `parse` gives."""
        with self._lock:
            if name in self._headers:
                self._headers.move_to_end(name)
                return self._headers[name]
        header = parse()
        with self._lock:
            self._headers[name] = header
            if len(self._headers) > MAX_HEADERS:
                self._headers.popitem(last=False)
        return header
