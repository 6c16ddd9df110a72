"""Options that several verbs share, and those that say how tensors become lossy, from the table of methods.

The table loads the library, so the options of methods are made when a command line is read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ckptz_cli.session import QUIET, Verb, streamed

if TYPE_CHECKING:
    from ckptz.methods.method import Method, Option


Command = TypeVar("Command", bound=Callable[..., Any])
COUNT: Final = click.IntRange(min=1)
jobs_option = click.option("--jobs", type=COUNT, metavar="N", help="Number of threads (default: all cores).")
force_option = click.option("--force", is_flag=True, help="Replace an existing output.")
OUTPUTS: Final = ("output", "save_plan")  # options for files that are written
NEXT: Final = "eval"  # the option that follows those of methods
# Sections of the help; those of methods stand before the last, and what is in none after it.
SECTIONS: Final[Mapping[str, Sequence[str]]] = {
    "Common options": (
        *("output", "base", "chain", "method", "eval", "max_drop", "budget"),
        *("effort", "jobs", "force"),
    ),
    "What is read and written": (
        *("resume", "step", "optimizer", "param_names", "roles", "search_path"),
        *("read_optimizer", "calibration", "sensitivity"),
    ),
    "With a search (--eval)": (
        *("resume_steps", "restores", "lower_is_better", "max_evaluations"),
        *("dry_run", "plan", "save_plan", "verbose"),
    ),
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
            return streamed(param.name in OUTPUTS, ctx)
        if isinstance(value, str) and "://" in value:
            if param is not None and param.name == "output":
                self.fail(f"{value}: only local files are written", param, ctx)
            from ckptz.format.byte_source import path_of

            return path_of(value)
        path = super().convert(value, param, ctx)
        is_folder = isinstance(value, str) and value.endswith(("/", os.sep))
        return value if is_folder and param is not None and param.name == "output" else path


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


def options_of_methods() -> Mapping[str, tuple[str, Option]]:
    """Give the options of all methods by their keyword, each with the name of its method."""
    from ckptz.methods.table import METHODS

    return {option.keyword: (method.name, option) for method in METHODS.values() for option in method.options}


def is_given(value: Any) -> bool:
    """Tell whether an option was used; one that may be repeated arrives as an empty tuple if not."""
    return value is not None and value != ()


def _parsed(option: Option) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], Any]:
    """Make the callback of an option that may be repeated."""

    def parse(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Any:
        from ckptz.errors import ConfigError

        assert option.parse is not None
        try:
            return option.parse(values)
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return parse


def _click_option(method: str, option: Option) -> click.Option:
    kind = click.Choice(option.type) if isinstance(option.type, tuple) else option.type
    more: dict[str, Any] = {} if option.parse is None else {"multiple": True, "callback": _parsed(option)}
    return click.Option(
        [option.flag], type=kind, metavar=option.metavar, help=f"{method}: {option.help}", **more
    )


@functools.cache  # click looks a parameter up by identity
def _params(methods: tuple[str, ...]) -> tuple[click.Parameter, ...]:
    """Make the options of all methods; they arrive as one keyword each."""
    from ckptz.methods.table import AUTO

    first, *others = methods
    method = click.Option(
        ["--method"],
        type=click.Choice((first, "auto", *others)),
        help=f"How tensors become smaller; auto is {AUTO} (default lossless).",
    )
    return method, *(_click_option(name, option) for name, option in options_of_methods().values())


class MethodCommand(Verb):
    """A command that takes the options of all methods as well."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from ckptz.methods.table import METHODS

        own = super().get_params(ctx)
        at = [param.name for param in own].index(NEXT)
        return [*own[:at], *_params(tuple(METHODS)), *own[at:]]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        common, files, search = SECTIONS.items()
        methods: dict[str, list[str]] = {}
        for keyword, (method, _) in options_of_methods().items():
            methods.setdefault(f"With --method {method}", []).append(keyword)
        sections = dict([common, files, *methods.items(), search])
        named = {name for names in sections.values() for name in names}
        sections["Every command has"] = [name for name in records if name is not None and name not in named]
        for title, names in sections.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records[name])])


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn options that were used into fields of their method."""
    options = options_of_methods()
    return {options[name][1].field: value for name, value in given.items() if is_given(value)}


def config_of(method: str | None, **given: Any) -> Method:
    """Make the configuration that the options mean.

    Raises:
        click.UsageError: options of a method that was not asked for.
        ConfigError: values out of range.
    """
    from ckptz.methods.table import AUTO, METHODS

    name = AUTO if method == "auto" else method or "lossless"
    for keyword in (keyword for keyword, value in given.items() if is_given(value)):
        owner, option = options_of_methods()[keyword]
        if owner != name:
            instead = (
                f"not to --method {name}" if METHODS[name].is_lossy else "and without it nothing is lost"
            )
            raise click.UsageError(f"{option.flag} belongs to --method {owner}, {instead}")
    return METHODS[name](**fields_of(given))
