"""Effect of lost or quantized first moments on the loss of restarted runs.

    python -m bench.studies.momentum [--task NAME ...] [--arm NAME ...] [--report]

The runs and restarts are those of bench.studies.restarts and bench.studies.encoder. At each restart, only
the first moments of weights of two or more dimensions are changed, in memory; second moments, weights and all
other tensors stay exact. Arms:

    lost             first moments are set to zero
    moved at once    first moments are set to zero, and the update that they would still have caused is
                     applied to the weights: rate * b1 / (1 - b1) * m / (sqrt(v) + eps), with both bias
                     corrections
    nearest, 1       rounding to the nearest multiple of the root of the second moment, dead zone 0.35
    drawn, STEP      stochastic rounding to multiples of STEP times the root of the second moment

Bits are the entropy of the codes of all changed elements, with one table for each restart. Results are cached
in bench/.cache/restarts; --report writes the cached results.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bench.core.measure import Row, machine, parser_of, save_rows
from bench.core.report import finish
from bench.studies import encoder
from bench.studies.restarts import PLANS as OTHERS
from bench.studies.restarts import Plan, exact_end, fine_tune, quality
from bench.studies.tasks import HELD_OUT, SEARCH
from bench.studies.training import N_THREADS, Trainer, remembered

DEAD_ZONE: Final = 0.35
LOST, AT_ONCE, NEAREST = "lost", "moved at once", "nearest, 1"
ARMS: Final = (LOST, AT_ONCE, NEAREST, *(f"drawn, {step}" for step in (1, 4, 8, 16, 64)))
PLANS: Final = {"language": OTHERS["language"], "fine-tune": fine_tune, "encoder": encoder.plan}


def entropy_bits(codes: Sequence[Tensor]) -> float:
    """Return the bits per code of an ideal coder with one table for all codes."""
    values = torch.cat([tensor.flatten() for tensor in codes]).to(torch.int64)
    counts = np.bincount(values.add(1 << 20).numpy())
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def change_moments(trainer: Trainer, arm: str, generator: torch.Generator) -> float:
    """Change the first moments of all weight matrices as an arm requires; return the bits per element."""
    codes = []
    with torch.no_grad():
        for group in trainer.optimizer.param_groups:
            for weight in group["params"]:
                state = trainer.optimizer.state[weight]
                first, root = state["exp_avg"], state["exp_avg_sq"].sqrt()
                if weight.dim() < 2:
                    continue
                if arm == AT_ONCE:
                    weight -= _remaining_update(group, first, root, trainer.step)
                code = _codes(torch.where(root > 0, first / root, 0.0), arm, generator)
                codes.append(code)
                first.copy_(code * root * (_step_of(arm) or 0.0))
    return entropy_bits(codes)


def _remaining_update(group: Mapping[str, Any], first: Tensor, root: Tensor, step: int) -> Tensor:
    decay, squares_decay = group["betas"]
    unbiased = root / (1 - squares_decay**step) ** 0.5
    scale = group["lr"] * decay / (1 - decay) / (1 - decay**step)
    return scale * first / (unbiased + group["eps"])


def _step_of(arm: str) -> float | None:
    return None if arm in (LOST, AT_ONCE) else float(arm.split(", ")[1])


def _codes(ratios: Tensor, arm: str, generator: torch.Generator) -> Tensor:
    step = _step_of(arm)
    if step is None:
        return torch.zeros_like(ratios)
    if arm == NEAREST:
        return ratios.sign() * torch.floor((ratios.abs() / step + 0.5 - DEAD_ZONE).clamp(min=0))
    return torch.floor(ratios / step + torch.rand(ratios.shape, generator=generator))


def restarted(plan: Plan, arm: str) -> dict[str, Any]:
    """Run a plan with first moments changed at each restart; return bits per element and final quality."""
    trainer, bits, generator = Trainer(plan.task, plan.first(0)), [], torch.Generator().manual_seed(5)
    trainer.train(plan.lead)
    for index in range(plan.n_checkpoints):
        if index:
            trainer.train(plan.task.interval)
        if index in plan.failures:
            bits.append(change_moments(trainer, arm, generator))
    return {"bits": bits} | quality(trainer)


def row_of(plan: Plan, arm: str, *, only_known: bool) -> Row | None:
    """Return the row of an arm, or None if it is not cached and `only_known` is set."""
    path = plan.folder / f"momentum-{arm.replace(', ', '_').replace(' ', '_')}.json"
    if only_known and not path.exists():
        return None
    exact, end = exact_end(plan, 0), remembered(path, functools.partial(restarted, plan, arm))
    loss = {part: 100 * (end[part]["loss"] / exact[part]["loss"] - 1) for part in (HELD_OUT, SEARCH)}
    points = 100 * (end[HELD_OUT]["accuracy"] - exact[HELD_OUT]["accuracy"])
    return {
        "run": plan.task.name,
        "first moments": arm,
        "restarts": len(plan.failures),
        "bits an element": f"{np.mean(end['bits']):.3f}",
        "loss, held out": f"{loss[HELD_OUT]:+.2f} %",
        "other slice": f"{loss[SEARCH]:+.2f} %",
        "accuracy, points": f"{points:+.2f}",
    }


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--task", nargs="+", choices=sorted(PLANS), default=list(PLANS))
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--report", action="store_true", help="measure nothing, write the cached results")
    options = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    rows = []
    for task in options.task:
        plan = PLANS[task]()
        for arm in options.arm:
            row = row_of(plan, arm, only_known=options.report)
            if row is not None:
                rows.append(row)
                print(row, flush=True)
    if options.report:
        save_rows("momentum", rows)
        finish("momentum", machine(), rows)


if __name__ == "__main__":
    main()
