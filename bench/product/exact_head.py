"""A lossy run whose newest step is exact: bytes on disk after so many steps, and what the residuals cost.

    python -m bench.product.exact_head [--long] [--small]

The state is synthetic: four square matrices with their biases, 1.05 M parameters. A real AdamW moves them
under gradients that pull towards a point that drifts, with as much noise; five updates lie between two saves.
A real run moves otherwise, so the ratios of the lossy files are this state's own.

*bytes*: one run with `config=Grid()` in which every step stays. At each mark its newest step gets residuals,
and a dry prune says what a rule leaves. *seconds*: CPU time of a save on one thread, median of the first
14 steps, the first one left out; steps of the arms alternate.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import nn

from bench.core.measure import Row, cpu_seconds, machine, parser_of, save_rows
from bench.core.report import finish
from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy
from ckptz.methods.method import Method
from ckptz.store.retention import prune_folder
from ckptz.training.checkpointer import SaveReport

WIDTH: Final = 512
MARKS: Final = (14, 100)
LONG: Final = 1000
UPDATES: Final = 5
ARMS: Final[dict[str, tuple[Method, int]]] = {
    "lossless": (LOSSLESS, 1),
    "lossy": (Grid(), 0),
    "lossy, newest step exact": (Grid(), 1),
}
RULES: Final = {"last=5": 5, "all": None}


class Training:
    """Parameters that AdamW moves, and nothing that takes long."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        shapes = [(width, width), (width,)] * 4
        self.model = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._goal = [torch.randn(shape) * 0.02 for shape in shapes]

    def train(self) -> None:
        """Take the updates between two saves."""
        for _ in range(UPDATES):
            for parameter, goal in zip(self.model, self._goal, strict=True):
                goal += torch.randn_like(goal) * 2e-4
                pull = parameter.detach() - goal
                parameter.grad = pull + torch.randn_like(pull) * pull.std()
            self.optimizer.step()

    def checkpointer(self, folder: Path, config: Method, keep: KeepPolicy) -> Checkpointer:
        """Save on this thread alone, so that its CPU seconds are those of saving."""
        return Checkpointer(
            folder, self.model, self.optimizer, config=config, keep=keep, background=False, jobs=1
        )


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the time of a block."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def saved(checkpointer: Checkpointer, step: int) -> SaveReport:
    """Save a step; its report."""
    checkpointer.save(step)
    report = checkpointer.wait()
    assert report is not None
    return report


def second_rows(width: int, n_steps: int) -> list[Row]:
    """CPU seconds and bytes of a save in each arm."""
    training = Training(width)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    reports: dict[str, list[SaveReport]] = {arm: [] for arm in ARMS}
    with scratch() as folder, contextlib.ExitStack() as held:
        savers = {
            arm: held.enter_context(training.checkpointer(folder / arm, config, KeepPolicy(exact=exact)))
            for arm, (config, exact) in ARMS.items()
        }
        for step in range(1, n_steps + 1):
            training.train()
            for arm, saver in savers.items():
                report, spent = cpu_seconds(lambda s=saver, n=step: saved(s, n))  # type: ignore[misc]
                seconds[arm].append(spent)
                reports[arm].append(report)
    return [
        {
            "arm": arm,
            "raw, MB a step": f"{found[-1].tensor_bytes / 1e6:.2f}",
            "lossy or lossless files, MB": f"{_mean(r.stored_bytes - r.exact_bytes for r in found[1:]):.3f}",
            "residuals, MB": f"{_mean(r.exact_bytes for r in found[1:]):.3f}",
            "CPU seconds a save": f"{statistics.median(seconds[arm][1:]):.2f}",
        }
        for arm, found in reports.items()
    ]


def _mean(n_bytes: Iterator[int]) -> float:
    return statistics.mean(n_bytes) / 1e6


def byte_rows(width: int, marks: list[int]) -> list[Row]:
    """What is on the disk after each mark, by keep rule, with and without residuals of the newest step."""
    training, rows = Training(width), []
    with scratch() as folder:
        for first, last in itertools.pairwise([0, *marks]):
            for steps, exact in ((range(first + 1, last), 0), (range(last, last + 1), 1)):
                with training.checkpointer(folder, Grid(), KeepPolicy(last=None, exact=exact)) as saver:
                    for step in steps:
                        training.train()
                        report = saved(saver, step)
            for name, n_kept in RULES.items():
                rows.append(_byte_row(folder, last, name, n_kept, report.tensor_bytes))
    return rows


def _byte_row(folder: Path, n_steps: int, name: str, n_kept: int | None, raw: int) -> Row:
    raw *= min(n_steps, n_kept or n_steps)
    rules = {exact: KeepPolicy(last=n_kept, exact=exact) for exact in (0, 1)}
    kept = {e: prune_folder(folder, rule, dry_run=True).kept_bytes for e, rule in rules.items()}
    return {
        "steps": n_steps,
        "keep": name,
        "raw, MB": f"{raw / 1e6:.1f}",
        "lossy, MB": f"{kept[0] / 1e6:.2f}",
        "smaller": f"{raw / kept[0]:.1f}x",
        "residuals of the newest, MB": f"{(kept[1] - kept[0]) / 1e6:.2f}",
        "with them, MB": f"{kept[1] / 1e6:.2f}",
        "with them, smaller": f"{raw / kept[1]:.1f}x",
    }


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--long", action="store_true", help=f"{LONG} steps too: about an hour")
    parser.add_argument("--small", action="store_true", help="sizes that say nothing; writes no results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.small:
        print(*second_rows(64, 3), *byte_rows(64, [2, 7]), sep="\n")
        return 0
    seconds = second_rows(WIDTH, MARKS[0])
    save_rows("exact_head_seconds", seconds)
    save_rows("exact_head_bytes", byte_rows(WIDTH, [*MARKS, *[LONG] * options.long]))
    finish("exact_head", machine(), seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
