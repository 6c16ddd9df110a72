"""Training that restarts from every lossy checkpoint it writes, against the same run uninterrupted.

A small GPT is trained, then fine-tuned at a low rate with checkpoints close together (AdamW, torch's betas).
Each arm saves through `ckptz.Checkpointer`, restores the file it has just written, and trains on; so movement
that a file loses is lost for good. Arms with the purpose "ship" round as files for evaluation do: to nearest,
with centroids and a dead zone.

    python -m bench.studies.restarts            about ten minutes on two cores
    python -m bench.studies.restarts --quick    a few steps
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.core.measure import machine, save_rows
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, loss_of, read_corpus, validation_loss
from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy, KMeans
from ckptz.methods.method import Method

ARMS: Mapping[str, Method] = {
    "grid, whole state, default": Grid(),
    "grid, whole state, half the step": Grid(step=0.5),
    "grid, whole state, to ship": Grid(purpose="ship"),
    "grid, weights, moments exact": Grid(moments=None),
    "k-means, 16 levels, moments exact": KMeans(),
    "lossless": LOSSLESS,
}
BATCH = 16
KEEP_ALL = KeepPolicy(last=None, exact=0)  # what is measured is what a restart from lossy files loses


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Lengths in steps: of the first training, between checkpoints of the fine-tune; and how many."""

    model: GPTConfig
    n_before: int = 400
    steps_between: int = 15
    n_checkpoints: int = 9
    rate_before: float = 1e-3
    rate: float = 3e-4
    validation_batches: int = 16


FULL = Plan(model=GPTConfig(n_layers=2, width=192, n_heads=6))
QUICK = Plan(
    model=GPTConfig(n_layers=1, width=64, n_heads=2),
    n_before=4,
    steps_between=2,
    n_checkpoints=3,
    validation_batches=1,
)


class Run:
    """A model that is trained on, and where it stands."""

    def __init__(self, plan: Plan, start: Mapping[str, Tensor], data: Tensor, seed: int) -> None:
        self.model = TinyGPT(plan.model)
        self.model.load_state_dict(start)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=plan.rate, weight_decay=0.1)
        self._plan, self._data, self._seed, self.step = plan, data, seed, 0

    def train(self, n_steps: int) -> None:
        """Train on; the rate falls to zero at the end of the fine-tune."""
        plan = self._plan
        total = plan.steps_between * (plan.n_checkpoints + 1)
        source = batches(
            self._data, batch=BATCH, context=plan.model.context, seed=self._seed, start=self.step
        )
        for _ in range(n_steps):
            for group in self.optimizer.param_groups:
                group["lr"] = plan.rate * (1 - self.step / total)
            _step(self.model, self.optimizer, next(source))
            self.step += 1


def _step(model: TinyGPT, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def trained(plan: Plan, data: Tensor) -> dict[str, Tensor]:
    """Weights to fine-tune."""
    torch.manual_seed(0)
    model = TinyGPT(plan.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.rate_before, betas=(0.9, 0.95), weight_decay=0.1
    )
    source = batches(data, batch=BATCH, context=plan.model.context, seed=1)
    for _ in range(plan.n_before):
        _step(model, optimizer, next(source))
    return copy.deepcopy(model.state_dict())


def fine_tune(
    plan: Plan, start: Mapping[str, Tensor], data: tuple[Tensor, Tensor], seed: int, config: Method | None
) -> dict[str, Any]:
    """Fine-tune with a restart after each checkpoint but the last; without any where there is no `config`."""
    train, held_out = data
    run = Run(plan, start, train, seed)
    folder = Path(tempfile.mkdtemp(prefix="ckptz-restarts-"))
    sizes, encoding = [], 0.0
    try:
        for step in range(1, plan.n_checkpoints + 1):
            run.train(plan.steps_between)
            if config is None:
                continue
            with Checkpointer(
                folder, run.model, run.optimizer, config=config, keep=KEEP_ALL, background=False
            ) as saver:
                began = time.process_time()
                saver.save(step)
                report = saver.wait()
                assert report is not None
                encoding += time.process_time() - began
                sizes.append(report.stored_bytes)
                raw = report.tensor_bytes
                if step < plan.n_checkpoints:
                    saver.restore(step)
        run.train(plan.steps_between)
    finally:
        shutil.rmtree(folder)
    loss = validation_loss(run.model, held_out, n_batches=plan.validation_batches)
    row: dict[str, Any] = {"end_loss": loss}
    if config is not None:
        row |= {
            "raw_mb": raw / 1e6,
            "ratio_with_anchor": raw * len(sizes) / sum(sizes),
            "ratio_of_deltas": raw * (len(sizes) - 1) / sum(sizes[1:]),
            "encode_cpu_s": encoding / len(sizes),
        }
    return row


def main() -> None:
    """Measure all arms with three seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    train, held_out = read_corpus()
    start = trained(plan, train)
    rows = []
    for seed in range(2, 2 + given.seeds):
        exact = fine_tune(plan, start, (train, held_out), seed, None)
        before = Run(plan, start, train, seed)
        began = validation_loss(before.model, held_out, n_batches=plan.validation_batches)
        for name, config in ARMS.items():
            row = fine_tune(plan, start, (train, held_out), seed, config)
            change = 100 * (row["end_loss"] / exact["end_loss"] - 1)
            rows.append({"arm": name, "seed": seed, "change_percent": change, "begin_loss": began, **row})
            rows[-1]["exact_loss"] = exact["end_loss"]
            print(
                {key: round(v, 4) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True
            )
    if not given.quick:
        save_rows("restarts", rows)
        print(machine())


if __name__ == "__main__":
    main()
