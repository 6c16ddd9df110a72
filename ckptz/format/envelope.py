"""The safetensors header: the outer layer of a `.ckptz` file, and all of a plain file.

Implements spec/06-container.md#envelope. Parsing is strict: no holes, no overlap, no bytes after the end, no
duplicate keys. Plain files are read in parts and written as a stream.

    header length u64 | JSON, padded with spaces | tensor bytes
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Final, NamedTuple, NoReturn

import msgspec
from numpy.typing import NDArray

from ckptz.errors import ChecksumError, CorruptionError, TruncatedError, with_context
from ckptz.format.bits import ByteWriter, combine, xxh64
from ckptz.format.byte_source import ByteSource
from ckptz.format.dtypes import DType, dtype_of
from ckptz.format.sources import PATTERN_TYPES, LazySource, TensorSource

LENGTH_BYTES: Final = 8
HEAD_BYTES: Final = LENGTH_BYTES + 1  # of a file: length and first character of the header
MAX_JSON_VALUES: Final = 1 << 22  # spec/06-container.md#envelope
MAX_HEADER_BYTES: Final = 100_000_000  # safetensors' own limit
ALIGNMENT: Final = 8
MAX_SURE_DIGITS: Final = 300  # integers with fewer digits are in the range of a double
_PAIR: Final = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")  # a surrogate pair of two escapes
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
BASE_METADATA_BYTES: Final = 16  # of the section


class Region(NamedTuple):
    """A tensor in the envelope; `begin` and `end` are byte offsets from the end of the header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


def is_head(head: bytes) -> bool:
    """Return whether the first `HEAD_BYTES` of a file are those of a safetensors file."""
    return head[LENGTH_BYTES:HEAD_BYTES] == b"{"


@dataclass(frozen=True, slots=True)
class Envelope:
    """A parsed safetensors header, with regions sorted by offset."""

    metadata: dict[str, str] | None
    regions: tuple[Region, ...]
    data_offset: int


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    pairs = dict(items)
    if len(pairs) != len(items):
        raise CorruptionError("a key occurs twice")
    return pairs


def _no_constant(word: str) -> NoReturn:
    raise CorruptionError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise CorruptionError(f"{digits[:20]} exceeds the range of a double")
    return value


def _finite_integer(digits: str) -> int:
    if len(digits) > MAX_SURE_DIGITS:
        _finite(digits)
    return int(digits)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_finite_integer
)


def strict_json(text: bytes, what: str) -> Any:
    """Parse UTF-8 JSON; refuse duplicate keys, numbers beyond a double and unpaired surrogates."""
    check_number(text, what)
    try:
        value = _DECODER.decode(text.decode())
    except CorruptionError as error:
        raise CorruptionError(f"{what}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{what}: not valid JSON ({error})") from None
    # Remove escaped backslashes, so that every remaining backslash begins an escape.
    if _HALF.search(_PAIR.sub(b"", text.replace(b"\\\\", b"  "))):
        raise CorruptionError(f"{what}: not valid JSON (half of a surrogate pair)")
    return value


def check_number(text: bytes, what: str) -> None:
    """Refuse JSON with too many values: parsed, they may take a hundred times the bytes of the text."""
    if sum(map(text.count, (b"[", b"{", b","))) > MAX_JSON_VALUES:
        raise CorruptionError(f"{what}: more than {MAX_JSON_VALUES} values")


def as_written(text: bytes, kind: Any) -> Any:
    """Parse JSON of type `kind` that is byte for byte as ckptz writes it; return None for any other.

    Such a text has no duplicate keys and no invalid values, which is far more expensive to check otherwise.
    """
    if b'": ' in text[:256]:  # most other writers put a space there
        return None
    try:
        value = msgspec.json.decode(text, type=kind)
        return value if msgspec.json.encode(value) == text.rstrip(b" ") else None
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def check_downloaded(first: bytes) -> None:
    """Raise CorruptionError if the first 8 bytes of a file are those of a pointer of Git LFS."""
    if first == b"version ":
        raise CorruptionError("a pointer of Git LFS in place of the file; git lfs pull gets the file")


def read_envelope(source: ByteSource) -> Envelope:
    """Parse and check the header of `source`.

    Raises:
        TruncatedError, CorruptionError: not a whole safetensors file.
        UnsupportedError: a dtype that this version does not know.
    """
    try:
        if source.size < LENGTH_BYTES:
            raise TruncatedError(f"{source.size} bytes are too few for a safetensors header")
        first = source.read(0, LENGTH_BYTES).tobytes()
        n_header = int.from_bytes(first, "little")
        check_downloaded(first)
        if n_header > MAX_HEADER_BYTES:
            raise CorruptionError(
                f"not a safetensors file: it begins with {first!r}, so its header would have {n_header} "
                f"bytes, and may have {MAX_HEADER_BYTES}; if it was downloaded, get it again"
            )
        if LENGTH_BYTES + n_header > source.size:
            raise TruncatedError(f"header of {n_header} bytes in a file of {source.size}")
        text = source.read(LENGTH_BYTES, n_header).tobytes()
        if not text.startswith(b"{"):
            raise CorruptionError("header does not begin with {; not a safetensors file")
        raw = strict_json(text, "header")
        return _checked(raw, LENGTH_BYTES + n_header, source.size)
    except (TruncatedError, CorruptionError) as error:
        raise with_context(error, source.name) from None


def _checked(raw: dict[str, Any], data_offset: int, size: int) -> Envelope:
    metadata = raw.pop("__metadata__", None)
    if metadata is not None and not is_text_map(metadata):
        raise CorruptionError("header: __metadata__ is not a map of strings")
    regions = sorted((_region(name, row) for name, row in raw.items()), key=lambda r: (r.begin, r.end))
    position = 0
    for region in regions:
        if region.begin != position:
            raise CorruptionError(f"tensor {region.name!r}: starts at {region.begin}, not at {position}")
        position = region.end
    if data_offset + position > size:
        raise TruncatedError(f"is cut off: it has {size} bytes and should have {data_offset + position}")
    if data_offset + position < size:
        raise CorruptionError(f"{size - data_offset - position} bytes follow the last tensor")
    return Envelope(metadata, tuple(regions), data_offset)


def is_text_map(value: Any) -> bool:
    """Return whether a JSON value maps strings to strings."""
    return isinstance(value, dict) and set(map(type, value.values())) <= {str}


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A tensor entry of the header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def _region(name: str, entry: Any) -> Region:
    try:
        row = msgspec.convert(entry, _HeaderEntry)
    except msgspec.ValidationError:
        has_fields = isinstance(entry, dict) and entry.keys() == set(_HeaderEntry.__struct_fields__)
        what = "is malformed" if has_fields else "must have the fields dtype, shape and data_offsets"
        raise CorruptionError(f"tensor {name!r}: its header entry {what}") from None
    dtype, (begin, end) = dtype_of(row.dtype), row.data_offsets
    if end - begin != dtype.n_bytes(row.shape):
        raise CorruptionError(
            f"tensor {name!r}: {end - begin} bytes do not fit {row.dtype} {list(row.shape)}"
        )
    return Region(name, dtype, row.shape, begin, end)


def build_header(
    regions: Iterable[Region], metadata: Mapping[str, str] | None, n_bytes: int | None = None
) -> bytes:
    """Return a header: its length and padded JSON.

    Args:
        regions: regions sorted by offset.
        metadata: the `__metadata__` map, or None.
        n_bytes: total size to pad to; by default the alignment.
    """
    rows: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for r in regions:
        rows[r.name] = {"dtype": r.dtype.name, "shape": list(r.shape), "data_offsets": [r.begin, r.end]}
    text = msgspec.json.encode(rows)
    padded = -(-len(text) // ALIGNMENT) * ALIGNMENT if n_bytes is None else n_bytes - LENGTH_BYTES
    assert len(text) <= padded, "the header does not fit into the reserved space"
    return padded.to_bytes(LENGTH_BYTES, "little") + text.ljust(padded, b" ")


class PlainFile:
    """An open safetensors file, with `tensors` sorted by offset."""

    def __init__(self, source: ByteSource, envelope: Envelope | None = None) -> None:
        self._source = source
        self.name = source.name
        envelope = read_envelope(source) if envelope is None else envelope
        self._data_offset = envelope.data_offset
        self.metadata = envelope.metadata
        self.stored_bytes = source.size  # of the file
        self.tensors = {
            region.name: LazySource(region.dtype, region.shape, functools.partial(self._patterns, region))
            for region in envelope.regions
        }

    def _patterns(self, region: Region, begin: int, end: int) -> NDArray[Any]:
        size = region.dtype.pattern_bytes
        raw = self.read(region.begin + begin * size, (end - begin) * size)
        return raw.view(PATTERN_TYPES[size])

    def read(self, offset: int, n_bytes: int) -> NDArray[Any]:
        """Read bytes after the header, uint8 [n_bytes]."""
        return self._source.read(self._data_offset + offset, n_bytes)

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def tensor_checksum(source: TensorSource) -> int:
    """Compute the checksum of a tensor, as its frame records it."""
    bounds = source.chunk_bounds()
    return combine(xxh64(source.patterns(begin, end)) for begin, end in bounds)


def metadata_checksum(metadata: Mapping[str, str] | None) -> int:
    """Compute the checksum of a plain file's `__metadata__`: spec/07-chain.md#metadata-of-a-plain-base."""
    out = ByteWriter()
    out.u8(metadata is not None)
    texts = {key.encode("utf-8"): text.encode("utf-8") for key, text in (metadata or {}).items()}
    for part in itertools.chain.from_iterable(sorted(texts.items())):
        out.u64(len(part))
        out.raw(part)
    return xxh64(out.getvalue())


def pack_base_metadata(checksum: int) -> bytes:
    """Pack the optional section with the checksum of the base's metadata."""
    packed = checksum.to_bytes(8, "little")
    return packed + xxh64(packed).to_bytes(8, "little")


def parse_base_metadata(section: bytes) -> int:
    """Parse a section, the inverse of `pack_base_metadata`.

    Raises:
        ChecksumError: the section is damaged.
    """
    checksum = int.from_bytes(section[:8], "little")
    if section != pack_base_metadata(checksum):
        raise ChecksumError("the section with the checksum of the base's metadata was changed")
    return checksum


def plain_regions(tensors: Mapping[str, TensorSource]) -> list[Region]:
    """Return the regions of a file with consecutive tensors."""
    regions, offset = [], 0
    for name, source in tensors.items():
        n_bytes = source.n_bytes
        regions.append(Region(name, source.dtype, source.shape, offset, offset + n_bytes))
        offset += n_bytes
    return regions


def write_plain(
    sink: BinaryIO,
    regions: Sequence[Region],
    metadata: Mapping[str, str] | None,
    chunks: Iterator[NDArray[Any]],
) -> None:
    """Write a safetensors file from the consecutive chunks of its tensors, patterns [n] each."""
    sink.write(build_header(regions, metadata))
    for patterns in chunks:
        sink.write(patterns.data)
