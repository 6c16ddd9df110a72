"""The tree: a nested checkpoint without its tensors, as JSON. Implements spec/09-tree.md.

    {"root": node, "storages": [[tensor name, ...], ...]}

This module implements the grammar; `flatten.py` determines which tensors share memory. Parsing needs no
torch. A hostile file could choose keys with equal hashes, so that a dict takes quadratic time: the number of
such keys is limited before they are added to one.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeGuard

import msgspec

from ckptz.errors import ConfigError, CorruptionError, UnsupportedError

MAX_KEY_INT: Final = (1 << 64) - 1  # normative
MAX_KEY_ITEMS: Final = 4  # of a tuple; normative
MAX_EQUAL_HASHES: Final = 256  # keys of one dictionary with the same hash; more occur in hostile files only
KEY_KINDS: Final = frozenset({"int", "float", "bytes", "Size", "dtype"})
MAX_DEPTH: Final = 64  # normative, spec/09-tree.md#bounds
MAX_NODES: Final = 1 << 21  # normative, spec/09-tree.md#bounds
MAX_PLAIN_INT: Final = (1 << 53) - 1  # exact in every JSON reader
MAX_NUMBER: Final = (1 << 63) - 1
TreePath = tuple[str, ...]
Leaf = Callable[[Any, TreePath], dict[str, Any]]
_FLAGS: Final = frozenset({"requires_grad", "parameter"})
# Required and optional fields by kind of node. The kind of a node is the first key here that it has as a
# field.
_FIELDS: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {
    "view": (frozenset({"view", "dtype", "shape", "strides", "offset"}), _FLAGS),
    **{kind: (frozenset({kind}), frozenset()) for kind in (*KEY_KINDS, "tuple", "dict")},
    "OrderedDict": (frozenset({"OrderedDict"}), frozenset({"_metadata"})),
    "tensor": (frozenset({"tensor"}), _FLAGS | {"strides"}),
}
_HEX_INT: Final = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_HEX_FLOAT: Final = re.compile(r"[0-9a-f]{16}")
_DTYPE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


# --- leaves: sizes, dtypes and tensors; spec/09-tree.md#leaves -------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """A `torch.Size` in a state."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DTypeName:
    """A `torch.dtype` by its name in torch, such as "bfloat16"."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A stored tensor that shares memory with no other."""

    name: str  # name of the stored tensor
    strides: tuple[int, ...] | None = None  # in elements; None for C order
    requires_grad: bool = False  # as in torch
    is_parameter: bool = False  # whether it is a `torch.nn.Parameter`

    def pack(self) -> dict[str, Any]:
        """Return the JSON node."""
        strides = {} if self.strides is None else {"strides": list(self.strides)}
        return {"tensor": self.name, **strides, **_pack_flags(self)}


@dataclass(frozen=True, slots=True)
class View:
    """A view of a storage that several tensors may share; strides and offset are in elements."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    is_parameter: bool = False

    def pack(self) -> dict[str, Any]:
        """Return the JSON node."""
        shape, strides = list(self.shape), list(self.strides)
        where = {"dtype": self.dtype, "shape": shape, "strides": strides, "offset": self.offset}
        return {"view": self.storage, **where, **_pack_flags(self)}


def _pack_flags(ref: TensorRef | View) -> dict[str, bool]:
    flags = {"requires_grad": ref.requires_grad, "parameter": ref.is_parameter}
    return {name: True for name, is_set in flags.items() if is_set}


# --- keys ----------------------------------------------------------------------------------------


def is_key(node: Any) -> bool:
    """Return whether a node is of a type that can be a key."""
    if isinstance(node, dict):
        return (len(node) == 1 and not KEY_KINDS.isdisjoint(node)) or (
            set(node) == {"tuple"} and isinstance(node["tuple"], list) and all(map(is_key, node["tuple"]))
        )
    return not isinstance(node, list)


def key_problem(node: Any) -> str:
    """Return a description of the limit that a key exceeds; empty if none."""
    if not isinstance(node, dict):
        return ""
    if "tuple" in node:
        if len(node["tuple"]) > MAX_KEY_ITEMS:
            return f"is a tuple of more than {MAX_KEY_ITEMS} values"
        return next(filter(None, map(key_problem, node["tuple"])), "")
    is_large = "int" in node and abs(int(node["int"], 16)) > MAX_KEY_INT
    return "is an integer of 2^64 or more" if is_large else ""


class SeenKeys:
    """The keys of a dictionary that have been read so far."""

    def __init__(self) -> None:
        self._forms: set[str | bytes] = set()  # whose hashes are randomized, unlike those of numbers
        self._hashes: Counter[int] = Counter()

    def problem_with(self, key: Any, node: Any) -> str:
        """Return the reason why a key and its node cannot be added; empty if they can."""
        form = node if isinstance(node, str) else msgspec.json.encode(node)
        if form in self._forms:
            return "occurs twice"
        self._forms.add(form)
        self._hashes[hash(key)] += 1
        return "is one of many of the same hash" if self._hashes[hash(key)] > MAX_EQUAL_HASHES else ""


@dataclass(frozen=True, slots=True)
class Tree:
    """A parsed tree."""

    root: Any  # plain Python values with leaves of type `Size`, `DTypeName`, `TensorRef` and `View`
    storages: tuple[tuple[str, ...], ...]  # names of the stored tensors of each shared storage
    refs: tuple[TensorRef | View, ...]  # all `TensorRef` and `View`, in order

    def check_names(self, names: Collection[str]) -> None:
        """Check that the tree refers to exactly the tensors `names`.

        Raises:
            CorruptionError: it refers to others, or not to all of them.
        """
        used = {ref.name for ref in self.refs if isinstance(ref, TensorRef)}.union(*self.storages)
        if missing := sorted(used - set(names)):
            raise CorruptionError(f"tree: tensor {missing[0]!r} is not in the file")
        if unused := sorted(set(names) - used):
            raise CorruptionError(f"tree: does not refer to tensor {unused[0]!r}")


_LEAVES: Final = frozenset({Size, DTypeName, TensorRef, View})


def with_leaves(value: Any, make: Callable[[Any], Any]) -> Any:
    """Return the root of a tree with each leaf replaced by what `make` returns for it."""
    cls: Any = type(value)
    if cls in _LEAVES:
        return make(value)
    if cls is list or cls is tuple:
        return cls([with_leaves(item, make) for item in value])
    if cls is not dict and cls is not OrderedDict:
        return value
    made = cls((with_leaves(key, make), with_leaves(item, make)) for key, item in value.items())
    if len(made) < len(value):
        raise CorruptionError("tree: two keys of a dict are equal in Python")
    if cls is OrderedDict and "_metadata" in vars(value):
        vars(made)["_metadata"] = with_leaves(vars(value)["_metadata"], make)
    return made


def where(path: TreePath) -> str:
    """Format a path in a tree for messages."""
    return repr(".".join(path)) if path else "the root"


def label(key: Any) -> str:
    """Format a key as a component of a path or a tensor name."""
    if isinstance(key, str):
        return key
    if type(key) is int and abs(key) > MAX_PLAIN_INT:
        return hex(key)  # Python limits the length of decimal conversions
    if type(key) is tuple:
        return f"({','.join(map(label, key))})"
    return str(key)


class _Packer:
    """Converts values to nodes; values that are not plain Python are passed to `leaf`."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._n_nodes = 0

    def node(self, value: Any, path: TreePath) -> Any:
        self._n_nodes += 1
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{where(path)}: nested deeper than {MAX_DEPTH} levels; save a flatter state")
        if self._n_nodes > MAX_NODES:
            raise ConfigError(f"{where(path)}: more than {MAX_NODES} values; keep large lists as tensors")
        pack = _PACKERS.get(type(value))
        return self._leaf(value, path) if pack is None else pack(self, value, path)

    def text(self, value: str, path: TreePath) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UnsupportedError(
                f"{where(path)}: a string with a lone surrogate is not Unicode; store it as bytes"
            ) from None
        return value

    def sequence(self, values: list[Any] | tuple[Any, ...], path: TreePath) -> list[Any]:
        return [self.node(value, (*path, str(i))) for i, value in enumerate(values)]

    def items(self, mapping: Mapping[Any, Any], path: TreePath) -> list[Any]:
        # The key is checked before it is formatted, which could take very long for a huge key.
        seen = SeenKeys()
        return [
            [self.key(key, path, seen), self.node(value, (*path, label(key)))]
            for key, value in type(mapping).items(mapping)  # an instance attribute may hide the method
        ]

    def key(self, key: Any, path: TreePath, seen: SeenKeys) -> Any:
        node = self.node(key, (*path, "key"))
        if not is_key(node):
            raise UnsupportedError(f"{where(path)}: a key of type {type_name(key)} cannot be kept")
        if problem := key_problem(node) or seen.problem_with(key, node):
            raise UnsupportedError(f"{where(path)}: a key {problem}; use strings or small integers as keys")
        return node

    def ordered(self, mapping: OrderedDict[Any, Any], path: TreePath) -> Any:
        node: dict[str, Any] = {"OrderedDict": self.items(mapping, path)}
        # In a module's state_dict, this attribute has the versions of its modules.
        attributes = dict(vars(mapping))
        if "_metadata" in attributes:
            node["_metadata"] = self.node(attributes.pop("_metadata"), (*path, "_metadata"))
        if attributes:
            raise UnsupportedError(f"{where(path)}: attribute {next(iter(attributes))!r} cannot be kept")
        return node


_PACKERS: Final[Mapping[type, Callable[[_Packer, Any, TreePath], Any]]] = {
    type(None): lambda _, value, path: value,
    bool: lambda _, value, path: value,
    int: lambda _, value, path: value if abs(value) <= MAX_PLAIN_INT else {"int": hex(value)},
    float: lambda _, value, path: {"float": struct.pack(">d", value).hex()},
    str: _Packer.text,
    bytes: lambda _, value, path: {"bytes": base64.b64encode(value).decode()},
    list: _Packer.sequence,
    tuple: lambda packer, value, path: {"tuple": packer.sequence(value, path)},
    dict: lambda packer, value, path: {"dict": packer.items(value, path)},
    OrderedDict: _Packer.ordered,
    Size: lambda _, value, path: {"Size": list(value.dims)},
    DTypeName: lambda _, value, path: {"dtype": value.name},
    TensorRef: lambda _, value, path: value.pack(),
    View: lambda _, value, path: value.pack(),
}


def type_name(value: Any) -> str:
    """Return the module and name of a value's type."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def refuse_leaf(value: Any, path: TreePath) -> NoReturn:
    """Raise UnsupportedError for a value; the default `leaf` function."""
    dtype = getattr(value, "dtype", None)
    kind = type_name(value) if dtype is None else f"{type_name(value)} of dtype {dtype}"
    raise UnsupportedError(
        f"{where(path)}: a value of type {kind} cannot be stored without pickle; "
        "remove it from the checkpoint or convert it to plain Python values and tensors"
    )


def pack_node(value: Any, leaf: Leaf = refuse_leaf) -> Any:
    """Convert plain Python values to a JSON node; `leaf` converts or rejects all other values.

    Raises:
        UnsupportedError: a value cannot be represented; the message has its path and type.
        ConfigError: the value is nested too deeply or has too many values.
    """
    return _Packer(leaf).node(value, ())


class _Parser:
    """Converts nodes to values, and rejects everything that `_Packer` would not write."""

    def __init__(self, n_storages: int) -> None:
        self._n_storages = n_storages
        self._n_nodes = 0
        self.refs: list[TensorRef | View] = []

    def node(self, raw: Any, path: TreePath) -> Any:
        self._n_nodes += 1
        if len(path) > MAX_DEPTH or self._n_nodes > MAX_NODES:
            self.refuse(path, f"over {MAX_DEPTH} levels or {MAX_NODES} values")
        if isinstance(raw, dict):
            return self._object(raw, path)
        if isinstance(raw, list):
            return self.sequence(raw, path)
        if isinstance(raw, str):
            return self._text(raw, path)
        if isinstance(raw, float) or (isinstance(raw, int) and abs(raw) > MAX_PLAIN_INT):
            self.refuse(path, f"number {_shown(raw)} is not in its hexadecimal form")
        return raw

    def refuse(self, path: TreePath, what: str) -> NoReturn:
        raise CorruptionError(f"tree: {where(path)}: {what}")

    def _text(self, raw: Any, path: TreePath) -> str:
        try:
            raw.encode()
        except (UnicodeEncodeError, AttributeError):
            self.refuse(path, "not a string of Unicode")
        return str(raw)

    def _object(self, raw: dict[str, Any], path: TreePath) -> Any:
        kind = next((kind for kind in _FIELDS if kind in raw), None)
        if kind is None:
            self.refuse(path, f"no node has the fields {_shown(raw)}")
        required, optional = _FIELDS[kind]
        if not required <= set(raw) <= required | optional:
            self.refuse(path, f"a {kind} does not have the fields {_shown(raw)}")
        return _PARSERS[kind](self, raw, path)

    def integer(self, raw: dict[str, Any], path: TreePath) -> int:
        text = self.matched(raw["int"], _HEX_INT, path)
        value = int(text, 16)
        if abs(value) <= MAX_PLAIN_INT:
            self.refuse(path, f"integer {value} is not in its plain form")
        return value

    def floating(self, raw: dict[str, Any], path: TreePath) -> Any:
        return struct.unpack(">d", bytes.fromhex(self.matched(raw["float"], _HEX_FLOAT, path)))[0]

    def binary(self, raw: dict[str, Any], path: TreePath) -> bytes:
        text = self._text(raw["bytes"], path)
        try:
            value = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            self.refuse(path, "bytes are not in base64")
        if base64.b64encode(value).decode() != text:
            self.refuse(path, "bytes are not in canonical base64")
        return value

    def sequence(self, raw: Any, path: TreePath) -> list[Any]:
        return [self.node(item, (*path, str(i))) for i, item in enumerate(self._list(raw, path))]

    def ordered(self, raw: dict[str, Any], path: TreePath) -> OrderedDict[Any, Any]:
        mapping = OrderedDict(self.items(raw["OrderedDict"], path))
        if "_metadata" in raw:
            vars(mapping)["_metadata"] = self.node(raw["_metadata"], (*path, "_metadata"))
        return mapping

    def items(self, raw: Any, path: TreePath) -> list[tuple[Any, Any]]:
        items, seen = [], SeenKeys()
        for pair in self._list(raw, path):
            if not isinstance(pair, list) or len(pair) != 2:
                self.refuse(path, "an item is not a pair of a key and a value")
            key = self.node(pair[0], (*path, "key"))
            if not is_key(pair[0]):
                self.refuse(path, "a key is of a type that cannot be one")
            if problem := key_problem(pair[0]) or seen.problem_with(key, pair[0]):
                self.refuse(path, f"a key {problem}")
            items.append((key, self.node(pair[1], (*path, label(key)))))
        if len(dict(items)) < len(items):
            self.refuse(path, "two keys are equal in Python")
        return items

    def size(self, raw: dict[str, Any], path: TreePath) -> Any:
        dims = self._list(raw["Size"], path)
        if not all(type(dim) is int and abs(dim) <= MAX_NUMBER for dim in dims):
            self.refuse(path, "a Size is not a list of integers")
        return Size(tuple(dims))

    def tensor(self, raw: dict[str, Any], path: TreePath) -> Any:
        strides = self._numbers(raw["strides"], path) if "strides" in raw else None
        self.refs.append(TensorRef(self._text(raw["tensor"], path), strides, *self._flags(raw, path)))
        return self.refs[-1]

    def view(self, raw: dict[str, Any], path: TreePath) -> Any:
        dtype = self.matched(raw["dtype"], _DTYPE, path)
        shape, strides = self._numbers(raw["shape"], path), self._numbers(raw["strides"], path)
        storage, offset = self._numbers([raw["view"], raw["offset"]], path)
        if storage >= self._n_storages or len(shape) != len(strides):
            self.refuse(path, "a view does not fit its storage")
        self.refs.append(View(storage, dtype, shape, strides, offset, *self._flags(raw, path)))
        return self.refs[-1]

    def _flags(self, raw: dict[str, Any], path: TreePath) -> tuple[bool, bool]:
        if any(raw.get(flag, True) is not True for flag in _FLAGS):
            self.refuse(path, "a flag is not true")
        return "requires_grad" in raw, "parameter" in raw

    def matched(self, raw: Any, pattern: re.Pattern[str], path: TreePath) -> str:
        if not isinstance(raw, str) or not pattern.fullmatch(raw):
            self.refuse(path, f"{_shown(raw)} is malformed")
        return raw

    def _list(self, raw: Any, path: TreePath) -> list[Any]:
        if not isinstance(raw, list):
            self.refuse(path, "not a list")
        return raw

    def _numbers(self, raw: Any, path: TreePath) -> tuple[int, ...]:
        if not all(map(is_number, self._list(raw, path))):
            self.refuse(path, "not a list of numbers from 0 to 2^63 - 1")
        return tuple(raw)


_PARSERS: Final[Mapping[str, Callable[[_Parser, dict[str, Any], TreePath], Any]]] = {
    "int": _Parser.integer,
    "float": _Parser.floating,
    "bytes": _Parser.binary,
    "tuple": lambda parser, raw, path: tuple(parser.sequence(raw["tuple"], path)),
    "dict": lambda parser, raw, path: dict(parser.items(raw["dict"], path)),
    "OrderedDict": _Parser.ordered,
    "Size": _Parser.size,
    "dtype": lambda parser, raw, path: DTypeName(parser.matched(raw["dtype"], _DTYPE, path)),
    "tensor": _Parser.tensor,
    "view": _Parser.view,
}


def _shown(raw: Any) -> str:
    return ", ".join(sorted(raw))[:60] if isinstance(raw, dict) else repr(raw)[:60]


def is_number(raw: Any) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to 2^63 - 1."""
    return type(raw) is int and 0 <= raw <= MAX_NUMBER


def parse_tree(raw: Any) -> Tree:
    """Parse and check `Index.tree`.

    Args:
        raw: the JSON value.

    Raises:
        CorruptionError: the value is not a valid tree; the message has the path.
    """
    if not isinstance(raw, dict) or set(raw) != {"root", "storages"}:
        raise CorruptionError("tree: not an object with the fields root and storages")
    storages = _parse_storages(raw["storages"])
    parser = _Parser(len(storages))
    root = parser.node(raw["root"], ())
    shared = {name for names in storages for name in names}
    if any(isinstance(ref, TensorRef) and ref.name in shared for ref in parser.refs):
        raise CorruptionError("tree: a tensor of a shared storage must not be referred to by its name")
    return Tree(root, storages, tuple(parser.refs))


def _parse_storages(raw: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(raw, list) or not all(isinstance(names, list) for names in raw):
        raise CorruptionError("tree: storages are not lists of tensor names")
    names = [name for storage in raw for name in storage]
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise CorruptionError("tree: storages do not name each tensor once")
    return tuple(map(tuple, raw))
