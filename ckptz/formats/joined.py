"""Joins a model and its optimizer, two files, to one checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptz.container.index import Shard, Sharding
from ckptz.errors import ConfigError
from ckptz.formats.inputs import Input
from ckptz.formats.sharding import SHARD_SUFFIXES, is_shard_name
from ckptz.formats.targets import clashes
from ckptz.store.resolve import PLAIN_SUFFIX


def join(model: Input, optimizer: Input) -> Input:
    """Make one checkpoint of a model and its optimizer, which restores to both under their own names.

    Raises:
        ConfigError: they cannot stand in one file; the message says why.
    """
    parts = [_part_of(model), _part_of(optimizer)]
    if optimizer.kind == "folder":
        raise ConfigError(f"{optimizer.name}: --optimizer takes a file, and this is a folder; name the file")
    shards = [shard for part in parts for shard in part.shards]
    files = [shard.file for shard in shards]
    for one, other in [*((f, f) for f, n in Counter(files).items() if n > 1), *clashes(files)]:
        names = one if one == other else f"{one} and {other}, one name on some systems"
        raise ConfigError(f"{model.name} and {optimizer.name}: both are called {names}; rename one of them")
    for name in optimizer.tensors:
        if name in model.tensors:
            raise ConfigError(
                f"{optimizer.name}: tensor {name!r} is in {model.name} too; "
                "give the optimizer's state alone, under names of its own"
            )
    sharding = model.sharding or Sharding(())
    return replace(
        model,
        kind="folder",
        tensors={**model.tensors, **optimizer.tensors},
        sharding=Sharding(tuple(shards), sharding.index_file, sharding.index_text, sharding.carried),
        tree=_joint_tree(parts),
        checkpoint=None,
        optimizer_names=model.optimizer_names | frozenset(optimizer.tensors),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Shards of one input; `states` are the JSON nodes of those that are torch files, by file."""

    shards: tuple[Shard, ...]
    states: list[Any]
    storages: list[Any]


def _part_of(opened: Input) -> _Part:
    if opened.kind == "ckptz":
        raise ConfigError(f"{opened.name}: is a .ckptz file already; restore it first")
    tree = opened.tree or {"root": {"dict": []}, "storages": []}
    if opened.sharding is not None:
        return _Part(opened.sharding.shards, tree["root"]["dict"], tree["storages"])
    file = Path(opened.name).name
    if not is_shard_name(file):
        raise ConfigError(f"{opened.name}: name it with one of {', '.join(SHARD_SUFFIXES)} to join two files")
    if opened.tree is None and not file.endswith(PLAIN_SUFFIX):
        raise ConfigError(f"{opened.name}: a safetensors file; name it so, with the suffix {PLAIN_SUFFIX}")
    metadata = None if opened.metadata is None else dict(opened.metadata)
    states = [] if opened.tree is None else [[file, tree["root"]]]
    return _Part((Shard(file, tuple(opened.tensors), metadata),), states, tree["storages"])


def _joint_tree(parts: Sequence[_Part]) -> dict[str, Any] | None:
    states: list[Any] = []
    storages: list[Any] = []
    for part in parts:
        states += _renumbered(part.states, len(storages))
        storages += part.storages
    return {"root": {"dict": states}, "storages": storages} if states else None


def _renumbered(node: Any, n_before: int) -> Any:
    """A node of a tree behind `n_before` storages of another one."""
    if isinstance(node, list):
        return [_renumbered(item, n_before) for item in node]
    if not isinstance(node, dict):
        return node
    if "view" in node:
        return {**node, "view": node["view"] + n_before}
    return {key: _renumbered(value, n_before) for key, value in node.items()}
