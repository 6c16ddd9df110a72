"""Loss of training runs that restart from lossy checkpoints, compared with the uninterrupted run.

    python -m bench.studies.restarts [--task NAME ...] [--arm NAME ...] [--seeds N] [--report] [--quick]

Each arm saves through `ckptz.Checkpointer`, restores the file that it has just written at each restart, and
continues, so updates that a file loses are lost for good. Ratios are fp32 weights and optimizer tensors /
all files of weights and state, including the full file. Tasks:

    language     3.3 M parameters, AdamW, 14 checkpoints 260 steps apart, 10 restarts
    image        1.2 M parameters, SGD with momentum, 14 checkpoints, 10 restarts
    fine-tune    the last state of the language run, fine-tuned on the docstrings of the same files: AdamW
                 with b2 = 0.999, rate 3e-4 falling to 0, 10 checkpoints 15 steps apart, 9 restarts
    foreign      the fine-tune on another language: the C++ headers in the torch package
    headers      the language run from scratch on these headers

Seeds above 0 disturb the first state by a hundredth of each tensor's spread, also in the exact run. The row
"disturbed, exact" compares the end of that exact run with the exact run of seed 0: the effect of chance.
Results are cached in bench/.cache/restarts, so that several processes can share the arms; --report writes the
cached results. An arm of language takes about 15 CPU minutes.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.core.measure import CACHE, Row, cpu_seconds, machine, parser_of, save_rows
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, read_corpus
from bench.studies.tasks import (
    GPT,
    HELD_OUT,
    SEARCH,
    Batch,
    Task,
    image,
    language,
    text_batch,
    text_slices,
)
from bench.studies.training import (
    DEVICE,
    FAILURES,
    N_CHECKPOINTS,
    N_THREADS,
    Run,
    State,
    Trainer,
    disturbed,
    publish,
    remembered,
    weights_of,
)
from ckptz import Budget, Checkpointer, Grid, KeepPolicy, KMeans
from ckptz.codec.grid_tensor import encoding_of
from ckptz.codec.method import Method
from ckptz.codec.moment_maps import LogLevels
from ckptz.codec.moments import MOMENTS
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.format.plan import LinearTable

Texts = Callable[[], tuple[Tensor, Tensor]]
FINE_TUNE_RATE, FINE_TUNE_BATCH, FINE_TUNE_EVERY, FINE_TUNE_CHECKPOINTS = 3e-4, 16, 15, 10
KEEP_ALL: Final = KeepPolicy(last=None, exact=0)
DISTURBED: Final = "disturbed, exact"
FINE: Final = 1 / 32  # of a step: too small to have a measurable effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Settings with which the checkpoints of a run are stored.

    Attributes:
        config: see `Checkpointer`.
        full_every: see `Checkpointer`.
        restores: see `Checkpointer`.
        budget: budget of a search at each checkpoint, a relative change of the loss, or None.
        from_base: True if full files are stored as deltas to the pretrained weights.
        replaced: objects of ckptz to patch, by dotted name, to leave out a mechanism.
    """

    config: Method
    full_every: int = 16
    restores: int | None = None
    budget: float | None = None
    from_base: bool = False
    replaced: Mapping[str, object] = field(default_factory=dict)


def grid(step: float, second: float = MOMENTS.second_step, first: float = MOMENTS.first_step) -> Grid:
    """Return a config that stores states on a grid of this step."""
    return Grid(step=step, moments=replace(MOMENTS, second_step=second, first_step=first))


def _fitted(grid: Any, counted: Any, most: int, levels: LinearTable) -> TensorPlan:
    """Plan a weight with fitted levels, as with purpose="ship", instead of multiples of the step."""
    if grid.fits_levels:
        return encoding_of(grid, counted, most, levels)
    summing = replace(grid, fits_levels=True)
    return encoding_of(grid, counted, *summing.fit(summing.counted(map)))


ARMS: Final[Mapping[str, Arm]] = {
    "grid, default": Arm(config=Grid()),
    "grid, from the base": Arm(config=Grid(), from_base=True),
    "grid, from the base, doubled": Arm(config=Grid().scaled(2), from_base=True),
    "grid, all steps halved": Arm(config=Grid().scaled(0.5)),
    "grid, step 0.5": Arm(config=grid(0.5)),
    "grid, full files 0.25": Arm(config=Grid(full_step=0.25)),
    "grid, full files 0.15": Arm(config=Grid(full_step=0.15)),
    "grid, first 0.25": Arm(config=grid(1.0, first=0.25)),
    "grid, first 0.1": Arm(config=grid(1.0, first=0.1)),
    "grid, first 2.5": Arm(config=grid(1.0, first=2.5)),
    "grid, first 4": Arm(config=grid(1.0, first=4.0)),
    "grid, first 10": Arm(config=grid(1.0, first=10.0)),
    "grid, first 16": Arm(config=grid(1.0, first=16.0)),
    "grid, nearest rounding": Arm(config=Grid(purpose="ship")),
    "grid, full files as coarse": Arm(config=Grid(full_step=0.5)),
    "grid, later full files 1": Arm(config=Grid(), replaced={"ckptz.codec.grid.FINEST_FULL": 1.0}),
    "grid, later full files 0.25": Arm(config=Grid(), replaced={"ckptz.codec.grid.FINEST_FULL": 0.25}),
    "grid, no usual end": Arm(config=Grid(), replaced={"ckptz.training.schedules.USUAL_END": 0.0}),
    "grid, no bound by movement": Arm(config=Grid(most_moves=1024.0)),
    "grid, fitted levels": Arm(config=Grid(), replaced={"ckptz.codec.grid.encoding_of": _fitted}),
    "grid, small weights as coarse": Arm(config=Grid(), replaced={"ckptz.codec.grid.FINE": 1.0}),
    "grid, small weights to 10 bits": Arm(config=Grid(), replaced={"ckptz.codec.grid.FINE": 2.0**-20}),
    "grid, first levels": Arm(
        config=Grid(),
        replaced={"ckptz.codec.moments.best_log_levels": lambda distances, step: LogLevels(step)},
    ),
    "grid, again": Arm(config=Grid()),
    "grid, all steps doubled": Arm(config=Grid().scaled(2)),
    "grid, all steps times 4": Arm(config=Grid().scaled(4)),
    "grid, step 0.25": Arm(config=grid(0.25)),
    "grid, step 2": Arm(config=grid(2.0)),
    "grid, to ship": Arm(config=Grid(purpose="ship"), restores=0),
    "grid, full files like deltas": Arm(config=Grid(), restores=0),
    "grid, weights": Arm(config=Grid(moments=None)),
    "grid, first moments, others fine": Arm(config=grid(FINE, second=FINE)),
    "grid, second moments, others fine": Arm(config=grid(FINE, first=FINE)),
    "k-means, 16 levels, weights": Arm(config=KMeans()),
    "k-means, 32 levels, weights": Arm(config=KMeans(levels=32)),
    "k-means, search 1 %, weights": Arm(config=KMeans(), budget=0.01),
    "k-means, search 1 %, ten restarts, weights": Arm(config=KMeans(), budget=0.01, restores=10),
    "grid, search 1 %, weights": Arm(config=Grid(moments=None), budget=0.01),
    "grid, search 1 %, ten restarts, weights": Arm(config=Grid(moments=None), budget=0.01, restores=10),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A task with its checkpoints and restarts.

    Attributes:
        task: model, data and optimizer.
        n_checkpoints: number of checkpoints.
        failures: indices of the checkpoints that training restarts from.
        start: state at the start of the run; None for the first checkpoint of the cached run.
        base: file of the pretrained weights of a fine-tune.
        jobs: number of threads that save.
        lead: number of steps from the start to the first checkpoint.
    """

    task: Task
    n_checkpoints: int = N_CHECKPOINTS
    failures: tuple[int, ...] = FAILURES
    start: State | None = field(default=None, repr=False)
    base: Path | None = None
    jobs: int = N_THREADS
    lead: int = 0

    def first(self, seed: int) -> State:
        """Return the state at the start, disturbed if the seed is above 0."""
        state = Run(self.task).state(0) if self.start is None else self.start
        return disturbed(state, seed) if seed else state

    @property
    def folder(self) -> Path:
        """Folder of the cached results."""
        return folder_of(self.task)

    def end_path(self, seed: int) -> Path:
        """Return the path of the cached end of the uninterrupted run."""
        return self.folder / f"exact-{seed}.json"


def folder_of(task: Task) -> Path:
    """Return the cache folder of a task, which is created if it is missing."""
    folder = CACHE / "restarts" / task.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# --- the fine-tune ------------------------------------------------------------------------------


@functools.cache
def docstrings() -> tuple[Tensor, Tensor]:
    """Return (training bytes, validation bytes) of the docstrings in the corpus of the base run."""
    sources = (bytes(part.numpy()).decode("utf-8", "replace") for part in read_corpus())
    train, validation = ("\n\n".join(quoted_in(source)).encode() for source in sources)
    return tuple(torch.from_numpy(np.frombuffer(t, np.uint8).copy()) for t in (train, validation))  # type: ignore[return-value]


def quoted_in(source: str) -> list[str]:
    """Return the docstrings of more than 200 characters in Python source code."""
    return [quoted for quoted in source.split('"""')[1::2] if len(quoted) > 200]


@functools.cache
def headers() -> tuple[Tensor, Tensor]:
    """Return (training bytes, validation bytes) of torch's C++ headers; each tenth file is for validation."""
    root = Path(torch.__file__).parent / "include" / "c10"
    files = [path.read_bytes() for path in sorted(root.rglob("*.h"))]
    parts = ([f for i, f in enumerate(files) if i % 10], files[::10])
    return tuple(torch.from_numpy(np.frombuffer(b"".join(p), np.uint8).copy()) for p in parts)  # type: ignore[return-value]


def _tuning_batch(texts: Texts, step: int) -> Batch:
    source = batches(texts()[0], batch=FINE_TUNE_BATCH, context=GPT.context, seed=11, start=step)
    tokens = next(source)
    return tokens[:, :-1], tokens[:, 1:]


@functools.cache
def _tuning_slices(texts: Texts, part: str) -> tuple[Batch, ...]:
    source = batches(texts()[1], batch=32, context=GPT.context, seed=21 if part == SEARCH else 22)
    windows = [next(source) for _ in range(8)]
    return tuple((tokens[:, :-1], tokens[:, 1:]) for tokens in windows)


def on_headers() -> Task:
    """Create the task of the language run on C++ headers."""
    return replace(
        language(),
        name="headers",
        batch=lambda step: text_batch(headers()[0], step),
        slices=functools.cache(lambda part: text_slices(headers()[1], part)),
    )


def _tuning_rate(step: int) -> float:
    return FINE_TUNE_RATE * max(0.0, 1 - step / (FINE_TUNE_EVERY * (FINE_TUNE_CHECKPOINTS + 1)))


def fine_tune(name: str = "fine-tune", texts: Texts = docstrings) -> Plan:
    """Plan a fine-tune of the last state of the language run on other texts."""
    base = language()
    task = replace(
        base,
        name=name,
        first_step=FINE_TUNE_EVERY,
        interval=FINE_TUNE_EVERY,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.1),
        rate=_tuning_rate,
        batch=functools.partial(_tuning_batch, texts),
        slices=functools.partial(_tuning_slices, texts),
    )
    trainer, weights = Trainer(task), weights_of(Run(base).state(N_CHECKPOINTS - 1))
    trainer.model.load_state_dict(weights)
    trainer.train(1)  # creates the state of the optimizer
    last, lead = FINE_TUNE_CHECKPOINTS - 1, FINE_TUNE_EVERY - 1
    plan = Plan(task, FINE_TUNE_CHECKPOINTS, tuple(range(last)), trainer.state(), lead=lead)
    path = plan.folder / "base.safetensors"
    publish(path, lambda p: save_file(weights, p))
    return replace(plan, base=path)


def toy() -> Plan:
    """Plan a few steps of a toy model, to check that everything runs."""
    config = GPTConfig(n_layers=1, width=64, n_heads=2)
    task = replace(language(), name="toy", model=lambda: TinyGPT(config), first_step=4, interval=2)
    trainer = Trainer(task)
    trainer.train(4)
    return Plan(task, 3, (0, 1), trainer.state())


PLANS: Final = {
    "language": lambda: Plan(language()),
    "headers": lambda: Plan(on_headers()),
    "image": lambda: Plan(image()),
    "fine-tune": fine_tune,
    "foreign": lambda: fine_tune("foreign", headers),
}


# --- runs ---------------------------------------------------------------------------------------


def exact_end(plan: Plan, seed: int) -> dict[str, Any]:
    """Return the quality at the end of the uninterrupted run, which is trained if it is not cached."""

    def train() -> dict[str, Any]:
        if plan.start is None and not seed:
            return {part: Run(plan.task).facts(N_CHECKPOINTS - 1)[part] for part in (SEARCH, HELD_OUT)}
        trainer = Trainer(plan.task, plan.first(seed))
        trainer.train(plan.lead + plan.task.interval * (plan.n_checkpoints - 1))
        return quality(trainer)

    return remembered(plan.end_path(seed), train)


def quality(trainer: Trainer) -> dict[str, Any]:
    """Evaluate loss and accuracy on both slices."""
    return {part: asdict(trainer.evaluate(part)) for part in (SEARCH, HELD_OUT)}


def arm_end(plan: Plan, name: str, seed: int) -> dict[str, Any]:
    """Return the quality at the end of a run that restarts from files, with file sizes and CPU seconds."""
    return remembered(_path(plan, name, seed), lambda: _restarted(plan, ARMS[name], seed))


def _path(plan: Plan, name: str, seed: int) -> Path:
    return plan.folder / f"{name.replace(' ', '_').replace(',', '')}-{seed}.json"


def _restarted(plan: Plan, arm: Arm, seed: int) -> dict[str, Any]:
    trainer = Trainer(plan.task, plan.first(seed))
    folder = Path(tempfile.mkdtemp(prefix="ckptz-restarts-"))
    sizes, weights, seconds, training, n_trials, raw = [], [], [], [], [], 0
    saver = saver_of(folder, trainer, arm, plan)
    try:
        if plan.lead:
            saver.maybe_save(trainer.step)
            trainer.train(plan.lead)
        for index in range(plan.n_checkpoints):
            if index:
                trains = functools.partial(trainer.train, plan.task.interval)
                training.append(cpu_seconds(trains)[1])
            _, spent = cpu_seconds(functools.partial(saver.save, trainer.step))
            report = saver.wait()
            assert report is not None
            raw = report.tensor_bytes
            sizes.append(report.stored_bytes)
            weights.append((folder / f"step-{trainer.step:08d}.ckptz").stat().st_size)
            seconds.append(spent)
            n_trials.append(len(report.search.trials) if report.search else 0)
            if index in plan.failures:  # continue as a new process would
                saver.close()
                saver = saver_of(folder, trainer, arm, plan)
                saver.restore(trainer.step)
    finally:
        saver.close()
        shutil.rmtree(folder)
    return {
        "raw_bytes": raw,
        "sizes": sizes,
        "raw_weight_bytes": sum(t.nbytes for t in trainer.model.state_dict().values()),
        "weight_sizes": weights,
        "encode_cpu_s": seconds,
        "training_cpu_s": training,
        "n_trials": n_trials,
        "n_restarts": len(plan.failures),
    } | quality(trainer)


def saver_of(folder: Path, trainer: Trainer, arm: Arm, plan: Plan) -> Checkpointer:
    """Create the Checkpointer of an arm for the model and optimizer of a trainer."""
    budget = None if arm.budget is None else _budget(trainer.task, arm.budget)
    return Checkpointer(
        folder,
        trainer.model,
        trainer.optimizer,
        config=arm.config,
        base=plan.base if arm.from_base else None,
        budget=budget,
        keep=KEEP_ALL,
        full_every=arm.full_every,
        restores=arm.restores,
        every=plan.task.interval,
        background=False,
        jobs=plan.jobs,
    )


def _budget(task: Task, drop: float) -> Budget:
    """Create a budget of the per-example losses on the search slice; `drop` is relative to their mean."""
    model = task.model().to(DEVICE)

    def measured(state: Mapping[str, Tensor]) -> Tensor:
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        return task.answers(model, SEARCH)["loss"]

    return Budget(measured, drop, metric="loss")


# --- tables -------------------------------------------------------------------------------------


def rows_of(plan: Plan, arms: Sequence[str], seed: int, *, only_known: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm, and one for chance; arms that are not cached are measured, or left out."""
    if only_known and not plan.end_path(seed).exists():
        return
    exact = exact_end(plan, seed)
    if seed:
        yield _row(plan, DISTURBED, seed, exact, exact_end(plan, 0))
    for name in arms:
        if not only_known or _path(plan, name, seed).exists():
            yield _row(plan, name, seed, arm_end(plan, name, seed), exact)


def _row(plan: Plan, arm: str, seed: int, end: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"task": plan.task.name, "arm": arm, "seed": seed}
    for part in (HELD_OUT, SEARCH):
        row[f"loss_change_percent, {part}"] = 100 * (end[part]["loss"] / exact[part]["loss"] - 1)
    row["accuracy_change_points"] = 100 * (end[HELD_OUT]["accuracy"] - exact[HELD_OUT]["accuracy"])
    for content, prefix in (("state", ""), ("weights", "weight_")):
        raw, sizes = end.get(f"raw_{prefix}bytes", math.nan), end.get(f"{prefix}sizes", [math.nan] * 2)
        row[f"{content}_raw_mb"] = raw / 1e6
        row[f"{content}_ratio_with_full"] = raw * len(sizes) / sum(sizes)
        row[f"{content}_ratio_of_deltas"] = raw * (len(sizes) - 1) / sum(sizes[1:])
    encoding, training = (end.get(f"{work}_cpu_s", [math.nan] * 2)[1:] for work in ("encode", "training"))
    row["encode_percent_of_training"] = 100 * float(np.median(encoding) / np.median(training))
    n_trials = end.get("n_trials", [0])
    row["evaluations_of_a_search"] = (
        f"{n_trials[0]}, then {np.median(n_trials[1:]):g}" if any(n_trials) else ""
    )
    return row | {"n_restarts": end.get("n_restarts", 0)}


def by_seed(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield one row for each task and arm, with the numbers of all seeds."""
    for (task, arm), group in itertools.groupby(rows, key=lambda row: (row["task"], row["arm"])):
        seeds = list(group)
        is_run = bool(seeds[0]["n_restarts"])

        def each(name: str, form: str, rows: Sequence[Row] = seeds) -> str:
            return " / ".join(format(row[name], form) for row in rows)

        def mean(name: str, rows: Sequence[Row] = seeds) -> float:
            return statistics.mean(float(str(row[name])) for row in rows)

        yield {
            "run": task,
            "arm": arm,
            "seeds": ", ".join(str(row["seed"]) for row in seeds),
            "smaller, with full files": f"{mean('state_ratio_with_full'):.1f}x" if is_run else "",
            "deltas alone": f"{mean('state_ratio_of_deltas'):.1f}x" if is_run else "",
            "restarts": seeds[0]["n_restarts"] or "",
            "loss at the end, %": each("loss_change_percent, held out", "+.2f"),
            "mean": f"{mean('loss_change_percent, held out'):+.2f}",
            "other slice, %": each("loss_change_percent, search", "+.2f"),
            "accuracy, points": each("accuracy_change_points", "+.2f"),
        }


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--task", nargs="+", choices=sorted(PLANS), default=list(PLANS))
    parser.add_argument("--arm", nargs="+", default=list(ARMS), help="all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="measure nothing, write the cached results")
    parser.add_argument("--quick", action="store_true", help="a toy model, to check that everything runs")
    options = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    plans = [toy()] if options.quick else [PLANS[name]() for name in options.task]
    rows: list[Row] = []
    for plan in plans:
        plan_rows = []
        for seed in options.seeds:
            for row in rows_of(plan, options.arm, seed, only_known=options.report):
                plan_rows.append({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})
                print(plan_rows[-1], flush=True)
        rows += sorted(plan_rows, key=lambda row: [DISTURBED, *options.arm].index(str(row["arm"])))
    if options.report:
        save_rows("restarts", rows)
        save_rows("restarts_by_seed", list(by_seed(rows)))
        finish("restarts", machine())


if __name__ == "__main__":
    main()
