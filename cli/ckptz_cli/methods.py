"""Options that say how weights become lossy, and the configuration they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptz_cli.options import together

if TYPE_CHECKING:
    from ckptz.config import Config

AUTO = "grid"  # what --method auto is
METHODS = ("lossless", "auto", "kmeans", "grid")
GRID_OPTIONS = {"grid_step": "step", "dead_zone": "dead_zone"}  # option -> field of `ckptz.config.Grid`


def _layer_shares(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    """`head=0.1` as a layer type and its share."""
    from ckptz.roles import LAYER_TYPES

    shares = []
    for value in values:
        layer_type, _, share = value.partition("=")
        if layer_type not in LAYER_TYPES:
            raise click.BadParameter(
                f"{layer_type!r} is not one of {', '.join(LAYER_TYPES)}", context, option
            )
        try:
            shares.append((layer_type, float(share)))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not TYPE=SHARE", context, option) from None
    return tuple(shares)


def is_given(value: Any) -> bool:
    """Whether an option was used; one that may be repeated arrives as an empty tuple if not."""
    return value is not None and value != ()


# The options of all methods; they arrive as one keyword each.
method_options = together(
    click.option(
        "--method",
        type=click.Choice(METHODS),
        help=f"lossless (the default), kmeans, grid, or auto, which is {AUTO}.",
    ),
    click.option(
        "--levels", type=int, metavar="N", help="kmeans: values an element may take, 2 to 255 (default 16)."
    ),
    click.option(
        "--embedding-levels",
        type=int,
        metavar="N",
        help="kmeans: the same for embeddings (default as --levels).",
    ),
    click.option(
        "--prune", type=float, metavar="F", help="kmeans: share of smallest elements made zero (default 0)."
    ),
    click.option(
        "--protect", type=float, metavar="F", help="kmeans: share of largest elements kept (default 0.005)."
    ),
    click.option(
        "--protect-as",
        type=click.Choice(("exact", "bf16")),
        help="kmeans: how they are kept (default exact).",
    ),
    click.option(
        "--prune-by",
        type=click.Choice(("magnitude", "sensitivity")),
        help="kmeans: what smallest means (default magnitude).",
    ),
    click.option(
        "--protect-by",
        type=click.Choice(("magnitude", "sensitivity", "either")),
        help="kmeans: what largest means (default magnitude).",
    ),
    click.option(
        "--layer-prune",
        multiple=True,
        callback=_layer_shares,
        metavar="TYPE=F",
        help="kmeans: another share to prune for a layer type, such as head=0; repeatable.",
    ),
    click.option(
        "--grid-step", type=float, metavar="S", help="grid: multiple of the reference step (default 1)."
    ),
    click.option(
        "--dead-zone",
        type=float,
        metavar="D",
        help="grid: share of a step added to zero's own (default 0.1).",
    ),
)


def config_of(method: str | None, **given: Any) -> Config:
    """The configuration that the options mean.

    Raises:
        click.UsageError: options of a method that was not asked for.
        ConfigError: values out of range.
    """
    from ckptz.config import LOSSLESS, Grid, KMeans

    wanted = {name: value for name, value in given.items() if is_given(value)}
    method = AUTO if method == "auto" else method
    is_lossy = method not in (None, "lossless")
    for name in wanted:
        owner = "grid" if name in GRID_OPTIONS else "kmeans"
        if owner != method:
            option = name.replace("_", "-")
            instead = f"not to --method {method}" if is_lossy else "and without it nothing is lost"
            raise click.UsageError(f"--{option} belongs to --method {owner}, {instead}")
    if method == "kmeans":
        return KMeans(**wanted)
    if method == "grid":
        return Grid(**{GRID_OPTIONS[name]: value for name, value in wanted.items()})
    return LOSSLESS
