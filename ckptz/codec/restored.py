"""Tensors of the file being written, as a reader will restore them: contexts of others follow those.

A first moment is coded by contexts of the second moment that stands in the same file, perhaps behind it.
Such a tensor is planned when the first of the two needs it, and restored chunk by chunk, so that memory
holds a few plans and a few chunks however large the file is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.chunk import restored_patterns
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.format.caches import CachedChunks, Decoded
from ckptz.format.reader import FrameSource
from ckptz.format.sources import CHUNK_VALUES, ChunkSources, LazySource, TensorSource, ViewOf
from ckptz.kernels.floats import Patterns
from ckptz.parallel import LRUCache

HELD_BYTES: Final = 192 << 20  # a tensor of 20 million 32-bit patterns, with its base
MAX_PLANS: Final = 32  # twice the threads that run by default: each may plan a pair of tensors


@dataclass(frozen=True, slots=True)
class CachedTensor(ViewOf):
    """A tensor of which chunks are held, patterns and codes from one decoding.

    Planning and coding both read bases and context tensors. Where contexts depend on other tensors, two
    ways through a chain may lead to the same chunk; without a cache their number would grow with every file.

    Attributes:
        source: the tensor itself.
        key: in the cache; tensors of the same key have the same values.
        chunks: the cache.
    """

    key: Hashable
    chunks: CachedChunks = field(compare=False)

    @classmethod
    def of_frame(cls, frame: FrameSource) -> CachedTensor:
        """Read a frame through its file's cache."""
        return cls(frame, frame, frame.cache)

    def _chunk(self, begin: int) -> Decoded:
        end = min(begin + CHUNK_VALUES, self.n_patterns)
        if self.n_codes is None:
            return Decoded(self.source.patterns(begin, end), None)
        return Decoded(*self.source.patterns_and_codes(begin, end))

    def _held(self, begin: int) -> Decoded:
        return self.chunks.get((self.key, begin), lambda: self._chunk(begin))

    def patterns(self, begin: int, end: int) -> Patterns:
        first = begin // CHUNK_VALUES * CHUNK_VALUES
        if end > first + CHUNK_VALUES:
            return self.source.patterns(begin, end)
        patterns = self._held(first).patterns
        assert patterns is not None
        return patterns[begin - first : end - first]

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        first = begin // CHUNK_VALUES * CHUNK_VALUES
        codes = self._held(first).codes
        return None if codes is None else codes[begin - first : end - first]


def restored_source(source: TensorSource, base: TensorSource | None, encoding: TensorPlan) -> LazySource:
    """Return the tensor as the file will restore it."""
    return LazySource.of(
        source, lambda begin, end: restored_patterns(source, encoding, ChunkSources(begin, end, base))
    )


class TensorPlans:
    """Encoding plans of the tensors that others depend on, each made once while it is in use.

    A thread waits only for another one that is planning the very tensor. That one waits for nobody,
    since such a tensor depends on no other, and so the two cannot wait for each other.

    Args:
        names: of the tensors that others depend on.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._held: LRUCache[TensorPlan] = LRUCache(MAX_PLANS, lambda _: 1)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def has(self, name: str) -> bool:
        """Return whether the plan of a tensor is cached."""
        return self._held.held(name) is not None

    def encoding(self, name: str, make: Callable[[], TensorPlan]) -> TensorPlan:
        """Return the plan of a tensor; make it first if it is not cached."""
        return self._held.get(name, make)
