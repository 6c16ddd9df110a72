"""`ckptz inspect`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptz_cli.options import PATH, search_path_option, session_options
from ckptz_cli.session import Session

EPILOG = """\b
Examples:
  ckptz inspect model.ckptz
  ckptz inspect model.ckptz --tensors
  ckptz inspect model.ckptz --json | jq .content_id
"""


@click.command(epilog=EPILOG, short_help="Show what a .ckptz file holds, without decoding it.")
@click.argument("file", type=PATH, metavar="FILE|DIR|DIR@STEP")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@search_path_option
@session_options
@click.pass_obj
def inspect(session: Session, file: Path, tensors: bool, search_path: tuple[Path, ...]) -> None:
    """Show what a .ckptz file holds, or the newest one or a step of a folder, without decoding it.

    That is its format, content id, chain, metadata, sizes, what was promised and measured, and how tensors
    are stored. It works even if the base is missing.
    """
    import ckptz
    from ckptz_cli.render_inspect import inspected_text

    report = ckptz.inspect(file, search_path=search_path)
    session.show(report, inspected_text(report, with_tensors=tensors))
