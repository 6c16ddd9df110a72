"""`ckptz seal`: checksums of files that are not ours, tensor by tensor, in a small file beside them.

    model.safetensors.ckptz-seal.json    beside a file
    FOLDER/ckptz-seal.json               in a folder, for all of it and its subfolders

Safetensors files are sealed by tensor, other files whole, and folders of `torch.distributed.checkpoint` both
ways. `ckptz verify` finds the seal. No path is ever taken from a seal, so a hostile one leads nowhere.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from ckptz.bits import combine, xxh64, xxh64_of_parts
from ckptz.codec.units import TensorSource
from ckptz.container.byte_source import FileBytes, is_url
from ckptz.container.envelope import Count, PlainFile, strict_json
from ckptz.container.index import Shape, writer_name
from ckptz.container.publish import publish
from ckptz.errors import CkptzError, ConfigError, CorruptionError, SealError, UnsupportedError, named
from ckptz.formats.dcp import METADATA_FILE, dcp_files, open_dcp
from ckptz.formats.folders import find_carried, is_within
from ckptz.formats.sharding import Carried
from ckptz.formats.targets import PathLike, naming_output
from ckptz.pages.shown import Shown
from ckptz.parallel import Workers
from ckptz.progress import SILENT, Progress
from ckptz.store.resolve import PLAIN_SUFFIX, SUFFIX, open_file

SEAL_NAME: Final = "ckptz-seal.json"
FORMAT_NAME: Final = "ckptz-seal"
FORMAT_VERSION: Final = 1
MAX_SEAL_BYTES: Final = 64 << 20
PIECE_BYTES: Final = 8 << 20  # of a whole file, in memory at a time
MAX_NAMED: Final = 20  # differences in one message

Checksum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class SealedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, type and checksum of one tensor; the checksum is the one that a frame of it would record."""

    name: str
    dtype: str
    shape: Shape
    checksum: Checksum


class SealedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file: of safetensors the user's metadata and the tensors, of any other XXH64 over all its bytes.

    The `.metadata` of a folder of torch has its bytes and the tensors of the folder.
    """

    name: str
    n_bytes: Count
    checksum: Checksum | None = None
    metadata: dict[str, str] | None = None
    tensors: tuple[SealedTensor, ...] = ()


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a seal; `checksum` is over the files as compact JSON, so that damage to it shows."""

    format: Literal["ckptz-seal"]
    version: Literal[1]
    writer: str
    checksum: Checksum
    files: tuple[SealedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealReport(Shown):
    """Counts of what one `seal` covers.

    Attributes:
        file: the file or folder.
        seal: the file that was written.
        n_files: files sealed.
        n_tensors: tensors with a checksum of their own.
        file_bytes: size of the files.
        left_out: hidden files, `.ckptz` files, and links and names that no other system could hold.
        seconds: time taken.
    """

    file: str
    seal: str
    n_files: int
    n_tensors: int
    file_bytes: int
    left_out: tuple[str, ...]
    seconds: float


def seal(
    path: PathLike, *, force: bool = False, jobs: int | None = None, progress: Progress = SILENT
) -> SealReport:
    """Write checksums of a file or folder into a file beside it, which `verify` holds it against later.

    Args:
        path: a `.safetensors` file, or a folder of any files; any other file is sealed whole.
        force: replace an existing seal.
        jobs: threads, all cores by default.
        progress: is told of the bytes read.

    Raises:
        FileNotFoundError: nothing there.
        ConfigError: sealed already, or a `.ckptz` file, which holds checksums of its own.
        FormatError: a file is damaged already.
    """
    if is_url(path):
        raise ConfigError(f"{path}: a seal stands beside its files; seal them where they are local")
    start, path = time.perf_counter(), Path(path)
    target = _seal_path(path)
    here, left_out = _files_of(path)
    if not here or _is_ours(path):
        raise ConfigError(f"{path}: nothing to seal; {SUFFIX} files hold checksums, see ckptz verify")
    if os.path.lexists(target) and not force:
        raise ConfigError(f"{target}: exists already; check it with ckptz verify, or replace it by force")
    with Workers(jobs) as workers:
        reading = Reading(workers, progress)
        progress.start(str(path), sum(file.stat().st_size for _, file in here))
        files = [reading.file(name, file) for name, file in here]
        for i, (_, file) in enumerate(here):
            if _is_dcp_metadata(file):
                sources = open_dcp(file.parent)[0].items()
                tensors = tuple(Reading(workers, SILENT).tensor(*source) for source in sources)
                files[i] = msgspec.structs.replace(files[i], tensors=tensors)
    text = _pack(path, tuple(files))
    with naming_output(target), publish(target, like=[file for _, file in here]) as sink:
        sink.write(text)
    return SealReport(
        file=str(path),
        seal=str(target),
        n_files=len(files),
        n_tensors=sum(len(file.tensors) for file in files),
        file_bytes=sum(file.n_bytes for file in files),
        left_out=tuple(left_out),
        seconds=time.perf_counter() - start,
    )


def _is_ours(path: Path) -> bool:
    return path.suffix == SUFFIX and not path.is_dir()


def _seal_path(path: Path) -> Path:
    return path / SEAL_NAME if path.is_dir() else path.with_name(f"{path.name}.{SEAL_NAME}")


def _files_of(path: Path) -> tuple[list[Carried], list[str]]:
    """The files to seal, by path relative to `path`, and the names of those that are left out."""
    if not path.exists():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))
    if not path.is_dir():
        return [(path.name, path)], []
    carried, hidden = find_carried(path, set())
    root = path.resolve()
    of_torch = {name for name in hidden if Path(name).name == METADATA_FILE and is_within(path / name, root)}
    files = [*carried, *((name, path / name) for name in of_torch)]
    own = [(name, file) for name, file in files if not name.endswith(SEAL_NAME)]
    return sorted(own), [name for name in hidden if name not in of_torch]


def _is_dcp_metadata(file: Path) -> bool:
    """Whether this is the `.metadata` of a folder that torch wrote."""
    return file.name == METADATA_FILE and len(dcp_files(file.parent)) > 1


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads files for their checksums; a few chunks are in memory at a time."""

    workers: Workers
    progress: Progress

    def file(self, name: str, path: Path) -> SealedFile:
        """Describe a file; the tensors of a folder of torch are left for the caller."""
        if path.suffix == PLAIN_SUFFIX:
            with contextlib.closing(open_file(FileBytes(path))) as opened:
                if isinstance(opened, PlainFile):
                    tensors = tuple(self.tensor(*item) for item in opened.tensors.items())
                    return SealedFile(name, opened.stored_bytes, None, opened.metadata, tensors)
        with contextlib.closing(FileBytes(path)) as source:
            sizes = ((at, min(PIECE_BYTES, source.size - at)) for at in range(0, source.size, PIECE_BYTES))
            digest = xxh64_of_parts(self._counted(source.read(*piece)) for piece in sizes)
            return SealedFile(name, source.size, f"{digest:016x}")

    def tensor(self, name: str, source: TensorSource) -> SealedTensor:
        """Describe a tensor by its name, dtype, shape and checksum."""

        bounds = source.chunk_bounds()

        def checksum(chunk: tuple[int, int]) -> tuple[int, int]:
            units = source.units(*chunk)
            return xxh64(units), units.nbytes

        def checksums() -> Iterator[int]:
            for found, n_bytes in self.workers.map(checksum, bounds):
                self.progress.advance(n_bytes)
                yield found

        return SealedTensor(name, source.dtype.name, tuple(source.shape), f"{combine(checksums()):016x}")

    def _counted(self, piece: Any) -> Any:
        self.progress.advance(len(piece))
        return piece


# --- the file -----------------------------------------------------------------------------------


def _pack(path: Path, files: tuple[SealedFile, ...]) -> bytes:
    try:
        checksum = f"{xxh64(msgspec.json.encode(files)):016x}"
        made = Seal(FORMAT_NAME, FORMAT_VERSION, writer_name(), checksum, files)
        text = msgspec.json.encode(made) + b"\n"
        _parse(text)
    except UnicodeEncodeError:
        raise ConfigError(f"{path}: its name is not UTF-8; rename it") from None
    except CorruptionError as error:
        raise ConfigError(f"{path}: is too much for one seal: {error}") from None
    return text


def _parse(text: bytes) -> Seal:
    raw = strict_json(text, "seal")
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise CorruptionError("is not a seal of ckptz")
    if raw.get("version") != FORMAT_VERSION:
        raise UnsupportedError(f"seal version {raw.get('version')!r:.20} is not known; upgrade ckptz")
    try:
        found = msgspec.convert(raw, Seal, strict=True)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"seal: {error}") from None
    if f"{xxh64(msgspec.json.encode(found.files)):016x}" != found.checksum:
        raise CorruptionError("the seal itself was changed after it was written; get it anew")
    return found


def _read(path: Path) -> Seal:
    with contextlib.closing(FileBytes(path)) as source:
        if source.size > MAX_SEAL_BYTES:
            raise CorruptionError(f"{path}: larger than {MAX_SEAL_BYTES} bytes; not a seal")
        text = source.read(0, source.size).tobytes()
    try:
        return _parse(text)
    except CkptzError as error:
        raise named(error, str(path)) from None


# --- checking -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundSeal:
    """A seal, and of the files that it speaks of those that are asked for."""

    path: Path
    files: tuple[SealedFile, ...]


def find_seal(path: Path) -> FoundSeal | None:
    """Find the seal of a file or folder: its own, or that of its folder; None if there is none.

    Raises:
        FormatError: the seal is damaged.
        UnsupportedError: it is of a later version.
    """
    if _is_ours(path):
        return None
    own, of_folder = _seal_path(path), path.parent / SEAL_NAME
    if own.is_file():
        files = _read(own).files
        if path.is_dir() or len(files) != 1:
            return FoundSeal(own, files)
        return FoundSeal(own, (msgspec.structs.replace(files[0], name=path.name),))  # both were renamed
    if path.is_dir() or not of_folder.is_file():
        return None
    files = tuple(file for file in _read(of_folder).files if file.name == path.name)
    return FoundSeal(of_folder, files) if files else None


def check_seal(path: Path, found: FoundSeal, reading: Reading) -> None:
    """Hold a file or folder against its seal.

    Raises:
        FileNotFoundError: nothing there.
        SealError: something differs; `differences` has all of it.
    """
    sealed, here = {file.name: file for file in found.files}, dict(_files_of(path)[0])
    reading.progress.start(str(path), sum(file.stat().st_size for file in here.values()))
    problems = {name: ["is missing"] for name in sealed if name not in here}
    problems |= {name: ["is new"] for name in here if name not in sealed}
    both = [name for name in sealed if name in here]
    for name in both:
        problems[name] = list(_problems_of_file(sealed[name], here[name], reading))
    for name in both:
        # Where all bytes are as they were, the tensors of torch need not be read.
        if _is_dcp_metadata(here[name]) and any(problems.values()):
            problems[name] += _problems_of_dcp(sealed[name].tensors, here[name].parent, reading)
    told = [f"{name}: {what}" for name, all_of_it in problems.items() for what in all_of_it]
    if told:
        more = f"; and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
        raise SealError(
            f"{path}: differs from {found.path.name}: {'; '.join(told[:MAX_NAMED])}{more}; get the files "
            "anew, or, if the change was meant, seal them with --force",
            told,
        )


def _problems_of_file(sealed: SealedFile, path: Path, reading: Reading) -> Iterator[str]:
    try:
        found = reading.file(sealed.name, path)
    except CkptzError as error:
        yield f"cannot be read: {error}"
        return
    if found.checksum != sealed.checksum:
        yield f"its bytes differ; it has {found.n_bytes}, {sealed.n_bytes} were sealed"
    elif sealed.checksum is None:
        if found.metadata != sealed.metadata:
            yield "its metadata differ"
        yield from _problems_of_tensors(sealed.tensors, found.tensors)


def _problems_of_tensors(sealed: Sequence[SealedTensor], found: Sequence[SealedTensor]) -> Iterator[str]:
    wanted, here = ({tensor.name: tensor for tensor in tensors} for tensors in (sealed, found))
    for name, tensor in wanted.items():
        if name not in here:
            yield f"tensor {name!r} is missing"
        elif _kind(here[name]) != _kind(tensor):
            yield f"tensor {name!r} is {_kind(here[name])}, {_kind(tensor)} was sealed"
        elif here[name].checksum != tensor.checksum:
            yield f"tensor {name!r} differs"
    yield from (f"tensor {name!r} is new" for name in here if name not in wanted)


def _kind(tensor: SealedTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _problems_of_dcp(sealed: Sequence[SealedTensor], folder: Path, reading: Reading) -> list[str]:
    """Say which tensors differ in a folder that torch.distributed wrote, of which some file differs."""
    unread, found = {}, []
    try:
        sources, _ = open_dcp(folder)
    except CkptzError as error:
        return [f"cannot be read: {error}"]
    for name, source in sources.items():
        try:
            found.append(reading.tensor(name, source))
        except CkptzError as error:
            unread[name] = str(error)
    others = [tensor for tensor in sealed if tensor.name not in unread]
    return [*unread.values(), *_problems_of_tensors(others, found)]
