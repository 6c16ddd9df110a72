"""Streams: the codes of one plane of one chunk, encoded by the coder with the smallest result.

Implements spec/02-entropy.md#streams. rANS with shared tables takes tables and segments from the frame; all
other coders need only the stream.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from ckptz.errors import CorruptionError, UnsupportedError
from ckptz.format.bits import ByteReader, ByteWriter
from ckptz.format.frequency import (
    encoding_tables,
    entropy_bits,
    normalise,
    pack_tables,
    parse_table,
    row_cost_bits,
    row_entropy_bits,
    slot_tables,
)
from ckptz.format.huffman import SIZES, decode_huffman, encode_huffman_streams, pack_lengths
from ckptz.kernels import cpu
from ckptz.kernels.floats import MAX_GAP_BYTE, Bytes, Counts, Frequencies, Positions, Reals


class CoderId(IntEnum):
    """Ids of the entropy coders: spec/registry.md#coders."""

    CONSTANT = 0
    STORED = 1
    ZSTD = 2
    RANS_SHARED = 3
    RANS_OWN = 4
    SPARSE = 5
    HUFFMAN = 7  # 6 will never be a coder


CODERS: Final = frozenset(map(int, CoderId))
# Coders that only code streams of chunks may use.
OF_CODE_STREAMS: Final = frozenset({CoderId.RANS_SHARED, CoderId.HUFFMAN})
LANE_CHOICES: Final = (1, 4, 32)  # spec/02-entropy.md#lanes; the stream has the index
MAX_ZSTD_WINDOW: Final = 8 << 20  # spec/02-entropy.md#streams; or the length of the stream if larger
LANE_MIN_BYTES: Final = (0, 400, 6400)  # encoder only: keeps lane states near 2 % of the stream

# Encoder only. A plane that gains less is stored, because decoding would be ten times slower.
MIN_GAIN: Final = 1 / 128
ZSTD_LEVEL: Final = 3
ZSTD_SAMPLE: Final = 1 << 14
ZSTD_SAMPLE_LEVEL: Final = 1
ZSTD_MIN_GAIN: Final = 0.95  # zstd must reach this share of the best other coder on a sample
# zstd is not tried if a lower bound of its size, from entropy and repeats, is above this share.
ZSTD_MAY_GAIN: Final = 0.96
MATCH_BITS: Final = 20  # cost of a repeat
ZSTD_HEAD: Final = 32  # size of headers and tables in bytes
QUICK_BITS: Final = 5  # bits per code from which zstd has few matches to try, so is fast
QUICK_CODES: Final = 1 << 13  # for shorter streams, zstd's smaller tables may gain more than repeats
SPARSE_MIN_SHARE: Final = 0.97
HUFFMAN_CODES: Final = 1 << 12  # shortest stream; for shorter ones making the table takes longer than rANS
HUFFMAN_HEAD: Final = SIZES.size + 4  # bytes of part sizes, and of padding bits
# Low bytes of weights have 7.96 to 7.976 bits of entropy; MIN_GAIN needs 7.94.
RANDOM_MIN: Final = 1 << 14
RANDOM_BITS: Final = 7.956
SAMPLE_BIAS: Final = 255 / 2 * math.log2(math.e)  # bits that a sample of random bytes seems to have less
SHORTEST: Final = 9  # codes of a stream that a table of 8 bytes, or zstd, may reduce
ALONE_MIN: Final = 1 << 17  # codes of a stream that is passed to kernels without copying it


Stream = tuple[CoderId, bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a stream whose codes are sorted by context, with the frequency table of each."""

    ends: NDArray[np.int64]  # index after the last code of each segment, ascending
    table_of: NDArray[np.int64]  # the table of each segment
    tables: Frequencies  # frequencies [n_tables, 256]
    slots: NDArray[np.uint32] | None = field(default=None, repr=False)  # decoding tables [n_tables, 4096]


_local = threading.local()  # zstd contexts are expensive to create and not thread-safe


def _zstd_compress(symbols: Bytes, level: int = ZSTD_LEVEL) -> bytes:
    if not hasattr(_local, "compressors"):
        _local.compressors = {
            n: zstandard.ZstdCompressor(n, write_checksum=False) for n in (ZSTD_LEVEL, ZSTD_SAMPLE_LEVEL)
        }
    compressed: bytes = _local.compressors[level].compress(symbols)
    return compressed


# --- rANS ---------------------------------------------------------------------------------------


def n_lanes_for(n_bytes: float) -> int:
    """Return the number of lanes for a stream of about `n_bytes` bytes."""
    return LANE_CHOICES[bisect.bisect_right(LANE_MIN_BYTES, n_bytes) - 1]


def encode_rans(symbols: Bytes, segments: Segments, expected_bytes: float) -> memoryview:
    """Encode symbols [n]: lane index u8, lane states u32 each, words u16 each."""
    [stream] = encode_rans_streams(
        symbols,
        np.zeros(1, np.int64),
        np.array([len(segments.ends)]),
        segments,
        np.array([n_lanes_for(expected_bytes)]),
        [b""],
    )
    return stream


def encode_rans_streams(
    symbols: Bytes,
    begins: Counts,
    stream_segments: Counts,
    segments: Segments,
    n_lanes: Counts,
    packed_tables: Sequence[bytes],
) -> list[memoryview]:
    """Encode m streams with rANS.

    Args:
        symbols: concatenated codes of all streams [n].
        begins: begin of each stream in `symbols` [m].
        stream_segments: number of segments up to the end of each stream [m].
        segments: segments of all streams, with ends in `symbols`.
        n_lanes: number of lanes of each stream [m].
        packed_tables: first bytes of each stream.

    Returns:
        The encoded streams.
    """
    choices = map(LANE_CHOICES.index, n_lanes.tolist())
    heads = [head + bytes((choice,)) for head, choice in zip(packed_tables, choices, strict=True)]
    coded, spans = cpu().rans_encode(
        symbols,
        begins,
        stream_segments,
        segments.ends,
        segments.table_of,
        encoding_tables(segments.tables),
        n_lanes,
        np.frombuffer(bytearray(b"".join(heads)), np.uint8),
        np.array([*itertools.accumulate(map(len, heads))]),
    )
    return [coded.data[i:j] for i, j in spans.tolist()]


def parse_rans(source: ByteReader) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Parse the remaining bytes of `source` as rANS: lane states [n_lanes] and words [n]."""
    index = source.u8("rANS lanes")
    if index >= len(LANE_CHOICES):
        raise CorruptionError(f"rANS stream: lane index {index} is not defined")
    states = np.frombuffer(source.take(4 * LANE_CHOICES[index], "rANS lane states"), "<u4")
    if source.left % 2:
        raise CorruptionError("rANS stream: an odd number of bytes follows the lane states")
    words = np.frombuffer(source.take(source.left, "rANS words"), "<u2")
    if (states < 1 << 16).any():
        raise CorruptionError("rANS stream: a lane state is below 2^16")
    return states, words


def decode_rans(source: ByteReader, segments: Segments, out: Bytes) -> None:
    """Decode the remaining bytes of `source` as rANS into `out`, uint8 [n]."""
    states, words = parse_rans(source)
    slots = slot_tables(segments.tables) if segments.slots is None else segments.slots
    if not cpu().rans_decode(words, states, segments.ends, segments.table_of, slots, out):
        raise CorruptionError("rANS stream does not end in its start state")


def _decode_own(source: ByteReader, out: Bytes) -> None:
    whole = Segments(np.array([len(out)], np.int64), np.zeros(1, np.int64), parse_table(source)[None])
    decode_rans(source, whole, out)


# --- sparse -------------------------------------------------------------------------------------


def pack_gaps(positions: Positions) -> Bytes:
    """Pack ascending positions [n] as gaps, the number of skipped codes before each.

    A gap is gap // 255 bytes of 255, then a byte with the remainder.
    """
    return _pack_gaps(positions, np.array([len(positions)]))[0]


def _pack_gaps(positions: Positions, ends: Counts) -> tuple[Bytes, Counts]:
    """Pack the gaps of m streams, given the end of each in `positions`; positions are those in the stream.

    Returns:
        (concatenated gaps, end of each stream [m]).
    """
    gaps = positions - 1
    gaps[1:] -= positions[:-1]
    firsts = np.concatenate(([0], ends[:-1]))
    firsts = firsts[firsts < ends]
    gaps[firsts] = positions[firsts]
    n_full = gaps // MAX_GAP_BYTE
    packed_ends = np.cumsum(n_full + 1)
    packed = np.full(packed_ends[-1] if len(gaps) else 0, MAX_GAP_BYTE, np.uint8)
    packed[packed_ends - 1] = gaps - n_full * MAX_GAP_BYTE
    return packed, np.concatenate(([0], packed_ends))[ends]


def unpack_gaps(gaps: Bytes, n_positions: int, n: int) -> Positions:
    """Unpack positions [n_positions] below `n`, the inverse of `pack_gaps`.

    Raises:
        CorruptionError: the gaps are not valid positions.
    """
    is_last = gaps != MAX_GAP_BYTE
    positions = np.cumsum(gaps, dtype=np.int64)[is_last] + np.arange(np.count_nonzero(is_last))
    is_whole = len(positions) == n_positions and (not len(gaps) or bool(is_last[-1]))
    if not is_whole or (n_positions and positions[-1] >= n):
        raise CorruptionError("sparse stream: gaps and values do not agree")
    return positions


def encode_sparse(gaps: Bytes, values: Bytes) -> bytes:
    """Encode a sparse stream with the common symbol 0, from the bytes of gaps [m] and values [k]."""
    return _packed_sparse(0, [(part, encode_stream(part, nested=True)) for part in (gaps, values)])


def _packed_sparse(common: int, parts: Iterable[tuple[Bytes, Stream]]) -> bytes:
    """Pack a sparse stream: common symbol u8, and the parts (gaps, values) as counted embedded streams."""
    out = ByteWriter()
    out.u8(common)
    for part, stream in parts:
        out.varint(len(part))
        Embedded(stream[0], bytes(stream[1])).write(out)
    return out.getvalue()


def read_sparse(source: ByteReader, n: int) -> tuple[int, Positions, Bytes]:
    """Decode a sparse stream of `n` codes.

    Returns:
        (the common code, positions of the other codes [k], the other codes [k]).

    Raises:
        FormatError: the stream is damaged.
    """
    common = source.u8("sparse common symbol")
    # Each value has one gap byte below 255, and gaps of 255 skip 255 codes each.
    most = (n + n // 255 + 1, n)
    parts = []
    for what, limit in zip(("sparse gaps", "sparse values"), most, strict=True):
        n_symbols = source.varint(f"{what}: count")
        if n_symbols > limit:
            raise CorruptionError(f"{what}: {n_symbols} symbols in a stream of {n}")
        parts.append(read_embedded(source, n_symbols, what, nested=True))
    source.end("sparse stream")
    gaps, values = parts
    return common, unpack_gaps(gaps, len(values), n), values


def _decode_sparse(source: ByteReader, out: Bytes) -> None:
    out[:], positions, values = read_sparse(source, len(out))
    out[positions] = values


# --- any stream ---------------------------------------------------------------------------------


def encode_stream(symbols: Bytes, *, nested: bool = False) -> Stream:
    """Encode a stream with the coder without shared tables that gives the smallest result.

    Args:
        symbols: codes [n], n at least 1; a stored stream shares their memory.
        nested: True inside a sparse stream, which must not contain another one.
    """
    [coded] = encode_streams([symbols], nested=nested)
    return coded


def encode_streams(
    parts: Sequence[Bytes],
    counts: Counts | None = None,
    *,
    nested: bool = False,
    beats: Sequence[float] | None = None,
    huffman_margin: float | None = None,
) -> list[Stream]:
    """Encode m streams like `encode_stream`, with few kernel calls for all of them.

    Args:
        parts: codes of each stream.
        counts: histograms [m, 256], if the caller has them.
        nested: True inside a sparse stream.
        beats: with `counts`, the size in bytes of the caller's alternative for each stream.
        huffman_margin: for code streams, the share of bytes that Huffman may take beyond the entropy; None
            excludes Huffman.
    """
    return _Coders(parts, counts, beats, huffman_margin, nested=nested).encoded(range(len(parts)))


class _Coders:
    """The coders of m streams, chosen before streams with tables of their own are encoded.

    Arguments are those of `encode_streams`.
    """

    def __init__(
        self,
        parts: Sequence[Bytes],
        counts: Counts | None = None,
        beats: Sequence[float] | None = None,
        huffman_margin: float | None = None,
        *,
        nested: bool,
    ) -> None:
        self._parts = parts
        # Streams that need no table, by number.
        self._streams = {k: _short(part) for k, part in enumerate(parts) if len(part) < SHORTEST}
        if counts is None:
            self._streams |= {k: (CoderId.STORED, parts[k].data) for k in _random_streams(parts)}
            counts = np.zeros((len(parts), 256), np.int64)
            for at in _kernel_calls(parts, self._left()):
                counts[at] = cpu().count_streams(*joined([parts[k] for k in at]))
        commons, peaks = counts.argmax(axis=1).tolist(), counts.max(axis=1).tolist()
        constant = [k for k in self._left() if peaks[k] == len(parts[k])]
        self._streams |= {k: (CoderId.CONSTANT, bytes((commons[k],))) for k in constant}
        if left := self._left():
            self._tables = _OwnTables([*map(len, parts)], counts, left, huffman_margin)
            limits = [own.n_bytes if own.pays else own.n for own in self._tables.owns]
            if beats is not None:
                limits = [*map(min, limits, beats)]
            sparse = {} if nested else _encode_sparse(parts, left, commons, peaks, limits)
            self._add_others(left, limits, sparse)

    def _left(self) -> list[int]:
        """Return the numbers of the streams that are not encoded yet."""
        return [k for k in range(len(self._parts)) if k not in self._streams]

    def _add_others(self, left: Sequence[int], limits: Sequence[float], sparse: Mapping[int, bytes]) -> None:
        """Encode the streams `left` that another coder makes smaller than their limits and own tables."""
        middles, owns = [middle_of(self._parts[k]) for k in left], [self._tables.owns[k] for k in left]
        for k, middle, own, least in zip(left, middles, owns, _least_zstd(middles, owns), strict=True):
            stream = _by_other_coder(self._parts[k], middle, own, sparse.get(k), least, limits[k])
            if stream is not None:
                self._streams[k] = stream

    def least_bytes(self, k: int) -> float:
        """Return a lower bound of the size of stream `k` in bytes."""
        return len(self._streams[k][1]) if k in self._streams else self._tables.owns[k].least_bytes

    def encoded(self, which: Sequence[int]) -> list[Stream]:
        """Return the streams `which`; those left are encoded with their own tables."""
        for at in _kernel_calls(self._parts, [k for k in which if k not in self._streams]):
            self._streams |= self._tables.encode(self._parts, at)
        return [self._streams[k] for k in which]


def _short(symbols: Bytes) -> Stream:
    """Encode a stream that is too short for tables and for zstd."""
    codes = symbols.tobytes()
    return (CoderId.CONSTANT, codes[:1]) if codes.count(codes[0]) == len(codes) else (CoderId.STORED, codes)


def _kernel_calls(parts: Sequence[Bytes], which: Sequence[int]) -> list[list[int]]:
    """Group stream numbers into kernel calls: small streams together (copied), large ones alone."""
    small = [k for k in which if len(parts[k]) < ALONE_MIN]
    return [small] * bool(small) + [[k] for k in which if len(parts[k]) >= ALONE_MIN]


class _OwnTables:
    """The rANS or Huffman table of each of m streams, where a table may reduce the size.

    Args:
        sizes: number of codes of each stream.
        counts: histograms [m, 256].
        left: streams that may have a table, all with at least two symbols.
        huffman_margin: see `encode_streams`.

    Attributes:
        owns: estimated size of each stream with its own table.
    """

    def __init__(
        self, sizes: Sequence[int], counts: Counts, left: Sequence[int], huffman_margin: float | None
    ) -> None:
        estimates = zip(sizes, least_packed(counts).tolist(), row_entropy_bits(counts).tolist(), strict=True)
        self.owns = [OwnTable.of(*each) for each in estimates]
        self._packed, self._huffman = [b""] * len(sizes), set[int]()
        paying = [k for k in left if self.owns[k].pays]
        if huffman_margin is not None:
            several = [k for k in paying if self.owns[k].may_be_huffman(huffman_margin)]
            self._add_huffman(several, counts, huffman_margin)
        self._add_rans([k for k in paying if k not in self._huffman], counts)

    def _add_huffman(self, at: list[int], counts: Counts, margin: float) -> None:
        """Compute code lengths for the streams `at`, and choose Huffman where it is within the margin."""
        if not at:
            return
        self._lengths = np.zeros(counts.shape, np.uint8)
        self._lengths[at] = cpu().huffman_lengths(counts[at])
        all_bits = (counts[at] * self._lengths[at]).sum(axis=1).tolist()
        for k, n_bits in zip(at, all_bits, strict=True):
            packed, ideal = pack_lengths(self._lengths[k]), self.owns[k]
            n_bytes = n_bits / 8 + len(packed) + HUFFMAN_HEAD
            if n_bytes <= (1 + margin) * ideal.n_bytes:
                self._packed[k] = packed
                self._huffman.add(k)
                self.owns[k] = OwnTable(ideal.n, n_bytes, ideal.bits)

    def _add_rans(self, at: list[int], counts: Counts) -> None:
        if not at:
            return
        own_counts = counts[at]
        frequencies = normalise(own_counts)
        self._frequencies = np.zeros(counts.shape, np.uint16)
        self._frequencies[at] = frequencies
        tables_bits = row_cost_bits(own_counts, frequencies).tolist()
        for k, table, bits in zip(at, cut(*pack_tables(frequencies)), tables_bits, strict=True):
            self._packed[k] = table.tobytes()
            self.owns[k] = OwnTable.of(self.owns[k].n, len(table), bits)

    def encode(self, parts: Sequence[Bytes], at: Sequence[int]) -> dict[int, Stream]:
        """Encode the streams `at` with their tables; return them by number."""
        streams = dict[int, Stream]()
        for coder in (CoderId.HUFFMAN, CoderId.RANS_OWN):
            which = [k for k in at if (k in self._huffman) == (coder is CoderId.HUFFMAN)]
            if not which:
                continue
            symbols, ends = joined([parts[k] for k in which])
            packed, sizes = [self._packed[k] for k in which], [self.owns[k].n_bytes for k in which]
            if coder is CoderId.HUFFMAN:
                n_bytes = np.array([*map(math.ceil, sizes)])
                coded = encode_huffman_streams(symbols, ends, self._lengths[which], n_bytes, packed)
            else:
                segments = Segments(ends, np.arange(len(which)), self._frequencies[which])
                begins, n_segments = np.concatenate(([0], ends[:-1])), np.arange(1, len(which) + 1)
                lanes = np.array([*map(n_lanes_for, sizes)])
                coded = encode_rans_streams(symbols, begins, n_segments, segments, lanes, packed)
            streams |= {k: (coder, stream) for k, stream in zip(which, coded, strict=True)}
        return streams


def least_packed(counts: Counts) -> Counts:
    """Return a lower bound [n] of the packed size in bytes of tables for counts [n, 256].

    Each symbol from the first to the last takes at least one bit.
    """
    used = counts > 0
    least: Counts = 3 + (255 - used.argmax(axis=1) - used[:, ::-1].argmax(axis=1)) // 8
    return least


def _encode_sparse(
    parts: Sequence[Bytes],
    left: Sequence[int],
    commons: Sequence[int],
    peaks: Sequence[int],
    limits: Sequence[float],
) -> dict[int, bytes]:
    """Encode streams `left` with one dominant code as sparse, if that may be below their limits, by number.

    Args:
        parts: all streams.
        left: numbers of streams.
        commons: the most frequent code of each stream.
        peaks: its occurrences.
        limits: size in bytes of the best other coder.
    """
    at = [k for k in left if SPARSE_MIN_SHARE * len(parts[k]) <= peaks[k]]
    if not at:
        return {}
    others = [np.flatnonzero(parts[k] != commons[k]) for k in at]
    values = [parts[k][positions] for k, positions in zip(at, others, strict=True)]
    splits = [*itertools.chain.from_iterable(zip(cut(*_pack_gaps(*joined(others))), values, strict=True))]
    coders = _Coders(splits, nested=True)
    least = [*map(coders.least_bytes, range(len(splits)))]
    which = [i for i, k in enumerate(at) if least[2 * i] + least[2 * i + 1] < limits[k]]
    numbers = [j for i in which for j in (2 * i, 2 * i + 1)]
    coded = iter(zip([splits[j] for j in numbers], coders.encoded(numbers), strict=True))
    return {at[i]: _packed_sparse(commons[at[i]], (next(coded), next(coded))) for i in which}


def joined(parts: Sequence[Any]) -> tuple[Any, Counts]:
    """Concatenate m arrays; return the result and the end of each [m]. A single array is not copied."""
    if len(parts) == 1:
        return parts[0], np.array([len(parts[0])])
    return np.concatenate(parts), np.array([*itertools.accumulate(map(len, parts))])


def cut(parts: Any, ends: Counts) -> list[Any]:
    """Split an array [n] at `ends` [m]; the last end is n."""
    return [parts[i:j] for i, j in itertools.pairwise((0, *ends.tolist()))]


def _by_other_coder(
    symbols: Bytes, middle: Bytes, own: OwnTable, sparse: bytes | None, least: float, limit: float
) -> Stream | None:
    """Encode a stream with another coder; return None if its own table gives the smallest result."""
    candidates: list[tuple[CoderId, bytes]] = [] if sparse is None else [(CoderId.SPARSE, sparse)]
    if zstd_promises(middle, own.n, limit, least):
        candidates.append((CoderId.ZSTD, _zstd_compress(symbols)))
    coder, stream = min(candidates, key=lambda c: len(c[1]), default=(CoderId.STORED, b""))
    if candidates and len(stream) < limit:
        return coder, stream
    return (CoderId.STORED, symbols.data) if not own.pays or own.n_bytes > limit else None


@dataclass(frozen=True, slots=True)
class OwnTable:
    """Estimated size of a stream of n codes with its own table."""

    n: int
    n_bytes: float  # size of the stream
    bits: float  # size of the encoded codes alone, in bits

    @property
    def pays(self) -> bool:
        """True if the stream is sufficiently smaller than the codes."""
        return self.n_bytes < self.n * (1 - MIN_GAIN)

    @property
    def least_bytes(self) -> float:
        """Lower bound of the size of the encoded stream with a rANS table.

        A step of a coder with state x takes up to log2(x / (x - x mod f)) bits less than the ideal, at most
        0.023 without a word and 0.18 with one; and 16 of the 32 bits of each state may be zeros.
        """
        return 0.98 * self.n_bytes - self.n / 256 - 2 * n_lanes_for(self.n_bytes)

    def may_be_huffman(self, margin: float) -> bool:
        """Return whether a Huffman table may be within the margin; its codes have at least one bit each."""
        return HUFFMAN_CODES <= self.n <= 8 * (1 + margin) * self.n_bytes

    @classmethod
    def of(cls, n: int, n_packed: int, bits: float) -> OwnTable:
        """Estimate a stream of `n` codes of `bits` bits with a table of `n_packed` bytes."""
        n_bytes = bits / 8
        n_bytes += n_packed + 1 + 4 * n_lanes_for(n_bytes)
        return cls(n, n_bytes, bits)


def middle_of(symbols: Bytes) -> Bytes:
    """Return the middle of an array [n], the sample for zstd."""
    begin = max((len(symbols) - ZSTD_SAMPLE) // 2, 0)
    return symbols[begin : begin + ZSTD_SAMPLE]


def _random_streams(parts: Sequence[Bytes]) -> set[int]:
    """Find the streams whose samples have almost eight bits of entropy and no repeats."""
    at = [k for k, part in enumerate(parts) if len(part) >= RANDOM_MIN]
    if not at:
        return set()
    counts = cpu().count_streams(*joined([_spread_of(parts[k]) for k in at]))
    are_even = are_random(row_entropy_bits(counts), counts.sum(axis=1))
    return {
        k
        for k in itertools.compress(at, are_even.tolist())
        if not zstd_promises(middle_of(parts[k])[: len(parts[k]) // 16], len(parts[k]), len(parts[k]))
    }


def are_random(bits: Reals, sizes: Any) -> NDArray[np.bool_]:
    """Return whether samples of `sizes` [...] codes, with entropies `bits` [...], are almost random."""
    is_random: NDArray[np.bool_] = bits + SAMPLE_BIAS > RANDOM_BITS * sizes
    return is_random


def _spread_of(symbols: Bytes) -> Bytes:
    """Copy 64 evenly spaced pieces of codes [n], of 64 to 512 codes each."""
    n = len(symbols)
    return symbols[: n // 64 * 64].reshape(64, -1)[:, : min(max(n >> 10, 64), 512)].reshape(-1)


def _least_zstd(middles: Sequence[Bytes], owns: Sequence[OwnTable]) -> list[float]:
    """Return lower bounds in bytes of zstd's size for samples [n] of streams; 0 where trying zstd is fast."""
    samples = [
        m if own.bits < QUICK_BITS * own.n and own.n >= QUICK_CODES else m[:0]
        for m, own in zip(middles, owns, strict=True)
    ]
    if not any(map(len, samples)):
        return [0.0] * len(samples)
    least = []
    for sample, own, (hits, runs) in zip(
        samples, owns, cpu().repeats(*joined(samples)).tolist(), strict=True
    ):
        per_code = own.bits / own.n
        saved = max((hits + 7 * runs) * per_code - runs * MATCH_BITS, 0)
        least.append((len(sample) * per_code - saved) / 8 + ZSTD_HEAD if len(sample) else 0)
    return least


def repeats(sample: Bytes) -> bool:
    """Return whether zstd is smaller than the order-0 entropy on a sample [n]."""
    own = OwnTable.of(len(sample), 0, entropy_bits(cpu().histogram(sample)))
    return zstd_promises(sample, own.n, own.bits / 8, *_least_zstd([sample], [own]))


def zstd_promises(middle: Bytes, n: int, other_bytes: float, least: float = 0) -> bool:
    """Predict from a sample [m] of n codes whether zstd takes less than `other_bytes` bytes."""
    other_bytes *= len(middle) / n
    if least > ZSTD_MAY_GAIN * other_bytes:
        return False
    return len(_zstd_compress(middle, ZSTD_SAMPLE_LEVEL)) < ZSTD_MIN_GAIN * other_bytes


def check_coder(coder: int, *, is_of_codes: bool) -> None:
    """Refuse unknown coders, and coders that only code streams may use.

    Args:
        coder: the coder id.
        is_of_codes: True for a code stream of a chunk.
    """
    if coder not in CODERS:
        raise UnsupportedError(f"coder {coder} is not known to this ckptz; upgrade it")
    if coder in OF_CODE_STREAMS and not is_of_codes:
        name = CoderId(coder).name.lower().replace("_", "-")
        raise CorruptionError(f"coder {name} is only for code streams")


def decode_stream(coder: int, stream: memoryview, out: Bytes, segments: Segments | None = None) -> None:
    """Decode one stream into `out`.

    Args:
        coder: a CoderId accepted by `check_coder`.
        stream: the bytes of the stream.
        out: receives the codes, uint8 [n], in context order if `segments` is passed.
        segments: segments for RANS_SHARED.

    Raises:
        FormatError: the bytes are not a stream of n codes.
    """
    if not len(out) and (coder != CoderId.STORED or len(stream)):
        raise CorruptionError("a stream of no codes must be stored and have no bytes")
    if coder == CoderId.RANS_SHARED:
        if segments is None:
            raise CorruptionError("a stream uses the tensor's tables, and the frame has none")
        decode_rans(ByteReader(stream), segments, out)
        return
    _DECODERS[coder](ByteReader(stream), out)


@dataclass(frozen=True, slots=True)
class Embedded:
    """An encoded embedded stream."""

    coder: int
    stream: bytes

    @classmethod
    def of(cls, symbols: Bytes) -> Embedded:
        """Encode symbols [n]."""
        [stored] = cls.of_all([symbols])
        return stored

    @classmethod
    def of_all(cls, parts: Sequence[Bytes]) -> list[Embedded]:
        """Encode streams of symbols [n] with few kernel calls for all of them."""
        coded = iter(encode_streams([part for part in parts if len(part)]))
        streams = [next(coded) if len(part) else (CoderId.STORED, b"") for part in parts]
        return [cls(coder, bytes(stream)) for coder, stream in streams]

    def write(self, out: ByteWriter) -> None:
        """Write coder, length and stream: spec/02-entropy.md#embedded-streams."""
        out.u8(self.coder)
        out.varint(len(self.stream))
        out.raw(self.stream)

    def codes(self, n: int) -> Bytes:
        """Decode the codes, uint8 [n]; see `read_embedded`."""
        symbols = np.empty(n, np.uint8)
        # A writable copy: for read-only arrays, kernels would be compiled again.
        decode_stream(self.coder, memoryview(bytearray(self.stream)), symbols)
        return symbols


def take_embedded(source: ByteReader, what: str, *, nested: bool = False) -> Embedded:
    """Read an embedded stream without decoding it.

    Raises:
        FormatError: the bytes are truncated, or a sparse stream is nested.
        UnsupportedError: an unknown coder.
    """
    coder = source.u8(f"{what}: coder")
    if nested and coder == CoderId.SPARSE:
        raise CorruptionError(f"{what}: a sparse stream in a sparse stream")
    check_coder(coder, is_of_codes=False)
    return Embedded(coder, bytes(source.take(source.varint(f"{what}: length"), what)))


def read_embedded(source: ByteReader, n: int, what: str, *, nested: bool = False) -> Bytes:
    """Read and decode an embedded stream, the inverse of `Embedded.write`.

    Args:
        source: the reader, before the coder.
        n: number of codes; the caller must limit it, because a stream of one byte may decode to any number.
        what: name of the field, for errors.
        nested: True inside a sparse stream.

    Returns:
        Codes [n].

    Raises:
        FormatError: the bytes are not a stream of n codes.
    """
    return take_embedded(source, what, nested=nested).codes(n)


def _decode_constant(source: ByteReader, out: Bytes) -> None:
    out[:] = source.u8("constant stream")
    source.end("constant stream")


def _decode_stored(source: ByteReader, out: Bytes) -> None:
    out[:] = np.frombuffer(source.take(len(out), "stored stream"), np.uint8)
    source.end("stored stream")


def _decode_zstd(source: ByteReader, out: Bytes) -> None:
    stream = source.take(source.left, "zstd stream")
    try:
        # Check the magic number: a skippable frame would be misread as a length.
        announced = zstandard.get_frame_parameters(stream)
        if bytes(stream[:4]) != zstandard.FRAME_HEADER or announced.content_size != len(out):
            raise CorruptionError(f"zstd stream does not announce {len(out)} bytes")
        if announced.window_size > max(len(out), MAX_ZSTD_WINDOW):
            raise CorruptionError(f"zstd stream asks for a window of {announced.window_size} bytes")
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        decoded = _local.decompressor.decompress(stream, max_output_size=len(out), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"zstd stream: {error}") from None
    if len(decoded) != len(out):
        raise CorruptionError(f"zstd stream holds {len(decoded)} bytes, not {len(out)}")
    out[:] = np.frombuffer(decoded, np.uint8)


_DECODERS: Final[Mapping[int, Callable[[ByteReader, Bytes], None]]] = {
    CoderId.CONSTANT: _decode_constant,
    CoderId.STORED: _decode_stored,
    CoderId.ZSTD: _decode_zstd,
    CoderId.RANS_OWN: _decode_own,
    CoderId.SPARSE: _decode_sparse,
    CoderId.HUFFMAN: decode_huffman,
}
