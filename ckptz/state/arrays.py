"""The arrays that tensors are decoded into: numpy's or PyTorch's.

Framework and device names are those of safetensors. `framework` is a lazy door: PyTorch loads when a
caller asks for its tensors.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from ckptz.errors import ConfigError, DTypeError, UnsupportedError
from ckptz.format.dtypes import DTYPE_NAMES, DType
from ckptz.format.sources import PATTERN_TYPES, Patterns
from ckptz.state.window import Window
from ckptz.state.window import select as strict_select

Shape = tuple[int, ...]

_SPELLINGS: Final = {
    "torch": ("pt", "torch", "pytorch"),
    "numpy": ("np", "numpy"),
    "tensorflow": ("tf", "tensorflow"),
    "jax": ("jax", "flax"),
    "mlx": ("mlx",),
    "paddle": ("paddle",),
}
FRAMEWORKS: Final = {word: name for name, words in _SPELLINGS.items() for word in words}
BACKENDS: Final = ("mmap", "pread")
_NUMBERED_DEVICES: Final = ("cuda", "npu", "xpu", "xla", "mlu", "musa", "hpu")
_MAX_INDEX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Selection:
    """The patterns that an index picks from a tensor, and the shape that they get.

    Attributes:
        window: the patterns to decode.
        shape: of the framework's tensor that they make.
        then: what is left to be done with that tensor, or None.
    """

    window: Window
    shape: Shape
    then: Callable[[Any], Any] | None = None


class Framework(Protocol):
    """Makes tensors of one framework."""

    def shape_of(self, dtype: DType, shape: Shape) -> Shape:
        """Give the shape of the framework's tensor; another one where it packs several elements into one."""

    def allocate(self, dtype: DType, shape: Shape) -> tuple[Any, Patterns]:
        """Make a tensor of this (framework's) shape that holds nothing yet, and its patterns to be written.

        Raises:
            DTypeError: the framework has no such dtype.
        """

    def select(self, index: Any, dtype: DType, shape: Shape) -> Selection:
        """Tell what `index` picks from a tensor, with the errors of the framework for what it refuses."""

    def finish(self, tensor: Any) -> Any:
        """Bring the tensor where the caller wants it."""


def patterns_per_element(dtype: DType) -> int:
    """Count the patterns in one element; the framework packs types smaller than a byte into patterns."""
    return max(dtype.bits // (8 * dtype.pattern_bytes), 1)


# --- numpy: types that it lacks come from ml_dtypes, once the caller has imported it -----------------------


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Give the array type that holds `dtype`.

    Raises:
        DTypeError: there is none, or ml_dtypes has it and is not imported.
    """
    if dtype.name not in DTYPE_NAMES:
        raise DTypeError(f"numpy has no dtype for {dtype.name}; load with framework 'pt'")
    try:
        return np.dtype(DTYPE_NAMES[dtype.name])
    except TypeError:
        raise DTypeError(
            f"numpy has no dtype for {dtype.name}; import ml_dtypes, or load with framework 'pt'"
        ) from None


@dataclass(frozen=True, slots=True)
class NumpyArrays:
    """Makes numpy arrays; see `Framework`."""

    def shape_of(self, dtype: DType, shape: Shape) -> Shape:
        return shape

    def allocate(self, dtype: DType, shape: Shape) -> tuple[Any, Patterns]:
        array = np.empty(shape, numpy_dtype(dtype))
        return array, array.reshape(-1).view(PATTERN_TYPES[dtype.pattern_bytes])

    def select(self, index: Any, dtype: DType, shape: Shape) -> Selection:
        window, kept = strict_select(index, shape)
        return Selection(window.widened(patterns_per_element(dtype)), kept)

    def finish(self, tensor: Any) -> Any:
        return tensor


# --- names, as safetensors spells them ---------------------------------------------------------------------


def parse_framework(name: str) -> str:
    """Give the framework's own name.

    Raises:
        ConfigError: safetensors knows no such framework.
    """
    if not isinstance(name, str):
        raise TypeError(f"framework must be a str, got {type(name).__name__}")
    if name not in FRAMEWORKS:
        raise ConfigError(f"framework {name} is invalid; ckptz gives 'pt' or 'np' tensors")
    return FRAMEWORKS[name]


def parse_device(device: str | int | None) -> str | int:
    """Spell the device as PyTorch does; a bare number is left to PyTorch.

    Raises:
        ConfigError: not a device that safetensors takes.
    """
    if device is None:
        return "cpu"
    if isinstance(device, str):
        return _parse_device_name(device)
    try:
        number = operator.index(device)
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_INDEX:
        raise ConfigError(f"device {device} is invalid; pass a name such as 'cuda:0' or a number")
    return number


def _parse_device_name(name: str) -> str:
    kind, colon, digits = name.partition(":")
    if name == "cpu":
        return name
    if kind not in (*_NUMBERED_DEVICES, "mps") or ":" in digits:
        raise ConfigError(f"device {name} is invalid; 'cpu', 'mps' and 'cuda:0' are examples of valid ones")
    if colon and not (re.fullmatch(r"\+?[0-9]+", digits) and int(digits) <= _MAX_INDEX):
        raise ConfigError(f"device {name} is invalid; a number must follow the colon")
    number = int(digits or 0)
    if kind == "mps" and number:
        raise ConfigError(f"device {name} is invalid; there is only one 'mps'")
    return kind if kind == "mps" else f"{kind}:{number}"


def parse_backend(backend: str) -> str:
    """Check the backend, which changes nothing but the index rules of slices.

    Raises:
        ConfigError: safetensors knows no such backend.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, got {type(backend).__name__}")
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is invalid; 'mmap' and 'pread' are known")
    return backend


def framework(name: str, device: str | int, backend: str) -> Framework:
    """Choose the framework called `name` for tensors on `device`.

    Args:
        name: from `parse_framework`.
        device: from `parse_device`.
        backend: "pread" gives slices safetensors' own index rules, whatever the framework.

    Raises:
        ConfigError: the framework has no such device.
        UnsupportedError: ckptz makes no tensors of this framework.
    """
    if name != "torch" and device != "cpu":
        raise ConfigError(f"Device {device} is not supported for framework {name}; load to 'cpu'")
    if name not in ("torch", "numpy"):
        raise UnsupportedError(
            f"framework {name!r}: ckptz makes PyTorch tensors and numpy arrays; open with 'np' and convert"
        )
    if name == "numpy":
        return NumpyArrays()  # they live on the CPU, and both backends slice alike
    made: Framework = importlib.import_module("ckptz.state.torch").TorchTensors(device, backend == "pread")
    return made
