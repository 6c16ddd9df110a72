"""`ckptz compress`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptz_cli.methods import config_of, method_options
from ckptz_cli.options import (
    PATH,
    debug_option,
    force_option,
    jobs_option,
    json_option,
    search_path_option,
)
from ckptz_cli.progress import progress_bar
from ckptz_cli.session import Session

if TYPE_CHECKING:
    from ckptz.roles import Rule

EPILOG = """\b
Examples:
  ckptz compress model.safetensors               writes model.ckptz beside it
  ckptz compress model.safetensors -o out.ckptz
  ckptz compress step-200.safetensors --base step-100.ckptz --step 200
  ckptz compress step-*.safetensors --chain -o run/
  ckptz compress hf-model-folder/ -o packed/
  ckptz compress training.pt                     a torch checkpoint, read without running code
  ckptz compress model.safetensors --method kmeans --levels 16 --protect 0.005
"""


@click.command(epilog=EPILOG)
@click.argument("inputs", nargs=-1, required=True, type=PATH, metavar="INPUT...")
@click.option(
    "-o", "--output", type=PATH, metavar="OUT", help="Output file; a folder if there are several inputs."
)
@click.option("--base", type=PATH, metavar="FILE", help="Store each input against this checkpoint.")
@click.option("--chain", is_flag=True, help="Store each input against the one before it.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="The training step, to be recorded.")
@method_options
@click.option(
    "--roles", type=PATH, metavar="FILE", help="TOML rows that name the role or layer type of tensors."
)
@jobs_option
@force_option
@search_path_option
@json_option
@debug_option
@click.pass_obj
def compress(
    session: Session,
    /,
    inputs: tuple[Path, ...],
    output: Path | None,
    base: Path | None,
    chain: bool,
    step: int | None,
    roles: Path | None,
    jobs: int | None,
    force: bool,
    search_path: tuple[Path, ...],
    **method: Any,
) -> None:
    """Compress checkpoints, without loss unless a method is named.

    INPUT is a .safetensors file, a torch file (.pt, .pth, .bin) or a Hugging Face folder of shards. The
    output is INPUT with the suffix .ckptz, or OUT.
    """
    from ckptz.convert.compress import CompressOptions, compress_files
    from ckptz_cli.render import compressed_line, total_line

    options = CompressOptions(
        base=base,
        chain=chain,
        step=step,
        jobs=jobs,
        force=force,
        search_path=search_path,
        config=config_of(**method),
        role_rules=_rules_in(roles) if roles else (),
    )
    reports = []
    with progress_bar() as progress:
        for report in compress_files(inputs, output, options, progress):
            reports.append(report)
            session.add(report, compressed_line(report))
            for note in report.notes:
                session.note(f"{report.output}: {note}")
    if len(reports) > 1:
        session.say(total_line(reports))


def _rules_in(path: Path) -> tuple[Rule, ...]:
    from ckptz.errors import ConfigError
    from ckptz.roles import load_rules

    try:
        return load_rules(path.read_text("utf-8"))
    except (UnicodeDecodeError, ConfigError) as error:
        what = error if isinstance(error, ConfigError) else "not a text file in UTF-8"
        raise ConfigError(f"{path}: {what}; --roles takes a TOML file") from None
