"""The parts of a training run besides its optimizers: model, extras and random numbers, and the way back.

Random numbers are the states of the global generators of Python, NumPy and PyTorch, stored without running
code from a file. Optimizers are in `ckptz.training.optimizers`. Knows no files.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import nn

from ckptz.errors import CkptzError, ConfigError, CorruptionError
from ckptz.format.sources import TensorSource
from ckptz.guidance.momentum import stride_of
from ckptz.guidance.optimizer_layout import OptimizerEntry, ParamState, entries_in
from ckptz.state.modules import names_without_wrappers
from ckptz.state.skeleton import TensorRef
from ckptz.state.torch import from_plain, to_plain
from ckptz.torch import nothing_matches, source_of
from ckptz.training.snapshot import check_dense

RandomState = dict[str, Any]
SCALARS: Final = "scalars"  # in a state that is saved: see `with_scalars_together`


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a scaler or a data loader: anything with a state that can be saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


Extra: TypeAlias = Stateful | MutableMapping[str, Any] | torch.Generator


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's state by name without wrappers, sharing its memory.

    State-dict hooks of the model apply.
    """
    state = model.state_dict()
    return {name: state[key] for name, key in names_without_wrappers(model, state).items()}


def check_model_fits(
    model: nn.Module, saved: Mapping[str, Any], where: str, *, strict: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Require that a saved state has the model's names, shapes and dtypes.

    Args:
        model: the model.
        saved: its state by name.
        where: names the file in messages.
        strict: refuse names that only one of the two has; else at least one must match.

    Returns:
        (names in the model that the state lacks, names in the state that the model lacks).

    Raises:
        ConfigError: names the first difference; without `strict`, of entries that both have.
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
    _check_kinds(live, saved, where)
    return missing, unexpected


_NOT_STRICT: Final = "; weights_only=True and strict=False load what matches"


def _check_kinds(live: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Require the same shapes and dtypes of what has the same name."""
    for name, tensor in live.items():
        if isinstance(tensor, torch.Tensor) and name in saved:
            check_dense(tensor, name)
            wanted, saved_kind = _kind(tensor), _kind(saved[name])
            if wanted == saved_kind:
                continue
            what = "it is another model"
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


def load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Write a saved state, which fits, into the model; names that only one of the two has are passed over."""
    keys = names_without_wrappers(model, model.state_dict())
    state = {key: saved[name] for name, key in keys.items() if name in saved}
    model.load_state_dict(state, strict=len(state) == len(keys))


def with_scalars_together(state: Mapping[str, Any]) -> dict[str, Any]:
    """Store the scalar tensors of optimizer state as parts of one tensor under `SCALARS`.

    A file then has one tensor for them, where each count of steps would take some 200 bytes by itself.
    """
    optimizer = {parameter: dict(own) for parameter, own in state["optimizer"].items()}
    places: dict[torch.dtype, list[tuple[dict[str, Any], str]]] = {}
    for own in optimizer.values():
        for key, value in own.items():
            if isinstance(value, torch.Tensor) and not value.ndim:
                places.setdefault(value.dtype, []).append((own, key))
    together = {}
    for dtype, keys in places.items():
        if len(keys) > 1:
            numbers = torch.stack([own[key] for own, key in keys])
            together[str(dtype).removeprefix("torch.")] = numbers
            for (own, key), number in zip(keys, numbers, strict=True):
                own[key] = number
    return {**state, "optimizer": optimizer, SCALARS: together}


def check_training(state: Any, where: str) -> None:
    """Require that a value from a file has a scheduler and a scaler, each perhaps None.

    Raises:
        CorruptionError: it has something else.
    """
    if not isinstance(state, dict) or any(
        not isinstance(state.get(name, ""), dict | None) for name in ("scheduler", "scaler")
    ):
        raise CorruptionError(f"{where}: holds no state of a scheduler and a scaler")


def extra_state(extras: Mapping[str, Extra]) -> dict[str, Any]:
    """Return the states of extras by name as plain values and tensors; `extras_to_load` restores types."""
    return {name: to_plain(_state_of(name, extra), _itself) for name, extra in extras.items()}


def _itself(tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
    del path
    return tensor


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
    """Require that the same extras were saved.

    Raises:
        ConfigError: names the first difference.
    """
    if differing := sorted(set(extras) ^ set(saved)):
        which = "was not saved" if differing[0] in extras else "was saved, and is not given now"
        raise ConfigError(
            f"{where}: extra {differing[0]!r}{_more(differing)} {which}; give the same extras, or restore "
            "with weights_only=True"
        )


def check_states(extras: Mapping[str, Extra], rest: Mapping[str, Any], where: str) -> None:
    """Require that extras and generators of random numbers can take the states of a step; change nothing.

    Raises:
        ConfigError: names the one that cannot.
        CorruptionError: the random state is none.
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
    """Return the reason why an extra cannot load a saved state, if that can be known beforehand."""
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
    extras: Mapping[str, Extra], saved: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield for each extra its name and the function that loads its saved state.

    Raises:
        CorruptionError: a state has a value of a type that is not known.
    """
    for name, extra in extras.items():
        yield name, functools.partial(_load_extra, extra, from_plain(saved[name]))


def _load_extra(extra: Extra, saved: Any) -> None:
    if isinstance(extra, torch.Generator):
        extra.set_state(saved)
    elif isinstance(extra, Stateful):
        extra.load_state_dict(saved)
    else:
        extra.clear()
        extra.update(saved)


def load_in_order(parts: Iterable[tuple[str, Callable[[], None]]], where: str) -> None:
    """Load the states of the parts of a run, in order.

    Raises:
        ConfigError: one refused its state; the message says which had been changed by then.
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
            if not isinstance(error, Exception):  # an interrupt stays one
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
    """Find what optimizers keep of weights, by parameter.

    Args:
        state: as `optimizer_state` gives it.
        weights: by parameter.
        tensors: of the optimizers, by their names in a file; without them, numbers alone are given.
        prefix: what begins the names of weights in their file.
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
    """Copy the samples of a model's weights that an `UpdateTracker` takes, by name, from any device."""
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
    """Turn a tensor of one number into that number; everything else stays as it is."""
    is_number = isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type != "meta"
    return value.item() if is_number else value


def reference(name: str, value: Any) -> Any:
    """Return a live value as a file's tree has it: a number, or the name of the tensor that is stored."""
    number = as_number(value)
    return TensorRef(name) if isinstance(number, torch.Tensor) else number


def random_state() -> RandomState:
    """Return the state of all generators, including those of CUDA devices in use."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: RandomState = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys, np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: RandomState) -> None:
    """Set the generators to what `random_state` gave.

    Raises:
        ConfigError: the state has generators that this machine lacks.
        CorruptionError: it is no state of generators.
    """
    try:
        _set_random_state(state)
    except CkptzError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        # Each generator checks its own state, in its own way.
        raise CorruptionError(f"the random state is damaged ({type(error).__name__})") from None


def _set_random_state(state: RandomState) -> None:
    cuda = state.get("cuda", [])
    if len(cuda) > torch.cuda.device_count():
        raise ConfigError(
            f"the checkpoint has random states of {len(cuda)} CUDA devices, and {torch.cuda.device_count()} "
            "are here; resume on as many, or restore with weights_only=True"
        )
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = legacy["keys"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch"])
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
