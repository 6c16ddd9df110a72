"""Checkpoints of trained parameters only: a restore requires the model's frozen weights to be unchanged."""

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  # torch is optional

from ckptz import Checkpointer, Grid, KeepPolicy  # noqa: E402
from ckptz.errors import ConfigError  # noqa: E402
from ckptz.torch import load_file  # noqa: E402
from ckptz.training.frozen import FrozenId, frozen_weights  # noqa: E402

FROZEN = r"without its frozen weights.* \(first 'base\.weight'\) are others"


class Adapted(nn.Module):
    """Frozen layer with a trained low-rank adapter, and a buffer that training changes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Any) -> Any:
        return self.norm(self.base(x) + self.up(self.down(x)))


def trained(n_steps: int, model: Adapted | None = None) -> tuple[Adapted, Any]:
    model = model or Adapted()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    step(model, optimizer, n_steps)
    return model, optimizer


def step(model: Adapted, optimizer: Any, n_steps: int) -> None:
    for i in range(n_steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


def saved(folder: Path, **options: Any) -> Adapted:
    model, optimizer = trained(3)
    with Checkpointer(folder, model, optimizer, trainable_only=True, jobs=1, **options) as checkpointer:
        checkpointer.save(3)
    return model


def test_frozen_weights_are_not_saved_and_the_run_resumes(tmp_path: Path) -> None:
    model = saved(tmp_path)
    stored = load_file(tmp_path / "step-00000003.ckptz")
    assert {"down.weight", "up.weight", "norm.running_mean"} <= set(stored)
    assert not any("base" in name for name in stored)
    other, optimizer = trained(0)
    with Checkpointer(tmp_path, other, optimizer, trainable_only=True, jobs=1) as checkpointer:
        assert checkpointer.restore_latest() == 3
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    step(other, optimizer, 2)
    uninterrupted, whole_optimizer = trained(3)
    step(uninterrupted, whole_optimizer, 2)
    assert all(map(torch.equal, other.state_dict().values(), uninterrupted.state_dict().values()))


def test_a_restore_wants_the_frozen_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    other, optimizer = trained(0, Adapted(seed=1))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for trainable_only in (True, False):  # the file records that it is partial
        with Checkpointer(tmp_path, other, optimizer, trainable_only=trainable_only) as checkpointer:
            with pytest.raises(ConfigError, match=FROZEN):
                checkpointer.restore(3)
            with pytest.raises(ConfigError, match="load the weights that training began with"):
                checkpointer.restore(3, weights_only=True)
    assert all(map(torch.equal, other.state_dict().values(), before.values())), "nothing was changed"
    matching, optimizer = trained(0)
    with Checkpointer(tmp_path, matching, optimizer) as checkpointer:
        assert checkpointer.restore(3) == 3


def test_lossy_steps_have_exact_heads_and_know_what_is_frozen(tmp_path: Path) -> None:
    model = saved(tmp_path, config=Grid(min_elements=1), keep=KeepPolicy(last=2))
    other, optimizer = trained(0)
    with Checkpointer(tmp_path, other, optimizer, trainable_only=True, jobs=1) as checkpointer:
        checkpointer.restore(3)
        assert checkpointer.restored.is_exact
        assert torch.equal(other.up.weight, model.up.weight)
        with torch.no_grad():
            other.base.weight[0, 0] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ConfigError, match="frozen weights"):
                checkpointer.restore(3)


def test_whole_checkpoints_restore_whatever_is_frozen_now(tmp_path: Path) -> None:
    model, optimizer = trained(2)
    with Checkpointer(tmp_path, model, optimizer, jobs=1) as checkpointer:
        checkpointer.save(2)
    other, optimizer = trained(0, Adapted(seed=1))
    with Checkpointer(tmp_path, other, optimizer, trainable_only=True, jobs=1) as checkpointer:
        checkpointer.restore(2)
    assert torch.equal(other.base.weight, model.base.weight)


def test_without_frozen_weights_nothing_is_left_out(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with Checkpointer(tmp_path, model, trainable_only=True, jobs=1) as checkpointer:
        checkpointer.save(1)
        checkpointer.restore(1)
    assert set(load_file(tmp_path / "step-00000001.ckptz")) == {"weight", "bias"}


def test_the_id_depends_on_values_and_is_recomputed_when_they_change() -> None:
    model, frozen_id = Adapted(), FrozenId()
    frozen = frozen_weights(model)
    assert list(frozen) == ["base.weight", "base.bias"]
    first = frozen_id.of(frozen)
    assert first == FrozenId().of(frozen_weights(Adapted()))
    with torch.no_grad():
        model.base.bias[0] += 1
    with pytest.warns(RuntimeWarning, match="have changed"):
        assert frozen_id.of(frozen_weights(model)) != first
    assert frozen_id.of({}) is None


def test_frozen_weights_that_change_during_a_run_are_told_at_once(tmp_path: Path) -> None:
    model = Adapted()
    with Checkpointer(tmp_path, model, trainable_only=True, jobs=1) as checkpointer:
        checkpointer.save(1)
        model.base.weight.data.mul_(0.999)  # as averages of weights do; no version counter increases
        with pytest.warns(RuntimeWarning, match=r"'base\.weight', have changed.*or leave trainable_only out"):
            checkpointer.save(2)
    with (
        Checkpointer(tmp_path, Adapted(), trainable_only=True, jobs=1) as checkpointer,
        pytest.raises(ConfigError, match=FROZEN),
    ):
        checkpointer.restore(2)


def test_all_names_of_a_tied_weight_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    assert list(frozen_weights(model)) == ["0.weight", "2.weight"]
