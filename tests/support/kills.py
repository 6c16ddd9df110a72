"""Waiting for another process by what it has done, not by the clock: cores may be busy with others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

LONGEST: Final = 60.0  # seconds; it has ended by then


def let_run(pid: int, seconds: float) -> None:
    """Wait until a process has used so many more CPU seconds; where nobody counts them, by the clock."""
    if not Path("/proc/self/schedstat").exists():
        time.sleep(seconds)
        return
    begin, last = _cpu_seconds(pid), time.monotonic() + LONGEST
    while _cpu_seconds(pid) < begin + seconds and time.monotonic() < last:
        time.sleep(0.0005)


def _cpu_seconds(pid: int) -> float:
    """Sum up the threads of a process."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
    return total / 1e9
