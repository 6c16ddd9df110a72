"""`ckptz fold`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptz_cli.options import PATH, writing_options
from ckptz_cli.progress import progress_bar
from ckptz_cli.session import Session

EPILOG = """\b
Examples:
  ckptz fold step-10.ckptz..step-20.ckptz -o step-20.from-10.ckptz
  ckptz fold 10..20 --folder run/weights -o folded.ckptz
"""


@click.command(epilog=EPILOG, short_help="Write one delta in place of several.")
@click.argument("between", metavar="A..B")
@click.option("-o", "--output", type=PATH, required=True, metavar="OUT", help="The delta to write.")
@click.option(
    "--folder", type=PATH, default=Path(), metavar="DIR", help="Folder in which steps are looked up."
)
@writing_options
@click.pass_obj
def fold(
    session: Session,
    between: str,
    output: Path,
    folder: Path,
    jobs: int | None,
    force: bool,
    search_path: tuple[Path, ...],
) -> None:
    """Write one delta in place of several: from checkpoint A straight to checkpoint B, bit for bit.

    A and B are files, or numbers of steps, which are looked up in DIR.
    """
    import ckptz
    from ckptz_cli.render_deltas import folded_line

    with progress_bar() as progress:
        report = ckptz.fold(
            between, output, folder=folder, jobs=jobs, force=force, search_path=search_path, progress=progress
        )
    session.show(report, folded_line(report))
