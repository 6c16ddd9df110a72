"""What a direction of a link remembers between messages. Implements spec/08-wire.md#state.

Each kind answers three questions: what is encoded, what the receiver takes for the tensor, what is kept.
Arrays are F32 patterns of one of the wire's kernel modules.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import ConfigError
from ckptz.wire.codecs import TensorPlan
from ckptz.wire.header import Direction
from ckptz.wire.policy import Feedback, LinkPolicy

Array = Any


class Memory:
    """The state of one slot, as senders and receivers use it; this one remembers nothing."""

    array: Array = None

    def target(self, k: Any, values: Array) -> Array:
        """Give what to encode in place of `values`, uint32 [n]."""
        del k
        return values

    def mask(self, k: Any, plan: TensorPlan, values: Array) -> Array | None:
        """Give the positions that TopK must take, or None for the greatest."""

    def received(self, k: Any, decoded: Array) -> Array:
        """Give what the receiver takes for the tensor, uint32 [n]."""
        del k
        return decoded

    def keep(self, k: Any, target: Array, decoded: Array, skip: Any, seq: int = 0) -> None:
        """Update after a message, the one after `seq` others; `skip` one that was not finite."""

    def fill(self, k: Any, values: Array) -> None:
        """Update after a raw message."""


class ErrorFeedback(Memory):
    """EF: send C(x + e), keep e = x + e - C(x + e), or an average of it. Only the sender has state."""

    def __init__(self, error: Array, policy: LinkPolicy) -> None:
        self.array, self._decay, self._reset = error, policy.ef_decay, policy.ef_reset

    def target(self, k: Any, values: Array) -> Array:
        return k.add(values, self.array)

    def keep(self, k: Any, target: Array, decoded: Array, skip: Any, seq: int = 0) -> None:
        error = k.subtract(target, decoded)
        if self._reset and (seq + 1) % self._reset == 0:
            error = k.subtract(error, error)
        elif self._decay:
            error = k.add(k.scale(self.array, self._decay), k.scale(error, 1 - self._decay))
        self.array = k.unless(skip, self.array, error)


class Following(Memory):
    """EF21: send C(x - a), both ends a += C(x - a), the receiver takes a."""

    def __init__(self, follower: Array, policy: LinkPolicy | None = None) -> None:
        del policy
        self.array = follower

    def target(self, k: Any, values: Array) -> Array:
        return k.subtract(values, self.array)

    def received(self, k: Any, decoded: Array) -> Array:
        return k.add(self.array, decoded)

    def keep(self, k: Any, target: Array, decoded: Array, skip: Any, seq: int = 0) -> None:
        del target, seq
        self.array = k.unless(skip, self.array, k.add(self.array, decoded))

    def fill(self, k: Any, values: Array) -> None:
        # A copy: the caller may write to its tensor.
        self.array = k.unless(k.not_finite(values), self.array, values + 0)


MEMORIES: dict[str, Any] = {"ef": ErrorFeedback, "ef21": Following}
TWO_SIDED = ("ef21", "aqsgd")  # the receiver has state too


class SampleBuffers:
    """AQ-SGD's last activation of each sample, in memory or in a memory-mapped file.

    Args:
        size: elements of one sample.
        path: file for the rows, made anew; None keeps them in memory.
        n_samples: greatest sample id plus one; required with a file.
    """

    def __init__(self, size: int, path: Path | None = None, n_samples: int | None = None) -> None:
        if path is not None and n_samples is None:
            raise ConfigError("sample buffers in a file need n_samples")
        self.size, self._n_samples, self._seen = size, n_samples, set[int]()
        shape = (n_samples or 0, size)
        self._rows: Any = {} if path is None else np.memmap(path, np.uint32, "w+", shape=shape)

    def has(self, ids: NDArray[np.int64]) -> bool:
        """Tell whether every sample [n] was seen before."""
        most = self._n_samples
        if most is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < most:
            raise ConfigError(f"sample ids must be 0..{most - 1}, got {ids.min()}..{ids.max()}")
        return self._seen.issuperset(ids.tolist())

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Read the rows of these samples, one after another [n, row units]."""
        return np.concatenate([np.zeros(0, np.uint32), *(self._rows[i] for i in ids.tolist())])

    def write(self, ids: NDArray[np.int64], values: NDArray[np.uint32]) -> None:
        """Replace the rows of these samples, float32 [n, row units]."""
        self.has(ids)
        for i, row in zip(ids.tolist(), values.reshape(len(ids), self.size), strict=True):
            self._rows[i] = row.copy()
            self._seen.add(i)

    def state(self) -> dict[str, NDArray[Any]]:
        """Give sample ids [n] and their rows, float32 [n, row units]."""
        ids = np.array(sorted(self._seen), np.int64)
        return {"ids": ids, "rows": self.read(ids).reshape(len(ids), self.size)}


class PerSample(Following):
    """AQ-SGD for one message: EF21 whose follower is the buffers of the message's samples."""

    def __init__(self, buffers: SampleBuffers, ids: NDArray[np.int64], like: Array, k: Any) -> None:
        self._buffers, self._ids = buffers, ids
        seen = buffers.has(ids)
        super().__init__(
            k.as_units(k.from_bytes(buffers.read(ids).view(np.uint8), like), 4) if seen else None
        )

    def keep(self, k: Any, target: Array, decoded: Array, skip: Any, seq: int = 0) -> None:
        del target, seq
        if not skip:
            self.fill(k, k.add(self.array, decoded))

    def fill(self, k: Any, values: Array) -> None:
        if not k.not_finite(values):
            self._buffers.write(self._ids, k.host_bytes(k.as_bytes(values)).view(np.uint32))


def state_bytes(
    feedback: Feedback | None, shape: tuple[int, ...], n_microbatches: int, n_samples: int = 0
) -> tuple[int, int]:
    """Count the (sender's, receiver's) bytes of state for one tensor in one direction of one link.

    EF and EF-mixed: microbatches x elements x 4 at the sender. EF21: the same at both ends. AQ-SGD:
    samples x elements of a sample x 4 at both ends.
    """
    if feedback is None:
        return 0, 0
    n, of_sample = math.prod(shape), math.prod(shape) // max(shape[0], 1)
    each = 4 * (n_samples * of_sample if feedback == "aqsgd" else n_microbatches * n)
    return each, each if feedback in TWO_SIDED else 0


def describe_memory(
    policy: LinkPolicy, shape: tuple[int, ...], n_microbatches: int, n_samples: int = 0
) -> str:
    """Tell what a tensor of this shape in each microbatch will hold at both ends, one line a direction.

    `n_samples`, of the data set, counts for AQ-SGD alone.
    """
    lines = []
    for direction in Direction:
        kind = policy.feedback_of(direction)
        sender, receiver = state_bytes(kind, shape, n_microbatches, n_samples)
        formula = f"{n_microbatches} microbatches x {math.prod(shape)} elements"
        if kind == "aqsgd":
            formula = f"{n_samples} samples x {math.prod(shape) // max(shape[0], 1)} elements"
        held = f"{kind}, {formula} x 4 bytes: {sender} bytes at the sender, {receiver} at the receiver"
        lines.append(f"{direction.word}: {'no state' if kind is None else held}")
    return "\n".join(lines)
