"""`ckptz fold`, `ckptz apply` and `ckptz export`: deltas put together, put to use, or done without."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from ckptz.codec.units import tensor_bytes
from ckptz.commands.restore import decoded_chunks
from ckptz.container.byte_source import open_bytes, path_of
from ckptz.container.envelope import plain_regions, write_plain
from ckptz.container.publish import publish
from ckptz.container.reader import Container
from ckptz.errors import ConfigError, FormatError, MissingBaseError
from ckptz.formats.targets import PathLike, check_target, file_path, naming_output, paths
from ckptz.methods.lossless import Lossless
from ckptz.pages.shown import Shown
from ckptz.parallel import Workers
from ckptz.pipeline import Job, write
from ckptz.progress import SILENT, Progress
from ckptz.store.resolve import (
    PLAIN_SUFFIX,
    SUFFIX,
    Checkpoint,
    base_metadata,
    base_ref,
    open_checkpoint,
    open_file,
)
from ckptz.store.runs import newest_checkpoint
from ckptz.store.step_files import StepFile

RANGE: Final = ".."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaReport(Shown):
    """Sizes and identity of a file that `fold`, `export` or `apply` wrote."""

    input: str  # the file whose values the output holds
    output: str
    base: str | None  # the file that the output needs, or that a delta was applied to; None if there is none
    step: int | None  # training step, if it is recorded
    n_tensors: int  # tensors in it
    n_deltas: int  # those that are stored against the base
    tensor_bytes: int  # bytes of all tensors
    stored_bytes: int  # size of the output
    content_id: str  # identity of the values
    seconds: float  # time taken


# --- which files are meant ----------------------------------------------------------------------


def find_step(text: str, folder: Path) -> Path:
    """Find the file that `text` names, or one in `folder` that is of this step, standing alone if possible.

    A step of a Checkpointer is exact if it may be: its residual is found in place of its lossy file.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: no file of the folder records the step.
    """
    if not text.isdigit() or Path(text).exists():
        return path_of(text)
    path = newest_checkpoint(folder, int(text))
    if path is None:
        raise ConfigError(
            f"{folder}: no .ckptz file here records step {text}; name the file itself, or another --folder"
        )
    step_file = StepFile.parse(path.name)
    exact = path if step_file is None else path.with_name(step_file.exact.name)
    return exact if exact.exists() else path


def find_range(text: str, folder: Path) -> tuple[Path, Path]:
    """Find the two files that "A..B" names; B may be a plain file name in the folder of A.

    Raises:
        ConfigError: not a range, or its ends are not there.
    """
    ends = [(text[:i], text[i + len(RANGE) :]) for i in range(len(text)) if text.startswith(RANGE, i)]
    problems = []
    for first, last in ends:
        if not first or not last:
            continue
        try:
            a, b = find_step(first, folder), find_step(last, folder)
        except ConfigError as error:
            problems.append(error)
            continue
        b = b if b.is_file() else a.parent / b
        if a.is_file() and b.is_file():
            return a, b
    if problems:
        raise problems[0]
    raise ConfigError(f"{text}: not a range of two files or steps that exist; write A..B, such as 10..20")


# --- the verbs ----------------------------------------------------------------------------------


def fold(
    text: str,
    output: PathLike,
    *,
    folder: PathLike = ".",
    jobs: int | None = None,
    force: bool = False,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
) -> DeltaReport:
    """Write one delta that leads from checkpoint A to checkpoint B, whatever lies between, bit for bit.

    Args:
        text: "A..B", two files or two steps.
        output: the delta.
        folder: where steps are looked for that are given as numbers.
        jobs: threads, all cores by default.
        force: replace an existing output.
        search_path: folders to look for bases in, after each file's own.
        progress: is told of the bytes done.

    Raises:
        ConfigError: not a range, or the output cannot be written.
        FormatError, MissingBaseError: A or B cannot be read.
    """
    start, output = time.perf_counter(), file_path(output)
    first_path, last_path = find_range(text, path_of(folder))
    with contextlib.ExitStack() as held:
        first = held.enter_context(contextlib.closing(open_checkpoint(first_path, paths(search_path))))
        last = held.enter_context(contextlib.closing(open_checkpoint(last_path, paths(search_path))))
        check_target(output, [*first.paths, *last.paths], force=force)
        workers = held.enter_context(Workers(jobs))
        progress.start(last.name, tensor_bytes(last.tensors))
        with naming_output(output), publish(output, [last_path]) as sink:
            written = write(sink, _job(last, first), workers, progress.advance)
        base = str(first_path) if written.n_deltas else None
        return _report(last, output, base, written.n_deltas, written.stored_bytes, start)


def _job(checkpoint: Checkpoint, base: Checkpoint | None) -> Job:
    """Describe a file of the values of `checkpoint` that needs `base` alone, or nothing."""
    job = Job(tensors=checkpoint.tensors, config=Lossless(sparse=True), metadata=checkpoint.metadata)
    if checkpoint.container is not None:
        index = checkpoint.container.index
        job = replace(job, step=index.step, sharding=index.sharding, tree=index.tree)
    if base is None:
        return job
    return replace(job, base=base_ref(base), bases=base.tensors, base_metadata=base_metadata(base))


def export(
    text: PathLike,
    output: PathLike,
    *,
    folder: PathLike = ".",
    jobs: int | None = None,
    force: bool = False,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
) -> DeltaReport:
    """Write a checkpoint as one file that needs no other.

    Args:
        text: a file or a step.
        output: a `.ckptz` or a `.safetensors` file.
        folder: where steps are looked for that are given as numbers.
        jobs: threads, all cores by default.
        force: replace an existing output.
        search_path: folders to look for bases in, after each file's own.
        progress: is told of the bytes done.

    Raises:
        ConfigError: the output cannot be written, or has another suffix.
        FormatError, MissingBaseError: the checkpoint cannot be read.
    """
    start, output = time.perf_counter(), file_path(output)
    if output.suffix not in (SUFFIX, PLAIN_SUFFIX):
        raise ConfigError(f"{output}: export writes {SUFFIX} or {PLAIN_SUFFIX} files; name one")
    path = find_step(str(text), path_of(folder))
    with (
        contextlib.closing(open_checkpoint(path, paths(search_path))) as checkpoint,
        Workers(jobs) as workers,
    ):
        check_target(output, checkpoint.paths, force=force)
        progress.start(checkpoint.name, tensor_bytes(checkpoint.tensors))
        with naming_output(output), publish(output, [path]) as sink:
            if output.suffix == SUFFIX:
                write(sink, _job(checkpoint, None), workers, progress.advance)
            else:
                _write_plain(sink, checkpoint, workers, progress)
        return _report(checkpoint, output, None, 0, output.stat().st_size, start)


def apply(
    delta: PathLike,
    base: PathLike,
    output: PathLike | None,
    *,
    jobs: int | None = None,
    force: bool = False,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
) -> DeltaReport:
    """Write the checkpoint that a delta makes of `base`, as a safetensors file.

    Args:
        delta: a `.ckptz` file; its own base is not looked for.
        base: the file that stands for it, `.safetensors` or `.ckptz`.
        output: a new `.safetensors` file; None replaces `base`, which stays until the new one is complete.
        jobs: threads, all cores by default.
        force: replace an existing output.
        search_path: folders to look for bases in, after each file's own.
        progress: is told of the bytes done.

    Raises:
        MissingBaseError: the delta was made from something else, or was applied before.
        ConfigError: the output cannot be written.
        FormatError: a file is damaged.
    """
    start, delta, base = time.perf_counter(), path_of(delta), path_of(base)
    output = None if output is None else file_path(output)
    with contextlib.ExitStack() as held:
        held.enter_context(contextlib.closing(opened := open_checkpoint(base, paths(search_path))))
        container = held.enter_context(contextlib.closing(_open_delta(delta)))
        read = [*opened.paths, delta]
        target = base if output is None else output
        if output is not None:
            if output.suffix == SUFFIX:
                raise ConfigError(f"{output}: apply writes {PLAIN_SUFFIX} files; name one")
            check_target(output, read, force=force)
        elif opened.container is not None:
            what = "a .ckptz file is not replaced by a safetensors file; name another with -o"
            raise ConfigError(f"{base}: {what}")
        _check_base(container, opened)
        if container.outer_base is not None:
            container.bases = opened.tensors
        workers = held.enter_context(Workers(jobs))
        metadata = opened.metadata if container.index.metadata is None else container.index.metadata
        made = Checkpoint(container.name, container.tensors, metadata, container, (container,))
        progress.start(container.name, tensor_bytes(made.tensors))
        with naming_output(target), publish(target, [base]) as sink:
            _write_plain(sink, made, workers, progress)
        n_deltas = sum(source.needs_other_file for source in container.tensors.values())
        return _report(made, target, str(base), n_deltas, target.stat().st_size, start)


def _open_delta(path: Path) -> Container:
    file = open_file(open_bytes(path))
    if isinstance(file, Container):
        return file
    file.close()
    raise FormatError(f"{path}: a plain safetensors file is no delta; is it the one to apply it to?")


def _check_base(container: Container, base: Checkpoint) -> None:
    """Refuse a base that is not the delta's, before anything is written."""
    ref = container.index.base
    if ref is None or (found := base.content_id()) == ref.content_id:
        return
    if found == container.index.content_id:
        raise MissingBaseError(
            f"{base.name}: holds the values of {container.name} already; it was applied before"
        )
    raise MissingBaseError(
        f"{base.name}: has content id {found[:16]}, and {container.name} was made from "
        f"{ref.content_id[:16]}, which was called {ref.file!r}"
    )


def _write_plain(sink: BinaryIO, checkpoint: Checkpoint, workers: Workers, progress: Progress) -> None:
    chunks = decoded_chunks(checkpoint.tensors, workers, progress)
    write_plain(sink, plain_regions(checkpoint.tensors), checkpoint.metadata, chunks)


def _report(
    made: Checkpoint, output: Path, base: str | None, n_deltas: int, stored_bytes: int, start: float
) -> DeltaReport:
    return DeltaReport(
        input=made.name,
        output=str(output),
        base=base,
        step=None if made.container is None else made.container.index.step,
        n_tensors=len(made.tensors),
        n_deltas=n_deltas,
        tensor_bytes=tensor_bytes(made.tensors),
        stored_bytes=stored_bytes,
        content_id=made.content_id(),
        seconds=time.perf_counter() - start,
    )
