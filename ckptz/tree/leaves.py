"""What stands at the leaves of a tree: sizes, types and tensors. Implements spec/09-tree.md#leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """A `torch.Size` in a state."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DTypeName:
    """A `torch.dtype`, by its name in torch: "bfloat16"."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A stored tensor that shares memory with no other."""

    name: str  # of the stored tensor
    strides: tuple[int, ...] | None = None  # in elements, where they are not those of C order
    requires_grad: bool = False  # as in torch
    is_parameter: bool = False  # a `torch.nn.Parameter`

    def pack(self) -> dict[str, Any]:
        """Give the JSON node."""
        strides = {} if self.strides is None else {"strides": list(self.strides)}
        return {"tensor": self.name, **strides, **_pack_flags(self)}


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a storage that other tensors may share; strides and offset count elements."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    is_parameter: bool = False

    def pack(self) -> dict[str, Any]:
        """Give the JSON node."""
        shape, strides = list(self.shape), list(self.strides)
        where = {"dtype": self.dtype, "shape": shape, "strides": strides, "offset": self.offset}
        return {"view": self.storage, **where, **_pack_flags(self)}


def _pack_flags(ref: TensorRef | View) -> dict[str, bool]:
    flags = {"requires_grad": ref.requires_grad, "parameter": ref.is_parameter}
    return {name: True for name, is_set in flags.items() if is_set}
