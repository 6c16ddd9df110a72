"""Opens what conversions read, files and folders of all kinds, by one call, and names what they write."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from errno import ENOENT
from pathlib import Path
from typing import Any, Final, TypeAlias

from ckptz.errors import CkptzError, ConfigError, UnsupportedError, with_context
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
from ckptz.foreign.shards import open_shards
from ckptz.foreign.torch_files import LEGACY_MAGIC, TORCH_SUFFIXES, ZIP_MAGIC, read
from ckptz.format.byte_source import is_folder, is_url, local_copy, path_of
from ckptz.format.envelope import MAX_HEADER_BYTES
from ckptz.format.index import Shard, Sharding
from ckptz.format.publish import is_same, make_folder
from ckptz.run.exact import exact_of
from ckptz.run.names import newest_checkpoint, resolve
from ckptz.run.step_files import StepFile
from ckptz.store.resolve import PLAIN_SUFFIX, SUFFIX, folders_beside, open_checkpoint

PathLike: TypeAlias = str | os.PathLike[str]
FORCE: Final = "give --force (force=True) to replace it"
INPUT_SUFFIXES: Final = (".safetensors", ".ckptz", ".pt", ".pth", ".bin", ".ckpt")


def paths(many: Iterable[PathLike]) -> list[Path]:
    """Make paths of what callers give."""
    return [path_of(one) for one in many]


def stem_of(path: Path) -> str:
    """Return the file name without a checkpoint's suffix; other dots belong to the name."""
    # "." and a trailing slash have no name of their own.
    name = path.name if is_url(path) else Path(os.path.abspath(path)).name
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in INPUT_SUFFIXES else name


def beside(path: Path) -> Path:
    """Return the folder for outputs of a file: its own, or the working directory for a URL."""
    return Path() if is_url(path) else path.parent


def ends_as_folder(output: PathLike | None) -> bool:
    """Return whether an output ends with a separator and so names a folder; a `Path` loses the separator."""
    return isinstance(output, str) and output.endswith(("/", os.sep))


def file_path(output: PathLike) -> Path:
    """Return the path of an output that is a single file.

    Raises:
        ConfigError: it is written as a folder.
    """
    if ends_as_folder(output):
        raise ConfigError(f"{output}: is written as a folder; name a file")
    return path_of(output)


def places_for(
    sources: Sequence[Path], given: PathLike | None, suffix: str, *, is_chain: bool = False
) -> list[Path]:
    """Choose where each source goes: a file; for a folder a folder, or a file if the output has the suffix.

    Without an output, files go beside their sources, and folders into themselves. Those of a chain always
    share a folder, as there may be more of them later; so do several, and one that is given a name with a
    separator at its end. This folder is made. Where names collide in one folder, as with
    `checkpoint-*/model.safetensors`, the name of the source's folder goes before.

    Raises:
        ConfigError: two sources would go to the same place, or several into a file.
    """
    output, is_folder = None if given is None else path_of(given), ends_as_folder(given)
    is_shared = is_chain or len(sources) > 1
    if output is None:
        places = [s if s.is_dir() else beside(s) / f"{stem_of(s)}{suffix}" for s in sources]
    elif not is_shared and (sources[0].is_dir() or not (is_folder or output.is_dir())):
        places = [output]
    elif not output.is_dir() and (output.exists() or (is_shared and output.suffix == suffix)):
        what = "a chain needs" if is_chain else "several inputs need" if is_shared else "the name means"
        raise ConfigError(f"{output}: {what} a folder as output, and this is a file")
    else:
        names = zip(sources, _distinct_stems(sources), strict=True)
        places = [output / (stem if source.is_dir() else f"{stem}{suffix}") for source, stem in names]
    for place, n in Counter(places).items():
        if n > 1:
            raise ConfigError(f"{place}: {n} inputs would be written here; name their outputs one by one")
    if output is not None and output not in places:
        make_folder(output, parents=False)
    return places


def _distinct_stems(sources: Sequence[Path]) -> list[str]:
    stems = [stem_of(source) for source in sources]
    taken = Counter(stems)
    return [
        f"{source.absolute().parent.name}-{stem}" if taken[stem] > 1 else stem
        for source, stem in zip(sources, stems, strict=True)
    ]


def check_target(target: Path, read: Iterable[Path], *, force: bool, remedy: str = FORCE) -> None:
    """Refuse an output that is one of the files to be read, or that exists, or has no folder.

    Pipes and devices are never replaced, nor links to nothing. `remedy` says what lets an existing one be.

    Raises:
        ConfigError: says which.
    """
    for source in read:
        if is_same(target, source):
            raise ConfigError(f"{target}: the output would replace a file that is read; name another")
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; name a file")
    if exists(target):
        if not target.is_file():
            raise ConfigError(f"{target}: exists already and is not a regular file; name another output")
        if not force:
            raise ConfigError(f"{target}: exists already; name another output, or {remedy}")
    if not (is_url(target) or target.parent.is_dir()):
        raise ConfigError(f"{target}: the folder {target.parent} does not exist; create it first")


def exists(path: Path) -> bool:
    """Return whether anything has this name, a link to nothing included."""
    return path.exists() if is_url(path) else os.path.lexists(path)


def check_carried(
    carried: Iterable[tuple[str, Path]], folder: Path, *, force: bool, remedy: str = FORCE
) -> None:
    """Refuse to copy (name, file) pairs over other files of `folder`; `remedy` as for `check_target`.

    Raises:
        ConfigError: names the first.
    """
    for name, source in carried:
        target = folder / name
        if not exists(target) or is_same(target, source):
            continue
        if not target.is_file():
            raise ConfigError(f"{target}: exists already and is not a regular file; name another folder")
        if not force:
            raise ConfigError(f"{target}: exists already; name another folder, or {remedy}")


@contextlib.contextmanager
def naming_output(target: Path) -> Iterator[None]:
    """Name `target` in errors of writing that name no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def check_holds(folder: Path, paths: Iterable[str]) -> None:
    """Require that a folder can hold files with these relative paths, each as a file of its own.

    File systems of macOS and Windows take names for one that others tell apart, such as `A` and `a`. So the
    file system itself is asked, with empty files. Object stores tell all names apart.

    Raises:
        UnsupportedError: names one that would replace another, or that the locale cannot encode.
    """
    if is_url(folder):
        return
    with tempfile.TemporaryDirectory(dir=folder) as probe:
        for path in paths:
            place = Path(probe) / path
            try:
                make_folder(place.parent)
                place.touch(exist_ok=False)
            except FileExistsError:
                raise UnsupportedError(
                    f"{folder}: {path!r} and a file before it are one name on this disk; "
                    "restore it on another system, or into one file with --to"
                ) from None
            except UnicodeEncodeError as error:
                raise UnsupportedError(
                    f"{folder}: {path!r} cannot be a file name in this locale ({error.encoding}); set "
                    "PYTHONUTF8=1, or restore into one file with --to"
                ) from None


# --- what is read -------------------------------------------------------------------------------

ACCEPTED: Final = (
    "a .safetensors or .ckptz file, a torch file (.pt, .pth, .bin), a folder of .safetensors shards, or one "
    "of torch.distributed.checkpoint"
)
MODEL: Final = "model"  # stem of the weights in a folder of their own
WEIGHTS, STATE = f"{MODEL}{SUFFIX}", f"state{SUFFIX}"
_BESIDE: Final = re.compile(r"(state|rng-\d+|model_\d+)\.ckptz")  # as the Trainer and accelerate name them
Part = tuple[tuple[Shard, ...], list[Any], list[Any]]  # of a checkpoint that is joined; see `_part_of`
_HEAD_BYTES: Final = 9  # of a safetensors file: length and first character of the header


def open_input(path: Path, search_path: Sequence[Path] = ()) -> Input:
    """Open a file or a folder, by its content; of a folder that was packed to one file, that file.

    Raises:
        FileNotFoundError: nothing there, or a shard of a folder is missing.
        ConfigError: something else than a checkpoint, or a folder without tensors.
        FormatError: damaged.
        UnsupportedError: a torch file that needs code, or something newer than this ckptz.
    """
    where = resolve(path)
    path = where.path
    if where.shards is not None:
        return _of_shards(path, where.shards, search_path)
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
    # The mapped file is closed with its last tensor, so that nothing is left to close.
    return Input(str(path), "torch", stem_of(path), flat.tensors, tree=flat.tree)


def _of_shards(path: Path, step: Path, search_path: Sequence[Path]) -> Input:
    """Open a step that several ranks wrote."""
    held = contextlib.ExitStack()
    try:
        tensors, tree, shards = open_shards(step, search_path, held)
    except BaseException:
        held.close()
        raise
    return Input(str(path), "dcp", stem_of(step), tensors, tree=tree, shards=shards, close=held.close)


def open_all(path: Path, search_path: Sequence[Path], held: contextlib.ExitStack) -> list[Input]:
    """Open what `open_input` does, or all files of a checkpoint in a folder that holds `.ckptz` files only.

    That is the newest checkpoint, or the step of DIR@STEP: the weights first, then what belongs to them, as
    exact as they are there. `held` closes the files.

    Raises:
        CkptzError, OSError: see there.
    """

    def opened(file: Path) -> Input:
        return held.enter_context(contextlib.closing(open_input(file, search_path)))

    weights = resolve(path).weights
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
    """Return whether a folder holds a checkpoint of `CkptzTrainerMixin`."""
    files = (WEIGHTS, STATE, "trainer_state.json")
    return is_folder(folder) and all((folder / name).is_file() for name in files)


def checked_kind(path: Path) -> Path:
    """Return the path if its first bytes may begin a `.ckptz` or safetensors file.

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
    # A safetensors file of another name: no torch file has this character there.
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
        raise with_context(error, str(path)) from None
    listed = sharding.carried if sharding else ()
    places = [(name, folder) for name in listed for folder in reversed(folders_beside(path.absolute()))]
    # Beside a link stands what was meant for it, so that it goes before what is beside the link's target.
    carried = {name: where / name for name, where in places if is_within(where / name, where.resolve())}
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
    """Make one checkpoint of a model and its optimizer, which restores to both under their own names.

    Raises:
        ConfigError: they cannot stand in one file; the message says why.
    """
    parts = [_part_of(model), _part_of(optimizer)]
    if optimizer.kind == "folder":
        raise ConfigError(f"{optimizer.name}: --optimizer takes a file, and this is a folder; name the file")
    own, added = (shards for shards, _, _ in parts)
    for shard in added:
        if any(shard.file == other.file for other in own):
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
        sharding=Sharding((*own, *added), sharding.index_file, sharding.index_text, sharding.carried),
        tree=_joint_tree(parts),
        checkpoint=None,
        optimizer_names=model.optimizer_names | frozenset(optimizer.tensors),
    )


def _part_of(opened: Input) -> Part:
    """Return the shards of an input, and the states [file, JSON node] and storages of torch files."""
    if opened.kind == "ckptz":
        raise ConfigError(f"{opened.name}: is a .ckptz file already; restore it first")
    tree = opened.tree or {"root": {"dict": []}, "storages": []}
    if opened.sharding is not None:
        return opened.sharding.shards, tree["root"]["dict"], tree["storages"]
    file = Path(opened.name).name
    if not is_shard_name(file):
        raise ConfigError(f"{opened.name}: name it with one of {', '.join(SHARD_SUFFIXES)} to join two files")
    if opened.tree is None and not file.endswith(PLAIN_SUFFIX):
        raise ConfigError(f"{opened.name}: a safetensors file; name it so, with the suffix {PLAIN_SUFFIX}")
    metadata = None if opened.metadata is None else dict(opened.metadata)
    states = [] if opened.tree is None else [[file, tree["root"]]]
    return (Shard(file, tuple(opened.tensors), metadata),), states, tree["storages"]


def _joint_tree(parts: Sequence[Part]) -> dict[str, Any] | None:
    states: list[Any] = []
    storages: list[Any] = []
    for _, own, held in parts:
        states += _renumbered(own, len(storages))
        storages += held
    return {"root": {"dict": states}, "storages": storages} if states else None


def _renumbered(node: Any, n_before: int) -> Any:
    """Copy a node of a tree with `n_before` added to the numbers of its storages."""
    if isinstance(node, list):
        return [_renumbered(item, n_before) for item in node]
    if not isinstance(node, dict):
        return node
    if "view" in node:
        return {**node, "view": node["view"] + n_before}
    return {key: _renumbered(value, n_before) for key, value in node.items()}
