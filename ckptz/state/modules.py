"""Names of parameters and state without the components of PyTorch's wrappers.

In a model, wrappers are recognised by their class, so a submodule of the user named `module` keeps its name.
In a file there are only names: their wrapper components are removed if the model then has exactly one entry
of that name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import nn

from ckptz.errors import ConfigError

# (module, class name), to avoid imports: attribute of the inner module.
_INNER: Final = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
    ): "_fsdp_wrapped_module",
}

_ATTRIBUTES: Final = frozenset(_INNER.values())


def _inner_of(module: nn.Module | None) -> tuple[str, nn.Module] | None:
    """Return (attribute, inner module) of a wrapper, or None for other modules."""
    for base in type(module).__mro__:
        if module is not None and (name := _INNER.get((base.__module__, base.__name__))) is not None:
            return name, getattr(module, name)
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside all wrappers around `model`."""
    while (inner := _inner_of(model)) is not None:
        model = inner[1]
    return model


def name_without_wrappers(model: nn.Module, name: str) -> str:
    """Remove wrapper components from the name of a module, a parameter or an entry of a state dict.

    A wrapper's component may be absent, because some wrappers remove it from state dicts. Components after
    one that is no submodule are kept, because state-dict hooks may have renamed them.
    """
    parts = list[str]()
    module: nn.Module | None = model
    for part in name.split("."):
        while (inner := _inner_of(module)) is not None:
            attribute, module = inner
            if part == attribute:
                break
        else:
            parts.append(part)
            module = None if module is None else module._modules.get(part)
    return ".".join(parts)


def names_in_model(model: nn.Module, live: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Map saved names to the names of the same entries in a model's state dict.

    Either name may have wrapper components that the other lacks; equal names take precedence. A saved name
    without exactly one counterpart is mapped to itself, so that loading reports it.

    Args:
        model: the model.
        live: names in its state dict.
        saved: names to map.

    Raises:
        ConfigError: two names of the model only differ in wrapper components.
    """
    saved, by_bare = list(saved), names_without_wrappers(model, live)
    saved_names = set(saved)
    by_core: dict[str, list[str]] = {}
    for bare, name in by_bare.items():
        if name not in saved_names:
            by_core.setdefault(_core(bare), []).append(bare)
    equal, claims = set(by_bare.values()), dict[str, list[str]]()
    for name in saved:
        if name not in equal:
            matches = [bare for bare in by_core.get(_core(name), ()) if _is_within(bare, name)]
            matches = [name] if name in matches else matches
            if len(matches) == 1:
                claims.setdefault(by_bare[matches[0]], []).append(name)
    counterparts = {names[0]: name for name, names in claims.items() if len(names) == 1}
    return {name: counterparts.get(name, name) for name in saved}


def _core(name: str) -> str:
    """Remove every component that may be a wrapper's."""
    return ".".join(part for part in name.split(".") if part not in _ATTRIBUTES)


def _is_within(bare: str, name: str) -> bool:
    """Return whether the components of `bare` are a subsequence of those of `name`."""
    parts = iter(name.split("."))
    return all(part in parts for part in bare.split("."))


def names_without_wrappers(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map each name without wrappers to the name in the model.

    Raises:
        ConfigError: two names only differ in wrapper components.
    """
    original: dict[str, str] = {}
    for name in names:
        bare = name_without_wrappers(model, name)
        if bare in original:
            raise ConfigError(
                f"the model has {original[bare]!r} and {name!r}, which are both {bare!r} without wrappers; "
                "rename one of the two submodules"
            )
        original[bare] = name
    return original
