"""Residuals: files beside lossy ones that hold the same without loss, for as long as a step stays exact.

That of model.ckptz is called model.exact-9be27a01c35d8f64.ckptz, by the digest of the very file that it
belongs to; a Checkpointer's names say which step is meant, step-00000100.exact.ckptz.
"""

from __future__ import annotations

import glob
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ckptz.errors import CorruptionError, FormatError, MissingBaseError
from ckptz.format.byte_source import open_bytes
from ckptz.run.links import digest_of
from ckptz.run.names import EXACT
from ckptz.run.step_files import EXACT_OF_KEY, FileFacts, StepFile
from ckptz.store.resolve import SUFFIX

T = TypeVar("T")
F = TypeVar("F")


def residual_of(path: Path, named: Path | None = None) -> Path:
    """Return the path of the residual file of `path`, whether it exists or not.

    `named` is what the file will be called, if it has another name now.
    """
    named = path if named is None else named
    return named.with_name(f"{named.stem}{EXACT}{digest_of(path)}{SUFFIX}")


def residuals_of(path: Path) -> list[Path]:
    """List the residuals of a file, and of others that had its name."""
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}{EXACT}*{SUFFIX}"))


def existing_residual_of(file: Path) -> Path | None:
    """Return the residual of a lossy file, or None if there is none.

    The residual of a symbolic link may be beside the link or beside its target.
    """
    for path in dict.fromkeys((file, file.resolve())):
        step_file = StepFile.parse(path.name)
        exact = residual_of(path) if step_file is None else path.with_name(step_file.exact.name)
        if exact.exists():
            return exact
    return None


def exact_of(file: Path) -> Path:
    """Return the residual file that makes a lossy file exact, if there is one; else the file itself.

    Raises:
        CorruptionError: the residual is one of other values.
        FormatError: a file is damaged.
    """
    exact = existing_residual_of(file)
    if exact is None:
        return file
    lossy, residual = FileFacts.read(open_bytes(file)), FileFacts.read(open_bytes(exact))
    of = None if residual is None else residual.metadata.get(EXACT_OF_KEY)
    if lossy is not None and of != lossy.content_id:
        raise CorruptionError(f"{exact}: belongs to other values than {file.name} holds; name {file} itself")
    return exact


def read_exact_or_lossy(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file that a `Chain` wrote by its residual, or as it is if there is none; see `exactly`."""
    residual = existing_residual_of(path)
    return read(path) if residual is None else exactly(residual, path, read, f"{path}: is")[0]


def exactly(exact: F, lossy: F, read: Callable[[F], T], what: str) -> tuple[T, str | None]:
    """Read what residuals make exact; where one fails a check, the lossy files, with a warning.

    Args:
        exact: residuals.
        lossy: what they belong to.
        read: reads one or the other.
        what: begins the warning, such as "step 100 is".

    Returns:
        What was read, and the warning, if there was one.
    """
    try:
        return read(exact), None
    except (FormatError, MissingBaseError, FileNotFoundError) as error:
        note = f"{what} restored with what it loses: {error}"
        warnings.warn(note, RuntimeWarning, stacklevel=4)
    return read(lossy), note
