"""Other ways to store training states, re-implemented from their papers, to compare ckptz with.

Every rival takes a state of arrays and, where it stores differences, what it restored last; it returns real
bytes and what a reader would get. Byte streams go through LZMA, as ExCP sends its own through 7-Zip; where
a paper codes by Huffman, that only helps it. None of this is part of ckptz.
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]
Arrays = Mapping[str, Array]

WEIGHT, FIRST, SECOND = "model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq"
LZMA_PRESET: Final = 6


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpoint of a rival.

    Attributes:
        weight_bytes: of the weights; float tensors of one dimension and integers included.
        moment_bytes: of the optimizer's tensors.
        restored: by name.
    """

    weight_bytes: int
    moment_bytes: int
    restored: dict[str, Array]

    @property
    def n_bytes(self) -> int:
        """Of the whole state."""
        return self.weight_bytes + self.moment_bytes


class Rival(Protocol):
    """A way to store a run's checkpoints one after another."""

    @property
    def name(self) -> str: ...

    def store(self, state: Arrays, before: Arrays | None) -> Stored:
        """One checkpoint, against what was restored of the one before it."""
        ...


def packed(values: Array) -> int:
    """Bytes of an array through LZMA."""
    return len(lzma.compress(np.ascontiguousarray(values).tobytes(), preset=LZMA_PRESET))


def parameters_of(state: Arrays) -> list[str]:
    """Names of parameters, without a prefix."""
    prefix = WEIGHT.format("")
    return [name.removeprefix(prefix) for name in state if name.startswith(prefix)]


def is_matrix(tensor: Array) -> bool:
    """Whether a tensor is worth a codebook; all rivals keep others as they are."""
    return tensor.ndim > 1 and tensor.dtype.kind == "f"


class _Ledger:
    """Adds up what is stored, by kind, and collects what is restored."""

    def __init__(self) -> None:
        self.restored: dict[str, Array] = {}
        self._bytes = {True: 0, False: 0}

    def add(self, name: str, restored: Array, n_bytes: int) -> None:
        """One tensor."""
        self.restored[name] = restored
        self._bytes[name.startswith(WEIGHT.format(""))] += n_bytes

    def keep(self, name: str, tensor: Array) -> None:
        """One tensor as it is."""
        self.add(name, tensor, packed(tensor))

    def finish(self, state: Arrays) -> Stored:
        """Everything; what was not mentioned is kept as it is."""
        for name in state:
            if name not in self.restored:
                self.keep(name, state[name])
        return Stored(self._bytes[True], self._bytes[False], self.restored)


# --- ExCP, arXiv 2406.11257 ---------------------------------------------------------------------

EXCP_LEVELS: Final = 15  # beside zero: four bits a code
EXCP_WEIGHT_SCALE, EXCP_WEIGHT_CAP = 5e-5, 2.5
EXCP_MOMENT_SCALE: Final = 2.0
LLOYD_ROUNDS: Final = 30


@dataclass(frozen=True, slots=True)
class ExCP:
    """Residuals and moments pruned together, 15 centroids and zero, two codes a byte.

    A residual to the last restored weights is pruned below min(2.5, 5e-5 / sqrt(mean(exp_avg_sq))) times the
    median of its magnitudes; moments are kept where the residual is and |exp_avg| exceeds twice its mean. The
    first checkpoint is kept whole, as in the published code.
    """

    name: str = "ExCP's rule"

    def store(self, state: Arrays, before: Arrays | None) -> Stored:
        """See `Rival.store`."""
        ledger = _Ledger()
        for parameter in parameters_of(state) if before is not None else ():
            names = [pattern.format(parameter) for pattern in (WEIGHT, FIRST, SECOND)]
            if before is None or not is_matrix(state[names[0]]) or names[2] not in state:
                continue
            weight, first, second = (state[name] for name in names)
            base = before[names[0]]
            residual = weight - base
            factor = min(EXCP_WEIGHT_CAP, EXCP_WEIGHT_SCALE / max(float(np.sqrt(second.mean())), 1e-30))
            is_kept = np.abs(residual) > factor * np.median(np.abs(residual))
            has_moments = is_kept & (np.abs(first) > EXCP_MOMENT_SCALE * np.abs(first).mean())
            restored, n_bytes = _clustered(residual, is_kept)
            ledger.add(names[0], base + restored, n_bytes)
            for name, tensor in zip(names[1:], (first, second), strict=True):
                ledger.add(name, *_clustered(tensor, has_moments))
        return ledger.finish(state)


def _clustered(tensor: Floats, is_kept: NDArray[np.bool_]) -> tuple[Floats, int]:
    """The tensor by centroids where it is kept and zero elsewhere, and the bytes of its codes."""
    values = tensor[is_kept]
    codes = np.zeros(tensor.shape, np.uint8)
    centroids = lloyd(values, EXCP_LEVELS)
    codes[is_kept] = 1 + nearest(values, centroids)
    table = np.concatenate([np.zeros(1, np.float32), centroids.astype(np.float32)])
    flat = np.append(codes.ravel(), np.zeros(codes.size % 2, np.uint8))
    return table[codes], packed(flat[::2] | flat[1::2] << 4) + 2 * EXCP_LEVELS


def lloyd(values: Floats, n_levels: int) -> NDArray[np.float64]:
    """Centroids of one-dimensional k-means, ascending, begun at quantiles."""
    if not len(values):
        return np.zeros(1)
    ordered = np.sort(values.astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centroids = np.unique(np.quantile(ordered, (np.arange(n_levels) + 0.5) / n_levels))
    for _ in range(LLOYD_ROUNDS):
        cuts = np.searchsorted(ordered, (centroids[1:] + centroids[:-1]) / 2)
        edges = np.concatenate([[0], cuts, [len(ordered)]])
        counts = np.diff(edges)
        means = np.diff(sums[edges]) / np.maximum(counts, 1)
        centroids = np.where(counts > 0, means, centroids)
    return centroids


def nearest(values: Floats, centroids: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Index of the nearest centroid."""
    return np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values).astype(np.uint8)


# --- eight bits in blocks -----------------------------------------------------------------------

BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """Every tensor in 8 bits with a scale for each block; second moments by their roots, never zero."""

    name: str = "int8 blocks"

    def store(self, state: Arrays, before: Arrays | None) -> Stored:
        """See `Rival.store`."""
        del before
        ledger = _Ledger()
        for name, tensor in state.items():
            if is_matrix(tensor):
                ledger.add(name, *_in_blocks(tensor, is_second=name.endswith("_sq")))
        return ledger.finish(state)


def _in_blocks(tensor: Floats, *, is_second: bool) -> tuple[Floats, int]:
    flat = np.sqrt(tensor.ravel()) if is_second else tensor.ravel()
    blocks = np.append(flat, np.zeros(-len(flat) % BLOCK, np.float32)).reshape(-1, BLOCK)
    most = 255 if is_second else 127
    scales = np.maximum(np.abs(blocks).max(axis=1, keepdims=True) / most, np.float32(1e-30))
    codes = np.rint(blocks / scales)
    if is_second:
        codes = np.where(blocks > 0, np.maximum(codes, 1), codes)  # a zero would make the next step explode
    restored = (codes * scales).ravel()[: len(flat)].reshape(tensor.shape).astype(np.float32)
    n_bytes = packed(codes.astype(np.uint8 if is_second else np.int8)) + scales.nbytes
    return np.square(restored) if is_second else restored, n_bytes
