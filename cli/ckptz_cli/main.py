"""The command `ckptz`: each verb parses its options, calls the library once and prints the report.

Verbs import the library inside their functions, so that `--help` stays fast.
"""

from __future__ import annotations

import contextlib
import gc
import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final, NoReturn

import click

from ckptz._version import __version__
from ckptz_cli.options import session_options
from ckptz_cli.session import USAGE, Session
from ckptz_cli.verbs import compress, diff, inspect, log, prune, rebase, report, restore, verify, warm_up

# Sent by a scheduler, and when a terminal closes; Windows lacks SIGHUP.
STOPS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
SIGNALLED: Final = 128  # the exit code is this and the signal's number, as shells report it

EPILOG: Final = """\b
Examples:
  ckptz compress model.safetensors
  ckptz compress step-2.safetensors --base step-1.ckptz
  ckptz restore model.ckptz -o restored.safetensors
  ckptz verify model.ckptz --against model.safetensors

\b
Exit codes:
    0  done
    1  an error in ckptz
    2  wrong usage
    3  damaged file
    4  unsupported
    5  file or base missing
    6  quality budget not met (written without loss)
    7  disk
   10  checkpoints differ (diff --exit-code)
  130  interrupted
"""


class Program(click.Group):
    """The command group; an error is one line on stderr and an exit code for its cause."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """Run a command line, by default that of the process, and exit."""
        words = sys.argv[1:] if args is None else list(args)
        session = Session(words)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # its encoding may lack characters of tensor names
                stream.reconfigure(errors="backslashreplace")
        with _exit_on_signals():
            try:
                super().main(words or ["--help"], "ckptz", standalone_mode=False, obj=session)
            except Exception as error:
                session.fail(error)
            sys.exit(session.finish() or (0 if words else USAGE))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return a verb; for `decompress` suggest `restore`, where click would suggest `compress`."""
        if args[0] == "decompress":
            ctx.fail("No such command 'decompress'. Did you mean 'restore'?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the verbs in the order in which they were added."""
        del ctx
        return list(self.commands)


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn termination signals into SystemExit, so that temporary files are removed."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(SIGNALLED + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        from ckptz.format.index import FORMAT_VERSION

        click.echo(f"ckptz {__version__} (format {FORMAT_VERSION})")
        context.exit()


@click.group(cls=Program, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print the versions of ckptz and of the format.",
)
@session_options
def main() -> None:
    """Compress training checkpoints, and restore them.

    Compression is lossless by default. A delta to an earlier checkpoint is smaller; a lossy file, with a
    method or a quality budget, is many times smaller. See also `ckptz VERB --help`.
    """
    # Collecting garbage among a million index entries takes a fifth of the time.
    gc.set_threshold(100_000)


for _verb in (compress, restore, inspect, verify, log, report, diff, rebase, prune, warm_up):
    main.add_command(_verb)

if __name__ == "__main__":
    main()
