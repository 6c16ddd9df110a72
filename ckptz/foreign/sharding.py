"""The record of a folder: its shards and carried files, checked, and written back as a folder.

Implements spec/06-container.md#sharding. A record may come from anywhere, so no name in it leads out
of the folder that is written.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ckptz.errors import CorruptionError, named
from ckptz.foreign.torch_files import dump_state
from ckptz.format.envelope import plain_regions, strict_json, write_plain
from ckptz.format.index import Sharding
from ckptz.format.publish import Publication, make_folder, publish_together
from ckptz.format.sources import TensorSource
from ckptz.state.flatten import Chunks, read_chunks, unflatten
from ckptz.state.skeleton import parse_tree
from ckptz.store.resolve import PLAIN_SUFFIX

MAX_NAME_BYTES: Final = 255  # of most file systems
MAX_DEPTH: Final = 32  # folders within the folder
SHARD_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth")
INDEX_SUFFIXES: Final = (".safetensors.index.json", ".bin.index.json")

Carried = tuple[str, Path]  # relative path with slashes, and where the file is


def is_file_name(name: str) -> bool:
    """Tell whether `name` is one path component on every system, not hidden, without control characters."""
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    is_plain = not any(c in "/\\:\x7f" or c < " " for c in name)
    is_hidden = name.startswith(".")  # such files configure shells and tools
    return is_plain and not is_hidden and 0 < n_bytes <= MAX_NAME_BYTES and name.strip(" .") != ""


def is_relative_path(path: str) -> bool:
    """Tell whether `path` is file names joined with slashes."""
    parts = path.split("/")
    return len(parts) <= MAX_DEPTH and all(map(is_file_name, parts))


def is_shard_name(name: str) -> bool:
    """Tell whether a shard may be called so."""
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
        raise named(error, f"sharding: {file!r}") from None
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
        states = unflatten({name: tensors[name] for name in names}, tree, folder, chunks)
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
        if target.exists() and target.samefile(source):
            continue
        make_folder(target.parent)
        with source.open("rb") as original, files.file(target, [source]) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
