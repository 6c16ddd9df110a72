"""One end of a link: encodes tensors as messages and decodes them. Implements spec/08-wire.md#header.

Both ends run the same code with the same policy, so the sender knows the receiver's tensors bit for bit.
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
from ckptz.kernels.wire_arrays import STEP_64, mix_64, padded
from ckptz.wire.header import HEADER_BYTES, MASK_64, Direction, Flag, LinkHeader
from ckptz.wire.payload import Check, Condition, Payload, decode_payload, encode_payload, raise_if
from ckptz.wire.policy import FLOAT_KINDS, RAW, LinkPolicy, TensorPlan, policy_of
from ckptz.wire.state import NO_FEEDBACK, LinkState, Memory, Message, MessageKey, SlotId

Array = Any
NOT_FINITE = Flag.NOT_FINITE << 56  # the flag in the first word of a header
MAX_PENDING_CHECKS = 1 << 14  # checks on a device; with more, `check` is called automatically
UNPREDICTABLE = ("payload_bytes", "checksum", "mode")  # header fields that the receiver cannot predict


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message, and a function that computes the tensor that the other end decodes from it."""

    message: Array
    decode: Callable[[], Array]


class Link:
    """One end of the link between two stages, or both ends in one process for `simulate`.

    Args:
        src: index of the stage that sends activations.
        dst: index of the stage that receives them.
        policy: the policy, equal at both ends, or the name of a preset.
        kernels: one of the wire's kernel modules, by default the compiled kernels.
        like: an array of these kernels, on the device where state is allocated.
        fixed: pad every message to the largest size of its plan, for transports without variable sizes.
        verify: "message" checks each header and checksum on receipt. "step" checks them on the device:
            a wrong message arrives as NaN, and `check` raises later; it needs torch kernels, `fixed`, and a
            policy without AQ-SGD.
        same_shape: refuse a tensor whose shape differs from that of the first message.
        samples: file and number of samples of AQ-SGD's buffers; by default they are in memory.
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
        self._pending: list[tuple[Condition, str]] = []  # checks to evaluate, and what each means
        self._torn = ""  # name of the message that has changed the state only in part
        if verify == "step" and not can_check_later(self.policy, fixed):
            raise ConfigError("verify='step' needs messages of fixed size, without aqsgd")
        self._simulated: dict[SlotId, int] = {}  # last simulated step of each slot
        self._shapes: dict[tuple[Direction, int], tuple[str, tuple[int, ...]]] = {}
        self.sent_bytes = dict.fromkeys(Direction, 0)
        self.raw_bytes = dict.fromkeys(Direction, 0)

    def send(
        self, direction: Direction, patterns: Array, dtype: DType, shape: tuple[int, ...], key: MessageKey
    ) -> EncodedMessage:
        """Encode one tensor.

        Args:
            direction: forward for activations, backward for gradients.
            patterns: bit patterns of the tensor, flat [n].
            dtype: of the tensor.
            shape: of the tensor.
            key: step, microbatch and tensor of the message.

        Raises:
            ConfigError: the patterns are not a tensor of this dtype and shape.
            WireError: the shape changed, or the positions to reuse are missing.
        """
        message = Message("tx", direction, dtype, tuple(shape), key)
        return self._guarded(message, lambda: self._send(message, patterns))

    def _send(self, sent: Message, patterns: Array) -> EncodedMessage:
        k, due = self.state.kernels, self._cap(sent) if self._fixed else 0
        received, header, frame = self._encode(sent, patterns)
        payload = k.concat(frame.parts)
        packed = bytearray(dataclasses.replace(header, payload_bytes=len(payload)).pack())
        words = k.as_patterns(k.from_bytes(packed, payload), 8)
        words[0] |= k.truth(frame.not_finite) * NOT_FINITE
        words[6] = k.checksum(payload)
        words[7] = k.checksum(k.as_bytes(words[:7]))
        padding = k.zeros(max(due - HEADER_BYTES - len(payload), 0), 1, payload)
        message = k.concat([k.as_bytes(words), payload, padding])
        self.sent_bytes[sent.direction] += len(message)
        return EncodedMessage(message, received)

    def simulate(
        self,
        direction: Direction,
        patterns: Array,
        dtype: DType,
        shape: tuple[int, ...],
        key: MessageKey,
        *,
        is_repeated: bool = False,
    ) -> Array:
        """Return the tensor that the receiver of `send` would decode, and count the bytes of its message.

        Args:
            direction, patterns, dtype, shape, key: as for `send`.
            is_repeated: allow the same message twice, as in a second backward pass of one graph.

        Raises:
            WireError: the same message was simulated before, as after an interrupt that lost its result; the
                state has already counted it.
        """
        message = Message("tx", direction, dtype, tuple(shape), key)
        return self._guarded(message, lambda: self._simulate(message, patterns, is_repeated))

    def _simulate(self, message: Message, patterns: Array, is_repeated: bool) -> Array:
        key = message.key
        if not (key.is_eval or is_repeated) and self._simulated.get(message.slot) == key.step:
            _refuse("step", "this message was simulated before; load the link's state from a checkpoint")
        decode, _, frame = self._encode(message, patterns)
        if not key.is_eval:
            self._simulated[message.slot] = key.step
        received = decode()
        self.sent_bytes[message.direction] += HEADER_BYTES + sum(padded(len(part)) for part in frame.parts)
        return received

    def _encode(self, message: Message, patterns: Array) -> tuple[Callable[[], Array], LinkHeader, Payload]:
        state = self.state
        self._check_patterns(message, patterns)
        self._check_shape(message)
        memory, plan = state.memory(message, self._plan(message))
        if plan.codec == RAW:
            frame = encode_payload(state.kernels, plan, patterns)
            received = frame.decoded
            self._fill(plan, memory, patterns)
        else:
            received, frame = self._encode_lossy(message, plan, patterns, memory)
        header = self._header(message, plan, memory, frame.mode)
        state.count(message, plan, frame.mask)
        self.raw_bytes[message.direction] += plan.raw_bytes
        return received, header, frame

    def _encode_lossy(
        self, message: Message, plan: TensorPlan, patterns: Array, memory: Memory
    ) -> tuple[Callable[[], Array], Payload]:
        k = self.state.kernels
        values = k.to_f32(patterns, plan.kind)
        target = memory.target(k, values)
        mask = self.state.pop_mask(plan, message.key) if plan.reuse else memory.mask(k, plan, values)
        seed = self._seed(message) if self.policy.rounding == "stochastic" else None
        frame = encode_payload(k, plan, target, seed=seed, mask=mask, vary=not self._fixed)
        if memory is NO_FEEDBACK:
            return lambda: self._finished(plan, memory, frame.decoded()), frame
        decoded = frame.decoded()
        received = self._finished(plan, memory, decoded)
        memory.keep(k, target, decoded, frame.not_finite, self.state.seq(message))
        return lambda: received, frame

    def _fill(self, plan: TensorPlan, memory: Memory, patterns: Array) -> None:
        if memory is not NO_FEEDBACK:
            memory.fill(self.state.kernels, self.state.kernels.to_f32(patterns, plan.kind))

    def _finished(self, plan: TensorPlan, memory: Memory, decoded: Array) -> Array:
        """Return the receiver's tensor, as patterns of its dtype."""
        k = self.state.kernels
        patterns = memory.received(k, decoded)
        if plan.kind != floats.F32 and memory is not NO_FEEDBACK:
            patterns = k.saturate(patterns, plan.largest)
        return k.from_f32(patterns, plan.kind)

    def receive(
        self, direction: Direction, message: Array, dtype: DType, shape: tuple[int, ...], key: MessageKey
    ) -> Array:
        """Decode the patterns [n] of the tensor in a message; padding after its end is ignored.

        Args:
            message: bytes of the message.
            direction, dtype, shape, key: of the expected message, as for `send`.

        Raises:
            WireError: the message is damaged or unexpected.
        """
        expected = Message("rx", direction, dtype, tuple(shape), key)
        return self._guarded(expected, lambda: self._decode(expected, message))

    def _decode(self, expected: Message, message: Array) -> Array:
        k, dtype = self.state.kernels, expected.dtype.name
        if len(self._pending) > MAX_PENDING_CHECKS:
            self.check()
        n_before = len(self._pending)
        check: Check = raise_if
        if self._verify == "message":
            header, plan, memory = self._check_header(expected, bytes(k.host_bytes(message[:HEADER_BYTES])))
            not_finite: Condition = bool(header.flags & Flag.NOT_FINITE)
        else:
            header, plan, memory, not_finite, check = self._check_later(expected, message)
        payload = message[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        if len(payload) != header.payload_bytes:
            _refuse("payload", f"only {len(payload)} of {header.payload_bytes} bytes were received")
        if self._verify == "message" and int(k.checksum(payload)) & MASK_64 != header.checksum:
            _refuse("payload checksum", "the payload was changed on its way")
        reused = self.state.pop_mask(plan, expected.key) if plan.reuse else None
        decoded, mask = decode_payload(k, plan, payload, header.mode, not_finite, reused, check)
        conditions = (condition for condition, _ in self._pending[n_before:])
        wrong = functools.reduce(operator.or_, conditions, False)
        if plan.codec == RAW:
            received = decoded
            self._fill(plan, memory, decoded)
        else:
            received = self._finished(plan, memory, decoded)
            memory.keep(k, decoded, decoded, not_finite | wrong)
        if self._verify == "step" and dtype in FLOAT_KINDS:
            nan = k.from_f32(k.zeros(1, 4, received) + 0x7FC00000, FLOAT_KINDS[dtype])
            received = k.unless(wrong, nan, received)
        self.state.count(expected, plan, mask)
        return received

    def _check_header(self, message: Message, raw: bytes) -> tuple[LinkHeader, TensorPlan, Memory]:
        """Parse a header and compare it with the expected one.

        Raises:
            WireError: a field differs.
        """
        header = LinkHeader.parse(raw)
        expected, plan, memory = self._expected_header(message)
        expected = dataclasses.replace(expected, flags=expected.flags | header.flags & Flag.NOT_FINITE)
        for name in LinkHeader.__slots__:
            value, expected_value = getattr(header, name), getattr(expected, name)
            if name not in UNPREDICTABLE and value != expected_value:
                _refuse(name, f"the message has {value}, expected {expected_value}")
        if header.payload_bytes > plan.payload_cap or header.payload_bytes % 16:
            _refuse("payload_bytes", f"{header.payload_bytes} bytes, at most {plan.payload_cap} are possible")
        return header, plan, memory

    def _expected_header(self, message: Message) -> tuple[LinkHeader, TensorPlan, Memory]:
        """Build the header of the next message, with the largest payload size."""
        self._check_shape(message)
        memory, plan = self.state.memory(message, self._plan(message))
        header = self._header(message, plan, memory, 0)
        return dataclasses.replace(header, payload_bytes=plan.payload_cap), plan, memory

    def _check_later(
        self, expected: Message, message: Array
    ) -> tuple[LinkHeader, TensorPlan, Memory, Condition, Check]:
        """Compare a header with the expected one on the device; `check` evaluates the results later."""
        k, name = self.state.kernels, self.name_of(expected.direction, expected.key)
        header, plan, memory = self._expected_header(expected)
        if len(message) < plan.cap:
            _refuse("payload", f"the message has {len(message)} bytes, expected {plan.cap}")

        def check(wrong: Condition, reason: str) -> None:
            self._pending.append((wrong, f"{name}: {reason}"))

        words = k.as_patterns(message[:HEADER_BYTES], 8)
        not_finite = (words[0] & NOT_FINITE) != 0
        changed = (words ^ k.as_patterns(k.from_bytes(header.pack(), message), 8))[:6]
        changed[0] &= ~NOT_FINITE
        check((changed != 0).any(), "header: it is not that of the expected message")
        payload = message[HEADER_BYTES : plan.cap]
        check(words[6] != k.checksum(payload), "payload checksum: the payload was changed on its way")
        check(words[7] != k.checksum(message[: HEADER_BYTES - 8]), "header checksum: the header was changed")
        return header, plan, memory, not_finite, check

    def check(self) -> None:
        """Evaluate the pending checks of `verify="step"`; a `CompressedPipelineStage` does so at each step.

        Raises:
            WireError: a message was damaged or unexpected; its tensor arrived as NaN.
        """
        results = self.state.kernels.to_bools(self._pending)
        reasons = [reason for (_, reason), wrong in zip(self._pending, results, strict=True) if wrong]
        self._pending = []  # last, so that after an interrupt the next call checks again
        if reasons:
            raise WireError(reasons[0])

    def message_cap(self, direction: Direction, dtype: DType, shape: tuple[int, ...], key: MessageKey) -> int:
        """Return the largest size of a message to receive, in bytes; with `fixed`, its exact size.

        Both ends compute it before the message exists. With AQ-SGD that requires that each sample occurs
        only once in a step.
        """
        return self._cap(Message("rx", direction, dtype, tuple(shape), key))

    def _cap(self, message: Message) -> int:
        plan = self._plan(message)
        if self.policy.feedback_of(message.direction) != "aqsgd":
            return plan.cap
        if self._fixed:
            filled = self.state.memory(message, plan)[1]
        else:
            filled = self.policy.plan(message.direction, message.dtype, message.shape, raw=True)
        return max(plan.cap, filled.cap)

    def _guarded(self, message: Message, run: Callable[[], Any]) -> Any:
        """Process a message; after an error the state is rolled back.

        Raises:
            WireError: the message is wrong, or an interrupt has left the state changed in part.
        """
        name = self.name_of(message.direction, message.key)
        if self._torn:
            raise WireError(
                f"{name}: {self._torn} was interrupted while it changed the link's state; "
                "load the state from a checkpoint at both ends"
            )
        before = self.state.snapshot(message)
        counters = self.sent_bytes.copy(), self.raw_bytes.copy(), self._shapes.copy(), self._simulated.copy()
        self._torn = name
        try:
            result = run()
        except BaseException as error:
            # Rows of sample buffers are written in place, so after an interrupt they may be wrong.
            is_ours = isinstance(error, CkptzError)
            if is_ours or self.policy.feedback_of(message.direction) != "aqsgd":
                self.state.roll_back(message, before)
                self.sent_bytes, self.raw_bytes, self._shapes, self._simulated = counters
                self._torn = ""
            if is_ours and not isinstance(error, ConfigError | WriteError):
                raise WireError(f"{name}: {error}") from None
            raise
        self._torn = ""
        return result

    def name_of(self, direction: Direction, key: MessageKey) -> str:
        """Describe a message for errors: link, direction, step, microbatch and tensor."""
        phase = "evaluation" if key.is_eval else "step"
        return (
            f"link {self.src}->{self.dst} {direction.word}, {phase} {key.step}, "
            f"microbatch {key.microbatch}, tensor {key.tensor}"
        )

    def _check_patterns(self, message: Message, patterns: Array) -> None:
        dtype, n_bytes = message.dtype, message.dtype.n_bytes(message.shape)
        sizes = len(patterns), len(self.state.kernels.as_bytes(patterns))
        if sizes != (n_bytes // dtype.pattern_bytes, n_bytes):
            raise ConfigError(
                f"{self.name_of(message.direction, message.key)}: {sizes[0]} patterns of {sizes[1]} bytes "
                f"are not a tensor of {dtype.name} {list(message.shape)}: {n_bytes} bytes in units of "
                f"{dtype.pattern_bytes}"
            )

    def _check_shape(self, message: Message) -> None:
        """Require the dtype and shape of the first message of this direction and tensor."""
        shape = (message.dtype.name, message.shape)
        first = self._shapes.setdefault((message.direction, message.key.tensor), shape)
        if self._same_shape and shape != first:
            _refuse("shape", f"{shape[0]} {list(shape[1])} after {first[0]} {list(first[1])}")

    def small_shapes(self, direction: Direction) -> list[tuple[int, ...]]:
        """List the shapes that are sent raw because they have fewer elements than `min_elements`."""
        if self.policy.codec(direction) == RAW:
            return []
        shapes = [shape for (d, _), (_, shape) in self._shapes.items() if d is direction]
        return [shape for shape in shapes if math.prod(shape) < self.policy.min_elements]

    def _plan(self, message: Message) -> TensorPlan:
        """Make the plan of a message: raw by agreement, in warm-up, or in uncompressed evaluation."""
        key, policy = message.key, self.policy
        raw = not policy.compresses_eval if key.is_eval else key.is_raw or key.step < policy.warmup_steps
        if policy.reuse and message.direction is Direction.BACKWARD:
            raw = raw or self.state.lacks_mask(key)
        return policy.plan(message.direction, message.dtype, message.shape, raw=raw)

    def _header(self, message: Message, plan: TensorPlan, memory: Memory, mode: int) -> LinkHeader:
        """Build the header of a message of finite values, without size and checksums."""
        direction, key = message.direction, message.key
        flags = Flag.BACKWARD * direction | Flag.REUSE * plan.reuse | Flag.DELTA * (memory is not NO_FEEDBACK)
        flags |= Flag.EVAL * key.is_eval
        ids = key.sample_ids
        batch = 0 if ids is None else xxh64(np.ascontiguousarray(ids, "<i8")) & 0xFFFFFFFF
        return LinkHeader(
            *(plan.codec_id, plan.param, plan.dtype.id, int(flags)),
            *(self.src, self.dst, key.tensor, mode),
            *(key.step, key.microbatch, self.state.seq(message)),
            *(plan.id ^ self.policy.digest, plan.n, plan.count, 0, batch, 0),
        )

    def _seed(self, message: Message) -> int:
        """Compute the 64-bit rounding seed of a message; spec/08-wire.md#rounding."""
        key, seed = message.key, self.policy.seed & MASK_64
        numbers = (self.src, self.dst, message.direction, key.tensor, key.step, key.microbatch)
        for number in (*numbers, key.is_eval):
            seed = mix_64((seed + (number + 1) * STEP_64) & MASK_64)
        return seed

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the state of the link: numpy arrays [n] by name."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        After an error, messages are refused until a state is loaded.

        Raises:
            WireError: the state does not fit this link.
            WriteError: the disk has no space for sample buffers.
        """
        self._torn = "load_state_dict"
        self.state.load_state_dict(state)
        self._simulated.clear()
        self._torn = ""


def can_check_later(policy: LinkPolicy, fixed: bool) -> bool:
    """Return whether `verify="step"` is possible: no size and no plan depends on a header."""
    return fixed and "aqsgd" not in map(policy.feedback_of, Direction)


def _refuse(field: str, reason: str) -> NoReturn:
    raise WireError(f"{field}: {reason}")
