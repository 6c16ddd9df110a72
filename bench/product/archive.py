"""An archive of many runs by two workers of one thread against one.

    python -m bench.product.archive [--runs N] [--files N] [--mib N] [--rounds N]

`examples/archive.py` compresses 4 runs of 10 files without loss, each run a chain of deltas: bf16 weights
drawn from a normal distribution, of which each step changes every tenth element by 1 %. Wall times of whole
processes, start included; the kernels are in the cache. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from bench.core.measure import BENCH, machine, parser_of, save_rows, verdict
from bench.core.report import finish

EXAMPLE: Final = BENCH.parent / "examples" / "archive.py"
TARGET: Final = 1.7


def make(folder: Path, n_runs: int, n_files: int, mib: int) -> int:
    """Write the archive; its bytes."""
    shape, n_bytes = (mib * (1 << 19) // 1024 // 8, 1024), 0
    for run in range(n_runs):
        generator = torch.Generator().manual_seed(run)
        tensors = {f"layers.{i}.weight": torch.randn(shape, generator=generator) for i in range(8)}
        path = folder / f"run-{run}"
        path.mkdir()
        for step in range(n_files):
            for tensor in tensors.values():
                tensor.view(-1)[step % 10 :: 10] *= 1.01
            file = path / f"step-{step}.safetensors"
            save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file)
            n_bytes += file.stat().st_size
    return n_bytes


def seconds(runs: Path, packed: Path, n_workers: int) -> float:
    """Of the whole archive by so many workers."""
    shutil.rmtree(packed, ignore_errors=True)
    start = time.perf_counter()
    command = [sys.executable, EXAMPLE, runs, packed, "--workers", str(n_workers)]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--mib", type=int, default=32, help="size of a file")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs, packed = Path(name) / "runs", Path(name) / "packed"
        runs.mkdir()
        n_bytes = make(runs, given.runs, given.files, given.mib)
        seconds(runs, packed, 1)
        best = {n: min(seconds(runs, packed, n) for _ in range(given.rounds)) for n in (1, 2)}
        stored = sum(path.stat().st_size for path in packed.rglob("*.ckptz"))
    rows = [
        {
            "workers": n,
            "archive MB, bf16": round(n_bytes / 1e6),
            "smaller": round(n_bytes / stored, 2),
            "best s": round(best[n], 2),
            "MB/s": round(n_bytes / best[n] / 1e6),
            "of one": round(best[1] / best[n], 2),
            "target": f">= {TARGET}" if n == 2 else "",
            "verdict": verdict(best[1] / best[n] >= TARGET) if n == 2 else "",
        }
        for n in best
    ]
    save_rows("archive", rows)
    finish("archive", machine(), rows)


if __name__ == "__main__":
    main()
