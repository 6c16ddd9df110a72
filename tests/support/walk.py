"""Counts what one command goes through: modules of ours whose code runs, and kinds of records it makes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ckptz_cli.main import main

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / folder}/" for folder in ("ckptz", "cli"))


class Walk:
    """A profiler of threads that are started while it runs, and of this one."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.records: set[type] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(OURS) and code.co_name != "<module>":
            self.modules.add(code.co_filename.removeprefix(f"{ROOT}/"))
        elif code.co_filename == "<string>" and code.co_name == "__init__":  # that of a dataclass
            kind = type(frame.f_locals["self"])
            if kind.__module__.startswith("ckptz"):
                self.records.add(kind)


def walk(*arguments: str) -> Walk:
    """Run a command of the command line, which must succeed."""
    found = Walk()
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(list(arguments))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found
