"""`ckptz restore`: back to the kind of file that was compressed, bit for bit."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from numpy.typing import NDArray

from ckptz.codec.units import TensorSource, chunk_bounds
from ckptz.container.plain import plain_regions, write_plain
from ckptz.container.publish import make_folder, publish
from ckptz.container.reader import check_empty
from ckptz.errors import ConfigError, FormatError, LimitError
from ckptz.formats import torch_files
from ckptz.formats.dcp import write_dcp
from ckptz.formats.inputs import Input, open_input
from ckptz.formats.portable import check_holds
from ckptz.formats.sharding import write_folder, written_files
from ckptz.formats.targets import (
    PathLike,
    check_carried,
    check_target,
    naming_output,
    paths,
    places_for,
    stem_of,
)
from ckptz.parallel import Workers
from ckptz.progress import SILENT, Progress
from ckptz.store.resolve import PLAIN_SUFFIX, Checkpoint
from ckptz.tree.unflatten import Chunks

Kind = Literal["safetensors", "pt", "dcp"]
Written = Literal["safetensors", "pt", "dcp", "folder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was restored.

    Attributes:
        input: what was read.
        output: what was written.
        kind: "safetensors", "pt", "dcp" or "folder".
        n_tensors: tensors in it.
        tensor_bytes: their size.
        stored_bytes: size of all files of the chain.
        n_files: how many there are.
        content_id: identity of the values.
        depth: deltas between the input and its anchor.
        seconds: time taken.
        notes: what the user should know.
    """

    input: str
    output: str
    kind: Written
    n_tensors: int
    tensor_bytes: int
    stored_bytes: int
    n_files: int
    content_id: str
    depth: int
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Chunk:
    source: TensorSource
    begin: int
    end: int

    def units(self) -> NDArray[Any]:
        return self.source.units(self.begin, self.end)


def decoded_chunks(
    tensors: Mapping[str, TensorSource], workers: Workers, progress: Progress = SILENT
) -> Iterator[NDArray[Any]]:
    """Units of all tensors in order, chunk after chunk, decoded on threads; a few are in flight."""
    for units in workers.map(_Chunk.units, _chunks(tensors)):
        yield units
        progress.advance(units.nbytes)


def _chunks(tensors: Mapping[str, TensorSource]) -> Iterator[_Chunk]:
    for source in tensors.values():
        check_empty(source)
        for begin, end in chunk_bounds(source.dtype.n_units(source.shape)):
            yield _Chunk(source, begin, end)


def restore(
    path: PathLike,
    output: PathLike | None = None,
    *,
    to: Kind | None = None,
    jobs: int | None = None,
    force: bool = False,
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    progress: Progress = SILENT,
) -> RestoreReport:
    """Write what a `.ckptz` file holds, as it was before compression.

    Args:
        path: a `.ckptz` file; its bases are looked for in its folder.
        output: a file, or a folder if folders of shards were compressed; by default beside `path`.
        to: what to write; by default what was compressed.
        jobs: threads, all cores by default.
        force: replace an existing output.
        search_path: folders to look for bases in, after the file's own.
        max_decoded_bytes: refuse files that decode to more; by default the free disk of the output.
        progress: is told of the bytes written.

    Raises:
        FileNotFoundError: no such file.
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base is not found.
        LimitError: the output would not fit.
        ConfigError: the output exists or would replace a file that is read.
        UnsupportedError: a folder whose file names this system cannot hold.
    """
    start, path, output = time.perf_counter(), Path(path), None if output is None else Path(output)
    with contextlib.closing(open_input(path, paths(search_path))) as opened:
        checkpoint = _require_ckptz(opened, path)
        kind = _kind_of(opened, to)
        target = _target_of(opened, path, output, kind, force=force)
        n_bytes = sum(t.dtype.n_bytes(t.shape) for t in opened.tensors.values())
        _check_size(opened.name, n_bytes, target, kind, max_decoded_bytes)
        progress.start(opened.name, n_bytes)
        with Workers(jobs) as workers, naming_output(target):
            _WRITERS[kind](target, opened, lambda tensors: decoded_chunks(tensors, workers, progress))
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
            seconds=time.perf_counter() - start,
            notes=_notes(opened, kind),
        )


def _require_ckptz(opened: Input, path: Path) -> Checkpoint:
    if opened.kind != "ckptz" or opened.checkpoint is None:
        raise FormatError(f"{path}: not a .ckptz file, so there is nothing to restore")
    return opened.checkpoint


def _kind_of(opened: Input, asked: Kind | None) -> Written:
    if asked in ("pt", "dcp") and opened.sharding is not None and opened.tree is not None:
        raise ConfigError(f"{opened.name}: was a folder of torch files; restore it without --to")
    if asked is not None:
        return asked
    if opened.sharding is not None:
        return "folder"
    return "pt" if opened.tree is not None else "safetensors"


def _target_of(opened: Input, path: Path, output: Path | None, kind: Written, *, force: bool) -> Path:
    """The file or folder to write; nothing in its place may be lost."""
    assert opened.checkpoint is not None
    read = [Path(file.name) for file in opened.checkpoint.files]
    if kind == "dcp":
        target = path.with_name(f"{stem_of(path)}.dcp") if output is None else output
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target}: is not an empty folder; name a new one with -o")
        return target
    if kind != "folder":
        [target] = places_for([path], output, _SUFFIXES[kind])
        check_target(target, read, force=force)
        return target
    folder = path.parent if output is None else output
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: a folder of shards is restored here, and this is a file; use -o FOLDER")
    assert opened.sharding is not None
    make_folder(folder, parents=False)
    check_holds(folder, written_files(opened.sharding))
    for file in set(written_files(opened.sharding)) - set(opened.sharding.carried):
        check_target(folder / file, read, force=force)
    check_carried(opened.carried, folder, force=force)
    return folder


def _check_size(name: str, n_bytes: int, target: Path, kind: Written, max_decoded_bytes: int | None) -> None:
    """Refuse before the first byte is written; a few stored bytes may announce terabytes."""
    if max_decoded_bytes is not None and n_bytes > max_decoded_bytes:
        raise LimitError(
            f"{name}: decodes to {n_bytes} bytes, and {max_decoded_bytes} are allowed; "
            "allow more if you trust the file"
        )
    folder = target if kind == "folder" else target.absolute().parent
    needed, free = n_bytes * (2 if kind in ("pt", "dcp") else 1), shutil.disk_usage(folder).free
    if needed > free:  # torch files are decoded to an unnamed file first
        raise LimitError(
            f"{name}: restoring takes {needed} bytes, and {folder} has {free} free; "
            "free some space, or restore elsewhere with -o"
        )


def _notes(opened: Input, kind: Written) -> tuple[str, ...]:
    if kind == "folder" and opened.left_out:
        return (f"files that belong to the folder were not found: {', '.join(opened.left_out)}",)
    if kind != "folder" and opened.sharding is not None:
        return (f"was a folder of {len(opened.sharding.shards)} shards; this is one file",)
    return ()


def _write_safetensors(target: Path, opened: Input, chunks: Chunks) -> None:
    with publish(target, [Path(opened.name)]) as sink:
        write_plain(sink, plain_regions(opened.tensors), opened.metadata, chunks(opened.tensors))


def _write_torch(target: Path, opened: Input, chunks: Chunks) -> None:
    torch_files.write(target, opened.tensors, opened.tree, chunks, [Path(opened.name)])


def _write_dcp(target: Path, opened: Input, chunks: Chunks) -> None:
    write_dcp(target, opened.tensors, opened.tree, chunks, [Path(opened.name)])


def _write_folder(target: Path, opened: Input, chunks: Chunks) -> None:
    assert opened.sharding is not None
    write_folder(
        target,
        opened.tensors,
        opened.sharding,
        tree=opened.tree,
        carried=opened.carried,
        chunks=chunks,
        like=[Path(opened.name)],
    )


_WRITERS: Final[Mapping[Written, Callable[[Path, Input, Chunks], None]]] = {
    "safetensors": _write_safetensors,
    "pt": _write_torch,
    "dcp": _write_dcp,
    "folder": _write_folder,
}
_SUFFIXES: Final[Mapping[Written, str]] = {"safetensors": PLAIN_SUFFIX, "pt": ".pt"}
