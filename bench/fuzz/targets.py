"""Targets of the coverage-guided fuzzer; imported under instrumentation.

Each target must end in a result or a CkptzError. Checksums are corrected before parsing, so that mutated
inputs reach the code behind them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from bench.fuzz.seeds import sessions
from ckptz.errors import CkptzError
from ckptz.format.bits import xxh64
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.decode import decode_chunk
from ckptz.format.dtypes import dtype_of
from ckptz.format.envelope import strict_json
from ckptz.format.frame import FrameHeader
from ckptz.format.index import parse_index
from ckptz.format.sources import CHUNK_VALUES, PATTERN_TYPES, ArraySource, ChunkSources
from ckptz.state.skeleton import parse_tree
from ckptz.store.resolve import open_checkpoint
from ckptz.wire.endpoint import Link
from ckptz.wire.header import HEADER_BYTES, Direction, LinkHeader
from ckptz.wire.policy import LinkPolicy
from ckptz.wire.state import MessageKey
from tests.support import wire_reference

Target = Callable[[bytes], None]
MAX_DECODED_BYTES: Final = 1 << 22  # larger tensors are not decoded, to bound the time of an execution
SESSIONS: Final = sessions()


def _envelope(data: bytes) -> None:
    """Open a file and decode each tensor of at most MAX_DECODED_BYTES."""
    for source in open_checkpoint(MemoryBytes(data)).tensors.values():
        n_patterns = source.dtype.n_patterns(source.shape)
        if n_patterns * source.dtype.pattern_bytes <= MAX_DECODED_BYTES:
            source.patterns(0, n_patterns)


def _container(data: bytes) -> None:
    """Open and decode a file after its checksums were corrected."""
    _envelope(with_valid_checksums(data))


def with_valid_checksums(data: bytes) -> bytes:
    """Return a file with corrected index digest and frame checksums, or `data` if it cannot be parsed."""
    at = 8 + int.from_bytes(data[:8], "little")
    try:
        rows = json.loads(data[8:at])
        offsets = sorted(tuple(row["data_offsets"]) for row in rows.values() if "shape" in row)
        stored = rows["__metadata__"]["ckptz.index_sha256"].encode()
        out = bytearray(data)
        for begin, end in offsets[:-1]:
            out[at + begin : at + end] = _with_valid_checksum(bytes(out[at + begin : at + end]))
        begin, end = offsets[-1]
        digest = hashlib.sha256(out[at + begin : at + end]).hexdigest().encode()
        return bytes(out).replace(stored, digest, 1) if len(stored) == len(digest) else bytes(out)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return data


def _with_valid_checksum(frame: bytes) -> bytes:
    length = int.from_bytes(frame[:4], "little")
    if not 12 <= length <= len(frame):
        return frame
    return frame[: length - 8] + xxh64(frame[: length - 8]).to_bytes(8, "little") + frame[length:]


def _index(data: bytes) -> None:
    parse_index(data)


def _frame(data: bytes) -> None:
    """Parse a frame header with corrected length and checksum, and decode its first chunk on a zero base."""
    n_header = min(max(int.from_bytes(data[:4], "little"), 12), max(len(data), 12))
    frame = _with_valid_checksum(n_header.to_bytes(4, "little") + data[4:].ljust(n_header - 4, b"\0"))
    header = FrameHeader.parse(frame[:n_header])
    if not header.chunks or header.n_patterns * header.dtype.pattern_bytes > MAX_DECODED_BYTES:
        return
    out = np.empty(min(header.n_patterns, CHUNK_VALUES), PATTERN_TYPES[header.dtype.pattern_bytes])
    base = ArraySource(header.dtype, header.shape, np.zeros_like(out))
    payload = np.frombuffer(frame[n_header:], np.uint8)[: header.chunks[0].n_bytes].copy()
    contexts = dict.fromkeys(header.plan.context_tensor_names, base)
    decode_chunk(header, 0, payload, ChunkSources(0, len(out), base, contexts), out)


def _tree(data: bytes) -> None:
    parse_tree(strict_json(data, "tree"))


def _wire(data: bytes) -> None:
    """Receive a message in the session that the first byte selects, with its checksum corrected."""
    row = SESSIONS[data[0] % len(SESSIONS)] if data else SESSIONS[0]
    message = data[1:]
    with contextlib.suppress(CkptzError):  # a message without a valid header is received unchanged
        message = _with_payload_checksum(message)
    link = Link(row["src"], row["dst"], _policy(json.dumps(row["policy"])), kernels=wire_reference)
    array, dtype = np.frombuffer(message, np.uint8), dtype_of(row["dtype"])
    link.receive(Direction.FORWARD, array, dtype, tuple(row["shape"]), MessageKey(0))


@functools.cache
def _policy(text: str) -> LinkPolicy:
    return LinkPolicy.from_json(text)


def _with_payload_checksum(message: bytes) -> bytes:
    header, payload = LinkHeader.parse(message[:HEADER_BYTES]), message[HEADER_BYTES:]
    payload = payload.ljust(-(-len(payload) // 16) * 16, b"\0")
    fields: dict[str, Any] = {name: getattr(header, name) for name in LinkHeader.__slots__}
    checksum = wire_reference.checksum(np.frombuffer(payload, np.uint8))
    fields |= {"payload_bytes": len(payload), "checksum": checksum}
    return LinkHeader(**fields).pack() + payload


def _guarded(target: Target) -> Target:
    """Ignore CkptzError, which a parser must raise for invalid inputs."""

    def run(data: bytes) -> None:
        with contextlib.suppress(CkptzError):
            target(data)

    return run


TARGETS: Final[Mapping[str, Target]] = {
    "envelope": _guarded(_envelope),
    "container": _guarded(_container),
    "index": _guarded(_index),
    "frame": _guarded(_frame),
    "tree": _guarded(_tree),
    "wire": _guarded(_wire),
}
