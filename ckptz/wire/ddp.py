"""Gradients of data parallelism in 4 bits, with an error that is kept over steps and reset (LoCo).

    model = DistributedDataParallel(model)
    model.register_comm_hook(LoCo(), loco_hook)      # or, with fully_shard(model): shard_with(model, LoCo())

After LoCo (arXiv 2407.04480): each rank sends every other one its part of a bucket, adds up the parts
that arrive, and, where the model is whole on each rank, sends the mean to all. What travels are messages
of links with their headers and checksums: rank i to rank j is link i->j, the mean of rank i is link i->i.
A rank's own part is not compressed on its way to itself. DDP lays out its buckets anew after the first
step: a bucket whose layout is new to this process goes raw, and errors wait for the layout that stays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptz.errors import UnsupportedError
from ckptz.wire.header import Direction
from ckptz.wire.link import TensorLink, load_state, naming, state_of
from ckptz.wire.policy import Codec, LinkPolicy, Tiled, Uniform
from ckptz.wire.state import MessageKey

FORWARD = Direction.FORWARD


class LoCo:
    """The links of one rank to all others, and their errors.

    Args:
        codec: of gradients; messages have one size, so gaps and coded levels are of no use.
        decay: share of the old error in the one that is kept. LoCo averages; in bench/studies/loco.py that
            differs by no more than chance from the newest error alone, 0.0.
        reset_every: steps after which errors are forgotten; 0 never does.
        group: process group; the default one.
        device: where gradients live.
        options: as for `TensorLink`.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        *,
        decay: float = 0.0,
        reset_every: int = 512,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        self.group, self.rank, self.n_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._codec = Uniform(4) if codec is None else codec
        policy = LinkPolicy(forward=self._codec, feedback=("ef", None), ef_decay=decay, ef_reset=reset_every)
        self.peers = [rank for rank in range(self.n_ranks) if rank != self.rank]
        options |= {"device": device, "fixed": True, "same_shape": False}
        self._to = {rank: TensorLink(self.rank, rank, policy, **options) for rank in self.peers}
        self._from = {rank: TensorLink(rank, self.rank, policy, **options) for rank in self.peers}
        self._means = {rank: TensorLink(rank, rank, policy, **options) for rank in range(self.n_ranks)}
        self._steps: dict[int, int] = {}
        self._layouts: dict[int, tuple[int, ...]] = {}

    def sent_bytes(self) -> int:
        """Count the bytes that this rank has sent: parts to each other rank, and means to all of them."""
        means = self._means[self.rank].link.sent_bytes[FORWARD] * len(self.peers)
        return means + sum(link.link.sent_bytes[FORWARD] for link in self._to.values())

    def sum_of_parts(self, parts: Sequence[Tensor], tensor: int, *, is_raw: bool = False) -> Tensor:
        """Return the sum over ranks of this rank's part, float32 [n]; `parts` has one [n] per rank.

        Raises:
            WireError: a rank is gone, or sent another message than the one that is due.
        """
        parts = [self._rows(part) for part in parts]
        place, mine = self._place(tensor, is_raw), parts[self.rank]
        if not self.peers:
            return mine.to(torch.float32).view(-1)
        messages = [self._to[rank].send(FORWARD, parts[rank], place)[0] for rank in self.peers]
        sizes = [0 if rank == self.rank else len(messages[0]) for rank in range(self.n_ranks)]
        arrived = torch.empty_like(torch.cat(messages))
        with naming(self._from[self.peers[0]].link.name_of(FORWARD, place), "parts"):
            dist.all_to_all_single(arrived, torch.cat(messages), sizes, sizes, group=self.group)
        total = mine.to(torch.float32, copy=True)
        for rank, message in zip(self.peers, arrived.view(len(messages), -1).unbind(), strict=True):
            total += self._from[rank].receive(FORWARD, message, mine.dtype, tuple(mine.shape), place)
        return total.view(-1)

    def means_of_all(self, mean: Tensor, tensor: int, *, is_raw: bool = False) -> Tensor:
        """Return the concatenated means [n] of all ranks; every rank decodes the same values.

        Raises:
            WireError: as `sum_of_parts`.
        """
        mean = self._rows(mean)
        place, shape = self._place(tensor, is_raw), tuple(mean.shape)
        message, decode = self._means[self.rank].send(FORWARD, mean, place)
        arrived = message.new_empty(self.n_ranks, len(message))
        with naming(self._means[self.rank].link.name_of(FORWARD, place), "means"):
            dist.all_gather(list(arrived.unbind()), message, group=self.group)
        means = [
            decode()
            if rank == self.rank
            else self._means[rank].receive(FORWARD, each, mean.dtype, shape, place)
            for rank, each in enumerate(arrived.unbind())
        ]
        return torch.cat(means).view(-1)

    def _rows(self, part: Tensor) -> Tensor:
        """Make each tile a row of its own where they fit, so that tiles differ in bits."""
        if isinstance(self._codec, Tiled) and not len(part) % self._codec.tile:
            return part.view(-1, self._codec.tile)
        return part

    def _place(self, tensor: int, is_raw: bool) -> MessageKey:
        return MessageKey(self._steps.get(tensor, 0), tensor=tensor, is_raw=is_raw)

    def is_new(self, tensor: int, layout: tuple[int, ...]) -> bool:
        """Return whether a bucket's layout is new or differs from the previous step."""
        before, self._layouts[tensor] = self._layouts.get(tensor), layout
        return before != layout

    def end_step(self, tensor: int) -> None:
        """Count one reduction of a bucket."""
        self._steps[tensor] = self._steps.get(tensor, 0) + 1

    def check(self) -> None:
        """Look at what `verify="step"` found on a device; call it before the optimizer's step.

        Raises:
            WireError: a message was damaged, or another one than was due.
        """
        for link in self._links:
            link.link.check()

    @property
    def _links(self) -> list[TensorLink]:
        return [*self._to.values(), *self._from.values(), *self._means.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return errors and counters, as numpy arrays: this rank's part of a checkpoint."""
        numbers = np.array(sorted(self._steps.items()), np.int64).reshape(-1, 2)
        return state_of(f"wire/loco/{self.rank}/{self.n_ranks}", numbers, self._links)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            WireError: the state is of another rank, of another number of ranks, or incomplete.
        """
        numbers = load_state(f"wire/loco/{self.rank}/{self.n_ranks}", state, self._links)
        self._steps = {int(tensor): int(step) for tensor, step in numbers}


def loco_hook(
    state: LoCo,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over all ranks; for `register_comm_hook` of DDP."""
    flat, tensor = bucket.buffer(), bucket.index()
    size = -(-len(flat) // state.n_ranks)
    parts = nn.functional.pad(flat, (0, size * state.n_ranks - len(flat))).view(-1, size).unbind()
    is_raw = state.is_new(tensor, tuple(map(id, bucket.parameters())))
    mean = (state.sum_of_parts(parts, tensor, is_raw=is_raw) / state.n_ranks).to(flat.dtype)
    means = state.means_of_all(mean, tensor, is_raw=is_raw)
    state.end_step(tensor)
    done: Any = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    done.set_result(means[: len(flat)])
    return done


class _ReduceScatter:
    """Reduces gradients for `FSDPModule.set_custom_reduce_scatter` to the sum or mean of this rank's part."""

    def __init__(self, state: LoCo, tensor: int) -> None:
        self._state, self._tensor = state, tensor

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor` [ranks * n] into `output_tensor` [n]."""
        del group, async_op
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(f"LoCo adds up gradients or averages them; {op} is neither")
        total = self._state.sum_of_parts(input_tensor.view(-1, len(output_tensor)).unbind(), self._tensor)
        self._state.end_step(self._tensor)
        output_tensor.copy_(total / self._state.n_ranks if op == dist.ReduceOp.AVG else total)


def shard_with(model: nn.Module, state: LoCo) -> None:
    """Send the gradients of all modules that `fully_shard` made through LoCo; weights travel as they did."""
    sharded = (module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter"))
    for tensor, module in enumerate(sharded):
        module.set_custom_reduce_scatter(_ReduceScatter(state, tensor))  # type: ignore[operator]
