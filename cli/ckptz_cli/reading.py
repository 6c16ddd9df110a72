"""Verbs that only read checkpoints: `inspect`, `verify`, `log`, `diff` and `report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.options import PATH, force_option, jobs_option, search_path_option, session_options
from ckptz_cli.session import Session, progress_bar

if TYPE_CHECKING:
    from ckptz.foreign.targets import PathLike

DIFFERENT: Final = 10  # exit code of `diff --exit-code`; no error has it


INSPECT_EXAMPLES: Final = """\b
Examples:
  ckptz inspect model.ckptz
  ckptz inspect model.ckptz --tensors
  ckptz inspect model.ckptz --json | jq .content_id
"""


@click.command(epilog=INSPECT_EXAMPLES, short_help="Show what a .ckptz file holds, without decoding it.")
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


@click.command(epilog=VERIFY_EXAMPLES, short_help="Check every stored byte and every value.")
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
    from ckptz_cli.render import verified_line

    for file in _files_of(files, session):
        try:
            with progress_bar() as progress:
                report = ckptz.verify(file, progress=progress, **how)
            session.add(report, verified_line(report))
        except Exception as error:
            session.add_failure(str(file), error)


def _files_of(paths: Sequence[Path], session: Session) -> Iterator[Path]:
    """Give files as they are, and of folders the files that `log` lists; one without any is a failure."""
    from ckptz.errors import CkptzError, ConfigError
    from ckptz.format.byte_source import is_folder
    from ckptz.run.folder import leftovers, mismatched_pairs
    from ckptz.run.names import run_files

    for path in paths:
        try:
            if not is_folder(path):
                yield path
                continue
            left = {path / name for name in leftovers(path)}
            files = [file for file in run_files(path) if file not in left]
            if not files:
                what = "holds no .ckptz files; name a folder of checkpoints, or a file with --against"
                raise ConfigError(f"{path}: {what}")
            yield from files
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


@click.command(epilog=LOG_EXAMPLES, short_help="List the checkpoints of a folder and their bases.")
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


@click.command(epilog=DIFF_EXAMPLES, short_help="Show what changed between two checkpoints.")
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


@click.command(epilog=REPORT_EXAMPLES, short_help="Write a page with charts of checkpoints.")
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
