"""Options that say how weights become lossy, and the configuration they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ckptz.config import Config

METHODS = ("lossless", "kmeans")


def method_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all methods to a command; they arrive as one keyword each."""
    for option in reversed(
        (
            click.option("--method", type=click.Choice(METHODS), help="lossless (the default) or kmeans."),
            click.option(
                "--levels", type=int, metavar="N", help="kmeans: values an element may take, 2 to 255; 16."
            ),
            click.option(
                "--embedding-levels", type=int, metavar="N", help="kmeans: the same for embeddings; --levels."
            ),
            click.option(
                "--prune", type=float, metavar="F", help="kmeans: share of smallest elements made zero; 0."
            ),
            click.option(
                "--protect", type=float, metavar="F", help="kmeans: share of largest elements kept; 0.005."
            ),
            click.option(
                "--protect-as", type=click.Choice(("exact", "bf16")), help="kmeans: how they are kept; exact."
            ),
        )
    ):
        command = option(command)
    return command


def config_of(method: str | None, **given: Any) -> Config:
    """The configuration that the options mean.

    Raises:
        click.UsageError: options of a method that was not asked for.
        ConfigError: values out of range.
    """
    from ckptz.config import LOSSLESS, KMeans

    wanted = {name: value for name, value in given.items() if value is not None}
    if method == "kmeans":
        return KMeans(**wanted)
    if wanted:
        option = next(iter(wanted)).replace("_", "-")
        raise click.UsageError(f"--{option} belongs to --method kmeans, and without it nothing is lost")
    return LOSSLESS
