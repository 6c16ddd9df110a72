"""Tables without lines, as text; coloured and as wide as the terminal where somebody looks."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptz.pages.words import printable
from ckptz_cli.progress import is_terminal

WIDE: Final = 4096  # columns where no terminal sets a limit: nothing wraps


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Make a table of names and values, one pair a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts:
        add_row(table, name, value)
    return table


def table_of(*columns: str) -> Table:
    """Make an empty table with these headings."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row; what does not print is written as escapes."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def drawn(table: Table) -> str:
    """Give the table as text for standard output."""
    is_shown = is_terminal(sys.stdout)
    buffer = io.StringIO()
    console = Console(file=buffer, width=None if is_shown else WIDE, force_terminal=is_shown)
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
