"""`ckptz rebase`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptz_cli.options import PATH, writing_options
from ckptz_cli.progress import progress_bar
from ckptz_cli.session import Session

EPILOG = """\b
Examples:
  ckptz rebase step-200.ckptz
  ckptz rebase step-200.ckptz -o step-200-alone.ckptz
"""


@click.command(epilog=EPILOG, short_help="Make a delta stand alone.")
@click.argument("file", type=PATH)
@click.option("-o", "--output", type=PATH, metavar="OUT", help="Write here instead of replacing FILE.")
@writing_options
@click.pass_obj
def rebase(
    session: Session,
    file: Path,
    output: Path | None,
    jobs: int | None,
    force: bool,
    search_path: tuple[Path, ...],
) -> None:
    """Make a delta stand alone: copy the parts of its bases that it needs into the file.

    Values and content id stay the same, so deltas that were made from FILE go on working. The new file is
    about as large as the chain was. FILE is replaced after the new one was read back and checked.
    """
    import ckptz
    from ckptz_cli.render_chains import rebased_line

    with progress_bar() as progress:
        report = ckptz.rebase(
            file, output, jobs=jobs, force=force, search_path=search_path, progress=progress
        )
    session.show(report, rebased_line(report))
