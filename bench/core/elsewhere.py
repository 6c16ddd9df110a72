"""Other packages in environments of their own: a worker process that is driven over a pipe.

A `Worker` makes bench/.cache/NAME-venv with pinned versions on first use and runs a module of ours in it with
`--serve`. The worker keeps its inputs and times itself, so that the caller can run its own code and theirs in
turn. numpy, torch and what else they need come from the caller's environment, by a path file: a second copy
of torch is two gigabytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.core.measure import BENCH, CACHE


def environment(name: str, pins: tuple[str, ...]) -> Path:
    """The Python of an environment, which is made if it is missing or has other pins."""
    folder = CACHE / f"{name}-venv"
    python, stamp = folder / "bin" / "python", folder / "pins.txt"
    wanted = "\n".join((*pins, sys.version))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making {folder} with {', '.join(pins)}", file=sys.stderr)
    venv.EnvBuilder(clear=True, with_pip=True).create(folder)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *pins], check=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "caller.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    stamp.write_text(wanted)
    return python


class Worker:
    """A process of a module in its environment; use it in a `with` block."""

    def __init__(self, name: str, pins: tuple[str, ...], module: str, **variables: str) -> None:
        self._process = subprocess.Popen(
            [environment(name, pins), "-m", module, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=BENCH.parent,
            env=os.environ | variables,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, method: str, **arguments: object) -> Any:
        """What a method of the worker returns.

        Raises:
            RuntimeError: the worker ended; its error is on stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended during {method!r}; its error is printed above")
        return json.loads(answer)


def serve(methods: dict[str, Callable[..., object]]) -> None:
    """Answer requests on standard input until it is closed: the worker's side."""
    # Other packages print now and then; answers go to the real standard output, all else to stderr.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(methods[method](**arguments)), file=answers, flush=True)
