"""Cost of an exact newest step in a lossy run: bytes on disk by number of steps, and bytes of residual files.

    python -m bench.product.exact_head [--steps 14 100 1000] [--small]

The state is synthetic: four square matrices and their biases, 0.26 M parameters, updated by AdamW with
gradients towards a drifting point and noise of the same size, five updates between two saves. The ratios of
the lossy files hold for this state only; real training moves weights differently. Each arm saves and keeps
all steps. After the steps of `--steps`, a dry run of prune counts the bytes that a keep rule would leave.
Seconds are CPU seconds of a save on one thread, median of all steps but the first; the arms alternate.

A second table has the size of a residual: states of a small GPT under AdamW are saved with the grid method
every 60 steps, and the last state again without loss, as a full file and as a delta to its lossy file. CPU
seconds are the best of five.
"""

from __future__ import annotations

import contextlib
import functools
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
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, loss_of, read_corpus
from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy, inspect
from ckptz.codec.method import Method
from ckptz.run.prune import prune_folder
from ckptz.torch import load_state, save_state
from ckptz.training.checkpointer import SaveReport

WIDTH: Final = 256
MARKS: Final = (14, 100, 1000)
UPDATES: Final = 5
N_LOSSY, BETWEEN = 4, 60  # lossy files of the second table, steps
ARMS: Final[dict[str, tuple[Method, int]]] = {
    "lossless": (LOSSLESS, 1),
    "lossy": (Grid(), 0),
    "lossy, newest step exact": (Grid(), 1),
}
RULES: Final = {"last=5": 5, "all": None}


class Training:
    """Parameters under AdamW with synthetic gradients, so that updates are fast."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        shapes = [(width, width), (width,)] * 4
        self.model = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._goal = [torch.randn(shape) * 0.02 for shape in shapes]

    def train(self) -> None:
        """Run the updates between two saves."""
        for _ in range(UPDATES):
            for parameter, goal in zip(self.model, self._goal, strict=True):
                goal += torch.randn_like(goal) * 2e-4
                pull = parameter.detach() - goal
                parameter.grad = pull + torch.randn_like(pull) * pull.std()
            self.optimizer.step()

    def checkpointer(self, folder: Path, config: Method, keep: KeepPolicy) -> Checkpointer:
        """Return a Checkpointer that saves on the calling thread only, whose CPU seconds are measured."""
        return Checkpointer(
            folder, self.model, self.optimizer, config=config, keep=keep, background=False, jobs=1
        )


def saved(checkpointer: Checkpointer, step: int) -> SaveReport:
    """Save a step and return its report."""
    checkpointer.save(step)
    report = checkpointer.wait()
    assert report is not None
    return report


def measured(width: int, marks: list[int]) -> Iterator[Row]:
    """Yield a row for each mark, arm and keep rule: bytes on disk, and CPU seconds of a save."""
    training = Training(width)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        savers = {
            arm: stack.enter_context(
                training.checkpointer(folder / arm, config, KeepPolicy(last=None, exact=exact))
            )
            for arm, (config, exact) in ARMS.items()
        }
        for step in range(1, max(marks) + 1):
            training.train()
            for arm, saver in savers.items():
                report, spent = cpu_seconds(lambda s=saver, n=step: saved(s, n))  # type: ignore[misc]
                seconds[arm].append(spent)
            for arm in ARMS if step in marks else ():
                for name, n_kept in RULES.items():
                    sizes = _size_cells(folder / arm, n_kept, step, report.tensor_bytes)
                    spent = statistics.median(seconds[arm][1:])
                    yield {"arm": arm, "steps": step, "keep": name, **sizes, "CPU s a save": f"{spent:.2f}"}


def _size_cells(folder: Path, n_kept: int | None, n_steps: int, raw: int) -> Row:
    raw *= min(n_steps, n_kept or n_steps)
    stored, without_residuals = (
        prune_folder(folder, KeepPolicy(last=n_kept, exact=exact), dry_run=True).kept_bytes
        for exact in (1, 0)
    )
    return {
        "raw, MB": f"{raw / 1e6:.1f}",
        "on disk, MB": f"{stored / 1e6:.2f}",
        "of these residuals, MB": f"{(stored - without_residuals) / 1e6:.2f}",
        "smaller": f"{raw / stored:.2f}x",
    }


def residual_rows() -> Iterator[Row]:
    """Yield bytes and CPU seconds of a lossless state, as a full file and as a delta to its lossy file."""
    torch.manual_seed(0)
    model = TinyGPT(GPTConfig(n_layers=3, width=192))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    data = batches(read_corpus()[0], batch=16, context=128, seed=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder, lossy = Path(temporary), None
        for index in range(N_LOSSY):
            for _ in range(BETWEEN):
                optimizer.zero_grad()
                loss_of(model, next(data)).backward()
                optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            base, lossy = lossy, folder / f"{index}.ckptz"
            save_state(state, lossy, config=Grid(), base=base, jobs=1)
        file = folder / "exact.ckptz"
        for name, base in (("by itself", None), ("against its lossy file", lossy)):
            save = functools.partial(save_state, state, file, base=base, jobs=1)
            write = [cpu_seconds(save) for _ in range(5)]
            read = [cpu_seconds(functools.partial(load_state, file, jobs=1)) for _ in range(5)]
            yield {
                "residual": name,
                "raw, MB": f"{inspect(file).tensor_bytes / 1e6:.1f}",
                "file, MB": f"{file.stat().st_size / 1e6:.2f}",
                "write, CPU s": f"{min(spent for _, spent in write):.3f}",
                "read, CPU s": f"{min(spent for _, spent in read):.3f}",
            }


def main() -> int:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=list(MARKS), help="steps after which the folder is measured"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, to check that everything runs; writes no results"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.small:
        print(*measured(64, [2, 7]), sep="\n")
        return 0
    save_rows("exact_head_ways", list(residual_rows()))
    rows = list(measured(WIDTH, options.steps))
    save_rows("exact_head", rows)
    finish("exact_head", machine(), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
