"""Train a small GPT, save, compress and restore its checkpoints, and resume training from them.

    make demo                        three to four minutes on two cores
    python -m bench.demo --quick     a toy model and a few steps, to check that everything runs

A byte-level GPT is trained on the source of the Python standard library and saves six checkpoints with its
optimizer state. Each method of `methods.py` compresses and restores all of them. Training then resumes from a
restored checkpoint, and its losses are compared with a resume from the uncompressed one. The exit code is 1
if a lossless method changed a bit or a number is missing. The table is printed; checkpoints, demo.png and
demo.json are in the output folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.core.tiny_gpt import read_corpus
from bench.demo.methods import (
    METHODS,
    Method,
    calibration_path,
    restored_path,
    store,
    warm_up,
    zstd_for_scale,
)
from bench.demo.report import Report, Row, draw, print_table, problems, write_json
from bench.demo.training import BATCH, QUICK, Resumption, Settings, Trainer, resume, threads

BYTES_PER_PARAMETER = 12  # fp32, three times: the weight and its two moments


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training run: its checkpoints in order, and the loss of every step."""

    files: list[Path]
    steps: list[int]
    losses: list[float]
    n_parameters: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="output folder (default: demo-output)"
    )
    parser.add_argument("--quick", action="store_true", help="a toy model and a few steps")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    report = run(QUICK if options.quick else Settings(), options.out, console)
    print_table(report, console)
    draw(report, options.out / "demo.png")
    write_json(report, options.out / "demo.json")
    console.print(f"{report.total_seconds:.0f} s in all; see {options.out / 'demo.png'} and demo.json; try")
    console.print(
        f"  .venv/bin/ckptz inspect {options.out}/ckptz-lossless/step-{report.resume_step:04d}.ckptz"
    )
    failures = problems(report)
    for failure in failures:
        console.print(f"FAILED: {failure}", style="red")
    return 1 if failures else 0


def run(settings: Settings, out: Path, console: Console) -> Report:
    """Train, store the checkpoints with each method, resume, and return all measurements."""
    begin = time.perf_counter()
    n_threads, other_threads = thread_counts()
    data = read_corpus()
    with threads(n_threads):
        training = train(settings, data[0], fresh_folder(out / "uncompressed"), console)
    state_bytes = BYTES_PER_PARAMETER * training.n_parameters
    checkpoint = training.files[settings.resume_index]

    def resumed(path: Path, n_threads: int = n_threads) -> Resumption:
        console.print(f"training on from {path}, torch threads: {n_threads}")
        return resume(load_file(path), settings, data, n_threads)

    def method_row(method: Method) -> Row:
        console.print(f"compressing and restoring {len(training.files)} checkpoints: {method.name}")
        folder = fresh_folder(out / method.name.replace(" ", "-"))
        storage = store(method, training.files, folder, state_bytes)
        resumption = resumed(restored_path(checkpoint, folder))
        return Row(name=method.name, is_lossless=method.is_lossless, resumption=resumption, storage=storage)

    exact_resume, noise = resumed(checkpoint), resumed(checkpoint, other_threads)
    first_use = warm_up(METHODS[0], training.files)
    rows = [
        Row(name="uncompressed", is_lossless=True, resumption=exact_resume),
        Row(name=f"same, torch threads: {other_threads}", is_lossless=False, resumption=noise),
        *map(method_row, METHODS),
    ]
    return Report(
        rows=rows,
        steps=training.steps,
        resume_step=training.steps[settings.resume_index],
        training=training.losses,
        state_bytes=state_bytes,
        plain_bytes=[path.stat().st_size for path in training.files],
        zstd=zstd_for_scale(training.files),
        first_use_seconds=first_use,
        total_seconds=time.perf_counter() - begin,
    )


def train(settings: Settings, data: Tensor, folder: Path, console: Console) -> Run:
    """Train from scratch, and save a checkpoint and a calibration every `settings.steps_between` steps."""
    trainer = Trainer(settings.model, data)
    files, steps, losses = [], [], []
    console.print(
        f"training a GPT of {trainer.n_parameters / 1e6:.1f} M parameters on the standard library's source "
        f"({len(data) / 1e6:.1f} MB), batches of {BATCH} x {settings.model.context} bytes"
    )
    for _ in range(settings.n_checkpoints):
        begin = time.perf_counter()
        losses += trainer.train(settings.steps_between)
        seconds = time.perf_counter() - begin
        path = folder / f"step-{trainer.step:04d}.safetensors"
        save_file(trainer.state(), path, metadata={"step": str(trainer.step)})
        trainer.calibrate(calibration_path(path))
        files.append(path)
        steps.append(trainer.step)
        size = path.stat().st_size / 1e6
        console.print(
            f"  step {trainer.step}, loss {losses[-1]:.3f}: {path.name}, {size:.1f} MB ({seconds:.0f} s)"
        )
    return Run(files, steps, losses, trainer.n_parameters)


def thread_counts() -> tuple[int, int]:
    """Return the cores that this process may use, and another number of threads, for the noise floor."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, cores // 2 if cores > 1 else 2


def fresh_folder(folder: Path) -> Path:
    """Create `folder`, or delete the checkpoints of an earlier demo in it, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("step-*.safetensors"), *folder.glob("step-*.ckptz")]:
        path.unlink()
    return folder


if __name__ == "__main__":
    sys.exit(main())
