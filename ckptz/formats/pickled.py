"""A pickle stream as data: what it names is neither imported nor called.

For the one file of `torch.distributed.checkpoint` that is a bare pickle. Classes and functions become
`Symbol`s, what a pickle would make with them becomes a `Made`, and whoever reads decides what that means.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

from ckptz.errors import CorruptionError

MAX_BYTES: Final = 1 << 28
_PUTS: Final = ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT")
_GETS: Final = ("BINGET", "LONG_BINGET", "GET")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A class or a function, by its full name."""

    name: str


@dataclass(eq=False, slots=True)
class Made:
    """What a call of a symbol would give, and the state that it would get then."""

    symbol: Symbol
    args: tuple[Any, ...]
    state: Any = None

    @property
    def kind(self) -> str:
        """The symbol's name without its module."""
        return self.symbol.name.rpartition(".")[2]

    def attributes(self) -> Mapping[str, Any]:
        """The state by name, as of a dataclass."""
        if not isinstance(self.state, dict):
            raise CorruptionError(f"a {self.kind} without attributes")
        return self.state


class _Machine:
    """The stack and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

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
        self.push(Made(symbol, args))

    def build(self) -> None:
        state = self.pop()
        if not isinstance(self.stack[-1], Made):
            raise CorruptionError("a state for something that has none")
        self.stack[-1].state = state

    def items(self, pairs: list[Any]) -> None:
        if not all(isinstance(key, str | Made) for key in pairs[::2]):
            raise CorruptionError("a key that is no name")  # to hash nested tuples may take for ever
        self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def tuple_of(self, n: int) -> None:
        items = self.stack[len(self.stack) - n :]
        if len(items) != n:
            raise CorruptionError("an empty stack")
        del self.stack[len(self.stack) - n :]
        self.push(tuple(items))

    def named(self, module: Any, name: Any) -> None:
        self.push(Symbol(f"{module}.{name}"))


def _remember(machine: _Machine, key: int | None) -> None:
    machine.memo[len(machine.memo) if key is None else key] = machine.stack[-1]


def _swapped(machine: _Machine, then: Callable[[Any, Any], None]) -> None:
    last = machine.pop()
    then(machine.pop(), last)


def _extend_last(machine: _Machine, items: list[Any]) -> None:
    machine.stack[-1].extend(items)


_Step = Callable[[_Machine, Any], None]
_LITERALS: Final = (
    *("BININT", "BININT1", "BININT2", "INT", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
)
_STEPS: Final[Mapping[str, _Step]] = {
    **{name: lambda machine, value: machine.push(value) for name in _LITERALS},
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
    "APPEND": lambda machine, _: _extend_last(machine, [machine.pop()]),
    "APPENDS": lambda machine, _: _extend_last(machine, machine.to_mark()),
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
}


def read_pickled(data: bytes) -> Any:
    """What a pickle stream holds, as lists, dicts, tuples, literals, `Symbol`s and `Made`s.

    Args:
        data: the stream.

    Raises:
        CorruptionError: not a pickle, or one with more than plain records.
    """
    if len(data) > MAX_BYTES:
        raise CorruptionError("larger than 256 MiB")
    machine = _Machine()
    try:
        for operation, argument, _ in pickletools.genops(data):
            step = _STEPS.get(operation.name)
            if step is None:
                raise CorruptionError(f"holds {operation.name}, which records do not need")
            step(machine, argument)
        [value] = machine.stack
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CorruptionError):
            raise
        raise CorruptionError(f"not the pickle of records: {error}") from None
    return value


def symbols_in(stream: IO[bytes]) -> list[str]:
    """Full names of the classes and functions that one pickle names, in order.

    Args:
        stream: stands behind the pickle afterwards.

    Raises:
        ValueError: not a whole pickle.
    """
    names, memo = list[str](), dict[Any, Any]()
    last: list[Any] = [None, None]  # values on top of the stack, if they are texts
    for operation, argument, _ in pickletools.genops(stream):
        if operation.name == "GLOBAL":
            names.append(str(argument).replace(" ", ".", 1))
        elif operation.name == "STACK_GLOBAL":
            names.append(f"{last[0]}.{last[1]}")
        elif operation.name in _PUTS:
            memo[len(memo) if argument is None else argument] = last[1]
        else:
            last = [last[1], memo.get(argument) if operation.name in _GETS else argument]
    return names


def operation_name(code: int) -> str:
    """What pickle calls an operation: "FRAME"."""
    return next((one.name for one in pickletools.opcodes if one.code == chr(code)), str(code))
