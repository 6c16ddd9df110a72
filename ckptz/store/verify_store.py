"""What is wrong with a folder of steps beyond its single files: mismatched pairs, leftovers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ckptz.errors import CkptzError, ConfigError, CorruptionError
from ckptz.store.resolve import SUFFIX
from ckptz.store.step_files import StepFile
from ckptz.store.steps import StepStore


def checkpoint_files(folder: Path) -> list[Path]:
    """List every `.ckptz` file of a folder by name, bases that are kept for others included.

    Raises:
        ConfigError: there is none.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX))
    if not names:
        raise ConfigError(
            f"{folder}: holds no {SUFFIX} files; name a folder of checkpoints, or write checksums of other "
            "files with ckptz seal while they are whole"
        )
    return [folder / name for name in names]


def mismatched_pairs(folder: Path) -> list[tuple[Path, CorruptionError]]:
    """Find files of a Checkpointer's store whose weights and state are not of one moment, with errors.

    A folder of anything else has none. What cannot be read is for `verify_file` to complain of.
    """
    found = []
    with contextlib.closing(StepStore(folder)) as store:
        listing = store.listing()
        for step in listing.full_steps:
            weights, state = StepFile(step, "weights"), StepFile(step, "state")
            with contextlib.suppress(CkptzError, OSError):
                wanted = store.facts(state, listing.sizes[state]).weights
                if wanted not in (None, store.facts(weights, listing.sizes[weights]).content_id):
                    path = folder / state.name
                    what = f"{path}: belongs to other weights than {weights.name} holds"
                    found.append((path, CorruptionError(f"{what}; resume from another step")))
    return found


def leftovers(folder: Path) -> tuple[str, ...]:
    """Name the files that a killed writer left; the next writer and `ckptz prune` remove them."""
    with contextlib.closing(StepStore(folder)) as store:
        return store.listing().leftovers
