"""How a search goes: a table on a terminal, a line for each trial with --verbose, silent elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from ckptz_cli.progress import is_quiet, is_terminal, progress_bar
from ckptz_cli.search_options import is_search

if TYPE_CHECKING:
    from rich.table import Table

    from ckptz.progress import Progress
    from ckptz.search_run.run import TrialReport

LAST_SHOWN: Final = 12

OnTrial: TypeAlias = "Callable[[TrialReport], None]"


@contextlib.contextmanager
def view_of(given: Mapping[str, Any]) -> Iterator[tuple[Progress, OnTrial]]:
    """Give what is told of bytes and what is told of trials: of trials if the options ask for a search."""
    from ckptz.progress import SILENT

    if is_search(given):
        with _search_view(is_verbose=given["verbose"]) as on_trial:
            yield SILENT, on_trial
    else:
        with progress_bar() as progress:
            yield progress, _nothing


@contextlib.contextmanager
def _search_view(*, is_verbose: bool) -> Iterator[OnTrial]:
    if is_quiet() or not is_terminal(sys.stderr):
        yield _line if is_verbose else _nothing
        return
    from rich.console import Console
    from rich.live import Live

    trials: list[TrialReport] = []
    console, is_shown = Console(stderr=True), is_terminal(sys.stdout)
    display = Live(console=console, transient=not is_verbose, redirect_stdout=is_shown, refresh_per_second=4)

    def tell(trial: TrialReport) -> None:
        trials.append(trial)
        display.update(_table(trials))

    with display:
        yield tell


def _nothing(trial: TrialReport) -> None:
    del trial


def _line(trial: TrialReport) -> None:
    click.echo(f"ckptz: tried {', '.join([*_settings(trial), *_outcome(trial)])}", err=True)


def _table(trials: list[TrialReport]) -> Table:
    """The best trial, and the last ones."""
    from rich.table import Table

    from ckptz.pages.words import size

    kept = [trial for trial in trials if trial.is_feasible]
    best = min(kept, key=lambda trial: trial.n_bytes, default=None)
    table = Table(box=None, pad_edge=False, title=f"{len(trials)} evaluations", title_justify="left")
    for column in ("", "settings", "predicted", "size", "quality", "budget used", "seconds"):
        table.add_column(column)
    shown = trials[-LAST_SHOWN:]
    for trial in shown if best is None or best in shown else [best, *shown]:
        mark = "best" if trial is best else ""
        style = "bold green" if trial is best else "" if trial.is_feasible else "dim"
        predicted = "-" if trial.predicted_bytes is None else size(trial.predicted_bytes)
        table.add_row(mark, ", ".join(_settings(trial)), predicted, *_outcome(trial), style=style)
    return table


def _settings(trial: TrialReport) -> list[str]:
    config: dict[str, Any] = trial.config
    if "step" in config:
        return [f"step {config['step']:g}"]
    levels = [f"{config['levels']} levels"] if "levels" in config else []
    if config.get("embedding_levels") is not None:
        levels.append(f"{config['embedding_levels']} for embeddings")
    if config.get("prune"):
        levels.append(f"prune {config['prune']:g} by {config['prune_by']}")
    return [*levels, *([f"protect {config['protect']:g}"] if "protect" in config else [])]


def _outcome(trial: TrialReport) -> tuple[str, str, str, str]:
    from ckptz.pages.words import size

    values = " ".join("not finite" if value is None else f"{value:.6g}" for value in trial.values)
    used = "-" if trial.drop is None else f"{trial.drop:.0%} of the budget"
    return size(trial.n_bytes), values, used, f"{trial.seconds:.1f} s"
