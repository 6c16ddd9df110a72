"""One stream: the codes of one chunk of one plane, by whichever coder is smallest.

Implements spec/02-entropy.md#streams. Coders that need nothing but the stream stand here; RANS with
the tensor's tables takes the tables and the context segments from the frame.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, Protocol

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
from ckptz.format.huffman import (
    SIZES,
    code_lengths,
    decode_huffman,
    encode_huffman_streams,
    pack_lengths,
)
from ckptz.kernels import cpu
from ckptz.kernels.blas import product
from ckptz.kernels.floats import MAX_GAP_BYTE, Bytes, Counts, Frequencies, Positions


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
# Coders of the code streams of chunks alone: no other stream of a file or a message has them.
OF_CODE_STREAMS: Final = frozenset({CoderId.RANS_SHARED, CoderId.HUFFMAN})
LANE_CHOICES: Final = (1, 4, 32)  # spec/02-entropy.md#lanes; the stream holds the index
MAX_ZSTD_WINDOW: Final = 8 << 20  # spec/02-entropy.md#streams; the codes of the stream, if more
LANE_MIN_BYTES: Final = (0, 400, 6400)  # encoder only: lane states stay near 2 % of the stream

# Encoder only. A plane that shrinks by less is stored: it would decode ten times slower for nothing.
MIN_GAIN: Final = 1 / 128
ZSTD_LEVEL: Final = 3
ZSTD_SAMPLE: Final = 1 << 14
ZSTD_SAMPLE_LEVEL: Final = 1
ZSTD_MIN_GAIN: Final = 0.95  # of the best other coder, on the sample, before zstd runs on everything
# Zstd is not tried where an estimate of what it takes at best, from codes and repeats, is above so much.
ZSTD_MAY_GAIN: Final = 0.96
MATCH_BITS: Final = 20  # of a repeat
ZSTD_HEAD: Final = 32  # bytes of headers and tables
QUICK_BITS: Final = 5  # a code; from here on zstd finds little to try, and is quick
QUICK_CODES: Final = 1 << 13  # below, its smaller tables may gain more than repeats
SPARSE_MIN_SHARE: Final = 0.97
HUFFMAN_CODES: Final = 1 << 12  # of a stream; below, its table takes longer than rANS
HUFFMAN_HEAD: Final = SIZES.size + 4  # bytes of sizes, and of bits that fill up its parts
# 32,768 uniform bytes measure 7.994, the low bytes of weights 7.955 to 7.97; MIN_GAIN asks for 7.94 of all.
RANDOM_MIN: Final = 1 << 17
RANDOM_BITS: Final = 7.95


Stream = tuple[CoderId, bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Segments:
    """The way of a stream through the tensor's tables: codes sorted by context, one segment a context."""

    ends: NDArray[np.int64]  # index after the last code of each segment, ascending
    table_of: NDArray[np.int64]  # the table of each segment
    tables: Frequencies  # frequencies [n_tables, 256]
    slots: NDArray[np.uint32] | None = field(default=None, repr=False)

    def slot_tables(self) -> NDArray[np.uint32]:
        """Return decoding tables [n_tables, 4096], made once per tensor."""
        return slot_tables(self.tables) if self.slots is None else self.slots


class _Zstd(Protocol):
    def compress(self, data: Any) -> bytes: ...
    def decompress(self, data: Any, max_output_size: int = 0, *, allow_extra_data: bool = True) -> bytes: ...


_local = threading.local()  # zstd contexts are costly to make and not thread-safe


def _zstd_compress(symbols: Bytes, level: int = ZSTD_LEVEL) -> bytes:
    if not hasattr(_local, "compressors"):
        _local.compressors = {
            n: zstandard.ZstdCompressor(n, write_checksum=False) for n in (ZSTD_LEVEL, ZSTD_SAMPLE_LEVEL)
        }
    compressor: _Zstd = _local.compressors[level]
    return compressor.compress(symbols)


# --- rANS ---------------------------------------------------------------------------------------


def n_lanes_for(n_bytes: float) -> int:
    """Choose the lanes of a stream that takes about so many bytes."""
    return LANE_CHOICES[bisect.bisect_right(LANE_MIN_BYTES, n_bytes) - 1]


def encode_rans(symbols: Bytes, segments: Segments, expected_bytes: float) -> memoryview:
    """Code symbols [n]: lane index u8, lane states u32 each, words u16 each."""
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
    """Code streams [m] of symbols, each from its place in `begins` on, with its own segments and lanes.

    Args:
        symbols: of all streams.
        begins: where each begins.
        stream_segments: how many segments there are up to the end of each.
        segments: of all streams, their ends in `symbols`.
        n_lanes: of each.
        packed_tables: bytes that each begins with.
    """
    heads = [head + lanes_byte(n) for head, n in zip(packed_tables, n_lanes.tolist(), strict=True)]
    coded, spans = cpu().rans_encode(
        symbols,
        begins,
        stream_segments,
        segments.ends,
        segments.table_of,
        encoding_tables(segments.tables),
        n_lanes,
        np.frombuffer(bytearray(b"".join(heads)), np.uint8),
        np.cumsum([len(head) for head in heads]),
    )
    return [coded.data[i:j] for i, j in spans.tolist()]


def lanes_byte(n_lanes: int) -> bytes:
    """Return the first byte of a stream with this number of lanes."""
    return bytes((LANE_CHOICES.index(n_lanes),))


def parse_rans(source: ByteReader) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Take what `encode_rans` wrote, all of `source` that is left: lane states [n_lanes], words [n]."""
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
    """Decode what `encode_rans` wrote, all that is left of `source`, into `out` [n]."""
    states, words = parse_rans(source)
    if not cpu().rans_decode(words, states, segments.ends, segments.table_of, segments.slot_tables(), out):
        raise CorruptionError("rANS stream does not end in its start state")


def single(table: Frequencies, n: int) -> Segments:
    """Describe a stream of n codes that has one table [256]."""
    return Segments(np.array([n], np.int64), np.zeros(1, np.int64), table[None])


def _decode_own(source: ByteReader, out: Bytes) -> None:
    table = parse_table(source)
    decode_rans(source, single(table, len(out)), out)


# --- sparse -------------------------------------------------------------------------------------


def pack_gaps(positions: Positions) -> Bytes:
    """Write ascending positions [n] as gaps: the number of codes before each that are left out.

    A gap has as many bytes 255 as it holds 255, then the rest.
    """
    return _pack_gaps(positions, np.array([len(positions)]), np.zeros(1, np.int64))[0]


def _pack_gaps(positions: Positions, ends: Counts, begins: Counts) -> tuple[Bytes, Counts]:
    """Write the gaps of streams [m] that have their positions up to `ends`, and begin at positions `begins`.

    Returns:
        Gaps of all of them, and the end of each [m].
    """
    gaps = np.diff(positions, prepend=-1) - 1
    firsts = np.concatenate(([0], ends[:-1]))
    is_used = firsts < ends
    gaps[firsts[is_used]] = positions[firsts[is_used]] - begins[is_used]
    n_full = gaps // MAX_GAP_BYTE
    packed_ends = np.cumsum(n_full + 1)
    packed = np.full(packed_ends[-1] if len(gaps) else 0, MAX_GAP_BYTE, np.uint8)
    packed[packed_ends - 1] = gaps - n_full * MAX_GAP_BYTE
    return packed, np.concatenate(([0], packed_ends))[ends]


def unpack_gaps(gaps: Bytes, n_positions: int, n: int) -> Positions:
    """Read what `pack_gaps` wrote: so many positions below `n`.

    Raises:
        CorruptionError: the bytes are not so many.
    """
    is_last = gaps != MAX_GAP_BYTE
    positions = np.cumsum(gaps, dtype=np.int64)[is_last] + np.arange(np.count_nonzero(is_last))
    is_whole = len(positions) == n_positions and (not len(gaps) or bool(is_last[-1]))
    if not is_whole or (n_positions and positions[-1] >= n):
        raise CorruptionError("sparse stream: gaps and values do not agree")
    return positions


def encode_sparse(gaps: Bytes, values: Bytes, common: int) -> bytes:
    """Write the common symbol u8, then gaps [m] and values [k]: each a count and an embedded stream."""
    return _packed_sparse(common, [(part, encode_stream(part, nested=True)) for part in (gaps, values)])


def _packed_sparse(common: int, parts: Iterable[tuple[Bytes, Stream]]) -> bytes:
    out = ByteWriter()
    out.u8(common)
    for part, stream in parts:
        out.varint(len(part))
        Embedded(stream[0], bytes(stream[1])).write(out)
    return out.getvalue()


def read_sparse(source: ByteReader, n: int) -> tuple[int, Bytes, Bytes]:
    """Read what `encode_sparse` wrote for `n` codes: common symbol, gaps [m], values [k], k at most n."""
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
    return common, parts[0], parts[1]


def _decode_sparse(source: ByteReader, out: Bytes) -> None:
    out[:], gaps, values = read_sparse(source, len(out))
    out[unpack_gaps(gaps, len(values), len(out))] = values


# --- any stream ---------------------------------------------------------------------------------


def encode_stream(
    symbols: Bytes, counts: Counts | None = None, *, nested: bool = False, beat: float = float("inf")
) -> Stream:
    """Code a stream by the smallest of the coders that need nothing else.

    Args:
        symbols: codes [n], n at least 1; a stored stream is their memory, not a copy.
        counts: their histogram [256], where the caller has it.
        nested: inside a sparse stream, where sparse may not nest.
        beat: bytes that another coder would take; what is larger is not tried.
    """
    if counts is not None:
        counts = counts[None]
    [coded] = encode_streams([symbols], counts, nested=nested, beats=[beat])
    return coded


def encode_streams(
    parts: Sequence[Bytes],
    counts: Counts | None = None,
    *,
    nested: bool = False,
    beats: Sequence[float] | None = None,
    huffman_margin: float | None = None,
) -> list[Stream]:
    """Code streams [m], each as `encode_stream` does by itself, in few calls for all of them.

    Args:
        parts: codes of each.
        counts: their histograms [m, 256], where the caller has them.
        nested: inside a sparse stream.
        beats: with counts, the bytes that another coder would take of each.
        huffman_margin: of code streams, the share of bytes that Huffman may take beyond an ideal coder of
            single codes; None for no Huffman.
    """
    is_random = [counts is None and looks_random(len(p), spread_of(p), middle_of(p)) for p in parts]
    ordinary = [part for part, is_it in zip(parts, is_random, strict=True) if not is_it]
    coded = iter(_encode_ordinary(ordinary, counts, beats, huffman_margin, nested=nested) if ordinary else ())
    return [
        (CoderId.STORED, part.data) if is_it else next(coded)
        for part, is_it in zip(parts, is_random, strict=True)
    ]


def _encode_ordinary(
    parts: Sequence[Bytes],
    counts: Counts | None,
    beats: Sequence[float] | None,
    huffman_margin: float | None,
    *,
    nested: bool,
) -> list[Stream]:
    if counts is None:
        counts = np.empty((len(parts), 256), np.int64)
        for at in _side_by_side(parts, range(len(parts))):
            counts[at] = cpu().count_streams(*joined([parts[k] for k in at]))
    tables = _OwnTables([len(part) for part in parts], counts, huffman_margin)
    sparse = {} if nested else _encode_sparse(parts, counts)
    least = _least_zstd([middle_of(part) for part in parts], tables.owns)
    streams = [
        _by_another(
            part, counts[k], own, sparse.get(k), least[k], float("inf") if beats is None else beats[k]
        )
        for k, (part, own) in enumerate(zip(parts, tables.owns, strict=True))
    ]
    for at in _side_by_side(parts, [k for k, other in enumerate(streams) if other is None]):
        for k, stream in tables.encode(parts, at):
            streams[k] = stream
    return [stream for stream in streams if stream is not None]


def _side_by_side(parts: Sequence[Bytes], which: Sequence[int]) -> list[list[int]]:
    """Group streams by number for calls of kernels: small ones together, as copies, large ones alone."""
    small = [k for k in which if len(parts[k]) < RANDOM_MIN]
    return [small] * bool(small) + [[k] for k in which if len(parts[k]) >= RANDOM_MIN]


class _OwnTables:
    """Tables of streams [m] for themselves, of rANS or Huffman; none is made that cannot pay.

    Args:
        sizes: codes of each.
        counts: their histograms [m, 256].
        huffman_margin: see `encode_streams`.

    Attributes:
        owns: each stream under its table.
    """

    def __init__(self, sizes: Sequence[int], counts: Counts, huffman_margin: float | None) -> None:
        weighed = zip(sizes, least_packed(counts).tolist(), row_entropy_bits(counts).tolist(), strict=True)
        self.owns = [OwnTable.of(*each) for each in weighed]
        self._packed = [b""] * len(sizes)
        self._lengths, self._huffman = np.zeros(counts.shape, np.uint8), set[int]()
        self._frequencies = np.zeros(counts.shape, np.uint16)
        paying = [k for k, own in enumerate(self.owns) if own.pays]
        if huffman_margin is not None:
            peaks = counts.max(axis=1).tolist()
            several = [k for k in paying if sizes[k] >= HUFFMAN_CODES and peaks[k] < sizes[k]]
            self._add_huffman(several, counts, huffman_margin)
        self._add_rans([k for k in paying if k not in self._huffman], counts)

    def _add_huffman(self, at: list[int], counts: Counts, margin: float) -> None:
        """Make the code lengths of these streams, and use those that cost no more than the margin allows."""
        self._lengths[at] = code_lengths(counts[at])
        all_bits = (counts[at] * self._lengths[at]).sum(axis=1).tolist()
        for k, n_bits in zip(at, all_bits, strict=True):
            packed, ideal = pack_lengths(self._lengths[k]), self.owns[k]
            n_bytes = n_bits / 8 + len(packed) + HUFFMAN_HEAD
            if n_bytes <= (1 + margin) * ideal.n_bytes:
                self._packed[k] = packed
                self._huffman.add(k)
                self.owns[k] = OwnTable(ideal.n, n_bytes, n_bytes < ideal.n * (1 - MIN_GAIN), ideal.bits)

    def _add_rans(self, at: list[int], counts: Counts) -> None:
        if at:
            self._frequencies[at] = normalise(counts[at])
            tables_bits = row_cost_bits(counts[at], self._frequencies[at]).tolist()
            tables = cut(*pack_tables(self._frequencies[at]))
            for k, table, bits in zip(at, tables, tables_bits, strict=True):
                self._packed[k] = table.tobytes()
                self.owns[k] = OwnTable.of(self.owns[k].n, len(table), bits)

    def encode(self, parts: Sequence[Bytes], at: Sequence[int]) -> Iterator[tuple[int, Stream]]:
        """Encode those streams that have these numbers, each by its table."""
        for which, coder, encode in (
            ([k for k in at if k in self._huffman], CoderId.HUFFMAN, self._encode_huffman),
            ([k for k in at if k not in self._huffman], CoderId.RANS_OWN, self._encode_rans),
        ):
            if which:
                symbols, ends = joined([parts[k] for k in which])
                packed = [self._packed[k] for k in which]
                for k, stream in zip(which, encode(symbols, ends, which, packed), strict=True):
                    yield k, (coder, stream)

    def _encode_huffman(
        self, symbols: Bytes, ends: Counts, which: list[int], packed: list[bytes]
    ) -> list[memoryview]:
        n_bytes = np.array([math.ceil(self.owns[k].n_bytes) for k in which])
        return encode_huffman_streams(symbols, ends, self._lengths[which], n_bytes, packed)

    def _encode_rans(
        self, symbols: Bytes, ends: Counts, which: list[int], packed: list[bytes]
    ) -> list[memoryview]:
        segments = Segments(ends, np.arange(len(which)), self._frequencies[which])
        begins = np.concatenate(([0], ends[:-1]))
        lanes = np.array([n_lanes_for(self.owns[k].n_bytes) for k in which])
        return encode_rans_streams(symbols, begins, np.arange(1, len(which) + 1), segments, lanes, packed)


def least_packed(counts: Counts) -> Counts:
    """Return a lower bound [n] of the bytes of tables for counts [n, 256].

    A frequency takes a bit or more, and there is one for each symbol from the first to the last.
    """
    used = counts > 0
    least: Counts = 3 + (255 - used.argmax(axis=1) - used[:, ::-1].argmax(axis=1)) // 8
    return least


def _encode_sparse(parts: Sequence[Bytes], counts: Counts) -> dict[int, bytes]:
    """Code those streams, by number, of which nearly all codes are the same, but not all, as sparse."""
    commons, peaks = counts.argmax(axis=1).tolist(), counts.max(axis=1).tolist()
    at = [k for k, part in enumerate(parts) if SPARSE_MIN_SHARE * len(part) <= peaks[k] < len(part)]
    if not at:
        return {}
    symbols, ends = joined([parts[k] for k in at])
    sizes = np.diff(ends, prepend=0)
    positions = np.flatnonzero(symbols != np.repeat(np.array([commons[k] for k in at], np.uint8), sizes))
    value_ends = np.searchsorted(positions, ends)
    gaps, gap_ends = _pack_gaps(positions, value_ends, ends - sizes)
    pairs = zip(cut(gaps, gap_ends), cut(symbols[positions], value_ends), strict=True)
    splits = [*itertools.chain.from_iterable(pairs)]
    coded = iter(zip(splits, encode_streams(splits, nested=True), strict=True))
    return {k: _packed_sparse(commons[k], (next(coded), next(coded))) for k in at}


def joined(parts: Sequence[Any]) -> tuple[Any, Counts]:
    """Put arrays [m] one behind the other; gives them and the end of each [m]. A single one is not copied."""
    if len(parts) == 1:
        return parts[0], np.array([len(parts[0])])
    return np.concatenate(parts), np.cumsum([len(part) for part in parts])


def cut(parts: Any, ends: Counts) -> list[Any]:
    """Cut an array [n] behind these positions [m], the last of which is its end."""
    return [parts[i:j] for i, j in itertools.pairwise((0, *ends.tolist()))]


def _by_another(
    symbols: Bytes, counts: Counts, own: OwnTable, sparse: bytes | None, least: float, beat: float
) -> Stream | None:
    """Code a stream by another coder than its own table; None if that is the smallest."""
    n, common = len(symbols), int(counts.argmax())
    if counts[common] == n:
        return CoderId.CONSTANT, bytes((common,))
    plain = min(own.n_bytes if own.pays else n, beat)
    candidates: list[tuple[CoderId, bytes]] = [] if sparse is None else [(CoderId.SPARSE, sparse)]
    if zstd_promises(middle_of(symbols), n, plain, least):
        candidates.append((CoderId.ZSTD, _zstd_compress(symbols)))
    coder, stream = min(candidates, key=lambda c: len(c[1]), default=(CoderId.STORED, b""))
    if candidates and len(stream) < plain:
        return coder, stream
    return (CoderId.STORED, symbols.data) if not own.pays or own.n_bytes > plain else None


@dataclass(frozen=True, slots=True)
class OwnTable:
    """A stream of n codes under coder rans-own, weighed before it is coded."""

    n: int
    n_bytes: float  # of the stream
    pays: bool  # whether it is enough smaller than the codes
    bits: float  # of the codes alone

    @classmethod
    def of(cls, n: int, n_packed: int, bits: float) -> OwnTable:
        """Weigh `n` codes that take so many bits under a table of so many bytes."""
        n_bytes = bits / 8
        n_bytes += n_packed + 1 + 4 * n_lanes_for(n_bytes)
        return cls(n, n_bytes, n_bytes < n * (1 - MIN_GAIN), bits)


def middle_of(symbols: Any) -> Any:
    """Return the sample of an array or tensor [..., n] that zstd is tried on."""
    begin = max((symbols.shape[-1] - ZSTD_SAMPLE) // 2, 0)
    return symbols[..., begin : begin + ZSTD_SAMPLE]


def spread_of(symbols: Any) -> Any:
    """Return samples from the whole of an array or tensor [..., n]: [..., 64, 512 at most]."""
    n = symbols.shape[-1]
    return symbols[..., : n // 64 * 64].reshape(*symbols.shape[:-1], 64, -1)[..., :512]


def looks_random(n: int, spread: Bytes, middle: Bytes) -> bool:
    """Return whether samples [64, 512] and [2^14] have almost eight bits of entropy and no repeats."""
    if n < RANDOM_MIN:
        return False
    counts = cpu().histogram(np.ascontiguousarray(spread).reshape(-1))
    total = int(counts.sum())
    # The chance that two codes are equal bounds their entropy from below, and is quick to compute.
    squares = int(product(counts, counts))
    is_even = squares * 2**RANDOM_BITS < total**2 or entropy_bits(counts) > RANDOM_BITS * total
    return is_even and not zstd_promises(middle, n, n)


def _least_zstd(middles: Sequence[Bytes], owns: Sequence[OwnTable]) -> list[float]:
    """Estimate the bytes that zstd takes at best of samples [n] of streams; 0 where a trial is quick."""
    asked = [
        m if own.bits < QUICK_BITS * own.n and own.n >= QUICK_CODES else m[:0]
        for m, own in zip(middles, owns, strict=True)
    ]
    least = []
    for sample, own, (hits, runs) in zip(asked, owns, cpu().repeats(*joined(asked)).tolist(), strict=True):
        per_code = own.bits / own.n
        saved = max((hits + 7 * runs) * per_code - runs * MATCH_BITS, 0)
        least.append((len(sample) * per_code - saved) / 8 + ZSTD_HEAD if len(sample) else 0)
    return least


def repeats(sample: Bytes) -> bool:
    """Return whether zstd beats an ideal order-0 coder on a sample [n]."""
    own = OwnTable.of(len(sample), 0, entropy_bits(cpu().histogram(sample)))
    return zstd_promises(sample, own.n, own.bits / 8, *_least_zstd([sample], [own]))


def zstd_promises(middle: Bytes, n: int, other_bytes: float, least: float = 0) -> bool:
    """Predict from the middle [m] of n codes whether zstd takes less than `other_bytes`."""
    other_bytes *= len(middle) / n
    if least > ZSTD_MAY_GAIN * other_bytes:
        return False
    return len(_zstd_compress(middle, ZSTD_SAMPLE_LEVEL)) < ZSTD_MIN_GAIN * other_bytes


def check_coder(coder: int, *, is_of_codes: bool) -> None:
    """Refuse coders that are not known, or that only code streams of chunks may have.

    Args:
        coder: the id.
        is_of_codes: whether the stream is a code stream.
    """
    if coder not in CODERS:
        raise UnsupportedError(f"coder {coder} is not known to this ckptz; upgrade it")
    if coder in OF_CODE_STREAMS and not is_of_codes:
        name = CoderId(coder).name.lower().replace("_", "-")
        raise CorruptionError(f"coder {name} is for code streams, and another stream has it")


def decode_stream(coder: int, stream: memoryview, out: Bytes, segments: Segments | None = None) -> None:
    """Decode one stream into `out`.

    Args:
        coder: a CoderId that `check_coder` let pass.
        stream: exactly the bytes of the stream.
        out: where the codes go [n]; with `segments` in context order.
        segments: for RANS_SHARED.

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


def write_embedded(out: ByteWriter, symbols: Bytes) -> None:
    """Write symbols [n] with coder and length before them: spec/02-entropy.md#embedded-streams."""
    Embedded.of(symbols).write(out)


@dataclass(frozen=True, slots=True)
class Embedded:
    """An embedded stream that is not decoded yet."""

    coder: int
    stream: bytes

    @classmethod
    def of(cls, symbols: Bytes) -> Embedded:
        """Code symbols [n]."""
        [stored] = cls.of_all([symbols])
        return stored

    @classmethod
    def of_all(cls, parts: Sequence[Bytes]) -> list[Embedded]:
        """Code streams [m] of symbols in few calls for all of them."""
        coded = iter(encode_streams([part for part in parts if len(part)]))
        streams = [next(coded) if len(part) else (CoderId.STORED, b"") for part in parts]
        return [cls(coder, bytes(stream)) for coder, stream in streams]

    def write(self, out: ByteWriter) -> None:
        """Write the stream with coder and length before it: spec/02-entropy.md#embedded-streams."""
        out.u8(self.coder)
        out.varint(len(self.stream))
        out.raw(self.stream)

    def codes(self, n: int) -> Bytes:
        """Return the codes [n]; see `read_embedded`."""
        symbols = np.empty(n, np.uint8)
        # Not as bytes, for whose arrays, which are read-only, kernels would be compiled once more.
        decode_stream(self.coder, memoryview(bytearray(self.stream)), symbols)
        return symbols


def take_embedded(source: ByteReader, what: str, *, nested: bool = False) -> Embedded:
    """Take an embedded stream as it is stored.

    Raises:
        FormatError: the bytes end before it, or it may not stand in another.
        UnsupportedError: a coder that is not known.
    """
    coder = source.u8(f"{what}: coder")
    if nested and coder == CoderId.SPARSE:
        raise CorruptionError(f"{what}: a sparse stream in a sparse stream")
    check_coder(coder, is_of_codes=False)
    return Embedded(coder, bytes(source.take(source.varint(f"{what}: length"), what)))


def read_embedded(source: ByteReader, n: int, what: str, *, nested: bool = False) -> Bytes:
    """Read what `write_embedded` wrote.

    Args:
        source: at the coder.
        n: number of codes, which the caller bounds: a constant stream of one byte stands for any number.
        what: the field, for errors.
        nested: inside a sparse stream, where sparse may not nest.

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
        # The magic number first: of a skippable frame the rest would be its length.
        announced = zstandard.get_frame_parameters(stream)
        if bytes(stream[:4]) != zstandard.FRAME_HEADER or announced.content_size != len(out):
            raise CorruptionError(f"zstd stream does not announce {len(out)} bytes")
        if announced.window_size > max(len(out), MAX_ZSTD_WINDOW):
            raise CorruptionError(f"zstd stream asks for a window of {announced.window_size} bytes")
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        decompressor: _Zstd = _local.decompressor
        decoded = decompressor.decompress(stream, max_output_size=len(out), allow_extra_data=False)
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
