"""Roles of a rank's parts of a sharded state, and the share of moves that all ranks follow.

Each rank measures how training follows lost momentum on its own parts; the products of all ranks are added
up, so that a weight is moved by one share wherever its parts are.
"""

from __future__ import annotations

import contextlib
import functools
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
        state: by flat names.
        pieces: a piece of each tensor of which this rank writes any, by name.
        parts: those of which this rank writes one; moments are split as their weights are.

    Returns:
        Roles of tensors that belong to parameters, by name; weights by their parameters.
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
    """Sample this rank's parts of weights as a load has left them; see `described`."""
    samples = sampled_weights({n: getattr(v, "to_local", lambda v=v: v)() for n, v in state.items()})
    return described(state, samples, samples)[1]


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
