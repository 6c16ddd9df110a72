"""Disk usage of runs that delete old checkpoints: plain files, ckptz with defaults, ckptz without deltas.

    python -m bench.product.disk [--saves N]

A GPT of 0.9 M parameters is trained with AdamW and saved at every step: by the Hugging Face Trainer with
`save_total_limit=2`, by Lightning with `save_top_k=1` or the five checkpoints of least loss, by accelerate
with `total_limit=2`, and by the `Checkpointer` with `last=5` or `last=1`, lossless, or with the grid method
and an exact newest step. *Most* is the largest total of all files at any moment, including unfinished files,
sampled every 10 ms. *End* is the total after the last save, and so between any two saves. Hard links count
once. Lightning's file names contain the step, so with `save_top_k=1` each save deletes the previous file.
accelerate itself writes optimizers, in full.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import accelerate
import lightning
import torch
import transformers
from accelerate.utils import ProjectConfiguration
from lightning.pytorch.callbacks import ModelCheckpoint

from bench.core.measure import Row, machine, parser_of, save_rows, verdict
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, loss_of, read_corpus
from ckptz import Checkpointer, Grid, KeepPolicy
from ckptz.integrations.accelerate import register
from ckptz.integrations.lightning import CkptzIO
from ckptz.integrations.trainer import ChainOptions, CkptzTrainerMixin

SHAPE: Final = GPTConfig(width=128)
LENGTH, BATCH = 64, 8
POLL_SECONDS: Final = 0.01

Run = Callable[[Path, int, int | None], None]  # a folder, saves, `full_every`; None for plain files


class CkptzTrainer(CkptzTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """The subclass that users define."""


def with_trainer(folder: Path, n_saves: int, full_every: int | None) -> None:
    """Train with the Hugging Face Trainer, which keeps the newest two checkpoints."""
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=SHAPE.width, n_layer=SHAPE.n_layers, n_head=SHAPE.n_heads
    )
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=n_saves,
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=BATCH,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = read_corpus()[0][: 1024 * LENGTH].long().view(-1, LENGTH)
    rows = [{"input_ids": row, "labels": row} for row in data]
    model = transformers.GPT2LMHeadModel(config)
    if full_every is None:
        transformers.Trainer(model=model, args=args, train_dataset=rows).train()
    else:
        options = ChainOptions(full_every=full_every)
        CkptzTrainer(model=model, args=args, train_dataset=rows, ckptz=options).train()


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The GPT as a Lightning module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGPT(SHAPE)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def with_lightning(**options: Any) -> Run:
    """Return a run by Lightning with the arguments of `ModelCheckpoint`."""

    def run(folder: Path, n_saves: int, full_every: int | None) -> None:
        data = read_corpus()[0][: 1024 * LENGTH].long().view(-1, LENGTH)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=n_saves,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[] if full_every is None else [CkptzIO(full_every=full_every)],
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, **options)],
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(data, BATCH))

    return run


def with_accelerate(**options: Any) -> Run:
    """Return a run by accelerate, which keeps the newest two folders; `options` are those of ChainOptions."""

    def run(folder: Path, n_saves: int, full_every: int | None) -> None:
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = accelerate.Accelerator(cpu=True, project_config=project)
        model = accelerator.prepare(TinyGPT(SHAPE))
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 1e-3))
        if full_every is not None:
            register(accelerator, ChainOptions(full_every=full_every, **options))
        data = batches(read_corpus()[0], batch=BATCH, context=LENGTH, seed=0)
        for _, batch in zip(range(n_saves), data, strict=False):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            accelerator.save_state()

    return run


def with_checkpointer(last: int, **options: Any) -> Run:
    """Return a run by a plain loop that keeps the last steps; its plain files are written by torch.save."""

    def run(folder: Path, n_saves: int, full_every: int | None) -> None:
        model = TinyGPT(SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        data = batches(read_corpus()[0], batch=BATCH, context=LENGTH, seed=0)
        checkpointer = None
        if full_every is not None:
            keep = KeepPolicy(last=last)
            checkpointer = Checkpointer(
                folder, model, optimizer, keep=keep, full_every=full_every, background=False, **options
            )
        for step, batch in zip(range(1, n_saves + 1), data, strict=False):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if checkpointer is not None:
                checkpointer.save(step)
                continue
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{step}.pt"
            )
            (folder / f"{step - last}.pt").unlink(missing_ok=True)
        if checkpointer is not None:
            checkpointer.close()

    return run


RUNS: Final[dict[str, Run]] = {
    "Trainer, save_total_limit=2": with_trainer,
    "Lightning, save_top_k=1": with_lightning(save_top_k=1),
    "Lightning, save_top_k=5": with_lightning(save_top_k=5, monitor="loss"),
    "accelerate, total_limit=2": with_accelerate(),
    "accelerate, total_limit=2, Grid(), newest exact": with_accelerate(config=Grid()),
    "Checkpointer, last=5": with_checkpointer(5),
    "Checkpointer, last=1": with_checkpointer(1),
    "Checkpointer, last=1, Grid(), newest exact": with_checkpointer(1, config=Grid()),
    "Checkpointer, last=5, Grid(), newest exact": with_checkpointer(5, config=Grid()),
}


def on_disk(folder: Path) -> int:
    """Return the bytes of all files below a folder; hard links count once."""
    sizes = {}
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.stat(os.path.join(root, name))
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def measured(run: Run, n_saves: int, full_every: int | None) -> tuple[int, int]:
    """Return (most bytes at any moment, bytes at the end) of a run."""
    torch.manual_seed(0)
    most, is_done = [0], threading.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def watch() -> None:
            while not is_done.wait(POLL_SECONDS):
                most[0] = max(most[0], on_disk(folder))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            run(folder, n_saves, full_every)
        finally:
            is_done.set()
            watcher.join()
        end = on_disk(folder)
    return max(most[0], end), end


def main() -> None:
    """Measure all runs and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--saves", type=int, default=16)
    n_saves = parser.parse_args().saves
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for name, run in RUNS.items():
        most, end = zip(*(measured(run, n_saves, every) for every in (None, 16, 1)), strict=True)
        rows.append(
            {
                "run": name,
                "plain most MB": f"{most[0] / 1e6:.1f}",
                "plain end MB": f"{end[0] / 1e6:.1f}",
                "ckptz most MB": f"{most[1] / 1e6:.1f}",
                "ckptz end MB": f"{end[1] / 1e6:.1f}",
                "full files most MB": f"{most[2] / 1e6:.1f}",
                "full files end MB": f"{end[2] / 1e6:.1f}",
                "end / plain": f"{end[1] / end[0]:.2f}",
                "at most 1.00": verdict(end[1] <= end[0] and most[1] <= most[0] + end[0]),
            }
        )
        print(rows[-1], flush=True)
    save_rows("disk", rows)
    finish("disk", machine(lightning=lightning.__version__, transformers=transformers.__version__), rows)


if __name__ == "__main__":
    main()
