"""Coverage-guided fuzzing of the parsers: envelope, container, index, frame, tree and wire messages.

    python -m bench.fuzz [--executions 1000000] [--targets frame wire] [--step 100000]

Each input must end in a result or a CkptzError. Any other exception, 5 seconds or 2 GiB is a find. Checksums
are corrected before parsing, so that mutated inputs reach the code behind them. Runs repeat until each target
has its number of executions. A run adds a row with its seed to bench/results/fuzz.csv. The corpus stays in
bench/.cache/fuzz, so that an interrupted campaign can continue. Finds are stored in
bench/.cache/fuzz/TARGET/finds; a fix adds the input to spec/vectors.

Requires atheris: .venv/bin/python -m pip install --target bench/.cache/atheris atheris
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any, Final

from bench.core.measure import CACHE, append_row, parser_of, read_rows
from bench.fuzz.seeds import seeds

MAX_INPUT_BYTES: Final = 4096
MAX_SECONDS: Final = 5
MAX_RSS_MB: Final = 2048
# The compiled kernels are left out, because numba would compile the instrumented code.
INSTRUMENTED: Final = (
    *(
        "ckptz.format.bits",
        "ckptz.format",
        "ckptz.format",
        "ckptz.format",
        "ckptz.codec",
        "ckptz.format.context_rules",
    ),
    *("ckptz.state.skeleton", "ckptz.store", "ckptz.wire"),
)


# --- runs ---------------------------------------------------------------------------------------


def _fuzz(target: str, arguments: list[str]) -> None:
    """Run libFuzzer in this process, which it ends.

    Args:
        target: a name in `TARGETS`.
        arguments: command line of libFuzzer.
    """
    sys.path.insert(0, str(CACHE / "atheris"))
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from bench.fuzz.targets import TARGETS as RUNS
    run = RUNS[target]
    for seed in seeds(target):  # compiles the kernels, which would count as a slow input
        run(seed)
    atheris.Setup([sys.argv[0], *arguments], run)
    atheris.Fuzz()


def _statistic(log: str, name: str) -> int:
    matches = re.findall(rf"{name}:\s*(\d+)", log)
    return int(matches[-1]) if matches else 0


def _run(target: str, seed: int, executions: int) -> dict[str, Any]:
    """Run libFuzzer once in a child process, and return its row of the table; the stored corpus is reused."""
    folder = CACHE / "fuzz" / target
    corpus, finds = folder / "corpus", folder / "finds"
    for path in (corpus, finds):
        path.mkdir(parents=True, exist_ok=True)
    if not any(corpus.iterdir()):
        for number, data in enumerate(seeds(target)):
            (corpus / f"seed-{number}").write_bytes(data)
    n_before = sum(1 for _ in finds.iterdir())
    options = {
        **{"runs": executions, "seed": seed, "max_len": MAX_INPUT_BYTES, "timeout": MAX_SECONDS},
        **{"rss_limit_mb": MAX_RSS_MB, "artifact_prefix": f"{finds}/", "print_final_stats": 1},
    }
    command = [
        sys.executable,
        "-m",
        "bench.fuzz",
        "--run",
        target,
        *(f"-{k}={v}" for k, v in options.items()),
    ]
    begin = time.perf_counter()
    process = subprocess.run([*command, str(corpus)], capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - begin
    log = process.stderr
    n_finds = sum(1 for _ in finds.iterdir()) - n_before
    n_done = _statistic(log, "stat::number_of_executed_units")
    if (process.returncode and not n_finds) or not n_done:
        raise SystemExit(f"{target}: the fuzzer did not run\n{log[-2000:]}")
    return {
        **{"target": target, "seed": seed, "executions": n_done, "seconds": round(seconds, 1)},
        **{"coverage": _statistic(log, "cov"), "corpus": sum(1 for _ in corpus.iterdir())},
        **{"finds": n_finds, "peak_mb": _statistic(log, "stat::peak_rss_mb")},
    }


TARGETS: Final = ("envelope", "container", "index", "frame", "tree", "wire")


def main() -> int:
    """Run the campaign; return 0 if there are no finds, else 1."""
    if sys.argv[1:2] == ["--run"]:
        _fuzz(sys.argv[2], sys.argv[3:])
    parser = parser_of(__doc__)
    parser.add_argument(
        "--executions", type=int, default=1_000_000, help="executions of each target, in all its runs"
    )
    parser.add_argument("--step", type=int, default=100_000, help="executions in one run")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    options = parser.parse_args()
    n_finds = 0
    for target in options.targets:
        while True:
            rows = [row for row in read_rows("fuzz") if row["target"] == target]
            n_left = options.executions - sum(int(row["executions"]) for row in rows)
            if n_left <= 0:
                break
            row = _run(target, len(rows) + 1, min(options.step, n_left))
            append_row("fuzz", row)
            n_finds += row["finds"]
            rate = row["executions"] / row["seconds"]
            print(f"{target}: {row['executions']} executions, {rate:.0f}/s, {row['finds']} finds", flush=True)
    return 1 if n_finds else 0


if __name__ == "__main__":
    sys.exit(main())
