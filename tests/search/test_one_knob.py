"""The search for a multiplier of all quantization steps: its trials, its result and what the file records."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_plain
from safetensors.torch import load_file as load_plain

from ckptz import Budget, Grid, compress
from ckptz.codec.grid import MAX_SECOND_STEP
from ckptz.codec.grid_steps import REFERENCE_NOISE, SPREAD_CAP
from ckptz.codec.moments import Moments
from ckptz.search.budget import SearchOptions
from ckptz.search.spaces import SPACES, MultiplierSpace
from ckptz.search.strategies import (
    CLOSE_LATER,
    LARGEST,
    MAX_FIRST,
    MAX_LATER,
    SMALLEST,
    MultiplierSearch,
    Outcome,
    Strategy,
    best_of,
    run_stages,
)
from ckptz.torch import load_file
from ckptz.verbs.compress import CompressReport
from tests.support.cli_support import ckptz
from tests.support.search_support import model

TEMPLATE = Grid(moments=None)
SPACE = SPACES["grid"]
assert isinstance(SPACE, MultiplierSpace)
Used = Callable[[float], float]


def n_bytes(step: float) -> int:
    """Return a file size that falls by one bit per weight when the step doubles."""
    return round(1e6 * (10 - math.log2(step)))


def search_outcomes(used: Used, *stages: Strategy) -> list[Outcome]:
    """Run strategies, by default a `MultiplierSearch`; a trial uses the share `used(step)` of the budget."""

    def run_trial(config: Any, _: str) -> Outcome:
        return Outcome(config, used(config.step), n_bytes(config.step))

    return run_stages(stages or (MultiplierSearch(space=SPACE, template=TEMPLATE),), run_trial)


# --- scaling the steps --------------------------------------------------------------------------


def test_all_steps_grow_with_the_multiplier() -> None:
    template = Grid(dead_zone=0.2, moments=Moments(second_step=3, first_step=0.5))
    grids = [template.scaled(multiplier) for multiplier in (0.5, 1, 2, 4)]
    assert [grid.step for grid in grids] == [0.5, 1, 2, 4]
    steps = [(g.moments.second_step, g.moments.first_step) for g in grids if g.moments]
    assert steps == [(1.5, 0.25), (3, 0.5), (6, 1), (MAX_SECOND_STEP, 2)]
    assert {grid.dead_zone for grid in grids} == {0.2}
    assert template.scaled(1) == template
    assert TEMPLATE.scaled(2).moments is None


# --- trials and results -------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1.0, 1.6, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("best", [0.05, 0.3, 0.9, 1.7, 6.0, 30.0])
def test_few_trials_end_near_the_largest_multiplier_that_keeps_the_budget(power: float, best: float) -> None:
    outcomes = search_outcomes(lambda step: (step / best) ** power)
    winner = best_of(outcomes)
    assert 0.87 * best <= winner.config.step <= best
    assert len(outcomes) <= MAX_FIRST
    assert len({outcome.config for outcome in outcomes}) == len(outcomes)
    if power == 2.0:
        assert len(outcomes) <= (3 if 0.25 <= best <= 4 else 5)


def test_noise_costs_size_and_never_the_budget() -> None:
    losses = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        best, power = float(np.exp(rng.uniform(-2, 2))), rng.uniform(1.3, 2.5)
        outcomes = search_outcomes(
            lambda s, b=best, p=power, r=rng: (s / b) ** p * (1 + 0.1 * r.standard_normal())
        )
        winner = best_of(outcomes)
        assert winner.used <= 1
        assert len(outcomes) <= MAX_FIRST
        losses.append(math.log2(best / winner.config.step))
    assert np.mean(losses) < 0.12  # bits a weight
    assert max(losses) < 0.4


def test_a_quality_without_any_change_ends_at_the_largest_multiplier() -> None:
    outcomes = search_outcomes(lambda step: -0.1)
    assert max(outcome.config.step for outcome in outcomes) == LARGEST
    assert len(outcomes) <= 5


@pytest.mark.parametrize("used", [math.inf, 50.0])
def test_a_search_gives_up_if_every_multiplier_breaks_the_budget(used: float) -> None:
    outcomes = search_outcomes(lambda step: used)
    assert best_of(outcomes) is None
    assert min(outcome.config.step for outcome in outcomes) == round(SMALLEST, 4)
    assert len(outcomes) <= 5


def test_a_cliff_is_found_from_both_sides() -> None:
    outcomes = search_outcomes(lambda step: 0.3 if step < 1.3 else math.inf)
    winner = best_of(outcomes)
    assert 1.1 <= winner.config.step < 1.3


def test_a_failure_below_a_success_counts_as_noise() -> None:
    history = [Outcome(TEMPLATE.scaled(1.0), 1.2, 9), Outcome(TEMPLATE.scaled(1.4), 0.6, 8)]
    proposed = MultiplierSearch(space=SPACE, template=TEMPLATE).propose(history)
    assert proposed.step > 1.4


def later_stages(start: float) -> tuple[MultiplierSearch, MultiplierSearch]:
    """Return the two stages of a search for a checkpoint whose base was found by a search."""
    first = MultiplierSearch(
        space=SPACE, template=TEMPLATE, start=start, max_trials=MAX_LATER, close=CLOSE_LATER
    )
    return first, MultiplierSearch(space=SPACE, template=TEMPLATE, start=start)


@pytest.mark.parametrize(("drift", "most"), [(1.0, 1), (1.1, 1), (0.9, 2), (0.7, 2), (1.6, 2), (0.4, 3)])
def test_the_parents_multiplier_needs_one_to_three_trials(drift: float, most: int) -> None:
    outcomes = search_outcomes(lambda step: 0.95 * (step / drift / 1.5) ** 2, *later_stages(1.5))
    assert outcomes[0].config.step == 1.5
    assert len(outcomes) <= most
    assert best_of(outcomes) is not None


def test_the_search_starts_over_if_the_parents_multiplier_is_useless() -> None:
    outcomes = search_outcomes(lambda step: (step / 0.02) ** 3, *later_stages(8.0))
    winner = best_of(outcomes)
    assert winner is not None
    assert MAX_LATER < len(outcomes) <= MAX_FIRST


# --- files --------------------------------------------------------------------------------------

EVALUATION = """
from pathlib import Path
from safetensors.torch import load_file

HERE = Path(__file__).parent


def loss(state):
    exact = load_file(HERE / "exact.safetensors")
    parts = [((state[n].double() - exact[n]) ** 2).sum() / (exact[n].double() ** 2).sum() for n in state]
    return 2 + float(sum(parts) / len(parts))
"""


class Error:
    """A loss near 2: 2 plus the mean relative square error of the weights."""

    def __init__(self, path: Path) -> None:
        self.exact = {n: t for n, t in load_plain(path).items() if not n.startswith("optimizer.")}
        self.n_calls = 0

    def __call__(self, state: dict[str, torch.Tensor]) -> float:
        self.n_calls += 1
        parts = [float(((t - self.exact[n]) ** 2).sum() / (t**2).sum()) for n, t in state.items()]
        return 2 + sum(parts) / len(parts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints with second moments, and an evaluation of the first one's weights."""
    save_plain(model(moments=True), tmp_path / "step-0.safetensors")
    save_plain(model(1, moments=True), tmp_path / "step-1.safetensors")
    save_plain(model(), tmp_path / "exact.safetensors")
    (tmp_path / "evaluate.py").write_text(EVALUATION)
    return tmp_path


def search(source: Path, output: Path, drop: float = 0.005, **options: Any) -> CompressReport:
    """Compress under one relative budget; options that begin with an underscore go to `compress`."""
    compress_options = {name[1:]: options.pop(name) for name in list(options) if name.startswith("_")}
    search_options = SearchOptions(budgets=(Budget(Error(source), drop),), **options)
    (report,) = compress([source], output, jobs=1, search=search_options, **compress_options)
    return report


def test_a_first_checkpoint_and_one_after_it(folder: Path) -> None:
    first = search(folder / "step-0.safetensors", folder / "0.ckptz")
    second = search(folder / "step-1.safetensors", folder / "1.ckptz", _base=folder / "0.ckptz")
    for report, most in ((first, MAX_FIRST), (second, MAX_LATER)):
        assert (report.search.method, report.search.strategy) == ("grid", "multiplier")
        assert report.search.is_met
        assert len(report.search.trials) <= most
        assert report.search.quality[0].promise == "quality-drop"
        assert report.search.quality[0].measured <= 2 * 1.005
        assert all(trial.predicted_bytes is None for trial in report.search.trials)
    assert second.search.trials[0].config["step"] == first.search.config["step"]
    assert second.stored_bytes < first.stored_bytes
    ckptz("verify", folder / "1.ckptz")


def test_steps_beyond_the_largest_that_changes_a_file_are_not_evaluated(folder: Path) -> None:
    quality = Error(folder / "exact.safetensors")
    options = SearchOptions(budgets=(Budget(quality, 50.0),), template=TEMPLATE)
    (report,) = compress([folder / "exact.safetensors"], folder / "0.ckptz", jobs=1, search=options)
    steps = [trial.config["step"] for trial in report.search.trials]
    capped = SPREAD_CAP / REFERENCE_NOISE  # at this multiplier all steps have their largest size
    assert steps == sorted(steps)
    assert len(steps) > 1
    assert sum(step > capped for step in steps) == 1
    assert report.search.config["step"] == steps[-1]


def test_moments_stay_exact_under_a_budget_that_does_not_notice_them(folder: Path) -> None:
    source, output = folder / "step-0.safetensors", folder / "0.ckptz"
    search(source, output, 0.05, max_evaluations=2)
    exact, restored = load_plain(source), load_file(output)
    moments = [name for name in exact if name.startswith("optimizer.")]
    assert moments
    assert all(torch.equal(exact[name], restored[name]) for name in moments)
    assert any(not torch.equal(exact[name], restored[name]) for name in exact)


def test_no_evaluation_replays_the_parent_and_promises_nothing(folder: Path) -> None:
    first = search(folder / "step-0.safetensors", folder / "0.ckptz")
    quality = Error(folder / "step-1.safetensors")
    options = SearchOptions(budgets=(Budget(quality),), max_evaluations=0)
    (report,) = compress(
        [folder / "step-1.safetensors"], folder / "1.ckptz", jobs=1, search=options, base=folder / "0.ckptz"
    )
    assert quality.n_calls == 0
    assert report.search.config == first.search.config
    assert (report.search.strategy, report.search.is_met) == ("replay", None)
    facts = ckptz("inspect", folder / "1.ckptz", "--json").json
    assert facts["quality"] == []
    assert {t["lossy"]["promise"] for t in facts["tensors"] if t["lossy"]} == {"none"}
    assert any("quality not measured" in note for note in report.notes)


def test_a_search_is_for_grid_and_its_report_replays_it(folder: Path) -> None:
    source, plan = folder / "exact.safetensors", folder / "plan.json"
    budget = ("--eval", f"{folder}/evaluate.py:loss", "--budget", "1%")
    out = ("-o", folder / "a.ckptz")
    plan.write_text(ckptz("compress", source, *out, *budget, "--json").stdout)
    (file,) = json.loads(plan.read_text())["files"]
    assert file["search"]["method"] == "grid"
    ckptz("compress", source, "-o", folder / "b.ckptz", "--config", plan)
    a, b = (load_file(folder / f"{name}.ckptz") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    (replayed,) = ckptz(
        "compress", source, "-o", folder / "c.ckptz", "--config", plan, *budget, "--json"
    ).json["files"]
    assert len(replayed["search"]["trials"]) == 1
    line = ckptz("compress", source, "-o", folder / "d.ckptz", *budget, "-v", "--config", plan).stderr
    assert f"tried step {file['search']['config']['step']:g}" in line


def test_a_search_begins_at_settings_of_its_own_method(folder: Path) -> None:
    report = search(folder / "step-0.safetensors", folder / "0.ckptz", parent=Grid(step=0.7))
    assert report.search.trials[0].config["step"] == 0.7
