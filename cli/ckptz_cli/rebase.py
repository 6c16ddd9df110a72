"""`ckptz rebase`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.options import PATH, writing_options
from ckptz_cli.session import Session, progress_bar

if TYPE_CHECKING:
    from ckptz.formats.targets import PathLike

EPILOG: Final = """\b
Examples:
  ckptz rebase step-200.ckptz
  ckptz rebase step-200.ckptz -o step-200-alone.ckptz
"""


@click.command(epilog=EPILOG, short_help="Make a delta stand alone.")
@click.argument("file", type=PATH)
@click.option("-o", "--output", type=PATH, metavar="OUT", help="Write here instead of replacing FILE.")
@writing_options
@click.pass_obj
def rebase(session: Session, /, file: Path, output: PathLike | None, **how: Any) -> None:
    """Make a delta stand alone, so that its bases can go.

    Values and content id stay the same, so deltas that were made from FILE go on working. Lossless tensors
    are encoded anew. Lossy ones keep their codes, which later deltas may need, and take along the parts of
    their bases that these need: that part is about as large as its chain was. FILE is replaced after the
    new one was read back and checked.
    """
    import ckptz
    from ckptz_cli.render_chains import rebased_line

    with progress_bar() as progress:
        report = ckptz.rebase(file, output, progress=progress, **how)
    session.show(report, rebased_line(report))
