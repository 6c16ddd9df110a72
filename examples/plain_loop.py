"""A training loop that may be stopped at any instant and resumes where it was.

    python examples/plain_loop.py [FOLDER [STEPS]]

Run it, stop it with Ctrl-C or kill it, run it again: the losses are those of a run that was never stopped.
The lines that speak of `checkpointer` are all there is to it.
"""

from __future__ import annotations

import logging
import sys
import tempfile

import torch
from torch import nn

from ckptz import Checkpointer, KeepPolicy
from ckptz.training.checkpointer import SaveReport

WIDTH, BATCH = 64, 32


def a_batch(position: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The next batch; data that are read in order need to know how far they were read."""
    generator = torch.Generator().manual_seed(position["next"])
    position["next"] += 1
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs.roll(1, dims=1).tanh()


def log_save(report: SaveReport) -> None:
    """Log a save once it is complete; a line for TensorBoard or another service goes here."""
    smaller = report.tensor_bytes / report.stored_bytes
    logging.info("step %d: %.1fx smaller, %.3f s of training", report.step, smaller, report.stall_seconds)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="run-")
    n_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    model = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=n_steps)
    position = {"next": 0}

    extra = {"scheduler": scheduler, "position": position}
    keep = KeepPolicy(last=3, every=100)
    options = {"every": 10, "keep": keep, "on_save": log_save}
    with Checkpointer(folder, model, optimizer, extra=extra, **options) as checkpointer:
        first = checkpointer.restore_latest() or 0
        print(f"{folder}: from step {first}")
        for step in range(first + 1, n_steps + 1):
            inputs, targets = a_batch(position)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if checkpointer.maybe_save(step):
                print(f"step {step:4}  loss {loss.item():.6f}")
        report = checkpointer.wait()
    if report is not None:
        share = report.stored_bytes / report.tensor_bytes
        print(f"step {report.step} is {report.stored_bytes} bytes, {share:.3f} of raw")
        print(f"kept: {checkpointer.steps()}")


if __name__ == "__main__":
    main()
