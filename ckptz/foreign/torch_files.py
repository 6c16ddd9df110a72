"""Reads and writes files of `torch.save` (`.pt`, `.pth`, `.bin`) with torch, without running code from them.

    zip:               NAME/data.pkl | NAME/data/0 | NAME/data/1 | ... , uncompressed
    before torch 1.6:  magic | protocol | system | pickle | keys of storages | size u64 and bytes of each

`torch.load` trusts the sizes in the pickle: it may return uninitialized memory, or request more than there
is. So sizes and names are checked before torch loads a file. torch is imported on first use.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, cast

from ckptz.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    TruncatedError,
    UnsupportedError,
    error_context,
)
from ckptz.foreign.pickled import MAX_BYTES, Unpickler
from ckptz.format.envelope import LENGTH_BYTES, check_downloaded
from ckptz.format.publish import publish, scratch_folder
from ckptz.format.sources import TensorSource
from ckptz.state.flatten import Chunks, Flat, Geometry, flatten, read_chunks, unflatten
from ckptz.state.skeleton import MAX_NUMBER, is_number

ZIP_MAGIC: Final = b"PK\x03\x04"
LEGACY_MAGIC: Final = b"\x80\x02\x8a\x0a"  # a pickled long, at the beginning of files before torch 1.6
LEGACY_NUMBER: Final = 0x1950A86A20F9469CFC6C
LOCAL_HEADER: Final = 30  # bytes of a zip record before its name
END_RECORD, END_LOCATOR, END_RECORD_64 = 22, 20, 56  # bytes of the records at the end of a zip
NONE_32: Final = (1 << 32) - 1  # placeholder for a number in the 64-bit record
ALIGNMENT: Final = 16  # of the largest element
MAX_DIMS: Final = 64
MAX_LINE: Final = 1000  # bytes; the longest lines are names of classes

_ITEM_BYTES: Final = {
    **{"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1},
    **{"Byte": 1, "Bool": 1, "ComplexDouble": 16, "ComplexFloat": 8, "Untyped": 1},
}


def require_torch(path: Path) -> Any:
    """Import and return torch; `path` is for the error.

    Raises:
        ConfigError: torch is not installed.
    """
    try:
        import torch  # only torch files need it
    except ImportError:
        raise ConfigError(
            f"{path}: torch files need torch; install it with: pip install 'ckptz[torch]'"
        ) from None
    return torch


def read(path: Path) -> Flat:
    """Read a torch file as tensors by name and a tree.

    The tensors are memory-mapped; files of torch before 1.6 are read into memory.

    Raises:
        FileNotFoundError: no such file.
        FormatError: damaged, or not a torch file.
        UnsupportedError: the file needs code, or contains values that a tree cannot represent.
    """
    state = load_state(path)
    with error_context(str(path)):
        return flatten(state)


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins like one of `torch.save`."""
    with path.open("rb") as file:
        return file.read(len(ZIP_MAGIC)).startswith((ZIP_MAGIC, LEGACY_MAGIC))


def load_state(path: Path) -> Any:
    """Load the state in a torch file, with tensors on the CPU that are mapped if possible; see `read`."""
    require_torch(path)
    n_bytes = path.stat().st_size
    if not n_bytes:
        raise FormatError(f"{path}: the file is empty; try an intact copy")
    with error_context(str(path)), path.open("rb") as file:
        check_downloaded(file.read(LENGTH_BYTES))
        file.seek(0)
        can_map = check_torch(file, n_bytes)
        file.seek(0)
        return _load(path if can_map else file, mmap=can_map)


def load_part(data: bytes) -> Any:
    """Load bytes that `torch.save` wrote into a larger file.

    Raises:
        FormatError: damaged, or not written by `torch.save`.
        UnsupportedError: the object needs code.
    """
    check_torch(io.BytesIO(data), len(data))
    return _load(io.BytesIO(data), mmap=False)


def _load(file: Path | BinaryIO, *, mmap: bool) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on internals of torch
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except (OSError, MemoryError):
            raise
        except pickle.UnpicklingError as error:
            raise UnsupportedError(
                f"torch cannot load it without running code ({_reason(error)}); save a plain state_dict"
            ) from None
        except Exception as error:  # torch raises many types for damaged files
            raise CorruptionError(
                f"torch cannot load it ({_reason(error)}): damaged, or not a file of torch.save"
            ) from None


def _reason(error: Exception) -> str:
    """Return the line with the cause from an error of torch, which may come after long advice."""
    lines = str(error).rpartition("WeightsUnpickler error: ")[2].strip().splitlines()
    return (lines or [type(error).__name__])[0][:120]


def write(
    path: Path,
    tensors: Mapping[str, TensorSource],
    tree: Any,
    chunks: Chunks = read_chunks,
    like: Iterable[Path] = (),
) -> None:
    """Write a torch file; inverse of `read`.

    Args:
        path: the file, which appears when it is complete.
        tensors: by name.
        tree: `Index.tree`, or None for a flat dict of the tensors.
        chunks: yields the patterns of all tensors in order.
        like: files whose permissions the new file gets.
    """
    require_torch(path)
    state = unflatten(tensors, tree, scratch_folder(path), chunks)
    with publish(path, like) as file:
        dump_state(file, state, path)


def dump_state(file: BinaryIO, state: Any, path: Path) -> None:
    """Write a state with `torch.save`; `path` is the final name of the file, for errors."""
    torch = require_torch(path)
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None  # the error of the system, which torch's writer hides
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: torch cannot save this ({reason}); restore to safetensors") from None


# --- checks before loading ----------------------------------------------------------------------


def check_torch(file: BinaryIO, n_bytes: int) -> bool:
    """Check a file of `torch.save` on disk or in memory.

    Args:
        file: the file, at its beginning.
        n_bytes: size of the file.

    Returns:
        True if its storages can be memory-mapped: in a zip, and aligned.

    Raises:
        FormatError: damaged, or not written by `torch.save`.
        UnsupportedError: the file needs code.
    """
    head = file.read(len(ZIP_MAGIC))
    file.seek(0)
    if head == ZIP_MAGIC:
        return _check_zip(file, n_bytes)
    _check_legacy(cast(BinaryIO, _Bounded(file)), head, n_bytes)
    return False


def _refuse(what: str) -> NoReturn:
    raise CorruptionError(f"damaged, or not a file of torch.save ({what})")


# --- the pickle ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """A storage outside of the pickle."""

    item: int  # bytes of an element, for tensors without a dtype
    n_bytes: int


class _Storages:
    """The storages that a pickle names.

    Args:
        size_in_file: returns the bytes of a storage in the file, given its key and claimed size; raises if it
            is missing.
    """

    def __init__(self, size_in_file: Callable[[str, int], int]) -> None:
        self._size_in_file = size_in_file
        self._sizes: dict[str, int] = {}  # bytes by key

    def __call__(self, key: Any) -> _Storage:
        if type(key) is not tuple or len(key) not in (5, 6) or key[0] != "storage":
            _refuse("a storage without a key")
        _, item, name, _, n_items, view = (*key, None)[:6]
        if type(item) is not int or not is_number(n_items):
            _refuse("a storage without a type or a size")
        n_bytes = self._check_size(name, n_items * item)
        if n_bytes > self._size_in_file(name, n_bytes):
            raise TruncatedError(f"storage {name[:80]!r} is truncated; try an intact copy")
        if view is None:
            return _Storage(item, n_bytes)
        if type(view) is not tuple or len(view) != 3 or not all(map(is_number, view[1:])):
            _refuse("an invalid view of a storage")
        if (view[1] + view[2]) * item > n_bytes:
            raise TruncatedError("a view of a storage is truncated; try an intact copy")
        return _Storage(item, self._check_size(view[0], view[2] * item))

    def _check_size(self, name: Any, n_bytes: int) -> int:
        if type(name) is not str or self._sizes.setdefault(name, n_bytes) != n_bytes:
            _refuse("a storage of two sizes")
        return n_bytes


def _ordered(*args: Any) -> OrderedDict[Any, Any]:
    """Check the arguments of `OrderedDict`, none or a list of pairs as from Python 2, and call it."""
    [pairs] = args or ([],)
    if type(pairs) is not list or not all(
        type(pair) in (list, tuple) and len(pair) == 2 and type(pair[0]) is str for pair in pairs
    ):
        _refuse("invalid arguments of an ordered dict")
    return OrderedDict(pairs)


def _size(dims: Any) -> tuple[int, ...]:
    if type(dims) not in (tuple, list) or not all(type(n) is int and abs(n) <= MAX_NUMBER for n in dims):
        _refuse("a size that does not consist of numbers")
    return tuple(dims)


def _text_bytes(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        _refuse("invalid bytes")
    return text.encode("latin-1")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *dtype_and_flags: Any) -> object:
    """Check the arguments from which torch rebuilds a tensor."""
    sizes = (arg.itemsize for arg in dtype_and_flags if hasattr(arg, "itemsize"))
    item = next(sizes, getattr(storage, "item", 0))
    if not isinstance(storage, _Storage) or not type(shape) is type(strides) is tuple:
        _refuse("a tensor without a storage or a shape")
    if len(shape) != len(strides) or not all(map(is_number, (offset, *shape, *strides))):
        _refuse("a tensor whose shape and strides are not numbers")
    if len(shape) > MAX_DIMS:
        raise UnsupportedError(f"a tensor of {len(shape)} dimensions; the limit is {MAX_DIMS}")
    geometry = Geometry("", item, shape, strides, offset)
    if math.prod(shape) > MAX_NUMBER or (geometry.n_items and geometry.end > storage.n_bytes):
        _refuse("a tensor beyond its storage")
    return object()


def _parameter(tensor: Any, *flags: Any) -> object:
    del flags
    if type(tensor) is not object:
        _refuse("a parameter without a tensor")
    return tensor


@functools.cache
def _names() -> dict[str, Any]:
    """Map the names that a pickle may use: to dtypes, to bytes per element of storages, and to functions."""
    import torch

    dtypes = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    storages = {
        f"{module}.{kind}Storage": n
        for kind, n in _ITEM_BYTES.items()
        for module in ("torch", "torch.storage")
    }
    rebuild = {"tensor": _tensor, "tensor_v2": _tensor, "tensor_v3": _tensor, "parameter": _parameter}
    return {
        **dtypes,
        **storages,
        **{f"torch._utils._rebuild_{name}": call for name, call in rebuild.items()},
        "collections.OrderedDict": _ordered,
        "torch.Size": _size,
        "_codecs.encode": _text_bytes,
    }


# --- the zip ------------------------------------------------------------------------------------------


def _check_zip(file: BinaryIO, n_bytes: int) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            infos, start = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as error:
        raise CorruptionError(f"truncated or damaged ({error}); try an intact copy") from None
    _check_directory(file, n_bytes, start)
    records = _records(file, start, infos)
    order = records.get("byteorder")
    if order is not None and (order.n_bytes > len("little") or order.read(file) != b"little"):
        raise UnsupportedError("written on a machine with another byte order; save it again on this one")

    def size_in_file(key: str, _: int) -> int:
        if f"data/{key}" not in records:
            raise CorruptionError(f"storage {key[:80]!r} is missing; try an intact copy")
        return records[f"data/{key}"].n_bytes

    Unpickler(io.BytesIO(_pickle_in(records, file)), _names(), _Storages(size_in_file)).read_all()
    return all(record.begin % ALIGNMENT == 0 for name, record in records.items() if name.startswith("data/"))


def _check_directory(file: BinaryIO, n_bytes: int, start: int) -> None:
    """Check that the central directory is where the end records say, without bytes around it.

    Otherwise zip readers differ in where they look for it, and would read different pickles.

    Args:
        file: the zip file.
        n_bytes: size of the file.
        start: position of the directory according to `zipfile`.
    """
    end = n_bytes - END_RECORD
    file.seek(max(end, 0))
    *head, size, offset, n_comment = struct.unpack("<4s4H2IH", file.read(END_RECORD).ljust(END_RECORD, b"\0"))
    file.seek(max(end - END_LOCATOR, 0))
    magic, _, at, _ = struct.unpack("<4sIQI", file.read(END_LOCATOR).ljust(END_LOCATOR, b"\0"))
    if magic == b"PK\x06\x07":
        file.seek(min(at, n_bytes))
        record = file.read(END_RECORD_64).ljust(END_RECORD_64, b"\0")
        size_64, offset_64 = struct.unpack_from("<QQ", record, 40)
        if at + END_RECORD_64 != end - END_LOCATOR or not record.startswith(b"PK\x06\x06"):
            _refuse("its end records contradict each other")
        if size not in (size_64, NONE_32) or offset not in (offset_64, NONE_32):
            _refuse("its end records contradict each other")
        end, size, offset = at, size_64, offset_64
    if head[0] != b"PK\x05\x06" or n_comment or offset != start or offset + size != end:
        _refuse("its directory is not where its end record says")


def _pickle_in(records: Mapping[str, _ZipRecord], file: BinaryIO) -> bytes:
    if "constants.pkl" in records:
        raise UnsupportedError("a TorchScript program, not a checkpoint; save its state_dict instead")
    record = records.get("data.pkl")
    if record is None:
        _refuse("no data.pkl")
    if record.n_bytes > MAX_BYTES:
        raise CorruptionError("data.pkl is larger than 256 MiB")
    pickled = record.read(file)
    if record.crc and zlib.crc32(pickled) != record.crc:  # 0 if torch was set not to compute it
        raise CorruptionError("its pickle was changed after it was written; try an intact copy")
    return pickled


@dataclass(frozen=True, slots=True)
class _ZipRecord:
    """Position, size and checksum of a record of a zip."""

    begin: int
    n_bytes: int
    crc: int

    def read(self, file: BinaryIO) -> bytes:
        file.seek(self.begin)
        return file.read(self.n_bytes)


def _records(file: BinaryIO, n_bytes: int, infos: list[zipfile.ZipInfo]) -> dict[str, _ZipRecord]:
    """Return the records of a zip by name, without the leading folder.

    Args:
        file: the zip file.
        n_bytes: start of the central directory; records must end before it.
        infos: entries of the directory.

    Raises:
        CorruptionError: records overlap, or have the same name.
        UnsupportedError: a record is compressed.
    """
    records: dict[str, _ZipRecord] = {}
    names: set[str] = set()
    at = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedError("its records are compressed; save it again with torch.save")
        file.seek(max(info.header_offset, 0))
        header = file.read(LOCAL_HEADER)
        if info.header_offset < at or len(header) < LOCAL_HEADER or not header.startswith(ZIP_MAGIC):
            _refuse("records overlap")
        begin = info.header_offset + LOCAL_HEADER + sum(struct.unpack_from("<HH", header, 26))
        at = begin + info.file_size
        if at > n_bytes or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise TruncatedError(f"record {info.filename[:80]!r} is truncated")
        name = info.filename.partition("/")[2]
        if name.lower() in names:  # some zip readers ignore case
            _refuse("two records of one name")
        names.add(name.lower())
        records[name] = _ZipRecord(begin, info.file_size, info.CRC)
    return records


# --- the format before torch 1.6 ----------------------------------------------------------------------


class _Bounded:
    """A file whose reads are limited in size, whatever a pickle requests."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, n: int) -> bytes:
        return self._file.read(min(n, MAX_BYTES))

    def readline(self) -> bytes:
        return self._file.readline(MAX_LINE)


def _check_legacy(file: BinaryIO, head: bytes, n_bytes: int) -> None:
    sizes: dict[str, int] = {}

    def size_in_file(key: str, claimed: int) -> int:
        sizes[key] = claimed
        return n_bytes - sum(sizes.values()) + claimed

    def read() -> Any:
        return Unpickler(file, names, storages).read_all()

    names, storages = _names(), _Storages(size_in_file)
    if read() != LEGACY_NUMBER or head != LEGACY_MAGIC:
        _refuse("it begins with different bytes")
    for _ in ("protocol", "system", "state"):
        read()
    keys = read()
    if type(keys) is not list or not all(type(key) is str for key in keys) or set(keys) != set(sizes):
        _refuse("its storages are not those of its tensors")
