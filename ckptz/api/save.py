"""Saves tensors of any framework: checks names, orders tensors and calls the writer.

The writer is imported on the first save, so that programs that only read do not import it.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from ckptz.api.read import PathLike, checked_path
from ckptz.codec.effort import EffortName
from ckptz.errors import ConfigError, WriteError
from ckptz.format.byte_source import path_of
from ckptz.format.publish import is_same, publish
from ckptz.format.sources import TensorSource
from ckptz.parallel import Workers
from ckptz.store.resolve import MAX_DEPTH, base_metadata, base_ref, open_checkpoint

if TYPE_CHECKING:
    from ckptz.codec.method import Method
    from ckptz.write.job import WriteJob

# The layout of safetensors: by decreasing alignment. offset_keys() is then the same for both formats.
_LAYOUT: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)


def check_texts(metadata: Mapping[str, str] | None) -> None:
    """Check that metadata is a dict of str.

    Raises:
        TypeError: a key or a value is not a str.
        UnicodeEncodeError: one of them is not valid Unicode.
    """
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of str, got {type(metadata).__name__}")
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"metadata {key!r}: {value!r}: keys and values must be str")
        (key + value).encode()


def check_tensor_names(tensors: Mapping[str, Any]) -> None:
    """Check that names are valid str; the writer checks for reserved names.

    Raises:
        TypeError: a name is not a str.
        UnicodeEncodeError: a name is not valid Unicode.
    """
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"a tensor name must be a str, got {name!r}")
        name.encode()


def job_of(
    tensors: Mapping[str, TensorSource],
    metadata: Mapping[str, str] | None,
    config: Method | None,
    effort: EffortName,
    tree: dict[str, Any] | None = None,
) -> WriteJob:
    """Return the job that writes some tensors, without a base.

    With the `tree` of a nested state, the order of tensors is kept, and their roles are derived from it.

    Raises:
        TypeError, UnicodeEncodeError: metadata is not a dict of str.
        ConfigError: the effort is unknown.
    """
    from ckptz.write.job import WriteJob

    check_texts(metadata)
    job = WriteJob(tensors=tensors, tree=tree, metadata=metadata, effort=effort)
    if tree is None:
        ordered = sorted(tensors.items(), key=lambda item: (_LAYOUT.index(item[1].dtype.name), item[0]))
        # Roles are derived from names only, since notes about unknown owners would not be shown here.
        job = replace(job, tensors=dict(ordered), roles={})
    # Lossless methods need no side information.
    return replace(job, guides={}) if config is None else replace(job, config=config)


def save_to_bytes(job: WriteJob, jobs: int | None) -> bytes:
    """Return the bytes of the file that a job writes."""
    sink = io.BytesIO()
    _write(sink, job, jobs)
    return sink.getvalue()


def save_to_file(job: WriteJob, filename: PathLike, base: PathLike | None, jobs: int | None) -> None:
    """Write a `.ckptz` file atomically, as a delta if there is a base."""
    path = os.fspath(filename)
    with contextlib.ExitStack() as stack:
        if base is not None:
            opened = stack.enter_context(contextlib.closing(open_checkpoint(checked_path(base))))
            if any(is_same(file, path_of(path)) for file in opened.paths):
                what = "a delta cannot take the place of its base, nor of what that is stored against"
                raise ConfigError(f"{path}: {what}; save under another name")
            if opened.depth >= MAX_DEPTH:
                what = f"ends a chain of {opened.depth} deltas, and readers follow {MAX_DEPTH}"
                raise ConfigError(f"{opened.name}: {what}; leave out base, which saves a full file")
            reference, bases = base_ref(opened), opened.tensors
            job = replace(job, base=reference, bases=bases, base_metadata=base_metadata(opened))
        try:
            with publish(path) as sink:
                _write(sink, job, jobs)
        except OSError as error:
            raise WriteError(error.errno, f"{path}: could not be saved: {error.strerror or error}") from error


def _write(sink: BinaryIO, job: WriteJob, jobs: int | None) -> None:
    from ckptz.write.writer import write

    with Workers(jobs) as workers:
        write(sink, job, workers)
