"""Files of `torch.save`: `.pt`, `.pth`, `.bin`. Read and written without running code from them.

torch is imported when one is read or written, and not before.
"""

from __future__ import annotations

import io
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from ckptz.codec.units import TensorSource
from ckptz.container.publish import publish
from ckptz.errors import CkptzError, ConfigError, FormatError, UnsupportedError, named
from ckptz.formats.pickled import MAX_BYTES, operation_name, symbols_in
from ckptz.tree.flatten import Flat, flatten
from ckptz.tree.unflatten import Chunks, read_chunks, unflatten

ZIP_MAGIC: Final = b"PK\x03\x04"
LEGACY_MAGIC: Final = b"\x80\x02\x8a\x0a"  # a pickled long, the first thing in a file of torch before 1.6
TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
N_PICKLES: Final = 4  # of a file of torch before 1.6 until its state is complete
_WANTED: Final = re.compile(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)")
_OPERAND: Final = re.compile(r"Unsupported operand (\d+)")
# What torch itself writes into the pickle of a plain state, and reads without running code.
_PLAIN: Final = re.compile(
    r"torch\.(\w+|storage\.\w+|(\w+\.)?\w+Storage|_utils\._rebuild_\w+|_tensor\._rebuild_from_type_v2"
    r"|serialization\._get_layout|nn\.parameter\.Parameter)"
    r"|collections\.(OrderedDict|Counter)|_codecs\.encode|(builtins|__builtin__)\.(set|bytearray|complex)"
)
# Files that torch saves and fails to load: with gradients, or in the old form, for types such as float8.
_TORCHS_OWN: Final = re.compile(r"leaf Variable that requires grad|UntypedStorage' has no attribute")


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
        return flatten(state, can_share=can_share)
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
        _refuse(path, error, is_zip)


def _refuse(path: Path, error: Exception, is_zip: bool) -> NoReturn:
    text = str(error)
    if wanted := _code_wanted(path, error, is_zip):
        raise UnsupportedError(
            f"{path}: it needs code to load ({wanted}), which ckptz does not run; "
            "save a plain state_dict: torch.save(model.state_dict(), ...)"
        ) from None
    if _TORCHS_OWN.search(text):
        raise UnsupportedError(
            f"{path}: torch saves this and cannot load it ({text}); detach tensors of such types from their "
            "gradients, and save it in torch's present form"
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


def _code_wanted(path: Path, error: Exception, is_zip: bool) -> str | None:
    """What a file needs that torch's loader does not know: a class, or else an operation of pickle."""
    if wanted := _WANTED.search(str(error)):
        return wanted[1]
    try:
        strangers = [name for name in _symbols(path) if not _PLAIN.fullmatch(name)]
    except (ValueError, zipfile.BadZipFile, KeyError):
        return None  # not whole, so damage explains it
    operand = _OPERAND.search(str(error))
    if strangers or not is_zip or operand is None:
        return strangers[0] if strangers else None
    return f"pickle's {operation_name(int(operand[1]))}"


def _symbols(path: Path) -> list[str]:
    """What the pickle of a torch file names.

    Raises:
        ValueError: not a whole pickle.
    """
    with path.open("rb") as file:
        head = file.read(len(ZIP_MAGIC))
        file.seek(0)
        if head == ZIP_MAGIC:
            with zipfile.ZipFile(file) as archive:
                [record] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                with archive.open(record) as pickled:
                    return symbols_in(io.BytesIO(pickled.read(MAX_BYTES)))
        stream = io.BytesIO(file.read(MAX_BYTES))  # a file would make room for whatever length it claims
        return [name for _ in range(N_PICKLES if head == LEGACY_MAGIC else 1) for name in symbols_in(stream)]


@cache
def can_share(dtypes: frozenset[str]) -> bool:
    """Whether torch can save tensors of these types that lie in one memory."""
    import torch

    memory = torch.empty(1, dtype=torch.uint8).untyped_storage()
    types = [getattr(torch, dtype) for dtype in dtypes]
    tensors = [torch.empty(0, dtype=dtype).set_(memory, 0, (0,), (1,)) for dtype in types]
    try:
        torch.save(tensors, io.BytesIO())
    except RuntimeError:
        return False
    return True


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
