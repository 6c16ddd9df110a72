"""`ckptz compress`, and how a search goes: a table on a terminal, a line for each trial with --verbose."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from ckptz_cli.options import PATH, MethodCommand, only_one, options_of_methods, writing_options
from ckptz_cli.search_options import NAMES, choose, is_search, require_budgets, save_plan, search_options
from ckptz_cli.session import Session, is_quiet, is_terminal, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from ckptz.commands.compress import CompressReport
    from ckptz.formats.targets import PathLike
    from ckptz.progress import Progress
    from ckptz.roles import Rule
    from ckptz.search_run.run import TrialReport


LAST_SHOWN: Final = 12

OnTrial: TypeAlias = "Callable[[TrialReport], None]"
EPILOG = """\b
Examples:
  ckptz compress model.safetensors               writes model.ckptz beside it
  ckptz compress model.safetensors -o out.ckptz
  ckptz compress step-200.safetensors --base step-100.ckptz --step 200
  ckptz compress step-*.safetensors --chain -o run/
  ckptz compress step-*.safetensors --chain -o run/ --resume   goes on where it was killed
  ckptz compress hf-model-folder/ -o packed/
  ckptz compress checkpoint-*/ --chain --method grid -o run/   with the optimizer's state of a Trainer
  ckptz compress training.pt                     a torch checkpoint, read without running code
  ckptz compress model.safetensors --method kmeans --levels 16 --protect 0.005
  ckptz compress model.safetensors --optimizer optimizer.pt --method grid -o state.ckptz
  ckptz compress training.pt --method grid --calibration inputs.safetensors
  ckptz compress model.safetensors --eval evaluate.py:loss --max-drop 1%

\b
If no settings keep the budget, the file is written without loss and the exit code is 6.
Ctrl-C stops a search and writes the best file so far, if one kept the budget.
"""


@click.command(cls=MethodCommand, epilog=EPILOG, short_help="Compress checkpoints, by default without loss.")
@click.argument("inputs", nargs=-1, required=True, type=PATH, metavar="INPUT...")
@click.option(
    "-o", "--output", type=PATH, metavar="OUT", help="Output file; with several inputs or --chain, a folder."
)
@click.option(
    "--base",
    type=PATH,
    multiple=True,
    callback=only_one,
    metavar="FILE",
    help="Store each input as a delta: what changed since this checkpoint.",
)
@click.option(
    "--chain",
    is_flag=True,
    help="Store each input as a delta to the one before it, by the steps in their names.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Leave outputs that are there as they are, and go on after them, as after a run that was killed.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Training step, which the file records (default: that of the metadata or the name).",
)
@search_options
@click.option("--roles", type=PATH, metavar="FILE", help="TOML file that says which tensors are what.")
@click.option(
    "--optimizer", type=PATH, metavar="FILE", help="Optimizer state, stored in the same file as INPUT."
)
@click.option(
    "--param-names",
    type=PATH,
    metavar="FILE",
    help="Names of the parameters that the optimizer numbers, one on each line.",
)
@click.option(
    "--read-optimizer",
    type=PATH,
    metavar="FILE",
    help="Checkpoint with Adam's second moments, which guide a lossy method. It is not stored.",
)
@click.option(
    "--calibration", type=PATH, metavar="FILE", help="grid: layer inputs that ckptz.hooks.Calibration saved."
)
@click.option(
    "--sensitivity", type=PATH, metavar="FILE", help="Gradients that ckptz.hooks.SensitivityTracker saved."
)
@writing_options
@click.pass_obj
def compress(
    session: Session,
    /,
    inputs: tuple[Path, ...],
    output: PathLike | None,
    roles: Path | None,
    **given: Any,
) -> None:
    """Compress checkpoints. Nothing is lost unless you name a method or a budget.

    INPUT is a .safetensors file, a torch file (.pt, .pth, .bin), a Hugging Face folder of shards, or a
    folder of torch.distributed.checkpoint. Without -o, the output stands beside INPUT, or in it if it is a
    folder.
    """
    import ckptz
    from ckptz_cli.render import compressed_line, total_line

    def show(report: CompressReport) -> None:
        session.add(report, compressed_line(report))
        for note in report.notes:
            session.note(f"{report.output}: {note}")

    lossy = {name: given.pop(name) for name in ("method", *options_of_methods(), *NAMES)}
    with view_of(lossy) as (progress, on_trial):
        config, search = choose(lossy, on_trial)
        reports = ckptz.compress(
            inputs,
            output,
            config=config,
            search=search,
            role_rules=_rules_in(roles) if roles else (),
            progress=progress,
            on_report=show,
            **given,
        )
    if n_there := len(inputs) - len(reports):
        session.note(f"{n_there} of {len(inputs)} outputs were there and stay as they are")
    if len(reports) > 1:
        session.say(total_line(reports))
    save_plan(session, lossy["save_plan"], config, reports)
    require_budgets(reports)


def _rules_in(path: Path) -> tuple[Rule, ...]:
    from ckptz.errors import ConfigError
    from ckptz.roles import load_rules

    try:
        return load_rules(path.read_text("utf-8"))
    except (UnicodeDecodeError, ConfigError) as error:
        what = error if isinstance(error, ConfigError) else "not a text file in UTF-8"
        raise ConfigError(f"{path}: {what}; --roles takes a TOML file") from None


# --- how a search goes ------------------------------------------------------------------------------


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
    for column in ("", "settings", "predicted", "size", "quality", "change", "budget used", "seconds"):
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


def _outcome(trial: TrialReport) -> tuple[str, ...]:
    from ckptz.pages.words import size
    from ckptz_cli.render import judged_text

    values = " ".join("not finite" if value is None else f"{value:.6g}" for value in trial.values)
    changes = "; ".join(map(judged_text, trial.judgements))
    used = "-" if trial.drop is None else f"{trial.drop:.0%} of the budget"
    return size(trial.n_bytes), values, changes, used, f"{trial.seconds:.1f} s"
