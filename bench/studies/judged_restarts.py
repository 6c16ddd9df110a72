"""Measure both numbers of a budget at each restart of a run, and the loss at its end.

    python -m bench.studies.judged_restarts --task NAME ... --arm NAME ... [--seeds N ...] [--report]

Weights are lossy, moments exact. A run saves at its start and wherever it restarts. The per-example losses
before and after each restart are measured on the slice that searches see and on held-out data. Rows have the
means over all restarts of both numbers of `ckptz.search.budget`: mean change and per-example change. At the
end, loss and accuracy on held-out data are compared with the uninterrupted run. "disturbed by 2^-20" shows
the effect of chance: an uninterrupted run from a first state with noise of 2^-20 of each weight.

    fine-tune, foreign, language, image    see bench.studies.restarts; 9, 9, 10 and 10 restarts
    encoder                                see bench.studies.encoder; 10 restarts

A row is appended to results/judged_restarts.csv at the end of its run; --report sorts the rows. Ratios are
fp32 weights / files of weights, including the full file; files of moments are not counted.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bench.core.measure import Row, append_row, machine, parser_of, read_rows, save_rows
from bench.core.report import finish
from bench.studies.judge import ONE_PERCENT
from bench.studies.restarts import PLANS, Arm, Plan, exact_end, folder_of, saver_of
from bench.studies.tasks import HELD_OUT, SEARCH, Task
from bench.studies.training import N_THREADS, State, Trainer, remembered
from ckptz import Grid, KMeans
from ckptz.codec.method import Method
from ckptz.search.budget import Judgement, Measurement, judge

NAME: Final = "judged_restarts"
PARTS: Final = (SEARCH, HELD_OUT)
N_BATCHES: Final = 2  # batches of a slice in searches and at each restart; the end is measured on all
NOISE: Final = 2.0**-20  # standard deviation relative to each weight, in the rows that show chance
METHODS: Final[Mapping[str, Method]] = {"k-means": KMeans(), "grid": Grid(moments=None)}
ARMS: Final[Mapping[str, Arm]] = {
    **{f"k-means, {n} levels": Arm(config=KMeans(levels=n)) for n in (32, 16, 8, 6)},
    **{f"grid, step {step:g}": Arm(config=Grid(step=step, moments=None)) for step in (0.5, 1, 2, 3, 4)},
    **{f"{name}, search 1 %": Arm(config=method, budget=0.01) for name, method in METHODS.items()},
    **{
        f"{name}, search 1 %, ten restarts": Arm(config=method, budget=0.01, restores=10)
        for name, method in METHODS.items()
    },
}
CHANCE: Final = "disturbed by 2^-20"


@dataclass(frozen=True, slots=True)
class _Run:
    """Sizes of the files of a run, and the judgements at its restarts."""

    sizes: list[int] = field(default_factory=list)  # bytes of the weights in each file
    n_trials: list[int] = field(default_factory=list)
    judgements: Mapping[str, list[Judgement]] = field(default_factory=lambda: {part: [] for part in PARTS})


def _losses(task: Task, model: torch.nn.Module) -> dict[str, Measurement]:
    """Measure the loss of each example, by slice."""
    return {
        part: Measurement(
            "loss", task.answers(model, part)["loss"].double().cpu().numpy(), lower_is_better=True
        )
        for part in PARTS
    }


def _restarted(plan: Plan, arm: Arm, seed: int) -> dict[str, Any]:
    """Train, save and restart; return the measurements for the cache."""
    task = replace(plan.task, slices=lambda part: plan.task.slices(part)[:N_BATCHES])
    trainer, run = Trainer(task, plan.first(seed)), _Run()
    folder = Path(tempfile.mkdtemp(prefix="ckptz-judged-"))
    saver = saver_of(folder, trainer, arm, plan)
    try:
        trainer.train(plan.lead)
        for index in range(plan.n_checkpoints):
            if index:
                trainer.train(plan.task.interval)
            if index and index not in plan.failures:
                continue
            saver.save(trainer.step)
            report = saver.wait()
            assert report is not None
            run.sizes.append((folder / f"step-{trainer.step:08d}.ckptz").stat().st_size)
            run.n_trials.append(len(report.search.trials) if report.search else 0)
            if index in plan.failures:  # continue as a new process would
                exact = _losses(task, trainer.model)
                saver.close()
                saver = saver_of(folder, trainer, arm, plan)
                saver.restore(trainer.step)
                for part, losses in _losses(task, trainer.model).items():
                    run.judgements[part].append(judge(ONE_PERCENT, exact[part], losses))
    finally:
        saver.close()
        shutil.rmtree(folder)
    end = plan.task.evaluate(trainer.model, HELD_OUT)
    return {
        "raw": sum(t.nbytes for t in trainer.model.state_dict().values()),
        "sizes": run.sizes,
        "n_trials": run.n_trials,
        "changes": {part: [j.example_change for j in parts] for part, parts in run.judgements.items()},
        "means": {part: [j.mean_change for j in parts] for part, parts in run.judgements.items()},
        "loss": end.loss,
        "accuracy": end.accuracy,
    }


def _chance(plan: Plan, seed: int) -> dict[str, Any]:
    """Train from weights with relative noise, without interruption; return loss and accuracy at the end."""
    trainer = Trainer(plan.task, _with_noise(plan.first(0), seed))
    trainer.train(plan.lead + plan.task.interval * (plan.n_checkpoints - 1))
    end = trainer.evaluate(HELD_OUT)
    return {"loss": end.loss, "accuracy": end.accuracy}


def _with_noise(state: State, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t * (1 + NOISE * torch.randn(t.shape, generator=generator))
        if name.startswith("model.") and t.is_floating_point()
        else t
        for name, t in state.items()
    }


def row_of(plan: Plan, name: str, seed: int) -> Row:
    """Measure an arm, unless it is cached, and build its row."""
    path = folder_of(plan.task) / f"judged-{name.replace(' ', '_')}-{seed}.json"
    is_chance = name == CHANCE
    make = (
        functools.partial(_chance, plan, seed)
        if is_chance
        else functools.partial(_restarted, plan, ARMS[name], seed)
    )
    result = remembered(path, make)
    exact = exact_end(plan, 0 if is_chance else seed)[HELD_OUT]
    row: Row = {"task": plan.task.name, "arm": name, "seed": seed}
    row |= dict.fromkeys(("restarts", "smaller", "deltas", "evaluations", "single changes", "means"), "")
    if not is_chance:
        sizes, n_trials = result["sizes"], result["n_trials"]
        row["restarts"] = len(plan.failures)
        row["smaller"] = f"{result['raw'] * len(sizes) / sum(sizes):.1f}x"
        row["deltas"] = f"{result['raw'] * (len(sizes) - 1) / sum(sizes[1:]):.1f}x"
        row["evaluations"] = (
            f"{n_trials[0]}, then {statistics.median(n_trials[1:]):g}" if any(n_trials) else ""
        )
        row["single changes"] = " / ".join(_percent(result["changes"][part], "") for part in PARTS)
        row["means"] = " / ".join(_percent(result["means"][part], "+") for part in PARTS)
    row["loss at the end"] = f"{100 * (result['loss'] / exact['loss'] - 1):+.2f} %"
    row["accuracy, points"] = f"{100 * (result['accuracy'] - exact['accuracy']):+.2f}"
    return row


def _percent(values: Sequence[float], sign: str) -> str:
    return f"{100 * statistics.mean(values):{sign}.2f} %"


def _plan(task: str) -> Plan:
    if task == "encoder":
        from bench.studies import encoder  # needs transformers and the model's package

        return encoder.plan()
    return PLANS[task]()


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--task", nargs="+", choices=[*PLANS, "encoder"], default=["fine-tune", "image"])
    parser.add_argument("--arm", nargs="+", choices=[CHANCE, *ARMS], default=[CHANCE, *ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="measure nothing, sort the table")
    options = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    if not options.report:
        for task in options.task:
            plan = _plan(task)
            for seed in options.seeds:
                for name in options.arm:
                    row = row_of(plan, name, seed)
                    append_row(NAME, row)
                    print(row, flush=True)
    names = [CHANCE, *ARMS]
    known = {(row["task"], row["arm"], row["seed"]): row for row in read_rows(NAME)}
    save_rows(
        NAME, sorted(known.values(), key=lambda row: (row["task"], names.index(str(row["arm"])), row["seed"]))
    )
    finish(NAME, machine())


if __name__ == "__main__":
    main()
