"""Folders of shards, as Hugging Face writes them: read with what stands beside them, recorded, and restored.

Shards have an index or not. Trainers keep states of their own beside the model: optimizer.pt, scheduler.pt.
Those that can be read without running code become part of the checkpoint; all other files are carried along
as they are.

The record of a folder is that of spec/06-container.md#sharding. It may come from anywhere, so no name in it
leads out of the folder that is written.
"""

from __future__ import annotations

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
from ckptz.format.publish import (
    TEMPORARY_SUFFIX,
    Publication,
    is_same,
    make_folder,
    publish_together,
    scratch_folder,
)
from ckptz.format.sources import TensorSource
from ckptz.run.names import is_base_name
from ckptz.state.flatten import Chunks, flatten, read_chunks, unflatten
from ckptz.state.skeleton import parse_tree
from ckptz.store.resolve import PLAIN_SUFFIX, SUFFIX, Checkpoint, open_checkpoint

MAX_NAME_BYTES: Final = 255  # of most file systems
MAX_DEPTH: Final = 32  # folders within the folder
SHARD_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth")
INDEX_SUFFIXES: Final = (".safetensors.index.json", ".bin.index.json")

Carried = tuple[str, Path]  # relative path with slashes, and where the file is


def is_file_name(name: str) -> bool:
    """Return whether `name` is one path component on every system, not hidden, without control characters."""
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    is_plain = not any(c in "/\\:\x7f" or c < " " for c in name)
    is_hidden = name.startswith(".")  # such files configure shells and tools
    return is_plain and not is_hidden and 0 < n_bytes <= MAX_NAME_BYTES and name.strip(" .") != ""


def is_relative_path(path: str) -> bool:
    """Return whether `path` is file names joined with slashes."""
    parts = path.split("/")
    return len(parts) <= MAX_DEPTH and all(map(is_file_name, parts))


def is_shard_name(name: str) -> bool:
    """Return whether this is an allowed name of a shard."""
    return is_file_name(name) and name.endswith(SHARD_SUFFIXES)


def parse_places(raw: Any) -> dict[str, str]:
    """Read the file of each tensor from the JSON of an index.

    Raises:
        CorruptionError: it does not say so.
    """
    places = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(places, dict) or not places:
        raise CorruptionError("it has no weight_map")
    for name, file in places.items():
        if not isinstance(file, str) or not is_shard_name(file):
            raise CorruptionError(f"tensor {name!r}: {file!r} is not a plain file name of a shard")
    return places


def written_files(sharding: Sharding) -> list[str]:
    """List the files that a restore writes, as paths relative to its folder."""
    index = [] if sharding.index_file is None else [sharding.index_file]
    return [*(shard.file for shard in sharding.shards), *index, *sharding.carried]


def check_sharding(sharding: Sharding, names: Collection[str]) -> None:
    """Require that the record is safe to follow and speaks of exactly the tensors `names`.

    Raises:
        CorruptionError: it does not; the message names the file or the tensor.
    """
    _check_files(sharding)
    placed = Counter(name for shard in sharding.shards for name in shard.tensors)
    for name in names:
        if placed[name] != 1:
            raise CorruptionError(f"sharding: tensor {name!r} is in {placed[name]} shards, not in one")
    if unknown := sorted(set(placed) - set(names)):
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
        places = parse_places(strict_json(text.encode(), "index"))
    except CorruptionError as error:
        raise with_context(error, f"sharding: {file!r}") from None
    if unknown := set(places.values()) - {shard.file for shard in sharding.shards}:
        raise CorruptionError(f"sharding: {file!r} names {min(unknown)!r}, which is no shard")


def write_folder(
    folder: Path,
    tensors: Mapping[str, TensorSource],
    sharding: Sharding,
    *,
    tree: Any = None,
    carried: Sequence[Carried] = (),
    chunks: Chunks = read_chunks,
    like: Sequence[Path] = (),
) -> None:
    """Write a folder back: all files appear when all are complete, shards first, the index last.

    Args:
        folder: is made if it does not exist; files of other names stay.
        tensors: by name.
        sharding: the record, as `check_sharding` accepts it.
        tree: `Index.tree`: the shards that it names were torch files, and become such again.
        carried: the other files.
        chunks: gives the patterns of all tensors of a shard in order.
        like: files whose permissions shards and index get, as `publish` does it.
    """
    check_sharding(sharding, tensors)
    make_folder(folder)
    names, states = torch_names(tree, sharding), {}
    if tree is not None:
        scratch = scratch_folder(folder / "any")
        states = unflatten({name: tensors[name] for name in names}, tree, scratch, chunks)
    with publish_together() as files:
        for shard in sharding.shards:
            with files.file(folder / shard.file, like) as sink:
                if shard.file in states:
                    dump_state(sink, states[shard.file], folder / shard.file)
                else:
                    own = {name: tensors[name] for name in shard.tensors}
                    write_plain(sink, plain_regions(own), shard.metadata, chunks(own))
        stage_carried(files, carried, folder)
        if sharding.index_file is not None and sharding.index_text is not None:
            with files.file(folder / sharding.index_file, like) as sink:
                sink.write(sharding.index_text.encode())


def torch_names(tree: Any, sharding: Sharding) -> list[str]:
    """Name the tensors of the shards that were torch files: those that the tree has a state of.

    Raises:
        CorruptionError: the tree does not hold the states of shards.
    """
    if tree is None:
        return []
    root = parse_tree(tree).root
    others = {shard.file for shard in sharding.shards}
    if not isinstance(root, dict) or not set(root) <= others:
        raise CorruptionError("tree: its root does not hold states of shards")
    if not all(file.endswith(PLAIN_SUFFIX) for file in others - set(root)):
        raise CorruptionError("tree: its root does not hold one state for each shard of torch")
    return [name for shard in sharding.shards if shard.file in root for name in shard.tensors]


def copy_carried(carried: Sequence[Carried], folder: Path) -> None:
    """Copy the files that are no shards; one that is there already under this very path stays."""
    with publish_together() as files:
        stage_carried(files, carried, folder)


def stage_carried(files: Publication, carried: Sequence[Carried], folder: Path) -> None:
    """Copy the files that are no shards with others; one that is there already under this very path stays."""
    for name, source in carried:
        target = folder / name
        if target.exists() and is_same(target, source):
            continue
        make_folder(target.parent)
        with source.open("rb") as original, files.file(target, [source]) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)


InputKind = Literal["safetensors", "ckptz", "torch", "folder", "dcp"]
INDEX_SUFFIX: Final = ".index.json"
TORCH_SUFFIX: Final = ".bin"
STATE_SUFFIXES: Final = (".pt", ".pth", TORCH_SUFFIX)
NOTED_BYTES: Final = 1 << 20  # a file as large as that is missed in the ratio
_NUMBERED: Final = re.compile(r"(.+)-\d+-of-\d+")


@dataclass(frozen=True, slots=True)
class Input:
    """An open input; `tensors` can be read until it is closed."""

    name: str  # for messages
    kind: InputKind  # what was opened
    stem: str  # what the checkpoint is called, without suffix
    tensors: Mapping[str, TensorSource]  # sources by name, in stored order
    metadata: Mapping[str, str] | None = None  # the user's own
    sharding: Sharding | None = None  # how a folder was split
    tree: Any = None  # skeleton of a nested checkpoint, as in `Index.tree`
    # files that go with the tensors, as (path relative to the folder, where it is)
    carried: tuple[Carried, ...] = ()
    # files that would go with them, but are not here or lead out of the folder
    left_out: tuple[str, ...] = ()
    # the opened file with its chain, if it is one of safetensors or ckptz
    checkpoint: Checkpoint | None = None
    shards: tuple[Checkpoint, ...] = ()  # the files of all ranks that wrote it
    close: Callable[[], None] = lambda: None  # releases all files
    notes: tuple[str, ...] = ()  # what the user should know of files that are carried as they are
    # tensors of files that stand beside the model: optimizer state above all
    optimizer_names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which files of a folder hold tensors; `places` is the index's map of tensors to files."""

    files: tuple[str, ...]
    index_file: str | None = None
    index_text: str | None = None
    places: Mapping[str, str] | None = None

    @property
    def stem(self) -> str:
        if self.index_file is not None:
            return Path(self.index_file.removesuffix(INDEX_SUFFIX)).stem
        stems = {Path(file).stem for file in self.files}
        stems = {match[1] if (match := _NUMBERED.fullmatch(stem)) else stem for stem in stems}
        return stems.pop() if len(stems) == 1 else "model"


def open_folder(folder: Path) -> Input:
    """Open a folder of shards.

    Raises:
        FileNotFoundError: a shard that its index names is missing.
        ConfigError: no tensors in it, or several checkpoints.
        FormatError: a shard is damaged, or index and shards disagree.
    """
    layout = _find_layout(folder)
    index = [] if layout.index_file is None else [layout.index_file]
    for file in (*layout.files, *index):
        if not (is_shard_name(file) or (file in index and is_relative_path(file))):
            raise ConfigError(f"{folder / file}: not every system can hold a file of this name; rename it")
    with ExitStack() as opened:
        states, notes = _states_beside(folder, layout)
        shards, tensors, tree = _read_shards(folder, layout, opened, states)
        carried, left_out = _find_carried(folder, {*layout.files, layout.index_file, *states})
        listed = tuple(name for name, _ in carried)
        sharding = Sharding(shards, layout.index_file, layout.index_text, listed)
        beside = {name for shard in shards if shard.file in states for name in shard.tensors}
        close = opened.pop_all().close
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
        optimizer_names=frozenset(beside),
    )


def carried_in(folder: Path) -> list[Carried]:
    """List the files of a folder that go with its `.ckptz` files, as (path relative to it, where it is)."""
    return _find_carried(folder, set())[0]


def packed_in(folder: Path, *, with_plain: bool = False) -> Path | None:
    """Find the only file that a folder was packed to; None if it holds shards, or several files of ours.

    Second names of bases do not count, nor do shards `with_plain`.
    """
    names = [entry.name for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith(".")]
    names = [name for name in names if not is_base_name(folder / name)]
    packed = [name for name in names if name.endswith(SUFFIX)]
    is_plain = not with_plain and any(
        name.endswith(PLAIN_SUFFIX) or (name.endswith(TORCH_SUFFIX) and is_model_file(name)) for name in names
    )
    return folder / packed[0] if len(packed) == 1 and not is_plain else None


def _states_beside(folder: Path, layout: _Layout) -> tuple[dict[str, Any], list[str]]:
    """Load the other torch files of the folder that a tree can hold; gives states by name, and notes."""
    states, notes, root = {}, [], folder.resolve()
    for file in sorted(entry.name for entry in os.scandir(folder) if entry.is_file()):
        path = folder / file
        is_state = file.endswith(STATE_SUFFIXES) and not is_model_file(file) and file not in layout.files
        # What `_find_carried` leaves out stays out; a second form of the weights is carried as it is.
        if not is_state or not (is_shard_name(file) and is_within(path, root)):
            continue
        if not is_torch_file(path):
            continue
        try:
            state = load_state(path)
            flatten(state)
            states[file] = state
        except (UnsupportedError, ConfigError) as error:  # small ones are: training_args.bin, rng_state.pth
            if path.stat().st_size > NOTED_BYTES:
                notes.append(f"{file} is carried as it is: {error}")
    return states, notes


def is_model_file(file: str) -> bool:
    """Return whether a torch file of a folder holds weights of the model, and not a state beside them."""
    return "model" in file


def _find_layout(folder: Path) -> _Layout:
    # No restore may write hidden files, and those of macOS (._model.bin) only look like shards.
    names = sorted(e.name for e in os.scandir(folder) if e.is_file() and not e.name.startswith("."))
    plain = [name for name in names if name.endswith(PLAIN_SUFFIX) and not is_base_name(folder / name)]
    # Trainers keep other pickles beside the model, as training_args.bin, which are no shards.
    torch = [name for name in names if name.endswith(TORCH_SUFFIX) and is_model_file(name)]
    for suffix, files in ((PLAIN_SUFFIX, plain), (TORCH_SUFFIX, torch)):
        indexes = [name for name in names if name.endswith(suffix + INDEX_SUFFIX)]
        if len(indexes) > 1:
            raise ConfigError(
                f"{folder}: holds several checkpoints ({', '.join(indexes)}); give each a folder of its own"
            )
        if indexes:
            return _read_index(folder, indexes[0])
        if files:
            return _Layout(tuple(files))
    if packed := [name for name in names if name.endswith(SUFFIX)]:
        raise ConfigError(f"{folder}: a folder of {SUFFIX} files; name one of them, such as {packed[0]}")
    raise ConfigError(
        f"{folder}: no tensors in this folder: no *{PLAIN_SUFFIX}, no *model*{TORCH_SUFFIX}, no index of "
        "such; name the files themselves, or the folder that they are in"
    )


def _read_index(folder: Path, index_file: str) -> _Layout:
    path = folder / index_file
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise CorruptionError(f"larger than {MAX_HEADER_BYTES} bytes")
        raw = path.read_bytes()
        places = parse_places(strict_json(raw, "index"))
        text = raw.decode()
    except UnicodeDecodeError:
        raise CorruptionError(f"{path}: not UTF-8") from None
    except CkptzError as error:
        raise with_context(error, str(path)) from None
    files = sorted(set(places.values()))
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(ENOENT, f"shard missing that {index_file} names", str(folder / file))
    return _Layout(tuple(files), index_file, text, places)


def _check_places(folder: Path, layout: _Layout, homes: Mapping[str, str]) -> None:
    """Require that every tensor of the index is in the shard that it names."""
    if layout.places is None:
        return
    for name, file in layout.places.items():
        if name not in homes:
            raise CorruptionError(
                f"{folder / file}: tensor {name!r} is not in this shard, as {layout.index_file} says"
            )
        if homes[name] != file:
            raise CorruptionError(
                f"{folder / file}: tensor {name!r} is in {homes[name]}, not here as {layout.index_file} says"
            )


def _read_shards(
    folder: Path, layout: _Layout, opened: ExitStack, beside: Mapping[str, Any]
) -> tuple[tuple[Shard, ...], Mapping[str, TensorSource], Any]:
    """Open the shards of a layout, and put the states `beside` the model to their tensors.

    Returns:
        (shards, tensors by name, the tree of those that are torch files or None).
    """
    shards, tensors = list[Shard](), dict[str, TensorSource]()
    states, homes = dict[str, Any](), dict[str, str]()  # homes: the shard that has a tensor of this name
    for file in layout.files:
        if file.endswith(PLAIN_SUFFIX):
            checkpoint = _open_shard(folder / file)
            opened.callback(checkpoint.close)
            _claim(folder, layout, file, checkpoint.tensors, homes)
            tensors |= checkpoint.tensors
            metadata = None if checkpoint.metadata is None else dict(checkpoint.metadata)
            shards.append(Shard(file, tuple(checkpoint.tensors), metadata))
            continue
        states[file] = load_state(folder / file)
        if not isinstance(states[file], dict):
            raise FormatError(f"{folder / file}: not a dict of tensors by name")
        _claim(folder, layout, file, states[file], homes)
    _check_places(folder, layout, homes)
    states |= beside
    if not states:
        return tuple(shards), tensors, None
    with error_context(str(folder)):
        flat = flatten(states, n_outer=1, taken=tensors)
    for file in states:
        shards.append(Shard(file, tuple(name for name, outer in flat.outer.items() if outer == (file,))))
    return tuple(shards), {**tensors, **flat.tensors}, flat.tree


def _open_shard(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    if checkpoint.container is not None:
        checkpoint.close()
        raise ConfigError(f"{path}: is a {SUFFIX} file already; restore it first")
    return checkpoint


def _claim(
    folder: Path, layout: _Layout, file: str, names: Mapping[Any, object], homes: dict[str, str]
) -> None:
    for name in names:
        if homes.setdefault(name, file) == file:
            continue
        if layout.places is None and not all(_NUMBERED.fullmatch(Path(f).stem) for f in layout.files):
            raise ConfigError(
                f"{folder}: holds several checkpoints ({homes[name]} and {file} both have tensor {name!r}); "
                "name the files themselves"
            )
        raise CorruptionError(f"{folder / file}: tensor {name!r} is in {homes[name]} too")


def _find_carried(folder: Path, taken: set[str | None]) -> tuple[list[Carried], list[str]]:
    """Find the regular files of a folder and its subfolders, and what of it cannot be carried over.

    Links that lead out of the folder are not followed (a downloaded folder must not pick up files of
    the machine), but for those of the Hugging Face cache, which consists of them. Hidden files stay, as
    no restore may write such; so do outputs of ckptz, as a copy could replace the one being written. Names in
    `taken` are at the folder's top, and looked after elsewhere.
    """
    carried: list[Carried] = []
    left_out: list[str] = []
    root = folder.resolve()
    for where, folders, files in os.walk(folder):
        here = Path(where).relative_to(folder)
        hidden = [name for name in folders if name.startswith(".") or (Path(where) / name).is_symlink()]
        left_out += [(here / name).as_posix() for name in sorted(hidden)]
        folders[:] = sorted(set(folders) - set(hidden))
        for file in sorted(files):
            name = (here / file).as_posix()
            if name in taken or file.endswith(TEMPORARY_SUFFIX):
                continue
            is_output = here == Path() and file.endswith(SUFFIX)
            is_safe = is_relative_path(name) and is_within(Path(where) / file, root)
            if is_safe and not is_output:
                carried.append((name, Path(where) / file))
            else:
                left_out.append(name)
    return carried, left_out


def is_within(path: Path, root: Path) -> bool:
    """Return whether `path` is a regular file in `root`, which is resolved, or in the cache it belongs to."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, UnicodeEncodeError):  # of a name that this locale cannot encode
        return False
    is_cached = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    return real.is_file() and (real.is_relative_to(root) or is_cached)
