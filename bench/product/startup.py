"""CPU seconds of commands with an empty kernel cache (cold) and with compiled kernels (warm).

    python -m bench.product.startup [--rounds N]

Seconds are user and system time of the process and its children on one thread, median of N rounds (default
3), for 40 MB of fp32 in ten tensors and a slightly changed copy. Cold: numba's cache is a new, empty folder.
Warm: the commands have run before. The ratio to the CPU seconds of `import torch` (median of the same run)
allows comparing machines. A second table has the wall-clock seconds of processes that compile nothing, and
the modules that they load. A further cold compress counts all functions that numba compiles, including
functions of numba itself.
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
# By case: the command, and the limits of CPU seconds cold and warm.
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

# Counts the runs of the last compiler pass, which generates machine code, once for each compiled function.
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
    """Run a process and return its CPU seconds, including its children; `kernels` is numba's cache folder."""
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
    """Measure the wall-clock seconds of processes that compile nothing, and list what they import."""
    words = {"python -c pass": ["-c", "pass"], "python -c 'import ckptz'": ["-c", "import ckptz"]}
    words["ckptz --help"] = ["-m", "ckptz", "--help"]
    loaded = {"python -c 'import ckptz'": _loaded("import ckptz"), "ckptz --help": _loaded(HELP)}
    cases = {name: lambda line=line: timed(lambda: _run(line)) for name, line in words.items()}
    rows = []
    for name, timing in interleave(cases, runs).items():
        modules = loaded.get(name)
        passed = modules == [] and timing.median < WARM_LIMIT
        rows.append(
            {
                "what": name,
                "median s": f"{timing.median:.3f}",
                "best s": f"{timing.best:.3f}",
                "torch or numba loaded": None if modules is None else ", ".join(modules) or "no",
                "target": None if modules is None else f"< {WARM_LIMIT} s, neither",
                "verdict": None if modules is None else verdict(passed),
            }
        )
    return rows


def write_checkpoints(folder: Path) -> dict[str, str]:
    """Write 40 MB of fp32 and a slightly changed copy; return the paths by their names in `CASES`."""
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
    """Measure the CPU seconds of commands, cold and warm, and count the functions of a cold compress."""
    with tempfile.TemporaryDirectory(prefix="ckptz-first-") as name:
        folder = Path(name)
        names, warm = write_checkpoints(folder), folder / "warm"
        lines = {case: _words(line, names) for case, (line, *_) in CASES.items()}
        limits = {f"{case}, cold": limit for case, (_, limit, _) in CASES.items()}
        limits |= {f"{case}, warm": limit for case, (*_, limit) in CASES.items() if limit is not None}
        limits["warm-up, cold"] = WARM_UP_LIMIT
        seconds: dict[str, list[float]] = {case: [] for case in (TORCH, *limits)}
        for line in lines.values():  # writes the inputs of restore and delta, and the kernels of warm runs
            cpu_seconds(line, warm)
        for i in range(rounds):
            seconds[TORCH].append(cpu_seconds([sys.executable, "-c", TORCH], warm))
            for case in limits:
                command, kind = case.split(", ")
                line = lines.get(command, [*CKPTZ, "warm-up", "-q", "--jobs", "1"])
                kernels = warm if kind == "warm" else folder / f"{command}-{i}"
                seconds[case].append(cpu_seconds(line, kernels))
        line = ["-c", COUNT, *lines["compress"][len(CKPTZ) :]]
        n_functions = int(_run(line, NUMBA_CACHE_DIR=str(folder / "count")))
    medians = {case: statistics.median(values) for case, values in seconds.items()}
    rows: list[Row] = [
        {
            "what": case,
            "CPU s": f"{median:.2f}",
            "x import torch": f"{median / medians[TORCH]:.2f}",
            "target": f"<= {limits[case]:g} s" if case in limits else None,
            "verdict": verdict(median <= limits[case]) if case in limits else None,
        }
        for case, median in medians.items()
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
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all commands (default 3)")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has compiled bytecode
    rows = first_rows(options.rounds)
    save_rows("startup", rows)
    save_rows("startup_loaded", start_rows(10))
    finish("startup", machine(), rows)


if __name__ == "__main__":
    main()
