"""Comparison of a restored run with what was saved: the only source of the claim that a restore is exact.

Before anything is loaded, each saved tensor becomes its dtype, shape and checksum: a `load_state_dict` may
keep the tensors that it is given, and change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ckptz.format.bits import xxh64
from ckptz.state.torch import TYPE_KEY, VALUE_KEY
from ckptz.training.snapshot import identity_of, named_tensors

MOST_NOTES: Final = 8  # entries that notes name one by one


class TensorPrint(NamedTuple):
    """The dtype, shape and checksum of a tensor or an array."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def fingerprint(value: Any) -> Any:
    """Return a nested value with a `TensorPrint` for each tensor and array, and containers of its own."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        patterns = np.frombuffer(value.tobytes(), np.uint8)
        return TensorPrint(str(value.dtype), value.shape, xxh64(patterns))
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        patterns = plain.reshape(-1).view(torch.uint8).numpy()
        return TensorPrint(str(value.dtype).removeprefix("torch."), tuple(value.shape), xxh64(patterns))
    if isinstance(value, Mapping):
        items = {key: fingerprint(item) for key, item in value.items()}
        if value.get(TYPE_KEY) in ("set", "frozenset"):  # whose order depends on what was in them before
            items[VALUE_KEY] = sorted(items[VALUE_KEY], key=repr)
        return items
    return type(value)(map(fingerprint, value)) if type(value) in (list, tuple) else value


def differences(saved: Any, live: Any, name: str = "") -> Iterator[str]:
    """Yield a line for each entry in which two fingerprints differ.

    Args:
        saved: the fingerprint of the saved value.
        live: the fingerprint of the restored value.
        name: of the value, which begins the lines; empty for a dict of named values.
    """
    if isinstance(saved, dict) and isinstance(live, dict):
        prefix = f"{name}." if name else ""
        for key in saved.keys() ^ live.keys():
            yield f"{prefix}{key}: {'not restored' if key in saved else 'was not saved'}"
        for key in filter(live.__contains__, saved):  # in the order of the file, as notes name the first ones
            yield from differences(saved[key], live[key], f"{prefix}{key}")
    elif type(saved) in (list, tuple) and type(live) in (list, tuple) and len(saved) == len(live):
        for i, (one, other) in enumerate(zip(saved, live, strict=True)):
            yield from differences(one, other, f"{name}.{i}")
    elif type(saved) is not type(live) or repr(saved) != repr(live):
        is_alike = isinstance(saved, TensorPrint) and isinstance(live, TensorPrint) and saved[:2] == live[:2]
        what = "other values than saved" if is_alike else f"{_shown(saved)} saved, {_shown(live)} now"
        yield f"{name}: {what}"


def shared(value: Any) -> list[frozenset[str]]:
    """Return the names of the tensors of a nested value that have the same memory, in groups."""
    names: dict[object, set[str]] = {}
    for name, tensor in named_tensors(value):
        if tensor.layout == torch.strided and tensor.numel():
            names.setdefault(identity_of(tensor), set()).add(name)
    return [frozenset(group) for group in names.values()]


def differences_of_memory(saved: Sequence[frozenset[str]], live: Sequence[frozenset[str]]) -> Iterator[str]:
    """Yield a line for each tensor that shared memory with another one when it was saved, and not now.

    The same for tensors that share memory now, and did not then: training changes both at once.

    Args:
        saved: result of `shared` for the saved value.
        live: the same for the restored value.
    """
    for one, other, what in (
        (saved, live, "shared memory with {} when it was saved, and not now"),
        (live, saved, "shares memory with {} now, and did not when it was saved"),
    ):
        group_of = {name: group for group in other for name in group}
        for group in one:
            first, *more = sorted(group & group_of.keys()) or ("",)
            yield from (f"{name}: {what.format(first)}" for name in more if name not in group_of[first])


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, TensorPrint) else f"{value!r}"[:60]


def notes_on(lines: Sequence[str]) -> tuple[str, ...]:
    """Return notes for the user on entries that differ: the first ones by name, the number of the others."""
    notes = tuple(sorted(lines)[:MOST_NOTES])
    return (*notes, f"{len(lines) - MOST_NOTES} more entries differ") if len(lines) > MOST_NOTES else notes
