"""Mutants of links: messages under right checksums, and states of links that do not fit."""

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
STATE_EVERY = 10  # of so many mutants one is of a state


@dataclass(frozen=True)
class Due:
    """A message of a transcript: which one it is, and its bytes."""

    direction: Any
    place: MessageKey
    data: bytes


@dataclass(frozen=True)
class Transcript:
    """Right messages of one link."""

    policy: LinkPolicy
    dtype: str
    shape: tuple[int, ...]
    due: tuple[Due, ...]

    @property
    def has_second(self) -> bool:
        """Whether the second receiver knows what the policy asks for."""
        choices = (self.policy.forward, self.policy.backward)
        is_known = all(getattr(c, "scale", "block") == "block" for c in choices)
        return is_known and self.policy.feedback in (None, "ef21")


def transcripts() -> list[Transcript]:
    """The sessions of the vectors, and what these have not: AQ-SGD, reuse of every kind."""
    out = []
    for session in WIRE.values():
        made = session.made()
        due = tuple(Due(message.direction, message.place, data) for message, _, data, _ in made)
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
    """Two steps of a link."""
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
    """Another payload, mode or flag under right checksums; often bits moved within the payload."""
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
    """Two bits of the first quarter exchanged: as many ones as before."""
    bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
    for _ in range(int(rng.integers(1, 5))):
        i, j = rng.integers(0, max(len(bits) // 4, 1), 2)
        bits[i], bits[j] = bits[j], bits[i]
    return np.packbits(bits, bitorder="little").tobytes()


def received(made: Transcript, due: Sequence[Due], shapes: Sequence[tuple[int, ...]], kernels: Any) -> Any:
    """Digests of the tensors up to the first message that is refused."""
    is_torch = kernels is wire_torch
    like = torch.zeros(0, dtype=torch.uint8) if is_torch else None
    link = Link(0, 1, made.policy, kernels=kernels, like=like, same_shape=False)
    digests, dtype = [], dtype_of(made.dtype)
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


def received_second(made: Transcript, due: Sequence[Due]) -> list[str]:
    """The same by the receiver that was written from the page."""
    policy = json.loads(made.policy.to_json())
    row = {"policy": policy, "dtype": made.dtype, "shape": list(made.shape), "src": 0, "dst": 1}
    receiver, digests = second_decoder.links.Receiver(row), []
    for message, right in zip(due, made.due, strict=True):
        place = {"step": message.place.step, "microbatch": message.place.microbatch}
        place |= {"direction": message.direction.word, "eval": message.place.is_eval}
        place["plan"] = header_of(right.data).plan
        try:
            digests.append(hashlib.sha256(receiver.receive(place, message.data)).hexdigest())
        except second_decoder.frames.Refusal:
            break
    return digests


def outcomes(seed: int, attempt: Attempt) -> Outcomes:
    """Mutant after mutant: its kind, how it ended, and how to make it again."""
    rng, right = np.random.default_rng(seed), transcripts()
    states = [(made, states_of(made)) for made in right if made.policy.feedback]
    number = 0
    while True:
        about = f"message {number} of seed {seed}"
        if number % STATE_EVERY == 0:
            yield from state_outcomes(*states[int(rng.integers(0, len(states)))], rng, attempt, about)
        else:
            made = right[int(rng.integers(0, len(right)))]
            yield message_outcome(made, rng, attempt, about)
        number += 1


def message_outcome(
    made: Transcript, rng: np.random.Generator, attempt: Attempt, about: str
) -> tuple[str, str, str]:
    """One message of a transcript changed, or received as a tensor of another shape."""
    due, at = list(made.due), int(rng.integers(0, len(made.due)))
    shapes = [made.shape] * len(due)
    other_shape = rng.random() < 0.1
    if other_shape:
        shapes[at] = SHAPES[int(rng.integers(0, len(SHAPES)))]
    else:
        due[at] = dataclasses.replace(due[at], data=mutant(due[at].data, rng))
    found = [
        attempt(lambda kernels=kernels: received(made, due, shapes, kernels))
        for kernels in (wire_cpu, wire_torch)
    ]
    kind = "shape" if other_shape else "message"
    for outcome, result in found:
        if outcome != "accepted":
            return kind, outcome, f"{about} {made.policy} {result}"
    results = [result for _, result in found]
    if made.has_second and not other_shape and len(results[0]) == len(due):
        results.append(received_second(made, due))
    if any(result != results[0] for result in results):
        return kind, "differs", f"{about} {made.policy} {[len(result) for result in results]}"
    return kind, "accepted" if len(results[0]) == len(due) else "refused", about


# --- states -------------------------------------------------------------------------------------


def states_of(made: Transcript) -> dict[str, Any]:
    """What an end remembers after the transcript: as sender, and as receiver."""
    sender, receiver = (Link(0, 1, made.policy, kernels=wire_cpu) for _ in range(2))
    values, dtype = f32_patterns(np.ones(int(np.prod(made.shape))), made.dtype), dtype_of(made.dtype)
    for message in made.due:
        sender.send(message.direction, values, dtype, made.shape, message.place)
        data = np.frombuffer(message.data, np.uint8)
        receiver.receive(message.direction, data, dtype, made.shape, message.place)
    return sender.state_dict() | receiver.state_dict()


def changed_state(state: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """An entry left out, cut, of another type or shape, or with other numbers."""
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
    made: Transcript, state: dict[str, Any], rng: np.random.Generator, attempt: Attempt, about: str
) -> Outcomes:
    """A link goes on from a state that does not fit, as sender and as receiver."""
    changed = changed_state(state, rng)
    for kernels in (wire_cpu, wire_torch):
        outcome, result = attempt(lambda: go_on(made, changed, kernels))  # noqa: B023
        yield "state", outcome, f"{about} {made.policy} {result}"


def go_on(made: Transcript, state: dict[str, Any], kernels: Any) -> None:
    """Load a state, send a tensor, and receive it at an end of the same state."""
    like = torch.zeros(0, dtype=torch.uint8) if kernels is wire_torch else None
    ends = [Link(0, 1, made.policy, kernels=kernels, like=like) for _ in range(2)]
    for link in ends:
        link.load_state_dict(state)
    patterns = f32_patterns(np.ones(int(np.prod(made.shape))), made.dtype)
    first = made.due[0]
    place = dataclasses.replace(first.place, step=5)
    array = to_torch(patterns) if kernels is wire_torch else patterns
    dtype = dtype_of(made.dtype)
    message = ends[0].send(first.direction, array, dtype, made.shape, place).message
    ends[1].receive(first.direction, message, dtype, made.shape, place)
