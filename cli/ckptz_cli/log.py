"""`ckptz log`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from ckptz_cli.options import PATH, search_path_option, session_options
from ckptz_cli.session import Session, is_terminal

SHOWN: Final = (".ckptz", ".safetensors", ".hidden")  # ends the names of files that a report rests on

EPILOG = """\b
Examples:
  ckptz log run
  ckptz log run --watch
  ckptz log run --search-path bases
  ckptz log run --json | jq '.entries[] | select(.kind == "missing")'
"""


@click.command(epilog=EPILOG, short_help="List the checkpoints of a folder and their bases.")
@click.argument("folder", type=PATH, default=Path(), metavar="[DIR]")
@click.option("--watch", is_flag=True, help="Go on, and show the folder again whenever it changes.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: how often to look.",
)
@search_path_option
@session_options
@click.pass_obj
def log(session: Session, folder: Path, watch: bool, interval: float, search_path: tuple[Path, ...]) -> None:
    """List the checkpoints of a folder, each below the one it is stored against.

    DIR is the working folder by default: a run of a Checkpointer, the Trainer or Lightning, or what ckptz
    compress --chain wrote. Nothing is decoded. Files that cannot be read and bases that are
    missing are listed too; the first of them decides the exit code.

    With --watch, Ctrl-C ends well, problems decide nothing, and --json prints one line for each change.
    """
    import ckptz
    from ckptz_cli.render_chains import logged_text

    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            for _ in _changes(folder, interval):
                report = ckptz.log(folder, search_path=search_path)
                session.show_again(report, _fitted(logged_text(report)))
        return
    problems: list[Exception] = []
    report = ckptz.log(folder, search_path=search_path, tell=problems.append)
    session.show(report, logged_text(report))
    for problem in problems:
        session.fail(problem)


def _changes(folder: Path, interval: float) -> Iterator[None]:
    """Come back at once, and whenever files of the folder came, went or changed."""
    seen: object = None
    while True:
        found = _stamp(folder)
        if found != seen:
            seen = found
            yield
        time.sleep(interval)


def _stamp(folder: Path) -> list[tuple[str, int, int]]:
    """Names, times and sizes of the checkpoints of a folder, and of what hides them."""
    from ckptz.store.runs import run_files

    stamps = []
    try:
        for path in (*folder.iterdir(), *run_files(folder)):
            if path.name.endswith(SHOWN) or path.parent != folder:
                with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                    facts = path.stat()
                    stamps.append((path.name, facts.st_mtime_ns, facts.st_size))
    except OSError:
        return []  # what is wrong, the report says
    return sorted(stamps)


def _fitted(text: str) -> str:
    """On a terminal, leave out what is above the newest lines that it has room for."""
    lines, room = text.splitlines(), os.get_terminal_size().lines - 4 if is_terminal(sys.stdout) else 0
    if not room or len(lines) <= room:
        return text
    n_above = len(lines) - room + 1
    return "\n".join([lines[0], f"... {n_above} lines above", *lines[n_above + 1 :]])
