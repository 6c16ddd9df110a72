"""`ckptz rebase`: a delta as a file that needs no other, of the same values and codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptz.api.read import decoded_chunks
from ckptz.codec.restored import CachedTensor
from ckptz.errors import ConfigError, CorruptionError
from ckptz.foreign.inputs import PathLike, check_not_torch, check_target, file_path, output_context, to_paths
from ckptz.format.byte_source import FileBytes, path_of
from ckptz.format.publish import publish
from ckptz.format.reader import Container, FrameSource, GroupMember
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.kernels.clock import working_seconds
from ckptz.parallel import SILENT, Progress, Workers
from ckptz.store.resolve import Checkpoint, open_checkpoint, open_source
from ckptz.verbs.verify import check_stored_bytes
from ckptz.words import Report
from ckptz.write.inline_writer import NeededBase, bytes_to_write, write_inline

Tensors = Mapping[str, TensorSource]


def standing_alone(checkpoint: Checkpoint) -> tuple[Tensors, tuple[NeededBase, ...]]:
    """Return the tensors of a checkpoint for a self-contained file, and the bases they need, nearest first.

    Frames with codes stay as they are, since the contexts of later deltas may be these codes, and so do
    frames without a base. All others are given as values, to be encoded anew: that takes less room than
    what they are made from.

    Raises:
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base lacks a tensor that is needed.
    """
    needed: list[NeededBase] = []
    own = above = _kept_or_anew(checkpoint.tensors)
    for base in _bases(checkpoint):
        needing = (n for n, s in above.items() if isinstance(s, FrameSource) and s.header.plan.needs_base)
        names = _with_context_tensors(needing, base.tensors)
        if not names:
            break
        above = _kept_or_anew({name: source for name, source in base.tensors.items() if name in names})
        needed.append(NeededBase(content_id=base.content_id, file=base.file, tensors=above))
    return own, tuple(needed)


def _kept_or_anew(tensors: Tensors) -> Tensors:
    """Keep frames with codes; turn lossless deltas, and what shares a frame, into plain values."""
    for source in tensors.values():
        if isinstance(source, FrameSource):
            source.check_base()
    return {
        name: CachedTensor.of_frame(one) if isinstance(one, FrameSource) and _is_anew(one) else one
        for name, one in tensors.items()
    }


def _is_anew(frame: FrameSource) -> bool:
    is_delta = frame.header.plan.needs_base and frame.header.plan.quant_map is None
    return is_delta or isinstance(frame, GroupMember)


def _bases(checkpoint: Checkpoint) -> Iterator[NeededBase]:
    """Yield every base of the chain with all its tensors: files, and what they carry within."""
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
    """Add to `names` the tensors beside them that their contexts are made of, as far as they are there."""
    needed: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in needed and name in tensors:
            needed.add(name)
            source = tensors[name]
            waiting += source.context_tensor_names if isinstance(source, FrameSource) else []
    return needed


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineReport:
    """One base that went into the file: what it was called, and its tensors that were needed."""

    file: str
    content_id: str
    n_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RebaseReport(Report):
    """Sizes of a file that `rebase` wrote, and the bases that it holds."""

    input: str  # the delta
    output: str  # the file that stands alone
    is_changed: bool  # False if the input stood alone already and was left as it is
    bases: tuple[InlineReport, ...]  # what it carries within, nearest first
    depth: int  # deltas between the file and its full file, as before
    n_tensors: int  # tensors of the checkpoint
    tensor_bytes: int  # their decoded size
    stored_bytes: int  # size of the output
    chain_bytes: int  # size of all files of the chain that was read
    content_id: str  # identity of the values, which is unchanged
    seconds: float  # time taken, without that of compiling kernels


def rebase(
    path: PathLike,
    output: PathLike | None = None,
    *,
    jobs: int | None = None,
    force: bool = False,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
) -> RebaseReport:
    """Make a delta stand alone.

    Lossless tensors are encoded anew. Frames of quantization maps, whose codes may be contexts of later
    deltas, are copied with those of their bases. The new file is read back whole and every value checked
    against its checksum before it gets its name. Deltas that were made from `path` go on working with it.

    Args:
        path: a `.ckptz` file.
        output: a new file; None replaces `path`, which stays as it is until the new one is verified.
        jobs: threads, all cores by default.
        force: replace an existing output.
        search_path: folders to look for bases in, after the file's own.
        progress: is told of the bytes copied and then of those decoded.

    Raises:
        FileNotFoundError: no such file.
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base is not found.
        ConfigError: a file of another kind, or the output cannot be written.
    """
    start, path = working_seconds(), check_not_torch(path_of(path))
    output = None if output is None else file_path(output)
    with contextlib.ExitStack() as held:
        checkpoint = held.enter_context(contextlib.closing(open_checkpoint(path, to_paths(search_path))))
        container = checkpoint.container
        if container is None:
            what = "a plain safetensors file has no base; rebase takes a .ckptz file"
            raise ConfigError(f"{checkpoint.name}: {what}")
        target = path if output is None else output
        if output is not None:
            check_target(output, checkpoint.paths, force=force)
        tensors, bases = standing_alone(checkpoint)
        n_decoded = tensor_bytes(checkpoint.tensors)
        is_changed = output is not None or container.outer_base is not None
        if is_changed:
            workers = held.enter_context(Workers(jobs))
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
    """Read a file back that has no name yet, by itself; errors name `target`."""
    source = FileBytes(written)
    source.name = str(target)
    with contextlib.closing(open_source(source)) as checkpoint:
        if checkpoint.content_id() != content_id:
            raise CorruptionError(f"{target}: read back, the new file was not right; nothing was replaced")
        check_stored_bytes(checkpoint, workers)
        for _ in decoded_chunks(checkpoint.tensors, workers, progress):
            pass  # each was held against its checksum
