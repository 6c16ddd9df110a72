"""124 M parameters, trained from scratch on a GPU and restarted from lossy files; one arm a run.

    python -m bench.studies.scale [--arm NAME] [--tiny]

The shape is that of GPT-2 small. The text is the source of Python's standard library, and a token two bytes
of it: the 25,599 pairs that are most frequent, and one for all others. AdamW with b2 = 0.95; 14 checkpoints,
100 steps apart, of which ten are restarted from. A run trains its reference too, and takes less than ten
minutes on an H100 if what its arithmetic says holds: no run of it on a GPU has been made. It puts its row
into results/scale.csv, where all others say "not measured". Throughput of whole saves at 1.5 B parameters is
`python -m bench.gpu save`.

`--tiny` runs an arm on this machine's CPU with a model that is far smaller, and writes no results.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.core.measure import RESULTS, Row, machine, parser_of, read_rows, save_rows, table, verdict
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, read_corpus
from bench.gpu import GPT2_SMALL, TRAIN_BATCH
from bench.studies.restarts import Plan, rows_of
from bench.studies.tasks import SEARCH, Batch, Task, warmup_cosine
from bench.studies.training import FAILURES, N_CHECKPOINTS, Trainer

FIRST, EVERY = 300, 100
TARGETS: Final = {  # what is stored, at least so many times smaller, at most so many percent of loss
    "grid, default": ("state", 60, 0.5),
    "grid, weights": ("weights", 20, 1.0),
    "k-means, search 5 %, weights": ("weights", 20, 1.0),
}
TINY: Final = GPTConfig(n_layers=1, width=32, n_heads=2, context=32, vocabulary=GPT2_SMALL.vocabulary)
NOT_MEASURED: Final = "not measured"


def as_tokens(text: Tensor, frequent: Sequence[int]) -> Tensor:
    """Tokens of a text of bytes, two a token; the last token stands for all pairs that are not frequent."""
    pairs = _pairs(text)
    table = np.full(1 << 16, len(frequent), np.int64)
    table[np.asarray(frequent)] = np.arange(len(frequent))
    return torch.from_numpy(table[pairs])


def _pairs(text: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return text[: len(text) // 2 * 2].numpy().view(np.uint16)


@functools.cache
def corpus() -> tuple[Tensor, Tensor]:
    """(training tokens, validation tokens)."""
    train, validation = read_corpus()
    counts = np.bincount(_pairs(train), minlength=1 << 16)
    frequent = np.argsort(-counts, kind="stable")[: GPT2_SMALL.vocabulary - 1]
    return as_tokens(train, frequent), as_tokens(validation, frequent)


def task(config: GPTConfig, device: str, first: int, every: int) -> Task:
    """Training from scratch."""

    def drawn(tokens: Tensor, seed: int, start: int) -> Batch:
        source = batches(tokens, batch=TRAIN_BATCH, context=config.context, seed=seed, start=start)
        found = next(source).to(device)
        return found[:, :-1], found[:, 1:]

    return Task(
        name=f"gpt-{config.width}",
        budgeted="loss",
        moments=("exp_avg", "exp_avg_sq"),
        first_step=first,
        interval=every,
        model=lambda: TinyGPT(config).to(device),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1),
        rate=warmup_cosine(6e-4, first // 3, first + N_CHECKPOINTS * every),
        batch=lambda step: drawn(corpus()[0], 1, step),
        slices=lambda part: [drawn(corpus()[1], 2 if part == SEARCH else 3, i) for i in range(4)],
    )


def plan(
    config: GPTConfig, device: str, *, first: int = FIRST, every: int = EVERY, n: int = N_CHECKPOINTS
) -> Plan:
    """The run with its checkpoints; what comes before the first is trained at once."""
    own = task(config, device, first, every)
    trainer = Trainer(own)
    trainer.train(first)
    failures = tuple(i for i in FAILURES if i < n - 1)
    return Plan(own, n, failures, trainer.state(), jobs=os.cpu_count() or 1)


def row(arm: str, found: Mapping[str, float]) -> Row:
    """An arm's row: how small its files are, and how its end differs from that of the reference."""
    what, least, most = TARGETS[arm]
    ratio, change = found[f"{what}_ratio_with_anchor"], found["loss_change_percent, held out"]
    return {
        "arm": arm,
        "of": {"state": "weights and moments", "weights": "weights"}[what],
        "raw MB": f"{found[f'{what}_raw_mb']:.0f}",
        "smaller, with anchor": f"{ratio:.1f}x",
        "deltas alone": f"{found[f'{what}_ratio_of_deltas']:.1f}x",
        "restarts": found["n_restarts"],
        "loss at the end": f"{change:+.2f} %",
        "accuracy, points": f"{found['accuracy_change_points']:+.2f}",
        "target": f">= {least}x, <= {most} %",
        "verdict": verdict(ratio >= least and change <= most),
    }


def with_row(rows: Iterable[Row], measured: Row | None) -> list[Row]:
    """All arms: those that were measured before, this one, and which were not."""
    known = {str(one["arm"]): one for one in (*rows, *([] if measured is None else [measured]))}
    empty = dict.fromkeys(("raw MB", "smaller, with anchor", "deltas alone", "restarts"), "")
    empty |= dict.fromkeys(("loss at the end", "accuracy, points"), "")
    return [
        known.get(arm)
        or {
            "arm": arm,
            "of": {"state": "weights and moments", "weights": "weights"}[what],
            **empty,
            "target": f">= {least}x, <= {most} %",
            "verdict": NOT_MEASURED,
        }
        for arm, (what, least, most) in TARGETS.items()
    ]


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--arm", choices=list(TARGETS), default=next(iter(TARGETS)))
    parser.add_argument("--tiny", action="store_true", help="a toy on this machine's CPU; keeps no results")
    given = parser.parse_args()
    if given.tiny:
        own = plan(TINY, "cpu", first=3, every=1, n=4)
        shutil.rmtree(own.folder)
    elif torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        own = plan(GPT2_SMALL, "cuda")
    else:
        sys.exit("bench.studies.scale: no CUDA device; --tiny tries an arm without one")
    [found] = rows_of(own, [given.arm], 0, only_known=False)
    print(found)
    if given.tiny:
        print(table([row(given.arm, found)]))
        return
    before = read_rows("scale") if (RESULTS / "scale.csv").exists() else []
    rows = with_row((one for one in before if one["verdict"] != NOT_MEASURED), row(given.arm, found))
    save_rows("scale", rows)
    finish("scale", machine() | {"gpu": torch.cuda.get_device_name()}, rows)


if __name__ == "__main__":
    main()
