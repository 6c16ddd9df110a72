"""The tree: every value of the grammar round-trips, all others are refused by name."""

import itertools
import json
import re
import struct
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptz.errors import ConfigError, CorruptionError, UnsupportedError
from ckptz.format.envelope import strict_json
from ckptz.state import skeleton as tree_module
from ckptz.state.skeleton import (
    MAX_DEPTH,
    MAX_EQUAL_HASHES,
    MAX_KEY_INT,
    DTypeName,
    Size,
    TensorRef,
    View,
    pack_node,
    parse_tree,
    with_leaves,
)
from tests.support.spec_valid import LEAVES
from tests.support.tree_support import assert_same_state

SPEC = Path(__file__).parents[2] / "spec" / "09-tree.md"
STORAGES = [["a", "b"], ["c"]]

numbers = st.integers(0, (1 << 63) - 1)
flags = st.booleans()
refs = st.builds(
    TensorRef, st.sampled_from(["x", "y.z", "é"]), st.none() | st.tuples(numbers, numbers), flags, flags
)
geometry = st.tuples(numbers)
views = st.builds(View, st.integers(0, 1), st.just("float8_e5m2"), geometry, geometry, numbers, flags, flags)
any_floats = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack("<d", raw)[0])
sizes = st.builds(Size, st.lists(st.integers(-9, 9), max_size=3).map(tuple))
singles = (
    st.none() | flags | st.text(max_size=9) | st.binary(max_size=9) | sizes | st.just(DTypeName("bfloat16"))
)
atoms = singles | st.integers() | st.integers(-(1 << 300), 1 << 300) | any_floats
key_atoms = singles | st.integers(-MAX_KEY_INT, MAX_KEY_INT) | st.floats(allow_nan=False)
keys = st.recursive(key_atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    atoms | refs | views,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(st.tuples(keys, inner), max_size=4).map(OrderedDict)
    ),
    max_leaves=25,
)


def wrapped(node: Any) -> dict[str, Any]:
    return {"root": node, "storages": STORAGES}


def through_json(value: Any) -> Any:
    node = strict_json(msgspec.json.encode(wrapped(pack_node(value))), "tree")
    return parse_tree(node).root


@given(values)
def test_a_value_is_restored_with_its_types_order_and_bits(value: Any) -> None:
    assert_same_state(through_json(value), value)


@given(values)
def test_each_value_has_one_form(value: Any) -> None:
    node = pack_node(value)
    assert pack_node(parse_tree(wrapped(node)).root) == node


def test_a_state_dict_keeps_its_metadata() -> None:
    state = OrderedDict(w=1)
    state._metadata = OrderedDict({"": {"version": 2}})
    assert through_json(state)._metadata == {"": {"version": 2}}


def test_the_forms_of_the_specification_and_of_the_vectors_are_written_so() -> None:
    lines = SPEC.read_text().split("## Examples")[1].splitlines()
    examples = [json.loads(line) for line in lines if line.startswith("    ")]
    assert len(examples) >= 6
    for node in [*examples, *LEAVES]:
        assert pack_node(parse_tree(wrapped(node)).root) == node


class Custom:
    pass


Pair = namedtuple("Pair", "a b")


def with_attribute() -> OrderedDict[str, int]:
    mapping: OrderedDict[str, int] = OrderedDict()
    mapping.note = 1
    return mapping


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, Custom()]}, r"'a\.1'.*Custom"),
        ({"a": {1, 2}}, r"'a'.*type set"),
        (1j, "the root.*type complex"),
        ({"m": Counter("aab")}, r"'m'.*collections\.Counter"),
        ([Pair(1, 2)], r"'0'.*Pair"),
        ([type("Sub", (int,), {})(3)], r"'0'.*Sub"),
        ({"lr": lambda: 0}, "'lr'.*function"),
        ({"x": {frozenset(): 1}}, "'x.key'.*frozenset"),
        ({TensorRef("w"): 1}, "the root: a key of type .*TensorRef"),
        ({(1, (TensorRef("w"),)): 1}, "a key of type tuple"),
        ({"a": with_attribute()}, "'a': attribute 'note'"),
        ({"a": "\ud800"}, "'a'.*lone surrogate"),
        ({"a\udfff": 1}, "key'.*lone surrogate"),
        ({"m": {1 << 64: 1}}, r"'m': a key is an integer of 2\^64 or more"),
        ({(-(1 << 64),): 1}, r"the root: a key is an integer of 2\^64 or more"),
        ({("s", (0,) * 5): 1}, "the root: a key is a tuple of more than 4 values"),
        ({float("nan"): 1, float("nan"): 2}, "the root: a key occurs twice"),
    ],
)
def test_what_has_no_form_is_refused_with_its_place_and_type(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        pack_node(value)


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = None
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}])
def test_the_depth_of_values_is_bounded(wrap: Callable[[Any], Any]) -> None:
    deepest = nested(MAX_DEPTH, wrap)
    assert through_json(deepest) == deepest
    with pytest.raises(ConfigError, match="deeper than 64"):
        pack_node(wrap(deepest))


def test_the_depth_of_keys_is_bounded() -> None:
    deepest = nested(MAX_DEPTH - 1, lambda v: (v,))
    assert through_json({deepest: 1}) == {deepest: 1}
    with pytest.raises(ConfigError, match="deeper than 64"):
        pack_node({(deepest,): 1})


def test_the_number_of_values_is_bounded_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_NODES", 100)
    assert len(through_json([0] * 99)) == 99
    shared: list[Any] = [0] * 10
    with pytest.raises(ConfigError, match="more than 100 values"):
        pack_node([shared] * 10)  # few objects, many values
    with pytest.raises(CorruptionError, match="100 values"):
        parse_tree(wrapped([[0] * 9] * 10))


VIEW = {"view": 0, "dtype": "int8", "shape": [], "strides": [], "offset": 0}
CORRUPT_NODES: list[Any] = [
    *(-(1 << 53), "\ud800", {"int": " 0x20000000000000"}, {"int": "0x2000000000000_0"}, {"bytes": "é"}),
    *({"dtype": "__class__"}, {"dict": [[{"tuple": [{"tuple": [0] * 5}]}, 2]]}),
    *({**VIEW, **wrong} for wrong in ({"view": -1}, {"view": True}, {"offset": 0.0})),
]


@pytest.mark.parametrize("node", CORRUPT_NODES, ids=lambda node: re.sub(r"\W+", "-", ascii(node)))
def test_trees_outside_the_grammar_are_corrupt(node: Any) -> None:
    """Cases that `spec_cases_tree.py` lacks."""
    with pytest.raises(CorruptionError, match=r"^tree: "):
        parse_tree(wrapped({"dict": [["k", node]]}))


fields = ["dict", "tuple", "tensor", "view", "strides", "float", "int", "bytes", "OrderedDict"]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)


@given(
    st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(fields), inner, max_size=3)
        ),
    )
)
def test_any_other_json_is_a_tree_or_corrupt(node: Any) -> None:
    try:
        value = parse_tree(wrapped(node)).root
    except CorruptionError:
        return
    assert pack_node(value) == node


def colliding_tuples(n: int) -> list[Any]:
    """Return nodes of `n` pairs of integers with equal hashes, computed from Python's constants (xxHash)."""
    prime_1, prime_2, mask = 11400714785074694791, 14029467366897019727, (1 << 64) - 1
    nodes: list[Any] = []
    target = hash((1 << 60, 0)) - (2 ^ 2870177450012600261 ^ 3527539)
    for first in itertools.count():
        mixed = 2870177450012600261 + first * prime_2 & mask
        mixed = (mixed << 31 | mixed >> 33) * prime_1 & mask
        lane = (target - 0) * pow(prime_1, -1, 1 << 64) & mask
        lane = (lane << 33 | lane >> 31) & mask
        second = (lane - mixed) * pow(prime_2, -1, 1 << 64) & mask
        if second < (1 << 61) - 1:
            assert hash((first, second)) == hash((1 << 60, 0)), "another Python"
            nodes.append({"tuple": [pack_node(first), pack_node(second)]})
        if len(nodes) == n:
            return nodes
    raise AssertionError


def test_keys_that_only_become_equal_with_the_values_of_leaves_are_refused() -> None:
    tree = parse_tree(wrapped({"dict": [[{"Size": [1]}, "size"], [{"tuple": [1]}, "tuple"]]}))
    assert len(with_leaves(tree.root, lambda leaf: leaf)) == 2
    with pytest.raises(CorruptionError, match="two keys of a dict are equal"):
        with_leaves(tree.root, lambda leaf: leaf.dims)


def test_keys_of_one_hash_are_refused_before_they_take_long() -> None:
    same = colliding_tuples(MAX_EQUAL_HASHES + 1)
    value = parse_tree(wrapped({"dict": [[key, 1] for key in same[1:]]})).root
    assert len(value) == MAX_EQUAL_HASHES
    with pytest.raises(CorruptionError, match="many of the same hash"):
        parse_tree(wrapped({"dict": [[key, 1] for key in same]}))
