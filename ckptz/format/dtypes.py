"""Names, sizes and bit layouts of the element types. Implements spec/registry.md#dtypes.

ckptz never computes with an element's own arithmetic: every tensor is a sequence of *patterns*, unsigned
little-endian integers of 1, 2, 4 or 8 bytes that hold its bit patterns. One element is one pattern,
except C64 (two 4-byte patterns) and the sub-byte types (the patterns are the bytes they are packed into).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ckptz.errors import CorruptionError, UnsupportedError

FEW_SIZES: Final = 64  # are multiplied at once, whatever they are


def n_elements(shape: Sequence[int]) -> int:
    """Count the elements of a tensor.

    Raises:
        CorruptionError: 2^63 or more; checked as it grows, since a file may name millions of dimensions.
    """
    n = math.prod(shape) if len(shape) <= FEW_SIZES else _product_of_many(shape)
    if n >> 63:
        raise CorruptionError("a shape has 2^63 elements or more")
    return n


def _product_of_many(shape: Sequence[int]) -> int:
    n = 0 if 0 in shape else 1
    for size in shape:
        n *= size
        if n >> 63:
            break
    return n


@dataclass(frozen=True, slots=True)
class DType:
    """One row of spec/registry.md#dtypes.

    Attributes:
        name: the code that safetensors uses, "BF16".
        id: the byte that stands for it in a frame.
        bits: size of one element in bits.
        pattern_bytes: size of one pattern in bytes.
        is_float: sign, exponent and mantissa in IEEE order within a pattern.
    """

    name: str
    id: int
    bits: int
    pattern_bytes: int
    is_float: bool

    def n_bytes(self, shape: Sequence[int]) -> int:
        """Count the bytes of a dense tensor; a sub-byte tensor must fill whole bytes, as in safetensors."""
        n_bits = n_elements(shape) * self.bits
        if n_bits % 8:
            raise CorruptionError(f"{self.name} tensor of shape {list(shape)} does not fill whole bytes")
        return n_bits // 8

    def n_patterns(self, shape: Sequence[int]) -> int:
        """Count the patterns of a dense tensor."""
        return self.n_bytes(shape) // self.pattern_bytes


# Each with the name by which numpy and PyTorch know it, where they do.
_ROWS: Final = (
    (DType("BOOL", 1, 8, 1, False), "bool"),
    (DType("U8", 2, 8, 1, False), "uint8"),
    (DType("I8", 3, 8, 1, False), "int8"),
    (DType("U16", 4, 16, 2, False), "uint16"),
    (DType("I16", 5, 16, 2, False), "int16"),
    (DType("U32", 6, 32, 4, False), "uint32"),
    (DType("I32", 7, 32, 4, False), "int32"),
    (DType("U64", 8, 64, 8, False), "uint64"),
    (DType("I64", 9, 64, 8, False), "int64"),
    (DType("F16", 10, 16, 2, True), "float16"),
    (DType("BF16", 11, 16, 2, True), "bfloat16"),
    (DType("F32", 12, 32, 4, True), "float32"),
    (DType("F64", 13, 64, 8, True), "float64"),
    (DType("C64", 14, 64, 4, True), "complex64"),
    (DType("F8_E4M3", 15, 8, 1, True), "float8_e4m3fn"),
    (DType("F8_E5M2", 16, 8, 1, True), "float8_e5m2"),
    (DType("F8_E4M3FNUZ", 17, 8, 1, True), "float8_e4m3fnuz"),
    (DType("F8_E5M2FNUZ", 18, 8, 1, True), "float8_e5m2fnuz"),
    (DType("F8_E8M0", 19, 8, 1, False), "float8_e8m0fnu"),
    (DType("F4", 20, 4, 1, False), "float4_e2m1fn_x2"),  # two elements in one
    (DType("F6_E2M3", 21, 6, 1, False), None),
    (DType("F6_E3M2", 22, 6, 1, False), None),
)

DTYPES: Final = MappingProxyType({row.name: row for row, _ in _ROWS})
_BY_ID: Final = MappingProxyType({row.id: row for row, _ in _ROWS})
DTYPE_NAMES: Final = {row.name: name for row, name in _ROWS if name is not None}
DTYPE_CODES: Final = {name: code for code, name in DTYPE_NAMES.items()}


def dtype_of(name: str) -> DType:
    """Find the type with this safetensors code.

    Raises:
        UnsupportedError: no such type is known.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedError(f"dtype {name!r} is not known to this version of ckptz; upgrade it") from None


def dtype_of_id(dtype_id: int) -> DType:
    """Find the type with this frame id.

    Raises:
        UnsupportedError: no such type is known.
    """
    try:
        return _BY_ID[dtype_id]
    except KeyError:
        raise UnsupportedError(
            f"dtype id {dtype_id} is not known to this version of ckptz; upgrade it"
        ) from None
