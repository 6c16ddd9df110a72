"""Unaligned loads and stores of 16 to 64 bits in arrays of bytes, which numba does not offer."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic

intrinsic: Any = _intrinsic  # numba has no types


def _element(context: Any, builder: Any, kind: Any, value: Any, index: Any, n_bits: int) -> Any:
    data = context.make_array(kind)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), ir.IntType(n_bits).as_pointer())


def _load(n_bits: int) -> Any:
    """Create the intrinsic `load(bytes, at)`: `n_bits` little-endian bits from any byte offset, as u64."""

    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, source: Any, at: Any) -> Any:
        del typing_context, at

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array, at = args
            place = _element(context, builder, signature.args[0], array, at, n_bits)
            return builder.zext(builder.load(place, align=1), ir.IntType(64))

        return types.uint64(source, types.uint64), generate

    return load


def _store(n_bits: int) -> Any:
    """Create the intrinsic `store(bytes, at, value)`: the low `n_bits` of a u64 to any byte offset."""

    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing_context: Any, out: Any, at: Any, value: Any) -> Any:
        del typing_context, at, value

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array, at, value = args
            place = _element(context, builder, signature.args[0], array, at, n_bits)
            low = value if n_bits == 64 else builder.trunc(value, ir.IntType(n_bits))
            builder.store(low, place, align=1)
            return context.get_dummy_value()

        return types.void(out, types.uint64, types.uint64), generate

    return store


load_16, load_64 = _load(16), _load(64)
store_32, store_64 = _store(32), _store(64)
