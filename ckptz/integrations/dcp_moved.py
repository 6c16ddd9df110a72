"""Momentum correction for sharded weights: roles of a rank's parts of a state, and sums over all ranks.

Each rank measures on its own parts how closely training follows lost momentum. The measurements of all ranks
are summed, so that all parts of a weight are corrected by the same share.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist

from ckptz.errors import CkptzError
from ckptz.format.sources import TensorSource
from ckptz.guidance.momentum_decay import ProjectionStats, total
from ckptz.guidance.optimizer_layout import ParamState, entries_in, unflattened, weights_of
from ckptz.parallel import uninterrupted
from ckptz.state.roles import Role, role_of
from ckptz.training.state import reference, sampled_weights

FAILED_ELSEWHERE: Final = "the save failed on another rank, whose error says why; save again"


def described(
    state: Mapping[str, Any], pieces: Mapping[str, TensorSource], parts: Mapping[str, TensorSource]
) -> tuple[dict[str, Role], dict[str, ParamState]]:
    """Return the roles of a rank's pieces of a flat state, and the optimizer state of its weights.

    Args:
        state: the state by flat names.
        pieces: one piece of each tensor of which this rank writes any, by name.
        parts: pieces of the tensors of which this rank writes one; moments are split like their weights.

    Returns:
        Roles by name for the tensors of parameters, and the optimizer state by parameter.
    """
    refs = {name: reference(name, value) for name, value in state.items()}
    entries = [entry for optimizer in unflattened(refs) for entry in entries_in(optimizer, pieces)]
    n_owners = Counter(entry.key for entry in entries)  # several, where models name parameters alike
    inside = {name for entry in entries for name in entry.names.values()}
    weights = weights_of((name for name in state if name not in inside), n_owners)
    roles: dict[str, Role] = {}
    trained = {}
    for entry in entries:
        parameter = entry.key
        if n_owners[parameter] > 1:
            continue
        weight = weights.get(parameter, "")
        roles |= entry.roles(parameter, pieces, has_weight=bool(weight))
        if weight in pieces:
            shape = pieces[weight].shape
            roles[weight] = Role("weight", parameter, role_of(parameter, shape, is_float=True).layer_type)
        if weight in parts:
            trained[parameter] = ParamState(weight, parts[weight], entry.settings, entry.state, entry.names)
    return roles, trained


def sampled(state: Mapping[str, Any]) -> dict[str, ParamState]:
    """Return samples of this rank's parts of restored weights by parameter; see `described`."""
    samples = sampled_weights({n: getattr(v, "to_local", lambda v=v: v)() for n, v in state.items()})
    return described(state, samples, samples)[1]


class RankPool:
    """Sums the measurements of all ranks of a save; every rank takes part once, even if it fails.

    Args:
        group: group of the ranks; None for a single rank.
        n_ranks: number of saving ranks; if the group has another size, each rank uses its own measurement.
    """

    def __init__(self, group: dist.ProcessGroup | None, n_ranks: int) -> None:
        is_whole = group is not None and dist.get_world_size(group) == n_ranks
        self._group = group if is_whole else None
        self._pooled: dict[str, ProjectionStats] | None = None

    def __call__(self, own: dict[str, ProjectionStats] | None) -> dict[str, ProjectionStats]:
        """Return the sums over all ranks; later calls return the first result.

        Args:
            own: sums of this rank; None if its save has failed.

        Raises:
            CkptzError: the save has failed on a rank.
        """

        def pool(interrupts: Sequence[BaseException]) -> dict[str, ProjectionStats]:
            self._pooled = {}  # after a failure the collective is not repeated
            ranks: list[Any] = [None if interrupts else own]
            if self._group is not None:
                mine = ranks[0]
                ranks = [None] * dist.get_world_size(self._group)
                dist.all_gather_object(ranks, mine, group=self._group)
            if None in ranks:
                raise CkptzError(FAILED_ELSEWHERE)
            names = dict.fromkeys(name for rank in ranks for name in rank)
            return {name: total(rank[name] for rank in ranks if name in rank) for name in names}

        if self._pooled is None:
            self._pooled = uninterrupted(pool)
        return self._pooled

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Join the collective when the block ends, even after an error, so that no other rank waits."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(CkptzError):  # this rank raises its own error
                self(None)
            raise
        self({})
