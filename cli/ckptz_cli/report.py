"""`ckptz report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptz_cli.options import PATH, force_option, jobs_option, search_path_option, session_options
from ckptz_cli.session import Session, progress_bar

if TYPE_CHECKING:
    from ckptz.formats.targets import PathLike

EPILOG = """\b
Examples:
  ckptz report run -o report.html
  ckptz report run/step-00001000.ckptz -o step.html --histogram 'blocks.0.*'
  ckptz report run-a run-b -o both.html
  ckptz report model.safetensors model.ckptz -o loss.html
  ckptz compress model.safetensors --eval f.py:loss --json > search.json
  ckptz report model.ckptz search.json -o search.html
"""


@click.command(epilog=EPILOG, short_help="Write a page with charts of checkpoints.")
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option(
    "-o", "--output", type=PATH, default=Path("report.html"), show_default=True, help="Where the page goes."
)
@click.option(
    "--histogram",
    "histograms",
    multiple=True,
    metavar="NAME",
    help="Decode the tensors of this name, in which * and ? stand for any text, and show how their values "
    "are spread; repeatable.",
)
@jobs_option
@force_option
@search_path_option
@session_options
@click.pass_obj
def report(session: Session, /, paths: tuple[Path, ...], output: PathLike, **how: Any) -> None:
    """Write a page that shows where the bytes are, what was lost, and how a run grew.

    PATH is a folder, and the page shows the run and the newest step from inside; or .ckptz files; or two
    folders or files to compare, files also in other formats; or a .json file that compress --json printed,
    with the trials of a search.

    The page is one file, needs no network, and has every number within as JSON. Nothing is decoded but for
    histograms and for comparing two files. Files that cannot be read and bases that are missing are shown
    too; the first of them decides the exit code. An older page of this name is replaced.
    """
    import ckptz
    from ckptz_cli.render_chains import reported_line

    problems: list[Exception] = []
    with progress_bar() as progress:
        made = ckptz.report(paths, output, tell=problems.append, progress=progress, **how)
    session.show(made, reported_line(made))
    for problem in problems:
        session.fail(problem)
