"""What `torch.save` writes, read without `torch.load`: a pickle of records, and the bytes of storages.

    zip:     NAME/data.pkl | NAME/data/0 | NAME/data/1 | ... , uncompressed
    before:  magic | protocol | system | the pickle | keys of storages | of each, size u64 and bytes

torch itself believes the sizes that the pickle names and gives out memory that nobody wrote. Here every
byte of a tensor comes from the file, no class or function is looked up by a name of the file, and types
are checked before use.
"""

from __future__ import annotations

import functools
import math
import struct
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn, cast

import numpy as np

from ckptz.errors import CkptzError, CorruptionError, TruncatedError, UnsupportedError
from ckptz.formats.pickled import MAX_BYTES, Maker, Symbol, read_pickled
from ckptz.kernels.floats import Bytes
from ckptz.tree.flatten import Geometry
from ckptz.tree.skeleton import MAX_NUMBER, is_number

if TYPE_CHECKING:
    from torch import UntypedStorage


ZIP_MAGIC: Final = b"PK\x03\x04"
LEGACY_MAGIC: Final = b"\x80\x02\x8a\x0a"  # a pickled long, the first thing in a file of torch before 1.6
LEGACY_NUMBER: Final = 0x1950A86A20F9469CFC6C
LOCAL_HEADER: Final = 30  # bytes of a zip record before its name
ALIGNMENT: Final = 16  # of the largest element
MAX_DIMS: Final = 64
MAX_LINE: Final = 1000

_STORAGES: Final = {
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool", "BFloat16Storage": "bfloat16"},
    **{"ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8"},
}
# Names of the stream that stand for something which has no place in a checkpoint of ours: where it lies is
# said later. Of all others it is said that they need code.
_UNKEPT: Final = {
    **{"builtins.set": "set", "builtins.complex": "complex", "builtins.bytearray": "bytearray"},
    **{"collections.Counter": "collections.Counter", "torch.device": "torch.device"},
    **{"torch._utils._rebuild_sparse_tensor": "sparse tensor", "torch.serialization._get_layout": "layout"},
    **{"torch._utils._rebuild_qtensor": "quantized tensor"},
    **{"torch._tensor._rebuild_from_type_v2": "tensor subclass"},
    **{"torch._utils._rebuild_meta_tensor_no_storage": "meta tensor"},
}


def load_torch(memory: Bytes) -> Any:
    """Load what `torch.save` was given from a file's bytes, which its tensors share where they are aligned.

    Raises:
        FormatError: damaged, or not what `torch.save` writes.
        UnsupportedError: it needs code, or holds what this reader does not know.
    """
    try:
        head = memory[: len(ZIP_MAGIC)].tobytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own internals, and memory that is only read
            return _load_zip(memory) if head == ZIP_MAGIC else _load_legacy(memory)
    except CkptzError:
        raise
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:  # of torch
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise CorruptionError(f"damaged, or not a file of torch.save ({reason})") from None


class _Window:
    """Memory as a file, without a copy; what is asked for beyond its end costs nothing."""

    def __init__(self, memory: Bytes) -> None:
        self._memory, self._at = memory, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(offset + (0, self._at, len(self._memory))[whence], 0)
        return self._at

    def read(self, n: int = -1) -> bytes:
        found = self._memory[self._at : len(self._memory) if n < 0 else self._at + n].tobytes()
        self._at += len(found)
        return found

    def readline(self) -> bytes:
        """A line of at most `MAX_LINE` bytes: the longest is the name of a class."""
        line, end, _ = self._memory[self._at : self._at + MAX_LINE].tobytes().partition(b"\n")
        self._at += len(line + end)
        return line + end


# --- values -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """Bytes of a file as torch knows them; `dtype` is of the tensors that do not say their own."""

    dtype: Any
    memory: UntypedStorage
    n_bytes: int


class _Unkept:
    """Stands for a value that checkpoints of ours have no place for; subclasses bear its type's name."""


@functools.cache
def _unkept(module: str, name: str) -> type[_Unkept]:
    return type(name, (_Unkept,), {"__module__": module})


def _refuse(what: str) -> NoReturn:
    raise CorruptionError(f"damaged, or not a file of torch.save ({what})")


class _Values(Maker):
    """Makes tensors and plain values; `find` gives the bytes of a storage by its key.

    It is told how many bytes the stream says that there are, and gives the same array each time.
    """

    def __init__(self, find: Callable[[str, int], Bytes]) -> None:
        import torch

        self._torch, self._find = torch, find
        self._storages: dict[tuple[Any, ...], UntypedStorage] = {}
        self.keys = (torch.dtype,)

    def named(self, symbol: Symbol) -> Any:
        module, _, name = symbol.name.rpartition(".")
        if module == "torch" and isinstance(found := getattr(self._torch, name, None), self._torch.dtype):
            return found
        symbol = Symbol(symbol.name.replace("__builtin__.", "builtins."))
        if symbol.name in _CALLS or symbol.name in _UNKEPT or name in _STORAGES:
            return symbol
        if module.split(".")[0] == "torch" and name.endswith(("Storage", "Tensor")):
            return symbol  # one that is not kept: it is refused where it is used
        raise UnsupportedError(
            f"it needs code to load ({symbol.name[:80]}), which ckptz does not run; "
            "save a plain state_dict: torch.save(model.state_dict(), ...)"
        )

    def call(self, symbol: Symbol, args: tuple[Any, ...]) -> Any:
        if make := _CALLS.get(symbol.name):
            return make(self, *args)
        if symbol.name not in _UNKEPT:
            _refuse(f"a call of {symbol.name[:80]}")
        module, _, name = _UNKEPT[symbol.name].rpartition(".")
        return _unkept(module or "builtins", name)()

    def build(self, target: Any, state: Any) -> None:
        if isinstance(target, _Unkept):
            return
        if type(target) is not OrderedDict or type(state) is not dict:
            _refuse("a state for something that has none")
        if not all(type(name) is str for name in state):
            _refuse("an attribute that has no name")
        vars(target).update(state)

    def stored(self, key: Any) -> _Storage:
        """Give the storage of a key, in the old form a view of one; see `Maker.stored`."""
        if type(key) is not tuple or len(key) not in (5, 6) or key[0] != "storage":
            _refuse("a storage without a key")
        _, kind, name, _, n_items, view = (*key, None)[:6]
        if not isinstance(kind, Symbol) or type(name) is not str or not is_number(n_items):
            _refuse("a storage without a type, a name or a size")
        kind_name = kind.name.rpartition(".")[2]
        if kind_name not in _STORAGES:
            raise UnsupportedError(
                f"a storage of type {kind.name[:80]}; make its tensors dense before saving"
            )
        dtype = getattr(self._torch, _STORAGES[kind_name])
        item = dtype.itemsize
        memory, place = self._find(name, n_items * item), (0, n_items * item)
        if view is not None:
            if type(view) is not tuple or len(view) != 3 or not all(map(is_number, view[1:])):
                _refuse("a view of a storage that is none")
            place = (view[1] * item, (view[1] + view[2]) * item)
        if place[1] > len(memory):
            raise TruncatedError(f"storage {name[:80]!r} is cut; try an intact copy")
        return _Storage(dtype, self._memory((name, *place), memory[slice(*place)]), place[1] - place[0])

    def _memory(self, key: tuple[Any, ...], memory: Bytes) -> UntypedStorage:
        if key not in self._storages:
            self._storages[key] = self._torch.from_numpy(memory).untyped_storage()
        return self._storages[key]

    # --- what may be called -----------------------------------------------------------------------

    def ordered(self, *args: Any) -> Any:
        """`OrderedDict()`, or of Python 2 with a list of pairs."""
        [pairs] = args or ([],)
        if type(pairs) is not list or not all(
            type(pair) in (list, tuple) and len(pair) == 2 and type(pair[0]) is str for pair in pairs
        ):
            _refuse("an ordered dict of something")
        made: OrderedDict[Any, Any] = OrderedDict(pairs)
        return made

    def no_bytes(self, *args: Any) -> Any:
        """`bytes()`."""
        if args:
            _refuse("bytes of something")
        return b""

    def size(self, *args: Any) -> Any:
        [dims] = args
        if type(dims) not in (tuple, list) or not all(type(n) is int and abs(n) <= MAX_NUMBER for n in dims):
            _refuse("a size that is not made of numbers")
        return self._torch.Size(dims)

    def text_bytes(self, *args: Any) -> Any:
        text, encoding = args
        if type(text) is not str or encoding not in ("latin1", "latin-1"):
            _refuse("bytes that are none")
        return text.encode("latin-1")

    def tensor(self, *args: Any) -> Any:
        """Rebuild a tensor from (storage, offset, shape, strides)."""
        storage = args[0]
        return self._tensor(storage, getattr(storage, "dtype", None), *args[1:4])

    def tensor_v2(self, *args: Any) -> Any:
        """Rebuild a tensor from (storage, offset, shape, strides, requires_grad, hooks[, flags])."""
        return self._flagged(self.tensor(*args), args[4], args[6:])

    def tensor_v3(self, *args: Any) -> Any:
        """Rebuild a tensor from (storage, offset, shape, strides, requires_grad, hooks, dtype[, flags])."""
        return self._flagged(self._tensor(args[0], args[6], *args[1:4]), args[4], args[7:])

    def _tensor(self, storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> Any:
        if not isinstance(storage, _Storage) or not isinstance(dtype, self._torch.dtype):
            _refuse("a tensor without a storage")
        if not all(type(numbers) in (tuple, self._torch.Size) for numbers in (shape, strides)):
            _refuse("a tensor without a shape")
        if len(shape) != len(strides) or not all(map(is_number, (offset, *shape, *strides))):
            _refuse("a tensor whose shape and strides are no numbers")
        if len(shape) > MAX_DIMS:
            raise UnsupportedError(f"a tensor of {len(shape)} dimensions; the limit is {MAX_DIMS}")
        item = dtype.itemsize
        geometry = Geometry("", item, tuple(shape), tuple(strides), offset)
        if math.prod(shape) > MAX_NUMBER or (geometry.n_items and geometry.end > storage.n_bytes):
            _refuse("a tensor beyond its storage")
        return self._torch.empty(0, dtype=dtype).set_(storage.memory, offset, shape, strides)

    def _flagged(self, tensor: Any, requires_grad: Any, rest: tuple[Any, ...]) -> Any:
        if type(requires_grad) is not bool or len(rest) > 1:
            _refuse("a tensor with unknown fields")
        flags = rest[0] if rest else None
        if flags is not None and (type(flags) is not dict or not set(flags) <= {"conj", "neg"}):
            _refuse("a tensor with unknown flags")
        if flags and flags.get("conj"):
            tensor = tensor.conj()
        if flags and flags.get("neg"):
            tensor = self._torch._neg_view(tensor)
        return tensor.requires_grad_(requires_grad)

    def parameter(self, *args: Any) -> Any:
        """Rebuild a parameter from (tensor, requires_grad, hooks)."""
        data, requires_grad = (*args, True)[:2]
        if type(data) is not self._torch.Tensor or type(requires_grad) is not bool:
            _refuse("a parameter without a tensor")
        return self._torch.nn.Parameter(data, requires_grad)

    def parameter_with_state(self, *args: Any) -> Any:
        """Rebuild a parameter from (tensor, requires_grad, hooks, attributes), of which the last is empty."""
        if args[3]:
            raise UnsupportedError("a parameter with attributes; save a plain state_dict")
        return self.parameter(*args[:3])


_CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "collections.OrderedDict": _Values.ordered,
    "torch.Size": _Values.size,
    "builtins.bytes": _Values.no_bytes,
    "_codecs.encode": _Values.text_bytes,
    "torch._utils._rebuild_tensor": _Values.tensor,
    "torch._utils._rebuild_tensor_v2": _Values.tensor_v2,
    "torch._utils._rebuild_tensor_v3": _Values.tensor_v3,
    "torch._utils._rebuild_parameter": _Values.parameter,
    "torch._utils._rebuild_parameter_with_state": _Values.parameter_with_state,
    "torch.nn.parameter.Parameter": _Values.parameter,
}


# --- the zip ------------------------------------------------------------------------------------------


def _load_zip(memory: Bytes) -> Any:
    records = _records(memory, _directory(memory))
    if "constants.pkl" in records:
        raise UnsupportedError("a TorchScript program, not a checkpoint; save a plain state_dict of it")
    if "data.pkl" not in records:
        _refuse("no data.pkl")
    if "byteorder" in records and records["byteorder"].tobytes() != b"little":
        raise UnsupportedError("of a machine with another order of bytes; save it again on this one")

    storages: dict[str, Bytes] = {}

    def find(key: str, _: int) -> Bytes:
        if key not in storages:
            if f"data/{key}" not in records:
                raise CorruptionError(f"storage {key[:80]!r} is missing; try an intact copy")
            memory = records[f"data/{key}"]
            storages[key] = memory.copy() if memory.ctypes.data % ALIGNMENT else memory
        return storages[key]

    if len(records["data.pkl"]) > MAX_BYTES:
        raise CorruptionError("data.pkl is larger than 256 MiB")
    return read_pickled(records["data.pkl"].tobytes(), _Values(find))


def _directory(memory: Bytes) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(cast(BinaryIO, _Window(memory))) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as error:
        raise CorruptionError(f"cut or damaged ({error}); try an intact copy") from None


def _records(memory: Bytes, found: list[zipfile.ZipInfo]) -> dict[str, Bytes]:
    """Bytes of each record without the name of the archive before its own; none overlap."""
    records: dict[str, Bytes] = {}
    at = 0
    for info in sorted(found, key=lambda info: info.header_offset):
        if info.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedError("its records are compressed; save it again with torch.save")
        header = memory[max(info.header_offset, 0) :][:LOCAL_HEADER].tobytes()
        if info.header_offset < at or len(header) < LOCAL_HEADER or not header.startswith(ZIP_MAGIC):
            _refuse("records overlap")
        begin = info.header_offset + LOCAL_HEADER + sum(struct.unpack_from("<HH", header, 26))
        at = begin + info.file_size
        if at > len(memory) or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise TruncatedError(f"record {info.filename[:80]!r} is cut")
        name = info.filename.partition("/")[2]
        if name in records:
            _refuse("two records of one name")
        records[name] = memory[begin:at]
        # 0 where torch was told not to compute it.
        if name == "data.pkl" and info.CRC and zlib.crc32(records[name].data) != info.CRC:
            raise CorruptionError("its pickle was changed after it was written; try an intact copy")
    return records


# --- the form of torch before 1.6 ---------------------------------------------------------------------


def _no_storage(key: str, _: int) -> Bytes:
    raise CorruptionError(f"storage {key[:80]!r} is missing")


def _check_head(file: BinaryIO, magic: bytes) -> None:
    """Read what stands before the state: a number, a version, and what the machine was."""
    if magic != LEGACY_MAGIC:
        read_pickled(file, _Values(_no_storage))  # another pickle may need code, which is to be said
        _refuse("it begins with other bytes")
    if read_pickled(file) != LEGACY_NUMBER:
        _refuse("it begins with another number")
    _, system = read_pickled(file), read_pickled(file)
    if not isinstance(system, dict) or system.get("little_endian") is False:
        raise UnsupportedError("of a machine with another order of bytes; save it again on this one")


def _load_legacy(memory: Bytes) -> Any:
    file = cast(BinaryIO, _Window(memory))
    _check_head(file, memory[: len(LEGACY_MAGIC)].tobytes())
    found: dict[str, Bytes] = {}
    left = len(memory)

    def find(key: str, n_bytes: int) -> Bytes:
        nonlocal left
        if key not in found:
            left -= n_bytes
            if left < 0:
                raise TruncatedError("its storages are larger than the file; try an intact copy")
            found[key] = np.zeros(n_bytes, np.uint8)
        return found[key]

    state = read_pickled(file, _Values(find))
    keys = read_pickled(file)
    if type(keys) is not list or not all(type(key) is str for key in keys) or set(keys) != set(found):
        _refuse("its storages are not those of its tensors")
    at = file.tell()
    for key in keys:
        at = _fill(memory, at, found[key])
    return state


def _fill(memory: Bytes, at: int, target: Bytes) -> int:
    """Copy the bytes of a storage, which stand behind their number of elements; returns where they end."""
    begin, end = at + 8, at + 8 + len(target)
    n_items = int.from_bytes(memory[at:begin].tobytes(), "little")
    if end > len(memory) or (n_items == 0) != (len(target) == 0) or (n_items and len(target) % n_items):
        raise TruncatedError("its storages are cut; try an intact copy")
    target[:] = memory[begin:end]
    return end
