"""Mutation fuzzing of the readers of formats that others define: torch's files and folders, Hugging Face
folders, calibrations and sensitivities, plans, role tables, and the folders of trainers and weight sync.

    python -m bench.fuzz.foreign [--executions 100000] [--targets dcp torch] [--seconds 60]

Every input is a whole file of a folder with a few bytes changed, cut, repeated or put in. It ends in a
result, in an error of ours or in FileNotFoundError; anything else, or 5 seconds, is a find, and is kept in
bench/.cache/fuzz_foreign. Each run of a target is a row of bench/results/fuzz_foreign.csv. One process,
one seed: a run can be repeated. Where a checksum guards what a parser reads, it is made right first.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bench.core.measure import CACHE, append_row, parser_of
from bench.fuzz.foreign_targets import TARGETS, Target
from ckptz.errors import CkptzError

FINDS: Final = CACHE / "fuzz_foreign"
MEMORY: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None  # for the files that are read
MAX_SECONDS: Final = 5
EDGES: Final = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
WORDS: Final = (
    *(b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b'""'),
    *(b"9" * 30, b"\\ud800", b"../x", b"[" * 99),
)


class Hang(BaseException):
    """Raised by the clock, so that no reader takes it for an error of the file."""


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A few changes to some bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 5))):
        at, n = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 4, 8, 30))
        from_ = rng.randrange(len(out) + 1)
        piece = out[from_ : from_ + n]
        flipped = bytes(b ^ 1 << rng.randrange(8) for b in out[at : at + 1])
        edge, word = bytes((rng.choice(EDGES),)), rng.choice(WORDS)
        many = piece * rng.choice((1, 2, 50))
        replaced, new = rng.choice(
            ((1, flipped), (1, flipped), (1, edge), (n, b""), (0, many), (len(piece), piece), (n, word))
        )
        out[at : at + replaced] = new
        if rng.random() < 0.02:
            del out[at:]
    return bytes(out)


@dataclass
class Run:
    """What came of some executions."""

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
        """Without the kinds of finds, which are printed."""
        return {name: value for name, value in vars(self).items() if name != "kinds"}


def _stop(number: int, frame: FrameType | None) -> None:
    raise Hang


def execute(target: Target, data: bytes, run: Run) -> None:
    """One execution, counted."""
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
    """Run a target.

    Args:
        name: of the target.
        seed: of the mutations.
        executions: at most so many.
        seconds: no new execution after them.
    """
    rng, run = random.Random(f"{name} {seed}"), Run(name, seed)
    signal.signal(signal.SIGALRM, _stop)
    os.fsync = lambda descriptor: None  # what is fuzzed is read once
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = TARGETS[name](Path(folder))
        for data in target.seeds:  # each is right, and kernels are compiled
            target.read(data)
        begin = time.perf_counter()
        for _ in _until(executions, begin + seconds):
            data = mutated(rng, rng.choice(target.seeds))
            if rng.random() < 0.3:
                data = mutated(rng, data)
            execute(target, data, run)
        run.seconds = round(time.perf_counter() - begin, 1)
    gc.collect()
    run.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return run


def _until(executions: int, end: float) -> Iterator[None]:
    for _ in range(executions):
        if time.perf_counter() > end:
            return
        yield


def main() -> int:
    """Run the targets: 0 if nothing was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--executions", type=int, default=100_000, help="of each target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dry", action="store_true", help="write no row")
    given = parser.parse_args()
    n_finds = 0
    for name in given.targets:
        run = fuzz(name, given.seed, given.executions, given.seconds)
        n_finds += run.finds
        if not given.dry:
            append_row("fuzz_foreign", run.row())
        print(run.row(), *run.kinds.most_common(20), sep="\n  ", flush=True)
    return 1 if n_finds else 0


if __name__ == "__main__":
    sys.exit(main())
