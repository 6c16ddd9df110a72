"""Loggers get the figures of each save by the documented calls of their libraries."""

import inspect
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call, create_autospec

import pytest

torch = pytest.importorskip("torch")

from ckptz import Checkpointer  # noqa: E402  # torch is optional
from ckptz.integrations.loggers import figures, to_mlflow, to_tensorboard, to_wandb  # noqa: E402
from ckptz.training.checkpointer import SaveReport  # noqa: E402

# The documented interfaces, for environments without the libraries.


class SummaryWriter:
    """Interface of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: Any, scalar_value: Any, global_step: Any = None, walltime: Any = None) -> None:
        """Add a number."""


class Run:
    """Interface of `wandb.Run`."""

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        """Define the step axis of a metric."""

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Add numbers; wandb drops steps before the last one."""


class MlflowClient:
    """Interface of `mlflow.MlflowClient`."""

    def log_metric(
        self, run_id: str, key: str, value: float, timestamp: Any = None, step: int | None = None
    ) -> None:
        """Add a number."""


def saved(folder: Path, on_save: Any) -> list[SaveReport]:
    reports: list[SaveReport] = []
    model = torch.nn.Linear(40, 30)

    def both(report: SaveReport) -> None:
        reports.append(report)
        on_save(report)

    with Checkpointer(folder, model, on_save=both, jobs=1) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step)
    assert [report.step for report in reports] == [10, 20]
    return reports


def test_figures_are_those_of_the_report(tmp_path: Path) -> None:
    first, _ = saved(tmp_path, Mock())
    logged = figures(first)
    files = [path for path in tmp_path.iterdir() if "00000010" in path.name and path.suffix == ".ckptz"]
    assert logged["checkpoint/stored_bytes"] == sum(path.stat().st_size for path in files)
    assert logged["checkpoint/times_smaller"] == first.tensor_bytes / first.stored_bytes


def test_tensorboard_gets_each_figure_at_its_step(tmp_path: Path) -> None:
    writer = create_autospec(SummaryWriter, instance=True)
    reports = saved(tmp_path, to_tensorboard(writer))
    expected = [call(name, value, r.step) for r in reports for name, value in figures(r).items()]
    assert writer.add_scalar.call_args_list == expected


def test_wandb_gets_the_step_as_an_axis_since_it_drops_earlier_ones(tmp_path: Path) -> None:
    run = create_autospec(Run, instance=True)
    reports = saved(tmp_path, to_wandb(run))
    assert call("checkpoint/*", step_metric="checkpoint/step") in run.define_metric.call_args_list
    assert run.log.call_args_list == [call({**figures(r), "checkpoint/step": r.step}) for r in reports]


def test_mlflow_gets_each_figure_for_the_run_that_was_named(tmp_path: Path) -> None:
    client = create_autospec(MlflowClient, instance=True)
    reports = saved(tmp_path, to_mlflow(client, "a1"))
    expected = [call("a1", name, value, step=r.step) for r in reports for name, value in figures(r).items()]
    assert client.log_metric.call_args_list == expected


@pytest.mark.parametrize(
    ("module", "path", "stand_in"),
    [
        ("torch.utils.tensorboard", "SummaryWriter.add_scalar", SummaryWriter.add_scalar),
        ("wandb", "Run.log", Run.log),
        ("wandb", "Run.define_metric", Run.define_metric),
        ("mlflow", "MlflowClient.log_metric", MlflowClient.log_metric),
    ],
)
def test_the_stand_ins_take_what_the_libraries_take(module: str, path: str, stand_in: Any) -> None:
    real = pytest.importorskip(module, exc_type=ImportError)
    for name in path.split("."):
        real = getattr(real, name)
    parameters = inspect.signature(real).parameters
    assert set(inspect.signature(stand_in).parameters) <= set(parameters)
