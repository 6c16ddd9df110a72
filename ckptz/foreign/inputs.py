"""Opens the inputs of conversions: files and folders of all formats."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from errno import ENOENT
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ckptz.errors import CkptzError, ConfigError, with_context
from ckptz.foreign.dcp import METADATA_FILE, read_dcp
from ckptz.foreign.folders import Input as Input
from ckptz.foreign.folders import check_sharding, is_shard_name, is_within, packed_in, read_folder
from ckptz.foreign.shards import read_ranks
from ckptz.foreign.torch_files import LEGACY_MAGIC, ZIP_MAGIC, read
from ckptz.format.byte_source import is_folder, is_url, local_copy
from ckptz.format.envelope import HEAD_BYTES, LENGTH_BYTES, MAX_HEADER_BYTES, is_head
from ckptz.format.index import Shard, Sharding
from ckptz.format.suffixes import FOREIGN_SUFFIXES, PLAIN_SUFFIX, SHARD_SUFFIXES, SUFFIX, TORCH_SUFFIXES
from ckptz.run.names import resolve
from ckptz.run.step_files import TRAINER_STATE, StepFile, is_written
from ckptz.store.resolve import folders_beside, open_checkpoint

ACCEPTED: Final = (
    "a .safetensors or .ckptz file, a torch file (.pt, .pth, .bin), a folder of .safetensors shards, or one "
    "of torch.distributed.checkpoint"
)
MODEL: Final = "model"  # stem of the weights file in a folder of one step
WEIGHTS, STATE = f"{MODEL}{SUFFIX}", f"state{SUFFIX}"
_OTHER_FILES: Final = re.compile(r"(state|rng-\d+|model_\d+)\.ckptz")  # of the Trainer and accelerate
Part = tuple[tuple[Shard, ...], list[Any], list[Any]]  # part of a joined checkpoint; see `_part_of`


def stem_of(path: Path) -> str:
    """Return the file name without the suffix of a checkpoint; other suffixes stay."""
    # "." and paths that end with a slash have no name.
    name = path.name if is_url(path) else Path(os.path.abspath(path)).name
    suffix = Path(name).suffix
    return name.removesuffix(suffix) if suffix in (SUFFIX, *FOREIGN_SUFFIXES) else name


def open_input(path: Path, search_path: Sequence[Path] = ()) -> Input:
    """Open a file or a folder with the reader of its format; for a folder with one packed file, that file.

    Folders are recognised in this order: a step of several ranks, torch.distributed.checkpoint, one packed
    file, shards. Files are recognised by `_file_kind`.

    Args:
        path: of a checkpoint of any supported format, or DIR@STEP of a step that several ranks wrote.
        search_path: folders in which bases are searched.

    Raises:
        FileNotFoundError: the path does not exist, or a shard of a folder is missing.
        ConfigError: not a checkpoint, or a folder without tensors.
        FormatError: a file is damaged.
        UnsupportedError: a torch file that needs code, or a file of a newer ckptz.
    """
    resolved = resolve(path)
    path = resolved.path
    if resolved.shards is not None:
        with contextlib.ExitStack() as stack:
            tensors, tree, shards = read_ranks(resolved.shards, search_path, stack)
            close = stack.pop_all().close
        stem = stem_of(resolved.shards)
        return Input(str(path), "dcp", stem, tensors, tree=tree, shards=shards, close=close)
    if is_folder(path) and (path / METADATA_FILE).is_file():
        tensors, tree = read_dcp(path)
        return Input(str(path), "dcp", stem_of(path), tensors, tree=tree)
    if is_folder(path):
        packed = packed_in(path)
        return read_folder(path) if packed is None else open_input(packed, search_path)
    if not path.exists():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))
    if not path.is_file():
        raise ConfigError(f"{path}: not a regular file; give {ACCEPTED}")
    if _file_kind(path) != "torch":
        return _open_checkpoint(path, search_path)
    if is_url(path):
        with local_copy(path) as copy:
            flat = read(Path(copy.name))
    else:
        flat = read(path)
    # No `close`: the mapped file is closed with its last tensor.
    return Input(str(path), "torch", stem_of(path), flat.tensors, tree=flat.tree)


def other_files_of_step(weights: Path) -> list[Path]:
    """List the state files of a step, given its weights file."""
    if (file := StepFile.parse(weights.name)) is not None:
        state = weights.with_name(StepFile(file.step, "state").name)
        return [state] if state.exists() else []  # a keep rule may have removed it
    if weights.name != WEIGHTS:
        return []
    return sorted(path for path in weights.parent.iterdir() if _OTHER_FILES.fullmatch(path.name))


def is_trainer_folder(folder: Path) -> bool:
    """Return whether a folder holds a complete checkpoint of `CkptzTrainerMixin`."""
    files = (WEIGHTS, STATE, TRAINER_STATE)
    is_there = is_folder(folder) and all((folder / name).is_file() for name in files)
    return is_there and is_written(folder / TRAINER_STATE)


def check_not_torch(path: Path) -> Path:
    """Return the path, after checking that it does not begin like a torch file.

    Raises:
        ConfigError: a torch file, or not a checkpoint.
    """
    if not is_url(path) and path.is_file() and _file_kind(path) == "torch":
        raise ConfigError(f"{path}: is a torch file, not a .ckptz file; convert it with ckptz compress")
    return path


def _file_kind(path: Path) -> Literal["safetensors", "torch"]:
    """Recognise a file by its suffix or its first bytes; `.ckptz` files are safetensors files.

    Raises:
        ConfigError: neither.
    """
    if path.suffix in (PLAIN_SUFFIX, SUFFIX):
        return "safetensors"
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if is_head(head) and int.from_bytes(head[:LENGTH_BYTES], "little") <= MAX_HEADER_BYTES:
        return "safetensors"
    if head.startswith((ZIP_MAGIC, LEGACY_MAGIC)) or path.suffix in TORCH_SUFFIXES:
        return "torch"
    raise ConfigError(f"{path}: not a checkpoint that ckptz knows; give {ACCEPTED}")


def _open_checkpoint(path: Path, search_path: Sequence[Path]) -> Input:
    checkpoint = open_checkpoint(path, search_path)
    index = checkpoint.container.index if checkpoint.container else None
    sharding = index.sharding if index else None
    try:
        if sharding is not None:
            check_sharding(sharding, checkpoint.tensors)
    except CkptzError as error:
        checkpoint.close()
        raise with_context(error, str(path)) from None
    listed = sharding.carried if sharding else ()
    # Reversed, so that a file beside a symbolic link replaces one beside the link's target.
    folders = [(name, folder) for name in listed for folder in reversed(folders_beside(path.absolute()))]
    carried = {name: folder / name for name, folder in folders if is_within(folder / name, folder.resolve())}
    return Input(
        name=str(path),
        kind="ckptz" if index else "safetensors",
        stem=stem_of(path),
        tensors=checkpoint.tensors,
        metadata=checkpoint.metadata,
        sharding=sharding,
        tree=index.tree if index else None,
        carried=tuple(carried.items()),
        left_out=tuple(sorted(set(listed) - set(carried))),
        checkpoint=checkpoint,
        close=checkpoint.close,
    )


# --- a model and its optimizer ------------------------------------------------------------------


def join(model: Input, optimizer: Input) -> Input:
    """Join a model and its optimizer to one checkpoint, which restores to both files.

    Raises:
        ConfigError: an input is a folder or a `.ckptz` file, or file or tensor names collide.
    """
    parts = [_part_of(model), _part_of(optimizer)]
    if optimizer.kind == "folder":
        raise ConfigError(f"{optimizer.name}: --optimizer takes a file, and this is a folder; name the file")
    model_shards, optimizer_shards = (shards for shards, _, _ in parts)
    for shard in optimizer_shards:
        if any(shard.file == model_shard.file for model_shard in model_shards):
            raise ConfigError(
                f"{model.name} and {optimizer.name}: both are called {shard.file}; rename one of them"
            )
    for name in optimizer.tensors:
        if name in model.tensors:
            raise ConfigError(
                f"{optimizer.name}: tensor {name!r} is in {model.name} too; "
                "give a file with only the optimizer's state, under different names"
            )
    states, storages = list[Any](), list[Any]()
    for _, part_states, part_storages in parts:
        states += _renumbered(part_states, len(storages))
        storages += part_storages
    sharding = model.sharding or Sharding(())
    return replace(
        model,
        kind="folder",
        tensors={**model.tensors, **optimizer.tensors},
        sharding=msgspec.structs.replace(sharding, shards=(*model_shards, *optimizer_shards)),
        tree={"root": {"dict": states}, "storages": storages} if states else None,
        checkpoint=None,
        optimizer_names=model.optimizer_names | frozenset(optimizer.tensors),
    )


def _part_of(source: Input) -> Part:
    """Return the shards of an input, and the states [file, JSON node] and storages of its torch files."""
    if source.kind == "ckptz":
        raise ConfigError(f"{source.name}: is a .ckptz file already; restore it first")
    tree = source.tree or {"root": {"dict": []}, "storages": []}
    if source.sharding is not None:
        return source.sharding.shards, tree["root"]["dict"], tree["storages"]
    file = Path(source.name).name
    if not is_shard_name(file):
        raise ConfigError(
            f"{source.name}: to join two files, rename it to one of {', '.join(SHARD_SUFFIXES)}"
        )
    if source.tree is None and not file.endswith(PLAIN_SUFFIX):
        raise ConfigError(f"{source.name}: is a safetensors file; rename it to {PLAIN_SUFFIX}")
    metadata = None if source.metadata is None else dict(source.metadata)
    states = [] if source.tree is None else [[file, tree["root"]]]
    return (Shard(file, tuple(source.tensors), metadata),), states, tree["storages"]


def _renumbered(node: Any, n_before: int) -> Any:
    """Copy a node of a tree with `n_before` added to the numbers of its storages."""
    if isinstance(node, list):
        return [_renumbered(item, n_before) for item in node]
    if not isinstance(node, dict):
        return node
    if "view" in node:
        return {**node, "view": node["view"] + n_before}
    return {key: _renumbered(value, n_before) for key, value in node.items()}
