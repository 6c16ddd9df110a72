"""Gradients of data-parallel training in 4 bits, with error feedback that is reset at intervals (LoCo).

    model = DistributedDataParallel(model)
    model.register_comm_hook(LoCo(), loco_hook)      # or, with fully_shard(model): shard_with(model, LoCo())

After LoCo (arXiv 2407.04480): each rank sends every other rank its part of a bucket and sums the parts that
it receives. With DDP, where every rank has the whole model, it then sends the mean to all. These are link
messages with headers and checksums: link i->j from rank i to rank j, link i->i for the mean of rank i. A
rank does not compress its own part. DDP changes the layout of its buckets after the first step, so a bucket
with a new layout is sent raw, without error feedback.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptz.errors import UnsupportedError
from ckptz.wire.header import Direction
from ckptz.wire.link import TensorLink, links_state, load_state, transport_errors
from ckptz.wire.policy import Codec, LinkPolicy, Tiled, Uniform
from ckptz.wire.state import MessageKey

FORWARD = Direction.FORWARD


class LoCo:
    """The links of one rank to all others, with their error feedback.

    Args:
        codec: codec of gradients. Messages have a fixed size, so Rice gaps and rANS have no effect.
        decay: share of the old error in the new one. LoCo averages errors; in bench/studies/loco.py that
            differs from the newest error alone, 0.0, by no more than chance.
        reset_every: number of steps after which errors are reset; 0 for never.
        group: process group, by default the default group.
        device: device of the gradients.
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
        """Return the bytes that this rank has sent: parts to each other rank, and means to all ranks."""
        means = self._means[self.rank].link.sent_bytes[FORWARD] * len(self.peers)
        return means + sum(link.link.sent_bytes[FORWARD] for link in self._to.values())

    def sum_of_parts(self, parts: Sequence[Tensor], tensor: int, *, is_raw: bool = False) -> Tensor:
        """Return the sum over ranks of this rank's part, float32 [n].

        Args:
            parts: gradients for each rank, [n] each.
            tensor: index of the bucket.
            is_raw: send the parts uncompressed.

        Raises:
            WireError: a rank is gone, or sent an unexpected message.
        """
        parts = [self._rows(part) for part in parts]
        key, own_part = self._message_key(tensor, is_raw), parts[self.rank]
        if not self.peers:
            return own_part.to(torch.float32).view(-1)
        messages = [self._to[rank].send(FORWARD, parts[rank], key)[0] for rank in self.peers]
        sizes = [0 if rank == self.rank else len(messages[0]) for rank in range(self.n_ranks)]
        arrived = torch.empty_like(torch.cat(messages))
        with transport_errors(self._from[self.peers[0]].link.name_of(FORWARD, key), "parts"):
            dist.all_to_all_single(arrived, torch.cat(messages), sizes, sizes, group=self.group)
        total = own_part.to(torch.float32, copy=True)
        for rank, message in zip(self.peers, arrived.view(len(messages), -1).unbind(), strict=True):
            total += self._from[rank].receive(FORWARD, message, own_part.dtype, tuple(own_part.shape), key)
        return total.view(-1)

    def gather_means(self, mean: Tensor, tensor: int, *, is_raw: bool = False) -> Tensor:
        """Send this rank's mean to all ranks; returns the means of all ranks, concatenated.

        Args:
            mean: this rank's part of the averaged gradients [n].
            tensor: index of the bucket.
            is_raw: send the mean uncompressed.

        Returns:
            Decoded means [n_ranks * n], equal on every rank.

        Raises:
            WireError: a rank is gone, or sent an unexpected message.
        """
        mean = self._rows(mean)
        key, shape = self._message_key(tensor, is_raw), tuple(mean.shape)
        message, decode = self._means[self.rank].send(FORWARD, mean, key)
        arrived = message.new_empty(self.n_ranks, len(message))
        with transport_errors(self._means[self.rank].link.name_of(FORWARD, key), "means"):
            dist.all_gather(list(arrived.unbind()), message, group=self.group)
        means = [
            decode()
            if rank == self.rank
            else self._means[rank].receive(FORWARD, received, mean.dtype, shape, key)
            for rank, received in enumerate(arrived.unbind())
        ]
        return torch.cat(means).view(-1)

    def _rows(self, part: Tensor) -> Tensor:
        """Reshape to one tile per row if possible, so that each tile can have its own number of bits."""
        if isinstance(self._codec, Tiled) and not len(part) % self._codec.tile:
            return part.view(-1, self._codec.tile)
        return part

    def _message_key(self, tensor: int, is_raw: bool) -> MessageKey:
        return MessageKey(self._steps.get(tensor, 0), tensor=tensor, is_raw=is_raw)

    def is_new(self, tensor: int, layout: tuple[int, ...]) -> bool:
        """Return whether a bucket's layout is new or differs from the previous step."""
        before, self._layouts[tensor] = self._layouts.get(tensor), layout
        return before != layout

    def end_step(self, tensor: int) -> None:
        """Advance the step counter of a bucket."""
        self._steps[tensor] = self._steps.get(tensor, 0) + 1

    def check(self) -> None:
        """Evaluate the pending checks of `verify="step"`; call it before the optimizer's step.

        Raises:
            WireError: a message was damaged or unexpected.
        """
        for link in self._links:
            link.link.check()

    @property
    def _links(self) -> list[TensorLink]:
        return [*self._to.values(), *self._from.values(), *self._means.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return errors and counters of this rank for a checkpoint, as numpy arrays by name."""
        counters = np.array(sorted(self._steps.items()), np.int64).reshape(-1, 2)
        return links_state(f"wire/loco/{self.rank}/{self.n_ranks}", counters, self._links)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            WireError: the state is of another rank, of another number of ranks, or incomplete.
        """
        counters = load_state(f"wire/loco/{self.rank}/{self.n_ranks}", state, self._links)
        self._steps = {int(tensor): int(step) for tensor, step in counters}


def loco_hook(state: LoCo, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over all ranks; for `register_comm_hook` of DDP."""
    flat, tensor = bucket.buffer(), bucket.index()
    size = -(-len(flat) // state.n_ranks)
    parts = nn.functional.pad(flat, (0, size * state.n_ranks - len(flat))).view(-1, size).unbind()
    is_raw = state.is_new(tensor, tuple(map(id, bucket.parameters())))
    mean = (state.sum_of_parts(parts, tensor, is_raw=is_raw) / state.n_ranks).to(flat.dtype)
    means = state.gather_means(mean, tensor, is_raw=is_raw)
    state.end_step(tensor)
    done: Any = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    done.set_result(means[: len(flat)])
    return done


class _ReduceScatter:
    """Reduces gradients for `FSDPModule.set_custom_reduce_scatter` to the sum or mean of this rank's part."""

    def __init__(self, state: LoCo, tensor: int) -> None:
        self._state, self._tensor = state, tensor

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for gradients [size]."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor` [ranks * n] into `output_tensor` [n]."""
        del group, async_op
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(f"LoCo supports SUM and AVG, got {op}")
        total = self._state.sum_of_parts(input_tensor.view(-1, len(output_tensor)).unbind(), self._tensor)
        self._state.end_step(self._tensor)
        output_tensor.copy_(total / self._state.n_ranks if op == dist.ReduceOp.AVG else total)


def shard_with(model: nn.Module, state: LoCo) -> None:
    """Send the gradients of all `fully_shard` modules through LoCo; weights are sent as before."""
    sharded = (module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter"))
    for tensor, module in enumerate(sharded):
        module.set_custom_reduce_scatter(_ReduceScatter(state, tensor))  # type: ignore[operator]
