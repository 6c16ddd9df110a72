"""Mutants of links: messages with valid checksums, and invalid states."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptz.errors import WireError
from ckptz.format.dtypes import dtype_of
from ckptz.kernels import wire_cpu, wire_torch
from ckptz.wire import LinkPolicy, TopK, Uniform
from ckptz.wire.endpoint import Link
from ckptz.wire.header import HEADER_BYTES, Flag
from ckptz.wire.state import MessageKey
from tests.support import second_decoder
from tests.support.mutant_support import changed_bytes
from tests.support.spec_wire import WIRE, header_of, signed
from tests.support.wire_support import BACKWARD, FORWARD, f32_patterns, from_torch, to_torch

Attempt = Callable[[Callable[[], Any]], tuple[str, Any]]
Outcomes = Iterator[tuple[str, str, str]]
SHAPE = (4, 1024)
SHAPES = ((8, 1024), (4096,), (2, 2048), (64, 64), (2, 4096), (3, 1366), (16, 4096))
TOP = TopK(0.05)
IDS = np.arange(4)
STATE_EVERY = 10  # every tenth mutant is one of a state


@dataclass(frozen=True)
class Due:
    """A message to receive: its direction, its key and its bytes."""

    direction: Any
    place: MessageKey
    data: bytes


@dataclass(frozen=True)
class Transcript:
    """Valid messages of one link."""

    policy: LinkPolicy
    dtype: str
    shape: tuple[int, ...]
    due: tuple[Due, ...]

    @property
    def has_second(self) -> bool:
        """True if the second receiver supports the policy."""
        choices = (self.policy.forward, self.policy.backward)
        is_known = all(getattr(c, "scale", "block") == "block" for c in choices)
        return is_known and self.policy.feedback in (None, "ef21")


def transcripts() -> list[Transcript]:
    """Return the sessions of the vectors, and sessions with AQ-SGD and every kind of reuse."""
    out = []
    for session in WIRE.values():
        arrivals = session.arrivals()
        due = tuple(Due(message.direction, message.place, data) for message, _, data, _ in arrivals)
        out.append(Transcript(session.policy, session.dtype, session.shape, due))
    both = (FORWARD, BACKWARD)
    for values in (8, 16):
        for index in ("bitmap", "rice"):
            codec = TopK(0.03, values, index)
            feedback = "ef21" if index == "rice" else None
            policy = LinkPolicy(forward=codec, backward=codec, reuse=True, feedback=feedback)
            out += [transcript(policy, both, dtype) for dtype in ("F32", "F16")]
    out.append(transcript(LinkPolicy(forward=TOP, feedback="aqsgd"), (FORWARD,)))
    out.append(transcript(LinkPolicy(forward=Uniform(3, "sample", rans=True)), (FORWARD,), "BF16"))
    return out


def transcript(policy: LinkPolicy, directions: Sequence[Any], dtype: str = "F32") -> Transcript:
    """Record two steps of a link."""
    link, due = Link(0, 1, policy, kernels=wire_cpu), []
    for step in range(2):
        place = MessageKey(step, sample_ids=IDS if policy.feedback == "aqsgd" else None)
        for direction in directions:
            values = np.random.default_rng(step).standard_normal(np.prod(SHAPE)) ** 3
            sent = link.send(direction, f32_patterns(values, dtype), dtype_of(dtype), SHAPE, place)
            due.append(Due(direction, place, sent.message.tobytes()))
    return Transcript(policy, dtype, SHAPE, tuple(due))


# --- messages -----------------------------------------------------------------------------------


def mutant(data: bytes, rng: np.random.Generator) -> bytes:
    """Change payload, mode or flags, with valid checksums; often only bits within the payload."""
    header, payload = header_of(data), data[HEADER_BYTES:]
    kind = int(rng.integers(0, 8))
    if kind == 0:
        header = dataclasses.replace(header, mode=int(rng.integers(0, 20)))
    elif kind == 1:
        header = dataclasses.replace(header, flags=header.flags ^ Flag.NOT_FINITE)
    elif kind in (2, 3) and payload:
        payload = swapped_bits(payload, rng)
    elif kind == 4:
        payload = payload[: 16 * int(rng.integers(0, len(payload) // 16 + 1))]
    if kind > 4 or rng.random() < 0.2:
        payload = changed_bytes(payload, rng)[: len(data) if rng.random() < 0.1 else len(payload)]
    return signed(header, payload)


def swapped_bits(payload: bytes, rng: np.random.Generator) -> bytes:
    """Exchange bits of the first quarter, so that the number of ones stays the same."""
    bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
    for _ in range(int(rng.integers(1, 5))):
        i, j = rng.integers(0, max(len(bits) // 4, 1), 2)
        bits[i], bits[j] = bits[j], bits[i]
    return np.packbits(bits, bitorder="little").tobytes()


def received(
    original: Transcript, due: Sequence[Due], shapes: Sequence[tuple[int, ...]], kernels: Any
) -> Any:
    """Return the digests of the tensors up to the first message that is refused."""
    is_torch = kernels is wire_torch
    like = torch.zeros(0, dtype=torch.uint8) if is_torch else None
    link = Link(0, 1, original.policy, kernels=kernels, like=like, same_shape=False)
    digests, dtype = [], dtype_of(original.dtype)
    for message, shape in zip(due, shapes, strict=True):
        data = np.frombuffer(message.data, np.uint8)
        array = to_torch(data) if is_torch else data
        try:
            patterns = link.receive(message.direction, array, dtype, shape, message.place)
        except WireError:
            break
        patterns = from_torch(patterns, np.uint8) if is_torch else patterns
        digests.append(hashlib.sha256(patterns.tobytes()).hexdigest())
    return digests


def received_second(original: Transcript, due: Sequence[Due]) -> list[str]:
    """Return the same digests by the second receiver, which was written from the specification."""
    policy = json.loads(original.policy.to_json())
    row = {"policy": policy, "dtype": original.dtype, "shape": list(original.shape), "src": 0, "dst": 1}
    receiver, digests = second_decoder.links.Receiver(row), []
    for message, valid in zip(due, original.due, strict=True):
        place = {"step": message.place.step, "microbatch": message.place.microbatch}
        place |= {"direction": message.direction.word, "eval": message.place.is_eval}
        place["plan"] = header_of(valid.data).plan
        try:
            digests.append(hashlib.sha256(receiver.receive(place, message.data)).hexdigest())
        except second_decoder.frames.Refusal:
            break
    return digests


def outcomes(seed: int, attempt: Attempt) -> Outcomes:
    """Yield (kind, outcome, description that reproduces it) of one mutant after another."""
    rng, valid = np.random.default_rng(seed), transcripts()
    states = [(original, states_of(original)) for original in valid if original.policy.feedback]
    number = 0
    while True:
        description = f"message {number} of seed {seed}"
        if number % STATE_EVERY == 0:
            yield from state_outcomes(*states[int(rng.integers(0, len(states)))], rng, attempt, description)
        else:
            original = valid[int(rng.integers(0, len(valid)))]
            yield message_outcome(original, rng, attempt, description)
        number += 1


def message_outcome(
    original: Transcript, rng: np.random.Generator, attempt: Attempt, description: str
) -> tuple[str, str, str]:
    """Receive a transcript with one changed message, or with another shape for one message."""
    due, changed_at = list(original.due), int(rng.integers(0, len(original.due)))
    shapes = [original.shape] * len(due)
    other_shape = rng.random() < 0.1
    if other_shape:
        shapes[changed_at] = SHAPES[int(rng.integers(0, len(SHAPES)))]
    else:
        due[changed_at] = dataclasses.replace(due[changed_at], data=mutant(due[changed_at].data, rng))
    attempts = [
        attempt(lambda kernels=kernels: received(original, due, shapes, kernels))
        for kernels in (wire_cpu, wire_torch)
    ]
    kind = "shape" if other_shape else "message"
    for outcome, result in attempts:
        if outcome != "accepted":
            return kind, outcome, f"{description} {original.policy} {result}"
    results = [result for _, result in attempts]
    if original.has_second and not other_shape and len(results[0]) == len(due):
        results.append(received_second(original, due))
    if any(result != results[0] for result in results):
        return kind, "differs", f"{description} {original.policy} {[len(result) for result in results]}"
    return kind, "accepted" if len(results[0]) == len(due) else "refused", description


# --- states -------------------------------------------------------------------------------------


def states_of(original: Transcript) -> dict[str, Any]:
    """Return the state of a sender and a receiver after a transcript."""
    sender, receiver = (Link(0, 1, original.policy, kernels=wire_cpu) for _ in range(2))
    values, dtype = (
        f32_patterns(np.ones(int(np.prod(original.shape))), original.dtype),
        dtype_of(original.dtype),
    )
    for message in original.due:
        sender.send(message.direction, values, dtype, original.shape, message.place)
        data = np.frombuffer(message.data, np.uint8)
        receiver.receive(message.direction, data, dtype, original.shape, message.place)
    return sender.state_dict() | receiver.state_dict()


def changed_state(state: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Delete or cut an entry, or change its dtype, its shape or its numbers."""
    out = dict(state)
    name = sorted(out)[int(rng.integers(0, len(out)))]
    array, kind = np.asarray(out[name]), int(rng.integers(0, 6))
    if kind == 0:
        del out[name]
    elif kind == 1:
        out[name] = array.reshape(-1)[: int(rng.integers(0, array.size + 1))]
    elif kind == 2:
        out[name] = array.astype(rng.choice(["u1", "u2", "f4", "i8", "f8"]))
    elif kind == 3:
        out[name] = np.concatenate([array, array])
    elif kind == 4:
        out[name] = array[..., None]
    else:
        out[name] = array.copy()
        out[name].reshape(-1)[: 1 + int(rng.integers(0, 4))] = rng.integers(-3, 5)
    return out


def state_outcomes(
    original: Transcript, state: dict[str, Any], rng: np.random.Generator, attempt: Attempt, description: str
) -> Outcomes:
    """Resume a link from a changed state, with both kernels."""
    changed = changed_state(state, rng)
    for kernels in (wire_cpu, wire_torch):
        outcome, result = attempt(lambda: go_on(original, changed, kernels))  # noqa: B023
        yield "state", outcome, f"{description} {original.policy} {result}"


def go_on(original: Transcript, state: dict[str, Any], kernels: Any) -> None:
    """Load a state into both ends, send a tensor, and receive it."""
    like = torch.zeros(0, dtype=torch.uint8) if kernels is wire_torch else None
    ends = [Link(0, 1, original.policy, kernels=kernels, like=like) for _ in range(2)]
    for link in ends:
        link.load_state_dict(state)
    patterns = f32_patterns(np.ones(int(np.prod(original.shape))), original.dtype)
    first = original.due[0]
    place = dataclasses.replace(first.place, step=5)
    array = to_torch(patterns) if kernels is wire_torch else patterns
    dtype = dtype_of(original.dtype)
    message = ends[0].send(first.direction, array, dtype, original.shape, place).message
    ends[1].receive(first.direction, message, dtype, original.shape, place)
