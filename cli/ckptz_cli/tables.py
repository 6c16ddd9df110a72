"""Tables without lines, as text; coloured and as wide as the terminal where somebody looks."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptz.pages.words import printable
from ckptz_cli.session import is_terminal

WIDE: Final = 4096  # columns where no terminal sets a limit: nothing wraps


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Make a table of names and values, one pair a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
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
    """Give the table as text for standard output.

    Where the terminal is too narrow even for its words, what no row has is left out, or else each row becomes
    lines of its own.
    """
    is_shown = is_terminal(sys.stdout)
    buffer = io.StringIO()
    console = Console(file=buffer, width=None if is_shown else WIDE, force_terminal=is_shown)
    if not _fits(table, console):
        rows = list(zip(*(column.cells for column in table.columns), strict=True))
        used = [i for i in range(len(table.columns)) if any(str(row[i]) not in ("", "-") for row in rows)]
        headings = [str(table.columns[i].header) for i in used]
        narrow = table_of(*headings)
        for row in rows:
            narrow.add_row(*(row[i] for i in used))
        table = (
            narrow if _fits(narrow, console) else _stacked(headings, [[row[i] for i in used] for row in rows])
        )
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _fits(table: Table, console: Console) -> bool:
    """Tell whether no word is cut; of names and values, long ones may be."""
    words = console.measure(table, options=console.options.update(width=WIDE)).minimum
    return not table.show_header or words <= console.width


def _stacked(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Make lines of a heading and a cell, and a blank one between rows; empty cells are left out."""
    table = facts_table(())
    for row in rows:
        if table.row_count:
            table.add_row()
        for heading, cell in zip(headings, row, strict=True):
            if str(cell):
                table.add_row(heading, cell)
    return table
