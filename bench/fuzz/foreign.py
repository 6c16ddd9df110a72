"""Mutation fuzzing of the readers of other formats: files of torch.save, DCP and Hugging Face folders,
calibration and sensitivity files, plans, role tables, and the folders of trainers and of weight sync.

    python -m bench.fuzz.foreign [--executions 100000] [--targets dcp torch] [--seconds 60]

Each input is a valid file in which a few bytes are changed, deleted, repeated or inserted. It must end in a
result, a CkptzError or a FileNotFoundError. Any other exception, or 5 seconds, is a find, which is stored in
bench/.cache/fuzz_foreign. Each run of a target adds a row to bench/results/fuzz_foreign.csv, and can be
repeated with the same seed. Checksums are corrected first, so that inputs reach the code behind them.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bench.core.measure import CACHE, append_row, parser_of
from bench.fuzz.foreign_targets import TARGETS, Target
from ckptz.errors import CkptzError

FINDS: Final = CACHE / "fuzz_foreign"
MEMORY: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None  # folder for the input files
MAX_SECONDS: Final = 5
EDGES: Final = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
WORDS: Final = (
    *(b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b'""'),
    *(b"9" * 30, b"\\ud800", b"../x", b"[" * 99),
)


class Hang(BaseException):
    """Raised after `MAX_SECONDS`; no subclass of Exception, so that no reader handles it as a file error."""


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return a copy of `data` with one to five random changes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 5))):
        at, n = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 4, 8, 30))
        source = rng.randrange(len(out) + 1)
        piece = out[source : source + n]
        flipped = bytes(b ^ 1 << rng.randrange(8) for b in out[at : at + 1])
        edge, word = bytes((rng.choice(EDGES),)), rng.choice(WORDS)
        repeated = piece * rng.choice((1, 2, 50))
        n_replaced, new = rng.choice(
            ((1, flipped), (1, flipped), (1, edge), (n, b""), (0, repeated), (len(piece), piece), (n, word))
        )
        out[at : at + n_replaced] = new
        if rng.random() < 0.02:
            del out[at:]
    return bytes(out)


@dataclass
class Run:
    """Counts of one run of a target, and the kinds of its finds."""

    target: str
    seed: int
    executions: int = 0
    seconds: float = 0.0
    results: int = 0
    errors: int = 0
    finds: int = 0
    slowest_ms: float = 0.0
    peak_mb: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        """Return the row of the table: all fields but the kinds of finds, which are only printed."""
        return {name: value for name, value in vars(self).items() if name != "kinds"}


def _stop(number: int, frame: FrameType | None) -> None:
    raise Hang


def execute(target: Target, data: bytes, run: Run) -> None:
    """Read one input within the time limit, count its outcome in `run`, and store it if it is a find."""
    begin = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        target.read(data)
        run.results += 1
    except (CkptzError, FileNotFoundError):
        run.errors += 1
    except (Exception, Hang) as error:
        run.finds += 1
        run.kinds[f"{type(error).__name__}: {str(error)[:90]}"] += 1
        if run.kinds.total() <= 20:
            folder = FINDS / run.target
            folder.mkdir(parents=True, exist_ok=True)
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    run.slowest_ms = max(run.slowest_ms, round(1000 * (time.perf_counter() - begin), 1))
    run.executions += 1


def fuzz(name: str, seed: int, executions: int, seconds: float = float("inf")) -> Run:
    """Run a target with mutated inputs.

    Args:
        name: name of the target.
        seed: seed of the mutations.
        executions: maximum number of executions.
        seconds: time after which no execution starts.
    """
    rng, run = random.Random(f"{name} {seed}"), Run(name, seed)
    signal.signal(signal.SIGALRM, _stop)
    os.fsync = lambda descriptor: None  # the files are read once and deleted
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = TARGETS[name](Path(folder))
        for data in target.seeds:  # fails if a seed is not valid, and compiles the kernels
            target.read(data)
        begin = time.perf_counter()
        while run.executions < executions and time.perf_counter() <= begin + seconds:
            data = mutated(rng, rng.choice(target.seeds))
            if rng.random() < 0.3:
                data = mutated(rng, data)
            execute(target, data, run)
        run.seconds = round(time.perf_counter() - begin, 1)
    gc.collect()
    run.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return run


def main() -> int:
    """Run the targets; return 0 if there are no finds, else 1."""
    parser = parser_of(__doc__)
    parser.add_argument("--executions", type=int, default=100_000, help="executions of each target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dry", action="store_true", help="do not write to the table")
    options = parser.parse_args()
    n_finds = 0
    for name in options.targets:
        run = fuzz(name, options.seed, options.executions, options.seconds)
        n_finds += run.finds
        if not options.dry:
            append_row("fuzz_foreign", run.row())
        print(run.row(), *run.kinds.most_common(20), sep="\n  ", flush=True)
    return 1 if n_finds else 0


if __name__ == "__main__":
    sys.exit(main())
