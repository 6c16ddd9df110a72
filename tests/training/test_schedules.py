"""Future learning rates: schedulers are simulated without side effects; files near the end are finer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler

from ckptz import Checkpointer, Grid, KeepPolicy, inspect
from ckptz.training.schedules import RISING, UNKNOWN, Schedule, rates_to_come

N = 40
LOSSY: dict[str, Any] = {"config": Grid(), "keep": KeepPolicy(last=None, exact=0), "background": False}
SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "line": lambda o: torch_schedulers.LambdaLR(o, lambda step: max(0.0, 1 - step / N)),
    "cosine": lambda o: torch_schedulers.CosineAnnealingLR(o, N),
    "one cycle": lambda o: torch_schedulers.OneCycleLR(o, 1.0, total_steps=N),
    "sequence": lambda o: torch_schedulers.SequentialLR(
        o,
        [torch_schedulers.LinearLR(o, 0.1, 1.0, 5), torch_schedulers.CosineAnnealingLR(o, N - 5)],
        milestones=[5],
    ),
}


def made(scheduler: str, n_steps: int) -> tuple[torch.optim.AdamW, LRScheduler]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    schedule = SCHEDULERS[scheduler](optimizer)
    for _ in range(n_steps):
        optimizer.step()
        schedule.step()
    return optimizer, schedule


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("n_steps", [12, 25, 38])
def test_the_rates_to_come_are_those_that_come(name: str, n_steps: int) -> None:
    optimizer, scheduler = made(name, n_steps)
    before = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    to_come = rates_to_come(scheduler, optimizer.param_groups[0], math.inf, has_fallen=n_steps > 12)
    assert (optimizer.state_dict(), scheduler.state_dict()) == before
    rates, last = [], optimizer.param_groups[0]["lr"]
    for _ in range(N - 1 - n_steps + (name != "one cycle")):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if rates[-1] > last and n_steps > 12:  # OneCycleLR increases the rate first
            break
        last = rates[-1]
    assert to_come == pytest.approx(sum(rates), rel=1e-3)


def test_a_scheduler_by_a_metric_or_with_a_broken_function_is_unknown() -> None:
    optimizer, _ = made("line", 0)
    by_metric = torch_schedulers.ReduceLROnPlateau(optimizer)
    broken = torch_schedulers.LambdaLR(optimizer, lambda step: 1 / (2 - step))
    schedule = Schedule()
    for scheduler in (by_metric, broken):
        assert rates_to_come(scheduler, optimizer.param_groups[0], 100.0, has_fallen=False) is None
        share, notes = schedule.share_of_step([optimizer], [scheduler], 10)
        assert share <= UNKNOWN
        assert type(scheduler).__name__ in notes[0]


RATES = st.one_of(st.floats(), st.none(), st.text(max_size=2), st.integers(-1, 2), st.just(torch.tensor(0.1)))


@given(st.lists(RATES, min_size=1, max_size=6), st.one_of(st.none(), RATES))
def test_no_rate_gives_more_than_the_usual_step_or_an_error(rates: list[Any], initial: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    schedule = Schedule()
    for step, rate in enumerate(rates):
        optimizer.param_groups[0] |= {"lr": rate, "initial_lr": initial}
        share, _ = schedule.share_of_step([optimizer], [], step)
        assert 0.08 < share <= 1
        schedule.mark([optimizer], step)


@pytest.mark.parametrize("name", ["line", "cosine"])
def test_nothing_comes_behind_the_end_even_of_a_cosine_that_would_rise_again(name: str) -> None:
    optimizer, scheduler = made(name, N - 5)
    schedule = Schedule()
    schedule.mark([optimizer], N - 5)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    share, notes = schedule.share_of_step([optimizer], [scheduler], N)
    assert share < 0.2
    assert notes == ()


def test_a_tenth_of_the_largest_rate_counts_as_the_end_where_rates_are_set_by_hand() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    schedule, shares = Schedule(), list[float]()
    for step in range(10, 101, 10):
        optimizer.param_groups[0]["lr"] = 0.55 + 0.45 * math.cos(math.pi * step / 100)
        shares.append(schedule.share_of_step([optimizer], [], step)[0])
        schedule.mark([optimizer], step)
    assert shares == sorted(shares, reverse=True)
    assert shares[-2] > 0.3
    assert shares[-1] < 0.2


def test_a_short_fall_behind_constant_rates_that_are_set_by_hand_has_finer_steps_than_a_long_one() -> None:
    """Both schedules end in ten updates."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    shares = {}
    for n_constant in (0, 960):
        schedule = Schedule()
        for step in (n_constant + 30, n_constant + 40):
            optimizer.param_groups[0]["lr"] = 1 - (step - n_constant) / 50
            shares[n_constant], _ = schedule.share_of_step([optimizer], [], step)
            schedule.mark([optimizer], step)
    assert shares[960] == shares[0] < 0.5


def test_the_last_drop_of_a_schedule_by_steps_counts_as_its_end() -> None:
    """Before the last drop, the next drop shows that training continues."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    scheduler = torch_schedulers.MultiStepLR(optimizer, [60, 120], 0.1)
    schedule, shares = Schedule(), dict[int, float]()
    for step in range(10, 160, 10):
        for _ in range(10):
            optimizer.step()
            scheduler.step()
        shares[step], _ = schedule.share_of_step([optimizer], [scheduler], step)
        schedule.mark([optimizer], step)
    assert shares[80] == shares[20] == 1
    assert max(shares[step] for step in (120, 130, 140, 150)) <= 0.25


def test_rates_that_rise_give_half_a_step_and_a_note() -> None:
    optimizer, _ = made("line", 0)
    schedule = Schedule()
    schedule.mark([optimizer], 10)
    optimizer.param_groups[0]["lr"] = 1.5
    assert schedule.share_of_step([optimizer], [], 20) == (UNKNOWN, (RISING,))


def test_weights_of_the_last_file_are_not_moved_by_lost_momentum(tmp_path: Path) -> None:
    """No training follows the last file, and users keep it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moved = dict[int, bool]()
    with Checkpointer(tmp_path, model, optimizer, **LOSSY, every=10) as saver:
        for step in range(1, N + 1):
            model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 1e-3 * (0.55 + 0.45 * math.cos(math.pi * step / N))
            if saver.maybe_save(step):
                entries = inspect(tmp_path / f"step-{step:08d}.ckptz").tensors
                moved[step] = any(one.lossy and "moved" in one.lossy.settings for one in entries)
    assert moved == {10: True, 20: True, 30: True, 40: False}


def test_restarts_within_a_warm_up_are_noted(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch_schedulers.LinearLR(optimizer, 0.1, 1.0, total_iters=N)
    for step in (5, 10):
        extra = {"scheduler": scheduler}
        with Checkpointer(tmp_path, model, optimizer, **LOSSY, every=5, extra=extra) as saver:
            saver.restore_latest()
            for i in range(step - 5, step):
                saver.maybe_save(i)
                model(torch.randn(8, 8)).square().mean().backward()
                optimizer.step()
                scheduler.step()
            saver.save(step)
            assert RISING in saver.wait().notes


@pytest.mark.parametrize("is_known", [True, False])
def test_files_near_the_end_have_finer_steps(tmp_path: Path, is_known: bool) -> None:
    """Covers rates that are set by hand, and a new process at each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch_schedulers.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / N))
    if not is_known:
        optimizer.param_groups[0].pop("initial_lr")
    steps = list[float]()
    extra: dict[str, Any] = {"scheduler": scheduler} if is_known else {}
    for step in range(5, N + 1, 5):
        with Checkpointer(tmp_path, model, optimizer, **LOSSY, full_every=1, extra=extra) as saver:
            saver.restore_latest()
            for _ in range(5):
                model(torch.randn(64, 128)).square().mean().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if not is_known:
                    optimizer.param_groups[0].pop("initial_lr", None)
            saver.save(step)
        entries = inspect(tmp_path / f"step-{step:08d}.ckptz").tensors
        settings = next(one.lossy.settings for one in entries if one.lossy and one.name == "model.weight")
        steps.append(float(settings["step"]))
    assert steps[0] == steps[1] == 0.175
    assert steps[-1] < 0.125
    assert steps == sorted(steps, reverse=True)
