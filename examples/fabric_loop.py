"""Lightning Fabric with compressed checkpoints; stop it at any time and run it again.

    python examples/fabric_loop.py [FOLDER [STEPS]]

The plug-in is the one of Lightning: `fabric.save` and `fabric.load` go through it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric

from ckptz.integrations.lightning import CkptzIO

WIDTH, SAVE_EVERY = 64, 3


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="run-"))
    n_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[CkptzIO(full_every=8)])
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if found := sorted(folder.glob("step-*.ckpt")):
        fabric.load(found[-1], state)
    for step in range(state["step"] + 1, n_steps + 1):
        batch = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            fabric.save(folder / f"step-{step:06d}.ckpt", state | {"step": step})
    print(f"step {n_steps}, loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
