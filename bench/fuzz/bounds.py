"""Mutants with fitting checksums through every reader, with the bounds checks of the compiled kernels on.

    python -m bench.fuzz.bounds [--files 90000] [--messages 10000] [--seed 1]

tests/support/bounds_worker.py, as `make test-slow` runs it; the counts are written to results/bounds.csv.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

from bench.core.measure import BENCH, CACHE, parser_of, save_rows
from bench.core.report import update_readme

OUTCOMES: Final = ("accepted", "codes alone", "refused", "out of bounds", "other error", "differs")


def _worker(counts: list[int]) -> list[dict[str, Any]]:
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(CACHE / "bounds")}
    command = [sys.executable, "-m", "tests.support.bounds_worker", *map(str, counts)]
    run = subprocess.run(
        command, cwd=BENCH.parent, env=os.environ | checks, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def main() -> int:
    """Count, and write what was counted: 0 if every mutant was accepted or refused as it must be."""
    parser = parser_of(__doc__)
    parser.add_argument("--files", type=int, default=90_000, help="mutants of files and chains")
    parser.add_argument("--messages", type=int, default=10_000, help="mutants of messages and states")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found = _worker([given.files, given.messages, given.seed])
    rows = [{name: row.get(name, 0) for name in ("kind", "mutants", *OUTCOMES)} for row in found]
    save_rows("bounds", rows)
    update_readme()
    return int(any(row[outcome] for row in rows for outcome in OUTCOMES[3:]))


if __name__ == "__main__":
    sys.exit(main())
