"""Identifies the parameters of numbered optimizer state.

torch's optimizers number their parameters in the order of the parameter groups. The parameter of a number is
identified by names from the user or from newer groups, by the order of the model if it is a torch state too,
by a unique shape, or by the order of the model that a config.json describes. If none of these decides, or a
moment belongs to no weight of the checkpoint, the state stays lossless, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptz.codec.coded import CodedSource
from ckptz.codec.method import MOMENT_ROLES
from ckptz.codec.sensitivity import floats_in
from ckptz.errors import ConfigError
from ckptz.format.sources import TensorSource
from ckptz.format.values import FLOAT_KINDS
from ckptz.guidance.parameter_names import NO_NAMES, ParameterNames
from ckptz.kernels import cpu
from ckptz.kernels.floats import Patterns
from ckptz.state.roles import BASES, Role, Rule, role_of
from ckptz.state.skeleton import TensorRef, parse_tree

# Tensors of a state_dict that no optimizer has: statistics of batch normalisation.
BUFFERS: Final = re.compile(r"(^|\.)running_(mean|var)$")
# Kinds of state with the shape of their parameter.
WHOLE_STATES: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "variance")
Known = tuple[dict[str, Role], list[str]]


@dataclass(frozen=True, slots=True)
class ParamState:
    """A weight with its optimizer state and settings.

    Attributes:
        name: name of the weight in its file.
        weight: its values.
        settings: settings of its parameter group, as plain values.
        state: tensors and numbers of its optimizer state, by the optimizer's keys.
        names: names of these tensors in their file, by key.
        is_adamw: whether the optimizer is AdamW, which older versions of torch do not record.
        rounded: name and values of the 16-bit weight that this weight is the fp32 master of, or None.
    """

    name: str
    weight: TensorSource
    settings: Mapping[str, Any]
    state: Mapping[str, Any]
    names: Mapping[str, str]
    is_adamw: bool = False
    rounded: tuple[str, TensorSource] | None = None

    @property
    def rate(self) -> float | None:
        """Learning rate of the next update; None if unknown."""
        rate = self.settings.get("lr")
        return rate if isinstance(rate, int | float) else None

    @property
    def updates(self) -> float | None:
        """Number of its updates; None if its optimizer does not count them."""
        step = self.state.get("step")
        return float(step) if isinstance(step, int | float) else None


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """State and settings of an optimizer for one parameter, as in `ParamState`."""

    key: Any  # number or name in the optimizer's state
    group: int  # position of its parameter group
    settings: Mapping[str, Any]
    state: Mapping[str, Any]
    names: Mapping[str, str]
    label: str | None  # name of the parameter, if the group or the key contains it

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the parameter, or None if no state has it."""
        wholes = (getattr(self.state[word], "shape", ()) for word in WHOLE_STATES if word in self.names)
        return next(wholes, None)

    def roles(
        self, parameter: str, tensors: Mapping[str, TensorSource], *, has_weight: bool = True
    ) -> dict[str, Role]:
        """Return roles of its tensors by name: moments without a weight or in another basis are lossless."""
        is_plain = has_weight and BASES.isdisjoint(self.state)
        roles = {}
        for word, name in self.names.items():
            role = role_of(f"optimizer.{parameter}.{word}", tensors[name].shape, tensors[name].dtype.is_float)
            roles[name] = role if is_plain else replace(role, role="other")
        return roles


Weights = Sequence[tuple[str, tuple[int, ...]]]  # parameters and their shapes, in order


def known_roles(
    tensors: Mapping[str, TensorSource],
    tree: Any,
    rules: Sequence[Rule] = (),
    own: Collection[str] = (),
    model_tree: Any = None,
    names: ParameterNames = NO_NAMES,
) -> Known:
    """Determine the roles of numbered optimizer state.

    Args:
        tensors: tensors of the checkpoint.
        tree: tree of the checkpoint as in `Index.tree`, or None.
        rules: the user's additions to the table of roles, which have priority.
        own: names of tensors from a file of optimizer state.
        model_tree: the tree of the weights, if it is another one.
        names: sources of the names of numbered parameters.

    Returns:
        The roles of tensors that do not follow from their names, and notes about unknown ones for the user.

    Raises:
        ConfigError: the names from the user do not match this checkpoint.
    """
    owned: dict[str, Role] = {}
    notes: list[str] = []
    root = None if tree is None else parse_tree(tree).root
    states = list(optimizers_in(root))
    inside = {*own, *(ref.name for state in states for ref in _refs(state))}
    roles = {n: role_of(n, s.shape, s.dtype.is_float, rules) for n, s in tensors.items()}
    ordered = {ref.name for ref in _refs(root)}
    if model_tree is not None:
        ordered |= {ref.name for ref in _refs(parse_tree(model_tree).root)}
    weights = {
        name: (roles[name].parameter, tuple(source.shape))
        for name, source in tensors.items()
        if roles[name].role == "weight" and name not in inside and not BUFFERS.search(name)
    }
    parts = [{ref.name for ref in _refs(part)} for part in _children(root)]
    optimizers = [list(entries_in(state, tensors)) for state in states]
    for entries in _labelled(optimizers, names):
        if not any(entry.names for entry in entries):
            continue
        parameters, fault = _parameters(entries, weights, ordered, parts, names)
        if fault and weights:
            unknown = next(n for e in entries if e.key not in parameters for n in e.names.values())
            notes.append(
                f"optimizer state {unknown!r} and others have no parameter's name: {fault}; give them with "
                "--set input.param_names=FILE, or save the model with torch.save"
            )
        for entry in entries:
            owned |= entry.roles(parameters.get(entry.key, f"state.{entry.key}"), tensors)
    user_set = {name for name in tensors if any(rule.pattern.match(name) for rule in rules)}
    owned = {name: role for name, role in owned.items() if name not in user_set}
    owned |= _lossless_states({**roles, **owned}, inside, user_set, tensors, notes)
    return owned, notes


def roles_beside(
    read: Mapping[str, TensorSource],
    tree: Any,
    weights: Mapping[str, TensorSource],
    model_tree: Any,
    rules: Sequence[Rule] = (),
) -> Known:
    """Determine the roles of tensors that are `read` from another checkpoint than the weights.

    If that checkpoint has weights, they identify its moments; if not, the weights of the model do.
    """
    alone = known_roles(read, tree, rules)
    for name, source in read.items():
        role = alone[0].get(name) or role_of(name, source.shape, source.dtype.is_float, rules)
        if role.role == "weight":
            return alone
    return known_roles({**weights, **read}, tree, rules, tuple(read), model_tree)


def optimizers_in(node: Any) -> Iterator[Mapping[Any, Any]]:
    """Yield the states of all torch optimizers in a tree, at any level."""
    is_mapping = isinstance(node, Mapping)
    if is_mapping and isinstance(node.get("state"), Mapping) and isinstance(node.get("param_groups"), list):
        yield node
        return
    for child in _children(node):
        yield from optimizers_in(child)


def param_states_in(
    tensors: Mapping[str, TensorSource], tree: dict[str, Any] | None, roles: Mapping[str, Role]
) -> dict[str, ParamState]:
    """Return the weights in a file with torch optimizer state in the same file, by parameter.

    If the file has the fp32 master of a 16-bit weight, the master is returned.

    Args:
        tensors: tensors of the file.
        tree: tree of the file, as in `Index.tree`.
        roles: roles of the tensors, which name the parameters of numbered states.
    """
    states: dict[str, ParamState] = {}
    weights = {roles[name].parameter: name for name in tensors if roles[name].role == "weight"}
    for state in optimizers_in(None if tree is None else parse_tree(tree).root):
        for entry in entries_in(state, tensors):
            owners = {roles[name].parameter for name in entry.names.values()} & weights.keys()
            if len(owners) != 1:
                continue
            parameter = owners.pop()
            name = weights[parameter]
            master = _master_of(tensors[name], parameter, tensors, roles)
            states[parameter] = ParamState(
                master or name,
                tensors[master or name],
                *(entry.settings, entry.state, entry.names),
                rounded=None if master is None else (name, tensors[name]),
            )
    return states


def _master_of(
    weight: TensorSource,
    parameter: str,
    tensors: Mapping[str, TensorSource],
    roles: Mapping[str, Role],
) -> str | None:
    """Find the fp32 tensor that a 16-bit weight is rounded from, by name and values; or None."""
    if not can_move(weight) or weight.dtype.name == "F32":
        return None
    own = parameter.partition(".")[2] or parameter  # without the name of the part of a state
    for name, source in tensors.items():
        is_like = source.shape == weight.shape and source.dtype.name == "F32" and can_move(source)
        if not (is_like and roles[name].role == "weight" and roles[name].parameter.endswith(f".{own}")):
            continue
        here = next(source.chunk_bounds())
        if np.array_equal(rounded(source.patterns(*here), weight), weight.patterns(*here)):
            return name
    return None


def can_move(weight: TensorSource) -> bool:
    """Return whether the dtype of a weight allows momentum correction."""
    return not isinstance(weight, CodedSource) and weight.dtype.name in FLOAT_KINDS and weight.n_patterns > 0


def rounded(patterns: Patterns, to: TensorSource) -> Patterns:
    """Round F32 patterns to the dtype of a weight."""
    rounded_patterns: Patterns = cpu().from_f32(patterns, FLOAT_KINDS[to.dtype.name])
    return rounded_patterns


def _number(value: Any, tensors: Mapping[str, TensorSource]) -> Any:
    """Return a stored tensor, or its value if it is one number; everything else unchanged."""
    if not isinstance(value, TensorRef) or value.name not in tensors:
        return value
    source = tensors[value.name]
    if source.shape or source.dtype.name not in FLOAT_KINDS:
        return source
    return float(floats_in(source, 0, 1)[0])


def _refs(node: Any) -> Iterator[TensorRef]:
    if isinstance(node, TensorRef):
        yield node
    for child in _children(node):
        yield from _refs(child)


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, list | tuple) else ()


def entries_in(state: Mapping[Any, Any], tensors: Mapping[str, TensorSource]) -> Iterator[OptimizerEntry]:
    """Yield the state of an optimizer for each parameter, in the order of its groups.

    Args:
        state: the optimizer's state_dict, with a TensorRef for each stored tensor.
        tensors: stored tensors by name.
    """
    for group, settings in enumerate(state["param_groups"]):
        if not isinstance(settings, Mapping):
            continue
        keys, labels = settings.get("params", []), settings.get("param_names")
        labels = labels if isinstance(labels, list) and len(labels) == len(keys) else [None] * len(keys)
        numbers = {name: _number(value, tensors) for name, value in settings.items() if name != "params"}
        for key, label in zip(keys, labels, strict=True):
            own = state["state"].get(key, {})
            refs = {k: v.name for k, v in own.items() if isinstance(k, str) and isinstance(v, TensorRef)}
            yield OptimizerEntry(
                key=key,
                group=group,
                settings=numbers,
                state={word: _number(value, tensors) for word, value in own.items()},
                names={word: name for word, name in refs.items() if name in tensors},
                label=label or (key if isinstance(key, str) else None),
            )


def unflattened(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the optimizers in a state that torch.distributed.checkpoint has flattened.

    Names are "optimizer.state.layer.weight.exp_avg" and "optimizer.param_groups.0.lr", or
    "optimizer.param_groups.layer.weight.lr" if the state was already flat.
    """
    for begin in {n[: f".{n}".find(".param_groups.")] for n in state if ".param_groups." in f".{n}"}:
        groups: dict[str, dict[str, Any]] = {}
        for name, value in state.items():
            if name.startswith(f"{begin}param_groups."):
                group, _, key = name.removeprefix(f"{begin}param_groups.").rpartition(".")
                groups.setdefault(group, {"params": [group]})[key] = value
        states: dict[str, dict[str, Any]] = {key: {} for one in groups.values() for key in one["params"]}
        for name, value in state.items():
            if name.startswith(f"{begin}state."):
                parameter, _, key = name.removeprefix(f"{begin}state.").rpartition(".")
                while (
                    parameter and parameter not in states
                ):  # tensors of a list, as SOAP's, have numbers last
                    parameter, _, key = parameter.rpartition(".")
                if parameter:
                    states[parameter][key] = value
        yield {"state": states, "param_groups": list(groups.values())}


def weights_of(names: Iterable[str], parameters: Collection[str]) -> dict[str, str]:
    """Return the weight of each parameter: the first tensor whose name ends with the parameter's."""
    weights: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        if (parameter := next((end for end in ends if end in parameters), None)) is not None:
            weights.setdefault(parameter, name)
    return weights


def _labelled(
    optimizers: Sequence[Sequence[OptimizerEntry]], names: ParameterNames
) -> Iterator[list[OptimizerEntry]]:
    """Yield the entries of each optimizer with the names that the user listed, in order."""
    listed, n = names.listed(), sum(map(len, optimizers))
    if names.listed_in is not None and len(listed) != n:
        raise ConfigError(
            f"{names.listed_in}: has {len(listed)} names, and the optimizer numbers {n} parameters; list "
            "one on each line, in the order of the numbers"
        )
    labels = iter(listed)
    for entries in optimizers:
        yield [replace(entry, label=next(labels, entry.label)) for entry in entries]


def _parameters(
    entries: Sequence[OptimizerEntry],
    weights: Mapping[str, tuple[str, tuple[int, ...]]],
    ordered: set[str],
    parts: Iterable[Collection[str]],
    names: ParameterNames,
) -> tuple[dict[Any, str], str]:
    """Return the parameter of each key of an optimizer, and why some were not found, or an empty string.

    A state may contain a model and averages of it: if all of its weights together do not match the optimizer,
    the first part that does is used as the model.

    Args:
        entries: the state of the optimizer.
        weights: parameter and shape of each weight.
        ordered: names of weights whose order is that of the model. That of a safetensors file is not.
        parts: names of the tensors of each part of the state.
        names: sources of the names of numbered parameters.
    """

    def match(part: Collection[str]) -> tuple[dict[Any, str], str]:
        own = {name: weight for name, weight in weights.items() if name in part}
        if names.listed_in is not None:
            _check_listed(entries, list(own.values()), names.listed_in)
        result = _match(entries, list(own.values()), is_ordered=ordered.issuperset(own))
        return (result[1] and _match_by_model(entries, list(own.values()), names)) or result

    whole = match(weights)
    if not whole[1]:
        return whole
    results = (match(part) for part in parts if not weights.keys().isdisjoint(part))
    return next((one for one in results if not one[1]), whole)


def _check_listed(entries: Sequence[OptimizerEntry], weights: Weights, listed_in: Path) -> None:
    shapes = dict(weights)
    for entry in entries:
        label = (entry.label or "").removeprefix("model.")
        if entry.names and label not in shapes:
            raise ConfigError(f"{listed_in}: no weight of the checkpoint is called {entry.label!r}")
        if entry.names and entry.shape not in (None, shapes[label]):
            raise ConfigError(
                f"{listed_in}: {entry.label!r} has shape {list(shapes[label])}, and parameter {entry.key} of "
                f"the optimizer {list(entry.shape or ())}; list the names in the order of the numbers"
            )


def _match(
    entries: Sequence[OptimizerEntry], weights: Weights, *, is_ordered: bool
) -> tuple[dict[Any, str], str]:
    """Return the parameter of each key by labels, order or shapes in the checkpoint, and a fault or ""."""
    shapes = dict(weights)
    labels = {entry.key: (entry.label or "").removeprefix("model.") for entry in entries}
    if all(label in shapes for label in labels.values()):
        unlike = [e for e in entries if e.shape not in (None, shapes[labels[e.key]])]
        fault = f"{labels[unlike[0].key]!r} has another shape in the model" if unlike else ""
        return ({}, fault) if unlike else (labels, "")
    pairs = list(zip(entries, weights, strict=False))
    is_whole = is_ordered and len(entries) == len(weights)
    if is_whole and all(entry.shape in (None, shape) for entry, (_, shape) in pairs):
        return {entry.key: parameter for entry, (parameter, _) in pairs}, ""
    return _match_by_shape(entries, weights, is_ordered=is_ordered)


def _match_by_model(
    entries: Sequence[OptimizerEntry], weights: Weights, names: ParameterNames
) -> tuple[dict[Any, str], str] | None:
    """Return parameters in the order of the model that a folder describes; None if no or two orders match."""
    shapes = dict(weights)
    ways = []
    for order in names.orders():
        known = [name.removeprefix("model.") for name in order]
        own = [(name, shapes[name]) for name in known if name in shapes]
        parameters, fault = _match(entries, own, is_ordered=True)
        if not fault and parameters not in ways:
            ways.append(parameters)
    return (ways[0], "") if len(ways) == 1 else None


def _match_by_shape(
    entries: Sequence[OptimizerEntry], weights: Weights, *, is_ordered: bool
) -> tuple[dict[Any, str], str]:
    parameters: dict[Any, str] = {}
    faults = []
    for shape in dict.fromkeys(entry.shape for entry in entries if entry.names):
        own = [entry for entry in entries if entry.shape == shape]
        theirs = [parameter for parameter, weight_shape in weights if weight_shape == shape]
        is_one_group = len({entry.group for entry in own}) == 1
        if shape is None:
            faults.append(f"the state of {len(own)} parameters tells no shape")
        elif len(own) != len(theirs):
            faults.append(f"{len(own)} have shape {list(shape)}, of the model's parameters {len(theirs)}")
        elif len(own) > 1 and not (is_ordered and is_one_group):
            faults.append(f"{len(own)} have shape {list(shape)}, and the order of the model is not known")
        else:
            parameters |= {entry.key: parameter for entry, parameter in zip(own, theirs, strict=True)}
    return parameters, faults[0] if faults else ""


def _lossless_states(
    roles: Mapping[str, Role],
    inside: Collection[str],
    user_set: Collection[str],
    tensors: Mapping[str, TensorSource],
    notes: list[str],
) -> dict[str, Role]:
    """Assign the role "other", which stays lossless, to state with unknown keys or unknown weights.

    `inside` are names of optimizer state, `user_set` those whose role the user has set, which is kept.
    """
    free = {name: source for name, source in tensors.items() if name not in user_set}
    unknown = [name for name in free if name in inside and roles[name].role == "weight"]
    states = {name: replace(roles[name], role="other") for name in unknown}
    exact = [
        name
        for name, source in free.items()
        if name in inside and roles[name].role in ("weight", "other") and _is_large(source)
    ]
    if exact:
        notes.append(
            f"{len(exact)} tensors of optimizer state are neither moments nor momentum and stay lossless, "
            f"first {exact[0]!r}"
        )
    weights = [name for name in tensors if roles[name].role == "weight" and name not in inside]
    parameters = {roles[name].parameter for name in weights}
    alone = [n for n in free if roles[n].role in MOMENT_ROLES and roles[n].parameter not in parameters]
    # Without a large weight the checkpoint has no model, only counters; its moments then keep their roles.
    if alone and any(_is_large(tensors[name]) for name in weights):
        states |= {name: replace(roles[name], role="other") for name in alone}
        notes.append(
            f"{len(alone)} moments belong to no weight of the checkpoint and stay lossless, "
            f"first {alone[0]!r}"
        )
    return states


def _is_large(source: TensorSource) -> bool:
    """Return whether a state has one element for each element of its parameter, unlike a counter."""
    return source.dtype.is_float and source.n_patterns > 1
