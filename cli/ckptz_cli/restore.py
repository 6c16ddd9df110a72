"""`ckptz restore`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptz_cli.options import PATH, writing_options
from ckptz_cli.progress import progress_bar
from ckptz_cli.session import Session

if TYPE_CHECKING:
    from ckptz.commands.restore import Kind

EPILOG = """\b
Examples:
  ckptz restore model.ckptz                      writes model.safetensors beside it
  ckptz restore model.ckptz -o restored.safetensors
  ckptz restore step-200.ckptz --search-path ../bases
  ckptz restore training.ckptz --to safetensors  a flat file of a torch checkpoint's tensors
  ckptz restore training.ckptz --to dcp          a folder of torch.distributed.checkpoint
"""


@click.command(epilog=EPILOG, short_help="Write back what was compressed.")
@click.argument("file", type=PATH)
@click.option("-o", "--output", type=PATH, metavar="OUT", help="Where to write.")
@click.option(
    "--to",
    "kind",
    type=click.Choice(["safetensors", "pt", "dcp"]),
    help="What to write; by default what was compressed.",
)
@writing_options
@click.pass_obj
def restore(session: Session, /, file: Path, output: Path | None, kind: Kind | None, **how: Any) -> None:
    """Write back what was compressed; what was compressed without loss comes back bit for bit.

    Every chunk is checked against the checksum of what the writer decoded. A folder of shards comes back as
    one, a torch file as a torch file.
    """
    import ckptz
    from ckptz_cli.render import restored_line

    with progress_bar() as progress:
        report = ckptz.restore(file, output, to=kind, progress=progress, **how)
    session.show(report, restored_line(report))
    for note in report.notes:
        session.note(note)
