"""Parameters of a model by name, tied ones once, and files of tensors by these names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch
from torch import nn

from ckptz.api.apply import live_tensors
from ckptz.errors import ConfigError
from ckptz.format.envelope import plain_regions, write_plain
from ckptz.format.publish import publish
from ckptz.state.flatten import read_chunks
from ckptz.state.modules import name_without_wrappers


def names_by_parameter(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the names, without wrappers, of each parameter of a model; a tied parameter has several.

    Raises:
        ConfigError: a parameter is not initialized, or sharded.
    """
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name_without_wrappers(model, name)
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(f"parameter {name!r} has no shape yet; run the model once first")
        if hasattr(parameter, "full_tensor"):  # a DTensor
            raise ConfigError(
                f"parameter {name!r} is sharded over several processes, which hooks do not support; "
                "use an unsharded copy of the model"
            )
        names[parameter] = (*names.get(parameter, ()), name)
    return names


def fingerprint_of(names: Mapping[nn.Parameter, tuple[str, ...]]) -> str:
    """Return the SHA-256 of the names and shapes of a model's parameters, in hexadecimal."""
    shapes = {own[0]: parameter.shape for parameter, own in names.items()}
    lines = (f"{name}\t{'x'.join(map(str, shape))}\n" for name, shape in sorted(shapes.items()))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file chunk by chunk; it appears only when it is complete."""
    sources = live_tensors(tensors)
    with publish(path) as sink:
        write_plain(sink, plain_regions(sources), metadata, read_chunks(sources))
