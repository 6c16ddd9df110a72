"""`ckptz restore`: back to the kind of file that was compressed, bit for bit."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Final, Literal

from ckptz.api.read import check_limit, decoded_chunks
from ckptz.errors import ConfigError, WriteError
from ckptz.foreign import torch_files
from ckptz.foreign.dcp import write_dcp
from ckptz.foreign.folders import packed_in, write_folder, written_files
from ckptz.foreign.inputs import (
    Input,
    PathLike,
    check_carried,
    check_file_names,
    check_target,
    is_trainer_folder,
    open_input,
    other_files_of_step,
    output_context,
    output_folder,
    output_paths,
    stem_of,
    to_paths,
)
from ckptz.foreign.trainer_folders import open_trainer_folder, plain_state_in, write_plain_trainer
from ckptz.format.byte_source import is_url, naming_urls, path_of
from ckptz.format.envelope import plain_regions, write_plain
from ckptz.format.publish import make_folder, publish, scratch_folder
from ckptz.format.sources import tensor_bytes
from ckptz.kernels.clock import working_seconds
from ckptz.parallel import SILENT, Progress, Workers
from ckptz.run.exact import exact_of
from ckptz.run.names import Located, newest_checkpoint, resolve
from ckptz.run.step_files import StepFile
from ckptz.state.flatten import Chunks, tied_names
from ckptz.state.skeleton import TensorRef, View, parse_tree
from ckptz.store.resolve import PLAIN_SUFFIX
from ckptz.words import Report

OutputKind = Literal["safetensors", "pt", "dcp"]
_FROZEN: Final = "frozen weights are not in the checkpoint; the Trainer keeps those of the model it is given"
RestoredKind = Literal["safetensors", "pt", "dcp", "folder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(Report):
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
    n_copied: int = 0  # other files of a folder, copied as they are: nothing is recorded to compare them with
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
            run, exact if they are there, or for all of a step that several ranks wrote; bases are looked for
            beside it. Of a folder `checkpoint-N` of `CkptzTrainerMixin`, all is restored to what the Trainer
            of transformers itself writes; its plain files with the same state are left out, and named in
            the notes.
        output: a file, or a folder if folders of shards were compressed, or to keep the name. By default
            beside `path`; a step of a run needs one, and so does a checkpoint of the mixin. A name that ends
            with a separator is a folder, and is made.
        to: what to write; by default what the output is called after, else what was compressed.
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
    where = resolve(path)
    with contextlib.ExitStack() as held:
        if where.weights is None and is_trainer_folder(where.path):
            job = _of_trainer(where.path, output, to, to_paths(search_path), held, force=force)
        else:
            job = _of_input(where, output, to, to_paths(search_path), held, force=force)
        if job.kind != "safetensors" and any(one.tree is not None for one in job.inputs):
            torch_files.require_torch(job.target)  # before the time is taken: loading it is not restoring
        start, n_bytes = working_seconds(), sum(tensor_bytes(one.tensors) for one in job.inputs)
        _check_size(job, n_bytes, max_decoded_bytes)
        progress.start(job.name, n_bytes)
        with Workers(jobs) as workers, output_context(job.target):
            job.write(lambda tensors: decoded_chunks(tensors, workers, progress))
        checkpoints = [one.checkpoint for one in job.inputs if one.checkpoint is not None]
        checkpoints += [shard for one in job.inputs for shard in one.shards]
        return RestoreReport(
            input=job.name,
            output=str(job.target),
            kind=job.kind,
            n_tensors=sum(len(one.tensors) for one in job.inputs),
            tensor_bytes=n_bytes,
            stored_bytes=sum(file.stored_bytes for one in checkpoints for file in one.files),
            n_files=sum(len(one.files) for one in checkpoints),
            content_id=checkpoints[0].content_id(),
            depth=max(one.depth for one in checkpoints),
            seconds=working_seconds() - start,
            n_copied=job.n_copied,
            notes=job.notes,
        )


@dataclass(frozen=True, slots=True)
class _Restoration:
    """The open inputs and the function that writes them, which is given what decodes tensors."""

    name: str
    inputs: Sequence[Input]
    kind: RestoredKind
    target: Path
    write: Callable[[Chunks], None]
    n_copied: int
    notes: tuple[str, ...]


def _of_trainer(
    path: Path,
    output: PathLike | None,
    to: OutputKind | None,
    search_path: Sequence[Path],
    held: contextlib.ExitStack,
    *,
    force: bool,
) -> _Restoration:
    """Plan a checkpoint of our Trainer, which becomes the folder that the plain one writes."""
    if output is None or to is not None:
        raise ConfigError(
            f"{path}: becomes a folder that the plain Trainer resumes from; name it with -o, without --to"
        )
    folder, trainer = path_of(output), open_trainer_folder(path, search_path, held)
    read = [file for one in trainer.inputs if one.checkpoint is not None for file in one.checkpoint.paths]
    make_folder(folder, parents=False)
    for file in trainer.written:
        make_folder((folder / file).parent)
        check_target(folder / file, read, force=force)
    check_carried(trainer.carried, folder, force=force)
    notes = [_FROZEN] * trainer.lacks_frozen
    if trainer.stale:
        notes.append(f"left out, as {path} holds their state in its .ckptz files: {', '.join(trainer.stale)}")
    if others := [name for name in plain_state_in(folder) if name not in trainer.written]:
        notes.append(
            f"{', '.join(others)} in {folder} are from before, and not of this checkpoint; the Trainer may "
            "load them: remove them"
        )
    write = partial(write_plain_trainer, folder, trainer, like=read[:1])
    n_copied = len(trainer.carried)
    return _Restoration(str(path), trainer.inputs, "folder", folder, write, n_copied, tuple(notes))


def _of_input(
    where: Located,
    output: PathLike | None,
    to: OutputKind | None,
    search_path: Sequence[Path],
    held: contextlib.ExitStack,
    *,
    force: bool,
) -> _Restoration:
    """Plan one file, or the folder that was packed to it."""
    path, weights = where.path, where.weights
    if weights is not None and output is None:
        raise ConfigError(f"{path}: name an output (-o) for a step of a run, whose folder stays as it is")
    if where.shards is not None and output is None:
        raise ConfigError(f"{path}: name an output (-o) for a step that several ranks wrote")
    if where.is_folder:
        # Files that the folder had beside its shards were copied along, plain ones too.
        packed = packed_in(path, with_plain=True)
        if packed is None and (newest := newest_checkpoint(path)) is not None:
            raise ConfigError(
                f"{path}: a folder of checkpoints; name a step of it, {path}@STEP, as ckptz log lists them, "
                f"or a file, such as {newest}"
            )
        path = packed or path
    read, named = (path, path) if weights is None else (exact_of(weights), weights)
    opened = held.enter_context(contextlib.closing(open_input(read, search_path)))
    if not opened.shards and (opened.kind != "ckptz" or opened.checkpoint is None):
        what = "holds no .ckptz file" if path.is_dir() else "is a plain file already, not a .ckptz file"
        raise ConfigError(f"{path}: {what}; there is nothing to restore")
    kind = _kind_of(opened, to, output)
    target = _target_of(opened, named, output, kind, force=force)
    notes = tuple(_notes(opened, kind, weights))
    n_copied, write = len(opened.carried) * (kind == "folder"), partial(_write, kind, target, opened)
    return _Restoration(opened.name, [opened], kind, target, write, n_copied, notes)


def _kind_of(opened: Input, asked: OutputKind | None, output: PathLike | None) -> RestoredKind:
    """Choose what is written: what is asked for, as the output is called, or what was compressed."""
    if asked in ("pt", "dcp") and opened.sharding is not None and opened.tree is not None:
        raise ConfigError(f"{opened.name}: was a folder of torch files; restore it without --to")
    if asked is not None:
        return asked
    if opened.sharding is not None:
        return "folder"
    suffix = "" if output is None else PurePath(str(output)).suffix
    if suffix in (PLAIN_SUFFIX, *torch_files.TORCH_SUFFIXES):
        return "safetensors" if suffix == PLAIN_SUFFIX else "pt"
    return "pt" if opened.tree is not None else "safetensors"


def _target_of(
    opened: Input, path: Path, output: PathLike | None, kind: RestoredKind, *, force: bool
) -> Path:
    """Choose the file or folder to write; refuse to replace what is there without `force`."""
    checkpoints = opened.shards or (opened.checkpoint,)
    read = [file for one in checkpoints if one is not None for file in one.paths]
    if kind == "dcp":
        target = output_folder(path) / f"{stem_of(path)}.dcp" if output is None else path_of(output)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target}: is not an empty folder; name a new one")
        return target
    if kind != "folder":
        [target] = output_paths([path], output, ".pt" if kind == "pt" else PLAIN_SUFFIX)
        check_target(target, read, force=force)
        return target
    folder = output_folder(path) if output is None else path_of(output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: a folder of shards is restored here, and this is a file; name a folder")
    assert opened.sharding is not None
    make_folder(folder, parents=False)
    check_file_names(folder, written_files(opened.sharding))
    for file in set(written_files(opened.sharding)) - set(opened.sharding.carried):
        check_target(folder / file, read, force=force)
    check_carried(opened.carried, folder, force=force)
    return folder


def _check_size(job: _Restoration, n_bytes: int, max_decoded_bytes: int | None) -> None:
    """Refuse what is too large before the first byte is written: a small file may decode to terabytes."""
    if max_decoded_bytes is not None:  # else the free disk is the limit, and not the free memory
        check_limit(n_bytes, max_decoded_bytes, job.name)
    folder = job.target if job.kind == "folder" and not is_url(job.target) else scratch_folder(job.target)
    # What becomes torch files is decoded to an unnamed file first.
    is_twice = job.kind in ("pt", "dcp") or (job.kind == "folder" and any(one.tree for one in job.inputs))
    needed, free = n_bytes * (2 if is_twice else 1), shutil.disk_usage(folder).free
    if needed > free:
        raise WriteError(
            f"{job.name}: restoring takes {needed} bytes, and {folder} has {free} free; "
            "free some space, or restore elsewhere"
        )


def _notes(opened: Input, kind: RestoredKind, weights: Path | None) -> Iterator[str]:
    """Yield notes on entries that are left out."""
    if weights is not None and (others := other_files_of_step(weights)):
        names = ", ".join(file.name for file in others)
        folder = weights.parent
        how = f"; ckptz restore {folder} -o DIR restores all" if is_trainer_folder(folder) else ""
        is_prefixed = StepFile.parse(weights.name) and all(n.startswith("model.") for n in opened.tensors)
        called = ", called model.NAME" if is_prefixed else ""
        yield f"these are the weights{called}; what else belongs to the step is in {names}{how}"
    if kind == "folder" and opened.left_out:
        yield f"files that belong to the folder were not found: {', '.join(opened.left_out)}"
    if kind != "folder" and opened.sharding is not None:
        yield f"was a folder of {len(opened.sharding.shards)} shards; this is one file"
    elif kind == "safetensors" and opened.tree is not None:
        root = parse_tree(opened.tree).root
        if not isinstance(root, dict) or set(map(type, root.values())) - {TensorRef, View}:
            yield "holds the tensors alone, and not how they were nested; a torch file (--to pt) does"
        elif tied := tied_names(opened.tree, opened.tensors):
            yield f"of tensors that are tied one is stored: not {', '.join(sorted(tied)[:3])}"


def _write(kind: RestoredKind, target: Path, opened: Input, chunks: Chunks) -> None:
    tensors, tree = opened.tensors, opened.tree
    like = [shard.paths[0] for shard in opened.shards] or [path_of(opened.name)]
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
