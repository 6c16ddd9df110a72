"""One rANS step of 32 lanes, in LLVM vectors of eight lanes.

The word that a lane reads depends on all lanes before it, which a numba loop handles lane by lane. Here a
table of shuffle masks for the 256 subsets of eight lanes lets one byte shuffle (SSSE3) distribute the words;
without that instruction they are distributed one by one. Table entries are loaded one by one, as gathers
are slower.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic as _intrinsic

from ckptz.kernels.floats import SCALE, STATE_LOW

cgutils: Any = _cgutils  # numba has no types
intrinsic: Any = _intrinsic

EIGHT, GROUPS = 8, 4
_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_STATES, _WORDS, _BYTES = ir.VectorType(_I32, EIGHT), ir.VectorType(_I16, EIGHT), ir.VectorType(_I8, 16)
_PAIRS, _CODES = ir.VectorType(_I64, 4), ir.VectorType(_I8, EIGHT)


def _orders(*, to_front: bool) -> bytearray:
    """Return byte shuffle masks [256, 16], one for each subset of eight lanes.

    With `to_front`, a mask moves consecutive words to the lanes of the subset (decoding); without, it
    moves the words of these lanes to the end of the vector (encoding).
    """
    orders = bytearray(b"\x80" * (256 * 16))
    for lanes in range(256):
        used = [lane for lane in range(EIGHT) if lanes >> lane & 1]
        for k, lane in enumerate(used):
            to, source = (lane, k) if to_front else (EIGHT - len(used) + k, lane)
            orders[16 * lanes + 2 * to : 16 * lanes + 2 * to + 2] = bytes((2 * source, 2 * source + 1))
    return orders


class _Step:
    """Builder of the LLVM instructions of one step."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self.arrays = [
            context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, args, strict=True)
        ]
        *_, features = context.codegen().magic_tuple()
        self.has_shuffle = "+ssse3" in features.split(",")

    def at(self, array: Any, index: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array, [index]), kind.as_pointer())

    def load(self, array: Any, index: Any, kind: Any) -> Any:
        return self.builder.load(self.at(array, index, kind), align=1)

    def store(self, value: Any, array: Any, index: Any) -> None:
        self.builder.store(value, self.at(array, index, value.type), align=1)

    def set_of(self, lanes: Any) -> Any:
        """Return the bit mask of a subset of lanes, i1 [8], as i64."""
        return self.builder.zext(self.builder.bitcast(lanes, _I8), _I64)

    def shuffled(self, words: Any, lanes: Any, *, to_front: bool) -> Any:
        """Shuffle words [8] by the mask of `_orders` for a subset of lanes."""
        name = f"ckptz.orders.{int(to_front)}"
        table = self.builder.module.globals.get(name)
        if table is None:
            content = cgutils.create_constant_array(_I8, _orders(to_front=to_front))
            table = cgutils.global_constant(self.builder, name, content)
        first = self.builder.bitcast(table, _I8.as_pointer())
        order = self.load(first, self.builder.shl(self.set_of(lanes), _of(_I64, 4)), _BYTES)
        shape = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
        shuffle = cgutils.get_or_insert_function(self.builder.module, shape, "llvm.x86.ssse3.pshuf.b.128")
        return self.builder.bitcast(
            self.builder.call(shuffle, [self.builder.bitcast(words, _BYTES), order]), _WORDS
        )

    def read_words(self, words: Any, q: Any, lanes: Any) -> tuple[Any, Any]:
        """Read a word from `words[q:]` for each lane of a subset: returns words [8] and the next `q`."""
        builder = self.builder
        if self.has_shuffle:
            loaded = self.shuffled(self.load(words, q, _WORDS), lanes, to_front=True)
            return loaded, builder.add(q, builder.ctpop(self.set_of(lanes)))
        loaded = _of(_WORDS, 0)
        for lane in range(EIGHT):
            place = _of(_I32, lane)
            loaded = builder.insert_element(loaded, self.load(words, q, _I16), place)
            q = builder.add(q, builder.zext(builder.extract_element(lanes, place), _I64))
        return loaded, q

    def write_words(self, states: Any, words: Any, q: Any, lanes: Any) -> Any:
        """Write the low halves of a subset of lanes before word `q`, and return the next `q`.

        Up to eight words before `q` are overwritten, even if fewer lanes write.
        """
        builder = self.builder
        halves = builder.trunc(states, _WORDS)
        if self.has_shuffle:
            last = self.shuffled(halves, lanes, to_front=False)
            self.store(last, words, builder.sub(q, _of(_I64, EIGHT)))
            return builder.sub(q, builder.ctpop(self.set_of(lanes)))
        for lane in reversed(range(EIGHT)):
            place = _of(_I32, lane)
            before = builder.sub(q, _of(_I64, 1))
            self.store(builder.extract_element(halves, place), words, before)
            q = builder.select(builder.extract_element(lanes, place), before, q)
        return q


def _of(kind: Any, value: int) -> Any:
    """Return a vector constant."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _signature(*args: Any) -> Any:
    """Return the numba signature of a step for contiguous arrays."""
    assert all(kind.layout == "C" for kind in args if isinstance(kind, types.Array)), args
    return types.uint64(*args[:3], types.uint64, args[4], types.uint64)


@intrinsic
def decode_step(typing_context: Any, lanes: Any, slots: Any, words: Any, q: Any, out: Any, i: Any) -> Any:
    """Decode 32 symbols to out[i:] and return the next `q`; 32 words must be readable from `q` on."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        lanes, slots, words, q, out, i = step.arrays
        entries, states = [], []
        for group in range(GROUPS):
            entry = ir.Constant(_STATES, ir.Undefined)
            for lane in range(0, EIGHT, 2):
                two = step.load(lanes, _of(_I64, EIGHT * group + lane), _I64)
                for k in range(2):
                    slot = builder.and_(builder.lshr(two, _of(_I64, 32 * k)), _of(_I64, SCALE - 1))
                    entry = builder.insert_element(entry, step.load(slots, slot, _I32), _of(_I32, lane + k))
            entries.append(entry)
            step.store(builder.trunc(entry, _CODES), out, builder.add(i, _of(_I64, EIGHT * group)))
        for group, entry in enumerate(entries):
            state = step.load(lanes, _of(_I64, EIGHT * group), _STATES)
            less = builder.and_(builder.lshr(entry, _of(_STATES, 8)), _of(_STATES, 0xFFF))
            product = builder.mul(builder.add(less, _of(_STATES, 1)), builder.lshr(state, _of(_STATES, 12)))
            states.append(builder.add(product, builder.lshr(entry, _of(_STATES, 20))))
        for group, state in enumerate(states):
            low = builder.icmp_unsigned("<", state, _of(_STATES, STATE_LOW))
            taken, q = step.read_words(words, q, low)
            longer = builder.or_(builder.shl(state, _of(_STATES, 16)), builder.zext(taken, _STATES))
            step.store(builder.select(low, longer, state), lanes, _of(_I64, EIGHT * group))
        return q

    return _signature(lanes, slots, words, q, out, i), generate


def _entries_of(step: _Step, entries: Any, symbols: Any, first: Any) -> tuple[Any, Any]:
    """Load the entries of eight symbols from `encoding_tables`: reciprocals [8] and upper halves [8]."""
    builder = step.builder
    halves = [ir.Constant(_PAIRS, ir.Undefined)] * 2  # lanes 0, 1, 4, 5 and lanes 2, 3, 6, 7
    for lane in range(EIGHT):
        symbol = builder.zext(step.load(symbols, builder.add(first, _of(_I64, lane)), _I8), _I64)
        which, place = lane >> 1 & 1, _of(_I32, (lane & 1) + 2 * (lane >> 2))
        halves[which] = builder.insert_element(halves[which], step.load(entries, symbol, _I64), place)
    left, right = (builder.bitcast(half, _STATES) for half in halves)
    low, high = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
    return (
        builder.shuffle_vector(left, right, ir.Constant(_STATES, low)),
        builder.shuffle_vector(left, right, ir.Constant(_STATES, high)),
    )


def _upper_product(builder: Any, a: Any, b: Any) -> Any:
    """Compute the upper 32 bits of the products of u32 vectors [8]."""
    a, b = builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)
    low, half = _of(_PAIRS, 0xFFFFFFFF), _of(_PAIRS, 32)
    even = builder.mul(builder.and_(a, low), builder.and_(b, low))
    odd = builder.mul(builder.lshr(a, half), builder.lshr(b, half))
    upper = builder.and_(odd, _of(_PAIRS, 0xFFFFFFFF00000000))
    return builder.bitcast(builder.or_(builder.lshr(even, half), upper), _STATES)


@intrinsic
def encode_step(
    typing_context: Any, lanes: Any, entries: Any, words: Any, q: Any, symbols: Any, i: Any
) -> Any:
    """Encode symbols[i : i + 32] into at most 32 words before `q` and return the next `q`; needs q >= 32."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        lanes, entries, words, q, symbols, i = step.arrays
        firsts = [builder.add(i, _of(_I64, EIGHT * group)) for group in range(GROUPS)]
        parts = [_entries_of(step, entries, symbols, first) for first in firsts]
        for group in reversed(range(GROUPS)):
            reciprocal, upper = parts[group]
            state = step.load(lanes, _of(_I64, EIGHT * group), _STATES)
            less = builder.lshr(upper, _of(_STATES, 16))  # frequency minus one
            full = builder.icmp_unsigned(">", builder.lshr(state, _of(_STATES, 20)), less)
            q = step.write_words(state, words, q, full)
            state = builder.select(full, builder.lshr(state, _of(_STATES, 16)), state)
            # The sum has 33 bits (see `encoding_tables`): it is halved first if it is shifted at all.
            shift = builder.and_(builder.lshr(upper, _of(_STATES, 12)), _of(_STATES, 15))
            once = builder.select(builder.icmp_unsigned("<", shift, _of(_STATES, 1)), shift, _of(_STATES, 1))
            product = _upper_product(builder, state, reciprocal)
            sum_ = builder.add(product, builder.lshr(builder.sub(state, product), once))
            quotient = builder.lshr(sum_, builder.sub(shift, once))
            rest = builder.mul(quotient, builder.sub(_of(_STATES, SCALE - 1), less))
            start = builder.and_(upper, _of(_STATES, 0xFFF))
            step.store(builder.add(builder.add(state, start), rest), lanes, _of(_I64, EIGHT * group))
        return q

    return _signature(lanes, entries, words, q, symbols, i), generate
