"""`ckptz restore`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptz_cli.options import PATH, writing_options
from ckptz_cli.session import Session, progress_bar

if TYPE_CHECKING:
    from ckptz.formats.targets import PathLike
    from ckptz.verbs.restore import OutputKind

EPILOG = """\b
Examples:
  ckptz restore model.ckptz                      writes model.safetensors beside it
  ckptz restore model.ckptz -o restored.safetensors
  ckptz restore packed/checkpoint-64 -o back     a folder, as the Trainer resumes from it
  ckptz restore run@200 -o step-200.safetensors  the weights of a step, exact if they are there
  ckptz restore step-200.ckptz --search-path ../bases
  ckptz restore training.ckptz --to safetensors  a flat file of a torch checkpoint's tensors
  ckptz restore training.ckptz --to dcp          a folder of torch.distributed.checkpoint
"""


@click.command(epilog=EPILOG, short_help="Write back what was compressed.")
@click.argument("file", type=PATH, metavar="FILE|DIR|DIR@STEP")
@click.option("-o", "--output", type=PATH, metavar="OUT", help="Output file or folder.")
@click.option(
    "--to",
    "kind",
    type=click.Choice(["safetensors", "pt", "dcp"]),
    help="Kind of file to write (default: as it was before compression).",
)
@writing_options
@click.pass_obj
def restore(
    session: Session, /, file: Path, output: PathLike | None, kind: OutputKind | None, **how: Any
) -> None:
    """Write back what was compressed. From a lossless file every bit comes back.

    A folder of shards comes back as a folder, a torch file as a torch file. All values are checked against
    the checksums that the writer stored. DIR@STEP, with an output, gives the weights of a step of a run.
    """
    import ckptz
    from ckptz_cli.render import restored_line

    with progress_bar() as progress:
        report = ckptz.restore(file, output, to=kind, progress=progress, **how)
    session.show(report, restored_line(report))
    for note in report.notes:
        session.note(note)
