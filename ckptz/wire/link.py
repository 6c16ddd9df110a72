"""Links that carry torch tensors: over `torch.distributed`, or within one process.

Tensors on the CPU go through the compiled kernels without a copy, others through torch's operations.

Within one process a loopback gives what a pipeline would compute, without a pipeline: results are equal to
the bit to those of frames between processes, with the same policy, stages, steps and microbatches. The
bytes that would travel are counted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptz.errors import DTypeError, WireError
from ckptz.format.dtypes import DTYPE_NAMES, DType, dtype_of
from ckptz.kernels import wire_torch
from ckptz.kernels.torch import PATTERN_TYPES, current
from ckptz.wire.endpoint import Link, can_wait
from ckptz.wire.header import Direction
from ckptz.wire.policy import METADATA_KEY, LinkPolicy, check_policy, policy_metadata, policy_of
from ckptz.wire.state import MessageKey

# Those that messages can carry.
CODES: Final = (
    *("BOOL", "U8", "I8", "I16", "I32", "I64"),
    *("F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2"),
)
NAMES: Final = {getattr(torch, DTYPE_NAMES[code]): code for code in CODES}


def dtype_named(dtype: torch.dtype) -> DType:
    """Find the row of the dtype table.

    Raises:
        DTypeError: messages cannot carry this type.
    """
    if dtype not in NAMES:
        raise DTypeError(f"messages cannot carry {dtype}; cast the tensor before it is sent")
    return dtype_of(NAMES[dtype])


class TensorLink:
    """A `Link` for torch tensors.

    Args:
        src, dst, policy, options: as for `Link`.
        device: where the tensors live.
        use_torch: take torch's kernels on the CPU too.
        fixed: as for `Link`; NCCL needs it.
        verify: as for `Link`; by default "step" on a device, where the policy and `fixed` allow it.
    """

    def __init__(
        self,
        src: int,
        dst: int,
        policy: LinkPolicy | str,
        *,
        device: torch.device | str = "cpu",
        use_torch: bool = False,
        fixed: bool = False,
        verify: Literal["message", "step"] | None = None,
        **options: Any,
    ) -> None:
        self.device = torch.device(device)
        self._use_torch = use_torch or self.device.type != "cpu"
        kernels = wire_torch if self._use_torch else None
        like = torch.zeros(0, dtype=torch.uint8, device=self.device) if self._use_torch else None
        if verify is None:
            waits = self.device.type != "cpu" and can_wait(policy_of(policy), fixed)
            verify = "step" if waits else "message"
        options |= {"kernels": kernels, "like": like, "fixed": fixed, "verify": verify}
        self.link = Link(src, dst, policy, **options)

    def _patterns(self, tensor: Tensor) -> Any:
        """Return the bit patterns of a tensor, flat; they share its memory where it is contiguous."""
        dtype = dtype_named(tensor.dtype)
        flat = tensor.detach().contiguous().view(-1)
        if not len(flat):
            flat = flat.new_empty(0)
        patterns = flat.view(PATTERN_TYPES[dtype.pattern_bytes])
        return patterns if self._use_torch else patterns.numpy().view(f"<u{dtype.pattern_bytes}")

    def _tensor(self, patterns: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Make the tensor of bit patterns, in their memory; inverse of `_patterns`."""
        if not self._use_torch:
            signed = PATTERN_TYPES[dtype_named(dtype).pattern_bytes]
            patterns = torch.from_numpy(patterns.view(f"<i{patterns.itemsize}")).view(signed)
        return patterns.view(dtype).view(shape)

    def send(
        self, direction: Direction, tensor: Tensor, place: MessageKey
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Encode a tensor as (message as uint8, function that makes the tensor which the other end gets)."""
        shape = tuple(tensor.shape)
        with current(self.device):
            sent = self.link.send(direction, self._patterns(tensor), dtype_named(tensor.dtype), shape, place)
        message = sent.message if self._use_torch else torch.from_numpy(sent.message)

        def decode() -> Tensor:
            with current(self.device):
                return self._tensor(sent.decode(), tensor.dtype, shape)

        return message, decode

    def simulate(
        self, direction: Direction, tensor: Tensor, place: MessageKey, *, is_repeated: bool = False
    ) -> Tensor:
        """Return the tensor that `send` would deliver, in new memory; see `Link.simulate`."""
        shape, patterns, dtype = tuple(tensor.shape), self._patterns(tensor), dtype_named(tensor.dtype)
        with current(self.device):
            received = self.link.simulate(direction, patterns, dtype, shape, place, is_repeated=is_repeated)
        result = self._tensor(received, tensor.dtype, shape)
        return result.clone() if received is patterns else result

    def buffer(self, direction: Direction, like: Tensor, place: MessageKey) -> Tensor:
        """Make memory for the message that is due."""
        shape = tuple(like.shape)
        n_bytes = self.link.message_cap(direction, dtype_named(like.dtype), shape, place)
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def receive(
        self,
        direction: Direction,
        message: Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        place: MessageKey,
    ) -> Tensor:
        """Decode the tensor in a message.

        Raises:
            WireError: the message is damaged, or another one than the one that is due.
        """
        data = message if self._use_torch else message.numpy()
        with current(self.device):
            patterns = self.link.receive(direction, data, dtype_named(dtype), tuple(shape), place)
        return self._tensor(patterns, dtype, tuple(shape))


class DistributedLink:
    """A plain `send`/`recv` pair over `torch.distributed`, outside of any schedule.

    Args:
        src, dst, policy, options: as for `TensorLink`.
        peer: rank of the other end.
        group: process group; the default one.
        fixed: messages of fixed size; by default where the backend is not gloo.
    """

    def __init__(
        self,
        src: int,
        dst: int,
        policy: LinkPolicy | str,
        peer: int,
        *,
        group: dist.ProcessGroup | None = None,
        fixed: bool | None = None,
        **options: Any,
    ) -> None:
        if fixed is None:
            fixed = dist.get_backend(group) != "gloo"
        self.link = TensorLink(src, dst, policy, fixed=fixed, **options)
        self._peer, self._group = peer, group
        self._sent = dict.fromkeys(Direction, 0)
        self._received = dict.fromkeys(Direction, 0)

    def send(
        self, tensor: Tensor, direction: Direction = Direction.FORWARD, place: MessageKey | None = None
    ) -> Tensor:
        """Send a tensor to the peer; gives the tensor that the peer decodes."""
        place = place or MessageKey(self._sent[direction])
        message, decode = self.link.send(direction, tensor, place)
        self._sent[direction] = place.step + 1
        with naming(self.link.link.name_of(direction, place), "send"):
            dist.send(message, self._peer, self._group)
        return decode()

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        direction: Direction = Direction.FORWARD,
        place: MessageKey | None = None,
    ) -> Tensor:
        """Receive the next tensor from the peer.

        Raises:
            WireError: the peer is gone, or the message is not the one that is due.
        """
        place = place or MessageKey(self._received[direction])
        like = torch.empty(shape, dtype=dtype, device="meta")
        buffer = self.link.buffer(direction, like, place).zero_()
        with naming(self.link.link.name_of(direction, place), "receive"):
            dist.recv(buffer, self._peer, self._group)
        self._received[direction] = place.step + 1
        return self.link.receive(direction, buffer, dtype, tuple(shape), place)


@contextlib.contextmanager
def naming(name: str, what: str) -> Iterator[None]:
    """Name the message in the error of a transport that fails on it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WireError(f"{name}: {what}: {reason}") from error


def sample_ids_of(ids: Tensor | None) -> Any:
    """Return sample ids as int64, as links expect them."""
    return None if ids is None else np.ascontiguousarray(ids.detach().cpu().numpy(), np.int64)


def state_of(name: str, counters: Any, links: Iterable[TensorLink]) -> dict[str, Any]:
    """Return counters under a name and the states of links as numpy arrays, for a checkpoint."""
    out: dict[str, Any] = {name: np.array(counters, np.int64)}
    for link in links:
        out |= link.link.state_dict()
    return out


def load_state(name: str, state: Mapping[str, Any], links: Iterable[TensorLink]) -> Any:
    """Take over the states of links, and give the counters of this name.

    Raises:
        WireError: the state is of another stage or rank, or incomplete.
    """
    if name not in state:
        raise WireError(f"wire state lacks {name}: it is of another stage, rank or number of ranks")
    for link in links:
        link.link.load_state_dict(state)
    return np.asarray(state[name])


class _Through(torch.autograd.Function):
    """Activation through the link; its gradient back through the same link."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, link: TensorLink, place: MessageKey) -> Tensor:
        ctx.link, ctx.place, ctx.is_repeated = link, place, False
        return link.simulate(Direction.FORWARD, activation, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        link, place = ctx.link, ctx.place
        gradient = link.simulate(Direction.BACKWARD, gradients[0], place, is_repeated=ctx.is_repeated)
        ctx.is_repeated = True  # a graph that is retained comes here again
        return gradient, None, None


class Simulation:
    """A function that compresses activations, and the gradients of what it gives, as a link would.

    Args:
        policy: the link's policy, or the name of a preset.
        n_microbatches: calls in one training step.
        options: `src`, `dst` and others of `TensorLink`.
    """

    def __init__(self, policy: LinkPolicy | str, *, n_microbatches: int = 1, **options: Any) -> None:
        self.n_microbatches, self._n_calls, self._n_evals = n_microbatches, 0, 0
        self._options = {"src": 0, "dst": 1, "same_shape": False} | options
        self.policy = policy_of(policy)
        self.link = TensorLink(policy=self.policy, **self._options)

    def __call__(
        self, activation: Tensor, *, sample_ids: Tensor | None = None, is_eval: bool = False
    ) -> Tensor:
        """Return the tensor as the other end receives it; differentiable. AQ-SGD needs sample ids."""
        ids = sample_ids_of(sample_ids)
        if is_eval:
            place = MessageKey(self._n_evals, sample_ids=ids, is_eval=True)
        else:
            step, microbatch = divmod(self._n_calls, self.n_microbatches)
            place = MessageKey(step, microbatch, sample_ids=ids)
        if activation.is_floating_point():
            result: Tensor = _Through.apply(activation, self.link, place)  # type: ignore[no-untyped-call]
        else:
            result = self.link.simulate(Direction.FORWARD, activation, place)
        # Last: after an interrupt the next call has the same place, and the link sees that it is a retry.
        self._n_evals += is_eval
        self._n_calls += not is_eval
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return counters and the link's state as numpy arrays, for resuming."""
        src, dst = self._options["src"], self._options["dst"]
        calls = np.array([self._n_calls, self._n_evals], np.int64)
        return {f"wire/{src}-{dst}/calls": calls} | self.link.link.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        rest = dict(state)
        calls = rest.pop(f"wire/{self._options['src']}-{self._options['dst']}/calls")
        self._n_calls, self._n_evals = (int(n) for n in calls)
        self.link.link.load_state_dict(rest)


def simulate(policy: LinkPolicy | str, **options: Any) -> Simulation:
    """Make a `Simulation` of a link, by the same arguments."""
    return Simulation(policy, **options)


class CompressLink(nn.Module):
    """A layer that stands at a cut of the model; identity without a policy.

    The policy travels in the module's state dict: a model that was trained with TopK and is loaded into
    links without it warns and says why.

    Args:
        policy: the link's policy, the name of a preset, or None for no compression.
        options: `n_microbatches` and others of `simulate`.
    """

    def __init__(self, policy: LinkPolicy | str | None = None, **options: Any) -> None:
        super().__init__()
        self.simulation = None if policy is None else simulate(policy, **options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the codec's kernels cannot be traced
    def forward(self, activation: Tensor, sample_ids: Tensor | None = None) -> Tensor:
        """Return the activation as the next stage receives it."""
        if self.simulation is None:
            return activation
        is_eval = not self.training
        if is_eval and not self.simulation.policy.compresses_eval:
            return activation
        return self.simulation(activation, sample_ids=sample_ids, is_eval=is_eval)

    def get_extra_state(self) -> Tensor:
        """Return the policy as bytes in a tensor, which every checkpoint format can hold."""
        record = {} if self.simulation is None else policy_metadata(self.simulation.policy)
        return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Compare the policy that the model was trained with; warns if they do not fit."""
        record = json.loads(bytes(state.tolist()))
        if METADATA_KEY in record:
            check_policy(record, None if self.simulation is None else self.simulation.policy)

    def extra_repr(self) -> str:
        """Describe the policy in words."""
        return "none" if self.simulation is None else str(self.simulation.policy)
