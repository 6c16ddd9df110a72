"""Verbs that write or remove files: `compress`, `restore`, `rebase`, `prune` and `warm-up`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.options import (
    COUNT,
    PATH,
    MethodCommand,
    only_one,
    options_of_methods,
    session_options,
    writing_options,
)
from ckptz_cli.search_options import NAMES, choose, require_budgets, save_plan, search_options, search_view
from ckptz_cli.session import Session, progress_bar

if TYPE_CHECKING:
    from ckptz.foreign.targets import PathLike
    from ckptz.state.roles import Rule
    from ckptz.verbs.compress import CompressReport
    from ckptz.verbs.restore import OutputKind


COMPRESS_EXAMPLES: Final = """\b
Examples:
  ckptz compress model.safetensors               writes model.ckptz beside it
  ckptz compress model.safetensors -o out.ckptz
  ckptz compress step-200.safetensors --base step-100.ckptz --step 200
  ckptz compress step-*.safetensors --chain -o run/
  ckptz compress step-*.safetensors --chain -o run/ --resume   goes on where it was killed
  ckptz compress hf-model-folder/ -o packed/
  ckptz compress checkpoint-*/ --chain --method grid -o run/   with the optimizer's state of a Trainer
  ckptz compress training.pt                     a torch checkpoint, read without running code
  ckptz compress model.safetensors --method kmeans --levels 16 --protect 0.005
  ckptz compress model.safetensors --optimizer optimizer.pt --method grid -o state.ckptz
  ckptz compress training.pt --method grid --calibration inputs.safetensors
  ckptz compress model.safetensors --eval evaluate.py:loss --max-drop 1%

\b
If no settings keep the budget, the file is written without loss and the exit code is 6.
Ctrl-C stops a search and writes the best file so far, if one kept the budget.
"""


@click.command(
    cls=MethodCommand, epilog=COMPRESS_EXAMPLES, short_help="Compress checkpoints, by default without loss."
)
@click.argument("inputs", nargs=-1, required=True, type=PATH, metavar="INPUT...")
@click.option(
    "-o", "--output", type=PATH, metavar="OUT", help="Output file; with several inputs or --chain, a folder."
)
@click.option(
    "--base",
    type=PATH,
    multiple=True,
    callback=only_one,
    metavar="FILE",
    help="Store each input as a delta: what changed since this checkpoint.",
)
@click.option(
    "--chain",
    is_flag=True,
    help="Store each input as a delta to the one before it, by the steps in their names.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Leave outputs that are there as they are, and go on after them, as after a run that was killed.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Training step, which the file records (default: that of the metadata or the name).",
)
@search_options
@click.option("--roles", type=PATH, metavar="FILE", help="TOML file that says which tensors are what.")
@click.option(
    "--optimizer",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="Optimizer state, stored in the same file as INPUT; one for each, in their order.",
)
@click.option(
    "--param-names",
    type=PATH,
    metavar="FILE",
    help="Names of the parameters that the optimizer numbers, one on each line.",
)
@click.option(
    "--read-optimizer",
    type=PATH,
    metavar="FILE",
    help="Checkpoint with Adam's second moments, which guide a lossy method. It is not stored.",
)
@click.option(
    "--calibration", type=PATH, metavar="FILE", help="grid: layer inputs that ckptz.hooks.Calibration saved."
)
@click.option(
    "--sensitivity", type=PATH, metavar="FILE", help="Gradients that ckptz.hooks.SensitivityTracker saved."
)
@writing_options
@click.pass_obj
def compress(
    session: Session,
    /,
    inputs: tuple[Path, ...],
    output: PathLike | None,
    roles: Path | None,
    **given: Any,
) -> None:
    """Compress checkpoints. Nothing is lost unless you name a method or a budget.

    INPUT is a .safetensors file, a torch file (.pt, .pth, .bin), a Hugging Face folder of shards, or a
    folder of torch.distributed.checkpoint. Without -o, the output stands beside INPUT, or in it if it is a
    folder.
    """
    import ckptz
    from ckptz_cli.render import compressed_line, total_line

    def show(report: CompressReport) -> None:
        session.add(report, compressed_line(report))
        for note in report.notes:
            session.note(f"{report.output}: {note}")

    lossy = {name: given.pop(name) for name in ("method", *options_of_methods(), *NAMES)}
    config, search = choose(lossy)
    with contextlib.ExitStack() as held:
        if search is None:
            given["progress"] = held.enter_context(progress_bar())
        else:
            on_trial = held.enter_context(search_view(is_verbose=lossy["verbose"]))
            search = replace(search, on_trial=on_trial)
        reports = ckptz.compress(
            inputs,
            output,
            config=config,
            search=search,
            role_rules=_rules_in(roles) if roles else (),
            on_report=show,
            **given,
        )
    if n_there := len(inputs) - len(reports):
        session.note(f"{n_there} of {len(inputs)} outputs were there and stay as they are")
    if len(reports) > 1:
        session.say(total_line(reports))
    save_plan(session, lossy["save_plan"], config, reports)
    require_budgets(reports)


def _rules_in(path: Path) -> tuple[Rule, ...]:
    from ckptz.errors import ConfigError
    from ckptz.state.roles import load_rules

    try:
        return load_rules(path.read_text("utf-8"))
    except (UnicodeDecodeError, ConfigError) as error:
        what = error if isinstance(error, ConfigError) else "not a text file in UTF-8"
        raise ConfigError(f"{path}: {what}; --roles takes a TOML file") from None


RESTORE_EXAMPLES: Final = """\b
Examples:
  ckptz restore model.ckptz                      writes model.safetensors beside it
  ckptz restore model.ckptz -o restored.safetensors
  ckptz restore packed/checkpoint-64 -o back     a folder, as the Trainer resumes from it
  ckptz restore run/checkpoint-64 -o plain       the same, of CkptzTrainerMixin's own folder
  ckptz restore run@200 -o step-200.safetensors  the weights of a step, exact if they are there
  ckptz restore step-200.ckptz --search-path ../bases
  ckptz restore training.ckptz --to safetensors  a flat file of a torch checkpoint's tensors
  ckptz restore training.ckptz --to dcp          a folder of torch.distributed.checkpoint
"""


@click.command(epilog=RESTORE_EXAMPLES, short_help="Write back what was compressed.")
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

    A folder of shards comes back as a folder, a torch file as a torch file, unless the name of the output
    says otherwise. All values are checked against the checksums that the writer stored. DIR@STEP, with an
    output, gives the weights of a step of a run.
    """
    import ckptz
    from ckptz_cli.render import restored_line

    with progress_bar() as progress:
        report = ckptz.restore(file, output, to=kind, progress=progress, **how)
    session.show(report, restored_line(report))
    for note in report.notes:
        session.note(note)


REBASE_EXAMPLES: Final = """\b
Examples:
  ckptz rebase step-200.ckptz
  ckptz rebase step-200.ckptz -o step-200-alone.ckptz
"""


@click.command(epilog=REBASE_EXAMPLES, short_help="Make a delta stand alone.")
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
    from ckptz_cli.render import rebased_line

    with progress_bar() as progress:
        report = ckptz.rebase(file, output, progress=progress, **how)
    session.show(report, rebased_line(report))


PRUNE_EXAMPLES: Final = """\b
Examples:
  ckptz prune run --keep-last 5 --dry-run
  ckptz prune run --keep-last 2 --keep-every 1000 --keep-best 1
  ckptz prune run --keep-last 1 --keep-weights-last 20
  ckptz prune run --keep-exact 0
  ckptz prune run --after 5000
"""


@click.command(epilog=PRUNE_EXAMPLES)
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
    from ckptz.run.keep import keep_policy
    from ckptz_cli.render import pruned_text

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


WARM_UP_EXAMPLES: Final = """\b
Examples:
  ckptz warm-up
  RUN pip install ckptz && NUMBA_CACHE_DIR=/opt/ckptz-kernels ckptz warm-up     in a Dockerfile
"""


@click.command("warm-up", epilog=WARM_UP_EXAMPLES, short_help="Compile ahead what other commands need.")
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
