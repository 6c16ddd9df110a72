"""Opens whatever can be compressed: one call for files and folders of all kinds."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from errno import ENOENT
from pathlib import Path
from typing import Final

from ckptz.container.byte_source import is_folder, is_url, local_copy, path_of
from ckptz.container.envelope import MAX_HEADER_BYTES
from ckptz.container.index import Sharding
from ckptz.errors import CkptzError, ConfigError, named
from ckptz.formats.dcp import is_dcp, open_dcp
from ckptz.formats.folders import Input as Input
from ckptz.formats.folders import is_within, open_folder, packed_in
from ckptz.formats.sharding import Carried, check_sharding
from ckptz.formats.targets import stem_of
from ckptz.formats.torch_files import TORCH_SUFFIXES, read
from ckptz.formats.torch_records import LEGACY_MAGIC, ZIP_MAGIC
from ckptz.run.exact import exact_of
from ckptz.run.names import newest_checkpoint, weights_at
from ckptz.run.step_files import StepFile
from ckptz.store.resolve import PLAIN_SUFFIX, SUFFIX, open_checkpoint

ACCEPTED: Final = (
    "a .safetensors or .ckptz file, a torch file (.pt, .pth, .bin), a folder of .safetensors shards, or one "
    "of torch.distributed.checkpoint"
)
MODEL: Final = "model"  # stem of the weights in a folder of their own
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
    if weights.name != f"{MODEL}{SUFFIX}":
        return []
    return sorted(path for path in weights.parent.iterdir() if _BESIDE.fullmatch(path.name))


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
    carried = _carried_beside(path, sharding)
    return Input(
        name=str(path),
        kind="ckptz" if index else "safetensors",
        stem=stem_of(path),
        tensors=checkpoint.tensors,
        metadata=checkpoint.metadata,
        sharding=sharding,
        tree=index.tree if index else None,
        carried=tuple(carried),
        left_out=tuple(sorted(set(sharding.carried if sharding else ()) - {name for name, _ in carried})),
        checkpoint=checkpoint,
        close=checkpoint.close,
    )


def _carried_beside(path: Path, sharding: Sharding | None) -> list[Carried]:
    """The files that the record lists and that stand beside the `.ckptz` file."""
    folder = path.absolute().parent
    listed = [(name, folder / name) for name in (sharding.carried if sharding else ())]
    return [(name, file) for name, file in listed if is_within(file, folder.resolve())]
