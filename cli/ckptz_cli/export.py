"""`ckptz export`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptz_cli.options import PATH, writing_options
from ckptz_cli.progress import progress_bar
from ckptz_cli.session import Session

EPILOG = """\b
Examples:
  ckptz export run/step-20.ckptz -o step-20-alone.ckptz
  ckptz export 20 --folder run/weights -o model.safetensors
"""


@click.command(epilog=EPILOG)
@click.argument("step", metavar="STEP")
@click.option(
    "-o", "--output", type=PATH, required=True, metavar="FILE", help="Output file, .ckptz or .safetensors."
)
@click.option(
    "--folder", type=PATH, default=Path(), metavar="DIR", help="Folder in which steps are looked up."
)
@writing_options
@click.pass_obj
def export(
    session: Session,
    step: str,
    output: Path,
    folder: Path,
    jobs: int | None,
    force: bool,
    search_path: tuple[Path, ...],
) -> None:
    """Write one step of a chain as a file that needs no other.

    STEP is a file, or the number of a step, which is looked up in DIR.
    """
    import ckptz
    from ckptz_cli.render_deltas import exported_line

    if not step:
        raise click.UsageError("STEP is empty; name a file or a step")
    with progress_bar() as progress:
        report = ckptz.export(
            step, output, folder=folder, jobs=jobs, force=force, search_path=search_path, progress=progress
        )
    session.show(report, exported_line(report))
