"""Files with the weights of a model in a Hugging Face folder, and the tensors in them."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from errno import ENOENT
from pathlib import Path
from typing import Any, Final

import torch

from ckptz.api.read import safe_open
from ckptz.errors import CkptzError, ConfigError, CorruptionError, UnsupportedError, with_context
from ckptz.foreign.folders import check_numbered, is_model_file, torch_names
from ckptz.format.dtypes import dtype_of
from ckptz.format.suffixes import SUFFIX
from ckptz.state.skeleton import TensorRef, parse_tree
from ckptz.state.torch import torch_dtype
from ckptz.store.resolve import open_file

_STEMS: Final = ("model", "pytorch_model")  # the names by which transformers knows weights


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """Return the files with a model's weights: one, a complete set of numbered shards, or none.

    Raises:
        FileNotFoundError: a shard is missing.
        ConfigError: there are shards of several checkpoints.
    """
    for stem in _STEMS:
        name = stem if variant is None else f"{stem}.{variant}"
        if (single := folder / f"{name}{SUFFIX}").is_file():
            return [single]
        if shards := _shards(folder, name):
            return shards
    return []


def _shards(folder: Path, name: str) -> list[Path]:
    pattern = re.compile(rf"{re.escape(name)}-(\d+)-of-(\d+){re.escape(SUFFIX)}")
    matches = [match for entry in os.scandir(folder) if (match := pattern.fullmatch(entry.name))]
    if len({int(match[2]) for match in matches}) > 1:
        files = ", ".join(sorted(match[0] for match in matches))
        raise ConfigError(f"{folder}: holds shards of several checkpoints ({files}); name some with files=")
    check_numbered(folder, [match[0] for match in matches])
    return [folder / match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def named_files(folder: Path, files: str | Sequence[str]) -> list[Path]:
    """Return the paths of the files that the caller names.

    Raises:
        ConfigError: the caller names no file.
        FileNotFoundError: one of them is missing.
    """
    paths = [folder / file for file in ([files] if isinstance(files, str) else files)]
    if not paths:
        raise ConfigError(f"{folder}: files= names none")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))
    return paths


def nothing_found(folder: Path) -> ConfigError:
    """Make the error for a folder without weight files."""
    others = ", ".join(sorted(path.name for path in folder.glob(f"*{SUFFIX}"))) or "none"
    return ConfigError(
        f"{folder}: no model{SUFFIX}, nor shards of such; name the file with files= ({SUFFIX} files here: "
        f"{others})"
    )


def read_model(files: Iterable[Path], *, is_lazy: bool, **options: Any) -> dict[str, Any]:
    """Read the tensors of a model by their names in the saved state.

    Args:
        files: the files with its weights.
        is_lazy: return slices, which are decoded on use and keep the files open; tied tensors are decoded
            now.
        options: of `ckptz.safe_open`.

    Raises:
        CorruptionError: two files have a tensor of the same name.
    """
    state: dict[str, Any] = {}
    for file in files:
        with safe_open(file, "pt", **options) as handle:
            pairs = _names(file, handle.keys())
            n_names = Counter(key for _, key in pairs)
            if not is_lazy and len(pairs) >= len(handle.keys()):
                stored = handle.get_tensors()
            else:  # tied tensors are returned as one tensor under all of their names
                stored = {
                    key: handle.get_slice(key) if is_lazy and n == 1 else handle.get_tensor(key)
                    for key, n in n_names.items()
                }
        for name, key in pairs:
            if name in state:
                raise CorruptionError(f"{file}: tensor {name!r} is in another file of the model too")
            state[name] = stored[key]
    return state


def _names(file: Path, stored: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name in the state, name in the file) of each tensor; these differ for tied tensors."""
    with contextlib.closing(open_file(file)) as opened:
        index = getattr(opened, "index", None)  # a plain safetensors file has none
    if index is None or index.tree is None:
        return [(key, key) for key in sorted(stored)]
    try:
        tree = parse_tree(index.tree)
        tree.check_names(torch_names(index.tree, index.sharding) if index.sharding else set(stored))
        if index.sharding is None:
            return sorted(_names_of_state(tree.root))
        pairs: list[tuple[str, str]] = []
        for shard in index.sharding.shards:
            if shard.file not in tree.root:
                pairs += [(name, name) for name in shard.tensors]
            elif is_model_file(shard.file):  # and no optimizer beside it
                pairs += _names_of_state(tree.root[shard.file])
        return sorted(pairs)
    except CkptzError as error:
        raise with_context(error, str(file)) from None


def _names_of_state(state: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(state, dict):
        raise UnsupportedError(f"its torch file held a {type(state).__name__}, not a state_dict")
    for name, leaf in state.items():
        if not isinstance(name, str) or not isinstance(leaf, TensorRef):
            raise UnsupportedError(
                f"entry {name!r} of its torch file is not a tensor with memory of its own; "
                "run ckptz restore, and load what it writes"
            )
        yield name, leaf.name


def first_float(parts: Mapping[str, Any]) -> torch.dtype | None:
    """Return the first floating-point dtype of more than 8 bits, in which transformers builds a model."""
    dtypes = (
        part.dtype if isinstance(part, torch.Tensor) else torch_dtype(dtype_of(part.get_dtype()))
        for part in parts.values()
    )
    return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), None)
