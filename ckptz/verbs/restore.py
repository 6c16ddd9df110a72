"""`ckptz restore`: decode a checkpoint to the kind of file that was compressed."""

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
    STATE,
    WEIGHTS,
    Input,
    is_trainer_folder,
    open_input,
    other_files_of_step,
    stem_of,
)
from ckptz.foreign.trainer_folders import (
    TrainerFolder,
    plain_state_in,
    read_trainer_folder,
    write_plain_trainer,
)
from ckptz.format.byte_source import is_url, naming_urls, path_of
from ckptz.format.envelope import plain_regions, write_plain
from ckptz.format.publish import make_folder, publish, scratch_folder
from ckptz.format.sources import tensor_bytes
from ckptz.format.suffixes import FOREIGN_SUFFIXES, PLAIN_SUFFIX
from ckptz.kernels.clock import working_seconds
from ckptz.parallel import SILENT, Progress, Workers
from ckptz.run.names import Located, newest_checkpoint, resolve
from ckptz.run.prune import why_unfinished
from ckptz.run.residuals import residual_or_file
from ckptz.run.step_files import TRAINER_STATE, StepFile, is_written
from ckptz.state.flatten import Chunks, tied_names
from ckptz.state.skeleton import TensorRef, View, parse_tree
from ckptz.verbs.paths import (
    PathLike,
    check_carried,
    check_file_names,
    check_target,
    output_context,
    output_folder,
    output_paths,
    to_paths,
)
from ckptz.words import Report

OutputKind = Literal["safetensors", "pt", "dcp"]
_FROZEN: Final = "frozen weights are not in the checkpoint; the Trainer takes them from its model"
RestoredKind = Literal["safetensors", "pt", "dcp", "folder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(Report):
    """Sizes of the files that `restore` wrote."""

    input: str
    output: str
    kind: RestoredKind
    n_tensors: int  # tensors in the output
    tensor_bytes: int  # decoded size
    stored_bytes: int  # size of all files of the chain
    n_files: int  # number of files in the chain
    content_id: str  # identity of the values
    depth: int  # deltas between the input and its full file
    seconds: float  # time taken, without compiling kernels
    n_copied: int = 0  # other files of a folder, copied without a check as they have no checksums
    notes: tuple[str, ...] = ()  # warnings for the user


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
    """Decode a `.ckptz` file to the kind of file that was compressed.

    Args:
        path: a `.ckptz` file; a folder that `compress` wrote; "DIR@STEP" for the weights of a step of a run,
            exact if the step has a residual file, or for all tensors of a step that several ranks wrote; or a
            folder `checkpoint-N` of `CkptzTrainerMixin`, which becomes a folder of the plain Trainer (plain
            files in it that duplicate restored state are left out and named in the notes).
        output: a file, or a folder for compressed folders and to keep the name; a name that ends with a
            separator is a folder. By default beside `path`. Required for a step of a run and for a folder of
            the mixin.
        to: kind of file to write, by default according to the suffix of `output`, else the original kind.
        jobs: number of threads, by default one for each core.
        force: replace an existing output.
        search_path: more folders to search for bases, after the folder of the file.
        max_decoded_bytes: refuse files that decode to more bytes; by default the free disk space.
        progress: receives the number of bytes written.

    Returns:
        Sizes of the output and of the chain.

    Raises:
        FileNotFoundError: no such file or step.
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base is not found.
        LimitError: the file decodes to more than `max_decoded_bytes`.
        WriteError: too little disk space.
        ConfigError: not a `.ckptz` file, or the output exists or would replace an input.
        UnsupportedError: the file system cannot hold the file names of a folder.
    """
    located, folders = resolve(path), to_paths(search_path)
    with contextlib.ExitStack() as stack:
        if located.weights is None and is_trainer_folder(located.path):
            if output is None or to is not None:
                what = "becomes a folder for the plain Trainer; name it with -o, and leave out --to"
                raise ConfigError(f"{located.path}: {what}")
            trainer = read_trainer_folder(located.path, folders, stack)
            job = _of_trainer(located.path, trainer, path_of(output), force=force)
        else:
            read, named = _located_file(located, has_output=output is not None)
            opened = stack.enter_context(contextlib.closing(open_input(read, folders)))
            kind = _kind_of(opened, to, output)
            target = _target_of(opened, named, output, kind, force=force)
            notes = tuple(_notes(opened, kind, named, located.weights))
            n_copied, write = len(opened.carried) * (kind == "folder"), partial(_write, kind, target, opened)
            job = _Restoration(opened.name, [opened], kind, target, write, n_copied, notes)
        if job.kind != "safetensors" and any(source.tree is not None for source in job.inputs):
            torch_files.require_torch(job.target)  # imports torch, whose time is not reported
        start, n_bytes = working_seconds(), sum(tensor_bytes(source.tensors) for source in job.inputs)
        _check_size(job, n_bytes, max_decoded_bytes)
        progress.start(job.name, n_bytes)
        with Workers(jobs) as workers, output_context(job.target):
            job.write(decoded_chunks(workers, progress))
        checkpoints = [source.checkpoint for source in job.inputs if source.checkpoint is not None]
        checkpoints += [shard for source in job.inputs for shard in source.shards]
        return RestoreReport(
            input=job.name,
            output=str(job.target),
            kind=job.kind,
            n_tensors=sum(len(source.tensors) for source in job.inputs),
            tensor_bytes=n_bytes,
            stored_bytes=sum(file.stored_bytes for source in checkpoints for file in source.files),
            n_files=sum(len(source.files) for source in checkpoints),
            content_id=checkpoints[0].content_id(),
            depth=max(source.depth for source in checkpoints),
            seconds=working_seconds() - start,
            n_copied=job.n_copied,
            notes=job.notes,
        )


@dataclass(frozen=True, slots=True)
class _Restoration:
    """The open inputs, the target, and the function that writes it from decoded chunks."""

    name: str
    inputs: Sequence[Input]
    kind: RestoredKind
    target: Path
    write: Callable[[Chunks], None]
    n_copied: int
    notes: tuple[str, ...]


def _of_trainer(path: Path, trainer: TrainerFolder, folder: Path, *, force: bool) -> _Restoration:
    """Plan the restoration of a `CkptzTrainerMixin` checkpoint at `path` to a folder of the plain Trainer."""
    read = [
        file for source in trainer.inputs if source.checkpoint is not None for file in source.checkpoint.paths
    ]
    make_folder(folder, parents=False)
    for file in trainer.written:
        make_folder((folder / file).parent)
        check_target(folder / file, read, force=force)
    check_carried(trainer.carried, folder, force=force)
    notes = [_FROZEN] * trainer.lacks_frozen
    if trainer.stale:
        notes.append(f"left out, as .ckptz files in {path} have the same state: {', '.join(trainer.stale)}")
    if foreign := [name for name in plain_state_in(folder) if name not in trainer.written]:
        notes.append(
            f"{', '.join(foreign)} in {folder} are not of this checkpoint, but the Trainer may load them; "
            "remove them"
        )
    write = partial(write_plain_trainer, folder, trainer, like=read[:1])
    n_copied = len(trainer.carried)
    return _Restoration(str(path), trainer.inputs, "folder", folder, write, n_copied, tuple(notes))


def _located_file(located: Located, *, has_output: bool) -> tuple[Path, Path]:
    """Return the file or folder to read, and the one that the output is named after."""
    path, weights = located.path, located.weights
    if weights is not None and not has_output:
        raise ConfigError(f"{path}: a step of a run is not restored into its folder; name an output with -o")
    if located.shards is not None and not has_output:
        raise ConfigError(f"{path}: several ranks wrote this step; name an output with -o")
    if located.is_folder:
        # The folder also has copies of the files beside the shards, plain safetensors files among them.
        packed = packed_in(path, with_plain=True)
        if packed is None and (newest := newest_checkpoint(path)) is not None:
            if newest.name == WEIGHTS and (path / STATE).is_file() and not is_written(path / TRAINER_STATE):
                raise ConfigError(
                    f"{path}: has no complete {TRAINER_STATE}, which the Trainer writes last: the save was "
                    f"cut off; restore another step, or the weights alone: {newest}"
                )
            raise ConfigError(
                f"{path}: a folder of several checkpoints; name a step, {path}@STEP (ckptz log lists them), "
                f"or a file, such as {newest}"
            )
        path = packed or path
    return (path, path) if weights is None else (residual_or_file(weights), weights)


def _kind_of(opened: Input, asked: OutputKind | None, output: PathLike | None) -> RestoredKind:
    """Return the kind of the output: `asked`, else by the suffix of `output`, else the original kind."""
    if not opened.shards and (opened.kind != "ckptz" or opened.checkpoint is None):
        what = "contains no .ckptz file" if path_of(opened.name).is_dir() else "is not a .ckptz file"
        raise ConfigError(f"{opened.name}: {what}; there is nothing to restore")
    if asked in ("pt", "dcp") and opened.sharding is not None and opened.tree is not None:
        raise ConfigError(f"{opened.name}: was a folder of torch files; restore it without --to")
    if asked is not None:
        return asked
    if opened.sharding is not None:
        return "folder"
    suffix = "" if output is None else PurePath(str(output)).suffix
    if suffix in FOREIGN_SUFFIXES:
        return "safetensors" if suffix == PLAIN_SUFFIX else "pt"
    return "pt" if opened.tree is not None else "safetensors"


def _target_of(
    opened: Input, path: Path, output: PathLike | None, kind: RestoredKind, *, force: bool
) -> Path:
    """Return the file or folder to write; refuse to replace existing files without `force`."""
    checkpoints = opened.shards or (opened.checkpoint,)
    read = [file for source in checkpoints if source is not None for file in source.paths]
    if kind == "dcp":
        target = output_folder(path) / f"{stem_of(path)}.dcp" if output is None else path_of(output)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target}: is not an empty folder; name a new folder")
        return target
    if kind != "folder":
        [target] = output_paths([path], output, ".pt" if kind == "pt" else PLAIN_SUFFIX)
        check_target(target, read, force=force)
        return target
    folder = output_folder(path) if output is None else path_of(output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file, but shards are restored to a folder; name a folder")
    assert opened.sharding is not None
    make_folder(folder, parents=False)
    check_file_names(folder, written_files(opened.sharding))
    for file in set(written_files(opened.sharding)) - set(opened.sharding.carried):
        check_target(folder / file, read, force=force)
    check_carried(opened.carried, folder, force=force)
    return folder


def _check_size(job: _Restoration, n_bytes: int, max_decoded_bytes: int | None) -> None:
    """Check the decoded size before the first byte is written: a small file may decode to terabytes."""
    if max_decoded_bytes is not None:  # the default limit is the free disk space, not the free memory
        check_limit(n_bytes, max_decoded_bytes, job.name)
    folder = job.target if job.kind == "folder" and not is_url(job.target) else scratch_folder(job.target)
    # Torch files are assembled from a temporary file with all decoded tensors.
    is_twice = job.kind in ("pt", "dcp") or (
        job.kind == "folder" and any(source.tree for source in job.inputs)
    )
    needed, free = n_bytes * (2 if is_twice else 1), shutil.disk_usage(folder).free
    if needed > free:
        raise WriteError(
            f"{job.name}: restoring needs {needed} bytes, but {folder} has {free} free; "
            "free some space, or name another output with -o"
        )


def _notes(opened: Input, kind: RestoredKind, path: Path, weights: Path | None) -> Iterator[str]:
    """Yield notes about state and files that the output lacks."""
    if unfinished := None if is_url(path) else why_unfinished(path.parent):
        yield f"{path.parent} {unfinished}; restore another step to be sure"
    if weights is not None and (step_files := other_files_of_step(weights)):
        names = ", ".join(file.name for file in step_files)
        folder = weights.parent
        hint = f"; ckptz restore {folder} -o DIR restores all" if is_trainer_folder(folder) else ""
        is_prefixed = StepFile.parse(weights.name) and all(n.startswith("model.") for n in opened.tensors)
        prefix = ", named model.NAME" if is_prefixed else ""
        yield f"the output has only the weights{prefix}; other files of the step: {names}{hint}"
    if kind == "folder" and opened.left_out:
        yield f"files of the original folder that are missing: {', '.join(opened.left_out)}"
    if kind != "folder" and opened.sharding is not None:
        yield f"{len(opened.sharding.shards)} shards were merged into one file"
    elif kind == "safetensors" and opened.tree is not None:
        root = parse_tree(opened.tree).root
        if not isinstance(root, dict) or set(map(type, root.values())) - {TensorRef, View}:
            yield "the nesting is lost in a safetensors file; --to pt keeps it"
        elif tied := tied_names(opened.tree, opened.tensors):
            yield f"tied tensors are stored once: without {', '.join(sorted(tied)[:3])}"


def _write(kind: RestoredKind, target: Path, opened: Input, chunks: Chunks) -> None:
    tensors, tree = opened.tensors, opened.tree
    like = [shard.paths[0] for shard in opened.shards] or [path_of(opened.name)]
    if kind == "dcp":
        write_dcp(target, tensors, tree, chunks, like)
    elif kind == "pt":
        torch_files.write(target, tensors, tree, chunks, like)
    elif kind == "folder":
        write_folder(target, opened, chunks, like)
    else:
        with publish(target, like) as sink:
            write_plain(sink, plain_regions(tensors), opened.metadata, chunks(tensors))
