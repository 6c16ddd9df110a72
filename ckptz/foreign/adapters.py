"""Converts tensor names of PEFT adapters between model.ckptz and PEFT's own files.

model.ckptz uses the names of the model's state dict, PEFT's files use keys without the adapter's name. The
metadata of model.ckptz record the keys as JSON under "adapters":

    {FOLDER: {"adapter": NAME, "keys": {KEY: TENSOR or null}}}

FOLDER is the adapter's folder within the checkpoint, "" for the checkpoint itself. The default key of a
tensor whose name contains NAME is `key_of(TENSOR, NAME)`; `keys` records only other keys, and null for a
default key that PEFT's file lacks. Tensors that only PEFT's file has (computed prompt embeddings, adapters
that are not trained) are stored as `adapter:FOLDER:KEY`, with the default key KEY.
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
STORED_PREFIX: Final = "adapter:"  # of tensors that only PEFT's files have; a model does not load them
WEIGHTS_FILE: Final = "adapter_model.safetensors"
CONFIG_FILE: Final = "adapter_config.json"

Keys = Mapping[str, str]  # key in a file -> tensor name


def stored_name(folder: str, key: str) -> str:
    """Return the stored name of a tensor that only PEFT's file in `folder` has."""
    return f"{STORED_PREFIX}{folder}:{key}"


def key_of(name: str, adapter: str) -> str:
    """Return the default key of a tensor: without the adapter's name and `modules_to_save`."""
    a = re.escape(adapter)
    pattern = rf"\.modules_to_save\.{a}(?=\.)|(?<=lora_magnitude_vector)\.{a}\.weight$|\.{a}(?=\.|$)"
    return re.sub(pattern, "", name)


def _default_keys(folder: str, adapter: str, names: Iterable[str]) -> dict[str, str]:
    prefix, keys = stored_name(folder, ""), dict[str, str]()
    for name in names:
        is_stored = name.startswith(STORED_PREFIX)
        key = name.removeprefix(prefix) if is_stored else key_of(name, adapter)
        if key != name:
            keys[key] = name
    return keys


def pack_adapters(files: Mapping[str, tuple[str, Keys]], names: Iterable[str]) -> str:
    """Serialize the keys of PEFT's files.

    Args:
        files: adapter name and keys, by folder.
        names: tensors of model.ckptz.
    """
    record, names = {}, list(names)
    for folder, (adapter, keys) in files.items():
        default = _default_keys(folder, adapter, names)
        differing: dict[str, str | None] = {k: name for k, name in keys.items() if default.get(k) != name}
        differing.update(dict.fromkeys(default.keys() - keys.keys()))
        record[folder] = {"adapter": adapter, "keys": differing}
    return json.dumps(record)


def parse_adapters(text: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Parse the record of `pack_adapters`, which is untrusted, to the keys of PEFT's files by folder.

    Args:
        text: the record.
        names: tensors of model.ckptz, aliases included.

    Raises:
        CorruptionError: not a record, or one with a path outside of the folder or an unknown tensor.
    """
    names, record, by_folder = list(names), strict_json(text.encode(), "metadata: adapters"), {}
    if not isinstance(record, dict):
        raise CorruptionError("metadata: the record of adapters is not an object")
    for folder, entry in record.items():
        if folder and not is_file_name(folder):
            raise CorruptionError(f"metadata: the folder {folder!r} of an adapter is not a plain file name")
        adapter, differing = (
            (entry.get("adapter"), entry.get("keys")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(adapter, str) or not isinstance(differing, dict):
            raise CorruptionError("metadata: the record of an adapter lacks its name or keys")
        if not all(isinstance(name, str | None) for name in differing.values()):
            raise CorruptionError(f"metadata: adapter {adapter!r}: the tensor name of a key is not text")
        keys: dict[str, Any] = {**_default_keys(folder, adapter, names), **differing}
        by_folder[folder] = {key: name for key, name in keys.items() if name is not None}
        if unknown := sorted(set(by_folder[folder].values()) - set(names)):
            raise CorruptionError(f"metadata: adapter {adapter!r}: {unknown[0]!r} is not in the file")
    return by_folder
