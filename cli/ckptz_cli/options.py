"""Options that several verbs share, and the sections of the help of `ckptz compress`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from ckptz_cli.session import QUIET, VERBOSE, Verb, streamed

Command = TypeVar("Command", bound=Callable[..., Any])
COUNT: Final = click.IntRange(min=1)
jobs_option = click.option(
    *("-j", "--jobs"), type=COUNT, metavar="N", help="Number of threads (default: all cores)."
)
force_option = click.option("-f", "--force", is_flag=True, help="Replace an existing output.")
OUTPUT: Final = "output"  # name of the option for the file that is written
# Sections of the help of compress.
SECTIONS: Final[Mapping[str, Sequence[str]]] = {
    "Used most": ("output", "base", "chain", "method", "budget"),
    "How small, and how good": (
        "eval",
        "allow_unsure",
        "dry_run",
        "effort",
        "settings",
        "config",
        "help_methods",
    ),
    "What is read and written": ("optimizer", "search_path", "resume", "force", "jobs"),
}


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Make one decorator of several options; the help lists them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class _Path(click.Path):
    """A path or a URL. An empty one is refused: an unset variable does not mean the working folder.

    An output that ends with a separator stays text: a `Path` would lose the separator, which says that the
    output is a folder.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("a path is empty", param, ctx)
        if value == "-" and param is not None and ctx is not None:
            return streamed(param.name == OUTPUT, ctx)
        if isinstance(value, str) and "://" in value:
            if param is not None and param.name == OUTPUT:
                self.fail(f"{value}: only local files are written", param, ctx)
            from ckptz.format.byte_source import path_of

            return path_of(value)
        path = super().convert(value, param, ctx)
        is_folder = isinstance(value, str) and value.endswith(("/", os.sep))
        return value if is_folder and param is not None and param.name == OUTPUT else path


PATH: Final = _Path(path_type=Path)


def _are_there(_: click.Context, param: click.Parameter, folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """Refuse folders that do not exist: in a misspelt one no bases would be found."""
    from ckptz.format.byte_source import is_url

    for folder in folders:
        if not (is_url(folder) or folder.is_dir()):
            raise click.BadParameter(f"{folder}: no such folder", param=param)
    return folders


def only_one(_: click.Context, param: click.Parameter, values: tuple[Path, ...]) -> Path | None:
    """Refuse two values of an option; click alone would silently take the last one."""
    if len(set(values)) > 1:
        raise click.BadParameter(f"{values[0]} and {values[-1]}: give only one of them", param=param)
    return values[0] if values else None


def _remember(context: click.Context, param: click.Parameter, is_asked: bool) -> None:
    """Note in the context that -q or -v was given, before the verb or after it."""
    if is_asked:
        context.meta[QUIET if param.name == "quiet" else VERBOSE] = True


# What every verb has, before or after its name. `Session` reads the last two from the command line itself,
# as errors of the command line are shown by them, too.
session_options = together(
    click.option(
        *("-q", "--quiet"),
        is_flag=True,
        expose_value=False,
        callback=_remember,
        help="Print only errors, and what --json asks for.",
    ),
    click.option(
        *("-v", "--verbose"),
        is_flag=True,
        expose_value=False,
        callback=_remember,
        help="Print a line for each trial of a search, and where an error was raised.",
    ),
    click.option("--json", is_flag=True, expose_value=False, help="Print the report as one JSON object."),
)

search_path_option = click.option(
    "--search-path",
    type=PATH,
    multiple=True,
    callback=_are_there,
    metavar="DIR",
    help="Look for bases in this folder too, after the file's own; repeatable.",
)

# What every verb has that writes a file, at the end of its help.
writing_options = together(jobs_option, force_option, search_path_option, session_options)


class SectionedCommand(Verb):
    """A command whose help lists its options in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections; those that no section names come last."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        named = {name for names in SECTIONS.values() for name in names}
        others = [name for name in records if name is not None and name not in named]
        for title, names in {**SECTIONS, "Every command has": others}.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records[name])])
