"""The verbs of the command line: their options, one call of the library, and its printed report."""

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
    reading_options,
    storage_option,
    verb_options,
    writing_options,
)
from ckptz_cli.search_options import NAMES, choose, require_budgets, search_options, search_view
from ckptz_cli.session import Session, Verb, progress_bar

if TYPE_CHECKING:
    from ckptz.state.roles import Rule
    from ckptz.verbs.compress import CompressReport
    from ckptz.verbs.paths import PathLike
    from ckptz.verbs.restore import OutputKind

DIFFERENT: Final = 10  # exit code of `diff --exit-code`; no error uses it


# --- verbs that read ----------------------------------------------------------------------------

INSPECT_EXAMPLES: Final = """\b
Examples:
  ckptz inspect model.ckptz
  ckptz inspect model.ckptz --tensors
  ckptz inspect model.ckptz --json | jq .content_id
"""


@click.command(cls=Verb, epilog=INSPECT_EXAMPLES, short_help="Show the contents of a .ckptz file.")
@click.argument("file", type=PATH, metavar="FILE|DIR|DIR@STEP")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@reading_options
def inspect(session: Session, file: Path, tensors: bool, search_path: tuple[Path, ...]) -> None:
    """Show the contents of a .ckptz file without decoding it.

    Shows format, content id, chain, metadata, sizes, quality and the storage of tensors. FILE may be a folder
    (its newest file) or DIR@STEP. Bases may be missing.
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
@reading_options
def verify(session: Session, files: tuple[Path, ...], against: Path | None, **how: Any) -> None:
    """Check every stored byte and every decoded value of files and their chains.

    With --against, also compare names, dtypes, shapes, metadata and all bits with ORIGINAL; lossy tensors
    must be within their recorded errors.

    In a folder, every file that ckptz log lists is checked, and in a training run also that the files of each
    step belong together. Bases that are links are not compared with ORIGINAL. The first failure determines
    the exit code; the other files are still checked.
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
            session.fail(error, str(file))


def _files_of(paths: Sequence[Path], session: Session) -> Iterator[tuple[Path, bool]]:
    """Yield (file, is_base) for all files; folders are expanded to the files that `log` lists.

    `is_base` is True for links that are in a folder only as bases of other files.
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
                what = "contains no .ckptz files; name a folder of checkpoints, or a file with --against"
                raise ConfigError(f"{path}: {what}")
            bases = second_names(files)
            yield from ((file, file in bases) for file in files)
        except (CkptzError, OSError) as error:
            session.fail(error, str(path))
    for folder in filter(Path.is_dir, paths):
        for file, mismatch in mismatched_pairs(folder):
            session.fail(mismatch, str(file))
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
@reading_options
def log(session: Session, folder: Path, search_path: tuple[Path, ...]) -> None:
    """List the checkpoints of a folder, each below its base, without decoding them.

    DIR (default: the working folder) is a run of a Checkpointer, the Trainer or Lightning, or the output of
    ckptz compress --chain. Unreadable files and missing bases are listed too; the first of them determines
    the exit code.
    """
    import ckptz
    from ckptz_cli.tables import logged_text

    problems: list[Exception] = []
    report = ckptz.log(folder, search_path=search_path, on_error=problems.append)
    session.show(report, logged_text(report), problems=problems)


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
    "--exit-code", is_flag=True, help=f"Exit with code {DIFFERENT} if they differ; metadata are ignored."
)
@jobs_option
@reading_options
def diff(session: Session, first: Path, second: Path, exit_code: bool, **how: Any) -> None:
    """Show what changed from checkpoint A to checkpoint B, tensor by tensor.

    The tensors with the largest relative change come first. A and B may be .ckptz, .safetensors or torch
    files, folders of shards, or steps of a run: DIR@STEP, or DIR for the newest one. All files of a step are
    compared, with their residual files. Changed plain values, such as learning rates, and random states are
    listed too.

    The exit code is 0 even if they differ, unless --exit-code is set.
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
    "-o", "--output", type=PATH, default=Path("report.html"), show_default=True, help="Output file."
)
@click.option(
    "--histogram",
    "histograms",
    multiple=True,
    metavar="NAME",
    help="Show a histogram of the tensors of this name (wildcards: * and ?); repeatable.",
)
@jobs_option
@force_option
@reading_options
def report(session: Session, paths: tuple[Path, ...], output: PathLike, **how: Any) -> None:
    """Write an HTML page with charts of sizes, errors and the history of a run.

    PATH is a folder of a run; a .ckptz file; two files of any format to compare; or a .json report of
    compress --json, with the trials of a search.

    The page is a single file, works offline, and includes all numbers as JSON. Tensors are only decoded for
    histograms and comparisons. Unreadable files and missing bases are shown too; the first of them determines
    the exit code. An existing report page is replaced.
    """
    import ckptz
    from ckptz_cli.render import reported_line

    problems: list[Exception] = []
    with progress_bar() as progress:
        page = ckptz.report(paths, output, on_error=problems.append, progress=progress, **how)
    session.show(page, reported_line(page), problems=problems)


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
If no settings meet the budget, the file is lossless and the exit code is 6.
Ctrl-C stops a search and writes the best file so far that meets the budget.
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
    help="Store the output as a delta to this checkpoint.",
)
@click.option(
    "--chain",
    is_flag=True,
    help="Store each output as a delta to the one before, in order of their steps.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep existing outputs and write the others, as after a killed run.",
)
@method_options
@search_options
@click.option(
    "--optimizer",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="Optimizer state to store with INPUT; one for each input.",
)
@click.option(
    "--effort",
    type=click.Choice(["fast", "default", "small"]),
    default="default",
    help="Time to spend on a smaller file.",
)
@writing_options
def compress(session: Session, inputs: tuple[Path, ...], output: PathLike | None, **options: Any) -> None:
    """Compress checkpoints, losslessly unless you choose a lossy method or a budget.

    INPUT is a .safetensors or torch file (.pt, .pth, .bin), a folder of shards or of
    torch.distributed.checkpoint, or standard input (-). Without -o, the output is beside INPUT, or in it
    if it is a folder.
    """
    import ckptz
    from ckptz_cli.render import compressed_line, total_line

    printed: set[str] = set()

    def show(report: CompressReport) -> None:
        session.add(report, compressed_line(report))
        for note in report.notes:
            if note not in printed:  # the files of a chain often have the same notes
                session.note(f"{report.output}: {note}")
        printed.update(report.notes)

    method_and_search = {name: options.pop(name) for name in NAMES}
    configs, search, groups = choose(method_and_search)
    options["target_size"] = method_and_search["target_size"]
    options["dry_run"] = bool(method_and_search["dry_run"]) and search is None
    options |= {**groups[INPUT], **groups[GUIDE]}
    roles = options.pop("tensor_roles", None)
    options["role_rules"] = () if roles is None else _rules_in(Path(roles))
    inputs, output = _without_guides(inputs, output, session)
    with contextlib.ExitStack() as stack:
        if search is None:
            options["progress"] = stack.enter_context(progress_bar())
        else:
            search = stack.enter_context(search_view())(search)
        for config in configs:
            reports = ckptz.compress(inputs, output, config=config, search=search, on_report=show, **options)
    if n_kept := len(inputs) - len(reports):
        session.note(f"{n_kept} of {len(inputs)} outputs existed and were kept")
    if len(reports) > 1:
        session.say(total_line(reports))
    require_budgets(reports)


def _without_guides(
    inputs: Sequence[Path], output: PathLike | None, session: Session
) -> tuple[tuple[Path, ...], PathLike | None]:
    """Leave out files of side information, which wildcards such as *.safetensors match too.

    Returns:
        (the other inputs, the output: with one input left still the folder that several inputs need).
    """
    from ckptz.format.suffixes import SUFFIX
    from ckptz.guidance.files import guide_of

    if len(inputs) == 1:
        return tuple(inputs), output
    guides = {path: guide for path in inputs if (guide := guide_of(path)) is not None}
    for path, guide in guides.items():
        session.note(f"{path}: skipped, a {guide} file is not an input (use --set guide.{guide}=FILE)")
    left = tuple(path for path in inputs if path not in guides)
    if len(left) == 1 and output is not None and Path(output).suffix != SUFFIX:
        output = f"{output}/"
    return left, output


def _rules_in(path: Path) -> tuple[Rule, ...]:
    from ckptz.errors import ConfigError
    from ckptz.state.roles import load_rules

    try:
        return load_rules(path.read_text("utf-8"))
    except (UnicodeDecodeError, ConfigError) as error:
        what = error if isinstance(error, ConfigError) else "not a text file in UTF-8"
        raise ConfigError(f"{path}: {what}; input.tensor_roles must be a TOML file") from None


RESTORE_EXAMPLES: Final = """\b
Examples:
  ckptz restore model.ckptz                      writes model.safetensors beside it
  ckptz restore model.ckptz -o restored.safetensors
  ckptz restore - < model.ckptz > model.safetensors
  ckptz restore packed/checkpoint-64 -o back     a folder of the Trainer
  ckptz restore run/checkpoint-64 -o plain       a folder of CkptzTrainerMixin, for the plain Trainer
  ckptz restore run@200 -o step-200.safetensors  the weights of a step
  ckptz restore step-200.ckptz --search-path ../bases
  ckptz restore training.ckptz --to safetensors  the tensors of a torch checkpoint
  ckptz restore training.ckptz --to dcp          a folder of torch.distributed.checkpoint
"""


@click.command(cls=Verb, epilog=RESTORE_EXAMPLES, short_help="Decode checkpoints to their original format.")
@click.argument("file", type=PATH, metavar="FILE|DIR|DIR@STEP")
@click.option("-o", "--output", type=PATH, metavar="OUT", help="Output file or folder.")
@click.option(
    "--to",
    "kind",
    type=click.Choice(["safetensors", "pt", "dcp"]),
    help="Format of the output (default: the original format).",
)
@writing_options
def restore(
    session: Session, file: Path, output: PathLike | None, kind: OutputKind | None, **how: Any
) -> None:
    """Decode a checkpoint to its original format; a lossless file is restored bit for bit.

    A folder of shards becomes a folder and a torch file a torch file, unless --to or the suffix of the output
    names another format. All values are checked against stored checksums. DIR@STEP restores the weights of a
    step of a run, and needs -o. Standard input (-) is restored to standard output.
    """
    import ckptz
    from ckptz_cli.render import restored_line

    with progress_bar() as progress:
        report = ckptz.restore(file, output, to=kind, progress=progress, **how)
    session.show(report, restored_line(report), report.notes)


REBASE_EXAMPLES: Final = """\b
Examples:
  ckptz rebase step-200.ckptz
  ckptz rebase step-200.ckptz -o step-200-full.ckptz
"""


@click.command(cls=Verb, epilog=REBASE_EXAMPLES, short_help="Make a delta self-contained.")
@click.argument("file", type=PATH)
@click.option("-o", "--output", type=PATH, metavar="OUT", help="Write here instead of replacing FILE.")
@writing_options
def rebase(session: Session, file: Path, output: PathLike | None, **how: Any) -> None:
    """Rewrite a delta as a self-contained file, so that its bases can be deleted.

    Values and content id do not change, so deltas to FILE remain readable. Lossless tensors are encoded
    without a base. Lossy tensors are copied with the tensors of their bases, because later deltas may need
    their codes; this takes about as much space as their chain. FILE is replaced after the new file is read
    back and verified.
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
    "--higher-is-better", is_flag=True, help="With --keep-best: higher metrics are better (default: lower)."
)
@click.option("--keep-weights-last", type=COUNT, metavar="N", help="Keep the weights of the N newest steps.")
@click.option(
    "--keep-weights-every", type=COUNT, metavar="K", help="Keep the weights of steps that are multiples of K."
)
@click.option(
    "--keep-exact",
    type=click.IntRange(min=0),
    metavar="N",
    help="Keep the residual files of the N newest lossy steps (default: all).",
)
@click.option(
    "--after", type=click.IntRange(min=0), metavar="STEP", help="First remove all steps after this one."
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@storage_option
@verb_options
def prune(session: Session, folder: Path, after: int | None, dry_run: bool, **rules: Any) -> None:
    """Remove the steps of a training run that no rule keeps.

    DIR is a run of a Checkpointer, of the adapters of the Trainer, Lightning, accelerate or
    torch.distributed.checkpoint, or the output of ckptz compress --chain. The newest step is always kept, and
    so is every base of a kept file (in a run of a Checkpointer as a hidden file). Without rules, only
    unfinished files of killed writers are removed. Nothing is removed if a folder is incomplete, or if names
    and files contradict each other about a step.

    Residual files *.exact-*.ckptz, which make lossy steps exact, are removed with their step, or earlier
    with --keep-exact.
    """
    import ckptz
    from ckptz.run.keep import keep_policy
    from ckptz_cli.render import pruned_text

    policy = keep_policy(
        steps=(rules["keep_last"], rules["keep_every"], rules["keep_best"]),
        weights=(rules["keep_weights_last"], rules["keep_weights_every"], None),
        lower_is_better=not rules["higher_is_better"],
        exact=rules["keep_exact"],
    )
    report = ckptz.prune(folder, policy, after=after, dry_run=dry_run)
    session.show(report, pruned_text(report), report.notes)


WARM_UP_EXAMPLES: Final = """\b
Examples:
  ckptz warm-up
  RUN pip install ckptz && NUMBA_CACHE_DIR=/opt/ckptz-kernels ckptz warm-up     in a Dockerfile
"""


@click.command("warm-up", epilog=WARM_UP_EXAMPLES, short_help="Compile all kernels ahead of time.")
@click.option("-j", "--jobs", type=COUNT, metavar="N", help="Number of processes (default: all cores).")
@verb_options
def warm_up(session: Session, jobs: int | None) -> None:
    """Compile all kernels ahead of time, for example in a container image.

    Otherwise each command compiles the kernels that it needs on first use, once per machine. Kernels are
    cached beside the package, in the home directory if that is not writable, or in NUMBA_CACHE_DIR. The cache
    is only valid for the type of processor that compiled it.
    """
    import ckptz

    report = ckptz.warm_up(jobs=jobs)
    where = (
        f"cached in {printable(report.folder)}"
        if report.folder
        else "but not cached, as no folder is writable"
    )
    session.show(report, f"kernels of {', '.join(report.methods)} compiled, {where}, {report.seconds:.2f} s")
