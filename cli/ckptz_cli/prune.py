"""`ckptz prune`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptz_cli.options import COUNT, PATH, session_options
from ckptz_cli.session import Session

EPILOG = """\b
Examples:
  ckptz prune run --keep-last 5 --dry-run
  ckptz prune run --keep-last 2 --keep-every 1000 --keep-best 1
  ckptz prune run --keep-last 1 --keep-weights-last 20
  ckptz prune run --keep-exact 0
  ckptz prune run --after 5000
"""


@click.command(epilog=EPILOG)
@click.argument("folder", type=PATH, metavar="DIR")
@click.option("--keep-last", type=COUNT, metavar="N", help="Keep the N newest steps.")
@click.option("--keep-every", type=COUNT, metavar="K", help="Keep steps that are multiples of K.")
@click.option("--keep-best", type=COUNT, metavar="N", help="Keep the N steps with the best metric.")
@click.option(
    "--higher-is-better", is_flag=True, help="With --keep-best: higher metrics are better (default lower)."
)
@click.option("--keep-weights-last", type=COUNT, metavar="N", help="Keep the weights of the N newest steps.")
@click.option(
    "--keep-weights-every", type=COUNT, metavar="K", help="Keep the weights of steps that are multiples of K."
)
@click.option(
    "--keep-exact",
    type=click.IntRange(min=0),
    metavar="N",
    help="Of lossy steps keep only the N newest exact (default: those that are).",
)
@click.option(
    "--after", type=click.IntRange(min=0), metavar="STEP", help="First remove all steps after this one."
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@session_options
@click.pass_obj
def prune(
    session: Session,
    folder: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    higher_is_better: bool,
    keep_weights_last: int | None,
    keep_weights_every: int | None,
    keep_exact: int | None,
    after: int | None,
    dry_run: bool,
) -> None:
    """Remove the steps of a training run that no rule keeps.

    DIR is a run of a Checkpointer, the Trainer or Lightning, or what ckptz compress --chain wrote. The
    newest step always stays. A file that other files are still stored against stays too, a Checkpointer's
    hidden, until they are removed. Without rules, only unfinished files of killed writers are removed.

    Files step-*.exact.ckptz make steps exact whose other files are lossy. They go with their steps, or
    before, by --keep-exact.
    """
    import ckptz
    from ckptz.store.retention import keep_policy
    from ckptz_cli.render_chains import pruned_text

    policy = keep_policy(
        steps=(keep_last, keep_every, keep_best),
        weights=(keep_weights_last, keep_weights_every, None),
        lower_is_better=not higher_is_better,
        exact=keep_exact,
    )
    report = ckptz.prune(folder, policy, after=after, dry_run=dry_run)
    session.show(report, pruned_text(report))
    for note in report.notes:
        session.note(note)
