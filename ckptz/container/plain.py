"""Plain `.safetensors` files: read piece by piece, and written streaming."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from numpy.typing import NDArray

from ckptz.bits.checksum import combine, xxh64
from ckptz.bits.cursor import ByteWriter
from ckptz.codec.units import UNIT_TYPES, TensorSource
from ckptz.container.byte_source import ByteSource
from ckptz.container.envelope import Envelope, Region, build_header, read_envelope
from ckptz.container.index import content_id
from ckptz.dtypes import DType
from ckptz.errors import ChecksumError

BASE_METADATA_BYTES: Final = 16  # of the section


@dataclass(frozen=True, slots=True)
class RegionSource(TensorSource):
    """One tensor of a plain file, read by position."""

    file: PlainFile
    region: Region

    @property
    def dtype(self) -> DType:
        return self.region.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.region.shape

    def units(self, begin: int, end: int) -> NDArray[Any]:
        size = self.dtype.unit_bytes
        raw = self.file.read(self.region.begin + begin * size, (end - begin) * size)
        return raw.view(UNIT_TYPES[size])


class PlainFile:
    """An open safetensors file; `tensors` in the order of their offsets."""

    def __init__(self, source: ByteSource, envelope: Envelope | None = None) -> None:
        self._source = source
        self.name = source.name
        envelope = read_envelope(source) if envelope is None else envelope
        self._data_offset = envelope.data_offset
        self.metadata = envelope.metadata
        self.tensors = {region.name: RegionSource(self, region) for region in envelope.regions}

    def read(self, offset: int, n_bytes: int) -> NDArray[Any]:
        """Read bytes behind the header, uint8 [n_bytes]."""
        return self._source.read(self._data_offset + offset, n_bytes)

    @property
    def stored_bytes(self) -> int:
        """Size of the file."""
        return self._source.size

    def close(self) -> None:
        """Release the file."""
        self._source.close()


def tensor_checksum(source: TensorSource) -> int:
    """Compute the checksum of a tensor, as a frame of it would record."""
    bounds = source.chunk_bounds()
    return combine(xxh64(source.units(begin, end)) for begin, end in bounds)


def content_id_of(tensors: Mapping[str, TensorSource]) -> str:
    """Compute the content id of any set of tensors; reads all of them."""
    return content_id(
        (name, source.dtype.name, source.shape, tensor_checksum(source)) for name, source in tensors.items()
    )


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
    """Pack the optional section of a delta that holds the checksum of its base's metadata."""
    packed = checksum.to_bytes(8, "little")
    return packed + xxh64(packed).to_bytes(8, "little")


def parse_base_metadata(section: bytes) -> int:
    """Parse a section as `pack_base_metadata` writes it.

    Raises:
        ChecksumError: the section was changed.
    """
    checksum = int.from_bytes(section[:8], "little")
    if section != pack_base_metadata(checksum):
        raise ChecksumError("the section with the checksum of the base's metadata was changed")
    return checksum


def plain_regions(tensors: Mapping[str, TensorSource]) -> list[Region]:
    """List the regions of a file that holds `tensors` one after another."""
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
    """Write a safetensors file from the units of its tensors, chunk after chunk, in order."""
    sink.write(build_header(regions, metadata))
    for units in chunks:
        sink.write(units.data)
