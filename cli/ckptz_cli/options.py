"""Options that several verbs share, and the sections of the help of `ckptz compress`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from ckptz_cli.session import QUIET, VERBOSE, Verb, streamed

Command = TypeVar("Command", bound=Callable[..., Any])
COUNT: Final = click.IntRange(min=1)
_PROTOCOL: Final = re.compile(r"(?:[\w.-]+=)?(\w[\w+.-]*)://")
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
        "target_size",
        "dry_run",
        "effort",
        "settings",
        "config",
        "help_methods",
    ),
    "What is read and written": ("optimizer", "resume", "force", "jobs", "search_path", "storage_options"),
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
            from ckptz.format.byte_source import path_of

            there = path_of(value)  # fails early
            is_folder = param is not None and param.name == OUTPUT and value.endswith("/")
            return value if is_folder else there
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


def parse_pairs(texts: Sequence[str], is_text: Callable[[Sequence[str]], bool]) -> dict[str, Any]:
    """Parse KEY=VALUE into nested settings.

    A value is written as in TOML, such as 16, 0.5, true or [["head", 0.0]]; anything else is a string, and
    `none` is None. A key may be dotted: `moments.second_step=2`. Values of keys that `is_text` names are
    strings as they stand.

    Raises:
        click.BadParameter: a text is not KEY=VALUE, or contradicts an earlier one.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        names = key.strip().split(".")
        if not equals or not all(name.isidentifier() for name in names):
            raise click.BadParameter(f"{text!r} is not KEY=VALUE, such as levels=16")
        level = settings
        for name in names[:-1]:
            level = level.setdefault(name, {})
            if not isinstance(level, dict):
                raise click.BadParameter(f"{text!r}: {name} has a value already")
        if names[-1] in level:
            raise click.BadParameter(f"{text!r}: {key.strip()} is set twice")
        level[names[-1]] = value.strip() if is_text(names) else _value(value.strip())
    return settings


def _value(text: str) -> Any:
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _use_storage(context: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> None:
    """Add options to fsspec's configuration, for the protocols of all URLs of this command line."""
    if not texts:
        return
    from ckptz import lazy
    from ckptz.format.byte_source import needs_package

    options = parse_pairs(texts, lambda _: False)
    protocols = {match[1] for word in context.obj.args if (match := _PROTOCOL.match(word))}
    if not protocols:
        raise click.BadParameter("no file is a URL", param=param)
    try:
        known = lazy.module("fsspec.config").conf
    except ImportError as error:
        raise needs_package("--storage-options", error) from None
    before = dict(known)
    known.update({protocol: {**known.get(protocol, {}), **options} for protocol in protocols})

    def restore() -> None:
        known.clear()
        known.update(before)

    context.call_on_close(restore)


storage_option = click.option(
    "--storage-options",
    is_eager=True,  # URLs are opened as soon as they are read
    expose_value=False,
    multiple=True,
    metavar="KEY=VALUE",
    callback=_use_storage,
    help="Option of fsspec for URLs, such as anon=true; repeatable.",
)
search_path_option = together(
    click.option(
        "--search-path",
        type=PATH,
        multiple=True,
        callback=_are_there,
        metavar="DIR",
        help="Look for bases in this folder, too; repeatable.",
    ),
    storage_option,
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
