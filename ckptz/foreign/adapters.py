"""Names of the tensors of PEFT's adapters: in a checkpoint of the Trainer, and in PEFT's own files.

model.ckptz has the names of the model's state dict, PEFT's files have keys without the adapter's name. The
metadata of model.ckptz record the keys as JSON under "adapters":

    {FOLDER: {"adapter": NAME, "keys": {KEY: TENSOR or null}}}

FOLDER is that of the files of an adapter within the checkpoint, "" for the checkpoint itself. By rule, each
tensor with NAME as a component has the key `key_of(TENSOR, NAME)`; `keys` has only what differs from that,
and null for a key that PEFT's file lacks. A tensor of PEFT's file that is not among those of model.ckptz (the
embeddings that an encoder of prompts computes, an adapter that is not trained) is stored under the name
`adapter:FOLDER:KEY`, and has its key by rule, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ckptz.errors import CorruptionError
from ckptz.foreign.folders import is_file_name
from ckptz.format.envelope import strict_json

ADAPTERS_KEY: Final = "adapters"  # in the metadata of model.ckptz
STORED_PREFIX: Final = "adapter:"  # of tensors for PEFT's files alone, which a model does not load
WEIGHTS_FILE: Final = "adapter_model.safetensors"
CONFIG_FILE: Final = "adapter_config.json"

Keys = Mapping[str, str]  # the tensor of each key of a file


def stored_name(folder: str, key: str) -> str:
    """Return the name of a tensor that is stored for PEFT's file in `folder` alone."""
    return f"{STORED_PREFIX}{folder}:{key}"


def key_of(name: str, adapter: str) -> str:
    """Return the key of a tensor by rule: without the adapter's name, and that of its copies of layers."""
    own = re.escape(adapter)
    pattern = rf"\.modules_to_save\.{own}(?=\.)|(?<=lora_magnitude_vector)\.{own}\.weight$|\.{own}(?=\.|$)"
    return re.sub(pattern, "", name)


def _keys_by_rule(folder: str, adapter: str, names: Iterable[str]) -> dict[str, str]:
    prefix, keys = stored_name(folder, ""), dict[str, str]()
    for name in names:
        is_stored = name.startswith(STORED_PREFIX)
        key = name.removeprefix(prefix) if is_stored else key_of(name, adapter)
        if key != name:
            keys[key] = name
    return keys


def pack_adapters(files: Mapping[str, tuple[str, Keys]], names: Iterable[str]) -> str:
    """Return the record of (adapter, keys) by folder, where model.ckptz has the tensors `names`."""
    record, names = {}, list(names)
    for folder, (adapter, keys) in files.items():
        ruled = _keys_by_rule(folder, adapter, names)
        differing: dict[str, str | None] = {k: name for k, name in keys.items() if ruled.get(k) != name}
        differing.update(dict.fromkeys(ruled.keys() - keys.keys()))
        record[folder] = {"adapter": adapter, "keys": differing}
    return json.dumps(record)


def parse_adapters(text: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the keys of PEFT's files by folder from their record.

    Args:
        text: the record, which may come from anywhere.
        names: of the tensors of model.ckptz, aliases included.

    Raises:
        CorruptionError: it is none, leads out of the folder or names a tensor that is not there.
    """
    names, record, by_folder = list(names), strict_json(text.encode(), "metadata: adapters"), {}
    if not isinstance(record, dict):
        raise CorruptionError("metadata: the record of adapters is no object")
    for folder, entry in record.items():
        if folder and not is_file_name(folder):
            raise CorruptionError(f"metadata: the folder {folder!r} of an adapter is no plain file name")
        adapter, differing = _parse_entry(entry)
        keys: dict[str, Any] = {**_keys_by_rule(folder, adapter, names), **differing}
        by_folder[folder] = {key: name for key, name in keys.items() if name is not None}
        if unknown := sorted(set(by_folder[folder].values()) - set(names)):
            raise CorruptionError(f"metadata: adapter {adapter!r}: {unknown[0]!r} is not in the file")
    return by_folder


def _parse_entry(entry: Any) -> tuple[str, dict[str, str | None]]:
    adapter, keys = (entry.get("adapter"), entry.get("keys")) if isinstance(entry, dict) else (None, None)
    if not isinstance(adapter, str) or not isinstance(keys, dict):
        raise CorruptionError("metadata: an adapter's record has no name and keys")
    if not all(isinstance(name, str | None) for name in keys.values()):
        raise CorruptionError(f"metadata: adapter {adapter!r}: a key has no name of a tensor")
    return adapter, keys
