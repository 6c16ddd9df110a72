"""Training that restarts from lossy checkpoints, against the same run uninterrupted.

    python -m bench.studies.restarts [--task NAME ...] [--arm NAME ...] [--seeds N] [--report] [--quick]

Each arm saves through `ckptz.Checkpointer`, restores the file it has just written at each failure, and trains
on; so movement that a file loses is lost for good. Everything is counted: the files of weights and of state,
full file included, against fp32 weights and the optimizer's tensors. Tasks:

    language     3.3 M parameters, AdamW, 14 checkpoints 260 steps apart, 10 restarts
    image        1.2 M parameters, SGD with momentum, 14 checkpoints, 10 restarts
    fine-tune    the end of the language run goes on with the docstrings of the same files: AdamW with
                 b2 = 0.999, rate 3e-4 falling to 0, 10 checkpoints 15 steps apart, 9 restarts
    foreign      the same with another language, the C++ headers that torch brings with it
    headers      the language run itself, from the start, on these headers

Seeds above 0 disturb the first state by a hundredth of each tensor's spread, of the exact run as well; the
row "disturbed, exact" is the end of that exact run against that of seed 0, so what chance alone does. Rows
are kept in bench/.cache/restarts, so that several processes can take arms; --report writes what is there.
About 15 CPU minutes an arm of language.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
FINE: Final = 1 / 32  # of a step: far below what could be measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How checkpoints are stored, and which parts of a state a restart takes from the file.

    Attributes:
        config: of the Checkpointer.
        full_every: of the Checkpointer.
        restores: of the Checkpointer.
        budget: what a search at each checkpoint keeps, as a relative change of the loss, or None.
        from_base: whether full files are stored against the weights that training began from.
        replaced: what stands in for parts of ckptz, by their names: a mechanism that is left out.
    """

    config: Method
    full_every: int = 16
    restores: int | None = None
    budget: float | None = None
    from_base: bool = False
    replaced: Mapping[str, object] = field(default_factory=dict)


def grid(step: float, second: float = MOMENTS.second_step, first: float = MOMENTS.first_step) -> Grid:
    """Whole states on a grid of this step."""
    return Grid(step=step, moments=replace(MOMENTS, second_step=second, first_step=first))


def _fitted(grid: Any, counted: Any, most: int, levels: LinearTable) -> TensorPlan:
    """Plan a weight to resume from with fitted levels, as one to ship, instead of multiples of the step."""
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
    "grid, first 10": Arm(config=grid(1.0, first=10.0)),
    "grid, nearest rounding": Arm(config=Grid(purpose="ship")),
    "grid, full files as coarse": Arm(config=Grid(full_step=0.5)),
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
    """A task with its checkpoints.

    Attributes:
        task: what is trained.
        n_checkpoints: of the run.
        failures: indices of those that training restarts from.
        start: the state that it begins with, at the first checkpoint; None for the cached run's own.
        base: the weights that training began from, where that is a fine-tune.
        jobs: threads that save.
        lead: steps from the start to the first checkpoint, which the run sees.
    """

    task: Task
    n_checkpoints: int = N_CHECKPOINTS
    failures: tuple[int, ...] = FAILURES
    start: State | None = field(default=None, repr=False)
    base: Path | None = None
    jobs: int = N_THREADS
    lead: int = 0

    def first(self, seed: int) -> State:
        """The state of the first checkpoint; of seeds above 0 disturbed."""
        state = Run(self.task).state(0) if self.start is None else self.start
        return disturbed(state, seed) if seed else state

    @property
    def folder(self) -> Path:
        """Give the folder of the rows."""
        return folder_of(self.task)

    def end_path(self, seed: int) -> Path:
        """Give the file of the end of the run that nothing interrupts."""
        return self.folder / f"exact-{seed}.json"


def folder_of(task: Task) -> Path:
    """Make the folder of everything about a task, if it is not there, and give it."""
    folder = CACHE / "restarts" / task.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# --- the fine-tune ------------------------------------------------------------------------------


@functools.cache
def docstrings() -> tuple[Tensor, Tensor]:
    """(training bytes, validation bytes) of the docstrings in the corpus, which the base run saw as code."""
    train, validation = (b"\n\n".join(_prose(bytes(part.numpy()))) for part in read_corpus())
    return tuple(torch.from_numpy(np.frombuffer(t, np.uint8).copy()) for t in (train, validation))  # type: ignore[return-value]


def _prose(source: bytes) -> Iterator[bytes]:
    return (quoted.encode() for quoted in quoted_in(source.decode("utf-8", "replace")))


def quoted_in(source: str) -> list[str]:
    """Docstrings of more than 200 characters."""
    return [quoted for quoted in source.split('"""')[1::2] if len(quoted) > 200]


@functools.cache
def headers() -> tuple[Tensor, Tensor]:
    """(training bytes, validation bytes) of torch's headers in C++, of which each tenth file validates."""
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
    found = [next(source) for _ in range(8)]
    return tuple((tokens[:, :-1], tokens[:, 1:]) for tokens in found)


def on_headers() -> Task:
    """The language run on C++ headers."""
    return replace(
        language(),
        name="headers",
        batch=lambda step: text_batch(headers()[0], step),
        slices=functools.cache(lambda part: text_slices(headers()[1], part)),
    )


def _tuning_rate(step: int) -> float:
    return FINE_TUNE_RATE * max(0.0, 1 - step / (FINE_TUNE_EVERY * (FINE_TUNE_CHECKPOINTS + 1)))


def fine_tune(name: str = "fine-tune", texts: Texts = docstrings) -> Plan:
    """The end of the language run, on other texts: training and validation bytes."""
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
    trainer.train(1)  # so that there is state of the optimizer
    last, lead = FINE_TUNE_CHECKPOINTS - 1, FINE_TUNE_EVERY - 1
    plan = Plan(task, FINE_TUNE_CHECKPOINTS, tuple(range(last)), trainer.state(), lead=lead)
    path = plan.folder / "base.safetensors"
    publish(path, lambda p: save_file(weights, p))
    return replace(plan, base=path)


def toy() -> Plan:
    """A few steps of a toy, to see that everything runs."""
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
    """Quality at the last checkpoint of a run that nothing interrupts: a cached one, or one made here."""

    def train() -> dict[str, Any]:
        if plan.start is None and not seed:
            return {part: Run(plan.task).facts(N_CHECKPOINTS - 1)[part] for part in (SEARCH, HELD_OUT)}
        trainer = Trainer(plan.task, plan.first(seed))
        trainer.train(plan.lead + plan.task.interval * (plan.n_checkpoints - 1))
        return quality(trainer)

    return remembered(plan.end_path(seed), train)


def quality(trainer: Trainer) -> dict[str, Any]:
    """Loss and accuracy on both slices."""
    found = {part: trainer.evaluate(part) for part in (SEARCH, HELD_OUT)}
    return {part: {"loss": one.loss, "accuracy": one.accuracy} for part, one in found.items()}


def arm_end(plan: Plan, name: str, seed: int) -> dict[str, Any]:
    """The same of a run that restarts from files, and their sizes."""
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
            if index in plan.failures:  # a new process goes on
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
    """Make the Checkpointer of an arm, for what a trainer holds."""
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
    """A budget of the losses of single answers, on the slice of searches; `drop` is a share of their mean."""
    model = task.model().to(DEVICE)

    def measured(state: Mapping[str, Tensor]) -> Tensor:
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        return task.answers(model, SEARCH)["loss"]

    return Budget(measured, drop, metric="loss")


# --- tables -------------------------------------------------------------------------------------


def rows_of(plan: Plan, arms: Sequence[str], seed: int, *, only_known: bool) -> Iterator[dict[str, Any]]:
    """A row for each arm, and one for chance alone; what the cache lacks is measured, or left out."""
    if only_known and not plan.end_path(seed).exists():
        return
    exact = exact_end(plan, seed)
    if seed:
        yield _row(plan, DISTURBED, seed, exact, exact_end(plan, 0))
    for name in arms:
        if not only_known or _path(plan, name, seed).exists():
            yield _row(plan, name, seed, arm_end(plan, name, seed), exact)


def _row(
    plan: Plan, arm: str, seed: int, found: Mapping[str, Any], exact: Mapping[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {"task": plan.task.name, "arm": arm, "seed": seed}
    for part in (HELD_OUT, SEARCH):
        row[f"loss_change_percent, {part}"] = 100 * (found[part]["loss"] / exact[part]["loss"] - 1)
    row["accuracy_change_points"] = 100 * (found[HELD_OUT]["accuracy"] - exact[HELD_OUT]["accuracy"])
    both = [
        (found.get(f"raw_{what}bytes", math.nan), found.get(f"{what}sizes", [math.nan] * 2))
        for what in ("", "weight_")
    ]
    for what, (raw, sizes) in zip(("state", "weights"), both, strict=True):
        row[f"{what}_raw_mb"] = raw / 1e6
        row[f"{what}_ratio_with_full"] = raw * len(sizes) / sum(sizes)
        row[f"{what}_ratio_of_deltas"] = raw * (len(sizes) - 1) / sum(sizes[1:])
    encoding, training = (found.get(f"{what}_cpu_s", [math.nan] * 2)[1:] for what in ("encode", "training"))
    row["encode_percent_of_training"] = 100 * float(np.median(encoding) / np.median(training))
    n_trials = found.get("n_trials", [0])
    row["evaluations_of_a_search"] = (
        f"{n_trials[0]}, then {np.median(n_trials[1:]):g}" if any(n_trials) else ""
    )
    return row | {"n_restarts": found.get("n_restarts", 0)}


def by_seed(rows: Sequence[Row]) -> Iterator[Row]:
    """Give one row for each task and arm, with the figures of all seeds."""
    for (task, arm), found in itertools.groupby(rows, key=lambda row: (row["task"], row["arm"])):
        own = list(found)
        is_run = bool(own[0]["n_restarts"])

        def each(name: str, form: str, rows: Sequence[Row] = own) -> str:
            return " / ".join(format(row[name], form) for row in rows)

        def mean(name: str, rows: Sequence[Row] = own) -> float:
            return statistics.mean(float(str(row[name])) for row in rows)

        yield {
            "run": task,
            "arm": arm,
            "seeds": ", ".join(str(row["seed"]) for row in own),
            "smaller, with full files": f"{mean('state_ratio_with_full'):.1f}x" if is_run else "",
            "deltas alone": f"{mean('state_ratio_of_deltas'):.1f}x" if is_run else "",
            "restarts": own[0]["n_restarts"] or "",
            "loss at the end, %": each("loss_change_percent, held out", "+.2f"),
            "mean": f"{mean('loss_change_percent, held out'):+.2f}",
            "other slice, %": each("loss_change_percent, search", "+.2f"),
            "accuracy, points": each("accuracy_change_points", "+.2f"),
        }


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--task", nargs="+", choices=sorted(PLANS), default=list(PLANS))
    parser.add_argument("--arm", nargs="+", default=list(ARMS), help="all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="measure nothing, write what the cache holds")
    parser.add_argument("--quick", action="store_true", help="a toy, to see that everything runs")
    given = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    plans = [toy()] if given.quick else [PLANS[name]() for name in given.task]
    rows: list[Row] = []
    for plan in plans:
        own = []
        found = (rows_of(plan, given.arm, seed, only_known=given.report) for seed in given.seeds)
        for row in itertools.chain.from_iterable(found):
            own.append({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})
            print(own[-1], flush=True)
        rows += sorted(own, key=lambda row: [DISTURBED, *given.arm].index(str(row["arm"])))
    if given.report:
        save_rows("restarts", rows)
        save_rows("restarts_by_seed", list(by_seed(rows)))
        finish("restarts", machine())


if __name__ == "__main__":
    main()
