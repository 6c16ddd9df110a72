"""Published methods of storing training states, re-implemented from their papers for comparison with ckptz.

Each rival stores a state of arrays, if it stores differences with the last restored state as the base, and
returns the number of bytes and the restored arrays. Byte streams are compressed by LZMA, as ExCP uses 7-Zip;
for papers that use Huffman coding, LZMA is an advantage. ckptz does not use this code.
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
    """One stored checkpoint of a rival.

    Attributes:
        weight_bytes: bytes of the weights, including vectors and integers.
        moment_bytes: bytes of all other tensors, mainly the optimizer's.
        restored: arrays that a reader gets, by name.
    """

    weight_bytes: int
    moment_bytes: int
    restored: dict[str, Array]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.weight_bytes + self.moment_bytes


class Rival(Protocol):
    """A method that stores the checkpoints of a run in order."""

    @property
    def name(self) -> str: ...

    def store(self, state: Arrays, before: Arrays | None) -> Stored:
        """Store a checkpoint; `before` has the restored arrays of the previous checkpoint, if any."""
        ...


def packed(values: Array) -> int:
    """Return the bytes of an array after LZMA."""
    return len(lzma.compress(np.ascontiguousarray(values).tobytes(), preset=LZMA_PRESET))


def parameters_of(state: Arrays) -> list[str]:
    """Return the names of the parameters without prefix."""
    prefix = WEIGHT.format("")
    return [name.removeprefix(prefix) for name in state if name.startswith(prefix)]


def is_matrix(tensor: Array) -> bool:
    """Return whether a tensor is a float matrix; all rivals store other tensors without loss."""
    return tensor.ndim > 1 and tensor.dtype.kind == "f"


class _Ledger:
    """Sums the bytes of weights and of moments, and collects the restored tensors."""

    def __init__(self) -> None:
        self.restored: dict[str, Array] = {}
        self._bytes = {True: 0, False: 0}

    def add(self, name: str, restored: Array, n_bytes: int) -> None:
        """Add a restored tensor and its bytes."""
        self.restored[name] = restored
        self._bytes[name.startswith(WEIGHT.format(""))] += n_bytes

    def keep(self, name: str, tensor: Array) -> None:
        """Add a tensor that is stored without loss."""
        self.add(name, tensor, packed(tensor))

    def finish(self, state: Arrays) -> Stored:
        """Store all tensors that were not added without loss, and return the checkpoint."""
        for name in state:
            if name not in self.restored:
                self.keep(name, state[name])
        return Stored(self._bytes[True], self._bytes[False], self.restored)


# --- ExCP, arXiv 2406.11257 ---------------------------------------------------------------------

EXCP_LEVELS: Final = 15  # and zero, so four bits per code
EXCP_WEIGHT_SCALE, EXCP_WEIGHT_CAP = 5e-5, 2.5
EXCP_MOMENT_SCALE: Final = 2.0
LLOYD_ROUNDS: Final = 30


@dataclass(frozen=True, slots=True)
class ExCP:
    """Joint pruning of residuals and moments, then 15 centroids and zero, two codes per byte.

    Residuals to the last restored weights are pruned below min(2.5, 5e-5 / sqrt(mean(exp_avg_sq))) times
    their median magnitude. Moments are kept where the residual is kept and |exp_avg| exceeds twice its mean.
    The first checkpoint is stored without loss, as in the published code.
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
    """Quantize the kept elements to centroids, set the others to zero; return the tensor and its bytes."""
    values = tensor[is_kept]
    codes = np.zeros(tensor.shape, np.uint8)
    centroids = lloyd(values, EXCP_LEVELS)
    codes[is_kept] = 1 + nearest(values, centroids)
    table = np.concatenate([np.zeros(1, np.float32), centroids.astype(np.float32)])
    flat = np.append(codes.ravel(), np.zeros(codes.size % 2, np.uint8))
    return table[codes], packed(flat[::2] | flat[1::2] << 4) + 2 * EXCP_LEVELS


def lloyd(values: Floats, n_levels: int) -> NDArray[np.float64]:
    """Return ascending centroids of one-dimensional k-means (Lloyd's algorithm, initialized at quantiles)."""
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
    """Return the index of the nearest centroid of each value."""
    return np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values).astype(np.uint8)


# --- eight bits in blocks -----------------------------------------------------------------------

BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """8 bits per element and a scale per block; of second moments the roots, positive ones never to zero."""

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
    max_code = 255 if is_second else 127
    scales = np.maximum(np.abs(blocks).max(axis=1, keepdims=True) / max_code, np.float32(1e-30))
    codes = np.rint(blocks / scales)
    if is_second:
        codes = np.where(blocks > 0, np.maximum(codes, 1), codes)  # zero would cause a huge next update
    restored = (codes * scales).ravel()[: len(flat)].reshape(tensor.shape).astype(np.float32)
    n_bytes = packed(codes.astype(np.uint8 if is_second else np.int8)) + scales.nbytes
    return np.square(restored) if is_second else restored, n_bytes
