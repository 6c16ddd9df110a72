"""Memory that parts of a run share is shared again after a restore, or the difference is reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptz import Checkpointer, Grid
from ckptz.errors import ConfigError
from tests.support.checkpointer_support import restored, saved


class CountsOnce(torch.optim.Optimizer):
    """Optimizer that counts steps in one tensor, shared by the state of all parameters and the group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("count", torch.zeros(()))
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("count", group["count"])
                state["count"] += 1
                parameter.sub_(parameter.grad * group["lr"] * state["count"].sin())


def one_rate(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose groups share one tensor as their learning rate."""
    rate = torch.tensor(0.01)
    optimizer = torch.optim.SGD([{"params": [one], "lr": rate} for one in model.parameters()], lr=rate)
    optimizer.register_step_post_hook(lambda one, *_: one.param_groups[0]["lr"].mul_(0.9))
    return optimizer


def outside(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose learning rate is a tensor that the program also references."""
    rate = torch.tensor(0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer.register_step_post_hook(lambda *_: rate.mul_(0.9))
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n_steps: int) -> None:
    for i in range(n_steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), i + 1.0)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("config", [None, Grid()])
@pytest.mark.parametrize("make", [lambda model: CountsOnce(model.parameters()), one_rate, outside])
def test_tensors_in_several_places_of_an_optimizer_stay_one(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], config: Grid | None
) -> None:
    torch.manual_seed(0)
    model, options = nn.Linear(3, 2), {} if config is None else {"config": config}
    start = copy.deepcopy(model)
    optimizer = make(model)
    with Checkpointer(tmp_path, model, optimizer, **options) as checkpointer:
        train(model, optimizer, 3)
        checkpointer.save(1)
    train(model, optimizer, 4)
    resumed = make(start)
    assert restored(tmp_path, start, resumed, **options).is_exact
    train(start, resumed, 4)
    assert torch.equal(start.weight, model.weight)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)


def tied_by_data() -> nn.Module:
    model = Twice()
    model.b.weight.data = model.a.weight.data
    return model


def test_weights_that_are_no_longer_tied_are_named(tmp_path: Path) -> None:
    saved(tmp_path, tied_by_data())
    assert restored(tmp_path, tied_by_data()).is_exact
    result = restored(tmp_path, Twice())
    assert not result.is_exact
    assert result.notes == (
        "model.b.weight: shared memory with model.a.weight when it was saved, and not now",
    )


def test_weights_that_are_newly_tied_are_named(tmp_path: Path) -> None:
    model = Twice()
    model.b.load_state_dict(model.a.state_dict())
    saved(tmp_path, model)
    result = restored(tmp_path, tied_by_data())
    assert not result.is_exact
    assert "shares memory with model.a.weight now" in result.notes[0]


class Settings(dict[str, Any]):
    """Subclass of dict."""


def test_what_a_program_holds_of_an_extra_is_restored_in_place(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {
            "average": torch.zeros(2),
            "array": np.zeros(2),
            "nested": Settings(count=0, history=[], queue=torch.zeros(3)),
        }

    extra = make()
    with Checkpointer(tmp_path, nn.Linear(1, 1), extra={"x": extra}) as checkpointer:
        extra["average"] += 1
        extra["array"] += 2
        extra["nested"]["count"] = 3
        extra["nested"]["history"].append(4)
        extra["nested"]["queue"] += 5
        checkpointer.save(1)
    extra = make()
    average, array, nested = extra["average"], extra["array"], extra["nested"]
    history, queue = nested["history"], nested["queue"]
    restored(tmp_path, nn.Linear(1, 1), extra={"x": extra})
    assert [one.tolist() for one in (average, array, queue)] == [[1, 1], [2, 2], [5, 5, 5]]
    assert (nested["count"], history) == (3, [4])
    assert type(extra["nested"]) is Settings


def test_tensors_of_an_extra_that_begin_as_the_weights_are_not_written_to(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    average = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    saved(tmp_path, model, extra={"average": average})
    resumed = nn.Linear(2, 2)
    weights = resumed.state_dict()  # shares the memory of the weights
    assert restored(tmp_path, resumed, extra={"average": weights}).is_exact
    assert torch.equal(resumed.weight, model.weight)
    assert torch.equal(weights["weight"], average["weight"])


def test_extras_share_memory_as_when_they_were_saved(tmp_path: Path) -> None:
    shared = torch.ones(2)
    with Checkpointer(
        tmp_path, nn.Linear(1, 1), extra={"x": {"a": shared, "b": shared, "c": torch.zeros(2)}}
    ) as checkpointer:
        checkpointer.save(1)
    same = torch.full((2,), 7.0)
    extra = {"a": torch.zeros(2), "b": same, "c": same}
    assert restored(tmp_path, nn.Linear(1, 1), extra={"x": extra}).is_exact
    assert extra["a"] is extra["b"]
    assert extra["c"].tolist() == [0, 0]


class FlatBuffer(torch.optim.SGD):
    """Optimizer whose momentum consists of views of one buffer in the group."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.01)
        for group in self.param_groups:
            sizes = [parameter.numel() for parameter in group["params"]]
            group["flat"] = torch.zeros(sum(sizes))
            for parameter, part in zip(group["params"], group["flat"].split(sizes), strict=True):
                self.state[parameter]["momentum_buffer"] = part.view_as(parameter)


@pytest.mark.parametrize("step", [1, 2])
def test_parts_of_one_buffer_are_refused(step: int, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = FlatBuffer(model)
    if step > 1:  # with gaps, so that views cover only part of the buffer
        for parameter in model.parameters():
            buffer = optimizer.param_groups[0]["flat"]
            optimizer.state[parameter]["momentum_buffer"] = buffer[1::step][: len(parameter)]
    with (
        Checkpointer(tmp_path, model, optimizer) as checkpointer,
        pytest.raises(ConfigError, match=r"'groups.0.flat'.* overlap in memory|and 'groups.0.flat' overlap"),
    ):
        checkpointer.save(1)


def test_columns_of_one_buffer_are_apart(tmp_path: Path) -> None:
    model = nn.Linear(1, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    train_columns(model, optimizer)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
        checkpointer.restore(1)
        assert checkpointer.restored.is_exact


def train_columns(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set both moments to columns of one matrix, which share memory but no element."""
    columns = torch.rand(3, 2)
    (parameter,) = model.parameters()
    state = {"step": torch.ones(()), "exp_avg": columns[:, :1], "exp_avg_sq": columns[:, 1:]}
    optimizer.state[parameter] = state
