"""Folders of the plain Hugging Face Trainer, packed whole by the command line, restored and resumed.

    python -m bench.studies.trainer_folders [--interval N] [--arm NAME ...]

A GPT-2 of 3.3 M parameters is trained with AdamW and no dropout on source code, four saves and one interval
more. `ckptz compress checkpoint-* --chain --method grid` packs the folders, `ckptz restore` gives each back,
and the plain Trainer resumes from it for one interval. *Ratio* counts every file on both sides, raw over
packed, of all four folders. *Resumed* is the validation loss after that interval against the run that went
on, of 512 rows: the mean over the four folders, and the one furthest from zero. The row "chance" resumes
from exact folders whose weights are disturbed by 2^-20 of their spread: what any change at all does.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

from bench.core.measure import Row, machine, parser_of, save_rows
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, batches, read_corpus
from ckptz import LOSSLESS, Grid, compress, restore
from ckptz.methods.method import Method

SHAPE: Final = GPTConfig()
BATCH, N_SAVES, N_ROWS = 4, 4, 512
CHANCE: Final = "chance"
ARMS: Final[Mapping[str, Method]] = {
    "lossless": LOSSLESS,
    **{f"--grid-step {step:g}": Grid(step=step) for step in (0.0625, 0.125, 0.25, 0.5)},
    "grid steps by default": Grid(),
}


@functools.cache
def _text() -> tuple[torch.Tensor, torch.Tensor]:
    return read_corpus()


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of the corpus, drawn by their number."""

    def __init__(self, n: int, seed: int, text: torch.Tensor) -> None:
        self.rows = torch.cat(
            [next(batches(text, batch=1, context=SHAPE.context - 1, seed=seed, start=i)) for i in range(n)]
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


def trainer(folder: Path, interval: int, rows: Dataset[Any], n_intervals: int) -> transformers.Trainer:
    """The plain Trainer, which saves each interval and stops after `n_intervals`."""
    transformers.set_seed(1)
    shape = {"n_embd": SHAPE.width, "n_layer": SHAPE.n_layers, "n_head": SHAPE.n_heads}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=SHAPE.context, **shape, **dropout)
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=interval * n_intervals,
        save_steps=interval,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    return transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=rows)


@torch.no_grad()
def loss_of(model: Any, rows: Rows) -> float:
    """Mean loss in nats over all rows."""
    model.eval()
    parts = rows.rows.split(64)
    return float(np.mean([model(input_ids=part, labels=part).loss.item() for part in parts]))


def n_bytes(folder: Path) -> int:
    """Of all files below, each counted once however many names it has."""
    return sum(
        {(s := path.stat()).st_ino: s.st_size for path in folder.rglob("*") if path.is_file()}.values()
    )


def resumed(folder: Path, interval: int, train: Rows, validation: Rows) -> float:
    """The loss one interval after a folder."""
    step = int(folder.name.rsplit("-", 1)[1])
    with tempfile.TemporaryDirectory() as name:
        run = trainer(Path(name), interval, train, step // interval + 1)
        run.train(resume_from_checkpoint=str(folder))
        return loss_of(run.model, validation)


def disturb(folder: Path) -> None:
    """Move each weight by a millionth of its tensor's spread."""
    generator, path = torch.Generator().manual_seed(1), folder / "model.safetensors"
    tensors = load_file(path)
    for tensor in tensors.values():
        tensor += torch.randn(tensor.shape, generator=generator) * tensor.std() * 2**-20
    save_file(tensors, path, {"format": "pt"})


def unpacked(run: Path, arm: str, work: Path) -> tuple[list[Path], float]:
    """(folders to resume from, ratio)."""
    sources = [run / f"checkpoint-{step}" for step in steps_of(run)]
    back = [work / "back" / source.name for source in sources]
    if arm == CHANCE:
        for source, folder in zip(sources, back, strict=True):
            shutil.copytree(source, folder)
            disturb(folder)
        return back, 1.0
    compress(sources, work / "packed", config=ARMS[arm], chain=True)
    (work / "back").mkdir()
    for folder in back:
        restore(work / "packed" / folder.name, folder)
    return back, sum(map(n_bytes, sources)) / n_bytes(work / "packed")


def steps_of(run: Path) -> list[int]:
    """Steps of a run's folders but for the last, ascending."""
    return sorted(int(path.name.rsplit("-", 1)[1]) for path in run.glob("checkpoint-*"))[:N_SAVES]


def row_of(run: Path, arm: str, interval: int, train: Rows, validation: Rows, exact: list[float]) -> Row:
    """Pack, restore and resume with one arm."""
    with tempfile.TemporaryDirectory() as name:
        folders, ratio = unpacked(run, arm, Path(name))
        losses = [resumed(folder, interval, train, validation) for folder in folders]
    changes = [100 * (loss / wanted - 1) for loss, wanted in zip(losses, exact, strict=True)]
    return {
        "method": arm,
        "ratio, whole folders": "" if arm == CHANCE else round(ratio, 1),
        "resumed %, mean": round(float(np.mean(changes)), 3),
        "resumed %, worst": round(max(changes, key=abs), 3),
    }


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--interval", type=int, default=100, help="steps between saves")
    parser.add_argument("--arm", nargs="+", default=[CHANCE, *ARMS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    text, held_out = _text()
    train = Rows(BATCH * given.interval * (N_SAVES + 1), 3, text)
    validation = Rows(N_ROWS, 4, held_out)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        trainer(run, given.interval, train, N_SAVES + 1).train()
        exact = []
        for step in [*steps_of(run)[1:], given.interval * (N_SAVES + 1)]:
            model = transformers.GPT2LMHeadModel.from_pretrained(run / f"checkpoint-{step}")
            exact.append(loss_of(model, validation))
        rows = []
        for arm in given.arm:
            rows.append(row_of(run, arm, given.interval, train, validation, exact))
            print(rows[-1], flush=True)
    save_rows("trainer_folders", rows)
    finish("trainer_folders", machine(interval=str(given.interval)))


if __name__ == "__main__":
    main()
