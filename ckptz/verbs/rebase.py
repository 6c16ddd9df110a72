"""`ckptz rebase`: rewrite a delta as a self-contained file with the same values and codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptz.api.read import decoded_chunks
from ckptz.codec.restored import CachedTensor
from ckptz.errors import ConfigError, CorruptionError
from ckptz.foreign.inputs import check_not_torch
from ckptz.format.byte_source import FileBytes, path_of
from ckptz.format.publish import publish
from ckptz.format.reader import Container, FrameSource, GroupMember
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.kernels.clock import working_seconds
from ckptz.parallel import SILENT, Progress, Workers
from ckptz.store.resolve import Checkpoint, open_checkpoint
from ckptz.verbs.paths import PathLike, check_target, file_path, output_context, to_paths
from ckptz.verbs.verify import check_stored_bytes
from ckptz.words import Report
from ckptz.write.inline_writer import NeededBase, bytes_to_write, write_inline

Tensors = Mapping[str, TensorSource]


def self_contained(checkpoint: Checkpoint) -> tuple[Tensors, tuple[NeededBase, ...]]:
    """Return the tensors of a checkpoint for a self-contained file, and the bases they need, nearest first.

    Frames with codes are copied, because later deltas may use these codes as contexts; frames without a base
    are copied too. All other tensors are decoded, to be encoded without a base: that is smaller than storing
    their frames with the bases.

    Raises:
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base lacks a tensor that is needed.
    """
    needed: list[NeededBase] = []
    tensors = above = _copied_or_decoded(checkpoint.tensors)
    for base in _bases(checkpoint):
        needing = (n for n, s in above.items() if isinstance(s, FrameSource) and s.header.plan.needs_base)
        names = _with_context_tensors(needing, base.tensors)
        if not names:
            break
        above = _copied_or_decoded({name: source for name, source in base.tensors.items() if name in names})
        needed.append(NeededBase(content_id=base.content_id, file=base.file, tensors=above))
    return tensors, tuple(needed)


def _copied_or_decoded(tensors: Tensors) -> Tensors:
    """Keep the frames to copy; decode lossless deltas, and tensors that share a frame."""
    for source in tensors.values():
        if isinstance(source, FrameSource):
            source.check_base()
    return {
        name: CachedTensor.of_frame(source)
        if isinstance(source, FrameSource) and _is_decoded(source)
        else source
        for name, source in tensors.items()
    }


def _is_decoded(frame: FrameSource) -> bool:
    is_delta = frame.header.plan.needs_base and frame.header.plan.quant_map is None
    return is_delta or isinstance(frame, GroupMember)


def _bases(checkpoint: Checkpoint) -> Iterator[NeededBase]:
    """Yield every base of the chain with all its tensors, both files and inline bases."""
    ref = None
    for file in checkpoint.files:
        if ref is not None:
            yield NeededBase(content_id=ref.content_id, file=ref.file, tensors=file.tensors)
        if isinstance(file, Container):
            for base in file.inline:
                record = base.record
                yield NeededBase(content_id=record.content_id, file=record.file, tensors=base.tensors)
            ref = file.index.base


def _with_context_tensors(names: Iterable[str], tensors: Tensors) -> set[str]:
    """Return `names` and the tensors that their contexts are computed from, where `tensors` has them."""
    needed: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in needed and name in tensors:
            needed.add(name)
            source = tensors[name]
            waiting += source.header.plan.context_tensor_names if isinstance(source, FrameSource) else []
    return needed


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineReport:
    """One inline base of the new file."""

    file: str  # original name of the base
    content_id: str
    n_tensors: int  # tensors of the base that the new file includes


@dataclass(frozen=True, slots=True, kw_only=True)
class RebaseReport(Report):
    """Sizes of a file that `rebase` wrote, and its inline bases."""

    input: str  # the delta
    output: str  # the self-contained file
    is_changed: bool  # False if the input was self-contained already and nothing was written
    bases: tuple[InlineReport, ...]  # inline bases, nearest first
    depth: int  # deltas between the file and its full file, as before
    n_tensors: int  # tensors of the checkpoint
    tensor_bytes: int  # their decoded size
    stored_bytes: int  # size of the output
    chain_bytes: int  # size of all files of the chain that was read
    content_id: str  # identity of the values, which is unchanged
    seconds: float  # time taken, without compiling kernels


def rebase(
    path: PathLike,
    output: PathLike | None = None,
    *,
    jobs: int | None = None,
    force: bool = False,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
) -> RebaseReport:
    """Rewrite a delta as a self-contained file.

    Lossless tensors are encoded without a base. Lossy frames, whose codes later deltas may need, are copied
    together with the frames of their bases. The new file is read back and every value is checked against its
    checksum before the file is published. Deltas with `path` as base remain readable.

    Args:
        path: a `.ckptz` file.
        output: a new file; None replaces `path` once the new file is verified.
        jobs: number of threads, by default one for each core.
        force: replace an existing output.
        search_path: more folders to search for bases, after the folder of the file.
        progress: receives the number of bytes copied, then decoded.

    Returns:
        Sizes of the new file, and its inline bases.

    Raises:
        FileNotFoundError: no such file.
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base is not found.
        ConfigError: not a `.ckptz` file, or the output exists.
    """
    start, path = working_seconds(), check_not_torch(path_of(path))
    output = None if output is None else file_path(output)
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(contextlib.closing(open_checkpoint(path, to_paths(search_path))))
        container = checkpoint.container
        if container is None:
            what = "a plain safetensors file has no base; name a .ckptz file"
            raise ConfigError(f"{checkpoint.name}: {what}")
        target = output or path
        if output is not None:
            check_target(output, checkpoint.paths, force=force)
        tensors, bases = self_contained(checkpoint)
        n_decoded = tensor_bytes(checkpoint.tensors)
        is_changed = output is not None or container.outer_base is not None
        if is_changed:
            workers = stack.enter_context(Workers(jobs))
            progress.start(checkpoint.name, bytes_to_write(tensors, bases) + n_decoded)
            with output_context(target), publish(target, [path]) as sink:
                write_inline(sink, container, bases, workers, progress.advance, tensors=tensors)
                sink.flush()
                _verify(Path(sink.name), target, container.index.content_id, workers, progress)
        return RebaseReport(
            input=checkpoint.name,
            output=str(target),
            is_changed=is_changed,
            bases=tuple(
                InlineReport(file=base.file, content_id=base.content_id, n_tensors=len(base.tensors))
                for base in bases
            ),
            depth=len(bases),
            n_tensors=len(checkpoint.tensors),
            tensor_bytes=n_decoded,
            stored_bytes=target.stat().st_size,
            chain_bytes=sum(file.stored_bytes for file in checkpoint.files),
            content_id=container.index.content_id,
            seconds=working_seconds() - start,
        )


def _verify(written: Path, target: Path, content_id: str, workers: Workers, progress: Progress) -> None:
    """Read back an unpublished file without its bases; errors name `target`."""
    source = FileBytes(written)
    source.name = str(target)
    with contextlib.closing(open_checkpoint(source)) as checkpoint:
        if checkpoint.content_id() != content_id:
            raise CorruptionError(
                f"{target}: the new file reads back wrong and was discarded; nothing was replaced"
            )
        check_stored_bytes(checkpoint, workers)
        for _ in decoded_chunks(workers, progress)(checkpoint.tensors):
            pass  # decoding a chunk checks its checksum
