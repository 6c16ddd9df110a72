"""Runs on a GPU save and restore the values of equal runs in host memory."""

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
    """Small model with AdamW, and batches that depend only on the step."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def train(self, n_steps: int) -> float:
        """Train for some steps and return the last loss."""
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
        """Return a Checkpointer of the run without residual files."""
        return Checkpointer(folder, self.model, self.optimizer, config=config, keep=KeepPolicy(exact=0))


def test_a_lossless_run_resumes_bit_for_bit(tmp_path: Path) -> None:
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
    on_gpu, on_cpu = Training("cuda"), Training("cpu")
    on_gpu.train(5)
    on_cpu.model.load_state_dict(on_gpu.model.state_dict())
    on_cpu.optimizer.load_state_dict(on_gpu.optimizer.state_dict())
    for name, run in (("gpu", on_gpu), ("cpu", on_cpu)):
        with run.saver(tmp_path / name, config) as saver:
            saver.save(5)
    stored, expected = (load_file(tmp_path / name / "step-00000005.ckptz") for name in ("gpu", "cpu"))
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
