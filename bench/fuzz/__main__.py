"""Coverage-guided fuzzing of the parsers: envelope, container, index, frame, tree and wire messages.

    python -m bench.fuzz [--executions 1000000] [--targets frame wire] [--step 100000]

Every input ends in a result or an error of ours; anything else, 5 seconds or 2 GiB is a find. Where a
checksum guards what a parser reads, it is made right first, so that the parser is reached. Runs go on
until every target has its executions: each run is a row of bench/results/fuzz.csv with its seed, and the
corpus stays in bench/.cache/fuzz, so that an interrupted campaign goes on where it was. Finds are kept in
bench/.cache/fuzz/TARGET/finds; each becomes a vector of spec/vectors with the fix.

Needs atheris: .venv/bin/python -m pip install --target bench/.cache/atheris atheris
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
# Not the compiled kernels: instrumented code is not what numba compiles.
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
    """In a process of its own, which libFuzzer ends."""
    sys.path.insert(0, str(CACHE / "atheris"))
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from bench.fuzz.targets import TARGETS as RUNS
    run = RUNS[target]
    for seed in seeds(target):  # so that compiling kernels is no slow input
        run(seed)
    atheris.Setup([sys.argv[0], *arguments], run)
    atheris.Fuzz()


def _statistic(log: str, name: str) -> int:
    found = re.findall(rf"{name}:\s*(\d+)", log)
    return int(found[-1]) if found else 0


def _run(target: str, seed: int, executions: int) -> dict[str, Any]:
    """One run of libFuzzer; what is in the corpus already is not counted."""
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
    """The campaign: 0 if nothing was found."""
    if sys.argv[1:2] == ["--run"]:
        _fuzz(sys.argv[2], sys.argv[3:])
    parser = parser_of(__doc__)
    parser.add_argument("--executions", type=int, default=1_000_000, help="of each target, all runs together")
    parser.add_argument("--step", type=int, default=100_000, help="executions of one run")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    given = parser.parse_args()
    n_finds = 0
    for target in given.targets:
        while True:
            rows = [row for row in read_rows("fuzz") if row["target"] == target]
            left = given.executions - sum(int(row["executions"]) for row in rows)
            if left <= 0:
                break
            row = _run(target, len(rows) + 1, min(given.step, left))
            append_row("fuzz", row)
            n_finds += row["finds"]
            rate = row["executions"] / row["seconds"]
            print(f"{target}: {row['executions']} executions, {rate:.0f}/s, {row['finds']} finds", flush=True)
    return 1 if n_finds else 0


if __name__ == "__main__":
    sys.exit(main())
