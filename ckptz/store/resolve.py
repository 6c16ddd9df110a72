"""Opens a checkpoint with its whole chain. Implements spec/07-chain.md#resolution.

A delta names its base by content id and by a file name, which is only a hint: one path component,
looked for in the delta's own folder and in the search path; of a symbolic link, also beside the file that
it leads to. Nothing outside these folders is opened.
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

MAX_DEPTH: Final = MAX_INLINE  # normative, spec/07-chain.md#depth
SUFFIX: Final = ".ckptz"
PLAIN_SUFFIX: Final = ".safetensors"
MAX_NAME_BYTES: Final = 255  # normative, spec/07-chain.md#base-reference

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint, whatever its kind: tensors by name, and the files behind them."""

    name: str  # for messages
    tensors: Mapping[str, TensorSource]  # sources by name, in stored order
    metadata: Mapping[str, str] | None  # the user's own
    container: Container | None  # the `.ckptz` file, or None for a plain file
    files: tuple[Container | PlainFile, ...]  # every open file, this one first, then its base and so on

    @property
    def depth(self) -> int:
        """Deltas between this checkpoint and its full file."""
        return self.container.index.depth if self.container else 0

    @property
    def paths(self) -> list[Path]:
        """The paths of its files."""
        return [path_of(file.name) for file in self.files]

    def content_id(self) -> str:
        """Return the content id; a plain file is read completely for it."""
        return self.container.index.content_id if self.container else content_id_of(self.tensors)

    def hold(self, last: LastChunks | None) -> None:
        """Hold what is decoded of its files for the next one that is stored against them."""
        for file in self.files:
            if isinstance(file, Container):
                file.last = last

    def close(self) -> None:
        """Release all files behind the checkpoint."""
        for file in self.files:
            file.close()


def open_file(source: ByteSource) -> Container | PlainFile:
    """Open one file by what it says it is, `.ckptz` or plain safetensors; close `source` if it is neither."""
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


def open_checkpoint(path: Path_, search_path: Sequence[Path_] = ()) -> Checkpoint:
    """Open a `.ckptz` or `.safetensors` file and, for a delta, its chain, beside it or in `search_path`.

    Beside a symbolic link means both in the link's folder and in that of its target.

    Raises:
        FileNotFoundError: no such file.
        FormatError: a file of the chain is damaged.
        MissingBaseError: a base is not found.
    """
    where = path_of(path)
    return open_source(open_bytes(where), (*folders_beside(where), *map(path_of, search_path)))


def folders_beside(path: Path) -> tuple[Path, ...]:
    """List the folder of a file and, for a symbolic link, also the folder of the file that it leads to."""
    if is_url(path):
        return (path.parent,)
    target = path.resolve().parent
    return (path.parent,) if target == path.parent.resolve() else (path.parent, target)


def open_source(source: ByteSource, folders: Sequence[Path] = ()) -> Checkpoint:
    """Open bytes as a checkpoint; bases are looked for in `folders`."""
    file = open_file(source)
    if isinstance(file, PlainFile):
        return Checkpoint(file.name, file.tensors, file.metadata, None, (file,))
    files: list[Container | PlainFile] = [file]
    with contextlib.ExitStack() as held:
        held.callback(file.close)
        while isinstance(last := files[-1], Container) and (ref := last.index.base) is not None:
            check_reference(last, ref)
            base = _find_base(last, ref, folders)
            held.callback(base.close)
            last.bases = base.tensors
            files.append(base)
            if not is_url(base.name):  # a base may be a link, too, whose own base lies beside its target
                folders = (*folders, *(f for f in folders_beside(Path(base.name)) if f not in folders))
            if isinstance(base, Container):
                base.share_caches(last)
        held.pop_all()
    return Checkpoint(file.name, file.tensors, file.index.metadata, file, tuple(files))


def check_reference(container: Container, ref: BaseRef) -> None:
    """Require that what a delta says of its base can be true: spec/07-chain.md#base-reference."""
    if not 1 <= ref.depth <= MAX_DEPTH:
        raise CorruptionError(f"{container.name}: chain depth {ref.depth} is outside 1..{MAX_DEPTH}")
    if not _is_plain_name(ref.file):
        raise CorruptionError(f"{container.name}: base file name {ref.file[:80]!r} is not a plain file name")


def _is_plain_name(file: str) -> bool:
    try:
        n_bytes = len(file.encode())
    except UnicodeEncodeError:
        return False
    is_printed = not any(c < " " or c == "\x7f" for c in file)
    is_one = file not in ("", ".", "..") and "/" not in file and Path(file).name == file
    return is_one and is_printed and n_bytes <= MAX_NAME_BYTES


def _find_base(delta: Container, ref: BaseRef, folders: Sequence[Path]) -> Container | PlainFile:
    unusable: list[str] = []
    metadata = delta.base_metadata()
    for path in _candidates(ref, folders):
        try:
            file = open_file(open_bytes(path))
        except (CkptzError, OSError) as error:
            unusable.append(str(error))
            continue
        is_base = _is_base(file, delta, ref)
        # A plain base must have the metadata that it had, as far as the delta says what that was.
        is_same = isinstance(file, Container) or metadata in (None, metadata_checksum(file.metadata))
        if is_base and is_same:
            return file
        file.close()
        if is_base:
            unusable.append(f"{path}: its __metadata__ was changed after the delta was made")
        elif path.name == ref.file:
            unusable.append(f"{path} holds another checkpoint")
    raise missing_base(delta.name, ref, unusable)


def missing_base(delta: str, ref: BaseRef, unusable: Sequence[str] = ()) -> MissingBaseError:
    """Make the error for a delta, called `delta`, whose base is not found; `unusable` says what else was."""
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
            others = (path for path in sorted(folder.glob(f"*{suffix}")) if path.name != ref.file)
            yield from (path for path in others if path.is_file())


def _is_base(file: Container | PlainFile, delta: Container, ref: BaseRef) -> bool:
    if isinstance(file, Container):
        return file.index.content_id == ref.content_id and file.index.depth < ref.depth
    # A plain file records no content id: all of it is read, but only if its tensors fit.
    return fits(file, delta) and content_id_of(file.tensors) == ref.content_id


def fits(file: PlainFile, delta: Container) -> bool:
    """Return whether `file` has a fitting base for every tensor of the delta that needs one."""
    for name, source in delta.tensors.items():
        base = file.tensors.get(name)
        if base is not None and (base.dtype, base.shape) == (source.dtype, source.shape):
            continue
        with contextlib.suppress(CkptzError):  # whoever reads a damaged frame is told
            if source.header.plan.needs_base:
                return False
    return True


def base_ref(base: Checkpoint, file: str | None = None) -> BaseRef:
    """Name `base` as a new delta does; `file` is the name that it will have, if it has another one now.

    Raises:
        ConfigError: by a name that no reader would accept.
    """
    file = base_file_name(Path(base.files[0].name if file is None else file))
    return BaseRef(content_id=base.content_id(), file=file, depth=base.depth + 1)


def base_metadata(base: Checkpoint | None) -> int | None:
    """Return the checksum of a plain base's metadata that a delta records; None for other bases."""
    is_plain = base is not None and base.container is None
    return metadata_checksum(base.metadata) if base is not None and is_plain else None


def base_file_name(path: Path) -> str:
    """Return the location of a base as a delta records it.

    Raises:
        ConfigError: a name that is not UTF-8, or has control characters.
    """
    if not _is_plain_name(path.name):
        is_utf8 = sys.getfilesystemencoding() == "utf-8"
        remedy = "rename it to printable UTF-8" + ("" if is_utf8 else ", or set PYTHONUTF8=1 if it is that")
        raise ConfigError(f"{path}: a delta cannot record this file name; {remedy}")
    return path.name
