"""Reads, records and restores folders of shards in the format of Hugging Face.

Shards may have an index. Torch files with states beside the model, such as optimizer.pt, become part of the
checkpoint if they can be read without running code; all other files are *carried*: copied unchanged.

The record of a folder is that of spec/06-container.md#sharding. It is untrusted, so names in it must not lead
out of the folder that is written.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any, Final, Literal

from ckptz.errors import (
    CkptzError,
    ConfigError,
    CorruptionError,
    FormatError,
    UnsupportedError,
    error_context,
    with_context,
)
from ckptz.foreign.torch_files import dump_state, is_torch_file, load_state
from ckptz.format.envelope import MAX_HEADER_BYTES, plain_regions, strict_json, write_plain
from ckptz.format.index import Shard, Sharding
from ckptz.format.publish import Publication, is_same, make_folder, publish_together, scratch_folder
from ckptz.format.sources import TensorSource
from ckptz.format.suffixes import (
    INDEX_SUFFIX,
    INDEX_SUFFIXES,
    PLAIN_SUFFIX,
    SHARD_SUFFIXES,
    STATE_SUFFIXES,
    SUFFIX,
    TEMPORARY_SUFFIX,
    TORCH_SHARD_SUFFIX,
)
from ckptz.run.names import is_base_name
from ckptz.state.flatten import Chunks, flatten, read_chunks, unflatten
from ckptz.state.skeleton import parse_tree
from ckptz.store.resolve import Checkpoint, open_checkpoint

MAX_NAME_BYTES: Final = 255  # of most file systems
MAX_DEPTH: Final = 32  # components of a relative path

Carried = tuple[str, Path]  # relative path with slashes, and path of the file


def is_file_name(name: str) -> bool:
    """Return whether `name` is one visible path component on every system, without control characters."""
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    is_plain = not any(c in "/\\:\x7f" or c < " " for c in name)
    is_hidden = name.startswith(".")  # hidden files configure shells and tools
    return is_plain and not is_hidden and 0 < n_bytes <= MAX_NAME_BYTES and name.strip(" .") != ""


def is_relative_path(path: str) -> bool:
    """Return whether `path` consists of file names joined with slashes."""
    parts = path.split("/")
    return len(parts) <= MAX_DEPTH and all(map(is_file_name, parts))


def is_shard_name(name: str) -> bool:
    """Return whether `name` is allowed for a shard."""
    return is_file_name(name) and name.endswith(SHARD_SUFFIXES)


def parse_weight_map(raw: Any) -> dict[str, str]:
    """Return the shard of each tensor from the parsed JSON of an index.

    Raises:
        CorruptionError: there is no valid weight_map.
    """
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptionError("it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_shard_name(file):
            raise CorruptionError(f"tensor {name!r}: {file!r} is not a plain file name of a shard")
    return weight_map


def written_files(sharding: Sharding) -> list[str]:
    """List the files that a restore writes, as paths relative to its folder."""
    index = [] if sharding.index_file is None else [sharding.index_file]
    return [*(shard.file for shard in sharding.shards), *index, *sharding.carried]


def check_sharding(sharding: Sharding, names: Collection[str]) -> None:
    """Require safe file names in a record, and that its tensors are exactly `names`.

    Raises:
        CorruptionError: the record is invalid; the message names the file or the tensor.
    """
    _check_files(sharding)
    n_shards = Counter(name for shard in sharding.shards for name in shard.tensors)
    for name in names:
        if n_shards[name] != 1:
            raise CorruptionError(f"sharding: tensor {name!r} is in {n_shards[name]} shards, not in one")
    if unknown := sorted(set(n_shards) - set(names)):
        raise CorruptionError(f"sharding: tensor {unknown[0]!r} is not in the file")


def _check_files(sharding: Sharding) -> None:
    carried = set(sharding.carried)
    for file, n in Counter(written_files(sharding)).items():
        if n > 1:
            raise CorruptionError(f"sharding: file {file!r} occurs {n} times")
        if not (is_relative_path(file) if file in carried else is_file_name(file)):
            raise CorruptionError(f"sharding: {file!r} is not a plain file name")
    for shard in sharding.shards:
        if not is_shard_name(shard.file):
            raise CorruptionError(f"sharding: {shard.file!r} has no suffix of a shard, such as .safetensors")
    _check_index(sharding)


def _check_index(sharding: Sharding) -> None:
    file, text = sharding.index_file, sharding.index_text
    if file is None and text is None:
        return
    if file is None or text is None:
        raise CorruptionError("sharding: an index needs a file name and a text")
    if not file.endswith(INDEX_SUFFIXES):
        raise CorruptionError(f"sharding: {file!r} has no suffix of an index file")
    try:
        weight_map = parse_weight_map(strict_json(text.encode(), "index"))
    except CorruptionError as error:
        raise with_context(error, f"sharding: {file!r}") from None
    if unknown := set(weight_map.values()) - {shard.file for shard in sharding.shards}:
        raise CorruptionError(f"sharding: {file!r} names {min(unknown)!r}, which is not a shard")


def write_folder(
    folder: Path, source: Input, chunks: Chunks = read_chunks, like: Sequence[Path] = ()
) -> None:
    """Restore a folder; all files appear when all are complete, the index last.

    Args:
        folder: is created if it does not exist; other files in it stay.
        source: a checkpoint with the record of a folder.
        chunks: yields the patterns of all tensors of a shard in order.
        like: files whose permissions shards and index get.

    Raises:
        CorruptionError: the record is invalid.
    """
    tensors, sharding = source.tensors, source.sharding
    assert sharding is not None
    check_sharding(sharding, tensors)
    make_folder(folder)
    names, states = torch_names(source.tree, sharding), {}
    if source.tree is not None:
        scratch = scratch_folder(folder / "any")
        states = unflatten({name: tensors[name] for name in names}, source.tree, scratch, chunks)
    with publish_together() as files:
        for shard in sharding.shards:
            with files.file(folder / shard.file, like) as sink:
                if shard.file in states:
                    dump_state(sink, states[shard.file], folder / shard.file)
                else:
                    shard_tensors = {name: tensors[name] for name in shard.tensors}
                    write_plain(sink, plain_regions(shard_tensors), shard.metadata, chunks(shard_tensors))
        stage_carried(files, source.carried, folder)
        if sharding.index_file is not None and sharding.index_text is not None:
            with files.file(folder / sharding.index_file, like) as sink:
                sink.write(sharding.index_text.encode())


def torch_names(tree: Any, sharding: Sharding) -> list[str]:
    """List the tensors of shards that are torch files, whose states the tree contains.

    Raises:
        CorruptionError: the tree does not contain the states of exactly these shards.
    """
    if tree is None:
        return []
    root = parse_tree(tree).root
    files = {shard.file for shard in sharding.shards}
    if not isinstance(root, dict) or not set(root) <= files:
        raise CorruptionError("tree: its root does not hold states of shards")
    if not all(file.endswith(PLAIN_SUFFIX) for file in files - set(root)):
        raise CorruptionError("tree: its root does not hold one state for each shard of torch")
    return [name for shard in sharding.shards if shard.file in root for name in shard.tensors]


def copy_carried(carried: Sequence[Carried], folder: Path) -> None:
    """Copy carried files to a folder, except those that are already there (the same file)."""
    with publish_together() as files:
        stage_carried(files, carried, folder)


def stage_carried(files: Publication, carried: Sequence[Carried], folder: Path) -> None:
    """Add copies of carried files to a publication, except those that are already in the folder."""
    for name, source in carried:
        target = folder / name
        if target.exists() and is_same(target, source):
            continue
        make_folder(target.parent)
        with source.open("rb") as original, files.file(target, [source]) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)


InputKind = Literal["safetensors", "ckptz", "torch", "folder", "dcp"]
NOTED_BYTES: Final = 1 << 20  # a carried state of this size affects the ratio, and gets a note
_NUMBERED: Final = re.compile(r"(.+)-(\d+)-of-(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Input:
    """An open checkpoint of any format; `tensors` can be read until it is closed."""

    name: str  # for messages
    kind: InputKind
    stem: str  # name of the checkpoint without suffix
    tensors: Mapping[str, TensorSource]  # sources by name, in stored order
    metadata: Mapping[str, str] | None = None  # of the user
    sharding: Sharding | None = None  # record of a folder of shards
    tree: Any = None  # skeleton of a nested checkpoint, as in `Index.tree`
    carried: tuple[Carried, ...] = ()  # other files to copy
    left_out: tuple[str, ...] = ()  # other files that are missing, or lead out of the folder
    checkpoint: Checkpoint | None = None  # the open file with its chain, if it is safetensors or ckptz
    shards: tuple[Checkpoint, ...] = ()  # the open files of all ranks
    close: Callable[[], None] = lambda: None  # releases all files
    notes: tuple[str, ...] = ()  # on carried states that could not be read
    optimizer_names: frozenset[str] = frozenset()  # tensors of torch files beside the model


@dataclass(frozen=True, slots=True)
class _Layout:
    """The files of a folder that contain tensors, and its index."""

    files: tuple[str, ...]
    index_file: str | None = None
    index_text: str | None = None
    weight_map: Mapping[str, str] | None = None  # shard of each tensor, from the index

    @property
    def stem(self) -> str:
        if self.index_file is not None:
            return Path(self.index_file.removesuffix(INDEX_SUFFIX)).stem
        stems = {Path(file).stem for file in self.files}
        stems = {match[1] if (match := _NUMBERED.fullmatch(stem)) else stem for stem in stems}
        return stems.pop() if len(stems) == 1 else "model"


def read_folder(folder: Path) -> Input:
    """Read a folder of shards.

    Raises:
        FileNotFoundError: a shard that the index names is missing.
        ConfigError: the folder has no tensors, or several checkpoints.
        FormatError: a shard is damaged, or differs from the index.
    """
    layout = _find_layout(folder)
    index = [] if layout.index_file is None else [layout.index_file]
    for file in (*layout.files, *index):
        if not (is_shard_name(file) or (file in index and is_relative_path(file))):
            raise ConfigError(f"{folder / file}: some systems do not allow this file name; rename it")
    with ExitStack() as stack:
        states, notes = _load_states(folder, layout)
        shards, tensors, tree = _read_shards(folder, layout, stack, states)
        carried, left_out = find_carried(folder, {*layout.files, layout.index_file, *states})
        carried_names = tuple(name for name, _ in carried)
        sharding = Sharding(shards, layout.index_file, layout.index_text, carried_names)
        optimizer_names = {name for shard in shards if shard.file in states for name in shard.tensors}
        close = stack.pop_all().close
    first = shards[0].metadata
    metadata = first if all(shard.metadata == first for shard in shards) else None
    return Input(
        name=str(folder),
        kind="folder",
        stem=layout.stem,
        tensors=tensors,
        metadata=metadata,
        sharding=sharding,
        tree=tree,
        carried=tuple(carried),
        left_out=tuple(left_out),
        close=close,
        notes=tuple(notes),
        optimizer_names=frozenset(optimizer_names),
    )


def packed_in(folder: Path, *, with_plain: bool = False) -> Path | None:
    """Return the only `.ckptz` file of a folder; None if there are several, or shards.

    Args:
        folder: to look in. Linked bases in it are ignored.
        with_plain: ignore shards too.
    """
    names = [entry.name for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith(".")]
    names = [name for name in names if not is_base_name(folder / name)]
    packed = [name for name in names if name.endswith(SUFFIX)]
    is_plain = not with_plain and any(
        name.endswith(PLAIN_SUFFIX) or (name.endswith(TORCH_SHARD_SUFFIX) and is_model_file(name))
        for name in names
    )
    return folder / packed[0] if len(packed) == 1 and not is_plain else None


def _load_states(folder: Path, layout: _Layout) -> tuple[dict[str, Any], list[str]]:
    """Load the torch files beside the model that a tree can represent.

    Returns:
        States by file name, and notes on large files that cannot be read.
    """
    states, notes, root = {}, [], folder.resolve()
    for file in sorted(entry.name for entry in os.scandir(folder) if entry.is_file()):
        path = folder / file
        is_state = file.endswith(STATE_SUFFIXES) and not is_model_file(file) and file not in layout.files
        # Files that `find_carried` leaves out are ignored; weights in a second format are carried.
        if not is_state or not (is_shard_name(file) and is_within(path, root)):
            continue
        if not is_torch_file(path):
            continue
        try:
            state = load_state(path)
            flatten(state)
            states[file] = state
        except (UnsupportedError, ConfigError) as error:  # as of training_args.bin and rng_state.pth
            if path.stat().st_size > NOTED_BYTES:
                notes.append(f"{file} is copied uncompressed: {error}")
    return states, notes


def is_model_file(file: str) -> bool:
    """Return whether a torch file contains weights of the model, by its name."""
    return "model" in file


def _find_layout(folder: Path) -> _Layout:
    # Hidden files are never restored, and those of macOS (._model.bin) are not shards.
    names = sorted(e.name for e in os.scandir(folder) if e.is_file() and not e.name.startswith("."))
    plain = [name for name in names if name.endswith(PLAIN_SUFFIX) and not is_base_name(folder / name)]
    # Trainers write other pickles, such as training_args.bin, which are not shards.
    torch = [name for name in names if name.endswith(TORCH_SHARD_SUFFIX) and is_model_file(name)]
    for suffix, files in ((PLAIN_SUFFIX, plain), (TORCH_SHARD_SUFFIX, torch)):
        indexes = [name for name in names if name.endswith(suffix + INDEX_SUFFIX)]
        if len(indexes) > 1:
            raise ConfigError(
                f"{folder}: holds several checkpoints ({', '.join(indexes)}); move each to a separate folder"
            )
        if indexes:
            return _read_index(folder, indexes[0])
        if files:
            check_numbered(folder, files)
            return _Layout(tuple(files))
    if packed := [name for name in names if name.endswith(SUFFIX)]:
        raise ConfigError(f"{folder}: a folder of {SUFFIX} files; name one of them, such as {packed[0]}")
    raise ConfigError(
        f"{folder}: no tensors in this folder: no *{PLAIN_SUFFIX}, no *model*{TORCH_SHARD_SUFFIX}, no index "
        "of such files; name the files themselves, or their folder"
    )


def check_numbered(folder: Path, files: Sequence[str]) -> None:
    """Check that no shard of a numbered checkpoint is missing, because a part of a model is no checkpoint.

    Raises:
        FileNotFoundError: one is missing; the message names it.
    """
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        if match := _NUMBERED.fullmatch(Path(file).stem):
            name, number, total = match.groups()
            numbers.setdefault((name, total, Path(file).suffix), set()).add(int(number))
    for (name, total, suffix), present in numbers.items():
        if (number := next(i for i in itertools.count(1) if i not in present)) <= int(total):
            missing = folder / f"{name}-{number:0{len(total)}}-of-{total}{suffix}"
            raise FileNotFoundError(ENOENT, "a shard of the model is missing", str(missing))


def _read_index(folder: Path, index_file: str) -> _Layout:
    path = folder / index_file
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise CorruptionError(f"larger than {MAX_HEADER_BYTES} bytes")
        raw = path.read_bytes()
        weight_map = parse_weight_map(strict_json(raw, "index"))
        text = raw.decode()
    except UnicodeDecodeError:
        raise CorruptionError(f"{path}: not UTF-8") from None
    except CkptzError as error:
        raise with_context(error, str(path)) from None
    files = sorted(set(weight_map.values()))
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(ENOENT, f"shard missing that {index_file} names", str(folder / file))
    return _Layout(tuple(files), index_file, text, weight_map)


def _check_weight_map(folder: Path, layout: _Layout, shard_of: Mapping[str, str]) -> None:
    """Require that every tensor of the index is in the shard that it names."""
    for name, file in (layout.weight_map or {}).items():
        if (shard := shard_of.get(name)) != file:
            where = "not in this shard," if shard is None else f"in {shard}, not here"
            raise CorruptionError(f"{folder / file}: tensor {name!r} is {where} as {layout.index_file} says")


def _read_shards(
    folder: Path, layout: _Layout, stack: ExitStack, extra_states: Mapping[str, Any]
) -> tuple[tuple[Shard, ...], Mapping[str, TensorSource], Any]:
    """Open the shards of a layout, and flatten the states of its torch files.

    Args:
        folder: of the shards.
        layout: its files.
        stack: closes the files.
        extra_states: states of the torch files beside the model, by file name.

    Returns:
        The shards, tensors by name, and the tree of torch files or None.
    """
    shards, tensors = list[Shard](), dict[str, TensorSource]()
    states, shard_of = dict[str, Any](), dict[str, str]()  # shard_of: tensor name -> shard
    for file in layout.files:
        if file.endswith(PLAIN_SUFFIX):
            checkpoint = open_checkpoint(folder / file)
            stack.callback(checkpoint.close)
            if checkpoint.container is not None:
                raise ConfigError(f"{folder / file}: is a {SUFFIX} file already; restore it first")
            _add_names(folder, layout, file, checkpoint.tensors, shard_of)
            tensors |= checkpoint.tensors
            metadata = None if checkpoint.metadata is None else dict(checkpoint.metadata)
            shards.append(Shard(file, tuple(checkpoint.tensors), metadata))
            continue
        states[file] = load_state(folder / file)
        if not isinstance(states[file], dict):
            raise FormatError(f"{folder / file}: not a dict of tensors by name")
        _add_names(folder, layout, file, states[file], shard_of)
    _check_weight_map(folder, layout, shard_of)
    states |= extra_states
    if not states:
        return tuple(shards), tensors, None
    with error_context(str(folder)):
        flat = flatten(states, n_outer=1, taken=tensors)
    for file in states:
        shards.append(Shard(file, tuple(name for name, outer in flat.outer.items() if outer == (file,))))
    return tuple(shards), {**tensors, **flat.tensors}, flat.tree


def _add_names(
    folder: Path, layout: _Layout, file: str, names: Mapping[Any, object], shard_of: dict[str, str]
) -> None:
    """Record the tensor names of a shard in `shard_of`; refuse names that another shard has."""
    for name in names:
        if shard_of.setdefault(name, file) == file:
            continue
        if layout.weight_map is None and not all(_NUMBERED.fullmatch(Path(f).stem) for f in layout.files):
            raise ConfigError(
                f"{folder}: holds several checkpoints ({shard_of[name]} and {file} both have tensor "
                f"{name!r}); name the files themselves"
            )
        raise CorruptionError(f"{folder / file}: tensor {name!r} is in {shard_of[name]} too")


def find_carried(folder: Path, excluded: Collection[str | None] = ()) -> tuple[list[Carried], list[str]]:
    """List the files of a folder and its subfolders to copy, and the names of those that are left out.

    Left out are links out of the folder, except those of the Hugging Face cache, because a downloaded folder
    must not collect files of the machine; hidden files, which are never restored; and `.ckptz` files, whose
    copy could replace the output. Names in `excluded`, at the top of the folder, are in neither list.
    """
    carried: list[Carried] = []
    left_out: list[str] = []
    root = folder.resolve()
    for parent, folders, files in os.walk(folder):
        relative = Path(parent).relative_to(folder)
        hidden = [name for name in folders if name.startswith(".") or (Path(parent) / name).is_symlink()]
        left_out += [(relative / name).as_posix() for name in sorted(hidden)]
        folders[:] = sorted(set(folders) - set(hidden))
        for file in sorted(files):
            name = (relative / file).as_posix()
            if name in excluded or file.endswith(TEMPORARY_SUFFIX):
                continue
            is_output = relative == Path() and file.endswith(SUFFIX)
            is_safe = is_relative_path(name) and is_within(Path(parent) / file, root)
            if is_safe and not is_output:
                carried.append((name, Path(parent) / file))
            else:
                left_out.append(name)
    return carried, left_out


def is_within(path: Path, root: Path) -> bool:
    """Return whether a path leads to a regular file in `root`, or in the Hugging Face cache of `root`.

    `root` must be resolved.
    """
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, UnicodeEncodeError):  # the locale may be unable to encode the name
        return False
    is_cached = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    return real.is_file() and (real.is_relative_to(root) or is_cached)
