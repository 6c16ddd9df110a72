"""`ckptz diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from ckptz_cli.options import PATH, jobs_option, search_path_option, session_options
from ckptz_cli.session import Session, progress_bar

DIFFERENT: Final = 10  # no code of an error, so that a script can tell them apart

EPILOG = """\b
Examples:
  ckptz diff step-100.ckptz step-200.ckptz
  ckptz diff model.safetensors model.ckptz --top 20
  ckptz diff run@200 resumed@200 --exit-code
  ckptz diff a.ckptz b.safetensors --exit-code > /dev/null || echo "differ, or failed"
"""


@click.command(epilog=EPILOG, short_help="Show what changed between two checkpoints.")
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@click.option(
    "--top", type=click.IntRange(min=0), metavar="N", help="Show only the first N tensors and values."
)
@click.option(
    "--sort",
    type=click.Choice(["change", "max", "share", "name"]),
    default="change",
    show_default=True,
    help="change: by rms change relative to rms; max: by largest change; share: by share of changed "
    "elements; name: by name.",
)
@click.option(
    "--exit-code", is_flag=True, help=f"End with exit code {DIFFERENT} if they differ, metadata apart."
)
@jobs_option
@search_path_option
@session_options
@click.pass_obj
def diff(session: Session, /, first: Path, second: Path, exit_code: bool, **how: Any) -> None:
    """Show what changed from checkpoint A to checkpoint B, tensor by tensor.

    Each may be a .ckptz, .safetensors or torch file, a folder of shards, or a step of a run: DIR@STEP, or DIR
    for its newest one. Of a step all files are compared, exact ones where there are some. Plain values that
    differ, such as learning rates, and states of random numbers are named, too.

    The exit code is 0 even if they differ, unless --exit-code is given.
    """
    import ckptz
    from ckptz_cli.render_chains import diffed_text

    with progress_bar() as progress:
        report = ckptz.diff(first, second, progress=progress, **how)
    session.show(report, diffed_text(report))
    if exit_code and not report.is_equal:
        session.exit_code = DIFFERENT
