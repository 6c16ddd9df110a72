"""`ckptz apply`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptz_cli.options import PATH, writing_options
from ckptz_cli.progress import progress_bar
from ckptz_cli.session import Session

EPILOG = """\b
Examples:
  ckptz apply step-11.ckptz --to model.safetensors -o model-11.safetensors
  ckptz apply step-11.ckptz --to model.safetensors --in-place
"""


@click.command(epilog=EPILOG, short_help="Bring a plain checkpoint up to date with a delta.")
@click.argument("delta", type=PATH)
@click.option(
    "--to", "base", type=PATH, required=True, metavar="FILE", help="Checkpoint that DELTA was made from."
)
@click.option("-o", "--output", type=PATH, metavar="OUT", help="The .safetensors file to write.")
@click.option("--in-place", is_flag=True, help="Replace FILE when the new one is complete.")
@writing_options
@click.pass_obj
def apply(
    session: Session,
    delta: Path,
    base: Path,
    output: Path | None,
    in_place: bool,
    jobs: int | None,
    force: bool,
    search_path: tuple[Path, ...],
) -> None:
    """Bring a plain checkpoint up to date with a delta.

    FILE must hold the tensors that DELTA was made from. Its name and place do not matter.
    """
    import ckptz
    from ckptz_cli.render_deltas import applied_line

    if in_place == (output is not None):
        raise click.UsageError("name an output with -o, or replace FILE with --in-place")
    with progress_bar() as progress:
        report = ckptz.apply(
            delta, base, output, jobs=jobs, force=force, search_path=search_path, progress=progress
        )
    session.show(report, applied_line(report))
