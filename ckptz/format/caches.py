"""Bounded caches of decoded chunks, and the order in which a chain is decoded.

A chain may have 64 files, and contexts may depend on other tensors of each. Recursion would decode some
frames several times and overflow the stack, so frames are decoded in order of their dependencies.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import LimitError
from ckptz.format.context_rules import n_indices_of
from ckptz.format.frame import ChunkRecord, FrameHeader

V = TypeVar("V")

MAX_FRAMES: Final = 256  # frames that a chunk depends on; 65 files with three tensors each are 195
MAX_HELD_BYTES: Final = 256 << 20  # decoded chunks in memory while a chain is decoded
CACHE_BYTES: Final = 64 << 20  # decoded chunks kept for slices of an open file
MAX_HEADER_CACHE_BYTES: Final = 16 << 20  # headers with their context labels and decoding tables
MAX_IDLE_ELEMENTS: Final = 1 << 24
SLOT_TABLE_BYTES: Final = 4 * 4096


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded chunk: patterns (None if only codes were decoded), codes (None without a map)."""

    patterns: NDArray[Any] | None
    codes: NDArray[np.uint8] | None

    @property
    def n_bytes(self) -> int:
        """Size in memory, in bytes."""
        return sum(part.nbytes for part in (self.patterns, self.codes) if part is not None)


class Frame(Protocol):
    """A frame whose chunks may depend on chunks of other frames."""

    def needs(self, only_codes: bool) -> list[Node]:
        """Return the frames that a chunk, or only its codes, depends on."""
        ...

    def decoded(self, index: int, only_codes: bool, dependencies: DecodedBases) -> Decoded:
        """Decode a chunk, given its decoded dependencies."""
        ...


Node = tuple[Frame, bool]  # (frame, True if only its codes are needed)
DecodedBases = Mapping[Node, Decoded]


def gather(index: int, first: Iterable[Node]) -> DecodedBases:
    """Decode chunk `index` of frames and of all their dependencies; return the chunks of the given frames.

    Raises:
        LimitError: there are more dependencies, or more of them in memory at once, than ckptz ever writes.
    """
    targets = list(first)
    needs = _in_order(targets)
    n_users = Counter(node for nodes in (targets, *needs.values()) for node in nodes)
    decoded: dict[Node, Decoded] = {}
    for node, nodes in needs.items():
        frame, only_codes = node
        decoded[node] = frame.decoded(index, only_codes, decoded)
        n_users.subtract(nodes)
        for dependency in nodes:
            if not n_users[dependency]:
                decoded.pop(dependency, None)
        if sum(chunk.n_bytes for chunk in decoded.values()) > MAX_HELD_BYTES:
            raise LimitError(
                f"a chunk is decoded from more than {MAX_HELD_BYTES >> 20} MiB of others at once"
            )
    return decoded


def _in_order(targets: list[Node]) -> dict[Node, list[Node]]:
    """Return frames with their dependencies, each after all frames that it depends on."""
    needs: dict[Node, list[Node]] = {}
    done: dict[Node, list[Node]] = {}
    waiting = list(targets)
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


# --- caches -------------------------------------------------------------------------------------


class LRUCache(Generic[V]):
    """A thread-safe LRU cache with a limit on total weight; a value is computed by one thread at a time.

    Args:
        most: maximum total weight.
        weigh: returns the weight of a value, such as its bytes.
        keeps_any: whether a single value heavier than `most` is cached.
    """

    def __init__(self, most: int, weigh: Callable[[V], int], *, keeps_any: bool = False) -> None:
        self._most, self._weigh, self._keeps_any = most, weigh, keeps_any
        self.weight = 0  # total weight of the cached values
        self._held: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.RLock()  # reentrant: an interrupt right after acquisition leaves it locked
        self._making: dict[Hashable, threading.RLock] = {}

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the cached value, or compute it with `make` and cache it."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            turn = self._making.setdefault(key, threading.RLock())
        with turn:
            value = self._held.get(key)
            if value is None:
                try:
                    value = make()
                    self._keep(key, value)
                finally:
                    self._making.pop(key, None)
        return value

    def peek(self, key: Hashable) -> V | None:
        """Return the cached value, or None; it does not count as a use."""
        with self._lock:
            return self._held.get(key)

    def _keep(self, key: Hashable, value: V) -> None:
        weight = self._weigh(value)
        with self._lock:
            if key in self._held or (weight > self._most and not self._keeps_any):
                return
            # Interrupts arrive at calls only: no call here, so that weight and values stay consistent.
            self._held[key] = value
            self.weight += weight
            while self.weight > self._most and len(self._held) > 1:
                oldest = next(iter(self._held))
                weight = self._weigh(self._held[oldest])
                del self._held[oldest]
                self.weight -= weight

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._held = OrderedDict()
            self.weight = 0


class CachedChunks(LRUCache[Decoded]):
    """Recently used decoded chunks, by tensor and first pattern; read-only.

    Args:
        most: capacity in bytes.
    """

    def __init__(self, most: int = CACHE_BYTES) -> None:
        super().__init__(most, lambda chunk: chunk.n_bytes)


class LastChunks:
    """The decoded chunks of the newest file of a run, which is the base of the next file.

    Each chunk replaces the chunk of the file before, its base. So only one file is decoded for each save,
    whatever the chain length, and a chunk with the same checksums is not decoded again.

    Args:
        most: function that returns the capacity in bytes, called for the first chunk. Chunks that do not fit
            are decoded through the chain.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most, self._limit = most, -1
        self._held: dict[tuple[str, int], tuple[ChunkRecord, Decoded]] = {}
        self._lock = threading.Lock()
        self.n_bytes = 0  # of all chunks

    def get(self, name: str, index: int, record: ChunkRecord) -> Decoded | None:
        """Return a cached chunk of a tensor if its stored and decoded checksums match; else None."""
        entry = self._held.get((name, index))
        return entry[1] if entry is not None and entry[0] == record else None

    def put(self, name: str, index: int, record: ChunkRecord, chunk: Decoded) -> None:
        """Replace a chunk by that of the next file if it fits; it must not be modified afterwards."""
        with self._lock:
            if self._limit < 0:
                self._limit = self._most()
            before = self._held.get((name, index))
            n_others = self.n_bytes - (0 if before is None else before[1].n_bytes)
            n_bytes = n_others + chunk.n_bytes
            # An interrupt can only occur at a call, so there is no call between these two assignments.
            if n_bytes <= self._limit:
                self._held[name, index] = record, chunk
                self.n_bytes = n_bytes
            elif before is not None:
                del self._held[name, index]
                self.n_bytes = n_others


def _weight(header: FrameHeader) -> int:
    """Estimate the memory of a header in bytes: labels, tables, chunk records, vectors and map entries."""
    plan = header.plan
    labels = n_indices_of(plan.rules)
    tables = sum(len(stream.frequencies) for stream in plan.tables)
    contexts = plan.n_contexts * (8 * len(plan.tables) + 10)
    records = len(header.chunks) * (400 + 100 * plan.n_streams(header.dtype))
    outer = 0 if plan.outer is None else 8 * plan.outer.n_elements
    entries = 0 if plan.quant_map is None else 12 * math.prod(plan.quant_map.table.shape)
    return labels + tables * SLOT_TABLE_BYTES + contexts + records + outer + entries + 4000


class HeaderCache(LRUCache[FrameHeader]):
    """Recently used frame headers; the newest is always kept, because its chunks are read next."""

    def __init__(self, max_bytes: int = MAX_HEADER_CACHE_BYTES) -> None:
        super().__init__(max_bytes, _weight, keeps_any=True)
        self._n_idle = 0

    def charge_idle(self, n_elements: int) -> None:
        """Count elements of outer vectors of empty tensors, which are checked though nothing needs them.

        Raises:
            LimitError: too many; a few bytes of a file may describe millions of elements.
        """
        self._n_idle += n_elements
        if self._n_idle > MAX_IDLE_ELEMENTS:
            raise LimitError(
                "tensors without patterns have outer vectors of more than 2^24 elements together"
            )
