"""The state of live optimizers by parameter name, and the way back.

It is made of `optimizer.state_dict()`, and nothing in that is left out: options and empty groups, state of
frozen parameters, entries that belong to no parameter, keys of the optimizer's own. `load_state_dict` of
torch casts state to the dtype of its parameter, so every tensor is put back afterwards with the dtype, shape,
strides and device that it had.

    optimizer   {parameter: {key: value}}
    groups      the parameter groups of all optimizers, their "params" as names
    classes     the class name of each optimizer
    optimizers  for each optimizer, what else is in its state_dict; only where there is something
    devices     {parameter: {path: device type}}; only of tensors that are not on their parameter's device
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ckptz.errors import ConfigError, CorruptionError
from ckptz.guidance.momentum_decay import decay_of
from ckptz.state.modules import names_without_wrappers
from ckptz.state.torch import from_plain, on_device, to_plain
from ckptz.training.snapshot import identity_of, named_tensors
from ckptz.training.state import entries_of

MORE, DEVICES = "optimizers", "devices"
STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the state of optimizers by parameter name; tensors share the optimizers' memory.

    Raises:
        ConfigError: an optimizer has parameters that the model does not have, or that another one has too,
            state that is in no form of torch's, or tensors that are parts of others.
    """
    names = parameter_names(model) if optimizers else {}
    state: dict[str, Any] = {"optimizer": {}, "classes": [], "groups": []}
    more, devices = [], dict[str, dict[str, str]]()
    for optimizer in optimizers:
        own_names = _names_of(optimizer, names)
        if both := set(_group_of(state)) & set(own_names):
            raise ConfigError(f"parameter {min(both)!r} is in two optimizers; give each parameter to one")
        saved = _state_dict_of(optimizer)
        numbers = [number for group in saved[GROUPS] for number in group[PARAMS]]
        name_of = dict(zip(numbers, own_names, strict=True))
        named, loose = _split(saved[STATE], name_of, type(optimizer).__name__)
        state["optimizer"] |= named
        for group in saved[GROUPS]:
            options = {key: to_plain(value) for key, value in group.items()}
            state["groups"].append(options | {PARAMS: [name_of[number] for number in group[PARAMS]]})
        state["classes"].append(type(optimizer).__name__)
        other = {key: to_plain(value) for key, value in saved.items() if key not in (STATE, GROUPS)}
        more.append({"n_groups": len(saved[GROUPS]), "loose": loose, "other": other})
        for name, parameter in zip(own_names, _parameters(optimizer), strict=True):
            leaves = named_tensors(named.get(name, {}))
            # Tensors of one number are left out: `load_state_dict` decides where counters belong.
            places = {path: one.device for path, one in leaves if one.ndim and one.device != parameter.device}
            if places:
                devices[name] = {path: device.type for path, device in places.items()}
    _check_apart(state)
    is_told_by_members = len(more) <= 1 or all(group[PARAMS] for group in state["groups"])
    if not is_told_by_members or any(one["loose"] or one["other"] for one in more):
        state[MORE] = more
    return state | ({DEVICES: devices} if devices else {})


def _check_apart(state: Mapping[str, Any]) -> None:
    """Check that no tensor of optimizers is a part of another, such as a view of a flat buffer.

    `load_state_dict` of torch makes them separate tensors, which training then changes separately.

    Raises:
        ConfigError: two tensors overlap in memory, and are not the same.
    """
    spans: dict[int, list[tuple[int, int, bool, str, torch.Tensor]]] = {}
    for name, tensor in named_tensors({key: state[key] for key in ("optimizer", "groups")}):
        if tensor.layout != torch.strided or not tensor.numel() or tensor.device.type == "meta":
            continue
        n_spanned = tensor.numel()
        if not tensor.is_contiguous():
            n_spanned = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        begin, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        span = begin, begin + n_spanned * tensor.itemsize, n_spanned == tensor.numel(), name, tensor
        spans.setdefault(storage, []).append(span)
    for parts in spans.values():
        parts.sort(key=lambda part: part[:2])
        for (first, end, is_dense, name, tensor), (begin, *_, other_name, other) in itertools.pairwise(parts):
            # The first element of a tensor may be in a gap of one before it, unless that has no gaps.
            meets = begin == first or (is_dense and begin < end)
            if meets and identity_of(tensor) != identity_of(other):
                raise ConfigError(
                    f"optimizer state {name!r} and {other_name!r} overlap in memory; torch restores them as "
                    "separate tensors, so training would go on differently: keep only one of them in the "
                    "optimizer's state, and make the other from it"
                )


def _split(
    states: Mapping[Any, Any], name_of: Mapping[Any, str], class_name: str
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Split the states of an optimizer into those of parameters by name, and pairs of other keys and values.

    Raises:
        ConfigError: a key that a file cannot keep.
    """
    named, loose = {}, []
    for key, value in states.items():
        if key in name_of and isinstance(value, dict):
            if value:
                named[name_of[key]] = to_plain(value)
        elif isinstance(key, str | int):
            loose.append([name_of.get(key, key), to_plain(value)])
        else:
            what = f"{class_name}: its state has the key {key!r}, which is no name, number or parameter"
            raise ConfigError(f"{what}; ckptz cannot keep it")
    return named, loose


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter: its first entry in the model's state, which hooks may have renamed.

    Raises:
        ConfigError: the model is sharded by FSDP, whose optimizers hold parts of parameters.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "the model is sharded by FSDP, of which each rank holds a part; save it with "
            "torch.distributed.checkpoint and ckptz.integrations.dcp"
        )
    named, stored = dict(model.named_parameters()), model.state_dict(keep_vars=True)
    live, names = named | stored, dict[torch.Tensor, str]()
    # A compiled `checkpoint_wrapper` is in the names of parameters and not in those of the state.
    keys = names_without_wrappers(model, named) | names_without_wrappers(model, stored)
    for name, key in keys.items():
        if isinstance(live[key], nn.Parameter):
            names.setdefault(live[key], name)
    return names


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]


def _names_of(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of its groups."""
    for i, group in enumerate(optimizer.param_groups):
        if not names.keys() >= set(group[PARAMS]):
            raise ConfigError(
                f"{type(optimizer).__name__}: group {i} has parameters that are not the model's; "
                "was one of the two replaced? Give the Checkpointer the model and its optimizer"
            )
    return [names[parameter] for parameter in _parameters(optimizer)]


def _state_dict_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state_dict of an optimizer whose groups number its parameters, as torch's do.

    Raises:
        ConfigError: it has another form, or state of tensors that are in no group.
    """
    class_name = type(optimizer).__name__
    try:
        saved = optimizer.state_dict()
    except KeyError:
        raise ConfigError(
            f"{class_name}: it keeps state of a tensor that is in none of its parameter groups, which its "
            "state_dict cannot hold; remove that entry of optimizer.state, or add the tensor to a group"
        ) from None
    groups = saved.get(GROUPS) if isinstance(saved, dict) else None
    sizes = [len(group[PARAMS]) for group in optimizer.param_groups]
    is_usual = (
        isinstance(groups, list)
        and isinstance(saved.get(STATE), dict)
        and all(isinstance(group, dict) and isinstance(group.get(PARAMS), list) for group in groups)
        and [len(group[PARAMS]) for group in groups] == sizes
    )
    if not is_usual:
        raise ConfigError(
            f"{class_name}: its state_dict has not the form of torch.optim's (state and param_groups, a "
            "number for each parameter); save it as extra={'optimizer': optimizer}, and pass optimizer=None"
        )
    return dict(saved)


# --- and back ------------------------------------------------------------------------------------


def check_saved(saved: Any, where: str) -> None:
    """Check that a value from a file has the form that `optimizer_state` returns.

    Raises:
        CorruptionError: it has another form.
    """
    parts = {"classes": list, "optimizer": dict, "groups": list}
    if not isinstance(saved, dict) or any(type(saved.get(name)) is not cls for name, cls in parts.items()):
        raise CorruptionError(f"{where}: holds no state of optimizers")
    is_right = all(type(name) is str for name in saved["classes"])
    is_right &= all(type(name) is str and isinstance(one, dict) for name, one in saved["optimizer"].items())
    for group in saved["groups"]:
        names = group.get(PARAMS) if isinstance(group, dict) else None
        is_right &= type(names) is list and all(type(name) is str for name in names)
    is_right &= _is_more(saved.get(MORE), saved) and _are_devices(saved.get(DEVICES, {}))
    if not is_right:
        raise CorruptionError(f"{where}: its state of optimizers is damaged")


def _is_more(more: Any, saved: Mapping[str, Any]) -> bool:
    if more is None:
        return True
    if type(more) is not list or len(more) != len(saved["classes"]):
        return False
    for one in more:
        if not isinstance(one, dict) or type(one.get("n_groups")) is not int or one["n_groups"] < 0:
            return False
        pairs = one.get("loose")
        if type(pairs) is not list or not isinstance(one.get("other"), dict):
            return False
        if not all(
            type(pair) is list and len(pair) == 2 and isinstance(pair[0], str | int) for pair in pairs
        ):
            return False
    return sum(one["n_groups"] for one in more) == len(saved["groups"])


def _are_devices(devices: Any) -> bool:
    return isinstance(devices, dict) and all(
        isinstance(paths, dict) and all(type(place) is str for place in paths.values())
        for paths in devices.values()
    )


def check_optimizers_fit(
    model: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, Any], where: str
) -> None:
    """Check that a saved state is of such optimizers, with the same parameters in the same groups.

    Raises:
        ConfigError: names the first difference.
        CorruptionError: it is no state of optimizers.
    """
    check_saved(saved, where)
    live = optimizer_state(model, optimizers)
    if live["classes"] != saved["classes"]:
        raise ConfigError(
            f"{where}: was saved with {_listed(saved['classes'])}, now there is {_listed(live['classes'])}; "
            "resume with the same optimizer, or restore with weights_only=True"
        )
    now, then = _group_of(live), _group_of(saved)
    if differing := sorted(now.keys() ^ then.keys()):
        which = "not in the checkpoint" if differing[0] in now else "not in the optimizer"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise ConfigError(
            f"{where}: parameter {differing[0]!r}{more} is {which}; give the optimizer the same "
            "parameters, or restore with weights_only=True"
        )
    _check_groups(live, saved, where)


def _check_groups(live: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Check that each group has the same members; groups may have changed places within an optimizer."""
    now, then = _group_of(live), _group_of(saved)
    pairs = {(then[name], now[name]) for name in then}
    for name in then:
        old, new = saved["groups"][then[name]].keys(), live["groups"][now[name]].keys()
        is_same = sum(pair[0] == then[name] or pair[1] == now[name] for pair in pairs) == 1
        if not is_same or not (old <= new or new <= old):  # versions of PyTorch add options
            how = "which is of another optimizer" if is_same else "with other parameters"
            raise ConfigError(
                f"{where}: parameter {name!r} was saved in group {then[name]}, and is in group {now[name]} "
                f"now, {how}; give the same groups, or restore with weights_only=True"
            )
    counts = [len([group for group in one["groups"] if not group[PARAMS]]) for one in (saved, live)]
    if counts[0] != counts[1]:
        raise ConfigError(
            f"{where}: was saved with {counts[0]} empty parameter groups, now there are {counts[1]}; give "
            "the same groups, or restore with weights_only=True"
        )


def _listed(classes: Sequence[str]) -> str:
    return " and ".join(classes) or "no optimizer"


def _group_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the group of each parameter, counted through all optimizers."""
    return {name: i for i, group in enumerate(state["groups"]) for name in group[PARAMS]}


def load_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, Any]) -> None:
    """Load a saved state, which fits, into optimizers; the tensors of `saved` become theirs."""
    names = parameter_names(model) if optimizers else {}
    group_of, n_empty = _group_of(saved), 0
    scalars: dict[Any, torch.Tensor] = {}
    empty = [group for group in saved["groups"] if not group[PARAMS]]
    more = saved.get(MORE) or [{"loose": [], "other": {}}] * len(optimizers)
    for optimizer, own in zip(optimizers, more, strict=True):
        live = _state_dict_of(optimizer)
        own_names = _names_of(optimizer, names)
        numbers = [number for group in live[GROUPS] for number in group[PARAMS]]
        number_of = dict(zip(own_names, numbers, strict=True))
        name_of = dict(zip(numbers, own_names, strict=True))
        groups = []
        for group in live[GROUPS]:
            if group[PARAMS]:
                options = saved["groups"][group_of[name_of[group[PARAMS][0]]]]
            else:
                options, n_empty = empty[n_empty], n_empty + 1
            groups.append({**group, **_options(options, group, scalars), PARAMS: group[PARAMS]})
        states: dict[Any, Any] = {
            number_of[name]: from_plain(_unshared(saved["optimizer"][name], scalars))
            for name in own_names
            if name in saved["optimizer"]
        }
        loose = {number_of.get(key, key): value for key, value in own["loose"]}
        states |= {key: from_plain(_unshared(value, scalars)) for key, value in loose.items()}
        other = {key: from_plain(_unshared(value, scalars)) for key, value in own["other"].items()}
        passed = {
            key: {word: _held_back(value) for word, value in state.items()} if key in name_of else state
            for key, state in states.items()
        }
        optimizer.load_state_dict({STATE: passed, GROUPS: groups, **other})
        for name, parameter in zip(own_names, _parameters(optimizer), strict=True):
            devices = saved.get(DEVICES, {}).get(name, {})
            _put_back(optimizer.state, parameter, states.get(number_of[name]), devices)
        # `load_state_dict` copies options, so that a tensor in a group and in a state would become two.
        for now, group in zip(optimizer.param_groups, groups, strict=True):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and isinstance(now.get(key), torch.Tensor):
                    now[key] = value


def bound_first_moments(saved: Mapping[str, Any], lossy: Collection[str]) -> list[str]:
    """Set first moments of a saved state to zero that are larger than their second moments allow.

    No such file is written any more. Earlier versions restored first moments that move weights hundreds of
    times as far as training could.

    Args:
        saved: the state, which is changed.
        lossy: names in their file of the tensors that lost something; others are never changed.

    Returns:
        Notes for the user.
    """
    n_beyond, names = 0, list[str]()
    for entry in entries_of(saved):
        decay = decay_of(entry.settings, entry.state)
        if decay is None or decay.bound is None or decay.second is None:
            continue
        name = f"optimizer.{entry.key}.{decay.moment}"
        if name not in lossy:
            continue
        state = saved["optimizer"][entry.key]
        moments, squares = state[decay.moment], state[decay.second].to(torch.float32)
        is_beyond = moments.abs() > decay.bound * squares.sqrt()
        if n := int(is_beyond.sum()):
            moments[is_beyond] = 0
            n_beyond, names = n_beyond + n, [*names, name]
    if not n_beyond:
        return []
    return [
        f"{n_beyond} first moments of {len(names)} tensors, first {names[0]!r}, were larger than their "
        "second moments allow and are zero now; the step was saved by an earlier version of ckptz"
    ]


def _options(
    saved: Mapping[str, Any], live: Mapping[str, Any], scalars: dict[Any, torch.Tensor]
) -> dict[str, Any]:
    """Return the options of a saved group; tensors among them go to where the optimizer has them.

    A scalar tensor, such as a learning rate, is restored in place, because a program that changes it may hold
    it outside of the optimizer.
    """
    options = {}
    for key, value in saved.items():
        now = live.get(key)
        if now is not None and _is_in_place(value, now):
            if (identity := identity_of(value)) not in scalars:
                with torch.no_grad():
                    scalars[identity] = now.copy_(value)
            options[key] = scalars[identity]
            continue
        value = from_plain(_unshared(value, scalars))
        is_tensor = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
        options[key] = value.to(now.device) if is_tensor and now is not None else value
    return options


def _is_in_place(saved: Any, now: Any) -> bool:
    """Return whether a saved option is a scalar tensor that fits the one that the optimizer has."""
    if not (isinstance(saved, torch.Tensor) and type(now) is torch.Tensor) or saved.ndim:
        return False
    is_alike = (now.shape, now.dtype) == (saved.shape, saved.dtype)
    return is_alike and not (now.is_inference() or now.device.type == "meta")


def _unshared(value: Any, scalars: dict[Any, torch.Tensor]) -> Any:
    """Copy containers, and scalar tensors, which share memory in a file.

    Args:
        value: a saved value.
        scalars: the copies of scalar tensors so far, by identity: one in several places gets one copy.
    """
    if isinstance(value, torch.Tensor):
        return value if value.ndim else scalars.setdefault(identity_of(value), value.clone())
    if isinstance(value, dict):
        return type(value)((key, _unshared(item, scalars)) for key, item in value.items())
    return type(value)(_unshared(item, scalars) for item in value) if type(value) in (list, tuple) else value


_HELD: Final = object()  # stands for a value that is held back


def _held_back(value: Any) -> Any:
    """Replace what torch's `load_state_dict` would rebuild wrongly; `_put_back` puts it back.

    Strings, sets, arrays, and dicts of other classes are such.
    """
    if type(value) is dict:
        return {key: _held_back(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_held_back, value))
    is_rebuilt = isinstance(value, Iterable) and not isinstance(value, torch.Tensor)
    return _HELD if is_rebuilt else value


def _put_back(state: Any, parameter: torch.Tensor, saved: Any, devices: Mapping[str, str]) -> None:
    """Replace the tensors that `load_state_dict` has cast by those that were saved, and what was held back.

    Args:
        state: `optimizer.state`.
        parameter: whose state.
        saved: its saved state, or None.
        devices: device types by path, of tensors that were not on the parameter's device.
    """
    live = state.get(parameter) if isinstance(state, Mapping) else None
    if not isinstance(live, dict) or not isinstance(saved, dict):
        return

    def placed(value: Any, now: Any, path: tuple[str, ...]) -> Any:
        # A tensor subclass is a form of the optimizer's own, such as codes of 8 bits.
        if isinstance(value, torch.Tensor) and type(now) in (torch.Tensor, nn.Parameter):
            return value.to("cpu" if devices.get(".".join(path)) == "cpu" else now.device)
        if now is _HELD:
            return on_device(value, parameter.device)
        if isinstance(value, dict) and isinstance(now, dict):
            for key in value.keys() & now.keys():
                now[key] = placed(value[key], now[key], (*path, str(key)))
        elif type(value) in (list, tuple) and type(now) is type(value) and len(now) == len(value):
            items = enumerate(zip(value, now, strict=True))
            return type(value)(placed(one, other, (*path, str(i))) for i, (one, other) in items)
        return now

    placed(saved, live, ())


def comparable(state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an `optimizer_state` in the order and with the options that `saved` has.

    Groups may have changed places, and other versions of PyTorch have more options.
    """
    groups, group_of = [], _group_of(state)
    empty = iter([group for group in state["groups"] if not group[PARAMS]])
    for old in saved["groups"]:
        group = state["groups"][group_of[old[PARAMS][0]]] if old[PARAMS] else next(empty)
        options = {key: value for key, value in group.items() if key in old and key != PARAMS}
        groups.append({**options, PARAMS: sorted(group[PARAMS])})
    parts = {"optimizer": state["optimizer"], "classes": state["classes"], "groups": groups}
    return parts | ({MORE: state[MORE]} if MORE in state else {})
