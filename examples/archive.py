"""Compress an archive of many runs with many workers: each run is a chain of its own.

    python examples/archive.py runs/ packed/ --workers 8          # here, one thread each
    sbatch --array=0-7 --wrap 'python examples/archive.py runs/ packed/ --worker $SLURM_ARRAY_TASK_ID/8'

Folders in `runs/` become folders of the same name in `packed/`. Workers share nothing but the folders, so
any scheduler can start them. One that was killed is started again: whole files stay, and its chain goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def compress(run: Path, packed: Path, options: list[str]) -> None:
    """One run, as one chain, by the steps in the names of its files."""
    packed.mkdir(parents=True, exist_ok=True)
    inputs = [str(path) for path in sorted(run.iterdir())]
    command = [sys.executable, "-m", "ckptz", "compress", *inputs, "--chain", "--resume", "-o", str(packed)]
    subprocess.run([*command, "--jobs", "1", *options], check=True)


def main() -> int:
    """Do one worker's share, or start all workers and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker", default="", help="I/N: the share of worker I of N, counted from 0")
    given, options = parser.parse_known_args()
    if not given.worker and given.workers > 1:
        shares = [f"{i}/{given.workers}" for i in range(given.workers)]
        workers = [subprocess.Popen([sys.executable, *sys.argv, "--worker", share]) for share in shares]
        return max(abs(worker.wait()) for worker in workers)
    at, n = map(int, given.worker.split("/")) if given.worker else (0, 1)
    for run in sorted(path for path in given.runs.iterdir() if path.is_dir())[at::n]:
        compress(run, given.packed / run.name, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
