"""Resumed runs continue as if uninterrupted, with any optimizer state."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptz import Checkpointer
from ckptz.errors import ConfigError
from ckptz.training.optimizers import optimizer_state
from ckptz.training.state import model_state, sampled_weights, trained_weights
from tests.support.checkpointer_support import restored, saved
from tests.support.resumed_runs import GROUPINGS, KINDS, VARIANTS, Impossible, Run, check_resume

CLASSES = [
    one
    for one in vars(torch.optim).values()
    if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
]
OWN: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "ASGD": {"t0": 2},
    "LBFGS": {"max_iter": 2},
}


def maker(
    kind: type[torch.optim.Optimizer], variant: str
) -> Callable[[Sequence[Any]], torch.optim.Optimizer]:
    known = inspect.signature(kind.__init__).parameters
    variant_options = VARIANTS[variant]
    if any(name not in known for name in variant_options):
        raise Impossible(f"{kind.__name__} has no {next(iter(variant_options))}")
    options = OWN.get(kind.__name__, {}) | {
        k: v.clone() if hasattr(v, "clone") else v for k, v in variant_options.items()
    }
    return lambda groups: kind(groups, **options)


def outcome(
    folder: Path, kind: type[torch.optim.Optimizer], precision: str, grouping: str, variant: str
) -> str:
    try:
        make = maker(kind, variant)
        is_sparse = kind.__name__ == "SparseAdam"
        return check_resume(folder, lambda: Run(make, precision, grouping, is_sparse))
    except Impossible:
        return "impossible"


def save_and_restore(folder: Path, run: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    """Save a model with optimizers, restore another one, and require that the restore was exact."""
    saved(folder, *run)
    assert restored(folder, *other).is_exact


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_optimizer_resumes_in_16_bits_with_empty_groups(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    grouping = "one" if kind.__name__ == "LBFGS" else "empty middle"
    assert (
        outcome(tmp_path, kind, "fp32" if kind.__name__ == "SparseAdam" else "bf16", grouping, "plain")
        == "equal"
    )


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("precision", KINDS)
def test_groups_and_frozen_parameters_are_restored(grouping: str, precision: str, tmp_path: Path) -> None:
    assert outcome(tmp_path, torch.optim.AdamW, precision, grouping, "plain") in ("equal", "impossible")


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_adam_are_restored(variant: str, tmp_path: Path) -> None:
    assert outcome(tmp_path, torch.optim.Adam, "bf16", "several", variant) in ("equal", "impossible")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_optimizer_in_every_arrangement_resumes(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    counts: Counter[str] = Counter()
    for precision in KINDS:
        for grouping in GROUPINGS:
            for variant in VARIANTS:
                folder = tmp_path / f"{precision}-{grouping}-{variant}"
                counts[outcome(folder, kind, precision, grouping, variant).split(":")[0]] += 1
    print(f"\n{kind.__name__} {dict(counts)}")
    assert counts["equal"] > 0
    assert set(counts) <= {"equal", "refused", "impossible"}


class WideState(torch.optim.Optimizer):
    """Optimizer with fp32 momentum of 16-bit parameters, its own counter, and values of many types."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5, "betas": (0.9, 0.99)})
        self.n_steps = 0

    def step(self, closure: Any = None) -> None:
        self.n_steps += 1
        self.state["global"] = {"total": torch.tensor(float(self.n_steps), dtype=torch.float64)}
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                state.setdefault("basis", torch.eye(p.shape[0]).t().contiguous().t() * 0.5)
                state["momentum"].mul_(0.9).add_(p.grad.float())
                state["basis"].add_(state["momentum"] @ state["momentum"].t(), alpha=1e-3)
                state["scale"] = np.float32(self.n_steps / 7)
                state["seen"] = {1, "first", self.n_steps}
                state["pair"] = {3, 11}  # a copy of this set iterates in another order
                state["phase"] = complex(self.n_steps, -0.0)
                state["place"] = torch.device("cpu")
                state["history"] = [torch.tensor(self.n_steps), (state["momentum"].sum(), None)]
                # State that torch's own load_state_dict changes.
                state["mode"] = {"odd": "even", "even": "odd"}[state.get("mode", "even")]
                state["table"] = state.get("table", np.zeros(3)) + self.n_steps
                state.setdefault("counts", Counter())[f"step {self.n_steps}"] += 1
                update = state["basis"] @ state["momentum"] * float(state["scale"]) * 0.01 * self.n_steps
                p.data.sub_(update.to(p.dtype))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"n_steps": self.n_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.n_steps = state_dict.pop("n_steps")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_all_state_of_an_optimizer_is_restored(grouping: str, tmp_path: Path) -> None:
    assert check_resume(tmp_path, lambda: Run(WideState, "bf16", grouping)) == "equal"


def test_a_matrix_in_column_order_is_restored_in_column_order(tmp_path: Path) -> None:
    run = Run(WideState, "bf16")
    run.train(0, 2)

    def strides() -> list[tuple[int, ...]]:
        return [run.optimizer.state[p]["basis"].stride() for p in run.model.parameters()]

    expected = strides()
    assert expected[0] == (1, 3)
    with Checkpointer(tmp_path, run.model, run.optimizer, background=False) as checkpointer:
        checkpointer.save(1)
        checkpointer.restore(1)
    assert strides() == expected


def test_channels_last_moments_keep_their_layout(tmp_path: Path) -> None:
    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = new()
    model(torch.randn(1, 4, 5, 5)).sum().backward()
    optimizer.step()
    other, resumed = new()
    save_and_restore(tmp_path, (model, optimizer), (other, resumed))
    moments = resumed.state[other.weight]["exp_avg"]
    assert moments.stride() == optimizer.state[model.weight]["exp_avg"].stride()
    assert moments.is_contiguous(memory_format=torch.channels_last)


def test_several_optimizers_keep_their_own_keys_and_empty_groups(tmp_path: Path) -> None:
    def new() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        groups = [{"params": [], "lr": 0.125}, {"params": [model[1].weight]}]
        return model, [WideState(model[0].parameters()), torch.optim.AdamW(groups)]

    model, optimizers = new()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    _, restored = resumed = new()
    save_and_restore(tmp_path, (model, optimizers), resumed)
    assert restored[0].n_steps == 1
    assert restored[0].state["global"]["total"].item() == 1.0
    assert [group["lr"] for group in restored[1].param_groups] == [0.125, 1e-3]


def test_options_that_are_numbers_of_numpy_keep_their_type(tmp_path: Path) -> None:
    """An optimizer that computes with float32 options rounds to float32."""

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        betas = (np.float64(0.5), np.float64(0.75))
        return model, torch.optim.AdamW(model.parameters(), lr=np.float32(0.1), betas=betas)

    model, optimizer = resumed = new()
    save_and_restore(tmp_path, new(), resumed)
    [group] = optimizer.param_groups
    assert type(group["lr"]) is np.float32
    assert [type(beta) for beta in group["betas"]] == [np.float64, np.float64]
    trained = trained_weights(optimizer_state(model, [optimizer]), sampled_weights(model_state(model)))
    assert trained["weight"].rate == float(np.float32(0.1))


class Casting(torch.optim.SGD):
    """Optimizer that rounds its state when it is loaded, so that a restore cannot be exact."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] = round(self.param_groups[0]["lr"], 1)


def test_an_entry_that_differs_after_a_restore_is_named_and_the_step_is_not_exact(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Casting(model.parameters(), lr=0.123)
    with Checkpointer(tmp_path, model, optimizer, background=False) as checkpointer:
        checkpointer.save(1)
        checkpointer.restore(1)
        assert not checkpointer.restored.is_exact
        assert checkpointer.restored.notes == ("groups.0.lr: 0.123 saved, 0.1 now",)


class Unkept:
    """Value of a class that checkpoints cannot store."""


def test_state_that_no_file_can_keep_is_refused_at_the_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["odd"] = Unkept()
    with Checkpointer(tmp_path, model, optimizer, background=False) as checkpointer:
        with pytest.raises(Exception, match=r"optimizer.*weight.*odd"):
            checkpointer.save(1)
        del optimizer.state[model.weight]["odd"]
        optimizer.state[torch.zeros(2, requires_grad=True)] = {"momentum": torch.zeros(2)}
        with pytest.raises(ConfigError, match="in none of its parameter groups"):
            checkpointer.save(1)
