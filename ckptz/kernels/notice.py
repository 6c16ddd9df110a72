"""Says on stderr, once a process, that kernels are being compiled: the first use on a machine takes long.

It listens to the compiler itself. Looking for cache files would err where the cache stands elsewhere,
belongs to an older version, or lacks just the kernel that is needed.
"""

from __future__ import annotations

import sys
from typing import Final

from numba.core import event

from ckptz.kernels import cache

NOTICE: Final = "ckptz: compiling kernels that were not needed here before (ahead: ckptz warm-up)"


class _CompilationNotice(event.Listener):
    """Prints `NOTICE` when the first of our own kernels starts to compile."""

    def __init__(self) -> None:
        self.is_said = False

    def on_start(self, event: event.Event) -> None:
        """A dispatcher found nothing in its cache."""
        dispatcher = event.data["dispatcher"]
        if self.is_said or not dispatcher.py_func.__module__.startswith("ckptz."):
            return
        self.is_said = True
        print(NOTICE + cache.note(), file=sys.stderr, flush=True)

    def on_end(self, event: event.Event) -> None:
        """Nothing to say."""


# One for the process: threads that come here together register it twice, and it still speaks once.
_notice: Final = _CompilationNotice()


def listen() -> None:
    """Begin to watch for compilation."""
    event.register("numba:compile", _notice)  # type: ignore[no-untyped-call]  # numba has no types


def be_silent() -> None:
    """Stop the notice in this process, which compiles because it was asked to."""
    _notice.is_said = True
