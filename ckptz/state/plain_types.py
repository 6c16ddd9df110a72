"""Values of common types as plain Python values and tensors, and back.

A file has places for plain values and tensors only. What frameworks put beside them, paths, sets, NumPy
scalars, becomes a dict `{"ckptz.type": name, "value": ...}`; names lead to the table below and nowhere
else, so no code comes from a file.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path, PosixPath, WindowsPath
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ckptz.errors import CorruptionError

TYPE_KEY: Final = "ckptz.type"
VALUE_KEY: Final = "value"
_FACTORIES: Final[Mapping[str, Any]] = {
    "None": None,
    **{kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)},
}


TensorMap: TypeAlias = Callable[[torch.Tensor, tuple[str, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Type:
    """How values of some types are kept.

    Attributes:
        kinds: the exact types.
        pack: to something nearer to plain values.
        parse: inverse of it.
    """

    kinds: tuple[type, ...]
    pack: Callable[[Any], Any]
    parse: Callable[[Any], Any]


def _pack_defaultdict(value: defaultdict[Any, Any]) -> list[Any]:
    factory = value.default_factory
    name = "None" if factory is None else getattr(factory, "__name__", "")
    # Any other factory is code; the items are what counts.
    return [name if _FACTORIES.get(name) is factory else "None", list(value.items())]


def _parse_defaultdict(raw: Any) -> defaultdict[Any, Any]:
    name, items = raw
    return defaultdict(_FACTORIES[name], map(tuple, items))


def _parse_scalar(raw: Any) -> Any:
    code, data = raw
    kind = np.dtype(code)
    if kind.hasobject:
        raise ValueError("an object is no scalar")
    return np.frombuffer(data, kind)[0]


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
_NAME_OF: Final = {kind: name for name, type_ in _TYPES.items() for kind in type_.kinds}


def to_plain(value: Any, tensor: TensorMap, path: tuple[str, ...] = ()) -> Any:
    """Turn a value into plain Python values and tensors; what has no place stays, to be refused by name.

    Args:
        value: any.
        tensor: makes of each tensor, and of its path, the one to keep.
        path: where the value stands.
    """
    if isinstance(value, torch.Tensor):
        return tensor(value, path)
    # Arrays have a place if they are of numbers that PyTorch knows.
    is_odd = isinstance(value, np.ndarray) and not (value.dtype.type in _SCALARS and value.dtype.isnative)
    if (name := _NAME_OF.get(type(value))) is not None and not is_odd:
        return {TYPE_KEY: name, VALUE_KEY: to_plain(_TYPES[name].pack(value), tensor, path)}
    if isinstance(value, dict):
        return _dict_to_plain(value, tensor, path)
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, tensor, (*path, str(i))) for i, item in enumerate(value))
    return value


def _dict_to_plain(value: dict[Any, Any], tensor: TensorMap, path: tuple[str, ...]) -> Any:
    if TYPE_KEY in value:  # the user's own must not be taken for one of ours
        return {TYPE_KEY: "dict", VALUE_KEY: to_plain(list(value.items()), tensor, path)}
    items = ((key, to_plain(item, tensor, (*path, str(key)))) for key, item in value.items())
    if not isinstance(value, OrderedDict):
        return dict(items)  # subclasses such as Lightning's AttributeDict are dicts to whoever reads them
    made: OrderedDict[Any, Any] = OrderedDict(items)
    if hasattr(value, "_metadata"):  # the versions of a module's state
        vars(made)["_metadata"] = value._metadata
    return made


def from_plain(value: Any) -> Any:
    """Turn what `to_plain` gave into the values that it was made of.

    Raises:
        CorruptionError: a type that the table does not have, or a value that it cannot take.
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
            raise CorruptionError(f"a value of type {name!r}, which ckptz does not know")
        try:
            return _TYPES[name].parse(raw)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
            raise CorruptionError(f"a value that is no {name}: {error}") from None
    for key, item in value.items():
        value[key] = from_plain(item)
    return value


def on_device(value: Any, device: torch.device | str) -> Any:
    """Bring the tensors of a nested value to a device; see `Mover`."""
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
    """Brings tensors to a device; those that share memory, or are one, do so there too.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # With each the one that it was made of, whose address nobody else has as long as it is there.
        self._memories: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the tensor on the device; subclasses, and layouts without memory of their own, stay."""
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
