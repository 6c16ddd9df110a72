"""Both numbers of a budget for files of increasing loss, on the slice of searches and on held-out data.

    python -m bench.studies.judge

The files have the weights of the first cached checkpoints, at fixed settings from mild to aggressive. Mean
change and per-example change of `ckptz.search.budget` are measured on the per-example losses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptz
from bench.core.measure import Row, machine, parser_of, save_rows
from bench.core.report import finish
from bench.studies.search import REDUCED
from bench.studies.tasks import HELD_OUT, SEARCH, TASKS, Task
from bench.studies.training import N_THREADS, Run, weights_of
from ckptz import Grid, KMeans
from ckptz.codec.method import Method
from ckptz.search.budget import Judgement, Limit, Measurement, judge
from ckptz.torch import load_file

ONE_PERCENT: Final = Limit(0.01, True)
FILES: Final[dict[str, Method]] = {
    **{f"k-means, {n} levels": KMeans(levels=n) for n in (32, 16, 8)},
    **{f"grid, step {step:g}": Grid(step=step) for step in (0.5, 1, 2)},
}


def _losses(task: Task, weights: dict[str, Tensor]) -> list[Measurement]:
    """Measure the loss of each example on the search slice and on the held-out slice."""
    model = task.model()
    model.load_state_dict(weights)
    slices = (task.answers(model, part, n)["loss"] for part, n in ((SEARCH, REDUCED), (HELD_OUT, None)))
    return [Measurement("loss", losses.double().numpy(), lower_is_better=True) for losses in slices]


def _mean(judgement: Judgement) -> str:
    return f"{judgement.mean_change:+.2%} ({judgement.standard_error:.2%})"


def rows_of(task: Task) -> Iterator[Row]:
    """Yield a row for each file."""
    weights = weights_of(Run(task).state(0))
    exact = _losses(task, weights)
    for name, method in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            plain, packed = Path(folder, "weights.safetensors"), Path(folder, "weights.ckptz")
            save_file(weights, plain)
            (report,) = ckptz.compress([plain], packed, config=method)
            losses = _losses(task, dict(load_file(packed)))
        search, held_out = (judge(ONE_PERCENT, *pair) for pair in zip(exact, losses, strict=True))
        changes = f"{search.example_change:.2%} / {held_out.example_change:.2%}"
        yield {
            "task": task.name,
            "answers": f"{search.n_values} / {held_out.n_values}",
            "file": name,
            "ratio": f"{report.ratio:.1f}x",
            "mean, search / held out (standard error)": f"{_mean(search)} / {_mean(held_out)}",
            "single changes, search / held out": changes,
            "of 1 % used, search / held out": f"{search.used:.2f} / {held_out.used:.2f}",
        }


def main() -> None:
    """Run the command line."""
    parser_of(__doc__).parse_args()
    torch.set_num_threads(N_THREADS)
    rows: list[Row] = []
    for make in TASKS.values():
        Run(make()).train(n_checkpoints=1)
        rows += rows_of(make())
    save_rows("judge", rows)
    finish("judge", machine())


if __name__ == "__main__":
    main()
