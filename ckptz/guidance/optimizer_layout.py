"""The layout of optimizer state: which parameter each of its numbers stands for.

torch's optimizers number their state by the order of their parameter groups. The parameter of a number is
found by the names that the user or newer groups give, by the order of the model where that is a torch state
too, by a shape that nothing else has, or by the order of the model that a config.json describes. Where none
of this decides, and where a moment belongs to no weight of the checkpoint at all, the state stays lossless
and a note names it: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from ckptz.codec.method import MOMENT_ROLES
from ckptz.errors import CkptzError, ConfigError
from ckptz.format.envelope import strict_json
from ckptz.format.sources import TensorSource
from ckptz.state.roles import BASES, Role, Rule, role_of
from ckptz.state.skeleton import TensorRef, parse_tree

CONFIG_FILE: Final = "config.json"
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_LAYERS: Final = 4096  # a config may claim as many as it likes, and each takes time to build
# Weights of a state_dict that no optimizer knows: statistics of batch normalisation.
BUFFERS: Final = re.compile(r"(^|\.)running_(mean|var)$")
# States that have the shape of their parameter.
WHOLE_STATES: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "variance")
Known = tuple[dict[str, Role], list[str]]


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """The names of parameters that an optimizer numbers, and where they come from."""

    # a file of the user's with a name on each line, in the order of the optimizer's numbers
    listed_in: Path | None = None
    beside: Path | None = None  # the folder, or a file of it, that may hold a config.json

    def listed(self) -> list[str]:
        """Read the names that the user gives; none without a file.

        Raises:
            ConfigError: not text, or a name occurs twice.
        """
        if self.listed_in is None:
            return []
        try:
            names = [line.strip() for line in self.listed_in.read_text("utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            what = "not a text file in UTF-8; give one name on each line"
            raise ConfigError(f"{self.listed_in}: {what}") from None
        if len(set(names)) < len(names):
            raise ConfigError(f"{self.listed_in}: names a parameter twice; give each of them once")
        return names

    def orders(self) -> Sequence[Sequence[str]]:
        """Return the orders in which an optimizer may number the model's parameters; none without a model."""
        if self.beside is None:
            return ()
        folder = self.beside if self.beside.is_dir() else self.beside.parent
        return _orders(folder / CONFIG_FILE)


@cache
def _orders(config: Path) -> tuple[tuple[str, ...], ...]:
    """List parameter names in the order of the model, and in the Trainer's: weight decay first, then none."""
    try:
        if not config.is_file() or config.stat().st_size > MAX_CONFIG_BYTES or not _is_bounded(config):
            return ()
        import torch
        import transformers
    except (ImportError, OSError, CkptzError):
        return ()
    try:
        model_config = transformers.AutoConfig.from_pretrained(
            config.parent, local_files_only=True, trust_remote_code=False
        )
        kind = getattr(transformers, model_config.architectures[0])
        with torch.device("meta"):
            model = kind(model_config)
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    except Exception:  # a model that this transformers does not have, or cannot build so
        return ()
    names = tuple(name for name, _ in model.named_parameters())
    return names, tuple(sorted(names, key=lambda name: name not in decayed))


def _is_bounded(config: Path) -> bool:
    """Return whether the model of a config has few enough layers to be built quickly."""
    layers: list[Any] = []

    def look(node: Any, key: str = "") -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                look(value, name)
        elif isinstance(node, list):
            for value in node:
                look(value, key)
        elif isinstance(node, int) and ("layer" in key or "block" in key or "depth" in key):
            layers.append(node)

    look(strict_json(config.read_bytes(), CONFIG_FILE))
    return all(n <= MAX_LAYERS for n in layers)


NO_NAMES: Final = ParameterNames()


@dataclass(frozen=True, slots=True)
class _Entry:
    """The state of one parameter: tensor names by what the optimizer calls them."""

    key: Any  # number or name in the optimizer's state
    group: int  # position of its parameter group
    tensors: Mapping[str, str]  # names by word: "exp_avg" and so on
    shape: tuple[int, ...] | None  # of the parameter, if a state tells it
    label: str | None  # name of the parameter, if the group or the key tells it
    is_plain: bool  # its moments are those of elements of the parameter


Weights = Sequence[tuple[str, tuple[int, ...]]]  # parameters and their shapes, in order


def known_roles(
    tensors: Mapping[str, TensorSource],
    tree: Any,
    rules: Sequence[Rule] = (),
    own: Collection[str] = (),
    model_tree: Any = None,
    names: ParameterNames = NO_NAMES,
) -> Known:
    """Find the parameters of numbered optimizer state, and say what stays unknown.

    Args:
        tensors: of the checkpoint.
        tree: as in `Index.tree`, or None.
        rules: the user's rows of the table of roles, which nothing here overrules.
        own: names of tensors that come from a file of optimizer state.
        model_tree: the tree of the weights, if that is another one.
        names: where names of numbered parameters may come from.

    Returns:
        The roles of tensors where names alone do not say them, and notes for the user.

    Raises:
        ConfigError: the names that the user gives are not those of this checkpoint.
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
    parts = [{ref.name for ref in _refs(part)} for part in _children(root)]
    optimizers = [list(_entries(state, tensors)) for state in states]
    for entries in _labelled(optimizers, names):
        owned |= _join(entries, tensors, roles, inside, ordered, parts, notes, names)
    given = {name for name in tensors if any(rule.pattern.match(name) for rule in rules)}
    owned = {name: role for name, role in owned.items() if name not in given}
    owned |= _lossless_states({**roles, **owned}, inside, given, tensors, notes)
    return owned, notes


def roles_beside(
    read: Mapping[str, TensorSource],
    tree: Any,
    weights: Mapping[str, TensorSource],
    model_tree: Any,
    rules: Sequence[Rule] = (),
) -> Known:
    """Find the roles of tensors that are `read` from a checkpoint beside the weights of another one.

    A file that holds weights itself says whose moments it has; of optimizer state alone, the model decides.
    """
    alone = known_roles(read, tree, rules)
    for name, source in read.items():
        role = alone[0].get(name) or role_of(name, source.shape, source.dtype.is_float, rules)
        if role.role == "weight":
            return alone
    return known_roles({**weights, **read}, tree, rules, tuple(read), model_tree)


def optimizers_in(node: Any) -> Iterator[Mapping[Any, Any]]:
    """Find the states of torch optimizers anywhere in the root of a tree."""
    is_mapping = isinstance(node, Mapping)
    if is_mapping and isinstance(node.get("state"), Mapping) and isinstance(node.get("param_groups"), list):
        yield node
        return
    for child in _children(node):
        yield from optimizers_in(child)


def _refs(node: Any) -> Iterator[TensorRef]:
    if isinstance(node, TensorRef):
        yield node
    for child in _children(node):
        yield from _refs(child)


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, list | tuple) else ()


def _entries(state: Mapping[Any, Any], tensors: Mapping[str, TensorSource]) -> Iterator[_Entry]:
    for group, settings in enumerate(state["param_groups"]):
        if not isinstance(settings, Mapping):
            continue
        keys, labels = settings.get("params", []), settings.get("param_names")
        labels = labels if isinstance(labels, list) and len(labels) == len(keys) else [None] * len(keys)
        for position, key in enumerate(keys):
            held = state["state"].get(key, {})
            names = {
                word: ref.name
                for word, ref in held.items()
                if isinstance(word, str) and isinstance(ref, TensorRef) and ref.name in tensors
            }
            label = labels[position] or (key if isinstance(key, str) else None)
            whole = next((tensors[names[word]] for word in WHOLE_STATES if word in names), None)
            shape = None if whole is None else whole.shape
            yield _Entry(key, group, names, shape, label, BASES.isdisjoint(held))


def _labelled(optimizers: Sequence[Sequence[_Entry]], names: ParameterNames) -> Iterator[list[_Entry]]:
    """Yield the entries of each optimizer with the names that the user listed, in order."""
    listed, n = names.listed(), sum(map(len, optimizers))
    if names.listed_in is not None and len(listed) != n:
        raise ConfigError(
            f"{names.listed_in}: holds {len(listed)} names, and the optimizer numbers {n} parameters; give "
            "one on each line, in the order of the numbers"
        )
    labels = iter(listed)
    for entries in optimizers:
        yield [replace(entry, label=next(labels, entry.label)) for entry in entries]


def _join(
    entries: Sequence[_Entry],
    tensors: Mapping[str, TensorSource],
    roles: Mapping[str, Role],
    inside: Collection[str],
    ordered: set[str],
    parts: Sequence[Collection[str]],
    notes: list[str],
    names: ParameterNames,
) -> dict[str, Role]:
    """Find the roles of one optimizer's state by the names of its parameters.

    A state may hold a model and averages of it. So where its weights together do not fit the optimizer, the
    first of its parts that does is the model.
    """
    if not any(entry.tensors for entry in entries):
        return {}
    weights = {
        name: (roles[name].parameter, tuple(source.shape))
        for name, source in tensors.items()
        if roles[name].role == "weight" and name not in inside and not BUFFERS.search(name)
    }
    # A safetensors file has its tensors in an order of its own.
    parameters, fault = _parameters(entries, list(weights.values()), ordered >= set(weights), names)
    for part in parts if fault else ():
        own = {name: weight for name, weight in weights.items() if name in part}
        if own and not (of_part := _parameters(entries, list(own.values()), ordered >= set(own), names))[1]:
            parameters, fault = of_part
            break
    if fault and weights:
        unknown = next(n for e in entries if e.key not in parameters for n in e.tensors.values())
        notes.append(
            f"optimizer state {unknown!r} and others have no parameter's name: {fault}; give them with "
            "--set input.param_names=FILE, or save the model with torch.save"
        )
    owned = {}
    for entry in entries:
        label = parameters.get(entry.key, f"state.{entry.key}")
        for word, name in entry.tensors.items():
            source = tensors[name]
            role = role_of(f"optimizer.{label}.{word}", source.shape, source.dtype.is_float)
            owned[name] = role if entry.is_plain else replace(role, role="other")
    return owned


def _parameters(
    entries: Sequence[_Entry], weights: Weights, is_ordered: bool, names: ParameterNames
) -> tuple[dict[Any, str], str]:
    """Find the parameter of each key; the text says why some were not found, or is empty."""
    if names.listed_in is not None:
        _check_listed(entries, weights, names.listed_in)
    parameters, fault = _match(entries, weights, is_ordered=is_ordered)
    return (fault and _match_by_model(entries, weights, names)) or (parameters, fault)


def _check_listed(entries: Sequence[_Entry], weights: Weights, listed_in: Path) -> None:
    shapes = dict(weights)
    for entry in entries:
        label = (entry.label or "").removeprefix("model.")
        if entry.tensors and label not in shapes:
            raise ConfigError(f"{listed_in}: no weight of the checkpoint is called {entry.label!r}")
        if entry.tensors and entry.shape not in (None, shapes[label]):
            raise ConfigError(
                f"{listed_in}: {entry.label!r} has shape {list(shapes[label])}, and parameter {entry.key} of "
                f"the optimizer {list(entry.shape or ())}; give the names in the order of the numbers"
            )


def _match(entries: Sequence[_Entry], weights: Weights, *, is_ordered: bool) -> tuple[dict[Any, str], str]:
    """Find the parameter of each key by labels, order or shapes in the checkpoint, or say what is wrong."""
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
    entries: Sequence[_Entry], weights: Weights, names: ParameterNames
) -> tuple[dict[Any, str], str] | None:
    """Find parameters in the order of the model that a folder describes; None if no order fits, or two do."""
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
    entries: Sequence[_Entry], weights: Weights, *, is_ordered: bool
) -> tuple[dict[Any, str], str]:
    parameters: dict[Any, str] = {}
    faults = []
    for shape in dict.fromkeys(entry.shape for entry in entries if entry.tensors):
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
    given: Collection[str],
    tensors: Mapping[str, TensorSource],
    notes: list[str],
) -> dict[str, Role]:
    """Assign the role "other", which stays lossless, to state with unknown keys or unknown weights.

    `inside` are names of optimizer state, `given` those whose role the user has given; they keep it.
    """
    free = {name: source for name, source in tensors.items() if name not in given}
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
    # A checkpoint without a model has moments alone, whatever numbers stand beside them.
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
