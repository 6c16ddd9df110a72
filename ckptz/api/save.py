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
from ckptz.codec.effort import EffortName, effort_of
from ckptz.errors import ConfigError, WriteError
from ckptz.format.byte_source import path_of
from ckptz.format.publish import is_same, publish
from ckptz.format.sources import TensorSource
from ckptz.parallel import Workers
from ckptz.store.resolve import Checkpoint, base_metadata, base_ref, open_checkpoint

if TYPE_CHECKING:
    from ckptz.codec.method import Method

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


def save_to_bytes(
    tensors: Mapping[str, TensorSource],
    metadata: Mapping[str, str] | None,
    config: Method | None,
    jobs: int | None,
    effort: EffortName,
) -> bytes:
    """Return the bytes of a `.ckptz` file with some tensors."""
    check_texts(metadata)
    sink = io.BytesIO()
    _write(sink, tensors, metadata, config, None, jobs, effort)
    return sink.getvalue()


def save_to_file(
    tensors: Mapping[str, TensorSource],
    filename: PathLike,
    metadata: Mapping[str, str] | None,
    config: Method | None,
    base: PathLike | None,
    jobs: int | None,
    effort: EffortName,
    tree: dict[str, Any] | None = None,
) -> None:
    """Write a `.ckptz` file atomically, as a delta if there is a base.

    With the `tree` of a nested state, the order of tensors is kept, and their roles are derived from it.
    """
    path = os.fspath(filename)
    check_texts(metadata)
    effort_of(effort)
    with contextlib.ExitStack() as held:
        opened = None
        if base is not None:
            opened = held.enter_context(contextlib.closing(open_checkpoint(checked_path(base))))
            if any(is_same(file, path_of(path)) for file in opened.paths):
                what = "a delta cannot take the place of its base, nor of what that is stored against"
                raise ConfigError(f"{path}: {what}; save under another name")
        try:
            with publish(path) as sink:
                _write(sink, tensors, metadata, config, opened, jobs, effort, tree)
        except OSError as error:
            raise WriteError(error.errno, f"{path}: could not be saved: {error.strerror or error}") from error


def _write(
    sink: BinaryIO,
    tensors: Mapping[str, TensorSource],
    metadata: Mapping[str, str] | None,
    config: Method | None,
    base: Checkpoint | None,
    jobs: int | None,
    effort: EffortName,
    tree: dict[str, Any] | None = None,
) -> None:
    from ckptz.write.job import WriteJob
    from ckptz.write.writer import write

    job = WriteJob(tensors=tensors, tree=tree, metadata=metadata, effort=effort)
    if tree is None:
        ordered = sorted(tensors.items(), key=lambda item: (_LAYOUT.index(item[1].dtype.name), item[0]))
        # Roles are derived from names only, since notes about unknown owners would not be shown here.
        job = replace(job, tensors=dict(ordered), roles={})
    if base is not None:
        job = replace(job, base=base_ref(base), bases=base.tensors, base_metadata=base_metadata(base))
    # Lossless methods need no side information.
    job = replace(job, guides={}) if config is None else replace(job, config=config)
    with Workers(jobs) as workers:
        write(sink, job, workers)
