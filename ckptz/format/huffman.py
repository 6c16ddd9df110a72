"""Huffman streams: code lengths, then four parts of a quarter of the codes each.

Implements spec/02-entropy.md#huffman. Encoding and decoding take at most half the time of rANS; streams of
exponents are one to two percent larger.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import CorruptionError
from ckptz.format.bits import ByteReader
from ckptz.kernels import cpu
from ckptz.kernels.floats import HUFFMAN_BITS, HUFFMAN_STREAMS, Bytes, Counts

SIZES: Final = struct.Struct(f"<{HUFFMAN_STREAMS - 1}I")  # bytes of all parts but the last
_FULL: Final = 1 << HUFFMAN_BITS  # sum of the shares of a complete code
# Share of a code word of each length, in units of the longest code word; 0 for unused symbols.
_SHARES: Final = np.array([0, *(_FULL >> n for n in range(1, HUFFMAN_BITS + 1)), *[0] * (15 - HUFFMAN_BITS)])


def pack_lengths(lengths: Bytes) -> bytes:
    """Pack code lengths [256] of at least two symbols into bytes: spec/02-entropy.md#code-lengths."""
    used = np.flatnonzero(lengths)
    first, last = int(used[0]), int(used[-1])
    halves = np.zeros((last - first) // 2 * 2 + 2, np.uint8)
    halves[: last - first + 1] = lengths[first : last + 1]
    return bytes((first, last)) + (halves[::2] | halves[1::2] << 4).tobytes()


def parse_lengths(source: ByteReader) -> Bytes:
    """Parse code lengths [256], the inverse of `pack_lengths`.

    Raises:
        FormatError: the code is incomplete or over-subscribed, or the bytes are truncated.
    """
    first, last = (source.u8(f"Huffman code lengths: {field}") for field in ("first", "last"))
    if last <= first:
        raise CorruptionError(f"Huffman stream: symbols {first}..{last}, a code needs at least two")
    n = last - first + 1
    packed = np.frombuffer(source.take(-(-n // 2), "Huffman code lengths"), np.uint8)
    halves = np.column_stack((packed & 15, packed >> 4)).reshape(-1)
    if halves.max() > HUFFMAN_BITS:
        raise CorruptionError(f"Huffman stream: a code word of {halves.max()} bits (limit {HUFFMAN_BITS})")
    if not halves[0] or not halves[n - 1] or halves[n:].any():
        raise CorruptionError("Huffman stream: code lengths begin or end with a symbol that has none")
    total = int(_SHARES[halves].sum())
    if total != _FULL:
        fault = "over-subscribed" if total > _FULL else "incomplete"
        raise CorruptionError(f"Huffman stream: its code is {fault}, {total} of {_FULL} words are taken")
    lengths = np.zeros(256, np.uint8)
    lengths[first : last + 1] = halves[:n]
    return lengths


def encode_huffman_streams(
    symbols: Bytes, ends: Counts, lengths: Bytes, n_bytes: Counts, packed_lengths: list[bytes]
) -> list[memoryview]:
    """Encode m concatenated streams.

    Args:
        symbols: codes of all streams, uint8 [n].
        ends: end of each stream in `symbols` [m].
        lengths: code lengths of each stream in bits [m, 256].
        n_bytes: upper bounds of the encoded sizes, without headers [m].
        packed_lengths: the packed code lengths of each stream.

    Returns:
        The encoded streams.
    """
    n_heads = np.array([len(packed) + SIZES.size for packed in packed_lengths])
    coded, spans = cpu().huffman_encode(symbols, ends, lengths, n_heads, n_bytes)
    streams = []
    for packed, (begin, *cuts) in zip(packed_lengths, spans.tolist(), strict=True):
        stream = coded.data[begin : cuts[-1]]
        stream[: len(packed)] = packed
        SIZES.pack_into(stream, len(packed), *np.diff(cuts[:-1]))
        streams.append(stream)
    return streams


def parse_parts(source: ByteReader) -> tuple[Bytes, NDArray[np.int64]]:
    """Parse the four parts that follow the code lengths of a stream.

    Returns:
        (bytes of all parts, end of each part [4]).

    Raises:
        FormatError: the recorded sizes exceed the stream.
    """
    sizes = SIZES.unpack(source.take(SIZES.size, "Huffman part sizes"))
    parts = np.frombuffer(source.take(source.left, "Huffman parts"), np.uint8)
    if sum(sizes) > len(parts):
        raise CorruptionError(f"Huffman stream: {sum(sizes)} bytes in the first parts, {len(parts)} are left")
    return parts, np.array([*np.cumsum(sizes), len(parts)], np.int64)


def decode_huffman(source: ByteReader, out: Bytes) -> None:
    """Decode a Huffman stream, the remaining bytes of `source`, into `out`, uint8 [n].

    Raises:
        FormatError: the bytes are not a stream of n codes.
    """
    lengths = parse_lengths(source)
    parts, ends = parse_parts(source)
    if not cpu().huffman_decode(parts, ends, lengths, out):
        raise CorruptionError("Huffman stream: a part does not end with its last code")
