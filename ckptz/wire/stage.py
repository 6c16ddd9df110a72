"""A stage of `torch.distributed.pipelining` whose links are compressed.

    stage = CompressedPipelineStage(module, index, n_stages, device, policy="balanced")
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)

The parent class builds the sends and receives; this class replaces each tensor by a message, and each
receive buffer by the decoded tensor. It works with every schedule. Stages on one rank, as in V schedules,
exchange tensors directly, without compression. Tested with torch 2.13.
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
from ckptz.wire.link import TensorLink, links_state, load_state, sample_ids_of, transport_errors
from ckptz.wire.policy import LinkPolicy, policy_metadata, policy_of
from ckptz.wire.state import MessageKey

NEEDS: Final = ("_retrieve_recv_activations", "_retrieve_recv_grads", "_get_grad_send_meta")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


class _NamedOperation:
    """An `isend` or `irecv` whose errors, when it is called or waited for, name the message.

    It is equal to the wrapped operation, because schedules test whether all operations of a list are sends.
    """

    def __init__(self, op: Any, name: str) -> None:
        self._op, self._name, self.__name__ = op, name, op.__name__

    def __eq__(self, other: object) -> bool:
        return self._op == other

    def __hash__(self) -> int:
        return hash(self._op)

    def __call__(self, tensor: Tensor, *, group: Any, tag: int, **peer: int) -> Any:
        (rank,) = peer.values()  # schedules use the keyword of receives for sends too
        to = {f"group_{'dst' if self._op is dist.isend else 'src'}": rank}
        with self._transport_errors():
            self._work = self._op(tensor, group=group, tag=tag, **to)
        return None if self._work is None else self

    def wait(self, *timeout: Any) -> Any:
        """Wait for the operation to complete."""
        with self._transport_errors():
            return self._work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def _transport_errors(self) -> Any:
        return transport_errors(self._name, "send" if self._op is dist.isend else "receive")


class CompressedPipelineStage(PipelineStage):
    """A pipeline stage that sends compressed activations and gradients; see the module.

    Args:
        args: as for `PipelineStage`.
        policy: policy of both links of this stage, equal on every stage, or the name of a preset.
        fixed: send messages of fixed size; by default True unless the backend is gloo.
        verify: as for `TensorLink`; with "step" errors are raised at the next step's start or in `check`.
        samples: file and number of samples of AQ-SGD's buffers; by default they are in memory.
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
        i = self.stage_index
        options: Any = {"device": self.device, "fixed": fixed, "samples": samples, "verify": verify}
        self.incoming = None if self.is_first else TensorLink(i - 1, i, self.policy, **options)
        self.outgoing = None if self.is_last else TensorLink(i, i + 1, self.policy, **options)
        self._inbox: dict[tuple[Direction, int], list[tuple[int, Tensor]]] = {}
        self._n_steps, self._n_evals = 0, 0
        self._ids: list[Any] = []

    def clear_runtime_states(self) -> None:
        """Start a step; schedules call this method first."""
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
        """Evaluate the pending checks of `verify="step"`; call it before the optimizer's step.

        Raises:
            WireError: a message was damaged or unexpected; its tensor was NaN.
        """
        for link in self._links:
            link.link.check()

    def set_batch_ids(self, ids: Tensor, n_microbatches: int) -> None:
        """Set the sample ids [n_samples] of the next step for AQ-SGD; call it on every stage."""
        self._ids = [sample_ids_of(part) for part in torch.tensor_split(ids, n_microbatches)]

    @property
    def _links(self) -> list[TensorLink]:
        return [link for link in (self.incoming, self.outgoing) if link is not None]

    def _message_key(self, microbatch: int, tensor: int) -> MessageKey:
        ids = self._ids[microbatch] if microbatch < len(self._ids) else None
        is_eval = not self.has_backward
        step = (self._n_evals if is_eval else self._n_steps) - 1
        return MessageKey(step, microbatch, tensor, ids, is_eval)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of activations as messages."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        return self._with_messages(FORWARD, fwd_chunk_id, ops, range(len(ops)), is_sent=True)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of gradients as messages."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        stages = enumerate(self.grad_send_info or ()) if ops else ()
        indices = [i for i, stage in stages if stage is not None and self._get_grad_send_meta(i) is not None]
        return self._with_messages(BACKWARD, bwd_chunk_id, ops, indices, is_sent=True)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of activations as messages."""
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        infos = enumerate(self.args_recv_info[fwd_chunk_id] if ops else ())
        indices = [i for i, info in infos if not info.is_root_arg and info.buffer is not None]
        return self._with_messages(FORWARD, fwd_chunk_id, ops, indices, is_sent=False)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of gradients as messages."""
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        infos = enumerate(self.grad_recv_info[bwd_chunk_id] if ops else ())
        indices = [i for i, info in infos if info.buffer is not None]
        return self._with_messages(BACKWARD, bwd_chunk_id, ops, indices, is_sent=False)

    def _with_messages(
        self, direction: Direction, microbatch: int, ops: list[dist.P2POp], indices: Any, *, is_sent: bool
    ) -> list[dist.P2POp]:
        """Replace the tensors of operations by messages, or by memory for messages."""
        link = self.outgoing if (direction is FORWARD) == is_sent else self.incoming
        for op, index in zip(ops, indices, strict=True):
            assert link is not None
            key = self._message_key(microbatch, index)
            if is_sent:
                op.tensor, _ = link.send(direction, op.tensor, key)
            else:
                op.tensor = link.buffer(direction, op.tensor, key)
                self._inbox.setdefault((direction, microbatch), []).append((index, op.tensor))
            op.op = _NamedOperation(op.op, link.link.name_of(direction, key))
        return ops

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._decode_received(FORWARD, fwd_chunk_id, self.args_recv_info[fwd_chunk_id])
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._decode_received(BACKWARD, bwd_chunk_id, self.grad_recv_info[bwd_chunk_id])
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _decode_received(self, direction: Direction, microbatch: int, infos: Any) -> None:
        """Decode the received messages; a stage on the same rank sends none."""
        link = self.incoming if direction is FORWARD else self.outgoing
        for index, message in self._inbox.pop((direction, microbatch), ()):
            assert link is not None
            buffer, key = infos[index].buffer, self._message_key(microbatch, index)
            infos[index].buffer = link.receive(direction, message, buffer.dtype, tuple(buffer.shape), key)

    @property
    def _state_name(self) -> str:
        return f"wire/stage/{self.stage_index}/steps"

    def wire_state_dict(self) -> dict[str, Any]:
        """Return the state of this stage's links for a checkpoint, as numpy arrays by name."""
        return links_state(self._state_name, [self._n_steps, self._n_evals], self._links)

    def load_wire_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `wire_state_dict` returned.

        Raises:
            WireError: the state is of another stage, or incomplete.
        """
        self._n_steps, self._n_evals = map(int, load_state(self._state_name, state, self._links))

    def wire_metadata(self) -> dict[str, str]:
        """Return the policy as metadata for the checkpoint, which `check_policy` compares."""
        return policy_metadata(self.policy)

    def wire_notes(self) -> tuple[str, ...]:
        """Return notes on the tensors that this stage sends uncompressed because they are small."""
        notes = []
        for direction, link in ((FORWARD, self.outgoing), (BACKWARD, self.incoming)):
            if link is not None and (shapes := link.link.small_shapes(direction)):
                shown = ", ".join(str(list(shape)) for shape in shapes)
                notes.append(
                    f"{direction.word}: tensors of {shown} have fewer than {self.policy.min_elements:,} "
                    f"elements and are not compressed; each message adds {HEADER_BYTES} bytes; "
                    "LinkPolicy(min_elements=...) lowers the limit"
                )
        return tuple(notes)

    def wire_bytes(self) -> dict[str, tuple[int, int]]:
        """Return (sent bytes, uncompressed bytes) of each direction that this stage sends."""
        out = {}
        for direction, link in ((FORWARD, self.outgoing), (BACKWARD, self.incoming)):
            if link is not None:
                out[direction.word] = (link.link.sent_bytes[direction], link.link.raw_bytes[direction])
        return out
