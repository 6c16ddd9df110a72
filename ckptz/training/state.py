"""Saves and loads the parts of a training run other than optimizers: model, extras and random states.

Random states are those of the global generators of Python, NumPy and PyTorch; loading them runs no code from
a file. Optimizers are in `ckptz.training.optimizers`.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import nn

from ckptz.errors import CkptzError, ConfigError, CorruptionError
from ckptz.format.sources import TensorSource
from ckptz.guidance.momentum import stride_of
from ckptz.guidance.optimizer_layout import OptimizerEntry, ParamState, entries_in
from ckptz.state.modules import name_without_wrappers, names_without_wrappers
from ckptz.state.skeleton import TensorRef
from ckptz.state.torch import TYPE_KEY, from_plain, to_plain
from ckptz.torch import nothing_matches, source_of
from ckptz.training.in_place import InPlace
from ckptz.training.snapshot import check_dense

RandomState = dict[str, Any]
SCALARS: Final = "scalars"  # key in a saved state: see `with_scalars_together`


@runtime_checkable
class Stateful(Protocol):
    """An object with a state to save, such as a scheduler, a scaler or a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


Extra: TypeAlias = Stateful | MutableMapping[str, Any] | torch.Generator


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict, sharing memory, by names without wrappers."""
    state = model.state_dict()
    return {name: state[key] for name, key in names_without_wrappers(model, state).items()}


def check_model_fits(
    model: nn.Module, saved: Mapping[str, Any], where: str, *, strict: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check that a saved state has the model's names, shapes and dtypes.

    Args:
        model: the model.
        saved: its state by name.
        where: name of the file in messages.
        strict: refuse names that only one of the two has; otherwise at least one name must match.

    Returns:
        (names of the model that the state lacks, names of the state that the model lacks).

    Raises:
        ConfigError: they differ; the message names the first difference.
    """
    live = model_state(model)
    missing = tuple(name for name in live if name not in saved)
    unexpected = tuple(name for name in saved if name not in live)
    if strict and missing:
        raise ConfigError(
            f"{where}: has no {missing[0]!r}{_more(missing)}; the model has gained parameters{_NOT_STRICT}"
        )
    if strict and unexpected:
        raise ConfigError(
            f"{where}: has {unexpected[0]!r}{_more(unexpected)}, which this model does not have{_NOT_STRICT}"
        )
    if live and len(missing) == len(live):
        raise ConfigError(nothing_matches(where, saved, live))
    # Lazy modules, and those that load in their own way, may load other shapes.
    resizing = {
        name_without_wrappers(model, name)
        for name, module in model.named_modules(remove_duplicate=False)
        if not type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        or module._load_state_dict_pre_hooks
    }
    _check_kinds(live, saved, where, resizing)
    return missing, unexpected


_NOT_STRICT: Final = "; weights_only=True and strict=False load what matches"


def _check_kinds(
    live: Mapping[str, Any], saved: Mapping[str, Any], where: str, resizing: Collection[str]
) -> None:
    """Check that entries with the same name have the same shape and dtype, except in some modules."""
    for name, tensor in live.items():
        module, _, key = name.rpartition(".")
        if module in resizing or key == "_extra_state":  # may have any size
            continue
        if isinstance(tensor, torch.Tensor) and name in saved:
            check_dense(tensor, name)
            if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ConfigError(
                    f"{where}: elements of {name!r} share memory in this model, as after expand(), so they "
                    "cannot be restored; give the model its .contiguous()"
                )
            wanted, saved_kind = _kind(tensor), _kind(saved[name])
            if wanted == saved_kind:
                continue
            what = "the shape differs: restore into a model of the saved shape, and resize that afterwards"
            if wanted.partition(" ")[2] == saved_kind.partition(" ")[2]:
                what = (
                    f"the dtype differs: restore into model.to({saved[name].dtype}), and cast that afterwards"
                )
            raise ConfigError(f"{where}: {name!r} is {saved_kind}, and {wanted} in this model; {what}")


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def module_versions(model: nn.Module) -> dict[str, int]:
    """Return the versions of the state of a model's modules, by name without wrappers; 1 is left out.

    With them, `load_state_dict` of a module converts states that an earlier version of its class has saved.
    """
    versions = getattr(model.state_dict(), "_metadata", {})
    return {
        name_without_wrappers(model, name): own["version"]
        for name, own in versions.items()
        if own.get("version", 1) != 1
    }


def load_model(model: nn.Module, saved: Mapping[str, Any], versions: Mapping[str, int]) -> None:
    """Load a checked state into the model; names that only one of the two has are ignored.

    Args:
        model: the model.
        saved: its state by name.
        versions: result of `module_versions` when it was saved.
    """
    live = model.state_dict()
    keys = names_without_wrappers(model, live)
    state = OrderedDict((key, saved[name]) for name, key in keys.items() if name in saved)
    paths = getattr(live, "_metadata", {})  # of modules
    own = {path: {"version": versions.get(name_without_wrappers(model, path), 1)} for path in paths}
    vars(state)["_metadata"] = OrderedDict(own)
    model.load_state_dict(state, strict=len(state) == len(keys))


def with_scalars_together(state: Mapping[str, Any]) -> dict[str, Any]:
    """Store the scalar tensors of optimizer state as elements of one tensor per dtype under `SCALARS`.

    Each step count as a tensor of its own would take about 200 bytes in a file. A tensor that is in several
    places becomes one element.
    """
    optimizer = {parameter: dict(own) for parameter, own in state["optimizer"].items()}
    scalars: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for own in optimizer.values():
        for value in own.values():
            if isinstance(value, torch.Tensor) and not value.ndim:
                scalars.setdefault(value.dtype, {})[id(value)] = value
    together, elements = {}, dict[int, torch.Tensor]()
    for dtype, values in scalars.items():
        if len(values) > 1:
            numbers = torch.stack([*values.values()])
            together[str(dtype).removeprefix("torch.")] = numbers
            elements |= zip(values, numbers, strict=True)
    return {**_replaced({**state, "optimizer": optimizer}, elements), SCALARS: together}


def _replaced(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Replace tensors of a nested value by others, given by the ids of the replaced ones."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, dict):
        items = [(key, _replaced(item, tensors)) for key, item in value.items()]
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    return type(value)(_replaced(item, tensors) for item in value) if type(value) in (list, tuple) else value


def check_training(state: Any, where: str) -> None:
    """Check that a value from a file is a dict whose scheduler and scaler are dicts or None.

    Raises:
        CorruptionError: it is not.
    """
    if not isinstance(state, dict) or any(
        not isinstance(state.get(name, ""), dict | None) for name in ("scheduler", "scaler")
    ):
        raise CorruptionError(f"{where}: holds no state of a scheduler and a scaler")


def extra_state(extras: Mapping[str, Extra]) -> dict[str, Any]:
    """Return the states of extras by name as plain values and tensors; `extras_to_load` restores types."""
    return {name: to_plain(_state_of(name, extra)) for name, extra in extras.items()}


def _state_of(name: str, extra: Extra) -> Any:
    if isinstance(extra, torch.Generator):
        return extra.get_state()
    if isinstance(extra, Stateful):
        return extra.state_dict()
    if isinstance(extra, MutableMapping):
        return dict(extra)
    raise ConfigError(
        f"extra {name!r} is a {type(extra).__name__}; give something with state_dict and load_state_dict, "
        "a dict, or a torch.Generator"
    )


def check_extras_fit(extras: Mapping[str, Extra], saved: Mapping[str, Any], where: str) -> None:
    """Check that the saved extras have the names of the present ones.

    Raises:
        ConfigError: they differ; the message names the first difference.
    """
    if differing := sorted(set(extras) ^ set(saved)):
        which = "was not saved" if differing[0] in extras else "was saved, and is not given now"
        raise ConfigError(
            f"{where}: extra {differing[0]!r}{_more(differing)} {which}; give the same extras, or restore "
            "with weights_only=True"
        )


def check_states(extras: Mapping[str, Extra], rest: Mapping[str, Any], where: str) -> None:
    """Check that extras and random generators accept the states of a step, without changing them.

    Raises:
        ConfigError: an extra does not; the message names it.
        CorruptionError: the random state is damaged.
    """
    for name, extra in extras.items():
        if (fault := _extra_fault(extra, rest["extra"][name])) is not None:
            raise ConfigError(
                f"{where}: extra {name!r} {fault}; give what was saved, or restore with weights_only=True"
            )
    now = random_state()
    try:
        set_random_state(rest["rng"])
    finally:
        set_random_state(now)


def _extra_fault(extra: Extra, saved: Any) -> str | None:
    """Return the reason why an extra cannot load a saved state, if that can be checked; else None."""
    if isinstance(extra, torch.Generator):
        try:
            torch.Generator(extra.device).set_state(saved)
        except (TypeError, RuntimeError, ValueError):
            return "is a torch.Generator, and was none that this machine can go on with"
        return None
    is_mapping = isinstance(extra, MutableMapping) or isinstance(_state_of("", extra), Mapping)
    if is_mapping != isinstance(saved, Mapping):
        return f"is a {type(extra).__name__}, and was saved as a {type(saved).__name__}"
    return None


def extras_to_load(
    extras: Mapping[str, Extra], saved: Mapping[str, Any], others: Any
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what messages call each extra, and a function that loads its saved state.

    Args:
        extras: the extras of the run.
        saved: their saved states.
        others: nested value with all other tensors of the run, which are never written to here.

    Raises:
        CorruptionError: a state has a value of an unknown type.
    """
    replacing = InPlace(others)
    for name, extra in extras.items():
        yield f"extra {name!r}", functools.partial(_load_extra, extra, from_plain(saved[name]), replacing)


def _load_extra(extra: Extra, saved: Any, replacing: InPlace) -> None:
    if isinstance(extra, torch.Generator):
        extra.set_state(saved)
    elif isinstance(extra, Stateful):
        extra.load_state_dict(saved)
    else:
        replacing.update(extra, saved)


def load_in_order(parts: Iterable[tuple[str, Callable[[], None]]], where: str) -> None:
    """Load the states of the parts of a run, in order.

    Raises:
        ConfigError: a part refused its state; the message names the parts that were loaded before.
    """
    changed = list[str]()
    for name, load in parts:
        try:
            load()
        except BaseException as error:
            before = f"{', '.join(changed)} had been restored" if changed else "nothing else had been changed"
            what = (
                f"{where}: {name} did not take its state, and may have half of it ({type(error).__name__}: "
                f"{error}); {before}: restore another step, or start the process anew"
            )
            if not isinstance(error, Exception):  # interrupts keep their class
                error.add_note(what)
                raise
            raise ConfigError(what) from error
        changed.append(name)


def trained_weights(
    state: Mapping[str, Any],
    weights: Mapping[str, TensorSource],
    tensors: Mapping[str, TensorSource] = MappingProxyType({}),
    prefix: str = "",
) -> dict[str, ParamState]:
    """Return the optimizer state of weights, by parameter.

    Args:
        state: result of `optimizer_state`.
        weights: weights by parameter.
        tensors: tensors of the optimizers by their names in a file; without them, only numbers are returned.
        prefix: prefix of the names of weights in their file.
    """
    is_adamw = set(state["classes"]) == {"AdamW"}
    return {
        name: ParamState(f"{prefix}{name}", weights[name], one.settings, one.state, one.names, is_adamw)
        for one in entries_of(state, tensors)
        if (name := one.key) in weights
    }


def entries_of(
    state: Mapping[str, Any], tensors: Mapping[str, TensorSource] = MappingProxyType({})
) -> Iterator[OptimizerEntry]:
    """Yield what the optimizers in an `optimizer_state` keep for each parameter; see `trained_weights`."""
    root = {
        "param_groups": [{k: as_number(value) for k, value in group.items()} for group in state["groups"]],
        "state": {
            parameter: {key: reference(f"optimizer.{parameter}.{key}", value) for key, value in own.items()}
            for parameter, own in state["optimizer"].items()
        },
    }
    return entries_in(root, tensors)


def sampled_weights(model: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Return samples of a model's weights for an `UpdateTracker`, by name, from any device."""
    samples = {}
    for name, weight in model.items():
        is_plain = isinstance(weight, torch.Tensor) and weight.layout == torch.strided
        is_own = not (hasattr(weight, "full_tensor") or hasattr(weight, "__tensor_flatten__"))
        if is_plain and is_own and weight.is_floating_point() and weight.device.type != "meta":
            flat = weight.detach().reshape(-1)
            sample = flat[:: stride_of(flat.numel())].cpu().contiguous()
            samples[name] = source_of(name, sample)
    return samples


def as_number(value: Any) -> Any:
    """Convert a scalar tensor or a NumPy scalar, also a packed one, to a number; return others unchanged."""
    is_scalar = isinstance(value, dict) and value.get(TYPE_KEY) == "scalar"
    value = from_plain(value) if is_scalar else value
    is_number = isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type != "meta"
    return value.item() if is_number or isinstance(value, np.number) else value


def reference(name: str, value: Any) -> Any:
    """Return a value as in the tree of a file: a number, or a reference to the stored tensor."""
    number = as_number(value)
    return TensorRef(name) if isinstance(number, torch.Tensor) else number


def random_state() -> RandomState:
    """Return the state of all generators, including those of CUDA devices in use."""
    version, words, gauss = random.getstate()
    state: RandomState = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != "MT19937":  # by np.random.set_bit_generator
        return {"kind": state["bit_generator"], "state": to_plain(state)}
    return {
        "kind": "MT19937",
        "keys": torch.from_numpy(np.asarray(state["state"]["key"], np.int64)),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "cached": float(state["gauss"]),
    }


def set_random_state(state: RandomState) -> None:
    """Set all generators to a result of `random_state`.

    Raises:
        ConfigError: the state has CUDA devices that this machine lacks, or NumPy has another bit generator.
        CorruptionError: the state is damaged.
    """
    try:
        cuda = state.get("cuda", [])
        if len(cuda) > torch.cuda.device_count():
            raise ConfigError(
                f"the checkpoint has random states of {len(cuda)} CUDA devices, and "
                f"{torch.cuda.device_count()} are here; resume on as many, or restore with weights_only=True"
            )
        python, legacy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        if (kind := legacy["kind"]) != (now := _numpy_state()["kind"]):
            raise ConfigError(
                f"np.random was a {kind} when it was saved, and is a {now} now; set the same bit generator "
                "with np.random.set_bit_generator, or restore with weights_only=True"
            )
        if "state" in legacy:
            np.random.set_state(from_plain(legacy["state"]))
        else:
            keys = legacy["keys"].numpy().astype(np.uint32)
            np.random.set_state((kind, keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
        torch.set_rng_state(state["torch"])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
    except CkptzError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        # Each generator checks its own state, in its own way.
        raise CorruptionError(f"the random state is damaged ({type(error).__name__})") from None
