"""A stage of `torch.distributed.pipelining` whose links are compressed.

    stage = CompressedPipelineStage(module, index, n_stages, device, policy="balanced")
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)

The parent builds every send and receive; this class puts a message in place of each tensor, and a
decoded tensor in place of each buffer. Works with every schedule; neighbours on one rank, as in V
schedules, exchange tensors without a wire and without compression. Tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from ckptz.errors import UnsupportedError
from ckptz.wire.header import HEADER_BYTES, Direction
from ckptz.wire.link import TensorLink, load_state, naming, sample_ids_of, state_of
from ckptz.wire.policy import LinkPolicy, policy_metadata, policy_of
from ckptz.wire.state import MessageKey

NEEDS: Final = ("_retrieve_recv_activations", "_retrieve_recv_grads", "_get_grad_send_meta")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


class _NamedOperation:
    """An `isend` or `irecv` whose failure, then or while it is waited for, names the message.

    It compares as what it stands for, because schedules ask whether all operations of a list are sends.
    """

    def __init__(self, op: Any, name: str) -> None:
        self._op, self._name, self.__name__ = op, name, op.__name__

    def __eq__(self, other: object) -> bool:
        return self._op == other

    def __hash__(self) -> int:
        return hash(self._op)

    def __call__(self, tensor: Tensor, *, group: Any, tag: int, **peer: int) -> Any:
        (rank,) = peer.values()  # named for receives where a schedule mixes both
        to = {f"group_{'dst' if self._op is dist.isend else 'src'}": rank}
        with self._naming():
            self._work = self._op(tensor, group=group, tag=tag, **to)
        return None if self._work is None else self

    def wait(self, *timeout: Any) -> Any:
        """Wait as the work of the operation does."""
        with self._naming():
            return self._work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def _naming(self) -> Any:
        return naming(self._name, "send" if self._op is dist.isend else "receive")


class CompressedPipelineStage(PipelineStage):
    """A pipeline stage whose activations and gradients travel compressed; see the module.

    Args:
        args: as for `PipelineStage`.
        policy: of both links of this stage, or the name of a preset; the same on every stage.
        fixed: messages of fixed size; by default where the backend is not gloo.
        verify: as for `TensorLink`: "step" tells what was wrong at the begin of the next step, or in `check`.
        samples: file and number of samples of AQ-SGD's buffers; in memory by default.
        kwargs: as for `PipelineStage`.
    """

    def __init__(
        self,
        *args: Any,
        policy: LinkPolicy | str,
        fixed: bool | None = None,
        verify: Literal["message", "step"] | None = None,
        samples: tuple[Path, int] | None = None,
        **kwargs: Any,
    ) -> None:
        missing = [name for name in NEEDS if not hasattr(PipelineStage, name)]
        if missing:
            raise UnsupportedError(
                f"torch {torch.__version__} lacks {missing[0]}; use simulate, or torch 2.13"
            )
        super().__init__(*args, **kwargs)
        self.policy = policy_of(policy)
        if fixed is None:
            fixed = dist.get_backend(self.group) != "gloo"
        here = self.stage_index
        options: Any = {"device": self.device, "fixed": fixed, "samples": samples, "verify": verify}
        before, after = (here - 1, here), (here, here + 1)
        self.incoming = None if self.is_first else TensorLink(*before, self.policy, **options)
        self.outgoing = None if self.is_last else TensorLink(*after, self.policy, **options)
        self._inbox: dict[tuple[Direction, int], list[tuple[int, Tensor]]] = {}
        self._n_steps, self._n_evals = 0, 0
        self._ids: list[Any] = []

    def clear_runtime_states(self) -> None:
        """Begin a step; schedules call this first."""
        super().clear_runtime_states()
        self._inbox.clear()
        self.check()
        for link in self._links:
            link.link.state.masks.clear()
        if self.has_backward:
            self._n_steps += 1
        else:
            self._n_evals += 1

    def check(self) -> None:
        """Look at what `verify="step"` found; call it before `optimizer.step` to keep NaN out of the weights.

        Raises:
            WireError: a message was damaged, or another one than was due.
        """
        for link in self._links:
            link.link.check()

    def set_batch_ids(self, ids: Tensor, n_microbatches: int) -> None:
        """Name the samples of the next step, on every stage, for AQ-SGD."""
        self._ids = [sample_ids_of(part) for part in torch.tensor_split(ids, n_microbatches)]

    @property
    def _links(self) -> list[TensorLink]:
        return [link for link in (self.incoming, self.outgoing) if link is not None]

    def _place(self, microbatch: int, tensor: int) -> MessageKey:
        ids = self._ids[microbatch] if microbatch < len(self._ids) else None
        is_eval = not self.has_backward
        step = (self._n_evals if is_eval else self._n_steps) - 1
        return MessageKey(step, microbatch, tensor, ids, is_eval)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the parent's sends, with messages for tensors."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        return self._named(FORWARD, fwd_chunk_id, ops, range(len(ops)), is_sent=True)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the parent's sends, with messages for tensors."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        stages = enumerate(self.grad_send_info or ()) if ops else ()
        indices = [i for i, stage in stages if stage is not None and self._get_grad_send_meta(i) is not None]
        return self._named(BACKWARD, bwd_chunk_id, ops, indices, is_sent=True)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the parent's receives, into memory for messages."""
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        infos = enumerate(self.args_recv_info[fwd_chunk_id] if ops else ())
        indices = [i for i, info in infos if not info.is_root_arg and info.buffer is not None]
        return self._named(FORWARD, fwd_chunk_id, ops, indices, is_sent=False)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the parent's receives, into memory for messages."""
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        infos = enumerate(self.grad_recv_info[bwd_chunk_id] if ops else ())
        indices = [i for i, info in infos if info.buffer is not None]
        return self._named(BACKWARD, bwd_chunk_id, ops, indices, is_sent=False)

    def _named(
        self, direction: Direction, microbatch: int, ops: list[dist.P2POp], indices: Any, *, is_sent: bool
    ) -> list[dist.P2POp]:
        """Put messages, or memory for them, in place of tensors."""
        link = self.outgoing if (direction is FORWARD) == is_sent else self.incoming
        for op, index in zip(ops, indices, strict=True):
            assert link is not None
            place = self._place(microbatch, index)
            if is_sent:
                op.tensor, _ = link.send(direction, op.tensor, place)
            else:
                op.tensor = link.buffer(direction, op.tensor, place)
                self._inbox.setdefault((direction, microbatch), []).append((index, op.tensor))
            op.op = _NamedOperation(op.op, link.link.name_of(direction, place))
        return ops

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._open(FORWARD, fwd_chunk_id, self.args_recv_info[fwd_chunk_id])
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._open(BACKWARD, bwd_chunk_id, self.grad_recv_info[bwd_chunk_id])
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _open(self, direction: Direction, microbatch: int, infos: Any) -> None:
        """Decode what arrived into a new tensor each; nothing arrived from a neighbour on this rank."""
        link = self.incoming if direction is FORWARD else self.outgoing
        for index, message in self._inbox.pop((direction, microbatch), ()):
            assert link is not None
            due, place = infos[index].buffer, self._place(microbatch, index)
            infos[index].buffer = link.receive(direction, message, due.dtype, tuple(due.shape), place)

    @property
    def _state_name(self) -> str:
        return f"wire/stage/{self.stage_index}/steps"

    def wire_state_dict(self) -> dict[str, Any]:
        """Return the state of this stage's links, as numpy arrays: this rank's part of the checkpoint."""
        return state_of(self._state_name, [self._n_steps, self._n_evals], self._links)

    def load_wire_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `wire_state_dict` gave.

        Raises:
            WireError: the state is of another stage, or incomplete.
        """
        self._n_steps, self._n_evals = map(int, load_state(self._state_name, state, self._links))

    def wire_metadata(self) -> dict[str, str]:
        """Return metadata for the checkpoint that lets a later load be checked."""
        return policy_metadata(self.policy)

    def wire_notes(self) -> tuple[str, ...]:
        """Name the tensors that this stage sends uncompressed because they are small."""
        notes = []
        for direction, link in ((FORWARD, self.outgoing), (BACKWARD, self.incoming)):
            if link is not None and (shapes := link.link.small_shapes(direction)):
                least, shown = self.policy.min_elements, ", ".join(str(list(shape)) for shape in shapes)
                notes.append(
                    f"{direction.word}: tensors of {shown} have fewer than {least:,} elements; nothing is "
                    f"compressed, and {HEADER_BYTES} bytes more are sent for each than without; "
                    "LinkPolicy(min_elements=...) lowers the limit"
                )
        return tuple(notes)

    def wire_bytes(self) -> dict[str, tuple[int, int]]:
        """Count (bytes sent, bytes they stand for) of each direction that this stage sends."""
        out = {}
        for direction, link in ((FORWARD, self.outgoing), (BACKWARD, self.incoming)):
            if link is not None:
                out[direction.word] = (link.link.sent_bytes[direction], link.link.raw_bytes[direction])
        return out
