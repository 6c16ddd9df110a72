"""What saving has in common for all frameworks: checks, order, and the way to the writer."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO, Final

from ckptz.codec.units import UnitSource
from ckptz.config import Config
from ckptz.container.contents import Contents
from ckptz.container.publish import publish
from ckptz.container.writer import check_names, write_container
from ckptz.convert.guides import NO_FILES, guides_of
from ckptz.errors import ConfigError, WriteError
from ckptz.handle import PathLike, checked_path
from ckptz.parallel import Workers
from ckptz.store.resolve import Checkpoint, base_ref, open_checkpoint

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
            raise TypeError(f"metadata {key!r}: {value!r} is not text on both sides; keys and values are str")
        (key + value).encode()


def check_tensor_names(tensors: Mapping[str, Any]) -> None:
    """Refuse names that cannot be written.

    Raises:
        TypeError: a name is no str.
        UnicodeEncodeError: a name is no valid text.
        ConfigError: a name is reserved.
    """
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"a tensor name is a str, got {name!r}")
        name.encode()
    check_names(list(tensors))


def save_to_bytes(
    tensors: Mapping[str, UnitSource], metadata: Mapping[str, str] | None, config: Config, jobs: int | None
) -> bytes:
    """The bytes of a `.ckptz` file."""
    sink = io.BytesIO()
    _write(sink, tensors, metadata, config, None, jobs)
    return sink.getvalue()


def save_to_file(
    tensors: Mapping[str, UnitSource],
    filename: PathLike,
    metadata: Mapping[str, str] | None,
    config: Config,
    base: PathLike | None,
    jobs: int | None,
) -> None:
    """Write a `.ckptz` file, as a delta if there is a base; it appears whole or not at all."""
    path = checked_path(filename)
    check_texts(metadata)
    if base is None:
        _publish(path, tensors, metadata, config, None, jobs)
        return
    opened = open_checkpoint(checked_path(base))
    try:
        if os.path.exists(path) and os.path.samefile(path, base):
            raise ConfigError(f"{path}: a delta cannot take the place of its base; save under another name")
        _publish(path, tensors, metadata, config, opened, jobs)
    finally:
        opened.close()


def _publish(
    path: str,
    tensors: Mapping[str, UnitSource],
    metadata: Mapping[str, str] | None,
    config: Config,
    base: Checkpoint | None,
    jobs: int | None,
) -> None:
    try:
        with publish(path) as sink:
            _write(sink, tensors, metadata, config, base, jobs)
    except OSError as error:
        raise WriteError(error.errno, f"{path}: could not be saved: {error.strerror or error}") from error


def _write(
    sink: BinaryIO,
    tensors: Mapping[str, UnitSource],
    metadata: Mapping[str, str] | None,
    config: Config,
    base: Checkpoint | None,
    jobs: int | None,
) -> None:
    check_texts(metadata)
    if not isinstance(config, Config):
        raise ConfigError(f"config must be a configuration such as ckptz.LOSSLESS, got {config!r}")
    contents = Contents(
        metadata=metadata,
        base=None if base is None else base_ref(base),
        bases={} if base is None else base.tensors,
        config=config,
    )
    # Nothing stays open: what guides here stands in the checkpoint itself.
    guided = guides_of(tensors, contents, NO_FILES, contextlib.ExitStack())
    contents = replace(contents, guides=guided.guides)
    ordered = sorted(tensors.items(), key=lambda item: (_LAYOUT.index(item[1].dtype.name), item[0]))
    with Workers(jobs) as workers:
        write_container(sink, dict(ordered), contents, workers)
