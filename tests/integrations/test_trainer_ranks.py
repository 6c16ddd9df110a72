"""The Trainer on two ranks with one model: one rank writes, and both resume in their own random states."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.trainer_support import Trainer, trainer

pytestmark = pytest.mark.apps

ROOT = Path(__file__).parents[2]
N_RANKS = 2
N_STEPS = 4


class Watched(Trainer):
    """Trainer that records its losses, which depend on the data order and on dropout."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def one_rank(folder: Path, play: str, n_steps: int) -> None:
    """Train on one rank, from the newest checkpoint if there is one, and write the result to a file."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder.parent / f"{play}.store"), N_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=N_RANKS)
    run = trainer(folder, Watched, max_steps=n_steps, save_total_limit=N_STEPS, ddp_backend="gloo")
    run.losses = []
    run.train(resume_from_checkpoint=bool(list(folder.glob("checkpoint-*"))))
    sums = {name: tensor.double().sum().item() for name, tensor in run.model.state_dict().items()}
    result = {"losses": run.losses, "sums": sums, "wrapped": type(run.model_wrapped).__name__}
    (folder.parent / f"{play}-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def played(folder: Path, play: str, n_steps: int) -> list[dict[str, Any]]:
    """Train on all ranks up to a step and return the result of each."""
    command = [sys.executable, "-m", "tests.integrations.test_trainer_ranks", str(folder), play, str(n_steps)]
    n_ranks = str(N_RANKS)
    shared = os.environ | {"WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(N_RANKS)
    ]
    assert [rank.wait(timeout=900) for rank in ranks] == [0] * N_RANKS
    return [json.loads((folder.parent / f"{play}-{rank}.json").read_text()) for rank in range(N_RANKS)]


@pytest.mark.slow
def test_one_rank_writes_and_both_resume_bit_for_bit(tmp_path: Path) -> None:
    uninterrupted = played(tmp_path / "whole", "whole", N_STEPS)
    assert [rank["wrapped"] for rank in uninterrupted] == ["DistributedDataParallel"] * N_RANKS
    assert uninterrupted[0]["losses"] != uninterrupted[1]["losses"], "data and dropout of ranks differ"
    assert uninterrupted[0]["sums"] == uninterrupted[1]["sums"]

    played(tmp_path / "run", "begun", 2)
    saved = tmp_path / "run" / "checkpoint-2"
    names = {path.name for path in saved.iterdir()}
    assert {"model.ckptz", "state.ckptz", "rng-00000.ckptz", "rng-00001.ckptz"} <= names
    assert {Path(name).suffix for name in names} == {".ckptz", ".json"}
    assert len({name for name in names if name.startswith("base-")}) == 2, (
        "one chain of weights, one of state"
    )

    resumed = played(tmp_path / "run", "resumed", N_STEPS)
    for rank in range(N_RANKS):
        assert resumed[rank]["losses"] == uninterrupted[rank]["losses"][2:]
        assert resumed[rank]["sums"] == uninterrupted[rank]["sums"]


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
