"""Functions for `Checkpointer(on_save=...)` that log each save to TensorBoard, Weights & Biases or MLflow.

    Checkpointer("run", model, optimizer, on_save=to_tensorboard(SummaryWriter("logs")))
    Checkpointer("run", model, optimizer, on_save=to_wandb(wandb.init(project="demo")))
    Checkpointer("run", model, optimizer, on_save=to_mlflow(MlflowClient(), run.info.run_id))

Each logs the numbers of `figures` at the step that was saved, on the writer's thread. None of the libraries
is imported here: what is passed in is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptz.training.checkpointer import SaveReport

__all__ = ["figures", "to_mlflow", "to_tensorboard", "to_wandb"]


def figures(report: SaveReport) -> dict[str, float]:
    """Return the numbers of a save that are worth a chart, by name: bytes, ratio and seconds."""
    return {
        "checkpoint/stored_bytes": float(report.stored_bytes),
        "checkpoint/times_smaller": report.tensor_bytes / max(1, report.stored_bytes),
        "checkpoint/stall_seconds": report.stall_seconds,
        "checkpoint/write_seconds": report.write_seconds,
    }


def to_tensorboard(writer: Any) -> Callable[[SaveReport], None]:
    """Log saves to a `torch.utils.tensorboard.SummaryWriter`, or one with the same `add_scalar`."""

    def on_save(report: SaveReport) -> None:
        for name, value in figures(report).items():
            writer.add_scalar(name, value, report.step)

    return on_save


def to_wandb(run: Any) -> Callable[[SaveReport], None]:
    """Log saves to a run of Weights & Biases, as `wandb.init` returns it.

    W&B drops what comes for an earlier step than its last one, and a save is complete some steps later. So
    the step is logged as `checkpoint/step`, which is made the axis of these charts.
    """
    run.define_metric("checkpoint/step")
    run.define_metric("checkpoint/*", step_metric="checkpoint/step")

    def on_save(report: SaveReport) -> None:
        run.log({**figures(report), "checkpoint/step": report.step})

    return on_save


def to_mlflow(client: Any, run_id: str) -> Callable[[SaveReport], None]:
    """Log saves to a run of MLflow by an `MlflowClient`: the active run belongs to the training thread."""

    def on_save(report: SaveReport) -> None:
        for name, value in figures(report).items():
            client.log_metric(run_id, name, value, step=report.step)

    return on_save
