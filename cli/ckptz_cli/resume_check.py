"""`ckptz resume-check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckptz_cli.diff import DIFFERENT
from ckptz_cli.options import PATH, jobs_option, search_path_option, session_options
from ckptz_cli.session import Session, progress_bar

EPILOG = f"""\b
Examples:
  ckptz resume-check run@200 resumed@200
  ckptz resume-check run/checkpoint-200 resumed/checkpoint-200
  ckptz resume-check before.pt after.pt
  ckptz resume-check --losses log.jsonl resumed.jsonl --tolerance 1e-6

\b
Ends with 0 if nothing differs, and with {DIFFERENT} if something does.
"""


@click.command("resume-check", epilog=EPILOG, short_help="Name the first thing that differs after a resume.")
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@click.option("--losses", is_flag=True, help="A and B are records of losses: numbers, or JSON, line by line.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="X",
    help="How far two losses may be from each other; by default they must be equal.",
)
@jobs_option
@search_path_option
@session_options
@click.pass_obj
def resume_check(session: Session, /, first: Path, second: Path, **how: Any) -> None:
    """Name the first thing in which two saved states, or the losses of two runs, differ.

    A and B may be any checkpoints, or DIR@STEP for both files of a step that a Checkpointer wrote. A folder
    of .ckptz files stands for its newest checkpoint, with all that was saved beside the weights. Weights are
    compared first, then the state of the optimizer, then the rest, plain values included; the user's own
    metadata are not.

    With --losses they are text with a number a line, or JSON lines with "loss" and maybe "step"; steps that
    only one has are left out, so that the log of a resumed run can be held against that of the whole one.
    """
    import ckptz
    from ckptz_cli.render_chains import resumed_line

    with progress_bar() as progress:
        report = ckptz.resume_check(first, second, progress=progress, **how)
    session.show(report, resumed_line(report))
    if not report.is_equal:
        session.exit_code = DIFFERENT
