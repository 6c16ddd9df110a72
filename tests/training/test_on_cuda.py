"""A run whose tensors are on a GPU: what is saved and restored is what a run in host memory has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckptz import Checkpointer, Grid, KeepPolicy, KMeans, Lossless
from ckptz.codec.method import Method
from ckptz.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


class Training:
    """A small model with AdamW, and batches that depend on the step alone."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def train(self, n_steps: int) -> float:
        """Train on, and give the last loss."""
        for _ in range(n_steps):
            generator = torch.Generator().manual_seed(self.step)
            inputs = torch.randn(64, 128, generator=generator).to(self.model[0].weight.device)
            loss = (self.model(inputs) - inputs.roll(1, 1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
        return loss.item()

    def saver(self, folder: Path, config: Method) -> Checkpointer:
        """Make a Checkpointer of the run, without exact copies."""
        return Checkpointer(folder, self.model, self.optimizer, config=config, keep=KeepPolicy(exact=0))


def test_a_lossless_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    first, second = Training("cuda"), Training("cuda")
    first.train(5)
    with first.saver(tmp_path, Lossless()) as saver:
        saver.save(first.step)
        expected = first.train(5)
    with second.saver(tmp_path, Lossless()) as saver:
        second.step = saver.restore(5)
    assert second.train(5) == expected
    assert all(p.is_cuda and s["exp_avg"].is_cuda for p, s in second.optimizer.state.items())


@pytest.mark.parametrize("config", [Grid(), KMeans()])
def test_lossy_weights_are_those_of_a_run_in_host_memory(tmp_path: Path, config: Method) -> None:
    there, here = Training("cuda"), Training("cpu")
    there.train(5)
    here.model.load_state_dict(there.model.state_dict())
    here.optimizer.load_state_dict(there.optimizer.state_dict())
    for name, run in (("there", there), ("here", here)):
        with run.saver(tmp_path / name, config) as saver:
            saver.save(5)
    found, expected = (load_file(tmp_path / name / "step-00000005.ckptz") for name in ("there", "here"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
