"""The verbs of the command line: options, one call of the library, and what is printed of its report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz.words import printable
from ckptz_cli.method_options import GUIDE, INPUT, method_options
from ckptz_cli.options import (
    COUNT,
    PATH,
    SectionedCommand,
    force_option,
    jobs_option,
    only_one,
    search_path_option,
    session_options,
    storage_option,
    writing_options,
)
from ckptz_cli.search_options import (
    NAMES,
    choose,
    require_budgets,
    search_options,
    search_view,
)
from ckptz_cli.session import Session, Verb, progress_bar

if TYPE_CHECKING:
    from ckptz.foreign.inputs import PathLike
    from ckptz.state.roles import Rule
    from ckptz.verbs.compress import CompressReport
    from ckptz.verbs.restore import OutputKind

DIFFERENT: Final = 10  # exit code of `diff --exit-code`; no error has it


# --- verbs that read ----------------------------------------------------------------------------

INSPECT_EXAMPLES: Final = """\b
Examples:
  ckptz inspect model.ckptz
  ckptz inspect model.ckptz --tensors
  ckptz inspect model.ckptz --json | jq .content_id
"""


@click.command(
    cls=Verb, epilog=INSPECT_EXAMPLES, short_help="Show what a .ckptz file holds, without decoding it."
)
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
    from ckptz_cli.tables import inspected_text

    report = ckptz.inspect(file, search_path=search_path)
    session.show(report, inspected_text(report, with_tensors=tensors))


VERIFY_EXAMPLES: Final = """\b
Examples:
  ckptz verify model.ckptz
  ckptz verify run
  ckptz verify model.ckptz --against model.safetensors
"""


@click.command(cls=Verb, epilog=VERIFY_EXAMPLES, short_help="Check every stored byte and every value.")
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE|DIR|DIR@STEP...")
@click.option("--against", type=PATH, metavar="ORIGINAL", help="Also compare with this checkpoint.")
@jobs_option
@search_path_option
@session_options
@click.pass_obj
def verify(session: Session, /, files: tuple[Path, ...], against: Path | None, **how: Any) -> None:
    """Check every stored byte and every decoded value, through the whole chain.

    With --against, also check that names, types, shapes, metadata and all bits are those of ORIGINAL.
    Lossy tensors must be within the errors that the file records.

    In a folder, every file that ckptz log lists is checked with its chain, and in a training run that the
    files of each step belong together. Bases that are linked into the folder are not compared with ORIGINAL.
    All files are checked; the first failure decides the exit code.
    """
    import ckptz
    from ckptz_cli.render import verified_line

    for file, is_base in _files_of(files, session):
        try:
            with progress_bar() as progress:
                original = None if is_base else against
                report = ckptz.verify(file, against=original, progress=progress, **how)
            session.add(report, verified_line(report))
        except Exception as error:
            session.add_failure(str(file), error)


def _files_of(paths: Sequence[Path], session: Session) -> Iterator[tuple[Path, bool]]:
    """Yield files, and of folders the files that `log` lists; a folder without any is a failure.

    The second value says whether a file is in its folder only as a base of others, under a second name.
    """
    from ckptz.errors import CkptzError, ConfigError
    from ckptz.format.byte_source import is_folder
    from ckptz.run.folder import leftovers, mismatched_pairs
    from ckptz.run.links import second_names
    from ckptz.run.names import run_files

    for path in paths:
        try:
            if not is_folder(path):
                yield path, False
                continue
            left = {path / name for name in leftovers(path)}
            files = [file for file in run_files(path) if file not in left]
            if not files:
                what = "holds no .ckptz files; name a folder of checkpoints, or a file with --against"
                raise ConfigError(f"{path}: {what}")
            bases = second_names(files)
            yield from ((file, file in bases) for file in files)
        except (CkptzError, OSError) as error:
            session.add_failure(str(path), error)
    for folder in filter(Path.is_dir, paths):
        for file, mismatch in mismatched_pairs(folder):
            session.add_failure(str(file), mismatch)
        if unfinished := leftovers(folder):
            session.note(f"{folder}: {len(unfinished)} unfinished files; ckptz prune removes them")


LOG_EXAMPLES: Final = """\b
Examples:
  ckptz log run
  ckptz log run --search-path bases
  ckptz log run --json | jq '.entries[] | select(.kind == "missing")'
"""


@click.command(cls=Verb, epilog=LOG_EXAMPLES, short_help="List the checkpoints of a folder and their bases.")
@click.argument("folder", type=PATH, default=Path(), metavar="[DIR]")
@search_path_option
@session_options
@click.pass_obj
def log(session: Session, folder: Path, search_path: tuple[Path, ...]) -> None:
    """List the checkpoints of a folder, each below the one it is stored against.

    DIR is the working folder by default: a run of a Checkpointer, the Trainer or Lightning, or what ckptz
    compress --chain wrote. Nothing is decoded. Files that cannot be read and bases that are
    missing are listed too; the first of them decides the exit code.
    """
    import ckptz
    from ckptz_cli.tables import logged_text

    problems: list[Exception] = []
    report = ckptz.log(folder, search_path=search_path, tell=problems.append)
    session.show(report, logged_text(report))
    for problem in problems:
        session.fail(problem)


DIFF_EXAMPLES: Final = """\b
Examples:
  ckptz diff step-100.ckptz step-200.ckptz
  ckptz diff model.safetensors model.ckptz --top 20
  ckptz diff run@200 resumed@200 --exit-code
  ckptz diff a.ckptz b.safetensors --exit-code > /dev/null || echo "differ, or failed"
"""


@click.command(cls=Verb, epilog=DIFF_EXAMPLES, short_help="Show what changed between two checkpoints.")
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@click.option(
    "--top", type=click.IntRange(min=0), metavar="N", help="Show only the first N tensors and values."
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

    Those come first that changed most, relative to their rms.
    Each may be a .ckptz, .safetensors or torch file, a folder of shards, or a step of a run: DIR@STEP, or DIR
    for its newest one. Of a step all files are compared, exact ones where there are some. Plain values that
    differ, such as learning rates, and states of random numbers are named, too.

    The exit code is 0 even if they differ, unless --exit-code is given.
    """
    import ckptz
    from ckptz_cli.tables import diffed_text

    with progress_bar() as progress:
        report = ckptz.diff(first, second, progress=progress, **how)
    session.show(report, diffed_text(report))
    if exit_code and not report.is_equal:
        session.exit_code = DIFFERENT


REPORT_EXAMPLES: Final = """\b
Examples:
  ckptz report run -o report.html
  ckptz report run/step-00001000.ckptz -o step.html --histogram 'blocks.0.*'
  ckptz report run-a run-b -o both.html
  ckptz report model.safetensors model.ckptz -o loss.html
  ckptz compress model.safetensors --eval f.py:loss --json > search.json
  ckptz report model.ckptz search.json -o search.html
"""


@click.command(cls=Verb, epilog=REPORT_EXAMPLES, short_help="Write a page with charts of checkpoints.")
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option(
    "-o", "--output", type=PATH, default=Path("report.html"), show_default=True, help="Where the page goes."
)
@click.option(
    "--histogram",
    "histograms",
    multiple=True,
    metavar="NAME",
    help="Decode the tensors of this name, in which * and ? stand for any text, and show how their values "
    "are spread; repeatable.",
)
@jobs_option
@force_option
@search_path_option
@session_options
@click.pass_obj
def report(session: Session, /, paths: tuple[Path, ...], output: PathLike, **how: Any) -> None:
    """Write a page that shows where the bytes are, what was lost, and how a run grew.

    PATH is a folder, and the page shows the run and the newest step from inside; or .ckptz files; or two
    folders or files to compare, files also in other formats; or a .json file that compress --json printed,
    with the trials of a search.

    The page is one file, needs no network, and has every number within as JSON. Nothing is decoded but for
    histograms and for comparing two files. Files that cannot be read and bases that are missing are shown
    too; the first of them decides the exit code. An older page of this name is replaced.
    """
    import ckptz
    from ckptz_cli.render import reported_line

    problems: list[Exception] = []
    with progress_bar() as progress:
        made = ckptz.report(paths, output, tell=problems.append, progress=progress, **how)
    session.show(made, reported_line(made))
    for problem in problems:
        session.fail(problem)


# --- verbs that write or remove -----------------------------------------------------------------

COMPRESS_EXAMPLES: Final = """\b
Examples:
  ckptz compress model.safetensors               writes model.ckptz beside it
  ckptz compress step-*.safetensors --chain -o run/
  ckptz compress hf-model-folder/ -o packed/
  ckptz compress checkpoint-*/ --chain --method grid -o run/   of a Trainer
  ckptz compress training.pt --method kmeans --set levels=16
  ckptz compress model.safetensors --dry-run --method lossless --method grid
  ckptz compress model.safetensors --eval evaluate.py:loss --budget 1%
  ckptz compress model.safetensors --target-size 20x

\b
If no settings keep the budget, the file is written without loss and the exit code is 6.
Ctrl-C stops a search and writes the best file so far, if one kept the budget.
"""


@click.command(
    cls=SectionedCommand,
    epilog=COMPRESS_EXAMPLES,
    short_help="Compress checkpoints, losslessly by default.",
)
@click.argument("inputs", nargs=-1, required=True, type=PATH, metavar="INPUT...")
@click.option(
    "-o", "--output", type=PATH, metavar="OUT", help="Output: a file, or for several inputs a folder."
)
@click.option(
    "--base",
    type=PATH,
    multiple=True,
    callback=only_one,
    metavar="FILE",
    help="Store what changed since this checkpoint.",
)
@click.option(
    "--chain",
    is_flag=True,
    help="Store each input as what changed since the one before, in order of their steps.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep outputs that are there and go on after them, as after a run that was killed.",
)
@method_options
@search_options
@click.option(
    "--optimizer",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="Optimizer state, stored with INPUT; one for each.",
)
@click.option(
    "--effort",
    type=click.Choice(["fast", "default", "small"]),
    default="default",
    help="How much time to spend on a smaller file.",
)
@writing_options
@click.pass_obj
def compress(session: Session, /, inputs: tuple[Path, ...], output: PathLike | None, **given: Any) -> None:
    """Compress checkpoints. Nothing is lost unless you name a method or a budget.

    INPUT is a .safetensors or torch file (.pt, .pth, .bin), a folder of shards or of
    torch.distributed.checkpoint, or standard input (-). Without -o, the output stands beside INPUT, or in it
    if it is a folder.
    """
    import ckptz
    from ckptz_cli.render import compressed_line, predicted_line, total_line

    said: set[str] = set()

    def show(report: CompressReport) -> None:
        is_prediction = report.is_dry_run and report.search is None
        session.add(report, predicted_line(report) if is_prediction else compressed_line(report))
        for note in report.notes:
            if note not in said:  # what is true of each file of a chain is said once
                session.note(f"{report.output}: {note}")
        said.update(report.notes)

    lossy = {name: given.pop(name) for name in NAMES}
    configs, search, groups = choose(lossy)
    given["target_size"] = lossy["target_size"]
    given["dry_run"] = bool(lossy["dry_run"]) and search is None
    given |= {**groups[INPUT], **groups[GUIDE]}
    roles = given.pop("tensor_roles", None)
    given["role_rules"] = () if roles is None else _rules_in(Path(roles))
    inputs = _without_guides(inputs, session)
    with contextlib.ExitStack() as held:
        if search is None:
            given["progress"] = held.enter_context(progress_bar())
        else:
            search = held.enter_context(search_view())(search)
        for config in configs:
            reports = ckptz.compress(inputs, output, config=config, search=search, on_report=show, **given)
    if n_there := len(inputs) - len(reports):
        session.note(f"{n_there} of {len(inputs)} outputs were there and stay as they are")
    if len(reports) > 1:
        session.say(total_line(reports))
    require_budgets(reports)


def _without_guides(inputs: Sequence[Path], session: Session) -> tuple[Path, ...]:
    """Leave out calibrations and the like, which patterns such as *.safetensors match, too."""
    from ckptz.guidance.files import guide_of

    if len(inputs) == 1:
        return tuple(inputs)
    guides = {path: guide for path in inputs if (guide := guide_of(path)) is not None}
    for path, guide in guides.items():
        session.note(f"{path}: skipped; a {guide} guides an encoder (--set guide.{guide}=FILE)")
    return tuple(path for path in inputs if path not in guides)


def _rules_in(path: Path) -> tuple[Rule, ...]:
    from ckptz.errors import ConfigError
    from ckptz.state.roles import load_rules

    try:
        return load_rules(path.read_text("utf-8"))
    except (UnicodeDecodeError, ConfigError) as error:
        what = error if isinstance(error, ConfigError) else "not a text file in UTF-8"
        raise ConfigError(f"{path}: {what}; input.tensor_roles takes a TOML file") from None


RESTORE_EXAMPLES: Final = """\b
Examples:
  ckptz restore model.ckptz                      writes model.safetensors beside it
  ckptz restore model.ckptz -o restored.safetensors
  ckptz restore - < model.ckptz > model.safetensors
  ckptz restore packed/checkpoint-64 -o back     a folder, as the Trainer resumes from it
  ckptz restore run/checkpoint-64 -o plain       the same, of CkptzTrainerMixin's own folder
  ckptz restore run@200 -o step-200.safetensors  the weights of a step, exact if they are there
  ckptz restore step-200.ckptz --search-path ../bases
  ckptz restore training.ckptz --to safetensors  a flat file of a torch checkpoint's tensors
  ckptz restore training.ckptz --to dcp          a folder of torch.distributed.checkpoint
"""


@click.command(cls=Verb, epilog=RESTORE_EXAMPLES, short_help="Write back what was compressed.")
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
    output, gives the weights of a step of a run. Of standard input (-), the file goes to standard output.
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


@click.command(cls=Verb, epilog=REBASE_EXAMPLES, short_help="Make a delta stand alone.")
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


@click.command(cls=Verb, epilog=PRUNE_EXAMPLES)
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
@storage_option
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

    DIR is a run of a Checkpointer, or of the adapters of the Trainer, Lightning, accelerate or
    torch.distributed.checkpoint, or what ckptz compress --chain wrote. The newest step always stays. A file
    that other files are still stored against stays too, a Checkpointer's hidden, until they are removed.
    Without rules, only unfinished files of killed writers are removed. A folder that was not written to its
    end is no step: it and all steps stay. Nothing is removed where names and files disagree about a step.

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
@click.option("-j", "--jobs", type=COUNT, metavar="N", help="Number of processes (default: all cores).")
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
    where = (
        f"kept in {printable(report.folder)}"
        if report.folder
        else "but no folder can be written to keep them in"
    )
    session.show(report, f"kernels of {', '.join(report.methods)}: ready, {where}, {report.seconds:.2f} s")
