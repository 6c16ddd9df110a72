"""Everything one end of a link remembers: slots, sample buffers, positions to reuse.

Implements spec/08-wire.md#state. Knows nothing of messages; `endpoint.py` asks it before and after each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import ConfigError, WireError
from ckptz.kernels import wire as compiled
from ckptz.wire.codecs import KINDS, RAW, TensorPlan
from ckptz.wire.feedback import MEMORIES, TWO_SIDED, Memory, PerSample, SampleBuffers
from ckptz.wire.header import Direction
from ckptz.wire.policy import LinkPolicy

Array = Any
End = Literal["tx", "rx"]
NOTHING: Final = Memory()
ENTRY: Final = re.compile(  # spec/08-wire.md#names-in-a-checkpoint, behind the prefix of the link
    r"(?P<direction>forward|backward)/(?P<tensor>\d{1,9})/"
    r"(level|samples/(?P<end>[tr]x)/(?P<samples>ids|rows)"
    r"|(?P<microbatch>\d{1,9})/(?P<slot_end>[tr]x)/(?P<slot>seq|state))",
    re.ASCII,
)
SENDERS: Final = Memory()  # the receiver's side of a direction whose state is the sender's alone


@dataclass(frozen=True, slots=True)
class Place:
    """Step, microbatch and tensor of a message."""

    step: int  # training steps before this one; evaluations before it if `is_eval`
    microbatch: int = 0  # index within the step
    tensor: int = 0  # index among the tensors of the cut
    sample_ids: NDArray[np.int64] | None = None  # of the microbatch, for AQ-SGD
    is_eval: bool = False  # whether no gradient comes back
    is_raw: bool = False  # whether both ends agreed to send this message raw


@dataclass(frozen=True, slots=True)
class Kept:
    """Positions of an activation, for its gradient."""

    packed: Array | None  # the mask as a bitmap, or None where the activation was sent without positions
    step: int  # of the activation
    shape: tuple[int, ...]  # of the activation
    k: int  # positions of each sample


@dataclass
class Slot:
    """State of one microbatch: its counter and what it remembers."""

    seq: int = 0
    memory: Any = None  # a Memory with an `array`
    shape: tuple[int, ...] = ()


class LinkState:
    """State of one end of a link, keyed by direction, tensor and slot.

    Args:
        name: "src-dst", the link's part of every name in a state dict.
        policy: of the link.
        kernels: a kernel module of the wire, or None for the compiled ones.
        like: an array where the state is to live.
        samples: file and number of samples of AQ-SGD's buffers; in memory by default.
    """

    def __init__(
        self, name: str, policy: LinkPolicy, kernels: Any, like: Array, samples: tuple[Path, int] | None
    ) -> None:
        self._prefix, self._policy, self._like, self._samples = f"wire/{name}/", policy, like, samples
        self._kernels = kernels
        self._slots: dict[tuple[str, Direction, int, int], Slot] = {}
        self._buffers: dict[tuple[str, int], SampleBuffers] = {}
        self.masks: dict[tuple[int, int], Kept] = {}

    @property
    def kernels(self) -> Any:
        """The kernel module of the arrays on this link."""
        return self._kernels or compiled()

    def slot(self, end: End, direction: Direction, place: Place) -> Slot:
        """Give the state of a microbatch."""
        return self._slots.setdefault((end, direction, place.tensor, place.microbatch), Slot())

    def seq(self, end: End, direction: Direction, place: Place) -> int:
        """Count the messages of this slot so far; evaluations are not counted."""
        return 0 if place.is_eval else self.slot(end, direction, place).seq & 0xFFFFFFFF

    def count(self, end: End, direction: Direction, place: Place) -> None:
        """Count one message more."""
        self.slot(end, direction, place).seq += not place.is_eval

    def memory(
        self, end: End, direction: Direction, plan: TensorPlan, place: Place
    ) -> tuple[Memory, TensorPlan]:
        """Find the state that a message goes through, and its plan: raw where the state is to be filled."""
        kind = self._policy.feedback_of(direction)
        if kind is None or place.is_eval or plan.dtype.name not in KINDS:
            return NOTHING, plan
        if self._policy.plan(direction, plan.dtype, plan.shape).codec == RAW:
            return NOTHING, plan
        if end == "rx" and kind not in TWO_SIDED:
            return SENDERS, plan
        if kind == "aqsgd":
            return self._per_sample(end, plan, place)
        if kind not in MEMORIES:
            raise ConfigError(f"{kind} is received, and sent by bench/studies/paper_b alone; use ef or ef21")
        slot = self.slot(end, direction, place)
        if slot.memory is None or slot.shape != plan.shape:
            slot.memory = MEMORIES[kind](self.kernels.zeros(plan.n, 4, self._like), self._policy)
            slot.shape = plan.shape
        return slot.memory, plan

    def _per_sample(self, end: End, plan: TensorPlan, place: Place) -> tuple[Memory, TensorPlan]:
        ids = place.sample_ids
        if ids is None or len(ids) != plan.n_samples:
            n = "none" if ids is None else len(ids)
            raise ConfigError(f"aqsgd needs the ids of {plan.n_samples} samples for each microbatch, got {n}")
        buffers = self._sample_buffers(end, place.tensor, plan.n // plan.n_samples)
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
            raise WireError(f"samples: {size} elements each, and those before had {buffers.size}")
        return buffers

    def keep_mask(self, plan: TensorPlan, place: Place, mask: Array | None) -> None:
        """Remember the positions of an activation for its gradient, as a bitmap."""
        if self._policy.reuse and not place.is_eval:
            packed, k = (None, 0) if mask is None else (self.kernels.pack(mask, 1), plan.k)
            self.masks[place.microbatch, place.tensor] = Kept(packed, place.step, plan.shape, k)

    def _kept(self, place: Place) -> Kept | None:
        """Give the mask that the activation of this step and microbatch left, or None."""
        kept = self.masks.get((place.microbatch, place.tensor))
        return kept if kept is not None and kept.step == place.step else None

    def lacks_mask(self, place: Place) -> bool:
        """Tell whether the activation of this microbatch was sent raw, so that its gradient is raw too."""
        kept = self._kept(place)
        return kept is not None and kept.packed is None

    def take_mask(self, plan: TensorPlan, place: Place) -> Array:
        """Take the positions of the activation of this microbatch, once.

        Raises:
            WireError: there was none, or it had another shape than the gradient.
        """
        kept = self._kept(place)
        if kept is None or kept.packed is None:
            raise WireError("positions: no activation of this microbatch was on this link")
        if (kept.shape, kept.k) != (plan.shape, plan.k):
            raise WireError(
                f"positions: {plan.k} of each sample of a gradient of shape {list(plan.shape)}, and "
                f"{kept.k} of an activation of shape {list(kept.shape)}; send the gradient of the activation"
            )
        del self.masks[place.microbatch, place.tensor]
        return self.kernels.unpack(kept.packed, 1, plan.n)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Give everything that a resumed link needs, as named arrays [n]; F32 patterns as uint32."""
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
        """Take over what `state_dict` gave; entries of other links are left alone.

        Raises:
            WireError: the state lacks an entry, or one is not what this link would have saved.
        """
        for held in (self._slots, self._buffers, self.masks):
            held.clear()
        for name in sorted(state):
            if name.startswith(self._prefix):
                self._load_entry(state, name, name.removeprefix(self._prefix))

    def _load_entry(self, state: Mapping[str, Any], name: str, path: str) -> None:
        found = ENTRY.fullmatch(path)
        if found is None:
            raise WireError(f"wire state: {name} is no entry of a link; start the link without it")
        direction, tensor = Direction[found["direction"].upper()], int(found["tensor"])
        if found["samples"] == "ids":
            self._load_samples(state, name, found["end"], tensor)
        elif found["slot"] == "seq":
            slot = self._loaded(state, name, direction)
            self._slots[found["slot_end"], direction, tensor, int(found["microbatch"])] = slot

    def _load_samples(self, state: Mapping[str, Any], name: str, end: str, tensor: int) -> None:
        ids, rows = _entry(state, name), _entry(state, name.removesuffix("ids") + "rows")
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or rows.shape[:1] != ids.shape or rows.ndim != 2:
            raise _misfit(name, f"ids {_title(ids)} and rows {_title(rows)}")
        if rows.dtype.itemsize != 4:
            raise _misfit(name, f"rows {_title(rows)}, not F32 patterns")
        self._sample_buffers(end, tensor, rows.shape[1]).write(ids.astype(np.int64), rows.view(np.uint32))

    def _loaded(self, state: Mapping[str, Any], name: str, direction: Direction) -> Slot:
        found = _entry(state, name)
        if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found) or (found < 0).any():
            raise _misfit(name, f"{_title(found)}, not a counter and a shape")
        seq, *shape = found.tolist()
        slot, kind = Slot(seq, shape=tuple(shape)), self._policy.feedback_of(direction)
        if shape and kind in MEMORIES:
            patterns = _entry(state, name.removesuffix("seq") + "state")
            if patterns.dtype.itemsize != 4 or patterns.size != math.prod(shape):
                raise _misfit(name, f"a state {_title(patterns)} of shape {shape}")
            as_bytes = np.ascontiguousarray(patterns).reshape(-1).view(np.uint8)
            array = self.kernels.as_units(self.kernels.from_bytes(as_bytes.copy(), self._like), 4)
            slot.memory = MEMORIES[kind](array, self._policy)
        return slot


def _entry(state: Mapping[str, Any], name: str) -> NDArray[Any]:
    if name not in state:
        raise WireError(f"wire state lacks {name}: it is incomplete; start the link without it")
    return np.asarray(state[name])


def _title(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _misfit(name: str, what: str) -> WireError:
    return WireError(f"wire state: {name} holds {what}; start the link without it")
