"""`ckptz seal`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptz_cli.options import PATH, force_option, jobs_option, session_options
from ckptz_cli.session import Session, progress_bar

EPILOG = """\b
Examples:
  ckptz seal model.safetensors
  ckptz seal downloaded-model checkpoint-500/pytorch_model_fsdp_0
  ckptz verify downloaded-model
"""


@click.command(epilog=EPILOG, short_help="Write checksums of files that are not .ckptz.")
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FOLDER|FILE...")
@force_option
@jobs_option
@session_options
@click.pass_obj
def seal(session: Session, files: tuple[Path, ...], force: bool, jobs: int | None) -> None:
    """Write checksums of files that are not .ckptz into one small file beside them; ckptz verify checks them.

    Of safetensors files and folders of torch.distributed.checkpoint every tensor is sealed, of other files
    (config, tokenizer) all bytes. A folder's seal is ckptz-seal.json in it and goes along when it is copied,
    a file's stands beside it.

    A seal finds bit rot, cut uploads and mixed-up shards. It is no signature: whoever can change the files
    can change the seal.
    """
    import ckptz
    from ckptz_cli.render import sealed_line

    for file in files:
        try:
            with progress_bar() as progress:
                report = ckptz.seal(file, force=force, jobs=jobs, progress=progress)
            session.add(report, sealed_line(report))
            if report.left_out:
                session.note(f"{file}: not sealed: {', '.join(report.left_out)}")
        except Exception as error:
            session.add_failure(str(file), error)
