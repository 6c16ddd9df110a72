"""`ckptz restore`: back to the kind of file that was compressed, bit for bit."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptz.api.read import decoded_chunks
from ckptz.codec.units import tensor_bytes
from ckptz.container.byte_source import is_folder, naming_urls, path_of
from ckptz.container.envelope import plain_regions, write_plain
from ckptz.container.publish import make_folder, publish
from ckptz.errors import ConfigError, LimitError, WriteError, real
from ckptz.formats import torch_files
from ckptz.formats.dcp import write_dcp
from ckptz.formats.folders import packed_in
from ckptz.formats.inputs import Input, beside_weights, open_input
from ckptz.formats.sharding import write_folder, written_files
from ckptz.formats.targets import (
    PathLike,
    beside,
    check_carried,
    check_holds,
    check_target,
    naming_output,
    paths,
    places_for,
    stem_of,
)
from ckptz.kernels.clock import working_seconds
from ckptz.pages.words import Shown
from ckptz.parallel import Workers
from ckptz.progress import SILENT, Progress
from ckptz.run.exact import exact_of
from ckptz.run.names import weights_at
from ckptz.state.unflatten import Chunks
from ckptz.store.resolve import PLAIN_SUFFIX

OutputKind = Literal["safetensors", "pt", "dcp"]
RestoredKind = Literal["safetensors", "pt", "dcp", "folder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(Shown):
    """Sizes of the files that `restore` wrote."""

    input: str  # what was read
    output: str  # what was written
    kind: RestoredKind  # "safetensors", "pt", "dcp" or "folder"
    n_tensors: int  # tensors in it
    tensor_bytes: int  # their size
    stored_bytes: int  # size of all files of the chain
    n_files: int  # how many there are
    content_id: str  # identity of the values
    depth: int  # deltas between the input and its full file
    seconds: float  # time taken, without that of compiling kernels
    notes: tuple[str, ...] = ()  # what the user should know


@naming_urls
def restore(
    path: PathLike,
    output: PathLike | None = None,
    *,
    to: OutputKind | None = None,
    jobs: int | None = None,
    force: bool = False,
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    progress: Progress = SILENT,
) -> RestoreReport:
    """Write what a `.ckptz` file holds, as it was before compression.

    Args:
        path: a `.ckptz` file, the folder that was packed to one, or "DIR@STEP" for the weights of a step of a
            run, exact if they are there; bases are looked for beside it.
        output: a file, or a folder if folders of shards were compressed, or to keep the name. By default
            beside `path`; a step of a run needs one. A name that ends with a separator is a folder, and is
            made.
        to: what to write; by default what was compressed.
        jobs: threads, all cores by default.
        force: replace an existing output.
        search_path: folders to look for bases in, after the file's own.
        max_decoded_bytes: refuse files that decode to more; by default the free disk of the output.
        progress: is told of the bytes written.

    Raises:
        FileNotFoundError: no such file or step.
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base is not found.
        LimitError: it decodes to more than `max_decoded_bytes`.
        WriteError: the disk has too little room.
        ConfigError: a plain file, or the output exists or would replace a file that is read.
        UnsupportedError: a folder whose file names this system cannot hold.
    """
    start, path = working_seconds(), path_of(path)
    weights = weights_at(path)
    if weights is not None and output is None:
        raise ConfigError(f"{path}: name an output (-o) for a step of a run, whose folder stays as it is")
    if weights is None and is_folder(path):
        # Files that the folder had beside its shards were copied along, plain ones too.
        path = packed_in(path, with_plain=True) or path
    read, named = (path, path) if weights is None else (exact_of(weights), weights)
    with contextlib.closing(open_input(read, paths(search_path))) as opened:
        checkpoint = opened.checkpoint
        if opened.kind != "ckptz" or checkpoint is None:
            if path.is_dir():
                raise ConfigError(
                    f"{path}: holds no .ckptz file, or several; name the one to restore, or DIR@STEP"
                )
            raise ConfigError(
                f"{path}: is a plain file already, not a .ckptz file; there is nothing to restore"
            )
        kind = _kind_of(opened, to)
        target = _target_of(opened, named, output, kind, force=force)
        n_bytes = tensor_bytes(opened.tensors)
        _check_size(opened.name, n_bytes, target, kind, max_decoded_bytes)
        progress.start(opened.name, n_bytes)
        with Workers(jobs) as workers, naming_output(target):
            _write(kind, target, opened, lambda tensors: decoded_chunks(tensors, workers, progress))
        return RestoreReport(
            input=opened.name,
            output=str(target),
            kind=kind,
            n_tensors=len(opened.tensors),
            tensor_bytes=n_bytes,
            stored_bytes=sum(file.stored_bytes for file in checkpoint.files),
            n_files=len(checkpoint.files),
            content_id=checkpoint.content_id(),
            depth=checkpoint.depth,
            seconds=working_seconds() - start,
            notes=_notes(opened, kind, beside_weights(weights) if weights else ()),
        )


def _kind_of(opened: Input, asked: OutputKind | None) -> RestoredKind:
    if asked in ("pt", "dcp") and opened.sharding is not None and opened.tree is not None:
        raise ConfigError(f"{opened.name}: was a folder of torch files; restore it without --to")
    if asked is not None:
        return asked
    if opened.sharding is not None:
        return "folder"
    return "pt" if opened.tree is not None else "safetensors"


def _target_of(
    opened: Input, path: Path, output: PathLike | None, kind: RestoredKind, *, force: bool
) -> Path:
    """Choose the file or folder to write; refuse to replace what is there without `force`."""
    assert opened.checkpoint is not None
    read = opened.checkpoint.paths
    if kind == "dcp":
        target = beside(path) / f"{stem_of(path)}.dcp" if output is None else Path(output)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target}: is not an empty folder; name a new one")
        return target
    if kind != "folder":
        [target] = places_for([path], output, ".pt" if kind == "pt" else PLAIN_SUFFIX)
        check_target(target, read, force=force)
        return target
    folder = beside(path) if output is None else Path(output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: a folder of shards is restored here, and this is a file; name a folder")
    assert opened.sharding is not None
    make_folder(folder, parents=False)
    check_holds(folder, written_files(opened.sharding))
    for file in set(written_files(opened.sharding)) - set(opened.sharding.carried):
        check_target(folder / file, read, force=force)
    check_carried(opened.carried, folder, force=force)
    return folder


def _check_size(
    name: str, n_bytes: int, target: Path, kind: RestoredKind, max_decoded_bytes: int | None
) -> None:
    """Refuse what is too large before the first byte is written: a small file may decode to terabytes."""
    if max_decoded_bytes is not None and n_bytes > real("max_decoded_bytes", max_decoded_bytes):
        raise LimitError(
            f"{name}: decodes to {n_bytes} bytes, and {max_decoded_bytes} are allowed; "
            "allow more if you trust the file"
        )
    folder = target if kind == "folder" else target.absolute().parent
    needed, free = n_bytes * (2 if kind in ("pt", "dcp") else 1), shutil.disk_usage(folder).free
    if needed > free:  # torch files are decoded to an unnamed file first
        raise WriteError(
            f"{name}: restoring takes {needed} bytes, and {folder} has {free} free; "
            "free some space, or restore elsewhere"
        )


def _notes(opened: Input, kind: RestoredKind, others: Sequence[Path]) -> tuple[str, ...]:
    if others:
        names = ", ".join(file.name for file in others)
        return (f"these are the weights; what else belongs to the step is in {names}",)
    if kind == "folder" and opened.left_out:
        return (f"files that belong to the folder were not found: {', '.join(opened.left_out)}",)
    if kind != "folder" and opened.sharding is not None:
        return (f"was a folder of {len(opened.sharding.shards)} shards; this is one file",)
    return ()


def _write(kind: RestoredKind, target: Path, opened: Input, chunks: Chunks) -> None:
    tensors, tree, like = opened.tensors, opened.tree, [path_of(opened.name)]
    if kind == "dcp":
        write_dcp(target, tensors, tree, chunks, like)
    elif kind == "pt":
        torch_files.write(target, tensors, tree, chunks, like)
    elif kind == "folder" and (sharding := opened.sharding) is not None:
        carried = opened.carried
        write_folder(target, tensors, sharding, tree=tree, carried=carried, chunks=chunks, like=like)
    else:
        with publish(target, like) as sink:
            write_plain(sink, plain_regions(tensors), opened.metadata, chunks(tensors))
