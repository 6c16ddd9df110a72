"""`ckptz rebase`, `ckptz fold`, `ckptz export` and `ckptz apply`: what is done with deltas of a chain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.options import PATH, writing_options
from ckptz_cli.session import Session, progress_bar

if TYPE_CHECKING:
    from ckptz.formats.targets import PathLike

REBASE_EPILOG: Final = """\b
Examples:
  ckptz rebase step-200.ckptz
  ckptz rebase step-200.ckptz -o step-200-alone.ckptz
"""
FOLD_EPILOG: Final = """\b
Examples:
  ckptz fold step-10.ckptz..step-20.ckptz -o step-20.from-10.ckptz
  ckptz fold 10..20 --folder run/weights -o folded.ckptz
"""
EXPORT_EPILOG: Final = """\b
Examples:
  ckptz export run/step-20.ckptz -o step-20-alone.ckptz
  ckptz export 20 --folder run/weights -o model.safetensors
"""
APPLY_EPILOG: Final = """\b
Examples:
  ckptz apply step-11.ckptz --to model.safetensors -o model-11.safetensors
  ckptz apply step-11.ckptz --to model.safetensors --in-place
"""

folder_option = click.option(
    "--folder",
    type=PATH,
    default=Path(),
    metavar="DIR",
    help="Folder in which steps are looked up (default: the working folder).",
)


@click.command(epilog=REBASE_EPILOG, short_help="Make a delta stand alone.")
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
    from ckptz_cli.render_chains import rebased_line

    with progress_bar() as progress:
        report = ckptz.rebase(file, output, progress=progress, **how)
    session.show(report, rebased_line(report))


@click.command(epilog=FOLD_EPILOG, short_help="Write one delta in place of several.")
@click.argument("between", metavar="A..B")
@click.option("-o", "--output", type=PATH, required=True, metavar="OUT", help="The delta to write.")
@folder_option
@writing_options
@click.pass_obj
def fold(session: Session, /, between: str, output: PathLike, **how: Any) -> None:
    """Write one delta in place of several: from checkpoint A straight to checkpoint B, bit for bit.

    A and B are files, or numbers of steps, which are looked up in DIR.
    """
    import ckptz
    from ckptz_cli.render_chains import folded_line

    with progress_bar() as progress:
        report = ckptz.fold(between, output, progress=progress, **how)
    session.show(report, folded_line(report))


@click.command(epilog=EXPORT_EPILOG)
@click.argument("step", metavar="STEP")
@click.option(
    "-o", "--output", type=PATH, required=True, metavar="FILE", help="Output file, .ckptz or .safetensors."
)
@folder_option
@writing_options
@click.pass_obj
def export(session: Session, /, step: str, output: PathLike, **how: Any) -> None:
    """Write one step of a chain as a file that needs no other.

    STEP is a file, or the number of a step, which is looked up in DIR. In a training run whose files are
    lossy, the number gives the exact values of the step if they are there, and a file its own.
    """
    import ckptz
    from ckptz_cli.render_chains import exported_line

    if not step:
        raise click.UsageError("STEP is empty; name a file or a step")
    with progress_bar() as progress:
        report = ckptz.export(step, output, progress=progress, **how)
    session.show(report, exported_line(report))


@click.command(epilog=APPLY_EPILOG, short_help="Bring a plain checkpoint up to date with a delta.")
@click.argument("delta", type=PATH)
@click.option(
    "--to", "base", type=PATH, required=True, metavar="FILE", help="Checkpoint that DELTA was made from."
)
@click.option("-o", "--output", type=PATH, metavar="OUT", help="The .safetensors file to write.")
@click.option("--in-place", is_flag=True, help="Replace FILE when the new one is complete.")
@writing_options
@click.pass_obj
def apply(
    session: Session, /, delta: Path, base: Path, output: PathLike | None, in_place: bool, **how: Any
) -> None:
    """Bring a plain checkpoint up to date with a delta.

    FILE must hold the tensors that DELTA was made from. Its name and place do not matter.
    """
    import ckptz
    from ckptz_cli.render_chains import applied_line

    if in_place == (output is not None):
        raise click.UsageError("name an output with -o, or replace FILE with --in-place")
    with progress_bar() as progress:
        report = ckptz.apply(delta, base, output, progress=progress, **how)
    session.show(report, applied_line(report))
