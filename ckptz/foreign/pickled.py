"""A restricted unpickler: it knows a fixed list of names, and has limits.

A plain unpickler imports whatever a stream names, and makes whatever it asks for: keys whose hash takes for
ever, more objects than there is memory. This one stands in for both Python's and torch's.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final

from ckptz.errors import CkptzError, CorruptionError, UnsupportedError
from ckptz.state.skeleton import MAX_EQUAL_HASHES

MAX_BYTES: Final = 1 << 28
MAX_OPERATIONS: Final = 1 << 25  # each takes at most some hundred bytes of memory, so 3.5 GB
MAX_KEY_PARTS: Final = 64  # of a key that is a tuple, with all tuples in it

_OPERATIONS: Final = (
    *("PROTO", "FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
)


class PickledObject:
    """An object of a pickle: the arguments that it was made with, and its state."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> PickledObject:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    @property
    def kind(self) -> str:
        """The name of its class, without the module."""
        return type(self).__name__

    def attributes(self) -> Mapping[str, Any]:
        """Return the attributes by name, as of a dataclass."""
        if not isinstance(self.state, dict):
            raise CorruptionError(f"a {self.kind} without attributes")
        return self.state


def record(name: str) -> type[PickledObject]:
    """Make what stands for a class or a function of this full name."""
    module, _, last = name.rpartition(".")
    return type(last, (PickledObject,), {"__slots__": (), "__module__": module})


class Unpickler(pickle._Unpickler):  # the one in Python, whose steps can be replaced
    """Reads a stream from where a file stands up to the stream's end.

    Args:
        file: with `read` and `readline`.
        names: what stands for the classes and functions that the stream may name, with their modules.
        stored: gives what is kept outside of the stream under a key.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self, file: BinaryIO, names: Mapping[str, Any], stored: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._names, self._stored = names, stored
        self._hashes: dict[int, tuple[Any, Counter[int]]] = {}
        self.n_operations = 0

    def read_all(self) -> Any:
        """Read the stream.

        Raises:
            UnsupportedError: it names something else.
            CorruptionError: not a pickle, or one with more than plain values.
        """
        try:
            return self.load()
        except CkptzError:
            raise
        except Exception as error:  # of a stream that contradicts itself, from any of Python's types
            raise CorruptionError(f"not a pickle of plain values ({type(error).__name__})") from None

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a global name."""
        if f"{module}.{name}" not in self._names:
            raise UnsupportedError(
                f"it needs code to load ({module[:80]}.{name[:80]}), which ckptz does not run; "
                "save a plain state_dict: torch.save(model.state_dict(), ...)"
            )
        return self._names[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        """Return an object that is stored outside of the stream."""
        if self._stored is None:
            raise CorruptionError("refers to something outside of it")
        return self._stored(pid)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, PickledObject):
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict and all(type(key) is str for key in state):
            if hidden := [key for key in state if hasattr(OrderedDict, key)]:
                raise CorruptionError(f"an OrderedDict whose attribute {hidden[0][:80]!r} hides its method")
            vars(target).update(state)
        else:
            raise CorruptionError("a state for something that has none")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, pairs: list[Any]) -> None:
        target, keys = self.stack[-1], pairs[::2]
        if not isinstance(target, dict) or not all(map(_is_bounded_key, keys)):
            raise CorruptionError("a key that is no name")
        odd = [hash(key) for key in keys if isinstance(key, int | float | tuple)]
        if odd:  # a stream may choose them so that each meets all before it
            seen = self._hashes.setdefault(id(target), (target, Counter()))[1]
            seen.update(odd)
            if max(seen[one] for one in odd) > MAX_EQUAL_HASHES:
                raise CorruptionError("a key that is one of many of the same hash")
        target.update(zip(keys, pairs[1::2], strict=True))


def _is_bounded_key(key: Any) -> bool:
    """Return whether a value is hashed quickly: nested shared tuples may take exponential time."""
    todo, n_parts = [key], 0
    while todo:
        value = todo.pop()
        n_parts += 1
        if isinstance(value, tuple):
            todo += value[:MAX_KEY_PARTS]
        elif isinstance(value, list | dict):
            return False
        if n_parts + len(todo) > MAX_KEY_PARTS:
            return False
    return True


def _counted(step: Any) -> Any:
    def run(unpickler: Unpickler) -> None:
        unpickler.n_operations += 1
        if unpickler.n_operations > MAX_OPERATIONS:
            raise CorruptionError(f"more than {MAX_OPERATIONS} operations")
        step(unpickler)

    return run


_OWN: Final = {"BUILD": Unpickler._build, "SETITEM": Unpickler._set_item, "SETITEMS": Unpickler._set_items}
Unpickler.dispatch = {
    code: _counted(_OWN.get(name) or Unpickler.dispatch[code])
    for name in _OPERATIONS
    for code in getattr(pickle, name)
}
