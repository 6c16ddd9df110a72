"""Opens a checkpoint with its whole chain. Implements spec/07-chain.md#resolution.

A delta names its base by content id and by a file name, which is only a hint. Bases are searched in the
folder of the delta and in the search path. For a delta behind a symbolic link, the folder of the link's
target is searched too. No other folder is read.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptz.errors import CkptzError, ConfigError, CorruptionError, MissingBaseError
from ckptz.format.byte_source import ByteSource, is_url, open_bytes, path_of
from ckptz.format.caches import LastChunks
from ckptz.format.envelope import PlainFile, metadata_checksum, read_envelope
from ckptz.format.index import MAX_INLINE, RESERVED_PREFIX, BaseRef, content_id_of, is_ckptz
from ckptz.format.reader import Container
from ckptz.format.sources import TensorSource
from ckptz.format.suffixes import PLAIN_SUFFIX, SUFFIX

MAX_DEPTH: Final = MAX_INLINE  # normative, spec/07-chain.md#depth
MAX_NAME_BYTES: Final = 255  # normative, spec/07-chain.md#base-reference

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open `.ckptz` or safetensors checkpoint: its tensors by name, and its open files."""

    name: str  # for messages
    tensors: Mapping[str, TensorSource]  # sources by name, in stored order
    metadata: Mapping[str, str] | None  # of the user
    container: Container | None  # the `.ckptz` file, or None for a plain file
    files: tuple[Container | PlainFile, ...]  # this file, its base, the base's base, ...

    @property
    def depth(self) -> int:
        """Deltas between this checkpoint and its full file."""
        return self.container.index.depth if self.container else 0

    @property
    def paths(self) -> list[Path]:
        """The paths of its files, the newest first."""
        return [path_of(file.name) for file in self.files]

    def content_id(self) -> str:
        """Return the content id; of a plain file it is computed from all its tensors."""
        return self.container.index.content_id if self.container else content_id_of(self.tensors)

    def share_decoded(self, last: LastChunks | None) -> None:
        """Keep decoded chunks of its files in `last`, for the next file that is stored against them."""
        for file in self.files:
            if isinstance(file, Container):
                file.last = last

    def close(self) -> None:
        """Release all files behind the checkpoint."""
        for file in self.files:
            file.close()


def open_file(file: Path_ | ByteSource) -> Container | PlainFile:
    """Open one file, of a path, a URL or bytes, as `.ckptz` or plain safetensors, without its bases.

    Raises:
        FileNotFoundError: no such file.
        FormatError: it is damaged.
    """
    source = file if isinstance(file, ByteSource) else open_bytes(file)
    try:
        envelope = read_envelope(source)
        if is_ckptz(envelope.metadata):
            return Container(source, envelope)
        for region in envelope.regions:
            # One flipped bit in the metadata must not turn frames into tensors of bytes.
            if region.name.startswith(RESERVED_PREFIX):
                what = f"tensor {region.name!r} in a file that is not a .ckptz file"
                raise CorruptionError(f"{source.name}: {what}")
        return PlainFile(source, envelope)
    except BaseException:
        source.close()
        raise


def open_checkpoint(
    path: Path_ | ByteSource, search_path: Sequence[Path_] = (), *, last: LastChunks | None = None
) -> Checkpoint:
    """Open a `.ckptz` or `.safetensors` file and, for a delta, its chain.

    Args:
        path: a local path, a URL, or the bytes of a file.
        search_path: folders in which bases are searched, besides the folder of the file and, for a symbolic
            link, the folder of its target.
        last: keeps decoded chunks of the files for the next file that is stored against them.

    Raises:
        FileNotFoundError: no such file.
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base is not found.
    """
    where = path if isinstance(path, ByteSource) else path_of(path)
    file = open_file(where)
    if isinstance(file, PlainFile):
        return Checkpoint(file.name, file.tensors, file.metadata, None, (file,))
    files: list[Container | PlainFile] = [file]
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        folders = [] if isinstance(where, ByteSource) else list(folders_beside(where))
        folders += map(path_of, search_path)
        while isinstance(delta := files[-1], Container) and (ref := delta.index.base) is not None:
            check_reference(delta, ref)
            base = _find_base(delta, ref, folders)
            stack.callback(base.close)
            delta.bases = base.tensors
            files.append(base)
            if not is_url(base.name):  # a base may be a symbolic link too
                folders += [one for one in folders_beside(Path(base.name)) if one not in folders]
            if isinstance(base, Container):
                base.share_caches(delta)
        stack.pop_all()
    checkpoint = Checkpoint(file.name, file.tensors, file.index.metadata, file, tuple(files))
    if last is not None:
        checkpoint.share_decoded(last)
    return checkpoint


def folders_beside(path: Path) -> tuple[Path, ...]:
    """List the folder of a file and, for a symbolic link, also the folder of its target."""
    if is_url(path):
        return (path.parent,)
    target = path.resolve().parent
    return (path.parent,) if target == path.parent.resolve() else (path.parent, target)


def check_reference(container: Container, ref: BaseRef) -> None:
    """Require a valid depth and file name in a delta's base reference: spec/07-chain.md#base-reference."""
    if not 1 <= ref.depth <= MAX_DEPTH:
        raise CorruptionError(f"{container.name}: chain depth {ref.depth} is outside 1..{MAX_DEPTH}")
    if not _is_plain_name(ref.file):
        raise CorruptionError(f"{container.name}: base file name {ref.file[:80]!r} is not a plain file name")


def _is_plain_name(file: str) -> bool:
    try:
        n_bytes = len(file.encode())
    except UnicodeEncodeError:
        return False
    has_controls = any(c < " " or c == "\x7f" for c in file)
    is_component = file not in ("", ".", "..") and "/" not in file and Path(file).name == file
    return is_component and not has_controls and n_bytes <= MAX_NAME_BYTES


def _find_base(delta: Container, ref: BaseRef, folders: Sequence[Path]) -> Container | PlainFile:
    unusable: list[str] = []
    metadata = delta.base_metadata()
    for path in _candidates(ref, folders):
        with contextlib.ExitStack() as stack:
            try:
                file = open_file(path)
                stack.callback(file.close)
                is_base = _is_base(file, delta, ref)
            except (CkptzError, OSError) as error:
                unusable.append(str(error))
                continue
            # A plain base must have unchanged metadata, if the delta records its checksum.
            is_same = isinstance(file, Container) or metadata in (None, metadata_checksum(file.metadata))
            if is_base and is_same:
                stack.pop_all()
                return file
        if is_base:
            unusable.append(f"{path}: its __metadata__ was changed after the delta was made")
        elif path.name == ref.file:
            unusable.append(f"{path} holds another checkpoint")
    raise missing_base(delta.name, ref, unusable)


def missing_base(delta: str, ref: BaseRef, unusable: Sequence[str] = ()) -> MissingBaseError:
    """Make the error for a delta whose base is not found; `unusable` explains why candidates were refused."""
    reason = f" ({unusable[0]})" if unusable else ""
    return MissingBaseError(
        f"{delta}: its base {ref.title} is not here{reason}; "
        "put the file into the same folder or name its folder with --search-path"
    )


def _candidates(ref: BaseRef, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that may be the base, the likely ones first."""
    yield from (hinted for folder in folders if (hinted := folder / ref.file).is_file())
    for suffix in (SUFFIX, PLAIN_SUFFIX):
        for folder in folders:
            paths = (path for path in sorted(folder.glob(f"*{suffix}")) if path.name != ref.file)
            yield from (path for path in paths if path.is_file())


def _is_base(file: Container | PlainFile, delta: Container, ref: BaseRef) -> bool:
    if isinstance(file, Container):
        return file.index.content_id == ref.content_id and file.index.depth < ref.depth
    # A plain file records no content id; computing it reads the whole file, so shapes are compared first.
    return fits(file, delta) and content_id_of(file.tensors) == ref.content_id


def fits(file: PlainFile, delta: Container) -> bool:
    """Return whether `file` has a tensor of the same dtype and shape for every delta tensor with a base."""
    for name, source in delta.tensors.items():
        base = file.tensors.get(name)
        if base is not None and (base.dtype, base.shape) == (source.dtype, source.shape):
            continue
        with contextlib.suppress(CkptzError):  # reading a damaged frame raises later
            if source.header.plan.needs_base:
                return False
    return True


def base_ref(base: Checkpoint, file: str | None = None) -> BaseRef:
    """Make the reference to `base` that a new delta records.

    Args:
        base: the open base.
        file: its future file name, if it differs from the present one.

    Raises:
        ConfigError: a delta cannot record the file name.
    """
    file = base_file_name(Path(base.files[0].name if file is None else file))
    return BaseRef(content_id=base.content_id(), file=file, depth=base.depth + 1)


def base_metadata(base: Checkpoint | None) -> int | None:
    """Return the checksum of a plain base's metadata that a delta records; None for other bases."""
    is_plain = base is not None and base.container is None
    return metadata_checksum(base.metadata) if base is not None and is_plain else None


def base_file_name(path: Path) -> str:
    """Return the file name of a base for a delta to record.

    Raises:
        ConfigError: the name is not UTF-8, is too long, or has control characters.
    """
    if not _is_plain_name(path.name):
        is_utf8 = sys.getfilesystemencoding() == "utf-8"
        remedy = "rename it to printable UTF-8" + ("" if is_utf8 else ", or set PYTHONUTF8=1")
        raise ConfigError(f"{path}: a delta cannot record this file name; {remedy}")
    return path.name
