"""Residual files, which hold the values of a lossy file without loss for as long as its step stays exact.

The residual of model.ckptz is called model.exact-9be27a01c35d8f64.ckptz, by a digest of the index of the very
file that it belongs to: a file that is replaced by another of its name is exact at every moment. In the
folder of a Checkpointer no file is replaced, so a residual is found there by its step, whatever its digest:
a rebase of the lossy file changes that. Earlier versions called it step-00000100.exact.ckptz.
"""

from __future__ import annotations

import glob
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ckptz.errors import CorruptionError, FormatError, MissingBaseError
from ckptz.format.byte_source import open_bytes
from ckptz.format.suffixes import SUFFIX
from ckptz.run.links import index_digest
from ckptz.run.step_files import (
    EARLIER_RESIDUAL,
    EXACT_OF_KEY,
    RESIDUAL_MARK,
    FileFacts,
    StepFile,
    is_residual_name,
    lossy_stem,
)

T = TypeVar("T")
F = TypeVar("F")


def residual_of(path: Path, named: Path | None = None) -> Path:
    """Return the path of the residual of a file, which may or may not exist.

    Args:
        path: the lossy file.
        named: its future path, if it is a temporary file now.
    """
    named = path if named is None else named
    return named.with_name(f"{named.stem}{residual_tail(path)}{SUFFIX}")


def residual_tail(path: Path) -> str:
    """Return the end of the stem of a lossy file's residual."""
    return f"{RESIDUAL_MARK}{index_digest(path)}"


def residuals_of(path: Path) -> list[Path]:
    """List the residuals of a file, and those of earlier files of the same name."""
    files = path.parent.glob(f"{glob.escape(path.stem)}{RESIDUAL_MARK}*{SUFFIX}")
    return sorted(file for file in files if lossy_stem(file.stem) == path.stem)


def residuals_in(folder: Path) -> list[Path]:
    """List the residuals of all files of a folder."""
    return sorted(file for file in folder.glob(f"*{RESIDUAL_MARK}*") if is_residual_name(file.name))


def find_residual(file: Path) -> Path | None:
    """Return the residual of a lossy file, or None if there is none.

    The residual of a symbolic link may be beside the link or beside its target.
    """
    for path in dict.fromkeys((file, file.resolve())):
        step_file = StepFile.parse(path.name)
        if step_file is None:
            residuals = [residual for residual in (residual_of(path),) if residual.exists()]
        else:
            siblings = path.parent.glob(f"{path.stem}{EARLIER_RESIDUAL}*{SUFFIX}")
            residuals = sorted(one for one in siblings if StepFile.parse(one.name) is not None)
        if residuals:
            return residuals[-1]
    return None


def residual_or_file(file: Path) -> Path:
    """Return the residual of a lossy file, or the file itself if it has none.

    Raises:
        CorruptionError: the residual belongs to other values.
        FormatError: a file is damaged.
    """
    exact = find_residual(file)
    if exact is None:
        return file
    lossy, residual = FileFacts.read(open_bytes(file)), FileFacts.read(open_bytes(exact))
    of = None if residual is None else residual.metadata.get(EXACT_OF_KEY)
    if lossy is not None and of != lossy.content_id:
        raise CorruptionError(f"{exact}: belongs to other values than {file.name} holds; name {file} itself")
    return exact


def read_exact_or_lossy(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file exactly if it has a readable residual, else as it is; see `with_fallback`."""
    residual = find_residual(path)
    return read(path) if residual is None else with_fallback(residual, path, read, f"{path}: is")[0]


def with_fallback(exact: F, lossy: F, read: Callable[[F], T], what: str) -> tuple[T, str | None]:
    """Read residual files; if one is damaged, warn and read the lossy files instead.

    Args:
        exact: the residual files.
        lossy: the lossy files.
        read: reads either of them.
        what: beginning of the warning, such as "step 100 is".

    Returns:
        The result of `read`, and the text of the warning or None.
    """
    try:
        return read(exact), None
    except (FormatError, MissingBaseError, FileNotFoundError) as error:
        note = f"{what} restored with what it loses: {error}"
        warnings.warn(note, RuntimeWarning, stacklevel=4)
    return read(lossy), note
