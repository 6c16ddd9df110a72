"""Tensors that a state holds twice: averages of weights (EMA), and fp32 masters beside bf16 weights.

    python -m bench.studies.related

Bytes an element without loss, of each alone, against itself a checkpoint before, and against the other of
its pair at the same step. A file of format 1.0 is stored against another file, name by name and of equal
dtype: so an average could be stored against weights, and a master against bf16 weights could not; for it the
table counts what their differences would take as integers. The language run, at its highest rate and near
its end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bench.core.measure import Row, machine, parser_of, save_rows
from bench.core.report import finish
from bench.studies.tasks import Task, language
from bench.studies.training import N_THREADS, Run, State, Trainer, weights_of
from ckptz.torch import save_file

POINTS: Final = {"highest rate": 1, "near the end": 11}  # checkpoints that training goes on from
DECAY: Final = 0.999
WARM_UP, EVERY = 260, 70  # steps

Parts = dict[str, dict[str, Tensor]]


def parts_of(trainer: Trainer, averages: dict[str, Tensor]) -> Parts:
    """Give what a state of mixed precision would hold at this step."""
    masters = {n: t.clone() for n, t in weights_of(trainer.state()).items()}
    weights = {n: t.bfloat16() for n, t in masters.items()}
    return {"masters": masters, "weights": weights, "averages": {n: t.clone() for n, t in averages.items()}}


def checkpoints(task: Task, state: State) -> Iterator[Parts]:
    """Two checkpoints, EVERY steps apart, with averages that began WARM_UP steps before the first."""
    trainer = Trainer(task, state)
    averages = weights_of(trainer.state())
    for n_steps in (WARM_UP, EVERY):
        for _ in range(n_steps):
            trainer.train(1)
            for name, now in trainer.model.state_dict().items():
                averages[name].lerp_(now, 1 - DECAY)
        yield parts_of(trainer, averages)


def differences(masters: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Masters less widened bf16 weights, as bits in zigzag order: with the weights these give them back."""
    found = {}
    for name, master in masters.items():
        d = master.view(torch.int32) - weights[name].float().view(torch.int32)
        found[name] = ((d << 1) ^ (d >> 31)).view(torch.uint32)
    return found


def bytes_an_element(tensors: dict[str, Tensor], base: dict[str, Tensor] | None = None) -> float:
    """Bytes of a lossless file over its elements."""
    with tempfile.TemporaryDirectory() as folder:
        path, against = Path(folder, "a.ckptz"), Path(folder, "base.ckptz")
        if base is not None:
            save_file(base, against)
        save_file(tensors, path, base=against if base is not None else None)
        return path.stat().st_size / sum(t.numel() for t in tensors.values())


def rows_of(task: Task, point: str, index: int) -> Iterator[Row]:
    """A row for each of the two relations."""
    before, now = checkpoints(task, Run(task).state(index))
    for name, of in (("averages", "fp32 weights"), ("masters", "bf16 weights")):
        if name == "averages":
            against = bytes_an_element(now[name], now["masters"])
        else:
            against = bytes_an_element(differences(now["masters"], now["weights"]))
        yield {
            "run": f"language, {point}",
            "tensors": name,
            "alone": f"{bytes_an_element(now[name]):.2f}",
            f"against itself {EVERY} steps before": f"{bytes_an_element(now[name], before[name]):.2f}",
            "against": of,
            "bytes": f"{against:.2f}",
            "these alone": f"{bytes_an_element(now['masters' if name == 'averages' else 'weights']):.2f}",
        }


def main() -> None:
    """Command line."""
    parser_of(__doc__).parse_args()
    torch.set_num_threads(N_THREADS)
    task = language()
    save_rows("related", [row for point, index in POINTS.items() for row in rows_of(task, point, index)])
    finish("related", machine())


if __name__ == "__main__":
    main()
