"""Mutated messages: every one is refused by a WireError, none is decoded, none crashes.

A second family is signed again after the mutation, as by a peer that is wrong rather than a wire that
is: such a message may be a valid other one, but must never crash or claim memory.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from ckptz.errors import WireError
from ckptz.format.dtypes import dtype_of
from ckptz.kernels import wire_cpu
from ckptz.wire import LinkPolicy, Tiled, TopK, Uniform
from ckptz.wire.endpoint import Link
from ckptz.wire.header import HEADER_BYTES, LinkHeader
from ckptz.wire.policy import MIN_ELEMENTS
from ckptz.wire.state import MessageKey
from tests.support import wire_reference
from tests.support.wire_support import FORWARD, f32_patterns, rng

SHAPE, F32 = (2, MIN_ELEMENTS // 2), dtype_of("F32")
POLICIES = [
    LinkPolicy(forward=Uniform(4)),
    LinkPolicy(forward=Uniform(2, rans=True)),
    LinkPolicy(forward=TopK(0.1)),
    LinkPolicy(forward=TopK(0.01, 16, "rice")),
    LinkPolicy(forward=TopK(0.1), feedback="ef21"),
    LinkPolicy(),
    LinkPolicy(forward=Tiled(3.5)),
]
PLACE = MessageKey(5, 1)


def message_of(policy: LinkPolicy, seed: int = 0, place: MessageKey = PLACE) -> Any:
    link = Link(0, 1, policy, kernels=wire_reference)
    values = rng(seed).standard_normal(MIN_ELEMENTS) ** 3
    return link.send(FORWARD, f32_patterns(values), F32, SHAPE, place).message


def mutated(message: Any, others: list[Any], source: np.random.Generator) -> Any:
    """One of: flipped bits, a random stretch, a cut, a splice, two words exchanged, another message."""
    kind, out = source.integers(0, 6), message.copy()
    i = int(source.integers(0, len(out) if source.random() < 0.5 else HEADER_BYTES))
    if kind == 0:
        for _ in range(int(source.integers(1, 5))):
            out[source.integers(0, len(out))] ^= 1 << int(source.integers(0, 8))
    elif kind == 1:
        stretch = source.integers(0, 256, int(source.integers(1, 40))).astype(np.uint8)
        out[i : i + len(stretch)] = stretch[: len(out) - i]
    elif kind == 2:
        out = out[:i]
    elif kind == 3:
        other = others[int(source.integers(0, len(others)))]
        out = np.concatenate([out[:i], other[i:]])
    elif kind == 4:
        n_words = len(out) // 8
        a, b = (8 * int(w) for w in source.integers(0, n_words, 2))
        out[a : a + 8], out[b : b + 8] = message[b : b + 8], message[a : a + 8]
    else:
        out = others[int(source.integers(0, len(others)))].copy()
    return out


@pytest.mark.parametrize(("n", "seed"), [(10_500, 1), pytest.param(100_000, 2, marks=pytest.mark.slow)])
def test_mutated_messages_are_refused(n: int, seed: int) -> None:
    source, messages = rng(seed), [message_of(policy) for policy in POLICIES]
    places = (MessageKey(4, 1), MessageKey(5, 0), MessageKey(5, 1, 1))
    others = [[message_of(policy, place=place) for place in places] for policy in POLICIES]
    for i in range(n):
        number = i % len(POLICIES)
        message = messages[number]
        changed = mutated(message, others[number], source)
        if np.array_equal(changed[: len(message)], message):
            continue
        link = Link(0, 1, POLICIES[number], kernels=wire_reference)
        with pytest.raises(WireError, match=r"^link 0->1 forward, step 5, microbatch 1, tensor 0: "):
            link.receive(FORWARD, changed, F32, SHAPE, PLACE)


def resigned(message: Any, source: np.random.Generator) -> Any:
    """A mutated payload, or a mutated mode or length, under right checksums."""
    payload = message[HEADER_BYTES:].copy()
    header = LinkHeader.parse(message[:HEADER_BYTES].tobytes())
    if source.random() < 0.2:
        header = dataclasses.replace(header, mode=int(source.integers(0, 20)))
    if source.random() < 0.2:
        payload = payload[: 16 * int(source.integers(0, len(payload) // 16 + 1))]
    for _ in range(int(source.integers(0, 6))):
        if len(payload):
            payload[source.integers(0, len(payload))] = source.integers(0, 256)
    checksum = wire_reference.checksum(payload)
    head = dataclasses.replace(header, payload_bytes=len(payload), checksum=checksum).pack()
    return np.concatenate([np.frombuffer(head, np.uint8), payload])


@pytest.mark.parametrize("n", [600, pytest.param(20_000, marks=pytest.mark.slow)])
def test_wrong_payloads_under_right_checksums_never_crash(n: int) -> None:
    source, n_refused = rng(3), 0
    messages = [message_of(policy) for policy in POLICIES]
    for i in range(n):
        policy = POLICIES[i % len(POLICIES)]
        link = Link(0, 1, policy, kernels=wire_reference)
        try:
            patterns = link.receive(FORWARD, resigned(messages[i % len(POLICIES)], source), F32, SHAPE, PLACE)
            assert len(patterns) == MIN_ELEMENTS
        except WireError:
            n_refused += 1
    assert n_refused > n // 5


@pytest.mark.slow
def test_a_hundred_thousand_messages_of_tiles_never_crash_and_kernels_agree_on_them() -> None:
    source, counts = rng(5), {True: 0, False: 0}
    policies = [LinkPolicy(forward=Tiled(*args)) for args in ((3.5,), (2, 256), (8, 16, False), (4.25, 64))]
    messages = [message_of(policy) for policy in policies]
    for i in range(100_000):
        wrong = resigned(messages[i % 4], source)
        found = []
        for kernels in (wire_cpu, wire_reference) if i % 100 == 0 else (wire_cpu,):
            try:
                link = Link(0, 1, policies[i % 4], kernels=kernels)
                found.append(link.receive(FORWARD, wrong, F32, SHAPE, PLACE).tobytes())
            except WireError:
                found.append(b"")
        assert len(set(found)) == 1
        counts[found[0] == b""] += 1
    assert min(counts.values()) > 10_000
