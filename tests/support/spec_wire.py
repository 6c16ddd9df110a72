"""Valid and invalid messages of links for spec/vectors/wire, which spec/make_vectors.py writes.

A session is the messages of one link in order, all by one policy. The last message of an invalid session
must be refused by the row of spec/08-wire.md that names the session.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptz.format.bits import ByteWriter
from ckptz.format.dtypes import dtype_of
from ckptz.wire import LinkPolicy, Tiled, TopK, Uniform
from ckptz.wire.endpoint import Link
from ckptz.wire.header import HEADER_BYTES, Direction, LinkHeader, header_checksum
from ckptz.wire.state import MessageKey
from tests.support import reference, wire_reference

Array = Any
Change = Callable[[bytes], bytes]
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SHAPE = (4, 1024)
NAN = 0x7FC00123


@dataclass(frozen=True)
class Message:
    """A tensor to send, and the change that is made to its message."""

    place: MessageKey = field(default_factory=lambda: MessageKey(0))
    direction: Direction = FORWARD
    seed: int = 0
    is_lost: bool = False
    with_nan: bool = False
    change: Change | None = None


@dataclass(frozen=True)
class Session:
    """Messages of one link, and the rules that they need; the last of an invalid session breaks one."""

    rules: str
    policy: LinkPolicy
    messages: Sequence[Message] = (Message(),)
    dtype: str = "F32"
    shape: tuple[int, ...] = SHAPE

    def describe(self) -> dict[str, Any]:
        """Return the settings that both ends agree on."""
        return {
            "policy": json.loads(self.policy.to_json()),
            "dtype": self.dtype,
            "shape": list(self.shape),
            "src": 0,
            "dst": 1,
        }

    def arrivals(self) -> list[tuple[Message, int, bytes, bytes]]:
        """Return (message, hash of its plan, its bytes, bytes of the decoded tensor) of all that arrive."""
        link = Link(0, 1, self.policy, kernels=wire_reference)
        arrived = []
        for message in self.messages:
            patterns = values(self, message)
            sent = link.send(message.direction, patterns, dtype_of(self.dtype), self.shape, message.place)
            data = sent.message.tobytes()
            data = message.change(data) if message.change else data
            if not message.is_lost:
                plan = header_of(sent.message.tobytes()).plan
                arrived.append((message, plan, data, sent.decode().tobytes()))
        return arrived


def values(session: Session, message: Message) -> Array:
    """Compute the patterns of a tensor by a formula that depends on no library."""
    i = np.arange(int(np.prod(session.shape)), dtype=np.int64)
    if session.dtype not in ("F32", "BF16", "F16"):
        return i.view(np.uint64)
    numbers = ((i * 7919 + message.seed * 104729) % 2003 - 1001) / 512.0
    patterns = (numbers**3).astype(np.float32).view(np.uint32)
    if message.with_nan:
        patterns[300] = NAN
    return reference.from_f32(patterns, ("F32", "BF16", "F16").index(session.dtype))


def signed(header: LinkHeader, payload: bytes) -> bytes:
    """Build a message whose checksums and length match its payload."""
    padded = payload.ljust(-(-len(payload) // 16) * 16, b"\0")
    checksum = wire_reference.checksum(np.frombuffer(padded, np.uint8))
    return dataclasses.replace(header, payload_bytes=len(padded), checksum=checksum).pack() + padded


def header_of(data: bytes) -> LinkHeader:
    return LinkHeader.parse(data[:HEADER_BYTES])


def with_header(**fields: int) -> Change:
    """Return a change of header fields, with a valid checksum."""
    return lambda data: dataclasses.replace(header_of(data), **fields).pack() + data[HEADER_BYTES:]


def with_bytes(at: int, new: bytes) -> Change:
    """Return a change of bytes that leaves the checksums as they are."""
    return lambda data: data[:at] + new + data[at + len(new) :]


def with_first_words(at: int, new: bytes) -> Change:
    """Return a change of header bytes, with a valid checksum."""

    def change(data: bytes) -> bytes:
        body = data[:at] + new + data[at + len(new) : 56]
        return body + header_checksum(body).to_bytes(8, "little") + data[HEADER_BYTES:]

    return change


def with_payload(at: int, new: bytes, **fields: int) -> Change:
    """Return a change of payload bytes, with valid checksums."""

    def change(data: bytes) -> bytes:
        payload = data[HEADER_BYTES:]
        position = at % len(payload)
        header = dataclasses.replace(header_of(data), **fields)
        return signed(header, payload[:position] + new + payload[position + len(new) :])

    return change


def with_codes(code: int) -> Change:
    """Return a change to a coded payload whose codes are all equal."""

    def change(data: bytes) -> bytes:
        ranges = data[HEADER_BYTES : HEADER_BYTES + 64]
        out = ByteWriter()
        out.u8(0)
        out.u32(1)
        out.u8(code)
        return signed(dataclasses.replace(header_of(data), mode=1), ranges + out.getvalue())

    return change


U2, U4, CODED = Uniform(2), Uniform(4), Uniform(2, rans=True)
TOP, RICE = TopK(0.05), TopK(0.01, 16, "rice")
STEPS = tuple(Message(MessageKey(step), seed=step) for step in range(4))
NAN_NEXT = Message(MessageKey(1), seed=1, with_nan=True)
TOP21 = LinkPolicy(forward=TopK(0.05, 16), feedback="ef21", eval="raw")
TILES = Tiled(3.25, 64)
EF21 = LinkPolicy(forward=U2, feedback="ef21", eval="raw")

WIRE: dict[str, Session] = {
    "raw": Session("W1 W2 W3 W4", LinkPolicy(), dtype="I64", shape=(3, 5)),
    "raw-odd-bytes": Session("W5", LinkPolicy(), dtype="F16", shape=(5,)),
    "uniform-2": Session("W1 W2 W3 W4 W5", LinkPolicy(forward=U2)),
    "uniform-4-bf16": Session("W5", LinkPolicy(forward=U4), dtype="BF16"),
    "uniform-3-f16": Session("W5", LinkPolicy(forward=Uniform(3)), dtype="F16"),
    "uniform-coded": Session("W3 W5", LinkPolicy(forward=CODED)),
    "uniform-not-finite": Session("W5", LinkPolicy(forward=U2), [Message(with_nan=True)]),
    "uniform-not-finite-f16": Session("W5", LinkPolicy(forward=U2), [Message(with_nan=True)], dtype="F16"),
    "topk-not-finite-bf16": Session("W5", TOP21, [STEPS[0], NAN_NEXT, STEPS[2]], dtype="BF16"),
    "topk-not-finite-f16": Session("W5", TOP21, [STEPS[0], NAN_NEXT, STEPS[2]], dtype="F16"),
    "uniform-stochastic": Session("W5", LinkPolicy(forward=U2, rounding="stochastic", seed=7)),
    "topk-bitmap": Session("W5", LinkPolicy(forward=TOP)),
    "topk-rice": Session("W3 W5", LinkPolicy(forward=RICE)),
    "topk-reuse": Session(
        "W6",
        LinkPolicy(forward=TOP, backward=TOP, reuse=True),
        [Message(), Message(direction=BACKWARD, seed=1)],
    ),
    "uniform-small": Session("W5", LinkPolicy(forward=U4, min_elements=512), shape=(2, 256)),
    "uniform-below-the-limit": Session("W5", LinkPolicy(forward=U4, min_elements=513), shape=(2, 256)),
    "tiles": Session("W1 W3 W5", LinkPolicy(forward=TILES)),
    "tiles-plain": Session("W5", LinkPolicy(forward=Tiled(2.5, 16, rotate=False)), dtype="BF16"),
    "tiles-of-rows": Session("W5", LinkPolicy(forward=Tiled(4, 256)), shape=(3, 1366), dtype="F16"),
    "tiles-not-finite": Session(
        "W5", LinkPolicy(forward=TILES, feedback="ef21", eval="raw"), [STEPS[0], NAN_NEXT, STEPS[2]]
    ),
    "tiles-stochastic": Session("W5", LinkPolicy(forward=Tiled(2, 256), rounding="stochastic", seed=7)),
    "session-ef21": Session("W2", EF21, STEPS),
    "session-two-slots": Session(
        "W2",
        EF21,
        [Message(MessageKey(step, microbatch), seed=step) for step in (0, 1) for microbatch in (0, 1)],
    ),
    "session-eval": Session(
        "W2", LinkPolicy(forward=U2, eval="same"), [STEPS[0], Message(MessageKey(0, is_eval=True)), STEPS[1]]
    ),
}


def broken(policy: LinkPolicy, change: Change, **fields: Any) -> Session:
    """Return a session of one changed message."""
    return Session("", policy, [Message(change=change, **fields)])


def small(change: Change) -> Session:
    """Return a session of one changed message that is sent without a codec."""
    return Session("", LinkPolicy(), [Message(change=change)], "I64", (3, 5))


LINK2, LINKC = LinkPolicy(forward=U2), LinkPolicy(forward=CODED)
LINKTILES = LinkPolicy(forward=TILES)
LINKT, LINKR = LinkPolicy(forward=TOP), LinkPolicy(forward=RICE)
WIRE_REFUSED: Mapping[str, Sequence[Session]] = {
    "W1": [
        broken(LINK2, with_first_words(0, b"XX")),
        broken(LINK2, with_first_words(2, b"\2")),
        broken(LINK2, with_first_words(3, b"\5")),
        broken(LINK2, with_first_words(7, b"\x40")),
        broken(LINK2, with_bytes(56, b"\0")),
        broken(LINK2, with_bytes(17, b"\1")),
        broken(LINK2, lambda data: data[:63]),
    ],
    "W2": [
        *(
            broken(LINK2, with_header(**{name: value}))
            for name, value in {
                **{"codec": 0, "param": 4, "dtype": 11, "src": 1, "dst": 0, "tensor": 1, "step": 1},
                **{"microbatch": 1, "state_seq": 1, "plan": 0, "n": 4095, "count": 15, "batch": 1},
                "flags": 1,
            }.items()
        ),
        Session("", EF21, [STEPS[0], STEPS[1], dataclasses.replace(STEPS[2], is_lost=True), STEPS[3]]),
        Session("", EF21, [dataclasses.replace(STEPS[0], is_lost=True), STEPS[1]]),
    ],
    "W3": [
        broken(LINK2, with_header(payload_bytes=1 << 31)),
        broken(LINK2, with_header(payload_bytes=1104)),
        broken(LINK2, with_header(payload_bytes=1087)),
    ],
    "W4": [broken(LINK2, with_bytes(64 + 200, b"\xff")), small(with_bytes(64, b"\xff"))],
    "W5": [
        small(with_header(mode=1)),
        broken(LINK2, with_header(mode=1)),
        broken(LINK2, with_payload(33, b"\x80")),
        broken(LINK2, with_payload(32, b"\xc0\x7f")),
        broken(LINK2, with_payload(0, b"\x80\x7f")),
        broken(LINK2, with_payload(0, b"", flags=16)),
        broken(LINKC, with_codes(4)),
        broken(LINKC, with_payload(-1, b"\1")),
        broken(LINKT, with_payload(0, b"\xff\xff\xff\xff")),
        broken(LINKT, with_header(mode=1)),
        broken(LINKR, with_header(mode=18)),
        broken(LINKR, with_payload(0, b"\0\0")),
        broken(LINKR, with_payload(16, b"\xff" * 8)),
        broken(LINKR, with_payload(4, b"\1")),
        broken(LINKTILES, with_header(mode=1)),
        broken(LINKTILES, with_payload(0, b"\x80\x7f")),
        broken(LINKTILES, with_payload(2, b"\xfe")),
        broken(LINKTILES, with_payload(80, b"\x99")),
        broken(LINKTILES, with_payload(80, b"\x11")),
        broken(LINKTILES, with_payload(80, b"\x88\x88")),
        broken(LINKTILES, with_payload(80, b"\x22")),
        broken(LINKTILES, with_payload(80, b"\x33", flags=16)),
    ],
    "W6": [
        Session(
            "",
            LinkPolicy(forward=TOP, backward=TOP, reuse=True),
            [Message(is_lost=True), Message(direction=BACKWARD, seed=1)],
        )
    ],
}
