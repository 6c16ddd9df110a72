"""Copies of a model's weights among the extras of a run: averages (EMA), masters.

A method treats a copy like its weight, so each copy must be matched with a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from ckptz.errors import ConfigError
from ckptz.format.sources import TensorSource

EXTRA: Final = "extra"


def named_in(tensors: Mapping[str, TensorSource], patterns: Sequence[str]) -> dict[str, TensorSource]:
    """Return the floating-point tensors of the extras that match patterns of `Checkpointer`.

    Raises:
        ConfigError: a pattern matches none.
    """
    floats = {
        name: one for name, one in tensors.items() if name.startswith(f"{EXTRA}.") and one.dtype.is_float
    }
    tensors_of_extras: dict[str, TensorSource] = {}
    for pattern in patterns:
        globs = [f"{EXTRA}.{pattern}", f"{EXTRA}.{pattern}.*"]
        matched = {n: source for n, source in floats.items() if any(fnmatchcase(n, glob) for glob in globs)}
        if not matched:
            names = [name.removeprefix(f"{EXTRA}.") for name in floats][:3]
            hint = f"; there are {', '.join(names)}" if names else ""
            raise ConfigError(f"extra_weights: {pattern!r} names no tensor of floating point in extra{hint}")
        tensors_of_extras |= matched
    return tensors_of_extras


def copied(
    copies: Mapping[str, TensorSource], weights: Mapping[str, TensorSource], trained: Sequence[str]
) -> dict[str, str]:
    """Return the name of the weight of each copy.

    The name of a copy ends with that of its weight, as in a `state_dict`; or copies are a list in the order
    of the model's parameters, all of them or the trained ones. Other tensors are mapped to their own name.
    """
    owners = {}
    lists: dict[str, list[str]] = {}
    for name, copy in copies.items():
        parts = name.split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        owners[name] = next(
            (end for end in ends if end in weights and weights[end].shape == copy.shape), name
        )
        if parts[-1].isdecimal():
            lists.setdefault(".".join(parts[:-1]), []).append(name)
    for names in lists.values():
        for order in (list(weights), trained):
            shapes = [weights[name].shape for name in order]
            if shapes == [copies[name].shape for name in names]:
                owners |= zip(names, order, strict=True)
    return owners
