"""Files of `torch.save`: `.pt`, `.pth`, `.bin`, read and written by torch, without running code from them.

What a file claims is held against what is in it before torch loads it. torch is imported when one is read or
written, and not before.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final

from ckptz.codec.units import TensorSource
from ckptz.container.publish import publish
from ckptz.errors import ConfigError, CorruptionError, FormatError, UnsupportedError, naming
from ckptz.formats.torch_records import LEGACY_MAGIC, ZIP_MAGIC, check_torch
from ckptz.tree.flatten import Flat, flatten
from ckptz.tree.unflatten import Chunks, read_chunks, unflatten

TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")


def require_torch(path: Path) -> Any:
    """Load the torch module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import torch  # only torch files need it
    except ImportError:
        raise ConfigError(f"{path}: torch files need torch; install ckptz[torch]") from None
    return torch


def read(path: Path) -> Flat:
    """Read the tensors by name and the tree of a torch file.

    The file stays mapped while the tensors are used, so they take no memory of their own; the form of
    torch before 1.6 is read into memory.

    Raises:
        FileNotFoundError: no such file.
        FormatError: damaged, or not a torch file.
        UnsupportedError: it needs code, or holds what the tree has no place for.
    """
    state = load_state(path)
    with naming(str(path)):
        return flatten(state, can_share=can_share)


def is_torch_file(path: Path) -> bool:
    """Tell whether a file begins as `torch.save` begins one."""
    with path.open("rb") as file:
        return file.read(len(ZIP_MAGIC)).startswith((ZIP_MAGIC, LEGACY_MAGIC))


def load_state(path: Path) -> Any:
    """Load what `torch.save` was given, its tensors on the CPU and mapped where possible; see `read`."""
    require_torch(path)
    n_bytes = path.stat().st_size
    if not n_bytes:
        raise FormatError(f"{path}: the file is empty; try an intact copy")
    with naming(str(path)), path.open("rb") as file:
        can_map = check_torch(file, n_bytes)
        file.seek(0)
        return _load(path if can_map else file, mmap=can_map)


def load_part(data: bytes) -> Any:
    """Load what `torch.save` wrote as a part of a file.

    Raises:
        FormatError: damaged, or not of `torch.save`.
        UnsupportedError: it needs code, or holds what torch does not load without it.
    """
    check_torch(io.BytesIO(data), len(data))
    return _load(io.BytesIO(data), mmap=False)


def _load(file: Path | BinaryIO, *, mmap: bool) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own internals
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except (OSError, MemoryError):
            raise
        except pickle.UnpicklingError as error:
            raise UnsupportedError(
                f"torch does not load it without running code ({_reason(error)}); save a plain state_dict"
            ) from None
        except Exception as error:  # torch has no type of its own for what it finds wrong
            raise CorruptionError(
                f"torch does not load it ({_reason(error)}): damaged, or not a file of torch.save"
            ) from None


def _reason(error: Exception) -> str:
    """What torch says in one line, which stands after long advice where it does not load something."""
    lines = str(error).rpartition("WeightsUnpickler error: ")[2].strip().splitlines()
    return (lines or [type(error).__name__])[0][:120]


@cache
def can_share(dtypes: frozenset[str]) -> bool:
    """Tell whether torch can save tensors of these types that lie in one memory."""
    import torch

    memory = torch.empty(1, dtype=torch.uint8).untyped_storage()
    types = [getattr(torch, dtype) for dtype in dtypes]
    tensors = [torch.empty(0, dtype=dtype).set_(memory, 0, (0,), (1,)) for dtype in types]
    try:
        torch.save(tensors, io.BytesIO())
    except RuntimeError:
        return False
    return True


def write(
    path: Path,
    tensors: Mapping[str, TensorSource],
    tree: Any,
    chunks: Chunks = read_chunks,
    like: Iterable[Path] = (),
) -> None:
    """Write a torch file; inverse of `read`.

    Args:
        path: appears whole or not at all.
        tensors: by name.
        tree: `Index.tree`, or None for a flat dict of the tensors.
        chunks: gives the units of all tensors in order.
        like: files whose permissions it gets, as `publish` does it.
    """
    require_torch(path)
    state = unflatten(tensors, tree, path.absolute().parent, chunks)
    with publish(path, like) as file:
        dump_state(file, state, path)


def dump_state(file: BinaryIO, state: Any, path: Path) -> None:
    """Write with `torch.save` into a file that will be `path`, which errors name."""
    torch = require_torch(path)
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None  # what the system said, hidden by torch's own writer
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: torch cannot save this ({reason}); restore to safetensors") from None
