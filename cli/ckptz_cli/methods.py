"""Options that say how tensors become lossy, from the table of methods, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ckptz.methods.table import AUTO, METHODS
from ckptz_cli.options import together

if TYPE_CHECKING:
    from ckptz.methods.method import Method, Option

OPTION_OF: dict[str, tuple[str, Option]] = {
    option.keyword: (method.name, option) for method in METHODS.values() for option in method.options
}


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


def _click_option(method: str, option: Option) -> Callable[[Any], Any]:
    kind = click.Choice(option.type) if isinstance(option.type, tuple) else option.type
    more: dict[str, Any] = {} if option.parse is None else {"multiple": True, "callback": _parsed(option)}
    return click.option(
        option.flag, type=kind, metavar=option.metavar, help=f"{method}: {option.help}", **more
    )


# The options of all methods; they arrive as one keyword each.
method_options = together(
    click.option(
        "--method",
        type=click.Choice((*list(METHODS)[:1], "auto", *list(METHODS)[1:])),
        help=f"{', '.join(METHODS)}, or auto, which is {AUTO} (default lossless).",
    ),
    *(_click_option(method, option) for method, option in OPTION_OF.values()),
)


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn options that were used into fields of their method."""
    return {OPTION_OF[name][1].field: value for name, value in given.items() if is_given(value)}


def config_of(method: str | None, **given: Any) -> Method:
    """Make the configuration that the options mean.

    Raises:
        click.UsageError: options of a method that was not asked for.
        ConfigError: values out of range.
    """
    name = AUTO if method == "auto" else method or "lossless"
    for keyword in (keyword for keyword, value in given.items() if is_given(value)):
        owner, option = OPTION_OF[keyword]
        if owner != name:
            instead = (
                f"not to --method {name}" if METHODS[name].is_lossy else "and without it nothing is lost"
            )
            raise click.UsageError(f"{option.flag} belongs to --method {owner}, {instead}")
    return METHODS[name](**fields_of(given))
