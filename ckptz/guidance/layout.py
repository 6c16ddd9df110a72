"""The layout of files that guide an encoder: safetensors files whose metadata says what is in them.

    safetensors header | __metadata__: ckptz.guide, ckptz.guide_version, ckptz.guide_content | tensors

The content is JSON, the structs below; docs/hooks.md describes it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import Units
from ckptz.container.byte_source import FileBytes
from ckptz.container.envelope import Count, PlainFile, RegionSource, strict_json
from ckptz.container.index import Shape
from ckptz.errors import CalibrationError, CkptzError, UnsupportedError

GuideKind = Literal["calibration", "sensitivity"]
LayerKind = Literal["linear", "conv", "conv1d_t", "embedding"]
Shapes = Mapping[str, tuple[int, ...]]

GUIDE_VERSION: Final = 1
KEY_GUIDE, KEY_VERSION, KEY_CONTENT = "ckptz.guide", "ckptz.guide_version", "ckptz.guide_content"
_ARRAY_TYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
}

Names = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


# --- what the metadata says -------------------------------------------------------------------------


class InputRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of sums, and how many input vectors are in it; layers with the same inputs share it."""

    tensor: str
    n_samples: Count


class ModuleRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer. `weight` are all names of its weight, the first one first; several where it is tied.

    The layer's sum is that of all its `inputs`.
    """

    module: str
    kind: LayerKind
    weight: Names
    shape: Shape
    inputs: Annotated[tuple[InputRow, ...], msgspec.Meta(min_length=1)]


class CalibrationContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A calibration: `skipped` are layers that were not recorded, with reasons."""

    fingerprint: str
    modules: tuple[ModuleRow, ...]
    skipped: dict[str, str]


class SensitivityContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gradient averages: `parameters` are the names of each, whose first one is its tensor's."""

    fingerprint: str
    beta: Annotated[float, msgspec.Meta(gt=0, le=1)]
    parameters: tuple[Names, ...]


Content = TypeVar("Content", CalibrationContent, SensitivityContent)


def shape_fingerprint(shapes: Shapes) -> str:
    """Hash the names and shapes of a model's parameters: SHA-256 in hexadecimal."""
    lines = (f"{name}\t{'x'.join(map(str, shape))}\n" for name, shape in sorted(shapes.items()))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def guide_metadata(guide: GuideKind, content: CalibrationContent | SensitivityContent) -> dict[str, str]:
    """Make the `__metadata__` of a guide file."""
    text = msgspec.json.encode(content).decode()
    return {KEY_GUIDE: guide, KEY_VERSION: str(GUIDE_VERSION), KEY_CONTENT: text}


# --- reading --------------------------------------------------------------------------------------


class GuideFile:
    """An open guide file; tensors are read when they are asked for."""

    def __init__(self, path: str | os.PathLike[str], guide: GuideKind) -> None:
        self.path, self._guide = Path(path), guide
        source = FileBytes(path)
        try:
            self._file = PlainFile(source)
        except CkptzError as error:
            source.close()
            raise self.error(f"not a whole safetensors file ({error}); use an intact copy") from None

    def error(self, message: str) -> CalibrationError:
        """Make an error that names this file."""
        return CalibrationError(f"{self.path}: {message}")

    def content(self, content_type: type[Content]) -> Content:
        """Parse the metadata that say what is in the file.

        Raises:
            CalibrationError: another kind of file, or damaged.
            UnsupportedError: written by a newer ckptz.
        """
        metadata = self._file.metadata or {}
        guide = metadata.get(KEY_GUIDE)
        if guide != self._guide:
            found = "has no such content" if guide is None else f"is a {guide} file"
            raise self.error(f"{found}; a {self._guide} file is what ckptz.hooks saves as one")
        version = metadata.get(KEY_VERSION, "")
        if version != str(GUIDE_VERSION):
            raise UnsupportedError(
                f"{self.path}: version {version[:20]!r} of {guide} files, and this ckptz reads "
                f"{GUIDE_VERSION}; upgrade it, or record again"
            )
        try:
            value = strict_json(metadata.get(KEY_CONTENT, "").encode("utf-8", "surrogatepass"), KEY_CONTENT)
            return msgspec.convert(value, content_type)
        except (CkptzError, msgspec.ValidationError) as error:
            raise self.error(f"damaged ({error}); record again") from None

    def region(self, tensor: str, dtypes: Iterable[str]) -> RegionSource:
        """Find where a tensor lies; its dtype must be one of `dtypes`."""
        region = self._file.tensors.get(tensor)
        if region is None:
            raise self.error(f"tensor {tensor!r} is missing; record again")
        if region.dtype.name not in dtypes:
            raise self.error(f"tensor {tensor!r} is {region.dtype.name}, not {' or '.join(dtypes)}")
        return region

    def array(self, tensor: str) -> NDArray[Any]:
        """Read a tensor's finite values, of its dtype and shape [...], into memory of the caller's own."""
        region = self._file.tensors[tensor]
        flat: Units = region.units(0, region.n_units)
        array: NDArray[Any] = flat.view(_ARRAY_TYPES[region.dtype.name]).reshape(region.shape)
        if not np.isfinite(array).all():
            raise self.error(f"tensor {tensor!r} has values that are not finite; record again")
        return array

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Give the dimensions of a tensor that the file has."""
        return self._file.tensors[tensor].shape

    def close(self) -> None:
        """Release the file."""
        self._file.close()
