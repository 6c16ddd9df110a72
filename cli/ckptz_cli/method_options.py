"""Options of `ckptz compress` that choose a method and its settings: --method, --set, --config.

The names of settings are the fields of the method's class, so a registered method needs no code here.
"""

from __future__ import annotations

import inspect
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.options import PATH, parse_pairs, together

if TYPE_CHECKING:
    from ckptz.codec.method import Method

INPUT, GUIDE, SEARCH = "input", "guide", "search"
# Keys of --set that are no settings of a method, by group; a TOML file for --config may have these tables.
GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    INPUT: {
        "step": "training step, which the file records (default: that of the metadata or the name)",
        "param_names": "file with the names of the parameters that the optimizer numbers, one on each line",
        "tensor_roles": "TOML file that says which tensors are what",
    },
    GUIDE: {
        "moments_from": "checkpoint with Adam's second moments, which guide a lossy method; it is not stored",
        "calibration": "grid: layer inputs that ckptz.hooks.Calibration saved",
        "sensitivity": "gradients that ckptz.hooks.SensitivityTracker saved",
    },
    SEARCH: {
        "max_evaluations": "evaluations at most; the best file is kept; with 0 the base's settings are used",
        "restores": "expected number of restarts from such files: each gets a share of the budget",
        "resume_steps": "training steps of an --eval called resume (default 20)",
    },
}
NUMBERS: Final = ("step", "max_evaluations", "restores", "resume_steps")  # keys of groups; others are files
_ATTRIBUTE: Final = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def _is_file(names: Sequence[str]) -> bool:
    return len(names) == 2 and names[0] in GROUPS and names[1] not in NUMBERS


def split_groups(settings: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split settings into those of a method and those of each group in `GROUPS`.

    Raises:
        click.UsageError: a group has no such key, or a value has the wrong type; `where` begins the message.
    """
    groups = {name: settings.get(name, {}) for name in GROUPS}
    for name, group in groups.items():
        for key, value in group.items() if isinstance(group, dict) else [("", group)]:
            if key not in GROUPS[name]:
                known = ", ".join(f"{name}.{one}" for one in GROUPS[name])
                raise click.UsageError(f"{where}{name}.{key}: not one of {known}")
            least = int(key in ("restores", "resume_steps"))
            if key in NUMBERS and (type(value) is not int or value < least):
                raise click.UsageError(f"{where}{name}.{key}: {value!r} is not a whole number in range")
            if key not in NUMBERS and (type(value) is not str or not value):
                raise click.UsageError(f"{where}{name}.{key}: {value!r} is not the name of a file")
    return {name: value for name, value in settings.items() if name not in GROUPS}, groups


def _show_methods(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo("\n".join(_lines_on_methods()))
        context.exit()


def _lines_on_methods() -> list[str]:
    """Describe every setting of every method: name, default and the text of the class's docstring."""
    from ckptz.codec.registry import METHODS

    lines = []
    for method in METHODS.values():
        document = inspect.getdoc(method) or ""
        lines += [f"--method {method.name}", f"  {document.splitlines()[0]}"]
        texts = {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(document)}
        for field in fields(method):
            default = "" if field.default is MISSING else f" (default {_written(field.default)})"
            lines.append(f"  --set {field.name}=...{default}")
            lines.append(click.wrap_text(texts.get(field.name, ""), 100, "      ", "      "))
        lines.append("")
    lines.append("Whatever the method; the last ones with --eval")
    for name, group in GROUPS.items():
        for key, text in group.items():
            lines.append(f"  --set {name}.{key}={'N' if key in NUMBERS else 'FILE'}\n      {text}")
    return lines


def _written(value: Any) -> str:
    return "none" if value is None else str(value)


def _method_names() -> tuple[str, ...]:
    from ckptz.codec.registry import METHODS

    return tuple(METHODS)


class _MethodName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """The name of a registered method; the table is only loaded when an option is given."""

    name = "method"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        names = _method_names()
        if value not in names:
            self.fail(f"{value!r} is not one of {', '.join(names)}", param, ctx)
        return value


method_options: Callable[..., Any] = together(
    click.option(
        "--method",
        type=_MethodName(),
        multiple=True,
        metavar="NAME",
        help="How tensors become smaller: lossless (default), grid, kmeans.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda _context, _option, texts: parse_pairs(texts, _is_file),
        help="A setting, such as step=0.5 for grid; repeatable.",
    ),
    click.option(
        "--config",
        type=PATH,
        metavar="FILE",
        help="Settings from a TOML file, or those that a search found, from its --json.",
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


def method_type(name: str | None, default: type[Method]) -> type[Method]:
    """Return the method of a name, or `default` for None."""
    from ckptz.codec.registry import method_named

    return default if name is None else method_named(name)


def checked_settings(method: type[Method], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the types of the method's fields.

    Raises:
        click.UsageError: the method has no such setting.
        click.BadParameter: a nested value has the wrong form.
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
            continue  # the method checks plain values itself
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
    """Return the configuration that --method, --set and --config, which was `loaded` from `path`, ask for.

    Raises:
        click.UsageError: a setting without a method, or a method that contradicts the file.
        ConfigError: values out of range.
    """
    from dataclasses import replace

    from ckptz.codec.lossless import Lossless

    if loaded is not None:
        if method not in (None, loaded.name):
            raise click.UsageError(f"--method {method} contradicts {path}, which is for {loaded.name}")
        return replace(loaded, **checked_settings(type(loaded), settings))
    if method is None and settings:
        raise click.UsageError(f"--set {next(iter(settings))} needs --method; without one nothing is lost")
    chosen = method_type(method, Lossless)
    return chosen(**checked_settings(chosen, settings))


def load_config(path: Path) -> tuple[Method | None, dict[str, dict[str, Any]]]:
    """Read settings from a TOML file, or from the JSON object that a search prints with --json.

    Returns:
        (the settings of a method, None if the file names none; the settings of each group in `GROUPS`).

    Raises:
        ConfigError: the file has another form, or settings that the method does not have.
        FileNotFoundError: there is no such file.
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
        raise ConfigError(f'{path}: names no method; begin with method = "grid"')
    chosen = method_named(name)
    return chosen(**checked_settings(chosen, settings)), groups
