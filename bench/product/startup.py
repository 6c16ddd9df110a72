"""The first minute and the usual one: what commands take where nothing is compiled, and where all is.

    python -m bench.product.startup [--rounds N]

CPU seconds, user and system, of the process and its children, one thread, median of N rounds (default 3), on
40 MB of fp32 in ten tensors and on a checkpoint that moved a little since. Cold: numba's cache is a new,
empty folder each time. Warm: the commands have run before. Beside each stands its ratio to the CPU seconds of
`import torch`, the median of the same run, which says how fast the machine was. `start-up` has seconds of
processes that compile nothing, and what they load. One more cold compress counts the functions that numba
compiles, its own among them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from bench.core.measure import BENCH, Row, interleave, machine, parser_of, save_rows, timed, verdict
from bench.core.report import finish

WARM_LIMIT: Final = 0.3
FORBIDDEN: Final = ("torch", "numba")
MAX_FUNCTIONS: Final = 35

CKPTZ: Final = (sys.executable, "-m", "ckptz")
TORCH: Final = "import torch"
# What is measured: words of the command, CPU seconds at most where nothing is compiled, and where all is.
CASES: Final[Mapping[str, tuple[str, float, float | None]]] = {
    "compress": ("compress {old} -o {out}/old.ckptz", 5.0, 1.0),
    "restore": ("restore {out}/old.ckptz -o {out}/old.safetensors", 2.5, 0.6),
    "delta": ("compress {new} --base {out}/old.ckptz -o {out}/new.ckptz", 10.0, 1.3),
    "kmeans": ("compress {old} --method kmeans -o {out}/kmeans.ckptz", 8.0, None),
    "grid": ("compress {old} --method grid -o {out}/grid.ckptz", 12.0, None),
    "grid delta": (
        "compress {new} --method grid --base {out}/old.ckptz -o {out}/grid-delta.ckptz",
        15.0,
        None,
    ),
}
WARM_UP_LIMIT: Final = 30.0

LOADED: Final = "\nimport json, sys; print(json.dumps(sorted(m for m in sys.modules if '.' not in m)))"
HELP: Final = """
import sys
sys.argv = ["ckptz", "--help"]
from ckptz_cli.main import main
try:
    main()
except SystemExit:
    pass
"""

# Compiling a function ends with the pass that makes machine code of it.
COUNT: Final = """
import sys
from numba.core import event
class Count(event.Listener):
    n = 0
    def on_start(self, event):
        self.n += event.data["name"].startswith("native_lowering ")
    def on_end(self, event):
        pass
count = Count()
event.register("numba:run_pass", count)
from ckptz_cli.main import main
try:
    main()
except SystemExit:
    print(count.n)
"""


def _run(arguments: Sequence[str], **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=BENCH.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    return process.stdout


def cpu_seconds(words: Sequence[str], kernels: Path) -> float:
    """CPU seconds of a process and its children, whose kernels are kept in a folder."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(kernels), "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, env=environment, cwd=BENCH.parent, **quiet)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def _loaded(code: str) -> list[str]:
    modules = json.loads(_run(["-c", code + LOADED]).splitlines()[-1])
    return [name for name in FORBIDDEN if name in modules]


def start_rows(runs: int) -> list[Row]:
    """Seconds of processes that compile nothing."""
    words = {"python -c pass": ["-c", "pass"], "python -c 'import ckptz'": ["-c", "import ckptz"]}
    words["ckptz --help"] = ["-m", "ckptz", "--help"]
    loaded = {"python -c 'import ckptz'": _loaded("import ckptz"), "ckptz --help": _loaded(HELP)}
    cases = {name: lambda line=line: timed(lambda: _run(line)) for name, line in words.items()}
    rows = []
    for name, timing in interleave(cases, runs).items():
        found = loaded.get(name)
        passed = found == [] and timing.median < WARM_LIMIT
        rows.append(
            {
                "what": name,
                "median s": f"{timing.median:.3f}",
                "best s": f"{timing.best:.3f}",
                "torch or numba loaded": None if found is None else ", ".join(found) or "no",
                "target": None if found is None else f"< {WARM_LIMIT} s, neither",
                "verdict": None if found is None else verdict(passed),
            }
        )
    return rows


def write_checkpoints(folder: Path) -> dict[str, str]:
    """Write 40 MB of fp32 twice, the second time moved a little; gives what commands name."""
    rng = np.random.default_rng(0)
    old = {f"layers.{i}.weight": rng.normal(0, 0.02, (1000, 1000)).astype(np.float32) for i in range(10)}
    moves = {name: rng.normal(0, 1e-4, w.shape) * (rng.random(w.shape) < 0.9) for name, w in old.items()}
    save_file(old, folder / "old.safetensors")
    save_file({n: (w + moves[n]).astype(np.float32) for n, w in old.items()}, folder / "new.safetensors")
    return {
        "old": str(folder / "old.safetensors"),
        "new": str(folder / "new.safetensors"),
        "out": str(folder),
    }


def _words(line: str, names: Mapping[str, str]) -> list[str]:
    return [*CKPTZ, *line.format(**names).split(), "--force", "-q", "--jobs", "1"]


def first_rows(rounds: int) -> list[Row]:
    """CPU seconds of commands, cold and warm, and how many functions a cold compress compiles."""
    with tempfile.TemporaryDirectory(prefix="ckptz-first-") as name:
        folder = Path(name)
        names, kept = write_checkpoints(folder), folder / "kept"
        lines = {case: _words(line, names) for case, (line, *_) in CASES.items()}
        limits = {f"{case}, cold": limit for case, (_, limit, _) in CASES.items()}
        limits |= {f"{case}, warm": limit for case, (*_, limit) in CASES.items() if limit is not None}
        limits["warm-up, cold"] = WARM_UP_LIMIT
        found: dict[str, list[float]] = {what: [] for what in (TORCH, *limits)}
        for line in lines.values():  # what restores and deltas read, and the kernels of warm commands
            cpu_seconds(line, kept)
        for i in range(rounds):
            found[TORCH].append(cpu_seconds([sys.executable, "-c", TORCH], kept))
            for what in limits:
                case, kind = what.split(", ")
                line = lines.get(case, [*CKPTZ, "warm-up", "-q", "--jobs", "1"])
                kernels = kept if kind == "warm" else folder / f"{case}-{i}"
                found[what].append(cpu_seconds(line, kernels))
        line = ["-c", COUNT, *lines["compress"][len(CKPTZ) :]]
        n_functions = int(_run(line, NUMBA_CACHE_DIR=str(folder / "count")))
    medians = {what: statistics.median(seconds) for what, seconds in found.items()}
    rows: list[Row] = [
        {
            "what": what,
            "CPU s": f"{median:.2f}",
            "x import torch": f"{median / medians[TORCH]:.2f}",
            "target": f"<= {limits[what]:g} s" if what in limits else None,
            "verdict": verdict(median <= limits[what]) if what in limits else None,
        }
        for what, median in medians.items()
    ]
    return [
        *rows,
        {
            "what": "functions that a cold compress compiles",
            "CPU s": n_functions,
            "x import torch": None,
            "target": f"<= {MAX_FUNCTIONS}",
            "verdict": verdict(n_functions <= MAX_FUNCTIONS),
        },
    ]


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all commands (default 3)")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    rows = first_rows(options.rounds)
    save_rows("startup", rows)
    save_rows("startup_loaded", start_rows(10))
    finish("startup", machine(), rows)


if __name__ == "__main__":
    main()
