"""`ckptz warm-up`."""

from __future__ import annotations

import click

from ckptz_cli.options import COUNT, session_options
from ckptz_cli.session import Session

EPILOG = """\b
Examples:
  ckptz warm-up
  RUN pip install ckptz && NUMBA_CACHE_DIR=/opt/ckptz-kernels ckptz warm-up     in a Dockerfile
"""


@click.command("warm-up", epilog=EPILOG, short_help="Compile ahead what other commands need.")
@click.option("--jobs", type=COUNT, metavar="N", help="Number of processes (default: all cores).")
@session_options
@click.pass_obj
def warm_up(session: Session, jobs: int | None) -> None:
    """Make later commands start sooner: compile ahead what they need, for example in images of containers.

    Without it, each command compiles what it needs when it first needs it, once on a machine. Kernels are
    kept beside the package, in the home directory where that cannot be written, or where NUMBA_CACHE_DIR
    says. Run it on the kind of processor that will use them: another one compiles its own.
    """
    import ckptz

    report = ckptz.warm_up(jobs=jobs)
    where = f"kept in {report.folder}" if report.folder else "but no folder can be written to keep them in"
    session.show(report, f"kernels of {', '.join(report.methods)}: ready, {where}, {report.seconds:.2f} s")
