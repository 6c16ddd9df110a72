"""What is fuzzed: each target ends in a result or an error of ours. Imported under instrumentation.

Where a checksum guards what a parser reads, it is made right first, so that the parser is reached.
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
MAX_DECODED_BYTES: Final = 1 << 22  # what a user who fuzzes allows one tensor to take
SESSIONS: Final = sessions()


def _envelope(data: bytes) -> None:
    """A whole file, every tensor that is small enough decoded."""
    for source in open_checkpoint(MemoryBytes(data)).tensors.values():
        n_patterns = source.dtype.n_patterns(source.shape)
        if n_patterns * source.dtype.pattern_bytes <= MAX_DECODED_BYTES:
            source.patterns(0, n_patterns)


def _container(data: bytes) -> None:
    """The same, with right digests."""
    _envelope(_with_right_digests(data))


def _with_right_digests(data: bytes) -> bytes:
    """The digest of the index and the checksums of frame headers fit what they cover."""
    at = 8 + int.from_bytes(data[:8], "little")
    try:
        rows = json.loads(data[8:at])
        places = sorted(tuple(row["data_offsets"]) for row in rows.values() if "shape" in row)
        known = rows["__metadata__"]["ckptz.index_sha256"].encode()
        out = bytearray(data)
        for begin, end in places[:-1]:
            out[at + begin : at + end] = _with_right_checksum(bytes(out[at + begin : at + end]))
        begin, end = places[-1]
        digest = hashlib.sha256(out[at + begin : at + end]).hexdigest().encode()
        return bytes(out).replace(known, digest, 1) if len(known) == len(digest) else bytes(out)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return data


def _with_right_checksum(frame: bytes) -> bytes:
    length = int.from_bytes(frame[:4], "little")
    if not 12 <= length <= len(frame):
        return frame
    return frame[: length - 8] + xxh64(frame[: length - 8]).to_bytes(8, "little") + frame[length:]


def _index(data: bytes) -> None:
    parse_index(data)


def _frame(data: bytes) -> None:
    """A frame header with a right length and checksum, and its first chunk, on a base of zeros."""
    n_header = min(max(int.from_bytes(data[:4], "little"), 12), max(len(data), 12))
    frame = _with_right_checksum(n_header.to_bytes(4, "little") + data[4:].ljust(n_header - 4, b"\0"))
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
    """A message, signed again if its header is one; the first byte chooses the session."""
    row = SESSIONS[data[0] % len(SESSIONS)] if data else SESSIONS[0]
    message = data[1:]
    with contextlib.suppress(CkptzError):  # what is no header goes to the link as it is
        message = _signed(message)
    link = Link(row["src"], row["dst"], _policy(json.dumps(row["policy"])), kernels=wire_reference)
    array, dtype = np.frombuffer(message, np.uint8), dtype_of(row["dtype"])
    link.receive(Direction.FORWARD, array, dtype, tuple(row["shape"]), MessageKey(0))


@functools.cache
def _policy(text: str) -> LinkPolicy:
    return LinkPolicy.from_json(text)


def _signed(message: bytes) -> bytes:
    header, payload = LinkHeader.parse(message[:HEADER_BYTES]), message[HEADER_BYTES:]
    payload = payload.ljust(-(-len(payload) // 16) * 16, b"\0")
    fields: dict[str, Any] = {name: getattr(header, name) for name in LinkHeader.__slots__}
    checksum = wire_reference.checksum(np.frombuffer(payload, np.uint8))
    fields |= {"payload_bytes": len(payload), "checksum": checksum}
    return LinkHeader(**fields).pack() + payload


def _guarded(target: Target) -> Target:
    """Errors of ours are what a reader is to give."""

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
