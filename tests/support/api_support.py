"""Shared code of the conformance tests: the two libraries, test data, and the comparison of outcomes."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import ckptz
import ckptz.numpy
import ckptz.torch


@dataclass(frozen=True)
class Library:
    """A library under test: `torch` and `numpy` are its modules with `save_file` and `load_file`."""

    name: str
    safe_open: Any
    torch: ModuleType
    numpy: ModuleType

    def __str__(self) -> str:
        return self.name


SAFETENSORS = Library("safetensors", safetensors.safe_open, safetensors.torch, safetensors.numpy)
CKPTZ = Library("ckptz", ckptz.safe_open, ckptz.torch, ckptz.numpy)
LIBRARIES = (SAFETENSORS, CKPTZ)


@dataclass(frozen=True)
class Case:
    """A use of a library on files in its own folder, and the expected outcome.

    `expected` is a value or a class of errors.
    """

    name: str
    action: Callable[[Library, Path], Any]
    expected: Any


def named(cases: list[Case]) -> Any:
    """Return a decorator that runs a test once for each case."""
    assert len({case.name for case in cases}) == len(cases)
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def outcome(action: Callable[[], Any]) -> Any:
    """Return the result of a call, or the exception that it raises."""
    try:
        return action()
    except Exception as error:
        return error


def is_error(value: Any) -> bool:
    return isinstance(value, Exception)


def agrees(actual: Any, expected: Any) -> bool:
    """Return whether an outcome equals the expected value or is an error of the expected class."""
    if isinstance(expected, type) and issubclass(expected, Exception):
        return isinstance(actual, expected)
    return not is_error(actual) and same(actual, expected)


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal to the bit, in type, dtype and shape; dicts also in order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, left.device) == (right.dtype, right.shape, right.device) and same(
            bits(left), bits(right)
        )
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and left.tobytes() == right.tobytes()
    return bool(left == right)


def run_python(code: str) -> str:
    """Run code in a new interpreter and return its standard output."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor [n_bytes] as uint8, in C order."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy()


def make(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bit patterns."""
    generator = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape, np.uint8)).bool().reshape(shape)
    n_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.empty(n_bytes, dtype=torch.uint8)
    raw.numpy()[...] = generator.integers(0, 256, n_bytes, np.uint8)
    return raw.view(dtype).reshape(shape)


FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
NUMPY_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64),
)
DTYPES = (*NUMPY_DTYPES, torch.bfloat16, *FLOAT8)


def every_dtype() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype that PyTorch and safetensors share, packed F4 included."""
    tensors = {str(dtype).removeprefix("torch."): make(dtype, 3, 4) for dtype in DTYPES}
    return tensors | {"float4": make(torch.uint8, 3, 2).view(torch.float4_e2m1fn_x2)}


def shapes() -> dict[str, torch.Tensor]:
    """Return tensors of several ranks and sizes, empty ones included."""
    return {
        "box": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
        "line": torch.arange(20),
        "point": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "hollow": torch.zeros(3, 0, dtype=torch.bfloat16),
        "half": torch.arange(6).to(torch.bfloat16).reshape(2, 3),
        "phase": make(torch.complex64, 2, 3),
    }
