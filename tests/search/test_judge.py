"""Judging a trial: per-example losses, the limits for their changes, and invalid results of evaluations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file as save_plain

from ckptz import Budget, Checkpointer, Grid, KeepPolicy, KMeans, ResumeProbe, compress, inspect
from ckptz.codec.method import Method
from ckptz.search.budget import Judgement, Limit, Measurement, SearchOptions, judge, share_used
from ckptz.search.spaces import GridSpace
from ckptz.search.strategies import MultiplierSearch, Neighbourhood, Outcome
from ckptz.torch import load_file
from ckptz.verbs.compress import CompressReport
from ckptz.verbs.quality_text import metric_name, quality_text
from tests.support.cli_support import ckptz
from tests.support.search_support import BOTH, CUBE, SPACE, TEMPLATE

State = dict[str, torch.Tensor]
ONE_PERCENT = Limit(0.01, True)
UNSURE = replace(ONE_PERCENT, allow_unsure=True)
N_ANSWERS, WIDTH = 64, 96

# Losses that depend on the error of a weight; the file with the exact weight is in the same folder.
EVALUATION = f"""
from pathlib import Path
import torch
from safetensors.torch import load_file

EXACT = load_file(Path(__file__).parent / "model.safetensors")["head.weight"]
LOOKS = torch.randn({N_ANSWERS}, {WIDTH}, generator=torch.Generator().manual_seed(1))


def losses(state):
    return 2 + (LOOKS @ (state["head.weight"] - EXACT)).mean(1)


def loss(state):
    return losses(state).mean()


def right(state):
    return {{"accuracy": losses(state) < 2.05}}


losses.metric, losses.unit = "loss", "token"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    save_plain({"head.weight": weight}, tmp_path / "model.safetensors")
    (tmp_path / "evaluate.py").write_text(EVALUATION)
    return tmp_path


@pytest.fixture
def functions(folder: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__file__": str(folder / "evaluate.py")}
    exec(compile(EVALUATION, "evaluate.py", "exec"), names)
    return names


def search(
    folder: Path, quality: Callable[[State], Any], drop: float = 0.01, **options: Any
) -> CompressReport:
    budget = Budget(quality, drop, **options.pop("budget", {}))
    search_options = SearchOptions(budgets=(budget,), **options)
    (report,) = compress(
        [folder / "model.safetensors"], folder / "out.ckptz", jobs=1, search=search_options, force=True
    )
    return report


def judgement_of(
    exact: Sequence[float] | np.ndarray[Any, Any],
    differences: Sequence[float] | np.ndarray[Any, Any],
    limit: Limit = ONE_PERCENT,
    lower: bool = True,
    counts: np.ndarray[Any, Any] | None = None,
) -> Judgement:
    values = np.asarray(exact, np.float64)
    return judge(
        limit,
        Measurement("loss", values, lower, counts),
        Measurement("loss", values + differences, lower, counts),
    )


# --- the mean change and the per-example change -------------------------------------------------


def test_mean_change_standard_error_and_example_change_follow_their_definitions() -> None:
    rng = np.random.default_rng(0)
    exact, differences = rng.uniform(1, 3, 500), 0.001 * rng.standard_normal(500)
    judgement, mean = judgement_of(exact, differences), exact.mean()
    assert judgement.mean_change == pytest.approx(differences.mean() / mean)
    assert judgement.standard_error == pytest.approx(differences.std(ddof=1) / np.sqrt(500) / mean)
    assert judgement.example_change == pytest.approx((differences**2).mean() / 2 / mean)
    absolute = judgement_of(exact, differences, Limit(0.01, False))
    assert absolute.example_change == pytest.approx((differences**2).mean() / 2)
    assert absolute.mean_change == pytest.approx(differences.mean())


@pytest.mark.parametrize(("sign", "lower"), [(1, True), (-1, True), (1, False), (-1, False)])
def test_the_mean_may_move_by_the_budget_in_either_direction(sign: int, lower: bool) -> None:
    kept, broken = (
        judgement_of([2.0] * 100, [sign * 0.02 * share] * 100, lower=lower) for share in (0.99, 1.01)
    )
    assert kept.is_met
    assert not broken.is_met
    assert kept.used == pytest.approx(0.99)
    assert (kept.mean_change > 0) == (lower == (sign > 0))


def test_changes_that_cancel_in_the_mean_still_use_the_budget() -> None:
    signs = np.tile([1.0, -1.0], 5000)
    kept, broken = (judgement_of(np.full(10_000, 2.0), size * signs) for size in (0.28, 0.29))
    assert kept.mean_change == pytest.approx(0)
    assert kept.is_resolved
    assert kept.is_met
    assert not broken.is_met
    assert kept.used == pytest.approx(0.28**2 / 2 / 2 / 0.02)


def test_an_unsure_change_beyond_the_limit_is_refused_unless_allowed() -> None:
    rng = np.random.default_rng(3)
    differences = 0.18 * rng.standard_normal(64)
    differences += 0.04 - differences.mean()  # 2 % of the mean, 1.7 standard errors
    refused = judgement_of(np.full(64, 2.0), differences)
    assert (refused.is_resolved, refused.is_met, refused.used) == (False, False, pytest.approx(2))
    allowed = judgement_of(np.full(64, 2.0), differences, UNSURE)
    assert allowed.mean_change == pytest.approx(0.02)
    assert not allowed.is_resolved
    assert allowed.is_met
    assert allowed.used == pytest.approx((allowed.example_change or 0) / 0.01)
    assert not judgement_of(np.full(64, 2.0), 1.2 * differences, UNSURE).is_met  # one budget, not two
    assert allowed.n_needed == pytest.approx(64 * ((allowed.standard_error or 0) / 0.005) ** 2)
    many = judgement_of(np.full(64 * 40, 2.0), np.tile(differences, 40), UNSURE)
    assert many.is_resolved
    assert not many.is_met


@pytest.mark.parametrize(
    ("error", "most"), [(0, 2), (0.5, 2), (0.51, 2 * 0.5 / 0.51), (0.75, 4 / 3), (1, 1), (9, 1)]
)
def test_the_limit_per_example_falls_with_the_standard_error(error: float, most: float) -> None:
    judgement = Judgement(
        metric="loss",
        unit="answer",
        n_values=9,
        mean_limit=0.02,
        is_relative=True,
        standard_error=0.02 * error,
    )
    assert judgement.example_limit == pytest.approx(0.02 * most)
    assert share_used(0.0, 0.02 * error, 0.02, Limit(0.02, True)) == pytest.approx(1 / most)


def test_a_significant_change_beyond_the_budget_breaks_it_with_few_examples_too() -> None:
    rng = np.random.default_rng(3)
    differences = 0.1 * rng.standard_normal(64)
    differences += 0.2 - differences.mean()  # 10 % of the mean, 16 standard errors
    judgement = judgement_of(np.full(64, 2.0), differences, UNSURE)
    assert not judgement.is_resolved
    assert judgement.example_change < 0.02
    assert not judgement.is_met


def test_the_example_change_of_an_accuracy_counts_all_changed_answers() -> None:
    exact = np.tile([1.0, 1.0, 1.0, 0.0], 2000)
    differences = np.zeros(8000)
    differences[3:1000:4], differences[1000:2000:8] = 1.0, -1.0
    differences[1002:2000:8] = -1.0  # as many answers became wrong as became right
    judgement = judgement_of(exact, differences, lower=False)
    assert judgement.mean_change == pytest.approx(0)
    assert judgement.example_change == pytest.approx((differences != 0).mean() / 2 / 0.75)
    assert not judgement.is_met


def test_sums_with_counts_are_judged_like_their_examples() -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(4, 60, 4000)
    exact, differences = rng.uniform(1, 3, lengths.sum()), 0.1 * rng.standard_normal(lengths.sum())
    begins = np.cumsum(lengths) - lengths
    tokens = judgement_of(exact, differences)
    sums = judgement_of(
        *(np.add.reduceat(x, begins) for x in (exact, differences)), counts=lengths.astype(float)
    )
    assert sums.mean_change == pytest.approx(tokens.mean_change)
    assert sums.example_change == pytest.approx(tokens.example_change, rel=0.1)
    assert sums.standard_error == pytest.approx(tokens.standard_error, rel=0.1)
    means = judgement_of(*(np.add.reduceat(x, begins) / lengths for x in (exact, differences)))
    assert (means.example_change or 0) < (tokens.example_change or 0) / 5


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_a_trial_with_an_example_that_is_not_finite_breaks_the_budget(value: float) -> None:
    judgement = judge(
        ONE_PERCENT,
        Measurement("loss", np.ones(3), True),
        Measurement("loss", np.array([1.0, value, 1]), True),
    )
    assert judgement.used is None
    assert not judgement.is_met


# --- what an evaluation returns -----------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1.0, 0.0, 1.0], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([True, False, True]),
        np.array([1, 0, 1]),
    ],
)
def test_vectors_of_any_kind_are_read(values: Any) -> None:
    measurement = Budget(lambda state: values, metric="accuracy").read({"accuracy": values})
    assert measurement.values.tolist() == [1.0, 0.0, 1.0]
    assert measurement.value == pytest.approx(2 / 3)
    assert (measurement.lower_is_better, measurement.unit) == (False, "answer")


def test_sums_are_read_with_their_counts_and_a_number_ignores_counts() -> None:
    def loss(state: State) -> None: ...

    loss.unit = "token"
    values = {"loss": torch.tensor([6.0, 2.0]), "counts": torch.tensor([3, 1])}
    measurement = Budget(loss).read(values)
    assert (measurement.value, measurement.n_examples, measurement.unit) == (2.0, 4.0, "token")
    assert Budget(loss).read({"loss": 2.0, "counts": "many"}).value == 2.0


def test_an_evaluation_may_vary_by_far_less_than_its_budget(folder: Path) -> None:
    losses = iter([2.0, 2.0 + 1e-6])
    assert search(folder, lambda state: next(losses, 2.0)).search is not None


def test_a_later_checkpoint_evaluates_the_exact_state_once(folder: Path, functions: dict[str, Any]) -> None:
    n_calls = [0]

    def losses(state: State) -> Any:
        n_calls[0] += 1
        return functions["losses"](state)

    first = search(folder, losses, 0.05).search
    assert n_calls[0] == 2 + len(first.trials)
    n_calls[0] = 0
    later = search(folder, losses, 0.05, parent=Grid()).search
    assert n_calls[0] == 1 + len(later.trials)


# --- searches, their records and messages -------------------------------------------------------


def test_per_example_losses_limit_changes_that_cancel_in_the_mean(
    folder: Path, functions: dict[str, Any]
) -> None:
    def losses(state: State) -> Any:
        differences = functions["losses"](state) - 2
        return 2 + torch.cat([differences, -differences])  # the mean of these is always 2

    by_mean = search(folder, lambda state: losses(state).mean())
    by_losses = search(folder, losses)
    assert by_mean.search is not None
    kept = next(t for t in by_losses.search.trials if t.config == by_losses.search.config)
    assert by_losses.stored_bytes > by_mean.stored_bytes
    [judgement] = kept.judgements
    assert not judgement.is_resolved
    assert 0.5 * judgement.example_limit < judgement.example_change <= judgement.example_limit < 0.02
    assert kept.drop == judgement.used


def test_file_and_reports_show_mean_change_and_example_change(folder: Path) -> None:
    output, where = folder / "out.ckptz", f"{folder}/evaluate.py:losses"
    run = ckptz("compress", folder / "model.safetensors", "-o", output, "--eval", where, "-v")
    mean, changes = inspect(output).quality
    assert (mean.metric, changes.metric) == ("loss", "loss_changes_by_token")
    assert (mean.max_drop, mean.is_relative) == (0.005, True)
    assert changes.max_drop == pytest.approx(0.005 * mean.exact)  # too few answers for the mean to decide
    assert (changes.exact, changes.is_relative, changes.is_met) == (0.0, False, True)
    assert 0 < changes.measured <= changes.max_drop
    name = "per-token change of loss"
    assert metric_name(changes) == name
    ckptz("report", output, "-o", folder / "page.html")
    page = (folder / "page.html").read_text()
    assert all(quality_text(record) in page for record in (mean, changes))
    text = f"{name} {changes.measured:.2g} ("
    assert text in run.stdout
    assert text in ckptz("inspect", output).stdout
    assert text in ckptz("log", folder).stdout
    lines = [line for line in run.stderr.splitlines() if "ckptz: tried " in line]
    assert lines
    assert all(" +- " in line and "per-token change" in line and "(limit 0.50%)" in line for line in lines)


def test_too_few_examples_cause_a_note_with_the_number_needed(
    folder: Path, functions: dict[str, Any]
) -> None:
    report = search(folder, lambda state: functions["losses"](state)[:8], 1e-3)
    [doubt] = report.search.doubts
    assert doubt in report.notes
    kept = next(t for t in report.search.trials if t.config == report.search.config).judgements[0]
    assert not kept.is_resolved
    assert "8 answers are too few to be sure, because the standard error of the mean's change is" in doubt
    assert doubt.endswith(f"about {float(f'{kept.n_needed:.2g}'):,.0f} answers would decide")


@pytest.mark.parametrize("options", [(), ("--allow-unsure",)], ids=["by default", "allowed"])
def test_an_unsure_result_exits_with_6_unless_allowed(folder: Path, options: tuple[str, ...]) -> None:
    few = """
def shifted(state):
    moved = not torch.equal(state["head.weight"], EXACT)
    return 2 + 0.03 * moved * torch.tensor([3.0, -1, 3, -1, 3, -1, 3, -1])
"""
    with (folder / "evaluate.py").open("a") as file:
        file.write(few)
    output, where = folder / "out.ckptz", f"{folder}/evaluate.py:shifted"
    run = ckptz(
        *("compress", folder / "model.safetensors", "-o", output, "--eval", where, "--budget", "1%"),
        *options,
        fails=not options,
    )
    if options:
        assert "too few examples to be sure" in run.stdout
        return
    assert run.exit_code == 6
    assert inspect(output).quality == ()
    assert torch.equal(
        load_file(output)["head.weight"], load_plain(folder / "model.safetensors")["head.weight"]
    )
    last = run.stderr.splitlines()[-1]
    assert "no settings keep the budget; written without loss. 8 answers are too few to be sure: use" in last
    assert last.endswith("or --allow-unsure")


def test_a_search_reports_a_trial_before_and_after_it_is_written(
    folder: Path, functions: dict[str, Any]
) -> None:
    events: list[tuple[Any, ...]] = []
    report = search(
        folder,
        functions["losses"],
        on_begin=lambda config, n_bytes: events.append((config, n_bytes)),
        on_trial=lambda trial: events.append((trial.config, trial.n_bytes, trial.is_feasible)),
    )
    assert events[0] == (None, None)
    n = len(report.search.trials)
    assert len(events) == 1 + 3 * n
    for i, trial in enumerate(report.search.trials):
        begun, written, ended = events[1 + 3 * i : 4 + 3 * i]
        assert begun == (trial.config, None)
        assert written == (trial.config, trial.n_bytes)
        assert ended[:2] == written


def test_the_command_prints_a_line_per_trial_and_the_number_of_evaluations(folder: Path) -> None:
    output, where = folder / "out.ckptz", f"{folder}/evaluate.py:losses"
    words = ("compress", folder / "model.safetensors", "-o", output, "--eval", where, "--force")
    run = ckptz(*words)
    lines = [line for line in run.stderr.splitlines() if "note" not in line]
    assert lines[0] == "ckptz: searching: measuring the quality of the exact tensors"
    assert all(line.startswith("ckptz: tried step ") for line in lines[1:])
    n = len(lines) - 1
    assert run.stdout.rstrip().endswith(f", {n} evaluation{'s' * (n > 1)}")
    assert not ckptz(*words, "-q").stderr


def test_a_note_on_each_file_of_a_chain_is_printed_once(folder: Path) -> None:
    for step in (1, 2):
        save_plain(load_plain(folder / "model.safetensors"), folder / f"step-{step}.safetensors")
    files = [folder / f"step-{step}.safetensors" for step in (1, 2)]
    run = ckptz("compress", *files, "--chain", "-o", folder / "run", "--method", "grid", "--json")
    notes = [note for report in run.json["files"] for note in report["notes"]]
    assert len(notes) > len(set(notes))  # the same note for each file
    assert len(run.stderr.splitlines()) == len(set(notes))


def test_a_single_number_is_judged_with_a_warning(folder: Path, functions: dict[str, Any]) -> None:
    report = search(folder, functions["loss"])
    assert any("a single number, so nobody can know" in note for note in report.notes)
    assert len(inspect(folder / "out.ckptz").quality) == 1


def test_the_command_judges_accuracies_per_example(folder: Path) -> None:
    options = ("--eval", f"{folder}/evaluate.py:right", "--budget", "20%", "--json")
    (report,) = ckptz("compress", folder / "model.safetensors", "-o", folder / "o.ckptz", *options).json[
        "files"
    ]
    mean, changes = report["search"]["quality"]
    assert (mean["metric"], changes["metric"]) == ("accuracy", "accuracy_changes_by_answer")
    assert not mean["lower_is_better"]
    # All answers were right before, so each changed answer became wrong.
    assert changes["measured"] == pytest.approx((mean["exact"] - mean["measured"]) / 2)


# --- runs that restart --------------------------------------------------------------------------


@pytest.mark.parametrize(("restores", "sharing"), [(0, 1), (1, 1), (2, 2), (3, 3), (10, 3)])
def test_restarts_divide_the_limit_per_example(restores: int, sharing: int) -> None:
    limit = Budget(lambda state: 2.0, 0.01).limit(None, restores)
    assert limit.max_drop == 0.01
    signs = np.tile([1.0, -1.0], 5000)
    size = math.sqrt(2 * 2 * 0.02 / sharing)  # changes of this size use the whole limit if the mean is 2
    kept, broken = (judgement_of(np.full(10_000, 2.0), share * size * signs, limit) for share in (0.99, 1.01))
    assert (kept.is_met, broken.is_met) == (True, False)
    assert kept.example_limit == pytest.approx(0.02 / sharing)
    of_mean = Budget(lambda state: 2.0, 0.01).limit(None, restores, is_mean=True)
    assert of_mean.max_drop == pytest.approx(0.01 / sharing)


def test_restarts_divide_a_budget_in_steps() -> None:
    probe = ResumeProbe(lambda state, n_steps: 2.0)
    assert Budget(probe, 20, in_steps=True).limit(0.1, 10).max_drop == pytest.approx(0.2)


def test_a_search_divides_the_limit_per_example_by_restores(folder: Path, functions: dict[str, Any]) -> None:
    once, often = (search(folder, functions["losses"], 0.05, restores=n) for n in (0, 5))
    mean, changes = often.search.quality if often.search is not None else ()
    kept = next(t for t in often.search.trials if t.config == often.search.config).judgements[0]
    assert mean.max_drop == pytest.approx(0.05)
    assert kept.restart_divisor == 3
    assert changes.max_drop == pytest.approx(kept.example_limit * mean.exact)
    assert often.stored_bytes > once.stored_bytes


def test_a_search_for_restarts_uses_the_purpose_resume(folder: Path, functions: dict[str, Any]) -> None:
    report = search(folder, functions["losses"], 0.05, restores=2)
    assert report.search.config["purpose"] == "resume"
    template = GRID.template(Grid(purpose="ship"), trains=True, restarts=True)
    assert template.purpose == "ship"


def test_settings_of_the_base_are_tried_first_where_a_run_restarts() -> None:
    parent = CUBE.config((2, 1, 1, 0))
    sizes: Callable[[Method], float] = lambda config: float(config.prune)  # noqa: E731
    for tries_parent in (False, True):
        first = Neighbourhood(parent=parent, cubes=BOTH, predict=sizes, tries_parent=tries_parent).propose([])
        assert (first == parent) == tries_parent
    finer, other = SPACE.finer(TEMPLATE)[0], replace(parent, protect_by="magnitude")
    for parent, is_first in ((finer, True), (other, False)):
        near = Neighbourhood(parent=parent, cubes=(CUBE,), predict=lambda config: 1.0, tries_parent=True)
        assert (near.propose([]) == parent) == is_first


def test_a_search_for_a_grid_begins_at_the_step_of_its_base() -> None:
    first = MultiplierSearch(space=GRID, template=Grid(), start=0.70710678).propose([])
    assert first.step == 0.70710678


def test_a_search_of_levels_for_a_run_that_restarts_keeps_updates(folder: Path) -> None:
    settings = KMeans(levels=8, prune=0.0)
    options: dict[str, Any] = {"jobs": 1, "force": True}
    compress(folder / "model.safetensors", folder / "base.ckptz", config=settings, **options)
    base = load_file(folder / "base.ckptz")["head.weight"]
    moved = 0.01 * torch.randn(base.shape, generator=torch.Generator().manual_seed(2))
    save_plain({"head.weight": base + moved}, folder / "next.safetensors")
    looks = torch.randn(N_ANSWERS, base.numel(), generator=torch.Generator().manual_seed(3)) / WIDTH

    def losses(state: State) -> torch.Tensor:
        return 2 + looks @ (state["head.weight"] - base - moved).flatten()

    search_options = SearchOptions(budgets=(Budget(losses, 0.5),), template=KMeans(), restores=2)
    arguments = {"base": folder / "base.ckptz", "search": search_options, **options}
    (report,) = compress(folder / "next.safetensors", folder / "next.ckptz", **arguments)
    assert len(report.search.trials) == 1
    assert report.search.trials[0].config["levels"] == 8
    restored_change = load_file(folder / "next.ckptz")["head.weight"] - base
    assert float((restored_change * moved).sum() / moved.square().sum()) == pytest.approx(1, abs=0.2)


GRID = GridSpace("step")
PARENT = CUBE.config((2, 1, 1, 0))
NEAR = Neighbourhood(parent=PARENT, cubes=(CUBE,), predict=lambda config: 1.0, tries_parent=True)
KNOB = MultiplierSearch(space=GRID, template=Grid(moments=None), start=0.8, is_stochastic=True)


@pytest.mark.parametrize(
    ("broken", "is_repeated"),
    [
        ([(1.4, 0.7)], True),
        ([(1.4, 0.7), (2.1, 0.6)], True),
        ([(1.4, 0.7), (1.4, 0.7)], False),  # the same result twice: rounding used no random numbers
        ([(1.4, 0.7), (2.1, 0.6), (1.1, 0.7)], False),
        ([(1.4, 1.4)], False),
        ([(1.4, math.inf)], False),
    ],
)
@pytest.mark.parametrize("strategy", [NEAR, KNOB], ids=["neighbourhood", "multiplier"])
def test_stochastic_rounding_is_repeated_if_only_the_mean_exceeded_its_limit(
    strategy: Any, broken: list[tuple[float, float]], is_repeated: bool
) -> None:
    first = strategy.propose([])
    history = [Outcome(first, used, 9, used_by_examples) for used, used_by_examples in broken]
    assert (strategy.propose(history) == first) == is_repeated
    deterministic = replace(strategy, **{"tries_parent" if strategy is NEAR else "is_stochastic": False})
    assert deterministic.propose(history) != first


def test_rounding_is_repeated_with_the_settings_of_the_base(folder: Path) -> None:
    settings = Grid(purpose="resume")
    compress(folder / "model.safetensors", folder / "base.ckptz", config=settings, jobs=1)
    base = load_file(folder / "base.ckptz")["head.weight"]
    moved = base + 0.01 * torch.randn(base.shape, generator=torch.Generator().manual_seed(2))
    save_plain({"head.weight": moved}, folder / "next.safetensors")
    look = torch.randn(base.shape, generator=torch.Generator().manual_seed(3))
    shifts: list[float] = []

    def losses(state: State) -> torch.Tensor:
        shifts.append(float((look * (state["head.weight"] - moved)).sum()))
        return 9 + torch.full((64,), shifts[-1])  # rounding changes the loss of all examples equally

    def search_with_budget(drop: float) -> CompressReport:
        shifts.clear()
        search_options = SearchOptions(budgets=(Budget(losses, drop, relative=False),), restores=2)
        arguments = {"base": folder / "base.ckptz", "search": search_options, "jobs": 1, "force": True}
        (report,) = compress(folder / "next.safetensors", folder / "next.ckptz", **arguments)
        return report

    search_with_budget(100.0)
    first = next(filter(None, shifts))
    report = search_with_budget(0.99 * abs(first))
    trials = report.search.trials
    assert trials[0].config == trials[1].config
    assert trials[0].values != trials[1].values
    assert not trials[0].is_feasible
    state = load_file(folder / "next.ckptz")
    assert report.search.quality[0].measured == pytest.approx(float(losses(state).mean()), abs=1e-5)


@pytest.mark.parametrize(("restores", "limit"), [(None, 0.2), (5, 0.2 / 3)])
def test_a_checkpointer_divides_the_limit_per_example_by_restores(
    tmp_path: Path, restores: int | None, limit: float
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(96, 96)
    exact, looks = model.weight.detach().clone(), torch.randn(64, 96)

    def losses(state: State) -> torch.Tensor:
        return 2 + (looks @ (state["weight"] - exact)).mean(1)

    with Checkpointer(
        tmp_path, model, budget=Budget(losses, 0.05), restores=restores, keep=KeepPolicy(exact=0), jobs=1
    ) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
    mean, changes = inspect(tmp_path / "step-00000001.ckptz").quality
    assert (mean.max_drop, changes.max_drop) == (0.05, pytest.approx(limit))
