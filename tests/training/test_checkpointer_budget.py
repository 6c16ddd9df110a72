"""A Checkpointer with a budget or a calibration: searches, limits and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptz import Budget, Checkpointer, Grid, KMeans, Lossless, ResumeProbe, inspect
from ckptz.errors import CalibrationError, ConfigError
from ckptz.hooks import Calibration
from ckptz.torch import load_file
from ckptz.training.checkpointer import SaveReport
from tests.support.checkpointer_support import LOSSY, names_in

WIDTH = 80  # matrices of this width are large enough to become lossy


class Training:
    """Regression with AdamW, tied weights, biases, and a buffer."""

    def __init__(self, seed: int = 0, width: int = WIDTH) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width))
        self.model[2].weight = self.model[1].weight
        self.model.register_buffer("scale", torch.rand(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.width = width

    def step(self) -> float:
        batch = torch.randn(16, self.width)
        loss = (self.model(batch) - batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def trained(self, n_steps: int) -> Training:
        for _ in range(n_steps):
            self.step()
        return self

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def moments(self, key: str) -> dict[str, torch.Tensor]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[p]: state[key].clone() for p, state in self.optimizer.state.items()}

    def checkpointer(self, folder: Path, **options: Any) -> Checkpointer:
        return Checkpointer(folder, self.model, self.optimizer, jobs=1, **options)

    def calibration(self, n_batches: int = 2) -> Calibration:
        calibration = Calibration(self.model)
        with calibration:
            for _ in range(n_batches):
                self.model(correlated(32, self.width))
        return calibration


def correlated(n: int, width: int = WIDTH) -> torch.Tensor:
    """Return random inputs in a fixed subspace of 8 dimensions."""
    mix = torch.randn(8, width, generator=torch.Generator().manual_seed(1))
    return torch.randn(n, 8) @ mix


def restored(folder: Path) -> Training:
    """Return another run that is resumed from the newest step."""
    run = Training(seed=1).trained(1)
    with run.checkpointer(folder) as checkpointer:
        checkpointer.restore_latest()
    return run


def error_to(exact: dict[str, torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], float]:
    """Return a quality function: 1 plus the mean relative error of the weights."""

    def quality(state: dict[str, torch.Tensor]) -> float:
        assert state.keys() == exact.keys()
        apart = [((state[n] - t).norm() / t.norm()).item() for n, t in exact.items()]
        return 1 + sum(apart) / len(apart)

    return quality


@contextlib.contextmanager
def saved(folder: Path, run: Training, step: int = 1, **options: Any) -> Iterator[SaveReport]:
    """Save one step with a new Checkpointer and yield its report."""
    with run.checkpointer(folder, **options) as checkpointer:
        checkpointer.save(step)
        yield checkpointer.wait()


def lossy_records(path: Path) -> dict[str, Any]:
    return {row.name: row.lossy for row in inspect(path).tensors if row.lossy is not None}


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [Lossless(), KMeans()])
def test_a_budget_is_kept_by_what_the_files_restore_to(tmp_path: Path, config: Any) -> None:
    run = Training().trained(3)
    exact, quality = run.state(), error_to(run.state())
    with saved(tmp_path, run, budget=Budget(quality, 0.05), config=config, keep=LOSSY) as report:
        search = report.search
    assert search.is_met
    assert search.method == ("kmeans" if isinstance(config, KMeans) else "grid")
    index = inspect(tmp_path / "step-00000001.ckptz")
    [record] = index.quality
    assert (record.is_met, record.max_drop) == (True, 0.05)
    assert {one.promise for one in lossy_records(tmp_path / "step-00000001.ckptz").values()} == {
        "quality-drop"
    }
    assert not lossy_records(tmp_path / "step-00000001.state.ckptz")
    state = restored(tmp_path).state()
    assert quality(state) == record.measured
    assert 0.005 < record.measured - 1 <= 0.05
    assert state["0.bias"].equal(exact["0.bias"])
    loaded = load_file(tmp_path / "step-00000001.ckptz")
    assert loaded["0.weight"].equal(state["0.weight"])


@pytest.mark.parametrize("config", [Grid(), KMeans()], ids=["grid", "kmeans"])
def test_full_files_within_a_budget_keep_the_movement_since_a_restore(tmp_path: Path, config: Any) -> None:
    """Without optimizer state, and where later files might have coarser settings than the first."""
    torch.manual_seed(0)
    model, shares = nn.Linear(128, 128, bias=False), []
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 5):
        start = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += torch.randn(128, 128, generator=generator) * start.std() * 0.02
        exact = {"weight": model.weight.detach().clone()}
        budget = Budget(error_to(exact), 0.05 if step == 1 else 0.15)
        with Checkpointer(tmp_path, model, config=config, budget=budget, keep=LOSSY, full_every=1) as saver:
            saver.save(step)
            saver.restore(step)
        moved = (exact["weight"] - start).double()
        shares.append(((model.weight.detach() - start) * moved).sum().item() / moved.square().sum().item())
    assert sum(shares[1:]) / 3 == pytest.approx(1, abs=0.2), shares


@pytest.mark.usefixtures("deltas_at_any_cost")
def test_later_saves_begin_where_the_one_before_ended(tmp_path: Path) -> None:
    run = Training().trained(3)
    exact: dict[str, torch.Tensor] = {}
    budget = Budget(lambda state: error_to(exact)(state), 0.02)
    reports = []
    for resumed in (False, True):  # from memory, and from the record of the previous file
        with run.checkpointer(tmp_path, budget=budget) as checkpointer:
            for step in (3, 4) if resumed else (1, 2):
                exact.update(run.state())
                checkpointer.save(step)
                reports.append(checkpointer.wait().search)
                run.trained(1)
    first, *later = reports
    assert len(first.trials) <= 8
    for search in later:
        assert search.is_met
        assert len(search.trials) <= 3
    with Training().checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest() == 4
    assert inspect(tmp_path / "step-00000004.ckptz").depth == 3


def test_a_budget_that_nothing_keeps_gives_lossless_files(tmp_path: Path) -> None:
    run = Training().trained(2)
    exact = run.state()
    with saved(tmp_path, run, budget=Budget(error_to(exact), 0.0)) as report:
        assert report.search.is_met is False
        assert report.search.config is None
        assert any("nothing that was tried keeps the budget" in note for note in report.notes)
    assert not lossy_records(tmp_path / "step-00000001.ckptz")
    state = restored(tmp_path).state()
    assert all(tensor.equal(state[name]) for name, tensor in exact.items())


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("n_good", [0, 2])  # the exact state is evaluated first
def test_a_raising_evaluation_ends_the_save_and_leaves_the_step_before(
    tmp_path: Path, background: bool, n_good: int
) -> None:
    run = Training().trained(2)
    calls: list[int] = []

    def quality(state: dict[str, torch.Tensor]) -> float:
        calls.append(1)
        if len(calls) > n_good:
            raise RuntimeError("no data")
        return 1.0

    with saved(tmp_path, run):
        names = [name for name in names_in(tmp_path) if name.startswith("step-")]
        before = {name: (tmp_path / name).read_bytes() for name in names}
    run.trained(1)
    budget = Budget(quality, 0.01)
    with run.checkpointer(tmp_path, budget=budget, background=background) as checkpointer:
        with pytest.raises(ConfigError, match=r"step 2 was not saved: .*no data"):
            checkpointer.save(2)
        assert checkpointer.steps() == (1,)
        n_good = 1 << 30
        checkpointer.save(2)  # may be tried again
        assert checkpointer.wait() is not None
        assert checkpointer.steps() == (1, 2)
    contents = {name: (tmp_path / name).read_bytes() for name in before}
    assert contents == before
    assert not [name for name in names_in(tmp_path) if name.endswith("-tmp")]


def test_an_evaluation_changes_nothing_in_the_run(tmp_path: Path) -> None:
    def rude(state: dict[str, torch.Tensor]) -> float:
        torch.manual_seed(7)
        value = 1 + float(sum(tensor.abs().mean() for tensor in state.values()))
        for tensor in state.values():
            tensor.zero_()
        return value

    expected = Training()
    losses = [expected.step() for _ in range(6)]
    run = Training()
    losses_with_budget = []
    with run.checkpointer(tmp_path, budget=Budget(rude, 0.5)) as checkpointer:
        for step in range(6):
            losses_with_budget.append(run.step())
            if step == 2:
                checkpointer.save(step)
    assert losses_with_budget == losses


def test_ctrl_c_in_a_search_saves_the_best_so_far_and_goes_on_up(tmp_path: Path) -> None:
    run = Training().trained(2)
    calls: list[int] = []
    exact = run.state()

    def interrupted(state: dict[str, torch.Tensor]) -> float:
        calls.append(1)
        if len(calls) == 4:  # two evaluations of the exact state, and a trial
            raise KeyboardInterrupt
        return error_to(exact)(state)

    with run.checkpointer(tmp_path, budget=Budget(interrupted, 0.9)) as checkpointer:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1)
        report = checkpointer.wait()
        assert report.search is not None
        assert not report.search.is_dry_run
        assert any("interrupted after trial 1; kept is" in note for note in report.notes)
        assert checkpointer.steps() == (1,)
    assert lossy_records(tmp_path / "step-00000001.ckptz")


def resumed_loss(state: dict[str, torch.Tensor], n_steps: int) -> float:
    """Train from weights and moments by name; return the mean loss."""
    run = Training()
    weights = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer.")}
    run.model.load_state_dict(weights)
    for name, parameter in run.model.named_parameters():
        moments = {key: state[f"optimizer.{name}.{key}"] for key in ("exp_avg", "exp_avg_sq", "step")}
        run.optimizer.state[parameter] = moments
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(int(torch.randint(1 << 30, (), generator=generator)))
    return sum(run.step() for _ in range(n_steps)) / n_steps


def test_under_a_budget_that_trains_on_moments_are_searched_with_the_weights(tmp_path: Path) -> None:
    run = Training().trained(20)
    budget = Budget(ResumeProbe(resumed_loss, n_steps=3, noise_floor=0.0), 0.02)
    with run.checkpointer(tmp_path, budget=budget, keep=LOSSY) as checkpointer:
        for step in (1, 2):  # a full file and a delta
            checkpointer.save(step)
            search = checkpointer.wait().search
            assert search.is_met
            run.trained(1)
    for step in (1, 2):
        weights, state = (tmp_path / f"step-0000000{step}{kind}.ckptz" for kind in ("", ".state"))
        methods = {name: one.method for name, one in lossy_records(weights).items()}
        assert methods["model.0.weight"] == "grid"
        assert methods["model.0.bias"] == "rounding"
        assert "model.scale" not in methods
        assert {one.promise for one in lossy_records(state).values()} == {"resume-gap"}
        assert inspect(weights).quality == inspect(state).quality
    other = restored(tmp_path)
    moments = {
        f"optimizer.{name}.{key}": tensor
        for key in ("exp_avg", "exp_avg_sq", "step")
        for name, tensor in other.moments(key).items()
    }
    record = inspect(tmp_path / "step-00000002.ckptz").quality[0]
    assert resumed_loss({**other.state(), **moments}, 3) == record.measured


def test_a_base_that_cannot_be_read_makes_a_full_file_that_keeps_the_budget(tmp_path: Path) -> None:
    run = Training().trained(3)
    exact: dict[str, torch.Tensor] = {}
    budget = Budget(lambda state: error_to(exact)(state), 0.05)
    with run.checkpointer(tmp_path, budget=budget) as checkpointer:
        for step in (1, 2):
            exact.update(run.state())
            checkpointer.save(step)
            report = checkpointer.wait()
            if step == 1:
                base = tmp_path / "step-00000001.ckptz"
                damaged = bytearray(base.read_bytes())
                damaged[len(damaged) // 2] ^= 0xFF
                base.unlink()
                base.write_bytes(damaged)
            run.trained(1)
    index = inspect(tmp_path / "step-00000002.ckptz")
    assert index.depth == 0
    assert index.quality[0].is_met
    assert any("the base cannot be read" in note for note in report.notes)


# --- grids and calibrations -----------------------------------------------------------------------


def test_a_grid_resumes_with_lossy_weights_and_moments(tmp_path: Path) -> None:
    run = Training().trained(20)
    with run.checkpointer(tmp_path, config=Grid(), keep=LOSSY) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step)
            exact, moments = run.state(), run.moments("exp_avg_sq")
            expected = run.step()
    other = restored(tmp_path)
    state = other.state()
    assert 0 < (state["0.weight"] - exact["0.weight"]).norm() < 0.3 * exact["0.weight"].norm()
    # The momentum correction, and a relative rounding error of 2^-10.
    apart = (state["0.bias"] - exact["0.bias"]).abs().max()
    assert 0 < apart < 0.2 * exact["0.weight"].abs().max()
    assert state["scale"].equal(exact["scale"]), "what is not trained stays exact"
    octaves = (other.moments("exp_avg_sq")["0.weight"] / moments["0.weight"]).log2().abs()
    assert 0 < octaves.max() < 4.1
    assert other.step() == pytest.approx(expected, rel=0.1)
    files = inspect(tmp_path / "step-00000004.state.ckptz")
    assert {row.lossy.method for row in files.tensors if row.lossy} >= {"second-moment", "first-moment"}


def relative_output_error(run: Training, folder: Path) -> float:
    """Return the error of the first layer's outputs, on inputs of the calibration's distribution."""
    error = load_file(folder / "step-00000001.ckptz")["0.weight"] - run.state()["0.weight"]
    return float((error @ correlated(256).T).norm())


@pytest.mark.parametrize("kind", ["object", "callable", "file"])
def test_a_calibration_guides_the_rounding_as_an_object_a_callable_and_a_file(
    tmp_path: Path, kind: str
) -> None:
    run = Training().trained(3)
    calibration = run.calibration()
    calibration.save(tmp_path / "inputs.safetensors")
    forms = {"object": calibration, "callable": lambda: calibration, "file": tmp_path / "inputs.safetensors"}
    plain, guided, from_file = (tmp_path / name for name in ("plain", "guided", "from_file"))
    with saved(plain, run, config=Grid(step=4)) as report:
        assert any("no calibration" in note for note in report.notes)
    with saved(guided, run, config=Grid(step=4), calibration=forms[kind]) as report:
        assert not any("no calibration" in note for note in report.notes)
    with saved(from_file, run, config=Grid(step=4), calibration=forms["file"]):
        pass
    assert relative_output_error(run, guided) < 0.9 * relative_output_error(run, plain)
    name = "step-00000001.ckptz"
    assert (guided / name).read_bytes() == (from_file / name).read_bytes()


def test_sums_are_those_of_the_time_of_the_save(tmp_path: Path) -> None:
    run = Training().trained(3)
    calibration = run.calibration()
    recorded = calibration.recorded().recorded["0.weight"].covariances["linear"]
    before = recorded.read()
    with calibration:
        run.model(torch.randn(4, WIDTH))
    assert (recorded.read() == before).all()
    assert recorded.n_samples == 64
    assert torch.from_numpy(before).equal(torch.from_numpy(before).T)


def test_a_weight_that_two_layers_share_has_the_sum_of_their_inputs() -> None:
    run = Training()
    calibration = run.calibration()
    [shared] = [one for one in calibration.recorded().recorded.values() if len(one.names) == 2]
    total = calibration.covariance("1") + calibration.covariance("2")
    assert torch.from_numpy(shared.covariances["linear"].read()).allclose(total)


def test_a_budget_and_a_calibration_go_together(tmp_path: Path) -> None:
    run = Training().trained(3)
    exact = run.state()
    budget = Budget(error_to(exact), 0.05)
    with saved(tmp_path, run, budget=budget, calibration=run.calibration, keep=LOSSY) as report:
        assert report.search.is_met
    [record] = inspect(tmp_path / "step-00000001.ckptz").quality
    assert error_to(exact)(restored(tmp_path).state()) == record.measured


@pytest.mark.parametrize("background", [True, False])
def test_a_calibration_of_another_model_is_an_error_that_names_the_tensor(
    tmp_path: Path, background: bool
) -> None:
    run = Training()
    with run.checkpointer(
        tmp_path, config=Grid(), calibration=Training(width=40).calibration(), background=background
    ) as checkpointer:
        with pytest.raises(CalibrationError, match=r"'0\.weight'.*\[80, 80\].*\[40, 40\]"):
            checkpointer.save(1)
        assert checkpointer.steps() == ()
    other = nn.ModuleDict({"head": nn.Linear(3, 3)})
    foreign = Calibration(other)
    with foreign:
        other["head"](torch.randn(2, 3))
    checkpointer = run.checkpointer(tmp_path, config=Grid(), calibration=foreign)
    with checkpointer, pytest.raises(CalibrationError, match=r"none of its 1 modules .*'head\.weight'"):
        checkpointer.save(1)


def test_calibrations_without_content_are_refused(tmp_path: Path) -> None:
    run = Training()
    calibrations = (Calibration(run.model), lambda: None, tmp_path / "missing")
    for invalid, error in zip(calibrations, (CalibrationError, ConfigError, FileNotFoundError), strict=True):
        checkpointer = run.checkpointer(tmp_path, config=Grid(), calibration=invalid)
        with checkpointer, pytest.raises(error):
            checkpointer.save(1)
    assert not [name for name in names_in(tmp_path) if name.startswith("step-")]
