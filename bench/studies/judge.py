"""What the two numbers of a budget say of files, on two slices, and what ten restarts with such files cost.

    python -m bench.studies.judge [--task NAME]

Files of the weights of the first cached checkpoints, at fixed settings from mild to aggressive. Both numbers
of `ckptz.search.judgement` are measured for losses on a reduced slice, as by a search, and on held-out data.
Then the run trains on for ten intervals of ten steps, and at the end of each its weights become what their
file restores to, each file stored against the one before; moments stay exact. Its loss on the held-out data
stands against that of the run that nothing interrupts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptz
from bench.core.measure import Row, machine, parser_of, save_rows
from bench.core.report import finish
from bench.studies.search import REDUCED
from bench.studies.tasks import HELD_OUT, SEARCH, TASKS, Task
from bench.studies.training import N_THREADS, Run, Trainer, folder_of, remembered, weights_of
from ckptz import Grid, KMeans
from ckptz.methods.lossless import LOSSLESS
from ckptz.methods.method import Method
from ckptz.search.judgement import Judgement, Limit, Reading, judge
from ckptz.torch import load_file

N_RESTARTS, STEPS_BETWEEN = 10, 10
ONE_PERCENT: Final = Limit(0.01, True)
FILES: Final[dict[str, Method]] = {
    "none": LOSSLESS,
    **{f"k-means, {n} levels": KMeans(levels=n) for n in (32, 16, 8)},
    **{f"grid, step {step:g}": Grid(step=step, purpose="resume") for step in (0.5, 1, 2)},
}


def _answers(task: Task, weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    model = task.model()
    model.load_state_dict(weights)
    return {part: task.answers(model, part, n) for part, n in ((SEARCH, REDUCED), (HELD_OUT, None))}


def _judged(exact: Tensor, found: Tensor) -> Judgement:
    values = (one.double().numpy() for one in (exact, found))
    return judge(ONE_PERCENT, *(Reading("loss", one, lower_is_better=True) for one in values))


def _stored(
    weights: dict[str, Tensor], folder: Path, index: int, method: Method
) -> tuple[float, dict[str, Tensor]]:
    """Ratio of the file of some weights, stored against the one before, and what it restores to."""
    plain, base = folder / "weights.safetensors", folder / f"{index - 1}.ckptz"
    save_file(weights, plain)
    given: Any = {"base": base if base.exists() else None, "config": method, "jobs": 1}
    (report,) = ckptz.compress([plain], folder / f"{index}.ckptz", **given)
    return report.ratio, dict(load_file(folder / f"{index}.ckptz"))


def restarted(task: Task, method: Method) -> dict[str, Any]:
    """Judge the first file, train through the restarts, and measure the end on the held-out data."""
    state = Run(task).state(0)
    exact = _answers(task, weights_of(state))
    with tempfile.TemporaryDirectory() as name:
        ratio, first = _stored(weights_of(state), Path(name), 0, method)
        found = _answers(task, first)
        state |= {f"model.{name}": tensor for name, tensor in first.items()}
        for index in range(1, N_RESTARTS + 1):
            trainer = Trainer(task, state)
            trainer.train(STEPS_BETWEEN)
            state = trainer.state()
            if index < N_RESTARTS:
                _, restored = _stored(weights_of(state), Path(name), index, method)
                state |= {f"model.{name}": tensor for name, tensor in restored.items()}
    end = task.evaluate(trainer.model, HELD_OUT)
    judged = {part: _judged(exact[part]["loss"], found[part]["loss"]) for part in exact}
    print(f"{task.name}, {method}: {ratio:.1f}x, loss {end.loss:.4f} at the end", flush=True)
    numbers = {part: [one.change, one.error, one.changes, one.used] for part, one in judged.items()}
    return {"ratio": ratio, "judged": numbers, "loss": end.loss, "accuracy": end.accuracy}


def rows_of(task: Task) -> Iterator[Row]:
    """One row a file."""
    found = {}
    for name, method in FILES.items():
        path = folder_of(task) / f"judge-{name.replace(', ', '-').replace(' ', '-')}.json"
        found[name] = remembered(path, lambda m=method: restarted(task, m))
    exact = found.pop("none")
    for name, one in found.items():
        parts = (one["judged"][SEARCH], one["judged"][HELD_OUT])
        yield {
            "task": task.name,
            "file": name,
            "ratio": f"{one['ratio']:.1f}x",
            "mean, search / held out (standard error)": " / ".join(
                f"{change:+.2%} ({error:.2%})" for change, error, *_ in parts
            ),
            "single changes, search / held out": " / ".join(f"{part[2]:.2%}" for part in parts),
            "of a budget of 1 %": f"{parts[0][3]:.0%}",
            "loss after ten restarts": f"{one['loss'] / exact['loss'] - 1:+.2%}",
            "accuracy, points": f"{100 * (one['accuracy'] - exact['accuracy']):+.2f}",
        }


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--task", choices=sorted(TASKS), help="only this one, and write no table")
    options = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    tasks = [TASKS[options.task]()] if options.task else [make() for make in TASKS.values()]
    rows: list[Row] = []
    for task in tasks:
        Run(task).train(n_checkpoints=1)
        rows += rows_of(task)
    if options.task is None:
        save_rows("judge", rows)
        finish("judge", machine())


if __name__ == "__main__":
    main()
