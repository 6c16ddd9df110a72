"""A pickle stream as data: what it names is neither imported nor called.

Classes and functions become `Symbol`s. What a pickle would make with them is up to the `Maker`: the plain
one gives a `Made`, and whoever reads decides what that means. Nothing is hashed or shown whose cost the
stream could choose, and nothing is as large as it likes.
"""

from __future__ import annotations

import pickletools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from ckptz.errors import CkptzError, CorruptionError
from ckptz.tree.skeleton import MAX_EQUAL_HASHES

MAX_BYTES: Final = 1 << 28
MAX_OPERATIONS: Final = 1 << 25  # each takes at most some hundred bytes of memory, so 3.5 GB
MAX_KEY_PARTS: Final = 64  # of a key that is a tuple, with all tuples in it


@dataclass(frozen=True, slots=True)
class Symbol:
    """A class or a function, by its full name."""

    name: str


@dataclass(eq=False, slots=True)
class Made:
    """A call that a stream asks for, and the state that its result would get; nothing is called."""

    symbol: Symbol
    args: tuple[Any, ...]
    state: Any = None

    @property
    def kind(self) -> str:
        """The symbol's name without its module."""
        return self.symbol.name.rpartition(".")[2]

    def attributes(self) -> Mapping[str, Any]:
        """Give the state by name, as of a dataclass."""
        if not isinstance(self.state, dict):
            raise CorruptionError(f"a {self.kind} without attributes")
        return self.state


class Maker:
    """Stand-ins for the symbols of a stream and for their results; this one makes nothing of them.

    `keys` are the types that it gives and that may be keys of a dict.
    """

    keys: tuple[type, ...] = (Symbol, Made)

    def named(self, symbol: Symbol) -> Any:
        """Give what stands for a symbol where it is a value."""
        return symbol

    def call(self, symbol: Symbol, args: tuple[Any, ...]) -> Any:
        """Make what stands for the result of a call."""
        return Made(symbol, args)

    def build(self, target: Any, state: Any) -> None:
        """Give `target` the state that belongs to it."""
        if not isinstance(target, Made):
            raise CorruptionError("a state for something that has none")
        target.state = state

    def stored(self, key: Any) -> Any:
        """Give what is kept outside of the stream under this key."""
        raise CorruptionError("refers to something outside of it")


class _Machine:
    """The stack and the memo."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._hashes: dict[int, tuple[Any, Counter[int]]] = {}

    def pop(self) -> Any:
        return self.stack.pop()

    def to_mark(self) -> list[Any]:
        at = self.marks.pop()
        items, self.stack[at:] = self.stack[at:], []
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def call(self, symbol: Any, args: Any) -> None:
        if not isinstance(symbol, Symbol) or not isinstance(args, tuple):
            raise CorruptionError("a call of something that has no name")
        self.push(self.maker.call(symbol, args))

    def build(self) -> None:
        state = self.pop()
        self.maker.build(self.stack[-1], state)

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise CorruptionError("items for something that is no list")
        self.stack[-1].extend(items)

    def items(self, pairs: list[Any]) -> None:
        target, keys = self.stack[-1], pairs[::2]
        if not isinstance(target, dict) or not all(map(self._is_bounded_key, keys)):
            raise CorruptionError("a key that is no name")
        odd = [hash(key) for key in keys if isinstance(key, int | float | tuple)]
        if odd:  # a stream may choose them so that each meets all before it
            seen = self._hashes.setdefault(id(target), (target, Counter()))[1]
            seen.update(odd)
            if max(seen[found] for found in odd) > MAX_EQUAL_HASHES:
                raise CorruptionError("a key that is one of many of the same hash")
        target.update(zip(keys, pairs[1::2], strict=True))

    def tuple_of(self, n: int) -> None:
        items = self.stack[len(self.stack) - n :]
        if len(items) != n:
            raise CorruptionError("an empty stack")
        del self.stack[len(self.stack) - n :]
        self.push(tuple(items))

    def named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise CorruptionError("a class whose name is no text")
        self.push(self.maker.named(Symbol(f"{module}.{name}")))

    def _is_bounded_key(self, key: Any) -> bool:
        """Tell whether a value can be hashed in no time: shared tuples in tuples may take for ever."""
        todo, n_parts = [key], 0
        while todo:
            value = todo.pop()
            n_parts += 1
            if isinstance(value, tuple):
                todo += value[:MAX_KEY_PARTS]
            elif value is not None and not isinstance(value, (str, bytes, int, float, *self.maker.keys)):
                return False
            if n_parts + len(todo) > MAX_KEY_PARTS:
                return False
        return True


def _remember(machine: _Machine, key: int | None) -> None:
    machine.memo[len(machine.memo) if key is None else key] = machine.stack[-1]


def _push_text(machine: _Machine, text: str) -> None:
    machine.push(text.encode("latin-1").decode())  # as Python 2 wrote it


def _swapped(machine: _Machine, then: Callable[[Any, Any], None]) -> None:
    last = machine.pop()
    then(machine.pop(), last)


_Step = Callable[[_Machine, Any], None]
_LITERALS: Final = (
    *("BININT", "BININT1", "BININT2", "INT", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
)
_STEPS: Final[Mapping[str, _Step]] = {
    **{name: lambda machine, value: machine.push(value) for name in _LITERALS},
    "SHORT_BINSTRING": _push_text,
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "STOP": lambda machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.to_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.to_mark()),
    "SETITEM": lambda machine, _: machine.items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.items(machine.to_mark()),
    "MEMOIZE": lambda machine, _: _remember(machine, None),
    "BINPUT": _remember,
    "LONG_BINPUT": _remember,
    "BINGET": lambda machine, key: machine.push(machine.memo[key]),
    "LONG_BINGET": lambda machine, key: machine.push(machine.memo[key]),
    "GLOBAL": lambda machine, text: machine.named(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: _swapped(machine, machine.named),
    "REDUCE": lambda machine, _: _swapped(machine, machine.call),
    "NEWOBJ": lambda machine, _: _swapped(machine, machine.call),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.push(machine.maker.stored(machine.pop())),
}


def read_pickled(data: bytes | BinaryIO, maker: Maker | None = None) -> Any:
    """Read a pickle stream as lists, dicts, tuples, literals, and what `maker` makes, by default `Made`s.

    A file is read from where it stands up to the stream's end.

    Raises:
        CorruptionError: not a pickle, or one with more than plain records.
    """
    if isinstance(data, bytes) and len(data) > MAX_BYTES:
        raise CorruptionError("larger than 256 MiB")
    machine = _Machine(maker or Maker())
    try:
        for n, (operation, argument, _) in enumerate(pickletools.genops(data)):
            step = _STEPS.get(operation.name)
            if step is None:
                raise CorruptionError(f"holds {operation.name}, which records do not need")
            if n >= MAX_OPERATIONS:
                raise CorruptionError(f"more than {MAX_OPERATIONS} operations")
            step(machine, argument)
        [value] = machine.stack
    except CkptzError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        reason = str(error)[:120] if isinstance(error, ValueError) else "it contradicts itself"
        raise CorruptionError(f"not a pickle of plain records: {reason}") from None
    return value
