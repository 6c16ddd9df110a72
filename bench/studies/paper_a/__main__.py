"""The experiment of the dynamic quantization paper, at a size that two cores train.

    python -m bench.studies.paper_a [--report]

Paper: "Inshrinkerator: Compressing Deep Learning Training Checkpoints via Dynamic Quantization" (arXiv
2306.11800). Two models, a byte-level GPT with AdamW and a residual network with SGD momentum, write 14
checkpoints each. Only weights are compressed, with settings that are searched for under a budget at every
checkpoint; optimizer state stays exact and is not counted. Training really restarts from what ten of the
files restore to.

Everything is kept in bench/.cache/paper_a, checkpoint by checkpoint: an interrupted bench goes on where it
stopped. Writes results/paper_a_*.csv, paper_a.json and paper_a.png. Two processes of one
thread each share the work: about an hour on two free cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch

from bench.core.measure import machine
from bench.core.report import finish
from bench.studies.paper_a.chain import FAILURES, NEVER, Chain, noise_floor
from bench.studies.paper_a.coders import file_bytes_by_way
from bench.studies.paper_a.picture import write_picture
from bench.studies.paper_a.search import (
    BUDGETS,
    LAST_TIMING,
    SEARCH_BUDGETS,
    SNAPSHOT_BUDGETS,
    KMeansSearch,
    search_cost,
    snapshots,
    timings,
)
from bench.studies.paper_a.tables import TaskResults, write_tables
from bench.studies.paper_a.tasks import TASKS, Task
from bench.studies.paper_a.training import N_CHECKPOINTS, N_THREADS, Run, bench_seconds, folder_of, remembered

N_PROCESSES: Final = 2
TRAINING: Final = "training"

T = TypeVar("T")


def restored_elsewhere(chain: Chain) -> list[dict[str, Any]]:
    """Quality of every file of a chain, restored and evaluated by a new process."""

    def measure() -> dict[str, Any]:
        files = [str(chain.method.path(chain.folder, result["index"])) for result in chain.results()]
        command = [sys.executable, "-m", "bench.studies.paper_a.restored", chain.task.name, *files]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return {"files": [json.loads(line) for line in lines]}

    return remembered(chain.folder / "restored.json", measure)["files"]


def coded(chain: Chain) -> list[dict[str, int]]:
    """Bytes of every file of a chain by each way of coding its codes."""

    def measure() -> dict[str, Any]:
        paths = [chain.method.path(chain.folder, result["index"]) for result in chain.results()]
        return {"files": [file_bytes_by_way(path) for path in paths]}

    return remembered(chain.folder / "coders.json", measure)["files"]


def chain_results(chain: Chain) -> dict[str, Any]:
    """Everything that is measured of one run."""
    return {
        "budget": chain.method.budget,
        "n_restores": len(chain.failures),
        "checkpoints": chain.results(),
        "end": chain.end(),
        "elsewhere": restored_elsewhere(chain),
        "coders": coded(chain),
    }


def chains_of(task: Task) -> list[Chain]:
    """The runs of a task; the last never restarts."""
    budgets = BUDGETS[task.name]
    never = Chain(task, KMeansSearch(budgets[0]), failures=NEVER, probes=False)
    return [*(Chain(task, KMeansSearch(budget)) for budget in budgets), never]


def task_results(task: Task, *, only_complete: bool) -> TaskResults:
    """Everything that is measured of one task, from the cache where it is there.

    Args:
        task: which.
        only_complete: leave out what the cache does not hold to the end.
    """
    run, folder = Run(task), folder_of(task)
    run.train()
    chains = [chain for chain in chains_of(task) if chain.is_complete or not only_complete]
    missing = [
        f"{100 * c.method.budget:g} % run with {len(c.failures)} restores"
        for c in chains_of(task)
        if c not in chains
    ]

    def optional(measure: Callable[[Task], T], last_file: str, what: str) -> T | None:
        if (folder / last_file).exists() or not only_complete:
            return measure(task)
        missing.append(what)
        return None

    last_timing = f"{chains[0].folder.name}/{LAST_TIMING}"
    last_snapshot = f"snapshots/result-{SNAPSHOT_BUDGETS[-1]:g}.json"
    return TaskResults(
        task=task,
        exact=[run.facts(index) for index in range(N_CHECKPOINTS)],
        chains=[chain_results(chain) for chain in chains],
        noise_floor=optional(noise_floor, "noise-floor.json", "noise floor"),
        snapshots=optional(snapshots, last_snapshot, "single snapshots") or [],
        search=optional(search_cost, f"search/guided-{SEARCH_BUDGETS[-1]:g}.json", "cost of the search"),
        timings=optional(lambda _: timings(chains[0]), last_timing, "CPU seconds") or [],
        missing=missing,
    )


# --- two processes ------------------------------------------------------------------------------


def jobs_of(task: Task) -> Mapping[str, Callable[[], object]]:
    """What can be measured side by side once the uninterrupted run is there, by name."""
    chains = {chain.folder.name: chain for chain in chains_of(task)}
    return {
        "search": lambda: (search_cost(task), snapshots(task), noise_floor(task)),
        **{name: lambda c=chain: chain_results(c) for name, chain in chains.items()},
    }


def measure_all() -> None:
    """Fill the cache. Each job is a process; a task's jobs follow its training."""
    with ThreadPoolExecutor(N_PROCESSES) as pool:
        trained = {name: pool.submit(_run_job, name, TRAINING) for name in TASKS}
        others = []
        for name, training in reversed(trained.items()):  # the image model's is the shorter one
            training.result()
            others += [pool.submit(_run_job, name, job) for job in jobs_of(TASKS[name]())]
        for other in others:
            other.result()


def _run_job(task: str, job: str) -> None:
    subprocess.run([sys.executable, "-m", "bench.studies.paper_a", "--job", task, job], check=True)


def run_job(task: Task, job: str) -> None:
    """One job, in this process."""
    if job == TRAINING:
        Run(task).train()
    else:
        jobs_of(task)[job]()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--job", nargs=2, metavar=("TASK", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true", help="leave out what the cache does not hold")
    args = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    if args.job:
        run_job(TASKS[args.job[0]](), args.job[1])
        return
    if not args.report:
        measure_all()
    tasks = [make() for make in TASKS.values()]
    if args.report:
        tasks = [task for task in tasks if any(chain.is_complete for chain in chains_of(task))]
    results = [task_results(task, only_complete=args.report) for task in tasks]
    write_tables(results)
    write_picture(results)
    seconds = round(sum(bench_seconds(result.task) for result in results))
    finish("paper_a", machine(), seconds=seconds, failures=FAILURES)


if __name__ == "__main__":
    main()
