"""Names of a model's parameters and state without the wrappers of PyTorch, wherever these are in the model.

A wrapper of a model is recognised by its class, never by a component of a name: a submodule that users call
`module` keeps its name. Of a file there are only names: components of wrappers are removed from these where
the model then has exactly one entry of that name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import nn

from ckptz.errors import ConfigError

# By module and name of the class, so that none has to be imported: the attribute that holds the inner module.
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
    """Return the attribute and the module that a wrapper holds, or None if `module` is no wrapper."""
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
    """Remove the components of wrappers from the name of a module, a parameter or an entry of a state dict.

    Some wrappers remove their own component from state dicts, so it may be absent. Components after one that
    is no submodule are kept: state-dict hooks may have renamed them.
    """
    kept = list[str]()
    module: nn.Module | None = model
    for part in name.split("."):
        while (inner := _inner_of(module)) is not None:
            attribute, module = inner
            if part == attribute:
                break
        else:
            kept.append(part)
            module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def names_in_model(model: nn.Module, live: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Map saved names to the names of the same entries in a model's state dict.

    Either side may have components of wrappers that the other lacks. Equal names go first. A saved name
    without exactly one counterpart is mapped to itself, so that loading reports it.

    Args:
        model: the model.
        live: names in its state dict.
        saved: names to map.

    Raises:
        ConfigError: two names of the model differ by wrappers alone.
    """
    saved, by_bare = list(saved), names_without_wrappers(model, live)
    taken = set(saved)
    by_core: dict[str, list[str]] = {}
    for bare, name in by_bare.items():
        if name not in taken:
            by_core.setdefault(_core(bare), []).append(bare)
    equal, claims = set(by_bare.values()), dict[str, list[str]]()
    for name in saved:
        if name not in equal:
            wanted = [bare for bare in by_core.get(_core(name), ()) if _is_within(bare, name)]
            wanted = [name] if name in wanted else wanted
            if len(wanted) == 1:
                claims.setdefault(by_bare[wanted[0]], []).append(name)
    counterparts = {names[0]: name for name, names in claims.items() if len(names) == 1}
    return {name: counterparts.get(name, name) for name in saved}


def _core(name: str) -> str:
    """Remove every component that a wrapper may have added."""
    return ".".join(part for part in name.split(".") if part not in _ATTRIBUTES)


def _is_within(bare: str, name: str) -> bool:
    """Return whether the components of `bare` occur in `name` in this order."""
    parts = iter(name.split("."))
    return all(part in parts for part in bare.split("."))


def names_without_wrappers(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map each name without wrappers to the name in the model.

    Raises:
        ConfigError: two names differ by wrappers alone.
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
