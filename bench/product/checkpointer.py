"""Seconds that a save blocks a training loop, and that its background writer adds to the steps.

    python -m bench.product.checkpointer [--rounds N] [--small]

A transformer is trained on the CPU with AdamW (0.2 GB of weights and moments) and saved every few steps. The
same loop runs with torch.save, with `torch.distributed.checkpoint.async_save` and with `ckptz.Checkpointer`,
each in a separate process, round after round. The total of a method includes all steps and the wait for its
last save. ckptz syncs its files to the disk and keeps two steps, lossless or by `Grid()` with `exact=0`; the
other methods do neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from bench.core.measure import Row, machine, misses, parser_of, save_rows, verdict
from bench.core.report import finish
from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy

CONFIGS: Final = {"ckptz": LOSSLESS, "ckptz, Grid()": Grid()}
METHODS: Final = ("none", "torch.save", "dcp.async_save", *CONFIGS)
TOTAL_TARGET: Final = 1.05  # of the better of the two others
WIDTH, LAYERS, VOCABULARY, LENGTH, BATCH = 512, 5, 4096, 64, 4
N_STEPS, SAVE_EVERY = 90, 30


# --- the loop -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """Measurements of one process.

    Attributes:
        alone: seconds of each step during which no writer was busy.
        beside: seconds of each step during which a background writer was busy.
        stalls: seconds that each save blocked the loop.
        total: seconds of all steps and saves, including the wait for the last save.
        state_bytes: bytes of the weights and both moments.
        stored_bytes: bytes of all files at the end.
    """

    alone: list[float]
    beside: list[float]
    stalls: list[float]
    total: float
    state_bytes: int
    stored_bytes: int


class Language(nn.Module):
    """A small transformer on random tokens; only the duration of its steps matters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Saver:
    """Saves the state of a training loop with one of the methods."""

    def __init__(self, method: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._future: Any = None
        config = CONFIGS.get(method, LOSSLESS)
        keep = KeepPolicy(last=2, exact=0 if config.is_lossy else 1)
        self._ckptz = Checkpointer(folder / "ckptz", model, optimizer, config=config, keep=keep)
        self.save: Callable[[int], None] = {
            "none": lambda step: None,
            "torch.save": self._torch_save,
            "dcp.async_save": self._dcp_save,
            **dict.fromkeys(CONFIGS, self._ckptz.save),
        }[method]

    def _torch_save(self, step: int) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save(state, self._folder / f"{step}.pt")

    def _dcp_save(self, step: int) -> None:
        self.wait()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        self._future = dcp.async_save(state, checkpoint_id=self._folder / str(step))

    @property
    def is_busy(self) -> bool:
        """True while a background writer is running."""
        running = self._ckptz._writer._running
        is_writing = running is not None and not running.is_done
        return is_writing or (self._future is not None and not self._future.done())

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._future is not None:
            self._future.result()
        self._ckptz.wait()


def train(method: str, folder: Path, width: int, n_steps: int, save_every: int) -> Loop:
    """Train and save with one method, and return the measurements."""
    torch.manual_seed(0)
    model = Language(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    saver = Saver(method, folder, model, optimizer)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))

    def one_step() -> None:
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # The first save allocates buffers and compiles kernels; it is not measured.
    one_step()
    saver.save(0)
    saver.wait()
    alone, beside, stalls = [], [], []
    begin = time.perf_counter()
    for step in range(1, n_steps + 1):
        was_busy, start = saver.is_busy, time.perf_counter()
        one_step()
        (beside if was_busy else alone).append(time.perf_counter() - start)
        if step % save_every == 0:
            start = time.perf_counter()
            saver.save(step)
            stalls.append(time.perf_counter() - start)
    saver.wait()
    total = time.perf_counter() - begin
    n_bytes = sum(p.nbytes for p in model.parameters()) * 3
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Loop(alone, beside, stalls, total, n_bytes, stored)


def in_process(*arguments: object) -> Any:
    """Run this module with `arguments` in a new process, and return the JSON that it prints."""
    command = [sys.executable, "-m", "bench.product.checkpointer", *map(str, arguments)]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(process.stdout.splitlines()[-1])


def stall_rows(rounds: int, small: bool) -> list[Row]:
    """Run all methods in each round, in rotating order, and return a row for each method."""
    sizes = (64, 12, 4) if small else (WIDTH, N_STEPS, SAVE_EVERY)
    loops: dict[str, list[Loop]] = {method: [] for method in METHODS}
    for i in range(rounds):
        for method in METHODS[i % len(METHODS) :] + METHODS[: i % len(METHODS)]:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                measurements = in_process("--loop", method, "--folder", folder, "--sizes", *sizes)
            loops[method].append(Loop(**measurements))
    best_stall = min(median_stall(loops[m]) for m in ("torch.save", "dcp.async_save"))
    best_total = min(median_total(loops[m]) for m in ("torch.save", "dcp.async_save"))
    return [stall_row(method, loops[method], best_stall, best_total) for method in METHODS]


def median_stall(loops: list[Loop]) -> float:
    """Return the median seconds that a save blocks the loop."""
    return statistics.median([stall for loop in loops for stall in loop.stalls])


def median_total(loops: list[Loop]) -> float:
    """Return the median total seconds of a loop."""
    return statistics.median([loop.total for loop in loops])


def stall_row(method: str, loops: list[Loop], best_stall: float, best_total: float) -> Row:
    """Build the row of one method."""
    alone = [second for loop in loops for second in loop.alone]
    beside = [second for loop in loops for second in loop.beside] or alone
    stall, total = median_stall(loops), median_total(loops)
    is_ours = method in CONFIGS
    return {
        "method": method,
        "state, MB": f"{loops[0].state_bytes / 1e6:.0f}",
        "stall, ms": f"{stall * 1e3:.0f}" if method != "none" else "",
        "step alone, median ms": f"{statistics.median(alone or beside) * 1e3:.0f}",
        "step beside the writer, median ms": f"{statistics.median(beside) * 1e3:.0f}",
        "p95 ms": f"{percentile(beside, 0.95) * 1e3:.0f}",
        "total, s": f"{total:.1f}",
        "of the better": f"{total / best_total:.2f}",
        "target": f"stall no longer, total at most {TOTAL_TARGET}" if is_ours else "",
        "verdict": verdict(stall <= best_stall and total <= TOTAL_TARGET * best_total) if is_ours else "",
    }


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of all values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    """Run the command line; return 1 if a target was missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, to check that everything runs; writes no results"
    )
    for name in ("--loop", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        print(json.dumps(asdict(train(options.loop, Path(options.folder), *options.sizes))))
        return 0
    rows = stall_rows(options.rounds, options.small)
    if options.small:
        print(*rows, sep="\n")
        return 0
    save_rows("checkpointer_stall", rows)
    finish("checkpointer", machine(), rows)
    return 1 if misses(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
