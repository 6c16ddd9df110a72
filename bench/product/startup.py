"""Start-up time of the package and the command line, what they load, and the first kernel use.

    python -m bench.product.startup [--runs N]

Warm: the median of N processes (default 10), interleaved, nothing subtracted; `python -c pass` gives the
scale. Cold: numba's cache is an empty folder, and one process compresses and restores a small bf16 and a
small fp32 delta; then another does so with the cache that the first has filled. `ckptz compress` of one
megabyte of fp32 runs with a cache that is filled, and with empty ones.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from bench.core.measure import (
    BENCH,
    Row,
    Timing,
    interleave,
    machine,
    parser_of,
    save_rows,
    timed,
    verdict,
)
from bench.core.report import finish

WARM_LIMIT: Final = 0.3
COLD_LIMIT: Final = 20.0
COMMAND_LIMITS: Final = {"filled": 0.5, "empty": 5.0}
FORBIDDEN: Final = ("torch", "numba")

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

# Both dtypes and both directions, so that every kernel that a user's first command needs is compiled.
FIRST_USE: Final = """
import numpy as np
from bench.core.codecs_ckptz import outputs_for, read_file, write_file
from ckptz.codec.units import ArraySource
from ckptz.dtypes import dtype_of

rng = np.random.default_rng(0)
for name, width in (("BF16", 2), ("F32", 4)):
    base = (rng.standard_normal(1 << 16).astype(np.float32).view(np.uint32) >> (32 - 8 * width))
    base = base.astype(f"<u{width}")
    current = base + rng.integers(0, 3, len(base)).astype(base.dtype)
    bases, tensors = ({"w": ArraySource(dtype_of(name), (len(x),), x)} for x in (base, current))
    for against in (None, bases):
        outputs = outputs_for(tensors)
        read_file(write_file(tensors, against), outputs, against)
        assert np.array_equal(outputs["w"], current)
"""


def _run(arguments: Sequence[str], **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=BENCH.parent,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process.stdout


def _command() -> Path:
    return Path(sys.executable).with_name("ckptz")


def _run_help() -> None:
    subprocess.run([_command(), "--help"], check=True, stdout=subprocess.DEVNULL)


def _loaded(code: str) -> list[str]:
    modules = json.loads(_run(["-c", code + LOADED]).splitlines()[-1])
    return [name for name in FORBIDDEN if name in modules]


def warm_rows(runs: int) -> list[Row]:
    """Start-up, warm."""
    cases = {
        "python -c pass": lambda: timed(lambda: _run(["-c", "pass"])),
        "python -c 'import ckptz'": lambda: timed(lambda: _run(["-c", "import ckptz"])),
        "ckptz --help": lambda: timed(_run_help),
    }
    loaded = {"python -c 'import ckptz'": _loaded("import ckptz"), "ckptz --help": _loaded(HELP)}
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


def first_use_rows() -> list[Row]:
    """First kernel use, cold and warm."""
    with tempfile.TemporaryDirectory(prefix="ckptz-numba-") as folder:
        names = ("first kernel use, empty numba cache", "the same, cache filled")
        seconds = [timed(lambda: _run(["-c", FIRST_USE], NUMBA_CACHE_DIR=folder)) for _ in names]
    return [
        {
            "what": name,
            "median s": None,
            "best s": f"{taken:.2f}",
            "torch or numba loaded": "numba",
            "target": f"< {COLD_LIMIT:g} s" if name == names[0] else None,
            "verdict": verdict(taken < COLD_LIMIT) if name == names[0] else None,
        }
        for name, taken in zip(names, seconds, strict=True)
    ]


def command_rows(runs: int) -> list[Row]:
    """`ckptz compress` of one megabyte, with kernels in the cache and without."""
    rng = np.random.default_rng(0)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ckptz-start-") as folder:
        source = Path(folder, "small.safetensors")
        save_file({"w": rng.standard_normal((512, 512)).astype(np.float32)}, source)
        line = [_command(), "compress", source, "--force", "-q"]
        for cache, limit in COMMAND_LIMITS.items():
            seconds = []
            for i in range(runs + 1):
                kept = {} if cache == "filled" else {"NUMBA_CACHE_DIR": str(Path(folder, str(i)))}
                run = functools.partial(subprocess.run, line, env=os.environ | kept, check=True)
                seconds.append(timed(run))
            found = Timing(tuple(seconds[1:]))
            rows.append(
                {
                    "what": f"ckptz compress, 1 MB of fp32, {cache} numba cache",
                    "median s": f"{found.median:.3f}",
                    "best s": f"{found.best:.3f}",
                    "torch or numba loaded": None,
                    "target": f"< {limit:g} s",
                    "verdict": verdict(found.median < limit),
                }
            )
    return rows


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="processes of each warm case (default 10)")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    rows = [*warm_rows(options.runs), *command_rows(options.runs), *first_use_rows()]
    save_rows("startup", rows)
    finish("startup", machine(), rows)


if __name__ == "__main__":
    main()
