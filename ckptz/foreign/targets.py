"""Where a conversion writes: names of outputs, and what is not overwritten."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from ckptz.errors import ConfigError, UnsupportedError
from ckptz.format.byte_source import is_url, path_of
from ckptz.format.publish import is_same, make_folder

PathLike: TypeAlias = str | os.PathLike[str]
FORCE: Final = "give --force (force=True) to replace it"
INPUT_SUFFIXES: Final = (".safetensors", ".ckptz", ".pt", ".pth", ".bin", ".ckpt")


def paths(many: Iterable[PathLike]) -> list[Path]:
    """Make paths of what callers give."""
    return [path_of(one) for one in many]


def stem_of(path: Path) -> str:
    """Give the name without a checkpoint's suffix; other dots belong to the name."""
    # "." and a trailing slash have no name of their own.
    name = path.name if is_url(path) else Path(os.path.abspath(path)).name
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in INPUT_SUFFIXES else name


def beside(path: Path) -> Path:
    """Give the folder for what is made of a file: its own, or the working folder for one behind a URL."""
    return Path() if is_url(path) else path.parent


def ends_as_folder(output: PathLike | None) -> bool:
    """Tell whether an output is written as a folder, with a separator at its end, which a `Path` loses."""
    return isinstance(output, str) and output.endswith(("/", os.sep))


def file_path(output: PathLike) -> Path:
    """Give the path of an output that is one file.

    Raises:
        ConfigError: it is written as a folder.
    """
    if ends_as_folder(output):
        raise ConfigError(f"{output}: is written as a folder; name a file")
    return Path(output)


def places_for(
    sources: Sequence[Path], given: PathLike | None, suffix: str, *, is_chain: bool = False
) -> list[Path]:
    """Choose where each source goes: a file; for a folder a folder, or a file if the output has the suffix.

    Without an output, files go beside their sources, and folders into themselves. Those of a chain always
    share a folder, as there may be more of them later; so do several, and one that is given a name with a
    separator at its end. This folder is made. Where names collide in one folder, as with
    `checkpoint-*/model.safetensors`, the name of the source's folder goes before.

    Raises:
        ConfigError: two sources would go to the same place, or several into a file.
    """
    output, is_folder = None if given is None else path_of(given), ends_as_folder(given)
    is_shared = is_chain or len(sources) > 1
    if output is None:
        places = [s if s.is_dir() else beside(s) / f"{stem_of(s)}{suffix}" for s in sources]
    elif not is_shared and (sources[0].is_dir() or not (is_folder or output.is_dir())):
        places = [output]
    elif not output.is_dir() and (output.exists() or (is_shared and output.suffix == suffix)):
        what = "a chain needs" if is_chain else "several inputs need" if is_shared else "the name means"
        raise ConfigError(f"{output}: {what} a folder as output, and this is a file")
    else:
        names = zip(sources, _distinct_stems(sources), strict=True)
        places = [output / (stem if source.is_dir() else f"{stem}{suffix}") for source, stem in names]
    for place, n in Counter(places).items():
        if n > 1:
            raise ConfigError(f"{place}: {n} inputs would be written here; name their outputs one by one")
    if output is not None and output not in places:
        make_folder(output, parents=False)
    return places


def _distinct_stems(sources: Sequence[Path]) -> list[str]:
    stems = [stem_of(source) for source in sources]
    taken = Counter(stems)
    return [
        f"{source.absolute().parent.name}-{stem}" if taken[stem] > 1 else stem
        for source, stem in zip(sources, stems, strict=True)
    ]


def check_target(target: Path, read: Iterable[Path], *, force: bool, remedy: str = FORCE) -> None:
    """Refuse an output that is one of the files to be read, or that exists, or has no folder.

    Pipes and devices are never replaced, nor links to nothing. `remedy` says what lets an existing one be.

    Raises:
        ConfigError: says which.
    """
    for source in read:
        if is_same(target, source):
            raise ConfigError(f"{target}: the output would replace a file that is read; name another")
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; name a file")
    if os.path.lexists(target):
        if not target.is_file():
            raise ConfigError(f"{target}: exists already and is not a regular file; name another output")
        if not force:
            raise ConfigError(f"{target}: exists already; name another output, or {remedy}")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: the folder {target.parent} does not exist; create it first")


def check_carried(carried: Iterable[tuple[str, Path]], folder: Path, *, force: bool) -> None:
    """Refuse to copy (name, file) pairs over other files of `folder`.

    Raises:
        ConfigError: names the first.
    """
    for name, source in carried:
        target = folder / name
        if not os.path.lexists(target) or is_same(target, source):
            continue
        if not target.is_file():
            raise ConfigError(f"{target}: exists already and is not a regular file; name another folder")
        if not force:
            raise ConfigError(f"{target}: exists already; name another folder, or {FORCE}")


@contextlib.contextmanager
def naming_output(target: Path) -> Iterator[None]:
    """Name `target` in errors of writing that name no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def check_holds(folder: Path, paths: Iterable[str]) -> None:
    """Require that a folder can hold files with these relative paths, each as a file of its own.

    File systems of macOS and Windows take names for one that others tell apart, such as `A` and `a`. So the
    file system itself is asked, with empty files.

    Raises:
        UnsupportedError: names one that would replace another.
    """
    with tempfile.TemporaryDirectory(dir=folder) as probe:
        for path in paths:
            place = Path(probe) / path
            try:
                make_folder(place.parent)
                place.touch(exist_ok=False)
            except FileExistsError:
                raise UnsupportedError(
                    f"{folder}: {path!r} and a file before it are one name on this disk; "
                    "restore it on another system, or into one file with --to"
                ) from None
