"""Runs of tiny models that are interrupted once: the resumed run must equal the uninterrupted one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptz import Checkpointer

SAVED_AT, ENDS_AT = 3, 7
GROUPINGS = ("one", "several", "empty first", "empty middle", "empty last", "frozen", "frozen later")
KINDS = ("fp32", "bf16", "bf16 with fp32 state")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor lr": {"lr": torch.tensor(0.01)},
    "capturable": {"capturable": True},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
}


class Impossible(Exception):
    """This optimizer cannot run with these settings, whether or not its state is saved."""


@dataclass
class Run:
    """A model and its optimizer; the gradients depend on the number of the step only."""

    make: Callable[[Sequence[Any]], torch.optim.Optimizer]
    kind: str = "fp32"
    grouping: str = "one"
    is_sparse: bool = False
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)]
        self.model = nn.Sequential(*layers).to(torch.float32 if self.kind == "fp32" else torch.bfloat16)
        if self.grouping == "frozen":
            self.model[1].weight.requires_grad_(False)
        try:
            self.optimizer = self.make(list(self._groups()))
        except Exception as error:  # of any package
            raise Impossible(str(error)) from error

    def _groups(self) -> Iterator[Any]:
        first, *others = self.model.parameters()
        if self.grouping in ("one", "frozen", "frozen later"):
            yield from (first, *others)
            return
        empty = {"params": [], "weight_decay": 0.25}
        groups = [{"params": [first]}, {"params": others, "weight_decay": 0.125}]
        if self.grouping.startswith("empty"):
            groups.insert({"first": 0, "middle": 1, "last": 2}[self.grouping.split()[1]], empty)
        yield from groups

    def freeze_later(self) -> None:
        """Freeze a parameter that already has state, as gradual unfreezing and GANs do."""
        if self.grouping == "frozen later":
            self.model[1].weight.requires_grad_(False)
            self.model[1].weight.grad = None

    def train(self, begin: int, end: int) -> None:
        """Train the steps from `begin` to `end` - 1."""
        for step in range(begin, end):
            if step == SAVED_AT:
                self.freeze_later()
            generator = torch.Generator().manual_seed(step)
            for parameter in self.model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                if parameter.requires_grad:
                    parameter.grad = gradient.to_sparse() if self.is_sparse else gradient
            try:
                self._step(step)
            except Exception as error:
                if begin:
                    raise
                raise Impossible(str(error)) from error
            if self.kind == "bf16 with fp32 state" and step == 0:
                self._widen()

    def _step(self, step: int) -> None:
        def closure() -> torch.Tensor:
            return torch.tensor(1.0 / (1 + step), requires_grad=True)

        is_needed = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if is_needed is not None and is_needed.default is inspect.Parameter.empty:
            self.optimizer.step(closure)
        else:
            self.optimizer.step()

    def _widen(self) -> None:
        """Convert the state to fp32, as recipes of mixed precision do."""
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim:
                    state[key] = value.float()

    def state(self) -> list[tuple[str, Any]]:
        """List the weights, and every tensor and number of the optimizer's state."""
        leaves: list[tuple[str, Any]] = [(n, bits(p)) for n, p in self.model.named_parameters()]
        leaves += list(leaves_of(self.optimizer.state_dict(), "optimizer"))
        return leaves


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    raw = plain.contiguous().reshape(-1).view(torch.uint8).tolist()
    return str(plain.dtype), tuple(plain.shape), plain.stride(), raw


def leaves_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield name, bits(value)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves_of(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves_of(item, f"{name}.{i}")
    elif isinstance(value, set):  # the order depends on earlier elements
        yield name, sorted(map(repr, value))
    elif not callable(value):
        yield name, repr(value)


def check_resume(folder: Path, new_run: Callable[[], Run]) -> str:
    """Save in the middle of a run, resume in a new one, and compare the ends.

    Returns:
        "equal", or the refusal of the save; anything else raises.
    """
    uninterrupted = new_run()
    uninterrupted.train(0, SAVED_AT)
    with Checkpointer(folder, uninterrupted.model, uninterrupted.optimizer, background=False) as checkpointer:
        try:
            checkpointer.save(SAVED_AT)
        except Exception as error:
            if type(error).__module__.startswith("ckptz") and str(error):
                return f"refused: {error}"
            raise
    uninterrupted.train(SAVED_AT, ENDS_AT)
    resumed = new_run()
    resumed.freeze_later()
    with Checkpointer(folder, resumed.model, resumed.optimizer, background=False) as checkpointer:
        assert checkpointer.restore_latest() == SAVED_AT
        assert checkpointer.restored is not None
        assert checkpointer.restored.is_exact, checkpointer.restored.notes
    resumed.train(SAVED_AT, ENDS_AT)
    assert resumed.state() == uninterrupted.state()
    return "equal"
