"""A Trainer of a small GPT-2 with `.ckptz` checkpoints, and the comparison of its runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.transformers_support import make, transformers

pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install accelerate")

from ckptz.integrations.trainer import ChainOptions, CkptzTrainerMixin

N_SAVES = 10
OPTIONS = ChainOptions(full_every=4, jobs=1)


class Trainer(CkptzTrainerMixin, transformers.Trainer):
    """A Trainer as users write it."""


def tokens(n: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 96, (n, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(
    folder: Path,
    kind: type = Trainer,
    options: ChainOptions | None = OPTIONS,
    dataset: Any = None,
    **settings: Any,
) -> Any:
    """Return a trainer of a small GPT-2 with dropout that saves at every step."""
    arguments: dict[str, Any] = {
        "max_steps": N_SAVES,
        "save_steps": 1,
        "save_total_limit": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 3,
        "lr_scheduler_type": "constant_with_warmup",  # does not depend on the number of steps
        "seed": 5,
    }
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    args = transformers.TrainingArguments(output_dir=str(folder), **(arguments | quiet | settings))
    extra = {} if options is None else {"ckptz": options}
    data = {"train_dataset": tokens(), "eval_dataset": dataset}
    return kind(model=make("gpt2").train(), args=args, **data, **extra)


def final(run: Any) -> dict[str, Any]:
    """Return weights, optimizer and scheduler at the end of a run, by flat names."""
    state = {f"model.{name}": tensor.clone() for name, tensor in run.model.state_dict().items()}
    for i, entries in run.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{i}.{key}": value.clone() for key, value in entries.items()}
    return state | {"scheduler": run.lr_scheduler.state_dict()["last_epoch"]}


def check_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(actual[name], value) if isinstance(value, torch.Tensor) else actual[name] == value
        assert same, name


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
