"""`ckptz verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckptz_cli.options import PATH, jobs_option, search_path_option, session_options
from ckptz_cli.session import Session, progress_bar

EPILOG = """\b
Examples:
  ckptz verify model.ckptz
  ckptz verify run
  ckptz verify model.ckptz --against model.safetensors
"""


@click.command(epilog=EPILOG, short_help="Check every stored byte and every value.")
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE|DIR|DIR@STEP...")
@click.option("--against", type=PATH, metavar="ORIGINAL", help="Also compare with this checkpoint.")
@jobs_option
@search_path_option
@session_options
@click.pass_obj
def verify(session: Session, /, files: tuple[Path, ...], **how: Any) -> None:
    """Check every stored byte and every decoded value, through the whole chain.

    With --against, also check that names, types, shapes, metadata and all bits are those of ORIGINAL.
    Lossy tensors must be within the errors that the file records.

    In a folder, every file that ckptz log lists is checked with its chain, and in a training run that the
    files of each step belong together. All files are checked; the first failure decides the exit code.
    """
    import ckptz
    from ckptz_cli.folders import expanded, report_folders
    from ckptz_cli.render import verified_line

    for file in expanded(files, session):
        try:
            with progress_bar() as progress:
                report = ckptz.verify(file, progress=progress, **how)
            session.add(report, verified_line(report))
        except Exception as error:
            session.add_failure(str(file), error)
    report_folders(files, session)
