"""Paths that verbs are called with: conversion of arguments, and choice and checks of output paths."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from ckptz.errors import ConfigError, UnsupportedError
from ckptz.foreign.inputs import stem_of
from ckptz.format.byte_source import is_url, path_of
from ckptz.format.publish import is_same, make_folder
from ckptz.format.suffixes import TEMPORARY_SUFFIX

PathLike: TypeAlias = str | os.PathLike[str]
FORCE: Final = "give --force (force=True) to replace it"


def to_paths(names: Iterable[PathLike]) -> list[Path]:
    """Convert path-like arguments and URLs to paths."""
    return [path_of(name) for name in names]


def output_folder(path: Path) -> Path:
    """Return the default folder for outputs of an input file: its folder; for a URL the working directory."""
    return Path() if is_url(path) else path.parent


def ends_as_folder(output: PathLike | None) -> bool:
    """Return whether an output ends with a separator and so names a folder; a `Path` has no such end."""
    return isinstance(output, str) and output.endswith(("/", os.sep))


def file_path(output: PathLike) -> Path:
    """Return the path of an output that must be a file.

    Raises:
        ConfigError: the name ends with a separator.
    """
    if ends_as_folder(output):
        raise ConfigError(f"{output}: names a folder; name a file")
    return path_of(output)


def output_paths(
    sources: Sequence[Path], output: PathLike | None, suffix: str, *, is_chain: bool = False
) -> list[Path]:
    """Choose the output path of each source.

    Without an output, files are written beside their sources, and folders into themselves. The output is a
    folder, which is created, for chains (more files may follow), for several sources, and if it ends with a
    separator. Names that would collide in it, as of `checkpoint-*/model.safetensors`, get the name of the
    source's folder as a prefix.

    Args:
        sources: input files and folders.
        output: the user's choice.
        suffix: suffix of output files.
        is_chain: the outputs form a chain.

    Raises:
        ConfigError: two sources have the same output path, or several would be written to one file.
    """
    target, is_folder = None if output is None else path_of(output), ends_as_folder(output)
    is_shared = is_chain or len(sources) > 1
    if target is None:
        outputs = [s if s.is_dir() else output_folder(s) / f"{stem_of(s)}{suffix}" for s in sources]
    elif not is_shared and (sources[0].is_dir() or not (is_folder or target.is_dir())):
        outputs = [target]
    elif not target.is_dir() and (target.exists() or (is_shared and target.suffix == suffix)):
        what = "a chain needs" if is_chain else "several inputs need" if is_shared else "the name means"
        raise ConfigError(f"{target}: {what} a folder as output, and this is a file")
    else:
        names = zip(sources, _distinct_stems(sources), strict=True)
        outputs = [target / (stem if source.is_dir() else f"{stem}{suffix}") for source, stem in names]
    for path, n in Counter(outputs).items():
        if n > 1:
            raise ConfigError(f"{path}: {n} inputs would be written here; name their outputs one by one")
    if target is not None and target not in outputs:
        make_folder(target, parents=False)
    return outputs


def _distinct_stems(sources: Sequence[Path]) -> list[str]:
    stems = [stem_of(source) for source in sources]
    counts = Counter(stems)
    return [
        f"{source.absolute().parent.name}-{stem}" if counts[stem] > 1 else stem
        for source, stem in zip(sources, stems, strict=True)
    ]


def check_target(target: Path, read: Iterable[Path], *, force: bool, remedy: str = FORCE) -> None:
    """Require an output path that can be written. Pipes, devices and dangling links are never replaced.

    Args:
        target: the output path.
        read: paths of the inputs.
        force: an existing file may be replaced.
        remedy: what the user can do about an existing file, for the message.

    Raises:
        ConfigError: the output is an input, exists, is a folder, or has no folder.
    """
    for source in read:
        if is_same(target, source):
            raise ConfigError(f"{target}: the output would replace a file that is read; name another")
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; name a file")
    if exists(target):
        if not target.is_file():
            raise ConfigError(f"{target}: exists already and is not a regular file; name another output")
        if not force:
            raise ConfigError(f"{target}: exists already; name another output, or {remedy}")
    if not (is_url(target) or target.parent.is_dir()):
        raise ConfigError(f"{target}: the folder {target.parent} does not exist; create it first")


def exists(path: Path) -> bool:
    """Return whether the path exists; dangling links do."""
    return path.exists() if is_url(path) else os.path.lexists(path)


def check_carried(
    carried: Iterable[tuple[str, Path]], folder: Path, *, force: bool, remedy: str = FORCE
) -> None:
    """Require that copies of (name, file) pairs to `folder` replace no other file.

    Args:
        carried: relative path and source of each file.
        folder: where they are copied to.
        force, remedy: as for `check_target`.

    Raises:
        ConfigError: a file exists.
    """
    for name, source in carried:
        target = folder / name
        if not exists(target) or is_same(target, source):
            continue
        if not target.is_file():
            raise ConfigError(f"{target}: exists already and is not a regular file; name another folder")
        if not force:
            raise ConfigError(f"{target}: exists already; name another folder, or {remedy}")


@contextlib.contextmanager
def output_context(target: Path) -> Iterator[None]:
    """Name `target` in OSErrors without a file name, as of a full disk, or of its temporary file."""
    try:
        yield
    except OSError as error:
        is_target = error.filename is None or str(error.filename).endswith(TEMPORARY_SUFFIX)
        if is_target and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def check_file_names(folder: Path, paths: Iterable[str]) -> None:
    """Require that these relative paths are distinct files on the file system of a folder.

    File systems of macOS and Windows treat some names as equal, such as `A` and `a`; empty files are created
    to test it. Object stores distinguish all names.

    Raises:
        UnsupportedError: two paths are the same file, or the locale cannot encode a path.
    """
    if is_url(folder):
        return
    with tempfile.TemporaryDirectory(dir=folder) as probe:
        for path in paths:
            file = Path(probe) / path
            try:
                make_folder(file.parent)
                file.touch(exist_ok=False)
            except (FileExistsError, NotADirectoryError):
                raise UnsupportedError(
                    f"{folder}: {path!r} and a file before it are one name on this disk; "
                    "restore it on another system, or into one file with --to"
                ) from None
            except UnicodeEncodeError as error:
                raise UnsupportedError(
                    f"{folder}: {path!r} cannot be a file name in this locale ({error.encoding}); set "
                    "PYTHONUTF8=1, or restore into one file with --to"
                ) from None
