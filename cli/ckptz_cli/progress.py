"""Progress on a terminal: bytes, speed, time left. Silent elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from ckptz.pages.words import printable

if TYPE_CHECKING:
    import rich.progress

    from ckptz.progress import Progress


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether somebody looks; a stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


class _Bar:
    """A `ckptz.progress.Progress` that rich draws."""

    def __init__(self, display: rich.progress.Progress) -> None:
        self._display = display
        self._task: rich.progress.TaskID | None = None

    def start(self, name: str, n_bytes: int) -> None:
        """Begin a file of this many tensor bytes."""
        if self._task is not None:
            self._display.remove_task(self._task)
        self._task = self._display.add_task(printable(name), total=n_bytes)

    def advance(self, n_bytes: int) -> None:
        """Add bytes that are done."""
        if self._task is not None:
            self._display.advance(self._task, n_bytes)


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Draw a bar on stderr if that is a terminal."""
    from ckptz.progress import SILENT

    if not is_terminal(sys.stderr):
        yield SILENT
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        *(bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()),
    )
    # Results printed meanwhile go above the bar, unless they go somewhere else altogether.
    console, is_shown = Console(stderr=True), is_terminal(sys.stdout)
    with bars.Progress(*columns, console=console, transient=True, redirect_stdout=is_shown) as display:
        yield _Bar(display)
