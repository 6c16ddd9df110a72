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

from ckptz.codec.units import UnitSource
from ckptz.container.index import Shard, Sharding
from ckptz.container.plain import plain_regions, write_plain
from ckptz.container.publish import publish
from ckptz.convert.spool import Chunks, read_chunks, unflatten
from ckptz.convert.torch_files import save_state
from ckptz.errors import CorruptionError

MAX_NAME_BYTES: Final = 255  # of most file systems
MAX_DEPTH: Final = 32  # folders within the folder

Carried = tuple[str, Path]  # relative path with slashes, and where the file is


def is_file_name(name: str) -> bool:
    """Whether `name` is one path component on every system, without control characters."""
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    is_plain = not any(c in "/\\:\x7f" or c < " " for c in name)
    return is_plain and 0 < n_bytes <= MAX_NAME_BYTES and name.strip(" .") != ""


def is_relative_path(path: str) -> bool:
    """Whether `path` is file names joined with slashes."""
    parts = path.split("/")
    return len(parts) <= MAX_DEPTH and all(map(is_file_name, parts))


def written_files(sharding: Sharding) -> list[str]:
    """What a restore writes, as paths relative to its folder."""
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
    if (sharding.index_file is None) != (sharding.index_text is None):
        raise CorruptionError("sharding: an index needs a file name and a text")
    carried = set(sharding.carried)
    for file, n in Counter(written_files(sharding)).items():
        if n > 1:
            raise CorruptionError(f"sharding: file {file!r} occurs {n} times")
        if not (is_relative_path(file) if file in carried else is_file_name(file)):
            raise CorruptionError(f"sharding: {file!r} is not a plain file name")


def write_folder(
    folder: Path,
    tensors: Mapping[str, UnitSource],
    sharding: Sharding,
    *,
    tree: Any = None,
    carried: Sequence[Carried] = (),
    chunks: Chunks = read_chunks,
) -> None:
    """Write a folder back: shards first, its index last.

    Args:
        folder: is made if it does not exist; files of other names stay.
        tensors: by name.
        sharding: the record, as `check_sharding` accepts it.
        tree: `Index.tree`: the shards were torch files, and become such again.
        carried: the other files.
        chunks: gives the units of all tensors of a shard in order.
    """
    check_sharding(sharding, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    if tree is None:
        for shard in sharding.shards:
            _write_shard(folder, shard, tensors, chunks)
    else:
        _write_torch_shards(folder, sharding, tensors, tree, chunks)
    copy_carried(carried, folder)
    if sharding.index_file is not None and sharding.index_text is not None:
        with publish(folder / sharding.index_file) as sink:
            sink.write(sharding.index_text.encode())


def _write_shard(folder: Path, shard: Shard, tensors: Mapping[str, UnitSource], chunks: Chunks) -> None:
    own = {name: tensors[name] for name in shard.tensors}
    with publish(folder / shard.file) as sink:
        write_plain(sink, plain_regions(own), shard.metadata, chunks(own))


def _write_torch_shards(
    folder: Path, sharding: Sharding, tensors: Mapping[str, UnitSource], tree: Any, chunks: Chunks
) -> None:
    states = unflatten(tensors, tree, folder, chunks)
    if not isinstance(states, dict) or set(states) != {shard.file for shard in sharding.shards}:
        raise CorruptionError("tree: its root does not hold one state for each shard")
    for file, state in states.items():
        save_state(folder / file, state)


def copy_carried(carried: Sequence[Carried], folder: Path) -> None:
    """Copy the files that are no shards; one that is there already under this very path stays."""
    for name, source in carried:
        target = folder / name
        if target.exists() and target.samefile(source):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as original, publish(target) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
