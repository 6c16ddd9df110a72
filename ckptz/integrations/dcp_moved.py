"""Finds the optimizer state of a rank's parts of its weights, and the share of moves that all ranks follow.

torch.distributed.checkpoint gives a state flat names: "optimizer.state.layer.weight.exp_avg" beside
"optimizer.param_groups.0.lr", or "optimizer.param_groups.layer.weight.lr" where the state was flattened
before. Each rank measures how training follows lost momentum on its own parts; the products of all ranks are
added up, so that a weight is moved by one share wherever its parts are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from ckptz.errors import CkptzError
from ckptz.format.sources import TensorSource
from ckptz.guidance.momentum import ParamState
from ckptz.guidance.momentum_decay import ProjectionStats, total
from ckptz.parallel import uninterrupted
from ckptz.state.roles import BASES, Role, role_of
from ckptz.training.state import as_number, sampled_weights

FAILED_ELSEWHERE: Final = "the save failed on another rank, whose error says why; save again"


@dataclass(frozen=True, slots=True)
class _Kept:
    """Settings and state that an optimizer keeps of a parameter.

    Attributes:
        settings: of its group.
        state: names of tensors in the flat state, and numbers, by what the optimizer calls them.
    """

    settings: Mapping[str, Any]
    state: dict[str, Any] = field(default_factory=dict)


def described(
    state: Mapping[str, Any], parts: Mapping[str, TensorSource]
) -> tuple[dict[str, Role], dict[str, ParamState]]:
    """Return the roles of a rank's parts of a flat state, and the optimizer state of its weights.

    Args:
        state: by flat names.
        parts: tensors of which this rank writes one part, by name; moments are split as their weights are.

    Returns:
        Roles of tensors that belong to parameters, by name; weights by their parameters.
    """
    kept = _optimizers_in(state)
    inside = {name for one in kept.values() for name in one.state.values() if isinstance(name, str)}
    weights = _weights_of((name for name in state if name not in inside), kept)
    roles, trained = {}, {}
    for parameter, one in kept.items():
        weight, names = weights.get(parameter), {k: n for k, n in one.state.items() if isinstance(n, str)}
        for key, name in names.items():
            role = role_of(f"optimizer.{parameter}.{key}", state[name].shape, state[name].is_floating_point())
            is_plain = weight is not None and role.role != "weight" and BASES.isdisjoint(names)
            roles[name] = role if is_plain else replace(role, role="other")
        if weight is None:
            continue
        layer_type = role_of(parameter, state[weight].shape, is_float=True).layer_type
        roles[weight] = Role("weight", parameter, layer_type)
        if weight in parts:
            own = {key: name for key, name in names.items() if name in parts}
            numbers = {key: value for key, value in one.state.items() if key not in names}
            trained[parameter] = ParamState(
                name=weight,
                weight=parts[weight],
                settings=one.settings,
                state=numbers | {key: parts[name] for key, name in own.items()},
                names=own,
            )
    return roles, trained


def sampled(state: Mapping[str, Any]) -> dict[str, ParamState]:
    """Sample this rank's parts of weights as a load has left them; see `described`."""
    local = {n: getattr(v, "to_local", lambda v=v: v)() for n, v in state.items()}
    return described(state, sampled_weights(local))[1]


def _optimizers_in(state: Mapping[str, Any]) -> dict[str, _Kept]:
    """Find what optimizers keep of parameters, by the names of these."""
    begins = {name[: f".{name}".find(".param_groups.")] for name in state if ".param_groups." in f".{name}"}
    states: dict[str, _Kept] = {}
    ambiguous = set()  # names of two models' parameters
    for begin in begins:
        groups: dict[str, dict[str, Any]] = {}
        for name, value in state.items():
            if name.startswith(f"{begin}param_groups."):
                group, _, key = name.removeprefix(f"{begin}param_groups.").rpartition(".")
                groups.setdefault(group, {})[key] = as_number(value)
        own = {p: _Kept(group) for name, group in groups.items() for p in group.pop("params", [name])}
        for name, value in state.items():
            if name.startswith(f"{begin}state."):
                parameter, _, key = name.removeprefix(f"{begin}state.").rpartition(".")
                if parameter in own and isinstance(value, torch.Tensor):
                    number = as_number(value)
                    own[parameter].state[key] = name if number is value else number
        ambiguous |= states.keys() & own.keys()
        states |= own
    return {parameter: one for parameter, one in states.items() if parameter not in ambiguous}


def _weights_of(names: Iterator[str], kept: Mapping[str, _Kept]) -> dict[str, str]:
    """Find the weight of each parameter: the first tensor whose name ends with the parameter's."""
    weight_names: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        if (parameter := next((end for end in ends if end in kept), None)) is not None:
            weight_names.setdefault(parameter, name)
    return weight_names


class RankPool:
    """Adds up what the ranks of a save have measured. All ranks take part once, whatever becomes of them.

    Args:
        group: of the ranks; None if there is one.
        n_ranks: that save. Where they are not those of the group, each counts for itself.
    """

    def __init__(self, group: dist.ProcessGroup | None, n_ranks: int) -> None:
        is_whole = group is not None and dist.get_world_size(group) == n_ranks
        self._group = group if is_whole else None
        self._pooled: dict[str, ProjectionStats] | None = None

    def __call__(self, own: dict[str, ProjectionStats] | None) -> dict[str, ProjectionStats]:
        """Return the sums over all ranks; when a file is written again, the first sums.

        Args:
            own: sums of this rank; None where its save has failed.

        Raises:
            CkptzError: the save has failed on a rank.
        """
        if self._pooled is None:
            uninterrupted(functools.partial(self._pool, own))
        assert self._pooled is not None
        return self._pooled

    def _pool(self, own: dict[str, ProjectionStats] | None, interrupts: Sequence[BaseException]) -> None:
        self._pooled = {}  # who could not reach the others does not try again
        ranks: list[Any] = [None if interrupts else own]
        if self._group is not None:
            [own] = ranks
            ranks = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(ranks, own, group=self._group)
        if None in ranks:
            raise CkptzError(FAILED_ELSEWHERE)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        self._pooled = {name: total(rank[name] for rank in ranks if name in rank) for name in names}

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Take part at the latest at the end, so that nobody waits for a rank that failed or has no part."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(CkptzError):  # of all failures, its own says most
                self(None)
            raise
        self({})
