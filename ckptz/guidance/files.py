"""Files of side information: layer inputs (calibrations) and average gradients. Reading needs no torch.

    safetensors header | __metadata__: ckptz.guide, ckptz.guide_version, ckptz.guide_content | tensors

`guide_content` is JSON with the structs below. `ckptz.hooks` writes these files, and encoders read them; see
docs/hooks.md.
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptz.codec.tensor import InputCovariance
from ckptz.errors import CalibrationError, CkptzError, UnsupportedError
from ckptz.format.byte_source import FileBytes, open_bytes
from ckptz.format.envelope import Count, PlainFile, read_envelope, strict_json
from ckptz.format.index import Shape
from ckptz.format.sources import Patterns, TensorSource

LayerKind = Literal["linear", "conv", "conv1d_t", "embedding"]
Shapes = Mapping[str, tuple[int, ...]]

GUIDE_VERSION: Final = 1
KEY_GUIDE, KEY_VERSION, KEY_CONTENT = "ckptz.guide", "ckptz.guide_version", "ckptz.guide_content"
_ARRAY_TYPES: Final[Mapping[str, str]] = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}

Names = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


def guide_of(path: Path) -> str | None:
    """Return the kind of a file, "calibration" or "sensitivity"; None for all other files."""
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    file = open_bytes(path)
    try:
        return (read_envelope(file).metadata or {}).get(KEY_GUIDE)
    except CkptzError:  # reading its tensors reports the error
        return None
    finally:
        file.close()


# --- metadata -----------------------------------------------------------------------------------------
WEIGHT_AXIS: Final[Mapping[LayerKind, int]] = {"linear": 1, "conv": 1, "conv1d_t": 0, "embedding": 0}
# Prefixes of names from PyTorch's wrappers, and from states saved as {"model": ...}.
PREFIXES: Final = ("model.", "module.", "_orig_mod.")
# Components of wrapped submodules within a name, where "module" may be a submodule of the user.
_INNER_WRAPPERS: Final = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))


class InputRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of sums, and its number of input vectors; layers with the same inputs share it."""

    tensor: str
    n_samples: Count


class ModuleRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer. `weight` lists all names of its weight, several if it is tied.

    The sum of the layer is the total of all its `inputs`.
    """

    module: str
    kind: LayerKind
    weight: Names
    shape: Shape
    inputs: Annotated[tuple[InputRow, ...], msgspec.Meta(min_length=1)]


class CalibrationContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a calibration: `skipped` maps layers that were not recorded to the reasons."""

    fingerprint: str
    modules: tuple[ModuleRow, ...]
    skipped: dict[str, str]


class SensitivityContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a sensitivity file: `parameters` lists all names of each; the first is its tensor's."""

    fingerprint: str
    beta: Annotated[float, msgspec.Meta(gt=0, le=1)]
    parameters: tuple[Names, ...]


T = TypeVar("T")
Content = TypeVar("Content", CalibrationContent, SensitivityContent)


def guide_metadata(content: CalibrationContent | SensitivityContent) -> dict[str, str]:
    """Return the `__metadata__` of a file with this content."""
    guide = "calibration" if isinstance(content, CalibrationContent) else "sensitivity"
    text = msgspec.json.encode(content).decode()
    return {KEY_GUIDE: guide, KEY_VERSION: str(GUIDE_VERSION), KEY_CONTENT: text}


# --- recordings ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedInputs:
    """The input covariances that were recorded for one weight."""

    names: tuple[str, ...]  # names of the weight; several if it is tied
    shape: tuple[int, ...]  # shape of the weight
    # By kind of layer: a weight that is both embedding and head has two.
    covariances: Mapping[LayerKind, InputCovariance]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAverage:
    """The average gradient of one parameter; `read` returns it as float32 in the parameter's shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.float32]]


Recorded = TypeVar("Recorded", RecordedInputs, GradientAverage)
ReadSum = Callable[[str], NDArray[Any]]  # -> float32 or float64 matrix [..., n, n], or int64 counts [n]


def inputs_by_weight(rows: Iterable[ModuleRow], read: ReadSum) -> dict[str, RecordedInputs]:
    """Combine the recordings of all layers that share a weight; `read` returns a sum by tensor name."""
    by_weight: dict[str, list[ModuleRow]] = {}
    for row in rows:
        by_weight.setdefault(row.weight[0], []).append(row)
    recorded = {}
    for name, uses in by_weight.items():
        kinds = dict.fromkeys(row.kind for row in uses)
        covariances = {
            kind: _covariance(kind, [row for row in uses if row.kind == kind], read) for kind in kinds
        }
        recorded[name] = RecordedInputs(names=uses[0].weight, shape=uses[0].shape, covariances=covariances)
    return recorded


def _covariance(kind: LayerKind, rows: Sequence[ModuleRow], read: ReadSum) -> InputCovariance:
    inputs = [one for row in rows for one in row.inputs]

    def total() -> NDArray[Any]:
        covariance = functools.reduce(operator.add, (read(one.tensor) for one in inputs))
        return covariance.astype(np.float64) if kind == "embedding" else covariance

    n_samples = sum(one.n_samples for one in inputs)
    return InputCovariance(axis=WEIGHT_AXIS[kind], n_samples=n_samples, read=total)


class Recordings(Generic[Recorded]):
    """Recordings for a model's parameters, in memory or in an open file.

    Attributes:
        where: name of the source in messages.
        recorded: recordings by the first name of each parameter.
    """

    def __init__(self, where: str, recorded: Mapping[str, Recorded]) -> None:
        self.where = where
        self.recorded: Mapping[str, Recorded] = recorded

    def match(self, shapes: Shapes) -> tuple[dict[str, Recorded], list[str]]:
        """Match the recordings with the tensors of a checkpoint.

        Args:
            shapes: shapes of the tensors by name. Names may begin with "model." or "module.".

        Returns:
            The recordings by tensor name, and the names of parameters that are not in the checkpoint.

        Raises:
            CalibrationError: the shape of a tensor differs from that of the recorded parameter.
        """
        called = _checkpoint_names(shapes)
        matched, unmatched = {}, []
        for first, one in self.recorded.items():
            present = [called[name] for name in one.names if name in called]
            for name in present:
                if tuple(shapes[name]) != one.shape:
                    raise CalibrationError(
                        f"{self.where}: tensor {name!r} has shape {list(shapes[name])}, but was recorded "
                        f"with shape {list(one.shape)}; record with this model"
                    )
                matched[name] = one
            if not present:
                unmatched.append(first)
        return matched, unmatched


def _checkpoint_names(shapes: Shapes) -> dict[str, str]:
    """Map names, as they are and without `PREFIXES`, to the names in a checkpoint; exact names win."""
    checkpoint_names = {name: name for name in shapes}
    for name in shapes:
        bare = name
        while prefix := next((p for p in PREFIXES if bare.startswith(p)), None):
            bare = bare.removeprefix(prefix)
            checkpoint_names.setdefault(bare, name)
        inside = ".".join(part for part in bare.split(".") if part not in _INNER_WRAPPERS)
        checkpoint_names.setdefault(inside, name)
    return checkpoint_names


# --- files -----------------------------------------------------------------------------------------


class SideInformationFile(Recordings[Recorded]):
    """An open file of side information. Metadata are checked when it is opened, values when they are read.

    Args:
        path: path of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        CalibrationError: the file is of another kind, or damaged.
        UnsupportedError: the file was written by a newer version of ckptz.
    """

    guide: ClassVar[str]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(str(Path(path)), {})
        source = FileBytes(path)
        try:
            self._file = PlainFile(source)
        except CkptzError as error:
            source.close()
            raise self.error(f"not a complete safetensors file ({error}); use an intact copy") from None
        try:
            self.recorded = self._records()
        except BaseException:
            self.close()
            raise

    def _records(self) -> dict[str, Recorded]:
        """Check the file and return its recordings."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; its tensors can no longer be read."""
        self._file.close()

    def error(self, message: str) -> CalibrationError:
        """Return an error with the name of this file."""
        return CalibrationError(f"{self.where}: {message}")

    def _parsed(self, content_type: type[Content]) -> Content:
        """Parse the metadata that describe the content."""
        metadata = self._file.metadata or {}
        guide = metadata.get(KEY_GUIDE)
        if guide != self.guide:
            problem = "has no such content" if guide is None else f"is a {guide} file"
            raise self.error(f"{problem}; pass a {self.guide} file that ckptz.hooks has saved")
        version = metadata.get(KEY_VERSION, "")
        if version != str(GUIDE_VERSION):
            raise UnsupportedError(
                f"{self.where}: version {version[:20]!r} of {guide} files is not supported, only "
                f"{GUIDE_VERSION}; upgrade ckptz, or record again"
            )
        try:
            value = strict_json(metadata.get(KEY_CONTENT, "").encode("utf-8", "surrogatepass"), KEY_CONTENT)
            return msgspec.convert(value, content_type)
        except (CkptzError, msgspec.ValidationError) as error:
            raise self.error(f"damaged ({error}); record again") from None

    def region(self, tensor: str, dtypes: Iterable[str]) -> TensorSource:
        """Return the source of a tensor, whose dtype must be one of `dtypes`."""
        region = self._file.tensors.get(tensor)
        if region is None:
            raise self.error(f"tensor {tensor!r} is missing; record again")
        if region.dtype.name not in dtypes:
            raise self.error(f"tensor {tensor!r} is {region.dtype.name}, not {' or '.join(dtypes)}")
        return region

    def array(self, tensor: str) -> NDArray[Any]:
        """Return a copy of a tensor, in its dtype and shape [...], after checking that it is finite."""
        region = self._file.tensors[tensor]
        flat: Patterns = region.patterns(0, region.n_patterns)
        array: NDArray[Any] = flat.view(_ARRAY_TYPES[region.dtype.name]).reshape(region.shape)
        if not np.isfinite(array).all():
            raise self.error(f"tensor {tensor!r} has values that are not finite; record again")
        return array

    def _check_names(self, groups: Iterable[tuple[str, ...]]) -> None:
        """Check that no name belongs to two parameters."""
        for name in _repeated(name for group in groups for name in group):
            raise self.error(f"{name!r} is listed as the name of two parameters; record again")


class SensitivityFile(SideInformationFile[GradientAverage]):
    """A file that `ckptz.hooks.SensitivityTracker` saved; see `SideInformationFile`."""

    guide = "sensitivity"

    def _records(self) -> dict[str, GradientAverage]:
        self.content = self._parsed(SensitivityContent)
        self._check_names(self.content.parameters)
        averages = {}
        for names in self.content.parameters:
            shape, read = self.region(names[0], ("F32",)).shape, functools.partial(self.array, names[0])
            averages[names[0]] = GradientAverage(names=names, shape=shape, read=read)
        return averages


class CalibrationFile(SideInformationFile[RecordedInputs]):
    """A file that `ckptz.hooks.Calibration` saved; see `SideInformationFile`.

    Example:
        >>> with CalibrationFile("calibration.safetensors") as calibration:  # doctest: +SKIP
        ...     matched, unmatched = calibration.match({"head.weight": (10, 64)})
        ...     matched["head.weight"].covariances["linear"].read().shape
        (64, 64)
    """

    guide = "calibration"

    def _records(self) -> dict[str, RecordedInputs]:
        self.content = self._parsed(CalibrationContent)
        rows = self.content.modules
        for row in rows:
            self._check_row(row)
        uses = [(row, one, self._file.tensors[one.tensor].shape) for row in rows for one in row.inputs]
        odd = _repeated(
            tensor for tensor, *_ in {(one.tensor, row.kind, one.n_samples) for row, one, _ in uses}
        )
        odd += [tensor for tensor, _ in _repeated((one.tensor, row.module) for row, one, _ in uses)]
        for tensor in odd:
            raise self.error(f"tensor {tensor!r} is listed with contradictions; record again")
        self._check_names({row.weight for row in rows})
        odd = _repeated(name for name, _ in {(row.weight[0], row.shape) for row in rows})
        layouts = {(row.weight[0], row.kind, shape) for row, _, shape in uses}
        odd += [name for name, _ in _repeated((name, kind) for name, kind, _ in layouts)]
        for name in odd:
            raise self.error(f"weight {name!r} is listed with several shapes; record again")
        return inputs_by_weight(rows, self.read)

    def _check_row(self, row: ModuleRow) -> None:
        if len({one.tensor for one in row.inputs}) != len(row.inputs):
            raise self.error(f"layer {row.module!r} lists a tensor twice; record again")
        dtypes = ("I64",) if row.kind == "embedding" else ("F32", "F64")
        for one in row.inputs:
            shape = self.region(one.tensor, dtypes).shape
            if not _fits(row.kind, row.shape, shape):
                raise self.error(
                    f"tensor {one.tensor!r} has shape {list(shape)}, which does not fit the {row.kind} "
                    f"weight {row.weight[0]!r} of shape {list(row.shape)}; record again"
                )

    def read(self, tensor: str) -> NDArray[Any]:
        """Return sums after checking them: a float32 or float64 matrix [..., n, n], or int64 counts [n].

        Raises:
            CalibrationError: values are not finite, not a symmetric sum of squares, or negative counts.
        """
        values = self.array(tensor)
        if values.ndim == 1:
            if values.size and values.min() < 0:
                raise self.error(f"tensor {tensor!r} has negative counts; record again")
            return values
        diagonal = np.diagonal(values, axis1=-2, axis2=-1)
        if (diagonal < 0).any() or not np.array_equal(values, np.swapaxes(values, -2, -1)):
            raise self.error(f"tensor {tensor!r} is not a symmetric sum of squares; record again")
        return values


def _repeated(items: Iterable[T]) -> list[T]:
    """Return the items that occur more than once."""
    return [item for item, n in Counter(items).items() if n > 1]


def _fits(kind: LayerKind, weight: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether sums of a shape fit a weight of another shape."""
    if kind == "conv":
        n = math.prod(weight[1:])
        is_grouped = len(shape) == 3 and shape[0] > 1 and len(weight) > 0 and weight[0] % shape[0] == 0
        return len(weight) in (3, 4) and shape[-2:] == (n, n) and (len(shape) == 2 or is_grouped)
    if len(weight) != 2:
        return False
    n = weight[WEIGHT_AXIS[kind]]
    return shape == ((n,) if kind == "embedding" else (n, n))
