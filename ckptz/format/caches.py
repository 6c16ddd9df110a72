"""Caches of decoded chunks: those of other frames that a chunk needs, and recently read ones.

A chain may be 64 files long, and contexts may look at other tensors of each of them. Following that by calls
of calls would decode some frames again and again, and end where Python's stack does. All caches are bounded.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import LimitError
from ckptz.format.context_rules import Block, Row
from ckptz.format.frame import ChunkRecord, FrameHeader
from ckptz.parallel import LRUCache

MAX_FRAMES: Final = 256  # that one chunk is decoded from; 65 files of three tensors are 195
MAX_HELD_BYTES: Final = 256 << 20  # of chunks that wait for those that need them
CACHE_BYTES: Final = 64 << 20  # decoded chunks that slices of one open file may share
MAX_HEADER_CACHE_BYTES: Final = 16 << 20  # headers with their context labels and decoding tables
MAX_IDLE_ELEMENTS: Final = 1 << 24
SLOT_TABLE_BYTES: Final = 4 * 4096


@dataclass(frozen=True, slots=True)
class Decoded:
    """A chunk: its patterns, or None if only the codes were wanted; its codes, or None if it has none."""

    patterns: NDArray[Any] | None
    codes: NDArray[np.uint8] | None

    @property
    def n_bytes(self) -> int:
        """Bytes of memory held."""
        return sum(part.nbytes for part in (self.patterns, self.codes) if part is not None)


class Frame(Protocol):
    """A frame whose chunks may need chunks of others."""

    def needs(self, only_codes: bool) -> list[Node]:
        """List what a chunk, or only its codes, is decoded from."""
        ...

    def decoded(self, index: int, only_codes: bool, held: DecodedBases) -> Decoded:
        """Decode a chunk from those that it needs."""
        ...


Node = tuple[Frame, bool]  # a frame, and whether only its codes are needed
DecodedBases = Mapping[Node, Decoded]


def gather(index: int, first: Iterable[Node]) -> DecodedBases:
    """Decode chunk `index` of some frames and of all that they need; returns the former.

    Raises:
        LimitError: it needs more frames, or holds more of them at once, than any writer's files do.
    """
    wanted = list(first)
    needs = _in_order(wanted)
    n_users = Counter(node for nodes in (wanted, *needs.values()) for node in nodes)
    held: dict[Node, Decoded] = {}
    for node, nodes in needs.items():
        frame, only_codes = node
        held[node] = frame.decoded(index, only_codes, held)
        n_users.subtract(nodes)
        for used in nodes:
            if not n_users[used]:
                held.pop(used, None)
        if sum(one.n_bytes for one in held.values()) > MAX_HELD_BYTES:
            raise LimitError(
                f"a chunk is decoded from more than {MAX_HELD_BYTES >> 20} MiB of others at once"
            )
    return held


def _in_order(wanted: list[Node]) -> dict[Node, list[Node]]:
    """Order frames so that each one comes after all frames it needs."""
    needs: dict[Node, list[Node]] = {}
    done: dict[Node, list[Node]] = {}
    waiting = list(wanted)
    while waiting:
        node = waiting[-1]
        if node in needs:
            waiting.pop()
            done.setdefault(node, needs[node])
            continue
        if len(needs) >= MAX_FRAMES:
            raise LimitError(f"a chunk is decoded from more than {MAX_FRAMES} others")
        frame, only_codes = node
        needs[node] = frame.needs(only_codes)
        waiting += [needed for needed in needs[node] if needed not in needs]
    return done


class CachedChunks(LRUCache[Decoded]):
    """The decoded chunks used last, by tensor and first pattern; never to be written to.

    Args:
        most: bytes that are held.
    """

    def __init__(self, most: int = CACHE_BYTES) -> None:
        super().__init__(most, lambda chunk: chunk.n_bytes)


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
        """Return a cached chunk of a tensor if its stored and decoded checksums match; else None."""
        entry = self._held.get((name, index))
        return entry[1] if entry is not None and entry[0] == record else None

    def put(self, name: str, index: int, record: ChunkRecord, chunk: Decoded) -> None:
        """Hold a chunk, never to be written to, if there is room where the one before it was."""
        with self._lock:
            if self._limit < 0:
                self._limit = self._most()
            before = self._held.get((name, index))
            n_others = self.n_bytes - (0 if before is None else before[1].n_bytes)
            n_bytes = n_others + chunk.n_bytes
            # An interrupt comes after calls only, so none may stand between a chunk and its bytes.
            if n_bytes <= self._limit:
                self._held[name, index] = record, chunk
                self.n_bytes = n_bytes
            elif before is not None:
                del self._held[name, index]
                self.n_bytes = n_others


def _weight(header: FrameHeader) -> int:
    """The bytes that a header may come to keep alive: labels, tables, chunk records, vectors, map entries."""
    plan = header.plan
    labels = sum(len(rule.indices) for rule in plan.rules if isinstance(rule, Row | Block))
    tables = sum(len(stream.frequencies) for stream in plan.tables)
    contexts = plan.n_contexts * (8 * len(plan.tables) + 10)
    records = len(header.chunks) * (400 + 100 * plan.n_streams(header.dtype))
    outer = 0 if plan.outer is None else 8 * plan.outer.n_elements
    entries = 0 if plan.quant_map is None else 12 * math.prod(plan.quant_map.table.shape)
    return labels + tables * SLOT_TABLE_BYTES + contexts + records + outer + entries + 4000


class HeaderCache(LRUCache[FrameHeader]):
    """The frame headers used last; the one just asked for stays, as its chunks come next."""

    def __init__(self, max_bytes: int = MAX_HEADER_CACHE_BYTES) -> None:
        super().__init__(max_bytes, _weight, keeps_any=True)
        self._n_idle = 0

    def charge_idle(self, n_elements: int) -> None:
        """Count elements of vectors that no pattern is decoded from.

        Raises:
            LimitError: a few bytes stand for each million of them, and checking them takes its time.
        """
        self._n_idle += n_elements
        if self._n_idle > MAX_IDLE_ELEMENTS:
            raise LimitError(
                "tensors without patterns have outer vectors of more than 2^24 elements together"
            )
