"""A training program for ckpt-chaos: python killed_program.py plain|trainer|transformers|lightning FOLDER.

It trains six steps from the newest checkpoint of the folder, saves every second step, prints the step that it
resumes from, and writes a digest of weights and optimizer to FOLDER/result.txt. "transformers" is the
Trainer without ckptz.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

N_STEPS, SAVE_EVERY = 6, 2
KINDS = ("plain", "trainer", "lightning", "transformers")


def batch_of(step: int) -> torch.Tensor:
    """Return the batch of a step."""
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Compute the loss: predict the neighbour of each number."""
    return (model(batch) - batch.roll(1, 1)).square().mean()


def network(dropout: float = 0.1) -> torch.nn.Module:
    """Build the model, with the same values in each process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(dropout), torch.nn.Linear(64, 64))


def plain(folder: Path) -> tuple[int, Any, Any]:
    """Train in a loop with a Checkpointer; return the first step, model and optimizer."""
    from ckptz import Checkpointer, KeepPolicy

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keep = KeepPolicy(last=2)
    with Checkpointer(folder, model, optimizer, every=SAVE_EVERY, keep=keep, jobs=1) as checkpointer:
        first = checkpointer.restore_latest() or 0
        for step in range(first + 1, N_STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, batch_of(step)).backward()
            optimizer.step()
            checkpointer.maybe_save(step)
    return first, model, optimizer


def trainer(folder: Path, *, is_ours: bool = True) -> tuple[int, Any, Any]:
    """Train by the Trainer of transformers; return the first step, model and optimizer."""
    import transformers

    from ckptz.integrations.trainer import ChainOptions, CkptzTrainerMixin

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, batch: torch.Tensor) -> Any:
            return {"loss": loss_of(self.net, batch)}

    class Trainer(CkptzTrainerMixin, transformers.Trainer):
        pass

    class Start(transformers.TrainerCallback):
        first = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.first = state.global_step

    start = Start()
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=N_STEPS,
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    data = [{"batch": row} for row in batch_of(0).repeat(8, 1)]
    options = {"train_dataset": data, "callbacks": [start]}
    if is_ours:
        run = Trainer(Model(), args, ckptz=ChainOptions(full_every=4, jobs=1), **options)
    else:
        run = transformers.Trainer(Model(), args, **options)
    has_checkpoint = any(folder.glob("checkpoint-*"))
    run.train(resume_from_checkpoint=True if has_checkpoint else None)
    return start.first, run.model, run.optimizer


def transformers_alone(folder: Path) -> tuple[int, Any, Any]:
    """Train by the Trainer of transformers without ckptz."""
    return trainer(folder, is_ours=False)


def lightning(folder: Path) -> tuple[int, Any, Any]:
    """Train by Lightning; return the first step, model and optimizer."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from ckptz.integrations.lightning import CkptzIO

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(dropout=0.0)  # Lightning does not restore random states

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Start(Callback):
        first = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.first = trainer.global_step

    start = Start()
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVE_EVERY, save_top_k=1, save_last=True)
    run = Trainer(
        max_steps=N_STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[CkptzIO(full_every=4, jobs=1)],
        callbacks=[saves, start],
    )
    data = torch.utils.data.DataLoader(batch_of(0).repeat(8, 1), batch_size=8)
    run.fit(Model(), data, ckpt_path="last" if (folder / "last.ckpt").exists() else None)
    return start.first, run.lightning_module, run.optimizers[0]


def main() -> None:
    """Train, and write the result."""
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    train = dict(zip(KINDS, (plain, trainer, lightning, transformers_alone), strict=True))[sys.argv[1]]
    first, model, optimizer = train(folder)
    print(f"resumed from step {first}")
    states = [*optimizer.state_dict()["state"].values()]
    tensors = [*model.state_dict().values(), *(t for state in states for t in state.values())]
    digest = hashlib.sha256(b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors))
    (folder / "result.txt").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
