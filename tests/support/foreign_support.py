"""Folders and torch files as other libraries write them."""

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
HOSTILE_NAMES = ["../x", "/etc/x", "a/b", "a\\b", "..", ".", "", "a\nb", "a\x00b", "C:x", "\ud800", "x" * 256]


def index_text(weight_map: Mapping[str, Any]) -> str:
    return json.dumps({"metadata": {"total_size": 88}, "weight_map": weight_map}, indent=2) + "\n"


def sharded_folder(root: Path) -> Path:
    """Write a small sentence encoder's folder: two shards, their index, and other files."""
    (root / "1_Pooling").mkdir(parents=True)
    generator = np.random.default_rng(0)
    first = {"b": generator.normal(size=(3, 4)).astype("f4"), "a": np.arange(5), "empty": np.zeros((0, 2))}
    second = {"c": generator.normal(size=7).astype("f2")}
    save_file(first, root / FIRST, {"format": "pt"})
    save_file(second, root / SECOND, {"format": "pt"})
    weight_map = dict.fromkeys(first, FIRST) | dict.fromkeys(second, SECOND)
    (root / INDEX).write_bytes(index_text(weight_map).replace("\n", "\r\n").encode())
    (root / "config.json").write_text("{}")
    (root / ".gitattributes").write_text("*.safetensors lfs")
    (root / "1_Pooling" / "config.json").write_text('{"mean": true}')
    return root


def rewrite(
    path: Path, compression: int = zipfile.ZIP_STORED, change: Callable[[bytes], bytes] | None = None
) -> None:
    """Rewrite the records of a torch file without checksums, with a changed pickle."""
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            is_changed = change is not None and name.endswith("data.pkl")
            archive.writestr(name, change(content) if change and is_changed else content)
