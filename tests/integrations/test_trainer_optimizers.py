"""The Trainer resumes exactly with all optimizers of PyTorch and any parameter groups."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.resumed_runs import ENDS_AT, GROUPINGS, KINDS, SAVED_AT, VARIANTS, Impossible, Run
from tests.training.test_optimizers import CLASSES, maker

pytest.importorskip("transformers", reason="the Trainer needs transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

import transformers

from ckptz.integrations.trainer import CkptzTrainerMixin

pytestmark = pytest.mark.apps


class Trainer(CkptzTrainerMixin, transformers.Trainer):
    """Trainer whose gradients depend on the step number only."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        step = self.state.global_step
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.requires_grad:
                parameter.grad = gradient
        return torch.tensor(float(step))


class Widen(transformers.TrainerCallback):
    """Callback that converts an optimizer's state to fp32 before the first step."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0 and self._run.kind == "bf16 with fp32 state":
            self._run._widen()


def trainer(folder: Path, run: Run) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **{"max_steps": ENDS_AT, "save_steps": SAVED_AT, "save_total_limit": None, "max_grad_norm": 0.0},
        **{"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"},
        **{"per_device_train_batch_size": 1, "remove_unused_columns": False},
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
    data = [{"x": torch.zeros(1)} for _ in range(ENDS_AT)]
    result = Trainer(run.model, arguments, train_dataset=data, optimizers=(run.optimizer, schedule))
    result.add_callback(Widen(run))
    return result


def outcome(folder: Path, make: Any, precision: str, grouping: str) -> str:
    uninterrupted, resumed = Run(make, precision, grouping), Run(make, precision, grouping)
    try:
        trainer(folder, uninterrupted).train()
    except (RuntimeError, TypeError, ValueError, AssertionError, KeyError) as error:
        if type(error).__module__.startswith("ckptz"):
            return "refused"
        raise Impossible(str(error)) from error
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer(folder, resumed).train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}"))
    assert resumed.state() == uninterrupted.state()
    return "equal"


SOME = (
    ("fp32", "one", "plain"),
    ("bf16", "empty middle", "plain"),
    ("bf16 with fp32 state", "frozen", "plain"),
)
ALL = (
    *(
        (precision, grouping, "plain")
        for precision in KINDS
        for grouping in GROUPINGS
        if grouping != "frozen later"
    ),
    *(("bf16", "several", variant) for variant in VARIANTS),
)


def check(folder: Path, kind: type[torch.optim.Optimizer], arrangements: Any) -> None:
    if kind.__name__ in ("LBFGS", "SparseAdam"):
        pytest.skip("the Trainer gives no closure and no sparse gradients")
    counts: Counter[str] = Counter()
    for precision, grouping, variant in arrangements:
        try:
            make = maker(kind, variant)
            counts[outcome(folder / f"{precision}-{grouping}-{variant}", make, precision, grouping)] += 1
        except Impossible:
            counts["impossible"] += 1
    print(f"\n{kind.__name__} {dict(counts)}")
    assert counts["equal"] > 0
    assert set(counts) <= {"equal", "refused", "impossible"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_optimizer_resumes(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    check(tmp_path, kind, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_optimizer_in_every_arrangement_resumes(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    check(tmp_path, kind, ALL)
