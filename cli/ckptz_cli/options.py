"""Options of several verbs, and the sections in the help of `ckptz compress`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from ckptz_cli.session import QUIET, VERBOSE, Verb, streamed

Decorator = Callable[[Any], Any]
COUNT: Final = click.IntRange(min=1)
_PROTOCOL: Final = re.compile(r"(?:[\w.-]+=)?(\w[\w+.-]*)://")
jobs_option = click.option(
    *("-j", "--jobs"), type=COUNT, metavar="N", help="Number of threads (default: all cores)."
)
force_option = click.option("-f", "--force", is_flag=True, help="Replace an existing output.")
OUTPUT: Final = "output"  # name of the parameter of --output
# Sections in the help of compress, and their options.
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


def together(*options: Decorator) -> Decorator:
    """Return one decorator for several options, in the order of the help."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class _Path(click.Path):
    """A path or a URL; an empty one, as from an unset shell variable, is an error.

    An output that ends with a separator stays a string, because `Path` would drop the separator, which marks
    a folder.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("a path is empty", param, ctx)
        is_output = param is not None and param.name == OUTPUT
        if value == "-" and ctx is not None:
            return streamed(is_output, ctx)
        if isinstance(value, str) and "://" in value:
            from ckptz.format.byte_source import path_of

            path: Any = path_of(value)  # raises early for an unknown protocol
        else:
            path = super().convert(value, param, ctx)
        is_folder = isinstance(value, str) and value.endswith(("/", os.sep))
        return value if is_folder and is_output else path


PATH: Final = _Path(path_type=Path)


def _check_folders(_: click.Context, param: click.Parameter, folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """Raise for folders that do not exist, such as misspelt ones."""
    from ckptz.format.byte_source import is_url

    for folder in folders:
        if not (is_url(folder) or folder.is_dir()):
            raise click.BadParameter(f"{folder}: no such folder", param=param)
    return folders


def only_one(_: click.Context, param: click.Parameter, values: tuple[Path, ...]) -> Path | None:
    """Return the value of an option; raise for two different values, where click would use the last."""
    if len(set(values)) > 1:
        raise click.BadParameter(f"{values[0]} and {values[-1]}: only one value is allowed", param=param)
    return values[0] if values else None


def _remember(context: click.Context, param: click.Parameter, is_asked: bool) -> None:
    """Store -q or -v in the context, whether before or after the verb."""
    if is_asked:
        context.meta[QUIET if param.name == "quiet" else VERBOSE] = True


# Options of every verb, before or after its name. `Session` parses the last two itself, because they also
# determine how usage errors are printed.
session_options = together(
    click.option(
        *("-q", "--quiet"),
        is_flag=True,
        expose_value=False,
        callback=_remember,
        help="Print only errors, and the report of --json.",
    ),
    click.option(
        *("-v", "--verbose"),
        is_flag=True,
        expose_value=False,
        callback=_remember,
        help="Print each trial of a search, and tracebacks of errors.",
    ),
    click.option("--json", is_flag=True, expose_value=False, help="Print the report as one JSON object."),
)


def parse_pairs(texts: Sequence[str], is_text: Callable[[Sequence[str]], bool]) -> dict[str, Any]:
    """Parse KEY=VALUE texts into nested settings.

    Args:
        texts: the texts. A key may have dots: `moments.second_step=2`. A value is a TOML value, such as 16,
            0.5, true or [["head", 0.0]], or `none` for None; any other text is a string.
        is_text: function of a key, split at its dots, that returns True if its value is always a string.

    Raises:
        click.BadParameter: a text is not KEY=VALUE, or sets a key again.
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
                raise click.BadParameter(f"{text!r}: {name} is set already")
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
    """Add options to fsspec's configuration for the protocols of all URLs on the command line."""
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
    is_eager=True,  # before the URLs, which are opened while parsing
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
        callback=_check_folders,
        metavar="DIR",
        help="Also search this folder for bases; repeatable.",
    ),
    storage_option,
)

# The last options of a verb's help, in front of its function, which gets the `Session` first.
verb_options = together(session_options, click.pass_obj)
reading_options = together(search_path_option, verb_options)
writing_options = together(jobs_option, force_option, reading_options)


class SectionedCommand(Verb):
    """A command whose help lists its options in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections; options without a section come last."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        sectioned = {name for names in SECTIONS.values() for name in names}
        common = [name for name in records if name is not None and name not in sectioned]
        for title, names in {**SECTIONS, "Every command has": common}.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records[name])])
