"""Decoding of one chunk of a frame. Implements spec/05-frame.md#decoding with all its refusals.

If few patterns of a chunk differ from the base, all its streams are constant zero or sparse around zero. Then
only the changed patterns are decoded, as positions and values, which can be written into a copy of the base.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import ChecksumError, CorruptionError, FormatError, MissingBaseError, UnsupportedError
from ckptz.format.bits import ByteReader, xxh64
from ckptz.format.context_rules import Labels, Runs, runs_of
from ckptz.format.frame import ChunkRecord, FrameHeader
from ckptz.format.plan import BASE_MODES, Predictor, kernel_mode
from ckptz.format.sources import ChunkSources
from ckptz.format.streams import CoderId, decode_stream, read_sparse
from ckptz.format.values import predicted
from ckptz.kernels import cpu
from ckptz.kernels.floats import RAW, Bytes, Patterns
from ckptz.kernels.floats import Positions as Positions


@dataclass(frozen=True, slots=True)
class Changes:
    """The patterns of a chunk that differ from the base.

    Attributes:
        positions: ascending positions in the chunk [n].
        planes: codes at these positions, one array [n] for each byte plane.
        mode: plane mode, as numbered in kernels.
    """

    positions: Positions
    planes: tuple[Bytes, ...]
    mode: int

    def __len__(self) -> int:
        return len(self.positions)

    def patterns(self, base: Patterns) -> Patterns:
        """Compute the changed patterns [n] from the base's patterns at the same positions."""
        out = np.empty_like(base)
        if len(out):
            cpu().merge_planes(self.planes, base, self.mode, out)
        return out


def read_changes(header: FrameHeader, record: ChunkRecord, payload: Bytes, n: int) -> Changes | None:
    """Decode the changes of a chunk of `n` patterns whose streams are constant zero or sparse around zero.

    Returns:
        The changes, or None if the chunk has other streams and must be decoded completely.

    Raises:
        FormatError: a stream is damaged.
    """
    streams = _sparse_streams(header, record, payload)
    if streams is None:
        return None
    planes = [None if data is None else read_sparse(data, n)[1:] for data in streams]
    mode = kernel_mode(header.plan.mode, header.dtype)
    changed = [positions for positions, _ in filter(None, planes)]
    if not changed:
        return Changes(np.empty(0, np.int64), (np.empty(0, np.uint8),) * len(planes), mode)
    all_positions = functools.reduce(np.union1d, changed)
    return Changes(all_positions, tuple(_codes_at(plane, all_positions) for plane in planes), mode)


def _sparse_streams(
    header: FrameHeader, record: ChunkRecord, payload: Bytes
) -> list[ByteReader | None] | None:
    """Return the sparse streams of a chunk, with None for constant ones; None if there are other streams."""
    if header.plan.quant_map is not None or header.plan.mode not in BASE_MODES:
        return None
    readers: list[ByteReader | None] = []
    offset = 0
    for stream in record.streams:
        data = payload[offset : offset + stream.n_bytes]
        offset += stream.n_bytes
        if stream.coder not in (CoderId.CONSTANT, CoderId.SPARSE) or not len(data) or data[0]:
            return None
        if stream.coder == CoderId.CONSTANT and len(data) > 1:
            return None
        readers.append(ByteReader(data.data) if stream.coder == CoderId.SPARSE else None)
    return readers


def _codes_at(plane: tuple[Positions, Bytes] | None, all_positions: Positions) -> Bytes:
    """Return the codes of one plane at positions where any plane changes."""
    if plane is None:
        return np.zeros(len(all_positions), np.uint8)
    positions, values = plane
    if len(positions) == len(all_positions):
        return values
    out = np.zeros(len(all_positions), np.uint8)
    out[np.searchsorted(all_positions, positions)] = values
    return out


def decode_chunk(
    header: FrameHeader, index: int, payload: Bytes, sources: ChunkSources, out: Patterns
) -> Bytes | None:
    """Decode chunk `index` into `out` and check its checksum.

    Args:
        header: the frame's header.
        index: number of the chunk.
        payload: stored bytes of the chunk.
        sources: bounds of the chunk, and its base if needed.
        out: receives the patterns of the chunk [n]; it may be the base of `sources`.

    Returns:
        The codes, uint8 [n], or None without a quantization map.

    Raises:
        ChecksumError: the stored bytes are damaged.
        MissingBaseError: the stored bytes are intact, so the base is a wrong one.
        CorruptionError: the bytes violate the specification.
    """
    record = header.chunks[index]
    try:
        codes = _Streams(header, record, payload, sources).decode(out)
    except (FormatError, UnsupportedError) as error:
        check_stored(record, index, payload)
        raise type(error)(f"chunk {index}: {error}") from None
    if xxh64(out) != record.decoded:
        check_stored(record, index, payload)
        if header.plan.needs_base:
            raise MissingBaseError(
                f"the base found is not the checkpoint that this delta was made from{sources.base_title}"
            )
        raise CorruptionError(f"chunk {index}: decodes to other values than were written")
    return codes


def decode_codes(header: FrameHeader, index: int, payload: Bytes, sources: ChunkSources) -> Bytes:
    """Decode only the codes of chunk `index`, uint8 [n_patterns], for a delta with these codes as contexts.

    The checksum of the stored bytes is checked, as that of the decoded values needs the values. Errors in the
    values are therefore not detected: spec/03-transforms.md#contexts.
    """
    record = header.chunks[index]
    check_stored(record, index, payload)
    try:
        return _Streams(header, record, payload, sources).map_codes()
    except FormatError as error:
        raise type(error)(f"chunk {index}: {error}") from None


def check_stored(record: ChunkRecord, index: int, payload: Bytes) -> None:
    """Raise ChecksumError if the stored bytes of a chunk are damaged.

    Decoding only calls this after an error, because the decoded checksum already proves success.
    """
    if xxh64(payload) != record.stored:
        raise ChecksumError(f"chunk {index}: its stored bytes were changed after they were written")


class _Streams:
    """The streams of one chunk, read in order."""

    def __init__(
        self, header: FrameHeader, record: ChunkRecord, payload: Bytes, sources: ChunkSources
    ) -> None:
        if len(payload) != record.n_bytes:
            raise CorruptionError(f"{len(payload)} stored bytes, {record.n_bytes} recorded")
        self._header, self._record, self._payload, self._sources = header, record, payload, sources
        self._n = sources.end - sources.begin
        self._next, self._offset = 0, 0
        self._check_base_codes()
        rules, is_map = header.plan.rules, header.plan.quant_map is not None
        # Read labels even if unused, to detect errors in them; labels of runs were checked with the header.
        self._labels: Labels | None = None
        if rules and (is_map or self._runs is None):
            self._labels = sources.labels(rules, header.row_patterns)

    def _check_base_codes(self) -> None:
        expected = self._record.base_codes
        if expected is None:
            return
        codes = self._sources.base_codes()
        if (0 if codes is None else xxh64(codes)) != expected:
            title = self._sources.base_title
            raise MissingBaseError(f"the base's codes are not those that this delta was grouped by{title}")

    @functools.cached_property
    def _runs(self) -> Runs | None:
        header, sources = self._header, self._sources
        return runs_of(header.plan.rules, sources.begin, sources.end, header.row_patterns)

    @functools.cached_property
    def _counts(self) -> NDArray[np.uint32]:
        """Number of patterns of each context, for kernels that sort by context."""
        if self._labels is None:
            raise CorruptionError("a stream uses the tensor's tables, and the frame has none")
        counts: NDArray[np.uint32] = cpu().context_counts(
            self._labels, np.array([self._n]), self._header.plan.n_contexts
        )
        return counts

    def _take(self) -> tuple[int, Bytes]:
        stream = self._record.streams[self._next]
        data = self._payload[self._offset : self._offset + stream.n_bytes]
        self._next += 1
        self._offset += stream.n_bytes
        return stream.coder, data

    def decode(self, out: Patterns) -> Bytes | None:
        """Decode all streams into patterns, and return the codes of a quantization map, if any."""
        if self._header.plan.quant_map is None:
            self._decode_planes(out)
            return None
        return self._decode_map(out)

    def _decode_planes(self, out: Patterns) -> None:
        plan, dtype = self._header.plan, self._header.dtype
        base = self._sources.base_patterns() if plan.predictor is Predictor.BASE else out
        changes = read_changes(self._header, self._record, self._payload, self._n)
        if changes is not None:
            if base is not out:
                out[:] = base
            out[changes.positions] = changes.patterns(out[changes.positions])
            return
        planes, by_context = self._planes(dtype.pattern_bytes)
        mode = kernel_mode(plan.mode, dtype)
        if by_context:
            codes = np.empty_like(out) if base is out else out
            self._put_in_order(planes, by_context, codes)
            cpu().restore(codes, base, mode, out)
        else:
            cpu().merge_planes(planes, base, mode, out)

    def _decode_map(self, out: Patterns) -> Bytes:
        plan, sources = self._header.plan, self._sources
        quant_map = plan.quant_map
        assert quant_map is not None
        codes = self.map_codes()
        table = self._header.value_table
        table.decode(codes, self._labels, predicted(plan, sources), out)
        exact = np.zeros(self._n, np.bool_)
        if quant_map.escape_code is not None:
            exact = codes == quant_map.escape_code
            self._put(np.flatnonzero(exact), out)
        # Escaped values may be anything; computed values must be finite, as rounding is undefined otherwise.
        if not cpu().all_finite(out, table.kind) and not cpu().all_finite(out[~exact], table.kind):
            raise CorruptionError("a value is not finite, and not escaped")
        return codes

    def map_codes(self) -> Bytes:
        """Decode the codes of a quantization map, and check their range."""
        ([codes], by_context), quant_map = self._planes(1), self._header.plan.quant_map
        assert quant_map is not None
        if by_context:
            grouped, codes = codes, np.empty(self._n, np.uint8)
            self._put_in_order([grouped], by_context, codes)
        if len(codes) and int(codes.max()) >= quant_map.n_codes:
            raise CorruptionError(f"code {int(codes.max())} is beyond the {quant_map.n_codes} of the map")
        return codes

    def _put(self, at: NDArray[np.intp], out: Patterns) -> None:
        n = len(at)
        planes = [self._plain(*self._take(), n) for _ in range(out.itemsize)]
        values = np.empty(n, out.dtype)
        if n:
            cpu().merge_planes(planes, values, 0, values)
        out[at] = values

    def _plain(self, coder: int, data: Bytes, n: int) -> Bytes:
        """Decode a stream without shared tables."""
        if coder == CoderId.STORED and len(data) == n:
            return data
        plane = np.empty(n, np.uint8)
        decode_stream(coder, data.data, plane)
        return plane

    def _planes(self, n_streams: int) -> tuple[list[Bytes], list[int]]:
        """Decode the next code streams, each [n]; also return the numbers of those in context order."""
        streams = [self._take() for _ in range(n_streams)]
        by_context = [i for i, (coder, _) in enumerate(streams) if coder == CoderId.RANS_SHARED]
        planes = [
            self._in_context_order(i, data) if i in by_context else self._plain(coder, data, self._n)
            for i, (coder, data) in enumerate(streams)
        ]
        if self._runs is None:
            return planes, by_context
        return [self._runs.ungroup(plane) if i in by_context else plane for i, plane in enumerate(planes)], []

    @functools.cached_property
    def _contexts(self) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """The contexts that occur, and the number of patterns of each."""
        if self._runs is None:
            per_context = self._counts.sum(axis=(0, 2), dtype=np.int64)
        else:
            per_context = self._runs.per_context
        contexts = np.flatnonzero(per_context)
        return contexts, per_context[contexts]

    def _in_context_order(self, index: int, data: Bytes) -> Bytes:
        (contexts, per_context), header = self._contexts, self._header
        tables = header.plan.tables[index]
        segments = tables.segments(contexts, per_context, tables.slots)
        grouped = np.empty(self._n, np.uint8)
        decode_stream(CoderId.RANS_SHARED, data.data, grouped, segments)
        return grouped

    def _put_in_order(self, planes: Sequence[Bytes], by_context: Sequence[int], out: Patterns) -> None:
        """Merge planes [n], some of them in context order, into patterns [n]."""
        grouped = np.empty_like(out)
        sorted_planes = [*planes]
        if len(by_context) < len(planes):
            nothing = np.zeros(self._n, np.uint8)
            sorted_planes = [plane if i in by_context else nothing for i, plane in enumerate(planes)]
        cpu().merge_planes(sorted_planes, grouped, RAW, grouped)
        cpu().ungroup(grouped, self._labels, self._counts, out)
        out_bytes = out.view(np.uint8).reshape(self._n, -1)
        for i, plane in enumerate(planes):
            if i not in by_context and plane.any():
                out_bytes[:, i] = plane
