"""Names, sizes and bit layouts of the element types. Implements spec/registry.md#dtypes.

Every tensor is a sequence of *patterns*: its bits as unsigned little-endian integers of 1, 2, 4 or 8 bytes.
An element is one pattern, except that a C64 element is two 4-byte patterns, and that patterns of sub-byte
types are the bytes that elements are packed into.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ckptz.errors import CorruptionError, UnsupportedError

FEW_DIMENSIONS: Final = 64  # whose product is cheap to compute, whatever the sizes


def n_elements(shape: Sequence[int]) -> int:
    """Count the elements of a tensor.

    Raises:
        CorruptionError: 2^63 or more. A file may claim millions of dimensions, so this is checked early.
    """
    n = math.prod(shape) if len(shape) <= FEW_DIMENSIONS else _product_of_many(shape)
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


@functools.lru_cache(1 << 10)  # small tensors of a file have few shapes, and each is asked for many times
def _n_bytes(name: str, bits: int, shape: Sequence[int]) -> int:
    n_bits = n_elements(shape) * bits
    if n_bits % 8:
        raise CorruptionError(f"{name} tensor of shape {list(shape)} does not fill whole bytes")
    return n_bits // 8


@dataclass(frozen=True, slots=True)
class DType:
    """One row of spec/registry.md#dtypes.

    Attributes:
        name: the name in safetensors, such as "BF16".
        id: the id in a frame.
        bits: size of an element in bits.
        pattern_bytes: size of a pattern in bytes.
        is_float: True if a pattern has sign, exponent and mantissa in IEEE order.
    """

    name: str
    id: int
    bits: int
    pattern_bytes: int
    is_float: bool

    def n_bytes(self, shape: Sequence[int]) -> int:
        """Return the size of a tensor in bytes; sub-byte tensors must fill whole bytes, as in safetensors."""
        if len(shape) <= FEW_DIMENSIONS:
            return _n_bytes(self.name, self.bits, tuple(shape))
        return _n_bytes.__wrapped__(self.name, self.bits, shape)

    def n_patterns(self, shape: Sequence[int]) -> int:
        """Count the patterns of a dense tensor."""
        return self.n_bytes(shape) // self.pattern_bytes


# Each with its name in numpy and PyTorch, if any.
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
    """Return the dtype with a safetensors name.

    Raises:
        UnsupportedError: unknown dtype.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedError(f"dtype {name!r} is not known to this version of ckptz; upgrade it") from None


def dtype_of_id(dtype_id: int) -> DType:
    """Return the dtype with a frame id.

    Raises:
        UnsupportedError: unknown dtype.
    """
    try:
        return _BY_ID[dtype_id]
    except KeyError:
        raise UnsupportedError(
            f"dtype id {dtype_id} is not known to this version of ckptz; upgrade it"
        ) from None
