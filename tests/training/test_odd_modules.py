"""Modules with custom loading of state, parametrizations with state, and other random generators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptz import Checkpointer
from ckptz.errors import ConfigError
from ckptz.wire import CompressLink, LinkPolicy, TopK, Uniform
from tests.support.checkpointer_support import restored, saved


class Transposed(nn.Module):
    """Module of version 2, whose version 1 saved the transposed weight."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *args)


class Growing(nn.Module):
    """Module that stores a row per call and loads any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.rows = torch.zeros_like(state[f"{prefix}rows"])
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize("wrap", [nn.Identity, torch.compile])
@pytest.mark.parametrize("weights_only", [False, True])
def test_versions_of_modules_are_kept(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], weights_only: bool
) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), Transposed())
        return model if wrap is nn.Identity else wrap(model)

    model, resumed = make(), make()
    saved(tmp_path, model)
    assert restored(tmp_path, resumed, weights_only=weights_only).is_exact
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


def test_states_of_an_earlier_version_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Transposed())
    monkeypatch.setattr(Transposed, "_version", 1)
    saved(tmp_path, model)
    monkeypatch.setattr(Transposed, "_version", 2)
    resumed = nn.Sequential(Transposed())
    assert not restored(tmp_path, resumed).is_exact
    assert torch.equal(resumed[0].weight, model[0].weight.t())


def test_buffers_that_a_module_resizes_are_restored(tmp_path: Path) -> None:
    model = nn.Sequential(Growing())
    model[0].rows = torch.randn(4, 3)
    saved(tmp_path, model)
    resumed = nn.Sequential(Growing())
    assert restored(tmp_path, resumed).is_exact
    assert torch.equal(resumed[0].rows, model[0].rows)


def test_lazy_modules_are_restored_before_their_first_call(tmp_path: Path) -> None:
    model = nn.LazyLinear(2)
    model(torch.zeros(1, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved(tmp_path, model, optimizer)
    resumed = nn.LazyLinear(2)
    with Checkpointer(
        tmp_path, resumed, torch.optim.SGD(resumed.parameters(), 0.1, momentum=0.9)
    ) as checkpointer:
        checkpointer.restore_latest()
    assert checkpointer.restored.is_exact
    assert torch.equal(resumed.weight, model.weight)


STOCHASTIC = LinkPolicy(forward=Uniform(4), backward=Uniform(2), rounding="stochastic")
WARM = LinkPolicy(forward=TopK(0.1), backward=TopK(0.1), feedback="ef21", warmup_steps=3)


@pytest.mark.parametrize("policy", [STOCHASTIC, WARM])
def test_links_of_a_model_resume_with_their_state(tmp_path: Path, policy: LinkPolicy) -> None:
    def train(model: nn.Module, n_steps: int) -> torch.Tensor:
        rows = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
        for _ in range(n_steps):
            model.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), CompressLink(policy), nn.Linear(64, 2))
    resumed = copy.deepcopy(model)
    train(model, 2)
    saved(tmp_path, model)
    assert restored(tmp_path, resumed).is_exact
    assert train(resumed, 4) == train(model, 4)
    assert all(map(torch.equal, *(tuple(p.grad for p in one.parameters()) for one in (model, resumed))))


@pytest.fixture
def numpy_generator() -> Iterator[Any]:
    before = np.random.get_bit_generator()
    yield before
    np.random.set_bit_generator(before)


def test_other_generators_of_numpy_are_restored(tmp_path: Path, numpy_generator: Any) -> None:
    np.random.set_bit_generator(np.random.PCG64(3))
    np.random.randint(9, dtype=np.uint32)
    saved(tmp_path, nn.Linear(1, 1))
    expected = np.random.randn(3)
    assert restored(tmp_path, nn.Linear(1, 1)).is_exact
    assert np.random.randn(3).tolist() == expected.tolist()
    np.random.set_bit_generator(numpy_generator)
    with pytest.raises(ConfigError, match=r"np\.random was a PCG64"):
        restored(tmp_path, nn.Linear(1, 1))


def test_steps_that_jump_over_a_multiple_are_saved(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, nn.Linear(1, 1), every=10) as checkpointer:
        assert [step for step in range(1, 46, 4) if checkpointer.maybe_save(step)] == [13, 21, 33, 41]
    with Checkpointer(tmp_path, nn.Linear(1, 1), every=10) as checkpointer:
        checkpointer.restore_latest()
        assert [step for step in range(45, 60, 4) if checkpointer.maybe_save(step)] == [53]


def test_a_second_save_of_a_step_warns_if_the_run_has_changed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(1)  # the same state, at the end of a loop
        with torch.no_grad():
            model.weight += 1
        with pytest.warns(RuntimeWarning, match="step 1 is complete already"):
            checkpointer.save(1)


def test_a_step_that_was_renamed_is_not_restored_as_another(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, nn.Linear(1, 1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    for file in tmp_path.glob("step-00000001*"):
        file.rename(tmp_path / file.name.replace("1", "9"))
    with (
        Checkpointer(tmp_path, nn.Linear(1, 1)) as checkpointer,
        pytest.warns(RuntimeWarning, match="renamed"),
    ):
        assert checkpointer.restore_latest() == 2


def test_training_continues_after_a_restore_in_inference_mode(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    saved(tmp_path, model, optimizer)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer, torch.inference_mode():
        checkpointer.restore_latest()
    train(model, optimizer)
