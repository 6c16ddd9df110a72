"""Parameters of a model by name, tied ones once, and files of tensors by these names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ckptz.api.apply import live_tensors
from ckptz.errors import ConfigError
from ckptz.format.envelope import plain_regions, write_plain
from ckptz.format.publish import publish
from ckptz.guidance.files import shape_fingerprint
from ckptz.state.flatten import read_chunks
from ckptz.state.modules import name_without_wrappers


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter and its names in the model; several if it is tied."""

    parameter: nn.Parameter
    names: tuple[str, ...]


def named_parameters(model: nn.Module) -> list[ModelParameter]:
    """List the parameters of a model with their names without wrappers; tied parameters once.

    Raises:
        ConfigError: a parameter is not initialized, or sharded.
    """
    by_identity: dict[int, ModelParameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name_without_wrappers(model, name)
        _check_parameter(name, parameter)
        earlier = by_identity.get(id(parameter))
        names = () if earlier is None else earlier.names
        by_identity[id(parameter)] = ModelParameter(parameter, (*names, name))
    return list(by_identity.values())


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ConfigError(f"parameter {name!r} has no shape yet; run the model once first")
    if hasattr(parameter, "full_tensor"):  # a DTensor
        raise ConfigError(
            f"parameter {name!r} is sharded over several processes, which hooks do not support; "
            "use an unsharded copy of the model"
        )


def fingerprint_of(parameters: Iterable[ModelParameter]) -> str:
    """Return the `shape_fingerprint` of parameters."""
    return shape_fingerprint({p.names[0]: tuple(p.parameter.shape) for p in parameters})


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file chunk by chunk; it appears only when it is complete."""
    sources = live_tensors(tensors)
    with publish(path) as sink:
        write_plain(sink, plain_regions(sources), metadata, read_chunks(sources))
