"""State of one end of a link between messages: slots, sample buffers, TopK positions to reuse.

Implements spec/08-wire.md#state. `endpoint.py` reads it before and updates it after each message. Each kind
of feedback defines the encoded values, the receiver's tensor, and the update of its state. Arrays are F32
patterns of one of the wire's kernel modules.
"""

from __future__ import annotations

import collections
import copy
import errno
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import ConfigError, WireError, WriteError
from ckptz.format.dtypes import DType
from ckptz.kernels import wire as compiled
from ckptz.wire.header import Direction
from ckptz.wire.policy import FLOAT_KINDS, RAW, LinkPolicy, TensorPlan

Array = Any
TWO_SIDED = ("ef21", "aqsgd")  # the receiver has state too
NO_ALLOCATION: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # file system without fallocate
ZEROS: Final = 1 << 20  # bytes per write if blocks cannot be allocated
End = Literal["tx", "rx"]  # sending and receiving end
SlotId = tuple[End, Direction, int, int]  # with tensor and microbatch
ENTRY: Final = re.compile(  # spec/08-wire.md#names-in-a-checkpoint, without the prefix of the link
    r"(?P<direction>forward|backward)/(?P<tensor>\d{1,9})/"
    r"(level|samples/(?P<end>[tr]x)/(?P<samples>ids|rows)"
    r"|(?P<microbatch>\d{1,9})/(?P<slot_end>[tr]x)/(?P<slot>seq|state))",
    re.ASCII,
)


class Memory:
    """The feedback state of one slot; the base class has none."""

    array: Array = None

    def target(self, k: Any, values: Array) -> Array:
        """Return the values to encode in place of `values`, uint32 [n]."""
        del k
        return values

    def mask(self, k: Any, plan: TensorPlan, values: Array) -> Array | None:
        """Return the positions that TopK must select, or None for the largest magnitudes."""

    def received(self, k: Any, decoded: Array) -> Array:
        """Return the receiver's tensor, uint32 [n]."""
        del k
        return decoded

    def keep(self, k: Any, target: Array, decoded: Array, skip: Any, seq: int = 0) -> None:
        """Update the state after message number `seq`, unless `skip`: a value was not finite."""

    def fill(self, k: Any, values: Array) -> None:
        """Update the state after a raw message."""


class ErrorFeedback(Memory):
    """EF: send C(x + e), keep e = x + e - C(x + e) or its moving average. Only the sender has state."""

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
    """EF21: send C(x - a); both ends add C(x - a) to a, which is the receiver's tensor."""

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
        # `+ 0` copies: the caller may write to its tensor.
        self.array = k.unless(k.not_finite(values), self.array, values + 0)


MEMORIES: dict[str, Any] = {"ef": ErrorFeedback, "ef21": Following}


def allocate(path: Path, n_bytes: int) -> None:
    """Create a file of `n_bytes` zeros with all blocks allocated.

    Writing to an unallocated block through a memory map ends the process with SIGBUS if the disk is full.

    Raises:
        WriteError: the disk is full, or the file cannot be created.
    """
    try:
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, n_bytes)
            except (AttributeError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in NO_ALLOCATION:
                    raise
                for begin in range(0, n_bytes, ZEROS):
                    file.write(bytes(min(ZEROS, n_bytes - begin)))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WriteError(
            f"{path}: cannot allocate {n_bytes} bytes for sample buffers ({error.strerror}); "
            "free disk space, or set `samples` to a path on another disk"
        ) from None


class SampleBuffers:
    """The last activation of each sample for AQ-SGD, in memory or in a memory-mapped file.

    Args:
        size: elements of one sample.
        path: file for the rows, which is overwritten; None for memory.
        n_samples: largest sample id plus one; required with a file.
    """

    def __init__(self, size: int, path: Path | None = None, n_samples: int | None = None) -> None:
        if path is not None and n_samples is None:
            raise ConfigError("sample buffers in a file need n_samples")
        self.size, self._n_samples, self._seen = size, n_samples, set[int]()
        shape = (n_samples or 0, size)
        self._rows: Any = {}
        if path is not None:
            allocate(path, 4 * math.prod(shape))
            self._rows = np.memmap(path, np.uint32, "r+", shape=shape)

    def has(self, ids: NDArray[np.int64]) -> bool:
        """Return whether there is a row for every sample id [n].

        Raises:
            ConfigError: an id is out of range.
        """
        n = self._n_samples
        if n is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n:
            raise ConfigError(f"sample ids must be 0..{n - 1}, got {ids.min()}..{ids.max()}")
        return self._seen.issuperset(ids.tolist())

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the rows of these sample ids [n], concatenated: patterns [n * size]."""
        return np.concatenate([np.zeros(0, np.uint32), *(self._rows[i] for i in ids.tolist())])

    def write(self, ids: NDArray[np.int64], values: NDArray[np.uint32]) -> None:
        """Replace the rows of these sample ids [n]; `values` are patterns [n * size]."""
        self.has(ids)
        for i, row in zip(ids.tolist(), values.reshape(len(ids), self.size), strict=True):
            self._rows[i] = row.copy()
            self._seen.add(i)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all sample ids [n] and their rows, patterns [n, size]."""
        ids = np.array(sorted(self._seen), np.int64)
        return {"ids": ids, "rows": self.read(ids).reshape(len(ids), self.size)}


class PerSample(Following):
    """AQ-SGD for one message: EF21 on the buffered rows of the message's samples."""

    def __init__(self, buffers: SampleBuffers, ids: NDArray[np.int64], like: Array, k: Any) -> None:
        self._buffers, self._ids = buffers, ids
        rows = buffers.read(ids).view(np.uint8) if buffers.has(ids) else None
        super().__init__(None if rows is None else k.as_patterns(k.from_bytes(rows, like), 4))

    def keep(self, k: Any, target: Array, decoded: Array, skip: Any, seq: int = 0) -> None:
        del target, seq
        if not skip:
            self.fill(k, k.add(self.array, decoded))

    def fill(self, k: Any, values: Array) -> None:
        if not k.not_finite(values):
            self._buffers.write(self._ids, k.host_bytes(k.as_bytes(values)).view(np.uint32))


NO_FEEDBACK: Final = Memory()
SENDER_ONLY: Final = Memory()  # for the receiver, if only the sender has state


@dataclass(frozen=True, slots=True)
class MessageKey:
    """The step, microbatch and tensor that identify a message."""

    step: int  # index of the training step, or of the evaluation if `is_eval`
    microbatch: int = 0  # index within the step
    tensor: int = 0  # index among the tensors of the cut
    sample_ids: NDArray[np.int64] | None = None  # of the microbatch, for AQ-SGD
    is_eval: bool = False  # inference: no gradient is sent back
    is_raw: bool = False  # both ends agreed to send this message uncompressed


@dataclass(frozen=True, slots=True)
class Message:
    """A message that one end of a link sends or receives."""

    end: End
    direction: Direction
    dtype: DType
    shape: tuple[int, ...]
    key: MessageKey

    @property
    def slot(self) -> SlotId:
        """The slot of the link's state that the message belongs to."""
        return self.end, self.direction, self.key.tensor, self.key.microbatch


@dataclass(frozen=True, slots=True)
class Positions:
    """TopK positions of an activation, which its gradient reuses."""

    packed: Array | None  # bitmap, or None if the activation was sent raw
    step: int  # of the activation
    shape: tuple[int, ...]  # of the activation
    k: int  # positions per sample


@dataclass
class Slot:
    """The message counter and the feedback state of one microbatch."""

    seq: int = 0
    memory: Any = None  # Memory with an `array`, or None
    shape: tuple[int, ...] = ()


class LinkState:
    """State of one end of a link, by direction, tensor and microbatch.

    Args:
        name: "src-dst", part of every name in a state dict.
        policy: policy of the link.
        kernels: a kernel module of the wire, or None for the compiled kernels.
        like: an array on the device where the state is allocated.
        samples: file and number of samples of AQ-SGD's buffers; by default they are in memory.
    """

    def __init__(
        self, name: str, policy: LinkPolicy, kernels: Any, like: Array, samples: tuple[Path, int] | None
    ) -> None:
        self._prefix, self._policy, self._like, self._samples = f"wire/{name}/", policy, like, samples
        self._kernels = kernels
        self._slots: dict[Any, Slot] = collections.defaultdict(Slot)  # by `SlotId`
        self._buffers: dict[tuple[str, int], SampleBuffers] = {}
        self.masks: dict[tuple[int, int], Positions] = {}

    @property
    def kernels(self) -> Any:
        """The kernel module for the arrays of this link."""
        return self._kernels or compiled()

    def seq(self, message: Message) -> int:
        """Return the number of earlier messages of a slot, without evaluations."""
        return 0 if message.key.is_eval else self._slots[message.slot].seq & 0xFFFFFFFF

    def count(self, message: Message, plan: TensorPlan, mask: Array | None) -> None:
        """Count a message, and keep the positions of an activation if its gradient reuses them.

        Evaluations are not counted. `mask` [n] has the positions that TopK sent.
        """
        key = message.key
        if key.is_eval:
            return
        if self._policy.reuse and message.direction is Direction.FORWARD:
            packed, k = (None, 0) if mask is None else (self.kernels.pack(mask, 1), plan.k)
            self.masks[key.microbatch, key.tensor] = Positions(packed, key.step, plan.shape, k)
        self._slots[message.slot].seq += 1

    def snapshot(self, message: Message) -> tuple[Slot, dict[tuple[int, int], Positions]]:
        """Copy references to the state that a message may change, except rows of sample buffers."""
        slot = self._slots[message.slot]
        return Slot(slot.seq, copy.copy(slot.memory), slot.shape), self.masks.copy()

    def roll_back(self, message: Message, before: tuple[Slot, dict[tuple[int, int], Positions]]) -> None:
        """Restore a snapshot; messages replace arrays and never write to them."""
        self._slots[message.slot], self.masks = before

    def memory(self, message: Message, plan: TensorPlan) -> tuple[Memory, TensorPlan]:
        """Return the feedback state for a message, and its plan, which is raw to fill empty buffers.

        Raises:
            ConfigError: AQ-SGD without matching sample ids, or a feedback that cannot be sent.
        """
        kind = self._policy.feedback_of(message.direction)
        if kind is None or message.key.is_eval or plan.dtype.name not in FLOAT_KINDS:
            return NO_FEEDBACK, plan
        if self._policy.plan(message.direction, plan.dtype, plan.shape).codec == RAW:
            return NO_FEEDBACK, plan
        if message.end == "rx" and kind not in TWO_SIDED:
            return SENDER_ONLY, plan
        if kind == "aqsgd":
            return self._per_sample(message, plan)
        if kind not in MEMORIES:
            raise ConfigError(f"{kind} can only be received; send with ef or ef21")
        slot = self._slots[message.slot]
        if slot.memory is None or slot.shape != plan.shape:
            slot.memory = MEMORIES[kind](self.kernels.zeros(plan.n, 4, self._like), self._policy)
            slot.shape = plan.shape
        return slot.memory, plan

    def _per_sample(self, message: Message, plan: TensorPlan) -> tuple[Memory, TensorPlan]:
        ids = message.key.sample_ids
        if ids is None or len(ids) != plan.n_samples:
            n = "none" if ids is None else len(ids)
            raise ConfigError(f"aqsgd needs the ids of {plan.n_samples} samples for each microbatch, got {n}")
        buffers = self._sample_buffers(message.end, message.key.tensor, plan.n // plan.n_samples)
        if not buffers.has(ids):
            plan = self._policy.plan(Direction.FORWARD, plan.dtype, plan.shape, raw=True)
        return PerSample(buffers, ids, self._like, self.kernels), plan

    def _sample_buffers(self, end: str, tensor: int, size: int) -> SampleBuffers:
        if (end, tensor) not in self._buffers:
            path, n_samples = self._samples or (None, None)
            if path is not None:
                path = path.with_name(f"{path.name}.{self._prefix.split('/')[1]}.{tensor}.{end}")
            self._buffers[end, tensor] = SampleBuffers(size, path, n_samples)
        buffers = self._buffers[end, tensor]
        if buffers.size != size:
            raise WireError(f"samples: {size} elements each, but earlier ones had {buffers.size}")
        return buffers

    def _positions(self, key: MessageKey) -> Positions | None:
        """Return the positions of the activation of this step and microbatch, or None."""
        positions = self.masks.get((key.microbatch, key.tensor))
        return positions if positions is not None and positions.step == key.step else None

    def lacks_mask(self, key: MessageKey) -> bool:
        """Return whether the activation of this microbatch was sent raw, so that its gradient is raw too."""
        positions = self._positions(key)
        return positions is not None and positions.packed is None

    def pop_mask(self, plan: TensorPlan, key: MessageKey) -> Array:
        """Remove and return the mask [n] of the activation of this microbatch.

        Raises:
            WireError: there was no activation, or its shape differs from the gradient's.
        """
        positions = self._positions(key)
        if positions is None or positions.packed is None:
            raise WireError("positions: no activation of this microbatch was on this link")
        if (positions.shape, positions.k) != (plan.shape, plan.k):
            raise WireError(
                f"positions: the gradient has shape {list(plan.shape)} with {plan.k} values per sample, the "
                f"activation {list(positions.shape)} with {positions.k}; send the gradient of the activation"
            )
        del self.masks[key.microbatch, key.tensor]
        return self.kernels.unpack(positions.packed, 1, plan.n)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the state of the link as numpy arrays by name; F32 patterns [n] as uint32."""
        k, out = self.kernels, {}
        for (end, direction, tensor, microbatch), slot in self._slots.items():
            name = f"{self._prefix}{direction.word}/{tensor}/{microbatch}/{end}"
            out[f"{name}/seq"] = np.array([slot.seq, *slot.shape], np.int64)
            if slot.memory is not None:
                out[f"{name}/state"] = k.host_bytes(k.as_bytes(slot.memory.array)).view(np.uint32).copy()
        for (end, tensor), buffers in self._buffers.items():
            for part, array in buffers.state().items():
                out[f"{self._prefix}forward/{tensor}/samples/{end}/{part}"] = array
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; entries of other links are ignored.

        Raises:
            WireError: an entry is missing or does not fit this link.
        """
        for entries in (self._slots, self._buffers, self.masks):
            entries.clear()
        for name in sorted(state):
            if name.startswith(self._prefix):
                self._load_entry(state, name, name.removeprefix(self._prefix))

    def _load_entry(self, state: Mapping[str, Any], name: str, path: str) -> None:
        match = ENTRY.fullmatch(path)
        if match is None:
            raise WireError(f"wire state: unknown entry {name}; start the link without this state")
        direction, tensor = Direction[match["direction"].upper()], int(match["tensor"])
        if match["samples"] == "ids":
            self._load_samples(state, name, match["end"], tensor)
        elif match["slot"] == "seq":
            slot = self._load_slot(state, name, direction)
            self._slots[match["slot_end"], direction, tensor, int(match["microbatch"])] = slot

    def _load_samples(self, state: Mapping[str, Any], name: str, end: str, tensor: int) -> None:
        ids, rows = _entry(state, name), _entry(state, name.removesuffix("ids") + "rows")
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or rows.shape[:1] != ids.shape or rows.ndim != 2:
            raise _misfit(name, f"ids {_title(ids)} and rows {_title(rows)}")
        if rows.dtype.itemsize != 4:
            raise _misfit(name, f"rows {_title(rows)}, not F32 patterns")
        self._sample_buffers(end, tensor, rows.shape[1]).write(ids.astype(np.int64), rows.view(np.uint32))

    def _load_slot(self, state: Mapping[str, Any], name: str, direction: Direction) -> Slot:
        values = _entry(state, name)
        if values.ndim != 1 or values.dtype.kind not in "iu" or not len(values) or (values < 0).any():
            raise _misfit(name, f"{_title(values)}, not a counter and a shape")
        seq, *shape = values.tolist()
        slot, kind = Slot(seq, shape=tuple(shape)), self._policy.feedback_of(direction)
        if shape and kind in MEMORIES:
            patterns = _entry(state, name.removesuffix("seq") + "state")
            if patterns.dtype.itemsize != 4 or patterns.size != math.prod(shape):
                raise _misfit(name, f"a state {_title(patterns)} of shape {shape}")
            as_bytes = np.ascontiguousarray(patterns).reshape(-1).view(np.uint8)
            array = self.kernels.as_patterns(self.kernels.from_bytes(as_bytes.copy(), self._like), 4)
            slot.memory = MEMORIES[kind](array, self._policy)
        return slot


def _entry(state: Mapping[str, Any], name: str) -> NDArray[Any]:
    if name not in state:
        raise WireError(f"wire state lacks {name}; start the link without this state")
    return np.asarray(state[name])


def _title(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _misfit(name: str, content: str) -> WireError:
    return WireError(f"wire state: {name} holds {content}; start the link without this state")
