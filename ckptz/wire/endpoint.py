"""One end of a link: tensors to messages and back. Implements spec/08-wire.md#header.

Both ends run the same code on the same policy; what the sender believes that the receiver has, and what
the receiver has, are equal to the bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CkptzError, ConfigError, WireError, WriteError, check_int
from ckptz.format.bits import xxh64
from ckptz.format.dtypes import DType
from ckptz.kernels import floats
from ckptz.kernels.wire_arrays import STEP_64, mix_64
from ckptz.wire.header import HEADER_BYTES, MASK_64, Direction, Flag, LinkHeader
from ckptz.wire.payload import Check, Payload, Truth, at_once, decode_payload, encode_payload
from ckptz.wire.policy import KINDS, RAW, LinkPolicy, TensorPlan, policy_of
from ckptz.wire.state import NOTHING, End, LinkState, Memory, MessageKey

Array = Any
NOT_FINITE = Flag.NOT_FINITE << 56  # the flag in the first word of a header
MOST_FOUND = 1 << 14  # checks that wait on a device before they are looked at without being asked
FREE = ("payload_bytes", "checksum", "mode")  # header fields that the receiver cannot know before


@dataclass(frozen=True, slots=True)
class Sent:
    """A message, and what makes the tensor that the other end decodes from it."""

    message: Array
    decode: Callable[[], Array]


@dataclass(frozen=True, slots=True)
class _Message:
    """A tensor on its way: where it goes, its type, and which message it is."""

    direction: Direction
    dtype: DType
    shape: tuple[int, ...]
    place: MessageKey


class Link:
    """One end of the link between two stages, or both in one process for `simulate`.

    Args:
        src: stage that sends activations.
        dst: stage that receives them.
        policy: what both ends agreed on, or the name of a preset.
        kernels: one of the wire's kernel modules; the compiled ones by default.
        like: an array of these kernels, where state is to live.
        fixed: every message takes exactly the cap of its plan, for transports that need it.
        verify: "message" looks at each header and checksum as it comes; "step" compares them on the device,
            makes NaN of what is wrong, and leaves it to `check` to say so. That needs torch's kernels,
            `fixed`, and no AQ-SGD.
        same_shape: refuse a tensor whose shape differs from the first one's.
        samples: file and number of samples of AQ-SGD's buffers; in memory by default.
    """

    def __init__(
        self,
        src: int,
        dst: int,
        policy: LinkPolicy | str,
        *,
        kernels: Any = None,
        like: Array = None,
        fixed: bool = False,
        verify: Literal["message", "step"] = "message",
        same_shape: bool = True,
        samples: tuple[Path, int] | None = None,
    ) -> None:
        src, dst = check_int("src", src, 0, (1 << 16) - 1), check_int("dst", dst, 0, (1 << 16) - 1)
        self.src, self.dst, self.policy = src, dst, policy_of(policy)
        like = np.zeros(0, np.uint8) if like is None else like
        self.state = LinkState(f"{src}-{dst}", self.policy, kernels, like, samples)
        self._fixed, self._same_shape, self._verify = fixed, same_shape, verify
        self._found: list[tuple[Truth, str]] = []
        self._torn = ""  # name of the message whose change of the state has begun and not ended
        if verify == "step" and not can_wait(self.policy, fixed):
            raise ConfigError("verify='step' needs messages of fixed size, without aqsgd")
        self._simulated: dict[tuple[Direction, int, int], int] = {}  # the last step of each slot
        self._shapes: dict[tuple[Direction, int], tuple[str, tuple[int, ...]]] = {}
        self.sent_bytes = dict.fromkeys(Direction, 0)
        self.raw_bytes = dict.fromkeys(Direction, 0)

    def send(
        self, direction: Direction, patterns: Array, dtype: DType, shape: tuple[int, ...], place: MessageKey
    ) -> Sent:
        """Encode one tensor, given by its flat bit patterns.

        Raises:
            ConfigError: the patterns are not a tensor of this type and shape.
            WireError: the shape changed, or the positions to reuse are not there.
        """
        tensor = _Message(direction, dtype, tuple(shape), place)
        return self._guarded("tx", tensor, lambda: self._send(tensor, patterns))

    def _send(self, tensor: _Message, patterns: Array) -> Sent:
        direction, dtype, place, k = tensor.direction, tensor.dtype, tensor.place, self.state.kernels
        due = self.message_cap(direction, dtype, tensor.shape, place, "tx") if self._fixed else 0
        received, header, frame = self._encode(tensor, patterns)
        payload = k.concat(frame.parts)
        words = k.words(dataclasses.replace(header, payload_bytes=len(payload)).pack(), payload)
        words[0] |= k.truth(frame.not_finite) * NOT_FINITE
        words[6] = k.checksum(payload)
        words[7] = k.checksum(k.as_bytes(words[:7]))
        rest = k.zeros(max(due - HEADER_BYTES - len(payload), 0), 1, payload)
        message = k.concat([k.as_bytes(words), payload, rest])
        self.sent_bytes[direction] += len(message)
        return Sent(message, received)

    def simulate(
        self,
        direction: Direction,
        patterns: Array,
        dtype: DType,
        shape: tuple[int, ...],
        place: MessageKey,
        *,
        is_repeated: bool = False,
    ) -> Array:
        """Return the tensor that `send` would deliver without building the message; count its bytes.

        Args:
            direction, patterns, dtype, shape, place: as for `send`.
            is_repeated: the last place may be simulated again, as by a second backward pass of one graph.

        Raises:
            WireError: the place was the last one, too: an interrupt may have lost the result, and no receiver
                is there to notice that its message was counted.
        """
        tensor = _Message(direction, dtype, tuple(shape), place)
        return self._guarded("tx", tensor, lambda: self._simulate(tensor, patterns, is_repeated))

    def _simulate(self, tensor: _Message, patterns: Array, is_repeated: bool) -> Array:
        direction, place = tensor.direction, tensor.place
        slot = direction, place.tensor, place.microbatch
        if not (place.is_eval or is_repeated) and self._simulated.get(slot) == place.step:
            _refuse("step", "this message was simulated before; load_state_dict of a checkpoint")
        decode, _, frame = self._encode(tensor, patterns)
        if not place.is_eval:
            self._simulated[slot] = place.step
        received = decode()
        n_bytes = sum(-(-len(part) // 16) * 16 for part in frame.parts)
        self.sent_bytes[direction] += HEADER_BYTES + n_bytes
        return received

    def _encode(self, tensor: _Message, patterns: Array) -> tuple[Callable[[], Array], LinkHeader, Payload]:
        direction, place, state = tensor.direction, tensor.place, self.state
        self._check_patterns(tensor, patterns)
        self._check_shape(tensor)
        memory, plan = state.memory("tx", direction, self._plan(tensor), place)
        if plan.codec == RAW:
            frame = encode_payload(state.kernels, plan, patterns)
            received = frame.decoded
            self._fill(plan, memory, patterns)
        else:
            received, frame = self._encode_lossy(tensor, plan, patterns, memory)
        if direction is Direction.FORWARD:
            state.keep_mask(plan, place, frame.mask)
        header = self._header("tx", tensor, plan, memory, frame.mode)
        state.count("tx", direction, place)
        self.raw_bytes[direction] += plan.raw_bytes
        return received, header, frame

    def _encode_lossy(
        self, tensor: _Message, plan: TensorPlan, patterns: Array, memory: Memory
    ) -> tuple[Callable[[], Array], Payload]:
        k = self.state.kernels
        values = k.to_f32(patterns, plan.kind)
        target = memory.target(k, values)
        mask = self.state.take_mask(plan, tensor.place) if plan.reuse else memory.mask(k, plan, values)
        seed = self._seed(tensor) if self.policy.rounding == "stochastic" else None
        frame = encode_payload(k, plan, target, seed=seed, mask=mask, vary=not self._fixed)
        if memory is NOTHING:
            return lambda: self._finished(plan, memory, frame.decoded()), frame
        decoded = frame.decoded()
        received = self._finished(plan, memory, decoded)
        seq = self.state.seq("tx", tensor.direction, tensor.place)
        memory.keep(k, target, decoded, frame.not_finite, seq)
        return lambda: received, frame

    def _fill(self, plan: TensorPlan, memory: Memory, patterns: Array) -> None:
        if memory is not NOTHING:
            memory.fill(self.state.kernels, self.state.kernels.to_f32(patterns, plan.kind))

    def _finished(self, plan: TensorPlan, memory: Memory, decoded: Array) -> Array:
        """Return the receiver's tensor, as patterns of its dtype."""
        k = self.state.kernels
        patterns = memory.received(k, decoded)
        if plan.kind != floats.F32 and memory is not NOTHING:
            patterns = k.saturate(patterns, plan.largest)
        return k.from_f32(patterns, plan.kind)

    def receive(
        self, direction: Direction, message: Array, dtype: DType, shape: tuple[int, ...], place: MessageKey
    ) -> Array:
        """Decode the patterns of the tensor in a message; bytes behind the message's end are ignored.

        Raises:
            WireError: the message is damaged, or another one than the one that is due.
        """
        tensor = _Message(direction, dtype, tuple(shape), place)
        return self._guarded("rx", tensor, lambda: self._decode(tensor, message))

    def _decode(self, tensor: _Message, message: Array) -> Array:
        k, state, place = self.state.kernels, self.state, tensor.place
        n_before = len(self._found)
        check: Check = at_once
        if self._verify == "message":
            head = bytes(k.host_bytes(message[:HEADER_BYTES]))
            header, plan, memory = self._checked(tensor, head)
            not_finite: Truth = bool(header.flags & Flag.NOT_FINITE)
        else:
            header, plan, memory, not_finite, check = self._checked_later(tensor, message)
        payload = message[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        if len(payload) != header.payload_bytes:
            _refuse("payload", f"{len(payload)} of {header.payload_bytes} bytes are there")
        if self._verify == "message" and int(k.checksum(payload)) & MASK_64 != header.checksum:
            _refuse("payload checksum", "the payload was changed on its way")
        known = state.take_mask(plan, place) if plan.reuse else None
        decoded, mask = decode_payload(k, plan, payload, header.mode, not_finite, known, check)
        wrong = functools.reduce(operator.or_, (condition for condition, _ in self._found[n_before:]), False)
        received = self._accepted(plan, memory, decoded, not_finite | wrong)
        if self._verify == "step" and tensor.dtype.name in KINDS:
            nan = k.from_f32(k.zeros(1, 4, received) + 0x7FC00000, KINDS[tensor.dtype.name])
            received = k.unless(wrong, nan, received)
        if tensor.direction is Direction.FORWARD:
            state.keep_mask(plan, place, mask)
        state.count("rx", tensor.direction, place)
        return received

    def _accepted(self, plan: TensorPlan, memory: Memory, decoded: Array, not_finite: Truth) -> Array:
        if plan.codec == RAW:
            self._fill(plan, memory, decoded)
            return decoded
        received = self._finished(plan, memory, decoded)
        memory.keep(self.state.kernels, decoded, decoded, not_finite)
        return received

    def _checked(self, tensor: _Message, head: bytes) -> tuple[LinkHeader, TensorPlan, Memory]:
        """Compare a header with that of the message that is due."""
        header = LinkHeader.parse(head)
        due, plan, memory = self._due(tensor)
        due = dataclasses.replace(due, flags=due.flags | header.flags & Flag.NOT_FINITE)
        for name in LinkHeader.__slots__:
            if name not in FREE and getattr(header, name) != getattr(due, name):
                _refuse(name, f"the message has {getattr(header, name)}, {getattr(due, name)} was due")
        if header.payload_bytes > plan.payload_cap or header.payload_bytes % 16:
            _refuse(
                "payload_bytes", f"claims {header.payload_bytes}, at most {plan.payload_cap} are possible"
            )
        return header, plan, memory

    def _due(self, tensor: _Message) -> tuple[LinkHeader, TensorPlan, Memory]:
        """Make the header that the next message must have, with the size of a full payload."""
        self._check_shape(tensor)
        memory, plan = self.state.memory("rx", tensor.direction, self._plan(tensor), tensor.place)
        due = self._header("rx", tensor, plan, memory, 0)
        return dataclasses.replace(due, payload_bytes=plan.payload_cap), plan, memory

    def _checked_later(
        self, tensor: _Message, message: Array
    ) -> tuple[LinkHeader, TensorPlan, Memory, Truth, Check]:
        """Compare a header on the device; `check` tells later what was wrong."""
        k, name = self.state.kernels, self.name_of(tensor.direction, tensor.place)
        due, plan, memory = self._due(tensor)
        if len(message) < plan.cap:
            _refuse("payload", f"a message of {len(message)} bytes, {plan.cap} were due")
        if len(self._found) > MOST_FOUND:
            self.check()

        def check(wrong: Truth, why: str) -> None:
            self._found.append((wrong, f"{name}: {why}"))

        expected, words = k.words(due.pack(), message), k.as_patterns(message[:HEADER_BYTES], 8)
        not_finite = (words[0] & NOT_FINITE) != 0
        changed = (words ^ expected)[:6]
        changed[0] &= ~NOT_FINITE
        check((changed != 0).any(), "header: it is not that of the message that is due")
        payload = message[HEADER_BYTES : plan.cap]
        check(words[6] != k.checksum(payload), "payload checksum: the payload was changed on its way")
        check(words[7] != k.checksum(message[: HEADER_BYTES - 8]), "header checksum: the header was changed")
        return due, plan, memory, not_finite, check

    def check(self) -> None:
        """Look at what was found on the device since the last call; a schedule's stage does so at each step.

        Raises:
            WireError: a message was damaged, or another one than was due. Its tensor arrived as NaN.
        """
        conditions = self._found
        wrong = [
            why
            for (_, why), is_wrong in zip(conditions, self.state.kernels.told(conditions), strict=True)
            if is_wrong
        ]
        self._found = []  # not before: after an interrupt the next call looks again
        if wrong:
            raise WireError(wrong[0])

    def message_cap(
        self, direction: Direction, dtype: DType, shape: tuple[int, ...], place: MessageKey, end: End = "rx"
    ) -> int:
        """Count the bytes to provide for one message; with `fixed`, exactly what is sent.

        The two ends agree on it before the message exists. With AQ-SGD that asks for one thing: a sample
        occurs at most once in a step.
        """
        tensor = _Message(direction, dtype, tuple(shape), place)
        plans = [self._plan(tensor)]
        if self.policy.feedback_of(direction) == "aqsgd":
            filled = self.state.memory(end, direction, plans[0], place)[1]
            raw = self.policy.plan(direction, dtype, tensor.shape, raw=True)
            plans += [filled] if self._fixed else [raw]
        return max(plan.cap for plan in plans)

    def _guarded(self, end: End, tensor: _Message, run: Callable[[], Any]) -> Any:
        """Process a message and change the state for all of it or, after an error, for none of it.

        Raises:
            WireError: the message is wrong, or the state was left half changed by an interrupt.
        """
        name = self.name_of(tensor.direction, tensor.place)
        if self._torn:
            raise WireError(
                f"{name}: {self._torn} was interrupted while it changed the state; "
                "load_state_dict of a checkpoint at both ends"
            )
        before = self.state.snapshot(end, tensor.direction, tensor.place)
        counted = self.sent_bytes.copy(), self.raw_bytes.copy(), self._shapes.copy(), self._simulated.copy()
        self._torn = name
        try:
            result = run()
        except BaseException as error:
            # Rows of samples are written in place: after an interrupt they cannot be trusted.
            is_ours = isinstance(error, CkptzError)
            if is_ours or self.policy.feedback_of(tensor.direction) != "aqsgd":
                self.state.roll_back(end, tensor.direction, tensor.place, before)
                self.sent_bytes, self.raw_bytes, self._shapes, self._simulated = counted
                self._torn = ""
            if is_ours and not isinstance(error, ConfigError | WriteError):
                raise WireError(f"{name}: {error}") from None
            raise
        self._torn = ""
        return result

    def name_of(self, direction: Direction, place: MessageKey) -> str:
        """Name a message in words, for errors."""
        phase = "evaluation" if place.is_eval else "step"
        return (
            f"link {self.src}->{self.dst} {direction.word}, {phase} {place.step}, "
            f"microbatch {place.microbatch}, tensor {place.tensor}"
        )

    def _check_patterns(self, tensor: _Message, patterns: Array) -> None:
        n_bytes = tensor.dtype.n_bytes(tensor.shape)
        sizes = len(patterns), len(self.state.kernels.as_bytes(patterns))
        if sizes != (n_bytes // tensor.dtype.pattern_bytes, n_bytes):
            name, dtype = self.name_of(tensor.direction, tensor.place), tensor.dtype
            raise ConfigError(
                f"{name}: {sizes[0]} patterns of {sizes[1]} bytes are not a tensor of {dtype.name} "
                f"{list(tensor.shape)}: {n_bytes} bytes in units of {dtype.pattern_bytes}"
            )

    def _check_shape(self, tensor: _Message) -> None:
        """Refuse another shape or type than the first tensor of this cut had."""
        shape = (tensor.dtype.name, tensor.shape)
        first = self._shapes.setdefault((tensor.direction, tensor.place.tensor), shape)
        if self._same_shape and shape != first:
            _refuse("shape", f"{shape[0]} {list(shape[1])} after {first[0]} {list(first[1])}")

    def small_shapes(self, direction: Direction) -> list[tuple[int, ...]]:
        """List shapes of tensors that go raw as they have fewer elements than the policy compresses."""
        codec, least = self.policy.codec(direction), self.policy.min_elements
        shapes = [shape for (towards, _), (_, shape) in self._shapes.items() if towards is direction]
        return [shape for shape in shapes if codec != RAW and math.prod(shape) < least]

    def is_raw(self, place: MessageKey) -> bool:
        """Return whether a message is raw: by policy, in warm-up, or in evaluation without compression."""
        if place.is_eval:
            return not self.policy.compresses_eval
        return place.is_raw or place.step < self.policy.warmup_steps

    def _plan(self, tensor: _Message) -> TensorPlan:
        raw = self.is_raw(tensor.place)
        if self.policy.reuse and tensor.direction is Direction.BACKWARD:
            raw = raw or self.state.lacks_mask(tensor.place)
        return self.policy.plan(tensor.direction, tensor.dtype, tensor.shape, raw=raw)

    def _header(self, end: End, tensor: _Message, plan: TensorPlan, memory: Memory, mode: int) -> LinkHeader:
        """Make the header of a message of finite values, without size and checksums."""
        direction, place = tensor.direction, tensor.place
        flags = Flag.BACKWARD * direction | Flag.REUSE * plan.reuse | Flag.DELTA * (memory is not NOTHING)
        flags |= Flag.EVAL * place.is_eval
        ids = place.sample_ids
        batch = 0 if ids is None else xxh64(np.ascontiguousarray(ids, "<i8")) & 0xFFFFFFFF
        return LinkHeader(
            *(plan.codec_id, plan.param, plan.dtype.id, int(flags)),
            *(self.src, self.dst, place.tensor, mode),
            *(place.step, place.microbatch, self.state.seq(end, direction, place)),
            *(plan.id ^ self.policy.digest, plan.n, plan.count, 0, batch, 0),
        )

    def _seed(self, tensor: _Message) -> int:
        """Mix 64 bits that belong to this message alone; spec/08-wire.md#rounding."""
        place, seed = tensor.place, self.policy.seed & MASK_64
        where = (self.src, self.dst, tensor.direction, place.tensor, place.step, place.microbatch)
        for number in (*where, place.is_eval):
            seed = mix_64((seed + (number + 1) * STEP_64) & MASK_64)
        return seed

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the feedback state between messages: arrays [elements] by name."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the feedback state that `state_dict` returned.

        Raises:
            WireError: it is not the state of this link. Messages are refused until another call ends well.
            WriteError: the disk has no room for sample buffers; the same.
        """
        self._torn = "load_state_dict"
        self.state.load_state_dict(state)
        self._simulated.clear()
        self._torn = ""


def can_wait(policy: LinkPolicy, fixed: bool) -> bool:
    """Return whether messages may be verified later, because nothing depends on their headers."""
    return fixed and "aqsgd" not in map(policy.feedback_of, Direction)


def _refuse(field: str, why: str) -> NoReturn:
    raise WireError(f"{field}: {why}")
