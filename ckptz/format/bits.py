"""Bytes and checksums. Implements spec/01-integers.md.

The only code that slices untrusted bytes. Every read names its field for the error of a truncated file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

from ckptz.errors import CorruptionError, TruncatedError

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]  # Python 3.12 and later

MAX_VARINT_BYTES = 10  # spec/01-integers.md#varint: 64 bits in groups of seven


def xxh64(data: Buffer) -> int:
    """Compute XXH64 of a contiguous buffer."""
    return int(xxhash.xxh64_intdigest(data))


def xxh64_of_parts(parts: Iterable[Buffer]) -> int:
    """Compute XXH64 of the concatenation of buffers."""
    digest = xxhash.xxh64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


def combine(checksums: Iterable[int]) -> int:
    """Compute a tensor's checksum: XXH64 over the checksums of its chunks, each as a little-endian u64."""
    return xxh64(b"".join([value.to_bytes(8, "little") for value in checksums]))


def checksum_of_chunk(patterns: Buffer) -> int:
    """Compute the checksum of a tensor of one chunk of patterns [n]."""
    return xxh64(xxh64(patterns).to_bytes(8, "little"))


class ByteReader:
    """A cursor over a buffer; all integers are little-endian."""

    __slots__ = ("_view", "offset")

    def __init__(self, source: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(source).cast("B")
        self.offset = 0

    @property
    def left(self) -> int:
        """Number of bytes not read yet."""
        return len(self._view) - self.offset

    def take(self, n_bytes: int, what: str) -> memoryview:
        """Return the next `n_bytes` bytes without copying them."""
        begin, end = self.offset, self.offset + n_bytes
        if not begin <= end <= len(self._view):
            raise TruncatedError(f"{what}: need {n_bytes} bytes at offset {begin}, have {self.left}")
        self.offset = end
        return self._view[begin:end]

    def peek(self) -> memoryview:
        """Return the unread bytes without copying or consuming them."""
        return self._view[self.offset :]

    def u8(self, what: str) -> int:
        """Read an unsigned 8-bit integer."""
        offset = self.offset
        if offset >= len(self._view):
            return self.take(1, what)[0]  # raises TruncatedError
        self.offset = offset + 1
        return self._view[offset]

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer."""
        return int.from_bytes(self.take(4, what), "little")

    def varint(self, what: str) -> int:
        """Read a varint: groups of seven bits, least significant first, in the shortest form."""
        value = self.u8(what)
        if value < 0x80:
            return value
        value &= 0x7F
        for i in range(1, MAX_VARINT_BYTES):
            byte = self.u8(what)
            value |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                if byte == 0:
                    raise CorruptionError(f"{what}: varint is not in its shortest form")
                if value >= 1 << 64:
                    break
                return value
        raise CorruptionError(f"{what}: varint exceeds 64 bits")

    def text(self, what: str) -> str:
        """Read UTF-8 text, preceded by its length in bytes (varint)."""
        raw = self.take(self.varint(what), what)
        try:
            return bytes(raw).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptionError(f"{what}: not valid UTF-8 ({error.reason})") from None

    def end(self, what: str) -> None:
        """Raise CorruptionError if unread bytes remain."""
        if self.left:
            raise CorruptionError(f"{what}: {self.left} bytes follow its end")


class ByteWriter:
    """Builds bytes; the methods are the inverses of those of `ByteReader`."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts = bytearray()

    def __len__(self) -> int:
        return len(self._parts)

    def raw(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes as they are."""
        self._parts += data

    def u8(self, value: int) -> None:
        """Write an unsigned 8-bit integer."""
        self._parts.append(value)

    def u32(self, value: int) -> None:
        """Write an unsigned 32-bit integer."""
        self._parts += struct.pack("<I", value)

    def u64(self, value: int) -> None:
        """Write an unsigned 64-bit integer."""
        self._parts += struct.pack("<Q", value)

    def varint(self, value: int) -> None:
        """Write an unsigned integer as a varint."""
        while value >= 0x80:
            self._parts.append(value & 0x7F | 0x80)
            value >>= 7
        self._parts.append(value)

    def text(self, value: str) -> None:
        """Write UTF-8 text, preceded by its length in bytes (varint)."""
        encoded = value.encode("utf-8")
        self.varint(len(encoded))
        self.raw(encoded)

    def getvalue(self) -> bytes:
        """Return all written bytes."""
        return bytes(self._parts)
