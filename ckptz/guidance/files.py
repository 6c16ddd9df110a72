"""Files that guide an encoder: layer inputs (calibrations) and gradient averages, read with numpy alone.

    safetensors header | __metadata__: ckptz.guide, ckptz.guide_version, ckptz.guide_content | tensors

The content is JSON, the structs below. `ckptz.hooks` writes such files, and only encoders read them. See
docs/hooks.md.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import Units
from ckptz.container.byte_source import FileBytes
from ckptz.container.envelope import Count, PlainFile, RegionSource, strict_json
from ckptz.container.index import Shape
from ckptz.encoding.subject import InputMoments
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
WEIGHT_AXIS: Final[Mapping[LayerKind, int]] = {"linear": 1, "conv": 1, "conv1d_t": 0, "embedding": 0}
# What PyTorch's wrappers, and states saved as {"model": ...}, put before the names of a model.
PREFIXES: Final = ("model.", "module.", "_orig_mod.")


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


def _checkpoint_names(shapes: Shapes) -> dict[str, str]:
    """A checkpoint's names by what they are called with and without `PREFIXES`; exact names go first."""
    found = {name: name for name in shapes}
    for name in shapes:
        bare = name
        while prefix := next((p for p in PREFIXES if bare.startswith(p)), None):
            bare = bare.removeprefix(prefix)
            found.setdefault(bare, name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedInputs:
    """The second moments of inputs that a calibration holds for one weight."""

    names: tuple[str, ...]  # of the weight; several where it is tied
    shape: tuple[int, ...]  # of the weight
    # by the kind of layer that uses it. A head that is tied to an embedding has two.
    moments: Mapping[LayerKind, InputMoments]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSum:
    """One tensor of a calibration, the layers that share it, and the input vectors in it."""

    tensor: str
    kind: LayerKind
    modules: tuple[str, ...]
    n_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAverage:
    """The average gradient of one parameter in a sensitivity file: `read` gives it, float32 in its shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.float32]]


Recorded = TypeVar("Recorded", RecordedInputs, GradientAverage)


def _matched(
    where: str | os.PathLike[str], recorded: Mapping[str, Recorded], shapes: Shapes
) -> tuple[dict[str, Recorded], list[str]]:
    called = _checkpoint_names(shapes)
    matched, unmatched = {}, []
    for first, one in recorded.items():
        present = [called[name] for name in one.names if name in called]
        for name in present:
            if tuple(shapes[name]) != one.shape:
                raise CalibrationError(
                    f"{where}: tensor {name!r} has shape {list(shapes[name])}, and what was recorded is for "
                    f"{list(one.shape)}; record with this model"
                )
            matched[name] = one
        if not present:
            unmatched.append(first)
    return matched, unmatched


@dataclass(frozen=True, slots=True)
class RecordedCalibration:
    """A calibration in memory, by the first name of each weight; see `CalibrationFile`."""

    weights: Mapping[str, RecordedInputs] = field(repr=False)

    def __len__(self) -> int:
        return len(self.weights)

    def match(self, shapes: Shapes) -> tuple[dict[str, RecordedInputs], list[str]]:
        """Find what is known of the tensors of a checkpoint; see `CalibrationFile.match`."""
        return _matched("calibration", self.weights, shapes)


@dataclass(frozen=True, slots=True)
class _Recordings(Mapping[str, Recorded]):
    """What an open guide file records, by the first name of each parameter."""

    guide: ClassVar[GuideKind]
    file: GuideFile
    recorded: Mapping[str, Recorded] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file and check all but the values, which are checked when they are read.

        Raises:
            FileNotFoundError: no such file.
            CalibrationError: another kind of file, or damaged.
            UnsupportedError: written by a newer ckptz.
        """
        file = GuideFile(path, cls.guide)
        try:
            return cls._of(file)
        except BaseException:
            file.close()
            raise

    @classmethod
    def _of(cls, file: GuideFile) -> Self:
        raise NotImplementedError

    def match(self, shapes: Shapes) -> tuple[dict[str, Recorded], list[str]]:
        """Find what is known of the tensors of a checkpoint.

        Args:
            shapes: of its tensors by name. Names may begin with "model." or "module.".

        Returns:
            What was recorded by the checkpoint's names, and the parameters that the checkpoint does not hold.

        Raises:
            CalibrationError: a tensor has another shape than the parameter that was recorded.
        """
        return _matched(self.file.path, self.recorded, shapes)

    def close(self) -> None:
        """Release the file; nothing more can be read."""
        self.file.close()

    def __getitem__(self, name: str) -> Recorded:
        return self.recorded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.recorded)

    def __len__(self) -> int:
        return len(self.recorded)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class CalibrationFile(_Recordings[RecordedInputs]):
    """A file that `ckptz.hooks.Calibration` saved, by the first name of each weight.

    Example:
        >>> with CalibrationFile.open("calibration.safetensors") as calibration:  # doctest: +SKIP
        ...     matched, unmatched = calibration.match({"head.weight": (10, 64)})
        ...     matched["head.weight"].moments["linear"].read().shape
        (64, 64)
    """

    guide = "calibration"
    content: CalibrationContent
    sums: tuple[StoredSum, ...] = field(repr=False)

    @classmethod
    def _of(cls, file: GuideFile) -> Self:
        content = file.content(CalibrationContent)
        sums = tuple(_stored_sums(file, content.modules))
        return cls(file, dict(_weights(file, content.modules)), content, sums)

    def read(self, one: StoredSum) -> NDArray[Any]:
        """Read a stored tensor and check it: a float32 or float64 matrix [..., n, n], or int64 counts [n].

        Raises:
            CalibrationError: its values are not finite, or no sums of squares or counts.
        """
        return (_counts if one.kind == "embedding" else _matrix)(self.file, one.tensor)


@dataclass(frozen=True, slots=True)
class SensitivityFile(_Recordings[GradientAverage]):
    """A file that `ckptz.hooks.SensitivityTracker` saved, by the first name of each parameter."""

    guide = "sensitivity"
    content: SensitivityContent

    @classmethod
    def _of(cls, file: GuideFile) -> Self:
        content = file.content(SensitivityContent)
        _check_names(file, content.parameters)
        averages = {}
        for names in content.parameters:
            shape, read = file.region(names[0], ("F32",)).shape, functools.partial(file.array, names[0])
            averages[names[0]] = GradientAverage(names=names, shape=shape, read=read)
        return cls(file, averages, content)


def _stored_sums(file: GuideFile, rows: Iterable[ModuleRow]) -> Iterator[StoredSum]:
    """The tensors of a file, which the rows of all layers agree on."""
    users: dict[str, list[tuple[ModuleRow, InputRow]]] = {}
    for row in rows:
        _check_row(file, row)
        for one in row.inputs:
            users.setdefault(one.tensor, []).append((row, one))
    for tensor, uses in users.items():
        modules = tuple(row.module for row, _ in uses)
        facts = {(row.kind, one.n_samples) for row, one in uses}
        if len(facts) > 1 or len(set(modules)) < len(modules):
            raise file.error(f"tensor {tensor!r} is listed with contradictions; record again")
        kind, n_samples = facts.pop()
        yield StoredSum(tensor=tensor, kind=kind, modules=modules, n_samples=n_samples)


def _weights(file: GuideFile, rows: Sequence[ModuleRow]) -> Iterator[tuple[str, RecordedInputs]]:
    """Sum up what the layers of each weight recorded."""
    by_weight: dict[str, list[ModuleRow]] = {}
    for row in rows:
        by_weight.setdefault(row.weight[0], []).append(row)
    _check_names(file, {row.weight for row in rows})
    for name, uses in by_weight.items():
        layouts = {(row.kind, row.shape, file.shape_of(one.tensor)) for row in uses for one in row.inputs}
        kinds = dict.fromkeys(row.kind for row in uses)
        if len({shape for _, shape, _ in layouts}) > 1 or len(kinds) < len(layouts):
            raise file.error(f"weight {name!r} is listed with several shapes; record again")
        moments = {kind: _moments(file, [row for row in uses if row.kind == kind]) for kind in kinds}
        yield name, RecordedInputs(names=uses[0].weight, shape=uses[0].shape, moments=moments)


def _check_names(file: GuideFile, groups: Iterable[tuple[str, ...]]) -> None:
    """Refuse a name that stands for two parameters."""
    taken: set[str] = set()
    for name in (name for group in groups for name in group):
        if name in taken:
            raise file.error(f"{name!r} is listed as the name of two parameters; record again")
        taken.add(name)


def _check_row(file: GuideFile, row: ModuleRow) -> None:
    if len({one.tensor for one in row.inputs}) != len(row.inputs):
        raise file.error(f"layer {row.module!r} lists a tensor twice; record again")
    dtypes = ("I64",) if row.kind == "embedding" else ("F32", "F64")
    for one in row.inputs:
        shape = file.region(one.tensor, dtypes).shape
        if not _fits(row.kind, row.shape, shape):
            raise file.error(
                f"tensor {one.tensor!r} has shape {list(shape)}, which does not fit the {row.kind} weight "
                f"{row.weight[0]!r} of shape {list(row.shape)}; record again"
            )


def _fits(kind: LayerKind, weight: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Tell whether sums of this shape belong to a weight of that shape."""
    if kind == "conv":
        n = math.prod(weight[1:])
        is_grouped = len(shape) == 3 and shape[0] > 1 and len(weight) > 0 and weight[0] % shape[0] == 0
        return len(weight) in (3, 4) and shape[-2:] == (n, n) and (len(shape) == 2 or is_grouped)
    if len(weight) != 2:
        return False
    n = weight[WEIGHT_AXIS[kind]]
    return shape == ((n,) if kind == "embedding" else (n, n))


def _moments(file: GuideFile, rows: list[ModuleRow]) -> InputMoments:
    kind, inputs = rows[0].kind, [one for row in rows for one in row.inputs]

    def read() -> NDArray[Any]:
        read_one = _counts if kind == "embedding" else _matrix
        total = functools.reduce(operator.add, (read_one(file, one.tensor) for one in inputs))
        return total.astype(np.float64) if kind == "embedding" else total

    n_samples = sum(one.n_samples for one in inputs)
    return InputMoments(axis=WEIGHT_AXIS[kind], n_samples=n_samples, read=read)


def _counts(file: GuideFile, tensor: str) -> NDArray[Any]:
    counts = file.array(tensor)
    if counts.size and counts.min() < 0:
        raise file.error(f"tensor {tensor!r} has negative counts; record again")
    return counts


def _matrix(file: GuideFile, tensor: str) -> NDArray[Any]:
    matrix = file.array(tensor)
    diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
    if (diagonal < 0).any() or not np.array_equal(matrix, np.swapaxes(matrix, -2, -1)):
        raise file.error(f"tensor {tensor!r} is not a symmetric sum of squares; record again")
    return matrix
