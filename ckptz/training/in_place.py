"""Restores nested values in place: a program may hold the containers and the tensors inside of an extra."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import torch

from ckptz.training.snapshot import identity_of


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from tensors_in(item)


class InPlace:
    """Restores dicts, lists, tensors and arrays in place where the restored value has the same form.

    Tensors that shared memory when they were saved share it again.

    Args:
        others: nested value with tensors that are never written to. An average of weights, for example, may
            begin as a dict of the weights themselves.
    """

    def __init__(self, others: Any) -> None:
        self._others = {one.untyped_storage().data_ptr() for one in tensors_in(others) if _is_plain(one)}
        self._made: dict[object, torch.Tensor] = {}  # by identity of the saved tensor
        self._written: set[object] = set()

    def update(self, now: MutableMapping[Any, Any], saved: MutableMapping[Any, Any]) -> None:
        """Replace the items of a mapping by the saved ones, in their order."""
        items = [(key, self._value(now.get(key), item)) for key, item in saved.items()]
        now.clear()
        now.update(items)

    def _value(self, now: Any, saved: Any) -> Any:
        if isinstance(saved, torch.Tensor):
            return self._tensor(now, saved)
        if isinstance(saved, dict) and isinstance(now, dict) and type(saved) in (dict, type(now)):
            self.update(now, saved)
            return now
        if type(saved) is list and type(now) is list:
            n = min(len(now), len(saved))
            now[:] = [*map(self._value, now[:n], saved[:n]), *saved[n:]]
            return now
        if type(saved) is np.ndarray and type(now) is np.ndarray:
            is_alike = (now.dtype, now.shape) == (saved.dtype, saved.shape)
            if is_alike and now.flags.writeable and id(now) not in self._written:
                self._written.add(id(now))
                np.copyto(now, saved)
                return now
        return saved

    def _tensor(self, now: Any, saved: torch.Tensor) -> torch.Tensor:
        if (identity := identity_of(saved)) not in self._made:
            self._made[identity] = saved
            if self._fits(now, saved):
                self._written.add(identity_of(now))
                with torch.no_grad():
                    self._made[identity] = now.copy_(saved)
        return self._made[identity]

    def _fits(self, now: Any, saved: torch.Tensor) -> bool:
        if type(now) not in (torch.Tensor, torch.nn.Parameter) or not _is_plain(now):
            return False
        forms = [(one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()) for one in (now, saved)]
        is_shared = now.untyped_storage().data_ptr() in self._others
        is_free = not (is_shared or identity_of(now) in self._written)
        return forms[0] == forms[1] and is_free and not now.is_inference()


def _is_plain(tensor: torch.Tensor) -> bool:
    is_made = not torch.nn.parameter.is_lazy(tensor)
    return is_made and tensor.layout == torch.strided and tensor.device.type != "meta"
