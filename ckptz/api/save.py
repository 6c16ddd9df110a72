"""Saves tensors of any framework: checks their names, orders them, and hands them to the writer.

The writer loads with the first save: who only reads needs none of it.
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

# safetensors lays tensors out by falling alignment; files of both list their offset_keys() alike.
_LAYOUT: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)


def check_texts(metadata: Mapping[str, str] | None) -> None:
    """Refuse metadata that is not a dict of text.

    Raises:
        TypeError: a key or a value is no str.
        UnicodeEncodeError: one of them is no valid text.
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
    """Refuse names that are no text; the writer refuses those that are reserved.

    Raises:
        TypeError: a name is no str.
        UnicodeEncodeError: a name is no valid text.
    """
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"a tensor name is a str, got {name!r}")
        name.encode()


def save_to_bytes(
    tensors: Mapping[str, TensorSource],
    metadata: Mapping[str, str] | None,
    config: Method | None,
    jobs: int | None,
    effort: EffortName,
) -> bytes:
    """Make the bytes of a `.ckptz` file."""
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
    """Write a `.ckptz` file, as a delta if there is a base; it appears whole or not at all.

    With the `tree` of a nested state, tensors keep their order, and their roles are found by it.
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
        # Roles follow from names alone: notes on tensors of unknown owners have no reader here.
        job = replace(job, tensors=dict(ordered), roles={})
    if base is not None:
        job = replace(job, base=base_ref(base), bases=base.tensors, base_metadata=base_metadata(base))
    # Nothing guides what loses nothing.
    job = replace(job, guides={}) if config is None else replace(job, config=config)
    with Workers(jobs) as workers:
        write(sink, job, workers)
