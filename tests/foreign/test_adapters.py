"""The record of keys in PEFT's files: exceptions from the naming rule, validated by readers."""

import json
from typing import Any

import pytest

from ckptz.errors import CorruptionError
from ckptz.foreign.adapters import key_of, pack_adapters, parse_adapters, stored_name

NAMES = ["a.lora_A.default.weight", "a.lora_A.x.weight", "a.bias", stored_name("x", "prompt_embeddings")]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a.lora_A.x.weight", "a.lora_A.weight"),
        ("a.modules_to_save.x.weight", "a.weight"),
        ("a.lora_magnitude_vector.x.weight", "a.lora_magnitude_vector"),
        ("a.vector.x", "a.vector"),
        ("a.xy.weight", "a.xy.weight"),
    ],
)
def test_a_key_lacks_the_name_of_the_adapter(name: str, key: str) -> None:
    assert key_of(name, "x") == key


def test_the_record_holds_exceptions_alone() -> None:
    files = {
        "": ("default", {"a.lora_A.weight": NAMES[0], "a.bias": "a.bias"}),
        "x": ("x", {"prompt_embeddings": NAMES[3]}),
    }
    record = pack_adapters(files, NAMES)
    assert json.loads(record) == {
        "": {"adapter": "default", "keys": {"a.bias": "a.bias"}},
        "x": {"adapter": "x", "keys": {"a.lora_A.weight": None}},
    }
    assert parse_adapters(record, NAMES) == {folder: keys for folder, (_, keys) in files.items()}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "not an object"),
        ({"..": {"adapter": "x", "keys": {}}}, "not a plain file name"),
        ({"a/b": {"adapter": "x", "keys": {}}}, "not a plain file name"),
        ({"": []}, "lacks its name or keys"),
        ({"": {"adapter": 1, "keys": {}}}, "lacks its name or keys"),
        ({"": {"adapter": "x", "keys": {"k": 1}}}, "tensor name of a key is not text"),
        ({"": {"adapter": "x", "keys": {"k": "gone"}}}, "'gone' is not in the file"),
    ],
)
def test_an_invalid_record_of_adapters_is_refused(record: Any, message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        parse_adapters(json.dumps(record), NAMES)


def test_a_record_that_is_no_json_is_refused() -> None:
    with pytest.raises(CorruptionError, match="adapters"):
        parse_adapters("{", NAMES)
