"""Files of `torch.save`: `.pt`, `.pth`, `.bin`. Read and written without running code from them.

torch is imported when one is read or written, and not before.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from ckptz.codec.units import TensorSource
from ckptz.container.publish import publish
from ckptz.errors import CkptzError, ConfigError, FormatError, UnsupportedError, named
from ckptz.tree.flatten import Flat, flatten
from ckptz.tree.unflatten import Chunks, read_chunks, unflatten

ZIP_MAGIC: Final = b"PK\x03\x04"
LEGACY_MAGIC: Final = b"\x80\x02\x8a\x0a"  # a pickled long, the first thing in a file of torch before 1.6
TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
_WANTED: Final = re.compile(r"Unsupported global: GLOBAL (\S+)")


def require_torch(path: Path) -> Any:
    """The torch module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import torch  # only torch files need it
    except ImportError:
        raise ConfigError(f"{path}: torch files need torch; install ckptz[torch]") from None
    return torch


def read(path: Path) -> Flat:
    """Tensors by name and the tree of a torch file.

    The file stays mapped while the tensors are used, so they take no memory of their own; the form of
    torch before 1.6 is read into memory.

    Raises:
        FileNotFoundError: no such file.
        FormatError: damaged, or not a torch file.
        UnsupportedError: it needs code, or holds what the tree has no place for.
    """
    state = load_state(path)
    try:
        return flatten(state)
    except CkptzError as error:
        raise named(error, str(path)) from None


def load_state(path: Path) -> Any:
    """What `torch.load(weights_only=True)` gives, its tensors on the CPU and mapped where possible."""
    torch = require_torch(path)
    is_zip = _is_plain_zip(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own internals
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch has no error class of its own for damaged files
        _refuse(path, error)


def _refuse(path: Path, error: Exception) -> NoReturn:
    text = str(error)
    if wanted := _WANTED.search(text):
        raise UnsupportedError(
            f"{path}: it needs code to load ({wanted[1]}), which ckptz does not run; "
            "save a plain state_dict: torch.save(model.state_dict(), ...)"
        ) from None
    if "TorchScript" in text:
        raise UnsupportedError(
            f"{path}: a TorchScript program, not a checkpoint; save a plain state_dict of it"
        ) from None
    reason = (text.strip().splitlines() or [""])[-1][:120]
    raise FormatError(
        f"{path}: damaged, or not a file of torch.save ({type(error).__name__}: {reason}); "
        "try an intact copy, or save a plain state_dict"
    ) from None


def _is_plain_zip(path: Path) -> bool:
    """Whether this is the form that torch can map; its pickle is checked, which torch does not do."""
    with path.open("rb") as file:
        head = file.read(len(ZIP_MAGIC))
        if not head:
            raise FormatError(f"{path}: the file is empty; try an intact copy")
        if head != ZIP_MAGIC:
            return False
        try:
            with zipfile.ZipFile(file) as archive:
                _check_records(path, archive)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            if isinstance(error, CkptzError):
                raise
            raise FormatError(f"{path}: cut or damaged ({error}); try an intact copy") from None
    return True


def _check_records(path: Path, archive: zipfile.ZipFile) -> None:
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED:
            # Mapped, such a file would be read as garbage; torch.save never writes one.
            raise UnsupportedError(f"{path}: its records are compressed; save it again with torch.save")
        if record.filename.endswith("/data.pkl") and record.CRC:  # 0 where torch was told not to compute it
            with archive.open(record) as stream:
                while stream.read(1 << 20):
                    pass


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
    save_state(path, state, like)


def save_state(path: Path, state: Any, like: Iterable[Path] = ()) -> None:
    """`torch.save`, with the file appearing whole or not at all."""
    with publish(path, like) as file:
        dump_state(file, state, path)


def dump_state(file: BinaryIO, state: Any, path: Path) -> None:
    """`torch.save` into a file that will be `path`, which errors name."""
    torch = require_torch(path)
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None  # what the system said, hidden by torch's own writer
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: torch cannot save this ({reason}); restore to safetensors") from None
