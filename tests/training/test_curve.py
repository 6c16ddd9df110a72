"""The cost of lossy restarts, estimated from metrics, and the finer steps that result."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptz import Checkpointer, Grid, KeepPolicy, inspect
from ckptz.training.curve import MAX_FINER, NOT_FINITE, Curve

LOSSY: dict[str, Any] = {"config": Grid(), "keep": KeepPolicy(last=None, exact=0), "background": False}


def after(jump: float, *, is_better_lower: bool = True, noise: float = 0.0) -> tuple[Curve, list[str]]:
    """Return the curve and notes of a run whose loss rises by `jump` at restarts, one per ten saves."""
    curve, notes, lost, source = Curve(lower_is_better=is_better_lower), list[str](), 0.0, random.Random(0)
    for i in range(40):
        loss = 2 + math.exp(-i / 20) + lost + noise * source.gauss(0, 1)
        notes += curve.add(100 * i, loss if is_better_lower else -loss)
        if i % 10 == 9:
            curve = Curve.restored(curve.state(), lower_is_better=is_better_lower, is_lossy=True)
            lost += jump
    return curve, notes


@pytest.mark.parametrize("is_better_lower", [True, False])
def test_restarts_that_cost_more_than_promised_make_files_finer(is_better_lower: bool) -> None:
    curve, notes = after(0.05, is_better_lower=is_better_lower)
    assert curve.n_finer
    assert "% of the metric" in notes[0]


@pytest.mark.parametrize(("jump", "noise"), [(0.0, 0.0), (0.0, 0.02), (0.002, 0.02), (-0.05, 0.0)])
def test_cheap_restarts_and_noise_change_nothing(jump: float, noise: float) -> None:
    curve, notes = after(jump, noise=noise)
    assert (curve.n_finer, notes) == (0, [])


def test_a_restart_at_every_save_is_not_judged() -> None:
    curve = Curve(lower_is_better=True)
    for step in range(40):
        assert curve.add(step, 2 + 0.1 * step) == ()
        curve = Curve.restored(curve.state(), lower_is_better=True, is_lossy=True)
    assert curve.n_finer == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(), st.booleans()), max_size=40))
def test_any_metrics_are_taken(points: list[tuple[int, float, bool]]) -> None:
    curve = Curve(lower_is_better=True)
    for step, metric, is_restored in points:
        notes = curve.add(step, metric)
        assert notes == (NOT_FINITE,) or math.isfinite(metric)
        if is_restored:
            curve = Curve.restored(curve.state(), lower_is_better=True, is_lossy=True)
    assert 0 <= curve.n_finer <= MAX_FINER


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["points", "plain", "restarted", "finer"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_any_state_from_a_file_is_a_curve_or_ignored(state: Any) -> None:
    curve = Curve.restored(state, lower_is_better=True, is_lossy=True)
    for step in range(8):
        curve.add(step, 1.0)


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_noted_and_the_step_saved(tmp_path: Path, metric: float) -> None:
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Checkpointer(tmp_path, model, optimizer, **LOSSY) as saver:
        for step in (1, 2):
            model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
            saver.save(step, metric=metric if step == 1 else 2.0)
            assert (NOT_FINITE in saver.wait().notes) == (step == 1)  # type: ignore[union-attr]


def test_a_costly_restart_halves_the_steps_of_the_next_files(tmp_path: Path) -> None:
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    notes = list[str]()
    with Checkpointer(tmp_path, model, optimizer, **LOSSY) as saver:
        for step in range(1, 10):
            model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
            saver.save(step, metric=2.0 if step < 8 else 3.0)
            if step == 7:
                saver.restore(step)
            notes += [note for note in saver.wait().notes if "lossy restarts" in note]  # type: ignore[union-attr]
    steps = []
    for step in (7, 8):
        entries = inspect(tmp_path / f"step-{step:08d}.ckptz").tensors
        settings = next(one.lossy.settings for one in entries if one.lossy and one.name == "model.weight")
        steps.append(float(settings["step"]))
    assert steps[1] <= steps[0] / 2
    assert len(notes) == 1
