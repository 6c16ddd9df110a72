"""PyTorch tensors, and PyTorch's own index rules for slices.

An index of ints, slices, None and an ellipsis is put to a tensor without memory: the view that PyTorch
makes says which patterns are meant, and what PyTorch refuses is refused by PyTorch. Any other index is
tried on a tensor of one repeated byte; then the whole tensor is decoded and indexed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Any, Final

import numpy as np
import torch

from ckptz.errors import DTypeError
from ckptz.format.dtypes import DTYPE_CODES, DTYPE_NAMES, DType, dtype_of
from ckptz.format.sources import PATTERN_TYPES, Patterns
from ckptz.state.arrays import Selection, Shape, Window, patterns_per_element
from ckptz.state.arrays import select as strict_select

# numpy asks for huge pages from here on: a 90 MB tensor then loads with 1,000 page faults, not 22,000.
HUGE_BYTES: Final = 1 << 22
ALIGNMENT: Final = 64  # as PyTorch's own
_BASIC_ITEMS = (int, np.integer, slice, NoneType, EllipsisType)


def torch_dtype(dtype: DType) -> torch.dtype:
    """Give the tensor type that holds `dtype`.

    Raises:
        DTypeError: this PyTorch has none.
    """
    found = getattr(torch, DTYPE_NAMES.get(dtype.name, ""), None)
    if not isinstance(found, torch.dtype):
        raise DTypeError(f"Dtype not understood: {dtype.name}; this version of PyTorch has no such dtype")
    return found


def stored_type(name: str, tensor: torch.Tensor) -> tuple[DType, Shape]:
    """Give the type and the shape that a tensor, called `name` in messages, has in a file.

    Raises:
        DTypeError: the format does not know the type, or the shape with this type.
    """
    code = DTYPE_CODES.get(str(tensor.dtype).removeprefix("torch."))
    if code is None:
        raise DTypeError(f"tensor {name!r} has {tensor.dtype}, which the format does not know; convert it")
    shape = tuple(tensor.shape)
    if code == "F4":  # PyTorch counts pairs
        if not shape:
            raise DTypeError(f"tensor {name!r} is two numbers of {tensor.dtype} in no dimension; give it one")
        shape = (*shape[:-1], 2 * shape[-1])
    return dtype_of(code), shape


def _empty(dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """A CPU tensor, whatever the default device; a large one in numpy's memory, which has huge pages."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    raw = np.empty(n_bytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[begin : begin + n_bytes]).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class TorchTensors:
    """Makes PyTorch tensors; see `ckptz.state.arrays.Framework`.

    Attributes:
        device: where they end up.
        is_strict: whether slices follow safetensors' index rules rather than PyTorch's.
    """

    device: str | int
    is_strict: bool

    def shape_of(self, dtype: DType, shape: Shape) -> Shape:
        if dtype.name != "F4":
            return shape
        if not shape or shape[-1] % 2:
            raise DTypeError(f"PyTorch packs F4 in pairs, which shape {list(shape)} does not allow")
        return (*shape[:-1], shape[-1] // 2)

    def allocate(self, dtype: DType, shape: Shape) -> tuple[Any, Patterns]:
        native = torch_dtype(dtype)
        if str(self.device).startswith("cuda") and not torch.cuda.is_available():
            raise RuntimeError(f"device {self.device}: PyTorch finds no CUDA device; load to 'cpu'")
        self._try_device()
        # Pinned memory is what a device reads from at full speed.
        is_pinned = str(self.device).startswith("cuda")
        tensor = torch.empty(shape, dtype=native, pin_memory=True) if is_pinned else _empty(native, shape)
        return tensor, tensor.reshape(-1).view(torch.uint8).numpy().view(PATTERN_TYPES[dtype.pattern_bytes])

    def select(self, index: Any, dtype: DType, shape: Shape) -> Selection:
        if not self.is_strict:
            torch_dtype(dtype)
        native_shape = self.shape_of(dtype, shape)
        if self.is_strict:
            window, kept = strict_select(index, native_shape)
            picked = Selection(window, kept)
        else:
            picked = _select(index, native_shape)
        self._try_device()
        return Selection(picked.window.widened(patterns_per_element(dtype)), picked.shape, picked.then)

    def finish(self, tensor: Any) -> Any:
        return tensor if self.device == "cpu" else tensor.to(self.device)

    def _try_device(self) -> None:
        if self.device != "cpu":
            torch.empty(0, device="cpu").to(self.device)  # refuses before anything is decoded


def _select(index: Any, shape: Shape) -> Selection:
    # What an index says is asked of tensors on the CPU, wherever those end up that it picks from.
    index = tuple(map(_on_cpu, index)) if isinstance(index, tuple) else _on_cpu(index)
    items = index if isinstance(index, tuple) else (index,)
    if all(isinstance(item, _BASIC_ITEMS) and not isinstance(item, bool) for item in items):
        view = torch.empty(shape, dtype=torch.uint8, device="meta")[index]
        return Selection(
            Window(int(view.storage_offset()), tuple(view.shape), view.stride()), tuple(view.shape)
        )
    # PyTorch refuses what it refuses, at the cost of one byte per element of the result.
    torch.empty((), dtype=torch.uint8, device="cpu").expand(shape)[index]
    return Selection(Window.whole(shape), shape, lambda tensor: tensor[index])


def _on_cpu(item: Any) -> Any:
    return item.cpu() if isinstance(item, torch.Tensor) else item
