"""Realistic training runs that restart from lossy checkpoints until the end of their schedules.

    python -m bench.studies.user_runs [--run NAME ...] [--arm NAME ...] [--seeds N ...] [--report]

The models are a GPT of 1.4 M parameters on words (a vocabulary of 4,096, many of them rare) with AdamW; its
fine-tunes on other texts, whose words are rare or missing in the base run, also with Lion and Muon; and a
network on distorted characters and handwritten digits, with SGD and Nesterov momentum, and with Adam. Each
arm saves through one `ckptz.Checkpointer`, which is created just before the first save, restores the file
that it has just written, and continues. "10 of 30" saves every 10 steps and restores every 30. Ratios are
fp32 weights and optimizer tensors / all files of weights and state, including the full file. Runs on which a
constant was chosen (`CHOSEN_ON`) are not reported.

For each run, the table has the loss at the end against the uninterrupted run, the loss of the last file
against the weights in memory, and the largest restored first moment relative to the bound by its restored
second moment. Seeds above 0 disturb the first state by a hundredth of each tensor's spread, also in the exact
run; the row "disturbed, exact" shows the effect of chance. Results are cached in bench/.cache/user_runs;
--report writes the cached results. An arm takes one to two CPU minutes.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import math
import re
import shutil
import statistics
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from bench.core.measure import CACHE, RESULTS, Row, cpu_seconds, machine, parser_of, save_rows, verdict
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, read_corpus
from bench.studies import tasks
from bench.studies.restarts import ARMS, Plan, quality, quoted_in, saver_of
from bench.studies.tasks import HELD_OUT, SEARCH, Batch, Glyphs, Task
from bench.studies.training import N_THREADS, Trainer, remembered
from ckptz import Checkpointer

WORDS: Final = GPTConfig(n_layers=2, width=128, n_heads=4, context=32, vocabulary=4096)
BATCH, EVAL_BATCH, EVAL_BATCHES = 16, 64, 8
VALIDATION: Final = 10  # one page in ten is for validation
N_STEPS, SEEN = 600, 330  # steps of a run from scratch, and steps before its first checkpoint
TUNING_STEPS, TUNING_RATE = 150, 3e-4
EXACT, DISTURBED = "exact", "disturbed, exact"
DEFAULTS: Final = ("grid, default", "grid, again")  # two executions of the same settings
COARSER: Final = ("grid, default", "grid, all steps doubled", "grid, all steps times 4")
CHOSEN_ON: Final = (
    "source, 10 of 30",
    "source, 30",
    "source, 90",
    "docstrings, 5 of 15",
    "docstrings, 15",
    "docstrings, Muon",
    "docstrings, Lion",
    "characters, SGD",
)
Text = Callable[[], tuple[list[str], list[str]]]


# --- texts: lists of words for training and for validation -----------------------------------------


def _words(pages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Assign pages to training or validation by hash, and split each into words, spaces and signs."""
    parts: tuple[list[str], list[str]] = ([], [])
    for page in pages:
        is_validation = hashlib.sha256(page.encode()).digest()[0] % VALIDATION == 0
        parts[is_validation].extend(re.findall(r"\w+|\s|[^\w\s]", page))
    return parts


@functools.cache
def source() -> tuple[list[str], list[str]]:
    """Read the source of Python's standard library."""
    text = bytes(torch.cat(read_corpus()).numpy()).decode("utf-8", "replace")
    return _words(text[i : i + 20_000] for i in range(0, len(text), 80_000))


@functools.cache
def docstrings() -> tuple[list[str], list[str]]:
    """Read the docstrings of Python's standard library."""
    text = bytes(torch.cat(read_corpus()).numpy()).decode("utf-8", "replace")
    return _words(quoted_in(text))


@functools.cache
def headers() -> tuple[list[str], list[str]]:
    """Read the C++ headers in the torch package."""
    root = Path(torch.__file__).parent / "include" / "c10"
    return _words(path.read_text("utf-8", "replace") for path in sorted(root.rglob("*.h")))


@functools.cache
def licences() -> tuple[list[str], list[str]]:
    """Read the descriptions and licences of the installed packages."""
    site = Path(torch.__file__).parents[1]
    paths = [*site.glob("*.dist-info/METADATA"), *site.glob("*.dist-info/**/LICENSE*")]
    return _words(path.read_text("utf-8", "replace") for path in sorted(paths) if path.is_file())


@functools.cache
def _numbers() -> Mapping[str, int]:
    """Number the most frequent words of all training texts from 1; all other words are 0."""
    counts: collections.Counter[str] = collections.Counter()
    for text in (source, docstrings, headers, licences):
        counts.update(text()[0])
    return {word: i + 1 for i, (word, _) in enumerate(counts.most_common(WORDS.vocabulary - 1))}


@functools.cache
def _tokens(text: Text) -> tuple[Tensor, Tensor]:
    path = CACHE / "user_runs" / f"{text.__name__}.pt"
    if not path.exists():
        numbers = _numbers()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([torch.tensor([numbers.get(word, 0) for word in part]) for part in text()], path)
    train, validation = torch.load(path)
    return train, validation


def _batch(text: Text, step: int) -> Batch:
    tokens = next(batches(_tokens(text)[0], batch=BATCH, context=WORDS.context, seed=3, start=step))
    return tokens[:, :-1], tokens[:, 1:]


@functools.cache
def _slices(text: Text, part: str) -> tuple[Batch, ...]:
    source = batches(_tokens(text)[1], batch=EVAL_BATCH, context=WORDS.context, seed=5 + (part == SEARCH))
    windows = [next(source) for _ in range(EVAL_BATCHES)]
    return tuple((tokens[:, :-1], tokens[:, 1:]) for tokens in windows)


class Lion(torch.optim.Optimizer):
    """Sign of momentum as in arXiv 2302.06675, algorithm 2, with the authors' settings for language."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.95, 0.98), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                moment = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(moment.lerp(gradient, 1 - first).sign_(), alpha=group["lr"])
                moment.lerp_(gradient, 1 - second)


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices and Adam for all else, as in the optimizers of arXiv 2502.16982."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for parameter in parameters:
            is_hidden = parameter.ndim == 2 and max(parameter.shape) < WORDS.vocabulary
            (matrices if is_hidden else others).append(parameter)
        groups = [{"params": matrices, "momentum": 0.95}, {"params": others, "betas": (0.9, 0.95)}]
        super().__init__(groups, {"lr": TUNING_RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            update = _orthogonal_update if "momentum" in group else _adam_update
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(update(self.state[parameter], parameter.grad, group), alpha=group["lr"])


def _orthogonal_update(state: dict[str, Any], gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Add a gradient [m, n] to its momentum and return the update, nearly orthogonal, RMS 0.2."""
    decay = group["momentum"]
    moment = state.setdefault("momentum_buffer", torch.zeros_like(gradient)).mul_(decay).add_(gradient)
    update = gradient + decay * moment
    is_tall = update.shape[0] > update.shape[1]
    update = update.T if is_tall else update
    update = update / (update.norm() + 1e-7)
    for _ in range(5):  # Newton-Schulz iterations with the coefficients of Muon's author
        product = update @ update.T
        update = 3.4445 * update + (2.0315 * product @ product - 4.7750 * product) @ update
    return 0.2 * math.sqrt(max(update.shape)) * (update.T if is_tall else update)


def _adam_update(state: dict[str, Any], gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Add a gradient to its moments and return the update; all have one shape."""
    first, second = group["betas"]
    state["step"] = state.setdefault("step", torch.tensor(0.0)) + 1
    mean = state.setdefault("exp_avg", torch.zeros_like(gradient)).lerp_(gradient, 1 - first)
    square = state.setdefault("exp_avg_sq", torch.zeros_like(gradient)).lerp_(gradient.square(), 1 - second)
    step = float(state["step"])
    return mean / (1 - first**step) / ((square / (1 - second**step)).sqrt() + 1e-8)


# --- runs -------------------------------------------------------------------------------------------


def _on_words(text: Text, interval: int) -> Task:
    """Create the task of a GPT on words, from scratch, with AdamW and a cosine schedule."""
    return Task(
        name=text.__name__,
        budgeted="loss",
        moments=("exp_avg", "exp_avg_sq"),
        first_step=SEEN,
        interval=interval,
        model=lambda: TinyGPT(WORDS),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1),
        rate=tasks.warmup_cosine(1e-3, 30, N_STEPS),
        batch=functools.partial(_batch, text),
        slices=functools.partial(_slices, text),
    )


def _tuned(base: Text, text: Text, interval: int) -> Task:
    """Create the task of a fine-tune after a run on `base`, with torch's default AdamW and linear decay."""
    return replace(
        _on_words(text, interval),
        name=f"{text.__name__}, after {base.__name__}",
        first_step=interval,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        rate=lambda step: TUNING_RATE * max(0.0, 1 - step / TUNING_STEPS),
    )


def _tuned_by_muon(base: Text, text: Text, interval: int) -> Task:
    """Create the task of a fine-tune with Muon."""
    return replace(
        _tuned(base, text, interval),
        moments=("momentum_buffer", "exp_avg", "exp_avg_sq"),
        optimizer=lambda model: Muon(model.parameters()),
    )


def _tuned_by_lion(base: Text, text: Text, interval: int) -> Task:
    """Create the task of a fine-tune with Lion, at a third of AdamW's rate."""
    task = _tuned(base, text, interval)
    return replace(
        task,
        moments=("exp_avg",),
        optimizer=lambda model: Lion(model.parameters()),
        rate=lambda step: task.rate(step) / 3,
    )


@functools.cache
def _state_at(text: Text, step: int) -> Mapping[str, Tensor]:
    """Return the state at a step of the uninterrupted run from scratch."""
    return _trained(_on_words(text, 30), step)


def _trained(task: Task, step: int) -> Mapping[str, Tensor]:
    path = CACHE / "user_runs" / f"{task.name.replace(', ', '-')}-{step}.pt"
    if not path.exists():
        trainer = Trainer(task)
        trainer.train(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(trainer.state(), path)
    state: Mapping[str, Tensor] = torch.load(path)
    return state


def scratch(text: Text, interval: int, saves: int = 1) -> Plan:
    """Plan training from scratch from step `SEEN` to its end; a restart after every `saves` saves."""
    n = (N_STEPS - SEEN) // interval + 1
    return Plan(_on_words(text, interval), n, tuple(range(0, n - 1, saves)), _state_at(text, SEEN))


def fine_tune(
    base: Text, text: Text, interval: int, saves: int = 1, tuned: Callable[[Text, Text, int], Task] = _tuned
) -> Plan:
    """Plan a fine-tune from its first checkpoint to its end; a restart after every `saves` saves."""
    task, n = tuned(base, text, interval), TUNING_STEPS // interval
    trainer = Trainer(task)
    trainer.model.load_state_dict(
        {k.removeprefix("model."): v for k, v in _state_at(base, N_STEPS).items() if k.startswith("model.")}
    )
    trainer.train(interval)
    return Plan(task, n, tuple(range(0, n - 1, saves)), trainer.state())


def greek() -> tuple[Tensor, Tensor]:
    """Draw Greek letters in the fonts that have them."""
    codes = range(0x391, 0x3CA)
    letters = "".join(chr(code) for code in codes if unicodedata.category(chr(code))[0] == "L")
    drawn = tasks.glyphs(letters, tuple(font for font in tasks.FONTS if not font.startswith("cm")))
    return drawn, drawn


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return handwritten digits: the first 120 of each digit for training and the next 50 for evaluation."""
    from sklearn.datasets import load_digits  # only these runs need it

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    images = functional.pad(functional.interpolate(images, scale_factor=4, mode="bilinear"), (4,) * 4)[:, 0]
    by_class = torch.stack([images[data.target == digit][:170] for digit in range(10)], 1)
    return by_class[:120], by_class[120:]


def pictures(drawn: Glyphs, optimizer: str, n_steps: int) -> Plan:
    """Plan a run from the middle of training on distorted images to its end."""
    is_sgd = optimizer == "SGD"
    seen, interval = n_steps // 2, n_steps // 20

    def create(model: torch.nn.Module) -> torch.optim.Optimizer:
        if is_sgd:
            return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
        return torch.optim.Adam(model.parameters(), 1e-3)

    task = replace(
        tasks.image(drawn),
        name=f"{drawn.__name__}, {optimizer}",
        first_step=seen,
        interval=interval,
        moments=("momentum_buffer",) if is_sgd else ("exp_avg", "exp_avg_sq"),
        optimizer=create,
        rate=tasks.warmup_cosine(0.05 if is_sgd else 1e-3, 30, n_steps),
    )
    n = (n_steps - seen) // interval + 1
    return Plan(task, n, tuple(range(n - 1)), _trained(task, seen))


RUNS: Final[Mapping[str, Callable[[], Plan]]] = {
    "source, 10 of 30": lambda: scratch(source, 10, saves=3),
    "source, 30": lambda: scratch(source, 30),
    "source, 90": lambda: scratch(source, 90),
    "docstrings, 5 of 15": lambda: fine_tune(source, docstrings, 5, saves=3),
    "docstrings, 15": lambda: fine_tune(source, docstrings, 15),
    "docstrings, Muon": lambda: fine_tune(source, docstrings, 15, tuned=_tuned_by_muon),
    "docstrings, Lion": lambda: fine_tune(source, docstrings, 15, tuned=_tuned_by_lion),
    "characters, SGD": lambda: pictures(tasks.characters, "SGD", 300),
    "headers, 10": lambda: scratch(headers, 10),
    "headers, 10 of 30": lambda: scratch(headers, 10, saves=3),
    "headers, 30": lambda: scratch(headers, 30),
    "headers, 90": lambda: scratch(headers, 90),
    "licences, 5 of 15": lambda: fine_tune(headers, licences, 5, saves=3),
    "licences, 15": lambda: fine_tune(headers, licences, 15),
    "licences, 30": lambda: fine_tune(headers, licences, 30),
    "licences, Muon": lambda: fine_tune(headers, licences, 15, tuned=_tuned_by_muon),
    "licences, Lion": lambda: fine_tune(headers, licences, 15, tuned=_tuned_by_lion),
    "Greek, SGD": lambda: pictures(greek, "SGD", 600),
    "digits, SGD": lambda: pictures(digits, "SGD", 300),
    "digits, Adam": lambda: pictures(digits, "Adam", 300),
}


# --- arms -------------------------------------------------------------------------------------------


def end_of(name: str, arm: str, seed: int, *, only_known: bool) -> dict[str, Any] | None:
    """Return the result of an arm, measured if it is not cached; None if `only_known` and not cached."""
    path = _path(name, arm, seed)
    if only_known and not path.exists():
        return None
    return remembered(path, lambda: _measured(_plan(name), arm, seed))


@functools.lru_cache(1)
def _plan(name: str) -> Plan:
    return RUNS[name]()


def _measured(plan: Plan, arm: str, seed: int) -> dict[str, Any]:
    if arm != EXACT:
        with contextlib.ExitStack() as stack:
            for name, stand_in in ARMS[arm].replaced.items():
                stack.enter_context(mock.patch(name, stand_in))
            return _restarted(plan, arm, seed)
    trainer = Trainer(plan.task, plan.first(seed))
    trainer.train(plan.task.interval * (plan.n_checkpoints - 1))
    return quality(trainer)


def _path(name: str, arm: str, seed: int) -> Path:
    folder = CACHE / "user_runs" / name.replace(", ", "-").replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{arm.replace(', ', '-').replace(' ', '_')}-{seed}.json"


def _restarted(plan: Plan, arm: str, seed: int) -> dict[str, Any]:
    trainer, folder = Trainer(plan.task, plan.first(seed)), Path(tempfile.mkdtemp(prefix="ckptz-user-runs-"))
    end: dict[str, Any] = {"sizes": [], "encode_cpu_s": [], "training_cpu_s": [], "beyond": [], "notes": []}
    for group in trainer.optimizer.param_groups:  # as a scheduler of torch sets it
        group["initial_lr"] = max(map(plan.task.rate, range(trainer.step + 1)))
    saver: Checkpointer = saver_of(folder, trainer, ARMS[arm], plan)
    try:
        for index in range(plan.n_checkpoints):
            if index:
                trains = functools.partial(trainer.train, plan.task.interval)
                end["training_cpu_s"].append(cpu_seconds(trains)[1])
            if index + 1 == plan.n_checkpoints:
                end |= quality(trainer)
            _, spent = cpu_seconds(functools.partial(saver.save, trainer.step))
            report = saver.wait()
            assert report is not None
            end["raw_bytes"] = report.tensor_bytes
            end["sizes"].append(report.stored_bytes)
            end["encode_cpu_s"].append(spent)
            end["notes"] = [*report.notes]
            if index in plan.failures or index + 1 == plan.n_checkpoints:
                saver.restore(trainer.step)
                end["beyond"].append(_beyond(trainer))
        end["last_file"] = trainer.evaluate(HELD_OUT).loss
    finally:
        saver.close()
        shutil.rmtree(folder)
    return end | {"n_restarts": len(plan.failures)}


def _beyond(trainer: Trainer) -> float:
    """Return the largest |first moment| / sqrt(second moment), relative to its bound by Cauchy-Schwarz."""
    largest = 0.0
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            state = trainer.optimizer.state[parameter]
            if "exp_avg_sq" not in state:
                continue
            (b1, b2), step = group["betas"], float(state["step"])
            decay = b1 * b1 / b2
            bound = (1 - b1) * math.sqrt((1 - decay**step) / ((1 - b2) * (1 - decay)))
            first, root = state["exp_avg"].double().abs(), state["exp_avg_sq"].double().sqrt()
            ratios = torch.where(first > 0, first / root, 0.0)
            largest = max(largest, float(ratios.max()) / bound)
    return largest


# --- tables -----------------------------------------------------------------------------------------


def rows_of(name: str, arms: Iterable[str], seeds: Iterable[int], *, only_known: bool) -> Iterator[Row]:
    """Yield a row for each arm and seed, and one for chance."""
    for seed in seeds:
        exact = end_of(name, EXACT, seed, only_known=only_known)
        if exact is None:
            continue
        if seed and (first := end_of(name, EXACT, 0, only_known=only_known)) is not None:
            yield _row(name, DISTURBED, seed, exact, first)
        for arm in arms:
            if (end := end_of(name, arm, seed, only_known=only_known)) is not None:
                yield _row(name, arm, seed, end, exact)


def _row(name: str, arm: str, seed: int, end: Mapping[str, Any], exact: Mapping[str, Any]) -> Row:
    loss, exact_loss = end[HELD_OUT]["loss"], exact[HELD_OUT]["loss"]
    row: dict[str, object] = {
        "run": name,
        "used": "to choose" if name in CHOSEN_ON else "to report",
        "arm": arm,
        "seed": seed,
        "loss, uninterrupted": f"{exact_loss:.4f}",
        END: f"{100 * (loss / exact_loss - 1):+.3f}",
        "other slice, %": f"{100 * (end[SEARCH]['loss'] / exact[SEARCH]['loss'] - 1):+.3f}",
    }
    sizes = end.get("sizes")
    if not sizes:
        return row | dict.fromkeys(_SIZES, "")
    spent = statistics.median(end["encode_cpu_s"][1:]) / statistics.median(end["training_cpu_s"])
    measured = (
        end["n_restarts"],
        f"{end['raw_bytes'] / 1e6:.2f}",
        f"{end['raw_bytes'] * len(sizes) / sum(sizes):.1f}x",
        f"{end['raw_bytes'] * (len(sizes) - 1) / sum(sizes[1:]):.1f}x",
        f"{100 * (end['last_file'] / loss - 1):+.3f}",
        f"{max(end['beyond']):.2f}",
        f"{100 * spent:.1f}",
    )
    return row | dict(zip(_SIZES, measured, strict=True))


END, SMALLER, DELTAS, LAST_FILE = "end, %", "smaller", "deltas alone", "last file, %"
BOUND: Final = "first moments, of their bound"
_SIZES: Final = ("restarts", "state, MB", SMALLER, DELTAS, LAST_FILE, BOUND, "encoding, % of training")


def wanted_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield a row for each target of the reported runs, with the measured value."""
    runs = reported(rows)
    kinds = {
        "fine-tunes": [row for row in runs if re.match(r"licences, \d", str(row["run"]))],
        "language from scratch": [row for row in runs if str(row["run"]).startswith("headers")],
        "images, SGD": [row for row in runs if str(row["run"]).endswith("SGD")],
    }
    disturbed = (row for row in rows if row["arm"] == DISTURBED and str(row["run"]).endswith("SGD"))
    chance = max((abs(number(row, END)) for row in disturbed), default=0.0)
    goals = {"fine-tunes": (180, 0.2), "language from scratch": (110, 0.3), "images, SGD": (40, 0.5 + chance)}
    bound = max(number(row, BOUND) for row in rows if row[BOUND])
    yield _wanted("largest restored first moment, of its bound", "<= 1", f"{bound:.2f}", bound <= 1.005)
    for kind, (ratio, most) in goals.items():
        least = min(number(row, DELTAS) for row in kinds[kind])
        ends = [number(row, END) for row in kinds[kind]]
        yield _wanted(
            f"{kind}: deltas, end",
            f">= {ratio}x, <= {most:+.2f} %",
            f"{least:.1f}x at least, {min(ends):+.2f} to {max(ends):+.2f} %",
            least >= ratio and max(ends) <= most,
        )
    for name, column, most in (("last file alone", LAST_FILE, 0.1), ("worst end of all", END, 0.5)):
        worst = max(number(row, column) for row in runs)
        yield _wanted(name, f"<= {most:+.1f} %", f"{worst:+.2f} %", worst <= most)


def _wanted(name: str, wanted: str, measured: str, is_met: bool) -> Row:
    return {"what": name, "wanted": wanted, "measured": measured, "verdict": verdict(is_met)}


def reported(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with default settings of the runs on which no constant was chosen."""
    return [row for row in rows if row["used"] == "to report" and row["arm"] in DEFAULTS]


def number(row: Row, column: str) -> float:
    """Parse the number in a cell."""
    return float(str(row[column]).rstrip("x"))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the loss change of each run over its ratio, with lines through the arms of coarser steps."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, run_rows in itertools.groupby(reported(rows), lambda row: str(row["run"])):
        points = [(number(row, SMALLER), number(row, END)) for row in run_rows]
        (markers,) = axes.plot(*zip(*points, strict=True), "o", label=name)
        steps = [row for row in rows if (row["run"], row["seed"]) == (name, 0) and row["arm"] in COARSER]
        points = sorted((number(row, SMALLER), number(row, END)) for row in steps)
        axes.plot(*zip(*points, strict=True), ".-", color=markers.get_color(), linewidth=1)
    axes.axhline(0, color="0.7", linewidth=1)
    axes.set(xlabel="times smaller, full file included", ylabel="loss at the end, %")
    axes.set_title("Runs restarted from lossy files, against the same run uninterrupted", fontsize=11)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--run", nargs="+", choices=sorted(RUNS), default=list(RUNS))
    parser.add_argument("--arm", nargs="+", default=list(DEFAULTS[:1]))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="measure nothing, write the cached results")
    options = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    rows: list[Row] = []
    for name in options.run:
        for row in rows_of(name, options.arm, options.seeds, only_known=options.report):
            rows.append(row)
            print(row, flush=True)
    if options.report:
        save_rows("user_runs", rows)
        save_rows("user_runs_wanted", list(wanted_rows(rows)))
        draw(rows, RESULTS / "user_runs.png")
        finish("user_runs", machine())


if __name__ == "__main__":
    main()
