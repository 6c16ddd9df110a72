"""Progress on a terminal: bytes, speed, time left. Silent elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

import click

from ckptz.pages.words import printable

if TYPE_CHECKING:
    import rich.progress

    from ckptz.progress import Progress


ROOM_FOR_ALL: Final = 80  # columns, for a bar of them all beside a name
QUIET: Final = "ckptz.quiet"  # set in the context's `meta` by -q


def is_quiet() -> bool:
    """Tell whether -q was given to the command that runs."""
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(QUIET, False)


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether somebody looks; a stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


class _Bar:
    """A `ckptz.progress.Progress` that rich draws."""

    def __init__(self, display: rich.progress.Progress, room: int) -> None:
        self._display, self._room = display, room
        self._task: rich.progress.TaskID | None = None

    def start(self, name: str, n_bytes: int) -> None:
        """Begin a file of this many tensor bytes."""
        if self._task is not None:
            self._display.remove_task(self._task)
        text = printable(name)
        shown = text if len(text) <= self._room else f"...{text[3 - self._room :]}"  # names differ at the end
        self._task = self._display.add_task(shown, total=n_bytes)

    def advance(self, n_bytes: int) -> None:
        """Add bytes that are done."""
        if self._task is not None:
            self._display.advance(self._task, n_bytes)


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Draw a bar on stderr if that is a terminal, and unless -q was given."""
    from ckptz.progress import SILENT

    if is_quiet() or not is_terminal(sys.stderr):
        yield SILENT
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.table import Column

    # One line at any width: a bar that folds and unfolds takes results printed above it for its own.
    console, is_shown, one = Console(stderr=True), is_terminal(sys.stdout), Column(no_wrap=True)
    columns = [bars.TextColumn("{task.description}", markup=False), bars.DownloadColumn(table_column=one)]
    if console.width >= ROOM_FOR_ALL:
        columns += [bars.BarColumn(), bars.TransferSpeedColumn(table_column=one)]
    columns.append(bars.TimeRemainingColumn(table_column=one))
    # Results printed meanwhile go above the bar, unless they go somewhere else altogether.
    with bars.Progress(*columns, console=console, transient=True, redirect_stdout=is_shown) as display:
        yield _Bar(display, console.width // 3)
