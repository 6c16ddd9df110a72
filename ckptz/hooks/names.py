"""Names of a model's state without the components that wrappers add to them.

DistributedDataParallel and DataParallel add `module.`, torch.compile adds `_orig_mod.`, and activation
checkpointing `_checkpoint_wrapped_module.`, at any depth. A submodule of the user's own keeps such a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ckptz.errors import ConfigError

# The child that a wrapper holds its module in, by the name of the wrapper's class: importing the classes of
# torch.compile and of checkpointing would take a second.
_INNER: Final[Mapping[str, str]] = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}


def _inner_name(module: nn.Module) -> str | None:
    """Return the name of the child that a wrapper holds its module in; None if `module` is no wrapper."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.") and (name := _INNER.get(kind.__name__)) in module._modules:
            return name
    return None


def without_wrappers(model: nn.Module, name: str) -> str:
    """Return the name of a parameter, buffer or submodule without the components of wrappers.

    Args:
        model: the model, perhaps wrapped.
        name: a dotted name, as in `model.state_dict()` or `model.named_modules()`.
    """
    module: nn.Module | None = model
    parts = []
    for part in name.split("."):
        # Some wrappers leave themselves out of names already.
        while module is not None and part not in module._modules and (inner := _inner_name(module)):
            module = module._modules[inner]
        if module is None or part != _inner_name(module):
            parts.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(parts)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict` by names without wrappers; tensors share the model's memory.

    Raises:
        ConfigError: the model is sharded by FSDP, or two entries have the same name without wrappers.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "the model is sharded by FSDP, of which each rank holds a part; save it with "
            "torch.distributed.checkpoint and ckptz.integrations.dcp"
        )
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if (name := without_wrappers(model, key)) in state:
            raise ConfigError(f"two entries of the model's state_dict are called {name!r} without wrappers")
        state[name] = value
    return state


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load entries of a `model_state` into the model; entries that `state` lacks stay as they are.

    Raises:
        KeyError: the model has no entry of a name; the caller has checked that.
    """
    keys = {without_wrappers(model, key): key for key in model.state_dict()}
    model.load_state_dict(
        {keys[name]: value for name, value in state.items()}, strict=len(state) == len(keys)
    )


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter: its first entry in `model_state`, which hooks may have renamed."""
    names: dict[torch.Tensor, str] = {}
    for key, value in [*model.state_dict(keep_vars=True).items(), *model.named_parameters()]:
        if isinstance(value, nn.Parameter):
            names.setdefault(value, without_wrappers(model, key))
    return names
