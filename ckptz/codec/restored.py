"""Restored values of tensors in the file being written, on which the contexts of other tensors depend.

A first moment is encoded with contexts from the restored second moment, which may come later in the file. The
second moment is planned when either of the two is encoded first, and restored chunk by chunk, so that memory
holds only a few plans and chunks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.codec.chunk import Quantized, restored_chunk
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.format.caches import CachedChunks, Decoded
from ckptz.format.reader import FrameSource
from ckptz.format.sources import CHUNK_VALUES, ChunkSources, SourceOf, TensorSource, ViewOf
from ckptz.kernels.floats import Patterns

HELD_BYTES: Final = 192 << 20  # enough for a tensor of 20 million 32-bit patterns and its base


@dataclass(frozen=True, slots=True)
class CachedTensor(ViewOf):
    """A tensor whose decoded chunks (patterns and codes) are cached.

    Planning and encoding both read bases and context tensors. If contexts depend on other tensors, a chunk
    is needed along two paths for each file of a chain: without a cache, decoding would take exponential time.

    Attributes:
        source: the tensor itself.
        key: cache key; tensors with the same key have the same values.
        chunks: the cache.
    """

    key: Hashable
    chunks: CachedChunks = field(compare=False)

    @classmethod
    def of_frame(cls, frame: FrameSource) -> CachedTensor:
        """Return the tensor of a frame, with the cache of its file."""
        return cls(frame, frame, frame.cache)

    def _held(self, begin: int) -> Decoded:
        def chunk() -> Decoded:
            end = min(begin + CHUNK_VALUES, self.n_patterns)
            if self.n_codes is None:
                return Decoded(self.source.patterns(begin, end), None)
            return Decoded(*self.source.patterns_and_codes(begin, end))

        return self.chunks.get((self.key, begin), chunk)

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


@dataclass(frozen=True, slots=True)
class RestoredTensor(SourceOf):
    """A tensor with the values that a reader will restore.

    Attributes:
        source: the tensor itself.
        base: its base, or None.
        encoding: its plan.
    """

    base: TensorSource | None
    encoding: TensorPlan

    @property
    def n_codes(self) -> int | None:
        quant_map = self.encoding.plan.quant_map
        return None if quant_map is None else quant_map.n_codes

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.patterns_and_codes(begin, end)[0]

    def patterns_and_codes(self, begin: int, end: int) -> Quantized:
        return restored_chunk(self.source, self.encoding, ChunkSources(begin, end, self.base))
