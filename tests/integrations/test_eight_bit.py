"""State of 8-bit optimizers is restored bit for bit, and training continues as if it had not stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz import Checkpointer, Grid, KeepPolicy
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method

pytestmark = pytest.mark.apps
WIDTH, N_STEPS = 128, 6  # parameters from 4,096 elements on have 8-bit state


class Run:
    """Model with an optimizer of bitsandbytes."""

    def __init__(self, kind: str) -> None:
        optimizers = pytest.importorskip("bitsandbytes").optim
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4))
        self.optimizer = getattr(optimizers, kind)(self.model.parameters(), lr=1e-2)

    def step(self, i: int) -> float:
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def values(self) -> list[torch.Tensor]:
        return [*self.model.state_dict().values(), *tensors_in(self.optimizer.state_dict()["state"])]


def tensors_in(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    return [one for item in node.values() for one in tensors_in(item)] if isinstance(node, dict) else []


@pytest.mark.parametrize("kind", ["Adam8bit", "AdamW8bit", "Lion8bit"])
@pytest.mark.parametrize("config", [LOSSLESS, Grid()], ids=["lossless", "lossy weights"])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path, kind: str, config: Method) -> None:
    uninterrupted = Run(kind)
    losses = [uninterrupted.step(i) for i in range(N_STEPS)]
    assert any(value.dtype == torch.uint8 for value in uninterrupted.values())
    keep = KeepPolicy(last=None)
    run = Run(kind)
    with Checkpointer(tmp_path, run.model, run.optimizer, config=config, keep=keep) as checkpointer:
        for i in range(4):
            run.step(i)
            checkpointer.save(i + 1)
    resumed = Run(kind)
    with Checkpointer(tmp_path, resumed.model, resumed.optimizer, config=config) as checkpointer:
        assert checkpointer.restore_latest() == 4
        assert checkpointer.restored is not None
        assert checkpointer.restored.is_exact
    assert [resumed.step(i) for i in range(4, N_STEPS)] == losses[4:]
    for value, resumed_value in zip(uninterrupted.values(), resumed.values(), strict=True):
        assert torch.equal(value, resumed_value)
