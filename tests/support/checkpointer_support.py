"""A tiny training run whose losses depend on all of its state, and functions that damage its files."""

import os
import random
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptz import Checkpointer, Grid, KeepPolicy

WIDTH = 12


class Run:
    """Model, optimizer, scheduler and data order; the losses depend on all of these and on random numbers."""

    def __init__(self, seed: int = 0, width: int = WIDTH) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        parts = nn.Linear(width, width), nn.Dropout(0.2), nn.Linear(width, 1)
        self.model = nn.Sequential(*parts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 9], gamma=0.5)
        self.shuffle = torch.Generator().manual_seed(seed)
        self.position: dict[str, Any] = {"seen": 0}
        self.width = width

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "shuffle": self.shuffle, "position": self.position}

    def checkpointer(self, folder: Path | str, **options: Any) -> Checkpointer:
        return Checkpointer(folder, self.model, self.optimizer, extra=self.extra, jobs=1, **options)

    def step(self) -> float:
        batch = torch.randn(8, self.width) + random.random() + float(np.random.rand())
        batch = batch[torch.randperm(8, generator=self.shuffle)]
        loss = self.model(batch).square().mean() * (1 + self.position["seen"] / 100)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.position["seen"] += len(batch)
        return loss.item()

    def losses(self, n_steps: int) -> list[float]:
        return [self.step() for _ in range(n_steps)]


def saved_run(folder: Path, n_steps: int, **options: Any) -> list[float]:
    """Train, save every step, and return the losses, the first one at index 1."""
    run = Run()
    losses = [0.0]
    with run.checkpointer(folder, background=False, **options) as checkpointer:
        for step in range(1, n_steps + 1):
            losses.append(run.step())
            checkpointer.save(step)
    return losses


def saved(folder: Path | str, *run: Any, **options: Any) -> None:
    """Save step 1 of a model and of optimizers if there are any."""
    with Checkpointer(folder, *run, **options) as checkpointer:
        checkpointer.save(1)


def restored(folder: Path | str, *run: Any, weights_only: bool = False, **options: Any) -> Any:
    """Restore step 1 and return `Checkpointer.restored`."""
    with Checkpointer(folder, *run, **options) as checkpointer:
        assert checkpointer.restore(1, weights_only=weights_only) == 1
    return checkpointer.restored


def loss_after(folder: Path | str, step: int | None = None) -> tuple[int | None, float]:
    """Restore in a new run, and return the step and the next loss."""
    run = Run(seed=99)
    with run.checkpointer(folder) as checkpointer:
        restored_step = checkpointer.restore_latest() if step is None else checkpointer.restore(step)
    return restored_step, run.step()


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def flip(path: Path, at: int | None = None) -> None:
    """Flip a bit of the byte at an offset, by default of the middle byte, in place."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process that ends without cleaning up, and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        torch.set_num_threads(1)  # a fork does not copy the threads of its parent
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


KEEP_TWO = KeepPolicy(last=2)
GRID = Grid(min_elements=1)  # even the weights of a `Run` become lossy
LOSSY = KeepPolicy(exact=0)  # no residuals, so that restores return the lossy values


def linear(width: int = 4) -> nn.Module:
    return nn.Linear(width, width)


def state_of(run: Run) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(tensor.equal(b[name]) for name, tensor in a.items())


def identical(a: Any, b: Any) -> bool:
    """Return whether two nested states have equal types and values, and dicts the same order of keys."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, defaultdict) and a.default_factory != b.default_factory:
        return False
    if isinstance(a, dict):
        keys = [(type(key), key) for key in a], [(type(key), key) for key in b]
        return keys[0] == keys[1] and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


def one_step(model: nn.Module, optimizers: Any) -> float:
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(6, 4).to(dtype)).square().mean()
    optimizers = [] if optimizers is None else optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()
