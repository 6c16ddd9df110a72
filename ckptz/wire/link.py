"""Links for torch tensors: over `torch.distributed`, or simulated within one process.

The compiled kernels process CPU tensors without a copy, torch operations those on other devices.

A simulated link computes the tensors that a pipeline of several processes would receive, bit for bit, for
the same policy, stages, steps and microbatches. It counts the bytes that would be sent.
"""

from __future__ import annotations

import contextlib
import io
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
from ckptz.wire.endpoint import Link, can_check_later
from ckptz.wire.header import Direction
from ckptz.wire.policy import METADATA_KEY, LinkPolicy, check_policy, policy_metadata, policy_of
from ckptz.wire.state import MessageKey

# Dtypes that messages can carry.
CODES: Final = (
    *("BOOL", "U8", "I8", "I16", "I32", "I64"),
    *("F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2"),
)
NAMES: Final = {getattr(torch, DTYPE_NAMES[code]): code for code in CODES}


def wire_dtype(dtype: torch.dtype) -> DType:
    """Return the entry of a torch dtype in the dtype table.

    Raises:
        DTypeError: messages cannot carry this dtype.
    """
    if dtype not in NAMES:
        raise DTypeError(f"messages cannot carry {dtype}; cast the tensor before it is sent")
    return dtype_of(NAMES[dtype])


class TensorLink:
    """A `Link` for torch tensors.

    Args:
        src, dst, policy, options: as for `Link`.
        device: device of the tensors.
        use_torch: use the torch kernels on the CPU too.
        fixed: as for `Link`; required for NCCL.
        verify: as for `Link`; by default "step" on devices other than the CPU if policy and `fixed` allow it.
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
            checks_later = self.device.type != "cpu" and can_check_later(policy_of(policy), fixed)
            verify = "step" if checks_later else "message"
        options |= {"kernels": kernels, "like": like, "fixed": fixed, "verify": verify}
        self.link = Link(src, dst, policy, **options)

    def _patterns(self, tensor: Tensor) -> Any:
        """Return the bit patterns of a tensor, flat [n]; they share the memory of a contiguous tensor."""
        dtype = wire_dtype(tensor.dtype)
        flat = tensor.detach().contiguous().view(-1)
        if not len(flat):
            flat = flat.new_empty(0)
        patterns = flat.view(PATTERN_TYPES[dtype.pattern_bytes])
        return patterns if self._use_torch else patterns.numpy().view(f"<u{dtype.pattern_bytes}")

    def _tensor(self, patterns: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor that shares the memory of bit patterns; inverse of `_patterns`."""
        if not self._use_torch:
            signed = PATTERN_TYPES[wire_dtype(dtype).pattern_bytes]
            patterns = torch.from_numpy(patterns.view(f"<i{patterns.itemsize}")).view(signed)
        return patterns.view(dtype).view(shape)

    def send(
        self, direction: Direction, tensor: Tensor, key: MessageKey
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Encode a tensor.

        Returns:
            The message, uint8 [n_bytes], and a function that computes the tensor that the other end receives.
        """
        shape = tuple(tensor.shape)
        with current(self.device):
            sent = self.link.send(direction, self._patterns(tensor), wire_dtype(tensor.dtype), shape, key)
        message = sent.message if self._use_torch else torch.from_numpy(sent.message)

        def decode() -> Tensor:
            with current(self.device):
                return self._tensor(sent.decode(), tensor.dtype, shape)

        return message, decode

    def simulate(
        self, direction: Direction, tensor: Tensor, key: MessageKey, *, is_repeated: bool = False
    ) -> Tensor:
        """Return the tensor that `send` would deliver, in new memory; see `Link.simulate`."""
        shape, patterns, dtype = tuple(tensor.shape), self._patterns(tensor), wire_dtype(tensor.dtype)
        with current(self.device):
            received = self.link.simulate(direction, patterns, dtype, shape, key, is_repeated=is_repeated)
        result = self._tensor(received, tensor.dtype, shape)
        return result.clone() if received is patterns else result

    def buffer(self, direction: Direction, like: Tensor, key: MessageKey) -> Tensor:
        """Allocate memory for the next message, uint8 [n_bytes]; `like` has its dtype and shape."""
        shape = tuple(like.shape)
        n_bytes = self.link.message_cap(direction, wire_dtype(like.dtype), shape, key)
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def receive(
        self,
        direction: Direction,
        message: Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        key: MessageKey,
    ) -> Tensor:
        """Decode the tensor in a message.

        Args:
            message: uint8 [n_bytes].
            direction, dtype, shape, key: of the expected message.

        Raises:
            WireError: the message is damaged or unexpected.
        """
        data = message if self._use_torch else message.numpy()
        with current(self.device):
            patterns = self.link.receive(direction, data, wire_dtype(dtype), tuple(shape), key)
        return self._tensor(patterns, dtype, tuple(shape))


class DistributedLink:
    """A `send`/`recv` pair over `torch.distributed`, without a pipeline schedule.

    Args:
        src, dst, policy, options: as for `TensorLink`.
        peer: rank of the other end.
        group: process group, by default the default group.
        fixed: send messages of fixed size; by default True unless the backend is gloo.
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
        self, tensor: Tensor, direction: Direction = Direction.FORWARD, key: MessageKey | None = None
    ) -> Tensor:
        """Send a tensor to the peer; returns the tensor that the peer decodes."""
        key = key or MessageKey(self._sent[direction])
        message, decode = self.link.send(direction, tensor, key)
        self._sent[direction] = key.step + 1
        with transport_errors(self.link.link.name_of(direction, key), "send"):
            dist.send(message, self._peer, self._group)
        return decode()

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        direction: Direction = Direction.FORWARD,
        key: MessageKey | None = None,
    ) -> Tensor:
        """Receive the next tensor from the peer.

        Raises:
            WireError: the peer is gone, or the message is damaged or unexpected.
        """
        key = key or MessageKey(self._received[direction])
        like = torch.empty(shape, dtype=dtype, device="meta")
        buffer = self.link.buffer(direction, like, key).zero_()
        with transport_errors(self.link.link.name_of(direction, key), "receive"):
            dist.recv(buffer, self._peer, self._group)
        self._received[direction] = key.step + 1
        return self.link.receive(direction, buffer, dtype, tuple(shape), key)


@contextlib.contextmanager
def transport_errors(name: str, operation: str) -> Iterator[None]:
    """Convert a RuntimeError of the transport to a WireError that names the message and the operation."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WireError(f"{name}: {operation}: {reason}") from error


def sample_ids_of(ids: Tensor | None) -> Any:
    """Convert sample ids [n] to an int64 array; None to None."""
    return None if ids is None else np.ascontiguousarray(ids.detach().cpu().numpy(), np.int64)


def links_state(name: str, counters: Any, links: Iterable[TensorLink]) -> dict[str, Any]:
    """Return counters, under `name`, and the states of links for a checkpoint, as numpy arrays by name."""
    out: dict[str, Any] = {name: np.array(counters, np.int64)}
    for link in links:
        out |= link.link.state_dict()
    return out


def load_state(name: str, state: Mapping[str, Any], links: Iterable[TensorLink]) -> Any:
    """Restore the states of links, and return the counters under `name`.

    Raises:
        WireError: the state is of another stage or rank, or incomplete.
    """
    if name not in state:
        raise WireError(f"wire state lacks {name}: it is of another stage, rank or number of ranks")
    for link in links:
        link.link.load_state_dict(state)
    return np.asarray(state[name])


class _SimulatedTransfer(torch.autograd.Function):
    """Sends an activation forward through a simulated link, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, link: TensorLink, key: MessageKey) -> Tensor:
        ctx.link, ctx.key, ctx.is_repeated = link, key, False
        return link.simulate(Direction.FORWARD, activation, key)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        link, key = ctx.link, ctx.key
        gradient = link.simulate(Direction.BACKWARD, gradients[0], key, is_repeated=ctx.is_repeated)
        ctx.is_repeated = True  # backward may run again on a retained graph
        return gradient, None, None


class Simulation:
    """Compresses activations and their gradients as a link between two stages would.

    Args:
        policy: the link's policy, or the name of a preset.
        n_microbatches: number of calls in one training step.
        options: `src`, `dst` and other arguments of `TensorLink`.
    """

    def __init__(self, policy: LinkPolicy | str, *, n_microbatches: int = 1, **options: Any) -> None:
        self.n_microbatches, self._n_calls, self._n_evals = n_microbatches, 0, 0
        self._options = {"src": 0, "dst": 1, "same_shape": False} | options
        self.policy = policy_of(policy)
        self.link = TensorLink(policy=self.policy, **self._options)

    def __call__(
        self, activation: Tensor, *, sample_ids: Tensor | None = None, is_eval: bool = False
    ) -> Tensor:
        """Return the tensor that the other end receives; differentiable.

        Args:
            activation: the tensor to send.
            sample_ids: ids of the samples [n_samples], which AQ-SGD needs.
            is_eval: inference, without a gradient.
        """
        ids = sample_ids_of(sample_ids)
        if is_eval:
            key = MessageKey(self._n_evals, sample_ids=ids, is_eval=True)
        else:
            step, microbatch = divmod(self._n_calls, self.n_microbatches)
            key = MessageKey(step, microbatch, sample_ids=ids)
        if activation.is_floating_point():
            result: Tensor = _SimulatedTransfer.apply(activation, self.link, key)  # type: ignore[no-untyped-call]
        else:
            result = self.link.simulate(Direction.FORWARD, activation, key)
        # Last: after an interrupt the next call repeats the same message, which the link detects.
        self._n_evals += is_eval
        self._n_calls += not is_eval
        return result

    @property
    def is_state_in_memory(self) -> bool:
        """Return whether later values depend on a state, and no part of it is in a file."""
        return self.policy.has_memory and not isinstance(self._options.get("samples"), tuple)

    def state_dict(self) -> dict[str, Any]:
        """Return counters and the link's state for a checkpoint, as numpy arrays by name."""
        src, dst = self._options["src"], self._options["dst"]
        calls = np.array([self._n_calls, self._n_evals], np.int64)
        return {f"wire/{src}-{dst}/calls": calls} | self.link.link.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        entries = dict(state)
        calls = entries.pop(f"wire/{self._options['src']}-{self._options['dst']}/calls")
        self._n_calls, self._n_evals = (int(n) for n in calls)
        self.link.link.load_state_dict(entries)


def simulate(policy: LinkPolicy | str, **options: Any) -> Simulation:
    """Create a `Simulation` of a link with the same arguments."""
    return Simulation(policy, **options)


class CompressLink(nn.Module):
    """A layer that simulates a compressed link between two parts of a model; identity without a policy.

    The policy is part of the module's state dict, and so is the link's state if later values depend on it, as
    with feedback, stochastic rounding or a warm-up; sample buffers in a file are not. Loading a model into
    links with an unsuitable policy, such as one trained with TopK into links without it, emits a
    `PolicyWarning`; the state of a link is only loaded into a link with the same policy.

    Args:
        policy: the link's policy, the name of a preset, or None for no compression.
        options: `n_microbatches` and other arguments of `simulate`.
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
        """Return policy and state in a uint8 tensor [n_bytes], which every checkpoint format can store.

        The policy is JSON; a zero byte and an npz file of the link's state may follow.
        """
        record = {} if self.simulation is None else policy_metadata(self.simulation.policy)
        data = json.dumps(record).encode()
        if self.simulation is not None and self.simulation.is_state_in_memory:
            packed = io.BytesIO()
            np.savez(packed, **dict(sorted(self.simulation.state_dict().items())))
            data += b"\0" + packed.getvalue()
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Load the link's state, and warn if the model was trained with an unsuitable policy."""
        text, _, packed = state.cpu().numpy().tobytes().partition(b"\0")
        record = json.loads(text)
        if METADATA_KEY in record:
            check_policy(record, None if self.simulation is None else self.simulation.policy)
        if packed and self.simulation is not None and record == policy_metadata(self.simulation.policy):
            self.simulation.load_state_dict(dict(np.load(io.BytesIO(packed), allow_pickle=False)))

    def extra_repr(self) -> str:
        """Describe the policy, for `repr`."""
        return "none" if self.simulation is None else str(self.simulation.policy)
