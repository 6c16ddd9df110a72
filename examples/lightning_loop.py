"""Lightning with compressed checkpoints.

    python examples/lightning_loop.py [FOLDER [STEPS]]

The plug-in is all there is to it. Wrap it, `AsyncCheckpointIO(CkptzIO())`, to write beside training.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from ckptz.integrations.lightning import CkptzIO, RequireCheckpointIO

WIDTH = 64
SAVE_EVERY = 3  # part of the identity of the callback: another value would not go on from its state


class Shift(LightningModule):
    """Learns to move a row by one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """One batch."""
        loss = nn.functional.mse_loss(self.net(batch), batch.roll(1, dims=1))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="run-"))
    n_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    torch.manual_seed(0)
    data = DataLoader(torch.randn(32 * n_steps, WIDTH), batch_size=32)
    best = ModelCheckpoint(
        folder,
        "{step}",
        monitor="loss",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=SAVE_EVERY,
    )
    trainer = Trainer(
        max_steps=n_steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        plugins=[CkptzIO(full_every=8)],
        callbacks=[best, RequireCheckpointIO()],
    )
    trainer.fit(Shift(), data, ckpt_path="last" if list(folder.glob("last*.ckpt")) else None)
    for path in sorted(folder.glob("*.ckpt")):
        print(f"{path.name}: {path.stat().st_size} bytes")
    print(f"the best are {sorted(Path(path).name for path in best.best_k_models)}")


if __name__ == "__main__":
    main()
