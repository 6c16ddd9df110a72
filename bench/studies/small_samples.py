"""Searches with few examples: how often the measured loss change of the file exceeds the limit.

    python -m bench.studies.small_samples

A GPT of 0.1 M parameters is trained for 150 steps. An example is the loss of one byte of validation text.
For each number of examples, five samples are drawn, and a file is searched for each at a budget of 0.5 %,
with the default rule and with `allow_unsure`. A file is *beyond the limit* if its mean loss on the sample
changed by more than the budget. *Held out* is the change of the mean loss on 16,384 other bytes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file
from torch import Tensor

import ckptz
from bench.core.measure import Row, machine, parser_of, save_rows
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, loss_of, read_corpus, token_losses
from ckptz.torch import load_file

MODEL: Final = GPTConfig(n_layers=1, width=96)
N_STEPS, RATE, BATCH = 150, 2e-3, 16
N_EXAMPLES: Final = (50, 200, 500, 2000)
N_SAMPLES, BUDGET = 5, 0.005

State = Mapping[str, Tensor]


def trained(data: Tensor) -> TinyGPT:
    """Train the model on a text, uint8 [n]."""
    torch.manual_seed(0)
    model = TinyGPT(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    source = batches(data, batch=BATCH, context=MODEL.context, seed=1)
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(model, next(source)).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
    return model


def losses_of(state: State, data: Tensor, n_batches: int) -> Tensor:
    """Return the loss of each byte [n] of fixed validation batches, for weights by name."""
    model = TinyGPT(MODEL)
    model.load_state_dict(state)
    return token_losses(model, data, n_batches=n_batches)


def searched(plain: Path, data: Tensor, n: int, *, allow_unsure: bool) -> list[tuple[float, float]]:
    """Search with each sample of `n` bytes; return mean changes on the sample and on held-out bytes."""
    exact, changes = losses_of(load_plain(plain), data, 6), []
    for seed in range(N_SAMPLES):
        sample = torch.randperm(2 * 32 * MODEL.context, generator=torch.Generator().manual_seed(seed))[:n]
        quality = lambda state, sample=sample: losses_of(state, data, 2)[sample]  # noqa: E731
        budget = ckptz.Budget(quality, BUDGET, allow_unsure=allow_unsure)
        output = plain.with_name("out.ckptz")
        (report,) = ckptz.compress(plain, output, budget=budget, force=True)
        restored = losses_of(load_file(output), data, 6)
        held_out = slice(2 * 32 * MODEL.context, None)
        changes.append(
            (
                float(restored[sample].mean() / exact[sample].mean() - 1),
                float(restored[held_out].mean() / exact[held_out].mean() - 1),
            )
        )
        print(n, allow_unsure, report.ratio, changes[-1], len(report.search.trials), flush=True)
    return changes


def row(n: int, plain: Path, data: Tensor, *, allow_unsure: bool) -> Row:
    """Build the row of all searches with `n` examples under one rule."""
    changes = searched(plain, data, n, allow_unsure=allow_unsure)
    return {
        "examples": n,
        "rule": "--allow-unsure" if allow_unsure else "default",
        "searches": len(changes),
        "beyond the limit, exit code 0": sum(abs(change) > BUDGET for change, _ in changes),
        "without loss, exit code 6": sum(change == 0 for change, _ in changes),
        "largest change": f"{100 * max(abs(change) for change, _ in changes):.2f} %",
        "held out, mean": f"{100 * statistics.mean(abs(change) for _, change in changes):.2f} %",
        "held out, largest": f"{100 * max(abs(change) for _, change in changes):.2f} %",
    }


def main() -> None:
    """Run the command line."""
    parser_of(__doc__).parse_args()
    train, validation = read_corpus()
    with tempfile.TemporaryDirectory(prefix="ckptz-samples-") as folder:
        plain = Path(folder, "model.safetensors")
        save_file(dict(trained(train).state_dict()), plain)
        rules = [(n, unsure) for unsure in (False, True) for n in N_EXAMPLES]
        rows = [row(n, plain, validation, allow_unsure=unsure) for n, unsure in rules]
    save_rows("small_samples", rows)
    finish("small_samples", machine())


if __name__ == "__main__":
    main()
