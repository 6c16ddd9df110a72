"""Averages of weights among the extras: methods treat them as weights if they are named as such."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ckptz
from ckptz import Budget, Checkpointer, Grid, KeepPolicy, KMeans
from ckptz.errors import ConfigError
from ckptz.numpy import load_file
from ckptz.state.flatten import flatten
from ckptz.training.copies import copied


class Diffusion:
    """Small convolutional model that predicts the noise in images of a spot, and its averaged weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        wide = nn.Conv2d(64, 64, 3, padding=1)
        ends = nn.Conv2d(2, 64, 3, padding=1), nn.Conv2d(64, 1, 3, padding=1)
        self.model = nn.Sequential(ends[0], nn.SiLU(), nn.GroupNorm(8, 64), wide, nn.SiLU(), ends[1])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.generator = torch.Generator().manual_seed(1)

    def loss(self, model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        centre, at = torch.rand(16, 1, 2, generator=generator) * 8, torch.arange(8.0)
        away = (at - centre[..., :1]).square()[:, :, :, None] + (at - centre[..., 1:]).square()[:, :, None]
        share = torch.rand(16, 1, 1, 1, generator=generator)
        noise = torch.randn(16, 1, 8, 8, generator=generator)
        noisy = (1 - share) * torch.exp(-away / 4) + share * noise
        error: torch.Tensor = model(torch.cat([noisy, share.expand_as(noisy)], 1)) - noise
        return error.square().mean()

    def train(self, checkpointer: Checkpointer, n_steps: int) -> None:
        for step in range(1, n_steps + 1):
            self.optimizer.zero_grad()
            self.loss(self.model, self.generator).backward()
            self.optimizer.step()
            self.ema.update_parameters(self.model)
            checkpointer.maybe_save(step)

    def checkpointer(self, folder: Path, **options: Any) -> Checkpointer:
        extra = {"ema": self.ema, "statistics": {"mean": torch.rand(64, 64)}}
        return Checkpointer(folder, self.model, self.optimizer, extra=extra, every=10, jobs=1, **options)


def ratio(tensors: list[Any]) -> float:
    return sum(one.tensor_bytes for one in tensors) / sum(one.stored_bytes for one in tensors)


@pytest.mark.parametrize("config", [Grid(), KMeans(levels=16)], ids=["grid", "kmeans"])
def test_an_average_that_is_named_is_as_small_as_weights(tmp_path: Path, config: Any) -> None:
    run = Diffusion()
    keep = KeepPolicy(last=None, exact=1)
    with run.checkpointer(tmp_path, config=config, keep=keep, extra_weights="ema") as checkpointer:
        run.train(checkpointer, 40)
        exact = {name: value.clone() for name, value in run.ema.state_dict().items()}
        live = run.loss(run.ema, torch.Generator().manual_seed(2)).item()
        checkpointer.restore(40)
        assert checkpointer.restored.is_exact
        assert all(torch.equal(value, exact[name]) for name, value in run.ema.state_dict().items())
        for path in tmp_path.glob("*.exact-*.ckptz"):
            path.unlink()
        checkpointer.restore(40)
        assert not checkpointer.restored.is_exact
    lossy = run.loss(run.ema, torch.Generator().manual_seed(2)).item()
    assert lossy == pytest.approx(live, rel=0.03)
    weights = ckptz.inspect(tmp_path / "step-00000040.ckptz").tensors
    state = ckptz.inspect(tmp_path / "step-00000040.state.ckptz").tensors
    averages = [row for row in state if row.name.startswith("extra.ema.")]
    assert ratio(averages) > 0.8 * ratio(list(weights))
    [large] = [row for row in averages if row.name == "extra.ema.module.3.weight"]
    assert (large.role, large.layer_type, large.lossy.method) == ("weight", "conv", config.name)
    loaded = load_file(tmp_path / "step-00000040.state.ckptz")
    assert loaded["extra.ema.n_averaged"] == exact["n_averaged"]
    [other] = [row for row in state if row.name == "extra.statistics.mean"]
    assert other.lossy is None


@pytest.mark.parametrize("config", [Grid(), KMeans()], ids=["grid", "kmeans"])
def test_an_average_keeps_its_movement_since_a_restore(tmp_path: Path, config: Any) -> None:
    """In full files of state too, although it moves by a hundredth of a grid step between saves."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128)
    average, shares = {"weight": model.weight.detach().clone()}, []
    generator, options = torch.Generator().manual_seed(1), {"config": config, "keep": KeepPolicy(exact=0)}
    for step in range(1, 6):
        before = average["weight"].clone()
        average["weight"] += torch.randn(128, 128, generator=generator) * before.std() * 0.002
        moved = (average["weight"] - before).double()
        with Checkpointer(
            tmp_path, model, extra={"ema": average}, extra_weights="ema", full_every=1, **options
        ) as checkpointer:
            checkpointer.save(step)
            checkpointer.restore(step)
        if step > 1:
            kept = (average["weight"] - before).double()
            shares.append(float((kept * moved).sum() / moved.square().sum()))
    assert sum(shares) / len(shares) == pytest.approx(1, abs=0.25), shares


@pytest.mark.parametrize("n_saves", [1, 3])
@pytest.mark.parametrize("config", [Grid(), KMeans(protect=0)], ids=["grid", "kmeans"])
def test_an_average_keeps_its_movement_in_each_of_several_restarts(
    tmp_path: Path, config: Any, n_saves: int
) -> None:
    """It follows the weights, so it also moves back by a part of the error of its last rounding."""
    torch.manual_seed(0)
    weight, average = torch.randn(64, 256), {"weight": torch.randn(64, 256)}
    shares, options = [], {"config": config, "extra_weights": "ema", "keep": KeepPolicy(exact=0)}
    for step in range(1, 6):
        with Checkpointer(tmp_path, nn.Linear(1, 1), extra={"ema": average}, **options) as checkpointer:
            checkpointer.restore_latest()
            before = average["weight"].double()
            for i in range(n_saves):
                weight += 0.1 * torch.randn(64, 256)
                average["weight"] = average["weight"].lerp(weight, 0.1 / n_saves)
                checkpointer.save(10 * step + i)
            moved = average["weight"] - before
            checkpointer.restore(10 * step + n_saves - 1)
            shares.append(float(((average["weight"] - before) * moved).sum() / moved.square().sum()))
    assert shares == pytest.approx([1] * 5, abs=0.06)


def test_an_average_that_is_not_named_stays_exact(tmp_path: Path) -> None:
    run = Diffusion()
    with run.checkpointer(tmp_path, config=Grid(), keep=KeepPolicy(exact=0)) as checkpointer:
        run.train(checkpointer, 20)
    state = ckptz.inspect(tmp_path / "step-00000020.state.ckptz").tensors
    assert not [one.name for one in state if one.name.startswith("extra.") and one.lossy is not None]
    assert [one.name for one in state if one.lossy is not None]


def test_names_of_nothing_are_refused_at_the_first_save(tmp_path: Path) -> None:
    run = Diffusion()
    checkpointer = run.checkpointer(tmp_path, extra_weights=["ema.shadow_params.*"])
    with pytest.raises(ConfigError, match=r"'ema.shadow_params.\*' names no tensor .*there are ema.module"):
        checkpointer.save(1)
    with pytest.raises(ConfigError, match="a budget measures the model's weights"):
        run.checkpointer(tmp_path, extra_weights="ema", budget=Budget(lambda state: [0.0], 0.01))


def test_copies_are_known_by_the_ends_of_names_or_by_the_order_of_parameters() -> None:
    def sources(**shapes: tuple[int, ...]) -> Any:
        return flatten(
            {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}
        ).tensors

    weights = sources(a__weight=(2, 3), a__bias=(2,), b__weight=(2, 3), running_mean=(2,))
    copies = sources(extra__e__a__weight=(2, 3), extra__e__b__weight=(3, 3), extra__x__0=(2, 3))
    assert copied(copies, weights, []) == {
        "extra.e.a.weight": "a.weight",
        "extra.e.b.weight": "extra.e.b.weight",
        "extra.x.0": "extra.x.0",
    }
    shadows = sources(extra__s__0=(2, 3), extra__s__1=(2,), extra__s__2=(2, 3))
    trained = ["a.weight", "a.bias", "b.weight"]
    assert list(copied(shadows, weights, trained).values()) == trained
