"""ckptz: checkpoint compression that loads like safetensors.

    from ckptz.torch import load_file, save_file  # in place of safetensors.torch
    from ckptz import safe_open

    ckptz.compress("step-200.safetensors", base="step-100.ckptz")  # and every other verb of the command line

Nothing heavy loads with this module: names come when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptz import lazy
from ckptz._version import __version__

if TYPE_CHECKING:
    from ckptz.api.read import safe_open
    from ckptz.codec.grid import Grid
    from ckptz.codec.kmeans import KMeans
    from ckptz.codec.lossless import LOSSLESS, Lossless
    from ckptz.codec.moments import Moments
    from ckptz.codec.registry import register
    from ckptz.errors import CkptzError
    from ckptz.run.keep import KeepPolicy, KeepRules
    from ckptz.search.budget import Budget, SearchOptions
    from ckptz.search.measures import Agreement, ResumeProbe
    from ckptz.training.checkpointer import Checkpointer
    from ckptz.verbs.compress import compress
    from ckptz.verbs.diff import diff
    from ckptz.verbs.log import inspect, log
    from ckptz.verbs.prune import prune
    from ckptz.verbs.rebase import rebase
    from ckptz.verbs.report import report
    from ckptz.verbs.restore import restore
    from ckptz.verbs.verify import verify
    from ckptz.verbs.warm_up import warm_up

__all__ = [
    "LOSSLESS",
    "Agreement",
    "Budget",
    "Checkpointer",
    "CkptzError",
    "Grid",
    "KMeans",
    "KeepPolicy",
    "KeepRules",
    "Lossless",
    "Moments",
    "ResumeProbe",
    "SearchOptions",
    "__version__",
    "compress",
    "diff",
    "inspect",
    "log",
    "prune",
    "rebase",
    "register",
    "report",
    "restore",
    "safe_open",
    "verify",
    "warm_up",
]

# Where each public name is defined; its module loads with the first use of the name.
_HOMES: Final = {
    "LOSSLESS": "codec.lossless",
    "Agreement": "search.measures",
    "Budget": "search.budget",
    "Checkpointer": "training.checkpointer",
    "CkptzError": "errors",
    "Grid": "codec.grid",
    "KMeans": "codec.kmeans",
    "KeepPolicy": "run.keep",
    "KeepRules": "run.keep",
    "Lossless": "codec.lossless",
    "Moments": "codec.moments",
    "ResumeProbe": "search.measures",
    "SearchOptions": "search.budget",
    "__version__": "_version",
    "compress": "verbs.compress",
    "diff": "verbs.diff",
    "inspect": "verbs.log",
    "log": "verbs.log",
    "prune": "verbs.prune",
    "rebase": "verbs.rebase",
    "register": "codec.registry",
    "report": "verbs.report",
    "restore": "verbs.restore",
    "safe_open": "api.read",
    "verify": "verbs.verify",
    "warm_up": "verbs.warm_up",
}
__getattr__, __dir__ = lazy.exports(__name__, _HOMES)
