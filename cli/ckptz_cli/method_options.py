"""Options of `ckptz compress` that choose a method and its settings: --method, --set, --config.

Settings are the fields of the method's class, so a new method needs no code here.
"""

from __future__ import annotations

import inspect
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.options import PATH, parse_pairs, together

if TYPE_CHECKING:
    from ckptz.codec.method import Method

INPUT, GUIDE, SEARCH = "input", "guide", "search"
# Keys of --set that are not settings of a method, by group; tables of these names are allowed in --config.
GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    INPUT: {
        "step": "training step to record (default: from the metadata or the name)",
        "param_names": "text file with one parameter name on each line, in the order of the optimizer",
        "tensor_roles": "TOML file with rules for the role of each tensor",
    },
    GUIDE: {
        "moments_from": "checkpoint whose second moments of Adam guide a lossy method; it is not stored",
        "calibration": "grid: file of ckptz.hooks.Calibration, with layer inputs",
        "sensitivity": "file of ckptz.hooks.SensitivityTracker, with gradients",
    },
    SEARCH: {
        "max_evaluations": "maximum number of evaluations; 0 uses the settings of the base",
        "restores": "expected number of restarts; each file gets its share of the budget",
        "resume_steps": "training steps of a resume evaluation (default 20)",
    },
}
# Numeric keys of groups; all other keys are files.
NUMBERS: Final = ("step", "max_evaluations", "restores", "resume_steps")
_ATTRIBUTE: Final = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def split_groups(settings: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split settings into those of the method and those of each group in `GROUPS`.

    Args:
        settings: nested settings.
        where: prefix for error messages.

    Raises:
        click.UsageError: a group has no such key, or a value has the wrong type.
    """
    groups = {name: settings.get(name, {}) for name in GROUPS}
    for name, group in groups.items():
        for key, value in group.items() if isinstance(group, dict) else [("", group)]:
            if key not in GROUPS[name]:
                known = ", ".join(f"{name}.{valid}" for valid in GROUPS[name])
                raise click.UsageError(f"{where}{name}.{key}: unknown; use one of {known}")
            least = int(key in ("restores", "resume_steps"))
            if key in NUMBERS and (type(value) is not int or value < least):
                raise click.UsageError(
                    f"{where}{name}.{key}: {value!r} is not an integer of at least {least}"
                )
            if key not in NUMBERS and (type(value) is not str or not value):
                raise click.UsageError(f"{where}{name}.{key}: {value!r} is not a file name")
    return {name: value for name, value in settings.items() if name not in GROUPS}, groups


def _show_methods(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo("\n".join(_methods_help()))
        context.exit()


def _methods_help() -> list[str]:
    """Return lines on every setting of every method: name, default and its text in the class docstring."""
    from ckptz.codec.registry import METHODS

    lines = []
    for method in METHODS.values():
        document = inspect.getdoc(method) or ""
        lines += [f"--method {method.name}", f"  {document.splitlines()[0]}"]
        texts = {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(document)}
        for field in fields(method):
            value = "none" if field.default is None else field.default
            default = "" if value is MISSING else f" (default {value})"
            lines.append(f"  --set {field.name}=...{default}")
            lines.append(click.wrap_text(texts.get(field.name, ""), 100, "      ", "      "))
        lines.append("")
    lines.append("For all methods (search: with --eval)")
    for name, group in GROUPS.items():
        for key, text in group.items():
            lines.append(f"  --set {name}.{key}={'N' if key in NUMBERS else 'FILE'}\n      {text}")
    return lines


def _check_methods(_: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Raise for names of no method; the registry is only imported if the option is used."""
    if names:
        from ckptz.codec.registry import METHODS

        for name in names:
            if name not in METHODS:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(METHODS)}", param=param)
    return names


method_options = together(
    click.option(
        "--method",
        multiple=True,
        metavar="NAME",
        callback=_check_methods,
        help="Compression method: lossless (default), grid, kmeans.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda _context, _option, texts: parse_pairs(
            texts, lambda names: len(names) == 2 and names[0] in GROUPS and names[1] not in NUMBERS
        ),
        help="Set a setting of the method, such as step=0.5 for grid; repeatable.",
    ),
    click.option(
        "--config",
        type=PATH,
        metavar="FILE",
        help="Read settings from a TOML file, or from the --json report of a search.",
    ),
    click.option(
        "--help-methods",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_methods,
        help="Show every setting of every method and exit.",
    ),
)


def checked_settings(method: type[Method], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, converted to the types of the method's fields.

    Raises:
        click.UsageError: the method has no such setting.
        click.BadParameter: a nested value is invalid.
    """
    import msgspec

    names = [field.name for field in fields(method)]
    hints = typing.get_type_hints(method)
    checked = {}
    for name, value in settings.items():
        if name not in names:
            known = f"it has {', '.join(names)}" if names else "it has none"
            raise click.UsageError(f"--set {name}: method {method.name} has no such setting; {known}")
        checked[name] = value
        if not isinstance(value, dict | list):
            continue  # the method's constructor checks plain values
        try:
            checked[name] = msgspec.convert(value, hints[name], strict=False)
        except msgspec.ValidationError as error:
            raise click.BadParameter(f"--set {name}: {error}") from None
        unknown = [key for key in value if isinstance(value, dict) and not hasattr(checked[name], key)]
        if unknown:
            raise click.BadParameter(f"--set {name}.{unknown[0]}: {name} has no such setting")
    return checked


def config_from(
    method: str | None, settings: Mapping[str, Any], loaded: Method | None, path: Path | None
) -> Method:
    """Return the method configured by --method, --set and --config.

    Args:
        method: name of the method, or None.
        settings: settings of --set.
        loaded: configuration from `path`, the file of --config, or None.
        path: for error messages.

    Raises:
        click.UsageError: a setting without a method, or a method that contradicts the file.
        ConfigError: a value is out of range.
    """
    from dataclasses import replace

    from ckptz.codec.lossless import Lossless
    from ckptz.codec.registry import method_named

    if loaded is not None:
        if method not in (None, loaded.name):
            raise click.UsageError(f"--method {method} contradicts {path}, which configures {loaded.name}")
        return replace(loaded, **checked_settings(type(loaded), settings))
    if method is None and settings:
        raise click.UsageError(
            f"--set {next(iter(settings))} needs --method; without it, compression is lossless"
        )
    chosen = Lossless if method is None else method_named(method)
    return chosen(**checked_settings(chosen, settings))


def load_config(path: Path) -> tuple[Method | None, dict[str, dict[str, Any]]]:
    """Read settings from a TOML file, or from the --json report of a search.

    Returns:
        (the configured method, or None if the file names none; the settings of each group in `GROUPS`).

    Raises:
        ConfigError: the file is invalid, or the method lacks one of its settings.
        FileNotFoundError: no such file.
    """
    from ckptz.codec.registry import method_named
    from ckptz.errors import ConfigError
    from ckptz.search.budget import load_searched

    if path.suffix != ".toml":
        return load_searched(path), {}
    try:
        settings = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    settings, groups = split_groups(settings, f"{path}: ")
    name = settings.pop("method", None)
    if name is None and not settings:
        return None, groups
    if not isinstance(name, str):
        raise ConfigError(f'{path}: names no method; add a line such as method = "grid"')
    chosen = method_named(name)
    return chosen(**checked_settings(chosen, settings)), groups
