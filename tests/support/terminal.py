"""Command lines on a terminal of their own: what somebody who looks at it sees in the end.

As a program it runs command lines one after another, each on a new pseudo-terminal in a process that it
forks, so that the library loads once. Cases come as JSON on stdin, and what was shown goes back as JSON.
"""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import pyte

LINES = 200  # of the screen: nothing scrolls away
TIMEOUT = 100.0
WAITING = "\x1b]2;waiting\x07"  # the title of a window, which no screen shows
CTRL_C = b"\x03"
FEW = 5  # cases


@dataclass(frozen=True)
class Case:
    """A command line and its terminal."""

    args: list[str]
    cwd: str
    columns: int = 100
    is_interrupted: bool = False  # by Ctrl-C, when it opens its first file


@dataclass(frozen=True)
class Shown:
    """What a command line wrote, and how it ended."""

    raw: str
    exit_code: int
    columns: int

    @cached_property
    def _screen(self) -> pyte.Screen:
        screen = pyte.Screen(self.columns, LINES)
        pyte.Stream(screen).feed(self.raw)
        return screen

    @property
    def lines(self) -> list[str]:
        """The lines that stand there in the end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n").split("\n")

    @property
    def is_tidy(self) -> bool:
        """Whether the next prompt stands right below, at the beginning of a line, with a cursor."""
        cursor = self._screen.cursor
        return not cursor.hidden and (cursor.x, cursor.y) == (0, len(self.lines))


def shown(cases: Iterable[Case]) -> list[Shown]:
    """Run command lines on terminals, all by one child process that forks."""
    wanted = list(cases)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.terminal"],
        input=json.dumps([asdict(case) for case in wanted]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={
            **{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")},
            "TERM": "xterm-256color",
        },
    )
    found = json.loads(done.stdout)
    return [Shown(raw, code, case.columns) for (raw, code), case in zip(found, wanted, strict=True)]


# --- the program ----------------------------------------------------------------------------------


def _run(case: Case) -> tuple[str, int]:
    process, terminal = pty.fork()
    if process == 0:
        _be_command(case)
    raw, is_typed, end = b"", not case.is_interrupted, time.monotonic() + TIMEOUT
    with contextlib.suppress(OSError):  # when all other ends of the terminal are closed
        while select.select([terminal], [], [], max(0, end - time.monotonic()))[0]:
            raw += os.read(terminal, 1 << 16)
            if not is_typed and WAITING.encode() in raw:
                os.write(terminal, CTRL_C)
                is_typed = True
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL if time.monotonic() > end else 0)
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    return raw.decode(errors="replace"), os.waitstatus_to_exitcode(status)


def _be_command(case: Case) -> NoReturn:
    """Be the command line, in a process of its own whose streams are the terminal."""
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, case.columns, 0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(case.cwd)
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, closefd=False, buffering=1)  # noqa: SIM115
        for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if case.is_interrupted:
        _wait_for_ctrl_c()
    try:
        ckptz_cli.main.main(case.args)
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    finally:
        os._exit(70)  # it must end by SystemExit


def _wait_for_ctrl_c() -> None:
    """Let whoever opens a file first tell that it waits, and wait."""
    from ckptz.format.byte_source import FileBytes

    def opening(self: FileBytes, path: Any) -> None:
        os.write(1, WAITING.encode())
        time.sleep(TIMEOUT)

    FileBytes.__init__ = opening


if __name__ == "__main__":
    import ckptz_cli.main  # once, for all that are forked
    from tests.support.cli_support import a_state, ckptz, write_plain

    wanted = [Case(**case) for case in json.load(sys.stdin)]
    if len(wanted) > FEW:
        with tempfile.TemporaryDirectory() as warm:  # kernels load once, too
            ckptz("compress", *(write_plain(Path(warm) / name, a_state()) for name in "ab"), "--chain")
            ckptz("restore", Path(warm) / "b.ckptz")
    print(json.dumps([_run(case) for case in wanted]))
