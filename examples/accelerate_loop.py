"""accelerate with compressed models in its checkpoints; stop it at any time and run it again.

    python examples/accelerate_loop.py [FOLDER [STEPS]]

`register` is all there is to it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator

from ckptz.integrations.accelerate import register

WIDTH, SAVE_EVERY = 64, 3


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="run-"))
    n_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    register(accelerator)  # after prepare
    found = sorted(folder.glob("step-*"))
    if found:
        accelerator.load_state(str(found[-1]))
    first = int(found[-1].name.removeprefix("step-")) if found else 0
    for step in range(first + 1, n_steps + 1):
        batch = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            accelerator.save_state(str(folder / f"step-{step:06d}"))
    print(f"step {n_steps}, loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
