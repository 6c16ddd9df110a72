"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from ckptz_cli.progress import QUIET
from ckptz_cli.streams import streamed

Command = TypeVar("Command", bound=Callable[..., Any])


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Make one decorator of several options; the help lists them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class _Path(click.Path):
    """A path or a URL; an empty one, as an unset variable gives, is not taken for the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("a path is empty", param, ctx)
        if value == "-" and param is not None and ctx is not None:
            return streamed(param.name == "output", ctx)
        if isinstance(value, str) and "://" in value:
            if param is not None and param.name == "output":
                self.fail(f"{value}: only local files are written", param, ctx)
            from ckptz.container.byte_source import path_of

            return path_of(value)
        return super().convert(value, param, ctx)


PATH: Final = _Path(path_type=Path)
COUNT: Final = click.IntRange(min=1)


def only_one(_: click.Context, param: click.Parameter, values: tuple[Path, ...]) -> Path | None:
    """Refuse a second value of an option, of which click would take the last one unsaid."""
    if len(set(values)) > 1:
        raise click.BadParameter(f"{values[0]} and {values[-1]}: give only one of them", param=param)
    return values[0] if values else None


def _be_quiet(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        context.meta[QUIET] = True


# What every verb has, before or after its name. `Session` reads the last two from the command line itself.
session_options = together(
    click.option(
        *("-q", "--quiet"),
        is_flag=True,
        expose_value=False,
        callback=_be_quiet,
        help="Print only errors, and what --json asks for.",
    ),
    click.option(
        "--json", is_flag=True, expose_value=False, help="Print the report as one JSON object on stdout."
    ),
    click.option("--debug", is_flag=True, expose_value=False, help="Show where an error was raised."),
)

jobs_option = click.option("--jobs", type=COUNT, metavar="N", help="Number of threads (default: all cores).")
force_option = click.option("--force", is_flag=True, help="Replace an existing output.")
search_path_option = click.option(
    "--search-path",
    type=PATH,
    multiple=True,
    metavar="DIR",
    help="Look for bases in this folder too, after the file's own; repeatable.",
)

# What every verb has that writes a file, at the end of its help.
writing_options = together(jobs_option, force_option, search_path_option, session_options)
