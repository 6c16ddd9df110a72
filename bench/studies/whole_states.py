"""Sizes and resumed losses of training states stored by ckptz and by published methods, without restarts.

    python -m bench.studies.whole_states [--only WORD ...] [--report] [--quick]

The run is a GPT of 3.3 M parameters with AdamW, with 14 checkpoints 260 steps apart. Each method stores all
checkpoints of the uninterrupted run, each as a delta to the previous file if the method has deltas. Training
is resumed from five of the restored checkpoints. Results are cached in bench/.cache/whole_states; --report
writes the cached results. About ten CPU minutes on one thread.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import from_numpy

from bench.core.measure import CACHE, Row, cpu_seconds, machine, parser_of, save_rows
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT
from bench.studies.rivals import ExCP, Int8Blocks, Rival
from bench.studies.tasks import Task, language
from bench.studies.training import (
    N_CHECKPOINTS,
    N_THREADS,
    Run,
    State,
    Trainer,
    disturbed,
    exact_probe,
    probe_on,
    remembered,
    resumed_gap,
)
from ckptz import Checkpointer, Grid, KeepPolicy
from ckptz.codec.method import Method

POINTS: Final = (2, 5, 8, 10, 12)  # indices of the checkpoints that training resumes from
STORED: Final[dict[str, Any]] = {"keep": KeepPolicy(last=None, exact=0), "background": False, "jobs": 1}

StoredCheckpoints = Iterator[
    tuple[int, float, Trainer]
]  # bytes, CPU seconds and restored state of each checkpoint
StorageMethod = Callable[[Task], StoredCheckpoints]


def states(task: Task) -> Iterator[State]:
    """Yield the checkpoints of the uninterrupted run."""
    return (Run(task).state(index) for index in range(N_CHECKPOINTS))


def checkpointer(config: Method, restores: int = 0) -> StorageMethod:
    """Store exact states with a `Checkpointer` without an exact newest step."""

    def store(task: Task) -> StoredCheckpoints:
        with tempfile.TemporaryDirectory(prefix="ckptz-whole-states-") as folder:
            for state in states(task):
                trainer = Trainer(task, state)
                saver = Checkpointer(
                    folder, trainer.model, trainer.optimizer, config=config, restores=restores, **STORED
                )
                with saver:
                    _, seconds = cpu_seconds(lambda s=saver, n=trainer.step: s.save(n))  # type: ignore[misc]
                    report = saver.wait()
                    assert report is not None
                    saver.restore(trainer.step)
                yield report.stored_bytes, seconds, trainer

    return store


def rival(rule: Rival) -> StorageMethod:
    """Store states with a published method; the seconds include the restore."""

    def store(task: Task) -> StoredCheckpoints:
        before: Mapping[str, Any] | None = None
        for state in states(task):
            arrays = {name: tensor.numpy() for name, tensor in state.items()}
            stored, seconds = cpu_seconds(lambda a=arrays, b=before: rule.store(a, b))  # type: ignore[misc]
            before = stored.restored
            yield stored.n_bytes, seconds, Trainer(task, {n: from_numpy(a.copy()) for n, a in before.items()})

    return store


METHODS: Final[Mapping[str, StorageMethod]] = {
    "grid": checkpointer(Grid()),
    "int8 blocks": rival(Int8Blocks()),
    "ExCP's rule": rival(ExCP()),
    "grid, for ten restarts": checkpointer(Grid(), restores=10),
    "grid, all steps halved": checkpointer(Grid().scaled(0.5)),
}


def measured(task: Task, name: str) -> dict[str, Any]:
    """Measure bytes and CPU seconds of each file, and the losses after a resume at each of POINTS."""
    sizes, seconds, losses = [], [], {}
    for index, (n_bytes, spent, trainer) in enumerate(METHODS[name](task)):
        sizes.append(n_bytes)
        seconds.append(spent)
        if index in POINTS:
            losses[str(index)] = probe_on(trainer)
    return {"sizes": sizes, "encode_seconds": seconds, "losses": losses}


def noise(task: Task) -> dict[str, Any]:
    """Measure the losses after a resume from weights disturbed by a hundredth of their spread."""
    return {str(i): probe_on(Trainer(task, disturbed(Run(task).state(i), seed=0))) for i in POINTS}


def training_seconds(task: Task) -> dict[str, Any]:
    """Estimate the CPU seconds of training between two checkpoints, from a tenth of the steps."""
    trainer, n_steps = Trainer(task, Run(task).state(POINTS[0])), max(task.interval // 10, 1)
    _, seconds = cpu_seconds(lambda: trainer.train(n_steps))
    return {"seconds": seconds * task.interval / n_steps}


def raw_bytes(task: Task) -> int:
    """Return the bytes of the weights and both moments."""
    return sum(tensor.nbytes for tensor in Run(task).state(0).values())


# --- the table ----------------------------------------------------------------------------------


def row_of(task: Task, name: str, result: Mapping[str, Any], training: float) -> Row:
    """Build the row of a method: ratios, loss gaps in percent, and CPU seconds relative to training."""
    sizes, raw = result["sizes"], raw_bytes(task)
    gaps = [gap_of(task, index, result["losses"][str(index)]) for index in POINTS]
    spent = 100 * statistics.median(result["encode_seconds"][1:]) / training
    return {
        "method": name,
        "ratio": f"{raw * len(sizes) / sum(sizes):.1f}",
        "full file": f"{raw / sizes[0]:.1f}",
        "deltas": f"{raw * (len(sizes) - 1) / sum(sizes[1:]):.1f}",
        **_cells(gaps),
        "encode, % of training": f"{spent:.1f}",
    }


def noise_row(task: Task, losses: Mapping[str, list[float]]) -> Row:
    """Build the row of disturbed weights, with the magnitude of the loss gap at each point."""
    gaps = [abs(gap_of(task, index, losses[str(index)])) for index in POINTS]
    blank = dict.fromkeys(("ratio", "full file", "deltas"), "")
    return {"method": "noise, magnitude", **blank, **_cells(gaps), "encode, % of training": ""}


def gap_of(task: Task, index: int, losses: list[float]) -> float:
    """Return the relative change of the loss after a resume, against the exact resume."""
    return resumed_gap({"restored": losses, "exact": exact_probe(task, index)})


def _cells(gaps: Sequence[float]) -> Row:
    columns = {f"gap at {index}, %": gap for index, gap in zip(POINTS, gaps, strict=True)}
    columns |= {"mean gap, %": statistics.mean(gaps), "worst gap, %": max(gaps)}
    return {name: f"{100 * gap:+.3f}" for name, gap in columns.items()}


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=(), help="words in the names of methods")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the cached results")
    parser.add_argument("--quick", action="store_true", help="a toy model, to check that everything runs")
    options = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    task = language()
    if options.quick:
        config = GPTConfig(n_layers=1, width=64, n_heads=2)
        task = replace(task, name="quick", model=lambda: TinyGPT(config), first_step=4, interval=4)
        Run(task).train()
    folder = CACHE / "whole_states" / task.name
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name.replace(' ', '_')}.json" for name in METHODS}
    training = remembered(folder / "training.json", lambda: training_seconds(task))["seconds"]
    rows: list[Row] = []
    for name, path in paths.items():
        is_wanted = (
            path.exists() if options.report else not options.only or any(w in name for w in options.only)
        )
        if is_wanted:
            rows.append(row_of(task, name, remembered(path, lambda n=name: measured(task, n)), training))  # type: ignore[misc]
            print(rows[-1], flush=True)
    disturbance = folder / "noise.json"
    if not options.report or disturbance.exists():
        rows.append(noise_row(task, remembered(disturbance, lambda: noise(task))))
    if options.report:
        save_rows("whole_states", rows)
        finish("whole_states", machine())


if __name__ == "__main__":
    main()
