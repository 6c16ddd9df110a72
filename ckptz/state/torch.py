"""PyTorch tensors, their index rules for slices, and plain representations of common Python types.

An index of ints, slices, None and ellipsis is applied to a meta tensor: offset and strides of the resulting
view select the patterns, and PyTorch raises its own errors. Any other index is first tried on a tensor of one
repeated byte; then the complete tensor is decoded and indexed.

A file stores plain values and tensors only. Values of other common types (paths, sets, NumPy scalars) are
stored as `{"ckptz.type": name, "value": ...}`; `name` is looked up in the table below, so no code comes from
a file.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path, PosixPath, WindowsPath
from types import EllipsisType, NoneType
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ckptz.errors import ConfigError, CorruptionError, DTypeError
from ckptz.format.dtypes import DTYPE_CODES, DTYPE_NAMES, DType, dtype_of
from ckptz.format.sources import PATTERN_TYPES, Patterns
from ckptz.state.arrays import Framework, Selection, Shape, Window, c_strides, patterns_per_element
from ckptz.state.arrays import select as strict_select
from ckptz.state.skeleton import MAX_DEPTH, where

# From this size on numpy uses huge pages: a 90 MB tensor loads with 1,000 page faults instead of 22,000.
HUGE_BYTES: Final = 1 << 22
ALIGNMENT: Final = 64  # as in PyTorch
_BASIC_ITEMS = (int, np.integer, slice, NoneType, EllipsisType)


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the PyTorch dtype for `dtype`.

    Raises:
        DTypeError: this version of PyTorch has none.
    """
    native = getattr(torch, DTYPE_NAMES.get(dtype.name, ""), None)
    if not isinstance(native, torch.dtype):
        raise DTypeError(f"Dtype not understood: {dtype.name}; this version of PyTorch has no such dtype")
    return native


def stored_type(name: str, tensor: torch.Tensor) -> tuple[DType, Shape]:
    """Return the dtype and shape of a tensor in a file; `name` is for messages.

    Raises:
        DTypeError: the format does not support the dtype, or not with this shape.
    """
    code = DTYPE_CODES.get(str(tensor.dtype).removeprefix("torch."))
    if code is None:
        raise DTypeError(f"tensor {name!r} has {tensor.dtype}, which the format does not know; convert it")
    shape = tuple(tensor.shape)
    if code == "F4":  # PyTorch counts pairs
        if not shape:
            raise DTypeError(f"tensor {name!r} of {tensor.dtype} has no dimension; reshape it to one")
        shape = (*shape[:-1], 2 * shape[-1])
    return dtype_of(code), shape


def _empty(dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """Return an uninitialized CPU tensor, large ones in numpy's memory, which uses huge pages."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    raw = np.empty(n_bytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[begin : begin + n_bytes]).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class TorchTensors(Framework):
    """Creates PyTorch tensors.

    Attributes:
        device: device of the returned tensors.
        is_strict: whether slices use the index rules of safetensors rather than those of PyTorch.
    """

    device: str | int
    is_strict: bool

    def shape_of(self, dtype: DType, shape: Shape) -> Shape:
        if dtype.name != "F4":
            return shape
        if not shape or shape[-1] % 2:
            raise DTypeError(f"PyTorch packs F4 in pairs, which shape {list(shape)} does not allow")
        return (*shape[:-1], shape[-1] // 2)

    def allocate(self, dtype: DType, shape: Shape) -> tuple[Any, Patterns]:
        native = torch_dtype(dtype)
        is_cuda = str(self.device).startswith("cuda")
        if is_cuda and not torch.cuda.is_available():
            raise RuntimeError(f"device {self.device}: PyTorch finds no CUDA device; load to 'cpu'")
        self._try_device()
        if is_cuda:  # devices copy from pinned memory at full speed
            tensor = torch.empty(shape, dtype=native, device="cpu", pin_memory=True)
        else:
            tensor = _empty(native, shape)
        return tensor, tensor.reshape(-1).view(torch.uint8).numpy().view(PATTERN_TYPES[dtype.pattern_bytes])

    def select(self, index: Any, dtype: DType, shape: Shape) -> Selection:
        if not self.is_strict:
            torch_dtype(dtype)
        native_shape = self.shape_of(dtype, shape)
        if self.is_strict:
            picked = Selection(*strict_select(index, native_shape))
        else:
            picked = _select(index, native_shape)
        self._try_device()
        return Selection(picked.window.widened(patterns_per_element(dtype)), picked.shape, picked.then)

    def finish(self, tensor: Any) -> Any:
        return tensor if self.device == "cpu" else tensor.to(self.device)

    def _try_device(self) -> None:
        if self.device != "cpu":
            torch.empty(0, device="cpu").to(self.device)  # raises errors of the device before decoding


def _select(index: Any, shape: Shape) -> Selection:
    # The index is tried on CPU tensors.
    index = tuple(map(_on_cpu, index)) if isinstance(index, tuple) else _on_cpu(index)
    items = index if isinstance(index, tuple) else (index,)
    if all(isinstance(item, _BASIC_ITEMS) and not isinstance(item, bool) for item in items):
        view = torch.empty(shape, dtype=torch.uint8, device="meta")[index]
        return Selection(
            Window(int(view.storage_offset()), tuple(view.shape), view.stride()), tuple(view.shape)
        )
    # PyTorch raises an error for an invalid index; this takes one byte for each element of the result.
    torch.empty((), dtype=torch.uint8, device="cpu").expand(shape)[index]
    return Selection(Window(0, shape, c_strides(shape)), shape, lambda tensor: tensor[index])


def _on_cpu(item: Any) -> Any:
    return item.cpu() if isinstance(item, torch.Tensor) else item


TYPE_KEY: Final = "ckptz.type"
VALUE_KEY: Final = "value"
_FACTORIES: Final[Mapping[str, Any]] = {
    "None": None,
    **{cls.__name__: cls for cls in (int, float, str, bool, list, dict, set, tuple)},
}


TensorMap: TypeAlias = Callable[[torch.Tensor, tuple[str, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Type:
    """Conversion of values of some types to plain values and back.

    Attributes:
        classes: the exact types.
        pack: converts a value to simpler values.
        parse: inverse of `pack`.
    """

    classes: tuple[type, ...]
    pack: Callable[[Any], Any]
    parse: Callable[[Any], Any]


def _pack_defaultdict(value: defaultdict[Any, Any]) -> list[Any]:
    factory = value.default_factory
    name = "None" if factory is None else getattr(factory, "__name__", "")
    # Other factories are code and are dropped; the items are kept.
    return [name if _FACTORIES.get(name) is factory else "None", list(value.items())]


def _parse_defaultdict(raw: Any) -> defaultdict[Any, Any]:
    name, items = raw
    return defaultdict(_FACTORIES[name], map(tuple, items))


def _parse_scalar(raw: Any) -> Any:
    code, data = raw
    dtype = np.dtype(code)
    if dtype.hasobject:
        raise ValueError("an object is no scalar")
    return np.frombuffer(data, dtype)[0]


_SCALARS: Final = tuple(
    np.dtype(code).type
    for code in ("?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "F", "D")
)


def _dict_of(raw: Any) -> dict[Any, Any]:
    return dict(map(tuple, raw))


_TYPES: Final[Mapping[str, _Type]] = {
    "dict": _Type((), lambda value: list(value.items()), _dict_of),
    "Path": _Type((PosixPath, WindowsPath), str, Path),
    "Namespace": _Type((Namespace,), lambda value: dict(vars(value)), lambda raw: Namespace(**raw)),
    "Counter": _Type((Counter,), lambda value: list(value.items()), lambda raw: Counter(_dict_of(raw))),
    "defaultdict": _Type((defaultdict,), _pack_defaultdict, _parse_defaultdict),
    "set": _Type((set,), list, set),
    "frozenset": _Type((frozenset,), list, frozenset),
    "complex": _Type((complex,), lambda value: [value.real, value.imag], lambda raw: complex(*raw)),
    "timedelta": _Type(
        (timedelta,), lambda span: [span.days, span.seconds, span.microseconds], lambda raw: timedelta(*raw)
    ),
    "datetime": _Type((datetime,), datetime.isoformat, datetime.fromisoformat),
    "date": _Type((date,), date.isoformat, date.fromisoformat),
    "device": _Type((torch.device,), str, torch.device),
    "scalar": _Type(_SCALARS, lambda value: [value.dtype.str, value.tobytes()], _parse_scalar),
    "ndarray": _Type((np.ndarray,), lambda value: torch.from_numpy(value.copy()), torch.Tensor.numpy),
}
_NAME_OF: Final = {cls: name for name, type_ in _TYPES.items() for cls in type_.classes}


def to_plain(value: Any, tensor: TensorMap = lambda tensor, _: tensor, path: tuple[str, ...] = ()) -> Any:
    """Convert a value to plain Python values and tensors; unsupported values are kept, to be rejected later.

    Args:
        value: any value.
        tensor: function of a tensor and its path that returns the tensor to store, by default itself.
        path: path of the value.
    """
    if len(path) > MAX_DEPTH:
        what = f"{where(path[:4])} ...: nested deeper than {MAX_DEPTH} levels, or a part of itself"
        raise ConfigError(f"{what}; save a flatter state")
    if isinstance(value, torch.Tensor):
        return tensor(value, path)
    # Arrays are supported if PyTorch has their dtype.
    is_odd = isinstance(value, np.ndarray) and not (value.dtype.type in _SCALARS and value.dtype.isnative)
    if (name := _NAME_OF.get(type(value))) is not None and not is_odd:
        return {TYPE_KEY: name, VALUE_KEY: to_plain(_TYPES[name].pack(value), tensor, path)}
    if isinstance(value, dict):
        return _dict_to_plain(value, tensor, path)
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, tensor, (*path, str(i))) for i, item in enumerate(value))
    return value


def _dict_to_plain(value: dict[Any, Any], tensor: TensorMap, path: tuple[str, ...]) -> Any:
    if TYPE_KEY in value:  # a key of the user that could be confused with ours
        return {TYPE_KEY: "dict", VALUE_KEY: to_plain(list(value.items()), tensor, path)}
    pairs = type(value).items(value)  # an instance attribute may hide the method
    items = ((key, to_plain(item, tensor, (*path, str(key)))) for key, item in pairs)
    if not isinstance(value, OrderedDict):
        return dict(items)  # readers accept a dict for subclasses such as Lightning's AttributeDict
    made: OrderedDict[Any, Any] = OrderedDict(items)
    if hasattr(value, "_metadata"):  # the versions of a module's state
        vars(made)["_metadata"] = value._metadata
    return made


def from_plain(value: Any) -> Any:
    """Convert a result of `to_plain` back to the original values.

    Raises:
        CorruptionError: an unknown type, or an invalid value for a type.
    """
    if isinstance(value, dict):
        return _dict_from_plain(value)
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    return value


def _dict_from_plain(value: dict[Any, Any]) -> Any:
    if TYPE_KEY in value:
        name, raw = value[TYPE_KEY], from_plain(value.get(VALUE_KEY))
        if not isinstance(name, str) or name not in _TYPES:
            raise CorruptionError(f"a value of the unknown type {name!r}")
        try:
            return _TYPES[name].parse(raw)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
            raise CorruptionError(f"an invalid value of type {name}: {error}") from None
    for key, item in value.items():
        value[key] = from_plain(item)
    return value


def on_device(value: Any, device: torch.device | str) -> Any:
    """Move the tensors of a nested value to a device; see `Mover`."""
    return _moved(value, Mover(torch.device(device)))


def _moved(value: Any, move: Mover) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, Namespace):
        _moved(vars(value), move)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _moved(item, move)
    if isinstance(value, list):
        value[:] = [_moved(item, move) for item in value]
    return tuple(_moved(item, move) for item in value) if type(value) is tuple else value


class Mover:
    """Moves tensors to a device; tensors that are identical or share memory still do so afterwards.

    Args:
        device: the target device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Originals are kept alive, so that no other tensor can get their address.
        self._memories: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device; subclasses and unusual layouts are not moved."""
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.device == self._device or tensor.device.type == "meta":
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._copy(tensor)
        return self._made[id(tensor)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach().resolve_conj().resolve_neg()
        memory = source.untyped_storage()
        key = memory.data_ptr() or id(memory)
        if key not in self._memories:
            whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
            self._memories[key] = memory, whole.to(self._device).untyped_storage()
        place = source.storage_offset(), source.shape, source.stride()
        made = torch.empty(0, dtype=source.dtype, device=self._device).set_(self._memories[key][1], *place)
        if type(tensor) is torch.nn.Parameter:
            return torch.nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)
