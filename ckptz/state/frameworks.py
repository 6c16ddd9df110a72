"""Frameworks, devices and backends by their names in safetensors. PyTorch is imported on demand."""

from __future__ import annotations

import operator
import re
from typing import Final

from ckptz import lazy
from ckptz.errors import ConfigError, UnsupportedError
from ckptz.state.arrays import Framework

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


def parse_framework(name: str) -> str:
    """Return the canonical name of a framework.

    Raises:
        ConfigError: safetensors has no such framework.
    """
    if not isinstance(name, str):
        raise TypeError(f"framework must be a str, got {type(name).__name__}")
    if name not in FRAMEWORKS:
        raise ConfigError(f"framework {name} is invalid; use 'pt' or 'np'")
    return FRAMEWORKS[name]


def parse_device(device: str | int | None) -> str | int:
    """Return a device in the notation of PyTorch; numbers are returned as they are.

    Raises:
        ConfigError: not a device of safetensors.
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
    """Check the backend, which only affects the index rules of slices.

    Raises:
        ConfigError: safetensors has no such backend.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, got {type(backend).__name__}")
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is invalid; 'mmap' and 'pread' are known")
    return backend


def framework(name: str, device: str | int, backend: str) -> Framework:
    """Return the framework for tensors on a device.

    Args:
        name: result of `parse_framework`.
        device: result of `parse_device`.
        backend: "pread" applies the index rules of safetensors to slices, whatever the framework.

    Raises:
        ConfigError: the framework has no such device.
        UnsupportedError: ckptz does not support the framework.
    """
    if name != "torch" and device != "cpu":
        raise ConfigError(f"Device {device} is not supported for framework {name}; load to 'cpu'")
    if name not in ("torch", "numpy"):
        raise UnsupportedError(
            f"framework {name!r}: ckptz returns PyTorch tensors and numpy arrays; use 'np' and convert"
        )
    if name == "numpy":
        return Framework()  # on the CPU, where both backends slice in the same way
    tensors: Framework = lazy.module("ckptz.state.torch").TorchTensors(device, backend == "pread")
    return tensors
