"""Keys of a tree's dictionaries: which there may be, and that none occurs twice.

Implements the part of spec/09-tree.md#bounds that is about keys. A file chooses its keys, and may choose
them so that Python's hash table takes quadratic time; nothing here is compared by such a hash.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec

MAX_KEY_INT: Final = (1 << 64) - 1  # normative
MAX_KEY_ITEMS: Final = 4  # of a tuple; normative
MAX_EQUAL_HASHES: Final = 256  # keys of one dictionary; more are found only where somebody chose them so
KEY_KINDS: Final = frozenset({"int", "float", "bytes", "Size", "dtype"})


def is_key(node: Any) -> bool:
    """Tell whether a node is of a type that can be a key."""
    if isinstance(node, dict):
        return (len(node) == 1 and not KEY_KINDS.isdisjoint(node)) or (
            set(node) == {"tuple"} and isinstance(node["tuple"], list) and all(map(is_key, node["tuple"]))
        )
    return not isinstance(node, list)


def key_problem(node: Any) -> str:
    """Tell which bound a key breaks, or nothing."""
    if not isinstance(node, dict):
        return ""
    if "tuple" in node:
        if len(node["tuple"]) > MAX_KEY_ITEMS:
            return f"is a tuple of more than {MAX_KEY_ITEMS} values"
        return next(filter(None, map(key_problem, node["tuple"])), "")
    is_large = "int" in node and abs(int(node["int"], 16)) > MAX_KEY_INT
    return "is an integer of 2^64 or more" if is_large else ""


class SeenKeys:
    """The keys of one dictionary so far."""

    def __init__(self) -> None:
        self._forms: set[str | bytes] = set()  # hashed with a secret, unlike numbers and tuples of them
        self._hashes: Counter[int] = Counter()

    def problem_with(self, key: Any, node: Any) -> str:
        """Tell why this key and its node cannot be added, or nothing."""
        form = node if isinstance(node, str) else msgspec.json.encode(node)
        if form in self._forms:
            return "occurs twice"
        self._forms.add(form)
        self._hashes[hash(key)] += 1
        return "is one of many of the same hash" if self._hashes[hash(key)] > MAX_EQUAL_HASHES else ""
