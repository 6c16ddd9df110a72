"""Momentum correction: weights are moved by the updates that lost momentum would still have caused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptz import Budget, Checkpointer, Grid, KeepPolicy, inspect
from ckptz.codec.grid import FULL_SHARE
from ckptz.codec.lossless import LOSSLESS
from ckptz.format.dtypes import dtype_of
from ckptz.format.sources import ArraySource
from ckptz.guidance.momentum import (
    UNKNOWN_SHARE,
    UNSCALED_WORTH,
    USUAL_SHARE,
    LostMomentum,
    UpdateTracker,
    bounds_of,
)
from ckptz.guidance.momentum_decay import MomentumDecay, ProjectionStats, bound_of, decay_of, shares_of
from ckptz.guidance.optimizer_layout import ParamState
from ckptz.torch import load_file
from ckptz.training.optimizers import optimizer_state
from ckptz.training.state import model_state, trained_weights
from tests.support.checkpointer_support import LOSSY

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3, betas=(0.8, 0.99), eps=1e-3),
    "AMSGrad": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
    "maximize": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0, maximize=True),
    "rate in a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(1e-3), weight_decay=0),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3),
    "SGD": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, dampening=0.3),
    "Nesterov": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
}
MOMENTS = ("exp_avg", "momentum_buffer")
UNKNOWN, UNKNOWN_DECAY = "moved by the usual share", "would move it is not known"


class Run:
    """Linear layer with gradients of random signs and equal magnitude: second moments are constant."""

    def __init__(self, make: Make, size: int = 64) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(size, size)
        self.optimizer = make(list(self.model.parameters()))
        self._generator = torch.Generator().manual_seed(1)

    def train(self, n: int, slope: float = 0.0) -> None:
        for _ in range(n):
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    signs = torch.randint(2, parameter.shape, generator=self._generator) * 2 - 1
                    parameter.grad = signs.to(parameter.dtype) * 0.01
            self.optimizer.step()
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] + slope

    def trained(self) -> dict[str, ParamState]:
        weights = {name: source(weight) for name, weight in model_state(self.model).items()}
        state = optimizer_state(self.model, [self.optimizer])
        tensors = {
            f"optimizer.{name}.{key}": source(value)
            for name, values in state["optimizer"].items()
            for key, value in values.items()
            if value.ndim
        }
        return trained_weights(state, weights, tensors)

    def moments(self, name: str = "weight") -> tuple[Tensor, Tensor | None]:
        state = self.optimizer.state[getattr(self.model, name)]
        second = next((state[key] for key in ("max_exp_avg_sq", "exp_avg_sq") if key in state), None)
        return next(state[key] for key in MOMENTS if key in state), second

    def copy(self) -> Run:
        """Return a copy of the run with zero first moments."""
        other = Run(lambda p: type(self.optimizer)(p, lr=1.0), self.model.in_features)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        other._generator.set_state(self._generator.get_state())
        for state in other.optimizer.state.values():
            for key in MOMENTS:
                if key in state:
                    state[key] = torch.zeros_like(state[key])
        return other


def flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().to(torch.float32).numpy().reshape(-1).copy()


def source(tensor: Tensor) -> ArraySource:
    return ArraySource(dtype_of("F32"), tuple(tensor.shape), flat(tensor).view(np.uint32))


def lost_of(run: Run, decay: MomentumDecay) -> LostMomentum:
    """Return the loss of the weight's entire first moment."""
    first, second = run.moments()
    zeros = source(torch.zeros_like(first))
    return LostMomentum(decay, source(first), zeros, None if second is None else source(second))


def decays(run: Run, before: Mapping[str, tuple[float, float]] | None = None) -> dict[str, MomentumDecay]:
    result = {}
    for name, state in run.trained().items():
        previous = (before or {}).get(name)
        decay = decay_of(state.settings, state.state, is_adamw=state.is_adamw, before=previous)
        if decay is not None:
            result[name] = decay
    return result


# --- future updates -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("n_before", [2, 40])
def test_moves_are_those_that_the_optimizer_would_make(name: str, n_before: int) -> None:
    run = Run(OPTIMIZERS[name])
    run.train(n_before)
    first, second = run.moments()
    to_come = decays(run)["weight"].moves(flat(first), None if second is None else flat(second))
    lost, start = run.copy(), flat(run.model.weight)
    run.train(200)
    lost.train(200)
    movement = flat(run.model.weight) - flat(lost.model.weight)
    assert np.abs(movement).max() > 1e-4
    np.testing.assert_allclose(to_come, movement, rtol=0.01, atol=3e-6 * np.abs(start).max())


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD", "RMSprop", "rate in a tensor"])
@pytest.mark.parametrize("slope", [-1e-5, 1e-5])
def test_learning_rates_are_extrapolated_linearly_but_not_below_zero(name: str, slope: float) -> None:
    run = Run(OPTIMIZERS[name])
    run.train(80, slope)  # down to 2e-4, so that the rate reaches zero during the future updates
    rate = 1e-3 + 80 * slope
    before = {"weight": (1e-3, 80.0)}
    first, second = run.moments()
    to_come = decays(run, before)["weight"].moves(flat(first), None if second is None else flat(second))
    lost = run.copy()
    n_left = min(200, round(rate / -slope)) if slope < 0 else 200
    run.train(n_left, slope)
    lost.train(n_left, slope)
    movement = flat(run.model.weight) - flat(lost.model.weight)
    assert np.linalg.norm(to_come - movement) < 0.02 * np.linalg.norm(movement)


def test_unknown_optimizer_settings_have_no_momentum_decay() -> None:
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "weight_decay": 0.1}
    state = {"step": 7.0, "exp_avg": 0, "exp_avg_sq": 0}
    decay = decay_of(adam, state)
    assert decay.weight_decay == 0
    assert decay_of(adam, state, is_adamw=True) == replace(decay, weight_decay=0.1)
    odd: list[dict[str, Any]] = [{"lr": None}, {"betas": 0.9}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}]
    for invalid in (*odd, {"lr": math.nan}, {"eps": "small"}, {"weight_decay": None}):
        assert decay_of({**adam, **invalid}, state) is None
    for fresh in ({**state, "step": 0.0}, {**state, "step": None}, {"step": 7.0}):
        assert decay_of(adam, fresh) is None
    assert decay_of({"lr": 1e-3, "betas": (0.9, 0.99)}, state) is None  # Lion
    assert decay_of(adam, {**state, "master_param": 0}) is None  # its updates start from the master
    nadam = {**{k: v for k, v in adam.items() if k != "amsgrad"}, "momentum_decay": 4e-3}
    assert decay_of(nadam, state) is None  # without the product
    assert decay_of({**nadam, "momentum_decay": None}, {**state, "mu_product": 0.1}) is None
    scalar = ParamState(
        "w", ArraySource(dtype_of("F32"), (1,), np.ones(1, np.uint32)), adam, {**state, "master": 0.0}, {}
    )
    assert bounds_of({"w": scalar}) == {}  # the moments of one number are no tensors of the file
    sgd = {"lr": 1e-3, "momentum": 0.9, "dampening": 0, "nesterov": False}
    assert decay_of(sgd, {"momentum_buffer": 0}) is not None
    assert decay_of(sgd, {}) is None
    assert decay_of({**sgd, "momentum": 0}, {"momentum_buffer": 0}) is None
    assert decay_of({**sgd, "lr": None}, {"momentum_buffer": 0}) is None


# --- the share that is applied --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD", "Nesterov"])
@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, 0.11),
        pytest.param(5, 0.46, marks=pytest.mark.slow),
        (15, 0.88),
        (70, 1.11),
        pytest.param(260, 1.11, marks=pytest.mark.slow),
    ],
)
def test_noise_is_moved_whole_however_often_a_run_is_saved(name: str, n: int, expected: float) -> None:
    run = Run(OPTIMIZERS[name], size=256)
    run.train(100)
    before = flat(run.model.weight)
    run.train(n)
    decay = decays(run)["weight"]
    moved, to_come = flat(run.model.weight) - before, lost_of(run, decay).moves(0, 256 * 256)
    raw = float(moved @ to_come / (to_come @ to_come))
    in_noise = decay.in_noise(n)
    assert raw == pytest.approx(in_noise, abs=0.15)
    if name in ("AdamW", "SGD"):
        assert in_noise == pytest.approx(expected, abs=0.005)
    assert ProjectionStats.of(to_come, moved, in_noise).share > 0.85


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Nesterov"])
@pytest.mark.parametrize("n", [2, 5, 15, 70])
def test_noise_is_moved_whole_behind_a_restart_that_has_lost_momentum(name: str, n: int) -> None:
    run = Run(OPTIMIZERS[name], size=256)
    run.train(100)
    for state in run.optimizer.state.values():
        state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"].zero_()
    before = flat(run.model.weight)
    run.train(n)
    decay = decays(run)["weight"]
    moved, to_come = flat(run.model.weight) - before, lost_of(run, decay).moves(0, 256 * 256)
    raw = float(moved @ to_come / (to_come @ to_come))
    assert raw == pytest.approx(decay.in_noise(n, from_zero=True), rel=0.1)
    if n in (5, 15) and name != "Nesterov":
        assert raw < 0.9 * decay.in_noise(n)


def test_what_gradients_undo_is_not_moved() -> None:
    rng = np.random.default_rng(0)
    to_come = rng.standard_normal(65536).astype(np.float32)
    noise = rng.standard_normal(65536).astype(np.float32)
    assert ProjectionStats.of(to_come, 0.4 * to_come + noise, 0.8).share == pytest.approx(0.5, abs=0.02)
    assert ProjectionStats.of(to_come, -to_come, 0.8).share == 0
    assert ProjectionStats.of(to_come, 9 * to_come, 0.8).share == 1
    assert ProjectionStats.of(np.zeros_like(to_come), to_come, 0.8).share == 0


def test_small_tensors_have_a_share_together_which_is_cut_off_then() -> None:
    rng = np.random.default_rng(0)

    def of(n: int, share: float) -> ProjectionStats:
        to_come, noise = rng.standard_normal((2, n)).astype(np.float32)
        return ProjectionStats.of(to_come, share * to_come + 3 * noise, 1.0)

    small = {f"bias {i}": of(200, 0.5) for i in range(100)}
    raw = [one.both / one.own for one in small.values()]
    assert min(raw) < 0.1
    assert max(raw) > 0.9
    shares = shares_of({"weight": of(65536, 0.9), **small})
    assert shares["weight"] == pytest.approx(0.9, abs=0.05)
    assert {round(shares[name], 6) for name in small} == {round(shares["bias 0"], 6)}
    assert shares["bias 0"] == pytest.approx(0.5, abs=0.1)
    # A pool with too few samples uses the share of all weights.
    few = shares_of({"weight": of(65536, 0.9), "bias": of(20, 0.1)})
    assert few["bias"] == pytest.approx(few["weight"], abs=0.02)
    assert shares_of({}) == {}


def tracker_of(run: Run, n: int = 15) -> UpdateTracker:
    """Return the tracker of a run that was saved and then trained."""
    run.train(50)
    tracker = UpdateTracker()
    tracker.snapshot(run.trained(), 50, is_restored=False)
    run.train(n)
    return tracker


def test_decoupled_weight_decay_is_no_movement_of_training() -> None:
    run = Run(lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=20.0), size=256)
    with torch.no_grad():
        run.model.weight *= 100
    tracker = tracker_of(run)
    lost = {"weight": lost_of(run, tracker.lost(run.trained(), 65)["weight"].decay)}
    assert tracker.shares(run.trained(), 65, lost)["weight"] == pytest.approx(1, abs=0.1)


def test_without_movement_the_share_is_the_last_one() -> None:
    run = Run(OPTIMIZERS["AdamW"], size=256)
    tracker, step = tracker_of(run), 65
    lost = {"weight": lost_of(run, decays(run)["weight"])}
    measured = tracker.shares(run.trained(), step, lost)
    assert measured["weight"] > 0.85
    for n_more in (0, 3):  # no update, and some updates with a rate of 0
        tracker.snapshot(run.trained(), step, is_restored=False)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        run.train(n_more)
        assert tracker.shares(run.trained(), step + n_more, lost) == measured
    tracker.snapshot(run.trained(), step, is_restored=True)  # no further momentum is lost
    assert tracker.shares(run.trained(), step, lost) == {"weight": 0.0}


def test_optimizers_that_count_no_updates_are_measured_by_the_steps_of_saves() -> None:
    run = Run(OPTIMIZERS["SGD"], size=256)
    tracker = tracker_of(run)
    decay = tracker.lost(run.trained(), 65)["weight"].decay
    share = tracker.shares(run.trained(), 65, {"weight": lost_of(run, decay)})["weight"]
    assert share == pytest.approx(1, abs=0.15)


# --- the Checkpointer -----------------------------------------------------------------------------


def saved(folder: Path, run: Run, steps: tuple[int, ...] = (50, 65), **options: Any) -> Checkpointer:
    """Train and save at the given steps; return the closed Checkpointer."""
    settings = {"config": Grid(), "keep": LOSSY, "background": False, "jobs": 1, **options}
    saver, last = Checkpointer(folder, run.model, run.optimizer, **settings), 0
    with saver:
        for step in steps:
            run.train(step - last)
            saver.save(step)
            last = step
    return saver


def moves_recorded(folder: Path, step: int) -> dict[str, float | None]:
    tensors = inspect(folder / f"step-{step:08d}.ckptz").tensors
    return {
        t.name.removeprefix("model."): t.lossy.settings.get("moved") if t.lossy else None for t in tensors
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_files_have_weights_with_the_momentum_correction(tmp_path: Path, name: str) -> None:
    run = Run(OPTIMIZERS[name], size=256)
    saver = saved(tmp_path, run, config=Grid(step=2**-6))
    report = saver.wait()
    assert not [note for note in report.notes if UNKNOWN in note]
    share = moves_recorded(tmp_path, 65)["weight"]
    assert share > 0.85
    exact, now = flat(run.model.weight), load_file(tmp_path / "step-00000065.ckptz")["weight"]
    first, second = run.moments()
    kept = load_file(tmp_path / "step-00000065.state.ckptz")
    key = next(k for k in MOMENTS if f"optimizer.weight.{k}" in kept)
    lost = flat(first) - flat(kept[f"optimizer.weight.{key}"])
    moves = share * decays(run)["weight"].moves(lost, None if second is None else flat(second))
    movement = flat(now) - exact
    assert float(movement @ moves / (moves @ moves)) == pytest.approx(1, abs=0.1)


def test_errors_are_recorded_against_the_weights_themselves(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["AdamW"], size=256)
    saved(tmp_path, run)
    for tensor in inspect(tmp_path / "step-00000065.ckptz").tensors:
        restored = load_file(tmp_path / "step-00000065.ckptz")[tensor.name.removeprefix("model.")]
        exact = run.model.state_dict()[tensor.name.removeprefix("model.")]
        error = (restored - exact).square().mean().sqrt().item()
        assert tensor.lossy.rms_error == pytest.approx(error, rel=1e-3)


def test_moves_do_not_add_up_where_nothing_is_restored(tmp_path: Path) -> None:
    run, other = (Run(OPTIMIZERS["AdamW"], size=256) for _ in range(2))
    saved(tmp_path / "one", run, (50, 65, 80, 95))
    saved(tmp_path / "other", other, (50, 80, 95))
    files = [tmp_path / name / "step-00000095.ckptz" for name in ("one", "other")]
    a, b = (flat(load_file(file)["weight"]) for file in files)
    assert torch.equal(run.model.weight, other.model.weight)
    assert np.abs(a - b).mean() < 0.2 * np.abs(a).mean()
    assert moves_recorded(tmp_path / "one", 95)["weight"] == moves_recorded(tmp_path / "other", 95)["weight"]


def test_a_save_right_after_a_restore_moves_nothing(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["AdamW"], size=256)
    saved(tmp_path, run)
    with Checkpointer(tmp_path, run.model, run.optimizer, config=Grid(), keep=LOSSY) as saver:
        saver.restore(65)
        saver.save(66)
        report = saver.wait()
    assert not [note for note in report.notes if UNKNOWN in note]
    assert moves_recorded(tmp_path, 66) == {"weight": None, "bias": None}


def test_after_a_restart_movement_is_measured_from_the_restored_weights(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["AdamW"], size=256)
    saved(tmp_path, run)
    with Checkpointer(tmp_path, run.model, run.optimizer, config=Grid(), keep=LOSSY) as saver:
        saver.restore(65)
        run.train(15)
        saver.save(80)
    assert 0.7 < moves_recorded(tmp_path, 80)["weight"] <= 1


def test_the_newest_step_is_restored_exactly(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["AdamW"], size=256)
    saver = saved(tmp_path, run, keep=KeepPolicy(last=None))
    exact, kept = flat(run.model.weight), flat(run.moments()[0])
    run.train(3)
    with saver:
        saver.restore(65)
    np.testing.assert_array_equal(flat(run.model.weight), exact)
    np.testing.assert_array_equal(flat(run.moments()[0]), kept)
    assert saver.restored.is_exact


def test_weights_of_16_bits_are_rounded_once(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["AdamW"], size=128)
    run.model.to(torch.bfloat16)
    run.optimizer = OPTIMIZERS["AdamW"](list(run.model.parameters()))
    saved(tmp_path, run, config=Grid(step=2**-6))
    assert moves_recorded(tmp_path, 65)["weight"] is not None
    restored = load_file(tmp_path / "step-00000065.ckptz")["weight"]
    assert restored.dtype == torch.bfloat16
    assert not torch.equal(restored, run.model.weight)


def test_tied_weights_move_once(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(128, 128) / 16)
            self.head = torch.nn.Linear(128, 128, bias=False)
            self.head.weight = self.weight

    run = Run(OPTIMIZERS["AdamW"], size=128)
    run.model = Tied()
    run.optimizer = OPTIMIZERS["AdamW"](list(run.model.parameters()))
    saver = saved(tmp_path, run)
    exact = flat(run.model.weight)
    with saver:
        saver.restore(65)
    assert run.model.weight is run.model.head.weight
    tensors = inspect(tmp_path / "step-00000065.ckptz").tensors
    assert len(tensors) == 1
    assert 0 < float(tensors[0].lossy.settings["moved"]) <= 1
    assert 0 < np.abs(flat(run.model.weight) - exact).max() < 0.5


class Unknown(torch.optim.AdamW):
    """Optimizer with unknown settings."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr, weight_decay=0)
        for group in self.param_groups:
            del group["amsgrad"]

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["amsgrad"] = False
        super().step(closure)
        del self.param_groups[0]["amsgrad"]


class WithoutBetas(torch.optim.AdamW):
    """Adam whose decay factors are not among its settings."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 1e-3, weight_decay=0)
        del self.param_groups[0]["betas"]

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["betas"] = (0.9, 0.999)
        super().step(closure)
        del self.param_groups[0]["betas"]


class WithMasters(torch.optim.AdamW):
    """Adam that keeps a copy of each parameter, which it updates instead, in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            if "master_param" in self.state[parameter]:
                parameter.copy_(self.state[parameter]["master_param"])
        super().step(closure)
        for parameter in parameters:
            self.state[parameter]["master_param"] = parameter.clone()


@pytest.mark.parametrize(
    ("make", "options", "reasons"),
    [
        pytest.param(Unknown, {}, [UNKNOWN_DECAY], id="an optimizer of which nothing is known"),
        pytest.param(WithMasters, {}, [UNKNOWN_DECAY], id="masters in the optimizer's state"),
        pytest.param(
            lambda p: SignOfMomentum(p), {}, [UNKNOWN_DECAY], id="momentum that moves in another way"
        ),
        pytest.param(lambda p: torch.optim.AdamW(p, 0.0, weight_decay=0), {}, [], id="a rate of zero"),
        pytest.param(OPTIMIZERS["AdamW"], {"budget": Budget(lambda _: 1.0, 0.5)}, [], id="a budget"),
    ],
)
def test_weights_stay_where_nothing_moves_them(
    tmp_path: Path, make: Make, options: dict[str, Any], reasons: list[str]
) -> None:
    report = saved(tmp_path, Run(make, size=128), **options).wait()
    assert moves_recorded(tmp_path, 65) == {"weight": None, "bias": None}
    for reason in reasons:
        [note] = [note for note in report.notes if reason in note]
        assert note.startswith("2 tensors, first 'model.weight': ")


@pytest.mark.parametrize("make", [WithMasters, WithoutBetas])
def test_first_moments_of_unknown_optimizers_are_fine_and_within_their_bound(
    tmp_path: Path, make: Make
) -> None:
    run = Run(make, size=128)
    with saved(tmp_path, run) as saver:
        exact = run.moments()[0].clone()
        saver.restore(65)
    first, second = run.moments()
    assert (first - exact).norm() < 0.1 * exact.norm()
    ratio = float((first.abs() / second.sqrt()).nan_to_num().max())
    assert ratio <= bound_of({"betas": (0.9, 0.999)}, {"step": 65, "exp_avg": first, "exp_avg_sq": second})


def test_frozen_weights_stay(tmp_path: Path) -> None:
    run = Run(lambda p: torch.optim.AdamW(p[1:], 1e-3), size=128)
    run.model.weight.requires_grad_(False)
    saved(tmp_path, run)
    assert moves_recorded(tmp_path, 65)["weight"] is None


def test_each_group_has_settings_of_its_own(tmp_path: Path) -> None:
    faster = {"lr": 1e-2, "betas": (0.5, 0.999)}
    run = Run(
        lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], **faster}], weight_decay=0), 256
    )
    run.train(20)
    weight, bias = (decays(run)[name] for name in ("weight", "bias"))
    assert (weight.rate, bias.rate) == (1e-3, 1e-2)
    assert weight.total == pytest.approx(1e-3 * 9 / (1 - 0.9**20), rel=0.15)
    assert bias.total == pytest.approx(1e-2, rel=0.15)
    saved(tmp_path, run, (15, 30))
    moved = moves_recorded(tmp_path, 30)
    assert all(share is not None and share > 0.8 for share in moved.values())


def test_new_parameters_are_moved_as_usual_and_a_note_says_so(tmp_path: Path) -> None:
    run = Run(lambda p: torch.optim.AdamW(p[1:], 1e-3, weight_decay=0), size=128)
    saver = Checkpointer(tmp_path, run.model, run.optimizer, config=Grid(), keep=LOSSY, background=False)
    with saver:
        run.train(50)
        saver.save(50)
        run.optimizer.add_param_group({"params": [run.model.weight]})
        run.train(15)
        saver.save(65)
        report = saver.wait()
    assert moves_recorded(tmp_path, 65)["weight"] == USUAL_SHARE
    assert [note for note in report.notes if UNKNOWN in note]


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_the_first_file_assumes_the_usual_share(tmp_path: Path, name: str) -> None:
    run = Run(OPTIMIZERS[name], size=128)
    report = saved(tmp_path, run, (50,)).wait()
    assert set(moves_recorded(tmp_path, 50).values()) == {USUAL_SHARE}
    [note] = [note for note in report.notes if UNKNOWN in note]
    assert note.startswith("2 tensors, first 'model.weight': ")


def test_a_loop_that_asks_at_every_step_is_known_from_its_first_step(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["AdamW"], size=128)
    with Checkpointer(tmp_path, run.model, run.optimizer, config=Grid(), keep=LOSSY, every=15) as saver:
        for step in range(1, 16):
            run.train(1)
            saver.maybe_save(step)
    assert moves_recorded(tmp_path, 15)["weight"] > 0.5


def test_what_does_not_tell_is_not_taken_for_a_share() -> None:
    """Weights that were loaded after the first sample have changed a lot, but not by training."""
    run = Run(OPTIMIZERS["AdamW"], size=128)
    run.train(20)
    tracker = UpdateTracker()
    tracker.snapshot(run.trained(), 20, is_restored=False)
    with torch.no_grad():
        run.model.weight += 30 * torch.randn(128, 128)
    run.train(5)
    assert tracker.shares(run.trained(), 25, {"weight": lost_of(run, decays(run)["weight"])}) == {}


def test_parameters_without_elements_are_left_alone(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["AdamW"], size=128)
    run.model.nothing = torch.nn.Parameter(torch.zeros(0, 128))
    run.optimizer = OPTIMIZERS["AdamW"](list(run.model.parameters()))
    saved(tmp_path, run)
    assert moves_recorded(tmp_path, 65)["nothing"] is None
    assert moves_recorded(tmp_path, 65)["weight"] is not None


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_numbers_of_optimizers_are_one_tensor_of_a_lossy_file_and_come_back_apart(
    tmp_path: Path, name: str
) -> None:
    run = Run(OPTIMIZERS[name], size=128)
    saver = saved(tmp_path / "lossy", run)
    saved(tmp_path / "exact", run, (1,), config=LOSSLESS)
    names = {t.name for t in inspect(tmp_path / "lossy" / "step-00000065.state.ckptz").tensors}
    assert "scalars.float32" in names
    assert not any(name.endswith((".step", ".mu_product")) for name in names)
    names = {t.name for t in inspect(tmp_path / "exact" / "step-00000001.state.ckptz").tensors}
    assert "optimizer.weight.step" in names
    run.train(5)
    with saver:
        saver.restore(65)
    counts = [values["step"] for values in run.optimizer.state.values()]
    assert [count.item() for count in counts] == [65.0, 65.0]
    assert all(count.untyped_storage().nbytes() == 4 for count in counts)
    run.train(1)
    assert [count.item() for count in counts] == [66.0, 66.0]


def test_momentum_without_second_moments_is_worth_more_bits() -> None:
    ratios = dict[str, float]()
    for name in ("RMSprop", "SGD", "AdamW"):
        run = Run(OPTIMIZERS[name], size=128)
        run.train(20)
        tracker = UpdateTracker()
        tracker.snapshot(run.trained(), 20, is_restored=False)
        guides = tracker.guides(run.trained(), 20)
        guide = guides[run.trained()["weight"].names[decays(run)["weight"].moment]]
        decay = decays(run)["weight"]
        sample = lost_of(run, decay).sample()
        usual = decay.total / decay.root / (UNKNOWN_SHARE * np.sqrt(np.square(sample).mean()))
        ratios[name] = guide.update_scale / usual
    assert ratios == pytest.approx({"RMSprop": UNSCALED_WORTH, "SGD": UNSCALED_WORTH, "AdamW": 1.0}, rel=1e-3)


class SignOfMomentum(torch.optim.Optimizer):
    """Optimizer with momentum and without second moments, as Lion."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            average = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
            one -= self.param_groups[0]["lr"] * average.lerp_(one.grad, 0.1).sign()


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (OPTIMIZERS["SGD"], 0.25),
        (SignOfMomentum, 0.25),
        (torch.optim.Adafactor, 0.25),
        (OPTIMIZERS["AdamW"], 0.5),
    ],
)
def test_weights_without_second_moments_have_half_of_the_step(
    tmp_path: Path, make: Make, step: float
) -> None:
    """Adafactor has second moments only for vectors."""
    saved(tmp_path, Run(make), steps=(50,))
    entries = inspect(tmp_path / "step-00000050.ckptz").tensors
    steps = {one.lossy.settings["step"] for one in entries if one.lossy and one.lossy.method == "grid"}
    assert steps == {step * FULL_SHARE}
