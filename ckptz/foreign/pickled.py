"""A restricted unpickler, with a fixed list of names and limits of time and memory.

Python's unpickler imports any name in a stream and builds any object: keys whose hash takes exponential
time, more objects than fit into memory. This unpickler checks a stream before torch loads it.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final

from ckptz.errors import CkptzError, CorruptionError, UnsupportedError
from ckptz.state.skeleton import MAX_EQUAL_HASHES

MAX_BYTES: Final = 1 << 28
MAX_OPERATIONS: Final = 1 << 25  # each takes at most about 100 bytes of memory: 3.5 GB in all
MAX_KEY_PARTS: Final = 64  # parts of a key that is a tuple, those of nested tuples included

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
    """An object of a pickle as data: constructor arguments and state."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> PickledObject:
        """Create an object without running code of its class."""
        instance = super().__new__(cls)
        instance.args, instance.state = args, None
        return instance

    @property
    def class_name(self) -> str:
        """The name of its class, without the module."""
        return type(self).__name__

    def attributes(self) -> Mapping[str, Any]:
        """Return the attributes by name, as of a dataclass."""
        if not isinstance(self.state, dict):
            raise CorruptionError(f"a {self.class_name} without attributes")
        return self.state


def record(name: str) -> type[PickledObject]:
    """Create a stand-in class for the class or function with this full name."""
    module, _, last = name.rpartition(".")
    return type(last, (PickledObject,), {"__slots__": (), "__module__": module})


class Unpickler(pickle._Unpickler):  # the implementation in Python, whose operations can be replaced
    """Reads a pickle from the current position of a file.

    Args:
        file: an object with `read` and `readline`.
        names: stand-ins for the classes and functions that the stream may use, by full name.
        stored: returns the object that is stored outside of the stream under a key.
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
        """Read the pickle.

        Raises:
            UnsupportedError: the pickle uses another name.
            CorruptionError: not a pickle of plain values.
        """
        try:
            return self.load()
        except CkptzError:
            raise
        except Exception as error:  # invalid streams raise errors of many types
            raise CorruptionError(
                f"not a pickle of plain values ({type(error).__name__}); if it was downloaded, get it again"
            ) from None

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
            raise CorruptionError("refers to an object outside of the pickle")
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
            raise CorruptionError("a state for an object without one")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, pairs: list[Any]) -> None:
        target, keys = self.stack[-1], pairs[::2]
        if not isinstance(target, dict) or not all(map(_is_bounded_key, keys)):
            raise CorruptionError("a key that is not a plain value")
        hashes = [hash(key) for key in keys if isinstance(key, int | float | tuple)]
        if hashes:  # a stream can choose keys with equal hashes, which take quadratic time
            counts = self._hashes.setdefault(id(target), (target, Counter()))[1]
            counts.update(hashes)
            if max(counts[h] for h in hashes) > MAX_EQUAL_HASHES:
                raise CorruptionError("too many keys with the same hash")
        target.update(zip(keys, pairs[1::2], strict=True))


def _is_bounded_key(key: Any) -> bool:
    """Return whether hashing a key takes bounded time; nested shared tuples may take exponential time."""
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


_REPLACED: Final = {
    "BUILD": Unpickler._build,
    "SETITEM": Unpickler._set_item,
    "SETITEMS": Unpickler._set_items,
}
Unpickler.dispatch = {
    code: _counted(_REPLACED.get(name) or Unpickler.dispatch[code])
    for name in _OPERATIONS
    for code in getattr(pickle, name)
}
