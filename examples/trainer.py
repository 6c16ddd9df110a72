"""The Hugging Face Trainer with compressed checkpoints; stop it at any time and run it again.

    python examples/trainer.py [FOLDER [STEPS]]

The mixin is all there is to it. Of the checkpoints two are kept; each holds what changed since the one
before, and resumes by itself.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ckptz.integrations.trainer import ChainOptions, CkptzTrainerMixin

VOCABULARY, LENGTH = 96, 32


class CompressedTrainer(CkptzTrainerMixin, Trainer):
    """A Trainer whose checkpoints are `.ckptz` files."""


def sequences(n: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up, from a random start."""
    starts = torch.randint(VOCABULARY, (n, 1), generator=torch.Generator().manual_seed(0))
    rows = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="run-"))
    n_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    settings = TrainingArguments(
        output_dir=str(folder),
        max_steps=n_steps,
        save_steps=max(1, n_steps // 6),
        save_total_limit=2,
        logging_steps=max(1, n_steps // 6),
        learning_rate=3e-3,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = CompressedTrainer(
        model=GPT2LMHeadModel(config),
        args=settings,
        train_dataset=sequences(512),
        ckptz=ChainOptions(full_every=8),
    )
    found = sorted(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if found else None)
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime):
        sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.ckptz")}
        own = sum(size for name, size in sizes.items() if not name.startswith("base-"))
        print(f"{checkpoint.name}: {own} bytes of its own, {len(sizes)} files")


if __name__ == "__main__":
    main()
