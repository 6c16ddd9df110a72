"""Opens whatever can be compressed: one call for files and folders of all kinds."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from errno import ENOENT
from pathlib import Path
from typing import Any, Final

from ckptz.errors import CkptzError, ConfigError, named
from ckptz.foreign.dcp import is_dcp, open_dcp
from ckptz.foreign.folders import (
    SHARD_SUFFIXES,
    check_sharding,
    is_shard_name,
    is_within,
    open_folder,
    packed_in,
)
from ckptz.foreign.folders import Input as Input
from ckptz.foreign.targets import stem_of
from ckptz.foreign.torch_files import LEGACY_MAGIC, TORCH_SUFFIXES, ZIP_MAGIC, read
from ckptz.format.byte_source import is_folder, is_url, local_copy, path_of
from ckptz.format.envelope import MAX_HEADER_BYTES
from ckptz.format.index import Shard, Sharding
from ckptz.run.exact import exact_of
from ckptz.run.names import newest_checkpoint, weights_at
from ckptz.run.step_files import StepFile
from ckptz.store.resolve import PLAIN_SUFFIX, SUFFIX, open_checkpoint

ACCEPTED: Final = (
    "a .safetensors or .ckptz file, a torch file (.pt, .pth, .bin), a folder of .safetensors shards, or one "
    "of torch.distributed.checkpoint"
)
MODEL: Final = "model"  # stem of the weights in a folder of their own
WEIGHTS, STATE = f"{MODEL}{SUFFIX}", f"state{SUFFIX}"
_BESIDE: Final = re.compile(r"(state|rng-\d+|model_\d+)\.ckptz")  # as the Trainer and accelerate name them
_HEAD_BYTES: Final = 9  # of a safetensors file: length and first character of the header


def open_input(path: Path, search_path: Sequence[Path] = ()) -> Input:
    """Open a file or a folder, by its content; of a folder that was packed to one file, that file.

    Raises:
        FileNotFoundError: nothing there, or a shard of a folder is missing.
        ConfigError: something else than a checkpoint, or a folder without tensors.
        FormatError: damaged.
        UnsupportedError: a torch file that needs code, or something newer than this ckptz.
    """
    path = path_of(path)
    if is_folder(path) and is_dcp(path):
        tensors, tree = open_dcp(path)
        return Input(str(path), "dcp", stem_of(path), tensors, tree=tree)
    if is_folder(path):
        packed = packed_in(path)
        return open_folder(path) if packed is None else open_input(packed, search_path)
    if not path.exists():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))
    if not path.is_file():
        raise ConfigError(f"{path}: not a regular file; give {ACCEPTED}")
    if not _is_torch_file(path):
        return _of_checkpoint(path, search_path)
    if is_url(path):
        with local_copy(path) as copy:
            flat = read(Path(copy.name))
    else:
        flat = read(path)
    # What it is read from goes with its last tensor, so nothing stays open.
    return Input(str(path), "torch", stem_of(path), flat.tensors, tree=flat.tree)


def open_whole(path: Path, search_path: Sequence[Path], held: contextlib.ExitStack) -> list[Input]:
    """Open what `open_input` does, or all files of a checkpoint in a folder that holds `.ckptz` files only.

    That is the newest checkpoint, or the step of DIR@STEP: the weights first, then what belongs to them, as
    exact as they are there. `held` closes the files.

    Raises:
        CkptzError, OSError: see there.
    """

    def opened(file: Path) -> Input:
        return held.enter_context(contextlib.closing(open_input(file, search_path)))

    weights = weights_at(path)
    if weights is None:
        try:
            return [opened(path)]
        except ConfigError:
            weights = newest_checkpoint(path) if is_folder(path) else None
            if weights is None:
                raise
    return [opened(exact_of(file)) for file in (weights, *beside_weights(weights))]


def beside_weights(weights: Path) -> list[Path]:
    """List the files that a Checkpointer or an adapter wrote beside the weights of a step."""
    if (file := StepFile.parse(weights.name)) is not None:
        state = weights.with_name(StepFile(file.step, "state").name)
        return [state] if state.exists() else []  # a keep rule may have taken it
    if weights.name != WEIGHTS:
        return []
    return sorted(path for path in weights.parent.iterdir() if _BESIDE.fullmatch(path.name))


def is_trainer_folder(folder: Path) -> bool:
    """Tell whether a folder holds a checkpoint of `CkptzTrainerMixin`."""
    files = (WEIGHTS, STATE, "trainer_state.json")
    return is_folder(folder) and all((folder / name).is_file() for name in files)


def checked_kind(path: Path) -> Path:
    """Give the path of what may be a `.ckptz` or safetensors file, as far as its first bytes say.

    Raises:
        ConfigError: a torch file, or no checkpoint at all.
    """
    if not is_url(path) and path.is_file() and _is_torch_file(path):
        raise ConfigError(f"{path}: is a torch file, not a .ckptz file; ckptz compress makes one of it")
    return path


def _is_torch_file(path: Path) -> bool:
    if path.suffix in (PLAIN_SUFFIX, SUFFIX):
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    # Some write safetensors under other names; its first character is one that no torch file has there.
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES:
        return False
    if head.startswith((ZIP_MAGIC, LEGACY_MAGIC)) or path.suffix in TORCH_SUFFIXES:
        return True
    raise ConfigError(f"{path}: not a checkpoint that ckptz knows; give {ACCEPTED}")


def _of_checkpoint(path: Path, search_path: Sequence[Path]) -> Input:
    checkpoint = open_checkpoint(path, search_path)
    index = checkpoint.container.index if checkpoint.container else None
    sharding = index.sharding if index else None
    try:
        if sharding is not None:
            check_sharding(sharding, checkpoint.tensors)
    except CkptzError as error:
        checkpoint.close()
        raise named(error, str(path)) from None
    listed, folder = sharding.carried if sharding else (), path.absolute().parent
    carried = [(name, folder / name) for name in listed if is_within(folder / name, folder.resolve())]
    return Input(
        name=str(path),
        kind="ckptz" if index else "safetensors",
        stem=stem_of(path),
        tensors=checkpoint.tensors,
        metadata=checkpoint.metadata,
        sharding=sharding,
        tree=index.tree if index else None,
        carried=tuple(carried),
        left_out=tuple(sorted(set(listed) - {name for name, _ in carried})),
        checkpoint=checkpoint,
        close=checkpoint.close,
    )


# --- a model and its optimizer ------------------------------------------------------------------


def join(model: Input, optimizer: Input) -> Input:
    """Make one checkpoint of a model and its optimizer, which restores to both under their own names.

    Raises:
        ConfigError: they cannot stand in one file; the message says why.
    """
    parts = [_part_of(model), _part_of(optimizer)]
    if optimizer.kind == "folder":
        raise ConfigError(f"{optimizer.name}: --optimizer takes a file, and this is a folder; name the file")
    shards = [shard for part in parts for shard in part.shards]
    for shard in parts[1].shards:
        if any(shard.file == other.file for other in parts[0].shards):
            both = f"{model.name} and {optimizer.name}"
            raise ConfigError(f"{both}: both are called {shard.file}; rename one of them")
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
class _Joined:
    """Shards of one input; `states` are the JSON nodes of those that are torch files, by file."""

    shards: tuple[Shard, ...]
    states: list[Any]
    storages: list[Any]


def _part_of(opened: Input) -> _Joined:
    if opened.kind == "ckptz":
        raise ConfigError(f"{opened.name}: is a .ckptz file already; restore it first")
    tree = opened.tree or {"root": {"dict": []}, "storages": []}
    if opened.sharding is not None:
        return _Joined(opened.sharding.shards, tree["root"]["dict"], tree["storages"])
    file = Path(opened.name).name
    if not is_shard_name(file):
        raise ConfigError(f"{opened.name}: name it with one of {', '.join(SHARD_SUFFIXES)} to join two files")
    if opened.tree is None and not file.endswith(PLAIN_SUFFIX):
        raise ConfigError(f"{opened.name}: a safetensors file; name it so, with the suffix {PLAIN_SUFFIX}")
    metadata = None if opened.metadata is None else dict(opened.metadata)
    states = [] if opened.tree is None else [[file, tree["root"]]]
    return _Joined((Shard(file, tuple(opened.tensors), metadata),), states, tree["storages"])


def _joint_tree(parts: Sequence[_Joined]) -> dict[str, Any] | None:
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
