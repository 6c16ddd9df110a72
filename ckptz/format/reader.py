"""Reads one `.ckptz` file lazily: header and index at once, frames when asked for.

Implements spec/06-container.md#reading. Memory is only allocated for a tensor somebody asked for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import (
    CorruptionError,
    FormatError,
    MissingBaseError,
    UnsupportedError,
    error_context,
)
from ckptz.format.bits import combine, xxh64
from ckptz.format.byte_source import ByteSource
from ckptz.format.caches import (
    MAX_FRAMES,
    CachedChunks,
    Decoded,
    DecodedBases,
    HeaderCache,
    LastChunks,
    Node,
    gather,
)
from ckptz.format.decode import (
    Changes,
    check_stored,
    decode_chunk,
    decode_codes,
    read_changes,
)
from ckptz.format.dtypes import DType, dtype_of, n_elements
from ckptz.format.envelope import BASE_METADATA_BYTES, Envelope, parse_base_metadata, read_envelope
from ckptz.format.frame import PREFIX_BYTES, FrameHeader, header_length
from ckptz.format.index import (
    BASE_METADATA,
    HUFFMAN_FEATURE,
    KEY_VERSION,
    LOW_RANK_FEATURE,
    MAPS_FEATURE,
    OPTIONAL_PREFIX,
    BaseRef,
    InlineBase,
    TensorEntry,
    group_name,
    read_index,
)
from ckptz.format.sources import (
    CHUNK_VALUES,
    PATTERN_TYPES,
    ChunkSources,
    JoinedSource,
    Stored,
    TensorSource,
    ViewOf,
    context_tensors_of,
)
from ckptz.kernels.floats import Patterns

USUAL_HEADER_BYTES: Final = 256  # are read at once; longer headers are read again
MAX_SOURCE_DEPTH: Final = 2  # normative, spec/03-transforms.md#contexts


class FrameSource(TensorSource):
    """One tensor of an open file, decoded chunk by chunk."""

    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, container: Container | InlineFrames, entry: TensorEntry) -> None:
        self._container = container
        self.entry = entry
        self.dtype: DType = dtype_of(entry.dtype)
        self.shape = entry.shape

    @property
    def header(self) -> FrameHeader:
        """The frame's header, read and checked against the index."""
        return self._container.headers.get(self, self._read_header)

    def _naming(self) -> AbstractContextManager[None]:
        """Make a context that names the file and the tensor in errors."""
        return self._container.naming(self.entry.name)

    def _read_header(self) -> FrameHeader:
        with self._naming():
            read, offset, n_bytes = self._container.read, self.entry.offset, self.entry.n_bytes
            raw = read(offset, max(min(n_bytes, USUAL_HEADER_BYTES), PREFIX_BYTES)).tobytes()
            length = header_length(raw[:PREFIX_BYTES], n_bytes)
            header = FrameHeader.parse(raw[:length] if length <= len(raw) else read(offset, length).tobytes())
            if (header.dtype, header.shape) != (self.dtype, self.shape):
                raise CorruptionError("index and frame disagree on dtype or shape")
            if length + header.payload_bytes != self.entry.n_bytes:
                raise CorruptionError("frame length does not match its chunks")
            if self.entry.checksum not in ("", f"{header.checksum:016x}"):  # that of a group is not recorded
                raise CorruptionError("index and frame disagree on the checksum")
            if header.plan.quant_map is not None and MAPS_FEATURE not in self._container.features:
                raise CorruptionError("has a quantization map, and the feature 'maps' is not required")
            if header.plan.is_low_rank and LOW_RANK_FEATURE not in self._container.features:
                raise CorruptionError("is of low rank, and the feature 'low-rank' is not required")
            if HUFFMAN_FEATURE not in self._container.features and header.has_huffman:
                raise CorruptionError("has Huffman streams, and the feature 'huffman' is not required")
            return header

    @property
    def stored_bytes(self) -> int:
        """Size of the frame."""
        return self.entry.n_bytes

    @property
    def cache(self) -> CachedChunks:
        """Cache of the file's recently read chunks."""
        return self._container.cache

    @functools.cached_property
    def base(self) -> TensorSource | None:
        """The base tensor that the frame needs, or None."""
        if not self.header.plan.needs_base:
            return None
        base = self._container.bases.get(self.entry.name)
        if base is not None and (base.dtype, base.shape) == (self.dtype, self.shape):
            return base
        ref = self._container.outer_base
        if ref is None:
            raise CorruptionError("the frame needs a base, and the file names and holds none that fits")
        if base is None:
            raise MissingBaseError(f"needs its base {ref.title}, which has no such tensor or is not open")
        raise MissingBaseError(f"has another dtype or shape in its base {ref.title}")

    @property
    def needs_other_file(self) -> bool:
        """True if the frame is decoded from a base in another file."""
        return self._container.outer_base is not None and self.header.plan.needs_base

    def needs(self, only_codes: bool) -> list[Node]:
        plan = self.header.plan
        if plan.stands_alone:
            return []
        with self._naming():
            if only_codes and plan.quant_map is None:
                return []
            needed: list[Node] = [(self._context_tensor(name), False) for name in plan.context_tensor_names]
            patterns = plan.reads_patterns(only_codes=only_codes)
            if (patterns or plan.reads_base_codes) and isinstance(base := self.base, FrameSource):
                needed.append((base, not patterns))
            return needed

    def decoded(self, index: int, only_codes: bool, held: DecodedBases) -> Decoded:
        if (self, False) in held:
            return held[self, False]
        begin, end = self._bounds(index)
        if only_codes:
            if self.header.plan.quant_map is None:
                return Decoded(None, None)
            payload = self.payload(index)
            with self._naming():
                return Decoded(
                    None, decode_codes(self.header, index, payload, self._sources(begin, end, held))
                )
        patterns = np.empty(end - begin, PATTERN_TYPES[self.dtype.pattern_bytes])
        return Decoded(patterns, self._decode(index, patterns, held))

    def _decode(self, index: int, out: Patterns, held: DecodedBases) -> NDArray[np.uint8] | None:
        header = self.header
        payload = self._payload(header, index)
        with self._naming():
            sources = self._sources(*self._bounds(index), held)
            return decode_chunk(header, index, payload, sources, out)

    def _sources(self, begin: int, end: int, held: DecodedBases) -> ChunkSources:
        plan = self.header.plan
        if plan.stands_alone:
            return ChunkSources(begin, end)
        base, ref = self.base, self._container.outer_base
        if isinstance(base, FrameSource):
            base = _DecodedChunk(
                base, held.get((base, False)) or held.get((base, True)) or Decoded(None, None)
            )
        both = plan.reads_base_patterns and plan.reads_base_codes

        def context_tensor(name: str) -> TensorSource:
            tensor = self._context_tensor(name)
            return _DecodedChunk(tensor, held[tensor, False])

        return ChunkSources(begin, end, base, context_tensor, both, f", {ref.title}" if ref else "")

    @property
    def context_tensor_names(self) -> list[str]:
        """Tensors that stand beside this one and whose magnitudes its contexts read."""
        return self.header.plan.context_tensor_names

    def _context_tensor(self, name: str) -> FrameSource:
        """Another tensor of the file, whose magnitudes are contexts: as many patterns, at most two deep."""
        source = context_tensors_of(self._container.tensors)(name)
        assert isinstance(source, FrameSource)
        if source.n_patterns != self.header.n_patterns:
            raise CorruptionError(f"it is decoded with tensor {name!r}, which has another shape")
        if source.source_depth(MAX_SOURCE_DEPTH - 1) >= MAX_SOURCE_DEPTH:
            raise CorruptionError(f"it is decoded with tensor {name!r}, and that with too many others")
        return source

    def source_depth(self, most: int) -> int:
        """Count the tensors of this file, one after another, that contexts depend on, up to `most` + 1."""
        names = self.context_tensor_names
        if not names:
            return 0
        if most == 0:
            return 1
        find = context_tensors_of(self._container.tensors)
        return 1 + max(find(name).source_depth(most - 1) for name in names)  # type: ignore[attr-defined]

    def check_base(self) -> None:
        """Require that the header is right, and that a base and the tensors it needs are there."""
        with self._naming():
            _ = self.base
            for name in self.context_tensor_names:
                self._context_tensor(name)

    def check_vectors(self) -> None:
        """Require that outer vectors which no chunk needs are right; there may be few such in a file."""
        outer = self.header.plan.outer
        if outer is not None:
            with self._naming():
                self._container.headers.charge_idle(outer.n_elements)
                outer.check()

    def _bounds(self, index: int) -> tuple[int, int]:
        """(begin, end) in patterns of chunk `index`."""
        begin = index * CHUNK_VALUES
        return begin, min(begin + CHUNK_VALUES, self.header.n_patterns)

    def payload(self, index: int) -> NDArray[np.uint8]:
        """Read the stored bytes of a chunk."""
        return self._payload(self.header, index)

    def _payload(self, header: FrameHeader, index: int) -> NDArray[np.uint8]:
        offset = self.entry.offset + self.entry.n_bytes - header.payload_bytes + header.chunk_offsets[index]
        return self._container.read(offset, header.chunks[index].n_bytes)

    def stored_pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Read the bytes of the frame as stored, the header and then chunk after chunk, each checked."""
        header = self.header
        yield self._container.read(self.entry.offset, self.entry.n_bytes - header.payload_bytes)
        for index, record in enumerate(header.chunks):
            payload = self.payload(index)
            with self._naming():
                check_stored(record, index, payload)
            yield payload

    def _codes_alone(self, index: int, out: Patterns | None = None) -> NDArray[np.uint8] | None:
        """Decode only the codes of chunk `index`."""
        del out
        return self.decoded(index, True, gather(index, self.needs(True))).codes

    def decode_chunk(self, index: int, out: Patterns) -> NDArray[np.uint8] | None:
        """Decode chunk `index` into `out`, all its patterns; returns the codes, if a map made them.

        A chain of frames that need nothing but the patterns of their bases is decoded in place, the first
        file's frame first: `out` holds the base of each when it is decoded.
        """
        chain = [self]
        while len(chain) < MAX_FRAMES and (below := chain[-1]._base_in_place(index)) is not None:
            chain.append(below)
        chain.reverse()
        codes = chain[0]._decode(index, out, chain[0]._gathered(index))
        for base, frame in itertools.pairwise(chain):
            codes = frame._decode(index, out, {(base, False): Decoded(out, None)})
        return codes

    def _base_in_place(self, index: int) -> FrameSource | None:
        """Return the base's frame if its patterns are all that chunk `index` needs, and not in memory."""
        plan, base = self.header.plan, None
        if plan.reads_base_patterns and not plan.reads_base_codes and not plan.context_tensor_names:
            with self._naming():
                base = self.base
        if base is None or not has_own_frame(base) or base.last(index) is not None:
            return None
        return base

    def _gathered(self, index: int) -> DecodedBases:
        """Decode what a chunk needs; chunks of other tensors of this file are kept for who reads these."""
        held: dict[Node, Decoded] = {}
        missing: list[Node] = []
        for node in self.needs(False):
            frame, _ = node
            assert isinstance(frame, FrameSource)
            if frame is not self.base:
                held[node] = Decoded(frame.chunk(index), None)
            elif (last := frame.last(index)) is not None:
                held[node] = last
            else:
                missing.append(node)
        return held | dict(gather(index, missing)) if missing else held

    def last(self, index: int) -> Decoded | None:
        """Return chunk `index` if it is cached for the next file of the run; else None."""
        last = self._container.last
        return None if last is None else last.get(self.entry.name, index, self.header.chunks[index])

    def fill(self, index: int, out: Patterns) -> None:
        """Decode chunk `index` into `out`, all its patterns, or copy it if it is kept."""
        kept = self.cache.held((self, index * CHUNK_VALUES))
        if kept is None:
            self.decode_chunk(index, out)
        else:
            out[:] = kept.patterns

    def patterns_and_codes(self, begin: int, end: int) -> tuple[Patterns, NDArray[np.uint8] | None]:
        """Decode patterns and codes of begin..end, which are one chunk, at once."""
        index, held = begin // CHUNK_VALUES, self._container.last
        if (last := self.last(index)) is not None and last.patterns is not None:
            return last.patterns, last.codes
        patterns = np.empty(end - begin, PATTERN_TYPES[self.dtype.pattern_bytes])
        codes = self.decode_chunk(index, patterns)
        if held is not None:
            held.put(self.entry.name, index, self.header.chunks[index], Decoded(patterns, codes))
        return patterns, codes

    @property
    def stored(self) -> Stored:
        """Plan of the frame, and the method and settings that the index records."""
        lossy = self.entry.lossy
        method, settings = (None, {}) if lossy is None else (lossy.method, lossy.settings)
        return Stored(self.header.plan, method, settings)

    @property
    def n_codes(self) -> int | None:
        """Size of the alphabet of the frame's codes, or None if no quantization map made them."""
        quant_map = self.header.plan.quant_map
        return None if quant_map is None else quant_map.n_codes

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        """Decode the codes of patterns begin..end, one chunk; None if no quantization map made them."""
        index = begin // CHUNK_VALUES
        last = self.last(index)
        return self._codes_alone(index) if last is None else last.codes

    def changes(self, index: int) -> Changes | None:
        """Find where chunk `index` differs from its base; None if it does not say so, but must be decoded."""
        payload = self.payload(index)
        record = self.header.chunks[index]
        begin, end = self._bounds(index)
        with self._naming():
            try:
                return read_changes(self.header, record, payload, end - begin)
            except (FormatError, UnsupportedError) as error:
                check_stored(record, index, payload)
                raise type(error)(f"chunk {index}: {error}") from None

    def holds(self, index: int, patterns: Patterns) -> bool:
        """Return whether patterns have the checksum of chunk `index`."""
        return xxh64(patterns) == self.header.chunks[index].decoded

    def coders(self, index: int) -> set[int]:
        """Return the coders of the streams of chunk `index`."""
        return {stream.coder for stream in self.header.chunks[index].streams}

    def check_chunk(self, index: int) -> None:
        """Require that the stored bytes of a chunk are as written."""
        payload = self.payload(index)
        with self._naming():
            check_stored(self.header.chunks[index], index, payload)

    def chunk(self, index: int) -> Patterns:
        """Return the patterns of chunk `index`, shared with earlier callers: read only."""
        begin, end = self._bounds(index)
        kept = self.cache.get((self, begin), lambda: Decoded(*self.patterns_and_codes(begin, end)))
        assert kept.patterns is not None
        return kept.patterns

    def patterns(self, begin: int, end: int) -> Patterns:
        """Read patterns begin..end; decodes only the chunks that they touch."""
        n_patterns = self.header.n_patterns
        first, last = begin // CHUNK_VALUES, -(-end // CHUNK_VALUES)
        whole = (begin, end) == (first * CHUNK_VALUES, min(last * CHUNK_VALUES, n_patterns))
        if whole and last - first == 1:
            # Chunk by chunk through a chain: nothing would be read twice, so nothing is kept.
            is_kept = self.cache.held((self, begin)) is not None
            return self.chunk(first) if is_kept else self.patterns_and_codes(begin, end)[0]
        out = np.empty(end - begin, PATTERN_TYPES[self.dtype.pattern_bytes])
        for index in range(first, last):
            at, chunk = index * CHUNK_VALUES, self.chunk(index)
            low, high = max(begin, at), min(end, at + len(chunk))
            out[low - begin : high - begin] = chunk[low - at : high - at]
        return out


class GroupFrame(FrameSource):
    """The frame that the tensors of a group share: one chunk with their patterns, one after another."""

    def __init__(self, container: Container, members: Sequence[TensorEntry]) -> None:
        first = members[0]
        assert first.group is not None
        shape = (sum(n_elements(entry.shape) for entry in members),)
        name = group_name(first.group)
        super().__init__(
            container, TensorEntry(name, first.dtype, shape, first.offset, first.n_bytes, checksum="")
        )
        self.members = [(entry.name, entry.shape) for entry in members]

    def _naming(self) -> AbstractContextManager[None]:
        first, _ = self.members[0]
        return error_context(f"{self._container.name}: {len(self.members)} tensors, first {first!r}")

    def _read_header(self) -> FrameHeader:
        header = super()._read_header()
        if header.plan.quant_map is not None or header.plan.context_tensor_names:
            with self._naming():
                raise CorruptionError("the frame of a group has a quantization map or names a tensor")
        return header

    @functools.cached_property
    def base(self) -> TensorSource | None:
        """The base tensor that the frame needs, or None: the same members of the base."""
        if not self.header.plan.needs_base:
            return None
        base, ref = group_base(self.dtype, self.members, self._container.bases), self._container.outer_base
        if base is not None:
            return base
        if ref is None:
            raise CorruptionError("the group needs a base, and the file names and holds none that fits")
        raise MissingBaseError(f"needs its base {ref.title}, which has no such group or is not open")


def group_base(
    dtype: DType, members: Sequence[tuple[str, tuple[int, ...]]], bases: Mapping[str, TensorSource]
) -> TensorSource | None:
    """Find what a group is stored against; None if the base does not have it.

    Either the base has a group of the same members, or it has no frames, and tensors of all their names.
    """
    found = [bases.get(name) for name, _ in members]
    first = found[0]
    while isinstance(first, ViewOf):
        first = first.source
    if isinstance(first, GroupMember):
        group = first.group
        return group if (group.dtype, group.members) == (dtype, members) else None
    parts = [
        one
        for one, (_, shape) in zip(found, members, strict=True)
        if one is not None and (one.dtype, tuple(one.shape)) == (dtype, shape) and one.stored is None
    ]
    return JoinedSource.of(parts) if len(parts) == len(members) else None


class GroupMember(FrameSource):
    """A tensor that shares a frame with others, of which it has the patterns from `begin` on.

    What is asked of a frame is answered for the part of it that is the tensor's.
    """

    def __init__(self, container: Container, entry: TensorEntry, group: GroupFrame, begin: int) -> None:
        super().__init__(container, entry)
        self.group = group
        self._place = slice(begin, begin + super().n_patterns)
        self._checksum = int(entry.checksum, 16)

    @property
    def n_patterns(self) -> int:
        """Patterns of the tensor, as its place in the group says: they are asked for many times."""
        return self._place.stop - self._place.start

    @property
    def header(self) -> FrameHeader:
        """Dtype, shape and plan; the chunk and its streams are the group's."""
        return FrameHeader(self.dtype, self.shape, self.group.header.plan, ())

    @property
    def base(self) -> TensorSource | None:
        """The base of the whole group, or None."""
        return self.group.base

    @property
    def stored_bytes(self) -> int:
        """The tensor's share of the size of the group, by patterns; shares add up to it."""
        n_bytes, n_patterns = self.entry.n_bytes, self.group.n_patterns
        before, until = (n_bytes * at // n_patterns for at in (self._place.start, self._place.stop))
        return until - before

    def _own(self, patterns: Patterns) -> Patterns:
        """Slice the tensor's patterns out of its group's, and check them against the tensor's checksum."""
        own = patterns[self._place]
        if not self.holds(0, own):
            with self._naming():
                raise CorruptionError("the index records another checksum than its group holds values of")
        return own

    def holds(self, index: int, patterns: Patterns) -> bool:
        """Return whether patterns have the tensor's checksum."""
        return combine((xxh64(patterns),)) == self._checksum

    def coders(self, index: int) -> set[int]:
        """Return the coders of the streams of the group."""
        return self.group.coders(index)

    def needs(self, only_codes: bool) -> list[Node]:
        return [] if only_codes else [(self.group, False)]

    def decoded(self, index: int, only_codes: bool, held: DecodedBases) -> Decoded:
        if only_codes:
            return Decoded(None, None)
        patterns = held[self.group, False].patterns
        assert patterns is not None
        return Decoded(self._own(patterns), None)

    def decode_chunk(self, index: int, out: Patterns) -> None:
        """Copy the patterns into `out`."""
        self.copy(self.group.chunk(index), out)

    fill = decode_chunk

    def copy(self, patterns: Patterns, out: Patterns) -> None:
        """Copy the tensor's patterns from those of the group."""
        out[:] = self._own(patterns)

    def chunk(self, index: int) -> Patterns:
        """Return all patterns, shared with earlier callers: read only."""
        return self._own(self.group.chunk(index))

    def patterns(self, begin: int, end: int) -> Patterns:
        return self.chunk(0)[begin:end]

    def patterns_and_codes(self, begin: int, end: int) -> tuple[Patterns, None]:
        """Return the patterns; the tensor has no codes."""
        return self.patterns(begin, end), None

    def codes(self, begin: int, end: int) -> None:
        """Return None: the tensor has no codes."""

    def last(self, index: int) -> None:
        """Return None: what is held is the chunk of the group."""

    def changes(self, index: int) -> None:
        """Return None: the group is decoded as a whole."""

    def check_chunk(self, index: int) -> None:
        """Require that the stored bytes of the group are as written."""
        self.group.check_chunk(index)


def _sources_of(container: Container, entries: Sequence[TensorEntry]) -> dict[str, FrameSource]:
    """Make the sources of the tensors of a file by name, in stored order."""
    members: dict[int, list[TensorEntry]] = {}
    for entry in entries:
        if entry.group is not None:
            members.setdefault(entry.group, []).append(entry)
    groups = {number: GroupFrame(container, own) for number, own in members.items()}
    found, ends = dict[str, FrameSource](), dict.fromkeys(groups, 0)
    for entry in entries:
        if entry.group is None:
            found[entry.name] = FrameSource(container, entry)
        else:
            member = GroupMember(container, entry, groups[entry.group], ends[entry.group])
            ends[entry.group] += member.n_patterns
            found[entry.name] = member
    return found


def has_own_frame(source: TensorSource) -> TypeGuard[FrameSource]:
    """Return whether a tensor is read from a frame that it has for itself."""
    return isinstance(source, FrameSource) and not isinstance(source, GroupMember)


def frames_of(tensors: Mapping[str, FrameSource]) -> list[FrameSource]:
    """List the frames of tensors, each once: members of a group share one."""
    return list(dict.fromkeys(one.group if isinstance(one, GroupMember) else one for one in tensors.values()))


@dataclass(frozen=True, slots=True)
class _DecodedChunk(ViewOf):
    """One chunk of a frame that was decoded already, as a source."""

    chunk: Decoded

    def patterns(self, begin: int, end: int) -> Patterns:
        assert self.chunk.patterns is not None
        return self.chunk.patterns

    def codes(self, begin: int, end: int) -> NDArray[np.uint8] | None:
        return self.chunk.codes

    def patterns_and_codes(self, begin: int, end: int) -> tuple[Any, NDArray[np.uint8] | None]:
        """Return patterns and codes; the patterns are valid only if they were decoded."""
        return self.chunk.patterns, self.chunk.codes


class InlineFrames:
    """The frames of one base that a file carries, decoded from itself and the next inline base."""

    outer_base: BaseRef | None = None
    last: LastChunks | None = None

    def __init__(
        self, container: Container, level: int, record: InlineBase, bases: Mapping[str, TensorSource]
    ) -> None:
        self.name = f"{container.name}: inline base {level}"  # for messages
        self.record = record  # what the index says of it
        self.bases = bases  # tensors of the next inline base by name
        self.features = container.features
        self.cache, self.headers = container.cache, container.headers
        self.read = container.read
        self.tensors = {entry.name: FrameSource(self, entry) for entry in record.tensors}  # in stored order

    def naming(self, tensor: str) -> AbstractContextManager[None]:
        """Make a context that names this base and `tensor` in errors."""
        return error_context(f"{self.name}: tensor {tensor!r}")


def _inline_frames(container: Container, records: Sequence[InlineBase]) -> tuple[InlineFrames, ...]:
    """The inline bases, nearest first, each decoded from the one after it."""
    levels: list[InlineFrames] = []
    for level in range(len(records), 0, -1):
        bases = levels[0].tensors if levels else {}
        levels.insert(0, InlineFrames(container, level, records[level - 1], bases))
    return tuple(levels)


class Container:
    """An open `.ckptz` file: its index, what that requires of a reader, and sources of tensors by name."""

    def __init__(self, source: ByteSource, envelope: Envelope | None = None) -> None:
        self._source = source
        self.name = source.name  # for messages
        self.cache = CachedChunks()
        self.headers = HeaderCache()
        self.bases: Mapping[str, TensorSource] = {}  # by name; of a delta set by whoever resolves the chain
        self.last: LastChunks | None = None  # holds chunks for the next file of a run; set by its writer
        envelope = read_envelope(source) if envelope is None else envelope
        self._data_offset = envelope.data_offset
        self._sections = {r.name: r for r in envelope.regions if r.name.startswith(OPTIONAL_PREFIX)}
        with error_context(self.name):
            self.index, self.features = read_index(envelope, self.read)
        self.version = (envelope.metadata or {})[KEY_VERSION]  # of the format, as the file names it
        self.tensors = _sources_of(self, self.index.tensors)
        self.inline = _inline_frames(self, self.index.inline or ())  # bases that it carries, nearest first
        if self.inline:
            self.bases = self.inline[0].tensors

    @property
    def levels(self) -> list[Container | InlineFrames]:
        """The file's own tensors, then what it carries of its bases, nearest first."""
        return [self, *self.inline]

    @property
    def outer_base(self) -> BaseRef | None:
        """The base that stands in another file."""
        return self.index.base

    def naming(self, tensor: str) -> AbstractContextManager[None]:
        """Make a context that names this file and `tensor` in errors."""
        return error_context(f"{self.name}: tensor {tensor!r}")

    def read(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """Read bytes behind the header, uint8 [n_bytes]."""
        return self._source.read(self._data_offset + offset, n_bytes)

    def base_metadata(self) -> int | None:
        """Return the recorded checksum of a plain base's metadata, or None.

        Raises:
            ChecksumError: the section that says so was changed.
        """
        region = self._sections.get(BASE_METADATA)
        if region is None:
            return None
        n_bytes = min(region.end - region.begin, BASE_METADATA_BYTES + 1)
        section = self.read(region.begin, n_bytes).tobytes()
        with error_context(self.name):
            return parse_base_metadata(section)

    @property
    def stored_bytes(self) -> int:
        """Size of the file."""
        return self._source.size

    def share_caches(self, other: Container) -> None:
        """Keep what was read in the caches of another file of the same chain, which bound them together."""
        for level in self.levels:
            level.cache, level.headers = other.cache, other.headers

    def close(self) -> None:
        """Release the file and what was decoded from it."""
        self.cache.clear()
        self.headers.clear()
        self._source.close()


def check_empty(source: TensorSource) -> None:
    """Read the frame of a tensor without patterns, of which no chunk would be decoded.

    Raises:
        LimitError: such tensors of the file have more than 2^24 elements of outer vectors together.
    """
    if isinstance(source, FrameSource) and not source.n_patterns:
        source.check_base()
        source.check_vectors()
