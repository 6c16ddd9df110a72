"""The 64-byte header of every message. Implements spec/08-wire.md#header.

The header identifies the message and its length. This module knows no codecs, tensors or transports.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, Self

from ckptz.errors import ChecksumError, CorruptionError, TruncatedError, UnsupportedError
from ckptz.kernels.wire_arrays import mix_64

MAGIC: Final = 0x5A57  # "WZ"
VERSION: Final = 1
HEADER_BYTES: Final = 64
MASK_64: Final = 0xFFFFFFFFFFFFFFFF
_LAYOUT: Final = struct.Struct("<H6B4H8IQ")  # the header without its checksum


class Direction(IntEnum):
    """The direction of a message along a link."""

    FORWARD = 0
    BACKWARD = 1

    @property
    def word(self) -> str:
        """The direction in lower case, for messages and names."""
        return self.name.lower()


class Flag(IntFlag):
    """Bits of the header's flags: spec/08-wire.md#flags."""

    BACKWARD = 1
    REUSE = 2
    DELTA = 4
    NOT_FINITE = 16
    EVAL = 32
    UNDEFINED = 192


@dataclass(frozen=True, slots=True)
class LinkHeader:
    """The header of a message: spec/08-wire.md#header, fields in the order of their bytes."""

    codec: int  # id of the codec, spec/08-wire.md#codecs
    param: int  # bits of a code or of a TopK value
    dtype: int  # frame id of the element type
    flags: int
    src: int
    dst: int
    tensor: int
    mode: int  # encoding of the codec's variable part
    step: int
    microbatch: int
    state_seq: int  # number of earlier messages of the same state slot
    plan: int  # hash of codec, dtype and shape, equal at both ends
    n: int  # elements
    count: int  # number of TopK values, or of blocks
    payload_bytes: int
    batch: int  # hash of the sample ids, or 0
    checksum: int

    def pack(self) -> bytes:
        """Return the 64 bytes of the header."""
        body = _LAYOUT.pack(MAGIC, VERSION, HEADER_BYTES // 16, *dataclasses.astuple(self))
        return body + header_checksum(body).to_bytes(8, "little")

    @classmethod
    def parse(cls, raw: bytes | memoryview) -> Self:
        """Parse the 64 bytes of a header.

        Raises:
            FormatError: the bytes are not a valid header.
            UnsupportedError: a newer version wrote it.
        """
        if len(raw) < HEADER_BYTES:
            raise TruncatedError(
                f"header: the message has {len(raw)} bytes, fewer than the {HEADER_BYTES} of a header"
            )
        magic, version, length, *fields = _LAYOUT.unpack(raw[: _LAYOUT.size])
        if magic != MAGIC:
            raise CorruptionError("magic: these bytes are not a ckptz message")
        if header_checksum(raw[: _LAYOUT.size]) != int.from_bytes(raw[_LAYOUT.size : HEADER_BYTES], "little"):
            raise ChecksumError("header checksum: the header was changed on its way")
        if version != VERSION or length != HEADER_BYTES // 16:
            raise UnsupportedError(f"version: message version {version} is unknown; upgrade ckptz")
        header = cls(*fields)
        if header.flags & Flag.UNDEFINED:
            raise UnsupportedError(f"flags: {header.flags:#x} sets unknown flags; upgrade ckptz")
        return header


def header_checksum(body: bytes | memoryview) -> int:
    """Compute the checksum of the first seven 64-bit words of a header, as for a payload."""
    words = (int.from_bytes(body[i : i + 8], "little") for i in range(0, len(body), 8))
    steps = (word + (i + 1) * 0x9E3779B97F4A7C15 for i, word in enumerate(words))
    return sum(mix_64(step & MASK_64) for step in steps) & MASK_64
