"""Whole training states that nothing restarts from: ckptz's defaults and rules of other papers, on one run.

    python -m bench.studies.whole_states [--only WORD ...] [--report] [--quick]

The run: a GPT of 3.3 M parameters with AdamW, 14 checkpoints, 260 steps apart. Each way
stores all of them, each against the file before, and training is resumed from what five of them restore
to. Rows are kept in bench/.cache/whole_states; --report writes what is there. About ten minutes of CPU time
in all, on one thread.
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

POINTS: Final = (2, 5, 8, 10, 12)  # checkpoints that training resumes from
STORED: Final[dict[str, Any]] = {"keep": KeepPolicy(last=None, exact=0), "background": False, "jobs": 1}

Walk = Iterator[
    tuple[int, float, Trainer]
]  # bytes, CPU seconds, and what a restore gives, of each checkpoint
Way = Callable[[Task], Walk]


def states(task: Task) -> Iterator[State]:
    """The checkpoints of the uninterrupted run."""
    return (Run(task).state(index) for index in range(N_CHECKPOINTS))


def checkpointer(config: Method, restores: int = 0) -> Way:
    """A `Checkpointer` without an exact newest step: the state is what training had, and nothing restarts."""

    def walk(task: Task) -> Walk:
        with tempfile.TemporaryDirectory(prefix="ckptz-whole-states-") as folder:
            for state in states(task):
                trainer = Trainer(task, state)
                given = trainer.model, trainer.optimizer
                with Checkpointer(folder, *given, config=config, restores=restores, **STORED) as saver:
                    _, seconds = cpu_seconds(lambda s=saver, n=trainer.step: s.save(n))  # type: ignore[misc]
                    report = saver.wait()
                    assert report is not None
                    saver.restore(trainer.step)
                yield report.stored_bytes, seconds, trainer

    return walk


def rival(rule: Rival) -> Way:
    """A rule of another paper, whose restoring is part of storing."""

    def walk(task: Task) -> Walk:
        before: Mapping[str, Any] | None = None
        for state in states(task):
            given = {name: tensor.numpy() for name, tensor in state.items()}
            found, seconds = cpu_seconds(lambda g=given, b=before: rule.store(g, b))  # type: ignore[misc]
            before = found.restored
            yield found.n_bytes, seconds, Trainer(task, {n: from_numpy(a.copy()) for n, a in before.items()})

    return walk


WAYS: Final[Mapping[str, Way]] = {
    "grid": checkpointer(Grid()),
    "int8 blocks": rival(Int8Blocks()),
    "ExCP's rule": rival(ExCP()),
    "grid, for ten restarts": checkpointer(Grid(), restores=10),
    "grid, all steps halved": checkpointer(Grid().scaled(0.5)),
}


def measured(task: Task, name: str) -> dict[str, Any]:
    """Bytes and seconds of each file, and losses after resuming at each point."""
    sizes, seconds, losses = [], [], {}
    for index, (n_bytes, spent, trainer) in enumerate(WAYS[name](task)):
        sizes.append(n_bytes)
        seconds.append(spent)
        if index in POINTS:
            losses[str(index)] = probe_on(trainer)
    return {"sizes": sizes, "encode_seconds": seconds, "losses": losses}


def noise(task: Task) -> dict[str, Any]:
    """Losses after resuming from weights disturbed by a hundredth of their spread."""
    return {str(i): probe_on(Trainer(task, disturbed(Run(task).state(i), seed=0))) for i in POINTS}


def training_seconds(task: Task) -> dict[str, Any]:
    """CPU seconds between two checkpoints, from those of a tenth of the steps."""
    trainer, n_steps = Trainer(task, Run(task).state(POINTS[0])), max(task.interval // 10, 1)
    _, seconds = cpu_seconds(lambda: trainer.train(n_steps))
    return {"seconds": seconds * task.interval / n_steps}


def raw_bytes(task: Task) -> int:
    """Bytes of weights and both moments."""
    return sum(tensor.nbytes for tensor in Run(task).state(0).values())


# --- the table ----------------------------------------------------------------------------------


def row_of(task: Task, name: str, found: Mapping[str, Any], training: float) -> Row:
    """A way: ratios, gaps in per cent, and seconds."""
    sizes, raw = found["sizes"], raw_bytes(task)
    gaps = [gap_of(task, index, found["losses"][str(index)]) for index in POINTS]
    spent = 100 * statistics.median(found["encode_seconds"][1:]) / training
    return {
        "method": name,
        "ratio": f"{raw * len(sizes) / sum(sizes):.1f}",
        "full file": f"{raw / sizes[0]:.1f}",
        "deltas": f"{raw * (len(sizes) - 1) / sum(sizes[1:]):.1f}",
        **_cells(gaps),
        "encode, % of training": f"{spent:.1f}",
    }


def noise_row(task: Task, found: Mapping[str, list[float]]) -> Row:
    """The magnitude at each point."""
    gaps = [abs(gap_of(task, index, found[str(index)])) for index in POINTS]
    blank = dict.fromkeys(("ratio", "full file", "deltas"), "")
    return {"method": "noise, magnitude", **blank, **_cells(gaps), "encode, % of training": ""}


def gap_of(task: Task, index: int, losses: list[float]) -> float:
    """Relative change of the loss after a resumption."""
    return resumed_gap({"restored": losses, "exact": exact_probe(task, index)})


def _cells(gaps: Sequence[float]) -> Row:
    named = {f"gap at {index}, %": f"{100 * gap:+.3f}" for index, gap in zip(POINTS, gaps, strict=True)}
    ends = {"mean gap, %": statistics.mean(gaps), "worst gap, %": max(gaps)}
    return named | {name: f"{100 * gap:+.3f}" for name, gap in ends.items()}


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=(), help="words of the names of ways")
    parser.add_argument("--report", action="store_true", help="measure nothing, write what the cache holds")
    parser.add_argument("--quick", action="store_true", help="a toy model, to see that everything runs")
    args = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    task = language()
    if args.quick:
        config = GPTConfig(n_layers=1, width=64, n_heads=2)
        task = replace(task, name="quick", model=lambda: TinyGPT(config), first_step=4, interval=4)
        Run(task).train()
    folder = CACHE / "whole_states" / task.name
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name.replace(' ', '_')}.json" for name in WAYS}
    training = remembered(folder / "training.json", lambda: training_seconds(task))["seconds"]
    rows: list[Row] = []
    for name, path in paths.items():
        is_wanted = path.exists() if args.report else not args.only or any(w in name for w in args.only)
        if is_wanted:
            rows.append(row_of(task, name, remembered(path, lambda n=name: measured(task, n)), training))  # type: ignore[misc]
            print(rows[-1], flush=True)
    disturbance = folder / "noise.json"
    if not args.report or disturbance.exists():
        rows.append(noise_row(task, remembered(disturbance, lambda: noise(task))))
    if args.report:
        save_rows("whole_states", rows)
        finish("whole_states", machine())


if __name__ == "__main__":
    main()
