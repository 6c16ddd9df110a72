"""`ckptz log`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptz_cli.options import PATH, debug_option, json_option, search_path_option
from ckptz_cli.session import Session

EPILOG = """\b
Examples:
  ckptz log run
  ckptz log run --search-path bases
  ckptz log run --json | jq '.entries[] | select(.kind == "missing")'
"""


@click.command(epilog=EPILOG, short_help="List the checkpoints of a folder and their bases.")
@click.argument("folder", type=PATH, default=Path(), metavar="[DIR]")
@search_path_option
@json_option
@debug_option
@click.pass_obj
def log(session: Session, folder: Path, search_path: tuple[Path, ...]) -> None:
    """List the checkpoints of a folder, each below the one it is stored against.

    DIR is the working folder by default. Nothing is decoded. Files that cannot be read and bases that are
    missing are listed too; the first of them decides the exit code.
    """
    import ckptz
    from ckptz_cli.render_chains import logged_text

    problems: list[Exception] = []
    report = ckptz.log(folder, search_path=search_path, tell=problems.append)
    session.show(report, logged_text(report))
    for problem in problems:
        session.fail(problem)
