"""Links within one process: what a pipeline would compute, without a pipeline.

Results are equal to the bit to those of frames between processes, with the same policy, stages, steps
and microbatches. The bytes that would travel are counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ckptz.wire.header import Direction
from ckptz.wire.link import TensorLink, sample_ids_of
from ckptz.wire.policy import METADATA_KEY, LinkPolicy, check_policy, policy_metadata, policy_of
from ckptz.wire.state import Place


class _Through(torch.autograd.Function):
    """Activation through the link; its gradient back through the same link."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, link: TensorLink, place: Place) -> Tensor:
        ctx.link, ctx.place = link, place
        return link.simulate(Direction.FORWARD, activation, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.link.simulate(Direction.BACKWARD, gradients[0], ctx.place), None, None


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
        """The tensor as the other end gets it; differentiable. AQ-SGD needs the ids of the microbatch."""
        ids = sample_ids_of(sample_ids)
        if is_eval:
            place = Place(self._n_evals, sample_ids=ids, is_eval=True)
            self._n_evals += 1
        else:
            step, microbatch = divmod(self._n_calls, self.n_microbatches)
            place = Place(step, microbatch, sample_ids=ids)
            self._n_calls += 1
        if not activation.is_floating_point():
            return self.link.simulate(Direction.FORWARD, activation, place)
        result: Tensor = _Through.apply(activation, self.link, place)  # type: ignore[no-untyped-call]
        return result

    def state_dict(self) -> dict[str, Any]:
        """Give everything needed to go on: counters and the link's state, as numpy arrays."""
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
    """Make a `Simulation` of a link; takes what that takes."""
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

    def forward(self, activation: Tensor, sample_ids: Tensor | None = None) -> Tensor:
        """Give the activation as the next stage gets it."""
        if self.simulation is None:
            return activation
        is_eval = not self.training
        if is_eval and not self.simulation.policy.compresses_eval:
            return activation
        return self.simulation(activation, sample_ids=sample_ids, is_eval=is_eval)

    def get_extra_state(self) -> Tensor:
        """Give the policy, as bytes in a tensor, so that every checkpoint format can hold it."""
        record = {} if self.simulation is None else policy_metadata(self.simulation.policy)
        return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Compare the policy that the model was trained with; warns if they do not fit."""
        record = json.loads(bytes(state.tolist()))
        if METADATA_KEY in record:
            check_policy(record, None if self.simulation is None else self.simulation.policy)

    def extra_repr(self) -> str:
        """Say the policy in words."""
        return "none" if self.simulation is None else str(self.simulation.policy)
